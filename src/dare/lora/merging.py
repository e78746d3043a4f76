"""Several LoRA adapters of one base become one, without the base.

Σ wᵢ·sᵢ·Bᵢ·Aᵢ is one product of stacked factors, so `linear` and `sum` are exact by concatenation,
at the price of a rank that is the sum of the ranks. With `rank` or `energy` the result is truncated
by SVD. Methods that drop or elect work on single elements of ΔW and need the whole matrix; they are
run by the same engine as any merge (same plan, masks and bits), one matrix at a time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any, TypedDict, Unpack

import numpy as np
from numpy.typing import NDArray

from dare.errors import InputError, RecipeError
from dare.inputs.sources import ArraySource
from dare.lora.reading import AdapterFile, open_adapters, reading
from dare.lora.reports import AdapterReport, ModuleReport
from dare.lora.svd import (
    LowRank,
    Wanted,
    relative_error,
    truncate_matrix,
    truncate_product,
    working_bytes,
)
from dare.lora.writing import AdapterOutput, check_output, manifest_of, peft_config, readme_of
from dare.output.writer import ArraySink
from dare.planning.data import TensorPlan
from dare.planning.make import make_plan
from dare.planning.plan import Plan
from dare.recipe.schema import ModelEntry, Recipe, TensorRule
from dare.run.execute import Conclusions, draw_conclusions, execute
from dare.tensors.chunks import chunk_spans
from dare.tensors.dtypes import STORAGE_TYPES, StorageType, weight_type
from dare.tensors.header import TensorInfo
from dare.tensors.mask import MASK_VERSION
from dare.tensors.sizes import show_size

Floats = NDArray[np.float32]
AnyPath = str | PathLike[str]
F32 = STORAGE_TYPES["F32"]

COMBINES = ("linear", "sum", "ties")
"""Combine stages that need nothing of the base."""
ADDITIVE = ("linear", "sum")


@dataclass(frozen=True)
class Module:
    """One module of the result: who has it, and how its factors are stored."""

    name: str
    owners: tuple[int, ...]
    """The adapters that have it, by their place."""
    ranks: tuple[int, ...]
    """The rank in each of those."""
    shape: tuple[int, int]
    """Rows of lora_B, columns of lora_A."""
    kernel: tuple[int, ...]
    """What follows the rank in the shape of lora_A: its columns, or channels and kernel."""
    ones: tuple[int, ...]
    """What follows the rank in the shape of lora_B: nothing, or a 1 for each kernel dimension."""
    is_embedding: bool
    is_transposed: bool
    """Whether the base stores the transpose of B·A."""
    has_bias: bool

    @property
    def tensor(self) -> str:
        """The base's tensor that it changes."""
        return f"{self.name}.weight"

    def put(self, output: AdapterOutput, left: Floats, right: Floats) -> None:
        """Store both factors as PEFT does."""
        word, end = ("embedding_", "") if self.is_embedding else ("", ".weight")
        rank = right.shape[0]
        output.put(f"{self.name}.lora_{word}A{end}", right.reshape(rank, *self.kernel))
        output.put(f"{self.name}.lora_{word}B{end}", left.reshape(-1, rank, *self.ones))


