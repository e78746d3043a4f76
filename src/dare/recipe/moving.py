"""The same merge with its files elsewhere, or with fewer models."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from dare.recipe.entries import ModelEntry, TensorRule, model_names
from dare.recipe.recipe import RESERVED, Recipe

_Recipe = TypeVar("_Recipe", bound=Recipe)  # or a range of a stack


def with_files(recipe: _Recipe, base: Path, files: Sequence[Path], output: Path | None) -> _Recipe:
    """Return the recipe with its files elsewhere; what names a model means the same one."""
    entries = tuple(
        entry.changed(file=file) for entry, file in zip(recipe.models, files, strict=True)
    )
    rules = _rules_of(recipe, dict(enumerate(files)))
    changed = {"base": base, "models": entries, "output": output, "tensors": rules}
    changed |= _renamed(recipe, ("base", *model_names(entries)))
    return recipe.changed(**changed, output_digest=recipe.output_digest)


def moved(recipe: _Recipe, move: Callable[[Path], Path], output: Path | None = None) -> _Recipe:
    """Return the recipe with all that it reads elsewhere, and another output."""

    def place(file: Path) -> Path:
        return file if str(file) in recipe.merges else move(file)

    inner: dict[str, Any] = {
        "merges": {name: moved(merge, place) for name, merge in recipe.merges.items()},
        "layers": tuple(moved(entry, place) for entry in recipe.layers),
        **({"gathered": place(recipe.gathered)} if recipe.gathered else {}),
    }
    files = [place(entry.file) for entry in recipe.models]
    outer = with_files(recipe, place(recipe.base), files, output)
    return outer.changed(**inner, output_digest=recipe.output_digest)


def _renamed(recipe: Recipe, names: Sequence[str]) -> dict[str, Any]:
    """Return the fields that name inputs, with other names for these."""

    def named(word: str | None) -> str | None:
        if word is None or word in RESERVED or "{" in word:
            return word
        number = recipe.find_input(word, word)
        name = word if number is None else names[number]
        return f"./{name}" if number and name in RESERVED else name

    rows = {t: row.changed(model=named(row.model)) for t, row in recipe.tokens.items()}
    fields = ("vocabulary", "copy_from", "chat_template")
    changed = {"tokens": rows} | {name: named(getattr(recipe, name)) for name in fields}
    return {name: value for name, value in changed.items() if value != getattr(recipe, name)}


def _rules_of(recipe: Recipe, files: Mapping[int, Path]) -> tuple[TensorRule, ...]:
    """Return the rules that concern some models, by number, with the files that these get."""
    rules = []
    for rule, indices in recipe.rules:
        own = tuple(str(files[index]) for index in indices or () if index in files)
        if indices is None or own:
            rules.append(rule if indices is None else rule.changed(model=own))
    return tuple(rules)


def with_models(recipe: Recipe, kept: Iterable[int]) -> Recipe:
    """Return the recipe with some of its models, by number."""
    models = {number: recipe.models[number] for number in kept}
    rules = _rules_of(recipe, {number: entry.file for number, entry in models.items()})
    changed = {"models": tuple(models.values()), "tensors": rules, "input_digests": None}
    return recipe.changed(**changed, **rows_without(recipe, models.values()))


def rows_without(recipe: Recipe, kept: Iterable[ModelEntry]) -> dict[str, Any]:
    """Return the fields for tokens, without the models that are not kept."""
    files = {entry.file for entry in kept}
    gone = {1 + n for n, entry in enumerate(recipe.models) if entry.file not in files}
    rows = {t: row for t, (number, row) in recipe.token_rows.items() if number not in gone}
    vocabulary = "union" if recipe.vocabulary_of in gone else recipe.vocabulary
    return {"tokens": rows, "vocabulary": vocabulary} if gone else {}
