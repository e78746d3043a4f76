"""What inputs look like from one machine, so that others can say whether they see the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dare.errors import InputError
from dare.inputs.reading import read_stored
from dare.inputs.sources import Source
from dare.recipe.schema import Recipe
from dare.stores.locations import StorePath
from dare.tensors.chunks import chunk_count, chunk_span
from dare.tensors.digest import bytes_digest

SAMPLES = 3
"""Chunks of each input whose digests are compared: the first, the last, and some between."""


@dataclass(frozen=True)
class Sighting:
    """What an input looks like: its headers, and some of its chunks."""

    file: str
    headers: str
    """A digest of what they say."""
    chunks: Mapping[tuple[str, int], str]
    """Digests by tensor and chunk."""

    def check(self, source: Source) -> None:
        """Refuse an input that does not look like this one."""
        if _headers(source) != self.headers:
            raise InputError(
                f"{self.file}: is another file here than where the work was started: its headers "
                "differ; every node must see the same inputs"
            )
        for (name, chunk), expected in self.chunks.items():
            if (digest := _digest(source, name, chunk)) != expected:
                raise InputError(
                    f"{self.file}: is another file here than where the work was started: "
                    f"{name} differs (digest {digest}, there {expected}); "
                    "every node must see the same inputs"
                )


def look_at_all(recipe: Recipe, sources: Sequence[Source]) -> tuple[Sighting, ...]:
    """See what the base and the models of a recipe look like here."""
    files = (recipe.base, *(entry.file for entry in recipe.models))
    found = []
    for file, source in zip(files, sources, strict=True):
        with source:
            found.append(look_at(file, source))
    return tuple(found)


def look_at(file: str | Path, source: Source) -> Sighting:
    """See what an input looks like here; it must be open."""
    names = [name for name, info in source.tensors.items() if info.elements]
    last = max(len(names) - 1, 0)
    places = {last * part // max(SAMPLES - 1, 1) for part in range(SAMPLES)}
    chunks = {}
    for name in (names[place] for place in sorted(places) if names):
        chunk = chunk_count(source.tensors[name].elements) - 1
        chunks[name, chunk] = _digest(source, name, chunk)
    return Sighting(str(file), _headers(source), chunks)


def _headers(source: Source) -> str:
    return bytes_digest(repr(source.fingerprint()).encode())


def _digest(source: Source, name: str, chunk: int) -> str:
    info = source.tensors[name]
    start, count = chunk_span(chunk, info.elements)
    raw = read_stored(source, name, start, count, np.empty(count * info.dtype.itemsize, np.uint8))
    return bytes_digest(raw.data)


def with_absolute_paths(recipe: Recipe) -> Recipe:
    """The recipe for another process: what lies here is named from the root on."""

    def absolute(path: Path) -> Path:
        is_here = not isinstance(path, StorePath) and path.exists()
        return path.absolute() if is_here else path  # else it is in a store, or on the hub

    output = None if recipe.output is None else recipe.output.absolute()
    return recipe.with_files(
        absolute(recipe.base), [absolute(entry.file) for entry in recipe.models], output
    )
