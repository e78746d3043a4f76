"""GGUF as llama.cpp reads it: one file, with vocabulary and configuration inside.

With a GGUF base all keys are its own; of a model directory they are made as llama.cpp's converter
makes them. Tensors have their GGUF names, and the converter's changes are made again, which
`dare.inputs.gguf` undoes in reading.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from dare.errors import InputError, NotFiniteError, RecipeError
from dare.formats.gguf_keys import CONVERTER, model_keys, vocabulary_keys
from dare.formats.recoding import (
    PIECE_ELEMENTS,
    PIECE_WORK,
    Floats,
    LossMeter,
    Put,
    Read,
    Recoding,
    Unit,
)
from dare.inputs.directory import Sidecars, main_type
from dare.inputs.gguf import (
    AS_STORED,
    DEFAULT_ALIGNMENT,
    FAMILIES,
    MAGIC,
    Family,
    GgufSource,
    Stored,
    gguf_name,
    import_gguf,
    with_changes,
)
from dare.inputs.sources import CONFIG, Source, SourceView, decoded, read_config
from dare.recipe.recipe import Recipe
from dare.tensors.dtypes import STORAGE_TYPES, StorageType
from dare.tensors.header import Described, TensorInfo, show_shape

FILE_TYPES = {"F32": 0, "F16": 1, "BF16": 32, "Q8_0": 7}  # what may be asked for
# Bits of the smallest magnitude whose scale is infinite in F16: 65520 times the largest code.
OVERFLOW_BITS = {"Q4_0": 0x48FFF000, "Q5_0": 0x497FF000, "Q8_0": 0x4AFDF020}
MOST_COPIED = 1 << 16  # elements of a tensor that is no weights
LAST = "output_norm.weight"  # every model has it; what is no weights is written with it
DROPPED = ("split.", "quantize.", "general.alignment", "general.size_label")
CODES: dict[type, tuple[int, str]] = {bool: (7, "?"), int: (4, "I"), float: (6, "f")}


@dataclass(frozen=True)
class GgufRecoding(Recoding):
    """A GGUF file that is to be written."""

    output: Path
    format: str
    asked: str | None  # the type of matrices; None: each has that of the base
    metadata: Mapping[str, Any]  # the architecture, and the numbers of heads
    family: Family | None
    pairs: Mapping[str, bytes]  # keys with their values, ready to be written
    copied: Mapping[str, Floats]  # tensors that are no weights
    own: Mapping[str, Stored] = field(default_factory=dict)  # those of a GGUF base
    ties: Mapping[str, str] = field(default_factory=dict)  # second names, which are left out

    def merged_type(self, base: TensorInfo) -> StorageType:
        name = self._kind(self._name(base.name), base.shape)
        kind = STORAGE_TYPES[name if name in AS_STORED else "F32"]
        return replace(kind, overflow_bits=OVERFLOW_BITS.get(name, kind.overflow_bits))

    def stored(self, tensor: Described) -> Sequence[Described]:
        found = self._find(tensor)
        if found is None:
            return []
        others = self.copied.items() if found.name == LAST else ()
        return [
            (found.name, _storage_type(found), found.shape),
            *((name, STORAGE_TYPES["F32"], values.shape) for name, values in others),
        ]

    def _name(self, name: str) -> str:
        return (gguf_name(name, self.family) if self.family else None) or name

    def _kind(self, name: str, shape: tuple[int, ...]) -> str:
        """Return the type of a tensor of weights in the file; vectors are F32, as in llama.cpp."""
        if self.asked is None and name in self.own:
            return str(self.own[name].kind.name)
        if len(shape) < 2 or self.asked is None:
            return "F32"
        return "F16" if self.asked == "Q8_0" and shape[-1] % 32 else self.asked

    def _find(self, tensor: Described) -> Stored | None:
        """Return a merged tensor as it is in the file; None if it is not there."""
        (name, dtype, shape), own = tensor, self._name(tensor[0])
        if own in self.own:
            if self.own[own].shape != shape:
                what = f"is {show_shape(shape)}, but the vocabulary of a GGUF base cannot change"
                raise RecipeError(f"{name}: {what}; {CONVERTER}")
        elif name in self.ties or name.endswith("rotary_emb.inv_freq"):
            return None
        elif own == "output.weight" and self.family and self.family.norm_shift:
            raise InputError(f"{name}: llama.cpp's Gemma has no head of its own; write a directory")
        elif own == name:
            raise InputError(f"{name}: has no name in GGUF; {CONVERTER}")
        gguf = import_gguf(self.output)
        kind = gguf.GGMLQuantizationType[self._kind(own, shape) if dtype.is_weight else dtype.name]
        found = Stored(own, self.output, kind, shape, 0, *gguf.GGML_QUANT_SIZES[kind])
        return with_changes(found, self.family, self.metadata) if self.family else found

    def unit(self, tensor: Described) -> Unit:
        """Return a block, or a head, whose rows change places."""
        found = self._find(tensor)
        if found is None:
            return Unit()
        elements = _unit_elements(found)
        return Unit(elements, work_bytes=PIECE_WORK * max(PIECE_ELEMENTS, elements))

    def encode(self, tensor: Described, read: Read, put: Put) -> LossMeter | None:
        found, meter = self._find(tensor), LossMeter()
        if found is None:
            return None
        unit = _unit_elements(found)
        for start, raw in read(max(1, PIECE_ELEMENTS // unit) * unit):
            if not start and found.name == LAST:
                for name, values in self.copied.items():
                    put(name, 0, values.reshape(-1).view(np.uint8))
            if found.head_rows:
                heads = raw.reshape(-1, 2, found.head_rows // 2, unit // found.head_rows)
                raw = np.ascontiguousarray(heads.swapaxes(1, 2)).reshape(-1)  # noqa: PLW2901
            if found.shift:
                raw = raw - np.float32(found.shift)  # noqa: PLW2901
            if found.kind.name not in AS_STORED:
                raw = _quantise(found, decoded(raw), meter)  # noqa: PLW2901
            put(found.name, start // found.block_elements * found.block_bytes, raw.view(np.uint8))
        return None if found.kind.name in AS_STORED else meter

    def build_header(
        self, tensors: Iterable[Described], metadata: Mapping[str, str]
    ) -> tuple[bytes, dict[str, TensorInfo]]:
        del metadata  # it is in the manifest beside the file
        kinds = import_gguf(self.output).GGMLQuantizationType
        entries, placed, position = b"", [], 0
        for name, dtype, shape in tensors:
            placed.append(TensorInfo(name, dtype, shape, position))
            sizes = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
            entries += _text(name) + sizes + struct.pack("<IQ", kinds[dtype.name], position)
            position += -(-placed[-1].nbytes // DEFAULT_ALIGNMENT) * DEFAULT_ALIGNMENT
        counts = struct.pack("<IQQ", 3, len(placed), len(self.pairs))
        header = MAGIC + counts + b"".join(self.pairs.values()) + entries
        header += bytes(-len(header) % DEFAULT_ALIGNMENT)
        return header, {i.name: replace(i, start=len(header) + i.start) for i in placed}

    def with_files(self, beside: Sidecars) -> Self:
        if self.own:
            return self
        keys, _ = model_keys(beside.table(CONFIG))
        keys |= vocabulary_keys(beside, keys[f"{keys['general.architecture']}.vocab_size"])
        return replace(self, pairs={**_packed(keys), **self.pairs})


def _unit_elements(tensor: Stored) -> int:
    head = tensor.head_rows * math.prod(tensor.shape[1:])
    return head or tensor.block_elements


def _storage_type(tensor: Stored) -> StorageType:
    raw, bits = np.dtype(np.uint8), Fraction(8 * tensor.block_bytes, tensor.block_elements)
    other = StorageType(tensor.kind.name, raw, raw, packed_bits=bits)
    return STORAGE_TYPES.get(tensor.kind.name, other)


def _quantise(tensor: Stored, values: Floats, meter: LossMeter) -> NDArray[np.uint8]:
    quants = import_gguf(tensor.file).quants
    with np.errstate(all="ignore"):
        codes: NDArray[np.uint8] = quants.quantize(values.reshape(1, -1), tensor.kind)
        stored = quants.dequantize(codes, tensor.kind).reshape(-1)
    if not np.isfinite(stored).all():
        what = f"has values that {tensor.kind.name} cannot hold"
        raise NotFiniteError(f"{tensor.name}: {what}; set dtype = F32 or BF16")
    meter.add(values, stored)
    return codes.reshape(-1)


def _text(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _packed(keys: Mapping[str, Any]) -> dict[str, bytes]:
    """Return keys with their values, in the types that llama.cpp's converter uses."""
    try:
        return {key: _text(key) + _pack(value) for key, value in keys.items()}
    except (struct.error, OverflowError, UnicodeError) as error:
        raise InputError(f"a value cannot be written as GGUF: {error}") from None


