"""Recognise a fine-tune that is better kept as an adapter than as a delta file.

A LoRA that was merged into the weights changes each of its matrices by one of low rank. A window of
a matrix tells (`dare.analysis.measure.spectra`): few directions stand out, and what is left has no
more energy than rounding to the model's storage type may bring. A change that was trained in full
and falls off fast can look the same in BF16. So elements are asked too: rounded, the change of
low rank has to give nearly every changed weight that is stored.

Up to ten matrices are asked, spread over the model, and nine in ten have to agree. A LoRA is not
found if its rank is above 128 or half of a matrix's shorter side, if that side is under 32, if
weights are stacked in three dimensions, or if rounding took most of it (in BF16, if fewer than one
weight in four is changed). Directions under the noise of rounding do not count in the rank.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from functools import reduce

import numpy as np
from numpy.typing import NDArray

from dare.analysis.measure.analyzing import NEARLY_ALL, find_subjects
from dare.analysis.measure.spectra import (
    SMALLEST,
    rounding_energy,
    spectrum_of,
    spread,
    window_of,
    without_spikes,
)
from dare.deltas.choosing import read_places
from dare.inputs.lora import CONFIG_NAME
from dare.inputs.reading import read_floats
from dare.inputs.sources import Source
from dare.kernels.linalg import one_blas_thread
from dare.tensors.dtypes import StorageType
from dare.tensors.header import TensorInfo
from dare.tensors.names import is_embedding
from dare.tensors.sizes import show_size, times

Floats = NDArray[np.float32]

MATRICES = 10
"""How many are looked at, at the most."""
LOOKED_AT = 4096
"""Elements of a tensor by which it is known whether it is changed."""
NEGLIGIBLE = 1e-4
"""Share of a change's energy that needs no explanation."""
SLACK = 1.25
"""How many half steps of rounding an element may be off, because the low rank is an estimate."""
ROUNDS, STRIDE = 8, 3
"""How often the estimate is made better, and how far it goes: most is taken back each time."""
STORED_BYTES = 2
"""Of an element in BF16."""


@dataclass(frozen=True)
class LowRank:
    """A fine-tune that looks like a LoRA that was merged into its base."""

    rank: int
    """The largest that was seen."""
    matrices: int
    """How many are changed."""
    others: int
    """Changed tensors that are no matrices of layers: norms, biases, embeddings, the head."""
    adapter_bytes: int
    """About what an adapter takes in BF16, with the others in full."""

    def advice(self, base: str, model: str, output: str) -> str:
        """What to tell someone who is about to compress the model, with the command to type."""
        command = ["dare", "lora", "extract", "--base", base, "--model", model, "--output", output]
        command += ["--rank", str(self.rank), "--dtype", "BF16"]
        command += ["--save-others"] if self.others else []
        others = f" and {times(self.others, 'other tensor')}" if self.others else ""
        return (
            f"{model}: looks like a LoRA of rank {self.rank} that was merged into its base; an "
            f"adapter of {times(self.matrices, 'matrix', 'matrices')}{others} takes about "
            f"{show_size(self.adapter_bytes)}: {shlex.join(command)}"
        )


def recognise_lora(base: Source, model: Source) -> LowRank | None:
    """What an adapter would be, if the change of nearly every matrix has a low rank."""
    subjects, _ = find_subjects(base, {"the model": model})
    with base, model, one_blas_thread():
        changed = [s.base for s in subjects if s.models and _is_changed(base, model, s.name)]
        layers = [t for t in changed if len(t.shape) == 2 and not is_embedding(t.name)]
        telling = [tensor for tensor in layers if min(tensor.shape) >= SMALLEST]
        chosen = [telling[place] for place in spread(len(telling), MATRICES)] if telling else []
        ranks: list[int] = []
        for seen, tensor in enumerate(chosen, start=1):
            rank = low_rank_of(base, model, tensor)
            ranks += [] if rank is None else [rank]
            if len(chosen) - (seen - len(ranks)) < NEARLY_ALL * len(chosen):
                return None  # whatever the others are
    if not ranks:
        return None
    largest = max(ranks)
    elements = sum(min(largest, *layer.shape) * sum(layer.shape) for layer in layers)
    others = [tensor for tensor in changed if tensor not in layers]
    elements += sum(tensor.elements for tensor in others)
    return LowRank(largest, len(layers), len(others), STORED_BYTES * elements)


