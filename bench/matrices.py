"""Matrix stages beside the same formulas with torch.linalg.svd.

    python bench/matrices.py [--models 4] [--runs 3] [2048x2048 2048x5632 …]
    python bench/matrices.py --accuracy --kind deficient --runs 1 1024x1024
    OPENBLAS_NUM_THREADS=1 OMP_NUM_THREADS=1 python bench/matrices.py --cpu   # on a busy machine

Both are given the deltas of a few tensors of one shape as float32 arrays in memory, and both use
all cores: torch for one matrix after the other, `dare` for one on each. The time of `dare` is that
of the whole merge, with gathering, adding to the base and writing. By --kind the deltas are
`strong` (a few strong directions, a tail that falls as 1/√j, and noise), `noise`, `lora` (rank 16),
`deficient` (noise of three quarters of the rank) or `alike` (noise that differs by 1e-3 between
models). Errors are those of torch's result and of ours against float64, relative to its norm
(--accuracy).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch

import dare
from dare.tensors.system import available_cores

SHARE = 0.4
RADIUS = 0.1
KEEP_RATIO = 0.2
KINDS = ("strong", "noise", "lora", "deficient", "alike")


def make_delta(rows: int, columns: int, seed: int, kind: str = "strong") -> np.ndarray:
    generator, short = np.random.default_rng(seed), min(rows, columns)
    noise = 1e-3 * generator.standard_normal((rows, columns), np.float32)
    if kind == "alike":
        return make_delta(rows, columns, 0, "noise") + np.float32(1e-3) * noise
    if kind == "noise":
        return noise
    rank = {"strong": short // 4, "lora": 16, "deficient": 3 * short // 4}[kind]
    left = generator.standard_normal((rows, rank), np.float32)
    right = generator.standard_normal((rank, columns), np.float32)
    if kind != "deficient":
        left /= np.sqrt(np.arange(1, rank + 1, dtype=np.float32))
    return 1e-4 * (left @ right) + (np.float32(0.1) * noise if kind == "strong" else 0)


def svd(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.linalg.svd(matrix, full_matrices=False)


def star(deltas: list[torch.Tensor]) -> torch.Tensor:
    merged = torch.zeros_like(deltas[0])
    for delta in deltas:
        left, values, right = svd(delta)
        held = values.cumsum(0)
        rank = int(torch.searchsorted(held, SHARE * held[-1])) + 1
        factor = held[-1] / held[rank - 1]
        merged += (left[:, :rank] * (factor * values[:rank])) @ right[:rank]
    return merged


def tsv(deltas: list[torch.Tensor]) -> torch.Tensor:
    rank = min(deltas[0].shape) // len(deltas)
    parts = [svd(delta) for delta in deltas]
    left, _, turned = svd(torch.cat([part[0][:, :rank] for part in parts], dim=1))
    other, _, right = svd(torch.cat([part[2][:rank] for part in parts], dim=0))
    values = torch.cat([part[1][:rank] for part in parts])
    return torch.linalg.multi_dot([left, turned * values, other, right])


def iso(deltas: list[torch.Tensor]) -> torch.Tensor:
    left, values, right = svd(torch.stack(deltas).sum(dim=0))
    return values.mean() * (left @ right)


def fourier(deltas: list[torch.Tensor]) -> torch.Tensor:
    rows, columns = deltas[0].shape
    squared = [(2 * torch.fft.fftfreq(side).double()).square() for side in (rows, columns)]
    is_high = squared[0][:, None] + squared[1] >= RADIUS**2
    return sum(torch.fft.ifft2(torch.fft.fft2(delta) * is_high).real for delta in deltas)


def knots(deltas: list[torch.Tensor]) -> torch.Tensor:
    left, values, right = svd(torch.cat(deltas, dim=1))
    parts = []
    for part in right.split(deltas[0].shape[1], dim=1):
        kept = int(KEEP_RATIO * part.numel())
        cut = part.abs().flatten().kthvalue(part.numel() - kept + 1).values
        parts.append(torch.where(part.abs() >= cut, part, 0))
    stacked = torch.stack(parts)
    agrees = stacked * stacked.sum(dim=0) > 0
    mean = (stacked * agrees).sum(dim=0) / agrees.sum(dim=0).clamp(min=1)
    return (left * values) @ mean


PLAIN: dict[str, Callable[[list[torch.Tensor]], torch.Tensor]] = {
    "star+sum": star,
    "tsv": tsv,
    "iso": iso,
    "fourier+sum": fourier,
    "knots": knots,
}


def merge(method: str, deltas: list[np.ndarray], tensors: int = 1) -> np.ndarray:
    """Merge as many tensors that all have the same deltas; return one of them."""
    names = [f"w{number}" for number in range(tensors)]
    base, *models = (
        {name: delta.copy() for name in names}  # one array would be one tensor
        for delta in (np.zeros_like(deltas[0]), *deltas)
    )
    merged, _ = dare.merge_arrays(base, models, method=method, max_memory="16GiB", verbose=False)
    found: np.ndarray = merged[names[0]]
    return found


def repeat(
    plain: Callable[[list[torch.Tensor]], torch.Tensor], deltas: list[torch.Tensor], tensors: int
) -> torch.Tensor:
    """The same for torch."""
    merged = [plain(deltas) for _ in range(tensors)]
    return merged[0]


def best_seconds(
    work: Callable[[], object], runs: int, clock: Callable[[], float]
) -> tuple[float, object]:
    best, result = float("inf"), None
    for _ in range(runs):
        started = clock()
        result = work()
        best = min(best, clock() - started)
    return best, result


def relative(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("shapes", nargs="*", default=["2048x2048", "2048x5632"])
    parser.add_argument("--models", type=int, default=4)
    parser.add_argument("--tensors", type=int, default=available_cores(), help="one for each core")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--accuracy", action="store_true", help="measure errors against float64")
    parser.add_argument("--kind", choices=KINDS, default="strong", help="what deltas are like")
    parser.add_argument("--only", nargs="+", choices=PLAIN, default=list(PLAIN), metavar="METHOD")
    parser.add_argument("--cpu", action="store_true", help="CPU seconds, for a busy machine")
    arguments = parser.parse_args()
    clock = time.process_time if arguments.cpu else time.perf_counter
    merge("iso", [make_delta(16, 16, 0)])  # imports, and finds LAPACK
    print(f"{'shape':>10} {'method':>11} {'torch s':>8} {'dare s':>8} {'ratio':>6}  errors")
    for shape in arguments.shapes:
        rows, columns = map(int, shape.split("x"))
        deltas = [make_delta(rows, columns, n, arguments.kind) for n in range(arguments.models)]
        tensors = [torch.from_numpy(delta) for delta in deltas]
        for method in arguments.only:
            plain = PLAIN[method]
            works = (
                partial(repeat, plain, tensors, arguments.tensors),
                partial(merge, method, deltas, arguments.tensors),
            )
            (theirs, slow), (ours, fast) = (
                best_seconds(work, arguments.runs, clock) for work in works
            )
            errors = ""
            if arguments.accuracy:
                exact = plain([tensor.double() for tensor in tensors]).numpy()
                errors = f"{relative(slow.numpy(), exact):.1e} {relative(fast, exact):.1e}"
            ratio = theirs / ours
            print(
                f"{shape:>10} {method:>11} {theirs:8.2f} {ours:8.2f} {ratio:6.2f}  {errors}",
                flush=True,
            )


if __name__ == "__main__":
    main()
