"""The recipe of a mixture: typed and strict, from TOML, from mergekit-moe's YAML or an output."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from os import PathLike
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from dare.documents.values import Before, Finite
from dare.documents.words import counted
from dare.errors import InputError, RecipeError, warn_caller
from dare.output.receipt import (
    check_recorded,
    find_manifest,
    output_of,
    read_manifest,
    resolve_path,
)
from dare.recipe.document import errors_named
from dare.recipe.entries import AnyPath, as_tuple, read_toml
from dare.recipe.fields import Strict, described
from dare.recipe.mergekit.nodes import Node, as_items, as_table, read_yaml
from dare.recipe.options import RunOptions, Size
from dare.recipe.recipe import WeightType
from dare.stores.locations import to_path

LEFT_OUT = {"output", "output_digest"}  # fields that manifests do not record
RANDOM = ("random", "uniform_random")  # gates that take no prompts
GateKind = Literal["hidden", "hidden_last", "hidden_avg", "cheap_embed", "random", "uniform_random"]
Prompts = Annotated[tuple[str, ...], Before(as_tuple)]


class Expert(Strict):
    """A model whose MLPs become one expert of every layer."""

    model: AnyPath = described("A fine-tune of the base: file, folder or adapter.")
    prompts: Prompts = described("Prompts of the kind that it should answer.", ())
    negative_prompts: Prompts = described("Prompts that other experts should answer.", ())
    residual_scale: Finite = described("Factor on what it adds to the stream.", 1.0)
    noise_scale: Finite = described("Standard deviation of noise on its weights.", 0.0, ge=0)


def _read_experts(value: object) -> object:
    if not isinstance(value, list | tuple):
        return value
    return tuple(Expert(**entry) if isinstance(entry, Mapping) else entry for entry in value)


Experts = Annotated[tuple[Expert, ...], Before(_read_experts)]


class Mixture(Strict):
    """A mixture of experts, completely described."""

    base: AnyPath = described("The model that everything but the MLPs comes from.")
    experts: Experts = described("The models that a layer's gate chooses from.")
    shared_experts: Experts = described("Experts that every token goes through.", ())
    architecture: str | None = described("The layout; default: the first that fits.", None)
    experts_per_token: int = described("Experts that each token goes through.", 2, ge=1)
    gates: GateKind = described("How gates are made.", "hidden")
    seed: int = described("Seed of random gates and of noise.", 42, ge=0)
    dtype: WeightType = described("Storage type; default: the base's.", None)
    output: AnyPath | None = described("The folder of the mixture.", None)
    shard_size: Size | None = described("Largest output file, such as 5GB.", None)
    allow_pickle: bool = described("Also read pytorch_model.bin, weights only.", False)
    output_digest: str | None = described("Digest that the weights must have.", None)

    def check_together(self) -> None:
        given, wanted = len(self.experts), f"experts_per_token = {self.experts_per_token}"
        if given < self.experts_per_token:
            raise RecipeError(f"{wanted}: {counted(given, 'expert')} given; name more, or lower it")
        for expert in self.experts if self.gates not in RANDOM else ():
            if not expert.prompts:
                remedy = 'give it some, or set gates = "random" and train them'
                raise RecipeError(f"{expert.model}: has no prompts to make gates from; {remedy}")
        texts = {(expert.prompts, expert.negative_prompts) for expert in self.experts}
        if self.gates not in RANDOM and len(texts) == 1 < given:
            raise RecipeError("prompts: are the same for all experts; give each its own")

    @property
    def all_experts(self) -> tuple[Expert, ...]:
        """The experts, shared ones last."""
        return (*self.experts, *self.shared_experts)

    @property
    def gated(self) -> tuple[Expert, ...]:
        """The experts that a gate is made for; shared ones come last, and only with prompts."""
        shared = (e for e in self.shared_experts if e.prompts or self.gates in RANDOM)
        return (*self.experts, *shared)

    def with_files(self, change: Callable[[Path], Path]) -> Self:
        """Return the mixture with other paths for its models."""
        changed = {
            key: [e.changed(model=change(e.model)) for e in getattr(self, key)]
            for key in ("experts", "shared_experts")
        }
        return self.changed(base=change(self.base), **changed)

    def to_tables(self) -> dict[str, Any]:
        """Return the mixture as plain tables, without defaults and without its output."""
        tables = super().to_tables()
        return {key: value for key, value in tables.items() if key not in LEFT_OUT}


# ---------------------------------------------------------------- reading


def load_mixture(
    recipe: str | PathLike[str] | Mapping[str, Any], **settings: Any
) -> tuple[Mixture, RunOptions]:
    """Read a mixture, and how to run it; settings that are not None are laid over it."""
    where = "recipe" if isinstance(recipe, Mapping) else str(recipe)
    given = {name: value for name, value in settings.items() if value is not None}
    document = dict(recipe) if isinstance(recipe, Mapping) else _load_document(to_path(recipe))
    if given.keys() - {"output", "shard_size"} - RunOptions.fields().keys():
        document.pop("output_digest", None)  # other weights are asked for
    document |= given
    options = {name: document.pop(name) for name in RunOptions.fields() if name in document}
    with errors_named(where):
        return Mixture(**document), RunOptions(**options)


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
    files = [recorded.base, *(expert.model for expert in recorded.all_experts)]
    check_recorded(file, recorded.given & {*LEFT_OUT, "allow_pickle"}, files)
    document = recorded.with_files(lambda model: resolve_path(str(model), output)).to_tables()
    # torch gives other last bits on other machines
    same = {} if recorded.gates.startswith("hidden") else {"output_digest": manifest["output"]}
    return {**document, **same, "output": output}


# The keys of mergekit-moe, the first of which must be there, and our names of some.
OF_MIXTURES = "base_model gate_mode experts shared_experts architecture experts_per_token dtype"
OF_EXPERTS = "source_model positive_prompts negative_prompts residual_scale noise_scale"
THEIRS = {"base_model": "base", "gate_mode": "gates", "source_model": "model"}
THEIRS |= {"positive_prompts": "prompts"}
# Its names of architectures, of which the beginning is enough.
ARCHITECTURES = {"mixtral": "mixtral", "deepseek moe": "deepseek"}
ARCHITECTURES |= {"qwen moe": "qwen2_moe", "qwen3 moe": "qwen3_moe"}


def _convert_yaml(path: Path) -> dict[str, Any]:
    """Read mergekit-moe's configuration as our tables."""

    def convert(node: Node, keys: str, what: str) -> dict[str, Any]:
        table = as_table(node, keys.split(), what, required=keys.split(maxsplit=1)[0])
        lists = {
            key: [convert(entry, OF_EXPERTS, "an expert") for entry in as_items(value, key)]
            for key, value in table.items()
            if key.endswith("experts")
        }
        return {THEIRS.get(key, key): lists.get(key, node.plain) for key, node in table.items()}

    first, *others = read_yaml(path)
    for other in others:
        raise other.refuse("a mixture is one document; give this one in a file of its own")
    document = convert(first, OF_MIXTURES, "a configuration of mergekit-moe")
    for _, text in sorted(first.reading.notes):
        warn_caller(text)
    word = str(document.get("architecture") or "").lower()
    found = (ours for name, ours in ARCHITECTURES.items() if word and name.startswith(word))
    return document | {"architecture": next(found, word or None)}
