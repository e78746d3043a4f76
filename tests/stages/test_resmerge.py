import numpy as np
import pytest
from hypothesis import given
from matrix_merges import BACKENDS, gaussian, merge, relative, seeds, sides, svd

from dare.stages import resmerge as module


def cosine(first, second):
    norm = np.linalg.norm(first) * np.linalg.norm(second)
    return np.sum(first * second) / norm if norm else 0.0


def mean_of_pairs(matrices, function=float):
    pairs = [function(cosine(a, b)) for n, a in enumerate(matrices) for b in matrices[:n]]
    return np.mean(pairs) if pairs else 1.0


def as_defined(*deltas, head_ratio=0.2, min_exponent=0.7):
    """As one writes it down, in float64."""
    heads, rests = [], []
    for delta in deltas:
        left, values, right = svd(delta)
        heads.append(values[0] * np.outer(left[:, 0], right[0]))
        rests.append(delta - heads[-1] if values[1:].sum() > 1e-5 * values[0] else 0 * heads[-1])
    norms = [np.linalg.norm(rest) for rest in rests]
    unit = [rest / norm if norm else rest for rest, norm in zip(rests, norms, strict=True)]
    direction = sum(unit) / (np.linalg.norm(sum(unit)) or 1)
    agreement = np.mean([cosine(each, direction) for each in unit])
    merged = sum(rests) / len(deltas)
    if agreement > len(deltas) ** -0.5 + 1e-9:
        score = ((mean_of_pairs(unit) + 1) / 2 + (agreement + 1) / 2) / 2
        kept = agreement ** (1 - (1 - min_exponent) * score)
        merged = kept * np.mean(norms) * direction
    present = [head for head in heads if head.any()]
    common = mean_of_pairs(present, lambda value: max(0.0, value)) * sum(heads)
    size = head_ratio * np.linalg.norm(merged) / (np.linalg.norm(sum(heads)) or 1)
    return merged + size * common


@pytest.mark.parametrize("backend", BACKENDS)
def test_by_hand(backend):
    # Heads diag(4, 0) and diag(6, 0) agree, and so do the rests diag(0, 1) and diag(0, 3): A is as
    # large as their mean, and of the heads a fifth of that is added.
    found = merge("resmerge", np.diag([4, 1]), np.diag([6, 3]), backend=backend)
    np.testing.assert_allclose(found, np.diag([0.4, 2]), rtol=1e-6)


def test_rests_that_do_not_agree_are_averaged_by_hand():
    # Rests at right angles, heads too: their cosine is 0, and nothing of them is added.
    first, second = np.diag([5, 2, 0, 0]), np.diag([0, 0, 7, 4])
    np.testing.assert_allclose(merge("resmerge", first, second), np.diag([0, 1, 0, 2]), atol=1e-6)


def test_rests_that_agree_in_part_by_hand():
    # Both rests have norm 5 and the cosine 0.6: c = √0.8, p = 0.6, s = (0.8 + (c + 1)/2)/2. The
    # heads have the cosine 1, and are 9 and 9.
    first = [[9, 0, 0], [0, 5, 0], [0, 0, 0]]
    second = [[9, 0, 0], [0, 3, 4], [0, 0, 0]]
    c = np.sqrt(0.8)
    size = 5 * c ** (1 - 0.3 * (0.8 + (c + 1) / 2) / 2)
    expected = np.array([[0.2, 0, 0], [0, 0.8 / c, 0.4 / c], [0, 0, 0]]) * size
    np.testing.assert_allclose(merge("resmerge", first, second), expected, rtol=1e-6, atol=1e-6)


def kinds(rows, columns):
    draws = [gaussian(rows, columns, seed=n) for n in range(3)]
    one = np.outer(gaussian(rows), gaussian(columns, seed=1))
    return {
        "random": draws,
        "related": [draws[0] + 0.5 * draw for draw in draws],
        "low rank": [gaussian(rows, 3, seed=n) @ gaussian(3, columns, seed=9) for n in range(3)],
        "equal": [draws[0]] * 3,
        "a single one": draws[:1],
        "one is nothing": [draws[0], np.zeros((rows, columns)), draws[0] + draws[1]],
        "one of rank one": [draws[0], one, draws[0] + draws[1]],
        "opposite": [draws[0], -draws[0]],
    }


@pytest.mark.parametrize("shape", [(20, 30), (30, 20)])
@pytest.mark.parametrize("kind", kinds(4, 4))
@pytest.mark.parametrize("iterated", [False, True])
def test_as_one_writes_it_down(shape, kind, iterated, monkeypatch):
    if iterated:
        monkeypatch.setattr(module, "ITERATED_FROM", 2)
        monkeypatch.setattr(module, "STEPS", 1)
    deltas = kinds(*shape)[kind]
    assert np.abs(merge("resmerge", *deltas) - as_defined(*deltas)).max() < 1e-4
    stages = {"resmerge": {"head_ratio": 0.5, "min_exponent": 0.2}}
    expected = as_defined(*deltas, **stages["resmerge"])
    assert np.abs(merge("resmerge", *deltas, stages=stages) - expected).max() < 1e-4


@pytest.mark.parametrize("gap", [0.5, 1e-2, 1e-4, 0.0])
def test_the_leading_direction_is_one_even_where_the_next_is_close(gap):
    left, values, right = svd(gaussian(300, 280))
    values[:3] = values[0] * np.array([1, 1 - gap, 1 - gap])
    matrix = ((left * values) @ right).astype(np.float32)
    value, column, row = module._leading(matrix)
    assert value == pytest.approx(values[0], rel=1e-5)
    apart = np.linalg.norm(matrix.T.astype(np.float64) @ column - value * row)
    assert apart < 2 * module.RESIDUAL * value
    if gap > 1e-3:
        assert abs(row @ right[0]) == pytest.approx(1, abs=1e-5)


def test_what_does_not_settle_is_decomposed(monkeypatch):
    matrix = gaussian(40, 50)
    monkeypatch.setattr(module, "ITERATED_FROM", 2)
    monkeypatch.setattr(module, "RESIDUAL", -1.0)
    assert module._leading(matrix)[0] == pytest.approx(svd(matrix)[1][0], rel=1e-6)


@given(sides, sides, seeds)
def test_it_scales_with_its_inputs(rows, columns, seed):
    deltas = [gaussian(rows, columns, seed=seed ^ n) for n in (1, 2)]
    found = merge("resmerge", *(1024 * delta for delta in deltas))
    assert relative(found, 1024 * merge("resmerge", *deltas).astype(np.float64)) < 1e-4


def test_weights_multiply_deltas():
    deltas = [gaussian(8, 9, seed=n) for n in range(2)]
    expected = as_defined(0.5 * deltas[0], -2 * deltas[1])
    assert relative(merge("resmerge", *deltas, weights=[0.5, -2]), expected) < 1e-5
