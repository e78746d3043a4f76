"""What a tensor is for and where it stands, by its name."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Mapping
from functools import cache

from dare.analysis.results import OUTSIDE, Kind
from dare.recipe.layers import count_layers, find_networks, stack_and_layer
from dare.tensors.names import ANY_EMBEDDING, ANY_HEAD, without_projections

PATTERNS = (
    (
        Kind.NORM,
        r"norm(?!\w*\.linear\.)|(^|[._])ln(\d|_|\.|$)|"
        r"(in|out)_layers\.0\.|diffusion_model\.out\.0\.",
    ),
    (Kind.HEAD, ANY_HEAD),
    (Kind.EMBEDDING, ANY_EMBEDDING),
    (Kind.MLP, r"experts?(\.|_|$)|moe"),
    (
        Kind.ATTENTION,
        r"att(ention|n)|(^|[._])(q|k|v|o|qkv|kv|query|key|value)(_proj|_lin)?\.|crossattn|Wqkv",
    ),
    (
        Kind.MLP,
        r"mlp|ffn|feed_?forward|densereludense|intermediate|(^|\.)(fc\d?|c_fc|c_proj|ff(_context)?|w[123])\.|"
        r"(up|down|gate)_proj|dense_h_to_4h|dense_4h_to_h|(^|\.)lin[12]\.|\.output\.dense",
    ),
)
"""The first pattern that is found in a name, whatever its case, says the kind.

Norms come first, since every part of a model may have one; the linear layer inside some norms of
diffusion models, which shifts and scales by the time step, is no norm. Experts come before
attention and the other layers of perceptrons after it, because BERT's attention has an
`output.dense` too.
"""

_COMPILED = tuple((kind, re.compile(pattern, re.IGNORECASE)) for kind, pattern in PATTERNS)


@cache
def kind_of(name: str) -> Kind:
    """What a tensor is for; `other` where its name does not say.

    >>> kind_of("model.layers.3.self_attn.q_proj.weight").value, kind_of("lm_head.weight").value
    ('attention', 'head')
    """
    plain = without_projections(name)
    for kind, pattern in _COMPILED:
        if pattern.search(plain):
            return kind
    return Kind.OTHER


def number_layers(tensors: Iterable[str]) -> dict[str, int]:
    """The number of the layer that each tensor stands in; -1 outside.

    The layers of a model with one stack have the numbers in their names. Several stacks are
    numbered one after the other, so that no two layers share a number: a network of several stacks
    first, then the longest; encoders before decoders.

    >>> number_layers(["encoder.block.0.w", "decoder.block.0.w", "encoder.block.1.w", "norm.w"])
    {'encoder.block.0.w': 0, 'decoder.block.0.w': 2, 'encoder.block.1.w': 1, 'norm.w': -1}
    """
    names = list(tensors)
    counts = count_layers(names)
    firsts: dict[str, int] = {}
    number = 0
    for stack in itertools.chain(*sorted(find_networks(counts), key=_order(counts))):
        firsts[stack] = number
        number += counts[stack]
    places = {name: stack_and_layer(name) for name in names}
    return {
        name: OUTSIDE if place is None else firsts[place[0]] + place[1]
        for name, place in places.items()
    }


def _order(counts: Mapping[str, int]) -> Callable[[list[str]], tuple[bool, int, bool, str]]:
    def rank(stacks: list[str]) -> tuple[bool, int, bool, str]:
        layers = sum(counts[stack] for stack in stacks)
        return len(stacks) == 1, -layers, "decoder" in stacks[0], stacks[0]

    return rank
