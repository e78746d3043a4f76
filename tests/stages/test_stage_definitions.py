"""Stages are what their definitions say, in a few elements and over several chunks.

That threads, backends and files make no difference is in test_invariance.
"""

from functools import partial

import numpy as np
import pytest
from combining import CHUNK, LARGE, combine, large_deltas
from definitions import (
    breadcrumbs,
    cabs,
    consensus,
    dare,
    darex,
    della,
    emr,
    karcher,
    model_stock,
    multislerp,
    nm,
    nuslerp,
    ramplus,
    sce,
    ties,
    trim,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from matrix_merges import plan

from dare.planning.cost import Cost

DELTA_STAGES = (trim, breadcrumbs, dare, darex, della, nm)


def method_of(definition):
    return definition.__name__ + "+sum" * (definition in DELTA_STAGES)


def whole(low, high, *shape):
    """A delta of whole numbers, many of them equal."""
    return [np.random.default_rng(0).integers(low, high, shape).astype(np.float32)]


def counted():
    """1, -2, 3, … -64."""
    return [np.arange(1, 65, dtype=np.float32) * np.float32([1, -1] * 32)]


def partly_shared():
    deltas = np.array(large_deltas(2))
    deltas[np.abs(deltas) < 1] = 0
    return deltas


THREE = partial(large_deltas, 3)
RELATIVE = 4e-7  # a tolerance times the value; all others are absolute
OVER_CHUNKS = [
    *((karcher, THREE, {"on": on}, 4e-6) for on in ("weights", "deltas")),
    (multislerp, THREE, {"on": "deltas"}, 1e-5),
    *(
        (nuslerp, partial(large_deltas, 2, shape=shape), asked, 1e-5)
        for each, shape in (("tensor", LARGE), ("row", LARGE), ("column", LARGE[::-1]))
        for on in ("deltas", "weights")
        for asked in [{"each": each, "on": on, "weights": [1, 2]}]
    ),
    *((model_stock, THREE, {"each": each}, 1e-5) for each in ("tensor", "row")),
    (emr, THREE, {}, 0),
    (consensus, THREE, {}, 0),
    (ties, THREE, {"vote": "count", "weighted": False, "divide_by": "count"}, 0),
    (ramplus, partly_shared, {"boost": 1.0, "most": 10.0}, 1e-5),
    (sce, lambda: np.round(large_deltas(4)), {"select_ratio": 0.5}, 1e-5),
    # Few distinct magnitudes, so that cuts fall among many equal ones in several chunks.
    *(
        (trim, partial(whole, -6, 6, size), {"keep_ratio": 0.3}, 0)
        for size in (1, 7, 100_000, 1_200_000)
    ),
    (
        *(breadcrumbs, partial(whole, -6, 6, 2 * CHUNK + 99)),
        *({"keep_middle": 0.55, "drop_largest": 0.25}, 0),
    ),
    *(
        (breadcrumbs, partial(whole, 1, 1000, *shape), asked, 0)
        for shape in ((150, 7000), (3, 400_000), (2, 700_001), (1_200_000,))
        for asked in [{"keep_middle": 0.5, "drop_largest": 0.1, "per": "row"}]
    ),
    *(
        (della, partial(whole, 1, 1000, *shape), {"drop_rate": 0.7, "window": 0.4}, RELATIVE)
        for shape in ((30, 41), (64, 1), (), (300, 4096), (150, 7000), (2, 700_001), (600_000,))
    ),
    *(
        (definition, counted, {"drop_rate": 0.75, **asked}, 0)
        for definition, asked in (
            (dare, {}),
            (dare, {"rescale": False}),
            (dare, {"rescale": "l1"}),
            (darex, {"q": 0.5}),
            (darex, {"epsilon": 0.25}),
            (darex, {"max_variance": 10.0}),  # which holds anyway
            (darex, {"max_variance": 0.75}),  # √(0.75·0.25 / 0.75) = 0.5
        )
    ),
    *(
        (della, counted, {"drop_rate": 0.5, "window": 0.25, "rescale": rescale}, 0)
        for rescale in (False, "l1")
    ),
    *(
        (nm, partial(whole, 1, 1000, *shape), asked, 0)
        for shape, n, m in (
            ((CHUNK // 4096 + 1, 4096), 2, 4),
            *(((200, 3000), 1, 3), ((80, 7001), 4, 8)),
        )
        for choose in ("magnitude", "random")
        for asked in [{"n": n, "m": m, "choose": choose, "rescale": False}]
    ),
    (nm, counted, {"n": 2, "m": 4, "choose": "random", "rescale": True}, 0),
]


@pytest.mark.parametrize(("definition", "make", "asked", "tolerance"), OVER_CHUNKS)
def test_over_chunks(definition, make, asked, tolerance):
    method, deltas = method_of(definition), make()
    base = np.full_like(deltas[0], 0.25 if "on" in asked else 0)
    merge = partial(combine, method, *deltas, base=base, **asked)
    parameters = {name: value for name, value in asked.items() if name != "on"}
    on_weights = asked.get("on") == "weights"
    tensors = [(base + delta) - (0 if on_weights else base) for delta in deltas]
    expected = definition(tensors, **parameters) + (0 if on_weights else base)
    found = merge()
    is_relative = tolerance == RELATIVE
    tolerances = {"rtol": tolerance, "atol": 0} if is_relative else {"rtol": 0, "atol": tolerance}
    np.testing.assert_allclose(found, expected, **tolerances)
    own = {name: value for name, value in asked.items() if name != "weights"}
    stages = {definition.__name__: own}
    least = plan(method, [base.shape], len(deltas), stages=stages, threads=1).cost.least_memory
    assert merge(max_memory=least).tobytes() == found.tobytes()


@st.composite
def cases(draw):
    """A definition, some rows of whole numbers, and parameters."""
    definition = draw(st.sampled_from([breadcrumbs, nm, cabs]))
    elements = st.integers(-9, 9) if definition is cabs else st.integers(-9, 9).filter(bool)
    shape = draw(st.tuples(st.integers(1, 4), st.integers(1, 40)))
    rows = draw(arrays.arrays(np.float32, shape, elements=elements.map(float)))
    if definition is breadcrumbs:
        shares = {"keep_middle": st.floats(0.01, 1), "drop_largest": st.floats(0, 0.99)}
        asked = st.fixed_dictionaries({**shares, "per": st.sampled_from(["tensor", "row"])})
        return definition, [rows], draw(asked)
    m = draw(st.integers(1, 12) if definition is nm else st.sampled_from([1, 2, 4, 8, 16]))
    pair = {"n": draw(st.integers(1, m)), "m": m}
    if definition is cabs:
        return definition, list(rows), pair
    choose = draw(st.sampled_from(["magnitude", "random"]))
    return definition, [rows], {**pair, "choose": choose, "rescale": False}


@settings(max_examples=90)
@given(cases(), st.integers(-8, 8))
def test_any_numbers(case, power):
    definition, deltas, asked = case
    method, factor = method_of(definition), np.float32(2.0**power)
    found = combine(method, *deltas, **asked)
    assert found.tolist() == definition(deltas, **asked).tolist()
    scaled = combine(method, *(factor * delta for delta in deltas), **asked)
    assert (scaled == factor * found).all()
    if definition is nm:  # what is kept once is kept again
        assert (combine(method, found, **asked) == found).all()


@given(st.integers(0, 2**32 - 1), st.integers(2, 6))
def test_karcher_is_the_mean_on_the_sphere(seed, count):
    generator = np.random.default_rng(seed)
    tensors = generator.standard_normal((count, 50), np.float32) + np.float32(0.5)
    weights = generator.uniform(0.5, 2, count).tolist()
    found = combine("karcher", *tensors, weights=weights, on="deltas")
    assert found == pytest.approx(karcher(tensors, weights), rel=1e-5, abs=1e-5)


def test_turns_of_nm_and_models_of_cabs_do_not_overlap():
    asked = {"n": 2, "m": 8, "choose": "random", "rescale": False}
    turns = [combine("nm+sum", np.ones((50, 64)), turn=turn, **asked) for turn in range(4)]
    assert (sum(turns) == 1).all()
    assert all((found.reshape(-1, 8).sum(axis=1) == 2).all() for found in turns)

    marked = [np.full(CHUNK + 1000, 1000**model) for model in range(4)]
    values, counts = np.unique(combine("cabs", *marked, n=2, m=8), return_counts=True)
    assert values.tolist() == [1, 1000, 1000**2, 1000**3]
    assert set(counts.tolist()) == {(CHUNK + 1000) // 4}


def test_pcb(monkeypatch):
    """In float64, with a sort; scores below the (k + 1)-th are cut to it."""
    deltas = [delta / 64 for delta in large_deltas(2)]
    found = combine("pcb", *deltas)
    wide = np.array(deltas, np.float64).reshape(2, -1)
    peaks = np.abs(wide).max(axis=1, keepdims=True)
    scores = np.exp(2 * (wide / peaks) ** 2) * np.tanh(wide * wide.sum(axis=0))
    ordered, kept = np.sort(scores, axis=1), int(0.1 * deltas[0].size)
    cut, top = ordered[:, [-kept - 1]], ordered[:, [-1]]
    shares = np.clip((scores - cut) / (top - cut), 0, None)
    whole = shares.sum(axis=0)
    expected = (shares * wide).sum(axis=0) / np.where(whole > 0, whole, 1)
    expected = expected.reshape(found.shape)
    # Near the cut shares are differences of nearly equal numbers.
    assert np.abs(found - expected).max() < 1e-4 * np.abs(expected).max()
    assert ((found != 0) != (expected != 0)).mean() < 1e-5
    assert 0.1 < (found != 0).mean() < 0.2
    monkeypatch.setattr(Cost, "spare_bytes", 0)  # no room to remember scores
    assert combine("pcb", *deltas).tobytes() == found.tobytes()


@pytest.mark.parametrize("shape", [LARGE, (200_003, 3)])
def test_arcee_fusion(shape):
    base, delta = 0.1 * np.random.default_rng(0).standard_normal((2, *shape), np.float32)
    found = combine("arcee_fusion", delta, base=base)
    q, p = (np.exp(np.float64(rows)) for rows in (base, base + delta))
    q, p = (rows / rows.sum(axis=1, keepdims=True) + 1e-8 for rows in (q, p))
    importance = np.abs(delta) * (p * np.log(p / q)).sum(axis=1, keepdims=True)
    ranked = np.sort(importance, axis=None)
    low, middle, high = (ranked[(ranked.size - 1) * k // 4] for k in (1, 2, 3))
    threshold = middle + 1.5 * (high - low)
    clear = np.abs(importance / threshold - 1) > 1e-5
    assert clear.mean() > 0.999
    assert ((found != base) == (importance >= threshold))[clear].all()
