"""Stages of whole matrices: as by NumPy's decompositions, and what they keep."""

import ml_dtypes
import numpy as np
import pytest
from combining import BACKENDS
from hypothesis import assume, given
from hypothesis import strategies as st
from matrix_merges import (
    gaussian,
    merge,
    polar,
    relative,
    rotation,
    seeds,
    sides,
    sketch_small,
    svd,
)

import dare


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("method", "given"),
    [
        ("star+sum", {"singular_share": 1.0}),
        ("fourier+sum", {"radius": 0.0}),
    ],
)
def test_what_keeps_all_is_the_delta_itself(method, given, backend):
    delta = gaussian(30, 20)
    assert (merge(method, delta, backend=backend, **given) == delta).all()


# ---------------------------------------------------------------- as one writes them down


def star(delta, singular_share):
    left, values, right = svd(delta)
    held = np.cumsum(values)
    rank = int(np.searchsorted(held, singular_share * held[-1])) + 1
    return held[-1] / held[rank - 1] * (left[:, :rank] * values[:rank]) @ right[:rank]


def fourier(delta, radius):
    rows, columns = delta.shape
    down, across = 2 * np.fft.fftfreq(rows)[:, None], 2 * np.fft.fftfreq(columns)
    kept = down**2 + across**2 >= radius**2
    return np.fft.ifft2(np.fft.fft2(delta.astype(np.float64)) * kept).real


