"""The storage types of safetensors: one table, used by every reader, writer and kernel.

Weights are decoded to float32 and encoded back with one rounding. The kernels see raw bytes as an
array of the type's *carrier*, a NumPy dtype that is different for every weight type, so that a
kernel is chosen by the array it is given and needs no further tag (BF16 travels as uint16, F16 as
int16, and so on; the carrier says nothing about the values).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dare.errors import RecipeError, did_you_mean


@dataclass(frozen=True)
class StorageType:
    """How one safetensors type lies in a file.

    >>> STORAGE_TYPES["BF16"].itemsize
    2
    """

    name: str
    itemsize: int
    carrier: np.dtype[np.generic]
    is_weight: bool = False
    overflow_bits: int = 0x7F800000
    """Bit pattern of the smallest float32 magnitude that does not encode to a finite value."""


def _weight(name: str, carrier: str, overflow_bits: int = 0x7F800000) -> StorageType:
    dtype: np.dtype[np.generic] = np.dtype(carrier)
    return StorageType(name, dtype.itemsize, dtype, is_weight=True, overflow_bits=overflow_bits)


def _copied(name: str, carrier: str) -> StorageType:
    dtype: np.dtype[np.generic] = np.dtype(carrier)
    return StorageType(name, dtype.itemsize, dtype)


STORAGE_TYPES: dict[str, StorageType] = {
    kind.name: kind
    for kind in (
        _weight("F64", "float64"),
        _weight("F32", "float32"),
        _weight("F16", "int16", overflow_bits=0x477FF000),  # 65520
        _weight("BF16", "uint16", overflow_bits=0x7F7F8000),  # 3.396e38
        _weight("F8_E4M3", "uint8", overflow_bits=0x43E80001),  # just above 464; becomes NaN
        _weight("F8_E5M2", "int8", overflow_bits=0x47700000),  # 61440
        _copied("BOOL", "uint8"),
        _copied("U8", "uint8"),
        _copied("I8", "uint8"),
        _copied("U16", "uint16"),
        _copied("I16", "uint16"),
        _copied("U32", "uint32"),
        _copied("I32", "uint32"),
        _copied("U64", "uint64"),
        _copied("I64", "uint64"),
        _copied("F8_E8M0", "uint8"),
        _copied("C64", "uint64"),
    )
}
"""Weights take part in merging; all other types are copied from the base."""

_SPELLINGS = {
    "float64": "F64",
    "double": "F64",
    "float32": "F32",
    "float": "F32",
    "fp32": "F32",
    "float16": "F16",
    "half": "F16",
    "fp16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}


def weight_type(name: object) -> StorageType:
    """Look a weight type up by any name people use: `BF16`, `bfloat16`, `torch.bfloat16`.

    >>> weight_type("bfloat16").name, weight_type("f16").name
    ('BF16', 'F16')
    """
    word = str(name).removeprefix("torch.")
    kind = STORAGE_TYPES.get(_SPELLINGS.get(word.lower(), word.upper()))
    if kind is None or not kind.is_weight:
        known = [k.name for k in STORAGE_TYPES.values() if k.is_weight]
        hint = did_you_mean(word, [*known, *_SPELLINGS])
        raise RecipeError(f"dtype {name!s}: not a weight type{hint}; use one of {', '.join(known)}")
    return kind
