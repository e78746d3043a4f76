"""The mask: its specification, its rates and its independence.

Statistical tests use five standard deviations: a right implementation fails one of them with
probability 6e-7 over the choice of seed. Seeds are fixed, so a run never flickers.
"""

import math
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dare import RecipeError, keep_mask
from dare.tensors.mask import keep_threshold, mask_key, philox4x32

PAGE = (Path(__file__).parents[2] / "docs" / "mask.md").read_text("utf-8")
SIGMAS = 5
PI = ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0")
ZERO = ("00000000 00000000 00000000 00000000", "00000000 00000000")
ONES = ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff")


def words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


def assert_fraction(found: int, size: int, probability: float) -> None:
    deviation = math.sqrt(size * probability * (1 - probability))
    assert abs(found - size * probability) <= SIGMAS * deviation


@pytest.mark.parametrize(
    ("rounds", "given_words", "expected"),
    [  # from kat_vectors of Random123
        (7, ZERO, "5f6fb709 0d893f64 4f121f81 4f730a48"),
        (7, ONES, "5207ddc2 45165e59 4d8ee751 8c52f662"),
        (7, PI, "4dfccaba 190a87f0 c47362ba b6b5242a"),
        (10, ZERO, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        (10, ONES, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (10, PI, "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_philox_gives_the_published_answers_and_the_page_has_them(rounds, given_words, expected):
    counter = tuple(np.array([word], np.uint64) for word in words(given_words[0]))
    key = tuple(words(given_words[1]))
    assert [int(word[0]) for word in philox4x32(counter, key, rounds)] == words(expected)
    row = f"| `{given_words[0]}` | `{given_words[1]}` | `{expected}` |"
    assert row in PAGE or rounds == 10


def test_the_pages_masks_are_the_ones_we_draw():
    rows = re.findall(
        r"\| `(\S+)` \| (\d+) \| ([\d.]+) \| (\d+) \| `(\w+ \w+)` \| `(\w+)` \| `(\w+)` \|", PAGE
    )
    assert len(rows) == 5
    for name, seed, rate, start, key, threshold, mask in rows:
        assert mask_key(int(seed), name) == tuple(words(key))
        assert keep_threshold(float(rate)) == int(threshold, 16)
        drawn = keep_mask(name, 64, float(rate), int(seed), int(start))
        assert np.packbits(drawn, bitorder="little").tobytes().hex() == mask


def test_the_pages_extreme_rates_are_the_ones_we_draw():
    assert np.flatnonzero(keep_mask("w", 4096, 0.999, 0)).tolist() == [1643, 2371, 2477, 3311, 3886]
    dropped = np.flatnonzero(~keep_mask("w", 65536, 0.0001, 0)).tolist()
    assert dropped == [4922, 5717, 10717, 21842, 29146, 33323, 41256, 43869]


@given(st.floats(0, 1, exclude_max=True))
def test_the_threshold_is_exact(rate):
    assert abs(keep_threshold(rate) / 2**40 - (1 - rate)) <= 2**-41


@pytest.mark.parametrize("rate", [0.0001, 0.003, 0.1, 0.5, 0.9, 0.95, 0.99, 0.996, 0.999, 0.9999])
def test_the_realised_rate_is_the_rate_asked_for(rate):
    size = 1 << 21
    assert_fraction(int(keep_mask("a", size, rate, 1).sum()), size, 1 - rate)


def test_ties_are_broken_at_the_right_rate():
    # 1 - p = (25 + 1/8) / 256: a lane of 25 is a tie, and one in eight of them is kept.
    size = 1 << 21
    lanes_below = keep_mask("a", size, 1 - 25 / 256, 1)
    with_ties = keep_mask("a", size, 1 - 25.125 / 256, 1)
    assert not (lanes_below & ~with_ties).any()
    assert_fraction(int((with_ties & ~lanes_below).sum()), size, 1 / 8 / 256)


def test_nothing_is_dropped_at_zero_and_all_but_everything_just_below_one():
    assert keep_mask("a", 1000, 0.0, 3).all()
    assert not keep_mask("a", 1000, math.nextafter(1.0, 0.0), 3).any()


@pytest.mark.parametrize(
    ("rate", "name", "seed"),
    [
        (0.5, "w", 43),
        (0.9, "w", 43),
        *((0.9, name, 42) for name in ("w2", "W", "w ", "layers.1.w")),
    ],
)
def test_two_models_and_two_tensors_overlap_by_chance_only(rate, name, seed):
    size = 1 << 21
    first, second = keep_mask("w", size, rate, 42), keep_mask(name, size, rate, seed)
    assert_fraction(int((first & second).sum()), size, (1 - rate) ** 2)


def test_neighbours_are_independent():
    size, keep = 1 << 18, 0.3
    # A pair shares each element with another pair, so its variance is larger than a binomial's.
    variance = size * (keep**2 * (1 - keep**2) + 2 * (keep**3 - keep**4))
    for distance in range(1, 65):
        mask = keep_mask("w", size + distance, 1 - keep, 5)
        both = mask[:size] & mask[distance:]
        assert abs(int(both.sum()) - size * keep**2) <= SIGMAS * math.sqrt(variance), distance


def test_every_lane_of_a_group_has_the_rate():
    lanes = keep_mask("w", 1 << 21, 0.9, 11).reshape(-1, 128)
    for kept in lanes.sum(axis=0):
        assert_fraction(int(kept), len(lanes), 0.1)


@given(st.integers(0, 2**48), st.integers(0, 300), st.integers(0, 300))
def test_a_part_of_the_mask_is_the_mask_of_the_part(start, skip, size):
    whole = keep_mask("t", skip + size, 0.8, 9, start)
    assert (keep_mask("t", size, 0.8, 9, start + skip) == whole[skip:]).all()


@pytest.mark.parametrize("rate", [1.0, 1, 1.5, -0.1, math.nan, math.inf])
def test_a_rate_outside_the_range_is_refused(rate):
    with pytest.raises(RecipeError, match="drop_rate"):
        keep_mask("w", 10, rate, 0)
    for size, start in ((-1, 0), (1, -1)):
        with pytest.raises(RecipeError, match="negative"):
            keep_mask("w", size, 0.5, 0, start)


def test_the_keys_of_later_draws_are_those_of_the_page():
    rows = re.findall(r"^\| `(\S+)` \| (\d+) \| (\d+) \| `(\w{8}) (\w{8})` \|$", PAGE, re.MULTILINE)
    assert len(rows) == 2
    for name, seed, draw, *words in rows:
        assert [f"{word:08x}" for word in mask_key(int(seed), name, int(draw))] == words
