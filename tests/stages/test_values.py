"""Every stage on numbers small enough to do by hand."""

import numpy as np
import pytest

import dare
from dare import RecipeError, keep_mask

BACKENDS = ["reference", "cpu"]


@pytest.fixture(params=BACKENDS)
def merged(request):
    """Merge deltas onto a base of zeros (or the one given), and return the tensor `w`."""

    def run(method, *deltas, base=None, **settings):
        deltas = [np.array(delta, np.float32) for delta in deltas]
        origin = np.zeros_like(deltas[0]) if base is None else np.array(base, np.float32)
        models = [{"w": origin + delta} for delta in deltas]
        given = {"verbose": False, "allow_not_finite": True, **settings}
        result, _ = dare.merge_arrays(
            {"w": origin}, models, method=method, backend=request.param, **given
        )
        return result["w"].tolist()

    return run


def given(stage, **parameters):
    return {"stages": {stage: parameters}}


@pytest.mark.parametrize(
    ("method", "deltas", "settings", "expected"),
    [
        ("linear", [[2, 4, -6], [4, 0, 2]], {}, [3, 2, -2]),
        # 0.5 · (0.25·8 + 0.75·4) = 2.5
        ("linear", [[8], [4]], {"weights": [0.25, 0.75], "scale": 0.5}, [2.5]),
        ("sum", [[2, 4], [4, -5]], {"base": [1, 1]}, [7, 0]),
        ("sum", [[2], [5]], {"weights": [1, -1]}, [-3]),
        # ⌊0.4 · 5⌋ = 2; of equals the first; at least one
        ("trim+sum", [[1, -5, 3, 2, -4]], given("trim", keep_ratio=0.4), [0, -5, 0, 0, -4]),
        ("trim+sum", [[2, 1, -2, 2, 3]], given("trim", keep_ratio=0.6), [2, 0, -2, 0, 3]),
        ("trim+sum", [[1, 2]], given("trim", keep_ratio=0.1), [0, 2]),
        # element 0: 3 + 1 > 2: mean of 3 and 1; element 1: -4 beats 3; element 2: all agree
        ("ties", [[3, 1, 2], [1, 2, 4], [-2, -4, 6]], {}, [2, -4, 4]),
        ("ties", [[1, 0], [-1, 0]], {}, [0, 0]),  # the sides cancel
        ("ties", [[3], [0], [5]], {}, [4]),  # a zero does not count in the mean
        # 3·1 beats 1·2; its mean is (3·1)/3. Unweighted, 2 would win.
        ("ties", [[1], [-2]], {"weights": [3, 1]}, [1]),
        ("ties", [[2], [6]], {"weights": [1, 3]}, [5]),  # (1·2 + 3·6) / (1 + 3)
        ("ties", [[2], [6]], {"weights": [1, 3], **given("ties", divide_by="count")}, [10]),
        # 2·1 - 1·(-4) = 6 over 2 - 1, not over 2 + 1; of one alone the minus cancels
        ("ties", [[1], [-4]], {"weights": [2, -1], **given("ties", divide_by="signed")}, [6]),
        ("ties", [[1], [0]], {"weights": [-2, 1], **given("ties", divide_by="signed")}, [1]),
        ("ties", [[1], [-4]], {"weights": [1, -1], **given("ties", divide_by="signed")}, [5]),
        # what is kept has the magnitude of all: 15/9 and 12/6
        (
            "trim+sum",
            [[1, -5, 3, 2, -4]],
            given("trim", keep_ratio=0.4, rescale="l1"),
            [0, -5 * np.float32(15 / 9), 0, 0, -4 * np.float32(15 / 9)],
        ),
        (
            "breadcrumbs+sum",
            [[1, -5, 4, 2]],
            given("breadcrumbs", keep_middle=0.5, drop_largest=0.25, rescale="l1"),
            [0, 0, 8, 4],
        ),
        (
            "breadcrumbs+sum",
            [[[1, -5, 4, 2]]],
            given("breadcrumbs", keep_middle=0.5, drop_largest=0.25, rescale="l1", per="row"),
            [[0, 0, 8, 4]],
        ),
        # trimmed to [3, 0] and [0, -4]
        ("ties", [[3, 1], [-2, -4]], given("ties", keep_ratio=0.5), [3, -4]),
    ],
)
def test_by_hand(merged, method, deltas, settings, expected):
    assert merged(method, *deltas, **settings) == expected


# ---------------------------------------------------------------- dare


def test_dare_keeps_what_the_mask_says_and_divides_by_what_is_left(merged):
    delta = np.arange(1, 101, dtype=np.float32)
    keep = keep_mask("w", 100, 0.75, seed=42)
    expected = np.where(keep, delta * 4, 0)
    assert merged("dare+sum", delta, stages={"dare": {"drop_rate": 0.75}}) == expected.tolist()


def test_model_i_uses_seed_plus_i(merged):
    zero, delta = np.zeros(100, np.float32), np.ones(100, np.float32)
    second = merged("dare+sum", zero, delta, stages={"dare": {"drop_rate": 0.5}}, seed=6)
    assert second == (2.0 * keep_mask("w", 100, 0.5, seed=7)).tolist()


def test_dare_can_rescale_to_the_l1_norm(merged):
    delta = np.where(np.arange(32) % 2, 1, -1).astype(np.float32) * np.arange(
        1, 33, dtype=np.float32
    )
    keep = keep_mask("w", 32, 0.5, seed=42)
    factor = float(np.abs(delta).sum()) / float(np.abs(delta[keep]).sum())
    found = merged("dare+sum", delta, stages={"dare": {"drop_rate": 0.5, "rescale": "l1"}})
    assert found == (delta * keep * np.float32(factor)).tolist()
    assert np.abs(found).sum() == pytest.approx(np.abs(delta).sum(), rel=1e-6)


