"""Pipelines of diffusers, with a model in each of their folders, and metadata of diffusion models.

A pipeline is one source, whose tensors have names such as `unet/conv_in.weight`. `model_index.json`
says which folders are components. Autoencoders and safety checkers stay the base's unless a rule
names them, and so do components that a model lacks.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from dare.documents.notices import Notice, notice
from dare.errors import InputError
from dare.inputs.directory import EXAMPLES, LEGAL, Changes, Sidecars, walk
from dare.inputs.shards import MODEL_INDEX, STEMS, components_of
from dare.inputs.sources import RenamedSource, Source
from dare.recipe.recipe import Recipe
from dare.tensors.dtypes import StorageType
from dare.tensors.files import list_names
from dare.tensors.names import some_of

KEPT = re.compile(r"\w*vae|movq|vqgan|safety_checker")  # components that a mean would spoil
# Files of a component that go with the output; an index lists shards of the base.
_SMALL = re.compile(r"(?!.*\.index\.).+\.(json|txt|model|spm|tiktoken|jinja|py)")

SPEC = "modelspec."
TITLE, MERGED_FROM = f"{SPEC}title", f"{SPEC}merged_from"
# Entries of the base that hold for a merge, too; its hash, date, author and thumbnail do not.
STILL_TRUE = (
    *("sai_model_spec", "architecture", "implementation", "implementation_version", "license"),
    *("resolution", "prediction_type", "timestep_range", "encoder_layer", "usage_hint"),
    *("trigger_phrase", "format_type", "format_template", "language"),
)
MAX_ENTRY, MAX_TITLE = 1 << 16, 200  # characters; an entry may be a whole licence


def stems_of(source: Source) -> dict[str, str]:
    """Return the stem of each component's files; the key of a plain model is ""."""
    stems = {
        file: next((stem for stem in STEMS[1:] if file.name.startswith(stem)), STEMS[0])
        for file in source.files
    }
    inside = {
        f"{file.parent.name}/": stem
        for file, stem in stems.items()
        if (home := source.folder) is not None
        and file.parent.parent == home
        and file.parent.name in components_of(home)
    }
    return inside or {"": next(iter(stems.values()), STEMS[0])}


def leave_components(
    recipe: Recipe, base: Source, models: Sequence[Source], names: Sequence[str]
) -> tuple[list[Source], list[Notice]]:
    """Remove from models the components that stay the base's; say which these are."""
    components = list(stems_of(base))
    patterns = [word for rule in recipe.tensors for word in rule.match or ()]

    def is_kept(name: str) -> bool:
        folder = name.partition("/")[0]
        named = any(pattern.startswith(f"{folder}/") for pattern in patterns)
        return KEPT.fullmatch(folder) is not None and not named

    notes, views = [], list[Source]()
    for model, model_name in zip(models, names, strict=True):
        merged = {name: name for name in model.tensors if not is_kept(name)}
        held = {name.partition("/")[0] + "/" for name in merged}
        views.append(view := RenamedSource(model, merged))
        view.unchanged = tuple(prefix for prefix in components if prefix not in held)
        lacking = [prefix for prefix in view.unchanged if not is_kept(prefix)]
        if lacking and not model.is_partial:
            notes.append(notice("lacking_components", model_name, folders=", ".join(lacking)))
    if kept := list(filter(is_kept, components)):
        notes.append(notice("kept_components", folders=", ".join(kept), example=kept[0]))
    return views, notes


def refuse_pipeline(path: Path, what: str) -> None:
    """Refuse a pipeline where one model is expected."""
    if components_of(path):
        raise InputError(f"{path}: is a pipeline of several models; {what} its folders one by one")


def collect_components(directory: Path, kinds: Mapping[str, StorageType | None]) -> Sidecars:
    """Collect the files of a pipeline that go beside the weights; `kinds` are the main types."""
    gathered, top = Sidecars(directory), list_names(directory)
    inside = [name for part in components_of(directory) for name in walk(directory, part)]
    files = [n for n in top if n == MODEL_INDEX or n.endswith(".py") or LEGAL.fullmatch(n)]
    files += filter(_SMALL.fullmatch, inside)
    gathered.take(directory, files)
    for prefix, kind in kinds.items():
        gathered.configure(Changes(dtype=kind), prefix)
    if code := [name for name in files if name.endswith(".py")]:
        gathered.notes.append(notice("custom_code", files=some_of(code, EXAMPLES)))
    gathered.note_left([*top, *inside])
    return gathered


def merged_spec(base: Source, models: Sequence[tuple[str, Source]]) -> dict[str, str]:
    """Return the `modelspec.*` entries of a merge: those of the base that are still true."""
    texts = {key: base.metadata.get(SPEC + key, "") for key in STILL_TRUE}
    kept = {SPEC + key: text for key, text in texts.items() if text and len(text) <= MAX_ENTRY}
    if not kept:
        return {}
    titles = [s.metadata.get(TITLE, name)[:MAX_TITLE] for name, s in (("base", base), *models)]
    return {**kept, TITLE: " + ".join(titles[1:] or titles), MERGED_FROM: ", ".join(titles)}
