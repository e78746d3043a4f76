"""A LoRA adapter from a full fine-tune: the leading directions of model - base, layer by layer.

Each chosen matrix is read, subtracted and truncated on its own, so there is never more than one in
memory. What cannot be a LoRA (norms, biases) or is not asked for (embeddings, head) is stored in
full or left out; what is left out though it changed is listed with its size, and warned of. Modules
are called what the loaded model calls them, and experts are the parameters that they are there.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from pathlib import Path
from typing import Any

import numpy as np

from dare.documents.notices import Notice, notice
from dare.documents.words import counted
from dare.errors import InputError, MismatchError, RecipeError, did_you_mean
from dare.inputs.layouts import in_layout_of
from dare.inputs.lora import bind_base
from dare.inputs.names import match_names
from dare.inputs.opening import open_model
from dare.inputs.pipeline import refuse_pipeline
from dare.inputs.sources import Floats, Source, hold_open, read_config, read_float_chunks, says_tied
from dare.inputs.transformers_models import (
    AS_STORED,
    LoadedTensor,
    architecture_of,
    build_without_weights,
    find_places,
    places_as_stored,
)
from dare.kernels import call_with_matrices, check_device, find_matrix_gpus, load, matrix_gpu
from dare.lora.low_rank import Wanted, join_experts, truncate_matrix
from dare.lora.reading import list_findings
from dare.lora.writing import (
    AdapterWork,
    ExtractionReport,
    Made,
    ModuleReport,
    OmittedTensor,
    peft_config,
)
from dare.output.receipt import portable_path, short_name
from dare.run.engine import run
from dare.stores.locations import AnyPath, to_path
from dare.tensors.dtypes import STORAGE_TYPES, weight_type
from dare.tensors.header import TensorInfo
from dare.tensors.names import is_embedding, some_of

LEFT_OUT_SHOWN = 4
# Reasons why tensors that no module has as they are stored cannot be in an adapter.
NOT_IN_MODULES = {
    "fused": "transformers loads it as a part of {}, and this version does not say which",
    "absent": "the loaded model has no such tensor",
}


@dataclass(frozen=True)
class Change:
    """Base and model, with names that fit: the one's tensors are the other's."""

    base_path: Path
    base: Source
    model: Source
    places: Mapping[str, LoadedTensor]  # where each tensor of the base is in the loaded model
    notes: tuple[Notice, ...]

    @cached_property
    def modules(self) -> dict[str, set[str]]:
        """The tensors of each module of the loaded model, and nothing for one that holds others."""
        modules: dict[str, set[str]] = {}
        for tensor, place in self.places.items():
            modules.setdefault(place.module, set()).add(tensor)
        for module in list(modules):
            ends = (end for end, char in enumerate(module) if char == ".")
            modules |= {module[:end]: set() for end in ends}
        return modules

    def read_delta(self, tensor: str, *span: int) -> Iterator[tuple[int, Floats]]:
        """Read a tensor's change, chunk by chunk, each with the place of its first element."""
        sources = [self.model] if self.model.delta_of(tensor).is_change else [self.model, self.base]
        for start, values in read_float_chunks(sources, tensor, *span):
            yield start, reduce(np.subtract, values)

    def read_tuned(self, tensor: str) -> Iterator[Floats]:
        """Read a tensor of the model, chunk by chunk; the base's where the model has none."""
        has_it = tensor in self.model.tensors
        needs_base = not has_it or self.model.delta_of(tensor).is_change
        sources = [*([self.model] if has_it else []), *([self.base] if needs_base else [])]
        return (reduce(np.add, values) for _, values in read_float_chunks(sources, tensor))

    def read_matrices(self, tensor: str) -> Iterator[Floats]:
        """Read the whole change of a matrix, or of one expert after the other."""
        info = self.base.tensors[tensor]
        size = math.prod(info.shape[-2:])
        for first in range(0, info.elements, size):
            matrix = np.empty(size, np.float32)
            for start, change in self.read_delta(tensor, first, size):
                matrix[start - first :][: change.size] = change
            yield matrix.reshape(info.shape[-2:])

    def can_have_lora(self, tensor: str) -> bool:
        """Tell whether both have a tensor, and it is the matrix of a layer, or one of experts."""
        info, tuned = self.base.tensors[tensor], self.model.tensors.get(tensor)
        place = self.places[tensor]
        return (
            tuned is not None
            and place.is_layer
            and (place.is_parameter or len(info.shape) == 2)
            and info.elements > 0
            and tuned.shape == info.shape
            and info.dtype.is_weight
            and tuned.dtype.is_weight
        )

    def norm(self, tensor: str) -> float:
        """Return the Frobenius norm of a tensor's change."""
        changes = (change for _, change in self.read_delta(tensor))
        squares = (np.square(change, dtype=np.float64).sum() for change in changes)
        return math.sqrt(float(sum(squares)))


