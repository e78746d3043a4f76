"""Models that spoil a merge, made of the demonstration's: to show the symptoms, and what is found.

- `base-permuted` computes what the base computes, but its inner units stand in another order: what
  any other training run would have given. A fine-tune of the base is none of this one.
- `add-nan` is the fine-tune `add` with one weight that is not a number.
- `add-far` is `add` with 30 times its change, as after training that went on and on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from dare.demo.llama import Floats, read_weights
from dare.demo.merges import BASE, TUNED
from dare.errors import OutputError
from dare.inputs.sources import open_source

WEIGHTS = "model.safetensors"
TIMES_TOO_FAR = 30
PERMUTATION_SEED = 1
NAN_AT = ("model.layers.2.mlp.up_proj.weight", 5000)
"""The tensor and the element that is not a number."""

Weights = dict[str, Floats]


def permuted_base() -> Weights:
    """The base with the inner units of every layer in another order: the same function."""
    weights = read_weights(BASE)
    order = np.random.default_rng(PERMUTATION_SEED)
    for name, rows in weights.items():
        if name.endswith("mlp.gate_proj.weight"):
            layer = name.removesuffix("gate_proj.weight")
            units = order.permutation(len(rows))
            weights[name] = rows[units]
            weights[f"{layer}up_proj.weight"] = weights[f"{layer}up_proj.weight"][units]
            weights[f"{layer}down_proj.weight"] = weights[f"{layer}down_proj.weight"][:, units]
    return weights


def add_with_nan() -> Weights:
    """The fine-tune with one weight that is not a number."""
    weights = read_weights(TUNED["add"])
    name, element = NAN_AT
    weights[name].reshape(-1)[element] = np.nan
    return weights


def add_too_far() -> Weights:
    """The fine-tune with many times its change."""
    base, tuned = read_weights(BASE), read_weights(TUNED["add"])
    return {name: base[name] + TIMES_TOO_FAR * (tuned[name] - base[name]) for name in base}


BROKEN: Mapping[str, Callable[[], Weights]] = {
    "base-permuted": permuted_base,
    "add-nan": add_with_nan,
    "add-far": add_too_far,
}


def broken_model(name: str) -> bytes:
    """One of them as a safetensors file, laid out as the base's."""
    file = bytearray((BASE / WEIGHTS).read_bytes())
    with open_source(BASE) as source:
        for tensor, values in BROKEN[name]().items():
            info = source.tensors[tensor]
            start = info.position(0)
            file[start : start + info.nbytes] = values.astype(info.dtype.numpy_type).tobytes()
    return bytes(file)


def write_models(folder: Path) -> list[str]:
    """Write the demonstration's models into a folder, a directory each, the broken ones too.

    Files that are there already must be the same.
    """
    homes = {"base": BASE, **TUNED, **dict.fromkeys(BROKEN, BASE)}
    for name, home in homes.items():
        for file in home.iterdir():
            is_broken = name in BROKEN and file.name == WEIGHTS
            content = broken_model(name) if is_broken else file.read_bytes()
            write_once(folder / name / file.name, content)
    return list(homes)


def write_once(path: Path, content: bytes) -> None:
    """Write a file that is not there yet, or is the same."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            path.write_bytes(content)
        elif path.read_bytes() != content:
            raise OutputError(
                f"{path}: exists already with other contents; write the models into an empty folder"
            )
    except OSError as error:
        raise OutputError(f"{path}: cannot be written: {error.strerror or error}") from None
