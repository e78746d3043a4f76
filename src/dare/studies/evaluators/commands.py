"""Shell commands that score: `python score.py {model}`.

`{model}` is the candidate's path, `{items}` the path of a JSON file with a list of ids, or
for the word `all`. The last line that a command prints is a JSON object of numbers.
"""

from __future__ import annotations

import json
import re
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from dare.errors import EvaluationError, RecipeError, did_you_mean
from dare.run.processes import Watched, describe_status
from dare.studies.evaluators.functions import Evaluator, Function, read_scores
from dare.studies.results import Scored
from dare.tensors.system import quoted, shell_command

MODEL, ITEMS = "{model}", "{items}"
USAGE = f"a command with {MODEL} in it"
IN_OWN_PROCESS = False
ALL_ITEMS = "all"  # the text in place of `{items}` if all of them should be scored
QUOTED_LINE = 200  # characters of a last line that a message quotes

_PLACEHOLDER = re.compile(r"(?<!\$)\{(\w+)\}")


def recognises(evaluator: Evaluator) -> bool:
    """Tell if it has a place for a candidate."""
    return isinstance(evaluator, str) and MODEL in evaluator


def check(command: str) -> None:
    """Refuse a command with places for anything but a model and items."""
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


def find(command: str, time_limit: float | None, threads: int | None) -> Function:
    """Return the function that runs a command."""
    check(command)
    return Function(partial(_run, command, time_limit, threads), "path", ITEMS in command)


def _run(
    command: str,
    time_limit: float | None,
    threads: int | None,
    candidate: Path,
    items: list[str] | None = None,
) -> Scored:
    asked = ALL_ITEMS
    if items is not None:
        file = candidate.with_name("items.json")
        file.write_text(json.dumps(items), encoding="utf-8")
        asked = str(file)
    filled = shell_command(_filled(command, candidate, asked))
    with closing(Watched(filled, name=repr(command), threads=threads)) as process:
        status = process.pump(lambda: False, time_limit)
    printed = process.printed.shown()
    try:
        if status:
            raise EvaluationError(describe_status(status))
        scored = read_scores(_parsed(process.stdout.last_line()), items)
    except EvaluationError as error:
        raise EvaluationError(f"{command!r}: {error}", printed) from None
    return replace(scored, output=printed)


def _filled(command: str, model: Path, items: str) -> str:
    known = {"model": quoted(str(model)), "items": quoted(items)}
    return _PLACEHOLDER.sub(lambda found: known.get(found[1], found[0]), command)


def _parsed(line: str) -> dict[str, Any]:
    if not line:
        raise EvaluationError("printed nothing; its last line must be a JSON object of numbers")
    try:
        parsed = json.loads(line)
    except (ValueError, RecursionError):
        parsed = None
    if not isinstance(parsed, dict):
        shown = line if len(line) <= QUOTED_LINE else f"{line[:QUOTED_LINE]}…"
        raise EvaluationError(f"its last line must be a JSON object of numbers, not {shown!r}")
    return parsed
