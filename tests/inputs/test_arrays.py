"""Arrays of every kind that a caller may hold: taken by their values, or refused by name."""

import ml_dtypes
import numpy as np
import pytest
import torch

import dare
from dare.darex import analytic_q, find_q_by_outputs
from dare.errors import InputError
from dare.studies.candidates import Candidates
from helpers import save

BASE = np.array([[1, 2, 3], [4, 5, 6]], np.float32)
TUNED = np.array([[1.5, 2, 2], [4, 5.25, 7]], np.float32)
COMPLEX = torch.complex(torch.ones(3), torch.tensor([1.0, 2.0, 3.0]))


def merged(base, tuned, **settings):
    return dare.merge_arrays(
        {"w": base}, [{"w": tuned}], **{"method": "sum", "verbose": False, **settings}
    )[0]["w"]


# ---------------------------------------------------------------- taken by their values


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8"])
@pytest.mark.parametrize(("left", "right"), [("<", ">"), (">", "<"), (">", ">")])
def test_bytes_in_either_order_are_the_same_numbers(dtype, left, right):
    found = merged(BASE.astype(left + dtype), TUNED.astype(right + dtype), scale=2)
    assert found.dtype == np.dtype(dtype)
    np.testing.assert_array_equal(found, 2 * TUNED - BASE)


def test_every_function_of_arrays_takes_the_other_order():
    swapped = {"w": TUNED.astype(">f4")}
    plain = {"w": TUNED}
    signs = dare.ties_elect_sign([plain])
    assert dare.detect_delta_sparsity(swapped) == dare.detect_delta_sparsity(plain)
    for function in (
        lambda vector: dare.dare_drop(vector, 0.5, seed=1),
        lambda vector: dare.ties_trim(vector, 0.5),
        lambda vector: dare.ties_elect_sign([vector]),
        lambda vector: dare.ties_disjoint_merge([vector], signs),
        lambda vector: dare.dare_sparsify({"w": BASE}, vector, 0),
    ):
        np.testing.assert_array_equal(function(swapped)["w"], function(plain)["w"])
    analyses = [dare.DARESparsityAnalyzer().analyze({"w": BASE}, v) for v in (swapped, plain)]
    assert analyses[0].magnitude_stats == analyses[1].magnitude_stats
    assert analytic_q(swapped["w"], np.ones(3, ">f8"), 0.9) == analytic_q(TUNED, np.ones(3), 0.9)


@pytest.mark.parametrize(
    "given",
    [
        np.asfortranarray(TUNED),
        np.repeat(TUNED, 2, axis=1)[:, ::2],
        TUNED[::-1, ::-1].copy()[::-1, ::-1],
        TUNED.view(np.matrix),
        np.frombuffer(TUNED.tobytes(), np.float32).reshape(2, 3),
        torch.from_numpy(TUNED.T.copy()).t(),
        torch.nn.Parameter(torch.from_numpy(TUNED.copy())),
        torch.from_numpy(TUNED.copy()).requires_grad_() * 1,
        torch._neg_view(torch.from_numpy(-TUNED)),
        torch.complex(torch.zeros(2, 3), torch.from_numpy(-TUNED)).conj().imag,
    ],
)
def test_an_array_is_read_by_its_values_however_it_lies_in_memory(given):
    np.testing.assert_array_equal(merged(BASE, given), TUNED)
    delta = dare.dare_drop({"w": given}, drop_rate=0)["w"]
    np.testing.assert_array_equal(np.asarray(delta), TUNED)


def test_a_view_of_opposite_sign_is_another_tensor():
    # c.imag and conj(c).imag begin at one address with the same strides.
    base, tuned = ({"a": c.imag, "b": torch.conj(c).imag} for c in (COMPLEX, 2 * COMPLEX))
    found, _ = dare.merge_arrays(base, [tuned], method="sum", verbose=False)
    assert found["a"].tolist() == [2, 4, 6]
    assert found["b"].tolist() == [-2, -4, -6]


def test_two_types_over_one_piece_of_memory_are_two_tensors():
    bits = torch.tensor([0x3F80, 0x3F00], dtype=torch.int16)
    model = {"a": bits.view(torch.bfloat16), "b": bits.view(torch.float16)}
    shared = torch.zeros(2)
    found, _ = dare.merge_arrays({"a": shared, "b": shared}, [model], method="sum", verbose=False)
    assert found["a"].tolist() == [1.0, 0.5]
    assert found["b"].tolist() == [1.875, 1.75]


def test_a_complex_buffer_is_copied_by_its_values():
    base = {"w": torch.ones(2), "freqs": COMPLEX.conj()}
    model = {"w": torch.ones(2), "freqs": torch.complex(COMPLEX.real, -COMPLEX.imag)}
    found, _ = dare.merge_arrays(base, [model], method="sum", verbose=False)
    assert torch.equal(found["freqs"], model["freqs"])


# ---------------------------------------------------------------- modules


class Small(torch.nn.Module):
    def __init__(self, value):
        super().__init__()
        self.embed = torch.nn.Embedding(3, 2)
        self.lm_head = torch.nn.Linear(2, 3, bias=False)
        self.lm_head.weight = self.embed.weight
        torch.nn.init.constant_(self.embed.weight, value)


