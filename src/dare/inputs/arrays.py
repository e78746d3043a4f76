"""Arrays of NumPy and torch as stored bytes, and back.

torch is imported only if a torch tensor is handed in, so only if the caller has imported it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from dare.errors import InputError
from dare.inputs.sources import ArraySource
from dare.tensors.dtypes import STORAGE_TYPES, StorageType
from dare.tensors.header import TensorInfo

_NUMPY_TYPES: dict[str, Any] = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "BOOL": np.bool_,
    "U8": np.uint8,
    "I8": np.int8,
    "U16": np.uint16,
    "I16": np.int16,
    "U32": np.uint32,
    "I32": np.int32,
    "U64": np.uint64,
    "I64": np.int64,
    "C64": np.complex64,
}
_BY_NUMPY_NAME = {np.dtype(kind).name: STORAGE_TYPES[name] for name, kind in _NUMPY_TYPES.items()}


def array_source(arrays: Mapping[str, Any], label: str) -> ArraySource:
    """Present a dict of arrays as a source."""
    return ArraySource({name: stored(array, f"{label}: {name}") for name, array in arrays.items()})


def stored(array: Any, where: str) -> tuple[StorageType, tuple[int, ...], NDArray[np.uint8]]:
    """Storage type, shape and bytes of an array, without a copy where it is contiguous."""
    if is_torch(array):
        torch = sys.modules["torch"]
        kind = _BY_NUMPY_NAME.get(str(array.dtype).removeprefix("torch."))
        flat = array.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    elif isinstance(array, np.ndarray | np.generic):
        kind = _BY_NUMPY_NAME.get(array.dtype.name)
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    else:
        raise InputError(f"{where}: expected a NumPy array or a torch tensor, found {type(array)}")
    if kind is None:
        raise InputError(f"{where}: arrays of {array.dtype} cannot be merged")
    return kind, tuple(array.shape), flat


def like_original(original: Any, info: TensorInfo, raw: NDArray[np.uint8]) -> Any:
    """Turn stored bytes into an array of the same library and device as `original`."""
    if is_torch(original):
        torch = sys.modules["torch"]
        dtype = getattr(torch, np.dtype(_NUMPY_TYPES[info.dtype.name]).name)
        if not raw.size:  # torch views no empty bytes as another type
            return torch.empty(info.shape, dtype=dtype, device=original.device)
        return torch.from_numpy(raw).view(dtype).reshape(info.shape).to(original.device)
    return raw.view(_NUMPY_TYPES[info.dtype.name]).reshape(info.shape)


def as_float64(array: Any) -> NDArray[np.float64]:
    """The values of a NumPy array or a torch tensor of any type, or of nested lists."""
    if is_torch(array):
        array = array.detach().to("cpu", sys.modules["torch"].float64).numpy()
    return np.asarray(array, np.float64)


def is_torch(array: Any) -> bool:
    """Say whether this is a torch tensor."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(array, torch.Tensor)
