"""Candidates in memory: base and models are read once, and merged as often as settings change.

    candidates = dare.Candidates("recipe.toml")
    arrays = candidates.make({"drop_rate": 0.8}).arrays
    digest = candidates.write_into(model, {"drop_rate": 0.95, "weight.math": 0.7})

A candidate has exactly the bytes that `merge` would write for its recipe, since both do the same:
a plan is made for the same sources and carried out by the same workers.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from dare.api import AnyRecipe, make_request, merge
from dare.documents.words import counted, named, show_size
from dare.errors import InputError, OutputError, RecipeError
from dare.inputs.opening import Inputs
from dare.inputs.sources import (
    Aligned,
    Held,
    HeldSource,
    Source,
    held_bytes,
    hold,
    stamps_of,
    with_copies,
)
from dare.kernels import keep_on_gpu
from dare.output.memory import (
    WRITING,
    Arrays,
    Home,
    MemorySink,
    arrays_of,
    check_arrays,
    find_homes,
    make_arrays,
    names_in,
)
from dare.output.receipt import digests_of
from dare.planning.plan import Plan
from dare.recipe.layers import mean_value
from dare.recipe.options import USUAL, RunOptions
from dare.recipe.recipe import Recipe, Request
from dare.recipe.settings import with_settings
from dare.run.engine import execute
from dare.run.merging import check_digests
from dare.run.nested import open_recipe, plan_inputs
from dare.run.worker import Merger, Progress
from dare.tensors.names import some_of
from dare.tensors.system import available_cores

LoadModel = Callable[[Path], Any]


@dataclass(frozen=True, repr=False)
class Candidate:
    """A merged model in memory."""

    arrays: Arrays
    """By the base's names, in the types that would be stored; BF16 and float8 are ml_dtypes'."""
    digest: str
    """The digest of the weights, as `merge` reports it."""
    recipe: Recipe

    def __repr__(self) -> str:
        return f"<Candidate by {self.recipe.method}: {counted(len(self.arrays), 'array')}>"


class Candidates:
    """Base and models of a recipe in memory, from which candidates are made for any settings.

    >>> candidates = Candidates("recipe.toml")  # doctest: +SKIP
    >>> candidates.make({"method": "trim+ties", "scale": 0.8}).digest  # doctest: +SKIP
    """

    def __init__(self, recipe: AnyRecipe, *, threads: int | None = None) -> None:
        """Read all weights; `threads` overrides the number of threads in the recipe.

        With the option `device`, a GPU holds them too, and candidates are merged there.
        """
        request = make_request(recipe, threads=threads)
        given, self.options = request.recipe, request.options
        self.recipe, opened = open_recipe(given, self.options, rescales=False)
        plan_inputs(self.recipe, opened, self.options)  # refuses models that cannot be merged
        sources = (opened.base, *opened.models)
        held = hold(opened.base, opened.models, self.options.threads or available_cores())
        elements = (each.elements for weights in held for each in weights.values())
        device, self._on_gpu = keep_on_gpu(self.options.device, elements)
        if self._on_gpu is not None:
            held = [with_copies(weights, self._on_gpu.copy_of) for weights in held]
        self.options = self.options.changed(device=device)
        self.names = tuple(opened.base.tensors)  # of the base's tensors
        self.memory_bytes = sum(map(held_bytes, held))  # the memory that the weights take
        # By file: under its path in the recipe, and under that of the hub's commit.
        self._kept: dict[Path, tuple[Source, Held]] = {}
        for form in (given, self.recipe):
            files = (form.base, *(entry.file for entry in form.models))
            self._kept |= zip(files, zip(sources, held, strict=True), strict=True)
        # Base and models that fit together, by the key of how they are presented.
        self._inputs = {
            _presentation_key(self.recipe): list[Source](map(HeldSource, sources, held))
        }

    def __repr__(self) -> str:
        names = [entry.name for entry in self.recipe.models]
        return f"<Candidates of {named(names)}, {show_size(self.memory_bytes)} in memory>"

    def recipe_for(self, settings: Mapping[str, Any]) -> Recipe:
        """Return the recipe with some settings changed; `dare.recipe.settings` has their names."""
        return with_settings(self.recipe, settings)

    def make(
        self,
        settings: Mapping[str, Any] | Recipe | Request | None = None,
        into: Mapping[str, NDArray[Any]] | None = None,
        *,
        progress: Progress = lambda _nbytes: None,
    ) -> Candidate:
        """Merge by the recipe with some settings changed, or by a recipe with some of its models.

        The arrays of an earlier candidate can be given to be filled again, which saves the time to
        allocate memory. `progress` is called with the number of bytes read, in the threads that
        read them; an exception that it raises ends the merge.
        """
        recipe, plan = self._plan(settings)
        arrays = make_arrays(plan) if into is None else check_arrays(plan, into)
        homes = find_homes(plan, arrays, {name: name for name in arrays})
        return Candidate(arrays, _merge_into(plan, homes, progress), recipe)

    def write_into(
        self, model: Any, settings: Mapping[str, Any] | Recipe | Request | None = None
    ) -> str:
        """Merge into a torch module, or a dict of tensors or arrays, in place; return the digest.

        Its tensors may have a wider type than the merged weights, and be on any device. Tensors
        that the base lacks are not changed. After a failure some tensors belong to this candidate
        and some to the one before; the next call repairs that.
        """
        _, plan = self._plan(settings)
        arrays = arrays_of(model)
        names = names_in(arrays, [tensor.name for tensor in plan.tensors])
        with WRITING:
            return _merge_into(plan, find_homes(plan, arrays, names))

    def _plan(self, settings: Mapping[str, Any] | Recipe | Request | None) -> tuple[Recipe, Plan]:
        if isinstance(settings, Request):  # its options do not count: those of the beginning do
            settings = settings.recipe
        recipe = settings if isinstance(settings, Recipe) else self.recipe_for(settings or {})
        arrangement = _presentation_key(recipe)
        inputs = self._inputs.get(arrangement) or self._open(recipe)
        if not recipe.weighs_rows:  # else there would be one for each combination of weights
            self._inputs[arrangement] = inputs
        base, *models = inputs
        aligned = Aligned(base, tuple(models))
        opened = Inputs(tuple(recipe.names), (None,) * len(inputs), aligned, ())
        return recipe, plan_inputs(recipe, opened, self.options)

    def _open(self, recipe: Recipe) -> list[Source]:
        """Fit some of the models together without the others, which may present them differently.

        For example, names that are one tensor in these models may be several in another one.
        """
        files = (recipe.base, *(entry.file for entry in recipe.models))
        if unknown := [str(file) for file in files if file not in self._kept]:
            known = ", ".join(map(str, self._kept))
            raise InputError(f"{some_of(unknown)}: is not a model of the study; these are: {known}")
        _, opened = open_recipe(recipe, self.options, rescales=False)
        fitted: list[Source] = []
        for file, source in zip(files, (opened.base, *opened.models), strict=True):
            earlier, held = self._kept[file]
            if _file_stamps(source) != _file_stamps(earlier):
                changed = ", ".join(map(str, source.files))
                raise InputError(f"{changed}: changed since it was read; run the search again")
            is_same = not recipe.weighs_rows and source.fingerprint() == earlier.fingerprint()
            fitted.append(HeldSource(source, held) if is_same else source)
        return fitted


def _file_stamps(source: Source) -> list[Any]:
    """Return sizes, times and inodes of a source's files, which renaming does not change."""
    return [stamp[:-1] for stamp in stamps_of(source)]


