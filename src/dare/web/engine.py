"""Merges of the demonstration's models for the page: made, hashed, scored and asked in memory.

`page/engines.js` says what a setting and an amount are. What was made last is kept, and so are all
answers, until there are too many. Work is done in small pieces; before each the caller's `check` is
called, which raises when nobody waits for the answer any more.
"""

from __future__ import annotations

import hashlib
import json
import math
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from dare.api import plan
from dare.demo.llama import Llama
from dare.demo.merges import BASE, CONFIG, TUNED
from dare.demo.tasks import TASKS, Example, held_out_english
from dare.errors import RecipeError, did_you_mean
from dare.inputs.sources import open_source
from dare.planning.machine import available_cores
from dare.recipe.schema import ModelEntry, Recipe
from dare.studies.candidates import Candidates
from dare.web.assets import ENGLISH_BYTES, MODELS, PROMPTS

MODELS_KEPT = 8
"""Merged models in memory, of 4 MB each."""
ANSWERS_KEPT = 2000
WRITTEN_BYTES = 40
MOST_PROMPTS = 64
CONTEXT: int = json.loads(CONFIG.read_text("utf-8"))["max_position_embeddings"]
BYTES = 256
"""What the models read and write, each a character of Latin-1."""
WINDOWS_AT_ONCE = 2
"""Stretches of English, each as long as a model's context, in a piece of work."""

Arrays = Mapping[str, NDArray[Any]]
Check = Callable[[], None]
Answer = dict[str, Any]
Value = TypeVar("Value")


@dataclass(frozen=True)
class Merged:
    """A merged model, and what can be said of it."""

    model: Llama
    sha256: str
    warnings: tuple[str, ...]


