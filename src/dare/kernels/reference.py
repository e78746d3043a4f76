"""The kernels in plain NumPy: the definition of what each one computes.

Arrays are flat. `raw` and an encoded `out` hold carriers of a storage type (see `tensors.dtypes`);
everything else is float32 unless a comment says otherwise. Functions write into their `out` (or
into the array they are named for) and return the figures that the report needs. Magnitudes are
compared as the low 31 bits of a float32, which order like the numbers, with NaN above infinity.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dare.kernels import ChunkJob, Done, Operand
from dare.tensors import mask
from dare.tensors.chunks import bytes_digest, chunk_count, chunk_spans
from dare.tensors.dtypes import WEIGHT_TYPES

Floats = NDArray[np.float32]
Raw = NDArray[Any]
Bits = NDArray[np.uint32]
Lanes = NDArray[np.uint8]
Integers = NDArray[np.int32]
Doubles = NDArray[np.float64]

SUM_LANES = 64

# The type of the values in a carrier.
_MEANING = {kind.carrier.name: kind.numpy_type for kind in WEIGHT_TYPES}


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
    magnitudes = magnitude_bits(difference)
    return int(magnitudes.max(initial=0)), int((magnitudes > threshold_bits).sum())


def add_to_base(raw: Raw, merged: Floats, scale: np.float32, out: Raw) -> int:
    """out = base + scale·merged, in the base's type or another.

    Where merged is zero it is the base: its bytes, or in another type rounded. Returns the bits of
    the largest magnitude before rounding.
    """
    base = np.empty(raw.size, np.float32)
    decode(raw, base)
    with np.errstate(invalid="ignore", over="ignore"):
        values = np.where(merged == 0, base, base + scale * merged)
    encode(values, out)
    if raw.dtype == out.dtype:
        out[merged == 0] = raw[merged == 0]
    return _peak(values)


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


def collect_keys(
    raw: Raw,
    base: Raw,
    lanes: Lanes,
    low: int,
    high: int,
    start: int,
    keys: NDArray[np.uint64],
    figures: NDArray[np.int64],
) -> int:
    """Count the magnitudes of a delta, and collect the keys of those from `low` to `high`.

    The figures go up by how many are above `high`, and from `low` to it. The second one says where
    in `keys` the next belongs; those beyond its end are only counted. A key has the magnitude above
    INDEX_BITS of the index, which count down: of equals the first is larger. Returns the largest
    magnitude. Where a lane is not set, it is zero.
    """
    found = _magnitudes(raw, base, lanes)
    (inside,) = np.nonzero((found >= low) & (found <= high))
    key = found[inside].astype(np.uint64) << np.uint64(INDEX_BITS)
    key |= np.uint64((1 << INDEX_BITS) - 1 - start) - inside.astype(np.uint64)
    room = keys[figures[1] :]
    room[: key.size] = key[: room.size]
    figures += np.array([np.count_nonzero(found > high), inside.size])
    return int(found.max(initial=0))


INDEX_BITS = 33


def count_bins(
    raw: Raw,
    base: Raw,
    lanes: Lanes,
    low: int,
    shift: int,
    counts: NDArray[np.int64],
    seen: Bits,
    figures: NDArray[np.int64],
) -> int:
    """counts[m - low >> shift] += 1 for every magnitude m of a delta that has a bin, but zero.

    `seen` gets in each bin the bits below the shift that any magnitude in it has, and in its upper
    half those that any lacks: if none is in both, all are equal. Figures and result are those of
    `collect_keys`; all magnitudes from `low` on that have no bin are above. A shift is at most 15.
    """
    found = _magnitudes(raw, base, lanes)
    places = found[(found >= low) & (found != 0)] - np.uint32(low)
    inside = places[places >> np.uint32(shift) < counts.size]
    bins, rest = inside >> np.uint32(shift), inside & np.uint32((1 << shift) - 1)
    counts += np.bincount(bins, minlength=counts.size)
    np.bitwise_or.at(seen, bins, rest | ~rest << np.uint32(16))
    figures += np.array([places.size - inside.size, inside.size])
    return int(found.max(initial=0))


def _magnitudes(raw: Raw, base: Raw, lanes: Lanes) -> Bits:
    origin, values = np.empty((2, raw.size), np.float32)
    decode(base[: raw.size], origin)
    delta(raw, origin, lanes, values, 0)
    return magnitude_bits(values)


def keep_band(
    raw: Raw, base: Floats, lanes: Lanes, start: int, least: int, end: int, most: int, begin: int
) -> int:
    """Clear the lanes of a delta's magnitudes below `least` and above `most`; count the others.

    Of those equal to `least` the ones before the index `end` are kept, of those equal to `most` the
    ones from `begin` on. `start` is the index of the first.
    """
    bits, index = _magnitudes(raw, base, lanes), np.arange(start, start + raw.size)
    keep = (bits > least) | ((bits == least) & (index < end))
    keep &= (bits < most) | ((bits == most) & (index >= begin))
    lanes[: raw.size][~keep] = 0
    return int(np.count_nonzero(lanes[: raw.size]))


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


def elect(sums: Floats, balance: Floats, out: Floats) -> None:
    """out = the mean of the side that the balance is on; zero where it is on neither.

    `sums` are those of `vote`. Where they hold a NaN, the result is one. A side without shares is
    not divided.
    """
    above, below, above_share, below_share = sums.reshape(4, -1)
    with np.errstate(invalid="ignore", over="ignore"):
        side = np.where(balance > 0, above, below)
        share = np.where(balance > 0, above_share, below_share)
        mean = side / np.where(share == 0, np.float32(1), share)
        elected = np.where(balance == 0, np.float32(0), mean)
        out[:] = np.where(np.isnan(above + below), np.float32(np.nan), elected)


def add_extremes(
    values: Floats, weight: np.float32, total: Floats, most: Floats, least: Floats
) -> None:
    """Add weight·values to the total, and take them into the largest and the least so far."""
    with np.errstate(invalid="ignore", over="ignore"):
        term = weight * values
        total += term
        most[:] = np.where((term > most) | np.isnan(term), term, most)
        least[:] = np.where((term < least) | np.isnan(term), term, least)


def elect_extremes(total: Floats, most: Floats, least: Floats) -> None:
    """total = the largest where it is positive, the least where it is negative."""
    total[:] = np.where(total > 0, most, np.where(total < 0, least, total))


def count_needing(
    values: Floats, factor: np.float32, total: Floats, selectivity: np.float32, counts: Integers
) -> None:
    """Count a model where |v| ≥ selectivity·|total - v|, with v = factor·values."""
    with np.errstate(invalid="ignore", over="ignore"):
        own = values * factor
        counts += np.abs(own) >= selectivity * np.abs(total - own)


def keep_needed(total: Floats, counts: Integers, least: int) -> None:
    """Zero what fewer than `least` models need, but for NaN."""
    total[(counts < least) & ~np.isnan(total)] = 0


def combine(
    base: Raw, operands: list[Operand], start: int, elects: bool, threshold_bits: int, out: Floats
) -> NDArray[np.int64]:
    """Take all models' deltas, drop, keep those in a band, and add up or elect.

    Returns for each chunk and model the bits of the largest magnitude, the count over the
    threshold, and how many elements the mask and then the band have kept.
    """
    figures = np.zeros((chunk_count(base.size), len(operands), 4), np.int64)
    for chunk, (first, size) in enumerate(chunk_spans(base.size)):
        span = slice(first, first + size)
        origin, values = np.empty((2, size), np.float32)
        decode(base[span], origin)
        sums, total = np.zeros(4 * size, np.float32), out[span]
        total[:] = 0
        for operand, found in zip(operands, figures[chunk], strict=True):
            lanes = np.full(size, 255, np.uint8)
            found[2] = size
            if operand.mask is not None:
                found[2] = draw(lanes, size, start + first, *operand.mask)
            if operand.band is not None:
                found[3] = keep_band(
                    operand.tuned[span], origin, lanes, start + first, *operand.band
                )
            found[:2] = delta(operand.tuned[span], origin, lanes, values, threshold_bits)
            if elects:
                vote(sums, values, operand.weight, np.float32(operand.share))
            else:
                add_scaled(total, values, operand.weight)
        if elects:
            with np.errstate(invalid="ignore", over="ignore"):
                balance = sums[:size] + sums[size : 2 * size]
            elect(sums, balance, total)
    return figures


def merge(jobs: Sequence[ChunkJob], threshold_bits: int) -> list[Done]:
    """Combine, add to the base, store and digest parts of a merge, in one call for all of them."""
    done = []
    for job in jobs:
        total = np.empty(job.base.size, np.float32)
        how = job.start, job.elects, threshold_bits, total
        figures = combine(job.base, list(job.operands), *how)
        peak = add_to_base(job.base, total, job.scale, job.out)
        raws = [job.base, *(operand.tuned for operand in job.operands)]
        asked = [raw[:0] if known else raw for raw, known in zip(raws, job.known, strict=True)]
        done.append(Done(figures, peak, digests([*asked, job.out])))
    return done


def digests(raws: Sequence[Raw]) -> list[list[str]]:
    """Hash every chunk of some arrays."""
    return [
        [bytes_digest(raw[first : first + size].data) for first, size in chunk_spans(raw.size)]
        for raw in raws
    ]


def _lane_sum(terms: Doubles) -> float:
    """Sum in a fixed order: SUM_LANES interleaved sums, then those from first to last."""
    rows = np.zeros((-(-terms.size // SUM_LANES), SUM_LANES))
    rows.reshape(-1)[: terms.size] = terms
    lanes = np.zeros(SUM_LANES)
    for row in rows:
        lanes += row
    return _sum_in_order(lanes)


def _sum_in_order(lanes: Doubles) -> float:
    total = 0.0
    for lane in lanes.tolist():  # not `sum`, which from Python 3.12 on corrects its rounding
        total += lane
    return float(total)


def sum_products(left: Floats, right: Floats) -> float:
    """Σ left·right in float64, in a fixed order."""
    return _lane_sum(left.astype(np.float64) * right.astype(np.float64))


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


def draw_uniform(out: NDArray[np.uint64], start: int, key0: int, key1: int) -> None:
    """Draw the 40-bit numbers that a mask compares with its threshold, from element `start` on.

    An element is kept by `draw` if its number is below the threshold: the upper 8 bits are its
    lane, the lower 32 the word that breaks ties. `start` is a multiple of 128.
    """
    key = (int(key0), int(key1))
    elements = np.arange(out.size, dtype=np.uint64) + np.uint64(start)
    out[:] = mask.draw_lanes(key, out.size, start).astype(np.uint64) << np.uint64(32)
    out |= mask.draw_tie_words(key, elements)


FEW = 16  # neighbours of whom it is asked whether they have the same lane


def draw_order(out: NDArray[np.uint64], start: int, key0: int, key1: int, among: int) -> None:
    """Draw numbers that order any `among` neighbours as 2⁴⁰ less those of `draw_uniform` do.

    Among few, words that break ties are left out where no such neighbour has the same lane.
    """
    draw_uniform(out, start, key0, key1)
    lanes = out >> np.uint64(32)
    ties = np.full(out.size, among > FEW)
    ties[:among] = ties[max(0, out.size - among) :] = True
    for distance in range(1, min(among, FEW + 1, out.size)):
        is_same = lanes[distance:] == lanes[:-distance]
        ties[distance:] |= is_same
        ties[:-distance] |= is_same
    out[:] = np.uint64(1 << mask.THRESHOLD_BITS) - np.where(ties, out, lanes << np.uint64(32))


def add_products(
    left: Floats, right: Floats, first: int, columns: int, by_column: bool, sums: Doubles
) -> None:
    """Add left·right to the sum of its row, or of its column, element after element, in float64.

    `first` is the index of the first element in the matrix.
    """
    place = np.arange(first, first + left.size)
    terms = left.astype(np.float64) * right.astype(np.float64)
    np.add.at(sums, place % columns if by_column else place // columns, terms)


def balance_scores(
    values: Floats,
    total: Floats,
    factor: float,
    peak: float,
    models: float,
    floor: float,
    out: Floats,
) -> None:
    """out = exp(models·((v/peak)² - 1))·tanh(v·total) where that is positive, else 0.

    v = factor·values, peak > 0, and |v|/peak counts as 1 where it is more. All in float64 and in
    elementary operations, so that every machine has the same bits; rounded once at the end. It may
    be 0 as well where it is less than `floor`: where an upper bound of it is, since tanh x is at
    most x and 1, and exp x at least (1 + x/16)¹⁶.
    """
    with np.errstate(invalid="ignore", over="ignore", under="ignore"):
        scaled = factor * values.astype(np.float64)
        part = np.abs(scaled) * (1 / peak)
        part = np.where(part < 1, part, 1.0)
        together = scaled * total.astype(np.float64)
        score = _exponential(models * (part * part - 1)) * _tangent(together)
        grown = 1 + models * (1 - part * part) * (1 / 16)
        for _ in range(4):
            grown = grown * grown
        most = np.where(together < 1, together, 1.0) * SLACK
        scores = (together > 0) & (most >= floor * grown)
        out[:] = np.where(scores, score, 0.0).astype(np.float32)


def add_shares(
    scores: Floats,
    values: Floats,
    weight: np.float32,
    cut: np.float32,
    top: np.float32,
    above: Floats,
    below: Floats,
) -> None:
    """Add to `below` the shares that scores count for, and to `above` these times weight·values.

    A share goes from 0 at the cut to 1 at the top; where these are equal, it is 1 at the top.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        if top == cut:
            share = ((scores == top) & (scores > 0)).astype(np.float32)
        else:
            share = np.maximum(scores - cut, np.float32(0)) / (top - cut)
        above += np.where(share > 0, share * (weight * values), np.float32(0))
        below += share


