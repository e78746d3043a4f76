"""The loops of an analysis, in Numba: a chunk of a tensor, of the base and all models at once.

A chunk is worked through in tiles that stay in a close cache. Sums over a tile are taken in
float32, of values that are scaled by a power of two so that their fourth powers neither vanish nor
overflow, and are added up in float64. The compiler may take the terms of a tile in any order, so
from one kind of processor to another sums agree to about 1e-6. Counts are exact.

Elements that are not finite are counted, and are taken for zeros from then on.
"""

from __future__ import annotations

import numpy as np

from dare.analysis.measure import tallies
from dare.analysis.measure.tallies import CHANGED, LEAST, LEAST_OF_NONE, NOT_FINITE, PEAK, ROW, TILE
from dare.checks.sample import BIN_SHIFT, BINS
from dare.kernels.cpu import (
    INFINITY,
    bits_of,
    carray,
    decode,
    float_of,
    helper,
    intrinsic,
    kernel,
    magnitude_of,
    njit,
    pointer_to,
    to_float,
    types,
    words_of,
)

u8, u32, u64 = np.uint8, np.uint32, np.uint64
i32, i64, f32, f64 = np.int32, np.int64, np.float32, np.float64

summing = njit(error_model="numpy", fastmath={"reassoc", "contract", "nsz"})

RUN = 64  # elements that are sampled together
LAST_SUM = tallies.SUMS - 1  # Σδ·base
# The bit of each pair that says that an element is above zero; the other says below.
ABOVE = u64(0x5555555555555555)


# ---------------------------------------------------------------- one model


@kernel
def take_delta(raw, base, out):
    peak = i32(0)
    least = LEAST_OF_NONE
    for i in range(raw.size):
        difference = to_float(raw[i]) - base[i]
        out[i] = difference
        magnitude = magnitude_of(difference)
        peak = max(peak, magnitude)
        least = min(least, u32(u32(magnitude) - u32(1)))
    return peak, least


@kernel
def mend(values):
    """Put zeros where values are not finite; return how many, and the extremes of the others."""
    found = 0
    peak = i32(0)
    least = LEAST_OF_NONE
    for i in range(values.size):
        if magnitude_of(values[i]) >= INFINITY:
            values[i] = f32(0)
            found += 1
        magnitude = magnitude_of(values[i])
        peak = max(peak, magnitude)
        least = min(least, u32(u32(magnitude) - u32(1)))
    return found, peak, least


@helper
def scale_for(peak):
    """The power of two that brings a magnitude to [1, 2), as far as float32 has it."""
    exponent = min(max(254 - (i64(peak) >> 23), 1), 254)
    return float_of(u32(exponent << 23))


@summing
def power_sums(values, scale):
    one, two, three, four, magnitudes = f32(0), f32(0), f32(0), f32(0), f32(0)
    for i in range(values.size):
        value = values[i] * scale
        square = value * value
        one += value
        two += square
        three += square * value
        four += square * square
        magnitudes += abs(value)
    return one, two, three, four, magnitudes


@summing
def sum_squares(values, scale):
    total = f32(0)
    for i in range(values.size):
        value = values[i] * scale
        total += value * value
    return total


@kernel
def encode_signs(values, least, out):
    """1 for what is above zero, 2 for what is below; 0 from the last value on.

    Also 0 for magnitudes whose bits are below `least`, and for what is not finite.
    """
    for i in range(values.size):
        magnitude = magnitude_of(values[i])
        is_seen = u8(magnitude >= least) & u8(magnitude < INFINITY)
        out[i] = u8(is_seen << u8(bits_of(values[i]) >> u32(31)))
    for i in range(values.size, out.size):
        out[i] = u8(0)


@kernel
def count_magnitudes(values, counts):
    """Count into rows of bins that take turns; `counts`: uint32[WAYS, ≥ BINS]."""
    first, second = counts[0], counts[1]
    pairs = words_of(values)
    for i in range(pairs.size):
        pair = pairs[i]
        first[(pair >> u64(BIN_SHIFT)) & u64(BINS - 1)] += u32(1)
        second[(pair >> u64(32 + BIN_SHIFT)) & u64(BINS - 1)] += u32(1)
    if values.size % 2:
        last = u64(bits_of(values[values.size - 1]))
        first[(last >> u64(BIN_SHIFT)) & u64(BINS - 1)] += u32(1)


