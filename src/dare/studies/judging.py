"""The judgement of merges: which trials belong together, keep the guards, and are simplest."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dare.documents.notices import Notice, notice
from dare.errors import RecipeError
from dare.recipe.document import request_from_document, with_settings
from dare.recipe.recipe import Recipe
from dare.recipe.search import Guard, Objective, Scores
from dare.studies.results import (
    Estimate,
    Ranked,
    Role,
    Scored,
    Settings,
    StudyData,
    Trial,
    key_of,
)
from dare.studies.space import is_random

_PLAIN = (Role.AVERAGE, Role.WITHOUT_STRANGERS, Role.SUM)
"""Baselines that are merges, and need no setting."""
LEVELS = (
    (Role.BASE,),
    (Role.SINGLE,),
    (Role.AVERAGE, Role.WITHOUT_STRANGERS),
    (Role.SUM, Role.PART),
    (Role.ADVICE,),
    (Role.RECIPE,),
)
"""Baselines, the simplest first."""
_SMALLER_IS_BETTER = {"loss", "perplexity", "ppl", "bits", "bpb", "error", "err", "nll", "wer"}


def doubts(
    objective: Objective, names: Iterable[str], guards: Sequence[Guard] = ()
) -> list[Notice]:
    """Return a notice for each score that should not count as better when it grows."""
    bounded = {guard.name for guard in guards if guard.kind == "max"}
    return [
        notice(
            "larger_is_better",
            name=name,
            reason="a guard sets its maximum" if name in bounded else "its name is of an error",
        )
        for name, sign in objective.directions(names).items()
        if sign > 0 and (name in bounded or sounds_like_an_error(name))
    ]


def sounds_like_an_error(name: str) -> bool:
    """Tell if a score is called like something that has no upper end, and should be small."""
    return not _SMALLER_IS_BETTER.isdisjoint(re.split(r"[^a-z]+", name.lower()))


# ------------------------------------------------------------------------------------- judging


@dataclass(frozen=True)
class Entry:
    """The scored trials of a setting with its seeds, or of a baseline."""

    trials: tuple[Trial, ...]
    name: str = ""  # the name of a baseline
    is_random: bool = True
    """True if another seed would give other weights; if not, one trial is all there is."""

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
class Judge:
    """The demands on merges in a study."""

    objective: Objective
    guards: tuple[Guard, ...]
    recipe: Recipe | None = None
    """None if it cannot be read here, as when a stage of its own is missing."""

    @classmethod
    def of(cls, data: StudyData) -> Judge:
        document = {key: value for key, value in data.recipe.items() if key != "search"}
        try:
            recipe = request_from_document(document, "the study's recipe").recipe
        except RecipeError:
            recipe = None
        return cls.by(data.objective, data.guards, recipe)

    @classmethod
    def by(
        cls, weights: Mapping[str, float], guards: Iterable[str], recipe: Recipe | None = None
    ) -> Judge:
        objective = Objective(weights)
        return cls(objective, tuple(Guard.parse(text, objective) for text in guards), recipe)

    def check_names(self, scores: Iterable[str]) -> None:
        """Refuse an objective or a guard that asks for scores which there are not."""
        names = list(scores)
        self.objective.shares(names)
        for guard in self.guards:
            guard.check(names)

    def broken(self, scores: Scores, singles: Sequence[Scores]) -> tuple[str, ...]:
        """Return a sentence for each guard that is broken."""
        return tuple(line for guard in self.guards for line in guard.broken(scores, singles))

    def directions(self, names: Sequence[str]) -> dict[str, int]:
        """Return 1 for scores of which more is better, -1 for less; others are left out."""
        found: dict[str, int] = {}
        for guard in self.guards:
            found |= {n: sign for n, sign in guard.directions(names).items() if n in names}
        return found | self.objective.directions(names)

    def with_settings(self, settings: Settings) -> Recipe | None:
        """Return the recipe of a setting, if it can be had."""
        try:
            return with_settings(self.recipe, settings) if self.recipe else None
        except RecipeError:
            return None

    def is_random(self, settings: Settings) -> bool:
        """Tell if another seed gives other weights; assumed if that is not known."""
        recipe = self.with_settings(settings)
        return recipe is None or is_random(recipe)

    def ranked(self, entry: Entry, value: Estimate, singles: Sequence[Scores]) -> Ranked:
        """Return an entry with its objective, and the guards that its mean scores break."""
        return Ranked(
            settings={} if entry.name else dict(entry.trials[0].settings),
            trials=tuple(trial.number for trial in entry.trials),
            objective=value,
            scores=entry.scores,
            broken=self.broken(entry.scores, singles),
            baseline=entry.name,
        )

    def entries(self, trials: Iterable[Trial]) -> list[Entry]:
        """Put done trials together by name or setting, but for the one that tells the noise."""
        found: dict[str, tuple[Trial, ...]] = {}
        for trial in trials:
            if trial.is_done and trial.scored is not None and trial.role is not Role.AGAIN:
                key = trial.name or key_of(trial.settings)
                found[key] = (*found.get(key, ()), trial)
        return [Entry(same, same[0].name, self._draws(same[0])) for same in found.values()]

    def _draws(self, trial: Trial) -> bool:
        """Tell if another seed gives other weights; of plain baselines, only recipes may draw."""
        if trial.name and not trial.settings:
            return trial.role in (Role.ADVICE, Role.RECIPE)
        return self.is_random(trial.settings)

    def simplest_first(self, best: Ranked, tied: Sequence[Ranked]) -> list[Ranked]:
        """Sort by what they need: a plain merge, then few stages, no randomness, few changes."""
        merges = [best, *(r for r in tied if r.role in (Role.SETTING, *_PLAIN))]
        return sorted(merges, key=lambda one: (self._complexity(one), -one.objective.value))

    def _complexity(self, ranked: Ranked) -> tuple[int, int, bool, int]:
        if ranked.baseline:
            return 0, 0, False, 0
        recipe = self.with_settings(ranked.settings)
        if recipe is None:
            stages = len(str(ranked.settings.get("method", "")).split("+"))
            return 1, stages, True, sum(map(_count, ranked.settings.values()))
        return 1, len(recipe.chain), is_random(recipe), self._changes(ranked.settings)

    def _changes(self, settings: Settings) -> int:
        """Count settings that differ in effect from the recipe's; each layer's value counts."""
        method = {name: value for name, value in settings.items() if name == "method"}
        start, changes = self.with_settings(method), 0
        if start is not None and self.recipe is not None:
            before, now = ([s.name for s, _ in r.chain] for r in (self.recipe, start))
            changes = int(before != now)
        for name, value in settings.items():
            if name != "method":
                changed = self.with_settings({**method, name: value})
                differs = changed is None or start is None or _effect(changed) != _effect(start)
                changes += _count(value) if differs else 0
        return changes


def _effect(recipe: Recipe) -> tuple[Any, ...]:
    return (
        [(stage.name, dict(settings)) for stage, settings in recipe.chain],
        [entry.settings for entry in recipe.models],
        (recipe.weights(), recipe.seeds()),
        (recipe.scale, recipe.embedding_drop_rate),
    )


def _count(value: Any) -> int:
    return len(value) if isinstance(value, list | tuple) else 1
