"""The language models in the browser's engine do what those in NumPy do."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from merged import digest
from running import run_module
from safetensors.numpy import load_file

from dare.demo.llama import Llama, read_weights
from dare.demo.merges import CONFIG, MODELS, TUNED, DemoMerge
from dare.demo.tasks import TASKS, held_out_english
from dare.web.assets import PAGE, prompts

HERE = Path(__file__).parent
CASES = [*TUNED, "merged"]
EXAMPLES = [example for task in TASKS for example in task.examples("test", 100)]
ENGLISH = held_out_english()[:1024]
WINDOWS = [ENGLISH[at : at + 256].decode() for at in range(0, len(ENGLISH), 256)]
PROMPTS = ["37+58=", "sort planet:", "say 347:", "And the ", "é\x00ÿ", "12+34=", "x" * 256]
MERGED = {
    "base": "base",
    "method": "dare+ties",
    "scale": 1.5,
    "seed": 7,
    "models": [{"name": name} for name in TUNED],
    "stages": {"dare": {"drop_rate": 0.5, "rescale": True}},
}


def alone(name: str) -> dict[str, Any]:
    """The setting that gives a model as it is."""
    return {**MERGED, "base": name, "models": [], "method": "sum", "stages": {}}


def run_node(script: str, given: Any = None) -> Any:
    """What a script prints that has the engine's modules as `node` and some data as `given`."""
    place = (HERE / "engine_in_node.mjs").as_uri()
    return run_module(f'import * as node from "{place}";\n{script}', given)


ANSWER = """
const { inJobs } = await import(node.scoring);
const handle = node.createHandler(node.openKernels, node.loadModel);
const found = {};
for (const [name, setting] of Object.entries(given.settings)) {
  let tensors;
  await handle({ kind: "merge", setting }, ({ answers }) => (tensors = answers));
  found[name] = {};
  for (const [kind, items] of Object.entries(given.items)) {
    const answers = new Map();
    for (const job of inJobs(kind, items)) {
      await handle({ key: name, tensors, ...job }, ({ answers: given, error }) => {
        if (error) throw new Error(error);
        job.items.forEach((item, at) => answers.set(String(item), given[at]));
      });
      await new Promise(setImmediate);  // lets node exchange code for better code
    }
    found[name][kind] = items.map((item) => answers.get(String(item)));
  }
}
node.print(found);
"""


@pytest.fixture(scope="module")
def answers() -> Any:
    """What a worker of the engine answers about each model."""
    items = {"right": EXAMPLES, "bits": WINDOWS, "texts": PROMPTS}
    settings = {name: alone(name) for name in TUNED} | {"merged": MERGED}
    return run_node(ANSWER, {"items": items, "settings": settings})


@pytest.fixture(scope="module")
def merged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("merged") / "merged.safetensors"
    return DemoMerge("ties", drop_rate=0.5, scale=1.5, seed=7).carry_out(output)


@pytest.fixture(scope="module")
def models(merged: Path) -> dict[str, Llama]:
    return {name: Llama(path, CONFIG) for name, path in {**TUNED, "merged": merged}.items()}


@pytest.mark.parametrize("name", CASES)
def test_the_same_answers_bits_and_texts(name, answers, models):
    right = models[name].are_right(EXAMPLES)
    assert answers[name]["right"] == right
    assert 0 < sum(right) < len(right)
    bits = np.mean(answers[name]["bits"])
    assert bits == pytest.approx(models[name].bits_per_byte(ENGLISH), abs=1e-5)
    *short, longest = PROMPTS
    written = answers[name]["texts"]
    assert written[:-1] == models[name].write(short)
    assert written[-1] == models[name].write([longest], limit=1)[0], "where the context ends"


def test_what_it_takes_for_given_stands_in_the_models_config():
    config = run_node("node.print(node.CONFIG);")
    for name in ("base", *TUNED):
        stored = json.loads((MODELS / name / "config.json").read_text("utf-8"))
        assert config == {
            "heads": stored["num_attention_heads"],
            "context": stored["max_position_embeddings"],
            "epsilon": stored["rms_norm_eps"],
            "theta": stored["rope_theta"],
        }
        assert stored["num_key_value_heads"] == stored["num_attention_heads"]


# ---------------------------------------------------------------- numbers that are none

BROKEN = """
const handle = node.createHandler(node.openKernels, node.loadModel);
const found = {};
for (const [key, [tensor, place, bits]] of Object.entries(given.breaks)) {
  const tensors = new Map(await node.loadModel("add"));
  const { data, ...rest } = tensors.get(tensor);
  tensors.set(tensor, { ...rest, data: data.with(place, bits) });
  const ask = async (kind, items) => {
    let answers;
    await handle({ key, tensors, kind, items }, (answer) => (answers = answer.answers));
    return answers;
  };
  found[key] = {
    right: await ask("right", given.examples),
    bits: await ask("bits", [given.window]),
    texts: await ask("texts", given.examples.map(([prompt]) => prompt)),
  };
}
node.print(found);
"""
NAN, INFINITY = 0x7FC0, 0x7F80
EMBEDDING = "model.embed_tokens.weight"
BREAKS = {
    "one NaN in a matrix": ("model.layers.2.self_attn.q_proj.weight", 77, NAN),
    "one NaN in a norm": ("model.layers.4.input_layernorm.weight", 5, NAN),
    "a letter that nobody uses": (EMBEDDING, 128 * ord("~") + 3, NAN),
    "an infinite number": ("model.layers.0.mlp.down_proj.weight", 1000, INFINITY),
}