def _pack(value: Any) -> bytes:
    if isinstance(value, str):
        return struct.pack("<I", 8) + _text(value)
    if not isinstance(value, list):
        kind, code = CODES[type(value)]
        return struct.pack(f"<I{code}", kind, value)
    if not value or isinstance(value[0], str):
        return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(_text, value))
    kind, code = (5, "i") if isinstance(value[0], int) else CODES[float]
    return struct.pack(f"<IIQ{len(value)}{code}", 9, kind, len(value), *value)


def gguf_recoding(recipe: Recipe, inputs: Sequence[Source]) -> GgufRecoding:
    """Return the GGUF format with its keys: those of a GGUF file, or made from a directory.

    They come from the base, or from the model that `copy_from` names.
    """
    assert recipe.output is not None
    if recipe.dtype not in (None, *FILE_TYPES):
        raise RecipeError(f"dtype {recipe.dtype}: a GGUF output can be {', '.join(FILE_TYPES)}")
    number = 0 if recipe.copy_from is None else recipe.number_of(recipe.copy_from, "copy_from")
    source = inputs[number]
    while isinstance(source, SourceView):
        source = source.inner
    if isinstance(source, GgufSource):
        return _from_gguf(recipe.output, recipe, source)
    if source.folder is None or not (config := read_config(source.folder)):
        raise InputError(
            f"{recipe.output}: GGUF needs a configuration and a tokenizer; give the base as a "
            "directory or as GGUF, or name a model that has them with copy_from"
        )
    metadata, copied = model_keys(config)
    kind = main_type((i.name, i.dtype, i.shape) for i in inputs[0].tensors.values())
    asked = recipe.dtype or ("BF16" if kind is STORAGE_TYPES["BF16"] else "F16")
    family, pairs = FAMILIES[metadata["general.architecture"]], _general(recipe, asked, {asked})
    given = recipe.output, f"GGUF ({asked})", asked, metadata, family, pairs, copied
    return GgufRecoding(*given, ties=inputs[0].ties)


