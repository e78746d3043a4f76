"""Sizes in bytes: read as people write them, shown as they read them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dare.documents.words import show_size
from dare.recipe.entries import parse_size
from dare.recipe.recipe import Request


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (4096, 4096),
        ("4096", 4096),
        ("4096B", 4096),
        ("1KiB", 1024),
        ("1kb", 1000),
        ("1K", 1024),
        ("1.5 MiB", 1_572_864),
        ("5GB", 5_000_000_000),
        ("2GiB", 2_147_483_648),
        ("2G", 2_147_483_648),
        (" 1 TiB ", 1_099_511_627_776),
    ],
)
def test_a_size_is_read(text, size):
    assert parse_size(text) == size
    assert Request.of(base="b", models="m", max_memory=text).options.max_memory == size


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "1e9", "1,5GB", "1 GB GB", "1PB", "infinity"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ValueError, match=r"^not a size; write 1073741824, '1GiB' or '5GB'$"):
        parse_size(text)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 bytes"),
        (999, "999 bytes"),
        (1000, "1.0 kB"),
        (13_344, "13.3 kB"),
        (999_900, "999.9 kB"),
        (1_000_000, "1.0 MB"),
        (999_900_000, "999.9 MB"),
        (1_000_000_000, "1.00 GB"),
        (14_500_000_000, "14.50 GB"),
        (1_000_000_000_000, "1.00 TB"),
        (5_000_000_000_000_000, "5000.00 TB"),
        (1, "1 byte"),
        (999_960, "1.0 MB"),  # the unit it is rounded to
        (999_960_000, "1.00 GB"),
    ],
)
def test_a_size_is_shown(size, text):
    assert show_size(size) == text


@given(st.integers(0, 10**15))
def test_what_is_shown_can_be_read_and_is_about_the_same(size):
    found = parse_size(show_size(size).replace(" bytes", "").replace(" byte", ""))
    assert isinstance(found, int)
    assert abs(found - size) <= 0.05 * size
