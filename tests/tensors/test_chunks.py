import pytest

from dare.tensors.chunks import CHUNK, chunk_count, chunk_span, chunk_spans


@pytest.mark.parametrize(
    ("elements", "chunks"), [(0, 0), (1, 1), (CHUNK, 1), (CHUNK + 1, 2), (5 * CHUNK, 5)]
)
def test_chunks_are_counted(elements, chunks):
    assert chunk_count(elements) == chunks


def test_spans_tile_a_tensor():
    elements = 2 * CHUNK + 3
    assert list(chunk_spans(elements)) == [(0, CHUNK), (CHUNK, CHUNK), (2 * CHUNK, 3)]
    assert chunk_span(2, elements) == (2 * CHUNK, 3)
    assert list(chunk_spans(0)) == []
