"""The browser's engine gives the package's weights, bit for bit."""

from __future__ import annotations

import hashlib
import math
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from running import run_module

from dare.demo.merges import BASE, TUNED
from dare.errors import RecipeError
from dare.kernels import reference
from dare.recipe.schema import ModelEntry, Recipe
from dare.stages import ALIASES, STAGES
from dare.stages.angles import arc
from dare.studies.candidates import Candidates
from dare.tensors.mask import keep_mask, keep_threshold, mask_key
from helpers import entry, file_bytes

Setting = dict[str, Any]

CHUNK = 524288
SIZES: dict[str, tuple[str, tuple[int, ...]]] = {
    "layers.0.weight": ("BF16", (17, 31)),
    "layers.1.weight": ("F16", (129,)),
    "layers.2.weight": ("F32", (3, 5, 17)),
    "layers.3.weight": ("BF16", (128,)),
    "layers.4.weight": ("BF16", (127,)),
    "masked": ("BF16", (9, 9)),
    "huge": ("BF16", (32,)),
    "scalar": ("BF16", ()),
    "empty": ("BF16", (0, 4)),
    "steps": ("I64", (3,)),
    "größe": ("BF16", (2, 200)),
    "\uffff": ("F32", (65,)),
    "\U00010000": ("BF16", (65,)),  # before the one above in UTF-16, behind it in UTF-8
}
TYPES: dict[str, Any] = {
    "BF16": ml_dtypes.bfloat16,
    "F16": np.float16,
    "F32": np.float32,
    "I64": np.int64,
}
OWN = ("drop_rate", "keep_ratio")
"""Parameters that a model may have of its own."""
ODD = (0.0, -0.0, math.inf, -math.inf, math.nan, 1e-40, 6e4, 3e38, 1.0)

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

KEYS = [("model.embed_tokens.weight", 42, 0), ("größe", 7, 0), ("lm_head.weight", 42, 2)]
KEYS += [("x" * size, 2**53 - 1, 0) for size in (97, 98, 99, 500)]  # around a block of BLAKE2b
MASKS = [
    ("model.embed_tokens.weight", 64, 0.9, 42, 0),
    ("lm_head.weight", 64, 0.5, 42, 1099511627779),
    ("größe", 1000, 0.75, 7, 100),
    ("w", 4096, 0.999, 0, 0),
    ("w", 65536, 0.0001, 0, 0),
    ("w", 300, 0.0, 0, 0),
    ("w", 0, 0.5, 0, 0),
    ("w", 3, 1 / 3, 1, 2**32 - 1),
]
COUNTERS = [
    ((0,) * 4, (0,) * 2, "5f6fb709 0d893f64 4f121f81 4f730a48"),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, "5207ddc2 45165e59 4d8ee751 8c52f662"),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        "4dfccaba 190a87f0 c47362ba b6b5242a",
    ),
]


def test_the_mask_is_mask_v1() -> None:
    code = """
    import { keepMask, keepThreshold, maskKey, philox } from "./engine/mask.js";
    const words = (counter, key) => {
      const out = new Uint32Array(4);
      philox(...counter, ...key, out, 0, 1);
      return [...out];
    };
    answer({
      words: given.counters.map(([counter, key]) => words(counter, key)),
      keys: given.keys.map(([name, seed, draw]) => [...maskKey(seed, name, draw)]),
      thresholds: given.rates.map(keepThreshold),
      masks: given.masks.map((asked) => keepMask(...asked).join("")),
    });
    """
    chance = random.Random(3)
    rates = [0.0, 0.5, 0.9, 2**-41, 3 * 2**-41, *(chance.random() for _ in range(50))]
    given = {"counters": [c[:2] for c in COUNTERS], "keys": KEYS, "rates": rates, "masks": MASKS}
    found = run_module(code, given)

    assert [" ".join(f"{word:08x}" for word in words) for words in found["words"]] == [
        words for _, _, words in COUNTERS
    ]
    assert found["keys"] == [list(mask_key(seed, name, draw)) for name, seed, draw in KEYS]
    assert found["thresholds"] == [keep_threshold(rate) for rate in rates]
    for asked, mask in zip(MASKS, found["masks"], strict=True):
        name, size, rate, seed, start = asked
        expected = keep_mask(name, size, rate, seed, start)
        assert mask == "".join("01"[kept] for kept in expected.tolist()), asked


