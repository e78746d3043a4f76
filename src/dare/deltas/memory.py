"""The memory of a live model: what lies where, read and written in place.

A model is a torch module, or a dict of torch tensors or NumPy arrays. torch is not imported here:
whoever has a tensor has imported it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from dare.errors import InputError
from dare.inputs.arrays import is_torch, plain_array
from dare.inputs.delta_files import U8
from dare.inputs.names import match_names
from dare.inputs.sources import Raw, Source
from dare.inputs.views import RenamedSource
from dare.tensors.dtypes import StorageType
from dare.tensors.header import TensorInfo


class Memory(Protocol):
    """The elements of a tensor, as carriers of their type."""

    @property
    def where(self) -> Any:
        """By which two names of one tensor are known."""

    def read(self, start: int, count: int) -> Raw:
        """So many elements from one on, or a copy of them."""

    def write(self, start: int, raw: Raw) -> None:
        """Put elements there from one on, unless they are what was read there without a copy."""


@dataclass(frozen=True)
class Flat:
    """Elements that follow each other in memory: they are changed where they are."""

    array: Raw

    @property
    def where(self) -> Any:
        return self.array.ctypes.data, self.array.strides

    def read(self, start: int, count: int) -> Raw:
        return self.array[start : start + count]

    def write(self, start: int, raw: Raw) -> None:
        place = self.array[start : start + raw.size]
        if not np.may_share_memory(place, raw):
            place[:] = raw


@dataclass(frozen=True)
class Strided:
    """Elements in any order in memory."""

    array: Raw

    @property
    def where(self) -> Any:
        return self.array.ctypes.data, self.array.strides

    def read(self, start: int, count: int) -> Raw:
        return self.array.flat[start : start + count]

    def write(self, start: int, raw: Raw) -> None:
        self.array.flat[start : start + raw.size] = raw


@dataclass(frozen=True)
class OnDevice:
    """A flat torch tensor of whole numbers on any device."""

    tensor: Any
    carrier: np.dtype[np.generic]

    @property
    def where(self) -> Any:
        return str(self.tensor.device), self.tensor.data_ptr()

    def read(self, start: int, count: int) -> Raw:
        found: Raw = self.tensor[start : start + count].cpu().numpy().view(self.carrier)
        return found

    def write(self, start: int, raw: Raw) -> None:
        torch = sys.modules["torch"]
        whole = torch.from_numpy(raw.view(f"i{raw.itemsize}"))
        self.tensor[start : start + raw.size].copy_(whole)


def memory_of(array: Any, name: str) -> tuple[StorageType, tuple[int, ...], Memory]:
    """Storage type, shape and elements of an array, which can be written to."""
    kind, plain = plain_array(array, name, in_place=True)
    shape = tuple(plain.shape)
    if not is_torch(plain):
        if not plain.flags.writeable:
            raise InputError(f"{name}: the array is read-only; give a copy that can be written")
        elements = plain.view(kind.carrier)
    else:
        torch = sys.modules["torch"]
        tensor = plain.view(getattr(torch, f"int{8 * kind.itemsize}"))
        if plain.device.type != "cpu":
            if not tensor.is_contiguous():
                raise InputError(
                    f"{name}: is not contiguous on {plain.device}; call .contiguous() first"
                )
            return kind, shape, OnDevice(tensor.view(-1), kind.carrier)
        elements = tensor.numpy().view(kind.carrier)
    is_flat = elements.flags.c_contiguous
    return kind, shape, Flat(elements.reshape(-1)) if is_flat else Strided(elements)


def arrays_of(model: Any) -> dict[str, Any]:
    """The parameters and buffers of a torch module by name, or the arrays of a dict."""
    if hasattr(model, "named_parameters"):  # its state_dict may hold copies
        named = (model.named_parameters, model.named_buffers)
        return {name: tensor for each in named for name, tensor in each(remove_duplicate=False)}
    if not isinstance(model, Mapping):
        raise InputError(f"expected a torch module or a dict of arrays, found {type(model)}")
    return {n: a for n, a in model.items() if is_torch(a) or isinstance(a, np.ndarray)}


def names_in(arrays: Iterable[str], stored: Iterable[str]) -> Mapping[str, str]:
    """The model's names of stored tensors, which may have a prefix."""
    sides = (_bare_source(stored), _bare_source(arrays))
    matched = match_names(*sides, "model", base_config={}, model_config={}).source
    if isinstance(matched, RenamedSource):
        return matched.names
    return {name: name for name in matched.tensors}


def _bare_source(names: Iterable[str]) -> Source:
    """A source of which nothing but the names of its tensors is of interest."""
    source = Source()
    source.tensors = {name: TensorInfo(name, U8, (), 0) for name in names}
    return source
