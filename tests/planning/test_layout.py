from __future__ import annotations

import json
from pathlib import Path

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


def test_wider_types_come_first_and_then_names_in_order():
    tensors = [
        ("b", F16, (2,)),
        ("d", F32, (1,)),
        ("a", F16, (2,)),
        ("c", I64, ()),
        ("e", U8, (3,)),
    ]
    layout = lay_out(FILE, tensors, None)
    assert names(layout) == {"out.safetensors": ["c", "d", "a", "b", "e"]}
    assert not layout.is_directory


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


def test_a_directory_without_a_shard_size_holds_one_file():
    layout = lay_out(FOLDER, [("a", F32, (9,)), ("b", F32, (9,))], None)
    assert names(layout) == {"model.safetensors": ["a", "b"]}
    assert layout.is_directory
    assert layout.indexes() == {}
    assert (
        lay_out(FOLDER / "m-00001-of-00001.safetensors", [("a", F32, (9,))], None).indexes() == {}
    )


@pytest.mark.parametrize(
    ("elements", "size", "shards"),
    [
        ({"a": 2, "b": 2, "c": 2, "d": 2, "e": 2}, 16, [["a", "b"], ["c", "d"], ["e"]]),
        ({"a": 2, "b": 2, "c": 2}, 15, [["a"], ["b"], ["c"]]),  # never a byte more than asked
        ({"a": 1, "b": 100, "c": 1}, 8, [["a"], ["b"], ["c"]]),  # one that is larger by itself
        ({"a": 2, "b": 0, "c": 0}, 8, [["a", "b", "c"]]),
    ],
)
def test_shards_are_filled_in_turn(elements, size, shards):
    found = names(
        lay_out(FOLDER, [(name, F32, (count,)) for name, count in elements.items()], size)
    )
    assert list(found.values()) == shards
    count = len(shards)
    several = [f"model-{n:05}-of-{count:05}.safetensors" for n in range(1, count + 1)]
    assert list(found) == (several if count > 1 else ["model.safetensors"])


def test_no_tensors_make_one_empty_file():
    assert names(lay_out(FOLDER, [], 8)) == {"model.safetensors": []}
    assert names(lay_out(FILE, [], None)) == {"out.safetensors": []}


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
