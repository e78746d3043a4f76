"""A study read from its file, its result, and its document for page, terminal and notebook."""

from __future__ import annotations

import shlex
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from operator import attrgetter
from os import PathLike
from pathlib import Path
from typing import Any

from dare.documents.document import (
    Code,
    Columns,
    Document,
    Facts,
    Folded,
    Listing,
    Part,
    Section,
    SortableTable,
    Table,
    Tone,
    tabulate,
)
from dare.documents.notices import Severity, notice_from_dict
from dare.documents.page import render_page
from dare.documents.shown import Shown, json_ready
from dare.documents.words import NOTHING, counted, listed, number, time_text, value_text
from dare.errors import InputError, printable
from dare.output.receipt import without_folders
from dare.output.sidecars import inline, markdown_rows
from dare.output.targets import write_file
from dare.recipe.document import request_from_document
from dare.recipe.entries import write_toml
from dare.recipe.recipe import Recipe
from dare.recipe.settings import INCLUDE
from dare.stores.locations import usual_output
from dare.studies.conclusions import change_text, conclude
from dare.studies.figures import TEXTS, draw_figures, split_settings
from dare.studies.results import (
    ALONE,
    NOT_MERGED,
    Conclusion,
    Difference,
    Estimate,
    Holdout,
    Ranked,
    Role,
    Settings,
    State,
    StudyData,
    TaskScores,
    Trial,
    is_number,
    key_of,
    rounded,
    settings_text,
    values_text,
)
from dare.studies.space import PLAN, recipe_of, seed_shifts
from dare.studies.statistics import BETTER, NO_DIFFERENCE, NOT_KNOWN, WORSE
from dare.studies.study import BASELINE, HOLDOUT, Study

SAME_IN_CHARTER = ("recipe", "space", "sampler", "evaluator", "objective", "guards")
SIGNED = ", found by `dare search`."
"""The end of a recipe's first line, after its study: a search overwrites only recipes of its own
study."""
EXAMPLES = "data"  # the kind of evaluator that reads files of examples
MOST_NAMED = 4  # candidates or models that are named in a sentence; more are counted
MOST_TASKS = 8  # tasks in the terminal
MOST_NOTICES = 5  # notices on the one screen
PAGE_ROWS = 12
MOST_MESSAGES = 5  # different messages of failed trials in the terminal
MOST_FAILED = 50  # failed trials that a page shows with their output
MOST_OUTPUT = 4000  # characters of the output: the last ones
ROUNDING = 1e-12
RETURN_ITEMS = Code(**TEXTS["return_items"])
VERDICT_TONES = dict(zip((BETTER, NO_DIFFERENCE, WORSE, NOT_KNOWN), Tone, strict=True))


