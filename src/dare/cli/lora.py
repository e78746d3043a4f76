"""`dare lora`: adapters into one adapter, and a model into an adapter."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import App, Parameter

from dare.cli import show
from dare.cli.flags import RUN, Overwrite, output_flag, runs, several, switch
from dare.cli.texts import COMMANDS
from dare.lora.extraction import extract_adapter
from dare.lora.merging import plan_adapters, run_plan

lora = App(name="lora", help=COMMANDS["lora"], help_format="rich", help_epilogue="")

Rank = Annotated[int | None, Parameter(help="Rank of the result.")]
Energy = Annotated[float | None, Parameter(help="Or: the share of the squared change to keep.")]
Output = Annotated[Path, output_flag("Directory of the adapter.")]
Type = Annotated[Literal["F32", "F16", "BF16"], Parameter(help="Storage type.")]


def _merge(
    adapters: list[Path], *, output: Path, dry_run: bool, overwrite: bool, **settings: Any
) -> show.Result:
    plan = plan_adapters(adapters, **settings)
    return plan if dry_run else run_plan(plan, output, overwrite=overwrite)


@lora.command
@runs(_merge)
def merge(
    adapters: Annotated[list[Path], Parameter(help="LoRA adapters of one base, from PEFT.")],
    /,
    *,
    output: Output,
    weights: Annotated[
        list[float] | None, several("Weights, one for each adapter.", name="--weight")
    ] = None,
    method: Annotated[str, Parameter(help="As in a merge: sum, dare+linear, ties, …")] = "linear",
    rank: Rank = None,
    energy: Energy = None,
    drop_rate: Annotated[float | None, Parameter(help="Share of each delta to drop.")] = None,
    seed: int = 42,
    scale: float = 1.0,
    dtype: Type = "F32",
    threads: int | None = None,
    max_memory: Annotated[str | None, Parameter(help="Memory for buffers and factors.")] = None,
    dry_run: Annotated[bool, switch("Show the plan, but do not merge.", group=RUN)] = False,
    overwrite: Overwrite = False,
) -> None:
    """Merge LoRA adapters into one, without the base.

    Without --rank and --energy the result is exact, and its rank the sum of the ranks.
    """


@lora.command
@runs(extract_adapter)
def extract(
    *,
    base: Annotated[Path, Parameter(name=["--base", "-b"], help="The model before fine-tuning.")],
    model: Annotated[Path, Parameter(name=["--model", "-m"], help="The fine-tuned model.")],
    output: Output,
    rank: Rank = None,
    energy: Energy = None,
    modules: Annotated[list[str] | None, several("Patterns of modules to take.")] = None,
    save_others: Annotated[
        bool, Parameter(negative="", help="Store other changed tensors in full.")
    ] = False,
    base_name: Annotated[
        str | None, Parameter(help="Name of the base in the adapter, if not that of its folder.")
    ] = None,
    as_stored: Annotated[
        bool, Parameter(negative="", help="Take names from the file, not from transformers.")
    ] = False,
    dtype: Type = "F32",
    overwrite: Overwrite = False,
) -> None:
    """Extract a LoRA from a fine-tuned model: its change to the base, cut to a rank."""
