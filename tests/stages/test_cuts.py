"""The k-th magnitude is that of a sort, whatever the sample says and however a tensor is cut."""

from itertools import pairwise
from unittest import mock

import numpy as np
import pytest
from combining import CHUNK, combine, largest_first
from hypothesis import example, given, settings
from hypothesis import strategies as st

import dare
from dare.kernels import core, reference
from dare.stages import trimming
from dare.stages.blocks import Block, DeltaView, Scratch
from dare.stages.trimming import band_between, find_cuts

HISTOGRAM = DeltaView.histogram
KINDS = {
    "random": lambda g, n: g.standard_normal(n),
    "tied": lambda g, n: g.integers(-3, 4, n) / 8,
    "constant": lambda g, n: np.full(n, -0.25),
    "almost all zero": lambda g, n: g.standard_normal(n) * (g.random(n) < 0.05),
    "not finite": lambda g, n: g.choice([1.0, 2.0, np.inf, -np.inf, np.nan], n),
    "ascending": lambda g, n: np.sort(g.standard_normal(n) ** 2),
    "descending": lambda g, n: -np.sort(g.standard_normal(n) ** 2)[::-1],
}
SAMPLES = {
    "none": lambda _order, _size: None,
    "spread": lambda order, size: np.arange(0, size, 3),
    "the largest": lambda order, size: order[: size // 2],
    "the smallest": lambda order, size: order[size // 2 :],
}


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(list(KINDS)),
    st.sampled_from(list(SAMPLES)),
    st.sampled_from([core, reference]),
    st.integers(1, 400),
    st.lists(st.integers(0, 400), max_size=4),
    st.tuples(st.floats(0, 1), st.floats(0, 1)),
    st.sampled_from([0, 80, 1 << 20]),
    st.integers(0, 2**32),
)
@example("almost all zero", "spread", core, 48, [], (1.0, 1.0), 1 << 20, 0)  # cut among zeros
def test_cuts_are_those_of_a_sort(kind, sample, kernels, size, borders, shares, spare_bytes, seed):
    values = KINDS[kind](np.random.default_rng(seed), size).astype(np.float32)
    order = largest_first(reference.magnitude_bits(values).astype(np.int64))
    ranks = sorted((max(1, int(shares[0] * size)), int(shares[1] * size)), reverse=True)
    chosen, scratch = SAMPLES[sample](order, size), Scratch(8192)

    def block(part, start=0):
        zeros = np.zeros(part.size, np.float32)
        return Block(kernels, "w", start, 0, part, zeros, scratch, np.int32(0))

    def walk():
        ends = sorted({0, size, *(border for border in borders if border < size)})
        return (block(values[a:b], a) for a, b in pairwise(ends))

    view = DeltaView(
        *(kernels, (size,), spare_bytes, walk, None),
        lambda: None if chosen is None else block(values[chosen].copy()),
    )
    with mock.patch.multiple(trimming, SMALL=0, CHUNK=10):
        lowest, highest = find_cuts(view, lambda n: [int(r * n / size) or r > 0 for r in ranks])
    expected, changed = np.zeros_like(values), block(values)
    changed.keep(band_between(lowest, highest))
    found = changed.values
    kept = order[ranks[1] : ranks[0]]
    expected[kept] = values[kept]
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("scope", ["tensor", "model"])
@pytest.mark.parametrize("spread", [1, 2**-20])
def test_a_sample_that_misleads_costs_only_time(scope, spread):
    # What is sampled, the beginnings of 16 parts, is smaller than all the rest, or larger.
    size = CHUNK + 1000
    delta = np.random.default_rng(0).standard_normal(size).astype(np.float32)
    sampled = np.arange(size) % (size // 16) < 2000
    delta[sampled if spread == 1 else ~sampled] *= np.float32(2**-30)
    stages = {"trim": {"keep_ratio": 0.3, "scope": scope}}
    with mock.patch.object(DeltaView, "histogram", autospec=True) as counted:
        counted.side_effect = HISTOGRAM
        found = combine("trim+sum", delta, stages=stages)
    assert counted.called
    expected, kept = np.zeros_like(delta), largest_first(np.abs(delta))[: int(0.3 * size)]
    expected[kept] = delta[kept]
    assert (found == expected).all()


def test_a_usual_tensor_is_read_once_and_then_merged(monkeypatch):
    monkeypatch.setattr(DeltaView, "histogram", None)  # the way of counting, not needed here
    deltas = np.random.default_rng(0).standard_normal((3, CHUNK + 1000)).astype(np.float32)
    stages = {"breadcrumbs": {"keep_middle": 0.5, "drop_largest": 0.1}}
    for method in ("trim+ties", "dare+trim+linear", "breadcrumbs+sum"):
        dare.merge_arrays(
            {"w": np.zeros_like(deltas[0])},
            [{"w": delta} for delta in deltas],
            method=method,
            stages={name: given for name, given in stages.items() if name in method},
            verbose=False,
        )
