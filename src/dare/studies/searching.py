"""The search, as a story: baselines first, then the plan, then trials, then what they show.

Several processes, and several threads of each, work on one study: each takes what nobody has
taken, until nothing is left and nobody is busy any more.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from os import PathLike
from pathlib import Path
from statistics import fmean
from typing import Any

from dare.api import AnyRecipe, make_recipe, plan
from dare.errors import InputError, RecipeError
from dare.planning.machine import available_cores
from dare.recipe.document import recipe_from_document
from dare.recipe.schema import Recipe
from dare.recipe.search import Choices, Range
from dare.studies.asking import Asked, Evaluator, ask, told
from dare.studies.baselines import advised_recipe, baseline_recipes
from dare.studies.evaluators import Scorer, open_scorer
from dare.studies.items import choose_subset, rungs
from dare.studies.progress import Display, show_search
from dare.studies.reading import read_study, recipe_of, runner_up
from dare.studies.results import Conclusion, Role, Settings, State, StudyData, Trial, key_of
from dare.studies.scores import check_items
from dare.studies.scoring import Interrupted, Terms, score_candidate
from dare.studies.study import BASELINE, FINAL, HOLDOUT, Claim, Placed, Planned, Study
from dare.tensors.sizes import show_size

POLL_SECONDS = 0.3
FINALISTS = 5
"""Settings that are scored on all items, after all were scored on a subset."""

Job = Callable[[Scorer], Any]


@dataclass(frozen=True, repr=False)
class SearchResult:
    """What a search has found."""

    study: Path
    data: StudyData
    conclusion: Conclusion
    best: Recipe | None
    """The recipe of the best setting, or of a baseline that beats it; None if there is nothing to
    merge, for which `conclusion.no_recipe` has the reason."""
    simplest: Recipe | None
    """The simplest recipe that cannot be told apart from the best and that no baseline beats."""

    def to_dict(self) -> dict[str, Any]:
        """The result as plain values, ready for JSON; the items stay in the study."""
        document = self.data.to_dict()
        for table in ("baselines", "trials", "holdout"):
            for trial in document[table]:
                scored = trial.pop("scored") or {}
                trial["scores"] = scored.get("scores")
                trial["items"] = len(scored.get("items", ()))
        for name in ("subset", "advice", "output"):
            document.pop(name)
        recipes = {
            name: None if recipe is None else recipe.to_document()
            for name, recipe in (("best", self.best), ("simplest", self.simplest))
        }
        return {**document, "conclusion": self.conclusion.to_dict(), "recipes": recipes}

    def __repr__(self) -> str:
        """The study and its best setting in a line."""
        return f"<SearchResult of {self.study}: {self}>"

    def __str__(self) -> str:
        """What to take, with its interval."""
        chosen = self.conclusion.chosen
        if chosen is not None and not self.conclusion.no_recipe:
            return f"{chosen.label}: {chosen.objective}"
        return self.conclusion.no_recipe


def search(
    recipe: AnyRecipe,
    over: Mapping[str, Choices | Range] | None = None,
    *,
    evaluate: Evaluator | None = None,
    holdout: Evaluator | None = None,
    study: str | PathLike[str] | None = None,
    jobs: int = 1,
    retry: bool = False,
    advice: bool = True,
    work: str | PathLike[str] | None = None,
    verbose: bool = True,
    **settings: Any,
) -> SearchResult:
    """Search around a recipe for the settings whose merge scores best, and say whether it is best.

    `over` has a list or a range for each setting, and `evaluate` scores a candidate: a function, or
    a text as on the command line. All else is laid over the recipe's table `[search]`: `sampler`,
    `trials`, `seeds`, `objective`, `guards`, `race`, `items`, `time_limit`. The study is a file;
    the same call resumes it.
    """
    place = study_place(recipe, study)
    loaded = make_recipe(recipe)
    asked = ask(loaded, over=over, evaluate=evaluate, holdout=holdout, study=place, **settings)
    if jobs > 1 and not (isinstance(asked.evaluator, str) and isinstance(holdout, str | None)):
        raise RecipeError(
            "jobs: a function object runs in this process, one candidate at a time; "
            "give the function by name, as in 'score.py:score'"
        )
    opened = Study(place, asked.charter)
    try:
        with show_search(visible=verbose) as display:
            story = _Story(asked, opened, display, jobs, None if work is None else Path(work))
            story.tell(retry=retry, advice=advice)
        return result_of(opened)
    finally:
        opened.close()


def read_result(path: Path) -> SearchResult:
    """What a study shows by now, also while others work on it."""
    study = Study(path)
    try:
        return result_of(study)
    finally:
        study.close()


def result_of(study: Study) -> SearchResult:
    """What an open study shows by now."""
    data, conclusion = read_study(study)
    best, simplest = (
        None if conclusion.no_recipe or ranked is None else recipe_of(data, ranked)
        for ranked in (conclusion.chosen, conclusion.simplest)
    )
    return SearchResult(study.path, data, conclusion, best, simplest)


def study_place(recipe: AnyRecipe, study: str | PathLike[str] | None) -> Path:
    """Where a study lies: as given, or beside the recipe under its name."""
    if study is not None:
        return Path(study)
    if isinstance(recipe, str | PathLike):
        return Path(recipe).with_suffix(".study.db")
    return Path("study.db")


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"


def _known(trials: Iterable[Trial]) -> dict[str, Trial]:
    """Weights that were scored already, by digest."""
    return {trial.digest: trial for trial in trials if trial.is_done and trial.digest}


def _mean_objective(trials: Sequence[Trial]) -> float:
    return fmean(trial.objective or 0.0 for trial in trials)


@dataclass
class _Story:
    """A search under way."""

    asked: Asked
    study: Study
    display: Display
    jobs: int
    work: Path | None

    def __post_init__(self) -> None:
        self.terms = Terms(self.asked, threading.Event())
        self.known_baselines: dict[str, Trial] = {}

    def tell(self, *, retry: bool, advice: bool) -> None:
        """Do all that is left to do."""
        first_new = len(self.study.trials())
        with self._scorers(self.asked.evaluator) as scorers:
            self._prepare(advice=advice)
            self._score_baselines(scorers)
            self._set_terms(scorers[0])
            self._announce()
            self._score_trials(scorers, retry_before=first_new if retry else 0)
            if self.study.subset is not None:
                self._score_finals(scorers)
        if self.asked.holdout is not None:
            with self._scorers(self.asked.holdout) as scorers:
                self._score_holdout(scorers)

    # ------------------------------------------------------------ before the trials

    def _prepare(self, *, advice: bool) -> None:
        """Find the advice, once, and where the search starts."""
        output = self.asked.output
        with self.study.turn():
            self.study.keep("output", None if output is None else str(output))
            planned = max(self.asked.planned, self.study.note("planned") or 0)
            self.study.keep("planned", planned)
        if self.study.note("starts") is not None:
            return
        recipe, remark = None, ""
        if advice:
            self.display.say("analysing the models for the advice")
            recipe, remark = advised_recipe(self.asked.recipe)
        space = self.asked.space
        starts = [space.nearest(start) for start in (recipe, space.recipe) if start is not None]
        different = {key_of(start): start for start in starts if start is not None}
        with self.study.turn():
            if self.study.note("starts") is None:
                self.study.keep("advice", None if recipe is None else recipe.to_document())
                self._remark(remark)
                self.study.keep("starts", list(different.values()))

    def _remark(self, *texts: str) -> None:
        known = self.study.note("remarks") or []
        new = [text for text in texts if text and text not in known]
        if new:
            self.study.keep("remarks", [*known, *new])

    def _score_baselines(self, scorers: Sequence[Scorer]) -> None:
        document = self.study.note("advice")
        advised = None if document is None else recipe_from_document(document, "advice")
        recipes = baseline_recipes(self.asked.recipe, advised)
        self._check_inputs(scorers[0], recipes[Role.AVERAGE])

        plain: dict[str, tuple[Recipe, Settings]] = {n: (r, {}) for n, r in recipes.items()}
        self._score_beside(scorers, BASELINE, plain, self.terms)
        found = self.study.beside(BASELINE)
        failed = [trial for trial in found if not trial.is_done]
        if len(failed) == len(found):
            last = failed[0].output.strip().rpartition("\n")[2]
            printed = f"; its last line was: {last}" if last else ""
            raise InputError(f"no baseline could be scored: {failed[0].message}{printed}")

    def _check_inputs(self, scorer: Scorer, average: Recipe) -> None:
        """Refuse to go on with models that are no longer those of the study."""
        for done in self.study.beside(BASELINE):
            if done.role is Role.AVERAGE and done.digest not in (None, scorer.make(average)):
                raise InputError(
                    f"{self.study.path}: the base or a model has changed since the study "
                    "began (their average has other weights); give another --study"
                )

    def _set_terms(self, scorer: Scorer) -> None:
        """What the baselines say of the evaluator: which items there are, and what to take."""
        done = [trial for trial in self.study.beside(BASELINE) if trial.scored is not None]
        self.known_baselines = _known(done)
        scores = [trial.scored for trial in done if trial.scored is not None]
        first = scores[0]
        singles = [t.scored.scores for t in done if t.role is Role.SINGLE and t.scored is not None]
        remarks: list[str] = []
        differences = [d for d in (check_items(first, other) for other in scores[1:]) if d]
        if any(other.scores.keys() != first.scores.keys() for other in scores):
            raise InputError(
                "the evaluator gives different scores each time, so nothing can be "
                f"compared: {differences[0]}; return the same names each time"
            )
        has_items = bool(first.items) and not differences
        self.terms = replace(self.terms, singles=singles, reference=first, has_items=has_items)
        wanted = self.asked.table.race or self.asked.table.items is not None
        if differences:
            remarks.append(
                f"The evaluator gives different items each time ({differences[0]}), so "
                "candidates cannot be compared item by item."
            )
        elif wanted and not has_items:
            remarks.append(
                "The evaluator gives no items, so all candidates are scored on all data."
            )
        elif wanted and not scorer.takes_items:
            remarks.append(
                "The evaluator cannot be told which items to score, so every candidate is scored "
                "on all data."
            )
        elif self.asked.table.race:
            parts = rungs(first.items, seed=self.asked.seed)
            self.terms = replace(self.terms, rungs=parts if len(parts) > 1 else ())
        elif self.asked.table.items is not None and self.asked.table.items < len(first.items):
            self._choose_items(done)
        with self.study.turn():
            self._remark(*remarks)

    def _choose_items(self, done: Sequence[Trial]) -> None:
        with self.study.turn():
            if self.study.subset is None:
                by_name = {
                    t.name: t.scored.items for t in done if t.scored and t.role is not Role.AGAIN
                }
                count = self.asked.table.items or 0
                self.study.keep_subset(choose_subset(by_name, count, self.asked.seed))
        self.terms = replace(self.terms, subset=self.study.subset)

    def _announce(self) -> None:
        """Say how long it will take."""
        done = [trial for trial in self.study.beside(BASELINE) if trial.is_done]
        each = sum(trial.seconds for trial in done) / len(done)
        left = self.asked.planned - len(self.study.trials())
        if left <= 0:
            return
        share = 1.0
        if self.terms.subset is not None and self.terms.reference is not None:
            share = len(self.terms.subset.ids) / len(self.terms.reference.items)
        cost = plan(baseline_recipes(self.asked.recipe, None)[Role.AVERAGE]).cost
        size = show_size(cost.bytes_written)
        room = (
            f"{size} of disk for each job"
            if "{model}" in told(self.asked.evaluator)
            else f"{show_size(cost.bytes_read)} of models and {size} of candidate in memory"
        )
        self.display.announce(
            f"{left} trials × {each * share:.1f} s"
            + (f" / {self.jobs} jobs" if self.jobs > 1 else "")
            + f" = {_duration(left * each * share / self.jobs)}; {room}"
        )

    # ------------------------------------------------------------ trials

    def _score_trials(self, scorers: Sequence[Scorer], *, retry_before: int) -> None:
        choose = self._chooser()
        space = self.asked.space
        planned = self.asked.planned

        def take() -> Job | None:
            claim = self.study.take_next(space, planned, choose, retry_before)
            return None if claim is None else partial(self._score_trial, claim)

        begun = self.study.trials()
        again = [
            p for p in begun if p.trial.state is State.FAILED and p.trial.number < retry_before
        ]
        self.display.begin(planned, len(begun) - len(again))
        self._work(scorers, take, self.study.is_busy)

    def _score_trial(self, claim: Claim, scorer: Scorer) -> None:
        known = _known([placed.trial for placed in self.study.trials()])
        if self.terms.subset is None:
            known |= self.known_baselines
        recipe = self.asked.space.candidate(claim.settings, claim.shift)
        ended = score_candidate(scorer, claim, recipe, self.terms, known)
        self.display.scored(ended, lambda: read_study(self.study, resamples=200))

    def _chooser(self) -> Callable[[int, Sequence[Placed]], Planned | None]:
        """What stands at a place of the plan."""
        space, shifts = self.asked.space, self.asked.shifts
        starts = self.study.note("starts")
        if self.asked.sampler == "grid":
            settings = space.grid(starts[0] if starts else None)
            plan = [
                Planned(setting, shift)
                for shift in shifts
                for setting in settings
                if shift == 0 or space.is_random(setting)
            ]
            return lambda place, _found: plan[place]

        def choose(place: int, found: Sequence[Placed]) -> Planned | None:
            number, repeat = divmod(place, len(shifts))
            if repeat:  # the setting before, with another seed
                first = next(p.trial for p in found if p.place == place - repeat)
                return Planned(first.settings, shifts[repeat])
            if number < len(starts):
                return Planned(starts[number])
            drawn = self.asked.sampler == "random"
            return Planned(space.draw(number, self.asked.seed)) if drawn else None

        return choose

    # ------------------------------------------------------------ after the trials

    def _score_finals(self, scorers: Sequence[Scorer]) -> None:
        """Score the best on all items, now that a subset has shown which they may be."""
        by_setting: dict[str, list[Trial]] = {}
        for trial in (placed.trial for placed in self.study.trials()):
            if trial.is_done and not trial.broken:
                by_setting.setdefault(key_of(trial.settings), []).append(trial)
        best = sorted(by_setting.values(), key=_mean_objective, reverse=True)[:FINALISTS]
        recipes = {
            str(trial.number): (self._recipe_of(trial), trial.settings)
            for trials in best
            for trial in trials
        }
        self._score_beside(scorers, FINAL, recipes, replace(self.terms, subset=None))

    def _recipe_of(self, trial: Trial) -> Recipe:
        shift = trial.seed - self.asked.recipe.seed
        return self.asked.space.candidate(trial.settings, shift)

    def _score_holdout(self, scorers: Sequence[Scorer]) -> None:
        """Score the winner, the runner-up and the baselines on data that has chosen nothing."""
        data, conclusion = read_study(self.study)
        if conclusion.best is None:
            return
        evaluator = told(self.asked.holdout or "")
        with self.study.turn():
            before = self.study.note("holdout")
            if before not in (None, evaluator):
                raise InputError(
                    f"{self.study.path}: its holdout was {before}; a second holdout would be "
                    "used to choose too; keep the first one"
                )
            self.study.keep("holdout", evaluator)
        ranked = {Role.WINNER: conclusion.best, Role.RUNNER_UP: runner_up(conclusion)}
        recipes = {
            f"{role} {key_of(found.settings)}": (recipe_of(data, found), found.settings)
            for role, found in ranked.items()
            if found is not None
        }
        for baseline in conclusion.baselines:
            recipes[baseline.baseline] = recipe_of(data, baseline), {}
        terms = Terms(self.asked, self.terms.stop)
        self._score_beside(scorers, HOLDOUT, recipes, terms)

    def _score_beside(
        self,
        scorers: Sequence[Scorer],
        kind: str,
        recipes: Mapping[str, tuple[Recipe, Settings]],
        terms: Terms,
    ) -> None:
        """Score candidates that are no trials, by name; each has settings to be known by."""
        wanted = {name: settings for name, (_, settings) in recipes.items()}

        def take() -> Job | None:
            claim = self.study.take_beside(kind, wanted)
            if claim is None:
                return None
            self.display.say(f"{kind} {claim.name.partition(' {')[0]}")
            recipe, _ = recipes[claim.name]
            known = {} if claim.name == Role.AGAIN else _known(self.study.beside(kind))
            return partial(score_candidate, claim=claim, recipe=recipe, terms=terms, known=known)

        self._work(scorers, take, lambda: self.study.is_busy(kind))

    # ------------------------------------------------------------ threads

    @contextmanager
    def _scorers(self, evaluator: Evaluator) -> Iterator[list[Scorer]]:
        """What scores, one for each job; all are ended with the search, however it ends."""
        scorers: list[Scorer] = []
        try:
            for _ in range(self.jobs):
                scorers.append(
                    open_scorer(
                        evaluator,
                        self.asked.recipe,
                        time_limit=self.asked.table.time_limit,
                        work=self.work,
                        threads=max(1, available_cores() // self.jobs),
                    )
                )
            yield scorers
        finally:
            for scorer in scorers:
                scorer.close()

    def _work(
        self,
        scorers: Sequence[Scorer],
        take: Callable[[], Job | None],
        is_busy: Callable[[], bool],
    ) -> None:
        """Let every scorer do what there is to do, until nothing is left and nobody is busy."""
        stop, errors = self.terms.stop, list[BaseException]()

        def work(scorer: Scorer) -> None:
            try:
                while not stop.is_set():
                    job = take()
                    if job is not None:
                        job(scorer)
                    elif is_busy():  # whoever is busy may die over it
                        time.sleep(POLL_SECONDS)
                    else:
                        return
            except Interrupted:
                pass
            except BaseException as error:
                errors.append(error)
                stop.set()

        threads = [threading.Thread(target=work, args=(s,), daemon=True) for s in scorers]
        for thread in threads:
            thread.start()
        try:
            while any(thread.is_alive() for thread in threads):
                threads[0].join(POLL_SECONDS)
                for thread in threads[1:]:
                    thread.join(0.01)
        except BaseException:
            stop.set()
            for scorer in scorers:
                scorer.close()
            raise
        if errors:
            raise errors[0]
