"""What many stages have in common: limits, order, scale, and parameters that are refused."""

import numpy as np
import pytest
from combining import combine, few_deltas
from hypothesis import given, settings
from hypothesis import strategies as st
from matrix_merges import gaussian, relative, seeds, sides

import dare
from helpers import method_of

STAGES = {
    "consensus": {},
    "emr": {},
    "karcher": {"on": "deltas"},
    "multislerp": {"on": "deltas"},
    "pcb": {"score_ratio": 0.5},
    "nuslerp": {"each": "row"},
    "model_stock": {},
}
CASES = [
    *STAGES.items(),
    *(
        ("ties", {"vote": vote, "weighted": weighted})
        for vote in ("sum", "count")
        for weighted in (False, True)
    ),
]
WITHOUT_NUSLERP = [case for case in CASES if case[0] != "nuslerp"]


@pytest.mark.parametrize(
    ("method", "parameters"),
    [
        ("consensus", {}),
        ("emr", {}),
        ("karcher", {}),
        ("karcher", {"on": "deltas"}),
        ("multislerp", {"on": "deltas"}),
        ("model_stock", {}),
        ("pcb", {"score_ratio": 1.0}),
    ],
)
@settings(max_examples=20)
@given(few_deltas(most=1))
def test_one_model_is_itself(method, parameters, deltas):
    weights = {"weights": [0.3]} if method == "multislerp" else {}
    found = combine(method, *deltas, **parameters, **weights)
    assert found == pytest.approx(deltas[0], rel=1e-6)


@pytest.mark.parametrize(
    ("method", "parameters"), [("tsv", {}), ("knots", {"keep_ratio": 1.0}), ("swudi", {})]
)
@settings(max_examples=20)
@given(sides, sides, seeds)
def test_one_matrix_is_itself(method, parameters, rows, columns, seed):
    delta = gaussian(rows, columns, seed=seed)
    assert relative(combine(method, delta, **parameters), delta) < 1e-5


@pytest.mark.parametrize(("method", "parameters"), WITHOUT_NUSLERP)
@settings(max_examples=20)
@given(few_deltas(least=2), st.randoms())
def test_the_order_of_models_makes_no_difference_but_for_rounding(
    method, parameters, deltas, random
):
    shuffled = random.sample(list(deltas), len(deltas))
    found = combine(method, *deltas, **parameters)
    assert combine(method, *shuffled, **parameters) == pytest.approx(found, rel=1e-4, abs=1e-4)


@pytest.mark.parametrize(("method", "parameters"), CASES)
@settings(max_examples=20)
@given(few_deltas(least=2, most=2), st.sampled_from([-4.0, -1.0, 0.5, 1024.0]))
def test_it_scales_with_its_inputs(method, parameters, deltas, factor):
    factor = np.float32(-1 if method == "pcb" else factor)  # whose scores have a tanh
    deltas = deltas.reshape(2, 1, -1)
    expected = combine(method, *deltas, **parameters) * factor
    assert (combine(method, *deltas * factor, **parameters) == expected).all()


@given(few_deltas(), st.sampled_from([0.0, 0.5, 3.0]), st.floats(1e-6, 1))
def test_relations(deltas, t, ratio):
    mean = deltas.mean(axis=0)
    # Without a boost, ramplus is ram; with weights of 1, unweighted sums elect as weighted ones.
    unboosted = combine("ramplus", *deltas, boost=0.0)
    assert (unboosted == combine("ram", *deltas)).all()
    unweighted = combine("ties", *deltas, weighted=False)
    assert (unweighted == combine("ties", *deltas)).all()
    # Model stock is a part of the mean, and winners of a competition lie between the models.
    found, rounding = combine("model_stock", *deltas), 1e-6 * np.abs(deltas).max()
    assert (np.abs(found) <= np.abs(mean) + rounding).all()
    assert (found * np.sign(mean) >= -rounding).all()
    found = combine("pcb", *deltas, score_ratio=ratio)
    assert (found <= deltas.max(axis=0, initial=0) * (1 + 1e-6)).all()
    assert (found >= deltas.min(axis=0, initial=0) * (1 + 1e-6)).all()
    # Each model is limited by itself.
    found = combine("nearswap", *deltas, t=t)
    assert (found == np.clip(deltas, -t, t).sum(axis=0)).all()


