"""Values that change from layer to layer: a list of numbers spread evenly over a stack of layers.

The first number is the first layer's and the last number the last layer's; between two numbers the
value changes in a straight line. Tensors that stand outside the layers, such as embeddings, the
last norm and the head, take the first number, and a stack of a single layer takes the last.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from fractions import Fraction
from typing import Any

Gradient = list[float]
"""One number or more, from the first layer to the last."""

OUTSIDE = Fraction(0)
"""The depth of a tensor that stands in no layer."""

_LAYER = re.compile(r"\.(\d+)\.")


def stack_and_layer(tensor: str) -> tuple[str, int] | None:
    """The stack that a tensor stands in and its layer there, from the first number between dots.

    >>> stack_and_layer("model.layers.12.mlp.experts.3.weight"), stack_and_layer("lm_head.weight")
    (('model.layers', 12), None)
    """
    found = _LAYER.search(tensor)
    return (tensor[: found.start()], int(found.group(1))) if found else None


def count_layers(tensors: Iterable[str]) -> dict[str, int]:
    """How many layers each stack has, from the highest number in it.

    >>> count_layers(["text.layers.0.w", "text.layers.31.w", "vision.blocks.23.w", "norm.w"])
    {'text.layers': 32, 'vision.blocks': 24}
    """
    counts: dict[str, int] = {}
    for place in map(stack_and_layer, tensors):
        if place is not None:
            stack, layer = place
            counts[stack] = max(counts.get(stack, 0), layer + 1)
    return counts


def find_depths(tensors: Iterable[str]) -> dict[str, Fraction]:
    """How deep each tensor stands in its stack: 0 is the first layer, 1 the last.

    >>> depths = find_depths(["embed.w", "h.0.w", "h.1.w", "h.4.w", "blocks.0.w"])
    >>> [str(depth) for depth in depths.values()]
    ['0', '0', '1/4', '1', '1']
    """
    names = list(tensors)
    layers = count_layers(names)
    depths = dict.fromkeys(names, OUTSIDE)
    for name in names:
        place = stack_and_layer(name)
        if place is not None:
            stack, layer = place
            last = layers[stack] - 1
            depths[name] = Fraction(layer, last) if last else Fraction(1)
    return depths


def value_at(value: Any, depth: Fraction) -> Any:
    """The value at a depth, rounded once; anything but a gradient is the same at every depth.

    >>> value_at([0.0, 1.0, 0.5], Fraction(3, 4)), value_at(0.9, Fraction(3, 4))
    (0.75, 0.9)
    """
    if not isinstance(value, list):
        return value
    place = depth * (len(value) - 1)
    below = int(place)
    above = min(below + 1, len(value) - 1)
    low, high = Fraction(value[below]), Fraction(value[above])
    return float(low + (high - low) * (place - below))


def mean_value(value: float | Gradient) -> float:
    """One number for all layers: the mean of a gradient.

    >>> mean_value([0.0, 1.0]), mean_value(0.3)
    (0.5, 0.3)
    """
    return sum(value) / len(value) if isinstance(value, list) else value
