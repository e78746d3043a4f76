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
    FINE_PARTS,
    INVERSES,
    LARGEST,
    ODD_STEPS,
    PARTS,
    SCALE_GROUP,
    SUM_LANES,
)
from dare.tensors.chunks import CHUNK
from dare.tensors.mask import CALLS_PER_GROUP, GROUP, ROUNDS, TIE_BREAK

u8, u16, u32, u64 = np.uint8, np.uint16, np.uint32, np.uint64
i8, i16, i32, i64, f32, f64 = np.int8, np.int16, np.int32, np.int64, np.float32, np.float64

kernel = njit(error_model="numpy")
helper = njit(inline="always")

MAGNITUDE = u32(0x7FFFFFFF)
INFINITY = i32(0x7F800000)


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


@kernel
def draw_tile(lanes, used, start, key0, key1, high, low, ties, elements, words):
    """Set the first `used` lanes of a tile to 255 where kept, all others to 0; return how many."""
    found = 0
    tie_words = words_of(ties)
    for i in range(0, used, GROUP):
        call = u64((start + i) // GROUP * CALLS_PER_GROUP)
        address = lanes.ctypes.data + i
        if philox_lanes(call, key0, key1, u8(high), address, ties.ctypes.data):
            for eight in range(GROUP // 8):
                left = tie_words[eight]
                while left:
                    bit = trailing_zeros(left)
                    elements[found] = u64(start + i + 8 * eight + bit // 8)
                    found += 1
                    left &= ~u64(u64(255) << u64(bit))
    for i in range(0, found, PHILOX_WIDTH):
        philox_ties(elements.ctypes.data + 8 * i, key0, key1, words.ctypes.data + 4 * i)
    for i in range(found):
        if words[i] < low:
            lanes[i64(elements[i]) - start] = u8(255)
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


@kernel
def add_to_base(raw, merged, scale, out):
    peak = i32(0)
    for i in range(raw.size):
        change = merged[i]
        value = to_float(raw[i]) + scale * change
        peak = max(peak, magnitude_of(value))
        moved = from_float(value, out[i])
        unmoved = stored_as(raw[i], out[i])
        out[i] = unmoved if change == f32(0) else moved
    return peak


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
def count_magnitudes(raw, base_raw, out, counts, base, bits):
    count = 0
    peak = u32(0)
    for first in range(0, raw.size, TILE):
        used = min(TILE, raw.size - first)
        decode(base_raw[first : first + used], base)
        for i in range(used):
            bits[i] = u32(bits_of(to_float(raw[first + i]) - base[i]) & MAGNITUDE)
            peak = max(peak, bits[i])
        begin = count
        for i in range(used):
            out[count] = bits[i]
            count += bits[i] != u32(0)
        for i in range(begin, count):
            counts[out[i] >> u32(15)] += 1
    return count, peak


@kernel
def gather(raw, base, lanes, out):
    """Do `magnitudes` for a delta that has not been taken, of which little is kept."""
    count = 0
    eights = words_of(lanes)
    for eight in range((raw.size + 7) // 8):
        left = eights[eight]
        while left:
            bit = trailing_zeros(left)
            i = 8 * eight + bit // 8
            magnitude = u32(bits_of(to_float(raw[i]) - base[i]) & MAGNITUDE)
            out[count] = magnitude
            count += magnitude != u32(0)
            left &= ~u64(u64(255) << u64(bit))
    return count


@kernel
def keep_largest(values, least):
    kept = i32(0)
    for i in range(values.size):
        keep = magnitude_of(values[i]) >= least
        values[i] = float_of(u32(bits_of(values[i]) & all_ones(keep)))
        kept = i32(kept + i32(keep))
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
    values,
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
            least = i32(selections[model, 4])
            if high < 256:
                figures[chunk, model, 2] += draw_tile(
                    lanes, used, start + first, key0, key1, high, low, ties, elements, words
                )
            else:
                lanes[:] = u8(255)
                figures[chunk, model, 2] += used
            if least > 0:
                kept_values = values[:used]
                peak, over = delta(raw, base, lanes, kept_values, threshold_bits)
                figures[chunk, model, 3] += keep_largest(kept_values, least)
                if elects:
                    for i in range(used):
                        ballot(weight * kept_values[i], share, sums, i, ROW)
                else:
                    add_scaled(total, kept_values, weight)
            elif elects:
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


@kernel
def draw_uniform(out, start, key0, key1, lanes, elements, words):
    for i in range(0, out.size, GROUP):
        call = u64((start + i) // GROUP * CALLS_PER_GROUP)
        philox_bytes(call, key0, key1, lanes.ctypes.data)
        for j in range(GROUP):
            elements[j] = u64(start + i + j)
        for j in range(0, GROUP, PHILOX_WIDTH):
            philox_ties(elements.ctypes.data + 8 * j, key0, key1, words.ctypes.data + 4 * j)
        for j in range(min(GROUP, out.size - i)):
            out[i + j] = u64(u64(lanes[j]) << u64(32)) | u64(words[j])


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
def balance_scores(values, total, factor, peak, models, out):
    inverse_peak = 1 / peak
    for i in range(values.size):
        scaled = factor * f64(values[i])
        part = abs(scaled) * inverse_peak
        part = part if part < 1 else 1.0
        together = scaled * f64(total[i])
        score = exponential(models * (part * part - 1)) * tangent_of(together)
        out[i] = f32(score if together > 0 else 0.0)


# ---------------------------------------------------------------- ranks

SHORT_ROW = 64  # rows up to this length are ranked by comparing all pairs, longer ones by sorting


@kernel
def rank_rows(keys, out, items, places):
    rows, columns = keys.shape
    for row in range(rows):
        if columns <= SHORT_ROW:
            for i in range(columns):
                out[row, i] = rank_of(keys[row], i)
        else:
            rank_by_digits(keys[row], out[row], items[0], items[1], places)


@helper
def rank_of(keys, i):
    """Count the keys that are smaller than one of them; of equals the first is larger."""
    smaller = u32(0)
    for j in range(i):
        smaller = u32(smaller + u32(keys[j] < keys[i]))
    for j in range(i + 1, keys.size):
        smaller = u32(smaller + u32(keys[j] <= keys[i]))
    return smaller


@kernel
def rank_by_digits(keys, out, items, others, places):
    """Sort by the lowest byte, then the next, each time leaving equals as they are.

    An item is a key and, below it, its place in the row. Both halves are moved side by side, each
    to places of its own: a counter that was just written takes long to read again, and equal keys
    come often.
    """
    size = keys.size
    half = size // 2
    shift = u64(0)
    while u64(size - 1) >> shift:
        shift += u64(1)
    used = u64(0)
    below = u64((u64(1) << shift) - u64(1))
    for i in range(size):
        item = u64(keys[size - 1 - i]) << shift | u64(size - 1 - i)
        items[i] = item
        used |= item
    while shift < u64(64) and used >> shift:
        places[:] = u32(0)
        for i in range(half):
            places[0, (items[i] >> shift) & u64(255)] += u32(1)
            places[1, (items[half + i] >> shift) & u64(255)] += u32(1)
        if size % 2:
            places[1, (items[size - 1] >> shift) & u64(255)] += u32(1)
        total = u32(0)
        for digit in range(DIGITS):
            for part in range(2):
                count = places[part, digit]
                places[part, digit] = total
                total = u32(total + count)
        for i in range(half):
            move(items[i], 0, others, places, shift)
            move(items[half + i], 1, others, places, shift)
        if size % 2:
            move(items[size - 1], 1, others, places, shift)
        items, others = others, items
        shift += u64(8)
    for i in range(size):
        out[items[i] & below] = u32(i)


@helper
def move(item, part, others, places, shift):
    """Put an item where its byte belongs."""
    digit = (item >> shift) & u64(255)
    place = places[part, digit]
    places[part, digit] = u32(place + u32(1))
    others[place] = item


@helper
def mark_groups(keys, rows, columns, least, end, out):
    """Do `mark_ranks` for flat groups of a length that is known when this is compiled."""
    for row in range(rows):
        first = row * columns
        for i in range(columns):
            smaller = i64(0)
            for j in range(i):
                smaller += keys[first + j] < keys[first + i]
            for j in range(i + 1, columns):
                smaller += keys[first + j] <= keys[first + i]
            out[first + i] = u8(255) if (smaller >= least) & (smaller < end) else u8(0)


@kernel
def mark_ranks(keys, least, end, out, ranks, items, places):
    rows, columns = keys.shape
    flat = carray(pointer_to(keys.ctypes.data, keys), keys.size)  # reshape can raise an error
    marks = carray(pointer_to(out.ctypes.data, out), out.size)
    if columns == 4:
        mark_groups(flat, rows, 4, least, end, marks)
    elif columns == 8:
        mark_groups(flat, rows, 8, least, end, marks)
    elif columns <= SHORT_ROW:
        mark_groups(flat, rows, columns, least, end, marks)
    else:
        for row in range(rows):
            rank_rows(keys[row : row + 1], ranks, items, places)
            for i in range(columns):
                inside = (ranks[0, i] >= least) & (ranks[0, i] < end)
                out[row, i] = u8(255) if inside else u8(0)


@kernel
def multiply_kept(values, factors):
    for i in range(values.size):
        product = bits_of(values[i] * factors[i])
        values[i] = float_of(u32(product & all_ones(factors[i] != f32(0))))


@kernel
def drop_by_rank(
    values, ranks, thresholds, factors, start, key0, key1, kept, lanes, elements, words
):
    for i in range(0, values.size, GROUP):
        call = u64((start + i) // GROUP * CALLS_PER_GROUP)
        philox_bytes(call, key0, key1, lanes.ctypes.data)
        for j in range(min(GROUP, values.size - i)):
            rank = ranks[i + j]
            threshold = thresholds[rank]
            high = threshold >> u64(32)
            keep = u64(lanes[j]) < high
            if u64(lanes[j]) == high:  # once in 256 times
                elements[0] = u64(start + i + j)
                philox_ties(elements.ctypes.data, key0, key1, words.ctypes.data)
                keep = u64(words[0]) < (threshold & u64(0xFFFFFFFF))
            scaled = bits_of(values[i + j] * factors[rank])
            values[i + j] = float_of(u32(scaled & all_ones(keep)))
            kept[i + j] = keep


# ---------------------------------------------------------------- what is kept, packed


def _lane_word(builder, address):
    """Emit the 64 lanes at an address as bits, the first one in the lowest."""
    octets = ir.VectorType(ir.IntType(8), 64)
    lanes = _load(builder, address, octets, align=1)
    is_set = builder.icmp_unsigned("!=", lanes, ir.Constant(octets, [0] * 64))
    return builder.bitcast(is_set, ir.IntType(64))


lane_word = _unary(types.uint64(types.intp), _lane_word)


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

LAST_BIT = u64(1 << 63)


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
