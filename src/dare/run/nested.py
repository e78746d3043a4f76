"""Merges inside merges: models that are results of other recipes, and stacks of layers.

None of them is written. A result is a source like any other: the chunks that are read from it are
merged at that moment, and rounded to its storage type as if they came from a file. So a merge of a
result has the same bytes as a merge of the written result.

A stack takes ranges of layers of models, or of results, and gives them new numbers. Embeddings come
from its first range, and tensors that follow the layers from its last.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dare.checks.inputs import check_inputs
from dare.documents.notices import Notice
from dare.documents.words import counted
from dare.errors import MismatchError, RecipeError
from dare.inputs.names import (
    PER_LAYER,
    Config,
    compare_meanings,
    find_tied,
    find_tied_head,
)
from dare.inputs.opening import Inputs, align_rows, open_inputs
from dare.inputs.sources import (
    Raw,
    ReadingCost,
    RenamedSource,
    Source,
    StackedSource,
    read_config,
    same_bytes,
)
from dare.kernels.linalg import one_blas_thread
from dare.output.receipt import inputs_of_output
from dare.output.sidecars import with_sidecars
from dare.output.sink import Bytes, Sink
from dare.planning.data import TensorPlan
from dare.planning.make import make_plan
from dare.planning.plan import Plan
from dare.recipe.document import TOO_DEEP
from dare.recipe.layers import at_layer, count_layers, stack_and_layer
from dare.recipe.options import USUAL, RunOptions
from dare.recipe.recipe import Layers, Recipe, Request
from dare.run.backend import open_backend
from dare.run.engine import draw_conclusions
from dare.run.threads import Id, Results, Step
from dare.run.worker import Make, Merger, Worker, conclusions_of, list_surveys, sources_of
from dare.stages import find_stage
from dare.tensors.chunks import CHUNK, chunk_span
from dare.tensors.names import comes_before_layers

SPARE_BYTES = 64 << 20  # memory of each thread for surveys to remember chunks
MOST_INSIDE = 50  # merges inside each other: each is read through all the others
SURVEYS_KEPT = 16  # tensors whose surveys are kept; with matrices, one
_BLAS = threading.RLock()  # held while BLAS's threads are limited


def plan_request(request: Request, *, fetches: bool = True) -> Plan:
    """Open a request's inputs, check them and plan the merge: the only way to make a plan."""
    options = request.options
    recipe, inputs = open_recipe(request.recipe, options, rescales=False, fetches=fetches)
    return plan_inputs(recipe, inputs, options)


def plan_inputs(
    recipe: Recipe, inputs: Inputs, options: RunOptions = USUAL, first_layer: int = 0
) -> Plan:
    """Check inputs that are open, and plan their merge and the files beside the weights.

    `first_layer` is the number of the first layer, for a part of a stack.
    """
    recipe = check_inputs(recipe, inputs.base, inputs.models, inputs_of_output)
    opened = inputs.base, inputs.models, inputs.names, inputs.notes
    return with_sidecars(make_plan(recipe, *opened, options, first_layer), inputs)


def open_recipe(
    recipe: Recipe,
    options: RunOptions = USUAL,
    *,
    rescales: bool = True,
    fetches: bool = True,
    keeps_scales: bool = False,
    within: tuple[str, ...] = (),
) -> tuple[Recipe, Inputs]:
    """Open the inputs of a recipe, as `open_inputs` does, and of all recipes inside it.

    `within` has the names of the merges that it is part of; a name that is redefined is empty.
    """
    keeps_scales = keeps_scales or recipe.format == "input"
    how: dict[str, Any] = {"rescales": rescales, "fetches": fetches, "keeps_scales": keeps_scales}
    merges: dict[str, Source] = {}
    pinned = dict(recipe.merges)
    files = {str(recipe.base), *(str(entry.file) for entry in recipe.models)}
    for name in files & set(within):
        raise RecipeError(f"merges.{name}: contains itself; give it other models")
    if len(within) > MOST_INSIDE:
        raise RecipeError(f"[merges]: {TOO_DEEP}")
    for name in pinned.keys() & files:
        others = {other: merge for other, merge in recipe.merges.items() if other != name}
        merge = recipe.merges[name]
        inner = merge.changed(merges={**others, **merge.merges})
        inner_how = {**how, "keeps_scales": keeps_scales and name == str(recipe.base)}
        names = ("" if other in merge.merges else other for other in (*within, name))
        opened, inputs = open_recipe(inner, options, **inner_how, within=tuple(names))
        merges[name] = MergedSource(_plan_inner(opened, inputs, options))
        pinned[name] = opened.changed(merges=merge.merges)
    if recipe.layers:
        return _open_stack(recipe, options, {**how, "within": within})
    recipe, inputs = open_inputs(recipe, options, merges=merges, **how)
    update = {"merges": pinned, "output_digest": recipe.output_digest}
    return recipe.changed(**update) if merges else recipe, inputs


