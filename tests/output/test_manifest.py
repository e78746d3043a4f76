from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

import dare as package
from dare.api import load_recipe, merge
from dare.errors import DareError, InputError, VerificationError
from dare.output.receipt import find_manifest, read_manifest
from dare.output.targets import manifest_path, seal
from dare.recipe.recipe import ModelEntry, Recipe, Request, TensorRule
from dare.tensors.chunks import file_digest
from helpers import listing, save, save_shards, sha256, write_recipe

BASE = {
    "embed": np.arange(8, dtype=np.float32).reshape(4, 2),
    "w": np.arange(300, dtype=np.float32),
    "n": np.array([5], np.int64),
}
MATH = {**BASE, "w": BASE["w"] + 1, "embed": BASE["embed"] * 2}
CODE = {**BASE, "w": BASE["w"] - 2}


def write(folder: Path, **settings) -> Recipe:
    return write_recipe(folder, BASE, [MATH, CODE], **settings)


def to(recipe: Recipe, output: Path) -> Recipe:
    return recipe.changed(output=output, verbose=False)


def embedded(path: Path) -> dict[str, object]:
    with safe_open(path, "np") as file:
        return json.loads(file.metadata()["dare"])


# ---------------------------------------------------------------- what is embedded


def test_the_embedded_manifest_says_what_was_done(tmp_path):
    recipe = write(
        tmp_path,
        method="dare+ties",
        stages={"dare": {"drop_rate": 0.5}},
        models=[
            ModelEntry(file=save(tmp_path / "math.safetensors", MATH), weight=2.0),
            ModelEntry(file=save(tmp_path / "code.safetensors", CODE), settings={"rescale": "l1"}),
        ],
        tensors=[TensorRule(match="w*", settings={"drop_rate": 0.25})],
        embedding_drop_rate=0.0,
        seed=7,
        scale=0.5,
    )
    digests = merge(recipe).digests
    found = embedded(recipe.recipe.output)
    check = found.pop("check")
    assert len(check) == 32
    assert found == {
        "format": 1,
        "mask": 1,
        "method": "dare+ties",
        "stages": [
            {"drop_rate": 0.5, "rescale": True},
            {"keep_ratio": None, "divide_by": "weights"},
        ],
        "embedding_drop_rate": 0.0,
        "tensors": [[["w*"], {"drop_rate": 0.25}]],
        "scale": 0.5,
        "dtype": None,
        "base": digests.base,
        "models": [
            {"digest": digests.models[0], "weight": 2.0, "seed": 7, "settings": {}},
            {"digest": digests.models[1], "weight": 1.0, "seed": 8, "settings": {"rescale": "l1"}},
        ],
        "output": digests.output,
    }


def test_the_bytes_depend_on_nothing_but_recipe_and_weights(tmp_path):
    first = write(tmp_path)
    merge(first)
    save_shards(tmp_path / "shards", BASE, 3)
    second = Request.of(
        base=tmp_path / "shards",
        models=[save_shards(tmp_path / "math", MATH, 2), first.recipe.models[1].file],
        output=tmp_path / "elsewhere" / "other.safetensors",
        verbose=False,
        threads=2,
        max_memory="64MiB",
    )
    merge(second)
    assert sha256(second.recipe.output) == sha256(first.recipe.output)


# ---------------------------------------------------------------- what lies beside


def test_the_manifest_beside_adds_files_versions_and_figures(tmp_path):
    recipe = write(tmp_path)
    report = merge(recipe)
    found = read_manifest(manifest_path(recipe.recipe.output))
    inside = embedded(recipe.recipe.output)
    del inside["check"]
    assert {key: found[key] for key in inside} == inside
    assert found["recipe"] == {
        "threads": 1,
        "verbose": False,
        "models": {
            "base_file": "../base.safetensors",
            "merge_files": ["../model0.safetensors", "../model1.safetensors"],
        },
    }
    assert found["versions"]["dare"] == package.__version__
    assert set(found["versions"]) == {"dare", "python", "numpy"}
    assert found["digests"] == {
        "base": report.digests.base_tensors,
        "models": list(report.digests.model_tensors),
        "output": report.digests.output_tensors,
    }
    assert set(found["digests"]["output"]) == {"embed", "w", "n"}
    assert found["report"]["bytes_written"] == 32 + 1200 + 8


@pytest.mark.parametrize(
    ("path", "manifest"),
    [
        ("out.safetensors", "out.safetensors.manifest.json"),
        ("out.safetensors.manifest.json", "out.safetensors.manifest.json"),
        ("any.json", "any.json"),
        ("recipe.toml", None),
    ],
)
def test_a_path_stands_for_its_manifest(path, manifest):
    assert find_manifest(Path(path)) == (manifest and Path(manifest))


