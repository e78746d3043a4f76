"""The page of a study: plain values for the templates, one of which each section has."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from dare.errors import RecipeError
from dare.output.page.figures import Figure
from dare.output.page.shell import Section, render_page
from dare.output.page.tables import Columns, listing
from dare.output.page.words import NOTHING, number
from dare.recipe.toml import write_toml
from dare.studies.page import series, words
from dare.studies.page.series import TrialTable
from dare.studies.reading import recipe_of
from dare.studies.results import Conclusion, Ranked, StudyData, Trial
from dare.tensors.sizes import times

MOST_FAILED = 50
"""Failed trials that are shown with their output."""
MOST_OUTPUT = 4000
"""Characters of it: the last ones."""
FIGURE_SECTIONS = {
    "settings": ("Settings", ("curve-", "importance", "history", "parallel")),
    "scores": ("Scores", ("pareto",)),
}
"""By name: the title, and how the names of its figures begin."""
DIFFERENCES: Columns = {
    "the best against": lambda item: item.other,
    "difference": lambda item: words.signed(item.estimate)[0],
    "95% interval": lambda item: _bounds(words.signed(item.estimate)),
    "verdict": lambda item: item.verdict,
}


def assemble_study_page(
    data: StudyData, conclusion: Conclusion, figures: Sequence[Figure], library: str
) -> str:
    """Put everything into one text; `library` is the JavaScript that draws."""
    summary = words.summarize(data, conclusion)
    table = series.trial_table(data)
    failed = series.failed_trials(data)
    recipes = list(_recipes(data, conclusion))
    return render_page(
        "dare.studies.page",
        "study.html.jinja",
        figures=figures,
        library=library,
        script="study.js",
        style="study.css",
        filters={"verdict_tone": lambda verdict: words.VERDICTS.get(verdict, "note")},
        title=f"{summary.headline} – dare",
        summary=summary,
        tiles=list(_tiles(data, conclusion)),
        sections=list(_sections(figures, conclusion, failed, recipes)),
        against=listing(conclusion.against, DIFFERENCES),
        held_out=listing(conclusion.holdout.against if conclusion.holdout else (), DIFFERENCES),
        data=data,
        table=table,
        study=_for_script(table),
        failed=[(trial, trial.output[-MOST_OUTPUT:]) for trial in failed[:MOST_FAILED]],
        more_failed=max(0, len(failed) - MOST_FAILED),
        trial_name=words.trial_name,
        settings_text=words.settings_text,
        recipes=recipes,
        remarks=[*conclusion.remarks, *data.remarks],
        facts=list(_study_facts(data, conclusion)),
    )


def _bounds(texts: tuple[str, str | None, str | None]) -> str:
    _, low, high = texts
    return NOTHING if low is None else f"{low} … {high}"


def _sections(
    figures: Sequence[Figure],
    conclusion: Conclusion,
    failed: Sequence[Trial],
    recipes: Sequence[Any],
) -> Iterator[Section]:
    def named(beginnings: tuple[str, ...]) -> tuple[Figure, ...]:
        # In the order of the beginnings, which is that of the page.
        return tuple(f for beginning in beginnings for f in figures if f.name.startswith(beginning))

    if conclusion.against or named(("ranking",)):
        yield Section("against", "Against the others", "against.html.jinja", named(("ranking",)))
    for name, (title, beginnings) in FIGURE_SECTIONS.items():
        if drawn := named(beginnings):
            yield Section(name, title, "figures.html.jinja", drawn)
    yield Section("trials", "Trials", "trials.html.jinja")
    if failed:
        yield Section("failed", "Failed", "failed.html.jinja")
    if recipes:
        yield Section("recipe", "Recipe", "recipe.html.jinja")
    yield Section("study", "The study", "facts.html.jinja")


def _tiles(data: StudyData, conclusion: Conclusion) -> Iterator[tuple[str, str, str]]:
    """Label, value and remark of the most telling numbers."""
    best, holdout = conclusion.best, conclusion.holdout
    if best is not None:
        interval = words.interval_text(best.objective)
        known = f"95%: {interval}" if interval != NOTHING else "without an interval"
        yield "Best objective", words.value_text(best.objective.value), known
    baselines = [ranked for ranked in conclusion.baselines if not ranked.broken]
    if baselines:
        top = max(baselines, key=lambda ranked: ranked.objective.value)
        yield "Best baseline", words.value_text(top.objective.value), top.baseline
    if holdout is not None:
        value = words.value_text(holdout.objective.value)
        chosen = words.value_text(holdout.validation)
        yield "On held-out data", value, f"{chosen} for the same weights where they were chosen"
    done = sum(trial.is_done for trial in data.trials)
    others = words.counted(data).partition(" done")[2].lstrip(", ")
    yield "Trials done", f"{done} of {data.planned}", others or f"sampler: {data.sampler}"
    if conclusion.noise is not None:
        yield (
            "Noise",
            number(conclusion.noise),
            "difference between two scorings of the same weights",
        )
    seconds = sum(trial.seconds for trial in (*data.baselines, *data.trials))
    yield "Time", words.time_text(seconds), "merging and scoring, in total"


def _study_facts(data: StudyData, conclusion: Conclusion) -> Iterator[tuple[str, str]]:
    """What was searched, and how."""
    yield "Evaluator", data.evaluator
    if data.holdout_evaluator:
        yield "Holdout", data.holdout_evaluator
    yield "Objective", data.objective
    yield "Guards", "; ".join(data.guards) or "none"
    yield "Sampler", data.sampler
    yield "Seeds", ", ".join(map(str, data.seeds)) or NOTHING
    for name, values in data.space.items():
        yield name, words.value_text(values)
    if data.subset is not None:
        error = "" if conclusion.subset_error is None else number(conclusion.subset_error)
        share = f"{times(len(data.subset.ids), 'item')} of {sum(data.subset.sizes.values()):,}"
        yield "Subset", f"{share}{f', standard error {error}' if error else ''}"


def _for_script(table: TrialTable) -> dict[str, Any]:
    """What sorting, filtering and comparing need."""
    return {
        "columns": [{"name": column.name, "kind": column.kind} for column in table.columns],
        "rows": table.values,
        "items": table.items,
    }


def _recipes(data: StudyData, conclusion: Conclusion) -> Iterator[tuple[str, str, str]]:
    """Title, name and TOML of what to take and of the simplest."""
    chosen, simplest = conclusion.chosen, conclusion.simplest
    if chosen is None or conclusion.no_recipe:
        return
    if text := recipe_text(data, chosen):
        yield f"The {'baseline to take' if chosen.baseline else 'best'}", "best-recipe", text
    if simplest is not None and simplest != chosen and (text := recipe_text(data, simplest)):
        yield "The simplest within noise", "simplest-recipe", text


def recipe_text(data: StudyData, ranked: Ranked) -> str:
    """The recipe of a setting or a baseline as TOML; empty if it cannot be read here."""
    try:
        return write_toml(recipe_of(data, ranked).to_tables())
    except RecipeError:
        return ""
