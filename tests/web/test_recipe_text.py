"""The recipe, the command and the Python that the page shows make the merge that it describes."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
from merged import digest, merge
from running import run_module
from safetensors.numpy import load_file

from dare.cli import main
from dare.stages import STAGES
from dare.stages.catalogue import catalogue

TEXTS = """
import { commandText, needsRecipe, pythonText, recipeText } from "./recipe.js";
import { defaults, settingOf } from "./parts/live/setting.js";
const { methods, cases } = given;
answer(cases.map((values) => {
  const setting = settingOf((name) => values[name.slice(5)] ?? defaults[name], methods);
  return {
    setting,
    recipe: recipeText(setting),
    command: commandText(setting, methods),
    python: pythonText(setting),
    needsRecipe: needsRecipe(setting, methods),
  };
}));
"""
DROP = {"drop_rate": 0.5}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "as it opens": ({}, {"method": "dare+sum", "stages": {"dare": DROP}}),
    "two models": (
        {"sort": False, "m": "dare+linear", "p": 0.9},
        {"models": ["add", "say"], "stages": {"dare": {"drop_rate": 0.9}}, "method": "dare+linear"},
    ),
    "weights": (
        {"w": True, "wadd": 0.7, "wsort": -0.25, "wsay": 0, "m": "ties", "scale": 2.5},
        {"weights": [0.7, -0.25, 0.0], "method": "ties", "scale": 2.5},
    ),
    "rates for each": (
        {"each": True, "padd": 0.1, "psort": 0, "psay": 0.95, "m": "dare+ties", "seed": 7},
        {"rates": [0.1, 0.0, 0.95], "method": "dare+ties", "seed": 7},
    ),
    "an arc, which has no weights": (
        {
            "say": False,
            "m": "dare+slerp",
            "w": True,
            "wadd": 0.5,
            "s": "slerp.t-0.3,slerp.on-deltas",
        },
        {
            "models": ["add", "sort"],
            "method": "dare+slerp",
            "stages": {"dare": DROP, "slerp": {"t": 0.3, "on": "deltas"}},
        },
    ),
    "parameters, of which some are for stages that are not in the chain": (
        {
            "m": "own",
            "c": "dare+trim+ties",
            "s": "dare.rescale-false,trim.keep_ratio-0.4,ties.vote-count,ties.weighted-false,slerp.t-1",
        },
        {
            "method": "dare+trim+ties",
            "stages": {
                "dare": {**DROP, "rescale": False},
                "trim": {"keep_ratio": 0.4},
                "ties": {"vote": "count", "weighted": False},
            },
        },
    ),
    "trimming that an election implies": (
        {"m": "ties", "s": "ties.keep_ratio-0.3"},
        {"method": "ties", "stages": {"ties": {"keep_ratio": 0.3}}},
    ),
    "a name that two stages have": (
        {"m": "own", "c": "dare+nm+sum", "s": "nm.rescale-false,nm.choose-random"},
        {
            "method": "dare+nm+sum",
            "stages": {"dare": DROP, "nm": {"rescale": False, "choose": "random"}},
        },
    ),
    "one model": (
        {"sort": False, "say": False, "each": True, "padd": 0.3, "w": True, "wadd": 1.5},
        {"models": ["add"], "rates": [0.3], "weights": [1.5], "method": "dare+sum"},
    ),
    "another name for a chain": (
        {"m": "dare_ties"},
        {"method": "dare+ties", "stages": {"dare": DROP}},
    ),
}


@pytest.fixture(scope="module")
def texts() -> dict[str, dict[str, Any]]:
    """What the page would show in each case."""
    cases = [values for values, _ in CASES.values()]
    shown = run_module(TEXTS, {"methods": catalogue(STAGES), "cases": cases})
    return dict(zip(CASES, shown, strict=True))


@pytest.fixture(scope="module")
def expected() -> dict[str, str]:
    """The SHA-256 of each case, of a merge in memory that is described here, in Python."""
    return {name: digest(merge(**described)) for name, (_, described) in CASES.items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the models, made as the texts say."""
    folder = tmp_path_factory.mktemp("texts")
    assert main(["demo", "--models", str(folder / "demo-models"), "--json"]) == 0
    return folder


@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore::dare.DareWarning")
def test_one_digest(case, texts, expected, folder, monkeypatch, capsys):
    shown = texts[case]
    monkeypatch.chdir(folder)
    Path("recipe.toml").write_text(shown["recipe"], encoding="utf-8")
    made = {}
    assert main(["recipe.toml", "--quiet"]) == 0
    made["recipe"] = taken_digest()
    assert main(merge_line(shown["command"])) == 0
    made["command"] = taken_digest()
    exec(shown["python"], {})  # as readers do with it
    made["python"] = taken_digest()
    assert made == dict.fromkeys(made, expected[case])
    assert capsys.readouterr().out.strip().endswith(expected[case])  # the Python prints it


def taken_digest() -> str:
    """The digest of what was merged, which is taken away."""
    output = Path("merged.safetensors")
    taken = digest(load_file(output))
    output.unlink()
    return taken


def merge_line(command: str) -> list[str]:
    """The arguments of the second of the three commands, quietly."""
    first, merge, check = command.replace("\\\n", "").splitlines()
    assert (first, check) == ("dare demo --models demo-models", "dare verify merged.safetensors")
    return [*shlex.split(merge)[1:], "--quiet"]


def test_cases_differ(expected):
    assert len(set(expected.values())) == len(CASES)


def test_only_what_flags_cannot_say_is_left_to_the_recipe(texts):
    assert [name for name, shown in texts.items() if shown["needsRecipe"]] == [
        "a name that two stages have"
    ]


def test_every_text_says_where_the_models_come_from(texts):
    for shown in texts.values():
        for kind in ("recipe", "command", "python"):
            assert "dare demo --models demo-models" in shown[kind].splitlines()[0]
