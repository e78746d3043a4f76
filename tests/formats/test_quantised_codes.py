"""FP8 and MXFP4 outputs: fresh scales, codes and values that come back, others near to them."""

import ml_dtypes
import numpy as np
import pytest
from encoding import code_of, decoded, encoded
from hypothesis import assume, given
from hypothesis import strategies as st

from dare.errors import NotFiniteError
from dare.formats import quantised
from dare.formats.quantised import Fp8, Mxfp4

E4M3, E5M2, E8M0 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.float8_e8m0fnu
BF16 = ml_dtypes.bfloat16
GRIDS = {  # shapes of scales for a weight of so many rows and columns
    "one": lambda rows, columns: (),
    "row": lambda rows, columns: (rows,),
    "rows": lambda rows, columns: (rows, 1),
    "block": lambda rows, columns: (-(-rows // 128), -(-columns // 128)),
}
SCALE_TYPES = {"F32": np.float32, "BF16": ml_dtypes.bfloat16, "F16": np.float16, "F8_E8M0": E8M0}


def fp8_code(shape, grid="one", scale=np.float32, weight=E4M3, ending="_scale_inv"):
    arrays = {
        "l.weight": np.ones(shape, weight),
        f"l.weight{ending}": np.ones(GRIDS[grid](*shape), scale),
    }
    return Fp8(code_of(arrays), scale is E8M0)


def numbers(shape, seed=0, spread=2.0):
    generator = np.random.default_rng(seed)
    size = np.exp2(generator.normal(scale=spread, size=shape))
    return (generator.normal(size=shape) * size).astype(np.float32)


def test_fp8_values_computed_by_hand():
    # The largest is 3.5 = 448/128, so the scale is 1/128; 0.3·128 = 38.4 lies between 36 and 40.
    loss, stored = encoded(fp8_code((2, 3), "row"), np.float32([[3.5, -0.3, 0], [0, 0, -0.0]]))
    assert {name: array.dtype for name, array in stored.items()} == {
        "l.weight": E4M3,
        "l.weight_scale_inv": np.float32,
    }
    assert stored["l.weight_scale_inv"].tolist() == [1 / 128, 1]
    assert stored["l.weight"].astype(np.float32).tolist() == [[448, -40, 0], [0, 0, 0]]
    assert np.signbit(stored["l.weight"].astype(np.float32)).tolist() == [[0, 1, 0], [0, 0, 1]]
    assert loss.largest == pytest.approx(40 / 128 - 0.3, rel=1e-6)
    assert loss.error == pytest.approx((40 / 128 - 0.3) / np.hypot(3.5, 0.3), rel=1e-6)


def test_a_power_of_two_is_rounded_up_whatever_holds_it():
    values = np.float32([[448, 1], [449, 1]])
    _, stored = encoded(fp8_code((2, 2), "rows", E8M0), values)
    assert stored["l.weight_scale_inv"].astype(np.float32).tolist() == [[1], [2]]
    arrays = {"l.weight": np.ones((2, 2), E4M3), "l.weight_scale": np.ones((2, 1), np.float32)}
    _, stored = encoded(Fp8(code_of(arrays), powers_of_two=True), values)
    assert stored["l.weight_scale"].tolist() == [[1], [2]]


@given(
    st.tuples(st.integers(1, 300), st.integers(1, 300)),
    st.sampled_from(sorted(GRIDS)),
    st.sampled_from(sorted(SCALE_TYPES)),
    st.sampled_from([E4M3, E5M2]),
    st.integers(0, 99),
)
def test_values_are_near_and_storing_them_again_changes_nothing(shape, grid, scale, weight, seed):
    assume((scale, weight) != ("F16", E5M2))  # F16 is too coarse for such small scales
    values = numbers(shape, seed)
    code = fp8_code(shape, grid, SCALE_TYPES[scale], weight)
    loss, stored = encoded(code, values)
    read = decoded(stored)
    half = np.exp2(-4 if weight is E4M3 else -3)
    smallest = float(ml_dtypes.finfo(weight).smallest_subnormal)
    steps = np.max(stored["l.weight_scale_inv"].astype(np.float32)) * smallest
    assert np.all(np.abs(read - values) <= np.abs(values) * half * 1.01 + steps / 2)
    assert loss.largest == np.abs(read.astype(np.float64) - values).max()
    assert loss.error == pytest.approx(
        np.linalg.norm(read.astype(np.float64) - values) / np.linalg.norm(values.astype(np.float64))
    )
    again = encoded(code, read)[1]
    assert decoded(again).tobytes() == read.tobytes()
    if scale != "F8_E8M0":  # what is rounded down to 224 gets half the scale
        assert all(again[name].tobytes() == stored[name].tobytes() for name in stored)


@given(st.sampled_from(sorted(GRIDS)), st.sampled_from(sorted(SCALE_TYPES)), st.integers(0, 99))
def test_codes_under_usual_scales_come_back(grid, scale, seed):
    """Each block has the largest code, as with a scale that was made by the largest magnitude."""
    generator = np.random.default_rng(seed)
    codes = generator.integers(0, 0x7F, (150, 140), np.uint8)
    codes[:, 0] = codes[:, 128] = 0x7E
    codes |= generator.integers(0, 2, codes.shape, np.uint8) << 7
    factors = np.exp2(generator.uniform(-12, -4, GRIDS[grid](*codes.shape)))
    factors = np.asarray(factors, np.float32).astype(SCALE_TYPES[scale])
    before = {"l.weight": codes.view(E4M3), "l.weight_scale_inv": factors}
    read = decoded(before)
    _, stored = encoded(Fp8(code_of(before), scale == "F8_E8M0"), read)
    assert stored["l.weight"].tobytes() == codes.tobytes()
    if scale == "F32":  # 448 · scale is rounded, so the last bit may be lost
        np.testing.assert_array_max_ulp(stored["l.weight_scale_inv"], factors, maxulp=1)
        np.testing.assert_allclose(decoded(stored), read, rtol=2**-22)
    else:
        assert stored["l.weight_scale_inv"].tobytes() == factors.tobytes()


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("piece", [97, 1000])
def test_bytes_and_loss_do_not_depend_on_the_pieces(monkeypatch, grid, piece):
    values = numbers((140, 150))
    code = fp8_code(values.shape, grid)
    whole, expected = encoded(code, values)
    monkeypatch.setattr(quantised, "PIECE_ELEMENTS", piece)
    loss, stored = encoded(code, values)
    assert (loss.error, loss.largest) == (pytest.approx(whole.error, rel=1e-9), whole.largest)
    assert {n: a.tobytes() for n, a in stored.items()} == {
        n: a.tobytes() for n, a in expected.items()
    }


def test_more_rows_than_the_base_has_get_scales_of_their_own():
    for grid, shape in (("one", ()), ("row", (300,)), ("rows", (300, 1)), ("block", (3, 2))):
        _, stored = encoded(fp8_code((140, 150), grid), numbers((300, 150)))
        assert stored["l.weight_scale_inv"].shape == shape
        np.testing.assert_allclose(decoded(stored), numbers((300, 150)), rtol=0.07, atol=1e-2)


def test_tiny_and_huge_numbers_have_scales_that_hold_them():
    values = np.float32([[1e-45, 0], [3e38, -3e38], [2e-12, 1e-12], [1e9, 1]])
    for scale in SCALE_TYPES.values():
        if scale is np.float16:
            with pytest.raises(NotFiniteError, match=r"l\.weight: .*too large"):
                encoded(fp8_code((4, 2), "row", scale), values)
            values = np.clip(values, -448 * 65504, 448 * 65504)
        stored = encoded(fp8_code((4, 2), "row", scale), values)[1]
        assert np.isfinite(stored["l.weight"].astype(np.float32)).all()
        assert (stored["l.weight_scale_inv"].astype(np.float32) > 0).all()


def test_a_tensor_of_any_rank_and_an_empty_one():
    arrays = {"l.weight": np.ones((2, 3, 4), E4M3), "l.weight_scale": np.ones(1, np.float32)}
    values = numbers((2, 3, 4))
    _, stored = encoded(Fp8(code_of(arrays), powers_of_two=False), values)
    assert stored["l.weight_scale"].tolist() == [np.abs(values).max() / np.float32(448)]
    loss, stored = encoded(fp8_code((0, 5)), np.empty((0, 5), np.float32))
    assert (loss.error, stored["l.weight_scale_inv"].tolist()) == (0, 1)


# ---------------------------------------------------------------- MXFP4

NAME = "layers.0.mlp.experts.down_proj"
CODES = np.float32([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def column(values):
    """One expert with one output, whose first inputs are given."""
    room = np.zeros((1, 32, 1), BF16)
    room[0, : len(values), 0] = values
    return room


def test_mxfp4_values_computed_by_hand():
    # 6 is the largest code under 1, 6.5 under 2 only; ties go to the even code.
    values = [6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, -5]
    loss, stored = encoded(Mxfp4(), column(values), NAME)
    assert {name: array.shape for name, array in stored.items()} == {
        f"{NAME}_blocks": (1, 1, 1, 16),
        f"{NAME}_scales": (1, 1, 1),
    }
    assert stored[f"{NAME}_scales"].tolist() == [[[127]]]
    assert stored[f"{NAME}_blocks"][0, 0, 0, :5].tolist() == [0x07, 0x22, 0x44, 0x66, 0x0E]
    assert loss.largest == 1
    assert encoded(Mxfp4(), column([6.5]), NAME)[1][f"{NAME}_scales"].tolist() == [[[128]]]
    assert encoded(Mxfp4(), column([]), NAME)[1][f"{NAME}_scales"].tolist() == [[[0]]]


@given(st.tuples(*[st.integers(1, 3)] * 3), st.integers(0, 255), st.integers(0, 99))
def test_what_was_mxfp4_has_the_same_values(shape, scale, seed):
    """Codes of any kind under scales of any size, but those that overflow BF16."""
    generator = np.random.default_rng(seed)
    before = {
        f"{NAME}_blocks": generator.integers(0, 256, (*shape, 16), np.uint8),
        f"{NAME}_scales": np.minimum(generator.integers(scale, scale + 9, shape), 252).astype("u1"),
    }
    read = decoded(before, NAME)
    loss, stored = encoded(Mxfp4(), read, NAME)
    assert decoded(stored, NAME).tobytes() == read.tobytes()
    assert (loss.error, loss.largest) == (0, 0)
    groups = before[f"{NAME}_blocks"] & 0x77  # the usual scale has a 4 or a 6 among its codes
    usual = ((groups >= 0x60) | (groups & 7 >= 6)).any(axis=-1)
    for name in stored:
        assert np.array_equal(stored[name][usual], before[name][usual])


@given(st.integers(-130, 120), st.integers(0, 99))
def test_others_are_rounded_to_the_nearest_value_of_their_group(exponent, seed):
    generator = np.random.default_rng(seed)
    values = np.ldexp(generator.normal(size=(2, 64, 5)), exponent).astype(BF16)
    loss, stored = encoded(Mxfp4(), values, NAME)
    read = decoded(stored, NAME).astype(np.float64)
    scales = np.exp2(stored[f"{NAME}_scales"].astype(np.float64) - 127)
    scales = np.repeat(scales, 32, axis=2).swapaxes(1, 2)
    known = np.concatenate([CODES, -CODES])
    distances = np.abs(values.astype(np.float64)[..., None] - scales[..., None] * known)
    assert np.array_equal(np.abs(read - values.astype(np.float64)), distances.min(axis=-1))
    assert loss.largest == distances.min(axis=-1).max()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_is_refused(bad):
    with pytest.raises(NotFiniteError, match=r"l\.weight: .* not finite.*leave format out"):
        encoded(fp8_code((1, 2)), np.float32([[1, bad]]))
    with pytest.raises(NotFiniteError, match=r"down_proj: .* not finite.*leave format out"):
        encoded(Mxfp4(), column([bad]), NAME)
