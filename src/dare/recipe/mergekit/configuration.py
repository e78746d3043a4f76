"""The configuration, read from its nodes and checked: keys, models, slices, tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dare.errors import did_you_mean
from dare.recipe.layers import count_layers
from dare.recipe.mergekit.nodes import Input, Node, Table, as_items, as_table, as_text, has_gradient
from dare.stores.locations import to_path
from dare.tensors.dtypes import MODEL_TYPES
from dare.tensors.files import is_there

TensorsOf = Callable[[Path], Iterable[str]]  # the names of a model's tensors

TOP_KEYS = (
    *("merge_method", "base_model", "models", "slices", "parameters", "dtype", "out_dtype"),
    *("tokenizer_source", "tokenizer", "chat_template"),
)
PARAMETERS = (
    *("weight", "density", "normalize", "rescale", "lambda", "int8_mask", "t", "gamma", "epsilon"),
    *("nuslerp_flatten", "nuslerp_row_wise", "normalize_weights", "eps", "r", "alpha", "scale"),
    *("select_topk", "filter_wise", "max_iter", "tol"),
)
ENTRIES = {"a model": ("model", "parameters"), "a source": ("model", "parameters", "layer_range")}


@dataclass(frozen=True)
class Config:
    """A configuration whose keys are known."""

    method: str
    method_node: Node
    base: str | None
    inputs: tuple[Input, ...]
    shared: tuple[Table, ...]  # the scopes of parameters that are no model's own, strongest first
    computes_in: str | None
    # Keys of a recipe that no method changes: type, tokenizer and chat template.
    keys: Mapping[str, str]
    notes: tuple[str, ...]

    def others(self) -> tuple[Input, ...]:
        """Return the inputs but the base."""
        return tuple(given for given in self.inputs if given.model != self.base)


def read_config(
    root: Node, methods: Collection[str], not_converted: Mapping[str, str], tensors_of: TensorsOf
) -> Config:
    """Read and check a configuration, whose method must be one of `methods`.

    `not_converted` has the reasons why other methods cannot be converted; `tensors_of` lists the
    tensors of a model.
    """
    table = as_table(root, TOP_KEYS, "a configuration", required="merge_method")
    method = as_text(table["merge_method"], "merge_method")
    reason = not_converted.get(method)
    why = f": {reason}" if reason else did_you_mean(method, methods)
    table["merge_method"].require(
        method in methods,
        f"merge_method {method!r} cannot be converted{why}; these can: {', '.join(methods)}",
    )
    root.require(("models" in table) != ("slices" in table), "give either models or slices")

    notes: list[str] = []
    base = _base(table)
    whole = _parameters(table, "the configuration")
    if "models" in table:
        shared: tuple[Table, ...] = (whole,)
        items = as_items(table["models"], "models")
        inputs = tuple(_input(item, "a model", base, shared, notes) for item in items)
        if base is not None and base not in [given.model for given in inputs]:
            inputs = (*inputs, Input(base, table["models"], shared))
    else:
        inputs, shared, base = _inputs_of_slices(table["slices"], base, whole, notes, tensors_of)
    for given in inputs:
        first = next(other for other in inputs if other.model == given.model)
        text = f"{given.model}: is given on line {first.node.line} already"
        given.node.require(given is first, text)
    types = {key: _storage_type(table[key]) for key in ("dtype", "out_dtype") if key in table}
    keys = _tokenizer(table, [base, *(given.model for given in inputs)]) | _chat_template(table)
    if stored := types.get("out_dtype", types.get("dtype")):
        keys["dtype"] = stored
    node = table["merge_method"]
    return Config(method, node, base, inputs, shared, types.get("dtype"), keys, tuple(notes))


def _parameters(table: Table, what: str) -> Table:
    node = table.get("parameters")
    if node is None:
        return {}
    return as_table(node, PARAMETERS, f"the parameters of {what}", keeps_null=True)


# ---------------------------------------------------------------- models


def _base(table: Table) -> str | None:
    if "base_model" not in table:
        return None
    model, lora = _reference(table["base_model"])
    text = "base_model: an adapter cannot be part of the base; merge it first"
    table["base_model"].require(lora is None, text)
    return model


def _reference(node: Node) -> tuple[str, str | None]:
    """Return the path or name of a model, and of the adapter that mergekit would put on it."""
    if isinstance(node.value, dict):
        known = ("model", "lora", "override_architecture")
        table = as_table(node, known, "a model", required="model")
        return _path(table["model"]), _path(table["lora"]) if "lora" in table else None
    model, *adapters = as_text(node, "model").split("+")
    node.require(len(adapters) < 2, f"{node.value!r} is not MODEL or MODEL+ADAPTER")
    return model, adapters[0] if adapters else None


def _path(node: Node) -> str:
    if not isinstance(node.value, dict):
        return as_text(node, "model")
    table = as_table(node, ("path", "revision"), "the path of a model", required="path")
    revision = table["revision"].value if "revision" in table else None
    path = as_text(table["path"], "path")
    return f"{path}@{revision}" if revision else path


def _input(
    item: Node, what: str, base: str | None, scopes: tuple[Table, ...], notes: list[str]
) -> Input:
    """Read an entry of `models` or `sources`; a model's adapter stands for it, if it has one."""
    table = as_table(item, ENTRIES[what], what, required="model")
    node = table["model"]
    model, lora = _reference(node)
    if lora is not None:
        text = f"{model}+{lora}: an adapter changes the base, which is {base}; merge it first"
        node.require(model == base, text)
        notes.append(
            f"{model}+{lora}: the adapter is merged as it is; mergekit first adds it to the base "
            "and rounds the sum"
        )
    return Input(lora or model, item, (_parameters(table, what), *scopes))


