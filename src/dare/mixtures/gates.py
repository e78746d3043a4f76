"""The gates of a mixture: for every layer a vector for each expert, whose dot product decides.

Random gates, and the noise that an expert may get, are functions of seed, name and position, drawn
by the generator of the mask: the same numbers on every machine. Gates from prompts point to where
the prompts of an expert are: to their token embeddings, or to the hidden states of the base.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dare.errors import InputError
from dare.inputs.directory import TOKENIZER_CONFIG, read_json, read_text
from dare.inputs.loaded import KNOWN_ONLY, NEEDED, load_live
from dare.inputs.sources import Source, hold_open, read_floats
from dare.inputs.vocabulary import TOKENIZER_FILE
from dare.mixtures.mixture import RANDOM, Mixture
from dare.tensors.mask import mask_key, philox4x32

Floats = NDArray[np.float32]
Embed = Callable[[Sequence[str]], NDArray[np.float64]]  # prompts to a vector for each layer

EMBEDDING = "model.embed_tokens.weight"
DRAW = 2  # third counter word of these draws; the mask has 0 and 1
LEAST_NORM = 1e-8
_HALF = np.uint64(0xFFFF)


def make_gates(
    mixture: Mixture, base: Source, folder: Path, names: Sequence[str], width: int
) -> Floats:
    """Return the gates by layer, expert and position; `names` are those of their tensors."""
    if mixture.gates in RANDOM:
        draw = draw_normal if mixture.gates == "random" else draw_uniform
        count = len(mixture.gated) * width
        drawn = [draw(mixture.seed, name, 0, count).reshape(-1, width) for name in names]
        return np.stack(drawn) / np.float32(1 if mixture.gates == "random" else sqrt(width))
    if mixture.gates == "cheap_embed":
        embed = _token_embeddings(base, folder, len(names))
    else:
        embed = _hidden_states(folder, averages=mixture.gates == "hidden_avg")
    gates = []
    with hold_open([base]):
        for expert in mixture.gated:
            vectors = embed(expert.prompts)
            if expert.negative_prompts:
                vectors = vectors - embed(expert.negative_prompts)
            gates.append(_normalised(vectors))
    return np.stack(gates, axis=1).astype(np.float32)


def _normalised(vectors: NDArray[np.float64]) -> NDArray[np.float64]:
    return vectors / np.maximum(np.linalg.norm(vectors, axis=-1, keepdims=True), LEAST_NORM)


# ---------------------------------------------------------------- by chance


def _draw(seed: int, name: str, start: int, count: int) -> Sequence[NDArray[np.uint64]]:
    """Draw four words of 32 bits for each of the elements start … start + count."""
    index = np.arange(start, start + count, dtype=np.uint64)
    third = np.full_like(index, DRAW)
    counter = index & np.uint64(0xFFFFFFFF), index >> np.uint64(32), third, np.zeros_like(index)
    return philox4x32(counter, mask_key(seed, name))


def draw_uniform(seed: int, name: str, start: int, count: int) -> Floats:
    """Draw numbers between -1 and 1."""
    word = _draw(seed, name, start, count)[0].astype(np.float64)
    return ((word + 0.5) / 2**31 - 1).astype(np.float32)


def draw_normal(seed: int, name: str, start: int, count: int) -> Floats:
    """Draw numbers of mean 0 and deviation 1: sums of eight uniform ones, nearly normal.

    Unlike logarithms and cosines, sums are the same on every machine.
    """
    words = _draw(seed, name, start, count)
    total = sum(((word & _HALF) + (word >> np.uint64(16)) for word in words), np.uint64(0))
    mean, deviation = 4 * 65535, sqrt(8 * (65536**2 - 1) / 12)
    return ((total.astype(np.float64) - mean) / deviation).astype(np.float32)


# ---------------------------------------------------------------- from prompts


def _token_embeddings(base: Source, folder: Path, layers: int) -> Embed:
    """Add up the embeddings of all tokens of the prompts: the same for each layer."""
    try:
        from tokenizers import Tokenizer
    except ImportError:
        needs = 'gates = "cheap_embed" needs a package: pip install tokenizers'
        raise InputError(f"{folder}: {needs}") from None
    text, where = read_text(folder, TOKENIZER_FILE), folder / TOKENIZER_FILE
    if text is None:
        raise InputError(f"{where}: is missing, and gates from prompts need it")
    try:
        tokenizer = Tokenizer.from_str(text.decode())
    except Exception as error:  # it raises nothing more special
        raise InputError(f"{where}: cannot be read: {error}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    rows, width = base.tensors[EMBEDDING].shape
    first = _first_token(folder)

    def embed(prompts: Sequence[str]) -> NDArray[np.float64]:
        total = np.zeros(width)
        for prompt in prompts:
            for token in tokenizer.encode(first + prompt, add_special_tokens=False).ids:
                if token >= rows:
                    raise InputError(f"{where}: token {token} has none of the {rows} embeddings")
                total += read_floats(base, EMBEDDING, token * width, width)
        return np.tile(_normalised(total), (layers, 1))

    return embed


def _first_token(folder: Path) -> str:
    """Return the token that begins a text; empty if there is none."""
    config = read_json(folder, TOKENIZER_CONFIG)
    token = config.get("bos_token") if isinstance(config, dict) else None
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else ""


def _hidden_states(folder: Path, *, averages: bool) -> Embed:
    """Average over the prompts what enters each layer: at the last token, or the mean of all."""
    try:
        import torch
        from transformers import AutoTokenizer
    except ImportError:
        other = 'or set gates = "cheap_embed"'
        raise InputError(f"{folder}: gates from hidden states need {NEEDED}; {other}") from None
    model = load_live(folder)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder, **KNOWN_ONLY)

    def embed(prompts: Sequence[str]) -> NDArray[np.float64]:
        total: Any = 0
        for prompt in prompts:  # one by one: nothing needs padding
            text = (tokenizer.bos_token or "") + prompt
            tokens = tokenizer(text, return_tensors="pt", add_special_tokens=False)
            states = model(**tokens.to(model.device), output_hidden_states=True).hidden_states
            entering = torch.cat(states[:-1]).double()  # layer, token, position
            total = total + (entering.mean(1) if averages else entering[:, -1])
        found: NDArray[np.float64] = (total / len(prompts)).cpu().numpy()
        return found

    return embed
