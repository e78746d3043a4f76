"""What an earlier version made is read, goes on, or is refused with the version and a remedy.

`tests/fixtures/make.py` makes the archives, one for each version, and says what is in them.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tarfile
from pathlib import Path
from typing import Any

import pytest

import dare
from dare.cli import main
from dare.stages import parse_method
from helpers import listing

ARCHIVES = sorted(Path(__file__).parent.glob("fixtures/*/made.tar.xz"))
BASE = "models/base/model.safetensors"
FORMULA = "recipes/formula.toml"
SLICED = "sliced.safetensors"
LARGEST = "largest.delta.safetensors"


@pytest.fixture(scope="module", params=ARCHIVES, ids=lambda archive: archive.parent.name)
def unpacked(request, tmp_path_factory) -> Path:
    """A folder with all that a version made, which no test changes."""
    folder = tmp_path_factory.mktemp("made")
    with tarfile.open(request.param) as archive:
        archive.extractall(folder, filter="data")
    return folder


@pytest.fixture(scope="module")
def made(unpacked) -> Any:
    return json.loads((unpacked / "made.json").read_text())


@pytest.fixture
def here(unpacked, tmp_path, monkeypatch) -> Path:
    """The working folder: inputs and finished outputs are links, the rest is a copy."""
    for name in listing(unpacked):
        if name in ("adapters", "done", "models", "recipes", "score.py"):
            (tmp_path / name).symlink_to(unpacked / name)
        elif name.endswith(".db"):
            shutil.copy(unpacked / name, tmp_path)
    shutil.copytree(unpacked / "stopped", tmp_path / "stopped")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def digest(output: str) -> str:
    """The SHA-256 of an output's weights, as make.py takes it."""
    path = Path(output)
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


# ---------------------------------------------------------------- recipes


def test_recipes_have_the_same_settings_and_give_the_same_bytes(made, here):
    for file, then in made["recipes"].items():
        if file == FORMULA:
            continue
        recipe, expected = dare.load_recipe(file), then["settings"]
        if "search" in expected:  # one score is the short form of a table
            expected["search"]["objective"] = {expected["search"]["objective"]: 1.0}
        method = expected.pop("method", "dare+linear")  # a recipe has the names of stages today
        assert recipe.recipe.method == "+".join(stage.name for stage in parse_method(method))
        settings = json.loads(json.dumps(recipe.to_document()))
        assert {key: settings[key] for key in settings if key != "method"} == expected, file
        output = f"out-{Path(file).stem}"
        dare.merge(recipe, output=output, threads=1, verbose=False)
        assert digest(output) == then["digest"], file


def test_an_objective_that_is_a_formula_is_refused_with_what_to_write(here):
    with pytest.raises(dare.RecipeError, match=r"mean\(math, code\).*no longer read;"):
        dare.load_recipe(FORMULA)


# ---------------------------------------------------------------- finished outputs


@pytest.mark.parametrize("name", ["merged.safetensors", "merged"])
def test_outputs_are_intact_and_can_be_repeated(made, here, name):
    assert dare.verify(f"done/{name}").ok
    dare.merge(recipe=f"done/{name}", output=name, verbose=False)
    assert digest(name) == made["done"][name]


def test_delta_files_apply_to_the_same_bytes(made, here):
    for name, then in made["restored"].items():
        if name == LARGEST:
            continue
        output = f"restored-{name.partition('.')[0]}.safetensors"
        assert dare.verify(f"done/{name}").ok
        dare.apply_delta(BASE, f"done/{name}", output, verbose=False)
        assert digest(output) == then, name


def test_a_delta_file_of_the_largest_changes_is_refused_with_a_remedy(here):
    file = f"done/{LARGEST}"
    for use in (
        lambda: dare.apply_delta(BASE, file, "now.safetensors", verbose=False),
        lambda: dare.load_delta(file),
        lambda: dare.merge(base=BASE, models=[file], output="now.safetensors", verbose=False),
    ):
        with pytest.raises(
            dare.InputError, match=r"dare 0\.1 .*--keep magnitude; apply .* compress .* again"
        ):
            use()
    assert not Path("now.safetensors").exists()


def test_an_analysis_is_refused_by_its_format(here):
    found = r"dare-analysis/1, and this version of dare reads dare-analysis/\d+; run `dare analyze`"
    with pytest.raises(dare.InputError, match=found):
        dare.Analysis.load("done/analysis.json")


# ---------------------------------------------------------------- interrupted outputs


def go_on(command: list[str], output: str, capsys) -> Any:
    """Repeat a command; return its report, which tells what it reused."""
    capsys.readouterr()
    assert main([*command, "--output", output, "--json"]) == 0
    assert dare.verify(output).ok
    assert not Path(f"{output}.partial").exists()
    return json.loads(capsys.readouterr().out)


def test_interrupted_outputs_end_as_if_they_had_not_been(made, here, capsys):
    for name, then in made["stopped"].items():
        report = go_on(then["command"], f"stopped/{name}", capsys)
        assert digest(f"stopped/{name}") == then["digest"], name
        if name in ("stopped.safetensors", "stopped", "nearly.safetensors"):
            codes = [notice["code"] for notice in report["warnings"]]
            assert report["resumed_chunks"] or "leftovers" in codes, name


@pytest.mark.parametrize("rest", ["2 3 1", "1 2 3", "all"])
def test_slices_that_others_began_end_as_one_merge(made, here, rest):
    output, command = f"stopped/{SLICED}", made["sliced"]["command"]
    for number in rest.split():  # the first is done, unless what is there is not used
        if not Path(output).exists():
            part = [] if number == "all" else ["--slice", f"{number}/3"]
            assert main([*command, "--output", output, *part]) == 0
    assert digest(output) == made["sliced"]["digest"]
    assert dare.verify(output).ok


def test_a_journal_of_another_version_is_named_and_not_used(made, here, monkeypatch, capsys):
    monkeypatch.setattr("dare.output.journal.WRITER", {"journal": 3, "dare": "0.9"})
    said = "was left by another merge or version of dare (journal 2; this is journal 3, dare 0.9)"
    name, then = "stopped.safetensors", made["stopped"]["stopped.safetensors"]
    report = go_on(then["command"], f"stopped/{name}", capsys)
    assert (digest(f"stopped/{name}"), report["resumed_chunks"]) == (then["digest"], 0)
    assert any(said in notice["text"] for notice in report["warnings"])
    command = [word for word in made["sliced"]["command"][1:] if word != "--quiet"]
    assert main(["finish", *command, "--output", f"stopped/{SLICED}"]) == 1
    assert f"{said}; finish it with" in " ".join(capsys.readouterr().err.split())


# ---------------------------------------------------------------- studies


@pytest.mark.parametrize("study", ["finished.db", "killed.db"])
def test_a_study_is_refused_by_its_format_and_stays_as_it_is(made, here, capsys, study):
    before = Path(study).read_bytes()
    for command in (["search", "show", study], [*made["search"]["command"], "--study", study]):
        assert main(command) == 1
        problem = " ".join(capsys.readouterr().err.split())
        assert f"{study}: was written by another version of dare (format 1, " in problem
        assert "give another --study, or use the version that wrote it" in problem
    assert Path(study).read_bytes() == before
