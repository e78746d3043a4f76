"""The functions and classes that the published descriptions of DARE use, by their names.

They are thin: each turns its arguments into a recipe and hands it to `merge` or `merge_arrays`.
Dicts may hold NumPy arrays or torch tensors, and what comes back is of the same kind; a torch
module stands for its `state_dict()`. Those that analyse are in `dare.analysis.sparsity`.
"""

from __future__ import annotations

import inspect
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from typing import Any, get_overloads, overload

import numpy as np
from numpy.typing import NDArray

from dare import kernels as kernel_backends
from dare.analysis.sparsity import (
    Configuration,
    DARESparsityAnalyzer,
    LayerSparsityMetrics,
    SparsityAnalysis,
    dare_merge_readiness,
)
from dare.analysis.tallies import Sums, share_below, with_inliers
from dare.api import merge, merge_arrays
from dare.checks.dropping import NO_MAGNITUDES, Magnitudes
from dare.documents.words import counted
from dare.errors import InputError, MismatchError, RecipeError, did_you_mean, warn_caller
from dare.inputs.arrays import Arrays, like_original, named_arrays, plain_array, stored
from dare.inputs.sources import decoded
from dare.kernels import reference
from dare.output.receipt import Report
from dare.recipe.recipe import Request
from dare.stages import STAGES
from dare.stages.dropping import Rescale
from dare.stores.locations import AnyPath
from dare.tensors.header import TensorInfo, show_shape

__all__ = [
    "Configuration",
    "DARESparsityAnalyzer",
    "DareConfig",
    "DareMerger",
    "LayerSparsityMetrics",
    "SparsityAnalysis",
    "dare_drop",
    "dare_merge",
    "dare_merge_readiness",
    "dare_slerp_merge",
    "dare_sparsify",
    "dare_ties_merge",
    "detect_delta_sparsity",
    "ties_disjoint_merge",
    "ties_elect_sign",
    "ties_trim",
]

# Notices that only a model with a base can have.
BESIDE_A_BASE = ("large_deltas", "unrelated", "equals_base")
MERGE_METHODS = ("linear", "ties", "sum")


# ---------------------------------------------------------------- the program (seed 002)


class _Default(float):
    """A number that the user has not written down."""


@dataclass(frozen=True)
class DareConfig:
    """Settings of a merge; `method` is that of a recipe, so that `dare+ties` trims nothing.

    >>> DareConfig(drop_rate=0.95).delta_threshold
    0.002
    """

    drop_rate: float = 0.9
    delta_threshold: float = _Default(0.002)
    verbose: bool = True
    method: str = "dare+linear"
    seed: int = 42


class DareMerger:
    """Merges files: `DareMerger(base_file=…, merge_files=[…]).merge("out.safetensors")`."""

    def __init__(
        self, base_file: AnyPath, merge_files: Sequence[AnyPath], config: DareConfig | None = None
    ) -> None:
        self.base_file = base_file
        self.merge_files = merge_files
        self.config = config or DareConfig()

    def merge(self, output_file: AnyPath, *, overwrite: bool = False) -> Report:
        """Write the merged model."""
        config = self.config
        given = {"delta_threshold": config.delta_threshold}
        return _merge_and_print(
            base=self.base_file,
            models=self.merge_files,
            output=output_file,
            overwrite=overwrite,
            method=config.method,
            stages=_checked({"dare": {"drop_rate": config.drop_rate}}),
            seed=config.seed,
            verbose=config.verbose,
            **({} if isinstance(config.delta_threshold, _Default) else given),
        )


# ---------------------------------------------------------------- dicts of arrays


def dare_sparsify(
    pretrained: Arrays, finetuned: Arrays, drop_rate: float = 0.9, seed: int = 42
) -> dict[str, Any]:
    """Apply DARE to one fine-tune: pretrained + DARE(finetuned - pretrained)."""
    return _merge(pretrained, [finetuned], "dare+sum", seed, dare={"drop_rate": drop_rate})