def describe_adapter(model: Source) -> str | None:
    """What to tell someone who is about to compress an adapter; None if the model is none."""
    if not any(file.name == CONFIG_NAME for file in model.files):
        return None
    size = sum(file.stat().st_size for file in model.files)
    return f"it is already stored as an adapter, which takes {show_size(size)}; keep it as it is"


def _is_changed(base: Source, model: Source, name: str) -> bool:
    values = read_places(model, name, LOOKED_AT)
    unchanged = 0 if model.holds_delta(name) else read_places(base, name, LOOKED_AT)
    return bool((values != unchanged).any())


def low_rank_of(base: Source, model: Source, tensor: TensorInfo) -> int | None:
    """The rank of a matrix's change, if it is low and explains the change."""
    is_delta = model.holds_delta(tensor.name)
    sources = [model] if is_delta else [model, base]
    tuned, *weights = (_read_window(source, tensor) for source in sources)
    delta = reduce(np.subtract, [tuned, *weights])
    if not np.isfinite(delta).all():
        return None
    stored = model.tensors[tensor.name].dtype
    spectrum = spectrum_of(delta, 0.0 if is_delta else rounding_energy(weights[0], stored.name))
    if spectrum is None or spectrum.low_rank is None:
        return None
    clean, _ = without_spikes(delta)
    is_explained = explains(spectrum.low_rank, clean, tuned, stored, clean == delta)
    return spectrum.low_rank if is_explained else None


def explains(
    rank: int, delta: Floats, tuned: Floats, stored: StorageType, known: NDArray[np.bool_]
) -> bool:
    """Whether nearly all weights that changed are what rounding makes of a change of this rank.

    The strongest directions of what is stored are those of the change with noise. What is farther
    off than half a step is moved there, the strongest directions are taken again, and so on, until
    they explain enough. What is not known of the delta is what these directions make of it.
    """
    if delta.shape[0] > delta.shape[1]:
        delta, tuned, known = delta.T, tuned.T, known.T
    _, exponents = np.frexp(tuned)
    half_steps = np.ldexp(np.float32(1), exponents - 2 - stored.mantissa_bits)
    wide = delta.astype(np.float64)
    directions = np.linalg.eigh(wide @ wide.T)[1][:, -rank:].astype(np.float32)
    low = directions @ (directions.T @ delta)
    for _ in range(ROUNDS):
        gap = np.where(known, delta - low, np.float32(0))
        if _squares(gap) <= NEGLIGIBLE * _squares(delta):
            return True
        is_changed = (delta != 0) | (np.abs(low) > SLACK * half_steps)
        if (np.abs(gap) <= SLACK * half_steps)[is_changed].mean() >= NEARLY_ALL:
            return True
        moved = low + STRIDE * (gap - np.clip(gap, -half_steps, half_steps))
        directions = np.linalg.qr(moved @ (moved.T @ directions))[0]
        low = directions @ (directions.T @ moved)
    return False


def _squares(values: Floats) -> float:
    return float(np.square(values, dtype=np.float64).sum())


def _read_window(source: Source, tensor: TensorInfo) -> Floats:
    height, width = tensor.shape
    window = window_of((height, width), whole=False)
    runs = (
        read_floats(source, tensor.name, first * width, rows * width).reshape(rows, width)
        for first, rows in window.runs
    )
    return np.concatenate([run[:, window.columns] for run in runs])
