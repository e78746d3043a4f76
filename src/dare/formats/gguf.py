"""GGUF as llama.cpp reads it: one file, with vocabulary and configuration inside.

With a GGUF base all keys are its own; of a model directory they are made as llama.cpp's converter
makes them. Tensors have their GGUF names, and the converter's changes are made again, which
`dare.inputs.gguf` undoes in reading.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from dare.errors import InputError, OutputError, RecipeError
from dare.formats.gguf_keys import CONVERTER, model_keys, rope_factors, vocabulary_keys
from dare.formats.recoding import Floats, Loss, LossMeter, Put, Read, Recoding
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
from dare.kernels import reference
from dare.recipe.recipe import Recipe
from dare.tensors.dtypes import STORAGE_TYPES, StorageType
from dare.tensors.files import read_beginning
from dare.tensors.header import Described, TensorInfo

TYPES = ("F32", "F16", "BF16", "Q8_0")  # what may be asked for
PIECE_ELEMENTS = 1 << 18  # recoded at once
LAST = "output_norm.weight"  # every architecture has it; what is no weight is written with it
_DROPPED = ("split.", "quantize.", "general.alignment", "general.size_label")


@dataclass(frozen=True)
class GgufRecoding(Recoding):
    """A GGUF file that is to be written."""

    output: Path
    format: str
    asked: str | None  # the type of matrices; None: each has that of the base
    metadata: Mapping[str, Any]  # the architecture, and the numbers of heads
    family: Family | None
    pairs: Mapping[str, bytes]  # keys with their values, ready to be written
    own: Mapping[str, Stored] = field(default_factory=dict)  # tensors of a GGUF base
    copied: Mapping[str, Floats] = field(default_factory=dict)  # those that are no weights
    ties: Mapping[str, str] = field(default_factory=dict)  # second names, which are left out

    @cached_property
    def _gguf(self) -> Any:
        return import_gguf(self.output)

    def __getstate__(self) -> dict[str, Any]:
        """Leave the package out, which does not pickle."""
        return {key: value for key, value in vars(self).items() if key != "_gguf"}

    def merged_type(self, base: TensorInfo) -> StorageType:
        name = self._kind(self._name(base.name), base.shape, base.dtype)
        return STORAGE_TYPES[name if name in AS_STORED else "F32"]

    def stored(self, tensor: Described) -> Sequence[Described]:
        found = self._find(tensor)
        named = [(found.name, self._type(found), found.shape)] if found else []
        is_last = found is not None and found.name == LAST
        others = self.copied.items() if is_last else ()
        return [*named, *((name, STORAGE_TYPES["F32"], own.shape) for name, own in others)]

    def _name(self, name: str) -> str:
        found = gguf_name(name, self.family) if self.family else None
        return found or name

    def _kind(self, name: str, shape: tuple[int, ...], dtype: StorageType) -> str:
        """Return the type of a tensor in the file: as llama.cpp has it, vectors in F32."""
        if not dtype.is_weight:
            return dtype.name
        if self.asked is None and name in self.own:
            return str(self.own[name].kind.name)
        if len(shape) < 2 or self.asked is None:
            return "F32"
        is_whole = shape[-1] % self._gguf.GGML_QUANT_SIZES[self._gguf.GGMLQuantizationType.Q8_0][0]
        return "F16" if self.asked == "Q8_0" and is_whole else self.asked

    def _find(self, tensor: Described) -> Stored | None:
        """Return a merged tensor as it is in the file."""
        name, dtype, shape = tensor
        own = self._name(name)
        is_head = own == "output.weight" and self.family is not None and self.family.norm_shift
        if name in self.ties or is_head or name.endswith("rotary_emb.inv_freq"):
            return None  # Gemma's head is its embedding
        if own not in self.own and own == name:
            raise InputError(f"{name}: has no name in GGUF; {CONVERTER}")
        if own in self.own and self.own[own].shape != shape:
            what = f"is {shape} and was {self.own[own].shape}, and a GGUF base keeps its vocabulary"
            raise RecipeError(f"{name}: {what}; {CONVERTER}")
        kind = self._gguf.GGMLQuantizationType[self._kind(own, shape, dtype)]
        sizes = self._gguf.GGML_QUANT_SIZES[kind]
        found = Stored(own, self.output, kind, shape, 0, *sizes)
        return with_changes(found, self.family, self.metadata) if self.family else found

    def _type(self, tensor: Stored) -> StorageType:
        name = tensor.kind.name
        if name in AS_STORED:
            return STORAGE_TYPES[name]
        raw, bits = np.dtype(np.uint8), Fraction(8 * tensor.block_bytes, tensor.block_elements)
        return StorageType(name, raw, raw, packed_bits=bits)

    def encode(self, tensor: Described, read: Read, put: Put) -> Loss | None:
        found = self._find(tensor)
        if found is None:
            return None
        for name, values in self.copied.items() if found.name == LAST else ():
            put(name, 0, values.reshape(-1).view(np.uint8))
        elements, meter = int(np.prod(found.shape, dtype=np.int64)), LossMeter()
        width = elements // found.shape[0] if found.head_rows and found.shape[0] else 1
        unit = found.head_rows * width or found.block_elements
        piece = max(1, PIECE_ELEMENTS // unit) * unit
        for start in range(0, elements, piece):
            raw = read(start, min(piece, elements - start))
            if found.head_rows:
                heads = raw.reshape(-1, 2, found.head_rows // 2, width)
                raw = np.ascontiguousarray(heads.swapaxes(1, 2)).reshape(-1)
            if found.is_computed:
                raw = self._quantise(found, decoded(raw) - np.float32(found.shift), meter)
            place = start // found.block_elements * found.block_bytes
            put(found.name, place, raw.view(np.uint8))
        return None if found.kind.name in AS_STORED else meter.loss

    def _quantise(self, tensor: Stored, values: Floats, meter: LossMeter) -> NDArray[Any]:
        if tensor.kind.name in AS_STORED:
            raw = np.empty(values.size, STORAGE_TYPES[tensor.kind.name].carrier)
            reference.encode(values, raw)
            return raw
        with np.errstate(all="ignore"):
            quants = self._gguf.quants
            codes: NDArray[np.uint8] = quants.quantize(values.reshape(1, -1), tensor.kind)
            stored = quants.dequantize(codes, tensor.kind).reshape(-1)
        if not np.isfinite(stored).all():
            what = f"has values that {tensor.kind.name} cannot hold"
            raise OutputError(f"{tensor.name}: {what}; set dtype = F32 or BF16")
        meter.add(values, stored)
        return codes.reshape(-1)

    def build_header(
        self, tensors: Iterable[Described], metadata: Mapping[str, str]
    ) -> tuple[bytes, dict[str, TensorInfo]]:
        del metadata  # it is in the manifest beside the file
        entries, placed, position = b"", [], 0
        for name, dtype, shape in tensors:
            info = TensorInfo(name, dtype, shape, position)
            kind = self._gguf.GGMLQuantizationType[dtype.name]
            sizes = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
            entries += _text(name) + sizes + struct.pack("<IQ", kind, position)
            placed.append(info)
            position += -(-info.nbytes // DEFAULT_ALIGNMENT) * DEFAULT_ALIGNMENT
        counts = struct.pack("<IQQ", 3, len(placed), len(self.pairs))
        header = MAGIC + counts + b"".join(self.pairs.values()) + entries
        header += bytes(-len(header) % DEFAULT_ALIGNMENT)
        return header, {i.name: replace(i, start=len(header) + i.start) for i in placed}

    def with_files(self, beside: Sidecars) -> Self:
        if self.own:
            return self
        keys = model_keys(beside.table(CONFIG)) | vocabulary_keys(beside)
        return replace(self, pairs={**{key: pack(key, keys[key]) for key in keys}, **self.pairs})


def _text(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def pack(key: str, value: Any) -> bytes:
    """Return a key with its value, in the types that llama.cpp's converter uses."""
    kind, raw = _value(value[0] if isinstance(value, list) else value)
    if isinstance(value, list):
        kind = 5 if kind == 4 else kind  # of whole numbers, signed ones
        items = struct.pack(f"<{len(value)}{'if'[kind == 6]}", *value) if kind in (5, 6) else b""
        raw = struct.pack("<IQ", kind, len(value)) + (items or b"".join(map(_text, value)))
        kind = 9
    return _text(key) + struct.pack("<I", kind) + raw


