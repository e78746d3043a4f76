"""A recipe says what is merged: typed, strict, and the same as a TOML file or a Python object.

Three names and a rate are enough:

    base = "base.safetensors"
    models = ["math.safetensors", "code.safetensors"]
    output = "merged.safetensors"

    [dare]
    drop_rate = 0.9

Everything else has a default; `OTHER_NAMES` has other names for the first three. A stage's
parameters are in a table with its name. A model may be an inline table with a `weight`, a `seed`
and parameters. `[[tensors]]` rules set parameters for the tensors whose names match. A list in
place of a number has the values from the first layer to the last.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from os import PathLike
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from dare.documents.values import After, Before, Finite, Limits
from dare.documents.words import counted
from dare.errors import RecipeError, did_you_mean
from dare.recipe.applied import AppliedSettings
from dare.recipe.entries import (
    OTHER_NAMES,
    AnyPath,
    Method,
    ModelEntry,
    Span,
    TensorRule,
    TokenEntry,
    TokenRow,
    as_tuple,
    with_lists,
    write_toml,
    written_models,
)
from dare.recipe.fields import NOT_RECORDED, SAME_WEIGHTS, Strict, described
from dare.recipe.options import USUAL, RunOptions, Search, Size, search_table
from dare.stages import STAGES, Stage
from dare.stages.registry import combine_of, takers
from dare.tensors.dtypes import weight_type
from dare.tensors.mask import check_drop_rate

__all__ = ["ModelEntry", "Recipe", "Request", "TensorRule"]

EmbeddingDropRate = Annotated[
    Finite, After(partial(check_drop_rate, name="embedding_drop_rate")), Limits(ge=0, lt=1)
]

OTHER_TYPES = ("Q8_0",)  # of formats that are not safetensors


def _type_name(name: object) -> str | None:
    if name is None:
        return None
    other = str(name).upper()
    if other in OTHER_TYPES:
        return other
    try:
        return weight_type(name).name
    except RecipeError as error:
        more = "GGUF: F32, F16, BF16, Q8_0, and llama-quantize makes others of an F16"
        raise RecipeError(f"{error}; {more}") from None


WeightType = Annotated[str | None, Before(_type_name)]
Policy = Literal["error", "base"]
POLICIES = ("error", "base", "union")  # for tokens that differ
RESERVED = (*POLICIES, "auto")  # words that cannot be the name of a model


def _as_entries(value: object) -> object:
    if isinstance(value, str | PathLike):
        value = [value]
    if not isinstance(value, Sequence):
        return value
    return tuple(ModelEntry(file=e) if isinstance(e, str | PathLike) else e for e in value)


def _without_gaps(value: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Leave out keys whose value is None: TOML has no such value."""
    given = {
        stage: with_lists({name: v for name, v in table.items() if v is not None})
        for stage, table in value.items()
    }
    return {stage: table for stage, table in given.items() if table or stage not in STAGES}


