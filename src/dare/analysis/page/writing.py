"""Files: the page, and every figure on its own as SVG or PNG."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from dare.analysis.judge.judgement import Advice, Readiness
from dare.analysis.page.assembly import assemble_page
from dare.analysis.page.outcome import Outcome
from dare.analysis.results import Analysis
from dare.errors import InputError
from dare.output.page.themes import THEMES
from dare.output.page.writing import Format, check_installed, draw_file, library_for, write_file
from dare.output.targets import check_free

if TYPE_CHECKING:
    from dare.output.page.figures import Figure

ThemeName = Literal["light", "dark"]


def write_page(
    path: Path,
    analysis: Analysis,
    readiness: Readiness,
    advice: Advice,
    outcome: Outcome | None = None,
) -> None:
    """Write one HTML page that needs nothing else; `outcome` is what a finished merge did."""
    write_file(path, page_text(analysis, readiness, advice, outcome).encode(), "page")


def page_text(
    analysis: Analysis, readiness: Readiness, advice: Advice, outcome: Outcome | None = None
) -> str:
    """The page itself."""
    figures = draw(analysis, advice, outcome)
    return assemble_page(analysis, readiness, advice, outcome, figures, library_for(figures))


def write_figures(
    folder: Path,
    analysis: Analysis,
    advice: Advice,
    outcome: Outcome | None = None,
    *,
    format: Format = "svg",  # noqa: A002
    theme: ThemeName = "light",
    overwrite: bool = True,
) -> list[Path]:
    """Write every figure as a file of its own; return their paths."""
    figures = {folder / f"{f.name}.{format}": f for f in draw(analysis, advice, outcome)}
    for path in figures:
        check_free(path, format, overwrite=overwrite)
    for path, figure in figures.items():
        write_file(path, draw_file(figure, THEMES[theme], format), format)
    return list(figures)


def draw(analysis: Analysis, advice: Advice, outcome: Outcome | None = None) -> list[Figure]:
    """All figures that there is something to draw in."""
    check_installed()
    if not analysis.models:
        raise InputError("the analysis has no models: there is nothing to show")
    from dare.analysis.page.figures import draw_figures

    return draw_figures(analysis, advice, outcome)