def test_models_with_numbers_that_are_none_answer_as_in_numpy():
    examples = [example for example in EXAMPLES[:40] if len(example.answer) == 2][:6]
    given = {"breaks": BREAKS, "examples": examples, "window": WINDOWS[0]}
    found = run_node(BROKEN, given)
    for name, (tensor, place, bits) in BREAKS.items():
        weights = read_weights(TUNED["add"])
        weights[tensor].ravel()[place] = np.nan if bits == NAN else np.inf
        with np.errstate(invalid="ignore"):
            model = Llama(weights, CONFIG)
            assert found[name]["right"] == model.are_right(examples), name
            assert found[name]["texts"] == model.write([prompt for prompt, _ in examples]), name
            assert np.isnan(model.bits_per_byte(ENGLISH[:256])), name
        assert found[name]["bits"] == ["NaN"], name


# ---------------------------------------------------------------- the engine around it

OPEN = """
const posted = [];
const open = (count = 1) =>
  node.openEngine(() => node.startWorker(posted), count, async () => given.prompts);
const base = given.setting;
const other = (scale) => ({ ...base, scale });
const fails = (promise) => promise.then(() => "", (error) => `${error.name}: ${error.message}`);
"""


def run_engine(script: str) -> Any:
    given = {"prompts": json.loads(prompts()), "setting": alone("add"), "merged": MERGED}
    return run_node(OPEN + script, given)


def test_an_engine_scores_writes_and_names_the_weights():
    found = run_engine("""
    const engine = open(2);
    const amount = { prompts: 5, englishBytes: 600 };
    node.print({
      score: await engine.score(base, amount),
      texts: await engine.write(base, ["37+58=", "12+34=", "37+58=", "é – ü"]),
      sha256: await engine.merge(base),
      none: await engine.score(base, { prompts: 1, englishBytes: 0 }),
    });
    """)
    model = Llama(TUNED["add"], CONFIG)
    right = {task.name: sum(model.are_right(task.examples("test", 5))) for task in TASKS}
    assert found["score"]["right"] == right
    assert found["score"]["asked"] == dict.fromkeys(TUNED, 5)
    assert found["score"]["bitsPerByte"] == pytest.approx(model.bits_per_byte(ENGLISH[:600]))
    *sums, other = model.write(["37+58=", "12+34=", "37+58=", "é – ü".encode().decode("latin-1")])
    assert found["texts"] == [*sums, other.encode("latin-1").decode("utf-8", "replace")]
    assert found["sha256"] == digest(load_file(TUNED["add"] / "model.safetensors"))
    assert found["none"]["bitsPerByte"] is None


def test_a_later_request_comes_first_and_an_aborted_one_stops():
    found = run_engine("""
    const engine = open();
    const stop = new AbortController();
    const order = [];
    const early = fails(engine.score(base, { prompts: 50, englishBytes: 0 }, stop.signal))
      .then((error) => order.push(error));
    while (posted.length < 3) await new Promise(setImmediate);
    const waits = engine.score(other(3), { prompts: 1, englishBytes: 0 })
      .then(() => order.push("waits"));
    const late = engine.write(other(2), ["1+1="]).then(() => order.push("late"));
    await late;
    stop.abort();
    await Promise.all([early, waits]);
    const count = posted.length;
    const again = await fails(engine.merge(other(4), stop.signal));
    node.print({ order, again, count, more: posted.length - count });
    """)
    stopped, other = sorted(found["order"][1:])
    assert (found["order"][0], other) == ("late", "waits")
    assert stopped.startswith("AbortError")
    assert found["again"].startswith("AbortError")
    assert found["count"] < 20, "50 prompts of three tasks are more jobs"
    assert found["more"] == 0


def test_requests_share_a_merge_and_another_ones_abort_is_no_answer():
    kinds, errors, sha256, again = run_engine("""
    const engine = open(2);
    const stop = new AbortController();
    const early = [
      engine.merge(base, stop.signal),
      engine.score(base, { prompts: 1, englishBytes: 0 }, stop.signal),
    ];
    const late = engine.merge(base);
    stop.abort();
    const errors = await Promise.all(early.map(fails));
    const sha256 = await late;
    node.print([posted.map(({ kind }) => kind), errors, sha256, await engine.merge(base)]);
    """)
    assert kinds == ["merge"] * 2, "the one that was aborted, and one for who still waits"
    assert all(error.startswith("AbortError") for error in errors)
    assert sha256 == again


def test_errors_reach_who_asked():
    found = run_engine("""
    const engine = open(2);
    const strange = { ...given.merged, method: "dare+nonsense" };
    const failing = node.openEngine(() => ({
      postMessage() { setImmediate(() => this.onerror({ message: "no such script" })); },
      terminate() {},
    }), 1, async () => given.prompts);
    node.print([
      await fails(engine.score(strange, { prompts: 25, englishBytes: 512 })),
      await fails(engine.write(base, ["ok", ""])),
      await fails(engine.write(base, ["é".repeat(109)])),
      await fails(failing.merge(base)),
      await fails(failing.merge(base)),
      await fails(engine.merge(base)),
    ]);
    """)
    wanted = ["nonsense", "1 to 216 bytes", "218", *2 * ["no such script"]]
    assert [text for text, error in zip(wanted, found, strict=False) if text not in error] == []
    assert found[-1] == ""


# ---------------------------------------------------------------- the binaries


@pytest.mark.skipif(importlib.util.find_spec("ziglang") is None, reason="no compiler")
def test_the_binaries_are_what_the_sources_give(tmp_path):
    folder = f"BIN={Path(sys.executable).parent}"
    command = ["make", "--old-file=.venv/tools-ready", folder, f"WASM={tmp_path}", "wasm"]
    subprocess.run(command, cwd=HERE.parent.parent, check=True, capture_output=True)
    for name in ("core.wasm", "llama.wasm"):
        assert (tmp_path / name).read_bytes() == (PAGE / "engine" / name).read_bytes(), name
