"""Core Space (arXiv:2509.17786): adapters as small matrices in the one space that all of them span.

U has the left singular vectors of [B₁ … Bₙ], V the right ones of [A₁; …; Aₙ], and Bᵢ·Aᵢ is U·Mᵢ·V
with Mᵢ = Uᵀ·Bᵢ·Aᵢ·Vᵀ. Nothing is lost, Mᵢ has no more rows and columns than the ranks add up to,
and any stage that needs no base merges the Mᵢ. Whole matrices are never formed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from dare.inputs.sources import Raw, SourceView
from dare.kernels.linalg import Doubles
from dare.lora.reading import AdapterFile, LoraModule
from dare.lora.svd import Floats, LowRank, Wanted, check_finite, truncate_core


@dataclass(frozen=True)
class Core:
    """The space of one module, and the adapters' matrices in it; all are stacks, by expert."""

    left: Doubles  # experts × rows × p
    right: Doubles  # experts × q × columns
    matrices: Mapping[int, Floats]  # experts × p × q, by the adapter's number

    def expand(self, merged: Floats, wanted: Wanted | None, where: str) -> Iterator[LowRank]:
        """Yield each expert's factors of the change that a merged matrix stands for."""
        shape = len(self.left), self.left.shape[2], self.right.shape[1]
        cores = merged.reshape(shape).astype(np.float64)
        check_finite(cores, where=where)
        wanted = wanted or Wanted(rank=max(1, cores.size))
        for left, core, right in zip(self.left, cores, self.right, strict=True):
            yield truncate_core(left, core, right, wanted)


def _find_core(factors: Mapping[int, tuple[Floats, Floats, float]], where: str) -> Core:
    """Find the space of a module from each adapter's lora_A, lora_B and scaling."""
    check_finite(*(factor for *pair, _ in factors.values() for factor in pair), where=where)
    downs = [down.astype(np.float64) for down, _, _ in factors.values()]
    ups = [up.astype(np.float64) for _, up, _ in factors.values()]
    left = np.linalg.svd(np.concatenate(ups, axis=2), full_matrices=False)[0]
    right = np.linalg.svd(np.concatenate(downs, axis=1), full_matrices=False)[2]
    inward, outward = left.transpose(0, 2, 1), right.transpose(0, 2, 1)
    with np.errstate(over="ignore"):  # what is too large for float32 is refused later
        matrices = {
            number: (scaling * (inward @ up) @ (down @ outward)).astype(np.float32)
            for (number, (*_, scaling)), down, up in zip(factors.items(), downs, ups, strict=True)
        }
    return Core(left, right, matrices)


FindCore = Callable[[LoraModule], Core]


def keep_last(adapters: Sequence[AdapterFile]) -> FindCore:
    """Return a search for the core space of modules; it keeps the last one that it found."""

    @lru_cache(maxsize=1)
    def find(module: LoraModule) -> Core:
        pairs = zip(module.owners, module.pairs, strict=True)
        factors = {n: (*adapters[n].read_pair(module.name), pair.scaling) for n, pair in pairs}
        return _find_core(factors, module.name)

    return find


def core_bytes(module: LoraModule) -> int:
    """Estimate the memory of finding the space of a module: factors and vectors, each twice."""
    rank = sum(module.ranks)
    one = 4 * 8 * rank * sum(module.shape) + 16 * len(module.ranks) * rank**2
    return module.experts * one


class CoreSource(SourceView):
    """An adapter whose modules are presented as their matrices in the core space."""

    def __init__(
        self,
        number: int,
        adapters: Sequence[AdapterFile],
        modules: Sequence[LoraModule],
        find: FindCore,
    ) -> None:
        adapter = adapters[number]
        self._modules = {m.tensor: m for m in modules if number in m.owners}
        self._number, self._find = number, find
        tensors = {f"{name}.bias": adapter.tensors[f"{name}.bias"] for name in adapter.biases}
        for name, module in self._modules.items():
            tensors[name] = replace(adapter.tensors[name], shape=module.core_shape)
        super().__init__(adapter, tensors, computed=self._modules, opened=adapters)
        most = max(map(core_bytes, modules)) // len(adapters)  # one finds it for all
        self.cost = self.cost.with_reading(most)

    def compute(self, name: str, start: int, into: Raw) -> None:
        matrix = self._find(self._modules[name]).matrices[self._number]
        into[:] = matrix.reshape(-1)[start : start + into.size]
