"""A YAML file as values that know their lines, for messages.

Parameters have a value for each tensor, by mergekit's rules: a model's parameters have priority
over those of its slice, and these over the whole configuration's. A filter matches names that
contain its text, and the first match counts. A list of numbers is spread over the layers.

With aliases and merge keys, a few lines can mean billions of values. Values are counted before any
alias is followed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from glob import escape
from itertools import product
from operator import mul
from pathlib import Path
from typing import Any, NamedTuple

from dare.errors import InputError, RecipeError, did_you_mean
from dare.tensors.files import read_limited

# A limit; the largest configurations, with a slice for every layer, have a tenth of this.
MAX_BYTES = 1 << 18
MAX_VALUES = 50_000  # a limit for all values, those of aliases counted wherever they stand
MAX_BITS = 64
MAX_DIGITS = 100


@dataclass(frozen=True)
class Reading:
    """A file that is read, with what is noted and the merges that are found in it."""

    file: Path
    notes: set[tuple[int, str]] = field(default_factory=set)  # with their lines
    merges: dict[str, dict[str, Any]] = field(default_factory=dict)  # recipes of models by name


@dataclass(frozen=True)
class Node:
    """A value of the YAML file, and its line."""

    value: Any  # a scalar, a tuple of nodes, or a dict of nodes
    reading: Reading = field(repr=False)
    line: int

    def refuse(self, text: str) -> RecipeError:
        """Return the error that says what is wrong with this value, and where it stands."""
        return RecipeError(f"{self.place}: {text}")

    def require(self, holds: object, text: str) -> None:
        """Raise that error unless something holds."""
        if not holds:
            raise self.refuse(text)

    def note(self, key: str, text: str) -> None:
        """Note that the key with this value is left out, and why."""
        self.reading.notes.add((self.line, f"{key} (line {self.line}): {text}, and is left out"))

    @property
    def place(self) -> str:
        """The file and the line, for messages."""
        return f"{self.reading.file}, line {self.line}"

    @property
    def plain(self) -> Any:
        """The value without lines."""
        if isinstance(self.value, dict):
            return {key: node.plain for key, node in self.value.items()}
        if isinstance(self.value, tuple):
            return [node.plain for node in self.value]
        return self.value


def read_yaml(file: Path) -> list[Node]:
    """Read the documents of a file; refuse one that is not valid, empty or says a thing twice."""
    import yaml  # type: ignore[import-untyped]

    try:
        text = read_limited(file, MAX_BYTES).decode()
    except UnicodeDecodeError as error:
        raise InputError(f"{file}: cannot read the configuration: {error}") from None
    try:
        loader = yaml.SafeLoader(text)
        roots = []
        while loader.check_node():
            roots.append(loader.get_node())
        if not roots:
            raise RecipeError(f"{file}: is empty")
        if (values := sum(_count(root, file, {}) for root in roots)) > MAX_VALUES:
            raise RecipeError(f"{file}: expands to {values:.3g} values; the limit is {MAX_VALUES}")
        reading = Reading(file)
        return [_from_yaml(root, loader, reading, {}) for root in roots]
    except RecipeError:
        raise
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{file}, line {mark.line + 1}" if mark else str(file)
        reason = getattr(error, "problem", None) or error
        raise RecipeError(f"{where}: not valid YAML: {reason}") from None


def _count(node: Any, file: Path, seen: dict[int, float]) -> float:
    """Count the values that a node expands to; `seen` has those that aliases may refer to."""
    if id(node) in seen:
        if not seen[id(node)]:
            raise RecipeError(f"{file}, line {node.start_mark.line + 1}: contains itself")
        return seen[id(node)]
    seen[id(node)] = 0.0
    inner: list[Any] = [] if node.id == "scalar" else node.value
    if node.id == "mapping":
        inner = [part for pair in node.value for part in pair]
    seen[id(node)] = 1.0 + sum(_count(part, file, seen) for part in inner)
    return seen[id(node)]


def _from_yaml(node: Any, loader: Any, reading: Reading, seen: dict[int, Node]) -> Node:
    """Turn a node of PyYAML into ours; `seen` has those that an alias may refer to."""
    line = node.start_mark.line + 1
    if id(node) in seen:
        return seen[id(node)]
    value: Any
    if node.id == "mapping":
        _check_keys(node, reading.file)
        loader.flatten_mapping(node)  # what << brings in, which own keys come after
        pairs = [(str(key.value), child) for key, child in node.value]
        value = {key: _from_yaml(child, loader, reading, seen) for key, child in pairs}
    elif node.id == "sequence":
        value = tuple(_from_yaml(child, loader, reading, seen) for child in node.value)
    else:
        place = Node(None, reading, line)
        is_long = node.tag.endswith((":int", ":float")) and len(node.value) > MAX_DIGITS
        place.require(not is_long, f"a number of more than {MAX_DIGITS} digits")
        value = loader.construct_object(node)
        is_large = isinstance(value, int) and value.bit_length() > MAX_BITS
        place.require(not is_large, f"a number of more than {MAX_BITS} bits")
        if isinstance(value, str) and re.search("[\ud800-\udfff]", value):
            raise place.refuse(f"{value!a:.80} is not valid Unicode")
    ours = seen[id(node)] = Node(value, reading, line)
    return ours


def _check_keys(node: Any, file: Path) -> None:
    lines: dict[str, int] = {}
    for key, _ in node.value:
        where = f"{file}, line {key.start_mark.line + 1}"
        if key.id != "scalar":
            raise RecipeError(f"{where}: a key must be a word")
        if key.value in lines:
            raise RecipeError(f"{where}: {key.value} is already on line {lines[key.value]}")
        lines[key.value] = key.start_mark.line + 1


# ---------------------------------------------------------------- checked values

Table = Mapping[str, Node]


def as_table(
    node: Node, known: Iterable[str], what: str, *, required: str = "", keeps_null: bool = False
) -> Table:
    """Return the known keys of a node, and note the others; refuse one that is lacking."""
    node.require(isinstance(node.value, dict), f"{what}: must be a table of keys and values")
    given = {key: n for key, n in node.value.items() if keeps_null or n.value is not None}
    for key, child in given.items():
        if key not in known:
            hint = did_you_mean(key, known)
            child.note(key, f"means nothing to mergekit in {what}{hint}")
    table = {key: child for key, child in given.items() if key in known}
    guesses = {key: did_you_mean(key, [required]) for key in given if key not in known}
    slips = "".join(f"; {key}: not known{hint}" for key, hint in guesses.items() if hint)
    node.require(not required or required in table, f"{required} is missing{slips}")
    return table


def as_items(node: Node, what: str) -> tuple[Node, ...]:
    """Return the entries of a node that is a list; refuse one without any."""
    is_list = isinstance(node.value, tuple) and node.value
    node.require(is_list, f"{what}: must be a list with at least one entry")
    return tuple(node.value)


def as_text(node: Node, what: str) -> str:
    """Return the value of a node that is text; refuse anything else."""
    node.require(isinstance(node.value, str), f"{what}: must be text, not {node.plain!r}")
    return str(node.value)


# ---------------------------------------------------------------- parameters


class Scope(NamedTuple):
    """Parameters, and the module they are for, as texts that names of its tensors contain.

    None is the whole model; a module without texts covers what the other modules leave.
    """

    table: Table
    module: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Input:
    """A model that is merged, and its parameters from the strongest scope to the weakest."""

    model: str
    node: Node
    scopes: tuple[Scope, ...]
    span: tuple[int, int] | None = None  # its first layer, and the one after the last


@dataclass(frozen=True)
class Case:
    """A value for the tensors of a module whose names contain a text, or for all (None)."""

    contains: str | None
    value: Any  # a number, or a list of them for the layers; before it is checked, anything
    node: Node = field(compare=False)
    module: tuple[str, ...] | None = None

    @property
    def numbers(self) -> list[Any]:
        """The numbers that it takes in any layer."""
        return self.value if isinstance(self.value, list) else [self.value]

    @property
    def words(self) -> dict[str, Any]:
        """The keys of a rule that say which tensors it is for."""
        words = {} if self.contains is None else {"contains": self.contains}
        return words | ({"match": [f"*{escape(t)}*" for t in self.module]} if self.module else {})

    def changed(self, change: Callable[[Any], float]) -> Case:
        """Return the case with its number changed, or every number of its list."""
        numbers = [change(number) for number in self.numbers]
        return replace(self, value=numbers if isinstance(self.value, list) else numbers[0])


# The values of a parameter, of which the first match counts; the last one is for all tensors.
Cases = tuple[Case, ...]


# ---------------------------------------------------------------- reading


def _read_cases(name: str, scope: Scope) -> Iterator[Case]:
    node = scope.table[name]
    entries = node.value if isinstance(node.value, tuple) else (node,)
    if not all(isinstance(entry.value, dict) for entry in entries):
        yield Case(None, _plain_value(name, node), node, scope.module)
        return
    for entry in entries:
        table = as_table(entry, ("filter", "value"), f"a value of {name}")
        entry.require("value" in table, f"{name}: value is missing")
        value = _plain_value(name, table["value"])
        is_value = not isinstance(value, dict) and value != []
        table["value"].require(is_value, f"{name}: must be a number or a list of numbers")
        text = table["filter"].value if "filter" in table else None
        contains = None if text in (None, "*", "") else str(text)
        yield Case(contains, value, table["value"], scope.module)


def _plain_value(name: str, node: Node) -> Any:
    if not isinstance(node.value, tuple):
        return node.value
    for item in node.value:
        is_plain = not isinstance(item.value, dict | tuple)
        item.require(is_plain, f"{name}: must be numbers alone, or filters with values alone")
    return node.plain


def resolve(name: str, scopes: Sequence[Scope]) -> Cases:
    """Return the cases of all scopes, up to the one from which all tensors have a value."""
    cases: list[Case] = []
    modules = {scope.module for scope in scopes if scope.module is not None}
    done: set[tuple[str, ...] | None] = set()
    for scope in scopes:
        given = scope.module not in done and name in scope.table
        for case in _read_cases(name, scope) if given else ():
            cases.append(case)
            if case.contains is None:
                done.add(scope.module)
                break
        if None in done or (modules and done >= modules):
            return (*cases[:-1], replace(cases[-1], module=None))
    return tuple(cases)


# ---------------------------------------------------------------- of one model


def numbers(name: str, given: Input, default: float | None = None) -> Cases:
    """Return a model's number in every case; refuse if a tensor has none."""
    cases = resolve(name, given.scopes)
    if not cases or cases[-1].words:
        lacking = "tensors that no filter matches" if cases else given.model
        text = f"{name} is missing for {lacking}; mergekit has no default"
        given.node.require(default is not None, text)
        cases = (*cases, Case(None, default, given.node))
    return as_numbers(name, cases)


