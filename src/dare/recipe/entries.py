"""The parts of a recipe's file: its TOML, the names of its files, and the entries of its lists.

TOML may be hostile, so the time to read it must be bounded by its size. The time of Python's parser
grows with the square of the number of parts of a dotted key, so that `a.a.a…` of 200,000 bytes
would take minutes. Keys are therefore checked before it runs.

A recipe names its files at its top level, or in a table [models]:

    base = "base.safetensors"                          [models]
    models = ["math.safetensors", "code.safetensors"]  base_file = "base.safetensors"
    output = "merged.safetensors"                      merge_files = ["math.safetensors", …]
                                                       output_file = "merged.safetensors"

Both mean the same, and a recipe has one of the two. `OTHER_NAMES` lists the others.

An entry is a model to merge, or a rule for tensors.
"""

from __future__ import annotations

import fnmatch
import re
import shlex
import tomllib
from collections.abc import Mapping, Sequence
from fractions import Fraction
from os import PathLike
from pathlib import Path, PurePath
from typing import Annotated, Any

from dare.documents.values import After, Before, Finite
from dare.errors import UNSAFE_CHARACTERS, InputError, RecipeError, did_you_mean
from dare.recipe.fields import Strict, described
from dare.recipe.layers import Gradient
from dare.stages import parse_method
from dare.stages.registry import Parameter
from dare.stores.locations import (
    WEIGHT_SUFFIXES,
    home_folder,
    is_stored,
    looks_like_name,
    parse_address,
    to_path,
)
from dare.tensors.files import read_limited

MAX_BYTES = 10_000_000  # the limit for a recipe: enough for a rule for each of 100,000 tensors
MAX_PARTS = 100  # the limit for a dotted key; a recipe has no more than two parts
MAX_NESTED = 100
MAX_BITS = 128  # the limit for a whole number: Python refuses to print much larger ones

# Whole comments and texts; possessive, so that no alternative is tried twice.
_NOT_KEYS = re.compile(
    r'#[^\n]*+|"""(?:[^"\\]|\\.|"(?!""))*+(?:"""|\Z)|\'\'\'(?:[^\']|\'(?!\'\'))*+(?:\'\'\'|\Z)'
    r"|\"(?:[^\"\\\n]|\\.)*+\"?|'[^'\n]*+'?",
    re.DOTALL,
)
_BARE = re.compile(r"[\w-]+", re.ASCII)  # a key without quotes
_DOTTED = re.compile(r"[\w-]++(?:[ \t]*+\.[ \t]*+[\w-]++)++")


def read_toml(path: Path) -> dict[str, Any]:
    """Read the tables of a recipe from a TOML file."""
    content = read_limited(path, MAX_BYTES)
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        study = "; `dare search show` reads studies" * content.startswith(b"SQLite")
        what = f"must be UTF-8 text; byte {error.start} is not{study}"
        raise InputError(f"{path}: {what}") from None
    keys = _NOT_KEYS.sub(lambda found: "" if found[0].startswith("#") else "_", text)
    if any(key[0].count(".") >= MAX_PARTS for key in _DOTTED.finditer(keys)):
        raise RecipeError(f"{path}: not valid TOML: a key has more than {MAX_PARTS} parts")
    try:
        document = tomllib.loads(text.replace("\r\n", "\n"))
    except (ValueError, RecursionError) as error:
        raise RecipeError(f"{path}: not valid TOML: {error}") from None
    if not document:
        raise RecipeError(f"{path}: is empty, or has only comments; `dare init` writes a recipe")
    _check(document, path, MAX_NESTED)
    return document


def _check(value: Any, path: Path, nested: int) -> None:
    """Refuse values that no recipe has, before anything tries to show them."""
    if isinstance(value, int) and value.bit_length() > MAX_BITS:
        raise RecipeError(f"{path}: holds a number of more than {MAX_BITS} bits")
    if not isinstance(value, dict | list):
        return
    if not nested:
        raise RecipeError(f"{path}: is nested more than {MAX_NESTED} deep")
    for inner in value.values() if isinstance(value, dict) else value:
        _check(inner, path, nested - 1)


