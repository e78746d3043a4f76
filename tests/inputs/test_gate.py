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
    config = {"peft_type": "LORA", "r": 1, "lora_alpha": 1}
    (folder / CONFIG_NAME).write_text(json.dumps(config))
    save_file({f"base_model.model.{name}": ONES}, folder / WEIGHTS_NAME)
    return open_adapter(folder)


@pytest.mark.parametrize("opened", [of_arrays, of_torch, of_gguf, of_lora])
def test_no_tensor_is_called_metadata(tmp_path, opened):
    with pytest.raises(InputError, match="a tensor is called __metadata__"):
        opened(tmp_path, "__metadata__")
    assert opened(tmp_path, "x").tensors["x"]


@pytest.mark.parametrize("name", ["half \ud800", 3, None])
def test_names_are_text(name):
    with pytest.raises(InputError, match=r"is not valid Unicode|is not text; rename it"):
        dare.merge_arrays({name: ONES}, [{name: ONES}])
