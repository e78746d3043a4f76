"""Small merges to attack, and what must be true of them whatever happens.

A `Place` is a folder with `inputs/`, which nothing may ever touch, and `work/`, where outputs are
made. A `Scenario` is a command that is run in `work/`, perhaps over the output of an earlier one.
An undisturbed run says what the end must look like.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from interposing import Attack, Outcome, Warm
from ml_dtypes import float8_e4m3fn
from peft_models import pair, write_adapter
from power import Contents, played, read_log
from tiny_models import config, make_directory, parts_of, weights
from watching import Call

from helpers import save, sha256

Attacked = TypeVar("Attacked")

OF_THE_RUN = {"seconds", "bytes_read", "resumed_chunks", "threads", "README.md"}
"""What a manifest says of the run, not of the output. An adapter's page says how long it took."""
SECONDS = re.compile(rb"\d+\.\d s\b")

MODELS = ("--base", "../inputs/base.safetensors", "--merge", "../inputs/one.safetensors")
MODELS = (*MODELS, "../inputs/two.safetensors")
FOLDERS = ("--base", "../inputs/base", "--merge", "../inputs/one", "../inputs/two")
SETTINGS = ("--method", "dare_ties", "--drop-rate", "0.4", "--threads", "1")
SHARDS = (*FOLDERS, *SETTINGS, "--shard-size", "1MB")
CENSUS = ("--method", "trim+ties", "--scope", "model", "--threads", "1")
EXTRACT = ("lora", "extract", "--base", "../inputs/small", "--model", "../inputs/tuned")
ADAPTERS = ("lora", "merge", "../inputs/adapter-1", "../inputs/adapter-2")
RECODED = ("--base", "../inputs/{0}-0", "--merge", "../inputs/{0}-1", *SETTINGS)
GGUF, FP8 = (tuple(word.format(kind) for word in RECODED) for kind in ("gguf", "fp8"))
COMPRESS = ("compress", "../inputs/base", "../inputs/one", "--threads", "1")
LOSSY = (*COMPRESS, "--drop-rate", "0.5", "--bits", "4")
APPLY = ("apply", "../inputs/base")
LOSSY_FILE, LOSSLESS_FILE = (
    "../inputs/lossy.delta.safetensors",
    "../inputs/lossless.delta.safetensors",
)


@dataclass(frozen=True)
class Scenario:
    """A command, and the command that made what it overwrites."""

    name: str
    output: str
    arguments: tuple[str, ...]
    before: tuple[str, ...] | None = None
    slices: int = 0
    """Of so many slices all but the last are done before, and the command is the last."""

    @property
    def command(self) -> tuple[str, ...]:
        """The whole command line."""
        return self.commands[-1]

    @property
    def commands(self) -> list[tuple[str, ...]]:
        """The command lines of all slices, or the only one."""
        again = () if self.before is None else ("--overwrite",)
        whole = (*self.arguments, "--output", self.output, "--quiet", *again)
        slices = (f"{number}/{self.slices}" for number in range(1, self.slices + 1))
        return [(*whole, "--slice", text) for text in slices] or [whole]

    @property
    def is_file(self) -> bool:
        """Whether the output is one file of weights, with a manifest beside it."""
        return self.output.endswith((".safetensors", ".gguf"))


SCENARIOS = [
    Scenario("file", "out.safetensors", (*MODELS, *SETTINGS)),
    Scenario("directory", "out", SHARDS),
    Scenario(
        "file again", "out.safetensors", (*MODELS, *SETTINGS), (*MODELS, *SETTINGS, "--seed", "1")
    ),
    Scenario(
        "directory again", "out", SHARDS, (*FOLDERS, *SETTINGS, "--seed", "1", "--scale", "0.5")
    ),
    Scenario("slice", "out.safetensors", (*MODELS, *CENSUS), slices=3),
    Scenario("slice of a directory", "out", SHARDS, slices=2),
    Scenario("gguf", "out.gguf", GGUF),
    Scenario("gguf again", "out.gguf", (*GGUF, "--dtype", "Q8_0"), (*GGUF, "--seed", "1")),
    Scenario("fp8", "out", (*FP8, "--format", "input", "--shard-size", "1MB")),
    Scenario("extract", "out", (*EXTRACT, "--rank", "4")),
    Scenario("extract again", "out", (*EXTRACT, "--rank", "4"), (*EXTRACT, "--rank", "2")),
    Scenario("adapters", "out", ADAPTERS),
    Scenario("adapters again", "out", ADAPTERS, (*ADAPTERS, "--weight", "0.25", "0.5")),
    Scenario("compress", "out.delta.safetensors", LOSSY),
    Scenario("compress again", "out.delta.safetensors", LOSSY, (*LOSSY, "--seed", "1")),
    Scenario("lossless", "out.delta.safetensors", (*COMPRESS, "--lossless")),
    Scenario("apply", "out", (*APPLY, LOSSY_FILE, "--threads", "1")),
    Scenario("restore", "out", (*APPLY, LOSSLESS_FILE, "--threads", "1")),
    Scenario("restore again", "out", (*APPLY, LOSSLESS_FILE), (*APPLY, LOSSY_FILE)),
]
BY_NAME = {scenario.name: scenario for scenario in SCENARIOS}


