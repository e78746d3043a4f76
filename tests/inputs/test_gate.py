"""Every tensor of every input passes one gate: a name that can be written, a type that is known."""

import numpy as np
import pytest
from writers import write_adapter, write_gguf

import dare
from dare.errors import InputError
from dare.inputs.arrays import array_source
from dare.inputs.gguf import GgufSource
from dare.inputs.lora import open_adapter
from dare.inputs.torch_bin import TorchSource

ONES = np.ones((2, 2), np.float32)


def of_arrays(_folder, name):
    return array_source({name: ONES}, "base")


def of_torch(folder, name):
    torch = pytest.importorskip("torch")
    torch.save({name: torch.ones(2), "w": torch.ones(2)}, folder / "m.pt")
    return TorchSource(folder / "m.pt")


def of_gguf(folder, name):
    pytest.importorskip("gguf")
    return GgufSource(write_gguf(folder / "m.gguf", {name: ONES}))


def of_lora(folder, name):
    return open_adapter(write_adapter(folder, {name: ONES}))


@pytest.mark.parametrize("opened", [of_arrays, of_torch, of_gguf, of_lora])
def test_no_tensor_is_called_metadata(tmp_path, opened):
    with pytest.raises(InputError, match="a tensor is called __metadata__"):
        opened(tmp_path, "__metadata__")
    assert opened(tmp_path, "x").tensors["x"]


@pytest.mark.parametrize("name", ["half \ud800", 3, None])
def test_names_are_text(name):
    with pytest.raises(InputError, match=r"is not valid Unicode|is not text; rename it"):
        dare.merge_arrays({name: ONES}, [{name: ONES}])
