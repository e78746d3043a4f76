"""Stages over several chunks are what their definitions say, in NumPy, by either backend.

That threads, memory and files make no difference is in test_invariance.
"""

import math

import numpy as np
import pytest
from combining import LARGE, combine, large_deltas
from hypothesis import given
from hypothesis import strategies as st

from dare.planning.cost import Cost

ON_DELTAS = {"karcher": {"on": "deltas"}}


def both_ways(method, deltas, **settings):
    """Merge with the library, and by the reference with threads."""
    found = combine(method, *deltas, **settings)
    again = combine(method, *deltas, **{"backend": "reference", "threads": 3, **settings})
    assert again.tobytes() == found.tobytes()
    return found


def mean_of(tensors, shares=None, steps=200):
    """The Karcher mean by its definition, on the whole vectors, in float64."""
    tensors = np.array(tensors, np.float64).reshape(len(tensors), -1)
    shares = np.full(len(tensors), 1 / len(tensors)) if shares is None else np.array(shares)
    lengths = np.linalg.norm(tensors, axis=1)
    units = tensors / lengths[:, None]
    mean = shares @ units
    mean /= np.linalg.norm(mean)
    for _ in range(steps):
        cosines = np.clip(units @ mean, -1, 1)
        angles = np.arccos(cosines)
        stretch = np.where(angles < 1e-7, 1, angles / np.where(angles == 0, 1, np.sin(angles)))
        step = (shares * stretch) @ (units - cosines[:, None] * mean)
        length = np.linalg.norm(step)
        if length < 1e-13:
            break
        mean = math.cos(length) * mean + math.sin(length) * step / length
        mean /= np.linalg.norm(mean)
    return shares @ lengths * mean


