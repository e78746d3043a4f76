"""Recipes from mergekit's YAML, held against the models that it names."""

from __future__ import annotations

from os import PathLike

from dare.inputs.formats import open_model
from dare.recipe.mergekit import Conversion, convert
from dare.stores.locations import to_path


def convert_yaml(path: str | PathLike[str]) -> Conversion:
    """Read a mergekit configuration as a recipe, which has no output yet; say how they differ."""
    return convert(to_path(path), lambda model: open_model(model).tensors)
