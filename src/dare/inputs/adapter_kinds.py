"""Adapters of PEFT that are not LoRA: what their tensors are, and the change of each layer.

AdaLoRA: ΔW = s·B·diag(E)·A. LoHa: ΔW = s·(A₁·B₁) ∘ (A₂·B₂). LoKr: ΔW = s·W₁ ⊗ W₂, of matrices or
their factors. VeRA: ΔW = diag(b)·B·diag(d)·A, where all layers share A and B. IA³ multiplies the
base's outputs or inputs. Each is what PEFT's `get_delta_weight` or `merge` computes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from dare.inputs.adapter_tensors import (
    Change,
    FactorView,
    HadamardProduct,
    KernelFactor,
    KroneckerProduct,
    Product,
    ScaledRows,
    ScaledWeights,
    StoredMatrix,
)

Shape = tuple[int, ...]

_PARTS = {
    "ADALORA": r"lora_[ABE]",
    "LOHA": r"hada_(?:w[12]_[ab]|t[12])",
    "LOKR": r"lokr_(?:w[12](?:_[ab])?|t2)",
    "IA3": r"ia3_l",
    "VERA": r"vera_lambda_[bd]|vera_[AB]",
}
PARTS = {k: re.compile(rf"^(.*)\.({part})(?:\.[^.]+)?$") for k, part in _PARTS.items()}
SHARED = "base_model"  # the module that VeRA's shared matrices are stored for
NEED_BASE = ("IA3", "VERA")  # kinds that do not say how large a layer is


@dataclass(frozen=True)
class Layer:
    """A layer that an adapter changes. Methods raise ValueError or KeyError for unfit parts."""

    name: str
    keys: Mapping[str, str]  # the stored tensors, by the kind's names of them
    stored: FactorView
    rank: float
    scale: float
    is_transposed: bool  # True if the base stores inputs × outputs
    shape: Shape  # of the base's weight; empty if that is not known

    def change(self, kind: str) -> tuple[Shape, Change]:
        """Return the shape and the change of the weight, for any kind but IA³."""
        makers = {"ADALORA": self._adalora, "LOHA": self._loha, "LOKR": self._lokr}
        shape, change = makers.get(kind, self._vera)()
        fits = len(self.shape) > 2 and math.prod(self.shape) == math.prod(shape)
        return self.shape if fits and self.shape[0] == shape[0] else shape, change

    def multiplied(self, *, by_input: bool) -> ScaledWeights:
        """Return IA³'s weights: those of each output, or of each input, times a number."""
        key = self.keys["ia3_l"]
        is_transposed = self.is_transposed and len(self.shape) == 2
        outputs, inputs = self.shape[:2][::-1] if is_transposed else self.shape[:2]
        kernel, count = math.prod(self.shape[2:]), self.stored.tensors[key].elements
        size = math.prod(self.shape)
        if not by_input:
            _check(count == outputs)
            return ScaledWeights(key, 1 if is_transposed else inputs * kernel, count, size)
        groups = count // inputs if len(self.shape) > 2 else 1
        _check(groups > 0 and count == groups * inputs and outputs % groups == 0)
        return ScaledWeights(key, outputs if is_transposed else kernel, inputs, size // groups)

    def _shape_of(self, part: str) -> Shape:
        return self.stored.tensors[self.keys[part]].shape

    def _adalora(self) -> tuple[Shape, Change]:
        (rank, columns), (_, width) = self._shape_of("lora_A"), self._shape_of("lora_B")
        _check(rank == self.rank == width and self._shape_of("lora_E") == (rank, 1))
        scaled = ScaledRows(self.keys["lora_A"], self.keys["lora_E"], (rank, columns))
        return self._product(self.keys["lora_B"], self.stored.make(f"{self.name}.E·A", scaled))

    def _vera(self) -> tuple[Shape, Change]:
        outputs, inputs = self.shape[::-1] if self.is_transposed else self.shape
        (rank, columns), (rows, width) = self._shape_of("vera_A"), self._shape_of("vera_B")
        _check(rank == self.rank == width and inputs <= columns and outputs <= rows)
        _check(self._shape_of("vera_lambda_b") == (outputs,))
        _check(self._shape_of("vera_lambda_d") == (rank,))
        left = ScaledRows(self.keys["vera_B"], self.keys["vera_lambda_b"], (outputs, rank))
        right = ScaledRows(self.keys["vera_A"], self.keys["vera_lambda_d"], (rank, inputs))
        up = self.stored.make(f"{self.name}.b·B", left)
        down = self.stored.make(f"{self.name}.d·A", right)
        return self._product(up, down)

    def _product(self, up: str, down: str) -> tuple[Shape, Change]:
        left, right = (down, up) if self.is_transposed else (up, down)
        product = Product(left, right, self.is_transposed, self.scale)
        rows, _, columns = product.sides(self.stored)
        return (rows, columns), product

    def _loha(self) -> tuple[Shape, Change]:
        shape, one = self._factored("hada_w1", "hada_t1", self.scale)
        others, other = self._factored("hada_w2", "hada_t2")
        _check(shape == others)
        return shape, HadamardProduct(one, other)

    def _lokr(self) -> tuple[Shape, Change]:
        (rows, columns), left = self._factored("lokr_w1", "")
        (height, *others), right = self._factored("lokr_w2", "lokr_t2")
        shape = rows * height, columns * others[0], *others[1:]
        if len(others) == 2 and "lokr_w2" in self.keys:
            # PEFT gives a convolution along a line the left matrix's sides from its second on.
            sides = height, rows, others[0], columns, others[1]
        else:
            sides = 1, rows, height, columns, math.prod(others)
        _check(min(sides) > 0)
        return shape, KroneckerProduct(left, right, self.scale, *sides)

    def _factored(self, name: str, kernel: str, scale: float = 1.0) -> tuple[Shape, Change]:
        """Return a matrix, or a kernel's four dimensions, that is stored in full or as factors."""
        if name in self.keys:
            _check(not {f"{name}_a", f"{name}_b", kernel} & self.keys.keys())
            return self._shape_of(name), StoredMatrix(self.keys[name])
        one, other = f"{name}_a", f"{name}_b"
        (height, width), (rank, columns) = self._shape_of(one), self._shape_of(other)
        _check(rank == self.rank and columns > 0)
        if kernel not in self.keys:
            _check(width == rank)
            product = Product(self.keys[one], self.keys[other], False, scale)
            return (height, columns), product
        _check(height == rank and self._shape_of(kernel)[:2] == (rank, rank))
        sizes = self._shape_of(kernel)[2:]
        form = columns * math.prod(sizes), rank
        made = KernelFactor(self.keys[kernel], self.keys[other], form)
        right = self.stored.make(f"{self.name}.{kernel}·{other}", made)
        return (width, columns, *sizes), Product(self.keys[one], right, True, scale)


def _check(fits: bool) -> None:
    if not fits:
        raise ValueError("the parts do not fit")
