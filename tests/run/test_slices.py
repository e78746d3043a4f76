"""Slices of a merge, one after the other or beside each other, end in the bytes of one process."""

import json

import numpy as np
import pytest
from small_merges import base_and_tuned, stopping

import dare
from dare import DareWarning, InputError, OutputError, RecipeError
from dare.cli import main
from dare.output.sink import FileSink
from dare.output.targets import partial_folder
from dare.planning.slices import Division, Slice
from dare.run.engine import open_output
from dare.run.merging import Merge
from dare.run.slices import GoneError, MergeSlice, OneSlice
from helpers import listing, save, sha256, write_recipe

METHODS = {
    "dare+linear": {},
    "trim+ties": {"stages": {"trim": {"scope": "model"}}},
    "trim+breadcrumbs+linear": {"stages": {"trim": {"scope": "model", "keep_ratio": 0.5}}},
    "slerp": {},
    "tsv+svc": {},
}


def arrays():
    """Tensors of two chunks, and two models of them; one tensor is only compared."""
    shapes = {f"w{n}": (10_000, 60 + n) for n in range(4)} | {"ids": (700_000,)}
    return base_and_tuned(shapes, size=0.0003)


def recipe_for(folder, method="dare+linear", **settings):
    base, models = arrays()
    return write_recipe(folder, base, models, method=method, **METHODS[method], **settings)


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """The SHA-256 of the output of one process, by method."""
    digests = {}

    def find(method):
        if method not in digests:
            recipe = recipe_for(tmp_path_factory.mktemp("whole"), method)
            dare.merge(recipe)
            digests[method] = sha256(recipe.recipe.output)
        return digests[method]

    return find


def partial(recipe):
    return partial_folder(recipe.recipe.output)


def slice_output(recipe, text):
    """What a process that does this slice holds."""
    planned = dare.plan(recipe)
    part = Slice.parse(text)
    return open_output(MergeSlice(Merge(planned), part))


# ---------------------------------------------------------------- the same bytes


@pytest.mark.parametrize("method", METHODS)
def test_four_slices_in_any_order_give_the_bytes_of_one_process(tmp_path, expected, method):
    recipe = recipe_for(tmp_path, method)
    before = listing(tmp_path)
    for text in ("2/4", "4/4", "1/4"):
        done = dare.merge_slice(recipe, text)
        assert done.report is None
        assert done.unfinished
        assert not recipe.recipe.output.exists()
    done = dare.merge_slice(recipe, "3/4")
    assert done.unfinished == ()
    assert done.report.output == recipe.recipe.output
    assert sha256(recipe.recipe.output) == expected(method)
    assert dare.verify(recipe.recipe.output).ok
    assert set(listing(tmp_path)) - set(before) == {
        "out.safetensors",
        "out.safetensors.manifest.json",
    }


def test_the_manifest_is_that_of_one_process(tmp_path):
    base, models = arrays()
    made = {}
    for way in ("whole", "sliced"):
        recipe = write_recipe(tmp_path / way, base, models, shard_size="3MB")
        recipe = recipe.changed(output=tmp_path / way / "out")
        if way == "whole":
            report = dare.merge(recipe)
        else:
            reports = [dare.merge_slice(recipe, f"{n}/3") for n in (1, 2, 3)]
            report = reports[-1].report
            assert report.bytes_read == sum(r.bytes_read for r in reports)
        manifest = json.loads((recipe.recipe.output / "dare-manifest.json").read_text())
        for word in ("seconds", "resumed_chunks"):
            manifest["report"].pop(word)
        manifest.pop("check")
        manifest["files"].pop("README.md", None)
        made[way] = manifest, report.digests, listing(recipe.recipe.output)
    assert made["whole"] == made["sliced"]


# ---------------------------------------------------------------- interrupted


@pytest.mark.parametrize("method", ["dare+linear", "trim+ties"])
@pytest.mark.parametrize("then", ["the same", "a merge without slices", "another number"])
def test_what_slices_have_done_counts(tmp_path, expected, method, then):
    recipe = recipe_for(tmp_path, method)
    with stopping(1, OutputError):
        dare.merge_slice(recipe, "1/2")
    second = dare.merge_slice(recipe, "2/2")
    assert second.unfinished == (1,)
    if then == "the same":
        done = dare.merge_slice(recipe, "1/2")
        assert 0 < done.resumed_chunks < done.chunks
        assert done.report.resumed_chunks == done.resumed_chunks
    elif then == "another number":
        reports = [dare.merge_slice(recipe, f"{n}/3") for n in (1, 2, 3)]
        assert sum(report.resumed_chunks for report in reports) == second.chunks + 1
        assert reports[-1].report is not None
    else:
        assert dare.merge(recipe).resumed_chunks == second.chunks + 1
    assert sha256(recipe.recipe.output) == expected(method)
    assert not partial(recipe).exists()


