"""Small files that would keep a reader busy, or waiting, for ever: each is answered at once."""

from __future__ import annotations

import io
import json
import os
import pickle
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

import dare
from dare.analysis.document import Analysis
from dare.errors import DareError, InputError, RecipeError
from dare.inputs.directory import choose_chat_template, collect
from dare.inputs.lora import open_adapter
from dare.inputs.opening import convert_yaml, open_model
from dare.inputs.vocabulary import Tokenizers
from dare.output.sidecars import inherited
from helpers import save, write_recipe


@contextmanager
def at_once(seconds: float = 5.0) -> Iterator[None]:
    """Holds for processor time, so that a busy machine makes no difference."""
    started = time.process_time()
    yield
    assert time.process_time() - started < seconds


# ---------------------------------------------------------------- YAML


def doubled(first: str, following: str) -> str:
    """Forty lines, each of which holds the one before nine times."""
    lines = [first]
    for number in range(1, 40):
        lines.append(following.format(here=number, before=", ".join([f"*a{number - 1}"] * 9)))
    return "\n".join(lines)


LAUGHS = doubled("a0: &a0 [x, x]", "a{here}: &a{here} [{before}]")
MERGES = doubled("a0: &a0 {{x: 1}}".format(), "a{here}: &a{here} {{<<: [{before}]}}")


HUGE = r": .* \d.\d+e\+37 values"
YAMLS: dict[str, tuple[str, str]] = {
    "aliases are counted before they are followed": (LAUGHS, HUGE),
    "and merge keys": (MERGES, HUGE),
    "a long number of base 60": ("a: 1" + ":1" * 100_000, ", line 1: "),
    "one with a fraction": ("a: 1" + ":1" * 100_000 + ".0", ", line 1: "),
    "a long number of base 16": ("a: 0x" + "f" * 100, ", line 1: "),
    "a list that holds itself": ("&a [*a]", ", line 1: "),
    "a large file is not read": ("- 1\n" * 100_000, ": larger than"),
}


@pytest.mark.parametrize("what", YAMLS)
def test_a_configuration_that_takes_long_or_has_no_end_is_refused(tmp_path: Path, what: str):
    text, said = YAMLS[what]
    (tmp_path / "m.yaml").write_text(text)
    with at_once(), pytest.raises((InputError, RecipeError), match=rf"m\.yaml{said}"):
        convert_yaml(tmp_path / "m.yaml")


@pytest.mark.parametrize("text", [LAUGHS, MERGES, "a: [" + "1," * 60_000 + "]"])
def test_a_cards_head_is_read_or_left(tmp_path: Path, text: str) -> None:
    (tmp_path / "README.md").write_text(f"---\nlicense: mit\n{text}\n---\n")
    with at_once(15):
        assert inherited(tmp_path) in ({}, {"license": "mit"})


# ---------------------------------------------------------------- a pickle


def test_a_key_that_holds_itself_over_and_over_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    key: tuple = ("a",)
    for _ in range(60):
        key = (key, key)
    # A dict cannot be made with such a key here either, so its opcodes are put around it.
    pickled = b"\x80\x02}" + pickle.dumps(key, 2)[2:-1] + b"K\x01s."
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("m/data.pkl", pickled)
        file.writestr("m/version", "3")
    (tmp_path / "m.pt").write_bytes(archive.getvalue())
    with at_once(10), pytest.raises(InputError, match=r"m\.pt: its pickle .* more than \d+ values"):
        open_model(tmp_path / "m.pt", allow_pickle=True)


# ---------------------------------------------------------------- pipes

WITH_PIPES: dict[str, Callable[[Path], object]] = {
    "r.toml": lambda folder: dare.load_recipe(folder / "r.toml"),
    "r.yaml": lambda folder: dare.load_recipe(folder / "r.yaml"),
    "r.json": lambda folder: dare.load_recipe(folder / "r.json"),
    "analysis.json": lambda folder: Analysis.load(folder / "analysis.json"),
    "model.safetensors": open_model,
    "model.safetensors.index.json": open_model,
    "adapter_config.json": open_adapter,
    "x.gguf": lambda folder: open_model(folder / "x.gguf"),
    "x.pt": lambda folder: open_model(folder / "x.pt", allow_pickle=True),
    "config.json": collect,
    "tokenizer.json": lambda folder: Tokenizers()._read(folder),
    "README.md": inherited,
    "chat.jinja": lambda folder: choose_chat_template(str(folder / "chat.jinja"), folder, {}),
}


@pytest.mark.parametrize("name", WITH_PIPES)
def test_a_pipe_is_not_waited_for(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(DareError, match=rf"{name}: is not an ordinary file"):
        WITH_PIPES[name](tmp_path)


def test_a_manifest_that_is_a_pipe_is_a_problem(tmp_path: Path) -> None:
    base = {"w": np.ones(4, np.float32)}
    dare.merge(write_recipe(tmp_path, base, [base]), backend="reference")
    manifest = tmp_path / "out.safetensors.manifest.json"
    manifest.unlink()
    os.mkfifo(manifest)
    assert not dare.verify(tmp_path / "out.safetensors").ok


# ---------------------------------------------------------------- long lists


def test_a_configuration_of_many_tables_is_read_in_their_number(tmp_path: Path) -> None:
    save(tmp_path / "model.safetensors", {"w": np.ones(4, np.float32)})
    config = {str(number): {"a": {}} for number in range(100_000)}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with at_once():
        collect(tmp_path)
