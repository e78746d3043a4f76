"""Values that change from layer to layer: a list of numbers spread evenly over a stack of layers.

The first number is for the first layer and the last number for the last layer; between two numbers
the value is interpolated linearly. Tensors outside the layers, such as embeddings, the last norm
and the head, take the first number, and a stack of a single layer takes the last.

The blocks of a diffusion model have several names and follow each other, so they are one stack:
input, middle and output blocks of a U-Net, double and single blocks of a transformer. So 25 numbers
set the 25 blocks of Stable Diffusion 1.5, and 57 those of Flux.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from fractions import Fraction

from dare.tensors.names import PROJECTIONS

Gradient = list[float]  # one number or more, from the first layer to the last

OUTSIDE = Fraction(0)  # the depth of a tensor outside of all layers

# Blocks that follow each other in one network: U-Nets and transformers, in files and diffusers.
SEQUENCES: tuple[tuple[str, ...], ...] = (
    ("input_blocks", "middle_block", "output_blocks"),
    ("down_blocks", "mid_block", "up_blocks"),
    ("double_blocks", "single_blocks"),
    ("transformer_blocks", "single_transformer_blocks"),
)

# The first of these in a name: the only middle block, a module outside the layers although its
# parts are numbered, or a number. The text encoders in `conditioner.embedders` are not layers.
_PLACE = re.compile(
    r"(?:^|[./])(?P<middle>middle_block|mid_block)\."
    rf"|(?:^|[./])(?P<apart>{'|'.join(PROJECTIONS)}|diffusion_model\.out|final_layer\.adaLN_modulation"
    r"|text_embedding(?=\.\d)|img_emb)\."
    r"|(?<!embedders)\.(?P<layer>\d+)\."
)


def stack_and_layer(tensor: str) -> tuple[str, int] | None:
    """Return a tensor's stack and its layer there, from the first number between dots.

    >>> stack_and_layer("model.layers.12.mlp.experts.3.weight"), stack_and_layer("lm_head.weight")
    (('model.layers', 12), None)
    """
    match = _PLACE.search(tensor)
    if match is None or match["apart"]:
        return None
    if match["middle"]:
        return tensor[: match.end("middle")], 0
    return tensor[: match.start()], int(match["layer"])


def at_layer(tensor: str, layer: int) -> str:
    """Return the name that a tensor of a layer has in another layer.

    >>> at_layer("model.layers.12.mlp.experts.3.weight", 7)
    'model.layers.7.mlp.experts.3.weight'
    """
    match = _PLACE.search(tensor)
    assert match is not None  # the tensor is in a layer
    return f"{tensor[: match.start('layer')]}{layer}{tensor[match.end('layer') :]}"


def count_layers(tensors: Iterable[str]) -> dict[str, int]:
    """Count the layers of each stack, from the highest number in it.

    >>> count_layers(["text.layers.0.w", "text.layers.31.w", "vision.blocks.23.w", "norm.w"])
    {'text.layers': 32, 'vision.blocks': 24}
    """
    counts: dict[str, int] = {}
    for stack, layer in filter(None, map(stack_and_layer, tensors)):
        counts[stack] = max(counts.get(stack, 0), layer + 1)
    return counts


def find_networks(counts: Mapping[str, int]) -> list[list[str]]:
    """Return the stacks of each network, in the order in which data passes through them.

    >>> find_networks({"up_blocks": 4, "mid_block": 1, "down_blocks": 4, "encoder.layers": 12})
    [['down_blocks', 'mid_block', 'up_blocks'], ['encoder.layers']]
    """
    networks: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for stack in counts:
        inner = _last_part(stack)
        sequence = next((names for names in SEQUENCES if inner in names), (inner,))
        networks.setdefault((stack.removesuffix(inner), sequence), []).append(stack)
    for (_, sequence), stacks in networks.items():
        stacks.sort(key=lambda stack: sequence.index(_last_part(stack)))
    return list(networks.values())


def _last_part(stack: str) -> str:
    return re.split(r"[./]", stack)[-1]


def find_depths(tensors: Iterable[str], first_layer: int = 0) -> dict[str, Fraction]:
    """Return the depth of each tensor in its network: 0 is the first layer, 1 the last.

    `first_layer` is the number of the first layer, for a part of a stack.

    >>> depths = find_depths(["embed.w", "h.0.w", "h.1.w", "h.4.w", "blocks.0.w"])
    >>> [str(depth) for depth in depths.values()]
    ['0', '0', '1/4', '1', '1']
    """
    names = list(tensors)
    counts = count_layers(names)
    before, last = {}, {}
    for stacks in find_networks(counts):
        layers = [counts[stack] - first_layer for stack in stacks]
        for index, stack in enumerate(stacks):
            before[stack], last[stack] = sum(layers[:index]) - first_layer, sum(layers) - 1
    depths = dict.fromkeys(names, OUTSIDE)
    for name in names:
        if place := stack_and_layer(name):
            stack, number = place
            deepest, layer = last[stack], before[stack] + number
            depths[name] = Fraction(layer, deepest) if deepest else Fraction(1)
    return depths


def value_at(value: Gradient, depth: Fraction) -> float:
    """Return the value of a gradient at a depth, rounded once.

    >>> value_at([0.0, 1.0, 0.5], Fraction(3, 4))
    0.75
    """
    place = depth * (len(value) - 1)
    below = int(place)
    above = min(below + 1, len(value) - 1)
    low, high = Fraction(value[below]), Fraction(value[above])
    return float(low + (high - low) * (place - below))


def mean_value(value: float | Gradient) -> float:
    """Return one number for all layers: the mean of a gradient.

    >>> mean_value([0.0, 1.0]), mean_value(0.3)
    (0.5, 0.3)
    """
    return sum(value) / len(value) if isinstance(value, list) else value
