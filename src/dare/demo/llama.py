"""A small Llama in NumPy: reads a model's folder or file, scores bytes, and writes on.

It is for the demonstration's byte-level models: a token is a byte, embeddings are tied, and
attention has one key and value for each query head. All arithmetic is in float32.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dare.demo.tasks import END, Exercise
from dare.errors import InputError
from dare.inputs.sources import open_source, read_floats

Floats = NDArray[np.float32]
Tokens = NDArray[np.intp]

# Positions computed together: enough to be fast, few enough to stay in the caches.
_POSITIONS_AT_ONCE = 4096


class Llama:
    """A model in memory.

    `weights` is a folder with a safetensors file, such a file itself, or arrays by name;
    `config` is the config.json that tells its shape, as Hugging Face writes it.
    """

    def __init__(self, weights: Path | Mapping[str, NDArray[Any]], config: Path) -> None:
        settings = json.loads(config.read_text(encoding="utf-8"))
        self.context: int = settings["max_position_embeddings"]
        self._heads: int = settings["num_attention_heads"]
        self._epsilon = np.float32(settings["rms_norm_eps"])
        if settings["num_key_value_heads"] != self._heads:
            raise InputError(f"{config}: the demonstration's model has a key for each query head")
        if isinstance(weights, Path):
            tensors = read_weights(weights)
        else:
            tensors = {name: array.astype(np.float32) for name, array in weights.items()}
        self._embedding = tensors["model.embed_tokens.weight"]
        self._norm = tensors["model.norm.weight"]
        self._layers = [_layer(tensors, n) for n in range(settings["num_hidden_layers"])]
        head_size = self._embedding.shape[1] // self._heads
        frequencies = settings["rope_theta"] ** (-np.arange(0, head_size, 2) / head_size)
        angles = np.outer(np.arange(self.context), np.tile(frequencies, 2))
        self._cosine = np.cos(angles).astype(np.float32)
        self._sine = np.sin(angles).astype(np.float32)

    def logits(self, tokens: Tokens) -> Floats:
        """Score the next byte at each position: [rows, positions] to [rows, positions, 256]."""
        rows, positions = tokens.shape
        cosine, sine = self._cosine[:positions], self._sine[:positions]
        stream = self._embedding[tokens.ravel()]
        for layer in self._layers:
            normed = self._normed(stream, layer["outer_norm"])
            joined = (normed @ layer["attention"]).reshape(rows, positions, 3, self._heads, -1)
            query, key, value = joined.transpose(2, 0, 3, 1, 4)
            query, key = _rotated(query, cosine, sine), _rotated(key, cosine, sine)
            mixed = _attended(query, key, np.ascontiguousarray(value))
            stream += mixed.transpose(0, 2, 1, 3).reshape(stream.shape) @ layer["output"]
            normed = self._normed(stream, layer["inner_norm"])
            gate, up = np.split(normed @ layer["gate_up"], 2, axis=-1)
            stream += (_silu(gate) * up) @ layer["down"]
        normed = self._normed(stream, self._norm)
        return (normed @ self._embedding.T).reshape(rows, positions, -1)

    def _normed(self, stream: Floats, weight: Floats) -> Floats:
        mean_square: Floats = np.einsum("ij,ij->i", stream, stream)[:, None]
        size = np.float32(stream.shape[1])
        normed: Floats = stream / np.sqrt(mean_square / size + self._epsilon)
        normed *= weight
        return normed

    def _in_parts(self, tokens: Tokens) -> Iterator[tuple[Floats, Tokens]]:
        """Score each position but the last, with the bytes that follow, some rows at a time."""
        rows = max(1, _POSITIONS_AT_ONCE // tokens.shape[1])
        for first in range(0, len(tokens), rows):
            part = tokens[first : first + rows]
            yield self.logits(part[:, :-1]), part[:, 1:]

    def write(self, prompts: Sequence[str], limit: int = 40) -> list[str]:
        """Continue each prompt greedily to the end of the line, or for `limit` bytes."""
        written: dict[int, str] = {}
        for rows, asked in _by_length(prompts):
            tokens, start, ended = asked, asked.shape[1], np.zeros(len(rows), bool)
            while tokens.shape[1] < start + limit and not ended.all():
                best = self.logits(tokens)[:, -1].argmax(-1)
                tokens = np.column_stack([tokens, best])
                ended |= best == ord(END)
            lines = [bytes(line.tolist()).decode("latin-1") for line in tokens[:, start:]]
            written |= zip(rows, (line.split(END)[0] for line in lines), strict=True)
        return [written[row] for row in range(len(prompts))]

    def share_right(self, examples: Sequence[Exercise]) -> float:
        """Return the share of the examples that greedy decoding answers exactly right."""
        return sum(self.are_right(examples)) / len(examples)

    def are_right(self, examples: Sequence[Exercise]) -> list[bool]:
        """Tell for each example whether greedy decoding answers it exactly right.

        Greedy decoding writes an answer if and only if each of its bytes, and the end of the line
        after it, is the likeliest after those before. So one pass over prompt and answer tells
        what writing byte by byte would, several times faster.
        """
        right = [False] * len(examples)
        for rows, tokens in _by_length([prompt + answer + END for prompt, answer in examples]):
            starts = np.array([[len(examples[row].prompt)] for row in rows])
            best = np.concatenate([logits.argmax(-1) for logits, _ in self._in_parts(tokens)])
            before = np.arange(1, tokens.shape[1]) < starts
            found = ((best == tokens[:, 1:]) | before).all(axis=1)
            for row, is_right in zip(rows, found.tolist(), strict=True):
                right[row] = is_right
        return right

    def bits_per_byte(self, text: bytes) -> float:
        """Return the mean bits for a byte of a text, in windows as long as the context."""
        tokens = np.frombuffer(text, np.uint8)[: len(text) // self.context * self.context]
        windows = tokens.astype(np.intp).reshape(-1, self.context)
        bits = [_bits(logits, targets) for logits, targets in self._in_parts(windows)]
        return float(np.concatenate(bits).mean())


def read_weights(path: Path) -> dict[str, Floats]:
    """Read all tensors of a safetensors file or folder as float32."""
    weights = {}
    with open_source(path) as source:
        for name, info in source.tensors.items():
            if not info.dtype.is_weight:
                raise InputError(f"{path}: {name} is {info.dtype.name}, not a weight type")
            weights[name] = read_floats(source, name, 0, info.elements).reshape(info.shape)
    return weights


def _layer(tensors: Mapping[str, Floats], index: int) -> dict[str, Floats]:
    """Transpose and join one layer's weights, so that a layer takes four matrix products."""
    prefix = f"model.layers.{index}."

    def joined(*names: str) -> Floats:
        """Put weights side by side and transpose them, for products with rows of activations."""
        return np.ascontiguousarray(
            np.concatenate([tensors[f"{prefix}{name}.weight"] for name in names]).T
        )

    return {
        "outer_norm": tensors[f"{prefix}input_layernorm.weight"],
        "attention": joined("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "output": joined("self_attn.o_proj"),
        "inner_norm": tensors[f"{prefix}post_attention_layernorm.weight"],
        "gate_up": joined("mlp.gate_proj", "mlp.up_proj"),
        "down": joined("mlp.down_proj"),
    }


def _rotated(heads: Floats, cosine: Floats, sine: Floats) -> Floats:
    half = heads.shape[-1] // 2
    turned = np.concatenate((-heads[..., half:], heads[..., :half]), axis=-1)
    turned *= sine
    turned += heads * cosine
    return turned


def _attended(query: Floats, key: Floats, value: Floats) -> Floats:
    """Compute causal attention."""
    scores: Floats = query @ key.swapaxes(-1, -2)
    scores *= np.float32(1 / math.sqrt(query.shape[-1]))
    places = np.arange(scores.shape[-1])
    scores[..., places > places[:, None]] = -np.inf
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    scores /= scores.sum(axis=-1, keepdims=True)
    mixed: Floats = scores @ value
    return mixed


def _silu(values: Floats) -> Floats:
    """Compute x·σ(x), where σ(x) = (1 + tanh(x/2)) / 2 cannot overflow."""
    gated: Floats = np.tanh(values * np.float32(0.5))
    gated += 1
    gated *= values
    gated *= np.float32(0.5)
    return gated


def _bits(logits: Floats, targets: Tokens) -> Floats:
    """Compute the bits for each target byte."""
    highest = logits.max(axis=-1)
    total = np.log(np.exp(logits - highest[..., None]).sum(axis=-1)) + highest
    chosen = np.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    bits: Floats = (total - chosen) / np.float32(math.log(2))
    return bits


def _by_length(texts: Sequence[str]) -> list[tuple[list[int], Tokens]]:
    """Put texts of equal length together, with their places: so a batch needs no padding."""
    groups: dict[int, list[int]] = {}
    for index, text in enumerate(texts):
        groups.setdefault(len(text), []).append(index)
    return [
        (rows, np.array([list(texts[row].encode("latin-1")) for row in rows], np.intp))
        for rows in groups.values()
    ]
