from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ranges import PLACES, Ranged

from dare.errors import InputError
from dare.inputs.quantised import PIECE_BYTES, Fp8Source, apply_fp8_scales, read_quantised
from dare.inputs.sources import ArraySource, FileSource, check_unchanged, open_source
from dare.tensors.dtypes import STORAGE_TYPES
from helpers import entry, file_bytes, read_tensor

E4M3, E5M2 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2
TYPES = {
    np.dtype(E4M3): "F8_E4M3",
    np.dtype(E5M2): "F8_E5M2",
    np.dtype(ml_dtypes.bfloat16): "BF16",
    np.dtype(ml_dtypes.float8_e8m0fnu): "F8_E8M0",
    np.dtype(np.float16): "F16",
    np.dtype(np.float32): "F32",
    np.dtype(np.int8): "I8",
    np.dtype(np.uint8): "U8",
    np.dtype(np.int32): "I32",
}


def source_of(arrays) -> ArraySource:
    return ArraySource(
        {
            name: (
                STORAGE_TYPES[TYPES[array.dtype]],
                array.shape,
                np.ascontiguousarray(array).reshape(-1).view(np.uint8),
            )
            for name, array in arrays.items()
        }
    )


def codes(shape, dtype=E4M3, seed=0) -> np.ndarray:
    """Any bytes, so with NaN and infinities among them."""
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8).view(dtype)


def factors(shape, seed=1) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def one_nan(values) -> np.ndarray:
    return np.where(np.isnan(values), np.float32(np.nan), values).astype(np.float32)


def presented(arrays, name="w") -> np.ndarray:
    source = apply_fp8_scales(source_of(arrays))
    info = source.tensors[name]
    assert info.dtype.name == "F32"
    return np.frombuffer(read_tensor(source, name), np.float32).reshape(info.shape)


def assert_same_bits(found, expected):
    assert found.shape == expected.shape
    assert np.array_equal(found.view(np.uint32), one_nan(expected).view(np.uint32))


# ---------------------------------------------------------------- values


def test_values_computed_by_hand():
    # 0x38 is 1, 0x40 is 2, 0xC4 is −3, 0x01 is 2⁻⁹, 0x7E is 448 in E4M3.
    weight = np.array([[0x38, 0x40], [0xC4, 0x01], [0x7E, 0x80]], np.uint8).view(E4M3)
    scale = np.array([0.5, 2, -1], np.float32)
    expected = np.array([[0.5, 1], [-6, 2.0**-8], [-448, 0]], np.float32)
    assert_same_bits(presented({"w": weight, "w_scale": scale}), expected)


