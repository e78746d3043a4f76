"""What was done to an adapter: per module and in total."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dare.lora.svd import relative_error
from dare.tensors.json_values import json_ready
from dare.tensors.sizes import show_size


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
        return relative_error(lost, sum(module.norm**2 for module in self.modules))

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
        plain = asdict(self)
        plain["output"] = str(self.output)
        plain["modules"] = [{**asdict(module), "energy": module.energy} for module in self.modules]
        return plain | {"rank": self.rank, "error": self.error, "energy": self.energy}

    def to_json(self) -> str:
        """The report as JSON; a number that is not finite becomes a string."""
        return json.dumps(json_ready(self.to_dict()), indent=2, ensure_ascii=False)

    def _ranks(self) -> str:
        ranks = {module.rank for module in self.modules}
        return f"rank {self.rank}" if len(ranks) == 1 else f"rank {min(ranks)} to {self.rank}"

    def _worst(self) -> list[str]:
        worst = max(self.modules, key=lambda module: module.error)
        if worst.error == 0:
            return []
        return [
            f"  relative error {self.error:.3g} in total, at the most {worst.error:.3g} "
            f"in {worst.name}"
        ]

    def _end(self) -> list[str]:
        size = show_size(self.bytes_written)
        return [*(f"  note: {note}" for note in self.notes), f"  {size} written to {self.output}"]


@dataclass(frozen=True)
class AdapterReport(_Report):
    """What a merge of adapters did."""

    method: str
    route: str
    """How the adapter was made: by concatenation, or by which kind of SVD."""
    adapters: tuple[str, ...]
    weights: tuple[float, ...]
    seeds: tuple[int, ...] | None
    """The seed of each adapter's mask, where something was dropped."""
    averaged: tuple[str, ...]
    """Tensors that are stored in full, and were averaged."""

    def __str__(self) -> str:
        """The report in a few lines."""
        lines = [
            f"{self.method} of {len(self.adapters)} adapters ({', '.join(self.adapters)}): "
            f"{len(self.modules)} modules, {self._ranks()}, {self.route}, in {self.seconds:.1f} s",
            *self._worst(),
        ]
        if self.averaged:
            lines.append(f"  averaged in full: {', '.join(self.averaged)}")
        return "\n".join([*lines, *self._end()])


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

    def __str__(self) -> str:
        """The report in a few lines."""
        lines = [
            f"extracted {len(self.modules)} modules, {self._ranks()}, in {self.seconds:.1f} s",
            f"  {self.energy:.2%} of their change is kept",
            *self._worst(),
        ]
        if self.saved:
            lines.append(f"  stored in full: {', '.join(self.saved)}")
        if self.left_out:
            names = ", ".join(tensor.tensor for tensor in self.left_out[:4])
            more = f" and {len(self.left_out) - 4} more" if len(self.left_out) > 4 else ""
            lines.append(
                f"  left out, though changed ({1 - self.share:.2%} of the change): {names}{more}"
            )
        return "\n".join([*lines, *self._end()])