class Engine:
    """Answers for settings. Its methods are called in threads, several at a time."""

    def __init__(self) -> None:
        self._merged: Kept[Merged] = Kept(MODELS_KEPT)
        self._answers: Kept[Answer] = Kept(ANSWERS_KEPT)
        self._models = Models()
        self._pool = ThreadPoolExecutor(available_cores(), thread_name_prefix="dare-score")

    def merge(self, asked: Mapping[str, Any], check: Check) -> Answer:
        """The SHA-256 of the merged weights, and what there is to warn of."""
        merged = self._merge(_part(asked, "setting", dict), check)
        return {"sha256": merged.sha256, "warnings": list(merged.warnings)}

    def score(self, asked: Mapping[str, Any], check: Check) -> Answer:
        """Right answers by task, of how many, and the bits that a byte of English takes."""
        setting = _part(asked, "setting", dict)
        amount = _part(asked, "amount", dict)
        prompts = _count(amount, "prompts", PROMPTS)
        english_bytes = _count(amount, "englishBytes", ENGLISH_BYTES)

        def find() -> Answer:
            model = self._merge(setting, check).model
            return self._score(model, prompts, english_bytes, check)

        return self._answers.get(("score", _key(setting), prompts, english_bytes), find, check)

    def write(self, asked: Mapping[str, Any], check: Check) -> Answer:
        """What the merged model writes after each prompt, up to the end of the line."""
        setting = _part(asked, "setting", dict)
        prompts = _checked_prompts(_part(asked, "prompts", list))

        def find() -> Answer:
            model = self._merge(setting, check).model
            work = [partial(_write, model, prompt) for prompt in prompts]
            return {"texts": self._do(work, check)}

        return self._answers.get(("write", _key(setting), tuple(prompts)), find, check)

    def close(self) -> None:
        """Begin nothing more, and delete what was written."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._models.close()

    def _merge(self, setting: Mapping[str, Any], check: Check) -> Merged:
        def make() -> Merged:
            if not setting.get("models"):
                return _finish(_stored(self._models.find(setting.get("base", "base"))), ())
            recipe = recipe_of(setting, self._models.find)
            warnings = tuple(str(notice) for notice in plan(recipe).warnings)
            made = self._models.in_memory().make(recipe, progress=lambda _nbytes: check())
            return _finish(made.arrays, warnings)

        return self._merged.get(_key(setting), make, check)

    def _score(self, model: Llama, prompts: int, english_bytes: int, check: Check) -> Answer:
        asked = {task.name: task.examples("test", prompts) for task in TASKS}
        english = held_out_english()[: english_bytes // CONTEXT * CONTEXT]
        stretch = CONTEXT * WINDOWS_AT_ONCE
        stretches = [english[at : at + stretch] for at in range(0, len(english), stretch)]
        groups = _by_length(asked)
        found = self._do(
            [
                *(partial(model.bits_per_byte, text) for text in stretches),
                *(partial(model.are_right, [example for _, example in each]) for each in groups),
            ],
            check,
        )
        bits = [value * len(text) for value, text in zip(found, stretches, strict=False)]
        right = dict.fromkeys(asked, 0)
        for group, outcomes in zip(groups, found[len(stretches) :], strict=True):
            for (task, _), is_right in zip(group, outcomes, strict=True):
                right[task] += is_right
        mean = sum(bits) / len(english) if english else math.nan
        return {
            "right": right,
            "asked": {task: len(examples) for task, examples in asked.items()},
            "bitsPerByte": mean if math.isfinite(mean) else None,
        }

    def _do(self, work: Sequence[Callable[[], Any]], check: Check) -> list[Any]:
        """Do pieces of work on all cores; the results are in their order."""

        def do(piece: Callable[[], Any]) -> Any:
            check()
            with np.errstate(all="ignore"):  # broken models are asked too
                return piece()

        return list(self._pool.map(do, work))


class Models:
    """The demonstration's models as files, and in memory."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._files: dict[str, Path] = {"base": BASE, **TUNED}
        self._held: Candidates | None = None
        self._made: tempfile.TemporaryDirectory[str] | None = None

    def find(self, name: Any) -> Path:
        """Where a model lies; one that is broken on purpose is made when it is asked for."""
        if not isinstance(name, str) or name not in MODELS:
            raise RecipeError(f"there is no model {name!r}; there are {', '.join(MODELS)}")
        with self._lock:
            if name not in self._files:
                self._made = self._made or tempfile.TemporaryDirectory(prefix="dare-")
                path = Path(self._made.name) / f"{name}.safetensors"
                path.write_bytes(MODELS[name]())
                self._files[name], self._held = path, None
            return self._files[name]

    def close(self) -> None:
        """Delete the models that were made."""
        with self._lock:
            if self._made is not None:
                self._made.cleanup()

    def in_memory(self) -> Candidates:
        """What makes merges of all models that were ever asked for."""
        with self._lock:
            if self._held is None:
                base, *others = self._files.values()
                self._held = Candidates(Recipe(base=base, models=others, verbose=False))
            return self._held


