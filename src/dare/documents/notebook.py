"""Documents in notebooks: a card of HTML, and figures as Altair charts.

Names of models and tensors come from files and may be hostile: every text is escaped. There are no
scripts and no colours but the notebook's, so that a card can be read in light and dark ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from dare.documents.charts import THEMES, alt, vega_config
from dare.documents.document import Code, Document, Facts, Folded, Listing, Part, Table
from dare.documents.notices import Notice
from dare.documents.page import check_installed
from dare.errors import RecipeError, did_you_mean, printable

MOST_ROWS = 20  # rows of a table that are shown; more are counted
CHART_WIDTH = 640  # the width in pixels; a notebook has no place whose width a chart could take
_LINE = "1px solid rgba(128, 128, 128, 0.4)"
_CELL = f"padding: 0.15em 0.8em; border: 0; border-bottom: {_LINE};"
_SHAPE = f"border: {_LINE}; border-radius: 6px; padding: 0.6em 0.9em; max-width: 62em;"


def render_card(document: Document) -> str:
    """Return a document as a card: its title, facts, brief sections, notices and code."""
    parts = [part for section in document.sections if section.is_brief for part in section.parts]
    inside = "".join(
        [
            f" {_text(document.lead)}" if document.lead else "",
            _facts(document.facts),
            *map(_render, parts),
            _notices(document.notices),
            _render(document.code) if document.code else "",
        ]
    )
    return f'<div style="{_SHAPE}"><strong>{_text(document.title)}</strong>{inside}</div>'


def make_chart(document: Document, name: str | None = None) -> Any:
    """Return a figure of a document as an Altair chart; the first one if none is named."""
    check_installed()
    figures = {figure.name: figure for figure in document.draw()}
    name = next(iter(figures), None) if name is None else name
    if name not in figures:
        known = f"{did_you_mean(name or '', figures)}; there are {', '.join(figures) or 'none'}"
        raise RecipeError(f"{name!r}: there is no such figure{known}")
    figure, theme = figures[name], THEMES["light"]
    config = {**vega_config(theme), "background": theme.colours["panel"], "padding": 12}
    spec = {**figure.spec, "title": figure.title, "width": CHART_WIDTH, "config": config}
    rows = spec.pop("datasets")
    chart = alt.LayerChart.from_dict(spec)
    chart.datasets = rows  # as they are: Altair would make an object of every number
    return chart


def _render(part: Part) -> str:
    match part:
        case str():
            return f"<div>{_text(part)}</div>"
        case Table():
            return _table(part)
        case Facts():
            return _facts(part.items)
        case Listing():
            return _folded(part.title, "\n".join(part.items))
        case Code():
            return _folded(part.title, part.text)
        case Folded():
            inside = "".join(map(_render, part.parts))
            return f"<details><summary>{_text(part.title)}</summary>{inside}</details>"
        case Notice():
            return _notices([part])
    return ""  # figures are drawn by `plot`


def _table(table: Table) -> str:
    if not table.rows:
        return ""
    sides = ["right" if name.endswith(" >") else "left" for name in table.columns]
    head = _row("th", [name.removesuffix(" >") for name in table.columns], sides)
    body = "".join(_row("td", row, sides) for row in table.rows[:MOST_ROWS])
    more = len(table.rows) - MOST_ROWS
    rest = f'<div style="opacity: 0.7;">and {more:,} more</div>' if more > 0 else ""
    looks = "border-collapse: collapse; margin: 0.5em 0; width: auto;"
    title = f"<div>{_text(table.title)}</div>" if table.title else ""
    shown = f'<table style="{looks}"><thead>{head}</thead><tbody>{body}</tbody></table>'
    return f"{title}{shown}{rest}"


def _facts(facts: Iterable[tuple[str, str]]) -> str:
    shown = " · ".join(f"{_text(label)} <b>{_text(text)}</b>" for label, text in facts)
    return f'<div style="margin: 0.3em 0;">{shown}</div>' if shown else ""


def _notices(notices: Iterable[Notice]) -> str:
    lines = "".join(f"<li><b>{each.severity}</b> {_text(str(each))}</li>" for each in notices)
    return f'<ul style="margin: 0.4em 0; padding-left: 1.4em;">{lines}</ul>' if lines else ""


def _folded(summary: str, text: str) -> str:
    looks = "margin: 0.3em 0; white-space: pre-wrap;"
    code = f'<pre style="{looks}">{escape(printable(text, keep=chr(10)))}</pre>'
    return f"<details><summary>{_text(summary)}</summary>{code}</details>" if text else ""


def _row(tag: str, cells: Sequence[str], sides: Sequence[str]) -> str:
    shown = "".join(
        f'<{tag} style="{_CELL} text-align: {side};">{_text(cell)}</{tag}>'
        for cell, side in zip(cells, sides, strict=True)
    )
    return f"<tr>{shown}</tr>"


def _text(text: str) -> str:
    return escape(printable(text))
