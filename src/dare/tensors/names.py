"""Embeddings, heads and codes, known by the names of tensors: one list for every reader.

Three questions are asked, and each has its own answer. Which modules have a row for each token
(`INPUT_EMBEDDINGS`, `HEADS`)? Which of them may be one tensor under two names (`row_rank`, and
`is_tied_embedding` with `is_tied_head` where nothing but a configuration says so)? Which tensors
are embeddings or heads in the wide sense, positions and classifiers included (`is_embedding` for
`embedding_drop_rate`, the two expressions for an analysis)?

Diffusion models call what projects a time step, a label, a patch or a text an embedding too. That
has no row for anything, so it is none here (`without_projections`).
"""

from __future__ import annotations

import fnmatch
import re
import tomllib
from collections.abc import Iterable, Sequence
from functools import lru_cache
from importlib.resources import files

_TABLES = tomllib.loads(files("dare.tensors").joinpath("names.toml").read_text("utf-8"))
INPUT_EMBEDDINGS, HEADS = _TABLES["input_embeddings"], _TABLES["heads"]
EMBEDDINGS, PROJECTIONS = _TABLES["embeddings"], _TABLES["projections"]
QUANTISED = {part: kind for kind, parts in _TABLES["quantised"].items() for part in parts}

_WITH_ROWS = (*INPUT_EMBEDDINGS, *HEADS)
_MODULE = rf"(?<![^.])(?:{'|'.join(PROJECTIONS)}|embedders)(?=\.)(?:\.\w+_embedder(?=\.))?"
_PROJECTION = re.compile("|".join([_MODULE, *_TABLES["other_projections"]]))

_WITHOUT_THE_WORD = "|".join(name for name in INPUT_EMBEDDINGS if "embed" not in name)
# Patterns that are searched in a name, heads first: `embed_out` is a head.
ANY_EMBEDDING = rf"embed|(^|\.)({_WITHOUT_THE_WORD}|wpe|cls_token|mask_token|class_token)(\.|$)"
ANY_HEAD = "|".join(_TABLES["any_head"])
_OF_NO_LAYER = re.compile(rf"norm|{ANY_HEAD}|{ANY_EMBEDDING}", re.IGNORECASE)
# The statistics of inputs that a layer like BatchNorm keeps.
STATISTICS = ("running_mean", "running_var")


def quantised_kind(tensor: str) -> str | None:
    """Return the kind of quantised model that a tensor's name shows; None if it shows none.

    >>> quantised_kind("model.layers.0.q_proj.qweight"), quantised_kind("model.norm.weight")
    ('AWQ or GPTQ', None)
    """
    return next((QUANTISED[part] for part in tensor.split(".") if part in QUANTISED), None)


def without_projections(tensor: str) -> str:
    """Return a name with a dash for parts that only sound like an embedding.

    >>> without_projections("conditioner.embedders.1.model.token_embedding.weight")
    'conditioner.-.1.model.token_embedding.weight'
    >>> without_projections("time_text_embed.text_embedder.linear_1.weight")
    '-.linear_1.weight'
    """
    return _PROJECTION.sub("-", in_component(tensor))


def in_component(tensor: str) -> str:
    """Return the name of a pipeline's tensor in its component; other names do not change.

    >>> in_component("text_encoder/shared.weight"), in_component("model/h0/mlp/w")
    ('shared.weight', 'model/h0/mlp/w')
    """
    return re.sub(r"^\w+/(?=[^/]*$)", "", tensor)


def is_layer_matrix(tensor: str, shape: Sequence[int]) -> bool:
    """Say whether a tensor is a matrix inside a model: no norm, bias, embedding or head.

    >>> is_layer_matrix("model.layers.0.mlp.up_proj.weight", (8, 4)), is_layer_matrix("wte", (8, 4))
    (True, False)
    """
    return len(shape) > 1 and _OF_NO_LAYER.search(without_projections(tensor)) is None


@lru_cache(1 << 14)  # plans are made often
def is_embedding(tensor: str) -> bool:
    """Say whether a tensor is an embedding or a head, by its name."""
    name = without_projections(tensor)
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in EMBEDDINGS)


def comes_before_layers(tensor: str, is_in_other_stack: bool) -> bool:
    """Say whether a tensor outside the main layers is passed before them: no norm and no head.

    >>> [comes_before_layers(name, False) for name in ("wpe.weight", "ln_f.weight", "lm_head")]
    [True, False, False]
    """
    name = without_projections(tensor)
    is_head = re.search(ANY_HEAD, name) is not None
    return is_in_other_stack or (not is_head and re.search(ANY_EMBEDDING, name) is not None)


def is_input_embedding(tensor: str) -> bool:
    """Say whether a tensor has a row for each token that goes into a model.

    >>> is_input_embedding("model.embed_tokens.weight"), is_input_embedding("lm_head.weight")
    (True, False)
    """
    return module_of_weight(tensor) in INPUT_EMBEDDINGS


def is_tied_embedding(tensor: str) -> bool:
    """Say whether a tensor can be the head of its model too."""
    return module_of_weight(tensor) in _TABLES["tied_embeddings"]


def is_tied_head(tensor: str) -> bool:
    """Say whether a tensor can be the embedding of its model too."""
    return module_of_weight(tensor) in _TABLES["tied_heads"]


def row_rank(tensor: str) -> int | None:
    """Rank a tensor by how surely it has a row for each token; 0 is best, None is not at all.

    >>> row_rank("model.embed_tokens.weight"), row_rank("model.norm.weight")
    (0, None)
    """
    *_, module, parameter = ("", *in_component(tensor).split("."))
    has_rows = module in _WITH_ROWS and parameter in ("weight", "bias")
    return _WITH_ROWS.index(module) if has_rows else None


def tying_rank(tensor: str) -> int:
    """Rank a tensor among the names of one tensor: the one to use for all comes first."""
    *_, module, _ = ("", *in_component(tensor).split("."))
    order = ("shared", *_WITH_ROWS)
    return order.index(module) if module in order else len(order)


def module_of_weight(tensor: str) -> str:
    """Return the last name of the module that a weight belongs to; empty for all but weights."""
    module, _, parameter = in_component(tensor).rpartition(".")
    return module.rpartition(".")[2] if parameter == "weight" else ""


def norm_layers(tensors: Iterable[str]) -> list[str]:
    """Return the layers that normalise by statistics of all inputs, as BatchNorm does.

    >>> norm_layers(["bn.running_mean", "bn.running_var", "bn.weight", "x.running_mean"])
    ['bn']
    """
    names = set(tensors)
    layers = (name.removesuffix(".running_var") for name in sorted(names))
    return [layer for layer in layers if {f"{layer}.{s}" for s in STATISTICS} <= names]


def some_of(names: Sequence[str], shown: int = 1) -> str:
    """Return the first names as text, and how many more there are.

    >>> some_of(["a", "b", "c"]), some_of(["a"])
    ('a and 2 more', 'a')
    """
    plain = [name if name.isprintable() else ascii(name) for name in names[:shown]]
    return ", ".join(plain) + (f" and {len(names) - shown} more" if len(names) > shown else "")
