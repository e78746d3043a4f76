"""Choose a drop rate and bits from a size or an error, before anything is stored.

Of values δ that are kept, v̂ is stored, with a fair scale: Σδ·v̂ = Σδ², and Σv̂² = b·Σδ². With a
share s = 1 - p of the elements kept by chance, and divided by s,

    E‖δ̂ - δ‖²/‖δ‖² = b/s - 1

Stored as it is, b = 1 and this is p/(1 - p), as in the analysis. What b is for so many bits is
measured, by rounding a part of the real change. If the largest are kept, s is their share of ‖δ‖²,
and the error is the same; but native values are not divided, and then it is 1 - s.

The error of a model is √(Σ error·‖δ‖² / Σ‖w‖²) over the tensors of both, which for values as they
are is the output error that `dare analyze` foretells.

Four million elements are looked at, in places that are spread over each tensor, and all of a small
one: half a second for a billion parameters. What a tensor takes in the file does not depend on
that. Only where it seems unchanged, and would take nothing, it is compared to its end. Norms of a
whole model come out right to a few per cent, but a change that is in few rows of a large tensor
can be missed in part.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache, reduce

import numpy as np
from numpy.typing import NDArray

from dare import kernels
from dare.analysis.measure.analyzing import find_subjects
from dare.analysis.measure.spectra import spread
from dare.deltas.schemes import BITS, Bits, Keep, Scheme
from dare.errors import RecipeError
from dare.inputs.reading import decoded, read_chunks
from dare.inputs.sources import Source
from dare.kernels.reference import SCALE_GROUP, places_nbytes
from dare.tensors.chunks import CHUNK
from dare.tensors.header import TensorInfo
from dare.tensors.sizes import show_size

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]

SCALE_BYTES, INDEX_BYTES = 2, 24
"""Of a group, and of a chunk."""
TENSOR_BYTES, PART_BYTES, PAGE_BYTES = 230, 90, 4096
"""About what a header says of a tensor and of each of its parts, names not counted; and what it is
filled up to."""
RATES = (*(step / 100 for step in range(100)), 0.995, 0.999)
HIGHEST = 0.99
"""The highest rate for the sake of an error; those above it are for sizes that allow no other."""
DEVIATIONS = 3
"""Standard deviations that a file may be larger than expected and still fit."""

PLACE, MOST, LEAST = 1024, 1 << 16, 1 << 12
"""Elements that are read together, and of a tensor at the most and at the least."""
ALTOGETHER = 1 << 22
"""About how many elements are looked at, of all tensors."""
ROUNDED_RATES = (0.0, 0.5, 0.8, 0.9, 0.95, 0.99)
"""Drop rates at which rounding is measured; it changes little in between."""
FEWEST = 2 * SCALE_GROUP
"""Values that rounding is measured on at the least, if there are as many."""

Alike = Mapping[tuple[int, int, int, float | None], int]
"""How many tensors have such a long name, so many elements of so many bytes, and which drop rate if
it is fixed."""


@dataclass(frozen=True)
class Candidate:
    """A drop rate and bits, and what they are expected to bring."""

    drop_rate: float
    bits: Bits
    predicted_bytes: int
    spare_bytes: int
    """By how much the file may turn out larger, because what is kept is drawn."""
    predicted_error: float
    """Of the layers' outputs, relative to the base's."""

    @property
    def most_bytes(self) -> int:
        """What the file takes at the most."""
        return self.predicted_bytes + self.spare_bytes

    def __str__(self) -> str:
        """The settings alone."""
        return f"drop rate {self.drop_rate:g}, {self.bits} bits"


@dataclass(frozen=True)
class Choice:
    """How to store a fine-tune, and what to expect."""

    scheme: Scheme
    predicted_bytes: int
    predicted_error: float
    table: tuple[Candidate, ...]
    """The best for each number of bits that can meet the target."""
    target_size: int | None = None
    target_error: float | None = None


def choose(
    base: Source,
    model: Source,
    *,
    keep: Keep = "random",
    target_size: int | None = None,
    target_error: float | None = None,
    bits: Bits | None = None,
    fixed_rates: Mapping[str, float] | None = None,
) -> Choice:
    """The least error that fits a size, or the fewest bytes within an error.

    `fixed_rates` are drop rates of tensors that are not to be chosen. RecipeError if the target
    cannot be met.
    """
    if (target_size is None) == (target_error is None):
        raise RecipeError("give a target size or a target error, not both")
    considered = BITS if bits is None else (bits,)
    found = _consider(base, model, keep, considered, fixed_rates or {})
    if target_size is not None:
        best = _within_size(found, target_size)
    else:
        best = _within_error(found, target_error or 0.0)
    first = best[0]
    scheme = Scheme(first.drop_rate, first.bits, keep)
    expected = first.predicted_bytes, first.predicted_error
    return Choice(scheme, *expected, tuple(best), target_size, target_error)


def _within_size(found: Iterable[Candidate], target: int) -> list[Candidate]:
    """The least error of each number of bits that fits a size, the best first."""
    by_error = sorted(found, key=lambda c: (c.predicted_error, c.most_bytes))
    if fitting := [c for c in by_error if c.most_bytes <= target]:
        return _first_of_each(fitting)
    smallest = min(by_error, key=lambda c: c.most_bytes)
    raise RecipeError(
        f"target size of {show_size(target)}: too small; the smallest file takes "
        f"up to {show_size(smallest.most_bytes)} ({smallest}); allow "
        f"{smallest.most_bytes} bytes or more"
    )


def _within_error(found: Iterable[Candidate], target: float) -> list[Candidate]:
    """The fewest bytes of each number of bits that keep to an error, the best first."""
    by_size = sorted(found, key=lambda c: (c.predicted_bytes, c.predicted_error))
    usual = [c for c in by_size if c.drop_rate <= HIGHEST]
    if fitting := [c for c in usual if c.predicted_error <= target]:
        return _first_of_each(fitting)
    best = min(usual, key=lambda c: c.predicted_error)
    raise RecipeError(
        f"target error of {target:g}: too small; the smallest error is about "
        f"{best.predicted_error:.2g} ({best}); allow that much, or use "
        "--lossless, which has no error"
    )


def _first_of_each(candidates: Iterable[Candidate]) -> list[Candidate]:
    best: dict[Bits, Candidate] = {}
    for candidate in candidates:
        best.setdefault(candidate.bits, candidate)
    return list(best.values())


def _consider(
    base: Source,
    model: Source,
    keep: Keep,
    considered: tuple[Bits, ...],
    fixed_rates: Mapping[str, float],
) -> list[Candidate]:
    """All rates with all bits, from a look at every tensor."""
    squares = {bits: np.zeros(len(RATES)) for bits in considered}
    base_squares = 0.0
    changed = []
    for look in look_at_all(base, model):
        base_squares += look.base_squares
        if look.squares:
            changed.append(look.tensor)
            fixed = fixed_rates.get(look.tensor.name)
            rates = np.array(RATES if fixed is None else (fixed,))
            errors = expected_errors(look.values, rates, keep, considered)
            for bits in considered:
                squares[bits] += look.squares * errors[bits]
    alike = _alike(changed, fixed_rates)
    return [
        Candidate(rate, bits, *_size(alike, Scheme(rate, bits, keep)), _ratio(error, base_squares))
        for bits in considered
        for rate, error in zip(RATES, squares[bits].tolist(), strict=True)
    ]


def _ratio(squares: float, base_squares: float) -> float:
    if base_squares:
        return math.sqrt(squares / base_squares)
    return math.inf if squares else 0.0


# ---------------------------------------------------------------- sizes


def predicted_bytes(
    changed: Iterable[TensorInfo], scheme: Scheme, fixed_rates: Mapping[str, float] | None = None
) -> int:
    """About what a file takes that holds what is kept of the change of these tensors.

    >>> from dare.tensors.dtypes import STORAGE_TYPES
    >>> layer = TensorInfo("w", STORAGE_TYPES["BF16"], (100, 100), 0)
    >>> predicted_bytes([layer], Scheme(0.9)), predicted_bytes([layer], Scheme(0.9, 4))
    (6442, 5041)
    """
    return _size(_alike(changed, fixed_rates or {}), scheme)[0]


def _alike(changed: Iterable[TensorInfo], fixed_rates: Mapping[str, float]) -> Alike:
    return Counter(
        (len(t.name.encode()), t.elements, t.dtype.itemsize, fixed_rates.get(t.name))
        for t in changed
    )


def _size(alike: Alike, scheme: Scheme) -> tuple[int, int]:
    """The expected bytes, and by how much they may be more."""
    expected, variance = PAGE_BYTES, 0.0
    parts = 1 + (scheme.bits != "native") + (scheme.keep == "magnitude")
    for (name, elements, itemsize, fixed), count in alike.items():
        rate = scheme.drop_rate if fixed is None else fixed
        whole, rest = divmod(elements, CHUNK)
        chunks = whole * _chunk_bytes(CHUNK, itemsize, rate, scheme)
        chunks += _chunk_bytes(rest, itemsize, rate, scheme) if rest else 0
        said = TENSOR_BYTES + name + parts * (PART_BYTES + name)
        expected += count * (said + chunks)
        if scheme.keep == "random":
            each = (
                itemsize if scheme.bits == "native" else scheme.bits / 8 + SCALE_BYTES / SCALE_GROUP
            )
            variance += count * elements * rate * (1 - rate) * each**2
    return expected, math.ceil(DEVIATIONS * math.sqrt(variance))


def _chunk_bytes(elements: int, itemsize: int, drop_rate: float, scheme: Scheme) -> int:
    kept = round((1 - drop_rate) * elements)
    nbytes = INDEX_BYTES
    if scheme.bits == "native":
        nbytes += kept * itemsize
    else:
        nbytes += -(-kept * scheme.bits // 8) + SCALE_BYTES * -(-kept // SCALE_GROUP)
    if scheme.keep == "magnitude":
        nbytes += places_nbytes(elements, kept)
    return nbytes


# ---------------------------------------------------------------- errors


def expected_errors(
    values: Floats, rates: Doubles, keep: Keep, considered: Iterable[Bits]
) -> dict[Bits, Doubles]:
    """E‖δ̂ - δ‖²/‖δ‖² at drop rates, of a change that is like these values; not all are zero.

    >>> change, rates = np.ones(8, np.float32), np.array([0, 0.5, 0.75])
    >>> expected_errors(change, rates, "random", ["native"])
    {'native': array([0., 1., 3.])}
    """
    measured = [p for p in ROUNDED_RATES if not p or (1 - p) * values.size >= FEWEST]
    if keep == "random":
        parts, share = _keep_by_chance(values, measured), 1 - rates
    else:
        parts, share = _keep_largest(values, measured), share_of_largest(values, 1 - rates)
    squares = [_dot(part, part) or 1.0 for part in parts]
    errors: dict[Bits, Doubles] = {}
    for bits in considered:
        if bits == "native":
            errors[bits] = 1 / share - 1 if keep == "random" else 1 - share
            continue
        stored = [rounded(part, bits) for part in parts]
        b = np.interp(rates, measured, np.array([*map(_dot, stored, stored)]) / squares)
        errors[bits] = np.maximum(b / share - 1, 0.0)
    return errors


def rounded(values: Floats, bits: int) -> Floats:
    """What values are after they were stored in so many bits."""
    run = kernels.load("cpu")
    codes = np.empty(-(-values.size * bits // 8), np.uint8)
    scales = np.empty(-(-values.size // SCALE_GROUP), np.uint16)
    run.quantise(np.ascontiguousarray(values), bits, codes, scales)
    stored = np.empty(values.size, np.float32)
    run.dequantise(codes, scales, bits, stored)
    return stored


def _keep_by_chance(values: Floats, drop_rates: Iterable[float]) -> list[Floats]:
    """What would be kept at each rate, in order."""
    return [values[_draw(values.size, rate)] for rate in drop_rates]


@lru_cache(maxsize=64)
def _draw(size: int, drop_rate: float) -> NDArray[np.intp]:
    """Places of elements that are kept; most tensors have one of a few sizes."""
    return np.flatnonzero(np.random.default_rng(0).random(size, np.float32) < 1 - drop_rate)


def _keep_largest(values: Floats, drop_rates: Iterable[float]) -> list[Floats]:
    """The same, of those that are not zero, if the largest are kept."""
    magnitudes = np.abs(values)
    falling = np.sort(magnitudes)[::-1]
    cuts = [falling[max(1, int((1 - rate) * values.size)) - 1] for rate in drop_rates]
    return [values[(magnitudes >= cut) & (magnitudes > 0)] for cut in cuts]


def share_of_largest(values: Floats, kept: Doubles) -> Doubles:
    """The share of Σδ² that is in so large a share of the values, the largest ones.

    >>> share_of_largest(np.array([1, -2, 0, 2], np.float32), np.array([0.25, 0.5, 0.75, 1]))
    array([0.44444444, 0.88888889, 1.        , 1.        ])
    """
    held = np.cumsum(-np.sort(-np.square(values, dtype=np.float64)))
    counts = np.arange(values.size + 1)
    shares: Doubles = np.interp(kept * values.size, counts, np.append(0.0, held / held[-1]))
    return shares


def _dot(left: Floats, right: Floats) -> float:
    return float(np.multiply(left, right, dtype=np.float64).sum())


# ---------------------------------------------------------------- the look


@dataclass(frozen=True)
class Look:
    """What is known of a tensor's change."""

    tensor: TensorInfo
    """The model's."""
    squares: float
    """About ‖δ‖²; 0 only if nothing is changed."""
    base_squares: float
    values: Floats
    """Some of δ, in order."""


