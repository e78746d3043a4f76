"""From a mergekit configuration (YAML) to a recipe.

What is converted gives what mergekit gives, but for the differences that the conversion names.
What has no equal here is refused, with the file, the line and what to do about it. What mergekit
ignores without a word is ignored too, and noted; a key that mergekit does not know is refused.

The rules are mergekit's: a model's parameters come before those of its slice, those before the
ones of the whole configuration. A filter matches where its text stands in a tensor's name, and the
first that matches counts. A list of numbers runs over the layers (`dare.gradients`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from os import PathLike
from pathlib import Path
from typing import Any

from dare.errors import InputError, RecipeError, did_you_mean
from dare.gradients import Gradient, count_layers
from dare.recipe import ModelEntry, Recipe, recipe_from_document
from dare.stages import STAGES

Number = float | Gradient
"""A number, or one for each part of the layers."""


@dataclass(frozen=True)
class Conversion:
    """A recipe that was a mergekit configuration, and what is to be known about it."""

    source: Path
    recipe: Recipe
    differences: tuple[str, ...]
    """Every known reason for which the weights will not be mergekit's."""
    notes: tuple[str, ...]
    """What was left out because it changes nothing, and what could not be checked."""

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain values, ready for JSON."""
        return {
            "recipe": self.recipe.to_document(),
            "differences": list(self.differences),
            "notes": list(self.notes),
        }

    def to_toml(self) -> str:
        """The recipe as TOML, with the differences and notes as comments."""
        lines = [f"# Converted from {self.source.name}, a configuration for mergekit."]
        for head, texts in (("Different there:", self.differences), ("Notes:", self.notes)):
            lines += ["#", f"# {head}", *(f"# - {text}" for text in texts)] if texts else []
        return "\n".join(lines) + "\n\n" + self.recipe.to_toml()


def recipe_from_yaml(path: str | PathLike[str]) -> Recipe:
    """Read a mergekit configuration as a recipe, which has no output yet."""
    return convert_yaml(path).recipe


def convert_yaml(path: str | PathLike[str]) -> Conversion:
    """Read a mergekit configuration as a recipe, and say how the two differ."""
    file = Path(path)
    config = _read_config(_read_yaml(file), file)
    draft = _Draft(config)
    _METHODS[config.method].convert(config, draft)
    _note_useless(config, draft)
    _note_arithmetic(config, draft)
    return Conversion(
        file,
        recipe_from_document(draft.document() | _tokenizer(config), str(file)),
        tuple(draft.differences),
        (*config.notes, *draft.notes),
    )


def _tokenizer(config: _Config) -> dict[str, str]:
    """The keys of a recipe for tokenizer and chat template."""
    keys = {}
    if config.tokenizer_source in ("base", "union"):
        keys["vocabulary"] = config.tokenizer_source
    elif config.tokenizer_source is not None:
        keys["copy_from"] = ModelEntry(file=config.tokenizer_source).name
    if config.chat_template is not None:
        keys["chat_template"] = config.chat_template
    return keys


# ---------------------------------------------------------------- YAML with line numbers


@dataclass(frozen=True)
class _Node:
    """A value of the YAML file, and where it stands."""

    value: Any
    """A scalar, a tuple of nodes, or a dict of nodes."""
    file: Path
    line: int

    def refuse(self, text: str) -> RecipeError:
        return RecipeError(f"{self.file}, line {self.line}: {text}")

    @property
    def plain(self) -> Any:
        """The value without places."""
        if isinstance(self.value, dict):
            return {key: node.plain for key, node in self.value.items()}
        if isinstance(self.value, tuple):
            return [node.plain for node in self.value]
        return self.value


def _read_yaml(file: Path) -> _Node:
    import yaml  # type: ignore[import-untyped]

    try:
        text = file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{file}: cannot read the configuration: {error}") from None
    try:
        loader = yaml.SafeLoader(text)
        root = loader.get_single_node()
        if root is None:
            raise RecipeError(f"{file}: is empty")
        return _from_yaml(root, loader, file, {})
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        if isinstance(error, RecipeError):
            raise
        mark = getattr(error, "problem_mark", None)
        where = f"{file}, line {mark.line + 1}" if mark else str(file)
        reason = getattr(error, "problem", None) or error
        raise RecipeError(f"{where}: not valid YAML: {reason}") from None


def _from_yaml(node: Any, loader: Any, file: Path, seen: dict[int, _Node | None]) -> _Node:
    """Turn a node of PyYAML into ours; `seen` holds those that an alias may stand for."""
    if id(node) in seen:
        known = seen[id(node)]
        if known is None:
            raise RecipeError(f"{file}, line {node.start_mark.line + 1}: contains itself")
        return known
    seen[id(node)] = None
    value: Any
    if node.id == "mapping":
        _check_keys(node, file)
        loader.flatten_mapping(node)  # what << brings in, which own keys come after
        value = {str(key.value): _from_yaml(child, loader, file, seen) for key, child in node.value}
    elif node.id == "sequence":
        value = tuple(_from_yaml(child, loader, file, seen) for child in node.value)
    else:
        value = loader.construct_object(node)
    seen[id(node)] = _Node(value, file, node.start_mark.line + 1)
    return _Node(value, file, node.start_mark.line + 1)


def _check_keys(node: Any, file: Path) -> None:
    lines: dict[str, int] = {}
    for key, _ in node.value:
        line = key.start_mark.line + 1
        if key.id != "scalar":
            raise RecipeError(f"{file}, line {line}: a key must be a word")
        if key.value in lines:
            raise RecipeError(
                f"{file}, line {line}: {key.value} stands on line {lines[key.value]} already"
            )
        lines[key.value] = line


# ---------------------------------------------------------------- the configuration

Table = Mapping[str, _Node]


@dataclass(frozen=True)
class _Input:
    """A model that is merged, and its parameters from the strongest scope to the weakest."""

    model: str
    node: _Node
    scopes: tuple[Table, ...]


@dataclass(frozen=True)
class _Config:
    """A configuration whose keys are known."""

    file: Path
    method: str
    method_node: _Node
    base: str | None
    inputs: tuple[_Input, ...]
    shared: tuple[Table, ...]
    """Where parameters that are no model's own are looked for, strongest first."""
    dtype: _Node | None
    out_dtype: _Node | None
    tokenizer_source: str | None
    chat_template: str | None
    notes: tuple[str, ...]

    def others(self) -> tuple[_Input, ...]:
        """The inputs but the base."""
        return tuple(given for given in self.inputs if given.model != self.base)


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
ELSEWHERE = {
    "random_seed": "is a flag of mergekit, which ignores it here: delete the line and set seed",
    "name": "means nothing to mergekit: delete the line",
}
"""Keys that are often seen, and that nothing reads."""


