"""The kernels in Numba: one simple loop each, written so that LLVM vectorises it.

Selections are made on bit patterns, not with branches, because a branch in the loop body keeps
LLVM from vectorising it. No fast-math: each operation rounds once, as in `reference`.

A function here has the name, the arguments and the bits of its namesake in `reference`, whose
docstring says what it computes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import event
from numba.core.errors import TypingError
from numba.extending import intrinsic, overload

from dare.mask import LANES_PER_CALL, ROUNDS, TIE_BREAK

u8, u16, u32, u64 = np.uint8, np.uint16, np.uint32, np.uint64
i8, i16, i32, i64, f32, f64 = np.int8, np.int16, np.int32, np.int64, np.float32, np.float64

kernel = njit(nogil=True, cache=True, error_model="numpy")
helper = njit(nogil=True, cache=True, inline="always")

MAGNITUDE = u32(0x7FFFFFFF)
INFINITY = i32(0x7F800000)
SUM_LANES = 64


@contextmanager
def announcing(announce: Callable[[], None]) -> Iterator[None]:
    """Call `announce` once if anything has to be compiled inside the `with` block."""

    class FirstCompilation(event.Listener):  # type: ignore[misc]
        told = False

        def on_start(self, _event: event.Event) -> None:
            if not self.told:
                self.told = True
                announce()

        def on_end(self, _event: event.Event) -> None:
            pass

    with event.install_listener("numba:compile", FirstCompilation()):
        yield


# ---------------------------------------------------------------- bits


@intrinsic
def bits_of(_typing, value):  # float32 -> uint32
    def build(_context, builder, _signature, arguments):
        return builder.bitcast(arguments[0], ir.IntType(32))

    return types.uint32(types.float32), build


@intrinsic
def float_of(_typing, bits):  # uint32 -> float32
    def build(_context, builder, _signature, arguments):
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.uint32), build


@helper
def all_ones(condition):
    return u32(u32(0) - u32(condition))


@helper
def choose(mask, when_set, when_clear):
    return u32((when_set & mask) | (when_clear & ~mask))


@helper
def magnitude_of(value):
    return i32(bits_of(value) & MAGNITUDE)


# ---------------------------------------------------------------- storage types


@helper
def expand(code, width, mantissa_bits, bias, first_special, special):
    """Widen a float of `width` bits to float32; codes from `first_special` up become `special`."""
    sign = u32(u32(code >> u32(width - 1)) << u32(31))
    magnitude = u32(code & u32((1 << (width - 1)) - 1))
    shift = u32(23 - mantissa_bits)
    normal = u32(u32(magnitude << shift) + u32((127 - bias) << 23))
    subnormal = bits_of(f32(i32(magnitude)) * f32(2.0 ** (1 - bias - mantissa_bits)))
    is_subnormal = all_ones(magnitude < u32(1 << mantissa_bits))
    result = choose(is_subnormal, subnormal, normal)
    exceptional = u32(special | u32(magnitude << shift))
    result = choose(all_ones(magnitude >= u32(first_special)), exceptional, result)
    return float_of(u32(sign | (result & MAGNITUDE)))


@helper
def shrink(value, width, mantissa_bits, bias, overflow_bits, overflow_code, nan_code):
    """Round float32 to nearest even in a float of `width` bits; any NaN becomes `nan_code`."""
    bits = bits_of(value)
    sign = u32(u32(bits >> u32(31)) << u32(width - 1))
    magnitude = u32(bits & MAGNITUDE)
    shift = u32(23 - mantissa_bits)
    rebased = u32(magnitude - u32((127 - bias) << 23))
    odd = u32(u32(rebased >> shift) & u32(1))
    normal = u32(u32(rebased + u32((1 << (22 - mantissa_bits)) - 1) + odd) >> shift)
    unit = f32(2.0 ** (1 - bias - mantissa_bits + 23))  # its last bit is the smallest subnormal
    subnormal = u32(bits_of(f32(float_of(magnitude) + unit)) - bits_of(unit))
    is_subnormal = all_ones(magnitude < u32((128 - bias) << 23))
    result = choose(is_subnormal, subnormal, normal)
    result = choose(all_ones(magnitude >= u32(overflow_bits)), u32(overflow_code), result)
    return choose(all_ones(magnitude > u32(INFINITY)), u32(nan_code), u32(sign | result))


def to_float(code):
    """Decode one element; specialised below by the carrier type of the array."""
    raise NotImplementedError


def from_float(value, like):
    """Encode one element as the carrier type of `like`."""
    raise NotImplementedError


@overload(to_float, inline="always")
def _to_float(code):
    decoders = {
        types.float64: lambda code: f32(code),
        types.float32: lambda code: code,
        types.int16: lambda code: expand(u32(u16(code)), 16, 10, 15, 0x7C00, 0x7F800000),
        types.uint16: lambda code: float_of(u32(u32(code) << u32(16))),
        types.uint8: lambda code: expand(u32(code), 8, 3, 7, 0x7F, 0x7FC00000),
        types.int8: lambda code: expand(u32(u8(code)), 8, 2, 15, 0x7C, 0x7F800000),
    }
    return _chosen(decoders, code)


@overload(from_float, inline="always")
def _from_float(value, like):
    def bfloat16(value, like):
        bits = bits_of(value)
        odd = u32(u32(bits >> u32(16)) & u32(1))
        rounded = u32(u32(bits + u32(0x7FFF) + odd) >> u32(16))
        return u16(choose(all_ones(magnitude_of(value) > INFINITY), u32(0x7FC0), rounded))

    def single(value, like):
        is_nan = all_ones(magnitude_of(value) > INFINITY)
        return float_of(choose(is_nan, u32(0x7FC00000), bits_of(value)))

    encoders = {
        types.float64: lambda value, like: f64(value) if value == value else f64(np.nan),
        types.float32: single,
        types.int16: lambda value, like: i16(shrink(value, 16, 10, 15, 0x477FF000, 0x7C00, 0x7E00)),
        types.uint16: bfloat16,
        types.uint8: lambda value, like: u8(shrink(value, 8, 3, 7, 0x43E80001, 0x7F, 0x7F)),
        types.int8: lambda value, like: i8(shrink(value, 8, 2, 15, 0x47700000, 0x7C, 0x7E)),
    }
    return _chosen(encoders, like)


def _chosen(table, carrier):
    if carrier not in table:
        raise TypingError(f"{carrier} carries no weight type")
    return table[carrier]


@kernel
def decode(raw, out):
    for i in range(raw.size):
        out[i] = to_float(raw[i])


@kernel
def encode(values, out):
    peak = i32(0)
    for i in range(values.size):
        out[i] = from_float(values[i], out[i])
        peak = max(peak, magnitude_of(values[i]))
    return peak


# ---------------------------------------------------------------- the mask

PHILOX_WIDTH = 8
"""Philox calls computed side by side: LLVM splits the vectors to the machine's width."""
TILE = 4096
"""Lanes drawn and settled at a time, so that they stay in the first-level cache."""