def _presentation_key(recipe: Recipe) -> tuple[Any, ...]:
    """Return everything in a recipe that decides how its inputs are presented."""
    return (
        recipe.base,
        tuple(entry.file for entry in recipe.models),
        *(recipe.vocabulary, recipe.pad_to_multiple_of, recipe.on_mismatch, recipe.allow_pickle),
        *(str(recipe.described_tokens()), recipe.new_rows, recipe.on_extra, recipe.dtype),
        tuple(map(mean_value, recipe.weights())) if recipe.weighs_rows else None,
    )


# ---------------------------------------------------------------- outputs


def _merge_into(plan: Plan, homes: Mapping[str, Home], progress: Progress = lambda _: None) -> str:
    coder = functools.partial(Merger, figures=False)  # only digests are wanted
    records = execute(plan, MemorySink(homes), progress=progress, make_coder=coder)
    digests = digests_of(plan, records)
    check_digests(plan, digests)
    return digests.output


# ---------------------------------------------------------------- forms for evaluators


# A form makes one candidate after the other, each replacing the last, and returns the digest of its
# weights; `candidate` is passed to the evaluator.


def make_form(
    form: str,
    recipe: Recipe,
    work: Path | None = None,
    options: RunOptions = USUAL,
    load_model: LoadModel | None = None,
) -> Form:
    """Return a maker of candidates as arrays (`tensors`), a torch module (`model`) or a `path`."""
    quiet = options.changed(verbose=False)  # many candidates would repeat the same lines
    if form == "path":
        return _OnDisk(recipe, work, quiet)
    # Base and models are read when the first candidate is made.
    held = functools.cache(lambda: Candidates(Request(recipe, quiet)))
    return _Live(recipe, held, load_model) if form == "model" else _InMemory(held)


