"""The interface of the published descriptions, on NumPy arrays, torch tensors and files."""

import math

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

import dare
from dare import (
    DareConfig,
    DareMerger,
    DareWarning,
    InputError,
    RecipeError,
    dare_drop,
    dare_merge,
    dare_slerp_merge,
    dare_sparsify,
    dare_ties_merge,
    detect_delta_sparsity,
    keep_mask,
    ties_disjoint_merge,
    ties_elect_sign,
    ties_trim,
)
from helpers import save

SIZE = 100_000

# Of the small dicts here: their changes are large, and some are there twice.
pytestmark = pytest.mark.filterwarnings(r"ignore:model \d. :dare.DareWarning")


def vector(*values):
    return {"w": np.array(values, np.float32)}


# ---------------------------------------------------------------- dare_sparsify and dare_drop


def test_no_value_for_a_setting_is_refused():
    base, model = vector(0, 0), vector(1, 1)
    for call in (
        lambda: dare_sparsify(base, model, drop_rate=None),
        lambda: dare_drop(model, drop_rate=None),
        lambda: dare_ties_merge([model], base, drop_rate=None),
        lambda: dare_slerp_merge(model, model, base, drop_rate=None),
        lambda: dare_merge("base", ["model"], "out", drop_rate=None),
        lambda: DareMerger("base", ["model"], DareConfig(drop_rate=None)).merge("out"),
    ):
        with pytest.raises(RecipeError, match="drop_rate = None"):
            call()
    with pytest.raises(RecipeError, match="t = None"):
        dare_slerp_merge(model, model, base, t=None)


def test_the_expectation_is_the_delta_and_the_variance_p_over_1_minus_p():
    # Over 100,000 elements of δ = 1 the mean has deviation √(p/(1-p)/n); five of them are allowed.
    p = 0.9
    dropped = dare_drop({"w": np.ones(SIZE, np.float32)}, drop_rate=p, seed=3)["w"]
    deviation = math.sqrt(p / (1 - p) / SIZE)
    assert abs(dropped.mean(dtype=np.float64) - 1) <= 5 * deviation
    # (δ̂ - 1)² is 81 with probability 0.1 and 1 with 0.9: mean 9, deviation √(9·64)... per element
    squares = (dropped.astype(np.float64) - 1) ** 2
    spread = math.sqrt((0.1 * 81**2 + 0.9 - 81) / SIZE)
    assert abs(squares.mean() - p / (1 - p)) <= 5 * spread


def test_without_rescale_the_expectation_shrinks_and_that_is_loud():
    with pytest.warns(DareWarning, match="rescale = false"):
        dropped = dare_drop({"w": np.ones(SIZE, np.float32)}, 0.9, seed=3, rescale=False)["w"]
    deviation = math.sqrt(0.9 * 0.1 / SIZE)
    assert abs(dropped.mean(dtype=np.float64) - 0.1) <= 5 * deviation


def test_without_a_seed_the_mask_is_different_every_time():
    ones = vector(*np.ones(1000))
    assert dare_drop(ones)["w"].tobytes() != dare_drop(ones)["w"].tobytes()


def test_what_is_no_array_is_refused():
    with pytest.raises(InputError, match="w"):
        dare_drop({"w": [1.0, 2.0]})
    with pytest.raises(InputError, match=r"w.*complex128"):
        dare_drop({"w": np.ones(1, np.complex128)})


