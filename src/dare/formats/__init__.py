"""Formats of outputs: one file for each that is not plain safetensors."""

from __future__ import annotations

from collections.abc import Sequence

from dare.errors import RecipeError
from dare.formats.recoding import Recoding
from dare.inputs.sources import Source
from dare.recipe.recipe import Recipe
from dare.tensors.dtypes import STORAGE_TYPES


def find_recoding(recipe: Recipe, inputs: Sequence[Source]) -> Recoding | None:
    """Return the format that a recipe asks for; None: plain safetensors."""
    if recipe.output is not None and recipe.output.suffix == ".gguf":
        if recipe.format is not None:
            raise RecipeError("format is for safetensors; leave it out, and set dtype for GGUF")
        from dare.formats.gguf import gguf_recoding  # formats are imported where they are asked for

        return gguf_recoding(recipe, inputs)
    if recipe.dtype is not None and recipe.dtype not in STORAGE_TYPES:
        raise RecipeError(f"dtype {recipe.dtype}: is for an output that ends with .gguf")
    if recipe.format is None or recipe.output is None:
        return None
    if recipe.format == "dcp":
        from dare.formats.dcp import dcp_recoding

        return dcp_recoding(recipe, recipe.output, inputs)
    from dare.formats.quantised import quantised_recoding

    if (found := quantised_recoding(recipe, inputs)) is not None:
        return found
    what = "the base is not quantised in a format that can be written"
    raise RecipeError(f'format = "input": {what}; leave format out, or set dtype')
