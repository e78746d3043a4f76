"""The pairs of a model's tensors and the base's, where the names alone do not say.

Two differences are common and harmless: a prefix that one side lacks (`model.`, because only the
body of a model was saved), and a head that is not stored because it is the embedding. All else is
left to the plan, which refuses it.

An embedding that is the head of its model too is stored twice by some programs, and would get two
masks. So the names of one tensor are found here, and what is read for any of them is the same: that
of the input embedding; `ties` of the base has them. Names stand for one tensor if in every input
they share storage, hold the same bytes (compared among embeddings and heads only), or are said to
be one by its configuration.
"""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from types import MappingProxyType
from typing import Any

from dare.documents.notices import Notice, notice
from dare.documents.words import counted
from dare.errors import MismatchError
from dare.inputs.sources import RenamedSource, Source, same_bytes, says_tied
from dare.tensors.names import (
    is_tied_embedding,
    is_tied_head,
    module_of_weight,
    row_rank,
    tying_rank,
)

Config = Mapping[str, Any]

MIN_PREFIX_SHARE = 0.5  # share of a model's tensors that a prefix must bring to their places


def find_tied(source: Source, config: Config = MappingProxyType({})) -> bool | None:
    """Return whether a model with this configuration takes its embedding for its head.

    None: there is no head, or it is stored under both names, so that both answers are right.
    """
    said, head = says_tied(config), next(filter(is_tied_head, source.tensors), None)
    if said is not None:
        return said
    if head is not None:
        return None if head in source.ties else False
    is_language_model = re.search("CausalLM|LMHead", str(config.get("architectures")))
    return True if source.tied or is_language_model else None


def find_tied_head(source: Source) -> dict[str, str]:
    """Return the name of a head that is the embedding, stored or not, with the embedding's."""
    stored = {name: first for name, first in source.ties.items() if is_tied_head(name)}
    embeddings = sorted(filter(is_tied_embedding, source.tensors), key=tying_rank)
    is_unstored = embeddings and find_tied(source)
    return {"lm_head.weight": embeddings[0]} if is_unstored else stored


def match_names(
    base: Source, model: Source, name: str, *, base_config: Config, model_config: Config
) -> tuple[Source, tuple[Notice, ...]]:
    """Give one model the base's names if rules suffice for it; `name` is its name in the notes."""
    names = {tensor: tensor for tensor in model.tensors}
    changes = {"renamed": _match_prefix(base.tensors, names)}
    said = says_tied(model_config)
    tied = says_tied(base_config) if said is None else said
    if tied is True and not model.is_partial:
        changes["tied_head"] = _tie(base.tensors, names)
    notes = tuple(notice(code, name, done=done) for code, done in changes.items() if done)
    return RenamedSource(model, names) if notes else model, notes


def _match_prefix(base: Mapping[str, Any], names: dict[str, str]) -> str:
    """Add or remove the prefix that most names differ by; say which."""
    model = set(names)
    if len(model - base.keys()) <= MIN_PREFIX_SHARE * len(model):
        return ""
    for lacking, whole in ((model, base.keys()), (base.keys(), model)):
        counts = Counter(
            longer[: dot.end()]
            for longer in whole
            for dot in re.finditer(r"[./]", longer)
            if longer[dot.end() :] in lacking
        )
        best = max(counts, key=lambda prefix: (counts[prefix], -len(prefix)), default="")
        if best and counts[best] > MIN_PREFIX_SHARE * len(model):
            count = 0
            for tensor in list(names):
                del names[tensor]  # and add it again, to keep the order
                other = best + tensor if lacking is model else tensor.removeprefix(best)
                moves = tensor not in base and other in base
                names[other if moves else tensor] = tensor
                count += moves
            verb = "added to" if lacking is model else "removed from"
            return f"The prefix {best!r} is {verb} {counted(count, 'tensor name')}"
    return ""


def _tie(base: Iterable[str], names: dict[str, str]) -> str:
    """Use the embedding for a head that only the base has; leave out one that it lacks."""
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


# ---------------------------------------------------------------- what weights mean

_TABLES = tomllib.loads(files("dare.inputs").joinpath("meanings.toml").read_text("utf-8"))
MEANING, PER_LAYER = _TABLES["meaning"], _TABLES["per_layer"]


def compare_meanings(base: Config, model: Config) -> list[str]:
    """Return the settings that give a model's weights another meaning than the base's, in words.

    A setting that only one of the two has is not compared: the other's default is not known here.

    >>> compare_meanings({"rope_theta": 1e4}, {"rope_parameters": {"rope_theta": 5e5}})
    ["rope_theta is 500000.0, the base's 10000.0"]
    """
    theirs, ours = _meanings(model), _meanings(base)
    return [
        f"{key} is {theirs[key]}, the base's {ours[key]}"
        for key in MEANING
        if None not in (theirs.get(key), ours.get(key)) and theirs[key] != ours[key]
    ]


def _meanings(config: Config) -> Config:
    """Return a configuration with the settings of its parts, and one name for the rope's type."""
    parts = (config.get(part) for part in ("text_config", "rope_scaling", "rope_parameters"))
    settings = dict(config)
    for part in parts:
        settings |= part if isinstance(part, Mapping) else {}
    return {**settings, "rope_type": settings.get("rope_type", settings.get("type", "default"))}


# ---------------------------------------------------------------- one tensor under several names

Groups = dict[str, list[str]]  # the names of one tensor: the input embedding's, and the others


@dataclass(frozen=True)
class _Input:
    name: str
    source: Source
    config: Config


