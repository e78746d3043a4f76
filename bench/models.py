"""Make the models that the benchmark merges: a Llama-shaped base and fine-tunes of it, in bf16.

Each is a Hugging Face model directory of random numbers: weights of σ = 0.02, norms around 1, and
fine-tunes that differ from the base by σ = 0.001. Values depend on the seed, the model and the
tensor alone. A directory appears under its name only when it is complete.

    python bench/models.py bench/data --parameters 0.95e9 --models 3
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

SEED = 1
WEIGHT_DEVIATION = 0.02
DELTA_DEVIATION = 0.001
BYTES_PER_PARAMETER = 2
PIECE = 1 << 22
"""Elements made at once: what memory there is need not hold a tensor."""

WIDTHS = ((600e6, 2048), (200e6, 1024), (30e6, 512), (5e6, 256), (0, 128))
"""From how many parameters on, which hidden size."""


@dataclass(frozen=True)
class Shape:
    """The sizes of a Llama."""

    hidden: int
    intermediate: int
    layers: int
    vocabulary: int

    @property
    def heads(self) -> int:
        """Attention heads, of 64 elements each."""
        return self.hidden // 64

    @property
    def key_value_heads(self) -> int:
        """Heads that keys and values have: a quarter."""
        return max(1, self.heads // 4)

    @cached_property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor, in file order."""
        hidden, inner, shared = self.hidden, self.intermediate, 64 * self.key_value_heads
        in_layer: dict[str, tuple[int, ...]] = {
            "input_layernorm": (hidden,),
            "self_attn.q_proj": (hidden, hidden),
            "self_attn.k_proj": (shared, hidden),
            "self_attn.v_proj": (shared, hidden),
            "self_attn.o_proj": (hidden, hidden),
            "post_attention_layernorm": (hidden,),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }
        return {
            "model.embed_tokens.weight": (self.vocabulary, hidden),
            **{
                f"model.layers.{layer}.{name}.weight": shape
                for layer in range(self.layers)
                for name, shape in in_layer.items()
            },
            "model.norm.weight": (hidden,),
            "lm_head.weight": (self.vocabulary, hidden),
        }

    @cached_property
    def parameters(self) -> int:
        """How many elements all tensors have."""
        return sum(math.prod(shape) for shape in self.tensors.values())

    @property
    def folder_name(self) -> str:
        """The directory of these models."""
        return f"llama-{self.parameters / 1e6:.0f}m"

    @property
    def model_bytes(self) -> int:
        """Size of one model's weights on disk."""
        return self.parameters * BYTES_PER_PARAMETER

    def config(self) -> dict[str, object]:
        """What stands in config.json."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.key_value_heads,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": False,
            "dtype": "bfloat16",
        }


def shape_for(parameters: float) -> Shape:
    """Find a Llama of about that many parameters.

    >>> abs(shape_for(0.95e9).parameters / 0.95e9 - 1) < 0.001
    True
    """
    hidden = next(width for least, width in WIDTHS if parameters >= least)
    vocabulary = 32_000 if parameters >= 30e6 else 2_000

    def shape(layers: int, intermediate: int) -> Shape:
        return Shape(hidden, intermediate, layers, vocabulary)

    outside = shape(0, 0).parameters
    usual = shape(1, 11 * hidden // 4).parameters - outside
    layers = max(1, round((parameters - outside) / usual))
    attention = shape(1, 0).parameters - outside
    inner = ((parameters - outside) / layers - attention) / (3 * hidden)
    return shape(layers, max(8, 8 * round(inner / 8)))


def model_folders(data: Path, shape: Shape, models: int) -> list[Path]:
    """Where the base and so many fine-tunes of it are, or will be."""
    folder = data / shape.folder_name
    return [folder / "base", *(folder / f"tuned-{index}" for index in range(1, models + 1))]


def missing_folders(data: Path, shape: Shape, models: int) -> list[Path]:
    """Those that are not there yet."""
    return [path for path in model_folders(data, shape, models) if not path.is_dir()]


def make_models(data: Path, shape: Shape, models: int) -> list[Path]:
    """Make what is missing of a base and its fine-tunes; return where they are."""
    folders = model_folders(data, shape, models)
    for index, folder in enumerate(folders):
        with made_once(folder) as partial:
            if partial:
                (partial / "config.json").write_text(json.dumps(shape.config(), indent=2))
                base = folders[0] / "model.safetensors" if index else None
                write_weights(partial / "model.safetensors", shape, index, base)
    return folders


@contextmanager
def made_once(folder: Path) -> Iterator[Path | None]:
    """Where to make a folder, which gets its name when it is complete; None if it is there."""
    if folder.is_dir():
        yield None
        return
    print(f"making {folder.parent.name}/{folder.name} …", flush=True)
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    yield partial
    partial.rename(folder)


def write_weights(path: Path, shape: Shape, model: int, base: Path | None) -> None:
    """Write a base, or with `base` a fine-tune of it, as a safetensors file."""
    header = safetensors_header(shape)
    with path.open("wb") as file, ExitStack() as stack:
        file.write(header)
        start = stack.enter_context(base.open("rb")) if base else None
        if start:
            start.seek(len(header))
        for name, piece in noise(shape, model):
            if start:  # the base's weights, in the same order
                weights = np.fromfile(start, ml_dtypes.bfloat16, piece.size).astype(np.float32)
                weights += DELTA_DEVIATION * piece
            else:
                weights = WEIGHT_DEVIATION * piece + name.endswith("norm.weight")
            weights.astype(ml_dtypes.bfloat16).tofile(file)


def safetensors_header(shape: Shape) -> bytes:
    """The part of a safetensors file that precedes the weights."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, dimensions in shape.tensors.items():
        end = start + BYTES_PER_PARAMETER * math.prod(dimensions)
        entries[name] = {"dtype": "BF16", "shape": dimensions, "data_offsets": [start, end]}
        start = end
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def noise(shape: Shape, model: int) -> Iterator[tuple[str, NDArray[Any]]]:
    """Normally distributed float32 numbers for all tensors, piece by piece, in one buffer."""
    buffer = np.empty(PIECE, np.float32)
    for index, (name, dimensions) in enumerate(shape.tensors.items()):
        generator = np.random.Generator(np.random.SFC64([SEED, model, index]))
        elements = math.prod(dimensions)
        for start in range(0, elements, PIECE):
            piece = buffer[: min(PIECE, elements - start)]
            generator.standard_normal(out=piece, dtype=np.float32)
            yield name, piece


def make_files(folder: Path, names: Sequence[str], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Make files of tensors of any shapes: a base, and fine-tunes of it."""
    generator = np.random.default_rng(SEED)
    base = {n: generator.normal(0, WEIGHT_DEVIATION, shape) for n, shape in shapes.items()}
    for name in names:
        moved = {
            tensor: weights
            + (name != names[0]) * generator.normal(0, DELTA_DEVIATION, weights.shape)
            for tensor, weights in base.items()
        }
        stored = {tensor: weights.astype(ml_dtypes.bfloat16) for tensor, weights in moved.items()}
        save_file(stored, folder / f"{name}.safetensors")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path, help="the directory to make them in")
    parser.add_argument("--parameters", type=float, default=0.95e9)
    parser.add_argument("--models", type=int, default=3)
    options = parser.parse_args()
    make_models(options.data, shape_for(options.parameters), options.models)
