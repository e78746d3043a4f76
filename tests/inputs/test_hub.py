from __future__ import annotations

import errno
import json
import os
import re
import sys
from pathlib import Path

import numpy as np
import pytest

import dare
from dare.errors import DareError, InputError, install_command
from dare.inputs.hub import Resolved, resolve
from dare.inputs.opening import open_model
from dare.stores.locations import looks_like_name, to_path
from helpers import save, save_shards

WEIGHTS = {"a": np.arange(3000, dtype=np.float32), "b": np.ones((2, 4), np.float32)}


def folder_bytes(folder):
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


SMALL = {"config.json": b'{"model_type": "tiny"}', "README.md": b"---\nlicense: mit\n---\n"}
ALL_SMALL = {
    **SMALL,
    "generation_config.json": b'{"do_sample": false}',
    "tokenizer.json": b'{"version": "1.0"}',
    "additional_chat_templates/tool.jinja": b"{{ tools }}",
    "tokenizer.model": b"pieces",
    "modeling_tiny.py": b"import os",
    "1_Pooling/config.json": b'{"pooling": "cls"}',
}
UNWANTED = {
    ".gitattributes": b"* lfs",
    "pytorch_model.bin": b"pickle",
    "model-q4.gguf": b"gguf",
    "onnx/config.json": b"{}",
    "tools/convert.py": b"import sys",
}


@pytest.fixture
def single(tmp_path):
    """The files of a repository with one file of weights, and others."""
    save(tmp_path / "single" / "model.safetensors", WEIGHTS)
    weights = folder_bytes(tmp_path / "single")
    return {**weights, **SMALL, **UNWANTED, "consolidated.safetensors": b"the same again"}


@pytest.fixture
def sharded(tmp_path):
    save_shards(tmp_path / "sharded", WEIGHTS, 2)
    return {**folder_bytes(tmp_path / "sharded"), **SMALL, **UNWANTED}


def fetch(text):
    return resolve(Path(text), verbose=False)


def failure(text):
    with pytest.raises(InputError) as caught:
        fetch(text)
    return str(caught.value)


# ---------------------------------------------------------------- what is a name


NAMES = [
    *("org/name", "org/name@main", "org/name@refs/pr/4", "org/name@" + "0" * 40),
    *("org/name/sub folder/deep.er@v1.0", "org/name/model.gguf@main"),
]
NO_NAMES = [
    *("", "name", "/org/name@main", "../name", "org/name/sub", "org/model.safetensors"),
    *("runs/2024@3/model.safetensors", "org/name@a@b", "org/name@../../x", "org/name/../x@main"),
    *("org/-name", "org/na--me", "org/name.git", "org\\name", "org/" + "n" * 97, "a\0b/c"),
    "org/name\n",
]


@pytest.mark.parametrize("text", [*NAMES, *NO_NAMES])
def test_what_is_a_name(text):
    assert looks_like_name(text) == (text in NAMES)


def test_a_path_that_is_no_name_is_left_alone(tmp_path):
    for text in (str(tmp_path / "nothing"), "nothing.safetensors", "a\0b", "n" * 300):
        assert fetch(text) == Resolved(Path(text))


def test_what_exists_here_wins(hub, single):
    hub.add("org/name", single)
    Path("org/name").mkdir(parents=True)
    resolved = fetch("org/name")
    assert resolved == Resolved(Path("org/name"), None, None)
    assert resolved.pinned == Path("org/name")
    assert hub.asked == []


def test_a_slip_of_the_pen_is_not_sent_to_the_hub(hub, single):
    commit = hub.add("models/bas", single)
    Path("models/base").mkdir(parents=True)
    assert failure("models/bas").endswith("write models/bas@main")
    assert hub.asked == []
    assert fetch("models/bas@main").commit == commit


def test_without_the_client_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    message = failure("org/name")
    assert message.startswith("org/name: no such file or folder")
    assert message.endswith(install_command("hf"))


# ---------------------------------------------------------------- fetching