class _InMemory:
    """NumPy arrays by name. They cannot be written to, and the next candidate overwrites them."""

    names: Sequence[str] = ()  # of the base's tensors, for a live model with other names

    def __init__(self, held: Callable[[], Candidates]) -> None:
        self._held = held
        self._arrays: Arrays = {}
        self._shape: object = None
        self.candidate: Any = {}

    def make(self, recipe: Recipe) -> str:
        files = tuple(entry.file for entry in recipe.models)
        shape = recipe.dtype, recipe.vocabulary, recipe.pad_to_multiple_of, files
        into = self._arrays if shape == self._shape else None
        self._shape, self.candidate = None, {}
        if into is None:
            self._arrays = {}  # frees their memory before new ones are made
        made = self._held().make(recipe, into)
        self._arrays, self._shape = made.arrays, shape
        self.candidate = {name: array.view() for name, array in made.arrays.items()}
        for view in self.candidate.values():
            view.flags.writeable = False
        return made.digest

    def close(self) -> None:
        self._arrays, self.candidate = {}, {}


class _Live:
    """A torch module into which each candidate is written."""

    def __init__(
        self, recipe: Recipe, held: Callable[[], Candidates], load_model: LoadModel | None
    ) -> None:
        from dare.inputs.hub import resolve
        from dare.inputs.transformers_models import load_live

        self._held = held
        base = resolve(recipe.base, verbose=False).path
        if load_model is None and not base.is_dir():
            raise RecipeError(
                f"{recipe.base}: is a file, but transformers builds a model from a folder; "
                "define load_model(base) in the evaluator's file, or take `tensors` instead"
            )
        self.candidate = (load_model or load_live)(base)

    @property
    def names(self) -> Sequence[str]:
        return self._held().names

    def make(self, recipe: Recipe) -> str:
        return self._held().write_into(self.candidate, recipe)

    def close(self) -> None:
        self.candidate = None


class _OnDisk:
    """A folder if the base is one, otherwise a file; it is in a temporary folder."""

    names: Sequence[str] = ()

    def __init__(self, recipe: Recipe, work: Path | None, options: RunOptions) -> None:
        is_file = recipe.base.is_file() and recipe.shard_size is None
        self._name = "candidate.safetensors" if is_file else "candidate"
        self._work, self._options = work, options
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self.candidate: Any = None

    def make(self, recipe: Recipe) -> str:
        self.close()
        self._folder = temporary_folder(self._work)
        self.candidate = Path(self._folder.name).absolute() / self._name
        to_write = recipe.changed(output=self.candidate)
        return merge(Request(to_write, self._options), resume=False).digests.output

    def close(self) -> None:
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


Form = _InMemory | _Live | _OnDisk


def temporary_folder(work: Path | None) -> tempfile.TemporaryDirectory[str]:
    """Make a folder in `work`, or in the usual place for temporary files."""
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