_word = ir.IntType(32)
_narrow = ir.VectorType(_word, PHILOX_WIDTH)
_wide = ir.VectorType(ir.IntType(64), PHILOX_WIDTH)


def _constant(kind, value):
    return ir.Constant(kind, [value] * PHILOX_WIDTH)


def _splat(builder, value, kind):
    single = builder.insert_element(ir.Constant(kind, ir.Undefined), value, _word(0))
    return builder.shuffle_vector(single, single, _constant(_narrow, 0))


def _shuffle(builder, left, right, order):
    order = ir.Constant(ir.VectorType(_word, len(order)), list(order))
    return builder.shuffle_vector(left, right, order)


def _philox(builder, index, domain, key0, key1):
    """Emit PHILOX_WIDTH calls on the vector of 64-bit counters `index`; return four vectors."""

    def halves(vector):
        # Taken by shuffling: shifted and truncated, LLVM would carry on in 64 bits.
        words = builder.bitcast(vector, ir.VectorType(_word, 2 * PHILOX_WIDTH))
        low = _shuffle(builder, words, words, range(0, 2 * PHILOX_WIDTH, 2))
        high = _shuffle(builder, words, words, range(1, 2 * PHILOX_WIDTH, 2))
        return low, high

    def multiply(words, factor):
        return halves(builder.mul(builder.zext(words, _wide), _constant(_wide, factor)))

    c0, c1 = halves(index)
    c2, c3 = _constant(_narrow, domain), _constant(_narrow, 0)
    for _ in range(ROUNDS):
        low0, high0 = multiply(c0, 0xD2511F53)
        low1, high1 = multiply(c2, 0xCD9E8D57)
        c0 = builder.xor(builder.xor(high1, c1), _splat(builder, key0, _narrow))
        c2 = builder.xor(builder.xor(high0, c3), _splat(builder, key1, _narrow))
        c1, c3 = low1, low0
        key0 = builder.add(key0, _word(0x9E3779B9))
        key1 = builder.add(key1, _word(0xBB67AE85))
    return c0, c1, c2, c3


