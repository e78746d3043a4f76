"""Every pattern of every storage type, decoded and encoded as ml_dtypes does."""

import ml_dtypes
import numpy as np
import pytest

from dare import RecipeError
from dare.kernels import load
from dare.tensors.dtypes import STORAGE_TYPES, weight_type

NUMPY = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
}
NARROW = ["F16", "BF16", "F8_E4M3", "F8_E5M2"]


@pytest.fixture(params=["reference", "cpu"])
def kernels(request):
    return load(request.param)


def all_patterns(name):
    kind = STORAGE_TYPES[name]
    codes = np.arange(256**kind.itemsize, dtype=np.uint32)
    return codes.astype(f"u{kind.itemsize}").view(kind.carrier)


def decoded(kernels, raw):
    out = np.empty(raw.size, np.float32)
    kernels.decode(raw, out)
    return out


def encoded(kernels, values, name):
    out = np.empty(values.size, STORAGE_TYPES[name].carrier)
    kernels.encode(values, out)
    return out


def bits(array):
    return array.view(f"u{array.itemsize}")


@pytest.mark.parametrize("name", NARROW)
def test_all_patterns_decode_as_in_ml_dtypes_and_survive(kernels, name):
    raw = all_patterns(name)
    with np.errstate(invalid="ignore"):  # signalling NaNs
        expected = raw.view(NUMPY[name]).astype(np.float32)
    found = decoded(kernels, raw)
    numbers = ~np.isnan(expected)
    assert (bits(found)[numbers] == bits(expected)[numbers]).all()
    assert np.isnan(found[~numbers]).all()
    assert (encoded(kernels, found, name)[numbers] == raw[numbers]).all()


@pytest.mark.parametrize("name", NARROW)
def test_rounding_is_to_nearest_even_at_and_around_every_midpoint(kernels, name):
    values = np.unique(decoded(kernels, all_patterns(name)))
    values = values[np.isfinite(values)].astype(np.float64)
    beyond = values[-1] + (values[-1] - values[-2])
    values = np.concatenate(([-beyond], values, [beyond]))
    middles = ((values[:-1] + values[1:]) / 2).astype(np.float32)  # exact: float32 has the bits
    tested = np.concatenate(
        [
            middles,
            np.nextafter(middles, np.float32(-np.inf)),
            np.nextafter(middles, np.float32(np.inf)),
        ]
    )
    with np.errstate(over="ignore", invalid="ignore"):
        expected = tested.astype(NUMPY[name])
    numbers = ~np.isnan(expected.astype(np.float32))
    found = encoded(kernels, tested, name)
    assert (bits(found)[numbers] == bits(expected)[numbers]).all()
    assert np.isnan(decoded(kernels, found)[~numbers]).all()


def test_every_upper_half_of_a_float32_rounds_to_bfloat16_as_in_ml_dtypes(kernels):
    upper = np.arange(65536, dtype=np.uint32) << 16
    for lower in (0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
        values = (upper | np.uint32(lower)).view(np.float32)
        numbers = ~np.isnan(values)
        with np.errstate(over="ignore"):
            expected = values[numbers].astype(ml_dtypes.bfloat16)
        assert (encoded(kernels, values, "BF16")[numbers] == bits(expected)).all()


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("F64", 0x7FF8000000000000),
        ("F32", 0x7FC00000),
        ("F16", 0x7E00),
        ("BF16", 0x7FC0),
        ("F8_E4M3", 0x7F),
        ("F8_E5M2", 0x7E),
    ],
)
def test_any_nan_becomes_the_positive_quiet_one(kernels, name, code):
    nans = np.array([0x7FC00000, 0xFFC00000, 0x7F800001, 0xFFFFFFFF], np.uint32).view(np.float32)
    assert (bits(encoded(kernels, nans, name)) == code).all()


@pytest.mark.parametrize("name", NUMPY)
def test_the_overflow_limit_is_the_smallest_magnitude_that_becomes_infinite_or_nan(kernels, name):
    limit = STORAGE_TYPES[name].overflow_bits
    values = np.array([limit, limit - 1], np.uint32).view(np.float32)
    raw = encoded(kernels, values, name)
    finite = np.isfinite(raw.view(NUMPY[name]).astype(np.float64))
    assert finite.tolist() == [False, True]


def test_float64_is_rounded_once(kernels):
    values = np.array([1 + 2.0**-24, 1 + 2.0**-24 + 2.0**-50, -0.0, 1e300, 1e-46])
    expected = np.array([1.0, 1 + 2.0**-23, -0.0, np.inf, 0.0], np.float32)
    assert (bits(decoded(kernels, values)) == bits(expected)).all()


def test_carriers_tell_the_weight_types_apart():
    carriers = [kind.carrier for kind in STORAGE_TYPES.values() if kind.is_weight]
    assert len(set(carriers)) == len(carriers) == 6


def test_types_are_found_by_the_names_people_use():
    names = {"bfloat16": "BF16", "torch.bfloat16": "BF16", "bf16": "BF16", "float16": "F16"}
    names |= {"F32": "F32", "float8_e4m3fn": "F8_E4M3"}
    assert {name: weight_type(name).name for name in names} == names
    for name, match in (("bfloat1", "did you mean 'bfloat16'"), ("I64", "not a weight type")):
        with pytest.raises(RecipeError, match=match):
            weight_type(name)


@pytest.mark.parametrize("name", NUMPY)
def test_the_table_agrees_with_ml_dtypes(name):
    kind = STORAGE_TYPES[name]
    assert kind.numpy_type == NUMPY[name]
    assert kind.mantissa_bits == ml_dtypes.finfo(NUMPY[name]).nmant
    assert weight_type(kind.torch_name) is kind
