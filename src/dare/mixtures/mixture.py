"""The recipe of a mixture: typed and strict, from TOML, from mergekit-moe's YAML or an output."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from os import PathLike
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from dare.documents.words import times
from dare.errors import InputError, RecipeError
from dare.output.receipt import find_manifest, output_of, read_manifest, resolve_path
from dare.recipe.entries import AnyPath, Strict, as_tuple, read_toml
from dare.recipe.mergekit.nodes import Node, as_items, as_table, as_text, read_yaml
from dare.recipe.options import RunOptions, Size
from dare.recipe.recipe import WeightType
from dare.stores.locations import to_path

RANDOM = ("random", "uniform_random")  # gates that take no prompts
HIDDEN = ("hidden", "hidden_last", "hidden_avg")  # gates that torch computes
GateKind = Literal["hidden", "hidden_last", "hidden_avg", "cheap_embed", "random", "uniform_random"]
Prompts = Annotated[tuple[str, ...], BeforeValidator(as_tuple)]


class Expert(Strict, init=False):
    """A model whose MLPs become one expert of every layer."""

    model: AnyPath = Field(description="A fine-tune of the base: file, directory or adapter.")
    prompts: Prompts = Field((), description="Texts of the kind that it shall answer.")
    negative_prompts: Prompts = Field((), description="Texts that others shall answer.")
    residual_scale: float = Field(1.0, description="Factor on what it adds to the stream.")
    noise_scale: float = Field(0.0, ge=0, description="Deviation of noise added to its weights.")


def _read_experts(value: object) -> object:
    if not isinstance(value, list | tuple):
        return value
    return tuple(Expert(**entry) if isinstance(entry, Mapping) else entry for entry in value)


Experts = Annotated[tuple[Expert, ...], BeforeValidator(_read_experts)]


class Mixture(Strict, init=False):
    """A mixture of experts, completely described."""

    base: AnyPath = Field(description="Gives all but the MLPs, configuration and tokenizer.")
    experts: Experts = Field(description="The models that a layer's gate chooses from.")
    shared_experts: Experts = Field((), description="Experts that every token goes through.")
    architecture: str | None = Field(None, description="The layout; else the first that fits.")
    experts_per_token: int = Field(2, ge=1, description="Experts that each token goes through.")
    gates: GateKind = Field("hidden", description="How gates are made.")
    seed: int = Field(42, ge=0, description="Seed of random gates and of noise.")
    dtype: WeightType = Field(None, description="Storage type; else each tensor has the base's.")
    output: AnyPath | None = Field(None, description="The directory that it goes to.")
    shard_size: Size | None = Field(None, description="Largest output file, such as 5GB.")
    allow_pickle: bool = Field(False, description="Also read pytorch_model.bin, weights only.")
    output_digest: str | None = Field(None, description="What the weights must hash to.")

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if problem := next(self._problems(), None):
            raise RecipeError(problem)
        return self

    def _problems(self) -> Iterator[str]:
        count = len(self.experts)
        if count < self.experts_per_token:
            few = f"and there {times(count, 'expert is', 'experts are')}; name more, or lower it"
            yield f"experts_per_token = {self.experts_per_token}: {few}"
        if self.gates in RANDOM:
            return
        for expert in self.experts:
            if not expert.prompts:
                remedy = 'give it some, or set gates = "random" and train the gates'
                yield f"{expert.model}: has no prompts, which its gates are made of; {remedy}"
        if count > 1 and len({(e.prompts, e.negative_prompts) for e in self.experts}) == 1:
            remedy = "give each expert prompts of its own"
            yield f"prompts: are the same for all experts, so gates cannot tell them apart; {remedy}"

    @property
    def gated(self) -> tuple[Expert, ...]:
        """The experts that a gate is made for; shared ones come last, and only with prompts."""
        is_random = self.gates in RANDOM
        return (*self.experts, *(e for e in self.shared_experts if e.prompts or is_random))

    def with_files(self, change: Callable[[Path], Path]) -> Self:
        """Return the mixture with other paths for its models."""
        changed = {
            key: [e.model_copy(update={"model": change(e.model)}) for e in getattr(self, key)]
            for key in ("experts", "shared_experts")
        }
        return self.model_copy(update={"base": change(self.base), **changed})

    def to_tables(self) -> dict[str, Any]:
        """Return the mixture as plain tables, without defaults and without its output."""
        left_out = {"output", "output_digest"}
        return self.model_dump(mode="json", exclude_defaults=True, exclude=left_out)


# ---------------------------------------------------------------- reading


def load_mixture(
    recipe: str | PathLike[str] | Mapping[str, Any], **settings: Any
) -> tuple[Mixture, RunOptions]:
    """Read a mixture, and how to run it; settings that are not None are laid over it."""
    where = "recipe" if isinstance(recipe, Mapping) else str(recipe)
    given = {name: value for name, value in settings.items() if value is not None}
    document = dict(recipe) if isinstance(recipe, Mapping) else _load_document(to_path(recipe))
    if given.keys() - {"output", "shard_size"} - RunOptions.model_fields.keys():
        document.pop("output_digest", None)  # other weights are asked for
    document |= given
    options = {name: document.pop(name) for name in RunOptions.model_fields if name in document}
    try:
        return Mixture(**document), RunOptions(**options)
    except RecipeError as error:
        raise RecipeError(f"{where}: {error}") from None


def _load_document(path: Path) -> dict[str, Any]:
    if path.suffix.lower() in (".yaml", ".yml"):
        return _convert_yaml(path)
    if (file := find_manifest(path)) is None:
        return read_toml(path)
    manifest = read_manifest(file)
    if not isinstance(tables := manifest.get("mixture"), dict):
        raise InputError(f"{path}: is not a mixture; to make it again, run dare {path}")
    output = output_of(file)
    recorded = Mixture(**tables)
    document = recorded.with_files(lambda model: resolve_path(str(model), output)).to_tables()
    # torch gives other last bits on other machines
    same = {} if recorded.gates in HIDDEN else {"output_digest": manifest["output"]}
    return {**document, **same, "output": output}


# Keys of mergekit-moe by ours, and the beginnings of its names of architectures.
OF_MIXTURES = {"base_model": "base", "gate_mode": "gates"} | {
    key: key for key in ("experts", "shared_experts", "architecture", "experts_per_token", "dtype")
}
OF_EXPERTS = {"source_model": "model", "positive_prompts": "prompts"} | {
    key: key for key in ("negative_prompts", "residual_scale", "noise_scale")
}
ARCHITECTURES = {
    "mixtral": "mixtral",
    "deepseek moe": "deepseek",
    "qwen moe": "qwen2_moe",
    "qwen3 moe": "qwen3_moe",
}


def _convert_yaml(path: Path) -> dict[str, Any]:
    """Read mergekit-moe's configuration as our tables."""
    what = "a configuration of mergekit-moe"
    table = as_table(read_yaml(path), OF_MIXTURES, what, required="base_model")
    document = {OF_MIXTURES[key]: node.plain for key, node in table.items()}
    for key in {"experts", "shared_experts"} & table.keys():
        document[key] = list(map(_convert_expert, as_items(table[key], key)))
    if node := table.get("architecture"):
        word = as_text(node, "architecture").lower()
        found = next((ours for name, ours in ARCHITECTURES.items() if name.startswith(word)), word)
        document["architecture"] = found
    return document


def _convert_expert(node: Node) -> dict[str, Any]:
    table = as_table(node, OF_EXPERTS, "an expert", required="source_model")
    return {OF_EXPERTS[key]: value.plain for key, value in table.items()}
