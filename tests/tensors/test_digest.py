from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import xxhash

from dare.inputs.sources import open_source
from dare.tensors.chunks import bytes_digest, model_digest, tensor_digest
from dare.tensors.dtypes import STORAGE_TYPES
from dare.tensors.header import TensorInfo
from helpers import flip_bit, read_tensor, save, save_shards

EMPTY = "99aa06d3014798d86001c324468d497f"  # XXH3-128 of nothing, from its specification
W = TensorInfo("w", STORAGE_TYPES["F32"], (2, 3), 0)


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
    "other",
    [
        replace(W, name="W"),
        replace(W, dtype=STORAGE_TYPES["I32"]),
        replace(W, shape=(3, 2)),
        replace(W, shape=(6,)),
        replace(W, shape=(2, 3, 1)),
    ],
)
def test_name_type_and_shape_matter(other):
    assert model_digest([(other, "ab")]) != model_digest([(W, "ab")])


def test_which_tensor_has_which_content_matters():
    other = replace(W, name="v")
    assert model_digest([(W, "ab"), (other, "cd")]) != model_digest([(W, "cd"), (other, "ab")])


def test_every_bit_matters(tmp_path):
    path = save(tmp_path / "m.safetensors", {"w": np.zeros(2, np.float32)})
    bits = 8 * path.stat().st_size
    seen = {digest_of(path)}
    for bit in range(bits - 64, bits):
        flip_bit(path, bit)
        seen.add(digest_of(path))
        flip_bit(path, bit)
    assert len(seen) == 65
