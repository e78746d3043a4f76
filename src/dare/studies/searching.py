"""The search from beginning to end: baselines first, then the plan, the trials, the conclusion.

Several processes, and several threads of each, work on one study: each takes trials that nobody
has taken, until none remain and nobody is busy any more.
"""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from os import PathLike
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)

from dare.analysis.advice import advise
from dare.analysis.analyzing import analyze
from dare.api import AnyModels, AnyRecipe, make_request
from dare.documents.notices import Notice, notice
from dare.documents.words import counted, time_text, value_text
from dare.errors import DareError, EvaluationError, InputError, RecipeError, printable
from dare.recipe.options import Choices, Range, Search
from dare.recipe.recipe import Recipe, Request
from dare.recipe.settings import INCLUDE
from dare.stores.locations import AnyPath
from dare.studies.data_files import Task, read_tasks
from dare.studies.document import SearchResult, progress_text, read_study, result_of, winners
from dare.studies.evaluators import Scorer, check_evaluator, open_scorer, source_digest
from dare.studies.evaluators.examples import evaluator_of
from dare.studies.evaluators.functions import Evaluator, compare_items
from dare.studies.judging import Judge
from dare.studies.results import (
    ALONE,
    NOT_MERGED,
    Conclusion,
    Role,
    Scored,
    Settings,
    State,
    StudyData,
    Trial,
    group_means,
    group_of,
    groups_of,
    key_of,
)
from dare.studies.space import (
    PLAN,
    Space,
    UsualMerges,
    baseline_recipes,
    is_random,
    recipe_of,
    seed_shifts,
)
from dare.studies.statistics import is_behind, items_needed, rungs, visible_difference
from dare.studies.study import BASELINE, HOLDOUT, Charter, Claim, Placed, Planned, Study
from dare.tensors.system import available_cores

DEFAULT_TRIALS = 40
# Fields of `[search]` that have no effect where no settings are given.
ONLY_WITH_SETTINGS = ("sampler", "trials", "seeds", "race")
MINUTES = 15.0  # for a search that is given no settings
PREVIEWED = 20  # examples of each task that the base answers before anything else
LEAST_EXAMPLES = 60  # of a task, however little time there is
LEAST_TRIALS = 6  # the recipe, and the average at all its scales
INPUTS = 100  # examples of each task whose inputs are used for Gram matrices
PART_SEEN = 0.5  # about the part of the examples that racing scores a candidate on
POLL_SECONDS = 0.3
SPEED_SECONDS = 3600.0  # the period from which the remaining time is estimated
CONCLUDE_SECONDS = 1.0  # between two conclusions from the trials of a running search


def search(
    recipe: AnyRecipe | None = None,
    over: Mapping[str, Choices | Range] | None = None,
    *,
    base: AnyPath | None = None,
    models: AnyModels | None = None,
    data: AnyPath | Sequence[AnyPath] | None = None,
    evaluate: Evaluator | None = None,
    holdout: Evaluator | None = None,
    study: str | PathLike[str] | None = None,
    jobs: int = 1,
    retry: bool = False,
    work: str | PathLike[str] | None = None,
    verbose: bool = True,
    command: str = "",
    **settings: Any,
) -> SearchResult:
    """Find the merge of some models that scores best, and say whether it is best.

    Give a recipe, or base and models. Each file of `data` has the examples of a task; instead,
    `evaluate` can be a function that scores a candidate, or a text as on the command line. `over`
    has a list or a range for each setting; without it, the usual merges are tried.

    Further settings override the recipe's table `[search]`: `minutes`, `sampler`, `trials`,
    `seeds`, `objective`, `guards`, `race`, `time_limit`. The study is a file; the same call resumes
    it. A study that is not finished shows the `command` that continues it.
    """
    place = study_path(recipe, study)
    request = make_search(
        make_request(recipe, base=base, models=models),
        place,
        over=over,
        evaluate=evaluate,
        holdout=holdout,
        data=data,
        **settings,
    )
    if jobs > 1 and not (isinstance(request.evaluator, str) and isinstance(holdout, str | None)):
        raise RecipeError("jobs: more than one needs an evaluator by name, as in 'score.py:score'")
    with closing(Study(place, request.charter)) as opened:
        opened.keep("command", command)
        display = SearchProgress(visible=verbose)
        running = _Search(request, opened, display, jobs, None if work is None else Path(work))
        with nullcontext() if display.bar.disable else display.bar:
            running.run(retry=retry)
        return result_of(opened)


