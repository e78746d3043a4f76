import numpy as np
import pytest
from hypothesis import assume, given
from matrix_merges import (
    BACKENDS,
    gaussian,
    merge,
    relative,
    rotation,
    seeds,
    sides,
    sketch_small,
    svd,
)


def star(delta, share=0.4, **settings):
    return merge("star+sum", delta, stages={"star": {"singular_share": share}}, **settings)


def by_svd(delta, share):
    left, values, right = svd(delta)
    held = np.cumsum(values)
    rank = int(np.searchsorted(held, share * held[-1])) + 1
    return held[-1] / held[rank - 1] * (left[:, :rank] * values[:rank]) @ right[:rank]


@pytest.mark.parametrize("backend", BACKENDS)
def test_by_hand(backend):
    # Singular values 5, 3, 2. At 0.4 the 5 is enough (4 of 10) and takes all: 5·10/5.
    delta = [[0, 3, 0], [5, 0, 0], [0, 0, -2]]
    found = star(delta, backend=backend)
    np.testing.assert_allclose(found, [[0, 0, 0], [10, 0, 0], [0, 0, 0]], atol=1e-6)
    # At 0.6 the 3 is needed: 8 of 10 are held, so both are multiplied by 10/8.
    found = star(delta, 0.6, backend=backend)
    np.testing.assert_allclose(found, [[0, 3.75, 0], [6.25, 0, 0], [0, 0, 0]], atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_share_of_one_is_the_delta_itself(backend):
    delta = gaussian(30, 20)
    assert (star(delta, 1.0, backend=backend) == delta).all()


@pytest.mark.parametrize(
    ("shape", "share"),
    [((60, 90), 0.1), ((60, 90), 0.4), ((90, 60), 0.4), ((90, 60), 0.9), ((516, 600), 0.4)],
)
def test_as_by_svd(shape, share):
    delta = gaussian(*shape)
    assert relative(star(delta, share), by_svd(delta, share)) < 1e-5


def test_a_low_rank_delta_as_by_svd(monkeypatch):
    sketch_small(monkeypatch)
    delta = gaussian(70, 6) @ gaussian(6, 90, seed=1)
    assert relative(star(delta), by_svd(delta, 0.4)) < 1e-5


@given(sides, sides, seeds)
def test_the_nuclear_norm_stays(rows, columns, seed):
    delta = gaussian(rows, columns, seed=seed)
    assert svd(star(delta))[1].sum() == pytest.approx(svd(delta)[1].sum(), rel=1e-4)


@given(sides, sides, seeds)
def test_turning_both_sides_turns_the_result(rows, columns, seed):
    delta = gaussian(rows, columns, seed=seed)
    values = svd(delta)[1]
    assume(np.abs(np.cumsum(values) / values.sum() - 0.4).min() > 1e-4)
    assume(np.diff(values).max(initial=-1) < -1e-2)
    left, right = rotation(rows, seed + 1), rotation(columns, seed + 2)
    expected = left @ star(delta).astype(np.float64) @ right
    np.testing.assert_allclose(star(left @ delta @ right), expected, atol=1e-3)
