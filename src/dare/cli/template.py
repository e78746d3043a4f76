"""A recipe with a comment on everything that can be set."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dare import api
from dare.cli import HELP
from dare.errors import DareError, RecipeError, printable
from dare.planning.plan import Plan
from dare.recipe.document import request_from_document
from dare.recipe.entries import in_our_form, write_toml, write_value
from dare.recipe.options import RunOptions
from dare.recipe.recipe import Recipe, Request
from dare.stages import parse_method
from dare.stores.locations import is_stored, usual_output
from dare.tensors.files import is_there

if TYPE_CHECKING:
    from dare.analysis.advice import Advice

COMPARED = (
    "# Measure before you rely on it: this scores the base, each model, this recipe and others on",
    "# examples of yours, a file for each task, and says which one to use:",
    f"#   {HELP['measure'].format('THIS_FILE')}",
)

# Fields that stand first or in tables, the digest, which an edited recipe will not have, and what
# is for Python alone.
ELSEWHERE = {"base", "models", "output", "stages", "tensors", "search", "output_digest"}
INNER = ("layers", "merges")  # tables of recipes, which stand last


def write_template(plan: Plan, advice: Advice | None = None) -> str:
    """The recipe of a plan as TOML: what it sets, and as comments what it could set."""
    recipe = plan.recipe
    document = Request(recipe, plan.options).to_tables()
    lines = [
        "# A recipe for dare. `dare plan FILE` says what it would do, `dare FILE` does it.",
        "# Lines that are commented out show a default or an example.",
        *(["#", "# Chosen after an analysis:", *reasons(advice)] if advice else []),
        "",
        f"# {_described(plan)}",
        _key("base", document["base"]),
        "# Each may be a table: { file = …, weight = 0.5, seed = 7, drop_rate = 0.8 }",
        "models = [",
        *(f"    {write_value(entry)}," for entry in document["models"]),
        "]",
        _key("output", document.get("output", usual_output(recipe.base))),
        *_fields(document),
        *_stages(recipe, document),
        *_rules(document),
    ]
    inner = {name: document[name] for name in INNER if name in document}
    return "\n".join([*lines, *(["", write_toml(inner)] if inner else [])]) + "\n"


def check_runs(recipe: Recipe, where: str) -> None:
    """Refuse a recipe, before it is written, that could not be run; if its models are here."""
    if any(is_stored(file) or not is_there(file) for file in recipe.inputs):
        return  # where they are it will be planned
    try:
        api.plan(recipe)
    except DareError as error:
        raise RecipeError(f"{where}: this cannot be merged: {error}") from None


def advised_toml(advice: Advice, output: Path | None) -> str:
    """The recipe of an advice as TOML, after a comment with the reasons."""
    given = {} if output is None else {"output": str(output)}
    document = {**in_our_form(advice.recipe), **given}
    check_runs(request_from_document(document, "advice").recipe, "the advised recipe")
    return "\n".join([*reasons(advice), "", write_toml(document), *COMPARED, ""])


def nothing_advised(advice: Advice, inputs: Sequence[str]) -> RecipeError:
    """The error where no model is fit to be merged: why, and the command to run instead."""
    unfit = [f"{each.model}: {each.reason}" for each in advice.suggestions if each.model]
    why = f"none of the models should be merged, so there is no recipe ({'; '.join(unfit)})"
    return RecipeError(f"{why}; run `dare analyze {shlex.join(inputs)}` to see what can be done")


def reasons(advice: Advice) -> Iterator[str]:
    """Why an advice is what it is, as comments."""
    texts = []
    for advised in advice.suggestions:
        grounds = f"({advised.evidence} evidence; {advised.source})"
        texts.append(f"{advised}: {advised.reason} {grounds}")
    texts += [f"Caveat: {doubt}" for doubt in advice.doubts]
    wrapper = textwrap.TextWrapper(98, "# - ", "#   ", break_on_hyphens=False)
    for text in map(printable, texts):
        yield from wrapper.wrap(text)


def _fields(document: Mapping[str, Any]) -> Iterator[str]:
    for name, field in (Recipe.fields() | RunOptions.fields()).items():
        if name in {*ELSEWHERE, *INNER} or (name == "input_digests" and name not in document):
            continue  # digests have no place in a recipe written by hand
        yield from ("", f"# {field.description}")
        if name in document or name == "method":
            yield _key(name, document.get(name, field.default))
        else:
            yield f"# {_key(name, HELP['template'].get(name, field.default))}"


def _described(plan: Plan) -> str:
    elements = sum(tensor.elements for tensor in plan.tensors)
    types = ", ".join(sorted({tensor.base.dtype.name for tensor in plan.tensors}))
    return f"{len(plan.tensors)} tensors, {elements:,} elements, {types}; all models fit."


def _stages(recipe: Recipe, document: Mapping[str, Any]) -> Iterator[str]:
    stages = {stage.name: stage for method in recipe.chains for stage in parse_method(method)}
    for stage in stages.values():
        given = document.get(stage.name, {})
        if not stage.parameters:
            continue
        yield from ("", f"[{stage.name}]", f"# {stage.summary}")
        for name, parameter in stage.parameters.items():
            yield f"# {parameter.description} {parameter.range}"
            if name in given or parameter.default is not None:
                yield _key(name, given.get(name, parameter.default))
            else:
                yield f"# {_key(name, 0.5)}"


def _rules(document: Mapping[str, Any]) -> Iterator[str]:
    yield from ("", "# Other parameters for the tensors whose names match; a later rule wins.")
    for rule in document.get("tensors", []):
        yield "[[tensors]]"
        yield from (_key(name, value) for name, value in rule.items())
    if not document.get("tensors"):
        yield from ("# [[tensors]]", '# match = ["*.mlp.*"]', "# drop_rate = 0.5")


def _key(name: str, value: Any) -> str:
    return f"{name} = {write_value(value)}"