@dataclass(frozen=True, repr=False)
class SearchResult(Shown):
    """The result of a search."""

    study: Path
    data: StudyData
    conclusion: Conclusion
    best: Recipe | None
    """The recipe of the best, if it is a merge; if not, a model as it is was at least as good, or
    `conclusion.failure` has the reason."""

    def to_dict(self) -> dict[str, Any]:
        """Return the result as plain values, ready for JSON; the items stay in the study."""
        document = json_ready(asdict(self.data))
        for table in ("baselines", "trials", "holdout"):
            for trial in document[table]:
                scored = trial.pop("scored") or {}
                trial["scores"] = scored.get("scores")
                trial["items"] = len(scored.get("items", ()))
        document.pop("output")
        recipes = {"best": self.best and self.best.to_document()}
        conclusion = json_ready(asdict(self.conclusion))
        return {**document, "answer": str(self), "conclusion": conclusion, "recipes": recipes}

    def document(self, *, rows: int = 0, outputs: bool = False) -> Document:
        """Return everything to show: in a terminal one screen, on a page all of it.

        With `rows`, a terminal also shows the differences and that many settings; with `outputs`,
        also what the evaluators of failed trials printed.
        """
        made = study_document(self.data, self.conclusion, rows=rows, outputs=outputs)
        details = f"dare search show {shlex.quote(str(self.study))}"
        return replace(made, steps={**made.steps, **({} if rows else {"details": details})})

    def to_markdown(self) -> str:
        """Return the scores of the best by task, with a sentence on how they were measured."""
        table = task_table(self.conclusion)
        heads = [name.removesuffix(" >") for name in table.columns]
        rule = ["---:" if name.endswith(" >") else "---" for name in table.columns]
        kind, colon, files = self.data.evaluator.partition(":")
        by = without_folders(self.data.evaluator)
        if kind == EXAMPLES:
            by = f"{kind}{colon}{','.join(Path(file).name for file in files.split(','))}"
        sentence = f"Measured by `dare search` ({inline(by)}): {_measured_text(self.conclusion)}"
        rows = ([inline(cell) for cell in row] for row in table.rows)
        return f"{sentence}\n\n{markdown_rows(heads, rule, *rows)}\n"

    def to_model_index(self) -> list[dict[str, Any]]:
        """Return the scores of the best by task, as the results of a `model-index` on the hub.

        What they are the means of, and their intervals, are arguments of the metric.
        """
        has_examples = self.data.evaluator.startswith(f"{EXAMPLES}:")
        split = "validation" if self.conclusion.holdout is None else "test"
        results = []
        for task in filter(attrgetter("name"), self.conclusion.tasks):
            best = task.best
            told = {"items": task.items or None, "low": best.low, "high": best.high}
            metric = {
                "type": "accuracy" if has_examples and task.is_share else "score",
                "value": round(best.value, 6),
                "args": {name: round(n, 6) for name, n in told.items() if n is not None},
            }
            dataset = {"type": task.name, "name": task.name, "split": split}
            results.append({"dataset": dataset, "metrics": [metric]})
        return results

    def to_html(self, path: str | PathLike[str] | None = None, *, overwrite: bool = True) -> str:
        """Return the page of the study, one text that needs no network; write it to a path."""
        text = render_page(self.document(rows=PAGE_ROWS))
        if path is not None:
            write_file(Path(path), text.encode(), "page", overwrite=overwrite)
        return text

    def to_toml(self) -> str:
        """Return the best recipe, with the evidence for it as comments."""
        recipe = self.best
        if recipe is None:
            raise InputError(
                f"{self.study}: there is no recipe to write, for the answer is: {self}"
            )
        tables = {
            **recipe.to_tables(),
            "output": str(recipe.output or usual_output(recipe.base)),
        }
        lines = [f"The best of {self.study.as_posix()}{SIGNED}"]
        for sentence in list_evidence(self.data, self.conclusion):
            lines += textwrap.wrap(printable(sentence), 96, subsequent_indent="  ")
        return "\n".join([*(f"# {line}" for line in lines), "", write_toml(tables)])

    def __repr__(self) -> str:
        return f"<SearchResult of {self.study}: {self}>"

    def __str__(self) -> str:
        return headline(self.data, self.conclusion)[0]


def read_result(path: Path) -> SearchResult:
    """Return the result of a study so far, even while others work on it."""
    with closing(Study(path)) as study:
        return result_of(study)


def result_of(study: Study) -> SearchResult:
    """Return the result of an open study so far."""
    data, conclusion = read_study(study)
    ranked = conclusion.best
    best = None if ranked is None or ranked.role in NOT_MERGED else recipe_of(data, ranked)
    return SearchResult(study.path, data, conclusion, best)


