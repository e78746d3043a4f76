"""A recipe says what is merged: typed, strict, and the same as a TOML file or a Python object.

Three names and a rate are enough:

    base = "base.safetensors"
    models = ["math.safetensors", "code.safetensors"]
    output = "merged.safetensors"

    [dare]
    drop_rate = 0.9

Everything else has a default; `naming` has the other names of the first three. A stage's
parameters stand in a table of its name. A model may be an inline table with a `weight`, a
`seed` and parameters. `[[tensors]]` rules set parameters for the tensors whose names match. A list
in place of a number is its values from the first layer to the last.

A rule for tensors wins over the rate of embeddings, that over a model's own value, and that over
the stage's table; a later rule wins over an earlier one. Values that change over the layers are
taken at the tensor's depth.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property, partial
from os import PathLike
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, field_validator, model_validator

from dare.documents.words import times
from dare.errors import RecipeError, did_you_mean
from dare.recipe.entries import (
    NOT_RECORDED,
    OTHER_NAMES,
    SAME_WEIGHTS,
    AnyPath,
    ModelEntry,
    Strict,
    TensorRule,
    as_path,
    as_tuple,
    flat,
    with_lists,
    write_toml,
    written_models,
)
from dare.recipe.layers import OUTSIDE, Gradient, value_at
from dare.recipe.options import USUAL, RunOptions, Size
from dare.recipe.search import Search, search_table
from dare.stages import IMPLIED, STAGES, Stage, parse_method
from dare.tensors.dtypes import weight_type
from dare.tensors.mask import check_drop_rate
from dare.tensors.names import is_embedding

__all__ = ["ModelEntry", "Recipe", "Request", "TensorRule"]

EmbeddingDropRate = Annotated[
    float,
    AfterValidator(partial(check_drop_rate, name="embedding_drop_rate")),
    Field(json_schema_extra={"minimum": 0, "exclusiveMaximum": 1}),
]

WeightType = Annotated[
    str | None, BeforeValidator(lambda name: None if name is None else weight_type(name).name)
]
Policy = Literal["error", "base"]
Chain = tuple[tuple[Stage, dict[str, Any]], ...]


class Recipe(Strict, init=False):
    """A merge, completely described.

    >>> recipe = Recipe(base="b.safetensors", models=["m.safetensors"], output="o.safetensors")
    >>> recipe.method, recipe.seed
    ('dare+linear', 42)
    """

    base: AnyPath = Field(description="The model that all were fine-tuned from: file or directory.")
    models: tuple[ModelEntry, ...] = Field(description="The fine-tunes to merge.")
    output: Annotated[AnyPath | None, SAME_WEIGHTS] = Field(
        None, description="Where the merged model goes: NAME.safetensors, or a directory."
    )

    method: str = Field(
        "dare+linear", description="Delta stages and one combine stage, joined by +."
    )
    stages: dict[str, dict[str, Any]] = Field(
        default_factory=dict, description="Parameters by stage name."
    )
    tensors: Annotated[tuple[TensorRule, ...], BeforeValidator(as_tuple)] = Field(
        (), description="Parameters for the tensors whose names match a pattern."
    )
    embedding_drop_rate: EmbeddingDropRate | None = Field(
        None, description="Drop rate of embeddings and head, if it differs."
    )
    seed: int = Field(42, ge=0, description="Model i uses seed + i, unless it has a seed.")
    scale: float = Field(1.0, description="Factor λ on the merged delta.")
    dtype: WeightType = Field(
        None, description="Storage type of the merged weights (F32, BF16, …); else the base's."
    )

    on_missing: Policy = Field(
        "error", description="A tensor that a model lacks: refuse, or count its delta as zero."
    )
    on_extra: Literal["error", "drop"] = Field(
        "error", description="A tensor that only models have: refuse, or leave it out."
    )
    on_mismatch: Policy = Field(
        "error", description="A tensor of another shape in a model: refuse, or keep the base's."
    )
    on_integer_mismatch: Policy = Field(
        "error", description="Integer tensors that differ: refuse, or keep the base's."
    )

    vocabulary: Literal["error", "base", "union"] = Field(
        "error", description="Tokens that differ: refuse, keep the base's, or merge them all."
    )
    pad_to_multiple_of: int | None = Field(
        None, gt=0, description="Rows of zeros are added to embedding and head up to this."
    )
    copy_from: Annotated[str | None, SAME_WEIGHTS] = Field(
        None, description="The model whose config and tokenizer an output directory gets."
    )
    chat_template: Annotated[str, SAME_WEIGHTS] = Field(
        "auto", description="Of the output: auto, a model's name, a file, or the template itself."
    )
    allow_pickle: Annotated[bool, SAME_WEIGHTS] = Field(
        False, description="Also read pytorch_model.bin and the like, by torch, weights only."
    )
    allow_not_finite: Annotated[bool, SAME_WEIGHTS] = Field(
        False, description="Merge inputs with NaN or infinite elements all the same."
    )

    delta_threshold: Annotated[float, SAME_WEIGHTS] = Field(
        0.002, ge=0, description="Elements whose |δ| exceeds this are counted, and warned of."
    )
    shard_size: Annotated[Size | None, SAME_WEIGHTS] = Field(
        None, description="Largest output file, such as 5GB; the output is then a directory."
    )
    input_digests: Annotated[tuple[str, ...] | None, BeforeValidator(as_tuple), NOT_RECORDED] = (
        Field(None, description="What the inputs must hash to, base first, as their manifest says.")
    )

    output_digest: Annotated[str | None, SAME_WEIGHTS, NOT_RECORDED] = Field(
        None, description="What the merged weights must hash to, as their manifest says."
    )

    search: Annotated[Search | None, BeforeValidator(search_table), SAME_WEIGHTS, NOT_RECORDED] = (
        Field(None, description="What a search around this recipe tries; a merge leaves it aside.")
    )

    @classmethod
    def unknown(cls, name: str) -> str:
        if name in RunOptions.model_fields:
            return f"{name}: says how a merge runs, not what: give it to merge(…, {name}=…)"
        known = (*cls.model_fields, *RunOptions.model_fields)
        return f"{name}: not known{did_you_mean(name, known)}"

    @field_validator("models", mode="before")
    @classmethod
    def _entries(cls, value: object) -> object:
        if isinstance(value, str | PathLike):
            value = [value]
        if not isinstance(value, Sequence):
            return value
        return tuple(ModelEntry(file=e) if isinstance(e, str | PathLike) else e for e in value)

    @field_validator("method")
    @classmethod
    def _stages_by_name(cls, value: str) -> str:
        """Write a method that has a name of its own as its stages."""
        return "+".join(stage.name for stage in parse_method(value))

    @field_validator("stages")
    @classmethod
    def _without_gaps(cls, value: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        """Leave out keys whose value is None: TOML has no such value."""
        given = {
            stage: with_lists({name: v for name, v in table.items() if v is not None})
            for stage, table in value.items()
        }
        return {stage: table for stage, table in given.items() if table or stage not in STAGES}

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if problem := next(self._problems(), None):
            raise RecipeError(problem)
        return self

    def _problems(self) -> Iterator[str]:
        """Yield what does not go together, where each value alone may be right."""
        names = [stage.name for stage, _ in self.chain]
        for name in self.stages:
            if name not in STAGES:
                yield f"[{name}]: no such stage{did_you_mean(name, STAGES)}"
            elif name not in names:
                yield f"[{name}] would have no effect: method {self.method!r} is {', '.join(names)}"
        for entry in self.models:
            yield from self._override_problems(entry.settings, f"model {entry.name}: ", False)
        for rule, indices in self.rules:
            yield from self._override_problems(rule.settings, f"{rule}: ", indices is None)
        combine = self.chain[-1][0]
        if combine.models not in (None, len(self.models)):
            yield self._wrong_count(combine)
        weighed = {f"model {entry.name}": entry.weight for entry in self.models}
        weighed |= {str(rule): rule.weight for rule in self.tensors}
        for where, weight in weighed.items():
            if weight is not None and combine.default_weight is None:
                known = ", ".join(combine.parameters)
                yield f"{where}: {combine.name} takes no weights; it takes {known}"
        if self.input_digests is not None and len(self.input_digests) != 1 + len(self.models):
            yield f"input_digests: {len(self.input_digests)} given for {1 + len(self.models)} files"
        drops = any("drop_rate" in stage.parameters for stage, _ in self.chain[:-1])
        if self.embedding_drop_rate is not None and not drops:
            yield f"embedding_drop_rate would have no effect: method {self.method!r} drops nothing"

    def _wrong_count(self, combine: Stage) -> str:
        """Say how many models a combine stage takes, how many there are, and the remedy."""
        found = times(len(self.models), "is", "are")
        said = f"{combine.name} merges {combine.models} models, and {found} given"
        if combine.interpolates is None:
            return said
        if len(self.models) == 1:
            files = [self.base, self.models[0].file]
            return f"{said}; to go from the base to it, {written_models(files)}"
        kin = (s for s in STAGES.values() if s.interpolates is not None and s.models is None)
        return f"{said} besides the base; {', '.join(s.name for s in kin)} takes any number"

    def _override_problems(
        self, settings: Mapping[str, Any], where: str, may_combine: bool
    ) -> Iterator[str]:
        stages = [stage for stage, _ in (self.chain if may_combine else self.chain[:-1])]
        known = {name for stage in stages for name in stage.parameters}
        for name, value in settings.items():
            if name not in known:
                yield (
                    f"{where}{name} is not a parameter here{did_you_mean(name, known)}; "
                    f"known: {', '.join(sorted(known)) or 'none'}"
                )
            for stage, _ in self.chain:
                if name in stage.parameters:
                    stage.parameters[name].check(value, where)

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
                    fault = f"method {self.method!r} has the stage {implied!r} already"
                    where = f"[{stage.name}] {parameter}"
                    raise RecipeError(f"{where}: {fault}; set it in [{implied}]")
            chain.append((stage, settings))
        return tuple(chain)

    @property
    def interpolates(self) -> bool:
        """True if whole models are interpolated, so that the base may be one of them."""
        stage, settings = self.chain[-1]
        return stage.interpolates is not None and stage.interpolates.items() <= settings.items()

    def seeds(self) -> tuple[int, ...]:
        """Return the seed of each model."""
        return tuple(self.seed + n if e.seed is None else e.seed for n, e in enumerate(self.models))

    def weights(self) -> tuple[float | Gradient, ...]:
        """Return the weight of each model, before any tensor's own."""
        default = self.chain[-1][0].default_weight
        usual = default(max(1, len(self.models))) if default else 1.0
        return tuple(usual if entry.weight is None else entry.weight for entry in self.models)

    def weight_for(self, tensor: str, model: int, depth: Fraction = OUTSIDE) -> float:
        """Return the weight of one model for one tensor at its depth."""
        rules = [rule.weight for rule in self._rules_for(tensor, model) if rule.weight is not None]
        weight = [self.weights()[model], *rules][-1]
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
        return tuple(_at(depth, settings, overrides) for _, settings in self.chain[:-1])

    def sets(self, parameter: str, tensor: str, model: int) -> bool:
        """Return whether a parameter of a delta stage is given for a tensor of a model."""
        return (
            any(parameter in self.stages.get(stage.name, {}) for stage, _ in self.chain[:-1])
            or parameter in self.models[model].settings
            or any(parameter in rule.settings for rule in self._rules_for(tensor, model))
            or (parameter == "drop_rate" and self._has_embedding_rate(tensor))
        )

    def _has_embedding_rate(self, tensor: str) -> bool:
        return self.embedding_drop_rate is not None and is_embedding(tensor)

    def combine_settings_for(self, tensor: str, depth: Fraction = OUTSIDE) -> dict[str, Any]:
        """Return the combine stage's settings for one tensor: no model's own values count."""
        rules = self._rules_for(tensor, None)
        given = {name: value for rule in rules for name, value in rule.settings.items()}
        return _at(depth, self.chain[-1][1], given)

    def _rules_for(self, tensor: str, model: int | None) -> Iterator[TensorRule]:
        """Yield the rules for a tensor of one model, or those that are for all models."""
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
        """Return the rules for tensors as plain values without paths: models by number."""
        described: list[list[Any]] = []
        for rule, indices in self.rules:
            match = None if rule.match is None else list(rule.match)
            more = {"contains": rule.contains, "models": indices, "weight": rule.weight}
            given = {name: value for name, value in more.items() if value is not None}
            described.append([match, rule.settings, *([given] if given else [])])
        return described

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Return a recipe with some fields changed, checked like any other.

        One that gives other weights no longer demands those of a manifest.
        """
        others = {"output_digest": None} if set(update or ()) - self.marked(SAME_WEIGHTS) else {}
        return super().model_copy(update=others | dict(update or {}), deep=deep)

    def with_files(self, base: Path, files: Sequence[Path], output: Path | None) -> Self:
        """Return the recipe with its files elsewhere; rules stay with the same models."""
        entries = tuple(
            entry.model_copy(update={"file": file})
            for entry, file in zip(self.models, files, strict=True)
        )
        rules = self.rules_of(dict(enumerate(files)))
        changed = {"base": base, "models": entries, "output": output, "tensors": rules}
        return self.model_copy(update={**changed, "output_digest": self.output_digest})

    def rules_of(self, files: Mapping[int, Path]) -> tuple[TensorRule, ...]:
        """Return the rules that concern some models, by number, with the files that these get."""
        rules = []
        for rule, indices in self.rules:
            own = tuple(str(files[index]) for index in indices or () if index in files)
            if indices is None or own:
                rules.append(rule if indices is None else rule.model_copy(update={"model": own}))
        return tuple(rules)

    @property
    def has_gradients(self) -> bool:
        """True if a value changes over the layers, so that the depth of a tensor matters."""
        entries: tuple[ModelEntry | TensorRule, ...] = (*self.models, *self.tensors)
        tables = [settings for _, settings in self.chain] + [entry.settings for entry in entries]
        values = [value for table in tables for value in table.values()]
        return any(isinstance(v, list) for v in (*values, *(entry.weight for entry in entries)))

    @property
    def has_given_threshold(self) -> bool:
        """True if the user has given `delta_threshold`, even if it is the default's value."""
        return "delta_threshold" in self.model_fields_set

    @property
    def paths(self) -> tuple[Path, ...]:
        """All files and directories that it names."""
        output = () if self.output is None else (self.output,)
        return (self.base, *(entry.file for entry in self.models), *output)

    def to_toml(self) -> str:
        """Write the recipe as TOML; `load_recipe` reads it back to an equal recipe."""
        return write_toml(self.to_tables())

    def to_tables(self) -> dict[str, Any]:
        """Return the recipe as plain tables, as people write it, without defaults."""
        plain = self.model_dump(mode="json", exclude_defaults=True, by_alias=True)
        plain["models"] = [e["file"] if set(e) == {"file"} else flat(e) for e in plain["models"]]
        rules = [flat(rule) for rule in plain.pop("tensors", [])]
        stages = plain.pop("stages", {})
        files = {name: plain.pop(name) for name in OTHER_NAMES if name in plain}
        return {**files, **plain, **stages, **({"tensors": rules} if rules else {})}

    def to_document(self) -> dict[str, Any]:
        """Return the tables as manifests hold them: with the files in a table [models]."""
        return Request(self).to_document()