def _plan_inner(recipe: Recipe, inputs: Inputs, options: RunOptions, first_layer: int = 0) -> Plan:
    """Plan a merge whose result is read on the fly, by each thread with its own memory."""
    if inputs.aligned.tokenizer_files or inputs.aligned.tokenizer:
        raise RecipeError(
            "a merge inside another cannot change the tokens; write its result first, or set "
            "vocabulary where it is used"
        )
    alone = options.changed(threads=1, max_memory=None, cluster=None)
    plan = plan_inputs(recipe, inputs, alone, first_layer)
    memory = plan.cost.least_memory + SPARE_BYTES
    return replace(plan, options=alone.changed(max_memory=memory))


class MergedSource(Source):
    """The result of a merge, computed as it is read."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._planned = {tensor.name: tensor for tensor in plan.tensors}
        self.tensors = {
            t.name: replace(plan.base.tensors[t.name], dtype=t.dtype, shape=t.shape, start=0)
            for t in plan.tensors
        }
        self._opened = plan.sources
        self.files = {file: stamp for s in plan.sources for file, stamp in s.files.items()}
        self.remarks = (*plan.notes, *plan.warnings)
        self.ties, self.layers, self.tied = plan.base.ties, plan.base.layers, find_tied(plan.base)
        self.cost = ReadingCost(plan.cost.max_memory, sum(s.cost.ahead_bytes for s in plan.sources))
        self._maker = _Maker(plan)
        self._takes_matrices = plan.cost.matrix_bytes > 0
        self._lock, self._locks = threading.Lock(), dict[str, Any]()  # of all, and by tensor
        self._concluded: Results | None = None
        self._surveyed: OrderedDict[str, dict[Id, Any]] = OrderedDict()

    @property
    def folder(self) -> Path | None:
        return self._plan.base.folder

    def fingerprint(self) -> list[Any]:
        return [self._plan.fingerprint]

    def read(self, name: str, start: int, into: Raw, _base: Raw | None = None) -> None:
        tensor, end, maker = self._planned[name], start + into.size, self._maker
        for number in range(start // CHUNK, -(-end // CHUNK)):
            first, count = chunk_span(number, tensor.elements)
            step = Make(("make", name, number), (), 0, count, name, number)
            maker.do(step, self._surveys(tensor))
            made = maker.room[: count * tensor.dtype.itemsize].view(into.dtype)
            low, high = max(start, first), min(end, first + count)
            into[low - start : high - start] = made[low - first : high - first]

    def _surveys(self, tensor: TensorPlan) -> Results:
        """Return the findings of stages for a whole tensor; one thread computes them for all."""
        if not self._plan.is_surveyed(tensor):
            return {}
        with self._lock:
            if self._concluded is None:
                self._concluded = draw_conclusions(self._plan) if self._plan.censuses else {}
            lock = self._locks.setdefault(tensor.name, threading.Lock())
        with _BLAS if self._takes_matrices else lock:
            results = self._surveyed.get(tensor.name)
            if results is None:
                results = dict(self._concluded)
                with one_blas_thread() if self._takes_matrices else nullcontext():
                    for step in list_surveys(tensor, conclusions_of(self._plan), 0):
                        results[step.id] = self._maker.do(step, results)
                self._surveyed[tensor.name] = results
                if len(self._surveyed) > (1 if self._takes_matrices else SURVEYS_KEPT):
                    self._surveyed.popitem(last=False)
            return results

    def prefetch(self, name: str, start: int, count: int) -> None:
        tensor = self._planned[name]
        for source in sources_of(self._plan, tensor, tensor.models):
            source.prefetch(name, start, count)


class _Maker(threading.local):
    """Makes chunks for each thread, one after the other in the same buffer."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan

    @cached_property
    def room(self) -> Bytes:
        """The bytes of the last chunk."""
        return np.empty(CHUNK * self._plan.cost.widest, np.uint8)

    @cached_property
    def _worker(self) -> Worker:
        plan, backend = self._plan, open_backend(self._plan)
        merger = Merger(plan, backend, _OnePlaceSink(self.room))
        return Worker(plan, backend, merger, lambda _nbytes: None, threading.Event())

    def do(self, step: Step, results: Results) -> Any:
        """Do one step, and return its result."""
        (result,) = self._worker.do([step], results)
        return result


