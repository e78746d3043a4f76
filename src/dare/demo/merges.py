"""The demonstration's merges: which models, which methods, at which scale."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dare.demo.tasks import TASKS

MODELS = Path(__file__).parent / "models"
BASE = MODELS / "base"
CONFIG = BASE / "config.json"
TUNED = {task.name: MODELS / task.name for task in TASKS}

SCALES: dict[str, dict[float, float]] = {
    "linear": {0.0: 1.0},
    "sum": {0.0: 1.0, 0.1: 1.0, 0.3: 1.0, 0.5: 1.0, 0.7: 1.0, 0.8: 1.0, 0.9: 0.8, 0.95: 0.6},
    "ties": {0.0: 2.5, 0.1: 2.0, 0.3: 2.0, 0.5: 1.5, 0.7: 1.0, 0.8: 1.0, 0.9: 0.8, 0.95: 0.6},
    "trim+ties": {0.0: 1.5},
}
"""λ by method and drop rate, found on validation prompts by training/choose_scales.py.

A `linear` merge is the plain average; with another scale it would be a `sum`.
"""


@dataclass(frozen=True)
class Merge:
    """One way to merge models: DARE at a rate (0 for none), other stages, a scale, a seed."""

    combine: str
    """The stages after DARE."""
    drop_rate: float = 0.0
    scale: float = 1.0
    seed: int = 42
    models: tuple[Path, ...] = tuple(TUNED.values())

    @property
    def method(self) -> str:
        """The recipe's method."""
        return f"dare+{self.combine}" if self.drop_rate else self.combine

    @property
    def label(self) -> str:
        """What it is called in tables."""
        return self.method + (f" p={self.drop_rate:g}" if self.drop_rate else "")

    def carry_out(self, output: Path) -> Path:
        """Write the merged model."""
        import dare

        recipe = dare.Recipe(
            base=BASE,
            models=list(self.models),
            output=output,
            method=self.method,
            stages={"dare": {"drop_rate": self.drop_rate}} if self.drop_rate else {},
            scale=self.scale,
            seed=self.seed,
            verbose=False,
        )
        dare.merge(recipe, overwrite=True)
        return output


def scale_for(combine: str, drop_rate: float) -> float:
    """The scale found for the nearest drop rate.

    >>> scale_for("ties", 0.52) == SCALES["ties"][0.5]
    True
    """
    found = SCALES[combine]
    return found[min(found, key=lambda rate: abs(rate - drop_rate))]
