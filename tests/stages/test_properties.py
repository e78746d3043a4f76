"""What many stages have in common: limits, order, scale, and parameters that are refused."""

import numpy as np
import pytest
from combining import combine, few_deltas
from hypothesis import given, settings
from hypothesis import strategies as st
from matrix_merges import gaussian, relative, seeds, sides

import dare
from helpers import method_of

ON_DELTAS = {"karcher": {"on": "deltas"}}
STAGES = {
    "consensus": {},
    "emr": {},
    "karcher": ON_DELTAS,
    "multislerp": {"multislerp": {"on": "deltas"}},
    "pcb": {"pcb": {"score_ratio": 0.5}},
    "nuslerp": {"nuslerp": {"each": "row"}},
}


@pytest.mark.parametrize(
    ("method", "stages"),
    [
        ("consensus", {}),
        ("emr", {}),
        ("karcher", {}),
        ("karcher", ON_DELTAS),
        ("pcb", {"pcb": {"score_ratio": 1.0}}),
    ],
)
@settings(max_examples=20)
@given(few_deltas(most=1))
def test_one_model_is_itself(method, stages, deltas):
    assert combine(method, *deltas, stages=stages) == pytest.approx(deltas[0], rel=1e-6)


@pytest.mark.parametrize("method", ["tsv", "knots", "swudi"])
@settings(max_examples=20)
@given(sides, sides, seeds)
def test_one_matrix_is_itself(method, rows, columns, seed):
    delta = gaussian(rows, columns, seed=seed)
    stages = {"knots": {"knots": {"keep_ratio": 1.0}}}
    assert relative(combine(method, delta, stages=stages.get(method, {})), delta) < 1e-5


@pytest.mark.parametrize("method", [name for name in STAGES if name != "nuslerp"])
@settings(max_examples=20)
@given(few_deltas(least=2), st.randoms())
def test_the_order_of_models_makes_no_difference_but_for_rounding(method, deltas, random):
    shuffled = random.sample(list(deltas), len(deltas))
    found = combine(method, *deltas, stages=STAGES[method])
    again = combine(method, *shuffled, stages=STAGES[method])
    assert again == pytest.approx(found, rel=1e-4, abs=1e-4)


@pytest.mark.parametrize("method", STAGES)
@settings(max_examples=20)
@given(few_deltas(least=2, most=2), st.sampled_from([-4.0, -1.0, 0.5, 1024.0]))
def test_it_scales_with_its_inputs(method, deltas, factor):
    factor = np.float32(-1 if method == "pcb" else factor)  # whose scores have a tanh
    deltas = deltas.reshape(2, 1, -1)
    expected = combine(method, *deltas, stages=STAGES[method]) * factor
    assert (combine(method, *deltas * factor, stages=STAGES[method]) == expected).all()


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
    ],
)
def test_what_cannot_be_is_refused(stage, parameters, text):
    with pytest.raises(dare.RecipeError, match=text):
        combine(method_of(stage), [[1.0]], stages={stage: parameters})


@pytest.mark.parametrize("method", ["slerp", "nuslerp"])
def test_an_arc_has_two_ends(method):
    with pytest.raises(dare.RecipeError, match=f"{method} merges 2 models"):
        combine(method, [1], [2], [3])
