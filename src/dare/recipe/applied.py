"""The models that a word denotes; the method, parameters and weight of each tensor of a model.

A rule for tensors has priority over the rate of embeddings, that over a model's value, and that
over the stage's table; a later rule has priority over an earlier one. Values that change over the
layers are taken at the tensor's depth.

A rule may name a method for its tensors. It does not count if a later rule names another method.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dare.errors import RecipeError, did_you_mean
from dare.recipe.entries import ModelEntry, TensorRule, as_path, model_names
from dare.recipe.layers import OUTSIDE, Gradient, value_at
from dare.stages import IMPLIED, STAGES, Stage, parse_method
from dare.stages.registry import Kind, combine_of, takers
from dare.tensors.names import is_embedding

Staged = tuple[Stage, dict[str, Any]]  # a stage with its settings


class Chain(tuple[Staged, ...]):
    """The stages of a method with their settings."""

    def of_kind(self, kind: Kind) -> tuple[Staged, ...]:
        """Return the stages of a kind."""
        return tuple(staged for staged in self if staged[0].kind == kind)

    @cached_property
    def combine(self) -> Stage:
        """The combine stage."""
        return combine_of(stage for stage, _ in self)


def names_of(chain: Chain) -> str:
    """Return the names of stages, joined as in a method."""
    return "+".join(stage.name for stage, _ in chain)


class AppliedSettings:
    """The part of a recipe that looks up its settings; the recipe itself declares the fields."""

    if TYPE_CHECKING:
        base: Path
        models: tuple[ModelEntry, ...]
        method: str
        stages: dict[str, dict[str, Any]]
        tensors: tuple[TensorRule, ...]
        layers: tuple[Any, ...]
        embedding_drop_rate: float | None
        seed: int

    @property
    def chain(self) -> Chain:
        """The stages of the recipe's method with their settings."""
        return self.chains[self.method]

    @cached_property
    def chains(self) -> dict[str, Chain]:
        """By method: the stages with their settings, without those of models and rules.

        The recipe's method comes first, then the methods that rules name.
        """
        named = (rule.method for rule in self.tensors if rule.method is not None)
        return {method: self._make_chain(method) for method in dict.fromkeys((self.method, *named))}

    @property
    def all_stages(self) -> Chain:
        """The stages of all methods with their settings."""
        return Chain(itertools.chain(*self.chains.values()))

    @property
    def methods(self) -> str:
        """All methods by the names of their stages, for reports."""
        return ", ".join(map(names_of, self.chains.values()))

    def method_for(self, tensor: str) -> str:
        """Return the method of a tensor: from the last rule that names one, else the recipe's."""
        named = (r.method for r in reversed(self.tensors) if r.method and r.matches(tensor))
        return next(named, self.method)

    def chain_for(self, tensor: str) -> Chain:
        """Return the stages for a tensor with their settings."""
        return self.chains[self.method_for(tensor)]

    def _make_chain(self, method: str) -> Chain:
        stages = parse_method(method)
        rules = [rule for rule in self.tensors if rule.method in (None, method)]
        entries: list[ModelEntry | TensorRule] = [*self.models, *rules]
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
                    fault = f"method {method!r} has the stage {implied!r} already"
                    where = f"[{stage.name}] {parameter}"
                    raise RecipeError(f"{where}: {fault}; set it in [{implied}]")
            chain.append((stage, settings))
        return Chain(chain)

    @property
    def interpolates(self) -> bool:
        """True if whole models are interpolated, so that the base may be one of them."""
        return all(
            combine.interpolates is not None and combine.interpolates.items() <= settings.items()
            for combine, settings in self.all_stages.of_kind("combine")
        )

    def seeds(self) -> tuple[int, ...]:
        """Return the seed of each model."""
        return tuple(self.seed + n if e.seed is None else e.seed for n, e in enumerate(self.models))

    def weights(self, method: str | None = None) -> tuple[float | Gradient, ...]:
        """Return the weight of each model without rules for tensors, for its or another method."""
        default = self.chains[method or self.method].combine.default_weight
        usual = default(len(self.models)) if default else 1.0
        return tuple(usual if entry.weight is None else entry.weight for entry in self.models)

    def weight_for(self, tensor: str, model: int, depth: Fraction = OUTSIDE) -> float:
        """Return the weight of one model for one tensor at its depth."""
        method = self.method_for(tensor)
        if self.chains[method].combine.default_weight is None:
            return 1.0
        rules = [rule.weight for rule in self._rules_for(tensor, model) if rule.weight is not None]
        weight = [self.weights(method)[model], *rules][-1]
        return value_at(weight, depth) if isinstance(weight, list) else float(weight)

    def settings_for(
        self, tensor: str, model: int, depth: Fraction = OUTSIDE
    ) -> tuple[dict[str, Any], ...]:
        """Return the settings of every delta stage for one tensor of one model, at its depth."""
        overrides = dict(self.models[model].settings)
        if self._has_embedding_rate(tensor):
            overrides["drop_rate"] = self.embedding_drop_rate
        for rule in self._rules_for(tensor, model):
            overrides.update(rule.settings)
        chain = self.chain_for(tensor)
        meant = {name: takers([stage for stage, _ in chain], name) for name in overrides}
        return tuple(
            _settings_at(depth, plain, {n: v for n, v in overrides.items() if stage in meant[n]})
            for stage, plain in chain.of_kind("delta")
        )

    def sets(self, parameter: str, tensor: str, model: int) -> bool:
        """Return whether a parameter of a delta stage is set for a tensor of a model."""
        stages = (stage.name for stage, _ in self.chain_for(tensor).of_kind("delta"))
        return (
            any(parameter in self.stages.get(stage, {}) for stage in stages)
            or parameter in self.models[model].settings
            or any(parameter in rule.settings for rule in self._rules_for(tensor, model))
            or (parameter == "drop_rate" and self._has_embedding_rate(tensor))
        )

    def kind_of(self, tensor: str) -> tuple[bool, ...]:
        """Tell tensors apart by name: those of one kind have equal settings at equal depths."""
        matched = (rule.matches(tensor) for rule in self.tensors)
        return (self._has_embedding_rate(tensor), *matched)

    def _has_embedding_rate(self, tensor: str) -> bool:
        return self.embedding_drop_rate is not None and is_embedding(tensor)

    def joint_settings_for(
        self, tensor: str, depth: Fraction = OUTSIDE
    ) -> tuple[dict[str, Any], ...]:
        """Return the settings of the combine stage and every refine stage for one tensor.

        The values of single models do not count.
        """
        rules = self._rules_for(tensor, None)
        given = {name: value for rule in rules for name, value in rule.settings.items()}
        chain = self.chain_for(tensor)
        return tuple(
            _settings_at(depth, plain, given) for stage, plain in chain if stage.kind != "delta"
        )

    def _rules_for(self, tensor: str, model: int | None) -> Iterator[TensorRule]:
        """Yield the rules for a tensor of one model, or for all models if `model` is None."""
        methods = None, self.method_for(tensor)
        for rule, indices in self.rules:
            is_for_it = rule.method in methods and (indices is None or model in indices)
            if is_for_it and rule.matches(tensor):
                yield rule

    @cached_property
    def rules(self) -> tuple[tuple[TensorRule, tuple[int, ...] | None], ...]:
        """The rules, each with the numbers of its models; None for all models."""
        return tuple(
            (rule, None if rule.model is None else tuple(self._models_of(rule)))
            for rule in self.tensors
        )

    def _models_of(self, rule: TensorRule) -> Iterator[int]:
        for word in rule.model or ():
            numbers = self.find_models(word, str(rule))
            if not numbers:
                raise RecipeError(f"{rule}: {self._unknown_model(word)}")
            yield from numbers

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names of the models."""
        return tuple(model_names(self.models))

    def find_models(self, word: str, where: str) -> list[int]:
        """Return the models that a name or a file denotes; refuse a name of several files."""
        models = self.models or [ModelEntry(file=entry.base) for entry in self.layers[-1:]]
        if by_file := [n for n, e in enumerate(models) if word and e.file == as_path(word)]:
            return by_file
        called = [n for n, entry in enumerate(models) if entry.is_called(word)]
        if len(called) < 2:
            return called or [n for n, name in enumerate(self.names) if name == word]
        names = (self.names[n] if self.names[n] != word else models[n].file for n in called)
        fault = f"{len(called)} models have that name"
        raise RecipeError(f"{where}: {fault}; write {', '.join(map(str, names))}")

    def find_input(self, word: str, where: str) -> int | None:
        """Return the number of the input that a name or a file denotes; 0 is the base."""
        models = [] if word == "base" else self.find_models(word, where)
        if models:
            return 1 + models[0]
        return 0 if word == "base" or (word and as_path(word) == self.base) else None

    def number_of(self, word: str, where: str, *others: str) -> int:
        """Return the number of an input; refuse an unknown one, and list the known names."""
        if (number := self.find_input(word, where)) is None:
            raise RecipeError(f"{where}: {self._unknown_model(word, *others)}")
        return number

    def _unknown_model(self, word: str, *others: str) -> str:
        known = (*self.names, *others)
        hint = f"{did_you_mean(word, known)}; there are {', '.join(known)}"
        return f"there is no model {word!r}{hint}"

    @property
    def has_gradients(self) -> bool:
        """True if a value changes over the layers, so that the depth of a tensor matters."""
        entries: tuple[ModelEntry | TensorRule, ...] = (*self.models, *self.tensors)
        tables = [table for _, table in self.all_stages] + [entry.settings for entry in entries]
        values = [value for table in tables for value in table.values()]
        return any(isinstance(v, list) for v in (*values, *(entry.weight for entry in entries)))

    def described_rules(self) -> list[list[Any]]:
        """Return the rules for tensors as plain values, with numbers instead of paths."""
        described: list[list[Any]] = []
        for rule, indices in self.rules:
            match = None if rule.match is None else list(rule.match)
            more: dict[str, Any] = {"contains": rule.contains, "models": indices}
            more |= {"weight": rule.weight, "method": rule.method}
            given = {name: value for name, value in more.items() if value is not None}
            described.append([match, rule.settings, *([given] if given else [])])
        return described


def _settings_at(
    depth: Fraction, settings: Mapping[str, Any], given: Mapping[str, Any]
) -> dict[str, Any]:
    """Return one stage's settings at a depth, with `given` values in place of others."""
    values = {name: given.get(name, value) for name, value in settings.items()}
    return {n: value_at(v, depth) if isinstance(v, list) else v for n, v in values.items()}