def _exponential(x: Doubles) -> Doubles:
    """exp(x) for moderate x ≤ 0: that of x/256, squared eight times."""
    power = 1 + _less_one(x * (1 / 256))
    for _ in range(8):
        power = power * power
    return power


def _tangent(x: Doubles) -> Doubles:
    """tanh(x) for x > 0, as E/(E + 2) with E = exp(2x) - 1, and E(2y) = E(y)·(E(y) + 2)."""
    grown = _less_one(np.where(x < 20, x, 20.0) * (1 / 128))
    for _ in range(8):
        grown = grown * (grown + 2)
    return grown / (grown + 2)


def _less_one(part: Doubles) -> Doubles:
    """exp(x) - 1 for x near 0, by its series."""
    power = np.ones_like(part)
    for inverse in INVERSES:
        power = 1 + part * power * inverse
    return part * power


INVERSES = tuple(1 / i for i in range(9, 1, -1))
SLACK = 1 + 1e-6  # more than all roundings of a score


def _rank_rows(keys: NDArray[Any]) -> NDArray[np.int64]:
    """Rank each element in its row (rows × columns), 0 for the smallest; of equals the first is
    larger. Keys are unsigned; their bits and those of a row's length must fit in 64 together.
    """
    rows, columns = keys.shape
    keys = keys.astype(np.uint64)
    bits = np.uint64(max(1, (columns - 1).bit_length()))
    backwards = np.arange(columns, dtype=np.uint64)[::-1]
    ordered = np.sort(keys << bits | backwards, axis=1)  # no two are the same
    places = backwards[:1] - (ordered & ((np.uint64(1) << bits) - np.uint64(1)))
    ranks = np.broadcast_to(np.arange(columns), (rows, columns))
    found = np.empty(keys.shape, np.int64)
    np.put_along_axis(found, places.astype(np.int64), ranks, axis=1)
    return found