def test_at_rate_zero_dare_is_task_arithmetic(merged):
    generator = np.random.default_rng(0)
    base, *models = generator.standard_normal((4, 1000)).astype(np.float32)
    deltas = [model - base for model in models]
    for rescale in (True, False, "l1"):
        stages = {"dare": {"drop_rate": 0.0, "rescale": rescale}}
        with_dare = merged("dare+linear", *deltas, base=base, stages=stages)
        assert with_dare == merged("linear", *deltas, base=base)


def test_dropped_infinities_and_nans_do_not_spread(merged):
    keep = keep_mask("w", 64, 0.9, seed=42)
    delta = np.where(keep, 1.0, np.where(np.arange(64) % 2, np.inf, np.nan))
    found = merged("dare+sum", delta, stages={"dare": {"drop_rate": 0.9}})
    assert found == (np.float32(1 / (1 - 0.9)) * keep).tolist()


# ---------------------------------------------------------------- trim


def test_trim_after_dare_counts_survivors_only(merged):
    delta = np.arange(1, 1001, dtype=np.float32)
    keep = keep_mask("w", 1000, 0.9, seed=42)
    survivors = delta[keep]
    kept = np.sort(survivors)[-int(0.5 * survivors.size) :]
    stages = {"dare": {"drop_rate": 0.9, "rescale": False}, "trim": {"keep_ratio": 0.5}}
    found = np.array(merged("dare+trim+sum", delta, stages=stages))
    assert found[found != 0].tolist() == kept.tolist()


@pytest.mark.parametrize("size", [1, 7, 100_000, 600_000, 1_200_000])
@pytest.mark.parametrize("max_memory", ["1GiB", "34MiB"])
def test_trim_is_exact_over_many_chunks(size, max_memory):
    # Few distinct magnitudes, so that the cut falls among many equal ones in several blocks.
    generator = np.random.default_rng(size)
    delta = generator.integers(-50, 50, size).astype(np.float32)
    keep = max(1, int(0.3 * size))
    order = np.argsort(-np.abs(delta), kind="stable")[:keep]
    expected = np.zeros_like(delta)
    expected[order] = delta[order]
    found, _ = dare.merge_arrays(
        {"w": np.zeros_like(delta)},
        [{"w": delta}],
        method="trim+sum",
        stages={"trim": {"keep_ratio": 0.3}},
        max_memory=max_memory,
        threads=1,
        verbose=False,
    )
    assert (found["w"] == expected).all()


# ---------------------------------------------------------------- ties


def test_ties_lets_a_nan_through(merged):
    assert np.isnan(merged("ties", [np.nan], [1.0])).all()


# ---------------------------------------------------------------- slerp


def test_slerp_halfway_between_orthogonal_vectors(merged):
    # Ω = 90°: both coefficients are sin 45° / sin 90°
    found = merged("slerp", [1, 0], [0, 1], stages={"slerp": {"on": "deltas"}})
    assert found == pytest.approx([np.sqrt(0.5)] * 2, rel=1e-6)


def test_slerp_acts_on_whole_tensors_by_default(merged):
    # a = (1, 0) and b = (0, 1) are base + delta
    found = merged("slerp", [0.5, -0.5], [-0.5, 0.5], base=[0.5, 0.5])
    assert found == pytest.approx([np.sqrt(0.5)] * 2, rel=1e-6)


@pytest.mark.parametrize("on", ["weights", "deltas"])
def test_slerp_ends_are_the_models(merged, on):
    base, first, second = [1.5, 2.0, -3.0], [0.25, -0.5, 0.125], [-1.0, 0.5, 0.25]
    for t, delta in ((0.0, first), (1.0, second)):
        found = merged("slerp", first, second, base=base, stages={"slerp": {"t": t, "on": on}})
        assert found == [b + d for b, d in zip(base, delta, strict=True)]


@pytest.mark.parametrize("other", [[2.0, 4.0], [-2.0, -4.0], [0.0, 0.0]])
def test_parallel_opposite_and_zero_vectors_are_interpolated_straight(merged, other):
    stages = {"slerp": {"t": 0.25, "on": "deltas"}}
    expected = [0.75 * a + 0.25 * b for a, b in zip([1.0, 2.0], other, strict=True)]
    assert merged("slerp", [1.0, 2.0], other, stages=stages) == expected


# ---------------------------------------------------------------- chains


def test_stages_can_come_in_another_order(merged):
    delta = np.arange(1, 101, dtype=np.float32)
    keep = keep_mask("w", 100, 0.5, seed=42)
    expected = np.where(keep & (delta > 80), 2 * delta, 0)
    stages = {"trim": {"keep_ratio": 0.2}, "dare": {"drop_rate": 0.5}}
    assert merged("trim+dare+sum", delta, stages=stages) == expected.tolist()


def test_a_stage_stands_in_a_chain_once(merged):
    with pytest.raises(RecipeError, match="dare appears in it more than once"):
        merged("dare+dare+sum", [1.0])


def test_a_mask_drawn_after_trimming_counts_what_is_left():
    _, report = dare.merge_arrays(
        {"w": np.zeros(100, np.float32)},
        [{"w": np.arange(1, 101, dtype=np.float32)}],
        method="trim+dare+sum",
        stages={"trim": {"keep_ratio": 0.2}, "dare": {"drop_rate": 0.5}},
        verbose=False,
    )
    left = int(keep_mask("w", 100, 0.5, 42)[80:].sum())
    assert report.tensors[0].survivors == ((20, left),)
