"""Evaluators: Python functions, shell commands and tasks of the harness, found, checked and run.

    evaluator                   what it is
    "module:function"           a function, in a process of its own
    "folder/file.py:function"   the same
    "python score.py {model}"   a command; its last line is a JSON object of numbers
    "lm_eval:task@folder"       tasks of lm-evaluation-harness, from YAML files in a folder
    a callable                  a function, in this process

All are used the same way: make a candidate, then score it. Whatever an evaluator does wrong is an
EvaluationError; after that, the next candidate can be made. A function's first parameter says by
its name what it is given: `tensors`, `model` or `path`. A parameter `items` says that it can score
some of the items alone.

A function by name runs in a process of its own, so that a crash or a hang costs one candidate. That
process also holds the models and makes the candidates. It imports little at first: whether there is
such a function is known in a tenth of a second.
"""

from __future__ import annotations

import inspect
import json
import math
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from numbers import Real
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dare.documents.words import times
from dare.errors import DareError, EvaluationError, RecipeError, did_you_mean
from dare.run.processes import (
    FILE_SUFFIX,
    SHELL,
    AnsweringProcess,
    Watched,
    describe_status,
    foreign_error,
    import_program,
)
from dare.studies import harness
from dare.studies.results import UNGROUPED, Scored, group_means

if TYPE_CHECKING:
    from dare.recipe.options import RunOptions
    from dare.recipe.recipe import Recipe
    from dare.studies.candidates import Form

Evaluator = str | Callable[..., Any]
LoadModel = Callable[[Path], Any]
FORMS = ("tensors", "model", "path")
MODEL, ITEMS = "{model}", "{items}"
ALL_ITEMS = "all"  # the text in place of `{items}` where all of them are to be scored
QUOTED_LINE, QUOTED_VALUE = 200, 60
"""Characters of a last line and of a wrong value that a message quotes."""
READY_SECONDS = 600.0
"""The least time limit for importing an evaluator and its model, if scoring has a limit."""

_PLACEHOLDER = re.compile(r"(?<!\$)\{(\w+)\}")
_FIRST_WORD = re.compile(r"\s*(?:\w+=[\w./:-]*\s+)*(?P<program>[\w./+-]+)(?=\s)")
"""The program of a command, after variables that it sets, where it is a plain word."""


def open_scorer(
    evaluator: Evaluator,
    recipe: Recipe,
    *,
    time_limit: float | None = None,
    work: Path | None = None,
    options: RunOptions | None = None,
) -> Scorer:
    """Get an evaluator ready to score candidates of a recipe's models.

    Scoring one may take `time_limit` seconds. Files that it needs are written in `work`, and
    deleted. It may use as many threads as the options say; by default, all cores.
    """
    from dare.recipe.options import USUAL

    options = options or USUAL
    if time_limit is not None and not time_limit > 0:
        raise RecipeError(f"the time limit is {time_limit:g} s; it must be more than 0")
    if isinstance(evaluator, str):
        _check_text(evaluator)
        kind = CommandScorer if _is_command(evaluator) else ProcessScorer
        return kind(evaluator, recipe, time_limit, work, options)
    if time_limit is not None:
        raise RecipeError('a time limit needs a function by name, as "module:function"')
    module = sys.modules.get(getattr(evaluator, "__module__", None) or "")
    shown = getattr(evaluator, "__qualname__", None) or repr(evaluator)
    function = read_signature(evaluator, shown, getattr(module, "load_model", None))
    return FunctionScorer(function, recipe, work, options)


# ---------------------------------------------------------------- checking before any model is read


def check_evaluator(evaluator: str) -> None:
    """Refuse an evaluator that cannot work: a function is imported, a command is not run."""
    _check_text(evaluator)
    if not evaluator.startswith(harness.PREFIX) and not _is_command(evaluator):
        with closing(AnsweringProcess(evaluator, Answering, threads=1)) as process:
            process.ask("find", evaluator, READY_SECONDS)


def _is_command(evaluator: str) -> bool:
    return MODEL in evaluator and not evaluator.startswith(harness.PREFIX)