# ---------------------------------------------------------------- numbers


def test_every_stored_number_is_read_and_written() -> None:
    """All of BF16 and F16 to float32 and back, and float32 numbers halfway between them."""
    code = """
    import { createHash } from "node:crypto";
    import { fromFloats, toBfloats, toFloats } from "./engine/floats.js";
    const all = Uint16Array.from({ length: 65536 }, (_, bits) => bits);
    const halfway = new Float32Array(Uint32Array.from(given).buffer);
    const hash = (data) => createHash("sha256").update(new Uint8Array(data.buffer)).digest("hex");
    const noNaN = (floats) => floats.map((value) => (value === value ? value : NaN));
    answer(["BF16", "F16"].flatMap((dtype) => [
      hash(noNaN(toFloats({ dtype, data: all }))),
      hash(fromFloats(toFloats({ dtype, data: all }), dtype)),
      hash(fromFloats(halfway, dtype)),
    ]).concat(hash(toBfloats(halfway)), hash(fromFloats(halfway, "F32"))));
    """
    chance = random.Random(5)
    edges = [(n << shift) + d for n in range(0, 1 << 10) for shift in (22, 13) for d in (-1, 0, 1)]
    bits = [edge % 2**32 for edge in edges] + [chance.getrandbits(32) for _ in range(20000)]
    halfway = np.array(bits, np.uint32).view(np.float32)
    every = np.arange(65536, dtype=np.uint16)

    def digest(values: Any) -> str:
        kept = np.where(np.isnan(values), np.array(np.nan, values.dtype), values)
        return hashlib.sha256(kept.tobytes()).hexdigest()

    expected = []
    with np.errstate(over="ignore", invalid="ignore"):
        for kind in (ml_dtypes.bfloat16, np.float16):
            stored = every.view(kind)
            expected += [digest(stored.astype(np.float32)), digest(stored)]
            expected.append(digest(halfway.astype(kind)))
        expected += [digest(halfway.astype(ml_dtypes.bfloat16)), digest(halfway)]
    assert run_module(code, bits) == expected


# ---------------------------------------------------------------- merges


