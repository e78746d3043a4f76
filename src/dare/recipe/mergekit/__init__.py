"""From a mergekit configuration (YAML) to a recipe.

A conversion gives the same weights as mergekit, except for the differences that it names. Settings
without an equivalent are refused, with the file, the line and a remedy. Keys that mergekit silently
ignores are also ignored, and noted.

A file becomes `nodes`, and these a `configuration` for each of its documents; the `methods` make
drafts of its parts. The last document, or the one without a name, is the recipe; the others are
`merges` that it may name as its models, and so is a model with an adapter.
"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from dare.errors import DareError, printable
from dare.recipe.document import request_from_document
from dare.recipe.mergekit.configuration import KNOWN, Config, Part, TensorsOf, read_config
from dare.recipe.mergekit.methods import METHODS, Draft
from dare.recipe.mergekit.nodes import read_yaml
from dare.recipe.recipe import Recipe
from dare.stores.locations import to_path
from dare.tensors.files import is_there


@dataclass(frozen=True)
class Conversion:
    """A recipe that was a mergekit configuration, with remarks."""

    source: Path
    document: dict[str, Any]  # the recipe's tables
    differences: tuple[str, ...]  # every known reason why the weights will differ from mergekit's
    # Keys that were left out because they change nothing.
    notes: tuple[str, ...]

    @cached_property
    def recipe(self) -> Recipe:
        """The recipe, which has no output yet."""
        return request_from_document(self.document, str(self.source)).recipe

    @property
    def summary(self) -> str:
        """A word for each difference, and the keys that are left out."""
        words = [text.partition(":")[0] for text in self.differences]
        keys = dict.fromkeys(text.partition(" ")[0] for text in self.notes)
        left_out = [f"left out: {', '.join(keys)}"] if keys else []
        return "; ".join([*([", ".join(words)] if words else []), *left_out])

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values, ready for JSON."""
        return {
            "recipe": self.recipe.to_document(),
            "differences": list(self.differences),
            "notes": list(self.notes),
        }

    def to_toml(self) -> str:
        """Return the recipe as TOML, with the differences and notes as comments."""
        lines = [f"Converted from {self.source.name}, a configuration for mergekit."]
        for head, texts in (("Different in mergekit:", self.differences), ("Notes:", self.notes)):
            lines += ["", head, *(f"- {text}" for text in texts)] if texts else []
        comments = [f"# {printable(line)}".rstrip() for line in lines]
        return "\n".join(comments) + "\n\n" + self.recipe.to_toml()


def convert(file: Path, tensors_of: TensorsOf) -> Conversion:
    """Read mergekit's configurations as a recipe, and say how the two differ."""
    roots = read_yaml(file)
    reading = roots[0].reading
    differences: dict[str, None] = {}
    recipes: dict[str | None, dict[str, Any]] = {}
    for root in roots:
        config = read_config(root, METHODS, tensors_of)
        twice = f"name: a merge before this one is called {config.name} too"
        if config.name is None:
            twice = "name is missing: if a file has several merges, all but the last need one"
        root.require(config.name not in recipes, twice)
        recipes[config.name] = _tables(config, differences)
        ends = [to_path(part.inputs[0].model) for part in (config.parts[0], config.parts[-1])]
        with suppress(DareError):  # the merge will report problems with a model
            for model in filter(is_there, (to_path(config.base or ends[0]), ends[-1])):
                names = " ".join(tensors_of(model))
                if re.search(r"\.experts\.\d+\.", names):
                    differences[KNOWN["differences"]["experts"]] = None
                if ends[0] != ends[-1] and "embed_tokens" in names and "lm_head" not in names:
                    differences[KNOWN["differences"]["tied"]] = None
    document = recipes.pop(None if None in recipes else list(recipes)[-1])
    for tables in recipes.values():  # an inner merge has no chat template
        template = tables.pop("chat_template", None)
        document = ({"chat_template": template} if template else {}) | document
    merges = {str(name): tables for name, tables in recipes.items()} | reading.merges
    return Conversion(
        file,
        document | ({"merges": merges} if merges else {}),
        tuple(differences),
        tuple(text for _, text in sorted(reading.notes)),
    )


def _tables(config: Config, differences: dict[str, None]) -> dict[str, Any]:
    """Return the tables of a recipe, and add to `differences`."""
    drafts = [Draft(part) for part in config.parts]
    for draft in drafts:
        METHODS[draft.part.method].convert(draft)
        _note_unused_keys(draft.part)
    if config.computes_in != "float32" and any(draft.document()["models"] for draft in drafts):
        kind = config.computes_in or "the type that the weights are stored in"
        drafts[-1].differ("arithmetic", kind=kind)
    if "vocabulary" in config.keys:
        drafts[-1].differ("padding")
    if len(config.parts[0].inputs) < len(config.parts[-1].inputs):
        drafts[-1].differ("head")
    differences |= dict.fromkeys(text for draft in drafts for text in draft.differences)
    if not config.is_stack:
        return {**config.keys, **drafts[0].document()}
    base = {"base": config.base} if config.base else {}
    return {**base, **config.keys, "layers": [draft.layers() for draft in drafts]}


def _note_unused_keys(part: Part) -> None:
    """Note the keys that mergekit knows but that have no effect in their place."""
    method = METHODS[part.method]
    weighs_base = part.method in ("linear", "karcher", "passthrough")
    places = [(scope, (*method.of_models, *method.of_all), part.method) for scope in part.shared]
    for given in part.inputs:
        useful = method.of_models if weighs_base or given.model != part.base else ()
        of_model = [scope for scope in given.scopes if scope not in part.shared]
        places += [(scope, useful, given.model) for scope in of_model]
    for scope, useful, where in places:
        for key, node in scope.table.items():
            if key not in useful:
                node.note(key, f"has no effect for {where}")
