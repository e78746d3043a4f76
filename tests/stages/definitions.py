"""Stages as one writes them down, in NumPy; those of matrices are in test_spectral_stages.

Each is a function of the models' tensors, of one for a delta stage, and of a stage's parameters.
"""

import math

import numpy as np
from combining import largest_first

from dare import keep_mask
from dare.kernels import reference
from dare.tensors.mask import mask_key


def wide(tensors):
    """Models × elements, in float64."""
    return np.array(tensors, np.float64).reshape(len(tensors), -1)


def karcher(tensors, weights=None, steps=200):
    tensors, shape = wide(tensors), np.shape(tensors[0])
    shares = np.full(len(tensors), 1.0) if weights is None else np.array(weights)
    shares = shares / shares.sum()
    lengths = np.linalg.norm(tensors, axis=1)
    units = tensors / lengths[:, None]
    mean = shares @ units
    mean /= np.linalg.norm(mean)
    for _ in range(steps):
        cosines = np.clip(units @ mean, -1, 1)
        angles = np.arccos(cosines)
        stretch = np.where(angles < 1e-7, 1, angles / np.where(angles == 0, 1, np.sin(angles)))
        step = (shares * stretch) @ (units - cosines[:, None] * mean)
        length = np.linalg.norm(step)
        if length < 1e-13:
            break
        mean = math.cos(length) * mean + math.sin(length) * step / length
        mean /= np.linalg.norm(mean)
    return (shares @ lengths * mean).reshape(shape)


def multislerp(tensors):
    lengths = np.linalg.norm(wide(tensors), axis=1, keepdims=True)
    mean = (wide(tensors) / lengths).mean(axis=0)
    return (mean / np.linalg.norm(mean) * lengths.mean()).reshape(tensors[0].shape)


def nuslerp(tensors, weights, each):
    axis = {"tensor": (0, 1), "row": 1, "column": 0}[each]
    first, second = np.array(tensors, np.float64)
    t = weights[1] / sum(weights)
    product = (first * second).sum(axis=axis, keepdims=True)
    lengths = [np.sqrt((v * v).sum(axis=axis, keepdims=True)) for v in (first, second)]
    angle = np.arccos(product / lengths[0] / lengths[1])
    return (np.sin((1 - t) * angle) * first + np.sin(t * angle) * second) / np.sin(angle)


def model_stock(deltas, each="tensor"):
    if each == "row":
        return np.array([model_stock(rows) for rows in zip(*deltas, strict=True)])
    count, flat = len(deltas), wide(deltas)
    units = flat / np.linalg.norm(flat, axis=1, keepdims=True)
    cosine = (units @ units.T)[np.triu_indices(count, 1)].mean()
    share = count * cosine / (1 + (count - 1) * cosine)
    return (share * flat.mean(axis=0)).reshape(deltas[0].shape)


def emr(deltas):
    return np.where(sum(deltas) > 0, np.max(deltas, axis=0), np.min(deltas, axis=0))


def consensus(deltas):
    total = sum(deltas)
    needed = sum(np.abs(d) >= np.float32(0.4) * np.abs(total - d) for d in deltas)
    return np.where(needed >= 2, total, 0)


def ties(deltas, vote, weighted, divide_by):
    assert (vote, weighted, divide_by) == ("count", False, "count")
    side = np.sign(sum(np.sign(d) for d in deltas))
    agreeing = [np.where(np.sign(d) == side, d, 0).astype(np.float32) for d in deltas]
    return sum(agreeing) / sum((np.sign(d) == side).astype(np.float32) for d in deltas)


def ramplus(deltas, boost, most):
    changed = np.array(deltas) != 0
    shared = changed.sum(axis=0) > 1
    shares = [(own & shared).sum() / (own & ~shared).sum() for own in changed]
    factors = [1 + boost * min(share, most) for share in shares]
    own = sum(delta * factor for delta, factor in zip(deltas, factors, strict=True))
    return np.where(shared, np.mean(deltas, axis=0), own)


