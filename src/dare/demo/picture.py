"""The demonstration's picture: right answers over drop rates."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from dare.demo.results import Curve

HOW_TO_GET = "for the picture, install matplotlib: pip install 'dare-merge[demo]'"

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")
"""Okabe and Ito's, which people with any kind of colour vision can tell apart."""
MARKS = ("o", "s", "^", "D")


def can_draw() -> bool:
    """Say whether matplotlib is there."""
    return find_spec("matplotlib") is not None


def draw(curves: Sequence[Curve], caption: str, file: Path) -> None:
    """Draw the curves with their spread over seeds, as PNG, SVG or whatever the name ends in."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 4.4), dpi=160, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for curve, colour, mark in zip(curves, COLOURS, MARKS, strict=False):
        rates = [rate for rate, _ in curve.points]
        means = [point.mean for _, point in curve.points]
        spreads = [point.spread or 0.0 for _, point in curve.points]
        axes.plot(rates, means, color=colour, marker=mark, linewidth=2, label=curve.name)
        axes.fill_between(
            rates,
            [mean - spread for mean, spread in zip(means, spreads, strict=True)],
            [min(100.0, mean + spread) for mean, spread in zip(means, spreads, strict=True)],
            color=colour,
            alpha=0.18,
            linewidth=0,
        )
    axes.set(xlabel="drop rate p", ylabel="right answers to held-out prompts (%)")
    axes.set(xlim=(-0.02, 1), ylim=(0, 103))
    axes.grid(color="#dddddd", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower left")
    axes.set_title(caption, loc="left", fontsize=10)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file)