def _value(value: Any) -> tuple[int, bytes]:
    match value:
        case str():
            return 8, _text(value)
        case bool():
            return 7, struct.pack("<?", value)
        case int():
            return 4, struct.pack("<I", value)
        case _:
            return 6, struct.pack("<f", value)


def open_recoding(recipe: Recipe, inputs: Sequence[Source]) -> GgufRecoding:
    """Find out what a GGUF output is made with: the keys of a GGUF file, or those of a directory.

    They come from the base, or from the model that `copy_from` names.
    """
    assert recipe.output is not None
    if recipe.dtype not in (None, *TYPES):
        raise RecipeError(f"dtype {recipe.dtype}: GGUF is written as {', '.join(TYPES)}")
    number = 0 if recipe.copy_from is None else recipe.number_of(recipe.copy_from, "copy_from")
    source = inputs[number]
    while isinstance(source, SourceView):
        source = source.inner
    if isinstance(source, GgufSource):
        return _from_gguf(recipe, source)
    if source.folder is None or not (config := read_config(source.folder)):
        raise InputError(
            f"{recipe.output}: GGUF needs a configuration and a tokenizer; give the base as a "
            "directory or as GGUF, or name a model that has them with copy_from"
        )
    metadata, factors = model_keys(config), rope_factors(config)
    kind = main_type((i.name, i.dtype, i.shape) for i in inputs[0].tensors.values())
    asked = recipe.dtype or ("BF16" if kind is STORAGE_TYPES["BF16"] else "F16")
    return GgufRecoding(
        recipe.output,
        f"GGUF ({asked})",
        asked,
        metadata,
        FAMILIES[metadata["general.architecture"]],
        _general(recipe, {asked}, asked),
        copied={} if factors is None else {"rope_freqs.weight": factors},
        ties=inputs[0].ties,
    )


