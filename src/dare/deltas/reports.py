"""What compressing did, as figures."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dare.errors import Notice, printable
from dare.inputs.delta_notes import DeltaNotes
from dare.output.journal import Record
from dare.tensors.json_values import json_ready
from dare.tensors.sizes import show_size, times


@dataclass(frozen=True)
class DeltaReport:
    """What a delta file holds, and what of the model it lacks."""

    output: Path
    scheme: str
    bits: str | int
    drop_rate: float | None
    seed: int | None
    parameters: int
    kept: int
    """Values that are stored; of a lossless file none are counted."""
    model_bytes: int
    bytes_written: int
    bits_per_parameter: float
    ratio: float
    """How many times smaller the file is than the model."""
    relative_error: float
    """√Σ(δ̂ - δ)² / √Σδ², with δ̂ as it is read from the file."""
    weight_error: float
    """The same, relative to the base's weights: √Σ(δ̂ - δ)² / √Σw²."""
    bytes_read: int
    resumed_chunks: int
    seconds: float
    notes: tuple[str, ...]
    warnings: tuple[Notice, ...]

    def to_dict(self) -> dict[str, Any]:
        """The report as plain values."""
        return {**asdict(self), "output": self.output.name}

    def to_json(self) -> str:
        """The report as JSON; a number that is not finite becomes a string."""
        document = {**self.to_dict(), "output": str(self.output)}
        return json.dumps(json_ready(document), indent=2, ensure_ascii=False)

    @property
    def pace(self) -> str:
        """How much was read, and how fast."""
        speed = show_size(int(self.bytes_read / max(self.seconds, 1e-9)))
        taken = times(self.resumed_chunks, "piece")
        reused = f", {taken} reused from the interrupted run" if self.resumed_chunks else ""
        return f"{show_size(self.bytes_read)} read, {speed}/s{reused}"

    @property
    def _bits(self) -> str:
        return times(int(self.bits), "bit")

    @property
    def held(self) -> str:
        """What of the model is stored, and what that costs."""
        if self.scheme == "lossless":
            return "every bit of the model"
        values = "as the model has them" if self.bits == "native" else f"at {self._bits} each"
        which = "by DARE's mask" if self.scheme == "random" else "the largest"
        return (
            f"{self.kept:,} of {self.parameters:,} changes, {which}, {values}; error "
            f"{self.relative_error:.3g} of the change, {self.weight_error:.3g} of the weights"
        )

    def __str__(self) -> str:
        """The report in a few lines."""
        lines = [
            (
                f"{show_size(self.bytes_written)}, {self.ratio:.1f} times smaller than the model "
                f"({self.bits_per_parameter:.3g} bits per parameter), in {self.seconds:.1f} s"
            ),
            self.held,
            *(f"note: {note}" for note in self.notes),
            *(f"{warning.strength}: {warning}" for warning in self.warnings),
            f"written to {self.output}",
        ]
        return "\n  ".join(map(printable, lines))


@dataclass(frozen=True)
class Restoration:
    """A model that was written again, bit for bit."""

    output: Path
    digest: str
    """Of its tensors, as the delta file says and as was found."""
    bytes_read: int
    bytes_written: int
    resumed_chunks: int
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """The figures as plain values."""
        return {**asdict(self), "output": self.output.name}

    def to_json(self) -> str:
        """The figures as JSON."""
        return json.dumps({**self.to_dict(), "output": str(self.output)}, indent=2)

    def __str__(self) -> str:
        """The figures in a few lines."""
        rate = self.bytes_written / 1e9 / max(self.seconds, 1e-9)
        return "\n  ".join(
            [
                f"{show_size(self.bytes_written)} of weights in {self.seconds:.1f} s "
                f"({rate:.2f} GB/s), bit for bit those of the model (digest {self.digest})",
                printable(f"written to {self.output}"),
            ]
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
