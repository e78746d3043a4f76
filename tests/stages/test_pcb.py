import math

import numpy as np
import pytest
from combining import BACKENDS, combine, few_deltas, large_deltas, same_bits_however_cut
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

import dare
from dare.kernels import core, reference
from dare.planning.cost import Cost


def compete(*deltas, ratio=0.1, **settings):
    return combine("pcb", *deltas, stages={"pcb": {"score_ratio": ratio}}, **settings)


@pytest.fixture(params=BACKENDS)
def merged(request):
    return lambda *deltas, **given: compete(*deltas, backend=request.param, **given).tolist()


def by_definition(deltas, kept):
    """The same in float64, with a sort: n·size scores, those below the (k + 1)-th cut to it."""
    deltas = np.array(deltas, np.float64).reshape(len(deltas), -1)
    peaks = np.abs(deltas).max(axis=1, keepdims=True)
    scores = np.exp(len(deltas) * (deltas / peaks) ** 2) * np.tanh(deltas * deltas.sum(axis=0))
    ordered = np.sort(scores, axis=1)
    cut, top = ordered[:, [-kept - 1]], ordered[:, [-1]]
    shares = np.clip((scores - cut) / (top - cut), 0, None)
    whole = shares.sum(axis=0)
    return (shares * deltas).sum(axis=0) / np.where(whole > 0, whole, 1)


def test_of_one_model_the_largest_are_kept(merged):
    # The score grows with the magnitude; ⌊0.4 · 5⌋ = 2 of one model are themselves.
    assert merged([1, -5, 3, 2, -4], ratio=0.4) == [0, -5, 0, 0, -4]


def test_two_models_by_hand(merged):
    # Sums: 3, 0, -1. First: scores e^0·tanh 6, 0, 0 (against the sum); second e^(2/9 - 2)·tanh 3, 0
    # and tanh 3, which is more than nine times the one before. One of each is kept and has a share
    # of 1, and each of those elements has no second share.
    assert merged([2, 2, 2], [1, -2, -3], ratio=0.4) == [2, 0, -3]


def test_shares_go_from_the_cut_to_the_top(merged):
    # Both have the peak 1. First: 1, ½ and ¼ of it, with sums 2, 1, ¼; second: 1, ½ and 0.
    first, second = [1.0, 0.5, 0.25], [1.0, 0.5, 0.0]

    def score(value, total):
        return math.exp(2 * value**2) * math.tanh(value * total)

    top, middle, cut = score(1, 2), score(0.5, 1), score(0.25, 0.25)
    # ⌊0.7 · 3⌋ = 2 are kept of each. The first has three positive scores, so its cut is the third;
    # the second has two, and a cut of 0.
    shares = (middle - cut) / (top - cut), middle / top
    expected = [2, 0.5 * (shares[0] + 3 * shares[1]) / sum(shares), 0]
    assert merged(first, second, ratio=0.7, weights=[1, 3]) == pytest.approx(expected, rel=1e-5)


def test_zeros_and_single_elements(merged):
    assert merged([0, 0], [0, 0]) == [0, 0]
    assert merged([3], [1]) == [2]
    assert merged([3], [-1]) == [3]


def test_infinities_and_nans(merged):
    assert merged([np.inf, 1, 2], ratio=0.1) == [np.inf, 0, 0]
    found = merged([np.nan, 1, 2], [1, 1, 2], ratio=0.4)
    assert np.isnan(found).tolist() == [True, False, False]


def test_after_dare_only_survivors_compete():
    delta = np.arange(1, 101, dtype=np.float32)
    keep = dare.keep_mask("w", 100, 0.5, seed=42)
    stages = {"dare": {"drop_rate": 0.5}, "pcb": {"score_ratio": 0.1}}
    found = combine("dare+pcb", delta, stages=stages)
    assert (found[found != 0] == 2 * delta[keep][-10:]).all()


@given(few_deltas(), st.floats(1e-6, 1))
def test_results_lie_between_the_models(deltas, ratio):
    found = compete(*deltas, ratio=ratio)
    assert (found <= deltas.max(axis=0, initial=0) * (1 + 1e-6)).all()
    assert (found >= deltas.min(axis=0, initial=0) * (1 + 1e-6)).all()


def test_over_many_chunks():
    deltas = [delta / 64 for delta in large_deltas(2)]
    stages = {"pcb": {"score_ratio": 0.1}}
    found = same_bits_however_cut("pcb", deltas, stages=stages)
    expected = by_definition(deltas, kept=int(0.1 * deltas[0].size)).reshape(found.shape)
    # Near the cut shares are differences of nearly equal numbers.
    assert np.abs(found - expected).max() < 1e-4 * np.abs(expected).max()
    assert ((found != 0) != (expected != 0)).mean() < 1e-5
    assert 0.1 < (found != 0).mean() < 0.2


def test_scores_are_counted_again_where_there_is_no_room_to_remember_them(monkeypatch):
    deltas = large_deltas(2)
    remembered = compete(*deltas)
    monkeypatch.setattr(Cost, "spare_bytes", 0)
    assert compete(*deltas).tobytes() == remembered.tobytes()


# ---------------------------------------------------------------- the kernel


def any_floats(size):
    bits = arrays.arrays(np.uint32, size, elements=st.integers(0, 2**32 - 1))
    return bits.map(lambda a: a.view(np.float32))


@given(
    st.integers(0, 70).flatmap(lambda n: st.tuples(any_floats(n), any_floats(n))),
    st.floats(0.1, 10),
    st.floats(1e-30, 1e30),
    st.integers(1, 40),
    st.floats(0, 1),
)
def test_the_kernels_have_the_same_bits(case, factor, peak, models, floor):
    values, total = case
    found = []
    for kernels in (reference, core):
        whole, out = np.empty((2, values.size), np.float32)
        kernels.balance_scores(values, total, factor, peak, float(models), 0.0, whole)
        kernels.balance_scores(values, total, factor, peak, float(models), floor, out)
        assert (out == whole)[whole >= floor].all()
        assert ((out == whole) | (out == 0)).all()
        found.append(out.tobytes() + whole.tobytes())
    assert found[0] == found[1]


@pytest.mark.parametrize("models", [1, 2, 8, 64])
def test_the_functions_are_those_they_should_be(models):
    values = np.float32(np.geomspace(1e-6, 8, 1001))
    total = values[::-1].copy()
    out = np.empty_like(values)
    reference.balance_scores(values, total, 1.0, 8.0, float(models), 0.0, out)
    wide = values.astype(np.float64)
    expected = np.exp(models * ((wide / 8) ** 2 - 1)) * np.tanh(wide * total)
    assert out == pytest.approx(expected, rel=2e-7)
