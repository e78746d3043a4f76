"""`dare compress` and `dare apply`: a model into a delta file, and back."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from dare import api
from dare.cli import UsageError
from dare.cli.flags import METHOD, MISFITS, RESOURCES, Overwrite, Resume, output_flag, runs, switch
from dare.deltas.compressing import compress as compress_model
from dare.deltas.packing import USUAL_RATES

Base = Annotated[Path, Parameter(help="The model before fine-tuning.")]
Threads = Annotated[int | None, Parameter(group=RESOURCES, help="Worker threads.")]
MaxMemory = Annotated[str | None, Parameter(group=RESOURCES, help="For buffers, such as 512MiB.")]
Rates = Parameter("--tensors", group=METHOD, negative="", metavar="'PATTERN: RATE'")


@runs(compress_model)
def compress(
    base: Base,
    model: Path,
    /,
    *,
    output: Annotated[Path, output_flag("The delta file, such as math.delta.safetensors.")],
    drop_rate: Annotated[float | None, Parameter(group=METHOD)] = None,
    bits: Annotated[Literal["native", "4", "2"] | None, Parameter(group=METHOD)] = None,
    seed: Annotated[int, Parameter(group=METHOD)] = 42,
    embedding_drop_rate: Annotated[float | None, Parameter(group=METHOD)] = None,
    drop_rates: Annotated[list[str] | None, Rates] = None,
    lossless: Annotated[bool, switch(group=METHOD)] = False,
    on_missing: Annotated[Literal["error", "base"], Parameter(group=MISFITS)] = "error",
    on_extra: Annotated[Literal["error", "drop"], Parameter(group=MISFITS)] = "error",
    allow_pickle: Annotated[bool, switch(group=MISFITS)] = False,
    threads: Threads = None,
    max_memory: MaxMemory = None,
    resume: Resume = True,
    overwrite: Overwrite = False,
) -> dict[str, Any]:
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
    if lossless and (drop_rate, bits) != (None, None):
        raise UsageError("--lossless keeps everything; leave out --drop-rate and --bits")
    stored = {str(known): known for known in USUAL_RATES}
    return {"bits": bits and stored[bits], "drop_rates": dict(map(_rate, drop_rates or ()))}


def _rate(text: str) -> tuple[str, float]:
    pattern, mark, rate = text.rpartition(":")
    try:
        return pattern.strip(), float(rate if mark else "")
    except ValueError:
        message = f"--tensors {text!r}: write PATTERN: RATE, as in '*.mlp.*: 0.95'"
        raise UsageError(message) from None


@runs(api.apply_delta)
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
) -> None:
    """Make a model of a delta file and its base.

    :param delta: A file from `dare compress`.
    :param allow_not_finite: Also restore values that are NaN or infinite.
    """