def write_model(path: Path, arrays: Mapping[str, np.ndarray[Any, Any]]) -> Path:
    """A file whose data lie as they come: elements of four bytes may begin at an odd place."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, array in arrays.items():
        dtype, end = SIZES[name][0], len(data) + array.nbytes
        header[name] = entry(dtype, list(array.shape), len(data), end)
        data += array.tobytes()
    path.write_bytes(file_bytes(header, data))
    return path


def make_base(chance: np.random.Generator) -> dict[str, np.ndarray[Any, Any]]:
    with np.errstate(over="ignore"):
        arrays = {
            name: chance.normal(0, 0.1, shape).astype(TYPES[dtype])
            for name, (dtype, shape) in SIZES.items()
            if dtype != "I64"
        }
        arrays["layers.0.weight"].reshape(-1)[5 : 5 + len(ODD)] = ODD
        arrays["masked"][np.triu_indices(9)] = -math.inf
    return arrays | {"steps": np.array([1, -2, 3])}


def make_tuned(
    base: Mapping[str, np.ndarray[Any, Any]], chance: np.random.Generator
) -> dict[str, np.ndarray[Any, Any]]:
    """Changes of the sizes that training makes, a tenth of them none; odd ones in one tensor."""
    tuned = {}
    for name, array in base.items():
        tuned[name] = array
        if array.dtype.kind != "i":
            change = chance.normal(0, 0.01, array.shape) * (chance.random(array.shape) > 0.1)
            with np.errstate(invalid="ignore", over="ignore"):
                tuned[name] = (array.astype(np.float32) + change).astype(array.dtype)
    odd = tuned["layers.0.weight"].reshape(-1)
    with np.errstate(over="ignore"):
        odd[5 : 5 + 2 * len(ODD)] = chance.choice(ODD, 2 * len(ODD))
    odd[5:8] = base["layers.0.weight"].reshape(-1)[5:8]
    return tuned


def random_setting(chance: random.Random, names: Sequence[str]) -> Setting:
    """Anything the engine has: stages, weights, rates, seeds, models in any order."""
    combine = chance.choice(["linear", "sum", "ties", "ties", "slerp"])
    deltas = chance.choice([[], ["dare"], ["trim"], ["dare", "trim"], ["trim", "dare"]])
    tables: dict[str, dict[str, Any]] = {}
    if "dare" in deltas:
        rate = chance.choice([0.0, 0.5, 0.9, 0.97, chance.random()])
        tables["dare"] = {"drop_rate": rate, "rescale": chance.choice([True, True, False, "l1"])}
    if "trim" in deltas:
        ratio = chance.choice([1.0, 0.2, 0.01, chance.random()])
        tables["trim"] = {"keep_ratio": ratio, "scope": chance.choice(["tensor", "model"])}
    if combine == "ties":
        tables["ties"] = {
            "divide_by": chance.choice(["weights", "count", "nothing"]),
            "vote": chance.choice(["sum", "sum", "count"]),
            "weighted": chance.choice([True, True, False]),
        }
        if "trim" not in deltas and chance.random() < 0.3:
            tables["ties"]["keep_ratio"] = chance.random()
    if combine == "slerp":
        t = chance.choice([0.0, 0.5, 1.0, chance.random()])
        tables["slerp"] = {"t": t, "on": chance.choice(["weights", "deltas"])}
    can_trim = "trim" in deltas or combine == "ties"
    count = 2 if combine == "slerp" else chance.randint(1, len(names))
    return {
        "base": "base",
        "method": "+".join([*deltas, combine]),
        "scale": chance.choice([1.0, 1.0, 0.0, -0.7, 2.5]),
        "seed": chance.choice([42, 0, 2**40]),
        "stages": tables,
        "models": [
            {
                "name": name,
                "weight": None if combine == "slerp" else random_weight(chance),
                "drop_rate": 0.3 if "dare" in deltas and chance.random() < 0.3 else None,
                "keep_ratio": 0.6 if can_trim and chance.random() < 0.2 else None,
                "seed": chance.choice([None, None, 7]),
            }
            for name in chance.sample(list(names), count)
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
                settings={name: model[name] for name in OWN if model.get(name) is not None},
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
        whole = hashlib.sha256(b"".join(arrays[name].tobytes() for name in sorted(arrays)))
        yield (
            whole.hexdigest(),
            {name: hashlib.sha256(a.tobytes()).hexdigest() for name, a in arrays.items()},
        )


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
    files = {n: write_model(tmp_path / f"{n}.safetensors", a) for n, a in models.items()}
    chance = random.Random(17)
    settings = [random_setting(chance, ["one", "two", "three"]) for _ in range(60)]
    check_merges([*settings, *(rare_setting(*rare) for rare in RARE)], files)


RARE: list[tuple[dict[str, dict[str, Any]], list[float | None]]] = [
    # a factor that is NaN, of a model that has no weight
    ({"dare": {"drop_rate": 0.5, "rescale": "l1"}, "sum": {}}, [0.0, 0.5]),
    # ∞ - ∞ decides, where neither side is infinite
    ({"dare": {"drop_rate": 0.5}, "ties": {"weighted": False}}, [0.4, 0.4]),
    # coefficients that do not add up to 1, where the base is infinite
    ({"slerp": {"t": 0.3}}, [None, None]),
    # the result is the one model, bit for bit
    ({"dare": {"drop_rate": 0.0}, "linear": {}}, [None]),
    ({"trim": {"keep_ratio": 1.0}, "ties": {}}, [1.0]),
]


def rare_setting(tables: dict[str, dict[str, Any]], weights: Sequence[float | None]) -> Setting:
    models = [
        {"name": name, "weight": weight, "drop_rate": None, "seed": None}
        for name, weight in zip(("one", "two"), weights, strict=False)
    ]
    plain = {"base": "base", "scale": 1.0, "seed": 42, "models": models}
    return {**plain, "method": "+".join(tables), "stages": tables}


def test_merges_of_the_demo_are_the_packages() -> None:
    files = {"base": BASE / "model.safetensors"}
    files |= {name: folder / "model.safetensors" for name, folder in TUNED.items()}
    chance = random.Random(23)
    check_merges([random_setting(chance, list(TUNED)) for _ in range(5)], files)


def test_sums_over_several_chunks_are_the_packages(tmp_path: Path) -> None:
    """Norms and angles depend on the order in which a tensor's elements are added up."""
    rng = np.random.default_rng(32)
    base = rng.normal(0, 0.1, CHUNK + 3000).astype(np.float32)
    models = {"base": base}
    for name in ("one", "two"):
        models[name] = (base + rng.normal(0, 0.1, base.size)).astype(np.float32)
    header = {"long": entry("F32", [base.size], 0, base.nbytes)}
    files = {name: tmp_path / f"{name}.safetensors" for name in models}
    for name, values in models.items():
        files[name].write_bytes(file_bytes(header, values.tobytes()))

    code = """
    import { readFile } from "node:fs/promises";
    import { readSafetensors } from "./engine/safetensors.js";
    import { sumMagnitudes, sumProducts } from "./engine/sums.js";
    const read = async (path) => readSafetensors(Uint8Array.from(await readFile(path)).buffer);
    const [one, two] = (await Promise.all(given.map(read))).map((model) => model.get("long").data);
    answer([sumMagnitudes(one), sumProducts(one, two)]);
    """
    first, second = (
        [reference.sum_magnitudes(one), reference.sum_products(one, two)]
        for one, two in zip(*(np.split(models[n], [CHUNK]) for n in ("one", "two")), strict=True)
    )
    expected = [first[0] + second[0], first[1] + second[1]]
    one, two = models["one"], models["two"]
    assert expected[0] != reference.sum_magnitudes(one)  # else another order would not show
    assert expected[1] != reference.sum_products(one, two)
    assert run_module(code, [str(files["one"]), str(files["two"])]) == expected

    both = [{"name": n, "weight": None, "drop_rate": None, "seed": None} for n in ("one", "two")]
    stages: list[dict[str, dict[str, Any]]] = [
        {"dare": {"drop_rate": 0.7, "rescale": "l1"}, "trim": {"keep_ratio": 0.3}, "sum": {}},
        {"slerp": {"t": 0.3}},
        {"dare": {"drop_rate": 0.2}, "slerp": {"t": 0.6, "on": "deltas"}},
    ]
    plain = {"base": "base", "scale": 1.0, "seed": 1, "models": both}
    check_merges([{**plain, "method": "+".join(t), "stages": t} for t in stages], files)