# ---------------------------------------------------------------- doing it again


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"method": "dare+ties", "stages": {"ties": {"keep_ratio": 0.5}}, "dtype": "F16"},
        {"method": "slerp", "stages": {"slerp": {"t": 0.25}}, "scale": 0.5},
        {"embedding_drop_rate": 0.0, "seed": 0, "stages": {"dare": {"rescale": "l1"}}},
    ],
)
def test_a_merge_is_repeated_from_its_output_or_its_manifest(tmp_path, settings):
    recipe = write(tmp_path, **settings)
    merge(recipe)
    for number, stands_for in enumerate(
        (recipe.recipe.output, manifest_path(recipe.recipe.output))
    ):
        again = to(load_recipe(stands_for), tmp_path / f"again{number}.safetensors")
        merge(again)
        assert sha256(again.recipe.output) == sha256(recipe.recipe.output)


@pytest.mark.parametrize("changed", ["base", "model1"])
def test_a_changed_input_is_refused_when_repeating(tmp_path, changed):
    recipe = write(tmp_path)
    merge(recipe)
    save(tmp_path / f"{changed}.safetensors", {**BASE, "w": BASE["w"] + 5})
    again = to(load_recipe(recipe.recipe.output), tmp_path / "again.safetensors")
    with pytest.raises(InputError, match=f"{changed}.safetensors: "):
        merge(again)
    assert not again.recipe.output.exists()


def test_a_recipe_that_was_edited_is_not_repeated(tmp_path):
    recipe = write(tmp_path)
    merge(recipe)
    path = manifest_path(recipe.recipe.output)
    manifest = read_manifest(path)
    manifest["recipe"]["dare"] = {"drop_rate": 0.5}
    path.write_bytes(json.dumps(manifest, indent=1).encode())
    with pytest.raises(InputError, match="changed"):
        load_recipe(recipe.recipe.output)
    path.write_bytes(seal(manifest, {}))  # as somebody would who took care
    again = to(load_recipe(recipe.recipe.output), tmp_path / "again.safetensors")
    with pytest.raises(VerificationError, match="manifest names"):
        merge(again)
    assert [name for name in listing(tmp_path) if name.startswith("again")] == []


# ---------------------------------------------------------------- a stranger's manifest


def reseal(output: Path, edit, table: str = "recipe") -> None:
    """Edit a table of a manifest as somebody would who also mends its seal."""
    manifest = read_manifest(manifest_path(output))
    edit(manifest[table])
    manifest_path(output).write_bytes(seal(manifest, manifest["files"]))


BAIT = "http://127.0.0.1:9/bait"


def with_inner(**merge):
    return lambda r: [r.update(merges={"m": merge}), r["models"]["merge_files"].append("m")]


@pytest.mark.parametrize(
    ("edit", "named"),
    [
        (lambda r: r.update(cluster="ray://127.0.0.1:9"), "cluster"),
        (lambda r: r.update(scratch="/tmp"), "scratch"),
        (lambda r: r.update(backend="reference"), "device"),
        (lambda r: r.update(allow_pickle=True), "allow_pickle.*--allow-pickle"),
        (lambda r: r.update(chat_template="/etc/hosts"), "chat_template"),
        (lambda r: r.update(chat_template="../secret"), "chat_template"),
        (lambda r: r.update(chat_template=BAIT), "chat_template"),
        (lambda r: r.update(search={"trials": 5}), "search"),
        (lambda r: r.update(input_digests=["0"] * 3), "input_digests"),
        (lambda r: r.update(stage="clip.py"), "stage"),
        (lambda r: r["models"].update(output_file="/tmp/x"), "output"),
        (lambda r: r["models"].update(base_file=BAIT), "bait.*--base"),
        (lambda r: r["models"].update(base_file="HTTP:/127.0.0.1:9/bait"), "bait.*--base"),
        (lambda r: r["models"].update(base_file="s3://bucket/bait"), "bait.*--base"),
        (lambda r: r["models"].update(base_file="/etc/hosts"), "hosts.*--base"),
        (lambda r: r["models"].update(base_file="~/bait"), "bait.*--base"),
        (lambda r: r["models"]["merge_files"].append({"recipe": "/etc/hosts"}), "recipe"),
        (with_inner(base=BAIT, models=["a"]), "bait"),
        (with_inner(base="a", models=["a"], allow_pickle=True), "allow_pickle"),
        (with_inner(base="a", models=["a"], cluster="auto"), "cluster"),
    ],
)
def test_what_no_manifest_records_is_refused_by_name(tmp_path, edit, named):
    recipe = write(tmp_path)
    merge(recipe)
    reseal(recipe.recipe.output, edit)
    with pytest.raises(DareError, match=rf"out.safetensors.manifest.json: .*{named}"):
        load_recipe(recipe.recipe.output)


