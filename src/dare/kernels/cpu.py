"""The kernels in Numba: one simple loop each, written so that LLVM vectorises it.

Selections are made on bit patterns, not with branches, because a branch in the loop body keeps
LLVM from vectorising it. No fast-math: each operation rounds once, as in `reference`. Kernels
neither make arrays nor raise errors (`native` says why); scratch arrays are their last arguments,
brought by `native`.

A function here has the name, the arguments and the bits of its namesake in `reference`, whose
docstring says what it computes. Merges call them through `native`.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import carray, cfunc, errors, from_dtype, njit, types
from numba.extending import intrinsic, overload

from dare.kernels import ROW
from dare.kernels.native import DATA_OFFSET, DIGITS, LENGTHS_OFFSET, PLACES_AT_ONCE, TILE
from dare.kernels.reference import (
    EVEN_STEPS,
    FEW,
    FINE_PARTS,
    INDEX_BITS,
    INVERSES,
    LARGEST,
    ODD_STEPS,
    PARTS,
    SCALE_GROUP,
    SLACK,
    SUM_LANES,
)
from dare.tensors.chunks import CHUNK
from dare.tensors.mask import CALLS_PER_GROUP, GROUP, ROUNDS, THRESHOLD_BITS, TIE_BREAK

u8, u16, u32, u64 = np.uint8, np.uint16, np.uint32, np.uint64
i8, i16, i32, i64, f32, f64 = np.int8, np.int16, np.int32, np.int64, np.float32, np.float64

kernel = njit(error_model="numpy")
helper = njit(inline="always")

MAGNITUDE = u32(0x7FFFFFFF)
INFINITY = i32(0x7F800000)
LAST_BIT = u64(1 << 63)


# ---------------------------------------------------------------- entries for C


@intrinsic
def pointer_to(_typing, address, like):
    """Return an address as a pointer to elements of a type, or of the type of an array."""

    def build(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return types.CPointer(like.dtype)(types.int64, like), build


def _unary(signature, emit):
    """Make an intrinsic of one argument out of a function that emits its code."""

    @intrinsic
    def operation(_typing, argument):
        def build(_context, builder, _signature, arguments):
            return emit(builder, arguments[0])

        return signature, build

    return operation


def _load(builder, address, kind, align=None):
    """Emit the load of a value at an address."""
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=align)


word_at = _unary(types.int64(types.int64), lambda b, at: _load(b, at, ir.IntType(64)))
double_at = _unary(types.float64(types.int64), lambda b, at: _load(b, at, ir.DoubleType()))


def _store(builder, value, address, align=None):
    """Emit the store of a value at an address; return the constant that stands for None."""
    builder.store(value, builder.inttoptr(address, value.type.as_pointer()), align=align)
    return ir.Constant(ir.IntType(8).as_pointer(), None)


@intrinsic
def put(_typing, address, value):
    """Store a number at an address, as int64 or float64."""

    def build(_context, builder, _signature, arguments):
        address, value = arguments
        return _store(builder, value, address)

    stored = types.float64 if isinstance(value, types.Float) else types.int64
    return types.none(types.int64, stored), build


@njit
def put_both(address, values):
    put(address, values[0])
    put(address + 8, values[1])


@helper
def words_of(values):
    """Return an array's elements, eight bytes at a time."""
    return carray(pointer_to(values.ctypes.data, u64), values.nbytes // 8)


def entry_of(dispatcher, described):
    """Make a C callback that calls a kernel with the contents of a block of words.

    There is a word for each argument, of the types that `native.describe` names, and after them one
    for each result, up to two. Return it, and the results' letters as `native.Code` has them.
    """
    given = tuple(map(_numba_type, described))
    dispatcher.compile(given)
    (returned,) = (s.return_type for s in dispatcher.nopython_signatures if s.args == given)
    is_tuple = isinstance(returned, types.BaseTuple)
    results = [*returned] if is_tuple else [] if returned == types.none else [returned]
    call = f"kernel({', '.join(map(_argument, range(len(described)), described))})"
    if results:
        call = f"{'put_both' if is_tuple else 'put'}(block + {8 * len(described)}, {call})"
    entry = eval(f"lambda block: {call}", {**globals(), "kernel": dispatcher})  # noqa: S307 (as above)
    letters = "".join("d" if isinstance(kind, types.Float) else "q" for kind in results)
    return cfunc(types.void(types.int64))(entry), f"({letters})" if is_tuple else letters


def _numba_type(described):
    dtype, *dimensions = described.split()
    element = from_dtype(np.dtype(dtype))
    return types.Array(element, int(dimensions[0]), "C") if dimensions else element


def _argument(place, described):
    """Return the Python expression that a call passes for an argument of a type."""
    dtype, *dimensions = described.split()
    at, name = f"block + {8 * place}", dtype.replace("bool", "bool_")
    if not dimensions:
        return f"np.{name}({'double_at' if dtype.startswith('float') else 'word_at'}({at}))"
    lengths = f"word_at(word_at({at}) + {LENGTHS_OFFSET})"
    shape = [f"word_at({lengths} + {8 * axis})," for axis in range(int(dimensions[0]))]
    data = f"pointer_to(word_at(word_at({at}) + {DATA_OFFSET}), np.{name})"
    return f"carray({data}, ({''.join(shape)}))"


# ---------------------------------------------------------------- bits


bits_of = _unary(types.uint32(types.float32), lambda b, value: b.bitcast(value, ir.IntType(32)))
float_of = _unary(types.float32(types.uint32), lambda b, bits: b.bitcast(bits, ir.FloatType()))
# Counts the zeros below the lowest bit that is set; the word must not be zero.
trailing_zeros = _unary(types.int64(types.uint64), lambda b, word: b.cttz(word, ir.IntType(1)(1)))
count_bits = _unary(types.int64(types.uint64), lambda b, word: b.ctpop(word))


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
def widen(code, width, mantissa_bits, bias, first_special, special):
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
        types.int16: lambda code: widen(u32(u16(code)), 16, 10, 15, 0x7C00, 0x7F800000),
        types.uint16: lambda code: float_of(u32(u32(code) << u32(16))),
        types.uint8: lambda code: widen(u32(code), 8, 3, 7, 0x7F, 0x7FC00000),
        types.int8: lambda code: widen(u32(u8(code)), 8, 2, 15, 0x7C, 0x7F800000),
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


def stored_as(code, like):
    """Encode one element as the carrier type of `like`; one of that type stays as it is."""
    raise NotImplementedError


@overload(stored_as, inline="always")
def _stored_as(code, like):
    if code == like:
        return lambda code, like: code
    return lambda code, like: from_float(to_float(code), like)


def _chosen(table, carrier):
    if carrier not in table:
        raise errors.TypingError(f"{carrier} carries no weight type")
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

# Philox calls computed side by side: LLVM splits the vectors to the machine's width.
PHILOX_WIDTH = CALLS_PER_GROUP

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
    """Emit PHILOX_WIDTH calls on the vector of 64-bit counters `index`; return four vectors.

    On x86 each word lies in 64 bits, and its upper half is whatever it is: the processor multiplies
    the lower halves alone, and to pack words would take longer than all the rest. ARM packs fast.
    """
    is_spread = builder.module.triple.startswith("x86")
    kind, lower = _wide if is_spread else _narrow, _constant(_wide, 0xFFFFFFFF)

    def halves(vector):
        if is_spread:
            return vector, builder.lshr(vector, _constant(_wide, 32))
        # Taken by shuffling: shifted and truncated, LLVM would carry on in 64 bits.
        words = builder.bitcast(vector, ir.VectorType(_word, 2 * PHILOX_WIDTH))
        low = _shuffle(builder, words, words, range(0, 2 * PHILOX_WIDTH, 2))
        high = _shuffle(builder, words, words, range(1, 2 * PHILOX_WIDTH, 2))
        return low, high

    def multiply(words, factor):
        words = builder.and_(words, lower) if is_spread else builder.zext(words, _wide)
        return halves(builder.mul(words, _constant(_wide, factor)))

    def splat(key):
        return _splat(builder, builder.zext(key, kind.element), kind)

    c0, c1 = halves(index)
    c2, c3 = _constant(kind, domain), _constant(kind, 0)
    for _ in range(ROUNDS):
        low0, high0 = multiply(c0, 0xD2511F53)
        low1, high1 = multiply(c2, 0xCD9E8D57)
        c0 = builder.xor(builder.xor(high1, c1), splat(key0))
        c2 = builder.xor(builder.xor(high0, c3), splat(key1))
        c1, c3 = low1, low0
        key0 = builder.add(key0, _word(0x9E3779B9))
        key1 = builder.add(key1, _word(0xBB67AE85))
    return [builder.trunc(words, _narrow) for words in (c0, c1, c2, c3)]


@intrinsic
def philox_lanes(_typing, first, key0, key1, high, lanes, ties):
    """Draw GROUP lanes with the calls first, first + 1, …

    Stores 255 for every lane below `high` at the address `lanes`, and 255 for every lane equal to
    it at `ties`; returns whether there is any of these.
    """

    def build(_context, builder, _signature, arguments):
        first, key0, key1, high, lanes, ties = arguments
        octets = ir.VectorType(ir.IntType(8), 4 * PHILOX_WIDTH)
        steps = ir.Constant(_wide, list(range(PHILOX_WIDTH)))
        index = builder.add(_splat(builder, first, _wide), steps)
        limit = builder.mul(builder.zext(high, _word), _word(0x01010101))
        limit = builder.bitcast(_splat(builder, limit, _narrow), octets)

        def compared(operator, words):
            lower = builder.icmp_unsigned(operator, builder.bitcast(words, octets), limit)
            return builder.bitcast(builder.sext(lower, octets), _narrow)

        words = _philox(builder, index, 0, key0, key1)
        equal = [compared("==", word) for word in words]
        for place, word in enumerate(words):
            offset = ir.IntType(64)(4 * PHILOX_WIDTH * place)
            _store(builder, compared("<", word), builder.add(lanes, offset), align=4)
            _store(builder, equal[place], builder.add(ties, offset), align=4)
        joined = builder.or_(builder.or_(equal[0], equal[1]), builder.or_(equal[2], equal[3]))
        whole = ir.IntType(32 * PHILOX_WIDTH)
        return builder.icmp_unsigned("!=", builder.bitcast(joined, whole), whole(0))

    signature = types.boolean(
        types.uint64, types.uint32, types.uint32, types.uint8, types.intp, types.intp
    )
    return signature, build


@intrinsic
def philox_ties(_typing, counters, key0, key1, address):
    """Store the tie-breaking words of the PHILOX_WIDTH elements listed at `counters`."""

    def build(_context, builder, _signature, arguments):
        counters, key0, key1, address = arguments
        index = _load(builder, counters, _wide, align=8)
        c0, _, _, _ = _philox(builder, index, TIE_BREAK, key0, key1)
        return _store(builder, c0, address, align=4)

    return types.none(types.intp, types.uint32, types.uint32, types.intp), build


def _lane_word(builder, address):
    """Emit the 64 lanes at an address as bits, the first one in the lowest."""
    octets = ir.VectorType(ir.IntType(8), 64)
    lanes = _load(builder, address, octets, align=1)
    is_set = builder.icmp_unsigned("!=", lanes, ir.Constant(octets, [0] * 64))
    return builder.bitcast(is_set, ir.IntType(64))


lane_word = _unary(types.uint64(types.intp), _lane_word)


@kernel
def draw_tile(lanes, used, start, key0, key1, high, low, ties, elements, words):
    """Set the first `used` lanes of a tile to 255 where kept, all others to 0; return how many."""
    groups = 0  # with ties: two of five, so that a branch would often be guessed wrongly
    for i in range(0, used, GROUP):
        call = u64((start + i) // GROUP * CALLS_PER_GROUP)
        address, tied = lanes.ctypes.data + i, ties.ctypes.data + GROUP * groups
        words[groups] = u32(i)
        groups += i64(philox_lanes(call, key0, key1, u8(high), address, tied))
    found = 0
    for place in range(0, GROUP * groups, 64):
        left = lane_word(ties.ctypes.data + place)
        first = start + i64(words[place // GROUP]) + place % GROUP
        elements[found] = u64(first + trailing_zeros(left | LAST_BIT))
        found += left != u64(0)
        left &= left - u64(1)
        while left:
            elements[found] = u64(first + trailing_zeros(left))
            found += 1
            left &= left - u64(1)
    for i in range(0, found, PHILOX_WIDTH):
        philox_ties(elements.ctypes.data + 8 * i, key0, key1, words.ctypes.data + 4 * i)
    for i in range(found):
        lanes[i64(elements[i]) - start] = u8(255) if words[i] < low else u8(0)
    for i in range(used, TILE):
        lanes[i] = u8(0)
    return count_set(words_of(lanes))


@kernel
def draw(lanes, size, start, key0, key1, high, low, ties, elements, words):
    kept = 0
    for first in range(0, size, TILE):
        tile = lanes[first : first + TILE]
        used = min(TILE, size - first)
        kept += draw_tile(tile, used, start + first, key0, key1, high, low, ties, elements, words)
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


@helper
def subtract(code, base, peak, over, threshold_bits):
    """Return an element's delta, with the largest magnitude and the count over a threshold."""
    difference = to_float(code) - base
    magnitude = magnitude_of(difference)
    return difference, max(peak, magnitude), i32(over + i32(magnitude > threshold_bits))


@kernel
def delta(raw, base, lanes, out, threshold_bits):
    peak = over = i32(0)
    for i in range(raw.size):
        difference, peak, over = subtract(raw[i], base[i], peak, over, threshold_bits)
        out[i] = masked(difference, lanes[i])
    return peak, over


@helper
def exact_sum(code, change, value, like):
    """Encode the sum of base and change as the carrier type of `like`; 0 leaves the base's bits."""
    moved, unmoved = from_float(value, like), stored_as(code, like)
    return unmoved if change == f32(0) else moved


def number_sum(code, change, value, like):
    """Do `exact_sum` where nothing is NaN."""
    raise NotImplementedError


@overload(number_sum, inline="always")
def _number_sum(code, change, value, like):
    def bfloat16(code, change, value, like):  # chosen before it is packed, which x86 does slowly
        bits = bits_of(to_float(code) if change == f32(0) else value)
        odd = u32(u32(bits >> u32(16)) & u32(1))
        return u16(u32(bits + u32(0x7FFF) + odd) >> u32(16))

    if code == like == types.uint16:
        return bfloat16
    return lambda code, change, value, like: exact_sum(code, change, value, like)


@kernel
def add_to_base(raw, merged, scale, out):
    peak = i32(0)
    for i in range(raw.size):
        value = to_float(raw[i]) + scale * merged[i]
        peak = max(peak, magnitude_of(value))
        out[i] = number_sum(raw[i], merged[i], value, out[i])
    if peak > INFINITY:
        for i in range(raw.size):
            value = to_float(raw[i]) + scale * merged[i]
            out[i] = exact_sum(raw[i], merged[i], value, out[i])
    return peak


# ---------------------------------------------------------------- trimming


@kernel
def measure_tile(raw, base, lanes, low, high, bits, marks):
    """Write a tile's magnitudes, and mark those from `low` to `high`; count these, and above."""
    above = inside = peak = u32(0)
    for i in range(raw.size):
        difference = bits_of(masked(to_float(raw[i]) - to_float(base[i]), lanes[i]))
        magnitude = u32(difference & MAGNITUDE)
        is_inside = u32(magnitude - low) <= u32(high - low)
        bits[i] = magnitude
        marks[i] = u8(is_inside)
        above = u32(above + u32(magnitude > high))
        inside = u32(inside + u32(is_inside))
        peak = max(peak, magnitude)
    return above, inside, peak


@kernel
def collect_keys(raw, base, lanes, low, high, start, keys, figures, bits, marks):
    peak = u32(0)
    count = figures[1]
    for first in range(0, raw.size, TILE):
        end = min(first + TILE, raw.size)
        tile = raw[first:end], base[first:end], lanes[first:end]
        above, inside, top = measure_tile(*tile, u32(low), u32(high), bits, marks)
        figures[0] += above
        peak = max(peak, top)
        if inside:
            last = u64((1 << INDEX_BITS) - 1 - start - first)
            for at in range(0, end - first, 64):
                left = lanes_from(marks, at, end - first)
                while left:
                    i = at + trailing_zeros(left)
                    if count < keys.size:
                        keys[count] = u64(bits[i]) << u64(INDEX_BITS) | (last - u64(i))
                    count += 1
                    left &= left - u64(1)
    figures[1] = count
    return peak


@kernel
def count_bins(raw, base, lanes, low, shift, counts, seen, figures, bits, marks):
    least, most = u32(max(low, 1)), u32(min(low + (counts.size << shift), 1 << 31) - 1)
    peak = u32(0)
    for first in range(0, raw.size, TILE):
        end = min(first + TILE, raw.size)
        tile = raw[first:end], base[first:end], lanes[first:end]
        above, inside, top = measure_tile(*tile, least, most, bits, marks)
        figures[0] += above
        figures[1] += inside
        peak = max(peak, top)
        if inside:
            for at in range(0, end - first, 64):
                left = lanes_from(marks, at, end - first)
                while left:
                    place = i64(bits[at + trailing_zeros(left)]) - low
                    inside_bin = u32(place & ((1 << shift) - 1))
                    counts[place >> shift] += 1
                    seen[place >> shift] |= u32(inside_bin | (~inside_bin << u32(16)))
                    left &= left - u64(1)
    return peak


@kernel
def clear_outside(raw, base, lanes, least, most):
    kept = u32(0)
    for i in range(raw.size):
        magnitude = u32(bits_of(to_float(raw[i]) - base[i]) & MAGNITUDE)
        lane = u8(u32(lanes[i]) & all_ones((magnitude >= least) & (magnitude <= most)))
        lanes[i] = lane
        kept = u32(kept + u32(lane != u8(0)))
    return kept


@kernel
def keep_band(raw, base, lanes, start, least, end, most, begin):
    kept = first = 0
    while first < raw.size:  # parts in which equals are all kept, or all dropped
        place, last = start + first, start + raw.size
        last = end if place < end < last else last
        last = (begin if place < begin < last else last) - start
        part = raw[first:last], base[first:last], lanes[first:last]
        low, high = least + (place >= end), most - (place < begin)
        low = low if high >= 0 else 1
        kept += clear_outside(*part, u32(low), u32(max(high, 0)))
        first = last
    return kept


# ---------------------------------------------------------------- combining


@kernel
def add_scaled(total, values, weight):
    for i in range(total.size):
        total[i] += weight * values[i]


@helper
def ballot(value, share, sums, i, size):
    """Cast a weighted value: sums holds four rows of `size`, P, N and their shares."""
    above = all_ones(value > f32(0))
    below = all_ones(value < f32(0))
    sums[i] += float_of(u32(bits_of(value) & ~below))  # a NaN goes into both sums
    sums[size + i] += float_of(u32(bits_of(value) & ~above))
    sums[2 * size + i] += float_of(u32(bits_of(share) & above))
    sums[3 * size + i] += float_of(u32(bits_of(share) & below))


@helper
def outcome(sums, balance, i, size):
    """Return the mean of the side that the balance is on; its sum where there are no shares."""
    above = all_ones(balance > f32(0))
    side = float_of(choose(above, bits_of(sums[i]), bits_of(sums[size + i])))
    share = choose(above, bits_of(sums[2 * size + i]), bits_of(sums[3 * size + i]))
    undivided = all_ones(float_of(share) == f32(0))
    mean = side / float_of(choose(undivided, bits_of(f32(1)), share))
    total = sums[i] + sums[size + i]
    elected = u32(bits_of(mean) & ~all_ones(balance == f32(0)))
    return float_of(choose(all_ones(total == total), elected, u32(0x7FC00000)))


@kernel
def vote(sums, values, weight, share):
    for i in range(values.size):
        ballot(weight * values[i], share, sums, i, values.size)


@kernel
def elect(sums, balance, out):
    for i in range(out.size):
        out[i] = outcome(sums, balance[i], i, out.size)


@kernel
def add_extremes(values, weight, total, most, least):
    for i in range(values.size):
        term = weight * values[i]
        total[i] += term
        is_nan = term != term
        above = all_ones((term > most[i]) | is_nan)
        below = all_ones((term < least[i]) | is_nan)
        most[i] = float_of(choose(above, bits_of(term), bits_of(most[i])))
        least[i] = float_of(choose(below, bits_of(term), bits_of(least[i])))


@kernel
def elect_extremes(total, most, least):
    for i in range(total.size):
        value = total[i]
        elected = choose(all_ones(value > f32(0)), bits_of(most[i]), bits_of(value))
        total[i] = float_of(choose(all_ones(value < f32(0)), bits_of(least[i]), elected))


@kernel
def count_needing(values, factor, total, selectivity, counts):
    for i in range(values.size):
        own = values[i] * factor
        counts[i] = i32(counts[i] + i32(abs(own) >= selectivity * abs(total[i] - own)))


@kernel
def keep_needed(total, counts, least):
    for i in range(total.size):
        value = total[i]
        keep = (counts[i] >= least) | (value != value)
        total[i] = float_of(u32(bits_of(value) & all_ones(keep)))


# ---------------------------------------------------------------- all of it, tile by tile


@kernel
def tile_sum(raw, base, lanes, weight, total, threshold_bits):
    peak = over = i32(0)
    for i in range(raw.size):
        difference, peak, over = subtract(raw[i], base[i], peak, over, threshold_bits)
        total[i] += weight * masked(difference, lanes[i])
    return peak, over


@kernel
def tile_vote(raw, base, lanes, weight, share, sums, threshold_bits):
    peak = over = i32(0)
    for i in range(raw.size):
        difference, peak, over = subtract(raw[i], base[i], peak, over, threshold_bits)
        ballot(weight * masked(difference, lanes[i]), share, sums, i, ROW)
    return peak, over


@kernel
def combine_tiles(
    base_raw,
    like,
    addresses,
    start,
    selections,
    factors,
    elects,
    threshold_bits,
    out,
    figures,
    ties,
    elements,
    words,
    lanes,
    base,
    sums,
):
    size = base_raw.size
    for first in range(0, size, TILE):
        chunk = first // CHUNK
        used = min(TILE, size - first)
        decode(base_raw[first : first + used], base)
        total = out[first : first + used]
        if elects:
            sums[:] = f32(0)
        else:
            total[:] = f32(0)
        for model in range(addresses.size):
            raw = carray(pointer_to(addresses[model], like), size)[first : first + used]
            weight, share = factors[model, 0], factors[model, 1]
            key0, key1 = u32(selections[model, 0]), u32(selections[model, 1])
            high, low = selections[model, 2], u32(selections[model, 3])
            least, end = selections[model, 4], selections[model, 5]
            most, begin = selections[model, 6], selections[model, 7]
            if high < 256:
                figures[chunk, model, 2] += draw_tile(
                    lanes, used, start + first, key0, key1, high, low, ties, elements, words
                )
            else:
                lanes[:] = u8(255)
                figures[chunk, model, 2] += used
            if least >= 0:
                figures[chunk, model, 3] += keep_band(
                    raw, base, lanes, start + first, least, end, most, begin
                )
            if elects:
                peak, over = tile_vote(raw, base, lanes, weight, share, sums, threshold_bits)
            else:
                peak, over = tile_sum(raw, base, lanes, weight, total, threshold_bits)
            figures[chunk, model, 0] = max(figures[chunk, model, 0], i64(peak))
            figures[chunk, model, 1] += i64(over)
        if elects:
            for i in range(used):
                total[i] = outcome(sums, sums[i] + sums[ROW + i], i, ROW)


# ---------------------------------------------------------------- sums over a tensor


@kernel
def sum_products(left, right, lanes):
    whole = left.size // SUM_LANES * SUM_LANES
    for start in range(0, whole, SUM_LANES):
        for lane in range(SUM_LANES):
            lanes[lane] += f64(left[start + lane]) * f64(right[start + lane])
    for i in range(whole, left.size):
        lanes[i - whole] += f64(left[i]) * f64(right[i])
    total = f64(0)
    for lane in range(SUM_LANES):
        total += lanes[lane]
    return total


# ---------------------------------------------------------------- products


@kernel
def low_rank(left, right, first, scale, out):
    rank, columns = right.shape
    done = 0
    while done < out.size:
        row, column = divmod(first + done, columns)
        part = out[done : done + min(columns - column, out.size - done)]
        end = column + part.size
        part[:] = f32(0)
        number = 0
        while number + 4 <= rank:  # four at a time, in order, for fewer trips through `part`
            a, b = left[row, number], left[row, number + 1]
            c, d = left[row, number + 2], left[row, number + 3]
            one, two = right[number, column:end], right[number + 1, column:end]
            three, four = right[number + 2, column:end], right[number + 3, column:end]
            for i in range(part.size):
                part[i] = (((part[i] + a * one[i]) + b * two[i]) + c * three[i]) + d * four[i]
            number += 4
        while number < rank:
            a, one = left[row, number], right[number, column:end]
            for i in range(part.size):
                part[i] += a * one[i]
            number += 1
        for i in range(part.size):
            part[i] *= scale
        done += part.size


# ---------------------------------------------------------------- what masks compare


@intrinsic
def philox_bytes(_typing, first, key0, key1, address):
    """Store the GROUP lanes that the calls first, first + 1, … make."""

    def build(_context, builder, _signature, arguments):
        first, key0, key1, address = arguments
        steps = ir.Constant(_wide, list(range(PHILOX_WIDTH)))
        index = builder.add(_splat(builder, first, _wide), steps)
        for place, words in enumerate(_philox(builder, index, 0, key0, key1)):
            offset = ir.IntType(64)(4 * PHILOX_WIDTH * place)
            stored = _store(builder, words, builder.add(address, offset), align=4)
        return stored

    return types.none(types.uint64, types.uint32, types.uint32, types.intp), build


@helper
def draw_lanes(lanes, size, start, key0, key1):
    for i in range(0, size, GROUP):
        call = u64((start + i) // GROUP * CALLS_PER_GROUP)
        philox_bytes(call, key0, key1, lanes.ctypes.data + i)


LARGEST_NUMBER = u64(1 << THRESHOLD_BITS)


@kernel
def draw_order(out, start, key0, key1, among, lanes, ties, elements, words):
    size = out.size
    draw_lanes(lanes, size, start, key0, key1)
    for i in range(size):
        out[i] = LARGEST_NUMBER - (u64(lanes[i]) << u64(32))
        ties[i] = u8((i < among) | (i >= size - among) | (among > FEW))
    for distance in range(1, min(among, FEW + 1, size)):
        ahead, ties_ahead = lanes[distance:], ties[distance:]
        for i in range(size - distance):
            ties[i] |= u8(lanes[i] == ahead[i])
        for i in range(size - distance):
            ties_ahead[i] |= u8(lanes[i] == ahead[i])
    found = 0
    for i in range(size):
        elements[found] = u64(start + i)
        found += ties[i] != u8(0)
        if found == PHILOX_WIDTH or i == size - 1:
            philox_ties(elements.ctypes.data, key0, key1, words.ctypes.data)
            for j in range(found):
                out[i64(elements[j]) - start] -= u64(words[j])
            found = 0


# ---------------------------------------------------------------- rows and columns


@kernel
def add_products(left, right, first, columns, by_column, sums):
    row, column = divmod(first, columns)
    for i in range(left.size):
        sums[column if by_column else row] += f64(left[i]) * f64(right[i])
        column += 1
        if column == columns:
            row, column = row + 1, 0


# ---------------------------------------------------------------- scores


@helper
def less_one(part):
    power = 1.0
    for inverse in INVERSES:
        power = 1 + part * power * inverse
    return part * power


@helper
def exponential(x):
    power = 1 + less_one(x * (1 / 256))
    for _ in range(8):
        power = power * power
    return power


@helper
def tangent_of(x):
    grown = less_one((x if x < 20 else 20.0) * (1 / 128))
    for _ in range(8):
        grown = grown * (grown + 2)
    return grown / (grown + 2)


@kernel
def mark_scoring(values, total, factor, inverse_peak, models, floor, marks):
    for i in range(values.size):
        scaled = factor * f64(values[i])
        part = abs(scaled) * inverse_peak
        part = part if part < 1 else 1.0
        together = scaled * f64(total[i])
        grown = 1 + models * (1 - part * part) * (1 / 16)
        for _ in range(4):
            grown = grown * grown
        most = (together if together < 1 else 1.0) * SLACK
        marks[i] = u8((together > 0) & (most >= floor * grown))


@kernel
def score_parts(parts, products, models, out):
    for i in range(parts.size):
        part = parts[i]
        out[i] = f32(exponential(models * (part * part - 1)) * tangent_of(products[i]))


@kernel
def balance_scores(
    values, total, factor, peak, models, floor, out, marks, places, parts, products, found
):
    inverse_peak = 1 / peak
    for first in range(0, values.size, TILE):
        end = min(first + TILE, values.size)
        some, whole, scores = values[first:end], total[first:end], out[first:end]
        mark_scoring(some, whole, factor, inverse_peak, models, floor, marks)
        count = find_lanes(marks, 0, end - first, places)
        for i in range(count):
            scaled = factor * f64(some[places[i]])
            part = abs(scaled) * inverse_peak
            parts[i] = part if part < 1 else 1.0
            products[i] = scaled * f64(whole[places[i]])
        score_parts(parts[:count], products[:count], models, found[:count])
        scores[:] = f32(0)
        for i in range(count):
            scores[places[i]] = found[i]


@kernel
def add_shares(scores, values, weight, cut, top, above, below):
    for i in range(scores.size):
        score = scores[i]
        if top == cut:
            share = f32((score == top) & (score > f32(0)))
        else:
            share = max(score - cut, f32(0)) / (top - cut)
        term = share * (weight * values[i])
        above[i] += term if share > f32(0) else f32(0)
        below[i] += share


# ---------------------------------------------------------------- ranks

SHORT_ROW = 64  # rows up to this length are ranked by comparing all pairs, longer ones by sorting
WINDOW = 8  # items of a bucket that are counted at a time
LONG_BUCKET = 128  # items from which on a bucket is sorted and searched
FINITE = i32(0x7F7FFFFF)  # the bits of the largest finite number
WHOLE = f64(3 << 51)  # added to a number and taken away again, it leaves the nearest integer


@helper
def bits_for(count):
    """Return how many bits the numbers below a count have."""
    bits = 0
    while (count - 1) >> bits:
        bits += 1
    return bits


@helper
def item_of(key, bits, size, i):
    """Return a number that orders like the keys, and of equals takes the first for larger."""
    return u64(u64(key) << u64(bits)) | u64(size - 1 - i)


@kernel
def arrange(values, left, buckets, starts, digits, arranged, others):
    """Put a row's items into about as many buckets, each of items above those of the one before.

    Buckets divide the bits of magnitudes to which 1/256 of the largest was added: they are evenly
    filled, whether the magnitudes are of one size or of many. What is not left has the first one;
    return how much that is. Long ones are sorted; those of equal magnitudes are so already.
    """
    size = values.size
    peak = i32(0)
    for i in range(size):
        peak = max(peak, magnitude_of(values[i]))
    offset = float_of(u32(min(peak, FINITE))) * f32(2.0**-8)
    span = bits_of(float_of(u32(min(peak, FINITE))) + offset) - bits_of(offset)
    bits = bits_for(max(size // 2, 1))
    count = 1 << bits
    shift = u32(max(0, bits_for(i64(span) + 1) - bits))
    for i in range(size):
        raised = float_of(u32(min(magnitude_of(values[i]), FINITE))) + offset
        bucket = u32(u32(bits_of(raised) - bits_of(offset)) >> u32(shift & u32(31)))
        buckets[i] = u32(u32(bucket + u32(1)) & all_ones(left[i]))
    starts[: count + 3] = u32(0)
    for i in range(size):
        starts[buckets[i] + u32(2)] += u32(1)
    longest = u32(0)
    for bucket in range(count + 1):
        longest = max(longest, starts[bucket + 2])
        starts[bucket + 2] += starts[bucket + 1]
    for i in range(size - 1, -1, -1):  # so those of equal magnitudes come in order
        bucket, item = buckets[i] + u32(1), item_of(magnitude_of(values[i]), 32, size, i)
        place = starts[bucket]
        starts[bucket] = place + u32(1)
        arranged[place] = item
    for i in range(WINDOW):
        arranged[size + i] = ~u64(0)
    if longest >= u32(LONG_BUCKET):
        for bucket in range(1, count + 1):
            first, end = starts[bucket], starts[bucket + 1]
            if end - first >= u32(LONG_BUCKET):
                sort_items(arranged[first:end], others, digits)
    return starts[1]


@kernel
def sort_items(items, others, digits):
    """Sort by the lowest byte in which items differ, then the next, if they are not in order."""
    ordered, differ = True, u64(0)
    for i in range(items.size - 1):
        ordered &= items[i] < items[i + 1]
        differ |= items[i] ^ items[i + 1]
    if ordered:
        return
    for shift in range(0, 64, 8):
        if (differ >> u64(shift)) & u64(255):
            digits[:] = u32(0)
            for i in range(items.size):
                digits[((items[i] >> u64(shift)) & u64(255)) + u64(1)] += u32(1)
            for digit in range(DIGITS):
                digits[digit + 1] += digits[digit]
            for i in range(items.size):
                digit = (items[i] >> u64(shift)) & u64(255)
                others[digits[digit]] = items[i]
                digits[digit] += u32(1)
            for i in range(items.size):
                items[i] = others[i]


@helper
def rank_in(arranged, first, end, item):
    """Count the items that are smaller than one in a bucket."""
    if end - first < u32(LONG_BUCKET):
        smaller, window = u64(first), u64(first)
        while window < u64(end):
            for i in range(WINDOW):  # those from the end on are larger
                smaller += u64(arranged[window + u64(i)] < item)
            window += u64(WINDOW)
        return u32(smaller)
    while first < end:
        middle = (first + end) // u32(2)
        if arranged[middle] < item:
            first = middle + u32(1)
        else:
            end = middle
    return first


@helper
def nearest(number):
    return i64(number + WHOLE - WHOLE)


@kernel
def rank_left(keys, out, items, others, digits):
    rows, columns = keys.shape
    for row in range(rows):
        count = 0
        for i in range(columns):
            items[count] = item_of(keys[row, i], 32, columns, i)
            count += keys[row, i] != 0
            out[row, i] = u32(0)
        sort_items(items[:count], others, digits)
        step = f64(columns - 1) / f64(max(count - 1, 1))
        for i in range(count):
            place = columns - 1 - i64(items[i] & u64(0xFFFFFFFF))
            out[row, place] = u32(nearest(f64(i) * step))


@kernel
def order_keys(values, left, out):
    for i in range(values.size):
        out[i] = u32(bits_of(values[i]) & MAGNITUDE) | u32(u32(left[i]) << u32(31))


@helper
def select_in(keys, first, columns, least, end, factor, out):
    """Do `select_ranks` for one of flat groups."""
    for i in range(columns):
        own = keys[first + u64(i)]
        smaller = i32(0)
        for j in range(i):
            smaller = i32(smaller + i32(keys[first + u64(j)] < own))
        for j in range(i + 1, columns):
            smaller = i32(smaller + i32(keys[first + u64(j)] <= own))
        taken = all_ones((smaller >= least) & (smaller < end))
        out[first + u64(i)] = float_of(u32(bits_of(factor) & taken))


@helper
def select_groups(keys, rows, columns, leasts, ends, factors, out):
    """Do `select_ranks` for flat groups of a length that is known when this is compiled."""
    varies, gone = False, False
    for left in range(columns):
        varies |= (leasts[left] != leasts[columns]) | (ends[left] != ends[columns])
        varies |= factors[left] != factors[columns]
    for i in range(rows * columns):
        gone |= keys[u64(i)] == 0
    if not (varies and gone):  # a loop that looks nothing up can be vectorised
        least, end, factor = i32(leasts[columns]), i32(ends[columns]), factors[columns]
        for row in range(rows):
            select_in(keys, u64(row) * u64(columns), columns, least, end, factor, out)
        return
    for row in range(rows):
        left = 0
        for i in range(columns):
            left += keys[u64(row) * u64(columns) + u64(i)] != 0
        least, end, factor = i32(leasts[left]), i32(ends[left]), factors[left]
        select_in(keys, u64(row) * u64(columns), columns, least, end, factor, out)


@kernel
def select_ranks(keys, leasts, ends, factors, out, items, _others, digits):
    rows, columns = keys.shape
    flat = carray(pointer_to(keys.ctypes.data, keys), keys.size)  # reshape can raise an error
    found = carray(pointer_to(out.ctypes.data, out), out.size)
    if columns == 4:
        select_groups(flat, rows, 4, leasts, ends, factors, found)
    elif columns == 8:
        select_groups(flat, rows, 8, leasts, ends, factors, found)
    elif columns <= SHORT_ROW:
        select_groups(flat, rows, columns, leasts, ends, factors, found)
    else:
        for row in range(rows):
            select_long(keys[row], leasts, ends, factors, out[row], items, digits)


@kernel
def select_long(keys, leasts, ends, factors, out, items, digits):
    left = 0
    for i in range(keys.size):
        left += keys[i] != 0
    low = item_at(keys, leasts[left], items, digits)
    high = item_at(keys, ends[left], items, digits)
    bits = bits_for(keys.size)
    for i in range(keys.size):
        item = item_of(keys[i], bits, keys.size, i)
        out[i] = factors[left] if (item >= low) & (item < high) else f32(0)


@kernel
def item_at(keys, rank, items, digits):
    """Return the item of a rank, by counting in ever smaller ranges; above the last, all ones."""
    count = keys.size
    if rank >= count:
        return ~u64(0)
    bits = bits_for(keys.size)
    for i in range(count):
        items[i] = item_of(keys[i], bits, keys.size, i)
    while count > 1:
        lowest, highest = items[0], items[0]
        for i in range(count):
            lowest, highest = min(lowest, items[i]), max(highest, items[i])
        shift = u64(0)
        while u64(highest - lowest) >> shift >= u64(DIGITS):
            shift += u64(1)
        digits[:] = u32(0)
        for i in range(count):
            digits[u64(items[i] - lowest) >> shift] += u32(1)
        digit = u64(0)
        while rank >= i64(digits[digit]):
            rank -= i64(digits[digit])
            digit += u64(1)
        found = u64(0)
        for i in range(count):
            item = items[i]
            items[found] = item
            found += u64(u64(item - lowest) >> shift == digit)
        count = i64(found)
    return items[0]


@kernel
def multiply_kept(values, factors):
    for i in range(values.size):
        product = bits_of(values[i] * factors[i])
        values[i] = float_of(u32(product & all_ones(factors[i] != f32(0))))


@kernel
def drop_by_rank(
    values, left, columns, edges, thresholds, factors, start, key0, key1, kept, lanes, room, items
):
    size = values.size
    head = min(-start % columns, size)
    tail = (size - head) % columns
    draw_lanes(lanes, size, start, key0, key1)
    kept[:] = False
    for edge in range(head + tail):
        i = edge if edge < head else size - tail + edge - head
        threshold = thresholds[edges[edge]]
        values[i] *= factors[edges[edge]]
        kept[i] = left[i] and is_kept(start + i, lanes[i], threshold, key0, key1, room, items)
    for row in range((size - head) // columns):
        first = head + row * columns
        end = first + columns
        drop_in_row(
            values[first:end],
            left[first:end],
            lanes[first:end],
            kept[first:end],
            *(thresholds, factors, start + first, key0, key1, room, items),
        )
    for i in range(size):
        values[i] = float_of(u32(bits_of(values[i]) & all_ones(kept[i])))


@kernel
def drop_in_row(values, left, lanes, kept, thresholds, factors, start, key0, key1, room, items):
    columns = values.size
    chosen, buckets, starts, arranged = room[0], room[1], room[2], items[0]
    gone = arrange(values, left, buckets, starts, room[3], arranged, items[1])
    steps = max(columns - 1 - i64(gone), 1)
    step = f64(columns - 1) / f64(steps)
    least, count = thresholds[0], u64(0)
    rise = (thresholds[columns - 1] - least) // u64(steps) + u64(1)
    for i in range(columns):  # list what may be kept if its rank is the highest of its bucket
        bucket = buckets[i]
        most = least + u64(starts[bucket + u32(1)] - gone) * rise
        chosen[count] = u32(i)
        count += u64((bucket != u32(0)) & (u64(lanes[i]) <= most >> u64(32)))
    for number in range(count):
        i = u64(chosen[number])
        begin, end = starts[buckets[i]], starts[buckets[i] + u32(1)]
        item = item_of(magnitude_of(values[i]), 32, columns, i)
        rank = u64(nearest(f64(rank_in(arranged, begin, end, item) - gone) * step))
        values[i] *= factors[rank]
        kept[i] = is_kept(start + i64(i), lanes[i], thresholds[rank], key0, key1, room, items)


@helper
def is_kept(element, lane, threshold, key0, key1, room, items):
    """Return whether an element's number is below a threshold."""
    high = threshold >> u64(32)
    if u64(lane) != high:
        return u64(lane) < high
    elements, words = items[2], room[4]
    elements[0] = u64(element)  # once in 256 times
    philox_ties(elements.ctypes.data, key0, key1, words.ctypes.data)
    return u64(words[0]) < (threshold & u64(0xFFFFFFFF))


# ---------------------------------------------------------------- what is kept, packed


@helper
def lanes_from(lanes, first, size):
    """Return the 64 lanes from the first on as bits; those from `size` on count as not set."""
    if first + 64 <= size:
        return lane_word(lanes.ctypes.data + first)
    word = u64(0)
    for i in range(first, size):
        word |= u64(lanes[i] != u8(0)) << u64(i - first)
    return word


@kernel
def select_integers(raw, lanes, out):
    count = 0
    for first in range(0, raw.size, 64):
        left = lanes_from(lanes, first, raw.size)
        while left:
            out[count] = raw[first + trailing_zeros(left)]
            count += 1
            left &= left - u64(1)
    return count


@kernel
def expand_integers(packed, lanes, into):
    count = 0
    for first in range(0, into.size, 64):
        left = lanes_from(lanes, first, into.size)
        while left:
            if count < packed.size:
                into[first + trailing_zeros(left)] = packed[count]
            count += 1
            left &= left - u64(1)
    return count


# ---------------------------------------------------------------- values in few bits

STEPS_OF_4, STEPS_OF_2 = np.array(EVEN_STEPS[4], i32), np.array(EVEN_STEPS[2], i32)
STEPS_OF_ODD = np.array(ODD_STEPS, i32)
# Added to a number of moderate size, it leaves its nearest integer in the sum's lowest bits.
ROUNDER = f32(3 << 22)


@kernel
def quantise(values, bits, codes, scales, parts, fields):
    for group in range(scales.size):
        first = group * SCALE_GROUP
        some = values[first : first + SCALE_GROUP]
        peak = i32(0)
        for i in range(some.size):
            peak = max(peak, magnitude_of(some[i]))
        largest = min(float_of(u32(peak)), LARGEST)
        scale, odd = scale_of(some, largest, bits, parts[: some.size])
        rounded = from_float(scale, u16(0))
        odd = odd and rounded != u16(0)
        for i in range(some.size, SCALE_GROUP):
            fields[i] = u8(0)
        if odd:
            odd_fields(some, to_float(rounded), fields)
        else:
            even_fields(some, to_float(rounded), bits, fields)
        if rounded != u16(0):
            parts_of(some, largest, f32(FINE_PARTS), parts)
            scale = fair_scale(parts[: some.size], largest, fields, bits, odd)
            rounded = from_float(scale, u16(0))
        scales[group] = u16(rounded | u16(32768)) if odd else rounded
        pack_fields(fields, bits, codes[first * bits // 8 : ((first + some.size) * bits + 7) // 8])


@kernel
def fair_scale(parts, largest, fields, bits, odd):
    """Return the scale that gives the stored values the same share of the values' direction."""
    shift, double = i32(32 - bits), i32(odd)
    squares, products, most = i64(0), i64(0), i32(1)
    for i in range(parts.size):
        number = i32(i32(i32(fields[i]) << shift) >> shift)
        level = abs(i32(i32(number << double) + double))
        squares += i64(parts[i]) * i64(parts[i])
        products += i64(parts[i]) * i64(level)
        most = max(most, level)
    if products == 0:
        return f32(0)
    scale = f64(largest) * (f64(squares) / f64(products)) / f64(FINE_PARTS)
    return f32(min(scale, f64(LARGEST) / f64(most)))


@kernel
def scale_of(values, largest, bits, parts):
    """Return a group's scale before rounding, and whether its levels are the odd multiples."""
    if largest == f32(0):
        return largest, False
    parts_of(values, largest, f32(PARTS), parts)
    if bits == 4:
        step, _ = best_even_step(parts, i32(7), STEPS_OF_4)
        return largest * (f32(step) / f32(PARTS)), False
    step, error = best_even_step(parts, i32(1), STEPS_OF_2)
    odd_step, odd_error = best_odd_step(parts, i32(3), STEPS_OF_ODD)
    odd = odd_error < error
    return largest * (f32(odd_step if odd else step) / f32(PARTS)), odd


@kernel
def parts_of(values, largest, unit, parts):
    for i in range(values.size):
        share = min(abs(values[i]), largest) / largest * unit
        parts[i] = i32(bits_of(share + ROUNDER) - bits_of(ROUNDER))


@helper
def even_level(part, step, inverse, most):
    return min(i32(i32(i32(part * inverse) + i32(32768)) >> i32(16)), most)


@helper
def odd_level(part, step, inverse, most):
    return most if part >= i32(2) * step else i32(1)


def _best_step(level_of):
    """Make a kernel that finds the step of least squared error, and that error."""

    @kernel
    def best_step(parts, most, steps):
        best, least = i32(0), u32(0xFFFFFFFF)
        for number in range(steps.size):
            step = steps[number]
            inverse = i32((i32(65536) + step // i32(2)) // step)
            error = u32(0)
            for i in range(parts.size):
                level = level_of(parts[i], step, inverse, most)
                left = i32(parts[i] - i32(level * step))
                error = u32(error + u32(left * left))
            if error < least:
                best, least = step, error
        return best, least

    return best_step


best_even_step, best_odd_step = _best_step(even_level), _best_step(odd_level)


@kernel
def even_fields(values, scale, bits, fields):
    unit = scale if scale != f32(0) else f32(1)
    most = f32((1 << (bits - 1)) - 1)
    ones = u8((1 << bits) - 1)
    for i in range(values.size):
        number = min(max(values[i] / unit, -most), most)
        fields[i] = u8(bits_of(number + ROUNDER)) & ones


@kernel
def odd_fields(values, scale, fields):
    twice = f32(2) * scale
    for i in range(values.size):
        value = values[i]
        above = u8(value >= -twice) + u8(value >= f32(0)) + u8(value >= twice)
        fields[i] = u8(above - 2) & u8(3)


@kernel
def pack_fields(fields, bits, codes):
    each = 8 // bits
    for i in range(codes.size):
        code = u8(0)
        for j in range(each):
            code |= u8(fields[each * i + j] << u8(bits * j))
        codes[i] = code


@kernel
def dequantise(codes, scales, bits, out):
    for group in range(scales.size):
        first = group * SCALE_GROUP
        some = out[first : first + SCALE_GROUP]
        scale = to_float(scales[group])
        odd = i32(bits_of(scale) >> u32(31))
        room = codes[first * bits // 8 :]
        if bits == 4:
            unpack_fields(room, 4, odd, abs(scale), some)
        elif bits == 2:
            unpack_fields(room, 2, odd, abs(scale), some)
        else:
            unpack_fields(room, bits, odd, abs(scale), some)


@helper
def unpack_fields(codes, bits, odd, scale, out):
    each = 8 // bits
    for i in range(out.size):
        field = i32(codes[i // each]) >> i32(bits * (i % each))
        number = i32(i32(field << i32(32 - bits)) >> i32(32 - bits))
        out[i] = f32(i32(i32(number << odd) + odd)) * scale


# ---------------------------------------------------------------- into a live model


@kernel
def apply_packed(base, packed, are_deltas, lanes, factor, out, saved, places, fresh):
    count = 0
    for first in range(0, base.size, TILE):
        last = min(first + TILE, base.size)
        found = find_lanes(lanes, first, last, places)
        used = max(0, min(found, packed.size - count))
        stored, given = saved[count : count + used], packed[count : count + used]
        for i in range(used):
            stored[i] = base[first + places[i]]
        for i in range(used):  # apart from what gathers and scatters, so that it is vectorised
            origin = to_float(stored[i])
            change = factor * (to_float(given[i]) - (f32(0) if are_deltas else origin))
            value = from_float(origin + change, stored[i])
            fresh[i] = stored[i] if change == f32(0) else value
        for i in range(used):
            out[first + places[i]] = fresh[i]
        count += found
    return count


@kernel
def find_lanes(lanes, first, last, places):
    """Write the places of a tile's set lanes, counted from its first; return how many there are.

    Of each 64 the first PLACES_AT_ONCE places are written without counting the lanes: a branch for
    each would be guessed wrongly too often.
    """
    count = 0
    for start in range(first, last, 64):
        left = lanes_from(lanes, start, last)
        place = count
        count += count_bits(left)
        for _ in range(PLACES_AT_ONCE):
            places[place] = u16(start - first + trailing_zeros(left | LAST_BIT))
            left &= left - u64(1)
            place += 1
        while left:
            places[place] = u16(start - first + trailing_zeros(left))
            left &= left - u64(1)
            place += 1
    return count


# ---------------------------------------------------------------- digests

# XXH3-128 of many pieces of memory in one call. The library `xxhash` has the same digests and is as
# fast, one piece at a time: threads would ask for the interpreter's lock after every piece.

STRIPE, STRIPES = 64, 16  # bytes that are taken at a time, and how often between two scrambles
BLOCK = STRIPE * STRIPES

START = (
    *(u64(0xC2B2AE3D), u64(0x9E3779B185EBCA87), u64(0xC2B2AE3D27D4EB4F), u64(0x165667B19E3779F9)),
    *(u64(0x85EBCA77C2B2AE63), u64(0x85EBCA77), u64(0x27D4EB2F165667C5), u64(0x9E3779B1)),
)
FIRST, SECOND, SCRAMBLING, AVALANCHE = *START[1:3], START[7], u64(0x165667919E3779F9)
HALF, ALL = u64(32), u64(0xFFFFFFFF)
SCRAMBLE, LOW, HIGH = 0, 8, 16  # first words of the secret for each use, in the array of words
LAST_STRIPE = 192 - STRIPE - 7  # the first byte of the secret for the last bytes


def _take(count):
    """Make an intrinsic that adds a number of stripes to the eight sums at an address."""

    @intrinsic
    def take(_typing, sums, data, secret):
        def build(_context, builder, _signature, arguments):
            def load(address, offset):
                place = builder.add(address, ir.IntType(64)(offset))
                return _load(builder, place, _wide, align=1)

            sums, data, secret = arguments
            total = _load(builder, sums, _wide, align=8)
            for number in range(count):
                values = load(data, STRIPE * number)
                keyed = builder.xor(values, load(secret, 8 * number))
                low = builder.and_(keyed, _constant(_wide, 0xFFFFFFFF))
                product = builder.mul(low, builder.lshr(keyed, _constant(_wide, 32)))
                others = _shuffle(builder, values, values, [1, 0, 3, 2, 5, 4, 7, 6])
                total = builder.add(total, builder.add(others, product))
            return _store(builder, total, sums, align=8)

        return types.none(types.intp, types.intp, types.intp), build

    return take


take_block, take_stripe = _take(STRIPES), _take(1)


@helper
def folded(left, right):
    """Return the product of two words, its upper half on its lower one."""
    a, b = u64(left >> HALF), u64(left & ALL)
    c, d = u64(right >> HALF), u64(right & ALL)
    lowest = u64(b * d)
    middle = u64(u64(a * d) + u64(lowest >> HALF))
    other = u64(u64(b * c) + u64(middle & ALL))
    high = u64(u64(a * c) + u64(u64(middle >> HALF) + u64(other >> HALF)))
    low = u64(u64(other << HALF) | u64(lowest & ALL))
    return u64(high ^ low)


@helper
def joined(sums, words, first, start):
    result = start
    for i in range(0, 8, 2):
        left = u64(sums[i] ^ words[first + i])
        right = u64(sums[i + 1] ^ words[first + i + 1])
        result = u64(result + folded(left, right))
    result = u64(u64(result ^ u64(result >> u64(37))) * AVALANCHE)
    return u64(result ^ u64(result >> HALF))


@kernel
def digest_pieces(addresses, sizes, secret, words, out, sums):
    """Digest pieces of more than 240 bytes each: upper and lower half."""
    place, keys = sums.ctypes.data, secret.ctypes.data
    for number in range(addresses.size):
        address, size = addresses[number], sizes[number]
        for i in range(8):
            sums[i] = START[i]
        blocks = (size - 1) // BLOCK
        for block in range(blocks):
            take_block(place, address + BLOCK * block, keys)
            for i in range(8):
                value = u64(u64(sums[i] ^ u64(sums[i] >> u64(47))) ^ words[SCRAMBLE + i])
                sums[i] = u64(value * SCRAMBLING)
        rest = address + BLOCK * blocks
        for stripe in range((size - 1 - BLOCK * blocks) // STRIPE):
            take_stripe(place, rest + STRIPE * stripe, keys + 8 * stripe)
        take_stripe(place, address + size - STRIPE, keys + LAST_STRIPE)
        out[number, 0] = joined(sums, words, HIGH, ~u64(u64(size) * SECOND))
        out[number, 1] = joined(sums, words, LOW, u64(u64(size) * FIRST))
