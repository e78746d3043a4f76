"""Record a terminal: `python docs/make_recording.py` writes docs/images/recording.svg.

Runs real commands in a terminal of its own, keeps what the screen showed and when, and draws it as
one SVG that plays by itself: a strip of screens that moves up from one to the next. Nothing is
staged but the typing, and waits are shortened to `LONGEST_WAIT`. It begins with the last screen,
which is all that a viewer without motion shows. Needs `pyte`, which knows what a terminal makes of
its input.
"""

from __future__ import annotations

import os
import pty
import select
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fcntl import ioctl
from html import escape
from itertools import groupby
from pathlib import Path

import pyte

TARGET = Path(__file__).parent / "images" / "recording.svg"
COLUMNS, LINES = 96, 30
COMMANDS = (
    "dare analyze models/base models/add models/sort models/say",
    "dare advise models/base models/add models/sort models/say --quiet > recipe.toml",
    "dare recipe.toml",
    "dare verify merged",
)
TYPING, SHORTEST, LONGEST_WAIT, READING, END = 0.03, 0.1, 1.2, 2.5, 6.0
"""Seconds: a letter, a screen at the least and at the most, after a command, at the end."""
OPENING = 2.0
"""Seconds for which the last screen is shown first."""
PROMPT = "$ "
CELL, LINE, MARGIN = 8.4, 18, 14
BACKGROUND, TEXT = "#1b1f27", "#d8dee9"
BOLD = ' font-weight="700"'
COLOURS = {
    "green": "#8fd694",
    "red": "#ff8f8f",
    "brown": "#f0c674",
    "blue": "#88b4f0",
    "magenta": "#d4a6e8",
    "cyan": "#86d3d3",
    "black": "#8a92a0",
    "brightblack": "#8a92a0",
}
"""Of the terminal, by the names that pyte has for them; others are `TEXT`."""

Style = tuple[str, bool]
Line = tuple[tuple[int, str, Style], ...]
"""Where a run of letters begins, the run, its colour and whether it is bold."""
Screen = tuple[Line, ...]


@dataclass(frozen=True)
class Frame:
    """A screen, and how long it is shown."""

    screen: Screen
    seconds: float


