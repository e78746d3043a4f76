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
i8, i16, i32, f32, f64 = np.int8, np.int16, np.int32, np.float32, np.float64

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
        types.int16: lambda value, like: i16(
            shrink(value, 16, 10, 15, 0x477FF000, 0x7C00, 0x7E00)
        ),
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


# ---------------------------------------------------------------- deltas in, weights out


@kernel
def delta(raw, base, out, threshold_bits):
    peak = i32(0)
    over = i32(0)
    for i in range(raw.size):
        difference = to_float(raw[i]) - base[i]
        out[i] = difference
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


# ---------------------------------------------------------------- the mask

PHILOX_WIDTH = 8
"""Philox calls computed side by side: LLVM splits the vectors to the machine's width."""


@intrinsic
def philox_calls(_typing, first, key0, key1, address):
    """Store PHILOX_WIDTH calls for the counters first, first + 1, … at `address`."""

    def build(_context, builder, _signature, arguments):
        first, key0, key1, address = arguments
        narrow = ir.VectorType(ir.IntType(32), PHILOX_WIDTH)
        wide = ir.VectorType(ir.IntType(64), PHILOX_WIDTH)

        def splat(value, kind):
            single = builder.insert_element(
                ir.Constant(kind, ir.Undefined), value, ir.IntType(32)(0)
            )
            zeros = ir.Constant(
                ir.VectorType(ir.IntType(32), PHILOX_WIDTH), [0] * PHILOX_WIDTH
            )
            return builder.shuffle_vector(single, single, zeros)

        def constant(kind, value):
            return ir.Constant(kind, [value] * PHILOX_WIDTH)

        def shuffle(left, right, order):
            order = ir.Constant(ir.VectorType(ir.IntType(32), len(order)), list(order))
            return builder.shuffle_vector(left, right, order)

        def multiply(words, factor):
            # Halves are taken by shuffling: shifted and truncated, LLVM would go on in 64 bits.
            product = builder.mul(builder.zext(words, wide), constant(wide, factor))
            halves = builder.bitcast(product, ir.VectorType(ir.IntType(32), 2 * PHILOX_WIDTH))
            low = shuffle(halves, halves, range(0, 2 * PHILOX_WIDTH, 2))
            high = shuffle(halves, halves, range(1, 2 * PHILOX_WIDTH, 2))
            return high, low

        steps = ir.Constant(wide, list(range(PHILOX_WIDTH)))
        index = builder.add(splat(first, wide), steps)
        c0 = builder.trunc(index, narrow)
        c1 = builder.trunc(builder.lshr(index, constant(wide, 32)), narrow)
        c2 = c3 = constant(narrow, 0)
        for _ in range(ROUNDS):
            high0, low0 = multiply(c0, 0xD2511F53)
            high1, low1 = multiply(c2, 0xCD9E8D57)
            c0 = builder.xor(builder.xor(high1, c1), splat(key0, narrow))
            c2 = builder.xor(builder.xor(high0, c3), splat(key1, narrow))
            c1, c3 = low1, low0
            key0 = builder.add(key0, ir.IntType(32)(0x9E3779B9))
            key1 = builder.add(key1, ir.IntType(32)(0xBB67AE85))

        everything = list(range(2 * PHILOX_WIDTH))
        pairs = shuffle(c0, c1, everything), shuffle(c2, c3, everything)
        by_call = [word * PHILOX_WIDTH + call for call in range(PHILOX_WIDTH) for word in range(4)]
        words = shuffle(*pairs, by_call)
        builder.store(words, builder.inttoptr(address, words.type.as_pointer()), align=4)
        return ir.Constant(ir.IntType(8).as_pointer(), None)

    return types.none(types.uint64, types.uint32, types.uint32, types.intp), build


@helper
def tie_word(element, key0, key1):
    c0, c1, c2, c3 = u32(element), u32(element >> u64(32)), u32(TIE_BREAK), u32(0)
    for _ in range(ROUNDS):
        product0 = u64(0xD2511F53) * u64(c0)
        product1 = u64(0xCD9E8D57) * u64(c2)
        c0 = u32(u32(product1 >> u64(32)) ^ c1 ^ key0)
        c2 = u32(u32(product0 >> u64(32)) ^ c3 ^ key1)
        c1, c3 = u32(product1), u32(product0)
        key0 = u32(key0 + u32(0x9E3779B9))
        key1 = u32(key1 + u32(0xBB67AE85))
    return c0


@helper
def fill_lanes(lanes, size, start, key0, key1, high, low):
    """Set lanes[i] to 1 where element start + i is kept, else to 0; return how many are kept."""
    for i in range(0, size, PHILOX_WIDTH * LANES_PER_CALL):
        philox_calls(u64((start + i) // LANES_PER_CALL), key0, key1, lanes.ctypes.data + i)

    eights = lanes.view(u64)
    eights_used = (size + 7) // 8
    ones = u64(0x0101010101010101)
    pattern = u64(ones * u64(high))
    for i in range(eights_used):
        difference = u64(eights[i] ^ pattern)
        if (difference - ones) & ~difference & u64(0x8080808080808080):  # a zero byte: a tie
            for j in range(8 * i, 8 * i + 8):
                if lanes[j] == high:
                    wins = tie_word(u64(start + j), key0, key1) < low
                    lanes[j] = u8(0) if wins else u8(255)

    limit = u8(max(high, 1))  # winners are 0 and losers 255, on the right side of any limit
    for i in range(size):
        lanes[i] = u8(lanes[i] < limit)
    for i in range(size, 8 * eights_used):
        lanes[i] = u8(0)

    kept = 0
    for first in range(0, eights_used, 255):  # 255 additions cannot overflow a byte
        sums = u64(0)
        for i in range(first, min(first + 255, eights_used)):
            sums += eights[i]
        for byte in range(8):
            kept += (sums >> u64(8 * byte)) & u64(255)
    return kept


@kernel
def drop(values, start, key0, key1, high, low, factor, lanes):
    kept = fill_lanes(lanes, values.size, start, key0, key1, high, low)
    for i in range(values.size):
        keep = u32(u32(0) - u32(lanes[i]))
        values[i] = float_of(u32(bits_of(values[i] * factor) & keep))
    return kept


@kernel
def scale_by(values, factor):
    for i in range(values.size):
        values[i] *= factor


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
def add(left, right, out):
    for i in range(left.size):
        out[i] = left[i] + right[i]
