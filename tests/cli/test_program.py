"""The original program: what its README shows works as it stands, with real files.

The command lines, the configuration and the Python examples below are copied from that README
without a change. They run in a copy of `examples/program`, two of the lines through bash and uv.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from calling import Outcome, dare, recipe_of
from safetensors.numpy import load_file

from dare import verify
from helpers import save, sha256

EXAMPLE = Path(__file__).parents[2] / "examples" / "program"
VENV = Path(sys.executable).parents[1]

MERGE_CONFIG = """\
[dare]
drop_rate = 0.9
delta_threshold = 0.002
verbose = true

[models]
base_file = "models/base_model.safetensors"
merge_files = [
    "models/math_tuned_model.safetensors",
    "models/code_tuned_model.safetensors"
]
output_file = "merged_model.safetensors"
"""

BY_CONFIG = """\
uv run python dare.py --config merge_config.toml
"""

BASIC_MERGE = """\
# Basic merge
uv run python dare.py \\
  --base models/base_model.safetensors \\
  --merge models/math_model.safetensors models/code_model.safetensors \\
  --output merged_model.safetensors
"""

CUSTOM_PARAMETERS = """\
# With custom parameters
uv run python dare.py \\
  --base base.safetensors \\
  --merge math.safetensors code.safetensors \\
  --drop-rate 0.95 \\
  --delta-threshold 0.001 \\
  --verbose \\
  --output super_merged.safetensors
"""

OVERRIDE = """\
# Use config file but override specific settings
uv run python dare.py \\
  --config merge_config.toml \\
  --drop-rate 0.99 \\
  --quiet
"""

TESTS = """\
uv run python test_dare.py
"""

PYTHON_API = """\
from dare import DareMerger, DareConfig

# Configure DARE parameters
config = DareConfig(
    drop_rate=0.9,          # Drop 90% of delta parameters
    delta_threshold=0.002,  # Warning threshold for large deltas
    verbose=True            # Enable progress logging
)

# Create merger
merger = DareMerger(
    base_file='base_model.safetensors',
    merge_files=['math_model.safetensors', 'code_model.safetensors'],
    config=config
)

