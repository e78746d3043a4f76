"""`format = "dcp"`: a merge is written as a checkpoint of torch.distributed, and torch reads it."""

from __future__ import annotations

import json
import os

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

import dare
from dare.errors import OutputError, RecipeError
from dare.formats import dcp as dcp_format
from dare.inputs.opening import open_model
from dare.tensors.chunks import CHUNK
from helpers import read_tensor

torch = pytest.importorskip("torch")
dcp = pytest.importorskip("torch.distributed.checkpoint")
load_file = pytest.importorskip("safetensors.torch").load_file

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

FILES = [".metadata", "__0_0.distcp"]
TYPES = (np.float32, np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, np.float64)


def model(folder, seed):
    """Write a model with every kind of tensor, and one of several chunks."""
    generator = np.random.default_rng(seed)
    arrays = {np.dtype(kind).name: generator.normal(size=(3, 5)).astype(kind) for kind in TYPES} | {
        "long": generator.normal(size=(2, CHUNK - 7)).astype(np.float32),
        "scalar": np.array(seed, np.float32),
        "empty": np.zeros((0, 4), np.float32),
        "places": np.arange(7),
        "flags": np.array([True, False]),
    }
    folder.mkdir()
    save_file(arrays, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "x", "dtype": "float32"}))
    return folder


@pytest.fixture
def given(tmp_path):
    """What is merged, into a checkpoint; `plain` writes safetensors instead."""
    base, *models = (model(tmp_path / name, seed) for seed, name in enumerate("abc"))
    usual = {"base": base, "models": models, "method": "linear", "verbose": False}
    return {**usual, "output": tmp_path / "out", "format": "dcp"}


def plain(given, **settings):
    return {**given, "output": given["output"].with_name("plain"), "format": None, **settings}


def weights_of(folder):
    return load_file(folder / "model.safetensors")


def assert_loads(folder, expected):
    """Let torch read a checkpoint, and compare types, shapes and bytes."""
    found = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    dcp.load({"model": found}, checkpoint_id=folder, no_dist=True)
    assert expected
    for name, tensor in expected.items():
        pair = (each.reshape(-1).view(torch.uint8) for each in (found[name], tensor))
        assert torch.equal(*pair), name


def test_torch_reads_what_a_plain_merge_has(given):
    report, expected = dare.merge(**given), dare.merge(**plain(given))
    assert_loads(given["output"], weights_of(given["output"].with_name("plain")))
    assert report.digests.output == expected.digests.output
    assert report.recoded.format == "DCP"
    assert sorted(os.listdir(given["output"])) == sorted(
        [*FILES, "README.md", "config.json", "dare-manifest.json"]
    )
    assert dare.verify(given["output"]).ok


def test_a_merge_goes_on_from_it(given, tmp_path):
    report = dare.merge(**given)
    with pytest.raises(dare.InputError, match="allow_pickle"):
        dare.plan(base=given["output"], models=[given["base"]])
    with open_model(given["output"], allow_pickle=True) as source:
        assert source.tensors.keys() == weights_of(given["base"]).keys()
        assert read_tensor(source, "places") == np.arange(7).tobytes()
    again = {"models": [{"file": given["output"], "weight": 1}], "allow_pickle": True}
    same = dare.merge(**plain(given, **again))
    assert same.digests.models == (report.digests.output,)


def test_types_and_configuration_are_those_of_a_plain_merge(given):
    dare.merge(**given, dtype="BF16")
    dare.merge(**plain(given, dtype="BF16"))
    folder = given["output"].with_name("plain")
    assert_loads(given["output"], weights_of(folder))
    assert (given["output"] / "config.json").read_bytes() == (folder / "config.json").read_bytes()
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"


def test_a_damaged_file_is_found(given):
    dare.merge(**given)
    path = given["output"] / FILES[1]
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    assert [(p.code, p.subjects) for p in dare.verify(given["output"]).problems] == [
        ("changed", (FILES[1],))
    ]


def test_slices_write_it_too(given):
    expected = dare.merge(**plain(given))
    for part in ("1/2", "2/2"):
        dare.merge_slice(dare.Request.of(**given), part)
    assert_loads(given["output"], weights_of(expected.output))
    assert dare.verify(given["output"]).ok


def test_it_is_repeated_from_its_manifest(given, tmp_path):
    report = dare.merge(**given)
    again = dare.merge(given["output"], output=tmp_path / "again", verbose=False)
    assert again.digests.output == report.digests.output
    assert {*FILES} <= {*os.listdir(tmp_path / "again")}


def test_an_existing_output_is_replaced_only_on_demand(given):
    dare.merge(**given)
    before = (given["output"] / FILES[1]).read_bytes()
    with pytest.raises(OutputError, match="overwrite"):
        dare.merge(**given, scale=0.5)
    assert (given["output"] / FILES[1]).read_bytes() == before
    dare.merge(**given, scale=0.5, overwrite=True)
    assert dare.verify(given["output"]).ok
    assert (given["output"] / FILES[1]).read_bytes() != before


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_nothing_looks_finished_until_torch_is_done(given, monkeypatch, error):
    def die(*_given, **_named):
        partial = given["output"].with_name("out.partial")
        (partial / FILES[1]).write_bytes(b"a part")
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", die)
        with pytest.raises((OutputError, KeyboardInterrupt), match=r"make room|^$"):
            dare.merge(**given)
    assert not given["output"].exists()
    report = dare.merge(**given)
    assert report.resumed_chunks == sum(tensor.chunks for tensor in dare.plan(**given).tensors)
    assert dare.verify(given["output"]).ok
    assert {*FILES} <= {*os.listdir(given["output"])}
    assert not list(given["output"].glob("*.safetensors"))


def test_room_on_the_disk_is_needed_twice(given, monkeypatch):
    size = dare.plan(**given).cost.bytes_written
    usage = type("usage", (), {"free": size + size // 2})
    monkeypatch.setattr("dare.output.sink.shutil.disk_usage", lambda _path: usage)
    dare.merge(**plain(given))
    with pytest.raises(OutputError, match="make room"):
        dare.merge(**given)
    assert not given["output"].exists()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"output": "out.safetensors"}, "folder"),
        ({"output": "s3://bucket/out"}, "on this machine"),
        ({"output": "hf://user/name"}, "on this machine"),
        ({"shard_size": "1MB"}, "leave shard_size out"),
        ({"format": "dpc"}, "'input' or 'dcp'"),
    ],
)
def test_what_it_cannot_be_is_refused_in_the_plan(given, settings, words):
    with pytest.raises(RecipeError, match=words):
        dare.plan(**{**given, **settings})


def test_without_torch_the_plan_says_so(given, monkeypatch):
    monkeypatch.setattr(dcp_format, "find_spec", lambda _name: None)
    with pytest.raises(RecipeError, match="pip install torch"):
        dare.plan(**given)


def test_types_that_torch_lacks_are_refused(given, tmp_path):
    header = {"codes": {"dtype": "F4", "shape": [4], "data_offsets": [0, 2]}}
    text = json.dumps(header).encode()
    for name in "de":
        content = len(text).to_bytes(8, "little") + text + b"\0\0"
        (tmp_path / f"{name}.safetensors").write_bytes(content)
    files = {"base": tmp_path / "d.safetensors", "models": [tmp_path / "e.safetensors"]}
    with pytest.raises(RecipeError, match=r"codes.*no F4"):
        dare.plan(**{**given, **files})
