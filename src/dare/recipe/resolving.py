"""What of a recipe applies to one tensor of one model.

A rule for tensors wins over the rate of embeddings, that over a model's own value, and that over
the stage's table; a later rule wins over an earlier one. Values that change over the layers are
taken at the tensor's depth.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fractions import Fraction
from functools import cached_property
from typing import Any

from dare.errors import RecipeError, did_you_mean
from dare.recipe.entries import ModelEntry, TensorRule, as_path
from dare.recipe.layers import OUTSIDE, Gradient, value_at
from dare.stages import IMPLIED, STAGES, Stage, parse_method
from dare.tensors.names import is_embedding

Chain = tuple[tuple[Stage, dict[str, Any]], ...]


class Resolving:
    """What a recipe says of tensors and models; `dare.recipe.schema.Recipe` has the fields."""

    models: tuple[ModelEntry, ...]
    method: str
    stages: dict[str, dict[str, Any]]
    tensors: tuple[TensorRule, ...]
    embedding_drop_rate: float | None
    seed: int

    @cached_property
    def chain(self) -> Chain:
        """The stages with their settings, before any model's or tensor's own values."""
        stages = parse_method(self.method)
        entries: tuple[ModelEntry | TensorRule, ...] = (*self.models, *self.tensors)
        overridden = {name for entry in entries for name in entry.settings}
        chain = []
        for stage in stages:
            settings = stage.settings(self.stages.get(stage.name, {}), f"[{stage.name}] ")
            for parameter, value in settings.items():
                implied = IMPLIED.get((stage.name, parameter))
                if implied is None:
                    continue
                if STAGES[implied] not in stages:
                    if value is not None or parameter in overridden:
                        default = {parameter: 1.0 if value is None else value}
                        chain.append((STAGES[implied], STAGES[implied].settings(default, "")))
                elif value is not None:
                    raise RecipeError(
                        f"[{stage.name}] {parameter}: method {self.method!r} has the stage "
                        f"{implied!r} already; set it in [{implied}]"
                    )
            chain.append((stage, settings))
        return tuple(chain)

    @property
    def interpolates(self) -> bool:
        """Whether whole models are interpolated, so that the base may be one of them."""
        stage, settings = self.chain[-1]
        return stage.interpolates is not None and stage.interpolates.items() <= settings.items()

    def seeds(self) -> tuple[int, ...]:
        """The seed of each model."""
        return tuple(self.seed + n if e.seed is None else e.seed for n, e in enumerate(self.models))

    def weights(self) -> tuple[float | Gradient, ...]:
        """The weight of each model, before any tensor's own."""
        default = self.chain[-1][0].default_weight
        usual = default(len(self.models)) if default else 1.0
        return tuple(usual if entry.weight is None else entry.weight for entry in self.models)

    def weight_for(self, tensor: str, model: int, depth: Fraction = OUTSIDE) -> float:
        """The weight of one model for one tensor, which stands so deep in the stack of layers."""
        rules = [rule.weight for rule in self._rules_for(tensor, model) if rule.weight is not None]
        return float(value_at([self.weights()[model], *rules][-1], depth))

    def settings_for(
        self, tensor: str, model: int, depth: Fraction = OUTSIDE
    ) -> tuple[dict[str, Any], ...]:
        """The settings of every delta stage for one tensor of one model, at its depth."""
        overrides = dict(self.models[model].settings)
        if self._has_embedding_rate(tensor):
            overrides["drop_rate"] = self.embedding_drop_rate
        for rule in self._rules_for(tensor, model):
            overrides.update(rule.settings)
        return tuple(_at(depth, settings, overrides) for _, settings in self.chain[:-1])

    def sets(self, parameter: str, tensor: str, model: int) -> bool:
        """Whether a parameter of a delta stage is given for a tensor of a model, by any means."""
        return (
            any(parameter in self.stages.get(stage.name, {}) for stage, _ in self.chain[:-1])
            or parameter in self.models[model].settings
            or any(parameter in rule.settings for rule in self._rules_for(tensor, model))
            or (parameter == "drop_rate" and self._has_embedding_rate(tensor))
        )

    def _has_embedding_rate(self, tensor: str) -> bool:
        return self.embedding_drop_rate is not None and is_embedding(tensor)

    def combine_settings_for(self, tensor: str, depth: Fraction = OUTSIDE) -> dict[str, Any]:
        """The settings of the combine stage for one tensor: no single model's values count."""
        overrides: dict[str, Any] = {}
        for rule in self._rules_for(tensor, None):
            overrides.update(rule.settings)
        return _at(depth, self.chain[-1][1], overrides)

    def _rules_for(self, tensor: str, model: int | None) -> Iterator[TensorRule]:
        """The rules for a tensor of one model, or those that are for all models."""
        for rule, indices in self.rules:
            if (indices is None or model in indices) and rule.matches(tensor):
                yield rule

    @cached_property
    def rules(self) -> tuple[tuple[TensorRule, tuple[int, ...] | None], ...]:
        """The rules, and the models that each is for by number; None: all."""
        return tuple(
            (rule, None if rule.model is None else tuple(self._models_of(rule)))
            for rule in self.tensors
        )

    def _models_of(self, rule: TensorRule) -> Iterator[int]:
        names = [entry.name for entry in self.models]
        for word in rule.model or ():
            by_file = [i for i, entry in enumerate(self.models) if entry.file == as_path(word)]
            by_name = [i for i, name in enumerate(names) if name == word]
            if not by_file and len(by_name) > 1:
                files = ", ".join(str(self.models[index].file) for index in by_name)
                raise RecipeError(f"{rule}: {len(by_name)} models have that name; write {files}")
            if not by_file and not by_name:
                hint = did_you_mean(word, names)
                raise RecipeError(
                    f"{rule}: there is no model {word!r}{hint}; there are {', '.join(names)}"
                )
            yield from by_file or by_name

    def described_rules(self) -> list[list[Any]]:
        """The rules for tensors as plain values in which no path stands: models by number."""
        described: list[list[Any]] = []
        for rule, indices in self.rules:
            match = None if rule.match is None else list(rule.match)
            more = {"contains": rule.contains, "models": indices, "weight": rule.weight}
            given = {name: value for name, value in more.items() if value is not None}
            described.append([match, rule.settings, *([given] if given else [])])
        return described


def _at(depth: Fraction, settings: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """One stage's settings at a depth, with what takes their place."""
    return {name: value_at(given.get(name, value), depth) for name, value in settings.items()}
