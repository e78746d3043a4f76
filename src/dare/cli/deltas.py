"""`dare compress` and `dare apply`: a model into a delta file, and back."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from dare import api
from dare.cli import DONE, UsageError, show
from dare.cli.flags import (
    METHOD,
    MISFITS,
    RESOURCES,
    Debug,
    Json,
    Overwrite,
    Quiet,
    Resume,
    output_flag,
    switch,
)
from dare.deltas.compressing import compress as compress_model
from dare.deltas.packing import USUAL_RATES
from dare.errors import DareWarning

Base = Annotated[Path, Parameter(help="The model before fine-tuning.")]
Threads = Annotated[int | None, Parameter(group=RESOURCES, help="Worker threads.")]
MaxMemory = Annotated[str | None, Parameter(group=RESOURCES, help="For buffers, such as 512MiB.")]


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
    tensors: Annotated[
        list[str] | None,
        Parameter(group=METHOD, negative="", metavar="'PATTERN: RATE'", help="As '*.mlp.*: 0.9'."),
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
    quiet: Quiet = False,
    json: Json = False,
    debug: Debug = False,
) -> int:
    """Store a fine-tune as its change to the base."""
    if lossless and (drop_rate, bits) != (None, None):
        raise UsageError("--lossless keeps everything; leave out --drop-rate and --bits")
    console = show.console(json=json, quiet=quiet)
    with warnings.catch_warnings(action="ignore", category=DareWarning):  # the report has them
        report = compress_model(
            base,
            model,
            output,
            drop_rate=drop_rate,
            seed=seed,
            bits=None if bits is None else {str(known): known for known in USUAL_RATES}[bits],
            keep=keep,
            embedding_drop_rate=embedding_drop_rate,
            drop_rates=dict(map(_rate, tensors or ())),
            lossless=lossless,
            on_missing=on_missing,
            on_extra=on_extra,
            allow_pickle=allow_pickle,
            overwrite=overwrite,
            resume=resume,
            verbose=not quiet,
            **_resources(threads, max_memory),
        )
    show.result(console, report, as_json=json)
    return DONE


def _rate(text: str) -> tuple[str, float]:
    pattern, mark, rate = text.rpartition(":")
    try:
        return pattern.strip(), float(rate if mark else "")
    except ValueError:
        message = f"--tensors {text!r}: write PATTERN: RATE, as in '*.mlp.*: 0.95'"
        raise UsageError(message) from None


def _resources(threads: int | None, max_memory: str | None) -> dict[str, Any]:
    given = {"threads": threads, "max_memory": max_memory}
    return {name: value for name, value in given.items() if value is not None}


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
    quiet: Quiet = False,
    json: Json = False,
    debug: Debug = False,
) -> int:
    """Make a model of a delta file and its base."""
    console = show.console(json=json, quiet=quiet)
    with warnings.catch_warnings(action="ignore", category=DareWarning):  # the report has them
        report = api.apply_delta(
            base,
            delta,
            output,
            allow_not_finite=allow_not_finite,
            overwrite=overwrite,
            resume=resume,
            verbose=not quiet,
            **_resources(threads, max_memory),
        )
    show.result(console, report, as_json=json)
    return DONE
