"""Inputs that a merge refuses: elements that are not finite, and models given by mistake.

Finding what is not finite costs nothing: the figures of every chunk hold its largest |δ| and the
numbers of results that overflow and that are NaN, and only where these say so are the stored
elements read again. An infinity that a model and the base share, as in a stored causal mask, is no
change and never refused. Finite inputs whose result is not finite in the output are refused too.

A pattern such as `*.safetensors` also catches the base, the same model again, or an earlier output
of the merge. Files are known by device and inode, so that a link is known for what it leads to.
To force it, give a weight or a seed: a model with its own settings is accepted. The base may be
among the models only in an interpolation. Copies under other names are found by their weights.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dare.documents.notices import Notice, notice
from dare.documents.words import counted
from dare.errors import NotFiniteError, RecipeError
from dare.inputs.sources import Raw, Source, hold_open, read_chunks
from dare.planning.data import TensorPlan
from dare.planning.plan import Plan
from dare.recipe.entries import write_value, written_models
from dare.recipe.recipe import ModelEntry, Recipe
from dare.stages.blocks import INFINITY
from dare.stores.locations import is_stored
from dare.tensors.chunks import chunk_span
from dare.tensors.dtypes import STORAGE_TYPES

BASE = -1  # the base's number where models are counted by their places in the recipe


def is_suspect(models: Sequence[Sequence[int]], exceptions: tuple[int, int]) -> bool:
    """Tell if the figures of a chunk show a |δ| or a result that is not finite."""
    return any(exceptions) or any(figures[0] >= INFINITY for figures in models)


def check_chunk(
    plan: Plan, tensor: TensorPlan, base: Raw, tuned: Mapping[int, Raw], exceptions: Sequence[int]
) -> None:
    """Refuse a tensor if these stored elements of it are not finite, or their results.

    So many results overflow, and so many are NaN; what is only copied may be NaN. A model without
    weight is left alone as long as nothing of it reaches the result. The inputs must be open.
    """
    overflowed, nans = exceptions[0], exceptions[1] * tensor.is_merged
    weights = dict(zip(tensor.models, tensor.weights, strict=False))
    taking_part = {m: raw for m, raw in tuned.items() if weights.get(m) or nans}
    if tensor.is_merged and any(_count_not_finite(plan, tensor, base, taking_part).values()):
        raise NotFiniteError(_refusal(plan, tensor, list(taking_part)))
    if overflowed or nans:
        own, kind = tensor.dtype, plan.recoding.format if plan.recoding else tensor.dtype.name
        wider = [t for t in ("BF16", "F32") if own.overflow_bits < STORAGE_TYPES[t].overflow_bits]
        what = f"{counted(overflowed + nans, 'value')} would be infinite or NaN in {kind}; "
        what += f"set dtype = {' or '.join(wider)}, " * bool(wider) + "lower scale or weights, or "
        raise NotFiniteError(f"{tensor.name}: {what}set allow_not_finite (--allow-not-finite)")


def check_chunks(plan: Plan, chunks: Sequence[tuple[str, int, tuple[int, int]]]) -> None:
    """Refuse chunks with elements or results that are not finite, unless the recipe allows them.

    A chunk is given by its tensor, its number, and how many results overflow and are NaN.
    """
    if plan.recipe.allow_not_finite or not chunks:
        return
    tensors = {tensor.name: tensor for tensor in plan.tensors}
    with hold_open(plan.sources):
        for name, number, exceptions in chunks:
            span = chunk_span(number, tensors[name].elements)
            ((base, tuned),) = _stored(plan, tensors[name], tensors[name].models, *span)
            check_chunk(plan, tensors[name], base, tuned, exceptions)


def _stored(
    plan: Plan, tensor: TensorPlan, models: Sequence[int], start: int = 0, count: int | None = None
) -> Iterator[tuple[Raw, dict[int, Raw]]]:
    sources = [plan.base_of(tensor), *(plan.source_of(tensor, model) for model in models)]
    for _, (base, *tuned) in read_chunks(sources, tensor.name, start, count, base_first=True):
        yield base, dict(zip(models, tuned, strict=True))


def _count_not_finite(
    plan: Plan, tensor: TensorPlan, base: Raw, tuned: Mapping[int, Raw]
) -> dict[int, int]:
    """Count elements of the base and of each model that are not finite, where it is a change."""
    origin = base.view(tensor.base.dtype.numpy_type).astype(np.float64)
    of_base = np.isnan(origin)
    counts = {}
    for model, raw in tuned.items():
        source = plan.source_of(tensor, model)
        values = raw.view(source.tensors[tensor.name].dtype.numpy_type).astype(np.float64)
        is_bad = ~np.isfinite(values)
        if not source.delta_of(tensor.name).is_change:
            is_bad &= np.isfinite(origin)
            of_base |= np.isinf(origin) & (values != origin)
        counts[model] = int(np.count_nonzero(is_bad))
    return {BASE: int(np.count_nonzero(of_base)), **counts}


def _refusal(plan: Plan, tensor: TensorPlan, models: Sequence[int]) -> str:
    """Return how much of a tensor is not finite in which inputs, and what to do."""
    totals = dict.fromkeys((BASE, *models), 0)
    for base, tuned in _stored(plan, tensor, models):
        for model, count in _count_not_finite(plan, tensor, base, tuned).items():
            totals[model] += count
    found = [
        f"{'base' if model == BASE else plan.model_names[model]}: {count:,} of {tensor.elements:,} "
        f"elements of {tensor.name} {'is' if count == 1 else 'are'} NaN or infinite"
        for model, count in totals.items()
        if count
    ]
    return (
        f"{', '.join(found)}, which would spoil the output; `dare analyze` shows every such "
        "tensor. Use an intact copy of the model, or set allow_not_finite = true "
        "(--allow-not-finite) to merge it anyway"
    )


# ---------------------------------------------------------------- models by mistake


EarlierInput = tuple[Path, Path]  # as an earlier manifest names it, and where that leads
FindInputs = Callable[[Path], Iterable[Sequence[EarlierInput]]]
SHORT_LIST = 6  # the most models that are written out in a message


def check_inputs(
    recipe: Recipe, base: Source, models: Sequence[Source], find_inputs: FindInputs
) -> Recipe:
    """Refuse a model that is the base, another model of the recipe, or a merge of these.

    Where models are interpolated the base may be one of them. Return the recipe with the settings
    that this takes.
    """
    if recipe.input_digests is not None:  # these very inputs were merged before
        return recipe
    paths = (recipe.base, *(entry.file for entry in recipe.models))
    known_base, *known = (
        frozenset({str(path)} if str(path) in recipe.merges else map(_identity, source.files))
        for path, source in zip(paths, (base, *models), strict=True)
    )
    entries = list(zip(recipe.models, known, strict=True))
    bases = [entry for entry, files in entries if files and files == known_base]
    recipe = with_base_among_models(recipe) if bases else recipe
    if not recipe.interpolates and not all(map(_is_deliberate, bases)):
        raise _base_among_models(recipe, bases)
    for (one, files), (other, others) in itertools.combinations(entries, 2):
        if files and files == others and not _is_deliberate(one) and not _is_deliberate(other):
            again = "is among the models twice"
            if one.file != other.file:
                again = f"is the file {one.file}, which is among the models too"
            remedy = "take one of them out, or give each a seed if you want it twice with two masks"
            raise RecipeError(f"{other.file}: {again}; {remedy}")
    for entry in recipe.models:
        rest = [other for other in recipe.models if other is not entry and other not in bases]
        earlier = [] if _is_deliberate(entry) else find_inputs(entry.file)
        if merged := _merged_before(recipe.base, rest, earlier):
            meant = "weight" if recipe.chain.combine.default_weight else "seed"
            raise RecipeError(
                f"{entry.file}: was made by dare from this base and {' and '.join(merged)}; take "
                f"this output out of models, or give it a {meant} to merge it all the same"
            )
    return recipe


def with_base_among_models(recipe: Recipe) -> Recipe:
    """Return the recipe for models of which one is the base: they are interpolated themselves.

    The delta of the base is zero, and has no direction. Settings that the recipe has stay.
    """
    if recipe.interpolates:
        return recipe
    tables = {
        stage.name: {**stage.interpolates, **recipe.stages.get(stage.name, {})}
        for stage, _ in recipe.all_stages
        if stage.interpolates is not None
    }
    return recipe.changed(stages={**recipe.stages, **tables}) if tables else recipe


def find_copies(plan: Plan, contents: Sequence[Any]) -> Iterator[Notice]:
    """Yield a notice for each model with the weights of the base, or of a model before it.

    Models with equal `contents` have equal weights; an empty one is the base's, None is unknown.
    """
    for entry, name, content in zip(plan.recipe.models, plan.model_names, contents, strict=True):
        is_deliberate = entry.weight is not None or plan.recipe.interpolates
        if content is not None and not content and not is_deliberate:
            yield notice("equals_base", name)
    changed = [pair for pair in zip(plan.model_names, contents, strict=True) if pair[1]]
    for (one, content), (other, same) in itertools.combinations(changed, 2):
        if content == same:
            yield notice("same_model", one, other, how="", twice="twice")


def _base_among_models(recipe: Recipe, bases: Sequence[ModelEntry]) -> RecipeError:
    combines = [stage for stage, _ in recipe.all_stages.of_kind("combine")]
    others = [entry.file for entry in recipe.models if entry not in bases]
    is_short = 0 < len(others) <= SHORT_LIST
    remedy = f"take it out of models{f': {written_models(others)}' if is_short else ''}"
    if all(stage.interpolates is not None for stage in combines):
        settings = [
            f"{name} = {write_value(value)} in [{stage.name}]"
            for stage in combines
            for name, value in (stage.interpolates or {}).items()
        ]
        remedy = f"to interpolate whole models set {', '.join(dict.fromkeys(settings))}"
    return RecipeError(
        f"{bases[0].file}: is the base and one of the models; {remedy}; to stay nearer "
        "to the base, lower scale"
    )


def _is_deliberate(entry: ModelEntry) -> bool:
    return entry.weight is not None or entry.seed is not None or bool(entry.settings)


def file_identity(path: Path, *, follow: bool = True) -> tuple[int, int] | None:
    """Return what two names of one file have in common; None if there is no file."""
    try:
        status = path.stat(follow_symlinks=follow)
    except (OSError, ValueError):
        return None
    return status.st_dev, status.st_ino


def _identity(path: Path) -> tuple[int, int] | str:
    return (None if is_stored(path) else file_identity(path)) or str(path)


def _merged_before(
    base: Path, models: Sequence[ModelEntry], earlier: Iterable[Sequence[EarlierInput]]
) -> list[str]:
    """Return those of the models that an earlier merge on the same base was made of."""
    found = next((merged for first, *merged in earlier if _is_same(first, base)), [])
    return [each.name for each in models if any(_is_same(one, each.file) for one in found)]


def _is_same(earlier: EarlierInput, given: Path) -> bool:
    """Tell if an input of an earlier merge is a file of the recipe; its name alone may do."""
    name, place = earlier
    if is_stored(given) or is_stored(name):
        return str(name) == str(given)
    if len(name.parts) == 1 and name.name == given.name:
        return True
    return _identity(place) == _identity(given)
