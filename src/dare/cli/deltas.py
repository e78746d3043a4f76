"""`dare compress` and `dare apply`: a model into a delta file, and back."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from dare.cli import UsageError
from dare.cli.flags import (
    METHOD,
    MISFITS,
    RESOURCES,
    Overwrite,
    Resume,
    Work,
    output_flag,
    runs,
    switch,
)
from dare.cli.parsing import Flag

Base = Annotated[Path, Flag(help="The model before fine-tuning.")]
Threads = Annotated[int | None, Flag(group=RESOURCES, help="Worker threads.")]
MaxMemory = Annotated[str | None, Flag(group=RESOURCES, help="For buffers, such as 512MiB.")]
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

    :param model: The fine-tuned model: a file or a directory.
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
    output: Annotated[Path, output_flag("The model: NAME.safetensors, or a directory.")],
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
