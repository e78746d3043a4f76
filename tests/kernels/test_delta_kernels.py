"""The kernels that delta files are made of: both backends alike, and what each one promises."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from dare.kernels import cpu, reference
from dare.tensors.dtypes import STORAGE_TYPES

BOTH = pytest.mark.parametrize("backend", [reference, cpu])
CARRIERS = sorted({kind.carrier for kind in STORAGE_TYPES.values()}, key=str)


def elements(carrier, size):
    width = np.dtype(f"u{carrier.itemsize}")
    return arrays.arrays(width, size).map(lambda a: a.view(carrier))


def lanes(size):
    return arrays.arrays(np.uint8, size, elements=st.sampled_from([0, 255]))


def some_lanes():
    """Lanes of a chunk, and its size: there may be more lanes than elements."""
    sizes = st.integers(0, 200) | st.sampled_from([63, 64, 65, 128])
    return sizes.flatmap(lambda n: st.tuples(lanes(n + n % 3), st.just(n)))


@given(some_lanes(), st.sampled_from(CARRIERS), st.data())
def test_what_is_selected_can_be_put_back(case, carrier, data):
    lane, size = case
    raw, other = data.draw(elements(carrier, size)), data.draw(elements(carrier, size))
    kept = np.flatnonzero(lane[:size])
    for backend in (reference, cpu):
        packed = np.zeros(kept.size, carrier)
        assert backend.select(raw, lane, packed) == kept.size
        assert packed.tobytes() == raw[kept].tobytes()
        into = other.copy()
        assert backend.expand(packed, lane, into) == kept.size
        expected = other.copy()
        expected[kept] = raw[kept]
        assert into.tobytes() == expected.tobytes()


@BOTH
def test_selecting_by_hand(backend):
    lane = np.array([255, 0, 0, 255, 255, 255], np.uint8)  # one more than there are elements
    out = np.full(4, 9, np.uint16)
    assert backend.select(np.array([1, 2, 3, 4, 5], np.uint16), lane, out) == 3
    assert out.tolist() == [1, 4, 5, 9]


@BOTH
@pytest.mark.parametrize("count", [0, 1, 2, 3, 4])
def test_too_few_or_too_many_packed_elements_are_noticed(backend, count):
    lane = np.array([255, 0, 0, 255, 255], np.uint8)
    into = np.zeros(5, np.float32)
    assert backend.expand(np.arange(1, count + 1, dtype=np.float32), lane, into) == 3
    assert into[lane != 0].tolist() == [1, 2, 3][:count] + [0] * (3 - count)
    assert not into[lane == 0].any()