class Recipe(AppliedSettings, Strict):
    """A merge, completely described.

    >>> recipe = Recipe(base="b.safetensors", models=["m.safetensors"], output="o.safetensors")
    >>> recipe.method, recipe.seed
    ('dare+linear', 42)
    """

    base: AnyPath = described("The model that the others were fine-tuned from.")
    models: Annotated[tuple[ModelEntry, ...], Before(_as_entries)] = described(
        "The fine-tunes to merge."
    )
    output: AnyPath | None = described(
        "Where the merged model goes: a folder, NAME.safetensors or NAME.gguf.",
        None,
        SAME_WEIGHTS,
    )
    merges: dict[str, Recipe] = described("Merges by name, which may stand in place of models.", {})
    layers: Annotated[tuple[Layers, ...], Before(as_tuple)] = described(
        "Ranges of layers that the output is a stack of; then there are no models.", ()
    )

    method: Method = described(
        "Delta stages, one combine stage and refine stages, joined by +.", "dare+linear"
    )
    stages: Annotated[dict[str, dict[str, Any]], After(_without_gaps)] = described(
        "Parameters by stage name.", {}
    )
    tensors: Annotated[tuple[TensorRule, ...], Before(as_tuple)] = described(
        "A method or parameters for the tensors whose names match a pattern.", ()
    )
    embedding_drop_rate: EmbeddingDropRate | None = described(
        "Drop rate of embeddings and head, if it differs.", None
    )
    seed: int = described("Model i uses seed + i, unless it has its own.", 42, ge=0)
    scale: Finite = described("Factor λ on the merged delta.", 1.0)
    dtype: WeightType = described(
        "Type of the merged weights (F32, BF16, …; GGUF: Q8_0); default: the base's.", None
    )
    format: Literal["input", "dcp"] | None = described(
        '"input" stores quantised weights as the base does; "dcp" writes a checkpoint of torch.',
        None,
    )

    gathered: AnyPath | None = described(
        "File of Gram matrices for regmean, and of statistics of norms.", None
    )

    on_missing: Policy = described(
        "A tensor that a model lacks: refuse, or count its delta as zero.", "error"
    )
    on_extra: Literal["error", "drop", "average", "first"] = described(
        "A tensor that only models have: refuse, leave out, or take theirs.", "error"
    )
    on_mismatch: Policy = described(
        "A tensor of another shape in a model: refuse, or keep the base's.", "error"
    )
    on_integer_mismatch: Policy = described(
        "Integer tensors that differ: refuse, or keep the base's.", "error"
    )

    vocabulary: str = described(
        "Tokens that differ: refuse, keep the base's or a model's, or unite.", "error"
    )
    tokens: dict[str, TokenRow] = described(
        "Rows of single tokens, and the models they come from.", {}
    )
    new_rows: Literal["mean", "merge", "merge_all"] = described(
        "Rows of tokens that the base lacks: the models' mean, or merged.", "mean"
    )
    pad_to_multiple_of: int | None = described(
        "Pad embedding and head with zeros to this multiple.", None, gt=0, le=1 << 16
    )
    copy_from: str | None = described(
        "The model whose config and tokenizer an output folder gets.", None, SAME_WEIGHTS
    )
    chat_template: str = described(
        "auto, a model's or a template's name, a file, or the template itself.",
        "auto",
        SAME_WEIGHTS,
    )
    allow_pickle: bool = described(
        "Also read pytorch_model.bin and the like, with torch, weights only.", False, SAME_WEIGHTS
    )
    allow_not_finite: bool = described(
        "Merge even if inputs or results are NaN or infinite.", False, SAME_WEIGHTS
    )

    delta_threshold: Finite = described(
        "Count elements whose |δ| exceeds this, and warn.", 0.002, SAME_WEIGHTS, ge=0
    )
    shard_size: Size | None = described(
        "Largest output file, such as 5GB; the output is then a folder.", None, SAME_WEIGHTS
    )
    input_digests: Annotated[tuple[str, ...] | None, Before(as_tuple)] = described(
        "Digests that the inputs must have, base first; see the manifest.", None, NOT_RECORDED
    )
    output_digest: str | None = described(
        "Digest that the merged weights must have; see the manifest.",
        None,
        SAME_WEIGHTS,
        NOT_RECORDED,
    )

    search: Annotated[Search | None, Before(search_table)] = described(
        "What a search around this recipe tries; a merge ignores it.",
        None,
        SAME_WEIGHTS,
        NOT_RECORDED,
    )

    @classmethod
    def unknown(cls, name: str) -> str:
        if name in RunOptions.fields():
            return f"{name}: is an option of a run, not of a recipe: pass it to merge(…, {name}=…)"
        known = (*cls.fields(), *RunOptions.fields())
        return f"{name}: not known{did_you_mean(name, known)}"

    def check_together(self) -> None:
        if problem := next(_problems(self), None):
            raise RecipeError(problem)

    @cached_property
    def vocabulary_of(self) -> str | int:
        """The policy, or the number of the model whose tokens the output has."""
        word = self.vocabulary
        return word if word in POLICIES else self.number_of(word, "vocabulary", *POLICIES) or "base"

    @property
    def weighs_rows(self) -> bool:
        """True if the rows of some tokens are means that depend on the models' weights."""
        return self.vocabulary not in ("error", "base") and self.new_rows == "mean"

    @cached_property
    def token_rows(self) -> dict[str, tuple[int | None, TokenEntry]]:
        """The rows of single tokens, each with the number of its input; None for zeros."""
        return {
            token: (
                None if row.model is None else self.number_of(row.model, f"tokens.{token}"),
                row,
            )
            for token, row in self.tokens.items()
        }

    def described_tokens(self) -> dict[str, list[Any]]:
        """Return the rows of single tokens as plain values, with numbers instead of paths."""
        rows = self.token_rows.items()
        return {token: [number, row.token, row.id, row.force] for token, (number, row) in rows}

    def changed(self, **fields: Any) -> Self:
        """Return a recipe with some fields changed, checked like any other.

        A copy with other merged weights drops the digest that a manifest demands.
        """
        others = {"output_digest": None} if fields.keys() - self.marked(SAME_WEIGHTS) else {}
        return super().changed(**others | fields)

    @property
    def has_given_threshold(self) -> bool:
        """True if the user has given `delta_threshold`, even if it is the default's value."""
        return "delta_threshold" in self.given

    @property
    def named(self) -> dict[str, Path]:
        """Everything that it names as a base or a model: files, folders and its merges."""
        inner = (*self.merges.values(), *self.layers)
        files = [self.base, *(entry.file for entry in self.models)]
        files += (file for recipe in inner for file in recipe.merged_models)
        return {str(file): file for file in files}

    @property
    def read_files(self) -> tuple[Path, ...]:
        """The base, the models and the gathered file, in the order of digests."""
        files = self.base, *(entry.file for entry in self.models)
        return (*files, self.gathered) if self.gathered else files

    @property
    def merged_models(self) -> tuple[Path, ...]:
        """All models that it reads, base first, also those of inner merges."""
        return tuple(file for name, file in self.named.items() if name not in self.merges)

    @property
    def inputs(self) -> tuple[Path, ...]:
        """All files and folders that it reads: models, and gathered files."""
        inner = (f for recipe in (*self.merges.values(), *self.layers) for f in recipe.inputs)
        gathered = [self.gathered] if self.gathered else []
        files = dict.fromkeys((*self.merged_models, *inner, *gathered))
        return tuple(file for file in files if str(file) not in self.merges)

    @property
    def paths(self) -> tuple[Path, ...]:
        """All files and folders that it names."""
        return self.inputs if self.output is None else (*self.inputs, self.output)

    def to_toml(self) -> str:
        """Write the recipe as TOML; `load_recipe` reads it back to an equal recipe."""
        return write_toml(self.to_tables())

    def to_tables(self) -> dict[str, Any]:
        """Return the recipe as plain tables, as people write it, without defaults.

        A given threshold stays even if it is the default, because giving it has an effect.
        """
        tables = super().to_tables()
        tables |= {"delta_threshold": self.delta_threshold} if self.has_given_threshold else {}
        tables["models"] = [e["file"] if set(e) == {"file"} else e for e in tables["models"]]
        last = {
            name: tables.pop(name) for name in ("tensors", "layers", "merges") if name in tables
        }
        if "merges" in last:
            last["merges"] = {
                name: merge for name, merge in last["merges"].items() if name in self.named
            }
        stages = tables.pop("stages", {})
        files = {name: tables.pop(name) for name in OTHER_NAMES if name in tables}
        return {
            **files,
            **tables,
            **stages,
            **{name: value for name, value in last.items() if value},
        }

    def to_document(self) -> dict[str, Any]:
        """Return the tables as in manifests, with the files in a table [models]."""
        return Request(self).to_document()