def gathered_path(study: Path) -> Path:
    """Return the file for the Gram matrices that a study gathers from inputs, for RegMean."""
    return study.with_suffix(".gathered.safetensors")


def study_path(recipe: AnyRecipe | None, study: str | PathLike[str] | None) -> Path:
    """Return the path of a study: as given, or beside the recipe under its name."""
    if study is None and isinstance(recipe, str | PathLike):
        return Path(recipe).with_suffix(".study.db")
    return Path(study or "study.db")


# ---------------------------------------------------------------- the request


@dataclass(frozen=True)
class SearchRequest:
    """A search, completely described."""

    space: Space
    table: Search
    sampler: str
    planned: int
    evaluator: Evaluator
    holdout: Evaluator | None
    judge: Judge
    merge: Request  # the user's request; its output is for the best, not for candidates
    usual: UsualMerges | None = None  # if no settings are given
    tasks: Sequence[Task] = ()

    @property
    def charter(self) -> Charter:
        document = self.space.recipe.to_document()
        table = self.table.to_tables()
        return Charter(
            recipe={"models": document.pop("models"), **document},
            space=table.get("over", {}),
            sampler=self.sampler,
            evaluator=_evaluator_name(self.evaluator),
            evaluator_code=source_digest(self.evaluator),
            guards=tuple(guard.text for guard in self.judge.guards),
            **{name: getattr(self.table, name) for name in ("seeds", "objective", "race")},
        )


def make_search(
    merge: Request,
    study: Path,
    *,
    over: Mapping[str, Choices | Range] | None = None,
    evaluate: Evaluator | None = None,
    holdout: Evaluator | None = None,
    **settings: Any,
) -> SearchRequest:
    """Override the recipe's table `[search]` by what is given; refuse what makes no sense."""
    recipe = merge.recipe
    table = recipe.search or Search()
    fields = {name: getattr(table, name) for name in Search.fields()}
    fields |= {name: value for name, value in settings.items() if value is not None}
    searched = {**table.over, **(over or {})}
    if (each := searched.pop(INCLUDE[:-1], None)) is not None:
        names = recipe.names
        searched = {f"{INCLUDE}{name}": each for name in names} | searched
    table = Search(**fields | {"over": searched})
    known = Search.fields()
    idle = [name for name in ONLY_WITH_SETTINGS if getattr(table, name) != known[name].default]
    if idle and not searched:
        how = f"add --over NAME=VALUES, or leave out {idle[0]} for the usual merges"
        raise RecipeError(f"{idle[0]}: no settings are given: {how}")
    judging = evaluate if evaluate is not None else table.eval
    held = holdout if holdout is not None else table.holdout
    if table.data and judging is not None:
        raise RecipeError("examples and an evaluator are given: leave out --data or --eval")
    tasks = read_tasks([Path(file) for file in table.data])
    if tasks:
        judging, held = (evaluator_of(table.data, held_out=part) for part in (False, True))
        signs = {task.name: task.direction for task in tasks}
        if not table.objective and set(signs.values()) != {1}:
            table = table.changed(objective=signs)
    if judging is None:
        how = "--data YOUR.jsonl, --eval score.py:score or 'python score.py {model}'"
        raise RecipeError(f"nothing scores the merges: add {how}")
    usual = None if searched else UsualMerges(recipe, str(gathered_path(study)) if tasks else None)
    if usual is not None:
        table = table.changed(over=usual.space, race=True)
    space = Space(recipe.changed(search=None, output=None), table.over)
    space.check()
    sampler = PLAN if usual else table.sampler or ("grid" if space.is_listed else "tpe")
    planned = table.trials or DEFAULT_TRIALS
    if usual is not None:
        planned = usual.count
    elif sampler == "grid":
        if not space.is_listed:
            raise RecipeError("a grid needs lists or steps; for ranges use tpe or random")
        planned = len(_grid_plan(space, table.seeds))
    judge = Judge.by(table.objective, table.guards)
    if tasks:
        judge.check_names(task.name for task in tasks)
    for evaluator in (judging, held):
        if isinstance(evaluator, str):
            check_evaluator(evaluator)
    return SearchRequest(
        space, table, sampler, planned, judging, held, judge, merge, usual=usual, tasks=tasks
    )


