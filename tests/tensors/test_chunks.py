from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import xxhash

from dare.inputs.sources import open_source
from dare.tensors.chunks import (
    CHUNK,
    bytes_digest,
    chunk_count,
    chunk_span,
    chunk_spans,
    model_digest,
    tensor_digest,
)
from dare.tensors.dtypes import STORAGE_TYPES
from dare.tensors.header import TensorInfo
from helpers import flip_bit, read_tensor, save, save_shards

W, V = (TensorInfo(name, STORAGE_TYPES["F32"], (2, 3), 0) for name in "wv")


def digest_of(path) -> str:
    with open_source(path) as source:
        digests = []
        for name, info in source.tensors.items():
            chunk = bytes_digest(read_tensor(source, name))
            digests.append((info, tensor_digest([chunk])))
        return model_digest(digests)


def test_a_tensor_digest_is_the_hash_of_its_chunks_digests():
    first, second = "00" * 15 + "01", "ff" * 16
    expected = xxhash.xxh3_128_hexdigest(bytes(15) + b"\x01" + b"\xff" * 16)
    assert tensor_digest([first, second]) == expected
    assert tensor_digest([second, first]) != expected
    assert tensor_digest([first]) != expected


def test_a_model_digest_is_the_hash_of_a_line_per_tensor():
    b = TensorInfo("b", STORAGE_TYPES["I64"], (), 99)
    text = b"b\tI64\t[]\tcd\nw\tF32\t[2, 3]\tab\n"
    assert model_digest([(W, "ab"), (b, "cd")]) == xxhash.xxh3_128_hexdigest(text)


def test_one_file_and_seven_shards_have_the_same_digest(tmp_path):
    arrays = {f"t{number}": np.full(number, number, np.float32) for number in range(9)}
    whole = digest_of(save(tmp_path / "m.safetensors", arrays))
    assert digest_of(save_shards(tmp_path / "shards", arrays, 7)) == whole


@pytest.mark.parametrize(
    "others",
    [
        [(replace(W, name="W"), "ab"), (V, "cd")],
        [(replace(W, dtype=STORAGE_TYPES["I32"]), "ab"), (V, "cd")],
        [(replace(W, shape=(3, 2)), "ab"), (V, "cd")],
        [(replace(W, shape=(6,)), "ab"), (V, "cd")],
        [(replace(W, shape=(2, 3, 1)), "ab"), (V, "cd")],
        [(W, "cd"), (V, "ab")],
    ],
)
def test_name_type_shape_and_content_matter(others):
    assert model_digest(others) != model_digest([(W, "ab"), (V, "cd")])


def test_every_bit_matters(tmp_path):
    path = save(tmp_path / "m.safetensors", {"w": np.zeros(2, np.float32)})
    bits = 8 * path.stat().st_size
    seen = {digest_of(path)}
    for bit in range(bits - 64, bits):
        flip_bit(path, bit)
        seen.add(digest_of(path))
        flip_bit(path, bit)
    assert len(seen) == 65


def test_chunks_tile_a_tensor():
    counts = {0: 0, 1: 1, CHUNK: 1, CHUNK + 1: 2, 5 * CHUNK: 5}
    assert {elements: chunk_count(elements) for elements in counts} == counts
    elements = 2 * CHUNK + 3
    assert list(chunk_spans(elements)) == [(0, CHUNK), (CHUNK, CHUNK), (2 * CHUNK, 3)]
    assert chunk_span(2, elements) == (2 * CHUNK, 3)
    assert list(chunk_spans(0)) == []
