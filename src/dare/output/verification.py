"""Check that an output is, bit for bit, what its manifest says."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dare.errors import InputError, VerificationError
from dare.inputs.sources import FileSource, open_source
from dare.output.manifest import METADATA_KEY, UNKNOWN, read_manifest
from dare.output.writer import manifest_path
from dare.planning.machine import available_cores
from dare.run.progress import show_progress
from dare.tensors.chunks import chunk_spans
from dare.tensors.digest import bytes_digest, model_digest, tensor_digest
from dare.tensors.header import TensorInfo


@dataclass(frozen=True)
class Verification:
    """The outcome of checking an output."""

    path: Path
    problems: tuple[str, ...]
    tensors: int
    bytes_checked: int

    @property
    def ok(self) -> bool:
        """Whether everything is as the manifest says."""
        return not self.problems

    def to_dict(self) -> dict[str, Any]:
        """The outcome as plain values, ready for JSON."""
        return {"ok": self.ok, **asdict(self), "path": str(self.path)}

    def __str__(self) -> str:
        """The outcome in a few lines."""
        if self.ok:
            return f"{self.path}: {self.tensors} tensors, {self.bytes_checked:,} bytes, intact"
        return "\n  ".join([f"{self.path}: NOT what was written", *self.problems])


def verify(path: str | os.PathLike[str], *, verbose: bool = False) -> Verification:
    """Hash an output again and compare it with its manifest; `verbose` shows progress.

    Raises VerificationError if there is no manifest to compare with.
    """
    path = Path(path)
    source = open_source(path)
    problems: list[str] = []
    manifests = {
        file: _checked_manifest(file, header.metadata, problems)
        for file, header in source.headers.items()
    }
    nbytes = sum(info.nbytes for info in source.tensors.values())
    with show_progress(nbytes, "verifying", visible=verbose) as display:
        digests = _digest_tensors(source, display.advance)
    whole = model_digest((source.tensors[name], digest) for name, digest in digests.items())
    for file, manifest in manifests.items():
        if whole != manifest.get("output"):
            problems.append(f"{file}: the weights' digest is {whole}, not {manifest.get('output')}")
    embedded = next(iter(manifests.values()), {})
    problems += _compare_beside(path, digests, embedded)
    return Verification(path, tuple(problems), len(digests), nbytes)


def _checked_manifest(
    file: Path, metadata: Mapping[str, str], problems: list[str]
) -> dict[str, Any]:
    """Read the manifest in a file's header and check the header against it."""
    if METADATA_KEY not in metadata:
        raise VerificationError(f"{file}: was not made by dare; its header has no manifest")
    try:
        manifest = json.loads(metadata[METADATA_KEY])
        check = manifest["check"].encode()
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
        problems.append(f"{file}: the manifest in the header is damaged")
        return {}
    with file.open("rb") as opened:
        length = opened.read(8)
        header = length + opened.read(int.from_bytes(length, "little"))
    if bytes_digest(header.replace(check, UNKNOWN.encode(), 1)) != check.decode():
        problems.append(f"{file}: the header has been changed")
    return dict(manifest)


def _digest_tensors(source: FileSource, advance: Callable[[int], None]) -> dict[str, str]:
    """The digest of every tensor, chunks of which are read in threads."""

    def digest_chunk(place: tuple[TensorInfo, tuple[int, int]]) -> str:
        info, (start, count) = place
        raw = np.empty(count, info.dtype.carrier)
        source.read(info.name, start, raw)
        digest = bytes_digest(raw.data)
        advance(raw.nbytes)
        return digest

    infos = source.tensors.values()
    chunks = [(info, span) for info in infos for span in chunk_spans(info.elements)]
    by_tensor: dict[str, list[str]] = {name: [] for name in source.tensors}
    with source, ThreadPoolExecutor(available_cores()) as pool:
        for (info, _), digest in zip(chunks, pool.map(digest_chunk, chunks), strict=True):
            by_tensor[info.name].append(digest)
    return {name: tensor_digest(digests) for name, digests in by_tensor.items()}


def _compare_beside(
    path: Path, digests: Mapping[str, str], embedded: Mapping[str, Any]
) -> list[str]:
    """Compare with the manifest beside the weights, which can say which tensor is damaged."""
    beside = manifest_path(path)
    if not beside.exists():
        return []
    try:
        manifest = read_manifest(beside)
        expected = manifest["digests"]["output"]
        if not isinstance(expected, dict):
            raise InputError("digests.output is not a table")
    except (InputError, KeyError, TypeError) as error:
        return [f"{beside}: cannot be used: {error}"]
    problems = []
    for name in sorted(digests.keys() | expected.keys()):
        if name not in digests:
            problems.append(f"{name}: is missing")
        elif name not in expected:
            problems.append(f"{name}: was not written")
        elif digests[name] != expected[name]:
            problems.append(f"{name}: is not as it was written")
    if not problems:
        problems += [
            f"{beside}: {key} is not what the header of the output says"
            for key, value in embedded.items()
            if key != "check" and manifest.get(key) != value
        ]
    return problems
