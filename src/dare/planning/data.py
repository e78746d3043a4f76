"""The data of a plan: every tensor's fate and settings, and its place in the output.

All of it is decided before anything is written.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import Any

from dare import __version__
from dare.documents.notices import Notice
from dare.errors import InputError, OutputError, RecipeError
from dare.formats.recoding import Recoding
from dare.inputs.directory import Sidecars
from dare.inputs.gathered import Gathered
from dare.inputs.shards import STEMS
from dare.inputs.sources import Drop, Floats, Source, stamps_of
from dare.kernels import MOST_ON_GPU, MatrixGpus, OnGpu, find_matrix_gpus, takes_matrices
from dare.recipe.applied import Chain, names_of
from dare.recipe.options import USUAL, RunOptions
from dare.recipe.recipe import Recipe
from dare.stages import Settings, Stage
from dare.stages.registry import LATER_PARAMETERS, Round
from dare.stores.locations import is_stored, parse_address
from dare.tensors.chunks import SEAL, UNKNOWN, bytes_digest, chunk_count
from dare.tensors.dtypes import StorageType
from dare.tensors.header import Described, TensorInfo, build_header, stored_elements
from dare.tensors.mask import LATER_DRAWS_VERSION, MASK_VERSION

# Endings of files, so that nobody expects a folder of that name.
OTHER_FORMATS = re.compile(
    r"\.(safetensors|gguf|ggml|bin|pt|pth|ckpt|pkl|pickle|onnx|tflite|h5|hdf5|keras|msgpack|np[yz]"
    r"|zip|tar|t?gz|json|toml|ya?ml|html|txt|md|csv)",
    re.IGNORECASE,
)

_SHARD = re.compile(r"-\d+-of-\d+\.safetensors$")


@dataclass(frozen=True)
class Layout:
    """The files of an output and the tensors in each, in order."""

    target: Path  # the name the finished output gets: that of a file, or of a folder
    files: Mapping[str, tuple[Described, ...]]
    scratch: Path | None = field(default=None, kw_only=True)  # folder for a store's output
    recoding: Recoding | None = field(default=None, kw_only=True)  # if not plain safetensors
    merged: tuple[Described, ...] = field(default=(), kw_only=True)  # before they are recoded
    metadata: Mapping[str, str] = field(default_factory=dict, kw_only=True)  # of every file

    def __post_init__(self) -> None:
        """Refuse a name with the ending of a format that is not supported."""
        ending = self.target.suffix
        is_plain = self.recoding is None and ending != ".safetensors"
        if is_plain and OTHER_FORMATS.fullmatch(ending):
            raise OutputError(
                f"{self.target}: cannot be written as {ending}; name a folder (without "
                f"{ending}) or a file that ends with .safetensors; merges can also be .gguf"
            )
        if self.is_on_hub:
            _check_repository(self.target)
        elif self.recoding is not None and self.is_sent:
            what = f"cannot be written to a store as {self.recoding.format}"
            raise OutputError(f"{self.target}: {what}; write it here, then copy it there")

    @property
    def is_directory(self) -> bool:
        return is_directory_target(self.target)

    @property
    def is_sent(self) -> bool:
        """True if it goes to a store: file by file in their order, or to the hub as a whole."""
        return is_stored(self.target)

    @property
    def is_on_hub(self) -> bool:
        """True if it goes to the hub, in one commit."""
        return is_stored(self.target) and self.target.scheme == "hf"

    @property
    def scratch_bytes(self) -> int:
        """About how much scratch space it takes on the way: two adjacent files, or all of them."""
        sizes = self.sizes if self.is_sent else []
        if self.is_on_hub:
            return sum(sizes)
        return max(map(sum, itertools.pairwise([0, *sizes])), default=0)

    @property
    def sizes(self) -> list[int]:
        """About how many bytes each file has."""
        return [sum(map(_nbytes, tensors)) for tensors in self.files.values()]

    def build(self, metadata: Mapping[str, str]) -> dict[str, tuple[bytes, dict[str, TensorInfo]]]:
        """Return each file's header bytes and the places of its tensors.

        A file in a folder has a component of a pipeline, with the names that tensors have there.
        """
        built, build = {}, self.recoding.build_header if self.recoding else build_header
        for file, tensors in self.files.items():
            own = [(_within(file, name), kind, shape) for name, kind, shape in tensors]
            header, placed = build(own, {**self.metadata, **metadata})
            built[file] = header, dict(zip((t[0] for t in tensors), placed.values(), strict=True))
        return built

    def indexes(self) -> dict[str, bytes]:
        """Return the index of each model that has several files, by its name."""
        models: dict[str, list[str]] = {}
        for file in self.files:
            models.setdefault(_SHARD.sub("", file), []).append(file)
        return {
            f"{name}.safetensors.index.json": self._index(files)
            for name, files in models.items()
            if len(files) > 1
        }

    def _index(self, files: Sequence[str]) -> bytes:
        total = sum(_nbytes(tensor) for file in files for tensor in self.files[file])
        places = {
            _within(file, tensor[0]): file.rpartition("/")[2]
            for file in files
            for tensor in self.files[file]
        }
        document = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
        return json.dumps(document, indent=2, ensure_ascii=False).encode() + b"\n"


def _check_repository(target: Path) -> None:
    """Refuse an address on the hub that is not that of a whole repository."""
    with suppress(InputError):
        if not parse_address(str(target)).inside and is_directory_target(target):
            return
    what = "an output on the hub is a whole repository"
    raise OutputError(f"{target}: {what}; write hf://user/name, or hf://user/name@branch")


def is_directory_target(target: Path) -> bool:
    """Say whether an output of this name is a folder."""
    return target.suffix not in (".safetensors", ".gguf")


def lay_out(
    target: Path,
    tensors: Iterable[Described],
    shard_size: int | None,
    stems: Mapping[str, str] | None = None,
    **more: Any,
) -> Layout:
    """Order tensors as the safetensors library does, widest type first, and fill shards in turn.

    `stems` are the stems of files, by the prefix of their tensors' names. `more` are further fields
    of the layout.
    """
    stems = stems or {"": STEMS[0]}
    ordered = sorted(tensors, key=lambda tensor: (-tensor[1].itemsize, tensor[0]))
    if not is_directory_target(target):
        if shard_size is not None:
            raise RecipeError(f"shard_size makes several files; {target} is one: give a folder")
        if any(stems):
            raise OutputError(f"{target}: a pipeline is several models; name a folder")
        return Layout(target, {target.name: tuple(ordered)}, **more)

    models: dict[str, list[Described]] = {prefix: [] for prefix in stems}
    for tensor in ordered:
        prefix = "" if "" in stems else tensor[0][: tensor[0].find("/") + 1]
        models.setdefault(prefix, []).append(tensor)
    files: dict[str, tuple[Described, ...]] = {}
    for prefix, own in models.items():
        stem, shards = stems.get(prefix, STEMS[0]), _fill_shards(own, shard_size)
        for number, shard in enumerate(shards, start=1):
            ending = "" if len(shards) == 1 else f"-{number:05}-of-{len(shards):05}"
            files[f"{prefix}{stem}{ending}.safetensors"] = tuple(shard)
    return Layout(target, files, **more)


def _fill_shards(tensors: Iterable[Described], shard_size: int | None) -> list[list[Described]]:
    shards: list[list[Described]] = [[]]
    used = 0
    for tensor in tensors:
        size = _nbytes(tensor)
        if shards[-1] and used + size > (shard_size or math.inf):
            shards.append([])
            used = 0
        shards[-1].append(tensor)
        used += size
    return shards


def _within(file: str, tensor: str) -> str:
    """Return the name of a tensor in a file, which may be in the folder of a component."""
    return tensor.removeprefix(file[: file.rfind("/") + 1])


def _nbytes(tensor: Described) -> int:
    return stored_elements(*tensor[1:]) * tensor[1].itemsize


# ---------------------------------------------------------------- fates and settings


FORMAT = 1  # of manifests
JOURNAL_VERSION = 3  # 2 did not say what of a chunk is stored in another format


class Fate(StrEnum):
    """The fate of a tensor."""

    MERGED = "merged"
    COPIED = "copied from base (not a weight type)"
    BASE_ONLY = "copied from base (no model changes it)"
    PASSED = "passed through"
    MISMATCHED = "copied from base (a model's does not fit)"
    EXTRA = "taken from models (the base lacks it)"
    GATHERED = "taken from the file of what was gathered"
    LEFT_OUT = "left out (only in a model)"


@dataclass(frozen=True)
class Treatment:
    """What is done to a tensor, whatever its name and shape.

    Nearly all tensors of a model share one, so that what follows from it is found once.
    """

    models: tuple[int, ...] = ()  # those whose delta is merged, or whose copy is compared
    settings: tuple[tuple[Settings, ...], ...] = ()  # by model: each delta stage's settings
    weights: tuple[float, ...] = ()
    combine: Settings = field(default_factory=dict)
    drops: tuple[Drop | None, ...] = ()  # by model: a drop that no stage makes up for
    stages: tuple[Stage, ...] = ()  # of its method
    refine: tuple[Settings, ...] = ()  # each refine stage's settings

    @cached_property
    def method(self) -> str:
        """The names of the stages."""
        return "+".join(stage.name for stage in self.stages)

    @cached_property
    def chains(self) -> list[list[tuple[Stage, Settings]]]:
        """By model: the delta stages with their settings."""
        return [list(zip(self.stages, own, strict=False)) for own in self.settings]

    @cached_property
    def joint(self) -> list[tuple[Stage, Settings]]:
        """The combine stage, then the refine stages, with their settings."""
        own = self.combine, *self.refine
        return list(zip(self.stages[-len(own) :], own, strict=True)) if self.stages else []

    @cached_property
    def asks(self) -> bool:
        """True if a stage may have to survey a tensor first, which its name and shape decide."""
        return any(s.asks(own) for chain in (*self.chains, self.joint) for s, own in chain)

    @cached_property
    def draws(self) -> list[list[int | None]]:
        """By model: the number of each delta stage's draw; None if it is not random."""
        firsts = [0 if drop is None else 1 for drop in self.drops] or [0] * len(self.settings)
        numbers = map(itertools.count, firsts)
        return [
            [next(draws) if stage.is_random(own) else None for stage, own in chain]
            for draws, chain in zip(numbers, self.chains, strict=True)
        ]

    @cached_property
    def is_lazy(self) -> bool:
        """True if every stage leaves the models' values to the backend."""
        chains = *self.chains, self.joint[:1]
        return all(stage.is_lazy(own) for chain in chains for stage, own in chain)

    @cached_property
    def sole(self) -> int | None:
        """The place of the only model with a weight, if no stage changes it."""
        weighted = [place for place, weight in enumerate(self.weights) if weight]
        if len(weighted) != 1 or (self.drops and self.drops[weighted[0]]):
            return None
        (place,) = weighted
        is_whole = self.weights[place] == 1 or self.combine.get("normalize", False)
        chain = *self.chains[place], *self.joint
        return place if is_whole and all(stage.is_identity(own) for stage, own in chain) else None


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """One tensor of the output."""

    name: str
    fate: Fate
    shape: tuple[int, ...]
    base: TensorInfo
    dtype: StorageType  # storage type in the output
    treatment: Treatment = field(default_factory=Treatment)
    tied_to: str | None = None  # the tensor that this one is under a second name
    input_axis: int | None = None  # the dimension of a layer's inputs, if there are Gram matrices

    @property
    def models(self) -> tuple[int, ...]:
        """The models whose delta is merged, or whose copy is compared."""
        return self.treatment.models

    @property
    def settings(self) -> tuple[tuple[Settings, ...], ...]:
        """By model: each delta stage's settings."""
        return self.treatment.settings

    @property
    def weights(self) -> tuple[float, ...]:
        return self.treatment.weights

    @property
    def combine(self) -> Settings:
        """The settings of the combine stage."""
        return self.treatment.combine

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The stages of its method."""
        return self.treatment.stages

    @property
    def method(self) -> str:
        """The names of its stages."""
        return self.treatment.method

    @property
    def combine_stage(self) -> Stage:
        """The stage before the refine stages."""
        return self.treatment.joint[0][0]

    @property
    def refine_stages(self) -> list[tuple[Stage, Settings]]:
        """The refine stages that change this tensor, with their settings."""
        refine = self.treatment.joint[1:]
        return [(stage, own) for stage, own in refine if self.is_surveyed_by(stage, own)]

    @property
    def described(self) -> Described:
        """Its name, type and shape, as it is merged."""
        return self.name, self.dtype, self.shape

    @property
    def key(self) -> str:
        """The name for drawing masks and finding conclusions."""
        return self.tied_to or self.name

    @property
    def elements(self) -> int:
        return self.base.elements

    @property
    def chunks(self) -> int:
        return chunk_count(self.elements)

    @property
    def is_merged(self) -> bool:
        return self.fate is Fate.MERGED

    @property
    def fits_gpu(self) -> bool:
        """Tell whether a GPU's kernels can merge it, as far as stages and models decide."""
        is_lazy = self.is_merged and self.treatment.is_lazy and not self.refine_stages
        return is_lazy and len(self.models) <= MOST_ON_GPU

    @property
    def joint_reads(self) -> int:
        """The number of times all models are read together: to combine, and to refine."""
        return self.combine_surveys + bool(self.refine_stages)

    @property
    def combine_surveys(self) -> bool:
        """Tell whether the combine stage must survey this tensor first."""
        return self.is_surveyed_by(*self.treatment.joint[0])

    def is_surveyed_by(self, stage: Stage, settings: Settings) -> bool:
        """Tell whether a stage with these settings must survey this tensor first."""
        if stage.takes_grams and self.input_axis is None:
            return False
        return stage.surveys(settings, self.key, self.shape)

    def settings_of(self, model: int) -> tuple[Settings, ...]:
        """The settings of each delta stage for one model."""
        return self.settings[self.models.index(model)]

    def drop_of(self, model: int) -> Drop | None:
        """Return a model's earlier drop, which must be made up for."""
        drops = self.treatment.drops
        return drops[self.models.index(model)] if drops else None

    def draws_of(self, model: int) -> list[int | None]:
        """Return the number of each delta stage's draw for one model; None if it is not random."""
        return self.treatment.draws[self.models.index(model)]

    def surveyed_stages(self, model: int) -> list[int]:
        """Positions of the delta stages that must survey this tensor of this model first."""
        chain = self.treatment.chains[self.models.index(model)] if self.treatment.asks else ()
        return [place for place, staged in enumerate(chain) if self.is_surveyed_by(*staged)]

    def ranks_of(self, model: int) -> Sequence[int]:
        """Return the ranks of magnitudes that the first delta stage's survey of a model asks for.

        There are none if it does not count all elements of the difference from the base.
        """
        stage, settings = self.stages[0], self.settings_of(model)
        if not settings or self.drop_of(model) or not self.is_surveyed_by(stage, settings[0]):
            return ()
        return [rank for rank in stage.ranks(settings[0], self.elements) if rank]

    @property
    def has_gpu_stages(self) -> bool:
        """Tell whether a stage takes it as a whole matrix, and can do so on a GPU."""
        chains = *self.treatment.chains, self.treatment.joint
        staged = itertools.chain(*chains) if self.treatment.asks else ()
        return any(stage.on_gpu and self.is_surveyed_by(stage, own) for stage, own in staged)


