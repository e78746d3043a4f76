"""Every exception and warning the package raises on purpose.

    DareError
    ├── RecipeError        what was asked for makes no sense (also a ValueError)
    ├── InputError         an input cannot be read
    │   ├── HeaderError    … because its safetensors header or index is not valid
    │   └── NotFiniteError … because it has elements that are NaN or infinite
    ├── MismatchError      the inputs do not fit together; lists every finding
    ├── OutsideError       a path leads out of the folders that the playground was given
    ├── OutputError        the output cannot be written, or would destroy something
    │   └── ExistsError    … because it is there already, and nobody said that it may be replaced
    ├── ClusterError       a cluster cannot be reached, or a node of it cannot be used
    ├── VerificationError  an output has no manifest to compare it with
    └── EvaluationError    an evaluator gave no scores for a candidate; has what it printed

    DareWarning            the merge will run, but probably not do what was meant

A message says what is wrong, where, what was expected and found, and what to change. Names of files
and tensors come from outside: what a terminal would act on is escaped wherever a message is shown.
"""

from __future__ import annotations

import difflib
import os
import re
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

PACKAGE = str(Path(__file__).parent)

# Control characters, line ends, what reverses the order of writing, and halves of characters.
UNSAFE_CHARACTERS = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufeff"
    "\U000e0000-\U000e007f]"
)


def printable(text: str, *, keep: str = "") -> str:
    r"""Return a text in which a terminal finds nothing to act on, for all that is shown.

    >>> print(printable("a\x1b[2J\nb"), printable("two\nlines", keep="\n"), sep=", ")
    a\x1b[2J\nb, two
    lines
    """
    return UNSAFE_CHARACTERS.sub(
        lambda found: found[0] if found[0] in keep else ascii(found[0])[1:-1], text
    )


class DareError(Exception):
    """Anything `dare` refuses to do or fails to do; catch this one to catch them all."""

    def __str__(self) -> str:
        return "\n  ".join(printable(str(part)) for part in self.args)  # one to a line


class RecipeError(DareError, ValueError):
    """The recipe is not valid: an unknown name, a value out of range, a missing part."""


class InputError(DareError):
    """An input is missing, unreadable, or changed while it was being read."""


class HeaderError(InputError):
    """A safetensors header or shard index is malformed or hostile."""


class NotFiniteError(InputError):
    """An input or its merge has NaN or infinite elements, and the recipe does not allow that."""


class MismatchError(DareError):
    """Base and models do not fit together; its arguments are the findings, shown one to a line."""


class OutsideError(DareError):
    """A path leads out of the folders that the user has given to the playground."""


class OutputError(DareError):
    """The output cannot be written: it exists, it is an input, or the disk is full."""


class ExistsError(OutputError):
    """The output is there already; the remedy is said in Python's words or in a command's."""

    def __init__(self, path: object) -> None:
        super().__init__(path)
        self.fault = f"{path}: exists already; choose another output"

    def __str__(self) -> str:
        return printable(f"{self.fault}, or pass overwrite=True to replace it")


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
        return printable(super().__str__())


def warn_caller(text: str) -> None:
    """Issue a DareWarning at the line that called the package, however deep in it we are."""
    frame, level = sys._getframe(), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(PACKAGE):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, DareWarning, stacklevel=level)


def install_command(extra: str) -> str:
    """Return the command that installs an extra: the one place to change on the day of release.

    >>> install_command("search")
    "pip install '.[search]' (in your clone of the repository)"
    """
    return f"pip install '.[{extra}]' (in your clone of the repository)"


@contextmanager
def needed(refusal: DareError) -> Iterator[None]:
    """Raise an error if a package that is imported inside is not installed."""
    try:
        yield
    except ImportError:
        raise refusal from None


def no_such_file(path: Path) -> InputError:
    """Return the error about a file that is not there, with the nearest name in its folder.

    A file that differs in a number only is another part of a model, and is not named.
    """
    if path.is_dir():
        return InputError(f"{path}: is a folder; give a file")
    try:
        names = sorted(os.listdir(path.parent), key=len)
    except (OSError, ValueError):
        names = []
    others = [name for name in names if re.sub(r"\d", "", name) != re.sub(r"\d", "", path.name)]
    longer = next((name for name in others if name.startswith(f"{path.name}.")), path.name)
    return InputError(f"{path}: no such file{did_you_mean(longer, others)}")


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return `" (did you mean 'x'?)"` for the nearest known word, or an empty string.

    >>> did_you_mean("drop_rat", ["drop_rate", "seed"])
    " (did you mean 'drop_rate'?)"
    """
    nearest = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f" (did you mean {nearest[0]!r}?)" if nearest else ""
