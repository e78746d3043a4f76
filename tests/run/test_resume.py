"""A merge that was killed goes on, and ends with the bytes of the inputs that there are now."""

import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from small_merges import stopping

import dare
from dare.kernels import DEVICES, Device
from dare.output.targets import JOURNAL_NAME, partial_folder
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
    (folder / "recipe.toml").write_text(recipe.to_toml())
    return recipe, expected, folder


def finished_chunks(recipe):
    try:
        journal = partial_folder(recipe.recipe.output) / JOURNAL_NAME
        return journal.read_bytes().count(b'"tensor"')
    except FileNotFoundError:
        return 0


@pytest.mark.parametrize(
    ("sent", "chunks"),
    [(signal.SIGKILL, 0), (signal.SIGKILL, 11), (signal.SIGKILL, 45), (signal.SIGINT, 3)],
)
def test_killed_at_any_moment_it_resumes_to_the_same_bytes(given, sent, chunks):
    recipe, expected, folder = given
    recipe.recipe.output.unlink(missing_ok=True)
    code = "import dare, sys; dare.merge(dare.load_recipe(sys.argv[1]))"
    process = subprocess.Popen([sys.executable, "-c", code, folder / "recipe.toml"])
    while process.poll() is None and finished_chunks(recipe) < chunks:
        time.sleep(0.0005)
    process.send_signal(sent)
    was_stopped = process.wait() != 0
    assert recipe.recipe.output.exists() != was_stopped  # the name appears at the end
    done_before = finished_chunks(recipe)
    if was_stopped:
        report = dare.merge(recipe)
        assert min(chunks, 1) <= report.resumed_chunks <= done_before
    assert sha256(recipe.recipe.output) == expected
    assert not partial_folder(recipe.recipe.output).exists()
    assert dare.verify(recipe.recipe.output).ok


# ---------------------------------------------------------------- the same inputs, or others


def stop(recipe, after):
    """Run a merge that stops after so many chunks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(DEVICES, "auto", Device("core", chunks_at_once=1))
        with stopping(after):
            dare.merge(recipe)


def put_in_place_of(file, arrays):
    """Replace a file by another of the same size and time."""
    status = file.stat()
    other = save(file.with_name("other.safetensors"), arrays)
    assert other.stat().st_size == status.st_size
    os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))
    other.replace(file)
    assert file.stat().st_mtime_ns == status.st_mtime_ns


def swap(recipe, _base, model):
    """Another model of the same size and time: other elements in the last chunk of w0."""
    changed = model["w0"].copy()
    changed[-1000:] = 100
    put_in_place_of(recipe.recipe.models[0].file, {**model, "w0": changed})


def copy(recipe, base, model):
    """The same models, in files that are others."""
    for file, arrays in ((recipe.recipe.base, base), (recipe.recipe.models[0].file, model)):
        file.unlink()
        save(file, arrays)


@pytest.mark.parametrize(
    ("change", "method", "resumed"),
    [
        (copy, "dare+linear", 4),
        (swap, "dare+linear", 3),
        (copy, "trim+linear", 4),
        (swap, "trim+linear", 2),  # a chunk that has not changed was made of a survey that has
        (None, "dare+linear", 0),  # another version of the program
    ],
)
def test_chunks_of_the_same_inputs_count(tmp_path, monkeypatch, change, method, resumed):
    generator = np.random.default_rng(4)
    base = {f"w{n}": generator.standard_normal(600_000).astype(np.float32) for n in range(4)}
    model = {name: value + np.float32(0.01) for name, value in base.items()}
    recipe = write_recipe(tmp_path, base, [model], method=method)
    stop(recipe, after=4)
    if change is None:
        monkeypatch.setattr("dare.planning.data.__version__", "0.0.9")
    else:
        change(recipe, base, model)
    assert dare.merge(recipe).resumed_chunks == resumed
    other = recipe.changed(output=tmp_path / "expected.safetensors")
    dare.merge(other)
    assert sha256(recipe.recipe.output) == sha256(other.recipe.output)


def test_a_changed_configuration_of_an_adapters_base_starts_over(tmp_path):
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
    stop(recipe, after=1)
    (base / "config.json").write_text('{"model_type": "gpt2"}')  # whose layers are transposed
    assert dare.merge(recipe).resumed_chunks == 0
    fresh = recipe.changed(output=tmp_path / "fresh")
    dare.merge(fresh)
    outputs = [request.recipe.output / "model.safetensors" for request in (recipe, fresh)]
    assert sha256(outputs[0]) == sha256(outputs[1])