def dare_drop(
    task_vector: Arrays,
    drop_rate: float = 0.9,
    seed: int | None = None,
    rescale: Rescale = True,
    *,
    verbose: bool = True,
) -> dict[str, Any]:
    """Apply DARE to deltas, and print which share was dropped.

    Without a seed, there is a different one every time.

    >>> import numpy as np
    >>> dare_drop({"w": np.ones(8, np.float32)}, drop_rate=0.5, seed=1)["w"]
    DARE: dropped 25.00% (target: 50.00%)
    array([0., 2., 2., 2., 2., 2., 0., 2.], dtype=float32)
    """
    stages = _checked({"dare": {"drop_rate": drop_rate, "rescale": rescale}})
    deltas = named_arrays(task_vector, "task_vector")
    zeros = {name: _as_original(array, name, None) for name, array in deltas.items()}
    dropped, report = merge_arrays(
        zeros, [deltas], method="dare+sum", stages=stages, seed=_seed(seed), verbose=False
    )
    for notice in report.warnings:
        if notice.code not in BESIDE_A_BASE:
            warn_caller(str(notice))
    realised = report.models[0].drop_rate_realised
    if verbose and realised is not None:
        print(f"DARE: dropped {realised:.2%} (target: {drop_rate:.2%})")
    return dropped


def dare_slerp_merge(
    model_a: Arrays,
    model_b: Arrays,
    pretrained: Arrays,
    drop_rate: float = 0.9,
    t: float = 0.5,
    seed: int = 42,
) -> dict[str, Any]:
    """Apply DARE to both models, then interpolate between them on the sphere."""
    settings = {"dare": {"drop_rate": drop_rate}, "slerp": {"t": t}}
    return _merge(pretrained, [model_a, model_b], "dare+slerp", seed, **settings)


def ties_trim(task_vector: Arrays, keep_ratio: float = 0.2) -> dict[str, Any]:
    """Keep the largest elements of each delta: keep_ratio of those that are not zero.

    Of those that are equal at the cut, the first are kept.
    """
    STAGES["trim"].settings({"keep_ratio": keep_ratio}, "")  # refuses what the stage would

    def trimmed(name: str, delta: Any) -> Any:
        values = _as_floats(delta, name)
        sizes = reference.magnitude_bits(values)
        changed = np.count_nonzero(sizes)
        kept = max(1, int(keep_ratio * changed))
        if kept < changed:
            cut = np.partition(sizes, -kept)[-kept]
            ties_kept = kept - np.count_nonzero(sizes > cut)
            values[sizes < cut] = 0
            values[np.flatnonzero(sizes == cut)[ties_kept:]] = 0
        return _as_original(delta, name, values)

    deltas = named_arrays(task_vector, "task_vector")
    return {name: trimmed(name, delta) for name, delta in deltas.items()}


def ties_elect_sign(task_vectors: Sequence[Arrays]) -> dict[str, Any]:
    """Return the sign (-1, 0, 1) of the sum of the deltas, element by element."""
    elected = {}
    for name, deltas in _by_name(task_vectors):
        floats = [_as_floats(delta, name) for delta in deltas]
        above = sum(np.maximum(values, 0) for values in floats)
        below = sum(np.minimum(values, 0) for values in floats)
        elected[name] = _as_original(deltas[0], name, np.sign(above + below))
    return elected


def ties_disjoint_merge(task_vectors: Sequence[Arrays], elected: Arrays) -> dict[str, Any]:
    """Average, element by element, the deltas that are not zero and have the elected sign."""
    merged = {}
    signs = named_arrays(elected, "elected")
    for name, (*deltas, last) in _by_name([*task_vectors, signs]):
        if name not in signs:
            raise InputError(f"{name}: no sign was elected for it")
        if not deltas:
            continue
        sign = _as_floats(last, name)
        total, count = np.zeros_like(sign), np.zeros_like(sign)
        for delta in deltas:
            values = _as_floats(delta, name)
            agrees = (np.sign(values) == sign) & (sign != 0)
            total += np.where(agrees, values, np.float32(0))
            count += agrees
        mean = np.divide(total, count, out=np.zeros_like(total), where=count > 0)
        merged[name] = _as_original(deltas[0], name, mean)
    return merged


