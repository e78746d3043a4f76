"""A study read from its file, its result, and everything that page, terminal and notebook show."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
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
from dare.documents.notices import notice, notice_from_dict
from dare.documents.page import render_page
from dare.documents.shown import Shown, json_ready
from dare.documents.words import NOTHING, listed, share, time_text, times, value_text
from dare.errors import InputError, RecipeError, printable
from dare.output.targets import write_file
from dare.recipe.document import request_from_document
from dare.recipe.entries import write_toml
from dare.recipe.recipe import Recipe
from dare.stores.locations import usual_output
from dare.studies.conclusions import conclude
from dare.studies.figures import TEXTS, draw_figures, split_settings
from dare.studies.results import (
    NOT_MERGED,
    Conclusion,
    Difference,
    Holdout,
    Ranked,
    Role,
    State,
    StudyData,
    Trial,
    is_number,
    key_of,
    plain_name,
    rounded,
    settings_text,
    values_text,
)
from dare.studies.space import recipe_of, seed_shifts
from dare.studies.statistics import BETTER, NO_DIFFERENCE, NOT_KNOWN, WORSE
from dare.studies.study import BASELINE, HOLDOUT, Study

SAME_IN_CHARTER = ("recipe", "space", "sampler", "evaluator", "objective", "guards")
SIGNED = ", found by `dare search`."
"""The end of a recipe's first line, after its study: a search writes over that one's only."""
MOST_NAMED = 8  # candidates that are named in a sentence; more are counted
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
    """The recipe of the best setting, or of a baseline that beats it; None if there is nothing to
    merge, for which `conclusion.no_recipe` has the reason."""
    simplest: Recipe | None
    """The simplest recipe that cannot be told apart from the best and that no baseline beats."""

    def to_dict(self) -> dict[str, Any]:
        """Return the result as plain values, ready for JSON; the items stay in the study."""
        document = json_ready(asdict(self.data))
        for table in ("baselines", "trials", "holdout"):
            for trial in document[table]:
                scored = trial.pop("scored") or {}
                trial["scores"] = scored.get("scores")
                trial["items"] = len(scored.get("items", ()))
        for name in ("advice", "output", "importance"):
            document.pop(name)
        made = {"best": self.best, "simplest": self.simplest}
        recipes = {name: recipe and recipe.to_document() for name, recipe in made.items()}
        conclusion = json_ready(asdict(self.conclusion))
        return {**document, "answer": str(self), "conclusion": conclusion, "recipes": recipes}

    def document(self, *, rows: int = 12, outputs: bool = False) -> Document:
        """Return everything that is to be shown; a terminal shows so many `rows` of settings.

        With `outputs` it also shows what the evaluators of failed trials printed.
        """
        return study_document(self.data, self.conclusion, rows=rows, outputs=outputs)

    def to_html(self, path: str | PathLike[str] | None = None, *, overwrite: bool = True) -> str:
        """Return the page of the study, one text that needs no network; write it to a path."""
        text = render_page(self.document())
        if path is not None:
            write_file(Path(path), text.encode(), "page", overwrite=overwrite)
        return text

    def to_toml(self, *, simplest: bool = False, output: Path | None = None) -> str:
        """Return the best recipe, or the simplest, with the evidence for it as comments."""
        recipe = self.simplest if simplest else self.best
        if recipe is None:
            raise InputError(f"{self.study}: {self}; so there is no recipe to write")
        which = "simplest that may be as good as the best" if simplest else "best"
        tables = {
            **recipe.to_tables(),
            "output": str(output or recipe.output or usual_output(recipe.base)),
        }
        lines = [f"The {which} of {self.study.as_posix()}{SIGNED}"]
        if self.simplest not in (None, recipe):
            lines.append(f"Simpler, may be as good: dare search best {self.study} --simplest")
        for sentence in grounds(self.conclusion, of_best=recipe == self.best):
            lines += textwrap.wrap(printable(sentence), 96, subsequent_indent="  ")
        return "\n".join([*(f"# {line}" for line in lines), "", write_toml(tables)])

    def __repr__(self) -> str:
        return f"<SearchResult of {self.study}: {self}>"

    def __str__(self) -> str:
        return self.conclusion.no_recipe or str(self.conclusion.chosen)


def read_result(path: Path) -> SearchResult:
    """Return what a study shows by now, also while others work on it."""
    with closing(Study(path)) as study:
        return result_of(study)


def result_of(study: Study) -> SearchResult:
    """Return what an open study shows by now."""
    data, conclusion = read_study(study)
    best, simplest = (
        None if conclusion.no_recipe or ranked is None else recipe_of(data, ranked)
        for ranked in (conclusion.chosen, conclusion.simplest)
    )
    return SearchResult(study.path, data, conclusion, best, simplest)


def read_study(study: Study, *, resamples: int = 2000) -> tuple[StudyData, Conclusion]:
    """Return all that a study holds, and the conclusion from it."""
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
        advice=study.note("advice"),
        left_out=tuple(study.note("left_out") or ()),
        output=study.note("output"),
        command=study.note("command") or "",
        notices=(
            *(notice("study_remark", text=t.rstrip(".")) for t in study.note("remarks") or ()),
            *map(notice_from_dict, study.note("notices") or ()),
        ),
        importance=study.importance(),
    )
    conclusion = conclude(data, resamples=resamples)
    scored = study.beside(HOLDOUT)
    if scored and conclusion.best is not None:
        data = replace(data, holdout=tuple(_by_role(scored, conclusion)))
        conclusion = conclude(data, resamples=resamples)
    return data, conclusion


def _by_role(scored: Sequence[Trial], conclusion: Conclusion) -> list[Trial]:
    """Return what was scored on the holdout, under the names that hold now.

    Candidates are kept by their settings: a search that went on may have another winner.
    """
    keys = {key_of(found.settings): role for role, found in winners(conclusion).items()}
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
    """Return the best, and the second best setting, if one keeps to the guards."""
    rest = [r for r in conclusion.ranking if r != conclusion.best and not r.broken]
    best = [] if conclusion.best is None else [conclusion.best]
    return dict(zip((Role.WINNER, Role.RUNNER_UP), [*best, *rest[:1]], strict=False))


# ---------------------------------------------------------------- the document


def study_document(
    data: StudyData, conclusion: Conclusion, *, rows: int = 12, outputs: bool = False
) -> Document:
    """Return what was found, against what, and how sure it is.

    A terminal shows so many `rows` of settings; with `outputs`, also what failed trials printed.
    """
    title, tone, conclusive = _headline(data, conclusion)
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
    matters = (_importance(conclusion.importance),)
    said = "no_items" if tone is Tone.PLAIN else ""  # in the first sentence
    failed = [trial for trial in data.all_trials if trial.state is State.FAILED]
    unfinished = (
        () if data.is_finished else (("To continue", data.command or "run the same search"),)
    )
    conclusive = f"so far, {conclusive}" if unfinished and conclusive else conclusive
    what = Facts(tuple(_study_facts(data)), "What was searched")
    sections = (
        Section("items", "Luck or not", (RETURN_ITEMS,) * is_luck, is_brief=True),
        Section("against", "The best and the rest", _filled(against), ("ranking",), is_brief=True),
        Section("settings", "Settings", _filled(matters), ("curve-",), is_brief=True),
        Section("scores", "Scores", figures=("pareto",)),
        Section("together", "All settings together", figures=("parallel",)),
        Section("ranked", "Ranked", _filled(ranked), is_brief=True, on_page=False),
        Section("trials", "Trials", tuple(_trials(data))),
        Section("failed", "Failed", tuple(_failed(failed, outputs)), is_brief=True),
        Section("recipe", "Recipe", tuple(_recipes(data, conclusion))),
        Section("notices", "Caveats"),
        Section("study", "The study", (what,)),
    )
    return Document(
        title="Not finished yet" if unfinished else title,
        kind="search",
        tone=Tone.PLAIN if unfinished else tone,
        lead=f"{conclusive[:1].upper()}{conclusive[1:]}{'. ' * bool(conclusive)}{counted(data)}.",
        facts=(*unfinished, *facts(conclusion)),
        sections=sections,
        notices=tuple(n for n in (*conclusion.notices, *data.notices) if n.code != said),
        footer=f"Searched by {data.sampler}. The objective is {objective_text(data.objective)}.",
        draw=partial(draw_figures, data, conclusion),
    )


def _filled(tables: Iterable[Table]) -> tuple[Table, ...]:
    return tuple(table for table in tables if table.rows)


# ---------------------------------------------------------------- what decides


def _headline(data: StudyData, conclusion: Conclusion) -> tuple[str, Tone, str]:
    """Return the news, how good it is, and the conclusion in a sentence, if there is one."""
    best, chosen, no_recipe = conclusion.best, conclusion.chosen, conclusion.no_recipe
    verdicts, reason = {d.verdict for d in conclusion.against}, no_recipe.partition(": ")[2]
    if not data.is_searched and NOT_KNOWN not in verdicts:
        if chosen is None or no_recipe:
            return no_recipe.partition(":")[0].capitalize(), Tone.POOR, reason
        return f"Merge: take {_noun(chosen)}", Tone.GOOD, f"nothing beats {_noun(chosen)}"
    if best is None:
        title = "Every setting breaks a guard" if conclusion.ranking else "No setting is scored yet"
        return title, Tone.POOR, ""
    count, others = len(conclusion.ranking), len(conclusion.tied)
    top = f"{_noun(best)} has the best score{f' of {count} settings' if count > 1 else ''}"
    top += f", {value_text(best.objective.value)}"
    if conclusion.better:
        is_there = chosen is not None and chosen.role in NOT_MERGED
        title = f"{'Do not merge: a' if is_there else 'A'} baseline is better than the best setting"
        use = f"{_noun(chosen)} is better ({chosen.objective})" if chosen else no_recipe
        return title, Tone.POOR, reason or f"{top}, but {use}"
    if others:
        top += f", but {times(others, 'other')} may be just as good"
        named = conclusion.simplest if conclusion.simplest != best else None
        top += f"; the simplest is {_noun(named)}" if named else ""
        return "No clear winner", Tone.FAIR, top
    if verdicts == {BETTER}:
        top += ", and it is better than all others by more than chance"
        return "There is a clear winner", Tone.GOOD, top
    why = ": the evaluator gave no per-item results" if has_no_items(conclusion) else ""
    return "The top score may be luck", Tone.PLAIN, f"{top}, but that may be luck{why}"


def _noun(ranked: Ranked) -> str:
    """Return a candidate as a sentence names it."""
    if not ranked.baseline and len(ranked.trials) > 1:
        return f"the setting of {ranked.short}"
    if not ranked.baseline:
        return ranked.short
    if ranked.role is Role.SINGLE:
        return f"the model {ranked.baseline.removesuffix(' alone')}"
    if ranked.role is Role.PART:
        return ranked.short
    return "the " + ("advised merge" if ranked.role is Role.ADVICE else plain_name(ranked.baseline))


def has_no_items(conclusion: Conclusion) -> bool:
    """Tell if chance is not known because the evaluator returns no items."""
    return any(found.code == "no_items" for found in conclusion.notices)


def facts(conclusion: Conclusion) -> Iterator[tuple[str, str]]:
    """Yield label and sentence of what decides."""
    best, simplest = conclusion.best, conclusion.simplest
    tied = [ranked.short for ranked in sorted(conclusion.tied, key=lambda r: not r.baseline)]
    if best is None:
        return
    if best.baseline:
        yield "Take", conclusion.no_recipe or str(conclusion.chosen)
    else:
        yield "Best setting" if conclusion.better else "Best", f"{best.short}, {best}"
    if tied:
        more = [f"and {len(tied) - MOST_NAMED} more"] if len(tied) > MOST_NAMED else []
        yield "May be as good", "; ".join([*tied[:MOST_NAMED], *more])
    if conclusion.better:
        yield "Take instead", conclusion.no_recipe or str(conclusion.chosen)
    elif simplest is not None and tied and not best.baseline:
        yield "Simplest of these", "the best itself" if simplest == best else str(simplest)
    if conclusion.holdout is not None:
        yield "Holdout", holdout_text(conclusion.holdout)
    if conclusion.noise is not None:
        noise = f"differed by {value_text(conclusion.noise)}" if conclusion.noise else "agreed"
        yield "Noise", f"two scorings of the same weights {noise}"


def holdout_text(holdout: Holdout) -> str:
    """Return the winner on held-out data, beside the same weights where they were chosen."""

    def change(loss: float) -> str:
        if abs(loss) <= ROUNDING:
            return "no change"
        return f"{value_text(abs(loss))} {'lower' if loss > 0 else 'higher'}"

    where = f"{value_text(holdout.validation)} where it was chosen"
    text = f"{holdout.objective} on held-out data, {where}: {change(holdout.loss)}."
    if holdout.usual_loss is None:
        return text
    excess = holdout.loss - holdout.usual_loss
    luck = f"luck may have added about {value_text(excess)} to the score (winner's curse)"
    luck = luck if excess > ROUNDING else "there is no sign that luck chose it"
    return f"{text} The baselines, on average: {change(holdout.usual_loss)}. So {luck}."


def grounds(conclusion: Conclusion, *, of_best: bool) -> Iterator[str]:
    """Yield the evidence for what is taken, and against it, a line each."""
    if not of_best:  # the scores on the holdout and the differences are those of the best
        conclusion = replace(conclusion, against=(), holdout=None)
    for label, text in facts(conclusion):
        yield f"{label}: {text}"
    held = conclusion.holdout.against if conclusion.holdout else ()
    for start, found in (("Best against", conclusion.against), ("On the holdout against", held)):
        for difference in found:
            yield f"{start} {difference.other}: {difference.estimate:+}, {difference.verdict}."
    yield from (f"{said}." for said in conclusion.notices)


def counted(data: StudyData) -> str:
    """Return how many of the planned trials are done, and what became of the others."""
    counts = Counter(trial.state for trial in data.candidates)
    planned = times(data.planned, "trial" if data.is_searched else "baseline")
    others = [f"{counts[s]} {s}" for s in (State.STOPPED, State.FAILED, State.RUNNING) if counts[s]]
    return ", ".join([f"{counts[State.DONE]} of {planned} done", *others])


def objective_text(weights: dict[str, float]) -> str:
    """Return what is to be large.

    >>> objective_text({}), objective_text({"add": 1.0}), objective_text({"add": 1.0, "loss": -2.0})
    ('the mean of all scores', 'add', 'the mean of add and loss × -2')
    """
    if not weights:
        return "the mean of all scores"
    named = [name if w == 1 else f"{name} × {w:g}" for name, w in weights.items()]
    return f"{'the mean of ' if len(named) > 1 else ''}{listed(named)}"


def _study_facts(data: StudyData) -> Iterator[tuple[str, str]]:
    yield "Evaluator", data.evaluator
    if data.holdout_evaluator:
        yield "Holdout", data.holdout_evaluator
    yield "Objective", objective_text(data.objective)
    yield "Guards", "; ".join(data.guards) or "none"
    seconds = sum(trial.seconds for trial in data.all_trials)
    yield "Trials", f"{counted(data)}, in {time_text(seconds)} by {data.sampler}"
    if any(trial.is_random for trial in data.all_trials):
        yield "Seeds", ", ".join(map(str, data.seeds)) or NOTHING
    yield from ((name, values_text(values)) for name, values in data.space.items())


# ---------------------------------------------------------------- tables


def _differences(against: Sequence[Difference], title: str, hint: str = "") -> Table:
    columns: Columns = {
        "the best compared with": lambda item: item.other,
        "difference >": lambda item: f"{item.estimate.value:+.4g}",
        "95% interval >": lambda item: item.estimate.interval("+"),
        "verdict": lambda item: "" if item.verdict == NOT_KNOWN else item.verdict,
    }
    return tabulate(against, columns, title=title, hint=hint, tones=VERDICT_TONES)


def _importance(known: dict[str, float]) -> Table:
    pairs = sorted(known.items(), key=lambda pair: -pair[1])
    columns: Columns = {"setting": lambda pair: pair[0], "importance >": lambda p: share(p[1])}
    bars = tuple(100 * value / (pairs[0][1] or 1.0) for _, value in pairs)
    hint = TEXTS["importance_hint"]
    return tabulate(pairs, columns, title="Which settings matter", bars=bars, hint=hint)


def _ranked(data: StudyData, ranked: Sequence[Ranked], title: str, *names: str) -> Table:
    """Return settings or baselines with their scores, as many as a terminal has room for."""
    given = {f"{n} >": lambda item, n=n: value_text(item.settings.get(n)) for n in names}
    columns: dict[str, Callable[[Ranked], str]] = {
        "trial" if names else "": lambda i: i.short.partition(" ")[2] if names else i.short,
        **given,
        "objective >": lambda item: value_text(item.objective.value),
        "95% interval >": lambda item: item.objective.interval(),
    }
    more = [name for name in data.score_names if f"{name} >" not in columns]
    scores = {f"{n} >": lambda item, n=n: value_text(item.scores.get(n)) for n in more}
    columns |= scores
    if any(len(item.trials) > 1 for item in ranked):
        columns["trials >"] = lambda item: str(len(item.trials))
    if any(item.broken for item in ranked):
        columns["guards >"] = lambda item: "broken" if item.broken else "kept"
    optional = (*given, "95% interval >", *scores)
    return tabulate(ranked, columns, title=title, tones={"broken": Tone.POOR}, optional=optional)


def _trials(data: StudyData) -> Iterator[Part]:
    """Yield what all trials share, and all trials as a table."""
    scores, trials = data.score_names, data.all_trials
    settings, shared = split_settings(data)
    if shared:
        yield f"All trials have {settings_text(shared)}."

    def cells(trial: Trial) -> tuple[float | str | None, ...]:
        given = trial.scored.scores if trial.scored else {}
        return (
            plain_name(trial.name) or trial.number,
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
    told = [n for n, _ in enumerate(heads) if n < 2 or any(row[n] is not None for row in rows)]
    yield SortableTable(
        tuple(heads[n] for n in told),
        tuple(tuple(row[n] for n in told) for row in rows),
        tuple(trial.scored is not None for trial in trials),
        "Baselines and trials",
    )


def _cell(value: Any) -> float | str | None:
    if is_number(value):
        return rounded(value)
    return None if value is None or isinstance(value, float) else value_text(value)


def _state(trial: Trial) -> str:
    again = f", {trial.message}" if trial.is_done and trial.message else ""
    return f"{trial.state}{again}"


# ---------------------------------------------------------------- failures and recipes


def _failed(trials: Sequence[Trial], outputs: bool) -> Iterator[Part]:
    """Yield how many failed and why, and each of them with the end of its output."""
    if not trials:
        return
    alike: dict[str, list[Trial]] = {}
    for trial in trials:
        alike.setdefault(trial.message, []).append(trial)
    lines = [
        f"{same[0].label if len(same) == 1 else times(len(same), 'trial')}: {message or NOTHING}"
        for message, same in list(alike.items())[:MOST_MESSAGES]
    ]
    if len(alike) > MOST_MESSAGES:
        lines.append(f"and {times(len(alike) - MOST_MESSAGES, 'other message')}")
    yield Listing(f"{times(len(trials), 'trial')} failed", tuple(lines))
    for place, trial in enumerate(trials if outputs else trials[:MOST_FAILED]):
        text = f"{trial.message or _state(trial)}\n{trial.output[-MOST_OUTPUT:]}"
        code = Code(f"{trial.label} {trial.text}", f"output-{place}", text)
        yield code if outputs else Folded(f"{trial.label}: {trial.message or NOTHING}", (code,))


def _recipes(data: StudyData, conclusion: Conclusion) -> Iterator[Code]:
    """Yield the TOML of what to take and of the simplest; none if it cannot be read here."""
    chosen, simplest = conclusion.chosen, conclusion.simplest
    if chosen is None or conclusion.no_recipe:
        return
    which = "The baseline to take" if chosen.baseline else "The best"
    wanted = [(which, "best-recipe", chosen)]
    if simplest is not None and simplest != chosen:
        wanted.append(("The simplest one that may be as good", "simplest-recipe", simplest))
    found: dict[str, Code] = {}  # two that are the same are shown once
    for title, name, ranked in wanted:
        with suppress(RecipeError):
            text = write_toml(recipe_of(data, ranked).to_tables())
            found.setdefault(text, Code(title, name, text))
    yield from found.values()
