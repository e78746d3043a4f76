"""`dare lora`: adapters into one adapter, and a model into an adapter."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import App, Parameter

from dare.cli import COMMANDS, HELP
from dare.cli.flags import (
    METHOD,
    PER_MODEL,
    RESOURCES,
    Overwrite,
    RunSwitch,
    StageFiles,
    output_flag,
    read_flag,
    runs,
    several,
    stage_flags,
)
from dare.documents.shown import Shown
from dare.lora.extraction import extract_adapter
from dare.lora.merging import Space, plan_adapters, run_plan

lora = App(name="lora", help=COMMANDS["lora"], help_format="rich", help_epilogue="")

Rank = Annotated[int | None, Parameter(help="Rank of the result.")]
Energy = Annotated[float | None, Parameter(help="Or: the share of the squared change to keep.")]
Output = Annotated[Path, output_flag("Directory of the adapter.")]
Type = Annotated[Literal["F32", "F16", "BF16"], Parameter(help="Storage type.")]
MODEL_SEED = "model_seed"


def _merge(
    adapters: list[Path],
    *,
    output: Path,
    dry_run: bool,
    overwrite: bool,
    stage: object,  # loaded before flags are read
    **settings: Any,
) -> Shown:
    plan = plan_adapters(adapters, **settings)
    return plan if dry_run else run_plan(plan, output, overwrite=overwrite)


@lora.command(help=HELP["subcommands"]["lora merge"])
@runs(_merge, [PER_MODEL[MODEL_SEED].parameter(MODEL_SEED), *stage_flags()])
def merge(
    adapters: list[Path],
    /,
    *,
    output: Output,
    weights: Annotated[list[float] | None, several("--weight", group=METHOD)] = None,
    method: Annotated[str, Parameter(group=METHOD)] = "linear",
    space: Annotated[Space, Parameter(group=METHOD)] = "full",
    rank: Rank = None,
    energy: Energy = None,
    seed: Annotated[int, Parameter(group=METHOD)] = 42,
    scale: Annotated[float, Parameter(group=METHOD)] = 1.0,
    dtype: Type = "F32",
    threads: Annotated[int | None, Parameter(group=RESOURCES)] = None,
    max_memory: Annotated[str | None, Parameter(group=RESOURCES)] = None,
    allow_pickle: Annotated[bool, Parameter(negative="")] = False,
    stage: StageFiles = None,
    dry_run: RunSwitch = False,
    overwrite: Overwrite = False,
    **flags: Any,
) -> dict[str, Any]:
    """Merge LoRA adapters.

    :param adapters: LoRA adapters of one base, from PEFT.
    :param weights: Weights, one for each adapter.
    :param method: As in a merge: sum, dare+linear, ties, …
    :param space: Merge whole matrices, or small ones in the space that the adapters span.
    :param seed: Adapter i uses seed + i.
    :param scale: Factor λ on the merged change.
    :param max_memory: Memory for buffers and factors.
    :param allow_pickle: Also read adapter_model.bin, weights only.
    :param dry_run: Show the plan, but do not merge.
    """
    return {name: read_flag(name, value) for name, value in flags.items()}


@lora.command
@runs(extract_adapter)
def extract(
    base: Annotated[Path, Parameter(["--base", "-b"])],
    model: Annotated[Path, Parameter(["--model", "-m"])],
    *,
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
