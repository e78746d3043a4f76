"""Merges on GPUs, with this machine in their place; `make test-gpu` asks a real one."""

from unittest.mock import Mock

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from safetensors.torch import save_file as save_tensors

import cuda_on_host
import dare
from cuda_on_host import last_gpu
from dare.errors import DareError, RecipeError
from dare.kernels import cuda
from dare.output.memory import OnDevice
from dare.recipe.options import RunOptions
from dare.recipe.recipe import Request
from helpers import sha256

pytestmark = pytest.mark.usefixtures("gpu_on_host")

METHODS = {
    "dare+linear": {"drop_rate": 0.7},
    "dare+ties": {"drop_rate": 0.5, "weight": [1.0, -0.5, 0.25]},
    "trim+ties": {"keep_ratio": 0.3},
    "trim+sum": {"keep_ratio": 0.3, "scope": "model"},
    "darex+sum": {"drop_rate": 0.9},
    "breadcrumbs+ties": {},
    "della+ties": {},
    "consensus": {},
    "karcher": {},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder, rng = tmp_path_factory.mktemp("models"), np.random.default_rng(7)
    base = {
        "wide": rng.normal(0, 1, (700, 801)).astype(np.float16),
        "square": rng.normal(0, 1, (64, 64)).astype(np.float32),
        "empty": np.empty((0, 4), np.float32),
        "scalar": np.float32(0.5),
        "row": rng.normal(0, 1, 130).astype(np.float32),
        "steps": np.arange(6),
    }
    files = [folder / f"{name}.safetensors" for name in ("base", "a", "b", "c")]
    save_file({name: np.asarray(array) for name, array in base.items()}, files[0])
    for file in files[1:]:
        changed = {name: np.asarray(array).copy() for name, array in base.items()}
        for array in changed.values():
            if array.dtype.kind == "f":
                array[...] += rng.normal(0, 0.01, array.shape).astype(array.dtype)
        save_file(changed, file)
    return files


def recipe(models, output, method, **settings):
    base, *tuned = models
    how = {"method": method, "output": output, "verbose": False, "threads": 2}
    return {"base": base, "models": tuned, **how, **METHODS.get(method, {}), **settings}


@pytest.mark.parametrize("method", METHODS)
def test_the_bytes_and_the_report_are_those_of_the_processor(models, tmp_path, method):
    reports = [
        dare.merge(**recipe(models, tmp_path / f"{place}.safetensors", method, device=device))
        for place, device in enumerate(("cpu", "cuda", last_gpu()))
    ]
    assert len({sha256(report.output) for report in reports}) == 1
    assert reports[0].tensors == reports[1].tensors == reports[2].tensors
    assert reports[0].models == reports[1].models == reports[2].models


class StoppedError(Exception):
    pass


@pytest.mark.parametrize("devices", [("cuda", "cpu"), ("cpu", "cuda")])
def test_what_one_device_began_another_ends(models, tmp_path, devices):
    settings = recipe(models, tmp_path / "m.safetensors", "dare+ties", threads=1)
    settings["max_memory"] = dare.plan(**settings, device="cuda").cost.least_memory

    def stop_late(done, total):
        if done > 0.9 * total:
            raise StoppedError

    with pytest.raises(StoppedError):
        dare.merge(**settings, device=devices[0], progress=stop_late)
    report = dare.merge(**settings, device=devices[1])
    assert report.resumed_chunks > 0
    fresh = recipe(models, tmp_path / "fresh.safetensors", "dare+ties")
    assert report.digests == dare.merge(**fresh).digests


@pytest.mark.parametrize("device", ["cuda", "auto"])
def test_candidates_lie_on_a_gpu(models, tmp_path, device):
    base, *tuned = models
    there, here = (
        dare.Candidates(Request.of(base=base, models=tuned, method="dare+ties", device=name))
        for name in (device, "cpu")
    )
    assert there.options.device == f"{device}:0"
    assert here.options.device == "cpu"
    for changed in ({}, {"drop_rate": 0.2, "scale": 0.5}, {"method": "linear"}):
        made, expected = there.make(changed), here.make(changed)
        assert made.digest == expected.digest
        for name, array in made.arrays.items():
            np.testing.assert_array_equal(array, expected.arrays[name])


class OnFirstGpu(torch.Tensor):
    """A tensor that says it is on a GPU, as the machine plays one."""

    device = torch.device("cuda:0")


def on_gpu(tensor):
    return tensor.cuda() if cuda_on_host.IS_REAL else tensor.as_subclass(OnFirstGpu)


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("method", ["dare+ties", "trim+ties", "karcher", "della+ties"])
def test_candidates_stay_on_the_gpu_of_a_live_model(models, method, wide, monkeypatch):
    """What the GPU merges does not come back, and a wider type is made there."""
    if not cuda_on_host.IS_REAL:
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _: Mock(torch.cuda.Stream))
    base, *tuned = models
    held = dare.Candidates(Request.of(base=base, models=tuned, method=method, device="cuda"))
    expected = held.make()
    kinds = {n: torch.float64 if wide and n != "steps" else None for n in expected.arrays}
    live = {
        name: on_gpu(torch.zeros_like(torch.from_numpy(array), dtype=kinds[name]))
        for name, array in expected.arrays.items()
    }
    sent, send = [], cuda.Kernels.send
    monkeypatch.delattr(OnDevice, "write")

    def sending(kernels, raw, place):
        sent.append(raw.nbytes)
        send(kernels, raw, place)

    monkeypatch.setattr(cuda.Kernels, "send", sending)
    assert held.write_into(live) == expected.digest
    for name, tensor in live.items():
        np.testing.assert_array_equal(torch.Tensor.cpu(tensor).numpy(), expected.arrays[name])
    few = sum(expected.arrays[name].nbytes for name in ("steps", "scalar"))
    assert (sum(sent) == few) == (method in {"dare+ties", "trim+ties"})