def _grid_plan(space: Space, seeds: int) -> list[Planned]:
    """Return every setting, then again with other seeds if those change anything."""
    return [
        Planned(setting, shift)
        for shift in seed_shifts(seeds)
        for setting in space.grid()
        if shift == 0 or is_random(space.candidate(setting))
    ]


def _evaluator_name(evaluator: Evaluator) -> str:
    if isinstance(evaluator, str):
        return evaluator
    return f"{getattr(evaluator, '__module__', '?')}:{getattr(evaluator, '__qualname__', '?')}"


def find_unrelated(recipe: Recipe, threads: int | None) -> tuple[tuple[str, ...], Notice | None]:
    """Return the models whose weights are unrelated to the others', or why that is not known."""
    try:
        analysis = analyze(
            recipe.base,
            [entry.file for entry in recipe.models],
            allow_pickle=recipe.allow_pickle,
            threads=threads,
            verbose=False,
        )
        advice = advise(analysis)
    except DareError as error:
        return (), notice("no_advice", reason=error)
    if not advice.recipe:
        return (), notice("no_advice", reason="by the weights, no model should be merged")
    return advice.left_out, None


# ---------------------------------------------------------------- one candidate


class _Interrupted(Exception):  # noqa: N818
    """The search is ending: unfinished trials are left for the next time."""


@dataclass(frozen=True)
class _ScoringRules:
    """The rules by which candidates are scored, the same for all of them."""

    judge: Judge
    stop: threading.Event
    singles: Sequence[Mapping[str, float]] = ()  # the scores of each model alone
    # Scores with the names and items that all must have; no items if those differ each time.
    reference: Scored | None = None
    rungs: Sequence[Sequence[str]] = ()  # growing parts of the items: the new ones in each
    items: Sequence[str] | None = None  # the items to score, if not all

    def score(
        self, scorer: Scorer, claim: Claim, recipe: Recipe, known: Mapping[str, Trial]
    ) -> Trial:
        """Score a candidate and write down the outcome; `known` are scored weights by digest."""
        began = time.perf_counter()
        notes: dict[str, Any] = {"seed": recipe.seed, "is_random": is_random(recipe)}
        stopped = ""
        try:
            notes["digest"] = digest = scorer.make(recipe)
            if (twin := known.get(digest)) is not None and twin.scored is not None:
                scored = replace(twin.scored, seconds=0.0)
                notes["message"] = f"same as {twin.label}"
                notes |= {} if twin.name else {"same_as": twin.number}
            elif self.rungs:
                scored, stopped = self._race(scorer, known.values())
            else:
                scored = scorer.score(self.items)
            self._check_alike(scored)
        except DareError as error:
            if self.stop.is_set():
                raise _Interrupted from None
            output = error.output if isinstance(error, EvaluationError) else ""
            notes |= {"message": str(error), "output": output}
            return claim.end(State.FAILED, seconds=time.perf_counter() - began, **notes)
        if self.reference is None:
            self.judge.check_names(scored.scores)
        elif not self.reference.items:
            scored = replace(scored, items={})
        notes |= {
            "scored": scored,
            "objective": self.judge.objective.value(scored.scores),
            "broken": self.judge.broken(scored.scores, self.singles),
            "seconds": time.perf_counter() - began,
        }
        if stopped:
            return claim.end(State.STOPPED, **notes | {"message": stopped})
        slacks = {g.text: g.slack(scored.scores, self.singles) for g in self.judge.guards}
        return claim.end(State.DONE, slacks=slacks, **notes)

    def _race(self, scorer: Scorer, known: Iterable[Trial]) -> tuple[Scored, str]:
        """Score on one part of the items after the other, until it is clearly behind the best."""
        scored = Scored({})
        total = sum(map(len, self.rungs))
        done = [t for t in known if t.scored and t.objective is not None and not t.broken]
        best = max(done, key=lambda trial: trial.objective or 0.0, default=None)
        for part in self.rungs:
            found = scorer.score(part)
            items = {**scored.items, **found.items}
            scores = {**found.scores, **scored.scores, **group_means(items)}
            scored = Scored(scores, items, scored.seconds + found.seconds, found.output)
            if best is None or best.scored is None or len(items) == total:
                continue
            if is_behind(items, best.scored.items, self.judge.objective):
                seen = f"{len(items)} of {total} items"
                return scored, f"given up after {seen}: clearly behind {best.label}"
        return scored, ""

    def _check_alike(self, scored: Scored) -> None:
        """Refuse scores that cannot be compared with those of the others."""
        if self.reference is None:
            return
        found = scored
        if self.rungs or not self.reference.items:  # then only the names are compared
            found = replace(scored, items=self.reference.items)
        if difference := compare_items(self.reference, found):
            message = f"the evaluator gave different scores: {difference}"
            raise EvaluationError(message, scored.output)