@dataclass(frozen=True)
class AdapterPlan:
    """What a merge of adapters will do, and what it will cost."""

    recipe: Recipe
    adapters: tuple[AdapterFile, ...]
    modules: tuple[Module, ...]
    wanted: Wanted | None
    """None keeps everything."""
    weights: tuple[float, ...]
    dtype: StorageType
    notes: tuple[str, ...]

    @property
    def method(self) -> str:
        """The stages, joined by +."""
        return "+".join(stage.name for stage, _ in self.recipe.chain)

    @property
    def is_additive(self) -> bool:
        """Whether the result is a weighted sum of the deltas as they are."""
        return len(self.recipe.chain) == 1 and self.method in ADDITIVE

    @property
    def route(self) -> str:
        """How the adapter is made, in words."""
        if self.wanted is None:
            return "by concatenation"
        return "by SVD of the factors" if self.is_additive else "by SVD of whole matrices"

    @cached_property
    def names(self) -> tuple[str, ...]:
        """What the adapters are called."""
        return tuple(adapter.name for adapter in self.adapters)

    def coefficient(self, tensor: str, adapter: int) -> float:
        """The weight of an adapter for one tensor, with the scale."""
        return self.recipe.weight_for(tensor, adapter) * self.recipe.scale

    @property
    def largest(self) -> Module:
        """The module that takes most memory."""
        return max(self.modules, key=self._module_bytes)

    @property
    def working_bytes(self) -> int:
        """About the most memory that one module takes; there is never more than one."""
        return self._module_bytes(self.largest)

    def _module_bytes(self, module: Module) -> int:
        rows, columns = module.shape
        if self.wanted is not None and not self.is_additive:
            return working_bytes(module.shape, self.wanted)
        factors = sum(module.ranks) * (rows + columns) * 4
        return factors * (2 if self.wanted is None else 6)

    @cached_property
    def inputs(self) -> list[Path]:
        """Every file that is read."""
        return [file for adapter in self.adapters for file in adapter.files]

    @cached_property
    def elementwise(self) -> Plan:
        """The same merge as the engine sees it: deltas onto a base of zeros."""
        shapes = {
            name: info.shape for adapter in self.adapters for name, info in adapter.tensors.items()
        }
        zero = np.zeros(1, np.float32)
        base = ArraySource(
            {
                name: (F32, shape, np.broadcast_to(zero, math.prod(shape)))
                for name, shape in shapes.items()
            }
        )
        return make_plan(self.recipe, base, self.adapters, self.names)

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain values, ready for JSON."""
        return {
            "method": self.method,
            "route": self.route,
            "adapters": [
                {"name": name, "path": str(adapter.path), "weight": weight}
                for name, adapter, weight in zip(
                    self.names, self.adapters, self.weights, strict=True
                )
            ],
            "rank": self.wanted and self.wanted.rank,
            "energy": self.wanted and self.wanted.energy,
            "modules": [
                {
                    "name": module.name,
                    "adapters": [self.names[owner] for owner in module.owners],
                    "ranks": list(module.ranks),
                }
                for module in self.modules
            ],
            "working_bytes": self.working_bytes,
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        """The plan in a few lines."""
        lines = [
            f"{self.method} of {len(self.adapters)} adapters ({', '.join(self.names)}): "
            f"{len(self.modules)} modules, {self.route}",
            f"  one module at a time, about {show_size(self.working_bytes)} "
            f"for {self.largest.name}",
        ]
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes)])


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
    max_memory: int | str = "1GiB",
) -> AdapterPlan:
    """Read configurations and headers and say what `merge_adapters` would do.

    An adapter is a path, or a `ModelEntry` with a weight, a seed and settings of its own. Rules
    name the base's tensors: `TensorRule(match="*.q_proj.weight", …)`.
    `max_memory` is for the buffers and factors of methods that work on single elements.
    """
    recipe = _recipe(
        adapters,
        weights,
        stages,
        drop_rate,
        method=method,
        tensors=tuple(tensors),
        seed=seed,
        scale=scale,
        threads=threads,
        max_memory=max_memory,
    )
    combine = recipe.chain[-1][0].name
    if combine not in COMBINES:
        raise RecipeError(
            f"method {method!r}: {combine} cannot be done without the base; use one of "
            f"{', '.join(COMBINES)}, or give the adapters as models: dare --base BASE --merge …"
        )
    wanted = None if rank is None and energy is None else Wanted(rank, energy)
    opened = open_adapters([entry.file for entry in recipe.models])
    weights = _plain_weights(recipe)
    plan = AdapterPlan(
        recipe,
        tuple(opened),
        _modules(opened, recipe),
        wanted,
        weights,
        weight_type(dtype),
        notes=(),
    )
    if wanted is None and not plan.is_additive:
        raise RecipeError(
            f"method {plan.method!r}: what is left after dropping or electing has full rank, so "
            "say what to keep of it: rank = 16, or energy = 0.9"
        )
    if not plan.modules:
        raise InputError("the adapters have no LoRA modules of a weight other than 0")
    return replace(plan, notes=tuple(_notes(plan)))


class MergeSettings(TypedDict, total=False):
    """The settings of `plan_adapters`, by their names."""

    weights: Sequence[float] | None
    method: str
    rank: int | None
    energy: float | None
    drop_rate: float | None
    stages: Mapping[str, Mapping[str, Any]] | None
    tensors: Sequence[TensorRule]
    seed: int
    scale: float
    dtype: str
    threads: int | None
    max_memory: int | str


def merge_adapters(
    adapters: Sequence[AnyPath | ModelEntry],
    output: AnyPath,
    *,
    overwrite: bool = False,
    **settings: Unpack[MergeSettings],
) -> AdapterReport:
    """Merge LoRA adapters of one base into one; settings are those of `plan_adapters`.

    Without `rank` and `energy` the result is exact, and its rank is the sum of the ranks.
    """
    return run_plan(plan_adapters(adapters, **settings), output, overwrite=overwrite)


def run_plan(plan: AdapterPlan, output: AnyPath, *, overwrite: bool = False) -> AdapterReport:
    """Carry a plan out: write the adapter and say what was done."""
    started = time.perf_counter()
    target = Path(output)
    check_output(target, plan.inputs, overwrite=overwrite)
    with AdapterOutput(target, plan.dtype) as writing:
        if plan.wanted is None or plan.is_additive:
            with reading(plan.adapters):
                modules = list(_write_sums(plan, writing))
        else:
            modules = list(_write_elementwise(plan, writing))
        if not modules:
            raise InputError("the merged change is zero in every module; there is nothing to write")
        with reading(plan.adapters):
            averaged = _write_averages(plan, {module.name for module in modules}, writing)
        report = AdapterReport(
            output=target,
            modules=tuple(modules),
            notes=(*plan.notes, *_unchanged(plan, modules)),
            bytes_written=writing.bytes_written,
            seconds=time.perf_counter() - started,
            method=plan.method,
            route=plan.route,
            adapters=plan.names,
            weights=plan.weights,
            seeds=None if plan.is_additive else plan.recipe.seeds(),
            averaged=tuple(averaged),
        )
        config = _config(plan, modules)
        readme = readme_of("Merged LoRA", config["base_model_name_or_path"], str(report))
        writing.finish(config, _manifest(plan, report), readme, overwrite=overwrite)
    return report


# ---------------------------------------------------------------- the plan


def _recipe(
    adapters: Sequence[AnyPath | ModelEntry],
    weights: Sequence[float] | None,
    stages: Mapping[str, Mapping[str, Any]] | None,
    drop_rate: float | None,
    **settings: Any,
) -> Recipe:
    """The recipe of the same merge, which checks all settings."""
    if isinstance(adapters, str | PathLike):
        raise RecipeError(f"adapters = {str(adapters)!r}: must be a list of directories")
    if weights is not None and len(weights) != len(adapters):
        raise RecipeError(f"weights: {len(weights)} given for {len(adapters)} adapters")
    tables = {name: dict(table) for name, table in (stages or {}).items()}
    if drop_rate is not None:
        tables.setdefault("dare", {})["drop_rate"] = drop_rate
    entries = [
        adapter if isinstance(adapter, ModelEntry) else ModelEntry(file=adapter)
        for adapter in adapters
    ]
    if weights is not None:
        entries = [
            entry.model_copy(update={"weight": weight})
            for entry, weight in zip(entries, weights, strict=True)
        ]
    return Recipe(base="zeros", models=entries, stages=tables, verbose=False, **settings)


def _plain_weights(recipe: Recipe) -> tuple[float, ...]:
    if any(isinstance(rule.weight, list) for rule in recipe.tensors):
        raise RecipeError("weights: one number in each rule, the same for all layers")
    weights = [weight for weight in recipe.weights() if isinstance(weight, int | float)]
    if len(weights) < len(recipe.models):
        raise RecipeError("weights: one number for each adapter, the same for all layers")
    return tuple(map(float, weights))


def _modules(adapters: Sequence[AdapterFile], recipe: Recipe) -> tuple[Module, ...]:
    owners: dict[str, list[int]] = {}
    for place, adapter in enumerate(adapters):
        for name in adapter.pairs:
            if recipe.weight_for(f"{name}.weight", place) != 0:
                owners.setdefault(name, []).append(place)
    return tuple(_module(name, adapters, owners[name]) for name in sorted(owners))


def _module(name: str, adapters: Sequence[AdapterFile], owners: Sequence[int]) -> Module:
    pairs = [adapters[place].pairs[name] for place in owners]
    down, up = pairs[0].down.shape, pairs[0].up.shape
    return Module(
        name=name,
        owners=tuple(owners),
        ranks=tuple(pair.rank for pair in pairs),
        shape=(up[0], int(np.prod(down[1:]))),
        kernel=down[1:],
        ones=up[2:],
        is_embedding=pairs[0].is_embedding,
        is_transposed=pairs[0].is_embedding or adapters[0].adapter.fan_in_fan_out,
        has_bias=any(name in adapter.biases for adapter in adapters),
    )


def _notes(plan: AdapterPlan) -> Iterator[str]:
    bases = {str(adapter.adapter.base_name) for adapter in plan.adapters}
    if len(bases) > 1:
        yield (
            f"the adapters name different bases ({', '.join(sorted(bases))}); the result names "
            "the first, and is of use only if these are the same model"
        )
    partial = [module for module in plan.modules if len(module.owners) < len(plan.adapters)]
    if partial:
        yield (
            f"{len(partial)} of {len(plan.modules)} modules are not in every adapter; "
            "where one lacks a module, it changes nothing there"
        )
    if plan.adapters[0].saved:
        total = sum(plan.weights)
        if total == 0:
            raise RecipeError(
                "weights: they sum to 0, so what is stored in full (modules_to_save, biases) has "
                "no average; give other weights"
            )
        how = "the weights" if np.isclose(total, 1) else f"the weights divided by their sum {total}"
        yield f"what is stored in full is averaged by {how}, and nothing in it is dropped or scaled"
    if not plan.is_additive:
        yield from (str(warning) for warning in plan.elementwise.warnings)
        if _changes_over_layers(plan.recipe):
            yield (
                "settings that change over the layers: the base is not known, so the last layer "
                "is the last one that an adapter changes"
            )
        if "dare" in plan.method:
            yield (
                "dropping adds noise of full rank, which a low rank cuts off again; most of the "
                "error that is reported is this noise"
            )


def _changes_over_layers(recipe: Recipe) -> bool:
    tables = [
        *(settings for _, settings in recipe.chain),
        *(entry.settings for entry in recipe.models),
        *(rule.settings for rule in recipe.tensors),
    ]
    return any(isinstance(value, list) for table in tables for value in table.values())


def _unchanged(plan: AdapterPlan, written: Sequence[ModuleReport]) -> Iterator[str]:
    left = len(plan.modules) - len(written)
    if left:
        yield f"{left} modules are left out: their merged change is zero"


# ---------------------------------------------------------------- the modules


def _write_sums(plan: AdapterPlan, output: AdapterOutput) -> Iterator[ModuleReport]:
    """Modules of a weighted sum, from their factors alone."""
    for module in plan.modules:
        stacked = _stack(plan, module)
        if plan.wanted is not None:
            low_rank = truncate_product(stacked.left, stacked.right, plan.wanted, module.name)
            stacked = replace(low_rank, squared=stacked.squared)
        if stacked.rank == 0:
            continue
        module.put(output, stacked.left, stacked.right)
        if module.has_bias:
            output.put(f"{module.name}.lora_B.bias", _bias_sum(plan, module))
        yield _module_report(module, stacked)


def _stack(plan: AdapterPlan, module: Module) -> LowRank:
    """All factors of a module side by side, with weights and scalings in the left ones."""
    lefts, rights = [], []
    for owner in module.owners:
        adapter = plan.adapters[owner]
        down, up = adapter.read_pair(module.name)
        factor = plan.coefficient(module.tensor, owner) * adapter.pairs[module.name].scaling
        lefts.append(up * np.float32(factor))
        rights.append(down)
    left, right = np.concatenate(lefts, axis=1), np.concatenate(rights)
    wide, tall = right.astype(np.float64), left.astype(np.float64)
    squared = float(np.sum((tall.T @ tall) * (wide @ wide.T)))
    return LowRank(left, right, max(squared, 0.0), lost=0.0)


def _bias_sum(plan: AdapterPlan, module: Module) -> Floats:
    total = np.zeros(module.shape[0], np.float32)
    for owner in module.owners:
        if module.name in plan.adapters[owner].biases:
            bias = plan.adapters[owner].read_bias(module.name)
            total += np.float32(plan.coefficient(f"{module.name}.bias", owner)) * bias
    return total


def _write_elementwise(plan: AdapterPlan, output: AdapterOutput) -> Iterator[ModuleReport]:
    """Modules whose ΔW is dropped and combined element by element, then truncated."""
    assert plan.wanted is not None  # or the rank would be full
    tensors = {tensor.name: tensor for tensor in plan.elementwise.tensors}
    conclusions = draw_conclusions(plan.elementwise)
    for module in plan.modules:
        merged = _merge_tensor(plan.elementwise, tensors[module.tensor], conclusions)
        matrix = (
            merged.reshape(-1, module.shape[0]).T
            if module.is_transposed
            else merged.reshape(module.shape)
        )
        low_rank = truncate_matrix(matrix, plan.wanted, module.name)
        if low_rank.rank == 0:
            continue
        module.put(output, low_rank.left, low_rank.right)
        if module.has_bias:
            bias = _merge_tensor(plan.elementwise, tensors[f"{module.name}.bias"], conclusions)
            output.put(f"{module.name}.lora_B.bias", bias)
        yield _module_report(module, low_rank)


def _merge_tensor(plan: Plan, tensor: TensorPlan, conclusions: Conclusions) -> Floats:
    """Let the engine merge one tensor of the plan; flat."""
    sink = ArraySink([tensor.base])
    execute(replace(plan, tensors=(tensor,)), sink, known=conclusions)
    return sink.arrays[tensor.name].view(np.float32)


def _module_report(module: Module, written: LowRank) -> ModuleReport:
    return ModuleReport(
        module.name,
        module.ranks,
        written.rank,
        norm=float(np.sqrt(written.squared)),
        error=relative_error(written.lost, written.squared),
    )


# ---------------------------------------------------------------- what is stored in full


def _write_averages(plan: AdapterPlan, targets: set[str], output: AdapterOutput) -> list[str]:
    total = sum(plan.weights)
    shares = [np.float32(weight / total) for weight in plan.weights] if total else []
    for tensor, info in plan.adapters[0].saved.items():
        module, _, parameter = tensor.rpartition(".")
        key = f"{module}.base_layer.{parameter}" if module in targets else tensor
        output.put_pieces(key, info.shape, _average(plan, tensor, info, shares))
    return list(plan.adapters[0].saved)


def _average(
    plan: AdapterPlan, tensor: str, info: TensorInfo, shares: Sequence[np.float32]
) -> Iterator[Floats]:
    for start, count in chunk_spans(info.elements):
        total = np.zeros(count, np.float32)
        for adapter, share in zip(plan.adapters, shares, strict=True):
            total += share * adapter.read_saved(tensor, start, count)
        yield total


# ---------------------------------------------------------------- what is said of it


def _config(plan: AdapterPlan, modules: Sequence[ModuleReport]) -> dict[str, Any]:
    configs = [adapter.config for adapter in plan.adapters]
    tasks = {config.get("task_type") for config in configs}
    saved = {name for config in configs for name in config.get("modules_to_save") or ()}
    return peft_config(
        {module.name: module.rank for module in modules},
        base_model_name_or_path=plan.adapters[0].adapter.base_name,
        task_type=tasks.pop() if len(tasks) == 1 else None,
        bias=next((c["bias"] for c in configs if c.get("bias") not in (None, "none")), "none"),
        lora_bias=any(module.has_bias for module in plan.modules),
        fan_in_fan_out=plan.adapters[0].adapter.fan_in_fan_out,
        modules_to_save=sorted(saved) or None,
    )


def _manifest(plan: AdapterPlan, report: AdapterReport) -> dict[str, Any]:
    recipe = plan.recipe
    return manifest_of(
        "merge",
        {
            "method": plan.method,
            "stages": [settings for _, settings in recipe.chain],
            "tensors": recipe.described_rules(),
            "scale": recipe.scale,
            "mask": None if plan.is_additive else MASK_VERSION,
            "rank": plan.wanted and plan.wanted.rank,
            "energy": plan.wanted and plan.wanted.energy,
            "dtype": plan.dtype.name,
            "adapters": [
                {
                    "path": str(adapter.path.resolve()),
                    "weight": weight,
                    "seed": seed,
                    "settings": entry.settings,
                }
                for adapter, weight, seed, entry in zip(
                    plan.adapters, plan.weights, recipe.seeds(), recipe.models, strict=True
                )
            ],
            "report": report.to_dict(),
        },
    )
