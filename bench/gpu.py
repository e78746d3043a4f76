"""Merges on a GPU beside those on the processor: the kernel, whole merges, candidates in memory.

    python bench/gpu.py /dev/shm/gpu --parameters 0.95e9
    python bench/gpu.py /dev/shm/gpu --parameters 0.3e9 --parts noise strong

Each part compares bytes and figures first, so that nothing that is wrong is timed. Needs torch,
which makes the models: a base and three fine-tunes in bf16, deltas of σ = 0.001. Best of five.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

import dare
from dare.kernels import Band, ChunkJob, Operand, core, cuda, gpu_batches
from dare.tensors.chunks import CHUNK
from dare.tensors.mask import keep_threshold, mask_key

MODELS, ROUNDS = 3, 5
SAMPLE = 1 << 25  # elements that are compared
THRESHOLD = int(np.float32(0.002).view(np.int32))
METHODS: dict[str, dict[str, Any]] = {
    "linear": {},
    "dare+linear": {"masks": True},
    "ties": {"elects": True},
    "dare+ties": {"masks": True, "elects": True},
    "trim+ties": {"bands": True, "elects": True},
}


def main() -> None:
    """Run all parts, or some."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="where models are made; in memory, if possible")
    parser.add_argument("--parameters", type=float, default=0.95e9, help="of a model (0.95e9)")
    parser.add_argument("--parts", nargs="+", default=["kernel", "files", "candidates"])
    options = parser.parse_args()
    print(torch.cuda.get_device_name(), flush=True)
    parts = {"kernel": kernels, "files": files, "candidates": candidates, "search": search}
    parts |= {kind: functools.partial(matrices, kind) for kind in ("noise", "strong")}
    for part in options.parts:
        parts[part](options.folder, int(options.parameters))


def best_ms(run: Callable[[], object], repeat: int = 1) -> float:
    """The least time of some rounds, of `repeat` runs each, in milliseconds for one."""
    times = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        for _ in range(repeat):
            run()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - started) / repeat)
    return 1000 * min(times)


# ---------------------------------------------------------------- the kernel