def test_sines_agree_as_far_as_they_are_used() -> None:
    """Sines and arc cosines may differ in their last bit; what is made of them, in float32, not."""
    code = """
    import { arc } from "./engine/merge.js";
    answer(given.map(([cosine, t]) => arc(cosine, t)));
    """
    chance = random.Random(31)
    asked = [(chance.uniform(-1, 1), chance.random()) for _ in range(20000)]
    asked += [(chance.uniform(0.99, 0.9995), chance.random()) for _ in range(20000)]
    asked += [(cosine, t) for cosine in (-1, -0.9995, 0, 0.9995, 1) for t in (0, 0.5, 1)]

    found = np.array(run_module(code, asked))
    expected = np.array([arc(cosine, t) for cosine, t in asked])
    np.testing.assert_allclose(found, expected, rtol=1e-13, atol=0)
    for ours, theirs in ((found, expected), (found.sum(axis=1) - 1, expected.sum(axis=1) - 1)):
        np.testing.assert_array_equal(ours.astype(np.float32), theirs.astype(np.float32))


# ---------------------------------------------------------------- what is refused

REFUSED: list[Setting] = [
    {"method": "slerp", "models": ["add", "sort", "say"]},
    {"method": "slerp", "models": ["add", "sort"], "weight": 0.5},
    {"method": "dare+ties", "stages": {"dare": {"drop_rate": 1}}},
    {"method": "dare+ties", "stages": {"dare": {"drop_rate": 1.5}}},
    {"method": "dare+ties", "stages": {"dare": {"droprate": 0.5}}},
    {"method": "dare+linear", "drop_rate": -0.5},
    {"method": "linear", "drop_rate": 0.5},
    {"method": "linear", "stages": {"dare": {"drop_rate": 0.5}}},
    {"method": "trim+ties", "stages": {"ties": {"keep_ratio": 0.5}}},
    {"method": "trim+ties", "stages": {"trim": {"keep_ratio": 1.5}}},
    {"method": "trim+ties", "stages": {"trim": {"keep_ratio": -0.5}}},
    {"method": "trim+ties", "stages": {"trim": {"scope": "all"}}},
    {"method": "ties", "stages": {"ties": {"divide_by": "two"}}},
    {"method": "dare+dare+sum"},
    {"method": "dare+dares"},
    {"method": "ties+dare"},
    {"method": "sum", "seed": -1},
]
LISTS = re.compile(r" \(did you mean [^)]*\)| \(cabs, [^)]*\)|; stages: .*| beside the base; .*")
"""What the package says more: the nearest word, all words that it knows, other methods."""


