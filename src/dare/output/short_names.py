"""Names in tables: short enough for a column, and still different from each other."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from os.path import commonprefix

from rich.cells import cell_len, chop_cells

from dare.errors import printable

ELLIPSIS = "…"


def shorten(names: Iterable[str], width: int) -> dict[str, str]:
    """How names are shown in a column: whole where they fit, and never two in the same way.

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
    """A text without its end, if it is too long.

    >>> cut_end("a long name", 7), cut_end("short", 7)
    ('a long…', 'short')
    """
    return text if cell_len(text) <= width else _beginning(text, width - 1) + ELLIPSIS


def cut_middle(text: str, width: int) -> str:
    """A text without its middle, if it is too long.

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