def _best_before(trials: Iterable[Placed], place: int) -> Settings | None:
    """Return the best setting of those that stand before a place; given up ones come last."""
    ended = [t.trial for t in trials if t.place < place and t.trial.objective is not None]
    best = max(ended, key=lambda trial: (trial.is_done, trial.objective), default=None)
    return None if best is None else best.settings


def _by_digest(trials: Iterable[Trial]) -> dict[str, Trial]:
    latest_first = reversed([*trials])  # of several with the same weights, the first remains
    return {trial.digest: trial for trial in latest_first if trial.is_done and trial.digest}


# ---------------------------------------------------------------- all of them

Scoring = Callable[[Scorer], Any]


@dataclass
class _Search:
    request: SearchRequest
    study: Study
    display: SearchProgress
    jobs: int
    work: Path | None
    stop: threading.Event = field(default_factory=threading.Event)
    planned: int = 0  # the trials that there is time for

    @cached_property
    def usual(self) -> UsualMerges | None:
        """The merges to try where no settings are given, without unrelated models."""
        usual = self.request.usual
        return usual and replace(usual, left_out=tuple(self.study.note("left_out")))

    def run(self, *, retry: bool) -> None:
        """Do all that is left to do."""
        retry_before = len(self.study.trials()) if retry else 0
        with self._scorers(self.request.evaluator) as scorers:
            self._prepare()
            if self.request.tasks:
                self._preview(scorers[0])
            self._score_baselines(scorers)
            self._set_rules(scorers[0])
            if self.request.tasks and self.request.usual:
                self._gather(scorers[0])
            self._score_trials(scorers, retry_before)
            self._keep_norms(scorers[0])
        if self.request.holdout is not None:
            with self._scorers(self.request.holdout) as scorers:
                self._score_holdout(scorers, _evaluator_name(self.request.holdout))

    # ------------------------------------------------------------ before the trials

    def _prepare(self) -> None:
        """Find unrelated models, once, and where the search starts."""
        output, space = self.request.merge.recipe.output, self.request.space
        with self.study.turn():
            self.study.keep("output", None if output is None else str(output))
            self.study.keep("planned", max(self.request.planned, self.study.note("planned") or 0))
        if self.study.note("starts") is not None:
            return
        left_out: tuple[str, ...] = ()
        lack = None
        if self.request.usual:
            self.display.say("comparing the weights of the models")
            left_out, lack = find_unrelated(space.recipe, self.request.merge.options.threads)
        with self.study.turn():
            if self.study.note("starts") is None:
                self.study.keep("left_out", left_out)
                self._note(lack)
                start = None if self.request.usual else space.nearest()
                self.study.keep("starts", [] if start is None else [start])

    def _preview(self, scorer: Scorer) -> None:
        """Say what the examples were taken for, how the base does, and how long it will take."""
        if self.study.note("share") is not None:
            return
        tasks, recipes = self.request.tasks, baseline_recipes(self.request.space.recipe)
        previewed = [i for task in tasks for i in task.ids(held_out=False)[:PREVIEWED]]
        scorer.make(recipes[Role.BASE])
        previews, scored = scorer.preview(previewed), scorer.score(previewed)
        for task, shown in zip(tasks, previews, strict=True):
            chosen, held = (len(task.ids(held_out=part)) for part in (False, True))
            self.display.announce(
                f"{task.name}: {task.kind}; {chosen} to choose by, {held} held out"
            )
            for label in ("example", "expected", "answered"):
                self.display.announce(f"  {label:9} {shown[label]!r}")
            right = [value for i, value in scored.items.items() if group_of(i) == task.name]
            score = f"scores {value_text(scored.scores[task.name])} on {len(right)} examples"
            if not {*right} - {0, 1}:
                score = f"answers {sum(right):.0f} of {len(right)} right"
            self.display.announce(f"  base      {score}")
        every = self._ids(held_out=False)
        each = max(scored.seconds, 1e-3) / len(previewed)
        contenders = self.request.planned + len(recipes)
        tries = len(recipes) + PART_SEEN * contenders  # what is held out is half as many
        affordable = self._seconds / (each * tries)
        count = round(min(len(every), max(affordable, LEAST_EXAMPLES * len(tasks))))
        per_task, rivals = count // len(tasks), round(PART_SEEN * contenders)
        visible = 100 * visible_difference(per_task, rivals, tasks=len(tasks))
        needed = items_needed(0.05, rivals, tasks=len(tasks))
        took = count * each * tries
        more = f" (for all merges: {time_text(took)})" if took > self._seconds else ""
        self.display.announce(
            f"Choosing by {per_task:,} examples a task takes about "
            f"{time_text(min(took, self._seconds))}{more}. Differences below {visible:.0f} points "
            f"will not be seen; 5 points need about {needed:,} examples a task"
        )
        with self.study.turn():
            self.study.keep("share", count / len(every))
            for task in tasks:
                for found in task.notices:
                    self._note(found)

    @property
    def _seconds(self) -> float:
        """The time that the search may take."""
        given = self.request.table.minutes or (MINUTES if self.request.usual else math.inf)
        return 60 * given

    def _ids(self, *, held_out: bool) -> list[str]:
        """Return the examples that there is time for, in an order that mixes the tasks."""
        every = [i for task in self.request.tasks for i in task.ids(held_out=held_out)]
        mixed = [i for part in rungs(every, seed=self.study.charter.seed) for i in part]
        return mixed[: round((self.study.note("share") or 1.0) * len(mixed))]

    def _gather(self, scorer: Scorer) -> None:
        """Gather Gram matrices: each model's on the tasks for which it is the best model."""
        path, space = gathered_path(self.study.path), self.request.space
        if path.exists():
            return
        done = [(t, t.scored) for t in self.study.beside(BASELINE) if t.role is Role.SINGLE]
        alone = {trial.name: scored.scores for trial, scored in done if scored is not None}
        weights = self.request.judge.objective.directions(next(iter(alone.values())))
        best = {task: max(alone, key=lambda n: s * alone[n][task]) for task, s in weights.items()}
        recipes, inputs = baseline_recipes(space.recipe), groups_of(self._ids(held_out=False))
        chosen = {n: [i for t in best if best[t] == n for i in inputs[t][:INPUTS]] for n in alone}
        every = [i for ids in inputs.values() for i in ids[:INPUTS]]
        self.display.say("gathering the inputs of layers, for merges by regmean")
        wanted = {n.removesuffix(ALONE): (recipes[n], chosen[n] or every) for n in alone}
        scorer.gather(path, wanted)

    def _keep_norms(self, scorer: Scorer) -> None:
        """Write the statistics of the best candidate's norms, so that a merge has them, too."""
        data, conclusion = read_study(self.study, resamples=200)
        best, path = conclusion.best, self.study.path.with_suffix(".norms.safetensors")
        if best is None or best.role in NOT_MERGED or best.key in data.norms:
            return
        if scorer.gather_norms(path, recipe_of(data, best)):
            self.study.keep("norms", {best.key: str(path)})

    def _note(self, found: Notice | None) -> None:
        known = self.study.note("notices") or []
        if found is not None and found.text not in [kept["text"] for kept in known]:
            self.study.keep("notices", [*known, asdict(found)])

    def _score_baselines(self, scorers: Sequence[Scorer]) -> None:
        recipes = baseline_recipes(self.request.space.recipe)
        average = recipes[Role.AVERAGE]
        for done in self.study.beside(BASELINE):
            if done.role is Role.AVERAGE and done.digest not in (None, scorers[0].make(average)):
                raise InputError(f"{self.study.path}: models have changed; add `--study NEW.db`")
        self._score_beside(scorers, BASELINE, {name: (r, {}) for name, r in recipes.items()})

    def _set_rules(self, scorer: Scorer) -> None:
        """Learn from the baselines which items there are, and whether they can be compared."""
        done = [(t, t.scored) for t in self.study.beside(BASELINE) if t.scored is not None]
        (_, first), *others = done
        singles = [scored.scores for trial, scored in done if trial.role is Role.SINGLE]
        differences = list(filter(None, (compare_items(first, other) for _, other in others)))
        if any(other.scores.keys() != first.scores.keys() for _, other in others):
            how = f"{differences[0]}; return the same names each time"
            raise InputError(f"the evaluator gives different scores each time: {how}")
        parts, lack = list[list[str]](), None
        if differences:
            lack = notice("items_differ", difference=differences[0])
            first = replace(first, items={})
        elif not self.request.table.race:
            pass
        elif not (first.items and scorer.takes_items):
            how = "takes no `items`" if first.items else "gives no items"
            lack = None if self.usual else notice("no_race", lack=how)
        else:
            parts = rungs(first.items, seed=self.study.charter.seed)
        parts = parts if len(parts) > 1 else []
        self.rules = _ScoringRules(self.request.judge, self.stop, singles, first, parts)
        each = median(trial.seconds for trial, _ in done)
        self.planned = max(self.request.planned, self.study.note("planned"))
        if self.usual is not None:
            self.planned = self.usual.count
        if math.isfinite(self._seconds):
            left = self._seconds - each * len(done) * (1 + PART_SEEN * bool(self.request.holdout))
            fitting = int(left / (each * (PART_SEEN if parts else 1.0) + 1e-9))
            self.planned = min(self.planned, max(fitting, LEAST_TRIALS))
        with self.study.turn():
            self._note(lack)
            self.study.keep("planned", max(self.planned, len(self.study.trials())))

    def _announce(self, left: int) -> None:
        each = median(trial.seconds for trial in self.study.beside(BASELINE) if trial.is_done)
        if left > 0:
            jobs = f", {self.jobs} at a time" if self.jobs > 1 else ""
            expected = time_text(left * each / self.jobs)
            self.display.announce(f"{counted(left, 'trial')}{jobs}, about {expected}")

    # ------------------------------------------------------------ trials

    def _score_trials(self, scorers: Sequence[Scorer], retry_before: int) -> None:
        choose, planned, space = self._chooser(), self.planned, self.request.space
        baselines = _by_digest(self.study.beside(BASELINE))

        def take() -> Scoring | None:
            claim = self.study.take_next(space, planned, choose, retry_before)
            return None if claim is None else partial(score, claim)

        def score(claim: Claim, scorer: Scorer) -> None:
            trials = _by_digest(placed.trial for placed in self.study.trials())
            recipe = space.candidate(claim.settings, claim.shift)
            ended = self.rules.score(scorer, claim, recipe, trials | baselines)
            self.display.scored(ended, lambda: read_study(self.study, resamples=200))

        latest = {placed.place: placed.trial for placed in self.study.trials()}
        ended = [t for t in latest.values() if t.state.is_final]
        done = sum(t.state is not State.FAILED or t.number >= retry_before for t in ended)
        self._announce(planned - done)
        self.display.begin(planned, done)
        self._work(scorers, take, self.study.is_busy)

    def _chooser(self) -> Callable[[int, Sequence[Placed]], Planned | None]:
        """Return the function that gives the setting at a place of the plan."""
        space, shifts = self.request.space, seed_shifts(self.request.table.seeds)
        starts = self.study.note("starts")
        if self.usual is not None:
            usual = self.usual
            return lambda place, found: Planned(usual.at(place, partial(_best_before, found)))
        if self.request.sampler == "grid":
            plan = _grid_plan(space, self.request.table.seeds)
            return lambda place, _found: plan[place]

        def choose(place: int, found: Sequence[Placed]) -> Planned | None:
            number, repeat = divmod(place, len(shifts))
            if repeat:  # an earlier setting, with another seed
                first = next(p.trial for p in found if p.place == place - repeat)
                return Planned(first.settings, shifts[repeat])
            return Planned(starts[number]) if number < len(starts) else None

        return choose

    # ------------------------------------------------------------ beside the trials

    def _score_holdout(self, scorers: Sequence[Scorer], evaluator: str) -> None:
        """Score the winner, the runner-up and the baselines on data not used to choose."""
        data, conclusion = read_study(self.study)
        if conclusion.best is None:
            return
        with self.study.turn():
            before = self.study.note("holdout")
            if before not in (None, evaluator):
                raise InputError(f"{self.study.path}: its holdout is {before}; use that one")
            self.study.keep("holdout", evaluator)
        ranked = {
            f"{role} {key_of(winner.settings)}": winner
            for role, winner in winners(conclusion).items()
            if not winner.baseline
        }
        ranked |= {baseline.baseline: baseline for baseline in conclusion.baselines}
        wanted = {name: (recipe_of(data, each), each.settings) for name, each in ranked.items()}
        self._score_beside(scorers, HOLDOUT, wanted)

    def _score_beside(
        self, scorers: Sequence[Scorer], kind: str, wanted: Mapping[str, tuple[Recipe, Settings]]
    ) -> None:
        """Score candidates that are not trials, by name; some are identified by settings."""
        items = self._ids(held_out=kind == HOLDOUT) if self.request.tasks else None
        rules = _ScoringRules(self.request.judge, self.stop, items=items)
        settings = {name: found for name, (_, found) in wanted.items()}

        def take() -> Scoring | None:
            claim = self.study.take_beside(kind, settings)
            if claim is None:
                return None
            self.display.say(f"{kind}: {claim.name.partition(' {')[0]}")
            return partial(score, claim)

        def score(claim: Claim, scorer: Scorer) -> None:
            known = {} if claim.name == Role.AGAIN else _by_digest(self.study.beside(kind))
            ended = rules.score(scorer, claim, wanted[claim.name][0], known)
            if kind == BASELINE and not any(trial.is_done for trial in self.study.beside(kind)):
                last = ended.output.strip().rpartition("\n")[2]
                printed = "" if last in ended.message else f"; its last line was: {last}"
                raise InputError(
                    f"{claim.name} has no score: {ended.message}{printed}",
                    "Nothing could be scored so far: correct the evaluator, then run this again",
                )

        self._work(scorers, take, lambda: self.study.is_busy(kind))

    # ------------------------------------------------------------ threads

    @contextmanager
    def _scorers(self, evaluator: Evaluator) -> Iterator[list[Scorer]]:
        """Open a scorer for each job; all are ended with the search, however it ends."""
        recipe, limit = self.request.space.recipe, self.request.table.time_limit
        options = self.request.merge.options
        if self.jobs > 1:
            options = options.changed(threads=max(1, available_cores() // self.jobs))
        open_one = partial(open_scorer, time_limit=limit, work=self.work, options=options)
        with ExitStack() as opened:
            every = (closing(open_one(evaluator, recipe)) for _ in range(self.jobs))
            yield list(map(opened.enter_context, every))

    def _work(
        self,
        scorers: Sequence[Scorer],
        take: Callable[[], Scoring | None],
        is_busy: Callable[[], bool],
    ) -> None:
        """Let every scorer do what there is to do, until nothing is left and nobody is busy."""
        errors = list[BaseException]()

        def work(scorer: Scorer) -> None:
            try:
                while not self.stop.is_set():
                    if (scoring := take()) is not None:
                        scoring(scorer)
                    elif is_busy():  # a busy process may die, and leave its trial to us
                        time.sleep(POLL_SECONDS)
                    else:
                        return
            except _Interrupted:
                pass
            except BaseException as error:
                errors.append(error)
                self.stop.set()

        threads = [threading.Thread(target=work, args=(s,), daemon=True) for s in scorers]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                while thread.is_alive():
                    thread.join(POLL_SECONDS)
        except BaseException:
            self.stop.set()
            for scorer in scorers:
                scorer.close()
            raise
        if errors:
            raise errors[0]


# ---------------------------------------------------------------- progress


class SearchProgress:
    """The progress of a search on stderr: a bar on a terminal, else a line for each event."""

    def __init__(self, *, visible: bool) -> None:
        plain: dict[str, Any] = dict.fromkeys(("markup", "emoji", "highlight"), False)
        plain["soft_wrap"] = True
        console = Console(stderr=True, quiet=not visible, force_jupyter=False, **plain)
        text = TextColumn("{task.description}", markup=False)
        columns = (BarColumn(20), MofNCompleteColumn(), TimeRemainingColumn(), text)
        has_bar = visible and sys.stderr.isatty()
        looks: dict[str, Any] = {"transient": True, "speed_estimate_period": SPEED_SECONDS}
        self.bar = Progress(*columns, console=console, disable=not has_bar, **looks)
        self._task = self.bar.add_task("", total=None)
        self._concluded = time.monotonic()
        self._turn = threading.Lock()

    def say(self, text: str) -> None:
        """Show what is being done."""
        if self.bar.disable:
            self.announce(text)
        else:
            self.bar.update(self._task, description=printable(text))

    def announce(self, text: str) -> None:
        """Print a line that stays."""
        self.bar.console.print(printable(text))

    def begin(self, planned: int, done: int) -> None:
        """Show how many trials are planned, and how many are done."""
        self.bar.update(self._task, total=planned, completed=done, description="")

    def scored(self, trial: Trial, read: Callable[[], tuple[StudyData, Conclusion]]) -> None:
        """Show that a trial has ended; `read` draws the conclusion, which takes a while."""
        with self._turn:
            self.bar.advance(self._task)
            (task,), now = self.bar.tasks, time.monotonic()
            if self.bar.disable:
                self.announce(f"{task.completed} of {task.total}: {trial_line(trial)}")
            elif now - self._concluded > CONCLUDE_SECONDS:
                self.say(live_line(*read()))
                self._concluded = time.monotonic()


def trial_line(trial: Trial) -> str:
    """Return a trial and its outcome in a line."""
    objective = "" if trial.objective is None else f" {trial.objective:.4g}"
    message = f" ({trial.message})" if trial.message else ""
    state = "" if trial.is_done else f" {trial.state}"
    return f"{trial.label}, {trial.text}:{state}{objective}{message}, {trial.seconds:.1f} s"


def live_line(data: StudyData, conclusion: Conclusion) -> str:
    """Return the progress of the trials and the best so far, in a line."""
    best = conclusion.best
    best_text = [] if best is None else [f"best: {best.short}, {best.objective}"]
    return printable(" · ".join([progress_text(data), *best_text]))
