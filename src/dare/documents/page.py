"""Documents as HTML: pages of one file that need no network, and cards and charts for notebooks.

Names of models and tensors come from files and may be hostile: every text is escaped. The only
module that imports Jinja, and vl-convert, which holds the JavaScript of Vega. The playground's own
template extends `page.html.jinja` too.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from html import escape
from importlib.resources import files
from importlib.util import find_spec
from itertools import groupby
from typing import Any

from dare.documents.charts import THEMES, alt, vega_config
from dare.documents.document import (
    Code,
    Document,
    Facts,
    Figure,
    Folded,
    Listing,
    Part,
    Section,
    Spec,
    Table,
)
from dare.documents.notices import Notice
from dare.documents.words import listed, number, value_text
from dare.errors import OutputError, RecipeError, did_you_mean, install_command, printable

PACKAGE = "dare.documents"
# The policy of every page: load nothing that is not allowed by name.
CLOSED = "default-src 'none'; base-uri 'none'; form-action 'none'"
NEEDED = ("altair", "jinja2", "vl_convert")
# The name of the section with the notices; the first one, if a document has none of it.
NOTICES = "notices"
MOST_ROWS = 20  # rows of a table that are shown; more are counted
CHART_WIDTH = 640  # the width in pixels; a notebook has no place whose width a chart could take
_LINE = "1px solid rgba(128, 128, 128, 0.4)"
_CELL = f"padding: 0.15em 0.8em; border: 0; border-bottom: {_LINE};"
_SHAPE = f"border: {_LINE}; border-radius: 6px; padding: 0.6em 0.9em; max-width: 62em;"


def check_installed(what: str = "a report", extra: str = "report", *more: str) -> None:
    """Refuse to make a page without the packages that it takes, and more of them."""
    if not all(find_spec(name) for name in (*NEEDED, *more)):
        missing = f"{what} needs packages that are not installed"
        raise OutputError(f"{missing}: {install_command(extra)}")


def render_page(document: Document, library: str | None = None, script: str = "") -> str:
    """Return a document as one HTML text; `library` is the JavaScript that draws, if at hand.

    A page that is served may have a `script` of its own, which may ask its server.
    """
    check_installed()
    figures = document.draw()
    if library is None:
        library = drawing_bundle(_version(figures[0].spec)) if figures else ""
    own = [read_template(PACKAGE, name) for name in ("page.js", "document.js")]
    asks = "; connect-src 'self'" if script else ""
    return render_template(
        PACKAGE,
        "document.html.jinja",
        scripts=[library, *own, *([script] if script else [])],
        styles=[],
        policy=f"img-src data: blob:; style-src 'unsafe-inline'{asks}",
        title=f"{document.title} – dare",
        document=document,
        sections=list(_sections(document, figures)),
        drawings=[{"name": figure.name, "spec": _described(figure)} for figure in figures],
    )


def _sections(document: Document, figures: Sequence[Figure]) -> Iterator[Section]:
    """Yield the sections that have something to show, with their figures."""
    sections = document.sections
    if document.notices and all(section.name != NOTICES for section in sections):
        sections = (Section(NOTICES, "Notices"), *sections)
    for section in (section for section in sections if section.on_page):
        notices = document.notices if section.name == NOTICES else ()
        drawn = [
            figure
            for beginning in section.figures
            for figure in figures
            if figure.name.startswith(beginning)
        ]
        if parts := (*section.parts, *notices, *drawn):
            yield replace(section, parts=parts)


def render_template(
    package: str,
    template: str,
    *,
    scripts: Sequence[str],
    styles: Sequence[str],
    policy: str,
    allowed: Sequence[str] = (),
    **values: Any,
) -> str:
    """Return one text from a package's template, with these scripts and styles in it.

    `policy` says what the page may load, `allowed` which scripts besides its own.
    """
    start = read_template(PACKAGE, "start.js")
    page = _environment(package).get_template(template)
    text: str = page.render(
        policy=f"{CLOSED}; {_script_policy([start, *scripts], allowed)}; {policy}",
        colours={name: theme.colours for name, theme in THEMES.items()},
        style="".join([read_template(PACKAGE, "page.css"), *styles]),
        start=start,
        scripts=scripts,
        themes={name: vega_config(theme) for name, theme in THEMES.items()},
        **values,
    )
    return text


def read_template(package: str, name: str) -> str:
    """Return a file among a package's templates as it is."""
    return files(package).joinpath("templates", name).read_text("utf-8")


def _environment(package: str) -> Any:
    from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=ChoiceLoader([PackageLoader(package), PackageLoader(PACKAGE)]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    compact = {"ensure_ascii": False, "allow_nan": False, "separators": (",", ":")}
    environment.policies["json.dumps_kwargs"] = compact
    environment.filters.update(number=number, listed=listed, cell=_cell_text, grouped=_grouped)
    environment.filters["unbroken"] = _unbroken
    return environment


def _cell_text(value: object) -> str:
    return number(value) if isinstance(value, float) else value_text(value)


def _unbroken(text: str) -> str:
    """Return text as HTML in which no line ends within a flag."""
    from markupsafe import Markup

    marked = r'<span class="flag">\g<0></span>'
    return Markup(re.sub(r"(?<![\w-])--[\w-]+", marked, str(Markup.escape(text))))  # noqa: S704


def _grouped(parts: Iterable[Part]) -> Iterator[tuple[str, list[Part]]]:
    """Yield neighbours of one kind together, with the kind's name."""
    for kind, items in groupby(parts, lambda part: type(part).__name__):
        yield kind, list(items)


def _script_policy(scripts: Iterable[str], allowed: Sequence[str]) -> str:
    """Return a policy by which only these scripts run (Vega compiles its expressions)."""
    digests = [
        f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
        for text in scripts
    ]
    return " ".join(["script-src", *digests, *allowed, "'unsafe-eval'"])


def _described(figure: Figure) -> Spec:
    """Return a figure's chart with its description and without the address of a schema."""
    bare = {key: value for key, value in figure.spec.items() if key != "$schema"}
    return {**bare, "description": figure.description}


@cache
def drawing_bundle(version: str) -> str:
    """Return the JavaScript that draws figures of a version of Vega-Lite."""
    import vl_convert

    library = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;", vl_version=version)
    return re.sub(r"</(?=script)", r"<\\/", library, flags=re.IGNORECASE)


def _version(spec: Mapping[str, Any]) -> str:
    """Return the version of Vega-Lite that a chart names.

    >>> _version({"$schema": "https://vega.github.io/schema/vega-lite/v6.4.1.json"})
    '6.4'
    """
    major, minor, *_ = spec["$schema"].rpartition("/v")[2].split(".")
    return f"{major}.{minor}"


# ---------------------------------------------------------------- notebooks

# Cards have no scripts and no colours but the notebook's, so that they suit light and dark ones.


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
