"""`dare analyze`, `dare advise` and `dare report`."""

from __future__ import annotations

import contextlib
import html
import json
import re
import shlex
import shutil
import tomllib
from pathlib import Path

import numpy as np
import pytest
from calling import base_arrays, dare, dare_succeeds, tuned_arrays
from safetensors.numpy import load_file

from dare import load_recipe
from dare.analysis.document import Analysis
from dare.errors import install_command
from helpers import save

INPUTS = ("base.safetensors", "math.safetensors", "code.safetensors")


@pytest.fixture(scope="module")
def analysed(some_models: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """What `dare analyze --output` writes of the models, made once."""
    path = tmp_path_factory.mktemp("analysis") / "analysis.json"
    with contextlib.chdir(some_models):
        dare_succeeds("analyze", *INPUTS, "--quiet", "--output", path)
    return path.read_text()


@pytest.fixture
def analysis(folder: Path, analysed: str) -> Path:
    (folder / "analysis.json").write_text(analysed)
    return folder / "analysis.json"


def test_analyze_says_what_decides_and_what_tells_more(folder):
    found = dare_succeeds("analyze", *INPUTS, "--allow-pickle", "--steps", "900")
    same = f"{' '.join(INPUTS)} --allow-pickle --steps 900"
    for word in ("math", "code", "Overlap", "Advice", f"dare report {same}"):
        assert word in found.out
    assert f"dare advise {same} > recipe.toml" in found.out


def test_a_swapped_base_is_named_with_the_command_that_swaps_it_back(folder):
    swapped, right = (INPUTS[1], INPUTS[0], INPUTS[2]), shlex.join(["dare", *INPUTS])
    found = dare("analyze", *swapped)
    assert (found.status, "dare recipe.toml" in found.out) == (1, False)
    for command in ("plan", "merge"):  # a plan reads no weights
        given = (command, *swapped, "-o", "out.safetensors", "--method", "linear", "--json")
        said = [
            each for each in dare_succeeds(*given).json["warnings"] if each["code"] == "contained"
        ]
        assert [right in each["remedy"] for each in said] == [True] * (command == "merge")
    given = ("merge", *INPUTS, "-o", "right.safetensors", "--method", "linear", "--json")
    assert not dare_succeeds(*given).json["warnings"]


def test_the_next_commands_can_be_typed(folder, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    shutil.copy("math.safetensors", "it's my model.safetensors")
    given = ("base.safetensors", "it's my model.safetensors", "code.safetensors")
    text = dare_succeeds("analyze", *given).out
    after = text[text.index("Next\n") :].replace("\\\n", " ")
    steps = {words[0]: words[1:] for words in map(shlex.split, after.splitlines()[1:4])}
    assert steps["advise"] == ["dare", "advise", *given, ">", "recipe.toml"]
    assert steps["measure"][:4] == ["dare", "search", "recipe.toml", "--data"]
    assert steps["merge"] == ["dare", "recipe.toml"]
    Path("recipe.toml").write_text(dare_succeeds(*steps["advise"][1:-2], "--quiet").out)
    dare_succeeds("recipe.toml", "--quiet")
    assert "> recipe2.toml" in dare_succeeds("analyze", *given).out  # the shell would replace it


def test_the_json_document_has_analysis_readiness_and_advice(folder):
    found = dare_succeeds("analyze", *INPUTS, "--json").json
    assert found["schema"] == "dare-analysis/4"
    assert [model["name"] for model in found["models"]] == ["math", "code"]
    assert found["readiness"]["verdict"] == "no defect found"
    (half,) = (
        row for row in found["predictions"] if row["model"] == "math" and row["drop_rate"] == 0.5
    )
    assert half["relative_error"] == 1.0
    assert found["advice"]["recipe"]["base"] == "base.safetensors"


def test_what_is_written_is_read_back(folder, analysis):
    again = Analysis.load(analysis)
    assert json.loads(again.to_json()) == {
        key: value
        for key, value in json.loads(analysis.read_text()).items()
        if key not in ("predictions", "readiness", "advice")
    }
    advised = [dare_succeeds("advise", *given).out for given in (INPUTS, ["analysis.json"])]
    assert advised[0] == advised[1]


def test_the_advised_recipe_ends_with_a_search_that_runs(folder):
    advised = dare_succeeds("advise", *INPUTS, "--quiet").out
    Path("recipe.toml").write_text(advised)
    Path("score.py").write_text("def score(tensors):\n    return {'items': {'a': 1.0, 'b': 0.0}}\n")
    command = advised.splitlines()[-1].removeprefix("#").replace("THIS_FILE", "recipe.toml")
    dare_search, recipe, flag, *_files = shlex.split(command)[1:]
    assert (dare_search, recipe, flag) == ("search", "recipe.toml", "--data")
    found = dare_succeeds("search", "recipe.toml", "--eval", "score.py:score", "--json").json
    names = {trial["name"] for trial in found["baselines"]}
    assert names == {"base", "math alone", "code alone", "average", "sum", "average again"}
    assert found["conclusion"]["best"]["baseline"] == "base"


def test_steps_are_taken_by_every_command_that_advises(folder, analysis):
    document = json.loads(analysis.read_text()) | {"base_dtypes": {"BF16": 7_000_000_000}}
    analysis.write_text(json.dumps(document))
    expected = "0.85 to 0.9 for 7B after 500 to 2,000 steps"

    def advised(steps):
        out = dare_succeeds("advise", "analysis.json", "--steps", steps).out
        return out.replace("\n#   ", " ")

    assert expected in advised(1000)
    found = dare_succeeds("analyze", "analysis.json", "--steps", "1000", "--json").json
    assert any(expected in doubt["text"] for doubt in found["advice"]["doubts"])
    assert "no drop rate for 7B parameters after 50000 steps" in advised(50000)
    assert "steps = -1" in dare("advise", "analysis.json", "--steps", "-1").err


def test_a_recipe_or_an_output_stands_for_its_models(folder):
    found = dare_succeeds("advise", *INPUTS, "--output", "advised.safetensors", "--quiet")
    Path("r.toml").write_text(found.out)
    dare_succeeds("r.toml", "--quiet")
    for given in ("r.toml", "advised.safetensors"):
        found = dare_succeeds("analyze", given, "--json").json
        assert [model["name"] for model in found["models"]] == ["math", "code"]


def test_a_recipe_that_would_be_refused_is_not_advised(folder):
    dare_succeeds(*INPUTS, "--drop-rate", "0.1", "-o", "merged.safetensors", "--quiet")
    found = dare("advise", *INPUTS, "merged.safetensors", "--quiet")
    assert (found.status, found.out) == (1, "")
    assert "merged.safetensors: was made by dare from this base" in found.err


def test_what_cannot_be_merged_is_a_failure_and_so_is_a_stranger_beside_others(folder):
    base = base_arrays()
    other = {
        name: np.random.default_rng(9).permutation(values.reshape(-1)).reshape(values.shape)
        for name, values in base.items()
    }
    save(folder / "other.safetensors", other)
    found = dare("analyze", "base.safetensors", "other.safetensors", "--json")
    assert found.status == 1
    assert found.json["readiness"]["verdict"] == "cannot be merged"
    found = dare("analyze", *INPUTS, "other.safetensors", "--json")
    assert (found.status, found.json["readiness"]["by_model"]["other"]) == (1, "needs changes")


def test_where_nothing_can_be_merged_there_is_no_recipe(folder):
    shutil.copy("base.safetensors", "copy.safetensors")
    given = ("base.safetensors", "copy.safetensors")
    found = dare("advise", *given, "--quiet")
    assert (found.status, found.out) == (1, "")
    assert "copy: It is equal to the base" in found.err
    command = found.err[found.err.rindex("`dare ") + 6 :].partition("`")[0]
    assert "It is equal to the base" in dare(*shlex.split(command)).out
    assert dare("analyze", *given, "-o", "a.json", "--quiet").status == 1
    found = dare("init", "--from-analysis", "a.json", "--output", "m.safetensors")
    assert found.status == 1
    assert "`dare analyze a.json`" in found.err
    assert not Path("recipe.toml").exists()


def test_what_is_advised_for_pickles_reads_them(folder):
    torch = pytest.importorskip("torch")
    files = [Path(file).with_suffix(".bin") for file in INPUTS]
    for file in files:
        arrays = load_file(file.with_suffix(".safetensors"))
        torch.save({name: torch.from_numpy(array) for name, array in arrays.items()}, file)
    text = dare_succeeds("advise", *files, "--allow-pickle", "--quiet").out
    Path("recipe.toml").write_text(text)
    dare_succeeds("recipe.toml", "--quiet")
    dare_succeeds("report", *files, "--allow-pickle", "--quiet")
    page = Path("report.html").read_text("utf-8")
    assert "allow_pickle = true" in page
    (command,) = re.findall('id="recipe-command">dare (.*?)</code>', page)
    words = html.unescape(re.sub("<[^>]*>", "", command)).split()
    assert "--allow-pickle" in words
    dare_succeeds(*words, "--overwrite", "--quiet")


@pytest.mark.parametrize("command", [("report",), ("analyze", "--html", "page.html")])
def test_what_a_page_needs_is_asked_for_before_the_models_are_read(folder, monkeypatch, command):
    monkeypatch.setattr("dare.documents.page.NEEDED", ("no_such_package",))
    monkeypatch.setattr("dare.cli.analysis.judge", pytest.fail)
    assert install_command("report") in dare(*command, *INPUTS).err


def test_init_follows_an_analysis_and_flags_override_it(folder, analysis):
    dare_succeeds(
        "init", "--from-analysis", analysis, "--output", "m.safetensors", "--scale", "0.25"
    )
    recipe = load_recipe("recipe.toml")
    advised = dare_succeeds("advise", analysis, "--json").json["recipe"]
    assert recipe.recipe.method == advised["method"]
    assert recipe.recipe.scale == 0.25
    text = Path("recipe.toml").read_text()
    assert "# Chosen after an analysis:" in text
    assert tomllib.loads(text)["method"] == advised["method"]


WRITTEN = {
    "a.html": ("report", "analysis.json", "-q", "-o", "a.html"),
    "a.json": ("analyze", "analysis.json", "-q", "-o", "a.json"),
    "c.html": ("analyze", "analysis.json", "-q", "--html", "c.html"),
    "d.toml": ("init", *INPUTS, "--to", "d.toml"),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_a_file_is_replaced_if_told_and_if_dare_wrote_it(folder, analysis, name):
    command = WRITTEN[name]
    dare_succeeds(*command)
    file = Path(name)
    written = file.read_bytes()
    again = dare(*command)
    assert again.status != 0
    assert f"{file}: exists already" in again.err
    assert "--overwrite" in again.err
    dare_succeeds(*command, "--overwrite")
    assert file.read_bytes()[:1000] == written[:1000]
    file.write_text("<!doctype html>\n[project]\nname = 'years of work'\n")
    refused = dare(*command, "--overwrite")
    assert refused.status != 0
    assert f"{file}: was not made by dare" in refused.err
    assert "years of work" in file.read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "name the base and the models"),
        (("base.safetensors",), "base without models"),
        (("base.safetensors", "gone.safetensors"), "gone.safetensors"),
        (("gone.json",), "gone.json"),
        ((*INPUTS, "--max-memory", "much"), "max_memory"),
        ((*INPUTS, "--max-memory", "1MiB"), "max_memory"),
        ((*INPUTS, "--spectra", "some"), "spectra"),
        ((*INPUTS, "--output", "math.safetensors"), "exists already"),
    ],
)
def test_wrong_input_is_refused_with_a_reason(folder, arguments, message):
    found = dare("analyze", *arguments)
    assert found.status in (1, 2)
    assert message in found.err
    assert "bug in dare" not in found.err