def tie(
    base: Source, models: Sequence[Source], names: Sequence[str], configs: Sequence[Config] = ()
) -> tuple[Source, tuple[Source, ...], tuple[Notice, ...]]:
    """Find tensors that are stored under several names, and show the same under all of them.

    `configs` are those of base and models; a model's configuration wins over the base's. Returns
    the base, the models, and notes.
    """
    base_config, *others = configs or [{}] * (1 + len(models))
    inputs = [_Input("base", base, base_config)]
    for model, name, config in zip(models, names, others, strict=True):
        is_silent = model.is_partial or says_tied(config) is None
        inputs.append(_Input(name, model, base_config if is_silent else config))
    notes: list[Notice] = []
    groups = _find_groups(inputs, notes)
    notes += [
        notice("one_tensor", names=f"{', '.join(others)} and {first}")
        for first, others in groups.items()
    ]
    folded = [_fold(given, base, groups, notes) for given in inputs[1:]]
    ties = {alias: first for first, others in groups.items() for alias in others}
    shown = [_present(source, groups, ties) for source in (base, *folded)]
    return shown[0], tuple(shown[1:]), tuple(notes)


def _find_groups(inputs: Sequence[_Input], notes: list[Notice]) -> Groups:
    base = inputs[0].source
    shared = _names_sharing_storage(base)
    candidates = [
        name
        for name, info in base.tensors.items()
        if info.elements and info.dtype.is_weight and (row_rank(name) is not None or name in shared)
    ]
    groups: Groups = {}
    for name in sorted(candidates, key=lambda name: (tying_rank(name), name)):
        for first in groups:
            one, other = base.tensors[name], base.tensors[first]
            by_name = None not in (row_rank(name), row_rank(first))
            fits = (one.shape, one.dtype) == (other.shape, other.dtype)
            if fits and _is_one_tensor(inputs, first, name, notes, by_name=by_name):
                groups[first].append(name)
                break
        else:
            groups[name] = []
    return {first: others for first, others in groups.items() if others}


def _names_sharing_storage(base: Source) -> set[str]:
    first_names: dict[Any, str] = {}
    shared: set[str] = set()
    for name, info in base.tensors.items():
        if (place := base.place(name)) is not None and info.elements:
            other = first_names.setdefault((place, info.dtype, info.shape), name)
            shared |= {name, other} if other != name else set()
    return shared


def _is_one_tensor(
    inputs: Sequence[_Input], first: str, alias: str, notes: list[Notice], *, by_name: bool
) -> bool:
    """Return whether two names of the base refer to one tensor in every input."""
    base = inputs[0]
    if not by_name and not _share_storage(base.source, first, alias):
        return False
    unused: list[Notice] = []
    for given in inputs:
        if _agrees(given, first, alias):
            continue
        if _is_configured(given, first, alias):
            unused.append(notice("unused_tensor", given.name, tensor=alias))
        elif given is not base and says_tied(base.config) and _is_configured(base, first, alias):
            raise MismatchError(
                f"{alias}: the base's configuration ties it to {first} (tie_word_embeddings), but "
                f"{given.name} stores both; untie the base, or give {given.name} without {alias}"
            )
        else:
            return False
    notes += unused
    return True


def _agrees(given: _Input, first: str, alias: str) -> bool:
    """Return whether an input has the same values under both names, or only one of them."""
    source, tensors = given.source, given.source.tensors
    held = {first, alias} & tensors.keys()
    if source.is_partial or len(held) < 2:
        return says_tied(given.config) is not False or (source.is_partial and not held)
    whole = not _is_configured(given, first, alias)
    return _share_storage(source, first, alias) or same_bytes(source, first, alias, whole=whole)


def _is_configured(given: _Input, first: str, alias: str) -> bool:
    """Return whether a configuration tells loaders that two names are one tensor."""
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


def _share_storage(source: Source, first: str, alias: str) -> bool:
    place = source.place(first)
    return place is not None and place == source.place(alias)


def _present(source: Source, groups: Groups, ties: Mapping[str, str]) -> Source:
    """Show the same values under all names, whichever of them the source has."""
    names: dict[str, str] = {}
    for first, others in groups.items():
        held = [name for name in (first, *others) if name in source.tensors]
        names |= {name: held[0] for name in (first, *others) if held and name != held[0]}
    every = {name: name for name in source.tensors}
    return RenamedSource(source, {**every, **names}, ties) if names else source


def _fold(given: _Input, base: Source, groups: Groups, notes: list[Notice]) -> Source:
    """Turn an adapter's changes under all names of one tensor into changes of that tensor."""
    source = adapter = given.source
    if not source.is_partial:
        return source
    from dare.inputs.layouts import LayoutSource
    from dare.inputs.lora import LoraSource

    names = {name: name for name in source.tensors}
    if isinstance(source, RenamedSource | LayoutSource):
        adapter, names = source.inner, dict(source.names)
    if not isinstance(adapter, LoraSource):
        return source
    changed = False
    for first, others in (groups | _unstored_head(names, base, given.config)).items():
        held = [name for name in (first, *others) if name in names]
        if not held:
            continue
        stored = [names.pop(name) for name in held]
        names[first] = stored[0]
        changed |= held != [first]
        if code := adapter.tie(stored):
            notes.append(notice(code, given.name, names=", ".join(stored)))
    if changed and isinstance(source, LayoutSource):
        return LayoutSource(adapter, names, source.made)
    return RenamedSource(adapter, names) if changed else source


def _unstored_head(names: Mapping[str, str], base: Source, config: Config) -> Groups:
    """Group embedding and head for a base that stores no head, where an adapter changes one."""
    if not config or says_tied(config) is False or any(map(is_tied_head, base.tensors)):
        return {}
    embeddings = sorted(filter(is_tied_embedding, base.tensors), key=tying_rank)
    heads = list(filter(is_tied_head, names))
    is_one = says_tied(config) is True or bool(heads)
    return {embeddings[0]: heads} if embeddings and is_one else {}
