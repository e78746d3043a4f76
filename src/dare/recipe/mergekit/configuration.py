"""The configuration, read from its nodes and checked: keys, models, slices, tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dare.errors import did_you_mean
from dare.recipe.layers import count_layers
from dare.recipe.mergekit.nodes import Node, Table, as_items, as_table, as_text
from dare.recipe.mergekit.parameters import Input, has_gradient

TensorsOf = Callable[[Path], Iterable[str]]
"""The names of a model's tensors."""

TOP_KEYS = (
    "merge_method",
    "base_model",
    "models",
    "slices",
    "modules",
    "parameters",
    "dtype",
    "out_dtype",
    "tokenizer_source",
    "tokenizer",
    "chat_template",
)
PARAMETERS = (
    *("weight", "density", "normalize", "rescale", "lambda", "int8_mask", "t", "gamma", "epsilon"),
    *("nuslerp_flatten", "nuslerp_row_wise", "normalize_weights", "eps", "r", "alpha", "scale"),
    *("select_topk", "filter_wise", "max_iter", "tol"),
)
"""What any of mergekit's methods takes."""


@dataclass(frozen=True)
class Config:
    """A configuration whose keys are known."""

    method: str
    method_node: Node
    base: str | None
    inputs: tuple[Input, ...]
    shared: tuple[Table, ...]
    """Where parameters that are no model's own are looked for, strongest first."""
    dtype: Node | None
    out_dtype: Node | None
    tokenizer_source: str | None
    chat_template: str | None
    notes: tuple[str, ...]

    def others(self) -> tuple[Input, ...]:
        """The inputs but the base."""
        return tuple(given for given in self.inputs if given.model != self.base)


def read_config(
    root: Node,
    methods: Collection[str],
    not_converted: Mapping[str, str],
    tensors_of: TensorsOf,
) -> Config:
    """Read and check a configuration, whose method must be one of `methods`.

    `not_converted` says of other methods why they cannot be converted, `tensors_of` what the
    tensors of a model are called.
    """
    table = {
        key: node
        for key, node in as_table(root, TOP_KEYS, "a configuration").items()
        if node.value is not None
    }
    if "merge_method" not in table:
        raise root.refuse("merge_method is missing")
    method = as_text(table["merge_method"], "merge_method")
    if method not in methods:
        reason = not_converted.get(method)
        why = f": {reason}" if reason else did_you_mean(method, methods)
        raise table["merge_method"].refuse(
            f"merge_method {method!r} cannot be converted{why}; these can: {', '.join(methods)}"
        )
    if "modules" in table:
        raise table["modules"].refuse(
            "modules: parts of a model cannot be configured apart; write models, and "
            "filters for the names of a part's tensors"
        )
    if ("models" in table) == ("slices" in table):
        raise root.refuse("give either models or slices")

    notes: list[str] = []
    base = _base(table)
    whole = _parameters(table, "the configuration")
    if "models" in table:
        inputs = _inputs_of_models(table["models"], base, whole, notes)
        shared: tuple[Table, ...] = (whole,)
    else:
        inputs, between, base = _inputs_of_slices(table["slices"], base, whole, notes, tensors_of)
        shared = (between, whole)
    _check_distinct(inputs)
    return Config(
        method,
        table["merge_method"],
        base,
        inputs,
        shared,
        table.get("dtype"),
        table.get("out_dtype"),
        _tokenizer_source(table),
        _chat_template(table),
        tuple(notes),
    )


def _parameters(table: Table, what: str) -> Table:
    node = table.get("parameters")
    if node is None or node.value is None:
        return {}
    return as_table(node, PARAMETERS, f"the parameters of {what}")


def _check_distinct(inputs: Sequence[Input]) -> None:
    seen: dict[str, int] = {}
    for given in inputs:
        if given.model in seen:
            line = seen[given.model]
            raise given.node.refuse(f"{given.model}: is given on line {line} already")
        seen[given.model] = given.node.line


# ---------------------------------------------------------------- models


def _base(table: Table) -> str | None:
    if "base_model" not in table:
        return None
    node = table["base_model"]
    model, lora = _reference(node)
    if lora is not None:
        raise node.refuse("base_model: an adapter cannot be part of the base; merge it first")
    return model


def _reference(node: Node) -> tuple[str, str | None]:
    """The path or name of a model, and of the adapter that mergekit would put on it."""
    if isinstance(node.value, dict):
        table = as_table(node, ("model", "lora", "override_architecture"), "a model")
        if "model" not in table:
            raise node.refuse("model is missing")
        lora = table.get("lora")
        adapter = None if lora is None or lora.value is None else _path(lora)
        return _path(table["model"]), adapter
    words = as_text(node, "model").split("+")
    if len(words) > 2:
        raise node.refuse(f"{node.value!r} is not MODEL or MODEL+ADAPTER")
    return words[0], words[1] if len(words) == 2 else None


def _path(node: Node) -> str:
    if not isinstance(node.value, dict):
        return as_text(node, "model")
    table = as_table(node, ("path", "revision"), "the path of a model")
    if "path" not in table:
        raise node.refuse("path is missing")
    revision = table.get("revision")
    path = as_text(table["path"], "path")
    return f"{path}@{revision.value}" if revision and revision.value else path


def _file_of(node: Node, base: str | None, notes: list[str]) -> str:
    """The file that stands for a model: the model's, or that of its adapter."""
    model, lora = _reference(node)
    if lora is None:
        return model
    if model != base:
        raise node.refuse(
            f"{model}+{lora}: an adapter is taken as a change to the base, which is {base}; merge "
            "this one into its model first"
        )
    notes.append(
        f"{model}+{lora}: the adapter is merged as it is; mergekit first adds it to the base and "
        "rounds the sum"
    )
    return lora


