"""Trimming by magnitude is that of a stable sort: of a tensor, a row, or a whole model."""

from dataclasses import replace
from itertools import pairwise
from unittest import mock

import numpy as np
import pytest
from combining import BACKENDS, CHUNK, combine, largest_first
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

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


# ---------------------------------------------------------------- tensors and rows


def middle(delta, keep_middle, drop_largest):
    """The definition of `breadcrumbs`, in NumPy, along the last dimension."""
    size = delta.shape[-1]
    kept = max(1, int(keep_middle * size))
    top = min(int(drop_largest * size), size - kept)
    order = largest_first(np.abs(delta))[..., top : top + kept]
    found = np.zeros_like(delta)
    np.put_along_axis(found, order, np.take_along_axis(delta, order, -1), -1)
    return found


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("stage", "parameters", "shares"),
    [
        ("trim", {"keep_ratio": 0.5}, (0.5, 0)),
        ("breadcrumbs", {"keep_middle": 0.5, "drop_largest": 0.1}, (0.5, 0.1)),
    ],
)
def test_after_dare_survivors_are_counted(stage, parameters, shares, backend):
    delta = np.arange(1, 1001, dtype=np.float32)
    keep = keep_mask("w", 1000, 0.9, seed=42)
    stages = {"dare": {"drop_rate": 0.9, "rescale": False}, stage: parameters}
    found = combine(f"dare+{stage}+sum", delta, stages=stages, backend=backend)
    assert found[keep].tolist() == middle(delta[keep], *shares).tolist()


@settings(max_examples=30, deadline=None)
@given(
    st.integers(1, 60).flatmap(
        lambda size: arrays.arrays(
            np.float32, size, elements=st.integers(-9, 9).filter(bool).map(float)
        )
    ),
    st.floats(0.01, 1),
    st.floats(0, 0.99),
    st.sampled_from(["tensor", "row"]),
    st.integers(-8, 8),
)
def test_any_numbers(delta, keep_middle, drop_largest, per, power):
    parameters = {"keep_middle": keep_middle, "drop_largest": drop_largest, "per": per}
    stages = {"breadcrumbs": parameters}
    found = combine("breadcrumbs+sum", delta, stages=stages)
    assert found.tolist() == middle(delta, keep_middle, drop_largest).tolist()
    factor = np.float32(2.0**power)
    assert (combine("breadcrumbs+sum", factor * delta, stages=stages) == factor * found).all()


@pytest.mark.parametrize("max_memory", ["1GiB", "34MiB"])
@pytest.mark.parametrize(
    ("size", "stage", "parameters", "shares"),
    [
        *((size, "trim", {"keep_ratio": 0.3}, (0.3, 0)) for size in (1, 7, 100_000, 1_200_000)),
        (
            *(2 * CHUNK + 99, "breadcrumbs"),
            *({"keep_middle": 0.55, "drop_largest": 0.25}, (0.55, 0.25)),
        ),
    ],
)
def test_over_many_chunks(size, stage, parameters, shares, max_memory):
    # Few distinct magnitudes, so that cuts fall among many equal ones in several chunks.
    delta = np.random.default_rng(size).integers(-6, 6, size).astype(np.float32)
    found = combine(f"{stage}+sum", delta, stages={stage: parameters}, max_memory=max_memory)
    assert (found == middle(delta, *shares)).all()


@pytest.mark.parametrize("shape", [(150, 7000), (3, 400_000), (2, 700_001), (1_200_000,)])
def test_rows_over_borders_of_chunks(shape):
    delta = np.random.default_rng(0).integers(1, 1000, shape).astype(np.float32)
    stages = {"breadcrumbs": {"keep_middle": 0.5, "drop_largest": 0.1, "per": "row"}}
    found = combine("breadcrumbs+sum", delta, stages=stages, threads=2)
    assert (found == middle(delta, 0.5, 0.1)).all()


# ---------------------------------------------------------------- all tensors of a model


PER_MODEL = {"keep_ratio": 0.5, "scope": "model"}


def merge(models, backend="cpu", method="trim+sum", trim=PER_MODEL, **recipe):
    models = [
        {name: np.array(delta, np.float32) for name, delta in model.items()} for model in models
    ]
    base = {name: np.zeros_like(delta) for name, delta in models[0].items()}
    merged, _ = dare.merge_arrays(
        base, models, method=method, stages={"trim": trim}, verbose=False, backend=backend, **recipe
    )
    return merged