def test_a_block_scale_is_for_128_rows_and_columns():
    weight = np.ones((130, 257), E4M3)
    scale = np.array([[1, 2, 3], [4, 5, 6]], np.float32)
    found = presented({"w": weight, "w_scale_inv": scale})
    assert found.shape == (130, 257)
    assert {(r, c): found[r, c] for r in (0, 127, 128, 129) for c in (0, 127, 128, 255, 256)} == {
        (r, c): scale[r // 128, c // 128]
        for r in (0, 127, 128, 129)
        for c in (0, 127, 128, 255, 256)
    }


SAYS = {
    "transformers": lambda size: {"quantization_config": {"weight_block_size": size}},
    "compressed-tensors": lambda size: {
        "text_config": {"compression_config": {"g": {"weights": {"block_structure": size}}}}
    },
}


@pytest.mark.parametrize("says", SAYS.values(), ids=SAYS)
@pytest.mark.parametrize("size", [(200, 200), (1, 128), (64, 300), (130, 256)])
def test_blocks_are_of_the_size_that_the_configuration_says(size, says):
    grid = tuple(-(-side // block) for side, block in zip((256, 256), size, strict=True))
    weight, scale = codes((256, 256)), factors(grid)
    source = read_quantised(source_of({"w": weight, "w_scale_inv": scale}), says(list(size)))
    expanded = np.repeat(np.repeat(scale, size[0], 0), size[1], 1)[:256, :256]
    found = np.frombuffer(read_tensor(source, "w"), np.float32).reshape(256, 256)
    with np.errstate(invalid="ignore"):
        assert_same_bits(found, weight.astype(np.float32) * expanded)


@pytest.mark.parametrize("size", [[128], [0, 128], [128.0, 128], "128", [100, 100]])
@pytest.mark.parametrize("grid", [(2, 2), (256, 1), ()])
def test_scales_that_disagree_with_the_configuration_are_refused(size, grid):
    source = source_of({"w": codes((256, 256)), "w_scale": factors(grid)})
    with pytest.raises(InputError, match=r"weight_block_size"):
        read_quantised(source, SAYS["transformers"](size))
    assert read_quantised(source, SAYS["transformers"](None)).tensors["w"].dtype.name == "F32"


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("ending", ["_scale", "_scale_inv"])
@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (200,), (200, 1), (2, 3)])
def test_every_element_is_one_product_in_float32(dtype, ending, shape):
    weight, scale = codes((200, 300), dtype), factors(shape)
    grid = scale.reshape(-1, 1) if scale.size in (1, 200) else scale
    rows, columns = 200 if grid.shape[0] == 1 else 200 // grid.shape[0], 300
    if shape == (2, 3):
        rows = columns = 128
    expanded = np.repeat(np.repeat(grid, rows, 0), columns, 1)[:200, :300]
    with np.errstate(invalid="ignore"):
        expected = weight.astype(np.float32) * expanded
    assert_same_bits(presented({"w": weight, f"w{ending}": scale}), expected)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e8m0fnu])
def test_a_scale_may_be_of_another_type(dtype):
    weight, scale = codes((2, 3)), np.array([0.25, 4], dtype)
    expected = one_nan(weight.astype(np.float32) * np.array([[0.25], [4]], np.float32))
    assert_same_bits(presented({"w": weight, "w_scale": scale}), expected)


def test_a_weight_of_any_rank_may_have_one_factor():
    weight = codes((2, 3, 4))
    assert_same_bits(
        presented({"w": weight, "w_scale": np.float32([3])}), weight.astype(np.float32) * 3
    )
    scalar = np.array(2, E4M3)
    assert_same_bits(
        presented({"w": scalar, "w_scale": np.float32([3])}), np.float32(6).reshape(())
    )


def test_blocks_are_bit_for_bit_what_transformers_makes_of_them():
    torch = pytest.importorskip("torch")
    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
    weight, scale = codes((256, 384)), factors((2, 3))
    as_torch = torch.from_numpy(weight.view(np.uint8)).view(torch.float8_e4m3fn)
    expected = fp8.Fp8Dequantize(None)._dequantize_one(
        as_torch, torch.from_numpy(scale), torch.float32
    )
    assert_same_bits(presented({"w": weight, "w_scale_inv": scale}), expected.numpy())


# ---------------------------------------------------------------- ranges


RANGED = {
    "block": (codes((130, 300)), factors((2, 3))),
    "row": (codes((70, 11)), factors(70)),
    "one": (codes((3, 5)), factors(())),
}


@pytest.fixture(scope="module")
def ranged():
    arrays = {}
    for name, (weight, scale) in RANGED.items():
        arrays |= {name: weight, f"{name}_scale": scale}
    source = apply_fp8_scales(source_of(arrays))
    return Ranged(source, {name: read_tensor(source, name) for name in RANGED})


@given(st.sampled_from(sorted(RANGED)), PLACES, PLACES)
def test_any_range_is_the_same_part_of_the_whole(ranged, name, one, other):
    ranged.check(name, one, other)


# ---------------------------------------------------------------- what is presented