def test_a_module_is_its_state_dict():
    base, tuned = Small(1.0), Small(3.0)
    found, _ = dare.merge_arrays(base, [tuned], method="sum", scale=0.5, verbose=False)
    assert isinstance(found, dict)
    assert set(found) == {"embed.weight", "lm_head.weight"}
    assert all(tensor.unique().tolist() == [2.0] for tensor in found.values())
    assert dare.analyze_arrays(base, [tuned]).model("model 0").total.norm == 48**0.5
    assert dare.DARESparsityAnalyzer().analyze(base, tuned).total_parameters == 12
    assert dare.dare_sparsify(base, tuned, 0)["embed.weight"].unique().tolist() == [3.0]
    assert dare.detect_delta_sparsity(tuned) == 0
    assert dare.ties_trim(tuned, 0.5).keys() == dare.ties_elect_sign([tuned, base]).keys()


def test_one_module_is_not_a_list_of_models():
    with pytest.raises(dare.RecipeError, match="list"):
        dare.merge_arrays(Small(1.0), Small(2.0))


@pytest.mark.parametrize("given", [None, [BASE], BASE, "base.safetensors"])
def test_what_is_neither_dict_nor_module_is_refused(given):
    with pytest.raises(InputError, match=r"base.*dict"):
        dare.merge_arrays(given, [{"w": BASE}])
    with pytest.raises(InputError, match=r"model 0.*dict"):
        dare.merge_arrays({"w": BASE}, [given])


# ---------------------------------------------------------------- refused by name


def dense():
    return torch.from_numpy(BASE.copy())


UNPLAIN = {
    "object": lambda: np.array([[1.0, 2, 3], [4, 5, 6]], object),
    "complex128": lambda: BASE.astype(complex),
    "structured": lambda: np.zeros((2, 3), [("re", "f4"), ("im", ">f4")]),
    "text": lambda: np.array([["a", "b", "c"], ["d", "e", "f"]]),
    "dates": lambda: np.zeros((2, 3), "M8[s]"),
    "longdouble": lambda: BASE.astype(np.longdouble),
    "int4": lambda: BASE.astype(ml_dtypes.int4),
    "masked": lambda: np.ma.masked_array(BASE, mask=BASE > 5),
    "meta": lambda: dense().to("meta"),
    "sparse": lambda: dense().to_sparse(),
    "csr": lambda: dense().to_sparse_csr(),
    "quantised": lambda: torch.quantize_per_tensor(dense(), 0.1, 0, torch.qint8),
    "nested": lambda: torch.nested.nested_tensor(list(dense())),
    "jagged": lambda: torch.nested.nested_tensor(list(dense()), layout=torch.jagged),
    "list": BASE.tolist,
    "number": lambda: 3.0,
    "nothing": lambda: None,
}


@pytest.mark.filterwarnings("ignore")  # of torch, on making some of them
@pytest.mark.parametrize("kind", UNPLAIN)
def test_arrays_that_are_not_plain_are_refused_by_name(kind):
    given = {"odd": UNPLAIN[kind]()}
    plain = {"odd": BASE}
    analyzer = dare.DARESparsityAnalyzer()
    takes_lists = () if kind == "list" else (lambda: analyzer.analyze(plain, given),)
    for function in (
        lambda: dare.merge_arrays(given, [plain]),
        lambda: dare.merge_arrays(plain, [given]),
        lambda: dare.analyze_arrays(plain, [given]),
        lambda: dare.dare_sparsify(plain, given),
        lambda: dare.dare_drop(given),
        lambda: dare.ties_trim(given),
        lambda: dare.ties_elect_sign([plain, given]),
        lambda: dare.ties_disjoint_merge([given], plain),
        lambda: dare.detect_delta_sparsity(given),
        *takes_lists,
    ):
        with pytest.raises(InputError, match="odd"):
            function()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", [k for k in UNPLAIN if k not in ("list", "number")])
def test_a_formula_takes_the_same_arrays(kind):
    with pytest.raises(InputError):
        analytic_q(UNPLAIN[kind](), np.ones(3), 0.9)
    with pytest.raises(InputError):
        find_q_by_outputs(lambda _q, _seed: UNPLAIN[kind](), BASE, 0.9)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "given",
    [
        BASE.astype(">f4"),
        np.ma.masked_array(BASE),
        torch._neg_view(torch.from_numpy(-BASE)),
        torch.from_numpy(BASE).to_sparse(),
        torch.from_numpy(BASE).to("meta"),
    ],
)
def test_what_would_be_changed_in_a_copy_is_not_changed(tmp_path, given):
    files = [save(tmp_path / f"{n}.safetensors", {"w": a}) for n, a in enumerate((BASE, TUNED))]
    delta = tmp_path / "w.delta.safetensors"
    dare.compress(*files, delta, lossless=True, verbose=False)
    with pytest.raises(InputError, match="w: "):
        dare.load_delta(delta).apply_({"w": given})
    recipe = dare.Request.of(base=files[0], models=files[1:], method="sum", verbose=False)
    with pytest.raises(InputError, match="w: "):
        Candidates(recipe).write_into({"w": given})
