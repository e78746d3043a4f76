"""The decompositions under the matrix stages, and what all of those stages keep to."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matrix_merges import gaussian, merge, plan, relative, seeds, surveyed_bytes, svd
from threadpoolctl import threadpool_info

import dare
from dare.errors import InputError, RecipeError
from dare.kernels import linalg

DELTA_STAGES = ["star", "fourier"]
COMBINE_STAGES = ["tsv", "iso", "knots", "swudi", "dc_merge"]
METHODS = [*(f"{name}+sum" for name in DELTA_STAGES), *COMBINE_STAGES, "linear+svc"]


# ---------------------------------------------------------------- decompositions


@pytest.mark.parametrize("shape", [(1, 1), (1, 7), (7, 1), (5, 5), (40, 90), (90, 40), (300, 260)])
def test_factors_are_those_of_numpy(shape):
    matrix = gaussian(*shape)
    found = linalg.factorise(matrix)
    _, values, _ = svd(matrix)
    np.testing.assert_allclose(found.values, values, rtol=0, atol=1e-8 * values[0])
    assert relative(found.product(), matrix) < 1e-6
    rank = min(shape)
    np.testing.assert_allclose(found.left.T @ found.left, np.eye(rank), atol=1e-8)
    np.testing.assert_allclose(found.right @ found.right.T, np.eye(rank), atol=1e-8)


SINGLE_SHAPES = [(40, 90), (90, 40), (64, 64), (520, 600), (600, 520)]
"""Square ones have singular values far below the largest, the others have not."""


@pytest.fixture
def single(monkeypatch):
    """Use float32 for small matrices too, and count how often it was good enough."""
    monkeypatch.setattr(linalg, "SINGLE_FROM", 16)
    found = []
    attempt = linalg._in_single

    def watched(*arguments):
        found.append(attempt(*arguments) is not None)
        return attempt(*arguments)

    monkeypatch.setattr(linalg, "_in_single", watched)
    return found


@pytest.mark.parametrize("shape", SINGLE_SHAPES)
def test_single_precision_is_that_of_numpy(shape, single):
    matrix = gaussian(*shape)
    found, (turned, mean) = linalg.factorise(matrix), linalg.polar(matrix)
    left, values, right = svd(matrix)
    np.testing.assert_allclose(found.values, values, rtol=0, atol=2e-6 * values[0])
    assert relative(found.product(), matrix) < 1e-5
    rank = min(shape)
    # 1.6e-4 was seen between neighbours with one BLAS, below 1e-4 with others
    np.testing.assert_allclose(found.left.T @ found.left, np.eye(rank), atol=4e-4)
    np.testing.assert_allclose(found.right @ found.right.T, np.eye(rank), atol=4e-4)
    assert relative(found.left @ found.right, left @ right) < 2e-5
    assert relative(turned, left @ right) < 2e-5
    assert mean == pytest.approx(values.mean(), rel=1e-6)
    leading = linalg.factorise(matrix, rank // 4)
    assert leading.values.size == rank // 4
    expected = (left[:, : rank // 4] * values[: rank // 4]) @ right[: rank // 4]
    assert relative(leading.product(), expected) < 2e-5
    assert single == [True] * 3


def test_directions_that_are_not_there_stay_away_in_single_precision(single):
    left, values, right = svd(gaussian(64, 80))
    values[60:] = 0
    matrix = ((left * values) @ right).astype(np.float32)
    turned, mean = linalg.polar(matrix)
    assert single == [True]
    assert mean == pytest.approx(values[:60].mean(), rel=1e-6)
    assert relative(turned, left[:, :60] @ right[:60]) < 2e-5


@pytest.mark.parametrize(
    "values",
    [
        np.r_[30.0, np.linspace(2, 1, 63)],  # one stands out: 900 times the others squared
        np.geomspace(1, 1e-4, 64),  # most are small
    ],
)
def test_what_single_precision_does_not_resolve_is_done_in_double(values, single):
    left, _, right = svd(gaussian(64, 80))
    matrix = ((left * values) @ right).astype(np.float32)
    turned, mean = linalg.polar(matrix)
    assert single == [False]
    assert mean == pytest.approx(values.mean(), rel=1e-5)
    assert relative(turned, left @ right) < 1e-4


@pytest.mark.parametrize("scale", [1e-22, 1e18])
def test_sizes_whose_squares_float32_cannot_hold_are_done_in_double(scale, single):
    matrix = gaussian(20, 30)
    found = linalg.factorise(np.float32(scale) * matrix)
    assert single == [False]
    np.testing.assert_allclose(found.values, scale * svd(matrix)[1], rtol=1e-5)


@pytest.mark.parametrize(
    ("method", "stages"),
    [
        ("star+sum", {}),
        ("tsv", {}),
        ("iso", {}),
        ("iso", {"iso": {"variant": "cts"}}),
        ("knots", {"knots": {"keep_ratio": 1.0}}),  # no cut that digits could move
        ("swudi", {}),
        ("dc_merge", {"dc_merge": {"keep_ratio": 0.05}}),
    ],
)
@pytest.mark.parametrize("shape", [(60, 90), (90, 60), (64, 64)])
def test_stages_in_single_precision_are_those_in_double(method, stages, shape, monkeypatch):
    deltas = [gaussian(*shape, seed=n) for n in range(3)]
    in_double = merge(method, *deltas, stages=stages)
    monkeypatch.setattr(linalg, "SINGLE_FROM", 16)
    in_single = merge(method, *deltas, stages=stages)
    assert (in_single != in_double).any()
    assert relative(in_single, in_double) < 1e-4


def test_blas_has_one_thread_while_it_is_told_to():
    before = [pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"]
    with linalg.one_blas_thread():
        pools = [pool for pool in threadpool_info() if pool["user_api"] == "blas"]
        assert {pool["num_threads"] for pool in pools} == {1}
    assert before == [
        pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"
    ]


@pytest.mark.parametrize("shape", [(520, 600), (600, 520)])
def test_low_rank_is_recognised(shape, monkeypatch):
    matrix = gaussian(shape[0], 9) @ gaussian(9, shape[1], seed=1)
    sizes = []
    whole = linalg.gram
    monkeypatch.setattr(linalg, "gram", lambda wide: sizes.append(len(wide)) or whole(wide))
    found = linalg.factorise(matrix)
    assert sizes == [linalg.CORNER, linalg.SKETCH]  # and not 520
    assert found.values.size == 9
    np.testing.assert_allclose(found.values, svd(matrix)[1][:9], rtol=1e-6)
    assert relative(found.product(), matrix) < 2e-6


def test_a_little_noise_is_not_low_rank():
    matrix = gaussian(520, 9) @ gaussian(9, 600, seed=1) + 1e-3 * gaussian(520, 600, seed=2)
    assert linalg.factorise(matrix).values.size == 520


def test_a_corner_shows_that_a_matrix_has_no_low_rank(monkeypatch):
    monkeypatch.setattr(np.linalg, "qr", lambda _matrix: pytest.fail("sketched in vain"))
    assert linalg.factorise(gaussian(520, 600)).values.size == 520


@given(st.integers(1, 12), st.integers(1, 12), seeds)
def test_the_first_triples_are_the_best_approximation(rows, columns, seed):
    matrix = gaussian(rows, columns, seed=seed)
    rank = (min(rows, columns) + 1) // 2
    difference = matrix - linalg.factorise(matrix, rank).product()
    values = svd(matrix)[1]
    least = np.sqrt(np.square(values[rank:]).sum())
    assert np.linalg.norm(difference) == pytest.approx(least, abs=1e-5 * values[0])


@given(st.integers(2, 10), st.integers(2, 10), seeds)
def test_polar_factors_are_the_nearest_orthogonal_matrices(rows, columns, seed):
    matrix = gaussian(rows, columns, seed=seed)
    found = linalg.factorise(matrix)
    product = linalg.orthogonal_product([found], np.ones_like(found.values))
    left, _, right = svd(matrix)
    np.testing.assert_allclose(product, left @ right, atol=1e-5)


# ---------------------------------------------------------------- what all stages keep to


@pytest.mark.parametrize("method", ["star+sum", "fourier+sum", "tsv", "iso"])
def test_transposed_deltas_give_the_transposed_result(method):
    deltas = [gaussian(128, 4200, seed=n) for n in range(2)]  # in other chunks when transposed
    across = merge(method, *deltas)
    down = merge(method, *(np.ascontiguousarray(delta.T) for delta in deltas))
    assert relative(down.T, across) < 1e-5


@pytest.mark.parametrize("method", METHODS)
def test_more_dimensions_are_the_rows_by_all_others(method):
    deltas = [gaussian(4, 6, seed=n) for n in range(2)]
    flat = merge(method, *deltas)
    deep = merge(method, *(d.reshape(4, 2, 3) for d in deltas))
    assert (deep.reshape(4, 6) == flat).all()


@pytest.mark.parametrize("shape", [(), (3,), (1, 3), (3, 1)])
def test_what_is_no_matrix_is_averaged_or_stays(shape):
    two, four = np.full(shape, 2, np.float32), np.full(shape, 4, np.float32)
    for name in COMBINE_STAGES:
        assert (merge(name, two, four) == 3).all()
        assert (merge(name, two, four, weights=[3, 1]) == 5).all()
    for name in DELTA_STAGES:
        assert (merge(f"{name}+sum", two) == 2).all()


HEAD = "lm_head.weight"


@pytest.mark.parametrize("method", METHODS)
def test_embeddings_and_heads_are_vectors_unless_a_rule_says_otherwise(method):
    deltas = [gaussian(6, 5, seed=n) for n in range(2)]
    names = "model.wpe.weight", HEAD, "model.layers.0.mlp.up_proj.weight"
    base, *models = (
        {name: delta.copy() for name in names}  # one array would be one tensor
        for delta in (np.zeros((6, 5), np.float32), *deltas)
    )
    rules = [{"match": HEAD, "embeddings": "matrices"}]
    merged, _ = dare.merge_arrays(base, models, method=method, tensors=rules, verbose=False)
    embedding, head, layer = (merged[name] for name in names)
    expected = merge("sum" if method.endswith("+sum") else "linear", *deltas)
    assert (embedding == expected).all()
    assert (head == layer).all()
    assert relative(layer, expected) > 1e-3


@pytest.mark.parametrize("method", METHODS)
def test_an_embedding_that_is_a_vector_is_read_once_and_takes_no_matrix(method):
    costs = [
        plan(method, {HEAD: (600, 500)}, models=2, stages={stage: {"embeddings": kind}}).cost
        for stage in [method.removesuffix("+sum").removeprefix("linear+")]
        for kind in ("vectors", "matrices")
    ]
    assert [cost.passes for cost in costs] == [1, 2]
    assert costs[0].matrix_work == costs[0].matrix_bytes == 0
    assert costs[0].bytes_read < costs[1].bytes_read


@pytest.mark.parametrize("method", METHODS)
def test_nothing_comes_of_nothing(method):
    for shape in ((0,), (0, 4), (4, 0), (3, 4)):
        found = merge(method, np.zeros(shape), np.zeros(shape))
        assert found.shape == shape
        assert not found.any()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_values_that_are_not_finite_are_refused_by_name(method, bad):
    delta = np.ones((3, 4))
    delta[1, 2] = bad
    with pytest.raises(InputError, match="w: a model's change has NaN or infinite values"):
        merge(method, np.ones((3, 4)), delta)


@pytest.mark.parametrize("method", METHODS)
def test_stages_before_are_seen(method):
    deltas = [gaussian(12, 8, seed=n) for n in range(2)]
    kept = [merge("dare+sum", d, seed=42 + n) for n, d in enumerate(deltas)]
    expected = merge(method, *kept)
    found = merge(f"dare+{method}", *deltas, seed=42)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_the_report_counts_what_a_stage_leaves():
    _, report = dare.merge_arrays(
        {"w": np.zeros((6, 6), np.float32)},
        [{"w": gaussian(6, 6)}],
        method="dare+star+sum",
        verbose=False,
    )
    assert report.tensors[0].survivors[0][0] < 36
    assert report.tensors[0].survivors[0][1] <= 36


# ---------------------------------------------------------------- memory


@pytest.mark.parametrize(
    ("name", "settings", "in_single"),
    [
        *((name, {}, False) for name in (*DELTA_STAGES, *COMBINE_STAGES, "svc")),
        *((name, {}, True) for name in ("star", "tsv", "iso", "knots", "swudi", "dc_merge", "svc")),
        ("iso", {"variant": "cts"}, False),
    ],
)
@pytest.mark.parametrize("shape", [(300, 300), (150, 500), (500, 150)])
def test_surveys_take_no_more_than_they_say(name, settings, in_single, shape, monkeypatch):
    if in_single:
        monkeypatch.setattr(linalg, "SINGLE_FROM", 16)
    deltas = [gaussian(*shape, seed=n) for n in range(1 if name in DELTA_STAGES else 3)]
    peak, said = surveyed_bytes(name, deltas, **settings)
    assert peak <= said + 100_000
    assert said < 12 * peak  # LAPACK's own memory is not in the peak


@pytest.mark.parametrize(
    ("method", "shapes", "stages"),
    [
        *((method, [(1 << 20,), ()], {}) for method in METHODS),
        (
            "star+fourier+sum",
            [(1000, 1000)],
            {"star": {"singular_share": 1.0}, "fourier": {"radius": 0.0}},
        ),
    ],
)
def test_vectors_and_stages_that_do_nothing_take_no_matrices(method, shapes, stages):
    assert plan(method, shapes, models=3, stages=stages).cost.matrix_bytes == 0


@pytest.mark.parametrize("method", METHODS)
def test_the_plan_knows_the_memory_and_refuses_too_little(method):
    planned = plan(method, [(1000, 2000), (64,)], models=3)
    matrix = 4 * 1000 * 2000
    delta_stages = sum(stage.sees == "matrix" for stage in planned.tensors[0].stages[:-1])
    combines = planned.tensors[0].stages[-1].sees == "matrix"
    assert planned.cost.matrix_bytes == (3 * delta_stages + combines) * matrix
    assert planned.cost.matrix_work >= (4 if combines else 2) * matrix
    threads = planned.cost.threads
    taken = threads * planned.cost.matrix_work + (threads + 1) * planned.cost.matrix_bytes
    assert planned.cost.held_bytes == taken
    enough = planned.cost.least_memory
    assert plan(method, [(1000, 2000)], models=3, max_memory=enough).cost.threads == 1
    with pytest.raises(RecipeError, match=f"at least {-(-enough // 1000) / 1000} MB"):
        plan(method, [(1000, 2000)], models=3, max_memory=enough - 1)


@pytest.mark.parametrize("method", ["fourier+linear", "linear+svc"])
def test_a_merge_takes_about_what_it_asks_for(method):
    """A filter asked for three times that: for the work on all models at once, and twice."""
    shape, models = (900, 1500), 3
    planned = plan(method, [shape] * 2, models=models, threads=1)
    arrays = [{f"w{n}": gaussian(*shape, seed=n + 9 * m) for n in range(2)} for m in range(4)]
    tracemalloc.start()
    dare.merge_arrays(
        arrays[0], arrays[1:], method=method, verbose=False, threads=1,
        max_memory=planned.cost.least_memory,
    )  # fmt: skip
    peak = tracemalloc.get_traced_memory()[1] - 2 * 4 * 900 * 1500
    tracemalloc.stop()
    assert 0.3 * planned.cost.least_memory < peak < planned.cost.least_memory + (1 << 20)


def test_lapack_prints_nothing_where_more_is_wanted_than_a_low_rank_has(capfd):
    matrix = gaussian(600, 8) @ gaussian(8, 620)
    assert linalg.spectrum(matrix, 200).values.size == 8
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    "values",
    [np.linspace(5, 1, 40), np.geomspace(1, 1e-3, 40), np.geomspace(1, 3e-5, 40), np.r_[9.0]],
    ids=["even", "falling", "steep", "one"],
)
def test_roots_are_found_by_products(values):
    left = svd(gaussian(values.size, 50))[0]
    root = linalg.inverse_root_by_products((left * values**2) @ left.T)
    assert relative(root, left / values @ left.T) < 2e-5


@pytest.mark.parametrize("values", [np.zeros(9), np.r_[np.ones(8), 0], np.geomspace(1, 1e-7, 9)])
def test_roots_of_what_is_nearly_singular_are_not_found_by_products(values):
    left = svd(gaussian(9, 20))[0]
    assert linalg.inverse_root_by_products((left * values**2) @ left.T) is None
