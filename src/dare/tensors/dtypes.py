"""The storage types of safetensors: one table, used by every reader, writer and kernel.

Weights are decoded to float32 and encoded back with one rounding. The kernels see raw bytes as an
array of the type's *carrier*, a NumPy dtype that is different for every weight type, so that a
kernel is chosen by the array it is given and needs no further tag (BF16 travels as uint16, F16 as
int16, and so on; the carrier says nothing about the values).
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from importlib.resources import files
from typing import Any

import ml_dtypes
import numpy as np

from dare.errors import RecipeError, did_you_mean

# Types that quantised weights are stored in. Positions and indices of other models are I64.
CODE_TYPES = ("U8", "I8", "U16", "I16", "U32", "I32", "F8_E4M3", "F8_E5M2")


@dataclass(frozen=True)
class StorageType:
    """A storage type of safetensors.

    >>> kind = STORAGE_TYPES["BF16"]
    >>> kind.itemsize, kind.torch_name, kind.mantissa_bits
    (2, 'bfloat16', 7)
    """

    name: str
    numpy_type: np.dtype[np.generic]
    carrier: np.dtype[np.generic]
    is_weight: bool = False
    mantissa_bits: int = 0  # bits of a weight's fraction, the leading one not counted
    # Bit pattern of the smallest float32 magnitude that does not encode to a finite value.
    overflow_bits: int = 0x7F800000
    # Bits of an element that shares bytes; such tensors are handled byte by byte.
    packed_bits: int | Fraction = 0
    itemsize: int = field(init=False)  # bytes of an element, or 1 if elements share bytes

    def __post_init__(self) -> None:
        """Fill in what follows from the rest."""
        object.__setattr__(self, "itemsize", self.carrier.itemsize)

    @property
    def torch_name(self) -> str:
        """The name in torch and NumPy."""
        return self.numpy_type.name


def _storage_type(name: str, own: Mapping[str, Any]) -> StorageType:
    numpy_type = np.dtype(getattr(ml_dtypes, own["numpy_type"], own["numpy_type"]))
    carrier = np.dtype(own.get("carrier", f"u{numpy_type.itemsize}"))
    types = {"numpy_type": numpy_type, "carrier": carrier}
    return StorageType(name, is_weight="carrier" in own, **{**own, **types})


_TABLE = tomllib.loads(files("dare.tensors").joinpath("dtypes.toml").read_text("utf-8"))
STORAGE_TYPES = {name: _storage_type(name, own) for name, own in _TABLE.items()}

WEIGHT_TYPES = tuple(kind for kind in STORAGE_TYPES.values() if kind.is_weight)
# Types that a model can have as a whole; transformers cannot build one in float8.
MODEL_TYPES = tuple(kind for kind in WEIGHT_TYPES if kind.itemsize > 1)
BY_TORCH_NAME = {kind.torch_name: kind for kind in STORAGE_TYPES.values() if not kind.packed_bits}

_SPELLINGS = {"double": "F64", "float": "F32", "fp32": "F32", "half": "F16", "fp16": "F16"}
_SPELLINGS |= {kind.torch_name: kind.name for kind in WEIGHT_TYPES}


def weight_type(name: object) -> StorageType:
    """Look a weight type up by any name people use: `BF16`, `bfloat16`, `torch.bfloat16`.

    >>> weight_type("bfloat16").name, weight_type("f16").name
    ('BF16', 'F16')
    """
    word = str(name).removeprefix("torch.")
    kind = STORAGE_TYPES.get(_SPELLINGS.get(word.lower(), word.upper()))
    if kind is None or not kind.is_weight:
        known = [weight.name for weight in WEIGHT_TYPES]
        hint = did_you_mean(word, [*known, *_SPELLINGS])
        raise RecipeError(f"dtype {name!s}: not a weight type{hint}; use one of {', '.join(known)}")
    return kind
