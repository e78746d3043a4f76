"""An analysis with its verdict and advice as a document: for pages, terminals and notebooks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from os import PathLike
from pathlib import Path

from dare.analysis.advice import Advice, judge
from dare.analysis.figures import TEXTS, cosine_text, draw_figures
from dare.analysis.readiness import (
    VERDICT_TONES,
    Readiness,
    body_of,
    chance_cancelled,
    cosines_text,
)
from dare.analysis.results import AnalysisData, ModelAnalysis, Origin, Outcome
from dare.documents.charts import fill_table
from dare.documents.document import (
    Code,
    Document,
    Folded,
    Listing,
    Part,
    Section,
    Table,
    bar_lengths,
    spans_decades,
    tabulate,
)
from dare.documents.notices import Notice, Severity, catalogue
from dare.documents.shown import Shown
from dare.documents.words import (
    NOTHING,
    amount,
    counted,
    listed,
    number,
    share,
    show_size,
    value_text,
)
from dare.output.receipt import short_name
from dare.recipe.entries import write_toml

MOST_NAMES = 3  # names and groups of models that a sentence lists; more are counted
MOST_PAIRS = 6  # pairs of models that are listed: those that have most to do with each other
DROP_COLUMNS = ("seed >", "drop rate >", "dropped >")  # they say nothing where nothing is dropped
ORIGINS = dict(zip(Origin, ("unchanged", "LoRA", "full fine-tune", "not known"), strict=True))
FIGURE_SECTIONS = (
    Section("drop-rate", "Drop rate", figures=("predicted-error",)),
    Section("together", "How similar they are", figures=("cosines", "conflicts", "cancelled")),
    Section("changes", "What changed", figures=("changes", "change-", "magnitudes", "spectra")),
)


@dataclass(frozen=True, repr=False)
class Analysis(AnalysisData, Shown):
    """The findings about models that are to be merged, as `dare.analyze` returns them."""

    def document(self) -> Document:
        """Return the analysis with the verdict and the advice."""
        return make_document(self, *judge(self))

    def to_html(self, path: str | PathLike[str] | None = None) -> str:
        """Return the report page, which needs nothing else; write it to a path, if one is given.

        It needs the packages of the extra `report`.
        """
        from dare.documents.page import render_page
        from dare.output.targets import write_file

        text = render_page(self.document())
        if path is not None:
            write_file(Path(path), text.encode(), "page")
        return text


def make_document(
    analysis: AnalysisData, readiness: Readiness, advice: Advice, outcome: Outcome | None = None
) -> Document:
    """Return the whole report; `outcome` is the effect of a merge that is finished."""
    base, parameters = short_name(analysis.base), amount(sum(analysis.base_dtypes.values()))
    caveats = tuple(f"{doubt}." for doubt in advice.doubts)
    why: list[Part] = [advice.reasons, *([Listing("Caveats", caveats)] if caveats else [])]
    return Document(
        title=readiness.headline,
        kind="merge report",
        tone=VERDICT_TONES[readiness.verdict],
        lead=f"{counted(len(analysis.models), 'model')} of {base}, {parameters} parameters",
        facts=tuple(_facts(analysis, readiness, advice)),
        tiles=tuple(_tiles(analysis, advice)),
        code=_recipe(advice),
        sections=(
            *([_merge_section(outcome)] if outcome else []),
            Section("notices", "Findings"),
            _models_section(analysis, readiness, advice),
            *FIGURE_SECTIONS,
            Section("advice", "Why these settings", tuple(why)),
            _inputs_section(analysis),
        ),
        notices=readiness.findings,
        footer=f"{show_size(analysis.bytes_read)} read in {number(analysis.seconds)} s.",
        models=analysis.names,
        draw=partial(draw_figures, analysis, advice, outcome),
    )


# ---------------------------------------------------------------- facts and tiles


def _facts(
    analysis: AnalysisData, readiness: Readiness, advice: Advice
) -> Iterator[tuple[str, str]]:
    yield "Advice", _advised(advice)
    if analysis.pairs:
        yield "Overlap", _overlap(analysis, readiness)
        usual = f"{chance_cancelled(analysis):.0%} is normal for independent models"
        yield "In a sum", f"{analysis.together.cancelled:z.0%} of the changes cancel; {usual}"


def _advised(advice: Advice) -> str:
    if not advice.recipe:
        return "none of the models should be merged"
    scale = advice.recipe.get("scale")
    said = [advice.recipe["method"], f"scale {value_text(scale)}" if scale else ""]
    said.append(f"without {_some(advice.left_out)}" if advice.left_out else "")
    return ", ".join(filter(None, said))


def _overlap(analysis: AnalysisData, readiness: Readiness) -> str:
    """Describe notable relations between models, or say that there are none."""
    notable = [
        f"{_some(finding.subjects)} {_relation(finding)}"
        for finding in readiness.findings
        if catalogue()[finding.code].together
    ]
    if not notable:
        cosines = cosines_text([pair.total.cosine for pair in analysis.pairs])
        return f"no strong overlap or conflict; {cosines}"
    return "; ".join(_first(notable))


def _relation(finding: Notice) -> str:
    """Describe the relation of models in a few words with their cosines."""
    words, figures = catalogue()[finding.code].together, finding.figures
    if finding.code == "multiple" and min(figures.values()) < 0:
        words = "are opposite" if len(finding.subjects) == 2 else "are multiples, some opposite"
    ends = [figures[name] for name in ("cosine", "largest_cosine") if name in figures]
    return f"{words} ({cosines_text(ends)})" if ends else words


def _some(names: tuple[str, ...]) -> str:
    """Return the first few names for a sentence."""
    return listed(_first(names))


def _first(items: Sequence[str]) -> list[str]:
    hidden = len(items) - MOST_NAMES
    return [*items[:MOST_NAMES], *([f"{hidden} more"] if hidden > 0 else [])]


def _tiles(analysis: AnalysisData, advice: Advice) -> Iterator[tuple[str, str, str]]:
    """Yield label, value and remark of numbers about the models that are merged."""
    models = [m for m in analysis.models if m.name not in advice.left_out] or analysis.models
    if not models:
        return
    largest = max(models, key=_change)
    yield "Largest change", share(_change(largest)), f"{largest.name}, relative to the base"
    names = {model.name for model in models}
    if pairs := [pair for pair in analysis.pairs if {pair.first, pair.second} <= names]:
        pair = max(pairs, key=lambda pair: abs(pair.total.cosine))
        remark = f"cosine, {pair.first} and {pair.second}"
        yield "Closest pair", cosine_text(pair.total.cosine), remark


def _change(model: ModelAnalysis) -> float:
    """Return the change that the advice uses: of the layers, or else of all weights."""
    return body_of(model).ratio or model.total.relative_norm


def _recipe(advice: Advice) -> Code | None:
    if not advice.recipe:
        return None
    without = f"It leaves out {listed(advice.left_out)}. " if advice.left_out else ""
    hint = f"{without}Save it as recipe.toml; to measure: dare search recipe.toml --data YOUR.jsonl"
    return Code("The recipe", "recipe", write_toml(advice.recipe), hint, advice.command)


# ---------------------------------------------------------------- sections


def _merge_section(outcome: Outcome) -> Section:
    where = f" to {short_name(outcome.output)}" if outcome.output else ""
    parts: list[Part] = [f"Merged by {outcome.method}{where} in {number(outcome.seconds)} s."]
    columns = TEXTS["merged"]["columns"]
    if all(model.drop_rate_asked is None for model in outcome.models):
        columns = {name: text for name, text in columns.items() if name not in DROP_COLUMNS}
    parts.append(fill_table(columns, outcome.models, of_models=True))
    if outcome.warnings:
        parts.append(Listing("Warnings", outcome.warnings))
    return Section("merge", "The merge", tuple(parts), ("survival", "kept"))


def _models_section(analysis: AnalysisData, readiness: Readiness, advice: Advice) -> Section:
    changes = list(map(_change, analysis.models))
    scale = "; its bars follow the logarithm" if spans_decades(changes) else ""
    table = tabulate(
        analysis.models,
        {
            "model": lambda model: model.name,
            "change >": lambda model: share(_change(model)),
            "origin": origin,
            "verdict": lambda model: str(readiness.by_model.get(model.name, NOTHING)),
            "remarks": lambda model: _remark(model.name, readiness, advice),
        },
        hint="Change is ‖δ‖ / ‖base‖ of the layers: how large the difference δ between the model's "
        f"weights and the base's is, relative to the base{scale}.",
        tones={str(verdict): tone for verdict, tone in VERDICT_TONES.items()},
        optional=("origin", "remarks", "bars"),
        bars=bar_lengths(changes),
        of_models=True,
    )
    numbers = fill_table(**TEXTS["numbers"], items=analysis.models, of_models=True)
    parts: list[Part] = [table, Folded("More numbers", (numbers,))]
    pairs = sorted(analysis.pairs, key=lambda pair: -abs(pair.total.cosine))[:MOST_PAIRS]
    if pairs:
        parts.append(Folded("Closest pairs", (fill_table(**TEXTS["pairs"], items=pairs),)))
    return Section("models", "Models", tuple(parts), is_brief=True)


def origin(model: ModelAnalysis) -> str:
    """Return how a model's delta was made, with its rank if known."""
    rank = "" if model.likely_rank is None else f", rank {model.likely_rank}"
    return f"{ORIGINS[model.origin]}{rank}{' (adapter)' if model.is_adapter else ''}"


