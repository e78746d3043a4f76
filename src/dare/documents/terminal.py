"""Documents in a terminal: a title, facts, tables, notices and the commands that come next.

Names come from files that somebody else has made. What is printed by a `SafeConsole` holds nothing
that a terminal would act on, but for its own styles; `shown` also keeps a name on its line.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from os.path import commonprefix

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len, chop_cells
from rich.console import Console, ConsoleOptions, RenderableType
from rich.padding import Padding
from rich.segment import Segment
from rich.table import Table as Grid
from rich.text import Text

from dare.documents.document import BARS, TONES, Code, Document, Facts, Listing, Part, Table, Tone
from dare.documents.notices import Notice, Severity, catalogue
from dare.documents.words import listed, times
from dare.errors import printable

EIGHTHS = " ▏▎▍▌▋▊▉"
ELLIPSIS = "…"
PIPE_WIDTH = 160  # columns where the output is not a terminal and has no width
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


class SafeConsole(Console):
    """A console whose texts are printable, and that falls silent when nobody reads on."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Yield every piece that is printed, line ends apart."""
        for segment in super().render(renderable, options):
            if segment.control:
                yield segment
            else:
                yield Segment(printable(segment.text, keep="\n"), segment.style)

    def on_broken_pipe(self) -> None:
        """Let the work itself be finished."""
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), self.file.fileno())


def make_console(*, json: bool = False, quiet: bool = False) -> Console:
    """Return the console for people: on stdout, or on stderr if JSON goes there."""
    console = SafeConsole(stderr=json, quiet=quiet, highlight=False, emoji=False, markup=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = PIPE_WIDTH
    return console


def print_document(console: Console, document: Document) -> None:
    """Print what decides: title, facts, brief sections, notices and the next steps."""
    names = Names(document.models, console.width)
    style = f"bold {STYLES[document.tone]}".strip()
    console.print(Text.assemble((names(document.title), style), f"  {names(document.lead)}"))
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
    print_document(SafeConsole(file=file, width=TEXT_WIDTH, color_system=None), document)
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
            console.print(shown(names(part)))
        case Table() if part.rows:
            grid = render_table(part, console, names)
            hidden = len(part.columns) + bool(part.bars) - len(grid.columns)
            more = f" ({times(hidden, 'more column')})" if hidden else ""
            if part.title:
                console.print(Text(names(part.title) + more, "bold"))
            console.print(grid)
        case Facts():
            _print_facts(console, part.items, names)
        case Code() | Listing():
            console.print(Text(names(part.title), "bold"))
            if isinstance(part, Code):
                lines = [shown(line, "dim") for line in part.text.splitlines()]
            else:
                lines = [shown(names(item)) for item in part.items]
            for line in lines:
                console.print(Padding(line, (0, 0, 0, 2), expand=False))
        case Notice():
            print_notices(console, [part], names)


def _print_facts(console: Console, facts: Sequence[tuple[str, str]], names: Names) -> None:
    longest = max((cell_len(label) for label, _ in facts), default=0)
    for label, text in facts:
        room = max(console.width - longest - 4, LEAST_FACT)
        value = Text(names(text))
        # A path or a digest stays whole, so that it can be copied.
        lines = list(value.wrap(console, room)) if " " in text else [value]
        for number, line in enumerate(lines or [Text()]):
            line.rstrip()
            head = f"  {'' if number else label:{longest}}  "
            console.print(Text.assemble((head, "dim"), line), soft_wrap=True)


def render_table(table: Table, console: Console, names: Names) -> Grid:
    """Return a table that fits the console: without optional columns, if there is no room."""
    cells = [[names(cell) for cell in row] for row in table.rows[: table.most]]
    headers = [name.removesuffix(" >") for name in table.columns]
    are_numbers = [name.endswith(" >") for name in table.columns]
    places, bars = list(range(len(headers))), table.bars
    columns = list(zip(*cells, strict=True))
    whole = [max(cell_len(h), *map(cell_len, c)) for h, c in zip(headers, columns, strict=True)]
    whole[1:] = [min(width, console.width // 2) for width in whole[1:]]  # longer ones are folded
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
    padding = (0, 1, 0, 0) if is_crowded else (0, 1)
    grid = Grid(box=SIMPLE_HEAD, pad_edge=False, padding=padding, header_style="dim")
    for place in places:
        grid.add_column(
            Text(headers[place]),
            justify="right" if are_numbers[place] else "left",
            overflow="fold" if place else "ellipsis",
            no_wrap=not place,
            min_width=widths[place] if are_numbers[place] else None,
            max_width=first if not place else widths[place] if is_tight else None,
        )
    if bars:
        grid.add_column("", min_width=BAR_CELLS, no_wrap=True)
    solid = can_write(console, EIGHTHS)
    for number, row in enumerate(cells):
        tones = [STYLES[table.tones.get(cell, Tone.PLAIN)] for cell in table.rows[number]]
        drawn = [draw_bar(bars[number] / 100, BAR_CELLS, solid=solid)] if bars else []
        shown_cells = (Text(row[place], tones[place]) for place in places)
        grid.add_row(*shown_cells, *(Text(bar, "blue") for bar in drawn))
    return grid


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
        console.print(Text.assemble(head, f"  {catalogue()[code].title}"))
        for line in _said_once(alike):
            console.print(Padding(shown(names(line)), (0, 0, 0, 4), expand=False))
    if hidden := [catalogue()[code].title for (_, code), _ in by_gravity[shown_kinds:]]:
        console.print(shown(f"Also noted: {listed(hidden)}"))


def _said_once(alike: Sequence[Notice]) -> list[str]:
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
    console.print(shown(done, "bold"), soft_wrap=True)
    for word, command in steps.items():
        for place, line in enumerate(fold_command(command, console.width - STEP)):
            label = "" if place else word
            console.print(Text.assemble((f"  {label:8}", "dim"), line), soft_wrap=True)


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


def shown(text: str, style: str = "") -> Text:
    """Return a text that may hold names from outside, on one line."""
    return Text(printable(text), style)


def draw_bar(part: float, cells: int, *, solid: bool) -> str:
    """Return a bar of at most so many cells, in eighths of a cell where they can be written.

    >>> draw_bar(0.5, 5, solid=True), draw_bar(0.5, 5, solid=False), draw_bar(0.0001, 5, solid=True)
    ('██▌  ', '##   ', '▏    ')
    """
    part = min(max(part, 0.0), 1.0)
    if not solid:
        return f"{'#' * round(part * cells):{cells}}"
    eighths = max(round(part * cells * 8), 1 if part else 0)
    whole, rest = divmod(eighths, 8)
    return f"{'█' * whole + (EIGHTHS[rest] if rest else ''):{cells}}"


def can_write(console: Console, text: str) -> bool:
    """Say whether the terminal's encoding has all the letters."""
    try:
        return bool(text.encode(console.encoding))
    except (LookupError, UnicodeEncodeError):
        return False


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
