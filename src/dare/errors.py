"""Every exception and warning the package raises on purpose.

    DareError
    ├── RecipeError        what was asked for makes no sense (also a ValueError)
    ├── InputError         an input cannot be read
    │   └── HeaderError    … because its safetensors header or index is not valid
    ├── MismatchError      the inputs do not fit together; lists every finding
    ├── OutputError        the output cannot be written, or would destroy something
    └── VerificationError  an output has no manifest to compare it with

    DareWarning            the merge will run, but probably not do what was meant

A message says what is wrong, where, what was expected and found, and what to change.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class DareError(Exception):
    """Anything `dare` refuses to do or fails to do; catch this one to catch them all."""


class RecipeError(DareError, ValueError):
    """The recipe is not valid: an unknown name, a value out of range, a missing part."""


class InputError(DareError):
    """An input is missing, unreadable, or changed while it was being read."""


class HeaderError(InputError):
    """A safetensors header or shard index is malformed or hostile."""


class MismatchError(DareError):
    """Base and models do not fit together; the message has one line per finding."""


class OutputError(DareError):
    """The output cannot be written: it exists, it is an input, or the disk is full."""


class VerificationError(DareError):
    """An output has no manifest that it could be compared with."""


class DareWarning(UserWarning):
    """Something that is allowed and usually a mistake."""


class Concern(StrEnum):
    """What a notice is about."""

    LARGE_DELTAS = "large deltas"
    NOT_HOMOLOGOUS = "not homologous"
    EQUAL_SEEDS = "equal seeds"
    HIGH_DROP_RATE = "high drop rate"
    NO_RESCALE = "rescale off"
    LOW_RANK = "low-rank delta"
    MISSING_TENSORS = "missing tensors"
    EXTRA_TENSORS = "extra tensors"
    MISMATCHED_TENSORS = "mismatched tensors"
    UNUSED_RULE = "rule without effect"
    OVERFLOW = "overflow"
    NOT_A_NUMBER = "not a number"
    LEFTOVERS = "leftovers"


@dataclass(frozen=True)
class Notice:
    """Something that is allowed and usually a mistake: what it is about, what was seen."""

    about: Concern
    text: str

    def __str__(self) -> str:
        """The text alone; it says what it is about."""
        return self.text


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return `" (did you mean 'x'?)"` for the nearest known word, or an empty string.

    >>> did_you_mean("drop_rat", ["drop_rate", "seed"])
    " (did you mean 'drop_rate'?)"
    """
    nearest = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f" (did you mean {nearest[0]!r}?)" if nearest else ""