class Kept(Generic[Value]):
    """Values that were made last, by key, each made once by whoever asks first."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._places: OrderedDict[Any, _Place[Value]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Any, make: Callable[[], Value], check: Check) -> Value:
        """The value of a key, made if it is not there; who waits for it can be cancelled."""
        with self._lock:
            place = self._places.setdefault(key, _Place())
            self._places.move_to_end(key)
            if len(self._places) > self._most:
                self._places.popitem(last=False)
        with _held(place.making, check):
            if place.value is None:
                place.value = make()
            return place.value


class _Place(Generic[Value]):
    def __init__(self) -> None:
        self.making = threading.Lock()
        self.value: Value | None = None


@contextmanager
def _held(lock: threading.Lock, check: Check) -> Iterator[None]:
    """Hold a lock; look up from waiting for it now and then."""
    check()
    while not lock.acquire(timeout=0.05):
        check()
    try:
        yield
    finally:
        lock.release()


# ---------------------------------------------------------------- settings


def recipe_of(setting: Mapping[str, Any], find: Callable[[Any], Path]) -> Recipe:
    """The recipe that a setting stands for; `find` finds a model by its name."""
    known = ("base", "method", "scale", "seed", "models", "stages")
    for name in setting:
        if name not in known:
            raise RecipeError(f"{name}: not known{did_you_mean(name, known)}")
    given = {name: value for name, value in setting.items() if value is not None}
    return Recipe(
        **given
        | {
            "base": find(setting.get("base", "base")),
            "models": [_entry(model, find) for model in _part(setting, "models", list)],
            "allow_not_finite": True,  # the page shows what one NaN does
            "verbose": False,
        }
    )


def _entry(model: Any, find: Callable[[Any], Path]) -> ModelEntry:
    if not isinstance(model, dict):
        raise RecipeError(f"models: {model!r} must be an object with a name")
    given = {name: value for name, value in model.items() if value is not None}
    file = find(given.pop("name", None))
    fields = {name: given.pop(name) for name in ("weight", "seed") if name in given}
    return ModelEntry(file=file, settings=given, **fields)


def _part(asked: Mapping[str, Any], name: str, kind: type[Value]) -> Value:
    value = asked.get(name)
    if not isinstance(value, kind):
        word = {dict: "an object", list: "a list"}[kind]  # type: ignore[index]
        raise RecipeError(f"{name}: must be {word}, not {value!r}")
    return value


def _count(amount: Mapping[str, Any], name: str, most: int) -> int:
    value = amount.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= most:
        raise RecipeError(f"{name}: must be a whole number from 0 to {most}, not {value!r}")
    return value


def _checked_prompts(prompts: Sequence[Any]) -> list[str]:
    """Prompts that the models can read; the browser's engine says the same of others."""
    if len(prompts) > MOST_PROMPTS:
        raise RecipeError(f"prompts: {len(prompts)} given; at most {MOST_PROMPTS} are allowed")
    for prompt in prompts:
        if not isinstance(prompt, str):
            raise RecipeError(f"prompts: {prompt!r} must be text")
        if not prompt:
            raise RecipeError("The prompt is empty. It needs at least one character.")
        if len(prompt) > CONTEXT:
            raise RecipeError(
                f"The prompt has {len(prompt)} characters. The models read at most {CONTEXT}."
            )
        if unknown := [letter for letter in prompt if ord(letter) >= BYTES]:
            raise RecipeError(
                f"The models cannot read “{unknown[0]}”. They know the {BYTES} characters of "
                "Latin-1."
            )
    return list(prompts)


def _key(setting: Mapping[str, Any]) -> str:
    return json.dumps(setting, sort_keys=True)


# ---------------------------------------------------------------- models


def _stored(path: Path) -> Arrays:
    """The tensors of a model as they are."""
    arrays = {}
    with open_source(path) as source:
        for name, info in source.tensors.items():
            raw = np.empty(info.elements, info.dtype.carrier)
            source.read(name, 0, raw)
            arrays[name] = raw.view(info.dtype.numpy_type).reshape(info.shape)
    return arrays


def _finish(arrays: Arrays, warnings: tuple[str, ...]) -> Merged:
    return Merged(Llama(arrays, CONFIG), sha256_of(arrays), warnings)


def sha256_of(arrays: Arrays) -> str:
    """Over the stored bytes of all tensors, in the order of their names."""
    digest = hashlib.sha256()
    for name in sorted(arrays, key=str.encode):
        digest.update(np.ascontiguousarray(arrays[name]).view(np.uint8).data)
    return digest.hexdigest()


def _by_length(asked: Mapping[str, Sequence[Example]]) -> list[list[tuple[str, Example]]]:
    """Examples of all tasks with their tasks' names, those of one length together."""
    groups: dict[int, list[tuple[str, Example]]] = {}
    for task, examples in asked.items():
        for example in examples:
            groups.setdefault(sum(map(len, example)), []).append((task, example))
    return list(groups.values())


def _write(model: Llama, prompt: str) -> str:
    """What a model writes, up to the end of its context."""
    (written,) = model.write([prompt], min(WRITTEN_BYTES, CONTEXT - len(prompt) + 1))
    return written
