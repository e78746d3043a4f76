"""No stage's result depends on threads, on how files are cut, or on how much memory there is.

Every registered stage is merged with, at its defaults and some also otherwise: a combine stage by
itself, a delta stage before `linear`, a refine stage after it. The models have odd tensors and one
of more than a chunk; for matrix stages it has few columns, so that they are quick.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import dare
from dare.inputs.gathered import write_gathered
from dare.stages import STAGES
from helpers import method_of, save, save_shards

LARGEST = "layers.2.weight"
SHAPES = {
    LARGEST: (12801, 41),  # 524,841 elements: a chunk and a bit, its border inside of a row
    "layers.0.a.weight": (33, 17),
    "layers.0.b.weight": (17, 33),
    "layers.1.conv.weight": (3, 5, 7),
    "layers.1.flat.weight": (1, 9),
    "layers.1.norm.weight": (101,),
    "layers.1.one.weight": (1,),
    "layers.1.none.weight": (0, 4),
    "scale": (),
}
MATRIX = (8300, 64)
"""In place of the largest, for matrix stages; enough for BLAS to use two threads."""
NAMES = ("base", "math", "code", "chat")
METHODS = [method_of(name) for name, stage in STAGES.items() if stage.models != 0]
MATRIX_METHODS = [m for m in METHODS if any(STAGES[s].sees == "matrix" for s in m.split("+"))]

"""Of 300 steps one is like the other."""
VARIANTS = [
    ("trim+linear", {"trim": {"scope": "model"}}),
    ("dare+linear", {"dare": {"rescale": "l1"}}),
    ("della+linear", {"della": {"rescale": "l1"}}),
    ("breadcrumbs+linear", {"breadcrumbs": {"per": "row"}}),
    ("nuslerp", {"nuslerp": {"each": "row"}}),
    ("model_stock", {"model_stock": {"each": "row"}}),
    ("sce", {"sce": {"select_ratio": 0.3}}),
    ("iso", {"iso": {"variant": "cts"}}),
]
"""Stages that survey more, or otherwise, than at their defaults."""


def write_models(folder, shapes):
    """Save the models, each as one file and as three."""
    generator = np.random.default_rng(0)
    base = {n: np.asarray(generator.standard_normal(s), np.float32) for n, s in shapes.items()}
    for name in NAMES:
        change = 0.0 if name == "base" else np.float32(0.01)
        tensors = {
            n: np.asarray(value + change * generator.standard_normal(value.shape), np.float32)
            for n, value in base.items()
        }
        save(folder / f"{name}.safetensors", tensors)
        save_shards(folder / name, tensors, 3)
    grams = {
        f"gram/{model}/{name}": generator.standard_normal(shape[1] * (shape[1] + 1) // 2)
        for model in NAMES[1:]
        for name, shape in shapes.items()
        if len(shape) == 2
    }
    tensors = {name: np.asarray(values, np.float32) ** 2 for name, values in grams.items()}
    write_gathered(folder / "gathered.safetensors", tensors, rows=dict.fromkeys(NAMES, 1))
    return folder


@pytest.fixture(scope="module")
def chunks(tmp_path_factory):
    return write_models(tmp_path_factory.mktemp("chunks"), SHAPES)


@pytest.fixture(scope="module")
def matrices(tmp_path_factory):
    return write_models(tmp_path_factory.mktemp("matrices"), {**SHAPES, LARGEST: MATRIX})


def recipe(folder, method, stages, output, *, sharded=False, **settings):
    stage = STAGES[method.partition("+")[0]]
    files = [folder / (name if sharded else f"{name}.safetensors") for name in NAMES]
    given = {
        "base": files[0],
        "models": files[1 : 1 + (stage.models or len(NAMES))],
        "output": output,
        "method": method,
        "stages": stages,
        "threads": 1,
        "verbose": False,
        **({"gathered": folder / "gathered.safetensors"} if stage.takes_grams else {}),
        **settings,
    }
    return dare.Request.of(**given)


def merged_bytes(made):
    dare.merge(made)
    output = Path(made.recipe.output)
    files = sorted(output.glob("*.safetensors")) if output.is_dir() else [output]
    assert (len(files) > 1) == (made.recipe.shard_size is not None)
    return {name: value.tobytes() for file in files for name, value in load_file(file).items()}


def least_memory(made):
    """What one thread needs, and no byte to remember anything in."""
    plan = dare.plan(made)
    return plan.cost.least_memory


@pytest.mark.parametrize(("method", "stages"), [*((method, {}) for method in METHODS), *VARIANTS])
def test_the_same_bytes_however_it_is_run(chunks, matrices, tmp_path, method, stages):
    folder = matrices if method in MATRIX_METHODS else chunks
    first = merged_bytes(recipe(folder, method, stages, tmp_path / "first.safetensors"))
    assert first.keys() == SHAPES.keys()
    assert first[LARGEST] != load_file(folder / "base.safetensors")[LARGEST].tobytes()

    least = least_memory(recipe(folder, method, stages, tmp_path / "none.safetensors"))
    others = {
        "two threads": {"threads": 2},
        "five threads": {"threads": 5},
        "the reference": {"backend": "reference", "threads": 2},
        "inputs of three files": {"sharded": True, "threads": 2},
        "an output of several files": {"shard_size": "16KiB"},
        "as little memory as there must be": {"max_memory": least},
    }
    for place, (what, settings) in enumerate(others.items()):
        name = f"{place}" if "shard_size" in settings else f"{place}.safetensors"
        found = merged_bytes(recipe(folder, method, stages, tmp_path / name, **settings))
        differing = [tensor for tensor in first if found[tensor] != first[tensor]]
        assert differing == [], what


def test_matrix_stages_are_told_from_the_others():
    assert "della+linear" in METHODS
    combine = {"tsv", "iso", "knots", "swudi", "dc_merge", "regmean"}
    assert {"star+linear", "fourier+linear", *combine, "linear+svc"} == set(MATRIX_METHODS)


# ---------------------------------------------------------------- BLAS and memory, in processes

MERGE = """
import json, sys
import dare

