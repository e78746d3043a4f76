"""Outputs that are inputs by another name, and files of other people where ours would go."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from interposing import CANNOT_MOUNT, Job
from power import Contents, played
from scenarios import BY_NAME, Place, Scenario, check_message, check_whole, contents

NOTES: Contents = {"notes.txt": b"years of work\n", "runs": None, "runs/log.txt": b"1 2 3\n"}
NAMES = ("file", "directory", "extract", "adapters", "compress", "restore")
SCENARIOS = [BY_NAME[name] for name in NAMES]
merges = pytest.mark.parametrize("scenario", SCENARIOS[:2], ids=lambda scenario: scenario.name)
folders = pytest.mark.parametrize("scenario", SCENARIOS[1::2], ids=lambda scenario: scenario.name)


@pytest.fixture
def made(place: Place, tmp_path):
    """Models that dare has made, in a folder that a test may lose."""
    models = tmp_path.resolve() / "models"
    place.reset(place.end(BY_NAME["directory"]).new | place.end(BY_NAME["file"]).new)
    shutil.copytree(place.work, models)
    for path in models.iterdir():
        path.rename(path.with_name(path.name.replace("out", "base")))
    place.reset({})
    return models


MOUNTED = {
    "a folder behind a mount": ("", "view", "view/base", "base"),
    "a file behind a mount": ("", "view", "view/base.safetensors", "base.safetensors"),
    "a file mounted over another": ("base.safetensors", "other.safetensors", None, None),
    "a mount where the output would be made": ("base", "out.partial", "out", "base"),
}
"""What of the models is seen where, and which output has which base."""


@pytest.mark.parametrize("case", MOUNTED)
def test_an_input_behind_a_bind_mount_is_never_replaced(place: Place, made, tmp_path, case):
    source, target, output, base = MOUNTED[case]
    folder = tmp_path.resolve()
    seen = folder / target
    seen.write_bytes(b"") if seen.suffix == ".safetensors" else seen.mkdir()
    before = contents(made)
    start = made / (base or source)
    model = place.inputs / ("one" if start.is_dir() else "one.safetensors")
    files = ("--base", start, "--merge", model, "--output", folder / (output or target))
    arguments = (*map(str, files), "--overwrite", "--quiet")
    mounts = ((made / source, seen),)
    (outcome,) = place.warm.run_together([Job(arguments, place.work, mounts=mounts)])
    if outcome.status == CANNOT_MOUNT:
        pytest.skip("bind mounts are not allowed here, even in a namespace of one's own")
    check_message(outcome.status, outcome.err, outcome.err)
    assert contents(made) == before
    assert outcome.status == 1, "the output is an input, and nobody minded"


@folders
def test_an_adapter_or_model_is_not_replaced_by_what_is_made_of_it(
    place: Place, made, scenario: Scenario
):
    """The output is one of the command's own inputs, and looks like an output of ours."""
    inputs = [word for word in scenario.arguments if word.startswith("../inputs/")]
    name = Path(inputs[0]).name
    copy = made / name
    if not copy.exists():
        shutil.copytree(place.inputs / name, copy)
    (copy / "dare-manifest.json").write_bytes(b"{}")
    before = contents(made)
    arguments = [str(copy) if word == inputs[0] else word for word in scenario.arguments]
    outcome = place.run((*arguments, "--output", str(copy), "--overwrite"))
    assert contents(made) == before
    assert outcome.status == 1


# ---------------------------------------------------------------- files of other people

FOREIGN: dict[str, Contents] = {
    "a folder": NOTES,
    "an empty journal": {**NOTES, "journal.jsonl": b""},
    "somebody's journal": {**NOTES, "journal.jsonl": b'{"journal": "of a ship"}\n'},
    "somebody's first version": {**NOTES, "journal.jsonl": b'{"journal": 1}\n'},
    "weights": {"out.safetensors": b"precious", "model.safetensors": b"precious"},
    "a manifest": {"dare-manifest.json": b"{}", "README.md": b"# mine\n"},
}


def below(folder: str, files: Contents) -> Contents:
    """A folder with files in it."""
    return {folder: None, **{f"{folder}/{name}": data for name, data in files.items()}}


