"""A small Llama in NumPy: reads a model's directory or file, scores bytes, and writes on.

It is for the demonstration's byte-level models: a token is a byte, embeddings are tied, and
attention has one key and value for each query head. All arithmetic is in float32.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dare.demo.tasks import END, Example
from dare.errors import InputError
from dare.inputs.reading import read_floats
from dare.inputs.sources import open_source

Floats = NDArray[np.float32]
Tokens = NDArray[np.intp]

_AT_ONCE = 4096
"""Positions computed together: enough to be fast, few enough to stay in the caches."""


@dataclass(frozen=True)
class Shape:
    """What a model's config.json says of its shape."""

    layers: int
    heads: int
    norm_epsilon: float
    rope_theta: float
    context: int

    @classmethod
    def read(cls, config: Path) -> Shape:
        """Read a config.json as Hugging Face writes it."""
        settings = json.loads(config.read_text(encoding="utf-8"))
        if settings["num_key_value_heads"] != settings["num_attention_heads"]:
            raise InputError(f"{config}: the demonstration's model has a key for each query head")
        return cls(
            layers=settings["num_hidden_layers"],
            heads=settings["num_attention_heads"],
            norm_epsilon=settings["rms_norm_eps"],
            rope_theta=settings["rope_theta"],
            context=settings["max_position_embeddings"],
        )


@dataclass(frozen=True)
class _Layer:
    """One layer's weights, transposed and joined so that a layer takes four matrix products."""

    attention_norm: Floats
    query_key_value: Floats
    """[hidden, 3 · hidden]"""
    output: Floats
    inner_norm: Floats
    gate_up: Floats
    """[hidden, 2 · inner]"""
    down: Floats


@dataclass
class Cache:
    """Keys and values of the positions so far: for each layer [rows, heads, positions, size]."""

    keys: list[Floats] = field(default_factory=list)
    values: list[Floats] = field(default_factory=list)

    @property
    def length(self) -> int:
        """How many positions there are so far."""
        return self.keys[0].shape[2] if self.keys else 0


