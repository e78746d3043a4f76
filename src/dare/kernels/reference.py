"""The kernels in plain NumPy: the definition of what each one computes.

Arrays are flat. `raw` and an encoded `out` hold carriers of a storage type (see `dare.dtypes`);
everything else is float32 unless a comment says otherwise. Functions write into their `out` (or
into the array they are named for) and return the figures that the report needs. Magnitudes are
compared as the low 31 bits of a float32, which order like the numbers, with NaN above infinity.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from dare import mask

Floats = NDArray[np.float32]
Raw = NDArray[Any]
Bits = NDArray[np.uint32]
Lanes = NDArray[np.uint8]

SUM_LANES = 64
_INFINITY = 0x7F800000

_MEANING: dict[str, np.dtype[Any]] = {
    "float64": np.dtype(np.float64),
    "float32": np.dtype(np.float32),
    "int16": np.dtype(np.float16),
    "uint16": np.dtype(ml_dtypes.bfloat16),
    "uint8": np.dtype(ml_dtypes.float8_e4m3fn),
    "int8": np.dtype(ml_dtypes.float8_e5m2),
}
"""What the values are that a carrier carries."""


@contextmanager
def announcing(_announce: Callable[[], None]) -> Iterator[None]:
    """Nothing is compiled here, so there is nothing to announce."""
    yield


def magnitude_bits(values: Floats) -> Bits:
    """Return |values| as integers that order like the magnitudes."""
    return values.view(np.uint32) & np.uint32(0x7FFFFFFF)


def _peak(values: Floats) -> int:
    return int(magnitude_bits(values).max(initial=0))


def decode(raw: Raw, out: Floats) -> None:
    """Widen (F64: round) stored elements to float32."""
    with np.errstate(over="ignore", invalid="ignore"):
        out[:] = raw.view(_MEANING[raw.dtype.name]).astype(np.float32)


def encode(values: Floats, out: Raw) -> int:
    """Round to the storage type, to nearest even; return the largest magnitude's bits.

    Every NaN becomes the type's positive quiet NaN, because machines differ in the ones they make.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        quiet = np.where(np.isnan(values), np.float32(np.nan), values)
        out[:] = quiet.astype(_MEANING[out.dtype.name]).view(out.dtype)
    return _peak(values)


def delta(
    raw: Raw, base: Floats, lanes: Lanes, out: Floats, threshold_bits: int
) -> tuple[int, int]:
    """out = tuned - base where the lane is set, else zero.

    Returns the bits of the largest magnitude and how many exceed the threshold, dropped elements
    included.
    """
    difference = np.empty_like(base)
    decode(raw, difference)
    with np.errstate(invalid="ignore", over="ignore"):
        difference -= base
    out[:] = np.where(lanes[: base.size] != 0, difference, np.float32(0))
    found = magnitude_bits(difference)
    return int(found.max(initial=0)), int((found > threshold_bits).sum())


def weighted_delta(
    raw: Raw, base: Floats, lanes: Lanes, weight: np.float32, out: Floats, threshold_bits: int
) -> tuple[int, int]:
    """out = weight·delta, in one go: `delta` and then `scaled`."""
    figures = delta(raw, base, lanes, out, threshold_bits)
    scaled(out, weight, out)
    return figures


def add_delta(
    raw: Raw, base: Floats, lanes: Lanes, weight: np.float32, total: Floats, threshold_bits: int
) -> tuple[int, int]:
    """total += weight·delta, in one go: `delta` and then `add_scaled`."""
    difference = np.empty_like(base)
    figures = delta(raw, base, lanes, difference, threshold_bits)
    add_scaled(total, difference, weight)
    return figures


