"""The browser's engine gives the package's weights, bit for bit."""

from __future__ import annotations

import hashlib
import math
import random
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from merged import digest, merge
from running import run_module
from safetensors.numpy import load_file

import dare
from dare.demo.merges import write_models
from dare.recipe.document import request_from_document
from dare.recipe.recipe import ModelEntry, Recipe
from dare.studies.candidates import Candidates
from dare.tensors.mask import keep_mask, keep_threshold
from helpers import save

Setting = dict[str, Any]

SIZES: dict[str, tuple[int, ...]] = {
    "layers.0.weight": (17, 31),
    "layers.3.weight": (128,),
    "layers.4.weight": (127,),
    "huge": (32,),
    "scalar": (),
    "empty": (0, 4),
    "größe": (2, 200),
    "one tile of the core": (64, 128),
    "two tiles and a rest": (129, 131),
}
ODD = (0.0, -0.0, math.nan, 1e-40, 6e4, 3e38, 1.0)

MERGE_ALL = """
import { createHash } from "node:crypto";
import { readFile } from "node:fs/promises";
import { readSafetensors } from "./engine/safetensors.js";
import { mergeModels } from "./engine/merge.js";
import { sha256 } from "./engine/digest.js";

const models = new Map();
for (const [name, path] of Object.entries(given.files)) {
  const { buffer, byteOffset, length } = await readFile(path);
  models.set(name, readSafetensors(buffer.slice(byteOffset, byteOffset + length)));
}
const digest = ({ data }) =>
  createHash("sha256").update(new Uint8Array(data.buffer, data.byteOffset, data.byteLength));
const made = [];
for (const setting of given.settings) {
  const merged = mergeModels(setting, models);
  const tensors = [...merged].map(([name, tensor]) => [name, digest(tensor).digest("hex")]);
  made.push([await sha256(merged), Object.fromEntries(tensors)]);
}
answer(made);
"""


# ---------------------------------------------------------------- the mask

MASKS = [
    ("model.embed_tokens.weight", 64, 0.9, 42),
    ("größe", 1000, 0.75, 7),
    *(("x" * size, 64, 0.5, 2**53 - 1) for size in (97, 98, 99, 500)),  # around BLAKE2b's block
    ("w", 4096, 0.999, 0),
    ("w", 65536, 0.0001, 0),
    ("w", 300, 0.0, 0),
    ("w", 0, 0.5, 0),
    ("w", 3, 1 / 3, 1),
]


def test_the_mask_is_mask_v1() -> None:
    code = """
    import { keepMask, keepThreshold } from "./engine/mask.js";
    answer({
      thresholds: given.rates.map(keepThreshold),
      masks: given.masks.map((asked) => keepMask(...asked).join("")),
    });
    """
    chance = random.Random(3)
    rates = [0.0, 0.5, 0.9, 2**-41, 3 * 2**-41, *(chance.random() for _ in range(50))]
    found = run_module(code, {"rates": rates, "masks": MASKS})
    assert found["thresholds"] == [keep_threshold(rate) for rate in rates]
    for asked, mask in zip(MASKS, found["masks"], strict=True):
        assert mask == "".join(str(255 * kept) for kept in keep_mask(*asked).tolist()), asked


# ---------------------------------------------------------------- numbers


def test_every_stored_number_is_read_and_written() -> None:
    """All of BF16 to float32 and back, and float32 numbers halfway between them.

    They are stored as changes of zeros, whose own bits stay where a change is zero.
    """
    code = """
    import { createHash } from "node:crypto";
    import { addToBase, toFloats } from "./engine/core.js";
    const data = Uint16Array.from({ length: 65536 }, (_, bits) => bits);
    const halfway = new Float32Array(Uint32Array.from(given).buffer);
    const hash = (data) => createHash("sha256").update(new Uint8Array(data.buffer)).digest("hex");
    const noNaN = (floats) => floats.map((value) => (value === value ? value : NaN));
    const floats = toFloats({ data });
    const stored = (values) => addToBase(new Uint16Array(values.length), values, 1);
    answer([noNaN(floats), stored(floats), stored(halfway)].map(hash));
    """
    chance = random.Random(5)
    edges = [(n << shift) + d for n in range(0, 1 << 10) for shift in (22, 13) for d in (-1, 0, 1)]
    bits = [edge % 2**32 for edge in edges] + [chance.getrandbits(32) for _ in range(20000)]
    halfway = np.array(bits, np.uint32).view(np.float32)
    stored = np.arange(65536, dtype=np.uint16).view(ml_dtypes.bfloat16)

    def digest_of(values: Any) -> str:
        kept = np.where(np.isnan(values), np.array(np.nan, values.dtype), values)
        return hashlib.sha256(kept.tobytes()).hexdigest()

    with np.errstate(over="ignore", invalid="ignore"):
        changes = np.where(halfway == 0, np.float32(0), halfway).astype(ml_dtypes.bfloat16)
        expected = [stored.astype(np.float32), np.where(stored == 0, stored[0], stored), changes]
        assert run_module(code, bits) == [digest_of(values) for values in expected]


