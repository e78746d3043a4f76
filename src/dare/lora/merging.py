"""Several LoRA adapters of one base become one, without the base.

Σ wᵢ·sᵢ·Bᵢ·Aᵢ is one product of stacked factors, so `linear` and `sum` are exact by concatenation,
at the price of a rank that is the sum of the ranks. With `rank` or `energy` the result is truncated
by SVD. Methods that drop or elect work on single elements of ΔW and need the whole matrix; they are
run by the same engine as any merge (same plan, masks and bits), one matrix at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from dare.checks.inputs import check_inputs
from dare.documents.document import Document
from dare.documents.notices import Notice, notice
from dare.documents.shown import Shown
from dare.documents.words import named, show_size, times
from dare.errors import InputError, RecipeError
from dare.inputs.sources import ArraySource, hold_open, read_float_chunks, read_floats
from dare.lora.reading import HOW_ELSE, AdapterFile, Pair, open_adapters
from dare.lora.svd import LowRank, Wanted, truncate_matrix, truncate_product, working_bytes
from dare.lora.writing import (
    AdapterReport,
    AdapterWork,
    Made,
    ModuleReport,
    peft_config,
)
from dare.output.receipt import inputs_of_output, portable_path, short_name
from dare.output.sink import ArraySink
from dare.planning.make import make_plan
from dare.planning.plan import Plan
from dare.recipe.options import RunOptions
from dare.recipe.recipe import ModelEntry, Recipe, TensorRule, names_of
from dare.run.engine import Run, draw_conclusions, execute, run
from dare.stores.locations import to_path
from dare.tensors.dtypes import STORAGE_TYPES, StorageType, weight_type
from dare.tensors.mask import MASK_VERSION

Floats = NDArray[np.float32]
AnyPath = str | PathLike[str]

COMBINES = ("linear", "sum", "ties")  # combine stages that need nothing of the base
ADDITIVE = ("linear", "sum")


@dataclass(frozen=True)
class Module:
    """One module of the result: the adapters that have it, and how its factors are stored."""

    name: str
    owners: tuple[int, ...]  # the adapters that have it, by their place
    pairs: tuple[Pair, ...]  # the factors in each of those
    order: Literal["C", "F"]  # the base's order of B·A: by rows, or its transpose
    has_bias: bool

    @property
    def ranks(self) -> tuple[int, ...]:
        """The rank in each adapter that has it."""
        return tuple(pair.rank for pair in self.pairs)

    @property
    def shape(self) -> tuple[int, int]:
        """Rows of lora_B, columns of lora_A."""
        return self.pairs[0].up.shape[0], math.prod(self.pairs[0].down.shape[1:])

    def put(self, output: AdapterWork[AdapterReport], merged: LowRank) -> None:
        """Store both factors as PEFT does, with the dimensions of a convolution at the end."""
        pair, rank = self.pairs[0], merged.rank
        word, end = ("embedding_", "") if pair.is_embedding else ("", ".weight")
        right = merged.right.reshape(rank, *pair.down.shape[1:])
        output.put(f"{self.name}.lora_{word}A{end}", right)
        left = merged.left.reshape(-1, rank, *pair.up.shape[2:])
        output.put(f"{self.name}.lora_{word}B{end}", left)


@dataclass(frozen=True)
class AdapterPlan(Shown):
    """The plan of a merge of adapters, with its cost."""

    recipe: Recipe
    options: RunOptions
    adapters: tuple[AdapterFile, ...]
    modules: tuple[Module, ...]
    wanted: Wanted | None  # None keeps everything
    weights: tuple[float, ...]
    dtype: StorageType
    notes: tuple[Notice, ...] = ()

    @property
    def method(self) -> str:
        """The stages, joined by +, of all methods."""
        return self.recipe.methods

    @property
    def is_additive(self) -> bool:
        """True if the result is a weighted sum of the deltas as they are."""
        return all(names_of(chain) in ADDITIVE for chain in self.recipe.chains.values())

    @property
    def route(self) -> str:
        """The way in which the adapter is made, in words."""
        if self.wanted is None:
            return "by concatenation"
        return "by SVD of the factors" if self.is_additive else "by SVD of whole matrices"

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the adapters."""
        return tuple(adapter.name for adapter in self.adapters)

    @property
    def working_bytes(self) -> int:
        """About the most memory that one module takes; there is never more than one."""
        return max(map(self._module_bytes, self.modules))

    def _module_bytes(self, module: Module) -> int:
        if self.wanted is not None and not self.is_additive:
            return working_bytes(module.shape, self.wanted)
        factors = sum(module.ranks) * sum(module.shape) * 4
        return factors * (2 if self.wanted is None else 6)

    @cached_property
    def elementwise(self) -> Plan:
        """The same merge as the engine sees it: deltas onto a base of zeros."""
        zero, kind = np.zeros(1, np.float32), STORAGE_TYPES["F32"]
        infos = [info for adapter in self.adapters for info in adapter.tensors.values()]
        zeros = {i.name: (kind, i.shape, np.broadcast_to(zero, i.elements)) for i in infos}
        return make_plan(
            self.recipe, ArraySource(zeros), self.adapters, self.names, options=self.options
        )

    def document(self) -> Document:
        """Return what will be merged, and how."""
        largest = max(self.modules, key=self._module_bytes).name
        memory = f"about {show_size(self.working_bytes)} for {largest}, one module at a time"
        return Document(
            title=f"Plan: {self.method} of {named(self.names)}",
            kind="plan",
            facts=(
                ("modules", f"{times(len(self.modules), 'module')}, {self.route}"),
                ("memory", memory),
            ),
            notices=self.notes,
        )


