"""Bases, models and adapters in stores: the same bytes as from files of this machine."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from writers import write_adapter, write_gguf

import dare
from dare.api import make_request, merge, plan
from dare.cli import main
from dare.deltas.compressing import compress
from dare.errors import InputError, RecipeError
from dare.inputs.opening import open_inputs, open_model
from dare.inputs.sources import open_source
from dare.recipe.recipe import Recipe, Request
from dare.stores import reading
from dare.stores.locations import StorePath, to_path
from dare.tensors.dtypes import STORAGE_TYPES
from dare.tensors.header import build_header
from file_server import Hollow
from helpers import read_tensor, save, save_shards, sha256

CONFIG = {"model_type": "tiny", "architectures": ["Tiny"]}
SHAPES = {
    "embed.weight": (64, 32),
    "layers.0.w": (700, 900),
    "layers.1.w": (300, 500),
    "norm": (9,),
}


def arrays(seed, base=None):
    random = np.random.default_rng(seed)
    noise = {n: random.standard_normal(s).astype(np.float32) * 0.01 for n, s in SHAPES.items()}
    return {n: (v + (base[n] if base else 0)).astype(np.float16) for n, v in noise.items()}


@pytest.fixture
def models(tmp_path):
    """A directory in shards, a file, and a directory with one file, in a folder."""
    base = arrays(0)
    folder = save_shards(tmp_path / "in" / "base", base, 3)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "tokenizer.json").write_text('{"version": "1.0", "model": {"vocab": {}}}')
    (folder / "README.md").write_text("---\nlicense: mit\n---\n")
    save(tmp_path / "in" / "math.safetensors", arrays(1, base))
    save(tmp_path / "in" / "code" / "model.safetensors", arrays(2, base))
    return tmp_path / "in"


def recipe(models, output, places=None, **more):
    """A merge of all three, of which some lie elsewhere."""
    names = ("base", "math.safetensors", "code")
    base, *tuned = ((places or {}).get(name, models / name) for name in names)
    return Request.of(base=base, models=tuned, output=output, verbose=False, **more)


def served(web, models):
    """All of them on the web."""
    url = web.add_folder("in", models)
    return {name: f"{url}/{name}" for name in ("base", "math.safetensors", "code")}


def files_of(folder):
    return {
        path.name: sha256(path)
        for path in folder.iterdir()
        if path.name not in ("README.md", "dare-manifest.json")  # which tell where inputs lie
    }


# ---------------------------------------------------------------- merging


@pytest.mark.parametrize("method", ["dare+linear", "trim+ties"])
def test_a_merge_from_a_store_has_the_bytes_of_a_local_one(web, models, tmp_path, method):
    merge(recipe(models, tmp_path / "here", method=method))
    places = served(web, models)
    del places["code"]  # one of them is local
    merge(recipe(models, tmp_path / "there", places, method=method))
    here, there = files_of(tmp_path / "here"), files_of(tmp_path / "there")
    assert here == there
    assert {"config.json", "tokenizer.json", "model.safetensors"} <= set(there)
    assert dare.verify(tmp_path / "there").ok
    size = len(web.content["in/math.safetensors"])
    passes = 1 if method == "dare+linear" else 3
    assert web.sent_bytes["in/math.safetensors"] < (passes + 0.5) * size  # a glance and headers


def test_the_manifest_tells_addresses_and_repeats_from_them(web, models, tmp_path):
    places = {name: f"{url}?sig=topsecret" for name, url in served(web, models).items()}
    web.key = "sig=topsecret"
    merge(recipe(models, tmp_path / "out", places))
    for path in (tmp_path / "out").iterdir():
        assert b"topsecret" not in path.read_bytes()
    told = json.loads((tmp_path / "out" / "dare-manifest.json").read_bytes())["recipe"]["models"]
    assert told["base_file"] == f"{web.url}/in/base"
    assert told["merge_files"] == [f"{web.url}/in/math.safetensors", f"{web.url}/in/code"]
    card = (tmp_path / "out" / "README.md").read_text()
    assert f"{web.url}/in/base" in card
    assert "license: mit" in card
    web.key = ""
    with pytest.raises(InputError, match=rf"{web.url}/in/base: .*--base"):
        dare.load_recipe(tmp_path / "out")  # it could be a stranger's
    given = {"base": places["base"], "models": [places["math.safetensors"], places["code"]]}
    again = make_request(tmp_path / "out", **given, output=tmp_path / "again", verbose=False)
    merge(again)
    assert files_of(tmp_path / "again") == files_of(tmp_path / "out")
    web.content["in/math.safetensors"] = web.content["in/code/model.safetensors"]
    other = again.changed(output=tmp_path / "other")
    with pytest.raises(InputError, match=r"math\.safetensors: "):
        merge(other)


def test_an_output_on_the_web_can_be_verified_and_repeated(web, models, tmp_path):
    merge(recipe(models, tmp_path / "out", served(web, models)))
    url = web.add_folder("out", tmp_path / "out")
    assert dare.verify(url).ok
    assert dare.load_recipe(url).recipe.base == to_path(f"{web.url}/in/base")
    weights = bytearray(web.content["out/model.safetensors"])
    weights[-1] ^= 1
    web.content["out/model.safetensors"] = bytes(weights)
    reading.forget()
    assert not dare.verify(url).ok


def test_an_input_that_is_replaced_during_the_merge_is_noticed(web, models, tmp_path):
    planned = plan(recipe(models, tmp_path / "out", served(web, models)))
    web.content["in/math.safetensors"] = web.content["in/code/model.safetensors"]
    with pytest.raises(InputError, match=r"math\.safetensors: changed since the merge was planned"):
        merge(planned)
    assert not (tmp_path / "out").exists()


def test_a_merge_goes_on_where_a_store_failed(web, models, tmp_path, quick):
    merge(recipe(models, tmp_path / "here"))
    places = served(web, models)
    planned = plan(recipe(models, tmp_path / "out", places, threads=1))
    web.faults["math.safetensors"] = lambda handler: handler.refuse(500)
    with pytest.raises(InputError, match=r"the server answered \(500\).* it resumes"):
        merge(planned)
    web.faults.clear()
    merge(recipe(models, tmp_path / "out", places, threads=1))
    assert files_of(tmp_path / "out") == files_of(tmp_path / "here")


def test_memory_is_kept_to(web, models, tmp_path):
    places = served(web, models)
    for size in (1 << 30, 80 << 20):
        planned = plan(recipe(models, tmp_path / "out", places, max_memory=size))
        assert 0 < sum(source.cost.ahead_bytes for source in planned.sources) <= size // 4
        assert planned.cost.least_memory <= planned.cost.buffer_bytes <= size
    here = plan(recipe(models, tmp_path / "out"))
    assert sum(source.cost.ahead_bytes for source in here.sources) == 0


# ---------------------------------------------------------------- every form of model


def test_every_form_of_model_is_read_from_a_store(web, models, tmp_path):
    gguf = pytest.importorskip("gguf")
    block = np.frombuffer(np.float16(0.5).tobytes() + bytes(range(32)), np.uint8).reshape(1, 34)
    tensors = {"blk.0.ffn_up.weight": (block, gguf.GGMLQuantizationType.Q8_0)}
    tokens = {"tokenizer.ggml.tokens": [f"token {n}" for n in range(20_000)]}
    write_gguf(tmp_path / "m.gguf", tensors, "qwen2", tokens)
    factors = {
        "layers.0.lora_A.weight": np.ones((2, 900), np.float32),
        "layers.0.lora_B.weight": np.full((700, 2), 0.5, np.float32),
    }
    write_adapter(tmp_path / "lora", factors)
    compress(
        models / "base",
        models / "math.safetensors",
        tmp_path / "d.delta.safetensors",
        verbose=False,
    )
    base = open_model(models / "base")
    for local in (tmp_path / "m.gguf", tmp_path / "lora", tmp_path / "d.delta.safetensors"):
        url = web.add_folder(local.name, local) if local.is_dir() else web.add(local.name, local)
        with open_model(local, base=base) as here, open_model(to_path(url), base=base) as there:
            assert here.tensors.keys() == there.tensors.keys()
            for name in here.tensors:
                assert read_tensor(here, name) == read_tensor(there, name)


def test_pickles_are_refused(web):
    web.content["m.bin"] = b"pickle"
    path = to_path(f"{web.url}/m.bin")
    with pytest.raises(InputError, match="set allow_pickle"):
        open_model(path)
    with pytest.raises(InputError, match="save it as safetensors"):
        open_model(path, allow_pickle=True)


def test_a_header_that_is_longer_than_the_first_look(web, tmp_path):
    many = {f"a.rather.long.name.of.a.tensor.{n}": np.full(2, n, np.float32) for n in range(2000)}
    url = web.add("m.safetensors", save(tmp_path / "m.safetensors", many))
    with open_source(url) as source:
        assert len(source.tensors) == 2000
        assert (
            read_tensor(source, "a.rather.long.name.of.a.tensor.7")
            == many["a.rather.long.name.of.a.tensor.7"].tobytes()
        )


def test_a_place_with_nothing_is_told(web, models):
    with pytest.raises(InputError, match=rf"{web.url}/nothing: no such file"):
        plan(Recipe(base=f"{web.url}/nothing", models=[models / "math.safetensors"]))
    with pytest.raises(RecipeError, match="must not hold a password"):
        Recipe(base="s3://a:b@c/d", models=["x"])


# ---------------------------------------------------------------- headers only


def test_a_plan_of_many_shards_takes_few_requests(web):
    """70 billion parameters in 30 shards, five times, with 20 ms to the server."""
    layers = {
        f"model.layers.{n}.{part}": shape
        for n in range(80)
        for part, shape in {"up": (28672, 8192), "q": (8192, 8192), "norm": (8192,)}.items()
    }
    names = list(layers)
    for model in range(5):
        places = {}
        for shard in range(30):
            part = sorted(names[shard * 8 : shard * 8 + 8])
            bf16 = STORAGE_TYPES["BF16"]
            header, infos = build_header([(name, bf16, layers[name]) for name in part], {})
            size = len(header) + sum(info.nbytes for info in infos.values())
            web.content[f"{model}/s{shard}.safetensors"] = Hollow(header, size)
            places |= dict.fromkeys(part, f"s{shard}.safetensors")
        index = json.dumps({"weight_map": places}).encode()
        web.content[f"{model}/model.safetensors.index.json"] = index
    web.delay_seconds = 0.02
    urls = [f"{web.url}/{model}" for model in range(5)]
    planned = plan(Request.of(base=urls[0], models=urls[1:], output="merged", verbose=False))
    assert len(planned.tensors) == 240
    heads = [line for line in web.asked if line.startswith("GET") and ".safetensors" in line]
    assert len([line for line in heads if line.endswith("bytes=0-131071")]) == 150
    assert len(web.asked) < 5 * (30 + len(reading.USUAL_NAMES) + 3)
    assert sum(web.sent_bytes.values()) < 40e6


# ---------------------------------------------------------------- the hub


@pytest.fixture
def on_hub(hub, models, tmp_path):
    """The three models on a hub, and an empty cache."""
    reading.forget()
    for name in ("base", "code"):
        folder = models / name
        hub.add(f"org/{name}", {path.name: path.read_bytes() for path in folder.iterdir()})
    hub.asked.clear()
    return hub


def test_models_on_the_hub_are_merged_where_they_lie(on_hub, models, tmp_path):
    merge(recipe(models, tmp_path / "here"))
    (tmp_path / "token").write_text("hf_topsecret")
    places = {"base": "hf://org/base", "code": "hf://org/code@main"}
    report = merge(recipe(models, tmp_path / "there", places))
    assert report.digests.output
    assert files_of(tmp_path / "there") == files_of(tmp_path / "here")
    assert not list((tmp_path / "cache").glob("**/*.safetensors"))
    told = json.loads((tmp_path / "there" / "dare-manifest.json").read_bytes())["recipe"]["models"]
    commit = on_hub.refs["org/base", "main"]
    assert told["base_file"] == f"hf://org/base@{commit}"
    on_hub.add("org/base", {"config.json": b"{}"})  # the branch moves on
    reading.forget()
    again = dare.load_recipe(tmp_path / "there").changed(output=tmp_path / "again", verbose=False)
    merge(again)
    assert files_of(tmp_path / "again") == files_of(tmp_path / "here")
    assert {token for _, token in on_hub.tokens} == {""}  # another server does not get ours
    for path in (tmp_path / "there").iterdir():
        assert b"topsecret" not in path.read_bytes()


def test_a_plan_fetches_nothing(on_hub, models, tmp_path):
    planned = plan(Request.of(base="org/base", models=["org/code"], output="out", verbose=False))
    commit = on_hub.refs["org/base", "main"]
    assert planned.recipe.base == Path(f"org/base@{commit}")
    assert isinstance(next(iter(planned.base.files)), StorePath)
    assert not (tmp_path / "cache").exists() or not list(
        (tmp_path / "cache").rglob("*.safetensors")
    )


def test_what_is_in_the_cache_is_taken_from_there(on_hub, models, tmp_path):
    given = Request.of(base="org/base", models=["org/code"], output="out", verbose=False)
    merge(given)
    on_hub.asked.clear()
    asked = Request.of(base="hf://org/base", models=["org/code"], output="out", verbose=False)
    planned = plan(asked)
    assert not [line for line in on_hub.asked if "resolve" in line]
    assert str(planned.recipe.base).startswith("hf://org/base@")
    assert not isinstance(next(iter(planned.base.files)), StorePath)


def test_what_the_hub_does_not_have_is_told(on_hub, models):
    for text, message in {
        "hf://org/none": "the hub has no model org/none",
        "hf://org/base@v9": "org/base@v9: no such revision",
        "hf://org/base/folder": "the hub has no folder at commit",
        "hf://org": "is not the address of a model on the hub",
    }.items():
        with pytest.raises(InputError, match=message):
            open_inputs(Recipe(base=text, models=["hf://org/code"]))


# ---------------------------------------------------------------- the command line


def test_the_command_line_takes_addresses_and_shows_no_secret(
    web, models, tmp_path, monkeypatch, capsys
):
    places = {name: f"{url}?sig=topsecret" for name, url in served(web, models).items()}
    web.key = "sig=topsecret"
    monkeypatch.chdir(tmp_path)

    def run(*words):
        status = main(list(words))
        shown = capsys.readouterr()
        assert "topsecret" not in shown.out + shown.err
        return status, shown.out, shown.err

    base, math, code = places.values()
    status, shown, _ = run("plan", "--base", base, "--merge", math, code, "--output", "out")
    assert status == 0
    assert f"{web.url}/in/base" in shown
    web.key = "sig=other"
    reading.forget()
    status, _, shown = run("merge", "--base", base, "--merge", math, "--output", "out", "--debug")
    assert status == 1
    assert "denies access (403)" in shown
