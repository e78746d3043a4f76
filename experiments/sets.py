"""Which models are merged together: the sets of a world, by kind."""

from __future__ import annotations

from dataclasses import dataclass

from tuning import Tune
from worlds import World


@dataclass(frozen=True)
class ModelSet:
    """Models that somebody might want to merge."""

    kind: str
    tunes: tuple[Tune, ...]
    strangers: tuple[int, ...] = ()
    """Those that do not belong: from other random weights, or taught the opposite."""

    @property
    def tasks(self) -> tuple[str, ...]:
        """What a merge of them should be able to do."""
        able = [tune.task for tune in self.tunes if tune.way != "opposed"]
        return tuple(dict.fromkeys(able))


def sets_of(world: World) -> list[ModelSet]:
    """The sets of a world."""
    first, second, third, *_ = tasks = world.tasks
    pair = Tune(first), Tune(second)
    return [
        ModelSet("pair", pair),
        ModelSet("gentle", tuple(Tune(task, "gentle") for task in tasks[:3])),
        ModelSet("usual", (*pair, Tune(third))),
        ModelSet("harsh", tuple(Tune(task, "harsh") for task in tasks[:3])),
        ModelSet("many", tuple(Tune(task) for task in tasks[:8])),
        ModelSet("seeds", tuple(Tune(first, seed=seed) for seed in range(4))),
        ModelSet("seeds, harsh", tuple(Tune(second, "harsh", seed) for seed in range(3))),
        ModelSet("lora", tuple(Tune(task, way="lora") for task in tasks[:3])),
        ModelSet("uneven", (Tune(first, "gentle"), Tune(second), Tune(third, "harsh"))),
        ModelSet("twice", (*pair, Tune(first, seed=1), Tune(first, seed=2))),
        ModelSet("stranger", (*pair, Tune(third, way="stranger")), (2,)),
        ModelSet("opposed", (*pair, Tune(first, way="opposed")), (2,)),
        ModelSet("further", (*pair, Tune(third, way="further"))),
    ]