# ---------------------------------------------------------------- merges


def make_base(chance: np.random.Generator) -> dict[str, np.ndarray[Any, Any]]:
    arrays = {
        name: np.asarray(chance.normal(0, 0.1, shape)).astype(ml_dtypes.bfloat16)
        for name, shape in SIZES.items()
    }
    arrays["layers.0.weight"].reshape(-1)[5 : 5 + len(ODD)] = ODD
    return arrays


def make_tuned(
    base: Mapping[str, np.ndarray[Any, Any]], chance: np.random.Generator
) -> dict[str, np.ndarray[Any, Any]]:
    """Changes of the sizes that training makes, a tenth of them none; odd ones in one tensor."""
    tuned = {}
    for name, array in base.items():
        change = chance.normal(0, 0.01, array.shape) * (chance.random(array.shape) > 0.1)
        tuned[name] = np.asarray(array.astype(np.float32) + change).astype(ml_dtypes.bfloat16)
    odd = tuned["layers.0.weight"].reshape(-1)
    odd[5 : 5 + 2 * len(ODD)] = chance.choice(ODD, 2 * len(ODD))
    odd[5:8] = base["layers.0.weight"].reshape(-1)[5:8]
    return tuned


def random_setting(chance: random.Random, names: Sequence[str]) -> Setting:
    """Anything the engine has: stages, weights, rates, seeds, models in any order."""
    combine = chance.choice(["linear", "sum", "ties", "slerp", "slerp"])
    deltas = chance.choice([[], ["dare"], ["trim"], ["dare", "trim"], ["trim", "dare"]])
    tables: dict[str, dict[str, Any]] = {}
    if "dare" in deltas:
        rate = chance.choice([0.0, 0.5, 0.9, 0.97, chance.random()])
        tables["dare"] = {"drop_rate": rate, "rescale": chance.choice([True, True, False])}
    if "trim" in deltas:
        tables["trim"] = {"keep_ratio": chance.choice([1.0, 0.2, 0.01, chance.random()])}
    if is_arc := combine == "slerp":
        tables["slerp"] = {"t": chance.choice([0.0, 0.5, 1.0, chance.random()])}
    return {
        "base": "base",
        "method": "+".join([*deltas, combine]),
        "scale": chance.choice([1.0, 1.0, 0.0, -0.7, 2.5]),
        "seed": chance.choice([42, 0, 2**40]),
        "stages": tables,
        "models": [
            {"name": name, "weight": weight, "seed": chance.choice([None, None, 7])}
            for name in chance.sample(list(names), 2 if is_arc else chance.randint(1, len(names)))
            for weight in [None if is_arc else random_weight(chance)]
        ],
    }


def random_weight(chance: random.Random) -> float | None:
    return chance.choice([None, None, 0.0, -0.4, 1e-3, 3.0, chance.random()])


def to_recipe(setting: Setting, files: Mapping[str, Path]) -> Recipe:
    return Recipe(
        allow_not_finite=True,
        base=files[setting["base"]],
        models=[
            ModelEntry(
                file=files[model["name"]],
                weight=model["weight"],
                seed=model["seed"],
            )
            for model in setting["models"]
        ],
        **{name: setting[name] for name in ("method", "scale", "seed", "stages")},
    )


def merge_here(
    settings: Sequence[Setting], files: Mapping[str, Path]
) -> Iterator[tuple[str, dict[str, str]]]:
    """What the package makes: the SHA-256 of all weights in order of name, and of each tensor."""
    others = [path for name, path in files.items() if name != "base"]
    candidates = Candidates(Recipe(base=files["base"], models=others), threads=1)
    for setting in settings:
        arrays = candidates.make(to_recipe(setting, files)).arrays
        tensors = {name: hashlib.sha256(a.tobytes()).hexdigest() for name, a in arrays.items()}
        yield digest(arrays), tensors


