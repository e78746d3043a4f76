"""Documents in a terminal: a title, facts, tables, notices and the commands that come next.

Names come from files that somebody else has made: `Names` keeps them on their line, and a `Console`
prints nothing that a terminal would act on.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from os.path import commonprefix

from rich.cells import cell_len, chop_cells

from dare.documents.console import PIPE_WIDTH, Console, Piece, wrap
from dare.documents.document import BARS, TONES, Code, Document, Facts, Listing, Part, Table, Tone
from dare.documents.notices import Notice, Severity, catalogue
from dare.documents.words import counted, listed
from dare.errors import printable

EIGHTHS = " ▏▎▍▌▋▊▉"
ELLIPSIS = "…"
TEXT_WIDTH = 100
LEAST_NAME = 12  # columns that names have at least
MOST_NAME = 25  # columns that names have before optional columns get any
LEAST_FACT = 20  # columns that the text of a fact has at least
BETWEEN = 3  # columns from one column of a table to the next
BAR_CELLS = 24
STEP = 10  # columns before a command
MOST_NOTES = 3  # kinds of mere notes that are shown; the others are counted
MOST_ALIKE = 3  # notices of one kind that are shown in full
# A word of a command, as `shlex.quote` writes it.
WORD = re.compile(r"""(?:> )?(?:'[^']*'|"[^"]*"|\S)+""")
STYLES = {Tone.GOOD: "green", Tone.FAIR: "yellow", Tone.POOR: "red", Tone.PLAIN: ""}


def print_document(console: Console, document: Document) -> None:
    """Print what decides: title, facts, brief sections, notices and the next steps."""
    names = Names(document.models, console.width)
    style = f"bold {STYLES[document.tone]}".strip()
    console.print((names(document.title), style), f"  {names(document.lead)}")
    _print_facts(console, document.facts, names)
    for section in document.sections:
        for part in section.parts if section.is_brief else ():
            _print_part(console, part, names)
    print_notices(console, document.notices, names)
    if document.steps or document.done:
        print_steps(console, document.done or "Next", document.steps)


def render_text(document: Document) -> str:
    """Return a document as plain text."""
    file = io.StringIO()
    print_document(Console(file, width=TEXT_WIDTH), document)
    return "\n".join(line.rstrip() for line in file.getvalue().rstrip().splitlines())