def rank_left(keys: NDArray[Any], out: Bits) -> None:
    """Rank the elements of rows whose key is not 0; their ranks are spread over the row.

    Of equals the first is larger. An element whose key is 0 has rank 0.
    """
    last = keys.shape[1] - 1
    gone = np.count_nonzero(keys == 0, axis=1, keepdims=True)
    steps = np.maximum(last - gone, 1)  # between the ranks of those that are left
    out[:] = np.rint(np.maximum(_rank_rows(keys) - gone, 0) * (last / steps))


def order_keys(values: Floats, left: NDArray[np.bool_], out: Bits) -> None:
    """Return integers that order like the magnitudes, those of elements that are left above all."""
    out[:] = magnitude_bits(values) | left.astype(np.uint32) << np.uint32(31)


def select_ranks(
    keys: NDArray[Any], leasts: Integers, ends: Integers, factors: Floats, out: Floats
) -> None:
    """The factor where the rank of an element in its row is from `least` to below `end`, else 0.

    Keys are rows × columns of unsigned integers; of equals the first has the larger rank. The three
    are looked up by the number of keys in a row that are not 0.
    """
    ranks, left = _rank_rows(keys), np.count_nonzero(keys, axis=1)[:, np.newaxis]
    taken = (ranks >= leasts[left]) & (ranks < ends[left])
    out[:] = np.where(taken, factors[left], np.float32(0))


