"""Outputs in the base's own format: its FP8 and MXFP4 weights are stored in that format again.

Everything else stays as it is. The configuration keeps its entry for the format, by which programs
recognise it; in a stack of layers, modules excepted by number get the numbers of their copies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from dare.errors import RecipeError
from dare.formats.fp8 import Fp8
from dare.formats.mxfp4 import Mxfp4
from dare.formats.recoding import LossMeter, Put, Read, Recoding, Unit
from dare.inputs.directory import MODELOPT_CONFIG, Sidecars
from dare.inputs.fp8 import Scale
from dare.inputs.mxfp4 import MXFP4
from dare.inputs.quantised import block_size, quantisation_settings, tables_of
from dare.inputs.sources import CodedInfo, Source, read_config
from dare.recipe.layers import at_layer, count_layers, stack_and_layer
from dare.recipe.recipe import Recipe
from dare.tensors.dtypes import STORAGE_TYPES, StorageType
from dare.tensors.files import is_there
from dare.tensors.header import Described, TensorInfo


@dataclass(frozen=True)
class QuantisedRecoding(Recoding):
    """The formats of a base's tensors."""

    format: str
    codes: Mapping[str, Fp8 | Mxfp4]
    kinds: Mapping[str, StorageType]  # of scales of activations, which are copied
    config: Mapping[str, Any] = field(default_factory=dict)

    def merged_type(self, base: TensorInfo) -> StorageType:
        is_exact = isinstance(self.codes.get(base.name), Mxfp4)
        return STORAGE_TYPES["BF16"] if is_exact else base.dtype

    def stored(self, tensor: Described) -> Sequence[Described]:
        name, dtype, shape = tensor
        if name in self.codes:
            return self.codes[name].stored(tensor)
        return [(name, self.kinds.get(name, dtype), shape)]

    def unit(self, tensor: Described) -> Unit:
        code = self.codes.get(tensor[0])
        return Unit() if code is None else code.unit(tensor)

    def encode(self, tensor: Described, read: Read, put: Put) -> LossMeter | None:
        code = self.codes.get(tensor[0])
        return super().encode(tensor, read, put) if code is None else code.encode(tensor, read, put)

    def with_files(self, beside: Sidecars) -> Self:
        if is_there(beside.directory / MODELOPT_CONFIG):
            beside.take(beside.directory, [MODELOPT_CONFIG])
        return self


def quantised_recoding(_recipe: Recipe, inputs: Sequence[Source]) -> QuantisedRecoding | None:
    """Return the formats of the base's weights; None if it has plain ones."""
    base = inputs[0]
    coded = {name: info.code for name, info in base.tensors.items() if isinstance(info, CodedInfo)}
    config = {} if base.folder is None else read_config(base.folder)
    settings = {
        key: _restacked(table[key], base)
        for table in tables_of(dict(config))
        for key in quantisation_settings(table)
        if isinstance(table[key], dict)
    }
    powers = any(table.get("scale_fmt") == "ue8m0" for table in settings.values())
    block, is_sure = block_size(config)
    codes: dict[str, Fp8 | Mxfp4] = {}
    for name, code in coded.items():
        if isinstance(code, Scale):
            if is_sure and not code.is_one and block != (code.block_rows, code.block_columns):
                what = f"{name}: its blocks are not of the base's weight_block_size"
                raise RecipeError(f"{what}; leave format out, or take another base")
            codes[name] = Fp8(code, powers or code.info.dtype.name == "F8_E8M0")
        elif code == MXFP4:
            codes[name] = Mxfp4()
        elif not isinstance(code, StorageType):
            what = "NVFP4 cannot be written; leave format out, or set dtype"
            raise RecipeError(f'format = "input": {what}')
    kinds = {name: code for name, code in coded.items() if isinstance(code, StorageType)}
    formats = sorted({"FP8" if isinstance(code, Fp8) else "MXFP4" for code in codes.values()})
    found = QuantisedRecoding(" and ".join(formats), codes, kinds, settings)
    _check_stack(base, found)
    return found if codes else None


def _restacked(settings: Mapping[str, Any], base: Source) -> Mapping[str, Any]:
    """Renumber modules that settings list by name, once for each layer that has them now."""
    counts = count_layers(base.tensors)

    def moved(module: Any) -> list[Any]:
        stack, layer = stack_and_layer(f"{module}.") or ("", 0)
        if counts.get(stack) != len(base.layers):
            return [module]
        places = (new for new, (_, old) in enumerate(base.layers) if old == layer)
        return [at_layer(f"{module}.", new)[:-1] for new in places]

    lists = {key: value for key, value in settings.items() if isinstance(value, list)}
    restacked = {key: [m for e in value for m in moved(e)] for key, value in lists.items()}
    return {**settings, **restacked}


def _check_stack(base: Source, found: QuantisedRecoding) -> None:
    """Refuse a stack of models stored in different ways, or not as the configuration says."""
    if base.layers and base.folder is not None and not found.config:
        what = "the base's config.json does not say that weights are quantised"
        raise RecipeError(f'format = "input": {what}; leave format out, or take another base')
    if len({home for home, _ in base.layers}) < 2:
        return
    kinds: dict[str, Any] = {}
    for name, info in base.tensors.items():
        stored = found.stored((name, info.dtype, info.shape)) if name in found.codes else ()
        kind = [(own.removeprefix(name), *form) for own, *form in stored]
        if stack_and_layer(name) and kinds.setdefault(at_layer(name, 0), kind) != kind:
            what = "is not quantised in the same way in all layers"
            raise RecipeError(f'{name}: {what}; leave format = "input" out')
