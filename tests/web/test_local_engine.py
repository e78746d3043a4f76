"""What the local engine answers is what the package itself gives, computed here another way."""

from __future__ import annotations

import hashlib
import json
import math
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dare
from dare.demo.broken import broken_model
from dare.demo.llama import Llama
from dare.demo.merges import BASE, CONFIG, TUNED
from dare.demo.tasks import TASKS, held_out_english
from dare.errors import DareError
from dare.planning.machine import available_cores
from dare.stages import STAGES
from dare.web.engine import Engine, Kept, recipe_of
from dare.web.server import Cancelled

THREE = ("add", "sort", "say")
AMOUNT = {"prompts": 6, "englishBytes": 768}


def setting(*models: Any, **others: Any) -> dict[str, Any]:
    """A setting as the page sends it: all that is not given is null."""
    empty = {"weight": None, "drop_rate": None, "seed": None}
    entries = [{"name": m} if isinstance(m, str) else m for m in models]
    given = {"base": "base", "method": "dare+ties", "scale": 1, "seed": 42, "stages": {}, **others}
    return {**given, "models": [{**empty, **entry} for entry in entries]}


def go_on() -> None:
    """Somebody waits for the answer."""


@pytest.fixture(scope="module")
def engine() -> Any:
    engine = Engine()
    yield engine
    engine.close()


def sha256_of_file(path: Path) -> str:
    """Read as the format's own description has it."""
    content = path.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    header.pop("__metadata__", None)
    spans = (header[name]["data_offsets"] for name in sorted(header, key=str.encode))
    return hashlib.sha256(b"".join(content[start + a : start + b] for a, b in spans)).hexdigest()


def merged(folder: Path, **fields: Any) -> Path:
    output = folder / "merged.safetensors"
    recipe = dare.Recipe(**{"base": BASE, "output": output, "verbose": False, **fields})
    dare.merge(recipe, overwrite=True)
    return output


def asked(what: dict[str, Any], **others: Any) -> dict[str, Any]:
    return {"setting": what, **others}


def test_a_setting_gives_the_weights_that_a_merge_writes(engine, tmp_path):
    models = [
        {"name": "add", "drop_rate": 0.3, "weight": 1.5},
        {"name": "sort", "seed": 7},
        {"name": "say", "weight": 0.5},
    ]
    found = engine.merge(
        asked(setting(*models, scale=0.8, seed=70, stages={"dare": {"drop_rate": 0.6}})), go_on
    )
    output = merged(
        tmp_path,
        models=[
            dare.ModelEntry(file=TUNED["add"], weight=1.5, settings={"drop_rate": 0.3}),
            dare.ModelEntry(file=TUNED["sort"], seed=7),
            dare.ModelEntry(file=TUNED["say"], weight=0.5),
        ],
        method="dare+ties",
        scale=0.8,
        seed=70,
        stages={"dare": {"drop_rate": 0.6}},
    )
    assert found == {"sha256": sha256_of_file(output), "warnings": []}
    assert found["sha256"] == dare.verify(output).sha256


@pytest.mark.parametrize(
    ("names", "method"),
    [
        (THREE, "trim+ties"),  # sees whole tensors
        (THREE, "dare+trim+linear"),  # two delta stages
        (THREE[:2], "slerp"),  # two models, which have no weights
        (THREE, "iso"),  # sees whole matrices
    ],
)
def test_other_kinds_of_methods_give_the_weights_of_a_merge(engine, tmp_path, names, method):
    found = engine.merge(asked(setting(*names, method=method)), go_on)
    output = merged(tmp_path, models=[TUNED[name] for name in names], method=method)
    assert found["sha256"] == dare.verify(output).sha256


def test_every_chain_is_a_recipe():
    combines = {name: s.models or 3 for name, s in STAGES.items() if s.kind == "combine"}
    chains = {f"{name}+sum": 3 for name, s in STAGES.items() if s.kind == "delta"} | combines
    for method, models in chains.items():
        recipe = recipe_of(setting(*THREE[:models], method=method), Path)
        assert recipe.method == method
        assert [str(entry.file) for entry in recipe.models] == list(THREE[:models])


def test_without_models_it_is_the_base_as_it_is(engine):
    found = engine.merge(asked(setting()), go_on)
    assert found["sha256"] == sha256_of_file(BASE / "model.safetensors")