def tsv(*deltas, rank=None):
    rank = rank or max(1, min(deltas[0].shape) // len(deltas))
    parts = [svd(delta) for delta in deltas]
    left = polar(np.concatenate([part[0][:, :rank] for part in parts], axis=1))
    right = polar(np.concatenate([part[2][:rank] for part in parts], axis=0))
    return (left * np.concatenate([part[1][:rank] for part in parts])) @ right


def iso(*deltas, variant="c", common_share=0.8):
    left, values, right = svd(np.sum(deltas, axis=0, dtype=np.float64))
    if variant == "c":
        return values.mean() * left @ right
    rank, models = min(deltas[0].shape), len(deltas)
    own = min(rank // models, round((rank - int(rank * common_share)) / models))
    common = rank - own * models
    lefts, all_values, rights = [left[:, :common]], [values[:common]], [right[:common]]
    for delta in deltas:
        left, values, right = svd(delta - lefts[0] @ (lefts[0].T @ delta))
        lefts.append(left[:, :own])
        all_values.append(values[:own])
        rights.append(right[:own])
    mean = np.concatenate(all_values).mean()
    return mean * polar(np.concatenate(lefts, axis=1)) @ polar(np.concatenate(rights, axis=0))


def knots(*deltas, keep_ratio):
    left, values, right = svd(np.concatenate(deltas, axis=1))
    rank = int(np.count_nonzero(values > 1e-6 * values[0]))
    parts = np.stack(np.split(right[:rank], len(deltas), axis=1))
    for part in parts:
        kept = max(1, int(keep_ratio * part.size))
        part[np.abs(part) < np.sort(np.abs(part), axis=None)[-kept]] = 0
    agrees = np.sign(parts) == np.sign(parts.sum(axis=0))
    merged = (parts * agrees).sum(axis=0) / np.maximum((agrees & (parts != 0)).sum(axis=0), 1)
    return (left[:, :rank] * values[:rank]) @ merged


def swudi(*deltas, time=1300.0, rank_share=0.65):
    """Directions that no model has are left out."""
    deltas = [np.asarray(delta, np.float64) for delta in deltas]
    shares = [1 / np.square(delta).sum() if delta.any() else 0.0 for delta in deltas]
    curvature = sum(share * d.T @ d for d, share in zip(deltas, shares, strict=True))
    aim = sum(share * d @ d.T @ d for d, share in zip(deltas, shares, strict=True))
    energies, vectors = np.linalg.eigh(curvature)
    held = energies > 1e-12 * energies[-1]
    energies, vectors = energies[held][::-1], vectors[:, held][:, ::-1]
    is_kept = np.arange(len(energies)) < np.ceil(rank_share * len(curvature))
    filters = np.where(is_kept, 1 - np.exp(-energies * time), 0)
    total = np.sum(deltas, axis=0)
    kept = total - total @ (vectors * filters) @ vectors.T
    return kept + aim @ (vectors * filters / energies) @ vectors.T


def present(matrix):
    left, values, right = svd(matrix)
    count = np.count_nonzero(values > 1e-6 * values[0])
    return left[:, :count], values[:count], right[:count]


def dc_merge(*deltas, keep_ratio, max_ratio):
    share = max(1, min(deltas[0].shape) // len(deltas))
    lefts, rights, parts = [], [], []
    for delta in deltas:
        left, values, right = present(delta)
        left, values, right = left[:, :share], values[:share], right[:share]
        if max_ratio is not None and values.size:
            line = np.linspace(min(max_ratio, values[0] / values[-1]), 1, len(values))
            values = line / line.sum() * values.sum()
        lefts.append(left)
        rights.append(right)
        parts.append((left * values) @ right)
    outputs, _, turn = present(np.concatenate(lefts, axis=1))
    outputs = outputs @ turn
    turn, _, inputs = present(np.concatenate(rights, axis=0))
    inputs = turn @ inputs
    aligned = np.stack([outputs.T @ part @ inputs.T for part in parts])
    kept = max(1, int(keep_ratio * aligned[0].size))
    for each in aligned:
        each[np.abs(each) < (1 - 1e-9) * np.sort(np.abs(each), axis=None)[-kept]] = 0
    agrees = np.sign(aligned) == np.sign(aligned.sum(axis=0))
    merged = (aligned * agrees).sum(axis=0) / np.maximum((agrees & (aligned != 0)).sum(axis=0), 1)
    owner = np.repeat(np.arange(len(lefts)), [left.shape[1] for left in lefts])
    return outputs @ (merged * (owner[:, None] == owner)) @ inputs


def svc(merged, deltas, alpha=None, rank=None):
    least = 1 / len(deltas) if alpha is None else alpha
    left, values, right = svd(merged)
    left, values, right = left[:, :rank], values[:rank], right[:rank]
    counted = np.zeros(len(values))
    for along in (left.T @ np.asarray(delta, np.float64) for delta in deltas):
        overlap = values * (along * right).sum(axis=1) / np.square(along).sum(axis=1)
        counted += np.maximum(least, overlap)
    return (left * (values * len(deltas) / counted)) @ right


def draws(rows, columns, rank=None, count=3):
    """Gaussian matrices, of a low rank if it is given."""
    if rank is None:
        return [gaussian(rows, columns, seed=n) for n in range(count)]
    return [
        gaussian(rows, rank, seed=n) @ gaussian(rank, columns, seed=9 + n) for n in range(count)
    ]


def kinds(rows, columns):
    """Random, falling, of low rank, nearly equal, equal, one of them nothing, a single one."""
    random = draws(rows, columns)
    left, _, right = np.linalg.svd(random[0], full_matrices=False)
    falling = (left * np.geomspace(1, 1e-3, min(rows, columns))) @ right
    return {
        "random": random,
        "falling": [falling, random[1] @ np.diag(np.geomspace(1, 1e-3, columns))],
        "low rank": draws(rows, columns, 4),
        "nearly equal": [random[0] + 1e-3 * draw for draw in random],
        "equal": [random[0]] * 3,
        "one is nothing": [random[0], np.zeros((rows, columns)), random[1]],
        "a single one": random[:1],
    }


LOW = draws(40, 60, 6)
WRITTEN_DOWN = [
    *(
        (star, [gaussian(*shape)], {"singular_share": share})
        for shape, share in (
            *(((60, 90), 0.1), ((60, 90), 0.4), ((90, 60), 0.4), ((90, 60), 0.9)),
            ((516, 600), 0.4),
        )
    ),
    *(
        (fourier, [gaussian(*shape)], {"radius": radius})
        for shape in ((60, 91), (91, 60), (2, 3), (3, 5), (700, 900))
        for radius in (0.05, 0.1, 0.7)
    ),
    *((tsv, draws(*shape), {}) for shape in ((60, 90), (90, 60), (64, 64), (200, 300))),
    (tsv, draws(2, 5, count=4), {}),  # more models than rank
    *((iso, draws(*shape), {}) for shape in ((60, 90), (90, 60), (64, 64), (200, 300))),
    *(
        (iso, draws(*shape), {"variant": "cts", "common_share": share})
        for shape, share in (
            *(((60, 90), 0.0), ((60, 90), 0.5), ((60, 90), 0.8), ((90, 60), 0.5)),
            ((150, 200), 0.8),
        )
    ),
    *(
        (knots, draws(*shape, 3), {"keep_ratio": keep_ratio})
        for shape in ((60, 90), (90, 60), (128, 150))
        for keep_ratio in (0.2, 1.0)
    ),
    *(
        (swudi, deltas, given)
        for shape in ((40, 60), (60, 40), (20, 70))
        for deltas in kinds(*shape).values()
        for given in ({}, {"time": 30.0, "rank_share": 0.3})
    ),
    *((swudi, draws(*shape, count=2), {}) for shape in ((400, 450), (450, 400))),
    *(
        (dc_merge, deltas, {"keep_ratio": keep_ratio, "max_ratio": max_ratio})
        for deltas in (draws(40, 60), draws(60, 40), [*LOW[:2], 0 * LOW[2]])
        for keep_ratio in (0.001, 0.1, 1.0)
        for max_ratio in (None, 5.0)
    ),
    (dc_merge, draws(400, 450, count=2), {"keep_ratio": 0.1, "max_ratio": None}),
]


@pytest.mark.parametrize(("definition", "deltas", "parameters"), WRITTEN_DOWN)
def test_as_one_writes_it_down(definition, deltas, parameters):
    name = definition.__name__
    method = f"{name}+sum" if name in ("star", "fourier") else name
    found = merge(method, *deltas, **parameters)
    is_rough = name in ("tsv", "knots") or parameters.get("variant") or min(found.shape) >= 400
    assert relative(found, definition(*deltas, **parameters)) < (1e-4 if is_rough else 1e-5)


@pytest.mark.parametrize("alpha", [None, 1.0, 0.1])
@pytest.mark.parametrize(
    ("method", "shape"),
    [
        *((method, (60, 90)) for method in ("sum", "ties", "tsv")),
        *(("linear", shape) for shape in ((90, 60), (64, 64), (400, 500))),
    ],
)
def test_svc_as_one_writes_it_down(method, shape, alpha):
    deltas = [gaussian(*shape) + gaussian(*shape, seed=n) for n in (1, 2, 3)]
    expected = svc(merge(method, *deltas), deltas, alpha)
    assert relative(merge(f"{method}+svc", *deltas, alpha=alpha), expected) < 1e-5


def test_low_rank_as_one_writes_it_down(monkeypatch):
    sketch_small(monkeypatch)
    deltas = draws(70, 90, 5)
    assert relative(merge("star+sum", deltas[0]), star(deltas[0], 0.4)) < 1e-5
    assert relative(merge("tsv", *deltas), tsv(*deltas, rank=5)) < 1e-5
    assert relative(merge("sum+svc", *deltas), svc(sum(deltas), deltas, rank=15)) < 1e-5


def test_weights_multiply_deltas():
    first, second = draws(8, 9, count=2)
    for stage in (tsv, swudi):
        found = merge(stage.__name__, first, second, weights=[0.5, -2])
        assert relative(found, stage(0.5 * first, -2 * second)) < 1e-5


# ---------------------------------------------------------------- single matrices


@given(sides, sides, seeds)
def test_star_keeps_the_nuclear_norm_and_turns_with_its_input(rows, columns, seed):
    delta = gaussian(rows, columns, seed=seed)
    found, values = merge("star+sum", delta), svd(delta)[1]
    assert svd(found)[1].sum() == pytest.approx(values.sum(), rel=1e-4)
    assume(np.abs(np.cumsum(values) / values.sum() - 0.4).min() > 1e-4)
    assume(np.diff(values).max(initial=-1) < -1e-2)
    left, right = rotation(rows, seed + 1), rotation(columns, seed + 2)
    expected = left @ found.astype(np.float64) @ right
    np.testing.assert_allclose(merge("star+sum", left @ delta @ right), expected, atol=1e-3)


@given(sides, sides, seeds, st.floats(0.05, 1))
def test_a_filter_splits_a_matrix(rows, columns, seed, radius):
    """Orthogonally; filtering twice is filtering once; moved elements move the result."""
    delta = gaussian(rows, columns, seed=seed)
    once = merge("fourier+sum", delta, radius=radius)
    assert abs(((delta - once) * once.astype(np.float64)).sum()) < 1e-4 * np.square(delta).sum()
    np.testing.assert_allclose(merge("fourier+sum", once, radius=radius), once, atol=1e-5)
    moved = merge("fourier+sum", np.roll(delta, (1, 2), (0, 1)), radius=0.5)
    expected = np.roll(merge("fourier+sum", delta, radius=0.5), (1, 2), (0, 1))
    np.testing.assert_allclose(moved, expected, atol=1e-5)


def test_filters_add_up():
    first, second = draws(40, 50, count=2)
    expected = merge("fourier+sum", first).astype(np.float64) + merge("fourier+sum", second)
    assert relative(merge("fourier+sum", first, second), expected) < 1e-6


# ---------------------------------------------------------------- several matrices


@given(sides, sides, seeds)
def test_turning_both_sides_turns_the_result(rows, columns, seed):
    deltas = [gaussian(rows, columns, seed=seed ^ n) for n in (1, 2)]
    left, right = rotation(rows, seed), rotation(columns, seed + 1)
    turned = [left @ delta @ right for delta in deltas]
    if max(np.diff(svd(delta)[1]).max(initial=-1) for delta in deltas) < -0.05:  # the cut is clear
        assert relative(merge("tsv", *turned), left @ tsv(*deltas) @ right) < 5e-3
    values = svd(deltas[0] + deltas[1])[1]
    if values[-1] > 1e-2 * values[0]:
        expected = left @ merge("iso", *deltas).astype(np.float64) @ right
        assert relative(merge("iso", *turned), expected) < 1e-3
    if np.diff(svd(np.concatenate(deltas, axis=1))[1]).max(initial=-1) < -0.1:
        expected = left @ merge("knots", *deltas, keep_ratio=1.0).astype(np.float64)
        found = merge("knots", *(left @ delta for delta in deltas), keep_ratio=1.0)
        assert relative(found, expected) < 1e-2


@given(sides, sides, seeds)
def test_singular_values_of_the_result(rows, columns, seed):
    deltas = [gaussian(rows, columns, seed=seed ^ n) for n in (1, 2)]
    rank = min(rows, columns) // 2
    shares = np.sort(np.concatenate([svd(delta)[1][:rank] for delta in deltas]))[::-1]
    np.testing.assert_allclose(svd(merge("tsv", *deltas))[1][: 2 * rank], shares, rtol=1e-3)
    mean = svd(deltas[0] + deltas[1])[1].mean()
    np.testing.assert_allclose(svd(merge("iso", *deltas))[1], mean, rtol=1e-3)


@pytest.mark.parametrize("sketches", [False, True])
def test_directions_that_are_not_there_stay_away(sketches, monkeypatch):
    if sketches:
        sketch_small(monkeypatch)
    # Rank 4 of 70: an SVD would make up the other 66.
    delta = gaussian(70, 4) @ gaussian(4, 90, seed=1)
    left, values, right = svd(delta)
    expected = values[:4].mean() * left[:, :4] @ right[:4]
    assert relative(merge("iso", delta), expected) < 1e-5
    assert relative(merge("iso", delta, variant="cts"), expected) < 1e-5


def test_small_singular_values_are_raised_exactly():
    left, _, right = svd(gaussian(60, 80))
    delta = ((left * np.geomspace(1, 1e-4, 60)) @ right).astype(np.float32)
    assert relative(merge("iso", delta), iso(delta)) < 1e-4


@given(sides, sides, seeds)
def test_all_common_is_the_variant_c_and_one_model_is_levelled(rows, columns, seed):
    deltas = [gaussian(rows, columns, seed=seed ^ n) for n in (1, 2)]
    common = merge("iso", *deltas, variant="cts", common_share=1.0)
    assert relative(common, merge("iso", *deltas)) < 1e-4
    assert relative(merge("iso", deltas[0]), iso(deltas[0])) < 1e-4
    assert relative(merge("iso", deltas[0], variant="cts"), iso(deltas[0])) < 1e-3


def test_deltas_that_cancel_leave_what_is_their_own():
    delta = gaussian(6, 7)
    assert not merge("iso", delta, -delta).any()
    assert np.isfinite(merge("iso", delta, -delta, variant="cts")).all()


@given(sides, sides, seeds)
def test_equal_models(rows, columns, seed):
    """They are that model; of dc_merge half of its first directions, one for each of two."""
    delta = gaussian(rows, columns, seed=seed)
    assert relative(merge("knots", delta, delta, delta, keep_ratio=1.0), delta) < 1e-5
    for method in ("linear+svc", "sum+svc"):
        assert relative(merge(method, delta, delta, delta), delta) < 1e-5
    assert relative(merge("dc_merge", delta, keep_ratio=1.0), delta) < 1e-5
    left, values, right = svd(delta)
    half = max(1, min(rows, columns) // 2)
    if half == len(values) or values[half] < 0.9 * values[half - 1]:
        expected = (left[:, :half] * values[:half]) @ right[:half]
        assert relative(merge("dc_merge", delta, delta, keep_ratio=1.0), expected / 2) < 1e-4


@given(sides, sides, seeds)
def test_models_that_do_not_meet_are_added(rows, columns, seed):
    delta = gaussian(rows, columns, seed=seed)
    first, second = np.hstack([delta, 0 * delta]), np.hstack([0 * delta, delta])
    assert relative(merge("swudi", first, second), first + second) < 1e-5


def test_interference_is_less_than_in_the_sum():
    deltas = [1e-3 * draw for draw in draws(64, 64, count=4)]
    found = [
        merge("swudi", *deltas, rank_share=1.0),
        merge("swudi", *deltas),  # leaves 35% of directions as they are in the sum
        np.sum(deltas, axis=0),
    ]
    scores = [
        sum(
            np.square((merged.astype(np.float64) - delta) @ delta.T).sum() / np.square(delta).sum()
            for delta in deltas
        )
        for merged in found
    ]
    assert scores == sorted(scores)


# ---------------------------------------------------------------- calibration


def test_a_model_of_weight_zero_does_not_count():
    deltas = draws(7, 5)
    found = merge("sum+svc", *deltas, weights=[1.0, 1.0, 0.0])
    np.testing.assert_array_equal(found, merge("sum+svc", *deltas[:2]))
    assert not merge("sum+svc", *deltas, weights=[0.0, 0.0, 0.0]).any()


@given(sides, sides, seeds)
def test_one_matrix_is_itself_whatever_its_weight_below_one(rows, columns, seed):
    delta = gaussian(rows, columns, seed=seed)
    assert relative(merge("sum+svc", delta, weights=[0.5]), delta / 2) < 1e-6


def test_one_model_is_given_back_bit_for_bit():
    base = {"w": gaussian(30, 20).astype(ml_dtypes.bfloat16)}
    model = {"w": gaussian(30, 20, seed=1).astype(ml_dtypes.bfloat16)}
    for method in ("linear+svc", "sum+svc"):
        merged, _ = dare.merge_arrays(base, [model], method=method, verbose=False)
        assert merged["w"].tobytes() == model["w"].tobytes()


@pytest.mark.parametrize("factor", [1e-12, 1e9])
def test_scaled_deltas_are_scaled_results(factor):
    deltas = draws(8, 9)
    found = merge("linear+svc", *(np.float32(factor) * delta for delta in deltas))
    assert relative(found / factor, merge("linear+svc", *deltas)) < 1e-5
