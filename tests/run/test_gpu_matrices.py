"""Whole matrices on GPUs, with this machine in their place; `make test-gpu` asks a real one."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import cuda_on_host
import cupy_on_host
import dare
from cuda_on_host import last_gpu, on_host_only
from dare.errors import DareError, DareWarning, RecipeError
from dare.kernels import linalg
from dare.lora.extraction import extract_adapter
from dare.recipe.recipe import Request

pytestmark = pytest.mark.usefixtures("matrices_on_host")

METHODS = {
    "tsv": {},
    "iso": {},
    "iso of common and own": {"variant": "cts"},
    "star+sum": {},
    "swudi": {},
    "dc_merge": {"keep_ratio": 0.2, "max_ratio": 3.0},
    "knots": {"keep_ratio": 0.5, "weight": [1.0, -0.5]},
    "fourier+sum": {"radius": 0.3},
    "linear+svc": {},
    "sum+svc": {},
}


CUTS = {"dc_merge", "knots"}  # elements that lie at a cut may be kept here and not there


def matrices(kind, rows, columns, seed):
    """Changes as fine-tunes have them, of few directions, falling, or none."""
    rng = np.random.default_rng(seed)
    if kind == "none":
        return np.zeros((rows, columns), np.float32)
    noise = rng.standard_normal((rows, columns)).astype(np.float32)
    if kind == "noise":
        return noise
    rank = 5 if kind == "few" else min(rows, columns)
    left, _ = np.linalg.qr(noise[:, :rank])
    right, _ = np.linalg.qr(rng.standard_normal((columns, rank)))
    values = np.linspace(2, 1, rank) if kind == "few" else np.geomspace(1, 1e-3, rank)
    return (left * values @ right.T).astype(np.float32)


SMALL = [("noise", 30, 20), ("falling", 20, 30), ("none", 20, 30)]
CASES = [(method, kind) for method in METHODS for kind in SMALL] + [
    ("tsv", ("noise", 384, 400)),
    ("star+sum", ("noise", 400, 384)),
    ("iso", ("noise", 384, 384)),
    ("iso", ("few", 520, 1100)),  # of more than one chunk
    ("knots", ("noise", 384, 390)),
]


@pytest.mark.parametrize(("method", "kind"), CASES, ids=str)
def test_results_are_within_the_tolerance(method, kind):
    base = {"w": np.zeros(kind[1:], np.float32)}
    models = [{"w": matrices(*kind, seed)} for seed in (1, 2)]
    how = {"method": method.partition(" ")[0], "verbose": False, **METHODS[method]}
    cupy_on_host.launched.clear()
    expected, found = (
        dare.merge_arrays(base, models, device=device, **how)[0]["w"].astype(np.float64)
        for device in ("cpu", "cuda")
    )
    most = 1e-2 if method in CUTS else 1e-4
    assert np.linalg.norm(found - expected) <= most * np.linalg.norm(expected)
    assert cupy_on_host.IS_REAL or cupy_on_host.launched


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder, rng = tmp_path_factory.mktemp("models"), np.random.default_rng(7)
    base = {name: rng.normal(0, 1, (60, 50)).astype(np.float32) for name in "abcd"}
    base["row"] = rng.normal(0, 1, 130).astype(np.float32)
    files = [folder / f"{name}.safetensors" for name in ("base", "a", "b", "c")]
    save_file(base, files[0])
    for file in files[1:]:
        noise = {name: rng.normal(0, 0.01, w.shape) for name, w in base.items()}
        save_file({n: (w + noise[n]).astype(np.float32) for n, w in base.items()}, file)
    return files


def recipe(models, output, method="tsv", **settings):
    base, *tuned = models
    how = {"method": method, "output": output, "verbose": False, "threads": 2}
    return {"base": base, "models": tuned, **how, **settings}


def manifest_of(report):
    path = report.output.with_name(f"{report.output.name}.manifest.json")
    return json.loads(path.read_text())


def test_the_device_belongs_to_the_identity_where_matrices_go_to_it(models, tmp_path):
    plans = {
        (method, device): dare.plan(**recipe(models, None, method), device=device)
        for method in ("tsv", "dare+ties")
        for device in ("cpu", "cuda", "auto")
    }
    prints = {key: plan.fingerprint for key, plan in plans.items()}
    assert prints["tsv", "cuda"] != prints["tsv", "cpu"] == prints["tsv", "auto"]
    assert len({prints["dare+ties", device] for device in ("cpu", "cuda", "auto")}) == 1
    told = {key for key, plan in plans.items() for n in plan.notes if n.code == "matrices_on_gpu"}
    assert told == {("tsv", "cuda")}
    (note,) = (n for n in plans["tsv", "cuda"].notes if n.code == "matrices_on_gpu")
    assert "4 of 5 tensors" in note.text
    made = {
        device: dare.merge(**recipe(models, tmp_path / f"{device}.safetensors"), device=device)
        for device in ("cpu", "cuda")
    }
    assert manifest_of(made["cuda"])["device"] == plans["tsv", "cuda"].matrix_gpus.title
    assert "device" not in manifest_of(made["cpu"])
    assert dare.verify(made["cuda"].output)


class StoppedError(Exception):
    pass


@pytest.mark.parametrize(("device", "resumes"), [("cpu", False), ("cuda", True)])
def test_another_device_does_not_resume(models, tmp_path, device, resumes):
    settings = recipe(models, tmp_path / "m.safetensors", threads=1)

    def stop_late(done, total):
        if done > 0.9 * total:
            raise StoppedError

    with pytest.raises(StoppedError):
        dare.merge(**settings, device=last_gpu(), progress=stop_late)
    assert (dare.merge(**settings, device=device).resumed_chunks > 0) == resumes


@pytest.mark.parametrize("moved", [False, True])
@pytest.mark.parametrize(("first", "second"), [("cuda", "cpu"), ("cpu", "cuda")])
def test_repeating_elsewhere_says_that_bytes_may_differ(models, tmp_path, first, second, moved):
    """Inputs and weights of models are still those of the manifest."""
    settings = recipe(models, tmp_path / "m.safetensors", weight=[1.0, 0.5, 0.25], device=first)
    made = dare.merge(**settings)
    again = {"output": tmp_path / "again.safetensors", "verbose": False}
    if moved:
        again |= {"base": models[0], "models": models[1:]}
    here = dare.merge(made.output, **again, device=first)
    assert here.digests == made.digests
    with pytest.warns(DareWarning, match=r"may differ.*repeat it on"):
        there = dare.merge(made.output, **again, device=second, overwrite=True)
    assert manifest_of(there)["models"] == manifest_of(made)["models"]
    arrays = [np.fromfile(report.output, np.float32)[-1000:] for report in (made, there)]
    np.testing.assert_allclose(*arrays, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("device", ["cuda", "auto"])
def test_candidates_are_what_their_merge_is(models, tmp_path, device):
    base, *tuned = models
    held = dare.Candidates(Request.of(base=base, models=tuned, method="tsv", device=device))
    settings = recipe(models, tmp_path / "m.safetensors", device=device)
    assert held.make().digest == dare.merge(**settings).digests.output


@pytest.mark.parametrize("how", [{"rank": 4}, {"energy": 0.6}, {"rank": 40}], ids=str)
def test_adapters_are_extracted_there(tmp_path, how):
    """By a sketch, by the energies of all directions, and by more directions than are sketched."""
    base, tuned = tmp_path / "base.safetensors", tmp_path / "tuned.safetensors"
    change = {"a.weight": matrices("falling", 190, 200, 1), "b.weight": matrices("few", 90, 70, 2)}
    save_file({name: np.zeros_like(w) for name, w in change.items()}, base)
    save_file(change, tuned)
    products = {}
    for device in ("cpu", "cuda"):
        output = tmp_path / device
        report = extract_adapter(base, tuned, output, **how, as_stored=True, device=device)
        found = load_file(output / "adapter_model.safetensors")
        pairs = zip(*[iter(sorted(found))] * 2, strict=True)
        products[device] = [found[b] @ found[a] for a, b in pairs]
        manifest = (report.output / "dare-manifest.json").read_text()
        assert ('"device"' in manifest) == (device == "cuda")
    for here, there in zip(*products.values(), strict=True):
        assert np.linalg.norm(here - there) <= 1e-5 * np.linalg.norm(here)


def test_an_analysis_takes_singular_values_there(models):
    base, *tuned = models
    found = {}
    for device in ("cpu", "cuda"):
        cupy_on_host.launched.clear()
        how = {"spectra": "all", "verbose": False, "threads": 2}
        analysis = dare.analyze(base, tuned, device=device, **how)
        found[device] = [
            each.spectrum.values
            for model in analysis.models
            for each in model.tensors
            if each.spectrum
        ]
        assert cupy_on_host.IS_REAL or bool(cupy_on_host.launched) == (device == "cuda")
    assert len(found["cpu"]) == 4 * 3
    np.testing.assert_allclose(found["cuda"], found["cpu"], rtol=1e-6)


@on_host_only
def test_where_float64_is_slow_float32_computes(models, tmp_path, monkeypatch):
    slow = {"SingleToDoublePrecisionPerfRatio": 64}
    monkeypatch.setattr(cupy_on_host.Device, "attributes", slow)
    monkeypatch.setattr(linalg, "SINGLE_FROM", 16)
    monkeypatch.setattr(linalg, "inverse_root_by_products", None)
    made = []
    for method in ("iso", "tsv", "star+sum"):
        for device in ("cpu", "cuda"):
            output = tmp_path / f"{device}.safetensors"
            dare.merge(**recipe(models, output, method), device=device, overwrite=True)
            made.append(load_file(output)["a"] - load_file(models[0])["a"])
        assert np.linalg.norm(made[-1] - made[-2]) <= 1e-4 * np.linalg.norm(made[-1])


@on_host_only
def test_what_is_missing_is_named(models, monkeypatch, tmp_path):
    settings = recipe(models, tmp_path / "m.safetensors", device="cuda")
    monkeypatch.setattr(cupy_on_host.Device, "most_bytes", 5000)
    with pytest.raises(DareError, match=r"cuda: Out of memory.*device = cpu"):
        dare.merge(**settings)
    with monkeypatch.context() as patch:
        patch.setattr(cupy_on_host.Device, "free_bytes", 1 << 20)
        with pytest.raises(RecipeError, match=r"cuda: one thread needs .* is free.*device = cpu"):
            dare.plan(**settings)
    with pytest.raises(RecipeError, match=r"max_gpu_memory = 1\.0 kB:.*at least"):
        dare.plan(**settings, max_gpu_memory=1000)
    monkeypatch.setitem(cupy_on_host.sys.modules, "cupy", None)
    with pytest.raises(RecipeError, match=r"cuda:.*gpu-matrices.*device = cpu"):
        dare.plan(**settings)
    assert dare.plan(**settings | {"method": "dare+ties"}).matrix_gpus is None


@on_host_only
def test_memory_limits_the_threads(models, monkeypatch):
    settings = recipe(models, None, device="cuda", threads=4)
    limit = 28 << 20  # enough for the matrices and smallest batches of two threads
    assert dare.plan(**settings).cost.threads == 4
    small = dare.plan(**settings, max_gpu_memory=limit).cost
    monkeypatch.setattr(cupy_on_host.Device, "free_bytes", limit // cuda_on_host.GPUS)
    for cost in (small, dare.plan(**settings).cost):
        assert cost.threads == 2
        assert cost.gpu_bytes <= limit
    assert dare.plan(**settings | {"device": "cuda:0"}).cost.threads == 1
