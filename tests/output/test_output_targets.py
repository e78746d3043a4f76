"""What an output may and may not take the place of."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

import dare
from dare.errors import OutputError
from dare.output.targets import MANIFEST_NAME, MARK_NAME, manifest_path, partial_folder
from helpers import listing, save

BASE = {"w": np.arange(64, dtype=np.float32)}
MODEL = {"w": np.arange(64, dtype=np.float32) * 1.01}


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A folder with an output of dare in it, as a base, and files beside it."""
    for name, arrays in (("start", BASE), ("model", MODEL)):
        save(tmp_path / f"{name}.safetensors", arrays)
    merge_to(tmp_path, "base", base="start.safetensors")
    return tmp_path


def merge_to(here: Path, output: str | Path, base: str = "base", **settings: object) -> None:
    given = {"base": here / base, "models": [here / "model.safetensors"]}
    dare.merge(**given, output=here / output, overwrite=True, verbose=False, **settings)


def contents(folder: Path) -> dict[Path, object]:
    """All that is in a folder: where links lead, what files hold and when they were written."""
    return {
        path: path.readlink() if path.is_symlink() else (path.is_file() and path.read_bytes())
        for path in folder.rglob("*")
    }


def linked(
    call: Callable[[Path, Path], object], to: str, name: str = "link.safetensors", output: str = ""
) -> Callable[[Path], str]:
    """Another name of a file."""

    def prepare(here: Path) -> str:
        (here / name).parent.mkdir(exist_ok=True)
        call(here / to, here / name)
        return output or name

    return prepare


def put(name: str, text: str, output: str = "") -> Callable[[Path], str]:
    """A file of somebody, and the output that would take its place, or would be made there."""

    def prepare(here: Path) -> str:
        (here / name).parent.mkdir(parents=True, exist_ok=True)
        (here / name).write_text(text)
        return output or name

    return prepare


def made(change: Callable[[Path], object], output: str = "out") -> Callable[[Path], str]:
    """An output of ours that somebody has changed."""

    def prepare(here: Path) -> str:
        merge_to(here, output)
        change(here / output)
        return output

    return prepare


def with_linked_weights(output: Path) -> None:
    """Keep the base's weights elsewhere, and have an output lead to them."""
    weights = output.parent / "base" / "model.safetensors"
    weights.rename(blob := output.parent / "blob")
    weights.symlink_to(blob)
    (output / "model.safetensors").unlink()
    (output / "model.safetensors").symlink_to(blob)


def edit(name: str, old: str, new: str) -> Callable[[Path], object]:
    def change(output: Path) -> None:
        text = (output / name).read_text()
        (output / name).write_text(text.replace(old, new) if old else new)

    return change


def add_folder(output: Path) -> None:
    (output / "notes").mkdir()
    (output / "notes" / "thesis.txt").write_text("years of work")


