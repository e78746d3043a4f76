"""Names for the files of a merge: base, models and output, and others elsewhere.

A recipe names them at its top level, or in a table [models]:

    base = "base.safetensors"                          [models]
    models = ["math.safetensors", "code.safetensors"]  base_file = "base.safetensors"
    output = "merged.safetensors"                      merge_files = ["math.safetensors", …]
                                                       output_file = "merged.safetensors"

Both mean the same, and a recipe has one of the two. `OTHER_NAMES` lists the others.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dare.errors import RecipeError, did_you_mean
from dare.recipe.toml import write_value

OTHER_NAMES: dict[str, tuple[str, ...]] = {
    "base": ("base_file", "base_path"),
    "models": ("merge_files", "merge", "finetuned_paths"),
    "output": ("output_file", "output_path"),
}
"""Other names in a recipe and in Python by our name; first that of [models]."""

OUR_NAMES = {name: ours for ours, others in OTHER_NAMES.items() for name in (ours, *others)}

FLAGS = {
    "base": ("--base", "-b"),
    "models": ("--models", "--merge", "-m"),
    "output": ("--output", "-o"),
}


def written_models(files: Sequence[Path]) -> str:
    r"""Say what to write so that these are the models, on the command line or in a recipe.

    >>> written_models([Path("base"), Path("my model")])
    'write --models base \'my model\', or models = ["base", "my model"] in the recipe'
    """
    names = [str(file) for file in files]
    return (
        f"write {FLAGS['models'][0]} {shlex.join(names)}, or models = {write_value(names)} in the "
        "recipe"
    )


@dataclass(frozen=True)
class Files:
    """The table in which a document names its files, to read and to change them as they are."""

    table: dict[str, Any]
    """The document, or its table [models]."""
    is_table: bool
    keys: dict[str, str]
    """The name in use, by ours."""

    @classmethod
    def of(cls, document: dict[str, Any]) -> Files:
        """Find them; refuse a document in both forms, or with two names for one thing."""
        is_table = isinstance(document.get("models"), dict)
        table = document["models"] if is_table else document
        if is_table:
            _check_table(document, table)
        keys = {}
        for ours, others in OTHER_NAMES.items():
            given = [name for name in (ours, *others) if name in table]
            if len(given) > 1:
                raise RecipeError(f"{' and '.join(given)}: mean the same; leave one out")
            keys[ours] = (*given, others[0] if is_table else ours)[0]
        return cls(table, is_table, keys)

    def shown(self, field: str) -> str:
        """Return a field's name in messages: as it is written there."""
        return f"[models] {self.keys[field]}" if self.is_table else self.keys[field]

    def get(self, field: str) -> Any:
        """Return the value of a field; None if it has none."""
        return self.table.get(self.keys[field])

    def set(self, field: str, value: Any) -> None:
        """Give a field a value, under the name that it has there."""
        self.table[self.keys[field]] = value


def _check_table(document: dict[str, Any], table: dict[str, Any]) -> None:
    outside = [name for name in document if name in OUR_NAMES and name != "models"]
    if outside:
        raise RecipeError(
            f"{' and '.join(outside)} at the top level and a table [models]: name the files in "
            "one place, as base, models and output at the top level, or as base_file, "
            "merge_files and output_file in [models]"
        )
    for key in table:
        if key not in OUR_NAMES:
            known = [others[0] for others in OTHER_NAMES.values()]
            raise RecipeError(f"[models] {key}: not known{did_you_mean(key, known)}")


def in_our_form(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return a document with base, models and output at its top level, and first.

    >>> in_our_form({"seed": 1, "models": {"base_file": "b", "merge_files": ["m"]}})
    {'base': 'b', 'models': ['m'], 'seed': 1}
    """
    named = Files.of(dict(document))
    files = {field: named.get(field) for field in OTHER_NAMES if named.get(field) is not None}
    return files | {key: value for key, value in document.items() if key not in OUR_NAMES}


def with_our_names(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return keyword arguments under our names.

    >>> with_our_names({"base_path": "b", "merge": ["m"], "seed": 1})
    {'base': 'b', 'models': ['m'], 'seed': 1}
    """
    Files.of(dict.fromkeys(given))
    return {OUR_NAMES.get(name, name): value for name, value in given.items()}
