"""Numbers and names for people to read, the same in pages and in the terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

NOTHING = "–"


def share(value: float | None) -> str:
    """Return a share or a ratio as a percentage, with three significant digits.

    >>> share(0.1234), share(0.00004567), share(0), share(1.5), share(float("inf")), share(None)
    ('12.3%', '0.00457%', '0%', '150%', '∞', '–')
    >>> share(0.9), share(0.999951)
    ('90.0%', '100%')
    """
    if value is None or not math.isfinite(value):
        return number(value)
    return f"{_plain(100 * value, trailing=True)}%"


def number(value: float | None) -> str:
    """Return a number with three significant digits.

    >>> number(0.0012345), number(12345.6), number(1.2e-9), number(float("nan"))
    ('0.00123', '12,300', '1.2e-9', '–')
    """
    if value is None or math.isnan(value):
        return NOTHING
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    return _plain(value)


def amount(value: int) -> str:
    """Return a large count in a few characters.

    >>> amount(987), amount(134_515_008), amount(70_553_706_496)
    ('987', '135M', '70.6B')
    """
    size, power = float(value), 0
    while size >= 999.5 and power < 4:
        size, power = size / 1000, power + 1
    return f"{size:.3g}{' kMBT'[power]}" if power else str(value)


def listed(names: Sequence[str]) -> str:
    """Return names as a list for a sentence.

    >>> listed(("math", "code", "chat")), listed(("math",))
    ('math, code and chat', 'math')
    """
    *some, last = names
    return f"{', '.join(some)} and {last}" if some else last


def exact_text(value: object) -> str:
    """Return a value as in a recipe, with all digits.

    >>> exact_text(True), exact_text(0.999999), exact_text(None)
    ('true', '0.999999', 'none')
    """
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def value_text(value: Any) -> str:
    """Return any value of a setting or a cell in short form.

    >>> value_text(0.61234567), value_text("dare+ties"), value_text([0.0, 1.0]), value_text(True)
    ('0.6123', 'dare+ties', '[0, 1]', 'true')
    """
    if value is None:
        return NOTHING
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(value_text, value))}]"
    return f"{value:.4g}" if isinstance(value, float) else exact_text(value)


def weight_text(weight: float | Sequence[float]) -> str:
    """Return a model's weight, or those from its first layer to its last.

    >>> weight_text(1 / 3), weight_text([0.5, 0.9])
    ('0.3333', '0.5 … 0.9')
    """
    weights = weight if isinstance(weight, Sequence) else [weight]
    return " … ".join(f"{each:.4g}" for each in weights)


def rate_text(rate: float | None) -> str:
    """Return a drop rate with enough digits to compare it with the requested one.

    >>> rate_text(0.9), rate_text(None)
    ('90.000%', '–')
    """
    return NOTHING if rate is None else f"{rate:.3%}"


def pace_text(bytes_read: int, seconds: float, resumed_chunks: int) -> str:
    """Return the bytes read, the speed, and the chunks reused from an earlier run.

    >>> pace_text(2_000_000, 2.0, 1)
    '2.0 MB read, 1.0 MB/s, 1 chunk reused from the interrupted run'
    """
    speed = show_size(int(bytes_read / max(seconds, 1e-9)))
    taken = f", {counted(resumed_chunks, 'chunk')} reused from the interrupted run"
    return f"{show_size(bytes_read)} read, {speed}/s{taken if resumed_chunks else ''}"


def time_text(seconds: float) -> str:
    """Return a duration in words.

    >>> [time_text(seconds) for seconds in (0.4, 59, 90, 3599, 5000, 90_000)]
    ['1 s', '59 s', '2 min', '60 min', '1 h 24 min', '25 h']
    """
    if not math.isfinite(seconds):
        return NOTHING
    if seconds < 60:
        return f"{max(1, math.ceil(seconds))} s"
    minutes = math.ceil(seconds / 60)
    if minutes <= 60:
        return f"{minutes} min"
    return f"{minutes // 60} h" + ("" if minutes >= 24 * 60 else f" {minutes % 60} min")


def show_size(nbytes: int) -> str:
    """Return a size with a suitable unit.

    >>> show_size(1_900_000_000), show_size(2048), show_size(7)
    ('1.90 GB', '2.0 kB', '7 bytes')
    """
    text = "1 byte" if nbytes == 1 else f"{nbytes} bytes"
    units = ("kB", 1e3, 1), ("MB", 1e6, 1), ("GB", 1e9, 2), ("TB", 1e12, 2)
    for unit, bytes_each, digits in units:
        if float(text.split(maxsplit=1)[0]) < 1000:  # as it is rounded
            break
        text = f"{nbytes / bytes_each:.{digits}f} {unit}"
    return text


def counted(count: int, one: str, many: str = "") -> str:
    """Return a count with its noun.

    >>> counted(1, "model"), counted(2, "model"), counted(0, "matrix", "matrices")
    ('1 model', '2 models', '0 matrices')
    """
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def named(names: Sequence[str]) -> str:
    """Return a count of models, with the names of the first five.

    >>> named(["math"]), named(list("abcdef"))
    ('1 model (math)', '6 models (a, b, c, d, e, …)')
    """
    more = ", …" if len(names) > 5 else ""
    return f"{counted(len(names), 'model')} ({', '.join(names[:5])}{more})"


def _plain(value: float, *, trailing: bool = False) -> str:
    """Return three significant digits, without an exponent where possible."""
    if value == 0:
        return "0"
    rounded = float(f"{value:.3g}")
    digits = 2 - math.floor(math.log10(abs(rounded)))
    if abs(rounded) < 1e-5:
        mantissa, exponent = f"{value:.2e}".split("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    text = f"{rounded:,.{max(digits, 0)}f}"
    return text if trailing or "." not in text else text.rstrip("0").rstrip(".")