INPUT, WEIGHTS = "overwrite the input", "base/model.safetensors"
CHANGED, STRANGE = "has changed since", "was not made by dare"
LINK, MANIFEST = "is a link, and links are not replaced", "out.safetensors.manifest.json"
PARTIAL, FOLDER = "out.safetensors.partial", "must be a folder.*move it away"
REFUSED: dict[str, tuple[Callable[[Path], str | Path], str]] = {
    "the base": (lambda here: "base", INPUT),
    "its file": (lambda here: WEIGHTS, INPUT),
    "the base, spelled otherwise": (lambda here: "base/../base", INPUT),
    "a link to the base": (linked(lambda a, b: b.symlink_to(a), "base", "link"), INPUT),
    "a link to its file": (linked(lambda a, b: b.symlink_to(a), WEIGHTS), INPUT),
    "a second name of its file": (linked(lambda a, b: b.hardlink_to(a), WEIGHTS), INPUT),
    "a folder above": (put(f"in/{MANIFEST_NAME}", "{}", "."), INPUT),
    "weights that are linked": (made(with_linked_weights), INPUT),
    "where the input is made": (linked(os.rename, "base", "base.partial/x", "base"), "made in"),
    "a text": (put("out.safetensors", "years of work"), STRANGE),
    "a folder of others": (put("out/cat.jpg", "meow", "out"), MANIFEST_NAME),
    "a file for a folder": (put("out", ""), "is no folder"),
    "a folder for a file": (put("out.safetensors/x", "", "out.safetensors"), "is a folder"),
    "a manifest": (
        put(MANIFEST, '{"name": "my-app"}', "out.safetensors"),
        "not a manifest of dare",
    ),
    "a link to an output": (linked(lambda a, b: b.symlink_to(a), "other", "link"), LINK),
    "a file in it": (made(add_folder), "contains notes, which dare did not write"),
    "a changed manifest": (made(edit(MANIFEST_NAME, "README", "READ")), "dare wrote are not known"),
    "a changed card": (made(edit("README.md", "", "mine")), f"contains README.md, which {CHANGED}"),
    "changed weights": (
        made(lambda output: save(output / "model.safetensors", MODEL)),
        f"contains model.safetensors, which {CHANGED}",
    ),
    "a file for the place it is made in": (put(PARTIAL, "x", "out.safetensors"), FOLDER),
    "a link for that place": (
        linked(
            lambda a, b: (b.symlink_to(a), a.mkdir()), "base/precious", PARTIAL, "out.safetensors"
        ),
        FOLDER,
    ),
    "a folder of others in that place": (
        put(f"{PARTIAL}/journal.jsonl", '{"journal": 1}\n', "out.safetensors"),
        f"contains journal.jsonl and {STRANGE}",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_replaced_is_left_exactly_as_it_was(here, monkeypatch, case):
    merge_to(here, "other")
    prepare, reason = REFUSED[case]
    output = prepare(here)
    base = "base" if (here / "base").exists() else "base.partial/x"
    monkeypatch.chdir(here)
    before = contents(here)
    with pytest.raises(OutputError, match=reason):
        merge_to(here, output, base=base)
    assert contents(here) == before


@pytest.fixture
def view(here: Path) -> Iterator[Path]:
    """The folder of the base by a second path."""
    place = here / "view"
    place.mkdir()
    command = ["mount", "--bind", here / "base", place]
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


def test_a_base_is_not_replaced_by_way_of_a_second_path(here, view):
    before = contents(here / "base")
    with pytest.raises(OutputError, match=INPUT):
        merge_to(here, "view")
    assert contents(here / "base") == before


@pytest.mark.parametrize("name", ["journal.jsonl", "out.safetensors"])
def test_links_in_a_folder_of_ours_are_not_followed(here, name):
    precious = here / "precious.txt"
    precious.write_text("years of work")
    marked = partial_folder(here / "out.safetensors")
    marked.mkdir()
    (marked / MARK_NAME).write_bytes(b"")  # as if the process had died while writing it
    (marked / name).symlink_to(precious)
    with suppress(OutputError):
        merge_to(here, "out.safetensors")
    assert precious.read_text() == "years of work"


# ---------------------------------------------------------------- what dare wrote itself


def write_by(way: str, here: Path) -> None:
    """Write an output in one of the ways there are, over what is there."""
    base, model, output = (here / f"{n}.safetensors" for n in ("start", "model", "out"))
    quietly = {"overwrite": True, "verbose": False}
    if way in ("merge", "slice"):
        recipe = dare.Request.of(base=base, models=[model], output=output, seed=1, verbose=False)
        if way == "merge":
            dare.merge(recipe, overwrite=True)
        for text in ("1/2", "2/2") if way == "slice" else ():
            dare.merge_slice(recipe, text, overwrite=True)
    elif way == "compress":
        dare.compress(base, model, output, **quietly)
    else:
        delta = base.with_name(f"{way}.delta.safetensors")
        if not delta.exists():
            dare.compress(base, model, delta, lossless=way == "restore", verbose=False)
        dare.apply_delta(base, delta, output, **quietly)


WAYS = ["merge", "slice", "compress", "apply", "restore"]


@pytest.mark.parametrize("way", WAYS)
def test_no_way_to_write_replaces_what_dare_did_not_write(here, way):
    output = here / "out.safetensors"
    for theirs in ("text", "fine-tune", "another's manifest beside it"):
        if theirs == "text":
            output.write_text("years of work")
        else:
            save(output, {"w": np.ones(64, np.float32)})
        if theirs == "another's manifest beside it":
            output.unlink()
            merge_to(here, "out.safetensors", base="start.safetensors")
            save(output, {"w": np.ones(64, np.float32)})
        before = output.read_bytes()
        with pytest.raises(OutputError, match=rf"out.safetensors: {STRANGE}, or has changed"):
            write_by(way, here)
        assert output.read_bytes() == before
        assert not partial_folder(output).exists()


@pytest.mark.parametrize("second", WAYS)
@pytest.mark.parametrize("first", ["merge", "compress", "restore"])
def test_an_output_in_one_file_may_be_replaced_by_any_other(here, first, second):
    output = here / "out.safetensors"
    write_by(first, here)
    if first != "restore":  # which has the model's own header
        manifest_path(output).unlink()
    write_by(second, here)
    assert dare.verify(output).ok


def test_a_restored_file_that_has_changed_is_not_replaced(here):
    write_by("restore", here)
    with (here / "out.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"?")
    with pytest.raises(OutputError, match=CHANGED):
        write_by("restore", here)


@pytest.mark.parametrize("output", ["out", "out.safetensors"])
def test_an_output_is_replaced_if_told(here, output):
    merge_to(here, output)
    halved = {"base": here / "base", "models": [here / "model.safetensors"], "scale": 0.5}
    with pytest.raises(OutputError, match="exists already"):
        dare.merge(**halved, output=here / output, verbose=False)
    first = dare.verify(here / output).sha256
    merge_to(here, output, scale=0.5)
    found = dare.verify(here / output)
    assert found.ok
    assert found.sha256 != first
    assert not [name for name in listing(here) if "partial" in name or "replaced" in name]


LONGEST = {".safetensors": 255 - len(".manifest.json"), "": 255 - len(f".replaced-{os.getpid()}")}


@pytest.mark.parametrize("suffix", LONGEST)
@pytest.mark.parametrize("letter", ["n", "ä"])
def test_a_name_may_be_as_long_as_all_that_is_made_of_it_allows(here, letter, suffix):
    letters = (LONGEST[suffix] - len(suffix)) // len(letter.encode())
    merge_to(here, letter * letters + suffix)
    before = listing(here)
    with pytest.raises(OutputError, match="bytes too long"):
        merge_to(here, letter * (letters + 1) + suffix)
    assert listing(here) == before
