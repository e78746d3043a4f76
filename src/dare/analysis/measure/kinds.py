"""What a tensor is for and where it stands, by its name."""

from __future__ import annotations

import re
from functools import cache

from dare.analysis.results import OUTSIDE, Kind
from dare.recipe.layers import stack_and_layer
from dare.tensors.names import ANY_EMBEDDING, ANY_HEAD

PATTERNS = (
    (Kind.NORM, r"norm|(^|[._])ln(\d|_|\.|$)"),
    (Kind.HEAD, ANY_HEAD),
    (Kind.EMBEDDING, ANY_EMBEDDING),
    (Kind.MLP, r"experts?(\.|_|$)|moe"),
    (
        Kind.ATTENTION,
        r"att(ention|n)|(^|[._])(q|k|v|o|qkv|kv|query|key|value)(_proj|_lin)?\.|crossattn|Wqkv",
    ),
    (
        Kind.MLP,
        r"mlp|ffn|feed_?forward|densereludense|intermediate|(^|\.)(fc\d?|c_fc|c_proj|ff|w[123])\.|"
        r"(up|down|gate)_proj|dense_h_to_4h|dense_4h_to_h|(^|\.)lin[12]\.|\.output\.dense",
    ),
)
"""The first pattern that is found in a name, whatever its case, says the kind.

Norms come first, since every part of a model may have one. Experts come before attention and the
other layers of perceptrons after it, because BERT's attention has an `output.dense` too.
"""

_COMPILED = tuple((kind, re.compile(pattern, re.IGNORECASE)) for kind, pattern in PATTERNS)


@cache
def kind_of(name: str) -> Kind:
    """What a tensor is for; `other` where its name does not say.

    >>> kind_of("model.layers.3.self_attn.q_proj.weight").value, kind_of("lm_head.weight").value
    ('attention', 'head')
    """
    for kind, pattern in _COMPILED:
        if pattern.search(name):
            return kind
    return Kind.OTHER


def layer_of(name: str) -> int:
    """The number of the layer that a tensor stands in; -1 outside.

    >>> layer_of("model.layers.3.self_attn.q_proj.weight"), layer_of("lm_head.weight")
    (3, -1)
    """
    place = stack_and_layer(name)
    return OUTSIDE if place is None else place[1]