def write_toml(document: Mapping[str, Any]) -> str:
    """Write tables as TOML, with every text escaped so that it stays one value."""
    import tomli_w

    return UNSAFE_CHARACTERS.sub(_escape, tomli_w.dumps(document))


def _escape(found: re.Match[str]) -> str:
    """Escape a character that tomli_w keeps in a text and that a terminal would interpret."""
    if found[0] in "\n\t":
        return found[0]
    if "\ud800" <= found[0] <= "\udfff":
        raise RecipeError(f"{found[0]!a} is half a character, which TOML cannot hold; rename it")
    return f"\\U{ord(found[0]):08X}"


def write_value(value: Any) -> str:
    r"""Write a value as TOML on one line.

    >>> write_value(["a\nb", {"file": "c", "weight": 0.5}])
    '["a\\nb", { file = "c", weight = 0.5 }]'
    """
    if isinstance(value, dict):
        pairs = ((k if _BARE.fullmatch(k) else write_value(k), v) for k, v in value.items())
        return f"{{ {', '.join(f'{key} = {write_value(v)}' for key, v in pairs)} }}"
    if isinstance(value, list):
        return f"[{', '.join(map(write_value, value))}]"
    return write_toml({"x": value}).removeprefix("x = ").strip()


# ---------------------------------------------------------------- names of files


# Other names in a recipe and in Python by our name; first that of [models].
OTHER_NAMES: dict[str, tuple[str, ...]] = {
    "base": ("base_file", "base_path"),
    "models": ("merge_files", "merge", "finetuned_paths"),
    "output": ("output_file", "output_path"),
}

OUR_NAMES = {name: ours for ours, others in OTHER_NAMES.items() for name in (ours, *others)}


def written_models(files: Sequence[Path]) -> str:
    r"""Say what to write so that these are the models, on the command line or in a recipe.

    >>> written_models([Path("base"), Path("my model")])
    'write --models base \'my model\', or models = ["base", "my model"] in the recipe'
    """
    names = [str(file) for file in files]
    return f"write --models {shlex.join(names)}, or models = {write_value(names)} in the recipe"


