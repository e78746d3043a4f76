"""Evaluators: found, checked and run, one module for each kind.

    evaluator                   what it is
    "module:function"           a function, in its own process
    "folder/file.py:function"   the same
    "python score.py {model}"   a command; its last line is a JSON object of numbers
    "lm_eval:task@folder"       tasks of lm-evaluation-harness, from YAML files in a folder
    "data:file,file"            data files, each a task; `held-out:` for the third held out
    a callable                  a function, in this process

All are used the same way: make a candidate, then score it. Any failure of an evaluator is an
EvaluationError; after that, the next candidate can be made.

Most run in a separate process, so that a crash or a hang costs only one candidate. That process
also holds the models and makes the candidates. It imports little at first: it takes a tenth of a
second to find out whether a function exists.
"""

from __future__ import annotations

import inspect
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from functools import partial
from hashlib import file_digest, sha256
from itertools import islice
from os.path import isfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dare.errors import DareError, EvaluationError, RecipeError
from dare.run.processes import AnsweringProcess, foreign_error
from dare.studies.evaluators import commands, examples, functions, harness
from dare.studies.evaluators.functions import Evaluator, EvaluatorKind, Function, read_scores
from dare.studies.results import Scored

if TYPE_CHECKING:
    from dare.recipe.options import RunOptions
    from dare.recipe.recipe import Recipe

KINDS: list[EvaluatorKind] = [
    examples,
    harness,
    commands,
    functions,
]  # the first that recognises an evaluator takes it


def kind_of(evaluator: Evaluator) -> EvaluatorKind:
    """Return the kind that recognises an evaluator; RecipeError if none does."""
    for kind in KINDS:
        if kind.recognises(evaluator):
            return kind
    *most, last = [kind.USAGE for kind in reversed(KINDS)]
    raise RecipeError(f"{evaluator!r}: is not an evaluator. Write {', '.join(most)}, or {last}")


def check_evaluator(evaluator: str) -> None:
    """Refuse an evaluator that cannot work: a function is imported, a command is not run."""
    kind_of(evaluator).check(evaluator)


def source_digest(evaluator: Evaluator) -> str:
    """Return a digest of the files that an evaluator names, or of a function's own lines.

    It is empty if there are none: for tasks of the harness, and for a lambda, whose lines belong to
    the call around it.
    """
    digest = sha256()
    if isinstance(evaluator, str):
        named = [Path(word) for word in re.split(r"[\s\"'=:;|&<>()]+", evaluator)]
        module = f"{str(named[0]).replace('.', '/')}.py"
        places = (Path(folder, module) for folder in ("", *sys.path))
        files = [*filter(isfile, named), *islice(filter(isfile, places), 1)]
        if examples.recognises(evaluator):
            files = examples.files_of(evaluator)
        for number, file in enumerate(files):
            digest.update(b"\0" * min(number, 1))
            with file.open("rb") as opened:
                file_digest(opened, lambda: digest)  # data may be large: it is read by pieces
    elif getattr(evaluator, "__name__", "<lambda>") != "<lambda>":
        with suppress(OSError, TypeError):  # a function that was typed in has no lines
            digest.update(inspect.getsource(evaluator).encode())
    return "" if digest.digest() == sha256().digest() else digest.hexdigest()


def open_scorer(
    evaluator: Evaluator,
    recipe: Recipe,
    *,
    time_limit: float | None = None,
    work: Path | None = None,
    options: RunOptions | None = None,
) -> Scorer:
    """Get an evaluator ready to score candidates of a recipe's models.

    Scoring a candidate may take `time_limit` seconds. Files for it are written in `work`, and
    deleted. It may use as many threads as the options say; by default, all cores.
    """
    from dare.recipe.options import USUAL

    options = options or USUAL
    if time_limit is not None and not time_limit > 0:
        raise RecipeError(f"the time limit is {time_limit:g} s; it must be more than 0")
    kind = kind_of(evaluator)
    if kind.IN_OWN_PROCESS and isinstance(evaluator, str):
        return ProcessScorer(evaluator, time_limit, recipe, work, options)
    function = kind.find(evaluator, time_limit, options.threads)
    return FunctionScorer(function, recipe, work, options)


