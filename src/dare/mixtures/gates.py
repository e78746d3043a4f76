"""The gates of a mixture: for every layer a vector for each expert, whose dot product decides.

Random gates, and the noise that an expert may get, are functions of seed, name and position, drawn
by the generator of the mask: the same numbers on every machine. Gates from prompts point to where
the prompts of an expert are: to their token embeddings, or to the hidden states of the base.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dare.errors import InputError
from dare.inputs.directory import TOKENIZER_CONFIG, read_json, read_text
from dare.inputs.sources import Source, hold_open, read_floats
from dare.inputs.transformers_models import load_live
from dare.inputs.vocabulary import TOKENIZER_FILE
from dare.mixtures.mixture import RANDOM, Mixture
from dare.tensors.mask import mask_key, philox4x32

Floats = NDArray[np.float32]
Vectors = NDArray[np.float64]  # a row for each layer
EMBEDDING = "model.embed_tokens.weight"
DRAW = 2  # third counter word of these draws; the mask has 0 and 1
LEAST_NORM = 1e-8


def make_gates(
    mixture: Mixture, base: Source, folder: Path, names: Sequence[str], width: int
) -> Floats:
    """Return the gates by layer, expert and position; `names` are those of their tensors."""
    if mixture.gates in RANDOM:
        draw = draw_normal if mixture.gates == "random" else draw_uniform
        size = len(mixture.gated) * width
        drawn = np.stack([draw(mixture.seed, name, 0, size, width) for name in names])
        return drawn.reshape(len(names), -1, width)
    make_embed = _sum_embeddings if mixture.gates == "cheap_embed" else _average_states
    gates = []
    with hold_open([base]):
        embed = make_embed(mixture, base, folder)
        for expert in mixture.gated:
            vectors = embed(expert.prompts)
            if expert.negative_prompts:
                vectors = vectors - embed(expert.negative_prompts)
            gates.append(np.broadcast_to(_normalised(vectors), (len(names), width)))
    return np.stack(gates, axis=1).astype(np.float32)


def _normalised(vectors: Vectors) -> Vectors:
    norms = np.sqrt(np.square(vectors).sum(axis=-1, keepdims=True))
    return np.asarray(vectors / np.maximum(norms, LEAST_NORM))


# ---------------------------------------------------------------- by chance


def _draw(seed: int, name: str, start: int, count: int) -> NDArray[np.uint64]:
    """Draw four words of 32 bits for each of the elements start … start + count."""
    index = np.arange(start, start + count, dtype=np.uint64)
    third = np.full_like(index, DRAW)
    counter = index & np.uint64(0xFFFFFFFF), index >> np.uint64(32), third, np.zeros_like(index)
    return np.stack(philox4x32(counter, mask_key(seed, name)))


def draw_uniform(seed: int, name: str, start: int, count: int, width: int) -> Floats:
    """Draw numbers between ±1/√width."""
    drawn = (_draw(seed, name, start, count)[0] + 0.5) / 2**31 - 1
    return np.asarray(drawn / sqrt(width), np.float32)


def draw_normal(seed: int, name: str, start: int, count: int, _width: int = 1) -> Floats:
    """Draw numbers of mean 0 and deviation 1: sums of eight uniform ones, nearly normal.

    Unlike logarithms and cosines, sums are the same on every machine.
    """
    words = _draw(seed, name, start, count)
    total = ((words & np.uint64(0xFFFF)) + (words >> np.uint64(16))).sum(axis=0)
    return np.asarray((total - 4.0 * 65535) / sqrt(8 * (65536**2 - 1) / 12), np.float32)


# ---------------------------------------------------------------- from prompts


def _sum_embeddings(_mixture: Mixture, base: Source, folder: Path) -> Callable[..., Vectors]:
    """Add up the embeddings of all tokens of the prompts, for all layers the same."""
    rows, width = base.tensors[EMBEDDING].shape

    def embed(prompts: Sequence[str]) -> Vectors:
        total = np.zeros((1, width))
        for token in (token for ids in _tokenized(folder, prompts) for token in ids):
            if token >= rows:
                raise InputError(f"{folder}: token {token} is not among the {rows} embeddings")
            total += read_floats(base, EMBEDDING, token * width, width)
        return _normalised(total)

    return embed


def _average_states(mixture: Mixture, _base: Source, folder: Path) -> Callable[..., Vectors]:
    """Average over the prompts what enters each layer: at the last token, or the mean of all."""
    model = load_live(folder)

    def of_prompt(ids: list[int]) -> Vectors:  # one by one, so that nothing needs padding
        tokens = sys.modules["torch"].tensor([ids], device=model.device)
        states = model(tokens, output_hidden_states=True).hidden_states[:-1]
        entering: Any = np.stack([state[0].double().cpu().numpy() for state in states])
        return np.array(entering.mean(1) if mixture.gates == "hidden_avg" else entering[:, -1])

    return lambda prompts: np.mean([of_prompt(ids) for ids in _tokenized(folder, prompts)], axis=0)


def _tokenized(folder: Path, prompts: Sequence[str]) -> Iterator[list[int]]:
    """Yield the tokens of each prompt, after the one that begins a text, if there is one."""
    where = folder / TOKENIZER_FILE
    try:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_str((read_text(folder, TOKENIZER_FILE) or b"").decode())
    except ImportError:
        needs = "gates from prompts need a package: pip install tokenizers"
        raise InputError(f"{where}: {needs}") from None
    except Exception as error:  # it raises nothing more special
        raise InputError(f"{where}: cannot be read: {error}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    config = read_json(folder, TOKENIZER_CONFIG)
    token = config.get("bos_token") if isinstance(config, dict) else None
    first = token.get("content") if isinstance(token, dict) else token
    for prompt in prompts:
        yield tokenizer.encode(f"{first or ''}{prompt}", add_special_tokens=False).ids