def in_our_form(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return a document with base, models and output at its top level, and first.

    >>> in_our_form({"seed": 1, "models": {"base_file": "b", "merge_files": ["m"]}})
    {'base': 'b', 'models': ['m'], 'seed': 1}
    """
    return find_files(document)[0]


NEW_NAMES = {"backend": "device"}  # of what earlier versions called otherwise


def find_files(document: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return a document in our form, and by our names those that it has for its files.

    A document in both forms is refused, and one with two names for one thing.
    """
    table: Any = document.get("models")
    is_table = isinstance(table, dict)
    if is_table:
        _check_table(document, table)
    named = table if is_table else document
    files, names = {}, {}
    for ours, others in OTHER_NAMES.items():
        given = [name for name in (ours, *others) if name in named]
        if len(given) > 1:
            raise RecipeError(f"{' and '.join(given)}: mean the same; leave one out")
        name = (*given, others[0] if is_table else ours)[0]
        names[ours] = f"[models] {name}" if is_table else name
        if named.get(name) is not None:
            files[ours] = named[name]
    for old, new in NEW_NAMES.items():
        if {old, new} <= document.keys():
            raise RecipeError(f"{old} and {new}: mean the same; leave {old} out")
    rest = {NEW_NAMES.get(key, key): v for key, v in document.items() if key not in OUR_NAMES}
    return files | rest, names


def _check_table(document: Mapping[str, Any], table: Mapping[str, Any]) -> None:
    outside = [name for name in document if name in OUR_NAMES and name != "models"]
    if outside:
        places = "all at the top level, or base_file, merge_files and output_file in [models]"
        found = f"{' and '.join(outside)} at the top level and a table [models]"
        raise RecipeError(f"{found}: name the files in one place, {places}")
    for key in table:
        if key not in OUR_NAMES:
            known = [others[0] for others in OTHER_NAMES.values()]
            raise RecipeError(f"[models] {key}: not known{did_you_mean(key, known)}")


def with_our_names(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return keyword arguments under our names.

    >>> with_our_names({"base_path": "b", "merge": ["m"], "seed": 1})
    {'base': 'b', 'models': ['m'], 'seed': 1}
    """
    find_files(dict.fromkeys(given))
    ours = OUR_NAMES | NEW_NAMES
    return {ours.get(name, name): value for name, value in given.items()}


# ---------------------------------------------------------------- entries


# Files that are called like this are told apart by their folders.
GENERIC_NAMES = {"model", "pytorch_model", "adapter_model"}

_WEIGHT = Parameter("weight", None, Finite)


def as_path(value: object) -> Path:
    """Return a path, with ~ expanded."""
    if not isinstance(value, str | PathLike):
        raise ValueError("must be the path of a file or folder")
    try:
        return to_path(value).expanduser()
    except (RuntimeError, RecipeError) as error:  # ~somebody who is not there; nothing
        raise ValueError(str(error)) from None


def parse_size(value: object) -> object:
    """Read a size in bytes: a whole number, or text such as `"512MiB"`, `"5GB"`, `"2G"`.

    >>> parse_size("2GiB") == 2 * 2**30, parse_size("5MB")
    (True, 5000000)
    """
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(iB|B)?\s*", value, re.IGNORECASE)
    if match is None:
        raise ValueError("not a size; write 1073741824, '1GiB' or '5GB'")
    number, unit, suffix = match.groups()
    power = "KMGT".index(unit.upper()) + 1 if unit else 0
    thousand = 1000 if suffix and suffix.upper() == "B" else 1024
    return int(Fraction(number) * thousand**power)


def as_tuple(value: object) -> object:
    """Return one text or path, or a list, as a tuple; anything else unchanged."""
    if isinstance(value, str | PathLike):
        return (value,)
    return tuple(value) if isinstance(value, list) else value


def with_lists(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings as TOML would give them: values that change over the layers are lists."""
    return {n: list(v) if isinstance(v, tuple) else v for n, v in settings.items()}


def _check_span(value: object) -> tuple[int, int]:
    match value:
        case [int(first), int(end)] if 0 <= first < end:
            return first, end
    raise ValueError("must be the first layer and the one after the last, as in [0, 16]")


AnyPath = Annotated[Path, Before(as_path)]
Weight = Annotated[
    float | Gradient | None,
    Before(lambda value: None if value is None else _WEIGHT.check(value, "")),
]
Span = Annotated[tuple[int, int], Before(_check_span)]
Words = Annotated[tuple[str, ...] | None, Before(as_tuple)]
# A method with its own name is written as its stages.
Method = Annotated[str, After(lambda value: "+".join(stage.name for stage in parse_method(value)))]
OwnSettings = Annotated[dict[str, Any], After(with_lists)]


class Entry(Strict):
    """An entry of a list, which may have parameters of stages among its keys."""

    def to_tables(self) -> dict[str, Any]:
        """Return it as people write it."""
        tables = super().to_tables()
        settings: dict[str, Any] = tables.pop("settings", {})
        return tables | settings


class ModelEntry(Entry):
    """One fine-tune: its file or folder, its share, and what is different for it.

    >>> ModelEntry(file="math.safetensors", weight=0.5, settings={"drop_rate": 0.8}).weight
    0.5
    """

    file: AnyPath = described("A safetensors file, or a folder that holds the model.")
    weight: Weight = described("Its share; the default depends on the method.", None)
    seed: int | None = described("Its seed, in place of seed + i.", None, ge=0)
    range: Span | None = described(
        "In [[layers]]: its layers, if they differ from the base's.", None
    )
    settings: OwnSettings = described("Parameters of delta stages that are different for it.", {})

    @property
    def name(self) -> str:
        """The model's name in messages, if no other has the same."""
        return self.path.name

    @property
    def path(self) -> Path:
        """The path whose last part is its name; its folders distinguish models of one name."""
        path = self.file
        if looks_like_name(path.as_posix()):
            path = Path(path.as_posix().partition("@")[0])
        elif is_stored(path) and path.scheme == "hf":
            name = parse_address(str(path))
            path = Path(name.repo, name.inside)
        if path.suffix not in WEIGHT_SUFFIXES:
            return path
        folder = path.parent
        is_generic = path.stem in GENERIC_NAMES and folder.name and folder != home_folder()
        return folder if is_generic else folder / path.stem.removesuffix(".delta")

    def is_called(self, name: str) -> bool:
        """Return whether a name, perhaps with folders before it, is this model's."""
        parts = PurePath(name).parts
        return self.path.parts[-len(parts) :] == parts


class TokenEntry(Strict):
    """The row of a token: zeros, or a model's row for the same token or for another one.

    >>> TokenEntry(model="chat", token="</s>").force
    False
    """

    model: str | None = described("The model that has the row; `base` is the base.", None)
    token: str | None = described("Another token of that model.", None)
    id: int | None = described("The number of the row in that model.", None, ge=0)
    zero: bool = described("True for a row of zeros.", False)
    force: bool = described("True to ignore the rows that models have for it.", False)

    def check_together(self) -> None:
        if self.zero == (self.model is not None):
            raise RecipeError('a token needs a model or "zero": {model = "chat"}')
        if (self.token is not None) + (self.id is not None) > (not self.zero):
            raise RecipeError("a token is given by token or by id, and only with a model")


TokenRow = Annotated[TokenEntry, Before(lambda value: {"zero": True} if value == "zero" else value)]


class TensorRule(Entry):
    """A method or parameters for the tensors whose names match a pattern, or contain a text.

    >>> rule = TensorRule(contains="mlp", match="*.weight", settings={"drop_rate": 0.5})
    >>> rule.matches("layers.0.mlp.up.weight"), rule.matches("layers.0.mlp.up.bias")
    (True, False)
    """

    match: Words = described("A pattern or a list of them: * and ? as in a shell.", None)
    contains: Words = described(
        "A part of the name, or a list of them; with match, both must hold.", None
    )
    model: Words = described(
        "The model or models that it is for, by name or file; default: all.", None
    )
    method: Method | None = described("The method for these tensors, if it differs.", None)
    weight: Weight = described("The models' weight for these tensors.", None)
    settings: OwnSettings = described("Parameters of stages for these tensors.", {})

    def check_together(self) -> None:
        if self.match is None and self.contains is None:
            raise RecipeError('match is missing: write match = "*.mlp.*" or contains = "mlp"')
        if self.model is not None and self.method is not None:
            raise RecipeError(f"{self}: a method is for all models; leave model or method out")

    def matches(self, tensor: str) -> bool:
        """Return whether the rule applies to a tensor."""
        return (
            self.match is None or any(fnmatch.fnmatchcase(tensor, word) for word in self.match)
        ) and (self.contains is None or any(text in tensor for text in self.contains))

    def __str__(self) -> str:
        words = {"matching": self.match, "containing": self.contains, "of model": self.model}
        parts = [f"{word} {', '.join(map(repr, t))}" for word, t in words.items() if t is not None]
        return f"tensors {' '.join(parts)}"


def number_duplicates(names: Sequence[str]) -> list[str]:
    """Number the names that occur more than once."""
    return [f"{name} ({n + 1})" if names.count(name) > 1 else name for n, name in enumerate(names)]


def model_names(entries: Sequence[ModelEntry]) -> list[str]:
    """Name models; those with the same name get as many folders as needed to be unique.

    >>> model_names([ModelEntry(file=file) for file in ("a/math", "b/math", "code", "code")])
    ['a/math', 'b/math', 'code (3)', 'code (4)']
    """
    every = [entry.path.parts for entry in entries]
    return number_duplicates([PurePath(*_unique_end(parts, every)).as_posix() for parts in every])


def _unique_end(parts: tuple[str, ...], every: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    ends = (parts[-length:] for length in range(1, len(parts) + 1))
    is_one = (end for end in ends if sum(other[-len(end) :] == end for other in every) == 1)
    return next(is_one, parts[-1:])
