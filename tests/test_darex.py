"""Finding q: the search, on scores and on outputs, and the formula against brute force."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dare import InputError, RecipeError, Request
from dare.darex import (
    LARGEST_Q,
    TriedQ,
    analytic_q,
    find_q_by_outputs,
    find_q_by_score,
    rules_for_q,
)
from dare.stages.dropping import balanced_q

# ---------------------------------------------------------------- by score


def test_the_search_by_hand():
    # Steps of 0.25 from 0.25: 0.25, 0.5 (best), 0.75, 1.0; then 0.275 … 0.725 by 0.025.
    found = find_q_by_score(lambda q: -((q - 0.55) ** 2), 0.75, step=0.25)
    tried = [trial.q for trial in found.trials]
    assert tried[:4] == [0.25, 0.5, 0.75, 1.0]
    assert tried[4:] == pytest.approx([0.25 + 0.025 * k for k in range(1, 20) if k != 10])
    assert found.q == pytest.approx(0.55)
    assert found.score == max(trial.score for trial in found.trials)


def test_it_stops_after_more_than_three_that_are_no_better():
    found = find_q_by_score(lambda q: -q, 0.9, step=0.01)
    # 0.1 is best; 0.11 … 0.14 are four that are not; then 0.101 … 0.109
    assert [round(trial.q, 3) for trial in found.trials] == [
        *(0.1, 0.11, 0.12, 0.13, 0.14),
        *(round(0.1 + 0.001 * k, 3) for k in range(1, 10)),
    ]
    assert found.q == 1 - 0.9
    equal = find_q_by_score(lambda q: 1.0, 0.5)
    assert equal.q == 0.5
    assert equal.trials[0] == TriedQ(0.5, 1.0)


def test_a_better_one_starts_the_count_again():
    scores = {0.1: 5, 0.2: 1, 0.3: 1, 0.4: 1, 0.5: 6, 0.6: 1, 0.7: 1, 0.8: 1, 0.9: 1, 1.0: 9}
    found = find_q_by_score(lambda q: scores.get(round(q, 9), 0), 0.9, step=0.1)
    assert round(found.q, 9) == 0.5  # after four that are no better, 1.0 is not tried
    assert len([t for t in found.trials if round(t.q * 10, 6) % 1 == 0]) == 9


@settings(max_examples=20)
@given(st.floats(0.01, 0.99), st.floats(0, 1), st.none() | st.floats(0.01, 1))
def test_no_q_is_tried_below_the_keep_rate_or_above_one(drop_rate, best, step):
    found = find_q_by_score(lambda q: -abs(q - best), drop_rate, step=step)
    assert all(1 - drop_rate <= trial.q <= 1 for trial in found.trials)
    assert found.score == max(trial.score for trial in found.trials)
    used = (1 - drop_rate) / 2 if step is None else step
    if 1 - drop_rate <= best <= 1 - 2 * used:  # and not beyond the last step of the grid
        assert abs(found.q - best) <= used / 10 * (1 + 1e-6)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"drop_rate": 1.0}, "drop_rate = 1"),
        ({"drop_rate": 0.9, "step": 0.0}, "step = 0.0"),
        ({"drop_rate": 0.9, "patience": -1}, "patience = -1"),
        ({"drop_rate": 0.5, "score": lambda _: math.nan}, r"q = 0\.5"),
    ],
)
def test_what_cannot_be_searched_is_refused(arguments, text):
    with pytest.raises((InputError, RecipeError), match=text):
        find_q_by_score(**{"score": lambda q: q, **arguments})


# ---------------------------------------------------------------- by outputs


def test_outputs_of_a_linear_layer():
    """E|h/q - 1|² over a mean of K kept ones is least at q = E[h²]/E[h], found by hand here."""
    kept = {1: np.array([0.1, 0.3]), 2: np.array([0.2, 0.2])}
    every = np.concatenate(list(kept.values()))
    best = (every**2).sum() / every.sum()
    found = find_q_by_outputs(
        lambda q, seed: kept[seed] / q, np.ones(2), 0.9, seeds=(1, 2), top=None, step=0.05
    )
    assert found.q == pytest.approx(best, abs=0.0025)
    assert found.score == pytest.approx(-np.mean((every / found.q - 1) ** 2))


def test_only_the_largest_expected_logits_are_compared():
    expected = np.array([[5.0, 4.0, 0.0, 1.0]])

    def outputs(q, seed):
        noise = 1000 * q * np.array([[0, 0, 1, 1]])
        return expected * (0.5 / q) * np.array([[1, 1, 0, 0]]) + noise

    assert find_q_by_outputs(outputs, expected, 0.75, top=2, step=0.25).q == 0.5
    assert find_q_by_outputs(outputs, expected, 0.75, top=9, step=0.25).q == 0.25


def test_outputs_of_another_shape_are_refused():
    with pytest.raises(InputError, match=" 3, expected 2"):
        find_q_by_outputs(lambda q, seed: np.ones(3), np.ones(2), 0.5)
    with pytest.raises(RecipeError, match="at least one"):
        find_q_by_outputs(lambda q, seed: np.ones(2), np.ones(2), 0.5, seeds=())


# ---------------------------------------------------------------- by formula


def by_brute_force(delta, mean_inputs, p, eta):
    """Every row's q on a grid of 20,000 values, from the bound as it is written."""
    grid = 1 / np.linspace(1 / LARGEST_Q, 1 / (1 - p), 20_000)
    phi = 0.5 if p == 0.5 else (1 - 2 * p) / math.log((1 - p) / p)
    rows = []
    for row in delta:
        c = row * mean_inputs
        bound = np.abs(
            eta * (1 - (1 - p) / grid) * abs(c.sum())
            + eta**2 * phi * (c**2).sum() / (4 * grid**2)
            + math.log(2 / 0.05)
        )
        rows.append(grid[bound.argmin()])
    return rows


