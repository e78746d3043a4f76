"""Recipes from mergekit's YAML, held against the models that it names."""

from __future__ import annotations

from os import PathLike
from pathlib import Path

from dare.inputs.formats import open_model
from dare.recipe.mergekit import Conversion, convert
from dare.recipe.schema import Recipe


def recipe_from_yaml(path: str | PathLike[str]) -> Recipe:
    """Read a mergekit configuration as a recipe, which has no output yet."""
    return convert_yaml(path).recipe


def convert_yaml(path: str | PathLike[str]) -> Conversion:
    """Read a mergekit configuration as a recipe, and say how the two differ."""
    return convert(Path(path), lambda model: open_model(model).tensors)
