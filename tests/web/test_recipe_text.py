"""The recipe, the command and the Python that the page shows make the merge that it describes."""

from __future__ import annotations

import hashlib
import json
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from running import node
from safetensors.numpy import load_file

import dare
from dare.cli import main
from dare.cli.show import catalogue
from dare.demo.merges import BASE, MODELS, TUNED
from dare.stages import STAGES
from dare.studies.candidates import Candidates
from dare.web.assets import PAGE

TEXTS = """
import { commandText, needsRecipe, pythonText, recipeText } from "PAGE/recipe.js";
import { defaults, settingOf } from "PAGE/parts/live/setting.js";
const { methods, cases } = JSON.parse(process.argv[1]);
console.log(JSON.stringify(cases.map((values) => {
  const setting = settingOf((name) => values[name.slice(5)] ?? defaults[name], methods);
  return {
    setting,
    recipe: recipeText(setting),
    command: commandText(setting, methods),
    python: pythonText(setting),
    needsRecipe: needsRecipe(setting, methods),
  };
})));
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
    methods = catalogue(STAGES)
    for stage in methods["stages"]:
        stage["default_weight"] = STAGES[stage["name"]].default_weight and 1
    script = TEXTS.replace("PAGE", PAGE.as_uri())
    told = json.dumps({"methods": methods, "cases": [values for values, _ in CASES.values()]})
    command = [node(), "--input-type=module", "--eval", script, told]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return dict(zip(CASES, json.loads(done.stdout), strict=True))


@pytest.fixture(scope="module")
def expected() -> dict[str, str]:
    """The SHA-256 of each case, of a merge in memory that is described here, in Python."""
    everything = Candidates(dare.Recipe(base=BASE, models=list(TUNED.values()), verbose=False))
    return {
        name: digest(everything.make(recipe_of(**described)).arrays)
        for name, (_, described) in CASES.items()
    }


def recipe_of(
    method: str,
    models: tuple[str, ...] | list[str] = tuple(TUNED),
    weights: list[float] | None = None,
    rates: list[float] | None = None,
    **more: Any,
) -> dare.Recipe:
    entries = [
        dare.ModelEntry(
            file=TUNED[name],
            weight=None if weights is None else weights[place],
            settings={} if rates is None else {"drop_rate": rates[place]},
        )
        for place, name in enumerate(models)
    ]
    return dare.Recipe(base=BASE, models=entries, method=method, verbose=False, **more)


def digest(arrays: dict[str, np.ndarray]) -> str:
    """SHA-256 over the stored bytes of all tensors in order of name."""
    whole = hashlib.sha256()
    for name in sorted(arrays, key=str.encode):
        whole.update(np.ascontiguousarray(arrays[name]).view(np.uint8))
    return whole.hexdigest()


@pytest.fixture
def merged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the texts leave their merge; the demonstration's models lie beside it."""
    shutil.copytree(MODELS, tmp_path / "demo-models")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "merged.safetensors"


@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore::dare.DareWarning")
def test_one_digest(case, texts, expected, merged):
    shown = texts[case]
    Path("recipe.toml").write_text(shown["recipe"], encoding="utf-8")
    made = {}
    assert main(["recipe.toml", "--quiet"]) == 0
    made["recipe"] = digest(load_file(merged))
    merged.unlink()
    assert main(merge_line(shown["command"])) == 0
    made["command"] = digest(load_file(merged))
    merged.unlink()
    exec(shown["python"], {})
    made["python"] = digest(load_file(merged))
    assert made == dict.fromkeys(made, expected[case])


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