def test_only_what_a_merge_needs_is_fetched(hub, single):
    commit = hub.add("org/name", {**single, **ALL_SMALL})
    resolved = fetch("org/name")
    assert (resolved.repo, resolved.commit) == ("org/name", commit)
    assert resolved.pinned == Path(f"org/name@{commit}")
    wanted = {**ALL_SMALL, "model.safetensors": single["model.safetensors"]}
    assert folder_bytes(resolved.path) == wanted
    assert hub.downloads() == sorted(Path(file).name for file in wanted)
    source = open_model(resolved.path)
    assert {name: info.shape for name, info in source.tensors.items()} == {
        "a": (3000,),
        "b": (2, 4),
    }


def test_the_shards_that_the_index_names_are_fetched(hub, sharded):
    hub.add("org/name", {**sharded, "model.safetensors": b"an old one", "x.safetensors": b"x"})
    resolved = fetch("org/name")
    files = {path.name for path in resolved.path.glob("*.safetensors")}
    assert files == {"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"}
    assert set(open_model(resolved.path).tensors) == set(WEIGHTS)


def test_adapters_and_a_single_file_of_any_name_are_fetched(hub):
    adapter = {"adapter_config.json": b"{}", "adapter_model.safetensors": b"w", "README.md": b""}
    hub.add("org/name", {**adapter, "adapter_model.bin": b"", "optimizer.safetensors": b"o"})
    assert folder_bytes(fetch("org/name").path) == adapter
    commit = hub.add("org/odd", {"odd.safetensors": b"w", "deep/model.safetensors": b"d"})
    assert folder_bytes(fetch("org/odd").path) == {"odd.safetensors": b"w"}
    hub.asked.clear()
    assert folder_bytes(fetch(f"org/odd@{commit}").path) == {"odd.safetensors": b"w"}
    assert hub.asked == []


def test_a_folder_inside_is_fetched(hub, single):
    inner = {f"runs/[1]/{file}": data for file, data in single.items()}
    commit = hub.add("org/name", {**inner, "config.json": b"outer", "README.md": b"licence"})
    resolved = fetch("org/name/runs/[1]@main")
    assert resolved.path.parts[-3:] == (commit, "runs", "[1]")
    assert resolved.pinned == Path(f"org/name/runs/[1]@{commit}")
    assert set(folder_bytes(resolved.path)) == {*SMALL, "model.safetensors"}
    outside = {path.name for path in resolved.path.parents[1].iterdir()}
    assert outside == {"runs", "README.md"}


def test_the_components_of_a_pipeline_are_fetched(hub, single, sharded, monkeypatch):
    weights = single["model.safetensors"]
    wanted = {
        "model_index.json": b'{"unet": ["d", "U"], "vae": ["d", "V"], "scheduler": ["d", "S"]}',
        "scheduler/scheduler_config.json": b"{}",
        "vae/config.json": b"{}",
        "vae/diffusion_pytorch_model.safetensors": weights,
        **{f"unet/{file}": data for file, data in sharded.items() if file not in UNWANTED},
    }
    others = {"vae/diffusion_pytorch_model.fp16.safetensors": weights, "v1.safetensors": weights}
    others["image_encoder/model.safetensors"] = weights
    hub.add("org/name", {**wanted, **others, "vae/diffusion_pytorch_model.bin": b"pickle"})
    assert set(open_model(resolve(to_path("hf://org/name"), verbose=False).path).tensors) == {
        f"{part}/{name}" for part in ("unet", "vae") for name in WEIGHTS
    }
    resolved = fetch("org/name")
    assert folder_bytes(resolved.path) == wanted
    assert len(open_model(resolved.path).tensors) == 2 * len(WEIGHTS)
    go_offline(monkeypatch)
    assert fetch("org/name") == resolved


