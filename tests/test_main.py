"""`python -m dare`: what it prints, and how it ends."""

import subprocess
import sys

import numpy as np
import pytest

from dare import merge, plan, verify
from helpers import sha256, write_recipe

BASE = {"w": np.zeros(1000, np.float32)}
MODEL = {"w": np.full(1000, 0.001, np.float32)}


def run(*arguments):
    command = [sys.executable, "-m", "dare", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture
def recipe(tmp_path):
    merge(write_recipe(tmp_path / "first", BASE, [MODEL]))  # so that nothing is left to compile
    recipe = write_recipe(tmp_path, BASE, [MODEL]).model_copy(update={"verbose": True})
    (tmp_path / "recipe.toml").write_text(recipe.to_toml())
    return recipe


def test_a_recipe_is_carried_out_and_reported(recipe, tmp_path):
    done = run(tmp_path / "recipe.toml")
    assert (done.returncode, done.stderr) == (0, "")
    assert "dare+linear: 1 tensors merged" in done.stdout
    assert verify(recipe.output).ok


def test_an_existing_output_is_one_line_and_status_1(recipe, tmp_path):
    run(tmp_path / "recipe.toml")
    again = run(tmp_path / "recipe.toml")
    assert (again.returncode, again.stdout) == (1, "")
    assert again.stderr.startswith(f"dare: {recipe.output}: exists already;")
    assert again.stderr.count("\n") == 1


def test_a_finished_merge_can_be_repeated(recipe, tmp_path):
    run(tmp_path / "recipe.toml")
    before = sha256(recipe.output)
    assert run(recipe.output, "--overwrite").returncode == 0
    assert sha256(recipe.output) == before


@pytest.mark.parametrize("arguments", [(), ("a.toml", "b.toml"), ("a.toml", "--overwirte")])
def test_wrong_usage_is_status_2(arguments):
    done = run(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("usage: python -m dare RECIPE")


def test_merge_and_plan_take_the_name_of_a_recipe_too(recipe, tmp_path):
    assert plan(tmp_path / "recipe.toml").bytes_written == 4000
    assert merge(str(tmp_path / "recipe.toml")).output == recipe.output


def test_help_is_status_0():
    assert run("--help").stdout.startswith("usage: python -m dare RECIPE")


def test_a_missing_recipe_is_a_message_and_no_traceback(tmp_path):
    done = run(tmp_path / "none.toml")
    assert done.returncode == 1
    assert done.stderr.startswith(f"dare: {tmp_path}/none.toml: cannot read the recipe")
    assert "Traceback" not in done.stderr