def read_study(study: Study, *, resamples: int = 2000) -> tuple[StudyData, Conclusion]:
    """Return all data of a study, and the conclusion from it."""
    charter = study.charter
    recipe = request_from_document(charter.recipe, str(study.path)).recipe
    latest = {placed.place: placed.trial for placed in study.trials()}  # a retry comes later
    trials = sorted(latest.values(), key=lambda trial: trial.number)
    data = StudyData(
        **{name: getattr(charter, name) for name in SAME_IN_CHARTER},
        planned=study.note("planned") or len(trials),
        seeds=tuple(recipe.seed + shift for shift in seed_shifts(charter.seeds)),
        baselines=tuple(study.beside(BASELINE)),
        trials=tuple(trials),
        holdout_evaluator=study.note("holdout"),
        left_out=tuple(study.note("left_out") or ()),
        output=study.note("output"),
        norms=study.note("norms") or {},
        command=study.note("command") or "",
        notices=tuple(map(notice_from_dict, study.note("notices") or ())),
    )
    conclusion = conclude(data, resamples=resamples)
    scored = study.beside(HOLDOUT)
    if scored and conclusion.best is not None:
        data = replace(data, holdout=tuple(_by_role(scored, conclusion)))
        conclusion = conclude(data, resamples=resamples)
    return data, conclusion


def _by_role(scored: Sequence[Trial], conclusion: Conclusion) -> list[Trial]:
    """Return what was scored on the holdout, under the current names.

    Candidates are kept by their settings: if the search continued, the winner may be another.
    """
    keys = {key_of(ranked.settings): role for role, ranked in winners(conclusion).items()}
    named = []
    for trial in scored:
        if not trial.settings:
            named.append(trial)  # a baseline
        elif (role := keys.get(key_of(trial.settings))) is not None:
            named.append(replace(trial, name=role))
        elif trial.name.partition(" ")[0] == Role.WINNER:  # its settings follow
            named.append(replace(trial, name=Role.EARLIER_WINNER))
    return named


def winners(conclusion: Conclusion) -> dict[Role, Ranked]:
    """Return the best, if it is a setting, and the best setting with other weights."""
    best, second = conclusion.best, conclusion.runner_up
    winner = {} if best is None or best.baseline else {Role.WINNER: best}
    return winner | ({Role.RUNNER_UP: second} if second else {})


# ---------------------------------------------------------------- the document


def study_document(
    data: StudyData, conclusion: Conclusion, *, rows: int = 0, outputs: bool = False
) -> Document:
    """Return what to do, how sure that is, and the scores by task; everything else comes below.

    With `rows`, a terminal also shows what comes below, with that many settings; with `outputs`,
    also what failed trials printed.
    """
    title, tone, sure = headline(data, conclusion)
    held = conclusion.holdout.against if conclusion.holdout else ()
    count, (names, shared) = len(conclusion.ranking), split_settings(data)
    best = f"The best {rows} of {count} settings" if count > rows else "Settings, best first"
    best += f"; all have {settings_text(shared)}" if shared else ""
    is_luck = has_no_items(conclusion)
    compared = "The best compared with the others" + ("" if is_luck else ", item by item")
    against = (
        _differences(conclusion.against, compared, "" if is_luck else TEXTS["interval_hint"]),
        _differences(held, "The same on held-out data, which were not used to choose"),
    )
    ranked = (
        _ranked(data, conclusion.baselines, "Baselines"),
        _ranked(data, conclusion.ranking[:rows], best, *names),
    )
    tasks = (task_table(conclusion),)
    notices = [*conclusion.notices, *data.notices]
    notices.sort(key=lambda found: -list(Severity).index(found.severity))
    failed = [trial for trial in data.all_trials if trial.state is State.FAILED]
    what = Facts(tuple(_study_facts(data, conclusion)), "What was searched")
    is_long = rows > 0
    sections = (
        Section("tasks", "Scores by task", _filled(tasks), is_brief=True),
        Section("items", "Luck or not", (RETURN_ITEMS,) * is_luck, is_brief=True),
        Section("against", "The best and the rest", _filled(against), ("ranking",), is_long),
        Section("ranked", "Ranked", _filled(ranked), is_brief=is_long, on_page=False),
        Section("trials", "Trials", tuple(_trials(data))),
        Section("failed", "Failed", tuple(_failed(failed, outputs)), is_brief=is_long or outputs),
        Section("recipe", "Recipe", _recipe(data, conclusion)),
        Section("notices", "Caveats"),
        Section("study", "The study", (what,)),
    )
    steps = {} if data.is_finished else {"resume": data.command or "run the same search"}
    lead = sure if data.is_finished else f"So far: {title}. {sure}"
    return Document(
        title=title if data.is_finished else "Not finished yet",
        kind="search",
        tone=tone if data.is_finished else Tone.PLAIN,
        lead=f"{lead} {progress_text(data)}.".lstrip(),
        facts=tuple(facts(data, conclusion)),
        sections=sections,
        notices=tuple(notices if is_long else notices[:MOST_NOTICES]),
        steps=steps,
        footer=f"Searched by {_sampler_text(data)}. "
        f"The objective is {objective_text(data.objective)}.",
        draw=partial(draw_figures, conclusion),
    )


