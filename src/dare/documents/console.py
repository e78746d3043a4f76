"""Printing for people: pieces of text with styles, in colour on a terminal.

Names come from files that somebody else has made. What a `Console` prints holds nothing that a
terminal would act on, but for its own styles.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable
from typing import TextIO

from rich.cells import cell_len, chop_cells

from dare.errors import printable

PIPE_WIDTH = 160  # columns where the output is not a terminal and has no width
USUAL_WIDTH = 80
CODES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "blue": "34"}
CODES |= {"cyan": "36", "grey": "38;5;246"}
WITHOUT_COLOUR = {"bold", "dim"}
# What stands for the lines of boxes where they cannot be written.
PLAIN_LINES = str.maketrans("─│╭╮╰╯", "-|++++")
TAG = re.compile(rf"\[(/?)({'|'.join(CODES)})\]")

# A text, or a text with the names of its styles: "bold", "bold red".
Piece = str | tuple[str, str]


class Console:
    """Prints on stdout, stderr or into a file, and falls silent when nobody reads on."""

    def __init__(
        self,
        file: TextIO | None = None,
        *,
        stderr: bool = False,
        quiet: bool = False,
        width: int | None = None,
    ) -> None:
        self.stderr = stderr
        self.quiet = quiet
        self._file = file
        self.is_terminal = _is_terminal(self.file)
        has_styles = self.is_terminal and _knows_codes()
        has_colours = not os.environ.get("NO_COLOR")
        self._styles = {name for name in CODES if has_colours or name in WITHOUT_COLOUR}
        self._styles = self._styles if has_styles else set()
        self._lines = {} if self.can_write("─") else PLAIN_LINES
        self.width = width or find_width()

    @property
    def file(self) -> TextIO:
        """The stream as it is now: a bar may have put another in its place."""
        return self._file or (sys.stderr if self.stderr else sys.stdout)

    def print(self, *pieces: Piece, indent: int = 0, wraps: bool = True) -> None:
        """Print the pieces as one text, in lines that fit unless the text is not to be wrapped."""
        whole = [(p, "") if isinstance(p, str) else p for p in pieces]
        texts = [(printable(text, keep="\n"), style) for text, style in whole]
        width = self.width - indent if wraps else None
        for line in split_lines(texts, width):
            styled = (self.style(text, style) for text, style in line)
            self.write(f"{' ' * indent}{''.join(styled)}\n".translate(self._lines))

    def style(self, text: str, style: str) -> str:
        """Return a text with the codes of a style, if the terminal has them."""
        codes = [CODES[name] for name in style.split() if name in self._styles]
        return f"\x1b[{';'.join(codes)}m{text}\x1b[0m" if codes and text else text

    def write(self, text: str) -> None:
        """Write a text unchanged."""
        if self.quiet:
            return
        try:
            self.file.write(text)
            if self.is_terminal:
                self.file.flush()
        except BrokenPipeError:  # the work itself is to be finished
            self.quiet = True
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.file.fileno())

    def can_write(self, text: str) -> bool:
        """Tell if the stream's encoding has all the letters."""
        try:
            return bool(text.encode(getattr(self.file, "encoding", None) or "utf-8"))
        except (LookupError, UnicodeEncodeError):
            return False


def make_console(*, json: bool = False, quiet: bool = False) -> Console:
    """Return the console for people: on stdout, or on stderr if JSON goes there."""
    console = Console(stderr=json, quiet=quiet)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = PIPE_WIDTH
    return console


def _is_terminal(file: TextIO) -> bool:
    if (forced := os.environ.get("FORCE_COLOR")) is not None:
        return forced != ""
    if (said := os.environ.get("TTY_COMPATIBLE")) in ("0", "1"):
        return said == "1"
    try:
        return file.isatty()
    except ValueError:  # it is closed
        return False


def _knows_codes() -> bool:
    """Tell if the terminal acts on codes of styles; the old console of Windows prints them."""
    if sys.platform == "win32" and not {"WT_SESSION", "TERM"} & os.environ.keys():
        return False
    return os.environ.get("TERM") not in ("dumb", "unknown")


def find_width() -> int:
    """Return how many columns there are: as the environment says, or any of our streams."""
    if (said := os.environ.get("COLUMNS", "")).isdigit() and int(said):
        return int(said)
    for stream in range(3):
        try:
            if width := os.get_terminal_size(stream).columns:
                return width
        except OSError:
            pass
    return USUAL_WIDTH


# ---------------------------------------------------------------- lines


def read_tags(text: str) -> list[tuple[str, str]]:
    """Return the pieces of a text with tags, `[bold]` to `[/bold]`, which are not nested.

    >>> read_tags("[bold]Examples[/bold] [x]")
    [('Examples', 'bold'), (' [x]', '')]
    """
    style, pieces = "", []
    texts = TAG.split(text)  # a text, then for each tag: its slash, its name, the text after it
    for slash, name, after in zip(["/", *texts[1::3]], ["", *texts[2::3]], texts[::3], strict=True):
        style = "" if slash else name
        pieces.append((after, style))
    return [piece for piece in pieces if piece[0]]


def split_lines(
    pieces: Iterable[tuple[str, str]], width: int | None
) -> list[list[tuple[str, str]]]:
    """Return styled pieces in lines of so many cells, or of any length if that is None.

    >>> split_lines([("a long", "bold"), (" name", "")], 6)
    [[('a long', 'bold')], [('name', '')]]
    """
    pieces = list(pieces)
    text = "".join(text for text, _ in pieces)
    lines = []
    place = 0
    for whole in text.split("\n"):
        for part in wrap(whole, width) if width else [whole]:
            lines.append(list(_between(pieces, place, place + len(part.rstrip()))))
            place += len(part)
        place += 1
    return lines


def _between(pieces: Iterable[tuple[str, str]], begin: int, end: int) -> Iterable[tuple[str, str]]:
    """Yield what of the pieces stands between two places of their text."""
    place = 0
    for text, style in pieces:
        cut = text[max(begin - place, 0) : max(end - place, 0)]
        if cut:
            yield cut, style
        place += len(text)


def wrap(text: str, width: int) -> list[str]:
    """Return a text cut into lines of at most so many cells, words whole where they fit.

    Nothing is lost: a line keeps the spaces at its end.

    >>> wrap("words that are kept whole", 11)
    ['words that ', 'are kept ', 'whole']
    >>> wrap("a/path/without/spaces", 8)
    ['a/path/w', 'ithout/s', 'paces']
    """
    lines, line, used = [], "", 0
    for word in re.findall(r"\s*\S+\s*", text) or [text]:
        needed = cell_len(word.rstrip())
        if needed <= width - used:
            line, used = line + word, used + cell_len(word)
        elif needed > width:
            *full, rest = chop_cells(word, max(width, 1))
            lines += [line, *full] if line else full
            line, used = rest, cell_len(rest)
        else:
            lines += [line] if line else []
            line, used = word, cell_len(word)
    return [*lines, line]
