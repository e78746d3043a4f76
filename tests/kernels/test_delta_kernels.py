"""The kernels that delta files are made of: both backends alike, and what each one promises."""

import ml_dtypes
import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from dare.kernels import LANES_MULTIPLE, Operand, core, reference
from dare.tensors.dtypes import STORAGE_TYPES, WEIGHT_TYPES
from dare.tensors.mask import keep_threshold, mask_key

BACKENDS = (reference, core)
BOTH = pytest.mark.parametrize("backend", BACKENDS)
CARRIERS = sorted({kind.carrier for kind in STORAGE_TYPES.values()}, key=str)
WEIGHTS = [kind.carrier for kind in WEIGHT_TYPES]
TYPE_PAIRS = [(carrier, carrier) for carrier in WEIGHTS] + [
    (np.dtype("uint16"), np.dtype("float32")),
]
LARGEST = float(np.finfo(np.float32).max)


def elements(carrier, size):
    width = np.dtype(f"u{carrier.itemsize}")
    return arrays.arrays(width, size).map(lambda a: a.view(carrier))


def lanes(size):
    return arrays.arrays(np.uint8, size, elements=st.sampled_from([0, 255]))


def some_lanes():
    """Lanes of a chunk, and its size: there may be more lanes than elements."""
    sizes = st.integers(0, 200) | st.sampled_from([63, 64, 65, 128])
    return sizes.flatmap(lambda n: st.tuples(lanes(n + n % 3), st.just(n)))


# ---------------------------------------------------------------- packing


@given(some_lanes(), st.sampled_from(CARRIERS), st.data())
def test_what_is_selected_can_be_put_back(case, carrier, data):
    lane, size = case
    raw, other = data.draw(elements(carrier, size)), data.draw(elements(carrier, size))
    kept = np.flatnonzero(lane[:size])
    for backend in BACKENDS:
        packed = np.zeros(kept.size, carrier)
        assert backend.select(raw, lane, packed) == kept.size
        assert packed.tobytes() == raw[kept].tobytes()
        into = other.copy()
        assert backend.expand(packed, lane, into) == kept.size
        expected = other.copy()
        expected[kept] = raw[kept]
        assert into.tobytes() == expected.tobytes()


@BOTH
@pytest.mark.parametrize("count", [0, 1, 2, 3, 4])
def test_too_few_or_too_many_packed_elements_are_noticed(backend, count):
    lane = np.array([255, 0, 0, 255, 255], np.uint8)
    into = np.zeros(5, np.float32)
    assert backend.expand(np.arange(1, count + 1, dtype=np.float32), lane, into) == 3
    assert into[lane != 0].tolist() == [1, 2, 3][:count] + [0] * (3 - count)
    assert not into[lane == 0].any()


# ---------------------------------------------------------------- values in few bits