def _filled(tables: Iterable[Table]) -> tuple[Table, ...]:
    return tuple(table for table in tables if table.rows)


# ---------------------------------------------------------------- the answer


def headline(data: StudyData, conclusion: Conclusion) -> tuple[str, Tone, str]:
    """Return what to do, how good the news is, and a sentence on how sure it is."""
    best = conclusion.best
    if best is None:
        return f"No answer: {conclusion.failure}", Tone.POOR, ""
    score = doubt = ""
    if conclusion.tasks:
        first = conclusion.tasks[0]
        value, _, ends = score_text(first.best, is_share=first.is_share).partition(" (")
        score = f" ({value}, 95% interval {ends}" if ends else f" ({value})"
    what = "the base" if best.role is Role.BASE else best.baseline.removesuffix(ALONE)
    title = f"Use {what} alone" if best.role is Role.SINGLE else "Do not merge: the base is best"
    top = f"No merge clearly beats {what}{score}"
    if conclusion.is_merge:
        how, title = _merge_words(data, best)
        doubt = _doubt(conclusion)
        title += doubt
        what = f"this merge ({how})"
        top = f"This merge ({how}) came first among the candidates{score}"
    if NOT_KNOWN in {difference.verdict for difference in conclusion.against}:
        why = ": the evaluator gave no per-item results" if has_no_items(conclusion) else ""
        return title, Tone.PLAIN, f"{top}, but that may be luck{why}."
    if not conclusion.tied and not doubt:
        tone, start = (Tone.GOOD if conclusion.is_merge else Tone.PLAIN), what[:1].upper()
        return title, tone, f"{start}{what[1:]} is better than all else, beyond chance{score}."
    tied = [_name_of(r) for r in sorted(conclusion.tied, key=lambda r: not r.baseline)]
    more = [f"{len(tied) - MOST_NAMED} more"] if len(tied) > MOST_NAMED else []
    alike = f" May be as good: {listed([*tied[:MOST_NAMED], *more])}." if tied else ""
    return title, Tone.FAIR, f"{top}.{alike}"


def _doubt(conclusion: Conclusion) -> str:
    """Say that a merge is not shown to be better than the base or a model alone, if it is not."""
    held = conclusion.holdout
    kept = {r.short for r in conclusion.baselines if r.role in NOT_MERGED and not r.broken}
    rivals = [
        each
        for each in (held.against if held else conclusion.against)
        if each.other in kept
        and (each.verdict in (NO_DIFFERENCE, WORSE) or each.estimate.value <= 0)
    ]
    if not rivals:
        return ""
    best = min(rivals, key=lambda each: each.estimate.value)
    than = "worse than" if best.verdict == WORSE else "not shown to be better than"
    where, what = "on held-out data " * bool(held), "the " * (best.other == Role.BASE)
    return f"; {where}it is {than} {what}{best.other}"


def _sampler_text(data: StudyData) -> str:
    return "a plan of usual merges" if data.sampler == PLAN else data.sampler


