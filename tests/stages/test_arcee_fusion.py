import numpy as np
import pytest
from combining import BACKENDS, LARGE, combine, same_bits_however_cut

import dare


@pytest.fixture(params=BACKENDS)
def merged(request):
    return lambda delta, **given: combine(
        "arcee_fusion", delta, backend=request.param, **given
    ).tolist()


def test_what_lies_far_above_the_median_is_kept(merged):
    # In one row |δ| alone decides: 3 + 1.5·(4 - 2) = 6
    assert merged([1, -2, 3, 4, -9]) == [0, 0, 0, 0, -9]


def test_a_row_counts_as_it_diverges(merged):
    # Both rows diverge alike; a shift of a whole row does nothing to its softmax.
    assert merged([[1, 2, 3, 4, 9], [9, 4, 3, 2, 1]]) == [[0, 0, 0, 0, 9], [9, 0, 0, 0, 0]]
    found = merged([[1, 2, 3, 4, 9], [20, 20, 20, 20, 20]])
    assert found == [[0, 0, 3, 4, 9], [0, 0, 0, 0, 0]]  # 0, 1 and 2 are the quartiles: from 3 on


def test_where_nothing_differs_by_row_all_is_taken(merged):
    assert merged([[1], [2]], base=[[5], [5]]) == [[6], [7]]
    assert merged(3) == 3


def test_a_row_with_nan_is_kept_whole(merged):
    found = np.array(merged([[np.nan, 1, 0, 2], [1, 1, 1, 1], [1, 2, 3, 4]]))
    assert np.isnan(found[0, 0])
    assert found[0, 1:].tolist() == [1, 0, 2]


def test_shared_infinities_stay():
    base = np.triu(np.full((8, 8), -np.inf, np.float32), 1)
    model = base + np.random.default_rng(0).standard_normal((8, 8), np.float32)
    found, report = dare.merge_arrays(
        {"w": base}, [{"w": model}], method="arcee_fusion", verbose=False
    )
    assert (np.isinf(found["w"]) == np.isinf(base)).all()
    assert report.nans == 0


def test_it_takes_one_model():
    with pytest.raises(dare.RecipeError, match="arcee_fusion merges 1 model, but 2 are given"):
        combine("arcee_fusion", [1], [2])


@pytest.mark.parametrize("shape", [LARGE, (200_003, 3)])
def test_over_many_chunks(shape):
    base, delta = 0.1 * np.random.default_rng(0).standard_normal((2, *shape), np.float32)
    found = same_bits_however_cut("arcee_fusion", [delta], base=base)
    q, p = (np.exp(np.float64(rows)) for rows in (base, base + delta))
    q, p = (rows / rows.sum(axis=1, keepdims=True) + 1e-8 for rows in (q, p))
    importance = np.abs(delta) * (p * np.log(p / q)).sum(axis=1, keepdims=True)
    ranked = np.sort(importance, axis=None)
    low, middle, high = (ranked[(ranked.size - 1) * k // 4] for k in (1, 2, 3))
    threshold = middle + 1.5 * (high - low)
    clear = np.abs(importance / threshold - 1) > 1e-5
    assert clear.mean() > 0.999
    assert ((found != base) == (importance >= threshold))[clear].all()
