r"""Patterns for modules, as PEFT matches them, in time that no pattern can make long.

PEFT asks for `re.match(rf"(.*\.)?({pattern})$", module)`. Python's `re` goes back and forth, so a
hostile pattern (`([\w.]+)+!`) takes longer than anyone waits. Only yes or no is asked for here. So
a pattern is walked once with the set of all places in the name that it may have reached.
"""

from __future__ import annotations

import re
import warnings
from typing import NamedTuple

LONGEST = 1000
"""Characters of a pattern; the names of modules are shorter."""
MOST_REPEATS = 100
"""The largest count in {…}: no name has so many parts."""
MOST_NESTED = 4

_PLAIN = re.compile(r"[^*+?{}()|]*")
"""Patterns in which nothing can match in two ways; `re` is fast at these."""
_OPENING = re.compile(r"\((\?[:=!])?(?!\?)")
_CHARACTER = re.compile(
    r"\\[dDwWsS]|\\[^0-9A-Za-z]|\[\^?\]?(?:[^\]\\]|\\.)*\]|[^\\()|*+?{}\[\]]", re.DOTALL
)
_COUNT = re.compile(r"(?:([*+?])|\{(\d+)(,?)(\d*)\})\??(?![*+?{])")
_COUNTS = {"*": (0, None), "+": (1, None), "?": (0, 1), None: (1, 1)}
_ANY = re.compile("")


class _Part(NamedTuple):
    """A piece of a pattern, and how often it stands there."""

    kind: str
    """^, $, a group: ( or ?:, a look ahead: ?= or ?!, or a character."""
    character: re.Pattern[str]
    ways: tuple[tuple[_Part, ...], ...]
    """The alternatives of a group, each a sequence of parts."""
    least: int
    most: int | None


Ways = tuple[tuple[_Part, ...], ...]


class ModulePattern:
    r"""One key of `alpha_pattern`; raises ValueError with the reason if it is not usable.

    >>> ModulePattern("q_proj").matches("layers.0.q_proj"), ModulePattern("proj").matches("q_proj")
    (True, False)
    >>> ModulePattern(r"layers\.(0|1)\..*").matches("model.layers.1.q_proj")
    True
    >>> ModulePattern(r"([\w.]+)+!").matches("model." * 50)
    False
    """

    def __init__(self, pattern: str) -> None:
        if len(pattern) > LONGEST:
            raise ValueError(f"longer than {LONGEST} characters")
        is_plain = _PLAIN.fullmatch(pattern) is not None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of sets in sets, which there are not
            try:
                re.compile(pattern)
            except (re.error, RecursionError, OverflowError) as error:
                raise ValueError(f"not a regular expression: {error}") from None
            self._simple = re.compile(rf"(.*\.)?({pattern})$") if is_plain else None
            self._ways = () if is_plain else _parse(pattern, 0, MOST_NESTED)[0]

    def matches(self, module: str) -> bool:
        """Say whether a module's name, or what follows one of its dots, is of the pattern."""
        if self._simple is not None:
            return self._simple.match(module) is not None
        starts = {0, *(place + 1 for place, char in enumerate(module) if char == ".")}
        return len(module) in _Walk(module).ends(self._ways, starts)


def _parse(pattern: str, place: int, nested: int) -> tuple[Ways, int]:
    """Alternatives up to the end or an unmatched bracket, and where that is."""
    ways: list[list[_Part]] = [[]]
    while place < len(pattern) and pattern[place] != ")":
        if pattern[place] == "|":
            ways.append([])
            place += 1
            continue
        inner: Ways = ()
        kind, character = pattern[place], _ANY
        if opening := _OPENING.match(pattern, place):
            if not nested:
                raise ValueError(f"groups are nested more than {MOST_NESTED} deep")
            kind = opening[1] or "("
            inner, end = _parse(pattern, opening.end(), nested - 1)
            end += 1
        elif one := _CHARACTER.match(pattern, place):
            character, end = re.compile(one[0]), one.end()
        else:
            raise ValueError(f"{pattern[place : place + 3]!r} is not supported; name the modules")
        count = _COUNT.match(pattern, end)
        least, most = _counts(count)
        ways[-1].append(_Part(kind, character, inner, least, most))
        place = count.end() if count else end
    return tuple(map(tuple, ways)), place


def _counts(count: re.Match[str] | None) -> tuple[int, int | None]:
    if count is None or count[1]:
        return _COUNTS[count and count[1]]
    least = int(count[2])
    most = (int(count[4]) if count[4] else None) if count[3] else least
    if max(least, most or 0) > MOST_REPEATS:
        raise ValueError(f"{count[0]} repeats more than {MOST_REPEATS} times")
    return least, most


class _Walk:
    """Where in a text the parts of a pattern may end, for every place where they may start.

    A group is walked once from each place, whatever it stands in.
    """

    def __init__(self, text: str) -> None:
        self._text = text
        self._known: dict[tuple[int, int], set[int]] = {}

    def ends(self, ways: Ways, starts: set[int]) -> set[int]:
        """Where any of the alternatives may end."""
        reached: set[int] = set()
        for parts in ways:
            places = starts
            for part in parts:
                places = self._repeated(part, places)
            reached |= places
        return reached

    def _repeated(self, part: _Part, starts: set[int]) -> set[int]:
        places = starts
        for _ in range(part.least):
            before, places = places, self._once(part, places)
            if places == before:
                break
        reached, fresh, times = set(places), places, part.least
        while fresh and (part.most is None or times < part.most):
            fresh = self._once(part, fresh) - reached
            reached |= fresh
            times += 1
        return reached

    def _once(self, part: _Part, starts: set[int]) -> set[int]:
        match part.kind:
            case "^":
                return starts & {0}
            case "$":
                return starts & {len(self._text)}
            case "?=" | "?!":
                wanted = part.kind == "?="
                return {place for place in starts if bool(self._group(part, place)) is wanted}
            case "(" | "?:":
                return set().union(*(self._group(part, place) for place in starts))
        matches = part.character.match
        return {place + 1 for place in starts if matches(self._text[place : place + 1])}

    def _group(self, part: _Part, place: int) -> set[int]:
        key = id(part), place
        if key not in self._known:
            self._known[key] = self.ends(part.ways, {place})
        return self._known[key]