def test_a_file_inside_is_fetched_with_all_of_its_parts(hub):
    files = {"a.safetensors": b"a", "b.safetensors": b"b", "config.json": b"{}"}
    parts = {f"q/m-0000{number}-of-00002.gguf": bytes([number]) for number in (1, 2)}
    hub.add("org/name", {**files, **parts, "q/m-00001-of-00003.gguf": b"", "q/other.gguf": b"o"})
    resolved = fetch("org/name/b.safetensors@main")
    assert resolved.path.read_bytes() == b"b"
    assert folder_bytes(resolved.path.parent) == {"b.safetensors": b"b", "config.json": b"{}"}
    first = fetch("org/name/q/m-00001-of-00002.gguf@main").path
    assert {f"q/{path.name}": path.read_bytes() for path in first.parent.iterdir()} == parts
    assert fetch("org/name/q/other.gguf@main").path.read_bytes() == b"o"


def test_what_is_not_in_the_repository(hub, sharded):
    commit = hub.add("org/two", {"a.safetensors": b"a", "b.safetensors": b"b", "README.md": b""})
    assert failure("org/two").endswith("org/two/a.safetensors@main")
    assert failure("org/two/c.safetensors@main") == (
        f"org/two/c.safetensors@main: the hub has no c.safetensors at commit {commit}"
    )
    hub.add("org/bin", {"pytorch_model.bin": b"", "config.json": b"{}"})
    assert failure("org/bin").endswith("org/bin/pytorch_model.bin@main")
    assert "as in org/two/nowhere/FOLDER@main" in failure("org/two/nowhere@main")
    del sharded["model-00002-of-00002.safetensors"]
    hub.add("org/cut", sharded)
    assert "the hub has no model-00002-of-00002.safetensors at commit" in failure("org/cut")


def test_revisions(hub, single):
    first = hub.add("org/name", single)
    second = hub.add("org/name", {**single, "config.json": b"{}"}, "dev/new")
    assert fetch("org/name").commit == first
    assert fetch("org/name@main").commit == first
    assert fetch("org/name@dev/new").commit == second
    assert fetch(f"org/name@{second}").commit == second
    assert (fetch(f"org/name@{second}").path / "config.json").read_bytes() == b"{}"


def test_the_second_time_nothing_is_fetched(hub, sharded):
    commit = hub.add("org/name", sharded)
    resolved = fetch("org/name")
    hub.asked.clear()
    assert fetch("org/name") == resolved
    assert hub.asked == ["GET /api/models/org/name/revision/main"]  # has it moved?
    hub.asked.clear()
    assert fetch(f"org/name@{commit}") == resolved
    assert hub.asked == []


# ---------------------------------------------------------------- without a network


