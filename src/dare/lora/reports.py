"""What was done to an adapter: per module and in total."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from math import sqrt
from pathlib import Path
from typing import Any, ClassVar

from dare.tensors.json_values import json_ready
from dare.tensors.sizes import show_size, times

LEFT_OUT_SHOWN = 4


@dataclass(frozen=True)
class ModuleReport:
    """One module of the adapter that was written."""

    name: str
    ranks: tuple[int, ...]
    """The rank in each input that has the module; none where it was extracted from weights."""
    rank: int
    norm: float
    """The Frobenius norm of the change that was asked for."""
    error: float
    """What the low rank loses of it: the norm of the difference, as a share of `norm`."""

    @property
    def energy(self) -> float:
        """The share of the squared norm that is kept.

        >>> ModuleReport("q_proj", (), rank=4, norm=2.0, error=0.1).energy
        0.99
        """
        return 1 - self.error**2


@dataclass(frozen=True)
class _Report:
    kind: ClassVar[str]
    title: ClassVar[str]
    output: Path
    modules: tuple[ModuleReport, ...]
    notes: tuple[str, ...]
    """What else there is to know: what was averaged, left out, or different."""
    bytes_written: int
    seconds: float

    @property
    def error(self) -> float:
        """The relative Frobenius error over all modules together."""
        lost = sum((module.error * module.norm) ** 2 for module in self.modules)
        squared = sum(module.norm**2 for module in self.modules)
        return sqrt(lost / squared) if squared else 0.0

    @property
    def energy(self) -> float:
        """The share of the squared norm that is kept, over all modules together."""
        return 1 - self.error**2

    @property
    def rank(self) -> int:
        """The largest rank of a module."""
        return max(module.rank for module in self.modules)

    def to_dict(self) -> dict[str, Any]:
        """The report as plain values, ready for JSON."""
        modules = [{**asdict(module), "energy": module.energy} for module in self.modules]
        total = {"rank": self.rank, "error": self.error, "energy": self.energy}
        return {**asdict(self), "output": str(self.output), "modules": modules, **total}

    def to_json(self) -> str:
        """The report as JSON; a number that is not finite becomes a string."""
        return json.dumps(json_ready(self.to_dict()), indent=2, ensure_ascii=False)

    def _counts(self) -> str:
        least, most = min(module.rank for module in self.modules), self.rank
        ranks = f"{most}" if least == most else f"{least} to {most}"
        return f"{times(len(self.modules), 'module')}, rank {ranks}"

    def __str__(self) -> str:
        """The report in a few lines."""
        size = show_size(self.bytes_written)
        return f"{self.described}\n  {size} written to {self.output} in {self.seconds:.1f} s"

    @property
    def described(self) -> str:
        """What the adapter is, in a few lines, whenever and wherever it was made."""
        worst = max(self.modules, key=lambda module: module.error)
        lines = self._head()
        if worst.error:
            lines.append(
                f"relative error {self.error:.3g} in total, at most {worst.error:.3g} (in "
                f"{worst.name})"
            )
        return "\n  ".join([*lines, *self._lists(), *(f"note: {note}" for note in self.notes)])

    def _head(self) -> list[str]:
        raise NotImplementedError

    def _lists(self) -> list[str]:
        raise NotImplementedError


@dataclass(frozen=True)
class AdapterReport(_Report):
    """What a merge of adapters did."""

    kind = "merge"
    title = "Merged LoRA"
    method: str
    route: str
    """How the adapter was made: by concatenation, or by which kind of SVD."""
    adapters: tuple[str, ...]
    weights: tuple[float, ...]
    seeds: tuple[int, ...] | None
    """The seed of each adapter's mask, where something was dropped."""
    averaged: tuple[str, ...]
    """Tensors that are stored in full, and were averaged."""

    def _head(self) -> list[str]:
        return [
            (
                f"{self.method} of {times(len(self.adapters), 'adapter')} "
                f"({', '.join(self.adapters)}): {self._counts()}, {self.route}"
            )
        ]

    def _lists(self) -> list[str]:
        return [f"averaged in full: {', '.join(self.averaged)}"] if self.averaged else []


@dataclass(frozen=True)
class LeftOut:
    """A tensor that changed and is not in the adapter."""

    tensor: str
    norm: float
    """The Frobenius norm of its change."""
    reason: str


@dataclass(frozen=True)
class ExtractionReport(_Report):
    """What an extraction did."""

    kind = "extraction"
    title = "Extracted LoRA"
    saved: tuple[str, ...]
    """Modules that are stored in full."""
    left_out: tuple[LeftOut, ...]

    @property
    def share(self) -> float:
        """The part of the whole model's squared change that the modules' changes make up."""
        inside = sum(module.norm**2 for module in self.modules)
        outside = sum(tensor.norm**2 for tensor in self.left_out)
        return inside / (inside + outside) if inside + outside else 1.0

    def to_dict(self) -> dict[str, Any]:
        """The report as plain values, ready for JSON."""
        return {**super().to_dict(), "share": self.share}

    def _head(self) -> list[str]:
        return [f"extracted {self._counts()}", f"{self.energy:.2%} of their change is kept"]

    def _lists(self) -> list[str]:
        lists = [f"stored in full: {', '.join(self.saved)}"] if self.saved else []
        if self.left_out:
            more = len(self.left_out) - LEFT_OUT_SHOWN
            names = ", ".join(tensor.tensor for tensor in self.left_out[:LEFT_OUT_SHOWN])
            lists.append(
                f"left out, though changed ({1 - self.share:.2%} of the change): {names}"
                + (f" and {more} more" if more > 0 else "")
            )
        return lists
