"""Every exception and warning the package raises on purpose.

    DareError
    ├── RecipeError        what was asked for makes no sense (also a ValueError)
    ├── InputError         an input cannot be read
    │   ├── HeaderError    … because its safetensors header or index is not valid
    │   └── NotFiniteError … because it has elements that are NaN or infinite
    ├── MismatchError      the inputs do not fit together; lists every finding
    ├── OutputError        the output cannot be written, or would destroy something
    ├── ClusterError       a cluster cannot be reached, or a node of it cannot be used
    ├── VerificationError  an output has no manifest to compare it with
    └── EvaluationError    an evaluator gave no scores for a candidate; has what it printed

    DareWarning            the merge will run, but probably not do what was meant

A message says what is wrong, where, what was expected and found, and what to change. Names of files
and tensors come from outside: what a terminal would act on is escaped wherever a message is shown.
"""

from __future__ import annotations

import difflib
import re
import sys
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

PACKAGE = str(Path(__file__).parent)

ACTS = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufeff"
    "\U000e0000-\U000e007f]"
)
"""Control characters, line ends, what reverses the order of writing, and halves of characters."""


def printable(text: str, *, keep: str = "") -> str:
    r"""A text in which a terminal finds nothing to act on, for all that is shown.

    >>> print(printable("a\x1b[2J\nb"), printable("two\nlines", keep="\n"), sep=", ")
    a\x1b[2J\nb, two
    lines
    """
    return ACTS.sub(lambda found: found[0] if found[0] in keep else ascii(found[0])[1:-1], text)


class DareError(Exception):
    """Anything `dare` refuses to do or fails to do; catch this one to catch them all."""

    def __str__(self) -> str:
        """The message, on one line."""
        return printable(super().__str__())


class RecipeError(DareError, ValueError):
    """The recipe is not valid: an unknown name, a value out of range, a missing part."""


class InputError(DareError):
    """An input is missing, unreadable, or changed while it was being read."""


class HeaderError(InputError):
    """A safetensors header or shard index is malformed or hostile."""


class NotFiniteError(InputError):
    """An input has elements that are NaN or infinite, and the recipe does not allow that."""


class MismatchError(DareError):
    """Base and models do not fit together; its arguments are the findings, shown one to a line."""

    def __str__(self) -> str:
        """Every finding on a line of its own."""
        return "\n  ".join(printable(str(finding)) for finding in self.args)


class OutputError(DareError):
    """The output cannot be written: it exists, it is an input, or the disk is full."""


class ClusterError(DareError):
    """A cluster cannot be reached, a node of it cannot be used, or none is left."""


class VerificationError(DareError):
    """An output has no manifest that it could be compared with."""


class EvaluationError(DareError):
    """An evaluator gave no scores that can be used; `output` is the end of what it printed."""

    def __init__(self, message: str, output: str = "") -> None:
        super().__init__(message)
        self.output = output


class DareWarning(UserWarning):
    """Something that is allowed and usually a mistake."""

    def __str__(self) -> str:
        """The text, on one line."""
        return printable(super().__str__())


def warn_caller(text: str) -> None:
    """Issue a DareWarning at the line that called the package, however deep in it we are."""
    frame, level = sys._getframe(), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(PACKAGE):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, DareWarning, stacklevel=level)


