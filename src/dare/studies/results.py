"""A study's data and the conclusion from it: plain values, ready for JSON.

A *setting* is a value for each name of the space; with a seed it makes one *candidate*, the merged
weights. A *trial* is a candidate that is scored. *Baselines* are scored before all trials: the
base, each model alone, the plain average, task arithmetic. A score is the mean of its *items*: the
part of an item's id before the first slash is its group, and a score of that name is the group's
mean. If ids have two slashes or more, items that share everything before the last one are a
*cluster*: they were sampled together.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from dare.documents.document import finite
from dare.documents.notices import Notice
from dare.documents.words import value_text

Settings = Mapping[str, Any]
"""A value for each name of the space that applies: a number, a text, or a list over the layers."""
ALONE = " alone"  # the end of the name of each single model, and of no other
MOST_NUMBERS = 3  # the most trials of one setting that are named: the first
UNGROUPED = "score"
"""The group of items whose ids name none, and the score of an evaluator that names none."""


class Role(StrEnum):
    """The purpose of a trial; the values are names, except for settings and single models.

    The baselines are in the order of their simplicity.
    """

    SETTING = ""
    BASE = "base"
    SINGLE = ALONE
    AVERAGE = "average"
    SUM = "sum"
    FORMER = "former"  # a baseline of earlier versions, which is not compared
    AGAIN = "average again"  # scored for the noise of the evaluator
    WINNER = "winner"
    RUNNER_UP = "runner-up"
    EARLIER_WINNER = "winner before"

    @classmethod
    def of(cls, name: str) -> Role:
        """Return the role of a name in a study; a model may have the name of a role.

        >>> Role.of("winner alone") is Role.SINGLE, Role.of("winner") is Role.WINNER
        (True, True)
        """
        known = (role for role in cls if role == name)
        return cls.SINGLE if name.endswith(ALONE) else next(known, cls.FORMER)


NOT_COMPARED = (Role.AGAIN, Role.FORMER)
NOT_MERGED = (Role.BASE, Role.SINGLE)
"""Baselines that exist already: if one of them is best, there is no need to merge."""


class State(StrEnum):
    """The state of a trial."""

    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"
    STOPPED = "stopped early"  # by racing: it was among the worst on a part of the items
    FAILED = "failed"

    @property
    def is_final(self) -> bool:
        return self not in (State.WAITING, State.RUNNING)


# ---------------------------------------------------------------- texts and groups


def key_of(settings: Settings) -> str:
    """Return a text that is the same for equal settings, in any order."""
    return json.dumps(dict(settings), sort_keys=True, default=str)


def is_number(value: Any) -> bool:
    """Tell if a value is a finite number, not a truth value."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def rounded(value: float) -> float | None:
    """Return a number as texts show it, so that none is rounded twice; None if it is not finite.

    >>> rounded(0.90625), rounded(12345), rounded(math.inf)
    (0.9062, 12345, None)
    """
    return value if isinstance(value, int) else finite(float(value_text(value)))


def settings_text(settings: Settings) -> str:
    """Return settings in a line.

    >>> settings_text({"method": "sum", "scale": 0.5})
    'method=sum scale=0.5'
    """
    return " ".join(f"{name}={value_text(value)}" for name, value in settings.items())


def values_text(value: Any) -> str:
    """Return the values that a setting is searched over, or a value of another kind.

    >>> values_text({"from": 0.5, "to": 2.0, "log": True}), values_text([{"scale": 0.5}, "sum"])
    ('0.5 to 2, log', '[scale=0.5, sum]')
    """
    if isinstance(value, list):
        return f"[{', '.join(map(values_text, value))}]"
    if not isinstance(value, dict) or "from" not in value:
        return settings_text(value) if isinstance(value, dict) else value_text(value)
    more = {key: how for key, how in value.items() if key not in ("from", "to")}
    ways = [f", {key}" if how is True else f", {key} {how:g}" for key, how in more.items()]
    return f"{value_text(value['from'])} to {value_text(value['to'])}{''.join(ways)}"


def group_of(item_id: str) -> str:
    """Return the group of an item: the part of its id before the first slash.

    >>> group_of("add/3/b"), group_of("17"), group_of("/17")
    ('add', 'score', 'score')
    """
    group, slash, _ = item_id.partition("/")
    return group if slash and group else UNGROUPED


def cluster_of(item_id: str) -> str:
    """Return the cluster of an item: the part of its id that it shares, or its own id.

    >>> cluster_of("add/3/b"), cluster_of("add/3"), cluster_of("17")
    ('add/3', 'add/3', '17')
    """
    return item_id.rpartition("/")[0] if item_id.count("/") > 1 else item_id