def _check_text(evaluator: str) -> None:
    if evaluator.startswith(harness.PREFIX):
        harness.check_name(evaluator)
    elif _is_command(evaluator):
        _check_command(evaluator)
    else:
        split_name(evaluator)


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
    read = _run_shell("-n", "-c", _filled(command, Path("model"), ALL_ITEMS))
    if read.returncode:
        reason = read.stderr.decode(errors="replace").strip()
        raise RecipeError(f"{command!r}: the shell cannot read it: {reason}")
    first = _FIRST_WORD.match(command)
    if first and _run_shell("-c", 'command -v "$0"', first["program"]).returncode:
        raise RecipeError(f"{command!r}: there is no program {first['program']!r}")


def _run_shell(*words: str) -> subprocess.CompletedProcess[bytes]:
    command = [SHELL, *words]
    return subprocess.run(command, check=False, capture_output=True)  # noqa: S603


# ---------------------------------------------------------------- functions by name


@dataclass(frozen=True)
class Function:
    """A function that scores, and what it takes."""

    call: Callable[..., Any]
    form: str
    takes_items: bool
    load_model: LoadModel | None = None


def split_name(text: str) -> tuple[str, str]:
    """Return place and function of `module:function` or `folder/file.py:function`.

    >>> split_name("scores.demo:validation"), split_name("my scores.py:test")
    (('scores.demo', 'validation'), ('my scores.py', 'test'))
    """
    place, _, name = text.rpartition(":")
    parts = name.split(".") + ([] if place.endswith(FILE_SUFFIX) else place.split("."))
    if not all(part.isidentifier() for part in parts):
        raise RecipeError(
            f"{text!r}: is not an evaluator. Write module:function or file.py:function, "
            f"a command with {MODEL} in it, or lm_eval:task@folder"
        )
    return place, name


def find_function(text: str) -> Function:
    """Import what a text names; RecipeError if there is no such thing, or it cannot be called."""
    if text.startswith(harness.PREFIX):
        tasks = harness.Harness(text)
        return Function(tasks.score, "model", tasks.takes_items, tasks.load_model)
    place, name = split_name(text)
    module = import_program(place)
    try:
        function = attrgetter(name)(module)
    except AttributeError:
        known = [n for n, value in vars(module).items() if callable(value)]
        raise RecipeError(f"{place}: has no function {name!r}{did_you_mean(name, known)}") from None
    return read_signature(function, text, vars(module).get("load_model"))


