"""A recipe with a comment on everything that can be set."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tomli_w

from dare.planning.plan import Plan
from dare.recipe.schema import Recipe
from dare.stages import parse_method

if TYPE_CHECKING:
    from dare.analysis.judge.judgement import Advice

EXAMPLES = {
    "embedding_drop_rate": 0.5,
    "dtype": "BF16",
    "pad_to_multiple_of": 64,
    "copy_from": "math",
    "shard_size": "5GB",
    "max_memory": "1GiB",
    "threads": 4,
}
"""What stands in a comment for fields whose default is nothing, or hard to read."""

ELSEWHERE = {"base", "models", "output", "stages", "tensors"}
"""Fields that have tables of their own."""


def write_template(plan: Plan, advice: Advice | None = None) -> str:
    """The recipe of a plan as TOML: what it sets, and as comments what it could set."""
    recipe = plan.recipe
    document = recipe.to_document()
    lines = [
        "# A recipe for dare. `dare plan FILE` says what it would do, `dare FILE` does it.",
        "# What is commented out is at its default, or an example.",
        *(["#", "# Chosen after an analysis:", *reasons(advice)] if advice else []),
        "",
        *_fields(document),
        "[models]",
        f"# {_described(plan)}",
        *_key("base_file", document["models"]["base_file"]),
        "# Each may be a table of its own: { file = …, weight = 0.5, seed = 7, drop_rate = 0.8 }",
        *_models(document["models"]["merge_files"]),
        *_key("output_file", document["models"].get("output_file", "merged.safetensors")),
        *_stages(recipe, document),
        *_rules(document),
    ]
    return "\n".join(lines) + "\n"


def advised_toml(advice: Advice, output: Path) -> str:
    """The recipe of an advice as TOML, after a comment with the reasons."""
    recipe = advice.recipe
    if not recipe:
        return "\n".join(["# None of the models should be merged:", *reasons(advice), ""])
    document = {**recipe, "models": {**recipe["models"], "output_file": str(output)}}
    return "\n".join([*reasons(advice), "", tomli_w.dumps(document)])


def reasons(advice: Advice) -> Iterator[str]:
    """Why an advice is what it is, as comments."""
    for each in advice.suggestions:
        whose = "" if each.model is None else f" of {each.model}"
        told = f"{each.setting}{whose} = {each.value}: {each.reason}"
        yield from _wrapped(f"{told} ({each.evidence} evidence; {each.source})")
    for doubt in advice.doubts:
        yield from _wrapped(f"Not known: {doubt}")


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, 98, initial_indent="# - ", subsequent_indent="#   ")


def _fields(document: Mapping[str, Any]) -> Iterator[str]:
    for name, field in Recipe.model_fields.items():
        if name in ELSEWHERE or (name == "input_digests" and name not in document):
            continue  # digests have no place in a recipe written by hand
        yield f"# {field.description}"
        if name in document or name == "method":
            yield from _key(name, document.get(name, field.default))
        else:
            yield from _comment(name, EXAMPLES.get(name, field.default))
        yield ""


def _described(plan: Plan) -> str:
    elements = sum(tensor.elements for tensor in plan.tensors)
    types = ", ".join(sorted({tensor.base.dtype.name for tensor in plan.tensors}))
    return f"{len(plan.tensors)} tensors, {elements:,} elements, {types}; all models fit."


def _models(entries: list[Any]) -> Iterator[str]:
    yield "merge_files = ["
    for entry in entries:
        yield f"    {_inline(entry)},"
    yield "]"


def _inline(entry: Any) -> str:
    if not isinstance(entry, dict):
        return _value(entry)
    return "{ " + ", ".join(f"{key} = {_value(value)}" for key, value in entry.items()) + " }"


def _stages(recipe: Recipe, document: Mapping[str, Any]) -> Iterator[str]:
    for stage in parse_method(recipe.method):
        given = document.get(stage.name, {})
        if not stage.parameters:
            continue
        yield ""
        yield f"[{stage.name}]"
        yield f"# {stage.summary}"
        for name, parameter in stage.parameters.items():
            yield f"# {parameter.description} {parameter.range}"
            if name in given or parameter.default is None:
                write = _key if name in given else _comment
                yield from write(name, given.get(name, 0.5))
            else:
                yield from _key(name, parameter.default)


def _rules(document: Mapping[str, Any]) -> Iterator[str]:
    yield ""
    yield "# Other parameters for the tensors whose names match; a later rule wins."
    rules = document.get("tensors", [])
    for rule in rules:
        yield "[[tensors]]"
        for key, value in rule.items():
            yield from _key(key, value)
    if not rules:
        yield "# [[tensors]]"
        yield '# match = ["*.mlp.*"]'
        yield "# drop_rate = 0.5"


def _key(name: str, value: Any) -> Iterator[str]:
    yield f"{name} = {_value(value)}"


def _comment(name: str, value: Any) -> Iterator[str]:
    yield f"# {name} = {_value(value)}"


def _value(value: Any) -> str:
    """A value as TOML on one line."""
    if isinstance(value, list):
        return json.dumps(value, ensure_ascii=False)
    return tomli_w.dumps({"x": value}).removeprefix("x = ").strip()
