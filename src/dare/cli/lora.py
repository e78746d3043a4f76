"""`dare lora`: adapters into one adapter, and a model into an adapter."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from dare.cli.flags import (
    METHOD,
    RESOURCES,
    Overwrite,
    RunSwitch,
    StageFiles,
    Work,
    flag_for,
    output_flag,
    read_flag,
    runs,
)
from dare.cli.parsing import Flag

if TYPE_CHECKING:
    from dare.documents.shown import Shown

Rank = Annotated[int | None, Flag(help="Rank of the result.")]
Energy = Annotated[float | None, Flag(help="Or: the share of the squared change to keep.")]
Output = Annotated[Path, output_flag("Directory of the adapter.")]
Type = Annotated[Literal["F32", "F16", "BF16"], Flag(help="Storage type.")]


def _merge(
    adapters: list[Path],
    *,
    output: Path,
    dry_run: bool,
    overwrite: bool,
    stage: object,  # loaded before flags are read
    **settings: Any,
) -> Shown:
    from dare.lora.merging import plan_adapters, run_plan

    plan = plan_adapters(adapters, **settings)
    return plan if dry_run else run_plan(plan, output, overwrite=overwrite)


@partial(runs, more=[flag_for(name) for name in ("model_seed", "drop_rate")])
def merge(
    adapters: list[Path],
    /,
    *,
    output: Output,
    weights: Annotated[list[float] | None, Flag(("--weight",), METHOD, least=1)] = None,
    method: Annotated[str, Flag(group=METHOD)] = "linear",
    space: Annotated[Literal["full", "core"], Flag(group=METHOD)] = "full",
    rank: Rank = None,
    energy: Energy = None,
    seed: Annotated[int, Flag(group=METHOD)] = 42,
    scale: Annotated[float, Flag(group=METHOD)] = 1.0,
    dtype: Type = "F32",
    threads: Annotated[int | None, Flag(group=RESOURCES)] = None,
    max_memory: Annotated[str | None, Flag(group=RESOURCES)] = None,
    allow_pickle: Annotated[bool, Flag()] = False,
    stage: StageFiles = None,
    dry_run: RunSwitch = False,
    overwrite: Overwrite = False,
    **flags: Any,
) -> Work:
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
    return _merge, {name: read_flag(name, value) for name, value in flags.items()}


@runs
def extract(
    base: Annotated[Path, Flag(("--base", "-b"))],
    model: Annotated[Path, Flag(("--model", "-m"))],
    *,
    output: Output,
    rank: Rank = None,
    energy: Energy = None,
    modules: Annotated[list[str] | None, Flag(least=1)] = None,
    save_others: Annotated[bool, Flag()] = False,
    base_name: str | None = None,
    as_stored: Annotated[bool, Flag()] = False,
    dtype: Type = "F32",
    overwrite: Overwrite = False,
) -> Work:
    """Extract a LoRA from a fine-tuned model: its change to the base, cut to a rank.

    :param base: The model before fine-tuning.
    :param model: The fine-tuned model.
    :param modules: Patterns of modules to take.
    :param save_others: Store other changed tensors in full.
    :param base_name: Name of the base in the adapter, if not that of its folder.
    :param as_stored: Take names from the file, not from transformers.
    """
    from dare.lora.extraction import extract_adapter

    return extract_adapter, {}
