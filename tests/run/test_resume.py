"""A merge that was killed goes on, and ends with the same bytes."""

import random
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

import dare
from dare import InputError, OutputError
from dare.output.writer import JOURNAL_NAME
from helpers import save, sha256, write_recipe

CHUNKS = 48


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """A recipe of 48 chunks, and the SHA-256 it leads to."""
    folder = tmp_path_factory.mktemp("resume")
    generator = np.random.default_rng(0)
    base = {f"w{n}": generator.standard_normal((8, 1 << 20), np.float32) for n in range(3)}
    model = {name: value + np.float32(0.001) for name, value in base.items()}
    recipe = write_recipe(folder, base, [model], threads=2)
    dare.merge(recipe)
    expected = sha256(recipe.output)
    recipe.output.unlink()
    (folder / "recipe.toml").write_text(recipe.to_toml())
    return recipe, expected, folder


def partial(recipe):
    return recipe.output.with_name(recipe.output.name + ".partial")


def journal_lines(recipe):
    try:
        return (partial(recipe) / JOURNAL_NAME).read_bytes().count(b"\n")
    except FileNotFoundError:
        return 0


def start(folder):
    code = "import dare, sys; dare.merge(dare.load_recipe(sys.argv[1]))"
    return subprocess.Popen([sys.executable, "-c", code, folder / "recipe.toml"])


@pytest.mark.parametrize("seed", range(5))
def test_killed_at_any_moment_it_resumes_to_the_same_bytes(given, seed):
    recipe, expected, folder = given
    recipe.output.unlink(missing_ok=True)
    generator = random.Random(seed)
    wait_for = generator.randrange(CHUNKS)
    process = start(folder)
    while process.poll() is None and journal_lines(recipe) < wait_for:
        time.sleep(0.0005)
    time.sleep(generator.random() * 0.02)
    process.send_signal(signal.SIGKILL)
    killed = process.wait() == -signal.SIGKILL
    assert recipe.output.exists() != killed  # the name appears at the end, not before
    done_before = journal_lines(recipe) - 1
    if killed:
        report = dare.merge(recipe)
        assert report.resumed_chunks <= max(done_before, 0)
    assert sha256(recipe.output) == expected
    assert not partial(recipe).exists()
    assert dare.verify(recipe.output).ok


def interrupted(recipe, monkeypatch, after):
    """Run a merge that fails after some chunks, as a disk would."""
    from dare.output.writer import PartialOutput

    count = 0
    real = PartialOutput.write

    def failing(self, name, offset, data):
        nonlocal count
        count += 1
        if count > after:
            raise OutputError("the disk is full (injected)")
        real(self, name, offset, data)

    with monkeypatch.context() as patch:
        patch.setattr(PartialOutput, "write", failing)
        with pytest.raises(OutputError, match="injected"):
            dare.merge(recipe)


def test_after_an_error_the_partial_is_kept_and_used(given, monkeypatch):
    recipe, expected, _ = given
    recipe.output.unlink(missing_ok=True)
    interrupted(recipe, monkeypatch, after=20)
    assert not recipe.output.exists()
    assert partial(recipe).exists()
    report = dare.merge(recipe)
    assert 0 < report.resumed_chunks < CHUNKS
    assert sha256(recipe.output) == expected


def test_a_chunk_that_rotted_is_made_again(given, monkeypatch):
    recipe, expected, _ = given
    recipe.output.unlink(missing_ok=True)
    interrupted(recipe, monkeypatch, after=20)
    weights = partial(recipe) / recipe.output.name
    size = weights.stat().st_size
    with weights.open("r+b") as file:
        file.seek(4096)
        file.write(bytes(size - 4096))
    assert dare.merge(recipe).resumed_chunks == 0
    assert sha256(recipe.output) == expected


def test_resume_can_be_refused(given, monkeypatch):
    recipe, expected, _ = given
    recipe.output.unlink(missing_ok=True)
    interrupted(recipe, monkeypatch, after=20)
    assert dare.merge(recipe, resume=False).resumed_chunks == 0
    assert sha256(recipe.output) == expected


def test_another_recipe_does_not_resume(given, monkeypatch):
    recipe, expected, _ = given
    recipe.output.unlink(missing_ok=True)
    interrupted(recipe, monkeypatch, after=20)
    other = recipe.model_copy(update={"seed": 1, "verbose": True, "delta_threshold": 1.0})
    with pytest.warns(dare.DareWarning, match="left by another merge"):
        assert dare.merge(other).resumed_chunks == 0
    assert sha256(recipe.output) != expected
    recipe.output.unlink()


def test_a_vanished_input_is_a_clear_error_and_the_partial_stays(tmp_path):
    base = {"w": np.zeros(10, np.float32)}
    recipe = write_recipe(tmp_path, base, [base])
    recipe.models[0].file.unlink()
    with pytest.raises(InputError, match=r"model0.safetensors: no such file"):
        dare.merge(recipe)
    assert not recipe.output.exists()


def test_an_input_changed_during_the_interruption_starts_over(given, monkeypatch, tmp_path):
    generator = np.random.default_rng(3)
    base = {"w": generator.standard_normal(3 << 20).astype(np.float32)}
    recipe = write_recipe(tmp_path, base, [{"w": base["w"] + 1}])
    interrupted(recipe, monkeypatch, after=3)
    save(recipe.models[0].file, {"w": base["w"] + 2})
    assert dare.merge(recipe).resumed_chunks == 0


def test_ctrl_c_leaves_a_partial_that_resumes(given):
    recipe, expected, folder = given
    recipe.output.unlink(missing_ok=True)
    process = start(folder)
    while process.poll() is None and journal_lines(recipe) < 3:
        time.sleep(0.0005)
    process.send_signal(signal.SIGINT)
    if process.wait() != 0:
        assert partial(recipe).exists()
        assert not recipe.output.exists()
        assert dare.merge(recipe).resumed_chunks > 0
    assert sha256(recipe.output) == expected