class _OnePlaceSink(Sink):
    """A sink with the same place for every chunk."""

    def __init__(self, room: Bytes) -> None:
        self._room = room

    def place(self, name: str, offset: int, nbytes: int) -> Bytes:  # noqa: ARG002
        return self._room[:nbytes]


# ---------------------------------------------------------------- stacks of layers


def _open_stack(
    recipe: Recipe, options: RunOptions, how: Mapping[str, Any]
) -> tuple[Recipe, Inputs]:
    """Open a stack of layers as a base without models."""
    stack, opened, notes = _Stack(), [], dict[Notice, None]()
    for number, given in enumerate(recipe.layers, start=1):
        inner = given.changed(merges={**recipe.merges, **given.merges})
        range_recipe, inputs = open_recipe(inner, options, **how)
        entries = range_recipe.models
        is_other = recipe.layers[0].changed(range=given.range) != given
        ends = Ends(number == 1, number == len(recipe.layers), may_tie=is_other)
        try:
            _check_meanings(stack, inputs)
            spans = [given.range, *(entry.range or given.range for entry in entries)]
            models = [_as_model(given, inputs, n, options) for n in range(len(entries))]
            source, *views = stack.renumbered((inputs.base, *models), spans, ends)
            if entries:
                aligned = replace(inputs.aligned, base=source, models=tuple(views))
                merged = replace(inputs, aligned=aligned)
                source = MergedSource(_plan_inner(range_recipe, merged, options, len(stack.layers)))
            stack.add(source, inputs.base, given.range)
            notes |= dict.fromkeys(source.remarks if entries else inputs.notes)
        except (RecipeError, MismatchError) as error:
            raise type(error)(f"[[layers]], number {number}: {error}") from None
        opened.append(range_recipe.changed(merges=given.merges))
    folders = {str(e.base): source.folder for e, source in zip(opened, stack.parts, strict=True)}
    if str(recipe.base) not in folders:
        whole = recipe.changed(layers=())
        folders[str(recipe.base)] = open_recipe(whole, options, **how)[1].folders[0]
    pinned = {"layers": tuple(opened), "output_digest": recipe.output_digest}
    _check_tokens(recipe, stack.parts[0], stack.parts[-1])
    folder = folders[str(recipe.base)]
    aligned = align_rows(recipe, stack.join(inputs.base, folder), (), [folder])
    inputs = Inputs((), (folder,), aligned, (*notes, *aligned.notes))
    return recipe.changed(**pinned), inputs


def _check_meanings(stack: _Stack, inputs: Inputs) -> None:
    """Refuse a range whose weights have another meaning than those of the ranges before it."""
    config = {} if inputs.folders[0] is None else dict(read_config(inputs.folders[0]))
    for key in PER_LAYER:
        config.pop(key, None)  # the output has these of each layer
    stack.config = stack.config or config
    differences = compare_meanings(stack.config, config)
    differences += [str(note) for note in inputs.notes if note.code == "other_configuration"]
    if differences:
        remedy = "take all ranges from models with the same configuration"
        raise MismatchError(f"the configurations differ: {', '.join(differences)}; {remedy}")


def _as_model(recipe: Layers, inputs: Inputs, number: int, options: RunOptions) -> Source:
    """Return a model of a range; a change to other layers than the base's becomes a whole model.

    This is the sum of the base and the change, in the base's types, as if it had been written.
    """
    entry, model = recipe.models[number], inputs.models[number]
    is_change = any(d.is_change or d.drop for d in map(model.delta_of, model.tensors))
    if entry.range in (None, recipe.range) or not (is_change or model.is_partial):
        return model
    aligned = replace(inputs.aligned, models=(model,))
    alone = replace(inputs, names=inputs.names[number : number + 1], aligned=aligned)
    made = Recipe(base=recipe.base, models=[entry.file], method=find_stage(adds_up=True).name)
    return MergedSource(_plan_inner(made, alone, options))


