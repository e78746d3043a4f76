"""SmolLM2 in GGUF: what is read is what transformers loads, bit for bit."""

import numpy as np
from training import load_gguf, smollm2_gguf

from dare.inputs.gguf import GgufSource


def test_smollm2_is_bit_for_bit_what_transformers_loads():
    file = smollm2_gguf()
    loaded = load_gguf(file).state_dict()
    with GgufSource(file) as source:
        assert set(source.tensors) == set(loaded) - {"lm_head.weight"}  # tied
        assert source.remarks == ()
        for name, info in source.tensors.items():
            read = np.empty(info.elements, info.dtype.carrier)
            source.read(name, 0, read)
            assert info.shape == loaded[name].shape
            assert read.tobytes() == loaded[name].numpy().tobytes(), name