def extract_adapter(
    base: AnyPath,
    model: AnyPath,
    output: AnyPath,
    *,
    rank: int | None = None,
    energy: float | None = None,
    modules: Sequence[str] | None = None,
    save_others: bool = False,
    base_name: str | None = None,
    as_stored: bool = False,
    dtype: str = "F32",
    device: str = "cpu",
    overwrite: bool = False,
) -> ExtractionReport:
    """Write the change from base to model as a LoRA, with a given rank or share of the energy.

    `modules` are patterns (`*` and `?` as in a shell) of modules or their last names. By default
    all linear layers except the head are extracted. `save_others` stores everything else that has
    changed in full. Names and kinds of modules are those that transformers loads by the base's
    `config.json`. For a model that another library loads, `as_stored` uses the stored names and
    treats every matrix as a layer. `device` is what computes, as in `merge`.
    """
    base, model, target = to_path(base), to_path(model), to_path(output)
    how = {
        "base": portable_path(base, target),
        "model": portable_path(model, target),
        "rank": rank,
        "energy": energy,
        "modules": modules and list(modules),
        "save_others": save_others,
        "as_stored": as_stored,
        "dtype": weight_type(dtype).name,
    }
    if gpus := find_matrix_gpus(check_device(device)):
        how["device"] = gpus.title
    change, wanted = _open(base, model, as_stored), Wanted(rank, energy)
    name = base_name or short_name(base)
    work = Extract(target, change, wanted, _choose(change, modules), how, name, device)
    return run(work, overwrite=overwrite)