def main() -> None:
    """Record the commands on the demonstration's models, and draw the recording."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        models = ["dare", "demo", "--models", "models"]
        subprocess.run(models, cwd=folder, env=environment, check=True, capture_output=True)  # noqa: S603
        frames = list(record(Path(folder), environment))
    TARGET.write_text(draw(shortened(frames)), "utf-8")
    print(f"{TARGET}: {len(frames)} screens, {TARGET.stat().st_size / 1e3:.0f} kB")


# ---------------------------------------------------------------- recording


def record(folder: Path, environment: dict[str, str]) -> Iterator[Frame]:
    """Type each command, run it, and give every screen that there was to see."""
    terminal = pyte.Screen(COLUMNS, LINES)
    stream = pyte.ByteStream(terminal)
    for command in COMMANDS:
        stream.feed(PROMPT.encode())
        for letter in command:
            stream.feed(letter.encode())
            yield Frame(look_at(terminal), TYPING)
        stream.feed(b"\r\n")
        for seconds, output in run(command, folder, environment):
            yield Frame(look_at(terminal), seconds)
            stream.feed(output)
        yield Frame(look_at(terminal), READING)
    yield Frame(look_at(terminal), END)


def run(command: str, folder: Path, environment: dict[str, str]) -> Iterator[tuple[float, bytes]]:
    """Run a command in a terminal; give what it writes, each with the seconds before it."""
    reader, writer = pty.openpty()
    ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
    how = {"stdin": writer, "stdout": writer, "stderr": writer, "start_new_session": True}
    variables = {**environment, "TERM": "xterm", "COLUMNS": str(COLUMNS)}
    process = subprocess.Popen(["sh", "-c", command], cwd=folder, env=variables, **how)  # noqa: S603, S607
    os.close(writer)
    last = time.monotonic()
    while True:
        select.select([reader], [], [])
        try:
            output = os.read(reader, 1 << 16)
        except OSError:  # which a terminal says at the end of its program
            break
        if not output:
            break
        now = time.monotonic()
        yield now - last, output
        last = now
    os.close(reader)
    if process.wait() > 1:
        raise SystemExit(f"{command} ended with {process.returncode}")


def look_at(terminal: pyte.Screen) -> Screen:
    """What the terminal shows."""
    lines = []
    for row in range(LINES):
        cells = [(column, terminal.buffer[row][column]) for column in range(COLUMNS)]
        runs = groupby(cells, lambda cell: (cell[1].fg, cell[1].bold))
        pieces = ((style, list(run)) for style, run in runs)
        lines.append(
            tuple(
                (run[0][0], "".join(cell.data for _, cell in run), style)
                for style, run in pieces
                if any(cell.data.strip() for _, cell in run)
            )
        )
    return tuple(lines)


def shortened(frames: Sequence[Frame]) -> list[Frame]:
    """Screens that differ, shown neither too briefly nor too long."""
    kept: list[Frame] = []
    waited = 0.0
    for number, frame in enumerate(frames):
        waited += min(frame.seconds, READING if frame.seconds == READING else LONGEST_WAIT)
        following = frames[number + 1].screen if number + 1 < len(frames) else None
        if frame.screen == following or (waited < SHORTEST and following is not None):
            continue
        kept.append(Frame(frame.screen, waited if following is not None else END))
        waited = 0.0
    return kept


# ---------------------------------------------------------------- drawing


def draw(frames: Sequence[Frame]) -> str:
    """The recording as an SVG; a line that occurs on many screens is drawn once."""
    names: dict[Line, str] = {}
    for frame in frames:
        for line in frame.screen:
            if line:
                names.setdefault(line, f"l{len(names)}")
    width, height = COLUMNS * CELL + 2 * MARGIN, LINES * LINE + 2 * MARGIN
    strip = "".join(
        f'<use href="#{names[line]}" y="{number * height + MARGIN + LINE * (row + 0.75):g}"/>'
        for number, frame in enumerate(frames)
        for row, line in enumerate(frame.screen)
        if line
    )
    lines = "".join(f'<g id="{name}">{draw_line(line)}</g>' for line, name in names.items())
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" role="img">'
        f"<title>A terminal: {escape('; '.join(COMMANDS))}</title>"
        f"<style>{style_sheet(frames, height)}</style><defs>{lines}</defs>"
        f'<rect width="100%" height="100%" rx="8" fill="{BACKGROUND}"/>'
        f'<g id="strip">{strip}</g></svg>\n'
    )


def draw_line(line: Line) -> str:
    """The runs of a line, each where it begins and as wide as its cells."""
    return "".join(
        f'<text x="{MARGIN + column * CELL:g}" textLength="{len(text.rstrip()) * CELL:g}" '
        f'fill="{COLOURS.get(colour, TEXT)}"{BOLD * bold}>'
        f"{escape(text.rstrip())}</text>"
        for column, text, (colour, bold) in line
    )


def style_sheet(frames: Sequence[Frame], height: float) -> str:
    """When the strip moves to which screen."""
    total = OPENING + sum(frame.seconds for frame in frames)
    finished = f"transform:translateY(-{(len(frames) - 1) * height:g}px)"
    moments, passed = [f"0%{{{finished}}}"], OPENING
    for number, frame in enumerate(frames):
        place = f"transform:translateY(-{number * height:g}px)"
        moments.append(f"{100 * passed / total:.3f}%{{{place}}}")
        passed += frame.seconds
    return (
        "text{font:14px ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace;"
        f"white-space:pre}}#strip{{{finished}}}@media(prefers-reduced-motion:no-preference){{#strip"
        f"{{animation:play {total:.2f}s step-end infinite}}}}@keyframes play{{{''.join(moments)}}}"
    )


if __name__ == "__main__":
    main()
