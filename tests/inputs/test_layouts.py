"""Layouts: recorded as torch moves the elements, read in any range, and refused by name."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from ranges import DeltaArrays, Ranged

import dare
from dare.errors import InputError, MismatchError
from dare.inputs import layouts
from dare.inputs.arrays import array_source
from dare.inputs.layouts import LayoutSource, find_origin, in_layout_of
from dare.tensors.dtypes import STORAGE_TYPES
from dare.tensors.header import TensorInfo
from helpers import save

torch = pytest.importorskip("torch")

CHAINS = {
    "experts fused": lambda a, b: torch.cat([torch.stack([a, b]), torch.stack([b, a])], dim=1),
    "one expert": lambda a, b: torch.stack([a, b]).chunk(2, dim=1)[1].contiguous()[1],
    "packed": lambda a, b: torch.cat([a, b, a]),
    "columns": lambda a, b: torch.cat([a, b], dim=-1)[:, 5:13],
    "turned": lambda a, b: torch.stack([a, b]).transpose(1, 2).contiguous(),
    "turned back": lambda a, _: a.transpose(0, 1).contiguous().transpose(0, 1),
    "rope": lambda a, _: a.view(2, 3, 2, 8).transpose(1, 2).reshape(12, 8),
    "rope of 28 heads": lambda a, b: _turn_heads(torch.cat([a] * 7 + [b] * 7)),
    "split": lambda a, b: torch.split(torch.cat([a, b]), [5, 19], dim=0)[1],
    "number": lambda a, _: a[3, 2],
}


def _turn_heads(matrix):
    """As for rotary embeddings; the first row of each head stays where it is."""
    return matrix.view(28, 3, 2, 8).transpose(1, 2).reshape(168, 8)


A, B = (torch.arange(96.0).reshape(12, 8) + shift for shift in (0, 1000))


def record(chain):
    """What has become of two tensors."""
    recorder = layouts._recorder()
    tensors = [recorder.make(name, (12, 8)) for name in "ab"]
    with recorder:
        result = chain(*tensors)
    return recorder.pieces(result), tuple(result.shape)


def source_of(pieces, shape):
    arrays = array_source({"a": A.numpy(), "b": B.numpy()}, "model")
    info = TensorInfo("made", STORAGE_TYPES["F32"], shape, 0)
    return LayoutSource(arrays, {}, {"made": (info, pieces)})


@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize("span", [1, 7])
def test_any_range_is_what_torch_has_there(monkeypatch, chain, span):
    monkeypatch.setattr(layouts, "SPAN", span)
    pieces, shape = record(CHAINS[chain])
    expected = CHAINS[chain](A, B).contiguous().numpy()
    ranged = Ranged(source_of(pieces, shape), {"made": expected.tobytes()})
    size = expected.size
    for begin in range(0, size + 1, 13):
        for end in range(begin, size + 1, 29):
            ranged.check("made", begin, end)
    flat = expected.reshape(-1)
    values = {"a": A.numpy().reshape(-1), "b": B.numpy().reshape(-1)}
    for index in range(size):
        name, place = pieces.locate(index)
        assert values[name][place] == flat[index]


def test_only_a_whole_tensor_in_its_order_has_an_origin():
    origins = {chain: find_origin(*_sized(CHAINS[chain])) for chain in CHAINS}
    assert origins.pop("turned back") == "a"
    assert origins.pop("number") is None
    assert set(origins.values()) == {None}


def test_heads_that_are_turned_are_not_taken_for_what_they_were():
    recorder = layouts._recorder()
    whole = recorder.make("a", (168, 8))
    with recorder:
        turned = _turn_heads(whole)
    assert find_origin(recorder.pieces(whole), 1344) == "a"
    assert find_origin(recorder.pieces(turned), 1344) is None


def _sized(chain):
    pieces, shape = record(chain)
    return pieces, int(np.prod(shape))


@pytest.mark.parametrize(
    ("chain", "reason"),
    [
        (lambda a, b: a + b, "may change"),
        (lambda a, _: a.mul_(2), "may change"),
        (lambda a, _: a.expand(2, 12, 8), "may change"),
        (lambda a, _: a.view(torch.int32), "may change"),
        (lambda a, b: torch.stack([a, b[1:]]), "different shapes"),
    ],
)
def test_what_is_no_move_of_elements_is_not_recorded(chain, reason):
    with pytest.raises(ValueError, match=reason):
        record(chain)


# ---------------------------------------------------------------- refused by name

PREFIX = "model.layers.0."
LAYOUTS = {
    "experts": (
        [f"mlp.experts.{n}.{part}.weight" for n in range(2) for part in ("w1", "w2", "w3")],
        ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        r"experts one by one \(model.layers.0.mlp.experts.0.w1.weight\)",
        r"fused \(model.layers.0.mlp.experts.down_proj\)",
    ),
    "attention": (
        [f"self_attn.{part}_proj.weight" for part in "qkv"],
        ["self_attn.qkv_proj.weight"],
        r"queries, keys and values .*\(model.layers.0.self_attn.q_proj.weight\)",
        r"packed \(model.layers.0.self_attn.qkv_proj.weight\)",
    ),
    "projections": (
        ["mlp.gate_proj.weight", "mlp.up_proj.weight"],
        ["mlp.gate_up_proj.weight"],
        "gate and up projections .*",
        "packed",
    ),
}


def model_folder(folder, names, **config):
    arrays = {PREFIX + name: np.ones(2, np.float32) for name in (*names, "norm.weight")}
    save(folder / "model.safetensors", arrays)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("config", [{}, {"model_type": "own"}])
def test_another_layout_is_refused_by_name_whatever_the_recipe_says(
    tmp_path, monkeypatch, kind, config
):
    monkeypatch.setitem(sys.modules, "transformers", None)
    apart, packed, one, other = LAYOUTS[kind]
    remedy = "needs transformers 5" if config else "model_type"
    for number, (base, model) in enumerate(((apart, packed), (packed, apart))):
        recipe = dare.Request.of(
            base=model_folder(tmp_path / f"base{number}", base, **config),
            models=[model_folder(tmp_path / f"math{number}", model, **config)],
            output=tmp_path / "out",
            on_missing="base",
            on_extra="drop",
            verbose=False,
        )
        with pytest.raises(MismatchError, match=f"{remedy}.*save both") as caught:
            dare.merge(recipe)
        assert caught.match(f"base stores {one}.*{other}" if not number else one.split()[0])
        assert not (tmp_path / "out").exists()


def test_exchanged_dimensions_of_experts_are_refused_by_name():
    name = "mlp.experts.gate_up_proj"
    base, model = (array_source({name: np.ones(shape)}, "x") for shape in ((2, 3, 4), (2, 4, 3)))
    with pytest.raises(MismatchError, match=rf"math: {name} is 2×3×4 in the base and 2×4×3 here"):
        in_layout_of(base, model, "math", Path("base"), {})
    other = array_source({name: np.ones((2, 4, 5))}, "x")
    assert in_layout_of(base, other, "math", Path("base"), {}) == (other, ())


def test_names_that_fit_are_not_asked_about(monkeypatch):
    monkeypatch.setattr(layouts, "_present", None)
    one = array_source({"a": np.ones(2), "b": np.ones(2)}, "base")
    for names in (["a"], ["a", "b"], ["a", "b", "c"]):
        model = array_source({name: np.ones(2) for name in names}, "model")
        assert in_layout_of(one, model, "math", Path("base"), {"model_type": "x"}) == (model, ())


def test_an_adapter_that_nobody_knows_is_refused_for_the_architecture(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    base = array_source({"a": np.ones(2)}, "base")
    adapter = DeltaArrays({"b": (STORAGE_TYPES["F32"], (2,), np.ones(2, np.float32))})
    with pytest.raises(InputError, match=r"'own' needs transformers 5.*merge the adapter"):
        in_layout_of(base, adapter, "math", Path("base"), {"model_type": "own"})
    assert in_layout_of(base, adapter, "math", Path("base"), {}) == (adapter, ())