# Execute merge
merger.merge('merged_model.safetensors')
"""

ADVANCED_CONFIGURATION = """\
# Custom configuration
config = DareConfig(
    drop_rate=0.95,         # More aggressive dropping
    delta_threshold=0.001,  # Stricter delta warnings
    verbose=False           # Silent operation
)
"""

pytestmark = pytest.mark.skipif(shutil.which("uv", path=VENV / "bin") is None, reason="needs uv")


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """A copy of the example, with models at every path the README names."""
    folder = tmp_path / "program"
    shutil.copytree(EXAMPLE, folder, ignore=shutil.ignore_patterns("__pycache__"))
    generator = np.random.default_rng(0)
    base = {
        "model.layers.0.mlp.weight": 0.02 * generator.standard_normal((96, 64), np.float32),
        "lm_head.weight": 0.02 * generator.standard_normal((50, 64), np.float32),
    }
    tuned = {
        name: {
            tensor: values + generator.uniform(-0.0015, 0.0015, values.shape).astype(np.float32)
            for tensor, values in base.items()
        }
        for name in ("math", "code")
    }
    for place in (folder, folder / "models"):
        for name in ("base", "base_model"):
            save(place / f"{name}.safetensors", base)
        for task, arrays in tuned.items():
            for name in (task, f"{task}_model", f"{task}_tuned_model"):
                save(place / f"{name}.safetensors", arrays)
    return folder


def run(line: str, folder: Path) -> Outcome:
    """Run a line as it stands; where uv looks is said by the environment alone."""
    surroundings = {
        "PATH": f"{VENV / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "HOME": str(folder),
        "VIRTUAL_ENV": str(VENV),
        "UV_OFFLINE": "1",
        "LANG": "C.UTF-8",
    }
    command = ["bash", "-c", line]
    done = subprocess.run(
        command, cwd=folder, env=surroundings, capture_output=True, text=True, check=False
    )
    return Outcome(done.returncode, done.stdout, done.stderr)


def call(line: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Outcome:
    """What `run` does, in this process: bash, uv and dare.py only pass the arguments on."""
    monkeypatch.chdir(folder)
    words = shlex.split(line.replace("\\\n", " "), comments=True)
    assert words[:4] == ["uv", "run", "python", "dare.py"]
    return dare(*words[4:])


def drop_rates(output: Path) -> list[float]:
    """What was asked for and what came out, from the manifest."""
    report = json.loads(Path(f"{output}.manifest.json").read_bytes())["report"]
    asked = {model["drop_rate_asked"] for model in report["models"]}
    realised = [model["drop_rate_realised"] for model in report["models"]]
    assert len(asked) == 1
    (rate,) = asked
    tolerance = 4 * (rate * (1 - rate) / report["models"][0]["elements"]) ** 0.5
    assert all(abs(found - rate) < tolerance for found in realised)
    return [rate, *realised]


def test_a_merge_by_the_readmes_configuration_is_that_by_its_flags(program, monkeypatch):
    assert (program / "merge_config.toml").read_text() == MERGE_CONFIG
    done = run(BY_CONFIG, program)
    output = program / "merged_model.safetensors"
    assert (done.status, done.err) == (0, "")
    assert verify(output).ok
    assert drop_rates(output)[0] == 0.9
    assert "Merged 2 tensors" in done.out
    assert "exceeds" not in done.out
    assert "models/math_tuned_model.safetensors" in done.out
    merged = sha256(output)
    output.unlink()
    done = call(BASIC_MERGE, program, monkeypatch)
    assert (done.status, done.err, sha256(output)) == (0, "", merged)


def test_custom_parameters_are_used_and_large_deltas_warned_of(program, monkeypatch):
    done = call(CUSTOM_PARAMETERS, program, monkeypatch)
    output = program / "super_merged.safetensors"
    assert (done.status, done.err) == (0, "")
    assert verify(output).ok
    assert drop_rates(output)[0] == 0.95
    assert recipe_of(output)["delta_threshold"] == 0.001
    base, math = (load_file(program / f"{name}.safetensors") for name in ("base", "math"))
    deltas = np.concatenate([(math[name] - base[name]).ravel() for name in base])
    over = int((np.abs(deltas) > np.float32(0.001)).sum())
    assert f"|δ| exceeds 0.001 in {over:,} of {deltas.size:,}" in " ".join(done.out.split())


def test_flags_override_the_configuration_and_quiet_prints_nothing(program, monkeypatch):
    done = call(OVERRIDE, program, monkeypatch)
    output = program / "merged_model.safetensors"
    assert done == Outcome(0, "", "")
    assert verify(output).ok
    assert drop_rates(output)[0] == 0.99
    assert recipe_of(output)["dare"] == {"drop_rate": 0.99}
    assert recipe_of(output)["verbose"] is False
    assert "delta_threshold" not in recipe_of(output)  # 0.002 is the default


def test_the_test_suite_passes_and_says_what_it_checked(program):
    done = run(TESTS, program)
    assert done.status == 0, done.err
    assert "90% were asked for" in done.out
    assert "the command and Python write the same bytes" in done.out
    assert done.out.endswith("All 5 checks passed.\n")
    assert not list(program.glob("*.partial"))


def test_the_python_example_merges(program, monkeypatch, capsys):
    monkeypatch.chdir(program)
    exec(PYTHON_API, {})
    assert drop_rates(Path("merged_model.safetensors"))[0] == 0.9
    assert verify("merged_model.safetensors").ok
    shown = capsys.readouterr()
    assert re.search(r"math_model +0\.5 +9\d\.", shown.out)
    assert "Wrote merged_model.safetensors" in shown.out
    assert shown.err == ""


def test_the_advanced_configuration_is_silent_and_stricter(program, monkeypatch, capsys):
    before, _, after = PYTHON_API.partition("# Configure DARE parameters")
    _, creates, after = after.partition("# Create merger")
    monkeypatch.chdir(program)
    exec(f"{before}{ADVANCED_CONFIGURATION}\n{creates}{after}", {})
    assert capsys.readouterr() == ("", "")
    output = Path("merged_model.safetensors")
    assert drop_rates(output)[0] == 0.95
    assert recipe_of(output)["delta_threshold"] == 0.001
    warnings = json.loads(Path(f"{output}.manifest.json").read_bytes())["report"]["warnings"]
    assert {notice["code"] for notice in warnings} == {"large_deltas"}


def test_import_dare_beside_dare_py_finds_the_package(program):
    done = run('uv run python -c "import dare; print(dare.DareMerger.__module__)"', program)
    assert done == Outcome(0, "dare.compat\n", "")


def test_its_help_lists_the_original_options(program, monkeypatch):
    done = call("uv run python dare.py merge -h", program, monkeypatch)
    assert done.status == 0
    files = ("--config --recipe -c", "--base -b", "--merge -m", "--output -o")
    settings = ("--drop-rate", "--delta-threshold", "--verbose -v", "--quiet -q")
    assert [option for option in (*files, *settings) if option not in done.out] == []
