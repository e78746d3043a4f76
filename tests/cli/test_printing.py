"""Names that hold what a terminal acts on: nothing of it is printed, and no recipe is changed."""

from __future__ import annotations

import json
import tomllib
import warnings
from pathlib import Path

import numpy as np
import pytest
from calling import dare, dare_succeeds

import dare as library
from dare.documents.console import make_console
from dare.errors import UNSAFE_CHARACTERS, DareWarning, InputError, MismatchError, printable
from helpers import save

EVIL = "b\x1b[2J\n\x9b31m\u202e\x07c"
"""Clears the screen, ends the line, colours, turns the writing round, rings."""
SHOWN = "b\\x1b[2J\\n\\x9b31m\\u202e\\x07c"


def assert_harmless(text: str) -> None:
    assert UNSAFE_CHARACTERS.findall(text.replace("\n", "")) == []


@pytest.fixture
def hostile(folder: Path) -> Path:
    """A base and a model whose tensor and file have such names."""
    generator = np.random.default_rng(0)
    base = {f"model.{EVIL}.weight": generator.standard_normal((8, 8), np.float32)}
    save(Path("evil.safetensors"), base)
    save(Path(f"{EVIL}.safetensors"), {name: 1.1 * array for name, array in base.items()})
    save(Path("lacking.safetensors"), {"other": np.ones(3, np.float32)})
    return folder


def test_plan_merge_verify_and_analysis_print_no_control_characters(hostile: Path) -> None:
    models = ("-b", "evil.safetensors", "-m", f"{EVIL}.safetensors")
    for line in (
        ("plan", *models),
        ("merge", *models, "-o", f"out{EVIL}.safetensors", "--verbose"),
        ("verify", f"out{EVIL}.safetensors"),
        ("init", *models, "--to", "-"),
        ("analyze", "evil.safetensors", f"{EVIL}.safetensors"),
        ("advise", "evil.safetensors", f"{EVIL}.safetensors"),
    ):
        outcome = dare(*line)
        assert_harmless(outcome.out + outcome.err)
        assert SHOWN in outcome.out + outcome.err or line[0] in ("init", "advise")
    for line in (
        ("plan", *models, "-o", "x", "--json"),
        ("verify", f"out{EVIL}.safetensors", "--json"),
        ("analyze", "evil.safetensors", f"{EVIL}.safetensors", "--json", "--quiet"),
    ):
        outcome = dare(*line)
        assert_harmless(outcome.out + outcome.err)
        assert any(EVIL in text for text in _texts(outcome.json))


def _texts(value: object) -> list[str]:
    if isinstance(value, dict):
        return [t for key, item in value.items() for t in (key, *_texts(item))]
    if isinstance(value, list):
        return [text for item in value for text in _texts(item)]
    return [value] if isinstance(value, str) else []


def test_errors_and_warnings_hold_no_control_characters(hostile: Path) -> None:
    outcome = dare("plan", "-b", "evil.safetensors", "-m", "lacking.safetensors")
    assert_harmless(outcome.err)
    assert SHOWN in outcome.err
    missing = dare("plan", f"{EVIL}.toml").err
    assert_harmless(missing)
    assert missing.startswith(f"dare: {SHOWN}.toml: no such file")
    assert str(InputError(EVIL)) == SHOWN
    assert str(MismatchError(EVIL, EVIL)) == f"{SHOWN}\n  {SHOWN}"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.warn(EVIL, DareWarning, stacklevel=1)
    assert str(caught[0].message) == SHOWN


def test_the_console_lets_nothing_through_whatever_prints_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    console = make_console()
    console.print(EVIL, (EVIL, "bold"))
    printed = capsys.readouterr().out
    assert_harmless(printed)
    assert "\\x1b[2J" in printed


def test_printable_keeps_what_people_write() -> None:
    assert printable("naïve δ → 模型 🙂") == "naïve δ → 模型 🙂"
    assert printable("a\nb", keep="\n") == "a\nb"


# ---------------------------------------------------------------- recipes

NAME = "b\nallow_pickle = true\n#"


@pytest.mark.parametrize("method", ["karcher", "linear", "slerp"])
def test_a_models_name_does_not_become_a_line_of_the_recipe(folder: Path, method: str) -> None:
    config = {
        "merge_method": method,
        "base_model": NAME,
        "models": [
            {"model": NAME, "parameters": {"weight": 0.5}},
            {"model": "c", "parameters": {"weight": 0.5}},
        ],
        "parameters": {"t": 0.5},
    }
    Path(f"m{EVIL}.yaml").write_text(json.dumps(config))
    text = dare_succeeds("convert", f"m{EVIL}.yaml").out
    assert_harmless(text)
    recipe = tomllib.loads(text)
    assert "allow_pickle" not in recipe
    assert recipe["base"] == NAME
    Path("r.toml").write_text(text)
    assert not library.load_recipe("r.toml").recipe.allow_pickle