def _merge_words(data: StudyData, ranked: Ranked) -> tuple[str, str]:
    """Return how models are merged, and which: in a sentence, and as what to do."""
    made = recipe_of(data, ranked)
    names = made.names
    title = f"Merge {listed(names) if len(names) <= MOST_NAMED else counted(len(names), 'model')}"
    if len(names) == 1:
        title += f" into {made.base.name}"
    if ranked.baseline:
        return _name_of(ranked), title
    settings = {n: value for n, value in ranked.settings.items() if not n.startswith(INCLUDE)}
    return setting_words({"method": made.method, **settings}), title


def setting_words(settings: Settings) -> str:
    """Describe settings in words.

    >>> setting_words({"method": "dare+ties", "drop_rate": 0.5, "include.math": False})
    'dare+ties, drop rate 0.5, without math'
    """
    words = []
    for name, value in settings.items():
        start, _, model = name.partition(".")
        text = f"{name.replace('_', ' ')} {value_text(value)}"
        if f"{start}." == INCLUDE:
            text = "" if value else f"without {model}"
        words.append(value if name == "method" else text)
    return ", ".join(filter(None, words))


def _name_of(ranked: Ranked) -> str:
    """Return a candidate's name for a sentence."""
    if ranked.baseline:
        return ranked.baseline if ranked.role is Role.SINGLE else f"the {ranked.baseline}"
    return f"{setting_words(ranked.settings) or 'the recipe'} ({ranked.short})"


def has_no_items(conclusion: Conclusion) -> bool:
    """Tell if chance is not known because the evaluator returns no items."""
    return any(found.code == "no_items" for found in conclusion.notices)


def facts(data: StudyData, conclusion: Conclusion) -> Iterator[tuple[str, str]]:
    """Yield the facts behind the answer, each with its label."""
    if conclusion.tasks:
        yield "Measured", _measured_text(conclusion)
    if data.evaluator.startswith(f"{EXAMPLES}:"):
        yield "Training", TEXTS["overlap"]
    if data.left_out:
        yield "Left out", f"{listed(data.left_out)}: unrelated to the others by their weights"


def _measured_text(conclusion: Conclusion) -> str:
    """Say how many examples the scores by task are from, and if they were used to choose."""
    counts = sorted({task.items for task in conclusion.tasks if task.name})
    examples = "scores without items" if not counts or not counts[0] else f"{counts[0]:,} examples"
    if len(counts) > 1 and counts[0]:
        examples = f"{counts[0]:,} to {counts[-1]:,} examples"
    if conclusion.holdout is None:
        return f"{examples} a task; the best was chosen on the same."
    return f"{examples} a task, held out of all choosing."


def holdout_text(holdout: Holdout) -> str:
    """Compare the winner's score on held-out data with its score where it was chosen."""
    where, loss = f"{number(holdout.validation)} where it was chosen", holdout.loss
    change = f"{number(abs(loss))} {'lower' if loss > 0 else 'higher'}"
    change = "no change" if abs(loss) <= ROUNDING else change
    return f"{holdout.objective} on held-out data, {where}: {change}."


def list_evidence(data: StudyData, conclusion: Conclusion) -> Iterator[str]:
    """Yield the evidence for and against the choice, one line each."""
    title, _, sure = headline(data, conclusion)
    yield f"The best: {title}. {sure}"
    held = conclusion.holdout.against if conclusion.holdout else ()
    yield from (f"{label}: {text}" for label, text in _evidence(conclusion))
    for start, found in (("Against", conclusion.against), ("On the holdout against", held)):
        for each in found:
            yield f"{start} {each.other}: {each.estimate:+}; verdict: {each.verdict}."
    yield from (f"{said}." for said in conclusion.notices)


def _evidence(conclusion: Conclusion) -> Iterator[tuple[str, str]]:
    if conclusion.holdout is not None:
        yield "Holdout", holdout_text(conclusion.holdout)
    if conclusion.noise is not None:
        noise = f"{number(conclusion.noise)} apart" if conclusion.noise else "equal"
        yield "Noise", f"two scores of the same weights were {noise}"