def plan_adapters(
    adapters: Sequence[AnyPath | ModelEntry],
    *,
    weights: Sequence[float] | None = None,
    method: str = "linear",
    rank: int | None = None,
    energy: float | None = None,
    drop_rate: float | None = None,
    stages: Mapping[str, Mapping[str, Any]] | None = None,
    tensors: Sequence[TensorRule] = (),
    seed: int = 42,
    scale: float = 1.0,
    dtype: str = "F32",
    threads: int | None = None,
    max_memory: int | str | None = None,
) -> AdapterPlan:
    """Read configurations and headers and plan what `merge_adapters` would do.

    An adapter is a path, or a `ModelEntry` with a weight, a seed and settings of its own. Rules
    name the base's tensors: `TensorRule(match="*.q_proj.weight", …)`.
    `max_memory` is for the buffers and factors of methods that work on single elements.
    """
    tables = {name: dict(table) for name, table in (stages or {}).items()}
    if drop_rate is not None:
        tables.setdefault("dare", {})["drop_rate"] = drop_rate
    recipe = Recipe(  # which checks all settings
        base="zeros",
        models=_entries(adapters, weights),
        stages=tables,
        method=method,
        tensors=tuple(tensors),
        seed=seed,
        scale=scale,
    )
    options = RunOptions(threads=threads, max_memory=max_memory, verbose=False)
    for chosen, (*_, (combine, _)) in recipe.chains.items():
        if combine.name not in COMBINES:
            fault = f"method {chosen!r}: {combine.name} needs the base"
            raise RecipeError(f"{fault}; use {', '.join(COMBINES)}, {HOW_ELSE}")
    wanted = None if rank is None and energy is None else Wanted(rank, energy)
    opened = open_adapters([entry.file for entry in recipe.models])
    check_inputs(recipe, ArraySource({}), opened, inputs_of_output)
    modules, plain = tuple(_modules(opened, recipe)), _plain_weights(recipe)
    plan = AdapterPlan(recipe, options, opened, modules, wanted, plain, weight_type(dtype))
    if wanted is None and not plan.is_additive:
        raise RecipeError(f"method {plan.method!r}: has full rank; set rank = 16 or energy = 0.9")
    if not plan.modules:
        raise InputError("no adapter has a LoRA module and a weight other than 0")
    return replace(plan, notes=tuple(_notes(plan)))


def merge_adapters(
    adapters: Sequence[AnyPath | ModelEntry],
    output: AnyPath,
    *,
    overwrite: bool = False,
    **settings: Any,
) -> AdapterReport:
    """Merge LoRA adapters of one base into one; settings are those of `plan_adapters`.

    Without `rank` and `energy` the result is exact, and its rank is the sum of the ranks.
    """
    return run_plan(plan_adapters(adapters, **settings), output, overwrite=overwrite)


def run_plan(plan: AdapterPlan, output: AnyPath, *, overwrite: bool = False) -> AdapterReport:
    """Carry a plan out: write the adapter and return a report."""
    return run(MergeAdapters(plan, to_path(output)), overwrite=overwrite)


