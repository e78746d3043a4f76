"""Numbers and names as people read them, the same in pages and in the terminal."""

from __future__ import annotations

import math

NOTHING = "–"
_UNITS = ("", "k", "M", "B", "T")


def share(value: float | None) -> str:
    """A share or a ratio in per cent, with three digits that count.

    >>> share(0.1234), share(0.00004567), share(0), share(1.5), share(float("inf")), share(None)
    ('12.3%', '0.00457%', '0%', '150%', '∞', '–')
    >>> share(0.9), share(0.999951)
    ('90.0%', '100%')
    """
    if value is None or math.isnan(value):
        return NOTHING
    if math.isinf(value):
        return _infinite(value)
    return f"{_plain(100 * value, trailing=True)}%"


def number(value: float | None) -> str:
    """A number with three digits that count.

    >>> number(0.0012345), number(12345.6), number(1.2e-9), number(float("nan"))
    ('0.00123', '12,300', '1.2e-9', '–')
    """
    if value is None or math.isnan(value):
        return NOTHING
    return _infinite(value) if math.isinf(value) else _plain(value)


def amount(value: int) -> str:
    """A large count in a few characters.

    >>> amount(987), amount(134_515_008), amount(70_553_706_496)
    ('987', '135M', '70.6B')
    """
    size = float(value)
    for unit in _UNITS:
        if size < 999.5 or unit == _UNITS[-1]:
            return f"{value}" if not unit else f"{size:.3g}{unit}"
        size /= 1000
    raise AssertionError


def listed(names: tuple[str, ...]) -> str:
    """Names in a sentence.

    >>> listed(("math", "code", "chat")), listed(("math",))
    ('math, code and chat', 'math')
    """
    *some, last = names
    return f"{', '.join(some)} and {last}" if some else last


def setting(value: float | str) -> str:
    """The value of a recipe's setting.

    >>> setting(0.9), setting("dare+ties")
    ('0.9', 'dare+ties')
    """
    return value if isinstance(value, str) else f"{value:g}"


def _plain(value: float, *, trailing: bool = False) -> str:
    """Three digits that count, without an exponent where it can be helped."""
    if value == 0:
        return "0"
    rounded = float(f"{value:.3g}")
    digits = 2 - math.floor(math.log10(abs(rounded)))
    if abs(rounded) < 1e-5:
        mantissa, exponent = f"{value:.2e}".split("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    text = f"{rounded:,.{max(digits, 0)}f}"
    return text if trailing or "." not in text else text.rstrip("0").rstrip(".")


def _infinite(value: float) -> str:
    return "∞" if value > 0 else "-∞"
