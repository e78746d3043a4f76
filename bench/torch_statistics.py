"""Most of what an analysis finds, as one writes it with torch: tensor after tensor, in float32.

For each tensor and model: zeros, mean, deviation, largest, kurtosis, norm, five quantiles (by
`kthvalue`, as fast as a sort and faster than `quantile`, which also refuses large tensors),
the share under a hundredth of the largest and a histogram of octaves. For each two models: cosine,
agreement of signs. No quantiles of layers or of the whole, no tops, no spectra.

    python bench/torch_statistics.py base.safetensors a.safetensors b.safetensors
"""

from __future__ import annotations

import itertools
import math
import sys
from contextlib import ExitStack

import torch
from safetensors import safe_open

SHARES = (0.01, 0.05, 0.5, 0.95, 0.99)


def statistics(delta: torch.Tensor) -> list[float]:
    """Of one tensor's delta."""
    magnitudes = delta.abs()
    largest = magnitudes.max()
    mean, deviation = delta.mean(), delta.std(correction=0)
    figures = [
        (delta == 0).sum(),
        mean,
        deviation,
        largest,
        magnitudes.mean(),
        ((delta - mean) / deviation).pow(4).mean() - 3,
        delta.norm(),
        (magnitudes < 0.01 * largest).float().mean(),
    ]
    figures += [
        torch.kthvalue(magnitudes, max(1, math.ceil(share * delta.numel()))).values
        for share in SHARES
    ]
    octaves = torch.frexp(magnitudes[magnitudes > 0]).exponent
    figures += list(torch.bincount(octaves + 150, minlength=280))
    return [float(figure) for figure in figures]


def overlap(one: torch.Tensor, other: torch.Tensor) -> list[float]:
    """Of two deltas of a tensor."""
    both = (one != 0) & (other != 0)
    agreeing = (one.sign() == other.sign()) & both
    return [float(one @ other), float(both.sum()), float(agreeing.sum())]


def analyze(files: list[str]) -> list[list[float]]:
    """All figures of all tensors."""
    found = []
    with ExitStack() as stack:
        base, *models = (stack.enter_context(safe_open(file, "pt")) for file in files)
        for name in base.keys():  # noqa: SIM118 - it is no dict
            weights = base.get_tensor(name).float().reshape(-1)
            deltas = [model.get_tensor(name).float().reshape(-1) - weights for model in models]
            found += [statistics(delta) for delta in deltas]
            found += [overlap(*pair) for pair in itertools.combinations(deltas, 2)]
            together = torch.stack(deltas).sum(dim=0).abs().sum()
            found.append([float(weights.norm()), float(together)])
    return found


if __name__ == "__main__":
    analyze(sys.argv[1:])