# ---------------------------------------------------------------- signs


@intrinsic
def bits_set(_typing, word):  # uint64
    def build(_context, builder, _signature, arguments):
        return builder.ctpop(arguments[0])

    return types.uint64(types.uint64), build


@kernel
def pack_signs(codes, out):
    """From a byte for each element to two bits, in an order of their own."""
    eights = words_of(codes)
    size = out.size
    for i in range(size):
        low = eights[i] | (eights[size + i] << u64(2))
        high = (eights[2 * size + i] << u64(4)) | (eights[3 * size + i] << u64(6))
        out[i] = low | high


@helper
def changed_bits(signs):
    return (signs | (signs >> u64(1))) & ABOVE


@kernel
def count_changed(signs):
    """Count the elements that are not zero."""
    found = u64(0)
    for i in range(signs.size):
        found += bits_set(changed_bits(signs[i]))
    return i64(found)


@kernel
def compare_signs(left, right):
    """Count the elements that both change, and those changed in the same direction."""
    both, agreeing = u64(0), u64(0)
    for i in range(left.size):
        both += bits_set(changed_bits(left[i]) & changed_bits(right[i]))
        agreeing += bits_set(changed_bits(left[i] & right[i]))
    return i64(both), i64(agreeing)


@kernel
def count_conflicts(signs):
    """Count the elements that two models or more change, and those changed in both directions.

    signs: uint64[models, words].
    """
    shared, conflicted = u64(0), u64(0)
    for i in range(signs.shape[1]):
        seen, many = u64(0), u64(0)
        for model in range(signs.shape[0]):
            many |= changed_bits(seen) & changed_bits(signs[model, i])
            seen |= signs[model, i]
        shared += bits_set(many)
        conflicted += bits_set(seen & (seen >> u64(1)) & ABOVE)
    return i64(shared), i64(conflicted)


# ---------------------------------------------------------------- models together


@summing
def dot(left, scale, right):
    total = f32(0)
    for i in range(left.size):
        total += (left[i] * scale) * right[i]
    return total


@kernel
def add(left, right, out):
    for i in range(out.size):
        out[i] = left[i] + right[i]


@summing
def sum_magnitudes(left, right, scale):
    """Σ|left + right|, scaled."""
    total = f32(0)
    for i in range(left.size):
        total += abs((left[i] + right[i]) * scale)
    return total


# ---------------------------------------------------------------- a chunk


@kernel
def measure(
    base_raw,
    like,
    addresses,
    given,
    sums,
    counts,
    pair_sums,
    pair_counts,
    shared_counts,
    magnitudes,
    base,
    zeros,
    codes,
    deltas,
    scales,
    signs,
):
    """Measure a chunk of all models; add what is found of them to the arrays from `sums` on.

    Return Σbase² and Σ|Σδ|.

    base_raw: carriers of the base. like: an array of the models' carrier.
    addresses: int64[models]. given: bool[models], whether a model is given by its delta.
    sums: float64[models, SUMS]. counts: int64[models, COUNTS], PEAK and LEAST replaced.
    pair_sums: float64[pairs], dot products. pair_counts: int64[pairs, 2], both and agreeing.
    shared_counts: int64[2], shared and conflicted.
    magnitudes: uint32[models, WAYS, COUNTERS]. The others are scratch arrays, `zeros` of zeros.
    """
    models, size = addresses.size, base_raw.size
    base_squares, summed = f64(0), f64(0)
    for first in range(0, size, TILE):
        used = min(TILE, size - first)
        decode(base_raw[first : first + used], base)
        for model in range(models):
            raw = carray(pointer_to(addresses[model], like), size)[first : first + used]
            delta = deltas[model * ROW : model * ROW + used]
            peak, least = take_delta(raw, zeros if given[model] else base, delta)
            scales[model] = measure_model(
                delta, peak, least, sums[model], counts[model], magnitudes[model]
            )
            encode_signs(delta, i32(1), codes)
            pack_signs(codes, signs[model])
            counts[model, CHANGED] += count_changed(signs[model])
        base_squares += squares_of_base(base[:used])
        for model in range(models):
            delta = deltas[model * ROW : model * ROW + used]
            product = dot(delta, scales[model], base[:used])
            sums[model, LAST_SUM] += f64(product) / f64(scales[model])
        if models > 1:
            compare_pairs(deltas, scales, signs, used, pair_sums, pair_counts)
            shared, conflicted = count_conflicts(signs)
            shared_counts[0] += shared
            shared_counts[1] += conflicted
            summed += sum_together(deltas, scales, used, base[:used])
    return base_squares, summed


