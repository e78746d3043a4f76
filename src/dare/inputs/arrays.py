"""Arrays of NumPy and torch as stored bytes, and back.

torch is imported only if a torch tensor is handed in, so only if the caller has imported it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dare.errors import InputError
from dare.inputs.sources import ArraySource
from dare.tensors.dtypes import BY_TORCH_NAME, StorageType
from dare.tensors.header import TensorInfo


def array_source(arrays: Mapping[str, Any], label: str) -> ArraySource:
    """Present a dict of arrays as a source."""
    return ArraySource(
        {name: stored(array, f"{label}: {name}") for name, array in arrays.items()},
        label=label,
        places={name: _place(array) for name, array in arrays.items()},
    )


def _place(array: Any) -> tuple[Any, ...] | None:
    """Where an array lies in memory, and how; None for a single number, which has no place."""
    if isinstance(array, np.generic):
        return None
    if is_torch(array):
        return str(array.device), array.data_ptr(), tuple(array.stride())
    return array.__array_interface__["data"][0], array.strides


def stored(array: Any, where: str) -> tuple[StorageType, tuple[int, ...], NDArray[np.uint8]]:
    """Storage type, shape and bytes of an array, without a copy where it is contiguous."""
    if is_torch(array):
        torch = sys.modules["torch"]
        kind = BY_TORCH_NAME.get(str(array.dtype).removeprefix("torch."))
        flat = array.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    elif isinstance(array, np.ndarray | np.generic):
        kind = BY_TORCH_NAME.get(array.dtype.name)
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
        dtype = getattr(torch, info.dtype.torch_name)
        if not raw.size:  # torch views no empty bytes as another type
            return torch.empty(info.shape, dtype=dtype, device=original.device)
        return torch.from_numpy(raw).view(dtype).reshape(info.shape).to(original.device)
    return raw.view(info.dtype.numpy_type).reshape(info.shape)


def as_float64(array: Any) -> NDArray[np.float64]:
    """The values of a NumPy array or a torch tensor of any type, or of nested lists."""
    if is_torch(array):
        array = array.detach().to("cpu", sys.modules["torch"].float64).numpy()
    return np.asarray(array, np.float64)


def is_torch(array: Any) -> bool:
    """Say whether this is a torch tensor."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(array, torch.Tensor)
