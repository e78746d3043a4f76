"""NVFP4 as ModelOpt and compressed-tensors store it: one product in float32 for each element."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ranges import PLACES, Ranged

from dare.errors import InputError
from dare.inputs.arrays import array_source
from dare.inputs.quantised import read_quantised
from helpers import read_tensor

E4M3 = ml_dtypes.float8_e4m3fn
ENDINGS = {"ModelOpt": ("", "_scale", "_scale_2"), "ct": ("_packed", "_scale", "_global_scale")}


def packed(kind, rows=(5,), groups=3, number=0.37, seed=0):
    """Any codes and scales, with NaN among the scales."""
    generator = np.random.default_rng(seed)
    codes = generator.integers(0, 256, (*rows, groups * 8), np.uint8)
    scales = generator.integers(0, 256, (*rows, groups), np.uint8).view(E4M3)
    parts = codes, scales, np.array([number], np.float32)
    return {f"l.weight{end}": part for end, part in zip(ENDINGS[kind], parts, strict=True)}


def presented(arrays):
    source = read_quantised(array_source(arrays, "x"), {})
    info = source.tensors["l.weight"]
    assert info.dtype.name == "F32"
    return np.frombuffer(read_tensor(source, "l.weight"), np.float32).reshape(info.shape)


def test_values_computed_by_hand():
    codes = np.zeros((2, 8), np.uint8)
    codes[0, 0], codes[1, 7] = 0x21, 0xF7  # 0.5 and 1; 6 and −6
    scales = np.array([[2], [448]], E4M3)
    for kind, number in (("ModelOpt", 0.25), ("ct", 4)):
        parts = codes, scales, np.array([number], np.float32)
        names = [f"l.weight{end}" for end in ENDINGS[kind]]
        found = presented(dict(zip(names, parts, strict=True)))
        assert found.shape == (2, 16)
        assert found[0, :3].tolist() == [0.25, 0.5, 0]
        assert found[1, 13:].tolist() == [0, 672, -672]


@pytest.mark.parametrize("kind", ENDINGS)
@pytest.mark.parametrize("rows", [(5,), (2, 3), (40_000,)])
def test_every_element_is_one_product_of_a_code_and_a_factor(kind, rows):
    arrays = packed(kind, rows)
    codes, scales, number = arrays.values()
    nibbles = np.stack([codes & 15, codes >> 4], -1).reshape(*rows, -1).view(np.uint8)
    values = nibbles.view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    with np.errstate(invalid="ignore"):
        factors = scales.astype(np.float32)
        factors = factors / number if kind == "ct" else factors * number
        expected = values * np.repeat(factors, 16, -1)
    assert np.array_equal(presented(arrays), expected, equal_nan=True)
    assert np.array_equal(np.signbit(presented(arrays)), np.signbit(np.nan_to_num(expected)))


@given(st.sampled_from(sorted(ENDINGS)), PLACES, PLACES)
def test_any_range_is_the_same_part_of_the_whole(kind, one, other):
    source = read_quantised(array_source(packed(kind), "x"), {})
    Ranged(source, {"l.weight": read_tensor(source, "l.weight")}).check("l.weight", one, other)


def test_scales_are_hidden_also_those_of_activations_and_of_fp8_beside_it():
    one = np.ones(1, np.float32)
    beside = {
        **{"l.input_scale": one, "l.input_global_scale": one, "norm": one},
        **{"m.weight": np.ones((2, 2), E4M3), "m.weight_scale": one, "m.input_scale": one},
    }
    for kind in ENDINGS:
        source = read_quantised(array_source({**packed(kind), **beside}, "x"), {})
        shapes = {name: info.shape for name, info in source.tensors.items()}
        assert shapes == {"l.weight": (5, 48), "norm": (1,), "m.weight": (2, 2)}
        codes = [remark.code for remark in source.remarks]
        assert codes == ["dequantised", "dequantised", "not_weights"]


@pytest.mark.parametrize("kind", ENDINGS)
@pytest.mark.parametrize("part", [0, 1, 2])
def test_what_does_not_fit_is_refused(kind, part):
    arrays = packed(kind)
    names = list(arrays)
    cut = {**arrays, names[part]: arrays[names[part]][:0]}
    with pytest.raises(InputError, match=r"expected an F8_E4M3 scale for each 16"):
        presented(cut)
    del cut[names[part]]
    with pytest.raises(InputError, match=r"quantised"):
        presented(cut)


def test_other_types_and_two_of_a_name_are_refused():
    arrays = packed("ct")
    with pytest.raises(InputError, match=r"expected an F8_E4M3 scale"):
        presented({**arrays, "l.weight_scale": arrays["l.weight_scale"].astype(np.float32)})
    with pytest.raises(InputError, match=r"has both l.weight and l.weight_packed; remove"):
        presented({**arrays, "l.weight": np.ones(3, np.float32)})