def test_settings_that_make_no_sense_are_refused_in_the_packages_words() -> None:
    code = """
    import { mergeModels } from "./engine/merge.js";
    const models = new Map(["base", "add", "sort", "say"].map((name) => [name, new Map()]));
    const complaint = (setting) => {
      try {
        mergeModels(setting, models);
      } catch (error) {
        return error.message;
      }
    };
    answer(given.map(complaint));
    """
    settings = []
    for case in REFUSED:
        own = {name: case.get(name) for name in ("weight", "drop_rate")}
        names = case.get("models", ["add", "sort"])
        models = [{"name": name, "seed": None, **own} for name in names]
        plain = {"base": "base", "scale": 1.0, "seed": 42, "stages": {}}
        settings.append({**plain, **case, "models": models})
    files = {name: Path(name) for name in ("base", "add", "sort", "say")}
    for setting, found in zip(settings, run_module(code, settings), strict=True):
        with pytest.raises(RecipeError) as refused:
            to_recipe(setting, files)
        assert LISTS.sub("", found) == LISTS.sub("", str(refused.value))


def test_it_says_which_stages_need_the_package() -> None:
    code = """
    import { whyNot } from "./engine/merge.js";
    answer(Object.fromEntries(given.map((method) => [method, whyNot(method)])));
    """
    combines = [name for name, stage in STAGES.items() if stage.kind == "combine"]
    deltas = [name for name, stage in STAGES.items() if stage.kind == "delta"]
    methods = [*combines, *(f"{name}+sum" for name in deltas), *ALIASES]
    reasons = run_module(code, methods)
    here = {"dare", "trim", "linear", "sum", "ties", "slerp"}
    for method, reason in reasons.items():
        stages = ALIASES.get(method, method).split("+")
        if set(stages) <= here:
            assert reason is None, method
        else:
            (missing,) = set(stages) - here
            assert reason.startswith(f"{missing} is not in this page's own engine"), method
            assert "dare playground" in reason


def test_models_that_do_not_fit_are_refused() -> None:
    code = """
    import { readSafetensors } from "./engine/safetensors.js";
    import { mergeModels } from "./engine/merge.js";
    const weight = (dtype, shape, data) => new Map([["w", { dtype, shape, data }]]);
    const base = weight("BF16", [2], new Uint16Array(2));
    const steps = (values) => weight("I64", [2], BigInt64Array.from(values));
    const complaint = (action) => {
      try {
        action();
      } catch (error) {
        return error.message;
      }
    };
    const setting = { method: "sum", models: [{ name: "add" }] };
    const merged = (base, add) => mergeModels(setting, new Map(Object.entries({ base, add })));
    answer([
      complaint(() => merged(base, new Map())),
      complaint(() => merged(base, weight("BF16", [1, 2], new Uint16Array(2)))),
      complaint(() => merged(new Map(), base)),
      complaint(() => merged(steps([1n, 2n]), steps([1n, 3n]))),
      complaint(() => merged(weight("F64", [1], new Float64Array(1)), weight("F64", [1], [1]))),
      complaint(() => readSafetensors(new ArrayBuffer(7))),
      complaint(() => readSafetensors(Uint8Array.from([9, 0, 0, 0, 0, 0, 0, 0, 123]).buffer)),
    ]);
    """
    assert run_module(code) == [
        "w: not in add",
        "w: base is BF16 [2], add is BF16 [1, 2]",
        "w: in add, not in the base",
        "w: the I64 values of add differ from the base's and cannot be merged",
        "w: weights of type F64 need the local engine, dare playground",
        "This is not a safetensors file.",
        "This is not a safetensors file.",
    ]
