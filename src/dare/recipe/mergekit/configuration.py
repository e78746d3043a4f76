"""The configuration, read from its nodes and checked: keys, models, slices, modules, tokenizer."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from dare.errors import did_you_mean
from dare.recipe.layers import count_layers
from dare.recipe.mergekit.nodes import Input, Node, Scope, Table, as_items, as_table, as_text
from dare.stores.locations import to_path
from dare.tensors.dtypes import MODEL_TYPES
from dare.tensors.files import is_there

TensorsOf = Callable[[Path], Iterable[str]]  # the names of a model's tensors

KNOWN = tomllib.loads(files("dare.recipe.mergekit").joinpath("mergekit.toml").read_text("utf-8"))
MODULES = {name: tuple(texts) for name, texts in KNOWN["modules"].items()}


@dataclass(frozen=True)
class Part:
    """Layers of the output, or all of it, with the inputs to merge."""

    node: Node
    method: str
    base: str | None
    inputs: tuple[Input, ...]
    shared: tuple[Scope, ...]  # parameters for all models, highest priority first

    def others(self) -> tuple[Input, ...]:
        """Return the inputs except the base."""
        return tuple(given for given in self.inputs if given.model != self.base)


@dataclass(frozen=True)
class Config:
    """A configuration whose keys are known."""

    name: str | None
    base: str | None
    parts: tuple[Part, ...]
    is_stack: bool  # True for a stack of layers; else the only part is the whole model
    computes_in: str | None
    # Keys of a recipe that no method changes: type, tokenizer and chat template.
    keys: Mapping[str, Any]


def read_config(root: Node, methods: Collection[str], tensors_of: TensorsOf) -> Config:
    """Read and check a configuration, whose method must be one of `methods`.

    `tensors_of` lists the tensors of a model.
    """
    is_mixture = isinstance(root.value, dict) and "experts" in root.value
    root.require(not is_mixture, f"is a mixture: dare moe {root.reading.file} --output OUT")
    table = as_table(
        root, KNOWN["keys"]["configuration"], "a configuration", required="merge_method"
    )
    method = as_text(table["merge_method"], "merge_method")
    hint = did_you_mean(method, methods)
    text = f"merge_method {method!r}: mergekit 0.1.5 has no such method{hint}; it has"
    table["merge_method"].require(method in methods, f"{text} {', '.join(methods)}")
    inputs = [key for key in ("models", "slices", "modules") if key in table]
    root.require(len(inputs) == 1, "give either models, slices or modules")

    base = _base(table)
    node, shared = table["merge_method"], _parameters(table, "the configuration")
    if "slices" in table:
        parts = _parts_of_slices(table["slices"], method, base, shared)
    elif "modules" in table:
        parts = _parts_of_modules(table["modules"], method, base, shared, tensors_of)
    else:
        items = as_items(table["models"], "models")
        models = tuple(_input(item, "a model", shared) for item in items)
        parts = (Part(node, method, base, _with_base(models, base, items[0], shared), shared),)
    for part in parts:
        for given in part.inputs:
            first = next(other for other in part.inputs if other.model == given.model)
            text = f"{given.model}: is already given on line {first.node.line}"
            given.node.require(given is first, text)
    types = {key: _storage_type(table[key]) for key in ("dtype", "out_dtype") if key in table}
    names = list(dict.fromkeys(given.model for part in parts for given in part.inputs))
    keys = _tokenizer(table, base or names[0], names)
    if "chat_template" in table:
        keys["chat_template"] = as_text(table["chat_template"], "chat_template")
    if keys.get("vocabulary", "base") != "base" or ("vocabulary" in keys and not base):
        keys["new_rows"] = "merge" if base else "merge_all"
    if stored := types.get("out_dtype", types.get("dtype")):
        keys["dtype"] = stored
    own_names = [as_text(table[key], key) for key in ("name", "out_path") if key in table]
    name = str(to_path(own_names[0])) if own_names else None
    is_stack = len(parts) > 1 or not _is_whole(parts[0], tensors_of)
    return Config(name, base, parts, is_stack, types.get("dtype"), keys)


def _parameters(
    table: Table, what: str, module: tuple[str, ...] | None = None
) -> tuple[Scope, ...]:
    node = table.get("parameters")
    if node is None:
        return () if module is None else (Scope({}, module),)
    known = as_table(
        node, KNOWN["keys"]["parameters"], f"the parameters of {what}", keeps_null=True
    )
    return (Scope(known, module),)


# ---------------------------------------------------------------- models


def _base(table: Table) -> str | None:
    return _reference(table["base_model"]) if "base_model" in table else None


def _reference(node: Node) -> str:
    """Return the path or name of a model; a model with an adapter becomes an inner merge."""
    if isinstance(node.value, dict):
        known = ("model", "lora", "override_architecture")
        table = as_table(node, known, "a model", required="model")
        model, adapters = _path(table["model"]), [_path(table["lora"])] if "lora" in table else []
    else:
        model, *adapters = as_text(node, "model").split("+")
    is_known = len(adapters) < 2 and all((model, *adapters))
    node.require(is_known, f"{node.value!r} is not MODEL or MODEL+ADAPTER")
    if not adapters:
        return model
    name = str(to_path(f"{model}+{adapters[0]}"))
    node.reading.merges[name] = {"base": model, "models": adapters, "method": "sum"}
    return name


def _path(node: Node) -> str:
    if not isinstance(node.value, dict):
        return as_text(node, "model")
    table = as_table(node, ("path", "revision"), "the path of a model", required="path")
    revision = table["revision"].value if "revision" in table else None
    path = as_text(table["path"], "path")
    return f"{path}@{revision}" if revision else path


def _input(item: Node, what: str, scopes: tuple[Scope, ...]) -> Input:
    """Read an entry of `models` or `sources`."""
    table = as_table(item, KNOWN["keys"][what], what, required="model")
    module = scopes[0].module if scopes else None
    own = _parameters(table, what, module)
    span = _span(table.get("layer_range", item)) if what == "a source" else None
    return Input(_reference(table["model"]), item, (*own, *scopes), span)


def _with_base(
    inputs: tuple[Input, ...], base: str | None, node: Node, shared: tuple[Scope, ...]
) -> tuple[Input, ...]:
    """Append the base if it is not among the models."""
    if base is None or base in [given.model for given in inputs]:
        return inputs
    return (*inputs, Input(base, node, shared))


# ---------------------------------------------------------------- slices and modules


def _parts_of_slices(
    node: Node, method: str, base: str | None, shared: tuple[Scope, ...]
) -> tuple[Part, ...]:
    known = ("sources", "parameters", "base_model")
    parts = []
    for item in as_items(node, "slices"):
        table = as_table(item, known, "a slice", required="sources")
        scopes = (*_parameters(table, "a slice", shared[0].module if shared else None), *shared)
        items = as_items(table["sources"], "sources")
        inputs = tuple(_input(source, "a source", scopes) for source in items)
        lengths = {given.span[1] - given.span[0] for given in inputs if given.span}
        item.require(len(lengths) == 1, "layer_range: the models' ranges have different lengths")
        parts.append(Part(item, method, _base(table) or base, inputs, scopes))
    return tuple(parts)


def _span(node: Node) -> tuple[int, int]:
    ends = node.plain
    if not isinstance(ends, list) or [type(end) for end in ends] != [int, int]:
        raise node.refuse("layer_range: must be two whole numbers, as in [0, 32]")
    # A module may have no layers.
    node.require(0 <= ends[0] < ends[1] or ends == [0, 0], f"layer_range: {ends} holds no layers")
    return ends[0], ends[1]


def _is_whole(part: Part, tensors_of: TensorsOf, module: tuple[str, ...] | None = None) -> bool:
    """Tell if a part has all layers of its models, or of a module, as far as is known."""
    spans = {given.span for given in part.inputs if given.span}
    model = to_path(part.base or part.inputs[0].model)
    if len(spans) == 1 and is_there(model):
        texts = module or [text for known in MODULES.values() for text in known]
        inside = [n for n in tensors_of(model) if any(t in n for t in texts) == bool(module)]
        counts = count_layers(tensors_of(model) if module is None else inside).values()
        return spans <= {(0, count) for count in [*counts] or [0]}
    return not spans


def _parts_of_modules(
    node: Node, method: str, base: str | None, shared: tuple[Scope, ...], tensors_of: TensorsOf
) -> tuple[Part, ...]:
    """Read modules: parts of a model with their own parameters, and the same models."""
    node.require(isinstance(node.value, dict) and node.value, "modules: must be a table of modules")
    modules = []
    rank = [*MODULES]
    for name in sorted(node.value, key=lambda n: rank.index(n) if n in MODULES else -1):
        module = MODULES.get(name, (name,)) if len(node.value) > 1 else None
        table = as_table(node.value[name], ("models", "slices", "parameters"), "a module")
        scopes = (*_parameters(table, "a module", module), *shared)
        if "slices" in table:
            parts = _parts_of_slices(table["slices"], method, base, scopes)
            if module is None:
                return parts
            is_whole = len(parts) == 1 and _is_whole(parts[0], tensors_of, module)
            text = "slices: only the layers of a model with one module can be stacked"
            table["slices"].require(is_whole and parts[0].base == base, f"{text}; give all of them")
            modules.append((parts[0].node, [*parts[0].inputs], parts[0].shared))
            continue
        items = as_items(table.get("models", node.value[name]), "models")
        modules.append((items[0], [_input(item, "a model", scopes) for item in items], scopes))
    first, inputs, _ = modules[0]
    names = [given.model for given in inputs]
    for item, others, _ in modules[1:]:
        same = [given.model for given in others] == names
        item.require(same, "modules: each must have the same models, in the same order")
    scopes = _joined([of_module for *_, of_module in modules])
    merged = tuple(
        Input(given.model, given.node, _joined([others[number].scopes for _, others, _ in modules]))
        for number, given in enumerate(inputs)
    )
    return (Part(first, method, base, _with_base(merged, base, first, scopes), scopes),)


def _joined(modules: Sequence[tuple[Scope, ...]]) -> tuple[Scope, ...]:
    """Return the scopes of all modules; those of the whole model, which they share, come last."""
    of_modules = [scope for scopes in modules for scope in scopes if scope.module is not None]
    return (*of_modules, *(scope for scope in modules[0] if scope.module is None))


# ---------------------------------------------------------------- type, tokenizer, chat template


def _storage_type(node: Node) -> str:
    known = [kind.torch_name for kind in MODEL_TYPES]
    name = str(node.value).removeprefix("torch.")
    hint = did_you_mean(name, known)
    text = f"{node.value!r} is not a type of weights{hint}: {', '.join(known)}"
    node.require(name in known, text)
    return name


def _tokenizer(table: Table, base: str, models: list[str]) -> dict[str, Any]:
    """Return keys for the output's tokens: a policy or one of the models, and single rows."""
    source = table.get("tokenizer_source")
    if "tokenizer" not in table:
        return {} if source is None else _vocabulary(source, base, models)
    table["tokenizer"].require(source is None, "give either tokenizer or tokenizer_source")
    known = ("source", "tokens", "pad_to_multiple_of")
    given = as_table(table["tokenizer"], known, "the tokenizer")
    keys: dict[str, Any] = {"vocabulary": "union"}
    if "source" in given:
        keys = _vocabulary(given["source"], base, models)
    if "pad_to_multiple_of" in given:
        keys["pad_to_multiple_of"] = given["pad_to_multiple_of"].value
    tokens = given["tokens"].value if "tokens" in given else {}
    given.get("tokens", table["tokenizer"]).require(
        isinstance(tokens, dict), "tokens: must be a table of tokens"
    )
    rows = {token: _token(node, base, models) for token, node in tokens.items()}
    return keys | ({"tokens": rows} if rows else {})


def _vocabulary(node: Node, base: str, models: list[str]) -> dict[str, Any]:
    is_policy = node.value in ("base", "union")
    return {"vocabulary": node.value if is_policy else _origin(node, base, models)}


def _origin(node: Node, base: str, models: list[str]) -> str:
    """Return the file of a model that is merged, or `base`."""
    model = _reference(node)
    text = f"{model}: is not one of the merged models; use one of them, base or union"
    node.require(model in models or model == base, text)
    return "base" if model == base else model


def _token(node: Node, base: str, models: list[str]) -> Any:
    """Return the source of a token's row."""
    table = as_table(node, ("source", "force"), "a token", required="source")
    source = table["source"]
    force = {"force": True} if "force" in table and table["force"].value else {}
    kind = source.plain.get("kind") if isinstance(source.plain, dict) else None
    if kind == "zero":
        return {"zero": True, **force}
    row = {"model": source}
    if kind is not None:
        known = ("kind", "model", "token", "token_id")
        row = dict(as_table(source, known, "the source of a token", required="model"))
    keys = {"token": "token", "token_id": "id"}
    more = {keys[key]: row[key].value for key in keys if key in row}
    return {"model": _origin(row["model"], base, models), **more, **force}