@given(st.integers(0, 2**32 - 1), st.integers(2, 6))
def test_karcher_is_the_mean_on_the_sphere(seed, count):
    generator = np.random.default_rng(seed)
    tensors = generator.standard_normal((count, 50)) + 0.5
    tensors = tensors.astype(np.float32)
    weights = generator.uniform(0.5, 2, count)
    found = combine("karcher", *tensors, weights=weights.tolist(), stages=ON_DELTAS)
    assert found == pytest.approx(mean_of(tensors, weights / weights.sum()), rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("on", ["weights", "deltas"])
def test_karcher(on):
    deltas = large_deltas(3)
    base = np.full_like(deltas[0], 0.25)
    found = both_ways("karcher", deltas, base=base, stages={"karcher": {"on": on}})
    tuned = [base + delta for delta in deltas]
    if on == "weights":
        expected = mean_of(tuned)
    else:
        expected = 0.25 + mean_of([model - base for model in tuned])
    assert np.abs(found.reshape(-1) - expected).max() < 4e-6


def test_multislerp():
    deltas = large_deltas(3)
    found = both_ways("multislerp", deltas, stages={"multislerp": {"on": "deltas"}}).reshape(-1)
    wide = np.array(deltas, np.float64).reshape(3, -1)
    lengths = np.linalg.norm(wide, axis=1, keepdims=True)
    mean = (wide / lengths).mean(axis=0)
    expected = mean / np.linalg.norm(mean) * lengths.mean()
    assert np.abs(found - expected).max() < 1e-5


def arc(first, second, t, axis):
    """Interpolate line by line in float64."""
    first, second = np.float64(first), np.float64(second)
    product = (first * second).sum(axis=axis, keepdims=True)
    lengths = [np.sqrt((v * v).sum(axis=axis, keepdims=True)) for v in (first, second)]
    angle = np.arccos(product / lengths[0] / lengths[1])
    return (np.sin((1 - t) * angle) * first + np.sin(t * angle) * second) / np.sin(angle)


@pytest.mark.parametrize(
    ("each", "axis", "shape"),
    [("tensor", (0, 1), LARGE), ("row", 1, LARGE), ("column", 0, LARGE[::-1])],
)
@pytest.mark.parametrize("on", ["deltas", "weights"])
def test_nuslerp(each, axis, shape, on):
    first, second = (delta.reshape(shape) for delta in large_deltas(2))
    base = np.full(shape, 0.25, np.float32)
    given = {"base": base, "weights": [1, 2], "stages": {"nuslerp": {"each": each, "on": on}}}
    found = both_ways("nuslerp", [first, second], **given)
    first, second = (
        (base + delta) if on == "weights" else (base + delta) - base for delta in (first, second)
    )
    expected = arc(first, second, 2 / 3, axis) + (0 if on == "weights" else base)
    assert np.abs(found - expected).max() < 1e-5


def test_model_stock():
    deltas = large_deltas(3)
    wide = np.array(deltas, np.float64).reshape(3, -1)
    units = wide / np.linalg.norm(wide, axis=1, keepdims=True)
    cosine = (units @ units.T)[np.triu_indices(3, 1)].mean()
    expected = 3 * cosine / (1 + 2 * cosine) * wide.mean(axis=0)
    found = both_ways("model_stock", deltas)
    assert np.abs(found.reshape(-1) - expected).max() < 1e-6 * np.abs(wide).max()
    by_row = both_ways("model_stock", deltas, stages={"model_stock": {"each": "row"}})
    for row in range(3):
        alone = combine("model_stock", *(delta[row] for delta in deltas))
        assert np.abs(by_row[row] - alone).max() < 1e-5


def test_votes():
    deltas = large_deltas(3)
    total = (deltas[0] + deltas[1]) + deltas[2]
    largest = np.where(total > 0, np.max(deltas, axis=0), np.min(deltas, axis=0))
    assert (both_ways("emr", deltas) == largest).all()

    needed = sum(np.abs(d) >= np.float32(0.4) * np.abs(total - d) for d in deltas)
    found = both_ways("consensus", deltas)
    assert (found == np.where(needed >= 2, total, 0)).all()
    assert 0.1 < (found == 0).mean() < 0.9

    stages = {"ties": {"vote": "count", "weighted": False, "divide_by": "count"}}
    side = np.sign(sum(np.sign(d) for d in deltas))
    agreeing = [np.where(np.sign(d) == side, d, 0).astype(np.float32) for d in deltas]
    count = sum((np.sign(d) == side).astype(np.float32) for d in deltas)
    expected = ((agreeing[0] + agreeing[1]) + agreeing[2]) / count
    assert (both_ways("ties", deltas, stages=stages) == expected).all()


def test_ramplus():
    deltas = np.array(large_deltas(2))
    deltas[np.abs(deltas) < 1] = 0
    stages = {"ramplus": {"boost": 1.0, "most": 10.0}}
    found = both_ways("ramplus", deltas, stages=stages)
    changed = deltas != 0
    shared = changed.all(axis=0)
    factors = [1 + shared.sum() / (own & ~shared).sum() for own in changed]
    own = deltas[0] * factors[0] + deltas[1] * factors[1]
    assert np.abs(found - np.where(shared, deltas.mean(axis=0), own)).max() < 1e-5


def test_sce():
    deltas = np.round(np.array(large_deltas(4)))  # many equals, at the cut too; sums are exact
    found = both_ways("sce", deltas, stages={"sce": {"select_ratio": 0.5}}).reshape(-1)
    flat = deltas.reshape(4, -1).astype(np.float64)
    variance = flat.var(axis=0).astype(np.float32)
    order = np.argsort(-variance, kind="stable")
    kept = np.zeros_like(flat)
    chosen = order[: int(0.5 * np.count_nonzero(variance))]
    kept[:, chosen] = flat[:, chosen]
    weights = np.square(kept).sum(axis=1, keepdims=True)
    weights /= weights.sum()
    agree = np.sign(kept) == np.where(kept.sum(axis=0) >= 0, 1, -1)
    divisor = np.maximum((weights * agree).sum(axis=0), 1e-6)
    assert np.abs(found - (weights * agree * kept).sum(axis=0) / divisor).max() < 1e-5


def test_pcb(monkeypatch):
    """In float64, with a sort; scores below the (k + 1)-th are cut to it."""
    deltas = [delta / 64 for delta in large_deltas(2)]
    found = both_ways("pcb", deltas)
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
    found = both_ways("arcee_fusion", [delta], base=base)
    q, p = (np.exp(np.float64(rows)) for rows in (base, base + delta))
    q, p = (rows / rows.sum(axis=1, keepdims=True) + 1e-8 for rows in (q, p))
    importance = np.abs(delta) * (p * np.log(p / q)).sum(axis=1, keepdims=True)
    ranked = np.sort(importance, axis=None)
    low, middle, high = (ranked[(ranked.size - 1) * k // 4] for k in (1, 2, 3))
    threshold = middle + 1.5 * (high - low)
    clear = np.abs(importance / threshold - 1) > 1e-5
    assert clear.mean() > 0.999
    assert ((found != base) == (importance >= threshold))[clear].all()
