"""The reports of compressing and restoring."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dare.documents.document import Document, Tone
from dare.documents.notices import Notice
from dare.documents.shown import Shown, json_ready
from dare.documents.words import pace_text, show_size, times
from dare.inputs.delta_files import DeltaNotes
from dare.output.journal import Record


@dataclass(frozen=True)
class _DeltaFileReport(Shown):
    output: Path

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain values."""
        return {**asdict(self), "output": self.output.name}

    def to_json(self) -> str:
        """Return the report as JSON; a number that is not finite becomes a string."""
        document = {**self.to_dict(), "output": str(self.output)}
        return json.dumps(json_ready(document), indent=2, ensure_ascii=False)


@dataclass(frozen=True)
class DeltaReport(_DeltaFileReport):
    """The figures of a delta file: its size, and its error."""

    scheme: str
    bits: str | int
    drop_rate: float | None
    seed: int | None
    parameters: int
    kept: int
    """The number of stored values; not counted for a lossless file."""
    model_bytes: int
    bytes_written: int
    bits_per_parameter: float
    ratio: float
    """The model's size divided by the file's."""
    relative_error: float
    """√Σ(δ̂ - δ)² / √Σδ², with δ̂ as it is read from the file."""
    weight_error: float
    """The same, relative to the base's weights: √Σ(δ̂ - δ)² / √Σw²."""
    bytes_read: int
    resumed_chunks: int
    seconds: float
    notes: tuple[Notice, ...]
    warnings: tuple[Notice, ...]

    @property
    def held(self) -> str:
        """The stored part of the model, and the error."""
        if self.scheme == "lossless":
            return "every bit of the model"
        values = "unrounded" if self.bits == "native" else f"{times(int(self.bits), 'bit')} each"
        return (
            f"{self.kept:,} of {self.parameters:,} changes, {values}; weight "
            f"error {self.weight_error:.2%} ({self.relative_error:.0%} of the change)"
        )

    def document(self) -> Document:
        """Return what the file holds, and what to do with it."""
        output = shlex.quote(str(self.output))
        each = f"{self.bits_per_parameter:.3g} bits for each parameter"
        smaller = f"{self.ratio:.1f} times smaller than the model ({each})"
        return Document(
            title=f"Compressed in {self.seconds:.1f} s",
            kind="delta file",
            tone=Tone.GOOD,
            lead=pace_text(self.bytes_read, self.seconds, self.resumed_chunks),
            facts=(
                ("size", f"{show_size(self.bytes_written)}, {smaller}"),
                ("holds", self.held),
            ),
            notices=(*self.notes, *self.warnings),
            steps={
                "apply": f"dare apply BASE {output} -o MODEL",
                "verify": f"dare verify {output}",
            },
            done=f"Wrote {self.output}",
        )


@dataclass(frozen=True)
class Restoration(_DeltaFileReport):
    """A model that was written again, bit for bit."""

    digest: str
    """The digest of its tensors, the same as in the delta file."""
    bytes_read: int
    bytes_written: int
    resumed_chunks: int
    seconds: float

    def document(self) -> Document:
        """Return that the model is there again."""
        return Document(
            title=f"Restored {show_size(self.bytes_written)} in {self.seconds:.1f} s",
            kind="delta file",
            tone=Tone.GOOD,
            lead="bit for bit",
            facts=(("digest", self.digest),),
            steps={"verify": f"dare verify {shlex.quote(str(self.output))}"},
            done=f"Wrote {self.output}",
        )


def make_report(
    header: DeltaNotes,
    records: Sequence[Record],
    *,
    model_bytes: int,
    bytes_written: int,
    **circumstances: Any,
) -> DeltaReport:
    """Add the figures of all chunks up."""
    sums = [math.fsum(column) for column in zip(*(r.sums for r in records if r.sums), strict=True)]
    change, error, weights = sums or (0.0, 0.0, 0.0)
    parameters = sum(tensor.elements for tensor in header.tensors.values() if not tensor.tied_to)
    is_lossless = header.scheme == "lossless"
    return DeltaReport(
        scheme=header.scheme,
        bits=header.bits,
        drop_rate=header.drop_rate,
        seed=header.seed,
        parameters=parameters,
        kept=0 if is_lossless else sum(max(0, record.piece[2]) for record in records),
        model_bytes=model_bytes,
        bytes_written=bytes_written,
        bits_per_parameter=8 * bytes_written / max(1, parameters),
        ratio=model_bytes / bytes_written,
        relative_error=_root(error, change),
        weight_error=_root(error, weights),
        **circumstances,
    )


def _root(part: float, whole: float) -> float:
    if part <= 0:  # below 0 by rounding, if next to nothing is dropped
        return 0.0
    return math.sqrt(part / whole) if whole > 0 else math.inf
