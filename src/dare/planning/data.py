"""What a plan says: the fate of every tensor, and what the stages need to know of it."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Any

from dare.documents.notices import Notice
from dare.inputs.directory import Sidecars
from dare.inputs.sources import Drop, Source
from dare.planning.layout import Layout
from dare.recipe.schema import Recipe
from dare.stages import Settings, Stage
from dare.tensors.chunks import chunk_count
from dare.tensors.digest import bytes_digest
from dare.tensors.dtypes import StorageType
from dare.tensors.header import TensorInfo


class Fate(StrEnum):
    """What becomes of a tensor."""

    MERGED = "merged"
    COPIED = "copied from base (not a weight type)"
    BASE_ONLY = "copied from base (no model has it)"
    MISMATCHED = "copied from base (a model's does not fit)"
    LEFT_OUT = "left out (only in a model)"


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """One tensor of the output."""

    name: str
    fate: Fate
    shape: tuple[int, ...]
    base: TensorInfo
    dtype: StorageType
    """Storage type in the output."""
    models: tuple[int, ...]
    """The models that take part: whose delta is merged, or whose copy is compared."""
    settings: tuple[tuple[Settings, ...], ...]
    """For each of those models, the settings of each delta stage."""
    weights: tuple[float, ...]
    """For each of those models, its weight."""
    combine: Settings
    tied_to: str | None = None
    """The tensor that this one is under a second name; it is treated as that one is."""
    drops: tuple[Drop | None, ...] = ()
    """For each of those models, what was dropped of it before, and no stage makes up for."""

    @property
    def key(self) -> str:
        """The name that masks are drawn by and conclusions found."""
        return self.tied_to or self.name

    @property
    def elements(self) -> int:
        """How many elements it has."""
        return self.base.elements

    @property
    def chunks(self) -> int:
        """How many pieces of work it is cut into."""
        return chunk_count(self.elements)

    @property
    def is_merged(self) -> bool:
        """Whether it is more than a copy."""
        return self.fate is Fate.MERGED

    def is_lazy(self, chain: Sequence[Stage]) -> bool:
        """Whether every stage leaves the models' values to the backend."""
        return chain[-1].is_lazy(self.combine) and all(
            stage.is_lazy(settings)
            for settings_of_stages in self.settings
            for stage, settings in zip(chain, settings_of_stages, strict=False)
        )

    def settings_of(self, model: int) -> tuple[Settings, ...]:
        """The settings of each delta stage for one model."""
        return self.settings[self.models.index(model)]

    def drop_of(self, model: int) -> Drop | None:
        """What was dropped of one model before its first stage, and must be made up for."""
        return self.drops[self.models.index(model)] if self.drops else None

    def draws_of(self, chain: Sequence[Stage], model: int) -> list[int | None]:
        """Which draw each delta stage makes for one model, from 0; None for those that do not."""
        draws = itertools.count(0 if self.drop_of(model) is None else 1)
        return [
            next(draws) if stage.is_random(settings) else None
            for stage, settings in zip(chain, self.settings_of(model), strict=False)
        ]

    def surveyed_stages(self, chain: Sequence[Stage], model: int) -> list[int]:
        """Positions of the delta stages that must survey this tensor of this model first."""
        return [
            position
            for position, settings in enumerate(self.settings_of(model))
            if chain[position].surveys(settings)
        ]

    def survey_reads(self, chain: Sequence[Stage], model: int) -> int:
        """How often those stages read this tensor of this model, if surveys can remember."""
        settings = self.settings_of(model)
        return sum(
            max(1, len(chain[position].rounds(settings[position])))
            for position in self.surveyed_stages(chain, model)
        )


@dataclass(frozen=True)
class CensusPlan:
    """The tensors of one model that a delta stage surveys together."""

    model: int
    position: int
    """Of the stage in the chain."""
    settings: Settings
    tensors: tuple[TensorPlan, ...]
    """In the order of their names, whatever the order in the files is."""