def job_of(
    size: int, *, masks: bool = False, bands: bool = False, elects: bool = False
) -> ChunkJob:
    """A job whose arrays have no memory until they are touched."""
    arrays = [np.empty(size, np.uint16) for _ in range(2 + MODELS)]
    mask = divmod(keep_threshold(0.9), 1 << 32)
    least = int(np.float32(0.001).view(np.int32))
    operands = [
        Operand(
            tuned,
            (*mask_key(number, "w"), *mask) if masks else None,
            Band(least, size // 2, 0x7F800000, 0) if bands else None,
            np.float32(1 / MODELS),
            1.0,
        )
        for number, tuned in enumerate(arrays[1:-1])
    ]
    known = [True] * (1 + MODELS)
    return ChunkJob(arrays[0], operands, 0, elects, np.float32(1), arrays[-1], known)


def kernels(_folder: Path, _parameters: int) -> None:
    """Time the kernel on 2³⁰ elements in the GPU's memory."""
    size = 1 << 30
    weights = torch.empty((2 + MODELS, size), dtype=torch.bfloat16, device="cuda")
    weights[0].normal_(0, 0.02)
    for tuned in weights[1:-1]:
        tuned.normal_(0, 0.001).add_(weights[0])
    print(f"copy: {best_ms(lambda: weights[:2].copy_(weights[2:4])) * 5 / 4:.2f} ms", flush=True)
    weights[1].normal_(0, 0.001).add_(weights[0])
    for name, how in METHODS.items():
        started = time.perf_counter()
        job = job_of(size, **how)
        kernel = cuda.kernel("merge_parts", 0, gpu_batches.Shape.of(job))
        compiled = time.perf_counter() - started
        worker = cuda._Worker(0)
        addresses = [[row.data_ptr() for row in weights]]

        run = functools.partial(launch, worker, kernel, addresses)
        check(name, weights, job_of(SAMPLE, **how), run)
        many, one = (best_ms(functools.partial(run, job, count)) for count in (21, 1))
        print(f"{name}: {(many - one) / 20:.2f} ms; ready to run in {compiled:.2f} s", flush=True)


def launch(
    worker: Any, kernel: Any, addresses: list[list[int]], job: ChunkJob, count: int
) -> list[tuple[Any, int]]:
    """Launch a kernel so many times; return what its tables say."""
    tables = gpu_batches.Tables([job])
    memory = torch.empty(tables.nbytes, dtype=torch.uint8, device="cuda")
    memory.copy_(torch.from_numpy(tables.fill(addresses, memory.data_ptr())))
    torch.cuda.synchronize()
    for _ in range(count):
        worker.launch(kernel, tables.blocks, memory.data_ptr(), 1, THRESHOLD, CHUNK)
    worker.stream.sync()
    return tables.read(memory.cpu().numpy())


def check(name: str, weights: Any, job: ChunkJob, run: Callable[..., Any]) -> None:
    """Compare bytes, figures and the peak of a sample with the library's."""
    rows = weights[:, : job.base.size].view(torch.int16).cpu().numpy().view(np.uint16)
    operands = [
        each._replace(tuned=row) for each, row in zip(job.operands, rows[1:-1], strict=True)
    ]
    out = np.empty_like(job.base)
    expected = core.merge([job._replace(base=rows[0], operands=operands, out=out)], THRESHOLD)[0]
    ((figures, peak),) = run(job, 1)
    made = weights[-1, : job.base.size].view(torch.int16).cpu().numpy().view(np.uint16)
    assert np.array_equal(made, out), f"{name}: {np.count_nonzero(made != out)} bytes differ"
    assert np.array_equal(figures, expected.figures), f"{name}: figures differ"
    assert peak == expected.peak, f"{name}: the peak differs"


# ---------------------------------------------------------------- whole merges


def shapes_of(parameters: int) -> dict[str, tuple[int, ...]]:
    """Shapes as a Llama has them, for about so many parameters."""
    hidden, inner, some = 2048, 8192, 512
    layer = {
        **dict.fromkeys(["input_layernorm", "post_attention_layernorm"], (hidden,)),
        **dict.fromkeys(["self_attn.q_proj", "self_attn.o_proj"], (hidden, hidden)),
        **dict.fromkeys(["self_attn.k_proj", "self_attn.v_proj"], (some, hidden)),
        **dict.fromkeys(["mlp.gate_proj", "mlp.up_proj"], (inner, hidden)),
        "mlp.down_proj": (hidden, inner),
    }
    layers = max(1, round(parameters / sum(map(math.prod, layer.values()))))
    return {
        f"model.layers.{n}.{name}.weight": shape
        for n in range(layers)
        for name, shape in layer.items()
    }


def make_files(folder: Path, parameters: int) -> list[Path]:
    """Files of a base and fine-tunes, made if they are not there."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}.safetensors" for name in ("base", "a", "b", "c")]
    if paths[-1].exists():
        return paths
    shapes = shapes_of(parameters)
    torch.manual_seed(0)
    base = {
        name: torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_(0, 0.02)
        for name, shape in shapes.items()
    }
    for path in paths:
        changed = base
        if path != paths[0]:
            changed = {n: w + torch.empty_like(w).normal_(0, 0.001) for n, w in base.items()}
        save_file({name: weight.cpu() for name, weight in changed.items()}, path)
    return paths


def files(folder: Path, parameters: int) -> None:
    """Time whole processes of `dare merge`, which take turns."""
    base, *tuned = make_files(folder, parameters)
    for method in ("dare+linear", "dare+ties", "trim+ties"):
        times: dict[str, list[float]] = {"cpu": [], "cuda": []}
        digests = set()
        for _ in range(ROUNDS):
            for device, found in times.items():
                command = [sys.executable, "-m", "dare", "merge", "--json", "--overwrite"]
                command += ["--base", str(base), "--models", *map(str, tuned), "--method", method]
                command += ["--output", str(folder / "merged.safetensors"), "--device", device]
                started = time.perf_counter()
                done = subprocess.run(command, check=True, capture_output=True, text=True)
                found.append(time.perf_counter() - started)
                digests.add(json.loads(done.stdout)["digests"]["output"])
        assert len(digests) == 1, "the digests differ"
        print(method, {device: round(min(found), 2) for device, found in times.items()}, flush=True)


# ---------------------------------------------------------------- candidates


def candidates(folder: Path, parameters: int) -> None:
    """Time candidates that are written into a model on the GPU."""
    base, *tuned = make_files(folder, parameters)
    model = {n: torch.empty_like(w, device="cuda") for n, w in load(base).items()}
    for method in ("dare+linear", "dare+ties", "trim+ties"):
        settings = {"drop_rate": 0.9} if "dare" in method else {"keep_ratio": 0.2}
        digests = set()
        for device in ("cpu", "cuda"):
            request = dare.Request.of(base=base, models=tuned, method=method, device=device)
            held = dare.Candidates(request)
            times = []
            for _ in range(ROUNDS):
                started = time.perf_counter()
                digests.add(held.write_into(model, settings))
                torch.cuda.synchronize()
                times.append(time.perf_counter() - started)
            print(method, device, f"{1000 * min(times):.0f} ms a candidate", flush=True)
            del held
        assert len(digests) == 1, "the digests differ"


# ---------------------------------------------------------------- a search

TRIALS, EVALUATION_SECONDS = 30, 1.0


def search(folder: Path, parameters: int) -> None:
    """Search with a live Llama whose evaluation takes a second; time what lies in between."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folders = [folder / "search" / name for name in ("base", "a", "b", "c")]
    sizes = {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32}
    layers = max(1, parameters // 61_000_000)
    shape = LlamaConfig(**sizes, num_key_value_heads=8, num_hidden_layers=layers, vocab_size=32000)
    torch.manual_seed(0)
    model = LlamaForCausalLM(shape).to("cuda", torch.bfloat16)
    for path in folders:
        if path != folders[0]:
            for weight in model.parameters():
                weight.data += torch.randn_like(weight) * 0.001
        model.save_pretrained(path)
    count = sum(weight.numel() for weight in model.parameters())
    del model
    tokens = torch.randint(0, 32000, (8, 128), device="cuda")
    pauses: list[float] = []
    ended = 0.0

    def evaluate(model: Any) -> float:
        nonlocal ended
        torch.cuda.synchronize()
        started = time.perf_counter()
        pauses.append(started - ended)
        with torch.no_grad():
            while time.perf_counter() - started < EVALUATION_SECONDS:
                loss = model(tokens, labels=tokens).loss.item()
        ended = time.perf_counter()
        return -loss

    base, *tuned = map(str, folders)
    for method, name in (("dare+linear", "drop_rate"), ("trim+ties", "keep_ratio")):
        pauses.clear()
        over = {name: [0.1 + 0.8 * number / TRIALS for number in range(TRIALS)]}
        study = folder / "search" / f"{method}.db"
        study.unlink(missing_ok=True)
        recipe = {"base": base, "models": tuned, "method": method}
        dare.search(recipe, over, evaluate=evaluate, study=study, verbose=False)
        between = sorted(pauses[1:])
        told = f"{1000 * between[len(between) // 2]:.0f} ms, at most {1000 * between[-1]:.0f}"
        what = f"{count / 1e9:.2f} billion, {method}, {len(pauses)} evaluations of a second"
        print(f"search, {what}: between two of them {told}", flush=True)


# ---------------------------------------------------------------- whole matrices

MATRIX_METHODS = "iso", "tsv", "star+sum", "swudi", "dc_merge", "knots", "linear+svc", "fourier+sum"
MATRIX = 2048, 5632
THREADS = 4, 8


def make_matrices(folder: Path, parameters: int, kind: str) -> list[Path]:
    """Files of a base and four fine-tunes: deltas of noise, or with directions that stand out."""
    paths = [folder / kind / f"{name}.safetensors" for name in ("base", "a", "b", "c", "d")]
    paths[0].parent.mkdir(parents=True, exist_ok=True)
    count = parameters // (MATRIX[0] * MATRIX[1])
    torch.manual_seed(0)
    base = [torch.empty(MATRIX, device="cuda").normal_(0, 0.02) for _ in range(count)]
    for path in paths:
        changed = base
        if path != paths[0]:
            changed = [weight + delta_of(kind) for weight in base]
        named = {f"layers.{n}.weight": w.bfloat16().cpu() for n, w in enumerate(changed)}
        save_file(named, path)
    return paths


def delta_of(kind: str) -> torch.Tensor:
    """Return a change of σ = 0.001, or one with 16 directions that hold most of it."""
    noise = torch.empty(MATRIX, device="cuda").normal_(0, 0.001)
    if kind == "noise":
        return noise
    left, right = (
        torch.randn(shape, device="cuda") for shape in ((MATRIX[0], 16), (16, MATRIX[1]))
    )
    return noise / 2 + left @ right * (0.001 / 4)


def matrices(kind: str, folder: Path, parameters: int) -> None:
    """Compare results of matrix stages with the processor's, and time whole processes."""
    deltas = [delta_of(kind) for _ in range(4)]
    svds = {
        "iso": best_ms(lambda: torch.linalg.svd(torch.stack(deltas).sum(0), full_matrices=False)),
        "tsv": best_ms(lambda: torch_tsv(deltas)),
    }
    count = parameters // (MATRIX[0] * MATRIX[1])
    told = {name: f"{ms * count / 1000:.2f} s" for name, ms in svds.items()}
    print(kind, f"torch.linalg.svd, {count} matrices without files:", told, flush=True)
    for method in MATRIX_METHODS:
        for shape in ((1024, 1536), (1536, 1024), (300, 500)):
            print(kind, method, shape, f"error {difference(method, kind, shape):.1e}", flush=True)
    base, *tuned = make_matrices(folder, parameters, kind)
    for method in MATRIX_METHODS:
        times: dict[str, list[float]] = {}
        digests = set()
        for device, threads, rounds in (("cpu", 16, 1), *(("cuda", n, 3) for n in THREADS)):
            command = [sys.executable, "-m", "dare", "merge", "--json", "--overwrite"]
            command += ["--base", str(base), "--models", *map(str, tuned), "--method", method]
            command += ["--output", str(folder / "merged.safetensors"), "--device", device]
            command += ["--threads", str(threads)]
            found = times.setdefault(f"{device}, {threads} threads", [])
            for _ in range(rounds):
                started = time.perf_counter()
                done = subprocess.run(command, check=False, capture_output=True, text=True)
                found.append(round(time.perf_counter() - started, 2))
                if done.returncode:
                    print(method, device, done.stderr[-2000:], flush=True)
                elif device == "cuda":
                    digests.add(json.loads(done.stdout)["digests"]["output"])
        print(kind, method, times, f"{len(digests)} different outputs of the GPU", flush=True)


def torch_tsv(deltas: list[torch.Tensor]) -> torch.Tensor:
    """Do what `tsv` does, by the textbook."""
    rank = min(MATRIX) // len(deltas)
    parts = [torch.linalg.svd(delta, full_matrices=False) for delta in deltas]
    left = torch.cat([part[0][:, :rank] for part in parts], dim=1)
    right = torch.cat([part[2][:rank] for part in parts])
    sides = [torch.linalg.svd(side, full_matrices=False) for side in (left, right)]
    left, right = (side[0] @ side[2] for side in sides)
    return (left * torch.cat([part[1][:rank] for part in parts])) @ right


def difference(method: str, kind: str, shape: tuple[int, int]) -> float:
    """Return how far the GPU's result is from the processor's, relative to its norm."""
    rows, columns = min(shape), max(shape)
    deltas = [delta_of(kind)[:rows, :columns].cpu().numpy() for _ in range(4)]
    if shape[0] > shape[1]:
        deltas = [np.ascontiguousarray(delta.T) for delta in deltas]
    zeros = {"w": np.zeros(shape, np.float32)}
    here, there = (
        dare.merge_arrays(
            zeros, [{"w": d} for d in deltas], method=method, device=device, verbose=False
        )[0]["w"].astype(np.float64)
        for device in ("cpu", "cuda")
    )
    return float(np.linalg.norm(there - here) / np.linalg.norm(here))


def load(path: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(path)


if __name__ == "__main__":
    main()