def _general(recipe: Recipe, kinds: set[str], asked: str | None) -> dict[str, bytes]:
    """Return the keys that every output has of its own."""
    given: dict[str, Any] = {
        "general.type": "model",
        "general.name": f"{recipe.methods} merge by dare",
    }
    if asked is not None:
        numbers = {"F32": 0, "F16": 1, "Q8_0": 7, "BF16": 32}
        given["general.file_type"] = numbers[asked]
    if kinds - set(AS_STORED):
        given["general.quantization_version"] = 2
    return {key: pack(key, value) for key, value in given.items()}


def _from_gguf(recipe: Recipe, source: GgufSource) -> GgufRecoding:
    """Take over the keys of a GGUF file, and its types if nothing else is asked for."""
    assert recipe.output is not None
    own = {tensor.name: tensor for tensor in source.stored.values()}
    kinds = {tensor.kind for tensor in own.values()}
    asked = recipe.dtype
    if asked is None and not all(_can_be_written(recipe.output, kind) for kind in kinds):
        asked = "F16"
    names = {kind.name for kind in kinds} if asked is None else {asked}
    head = read_beginning(source.first, max((end for _, end in source.pairs.values()), default=0))
    pairs = {
        key: head[start:end]
        for key, (start, end) in source.pairs.items()
        if not key.startswith(_DROPPED)
    }
    with source:
        copied = {tensor.name: source.read_left_out(tensor) for tensor in source.left_out}
    return GgufRecoding(
        recipe.output,
        f"GGUF ({', '.join(sorted(names))})",
        asked,
        source.metadata,
        FAMILIES.get(source.architecture),
        pairs | _general(recipe, names, asked),
        own,
        copied,
    )


def _can_be_written(output: Path, kind: Any) -> bool:
    gguf = import_gguf(output)
    try:
        gguf.quants.quantize(np.zeros((1, gguf.GGML_QUANT_SIZES[kind][0]), np.float32), kind)
    except NotImplementedError:
        return kind.name in AS_STORED
    return True