def test_broken_models_are_merged_too(engine, tmp_path):
    broken = tmp_path / "base-permuted.safetensors"
    broken.write_bytes(broken_model("base-permuted"))
    what = setting("add", base="base-permuted", method="dare+sum")
    output = merged(tmp_path, base=broken, models=[TUNED["add"]], method="dare+sum")
    assert engine.merge(asked(what), go_on)["sha256"] == dare.verify(output).sha256


def test_scores_are_those_of_the_model(engine, tmp_path):
    stages = {"dare": {"drop_rate": 0.5}}
    found = engine.score(asked(setting(*THREE, stages=stages), amount=AMOUNT), go_on)
    output = merged(tmp_path, models=list(TUNED.values()), method="dare+ties", stages=stages)
    model = Llama(output, CONFIG)
    right = {task.name: sum(model.are_right(task.examples("test", 6))) for task in TASKS}
    assert found["right"] == right
    assert 3 < sum(right.values()) < 18, "so that one who does not look would be noticed"
    assert found["asked"] == dict.fromkeys(right, 6)
    assert found["bitsPerByte"] == pytest.approx(
        model.bits_per_byte(held_out_english()[:768]), rel=1e-5
    )


def test_prompts_are_the_first_that_the_page_has(engine):
    from dare.web.assets import prompts

    shown = json.loads(prompts())["tasks"]
    for task, on_page in zip(TASKS, shown, strict=True):
        assert [tuple(e) for e in on_page["examples"][:6]] == task.examples("test", 6)


def test_what_the_model_writes(engine, tmp_path):
    prompts = ["37+58=", "sort planet:", "say 347:", "In the beginning"]
    found = engine.write(asked(setting("add", method="sum"), prompts=prompts), go_on)
    output = merged(tmp_path, models=[TUNED["add"]], method="sum")
    assert found["texts"] == Llama(output, CONFIG).write(prompts)
    assert found["texts"][0] == "95"


def test_letters_of_latin_1_are_bytes_to_the_model(engine):
    found = engine.write(asked(setting(), prompts=["é", "ÿ"]), go_on)["texts"]
    assert found == Llama(BASE, CONFIG).write(["\xe9", "\xff"])


def test_a_model_of_nothing_but_nan_has_no_bits(engine):
    what = setting("add-nan", method="sum")
    found = engine.score(asked(what, amount=AMOUNT), go_on)
    assert found["right"] == dict.fromkeys(THREE, 0)
    assert found["bitsPerByte"] is None


def test_no_english_and_no_prompts_make_no_score(engine):
    amount = {"prompts": 0, "englishBytes": 0}
    found = engine.score(asked(setting(), amount=amount), go_on)
    zeros = dict.fromkeys(THREE, 0)
    assert found == {"right": zeros, "asked": zeros, "bitsPerByte": None}


def test_warnings_of_the_plan_come_along(engine):
    same = [{"name": "add", "seed": 1}, {"name": "sort", "seed": 1}]
    (warning,) = engine.merge(asked(setting(*same)), go_on)["warnings"]
    assert "share a seed" in warning


@pytest.mark.parametrize(
    ("what", "message"),
    [
        (setting("nobody"), "there is no model 'nobody'; there are base, add, sort, say"),
        (setting("add", base="../base"), "there is no model '../base'"),
        (setting("add", method="drae+sum"), "did you mean 'dare'"),
        (setting(*THREE, method="slerp"), "slerp merges 2 models, and 3 are given"),
        (setting("add", stages={"dare": {"drop_rate": 1}}), "drop_rate = 1"),
        (setting("add", output="x"), "output: not known"),
        (setting({"name": "add", "drop_rte": 1}), "did you mean 'drop_rate'"),
        ({**setting(), "models": ["add"]}, "must be an object with a name"),
        ({**setting(), "models": {"add": 1}}, "models: must be a list"),
    ],
)
def test_what_makes_no_sense_is_refused_in_words(engine, what, message):
    with pytest.raises(DareError, match=message.replace("(", r"\(")):
        engine.merge(asked(what), go_on)