def go_offline(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def test_offline_the_cache_is_used(hub, sharded, monkeypatch):
    hub.add("org/name", sharded)
    odd = hub.add("org/odd", {"odd.safetensors": b"w", "config.json": b"{}"})
    resolved = fetch("org/name")
    fetch("org/odd")
    hub.asked.clear()
    go_offline(monkeypatch)
    assert fetch("org/name") == resolved
    assert fetch(resolved.pinned.as_posix()) == resolved
    assert fetch("org/odd").commit == odd
    assert hub.asked == []


def test_offline_what_is_not_there_cannot_be_had_and_is_named(hub, sharded, monkeypatch, capsys):
    hub.add("org/name", sharded)
    resolved = fetch("org/name")
    shard = "model-00002-of-00002.safetensors"
    (resolved.path / shard).unlink()
    hub.asked.clear()
    go_offline(monkeypatch)
    for name in ("org/other", "org/name@dev", f"org/name@{resolved.commit}"):
        assert "HF_HUB_OFFLINE" in failure(name)
    with pytest.raises(InputError) as caught:
        resolve(Path("org/name"), verbose=True)
    how = f"hf download org/name {shard} --revision {resolved.commit}"
    assert str(caught.value).endswith(f"with HF_HUB_OFFLINE=0, run {how}")
    assert hub.asked == []
    assert capsys.readouterr().err == ""


def test_no_connection(hub, single):
    hub.add("org/name", single)
    resolved = fetch("org/name")
    hub.stop()
    assert fetch("org/name") == resolved  # the cache is better than nothing
    assert re.fullmatch(
        r"org/other: no such file or folder, and it could not be fetched from the hub: "
        r"ConnectError: .*refused.*; check the network and run the command again; "
        r"complete files are not fetched again",
        failure("org/other"),
    )


# ---------------------------------------------------------------- refusals


def test_no_such_model_or_revision(hub, single):
    hub.add("org/name", single)
    assert "HF_TOKEN" in failure("org/nmae")
    for revision in ("v9", "0" * 40):
        assert failure(f"org/name@{revision}").endswith("a branch, a tag or a full commit hash")


@pytest.mark.parametrize("code", ["GatedRepo", ""])
@pytest.mark.parametrize(
    ("status", "place"), [(401, "/api/models/org/name"), (403, "/org/name/resolve")]
)
def test_models_that_not_everybody_gets(hub, single, status, place, code):
    hub.add("org/name", single)
    hub.refusals[place] = (status, code)
    message = failure("org/name")
    assert f"({status})" in message
    assert ("terms" in message) is bool(code)
    assert "HF_TOKEN" in message


@pytest.mark.parametrize("place", ["/api/models/org/name", "/large"])
def test_a_hub_out_of_order(hub, single, place):
    commit = hub.add("org/name", single)
    hub.refusals[place] = (500, "")
    assert "(500)" in failure("org/name")
    hub.refusals.clear()
    assert fetch("org/name").commit == commit


def test_a_cache_that_cannot_take_it(hub, single, monkeypatch):
    def write(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/cache/blobs/1.incomplete")

    hub.add("org/name", single)
    monkeypatch.setattr("huggingface_hub.file_download.http_get", write)
    message = failure("org/name")
    assert "/cache/blobs/1.incomplete" in message
    assert "HF_HOME" in message


# ---------------------------------------------------------------- what is wrong here comes first


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("missing", "nowhere.safetensors: no such file"),
        ("slip", "here/modle: is not in ./here"),
        ("empty", "here/empty: has no safetensors file"),
        ("shard", "model-00002-of-00002.safetensors: no such file"),
        ("gguf", "here/model.gguf"),
        ("adapter", "here/adapter: has no adapter_model.safetensors"),
        ("output", "here/out: exists already"),
    ],
)
def test_faults_of_this_machine_come_before_the_hub_is_asked(
    hub, sharded, tmp_path, monkeypatch, fault, message
):
    hub.add("org/name", sharded)
    monkeypatch.chdir(tmp_path)
    here = tmp_path / "here"
    places = {"missing": "nowhere.safetensors", "slip": "here/modle", "gguf": "here/model.gguf"}
    good = save_shards(here / "shard", WEIGHTS, 2)
    if fault == "shard":
        (good / "model-00002-of-00002.safetensors").unlink()
    for folder in ("empty", "adapter", "out"):
        (here / folder).mkdir()
    adapter = {"peft_type": "LORA", "r": 1, "lora_alpha": 1}
    (here / "adapter" / "adapter_config.json").write_text(json.dumps(adapter))
    (here / "model.gguf").write_bytes(b"GGUF")
    place = places.get(fault, "here/shard" if fault == "output" else f"here/{fault}")
    output = "here/out" if fault == "output" else "here/new"
    with pytest.raises(DareError, match=re.escape(message)):
        dare.merge(base="org/name", models=[place], output=output, verbose=False)
    assert hub.asked == []


def test_an_output_that_may_be_replaced_does_not_keep_models_from_being_fetched(
    hub, sharded, tmp_path, monkeypatch
):
    hub.add("org/name", sharded)
    monkeypatch.chdir(tmp_path)
    asked = {"base": "org/name", "models": [save(tmp_path / "m.safetensors", WEIGHTS)]}
    for overwrite in (False, True):
        dare.merge(**asked, output="out", overwrite=overwrite, verbose=False)
    assert dare.verify("out").ok
