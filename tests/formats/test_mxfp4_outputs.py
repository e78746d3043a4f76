"""MXFP4 outputs: every value that was MXFP4 comes back, and others are rounded to the nearest."""

import ml_dtypes
import numpy as np
import pytest
from encoding import decoded, encoded
from hypothesis import given
from hypothesis import strategies as st

from dare.errors import NotFiniteError
from dare.formats.quantised import Mxfp4

NAME = "layers.0.mlp.experts.down_proj"
BF16 = ml_dtypes.bfloat16
CODES = np.float32([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def column(values):
    """One expert with one output, whose first inputs are given."""
    room = np.zeros((1, 32, 1), BF16)
    room[0, : len(values), 0] = values
    return room


def test_values_computed_by_hand():
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


def test_what_is_not_finite_is_refused():
    with pytest.raises(NotFiniteError, match=r"down_proj: .* not finite.*leave format out"):
        encoded(Mxfp4(), column([np.inf]), NAME)