def multiply_kept(values: Floats, factors: Floats) -> None:
    """values *= factors, and zero where the factor is."""
    with np.errstate(over="ignore", invalid="ignore"):
        values[:] = np.where(factors == 0, np.float32(0), values * factors)


def drop_by_rank(
    values: Floats,
    left: NDArray[np.bool_],
    columns: int,
    edges: Bits,
    thresholds: NDArray[np.uint64],
    factors: Floats,
    start: int,
    key0: int,
    key1: int,
    kept: NDArray[np.bool_],
) -> None:
    """Keep elements whose number is below the threshold of their rank, times its factor.

    Ranks are those of the magnitudes that are left in each row, as by `rank_left`; `edges` has them
    for what is before the first whole row and after the last. Thresholds rise evenly with the rank,
    or are all the same.
    """
    head = min(-start % columns, values.size)
    whole = slice(head, values.size - (values.size - head) % columns)
    keys = np.empty(values.size, np.uint32)
    order_keys(values, left, keys)
    keys[~left] = 0
    ranks = np.empty((whole.stop - head) // columns * columns, np.uint32)
    rank_left(keys[whole].reshape(-1, columns), ranks.reshape(-1, columns))
    ranks = np.concatenate([edges[:head], ranks, edges[head:]])
    numbers = np.empty(values.size, np.uint64)
    draw_uniform(numbers, start, key0, key1)
    kept[:] = left & (numbers < thresholds[ranks])
    with np.errstate(over="ignore", invalid="ignore"):
        values[:] = np.where(kept, values * factors[ranks], np.float32(0))


def select(raw: Raw, lanes: Lanes, out: Raw) -> int:
    """Gather the stored elements whose lane is set, in order; return how many.

    `out` has room for them, and is written no further.
    """
    found = raw[lanes[: raw.size] != 0]
    out[: found.size] = found
    return int(found.size)


def expand(packed: Raw, lanes: Lanes, into: Raw) -> int:
    """Put the packed elements, in order, where the lane is set; return how many lanes are.

    All other elements stay as they are, and so do those that nothing is left for.
    """
    places = np.flatnonzero(lanes[: into.size])
    into[places[: packed.size]] = packed[: places.size]
    return int(places.size)


SCALE_GROUP = 256  # values that share a scale
# The largest bfloat16. A scale is sought as if no magnitude were above: no level is infinite.
LARGEST = np.float32(255 * 2.0**120)
# Parts of a group's largest magnitude: sums of whole ones are the same in any order.
PARTS, FINE_PARTS = 1 << 12, 1 << 20
EVEN_STEPS = {
    4: (585, 552, 521, 492, 464, 438, 414, 391, 369, 348, 328, 310),
    2: (4096, 3444, 2896, 2435, 2048, 1722, 1448, 1218),
}
# Scales that are tried, in PARTS of the largest: PARTS/7, /1, /3, and less by equal factors.
ODD_STEPS = (1365, 1216, 1084, 965, 860, 766, 683, 608, 542, 483, 430, 383)


def quantise(values: Floats, bits: int, codes: NDArray[np.uint8], scales: Raw) -> None:
    """Round finite values to 4 or 2 bits each, with a bfloat16 scale for each SCALE_GROUP.

    A code is an integer q in two's complement; the first value's is in the lowest bits of the first
    byte. It stands for q·scale, or for (2q + 1)·|scale| if the scale is negative. Codes are found
    with a first scale. With 4 bits it is the one of EVEN_STEPS that has the least squared error for
    q = -7 … 7. With 2 bits it is the best for -1, 0, 1 or, where that is better, for -3, -1, 1, 3.

    The scale that is stored is another: with it Σ v̂·v = Σ v², for the rounded values v̂ of a group.
    So rounding shortens no change, as dropping and rescaling does not. A group of zeros has the
    scale zero.
    """
    size, groups = values.size, scales.size
    padded = np.zeros((groups, SCALE_GROUP), np.float32)
    padded.reshape(-1)[:size] = values
    used = (np.arange(padded.size) < size).reshape(padded.shape)
    magnitudes = np.minimum(np.abs(padded), LARGEST)
    largest = magnitudes.max(axis=1, initial=0)
    shares = magnitudes / np.where(largest == 0, np.float32(1), largest)[:, None]
    step, odd = _best_steps(np.rint(shares * np.float32(PARTS)).astype(np.int64), used, bits)
    scale = largest * (step / PARTS).astype(np.float32)
    rounded = np.empty(groups, np.uint16)
    encode(scale, rounded)
    odd &= rounded != 0
    decode(rounded, scale)
    unit = np.where(scale == 0, np.float32(1), scale)[:, None]
    most = (1 << bits - 1) - 1
    with np.errstate(over="ignore"):
        middle = np.rint(np.clip(padded / unit, -most, most))
        above = (padded >= -2 * unit).astype(int) + (padded >= 0) + (padded >= 2 * unit)
    chosen = np.where(odd[:, None], above - 2, middle.astype(int))
    scales[:] = odd.astype(np.uint16) << 15
    levels = np.abs(np.where(odd[:, None], 2 * chosen + 1, chosen)) * used
    parts = np.rint(shares * np.float32(FINE_PARTS)).astype(np.int64)
    encode(_fair_scales(parts, largest, levels) * (rounded != 0), rounded)
    scales |= rounded
    fields = np.zeros(-(-size * bits // 8) * 8 // bits, np.uint8)
    fields[:size] = (chosen & (1 << bits) - 1).reshape(-1)[:size]
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    codes[:] = np.bitwise_or.reduce(fields.reshape(-1, 8 // bits) << shifts, axis=1)


def _fair_scales(parts: NDArray[np.int64], largest: Floats, levels: NDArray[np.int64]) -> Floats:
    """Return each group's scale at which Σ level·scale·|v| = Σ v², below what float32 can hold.

    `parts` are magnitudes in whole FINE_PARTS of the largest.
    """
    squares, products = (parts * parts).sum(axis=1), (parts * levels).sum(axis=1)
    ratio = squares / np.maximum(products, 1)
    scale = largest.astype(np.float64) * ratio / FINE_PARTS
    most = np.float64(LARGEST) / np.maximum(levels.max(axis=1, initial=1), 1)
    fair: Floats = np.where(products == 0, 0, np.minimum(scale, most)).astype(np.float32)
    return fair


def _best_steps(
    parts: NDArray[np.int64], used: NDArray[np.bool_], bits: int
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return each group's step of least squared error, the first of equals; and if it is odd.

    `parts` are magnitudes in whole PARTS of the largest.
    """
    tried, errors = [], []
    for step in EVEN_STEPS[bits]:
        level = np.minimum(parts * ((65536 + step // 2) // step) + 32768 >> 16, (1 << bits - 1) - 1)
        tried.append((step, False))
        errors.append(((parts - level * step) ** 2).sum(axis=1))
    for step in ODD_STEPS if bits == 2 else ():
        level = np.where(parts >= 2 * step, 3, 1)
        tried.append((step, True))
        errors.append(((parts - level * step) ** 2).sum(axis=1, where=used))
    best = np.argmin(errors, axis=0)
    return np.array([step for step, _ in tried])[best], np.array([odd for _, odd in tried])[best]


def dequantise(codes: NDArray[np.uint8], scales: Raw, bits: int, out: Floats) -> None:
    """out = the values that codes stand for, as in `quantise`; earlier files have 8 bits or 1."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    fields = (codes[:, None] >> shifts).reshape(-1)[: out.size].astype(np.int64)
    half = 1 << (bits - 1)
    numbers = ((fields & (2 * half - 1)) ^ half) - half  # the first bit of a field is its sign
    scale = np.empty(scales.size, np.float32)
    decode(scales, scale)
    scale = np.repeat(scale, SCALE_GROUP)[: out.size]
    levels = np.where(np.signbit(scale), 2 * numbers + 1, numbers).astype(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        out[:] = levels * np.abs(scale)


def apply_packed(
    base: Raw, packed: Raw, are_deltas: bool, lanes: Lanes, factor: np.float32, out: Raw, saved: Raw
) -> int:
    """out = base + factor·(packed - base) where the lane is set, as `combine` and `add_to_base` do.

    Packed deltas are not subtracted from. `saved` takes the base's elements there, in order; `out`
    may be the base itself and is not touched elsewhere, nor where no packed element is left.
    Returns how many lanes are set.
    """
    places = np.flatnonzero(lanes[: base.size])
    used = places[: packed.size]
    stored = base[used]
    moved = np.empty_like(stored)
    origin, change = np.empty((2, used.size), np.float32)
    decode(stored, origin)
    decode(packed[: used.size], change)
    with np.errstate(over="ignore", invalid="ignore"):
        change = factor * (change if are_deltas else change - origin)
        add_to_base(stored, change, np.float32(1), moved)
    saved[: used.size] = stored
    out[used] = moved
    return int(places.size)


# ---------------------------------------------------------------- the tallies of an analysis

MEASURED = 2048  # elements of a tile, whose sums are taken in float32
MAGNITUDE_SHIFT = 15  # bits of a magnitude that its bin does not tell
SAMPLED = 64  # elements that are sampled together
PEAK, LEAST = 2, 3  # where extremes stand among the counts of a model; see `measure`


def measure(
    base: Raw,
    raws: Sequence[Raw],
    are_deltas: NDArray[np.bool_],
    sums: Doubles,
    counts: NDArray[np.int64],
    pair_sums: Doubles,
    pair_counts: NDArray[np.int64],
    shared: NDArray[np.int64],
    totals: Doubles,
    bins: NDArray[np.uint32],
) -> None:
    """Add what is found of the deltas of some models to the arrays from `sums` on.

    Elements that are not finite are counted, and are zeros from then on. `are_deltas` says which
    models are given by their deltas. A sum is made of SUM_LANES interleaved ones, which are added
    up from the first to the last. Within a tile each of these is taken in float32, of values that
    are scaled by a power of two, so that their fourth powers neither vanish nor overflow; tiles are
    added up in float64.

    sums: [models, 6], Σδ, Σδ², Σδ³, Σδ⁴, Σ|δ|, Σδ·base. counts: [models, 4], elements that are not
    zero, and those not finite; the bits of the largest magnitude, and of the smallest above zero
    less 1, as uint32. pair_sums: Σδ·δ of each pair. pair_counts: [pairs, 2], elements that both
    change, and those changed in the same direction. shared: elements that two models or more
    change, and those changed in both directions. totals: Σbase², and Σ|Σδ| of two models or more.
    bins: [models, 2, bins], magnitudes by their upper bits, at even and at odd indices.
    """
    pairs = [(one, other) for one in range(len(raws)) for other in range(one + 1, len(raws))]
    lanes_of = np.zeros((len(raws), 6, SUM_LANES))
    pair_lanes = np.zeros((len(pairs), SUM_LANES))
    base_lanes, summed_lanes = np.zeros((2, SUM_LANES))
    for first in range(0, base.size, MEASURED):
        span = slice(first, min(first + MEASURED, base.size))
        origin = np.empty(span.stop - first, np.float32)
        decode(base[span], origin)
        taken = [
            _finite_delta(raw[span], origin, is_delta)
            for raw, is_delta in zip(raws, are_deltas.tolist(), strict=True)
        ]
        origin, _ = _mended(origin)
        deltas, scale = [values for values, _ in taken], _scale_of(origin)
        scales = [*map(_scale_of, deltas)]
        base_lanes += _tile_sums((origin * scale) * (origin * scale), scale, scale)
        for model, (values, missing) in enumerate(taken):
            own, lanes = scales[model], lanes_of[model]
            scaled = values * own
            square = scaled * scaled
            lanes[0] += _tile_sums(scaled, own)
            lanes[1] += _tile_sums(square, own, own)
            lanes[2] += _tile_sums(square * scaled, own, own, own)
            lanes[3] += _tile_sums(square * square, own, own, own, own)
            lanes[4] += _tile_sums(np.abs(scaled), own)
            lanes[5] += _tile_sums(scaled * (origin * scale), own, scale)
            magnitudes = magnitude_bits(values)
            counts[model, :2] += int(np.count_nonzero(magnitudes)), missing
            counts[model, PEAK] = max(counts[model, PEAK], int(magnitudes.max()))
            least = int((magnitudes - np.uint32(1)).min())
            counts[model, LEAST] = min(counts[model, LEAST], least)
            for way in range(2):
                np.add.at(bins[model, way], magnitudes[way::2] >> np.uint32(MAGNITUDE_SHIFT), 1)
        for place, (one, other) in enumerate(pairs):
            left, right = scales[one], scales[other]
            terms = (deltas[one] * left) * (deltas[other] * right)
            pair_lanes[place] += _tile_sums(terms, left, right)
            pair_counts[place] += _in_both(deltas[one], deltas[other])
        if pairs:
            above = np.sum([values > 0 for values in deltas], axis=0)
            below = np.sum([values < 0 for values in deltas], axis=0)
            conflicted = (above > 0) & (below > 0)
            shared += int(np.count_nonzero(above + below > 1)), int(np.count_nonzero(conflicted))
            with np.errstate(over="ignore", invalid="ignore"):
                terms = np.abs(functools.reduce(np.add, deltas) * min(scales))
            summed_lanes += _tile_sums(terms, min(scales))
    for (model, place), _ in np.ndenumerate(sums):
        sums[model, place] += _sum_in_order(lanes_of[model, place])
    pair_sums += [*map(_sum_in_order, pair_lanes)]
    totals += _sum_in_order(base_lanes), _sum_in_order(summed_lanes)


def _mended(values: Floats) -> tuple[Floats, int]:
    """Return values with zeros where they are not finite, and how many were not."""
    is_finite = np.isfinite(values)
    mended: Floats = np.where(is_finite, values, np.float32(0))
    return mended, int(np.count_nonzero(~is_finite))


def _finite_delta(raw: Raw, base: Floats, is_delta: bool) -> tuple[Floats, int]:
    values = np.empty(raw.size, np.float32)
    decode(raw, values)
    with np.errstate(over="ignore", invalid="ignore"):
        return _mended(values if is_delta else values - base)


def _scale_of(values: Floats) -> np.float32:
    """Return the power of two that brings the peak to [1, 2), as far as float32 has it."""
    return np.float32(2.0 ** min(max(127 - (_peak(values) >> 23), -126), 127))


def _tile_sums(terms: Floats, *scales: np.float32) -> Doubles:
    """Return the interleaved sums of a tile, without the scales of its factors."""
    rows = np.zeros((-(-terms.size // SUM_LANES), SUM_LANES), np.float32)
    rows.reshape(-1)[: terms.size] = terms
    lanes = np.zeros(SUM_LANES, np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        for row in rows:
            lanes += row
    return lanes.astype(np.float64) / math.prod(map(float, scales))


def _in_both(left: Floats, right: Floats) -> tuple[int, int]:
    """Count the elements that are zero in neither, and those of the same sign."""
    both = (left != 0) & (right != 0)
    alike = both & ((left > 0) == (right > 0))
    return int(np.count_nonzero(both)), int(np.count_nonzero(alike))


def sample(raw: Raw, base: Raw, is_delta: bool, start: int, period: int, out: Floats) -> None:
    """out = the deltas of one run of SAMPLED elements in every `period` runs, else zero.

    Which run that is depends on its position in the tensor alone. `start`, the index of the first
    element, is a multiple of period·SAMPLED. What is not finite is zero.
    """
    out[:] = 0
    block = SAMPLED * period
    for place in range(-(-raw.size // block)):
        number = start // block + place
        turn = ((number * 0x9E3779B97F4A7C15) % (1 << 64) >> 32) % period
        span = slice(place * block + turn * SAMPLED, place * block + (turn + 1) * SAMPLED)
        origin = np.empty(raw[span].size, np.float32)
        decode(base[span], origin)
        out[place * SAMPLED :][: origin.size] = _finite_delta(raw[span], origin, is_delta)[0]


def compare_tops(
    values: Floats, least: Bits, sizes: NDArray[np.int64], pair_counts: NDArray[np.int64]
) -> None:
    """Count the magnitudes of each model whose bits are `least`, above 0, or more.

    values: [models, elements]; what is not finite is zero. pair_counts: [pairs, 2], as in
    `measure`.
    """
    mended = _mended(values)[0]
    tops = np.where(magnitude_bits(mended) >= least[:, None], mended, np.float32(0))
    sizes += np.count_nonzero(tops, axis=1)
    rows = [(one, other) for one in range(len(tops)) for other in range(one + 1, len(tops))]
    for place, (one, other) in enumerate(rows):
        pair_counts[place] += _in_both(tops[one], tops[other])
