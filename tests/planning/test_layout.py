from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dare.errors import OutputError, RecipeError
from dare.inputs.sources import open_source
from dare.planning.data import lay_out
from dare.stores.locations import StorePath
from dare.tensors.dtypes import STORAGE_TYPES
from helpers import save

F32, F16, I64, U8 = (STORAGE_TYPES[name] for name in ("F32", "F16", "I64", "U8"))
FILE = Path("out.safetensors")
FOLDER = Path("out")


def names(layout) -> dict[str, list[str]]:
    return {file: [name for name, _, _ in tensors] for file, tensors in layout.files.items()}


@pytest.mark.parametrize(
    "name", ["out.gguf", "out.GGUF", "a.bin", "a.ckpt", "a.pt", "a.pth", "a.onnx", "a.SAFETENSORS"]
)
def test_a_name_of_another_format_is_refused(name):
    with pytest.raises(OutputError, match=rf"{name}: .*\.safetensors") as caught:
        lay_out(Path(name), [("a", F32, (1,))], None)
    assert str(caught.value).endswith(".gguf")  # which a merge can be
    with pytest.raises(OutputError):
        lay_out(StorePath(f"s3://bucket/{name}"), [("a", F32, (1,))], None)


@pytest.mark.parametrize("name", ["llama-3.1", "merged.v2", "bin", ".pt", "out.safetensors.d"])
def test_a_dot_in_the_name_of_a_directory_means_nothing(name):
    assert lay_out(Path(name), [("a", F32, (1,))], None).is_directory


def of_sizes(sizes: dict[str, int]) -> list[tuple[str, Any, tuple[int, ...]]]:
    return [(name, F32, (count,)) for name, count in sizes.items()]


MIXED = [("b", F16, (2,)), ("d", F32, (1,)), ("a", F16, (2,)), ("c", I64, ()), ("e", U8, (3,))]


@pytest.mark.parametrize(
    ("target", "tensors", "size", "files"),
    [
        # Wider types come first, and then names in order.
        (FILE, MIXED, None, [["c", "d", "a", "b", "e"]]),
        (FILE, [], None, [[]]),
        (FOLDER, [], 8, [[]]),
        (FOLDER, of_sizes({"a": 9, "b": 9}), None, [["a", "b"]]),
        # Shards are filled in turn, never a byte more than asked; a larger tensor is by itself.
        (FOLDER, of_sizes(dict.fromkeys("abcde", 2)), 16, [["a", "b"], ["c", "d"], ["e"]]),
        (FOLDER, of_sizes({"a": 2, "b": 2, "c": 2}), 15, [["a"], ["b"], ["c"]]),
        (FOLDER, of_sizes({"a": 1, "b": 100, "c": 1}), 8, [["a"], ["b"], ["c"]]),
        (FOLDER, of_sizes({"a": 2, "b": 0, "c": 0}), 8, [["a", "b", "c"]]),
    ],
)
def test_tensors_are_laid_out(target, tensors, size, files):
    layout = lay_out(target, tensors, size)
    count = len(files)
    several = [f"model-{n:05}-of-{count:05}.safetensors" for n in range(1, count + 1)]
    one = ["model.safetensors" if target is FOLDER else "out.safetensors"]
    assert names(layout) == dict(zip(several if count > 1 else one, files, strict=True))
    assert layout.is_directory == (target is FOLDER)
    assert bool(layout.indexes()) == (count > 1)


def test_the_safetensors_library_orders_tensors_the_same(tmp_path):
    arrays = {
        "b": np.zeros(2, np.float16),
        "d": np.zeros(1, np.float32),
        "a": np.zeros(2, np.float16),
        "c": np.zeros((), np.int64),
    }
    found = open_source(save(tmp_path / "f.safetensors", arrays)).tensors
    by_place = sorted(found.values(), key=lambda info: info.start)
    described = [(info.name, info.dtype, info.shape) for info in found.values()]
    assert names(lay_out(FILE, described, None)) == {FILE.name: [info.name for info in by_place]}


def test_a_file_cannot_be_sharded():
    with pytest.raises(
        RecipeError, match=r"shard_size makes several files.*out.safetensors is one"
    ):
        lay_out(FILE, [("a", F32, (2,))], 8)


def test_the_index_says_where_every_tensor_is():
    layout = lay_out(FOLDER, [("b", F32, (2,)), ("a", F32, (2,)), ("é", F16, (1,))], 8)
    assert json.loads(layout.indexes()["model.safetensors.index.json"]) == {
        "metadata": {"total_size": 18},
        "weight_map": {
            "a": "model-00001-of-00003.safetensors",
            "b": "model-00002-of-00003.safetensors",
            "é": "model-00003-of-00003.safetensors",
        },
    }


def test_every_file_is_built_with_its_own_header():
    layout = lay_out(FOLDER, [("a", F32, (2,)), ("b", F32, (3,))], 8)
    built = layout.build({"k": "v"})
    assert [list(placed) for _, placed in built.values()] == [["a"], ["b"]]
    for header, placed in built.values():
        (info,) = placed.values()
        assert info.start == len(header)
        assert b'"__metadata__":{"k":"v"}' in header
