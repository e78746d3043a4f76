"""Models into other forms, and back: delta files, adapters, mixtures of experts; and a
configuration of mergekit into a recipe.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from dare.cli import DONE, UsageError
from dare.cli.flags import (
    METHOD,
    MISFITS,
    RESOURCES,
    Json,
    Overwrite,
    Resume,
    RunSwitch,
    StageFiles,
    Work,
    flag_for,
    output_flag,
    print_json,
    read_flag,
    runs,
    switch,
)
from dare.cli.parsing import Flag

if TYPE_CHECKING:
    from dare.documents.shown import Shown

# ---------------------------------------------------------------- delta files

Base = Annotated[Path, Flag(help="The model before fine-tuning.")]
Threads = Annotated[int | None, Flag(group=RESOURCES, help="Worker threads.")]
MaxMemory = Annotated[str | None, Flag(group=RESOURCES, help="Memory for buffers, such as 512MiB.")]
Rates = Flag(("--tensors",), METHOD, metavar="'PATTERN: RATE'")


@runs
def compress(
    base: Base,
    model: Path,
    /,
    *,
    output: Annotated[Path, output_flag("The delta file, such as math.delta.safetensors.")],
    drop_rate: Annotated[float | None, Flag(group=METHOD)] = None,
    bits: Annotated[Literal["native", "4", "2"] | None, Flag(group=METHOD)] = None,
    seed: Annotated[int, Flag(group=METHOD)] = 42,
    embedding_drop_rate: Annotated[float | None, Flag(group=METHOD)] = None,
    drop_rates: Annotated[list[str] | None, Rates] = None,
    lossless: Annotated[bool, switch(group=METHOD)] = False,
    on_missing: Annotated[Literal["error", "base"], Flag(group=MISFITS)] = "error",
    on_extra: Annotated[Literal["error", "drop"], Flag(group=MISFITS)] = "error",
    allow_pickle: Annotated[bool, switch(group=MISFITS)] = False,
    threads: Threads = None,
    max_memory: MaxMemory = None,
    resume: Resume = True,
    overwrite: Overwrite = False,
) -> Work:
    """Store a fine-tune as its change to the base.

    :param model: The fine-tuned model: a file or a folder.
    :param drop_rate: Share of changes to drop; none by default.
    :param bits: Bits for each kept change; native: as stored. Default: 2, or native if dropping.
    :param seed: Seed of the mask.
    :param embedding_drop_rate: Drop rate for embeddings and head.
    :param drop_rates: Other rates for some tensors, such as '*.mlp.*: 0.9'.
    :param lossless: Keep every bit of the model.
    :param on_missing: If the model lacks a tensor.
    :param on_extra: If only the model has a tensor.
    :param allow_pickle: Also read pickles such as pytorch_model.bin.
    """
    from dare.deltas.compressing import compress as compress_model
    from dare.deltas.packing import USUAL_RATES

    if lossless and (drop_rate, bits) != (None, None):
        raise UsageError("--lossless keeps everything; leave out --drop-rate and --bits")
    stored = {str(known): known for known in USUAL_RATES}
    changed = {"bits": bits and stored[bits], "drop_rates": dict(map(_rate, drop_rates or ()))}
    return compress_model, changed


def _rate(text: str) -> tuple[str, float]:
    pattern, mark, rate = text.rpartition(":")
    try:
        return pattern.strip(), float(rate if mark else "")
    except ValueError:
        message = f"--tensors {text!r}: write PATTERN: RATE, as in '*.mlp.*: 0.95'"
        raise UsageError(message) from None


@runs
def apply(
    base: Base,
    delta: Path,
    /,
    *,
    output: Annotated[Path, output_flag("The model: NAME.safetensors, or a folder.")],
    allow_not_finite: Annotated[bool, switch(group=MISFITS)] = False,
    threads: Threads = None,
    max_memory: MaxMemory = None,
    resume: Resume = True,
    overwrite: Overwrite = False,
) -> Work:
    """Make a model of a delta file and its base.

    :param delta: A file from `dare compress`.
    :param allow_not_finite: Also restore values that are NaN or infinite.
    """
    from dare.api import apply_delta

    return apply_delta, {}


# ---------------------------------------------------------------- adapters

Rank = Annotated[int | None, Flag(help="Rank of the result.")]
Energy = Annotated[float | None, Flag(help="Or the share of the squared change to keep.")]
Output = Annotated[Path, output_flag("Folder of the adapter.")]
Type = Annotated[Literal["F32", "F16", "BF16"], Flag(help="Storage type.")]
Device = Annotated[str, Flag(help="What computes: cpu, cuda or cuda:N.", group=RESOURCES)]


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
    device: Device = "cpu",
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
    device: Device = "cpu",
    overwrite: Overwrite = False,
) -> Work:
    """Extract a LoRA from a fine-tuned model: its delta, reduced to a low rank.

    :param base: The model before fine-tuning.
    :param model: The fine-tuned model.
    :param modules: Patterns of the modules to extract.
    :param save_others: Store other changed tensors in full.
    :param base_name: Name of the base in the adapter, if not that of its folder.
    :param as_stored: Take names from the file, not from transformers.
    """
    from dare.lora.extraction import extract_adapter

    return extract_adapter, {}


# ---------------------------------------------------------------- mixtures and configurations


@runs
def moe(
    recipe: Path,
    /,
    *,
    output: Annotated[Path | None, output_flag("Folder of the mixture.")] = None,
    shard_size: Annotated[str | None, Flag(group=RESOURCES)] = None,
    threads: Annotated[int | None, Flag(group=RESOURCES)] = None,
    max_memory: Annotated[str | None, Flag(group=RESOURCES)] = None,
    resume: Resume = True,
    overwrite: Overwrite = False,
) -> Work:
    """Build a mixture of experts.

    :param recipe: A recipe, a configuration of mergekit-moe, or a mixture to make again.
    :param shard_size: Largest file, such as 5GB.
    :param threads: Worker threads.
    :param max_memory: Memory for buffers, such as 512MiB.
    """
    from dare.mixtures.building import moe as build_mixture

    return build_mixture, {}


def convert(file: Path, /, *, json: Json = False) -> int:
    """Print a mergekit configuration as a recipe.

    :param file: A configuration for mergekit, in YAML.
    """
    from dare.cli.template import check_runs
    from dare.inputs.opening import convert_yaml

    conversion = convert_yaml(file)
    check_runs(conversion.recipe, str(file))
    if json:
        print_json(conversion.to_dict())
    else:
        print(conversion.to_toml(), end="")
    return DONE