@dataclass(frozen=True)
class CensusPlan:
    """The tensors of one model and one method that a delta stage surveys together."""

    model: int
    position: int  # the stage's position in the chain
    settings: Settings
    tensors: tuple[TensorPlan, ...]  # ordered by name, not as in the files

    @property
    def stage(self) -> Stage:
        return self.tensors[0].stages[self.position]

    @property
    def rounds(self) -> tuple[Round, ...]:
        """The rounds that the stage takes."""
        return self.stage.rounds(self.settings)


@dataclass(frozen=True)
class PlanData:
    """The decisions of a plan, from which all else follows."""

    recipe: Recipe
    base: Source
    models: tuple[Source, ...]
    model_names: tuple[str, ...]
    tensors: tuple[TensorPlan, ...]
    left_out: tuple[str, ...]  # tensors that only models have
    warnings: tuple[Notice, ...]
    layout: Layout | None  # None when the result stays in memory
    notes: tuple[Notice, ...] = ()  # changes that were made so that the inputs fit together
    sidecars: Sidecars | None = None  # files that go beside the weights in an output folder
    base_card: Mapping[str, Any] | None = None  # fields from the base's card, for a folder
    measured: str = ""  # Markdown for the card: what the output scored, if that is known
    scores: tuple[Mapping[str, Any], ...] = ()  # the same, as results of a `model-index`
    options: RunOptions = USUAL
    gathered: Gathered | None = None  # the file of what inputs have shown

    @property
    def device(self) -> str:
        """What computes: a name of `kernels.device_of`."""
        return self.options.device

    @cached_property
    def matrix_gpus(self) -> MatrixGpus | None:
        """The GPUs that whole matrices are computed on, if any are."""
        is_asked = takes_matrices(self.device) and any(t.has_gpu_stages for t in self.merged())
        return find_matrix_gpus(self.device) if is_asked else None

    @property
    def method(self) -> str:
        """The names of the stages, of all methods."""
        return self.recipe.methods

    @cached_property
    def methods(self) -> Counter[str]:
        """The number of tensors that are merged by each method."""
        return Counter(tensor.method for tensor in self.merged())

    @property
    def sources(self) -> tuple[Source, ...]:
        """The base, the models, and the file of what was gathered."""
        return self.base, *self.models, *([self.gathered] if self.gathered else ())

    @property
    def input_files(self) -> list[Path]:
        """The files of the base and of all models."""
        return [file for source in self.sources for file in source.files]

    @property
    def recoding(self) -> Recoding | None:
        """The format of the output, if that is not plain safetensors."""
        return None if self.layout is None else self.layout.recoding

    @cached_property
    def treatments(self) -> list[Treatment]:
        """How tensors are merged, each way once."""
        return list({id(t.treatment): t.treatment for t in self.merged()}.values())

    @cached_property
    def has_later_draws(self) -> bool:
        return any(1 in draws for each in self.treatments for draws in each.draws)

    @property
    def stamps(self) -> str:
        """A digest of the inputs' inodes and times, by which they are known here and now."""
        return bytes_digest(json.dumps(list(map(stamps_of, self.sources))).encode())

    @cached_property
    def identity(self) -> dict[str, Any]:
        """The manifest in the output's header, with zeros in place of all digests."""
        recipe = self.recipe
        given = zip(recipe.weights(), recipe.seeds(), recipe.models, strict=True)
        (method, stages), *others = map(_described, recipe.chains.values())
        later = {  # what came after the first manifests, and stands there only if it is used
            "vocabulary": None if recipe.vocabulary == "error" else recipe.vocabulary_of,
            "tokens": recipe.described_tokens() or None,
            "new_rows": None if recipe.new_rows == "mean" else recipe.new_rows,
            "pad_to_multiple_of": recipe.pad_to_multiple_of,
            "on_extra": recipe.on_extra if self.base.extras else None,
            "later_draws": LATER_DRAWS_VERSION if self.has_later_draws else None,
            "dropped_before": self.dropped_before if any(self.dropped_before) else None,
            "stages_from": {s.name: s.origin for s, _ in recipe.all_stages if s.origin} or None,
            "methods": dict(others) or None,
            "recoded": self.recoding and self.recoding.format,
            "gathered": self.gathered and self.gathered.digest,
            "device": self.matrix_gpus and self.matrix_gpus.title,
        }
        return {
            "format": FORMAT,
            "mask": MASK_VERSION,
            "method": method,
            "stages": stages,
            "embedding_drop_rate": recipe.embedding_drop_rate,
            "tensors": recipe.described_rules(),
            "scale": recipe.scale,
            "dtype": recipe.dtype,
            "base": UNKNOWN,
            "models": [
                {"digest": UNKNOWN, "weight": weight, "seed": seed, "settings": entry.settings}
                for weight, seed, entry in given
            ],
            "output": UNKNOWN,
            SEAL: UNKNOWN,
            **{name: value for name, value in later.items() if value is not None},
        }

    @cached_property
    def fingerprint(self) -> str:
        """A digest of recipe, headers, version and layout; paths and run settings are not in it."""
        described = [
            [__version__, FORMAT, JOURNAL_VERSION],
            self.identity,
            [source.fingerprint() for source in self.sources],
            [[t.name, t.fate, t.dtype.name, t.models] for t in self.tensors],
            list(self.layout.files) if self.layout else [],
            self.recipe.delta_threshold,
        ]
        return bytes_digest(json.dumps(described, sort_keys=True, default=str).encode())

    def base_of(self, tensor: TensorPlan) -> Source:
        """Return the source of what models' changes to a tensor are added to."""
        return self.gathered or self.base if tensor.fate is Fate.GATHERED else self.base

    def grams_of(self, tensor: TensorPlan) -> Iterator[Floats]:
        """Read the Gram matrices of a layer's inputs, of one model after the other."""
        assert self.gathered is not None  # as the layer has them
        return (self.gathered.gram(self.model_names[m], tensor.key) for m in tensor.models)

    def source_of(self, tensor: TensorPlan, model: int) -> Source:
        """Return the source of a model's copy of a tensor: the base, if the model lacks it."""
        source = self.models[model]
        return source if tensor.name in source.tensors else self.base

    def on_gpu(self, tensor: TensorPlan, models: Iterable[int]) -> list[OnGpu]:
        """Return base and some models as the GPU that merges has them; nothing if it lacks one."""
        number = self.device.partition(":")[2]
        sources = (self.base_of(tensor), *(self.source_of(tensor, model) for model in models))
        found = [source.on_gpu(tensor.name) for source in sources]
        there = [each for each in found if each is not None and str(each.gpu) == number]
        return there if len(there) == len(found) else []

    def sole_model(self, tensor: TensorPlan) -> int | None:
        """Return the model that a merged tensor is by definition, and that is then copied.

        It is the only one with a weight, and no stage changes it. Otherwise base + (tuned - base)
        in float32 would be rounded twice.
        """
        place = tensor.treatment.sole if tensor.is_merged and self.recipe.scale == 1 else None
        if place is None:
            return None
        model = tensor.models[place]
        is_change = self.source_of(tensor, model).delta_of(tensor.name).is_change
        return None if is_change else model

    def copies_of(self, tensor: TensorPlan) -> list[tuple[int, TensorInfo]]:
        """The models that take part in a tensor, and the descriptions of their copies."""
        name, base = tensor.name, self.base.tensors
        return [(m, self.models[m].tensors.get(name) or base[name]) for m in tensor.models]

    def original_digest(self, tensor: TensorPlan, model: int) -> str | None:
        """Return a whole tensor's digest, where a delta file lacks only what the chain drops."""
        stored = self.source_of(tensor, model).delta_of(tensor.name)
        is_made_up_for = stored.drop is None or tensor.drop_of(model) is not None
        return None if is_made_up_for else stored.original_digest

    @cached_property
    def dropped_before(self) -> list[list[tuple[float, int]]]:
        """By model: rates and seeds of drops that are made up for before its first stage."""
        drops: list[set[tuple[float, int]]] = [set() for _ in self.models]
        for treated in self.treatments:
            for model, drop in zip(treated.models, treated.drops, strict=False):
                drops[model] |= {(drop.rate, drop.seed)} if drop else set()
        return list(map(sorted, drops))

    def merged(self) -> Iterator[TensorPlan]:
        """The tensors that are merged."""
        return (tensor for tensor in self.tensors if tensor.is_merged)

    def is_surveyed(self, tensor: TensorPlan) -> bool:
        """Tell whether a chunk of a tensor depends on more than its own elements."""
        return tensor.is_merged and (
            tensor.joint_reads > 0 or any(map(tensor.surveyed_stages, tensor.models))
        )

    @cached_property
    def is_held(self) -> bool:
        """True if all elements of the inputs are in memory, so that nothing is read."""
        return all(
            self.base_of(tensor).held(tensor.name)
            and all(self.source_of(tensor, model).held(tensor.name) for model in tensor.models)
            for tensor in self.tensors
        )

    @cached_property
    def has_deltas(self) -> bool:
        """True if a model is given by deltas, not only by weights."""
        return any(m.delta_of(name).is_change for m in self.models for name in m.tensors)

    @cached_property
    def censuses(self) -> tuple[CensusPlan, ...]:
        """The surveys over many tensors, in the order in which they can be made."""
        groups: dict[tuple[Any, ...], list[TensorPlan]] = {}
        counted = (tensor for tensor in self.merged() if tensor.tied_to is None)
        for tensor in sorted(counted, key=lambda tensor: tensor.name):
            for model, chain in zip(tensor.models, tensor.treatment.chains, strict=True):
                for position, (stage, settings) in enumerate(chain):
                    if stage.rounds(settings):
                        key = position, model, tensor.method, *sorted(settings.items())
                        groups.setdefault(key, []).append(tensor)
        ordered = sorted(groups.items(), key=lambda group: group[0][:2])
        return tuple(
            CensusPlan(model, position, dict(settings), tuple(tensors))
            for (position, model, _, *settings), tensors in ordered
        )


def _described(chain: Chain) -> tuple[str, list[dict[str, Any]]]:
    """Return the names of a method's stages, and their settings but later ones at their default."""
    return names_of(chain), [
        {k: v for k, v in values.items() if (stage.name, k, v) not in LATER_PARAMETERS}
        for stage, values in chain
    ]