class Llama:
    """A model in memory.

    `weights` is a directory with a safetensors file or such a file itself; `config` is the
    config.json that tells its shape.
    """

    def __init__(self, weights: Path, config: Path) -> None:
        self.shape = Shape.read(config)
        tensors = read_weights(weights)
        self._embedding = tensors["model.embed_tokens.weight"]
        self._norm = tensors["model.norm.weight"]
        self._layers = [_layer(tensors, index) for index in range(self.shape.layers)]
        self._head_size = self._embedding.shape[1] // self.shape.heads
        self._cosine, self._sine = _rotations(self.shape, self._head_size)

    def logits(self, tokens: Tokens, cache: Cache | None = None) -> Floats:
        """Score the next byte at each position: [rows, positions] to [rows, positions, 256].

        With a cache the tokens go on where the earlier ones ended.
        """
        cache = Cache() if cache is None else cache
        start = cache.length
        rows, positions = tokens.shape
        angles = slice(start, start + positions)
        cosine, sine = self._cosine[angles], self._sine[angles]
        stream = self._embedding[tokens.ravel()]
        for index, layer in enumerate(self._layers):
            normed = _normed(stream, layer.attention_norm, self.shape.norm_epsilon)
            joined = (normed @ layer.query_key_value).reshape(
                rows, positions, 3, self.shape.heads, -1
            )
            query, key, value = joined.transpose(2, 0, 3, 1, 4)
            key, value = _extended(
                cache, index, _rotated(key, cosine, sine), np.ascontiguousarray(value)
            )
            mixed = _attended(_rotated(query, cosine, sine), key, value)
            stream += mixed.transpose(0, 2, 1, 3).reshape(stream.shape) @ layer.output
            normed = _normed(stream, layer.inner_norm, self.shape.norm_epsilon)
            gate, up = np.split(normed @ layer.gate_up, 2, axis=-1)
            stream += (_silu(gate) * up) @ layer.down
        normed = _normed(stream, self._norm, self.shape.norm_epsilon)
        return (normed @ self._embedding.T).reshape(rows, positions, -1)

    def write(self, prompts: Sequence[str], limit: int = 40) -> list[str]:
        """Continue each prompt greedily to the end of the line, or for `limit` bytes."""
        written = [""] * len(prompts)
        for rows in _by_length(prompts):
            tokens = np.stack([_tokens(prompts[row]) for row in rows])
            for row, text in zip(rows, self._write_on(tokens, limit), strict=True):
                written[row] = text
        return written

    def _write_on(self, tokens: Tokens, limit: int) -> list[str]:
        cache = Cache()
        best = self.logits(tokens, cache)[:, -1].argmax(-1)
        steps = [best]
        ended = best == ord(END)
        while len(steps) < limit and not ended.all():
            best = self.logits(best[:, None], cache)[:, 0].argmax(-1)
            steps.append(best)
            ended |= best == ord(END)
        lines = np.stack(steps, axis=1).astype(np.uint8)
        return [line.tobytes().decode("latin-1").split(END)[0] for line in lines]

    def share_right(self, examples: Sequence[Example]) -> float:
        """Share of the examples that greedy decoding answers exactly right.

        Greedy decoding writes an answer if and only if each of its bytes, and the end of the line
        after it, is the likeliest after those before. So one pass over prompt and answer tells
        what writing byte by byte would, several times faster.
        """
        lines = [prompt + answer + END for prompt, answer in examples]
        right = 0
        for rows in _by_length(lines):
            tokens = np.stack([_tokens(lines[row]) for row in rows])
            starts = np.array([[len(examples[row].prompt)] for row in rows])
            best = self._best(tokens[:, :-1])
            before = np.arange(1, tokens.shape[1]) < starts
            right += int(((best == tokens[:, 1:]) | before).all(axis=1).sum())
        return right / len(examples)

    def _best(self, tokens: Tokens) -> Tokens:
        """The likeliest next byte at each position, some rows at a time."""
        rows = max(1, _AT_ONCE // tokens.shape[1])
        parts = [
            self.logits(tokens[first : first + rows]).argmax(-1)
            for first in range(0, len(tokens), rows)
        ]
        return np.concatenate(parts)

    def bits_per_byte(self, text: bytes) -> float:
        """Mean bits the model needs for a byte of a text, in windows as long as its context."""
        context = self.shape.context
        tokens = np.frombuffer(text, np.uint8)[: len(text) // context * context]
        windows = tokens.astype(np.intp).reshape(-1, context)
        rows = max(1, _AT_ONCE // context)
        bits = [
            _bits(self.logits(part[:, :-1]), part[:, 1:])
            for part in (windows[first : first + rows] for first in range(0, len(windows), rows))
        ]
        return float(np.concatenate(bits).mean())


def read_weights(path: Path) -> dict[str, Floats]:
    """Read all tensors of a safetensors file or directory as float32."""
    weights = {}
    with open_source(path) as source:
        for name, info in source.tensors.items():
            if not info.dtype.is_weight:
                raise InputError(f"{path}: {name} is {info.dtype.name}, not a weight type")
            weights[name] = read_floats(source, name, 0, info.elements).reshape(info.shape)
    return weights


def _layer(tensors: Mapping[str, Floats], index: int) -> _Layer:
    prefix = f"model.layers.{index}."

    def joined(*names: str) -> Floats:
        """Side by side, transposed: what a row of activations is multiplied with."""
        return np.ascontiguousarray(
            np.concatenate([tensors[f"{prefix}{name}.weight"] for name in names]).T
        )

    return _Layer(
        attention_norm=tensors[f"{prefix}input_layernorm.weight"],
        query_key_value=joined("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        output=joined("self_attn.o_proj"),
        inner_norm=tensors[f"{prefix}post_attention_layernorm.weight"],
        gate_up=joined("mlp.gate_proj", "mlp.up_proj"),
        down=joined("mlp.down_proj"),
    )


def _rotations(shape: Shape, head_size: int) -> tuple[Floats, Floats]:
    frequencies = shape.rope_theta ** (-np.arange(0, head_size, 2) / head_size)
    angles = np.outer(np.arange(shape.context), np.tile(frequencies, 2))
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def _rotated(heads: Floats, cosine: Floats, sine: Floats) -> Floats:
    half = heads.shape[-1] // 2
    turned = np.concatenate((-heads[..., half:], heads[..., :half]), axis=-1)
    turned *= sine
    turned += heads * cosine
    return turned


def _extended(cache: Cache, layer: int, key: Floats, value: Floats) -> tuple[Floats, Floats]:
    """Add a layer's keys and values to the cache; return all there are now."""
    if layer == len(cache.keys):
        cache.keys.append(key)
        cache.values.append(value)
    else:
        cache.keys[layer] = np.concatenate((cache.keys[layer], key), axis=2)
        cache.values[layer] = np.concatenate((cache.values[layer], value), axis=2)
    return cache.keys[layer], cache.values[layer]


def _attended(query: Floats, key: Floats, value: Floats) -> Floats:
    """Causal attention: the last query is at the last key."""
    scores: Floats = query @ key.swapaxes(-1, -2)
    scores *= np.float32(1 / math.sqrt(query.shape[-1]))
    queries, keys = scores.shape[-2:]
    if queries > 1:
        later = np.arange(keys) > np.arange(keys - queries, keys)[:, None]
        scores[..., later] = -np.inf
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    scores /= scores.sum(axis=-1, keepdims=True)
    mixed: Floats = scores @ value
    return mixed


def _normed(stream: Floats, weight: Floats, epsilon: float) -> Floats:
    mean_square: Floats = np.einsum("ij,ij->i", stream, stream)[:, None]
    size = np.float32(stream.shape[1])
    normed: Floats = stream / np.sqrt(mean_square / size + np.float32(epsilon))
    normed *= weight
    return normed


def _silu(values: Floats) -> Floats:
    """x·σ(x), where σ(x) = (1 + tanh(x/2)) / 2 cannot overflow."""
    gated: Floats = np.tanh(values * np.float32(0.5))
    gated += 1
    gated *= values
    gated *= np.float32(0.5)
    return gated


def _bits(logits: Floats, targets: Tokens) -> Floats:
    """Bits for each target byte."""
    highest = logits.max(axis=-1)
    total = np.log(np.exp(logits - highest[..., None]).sum(axis=-1)) + highest
    chosen = np.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    bits: Floats = (total - chosen) / np.float32(math.log(2))
    return bits


def _tokens(text: str) -> Tokens:
    return np.frombuffer(text.encode("latin-1"), np.uint8).astype(np.intp)


def _by_length(texts: Sequence[str]) -> list[list[int]]:
    """Group the indices of texts of equal length, so that a batch needs no padding."""
    groups: dict[int, list[int]] = {}
    for index, text in enumerate(texts):
        groups.setdefault(len(text), []).append(index)
    return list(groups.values())