def _check_tokens(recipe: Recipe, first: Source, last: Source) -> None:
    """Refuse a stack whose embedding and head have different tokens, or that chooses tokens."""
    given = [recipe.vocabulary_of, *(number for number, _ in recipe.token_rows.values())]
    if any(isinstance(number, int) and number > 0 for number in given):
        raise RecipeError("vocabulary, tokens: a stack takes both from its first range")
    both = Recipe(base=recipe.layers[0].base, models=[recipe.layers[-1].base])
    try:
        align_rows(both, first, [last], [first.folder, last.folder])
    except MismatchError as error:
        raise RecipeError(
            "[[layers]]: embedding and head have different tokens; take the first and the last "
            f"range from models with the same tokens: {error}"
        ) from None


class Ends(NamedTuple):
    """The ends of a stack that a range of layers is at."""

    is_first: bool
    is_last: bool
    may_tie: bool  # whether the embedding may be the head, in a model that ties them


class _Stack:
    """A stack of layers while it is built."""

    def __init__(self) -> None:
        self.parts: list[Source] = []
        self.layers: list[tuple[Path | None, int]] = []
        self.config: Config = {}  # of the first range that has one
        self._name = ""  # the first part of the names of all layers
        self._forms: dict[str, str] = {}  # by names as in layer 0

    def renumbered(
        self, sources: Sequence[Source], spans: Sequence[tuple[int, int]], ends: Ends
    ) -> list[Source]:
        """Return views of models that show a range of layers each, under their next numbers.

        At an end of the stack, a view also shows the tensors outside the layers that belong there.
        """
        (first, stop), *_ = spans
        name = self._name = self._name or _main_stack(sources[0])
        is_head = ends.is_last and ends.may_tie
        embeddings = find_tied_head(sources[0]).values() if is_head else ()
        views: list[Source] = []
        for source, (begin, end) in zip(sources, spans, strict=True):
            count = count_layers(source.tensors).get(name, 0)
            if not source.is_partial and end > count:
                found = f"{name} has {counted(count, 'layer')}"
                raise RecipeError(f"range = [{begin}, {end}]: {found}")
            if end - begin != stop - first:
                raise RecipeError(f"range = [{begin}, {end}]: must hold {stop - first} layers")
            names = {}
            for tensor in source.tensors:
                stack, layer = stack_and_layer(tensor) or ("", 0)
                is_first = comes_before_layers(tensor, bool(stack))
                if stack == name and begin <= layer < end:
                    names[at_layer(tensor, len(self.layers) + layer - begin)] = tensor
                elif stack != name and (ends.is_first if is_first else ends.is_last):
                    names[tensor] = tensor
            names |= {tensor: tensor for tensor in embeddings if tensor in source.tensors}
            views.append(RenamedSource(source, names))
        return views

    def add(self, source: Source, origin: Source, span: tuple[int, int]) -> None:
        """Put a range of another model's layers on top."""
        for tensor, info in source.tensors.items():
            stack, _ = stack_and_layer(tensor) or ("", 0)
            like = at_layer(tensor, 0) if stack == self._name else tensor
            form = self._forms.setdefault(like, info.form)
            if form != info.form:
                raise MismatchError(f"{tensor}: is {info.form}, but {form} in earlier layers")
        self.parts.append(source)
        plain = [(origin.folder, layer) for layer in range(*span)]
        self.layers += origin.layers[slice(*span)] or plain

    def join(self, origin: Source, folder: Path | None) -> StackedSource:
        """Return the whole stack; its head comes from the last model, even if that ties it."""
        homes = {n: (part, n) for part in (*self.parts, self.parts[0]) for n in part.tensors}
        last, ties = self.parts[-1], find_tied_head(origin)
        for head, first in find_tied_head(origin).items():
            homes[head] = (last, first) if first in last.tensors else homes[first]
            if homes[head] != homes[first] and not same_bytes(StackedSource(homes), head, first):
                ties = {}
            elif head not in origin.tensors:
                del homes[head]
        return StackedSource(homes, folder, self.layers, ties, origin.tied)


def _main_stack(source: Source) -> str:
    """Return the prefix of the stack with most weights: a model may have other stacks, too."""
    sizes: Counter[str] = Counter()
    for tensor, info in source.tensors.items():
        if place := stack_and_layer(tensor):
            sizes[place[0]] += info.nbytes
    if not sizes:
        raise RecipeError("this model has no layers with numbers in their names")
    return max(sizes, key=lambda stack: sizes[stack])