def check_merges(settings: Sequence[Setting], files: Mapping[str, Path]) -> None:
    given = {"files": {name: str(path) for name, path in files.items()}, "settings": settings}
    made = run_module(MERGE_ALL, given)
    for setting, (whole, tensors), expected in zip(
        settings, made, merge_here(settings, files), strict=True
    ):
        differing = [name for name in expected[1] if tensors[name] != expected[1][name]]
        assert not differing, setting
        assert whole == expected[0], setting


def test_small_merges_are_the_packages(tmp_path: Path) -> None:
    rng = np.random.default_rng(17)
    base = make_base(rng)
    models = {"base": base} | {name: make_tuned(base, rng) for name in ("one", "two", "three")}
    models["one"]["huge"] = np.full_like(base["huge"], 3e38)
    models["two"]["huge"] = np.full_like(base["huge"], -3e38)
    models["one"]["layers.4.weight"][3] = math.nan
    files = {n: save(tmp_path / f"{n}.safetensors", a) for n, a in models.items()}
    chance = random.Random(17)
    settings = [random_setting(chance, ["one", "two", "three"]) for _ in range(60)]
    check_merges([*settings, *map(one_model, ONE_MODEL)], files)


ONE_MODEL: list[dict[str, dict[str, Any]]] = [
    {"dare": {"drop_rate": 0.0}, "linear": {}},
    {"trim": {"keep_ratio": 1.0}, "ties": {}},
]
"""Where the result is the one model, bit for bit."""


def one_model(tables: dict[str, dict[str, Any]]) -> Setting:
    models = [{"name": "one", "weight": None, "seed": None}]
    plain = {"base": "base", "scale": 1.0, "seed": 42, "models": models}
    return {**plain, "method": "+".join(tables), "stages": tables}


# ---------------------------------------------------------------- what is refused


def test_what_it_does_not_have_is_refused() -> None:
    code = """
    import { readSafetensors } from "./engine/safetensors.js";
    import { mergeModels } from "./engine/merge.js";
    const complaint = (action) => {
      try {
        action();
      } catch (error) {
        return error.message;
      }
    };
    const models = new Map([["base", new Map()], ["add", new Map()]]);
    const setting = { base: "base", models: [{ name: "add" }], stages: {} };
    answer([
      ...["slerp", "dares+sum", "ties+dare", "constructor"].map((method) =>
        complaint(() => mergeModels({ ...setting, method }, models))),
      complaint(() => readSafetensors(new ArrayBuffer(7))),
      complaint(() => readSafetensors(Uint8Array.from([9, 0, 0, 0, 0, 0, 0, 0, 123]).buffer)),
    ]);
    """
    *methods, short, cut = run_module(code)
    assert all("method" in message for message in methods)
    assert "safetensors" in short
    assert "safetensors" in cut


# ---------------------------------------------------------------- recipes of settings

RECIPES = """
import { defaults, recipeText, settingOf } from "./parts/live/setting.js";
answer(given.map((values) =>
  recipeText(settingOf((name) => values[name.slice(5)] ?? defaults[name]))));
"""
ARC = {"dare": {"drop_rate": 0.9}, "slerp": {"t": 0.3}}
CASES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {"method": "dare+sum", "stages": {"dare": {"drop_rate": 0.5}}}),
    (
        {"sort": False, "m": "dare+linear", "p": 0.9, "rescale": False},
        {
            "models": ["add", "say"],
            "method": "dare+linear",
            "stages": {"dare": {"drop_rate": 0.9, "rescale": False}},
        },
    ),
    (
        {"w": True, "wadd": 0.7, "wsort": -0.25, "wsay": 0, "m": "ties", "scale": 2.5},
        {"weights": [0.7, -0.25, 0.0], "method": "ties", "scale": 2.5},
    ),
    (
        {"m": "dare+trim+ties", "keep": 0.4, "seed": 7},
        {
            "method": "dare+trim+ties",
            "seed": 7,
            "stages": {"dare": {"drop_rate": 0.5}, "trim": {"keep_ratio": 0.4}},
        },
    ),
    (
        {"m": "dare+slerp", "say": False, "w": True, "p": 0.9, "t": 0.3},
        {"models": ["add", "sort"], "method": "dare+slerp", "stages": ARC},
    ),
]


def test_the_recipe_that_is_shown_makes_the_merge_that_is_shown(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_models(tmp_path / "demo-models")
    texts = run_module(RECIPES, [values for values, _ in CASES])
    for text, (_, described) in zip(texts, CASES, strict=True):
        request = request_from_document(tomllib.loads(text), "recipe")
        dare.merge(request, verbose=False, overwrite=True)
        assert digest(load_file("merged.safetensors")) == digest(merge(**described))