def detect_delta_sparsity(task_vector: Arrays, *, verbose: bool = True) -> float:
    """Return the share of delta elements under 1% of the largest magnitude.

    Goes over the tensors twice instead of joining them. Prints the figures and, above 70%, what
    they mean for the drop rate. These figures are defined by the largest element and the mean, so
    that a few outliers decide them; where there are any, what holds without them is printed too,
    and the advice goes by that. NaN and infinite elements are warned of and not counted.
    """
    elements, sums, bins = 0, Sums(), NO_MAGNITUDES
    deltas = named_arrays(task_vector, "task_vector")
    for name, delta in deltas.items():
        magnitudes = np.abs(_as_floats(delta, name))
        elements += magnitudes.size
        magnitudes = magnitudes[np.isfinite(magnitudes)]
        peak, binned = float(magnitudes.max(initial=0.0)), Magnitudes.of(magnitudes)
        zeros = magnitudes.size - int(binned.counts.sum())
        squares = float(np.square(magnitudes, dtype=np.float64).sum())
        total = float(magnitudes.sum(dtype=np.float64))
        finite = Sums(magnitudes.size, zeros, squares=squares, magnitude=total, largest=peak)
        sums += with_inliers(finite, binned)
        bins += binned
    largest, count = sums.largest, sums.elements
    if elements == 0:
        raise InputError("there are no elements whose sparsity could be measured")
    if count == 0:
        raise InputError(f"all {elements:,} elements are NaN or infinite; check the checkpoint")
    if count < elements:
        warn_caller(
            f"{elements - count:,} of {elements:,} elements are NaN or infinite; the sparsity "
            "counts the others. Check the checkpoint"
        )
    threshold = np.float32(0.01 * largest)
    below = sum(
        int((np.abs(_as_floats(delta, name)) < threshold).sum()) for name, delta in deltas.items()
    )
    mean = sums.magnitude / count
    deviation = max(0.0, (sums.squares - count * mean**2) / max(count - 1, 1)) ** 0.5
    left = sums.inliers
    typical = share_below(0.01 * left.largest, sums, bins) if left.outliers else below / count
    if verbose:
        print(f"natural sparsity: {below / count:.1%} of the elements are under 1% of the largest")
        print(f"max |δ| {largest:.6f}, mean {mean:.6f}, std {deviation:.6f}")
        if left.outliers:
            decide = counted(left.outliers, "outlier decides", "outliers decide")
            print(
                f"{decide} these figures: of the other elements {typical:.1%} are under 1% of the "
                f"largest of them, {left.largest:.6f}"
            )
        if typical > 0.7:
            print("most of this delta is nearly zero already; a lower drop rate may serve better")
    return below / count


# ---------------------------------------------------------------- files (seed 001)


def dare_merge(
    base_path: AnyPath,
    finetuned_paths: Sequence[AnyPath],
    output_path: AnyPath,
    drop_rate: float = 0.9,
    lambda_coeff: float = 1.0,
    merge_method: str = "linear",
    dtype: Any = "bfloat16",
    seed: int | None = 42,
    *,
    overwrite: bool = False,
    verbose: bool = True,
) -> Report:
    """Apply DARE to safetensors models, merge them by `merge_method` and print what was done.

    `merge_method="ties"` trims nothing; `dare_ties_merge` does. A tensor that a model lacks counts
    as unchanged there, and one that only a model has is left out; either is warned of.
    """
    if merge_method not in MERGE_METHODS:
        guess = did_you_mean(merge_method, MERGE_METHODS)
        raise RecipeError(f"merge_method {merge_method!r}: unknown{guess}; use linear, ties or sum")
    return _merge_files(
        base_path,
        finetuned_paths,
        output_path,
        lambda_coeff,
        overwrite=overwrite,
        verbose=verbose,
        method=f"dare+{merge_method}",
        stages=_checked({"dare": {"drop_rate": drop_rate}}),
        dtype=dtype,
        seed=_seed(seed),
    )


@overload
def dare_ties_merge(
    models: Sequence[Arrays],
    pretrained: Arrays,
    drop_rate: float = 0.9,
    density: float = 0.2,
    *,
    seed: int = 42,
) -> dict[str, Any]: ...


@overload
def dare_ties_merge(
    base_path: AnyPath,
    finetuned_paths: Sequence[AnyPath],
    output_path: AnyPath,
    dare_drop_rate: float = 0.9,
    ties_keep_ratio: float = 0.5,
    lambda_coeff: float = 1.0,
    dtype: Any = "bfloat16",
    *,
    seed: int = 42,
    overwrite: bool = False,
    verbose: bool = True,
) -> Report: ...