def quantised(backend, values, bits):
    codes = np.full(-(-values.size * bits // 8), 0x5A, np.uint8)
    scales = np.full(-(-values.size // 256), 0x5A5A, np.uint16)
    backend.quantise(values, bits, codes, scales)
    return codes, scales


def restored(backend, codes, scales, bits, size):
    out = np.full(size, 7, np.float32)
    backend.dequantise(codes, scales, bits, out)
    return out


@st.composite
def deltas(draw):
    """Finite values of one size or of all sizes; many of them zero, or few."""
    size = draw(st.integers(0, 20) | st.sampled_from([255, 256, 257, 511, 512, 700]))
    generator = np.random.default_rng(draw(st.integers(0, 2**32)))
    shape = draw(st.sampled_from(["normal", "laplace", "standard_cauchy", "bits"]))
    if shape == "bits":
        values = generator.integers(0, 2**32, size, dtype=np.uint32).view(np.float32)
    else:
        unit = draw(st.sampled_from([1.0, 1e-12, 1e30, 1e38, 1e-38, 1e-40, 1e-44]))
        numbers = np.clip(getattr(generator, shape)(size=size) * unit, -LARGEST, LARGEST)
        values = numbers.astype(np.float32)
    values[generator.random(size) < draw(st.sampled_from([0, 0.5, 0.9, 1]))] = 0
    return np.where(np.isfinite(values), values, np.float32(0))


@settings(max_examples=200)
@given(deltas(), st.sampled_from([4, 2]))
def test_few_bits_are_the_same_in_both_backends(values, bits):
    codes, scales = quantised(reference, values, bits)
    fast_codes, fast_scales = quantised(core, values, bits)
    assert (scales.tolist(), codes.tolist()) == (fast_scales.tolist(), fast_codes.tolist())
    back = restored(reference, codes, scales, bits, values.size)
    assert back.tobytes() == restored(core, codes, scales, bits, values.size).tobytes()
    assert np.isfinite(back).all()


@given(st.integers(0, 600), st.sampled_from([8, 4, 2, 1]), st.data())
def test_any_bytes_are_read_alike(size, bits, data):
    codes = data.draw(elements(np.dtype("uint8"), -(-size * bits // 8)))
    scales = data.draw(elements(np.dtype("uint16"), -(-size // 256)))
    outs = [restored(backend, codes, scales, bits, size) for backend in BACKENDS]
    np.testing.assert_array_equal(*outs)
    np.testing.assert_array_equal(*(np.signbit(out[~np.isnan(out)]) for out in outs))


@BOTH
def test_codes_by_hand(backend):
    # The largest is 7 parts of 1, and 585/4096·7 rounds to the bfloat16 1.
    values = np.array([7, -7, 3, -1, 0, 6], np.float32)
    codes, scales = quantised(backend, values, 4)
    assert scales.view(ml_dtypes.bfloat16).tolist() == [1]
    assert codes.tolist() == [0x97, 0xF3, 0x60]
    assert restored(backend, codes, scales, 4, 6).tolist() == values.tolist()


@BOTH
def test_two_bits_choose_their_levels_by_group(backend):
    few = np.zeros(256, np.float32)
    few[[3, 5]] = 0.5, -0.5
    many = np.array([-3, -1, 1, 3], np.float32).repeat(64)
    codes, scales = quantised(backend, np.concatenate([few, many]), 2)
    assert scales.view(ml_dtypes.bfloat16).tolist() == [0.5, -1]  # below zero: the odd multiples
    assert codes[:2].tolist() == [1 << 6, 3 << 2]
    assert codes[[64, 80, 96, 112]].tolist() == [0b10101010, 0b11111111, 0, 0b01010101]
    back = restored(backend, codes, scales, 2, 512)
    assert back.tolist() == [*few.tolist(), *many.tolist()]


@pytest.mark.parametrize(("bits", "digest"), [(4, "8491c823e55a2632"), (2, "1c6533c555c71f0e")])
@BOTH
def test_codes_are_those_of_version_1(backend, bits, digest):
    mixed = np.arange(1000, dtype=np.uint64) * np.uint64(2654435761) % np.uint64(1 << 32)
    values = mixed.astype(np.float64) / (1 << 31) - 1
    values *= values * values
    values[700:] = np.where(mixed[700:] % 5 == 0, values[700:], 0)
    codes, scales = quantised(backend, values.astype(np.float32), bits)
    assert xxhash.xxh3_64_hexdigest(codes.tobytes() + scales.tobytes()) == digest


@BOTH
@pytest.mark.parametrize("bits", [4, 2])
@pytest.mark.parametrize("size", [1, 256, 300])
@pytest.mark.parametrize("value", [0.0, -0.0, 1e-45, -1e-45])
def test_what_is_too_small_for_a_scale_becomes_zero(backend, bits, size, value):
    codes, scales = quantised(backend, np.full(size, value, np.float32), bits)
    assert not codes.any()
    assert not scales.any()
    assert not restored(backend, codes, scales, bits, size).view(np.uint32).any()


@pytest.mark.parametrize("unit", [1.0, 1e-12, 1e30, 2.5e37])
@pytest.mark.parametrize(
    ("shape", "allowed"),
    [
        ("normal", (0.0125, 0.136)),
        ("laplace", (0.0255, 0.246)),
        ("sparse", (0.0084, 0.22)),
    ],
)
def test_squared_errors(shape, allowed, unit):
    generator = np.random.default_rng(0)
    values = (
        generator.laplace(size=100_000) if shape == "laplace" else generator.normal(size=100_000)
    )
    if shape == "sparse":
        values[generator.random(100_000) < 0.9] = 0
    values = (values * unit).astype(np.float32)
    for bits, most in zip((4, 2), allowed, strict=True):
        codes, scales = quantised(core, values, bits)
        back = restored(core, codes, scales, bits, values.size).astype(np.float64)
        squares = (values.astype(np.float64) ** 2).sum()
        assert ((back - values) ** 2).sum() / squares <= most
        assert (back * values).sum() / squares == pytest.approx(1, abs=3e-4)  # nothing is shortened


# ---------------------------------------------------------------- into a live model

FACTORS = st.sampled_from([0.0, 1.0, -1.0, 10.0, 1 / 3, 1e-30]).map(np.float32)


@st.composite
def live(draw):
    """A base, a model of it that is often the same, their mask and its lanes."""
    size = draw(st.integers(0, 200))
    base_type, tuned_type = draw(st.sampled_from(TYPE_PAIRS))
    base, tuned = draw(elements(base_type, size)), draw(elements(tuned_type, size))
    if base_type == tuned_type:
        same = draw(arrays.arrays(np.bool_, size))
        tuned = np.where(same, base, tuned)
    high, low = divmod(keep_threshold(draw(st.sampled_from([0.1, 0.5, 0.9]))), 1 << 32)
    mask = (*mask_key(draw(st.integers(0, 99)), "w"), high, low)
    lane = np.zeros(LANES_MULTIPLE, np.uint8)
    reference.draw(lane, size, 0, *mask)
    return base, tuned, mask, lane


@settings(max_examples=150)
@given(live(), FACTORS)
def test_applying_is_merging(case, factor):
    base, tuned, mask, lane = case
    merged, expected = np.empty(base.size, np.float32), np.empty_like(base)
    reference.combine(base, [Operand(tuned, mask, None, factor, 1.0)], 0, False, 0, merged)
    reference.add_to_base(base, merged, np.float32(1), expected)
    kept = np.flatnonzero(lane)
    packed = tuned[kept]
    origin, change = np.empty((2, base.size), np.float32)
    reference.decode(base, origin)
    reference.delta(tuned, origin, lane, change, 0)
    for backend in BACKENDS:
        for values in ((packed, False), (change[kept], True)):
            apply = backend.apply_packed
            elsewhere, saved = base.copy(), np.zeros(kept.size, base.dtype)
            assert apply(base, *values, lane, factor, elsewhere, saved) == kept.size
            in_place, again = base.copy(), np.zeros(kept.size, base.dtype)
            assert apply(in_place, *values, lane, factor, in_place, again) == kept.size
            assert elsewhere.tobytes() == in_place.tobytes() == expected.tobytes()
            assert saved.tobytes() == again.tobytes() == base[kept].tobytes()
            assert backend.expand(saved, lane, in_place) == kept.size
            assert in_place.tobytes() == base.tobytes()


@BOTH
@pytest.mark.parametrize("are_deltas", [False, True])
def test_only_what_is_packed_is_applied(backend, are_deltas):
    base = np.array([1, 2, 3, 4], np.float32)
    lane = np.array([255, 0, 255, 255], np.uint8)
    out, saved = np.full(4, 9, np.float32), np.full(3, 9, np.float32)
    packed = np.array([5, 7], np.float32)
    assert backend.apply_packed(base, packed, are_deltas, lane, np.float32(0.5), out, saved) == 3
    assert out.tolist() == ([3.5, 9, 6.5, 9] if are_deltas else [3, 9, 5, 9])
    assert saved.tolist() == [1, 3, 9]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("carrier", WEIGHTS, ids=str)
@pytest.mark.parametrize("size", [1, 16, 8191, 8193])
def test_where_nothing_changes_the_base_keeps_its_bits(backend, carrier, size):
    width = 8 * carrier.itemsize
    # -0.0, a negative and a positive NaN: an addition or a rounding would change some of these
    bits = [1 << (width - 1), (1 << width) - 1, (1 << (width - 1)) - 1]
    base = np.resize(np.array(bits, f"u{carrier.itemsize}"), size).view(carrier)
    lane = np.full(size, 255, np.uint8)
    for zero in (0.0, -0.0):
        out, saved = np.zeros_like(base), np.zeros_like(base)
        packed = np.full(size, zero, np.float32)
        assert backend.apply_packed(base, packed, True, lane, np.float32(1), out, saved) == size
        assert out.tobytes() == saved.tobytes() == base.tobytes()


@settings(max_examples=60)
@given(
    st.sampled_from([0, 1, 8191, 8192, 8193, 20000]),
    st.sampled_from([0.01, 0.5, 1]),
    st.sampled_from(TYPE_PAIRS),
    st.booleans(),
    st.integers(0, 99),
)
def test_tiles_are_applied_alike(size, share, types, is_short, seed):
    generator = np.random.default_rng(seed)
    lane = np.where(generator.random(size) < share, np.uint8(255), np.uint8(0))
    kept = int(np.count_nonzero(lane)) - is_short * min(5, int(np.count_nonzero(lane)))
    base, packed = (
        generator.integers(0, 256, n * kind.itemsize, np.uint8).view(kind)
        for n, kind in zip((size, kept), types, strict=True)
    )
    results = []
    for backend in BACKENDS:
        out, saved = base.copy(), np.zeros(kept, base.dtype)
        factor = np.float32(0.5)
        count = backend.apply_packed(base, packed, False, lane, factor, out, saved)
        selected = np.full(size + 9, 7, base.dtype)
        assert backend.select(base, lane, selected) == count
        results.append([count, *(a.tobytes() for a in (out, saved, selected))])
    assert results[0] == results[1]