@dataclass(eq=False)
class Extract(AdapterWork[ExtractionReport]):
    """An adapter of the change from a base to a model."""

    target: Path
    change: Change
    wanted: Wanted
    chosen: Sequence[str]  # the tensors to extract
    how: Mapping[str, Any]  # the user's settings, for the manifest
    base_name: str
    device: str

    def __post_init__(self) -> None:
        inputs = [*self.change.base.files, *self.change.model.files]
        super().__init__(self.target, weight_type(self.how["dtype"]), inputs)

    def fill(self) -> Made[ExtractionReport]:
        change = self.change
        with hold_open([change.base, change.model], checks=True):
            extracted = tuple(self._extract())
            ranks = {module.name: module.rank for module in extracted}
            if not ranks:
                count = counted(len(self.chosen), "module")
                raise InputError(f"nothing to extract: {count} without a change")
            saved, left_out = _sort_others(change, set(ranks), self.how["save_others"])
            for tensor in saved:
                name, shape = change.places[tensor].name, change.base.tensors[tensor].shape
                self.put_saved(name, ranks, shape, change.read_tuned(tensor))
        same = counted(len(self.chosen) - len(ranks), "module")
        equal = [notice("equal_modules", modules=same)] if len(self.chosen) > len(ranks) else []
        report = ExtractionReport(
            output=self.target,
            modules=extracted,
            notes=(*change.notes, *equal),
            bytes_written=self.bytes_written,
            seconds=self.seconds,
            saved=tuple(sorted(change.places[tensor].name for tensor in saved)),
            left_out=tuple(left_out),
        )
        if left_out:
            names = some_of([tensor.tensor for tensor in left_out], LEFT_OUT_SHOWN)
            warning = notice("change_left_out", tensors=names, share=1 - report.share)
            report = replace(report, notes=(*report.notes, warning))
        owners = {tensor.rpartition(".")[0] for tensor in report.saved}
        chosen = [change.places[tensor] for tensor in self.chosen]
        architecture = architecture_of(read_config(change.base_path))
        is_causal = architecture.endswith(("ForCausalLM", "LMHeadModel"))
        config = peft_config(
            ranks,
            {place.target for place in chosen if place.is_parameter},
            base_model_name_or_path=self.base_name,
            task_type="CAUSAL_LM" if is_causal else None,
            fan_in_fan_out=any(place.kind == "conv1d" for place in chosen),
            bias="lora_only" if owners & set(ranks) else "none",
            modules_to_save=sorted(owners - set(ranks)) or None,
        )
        return report, config, self.how

    def _extract(self) -> Iterator[ModuleReport]:
        """Store the factors of the chosen matrices that have changed."""
        gpu = matrix_gpu(load(self.device))
        for tensor in self.chosen:
            place, name = self.change.places[tensor], self.change.places[tensor].target
            matrices = self.change.read_matrices(tensor)
            if place.kind in ("conv1d", "turned_parameter"):
                matrices = (matrix.T for matrix in matrices)
            how = self.wanted, name
            parts = [call_with_matrices(gpu, truncate_matrix, each, *how) for each in matrices]
            low_rank = join_experts(parts)
            if rank := low_rank.rank // len(parts):
                self.put(f"{name}.lora_A.weight", low_rank.right)
                self.put(f"{name}.lora_B.weight", low_rank.left)
                yield ModuleReport(name, (), rank, math.sqrt(low_rank.squared), low_rank.error)


def _open(base: Path, model: Path, as_stored: bool) -> Change:
    refuse_pipeline(base, "extract adapters from")
    opened = open_model(base)
    if opened.is_partial:
        raise InputError(f"{base}: is an adapter; the base must be a whole model")
    config, more = read_config(base), tuple[Notice, ...]()
    configs = {"base_config": config, "model_config": read_config(model)}
    tuned, notes = match_names(opened, open_model(model, base=opened), model.name, **configs)
    if as_stored:
        is_tied = says_tied(config) is True
        places = places_as_stored(opened.tensors, is_tied=is_tied)
    else:
        places, more = find_places(base, config, opened.tensors)
        if any(place.kind == "fused" for place in places.values()):
            opened = _as_loaded(opened, base, config)
            places, _ = find_places(base, config, opened.tensors)
    tuned, _ = in_layout_of(opened, tuned, model.name, base, config)
    bind_base(tuned)
    ours, theirs = set(opened.tensors), set(tuned.tensors)
    missing = [] if tuned.is_partial else sorted(ours - theirs)
    problems = [f"{name}: not in {model}" for name in missing]
    problems += [f"{name}: in {model}, not in the base" for name in sorted(theirs - ours)]
    if problems:
        head = "the model's tensors do not match; give the base that it was fine-tuned from:"
        raise MismatchError(head, *list_findings(problems))
    return Change(base, opened, tuned, places, (*notes, *more))


def _as_loaded(base: Source, path: Path, config: Mapping[str, Any]) -> Source:
    """Return a base with the tensors that it has in memory, where its files have parts of them."""
    built = build_without_weights(path, config, AS_STORED)
    loaded = Source()
    loaded.tensors = {
        name: TensorInfo(name, STORAGE_TYPES["F32"], tuple(value.shape), 0)
        for name, value in built.state_dict().items()
    }
    with suppress(InputError, MismatchError):  # else what is in parts is left out, with a warning
        return in_layout_of(loaded, base, path.name, path, config)[0]
    return base


