"""Notices: whatever the program tells anyone about models, inputs, settings and results.

The texts stand in `notices.toml`, the limits that measurements are held against in `limits.toml`;
the conditions stand in the code that asks. A notice is known by its code, in Python, in JSON and in
`docs/messages.md`, which is made from the table.

    >>> found = notice("equals_base", "math")
    >>> found.code, found.severity, found.subjects
    ('equals_base', <Severity.SEVERE: 'severe'>, ('math',))
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cache
from importlib.resources import files
from typing import Any

from dare.documents.values import Number
from dare.errors import printable


class Severity(StrEnum):
    """The weight of a notice, from the least on."""

    NOTE = "note"
    """Something to know; nothing has to be done."""
    WARNING = "warning"
    """The result is probably not as good as it could be."""
    SEVERE = "severe"
    """The result is probably not usable."""


@dataclass(frozen=True)
class Notice:
    """Something that was seen and should be known."""

    code: str
    """Its name in the table."""
    severity: Severity
    subjects: tuple[str, ...]
    """The models, tensors or files that it is about; empty if it is about all of them."""
    text: str
    """The observation and why it matters: sentences, the last without its full stop."""
    remedy: str
    """The thing to do, as a command; empty if there is nothing to do."""
    figures: dict[str, Number] = field(default_factory=dict, compare=False)
    """The measured values, and the limits they were held against."""

    def with_texts(self, change: Callable[[str], str]) -> Notice:
        """Return the notice with its texts changed."""
        subjects = tuple(map(change, self.subjects))
        return replace(self, subjects=subjects, text=change(self.text), remedy=change(self.remedy))

    def __str__(self) -> str:
        """Return the notice on one line: subjects, text and remedy."""
        said = ". ".join(filter(None, (self.text, self.remedy)))
        whose = f"{', '.join(self.subjects)}: " if self.subjects else ""
        return printable(f"{whose}{said}")


class NamedLimits:
    """The values of limits, as attributes."""

    def __init__(self, values: Mapping[str, float]) -> None:
        vars(self).update(values)

    def __getattr__(self, name: str) -> float:
        raise AttributeError(name)


@dataclass(frozen=True)
class NoticeKind:
    """A kind of notice, as the table has it."""

    code: str
    severity: Severity
    title: str
    """A few words, for headings and cells of tables."""
    meaning: str
    """One sentence about when it is given, for the docs."""
    text: str
    remedy: str = ""
    subject: str = ""
    """The kind of thing that a rule looks at, where that is not its code."""
    only_for: str = ""
    """The trait of stages that it matters for; for methods without one it is a note."""
    together: str = ""
    """The relation of models, after their names: `are copies`."""
    figures: str = ""
    """The names of the values that are given in addition to the text."""
    details: str = ""


def _table(file: str) -> dict[str, Any]:
    return tomllib.loads(files("dare.documents").joinpath(file).read_text("utf-8"))


# The numbers that measurements are held against, each with its meaning and its source.
LIMITS: dict[str, tuple[float, str, str]] = _table("limits.toml")
LIMIT = NamedLimits({name: value for name, (value, _, _) in LIMITS.items()})


@cache
def catalogue() -> dict[str, NoticeKind]:
    """Return all kinds of notices by their codes; read when one is given, since that takes long."""
    return {
        code: NoticeKind(code, **{**entry, "severity": Severity(entry["severity"])})
        for code, entry in _table("notices.toml")["notices"].items()
    }


LEFTOVERS = "leftovers"
"""The code of notices about this machine, which nothing that is published carries."""


def notice(
    code: str,
    *subjects: str,
    severity: Severity | None = None,
    figures: dict[str, float] | None = None,
    **values: Any,
) -> Notice:
    """Return the notice of that code, its texts filled in with the values and the limits."""
    entry, known = catalogue()[code], {"limit": LIMIT, **values}
    text, remedy = (each.format_map(known) for each in (entry.text, entry.remedy))
    return Notice(code, severity or entry.severity, subjects, text, remedy, figures or {})


def notice_from_dict(values: dict[str, Any]) -> Notice:
    """Return a notice from the values that `asdict` gave, also when JSON held them."""
    known = {"severity": Severity(values["severity"]), "subjects": tuple(values["subjects"])}
    return Notice(**{**values, **known})