def progress_text(data: StudyData) -> str:
    """Return how many of the planned trials are done, and the states of the others."""
    counts = Counter(trial.state for trial in data.trials)
    planned = counted(data.planned, "trial")
    others = [f"{counts[s]} {s}" for s in (State.STOPPED, State.FAILED, State.RUNNING) if counts[s]]
    return ", ".join([f"{counts[State.DONE]} of {planned} done", *others])


def objective_text(weights: dict[str, float]) -> str:
    """Return the objective in words.

    >>> objective_text({}), objective_text({"add": 1.0}), objective_text({"add": 1.0, "loss": -2.0})
    ('the mean of all scores', 'add', 'the mean of add and loss × -2')
    """
    if not weights:
        return "the mean of all scores"
    named = [name if w == 1 else f"{name} × {w:g}" for name, w in weights.items()]
    return f"{'the mean of ' if len(named) > 1 else ''}{listed(named)}"


def _study_facts(data: StudyData, conclusion: Conclusion) -> Iterator[tuple[str, str]]:
    yield "Evaluator", data.evaluator
    if data.holdout_evaluator:
        yield "Held out", data.holdout_evaluator
    yield from _evidence(conclusion)
    yield "Objective", objective_text(data.objective)
    yield "Guards", "; ".join(data.guards) or "none"
    seconds = sum(trial.seconds for trial in data.all_trials)
    yield "Trials", f"{progress_text(data)}, in {time_text(seconds)} by {_sampler_text(data)}"
    if any(trial.is_random for trial in data.all_trials):
        yield "Seeds", ", ".join(map(str, data.seeds)) or NOTHING
    yield from ((name, values_text(values)) for name, values in data.space.items())


# ---------------------------------------------------------------- tables


def task_table(conclusion: Conclusion) -> Table:
    """Return the scores of the best by task, beside those of base, single models and average."""

    def cell(estimate: Estimate | None, task: TaskScores) -> str:
        return "" if estimate is None else score_text(estimate, is_share=task.is_share)

    columns: Columns = {
        "task": lambda task: task.name or "all tasks",
        "base >": lambda task: cell(task.base, task),
        "best single >": lambda task: f"{task.alone} {cell(task.single, task)}".strip(),
        "average >": lambda task: cell(task.average, task),
        "chosen >": lambda task: cell(task.best, task),
        "vs. best single": lambda task: change_text(task, task.change),
    }
    pairs = ((task, task.change) for task in conclusion.tasks)
    tones = {change_text(*each): VERDICT_TONES[each[1].verdict] for each in pairs if each[1]}
    title = "Scores, with 95% intervals (not clear: may be chance)"
    return tabulate(conclusion.tasks, columns, title=title, tones=tones, most=MOST_TASKS)


def score_text(estimate: Estimate, *, is_share: bool) -> str:
    """Return a score as people write it, with its 95% interval.

    >>> score_text(Estimate(0.715, 0.652, 0.779), is_share=True)
    '71.5% (65–78)'
    >>> score_text(Estimate(0.918), is_share=False)
    '0.92'
    """
    value, low, high = estimate.value, estimate.low, estimate.high
    text = f"{value:.1%}" if is_share else f"{value:.2f}"
    if low is None or high is None:
        return text
    if is_share:
        return f"{text} ({100 * low:.0f}–{100 * high:.0f})"
    return f"{text} ({low:.2f}{' to ' if low < 0 else '–'}{high:.2f})"


def _differences(against: Sequence[Difference], title: str, hint: str = "") -> Table:
    columns: Columns = {
        "the best compared with": lambda item: item.other,
        "difference >": lambda item: f"{item.estimate.value:+.3g}",
        "95% interval >": lambda item: item.estimate.interval("+"),
        "verdict": lambda item: "" if item.verdict == NOT_KNOWN else item.verdict,
    }
    return tabulate(against, columns, title=title, hint=hint, tones=VERDICT_TONES)


