"""A candidate in the form that an evaluator takes: arrays, a live module, or files."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from dare.errors import OutputError, RecipeError

if TYPE_CHECKING:
    from dare.recipe.schema import Recipe
    from dare.studies.candidates import Candidates

LoadModel = Callable[[Path], Any]


class Form(Protocol):
    """Makes one candidate after the other; `candidate` is what the evaluator is given."""

    candidate: Any

    def make(self, recipe: Recipe) -> str:
        """Make the candidate of a recipe in place of the last; return the digest of its weights."""

    def close(self) -> None:
        """Let go of the candidate."""


def open_form(
    name: str,
    recipe: Recipe,
    *,
    work: Path | None,
    threads: int | None,
    load_model: LoadModel | None = None,
) -> Form:
    """The form that a first parameter of this name asks for."""
    if name == "path":
        return OnDisk(recipe, work)
    if name == "model":
        return Live(recipe, threads, load_model)
    return InMemory(recipe, threads)


FORMS = ("tensors", "model", "path")


class InMemory:
    """NumPy arrays by name. They cannot be written to, and the next candidate overwrites them."""

    def __init__(self, recipe: Recipe, threads: int | None) -> None:
        self._held = _Held(recipe, threads)
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
        made = self._held.candidates.make(recipe, into)
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

        self._held = _Held(recipe, threads)
        base = resolve(recipe.base, verbose=False).path
        if load_model is None and not base.is_dir():
            raise RecipeError(
                f"{recipe.base}: is a file, but transformers builds a model from a "
                "directory with a config.json; define load_model(base) in the "
                "evaluator's file, or take `tensors` as the parameter"
            )
        self.candidate = (load_model or load_live)(base)

    def make(self, recipe: Recipe) -> str:
        return self._held.candidates.write_into(self.candidate, recipe)

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


class _Held:
    """Base and models in memory, read when the first candidate is made."""

    def __init__(self, recipe: Recipe, threads: int | None) -> None:
        self._recipe = recipe
        self._threads = threads
        self._candidates: Candidates | None = None

    @property
    def candidates(self) -> Candidates:
        from dare.studies.candidates import Candidates

        if self._candidates is None:
            self._candidates = Candidates(quiet(self._recipe), threads=self._threads)
        return self._candidates


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