@dataclass(frozen=True)
class PlanData:
    """What a merge will do, and nothing that follows from it."""

    recipe: Recipe
    base: Source
    models: tuple[Source, ...]
    model_names: tuple[str, ...]
    tensors: tuple[TensorPlan, ...]
    left_out: tuple[str, ...]
    """Tensors that only models have, and that the recipe allows to be dropped."""
    warnings: tuple[Notice, ...]
    layout: Layout | None
    """None when the result stays in memory."""
    notes: tuple[str, ...] = ()
    """What was done so that the inputs fit together."""
    sidecars: Sidecars | None = None
    """What goes beside the weights in an output directory."""
    base_card: Mapping[str, str] | None = None
    """What an output directory's card takes over from the base's."""
    backend: str = "cpu"
    """What computes; see `kernels`."""

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        """The chain of stages."""
        return tuple(stage for stage, _ in self.recipe.chain)

    @property
    def combine(self) -> Stage:
        """The combine stage."""
        return self.stages[-1]

    @cached_property
    def has_later_draws(self) -> bool:
        """Whether more than one stage of some model's chain is random."""
        return any(1 in t.draws_of(self.stages, m) for t in self.merged() for m in t.models)

    @property
    def stamps(self) -> str:
        """By what the inputs are known here and now."""
        stamps = [source.stamps() for source in (self.base, *self.models)]
        return bytes_digest(json.dumps(stamps).encode())

    def source_of(self, tensor: TensorPlan, model: int) -> Source:
        """Where a model's copy of a tensor is read: the base, if the model lacks it."""
        source = self.models[model]
        return source if tensor.name in source.tensors else self.base

    def is_model(self, tensor: TensorPlan) -> bool:
        """Whether a tensor is, by the method's definition, that of the one model that takes part.

        Nothing is dropped, weight, factor and scale are 1, and it is stored in the base's type. It
        is copied then: base + (tuned - base) in float32 would be rounded twice.
        """
        if not tensor.is_merged or tensor.weights != (1.0,) or self.recipe.scale != 1:
            return False
        (model,), (settings,) = tensor.models, tensor.settings
        source = self.source_of(tensor, model)
        chain = zip(self.stages, (*settings, tensor.combine), strict=True)
        return (
            not tensor.drops
            and all(stage.is_identity(own) for stage, own in chain)
            and not source.holds_delta(tensor.name)
            and source.tensors[tensor.name].dtype == tensor.base.dtype
        )

    def copies_of(self, tensor: TensorPlan) -> list[tuple[int, TensorInfo]]:
        """The models that take part in a tensor, and what is said of their copies."""
        return [(m, self.source_of(tensor, m).tensors[tensor.name]) for m in tensor.models]

    def original_digest(self, tensor: TensorPlan, model: int) -> str | None:
        """The digest of a model's tensor, where a part of it does what the whole would have done.

        That is so for a delta file if the chain drops what the file lacks.
        """
        source = self.source_of(tensor, model)
        if source.drop_of(tensor.name) is None or tensor.drop_of(model) is not None:
            return None
        return source.original_digest(tensor.name)

    @cached_property
    def dropped_before(self) -> list[list[tuple[float, int]]]:
        """For each model the rates and seeds of what is made up for before its first stage."""
        drops: list[set[tuple[float, int]]] = [set() for _ in self.models]
        for tensor in self.merged():
            for model in tensor.models:
                if (drop := tensor.drop_of(model)) is not None:
                    drops[model].add((drop.rate, drop.seed))
        return list(map(sorted, drops))

    def merged(self) -> Iterator[TensorPlan]:
        """The tensors that are merged."""
        return (tensor for tensor in self.tensors if tensor.is_merged)

    def is_surveyed(self, tensor: TensorPlan) -> bool:
        """Whether a chunk of a tensor depends on more than its own elements."""
        return tensor.is_merged and (
            self.combine.surveys(tensor.combine)
            or any(tensor.surveyed_stages(self.stages, model) for model in tensor.models)
        )

    @cached_property
    def has_deltas(self) -> bool:
        """Whether models are given by deltas, not only by weights."""
        return any(model.holds_delta(name) for model in self.models for name in model.tensors)

    @cached_property
    def censuses(self) -> tuple[CensusPlan, ...]:
        """The surveys over many tensors, in the order in which they can be made."""
        groups: dict[tuple[Any, ...], list[TensorPlan]] = {}
        counted = (tensor for tensor in self.merged() if tensor.tied_to is None)
        for tensor in sorted(counted, key=lambda tensor: tensor.name):
            for model in tensor.models:
                for position, settings in enumerate(tensor.settings_of(model)):
                    if self.stages[position].rounds(settings):
                        key = position, model, *sorted(settings.items())
                        groups.setdefault(key, []).append(tensor)
        return tuple(
            CensusPlan(model, position, dict(settings), tuple(tensors))
            for (position, model, *settings), tensors in sorted(
                groups.items(), key=lambda group: group[0][:2]
            )
        )