def _ranked(data: StudyData, ranked: Sequence[Ranked], title: str, *names: str) -> Table:
    """Return settings or baselines with their scores, with optional columns for wide terminals."""
    given = {f"{n} >": lambda item, n=n: value_text(item.settings.get(n)) for n in names}
    columns: dict[str, Callable[[Ranked], str]] = {
        "trial" if names else "": lambda i: i.short.partition(" ")[2] if names else i.short,
        **given,
        "objective >": lambda item: number(item.objective.value),
        "95% interval >": lambda item: item.objective.interval(),
    }
    more = [name for name in data.score_names if f"{name} >" not in columns]
    scores = {f"{n} >": lambda item, n=n: number(item.scores.get(n)) for n in more}
    columns |= scores
    if any(len(item.trials) > 1 for item in ranked):
        columns["trials >"] = lambda item: str(len(item.trials))
    if any(item.broken for item in ranked):
        columns["guards >"] = lambda item: "broken" if item.broken else "kept"
    optional = (*given, "95% interval >", *scores)
    return tabulate(ranked, columns, title=title, tones={"broken": Tone.POOR}, optional=optional)


def _trials(data: StudyData) -> Iterator[Part]:
    """Yield the settings that all trials share, and all trials as a table."""
    scores, trials = data.score_names, data.all_trials
    settings, shared = split_settings(data)
    if shared:
        yield f"All trials have {settings_text(shared)}."

    def cells(trial: Trial) -> tuple[float | str | None, ...]:
        given = trial.scored.scores if trial.scored else {}
        return (
            trial.name or trial.number,
            _cell(trial.objective),
            *(_cell(given.get(name)) for name in scores),
            *(_cell(trial.settings.get(name)) for name in settings),
            str(trial.seed) if trial.is_random else None,
            _state(trial),
            "; ".join(trial.broken) or None,
            rounded(trial.seconds),
        )

    heads = ("trial", "objective", *scores, *settings, "seed", "state", "guards broken", "seconds")
    rows = [*map(cells, trials)]
    shown = [n for n, _ in enumerate(heads) if n < 2 or any(row[n] is not None for row in rows)]
    yield SortableTable(
        tuple(heads[n] for n in shown),
        tuple(tuple(row[n] for n in shown) for row in rows),
        tuple(trial.scored is not None for trial in trials),
        "Baselines and trials",
    )


def _cell(value: Any) -> float | str | None:
    if is_number(value):
        return rounded(value)
    return None if value is None or isinstance(value, float) else value_text(value)


def _state(trial: Trial) -> str:
    return f"{trial.state}, {trial.message}" if trial.is_done and trial.message else trial.state


# ---------------------------------------------------------------- failures and recipes


def _failed(trials: Sequence[Trial], outputs: bool) -> Iterator[Part]:
    """Yield how many failed and why, and each of them with the end of its output."""
    if not trials:
        return
    alike: dict[str, list[Trial]] = {}
    for trial in trials:
        alike.setdefault(trial.message, []).append(trial)
    lines = [
        f"{same[0].label if len(same) == 1 else counted(len(same), 'trial')}: {message or NOTHING}"
        for message, same in list(alike.items())[:MOST_MESSAGES]
    ]
    if len(alike) > MOST_MESSAGES:
        lines.append(f"and {counted(len(alike) - MOST_MESSAGES, 'other message')}")
    yield Listing(f"{counted(len(trials), 'trial')} failed", tuple(lines))
    for place, trial in enumerate(trials if outputs else trials[:MOST_FAILED]):
        text = f"{trial.message or _state(trial)}\n{trial.output[-MOST_OUTPUT:]}"
        code = Code(f"{trial.label} {trial.text}", f"output-{place}", text)
        yield code if outputs else Folded(f"{trial.label}: {trial.message or NOTHING}", (code,))


def _recipe(data: StudyData, conclusion: Conclusion) -> tuple[Code, ...]:
    """Return the TOML of the best, if it is a merge."""
    best = conclusion.best
    if best is None or best.role in NOT_MERGED:
        return ()
    return (Code("The best", "best-recipe", write_toml(recipe_of(data, best).to_tables())),)