class Names:
    """Long names of models in the form that fits a terminal, also inside sentences."""

    def __init__(self, names: Iterable[str] = (), width: int = PIPE_WIDTH) -> None:
        short = shorten(names, max(LEAST_NAME, width // 4))
        self._cut = {name: text for name, text in short.items() if name != text}

    def __call__(self, text: str) -> str:
        """Return a text with short names, that a terminal does not act on."""
        for name in sorted(self._cut, key=len, reverse=True):
            text = text.replace(name, self._cut[name])
        return printable(text)


def _print_part(console: Console, part: Part, names: Names) -> None:
    match part:
        case str():
            console.print(names(part))
        case Table() if part.rows:
            _print_table(console, part, names)
        case Facts():
            _print_facts(console, part.items, names)
        case Code():
            console.print((names(part.title), "bold"))
            for line in part.text.splitlines():
                console.print((printable(line), "dim"), indent=2)
        case Listing():
            console.print((names(part.title), "bold"))
            for item in part.items:
                console.print(names(item), indent=2)
        case Notice():
            print_notices(console, [part], names)


def _print_facts(console: Console, facts: Sequence[tuple[str, str]], names: Names) -> None:
    longest = max((cell_len(label) for label, _ in facts), default=0)
    for label, text in facts:
        room = max(console.width - longest - 4, LEAST_FACT)
        value = names(text)
        # A path or a digest stays whole, so that it can be copied.
        lines = wrap(value, room) if " " in text else [value]
        for number, line in enumerate(lines):
            head = f"  {'' if number else label:{longest}}  "
            console.print((head, "dim"), line.rstrip(), wraps=False)


# ---------------------------------------------------------------- tables


@dataclass
class Column:
    """A column of a table: its header and cells with their styles, and how wide it is."""

    cells: list[tuple[str, str]]
    width: int
    is_number: bool = False
    is_cut: bool = False  # what is too long loses its end, and takes no second line

    def split(self, text: str) -> list[str]:
        """Return a cell in lines that fit."""
        if self.is_cut:
            return [cut_end(text, self.width)]
        return [part.rstrip() for part in wrap(text, self.width)]

    def align(self, text: str) -> str:
        """Return a line of a cell with spaces that make it as wide as the column."""
        fill = " " * (self.width - cell_len(text))
        return fill + text if self.is_number else text + fill


def _print_table(console: Console, table: Table, names: Names) -> None:
    columns, gap = lay_out(table, console, names)
    hidden = len(table.columns) + bool(table.bars) - len(columns)
    more = f" ({counted(hidden, 'more column')})" if hidden else ""
    if table.title:
        console.print((names(table.title) + more, "bold"))
    console.print()
    for number, cells in enumerate(zip(*(column.cells for column in columns), strict=True)):
        texts = [column.split(text) for column, (text, _) in zip(columns, cells, strict=True)]
        if not number:  # the header stands above the line
            highest = max(map(len, texts))
            texts = [[""] * (highest - len(lines)) + lines for lines in texts]
        for lines in zip_longest(*texts, fillvalue=""):
            pieces: list[Piece] = []
            for column, line, (_, style) in zip(columns, lines, cells, strict=True):
                pieces += [gap if pieces else " ", (column.align(line), style)]
            console.print(*pieces, wraps=False)
        if not number:
            whole = sum(column.width for column in columns) + len(gap) * (len(columns) - 1)
            console.print(f" {'─' * whole}", wraps=False)
    console.print()


def lay_out(table: Table, console: Console, names: Names) -> tuple[list[Column], str]:
    """Return the columns that fit the console, and what stands between two of them.

    If there is no room, optional columns are left out and texts take several lines.
    """
    cells = [[names(cell) for cell in row] for row in table.rows[: table.most]]
    headers = [name.removesuffix(" >") for name in table.columns]
    are_numbers = [name.endswith(" >") for name in table.columns]
    places, bars = list(range(len(headers))), table.bars
    columns = list(zip(*cells, strict=True))
    natural = [max(cell_len(h), *map(cell_len, c)) for h, c in zip(headers, columns, strict=True)]
    whole = natural[:1] + [min(width, console.width // 2) for width in natural[1:]]
    narrow = list(whole)
    for place in (place for place in places if are_numbers[place]):  # headers may be folded
        narrow[place] = max(map(cell_len, (*headers[place].split(), *columns[place])))

    def surplus(widths: Sequence[int], longest: int) -> int:
        room = BAR_CELLS + BETWEEN if bars else 0
        used = sum(widths[place] + BETWEEN for place in places[1:]) + room + BETWEEN
        return used + min(widths[0], longest) - console.width

    is_tight = surplus(whole, whole[0]) > 0
    for name in reversed(table.optional):
        if surplus(narrow, MOST_NAME) <= 0:
            break
        if name == BARS:
            bars = ()
        elif name in table.columns:
            places.remove(table.columns.index(name))
    widths = narrow if surplus(whole, whole[0]) > 0 else whole
    is_crowded = surplus(widths, widths[0]) > 0
    last, over = places[-1], surplus(widths, widths[0]) - len(places)
    if over > 0 and not are_numbers[last] and widths[last] - over >= LEAST_NAME:
        widths[last] -= over
        for row in (row for row in cells if " " not in row[last]):
            row[last] = cut_middle(row[last], widths[last])  # rather than broken in two
    narrower = len(places) if is_crowded else 0  # the columns then stand nearer to each other
    first = max(LEAST_NAME, widths[0] - max(0, surplus(widths, widths[0]) - narrower))
    solid = console.can_write(EIGHTHS)
    found = []
    for place in places:
        styled = [(headers[place], "dim")]
        for given, shown in zip(table.rows, cells, strict=False):  # some are not shown
            styled.append((shown[place], STYLES[table.tones.get(given[place], Tone.PLAIN)]))
        width = max(cell_len(text) for text, _ in styled)
        if place == 0:
            width = min(width, first)
        elif is_tight:
            width = widths[place] if are_numbers[place] else min(width, widths[place])
        found.append(Column(styled, width, are_numbers[place], is_cut=not place))
    gap = " " * (BETWEEN - is_crowded)
    if bars:
        drawn = [draw_bar(bars[n] / 100, BAR_CELLS, solid=solid) for n in range(len(cells))]
        header = next(h for h, is_number in zip(headers, are_numbers, strict=True) if is_number)
        found.append(
            Column([(header, "dim"), *((bar, "blue") for bar in drawn)], BAR_CELLS, is_cut=True)
        )
    _fit(found, console.width - 2 - len(gap) * (len(found) - 1))
    return found, gap


def _fit(columns: Sequence[Column], room: int) -> None:
    """Make the widest columns of texts narrower, until there is room for all."""
    texts = [column for column in columns if not column.is_number and not column.is_cut]
    while texts and sum(column.width for column in columns) > room:
        widest = max(reversed(texts), key=lambda column: column.width)
        if widest.width <= 1:
            return
        widest.width -= 1


# ---------------------------------------------------------------- notices and steps


def print_notices(console: Console, notices: Iterable[Notice], names: Names) -> None:
    """Print notices with their remedies, the gravest first; of many notes only the kinds."""
    kinds: dict[tuple[Severity, str], list[Notice]] = {}
    for notice in notices:
        kinds.setdefault((notice.severity, notice.code), []).append(notice)
    by_gravity = sorted(kinds.items(), key=lambda kind: -list(Severity).index(kind[0][0]))
    shown_kinds = sum(severity is not Severity.NOTE for severity, _ in kinds) + MOST_NOTES
    for (severity, code), alike in by_gravity[:shown_kinds]:
        style = f"bold {STYLES[TONES[severity]]}".strip()
        head = (severity.capitalize(), style)
        console.print(head, f"  {catalogue()[code].title}")
        for line in _lines_of_kind(alike):
            console.print(names(line), indent=4)
    if hidden := [catalogue()[code].title for (_, code), _ in by_gravity[shown_kinds:]]:
        console.print(printable(f"Also noted: {listed(hidden)}"))


def _lines_of_kind(alike: Sequence[Notice]) -> list[str]:
    """Return the lines of notices of one kind, with a remedy that they share once, at the end."""
    by_remedy: dict[str, list[Notice]] = {}
    for notice in alike:
        by_remedy.setdefault(notice.remedy, []).append(notice)
    lines = []
    for remedy, same in by_remedy.items():
        for notice in same[:MOST_ALIKE]:
            whose = f"{listed(notice.subjects)}: " if notice.subjects else ""
            lines.append(f"{whose}{notice.text}.")
        if more := [subject for notice in same[MOST_ALIKE:] for subject in notice.subjects]:
            lines.append(f"and {len(same) - MOST_ALIKE} more: {', '.join(more)}")
        lines += [f"{remedy}."] if remedy else []
    return lines


def print_steps(console: Console, done: str, steps: Mapping[str, str]) -> None:
    """Print where the result is, and the commands that come next."""
    console.print((printable(done), "bold"), wraps=False)
    for word, command in steps.items():
        for place, line in enumerate(fold_command(command, console.width - STEP)):
            label = "" if place else word
            console.print((f"  {label:8}", "dim"), line, wraps=False)


def fold_command(command: str, width: int) -> list[str]:
    r"""Return a command in lines that a shell takes as one when they are copied together.

    >>> fold_command("dare analyze base.safetensors 'my model' code --json", 32)
    ['dare analyze base.safetensors \\', "  'my model' code --json"]
    """
    lines = [""]
    for word in WORD.findall(printable(command)):
        longer = f"{lines[-1]} {word}" if lines[-1] else word
        if lines[-1].strip() and cell_len(longer) > width - 2:
            lines.append(f"  {word}")
        else:
            lines[-1] = longer
    return [f"{line} \\" for line in lines[:-1]] + lines[-1:]


# ---------------------------------------------------------------- pieces


def draw_bar(part: float, cells: int, *, solid: bool) -> str:
    """Return a bar of a limited number of cells, in eighths of a cell if these can be written.

    >>> draw_bar(0.5, 5, solid=True), draw_bar(0.5, 5, solid=False), draw_bar(0.0001, 5, solid=True)
    ('██▌  ', '##   ', '▏    ')
    """
    part = min(max(part, 0.0), 1.0)
    if not solid:
        return f"{'#' * round(part * cells):{cells}}"
    eighths = max(round(part * cells * 8), 1 if part else 0)
    whole, rest = divmod(eighths, 8)
    return f"{'█' * whole + (EIGHTHS[rest] if rest else ''):{cells}}"


# ---------------------------------------------------------------- names that fit a column


def shorten(names: Iterable[str], width: int) -> dict[str, str]:
    """Return the forms of names for a column: whole where they fit, never two alike.

    Long ones lose their middle. If two would look alike then, all lose what they have in common.

    >>> list(shorten(["math", "llama-8b-instruct-math", "llama-8b-instruct-code"], 12).values())
    ['math', 'llama-…-math', 'llama-…-code']
    >>> list(shorten(["tuned-math-final", "tuned-code-final"], 9).values())
    ['…math-fi…', '…code-fi…']
    """
    every = list(dict.fromkeys(names))
    printed = {name: printable(name) for name in every}
    long = [text for text in printed.values() if cell_len(text) > width]
    alike = commonprefix(long)  # noqa: RUF071 (of letters, as meant)
    ways: list[Callable[[str], str]] = [
        lambda text: cut_middle(text, width),
        lambda text: cut_end(ELLIPSIS + text.removeprefix(alike), width),
    ]
    for cut in ways:
        shown = [cut(text) if cell_len(text) > width else text for text in printed.values()]
        if len(set(shown)) == len(every):
            return dict(zip(every, shown, strict=True))
    return {
        name: f"{cut_end(text, width - len(str(number)) - 1)}#{number}"
        for number, (name, text) in enumerate(printed.items(), start=1)
    }


def cut_end(text: str, width: int) -> str:
    """Return a text without its end, if it is too long.

    >>> cut_end("a long name", 7), cut_end("short", 7)
    ('a long…', 'short')
    """
    return text if cell_len(text) <= width else _beginning(text, width - 1) + ELLIPSIS


def cut_middle(text: str, width: int) -> str:
    """Return a text without its middle, if it is too long.

    >>> cut_middle("models/base.safetensors", 12)
    'models…nsors'
    """
    if cell_len(text) <= width:
        return text
    first = width // 2
    last = _beginning(text[::-1], width - 1 - first)[::-1]
    return f"{_beginning(text, first)}{ELLIPSIS}{last}"


def _beginning(text: str, width: int) -> str:
    return chop_cells(text, width)[0] if width > 0 and text else ""