class Concern(StrEnum):
    """What a notice is about; each with what was seen, and what to do (docs/messages.md)."""

    LARGE_DELTAS = "large deltas"
    """Many changes of a model exceed `delta_threshold`, and random dropping will add much noise; or
    any change exceeds one that you gave. Remedy: Lower `drop_rate`, or leave `dare` out of the
    method."""
    NOT_HOMOLOGOUS = "not homologous"
    """A model differs from the base far more than a fine-tune does. Remedy: Check which base the
    model was fine-tuned from, and give that one."""
    EQUAL_SEEDS = "equal seeds"
    """Several models have the same seed, so they drop the same positions. Remedy: Leave the seeds
    out: model i then uses `seed + i`."""
    HIGH_DROP_RATE = "high drop rate"
    """A drop rate is so high that its noise is much larger than the changes. Remedy: Choose a lower
    rate, unless you have measured that this one works."""
    NO_RESCALE = "rescale off"
    """The changes that are kept are not rescaled, so all changes become smaller. Remedy: Remove
    `rescale = false`. To weaken all changes on purpose, use `scale`."""
    LOW_RANK = "low-rank delta"
    """A model's change has a low rank, as a merged LoRA has, and the drop rate is high. Remedy: Try
    a drop rate from 0.7 to 0.85, and measure."""
    SAME_MODEL = "same model twice"
    """Two models have the same weights, so the model counts twice. Remedy: Leave one out. If it is
    meant, double its weight."""
    EQUALS_BASE = "equal to the base"
    """A model equals the base in every element, so it changes nothing. Remedy: Leave it out. To
    stay nearer to the base, lower `scale`."""
    MISSING_TENSORS = "missing tensors"
    """A model lacks a tensor of the base; its change there counts as zero. Remedy: Nothing, if the
    tensor is tied to another one, as a head often is. Otherwise check the model."""
    EXTRA_TENSORS = "extra tensors"
    """A model has a tensor that the base does not have; it is left out. Remedy: Check that the
    output does not need it."""
    MISMATCHED_TENSORS = "mismatched tensors"
    """A tensor has different shapes; the base's is kept, for all models. Remedy: If the vocabulary
    has grown, set `vocabulary`. Otherwise give models of one shape."""
    UNUSED_RULE = "rule without effect"
    """The pattern of a `[[tensors]]` rule matches no tensor of the base. Remedy: Correct the
    pattern; `dare plan … --json` lists the names."""
    OVERFLOW = "overflow"
    """Merged values are infinite or too large for the type of the output. Remedy: Lower `scale`, or
    store a wider `dtype`: F16 ends at 65504, F8_E4M3 at 448."""
    NOT_A_NUMBER = "not a number"
    """Merged values are NaN, because an input has NaN or infinite elements. Remedy: Take a sound
    copy of that model; `dare analyze` names the tensors."""
    FLOAT64 = "float64 inputs"
    """Weights are stored in float64, and computed with in float32. Remedy: Nothing: 7 digits are
    more than fine-tunes need. To have all 16 digits, compute with other software."""
    LEFTOVERS = "leftovers"
    """An earlier run left a folder `OUT.partial` that cannot be used, or that could not be removed.
    Remedy: Nothing: the output is not affected. Delete the folder if it stays."""
    NOT_SMALLER = "not smaller"
    """A delta file is larger than the model that it was made from. Remedy: Keep the model instead.
    Or drop more, or take fewer bits."""
    NO_CONFIGURATION = "no configuration"
    """The base has no configuration beside its weights, so the output directory has none. Remedy:
    Set `copy_from` to a model that has one."""
    STOP_TOKENS = "stop tokens"
    """Models end a text with other tokens than the output does. Remedy: Set `chat_template` to the
    model whose template and stop tokens the output should have."""
    PLAIN_FLOAT8 = "float8 without scales"
    """Matrices are stored in float8 without scales, which loses small values. Remedy: Store BF16,
    and quantise the output with a tool that adds scales."""


class Strength(StrEnum):
    """How much a notice matters."""

    NOTE = "note"
    """The output is as requested; there is only something to know about it."""
    WARNING = "warning"
    """The output is probably not as good as it could be."""
    STRONG = "strong warning"
    """The output is probably not usable."""


@dataclass(frozen=True)
class Notice:
    """Something that is allowed and usually a mistake: what it is about, what was seen."""

    about: Concern
    text: str
    strength: Strength = Strength.WARNING

    def __str__(self) -> str:
        """The text alone; it says what it is about."""
        return printable(self.text)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return `" (did you mean 'x'?)"` for the nearest known word, or an empty string.

    >>> did_you_mean("drop_rat", ["drop_rate", "seed"])
    " (did you mean 'drop_rate'?)"
    """
    nearest = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f" (did you mean {nearest[0]!r}?)" if nearest else ""
