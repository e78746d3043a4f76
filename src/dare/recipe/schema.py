"""What the user asks for: typed, strict, and the same as a TOML file or a Python object.

The two tables of a small recipe are enough:

    [dare]
    drop_rate = 0.9

    [models]
    base_file = "base.safetensors"
    merge_files = ["math.safetensors", "code.safetensors"]
    output_file = "merged.safetensors"

Everything else has a default. A stage's parameters stand in a table of its name. A model may be
an inline table with its own `weight`, `seed` and parameters. `[[tensors]]` rules set parameters
for the tensors whose names match; a later rule wins over an earlier one, and any rule over a
model's own value. A list in place of a number is its values from the first layer to the last.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from functools import cached_property, partial
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    field_validator,
    model_validator,
)

from dare.errors import RecipeError, did_you_mean
from dare.recipe.hub_names import looks_like_name
from dare.recipe.layers import OUTSIDE, Gradient, value_at
from dare.stages import STAGES, Stage, parse_method
from dare.stages.registry import Parameter
from dare.tensors.dtypes import weight_type
from dare.tensors.mask import check_drop_rate
from dare.tensors.names import is_embedding
from dare.tensors.sizes import parse_size


def _as_path(value: object) -> Path:
    if not isinstance(value, str | PathLike):
        raise ValueError("must be the path of a file or directory")
    try:
        return Path(value).expanduser()
    except RuntimeError as error:  # ~somebody who is not there
        raise ValueError(str(error)) from None


_WEIGHT = Parameter(
    "weight", None, TypeAdapter(float, config=ConfigDict(strict=True, allow_inf_nan=False))
)


def _as_weight(value: object) -> object:
    return None if value is None else _WEIGHT.check(value, "")


def _one_or_many(value: object) -> object:
    if isinstance(value, str):
        return (value,)
    return tuple(value) if isinstance(value, list) else value


def _with_lists(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as TOML would give them: what changes over the layers is a list."""
    return {
        name: list(value) if isinstance(value, tuple) else value for name, value in settings.items()
    }


Size = Annotated[int, BeforeValidator(parse_size), Field(gt=0, lt=1 << 63)]
AnyPath = Annotated[Path, BeforeValidator(_as_path)]
Weight = Annotated[float | Gradient | None, BeforeValidator(_as_weight)]
Words = Annotated[tuple[str, ...] | None, BeforeValidator(_one_or_many)]
OwnSettings = Annotated[dict[str, Any], AfterValidator(_with_lists)]


EmbeddingDropRate = Annotated[
    float,
    AfterValidator(partial(check_drop_rate, name="embedding_drop_rate")),
    Field(json_schema_extra={"minimum": 0, "exclusiveMaximum": 1}),
]


