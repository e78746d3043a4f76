"""Sizes in bytes, as people write them."""

from __future__ import annotations

import re
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