def multiply(cases: Cases, factors: Cases) -> Iterator[Case]:
    """Yield the products of a model's weights and of lambda, in the order in which they count."""
    for factor, case in product(factors, cases):
        number, varied = sorted((factor, case), key=lambda one: isinstance(one.value, list))
        is_plain = not factor.words or factor.module is case.module is None
        can = is_plain and not isinstance(number.value, list)
        factor.node.require(can, "lambda: multiply the weights by it; both have filters or lists")
        module = case.module if factor.contains is None else (factor.contains,)
        value = varied.changed(partial(mul, number.value))
        yield replace(value, contains=case.contains, module=module)


def as_numbers(name: str, cases: Cases) -> Cases:
    """Return the cases with their values as numbers; refuse any other value."""
    return tuple(case.changed(partial(_one_number, name, case.node)) for case in cases)


def _one_number(name: str, node: Node, value: Any) -> float:
    """Return a finite number; 1e-3 is text in YAML, and a number to mergekit."""
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    node.require(math.isfinite(number), f"{name}: must be a number, not {value!r}")
    return number


# ---------------------------------------------------------------- of the whole merge


def _for_all(name: str, scopes: Sequence[Scope]) -> Cases:
    """Return the one case of a parameter that must be the same for all tensors, or none."""
    cases = resolve(name, scopes)
    for case in cases:
        is_one = not case.words and not isinstance(case.value, list)
        case.node.require(is_one, f"{name}: must be one value for all tensors to be converted")
    return cases


def number_for_all(name: str, scopes: Sequence[Scope], default: float) -> float:
    """Return a number of the whole merge."""
    return next((_one_number(name, c.node, c.value) for c in _for_all(name, scopes)), default)


def flag_for_all(name: str, scopes: Sequence[Scope], *, default: bool) -> bool:
    """Return a switch of the whole merge."""
    for case in _for_all(name, scopes):
        value = {"true": True, "false": False}.get(str(case.value).lower(), case.value)
        fault = f"{name}: must be true or false, not {value!r}"
        case.node.require(value in (True, False), fault)
        return bool(value)
    return default
