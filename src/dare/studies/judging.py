"""What is asked of merges in a study, what is scored of each, and how simple it is."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from dare.errors import RecipeError
from dare.recipe.document import recipe_from_document
from dare.recipe.schema import Recipe
from dare.recipe.settings import with_settings
from dare.studies.objective import Guard, Objective
from dare.studies.results import Estimate, Ranked, Role, Scored, Settings, StudyData, Trial, key_of
from dare.studies.space import is_random

_PLAIN = (Role.AVERAGE, Role.SUM)
"""Baselines that are merges, and need no setting."""


@dataclass(frozen=True)
class Entry:
    """A setting with its seeds, or a baseline: what is scored of it."""

    trials: tuple[Trial, ...]
    scored: tuple[Scored, ...]
    name: str
    is_random: bool

    @property
    def scores(self) -> dict[str, float]:
        """Means over the seeds, of the scores that all have."""
        names = [n for n in self.scored[0].scores if all(n in s.scores for s in self.scored)]
        return {n: math.fsum(s.scores[n] for s in self.scored) / len(self.scored) for n in names}


@dataclass(frozen=True)
class Judge:
    """What is asked of merges in a study."""

    objective: Objective
    guards: tuple[Guard, ...]
    recipe: Recipe | None
    """None if it cannot be read here, as when a stage of its own is missing."""

    @classmethod
    def of(cls, data: StudyData) -> Judge:
        objective = Objective.parse(data.objective)
        document = {key: value for key, value in data.recipe.items() if key != "search"}
        try:
            recipe = recipe_from_document(document, "the study's recipe")
        except RecipeError:
            recipe = None
        return cls(objective, tuple(Guard.parse(g, objective) for g in data.guards), recipe)

    def with_settings(self, settings: Settings) -> Recipe | None:
        """The recipe of a setting, if it can be had."""
        try:
            return with_settings(self.recipe, settings) if self.recipe else None
        except RecipeError:
            return None

    def is_random(self, settings: Settings) -> bool:
        """Whether another seed gives other weights; taken for granted if it cannot be told."""
        recipe = self.with_settings(settings)
        return recipe is None or is_random(recipe)

    def ranked(self, entry: Entry, value: Estimate, singles: Sequence[Scored]) -> Ranked:
        """An entry with its objective, and the guards that its mean scores break."""
        scores = entry.scores
        single_scores = [single.scores for single in singles]
        broken = [s for guard in self.guards for s in guard.broken(scores, single_scores)]
        return Ranked(
            settings={} if entry.name else dict(entry.trials[0].settings),
            trials=tuple(trial.number for trial in entry.trials),
            objective=value,
            scores=scores,
            broken=tuple(broken),
            baseline=entry.name,
        )


def entries_of_settings(trials: Iterable[Trial], judge: Judge) -> list[Entry]:
    """Settings with those of their seeds that are done."""
    together: dict[str, list[Trial]] = {}
    for trial in trials:
        if trial.is_done and trial.scored is not None:
            together.setdefault(key_of(trial.settings), []).append(trial)
    return [
        entry_of(trials, "", judge.is_random(trials[0].settings)) for trials in together.values()
    ]


def entries_of_names(trials: Iterable[Trial], judge: Judge) -> list[Entry]:
    """Baselines that are done, but for the one that is there to tell the noise."""
    together: dict[str, list[Trial]] = {}
    for trial in trials:
        if trial.is_done and trial.scored is not None and trial.role is not Role.AGAIN:
            together.setdefault(trial.name, []).append(trial)
    return [
        entry_of(
            members, name, members[0].role is Role.ADVICE or _is_set_and_random(members[0], judge)
        )
        for name, members in together.items()
    ]


def _is_set_and_random(trial: Trial, judge: Judge) -> bool:
    """Of a runner-up, which has settings; those baselines that have none are not random."""
    return bool(trial.settings) and judge.is_random(trial.settings)


def entry_of(trials: Sequence[Trial], name: str, is_random: bool) -> Entry:
    """Trials that are scored, as one."""
    scored = tuple(trial.scored for trial in trials if trial.scored is not None)
    return Entry(tuple(trials), scored, name, is_random)


def singles_of(entries: Iterable[Entry]) -> list[Scored]:
    """What single models have, for guards that ask for a share of it."""
    return [s for entry in entries if Role.of(entry.name) is Role.SINGLE for s in entry.scored]


# ------------------------------------------------------------------------------------- simplicity


def simplest_first(best: Ranked, tied: Sequence[Ranked], judge: Judge) -> list[Ranked]:
    """By what they need: a plain merge, then few stages, no randomness, few changes."""
    merges = [best, *(r for r in tied if r.role in (Role.SETTING, *_PLAIN))]
    return sorted(merges, key=lambda ranked: (_complexity(ranked, judge), -ranked.objective.value))


def _complexity(ranked: Ranked, judge: Judge) -> tuple[int, int, bool, int]:
    if ranked.baseline:
        return 0, 0, False, 0
    recipe = judge.with_settings(ranked.settings)
    if recipe is None:
        stages = len(str(ranked.settings.get("method", "")).split("+"))
        return 1, stages, True, sum(map(_count, ranked.settings.values()))
    return 1, len(recipe.chain), is_random(recipe), _changes(ranked.settings, judge)


def _changes(settings: Settings, judge: Judge) -> int:
    """How many settings differ in effect from the recipe's; each layer's value counts."""
    method = {name: value for name, value in settings.items() if name == "method"}
    start = judge.with_settings(method)
    changes = int(start is not None and _method(start) != _method(judge.recipe))
    for name, value in settings.items():
        if name != "method":
            changed = judge.with_settings({**method, name: value})
            differs = changed is None or start is None or _effect(changed) != _effect(start)
            changes += _count(value) if differs else 0
    return changes


def _method(recipe: Recipe | None) -> list[str]:
    return [stage.name for stage, _ in recipe.chain] if recipe else []


def _effect(recipe: Recipe) -> tuple[Any, ...]:
    return (
        [(stage.name, dict(settings)) for stage, settings in recipe.chain],
        [entry.settings for entry in recipe.models],
        (recipe.weights(), recipe.seeds()),
        (recipe.scale, recipe.embedding_drop_rate),
    )


def _count(value: Any) -> int:
    return len(value) if isinstance(value, list | tuple) else 1
