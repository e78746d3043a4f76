"""From a mergekit configuration (YAML) to a recipe.

What is converted gives what mergekit gives, but for the differences that the conversion names.
What has no equal here is refused, with the file, the line and what to do about it. What mergekit
ignores without a word is ignored too, and noted; a key that mergekit does not know is refused.

A file becomes `nodes`, those a `configuration` with its `parameters`; one of the `methods` fills in
the `draft` of a recipe from it; `conversion` is all of this in order.
"""

from dare.recipe.mergekit.conversion import Conversion, convert

__all__ = ["Conversion", "convert"]