def groups_of(ids: Iterable[str]) -> dict[str, list[str]]:
    """Return the ids of each group, all in their order."""
    groups: dict[str, list[str]] = {}
    for item_id in ids:
        groups.setdefault(group_of(item_id), []).append(item_id)
    return groups


def group_means(items: Mapping[str, float]) -> dict[str, float]:
    """Return the mean of each group of items."""
    return {g: math.fsum(items[i] for i in ids) / len(ids) for g, ids in groups_of(items).items()}


def groups_of_scores(scored: Scored) -> dict[str, str]:
    """Return the group of each score that is the mean of a group of items.

    One score and items without groups belong together, whatever the score is called.
    """
    means = group_means(scored.items)
    if set(means) == {UNGROUPED} and len(scored.scores) == 1:
        groups = dict.fromkeys(scored.scores, UNGROUPED)
    else:
        groups = {name: name for name in scored.scores if name in means}
    return {
        name: group
        for name, group in groups.items()
        if math.isclose(scored.scores[name], means[group], rel_tol=1e-6, abs_tol=1e-6)
    }


# ---------------------------------------------------------------- data


@dataclass(frozen=True)
class Scored:
    """The scores of one candidate."""

    scores: dict[str, float]  # by name; all are finite numbers
    items: dict[str, float] = field(default_factory=dict)
    """By id; empty if the evaluator gives none."""
    seconds: float = 0.0  # without making the candidate
    output: str = ""


@dataclass(frozen=True)
class Trial:
    """A candidate and its outcome; for a baseline, the settings are empty.

    `message` says why it failed or where it was stopped, `output` has the last lines that its
    evaluator printed before that.
    """

    number: int
    settings: dict[str, Any]
    seed: int
    state: State
    scored: Scored | None = None  # if it was stopped early, on the items that it was scored on
    objective: float | None = None
    broken: tuple[str, ...] = ()  # the guards that it breaks, each as a sentence
    digest: str | None = None
    same_as: int | None = None  # the trial that has the same weights, whose scores these are
    seconds: float = 0.0  # for making and scoring
    message: str = ""
    output: str = ""
    name: str = ""
    """A baseline's: `base`, `math alone`, `average`, `sum`, `average again`."""
    is_random: bool = True  # False if its seed has no effect

    @property
    def role(self) -> Role:
        return Role.of(self.name)

    @property
    def label(self) -> str:
        return self.name or f"trial {self.number}"

    @property
    def text(self) -> str:
        """Its settings, and its seed if that has an effect."""
        return settings_text(self.settings | ({"seed": self.seed} if self.is_random else {}))

    @property
    def is_done(self) -> bool:
        return self.state is State.DONE


@dataclass(frozen=True)
class Contender:
    """The scored trials of a setting with its seeds, or of a baseline."""

    trials: tuple[Trial, ...]
    name: str = ""  # the name of a baseline
    is_random: bool = True
    """True if another seed would give other weights; if not, there is only one trial."""

    @property
    def scored(self) -> tuple[Scored, ...]:
        return tuple(trial.scored for trial in self.trials if trial.scored is not None)

    @property
    def scores(self) -> dict[str, float]:
        """The means over the seeds, of the scores that all have."""
        scores = [scored.scores for scored in self.scored]
        names = [n for n in scores[0] if all(n in given for given in scores)]
        return {n: math.fsum(given[n] for given in scores) / len(scores) for n in names}


@dataclass(frozen=True)
class StudyData:
    """Everything that a study holds; recipe and space are documents, as TOML has them."""

    recipe: dict[str, Any]
    space: dict[str, Any]
    sampler: str
    planned: int  # the number of trials
    seeds: tuple[int, ...]
    evaluator: str
    objective: dict[str, float]  # the weight of each score; empty for the mean of all
    guards: tuple[str, ...]
    baselines: tuple[Trial, ...]
    trials: tuple[Trial, ...]
    holdout_evaluator: str | None = None
    holdout: tuple[Trial, ...] = ()
    notices: tuple[Notice, ...] = ()
    left_out: tuple[str, ...] = ()  # models that the plan leaves out: unrelated to the others
    output: str | None = None
    # By key of a candidate: the file with the statistics of its norms, measured on inputs.
    norms: dict[str, str] = field(default_factory=dict)
    command: str = ""  # the command that continues the study, if a command began it

    @property
    def is_finished(self) -> bool:
        return 0 < self.planned <= sum(trial.state.is_final for trial in self.trials)

    @property
    def all_trials(self) -> tuple[Trial, ...]:
        return (*self.baselines, *self.trials)

    @property
    def score_names(self) -> tuple[str, ...]:
        """The names of all scores, in the order they first occur."""
        scored = [trial.scored for trial in self.all_trials if trial.scored is not None]
        return tuple({name: None for item in scored for name in item.scores})