# ---------------------------------------------------------------- the modules


def _choose(change: Change, patterns: Sequence[str] | None) -> list[str]:
    """Return the tensors to extract, in order of their modules' names."""
    able = filter(change.can_have_lora, change.places)
    layers = {change.places[name].target: name for name in able}
    if patterns is None:
        return [name for _, name in sorted(layers.items()) if not is_embedding(name)]
    chosen: set[str] = set()
    for pattern in patterns:
        matching = {module for module in layers if _matches(module, pattern)}
        if not matching:
            last_names = {m.removesuffix(".weight").rpartition(".")[2] for m in layers}
            raise RecipeError(
                f"modules: {pattern!r} matches no linear layer{did_you_mean(pattern, last_names)}"
                f"{_why_no_layer(change, pattern)}; "
                f"there are {', '.join(sorted(last_names)) or 'none'}"
            )
        chosen |= matching
    return [layers[module] for module in sorted(chosen)]


def _matches(target: str, pattern: str) -> bool:
    name = target.removesuffix(".weight")
    return any(fnmatch.fnmatchcase(name, way) for way in (pattern, f"*.{pattern}"))


def _why_no_layer(change: Change, pattern: str) -> str:
    """Return the reason why the first stored layer that a pattern matches is none in memory."""
    for tensor, place in change.places.items():
        reason = place.hindrance or NOT_IN_MODULES.get(place.kind, "").format(place.name)
        if reason and _matches(tensor.rpartition(".")[0], pattern):
            return f" ({tensor}: {reason})"
    return ""


# ---------------------------------------------------------------- everything else


def _sort_others(
    change: Change, targets: set[str], save_others: bool
) -> tuple[list[str], list[OmittedTensor]]:
    """Split the tensors that are not extracted: to store in full, and to leave out."""
    saved: set[str] = set()
    left_out = []
    for tensor in sorted(set(change.base.tensors) & set(change.model.tensors)):
        info, tuned = change.base.tensors[tensor], change.model.tensors[tensor]
        place = change.places[tensor]
        is_done = place.is_layer and place.target in targets
        if is_done or not (info.dtype.is_weight and tuned.dtype.is_weight):
            continue
        if info.shape != tuned.shape:
            reason = f"its shape is {info.form} in the base and {tuned.form} in the model"
            left_out.append(OmittedTensor(tensor, 0.0, reason))
        elif norm := change.norm(tensor):
            reason = place.hindrance or "not one of the chosen linear layers"
            reason += ", and save_others is not set"
            if place.kind in NOT_IN_MODULES or save_others:
                reason = _why_not_saved(change, place, targets)
            if reason:
                left_out.append(OmittedTensor(tensor, norm, reason))
            else:  # PEFT stores a module as a whole; of one with a LoRA, the bias alone
                saved |= {tensor} if place.module in targets else change.modules[place.module]
    return sorted(saved), left_out


def _why_not_saved(change: Change, place: LoadedTensor, targets: set[str]) -> str:
    """Return the reason why a changed tensor cannot be stored in full; empty if it can."""
    together = change.modules[place.module]
    if place.kind in NOT_IN_MODULES:
        return NOT_IN_MODULES[place.kind].format(place.name)
    if place.is_tied:
        return "embedding and head are tied, and PEFT would store one without the other"
    if any(change.places[name].name in targets for name in together):
        return "PEFT stores no other tensor of a module whose parameter has a LoRA"
    if place.module in targets:
        return "" if place.parameter == "bias" else "PEFT stores only a bias together with a LoRA"
    if not place.module or not together:
        return "its module contains other modules, and PEFT would store all of them"
    if not all(change.base.tensors[name].dtype.is_weight for name in together):
        return "its module also contains tensors that are not weights"
    return ""
