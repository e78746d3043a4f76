"""The keys of a GGUF file that is made of a model directory, as llama.cpp's converter makes them.

Where llama.cpp could not be told how the model computes or splits text, it is refused.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dare.errors import InputError
from dare.inputs.directory import TOKENIZER_CONFIG, Sidecars, token_text
from dare.inputs.gguf import FAMILIES
from dare.inputs.sources import CONFIG

CONVERTER = "write a directory, and use convert_hf_to_gguf.py of llama.cpp"

ARCHITECTURES = {"mistral": "llama", "gemma3_text": "gemma3"}  # by model type, if not its own
_NEEDED = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "vocab_size": "vocab_size",
}
_OPTIONAL = {
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.value_length": "head_dim",
}
_GEMMA_FLOATS = ("attn_logit_softcapping", "final_logit_softcapping")
_FULL_EVERY = {"gemma2": 2, "gemma3": 6}  # layers; those between have a sliding window
_LARGEST = {"gemma2": 46, "gemma3": 62}  # layers of the model whose queries are scaled by its width
_YARN = {
    "extrapolation_factor": "yarn_ext_factor",
    "attention_factor": "yarn_attn_factor",
    "beta_fast": "yarn_beta_fast",
    "beta_slow": "yarn_beta_slow",
}


def model_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the architecture, and the keys that say how the model computes."""
    kind = str(config.get("model_type"))
    name = ARCHITECTURES.get(kind, kind)
    _refuse(None if name in FAMILIES else f"the model type {kind} (known: {', '.join(FAMILIES)})")
    try:
        found: dict[str, Any] = {key: int(config[own]) for key, own in _NEEDED.items()}
        found |= {key: int(config[own]) for key, own in _OPTIONAL.items() if config.get(own)}
        found["attention.layer_norm_rms_epsilon"] = float(config["rms_norm_eps"])
        if name == "llama":
            heads = found["embedding_length"] // found["attention.head_count"]
            found["rope.dimension_count"] = found.get("attention.key_length", heads)
        if name in _FULL_EVERY:
            found |= {key: float(config[key]) for key in _GEMMA_FLOATS if config.get(key)}
            found["attention.sliding_window"] = int(config["sliding_window"])
        found |= _rope_keys(config)
        _refuse(_unlike_llama_cpp(name, config, found))
    except (KeyError, TypeError, ValueError, AttributeError, ZeroDivisionError) as error:
        raise InputError(f"{CONFIG}: does not say how {kind} computes ({error!r})") from None
    return {"general.architecture": name, **{f"{name}.{key}": v for key, v in found.items()}}


def _unlike_llama_cpp(name: str, config: Mapping[str, Any], keys: Mapping[str, Any]) -> str | None:
    """Say what llama.cpp takes for granted of an architecture, and this model has otherwise."""
    layers, every = keys["block_count"], _FULL_EVERY.get(name)
    if every is None:
        silent = config.get("hidden_act", "silu")
        return None if name.startswith("gemma") or silent == "silu" else f"hidden_act {silent}"
    usual = [f"{'sliding' if n % every else 'full'}_attention" for n in range(1, layers + 1)]
    if (
        config.get("layer_types", usual) != usual
        or config.get("sliding_window_pattern", every) != every
    ):
        return "layers with a sliding window in another order"
    width = keys["embedding_length"] // keys["attention.head_count"]
    scale = width if layers == _LARGEST[name] else keys["attention.key_length"]
    asked = config.get("query_pre_attn_scalar", scale)
    return None if asked == scale else f"query_pre_attn_scalar {asked}"


def _rope_parameters(config: Mapping[str, Any]) -> Mapping[str, Any]:
    found = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = {"rope_theta": config["rope_theta"]} if config.get("rope_theta") else {}
    return {**theta, **found.get("full_attention", found)}


def _rope_type(rope: Mapping[str, Any]) -> str:
    return str(rope.get("rope_type", rope.get("type", "default")))


