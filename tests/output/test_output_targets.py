"""What an output may and may not take the place of."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

import dare
from dare.errors import OutputError
from dare.output.targets import MANIFEST_NAME, MARK_NAME, manifest_path, partial_folder
from helpers import listing, save, sha256

BASE = {"w": np.arange(64, dtype=np.float32)}
MODEL = {"w": np.arange(64, dtype=np.float32) * 1.01}


@pytest.fixture
def inputs(tmp_path: Path) -> Path:
    """A folder with an output of dare in it, as a base, and a model beside it."""
    save(tmp_path / "start.safetensors", BASE)
    save(tmp_path / "model.safetensors", MODEL)
    recipe = dare.Request.of(
        base=tmp_path / "start.safetensors",
        models=[tmp_path / "model.safetensors"],
        output=tmp_path / "in" / "model",
        verbose=False,
    )
    dare.merge(recipe)
    return tmp_path / "in"


def merge_to(output: Path, base: Path, **more: bool) -> None:
    model = base.parents[1] / "model.safetensors"
    recipe = dare.Request.of(base=base, models=[model], output=output, verbose=False)
    dare.merge(recipe, **{"overwrite": True, **more})


@pytest.fixture
def view(inputs: Path, tmp_path: Path) -> Iterator[Path]:
    """The inputs' folder by a second path."""
    place = tmp_path / "view"
    place.mkdir()
    command = ["mount", "--bind", inputs, place]
    try:
        mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        mounted = False
    if not mounted:
        pytest.skip("binding a folder to a second place is not permitted here")
    try:
        yield place
    finally:
        subprocess.run(["umount", place], check=True)


def test_a_base_is_not_replaced_by_way_of_a_second_path(inputs, view):
    before = sha256(inputs / "model" / "model.safetensors")
    with pytest.raises(OutputError, match="would overwrite the input"):
        merge_to(view / "model", inputs / "model")
    assert sha256(inputs / "model" / "model.safetensors") == before


def test_a_folder_whose_weights_are_links_is_not_replaced(inputs, tmp_path):
    blob = (inputs / "model" / "model.safetensors").rename(tmp_path / "blob")
    (inputs / "model" / "model.safetensors").symlink_to(blob)
    with pytest.raises(OutputError, match="would overwrite the input"):
        merge_to(inputs / "model", inputs / "model")
    other = tmp_path / "in" / "other"
    merge_to(other, inputs / "model")
    (other / "model.safetensors").unlink()
    (other / "model.safetensors").symlink_to(blob)  # the very file that is read
    with pytest.raises(OutputError, match="would overwrite the input"):
        merge_to(other, inputs / "model")
    assert blob.exists()


def test_a_file_that_dare_did_not_write_is_never_deleted(inputs, tmp_path):
    output = tmp_path / "in" / "out"
    merge_to(output, inputs / "model")
    (output / "notes").mkdir()
    notes = output / "notes" / "thesis.txt"
    notes.write_text("years of work")
    with pytest.raises(OutputError, match="out: contains notes, which dare did not write"):
        merge_to(output, inputs / "model")
    assert notes.read_text() == "years of work"
    notes.unlink()
    notes.parent.rmdir()
    merge_to(output, inputs / "model")
    assert listing(output) == ["README.md", MANIFEST_NAME, "model.safetensors"]


def test_an_output_whose_manifest_was_edited_is_not_replaced(inputs, tmp_path):
    output = tmp_path / "in" / "out"
    merge_to(output, inputs / "model")
    text = (output / MANIFEST_NAME).read_text()
    (output / MANIFEST_NAME).write_text(text.replace('"README.md"', '"READ.me"'))
    with pytest.raises(OutputError, match="the files that dare wrote are not known"):
        merge_to(output, inputs / "model")


@pytest.mark.parametrize("name", ["out", "out.safetensors"])
def test_a_link_in_place_of_the_partial_folder_is_not_followed(inputs, tmp_path, name):
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.txt").write_text("years of work")
    output = tmp_path / "in" / name
    partial_folder(output).symlink_to(precious)
    with pytest.raises(OutputError, match=rf"{name}.partial: .*folder.*move it away"):
        merge_to(output, inputs / "model")
    assert listing(precious) == ["thesis.txt"]


def test_a_foreign_folder_is_left_exactly_as_it_was(inputs, tmp_path):
    output = tmp_path / "in" / "out.safetensors"
    theirs = partial_folder(output)
    theirs.mkdir()
    (theirs / "journal.jsonl").write_text('{"journal": 1}\n')
    before = [(theirs / "journal.jsonl").read_bytes(), theirs.stat().st_mtime_ns]
    with pytest.raises(OutputError, match=r"contains journal.jsonl and was not made by dare"):
        merge_to(output, inputs / "model")
    assert [(theirs / "journal.jsonl").read_bytes(), theirs.stat().st_mtime_ns] == before
    assert listing(theirs) == ["journal.jsonl"]


