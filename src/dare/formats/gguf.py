"""GGUF as llama.cpp reads it: one file, with vocabulary and configuration inside.

With a GGUF base all keys are its own; of a model folder they are made as llama.cpp's converter
makes them, and where llama.cpp could not be told how the model computes or splits text, it is
refused. Tensors have their GGUF names, and the converter's changes are made again, which
`dare.inputs.gguf` undoes in reading.
"""

from __future__ import annotations

import math
import re
import struct
import tomllib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from importlib.resources import files
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from dare.errors import InputError, NotFiniteError, RecipeError
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
from dare.inputs.directory import TOKENIZER_CONFIG, Sidecars, main_type, token_text
from dare.inputs.gguf import (
    AS_STORED,
    DEFAULT_ALIGNMENT,
    FAMILIES,
    MAGIC,
    Family,
    GgufSource,
    Stored,
    expert_of,
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
MAX_COPIED_ELEMENTS = 1 << 16  # elements of a tensor that is no weights
ALWAYS_F32 = ("ffn_gate_inp.", "ffn_gate_inp_shexp.")  # in the names of matrices that choose
LAST_TENSOR = "output_norm.weight"  # every model has it; what is no weights is written with it
DROPPED_KEYS = ("split.", "quantize.", "general.alignment", "general.size_label")
VALUE_CODES: dict[type, tuple[int, str]] = {bool: (7, "?"), int: (4, "I"), float: (6, "f")}
CONVERTER = "write a folder, and use convert_hf_to_gguf.py from llama.cpp"
MAX_COUNT = 1 << 22  # of anything that is counted in a configuration, but positions
ORIGINAL_LENGTH = "original_max_position_embeddings"
NEVER_MERGED = -1e6  # a score
SPACE = "▁"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # kinds of tokens
# What the converter takes for special, even if it is not marked so.
SPECIAL_TOKEN = re.compile(r"<pad>|<mask>|<2mass>|\[@BOS@\]|<\|.*\|>|<｜.*｜>|<unused.*>")
MALFORMED = (KeyError, TypeError, ValueError, AttributeError, IndexError, ArithmeticError)
_TABLES = tomllib.loads(files("dare.formats").joinpath("gguf.toml").read_text("utf-8"))

Table = Mapping[str, Any]


@dataclass(frozen=True)
class GgufRecoding(Recoding):
    """A GGUF file to write."""

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
        others = self.copied.items() if found.name == LAST_TENSOR else ()
        number = self._expert(tensor[0])
        if number:
            return []  # it lies in the stack that the first one makes
        stack = () if number is None else (self._expert_count,)
        return [
            (found.name, _storage_type(found), (*stack, *found.shape)),
            *((name, STORAGE_TYPES["F32"], values.shape) for name, values in others),
        ]

    def _name(self, name: str) -> str:
        return (gguf_name(name, self.family) if self.family else None) or name

    def _expert(self, name: str) -> int | None:
        """Return the place of a tensor in a stack of experts, if it has one."""
        return expert_of(name) if self._name(name) != name else None

    @property
    def _expert_count(self) -> int:
        count = self.metadata.get(f"{self.metadata['general.architecture']}.expert_count")
        return count if type(count) is int else 0

    def checked(self, names: Iterable[str]) -> Self:
        """Return itself, if the model has all experts of the layers that have any."""
        stacks: dict[str, set[int]] = {}
        for name in names:
            if (number := self._expert(name)) is not None:
                stacks.setdefault(self._name(name), set()).add(number)
        for stack, numbers in stacks.items():
            if len(numbers) != self._expert_count or max(numbers) >= self._expert_count:
                what = f"{len(numbers)} of {self._expert_count} experts for {stack}"
                raise InputError(f"{self.output}: {what}; {CONVERTER}")
        return self

    def _kind(self, name: str, shape: tuple[int, ...]) -> str:
        """Return the type of a tensor of weights in the file; vectors are F32, as in llama.cpp."""
        if self.asked is None and name in self.own:
            return str(self.own[name].kind.name)
        if len(shape) < 2 or self.asked is None or any(part in name for part in ALWAYS_F32):
            return "F32"
        return "F16" if self.asked == "Q8_0" and shape[-1] % 32 else self.asked

    def _find(self, tensor: Described) -> Stored | None:
        """Return a merged tensor as it is stored in the file; None if the file lacks it."""
        (name, dtype, shape), own = tensor, self._name(tensor[0])
        if own in self.own:
            if self.own[own].shape != shape:
                what = f"is {show_shape(shape)}, but the vocabulary of a GGUF base cannot change"
                raise RecipeError(f"{name}: {what}; {CONVERTER}")
        elif name in self.ties or name.endswith("rotary_emb.inv_freq"):
            return None
        elif own == "output.weight" and self.family and self.family.norm_shift:
            raise InputError(f"{name}: llama.cpp's Gemma has no head of its own; write a folder")
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
        begin = (self._expert(tensor[0]) or 0) * found.nbytes
        for start, raw in read(max(1, PIECE_ELEMENTS // unit) * unit):
            if not start and found.name == LAST_TENSOR:
                for name, values in self.copied.items():
                    put(name, 0, values.reshape(-1).view(np.uint8))
            if found.head_rows:
                heads = raw.reshape(-1, 2, found.head_rows // 2, unit // found.head_rows)
                raw = np.ascontiguousarray(heads.swapaxes(1, 2)).reshape(-1)  # noqa: PLW2901
            if found.shift:
                raw = raw - np.float32(found.shift)  # noqa: PLW2901
            if found.kind.name not in AS_STORED:
                raw = _quantise(found, decoded(raw), meter)  # noqa: PLW2901
            place = begin + start // found.block_elements * found.block_bytes
            put(found.name, place, raw.view(np.uint8))
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
        kind, code = VALUE_CODES[type(value)]
        return struct.pack(f"<I{code}", kind, value)
    if not value or isinstance(value[0], str):
        return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(_text, value))
    kind, code = (5, "i") if isinstance(value[0], int) else VALUE_CODES[float]
    return struct.pack(f"<IIQ{len(value)}{code}", 9, kind, len(value), *value)


def gguf_recoding(recipe: Recipe, inputs: Sequence[Source]) -> GgufRecoding:
    """Return the GGUF format with its keys: those of a GGUF file, or made from a folder.

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
        return _from_gguf(recipe.output, recipe, source).checked(inputs[0].tensors)
    if source.folder is None or not (config := read_config(source.folder)):
        raise InputError(
            f"{recipe.output}: GGUF needs a configuration and a tokenizer; give the base as a "
            "folder or as GGUF, or name a model that has them with copy_from"
        )
    metadata, copied = model_keys(config)
    kind = main_type((i.name, i.dtype, i.shape) for i in inputs[0].tensors.values())
    asked = recipe.dtype or ("BF16" if kind is STORAGE_TYPES["BF16"] else "F16")
    family, pairs = FAMILIES[metadata["general.architecture"]], _general(recipe, asked, {asked})
    given = recipe.output, f"GGUF ({asked})", asked, metadata, family, pairs, copied
    return GgufRecoding(*given, ties=inputs[0].ties).checked(inputs[0].tensors)


def _general(recipe: Recipe, asked: str | None, kinds: set[str]) -> dict[str, bytes]:
    """Return the keys that every output sets itself."""
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
        if tensor.kind.name != "F32" or math.prod(tensor.shape) > MAX_COPIED_ELEMENTS:
            raise InputError(f"{tensor.file}: {tensor.name} is too large to copy, or not F32")
    head = np.empty(max((end for _, end in source.pairs.values()), default=0), np.uint8)
    with source:
        source.read_bytes(source.first, 0, head, "its keys")
        copied = {tensor.name: source.read_left_out(tensor) for tensor in source.left_out}
    kept = {key: span for key, span in source.pairs.items() if not key.startswith(DROPPED_KEYS)}
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


def _refuse(what: str | None) -> None:
    if what is not None:
        raise InputError(f"a model with {what} cannot become GGUF; {CONVERTER}")


# ---------------------------------------------------------------- keys of the model


def model_keys(config: Table) -> tuple[dict[str, Any], dict[str, NDArray[np.float32]]]:
    """Return the keys, and the tensors, that describe the architecture."""
    kind = str(config.get("model_type"))
    name = _TABLES["architectures"].get(kind, kind)
    known = _TABLES["written"]
    _refuse(None if name in known else f"the model type {kind} (known: {', '.join(known)})")
    try:
        found = dict(_numbers(name, config))
        rope, factors = _positions(name, config)
        _refuse(_unlike_llama_cpp(name, config, found))
    except MALFORMED as error:
        raise InputError(f"{CONFIG}: a value for {kind} is missing or wrong ({error!r})") from None
    keys = {f"{name}.{key}": value for key, value in (found | rope).items()}
    return {"general.architecture": name, **keys}, factors


def _numbers(name: str, config: Table) -> Iterator[tuple[str, Any]]:
    names = ((key, own) for key, several in _TABLES["optional"].items() for own in several)
    given = [(key, own) for key, own in names if config.get(own) is not None]
    for key, own in (*_TABLES["needed"].items(), *given):
        number = int(config[own])
        if not 0 < number < (MAX_COUNT << 10 if key == "context_length" else MAX_COUNT):
            raise ValueError(f"{own} is {number}")
        yield key, number
    yield "attention.layer_norm_rms_epsilon", float(config["rms_norm_eps"])
    if name == "llama":
        yield "rope.dimension_count", _head_size(config)
    if name == "phi3":
        yield "rope.dimension_count", _rotated(config)
        yield "attention.sliding_window", int(config.get("sliding_window") or 0)
    if name in _TABLES["full_every"]:
        yield "attention.sliding_window", int(config["sliding_window"])
        for key in ("attn_logit_softcapping", "final_logit_softcapping"):
            if config.get(key):
                yield key, float(config[key])


def _head_size(config: Table) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def _rotated(config: Table) -> int:
    """Return how many elements of a head of Phi-3 are rotated."""
    share = (config.get("rope_parameters") or config).get("partial_rotary_factor") or 1
    return int(share * config["hidden_size"]) // int(config["num_attention_heads"])


def _unlike_llama_cpp(name: str, config: Table, keys: Table) -> str | None:
    """Say what llama.cpp assumes of an architecture that does not hold for this model."""
    every, layers = _TABLES["full_every"].get(name), keys["block_count"]
    if every is None:
        act = "silu" if name.startswith("gemma") else config.get("hidden_act", "silu")
        assumed = _TABLES["assumed"].get(name, {}).items()
        odd = [key for key, value in assumed if (config.get(key) or type(value)()) != value]
        odd += [] if act == "silu" else ["hidden_act"]
        return f"{odd[0]} {config.get(odd[0])}" if odd else None
    usual = [f"{'sliding' if n % every else 'full'}_attention" for n in range(1, layers + 1)]
    order = config.get("layer_types", usual), config.get("sliding_window_pattern", every)
    if order != (usual, every):
        return "an unusual order of layers with a sliding window"
    is_wide = layers == _TABLES["scaled_by_width"][name]
    share = keys["embedding_length"] // keys["attention.head_count"]
    scale = share if is_wide else config["head_dim"]
    asked = config.get("query_pre_attn_scalar", scale)
    return None if asked == scale else f"query_pre_attn_scalar {asked}"


def _positions(name: str, config: Table) -> tuple[dict[str, Any], dict[str, NDArray[np.float32]]]:
    """Return the keys of the rotary embedding, and of Llama 3 what divides its frequencies."""
    given: Table = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rope: Table = given.get("full_attention", given)
    theta = float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0)
    kind = rope.get("rope_type", rope.get("type", "default"))
    found: dict[str, Any] = {"rope.freq_base": theta}
    local = given.get("sliding_attention", {}).get("rope_theta", config.get("rope_local_base_freq"))
    if local is not None:
        found["rope.freq_base_swa"] = float(local)
    if kind in ("linear", "yarn"):
        numbers = {key: rope[own] for key, own in _TABLES["rope"].items() if rope.get(own)}
        found |= {"rope.scaling.type": kind, **{key: float(n) for key, n in numbers.items()}}
    if kind == "yarn":
        length = rope.get(ORIGINAL_LENGTH) or config["max_position_embeddings"]
        found["rope.scaling.original_context_length"] = int(length)
    if kind == "llama3" and name == "llama":
        return found, {"rope_freqs.weight": _factors(rope, theta, _head_size(config))}
    if kind in ("longrope", "su") and name == "phi3":
        longest, original = (int(config[k]) for k in ("max_position_embeddings", ORIGINAL_LENGTH))
        usual = math.sqrt(1 + max(0.0, math.log(longest / original)) / math.log(original))
        found["rope.scaling.attn_factor"] = float(rope.get("attention_factor") or usual)
        found["rope.scaling.original_context_length"] = original
        factors = {n: np.asarray(rope[f"{n}_factor"], np.float32) for n in ("long", "short")}
        if any(values.shape != (_rotated(config) // 2,) for values in factors.values()):
            raise ValueError("the factors are not one for each pair")
        return found, {f"rope_factors_{n}.weight": values for n, values in factors.items()}
    _refuse(None if kind in ("default", "linear", "yarn") else f"rope_type {kind}")
    return found, {}


def _factors(rope: Table, theta: float, size: int) -> NDArray[np.float32]:
    waves = 2 * math.pi * theta ** (np.arange(0, min(size, MAX_COUNT), 2) / size)
    factor, low, high = rope["factor"], rope["low_freq_factor"], rope["high_freq_factor"]
    length = rope[ORIGINAL_LENGTH]
    smooth = np.clip((length / waves - low) / (high - low), 0, 1)
    return np.asarray(1 / ((1 - smooth) / factor + smooth), np.float32)


# ---------------------------------------------------------------- keys of the vocabulary


def vocabulary_keys(beside: Sidecars, size: int) -> dict[str, Any]:
    """Return the keys of the tokenizer beside weights with so many rows."""
    tokenizer = beside.table("tokenizer.json")
    try:
        tokens = _token_keys(tokenizer, size, is_sure="tokenizer.model" in beside.files)
        tokens |= _special_keys(tokenizer, beside.table(CONFIG), beside.table(TOKENIZER_CONFIG))
    except MALFORMED as error:
        what = f"cannot be understood ({error!r})" if tokenizer else "is missing"
        raise InputError(f"tokenizer.json: {what}; {CONVERTER}") from None
    template = beside.chat_template()
    chat = {} if template is None else {"tokenizer.chat_template": template}
    return {f"tokenizer.ggml.{key}": value for key, value in tokens.items()} | chat


def _token_keys(tokenizer: Table, size: int, *, is_sure: bool) -> dict[str, Any]:
    """Return the keys of all tokens; `is_sure` means that sentencepiece made the pieces."""
    model = tokenizer["model"]
    _refuse(None if model["type"] == "BPE" else f"a tokenizer of type {model['type']}")
    vocabulary, has_bytes = model["vocab"], bool(model.get("byte_fallback"))
    texts, kinds = [f"[PAD{number}]" for number in range(size)], [UNUSED] * size
    for text, number in vocabulary.items():
        is_byte = has_bytes and re.fullmatch("<0x[0-9A-F]{2}>", text)
        texts[range(size)[number]], kinds[number] = text, BYTE if is_byte else NORMAL
    if has_bytes and (unknown := vocabulary.get(model.get("unk_token"))) is not None:
        kinds[unknown] = UNKNOWN
    for token in tokenizer.get("added_tokens") or ():
        text, number = str(token["content"]), range(size)[token["id"]]
        is_special = token.get("special") or SPECIAL_TOKEN.fullmatch(text)
        texts[number] = text if is_special else text.replace(SPACE, " ")
        if kinds[number] != UNKNOWN:
            kinds[number] = CONTROL if is_special else USER_DEFINED
    found = {"tokens": texts, "token_type": kinds}
    merges = [tuple(m.split(" ", 1) if isinstance(m, str) else m) for m in model["merges"]]
    if not has_bytes:
        pairs = [" ".join(part.replace(" ", "Ġ") for part in pair) for pair in merges]
        return {"model": "gpt2", "pre": _splitter(tokenizer), **found, "merges": pairs}
    pieces = {text for text, number in vocabulary.items() if kinds[number] == NORMAL}
    _refuse(None if is_sure else _lacking_merge(pieces, set(merges)))
    ranks: dict[str, float] = {}
    for pair in merges:
        ranks.setdefault("".join(pair), -float(len(ranks)))
    scores = [ranks.get(text, NEVER_MERGED) if len(text) > 1 else 0.0 for text in texts]
    space = {"scores": scores, "add_space_prefix": _adds_space(tokenizer)}
    return {"model": "llama", "pre": "default", **found, **space}


def _lacking_merge(pieces: Collection[str], merges: Collection[tuple[str, ...]]) -> str | None:
    """Name a merge that the tokenizer lacks; llama.cpp merges all parts that give a piece."""
    for piece in pieces:
        for cut in range(1, len(piece)):
            pair = piece[:cut], piece[cut:]
            if pair not in merges and pair[0] in pieces and pair[1] in pieces:
                return f"a tokenizer that does not merge {pair}"
    return None


def _steps(tokenizer: Table, *names: str) -> Iterator[Any]:
    """Yield the steps of some parts of a tokenizer; each may be missing, or a single one."""
    for name in names:
        if (part := tokenizer.get(name)) is not None:
            yield from part[_TABLES["steps"][name]] if part["type"] == "Sequence" else [part]


def _splitter(tokenizer: Table) -> str:
    """Return llama.cpp's name for the way in which a tokenizer of bytes splits text."""
    steps: list[Any] = []
    for step in _steps(tokenizer, "pre_tokenizer"):
        match step:
            case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": by_words}:
                steps.append("bytes by words" if by_words else "bytes")
            case {"type": "Digits", "individual_digits": True}:
                steps.append("digits")
            case {"type": "Split", "behavior": "Isolated", "invert": False, "pattern": pattern}:
                steps.append(pattern.get("Regex"))
            case _:
                steps.append(step["type"])
    looks_up = bool(tokenizer["model"].get("ignore_merges"))
    wanted = {"steps": steps, "looks_up": looks_up}
    name = next((own for own, table in _TABLES["splitters"].items() if table == wanted), None)
    forms = [step["type"] for step in _steps(tokenizer, "normalizer")]
    is_known = name is not None and forms in ([], ["NFC"])
    way = ", ".join([*forms, *map(str, steps), *["ignore_merges"] * looks_up])
    what = f"a tokenizer that splits text in a way that llama.cpp does not know ({way})"
    _refuse(None if is_known else what)
    return str(name)


def _adds_space(tokenizer: Table) -> bool:
    """Return whether a tokenizer of pieces puts a space before a text."""
    replaces = adds = False
    for step in _steps(tokenizer, "normalizer", "pre_tokenizer"):
        match step:
            case {"type": "Prepend", "prepend": "▁"}:
                adds = True
            case {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}:
                replaces = True
            case {"type": "Metaspace", "replacement": "▁", **rest}:
                replaces, adds = True, rest.get("prepend_scheme", "always") != "never"
            case {"type": "Split", "pattern": {"String": " "}}:
                pass  # Gemma's, which finds no spaces any more
            case _:
                _refuse(f"a tokenizer with the step {step['type']}")
    _refuse(None if replaces else "a tokenizer that leaves spaces as they are")
    return adds


def _special_keys(tokenizer: Table, config: Table, settings: Table) -> dict[str, Any]:
    """Return the ids of special tokens, and whether they are added to every text."""
    ids = {token["content"]: token["id"] for token in tokenizer.get("added_tokens") or ()}
    texts = {kind: token_text(settings.get(f"{kind}_token")) for kind in _TABLES["special_ids"]}
    found: dict[str, Any] = {}
    for kind, key in _TABLES["special_ids"].items():
        number = ids.get(texts[kind], config.get(f"{kind}_token_id"))
        if type(number) is int and 0 <= number < MAX_COUNT:
            found[key] = number
    around = [
        token.get("SpecialToken", {}).get("id")
        for step in _steps(tokenizer, "post_processor")
        for token in step.get("single", ())
    ]
    for kind, place in (("bos", 0), ("eos", -1)):
        is_there = len(around) > 1 and around[place] in ids and around[place] == texts[kind]
        found[f"add_{kind}_token"] = is_there or settings.get(f"add_{kind}_token") is True
    return found