# ---------------------------------------------------------------- slices


def _inputs_of_slices(
    node: Node, base: str | None, whole: Table, notes: list[str], tensors_of: TensorsOf
) -> tuple[tuple[Input, ...], tuple[Table, ...], str | None]:
    """Read slices that together are the whole model: inputs, shared parameters and base."""
    known = ("sources", "parameters", "base_model")
    end, slices = 0, []
    for item in as_items(node, "slices"):
        table = as_table(item, known, "a slice", required="sources")
        slice_base = _base(table) or base
        shared = _parameters(table, "a slice"), whole
        sources = as_items(table["sources"], "sources")
        spans = {_span(source) for source in sources}
        (begin, stop), *other_spans = spans
        text = f"layer_range: must begin with layer {end} of each model; layers cannot be reordered"
        item.require(begin == end and not other_spans, text)
        end = stop
        inputs = tuple(_input(s, "a source", slice_base, shared, notes) for s in sources)
        slices.append((item, inputs, shared, slice_base))

    _, inputs, shared, slice_base = slices[0]
    for item, *other in slices[1:]:
        fault = "is not like the first, which cannot be converted"
        text = f"this slice {fault}; write one slice, and lists of values for the layers"
        item.require(_comparable(*other) == _comparable(inputs, shared, slice_base), text)
    text = "lists of values run over each slice anew, which cannot be converted; write one slice"
    changes = any(map(has_gradient, (*shared, *(given.scopes[0] for given in inputs))))
    node.require(len(slices) == 1 or not changes, text)
    _check_layers(slice_base or inputs[0].model, end, node, notes, tensors_of)
    return inputs, shared, slice_base


def _span(source: Node) -> tuple[int, int]:
    table = as_table(source, ENTRIES["a source"], "a source")
    ends = table["layer_range"].plain if "layer_range" in table else None
    node = table.get("layer_range", source)
    if not isinstance(ends, list) or [type(end) for end in ends] != [int, int]:
        raise node.refuse("layer_range: must be two whole numbers, as in [0, 32]")
    node.require(ends[0] < ends[1], f"layer_range: {ends} holds no layers")
    return ends[0], ends[1]


def _comparable(inputs: Any, shared: Any, base: Any) -> Any:
    """Return inputs, shared parameters and base of a slice, without places."""
    tables = [shared[0], *(given.scopes[0] for given in inputs)]
    plain = [{key: node.plain for key, node in table.items()} for table in tables]
    return plain, [given.model for given in inputs], base


def _check_layers(
    model: str, layers: int, node: Node, notes: list[str], tensors_of: TensorsOf
) -> None:
    """Refuse slices that leave layers out, which would make a smaller model."""
    if not is_there(to_path(model)):
        whole = f"the whole model, which has {layers} layers then"
        notes.append(f"slices: taken for {whole}; {model} is not here to count them")
        return
    counts = count_layers(tensors_of(to_path(model)))
    found = ", ".join(f"{count} in {stack}" for stack, count in counts.items()) or "none"
    text = f"slices end with layer {layers}, and {model} has {found}; take all of its layers"
    node.require(layers in counts.values(), text)


# ---------------------------------------------------------------- type, tokenizer, chat template


def _storage_type(node: Node) -> str:
    known = [kind.torch_name for kind in MODEL_TYPES]
    name = str(node.value).removeprefix("torch.")
    hint = did_you_mean(name, known)
    text = f"{node.value!r} is not a type of weights{hint}: {', '.join(known)}"
    node.require(name in known, text)
    return name


def _tokenizer(table: Table, models: Collection[str | None]) -> dict[str, str]:
    """Return the origin of the output's vocabulary or tokenizer: a policy, or one of the models."""
    source = table.get("tokenizer_source")
    if "tokenizer" in table:
        table["tokenizer"].require(source is None, "give either tokenizer or tokenizer_source")
        given = as_table(table["tokenizer"], ("source",), "the tokenizer")
        if "source" not in given:
            return {"vocabulary": "union"}
        source = given["source"]
    if source is None:
        return {}
    name, _ = _reference(source)
    if name in ("base", "union"):
        return {"vocabulary": name}
    text = f"{name}: the tokenizer must be that of a model that is merged, or of the base"
    source.require(name in models, text)
    return {"copy_from": name}


def _chat_template(table: Table) -> dict[str, str]:
    if "chat_template" not in table:
        return {}
    template = as_text(table["chat_template"], "chat_template")
    text = f"chat_template: {template}: is not known here; write the template itself"
    table["chat_template"].require(template == "auto" or "{" in template, text)
    return {"chat_template": template}