class _Strict(BaseModel):
    """Refuses unknown names and wrong types, in our words."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    def __init__(self, **given: Any) -> None:
        try:
            super().__init__(**given)
        except ValidationError as error:
            raise _explained(error, type(self)) from None


class ModelEntry(_Strict):
    """One fine-tune: its file or directory, its share, and what is different for it.

    >>> ModelEntry(file="math.safetensors", weight=0.5, settings={"drop_rate": 0.8}).weight
    0.5
    """

    if TYPE_CHECKING:  # fields take more than they are declared to hold: text for a path

        def __init__(self, **given: Any) -> None: ...

    file: AnyPath = Field(description="A safetensors file, or a directory that holds the model.")
    weight: Weight = Field(None, description="Its share; the usual one depends on the method.")
    seed: int | None = Field(None, ge=0, description="Its own seed, in place of seed + i.")
    settings: OwnSettings = Field(
        default_factory=dict, description="Parameters of delta stages that are different for it."
    )

    @property
    def name(self) -> str:
        """What the model is called in messages."""
        path = self.file
        if looks_like_name(path.as_posix()):
            path = Path(path.as_posix().partition("@")[0])
        if path.suffix != ".safetensors":
            return path.name
        generic = {"model", "pytorch_model", "adapter_model"}
        return path.parent.name if path.stem in generic and path.parent.name else path.stem


class TensorRule(_Strict):
    """Parameters for the tensors whose names match a pattern, or contain a text.

    >>> rule = TensorRule(contains="mlp", match="*.weight", settings={"drop_rate": 0.5})
    >>> rule.matches("layers.0.mlp.up.weight"), rule.matches("layers.0.mlp.up.bias")
    (True, False)
    """

    if TYPE_CHECKING:  # fields take more than they are declared to hold: text for a path

        def __init__(self, **given: Any) -> None: ...

    match: Words = Field(None, description="A pattern or a list of them: * and ? as in a shell.")
    contains: Words = Field(
        None, description="A text that stands in the name, or a list of them; beside match, both."
    )
    model: Words = Field(
        None, description="The model or models that it is for, by name or file; else all."
    )
    weight: Weight = Field(None, description="The models' weight for these tensors.")
    settings: OwnSettings = Field(
        default_factory=dict, description="Parameters of stages for these tensors."
    )

    @model_validator(mode="after")
    def _names_tensors(self) -> Self:
        if self.match is None and self.contains is None:
            raise RecipeError(
                "match is missing: a rule names its tensors by "
                'match = "*.mlp.*" or contains = "mlp"'
            )
        return self

    def matches(self, tensor: str) -> bool:
        """Say whether the rule applies to a tensor."""
        if self.match is not None and not any(
            fnmatch.fnmatchcase(tensor, pattern) for pattern in self.match
        ):
            return False
        return self.contains is None or any(text in tensor for text in self.contains)

    @property
    def told(self) -> str:
        """What the rule is for, in messages."""
        parts = [
            f"{word} {', '.join(map(repr, texts))}"
            for word, texts in (
                ("matching", self.match),
                ("containing", self.contains),
                ("of model", self.model),
            )
            if texts is not None
        ]
        return f"tensors {' '.join(parts)}"


Policy = Literal["error", "base"]


class Recipe(_Strict):
    """A merge, completely described.

    >>> recipe = Recipe(base="b.safetensors", models=["m.safetensors"], output="o.safetensors")
    >>> recipe.method, recipe.seed
    ('dare+linear', 42)
    """

    if TYPE_CHECKING:  # fields take more than they are declared to hold: text for a path

        def __init__(self, **given: Any) -> None: ...

    base: AnyPath = Field(description="The model that all were fine-tuned from: file or directory.")
    models: tuple[ModelEntry, ...] = Field(description="The fine-tunes to merge.")
    output: AnyPath | None = Field(
        None, description="Where the merged model goes: NAME.safetensors, or a directory."
    )

    method: str = Field(
        "dare+linear", description="Delta stages and one combine stage, joined by +."
    )
    stages: dict[str, dict[str, Any]] = Field(
        default_factory=dict, description="Parameters by stage name."
    )
    tensors: tuple[TensorRule, ...] = Field(
        (), description="Parameters for the tensors whose names match a pattern."
    )
    embedding_drop_rate: EmbeddingDropRate | None = Field(
        None, description="Drop rate of embeddings and head, if it shall be another."
    )
    seed: int = Field(42, ge=0, description="Model i uses seed + i unless it has its own.")
    scale: float = Field(1.0, description="Factor λ on the merged delta.")
    dtype: str | None = Field(
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
    copy_from: str | None = Field(
        None, description="The model whose config and tokenizer an output directory gets."
    )
    chat_template: str = Field(
        "auto", description="Of the output: auto, a model's name, a file, or the template itself."
    )
    allow_pickle: bool = Field(
        False, description="Also read pytorch_model.bin and the like, by torch, weights only."
    )

    delta_threshold: float = Field(
        0.002, ge=0, description="Elements whose |δ| exceeds this are counted, and warned of."
    )
    verbose: bool = Field(True, description="Show progress and warnings.")
    shard_size: Size | None = Field(
        None, description="Largest output file, such as 5GB; the output is then a directory."
    )
    max_memory: Size = Field(
        1 << 30,
        description="What buffers may take, such as 512MiB; the process takes about 200 MB more.",
    )
    threads: int | None = Field(
        None, gt=0, description="Worker threads; one for each core if not given."
    )
    input_digests: tuple[str, ...] | None = Field(
        None, description="What the inputs must hash to, base first, as their manifest says."
    )

    @field_validator("models", mode="before")
    @classmethod
    def _entries(cls, value: object) -> object:
        if isinstance(value, str | PathLike):
            value = [value]
        if not isinstance(value, Sequence):
            return value
        if not value:
            raise RecipeError("no models: name at least one (merge_files in TOML, or --merge)")
        return tuple(
            ModelEntry(file=entry) if isinstance(entry, str | PathLike) else entry
            for entry in value
        )

    @field_validator("tensors", "input_digests", mode="before")
    @classmethod
    def _as_tuple(cls, value: object) -> object:
        return tuple(value) if isinstance(value, list) else value

    @field_validator("dtype", mode="before")
    @classmethod
    def _weight_type(cls, value: object) -> object:
        return None if value is None else weight_type(value).name

    @field_validator("stages")
    @classmethod
    def _without_gaps(cls, value: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        """None is no value in TOML, and what it says is said by leaving the key out."""
        given = {
            stage: _with_lists({name: v for name, v in table.items() if v is not None})
            for stage, table in value.items()
        }
        return {stage: table for stage, table in given.items() if table or stage not in STAGES}

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """A recipe with some fields changed, checked like any other."""
        del deep  # nothing in a recipe can be changed
        fields = {name: getattr(self, name) for name in type(self).model_fields}
        return type(self)(**(fields | dict(update or {})))

    @model_validator(mode="after")
    def _chain_fits(self) -> Self:
        chain = self.chain
        names = [stage.name for stage, _ in chain]
        for name in self.stages:
            if name not in STAGES:
                raise RecipeError(f"[{name}]: no such stage{did_you_mean(name, STAGES)}")
            if name not in names:
                raise RecipeError(
                    f"[{name}] would have no effect: method {self.method!r} has the stages "
                    f"{', '.join(names)}"
                )
        for entry in self.models:
            self._check_overrides(entry.settings, f"model {entry.name}: ", combine=False)
        for rule, whose in zip(self.tensors, self._rule_models, strict=True):
            self._check_overrides(rule.settings, f"{rule.told}: ", combine=whose is None)
        combine = chain[-1][0]
        if combine.models not in (None, len(self.models)):
            raise RecipeError(
                f"{combine.name} merges {combine.models} models, and {len(self.models)} are given"
            )
        if combine.default_weight is None:
            weights = {f"model {entry.name}": entry.weight for entry in self.models}
            weights |= {rule.told: rule.weight for rule in self.tensors}
            for where, weight in weights.items():
                if weight is not None:
                    raise RecipeError(
                        f"{where}: {combine.name} takes no weights; "
                        f"its parameters are {', '.join(combine.parameters)}"
                    )
        if self.input_digests is not None and len(self.input_digests) != 1 + len(self.models):
            raise RecipeError(
                f"input_digests: {len(self.input_digests)} given for a base and "
                f"{len(self.models)} models"
            )
        if self.embedding_drop_rate is not None and "drop_rate" not in self._parameters(False):
            raise RecipeError(
                f"embedding_drop_rate would have no effect: method {self.method!r} drops nothing"
            )
        return self

    def _parameters(self, combine: bool) -> set[str]:
        return {
            name
            for stage, _ in self.chain
            if combine or stage.kind == "delta"
            for name in stage.parameters
        }

    def _check_overrides(self, settings: Mapping[str, Any], where: str, *, combine: bool) -> None:
        known = self._parameters(combine)
        for name, value in settings.items():
            if name not in known:
                hint = did_you_mean(name, known)
                raise RecipeError(
                    f"{where}{name} is not a parameter here{hint}; "
                    f"known: {', '.join(sorted(known)) or 'none'}"
                )
            for stage, _ in self.chain:
                if name in stage.parameters:
                    stage.parameters[name].check(value, where)

    @cached_property
    def chain(self) -> tuple[tuple[Stage, dict[str, Any]], ...]:
        """The stages with their settings, before any model's or tensor's own values."""
        stages = parse_method(self.method)
        given = {name: dict(table) for name, table in self.stages.items()}
        chain = []
        for stage in stages:
            table = given.get(stage.name, {})
            settings = stage.settings(table, f"[{stage.name}] ")
            for parameter, implied in stage.preceded_by.items():
                overridden = any(parameter in entry.settings for entry in self.models) or any(
                    parameter in rule.settings for rule in self.tensors
                )
                value = settings[parameter]
                if STAGES[implied] not in stages:
                    if value is not None or overridden:
                        default = {parameter: 1.0 if value is None else value}
                        chain.append((STAGES[implied], STAGES[implied].settings(default, "")))
                elif value is not None:
                    raise RecipeError(
                        f"[{stage.name}] {parameter}: method {self.method!r} has the stage "
                        f"{implied!r} already; set it in [{implied}]"
                    )
            chain.append((stage, settings))
        return tuple(chain)

    def seeds(self) -> tuple[int, ...]:
        """The seed of each model."""
        return tuple(
            self.seed + index if entry.seed is None else entry.seed
            for index, entry in enumerate(self.models)
        )

    def weights(self) -> tuple[float | Gradient, ...]:
        """The weight of each model, before any tensor's own."""
        default = self.chain[-1][0].default_weight
        usual = default(len(self.models)) if default else 1.0
        return tuple(usual if entry.weight is None else entry.weight for entry in self.models)

    def weight_for(self, tensor: str, model: int, depth: Fraction = OUTSIDE) -> float:
        """The weight of one model for one tensor, which stands so deep in the stack of layers."""
        weight = self.weights()[model]
        for rule in self._rules_for(tensor, model):
            weight = weight if rule.weight is None else rule.weight
        return float(value_at(weight, depth))

    def settings_for(
        self, tensor: str, model: int, depth: Fraction = OUTSIDE
    ) -> tuple[dict[str, Any], ...]:
        """The settings of every delta stage for one tensor of one model, at its depth."""
        overrides = dict(self.models[model].settings)
        if self.embedding_drop_rate is not None and is_embedding(tensor):
            overrides["drop_rate"] = self.embedding_drop_rate
        for rule in self._rules_for(tensor, model):
            overrides.update(rule.settings)
        return tuple(_at(depth, settings, overrides) for _, settings in self.chain[:-1])

    def combine_settings_for(self, tensor: str, depth: Fraction = OUTSIDE) -> dict[str, Any]:
        """The settings of the combine stage for one tensor: no single model's values count."""
        overrides: dict[str, Any] = {}
        for rule in self._rules_for(tensor, None):
            overrides.update(rule.settings)
        return _at(depth, self.chain[-1][1], overrides)

    def _rules_for(self, tensor: str, model: int | None) -> Iterator[TensorRule]:
        """The rules for a tensor of one model, or those that are for all models."""
        for rule, whose in zip(self.tensors, self._rule_models, strict=True):
            if (whose is None or model in whose) and rule.matches(tensor):
                yield rule

    @cached_property
    def _rule_models(self) -> tuple[tuple[int, ...] | None, ...]:
        """The models that each rule is for; None: all."""
        return tuple(
            None
            if rule.model is None
            else tuple(index for word in rule.model for index in self._models_called(word, rule))
            for rule in self.tensors
        )

    def _models_called(self, word: str, rule: TensorRule) -> list[int]:
        by_file = [i for i, entry in enumerate(self.models) if entry.file == _as_path(word)]
        by_name = [i for i, entry in enumerate(self.models) if entry.name == word]
        if by_file:
            return by_file
        if len(by_name) == 1:
            return by_name
        if by_name:
            files = ", ".join(str(self.models[index].file) for index in by_name)
            raise RecipeError(f"{rule.told}: {len(by_name)} models have that name; write {files}")
        names = [entry.name for entry in self.models]
        raise RecipeError(
            f"{rule.told}: there is no model {word!r}{did_you_mean(word, names)}; "
            f"there are {', '.join(names)}"
        )

    def with_files(self, base: Path, files: Sequence[Path], output: Path | None) -> Self:
        """The same recipe with its files elsewhere; rules go on being for the same models."""
        entries = tuple(
            entry.model_copy(update={"file": file})
            for entry, file in zip(self.models, files, strict=True)
        )
        rules = tuple(
            rule
            if whose is None
            else rule.model_copy(update={"model": tuple(str(files[index]) for index in whose)})
            for rule, whose in zip(self.tensors, self._rule_models, strict=True)
        )
        files_and_rules = {"base": base, "models": entries, "output": output, "tensors": rules}
        return self.model_copy(update=files_and_rules)

    def described_rules(self) -> list[list[Any]]:
        """The rules for tensors as plain values in which no path stands: models by number."""
        described: list[list[Any]] = []
        for rule, whose in zip(self.tensors, self._rule_models, strict=True):
            match = None if rule.match is None else list(rule.match)
            more = {"contains": rule.contains, "models": whose, "weight": rule.weight}
            given = {name: value for name, value in more.items() if value is not None}
            described.append([match, rule.settings, *([given] if given else [])])
        return described

    def to_toml(self) -> str:
        """Write the recipe as TOML; `load_recipe` reads it back to an equal recipe."""
        import tomli_w

        return tomli_w.dumps(self.to_document())

    def to_document(self) -> dict[str, Any]:
        """The recipe as the plain tables of its TOML form, without what is at its default."""
        plain = self.model_dump(mode="json", exclude_defaults=True)
        base, output = plain.pop("base"), plain.pop("output", None)
        models = [
            entry["file"] if set(entry) == {"file"} else _flat(entry)
            for entry in plain.pop("models")
        ]
        rules = [_flat(rule) for rule in plain.pop("tensors", [])]
        stages = plain.pop("stages", {})
        document: dict[str, Any] = dict(plain)
        document["models"] = {"base_file": base, "merge_files": models}
        if output is not None:
            document["models"]["output_file"] = output
        document.update(stages)
        if rules:
            document["tensors"] = rules
        return document


