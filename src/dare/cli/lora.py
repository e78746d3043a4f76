"""`dare lora`: adapters into one adapter, and a model into an adapter."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import App, Parameter

from dare.cli import COMMANDS
from dare.cli.flags import Overwrite, RunSwitch, output_flag, runs, several
from dare.documents.shown import Shown
from dare.lora.extraction import extract_adapter
from dare.lora.merging import plan_adapters, run_plan

lora = App(name="lora", help=COMMANDS["lora"], help_format="rich", help_epilogue="")

Rank = Annotated[int | None, Parameter(help="Rank of the result.")]
Energy = Annotated[float | None, Parameter(help="Or: the share of the squared change to keep.")]
Output = Annotated[Path, output_flag("Directory of the adapter.")]
Type = Annotated[Literal["F32", "F16", "BF16"], Parameter(help="Storage type.")]


def _merge(
    adapters: list[Path], *, output: Path, dry_run: bool, overwrite: bool, **settings: Any
) -> Shown:
    plan = plan_adapters(adapters, **settings)
    return plan if dry_run else run_plan(plan, output, overwrite=overwrite)


@lora.command
@runs(_merge)
def merge(
    adapters: list[Path],
    /,
    *,
    output: Output,
    weights: Annotated[list[float] | None, several("--weight")] = None,
    method: str = "linear",
    rank: Rank = None,
    energy: Energy = None,
    drop_rate: float | None = None,
    seed: int = 42,
    scale: float = 1.0,
    dtype: Type = "F32",
    threads: int | None = None,
    max_memory: str | None = None,
    dry_run: RunSwitch = False,
    overwrite: Overwrite = False,
) -> None:
    """Merge LoRA adapters into one, without the base.

    Without --rank and --energy the result is exact, and its rank the sum of the ranks.

    :param adapters: LoRA adapters of one base, from PEFT.
    :param weights: Weights, one for each adapter.
    :param method: As in a merge: sum, dare+linear, ties, …
    :param drop_rate: Share of each delta to drop.
    :param max_memory: Memory for buffers and factors.
    :param dry_run: Show the plan, but do not merge.
    """


@lora.command
@runs(extract_adapter)
def extract(
    *,
    base: Annotated[Path, Parameter(["--base", "-b"])],
    model: Annotated[Path, Parameter(["--model", "-m"])],
    output: Output,
    rank: Rank = None,
    energy: Energy = None,
    modules: Annotated[list[str] | None, several()] = None,
    save_others: Annotated[bool, Parameter(negative="")] = False,
    base_name: str | None = None,
    as_stored: Annotated[bool, Parameter(negative="")] = False,
    dtype: Type = "F32",
    overwrite: Overwrite = False,
) -> None:
    """Extract a LoRA from a fine-tuned model: its change to the base, cut to a rank.

    :param base: The model before fine-tuning.
    :param model: The fine-tuned model.
    :param modules: Patterns of modules to take.
    :param save_others: Store other changed tensors in full.
    :param base_name: Name of the base in the adapter, if not that of its folder.
    :param as_stored: Take names from the file, not from transformers.
    """