@given(few_deltas(least=2, most=2), st.sampled_from(["tensor", "row", "column"]))
def test_nuslerp_is_slerp_and_the_two_can_change_places_with_their_weights(deltas, each):
    first, second = deltas.reshape(2, 1, -1)
    found = combine("nuslerp", first, second, weights=[1, 3], each=each)
    turned = combine("nuslerp", second, first, weights=[3, 1], each=each)
    assert found == pytest.approx(turned, rel=1e-6, abs=1e-6)
    if each == "tensor":
        expected = combine("slerp", *deltas, on="deltas", t=0.75)
        assert (found[0] == expected).all()


@pytest.mark.parametrize(
    ("stage", "parameters", "text"),
    [
        ("consensus", {"selectivity": 0.0}, "selectivity"),
        ("consensus", {"agree": 1.5}, "agree"),
        ("pcb", {"score_ratio": 1.5}, "score_ratio"),
        ("iso", {"variant": "x"}, "variant"),
        ("iso", {"common_share": 1.5}, "common_share"),
        ("star", {"singular_share": 0.0}, "singular_share"),
        ("star", {"singular_share": "much"}, "singular_share"),
        ("knots", {"keep_ratio": 0.0}, "keep_ratio"),
        ("swudi", {"time": 0.0}, "time"),
        ("swudi", {"rank_share": 1.5}, "rank_share"),
        ("dc_merge", {"keep_ratio": 0.0}, "keep_ratio"),
        ("dc_merge", {"max_ratio": 0.5}, "max_ratio"),
        ("breadcrumbs", {"keep_middle": 0.0}, "keep_middle"),
        ("breadcrumbs", {"drop_largest": 1.0}, "drop_largest"),
        ("breadcrumbs", {"rescale": True}, "rescale"),
        ("trim", {"rescale": True}, "rescale"),
        ("nearswap", {"t": -1.0}, "t"),
        ("ram", {"threshold": -1.0}, "threshold"),
        ("ramplus", {"most": -0.1}, "most"),
        ("sce", {"select_ratio": 1.5}, "select_ratio"),
        ("cabs", {"m": 6}, "m"),
        ("cabs", {"n": 0}, "n"),
        ("nm", {"n": 5, "m": 4}, "n = 5, m = 4"),
        ("nm", {"n": 2, "m": 4, "turn": 2}, "turn = 2"),
        ("nm", {"turn": -1}, "turn = -1"),
        ("della", {"drop_rate": 0.9, "window": 0.2}, "window below 0.2"),
        ("della", {"drop_rate": 0.05, "window": 0.14}, "window below 0.1"),
        ("darex", {"q": 0.0}, "q = 0.0"),
        ("darex", {"max_variance": 0.0}, "max_variance"),
        ("darex", {"drop_rate": 1.0}, "drop_rate = 1"),
        ("darex", {"q": 0.5, "epsilon": 0.1}, "give one of them"),
        ("darex", {"epsilon": 0.95}, "epsilon at most 0.9"),
        ("darex", {"q": 0.05}, "q = 0.05 at drop_rate = 0.9"),
        ("svc", {"alpha": 0.0}, "alpha = 0.0"),
        ("svc", {"alpha": 1.5}, "alpha = 1.5"),
        ("fourier", {"radius": -0.1}, "radius"),
        ("fourier", {"radius": 1.1}, "radius"),
    ],
)
def test_what_cannot_be_is_refused(stage, parameters, text):
    with pytest.raises(dare.RecipeError, match=text):
        combine(method_of(stage), [[1.0]], stages={stage: parameters})