def test_a_publication_that_failed_is_made_good_by_finish(tmp_path, expected, monkeypatch):
    recipe = recipe_for(tmp_path)
    dare.merge_slice(recipe, "1/2")

    def fail(*_given, **_more):
        raise OutputError("injected")

    with monkeypatch.context() as patch:
        patch.setattr("dare.output.output.give_name", fail)
        with pytest.raises(OutputError, match="injected"):
            dare.merge_slice(recipe, "2/2")
    report = dare.finish(recipe)
    assert report.resumed_chunks == 0
    assert report.bytes_read > 0
    assert sha256(recipe.recipe.output) == expected("dare+linear")
    assert not partial(recipe).exists()


def test_a_slice_that_finds_integers_that_differ_leaves_the_others_alone(tmp_path):
    base, models = arrays()
    models[1]["ids"] = models[1]["ids"] + 1
    recipe = write_recipe(tmp_path, base, models)
    outcomes = []
    for number in (1, 2, 3, 4):
        try:
            outcomes.append(dare.merge_slice(recipe, f"{number}/4").unfinished)
        except dare.MismatchError as error:
            outcomes.append(str(error))
    assert sum("ids: " in outcome for outcome in map(str, outcomes)) in (1, 2)
    assert partial(recipe).exists()
    with pytest.raises(OutputError, match="missing"):
        dare.finish(recipe)


# ---------------------------------------------------------------- finish


def test_finish_says_which_slices_are_missing_and_leaves_all_as_it_is(tmp_path, expected):
    recipe = recipe_for(tmp_path)
    for number in (1, 3):
        dare.merge_slice(recipe, f"{number}/4")
    before = {file: file.read_bytes() for file in partial(recipe).iterdir()}
    with pytest.raises(OutputError, match=r"2/4, 4/4; run"):
        dare.finish(recipe)
    assert before == {file: file.read_bytes() for file in partial(recipe).iterdir()}
    dare.merge_slice(recipe, "2/4")
    assert dare.merge_slice(recipe, "4/4").report is not None
    assert sha256(recipe.recipe.output) == expected("dare+linear")


# ---------------------------------------------------------------- side by side


def test_a_merge_and_finish_beside_running_slices_are_refused(tmp_path, expected):
    recipe = recipe_for(tmp_path)
    with slice_output(recipe, "1/2"):
        for refused in (dare.merge, dare.finish):
            with pytest.raises(OutputError, match=r"\(1/2\)"):
                refused(recipe)
        with pytest.raises(OutputError, match=r"\(1/2\)"):
            dare.merge(recipe, resume=False)
        assert dare.merge_slice(recipe, "2/2").unfinished == (1,)
    dare.merge_slice(recipe, "1/2")
    assert sha256(recipe.recipe.output) == expected("dare+linear")


@pytest.mark.parametrize(
    ("text", "other", "found"),
    [
        ("1/2", {}, r"1/2"),
        ("1/3", {}, r"2 slices \(1/2\)"),
        ("2/2", {"seed": 1}, r"another merge.*\(1/2\)"),
    ],
)
def test_a_slice_beside_running_ones_must_be_another_of_the_same(tmp_path, text, other, found):
    recipe = recipe_for(tmp_path)
    with slice_output(recipe, "1/2"), pytest.raises(OutputError, match=found):
        dare.merge_slice(recipe.changed(**other), text)


def test_a_slice_beside_a_merge_is_refused(tmp_path, monkeypatch):
    recipe = recipe_for(tmp_path)
    planned = dare.plan(recipe)
    monkeypatch.setattr("dare.run.slices.JOIN_SECONDS", 0.1)
    output = open_output(Merge(planned))
    with output, pytest.raises(OutputError, match="without slices"):
        dare.merge_slice(recipe, "1/2")


def test_another_merge_starts_over(tmp_path):
    recipe = recipe_for(tmp_path)
    other = recipe.changed(seed=1, verbose=True, delta_threshold=1.0)
    dare.merge_slice(recipe, "2/2")
    with pytest.raises(OutputError, match="another merge"):
        dare.finish(other)
    with pytest.warns(DareWarning, match="another merge"):
        assert dare.merge_slice(other, "1/2").unfinished == (2,)
    assert dare.merge_slice(other, "2/2").report is not None


def test_slices_that_read_other_files_are_refused(tmp_path):
    recipe = recipe_for(tmp_path)
    _, models = arrays()
    with slice_output(recipe, "2/2"):
        save(recipe.recipe.models[0].file, models[0])  # the same, and yet another file
        with pytest.raises(InputError, match="slice 2/2"):
            dare.merge_slice(recipe, "1/2")


