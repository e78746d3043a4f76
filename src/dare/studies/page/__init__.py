"""The page of a study: one HTML file that needs no network, in the looks of the report."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from dare.documents.charts import Figure
from dare.documents.document import Columns
from dare.documents.page import Section, check_installed, render_page
from dare.documents.words import NOTHING
from dare.errors import RecipeError
from dare.output.targets import write_file
from dare.recipe.toml import write_toml
from dare.studies import words
from dare.studies.page import series
from dare.studies.reading import recipe_of
from dare.studies.results import Conclusion, Ranked, StudyData, settings_text

MOST_FAILED = 50
"""Failed trials that are shown with their output."""
MOST_OUTPUT = 4000
"""Characters of it: the last ones."""
FIGURE_SECTIONS = {
    "settings": ("Settings", ("curve-", "importance")),
    "scores": ("Scores", ("pareto",)),
}
"""By name: the title, and how the names of its figures begin."""
DIFFERENCES: Columns = {
    "the best against": lambda item: item.other,
    "difference": lambda item: f"{item.estimate.value:+.4g}",
    "95% interval": lambda item: item.estimate.interval("+") or NOTHING,
    "verdict": lambda item: item.verdict,
}


def write_study_page(
    path: Path, data: StudyData, conclusion: Conclusion, *, overwrite: bool = True
) -> None:
    """Write one HTML page that needs nothing else."""
    check_installed()
    from dare.studies.page.figures import draw_figures

    figures = draw_figures(data, conclusion)
    page = assemble_study_page(data, conclusion, figures, library_for(figures))
    write_file(path, page.encode(), "page", overwrite=overwrite)


def assemble_study_page(
    data: StudyData, conclusion: Conclusion, figures: Sequence[Figure], library: str
) -> str:
    """Put everything into one text; `library` is the JavaScript that draws."""
    summary = words.summarize(data, conclusion)
    table = series.trial_table(data)
    failed = data.failed
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
        sections=list(
            _sections(
                figures,
                against=bool(conclusion.against),
                failed=bool(failed),
                recipes=bool(recipes),
            )
        ),
        against=listing(conclusion.against, DIFFERENCES),
        held_out=listing(conclusion.holdout.against if conclusion.holdout else (), DIFFERENCES),
        data=data,
        table=table,
        study={"columns": table.columns, "rows": table.rows},
        failed=[(trial, trial.output[-MOST_OUTPUT:]) for trial in failed[:MOST_FAILED]],
        more_failed=max(0, len(failed) - MOST_FAILED),
        settings_text=settings_text,
        objective=words.objective_text(data.objective),
        recipes=recipes,
        remarks=[*conclusion.remarks, *data.remarks],
        facts=list(_study_facts(data)),
    )


def _sections(
    figures: Sequence[Figure], *, against: bool, failed: bool, recipes: bool
) -> Iterator[Section]:
    def named(beginnings: tuple[str, ...]) -> tuple[Figure, ...]:
        # In the order of the beginnings, which is that of the page.
        return tuple(f for beginning in beginnings for f in figures if f.name.startswith(beginning))

    if against or named(("ranking",)):
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


def _study_facts(data: StudyData) -> Iterator[tuple[str, str]]:
    """What was searched, and how."""
    yield "Evaluator", data.evaluator
    if data.holdout_evaluator:
        yield "Holdout", data.holdout_evaluator
    yield "Objective", words.objective_text(data.objective)
    yield "Guards", "; ".join(data.guards) or "none"
    seconds = sum(trial.seconds for trial in (*data.baselines, *data.trials))
    yield "Trials", f"{words.counted(data)}, in {words.time_text(seconds)} by {data.sampler}"
    yield "Seeds", ", ".join(map(str, data.seeds)) or NOTHING
    for name, values in data.space.items():
        yield name, words.range_text(values)


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
