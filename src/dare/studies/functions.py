"""Evaluators that are Python functions: found by name, looked at, and called.

The name of the first parameter says what a function is given: `tensors`, `model` or `path`. A
parameter `items` says that it can score some of the items alone.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from dare.errors import DareError, EvaluationError, OutputError, RecipeError, did_you_mean
from dare.studies.results import Scored
from dare.studies.scores import checked, read_scores

if TYPE_CHECKING:
    from dare.recipe.schema import Recipe
    from dare.studies.candidates import Candidates

LoadModel = Callable[[Path], Any]
FORMS = ("tensors", "model", "path")
FILE_SUFFIX = ".py"


@dataclass(frozen=True)
class Function:
    """A function that scores, and what it takes."""

    call: Callable[..., Any]
    form: str
    takes_items: bool
    load_model: LoadModel | None = None


def split_name(text: str) -> tuple[str, str] | None:
    """The place and the function of `module:function` or `folder/file.py:function`.

    >>> split_name("scores.demo:validation"), split_name("my scores.py:test"), split_name("ls -l")
    (('scores.demo', 'validation'), ('my scores.py', 'test'), None)
    """
    place, _, name = text.rpartition(":")
    is_place = place.endswith(FILE_SUFFIX) or _is_dotted(place)
    return (place, name) if is_place and _is_dotted(name) else None


def _is_dotted(text: str) -> bool:
    return all(part.isidentifier() for part in text.split("."))


def find_function(text: str) -> Function:
    """Import what a text names; RecipeError if there is no such thing, or it cannot be called."""
    named = split_name(text)
    if named is None:
        raise RecipeError(f"{text}: is not the name of a function; write module:function")
    place, name = named
    module = _import(place)
    try:
        function = attrgetter(name)(module)
    except AttributeError:
        known = [n for n, value in vars(module).items() if callable(value)]
        raise RecipeError(f"{place}: has no function {name!r}{did_you_mean(name, known)}") from None
    return look_at(function, text, vars(module).get("load_model"))


def look_at(function: Any, shown: str, load_model: LoadModel | None) -> Function:
    """Say what a function takes, by the names of its parameters."""
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


def _import(place: str) -> Any:
    """Import a module as a program in the current folder, or in the file's folder, would."""
    folder = Path.cwd()
    module_name = place
    if place.endswith(FILE_SUFFIX):
        file = Path(place).absolute()
        if not file.is_file():
            raise RecipeError(f"{place}: there is no such file")
        folder, module_name = file.parent, file.stem
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{module_name}.".startswith(f"{error.name}."):
            raise RecipeError(
                f"{place}: there is no module {error.name!r}, neither in {folder} nor installed"
            ) from None
        raise RecipeError(f"{place}: cannot be imported: {_described(error)}") from error
    except (Exception, SystemExit) as error:
        raise RecipeError(f"{place}: cannot be imported: {_described(error)}") from error
    found = getattr(module, "__file__", None)
    if place.endswith(FILE_SUFFIX) and (found is None or not Path(found).samefile(file)):
        raise RecipeError(
            f"{place}: there is another module called {module_name!r} ({found}); rename the file"
        )
    return module


