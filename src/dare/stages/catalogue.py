"""Stages and aliases as plain values, ready for JSON."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from dare.stages.methods import ALIASES
from dare.stages.registry import STAGES, Parameter, Stage

MOST_MODELS = 8
"""Up to which number of models the weights that they get by themselves are listed."""


def catalogue(names: Iterable[str]) -> dict[str, Any]:
    """These stages with all that is known of them, and every alias."""
    return {"stages": [_stage(STAGES[name]) for name in names], "aliases": dict(ALIASES)}


def _stage(stage: Stage) -> dict[str, Any]:
    """A stage; one that combines also has `models` and `default_weight`.

    `models` is how many it takes, if not any number. `default_weight` is what each of one, two …
    models weighs by itself, or nothing where models have no weight.
    """
    facts = ("name", "kind", "summary", "documentation", "paper")
    shown = {fact: getattr(stage, fact) for fact in facts}
    shown["parameters"] = [_parameter(parameter) for parameter in stage.parameters.values()]
    if stage.kind == "combine":
        weigh = stage.default_weight
        counts = range(1, MOST_MODELS + 1)
        shown["models"] = stage.models
        shown["default_weight"] = None if weigh is None else [weigh(count) for count in counts]
    return shown


def _parameter(parameter: Parameter) -> dict[str, Any]:
    facts = ("name", "default", "range", "description")
    return {fact: getattr(parameter, fact) for fact in facts} | parameter.control