def _at(depth: Fraction, settings: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return one stage's settings at a depth, some replaced by those that are given."""
    values = {name: given.get(name, value) for name, value in settings.items()}
    return {n: value_at(v, depth) if isinstance(v, list) else v for n, v in values.items()}


@dataclass(frozen=True)
class Request:
    """A recipe, and how it is to be run.

    >>> recipe = Recipe(base="b.safetensors", models=["m.safetensors"])
    >>> print(Request(recipe, RunOptions(threads=4)).to_toml())
    base = "b.safetensors"
    models = [
        "m.safetensors",
    ]
    threads = 4
    <BLANKLINE>
    """

    recipe: Recipe
    options: RunOptions = USUAL

    @classmethod
    def of(cls, **fields: Any) -> Self:
        """Build a request from the fields of a recipe and options, all by their names."""
        options = {name: fields.pop(name) for name in RunOptions.model_fields if name in fields}
        return cls(Recipe(**fields), RunOptions(**options))

    def changed(self, **fields: Any) -> Self:
        """Return the request with some fields and options changed, checked like any other."""
        options = {name: fields.pop(name) for name in RunOptions.model_fields if name in fields}
        recipe = self.recipe.model_copy(update=fields) if fields else self.recipe
        return replace(self, recipe=recipe, options=self.options.model_copy(update=options))

    def to_toml(self) -> str:
        """Write the request as TOML; `load_recipe` reads it back to an equal one."""
        return write_toml(self.to_tables())

    def to_tables(self) -> dict[str, Any]:
        """Return recipe and options as plain tables, as people write them, without defaults."""
        options = self.options.model_dump(mode="json", exclude_defaults=True)
        return {**self.recipe.to_tables(), **options}

    def to_document(self) -> dict[str, Any]:
        """Return the tables as manifests hold them: with the files in a table [models].

        Bytes of outputs depend on it, so it stays as it is.
        """
        tables = self.to_tables()
        files = {others[0]: tables.pop(own) for own, others in OTHER_NAMES.items() if own in tables}
        later = {*self.recipe.stages, "tensors"}
        fields = {key: value for key, value in tables.items() if key not in later}
        return {**fields, "models": files, **{key: tables[key] for key in tables if key in later}}