def dare_ties_merge(*arguments: Any, **keywords: Any) -> Any:
    """Apply DARE, trim what is left, vote on signs and average.

    Two published forms share this name, and what is passed tells them apart:
    `dare_ties_merge([model, …], pretrained, drop_rate=0.9, density=0.2)` merges dicts of arrays,
    `dare_ties_merge(base_path, [path, …], output_path, dare_drop_rate=0.9, ties_keep_ratio=0.5)`
    merges files. Trimming counts the elements that DARE has kept. Each form has the default of its
    publication, 0.2 and 0.5; 1 trims nothing, as `method = "dare+ties"` in a recipe, `DareConfig`
    and `dare_merge(merge_method="ties")` do.
    """
    takes_files = "base_path" in keywords or isinstance((*arguments, None)[0], str | PathLike)
    form = get_overloads(dare_ties_merge)[takes_files]
    bound = inspect.signature(form).bind(*arguments, **keywords)
    bound.apply_defaults()
    given = bound.arguments
    rate, ratio = ("dare_drop_rate", "ties_keep_ratio") if takes_files else ("drop_rate", "density")
    tables = {"dare": {"drop_rate": given.pop(rate)}, "ties": {"keep_ratio": given.pop(ratio)}}
    if takes_files:
        return _merge_files(method="dare+ties", stages=_checked(tables), **given)
    return _merge(given["pretrained"], given["models"], "dare+ties", given["seed"], **tables)


def _merge_files(
    base_path: AnyPath,
    finetuned_paths: Sequence[AnyPath],
    output_path: AnyPath,
    lambda_coeff: float,
    **settings: Any,
) -> Report:
    """Merge as the published listings do: what a model lacks is unchanged, what it adds is left."""
    return _merge_and_print(
        base=base_path,
        models=finetuned_paths,
        output=output_path,
        scale=lambda_coeff,
        on_missing="base",
        on_extra="drop",
        **settings,
    )


def _merge_and_print(*, overwrite: bool, **fields: Any) -> Report:
    request = Request.of(**fields)
    report = merge(request, overwrite=overwrite)
    if request.options.verbose:
        print(replace(report, warnings=()))  # these have been issued
    return report


# ---------------------------------------------------------------- pieces


def _by_name(task_vectors: Sequence[Arrays]) -> Iterator[tuple[str, list[Any]]]:
    """Yield every name, in the order of first occurrence, and its arrays, all of one shape."""
    vectors = [named_arrays(vector, "task_vectors") for vector in task_vectors]
    for name in dict.fromkeys(name for vector in vectors for name in vector):
        arrays = [vector[name] for vector in vectors if name in vector]
        plain = [plain_array(array, name) for array in arrays]
        if len({array.shape for _, array in plain}) > 1:
            forms = ", ".join(f"{show_shape(array.shape)} {kind.name}" for kind, array in plain)
            raise MismatchError(f"{name}: has different shapes: {forms}")
        yield name, arrays


def _merge(
    base: Arrays, models: Sequence[Arrays], method: str, seed: int, **stages: dict[str, Any]
) -> dict[str, Any]:
    return merge_arrays(base, models, method=method, stages=_checked(stages), seed=seed)[0]


def _checked(stages: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return settings by stage; refuse None, because a recipe would take its default for it."""
    for table in stages.values():
        for name, value in table.items():
            if value is None:
                raise RecipeError(f"{name} = None: give a number, or leave it out for the default")
    return stages


def _seed(seed: int | None) -> int:
    return secrets.randbits(63) if seed is None else seed


def _as_floats(array: Any, name: str) -> NDArray[np.float32]:
    kind, _, raw = stored(array, name)
    if not kind.is_weight:
        raise InputError(f"{name}: {kind.name} is not a weight type")
    return decoded(raw.view(kind.carrier), "cpu")


def _as_original(original: Any, name: str, values: NDArray[np.float32] | None) -> Any:
    """Return flat float32 values, or zeros, as an array of the type and shape of `original`."""
    kind, shape, stored_bytes = stored(original, name)
    raw = np.zeros(stored_bytes.size // kind.itemsize, kind.carrier)
    if values is not None:
        kernel_backends.load("cpu").encode(values, raw)
    return like_original(original, TensorInfo(name, kind, shape, 0), raw.view(np.uint8))