def add_to_base(raw: Raw, base: Floats, merged: Floats, scale: np.float32, out: Raw) -> int:
    """out = base + scale·merged in the base's own type; where merged is zero, the base's bytes.

    Returns the bits of the largest magnitude before rounding.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        values = base + scale * merged
    encode(values, out)
    out[merged == 0] = raw[merged == 0]
    return _peak(values)


def add_to_base_as(base: Floats, merged: Floats, scale: np.float32, out: Raw) -> int:
    """out = base + scale·merged in another type; where merged is zero, the base rounded."""
    with np.errstate(invalid="ignore", over="ignore"):
        values = np.where(merged == 0, base, base + scale * merged)
    return encode(values, out)


def count_exceptions(
    base: Floats, merged: Floats, scale: np.float32, overflow_bits: int
) -> tuple[int, int]:
    """Count results too large for the output type, infinities included, and those that are NaN."""
    with np.errstate(invalid="ignore", over="ignore"):
        found = magnitude_bits(base + scale * merged)
    return (
        int(((found >= overflow_bits) & (found <= _INFINITY)).sum()),
        int((found > _INFINITY).sum()),
    )


def draw(lanes: Lanes, size: int, start: int, key0: int, key1: int, high: int, low: int) -> int:
    """Set the lanes of the kept elements among start … start + size; return how many.

    `high` (8 bits) and `low` (32 bits) make up the keep threshold. A lane is 255 where the element
    is kept and 0 where it is dropped or beyond `size`. There are a multiple of 4096 lanes, at
    least `size`; `start` is a multiple of 16.
    """
    keep = mask.keep_lanes((int(key0), int(key1)), size, high, int(low), start)
    lanes[:] = 0
    lanes[:size][keep] = 255
    return int(np.count_nonzero(keep))


def keep_lanes(values: Floats, lanes: Lanes) -> int:
    """Zero the values whose lane is not set; return how many are left that are not zero."""
    values[lanes[: values.size] == 0] = 0
    return int(np.count_nonzero(values))


def magnitudes(values: Floats, out: Bits) -> int:
    """Gather the magnitude bits of the elements that are not zero; return how many."""
    found = magnitude_bits(values)
    found = found[found != 0]
    out[: found.size] = found
    return int(found.size)


def count_high(found: Bits, counts: NDArray[np.int64]) -> None:
    """counts[m >> 15] += 1 for every magnitude m."""
    counts += np.bincount(found >> np.uint32(15), minlength=counts.size)


def count_low(found: Bits, high: int, counts: NDArray[np.int64]) -> None:
    """counts[m & 0x7fff] += 1 for every magnitude m whose upper bits are `high`."""
    low = found[found >> np.uint32(15) == high] & np.uint32(0x7FFF)
    counts += np.bincount(low, minlength=counts.size)


def count_equal(found: Bits, cut: int) -> int:
    """Count the magnitudes that equal `cut`."""
    return int((found == cut).sum())


def trim(values: Floats, cut: int, ties_kept: int) -> int:
    """Zero magnitudes below `cut`, and those equal to it but for the first `ties_kept`.

    Returns how many elements are kept.
    """
    found = magnitude_bits(values)
    keep = found > cut
    keep[np.flatnonzero(found == cut)[:ties_kept]] = True
    values[~keep] = 0
    return int(keep.sum())


def scaled(values: Floats, weight: np.float32, out: Floats) -> None:
    """out = weight·values."""
    with np.errstate(invalid="ignore", over="ignore"):
        out[:] = weight * values


def add_scaled(total: Floats, values: Floats, weight: np.float32) -> None:
    """total += weight·values."""
    with np.errstate(invalid="ignore", over="ignore"):
        total += weight * values


def vote(
    above: Floats,
    below: Floats,
    above_share: Floats,
    below_share: Floats,
    values: Floats,
    weight: np.float32,
    share: np.float32,
) -> None:
    """Add weight·values to the sum of its sign, and `share` to that sign's divisor."""
    with np.errstate(invalid="ignore", over="ignore"):
        value = weight * values
        nan = np.isnan(value)
        above += np.where((value > 0) | nan, value, np.float32(0))
        below += np.where((value < 0) | nan, value, np.float32(0))
    above_share += np.where(value > 0, share, np.float32(0))
    below_share += np.where(value < 0, share, np.float32(0))


def elect(above: Floats, below: Floats, above_share: Floats, below_share: Floats) -> None:
    """above = the mean of the side that outweighs the other; zero where neither does."""
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        total = above + below
        mean = np.where(total > 0, above / above_share, below / below_share)
        above[:] = np.where((total > 0) | (total < 0), mean, np.where(np.isnan(total), total, 0))


def _lane_sum(terms: NDArray[np.float64]) -> float:
    """Sum in a fixed order: SUM_LANES interleaved sums, then those from first to last."""
    rows = np.zeros((-(-terms.size // SUM_LANES), SUM_LANES))
    rows.reshape(-1)[: terms.size] = terms
    lanes = np.zeros(SUM_LANES)
    for row in rows:
        lanes += row
    return float(sum(lanes.tolist(), start=0.0))


def sum_magnitudes(values: Floats) -> float:
    """Σ|values| in float64, in a fixed order."""
    return _lane_sum(np.abs(values).astype(np.float64))


def sum_products(left: Floats, right: Floats) -> float:
    """Σ left·right in float64, in a fixed order."""
    return _lane_sum(left.astype(np.float64) * right.astype(np.float64))


def add_onto(base: Floats, values: Floats, factor: np.float32, out: Floats) -> None:
    """out = base + factor·values."""
    out[:] = base + factor * values