def sce(deltas, select_ratio):
    flat = wide(deltas)
    variance = flat.var(axis=0).astype(np.float32)
    chosen = largest_first(variance)[: int(select_ratio * np.count_nonzero(variance))]
    kept = np.zeros_like(flat)
    kept[:, chosen] = flat[:, chosen]
    weights = np.square(kept).sum(axis=1, keepdims=True)
    weights /= weights.sum()
    agree = np.sign(kept) == np.where(kept.sum(axis=0) >= 0, 1, -1)
    divisor = np.maximum((weights * agree).sum(axis=0), 1e-6)
    return ((weights * agree * kept).sum(axis=0) / divisor).reshape(deltas[0].shape)


def breadcrumbs(deltas, keep_middle, drop_largest, per="tensor"):
    (delta,) = deltas
    rows = delta.reshape(-1, delta.shape[-1]) if per == "row" else delta.reshape(1, -1)
    size = rows.shape[-1]
    kept = max(1, int(keep_middle * size))
    top = min(int(drop_largest * size), size - kept)
    order = largest_first(np.abs(rows))[:, top : top + kept]
    found = np.zeros_like(rows)
    np.put_along_axis(found, order, np.take_along_axis(rows, order, -1), -1)
    return found.reshape(delta.shape)


def trim(deltas, keep_ratio):
    return breadcrumbs(deltas, keep_ratio, 0)


def numbers_of_the_mask(shape, seed=42):
    found = np.empty(math.prod(shape), np.uint64)
    reference.draw_uniform(found, 0, *mask_key(seed, "w"))
    return found.reshape(shape)


def rescaled(delta, keep, factor):
    """What is kept, times a number, or such that the L1 norm stays."""
    if factor == "l1":
        factor = np.abs(delta).sum(dtype=float) / np.abs(delta[keep]).sum(dtype=float)
    return np.where(keep, delta * np.float32(factor), 0)


def dare(deltas, drop_rate, rescale=True):
    factor = {True: 1 / (1 - drop_rate), False: 1, "l1": "l1"}[rescale]
    return rescaled(deltas[0], keep_mask("w", deltas[0].size, drop_rate, seed=42), factor)


def darex(deltas, drop_rate, q=0.0, epsilon=0.0, max_variance=np.inf):
    least = math.sqrt(drop_rate * (1 - drop_rate) / max_variance)
    divisor = max(q, 1 - drop_rate + epsilon, least)
    return rescaled(deltas[0], keep_mask("w", deltas[0].size, drop_rate, seed=42), 1 / divisor)


def della_keeps(delta, drop_rate, window):
    """Which elements are kept, their numbers being below their thresholds, and the rates."""
    rows = np.atleast_1d(delta)
    columns = rows.shape[-1]
    ranks = np.empty(rows.shape, np.int64)
    places = np.broadcast_to(np.arange(columns)[::-1], rows.shape)
    np.put_along_axis(ranks, largest_first(np.abs(rows)), places, -1)
    spread = ranks / (columns - 1) if columns > 1 else 0.5
    rates = (1 - drop_rate + window * (spread - 0.5) * np.ones(rows.shape)).reshape(delta.shape)
    return numbers_of_the_mask(delta.shape) < np.rint(rates * 2.0**40).astype(np.uint64), rates


def della(deltas, drop_rate, window, rescale=True):
    (delta,) = deltas
    keep, rates = della_keeps(delta, drop_rate, window)
    if rescale is True:
        return np.where(keep, delta / rates, 0)
    return rescaled(delta, keep, rescale or 1)


def nm(deltas, n, m, choose, rescale):
    (delta,) = deltas
    keys = np.abs(delta)
    if choose == "random":
        keys = -numbers_of_the_mask(delta.shape).astype(np.float64)
    keep = np.zeros(delta.shape, bool)
    for first in range(0, delta.shape[-1], m):
        group = keys[..., first : first + m]
        order = largest_first(group)[..., : -(-n * group.shape[-1] // m)]
        np.put_along_axis(keep[..., first : first + m], order, True, -1)
    return np.where(keep, delta * np.float32(m / n if rescale else 1), 0)


def cabs(deltas, n, m):
    """Group by group, model by model."""
    total = np.zeros(deltas[0].size, np.float32)
    for first in range(0, total.size, m):
        group = slice(first, first + m)
        size = total[group].size
        taken = np.zeros(size, bool)
        for delta in deltas:
            order = sorted(range(size), key=lambda i: (taken[i], -abs(delta[first + i]), i))
            chosen = order[: -(-n * size // m)]
            total[group][chosen] += delta[first:][chosen]
            taken[chosen] = True
    return total
