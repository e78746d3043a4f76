from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dare.planning import parts
from dare.planning.parts import MAX_PARTS, MIN_PART_BYTES, PART_BYTES, cut, part_at, part_of
from dare.tensors.chunks import CHUNK, chunk_count
from dare.tensors.dtypes import STORAGE_TYPES
from dare.tensors.header import TensorInfo

MIB = 1 << 20


def place(header: int, sizes: list[tuple[str, int]]) -> list[TensorInfo]:
    placed, start = [], header
    for number, (kind, elements) in enumerate(sizes):
        placed.append(TensorInfo(str(number), STORAGE_TYPES[kind], (elements,), start))
        start += placed[-1].nbytes
    return placed


TENSORS = st.lists(
    st.tuples(
        st.sampled_from(["F64", "F32", "BF16", "F8_E4M3", "BOOL"]), st.integers(0, 40 * CHUNK)
    )
)


@given(header=st.integers(8, 12 * MIB), sizes=TENSORS)
def test_parts_are_whole_chunks_that_make_up_the_file(header, sizes):
    tensors = place(header, sizes)
    found = cut(header, tensors)
    size = header + sum(info.nbytes for info in tensors)
    assert [part.number for part in found] == list(range(1, len(found) + 1))
    ends = [0, *(part.start + part.nbytes for part in found)]
    assert [part.start for part in found] == ends[:-1]
    assert ends[-1] == size
    assert sum(part.chunks for part in found) == sum(chunk_count(i.elements) for i in tensors)
    assert found[0].nbytes >= header
    for info in tensors:
        for chunk in range(chunk_count(info.elements)):
            part = part_of(found, info, chunk)
            last = min((chunk + 1) * CHUNK, info.elements) - 1
            assert part_at(found, info.position(last)) == part
            assert part.start <= info.position(chunk * CHUNK)
            assert info.position(last + 1) <= part.start + part.nbytes


@given(header=st.integers(8, 12 * MIB), sizes=TENSORS)
def test_parts_are_as_large_as_a_store_wants_and_no_larger_than_memory_allows(header, sizes):
    tensors = place(header, sizes)
    first, *others = cut(header, tensors)
    for part in [first, *others][:-1]:
        assert part.nbytes >= MIN_PART_BYTES
    assert first.nbytes < max(header, MIN_PART_BYTES) + 8 * CHUNK
    for part in others[:-1]:
        assert PART_BYTES <= part.nbytes < PART_BYTES + 8 * CHUNK
    assert all(part.nbytes < PART_BYTES + 8 * CHUNK for part in others)


def test_a_file_of_a_terabyte_has_few_enough_parts(monkeypatch):
    monkeypatch.setattr(parts, "MAX_PARTS", 100)  # of a hundredth of it
    tensors = place(4096, [("BF16", 10_000 * CHUNK)])
    found = cut(4096, tensors)
    assert len(found) <= 100
    assert max(part.nbytes for part in found) <= 2 * min(part.nbytes for part in found[1:-1])
    assert parts.part_bytes(1 << 40) * (MAX_PARTS - 2) >= 1 << 40


def test_a_file_without_tensors_is_one_part():
    assert [(part.nbytes, part.chunks) for part in cut(4096, [])] == [(4096, 0)]


def test_hand_counted_parts():
    tensors = place(4096, [("F32", 2 * CHUNK), ("F32", 12 * CHUNK + 1), ("F32", 1)])
    assert [(p.start, p.nbytes, p.chunks) for p in cut(4096, tensors)] == [
        (0, 4096 + 6 * MIB, 3),
        (4096 + 6 * MIB, 16 * MIB, 8),
        (4096 + 22 * MIB, 6 * MIB + 8, 5),
    ]


def test_little_is_held_of_a_little_output():
    assert parts.held_bytes([1000, 24], 1 << 21) == 2048
    most = (parts.HELD_PARTS + parts.UPLOADS) * (PART_BYTES + (1 << 21))
    assert parts.held_bytes([1 << 34, 5], 1 << 21) == most < 250 * MIB
    assert parts.held_bytes([], 1) == 0