# ---------------------------------------------------------------- TIES pieces


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_the_pieces_of_ties_by_hand(library):
    def vectors(*rows):
        if library == "numpy":
            return [vector(*row) for row in rows]
        torch = pytest.importorskip("torch")
        return [{"w": torch.tensor(row, dtype=torch.bfloat16)} for row in rows]

    (counted,) = vectors((0, 0, 1, -3, 0, 2, 4, 0))  # what is not zero counts
    assert ties_trim(counted, keep_ratio=0.5)["w"].tolist() == [0, 0, 0, -3, 0, 0, 4, 0]
    signs = ties_elect_sign(vectors((3.0, 1, 0, 1), (-1, -2, 0, -1)))  # of the sum
    assert signs["w"].tolist() == [1, -1, 0, 0]
    three = vectors((3.0, 1, 5), (1, -2, 0), (-1, -4, 0))
    merged = ties_disjoint_merge(three, ties_elect_sign(three))["w"]  # the mean of those that agree
    assert (merged.dtype, merged.tolist()) == (three[0]["w"].dtype, [2, -3, 5])


def test_pieces_that_do_not_fit_are_refused():
    with pytest.raises(dare.MismatchError, match=r"w: .*\b\d F\d\d, \d F\d\d$"):
        ties_elect_sign([vector(1), vector(1, 2)])
    with pytest.raises(InputError, match=r"^w: "):
        ties_disjoint_merge([vector(1)], {})
    with pytest.raises(RecipeError, match=r"^weights: 2"):
        dare.merge_arrays(vector(1), [vector(2)], weights=[1, 2])


# ---------------------------------------------------------------- combined, over dicts


def test_dare_ties_trims_among_survivors():
    base = {"w": np.zeros(1000, np.float32)}
    model = {"w": np.arange(1, 1001, dtype=np.float32)}
    found = dare_ties_merge([model], base, drop_rate=0.9, density=0.2)["w"]
    survivors = int(keep_mask("w", 1000, 0.9, 42).sum())
    assert np.count_nonzero(found) == int(0.2 * survivors)


def test_dare_slerp_of_dicts_ends_at_the_models():
    base = {"w": np.array([1.0, 2.0, 3.0], np.float32)}
    first, second = vector(1.5, 1.0, 3.0), vector(0.5, 2.0, 4.0)
    for t, end in ((0.0, first), (1.0, second)):
        found = dare_slerp_merge(first, second, base, drop_rate=0.0, t=t)
        assert found["w"].tolist() == end["w"].tolist()


# ---------------------------------------------------------------- sparsity of a delta


def test_sparsity_is_the_share_under_a_hundredth_of_the_largest(capsys):
    delta = {"a": np.array([100, 0.5, -0.5], np.float32), "b": np.array([-2, 0.99], np.float32)}
    assert detect_delta_sparsity(delta) == 3 / 5
    printed = capsys.readouterr().out
    assert all(figure in printed for figure in ("60.0%", "100.000000", "20.798000", "44.279499"))
    assert "outlier" not in printed
    assert detect_delta_sparsity(delta, verbose=False) == 3 / 5
    assert capsys.readouterr() == ("", "")


def test_one_outlier_decides_the_sparsity_and_not_the_advice(capsys):
    delta = np.random.default_rng(0).normal(0, 1e-3, 100_000).astype(np.float32)
    largest = np.abs(delta).max()
    plain = detect_delta_sparsity({"w": delta}, verbose=False)
    delta[7] = 1e4
    assert detect_delta_sparsity({"w": delta}) == 99_999 / 100_000  # as it is defined
    printed = capsys.readouterr().out
    assert "1 outlier decides" in printed
    assert f"{plain:.1%}" in printed
    assert f"{largest:.4f}" in printed
    assert "lower drop rate" not in printed


def test_elements_that_are_not_finite_are_reported_and_not_counted():
    with pytest.warns(DareWarning, match="2 of 6"):
        assert detect_delta_sparsity(vector(100, 0.5, np.nan, 0, -np.inf, 2)) == 2 / 4
    with pytest.raises(InputError, match="all 2"):
        detect_delta_sparsity(vector(np.nan, np.inf))


# ---------------------------------------------------------------- files


