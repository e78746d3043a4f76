"""One tensor under several names: an embedding that is the head of its model too.

Such a tensor is stored once by most programs and twice by some. Stored twice it would get two
masks, and loaders that take one of the two for both would load something that was never merged. So
the names of one tensor are found here, and what is read for any of them is the same: that of the
input embedding. The base says in `ties` which names those are, for the plan to treat them alike.

Names stand for one tensor if in every input they share storage, hold the same bytes, or are said to
be one by its configuration. Bytes are compared among embeddings and heads only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dare.errors import MismatchError
from dare.inputs.lora import LoraSource
from dare.inputs.names import says_tied
from dare.inputs.reading import hold_same
from dare.inputs.sources import Source
from dare.inputs.views import RenamedSource, TiedSource
from dare.tensors.header import TensorInfo
from dare.tensors.names import (
    is_tied_embedding,
    is_tied_head,
    may_be_tied,
    module_of_weight,
    tying_rank,
)

Config = Mapping[str, Any]
Groups = dict[str, list[str]]
"""The names of one tensor: that of the input embedding, and the others."""


@dataclass(frozen=True)
class Tied:
    """Base and models, in which all names of one tensor show the same."""

    base: Source
    models: tuple[Source, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class _Input:
    name: str
    source: Source
    config: Config


def tie(
    base: Source,
    models: Sequence[Source],
    names: Sequence[str],
    configs: Sequence[Config] | None = None,
) -> Tied:
    """Find the tensors that are stored under several names, and show the same under all of them.

    `configs` are what the `config.json` of base and models say; a model's own wins over the base's.
    """
    base_config, *others = configs or [{}] * (1 + len(models))
    inputs = [_Input("base", base, base_config)]
    for model, name, config in zip(models, names, others, strict=True):
        own = base_config if model.is_partial or says_tied(config) is None else config
        inputs.append(_Input(name, model, own))
    notes: list[str] = []
    groups = _find_groups(inputs, notes)
    notes += [
        f"{', '.join(others)} and {first} are one tensor: one change, one mask, one result"
        for first, others in groups.items()
    ]
    folded = [_fold(given, base, groups, notes) for given in inputs[1:]]
    ties = {alias: first for first, others in groups.items() for alias in others}
    shown = [_present(source, groups, ties) for source in (base, *folded)]
    return Tied(shown[0], tuple(shown[1:]), tuple(notes))


# ---------------------------------------------------------------- which names are one tensor


def _find_groups(inputs: Sequence[_Input], notes: list[str]) -> Groups:
    base = inputs[0].source
    shared = _in_one_place(base)
    candidates = [
        name
        for name, info in base.tensors.items()
        if info.elements and info.dtype.is_weight and (may_be_tied(name) or name in shared)
    ]
    groups: Groups = {}
    for name in sorted(candidates, key=lambda name: (tying_rank(name), name)):
        for first in groups:
            if _alike(base.tensors[name], base.tensors[first]) and _is_one(
                inputs, first, name, notes, by_name=may_be_tied(name) and may_be_tied(first)
            ):
                groups[first].append(name)
                break
        else:
            groups[name] = []
    return {first: others for first, others in groups.items() if others}


def _in_one_place(base: Source) -> set[str]:
    """The names of tensors that lie where another one lies."""
    found: dict[Any, str] = {}
    shared: set[str] = set()
    for name, info in base.tensors.items():
        if (place := base.place(name)) is not None and info.elements:
            other = found.setdefault((place, info.dtype, info.shape), name)
            shared |= {name, other} if other != name else set()
    return shared


def _is_one(
    inputs: Sequence[_Input], first: str, alias: str, notes: list[str], *, by_name: bool
) -> bool:
    """Whether two names of the base stand for one tensor in every input."""
    base = inputs[0]
    if not by_name and not _share_storage(base.source, first, alias):
        return False
    unused: list[str] = []
    for given in inputs:
        if _holds_one(given, first, alias):
            continue
        if _is_told(given, first, alias):
            unused.append(
                f"{given.name}: its {alias} differs from {first} and is not used, because "
                "its configuration ties them (tie_word_embeddings)"
            )
        elif given is not base and says_tied(base.config) and _is_told(base, first, alias):
            raise MismatchError(
                f"{alias}: the base's configuration ties it to {first} "
                f"(tie_word_embeddings), and {given.name} has two different tensors; "
                "untie the base (store both, and set tie_word_embeddings to false), or "
                f"give {given.name} without {alias}"
            )
        else:
            return False
    notes += unused
    return True


def _holds_one(given: _Input, first: str, alias: str) -> bool:
    """Whether an input has the same under both names, or only one of them."""
    source, tensors = given.source, given.source.tensors
    if source.is_partial:
        return says_tied(given.config) is not False or not {first, alias} & set(tensors)
    if first not in tensors or alias not in tensors:
        return says_tied(given.config) is not False
    return _share_storage(source, first, alias) or hold_same(
        source, first, alias, whole=not _is_told(given, first, alias)
    )


def _is_told(given: _Input, first: str, alias: str) -> bool:
    """Whether a configuration says that two names are one tensor, as loaders understand it."""
    if not is_tied_embedding(first):
        return False
    if is_tied_head(alias):
        return says_tied(given.config) is True
    both_sides = {f"{side}.{module_of_weight(alias)}.weight" for side in ("encoder", "decoder")}
    return (
        module_of_weight(first) == "shared"
        and given.config.get("is_encoder_decoder") is True
        and says_tied(given.config) is not False
        and alias.removeprefix(first.removesuffix("shared.weight")) in both_sides
    )


def _alike(one: TensorInfo, other: TensorInfo) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype


def _share_storage(source: Source, first: str, alias: str) -> bool:
    place = source.place(first)
    return place is not None and place == source.place(alias)


# ---------------------------------------------------------------- showing them as one


def _present(source: Source, groups: Groups, ties: Mapping[str, str]) -> Source:
    """Show the same under all names, whichever of them the source has."""
    names: dict[str, str] = {}
    for first, others in groups.items():
        held = [name for name in (first, *others) if name in source.tensors]
        names |= {name: held[0] for name in (first, *others) if held and name != held[0]}
    return TiedSource(source, names, ties) if names else source


def _fold(given: _Input, base: Source, groups: Groups, notes: list[str]) -> Source:
    """An adapter whose changes under all names of one tensor are changes of that tensor."""
    source = adapter = given.source
    names = {name: name for name in source.tensors}
    if isinstance(source, RenamedSource):
        adapter, names = source.inner, dict(source.names)
    if not isinstance(adapter, LoraSource):
        return source
    own = {**groups, **_unstored_head(names, base, given.config)}
    changed = False
    for first, others in own.items():
        held = [name for name in (first, *others) if name in names]
        if not held:
            continue
        stored = [names.pop(name) for name in held]
        names[first] = stored[0]
        changed |= held != [first]
        if note := adapter.tie(stored):
            notes.append(f"{given.name}: {note}")
    return RenamedSource(adapter, names) if changed else source


def _unstored_head(names: Mapping[str, str], base: Source, config: Config) -> Groups:
    """The embedding of a base that stores no head, where an adapter changes one of the two."""
    if not config or says_tied(config) is False or any(map(is_tied_head, base.tensors)):
        return {}
    embeddings = sorted(filter(is_tied_embedding, base.tensors), key=tying_rank)
    heads = list(filter(is_tied_head, names))
    is_one = says_tied(config) is True or bool(heads)
    return {embeddings[0]: heads} if embeddings and is_one else {}
