"""SmolLM2 in GGUF: what is read is what transformers loads, bit for bit."""

import functools
import struct

import gguf
import numpy as np
import pytest
import torch
from training import smollm2_gguf
from transformers import AutoModelForCausalLM

from dare.inputs.gguf import GgufSource


class ReaderWithoutArrays(gguf.GGUFReader):
    """Passes over the vocabulary: objects of 150,000 tokens take many seconds to make."""

    def _get_field_parts(self, orig_offs, raw_type):
        if raw_type != 9:
            return super()._get_field_parts(orig_offs, raw_type)
        kind, count = struct.unpack_from("<IQ", self.data, orig_offs)
        end = orig_offs + 12
        for _ in range(count):
            if kind == 8:
                end += 8 + struct.unpack_from("<Q", self.data, end)[0]
            else:
                end += self.gguf_scalar_to_np[kind]().itemsize
        return end - orig_offs, [], [], []


def test_smollm2_is_bit_for_bit_what_transformers_loads():
    file = smollm2_gguf()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf, "GGUFReader", functools.cache(ReaderWithoutArrays))
        patch.setattr(gguf, "get_tensor_name_map", functools.cache(gguf.get_tensor_name_map))
        model = AutoModelForCausalLM.from_pretrained(
            str(file.parent), gguf_file=file.name, dtype=torch.float32, local_files_only=True
        )
    loaded = model.state_dict()
    with GgufSource(file) as source:
        assert set(source.tensors) == set(loaded) - {"lm_head.weight"}  # tied
        assert source.remarks == ()
        for name, info in source.tensors.items():
            read = np.empty(info.elements, info.dtype.carrier)
            source.read(name, 0, read)
            assert info.shape == loaded[name].shape
            assert read.tobytes() == loaded[name].numpy().tobytes(), name
