"""Every tensor of every input passes one gate: a name that can be written, a type that is known."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

import dare
from dare.errors import InputError
from dare.inputs.arrays import array_source
from dare.inputs.gguf import GgufSource
from dare.inputs.lora import CONFIG_NAME, WEIGHTS_NAME, open_adapter
from dare.inputs.torch_bin import TorchSource

ONES = np.ones((2, 2), np.float32)


def adapter(folder, tensors):
    rank = next((v.shape[0] for name, v in tensors.items() if "_A" in name and v.ndim), 1)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 1}
    (folder / CONFIG_NAME).write_text(json.dumps(config))
    save_file(tensors, folder / WEIGHTS_NAME)
    return open_adapter(folder)


def of_arrays(_folder, name):
    return array_source({name: ONES}, "base")


def of_torch(folder, name):
    torch = pytest.importorskip("torch")
    torch.save({name: torch.ones(2), "w": torch.ones(2)}, folder / "m.pt")
    return TorchSource(folder / "m.pt")


def of_gguf(folder, name):
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(folder / "m.gguf", "unheard-of")
    writer.add_tensor(name, ONES)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GgufSource(folder / "m.gguf")


def of_lora(folder, name):
    return adapter(folder, {f"base_model.model.{name}": ONES})


@pytest.mark.parametrize("opened", [of_arrays, of_torch, of_gguf, of_lora])
def test_no_tensor_is_called_metadata(tmp_path, opened):
    with pytest.raises(InputError, match="a tensor is called __metadata__"):
        opened(tmp_path, "__metadata__")
    assert opened(tmp_path, "x").tensors["x"]


@pytest.mark.parametrize("name", ["half \ud800", 3, None])
def test_names_are_text(name):
    with pytest.raises(InputError, match=r"is not valid Unicode|is not text; rename it"):
        dare.merge_arrays({name: ONES}, [{name: ONES}])


PAIR = {"m.lora_A.weight": np.ones((1, 2), np.float32), "m.lora_B.weight": ONES[:, :1].copy()}


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("m.lora_A.x.weight", "m.lora_A.y.weight"),
        ("m.lora_A.weight", "base_model.model.m.lora_A.weight"),
        ("m.modules_to_save.x.weight", "m.modules_to_save.y.weight"),
        ("n.weight", "base_model.model.n.weight"),
        ("n.base_layer.weight", "n.weight"),
    ],
)
def test_two_tensors_of_an_adapter_for_one_are_refused(tmp_path, first, second):
    arrays = {first: PAIR["m.lora_A.weight"], second: PAIR["m.lora_A.weight"] + 1}
    with pytest.raises(InputError, match="are for the same tensor") as error:
        adapter(tmp_path, {"m.lora_B.weight": PAIR["m.lora_B.weight"], **arrays})
    assert first in str(error.value)
    assert second in str(error.value)


def test_a_layer_that_is_an_embedding_too_is_refused(tmp_path):
    embedding = {"m.lora_embedding_A": ONES[:1].copy(), "m.lora_embedding_B": ONES[:, :1].copy()}
    with pytest.raises(InputError, match=r"m\.weight .*twice"):
        adapter(tmp_path, PAIR | embedding)


@pytest.mark.parametrize("letter", "AB")
@pytest.mark.parametrize("kind", [np.uint8, np.bool_, np.int8, np.int64, np.uint16])
def test_factors_that_are_no_weights_are_refused(tmp_path, kind, letter):
    name = f"m.lora_{letter}.weight"
    with pytest.raises(InputError, match="types: F64, F32"):
        adapter(tmp_path, {**PAIR, name: PAIR[name].astype(kind)})


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"m.lora_A.weight": np.array(1, np.float32)}, "is a single number"),
        ({"m.lora_A.bias": np.ones(2, np.float32)}, "is not a known kind"),
        (
            {"m.lora_A.weight": np.ones((0, 2), np.float32),
             "m.lora_B.weight": np.ones((2, 0), np.float32)},
            "lora_A is 0×2, lora_B 2×0",
        ),
    ],
)  # fmt: skip
def test_factors_of_impossible_shapes_are_refused(tmp_path, changed, message):
    with pytest.raises(InputError, match=message):
        adapter(tmp_path, PAIR | changed)