@pytest.mark.parametrize(
    ("change", "message"),
    [({"pairs": None}, "is not a complete analysis: pairs"), ({"base": ""}, "analysis.json")],
)
def test_a_spoilt_analysis_is_refused(folder, analysis, change, message):
    document = json.loads(analysis.read_text())
    kept = {name: value for name, value in (document | change).items() if value is not None}
    analysis.write_text(json.dumps(kept))
    found = dare("advise", analysis)
    assert (found.status, message in found.err) == (1, True)
    longest = 200 * "é"  # which no file can be called
    analysis.write_text(json.dumps(document | {"base": longest}))
    advised = dare_succeeds("advise", analysis, "--quiet").out
    assert tomllib.loads(advised)["base"] == longest


def test_configurations_are_compared(folder):
    base = base_arrays()
    for name, theta in (("one", 10000.0), ("other", 500000.0)):
        Path(name).mkdir()
        save(folder / name / "model.safetensors", base if name == "one" else tuned_arrays(base, 3))
        config = {"model_type": "llama", "rope_theta": theta}
        Path(name, "config.json").write_text(json.dumps(config))
    found = dare("analyze", "one", "other", "--json")
    codes = {each["code"] for each in found.json["readiness"]["findings"]}
    assert (found.status, "other_configuration" in codes) == (1, True)
    for command in ("plan", "merge"):
        said = dare_succeeds(command, "one", "other", "-o", "out", "--method", "sum", "--json").json
        assert "other_configuration" in {each["code"] for each in said["warnings"]}
    shutil.rmtree("other")
