"""Paths without flags: a recipe, an output to repeat, or a base and its models."""

from __future__ import annotations

from pathlib import Path

import pytest
from calling import TO, TWO, asked_recipe, contents, dare, dare_succeeds

from dare.cli import WRONG_USAGE
from helpers import sha256

THREE = ("base.safetensors", "math.safetensors", "code.safetensors")


@pytest.mark.parametrize("command", [(), ("merge",), ("plan",)])
def test_base_and_models_stand_without_flags(command, folder):
    by_flags = asked_recipe(*command, *TWO, *TO, "--drop-rate", "0.5")
    assert asked_recipe(*command, *THREE, *TO, "--drop-rate", "0.5") == by_flags
    assert asked_recipe(*command, "--drop-rate=0.5", *TO, *THREE) == by_flags


def test_the_bytes_are_those_of_the_flags(folder):
    dare_succeeds(*TWO, "-o", "by-flags.safetensors", "--quiet")
    dare_succeeds(*THREE, "-o", "by-place.safetensors", "--quiet")
    assert sha256(Path("by-place.safetensors")) == sha256(Path("by-flags.safetensors"))


def test_init_takes_them_too(folder):
    by_flags = dare_succeeds("init", *TWO, *TO, "--to", "-").out
    assert dare_succeeds("init", *THREE, *TO, "--to", "-").out == by_flags
    Path("r.toml").write_text(by_flags)
    assert dare_succeeds("init", "r.toml", "--to", "-").out == by_flags


@pytest.mark.parametrize("word", ["DARE+TIES", "Dare_Ties", "dare+TIES"])
def test_methods_are_known_in_capitals(word, folder):
    small = asked_recipe(*THREE, *TO, "--method", "dare+ties", "--drop-rate", "0.5")
    recipe = asked_recipe(*THREE, *TO, "--method", word, "--drop-rate", "0.5")
    assert recipe.chain == small.chain
    assert dare_succeeds("methods", word).out == dare_succeeds("methods", "dare+ties").out


WRONG = {
    "math.safetensors": "math.safetensors is one model, and not the output of a merge; name its "
    "fine-tunes after it: `dare math.safetensors MODEL... --output MERGED`",
    "plan empty": "empty is a folder without a model or a recipe; name a base and its models, as "
    "in `dare BASE MODEL... --output MERGED`",
    "math.safetensors -m code.safetensors": "math.safetensors is not a recipe; with --models, "
    "give every model by its flag",
    "base.safetensors math.safetensors --models code.safetensors": "base and models are given "
    "without flags, and --models too; leave out --models, or give all of them by flags",
    "merge base.safetensors math.safetensors -c r.toml": "base and models are given without "
    "flags, and --config too; leave out --config, or give all of them by flags",
    "plan one.toml two.toml": "one.toml is a recipe, and 1 more given; a recipe stands alone: its "
    "models are in it, or replaced with --base and --models",
    "one.toml -c two.toml": "two recipes given, one.toml and two.toml; leave one out",
    "init base.safetensors math.safetensors --from-analysis a.json": "--from-analysis and models "
    "given; leave one out",
}


@pytest.mark.parametrize("line", WRONG)
def test_what_cannot_be_meant_is_refused_with_what_to_do(line, folder):
    Path("empty").mkdir()
    before = contents(folder)
    outcome = dare(*line.split())
    assert outcome.err == f"dare: {WRONG[line]}\n"
    assert outcome.status == WRONG_USAGE
    assert contents(folder) == before


# ---------------------------------------------------------------- the output


def test_folders_on_the_way_to_the_output_are_created_and_announced(folder):
    place = "new/folder/merged.safetensors"
    text = dare_succeeds("plan", *THREE, "-o", place).out
    assert f"to {place} (1 file); the folder new/folder is made for it" in text
    assert not Path("new").exists()
    assert "is made for it" in dare_succeeds(*THREE, "-o", place).out
    assert Path(place).is_file()
    assert "is made for it" not in dare_succeeds("plan", *THREE, "-o", "new/other").out


def test_a_refused_merge_leaves_no_folder(folder):
    outcome = dare(*THREE, "-o", "new/merged.safetensors", "--weight", "1")
    assert outcome.status == 1
    assert not Path("new").exists()


def test_an_output_that_exists_is_replaced_by_the_command_in_the_message(folder):
    line = ("--base", "base.safetensors", "--merge", "math.safetensors", "--drop-rate", "0.95")
    line += ("--delta-threshold", "0.001", "--verbose", "--output", "merged.safetensors")
    dare_succeeds(*THREE, "-o", "merged.safetensors", "--quiet")
    before = sha256(Path("merged.safetensors"))
    outcome = dare(*line)
    remedy = f"dare {' '.join(line)} --overwrite"
    assert outcome.err == (
        "dare: merged.safetensors: exists already; choose another output, or add --overwrite to "
        f"replace it:\n  {remedy}\n"
    )
    dare_succeeds(*remedy.split()[1:])
    assert sha256(Path("merged.safetensors")) != before