def test_inputs_that_changed_in_between_are_not_mixed(tmp_path):
    recipe = recipe_for(tmp_path)
    dare.merge_slice(recipe, "1/2")
    _, models = arrays()
    save(recipe.recipe.models[0].file, {**models[0], "w0": models[0]["w0"] + np.float32(1)})
    with pytest.raises(OutputError, match="from 1/2"):
        dare.merge_slice(recipe, "2/2")
    assert dare.merge_slice(recipe, "1/2").report is not None
    whole = recipe.changed(output=tmp_path / "whole.safetensors")
    dare.merge(whole)
    assert sha256(recipe.recipe.output) == sha256(whole.recipe.output)


# ---------------------------------------------------------------- what is checked at the end


def hashed_by_finish(recipe, monkeypatch):
    """The chunks that are read back when the output is finished."""
    read = []
    real = FileSink.has

    def reading(self, record):
        read.append((record.tensor, record.chunk))
        return real(self, record)

    monkeypatch.setattr(FileSink, "has", reading)
    dare.finish(recipe)
    return read


@pytest.fixture
def all_but_the_name(tmp_path, monkeypatch):
    """Two slices that are complete, and not published."""

    def gone(*_given):
        raise GoneError

    recipe = recipe_for(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr("dare.run.slices.Finisher.claim", gone)
        for number in (1, 2):
            dare.merge_slice(recipe, f"{number}/2")
    return recipe


def chunk_at_border(recipe):
    planned = dare.plan(recipe)
    order = [(t.name, chunk) for t in planned.tensors for chunk in range(t.chunks)]
    division = Division(planned, 2)
    place = [division.owner(*key) for key in order].index(2)
    return order, place


def test_only_what_lies_near_another_slice_or_the_header_is_hashed_again(
    all_but_the_name, monkeypatch
):
    recipe = all_but_the_name
    order, border = chunk_at_border(recipe)
    read = hashed_by_finish(recipe, monkeypatch)
    assert sorted(read) == sorted([order[0], order[border - 1], order[border]])


def rot(recipe, key):
    """Change a byte in the middle of a chunk."""
    planned = dare.plan(recipe)
    files = FileSink(partial(recipe), planned.layout, {})
    # the header has other metadata, so the place is found from the end
    name, chunk = key
    with (partial(recipe) / recipe.recipe.output.name).open("r+b") as file:
        size = file.seek(0, 2)
        info = files.places[name][1]
        end = max(i.start + i.nbytes for _, i in files.places.values())
        file.seek(size - (end - info.start) + chunk * (1 << 19) * info.dtype.itemsize + 100)
        (byte,) = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte ^ 1]))


def test_a_page_that_another_machine_wrote_over_is_noticed(all_but_the_name, expected):
    recipe = all_but_the_name
    order, border = chunk_at_border(recipe)
    rot(recipe, order[border])
    with pytest.raises(OutputError, match="from 2/2"):
        dare.finish(recipe)
    assert dare.merge_slice(recipe, "2/2").report is not None
    assert sha256(recipe.recipe.output) == expected("dare+linear")


def test_what_a_slice_did_not_sync_is_hashed_again(tmp_path, expected, monkeypatch):
    recipe = recipe_for(tmp_path)
    monkeypatch.setattr(OneSlice, "end", lambda _self, _bytes_read: None)
    for number in (1, 2):
        assert dare.merge_slice(recipe, f"{number}/2").unfinished
    order, _ = chunk_at_border(recipe)
    assert sorted(hashed_by_finish(recipe, monkeypatch)) == sorted(order)
    assert sha256(recipe.recipe.output) == expected("dare+linear")


# ---------------------------------------------------------------- the command


def test_the_command_says_who_is_not_done_and_then_reports(tmp_path, capsys):
    recipe = recipe_for(tmp_path)
    (tmp_path / "recipe.toml").write_text(recipe.to_toml())
    command = [str(tmp_path / "recipe.toml"), "--verbose", "--slice"]
    assert main([*command, "1/2"]) == 0
    assert "not done yet: 2" in capsys.readouterr().out
    assert main(["finish", command[0]]) == 1
    assert "from 2/2" in capsys.readouterr().err
    assert main([*command, "1/2", "--no-resume"]) == 2
    assert "delete the folder" in capsys.readouterr().err
    assert main([*command, "2/2", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["slice"] == "2/2"
    assert document["unfinished"] == []
    assert document["report"]["output"] == str(recipe.recipe.output)


@pytest.mark.parametrize(
    ("text", "given", "remedy"),
    [
        *((text, {}, "NUMBER/OF") for text in ("0/4", "5/4", "3", "a/b", "-1/4", "1/20000", "")),
        ("1/2", {"cluster": "auto"}, "cluster = .*leave it out"),
    ],
)
def test_a_slice_that_makes_no_sense_is_refused(tmp_path, text, given, remedy):
    with pytest.raises(RecipeError, match=remedy):
        dare.merge_slice(recipe_for(tmp_path, **given), text)