def _store(builder, vector, address):
    builder.store(vector, builder.inttoptr(address, vector.type.as_pointer()), align=4)
    return ir.Constant(ir.IntType(8).as_pointer(), None)


@intrinsic
def philox_lanes(_typing, first, key0, key1, address):
    """Store the 16 * PHILOX_WIDTH lanes of the calls first, first + 1, … at `address`."""

    def build(_context, builder, _signature, arguments):
        first, key0, key1, address = arguments
        steps = ir.Constant(_wide, list(range(PHILOX_WIDTH)))
        index = builder.add(_splat(builder, first, _wide), steps)
        c0, c1, c2, c3 = _philox(builder, index, 0, key0, key1)
        everything = range(2 * PHILOX_WIDTH)
        left = _shuffle(builder, c0, c1, everything)
        right = _shuffle(builder, c2, c3, everything)
        calls = range(PHILOX_WIDTH)
        by_call = [word * PHILOX_WIDTH + call for call in calls for word in range(4)]
        return _store(builder, _shuffle(builder, left, right, by_call), address)

    return types.none(types.uint64, types.uint32, types.uint32, types.intp), build


@intrinsic
def philox_ties(_typing, counters, key0, key1, address):
    """Store the tie-breaking words of the PHILOX_WIDTH elements listed at `counters`."""

    def build(_context, builder, _signature, arguments):
        counters, key0, key1, address = arguments
        index = builder.load(builder.inttoptr(counters, _wide.as_pointer()))
        index.align = 8
        c0, _, _, _ = _philox(builder, index, TIE_BREAK, key0, key1)
        return _store(builder, c0, address)

    return types.none(types.intp, types.uint32, types.uint32, types.intp), build


@intrinsic
def trailing_zeros(_typing, value):  # uint64, not zero
    def build(_context, builder, _signature, arguments):
        return builder.cttz(arguments[0], ir.IntType(1)(1))

    return types.int64(types.uint64), build


