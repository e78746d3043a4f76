"""Numbers as people read them can be read back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dare.documents import words


@given(st.floats(1e-12, 1e6))
def test_a_share_can_be_read_back_to_three_digits(value):
    text = words.share(value)
    assert float(text.removesuffix("%").replace(",", "")) / 100 == pytest.approx(value, rel=0.006)


@given(st.integers(0, 10**14))
def test_an_amount_is_short_and_right(value):
    text = words.amount(value)
    assert len(text) <= 5 or value >= 10**15
    units = {"k": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
    number = float(text.rstrip("kMBT")) * units.get(text[-1], 1)
    assert number == pytest.approx(value, rel=0.006)
