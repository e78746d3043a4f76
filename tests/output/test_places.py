from __future__ import annotations

import ntpath
from pathlib import Path, PureWindowsPath
from types import SimpleNamespace

import numpy as np
import pytest

import dare
from dare.lora import extract_adapter, merge_adapters
from dare.output import receipt
from dare.output.receipt import portable_path, resolve_path, short_name
from dare.output.targets import default_scratch, manifest_path
from dare.recipe.fields import plain
from dare.tensors.files import cache_folder
from helpers import save, sha256


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("base", "base"),
        ("models/base/", "base"),
        ("/home/somebody/base", "base"),
        ("~somebody/base", "base"),
        ("../../base", "base"),
        ("./base.safetensors", "base.safetensors"),
        ("/data/base/model.safetensors", "base"),
        ("org/name@0123abc", "org/name@0123abc"),
        ("/c/hub/models--a--b/snapshots/1f/model.safetensors", "a/b"),
    ],
)
def test_short_names(path: str, expected: str) -> None:
    assert short_name(path) == expected


@pytest.mark.parametrize(
    ("path", "output", "expected"),
    [
        ("/data/ann/base", "/data/ann/merged", "../base"),
        ("/data/ann/m/base.safetensors", "/data/ann/o/p/x.safetensors", "../../../m/base.safeten…"),
        ("/data/bob/base", "/data/ann/merged", "base"),
        ("/data/bob/base", "/elsewhere/merged", "base"),
        ("org/name@0123abc", "/data/ann/merged", "org/name@0123abc"),
    ],
)
def test_a_path_is_told_from_the_output_if_they_have_enough_in_common(
    path: str, output: str, expected: str
) -> None:
    text = portable_path(Path(path), Path(output))
    assert text == expected.replace("safeten…", "safetensors")
    if text.startswith(".."):
        assert resolve_path(text, Path(output)) == Path(path)


@pytest.mark.parametrize(
    ("path", "output", "expected"),
    [
        (r"C:\data\ann\models\base", r"C:\data\ann\merged", "../models/base"),
        (r"D:\data\ann\base", r"C:\data\ann\merged", "base"),
        (r"org\name@0123abc", r"C:\data\ann\merged", "org/name@0123abc"),
    ],
)
def test_paths_of_windows_are_written_with_slashes(monkeypatch, path, output, expected):
    monkeypatch.setattr(receipt, "os", SimpleNamespace(path=ntpath))
    monkeypatch.setattr(receipt, "Path", PureWindowsPath)
    assert portable_path(PureWindowsPath(path), PureWindowsPath(output)) == expected


def test_paths_in_recipes_are_written_with_slashes():
    assert plain(PureWindowsPath(r"..\models\base")) == "../models/base"


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    """A folder whose name must not be told, with a base and a model in it."""
    folder = tmp_path / "home" / "Jane Doe" / "models"
    save(folder / "base" / "model.safetensors", {"w": np.zeros(8, np.float32)})
    (folder / "base" / "config.json").write_text("{}")
    save(folder / "tuned" / "model.safetensors", {"w": np.ones(8, np.float32)})
    return folder


@pytest.mark.parametrize("output", ["merged", "merged.safetensors"])
def test_nothing_that_is_published_tells_where_it_was_made(secret, tmp_path, output):
    target = secret / "out" / output
    recipe = dare.Request.of(
        base=secret / "base",
        models=[secret / "tuned"],
        output=target,
        verbose=False,
        on_extra="drop",
        tensors=[{"match": "w", "model": str(secret / "tuned"), "settings": {"drop_rate": 0.5}}],
    )
    partial = target.with_name(target.name + ".partial")
    partial.mkdir(parents=True)
    dare.merge(recipe)
    written = [target, manifest_path(target)] if target.is_file() else list(target.iterdir())
    for file in written:
        content = file.read_bytes()
        for word in (b"Jane", b"Doe", str(tmp_path).encode()):
            assert word not in content, file


def test_a_repeat_finds_inputs_that_moved_along(secret, tmp_path):
    target = secret / "out" / "merged.safetensors"
    dare.merge(
        dare.Request.of(
            base=secret / "base", models=[secret / "tuned"], output=target, verbose=False
        )
    )
    moved = secret.rename(tmp_path / "moved")
    recipe = dare.load_recipe(moved / "out" / "merged.safetensors")
    again = recipe.changed(output=tmp_path / "again.safetensors", verbose=False)
    dare.merge(again)
    assert sha256(again.recipe.output) == sha256(moved / "out" / "merged.safetensors")


def test_an_adapter_tells_nothing_either(secret, tmp_path):
    arrays = {"layers.0.q_proj.weight": np.eye(8, dtype=np.float32)}
    tuned = {"layers.0.q_proj.weight": np.eye(8, dtype=np.float32) * 2}
    save(secret / "base" / "model.safetensors", arrays)
    save(secret / "tuned" / "model.safetensors", tuned)
    (secret / "base" / "config.json").unlink()
    outputs = [secret / "one", secret / "two"]
    for output, rank in zip(outputs, (2, 4), strict=True):
        extract_adapter(secret / "base", secret / "tuned", output, rank=rank)
    merge_adapters(outputs, secret / "both")
    for file in (path for folder in (*outputs, secret / "both") for path in folder.iterdir()):
        content = file.read_bytes()
        for word in (b"Jane", b"Doe", str(tmp_path).encode()):
            assert word not in content, file


@pytest.mark.parametrize(
    ("platform", "expected"),
    [("linux", ".cache/dare"), ("darwin", "Library/Caches/dare"), ("win32", "local/dare")],
)
@pytest.mark.parametrize("given", [None, "", "not/absolute"])  # such are to be ignored
def test_where_caches_and_uploads_are_kept(platform, expected, given, tmp_path, monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    if given is not None:
        monkeypatch.setenv("XDG_CACHE_HOME", given)
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path / "local"))
    monkeypatch.setattr("sys.platform", platform)
    monkeypatch.setattr("pathlib.Path.home", lambda: tmp_path)
    assert cache_folder() == tmp_path / expected
    assert default_scratch() == tmp_path / expected / "uploads"