@pytest.mark.parametrize("name", ["journal.jsonl", "out.safetensors"])
def test_links_in_a_folder_of_ours_are_not_followed(inputs, tmp_path, name):
    output = tmp_path / "in" / "out.safetensors"
    precious = tmp_path / "precious.txt"
    precious.write_text("years of work")
    merge_to(output, inputs / "model")
    marked = partial_folder(output)
    marked.mkdir()
    (marked / MARK_NAME).write_bytes(b"")  # as if the process had died while writing it
    (marked / name).symlink_to(precious)
    with suppress(OutputError):
        merge_to(output, inputs / "model")
    assert precious.read_text() == "years of work"


def test_somebody_elses_manifest_is_not_replaced(inputs, tmp_path):
    output = tmp_path / "in" / "out.safetensors"
    manifest_path(output).write_text('{"name": "my-app"}')
    with pytest.raises(OutputError, match="is not a manifest of dare, so it is not replaced"):
        merge_to(output, inputs / "model")
    assert manifest_path(output).read_text() == '{"name": "my-app"}'
    assert not partial_folder(output).exists()


# ---------------------------------------------------------------- what dare did not write


@pytest.fixture
def models(tmp_path: Path) -> list[Path]:
    """A base and a model, as files."""
    given = {"start": BASE, "model": MODEL}
    return [save(tmp_path / f"{name}.safetensors", arrays) for name, arrays in given.items()]


def write_by(way: str, models: list[Path], output: Path) -> None:
    """Write an output in one of the ways there are, over what is there."""
    base, model = models
    recipe = dare.Request.of(base=base, models=[model], output=output, seed=1, verbose=False)
    quietly = {"overwrite": True, "verbose": False}
    if way == "merge":
        dare.merge(recipe, overwrite=True)
    elif way == "slice":
        dare.merge_slice(recipe, "1/2", overwrite=True)
        dare.merge_slice(recipe, "2/2", overwrite=True)
    elif way == "compress":
        dare.compress(base, model, output, **quietly)
    else:
        delta = base.with_name(f"{way}.delta.safetensors")
        if not delta.exists():
            dare.compress(base, model, delta, lossless=way == "restore", verbose=False)
        dare.apply_delta(base, delta, output, **quietly)


WAYS = ["merge", "slice", "compress", "apply", "restore"]


@pytest.mark.parametrize("theirs", ["text", "fine-tune", "another's manifest beside it"])
@pytest.mark.parametrize("way", WAYS)
def test_a_file_that_dare_did_not_write_is_not_replaced(models, tmp_path, way, theirs):
    output = tmp_path / "out.safetensors"
    if theirs == "another's manifest beside it":
        dare.merge(base=models[0], models=[models[1]], output=output, verbose=False)
    if theirs == "text":
        output.write_text("years of work")
    else:
        save(output, {"w": np.ones(64, np.float32)})
    before = output.read_bytes()
    with pytest.raises(OutputError, match=r"out.safetensors: was not made by dare, or has changed"):
        write_by(way, models, output)
    assert output.read_bytes() == before
    assert not partial_folder(output).exists()


@pytest.mark.parametrize("second", WAYS)
@pytest.mark.parametrize("first", ["merge", "compress", "restore"])
def test_an_output_in_one_file_may_be_replaced_by_any_other(models, tmp_path, first, second):
    output = tmp_path / "out.safetensors"
    write_by(first, models, output)
    if first != "restore":  # which has the model's own header
        manifest_path(output).unlink()
    write_by(second, models, output)
    assert dare.verify(output).ok


def test_a_restored_file_that_has_changed_is_not_replaced(models, tmp_path):
    output = tmp_path / "out.safetensors"
    write_by("restore", models, output)
    with output.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"?")
    with pytest.raises(OutputError, match="has changed since"):
        write_by("restore", models, output)


@pytest.mark.parametrize("name", ["README.md", "model.safetensors"])
def test_a_folder_with_a_file_that_has_changed_is_not_replaced(inputs, tmp_path, name):
    output = tmp_path / "in" / "out"
    merge_to(output, inputs / "model")
    if name == "README.md":
        (output / name).write_text("years of work")
    else:
        save(output / name, MODEL)
    before = (output / name).read_bytes()
    with pytest.raises(OutputError, match=f"out: contains {name}, which has changed since"):
        merge_to(output, inputs / "model")
    assert (output / name).read_bytes() == before


LONGEST = {".safetensors": 255 - len(".manifest.json"), "": 255 - len(f".replaced-{os.getpid()}")}


@pytest.mark.parametrize("suffix", LONGEST)
@pytest.mark.parametrize("letter", ["n", "ä"])
def test_a_name_may_be_as_long_as_all_that_is_made_of_it_allows(inputs, letter, suffix):
    letters = (LONGEST[suffix] - len(suffix)) // len(letter.encode())
    merge_to(inputs / (letter * letters + suffix), inputs / "model", overwrite=False)
    before = listing(inputs)
    with pytest.raises(OutputError, match="bytes too long"):
        merge_to(inputs / (letter * (letters + 1) + suffix), inputs / "model")
    assert listing(inputs) == before
