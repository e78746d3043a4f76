"""The keys of a GGUF file that is made of a model directory, as llama.cpp's converter makes them.

Where llama.cpp could not be told how the model computes or splits text, it is refused.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Collection, Iterator, Mapping
from importlib.resources import files
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dare.errors import InputError
from dare.inputs.directory import TOKENIZER_CONFIG, Sidecars, token_text
from dare.inputs.gguf import FAMILIES
from dare.inputs.sources import CONFIG

CONVERTER = "write a directory, and use convert_hf_to_gguf.py from llama.cpp"
MOST = 1 << 22  # of anything that is counted in a configuration, but positions
NEVER_MERGED = -1e6  # a score
SPACE = "▁"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # kinds of tokens
# What the converter takes for special, even if it is not marked so.
SPECIAL = re.compile(r"<pad>|<mask>|<2mass>|\[@BOS@\]|<\|.*\|>|<｜.*｜>|<unused.*>")
WRONG = (KeyError, TypeError, ValueError, AttributeError, IndexError, ArithmeticError)
_TABLES = tomllib.loads(files("dare.formats").joinpath("gguf.toml").read_text("utf-8"))

Table = Mapping[str, Any]


def _refuse(what: str | None) -> None:
    if what is not None:
        raise InputError(f"a model with {what} cannot become GGUF; {CONVERTER}")


# ---------------------------------------------------------------- the model


def model_keys(config: Table) -> tuple[dict[str, Any], dict[str, NDArray[np.float32]]]:
    """Return the keys, and the tensors, that describe the architecture."""
    kind = str(config.get("model_type"))
    name = _TABLES["architectures"].get(kind, kind)
    _refuse(None if name in FAMILIES else f"the model type {kind} (known: {', '.join(FAMILIES)})")
    try:
        found = dict(_numbers(name, config))
        rope, factors = _positions(name, config)
        _refuse(_unlike_llama_cpp(name, config, found))
    except WRONG as error:
        raise InputError(f"{CONFIG}: a value for {kind} is missing or wrong ({error!r})") from None
    keys = {f"{name}.{key}": value for key, value in (found | rope).items()}
    return {"general.architecture": name, **keys}, factors


def _numbers(name: str, config: Table) -> Iterator[tuple[str, Any]]:
    given = [(key, own) for key, own in _TABLES["optional"].items() if config.get(own) is not None]
    for key, own in (*_TABLES["needed"].items(), *given):
        number = int(config[own])
        if not 0 < number < (MOST << 10 if key == "context_length" else MOST):
            raise ValueError(f"{own} is {number}")
        yield key, number
    yield "attention.layer_norm_rms_epsilon", float(config["rms_norm_eps"])
    if name == "llama":
        yield "rope.dimension_count", _head_size(config)
    if name in _TABLES["full_every"]:
        yield "attention.sliding_window", int(config["sliding_window"])
        for key in ("attn_logit_softcapping", "final_logit_softcapping"):
            if config.get(key):
                yield key, float(config[key])


def _head_size(config: Table) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def _unlike_llama_cpp(name: str, config: Table, keys: Table) -> str | None:
    """Say what llama.cpp assumes of an architecture that does not hold for this model."""
    every, layers = _TABLES["full_every"].get(name), keys["block_count"]
    if every is None:
        act = "silu" if name.startswith("gemma") else config.get("hidden_act", "silu")
        return None if act == "silu" else f"hidden_act {act}"
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
        length = rope.get("original_max_position_embeddings") or config["max_position_embeddings"]
        found["rope.scaling.original_context_length"] = int(length)
    if kind == "llama3" and name == "llama":
        return found, {"rope_freqs.weight": _factors(rope, theta, _head_size(config))}
    _refuse(None if kind in ("default", "linear", "yarn") else f"rope_type {kind}")
    return found, {}


def _factors(rope: Table, theta: float, size: int) -> NDArray[np.float32]:
    waves = 2 * math.pi * theta ** (np.arange(0, min(size, MOST), 2) / size)
    factor, low, high = rope["factor"], rope["low_freq_factor"], rope["high_freq_factor"]
    length = rope["original_max_position_embeddings"]
    smooth = np.clip((length / waves - low) / (high - low), 0, 1)
    return np.asarray(1 / ((1 - smooth) / factor + smooth), np.float32)


# ---------------------------------------------------------------- the vocabulary


def vocabulary_keys(beside: Sidecars, size: int) -> dict[str, Any]:
    """Return the keys of the tokenizer beside weights with so many rows."""
    tokenizer = beside.table("tokenizer.json")
    try:
        tokens = _token_keys(tokenizer, size, is_sure="tokenizer.model" in beside.files)
        tokens |= _special_keys(tokenizer, beside.table(CONFIG), beside.table(TOKENIZER_CONFIG))
    except WRONG as error:
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
        is_special = token.get("special") or SPECIAL.fullmatch(text)
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
    """Tell whether a tokenizer of pieces puts a space before a text."""
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
        if type(number) is int and 0 <= number < MOST:
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
