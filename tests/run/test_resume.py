"""A merge that was killed goes on, and ends with the same bytes."""

import os
import random
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

import dare
from dare import OutputError
from dare.kernels import DEVICES, Device
from dare.output.targets import JOURNAL_NAME
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
    expected = sha256(recipe.recipe.output)
    recipe.recipe.output.unlink()
    (folder / "recipe.toml").write_text(recipe.to_toml())
    return recipe, expected, folder


def partial(recipe):
    return recipe.recipe.output.with_name(recipe.recipe.output.name + ".partial")


def finished_chunks(recipe):
    try:
        return (partial(recipe) / JOURNAL_NAME).read_bytes().count(b'"tensor"')
    except FileNotFoundError:
        return 0


def start(folder):
    code = "import dare, sys; dare.merge(dare.load_recipe(sys.argv[1]))"
    return subprocess.Popen([sys.executable, "-c", code, folder / "recipe.toml"])


@pytest.mark.parametrize("seed", range(5))
def test_killed_at_any_moment_it_resumes_to_the_same_bytes(given, seed):
    recipe, expected, folder = given
    recipe.recipe.output.unlink(missing_ok=True)
    generator = random.Random(seed)
    wait_for = generator.randrange(CHUNKS)
    process = start(folder)
    while process.poll() is None and finished_chunks(recipe) < wait_for:
        time.sleep(0.0005)
    time.sleep(generator.random() * 0.02)
    process.send_signal(signal.SIGKILL)
    killed = process.wait() == -signal.SIGKILL
    assert recipe.recipe.output.exists() != killed  # the name appears at the end, not before
    done_before = finished_chunks(recipe)
    if killed:
        report = dare.merge(recipe)
        assert report.resumed_chunks <= done_before
    assert sha256(recipe.recipe.output) == expected
    assert not partial(recipe).exists()
    assert dare.verify(recipe.recipe.output).ok


def interrupted(recipe, monkeypatch, after):
    """Run a merge that fails after some chunks, as a disk would."""
    from dare.output.sink import FileSink

    count = 0
    real = FileSink.write

    def failing(self, name, offset, data):
        nonlocal count
        count += 1
        if count > after:
            raise OutputError("the disk is full (injected)")
        real(self, name, offset, data)

    with monkeypatch.context() as patch:
        patch.setattr(FileSink, "write", failing)
        patch.setitem(DEVICES, "cpu", Device("core", chunks_at_once=1))
        with pytest.raises(OutputError, match="injected"):
            dare.merge(recipe)


def test_a_chunk_that_rotted_is_made_again(given, monkeypatch):
    recipe, expected, _ = given
    recipe.recipe.output.unlink(missing_ok=True)
    interrupted(recipe, monkeypatch, after=20)
    weights = partial(recipe) / recipe.recipe.output.name
    size = weights.stat().st_size
    with weights.open("r+b") as file:
        file.seek(4096)
        file.write(bytes(size - 4096))
    assert dare.merge(recipe).resumed_chunks == 0
    assert sha256(recipe.recipe.output) == expected


def test_ctrl_c_leaves_a_partial_that_resumes(given):
    recipe, expected, folder = given
    recipe.recipe.output.unlink(missing_ok=True)
    process = start(folder)
    while process.poll() is None and finished_chunks(recipe) < 3:
        time.sleep(0.0005)
    process.send_signal(signal.SIGINT)
    if process.wait() != 0:
        assert partial(recipe).exists()
        assert not recipe.recipe.output.exists()
        assert dare.merge(recipe).resumed_chunks > 0
    assert sha256(recipe.recipe.output) == expected


# ---------------------------------------------------------------- the same inputs, or others


@pytest.fixture
def halfway(tmp_path, monkeypatch):
    """A merge that was stopped halfway, and what it should give."""
    generator = np.random.default_rng(4)
    base = {f"w{n}": generator.standard_normal(600_000).astype(np.float32) for n in range(4)}
    model = {name: value + np.float32(0.01) for name, value in base.items()}
    recipe = write_recipe(tmp_path, base, [model])
    interrupted(recipe, monkeypatch, after=4)
    return recipe, base, model


