"""Delta files in NumPy, before `dare.compress` is there."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from dare.tensors.mask import keep_mask

GROUP, CHUNK = 256, 1 << 19


def load(path):
    return load_file(path / "model.safetensors")


def to_bf16(x):
    return torch.from_numpy(np.asarray(x, np.float32)).to(torch.bfloat16).float().numpy()


def quantise(v, bits, unbiased=False):
    """The package's codes; with its scales or, unbiased, with those that keep <read, v> = <v, v>."""
    from dare.kernels import cpu

    n = v.size
    groups = -(-n // GROUP)
    codes = np.zeros(-(-n * bits // 8), np.uint8)
    scales = np.zeros(groups, np.uint16)
    y = np.empty(n, np.float32)
    v = np.ascontiguousarray(v)
    if n:
        cpu.quantise(v, bits, codes, scales)
        cpu.dequantise(codes, scales, bits, y)
    if unbiased and n:
        starts = np.arange(0, n, GROUP)
        vv = np.add.reduceat(v.astype(np.float64) ** 2, starts)
        vy = np.add.reduceat(v.astype(np.float64) * y, starts)
        old = np.abs((scales.astype(np.uint32) << 16).view(np.float32))
        new = to_bf16(old * np.where(vy > 0, vv / np.where(vy > 0, vy, 1), 1))
        factor = np.where(old > 0, new / np.where(old > 0, old, 1), 1).astype(np.float32)
        y *= np.repeat(factor, GROUP)[:n]
    return y, n * bits / 8 + groups * 2


def entropy(k, n):
    p = k / n
    return 0.0 if p in (0, 1) else n * (-p * np.log2(p) - (1 - p) * np.log2(1 - p)) / 8


def simulate(
    base,
    model,
    output,
    drop_rate,
    bits,
    seed,
    keep="random",
    rescale=False,
    scale=1.0,
    unbiased=False,
):
    """Bytes that values, scales and places would take; writes the restored model."""
    a, b = load(base), load(model)
    total, out = 0.0, {}
    for name in a:
        if not a[name].is_floating_point() or torch.equal(a[name], b[name]):
            out[name] = b[name]
            continue
        x, y = a[name].float().numpy().ravel(), b[name].float().numpy().ravel()
        d = y - x
        new = x.copy()
        if keep == "magnitude":
            k = round(d.size * (1 - drop_rate))
            threshold = np.partition(np.abs(d), d.size - k)[d.size - k] if k else np.inf
            whole = np.abs(d) >= threshold
            total += entropy(k, d.size)
            factor = 1.0
            if rescale:
                factor = float((d**2).sum() / max((d[whole] ** 2).sum(), 1e-30)) ** rescale
        else:
            factor = scale / (1 - drop_rate)
        for start in range(0, d.size, CHUNK):
            part = d[start : start + CHUNK]
            kept = (
                whole[start : start + CHUNK]
                if keep == "magnitude"
                else keep_mask(name, part.size, drop_rate, seed, start)
            )
            v = part[kept]
            if bits == "native":
                size = 2 * v.size
            else:
                v, size = quantise(v, bits, unbiased)
            total += size
            new[start : start + CHUNK][kept] += np.float32(factor) * v
        out[name] = torch.from_numpy(new).reshape(a[name].shape).to(b[name].dtype)
    save_file(out, output)
    return total