def test_a_template_that_is_no_text_is_repeated_by_its_name_or_given_again(tmp_path):
    (tmp_path / "own.jinja").write_text("{{ own }}")
    files = {"chatml": {}, str(tmp_path / "own.jinja"): {"chat_template": "{{ own }}"}}
    for template, given in files.items():
        recipe = write(tmp_path, chat_template=template)
        merge(recipe, overwrite=True)
        again = tmp_path / "again.safetensors"
        merge(recipe.recipe.output, output=again, overwrite=True, verbose=False, **given)
        assert sha256(again) == sha256(recipe.recipe.output)


def test_what_a_user_gives_again_is_not_taken_from_the_manifest(tmp_path):
    recipe = write(tmp_path)
    merge(recipe)
    output, files = recipe.recipe.output, [entry.file for entry in recipe.recipe.models]
    edits = {"base_file": BAIT, "merge_files": [BAIT, "s3://bucket/bait"]}
    reseal(output, lambda r: r.update(allow_pickle=True, threads=10**9, models=edits))
    given = {"base": recipe.recipe.base, "models": files, "allow_pickle": True, "verbose": False}
    merge(output, output=tmp_path / "again.safetensors", **given)
    assert sha256(tmp_path / "again.safetensors") == sha256(output)
    for lacking in given.keys() - {"verbose"}:
        rest = {name: value for name, value in given.items() if name != lacking}
        with pytest.raises(InputError, match=lacking if lacking == "allow_pickle" else "bait"):
            merge(output, output=tmp_path / "never.safetensors", **rest)


@pytest.mark.parametrize(
    "name", ["../x", "/etc/hosts", "a/../../x", "..\\x", "C:\\x", "\\\\host\\x", ".."]
)
def test_files_outside_an_output_are_refused_by_name(tmp_path, name):
    recipe = to(write(tmp_path), tmp_path / "out")
    merge(recipe)
    (tmp_path / "x").write_bytes(b"mine")
    manifest = read_manifest(manifest_path(tmp_path / "out"))
    files = {**manifest["files"], name: file_digest(tmp_path / "x")}
    manifest_path(tmp_path / "out").write_bytes(seal(manifest, files))
    (problem,) = package.verify(tmp_path / "out").problems
    assert ascii(name) in str(problem)
    with pytest.raises(DareError, match="files"):
        merge(recipe, overwrite=True)
    assert (tmp_path / "x").read_bytes() == b"mine"
    (tmp_path / "out" / "y").symlink_to(tmp_path / "x")  # which leads out, and is not read
    files = {**manifest["files"], "y": file_digest(tmp_path / "x")}
    manifest_path(tmp_path / "out").write_bytes(seal(manifest, files))
    assert [p.code for p in package.verify(tmp_path / "out").problems] == ["unreadable"]


# ---------------------------------------------------------------- manifests that are none


@pytest.mark.parametrize("text", ["", "{", "[]", "5", "{}", "[" * 100_000, '{"weight_map":{}}'])
def test_what_is_no_manifest_is_refused(tmp_path, text):
    path = tmp_path / "some.json"
    path.write_text(text)
    with pytest.raises(
        InputError, match=r"some.json: (the manifest is not valid|is not a manifest)"
    ):
        load_recipe(path)


@pytest.mark.parametrize(
    "edit",
    [
        lambda manifest: manifest.pop("base"),
        lambda manifest: manifest["models"][0].pop("digest"),
        lambda manifest: manifest.update(models=[5]),
        lambda manifest: manifest.update(recipe=5),
        lambda manifest: manifest["models"].pop(),
        lambda manifest: manifest["recipe"].pop("models"),
    ],
)
def test_a_damaged_manifest_is_refused(tmp_path, edit):
    recipe = write(tmp_path)
    merge(recipe)
    manifest = read_manifest(manifest_path(recipe.recipe.output))
    edit(manifest)
    manifest_path(recipe.recipe.output).write_bytes(seal(manifest, {}))
    with pytest.raises(DareError, match=r"out.safetensors.manifest.json: "):
        load_recipe(recipe.recipe.output)


def test_a_chain_of_random_stages_says_how_the_later_ones_draw(tmp_path):
    two = write(tmp_path, method="dare+darex+linear", stages={"darex": {"drop_rate": [0.5, 0.6]}})
    merge(two)
    path = manifest_path(two.recipe.output)
    manifest = read_manifest(path)
    assert manifest["mask"] == manifest["later_draws"] == 1
    assert load_recipe(two.recipe.output).recipe.method == "dare+darex+linear"
