"""Adapters of PEFT that are not LoRA: what their tensors are, and the change of each layer.

AdaLoRA: ΔW = s·B·diag(E)·A. LoHa: ΔW = s·(A₁·B₁) ∘ (A₂·B₂). LoKr: ΔW = s·W₁ ⊗ W₂, of matrices or
their factors. VeRA: ΔW = diag(b)·B·diag(d)·A, where all layers share A and B. IA³ multiplies the
base's outputs or inputs. Each is what PEFT's `get_delta_weight` or `merge` computes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from dare.inputs.adapter_tensors import (
    Computed,
    FactorView,
    HadamardProduct,
    KernelProduct,
    KroneckerProduct,
    Product,
    ScaledRows,
    ScaledWeights,
)

Shape = tuple[int, ...]

SHARED = "base_model"  # the module that VeRA's shared matrices are stored for
NEED_BASE = ("IA3", "VERA")  # kinds that do not say how large a layer is


@dataclass(frozen=True)
class AdaptedLayer:
    """A layer that an adapter changes. Methods raise ValueError or KeyError for unfit parts."""

    name: str
    keys: Mapping[str, str]  # the stored tensors, by the kind's names of them
    stored: FactorView
    rank: float
    scale: float
    is_transposed: bool  # True if the base stores inputs × outputs
    shape: Shape  # of the base's weight; empty if that is not known

    def change(self, kind: str) -> tuple[Shape, Computed]:
        """Return the shape and the change of the weight, for any kind but IA³."""
        makers = {"ADALORA": self._adalora, "LOHA": self._loha, "LOKR": self._lokr}
        shape, change = makers.get(kind, self._vera)()
        fits = len(self.shape) > 2 and math.prod(self.shape) == math.prod(shape)
        return self.shape if fits and self.shape[0] == shape[0] else shape, change

    def multiplied(self, *, by_input: bool) -> ScaledWeights:
        """Return IA³'s weights: those of each output, or of each input, times a number."""
        axis = int(by_input != (self.is_transposed and len(self.shape) == 2))
        key, count = self.keys["ia3_l"], self.shape[axis]
        numbers = self.stored.tensors[key].elements
        groups = numbers // count
        has_groups = axis == 1 and len(self.shape) > 2 and self.shape[0] % max(1, groups) == 0
        _check(numbers == groups * count and (groups == 1 or (groups > 0 and has_groups)))
        size = math.prod(self.shape) // groups
        return ScaledWeights(key, math.prod(self.shape[axis + 1 :]), count, size)

    def _shape_of(self, part: str) -> Shape:
        return self.stored.tensors[self.keys[part]].shape

    def _adalora(self) -> tuple[Shape, Computed]:
        (rank, columns), (_, width) = self._shape_of("lora_A"), self._shape_of("lora_B")
        _check(rank == self.rank == width and self._shape_of("lora_E") == (rank, 1))
        scaled = ScaledRows(self.keys["lora_A"], self.keys["lora_E"], columns)
        down = self.stored.make(f"{self.name}.E·A", (rank, columns), scaled)
        return self._product(self.keys["lora_B"], down)

    def _vera(self) -> tuple[Shape, Computed]:
        outputs, inputs = self.shape[::-1] if self.is_transposed else self.shape
        (rank, columns), (rows, width) = self._shape_of("vera_A"), self._shape_of("vera_B")
        _check(rank == self.rank == width and inputs <= columns and outputs <= rows)
        _check(self._shape_of("vera_lambda_b") == (outputs,))
        _check(self._shape_of("vera_lambda_d") == (rank,))
        left = ScaledRows(self.keys["vera_B"], self.keys["vera_lambda_b"], rank)
        right = ScaledRows(self.keys["vera_A"], self.keys["vera_lambda_d"], inputs)
        up = self.stored.make(f"{self.name}.b·B", (outputs, rank), left)
        return self._product(up, self.stored.make(f"{self.name}.d·A", (rank, inputs), right))

    def _product(self, up: str, down: str) -> tuple[Shape, Computed]:
        left, right = (down, up) if self.is_transposed else (up, down)
        product = Product(left, right, self.is_transposed, self.scale)
        rows, _, columns = product.sides(self.stored)
        return (rows, columns), product

    def _loha(self) -> tuple[Shape, Computed]:
        left, shape = self._matrix("hada_w1", "hada_t1")
        right, other_shape = self._matrix("hada_w2", "hada_t2")
        _check(shape == other_shape)
        return shape, HadamardProduct(left, right, self.scale)

    def _lokr(self) -> tuple[Shape, Computed]:
        left, (rows, columns) = self._matrix("lokr_w1")
        right, (height, width, *kernel) = self._matrix("lokr_w2", "lokr_t2")
        sides = 1, rows, height, columns, width * math.prod(kernel)
        if len(kernel) == 1:  # PEFT lets the left matrix act on the last two of three dimensions
            sides = height, rows, width, columns, kernel[0]
        _check(min(sides) > 0)
        shape = rows * height, columns * width, *kernel
        return shape, KroneckerProduct(left, right, self.scale, *sides)

    def _matrix(self, name: str, kernel: str = "") -> tuple[str, Shape]:
        """Return a matrix, stored or made of its factors, and its shape with that of a kernel."""
        if name in self.keys:
            return self.keys[name], self._shape_of(name)
        one, other = f"{name}_a", f"{name}_b"
        (rows, width), (rank, columns) = self._shape_of(one), self._shape_of(other)
        shape: Shape = rows, columns
        made: Computed = Product(self.keys[one], self.keys[other], False, 1.0)
        if kernel in self.keys:
            *ranks, tall, wide = self._shape_of(kernel)
            _check(ranks == [rank, rows])
            rows, width, shape = width, rows, (width, columns, tall, wide)
            made = KernelProduct((self.keys[kernel], self.keys[one], self.keys[other]))
        _check(rank == self.rank == width)
        return self.stored.make(f"{self.name}.{name}", shape, made), shape


def _check(fits: bool) -> None:
    if not fits:
        raise ValueError("the parts do not fit")
