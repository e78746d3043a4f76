"""The numbers that judgements rest on, from the table in `rules.toml`."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

RULES_FILE: dict[str, Any] = tomllib.loads(
    files("dare.analysis.judge").joinpath("rules.toml").read_text("utf-8")
)


@dataclass(frozen=True)
class Limit:
    """A number that something measured is held against, what it is, and where it comes from."""

    name: str
    value: float
    meaning: str
    source: str


TABLE = tuple(Limit(name, *entry) for name, entry in RULES_FILE["limits"].items())
"""All limits; a page of the documentation shows them."""
VALUES = {limit.name: limit.value for limit in TABLE}


def limit(name: str) -> float:
    """The value of a limit.

    >>> limit("foreign_delta")
    0.03
    """
    return VALUES[name]
