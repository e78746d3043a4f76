"""What scores a candidate: a Python function, a shell command, or tasks of the harness.

    evaluator                   what it is
    "module:function"           a function, in a process of its own
    "folder/file.py:function"   the same
    "python score.py {model}"   a command; its last line is a JSON object of numbers
    "lm_eval:task@folder"       tasks of lm-evaluation-harness, from YAML files in a folder
    a callable                  a function, in this process

All are used the same way: make a candidate, then score it. Whatever an evaluator does wrong is an
EvaluationError; after that, the next candidate can be made.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from dare.errors import EvaluationError, RecipeError, did_you_mean
from dare.studies import harness
from dare.studies.functions import (
    FormScorer,
    FunctionScorer,
    OnDisk,
    check_asked,
    look_at,
    split_name,
)
from dare.studies.results import Scored
from dare.studies.scores import checked, read_scores
from dare.studies.scoring_process import READY_SECONDS, Asked, ProcessScorer
from dare.studies.watched import SHELL, TimeUpError, Watched, describe_status

if TYPE_CHECKING:
    from dare.recipe.schema import Recipe

MODEL, ITEMS = "{model}", "{items}"
ALL_ITEMS = "all"
"""What stands for `{items}` where all of them are to be scored."""
QUOTED = 200
"""Characters of a last line that a message quotes."""

_PLACEHOLDER = re.compile(r"(?<!\$)\{(\w+)\}")
_FIRST_WORD = re.compile(r"\s*(?:\w+=[\w./:-]*\s+)*(?P<program>[\w./+-]+)(?=\s)")
"""Of a command, after variables that it sets, where it is a plain word."""


class Scorer(Protocol):
    """Makes candidates and scores them."""

    takes_items: bool
    """Whether `score` may be given some of the items."""

    def make(self, recipe: Recipe) -> str:
        """Make the candidate of a recipe; return the digest of its weights."""

    def score(self, items: Sequence[str] | None = None) -> Scored:
        """Score the candidate that was made last, on all items or on these."""

    def close(self) -> None:
        """End what was started, and delete what was written."""


def open_scorer(
    evaluator: str | Callable[..., Any],
    recipe: Recipe,
    *,
    time_limit: float | None = None,
    work: Path | None = None,
    threads: int | None = None,
) -> Scorer:
    """Get an evaluator ready to score candidates of a recipe's models.

    Scoring one may take `time_limit` seconds. Files that it needs are written in `work`, and
    deleted. It may use so many `threads`; by default, all cores.
    """
    if time_limit is not None and not time_limit > 0:
        raise RecipeError(f"the time limit is {time_limit:g} s; it must be more than 0")
    if isinstance(evaluator, str):
        if _is_command(evaluator):
            check_evaluator(evaluator)
            return CommandScorer(evaluator, recipe, time_limit, work, threads)
        _check_form(evaluator)
        return ProcessScorer(evaluator, recipe, time_limit=time_limit, work=work, threads=threads)
    if time_limit is not None:
        raise RecipeError('a time limit needs a function by name, as "module:function"')
    module = sys.modules.get(getattr(evaluator, "__module__", None) or "")
    shown = getattr(evaluator, "__qualname__", None) or repr(evaluator)
    function = look_at(evaluator, shown, getattr(module, "load_model", None))
    return FunctionScorer(function, recipe, work=work, threads=threads)


# ---------------------------------------------------------------- what cannot work


def check_evaluator(evaluator: str, *, time_limit: float | None = READY_SECONDS) -> None:
    """Refuse an evaluator that cannot work, before any model is read.

    A function is imported, in a process of its own; a command is not run.
    """
    if _is_command(evaluator):
        _check_command(evaluator)
        return
    _check_form(evaluator)
    if not evaluator.startswith(harness.PREFIX):
        asked = Asked(evaluator, threads=1)
        try:
            asked.ask({"find": evaluator}, time_limit)
        finally:
            asked.close()


def _is_command(evaluator: str) -> bool:
    return MODEL in evaluator and not evaluator.startswith(harness.PREFIX)


def _check_form(evaluator: str) -> None:
    if evaluator.startswith(harness.PREFIX):
        harness.check_name(evaluator)
    elif split_name(evaluator) is None:
        raise RecipeError(
            f"{evaluator!r}: is not an evaluator. Write module:function or "
            f"file.py:function, a command with {MODEL} in it, or lm_eval:task@folder"
        )


def _check_command(command: str) -> None:
    words = _PLACEHOLDER.findall(command)
    if "model" not in words:  # but ${model} is
        raise RecipeError(f"{command!r}: ${MODEL} is a variable of the shell; write {MODEL}")
    for word in words:
        if f"{{{word}}}" not in (MODEL, ITEMS):
            raise RecipeError(
                f"{command!r}: {{{word}}} is not known{did_you_mean(word, ('model', 'items'))}; "
                f"there are {MODEL} and {ITEMS}. If it is meant for the shell, put a space after "
                "the brace"
            )
    looked_at = _run_shell("-n", "-c", _filled(command, Path("model"), ALL_ITEMS))
    if looked_at.returncode:
        reason = looked_at.stderr.decode(errors="replace").strip()
        raise RecipeError(f"{command!r}: the shell cannot read it: {reason}")
    first = _FIRST_WORD.match(command)
    if first and _run_shell("-c", 'command -v "$0"', first["program"]).returncode:
        raise RecipeError(f"{command!r}: there is no program {first['program']!r}")


def _run_shell(*words: str) -> subprocess.CompletedProcess[bytes]:
    command = [SHELL, *words]
    return subprocess.run(command, check=False, capture_output=True)  # noqa: S603


# ---------------------------------------------------------------- commands


class CommandScorer(FormScorer):
    """Scores candidates by a shell command, which is given a file or directory."""

    def __init__(
        self,
        command: str,
        recipe: Recipe,
        time_limit: float | None,
        work: Path | None,
        threads: int | None,
    ) -> None:
        super().__init__(OnDisk(recipe, work), takes_items=ITEMS in command)
        self._command = command
        self._time_limit = time_limit
        self._threads = threads

    def score(self, items: Sequence[str] | None = None) -> Scored:
        """Run the command on the candidate that was made last."""
        check_asked(items, is_made=self._is_made, takes_items=self.takes_items)
        asked = ALL_ITEMS
        if items is not None:
            file = self._form.candidate.with_name("items.json")
            file.write_text(json.dumps(list(items)), encoding="utf-8")
            asked = str(file)
        started = time.perf_counter()
        line, printed = self._run(_filled(self._command, self._form.candidate, asked))
        seconds = time.perf_counter() - started
        try:
            scored = checked(read_scores(_parsed(line)), items)
        except EvaluationError as error:
            raise EvaluationError(f"{self._command!r}: {error}", printed) from None
        return replace(scored, seconds=seconds, output=printed)

    def _run(self, command: str) -> tuple[str, str]:
        """The last line of what a command prints, and the end of all that it printed."""
        process = Watched([SHELL, "-c", command], threads=self._threads)
        try:
            status = process.pump(lambda: False, self._time_limit)
        except TimeUpError:
            problem = f"took longer than {self._time_limit:g} s and was stopped"
        else:
            problem = describe_status(status) if status else ""
        finally:
            process.close()
        if problem:
            raise EvaluationError(f"{self._command!r}: {problem}", process.printed.shown())
        return process.stdout.last_line(), process.printed.shown()


def _filled(command: str, model: Path, items: str) -> str:
    known = {"model": shlex.quote(str(model)), "items": shlex.quote(items)}
    return _PLACEHOLDER.sub(lambda found: known.get(found[1], found[0]), command)


def _parsed(line: str) -> dict[str, Any]:
    """The object on the last line that a command printed."""
    if not line:
        raise EvaluationError("printed nothing; its last line must be a JSON object of numbers")
    try:
        parsed = json.loads(line)
    except (ValueError, RecursionError):
        parsed = None
    if not isinstance(parsed, dict):
        shown = line if len(line) <= QUOTED else f"{line[:QUOTED]}…"
        raise EvaluationError(f"its last line must be a JSON object of numbers, not {shown!r}")
    return parsed
