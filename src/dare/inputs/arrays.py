"""Arrays of NumPy and torch as stored bytes, and back.

torch is never imported here: only a caller who has imported it can pass a torch tensor.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, Protocol, TypeGuard

import numpy as np
from numpy.typing import NDArray

from dare.errors import InputError
from dare.inputs.sources import ArraySource, TensorOnGpu
from dare.tensors.dtypes import BY_TORCH_NAME, StorageType
from dare.tensors.header import TensorInfo


class TorchModule(Protocol):
    """The part of a torch module that is needed here."""

    def state_dict(self) -> Mapping[str, Any]:
        """Return its tensors by name."""


Arrays = Mapping[str, Any] | TorchModule


def array_source(arrays: Arrays, label: str) -> ArraySource:
    """Present a dict of arrays, or a torch module, as a source. Tensors on a GPU stay there."""
    plain = {
        name: plain_array(array, f"{label}: {name}")
        for name, array in named_arrays(arrays, label).items()
    }  # held until all places are known: the next copy may reuse the memory of one that is freed
    return ArraySource(
        {n: (kind, tuple(array.shape), _stored(array, kind)) for n, (kind, array) in plain.items()},
        label=label,
        places={name: place_of(array) for name, (_, array) in plain.items()},
    )


def named_arrays(given: Arrays, label: str) -> Mapping[str, Any]:
    """Return a dict of arrays as it is, and a torch module as its `state_dict()`."""
    if is_module(given):
        return given.state_dict()
    if not isinstance(given, Mapping):
        raise InputError(f"{label}: expected a dict of arrays or a torch module, not {type(given)}")
    return given


def plain_array(array: Any, where: str, *, in_place: bool = False) -> tuple[StorageType, Any]:
    """Return the storage type of an array, and the array with its values as they are in memory.

    Every function takes dense arrays of NumPy and torch, of a type that models are stored in.
    Another byte order and conjugate or negative views are converted exactly, but refused if the
    array will be changed `in_place`, because only a copy would change.
    """
    if is_tensor := is_torch(array):
        kind = BY_TORCH_NAME.get(str(array.dtype).removeprefix("torch."))
        is_view = array.is_conj() or array.is_neg()
    elif isinstance(array, np.ndarray | np.generic):
        kind, is_view = BY_TORCH_NAME.get(array.dtype.name), not array.dtype.isnative
    else:
        remedy = "; give torch.from_dlpack(array)" if hasattr(array, "__dlpack__") else ""
        what = f"expected a NumPy array or a torch tensor, found {type(array)}{remedy}"
        raise InputError(f"{where}: {what}")
    if reason := _why_not_plain(array, is_tensor=is_tensor):
        raise InputError(f"{where}: {reason}")
    if kind is None:
        raise InputError(f"{where}: dtype {array.dtype} is not supported; convert it to float32")
    if is_view and in_place:
        raise InputError(f"{where}: is a lazy view or not in native byte order; give a plain copy")
    if is_tensor:
        return kind, array.detach().resolve_conj().resolve_neg() if is_view else array.detach()
    array = np.asarray(array)
    return kind, array.byteswap().view(kind.numpy_type) if is_view else array


def _why_not_plain(array: Any, *, is_tensor: bool) -> str:
    """Say why an array does not hold each value once in memory, and what to do."""
    if not is_tensor:
        is_masked = isinstance(array, np.ma.MaskedArray)
        return "is a masked array, so values are missing; call .filled(…)" if is_masked else ""
    if array.device.type == "meta" or hasattr(array, "fake_mode"):
        return "has no data (a meta or fake tensor); load the weights first"
    if array.is_nested or str(array.layout) != "torch.strided":
        return f"is nested or sparse ({array.layout}); give a dense tensor, such as .to_dense()"
    if hasattr(array, "__tensor_flatten__"):
        return f"is a {type(array).__name__}; give a plain tensor, such as .full_tensor()"
    return ""


def place_of(array: Any) -> tuple[Any, ...]:
    """Return the place of a plain array in memory; two names of one tensor share it."""
    if is_torch(array):
        return array.device, array.data_ptr(), array.dtype, array.shape, array.stride()
    return "cpu", array.ctypes.data, array.dtype, array.shape, array.strides


def stored(array: Any, where: str) -> tuple[StorageType, tuple[int, ...], NDArray[np.uint8]]:
    """Return type, shape and bytes of an array, without a copy where it is contiguous."""
    kind, plain = plain_array(array, where)
    return kind, tuple(plain.shape), _bytes(plain)


def _stored(plain: Any, kind: StorageType) -> NDArray[np.uint8] | TensorOnGpu:
    if (gpu := gpu_of(plain)) is None or not plain.numel():
        return _bytes(plain)
    return TensorOnGpu(gpu, plain.contiguous().reshape(-1), kind.carrier)


def _bytes(plain: Any) -> NDArray[np.uint8]:
    if is_torch(plain):
        plain = plain.cpu().contiguous().reshape(-1).view(sys.modules["torch"].uint8).numpy()
    flat: NDArray[np.uint8] = np.ascontiguousarray(plain).reshape(-1).view(np.uint8)
    return flat


def room_like(original: Any, info: TensorInfo) -> Any:
    """Make an array for a tensor, of the same library and device as `original`."""
    if is_torch(original):
        dtype = getattr(sys.modules["torch"], info.dtype.torch_name)
        return original.new_empty(info.shape, dtype=dtype)
    return np.empty(info.shape, info.dtype.numpy_type)


def like_original(original: Any, info: TensorInfo, raw: NDArray[np.uint8]) -> Any:
    """Turn stored bytes into an array of the same library and device as `original`."""
    if is_torch(original):
        torch = sys.modules["torch"]
        dtype = getattr(torch, info.dtype.torch_name)
        if not raw.size:  # torch views no empty bytes as another type
            return torch.empty(info.shape, dtype=dtype, device=original.device)
        return torch.from_numpy(raw).view(dtype).reshape(info.shape).to(original.device)
    return raw.view(info.dtype.numpy_type).reshape(info.shape)


def as_float64(array: Any, where: str) -> NDArray[np.float64]:
    """Return the values of a NumPy array or a torch tensor of any type, or of nested lists."""
    if isinstance(array, list | tuple):
        try:
            array = np.asarray(array)
        except ValueError as error:
            raise InputError(f"{where}: {error}") from None
    kind, plain = plain_array(array, where)
    if kind.numpy_type.kind == "c":
        raise InputError(f"{where}: dtype {plain.dtype} is not supported; give real numbers")
    values = _bytes(plain).view(kind.numpy_type).astype(np.float64)
    return values.reshape(tuple(plain.shape))


def is_torch(array: Any) -> bool:
    """Return whether this is a torch tensor."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(array, torch.Tensor)


def gpu_of(array: Any) -> int | None:
    """Return the number of the GPU that a torch tensor is on; None if it is on none."""
    is_there = is_torch(array) and array.device.type == "cuda"
    return array.device.index if is_there else None


def is_module(given: Any) -> TypeGuard[TorchModule]:
    """Return whether this is a torch module."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(given, torch.nn.Module)
