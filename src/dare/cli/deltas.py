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


@runs(compress_model)
def compress(
    base: Base,
    model: Annotated[Path, Parameter(help="The fine-tuned model: a file or a directory.")],
    /,
    *,
    output: Annotated[Path, output_flag("The delta file, such as math.delta.safetensors.")],
    drop_rate: Annotated[
        float | None, Parameter(group=METHOD, help="Share of changes to drop; usually none.")
    ] = None,
    bits: Annotated[
        Literal["native", "4", "2"] | None,
        Parameter(group=METHOD, help="For each kept change; native: as it is stored. Usually 2."),
    ] = None,
    keep: Annotated[
        Literal["random", "magnitude"],
        Parameter(group=METHOD, help="Which changes: a random mask (DARE), or the largest."),
    ] = "random",
    seed: Annotated[int, Parameter(group=METHOD, help="Seed of the mask.")] = 42,
    embedding_drop_rate: Annotated[
        float | None, Parameter(group=METHOD, help="Drop rate for embeddings and head.")
    ] = None,
    drop_rates: Annotated[
        list[str] | None,
        Parameter(
            name="--tensors",
            group=METHOD,
            negative="",
            metavar="'PATTERN: RATE'",
            help="As '*.mlp.*: 0.9'.",
        ),
    ] = None,
    lossless: Annotated[bool, switch("Keep every bit of the model.", group=METHOD)] = False,
    on_missing: Annotated[
        Literal["error", "base"], Parameter(group=MISFITS, help="If the model lacks a tensor.")
    ] = "error",
    on_extra: Annotated[
        Literal["error", "drop"], Parameter(group=MISFITS, help="If only the model has a tensor.")
    ] = "error",
    allow_pickle: Annotated[
        bool, switch("Also read pickles such as pytorch_model.bin.", group=MISFITS)
    ] = False,
    threads: Threads = None,
    max_memory: MaxMemory = None,
    resume: Resume = True,
    overwrite: Overwrite = False,
) -> dict[str, Any]:
    """Store a fine-tune as its change to the base."""
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
    delta: Annotated[Path, Parameter(help="A file from `dare compress`.")],
    /,
    *,
    output: Annotated[Path, output_flag("The model: NAME.safetensors, or a directory.")],
    allow_not_finite: Annotated[
        bool, switch("Also restore values that are NaN or infinite.", group=MISFITS)
    ] = False,
    threads: Threads = None,
    max_memory: MaxMemory = None,
    resume: Resume = True,
    overwrite: Overwrite = False,
) -> None:
    """Make a model of a delta file and its base."""
