"""Trimming by magnitude is that of a stable sort: of a tensor, a row, or a whole model."""

from dataclasses import replace
from itertools import pairwise
from unittest import mock

import definitions
import numpy as np
import pytest
from combining import BACKENDS, CHUNK, combine, largest_first
from hypothesis import example, given, settings
from hypothesis import strategies as st

import dare
from dare import keep_mask
from dare.kernels import core, reference
from dare.planning.cost import Cost
from dare.stages import STAGES, trimming
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
    assert (found == definitions.trim([delta], 0.3)).all()


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


# ---------------------------------------------------------------- tensors and rows


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("definition", "parameters"),
    [
        (definitions.trim, {"keep_ratio": 0.5}),
        (definitions.breadcrumbs, {"keep_middle": 0.5, "drop_largest": 0.1}),
    ],
)
def test_after_dare_survivors_are_counted(definition, parameters, backend):
    delta = np.arange(1, 1001, dtype=np.float32)
    keep = keep_mask("w", 1000, 0.9, seed=42)
    stages = {"dare": {"drop_rate": 0.9, "rescale": False}, definition.__name__: parameters}
    method = f"dare+{definition.__name__}+sum"
    found = combine(method, delta, stages=stages, backend=backend)
    assert found[keep].tolist() == definition([delta[keep]], **parameters).tolist()


# ---------------------------------------------------------------- all tensors of a model


def merge(*models, backend="cpu", method="trim+sum", keep_ratio=0.5, scope="model", **recipe):
    models = [
        {name: np.array(delta, np.float32) for name, delta in model.items()} for model in models
    ]
    base = {name: np.zeros_like(delta) for name, delta in models[0].items()}
    trim = {"keep_ratio": keep_ratio, "scope": scope}
    given = {"method": method, "stages": {"trim": trim}, "verbose": False, "backend": backend}
    return dare.merge_arrays(base, models, **given, **recipe)[0]


def check_trimmed(model, keep_ratio, **recipe):
    """Compare with a stable sort of all elements, tensors in the order of their names."""
    model = {name: np.array(delta, np.float32) for name, delta in model.items()}
    flat = np.concatenate([model[name].ravel() for name in sorted(model)])
    expected = definitions.trim([flat], keep_ratio)
    merged = merge(model, keep_ratio=keep_ratio, **recipe)
    found = np.concatenate([merged[name].ravel() for name in sorted(model)])
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("models", "recipe", "expected"),
    [
        # the largest of all tensors
        ([{"a": [9, -8, 7], "b": [1, 2, -10]}], {}, {"a": [9, -8, 0], "b": [0, 0, -10]}),
        # Of equals the first tensor by name keeps the first.
        ([{"b": [5, 5, 1], "a": [0, 5, 5]}], {}, {"a": [0, 5, 5], "b": [5, 0, 0]}),
        # Each model has its own cut.
        ([{"a": [4, 1], "b": [3, 2]}, {"a": [1, 2], "b": [8, 6]}], {}, {"a": [4, 0], "b": [11, 6]}),
        # Tensors of another ratio are ranked among themselves.
        (
            [{"a": [9, 8], "b": [7, 6], "c": [1, 2], "d": [3, 4]}],
            {"tensors": [{"match": ["c", "d"], "keep_ratio": 0.25}]},
            {"a": [9, 8], "b": [0, 0], "c": [0, 0], "d": [0, 4]},
        ),
    ],
)
def test_the_largest_of_all_tensors_are_kept(models, recipe, expected, backend):
    merged = merge(*models, backend=backend, **recipe)
    assert {name: part.tolist() for name, part in merged.items()} == expected


def test_after_dare_survivors_count():
    delta = np.arange(1, 1001, dtype=np.float32)
    model = {"a": delta, "b": delta / 2}
    survivors, left = (
        sum(
            np.count_nonzero(part) for part in merge(model, method="dare+trim+sum", **trim).values()
        )
        for trim in ({"keep_ratio": 1.0, "scope": "tensor"}, {})
    )
    assert left == survivors // 2


@pytest.mark.parametrize("spare_bytes", [0, None])
def test_exact_over_chunks_and_memory(spare_bytes, monkeypatch):
    if spare_bytes is not None:
        monkeypatch.setattr(Cost, "spare_bytes", spare_bytes)
    generator = np.random.default_rng(0)
    shapes = {"a": (700, 1000), "b": (7,), "c": (40, 30), "empty": (0, 3), "scalar": ()}
    model = {name: (generator.standard_normal(s) * 10).round(1) for name, s in shapes.items()}
    check_trimmed(model, 0.3, threads=3)


@pytest.mark.parametrize("keep_ratio", [0.001, 0.1, 0.9])
def test_exact_where_half_the_model_is_too_small_for_a_sample(keep_ratio):
    generator = np.random.default_rng(0)
    sizes = {"a": 70_000, "b": 60_000}
    check_trimmed({name: generator.standard_normal(n) for name, n in sizes.items()}, keep_ratio)


@given(
    st.lists(st.lists(st.integers(-5, 5), min_size=1, max_size=8), min_size=1, max_size=4),
    st.floats(0.01, 0.99),
)
def test_it_is_a_stable_sort(tensors, keep_ratio):
    check_trimmed({f"t{index}": part for index, part in enumerate(tensors)}, keep_ratio)


def test_an_error_while_observing_ends_the_merge(monkeypatch):
    def fail(*_arguments, **_settings):
        raise OSError("disk on fire")

    trim = STAGES["trim"]
    broken = replace(trim.census, rounds=(replace(trim.census.rounds[0], observe=fail),))
    monkeypatch.setitem(STAGES, "trim", replace(trim, census=broken))
    with pytest.raises(OSError, match="disk on fire"):
        merge({"a": [1, 2], "b": [3, 4]}, threads=2)