def read_signature(function: Any, shown: str, load_model: LoadModel | None) -> Function:
    """Return what a function takes, by the names of its parameters."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        raise RecipeError(f"{shown}: is not a function whose parameters can be read") from None
    forms = f"{', '.join(FORMS[:-1])} or {FORMS[-1]}; the name decides what the function receives"
    if not parameters:
        raise RecipeError(f"{shown}: takes no parameters; the first must be {forms}")
    first, *others = parameters
    if first.name not in FORMS:
        hint = did_you_mean(first.name, FORMS)
        raise RecipeError(f"{shown}: its first parameter is {first.name!r}{hint}, not {forms}")
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    for other in others:
        if other.name != "items" and other.default is other.empty and other.kind not in variable:
            raise RecipeError(
                f"{shown}: there is no value for its parameter {other.name!r}; only "
                f"{first.name} and items are known, and other parameters need a default"
            )
    takes_items = any(other.name == "items" for other in others)
    return Function(function, first.name, takes_items, load_model)


# ---------------------------------------------------------------- scorers


class Scorer:
    """Makes candidates and scores them, one at a time."""

    takes_items = False  # True if `score` may be given some of the items
    form: Form
    _is_made = False

    def make(self, recipe: Recipe) -> str:
        """Make the candidate of a recipe; return the digest of its weights."""
        self._is_made = False
        digest = self._make(recipe)
        self._is_made = True
        return digest

    def score(self, items: Sequence[str] | None = None) -> Scored:
        """Score the candidate that was made last, on all items or on these."""
        if not self._is_made:
            raise EvaluationError("there is no candidate to score; make one first")
        if items is not None and not self.takes_items:
            lack = "the evaluator has no `items` and cannot score a part of the items"
            raise EvaluationError(lack)
        return self._score(None if items is None else list(items))

    def close(self) -> None:
        """End what was started, and delete what was written."""
        self._is_made = False
        self.form.close()

    def _make(self, recipe: Recipe) -> str:
        return self.form.make(recipe)

    def _score(self, items: list[str] | None) -> Scored:
        raise NotImplementedError


class FunctionScorer(Scorer):
    """Scores candidates by a function, in this process."""

    def __init__(
        self, function: Function, recipe: Recipe, work: Path | None, options: RunOptions
    ) -> None:
        from dare.studies.candidates import make_form

        self._call, self.takes_items = function.call, function.takes_items
        try:
            self.form = make_form(function.form, recipe, work, options, function.load_model)
        except DareError:
            raise
        except (Exception, SystemExit) as error:
            raise foreign_error("the model to score could not be made", error) from error

    def _score(self, items: list[str] | None) -> Scored:
        more = {"items": items} if self.takes_items else {}
        started = time.perf_counter()
        try:
            returned = self._call(self.form.candidate, **more)
        except (Exception, SystemExit) as error:
            raise foreign_error("the evaluator failed", error) from error
        seconds = time.perf_counter() - started
        return replace(read_scores(returned, items), seconds=seconds)


@dataclass(eq=False)
class TextScorer(Scorer):
    """Scores candidates in other processes, by an evaluator that is a text."""

    evaluator: str
    recipe: Recipe
    time_limit: float | None
    work: Path | None
    options: RunOptions

    def __post_init__(self) -> None:
        self._start()

    def _start(self) -> Any:
        raise NotImplementedError


class CommandScorer(TextScorer):
    """Scores candidates by a shell command, which is given a file or directory."""

    def _start(self) -> None:
        from dare.studies.candidates import make_form

        self.form = make_form("path", self.recipe, self.work)
        self.takes_items = ITEMS in self.evaluator

    def _score(self, items: list[str] | None) -> Scored:
        candidate, asked = self.form.candidate, ALL_ITEMS
        if items is not None:
            file = candidate.with_name("items.json")
            file.write_text(json.dumps(items), encoding="utf-8")
            asked = str(file)
        command, name = _filled(self.evaluator, candidate, asked), repr(self.evaluator)
        started = time.perf_counter()
        process = Watched([SHELL, "-c", command], name=name, threads=self.options.threads)
        with closing(process):
            status = process.pump(lambda: False, self.time_limit)
        seconds, printed = time.perf_counter() - started, process.printed.shown()
        try:
            if status:
                raise EvaluationError(describe_status(status))
            scored = read_scores(_parsed(process.stdout.last_line()), items)
        except EvaluationError as error:
            raise EvaluationError(f"{name}: {error}", printed) from None
        return replace(scored, seconds=seconds, output=printed)


def _filled(command: str, model: Path, items: str) -> str:
    known = {"model": shlex.quote(str(model)), "items": shlex.quote(items)}
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


# ---------------------------------------------------------------- functions in another process


class ProcessScorer(TextScorer):
    """Scores candidates by a function in a process, which is started anew when it has ended."""

    _process: AnsweringProcess | None = None
    _folder: tempfile.TemporaryDirectory[str] | None = None

    def _start(self) -> AnsweringProcess:
        from dare.recipe.recipe import Request
        from dare.stages import STAGES
        from dare.studies.candidates import temporary_folder

        process = self._process = AnsweringProcess(self.evaluator, Answering, self.options.threads)
        try:
            limit = None if self.time_limit is None else max(self.time_limit, READY_SECONDS)
            found = process.ask("find", self.evaluator, limit)
            self.takes_items = found["takes_items"]
            if found["form"] == "path":  # ours, so that it goes away even if the process crashes
                self._folder = temporary_folder(self.work)
            request = {
                "recipe": Request(self.recipe, self.options).to_document(),
                "work": self._folder and str(Path(self._folder.name).absolute()),
                # The files of stages that are no package's: who makes candidates needs them too.
                "stages": sorted({stage.file for stage in STAGES.values() if stage.file}),
            }
            process.ask("open", request, limit)
        except BaseException:
            self.close()
            raise
        return process

    def _make(self, recipe: Recipe) -> str:
        digest, _ = self._ask("make", recipe.to_document(), None)
        return str(digest)

    def _score(self, items: list[str] | None) -> Scored:
        scored, printed = self._ask("score", items, self.time_limit)
        return Scored(**{**scored, "output": printed})

    def _ask(self, verb: str, given: Any, limit: float | None) -> tuple[Any, str]:
        """Return the reply, and what was printed meanwhile."""
        process = self._process or self._start()
        try:
            return process.ask(verb, given, limit), process.printed.shown()
        except BaseException:
            if not process.is_running:
                self.close()
            raise

    def close(self) -> None:
        self._is_made = False
        if self._process is not None:
            self._process.close()
            self._process = None
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


class Answering:
    """The function and the scorer of a process; the requests come in this order."""

    def find(self, evaluator: str) -> dict[str, Any]:
        self.function = find_function(evaluator)
        return {"form": self.function.form, "takes_items": self.function.takes_items}

    def open(self, given: dict[str, Any]) -> None:
        from dare.recipe.document import request_from_document
        from dare.stages.registry import load_stages

        for file in given["stages"]:
            load_stages(file)
        self.read = partial(request_from_document, where="recipe")
        work = given["work"] and Path(given["work"])
        request = self.read(given["recipe"])
        self.scorer = FunctionScorer(self.function, request.recipe, work, request.options)

    def make(self, document: dict[str, Any]) -> str:
        return self.scorer.make(self.read(document).recipe)

    def score(self, items: list[str] | None) -> dict[str, Any]:
        return asdict(self.scorer.score(items))


# ---------------------------------------------------------------- scores as they are returned


def read_scores(returned: object, asked: Iterable[str] | None = None) -> Scored:
    """Turn a number, or a table of numbers that may hold `items`, into scores.

    Where only items are given, the score of a group is the mean of its items. If items were asked
    for, others are refused.

    >>> read_scores({"items": {"add/1": 1, "add/2": 0, "sort/1": 1}}).scores
    {'add': 0.5, 'sort': 1.0}
    """
    table = returned if isinstance(returned, Mapping) else {UNGROUPED: returned}
    given = table.get("items")
    if given is not None and not isinstance(given, Mapping):
        raise EvaluationError(f"items must be a table of numbers by id, not {_shown(given)}")
    items = {
        _name(id_, "id of an item"): _number(value, f"item {id_}")
        for id_, value in (given or {}).items()
    }
    scores = {
        _name(name, "name of a score"): _number(value, name)
        for name, value in table.items()
        if name != "items"
    }
    if not scores and not items:
        raise EvaluationError("there are no scores; return a number, or numbers by name")
    scored = Scored(scores or group_means(items), items)
    problem = None if asked is None else compare_items(scored, scored, asked)
    if problem:
        raise EvaluationError(f"the evaluator returned different items; {problem}")
    return scored


def compare_items(first: Scored, now: Scored, asked: Iterable[str] | None = None) -> str | None:
    """Return how the items differ from those asked for, or else from those of the first time.

    None if they are the same. Where all were asked for, the names of the scores are compared too.
    """
    ids = first.items if asked is None else asked
    what = "those of the first candidate" if asked is None else "those asked for"
    found = _differences("item", ids, now.items)
    if asked is None:
        found += _differences("score", first.scores, now.scores)
    return f"they are not {what}: {'; '.join(found)}" if found else None


def _differences(word: str, expected: Iterable[str], found: Iterable[str]) -> list[str]:
    from dare.tensors.names import some_of

    wanted, given = dict.fromkeys(expected), dict.fromkeys(found)
    missing = [name for name in wanted if name not in given]
    new = [name for name in given if name not in wanted]
    states = [(missing, f"of {len(wanted)} missing"), (new, "new")]
    return [f"{times(len(n), word)} {how} ({some_of(n, 3)})" for n, how in states if n]


def _name(name: object, what: str) -> str:
    if isinstance(name, str) and name.strip():
        return name
    raise EvaluationError(f"the {what} must be text, not {_shown(name)}")


def _number(value: Any, name: object) -> float:
    """Return a finite number; one in an array or a tensor of one element will do."""
    plain = value
    if hasattr(value, "item"):
        try:
            plain = value.item()
        except (ValueError, RuntimeError, TypeError):  # more than one element
            raise EvaluationError(f"{name} must be one number, not {_shown(value)}") from None
    if isinstance(plain, bool):
        raise EvaluationError(f"{name} is {plain}; return 1 or 0 instead")
    if not isinstance(plain, Real):
        raise EvaluationError(f"{name} must be a number, not {_shown(value)}")
    try:
        number = float(plain)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise EvaluationError(f"{name} must be a finite number, not {_shown(plain)}")
    return number


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= QUOTED_VALUE else f"{text[:QUOTED_VALUE]}…"