def _rope_keys(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield how positions are told; `rope_factors` has what llama3 adds to that."""
    rope, kind = _rope_parameters(config), _rope_type(_rope_parameters(config))
    yield "rope.freq_base", float(rope.get("rope_theta", 10000.0))
    sliding = (config.get("rope_parameters") or {}).get("sliding_attention", {})
    if (local := sliding.get("rope_theta", config.get("rope_local_base_freq"))) is not None:
        yield "rope.freq_base_swa", float(local)
    if kind in ("linear", "yarn"):
        yield "rope.scaling.type", kind
        yield "rope.scaling.factor", float(rope["factor"])
    if kind == "yarn":
        length = rope.get("original_max_position_embeddings") or config["max_position_embeddings"]
        yield "rope.scaling.original_context_length", int(length)
        for own, key in _YARN.items():
            if rope.get(own) is not None:
                yield f"rope.scaling.{key}", float(rope[own])
    is_llama3 = kind == "llama3" and config.get("model_type") in ("llama", "mistral")
    _refuse(None if kind in ("default", "linear", "yarn") or is_llama3 else f"rope_type {kind}")


def rope_factors(config: Mapping[str, Any]) -> NDArray[np.float32] | None:
    """Return what Llama 3 divides each frequency by, which llama.cpp has as a tensor."""
    rope = _rope_parameters(config)
    if _rope_type(rope) != "llama3":
        return None
    size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    powers = np.arange(0, size, 2, dtype=np.float32) / np.float32(size)
    waves = 2 * math.pi * np.float64(rope["rope_theta"]) ** powers
    factor, low, high = rope["factor"], rope["low_freq_factor"], rope["high_freq_factor"]
    length = rope["original_max_position_embeddings"]
    smooth = np.clip((length / waves - low) / (high - low), 0, 1)
    return np.asarray(1 / ((1 - smooth) / factor + smooth), np.float32)


# ---------------------------------------------------------------- the vocabulary

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)
_SPECIAL = re.compile(r"<pad>|<mask>|<2mass>|\[@BOS@\]|<\|.*\|>|<｜.*｜>|<unused.*>")
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LOWER, _UPPER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]", r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_OTHER = r"[^\r\n\p{L}\p{N}]?"
_TEKKEN = (
    rf"{_OTHER}{_UPPER}*{_LOWER}+|{_OTHER}{_UPPER}+{_LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# llama.cpp's name for a way to split text before merging, and whether whole words are looked up.
_SPLITTERS = {
    ("bytes by words",): ("gpt-2", False),
    ("digits", "bytes by words"): ("smollm", False),
    (rf"{_SHORT}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}", "bytes"): ("llama-bpe", True),
    (rf"{_SHORT}|{_WORDS}|\p{{N}}|{_REST}", "bytes"): ("qwen2", False),
    (_TEKKEN, "bytes"): ("tekken", True),
}
_SPECIAL_IDS = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
SPACE = "▁"
NEVER_MERGED = -1e6  # a score


def vocabulary_keys(beside: Sidecars) -> dict[str, Any]:
    """Return the keys of the tokenizer that lies beside the weights."""
    tokenizer = beside.table("tokenizer.json")
    try:
        found = _token_keys(beside, tokenizer) | _special_keys(beside, tokenizer)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        what = "is missing" if not tokenizer else f"cannot be understood ({error!r})"
        raise InputError(f"tokenizer.json: {what}; {CONVERTER}") from None
    if (template := beside.chat_template()) is not None:
        found["chat_template"] = template
    prefixes = {key: "tokenizer." if key == "chat_template" else "tokenizer.ggml." for key in found}
    return {prefixes[key] + key: value for key, value in found.items()}


def _token_keys(beside: Sidecars, tokenizer: Mapping[str, Any]) -> dict[str, Any]:
    model, size = tokenizer["model"], int(beside.table(CONFIG)["vocab_size"])
    _refuse(None if model["type"] == "BPE" else f"a tokenizer of type {model['type']}")
    vocabulary, is_bytes = model["vocab"], bool(model.get("byte_fallback"))
    merges = [tuple(m.split(" ", 1)) if isinstance(m, str) else tuple(m) for m in model["merges"]]
    texts, kinds = [f"[PAD{number}]" for number in range(size)], [_UNUSED] * size
    for text, number in vocabulary.items():
        is_byte = is_bytes and re.fullmatch("<0x[0-9A-F]{2}>", text)
        texts[range(size)[number]] = text
        kinds[number] = _BYTE if is_byte else _NORMAL
    for token in tokenizer.get("added_tokens", ()):
        text, number = str(token["content"]), range(size)[token["id"]]
        is_special = token.get("special") or _SPECIAL.fullmatch(text)
        texts[number] = text if is_special else text.replace(SPACE, " ")
        kinds[number] = _CONTROL if is_special else _USER_DEFINED
    found = {"tokens": texts, "token_type": kinds}
    if not is_bytes:
        joined = [" ".join(part.replace(" ", "\u0120") for part in pair) for pair in merges]
        return {"model": "gpt2", "pre": _splitter(tokenizer), **found, "merges": joined}
    if model.get("unk_token") in vocabulary:
        kinds[vocabulary[model["unk_token"]]] = _UNKNOWN
    prefix = _space_prefix(tokenizer)
    if "tokenizer.model" not in beside.files:
        pieces = {t for t, n in vocabulary.items() if kinds[n] == _NORMAL}
        _refuse(_lacking_merge(pieces, merges))
    ranks: dict[str, float] = {}
    for pair in merges:
        ranks.setdefault("".join(pair), -float(len(ranks)))
    scores = [ranks.get(t, NEVER_MERGED) if len(t) > 1 else 0.0 for t in texts]
    more = {"scores": scores, "add_space_prefix": prefix}
    return {"model": "llama", "pre": "default", **found, **more}


def _lacking_merge(pieces: set[str], merges: list[tuple[str, ...]]) -> str | None:
    """Say that some parts may not be merged, though llama.cpp merges all that give a piece."""
    known = set(merges)
    for piece in pieces:
        for cut in range(1, len(piece)):
            pair = piece[:cut], piece[cut:]
            if pair not in known and pieces.issuperset(pair):
                return f"a tokenizer that does not merge {pair}"
    return None


def _parts(step: Any, key: str) -> list[Any]:
    """Return the steps of a sequence, or the only one."""
    if step is None:
        return []
    return list(step[key]) if step["type"] == "Sequence" else [step]


def _splitter(tokenizer: Mapping[str, Any]) -> str:
    """Return llama.cpp's name for the way in which a tokenizer of bytes splits text."""
    steps = []
    for part in _parts(tokenizer.get("pre_tokenizer"), "pretokenizers"):
        match part:
            case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": is_split}:
                steps.append("bytes by words" if is_split else "bytes")
            case {"type": "Digits", "individual_digits": True}:
                steps.append("digits")
            case {"type": "Split", "behavior": "Isolated", "invert": False, "pattern": pattern}:
                steps.append(pattern.get("Regex"))
            case _:
                steps.append(part["type"])
    looks_up = bool(tokenizer["model"].get("ignore_merges"))
    name, expected = _SPLITTERS.get(tuple(steps), (None, looks_up))
    normalizers = [n["type"] for n in _parts(tokenizer.get("normalizer"), "normalizers")]
    is_known = name is not None and looks_up == expected and normalizers in ([], ["NFC"])
    _refuse(None if is_known else f"a tokenizer that splits text by {steps}")
    return str(name)


def _space_prefix(tokenizer: Mapping[str, Any]) -> bool:
    """Tell whether a tokenizer with bytes for what it lacks puts a space before a text."""
    steps = [
        *_parts(tokenizer.get("normalizer"), "normalizers"),
        *_parts(tokenizer.get("pre_tokenizer"), "pretokenizers"),
    ]
    replaces = prefixes = False
    for step in steps:
        match step:
            case {"type": "Prepend", "prepend": "▁"}:
                prefixes = True
            case {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}:
                replaces = True
            case {"type": "Metaspace", "replacement": "▁", **rest}:
                replaces = True
                prefixes |= rest.get("prepend_scheme", "always") != "never"
            case {"type": "Split", "pattern": {"String": " "}}:
                pass
            case _:
                _refuse(f"a tokenizer with the step {step['type']}")
    _refuse(None if replaces else "a tokenizer that leaves spaces as they are")
    return prefixes


def _special_keys(beside: Sidecars, tokenizer: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ids of special tokens, and those that are added to every text."""
    settings, config = beside.table(TOKENIZER_CONFIG), beside.table(CONFIG)
    ids = {token["content"]: token["id"] for token in tokenizer.get("added_tokens", ())}
    found, texts = {}, {}
    for kind, key in _SPECIAL_IDS.items():
        texts[kind] = token_text(settings.get(f"{kind}_token"))
        number = ids.get(texts[kind], config.get(f"{kind}_token_id"))
        if type(number) is int and number >= 0:
            found[f"{key}_token_id"] = number
    single = [
        step.get("SpecialToken", {}).get("id")
        for part in _parts(tokenizer.get("post_processor"), "processors")
        for step in part.get("single", ())
    ]
    for kind, place in (("bos", 0), ("eos", -1)):
        is_added = len(single) > 1 and single[place] is not None and single[place] == texts[kind]
        found[f"add_{kind}_token"] = is_added or settings.get(f"add_{kind}_token") is True
    return found


def _refuse(what: str | None) -> None:
    if what is not None:
        raise InputError(f"GGUF cannot be written of a model with {what}; {CONVERTER}")
