"""From a mergekit configuration (YAML) to a recipe.

A conversion gives the weights that mergekit gives, but for the differences that it names. A method
that has no equal here is refused, with the file, the line and a remedy. Keys that mergekit ignores
without a word are ignored too, and noted; a key that mergekit does not know is refused.

A file becomes `nodes`, those a `configuration`; one of the `methods` makes the draft of a recipe.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dare.errors import printable
from dare.recipe.document import request_from_document
from dare.recipe.mergekit.configuration import Config, TensorsOf, read_config
from dare.recipe.mergekit.methods import METHODS, NOT_CONVERTED, Draft
from dare.recipe.mergekit.nodes import read_yaml
from dare.recipe.recipe import Recipe


@dataclass(frozen=True)
class Conversion:
    """A recipe that was a mergekit configuration, with remarks."""

    source: Path
    recipe: Recipe
    differences: tuple[str, ...]  # every known reason for which the weights will not be mergekit's
    # Keys that were left out because they change nothing, and facts that could not be checked.
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as plain values, ready for JSON."""
        return {
            "recipe": self.recipe.to_document(),
            "differences": list(self.differences),
            "notes": list(self.notes),
        }

    def to_toml(self) -> str:
        """Return the recipe as TOML, with the differences and notes as comments."""
        lines = [f"Converted from {self.source.name}, a configuration for mergekit."]
        for head, texts in (("Different there:", self.differences), ("Notes:", self.notes)):
            lines += ["", head, *(f"- {text}" for text in texts)] if texts else []
        comments = [f"# {printable(line)}".rstrip() for line in lines]
        return "\n".join(comments) + "\n\n" + self.recipe.to_toml()


def convert(file: Path, tensors_of: TensorsOf) -> Conversion:
    """Read a mergekit configuration as a recipe, and say how the two differ."""
    config = read_config(read_yaml(file), METHODS, NOT_CONVERTED, tensors_of)
    draft = Draft(config)
    METHODS[config.method].convert(draft)
    if config.computes_in != "float32":
        kind = config.computes_in or "the type that the weights are stored in"
        draft.differences.append(
            f"mergekit computes in {kind}; here arithmetic is float32, and rounded once at the end"
        )
    return Conversion(
        file,
        request_from_document(draft.document(), str(file)).recipe,
        tuple(draft.differences),
        (*config.notes, *draft.notes, *_unused_keys(config)),
    )


def _unused_keys(config: Config) -> list[str]:
    """List the keys that mergekit knows and that change nothing where they stand, by line."""
    method = METHODS[config.method]
    weighs_base = config.method in ("linear", "karcher")
    places = []
    for given in config.inputs:
        useful = method.of_models if weighs_base or given.model != config.base else ()
        places += [(given.scopes[0], useful, given.model)] if given.scopes[1:] else []
    for scope in config.shared:
        places.append((scope, (*method.of_models, *method.of_all), config.method))
    notes = {
        node.line: f"line {node.line}: {key} has no effect for {where}, and is left out"
        for scope, useful, where in places
        for key, node in scope.items()
        if key not in useful
    }
    return [text for _, text in sorted(notes.items())]