class Layers(Recipe):
    """A range of layers of a stack: layers of the base, or the result of a merge."""

    range: Span = described("The first layer, and the one after the last.")

    def to_tables(self) -> dict[str, Any]:
        """Return it as people write it: an unmerged range has only its model and range."""
        tables = super().to_tables()
        rest = {k: v for k, v in tables.items() if k not in ("base", "models", "method")}
        return tables if self.models else {"model": tables["base"], **rest}


def _problems(recipe: Recipe) -> Iterator[str]:
    """Yield problems with values that do not go together, although each may be valid."""
    names = {method: [stage.name for stage, _ in c] for method, c in recipe.chains.items()}
    for name in recipe.stages:
        if name not in STAGES:
            yield f"[{name}]: no such stage{did_you_mean(name, STAGES)}"
        elif not any(name in stages for stages in names.values()):
            methods = (f"method {m!r} is {', '.join(stages)}" for m, stages in names.items())
            yield f"[{name}] would have no effect: {'; '.join(methods)}"
    for name, entry in zip(recipe.names, recipe.models, strict=True):
        yield from _override_problems(recipe, entry, f"model {name}: ", False)
    for rule, indices in recipe.rules:
        yield from _override_problems(recipe, rule, f"{rule}: ", indices is None)
    if "" in recipe.tokens:
        yield "tokens: a token has no characters; leave it out"
    _ = recipe.vocabulary_of, recipe.token_rows  # these refuse unknown models
    takes_models = recipe.chain.combine.models != 0
    if recipe.layers and (recipe.models or takes_models):
        yield "[[layers]]: models and method belong in its entries, or in [merges.NAME]"
    elif takes_models and not recipe.models:
        yield "no models: name at least one"
    for combine in (chain.combine for chain in recipe.chains.values()):
        if combine.models not in (None, len(recipe.models)):
            yield _wrong_count(recipe, combine)
    if recipe.format == "input" and recipe.dtype is not None:
        yield 'format = "input" says how weights are stored; leave dtype out'
    if recipe.input_digests is not None and len(recipe.input_digests) != len(recipe.read_files):
        yield f"input_digests: {len(recipe.input_digests)} given for {len(recipe.read_files)} files"
    drops = any("drop_rate" in s.parameters for s, _ in recipe.all_stages if s.kind == "delta")
    if recipe.embedding_drop_rate is not None and not drops:
        yield f"embedding_drop_rate would have no effect: method {recipe.method!r} drops nothing"