class MergeAdapters(AdapterWork[AdapterReport]):
    """Several adapters that become one."""

    def __init__(self, plan: AdapterPlan, target: Path) -> None:
        inputs = [file for adapter in plan.adapters for file in adapter.files]
        super().__init__(target, plan.dtype, inputs)
        self._plan = plan

    def fill(self, run: Run) -> Made[AdapterReport]:
        plan, modules = self._plan, []
        for module, merged, bias in _summed(plan) if plan.is_additive else _elementwise(plan):
            if merged.rank == 0:
                continue
            module.put(self, merged)
            if bias is not None:
                self.put(f"{module.name}.lora_B.bias", bias)
            norm = math.sqrt(merged.squared)
            modules.append(ModuleReport(module.name, module.ranks, merged.rank, norm, merged.error))
        if not modules:
            raise InputError("the merged change is zero in every module; there is nothing to write")
        averaged = _write_averages(plan, {module.name for module in modules}, self)
        left = len(plan.modules) - len(modules)
        left_out = [notice("zero_modules", modules=times(left, "module"))] if left else []
        report = AdapterReport(
            output=self.layout.target,
            modules=tuple(modules),
            notes=(*plan.notes, *left_out),
            bytes_written=self.bytes_written,
            seconds=run.seconds,
            method=plan.method,
            route=plan.route,
            adapters=plan.names,
            weights=plan.weights,
            seeds=None if plan.is_additive else plan.recipe.seeds(),
            averaged=averaged,
        )
        return report, _config(plan, modules), _how(plan, self.layout.target)


# ---------------------------------------------------------------- the plan


def _entries(
    adapters: Sequence[AnyPath | ModelEntry], weights: Sequence[float] | None
) -> list[ModelEntry]:
    if isinstance(adapters, str | PathLike):
        raise RecipeError(f"adapters = {str(adapters)!r}: must be a list of directories")
    if weights is not None and len(weights) != len(adapters):
        raise RecipeError(f"weights: {len(weights)} given for {times(len(adapters), 'adapter')}")
    entries = [a if isinstance(a, ModelEntry) else ModelEntry(file=a) for a in adapters]
    if weights is None:
        return entries
    given = zip(entries, weights, strict=True)
    return [entry.model_copy(update={"weight": weight}) for entry, weight in given]


def _plain_weights(recipe: Recipe) -> tuple[float, ...]:
    if any(isinstance(rule.weight, list) for rule in recipe.tensors):
        raise RecipeError("weights: give one number in each rule; it is the same for all layers")
    weights = [weight for weight in recipe.weights() if isinstance(weight, int | float)]
    if len(weights) < len(recipe.models):
        raise RecipeError("weights: give one number for each adapter, the same for all layers")
    return tuple(map(float, weights))


def _modules(adapters: Sequence[AdapterFile], recipe: Recipe) -> Iterator[Module]:
    """Yield the modules that an adapter changes with a weight other than 0, in order of name."""
    for name in sorted({name for adapter in adapters for name in adapter.pairs}):
        owners = [
            place
            for place, adapter in enumerate(adapters)
            if name in adapter.pairs and recipe.weight_for(f"{name}.weight", place) != 0
        ]
        if owners:
            pairs = tuple(adapters[place].pairs[name] for place in owners)
            is_transposed = pairs[0].is_embedding or adapters[0].adapter.fan_in_fan_out
            has_bias = any(name in adapter.biases for adapter in adapters)
            yield Module(name, tuple(owners), pairs, "F" if is_transposed else "C", has_bias)


def _notes(plan: AdapterPlan) -> Iterator[Notice]:
    bases = {str(adapter.adapter.base_name) for adapter in plan.adapters}
    if len(bases) > 1:
        yield notice("different_bases", bases=", ".join(sorted(bases)))
    partial = [module for module in plan.modules if len(module.owners) < len(plan.adapters)]
    if partial:
        yield notice("partial_modules", partial=len(partial), modules=len(plan.modules))
    if plan.adapters[0].saved.tensors:
        total = math.fsum(plan.weights)
        if total == 0:
            raise RecipeError("weights: they sum to 0, and what is stored in full is averaged")
        how = "the weights" if np.isclose(total, 1) else f"the weights divided by their sum {total}"
        yield notice("averaged_in_full", how=how)
    if plan.is_additive:
        return
    yield from plan.elementwise.warnings
    recipe = plan.recipe
    tables = [settings for _, settings in recipe.all_stages]
    tables += [entry.settings for entry in recipe.models]
    tables += [rule.settings for rule in recipe.tensors]
    if any(isinstance(value, list) for table in tables for value in table.values()):
        yield notice("adapter_layers")
    if "dare" in plan.method:
        yield notice("noise_of_dropping")


# ---------------------------------------------------------------- the modules

# A module, its merged factors, and the bias of lora_B where there is one.
Merged = tuple[Module, LowRank, Floats | None]


def _summed(plan: AdapterPlan) -> Iterator[Merged]:
    """Merge modules by a weighted sum, from their factors alone."""
    with hold_open(plan.adapters, checks=True):
        for module in plan.modules:
            merged = _stack(plan, module)
            if plan.wanted is not None:
                cut = truncate_product(merged.left, merged.right, plan.wanted, module.name)
                merged = replace(cut, squared=merged.squared)
            yield module, merged, _bias_sum(plan, module) if module.has_bias else None