def trimmed(model, keep_ratio):
    """By a stable sort of all elements, tensors in the order of their names."""
    names = sorted(model)
    flat = np.concatenate([np.ravel(model[name]) for name in names])
    kept = np.argsort(-np.abs(flat), kind="stable")[: max(1, int(keep_ratio * flat.size))]
    result = np.zeros_like(flat)
    result[kept] = flat[kept]
    ends = np.cumsum([np.size(model[name]) for name in names])[:-1]
    parts = zip(names, np.split(result, ends), strict=True)
    return {name: part.reshape(np.shape(model[name])) for name, part in parts}


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_the_largest_of_all_tensors_are_kept(backend):
    merged = merge([{"large": [9, -8, 7], "small": [1, 2, -10]}], backend)
    assert merged["large"].tolist() == [9, -8, 0]
    assert merged["small"].tolist() == [0, 0, -10]


def test_of_equals_the_first_tensor_by_name_keeps_the_first():
    merged = merge([{"b": [5, 5, 1], "a": [0, 5, 5]}], trim={"keep_ratio": 0.5, "scope": "model"})
    assert merged["a"].tolist() == [0, 5, 5]
    assert merged["b"].tolist() == [5, 0, 0]


def test_each_model_has_its_own_cut():
    merged = merge([{"a": [4, 1], "b": [3, 2]}, {"a": [0.1, 0.2], "b": [0.4, 0.3]}])
    np.testing.assert_allclose(merged["a"], [4, 0])
    np.testing.assert_allclose(merged["b"], [3.4, 0.3])


def test_after_dare_survivors_count():
    delta = np.arange(1, 1001, dtype=np.float32)
    model = {"a": delta, "b": delta / 2}
    recipe = {"method": "dare+trim+sum"}
    merged = merge([model], trim={"keep_ratio": 0.5, "scope": "model"}, **recipe)
    dropped = merge([model], trim={"keep_ratio": 1.0}, **recipe)
    survivors = sum(np.count_nonzero(part) for part in dropped.values())
    assert sum(np.count_nonzero(part) for part in merged.values()) == survivors // 2


def test_tensors_of_another_ratio_are_ranked_among_themselves():
    model = {"a": [9, 8], "b": [7, 6], "c": [1, 2], "d": [3, 4]}
    rules = [{"match": ["c", "d"], "keep_ratio": 0.25}]
    merged = merge([model], tensors=rules)
    assert {name: part.tolist() for name, part in merged.items()} == {
        "a": [9, 8],
        "b": [0, 0],
        "c": [0, 0],
        "d": [0, 4],
    }


@pytest.mark.parametrize("spare_bytes", [0, None])
def test_exact_over_chunks_and_memory(spare_bytes, monkeypatch):
    if spare_bytes is not None:
        monkeypatch.setattr(Cost, "spare_bytes", spare_bytes)
    generator = np.random.default_rng(0)
    shapes = {"a": (700, 1000), "b": (7,), "c": (40, 30), "empty": (0, 3), "scalar": ()}
    model = {
        name: (generator.standard_normal(shape) * 10).round(1).astype(np.float32)
        for name, shape in shapes.items()
    }
    merged = merge([model], trim={"keep_ratio": 0.3, "scope": "model"}, threads=3)
    expected = trimmed(model, 0.3)
    for name in shapes:
        np.testing.assert_array_equal(merged[name], expected[name])


@pytest.mark.parametrize("keep_ratio", [0.001, 0.1, 0.9])
def test_exact_where_half_the_model_is_too_small_for_a_sample(keep_ratio):
    generator = np.random.default_rng(0)
    shapes = {"a": 70_000, "b": 60_000}
    model = {n: generator.standard_normal(size, np.float32) for n, size in shapes.items()}
    merged = merge([model], trim={"keep_ratio": keep_ratio, "scope": "model"})
    expected = trimmed(model, keep_ratio)
    for name in shapes:
        np.testing.assert_array_equal(merged[name], expected[name])


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.lists(st.integers(-5, 5), min_size=1, max_size=8), min_size=1, max_size=4),
    st.floats(0.01, 0.99),
)
def test_it_is_a_stable_sort(tensors, keep_ratio):
    model = {f"t{index}": np.array(part, np.float32) for index, part in enumerate(tensors)}
    merged = merge([model], trim={"keep_ratio": keep_ratio, "scope": "model"})
    expected = trimmed(model, keep_ratio)
    for name, part in merged.items():
        np.testing.assert_array_equal(part, expected[name])


def test_an_error_while_observing_ends_the_merge(monkeypatch):
    def fail(*_arguments, **_settings):
        raise OSError("disk on fire")

    trim = STAGES["trim"]
    broken = replace(trim.census, rounds=(replace(trim.census.rounds[0], observe=fail),))
    monkeypatch.setitem(STAGES, "trim", replace(trim, census=broken))
    with pytest.raises(OSError, match="disk on fire"):
        merge([{"a": [1, 2], "b": [3, 4]}], threads=2)
