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
    """Groups of 256 within a chunk's kept values; returns the values read back."""
    n = v.size
    groups = -(-n // GROUP)
    x = np.zeros(groups * GROUP, np.float32)
    x[:n] = v
    x = x.reshape(groups, GROUP)
    m = np.zeros(groups * GROUP, np.float32)
    m[:n] = 1
    m = m.reshape(groups, GROUP)
    if bits == 1:
        c = np.where(x < 0, -1, 1)
        s = to_bf16(np.abs(x).sum(1) / m.sum(1))[:, None]
        y = c * s
    else:
        top = 2 ** bits - 1  # odd levels -top … top, midrise
        absmax = np.abs(x).max(1)
        best, best_err = absmax / top, np.full(groups, np.inf)
        for share in ((1.0,) if bits == 8 else np.linspace(0.3, 1.0, 15)):
            s = to_bf16(absmax * share / top)[:, None]
            safe = np.where(s > 0, s, 1)
            q = np.clip(2 * np.floor(x / safe / 2) + 1, -top, top)
            err = (((q * s - x) * m) ** 2).sum(1)
            better = err < best_err
            best, best_err = np.where(better, s[:, 0], best), np.minimum(err, best_err)
        s = best[:, None]
        safe = np.where(s > 0, s, 1)
        c = np.clip(2 * np.floor(x / safe / 2) + 1, -top, top)
        y = c * s
    if unbiased:
        s = to_bf16((x**2).sum(1) / np.maximum((x * c).sum(1), 1e-30))[:, None]
        y = c * s
    return y.reshape(-1)[:n], n * bits / 8 + groups * 2


def entropy(k, n):
    p = k / n
    return 0.0 if p in (0, 1) else n * (-p * np.log2(p) - (1 - p) * np.log2(1 - p)) / 8


def simulate(base, model, output, drop_rate, bits, seed, keep="random", rescale=False, scale=1.0, unbiased=False):
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
