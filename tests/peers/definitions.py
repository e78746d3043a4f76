"""What the authors of a method compute, said again in plain torch.

Each function is the method as its authors' published code has it, for one matrix or one flat
tensor, in float64: `deltas` are the models' changes. None of it is their code. Where the code and
the paper say different things, both are here, or the comment says which one is.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Deltas = Sequence[Tensor]


def _svd(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return torch.linalg.svd(matrix.double(), full_matrices=False)


def _polar(matrix: Tensor) -> Tensor:
    """The nearest matrix with orthonormal columns or rows."""
    left, _, right = _svd(matrix)
    return left @ right


# ---------------------------------------------------------------- one delta


def star(delta: Tensor, share: float) -> Tensor:
    """Truncate at a share of the nuclear norm, and scale back to all of it."""
    left, values, right = _svd(delta)
    rank = int((values.cumsum(0) < share * values.sum()).sum()) + 1
    scaled = values[:rank] * (values.sum() / values[:rank].sum())
    return left[:, :rank] * scaled @ right[:rank]


def free(delta: Tensor, filter_ratio: float) -> Tensor:
    """Keep the frequencies near the highest one: no farther than a share of the shorter side.

    The transform is not shifted, so that the middle of it is the highest frequency and the corners
    are zero. The code has frequencies at a tenth of the shorter side twice, which is left out here.
    """
    rows, columns = delta.shape
    down = (torch.arange(rows) - rows // 2).double()[:, None]
    across = (torch.arange(columns) - columns // 2).double()
    near = (down.square() + across.square()).sqrt() <= filter_ratio * min(rows, columns)
    return torch.fft.ifft2(torch.fft.fft2(delta.double()) * near).real


def high_pass(delta: Tensor, radius: float) -> Tensor:
    """Drop the frequencies nearer to zero than a radius, 1 being the highest of either side."""
    rows, columns = delta.shape
    down = 2 * torch.fft.fftfreq(rows, dtype=torch.float64)[:, None]
    across = 2 * torch.fft.fftfreq(columns, dtype=torch.float64)
    far = down.square() + across.square() >= radius**2
    return torch.fft.ifft2(torch.fft.fft2(delta.double()) * far).real


# ---------------------------------------------------------------- several deltas, matrices


def tsv_merge(deltas: Deltas) -> Tensor:
    """An equal share of the rank for each task, made orthogonal on either side."""
    share = min(deltas[0].shape) // len(deltas)
    parts = [_svd(delta) for delta in deltas]
    left = torch.cat([left[:, :share] for left, _, _ in parts], dim=1)
    values = torch.cat([values[:share] for _, values, _ in parts])
    right = torch.cat([right[:share] for _, _, right in parts])
    return _polar(left) * values @ _polar(right)


def iso_c(deltas: Deltas) -> Tensor:
    """The sum with all its singular values at their mean."""
    left, values, right = _svd(sum(delta.double() for delta in deltas))
    return values.mean() * left @ right


def iso_cts(deltas: Deltas, common_share: float) -> Tensor:
    """The leading directions of the sum, then each task's own outside of those, all alike."""
    rank, tasks = min(deltas[0].shape), len(deltas)
    own = round((rank - int(rank * common_share)) / tasks)
    left, values, right = _svd(sum(delta.double() for delta in deltas))
    common = rank - own * tasks
    parts = [(left[:, :common], values[:common], right[:common])]
    for delta in deltas:
        outside = delta.double() - left[:, :common] @ (left[:, :common].T @ delta.double())
        u, s, v = _svd(outside)
        parts.append((u[:, :own], s[:own], v[:own]))
    together = [torch.cat([part[0] for part in parts], dim=1), torch.cat([p[2] for p in parts])]
    level = torch.cat([part[1] for part in parts]).mean()
    return level * _polar(together[0]) @ _polar(together[1])