@kernel
def measure_model(delta, peak, least, sums, counts, magnitudes):
    """Add up a tile of one model; return the scale that suits it."""
    if peak >= INFINITY:
        found, peak, least = mend(delta)
        counts[NOT_FINITE] += found
    scale = scale_for(peak)
    back = 1 / f64(scale)
    one, two, three, four, plain = power_sums(delta, scale)
    sums[0] += f64(one) * back
    sums[1] += f64(two) * back * back
    sums[2] += f64(three) * back * back * back
    sums[3] += f64(four) * back * back * back * back
    sums[4] += f64(plain) * back
    counts[PEAK] = max(counts[PEAK], i64(peak))
    counts[LEAST] = min(counts[LEAST], i64(least))
    count_magnitudes(delta, magnitudes)
    return scale


@kernel
def compare_pairs(deltas, scales, signs, used, pair_sums, pair_counts):
    pair = 0
    for left in range(scales.size):
        own = deltas[left * ROW : left * ROW + used]
        for right in range(left + 1, scales.size):
            product = dot(own, scales[left], deltas[right * ROW : right * ROW + used])
            pair_sums[pair] += f64(product) / f64(scales[left])
            both, agreeing = compare_signs(signs[left], signs[right])
            pair_counts[pair, 0] += both
            pair_counts[pair, 1] += agreeing
            pair += 1


@kernel
def sum_together(deltas, scales, used, room):
    """Σ|Σδ| of a tile of two models or more; `room` is overwritten."""
    scale = scales[0]
    total = deltas[:used]
    for model in range(1, scales.size):
        scale = min(scale, scales[model])
    for model in range(1, scales.size - 1):
        add(total, deltas[model * ROW : model * ROW + used], room)
        total = room
    last = (scales.size - 1) * ROW
    return f64(sum_magnitudes(total, deltas[last : last + used], scale)) / f64(scale)


@kernel
def squares_of_base(base):
    """Σbase² of what is finite in a tile; what is not is overwritten."""
    peak = i32(0)
    for i in range(base.size):
        peak = max(peak, magnitude_of(base[i]))
    if peak >= INFINITY:
        _, peak, _ = mend(base)
    scale = scale_for(peak)
    return f64(sum_squares(base, scale)) / (f64(scale) * f64(scale))


@kernel
def subtract(raw, base_raw, out):
    """A chunk's delta, where the models are not all stored alike."""
    for i in range(raw.size):
        out[i] = to_float(raw[i]) - to_float(base_raw[i])


# ---------------------------------------------------------------- the largest


@kernel
def sample(raw, base_raw, given, start, period, out):
    """Take the deltas of one RUN of elements in every `period` runs of a chunk.

    Which one depends on its position in the tensor alone. `start` is a multiple of period·RUN.
    """
    block = RUN * period
    for place in range((raw.size + block - 1) // block):
        number = u64(start // block + place)
        turn = i64(u64(number * u64(0x9E3779B97F4A7C15)) >> u64(32)) % period
        first = place * block + turn * RUN
        last = max(first, min(first + RUN, raw.size))
        values = out[place * RUN : place * RUN + last - first]
        if given:
            decode(raw[first:last], values)
        else:
            subtract(raw[first:last], base_raw[first:last], values)
        for i in range(place * RUN + last - first, min((place + 1) * RUN, out.size)):
            out[i] = f32(0)
