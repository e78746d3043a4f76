"""Sizes in bytes and counts, as people write and read them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction


def parse_size(value: object) -> object:
    """Read a size in bytes: a whole number, or text such as `"512MiB"`, `"5GB"`, `"2G"`.

    >>> parse_size("2GiB") == 2 * 2**30, parse_size("5MB")
    (True, 5000000)
    """
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(iB|B)?\s*", value, re.IGNORECASE)
    if match is None:
        raise ValueError("not a size; write 1073741824, '1GiB' or '5GB'")
    number, unit, suffix = match.groups()
    power = "KMGT".index(unit.upper()) + 1 if unit else 0
    thousand = 1000 if suffix and suffix.upper() == "B" else 1024
    return int(Fraction(number) * thousand**power)


def show_size(nbytes: int) -> str:
    """Write a size for people.

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


def times(count: int, one: str, many: str = "") -> str:
    """A count with its noun.

    >>> times(1, "model"), times(2, "model"), times(0, "matrix", "matrices")
    ('1 model', '2 models', '0 matrices')
    """
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def named(names: Sequence[str], most: int = 5) -> str:
    """So many models, with the names of the first.

    >>> named(["math"]), named(["a", "b", "c"], most=2)
    ('1 model (math)', '3 models (a, b, …)')
    """
    more = ", …" if len(names) > most else ""
    return f"{times(len(names), 'model')} ({', '.join(names[:most])}{more})"