def _stack(plan: AdapterPlan, module: Module) -> LowRank:
    """Put all factors of a module side by side, with weights and scalings in the left ones."""
    lefts, rights = [], []
    for owner, pair in zip(module.owners, module.pairs, strict=True):
        down, up = plan.adapters[owner].read_pair(module.name)
        weight = plan.recipe.weight_for(f"{module.name}.weight", owner)
        lefts.append(up * np.float32(weight * plan.recipe.scale * pair.scaling))
        rights.append(down)
    left, right = np.concatenate(lefts, axis=1), np.concatenate(rights)
    wide, tall = right.astype(np.float64), left.astype(np.float64)
    squared = float(np.sum((tall.T @ tall) * (wide @ wide.T)))
    return LowRank(left, right, max(squared, 0.0), lost=0.0)


def _bias_sum(plan: AdapterPlan, module: Module) -> Floats:
    rows, tensor = module.shape[0], f"{module.name}.bias"
    total = np.zeros(rows, np.float32)
    for owner in module.owners:
        if module.name in plan.adapters[owner].biases:
            bias = read_floats(plan.adapters[owner], tensor, 0, rows)
            weight = plan.recipe.weight_for(tensor, owner)
            total += np.float32(weight * plan.recipe.scale) * bias
    return total


def _elementwise(plan: AdapterPlan) -> Iterator[Merged]:
    """Merge modules whose ΔW is dropped and combined element by element, then truncated."""
    assert plan.wanted is not None  # or the rank would be full
    whole = plan.elementwise
    tensors = {tensor.name: tensor for tensor in whole.tensors}
    conclusions = draw_conclusions(whole)

    def merge(name: str) -> Floats:
        """Let the engine merge one tensor of the plan; flat."""
        sink = ArraySink([tensors[name].base])
        execute(replace(whole, tensors=(tensors[name],)), sink, known=conclusions)
        return sink.arrays[name].view(np.float32)

    for module in plan.modules:
        matrix = merge(f"{module.name}.weight").reshape(module.shape, order=module.order)
        merged = truncate_matrix(matrix, plan.wanted, module.name)
        yield module, merged, merge(f"{module.name}.bias") if module.has_bias else None


def _write_averages(plan: AdapterPlan, targets: set[str], output: MergeAdapters) -> tuple[str, ...]:
    """Store the tensors that all adapters hold in full, averaged by their weights."""
    total = math.fsum(plan.weights)
    saved = [adapter.saved for adapter in plan.adapters]
    with hold_open(saved, checks=True):
        for tensor, info in saved[0].tensors.items():
            shares = [np.float32(weight / total) for weight in plan.weights]
            pieces = (
                sum(map(np.multiply, shares, values), np.zeros(1, np.float32))
                for _, values in read_float_chunks(saved, tensor)
            )
            output.put_saved(tensor, targets, info.shape, pieces)
    return tuple(saved[0].tensors)


# ---------------------------------------------------------------- configuration and manifest


def _config(plan: AdapterPlan, modules: Sequence[ModuleReport]) -> dict[str, Any]:
    configs = [adapter.config for adapter in plan.adapters]
    tasks = {config.get("task_type") for config in configs}
    saved = {name for config in configs for name in config.get("modules_to_save") or ()}
    base = plan.adapters[0].adapter.base_name
    return peft_config(
        {module.name: module.rank for module in modules},
        base_model_name_or_path=short_name(base) if base and Path(base).is_absolute() else base,
        task_type=tasks.pop() if len(tasks) == 1 else None,
        bias=next((c["bias"] for c in configs if c.get("bias") not in (None, "none")), "none"),
        lora_bias=any(module.has_bias for module in plan.modules),
        fan_in_fan_out=plan.adapters[0].adapter.fan_in_fan_out,
        modules_to_save=sorted(saved) or None,
    )


def _how(plan: AdapterPlan, output: Path) -> dict[str, Any]:
    """Return the settings of the merge, for the manifest."""
    recipe = plan.recipe
    given = zip(plan.adapters, plan.weights, recipe.seeds(), recipe.models, strict=True)
    return {
        "method": plan.method,
        "stages": [settings for _, settings in recipe.all_stages],
        "tensors": recipe.described_rules(),
        "scale": recipe.scale,
        "mask": None if plan.is_additive else MASK_VERSION,
        "rank": plan.wanted and plan.wanted.rank,
        "energy": plan.wanted and plan.wanted.energy,
        "dtype": plan.dtype.name,
        "adapters": [
            {
                "path": portable_path(file.path, output),
                "weight": w,
                "seed": s,
                "settings": entry.settings,
            }
            for file, w, s, entry in given
        ],
    }