def _described(error: BaseException) -> str:
    """An error with the place that it comes from."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}".rstrip(": ") + where


# ---------------------------------------------------------------- candidates in their forms


class Form(Protocol):
    """Makes one candidate after the other; `candidate` is what the evaluator is given."""

    candidate: Any

    def make(self, recipe: Recipe) -> str:
        """Make the candidate of a recipe in place of the last; return the digest of its weights."""

    def close(self) -> None:
        """Let go of the candidate."""


class InMemory:
    """NumPy arrays by name. They cannot be written to, and the next candidate overwrites them."""

    def __init__(self, recipe: Recipe, threads: int | None) -> None:
        self._held = _hold(recipe, threads)
        self._arrays: dict[str, Any] = {}
        self._shape: object = None
        self.candidate: dict[str, Any] = {}

    def make(self, recipe: Recipe) -> str:
        files = tuple(entry.file for entry in recipe.models)
        shape = recipe.dtype, recipe.vocabulary, recipe.pad_to_multiple_of, files
        into = self._arrays if shape == self._shape else None
        self._shape, self.candidate = None, {}
        if into is None:
            self._arrays = {}  # before others take as much memory again
        made = self._held().make(recipe, into)
        self._arrays, self._shape = made.arrays, shape
        self.candidate = {name: _read_only(array) for name, array in made.arrays.items()}
        return made.digest

    def close(self) -> None:
        self._arrays, self.candidate = {}, {}


class Live:
    """A torch module, which each candidate is written into."""

    def __init__(self, recipe: Recipe, threads: int | None, load_model: LoadModel | None) -> None:
        from dare.inputs.hub import resolve
        from dare.inputs.loaded import load_live

        self._held = _hold(recipe, threads)
        base = resolve(recipe.base, verbose=False).path
        if load_model is None and not base.is_dir():
            raise RecipeError(
                f"{recipe.base}: is a file, but transformers builds a model from a "
                "directory with a config.json; define load_model(base) in the "
                "evaluator's file, or take `tensors` as the parameter"
            )
        self.candidate = (load_model or load_live)(base)

    def make(self, recipe: Recipe) -> str:
        return self._held().write_into(self.candidate, recipe)

    def close(self) -> None:
        self.candidate = None


class OnDisk:
    """A directory if the base is one, otherwise a file; it lies in a folder that goes away."""

    def __init__(self, recipe: Recipe, work: Path | None) -> None:
        self._name = "candidate"
        if recipe.base.is_file() and recipe.shard_size is None:
            self._name += ".safetensors"
        self._work = work
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self.candidate: Path = Path()

    def make(self, recipe: Recipe) -> str:
        from dare.api import merge

        self.close()
        self._folder = temporary_folder(self._work)
        self.candidate = Path(self._folder.name).absolute() / self._name
        return merge(quiet(recipe, output=self.candidate), resume=False).digests.output

    def close(self) -> None:
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


def _hold(recipe: Recipe, threads: int | None) -> Callable[[], Candidates]:
    """Base and models in memory, read when the first candidate is made."""
    from dare.studies.candidates import Candidates

    return functools.cache(lambda: Candidates(quiet(recipe), threads=threads))


def quiet(recipe: Recipe, **changes: Any) -> Recipe:
    """The same recipe without progress and warnings: many candidates would repeat them."""
    return recipe.model_copy(update={"verbose": False, **changes})


def temporary_folder(work: Path | None) -> tempfile.TemporaryDirectory[str]:
    """A folder in `work`, or wherever temporary files go."""
    try:
        if work is not None:
            work.mkdir(parents=True, exist_ok=True)
        return tempfile.TemporaryDirectory(
            prefix="dare-candidate-", dir=work, ignore_cleanup_errors=True
        )
    except OSError as error:
        raise OutputError(
            f"{work or tempfile.gettempdir()}: candidates cannot be written there: {error.strerror}"
        ) from None


def _read_only(array: Any) -> Any:
    view = array.view()
    view.flags.writeable = False
    return view


# ---------------------------------------------------------------- calling


class FormScorer:
    """Makes candidates in a form, of which each is scored when it was made."""

    def __init__(self, form: Form, *, takes_items: bool) -> None:
        self.takes_items = takes_items
        self._form = form
        self._is_made = False

    def make(self, recipe: Recipe) -> str:
        """Make the candidate of a recipe; return the digest of its weights."""
        self._is_made = False
        digest = self._form.make(recipe)
        self._is_made = True
        return digest

    def close(self) -> None:
        """Let go of the candidate."""
        self._is_made = False
        self._form.close()


class FunctionScorer(FormScorer):
    """Scores candidates by a function, in this process."""

    def __init__(
        self, function: Function, recipe: Recipe, *, work: Path | None, threads: int | None
    ) -> None:
        self._call = function.call
        try:
            if function.form == "path":
                form: Form = OnDisk(recipe, work)
            elif function.form == "model":
                form = Live(recipe, threads, function.load_model)
            else:
                form = InMemory(recipe, threads)
        except DareError:
            raise
        except (Exception, SystemExit) as error:
            raise failed("the model to score could not be made", error) from error
        super().__init__(form, takes_items=function.takes_items)

    def score(self, items: Sequence[str] | None = None) -> Scored:
        """Score the candidate that was made last, on all items or on these."""
        check_asked(items, is_made=self._is_made, takes_items=self.takes_items)
        more = {"items": None if items is None else list(items)} if self.takes_items else {}
        started = time.perf_counter()
        try:
            returned = self._call(self._form.candidate, **more)
        except (Exception, SystemExit) as error:
            raise failed("the evaluator failed", error) from error
        seconds = time.perf_counter() - started
        return replace(checked(read_scores(returned), items), seconds=seconds)


def check_asked(items: Sequence[str] | None, *, is_made: bool, takes_items: bool) -> None:
    """Refuse to score nothing, or items where only all can be scored."""
    if not is_made:
        raise EvaluationError("there is no candidate to score; make one first")
    if items is not None and not takes_items:
        raise EvaluationError("the evaluator has no `items` and cannot score a part of the items")


def failed(what: str, error: BaseException) -> EvaluationError:
    """The error of others, with where in their code it arose."""
    theirs = error.__traceback__ and error.__traceback__.tb_next
    lines = traceback.format_exception(type(error), error, theirs)
    return EvaluationError(f"{what}: {_described(error)}", "".join(lines).rstrip())