@pytest.mark.parametrize("p", [0.3, 0.5, 0.99])
@pytest.mark.parametrize("eta", [0.1, 30.0])
def test_the_formula_is_the_minimum(p, eta):
    generator = np.random.default_rng(0)
    delta = generator.standard_normal((12, 40)) + 0.3
    inputs = np.abs(generator.standard_normal(40))
    rows = by_brute_force(delta, inputs, p, eta)
    found = analytic_q(delta, inputs, p, eta=eta)
    expected = [np.mean(rows), min(rows), max(rows)]
    assert [found.q, found.lowest, found.highest] == pytest.approx(expected, rel=1e-2)
    assert analytic_q(-4 * delta, inputs, p, eta=eta / 4) == found  # q depends on η·|c| only


def test_rows_without_a_change_do_not_count():
    changed = np.array([[1.0, 2.0]])
    both = np.concatenate([changed, np.zeros((3, 2))])
    inputs = np.array([0.5, 0.1])
    assert analytic_q(both, inputs, 0.9) == analytic_q(changed, inputs, 0.9)
    assert analytic_q(np.zeros((2, 2)), inputs, 0.9).q == 1 - 0.9
    # sums that cancel: only the spread is left to be made small
    assert analytic_q(np.array([[1.0, -1.0]]), np.ones(2), 0.9).q == LARGEST_Q


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((np.ones((2, 3)), np.ones(2), 0.9, 1.0), "a mean for each input"),
        ((np.ones(3), np.ones(3), 0.9, 1.0), "outputs × inputs"),
        ((np.ones((2, 3)), np.ones(3), 0.0, 1.0), "nothing is dropped"),
        ((np.ones((1, 1)), np.ones(1), 0.5, 0.0), "eta = 0"),
    ],
)
def test_what_the_formula_cannot_take_is_refused(arguments, text):
    *given, eta = arguments
    with pytest.raises((InputError, RecipeError), match=text):
        analytic_q(*given, eta=eta)


def test_rules_are_for_the_named_tensors_alone():
    rules = rules_for_q({"w": 0.5, "h.0.[w]": 0.25})
    assert rules[1].matches("h.0.[w]")
    assert not rules[1].matches("h.0.w")
    given = {"method": "darex+sum", "tensors": rules, "output": "out.safetensors"}
    recipe = Request.of(base="base.safetensors", models=["tuned.safetensors"], **given).recipe
    assert recipe.settings_for("w", 0)[0]["q"] == 0.5


# ---------------------------------------------------------------- torch


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_torch_tensors_of_any_type_are_taken(dtype):
    torch = pytest.importorskip("torch")
    delta = torch.ones(2, 3, dtype=getattr(torch, dtype), requires_grad=True)
    inputs = torch.tensor([0.5, 0.25, 0.25], dtype=getattr(torch, dtype))
    expected = analytic_q(np.ones((2, 3)), np.array([0.5, 0.25, 0.25]), 0.9)
    assert analytic_q(delta, inputs, 0.9) == expected

    def outputs(q, seed):
        return delta / q

    assert find_q_by_outputs(outputs, delta, 0.5, top=2).q == 1
    assert find_q_by_outputs(outputs, delta.detach().float().numpy(), 0.5, top=None).q == 1


# ---------------------------------------------------------------- the stage's own q


@given(st.floats(0.01, 0.99), st.integers(1, 9))
def test_q_is_where_loss_and_noise_balance(p, models):
    q = balanced_q(p, models)

    def cost(q):
        kept = (1 - p) / q
        return 100 * (1 - kept) ** 2 + models * kept**2 * p / (1 - p)

    assert 1 - p <= q + 1e-6
    assert q <= 1
    if q < 1:
        assert cost(q) <= min(cost(q * 1.02), cost(q / 1.02))