def _table(node: _Node, known: Iterable[str], what: str) -> Table:
    if not isinstance(node.value, dict):
        raise node.refuse(f"{what}: must be a table of keys and values")
    for key, child in node.value.items():
        if key in ELSEWHERE and key not in known:
            raise child.refuse(f"{key}: {ELSEWHERE[key]}")
        if key not in known:
            raise child.refuse(
                f"{key}: not known in {what}{did_you_mean(key, known)}; mergekit ignores it "
                "without a word: correct it or delete the line"
            )
    return dict(node.value)


def _parameters(table: Table, what: str) -> Table:
    node = table.get("parameters")
    if node is None or node.value is None:
        return {}
    return _table(node, PARAMETERS, f"the parameters of {what}")


def _items(node: _Node, what: str) -> tuple[_Node, ...]:
    if not isinstance(node.value, tuple) or not node.value:
        raise node.refuse(f"{what}: must be a list with at least one entry")
    return node.value


def _text(node: _Node, what: str) -> str:
    if not isinstance(node.value, str):
        raise node.refuse(f"{what}: must be text, and is {node.plain!r}")
    return node.value


def _read_config(root: _Node, file: Path) -> _Config:
    table = {
        key: node
        for key, node in _table(root, TOP_KEYS, "a configuration").items()
        if node.value is not None
    }
    if "merge_method" not in table:
        raise root.refuse("merge_method is missing")
    method = _text(table["merge_method"], "merge_method")
    if method not in _METHODS:
        raise table["merge_method"].refuse(
            f"merge_method {method!r} cannot be converted{did_you_mean(method, _METHODS)}; "
            f"these can: {', '.join(_METHODS)}"
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
        inputs, between, base = _inputs_of_slices(table["slices"], base, whole, notes)
        shared = (between, whole)
    _check_distinct(inputs)
    return _Config(
        file,
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


def _base(table: Table) -> str | None:
    if "base_model" not in table:
        return None
    node = table["base_model"]
    model, lora = _reference(node)
    if lora is not None:
        raise node.refuse("base_model: an adapter cannot be part of the base; merge it first")
    return model


def _reference(node: _Node) -> tuple[str, str | None]:
    """The path or name of a model, and of the adapter that mergekit would put on it."""
    if isinstance(node.value, dict):
        table = _table(node, ("model", "lora", "override_architecture"), "a model")
        if "model" not in table:
            raise node.refuse("model is missing")
        lora = table.get("lora")
        adapter = None if lora is None or lora.value is None else _path(lora)
        return _path(table["model"]), adapter
    words = _text(node, "model").split("+")
    if len(words) > 2:
        raise node.refuse(f"{node.value!r} is not MODEL or MODEL+ADAPTER")
    return words[0], words[1] if len(words) == 2 else None


def _path(node: _Node) -> str:
    if not isinstance(node.value, dict):
        return _text(node, "model")
    table = _table(node, ("path", "revision"), "the path of a model")
    if "path" not in table:
        raise node.refuse("path is missing")
    revision = table.get("revision")
    path = _text(table["path"], "path")
    return f"{path}@{revision.value}" if revision and revision.value else path


def _file_of(node: _Node, base: str | None, notes: list[str]) -> str:
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
    node: _Node, base: str | None, whole: Table, notes: list[str]
) -> tuple[_Input, ...]:
    inputs = []
    for item in _items(node, "models"):
        table = _table(item, ("model", "parameters"), "a model")
        if "model" not in table:
            raise item.refuse("model is missing")
        name = _file_of(table["model"], base, notes)
        inputs.append(_Input(name, item, (_parameters(table, "a model"), whole)))
    if base is not None and base not in [given.model for given in inputs]:
        inputs.append(_Input(base, node, (whole,)))
    return tuple(inputs)


def _inputs_of_slices(
    node: _Node, base: str | None, whole: Table, notes: list[str]
) -> tuple[tuple[_Input, ...], Table, str | None]:
    """The inputs of slices that together are the whole model, and what they share."""
    known = ("sources", "parameters", "base_model", "residual_weight")
    start, found = 0, []
    for item in _items(node, "slices"):
        table = _table(item, known, "a slice")
        if "residual_weight" in table and table["residual_weight"].value is not None:
            raise table["residual_weight"].refuse("residual_weight: cannot be converted")
        if "sources" not in table:
            raise item.refuse("sources is missing")
        own_base = _base(table) or base
        between = _parameters(table, "a slice")
        sources = _items(table["sources"], "sources")
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
    if len(found) > 1 and any(map(_has_gradient, (whole, between, *(i.scopes[0] for i in inputs)))):
        raise node.refuse(
            "lists of values run over each slice anew, which cannot be converted; write one slice"
        )
    _check_layers(own_base or inputs[0].model, start, node, notes)
    return inputs, between, own_base


def _span(source: _Node) -> tuple[int, int]:
    table = _table(source, ("model", "layer_range", "parameters"), "a source")
    node = table.get("layer_range", source)
    ends = node.plain if node is not source else None
    if not isinstance(ends, list) or len(ends) != 2 or not all(type(end) is int for end in ends):
        raise node.refuse("layer_range: must be two whole numbers, as in [0, 32]")
    if ends[0] >= ends[1]:
        raise node.refuse(f"layer_range: {ends} holds no layers")
    return ends[0], ends[1]


def _input_of_source(
    source: _Node, base: str | None, between: Table, whole: Table, notes: list[str]
) -> _Input:
    table = _table(source, ("model", "layer_range", "parameters"), "a source")
    if "model" not in table:
        raise source.refuse("model is missing")
    own = _parameters(table, "a source")
    return _Input(_file_of(table["model"], base, notes), source, (own, between, whole))


def _comparable(described: Sequence[Any]) -> Any:
    """Inputs, shared parameters and base of a slice, without places."""
    inputs, between, base = described
    own = [(given.model, {k: v.plain for k, v in given.scopes[0].items()}) for given in inputs]
    return own, {key: node.plain for key, node in between.items()}, base


def _has_gradient(table: Table) -> bool:
    return any(
        isinstance(case.value, list) for key, node in table.items() for case in _cases(key, node)
    )


def _check_layers(model: str, layers: int, node: _Node, notes: list[str]) -> None:
    """Slices that leave layers out would make a smaller model."""
    from dare.formats import open_model

    if not Path(model).exists():
        notes.append(
            f"slices: taken for the whole model, which has {layers} layers then; {model} is not "
            "here to count them"
        )
        return
    counts = count_layers(open_model(Path(model)).tensors)
    if layers not in counts.values():
        found = ", ".join(f"{count} in {stack}" for stack, count in counts.items()) or "none"
        raise node.refuse(
            f"slices end with layer {layers}, and {model} has {found}; a model of fewer or more "
            "layers cannot be made here"
        )


def _check_distinct(inputs: Sequence[_Input]) -> None:
    seen: dict[str, int] = {}
    for given in inputs:
        if given.model in seen:
            line = seen[given.model]
            raise given.node.refuse(f"{given.model}: is given on line {line} already")
        seen[given.model] = given.node.line


def _tokenizer_source(table: Table) -> str | None:
    if "tokenizer" in table and "tokenizer_source" in table:
        raise table["tokenizer"].refuse("give either tokenizer or tokenizer_source")
    if "tokenizer_source" in table:
        return _reference(table["tokenizer_source"])[0]
    if "tokenizer" not in table:
        return None
    given = _table(table["tokenizer"], ("source", "tokens", "pad_to_multiple_of"), "the tokenizer")
    for key in ("tokens", "pad_to_multiple_of"):
        if key in given and given[key].value is not None:
            raise given[key].refuse(f"{key}: embeddings of single tokens cannot be chosen here")
    source = given.get("source")
    return "union" if source is None else _reference(source)[0]


def _chat_template(table: Table) -> str | None:
    if "chat_template" not in table:
        return None
    template = _text(table["chat_template"], "chat_template")
    if template != "auto" and "{" not in template:
        raise table["chat_template"].refuse(
            f"chat_template: {template}: mergekit's built-in templates are not known here; "
            "write the template itself"
        )
    return template


# ---------------------------------------------------------------- parameters


@dataclass(frozen=True)
class _Case:
    """A value for the tensors whose names contain a text; None: for all."""

    contains: str | None
    value: Any
    node: _Node = field(compare=False)


Cases = tuple[_Case, ...]
"""What a parameter is, the first that matches; the last one is for all tensors."""


def _cases(name: str, node: _Node) -> Cases:
    """A parameter's value as mergekit reads it."""
    if isinstance(node.value, dict):
        return (_conditional(name, node),)
    if not isinstance(node.value, tuple):
        return (_Case(None, node.value, node),)
    if not node.value:
        return ()
    if all(isinstance(item.value, dict) for item in node.value):
        return tuple(_conditional(name, item) for item in node.value)
    return (_Case(None, _scalars(name, node), node),)


def _conditional(name: str, node: _Node) -> _Case:
    table = _table(node, ("filter", "value"), f"a value of {name}")
    if "value" not in table:
        raise node.refuse(f"{name}: value is missing")
    given = table["value"]
    value = _scalars(name, given) if isinstance(given.value, tuple) else given.value
    if isinstance(value, dict) or value == []:
        raise given.refuse(f"{name}: a value must be a number or a list of numbers")
    text = table["filter"].value if "filter" in table else None
    return _Case(None if text in (None, "*", "") else str(text), value, given)


def _scalars(name: str, node: _Node) -> list[Any]:
    for item in node.value:
        if isinstance(item.value, dict | tuple):
            raise item.refuse(f"{name}: must be numbers alone, or filters with values alone")
    return [item.value for item in node.value]


def _resolve(name: str, scopes: Sequence[Table]) -> Cases:
    """The cases of all scopes, up to the first that is for all tensors."""
    found: list[_Case] = []
    for scope in scopes:
        for case in _cases(name, scope[name]) if name in scope else ():
            found.append(case)
            if case.contains is None:
                return tuple(found)
    return tuple(found)


def _numbers(name: str, given: _Input, default: float | None = None) -> Cases:
    """A model's number in every case; an error if there is a tensor without one."""
    cases = _resolve(name, given.scopes)
    if not cases or cases[-1].contains is not None:
        if default is None:
            lacking = "tensors that no filter matches" if cases else given.model
            raise given.node.refuse(f"{name} is missing for {lacking}; mergekit has no default")
        cases = (*cases, _Case(None, default, given.node))
    return _as_numbers(name, cases)


def _as_numbers(name: str, cases: Cases) -> Cases:
    return tuple(_Case(c.contains, _as_number(name, c.value, c.node), c.node) for c in cases)


def _as_number(name: str, value: Any, node: _Node) -> Number:
    if isinstance(value, list):
        return [_one_number(name, item, node) for item in value]
    return _one_number(name, value, node)


def _one_number(name: str, value: Any, node: _Node) -> float:
    """A finite number; 1e-3 is text in YAML, and a number to mergekit."""
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise node.refuse(f"{name}: must be a number, and is {value!r}")
    return number


def _for_all(name: str, config: _Config) -> _Case | None:
    """A parameter of the whole merge that must be the same for all tensors."""
    cases = _resolve(name, config.shared)
    for case in cases:
        if case.contains is not None or isinstance(case.value, list):
            raise case.node.refuse(f"{name}: must be one value for all tensors to be converted")
    return cases[0] if cases else None


def _number_for_all(name: str, config: _Config, default: float) -> float:
    case = _for_all(name, config)
    return default if case is None else _one_number(name, case.value, case.node)


def _flag(name: str, config: _Config, default: bool) -> bool:
    case = _for_all(name, config)
    if case is None:
        return default
    value = {"true": True, "false": False}.get(str(case.value).lower(), case.value)
    if value not in (True, False):
        raise case.node.refuse(f"{name}: must be true or false, and is {case.value!r}")
    return bool(value)


def _each(change: Callable[[float], float], value: Number) -> Number:
    return [change(number) for number in value] if isinstance(value, list) else change(value)


def _values(cases: Cases) -> list[float]:
    return [n for c in cases for n in (c.value if isinstance(c.value, list) else [c.value])]


# ---------------------------------------------------------------- the recipe


class _Draft:
    """The tables of a recipe, being filled in."""

    def __init__(self, config: _Config) -> None:
        self._config = config
        self._document: dict[str, Any] = {}
        self._rules: list[dict[str, Any]] = []
        self._models: list[dict[str, Any]] = []
        self._base = ""
        self.differences: list[str] = []
        self.notes: list[str] = []
        for key in (config.out_dtype, config.dtype):
            if key is not None:
                self._document["dtype"] = _storage_type(key)
                break

    def merge(self, method: str, base: str, models: Sequence[str]) -> None:
        """Say what is merged, and by which method."""
        self._document["method"] = method
        self._base = base
        self._models = [{"file": model} for model in models]

    def scale(self, factor: float) -> None:
        """Say what the merged delta is multiplied by."""
        if factor != 1:
            self._document["scale"] = factor

    def set_stage(self, stage: str, parameter: str, value: Any) -> None:
        """Set a parameter of a stage."""
        self._document.setdefault(stage, {})[parameter] = value

    def set_cases(self, stage: str, parameter: str, cases: Cases) -> None:
        """Set a parameter that all models share."""
        for case in cases:
            _check_range(stage, parameter, case)
        self.set_stage(stage, parameter, cases[-1].value)
        self._add_rules(parameter, cases)

    def set_for_models(self, stage: str | None, parameter: str, found: Sequence[Cases]) -> None:
        """Set a parameter of each model; a stage's own table will do if all are the same."""
        if stage is not None and all(cases == found[0] for cases in found):
            self.set_cases(stage, parameter, found[0])
            return
        for entry, cases in zip(self._models, found, strict=True):
            for case in cases:
                if stage is not None:
                    _check_range(stage, parameter, case)
            entry[parameter] = cases[-1].value
            self._add_rules(parameter, cases, entry["file"])

    def _add_rules(self, parameter: str, cases: Cases, model: str | None = None) -> None:
        """The first case that matches counts there, the last rule here."""
        whose = {} if model is None else {"model": model}
        for case in reversed(cases[:-1]):
            self._rules.append({"contains": case.contains, **whose, parameter: case.value})

    def document(self) -> dict[str, Any]:
        """The recipe's tables."""
        models = [entry if len(entry) > 1 else entry["file"] for entry in self._models]
        files = {"base_file": self._base, "merge_files": models}
        rules = {"tensors": self._rules} if self._rules else {}
        return {**self._document, "models": files, **rules}


def _check_range(stage: str, parameter: str, case: _Case) -> None:
    where = f"{case.node.file}, line {case.node.line}: "
    STAGES[stage].parameters[parameter].check(case.value, where)


def _storage_type(node: _Node) -> str:
    known = ("float32", "float16", "bfloat16", "float64")
    name = str(node.value).removeprefix("torch.")
    if name not in known:
        hint = did_you_mean(name, known)
        raise node.refuse(f"{node.value!r} is no type of weights{hint}: {', '.join(known)}")
    return name


# ---------------------------------------------------------------- methods

NEW_MASKS = (
    "other elements are dropped, at the same rate: masks here are a function of seed, name and "
    "index, and mergekit's come from a stream"
)
TINY_NORM = "mergekit does not rescale a delta whose L1 norm is below 1e-7"
ELECTION = (
    "where the models' changes cancel exactly nothing is elected; mergekit keeps the positive ones"
)
CUT = "of equal magnitudes at the cut those with the lowest index are kept; mergekit leaves it open"
ROUNDED_SHARES = "weights are divided by their sum before they are used, mergekit's result after"


def _required_base(config: _Config) -> str:
    if config.base is None:
        raise config.method_node.refuse(f"base_model is missing; {config.method} needs one")
    return config.base


def _convert_deltas(config: _Config, draft: _Draft) -> None:
    """task_arithmetic, dare_linear, ties and dare_ties: change each delta, combine, scale."""
    base, models = _required_base(config), config.others()
    if not models:
        raise config.method_node.refuse("only the base is given: there is nothing to merge into it")
    drops, elects = config.method.startswith("dare"), config.method.endswith("ties")
    trims = config.method == "ties"
    weights = [_numbers("weight", given) for given in models]
    normalize = _flag("normalize", config, default=trims)
    if elects:
        if normalize:
            _check_positive(weights, config)
        else:
            draft.set_stage("ties", "divide_by", "nothing")
        draft.differences.append(ELECTION)
    elif normalize:
        weights = _shares(weights, config, draft)

    combine = "ties" if elects else "sum"
    stages = ["dare"] * drops + [combine]
    draft.merge("+".join(stages), base, [given.model for given in models])
    draft.scale(_number_for_all("lambda", config, 1.0))
    draft.set_for_models(None, "weight", weights)
    densities = [_densities(given, config) for given in models]
    if drops:
        _set_drop_rates(densities, config, draft)
    elif trims:
        _set_keep_ratios(densities, config, draft)


def _check_positive(weights: Sequence[Cases], config: _Config) -> None:
    for cases in weights:
        for case in cases:
            if any(number < 0 for number in _values((case,))):
                raise case.node.refuse(
                    f"weight: is negative, and {config.method} divides by the sum of weights with "
                    "their signs, so that the minus cancels; take the model's sign out of it"
                )


def _densities(given: _Input, config: _Config) -> Cases:
    cases = _numbers("density", given, default=1.0)
    for case in cases:
        for number in _values((case,)):
            if not 0 < number <= 1:
                raise case.node.refuse(
                    f"density = {number:g}: must be above 0 and no more than 1 in {config.method}; "
                    "to leave a model out, take it off the list or give it the weight 0"
                )
    return cases


def _set_drop_rates(densities: Sequence[Cases], config: _Config, draft: _Draft) -> None:
    rates = [
        tuple(_Case(c.contains, _each(_one_minus, c.value), c.node) for c in cases)
        for cases in densities
    ]
    draft.set_for_models("dare", "drop_rate", rates)
    rescale = _flag("rescale", config, default=True)
    draft.set_stage("dare", "rescale", "l1" if rescale else False)
    if any(rate > 0 for cases in rates for rate in _values(cases)):
        draft.differences.append(NEW_MASKS)
        draft.differences += [TINY_NORM] * rescale


def _one_minus(density: float) -> float:
    """1 - density in decimals, as people write both."""
    return float(1 - Decimal(repr(density)))


def _set_keep_ratios(densities: Sequence[Cases], config: _Config, draft: _Draft) -> None:
    trims = any(density < 1 for cases in densities for density in _values(cases))
    if trims and _flag("rescale", config, default=False):
        case = _for_all("rescale", config)
        assert case is not None  # it is not at its default
        raise case.node.refuse("rescale: what trimming leaves cannot be rescaled here; delete it")
    if trims:
        draft.set_for_models("ties", "keep_ratio", densities)
    draft.differences += [CUT] * trims


def _by_filter(weights: Sequence[Cases]) -> list[list[_Case]]:
    """For each filter, every model's case; refused if models have filters of their own."""
    filters: tuple[str | None, ...] = (None,)
    for cases in weights:
        own = tuple(case.contains for case in cases)
        if own != (None,) and filters not in ((None,), own):
            raise cases[0].node.refuse(
                "weight: to divide by the sum of weights the filters must be the same for every "
                "model, in the same order"
            )
        filters = filters if own == (None,) else own
    return [
        [_Case(text, case.value, case.node) for case in (c[min(row, len(c) - 1)] for c in weights)]
        for row, text in enumerate(filters)
    ]


def _shares(weights: Sequence[Cases], config: _Config, draft: _Draft) -> list[Cases]:
    """Weights divided by their sum, which must not change from layer to layer."""
    rows = [_divided(row, config, draft) for row in _by_filter(weights)]
    return [tuple(row[model] for row in rows) for model in range(len(weights))]


def _divided(row: Sequence[_Case], config: _Config, draft: _Draft) -> list[_Case]:
    total = _constant_total(row)
    if abs(total) < 1e-6 and config.method in ("linear", "nuslerp"):
        raise row[0].node.refuse("weight: the weights add up to 0")
    if abs(total) < 1e-8 or math.isclose(total, 1, rel_tol=1e-12):
        return list(row)  # which mergekit does not divide by
    if ROUNDED_SHARES not in draft.differences:
        draft.differences.append(ROUNDED_SHARES)
    return [_Case(c.contains, _each(lambda w: w / total, c.value), c.node) for c in row]


def _constant_total(row: Sequence[_Case]) -> float:
    lengths = {len(case.value) for case in row if isinstance(case.value, list)}
    steps = max(lengths, default=1)
    columns = [
        math.fsum(c.value[step] if isinstance(c.value, list) else c.value for c in row)
        for step in range(steps)
    ]
    fits = len(lengths) < 2 and all(
        math.isclose(column, columns[0], rel_tol=1e-12, abs_tol=1e-12) for column in columns
    )
    if not fits:
        raise next(case for case in row if isinstance(case.value, list)).node.refuse(
            "weight: the sum of the models' weights changes from layer to layer, and to divide "
            "by that cannot be converted; let the weights add up to the same number in every layer"
        )
    return columns[0]


def _convert_linear(config: _Config, draft: _Draft) -> None:
    """A mean of weights is a base and a mean of changes to it, if the shares add up to 1."""
    names = [given.model for given in config.inputs]
    base = config.base if config.base in names else names[0]
    if len(config.inputs) < 2:
        raise config.method_node.refuse("a mean needs two models; one is given")
    weights = [_numbers("weight", given) for given in config.inputs]
    if _flag("normalize", config, default=True):
        weights = _shares(weights, config, draft)
    for cases in _by_filter(weights):
        if not math.isclose(_constant_total(cases), 1, rel_tol=1e-9):
            raise cases[0].node.refuse(
                "weight: without normalize the weights must add up to 1, or the base would be "
                "scaled, which cannot be converted"
            )
    others = [
        (given.model, cases)
        for given, cases in zip(config.inputs, weights, strict=True)
        if given.model != base
    ]
    draft.merge("linear", base, [model for model, _ in others])
    draft.set_for_models(None, "weight", [cases for _, cases in others])
    draft.differences.append(
        f"{base} is the base and the others' changes to it are averaged, which is the same mean "
        "but for rounding"
    )


def _convert_slerp(config: _Config, draft: _Draft) -> None:
    base, others = _required_base(config), config.others()
    if len(others) != 1:
        raise config.method_node.refuse(
            f"slerp goes from the base to one other model, and {len(others)} are given"
        )
    cases = _resolve("t", config.shared)
    if not cases or cases[-1].contains is not None:
        raise config.method_node.refuse("t is missing for some tensors; mergekit has no default")
    draft.merge("slerp", base, [base, others[0].model])
    draft.set_cases("slerp", "t", _as_numbers("t", cases))
    draft.differences.append(
        "the angle to a tensor of zeros counts as zero, so that interpolation is straight; "
        "mergekit takes a right angle"
    )


def _convert_nuslerp(config: _Config, draft: _Draft) -> None:
    others = config.others()
    if len(others) != 2:
        raise config.method_node.refuse(
            f"nuslerp merges two models beside the base, and {len(others)} are given"
        )
    if not _flag("nuslerp_flatten", config, default=True):
        case = _for_all("nuslerp_flatten", config)
        assert case is not None  # it is not at its default
        raise case.node.refuse("nuslerp_flatten: false: tensors are taken as a whole here")
    weights = [_numbers("weight", given) for given in others]
    second = _shares(weights, config, draft)[1]
    base = others[0].model if config.base is None else config.base
    draft.merge("slerp", base, [given.model for given in others])
    draft.set_cases("slerp", "t", second)
    draft.set_stage("slerp", "on", "weights" if config.base is None else "deltas")
    draft.differences.append(
        "tensors whose cosine is beyond ±0.9995, or that are zero, are interpolated straight; "
        "mergekit does that only where they are parallel, and takes a right angle for zeros"
    )


@dataclass(frozen=True)
class _Method:
    """How a method is converted, and the parameters that mean something to it."""

    convert: Callable[[_Config, _Draft], None]
    of_models: tuple[str, ...]
    of_all: tuple[str, ...]


_METHODS = {
    "linear": _Method(_convert_linear, ("weight",), ("normalize",)),
    "task_arithmetic": _Method(_convert_deltas, ("weight",), ("normalize", "lambda")),
    "ties": _Method(_convert_deltas, ("weight", "density"), ("normalize", "lambda", "rescale")),
    "dare_linear": _Method(
        _convert_deltas, ("weight", "density"), ("normalize", "lambda", "rescale")
    ),
    "dare_ties": _Method(
        _convert_deltas, ("weight", "density"), ("normalize", "lambda", "rescale")
    ),
    "slerp": _Method(_convert_slerp, (), ("t",)),
    "nuslerp": _Method(_convert_nuslerp, ("weight",), ("nuslerp_flatten",)),
}


def _note_useless(config: _Config, draft: _Draft) -> None:
    """Say what is known to mergekit and changes nothing where it stands."""
    method = _METHODS[config.method]
    weighs_base = config.method == "linear"
    told: dict[int, str] = {}
    for given in config.inputs:
        is_base = given.model == config.base and not weighs_base
        useful = () if is_base else method.of_models
        told |= _useless(given.scopes[0], useful, given.model) if given.scopes[1:] else {}
    for scope in config.shared:
        told |= _useless(scope, (*method.of_models, *method.of_all), config.method)
    draft.notes += [text for _, text in sorted(told.items())]


def _useless(scope: Table, useful: Sequence[str], where: str) -> dict[int, str]:
    return {
        node.line: f"line {node.line}: {key} has no effect for {where}, and is left out"
        for key, node in scope.items()
        if key not in useful
    }


def _note_arithmetic(config: _Config, draft: _Draft) -> None:
    """Say what mergekit computes in."""
    kind = None if config.dtype is None else _storage_type(config.dtype)
    if kind == "float32":
        return
    told = f"in {kind}" if kind else "in the type that the weights are stored in"
    draft.differences.append(
        f"mergekit computes {told}; here arithmetic is float32, and rounded once at the end"
    )