# ---------------------------------------------------------------- conclusions


@dataclass(frozen=True)
class Estimate:
    """A number with a 95% interval, if one can be given."""

    value: float
    low: float | None = None
    high: float | None = None

    def interval(self, sign: str = "") -> str:
        """Return the bounds alone; empty if there are none."""
        if self.low is None or self.high is None:
            return ""
        return f"{self.low:{sign}.3g} … {self.high:{sign}.3g}"

    def __format__(self, sign: str) -> str:
        """Return the number, and the interval in brackets.

        >>> str(Estimate(0.5)), f"{Estimate(0.25, 0.125, 0.375):+}"
        ('0.5', '+0.25 (+0.125 … +0.375)')
        """
        interval = self.interval(sign)
        return f"{self.value:{sign}.3g}" + (f" ({interval})" if interval else "")

    def __str__(self) -> str:
        return format(self)


@dataclass(frozen=True)
class Ranked:
    """A setting with all its seeds, or a baseline."""

    settings: dict[str, Any]
    trials: tuple[int, ...]
    """The numbers of its trials; for a baseline, its number among the baselines."""
    objective: Estimate
    scores: dict[str, float]  # means over the seeds
    broken: tuple[str, ...] = ()  # guards that it breaks, by its mean scores
    baseline: str = ""

    @property
    def role(self) -> Role:
        return Role.of(self.baseline)

    @property
    def label(self) -> str:
        """Its name in tables: `method=dare+ties drop_rate=0.9`, or the name of a baseline."""
        return self.short if self.baseline else settings_text(self.settings)

    @property
    def short(self) -> str:
        """Its short name: the numbers of its trials, or the name of a baseline."""
        some = ", ".join(map(str, self.trials[:MOST_NUMBERS]))
        more = ", …" if len(self.trials) > MOST_NUMBERS else ""
        return self.baseline or f"trial{'s' if len(self.trials) > 1 else ''} {some}{more}"

    @property
    def key(self) -> str:
        return self.baseline or key_of(self.settings)

    def __str__(self) -> str:
        return f"{self.label}: {self.objective}"


@dataclass(frozen=True)
class Difference:
    """The best minus another, item by item."""

    other: str
    estimate: Estimate
    verdict: str
    """`better`, `worse`, `no clear difference`, or `not known` if chance cannot be estimated."""


@dataclass(frozen=True)
class Holdout:
    """The winner on data that were not used to choose."""

    objective: Estimate
    against: tuple[Difference, ...]
    validation: float  # the objective of the same weights where they were chosen
    loss: float
    looks: int  # winners that have been scored on it; after the first, it is no longer held out


@dataclass(frozen=True)
class TaskScores:
    """One score of the best, and those of the baselines."""

    name: str  # empty for the objective
    items: int  # the number of items that it is the mean of; 0 if unknown
    is_share: bool
    base: Estimate | None
    single: Estimate | None
    average: Estimate | None
    best: Estimate
    alone: str = ""  # the single model that is best at it
    change: Difference | None = None  # the best minus that model, if it is another
    from_base: Difference | None = None  # the best minus the base, if it is not that


@dataclass(frozen=True)
class Conclusion:
    """The findings of a study, and their limits."""

    ranking: tuple[Ranked, ...] = ()
    """Settings, the best first; those that break guards come last."""
    baselines: tuple[Ranked, ...] = ()
    best: Ranked | None = None
    """The choice: of all settings and baselines that keep to the guards, the one with the highest
    objective; if several are equal, the simplest."""
    runner_up: Ranked | None = None  # the best setting with other weights than that
    against: tuple[Difference, ...] = ()  # the best minus each other
    tied: tuple[Ranked, ...] = ()  # settings and baselines that the best cannot be told apart from
    noise: float | None = None
    """The difference of two scorings of the same weights in the objective, if measured."""
    holdout: Holdout | None = None
    tasks: tuple[TaskScores, ...] = ()
    """The objective and each score, from the holdout if the best was scored there."""
    notices: tuple[Notice, ...] = ()

    @property
    def failure(self) -> str:
        """The reason why there is no answer; empty if there is one, even "do not merge"."""
        if self.best is not None:
            return ""
        is_scored = self.ranking or self.baselines
        return "every candidate breaks a guard" if is_scored else "nothing is scored yet"

    @property
    def is_merge(self) -> bool:
        """True if the answer is to merge, so that there is a recipe to take."""
        return self.best is not None and self.best.role not in NOT_MERGED
