"""The kernels in plain NumPy: the definition of what each one computes.

Arrays are flat. `raw` and an encoded `out` hold carriers of a storage type (see `dare.dtypes`);
everything else is float32 unless a comment says otherwise. Functions write into their `out` (or
into the array they are named for) and return the figures that the report needs. Magnitudes are
compared as the low 31 bits of a float32, which order like the numbers, with NaN above infinity.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from dare import mask
from dare.kernels import Part

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


def add_to_base(raw: Raw, merged: Floats, scale: np.float32, out: Raw) -> int:
    """out = base + scale·merged in the base's own type; where merged is zero, the base's bytes.

    Returns the bits of the largest magnitude before rounding.
    """
    values = _moved(raw, merged, scale)
    encode(values, out)
    out[merged == 0] = raw[merged == 0]
    return _peak(values)


def add_to_base_as(raw: Raw, merged: Floats, scale: np.float32, out: Raw) -> int:
    """out = base + scale·merged in another type; where merged is zero, the base rounded."""
    base = np.empty(raw.size, np.float32)
    decode(raw, base)
    return encode(np.where(merged == 0, base, _moved(raw, merged, scale)), out)


def count_exceptions(
    raw: Raw, merged: Floats, scale: np.float32, overflow_bits: int
) -> tuple[int, int]:
    """Count results too large for the output type, infinities included, and those that are NaN."""
    found = magnitude_bits(_moved(raw, merged, scale))
    return (
        int(((found >= overflow_bits) & (found <= _INFINITY)).sum()),
        int((found > _INFINITY).sum()),
    )


def _moved(raw: Raw, merged: Floats, scale: np.float32) -> Floats:
    base = np.empty(raw.size, np.float32)
    decode(raw, base)
    with np.errstate(invalid="ignore", over="ignore"):
        return base + scale * merged


def draw(lanes: Lanes, size: int, start: int, key0: int, key1: int, high: int, low: int) -> int:
    """Set the lanes of the kept elements among start … start + size; return how many.

    `high` (8 bits) and `low` (32 bits) make up the keep threshold. A lane is 255 where the element
    is kept and 0 where it is dropped or beyond `size`. There are a multiple of LANES_MULTIPLE
    lanes, at least `size`; `start` is a multiple of 128.
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


def gather(raw: Raw, base: Floats, lanes: Lanes, out: Bits) -> int:
    """`magnitudes` of a delta that has not been taken yet, by the lanes that are set."""
    values = np.empty_like(base)
    delta(raw, base, lanes, values, 0)
    return magnitudes(values, out)


def keep_largest(values: Floats, least: int) -> int:
    """Zero magnitudes below `least`; return how many are kept."""
    keep = magnitude_bits(values) >= least
    values[~keep] = 0
    return int(keep.sum())


def trim(values: Floats, cut: int, ties_kept: int) -> int:
    """Zero magnitudes below `cut`, and those equal to it but for the first `ties_kept`.

    Returns how many elements are kept.
    """
    found = magnitude_bits(values)
    keep = found > cut
    keep[np.flatnonzero(found == cut)[:ties_kept]] = True
    values[~keep] = 0
    return int(keep.sum())


def add_scaled(total: Floats, values: Floats, weight: np.float32) -> None:
    """total += weight·values."""
    with np.errstate(invalid="ignore", over="ignore"):
        total += weight * values


def vote(sums: Floats, values: Floats, weight: np.float32, share: np.float32) -> None:
    """Add weight·values to the sum of its sign, and `share` to that sign's divisor.

    `sums` are four rows: positive terms, negative terms, and the divisors of both. A NaN goes into
    both sums.
    """
    above, below, above_share, below_share = sums.reshape(4, -1)
    with np.errstate(invalid="ignore", over="ignore"):
        value = weight * values
        above += np.where(value < 0, np.float32(0), value)
        below += np.where(value > 0, np.float32(0), value)
    above_share += np.where(value > 0, share, np.float32(0))
    below_share += np.where(value < 0, share, np.float32(0))


def elect(sums: Floats, out: Floats) -> None:
    """out = the mean of the side that outweighs the other; zero where neither does.

    A side without shares is not divided.
    """
    above, below, above_share, below_share = sums.reshape(4, -1)
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        total = above + below
        side = np.where(total > 0, above, below)
        share = np.where(total > 0, above_share, below_share)
        mean = side / np.where(share == 0, np.float32(1), share)
    out[:] = np.where(total == 0, np.float32(0), np.where(np.isnan(total), total, mean))


def combine(
    base: Raw,
    parts: Sequence[Part],
    start: int,
    elects: bool,
    threshold_bits: int,
    out: Floats,
) -> NDArray[np.int64]:
    """Take all models' deltas, drop, keep the largest, and add up or elect.

    Returns for each model the bits of the largest magnitude, the count over the threshold, and how
    many elements the mask and then `least` have kept.
    """
    origin = np.empty(base.size, np.float32)
    decode(base, origin)
    sums = np.zeros(4 * base.size, np.float32)
    out[:] = 0
    figures = np.zeros((len(parts), 4), np.int64)
    for part, found in zip(parts, figures, strict=True):
        lanes = np.full(base.size, 255, np.uint8)
        found[2] = base.size
        if part.mask is not None:
            key0, key1, high, low = part.mask
            found[2] = draw(lanes, base.size, start, key0, key1, high, low)
        values = np.empty_like(origin)
        found[:2] = delta(part.tuned, origin, lanes, values, threshold_bits)
        if part.least:
            found[3] = keep_largest(values, part.least)
        if elects:
            vote(sums, values, part.weight, np.float32(part.share))
        else:
            add_scaled(out, values, part.weight)
    if elects:
        elect(sums, out)
    return figures


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


def low_rank(left: Floats, right: Floats, first: int, scale: np.float32, out: Floats) -> None:
    """Elements of scale·(left·right) from index `first` on, summed in the order of the rank.

    `left` is rows × rank, `right` is rank × columns.
    """
    columns = right.shape[1]
    start, end = first // columns, -(-(first + out.size) // columns)
    total = np.zeros((end - start, columns), np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        for number, row in enumerate(right):
            total += left[start:end, number, None] * row
        total *= scale
    out[:] = total.reshape(-1)[first - start * columns :][: out.size]
