"""Stages in a file or in another package are used like any other."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys

import numpy as np
import pytest
from safetensors.numpy import load_file

import dare
from dare.errors import InputError, RecipeError
from dare.output.receipt import read_manifest
from dare.output.targets import manifest_path
from dare.stages import STAGES, registry
from dare.studies.evaluators import open_scorer
from helpers import save

HALVE = '''
"""Half of every change."""
from typing import Annotated
from dare.stages.blocks import Block
from dare.stages.registry import delta_stage, meaning

Share = Annotated[float, meaning("What is left of a change.", gt=0, le=1)]

@delta_stage()
def shrink(block: Block, *, share: Share = 0.5) -> None:
    """Leave a share of every change."""
    block.factor *= share
'''
TOP = '''
import numpy as np
from dare.stages.blocks import Deltas, Floats
from dare.stages.registry import combine_stage

@combine_stage()
def farthest(deltas: Deltas) -> Floats:
    """Take the change that is largest in magnitude."""
    values = np.stack([block.values * np.float32(block.factor) for block in deltas.blocks])
    return np.take_along_axis(values, np.abs(values).argmax(0)[np.newaxis], 0)[0]
'''


SUMMING = '''
import numpy as np
from dare.stages.blocks import Deltas, Floats
from dare.stages.registry import combine_stage

@combine_stage()
def summing(deltas: Deltas) -> Floats:
    """Compute with a sum."""
    total = deltas.sum([1.0, 1.0])
    {}
'''


@pytest.fixture(autouse=True)
def _forget():
    """What a test registers is gone after it."""
    before = dict(STAGES)
    yield
    STAGES.clear()
    STAGES.update(before)
    registry.load_installed_stages.cache_clear()


@pytest.fixture
def folder(tmp_path):
    save(tmp_path / "base.safetensors", {"w": np.zeros(4, np.float32)})
    save(tmp_path / "a.safetensors", {"w": np.array([1, 2, -3, 4], np.float32)})
    save(tmp_path / "b.safetensors", {"w": np.array([2, -1, 1, 8], np.float32)})
    (tmp_path / "shrink.py").write_text(HALVE)
    (tmp_path / "farthest.py").write_text(TOP)
    return tmp_path


def files(folder):
    """What to merge, for a recipe or from Python."""
    models = [folder / f"{name}.safetensors" for name in "ab"]
    return {"base": folder / "base.safetensors", "models": models}


def command(folder, *more):
    base, models = files(folder).values()
    output = ["--output", folder / "out.safetensors", "--quiet"]
    return list(map(str, ["--base", base, "--merge", *models, *output, *more]))


def run_python(*arguments):
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def run_dare(*arguments):
    """In a process of its own: flags are made once, and a stage brings its flags along."""
    return run_python("-m", "dare", *arguments)


def test_stages_in_files_are_used_from_the_command_line(folder):
    stages = ["--stage", folder / "shrink.py", f"--stage={folder / 'farthest.py'}"]
    asked = ["--method", "shrink+farthest", "--share", 0.25]
    run_dare(*command(folder, *stages, *asked))
    assert load_file(folder / "out.safetensors")["w"].tolist() == [0.5, 0.5, -0.75, 2]
    origins = read_manifest(manifest_path(folder / "out.safetensors"))["stages_from"]
    assert origins.keys() == {"shrink", "farthest"}


def test_a_merge_is_repeated_with_the_stages_it_was_made_with(folder):
    stage = "--stage", folder / "shrink.py"
    run_dare(*command(folder, *stage, "--method", "shrink+sum"))
    made, again = folder / "out.safetensors", folder / "again.safetensors"
    with pytest.raises(RecipeError, match=r"no stage 'shrink'.*--stage FILE"):
        dare.load_recipe(made)
    run_dare("merge", made, *stage, "--output", again)
    assert load_file(again)["w"].tolist() == load_file(made)["w"].tolist()


def test_help_and_the_list_of_methods_have_them(folder):
    stage = "--stage", folder / "shrink.py"
    assert "Leave a share of every change." in run_dare("methods", "shrink", *stage)
    assert "--share" in run_dare("merge", *stage, "--help-all")


@pytest.mark.parametrize(
    ("old", "new", "remedy"),
    [
        ('meaning("What is left of a change.", gt=0, le=1)', "Field(gt=0)", r"write meaning\("),
        ("Share = Annotated[float, ", "Share = Annotated[Sequence[float], ", "checked against"),
    ],
)
def test_types_that_cannot_be_checked_are_refused_when_the_file_is_loaded(folder, old, new, remedy):
    pytest.importorskip("pydantic")
    imports = "from collections.abc import Sequence\nfrom pydantic import Field\n"
    (folder / "shrink.py").write_text(imports + HALVE.replace(old, new))
    with pytest.raises(InputError, match=rf"shrink\.py: its stages cannot be loaded: .*{remedy}"):
        dare.load_stages(folder / "shrink.py")


def test_from_python(folder):
    assert dare.load_stages(folder / "shrink.py") == ("shrink",)
    assert dare.load_stages(folder / "shrink.py") == ("shrink",)  # and is not run again
    base, tuned = {"w": np.zeros(2, np.float32)}, {"w": np.ones(2, np.float32)}
    merged, _ = dare.merge_arrays(base, [tuned], method="shrink+sum", verbose=False)
    assert merged["w"].tolist() == [0.5, 0.5]


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("return total", [3, 1, -2, 12]),
        ("total *= 2; return total", [6, 2, -4, 24]),
        ("return 1 - total", [-2, 0, 3, -11]),
        ("total[total > 5] = 5; return total", [3, 1, -2, 5]),
        ("np.clip(total, 0, 5, out=total); return total", [3, 1, 0, 5]),
        ("return np.where(total < 0, total[0], total)", [3, 1, 3, 12]),
        ("return np.full(len(total), total.max(), total.dtype)", [12] * 4),
        ("return total - deltas.sum([1.0, -1.0])", [4, -2, 2, 16]),
        ("deltas.kernels.add_scaled(total, total, np.float32(1)); return total", [6, 2, -4, 24]),
        ("return deltas.elect([1.0, 1.0], [1.0, 1.0]) + total", [4.5, 3, -5, 18]),
    ],
)
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_a_sum_is_an_array_for_whoever_computes_with_it(folder, code, expected, backend):
    (folder / "summing.py").write_text(SUMMING.format(code))
    dare.load_stages(folder / "summing.py")
    out = folder / "out.safetensors"
    dare.merge(**files(folder), output=out, method="summing", backend=backend, verbose=False)
    assert load_file(out)["w"].tolist() == expected


def test_a_plan_takes_its_stages_along_to_another_process(folder):
    dare.load_stages(folder / "shrink.py")
    recipe = dare.Recipe(**files(folder), method="shrink+sum")
    (folder / "plan").write_bytes(pickle.dumps(dare.plan(recipe)))
    code = (
        "import pickle, sys; print(pickle.load(open(sys.argv[1], 'rb')).tensors[0].stages[0].name)"
    )
    assert run_python("-c", code, folder / "plan") == "shrink\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1", "registers no stage"),
        ("import no_such_package", "ModuleNotFoundError: No module named 'no_such_package'"),
        ("def (", "SyntaxError"),
        (HALVE + "\n1 / 0", "ZeroDivisionError"),
        (HALVE.replace("def shrink", "def dare"), "there is already a stage 'dare'"),
        (None, r"bad.py: cannot read the stage: No such file"),
    ],
)
def test_a_file_that_is_no_good_is_refused_and_leaves_nothing_behind(folder, text, message):
    if text is not None:
        (folder / "bad.py").write_text(text)
    before = dict(STAGES)
    with pytest.raises(InputError, match=message):
        dare.load_stages(folder / "bad.py")
    assert before == STAGES


def test_stages_of_an_installed_package(folder):
    """An entry point, as the metadata of an installed package has it."""
    site = folder / "site"
    (site / "shrinking-1.2.dist-info").mkdir(parents=True)
    (site / "shrinking.py").write_text(HALVE)
    (site / "shrinking-1.2.dist-info" / "METADATA").write_text("Name: shrinking\nVersion: 1.2\n")
    entries = "[dare.stages]\nshrink = shrinking\n"
    (site / "shrinking-1.2.dist-info" / "entry_points.txt").write_text(entries)
    code = (
        f"import sys; sys.path.insert(0, {str(site)!r})\n"
        "import json, dare\n"
        "from dare.stages.registry import parse_method\n"
        "stage = parse_method('shrink+sum')[0]\n"
        "print(json.dumps([stage.name, stage.origin]))"
    )
    assert json.loads(run_python("-c", code)) == ["shrink", "package shrinking 1.2"]


def test_a_search_makes_candidates_with_it_in_another_process(folder):
    registry.load_stages(folder / "shrink.py")
    (folder / "score.py").write_text("def score(tensors):\n    return float(tensors['w'].sum())\n")
    recipe = dare.Recipe(**files(folder), method="shrink+sum")
    scorer = open_scorer(f"{folder / 'score.py'}:score", recipe)
    try:
        assert scorer.make(recipe) == dare.Candidates(recipe).make().digest
    finally:
        scorer.close()