def _remark(model: str, readiness: Readiness, advice: Advice) -> str:
    """Return the most severe finding about a model in a few words, and if it is left out."""
    said = ["left out"] if model in advice.left_out else []
    about = [finding for finding in readiness.of(model) if finding.subjects]
    for finding in about[:1]:
        others = tuple(name for name in finding.subjects if name != model)
        together = others if catalogue()[finding.code].together else ()
        title = catalogue()[finding.code].title
        said.append(f"{title}, with {_some(together)}" if together else title)
    return ": ".join(said)


def _inputs_section(analysis: AnalysisData) -> Section:
    files = [("base", analysis.base), *((model.name, model.file) for model in analysis.models)]
    rows = tuple((name, short_name(file)) for name, file in files)
    lists: dict[str, tuple[str, ...]] = {
        "How inputs were adjusted": tuple(
            str(note) for note in analysis.notes if note.severity is Severity.NOTE
        ),
        "Left out": tuple(map(str, analysis.left_out)),
        "Stored once, used twice": analysis.tied,
        **{f"Not in {m.name}, counted as unchanged": m.missing for m in analysis.models},
    }
    folded = [
        Folded(f"{title} ({len(items)})", (Listing(title, items),))
        for title, items in lists.items()
        if items
    ]
    table = Folded("Files", (Table(("input", "file"), rows),))
    return Section("inputs", "Inputs", (table, *folded), is_brief=True)