def look_at_all(base: Source, model: Source) -> Iterator[Look]:
    """Look at the tensors that both have."""
    subjects = [s for s in find_subjects(base, {"the model": model})[0] if s.models]
    most = min(max(ALTOGETHER // len(subjects), LEAST), MOST)
    with base, model:
        for subject in subjects:
            yield _look(base, model, subject.name, most)


def _look(base: Source, model: Source, name: str, most: int) -> Look:
    tensor = model.tensors[name]
    weights, values = (read_places(source, name, most) for source in (base, model))
    if not model.holds_delta(name):
        values -= weights
    values[~np.isfinite(values)] = 0
    scale = tensor.elements / max(values.size, 1)
    squares, base_squares = scale * _dot(values, values), scale * _dot(weights, weights)
    if not squares and scale > 1:
        squares, values = _search(base, model, name)
    return Look(tensor, squares, base_squares, values)


def read_places(source: Source, name: str, most: int) -> Floats:
    """Evenly spread elements of a tensor, or all of them if they are no more than `most`."""
    info = source.tensors[name]
    if info.elements <= most:
        raw = np.empty((1, info.elements), info.dtype.carrier)
        starts = [0]
    else:
        starts = [PLACE * place for place in spread(info.elements // PLACE, most // PLACE)]
        raw = np.empty((len(starts), PLACE), info.dtype.carrier)
    for start, into in zip(starts, raw, strict=True):
        source.read(name, start, into)
    return decoded(raw).reshape(-1)


def _search(base: Source, model: Source, name: str) -> tuple[float, Floats]:
    """‖δ‖² and the first chunk that is changed, of a tensor that seems unchanged."""
    sources = [model] if model.holds_delta(name) else [model, base]
    squares, values = 0.0, np.zeros(0, np.float32)
    for _, stored in read_chunks(sources, name):
        first, *others = stored
        if others and first.dtype == others[0].dtype and np.array_equal(first, others[0]):
            continue
        delta = reduce(np.subtract, map(decoded, stored))
        delta[~np.isfinite(delta)] = 0
        if found := _dot(delta, delta):
            values = values if squares else delta
            squares += found
    return squares, values
