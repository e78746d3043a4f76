"""Which tensor of a model belongs to which of the base, where the names alone do not say.

Two differences are common and harmless: a prefix that one side lacks (`model.`, because only the
body of a model was saved), and a head that is not stored because it is the embedding. Both are
seen through here, by rules that the plan shows. All else is left to the plan, which refuses it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from dare.inputs.sources import Source
from dare.inputs.views import RenamedSource
from dare.tensors.names import is_tied_embedding, is_tied_head

ENOUGH = 0.5
"""Share of a model's tensors that a prefix must bring to their places."""


@dataclass(frozen=True)
class Matched:
    """A model whose names fit the base's as far as the rules go."""

    source: Source
    notes: tuple[str, ...]


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
    if prefix := _prefix(base.tensors, model.tensors):
        names, note = _with_prefix(base.tensors, model.tensors, *prefix)
        notes.append(f"{name}: {note}")
    names, tied = _with_tied_head(base, names, model, base_config, model_config)
    notes += [f"{name}: {note}" for note in tied]
    return Matched(RenamedSource(model, names) if notes else model, tuple(notes))


# ---------------------------------------------------------------- prefixes


def _prefix(base: Iterable[str], model: Iterable[str]) -> tuple[str, bool] | None:
    """The prefix that most names differ by, and whether it is the model that lacks it."""
    wanted, found = set(base), set(model)
    strays = found - wanted
    if len(strays) <= ENOUGH * len(found):
        return None
    for lacking, whole in ((found, wanted), (wanted, found)):
        counts: dict[str, int] = {}
        for longer in whole:
            for place in (match.end() for match in re.finditer(r"\.", longer)):
                if longer[place:] in lacking:
                    prefix = longer[:place]
                    counts[prefix] = counts.get(prefix, 0) + 1
        best = max(counts, key=lambda prefix: (counts[prefix], -len(prefix)), default="")
        if best and counts[best] > ENOUGH * len(found):
            return best, lacking is found
    return None


def _with_prefix(
    base: Iterable[str], model: Iterable[str], prefix: str, model_lacks_it: bool
) -> tuple[dict[str, str], str]:
    wanted = set(base)
    names: dict[str, str] = {}
    count = 0
    for tensor in model:
        other = prefix + tensor if model_lacks_it else tensor.removeprefix(prefix)
        moves = tensor not in wanted and other in wanted
        names[other if moves else tensor] = tensor
        count += moves
    verb = "put before" if model_lacks_it else "taken off"
    return names, f"{prefix!r} {verb} {count} names"


# ---------------------------------------------------------------- tied heads


def _with_tied_head(
    base: Source,
    names: Mapping[str, str],
    model: Source,
    base_config: Mapping[str, Any],
    model_config: Mapping[str, Any],
) -> tuple[dict[str, str], list[str]]:
    tied = model_config.get("tie_word_embeddings", base_config.get("tie_word_embeddings"))
    matched = dict(names)
    if tied is not True or model.is_partial:
        return matched, []
    head = next((tensor for tensor in base.tensors if is_tied_head(tensor)), None)
    embedding = next((tensor for tensor in names if is_tied_embedding(tensor)), None)
    if head is not None and head not in names and embedding is not None:
        matched[head] = names[embedding]
        return matched, [f"{head} is tied, so its {embedding} is taken"]
    extra = next((tensor for tensor in names if is_tied_head(tensor)), None)
    if head is None and extra is not None:
        del matched[extra]
        return matched, [f"{extra} is tied and the base does not store it, so it is left out"]
    return matched, []
