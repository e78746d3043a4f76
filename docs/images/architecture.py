"""Draws architecture.svg: from a request to an output.

The picture has a background of its own, so that it can be read on light and dark pages alike.
`python docs/images/architecture.py` writes it; a test holds that it is up to date.
"""

from __future__ import annotations

from html import escape
from pathlib import Path

WIDTH, HEIGHT = 1060, 566
PAPER, INK, FAINT, LINE = "#fbfbf8", "#1b2430", "#52606d", "#7b8794"
FILL = {
    "asked": "#dbe7fb",
    "planned": "#e3f1de",
    "worked": "#fdf0d2",
    "file": "#eceff3",
    "math": "#f3e2f3",
}

PROMISE = "Everything that can go wrong for a reason visible in the headers goes wrong in the plan."
AND_THEN = "What follows is a pure function from plan and input bytes to output bytes."

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, Helvetica, Arial, sans-serif"


def draw() -> str:
    """The whole picture."""
    parts = [
        *_column_titles(),
        # what is asked for, and what will be done
        _box(
            30, 90, 170, 112, "asked", "request", ["recipe: decides bytes", "options: how it runs"]
        ),
        _arrow(200, 146, 250, 146),
        _box(
            250,
            90,
            190,
            112,
            "planned",
            "plan",
            ["fate and place of every", "tensor, passes, memory"],
        ),
        _arrow(440, 146, 500, 146),
        # the work
        _frame(500, 70, 530, 310, "run: batches of chunks, on any thread, node or slice"),
        _box(520, 110, 140, 72, "worked", "worker", ["reads base, models"]),
        _arrow(660, 146, 690, 146),
        _box(690, 110, 150, 72, "worked", "delta stages", ["dare, trim, …"]),
        _arrow(840, 146, 870, 146),
        _box(870, 110, 140, 72, "worked", "combine stage", ["linear, ties, …"]),
        _arrow(940, 182, 940, 278),
        _box(
            870, 278, 140, 80, "worked", "backend", ["adds to base, rounds", "once, counts, hashes"]
        ),
        _arrow(870, 318, 840, 318),
        _box(690, 278, 150, 80, "worked", "sink", ["bytes at their places,", "in any order"]),
        _arrow(690, 318, 660, 318),
        _box(520, 278, 140, 80, "worked", "journal", ["digests and figures", "of the chunk"]),
        _path("M 630 278 V 182", label="resume", label_at=(637, 240), dashed=True),
        # the mask
        _box(690, 204, 150, 52, "math", "mask", ["seed, name, index, p"]),
        _arrow(765, 204, 765, 182),
        # files
        _box(250, 270, 190, 68, "file", "base, models", ["files, shards, directories"]),
        _arrow(345, 270, 345, 202, label="headers", label_at=(352, 240)),
        _path("M 440 304 H 480 V 230 H 560 V 182", label="weights", label_at=(508, 224)),
        _path("M 590 358 V 442 H 440", label="all chunks done", label_at=(600, 410)),
        _box(250, 408, 190, 68, "planned", "publisher", ["headers, sync, name"]),
        _arrow(250, 442, 200, 442),
        _box(30, 396, 170, 92, "file", "output", ["weights, manifest;", "receipt: the report"]),
        _path("M 115 396 V 202", label="repeat it", label_at=(122, 300)),
        _text(30, 524, PROMISE, 13, FAINT),
        _text(30, 544, AND_THEN, 13, FAINT),
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'role="img" aria-label="From a request to an output" font-family="{FONT}">\n'
        '<defs><marker id="head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" '
        f'markerHeight="7" orient="auto"><path d="M 0 1 L 9 5 L 0 9 z" fill="{LINE}"/></marker>'
        "</defs>\n"
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="12" fill="{PAPER}" stroke="#c9d0d8"/>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def _column_titles() -> list[str]:
    titles = ((30, "What you ask for"), (250, "Headers only"), (500, "Weights, in bounded memory"))
    return [_text(x, 50, title, 15, FAINT, weight="600") for x, title in titles]


def _box(
    x: int,
    y: int,
    width: int,
    height: int,
    kind: str,
    title: str,
    lines: list[str],
) -> str:
    middle = x + width / 2
    top = y + height / 2 - 9 * len(lines) + 5
    shown = [
        f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="8" fill="{FILL[kind]}" '
        f'stroke="{LINE}"/>',
        _text(middle, top, title, 15, INK, "middle", "700"),
    ]
    shown += [
        _text(middle, top + 18 * number, line, 12.5, INK, "middle")
        for number, line in enumerate(lines, start=1)
    ]
    return "\n".join(shown)


def _frame(x: int, y: int, width: int, height: int, title: str) -> str:
    return (
        f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="10" fill="none" '
        f'stroke="{LINE}" stroke-dasharray="5 4"/>\n'
        + _text(x + width - 14, y + 24, title, 12.5, FAINT, "end")
    )


def _arrow(
    x1: int, y1: int, x2: int, y2: int, *, label: str = "", label_at: tuple[int, int] = (0, 0)
) -> str:
    return _path(f"M {x1} {y1} L {x2} {y2}", label=label, label_at=label_at)


def _path(
    data: str, *, label: str = "", label_at: tuple[int, int] = (0, 0), dashed: bool = False
) -> str:
    dashes = ' stroke-dasharray="4 4"' if dashed else ""
    line = (
        f'<path d="{data}" fill="none" stroke="{LINE}" stroke-width="1.6"{dashes} '
        'marker-end="url(#head)"/>'
    )
    return line + ("\n" + _text(*label_at, label, 12, FAINT) if label else "")


def _text(
    x: float,
    y: float,
    words: str,
    size: float,
    colour: str,
    anchor: str = "start",
    weight: str = "400",
) -> str:
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{size:g}" fill="{colour}" '
        f'text-anchor="{anchor}" font-weight="{weight}">{escape(words)}</text>'
    )


if __name__ == "__main__":
    Path(__file__).with_suffix(".svg").write_text(draw(), "utf-8")