def test_scales_are_hidden_and_the_rest_is_passed_on():
    norm, table = np.ones(3, np.float32), np.arange(4, dtype=np.int32)
    plain = codes((2, 2), seed=5)
    arrays = {
        "a.weight": codes((2, 3)),
        "a.weight_scale": factors(2),
        "a.input_scale": factors(()),
        "a.input_scale_ub": factors(()),
        "a.k_scale": factors(1),
        "norm.weight": norm,
        "logit_scale": norm,
        "bf16": norm,
        "bf16_scale": norm,
        "plain": plain,
        "table": table,
    }
    source = read_quantised(source_of(arrays), {})
    assert isinstance(source.inner, Fp8Source)
    assert {name: info.dtype.name for name, info in source.tensors.items()} == {
        "a.weight": "F32",
        "norm.weight": "F32",
        "logit_scale": "F32",
        "bf16": "F32",
        "bf16_scale": "F32",
        "plain": "F8_E4M3",
        "table": "I32",
    }
    assert [remark.code for remark in source.remarks] == ["dequantised", "not_weights"]
    assert source.cost.reading_bytes == PIECE_BYTES
    assert read_tensor(source, "norm.weight") == norm.tobytes()
    assert read_tensor(source, "plain") == plain.tobytes()
    assert read_tensor(source, "table") == table.tobytes()


@pytest.mark.parametrize(
    "arrays",
    [
        {"w": np.ones(3, np.float32), "w_scale": np.ones(1, np.float32)},
        {"w": codes((2, 2))},
        {"logit_scale": np.ones(1, np.float32)},
        {"scales": np.zeros(3, np.float32), "ids": np.zeros(3, np.int32)},
    ],
)
def test_a_model_without_scales_is_not_wrapped(arrays):
    source = source_of(arrays)
    assert apply_fp8_scales(source) is source


def test_what_is_said_of_the_source_is_what_the_files_say(tmp_path):
    path = write(tmp_path / "m.safetensors", codes((2, 3)), factors(2))
    source = apply_fp8_scales(open_source(path))
    inner = source.inner
    assert isinstance(inner, FileSource)
    assert source.files == inner.files
    assert not source.is_partial
    assert not source.delta_of("w").is_change
    with source:
        check_unchanged([source])
        found = np.frombuffer(read_tensor(source, "w"), np.float32).reshape(2, 3)
        assert_same_bits(found, codes((2, 3)).astype(np.float32) * factors(2)[:, None])
        path.write_bytes(b"")
        with pytest.raises(InputError, match=r"changed since the merge was planned"):
            check_unchanged([source])


def write(path, weight, scale):
    header = {
        "w": entry(TYPES[weight.dtype], weight.shape, 0, weight.nbytes),
        "w_scale": entry("F32", scale.shape, weight.nbytes, weight.nbytes + scale.nbytes),
    }
    path.write_bytes(file_bytes(header, weight.tobytes() + scale.tobytes()))
    return path


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("weight", "scale", "message"),
    [
        ((4, 6), (6,), r"w_scale is 6 and w is 4×6; expected one scale for each"),
        ((256, 256), (2, 3), r"w_scale is 2×3 and w is 256×256"),
        ((4, 6), (0,), r"w_scale is 0 and w is 4×6"),
        ((2, 4, 6), (2, 4), r"w_scale is 2×4 and w is 2×4×6"),
    ],
)
def test_a_scale_that_fits_nothing_is_refused(weight, scale, message):
    with pytest.raises(InputError, match=message):
        apply_fp8_scales(source_of({"w": codes(weight), "w_scale": np.ones(scale, np.float32)}))


def test_a_scale_that_is_no_number_is_refused():
    with pytest.raises(InputError, match=r"w_scale is U8, not F32"):
        apply_fp8_scales(source_of({"w": codes((4, 6)), "w_scale": np.ones((4, 1), np.uint8)}))


def test_two_scales_of_one_weight_are_refused():
    scale = np.ones(1, np.float32)
    arrays = {"w": codes((4, 6)), "w_scale": scale, "w_scale_inv": scale}
    with pytest.raises(InputError, match=r"w has two scales, w_scale_inv and w_scale; remove"):
        apply_fp8_scales(source_of(arrays))