FULL_SIZE = 20
"""The size of an attack from which on nothing is left out."""


def chosen(seed: object, size: int, attacks: Sequence[Attacked], least: int = 1) -> list[Attacked]:
    """The attacks of a run: the least at size 1, all from `FULL_SIZE` on, by seed in between."""
    more = (len(attacks) - least) * (min(size, FULL_SIZE) - 1) // (FULL_SIZE - 1)
    return random.Random(repr(seed)).sample(attacks, min(len(attacks), least + max(more, 0)))


def make_inputs(folder: Path) -> None:
    """Models as files and as folders, and two adapters; delta files are made by the program."""
    generator = np.random.default_rng(0)
    large = 0.02 * generator.standard_normal((560, 1000), np.float32)  # two chunks
    base = {
        "model.embed_tokens.weight": 0.02 * generator.standard_normal((40, 24), np.float32),
        "model.layers.0.mlp.down_proj.weight": 0.02 * generator.standard_normal((48, 48), "f4"),
        "model.layers.0.norm.weight": np.ones(48, np.float32),
        "model.layers.1.mlp.down_proj.weight": large.astype(np.float16),
        "model.position_ids": np.arange(8, dtype=np.int64),
    }
    for number, name in enumerate(("base", "one", "two")):
        model = moved(base, number)
        save(folder / f"{name}.safetensors", model)
        save(folder / name / "model.safetensors", model)
        write_sidecars(folder / name)
    small = {name: values for name, values in base.items() if "layers.1" not in name}
    for number, name in enumerate(("small", "tuned")):
        save(folder / name / "model.safetensors", moved(small, number))
        write_sidecars(folder / name)
    for number in range(2):
        plain = moved(weights(parts_of("llama")), number)
        make_directory(folder / f"gguf-{number}", plain, config("llama"))
        codes = {name: values.astype(float8_e4m3fn) for name, values in plain.items()}
        scales = {f"{name}_scale_inv": np.ones(1, np.float32) for name in plain}
        save(folder / f"fp8-{number}" / "model.safetensors", {**codes, **scales})
    write_adapter(folder / "adapter-1", pair("m.q_proj", 8, 2, 6))
    write_adapter(folder / "adapter-2", pair("m.q_proj", 8, 2, 6, 1) | pair("m.v_proj", 8, 2, 6, 2))


def moved(base: Mapping[str, np.ndarray], number: int) -> dict[str, np.ndarray]:
    """A fine-tune of the base; number 0 is the base itself."""
    generator = np.random.default_rng(number)
    return {
        name: values
        if number == 0 or values.dtype == np.int64
        else (values + 0.0004 * generator.standard_normal(values.shape)).astype(values.dtype)
        for name, values in base.items()
    }