def _wrong_count(recipe: Recipe, combine: Stage) -> str:
    """Say how many models a combine stage takes, how many there are, and the remedy."""
    found = counted(len(recipe.models), "is", "are")
    said = f"{combine.name} merges {counted(combine.models or 0, 'model')}, but {found} given"
    if combine.interpolates is None:
        return said
    if len(recipe.models) == 1:
        files = [recipe.base, recipe.models[0].file]
        return f"{said}; to go from the base to it, {written_models(files)}"
    kin = (s for s in STAGES.values() if s.interpolates is not None and s.models is None)
    return f"{said} besides the base; {' and '.join(s.name for s in kin)} take any number"


def _override_problems(
    recipe: Recipe, entry: ModelEntry | TensorRule, where: str, may_combine: bool
) -> Iterator[str]:
    method = entry.method if isinstance(entry, TensorRule) else None
    chains = [[s for s, _ in recipe.chains[m]] for m in ([method] if method else recipe.chains)]
    known = {
        name
        for stages in chains
        for stage in stages
        for name in stage.parameters
        if (may_combine or stage.kind == "delta") and stage in takers(stages, name)
    }
    for name, value in entry.settings.items():
        if name not in known:
            yield (
                f"{where}{name} is not a parameter here{did_you_mean(name, known)}; "
                f"known: {', '.join(sorted(known)) or 'none'}"
            )
        for stage in (taker for stages in chains for taker in takers(stages, name)):
            stage.parameters[name].check(value, where)
    combines = list(map(combine_of, chains))
    if entry.weight is not None and all(c.default_weight is None for c in combines):
        takes = ", ".join(combines[0].parameters)
        yield f"{where}{combines[0].name} takes no weights; it takes {takes}"


@dataclass(frozen=True)
class Request:
    """A recipe, and how to run it.

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
        options = RunOptions.take_from(fields)
        return cls(Recipe(**fields), RunOptions(**options))

    def changed(self, **fields: Any) -> Self:
        """Return the request with some fields and options changed, checked like any other."""
        options = RunOptions.take_from(fields)
        recipe = self.recipe.changed(**fields) if fields else self.recipe
        return replace(self, recipe=recipe, options=self.options.changed(**options))

    def to_toml(self) -> str:
        """Write the request as TOML; `load_recipe` reads it back to an equal one."""
        return write_toml(self.to_tables())

    def to_tables(self) -> dict[str, Any]:
        """Return recipe and options as plain tables, as people write them, without defaults."""
        return {**self.recipe.to_tables(), **self.options.to_tables()}

    def to_document(self) -> dict[str, Any]:
        """Return the tables as manifests hold them: with the files in a table [models].

        Bytes of outputs depend on it, so it must not change.
        """
        usual = "delta_threshold", Recipe.fields()["delta_threshold"].default
        tables = dict(item for item in self.to_tables().items() if item != usual)
        files = {others[0]: tables.pop(own) for own, others in OTHER_NAMES.items() if own in tables}
        later = {*self.recipe.stages, "tensors", "layers", "merges"}
        fields = {key: value for key, value in tables.items() if key not in later}
        return {**fields, "models": files, **{key: tables[key] for key in tables if key in later}}
