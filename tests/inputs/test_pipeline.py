"""Pipelines of diffusers: components merged, kept and lacking; files in and out; modelspec."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from writers import write_adapter

import dare
from dare.deltas.compressing import compress
from dare.errors import DareError, InputError, MismatchError, OutputError
from dare.inputs.sources import FileSource
from dare.stores import reading
from dare.stores.locations import to_path

UNET = "unet/diffusion_pytorch_model.safetensors"
VAE = "vae/diffusion_pytorch_model.safetensors"
TEXT = "text_encoder/model.safetensors"
SHAPES = {
    UNET: {"conv_in.weight": (4, 3), "down_blocks.0.w": (5, 2), "up_blocks.0.w": (300, 7)},
    VAE: {"decoder.conv_in.weight": (4, 4)},
    TEXT: {"shared.weight": (6, 4), "encoder.embed_tokens.weight": (6, 4), "layers.0.w": (4, 4)},
}
BESIDE = {
    "model_index.json": {
        "_class_name": "P",
        "unet": ["diffusers", "U"],
        "vae": ["diffusers", "V"],
        "text_encoder": ["transformers", "T"],
        "scheduler": ["diffusers", "S"],
        "safety_checker": [None, None],
        "requires_safety_checker": False,
    },
    "unet/config.json": {"_class_name": "U", "sample_size": 8},
    "vae/config.json": {"_class_name": "V"},
    "text_encoder/config.json": {"model_type": "t5", "dtype": "float32"},
    "scheduler/scheduler_config.json": {"_class_name": "S"},
    "onnx/anything.json": {},
    "safety_checker/config.json": {},
}


def write(folder, seed=0, leave=(), names=()):
    """Write a pipeline; `leave` are files that it lacks, `names` has others for some of them."""
    for file, shapes in SHAPES.items():
        if file not in leave:
            base, own = np.random.default_rng(0), np.random.default_rng(seed)
            change = np.float32(0.01 if seed else 0)
            arrays = {
                n: base.standard_normal(s, np.float32) + change * own.standard_normal(s, np.float32)
                for n, s in shapes.items()
            }
            if file == TEXT:  # one tensor under two names
                arrays["encoder.embed_tokens.weight"] = arrays["shared.weight"].copy()
            path = folder / dict(names).get(file, file)
            path.parent.mkdir(parents=True, exist_ok=True)
            save_file(arrays, path)
    for file, content in BESIDE.items():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text(json.dumps(content))
    return folder


@pytest.fixture
def pipelines(tmp_path):
    return [write(tmp_path / name, seed) for seed, name in enumerate(("base", "photo", "anime"))]


def plan(paths, **settings):
    base, *models = paths
    given = {"method": "sum", "output": base.parent / "out", "verbose": False, **settings}
    return dare.plan(base=base, models=models, **given)


def merge(paths, **settings):
    planned = plan(paths, **settings)
    dare.merge(planned)
    return planned.recipe.output


def by_hand(paths, file, name, weight=1):
    base, *models = (load_file(path / file)[name] for path in paths)
    total = sum((np.float32(weight) * (model - base) for model in models), np.zeros_like(base))
    return base + total


def codes(planned):
    return {(each.code, *each.subjects) for each in (*planned.notes, *planned.warnings)}


def test_components_are_merged_and_the_autoencoder_stays(pipelines):
    planned = plan(pipelines)
    assert ("kept_components",) in codes(planned)
    dare.merge(planned)
    out = planned.recipe.output
    for file, name in ((UNET, "down_blocks.0.w"), (TEXT, "layers.0.w")):
        np.testing.assert_allclose(load_file(out / file)[name], by_hand(pipelines, file, name))
    found, own = load_file(out / VAE), load_file(pipelines[0] / VAE)
    assert {n: v.tobytes() for n, v in found.items()} == {n: v.tobytes() for n, v in own.items()}
    for file in ("model_index.json", "unet/config.json", "scheduler/scheduler_config.json"):
        assert (out / file).read_bytes() == (pipelines[0] / file).read_bytes()
    assert not (out / "onnx").exists()
    assert not (out / "safety_checker").exists()
    assert any(n.code == "not_copied" and "onnx" in str(n) for n in planned.notes)
    assert "library_name: diffusers" in (out / "README.md").read_text()
    assert dare.verify(out).ok


def test_a_rule_that_names_the_autoencoder_merges_it(pipelines):
    rules = [dare.TensorRule(match="vae/*", weight=0.5)]
    out = merge(pipelines, tensors=rules)
    expected = by_hand(pipelines, VAE, "decoder.conv_in.weight", 0.5)
    np.testing.assert_allclose(load_file(out / VAE)["decoder.conv_in.weight"], expected)


def test_a_model_may_lack_components_or_be_one(pipelines):
    base, photo, anime = pipelines
    shutil.rmtree(photo / "text_encoder")
    planned = plan([base, photo, anime / "unet"])
    assert {("lacking_components", "photo"), ("lacking_components", "unet")} <= codes(planned)
    dare.merge(planned)
    out = planned.recipe.output
    assert (
        load_file(out / TEXT)["layers.0.w"].tobytes()
        == load_file(base / TEXT)["layers.0.w"].tobytes()
    )
    expected = by_hand(pipelines, UNET, "up_blocks.0.w")
    np.testing.assert_allclose(load_file(out / UNET)["up_blocks.0.w"], expected)
    analysis = dare.analyze(base, [photo, anime / "unet"], verbose=False)
    assert [model.missing for model in analysis.models] == [(), ()]


def test_a_component_with_a_tensor_missing_is_refused(pipelines):
    arrays = load_file(pipelines[1] / UNET)
    del arrays["down_blocks.0.w"]
    save_file(arrays, pipelines[1] / UNET)
    with pytest.raises(MismatchError, match=r"unet/down_blocks\.0\.w.*on_missing"):
        plan(pipelines)


def test_a_component_that_only_a_model_has_is_refused_unless_it_would_be_kept(pipelines):
    for name in ("safety_checker", "image_encoder"):
        (pipelines[1] / name).mkdir(exist_ok=True)
        save_file({"w": np.ones(3, np.float32)}, pipelines[1] / name / "model.safetensors")
        index = {**BESIDE["model_index.json"], name: ["transformers", "X"]}
        (pipelines[1] / "model_index.json").write_text(json.dumps(index))
        if name == "safety_checker":
            plan(pipelines)
        else:
            with pytest.raises(MismatchError, match=r"image_encoder/w.*on_extra"):
                plan(pipelines)


def test_masks_of_components_differ_and_one_tensor_under_two_names_has_one(pipelines):
    out = merge(pipelines, method="dare+sum", drop_rate=0.5, embedding_drop_rate=0.9)
    text = load_file(out / TEXT)
    assert text["shared.weight"].tobytes() == text["encoder.embed_tokens.weight"].tobytes()
    kept = np.count_nonzero(
        text["shared.weight"] != load_file(pipelines[0] / TEXT)["shared.weight"]
    )
    assert kept <= 12  # of 24, with two models: they are embeddings


def test_types_are_those_of_the_weights(pipelines):
    out = merge(pipelines, dtype="float16")
    assert json.loads((out / "text_encoder/config.json").read_text())["dtype"] == "float16"
    assert json.loads((out / "unet/config.json").read_text()) == BESIDE["unet/config.json"]
    assert load_file(out / VAE)["decoder.conv_in.weight"].dtype == np.float16


def test_shards_lie_in_the_component_s_folder_with_their_index(pipelines):
    whole = merge(pipelines)
    out = merge(pipelines, output=pipelines[0].parent / "sharded", shard_size="4kB")
    index = json.loads((out / f"{UNET}.index.json").read_text())
    files = {path.name for path in (out / "unet").glob("*.safetensors")}
    assert set(index["weight_map"].values()) == files
    assert len(files) == 2
    assert index["metadata"]["total_size"] == 4 * (12 + 10 + 2100)
    assert set(index["weight_map"]) == set(SHAPES[UNET])
    assert not (out / f"{TEXT}.index.json").exists()
    assert dare.verify(out).sha256 == dare.verify(whole).sha256
    again = merge([out, *pipelines[1:]], output=pipelines[0].parent / "again")
    assert (again / UNET).exists()


def test_a_variant_is_read_and_written_under_the_plain_name(tmp_path):
    name = "unet/diffusion_pytorch_model.fp16.safetensors"
    base = write(tmp_path / "base", names={UNET: name})
    tuned = write(tmp_path / "tuned", 1)
    out = merge([base, tuned])
    assert [path.name for path in (out / "unet").glob("*.safetensors*")] == [UNET.split("/")[1]]
    (base / "unet/diffusion_pytorch_model.non_ema.safetensors").write_bytes(
        (base / name).read_bytes()
    )
    with pytest.raises(InputError, match="2 safetensors files"):
        plan([base, tuned])
    (base / UNET).write_bytes((base / name).read_bytes())
    plan([base, tuned])


def test_shards_of_a_variant_are_read_by_its_index(tmp_path):
    folder = tmp_path / "unet"
    folder.mkdir()
    files = [f"model.fp16-0000{n}-of-00002.safetensors" for n in (1, 2)]
    for number, file in enumerate(files):
        save_file({f"w{number}": np.ones(3, np.float32)}, folder / file)
    index = folder / "model.safetensors.index.fp16.json"
    index.write_text(json.dumps({"weight_map": {"w0": files[0], "w1": files[1]}}))
    assert set(FileSource(folder).tensors) == {"w0", "w1"}
    index.write_text(json.dumps({"weight_map": {"w0": files[0], "other": files[1]}}))
    with pytest.raises(DareError, match=r"index\.fp16\.json.*lacks other"):
        FileSource(folder)


def test_one_component_keeps_the_name_of_its_file(pipelines):
    out = merge([path / "unet" for path in pipelines])
    assert {path.name for path in out.iterdir()} >= {UNET.split("/")[1], "config.json"}
    assert "torch_dtype" not in json.loads((out / "config.json").read_text())


def test_it_is_resumed_repeated_and_replaced(pipelines):
    target = pipelines[0].parent / "out"
    fresh = merge(pipelines, output=pipelines[0].parent / "fresh", method="dare+sum")
    dare.merge_slice(plan(pipelines, method="dare+sum"), "1/2")
    (target.with_name("out.partial") / "unet/stray").write_text("x")
    report = dare.merge(plan(pipelines, method="dare+sum"))
    assert report.resumed_chunks
    for file in (UNET, VAE, TEXT):
        assert (target / file).read_bytes() == (fresh / file).read_bytes()
    assert not (target / "unet/stray").exists()
    assert dare.verify(target).ok
    dare.merge(fresh, output=target, overwrite=True, verbose=False)
    assert (target / UNET).read_bytes() == (fresh / UNET).read_bytes()
    (target / "unet/mine.txt").write_text("x")
    with pytest.raises(OutputError, match=r"unet/mine\.txt"):
        dare.merge(fresh, output=target, overwrite=True, verbose=False)


def test_what_is_one_model_is_not_made_of_a_pipeline(pipelines, tmp_path):
    with pytest.raises(OutputError, match="name a folder"):
        plan(pipelines, output=tmp_path / "out.safetensors")
    with pytest.raises(InputError, match="one by one"):
        compress(*pipelines[:2], tmp_path / "delta.safetensors", lossless=True)


def test_it_goes_to_a_store_and_is_read_there(pipelines, tmp_path, monkeypatch):
    from obstore.store import MemoryStore

    store = MemoryStore()
    monkeypatch.setattr(reading, "_connect", lambda *_: store)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    reading.forget()
    dare.merge(plan(pipelines, output="s3://bucket/out"))
    assert dare.verify("s3://bucket/out").sha256 == dare.verify(merge(pipelines)).sha256
    base = to_path("s3://bucket/out")
    dare.merge(base=base, models=pipelines[1:2], output=tmp_path / "next", verbose=False)
    assert (tmp_path / "next" / UNET).exists()
    assert (tmp_path / "next/scheduler/scheduler_config.json").exists()
    reading.forget()


def test_an_adapter_of_a_component_finds_its_place(pipelines, tmp_path):
    draw = np.random.default_rng(5)
    left, right = (draw.standard_normal(shape, np.float32) for shape in ((4, 2), (2, 3)))
    factors = {"conv_in.lora_A.weight": right, "conv_in.lora_B.weight": left}
    write_adapter(tmp_path / "style", factors, lora_alpha=2)
    out = merge([pipelines[0], tmp_path / "style"])
    found, own = (load_file(path / UNET)["conv_in.weight"] for path in (out, pipelines[0]))
    np.testing.assert_allclose(found - own, left @ right, atol=1e-5)


@pytest.mark.parametrize(
    "index",
    [b"[]", b'{"unet": 3}', b'{"../other": ["a", "b"]}', b"{", b"[" * 100_000, b'{"unet": null}'],
)
def test_a_hostile_index_is_refused(pipelines, index):
    (pipelines[0] / "model_index.json").write_bytes(index)
    with pytest.raises(DareError):
        plan(pipelines)


def test_weights_that_are_pickles_and_links_that_lead_outside_are_refused(pipelines, tmp_path):
    (pipelines[1] / "unet" / "evil.json").symlink_to("/etc/hostname")
    plan(pipelines)  # nothing of a model's folder is copied
    (pipelines[0] / "unet" / "evil.json").symlink_to("/etc/hostname")
    with pytest.raises(InputError, match="outside the folder"):
        plan(pipelines)
    (pipelines[0] / "unet" / "evil.json").unlink()
    (pipelines[0] / UNET).rename(pipelines[0] / "unet/diffusion_pytorch_model.bin")
    with pytest.raises(InputError, match="no safetensors file"):
        plan(pipelines)


# ---------------------------------------------------------------- modelspec


def spec_of(file):
    with safe_open(file, "np") as opened:
        return {k: v for k, v in opened.metadata().items() if k.startswith("modelspec.")}


def test_modelspec_is_kept_where_it_is_still_true(tmp_path):
    spec = {"sai_model_spec": "1.0.0", "architecture": "stable-diffusion-xl-v1-base"}
    own = {"title": "XL", "hash_sha256": "0x12", "date": "2023-07-16", "thumbnail": "data:" * 100}
    entries = {f"modelspec.{key}": value for key, value in {**spec, **own}.items()}
    arrays = {"w": np.ones(9, np.float32)}
    save_file(arrays, tmp_path / "base.safetensors", {"format": "pt", "note": "x", **entries})
    save_file(arrays, tmp_path / "photo.safetensors", {"modelspec.title": "Photo 2"})
    save_file(arrays, tmp_path / "anime.safetensors")
    paths = [tmp_path / f"{name}.safetensors" for name in ("base", "photo", "anime")]
    outputs = [merge(paths, output=tmp_path / f"{n}.safetensors") for n in ("one", "two")]
    assert spec_of(outputs[0]) == {
        **{f"modelspec.{key}": value for key, value in spec.items()},
        "modelspec.title": "Photo 2 + anime",
        "modelspec.merged_from": "XL, Photo 2, anime",
    }
    assert outputs[0].read_bytes() == outputs[1].read_bytes()
    assert dare.verify(outputs[0]).ok
    assert spec_of(merge([paths[2], paths[0]], output=tmp_path / "three.safetensors")) == {}