def _inputs_of_models(
    node: Node, base: str | None, whole: Table, notes: list[str]
) -> tuple[Input, ...]:
    inputs = []
    for item in as_items(node, "models"):
        table = as_table(item, ("model", "parameters"), "a model")
        if "model" not in table:
            raise item.refuse("model is missing")
        name = _file_of(table["model"], base, notes)
        inputs.append(Input(name, item, (_parameters(table, "a model"), whole)))
    if base is not None and base not in [given.model for given in inputs]:
        inputs.append(Input(base, node, (whole,)))
    return tuple(inputs)


# ---------------------------------------------------------------- slices


def _inputs_of_slices(
    node: Node, base: str | None, whole: Table, notes: list[str], tensors_of: TensorsOf
) -> tuple[tuple[Input, ...], Table, str | None]:
    """The inputs of slices that together are the whole model, and what they share."""
    known = ("sources", "parameters", "base_model", "residual_weight")
    start, found = 0, []
    for item in as_items(node, "slices"):
        table = as_table(item, known, "a slice")
        if "residual_weight" in table and table["residual_weight"].value is not None:
            raise table["residual_weight"].refuse("residual_weight: cannot be converted")
        if "sources" not in table:
            raise item.refuse("sources is missing")
        own_base = _base(table) or base
        between = _parameters(table, "a slice")
        sources = as_items(table["sources"], "sources")
        spans = {_span(source) for source in sources}
        if len(spans) > 1 or next(iter(spans))[0] != start:
            raise item.refuse(
                f"layer_range: this slice must begin with layer {start} of every model; layers "
                "are merged where they are, and cannot be stacked in another order"
            )
        start = next(iter(spans))[1]
        inputs = tuple(_input_of_source(s, own_base, between, whole, notes) for s in sources)
        found.append((item, inputs, between, own_base))

    item, inputs, between, own_base = found[0]
    for other, *described in found[1:]:
        if _comparable(described) != _comparable([inputs, between, own_base]):
            raise other.refuse(
                "this slice is not like the first: slices with models or parameters of their own "
                "cannot be converted; write one slice, and lists of values for the layers"
            )
    if len(found) > 1 and any(map(has_gradient, (whole, between, *(i.scopes[0] for i in inputs)))):
        raise node.refuse(
            "lists of values run over each slice anew, which cannot be converted; write one slice"
        )
    _check_layers(own_base or inputs[0].model, start, node, notes, tensors_of)
    return inputs, between, own_base


def _span(source: Node) -> tuple[int, int]:
    table = as_table(source, ("model", "layer_range", "parameters"), "a source")
    node = table.get("layer_range", source)
    ends = node.plain if node is not source else None
    if not isinstance(ends, list) or len(ends) != 2 or not all(type(end) is int for end in ends):
        raise node.refuse("layer_range: must be two whole numbers, as in [0, 32]")
    if ends[0] >= ends[1]:
        raise node.refuse(f"layer_range: {ends} holds no layers")
    return ends[0], ends[1]


def _input_of_source(
    source: Node, base: str | None, between: Table, whole: Table, notes: list[str]
) -> Input:
    table = as_table(source, ("model", "layer_range", "parameters"), "a source")
    if "model" not in table:
        raise source.refuse("model is missing")
    own = _parameters(table, "a source")
    return Input(_file_of(table["model"], base, notes), source, (own, between, whole))


def _comparable(described: Sequence[Any]) -> Any:
    """Inputs, shared parameters and base of a slice, without places."""
    inputs, between, base = described
    own = [(given.model, {k: v.plain for k, v in given.scopes[0].items()}) for given in inputs]
    return own, {key: node.plain for key, node in between.items()}, base


def _check_layers(
    model: str, layers: int, node: Node, notes: list[str], tensors_of: TensorsOf
) -> None:
    """Slices that leave layers out would make a smaller model."""
    if not Path(model).exists():
        notes.append(
            f"slices: taken for the whole model, which has {layers} layers then; {model} is not "
            "here to count them"
        )
        return
    counts = count_layers(tensors_of(Path(model)))
    if layers not in counts.values():
        found = ", ".join(f"{count} in {stack}" for stack, count in counts.items()) or "none"
        raise node.refuse(
            f"slices end with layer {layers}, and {model} has {found}; a model of fewer or more "
            "layers cannot be made here"
        )


# ---------------------------------------------------------------- tokenizer and chat template


def _tokenizer_source(table: Table) -> str | None:
    if "tokenizer" in table and "tokenizer_source" in table:
        raise table["tokenizer"].refuse("give either tokenizer or tokenizer_source")
    if "tokenizer_source" in table:
        return _reference(table["tokenizer_source"])[0]
    if "tokenizer" not in table:
        return None
    given = as_table(
        table["tokenizer"], ("source", "tokens", "pad_to_multiple_of"), "the tokenizer"
    )
    for key in ("tokens", "pad_to_multiple_of"):
        if key in given and given[key].value is not None:
            raise given[key].refuse(f"{key}: embeddings of single tokens cannot be chosen here")
    source = given.get("source")
    return "union" if source is None else _reference(source)[0]


def _chat_template(table: Table) -> str | None:
    if "chat_template" not in table:
        return None
    template = as_text(table["chat_template"], "chat_template")
    if template != "auto" and "{" not in template:
        raise table["chat_template"].refuse(
            f"chat_template: {template}: mergekit's built-in templates are not known here; "
            "write the template itself"
        )
    return template
