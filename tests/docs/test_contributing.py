"""Stage, input format and evaluator of CONTRIBUTING.md, as if they lay in the package.

They run in a process of their own, because registering one changes the one table of them.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from doc_blocks import ROOT, find_blocks

from dare.errors import RecipeError
from dare.studies import evaluators
from helpers import write_recipe

AS_IF_IN_THE_PACKAGE = """
from pathlib import Path

import dare.stages

dare.stages.__path__.append(str(Path(__file__).parent / "stages"))

import dare.stages.clip
"""

WITH_NO_OTHER_EDIT = """
import importlib.util

from dare.cli import main
from dare.recipe.document import request_from_document
from dare.stages import STAGES


def test_it_is_registered_with_its_parameter():
    limit = STAGES["clip"].parameters["limit"]
    assert (limit.default, limit.range) == (0.002, "0 < x")
    assert limit.description == "The largest magnitude a change may have."


def test_a_recipe_takes_it():
    files = {"base_file": "b", "merge_files": [{"file": "m", "limit": 0.5}]}
    document = {"method": "clip+linear", "clip": {"limit": 1.0}, "models": files}
    recipe = request_from_document(document, "").recipe
    assert recipe.settings_for("w", 0)[0] == {"limit": 0.5}


def test_the_command_line_has_it(capsys):
    assert main(["methods", "clip"]) == 0
    assert "Bound the magnitude of every element." in capsys.readouterr().out
    assert main(["merge", "--help-all"]) == 0
    assert "--limit" in capsys.readouterr().out


def test_the_pages_have_it():
    spec = importlib.util.spec_from_file_location("generate", GENERATE)
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    page = generate.methods()
    assert "### clip" in page and "| `limit` | `0.002` | 0 < x | The largest magnitude" in page
"""


def test_the_stage_in_contributing(tmp_path: Path) -> None:
    shown = {block.file_name: block.text for block in find_blocks(ROOT / "CONTRIBUTING.md")}
    (tmp_path / "stages").mkdir()
    (tmp_path / "conftest.py").write_text(AS_IF_IN_THE_PACKAGE)
    (tmp_path / "stages" / "clip.py").write_text(shown["src/dare/stages/clip.py"])
    (tmp_path / "test_clip.py").write_text(shown["tests/stages/test_clip.py"])
    more = WITH_NO_OTHER_EDIT.replace("GENERATE", repr(str(ROOT / "docs" / "generate.py")))
    (tmp_path / "test_no_other_edit.py").write_text(more)
    run_tests(tmp_path)


FORM_IN_THE_PACKAGE = """
from pathlib import Path

import dare
from dare.inputs import opening

dare.inputs.__path__.append(str(Path(__file__).parent / "inputs"))
opening.FORMS = {LINE **opening.FORMS}
"""


def test_the_input_format_in_contributing(tmp_path: Path) -> None:
    shown = {block.file_name: block.text for block in find_blocks(ROOT / "CONTRIBUTING.md")}
    line = shown["src/dare/inputs/opening.py"].splitlines()[-1]
    (tmp_path / "inputs").mkdir()
    (tmp_path / "conftest.py").write_text(FORM_IN_THE_PACKAGE.replace("LINE", line))
    (tmp_path / "inputs" / "bare.py").write_text(shown["src/dare/inputs/bare.py"])
    (tmp_path / "test_bare.py").write_text(shown["tests/inputs/test_bare.py"])
    run_tests(tmp_path)


def run_tests(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-W", "error", "-p", "no:cacheprovider", tmp_path],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "passed" in done.stdout


def test_the_evaluator_in_contributing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = {block.file_name: block.text for block in find_blocks(ROOT / "CONTRIBUTING.md")}
    (tmp_path / "near.py").write_text(shown["src/dare/studies/evaluators/near.py"])
    monkeypatch.syspath_prepend(tmp_path)
    near = importlib.import_module("near")
    monkeypatch.setattr(evaluators, "KINDS", [near, *evaluators.KINDS])
    tuned = np.array([2, 4], np.float32)
    models = {"w": 0 * tuned}, [{"w": tuned}]
    recipe = write_recipe(tmp_path / "models", *models, method="sum").recipe
    with pytest.raises(RecipeError, match="near:nosuch: there is no such file"):
        evaluators.check_evaluator("near:nosuch")
    with closing(evaluators.open_scorer(f"near:{recipe.base}", recipe)) as scorer:
        scorer.make(recipe)
        assert scorer.score().scores == {"score": -10.0}  # the mean of 4 and 16
