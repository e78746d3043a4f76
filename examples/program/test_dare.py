"""Make dummy models, merge them in Python and by the command, and check every value.

uv run python test_dare.py
"""

from __future__ import annotations

import contextlib
import io
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from dare import DareConfig, DareMerger, DareWarning, verify

HERE = Path(__file__).parent
RATE = 0.9
SHAPES = {"embed.weight": (200, 96), "layer.0.weight": (128, 128), "layer.1.bias": (500,)}

Arrays = dict[str, np.ndarray]


def make_models(folder: Path) -> None:
    """Write a base and two fine-tunes of it, whose changes stay below 0.002."""
    generator = np.random.default_rng(0)
    base: Arrays = {
        name: np.float32(0.02) * generator.standard_normal(shape, np.float32)
        for name, shape in SHAPES.items()
    }
    ids = {"position_ids": np.arange(64)}
    save_file(base | ids, folder / "base.safetensors")
    for name in ("math", "code"):
        tuned = {
            tensor: values + generator.uniform(-0.0019, 0.0019, values.shape).astype(np.float32)
            for tensor, values in base.items()
        }
        save_file(tuned | ids, folder / f"{name}.safetensors")


def load(folder: Path, name: str) -> Arrays:
    """The weights of a model, in one row each."""
    arrays = load_file(folder / f"{name}.safetensors")
    return {tensor: arrays[tensor].ravel() for tensor in SHAPES}


def merge(folder: Path, models: list[str], output: str, rate: float) -> None:
    """Merge in Python, silently; a warning would be an error."""
    merger = DareMerger(
        base_file=folder / "base.safetensors",
        merge_files=[folder / f"{name}.safetensors" for name in models],
        config=DareConfig(drop_rate=rate, verbose=False),
    )
    merger.merge(folder / f"{output}.safetensors")


def check_one_model(folder: Path) -> None:
    """Of one model's changes a tenth is kept, and that tenth is ten times as large."""
    merge(folder, ["math"], "one", RATE)
    base, math, merged = (load(folder, name) for name in ("base", "math", "one"))
    kept = elements = 0
    for tensor in SHAPES:
        delta = math[tensor] - base[tensor]
        changed = merged[tensor] != base[tensor]
        expected = base[tensor] + delta * np.float32(1 / (1 - RATE))
        np.testing.assert_array_max_ulp(merged[tensor][changed], expected[changed], maxulp=1)
        kept += int(changed.sum())
        elements += changed.size
    dropped = 1 - kept / elements
    assert abs(dropped - RATE) < 4 * (RATE * (1 - RATE) / elements) ** 0.5, dropped
    print(f"  {dropped:.2%} of {elements:,} changes were dropped, {RATE:.0%} were asked for")
    print(f"  the {kept:,} that were kept are 1 / (1 - {RATE}) times as large")
    print("  where a change was dropped, the base's value stands, bit for bit")


def check_two_models(folder: Path) -> None:
    """Every value is the base's and half of the kept changes, each model with its own mask."""
    merge(folder, ["math", "code"], "two", RATE)
    base, math, code, merged = (load(folder, name) for name in ("base", "math", "code", "two"))
    factor = np.float32(1 / (1 - RATE))
    counts = np.zeros(4, int)
    for tensor in SHAPES:
        first, second = (
            (model[tensor] - base[tensor]) * factor / np.float32(2) for model in (math, code)
        )
        possible = [base[tensor] + change for change in (0 * first, first, second, first + second)]
        nearest = np.abs(np.array(possible) - merged[tensor])
        assert nearest.min(axis=0).max() < 1e-8
        counts += np.bincount(nearest.argmin(axis=0), minlength=4)
    elements = counts.sum()
    keep = 1 - RATE
    expected = np.array([RATE * RATE, keep * RATE, RATE * keep, keep * keep])
    assert (np.abs(counts / elements - expected) < 4 * (expected / elements) ** 0.5).all()
    neither, only_math, only_code, both = counts / elements
    print(f"  each of {elements:,} values has the change of one model, of both, or of neither:")
    print(f"  neither {neither:.1%}, math {only_math:.1%}, code {only_code:.1%}, both {both:.1%}")


def check_nothing_dropped(folder: Path) -> None:
    """At a drop rate of 0 the merge is the mean of the models."""
    merge(folder, ["math", "code"], "all", 0.0)
    math, code, merged = (load(folder, name) for name in ("math", "code", "all"))
    for tensor in SHAPES:
        np.testing.assert_allclose(
            merged[tensor], (math[tensor] + code[tensor]) / 2, rtol=0, atol=1e-8
        )
    print("  at a drop rate of 0 the merge is the mean of the models")


def check_command(folder: Path) -> None:
    """The command writes the same bytes as Python, and says nothing if told so."""
    files = [str(folder / f"{name}.safetensors") for name in ("base", "math", "code", "by_command")]
    base, math, code, output = files
    done = subprocess.run(  # noqa: S603
        [sys.executable, "dare.py", "-b", base, "-m", math, code, "-o", output, "--quiet"],
        cwd=HERE,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", ""), done.stderr
    assert Path(output).read_bytes() == (folder / "two.safetensors").read_bytes()
    print("  the command and Python write the same bytes")
    assert verify(output).ok
    print("  the output is what its manifest says")


def check_the_rest(folder: Path) -> None:
    """What is not merged is kept; large changes are warned of."""
    merged = load_file(folder / "two.safetensors")
    assert (merged["position_ids"] == np.arange(64)).all()
    print("  integers are the base's")
    merger = DareMerger(
        base_file=folder / "base.safetensors",
        merge_files=[folder / "math.safetensors"],
        config=DareConfig(delta_threshold=0.001),
    )
    report = io.StringIO()
    with warnings.catch_warnings(record=True) as caught, contextlib.redirect_stdout(report):
        warnings.simplefilter("always", DareWarning)
        merger.merge(folder / "warned.safetensors")
    assert "90.0" in report.getvalue()
    assert any("exceeds 0.001" in str(warning.message) for warning in caught)
    print("  changes above delta_threshold are warned of")


def main() -> None:
    """Run every check."""
    checks = [
        check_one_model,
        check_two_models,
        check_nothing_dropped,
        check_command,
        check_the_rest,
    ]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_models(folder)
        for check in checks:
            print(check.__doc__)
            check(folder)
    print(f"All {len(checks)} checks passed.")


if __name__ == "__main__":
    main()