def _general(recipe: Recipe, asked: str | None, kinds: set[str]) -> dict[str, bytes]:
    """Return the keys that every output has of its own."""
    named = {"general.type": "model", "general.name": f"{recipe.methods} merge by dare"}
    types = {} if asked is None else {"general.file_type": FILE_TYPES[asked]}
    types |= {"general.quantization_version": 2} if kinds - {*AS_STORED} else {}
    return _packed({**named, **types})


def _from_gguf(output: Path, recipe: Recipe, source: GgufSource) -> GgufRecoding:
    """Take over the keys of a GGUF file, and its types if nothing else is asked for."""
    own = {tensor.name: tensor for tensor in source.stored.values()}
    kinds = {tensor.kind for tensor in own.values()}
    can_stay = all(_can_be_written(output, kind) for kind in kinds)
    asked = recipe.dtype or (None if can_stay else "F16")
    names = {kind.name for kind in kinds} if asked is None else {asked}
    for tensor in source.left_out:
        if tensor.kind.name != "F32" or math.prod(tensor.shape) > MOST_COPIED:
            raise InputError(f"{tensor.file}: {tensor.name} is too large to copy, or not F32")
    head = np.empty(max((end for _, end in source.pairs.values()), default=0), np.uint8)
    with source:
        source.read_bytes(source.first, 0, head, "its keys")
        copied = {tensor.name: source.read_left_out(tensor) for tensor in source.left_out}
    kept = {key: span for key, span in source.pairs.items() if not key.startswith(DROPPED)}
    pairs = {key: head[start:end].tobytes() for key, (start, end) in kept.items()}
    family, pairs = FAMILIES.get(source.architecture), pairs | _general(recipe, asked, names)
    shown = f"GGUF ({', '.join(sorted(names))})"
    return GgufRecoding(output, shown, asked, source.metadata, family, pairs, copied, own)


def _can_be_written(output: Path, kind: Any) -> bool:
    gguf = import_gguf(output)
    try:
        gguf.quants.quantize(np.zeros((1, gguf.GGML_QUANT_SIZES[kind][0]), np.float32), kind)
    except NotImplementedError:
        return kind.name in AS_STORED
    return True