@helper
def settle_ties(lanes, size, start, key0, key1, high, low, elements, words):
    """Replace lanes that equal `high` by 0 if their word says keep, else by 255."""
    eights = lanes.view(u64)
    ones = u64(0x0101010101010101)
    pattern = u64(ones * u64(high))
    ties = 0
    for i in range((size + 7) // 8):
        difference = u64(eights[i] ^ pattern)
        zeros = u64((difference - ones) & ~difference & u64(0x8080808080808080))
        while zeros:  # marks every zero byte, and sometimes the one after it
            j = 8 * i + trailing_zeros(zeros) // 8
            elements[ties] = u64(start + j)
            ties += lanes[j] == high
            zeros &= zeros - u64(1)
    for i in range(0, ties, PHILOX_WIDTH):
        philox_ties(elements.ctypes.data + 8 * i, key0, key1, words.ctypes.data + 4 * i)
    for i in range(ties):
        lanes[i64(elements[i]) - start] = u8(0) if words[i] < low else u8(255)


@kernel
def draw(lanes, size, start, key0, key1, high, low):
    limit = u8(max(high, 1))  # a settled tie is 0 or 255, on the right side of any limit
    elements = np.empty(TILE + PHILOX_WIDTH, u64)
    words = np.empty(TILE + PHILOX_WIDTH, u32)
    kept = 0
    for first in range(0, size, TILE):
        tile = lanes[first : first + TILE]
        used = min(TILE, size - first)
        for i in range(0, used, PHILOX_WIDTH * LANES_PER_CALL):
            call = u64((start + first + i) // LANES_PER_CALL)
            philox_lanes(call, key0, key1, tile.ctypes.data + i)
        settle_ties(tile, used, start + first, key0, key1, high, low, elements, words)
        for i in range(tile.size):
            tile[i] = u8(0) - u8(tile[i] < limit)
        for i in range(used, tile.size):
            tile[i] = u8(0)
        kept += count_set(tile.view(u64))
    return kept


@helper
def count_set(eights):
    """Count the bytes of a tile that are 255, in byte-wide counters emptied every 128 words."""
    count = 0
    for part in range(TILE // 8 // 128):
        sums = u64(0)
        for i in range(128):
            sums += eights[128 * part + i] & u64(0x0101010101010101)
        for byte in range(8):
            count += i64((sums >> u64(8 * byte)) & u64(255))
    return count


@helper
def masked(value, lane):
    return float_of(u32(bits_of(value) & u32(i32(i8(lane)))))


@kernel
def keep_lanes(values, lanes):
    left = 0
    for i in range(values.size):
        value = masked(values[i], lanes[i])
        values[i] = value
        left += value != f32(0)
    return left


# ---------------------------------------------------------------- deltas in, weights out


@kernel
def delta(raw, base, lanes, out, threshold_bits):
    peak = i32(0)
    over = i32(0)
    for i in range(raw.size):
        difference = to_float(raw[i]) - base[i]
        out[i] = masked(difference, lanes[i])
        magnitude = magnitude_of(difference)
        peak = max(peak, magnitude)
        over = i32(over + i32(magnitude > threshold_bits))
    return peak, over


@kernel
def weighted_delta(raw, base, lanes, weight, out, threshold_bits):
    peak = i32(0)
    over = i32(0)
    for i in range(raw.size):
        difference = to_float(raw[i]) - base[i]
        out[i] = weight * masked(difference, lanes[i])
        magnitude = magnitude_of(difference)
        peak = max(peak, magnitude)
        over = i32(over + i32(magnitude > threshold_bits))
    return peak, over


@kernel
def add_delta(raw, base, lanes, weight, total, threshold_bits):
    peak = i32(0)
    over = i32(0)
    for i in range(raw.size):
        difference = to_float(raw[i]) - base[i]
        total[i] += weight * masked(difference, lanes[i])
        magnitude = magnitude_of(difference)
        peak = max(peak, magnitude)
        over = i32(over + i32(magnitude > threshold_bits))
    return peak, over


@kernel
def add_to_base(raw, base, merged, scale, out):
    peak = i32(0)
    for i in range(base.size):
        change = merged[i]
        value = base[i] + scale * change
        peak = max(peak, magnitude_of(value))
        moved = from_float(value, out[i])
        unmoved = raw[i]
        out[i] = unmoved if change == f32(0) else moved
    return peak


@kernel
def add_to_base_as(base, merged, scale, out):
    peak = i32(0)
    for i in range(base.size):
        change = merged[i]
        moved = bits_of(base[i] + scale * change)
        value = float_of(choose(all_ones(change == f32(0)), bits_of(base[i]), moved))
        peak = max(peak, magnitude_of(value))
        out[i] = from_float(value, out[i])
    return peak


@kernel
def count_exceptions(base, merged, scale, overflow_bits):
    overflowed = 0
    nans = 0
    for i in range(base.size):
        magnitude = magnitude_of(base[i] + scale * merged[i])
        nans += magnitude > INFINITY
        overflowed += (magnitude >= overflow_bits) & (magnitude <= INFINITY)
    return overflowed, nans


# ---------------------------------------------------------------- trimming


@kernel
def magnitudes(values, out):
    count = 0
    for i in range(values.size):
        magnitude = u32(bits_of(values[i]) & MAGNITUDE)
        out[count] = magnitude
        count += magnitude != u32(0)
    return count


@kernel
def count_high(found, counts):
    for i in range(found.size):
        counts[found[i] >> u32(15)] += 1


@kernel
def count_low(found, high, counts):
    for i in range(found.size):
        if found[i] >> u32(15) == high:
            counts[found[i] & u32(0x7FFF)] += 1


@kernel
def count_equal(found, cut):
    count = 0
    for i in range(found.size):
        count += found[i] == cut
    return count


@kernel
def trim(values, cut, ties_kept):
    kept = 0
    for i in range(values.size):
        magnitude = u32(bits_of(values[i]) & MAGNITUDE)
        if magnitude == cut and ties_kept > 0:
            ties_kept -= 1
            kept += 1
        elif magnitude > cut:
            kept += 1
        else:
            values[i] = f32(0)
    return kept


# ---------------------------------------------------------------- combining


@kernel
def scaled(values, weight, out):
    for i in range(values.size):
        out[i] = weight * values[i]


@kernel
def add_scaled(total, values, weight):
    for i in range(total.size):
        total[i] += weight * values[i]


@kernel
def vote(above, below, above_share, below_share, values, weight, share):
    # Two loops: LLVM gives up on one that would have to be checked for five overlapping arrays.
    for i in range(values.size):
        value = weight * values[i]
        nan = all_ones(value != value)
        above[i] += float_of(u32(bits_of(value) & (all_ones(value > f32(0)) | nan)))
        below[i] += float_of(u32(bits_of(value) & (all_ones(value < f32(0)) | nan)))
    for i in range(values.size):
        value = weight * values[i]
        above_share[i] += float_of(u32(bits_of(share) & all_ones(value > f32(0))))
        below_share[i] += float_of(u32(bits_of(share) & all_ones(value < f32(0))))


@kernel
def elect(above, below, above_share, below_share):
    for i in range(above.size):
        total = above[i] + below[i]
        nan = all_ones(total != total)
        mean_above = bits_of(above[i] / above_share[i]) & all_ones(total > f32(0))
        mean_below = bits_of(below[i] / below_share[i]) & all_ones(total < f32(0))
        above[i] = float_of(u32(mean_above | mean_below | (bits_of(total) & nan)))


# ---------------------------------------------------------------- sums over a tensor


@helper
def fold(lanes):
    total = f64(0)
    for lane in range(SUM_LANES):
        total += lanes[lane]
    return total


@kernel
def sum_magnitudes(values):
    lanes = np.zeros(SUM_LANES, f64)
    for i in range(values.size):
        lanes[i % SUM_LANES] += f64(abs(values[i]))
    return fold(lanes)


@kernel
def sum_products(left, right):
    lanes = np.zeros(SUM_LANES, f64)
    for i in range(left.size):
        lanes[i % SUM_LANES] += f64(left[i]) * f64(right[i])
    return fold(lanes)


@kernel
def add_onto(base, values, factor, out):
    for i in range(base.size):
        out[i] = base[i] + factor * values[i]