class FunctionScorer:
    """Makes candidates of a recipe's models and scores them by a function, one at a time."""

    _is_made = False

    def __init__(
        self, function: Function, recipe: Recipe, work: Path | None, options: RunOptions
    ) -> None:
        from dare.studies.candidates import make_form

        self._function = function
        self.takes_items = function.takes_items  # True if `score` may be given some of the items
        with _naming_failure("the model to score could not be made", DareError):
            self._form = make_form(function.form, recipe, work, options, function.load_model)

    def make(self, recipe: Recipe) -> str:
        """Make the candidate of a recipe; return the digest of its weights."""
        self._is_made = False
        digest = self._form.make(recipe)
        self._recompute_norms(recipe)
        self._is_made = True
        return digest

    def _recompute_norms(self, recipe: Recipe) -> None:
        """Measure the statistics of a live candidate's norms, unless its recipe has them."""
        from dare.deltas.gathering import recomputing
        from dare.inputs.gathered import has_statistics

        is_merge = len(recipe.models) > 1 and recipe.scale != 0  # else a model's are right
        if not is_merge or not self._has_norms():
            return
        if recipe.gathered is None or not has_statistics(recipe.gathered):
            with recomputing(self._form.candidate):
                self._run_inputs(None)

    def _has_norms(self) -> bool:
        """Tell if the candidate has norms whose statistics can be taken from inputs."""
        from dare.deltas.gathering import find_norms

        return self._function.run_inputs is not None and bool(find_norms(self._form.candidate))

    def _run_inputs(self, items: Sequence[str] | None) -> None:
        if self._function.run_inputs is None:
            raise EvaluationError("the evaluator has no inputs to run; give data files (--data)")
        with _naming_failure("the evaluator's inputs could not be run"):
            self._function.run_inputs(self._form.candidate, items)

    def gather(self, path: Path, models: Mapping[str, tuple[Recipe, Sequence[str] | None]]) -> None:
        """Write the Gram matrices of models by name, each on the inputs of its items.

        Each model is given by the recipe that makes it alone.
        """
        from dare.deltas.gathering import GramCollector, write_grams

        self._is_made, grams = False, {}
        for name, (recipe, items) in models.items():
            self._form.make(recipe)
            with GramCollector(self._form.candidate, self._form.names) as grams[name]:
                self._run_inputs(items)
        write_grams(path, grams)

    def gather_norms(self, path: Path, recipe: Recipe) -> bool:
        """Write the tensors that a recipe has gathered, and the statistics of its norms.

        With this file as `gathered`, a merge gives the candidate as it was scored. Return False,
        and write nothing, if there are no such norms.
        """
        from dare.deltas.gathering import write_norms

        if not self._has_norms():
            return False
        self.make(recipe)
        write_norms(path, self._form.candidate, self._form.names, recipe.gathered)
        return True

    def score(self, items: Sequence[str] | None = None) -> Scored:
        """Score the candidate that was made last, on all items or on these."""
        if not self._is_made:
            raise EvaluationError("there is no candidate to score; make one first")
        if items is not None and not self.takes_items:
            lack = "the evaluator has no `items` and cannot score a part of the items"
            raise EvaluationError(lack)
        more = {"items": items and list(items)} if self.takes_items else {}
        started = time.perf_counter()
        with _naming_failure("the evaluator failed"):
            returned = self._function.call(self._form.candidate, **more)
        seconds = time.perf_counter() - started
        scored = returned if isinstance(returned, Scored) else read_scores(returned, items)
        return replace(scored, seconds=seconds)

    def preview(self, items: Sequence[str] | None = None) -> list[dict[str, str]]:
        """Return the first of these items of each task, as the candidate sees and answers it.

        Each has `name` and `kind` of its task, `example`, `expected` and `answered`. Only data
        files have a preview; for other evaluators the list is empty.
        """
        preview = self._function.preview
        return preview(self._form.candidate, items) if preview else []

    def close(self) -> None:
        """Delete temporary files."""
        self._is_made = False
        self._form.close()