def check_nothing_lost(place: Place, scenario: Scenario, more: tuple[str, ...]) -> None:
    """All that was in the work folder is there afterwards, with or without an output beside it."""
    before = contents(place.work)
    outcome = place.run((*scenario.command, *more))
    check_message(outcome.status, outcome.err, outcome.err)
    after = contents(place.work)
    lost = [name for name, data in before.items() if name not in after or after[name] != data]
    assert not lost, f"exit status {outcome.status}, {outcome.err}"
    if outcome.status == 1:
        assert after == before, "refused, and something is there that was not"
    assert place.inputs_are_whole(thoroughly=True)


@pytest.mark.parametrize("what", [*FOREIGN, "a file", "a link", "a link to nothing"])
def test_what_is_where_the_output_would_be_made_is_left_as_it_was(
    place: Place, scenario: Scenario, what
):
    partial = f"{scenario.output}.partial"
    theirs: dict[str, Contents] = {
        **{name: below(partial, files) for name, files in FOREIGN.items()},
        "a file": {partial: b"precious"},
        "a link": below("precious", FOREIGN["somebody's first version"]),
        "a link to nothing": {},
    }
    for more in ((), ("--overwrite",)):
        place.reset(theirs[what])
        if "link" in what:
            (place.work / partial).symlink_to("precious")
        check_nothing_lost(place, scenario, more)


def test_an_empty_folder_where_the_output_would_be_made_can_be_used(
    place: Place, scenario: Scenario
):
    """A merge that was killed right after it had made the folder leaves that."""
    place.end(scenario)
    place.reset({f"{scenario.output}.partial": None})
    assert place.run(scenario.command).status == 0
    check_whole(place, scenario, "in an empty folder")


@folders
def test_overwriting_never_deletes_a_file_that_dare_did_not_write(place: Place, scenario: Scenario):
    new = place.end(scenario).new
    for name, data in [*NOTES.items(), ("model.gguf", b"precious"), ("x.safetensors", b"precious")]:
        if data is not None:
            place.reset({**new, f"out/{name}": data})
            outcome = place.run((*scenario.command, "--overwrite"))
            check_message(outcome.status, outcome.err, outcome.err)
            kept = place.work / "out" / name
            assert kept.is_file(), f"{name} is gone, exit status {outcome.status}"
            assert kept.read_bytes() == data


@folders
def test_what_only_looks_like_our_leftovers_is_left_alone(place: Place, scenario: Scenario):
    new = place.end(scenario).new
    for name in ("out.replaced-1", "out.replaced-mine", "out.partial-1"):
        theirs = below(name, NOTES)
        place.reset({**new, **theirs})
        place.run((*scenario.command, "--overwrite"))
        after = contents(place.work)
        assert all(after.get(key) == data for key, data in theirs.items()), name


# ---------------------------------------------------------------- links in what we left

LINKS = {"a link": Path.symlink_to, "a hard link": Path.hardlink_to}


@pytest.mark.parametrize("link", LINKS.values(), ids=LINKS.keys())
@merges
def test_a_link_planted_in_a_stopped_merge_is_not_written_through(
    place: Place, scenario: Scenario, link
):
    calls = place.calls(scenario)
    stopped = played({}, calls[: len(calls) // 2]).now()
    theirs = contents(place.inputs)["base.safetensors"]
    for name, data in stopped.items():
        if data is None:
            continue
        place.reset(stopped)
        precious = place.folder / "precious"
        precious.write_bytes(theirs)
        (place.work / name).unlink()
        link(place.work / name, precious)
        outcome = place.run(scenario.command)
        check_message(outcome.status, outcome.err, outcome.err)
        assert precious.read_bytes() == theirs, f"{name}, exit status {outcome.status}"
        precious.unlink()


# ---------------------------------------------------------------- names


@pytest.mark.parametrize("name", ["out\udcff.safetensors", "out\udcff", "\x1b[31mout", "out\n"])
def test_an_odd_name_works_or_is_refused_before_any_work(place: Place, name):
    command = BY_NAME["directory"].arguments[: -2 if name.endswith("s") else None]
    place.reset({})
    outcome = place.run((*command, "--output", name))
    check_message(outcome.status, outcome.err, outcome.err)
    if outcome.status == 0:
        assert place.run(("verify", name)).status == 0
    else:
        assert contents(place.work) == {}, outcome.err
    assert "\x1b[31mout" not in outcome.out + outcome.err
