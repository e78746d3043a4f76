"""What each task sees of a model that was merged with `emr`: its mask and its scale.

EMR-Merging (arXiv:2405.17461) keeps one unified delta for all tasks. A task's own model is nearly
given back by base + λᵢ·(Mᵢ ⊙ δ), with δ the unified delta, output - base; Mᵢ, one bit for each
element, says where the task's own delta has the sign of δ, and λᵢ gives what is left its size.

    dare.merge("recipe.toml")                       # method = "emr", output = "all.safetensors"
    emr_tasks("all.safetensors")                    # writes all.emr.safetensors
    for name, weights in emr_weights("all.safetensors", "math"): ...
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from os import PathLike
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dare import kernels as kernel_backends
from dare.errors import InputError, OutputError, did_you_mean
from dare.inputs.opening import open_inputs
from dare.inputs.reading import read_float_chunks
from dare.inputs.sources import Source, open_source
from dare.output.manifest import find_manifest, repeating_document
from dare.planning.data import TensorPlan
from dare.planning.make import make_plan
from dare.planning.plan import Plan
from dare.recipe.document import recipe_from_document
from dare.stores.locations import to_path
from dare.tensors.dtypes import STORAGE_TYPES
from dare.tensors.files import OutputFile
from dare.tensors.header import TensorInfo, build_header

Floats = NDArray[np.float32]
AnyPath = str | PathLike[str]
RESCALERS = "rescalers"
"""The tensor with λᵢ for each task."""


def tasks_path(output: AnyPath) -> Path:
    """Where the masks and scales of an output lie.

    >>> tasks_path("merged/all.safetensors").name
    'all.emr.safetensors'
    """
    output = to_path(output)
    return output.with_name(f"{output.name.removesuffix('.safetensors')}.emr.safetensors")


def emr_tasks(output: AnyPath, *, overwrite: bool = False) -> dict[str, float]:
    """Write every task's mask and scale beside a finished output; return the scales.

    The inputs are those that the output's manifest names. Mᵢ is where δᵢ·δ > 0, and
    λᵢ = Σ|δᵢ| / Σ|Mᵢ ⊙ δ| over the whole model, 1 where Mᵢ is empty. Masks are packed, the first
    element in the lowest bit, as U8 tensors "task/tensor"; a tensor that a task lacks has none.
    """
    target = tasks_path(output)
    if target.exists() and not overwrite:
        raise OutputError(f"{target}: exists already; pass overwrite=True to replace it")
    if target.exists() and RESCALERS not in _tensors_of(target):
        raise OutputError(
            f"{target}: was not made by dare (it has no tensor {RESCALERS}), so it is not "
            "replaced; remove it yourself"
        )
    with _opened(output) as (plan, merged):
        names = plan.model_names
        described = [
            (f"{names[model]}/{tensor.name}", STORAGE_TYPES["U8"], (-(-tensor.elements // 8),))
            for tensor in plan.merged()
            for model in tensor.models
        ]
        described.append((RESCALERS, STORAGE_TYPES["F64"], (len(names),)))
        header, places = build_header(described, {"tasks": json.dumps(names, ensure_ascii=False)})
        partial = target.with_name(f"{target.name}.partial")
        last = places[RESCALERS]
        file = OutputFile(partial, last.start + last.nbytes)
        try:
            file.write(header, 0)
            scales = _write_masks(plan, merged, places, file)
            file.write(np.array(scales, "<f8").view(np.uint8), last.start)
            file.sync()
        finally:
            file.close()
    partial.replace(target)
    return dict(zip(names, scales, strict=True))


def _tensors_of(file: Path) -> Collection[str]:
    try:
        return open_source(file).tensors
    except InputError:
        return ()


def emr_weights(output: AnyPath, task: str) -> Iterator[tuple[str, Floats]]:
    """The weights as one task sees them, base + λ·(M ⊙ δ), tensor after tensor, in float32."""
    tasks = open_source(tasks_path(output))
    with _opened(output) as (plan, merged), tasks:
        names = plan.model_names
        if task not in names:
            raise InputError(
                f"{task!r}: there is no such task{did_you_mean(task, names)}; "
                f"there are {', '.join(names)}"
            )
        scales = np.empty(len(names), "<f8")
        tasks.read(RESCALERS, 0, scales)
        scale = np.float32(scales[names.index(task)])
        for tensor in plan.merged():
            weights = np.empty(tensor.elements, np.float32)
            mask = _read_mask(tasks, f"{task}/{tensor.name}", tensor.elements)
            for start, base, unified, _ in _chunks(plan, merged, tensor, ()):
                part = slice(start, start + base.size)
                weights[part] = base + np.where(mask[part], scale * unified, 0)
            yield tensor.name, weights.reshape(tensor.shape)


@contextmanager
def _opened(output: AnyPath) -> Iterator[tuple[Plan, Source]]:
    """The plan of a finished merge and its output, and all inputs open."""
    path = to_path(output)
    manifest = find_manifest(path)
    if manifest is None:
        raise InputError(f"{path}: expected the output of a merge, a safetensors file or a folder")
    recipe = recipe_from_document(repeating_document(path, manifest), str(manifest))
    if recipe.chain[-1][0].name != "emr":
        raise InputError(f"{path}: was merged by {recipe.method}; tasks are those of emr")
    recipe, inputs = open_inputs(recipe)
    plan = make_plan(recipe, inputs.base, inputs.models, inputs.names)
    merged = open_source(path)
    with ExitStack() as stack:
        for source in (plan.base, *plan.models, merged):
            stack.enter_context(source)
        yield plan, merged


def _chunks(
    plan: Plan, merged: Source, tensor: TensorPlan, models: Sequence[int]
) -> Iterator[tuple[int, Floats, Floats, list[Floats]]]:
    """For each chunk: where it starts, the base, the unified delta, and these models' own."""
    sources = [plan.source_of(tensor, model) for model in models]
    inputs = [plan.base, merged, *sources]
    for start, (base, output, *tuned) in read_float_chunks(inputs, tensor.name, "cpu"):
        deltas = [
            values if source.holds_delta(tensor.name) else values - base
            for source, values in zip(sources, tuned, strict=True)
        ]
        yield start, base, output - base, deltas


def _write_masks(
    plan: Plan, merged: Source, places: dict[str, TensorInfo], file: OutputFile
) -> list[float]:
    """Write all masks; return the scales."""
    sum_magnitudes = kernel_backends.load("cpu").sum_magnitudes
    names = plan.model_names
    whole, seen = [0.0] * len(names), [0.0] * len(names)
    for tensor in plan.merged():
        for start, _, unified, deltas in _chunks(plan, merged, tensor, tensor.models):
            for model, delta in zip(tensor.models, deltas, strict=True):
                mask = np.sign(delta) * np.sign(unified) > 0
                whole[model] += sum_magnitudes(delta)
                seen[model] += sum_magnitudes(np.where(mask, unified, np.float32(0)))
                place = places[f"{names[model]}/{tensor.name}"].start + start // 8
                file.write(np.packbits(mask, bitorder="little"), place)
    ratios = (a / b if b else math.inf for a, b in zip(whole, seen, strict=True))
    return [ratio if math.isfinite(ratio) else 1.0 for ratio in ratios]


def _read_mask(tasks: Source, name: str, count: int) -> NDArray[np.bool_]:
    if name not in tasks.tensors:
        return np.zeros(count, np.bool_)
    packed = np.empty(-(-count // 8), np.uint8)
    tasks.read(name, 0, packed)
    return np.unpackbits(packed, count=count, bitorder="little").view(np.bool_)