@pytest.mark.parametrize(
    ("method", "question", "message"),
    [
        ("merge", {}, "setting: must be an object"),
        ("score", asked(setting()), "amount: must be an object"),
        ("score", asked(setting(), amount={"prompts": 101, "englishBytes": 0}), "from 0 to 100"),
        ("score", asked(setting(), amount={"prompts": True, "englishBytes": 0}), "whole number"),
        ("write", asked(setting(), prompts="37+58="), "prompts: must be a list"),
        ("write", asked(setting(), prompts=[""]), "The prompt is empty"),
        ("write", asked(setting(), prompts=["a" * 257]), "has 257 characters.*at most 256"),
        ("write", asked(setting(), prompts=["3–4="]), "cannot read “–”"),
        ("write", asked(setting(), prompts=["a"] * 65), "at most 64 are allowed"),
        ("write", asked(setting(), prompts=[1]), "must be text"),
    ],
)
def test_questions_are_checked(engine, method, question, message):
    with pytest.raises(DareError, match=message):
        getattr(engine, method)(question, go_on)


def test_a_long_prompt_is_continued_to_the_end_of_the_context(engine):
    prompts = ["a" * 217, "a" * 250, "a" * 256]
    texts = engine.write(asked(setting(), prompts=prompts), go_on)["texts"]
    assert [len(text) for text in texts] == [40, 7, 1]


def test_a_slow_merge_ends_soon_when_nobody_waits(engine):
    what = setting(*THREE, method="wudi", stages={"wudi": {"steps": 2000}})  # a quarter of a minute
    begun = time.perf_counter()

    def check() -> None:
        if time.perf_counter() > begun + 0.3:
            raise Cancelled

    with pytest.raises(Cancelled):
        engine.merge(asked(what), check)
    assert time.perf_counter() - begun < 10
    # and what was begun is not taken for the result
    steps = {"wudi": {"steps": 1}}
    first = engine.merge(asked({**what, "stages": steps}), go_on)
    assert first == engine.merge(asked({**what, "stages": steps}), go_on)


def test_scoring_ends_between_its_pieces(engine, monkeypatch):
    pieces: list[int] = []
    compute = Llama.logits

    def counted(self: Llama, tokens: Any, *cache: Any) -> Any:
        pieces.append(len(tokens))
        return compute(self, tokens, *cache)

    def check() -> None:
        if len(pieces) >= 3:
            raise Cancelled

    monkeypatch.setattr(Llama, "logits", counted)
    with pytest.raises(Cancelled):
        engine.score(asked(setting(*THREE, seed=77), amount=AMOUNT), check)
    assert 3 <= len(pieces) <= 3 + available_cores()
    engine.score(asked(setting(*THREE, seed=77), amount=AMOUNT), go_on)
    assert len(pieces) > 10


def test_what_was_seen_is_kept(engine):
    question = asked(setting("say", seed=3), amount=AMOUNT)
    first = engine.score(question, go_on)
    begun = time.perf_counter()
    assert engine.score(json.loads(json.dumps(question)), go_on) is first
    assert time.perf_counter() - begun < 0.1


def test_kept_values_are_made_once_and_the_oldest_go():
    kept: Kept[str] = Kept(2)
    made: list[str] = []

    def make(name: str) -> Any:
        def made_now() -> str:
            made.append(name)
            time.sleep(0.02)
            return name

        return made_now

    threads = [threading.Thread(target=kept.get, args=("a", make("a"), go_on)) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made == ["a"]
    for name in "bca":
        kept.get(name, make(name), go_on)
    assert made == ["a", "b", "c", "a"]


def test_who_waits_for_a_value_can_leave():
    kept: Kept[int] = Kept(1)
    entered, leave = threading.Event(), threading.Event()

    def slow() -> int:
        entered.set()
        leave.wait(10)
        return 1

    maker = threading.Thread(target=kept.get, args=("x", slow, go_on))
    maker.start()
    entered.wait(10)

    def nobody() -> None:
        raise Cancelled

    with pytest.raises(Cancelled):
        kept.get("x", lambda: 2, nobody)
    leave.set()
    maker.join()
    assert kept.get("x", lambda: 3, go_on) == 1


def test_a_failure_is_not_kept():
    kept: Kept[int] = Kept(1)
    with pytest.raises(ZeroDivisionError):
        kept.get("x", lambda: 1 // 0, go_on)
    assert kept.get("x", lambda: 5, go_on) == 5


def test_scores_are_numbers_that_json_has(engine):
    found = engine.score(asked(setting(), amount=AMOUNT), go_on)
    assert math.isfinite(json.loads(json.dumps(found, allow_nan=False))["bitsPerByte"])
    assert isinstance(found["right"]["add"], int)
    assert not isinstance(found["right"]["add"], np.generic)