@pytest.mark.parametrize(
    ("settings", "kind", "w", "b"),
    [
        ({}, ml_dtypes.bfloat16, [1.5, 3.0], [0.5] * 3),
        ({"merge_method": "ties"}, ml_dtypes.bfloat16, [1.5, 3.0], [1.0] * 3),
        ({"lambda_coeff": 0.5, "dtype": "float32"}, np.float32, [1.25, 2.5], [0.25] * 3),
    ],
)
def test_dare_merge_counts_a_missing_tensor_as_unchanged(tmp_path, settings, kind, w, b):
    base, model = vector(1.0, 2.0) | {"b": np.zeros(3, np.float32)}, vector(1.5, 3.0)
    models = {"base": base, "m0": model, "m1": {**model, "b": np.ones(3, np.float32)}}
    first, *others = [save(tmp_path / f"{n}.safetensors", each) for n, each in models.items()]
    output = tmp_path / "out.safetensors"
    with pytest.warns(DareWarning) as caught:
        dare_merge(first, others, output, drop_rate=0.0, **settings)
    assert any("b: Not in m0" in str(warning.message) for warning in caught)
    merged = load_file(output)
    assert merged["w"].dtype == kind
    assert (merged["w"].tolist(), merged["b"].tolist()) == (w, b)


# ---------------------------------------------------------------- empty arrays


@pytest.mark.parametrize("shape", [(0,), (0, 4), (4, 0)])
@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_empty_arrays_go_through_every_function(library, shape):
    if library == "torch":
        torch = pytest.importorskip("torch")
        arrays = {"w": torch.zeros(shape, dtype=torch.bfloat16), "v": torch.ones(3)}
    else:
        arrays = {"w": np.zeros(shape, ml_dtypes.bfloat16), "v": np.ones(3, np.float32)}
    elected = ties_elect_sign([arrays, arrays])
    for result in (
        dare.merge_arrays(arrays, [arrays, arrays], method="dare+linear", verbose=False)[0],
        dare_sparsify(arrays, arrays),
        dare_drop(arrays),
        dare_slerp_merge(arrays, arrays, arrays),
        dare_ties_merge([arrays, arrays], arrays),
        ties_trim(arrays),
        elected,
        ties_disjoint_merge([arrays, arrays], elected),
    ):
        assert tuple(result["w"].shape) == shape
        assert result["w"].dtype == arrays["w"].dtype
    assert detect_delta_sparsity(arrays) == 0


# ---------------------------------------------------------------- torch


@pytest.mark.filterwarnings("ignore:.*float64")
@pytest.mark.parametrize(
    "dtype", ["float32", "float64", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"]
)
def test_torch_tensors_come_back_as_torch_tensors_with_numpys_bits(dtype):
    torch = pytest.importorskip("torch")
    base = torch.linspace(-2, 2, 999).reshape(3, 333).to(getattr(torch, dtype))
    model = (base.to(torch.float32) * 1.5).to(getattr(torch, dtype))
    found = dare_sparsify({"w": base}, {"w": model}, drop_rate=0.5, seed=1)["w"]
    assert (found.dtype, found.shape, found.device) == (base.dtype, base.shape, base.device)
    as_numpy = dare_sparsify({"w": numpy_of(base)}, {"w": numpy_of(model)}, drop_rate=0.5, seed=1)
    assert found.view(torch.uint8).numpy().tobytes() == as_numpy["w"].tobytes()


def numpy_of(tensor):
    import torch

    name = str(tensor.dtype).removeprefix("torch.")
    dtype = getattr(ml_dtypes, name) if hasattr(ml_dtypes, name) else np.dtype(name)
    return tensor.view(torch.uint8).numpy().view(dtype)


def test_torch_tensors_that_need_gradients_or_are_not_contiguous_are_read():
    torch = pytest.importorskip("torch")
    base = torch.zeros(4, 3, requires_grad=True)
    model = torch.arange(12.0).reshape(3, 4).T
    found = dare_sparsify({"w": base}, {"w": model}, drop_rate=0.0)["w"]
    assert found.tolist() == model.tolist()