def _at(
    depth: Fraction, settings: Mapping[str, Any], overrides: Mapping[str, Any]
) -> dict[str, Any]:
    """One stage's settings at a depth, with what takes their place."""
    return {name: value_at(overrides.get(name, value), depth) for name, value in settings.items()}


def _flat(entry: dict[str, Any]) -> dict[str, Any]:
    """Undo `_nested`."""
    fields = {key: value for key, value in entry.items() if key != "settings"}
    settings: dict[str, Any] = entry.get("settings", {})
    return fields | settings


def _explained(error: ValidationError, model: type[BaseModel]) -> RecipeError:
    """Say the first thing that is wrong in our words."""
    first = error.errors()[0]
    cause = first.get("ctx", {}).get("error")
    name = ".".join(map(str, first["loc"]))
    if isinstance(cause, RecipeError):
        return cause
    if first["type"] == "extra_forbidden":
        for stage in STAGES.values():
            if name in stage.parameters:
                return RecipeError(
                    f"{name}: is a parameter of {stage.name}: "
                    f"stages={{{stage.name!r}: {{{name!r}: …}}}}"
                )
        return RecipeError(f"{name}: not known{did_you_mean(name, model.model_fields)}")
    if first["type"] == "missing":
        return RecipeError(f"{name} is missing")
    reason = str(cause) if cause else first["msg"]
    return RecipeError(f"{name} = {first['input']!r}: {reason}")