def write_sidecars(folder: Path) -> None:
    """A configuration and a tokenizer as they lie beside weights, one of them in a folder."""
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 40}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 2}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 64}))
    (folder / "vocab.json").write_text(json.dumps({f"t{n}": n for n in range(40)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    (folder / "LICENSE").write_text("Do as you like.\n")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool.jinja").write_text("{{ messages }}\n")


def contents(folder: Path) -> Contents:
    """All that lies below a folder, by relative path; links are not followed."""
    found: Contents = {}
    for place, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = Path(place, name)
            key = str(path.relative_to(folder))
            if path.is_symlink():
                found[key] = b"-> " + os.fsencode(path.readlink())
            else:
                found[key] = None if path.is_dir() else path.read_bytes()
    return found


class Place:
    """A folder with inputs and a work folder, and the warm process that runs commands there."""

    def __init__(self, folder: Path, warm: Warm) -> None:
        self.folder = folder
        self.work = folder / "work"
        self.inputs = folder / "inputs"
        self._warm = warm
        self._ends: dict[str, End] = {}
        self._calls: dict[str, list[Call]] = {}
        make_inputs(self.inputs)
        for name, arguments in ((LOSSY_FILE, LOSSY), (LOSSLESS_FILE, (*COMPRESS, "--lossless"))):
            warm.warm_up((*arguments, "--quiet", "--output", name), self.inputs)
        self._identity = self._identify_inputs()
        self._digests = self._hash_inputs()
        self.reset({})
        for name in ("file", "directory", "extract", "adapters", "apply"):
            warm.warm_up(BY_NAME[name].command, self.work)
            if name == "file":
                warm.warm_up(("verify", "out.safetensors", "--quiet"), self.work)
            self.reset({})

    def reset(self, to: Contents) -> None:
        """Put the work folder into a state."""
        shutil.rmtree(self.work, ignore_errors=True)
        self.work.mkdir()
        for name, data in to.items():
            path = self.work / name
            if data is None:
                path.mkdir(parents=True, exist_ok=True)
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)

    def run(self, arguments: Sequence[str], attack: Attack | None = None) -> Outcome:
        """Run a command in the work folder."""
        return self._warm.run(*arguments, folder=self.work, attack=attack)

    @property
    def warm(self) -> Warm:
        """The process that forks."""
        return self._warm

    def end(self, scenario: Scenario) -> End:
        """What an undisturbed run of a scenario starts from and ends with."""
        if scenario.name not in self._ends:
            self._ends[scenario.name] = find_end(self, scenario)
        return self._ends[scenario.name]

    def calls(self, scenario: Scenario) -> list[Call]:
        """The calls of an undisturbed run that change files, with their data."""
        if scenario.name not in self._calls:
            self.reset(self.end(scenario).start)
            log = self.folder / "log"
            outcome = self.run(scenario.command, Attack(self.work, log=log))
            assert outcome.status == 0, outcome.err
            found = read_log(log, self.work)
            log.unlink()
            start = self.end(scenario).start
            assert played(start, found).now() == contents(self.work), "the log misses a change"
            self._calls[scenario.name] = found
        return self._calls[scenario.name]

    def inputs_are_whole(self, *, thoroughly: bool = False) -> bool:
        """Whether nobody has touched the inputs."""
        is_same = self._identity == self._identify_inputs()
        return is_same and (not thoroughly or self._digests == self._hash_inputs())

    def _input_files(self) -> Iterator[Path]:
        yield from sorted(self.inputs.rglob("*"))

    def _identify_inputs(self) -> dict[str, tuple[int, ...]]:
        found = {}
        for path in self._input_files():
            status = path.lstat()
            found[str(path)] = (status.st_ino, status.st_size, status.st_mtime_ns, status.st_mode)
        return found

    def _hash_inputs(self) -> dict[str, str]:
        return {str(path): sha256(path) for path in self._input_files() if path.is_file()}


@dataclass(frozen=True)
class End:
    """What a scenario starts from and what it ends with."""

    start: Contents
    """The work folder before: empty, or with an older output."""
    new: Contents
    """The work folder after an undisturbed run."""
    restless: frozenset[tuple[str, ...]]
    """Where manifests of two undisturbed runs differ."""
    changes: int
    """Calls that change the file system in an undisturbed run."""
    reads: int
    """Calls that read from inputs in an undisturbed run."""


def find_end(place: Place, scenario: Scenario) -> End:
    """Run a scenario undisturbed, and again, to see what is never the same."""
    place.reset({})
    if scenario.before is not None:
        made = place.run((*scenario.before, "--output", scenario.output))
        assert made.status == 0, made.err
    for command in scenario.commands[:-1]:
        made = place.run(command)
        assert made.status == 0, made.err
    start = contents(place.work)
    ends, counts = [], []
    for reads in (False, True):
        place.reset(start)
        root = place.folder if reads else place.work
        outcome = place.run(scenario.command, Attack(root, reads=reads))
        assert outcome.status == 0, outcome.err
        ends.append(contents(place.work))
        counts.append(outcome.seen)
    verified = place.run(("verify", scenario.output, "--quiet"))
    assert verified.status == 0, verified.err
    restless: set[tuple[str, ...]] = set()
    for name, data in ends[0].items():
        if data is not None and name.endswith("manifest.json"):
            one, other = (dict(flat(json.loads(text), (name,))) for text in (data, ends[1][name]))
            assert one.keys() == other.keys()
            restless |= {path for path, value in one.items() if other[path] != value}
    return End(start, ends[0], frozenset(restless), *counts)


def settled(name: str, data: bytes | None, end: End) -> Any:
    """A file without what is different in every run."""
    if data is None or not name.endswith("manifest.json"):
        return SECONDS.sub(b"", data) if name.endswith("README.md") and data else data
    try:
        document = json.loads(data)
    except ValueError:
        return data
    return [pair for pair in flat(document, (name,)) if pair[0] not in end.restless]


def flat(value: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """A document as paths and values, without what it says of the run."""
    if path[-1] in OF_THE_RUN:
        return
    if isinstance(value, dict):
        for key in sorted(value):
            yield from flat(value[key], (*path, key))
    else:
        yield path, value


def has(found: Contents, expected: Contents, end: End) -> bool:
    """Whether a folder holds all that is expected, as it is expected; it may hold more."""
    return all(
        name in found and settled(name, found[name], end) == settled(name, data, end)
        for name, data in expected.items()
    )


def check_between(place: Place, scenario: Scenario, context: str) -> bool:
    """What holds at every moment: the old output or the new one, whole. Return whether the new."""
    end = place.end(scenario)
    found = contents(place.work)
    assert place.inputs_are_whole(), f"{context}: an input was touched"
    if scenario.is_file:
        weights = found.get(scenario.output)
        assert weights in (end.start.get(scenario.output), end.new[scenario.output]), (
            f"{context}: the weights are neither the old nor the new ones"
        )
        if weights is not None and place.run(("verify", scenario.output, "--quiet")).status == 0:
            assert has(found, end.start if weights != end.new[scenario.output] else end.new, end), (
                f"{context}: weights and manifest are not of one merge, and verify says intact"
            )
        return weights == end.new[scenario.output]
    is_old = scenario.output in end.start
    if scenario.output not in found:
        assert not is_old, f"{context}: the old output is gone and the new one is not there"
        return False
    if has(found, end.new, end):
        return True
    assert is_old, f"{context}: the output is there and is not complete"
    assert has(found, end.start, end), f"{context}: the output is neither the old nor the new one"
    return False


def check_end(place: Place, scenario: Scenario, context: str) -> None:
    """Run the command once more, undisturbed: it ends as if nothing had happened."""
    end = place.end(scenario)
    is_new = check_between(place, scenario, context)
    again = place.run(scenario.command)
    is_old = scenario.output in end.start
    is_there = again.status == 1 and is_new and not is_old and "exists already" in again.err
    assert again.status == 0 or is_there, f"{context}: then {again.err}"
    check_whole(place, scenario, f"{context}, and then again")


def check_whole(place: Place, scenario: Scenario, context: str) -> None:
    """Hold that the output is what an undisturbed run makes, and that nothing else is left."""
    end = place.end(scenario)
    found = contents(place.work)
    other = sorted(found.keys() ^ end.new.keys())
    assert not other, f"{context}: files that should not be there, or are missing: {other}"
    for name, data in end.new.items():
        made, expected = settled(name, found[name], end), settled(name, data, end)
        which = made if isinstance(made, bytes) else [v for v in made or () if v not in expected]
        assert made == expected, f"{context}: {name} is different: {which[:500]}"
    verified = place.run(("verify", scenario.output, "--quiet"))
    assert verified.status == 0, f"{context}: verify says {verified.out}{verified.err}"
    assert place.inputs_are_whole(), f"{context}: an input was touched"


def check_message(status: int, err: str, context: str) -> None:
    """An error is one message that names a place; nothing is a traceback."""
    assert status in (0, 1), context
    assert "Traceback" not in err, context
    assert "bug in dare" not in err, context
    if status == 1:
        assert re.match(r"dare: (?!stdout)\S+: ", err), f"{context} (names no place)"