@contextmanager
def _naming_failure(what: str, ours: type[DareError] = EvaluationError) -> Iterator[None]:
    """Add what failed to an error in the user's code, unless it is one of `ours`."""
    try:
        yield
    except ours:
        raise
    except (Exception, SystemExit) as error:
        raise foreign_error(what, error) from error


class ProcessScorer:
    """The same in a process of its own, which is restarted if it has ended."""

    def __init__(
        self,
        evaluator: str,
        time_limit: float | None,
        recipe: Recipe,
        work: Path | None,
        options: RunOptions,
    ) -> None:
        self._recipe, self._work, self._options = recipe, work, options
        self._evaluator, self._time_limit = evaluator, time_limit
        self._process: AnsweringProcess | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._start()

    def _start(self) -> AnsweringProcess:
        from dare.recipe.recipe import Request
        from dare.stages import STAGES
        from dare.studies.candidates import temporary_folder

        threads, limit = self._options.threads, self._time_limit
        process = self._process = AnsweringProcess(self._evaluator, Answering, threads)
        try:
            limit = limit and max(limit, functions.READY_SECONDS)
            function = process.ask("find", self._evaluator, limit)
            self.takes_items = function["takes_items"]
            if function["form"] == "path":  # made here, to be deleted even if the process crashes
                self._folder = temporary_folder(self._work)
            request = {
                "recipe": Request(self._recipe, self._options).to_document(),
                "work": self._folder and str(Path(self._folder.name).absolute()),
                # The files of stages that are in no package: that process needs them, too.
                "stages": sorted({stage.file for stage in STAGES.values() if stage.file}),
            }
            process.ask("open", request, limit)
        except BaseException:
            self.close()
            raise
        return process

    def make(self, recipe: Recipe) -> str:
        digest, _ = self._ask("make", recipe.to_document())
        return str(digest)

    def score(self, items: Sequence[str] | None = None) -> Scored:
        scored, printed = self._ask("score", items and list(items), self._time_limit)
        return Scored(**{**scored, "output": printed})

    def gather(self, path: Path, models: Mapping[str, tuple[Recipe, Sequence[str] | None]]) -> None:
        given = {name: (recipe.to_document(), items) for name, (recipe, items) in models.items()}
        self._ask("gather", [str(path), given])

    def gather_norms(self, path: Path, recipe: Recipe) -> bool:
        is_written, _ = self._ask("gather_norms", [str(path), recipe.to_document()])
        return bool(is_written)

    def preview(self, items: Sequence[str] | None = None) -> list[dict[str, str]]:
        previews: list[dict[str, str]]
        previews, _ = self._ask("preview", items and list(items), self._time_limit)
        return previews

    def _ask(self, verb: str, given: Any, limit: float | None = None) -> tuple[Any, str]:
        """Return the reply, and the output printed meanwhile."""
        process = self._process or self._start()
        try:
            return process.ask(verb, given, limit), process.printed.shown()
        except BaseException:
            if not process.is_running:
                self.close()
            raise

    def close(self) -> None:
        """End the process, and delete temporary files."""
        if self._process is not None:
            self._process.close()
            self._process = None
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


Scorer = FunctionScorer | ProcessScorer


class Answering:
    """The function and the scorer in the process; requests come in this order."""

    def find(self, evaluator: str) -> dict[str, Any]:
        self.function = kind_of(evaluator).find(evaluator, None, None)
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

    def gather(self, given: tuple[str, dict[str, Any]]) -> None:
        path, models = given
        alone = {n: (self.read(recipe).recipe, items) for n, (recipe, items) in models.items()}
        self.scorer.gather(Path(path), alone)

    def gather_norms(self, given: tuple[str, dict[str, Any]]) -> bool:
        return self.scorer.gather_norms(Path(given[0]), self.read(given[1]).recipe)

    def preview(self, items: list[str] | None) -> list[dict[str, str]]:
        return self.scorer.preview(items)
