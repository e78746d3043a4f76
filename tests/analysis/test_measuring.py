"""The core measures what the reference says, bit for bit, and both what NumPy computes."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dare.analysis import tallies
from dare.checks.dropping import BIN_SHIFT, BINS
from dare.kernels import core, reference
from dare.kernels.reference import LEAST, MAGNITUDE_SHIFT, MEASURED
from dare.tensors.dtypes import WEIGHT_TYPES

CARRIERS = [kind.carrier for kind in WEIGHT_TYPES]
SIZES = st.integers(0, 700) | st.sampled_from(
    [MEASURED - 1, MEASURED, MEASURED + 1, 2 * MEASURED + 257]
)


def elements(generator, carrier, size, style):
    """Stored elements: any bits, few distinct ones, or numbers of a usual size."""
    width = f"u{carrier.itemsize}"
    if style == "usual":
        (kind,) = (each for each in WEIGHT_TYPES if each.carrier == carrier)
        return generator.standard_normal(size).astype(kind.numpy_type).view(carrier)
    many = 7 if style == "few" else max(size, 1)
    found = generator.integers(0, 256**carrier.itemsize - 1, many, width, endpoint=True)
    return (generator.choice(found, size) if style == "few" else found[:size]).view(carrier)


@st.composite
def chunks(draw):
    """A chunk of a base and of one to four models, and which of these are deltas."""
    size, generator = draw(SIZES), np.random.default_rng(draw(st.integers(0, 2**32)))
    kinds, styles = st.sampled_from(CARRIERS), st.sampled_from(["any", "few", "usual"])
    base, *raws = (
        elements(generator, draw(kinds), size, draw(styles)) for _ in range(draw(st.integers(2, 5)))
    )
    if draw(st.booleans()):  # most of a fine-tune is often the base
        same = generator.random(size) < 0.5
        raws = [np.where(same, base, raw) if raw.dtype == base.dtype else raw for raw in raws]
    are_deltas = np.array(draw(st.lists(st.booleans(), min_size=len(raws), max_size=len(raws))))
    return base, raws, are_deltas


def nothing_found(models):
    pairs = models * (models - 1) // 2
    counts = np.zeros((models, tallies.COUNTS), np.int64)
    counts[:, LEAST] = tallies.LEAST_OF_NONE
    return (
        *(np.zeros((models, tallies.SUMS)), counts, np.zeros(pairs)),
        *(np.zeros((pairs, 2), np.int64), np.zeros(2, np.int64), np.zeros(2)),
        np.zeros((models, tallies.WAYS, tallies.COUNTERS), np.uint32),
    )


def measured(backend, base, raws, are_deltas):
    found = nothing_found(len(raws))
    for _ in range(2):  # figures are added to those that are there
        backend.measure(base, raws, are_deltas, *found)
    return found


def assert_same_bits(own, others):
    for one, other in zip(own, others, strict=True):
        quiet = [np.where(np.isnan(each), np.nan, each) for each in (one, other)]
        assert quiet[0].tobytes() == quiet[1].tobytes()


@settings(max_examples=200)
@given(chunks())
def test_measuring_a_chunk(case):
    assert_same_bits(measured(core, *case), measured(reference, *case))


def test_numbers_at_the_ends_of_float32():
    ends = np.array([3.4e38, -3.4e38, 1e-45, -1e-45, 0, -0.0, np.inf, -np.inf, np.nan], np.float32)
    base, *raws = (np.resize(np.roll(ends, shift), 1111) for shift in range(4))
    case = (base, raws, np.array([False, True, False]))
    assert_same_bits(measured(core, *case), measured(reference, *case))
    ends = [np.full_like(base, 1e-45), np.full_like(base, -3.4e38)]
    sums, counts, *_ = nothing_found(2)
    core.measure(np.zeros_like(base), ends, case[2][:2], sums, counts, *nothing_found(2)[2:])
    assert counts[:, 1].tolist() == [0, 0]
    assert sums[:, 4].tolist() == pytest.approx(
        [np.sum(np.abs(each), dtype=float) for each in ends]
    )
    assert np.isfinite(sums).all()


def test_bins_are_those_of_the_analysis():
    assert (MAGNITUDE_SHIFT, tallies.WAYS) == (BIN_SHIFT, 2)
    assert tallies.COUNTERS >= BINS


@settings(max_examples=200)
@given(chunks(), st.integers(0, 5).map(lambda n: 2**n), st.integers(0, 2**30), st.booleans())
@example((np.zeros(5, np.float32), [np.ones(5, np.float32)], None), 1, 0, False)
def test_samples(case, period, place, is_delta):
    base, (raw, *_), _ = case
    results = []
    for backend in (core, reference):
        out = np.full(64 * -(-raw.size // (64 * period)), 7, np.float32)
        backend.sample(raw, base, is_delta, 64 * period * place, period, out)
        results.append(out.tobytes())
    assert results[0] == results[1]


@settings(max_examples=200)
@given(chunks(), st.lists(st.integers(1, 0x7F800000), min_size=4, max_size=4))
def test_tops(case, least):
    _, raws, _ = case
    values = np.zeros((len(raws), raws[0].size), np.float32)
    for row, raw in zip(values, raws, strict=True):
        reference.decode(raw, row)
    results = []
    for backend in (core, reference):
        sizes, pairs = nothing_found(len(raws))[1][:, 0].copy(), nothing_found(len(raws))[3]
        backend.compare_tops(values, np.array(least[: len(raws)], np.uint32), sizes, pairs)
        results.append((sizes.tolist(), pairs.tolist()))
    assert results[0] == results[1]
