"""Flags: all that a recipe can say can be said on the command line, and means the same."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from calling import TWO, asked_recipe, dare_succeeds

from dare.cli import HELP, MAIN_FLAGS, commands, find_command
from dare.cli.flags import DROP_RATE, FIELDS, PER_MODEL, every_option, field_help, stage_options
from dare.cli.parsing import read_options
from dare.recipe.options import RunOptions
from dare.recipe.recipe import ModelEntry, Recipe, Request, TensorRule
from dare.recipe.settings import parameter_names
from dare.stages import STAGES

TOML = """
seed = 7
max_memory = "512MiB"

[dare]
drop_rate = 0.8
delta_threshold = 0.1
embedding_drop_rate = 0.4
verbose = false

[models]
base_file = "base.safetensors"
merge_files = [
    { file = "math.safetensors", weight = 0.7, seed = 3, drop_rate = 0.3 },
    "code.safetensors",
]
output_file = "merged.safetensors"
"""


@pytest.fixture
def recipe_file(folder: Path) -> Path:
    path = folder / "recipe.toml"
    path.write_text(TOML)
    return path


# ---------------------------------------------------------------- everything has a flag


def test_every_field_of_a_recipe_has_a_flag():
    # each parameter's own flag; --quiet; dare search; a table of a recipe
    elsewhere = {"stages", "verbose", "search", "tokens", "merges", "layers"}
    known = {*Recipe.fields(), *RunOptions.fields()}
    assert set(FIELDS) | elsewhere == known
    assert not set(FIELDS) & elsewhere


@pytest.mark.parametrize("command", [commands.merge, commands.plan, commands.init])
def test_the_commands_that_take_a_recipe_take_all_of_it(command):
    flags = {option.name for option in every_option(command)}
    assert {*FIELDS, *PER_MODEL, *parameter_names(), "config"} <= flags


OWN_MEANING = {"method", "tensors"}  # which say more on the command line


def test_what_help_says_without_the_schema_is_what_the_schema_says():
    known = field_help()
    for field, (_, flag) in FIELDS.items():
        assert flag.help in ("", known[field]) or field in OWN_MEANING
    (rate,) = (option for option in stage_options() if option.name == "drop_rate")
    assert DROP_RATE[1].help == rate.help
    for field in ("minutes", "seeds"):
        assert HELP["search"][field] == known[field]


@pytest.mark.parametrize("command", MAIN_FLAGS)
def test_every_flag_that_help_lists_has_a_meaning(command):
    main = set(MAIN_FLAGS[command])
    options = {
        name: option for option in read_options(find_command(command)) for name in option.names
    }
    assert main <= options.keys()
    assert [name for name in main if not options[name].help] == []


GIVEN = {
    "base": (["--base", "b"], Path("b")),
    "models": (["--merge", "x", "y"], (ModelEntry(file="x"), ModelEntry(file="y"))),
    "output": (["--output", "o"], Path("o")),
    "copy_from": (["--copy-from", "math"], "math"),
    "gathered": (["--gathered", "grams.safetensors"], Path("grams.safetensors")),
    "chat_template": (["--chat-template", "code"], "code"),
    "allow_pickle": (["--allow-pickle"], True),
    "allow_not_finite": (["--allow-not-finite"], True),
    "vocabulary": (["--vocabulary", "union"], "union"),
    "new_rows": (["--new-rows", "merge"], "merge"),
    "pad_to_multiple_of": (["--pad-to-multiple-of", "64"], 64),
    "input_digests": (["--input-digests", "a", "b", "c"], ("a", "b", "c")),
    "output_digest": (["--output-digest", "d"], "d"),
    "method": (["--method", "dare+ties"], "dare+ties"),
    "seed": (["--seed", "0"], 0),
    "scale": (["--scale", "-0.5"], -0.5),
    "dtype": (["--dtype", "bfloat16"], "BF16"),
    "format": (["--format", "input"], "input"),
    "embedding_drop_rate": (["--embedding-drop-rate", "0.25"], 0.25),
    "tensors": (
        ["--tensors", "*.mlp.*: drop_rate=0.5, rescale=l1", "*norm*: drop_rate=0"],
        (
            TensorRule(match=("*.mlp.*",), settings={"drop_rate": 0.5, "rescale": "l1"}),
            TensorRule(match=("*norm*",), settings={"drop_rate": 0}),
        ),
    ),
    "on_missing": (["--on-missing", "base"], "base"),
    "on_extra": (["--on-extra", "drop"], "drop"),
    "on_mismatch": (["--on-mismatch", "base"], "base"),
    "on_integer_mismatch": (["--on-integer-mismatch", "base"], "base"),
    "threads": (["--threads", "3"], 3),
    "device": (["--device", "cuda:1"], "cuda:1"),
    "max_gpu_memory": (["--max-gpu-memory", "4GiB"], 4 << 30),
    "max_memory": (["--max-memory", "512MiB"], 512 << 20),
    "shard_size": (["--shard-size", "5GB"], 5 * 10**9),
    "scratch": (["--scratch", "scratch"], Path("scratch")),
    "require_signed": (["--require-signed", "a.pem", "b.pem"], (Path("a.pem"), Path("b.pem"))),
    "cluster": (["--cluster", "auto"], "auto"),
    "delta_threshold": (["--delta-threshold", "0.001"], 0.001),
}


@pytest.mark.parametrize("field", GIVEN)
def test_a_flag_sets_its_field_and_no_other(field):
    assert set(GIVEN) == set(FIELDS)
    flags, value = GIVEN[field]
    needed = [] if field == "base" else ["--base", "base"]
    needed += [] if field == "models" else ["--merge", "math", "code"]
    recipe = asked_recipe(*needed, *flags)
    plain = Request.of(base="base", models=["math", "code"])
    assert plain.changed(**{field: value}) != plain
    assert recipe == plain.changed(**{field: value})


STAGE_FLAGS = {
    "drop_rate": ("dare+linear", "dare", "0.25", 0.25),
    "rescale": ("dare+linear", "dare", "false", False),
    "normalize": ("linear", "linear", "", True),  # the flag alone
    "t": ("slerp", "slerp", "0", 0),
    "on": ("slerp", "slerp", "deltas", "deltas"),
    "keep_ratio": ("ties", "ties", "0.5", 0.5),
    "divide_by": ("dare+ties", "ties", "count", "count"),
}
CASES = [*STAGE_FLAGS.items(), ("keep_ratio", ("dare+trim+ties", "trim", "0.5", 0.5))]


@pytest.mark.parametrize(("parameter", "case"), CASES)
def test_a_flag_sets_the_parameter_of_its_stage(parameter, case):
    method, stage, text, value = case
    flag = f"--{parameter.replace('_', '-')}"
    recipe = asked_recipe(*TWO, "--method", method, flag, *text.split())
    assert recipe.recipe.stages == {stage: {parameter: value}}


def test_a_flag_sets_the_parameter_of_a_stage_that_only_a_rule_has():
    rules = ["--tensors", "*.mlp.*: method=slerp", "*.up.*: method=darex+ties, q=0.5"]
    recipe = asked_recipe(*TWO, *rules, "--t", "0.25", "--drop-rate", "0.5").recipe
    assert recipe.stages == {"slerp": {"t": 0.25}, "dare": {"drop_rate": 0.5}}
    assert [rule.method for rule in recipe.tensors] == ["slerp", "darex+ties"]


# ---------------------------------------------------------------- several models


@pytest.mark.parametrize(
    "models",
    [
        ["--merge", "math", "code"],
        ["--merge", "math", "-m", "code"],
        ["--merge=math", "--merge=code"],
    ],
)
def test_models_can_be_listed_in_any_way(models):
    recipe = asked_recipe("-b", "base", *models, "-o", "merged")
    assert recipe == Request.of(base="base", models=["math", "code"], output="merged")


def test_values_for_each_model_go_to_each_model():
    recipe = asked_recipe(
        *TWO, "--weight", "0.7", "-0.3", "--model-seed", "9", "0", "--drop-rate", "0.9", "0.5"
    )
    assert recipe.recipe.models == (
        ModelEntry(file="math.safetensors", weight=0.7, seed=9, settings={"drop_rate": 0.9}),
        ModelEntry(file="code.safetensors", weight=-0.3, seed=0, settings={"drop_rate": 0.5}),
    )
    assert recipe.recipe.stages == {}


# ---------------------------------------------------------------- flags over a recipe


OVERRIDES = {
    "a field": (["--seed", "1"], {"seed": 1}),
    "a size": (["--max-memory", "1GiB"], {"max_memory": 1 << 30}),
    "the output": (["-o", "x"], {"output": Path("x")}),
    "an embedding rate that stands in [dare]": (
        ["--embedding-drop-rate", "0.1"],
        {"embedding_drop_rate": 0.1},
    ),
    "verbose that stands in [dare]": (["--verbose"], {"verbose": True}),
    "quiet where the file says it too": (["--quiet"], {}),
    "the models, with what was said of them": (
        ["--merge", "german.safetensors"],
        {"models": ("german.safetensors",)},
    ),
}


@pytest.mark.parametrize("what", OVERRIDES)
def test_a_flag_overrides_the_recipe(what, recipe_file):
    flags, update = OVERRIDES[what]
    plain = asked_recipe("recipe.toml")
    assert asked_recipe("recipe.toml", *flags) == plain.changed(**update)


def test_drop_rates_override_those_of_the_models_too(recipe_file):
    one = asked_recipe("recipe.toml", "--drop-rate", "0.99").recipe
    assert one.stages == {"dare": {"drop_rate": 0.99}}
    assert [entry.settings for entry in one.models] == [{}, {}]
    assert (one.weights(), one.seeds()) == ((0.7, 0.5), (3, 8))
    each = asked_recipe("recipe.toml", "--drop-rate", "0.1", "0.2", "--weight", "1", "2").recipe
    assert [entry.settings["drop_rate"] for entry in each.models] == [0.1, 0.2]
    assert (each.weights(), each.seeds()) == ((1, 2), (3, 8))


@pytest.mark.parametrize("place", [["recipe.toml"], ["--config", "recipe.toml"]])
@pytest.mark.parametrize("word", [[], ["merge"]])
def test_the_recipe_can_be_named_in_every_way(place, word, recipe_file):
    assert asked_recipe(*word, *place) == asked_recipe("-c", "recipe.toml")
    assert asked_recipe(*word, *place) == asked_recipe("--recipe=recipe.toml")


# ---------------------------------------------------------------- help


def test_help_explains_every_flag(monkeypatch):
    monkeypatch.setenv("COLUMNS", "250")
    text = " ".join(dare_succeeds("merge", "--help-all").out.replace("│", " ").split())
    known = field_help()
    for field, (_, flag) in FIELDS.items():
        for name in flag.names or (f"--{field.replace('_', '-')}",):
            assert name in text
        assert (flag.help or known[field]) in text
    for stage in STAGES.values():
        for name in stage.parameters:
            assert f"--{name.replace('_', '-')} VALUE..." in text
            assert stage.parameters[name].description in text  # its own, not another stage's


A_NEW_STAGE = """
import sys
from typing import Annotated
from dare.stages.registry import delta_stage, meaning

@delta_stage()
def shrink(block, *, by: Annotated[float, meaning("What to divide by.", gt=0)] = 2.0):
    "Divide each delta."
    block.factor /= by

from dare.cli import main
assert main(["merge", "--help-all"]) == 0
assert main(["methods"]) == 0
shrunk = ["--method", "shrink+linear", "--by", "4", "-o", "shrunk.safetensors"]
scaled = ["--method", "linear", "--scale", "0.25", "-o", "scaled.safetensors"]
for flags in (shrunk, scaled):
    assert main([*sys.argv[1:], *flags, "--quiet"]) == 0
"""


def test_a_new_stage_brings_its_flag_along(folder):
    done = subprocess.run(
        [sys.executable, "-c", A_NEW_STAGE, *TWO], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "--by VALUE..." in done.stdout
    assert "What to divide by. 0 < x [default: shrink 2.0]" in " ".join(
        done.stdout.replace("│", " ").split()
    )
    assert "shrink" in done.stdout.partition("Delta stages change")[2]
    shrunk, scaled = (
        json.loads((folder / f"{name}.safetensors.manifest.json").read_bytes())["digests"]
        for name in ("shrunk", "scaled")
    )
    assert shrunk["output"] == scaled["output"]
