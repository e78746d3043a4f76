"""Small delta files of every kind, and ways to change them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

import dare
from dare.deltas.compressing import compress
from dare.deltas.restoring import open_delta
from dare.inputs.delta_files import INDEX, KEY, DeltaSource
from dare.inputs.sources import open_source
from dare.tensors.chunks import UNKNOWN, bytes_digest
from dare.tensors.dtypes import STORAGE_TYPES
from dare.tensors.header import METADATA, build_header
from helpers import read_elements, save

KINDS: dict[str, dict[str, Any]] = {
    "native": {"drop_rate": 0.5, "bits": "native"},
    "two bits": {"drop_rate": 0.5, "bits": 2},
    "four bits": {"drop_rate": 0.5, "bits": 4},
    "lossless": {"lossless": True},
}
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
LAYER, NORM = "model.layers.0.mlp.up_proj.weight", "model.layers.0.norm.weight"
POSITIONS = "model.position_ids"
CONFIG = {"model_type": "llama", "tie_word_embeddings": True, "vocab_size": 20}

PARTS = ("values", "scales", "coded")

Arrays = dict[str, np.ndarray]
Parts = dict[str, tuple[str, tuple[int, ...], bytes]]
"""Type, shape and data of what is stored in a file."""


def make_base(rows: int = 12) -> Arrays:
    """A tied pair, half floats, a tensor that training leaves alone, and integers."""
    generator = np.random.default_rng(0)
    embedding = 0.02 * generator.standard_normal((20, 6), np.float32)
    return {
        EMBEDDING: embedding,
        HEAD: embedding,
        LAYER: (0.02 * generator.standard_normal((rows, 9))).astype(np.float16),
        NORM: generator.standard_normal(5).astype(np.float32),
        POSITIONS: np.arange(7),
    }


def tune(base: Mapping[str, np.ndarray]) -> Arrays:
    """A fine-tune of a base: of each tensor the same elements are moved by the same."""
    return {
        name: values
        if name in (NORM, POSITIONS)
        else (values + 0.001 * np.random.default_rng(5).standard_normal(values.shape)).astype(
            values.dtype
        )
        for name, values in base.items()
    }


def write_models(folder: Path, base: Arrays, model: Arrays | None = None) -> tuple[Path, Path]:
    """A base and a fine-tune of it in directories, with configurations that differ."""
    for name, arrays in (("base", base), ("model", model or tune(base))):
        save(folder / name / "model.safetensors", arrays)
        config = {**CONFIG, "_name_or_path": name}
        (folder / name / "config.json").write_text(json.dumps(config))
        (folder / name / "generation_config.json").write_text("{}")
    return folder / "base", folder / "model"


def compress_quietly(base: Path, model: Path, output: Path, kind: str, **settings: Any) -> Any:
    return compress(base, model, output, verbose=False, **KINDS[kind], **settings)


def apply_quietly(base: Path, delta: Path, output: Path, **settings: Any) -> Any:
    return dare.apply_delta(base, delta, output, verbose=False, threads=1, **settings)


def read_all(base: Path, delta: Path) -> dict[str, bytes]:
    """All that is stored in a delta file: tensors as they are read, and other files."""
    file = open_delta(delta)
    with DeltaSource(file, open_source(base)) as source:
        found = {name: read_elements(source, name).tobytes() for name in source.tensors}
    files = {
        n: file.read_file(n) for n, stored in file.notes.files.items() if stored.kind != "base"
    }
    return found | files


# ---------------------------------------------------------------- taking apart, putting together


def take_apart(content: bytes) -> tuple[dict[str, Any], Parts]:
    """The notes and the stored tensors of a delta file."""
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    notes = json.loads(header.pop(METADATA)[KEY])
    parts = {}
    for name, said in header.items():
        begin, end = said["data_offsets"]
        parts[name] = (said["dtype"], tuple(said["shape"]), content[start + begin : start + end])
    return notes, parts


def put_together(notes: Any, parts: Parts, *, sound: bool = False) -> bytes:
    """A file with notes whose digests of index and header fit, whatever else they say.

    A `sound` one also has digests of its chunks that fit, as far as they can be found.
    """
    if sound:
        parts = with_digests(notes, parts)
    if isinstance(notes, dict) and INDEX in parts and "index" in notes:
        notes["index"] = bytes_digest(parts[INDEX][2])
    described = [(name, STORAGE_TYPES[kind], shape) for name, (kind, shape, _) in parts.items()]

    def header(check: str) -> bytes:
        if isinstance(notes, dict) and "check" in notes:
            notes["check"] = check
        text = json.dumps(notes, separators=(",", ":"))
        return build_header(described, {"format": "pt", KEY: text})[0]

    checked = header(bytes_digest(header(UNKNOWN)))
    return checked + b"".join(data for _, _, data in parts.values())


def with_digests(notes: Any, parts: Parts) -> Parts:
    """The parts with an index in which the digests of chunks are as they should be.

    All tensors are of one chunk.
    """
    try:
        kind, shape, data = parts[INDEX]
        rows = np.frombuffer(data, np.int64).reshape(shape).copy()
        names = sorted(n for n, tensor in notes["tensors"].items() if not tensor.get("tied_to"))
        for row, name in zip(rows, names, strict=True):
            held = [parts.get(f"{of}:{name}", ("", (), b""))[2] for of in PARTS]
            row[1:] = np.frombuffer(xxhash.xxh3_128_digest(b"".join(held)), np.int64)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError):
        return parts
    return {**parts, INDEX: (kind, shape, rows.tobytes())}


def changed(content: bytes, change: Callable[[dict[str, Any], Parts], object]) -> bytes:
    """A delta file in which somebody has changed something, and filled the digests in again."""
    notes, parts = take_apart(content)
    change(notes, parts)
    return put_together(notes, parts)
