"""Draws a small picture of every stage: what it makes of three small deltas.

    python docs/make_method_pictures.py

writes images/methods/NAME.svg. Every picture shows the same three deltas, of a matrix of three rows
with eight elements each, as bars up and down: on the left as they are, on the right what the stage
has made of them, computed by the stage itself. Pale bars on the right are there to compare with: a
delta before the stage, or the average of all. The base is zero, so that weights are deltas.

The methods page takes the pictures in as text, so `currentColor` is the colour of its letters. A
test holds that they are up to date.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

import dare
from dare.inputs.gathered import as_triangle, write_gathered
from dare.stages import STAGES, Stage

Floats = NDArray[np.float32]

FOLDER = Path(__file__).with_name("images") / "methods"
SHAPE = (3, 8)
MODELS, SEED = 3, 20
COMMON = 0.45
"""How much of each delta is shared by all."""
SETTINGS: dict[str, dict[str, Any]] = {
    "dare": {"drop_rate": 0.5},
    "darex": {"drop_rate": 0.5, "q": 0.7},
    "della": {"drop_rate": 0.5},
    "breadcrumbs": {"keep_middle": 0.7, "drop_largest": 0.1},
    "nearswap": {"t": 0.2},
    "dc_merge": {"keep_ratio": 0.3},
}
"""Where a usual value would change too much, or too little, of a delta with 24 elements."""

COLOURS = ("#3b82c4", "#c2701c", "#8a5cc4")
"""One for each model, to be told apart on white and on black."""
BAR, STEP, GAP = 7, 9, 8
ROW, HALF = 52, 23
LEFT, TOP = 58, 22
BLOCK = SHAPE[0] * (SHAPE[1] * STEP + GAP)
RIGHT = LEFT + BLOCK + 44
WIDTH, HEIGHT = RIGHT + BLOCK, TOP + MODELS * ROW
FULL = 1.2
"""The value that a bar of full height stands for; larger ones are cut there."""


def make_deltas() -> list[Floats]:
    """Three deltas that have something in common and much that they have not."""
    generator = np.random.default_rng(SEED)
    shared = generator.laplace(scale=0.4, size=SHAPE)
    return [
        (COMMON * shared + generator.laplace(scale=0.4, size=SHAPE)).astype(np.float32)
        for _ in range(MODELS)
    ]


def merge(deltas: Sequence[Floats], method: str, seed: int = 0, **settings: Any) -> Floats:
    """What a method makes of deltas to a base of zeros."""
    tuned = [{"w": delta} for delta in deltas]
    base = {"w": np.zeros(SHAPE, np.float32)}
    stages = {method.partition("+")[0]: settings} if settings else {}
    seeds = [seed + number for number in range(len(tuned))]
    merged, _ = dare.merge_arrays(
        base, tuned, method=method, seeds=seeds, stages=stages, verbose=False
    )
    return np.asarray(merged["w"], np.float32)


def merge_with_inputs(deltas: Sequence[Floats], method: str) -> Floats:
    """What a method makes of deltas and of made-up inputs, each model's with ups of its own."""
    generator, inputs = np.random.default_rng(SEED), SHAPE[1]
    grams = {}
    for number in range(len(deltas)):
        sizes = np.where(np.arange(inputs) % MODELS == number, 3.0, 0.5)
        seen = sizes * generator.normal(size=(64, inputs))
        grams[f"gram/model {number}/w"] = as_triangle(seen.T @ seen)
    with TemporaryDirectory() as folder:
        file = Path(folder, "gathered.safetensors")
        write_gathered(file, grams, rows={f"model {n}": 64 for n in range(len(deltas))})
        merged, _ = dare.merge_arrays(
            {"w": np.zeros(SHAPE, np.float32)},
            [{"w": delta} for delta in deltas],
            method=method,
            gathered=file,
            verbose=False,
        )
    return np.asarray(merged["w"], np.float32)


def draw(stage: Stage) -> str:
    """The picture of a stage."""
    settings = SETTINGS.get(stage.name, {})
    deltas = make_deltas()[: stage.models]
    parts = [_text(LEFT, 12, "deltas"), _text(RIGHT, 12, "after")]
    for row, delta in enumerate(deltas):
        parts.append(_text(0, _middle(row) + 4, f"model {row + 1}"))
        parts += _bars(LEFT, row, delta, COLOURS[row])
    if stage.kind == "delta":
        for row, delta in enumerate(deltas):
            after = merge([delta], f"{stage.name}+sum", row, **settings)
            parts += _bars(RIGHT, row, after, COLOURS[row], pale=delta)
    else:
        row = (len(deltas) - 1) / 2
        method = stage.name if stage.kind == "combine" else f"linear+{stage.name}"
        make = merge_with_inputs if stage.takes_grams else merge
        after = make(deltas, method, **settings)
        parts += _bars(RIGHT, row, after, "currentColor", pale=merge(deltas, "linear"))
    parts.append(_arrow())
    words = ", ".join(f"{name} = {value}" for name, value in settings.items())
    title = f"{stage.name}: {stage.summary}" + (f" Here {words}." if words else "")
    height = TOP + len(deltas) * ROW
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" role="img" viewBox="0 0 {WIDTH} {height}" '
            f'width="{WIDTH}" height="{height}" style="max-width:100%;height:auto" '
            'font-family="inherit" font-size="12" fill="currentColor">',
            f"<title>{escape(title)}</title>",
            "<style>@media(prefers-color-scheme:dark){:root{color:#e9e9e5}}</style>",
            *parts,
            "</svg>\n",
        ]
    )


def _bars(
    left: int, row: float, values: Floats, colour: str, pale: Floats | None = None
) -> list[str]:
    """A line of zero and a bar for each element; pale ones behind."""
    middle = _middle(row)
    end = left + BLOCK - GAP - STEP + BAR
    line = f'<path d="M{left} {middle}H{end}" stroke="currentColor" stroke-opacity=".35"/>'
    drawn = [line]
    if pale is not None:
        drawn.append(_bar_path(left, middle, pale, "currentColor", ' stroke-opacity=".22"', BAR))
    drawn.append(_bar_path(left, middle, values, colour, "", BAR if pale is None else BAR - 3))
    return drawn


def _bar_path(
    left: int, middle: float, values: Floats, colour: str, more: str, width: float
) -> str:
    steps = []
    for place, value in enumerate(values.reshape(-1)):
        height = round(HALF * max(-1.0, min(1.0, float(value) / FULL)), 1)
        if height:
            x = left + place * STEP + place // SHAPE[1] * GAP + BAR / 2
            steps.append(f"M{x:g} {middle:g}v{-height:g}")
    return f'<path d="{"".join(steps)}" stroke="{colour}"{more} stroke-width="{width:g}"/>'


def _middle(row: float) -> float:
    return TOP + row * ROW + ROW / 2


def _arrow() -> str:
    x, y = RIGHT - 34, 8
    return f'<path d="M{x} {y}h18m-5 -4l5 4l-5 4" fill="none" stroke="currentColor"/>'


def _text(x: float, y: float, words: str) -> str:
    return f'<text x="{x:g}" y="{y:g}" opacity=".75">{escape(words)}</text>'


def main() -> None:
    """Write all of them."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for stage in STAGES.values():
        if stage.models != 0:
            (FOLDER / f"{stage.name}.svg").write_text(draw(stage), "utf-8")


if __name__ == "__main__":
    main()
