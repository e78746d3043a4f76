"""What a user gets to read when something is wrong: the whole message, and nothing besides.

Every case is a mistake somebody makes. Each ends with the right status, the message that stands
here and nothing else on stderr, and leaves the folder as it was. Of a message that another library
words only what we put around it stands here.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shlex
import shutil
from collections import namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from calling import TO, TWO, Outcome, base_arrays, contents, dare, dare_succeeds, tuned_arrays

from dare import RecipeError, load_recipe, stages
from dare.cli import FAILED, WRONG_USAGE
from dare.cli.flags import read_rule
from dare.output.manifest import FORMAT
from dare.output.sealing import seal
from dare.tensors.mask import MASK_VERSION
from helpers import entry, file_bytes, save

MODELS = """
[models]
base_file = "base.safetensors"
merge_files = ["math.safetensors", "code.safetensors"]
output_file = "merged.safetensors"
"""

RULE = "[[tensors]]\nmatch = '*norm*'\ndrop_rate = 0.5\n"

STAGES = f"stages: {', '.join(stages.STAGES)}"
ALIASES = f"other names: {', '.join(a for a in stages.ALIASES if a not in stages.STAGES)}"
OWN = "a stage of your own is given with --stage FILE"
COMBINES = ", ".join(s.name for s in stages.STAGES.values() if s.kind == "combine")


def assert_refused(outcome: Outcome, message: str, status: int = FAILED) -> None:
    assert outcome == Outcome(status, "", f"dare: {message}\n")


# ---------------------------------------------------------------- in the recipe

RECIPES = {
    "an unknown key": (
        "metod = 'dare+ties'\n" + MODELS,
        "metod: not known (did you mean 'method'?)",
    ),
    "a parameter that stands outside its table": (
        "drop_rate = 0.9\n" + MODELS,
        "drop_rate: belongs in the table of its stage, as in [dare]",
    ),
    "a parameter outside the tables, of a stage that is not in the method": (
        "keep_ratio = 0.2\n" + MODELS,
        "keep_ratio: belongs in the table of its stage, as in [trim]",
    ),
    "a parameter outside the tables, of the method's second owner": (
        "method = 'ties'\nkeep_ratio = 0.2\n" + MODELS,
        "keep_ratio: belongs in the table of its stage, as in [ties]",
    ),
    "a stage that is a number": ("dare = 3\n" + MODELS, "dare: must be a table, as in [dare]"),
    "a stage that is a list": ("ties = []\n" + MODELS, "ties: must be a table, as in [ties]"),
    "an unknown key in [dare]": (
        "[dare]\ndrop_rat = 0.9\n" + MODELS,
        "[dare] drop_rat: not known (did you mean 'drop_rate'?)",
    ),
    "an unknown key in [models]": (
        '[models]\nbase_fil = "base.safetensors"\n',
        "[models] base_fil: not known (did you mean 'base_file'?)",
    ),
    "an unknown key of a stage": (
        "method = 'ties'\n[ties]\nkeep = 0.2\n" + MODELS,
        "[ties] keep: ties has no such parameter; it has: keep_ratio, divide_by, vote, weighted",
    ),
    "an unknown table": (
        "[dara]\ndrop_rate = 0.9\n" + MODELS,
        "[dara]: no such stage (did you mean 'dare'?)",
    ),
    "an unknown method": (
        "method = 'dare+tie'\n" + MODELS,
        "method 'dare+tie': there is no stage 'tie' (did you mean 'ties'?); "
        f"{STAGES}; {ALIASES}; {OWN}",
    ),
    "a method in the wrong order": (
        "method = 'ties+dare'\n" + MODELS,
        "method 'ties+dare': a method is any delta stages and then one combine stage "
        f"({COMBINES}), as in 'dare+linear'",
    ),
    "a stage twice": (
        "method = 'dare+dare+linear'\n" + MODELS,
        "method 'dare+dare+linear': dare stands in it more than once; "
        "the second would do the same again",
    ),
    "a table for a stage that is not in the method": (
        "[ties]\nkeep_ratio = 0.2\n" + MODELS,
        "[ties] would have no effect: method 'dare+linear' has the stages dare, linear",
    ),
    "a drop rate of 1": (
        "[dare]\ndrop_rate = 1\n" + MODELS,
        "[dare] drop_rate = 1 would drop every change and leave nothing to rescale; use a rate "
        "below 1 (0.9 is usual), or leave the model out",
    ),
    "a drop rate in percent": (
        "[dare]\ndrop_rate = 90\n" + MODELS,
        "[dare] drop_rate = 90.0: must be at least 0 and below 1",
    ),
    "an embedding rate of 1": (
        "embedding_drop_rate = 1\n" + MODELS,
        "embedding_drop_rate = 1 would drop every change and leave nothing to rescale; use a rate "
        "below 1 (0.9 is usual)",
    ),
    "an embedding rate in percent": (
        "embedding_drop_rate = 90\n" + MODELS,
        "embedding_drop_rate = 90.0: must be at least 0 and below 1",
    ),
    "a drop rate that is not a number": (
        "[dare]\ndrop_rate = nan\n" + MODELS,
        "[dare] drop_rate = nan: must be at least 0 and below 1",
    ),
    "a dtype for integers": (
        "dtype = 'int8'\n" + MODELS,
        "dtype int8: not a weight type; use one of F64, F32, F16, BF16, F8_E4M3, F8_E5M2",
    ),
    "no base": ('[models]\nmerge_files = ["math.safetensors"]\n', "[models] base_file is missing"),
    "no files at all": ("seed = 1\n", "base is missing"),
    "no models in the list": (
        MODELS.replace('"math.safetensors", "code.safetensors"', ""),
        "no models: name at least one",
    ),
    "models that are a number": (
        MODELS.replace('["math.safetensors", "code.safetensors"]', "3"),
        '[models] merge_files: must be a list, as in ["math.safetensors", "code.safetensors"]',
    ),
    "a model that is a number": (
        MODELS.replace('"code.safetensors"', "3"),
        "[models] merge_files, number 2: must be the path of a file or directory, or a table",
    ),
    "a model with an unknown key": (
        MODELS.replace('"code.safetensors"', "{ file = 'code.safetensors', drop_rat = 0.5 }"),
        "[models] merge_files, number 2: drop_rat: not known here (did you mean 'drop_rate'?)",
    ),
    "a model without a file": (
        MODELS.replace('"math.safetensors"', "{ drop_rate = 0.5 }"),
        "[models] merge_files, number 1: file is missing",
    ),
    "models that are neither a list nor a table": (
        "base = 'base.safetensors'\nmodels = 3\n",
        'models: must be a list, as in ["math.safetensors", "code.safetensors"]',
    ),
    "files at the top level and in a table": (
        "output = 'merged.safetensors'\n" + MODELS,
        "output at the top level and a table [models]: name the files in one place, as base, "
        "models and output at the top level, or as base_file, merge_files and output_file in "
        "[models]",
    ),
    "a base that is a number": (
        MODELS.replace('"base.safetensors"', "3"),
        "base = 3: must be the path of a file or directory",
    ),
    "weights for slerp": (
        "method = 'slerp'\n[models]\nbase_file = 'base.safetensors'\nmerge_files = [\n"
        "{ file = 'math.safetensors', weight = 0.7 }, 'code.safetensors']\n",
        "model math: slerp takes no weights; its parameters are t, on",
    ),
    "three models for slerp": (
        "method = 'slerp'\n"
        + MODELS.replace('"code.safetensors"', '"code.safetensors", "german.safetensors"'),
        "slerp merges 2 models, and 3 are given beside the base; karcher takes any number",
    ),
    "a parameter of a model that no stage has": (
        "method = 'linear'\n"
        + MODELS.replace('"math.safetensors"', "{ file = 'm', drop_rate = 0.5 }"),
        "model m: drop_rate is not a parameter here; known: none",
    ),
    "a rule that is not a table": (
        "tensors = 3\n" + MODELS,
        "tensors: must be a list of tables, as in [[tensors]]",
    ),
    "a rule that is a number": (
        "tensors = [3]\n" + MODELS,
        "[[tensors]], number 1: must be a table",
    ),
    "a rule with an unknown key": (
        MODELS + RULE + "[[tensors]]\nmatch = '*.mlp.*'\ndrop_rat = 0.5\n",
        "[[tensors]], number 2: drop_rat: not known here (did you mean 'drop_rate'?)",
    ),
    "a rule without a pattern": (
        MODELS + RULE + "[[tensors]]\ndrop_rate = 0.5\n",
        "[[tensors]], number 2: match is missing: a rule names its tensors by "
        'match = "*.mlp.*" or contains = "mlp"',
    ),
    "a rule with a rate out of range": (
        MODELS + "[[tensors]]\nmatch = '*.mlp.*'\ndrop_rate = -0.5\n",
        "tensors matching '*.mlp.*': drop_rate = -0.5: must be at least 0 and below 1",
    ),
    "an embedding rate where nothing is dropped": (
        "method = 'linear'\nembedding_drop_rate = 0.5\n" + MODELS,
        "embedding_drop_rate would have no effect: method 'linear' drops nothing",
    ),
    "digests for other models": (
        "input_digests = ['0', '1']\n" + MODELS,
        "input_digests: 2 given for a base and 2 models",
    ),
}


@pytest.mark.parametrize("mistake", RECIPES)
def test_a_wrong_recipe_is_refused_with_one_message(mistake, tmp_path, monkeypatch):
    text, message = RECIPES[mistake]
    (tmp_path / "recipe.toml").write_text(text)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RecipeError, match=f"^{re.escape(f'recipe.toml: {message}')}$"):
        load_recipe("recipe.toml")


def test_the_message_is_all_that_the_command_says_and_nothing_is_changed(folder):
    text, message = RECIPES["an unknown key"]
    (folder / "recipe.toml").write_text(text)
    before = contents(folder)
    assert_refused(dare("recipe.toml"), f"recipe.toml: {message}")
    assert contents(folder) == before


def test_with_flags_a_message_says_that_the_recipe_was_changed_by_them(folder):
    (folder / "recipe.toml").write_text(MODELS)
    assert_refused(
        dare("recipe.toml", "--drop-rate", "1.5"),
        "recipe.toml with flags: [dare] drop_rate = 1.5: must be at least 0 and below 1",
    )


@pytest.mark.parametrize("mistake", ["a stage that is a number", "models that are a number"])
def test_what_no_flag_can_be_laid_over_is_left_to_the_recipes_own_check(mistake, folder):
    text, message = RECIPES[mistake]
    (folder / "recipe.toml").write_text(text)
    outcome = dare("recipe.toml", "--drop-rate", "0.5")
    assert_refused(outcome, f"recipe.toml with flags: {message}")


# ---------------------------------------------------------------- in the flags

MERGE_TWO = shlex.join([*TWO, *TO])
EACH = "give one for each, in the order of the models"
USAGE = {
    "verbose and quiet": (
        f"{MERGE_TWO} --verbose --quiet",
        "--verbose and --quiet given; leave one out",
    ),
    "two recipes": (
        "one.toml --config two.toml",
        "two recipes given, one.toml and two.toml; leave one out",
    ),
    "no models": (
        "--base base.safetensors",
        "--models missing: give --base, --models and --output, or a recipe with --config",
    ),
    "no base": (
        "-m math.safetensors -o merged.safetensors",
        "--base missing: give --base, --models and --output, or a recipe with --config",
    ),
    "nothing but a flag": (
        "--quiet",
        "--base and --models missing: give --base, --models and --output, or a recipe with "
        "--config",
    ),
    "nothing to verify": ("verify", "nothing to verify: name the output of a merge"),
}

FLAGS = {
    "one weight for two models": (
        f"{MERGE_TWO} --weight 0.5",
        f"command line: --weight: 1 given for 2 models; {EACH}",
    ),
    "two weights for one model": (
        "plan -b base.safetensors -m math.safetensors --weight 1 2",
        f"command line: --weight: 2 given for 1 model; {EACH}",
    ),
    "three drop rates for two models": (
        f"{MERGE_TWO} --drop-rate 0.5 0.6 0.7",
        f"command line: --drop-rate: 3 given for 2 models; {EACH}",
    ),
    "three seeds for two models": (
        f"{MERGE_TWO} --model-seed 1 2 3",
        f"command line: --model-seed: 3 given for 2 models; {EACH}",
    ),
    "two values for a combine stage": (
        f"{MERGE_TWO} --method slerp --t 0.5 0.6",
        "command line: --t: slerp sees all models at once and takes one value, not 2",
    ),
    "a drop rate of 1": (
        f"{MERGE_TWO} --drop-rate 1",
        "command line: [dare] drop_rate = 1 would drop every change and leave nothing to "
        "rescale; use a rate below 1 (0.9 is usual), or leave the model out",
    ),
    "a parameter without effect": (
        f"{MERGE_TWO} --keep-ratio 0.5",
        "command line: --keep-ratio would have no effect: method 'dare+linear' takes "
        "--drop-rate, --rescale",
    ),
    "a parameter of a method that has none": (
        f"{MERGE_TWO} --method linear --drop-rate 0.5",
        "command line: --drop-rate would have no effect: method 'linear' takes no parameters",
    ),
    "a rule without settings": (
        f"{MERGE_TWO} --tensors '*.mlp.*'",
        "command line: --tensors '*.mlp.*': write PATTERN: name=value, as in "
        "'*.mlp.*: drop_rate=0.5'",
    ),
    "a rule for an unknown parameter": (
        f"{MERGE_TWO} --tensors '*.mlp.*: drop_rat=0.5'",
        "command line: [[tensors]], number 1: drop_rat: not known here (did you mean 'drop_rate'?)",
    ),
    "a size that is none": (
        f"{MERGE_TWO} --max-memory lots",
        "command line: max_memory = 'lots': not a size; write 1073741824, '1GiB' or '5GB'",
    ),
    "less memory than one thread needs": (
        f"{MERGE_TWO} --max-memory 1k",
        "max_memory = 1024: one thread needs 22024192 bytes; allow at least 22.025 MB",
    ),
    "shards for one file": (
        f"{MERGE_TWO} --shard-size 5GB",
        "shard_size makes several files, and the output merged.safetensors is one; "
        "give a directory (a name without .safetensors)",
    ),
    "a stage that there is not": (
        "methods tie",
        "tie: no such stage or method (did you mean 'ties'?); there are "
        + ", ".join(dict.fromkeys([*stages.STAGES, *stages.ALIASES])),
    ),
}


@pytest.mark.parametrize(
    ("line", "message", "status"),
    [(*case, WRONG_USAGE) for case in USAGE.values()]
    + [(*case, FAILED) for case in FLAGS.values()],
    ids=[*USAGE, *FLAGS],
)
def test_a_wrong_command_line_is_refused_with_one_message(line, message, status, folder):
    before = contents(folder)
    assert_refused(dare(*shlex.split(line)), message, status)
    assert contents(folder) == before


@pytest.mark.parametrize("text", ["*.mlp.*: drop_rate", ": drop_rate=0.5", "*.mlp.*: match=x"])
def test_a_rule_that_cannot_be_read_is_refused(text):
    with pytest.raises(RecipeError, match=rf"^--tensors {re.escape(repr(text))}: write PATTERN"):
        read_rule(text)


# ---------------------------------------------------------------- in the words of others

REFUSED_VALUES = {  # by pydantic and tomllib: the recipe, and what we say before their words
    "[dare": "not valid TOML: ",
    "seed = 1.5": "seed = 1.5: ",
    "[dare]\ndrop_rate = '0.9'": "[dare] drop_rate = '0.9': ",
    "[dare]\nverbose = 'yes'": "verbose = 'yes': ",
    "[models]\nbase_file = 'b'\nmerge_files = [{ file = 'a', weight = 'half' }]": (
        "[models] merge_files, number 1: weight = 'half': "
    ),
}
UNPARSABLE = {  # for cyclopts: the line, and the command whose help is named
    f"{MERGE_TWO} --drop-rat 0.5": "merge ",
    "mrege recipe.toml": "",
    f"plan {MERGE_TWO} --weight a b": "plan ",
}
IN_OTHER_WORDS = [
    *(("recipe.toml", text, FAILED, words, "") for text, words in REFUSED_VALUES.items()),
    *((line, "", WRONG_USAGE, "", f" See `dare {c}--help`.") for line, c in UNPARSABLE.items()),
]


@pytest.mark.parametrize(("line", "text", "status", "begins", "ends"), IN_OTHER_WORDS)
def test_what_a_library_refuses_is_one_line(line, text, status, begins, ends, folder):
    (folder / "recipe.toml").write_text(text + ("" if "[models]" in text else MODELS))
    before = contents(folder)
    outcome = dare(*shlex.split(line))
    assert (outcome.status, outcome.out, outcome.err.count("\n")) == (status, "", 1)
    assert outcome.err.startswith(f"dare: recipe.toml: {begins}" if begins else "dare: ")
    assert outcome.err.endswith(f"{ends}\n")
    assert contents(folder) == before


# ---------------------------------------------------------------- in the files


def _broken(name: str, data: bytes) -> Callable[[], object]:
    return lambda: Path(name).write_bytes(data)


def _model(name: str, change: Callable[[dict[str, np.ndarray]], object]) -> Callable[[], object]:
    """A model that is a fine-tune of the base but for one thing."""

    def write() -> None:
        arrays = tuned_arrays(base_arrays(), 5)
        change(arrays)
        save(Path(f"{name}.safetensors"), arrays)

    return write


def _no_change(_arrays: dict[str, np.ndarray]) -> None:
    pass


_cut = _broken(
    "cut.safetensors", file_bytes({"model.norm.weight": entry("F32", [4], 0, 16)}, b"0123456789")
)


def _two_in_a_folder() -> None:
    for name in ("math", "code"):
        save(Path(f"both/{name}.safetensors"), base_arrays())


def _index_without_shard() -> None:
    Path("sharded").mkdir()
    index = {"weight_map": {"w": "model-00001-of-00001.safetensors"}}
    Path("sharded/model.safetensors.index.json").write_text(json.dumps(index))


def _merged_with_manifest(**document: Any) -> Callable[[], object]:
    def write() -> None:
        dare_succeeds(*TWO, *TO, "--quiet")
        Path("merged.safetensors.manifest.json").write_bytes(seal(document, {}))

    return write


def _resized(arrays: dict[str, np.ndarray]) -> None:
    arrays["model.layers.0.norm.weight"] = np.ones(49, np.float32)


def _retyped(arrays: dict[str, np.ndarray]) -> None:
    arrays["model.position_ids"] = arrays["model.position_ids"].astype(np.float32)


def _other_names(arrays: dict[str, np.ndarray]) -> None:
    for number, name in enumerate(sorted(arrays)):
        arrays[f"h.{number}.w"] = arrays.pop(name)


def _nothing() -> None:
    pass


ONE = "plan -b base.safetensors -m"
FILES = {
    "a model that is not there": (
        _nothing,
        f"{ONE} maths.safetensors",
        "maths.safetensors: no such file",
    ),
    "a model that is text": (
        _broken("notes.safetensors", b"these are my notes on model merging"),
        f"{ONE} notes.safetensors",
        f"notes.safetensors: the header claims {int.from_bytes(b'these ar', 'little')} bytes, more "
        "than the 100000000 that safetensors allows; this is not a safetensors file",
    ),
    "an empty model": (
        _broken("empty.safetensors", b""),
        f"{ONE} empty.safetensors",
        "empty.safetensors: 0 bytes is too short for a safetensors file; "
        "the download is probably incomplete",
    ),
    "a model that was cut off": (
        _cut,
        f"{ONE} cut.safetensors",
        "cut.safetensors: model.norm.weight ends at byte 16 of the data, and there are only 10; "
        "the file is truncated",
    ),
    "a folder without weights": (
        lambda: Path("empty").mkdir(),
        f"{ONE} empty",
        "empty: has no safetensors file and no model.safetensors.index.json",
    ),
    "a folder with two models": (
        _two_in_a_folder,
        f"{ONE} both",
        "both: has 2 safetensors files and no model.safetensors.index.json to say which belong "
        "together; name one file",
    ),
    "an index whose shard is not there": (
        _index_without_shard,
        f"{ONE} sharded",
        "sharded/model-00001-of-00001.safetensors: no such file",
    ),
    "a model that is a pipe": (
        lambda: os.mkfifo("pipe.safetensors"),
        f"{ONE} pipe.safetensors",
        "pipe.safetensors: is not an ordinary file",
    ),
    "another shape": (
        _model("wide", _resized),
        f"{ONE} wide.safetensors",
        "model.layers.0.norm.weight: base is 48 F32, wide is 49 F32; "
        'set on_mismatch = "base" to keep the base\'s',
    ),
    "weights in place of integers": (
        _model("floating", _retyped),
        f"{ONE} floating.safetensors",
        "model.position_ids: base is 8 I64, floating is 8 F32; "
        'set on_mismatch = "base" to keep the base\'s',
    ),
    "a tensor missing": (
        _model("lean", lambda arrays: arrays.pop("model.layers.0.norm.weight")),
        f"{ONE} lean.safetensors",
        "model.layers.0.norm.weight: not in lean; "
        'set on_missing = "base" to count its change there as zero',
    ),
    "a tensor too many": (
        _model("fat", lambda arrays: arrays.update(extra=np.ones(3, np.float32))),
        f"{ONE} fat.safetensors",
        'extra: in fat, not in the base; set on_extra = "drop" to leave it out',
    ),
    "another model altogether": (
        _model("gpt", _other_names),
        f"{ONE} gpt.safetensors",
        "7 tensors do not fit together:\n"
        + "\n".join(
            [
                f'  {name}: not in gpt; set on_missing = "base" to count its change there as zero'
                for name, values in sorted(base_arrays().items())
                if values.dtype == np.float32
            ]
            + [
                f'  h.{number}.w: in gpt, not in the base; set on_extra = "drop" to leave it out'
                for number in range(4)
            ]
        ),
    ),
    "a recipe that is not there": (
        _nothing,
        "recipe.toml",
        "recipe.toml: no such file",
    ),
    "a recipe that is not text": (
        _broken("recipe.toml", b"\xff\xfe\x00"),
        "recipe.toml",
        "recipe.toml: a recipe must be text in UTF-8, and byte 0 is not",
    ),
    "a recipe among the models": (
        _broken("recipe.toml", MODELS.encode()),
        f"{ONE} math.safetensors recipe.toml",
        f"recipe.toml: the header claims {int.from_bytes(MODELS[:8].encode(), 'little')} bytes, "
        "more than the 100000000 that safetensors allows; this is not a safetensors file",
    ),
    "an output in place of a recipe that is not there": (
        _nothing,
        "merged.safetensors",
        "merged.safetensors: no such file",
    ),
    "a manifest of something else": (
        _merged_with_manifest(name="my-app"),
        "plan merged.safetensors",
        "merged.safetensors.manifest.json: is not the manifest of a merge",
    ),
    "a manifest without digests": (
        _merged_with_manifest(
            format=FORMAT, mask=MASK_VERSION, method="linear", stages=[{}], recipe={}
        ),
        "plan merged.safetensors",
        "merged.safetensors.manifest.json: the manifest is damaged: it has no 'base'",
    ),
    "a manifest of a later version": (
        _merged_with_manifest(recipe={}, format=9, versions={"dare": "7.0"}),
        "plan merged.safetensors",
        (
            "merged.safetensors.manifest.json: its format is 9, and this version of "
            f"dare can repeat only {FORMAT}; use the version that wrote it (dare 7.0)"
        ),
    ),
    "a recipe to write where there is one": (
        _broken("recipe.toml", MODELS.encode()),
        "init -b base.safetensors -m math.safetensors",
        "recipe.toml: exists already; choose another path, or add --overwrite",
    ),
    "a recipe to write where something else is": (
        _broken("notes.txt", b"years of work"),
        "init -b base.safetensors -m math.safetensors --to notes.txt --overwrite",
        (
            "notes.txt: was not made by dare (it does not begin like the recipe that would be "
            "written there), so it is not replaced; remove it yourself, or choose another path"
        ),
    ),
    "a recipe to write below a file": (
        _nothing,
        "init -b base.safetensors -m math.safetensors --to base.safetensors/mine.toml",
        "base.safetensors/mine.toml: cannot be written: File exists",
    ),
}


@pytest.mark.parametrize("mistake", FILES)
def test_a_wrong_file_is_refused_with_one_message(mistake, folder):
    prepare, line, message = FILES[mistake]
    prepare()
    before = contents(folder)
    assert_refused(dare(*shlex.split(line)), message)
    assert contents(folder) == before


# ---------------------------------------------------------------- at the output

OUTPUTS = {
    "no output": (
        _nothing,
        "",
        "output is missing: add --output PATH, or output = PATH in the recipe",
    ),
    "an output that is a model": (
        _nothing,
        "-o math.safetensors",
        "math.safetensors: the output would overwrite the input math.safetensors; "
        "choose another output",
    ),
    "an output that is a model, even if it may be replaced": (
        _nothing,
        "-o math.safetensors --overwrite",
        "math.safetensors: the output would overwrite the input math.safetensors; "
        "choose another output",
    ),
    "an output that is a model by another name": (
        lambda: os.link("math.safetensors", "alias.safetensors"),
        "-o alias.safetensors --overwrite",
        "alias.safetensors: the output would overwrite the input math.safetensors; "
        "choose another output",
    ),
    "an output that exists": (
        _nothing,
        "-o german.safetensors",
        (
            "german.safetensors: exists already; choose another output, or add --overwrite to "
            f"replace it:\n  dare {shlex.join(TWO)} -o german.safetensors --overwrite"
        ),
    ),
    "a folder as output that is not dare's": (
        _two_in_a_folder,
        "-o both --overwrite",
        "both: was not made by dare (it has no dare-manifest.json), so it is not replaced; "
        "remove it yourself, or choose another output",
    ),
    "an output without a name": (
        _nothing,
        "-o /",
        "/: is not a name for an output; add a name",
    ),
}


@pytest.mark.parametrize("mistake", OUTPUTS)
def test_a_wrong_output_is_refused_before_anything_is_shown_or_written(mistake, folder):
    prepare, flags, message = OUTPUTS[mistake]
    prepare()
    before = contents(folder)
    assert_refused(dare(*TWO, *shlex.split(flags)), message)
    assert contents(folder) == before


# ---------------------------------------------------------------- at verification

UNVERIFIABLE = {
    "a model that dare did not make": (
        "math.safetensors",
        "math.safetensors: was not made by dare; its header has no manifest",
    ),
    "nothing under that name": ("merged.safetensors", "merged.safetensors: no such file"),
    "a folder without weights": (
        "empty",
        "empty: has no safetensors file and no model.safetensors.index.json",
    ),
    "a model that was cut off": (
        "cut.safetensors",
        "cut.safetensors: model.norm.weight ends at byte 16 of the data, and there are only 10; "
        "the file is truncated",
    ),
}


@pytest.mark.parametrize("mistake", UNVERIFIABLE)
def test_what_cannot_be_verified_is_among_the_findings(mistake, folder):
    _cut()
    (folder / "empty").mkdir()
    path, message = UNVERIFIABLE[mistake]
    shown = f"Cannot be verified  {path}\n    {message}\n"
    assert dare("verify", path) == Outcome(FAILED, shown, "")
    assert_refused(dare("verify", path, "-q"), message)
    (verification,) = dare("verify", path, "--json").json
    assert (verification["ok"], verification["problems"]) == (False, [message])


# ---------------------------------------------------------------- disk and permissions

Usage = namedtuple("Usage", "total used free")


def test_a_disk_that_is_too_small_is_noticed_before_the_merge(folder, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: Usage(10**9, 10**9 - 1000, 1000))
    outcome = dare(*TWO, *TO, "--quiet")
    assert_refused(
        outcome,
        "merged.safetensors: needs 13.3 kB more and the disk has 1.0 kB free; "
        "make room or choose another place, then run the merge again",
    )
    assert not Path("merged.safetensors").exists()


def test_a_disk_that_fills_up_leaves_what_the_same_command_goes_on_with(folder, monkeypatch):
    dare_succeeds(*TWO, "--output", "whole.safetensors", "--quiet")
    real_write, writes = os.pwrite, []

    def write(file_descriptor: int, data: memoryview, position: int) -> int:
        writes.append(position)
        if len(writes) > 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real_write(file_descriptor, data, position)

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", write)
        outcome = dare(*TWO, *TO, "--quiet", "--threads", "1")
    assert_refused(
        outcome,
        "merged.safetensors.partial/merged.safetensors: the disk is full; "
        "make room and run the same merge again; it resumes",
    )
    assert not Path("merged.safetensors").exists()
    report = dare_succeeds(*TWO, *TO, "--quiet", "--json", "--threads", "1").json
    assert report["resumed_chunks"] > 0
    whole, resumed = Path("whole.safetensors"), Path("merged.safetensors")
    assert resumed.read_bytes() == whole.read_bytes()


@pytest.fixture
def permissions_apply(folder: Path) -> Iterator[None]:
    """Be somebody whom permissions apply to from now on; root is not."""
    for path in (folder, *folder.iterdir()):
        path.chmod(0o755)
    closed = folder / "closed"
    closed.mkdir()
    closed.chmod(0o555)
    dare_succeeds("plan", *TWO)  # what is imported late must be imported by somebody who may
    (folder / "german.safetensors").chmod(0)
    was_root = os.geteuid() == 0
    if was_root:
        os.seteuid(65534)
    yield
    if was_root:
        os.seteuid(0)


@pytest.mark.usefixtures("permissions_apply")
def test_an_output_in_a_folder_that_may_not_be_written_is_refused(folder):
    assert_refused(
        dare(*TWO, "-o", "closed/merged.safetensors", "--quiet"),
        "closed/merged.safetensors.partial: cannot be written: Permission denied",
    )
    assert os.listdir("closed") == []


@pytest.mark.usefixtures("permissions_apply")
def test_a_model_that_may_not_be_read_is_refused(folder):
    assert_refused(
        dare("plan", "-b", "base.safetensors", "-m", "german.safetensors"),
        "german.safetensors: cannot be opened: Permission denied",
    )


def test_an_output_in_a_folder_that_is_a_file_is_refused(folder):
    before = contents(folder)
    assert_refused(
        dare(*TWO, "-o", "german.safetensors/merged.safetensors", "--quiet"),
        "german.safetensors/merged.safetensors.partial: cannot be written: Not a directory",
    )
    assert contents(folder) == before


# ---------------------------------------------------------------- while merging


def test_integers_that_differ_are_refused_with_the_way_out(folder):
    arrays = tuned_arrays(base_arrays(), 5)
    arrays["model.position_ids"] = arrays["model.position_ids"] + 1
    save(folder / "shifted.safetensors", arrays)
    line = ("-b", "base.safetensors", "-m", "shifted.safetensors", *TO, "--quiet")
    assert_refused(
        dare(*line),
        "model.position_ids: the I64 values of shifted differ from the base's and cannot be "
        'merged; set on_integer_mismatch = "base" to keep the base\'s',
    )
    assert not Path("merged.safetensors").exists()
    dare_succeeds(*line, "--on-integer-mismatch", "base")


@pytest.mark.parametrize("mistake", ["integers that differ", "too small a disk"])
def test_a_merge_that_cannot_go_on_leaves_nothing_behind(mistake, folder, monkeypatch):
    arrays = tuned_arrays(base_arrays(), 5)
    if mistake == "integers that differ":
        arrays["model.position_ids"] = arrays["model.position_ids"] + 1
    else:
        monkeypatch.setattr(shutil, "disk_usage", lambda _path: Usage(10**9, 10**9, 0))
    save(folder / "tuned.safetensors", arrays)
    before = contents(folder)
    assert dare("-b", "base.safetensors", "-m", "tuned.safetensors", *TO, "--quiet").status == 1
    assert contents(folder) == before


def test_an_input_that_is_not_what_the_manifest_says_is_refused(folder):
    dare_succeeds(*TWO, *TO, "--quiet")
    shutil.copy("german.safetensors", "math.safetensors")
    outcome = dare("merged.safetensors", "--output", "again.safetensors", "--quiet")
    digest = outcome.err.partition("digest ")[2].partition(",")[0]
    manifest = json.loads(Path("merged.safetensors.manifest.json").read_bytes())
    expected = manifest["models"][0]["digest"]
    assert len(digest) == len(expected)
    assert digest != expected
    assert_refused(
        outcome,
        "math.safetensors: is not what it was when the manifest was written "
        f"(digest {digest}, then {expected}); to merge it all the same, write the recipe out with "
        "`dare init --config` and take input_digests out of it",
    )
    assert not Path("again.safetensors").exists()

    dare_succeeds("init", "--config", "merged.safetensors")
    lines = Path("recipe.toml").read_text().splitlines(keepends=True)
    kept = [line for line in lines if not line.startswith("input_digests = ")]
    assert len(kept) == len(lines) - 1
    Path("recipe.toml").write_text("".join(kept))
    dare_succeeds("recipe.toml", "--output", "again.safetensors", "--quiet")


# ---------------------------------------------------------------- --json and --debug

FAILURES = {
    "usage": ("--quiet", "UsageError", WRONG_USAGE),
    "an unknown flag": (f"{MERGE_TWO} --frob", "UnknownOptionError", WRONG_USAGE),
    "a header": (f"{ONE} cut.safetensors", "HeaderError", FAILED),
}


@pytest.mark.parametrize("kind", FAILURES)
def test_with_json_a_failure_is_one_document_on_stdout(kind, folder):
    _cut()
    line, name, status = FAILURES[kind]
    outcome = dare(*shlex.split(line), "--json")
    message = outcome.err.splitlines()[-1].removeprefix("dare: ")
    assert outcome.status == status
    assert outcome.json == {"error": {"type": name, "message": message}}


def test_with_debug_the_traceback_comes_before_the_message(folder):
    outcome = dare("plan", *TWO, "--drop-rate", "1", "--debug")
    lines = outcome.err.splitlines()
    assert (outcome.status, outcome.out) == (FAILED, "")
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[-1].startswith("dare: command line: [dare] drop_rate = 1 would drop every change")
    assert lines[-2] == lines[-1].replace("dare: ", "dare.errors.RecipeError: ", 1)