@cuda_on_host.on_host_only
def test_without_a_gpu_auto_is_the_processor(models, monkeypatch):
    monkeypatch.setattr(cuda_on_host.Device, "get_all_devices", list)
    settings = recipe(models, None, "linear", device="auto")
    assert dare.Candidates(settings).options.device == "cpu"
    with pytest.raises(RecipeError, match=r"cuda.*no GPU"):
        dare.plan(**settings | {"device": "cuda"})


@cuda_on_host.on_host_only
def test_auto_leaves_half_of_the_memory_to_others(models, monkeypatch):
    base, *tuned = models
    nbytes = sum(file.stat().st_size for file in models)
    for most, auto in ((0.5, "cpu"), (1.5, "cpu"), (2.5, "auto:0")):
        monkeypatch.setattr(cuda_on_host.Device, "most_bytes", int(most * 0.9 * nbytes))
        request = Request.of(base=base, models=tuned, method="linear")
        assert dare.Candidates(request).options.device == auto
        if most < 1:
            with pytest.raises(DareError, match=r"free.*device = cpu"):
                dare.Candidates(Request.of(base=base, models=tuned, device="cuda"))


@pytest.mark.parametrize(("method", "count"), [("dare+ties", 0), ("della+ties", 5)])
def test_the_plan_says_what_the_processor_merges(models, method, count):
    settings = recipe(models, None, method)
    for device in ("cuda", "cpu"):
        notes = dare.plan(**settings, device=device).notes
        told = [note.text for note in notes if note.code == "not_on_gpu"]
        assert len(told) == (device == "cuda" and count > 0)
        assert not told or f"{count} of" in told[0]


def test_the_limit_for_gpus_holds(models, monkeypatch):
    settings = recipe(models, None, "linear", device="cuda", threads=3)
    usual, small = dare.plan(**settings), dare.plan(**settings, max_gpu_memory="20MiB")
    assert small.cost.gpu_bytes <= 20 << 20 < usual.cost.gpu_bytes
    assert dare.plan(**settings | {"device": "cpu"}).cost.gpu_bytes == 0
    with pytest.raises(RecipeError, match=r"max_gpu_memory = 1\.0 kB:.*at least 20"):
        dare.plan(**settings, max_gpu_memory=1000)
    sizes, room = [], cuda._Worker.room
    monkeypatch.setattr(cuda._Worker, "room", lambda *a: (sizes.append(a[1]), room(*a))[1])
    dare.merge(**settings | {"output": models[0].parent / "m.safetensors"}, max_gpu_memory="20MiB")
    assert max(sizes) < 20 << 20


def test_the_earlier_name_of_the_option_is_known(models):
    assert RunOptions(backend="reference").device == "reference"
    with pytest.raises(RecipeError, match="backend and device: mean the same"):
        dare.plan(**recipe(models, None, "linear", backend="cpu", device="cuda"))
    assert dare.plan(**recipe(models, None, "linear", backend="reference")).device == "reference"


@pytest.mark.parametrize("kind", ["float32", "float16", "bfloat16", "float64"])
@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("trim+ties", {"keep_ratio": 0.01}),
        ("trim+ties", {"keep_ratio": 0.999}),
        ("breadcrumbs+sum", {"keep_middle": 0.6}),
    ],
)
def test_cuts_are_found_where_the_models_are(kind, method, settings, tmp_path, monkeypatch):
    """Of tensors with few changes, with tiny ones, with many equal ones, and with a NaN."""
    rng, elements = np.random.default_rng(3), np.arange(90_300)
    usual = rng.normal(0, 0.02, elements.size)
    changes = {
        "few": lambda: np.where(elements % 37, 0, 1e-3),
        "tiny": lambda: np.finfo(np.float32).smallest_subnormal * (elements % 2000),
        "odd": lambda: np.where(elements == 77, np.nan, 0.5),
        "usual": lambda: usual + rng.normal(0, 0.001, elements.size),
    }
    files = [tmp_path / f"{name}.safetensors" for name in ("base", "a", "b", "c")]
    for file in files:
        made = {name: change() for name, change in changes.items()}
        if file == files[0]:
            made = dict.fromkeys(made, np.zeros(elements.size)) | {"usual": usual}
        dtype = getattr(torch, kind)
        save_tensors({name: torch.tensor(array).to(dtype) for name, array in made.items()}, file)
    asked, find = [], cuda.Kernels.find_cuts
    monkeypatch.setattr(cuda.Kernels, "find_cuts", lambda *a: (asked.extend(a[1]), find(*a))[1])
    how = {"stages": {method.partition("+")[0]: settings}, "allow_not_finite": True}
    digests = set()
    for device in ("cpu", last_gpu()):
        request = Request.of(base=files[0], models=files[1:], method=method, device=device, **how)
        digests.add(dare.Candidates(request).make().digest)
    assert len(digests) == 1
    assert len(asked) >= len(changes) * len(files[1:])
