"""What a user gets when something is wrong: the kind of error, its subject, and its remedy.

Every case is a mistake somebody makes. Each ends with the right status and one message, which has
the words that stand here, and leaves the folder as it was. How it is worded is not tested.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from calling import TO, TWO, base_arrays, contents, dare, dare_succeeds, tuned_arrays

from dare import RecipeError, load_recipe
from dare.cli import FAILED, WRONG_USAGE
from dare.output.receipt import FORMAT
from dare.output.targets import seal
from dare.tensors.mask import MASK_VERSION
from helpers import entry, file_bytes, save

MODELS = """
[models]
base_file = "base.safetensors"
merge_files = ["math.safetensors", "code.safetensors"]
output_file = "merged.safetensors"
"""


def assert_refused(line: str, kind: str, *words: str, status: int = FAILED) -> None:
    """Call the command; it must say these words and nothing else, and change nothing."""
    before = contents(Path())
    outcome = dare(*shlex.split(line))
    assert (outcome.status, outcome.out) == (status, "")
    assert outcome.err.startswith("dare: ")
    assert [word for word in words if word not in outcome.err] == [], outcome.err
    debugged = dare(*shlex.split(line), "--debug").err
    assert debugged.startswith("Traceback (most recent call last):")
    assert f"{kind}: " in debugged
    assert contents(Path()) == before


A_MODEL = '"math.safetensors"'
RULE = "[[tensors]]\nmatch = '*.mlp.*'\n"
RECIPES: dict[str, tuple[str, ...]] = {
    "metod = 'ties'": ("metod: ", "'method'"),
    "drop_rate = 0.9": ("drop_rate: ", "[dare]"),
    "dare = 3": ("dare: ", "[dare]"),
    "[dare]\ndrop_rat = 0.9": ("[dare] drop_rat: ", "'drop_rate'"),
    "[models]\nbase_fil = 'b'": ("[models] base_fil: ", "'base_file'"),
    "method = 'ties'\n[ties]\nkeep = 0.2": ("[ties] keep: ", "keep_ratio", "weighted"),
    "method = 'dare+tie'": ("'dare+tie'", "'ties'", "--stage FILE"),
    "method = 'ties+dare'": ("'ties+dare'", "'dare+linear'"),
    "[ties]\nkeep_ratio = 0.2": ("[ties]", "dare, linear"),
    "[dare]\ndrop_rate = 1": ("[dare] drop_rate = 1 ", "0.9"),
    "[dare]\ndrop_rate = 90": ("[dare] drop_rate = 90.0: ", "below 1"),
    "[dare]\ndrop_rate = '0.9'": ("[dare] drop_rate = '0.9': ",),
    "embedding_drop_rate = 1": ("embedding_drop_rate = 1 ", "0.9"),
    "method = 'linear'\nembedding_drop_rate = 0.5": ("embedding_drop_rate", "'linear'"),
    "dtype = 'int8'": ("dtype int8: ", "BF16", "F8_E5M2"),
    "base = 'b'\nmodels = 3": ("models: ", '["math.safetensors"'),
    MODELS.replace('"base.safetensors"', "3"): ("base = 3: ", "path"),
    MODELS.replace('"math.safetensors", "code.safetensors"', ""): ("no models",),
    MODELS.replace('["math.safetensors", "code.safetensors"]', "3"): ("merge_files: ", '["math.s'),
    MODELS.replace(A_MODEL, "3"): ("[models] merge_files, number 1: ", "path"),
    MODELS.replace(A_MODEL, "{ drop_rate = 0.5 }"): ("[models] merge_files, number 1: ", "file"),
    MODELS.replace(A_MODEL, "{ file = 'm', drop_rat = 0.5 }"): ("1: drop_rat: ", "'drop_rate'"),
    MODELS.replace(A_MODEL, "{ file = 'm', weight = 'half' }"): ("number 1: weight = 'half': ",),
    "method = 'slerp'" + MODELS.replace(A_MODEL, "{ file = 'm', weight = 0.7 }"): ("m: ", "t, on"),
    "method = 'slerp'" + MODELS.replace(A_MODEL, "'x', 'y'"): ("slerp", " 3 ", "karcher"),
    "tensors = [3]": ("[[tensors]], number 1: ", "table"),
    RULE + "drop_rat = 0.5": ("[[tensors]], number 1: drop_rat: ", "'drop_rate'"),
    RULE + "drop_rate = -0.5": ("'*.mlp.*': drop_rate = -0.5: ", "at least 0"),
    RULE + "drop_rate = 0\n[[tensors]]\ndrop_rate = 0": ("number 2: ", "match = ", "contains = "),
    "[dare": ("TOML",),
    "seed = 1.5": ("seed = 1.5: ",),
}


def whole(text: str) -> str:
    """A recipe of two models with a mistake in it."""
    return text if "[models]" in text or "models =" in text else text + MODELS


@pytest.mark.parametrize("text", RECIPES)
def test_a_wrong_recipe(text, tmp_path, monkeypatch):
    (tmp_path / "recipe.toml").write_text(whole(text))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RecipeError) as caught:
        load_recipe("recipe.toml")
    message = str(caught.value)
    assert message.startswith("recipe.toml: ")
    assert "\n" not in message
    assert [word for word in RECIPES[text] if word not in message] == [], message


@pytest.mark.parametrize("text", ["metod = 'ties'", "dare = 3", "base = 'b'\nmodels = 3"])
@pytest.mark.parametrize(("flags", "says"), [("", ""), (" --drop-rate 0.5", " with flags")])
def test_a_wrong_recipe_on_the_command_line(text, flags, says, folder):
    (folder / "recipe.toml").write_text(whole(text))
    assert_refused(f"recipe.toml{flags}", "RecipeError", f"recipe.toml{says}: ", *RECIPES[text])


MERGE_TWO = shlex.join([*TWO, *TO])
USAGE: dict[str, tuple[str, ...]] = {
    f"{MERGE_TWO} --verbose --quiet": ("UsageError", "--verbose", "--quiet"),
    "one.toml --config two.toml": ("UsageError", "one.toml", "two.toml"),
    "--base base.safetensors": ("UsageError", "--models missing", "--output", "--config"),
    "-m math.safetensors -o merged.safetensors": ("UsageError", "--base missing", "--config"),
    "--quiet": ("UsageError", "--base and --models missing", "--config"),
    "verify": ("UsageError", "verify"),
    f"{MERGE_TWO} --wait -1 --dry-run": ("UsageError", "--wait -1", "0 or more"),
    f"{MERGE_TWO} --wait nan": ("UsageError", "--wait nan", "0 or more"),
    f"{MERGE_TWO} --drop-rat 0.5": ("UnknownOptionError", "--drop-rat", "`dare merge --help`"),
    "methods ties a 'c d'": ("UnusedCliTokensError", ": a 'c d'", "`dare methods --help`"),
    "base.safetensors '' code.safetensors -o x": ("UsageError", "empty", "variable"),
    "-b '' -m math.safetensors -o x": ("UsageError", "empty", "variable"),
    "base.safetensors math.safetensors --output=": ("UsageError", "empty", "variable"),
    "verify ''": ("UsageError", "empty", "variable"),
    "lora math.safetensors -o x": ("UnknownCommandError", "math.safetensors", "./lora"),
    "plan math.safetensors -o x": ("UsageError", "math.safetensors", "./plan"),
    "mrege recipe.toml": ("UnknownCommandError", "mrege", "`dare --help`"),
    f"plan {MERGE_TWO} --weight a b": ("CoercionError", "--weight", "`dare plan --help`"),
}
FLAGS: dict[str, tuple[str, ...]] = {
    f"{MERGE_TWO} --weight 0.5": ("--weight: 1 ", "2 models"),
    f"{MERGE_TWO} --drop-rate 0.5 0.6 0.7": ("--drop-rate: 3 ", "2 models"),
    f"{MERGE_TWO} --method slerp --t 0.5 0.6": ("--t: ", "slerp", "one value"),
    f"{MERGE_TWO} --drop-rate 1": ("[dare] drop_rate = 1 ", "0.9"),
    f"{MERGE_TWO} --keep-ratio 0.5": ("--keep-ratio", "--drop-rate, --rescale"),
    f"{MERGE_TWO} --method linear --drop-rate 0.5": ("--drop-rate", "'linear'"),
    f"{MERGE_TWO} --tensors '*.mlp.*'": ("--tensors '*.mlp.*': ", "'*.mlp.*: drop_rate=0.5'"),
    f"{MERGE_TWO} --tensors '*.mlp.*: match=x'": ("--tensors '*.mlp.*: match=x'",),
    f"{MERGE_TWO} --tensors '*.mlp.*: drop_rat=0.5'": ("number 1: drop_rat: ", "'drop_rate'"),
    f"{MERGE_TWO} --max-memory lots": ("max_memory = 'lots': ", "'1GiB'"),
    f"{MERGE_TWO} --max-memory 1k": ("max_memory = 1.0 kB: ", "22.025 MB"),
    f"{MERGE_TWO} --on-integer-mismatch bas": ("on_integer_mismatch = 'bas': must be", "'base'?"),
    f"{MERGE_TWO} --method nuslerp --each ro": ("each = 'ro': must be", "'row'?"),
    f"{MERGE_TWO} --slice 4/3 --dry-run": ("'4/3'", "NUMBER/OF"),
    f"{MERGE_TWO} --shard-size 5GB": ("shard_size", "merged.safetensors", "folder"),
    f"plan {'x' * 5000} y": ("xxx…: ", "5,000 characters", "shorten"),
    "methods tie": ("tie: ", "'ties'", "dare methods"),
}


@pytest.mark.parametrize("line", [*USAGE, *FLAGS])
def test_a_wrong_command_line(line, folder):
    for name in ("lora", "plan"):  # as a base may be called
        Path(name).mkdir()
    if line in USAGE:
        assert_refused(line, *USAGE[line], status=WRONG_USAGE)
    else:
        assert_refused(line, "RecipeError", *FLAGS[line])


NORM, POSITIONS = "model.layers.0.norm.weight", "model.position_ids"
TUNED = tuned_arrays(base_arrays(), 5)
WRONG_TENSORS: dict[str, dict[str, np.ndarray]] = {
    "wide": {**TUNED, NORM: np.ones(49, np.float32)},
    "real": {**TUNED, POSITIONS: np.arange(8, dtype=np.float32)},
    "shifted": {**TUNED, POSITIONS: 1 + np.arange(8)},
    "lean": {name: values for name, values in TUNED.items() if name != NORM},
    "fat": {**TUNED, "extra": np.ones(3, np.float32)},
    "gpt": {f"h.{n}.w": TUNED[name] for n, name in enumerate(sorted(TUNED))},
    "both/one": TUNED,
    "both/two": TUNED,
}
WRONG_BYTES = {
    "text.safetensors": b"these are my notes on model merging",
    "empty.safetensors": b"",
    "cut.safetensors": file_bytes({"norm": entry("F32", [4], 0, 16)}, b"0123456789"),
    "bytes.toml": b"\xff\xfe\x00",
    "recipe.toml": MODELS.encode(),
    "notes.txt": b"years of work",
    "empty.toml": b"",
}
WRONG_MANIFESTS: dict[str, dict[str, Any]] = {
    "foreign": {"name": "my-app"},
    "bare": {"format": FORMAT, "mask": MASK_VERSION, "method": "linear", "recipe": {}},
    "later": {"recipe": {}, "format": 9, "versions": {"dare": "7.0"}},
}


@pytest.fixture
def mistakes(folder: Path) -> Path:
    """The folder, with everything in it that can be wrong with a file."""
    for name, arrays in WRONG_TENSORS.items():
        save(folder / f"{name}.safetensors", arrays)
    for name, content in WRONG_BYTES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
    for name, document in WRONG_MANIFESTS.items():
        save(folder / f"{name}.safetensors", TUNED)
        (folder / f"{name}.safetensors.manifest.json").write_bytes(seal(document, {}))
    os.link("math.safetensors", "alias.safetensors")
    return folder


BASE = "base.safetensors"
MODEL_FILES: dict[str, tuple[str, ...]] = {
    "maths.safetensors": ("InputError", "maths.safetensors: no such file", "'math.safetensors'?"),
    "math": ("InputError", "math: no such file", "'math.safetensors'?"),
    "text.safetensors": ("HeaderError", "text.safetensors: "),
    "empty.safetensors": ("HeaderError", "empty.safetensors: 0 bytes", "download"),
    "cut.safetensors": ("HeaderError", "cut.safetensors: norm ", "truncated"),
    "both": ("InputError", "both: ", "name one file"),
    "wide.safetensors": ("MismatchError", f"{NORM}: ", "wide is 49", 'on_mismatch = "base"'),
    "real.safetensors": ("MismatchError", f"{POSITIONS}: ", "8 F32", 'on_mismatch = "base"'),
    "lean.safetensors": ("MismatchError", f"{NORM}: ", "lean", 'on_missing = "base"'),
    "fat.safetensors": ("MismatchError", "extra: ", "fat", 'on_extra = "drop"'),
    "gpt.safetensors": ("MismatchError", "gpt: ", "h.0.w", "leave it out"),
}
INIT = f"init -b {BASE} -m math.safetensors"
LINES: dict[str, tuple[str, ...]] = {
    "missing.toml": ("InputError", "missing.toml: no such file"),
    "merged.safetensors": ("InputError", "merged.safetensors: no such file"),
    **{f"verify {name}": ("InputError", f"{name}: no such file") for name in ("m.gguf", "m/n")},
    "verify math": ("InputError", "math: no such file", "'math.safetensors'?"),
    "empty.toml": ("RecipeError", "empty.toml: is empty", "dare init"),
    "bytes.toml": ("InputError", "bytes.toml: ", "UTF-8", "byte 0"),
    "plan foreign.safetensors": ("InputError", "foreign.safetensors.manifest.json: "),
    "plan bare.safetensors": ("InputError", "bare.safetensors.manifest.json: ", "'base'"),
    "plan later.safetensors": ("InputError", "later.safetensors.manifest", f" {FORMAT};", "7.0"),
    INIT: ("OutputError", "recipe.toml: exists", "--overwrite"),
    f"{INIT} --to notes.txt --overwrite": ("OutputError", "notes.txt: ", "another path"),
    f"{INIT} --to {BASE}/mine.toml": ("OutputError", f"{BASE}/mine.toml: "),
}
OUTPUTS: dict[str, tuple[str, ...]] = {
    "": ("RecipeError", "output", "--output PATH"),
    "-o math.safetensors": ("OutputError", "math.safetensors: ", "another output"),
    "-o math.safetensors --overwrite": ("OutputError", "math.safetensors: ", "another output"),
    "-o alias.safetensors --overwrite": ("OutputError", "alias.safetensors: ", "math.safetensors"),
    "-o german.safetensors": ("ExistsError", "exists", "--output ", "\n  dare ", " --overwrite"),
    "-o both --overwrite": ("OutputError", "both: ", "dare-manifest.json"),
    "-o /": ("OutputError", "/: ", "name"),
}
FILES = {
    **{f"plan -b {BASE} -m {name}": said for name, said in MODEL_FILES.items()},
    **LINES,
    **{f"{shlex.join(TWO)} {flags}": said for flags, said in OUTPUTS.items()},
}


@pytest.mark.parametrize("line", FILES)
def test_a_wrong_file(line, mistakes):
    assert_refused(line, *FILES[line])


@pytest.mark.parametrize("name", ["math", "cut"])
def test_what_cannot_be_verified_is_among_the_findings(name, mistakes):
    path = f"{name}.safetensors"
    (verification,) = dare("verify", path, "--json").json
    (problem,) = verification["problems"]
    text = problem["text"]
    assert problem["code"] == ("not_an_output" if name == "math" else "unreadable")
    assert text.startswith(f"{path}: ")
    outcome = dare("verify", path)
    assert (outcome.status, verification["ok"], text in outcome.out) == (FAILED, False, True)
    assert dare("verify", path, "-q").err == f"dare: {text}\n"


Usage = namedtuple("Usage", "total used free")


def test_a_disk_that_is_too_small_is_noticed_before_the_merge(folder, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: Usage(10**9, 10**9 - 1000, 1000))
    words = "merged.safetensors", "13.3 kB", "1.0 kB", "make room"
    assert_refused(f"{MERGE_TWO} --quiet", "OutputError", *words)


@pytest.fixture
def permissions_apply(folder: Path) -> Iterator[None]:
    """Be somebody whom permissions apply to from now on; root is not."""
    for path in (folder, *folder.iterdir()):
        path.chmod(0o755)
    (folder / "closed").mkdir(0o555)
    dare_succeeds("plan", *TWO)  # what is imported late must be imported by somebody who may
    (folder / "german.safetensors").chmod(0)
    was_root = os.geteuid() == 0
    if was_root:
        os.seteuid(65534)
    yield
    if was_root:
        os.seteuid(0)


@pytest.mark.usefixtures("permissions_apply")
@pytest.mark.parametrize(
    ("line", "kind", "subject"),
    [
        ("-m math.safetensors -o closed/m.safetensors", "OutputError", "closed/m.safetensors.part"),
        ("-m math.safetensors -o code.safetensors/m", "OutputError", "code.safetensors/m.partial"),
        ("-m german.safetensors -o merged.safetensors", "InputError", "german.safetensors"),
        ("-m math.safetensors -o /dev/null", "OutputError", "/dev/null: is a device"),
        ("-m math.safetensors -o /dev/null --overwrite", "OutputError", "/dev/null: is a device"),
    ],
)
def test_what_may_not_be_written_or_read(line, kind, subject, folder):
    outcome = dare("merge", "-b", "base.safetensors", *shlex.split(line), "--quiet", "--json")
    assert (outcome.status, outcome.json["error"]["type"]) == (FAILED, kind)
    assert outcome.json["error"]["message"].startswith(subject)
    assert os.listdir("closed") == []


def test_integers_that_differ_are_refused_with_the_way_out(mistakes):
    line = f"-b base.safetensors -m shifted.safetensors {shlex.join(TO)} --quiet"
    words = f"{POSITIONS}: ", "I64", "shifted", 'on_integer_mismatch = "base"'
    assert_refused(line, "MismatchError", *words)
    dare_succeeds(*shlex.split(line), "--on-integer-mismatch", "base")


def test_an_input_that_is_not_what_the_manifest_says_is_refused(folder):
    dare_succeeds(*TWO, *TO, "--quiet")
    expected = json.loads(Path("merged.safetensors.manifest.json").read_bytes())["models"][0]
    shutil.copy("german.safetensors", "math.safetensors")
    words = "math.safetensors: ", f"{expected['digest']} then", "`dare init --config`"
    outcome = dare("merged.safetensors", "-o", "again.safetensors", "--quiet")
    assert [word for word in words if word not in outcome.err] == []
    assert (outcome.status, Path("again.safetensors").exists()) == (FAILED, False)