def knots(deltas: Deltas, kept: int, *, scaled: bool) -> Tensor:
    """TIES in the directions of one decomposition for all tasks.

    The paper's formula merges the parts of V; with `scaled`, as in the authors' configurations
    (s_on_V), they are trimmed by the magnitudes of S·V. Of each part the `kept` largest stay.
    """
    left, values, right = _svd(torch.cat(list(deltas), dim=1))
    held = values > 1e-5
    left, values, right = left[:, held], values[held], right[held]
    parts = torch.stack(right.split(deltas[0].shape[1], dim=1))
    measured = parts * values[:, None] if scaled else parts
    cuts = measured.abs().flatten(1).sort(descending=True).values[:, kept - 1]
    parts = parts * (measured.abs() >= cuts[:, None, None])
    agrees = parts.sign() == parts.sum(0).sign()
    merged = (parts * agrees).sum(0) / (agrees & (parts != 0)).sum(0).clamp(min=1)
    return left * values @ merged


# ---------------------------------------------------------------- several deltas, flat


def ties(deltas: Deltas, kept: int) -> Tensor:
    """The `kept` largest of each flat model, then the mean of those that have the sum's sign.

    In the code `kept` is one more than the share asked for, and a sum of zero has the sign that
    most others have; where all that is left is zero that makes no difference.
    """
    stacked = torch.stack(list(deltas))
    cuts = stacked.abs().sort(dim=1, descending=True).values[:, kept - 1]
    stacked = stacked * (stacked.abs() >= cuts[:, None])
    agrees = stacked * stacked.sum(0) > 0
    return (stacked * agrees).sum(0) / agrees.sum(0).clamp(min=1)


def consensus(deltas: Deltas, selectivity: float, agree: int) -> Tensor:
    """The sum where enough tasks' TALL masks are set."""
    stacked = torch.stack(list(deltas))
    total = stacked.sum(0)
    masks = stacked.abs() > selectivity * (total - stacked).abs()
    return total * (masks.sum(0) >= agree)


def emr_unified(deltas: Deltas) -> Tensor:
    """The largest magnitude among those of the elected sign; a mean of zero elects minus."""
    stacked = torch.stack(list(deltas))
    sign = torch.where(stacked.mean(0) > 0, 1.0, -1.0)
    return sign * (stacked.abs() * (stacked * sign > 0)).max(0).values


def pcb(deltas: Deltas, ratio: float, clamp: float) -> Tensor:
    """All parameters of a model in one: balance scores, spread from the cut to the highest.

    `clamp` is the share of magnitudes that is drawn in at either end, 0.0001 in the code.
    """
    stacked = torch.stack([delta.flatten().double() for delta in deltas])
    count, size = stacked.shape
    ordered = stacked.abs().sort(dim=1).values
    low, high = ordered[:, int(size * clamp)], ordered[:, int(size * (1 - clamp) - 1)]
    drawn = stacked.abs().clamp(low[:, None], high[:, None])
    within = (drawn - low[:, None]) / (high - low)[:, None]
    scores = (count * within.square()).exp() * (stacked * stacked.sum(0)).tanh()
    cut = scores.sort(dim=1).values[:, int(size * (1 - ratio))][:, None]
    shares = (scores.clamp(min=cut) - cut) / (scores.max(dim=1, keepdim=True).values - cut)
    merged = (stacked.sign() * drawn * shares).sum(0) / shares.sum(0).clamp(min=1e-12)
    return merged.reshape(deltas[0].shape)


def cabs(deltas: Deltas, n: int, m: int) -> Tensor:
    """Model after model takes the n largest of every m among what none before it has taken.

    What does not fill a group of m at the end is dropped.
    """
    whole = deltas[0].numel() // m * m
    merged = torch.zeros(deltas[0].numel())
    taken = torch.zeros(whole // m, m, dtype=torch.bool)
    for delta in deltas:
        groups = delta.flatten()[:whole].reshape(-1, m)
        places = groups.abs().masked_fill(taken, 0).topk(n, dim=1).indices
        mask = torch.zeros_like(taken).scatter(1, places, True) & ~taken
        merged[:whole] += (groups * mask).flatten()
        taken |= mask
    return merged.reshape(deltas[0].shape)
