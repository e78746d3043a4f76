"""Low-rank forms have the error that NumPy's SVD says is the least possible."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from peft_models import gaussian

from dare.errors import InputError, RecipeError
from dare.lora import low_rank
from dare.lora.low_rank import Wanted, truncate_matrix, truncate_product


def least_error(matrix, rank):
    values = np.linalg.svd(matrix.astype(np.float64), compute_uv=False)
    return float(np.sqrt((values[rank:] ** 2).sum() / (values**2).sum()))


def true_error(matrix, found):
    difference = matrix.astype(np.float64) - found.left.astype(np.float64) @ found.right
    return float(np.linalg.norm(difference) / np.linalg.norm(matrix.astype(np.float64)))


def decaying(rows, columns, power):
    left, _, right = np.linalg.svd(gaussian(rows, columns), full_matrices=False)
    return ((left / np.arange(1, min(rows, columns) + 1) ** power) @ right).astype(np.float32)


def test_a_matrix_by_hand():
    matrix = np.array([[0, 3, 0], [4, 0, 0]], np.float32)
    found = truncate_matrix(matrix, Wanted(rank=1), "w")
    assert found.left.tolist() == [[0], [2]]
    np.testing.assert_allclose(found.right, [[2, 0, 0]])
    assert (found.squared, found.lost) == (25, 9)
    assert found.error == 0.6


@pytest.mark.parametrize(
    ("matrix", "margin"),
    [
        (gaussian(180, 220), 1.01),  # flat: the hardest
        (decaying(220, 180, 0.7), 1.0001),
        (decaying(180, 220, 2), 1.0001),
        (gaussian(180, 3) @ gaussian(3, 220, seed=1) + 0.05 * gaussian(180, 220), 1.01),
    ],
    ids=["flat", "tall", "steep", "spiked"],
)
def test_a_sketch_is_all_but_the_best(matrix, margin, monkeypatch):
    sides, gram = [], low_rank.gram
    monkeypatch.setattr(low_rank, "gram", lambda wide: (sides.append(len(wide)), gram(wide))[1])
    found = truncate_matrix(matrix, Wanted(rank=4), "w")
    assert sides == [low_rank._basis_width(4)]  # and not the side of the matrix
    least = least_error(matrix, 4)
    error = true_error(matrix, found)
    assert least * (1 - 1e-6) <= error <= least * margin
    assert found.error == pytest.approx(error, rel=1e-5)


@pytest.mark.parametrize("shape", [(60, 80), (225, 240)])
def test_a_matrix_of_low_rank_is_recovered(shape):
    matrix = gaussian(shape[0], 5) @ gaussian(5, shape[1], seed=1)
    found = truncate_matrix(matrix, Wanted(rank=9), "w")
    assert found.rank == 5
    assert true_error(matrix, found) < 1e-6


@pytest.mark.parametrize("energy", [0.3, 0.9, 0.999, 1.0])
@pytest.mark.parametrize("matrix", [gaussian(180, 200), decaying(220, 190, 1)], ids=["flat", "1/i"])
def test_as_few_directions_as_hold_the_energy(matrix, energy, monkeypatch):
    monkeypatch.setattr(low_rank, "FIRST_WIDTH", 4)  # so that there is a sketch before it is exact
    found = truncate_matrix(matrix, Wanted(energy=energy), "w")
    energies = np.linalg.svd(matrix.astype(np.float64), compute_uv=False) ** 2
    fewest = int(np.searchsorted(np.cumsum(energies) / energies.sum(), energy - 1e-9)) + 1
    assert fewest <= found.rank <= fewest + 1
    assert found.lost <= (1 - energy) * found.squared + 1e-10 * found.squared
    capped = truncate_matrix(matrix, Wanted(rank=4, energy=energy), "w")
    assert capped.rank == min(4, found.rank)


sizes = st.integers(1, 12) | st.sampled_from([40, 90])


@settings(deadline=None, max_examples=30)
@given(sizes, sizes, sizes, st.integers(1, 12), st.integers(0, 2**32 - 1))
def test_factors_and_their_product_give_the_same(rows, inner, columns, rank, seed):
    left, right = gaussian(rows, inner, seed=seed), gaussian(inner, columns, seed=seed + 1)
    wanted = Wanted(rank=rank)
    from_factors = truncate_product(left, right, wanted, "w")
    matrix = left.astype(np.float64) @ right
    assert from_factors.rank <= min(rows, inner, columns, rank)
    error = from_factors.error
    assert error == pytest.approx(true_error(matrix, from_factors), abs=1e-6)
    assert error == pytest.approx(least_error(matrix, rank), abs=1e-6)
    from_matrix = truncate_matrix(matrix.astype(np.float32), wanted, "w")
    assert from_matrix.rank <= min(rows, inner, columns, rank)
    assert from_matrix.error == pytest.approx(true_error(matrix, from_matrix), abs=1e-5)
    assert from_matrix.error == pytest.approx(error, abs=1e-5)


@settings(deadline=None, max_examples=20)
@given(sizes, sizes, st.lists(st.floats(0.01, 1), min_size=2, max_size=5), st.integers(0, 99))
def test_more_energy_never_takes_fewer_directions(rows, columns, energies, seed):
    matrix = gaussian(rows, columns, seed=seed)
    found = [truncate_matrix(matrix, Wanted(energy=e), "w") for e in sorted(energies)]
    ranks = [low_rank.rank for low_rank in found]
    assert ranks == sorted(ranks)
    losses = [low_rank.lost for low_rank in found]
    assert all(after <= before + 1e-9 for before, after in pairwise(losses))


def test_nothing_has_rank_zero():
    nothing = np.zeros((4, 6), np.float32)
    assert truncate_matrix(nothing, Wanted(rank=2), "w").rank == 0
    assert truncate_product(nothing[:, :2], nothing[:2], Wanted(energy=0.5), "w").rank == 0


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_is_refused(value):
    matrix = np.full((3, 3), value, np.float32)
    for found in (
        lambda: truncate_matrix(matrix, Wanted(rank=1), "q_proj"),
        lambda: truncate_product(matrix, matrix, Wanted(rank=1), "q_proj"),
    ):
        with pytest.raises(InputError, match="q_proj: the change has values that are not finite"):
            found()


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({}, "one of them is needed"),
        ({"rank": 0}, "rank = 0: must be at least 1"),
        ({"energy": 1.5}, "energy = 1.5: must be above 0 and at most 1"),
        ({"energy": 0}, "energy = 0: must be above 0"),
    ],
)
def test_what_makes_no_sense_is_refused(asked, message):
    with pytest.raises(RecipeError, match=message):
        Wanted(**asked)
