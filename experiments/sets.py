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
    seed: int = 0
    """Of training, where a set is made more than once."""

    @property
    def name(self) -> str:
        """The kind, and the seed if it is not the first."""
        return f"{self.kind}, seed {self.seed}" if self.seed else self.kind

    @property
    def tasks(self) -> tuple[str, ...]:
        """What a merge of them should be able to do."""
        able = [tune.task for tune in self.tunes if tune.way != "opposed"]
        return tuple(dict.fromkeys(able))

    @property
    def joint(self) -> Tune | None:
        """One model that learns all tasks together, for the plain sets."""
        if self.seed or self.kind not in ("pair", "usual", "many"):
            return None
        return Tune("+".join(self.tasks), self.tunes[0].strength, way="joint")


def sets_of(world: World) -> list[ModelSet]:
    """The sets of a world."""
    found = [members for seed in range(world.seeds) for members in _all_sets(world.tasks, seed)]
    kinds = world.kinds
    return [members for members in found if not kinds or members.kind in kinds]


def _all_sets(tasks: tuple[str, ...], seed: int) -> list[ModelSet]:
    """The sets of one seed; later seeds have the plain ones, and those that dropping helped."""
    first, second, third, *_ = tasks
    pair = Tune(first, seed=seed), Tune(second, seed=seed)
    uneven = Tune(first, "gentle", seed), Tune(second, seed=seed), Tune(third, "harsh", seed)
    sets = [
        ModelSet("pair", pair, seed=seed),
        ModelSet("usual", (*pair, Tune(third, seed=seed)), seed=seed),
        ModelSet("many", tuple(Tune(task, seed=seed) for task in tasks[:8]), seed=seed),
        ModelSet("lora", tuple(Tune(t, seed=seed, way="lora") for t in tasks[:3]), seed=seed),
        ModelSet("light", tuple(Tune(task, "light", seed) for task in tasks[:3]), seed=seed),
        ModelSet("uneven", uneven, seed=seed),
    ]
    if seed:
        return sets
    return [
        *sets,
        ModelSet("faint", tuple(Tune(task, "faint") for task in tasks[:3])),
        ModelSet("faint, many", tuple(Tune(task, "faint") for task in tasks[:8])),
        ModelSet("gentle", tuple(Tune(task, "gentle") for task in tasks[:3])),
        ModelSet("harsh", tuple(Tune(task, "harsh") for task in tasks[:3])),
        ModelSet("seeds", tuple(Tune(first, seed=seed) for seed in range(4))),
        ModelSet("seeds, harsh", tuple(Tune(second, "harsh", seed) for seed in range(3))),
        ModelSet("lora, gentle", tuple(Tune(t, "gentle", way="lora") for t in tasks[:4])),
        ModelSet("twice", (*pair, Tune(first, seed=1), Tune(first, seed=2))),
        ModelSet("stranger", (*pair, Tune(third, way="stranger")), (2,)),
        ModelSet("opposed", (*pair, Tune(first, way="opposed")), (2,)),
        ModelSet("further", (*pair, Tune(third, way="further"))),
    ]