def put_in_place_of(file, arrays):
    """Replace a file by another of the same size and time."""
    status = file.stat()
    other = save(file.with_name("other.safetensors"), arrays)
    assert other.stat().st_size == status.st_size
    os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))
    other.replace(file)
    assert file.stat().st_mtime_ns == status.st_mtime_ns


def expected_bytes(recipe, folder):
    other = recipe.changed(output=folder / "expected.safetensors")
    dare.merge(other)
    return sha256(other.recipe.output)


def test_an_input_swapped_with_equal_size_and_time_is_not_mixed_in(halfway, tmp_path):
    recipe, _, model = halfway
    changed = {**model, "w0": model["w0"] + np.float32(1)}
    put_in_place_of(recipe.recipe.models[0].file, changed)
    report = dare.merge(recipe)
    assert report.resumed_chunks == 2  # of w1; w0 is another now
    assert sha256(recipe.recipe.output) == expected_bytes(recipe, tmp_path)


def test_a_survey_of_another_input_is_not_mixed_in(tmp_path, monkeypatch):
    generator = np.random.default_rng(5)
    base = {"w": np.zeros(1_200_000, np.float32)}
    model = {"w": generator.standard_normal(1_200_000).astype(np.float32)}
    recipe = write_recipe(tmp_path, base, [model], method="trim+linear", threads=1)
    interrupted(recipe, monkeypatch, after=1)
    changed = model["w"].copy()
    changed[-1000:] = 100  # in a chunk that was not merged, but was surveyed
    put_in_place_of(recipe.recipe.models[0].file, {"w": changed})
    assert dare.merge(recipe).resumed_chunks == 0
    assert sha256(recipe.recipe.output) == expected_bytes(recipe, tmp_path)


def test_a_merge_is_resumed_where_files_have_other_inodes_and_times(halfway, tmp_path):
    recipe, base, model = halfway
    expected = expected_bytes(recipe, tmp_path)
    for file, arrays in ((recipe.recipe.base, base), (recipe.recipe.models[0].file, model)):
        file.unlink()
        save(file, arrays)
    assert dare.merge(recipe).resumed_chunks == 4
    assert sha256(recipe.recipe.output) == expected


def test_another_version_of_the_program_starts_over(halfway, monkeypatch):
    recipe, _, _ = halfway
    monkeypatch.setattr("dare.planning.data.__version__", "0.0.9")
    report = dare.merge(recipe)
    assert report.resumed_chunks == 0
    assert any("version of dare" in n.text for n in report.warnings)


def test_a_changed_configuration_of_an_adapters_base_starts_over(tmp_path, monkeypatch):
    weights = {"c_attn.weight": np.ones((600, 600), np.float32), "z": np.ones(9, np.float32)}
    base = save(tmp_path / "base" / "model.safetensors", weights).parent
    (base / "config.json").write_text('{"model_type": "llama"}')
    generator = np.random.default_rng(6)
    factors = {"A": (4, 600), "B": (600, 4)}
    adapter = save(
        tmp_path / "adapter" / "adapter_model.safetensors",
        {
            f"base_model.model.c_attn.lora_{letter}.weight": generator.random(shape, np.float32)
            for letter, shape in factors.items()
        },
    ).parent
    (adapter / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 4, "lora_alpha": 4}')
    recipe = dare.Request.of(
        base=base, models=[adapter], output=tmp_path / "out", verbose=False, threads=1
    )
    interrupted(recipe, monkeypatch, after=1)
    (base / "config.json").write_text('{"model_type": "gpt2"}')  # whose layers are transposed
    assert dare.merge(recipe).resumed_chunks == 0
    fresh = recipe.changed(output=tmp_path / "fresh")
    dare.merge(fresh)
    assert sha256(fresh.recipe.output / "model.safetensors") == sha256(
        recipe.recipe.output / "model.safetensors"
    )
