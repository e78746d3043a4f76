"""Which tensor of a model belongs to which of the base, where the names alone do not say.

Two differences are common and harmless: a prefix that one side lacks (`model.`, because only the
body of a model was saved), and a head that is not stored because it is the embedding. Both are
seen through here, by rules that the plan shows. All else is left to the plan, which refuses it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from dare.inputs.sources import Source
from dare.inputs.views import RenamedSource
from dare.tensors.names import is_tied_embedding, is_tied_head
from dare.tensors.sizes import times

ENOUGH = 0.5
"""Share of a model's tensors that a prefix must bring to their places."""


@dataclass(frozen=True)
class Matched:
    """A model whose names fit the base's as far as the rules go."""

    source: Source
    notes: tuple[str, ...]


def says_tied(config: Mapping[str, Any]) -> bool | None:
    """What a model's configuration says of its head; None if it says nothing.

    >>> says_tied({"text_config": {"tie_word_embeddings": True}}), says_tied({})
    (True, None)
    """
    for table in (config, config.get("text_config")):
        said = table.get("tie_word_embeddings") if isinstance(table, dict) else None
        if isinstance(said, bool):
            return said
    return None


def match_names(
    base: Source,
    model: Source,
    name: str,
    *,
    base_config: Mapping[str, Any],
    model_config: Mapping[str, Any],
) -> Matched:
    """Apply the rules to one model; `name` is what it is called in notes."""
    names = {tensor: tensor for tensor in model.tensors}
    notes: list[str] = []
    if prefix := _prefix(set(base.tensors), set(model.tensors)):
        names, note = _with_prefix(base.tensors, model.tensors, *prefix)
        notes.append(f"{name}: {note}")
    own = says_tied(model_config)
    tied = says_tied(base_config) if own is None else own
    if tied is True and not model.is_partial and (note := _tie(base.tensors, names)):
        notes.append(f"{name}: {note}")
    return Matched(RenamedSource(model, names) if notes else model, tuple(notes))


def _prefix(base: set[str], model: set[str]) -> tuple[str, bool] | None:
    """The prefix that most names differ by, and whether it is the model that lacks it."""
    if len(model - base) <= ENOUGH * len(model):
        return None
    for lacking, whole in ((model, base), (base, model)):
        counts = Counter(
            longer[: dot.end()]
            for longer in whole
            for dot in re.finditer(r"\.", longer)
            if longer[dot.end() :] in lacking
        )
        best = max(counts, key=lambda prefix: (counts[prefix], -len(prefix)), default="")
        if best and counts[best] > ENOUGH * len(model):
            return best, lacking is model
    return None


def _with_prefix(
    base: Container[str], model: Iterable[str], prefix: str, model_lacks_it: bool
) -> tuple[dict[str, str], str]:
    names: dict[str, str] = {}
    count = 0
    for tensor in model:
        other = prefix + tensor if model_lacks_it else tensor.removeprefix(prefix)
        moves = tensor not in base and other in base
        names[other if moves else tensor] = tensor
        count += moves
    verb = "added to" if model_lacks_it else "removed from"
    return names, f"prefix {prefix!r} {verb} {times(count, 'tensor name')}"


def _tie(base: Iterable[str], names: dict[str, str]) -> str:
    """Take the embedding for a head that only the base has, or leave out one that it has not."""
    head = next(filter(is_tied_head, base), None)
    embedding = next(filter(is_tied_embedding, names), None)
    extra = next(filter(is_tied_head, names), None)
    if head is not None and head not in names and embedding is not None:
        names[head] = names[embedding]
        return f"{head} is tied, so {embedding} is used for it"
    if head is None and extra is not None:
        del names[extra]
        return f"{extra} is tied and the base does not store it, so it is left out"
    return ""
