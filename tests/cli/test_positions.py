"""Paths without flags: a recipe, an output to repeat, or a base and its models."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from calling import TO, TWO, asked_recipe, base_arrays, contents, dare, dare_succeeds
from safetensors.numpy import load_file

from dare import merge, merge_arrays
from dare.cli import WRONG_USAGE
from dare.stages import STAGES
from helpers import save, sha256

THREE = ("base.safetensors", "math.safetensors", "code.safetensors")


@pytest.mark.parametrize("command", [(), ("merge",), ("plan",)])
def test_base_and_models_stand_without_flags(command, folder):
    by_flags = asked_recipe(*command, *TWO, *TO, "--drop-rate", "0.5")
    assert asked_recipe(*command, *THREE, *TO, "--drop-rate", "0.5") == by_flags
    assert asked_recipe(*command, "--drop-rate=0.5", *TO, *THREE) == by_flags
    assert asked_recipe(*command, "-b", *THREE, *TO, "--drop-rate", "0.5") == by_flags
    one = asked_recipe(*command, *THREE[:2], *TO)
    assert asked_recipe(*command, THREE[1], "--base", THREE[0], *TO) == one


def test_init_takes_them_too(folder):
    by_flags = dare_succeeds("init", *TWO, *TO, "--to", "-").out
    assert dare_succeeds("init", *THREE, *TO, "--to", "-").out == by_flags
    Path("r.toml").write_text(by_flags)
    assert dare_succeeds("init", "r.toml", "--to", "-").out == by_flags


@pytest.mark.parametrize("word", ["DARE+TIES", "Dare_Ties", "dare+TIES"])
def test_methods_are_known_in_capitals(word, folder):
    small = asked_recipe(*THREE, *TO, "--method", "dare+ties", "--drop-rate", "0.5")
    recipe = asked_recipe(*THREE, *TO, "--method", word, "--drop-rate", "0.5")
    assert recipe.recipe.chain == small.recipe.chain
    assert dare_succeeds("methods", word).out == dare_succeeds("methods", "dare+ties").out


def test_base_and_model_of_an_extraction_stand_without_flags(folder):
    extract = ("lora", "extract", "--rank", 1, "--save-others")
    dare_succeeds(*extract, *THREE[:2], "-o", "by-position")
    dare_succeeds(*extract, "-b", THREE[0], "-m", THREE[1], "-o", "by-flags")
    files = (Path(by) / "adapter_model.safetensors" for by in ("by-position", "by-flags"))
    assert len({sha256(file) for file in files}) == 1


WRONG = {
    "plan base.safetensors math.safetensors --drop-rate": "at least 1 element",
    "math.safetensors": "add a model",
    "plan empty": "add a model",
    "math.safetensors -m code.safetensors": "by flags",
    "base.safetensors math.safetensors --models code.safetensors": "leave out --models",
    "merge base.safetensors math.safetensors -c r.toml": "leave out --config",
    "plan one.toml two.toml": "--base and --models",
    "one.toml -c two.toml": "one.toml and two.toml",
    "init base.safetensors math.safetensors --from-analysis a.json": "--from-analysis",
}


@pytest.mark.parametrize("line", WRONG)
def test_what_cannot_be_meant_is_refused_with_what_to_do(line, folder):
    Path("empty").mkdir()
    before = contents(folder)
    outcome = dare(*line.split())
    assert WRONG[line] in outcome.err
    assert outcome.status == WRONG_USAGE
    assert contents(folder) == before


# ---------------------------------------------------------------- two models to interpolate


PAIR = ("math.safetensors", "code.safetensors")
INTERPOLATING = [
    *("slerp", "SLERP", "nuslerp", "karcher", "multislerp", "dare+slerp", "dare_slerp"),
    "trim+karcher",
]


@pytest.mark.parametrize(
    ("command", "method"),
    [
        *(("merge", method) for method in INTERPOLATING),
        *((command, "slerp") for command in ("plan", "init", "finish")),
    ],
)
def test_two_paths_are_the_two_models_of_an_interpolation(command, method, folder):
    command, how = (command,), (*TO, "--method", method)
    by_flags = asked_recipe(*command, "--base", PAIR[0], "--merge", *PAIR, *how)
    assert asked_recipe(*command, *PAIR, *how) == by_flags
    assert asked_recipe(*command, "--models", *PAIR, *how) == by_flags
    three = asked_recipe(*command, *TWO, *how)
    assert asked_recipe(*command, *THREE, *how) == three, "the first of three is the base"


def test_a_stage_of_ones_own_says_that_it_interpolates(folder, monkeypatch):
    Path("half.py").write_text(
        "from dare.stages.registry import combine_stage\n\n\n"
        "@combine_stage(models=2, interpolates={})\n"
        "def half(deltas):\n"
        '    """Halve the way."""\n'
        "    return deltas.sum([0.5, 0.5])\n"
    )
    monkeypatch.setitem(STAGES, "half", None)  # so that what is registered goes away again
    del STAGES["half"]
    dare_succeeds(*PAIR, *TO, "--method", "half", "--stage", "half.py", "--quiet")
    math, code, merged = (load_file(file) for file in (*PAIR, "merged.safetensors"))
    for name in FLOATS:
        half = math[name] + np.float32(0.5) * (code[name] - math[name])
        assert np.array_equal(merged[name], half)


FLOATS = [name for name, array in base_arrays().items() if array.dtype == np.float32]


@pytest.mark.parametrize("kind", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("t", [0, 1])
def test_the_ends_of_the_arc_are_the_models_themselves(t, kind, folder):
    for file in PAIR:
        save(Path(file), {name: array.astype(kind) for name, array in load_file(file).items()})
    dare_succeeds(*PAIR, *TO, "--method", "slerp", "--t", t, "--quiet")
    end, merged = (Path(file).read_bytes() for file in (PAIR[t], "merged.safetensors"))
    whole = sum(2 * array.size for array in base_arrays().values())
    assert merged[-whole:] == end[-whole:]


@pytest.mark.parametrize("base", [PAIR[0], None])
def test_python_takes_the_base_among_the_models_too(base, folder):
    settings = {"method": "nuslerp", "weight": [0.3, 0.7], "verbose": False}
    merge(base=base, models=list(PAIR), output="by-python.safetensors", **settings)
    line = (*PAIR, "--method", "nuslerp", "--weight", "0.3", "0.7", "--quiet")
    dare_succeeds(*line, "-o", "by-place.safetensors")
    assert sha256(Path("by-python.safetensors")) == sha256(Path("by-place.safetensors"))
    math, code = (load_file(file) for file in PAIR)
    arrays, _ = merge_arrays(math, [math, code], on_integer_mismatch="base", **settings)
    for name, values in load_file("by-place.safetensors").items():
        assert np.array_equal(arrays[name], values)


def test_another_number_of_models_is_refused_with_the_line_to_write_instead(folder):
    line = ("--base", PAIR[0], *TO, "--method", "slerp", "--quiet")
    outcome = dare(*line, "--models", PAIR[1])
    assert (outcome.status, Path("merged.safetensors").exists()) == (1, False)
    remedy = f"--models {PAIR[0]} {PAIR[1]}"
    assert remedy in outcome.err
    dare_succeeds(*line, *remedy.split())
    assert "karcher" in dare(*THREE, "german.safetensors", *TO, "--method", "slerp").err


# ---------------------------------------------------------------- the output


def test_folders_on_the_way_to_the_output_are_created_and_announced(folder):
    place = "new/folder/merged.safetensors"
    assert dare(*THREE, "-o", place, "--weight", "1").status == 1
    assert "the folder new/folder" in dare_succeeds("plan", *THREE, "-o", place).out
    assert not Path("new").exists()
    dare_succeeds(*THREE, "-o", place, "--quiet")
    assert Path(place).is_file()
    assert "the folder" not in dare_succeeds("plan", *THREE, "-o", "new/other").out


def test_an_output_that_exists_is_replaced_by_the_command_in_the_message(folder):
    line = ("--base", "base.safetensors", "--merge", "math.safetensors", "--drop-rate", "0.95")
    line += ("--delta-threshold", "0.001", "--verbose", "--output", "merged.safetensors")
    dare_succeeds(*THREE, "-o", "merged.safetensors", "--quiet")
    before = sha256(Path("merged.safetensors"))
    outcome = dare(*line)
    remedy = f"dare {' '.join(line)} --overwrite"
    assert outcome.err.endswith(f"\n  {remedy}\n")
    dare_succeeds(*remedy.split()[1:])
    assert sha256(Path("merged.safetensors")) != before