for document in json.loads(sys.argv[1]):
    plan = dare.plan(document)
    dare.merge(plan)
with open("/proc/self/status") as file:  # getrusage would begin with what the tests have taken
    (peak,) = (line.split()[1] for line in file if line.startswith("VmHWM:"))
print(json.dumps([plan.cost.peak_memory, int(peak) * 1024]))
"""


def run_merges(recipes, blas_threads):
    """Merge in a process of its own; return the forecast of the last plan and the peak memory."""
    documents = [made.to_tables() for made in recipes]
    names = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
    finished = subprocess.run(
        [sys.executable, "-c", MERGE, json.dumps(documents, default=str)],
        env={**os.environ, **dict.fromkeys(names, str(blas_threads))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    return json.loads(finished.stdout.splitlines()[-1])


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak from /proc")
def test_threads_of_blas_change_matrix_stages_by_rounding_only(matrices, tmp_path):
    found = {}
    for threads in (1, 2):
        outputs = {m: tmp_path / f"{m}-{threads}.safetensors" for m in MATRIX_METHODS}
        run_merges([recipe(matrices, m, {}, path) for m, path in outputs.items()], threads)
        found[threads] = {m: load_file(path) for m, path in outputs.items()}
    base = load_file(matrices / "base.safetensors")
    for method in MATRIX_METHODS:
        for name in (n for n in SHAPES if 0 not in SHAPES[n]):
            one, two = (found[t][method][name].astype(np.float64) for t in (1, 2))
            change = np.linalg.norm(one - base[name])
            rounding = 2.0**-24 * np.linalg.norm(base[name])  # of the base, in float32
            assert np.linalg.norm(one - two) <= 1e-5 * change + rounding, (method, name)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak from /proc")
def test_peak_memory_of_a_matrix_stage_stays_within_the_forecast(tmp_path):
    generator = np.random.default_rng(1)
    files = []
    for name in NAMES[:3]:
        tensors = {
            f"layers.{i}.weight": generator.standard_normal((600, 4000), np.float32)
            for i in range(3)
        }
        files.append(save(tmp_path / f"{name}.safetensors", tensors))
    given = {
        "base": files[0],
        "models": files[1:],
        "output": tmp_path / "out.safetensors",
        "method": "iso",
        "threads": 1,
        "verbose": False,
    }
    made = dare.Request.of(**given, max_memory=least_memory(dare.Request.of(**given)))
    forecast, peak = run_merges([made], 1)
    assert peak <= forecast
