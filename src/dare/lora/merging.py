"""Several LoRA adapters of one base become one, without the base.

Σ wᵢ·sᵢ·Bᵢ·Aᵢ is one product of stacked factors, so `linear` and `sum` are exact by concatenation,
at the price of a rank that is the sum of the ranks. With `rank` or `energy` the result is truncated
by SVD. Other methods are run by the same engine as any merge (same plan, masks and bits), one
module at a time: on whole matrices, which must be truncated, or on small ones in the core space.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from dare.checks.inputs import check_inputs
from dare.documents.document import Document
from dare.documents.notices import Notice, notice
from dare.documents.shown import Shown
from dare.documents.words import counted, named, show_size
from dare.errors import InputError, RecipeError, did_you_mean
from dare.inputs.opening import Inputs
from dare.inputs.sources import (
    Aligned,
    ArraySource,
    Floats,
    Source,
    hold_open,
    read_float_chunks,
    read_floats,
)
from dare.kernels import MatrixGpus, call_with_matrices, find_matrix_gpus, load, matrix_gpu
from dare.lora.low_rank import (
    CoreSource,
    FindCore,
    LowRank,
    Wanted,
    check_finite,
    core_bytes,
    join_experts,
    keep_last,
    truncate_matrix,
    truncate_product,
    working_bytes,
)
from dare.lora.reading import HOW_ELSE, AdapterFile, LoraModule, open_adapters
from dare.lora.writing import (
    AdapterReport,
    AdapterWork,
    Made,
    ModuleReport,
    peft_config,
)
from dare.output.memory import MemorySink
from dare.output.receipt import inputs_of_output, portable_path, short_name
from dare.planning.make import rate_notes
from dare.planning.plan import Plan
from dare.recipe.options import RunOptions
from dare.recipe.recipe import ModelEntry, Recipe, TensorRule
from dare.recipe.settings import parameter_names, request_with_settings
from dare.run.engine import draw_conclusions, execute, run
from dare.run.nested import plan_inputs
from dare.stores.locations import AnyPath, to_path
from dare.tensors.dtypes import STORAGE_TYPES, StorageType, weight_type
from dare.tensors.mask import MASK_VERSION

# The space in which changes are merged: that of whole matrices, or the one that adapters span.
Space = Literal["full", "core"]


@dataclass(frozen=True)
class AdapterPlan(Shown):
    """The plan of a merge of adapters, with its cost."""

    recipe: Recipe
    options: RunOptions
    adapters: tuple[AdapterFile, ...]
    modules: tuple[LoraModule, ...]
    wanted: Wanted | None  # None keeps everything
    weights: tuple[float, ...]
    dtype: StorageType
    space: Space
    notes: tuple[Notice, ...] = ()

    @property
    def method(self) -> str:
        """The stages, joined by +, of all methods."""
        return self.recipe.methods

    @cached_property
    def is_additive(self) -> bool:
        """True if the result is a weighted sum of the deltas as they are."""

        def is_sum(tensor: str) -> bool:
            (stage, _), *others = self.recipe.chain_for(tensor)
            return not others and stage.is_sum(self.recipe.joint_settings_for(tensor)[0])

        return all(is_sum(tensor) for adapter in self.adapters for tensor in adapter.tensors)

    @property
    def is_stacked(self) -> bool:
        """True if the factors are put side by side, which takes no engine."""
        return self.is_additive and self.space == "full"

    @cached_property
    def matrix_gpus(self) -> MatrixGpus | None:
        """The GPUs that whole matrices are computed on, if any are."""
        return None if self.is_stacked else find_matrix_gpus(self.options.device)

    @property
    def route(self) -> str:
        """The way in which the adapter is made, in words."""
        if self.space == "core":
            return "in the core space" + (", by SVD" if self.wanted else "")
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
        most = max(map(self._module_bytes, self.modules))
        return most if self.is_stacked else max(most, self.engine_plan.cost.matrix_work)

    def _module_bytes(self, module: LoraModule) -> int:
        if self.space == "core":
            return core_bytes(module)
        if self.wanted is not None and not self.is_additive:
            others = 4 * (module.experts - 1) * math.prod(module.shape)
            return working_bytes(module.shape, self.wanted) + others
        factors = module.experts * sum(module.ranks) * sum(module.shape) * 4
        return factors * (2 if self.wanted is None else 6)

    @cached_property
    def engine_plan(self) -> Plan:
        """The same merge as the engine sees it: deltas onto a base of zeros."""
        sources: Sequence[Source] = self.adapters
        if self.space == "core":
            given = self.adapters, self.modules, self.find_core
            sources = [CoreSource(number, *given) for number in range(len(sources))]
        zero, kind = np.zeros(1, np.float32), STORAGE_TYPES["F32"]
        infos = [info for source in sources for info in source.tensors.values()]
        zeros = {i.name: (kind, i.shape, np.broadcast_to(zero, i.elements)) for i in infos}
        aligned = Aligned(ArraySource(zeros), tuple(sources))
        inputs = Inputs(self.names, (None,) * (1 + len(sources)), aligned, ())
        return plan_inputs(self.recipe, inputs, self.options)

    @cached_property
    def find_core(self) -> FindCore:
        """The search for a module's core space."""
        return keep_last(self.adapters)

    def document(self) -> Document:
        """Return what will be merged, and how."""
        largest = max(self.modules, key=self._module_bytes).name
        memory = f"about {show_size(self.working_bytes)} for {largest}, one module at a time"
        return Document(
            title=f"Plan: {self.method} of {named(self.names)}",
            kind="plan",
            facts=(
                ("modules", f"{counted(len(self.modules), 'module')}, {self.route}"),
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
    space: Space = "full",
    stages: Mapping[str, Mapping[str, Any]] | None = None,
    tensors: Sequence[TensorRule] = (),
    seed: int = 42,
    scale: float = 1.0,
    dtype: str = "F32",
    threads: int | None = None,
    max_memory: int | str | None = None,
    device: str = "cpu",
    allow_pickle: bool = False,
    **parameters: Any,
) -> AdapterPlan:
    """Read configurations and headers and plan what `merge_adapters` would do.

    An adapter is a path, or a `ModelEntry` with a weight, a seed and settings of its own. Rules
    name the base's tensors: `TensorRule(match="*.q_proj.weight", …)`. `parameters` are those of
    stages (`drop_rate`, `keep_ratio`, …) and `model_seed`: one value, or a list with one for each
    adapter. `space = "core"` merges in the small space that the adapters span.
    `max_memory` limits the buffers and factors of methods that work on single elements. `device` is
    what computes whole matrices, as in `merge`; sums are made by the processor, from the factors.
    """
    if isinstance(adapters, str | PathLike):
        raise RecipeError(f"adapters = {str(adapters)!r}: must be a list of folders")
    if space not in get_args(Space):
        raise RecipeError(f"space = {space!r}: must be {' or '.join(map(repr, get_args(Space)))}")
    known = (*parameter_names(), "model_seed")
    for name in parameters.keys() - set(known):
        raise RecipeError(f"{name}: not known{did_you_mean(name, known)}")
    given: dict[str, Any] = {"method": method, "stages": stages, "tensors": list(tensors)}
    given |= {"seed": seed, "scale": scale, "weight": weights, **parameters}
    given |= {"threads": threads, "max_memory": max_memory, "verbose": False}
    given |= {"device": device, "allow_pickle": allow_pickle}
    given = {name: value for name, value in given.items() if value is not None}
    request = request_with_settings({"base": "zeros", "models": list(adapters)}, given, "arguments")
    recipe = request.recipe
    wanted = None if rank is None and energy is None else Wanted(rank, energy)
    files = [entry.file for entry in recipe.models]
    opened = open_adapters(files, allow_pickle=recipe.allow_pickle)
    check_inputs(recipe, ArraySource({}), opened, inputs_of_output)
    modules, plain = tuple(_modules(opened, recipe)), _plain_weights(recipe)
    kind = weight_type(dtype)
    plan = AdapterPlan(recipe, request.options, opened, modules, wanted, plain, kind, space)
    if not modules:
        raise InputError("no adapter with a weight other than 0 has a LoRA module")
    _check_method(plan)
    return replace(plan, notes=tuple(_notes(plan)))


def _check_method(plan: AdapterPlan) -> None:
    """Refuse stages that look at the base, and whole matrices that nothing would make small."""
    recipe, where = plan.recipe, f"method {plan.method!r}"
    plan.matrix_gpus  # noqa: B018 (refuses where there are none)
    for tensor in (tensor for adapter in plan.adapters for tensor in adapter.tensors):
        combine = recipe.chain_for(tensor).combine
        if combine.needs_base(recipe.joint_settings_for(tensor)[0]):
            fault = f"{combine.name} needs the base"
            raise RecipeError(f"{where}: {fault}; use another, such as ties, {HOW_ELSE}")
    for module in plan.modules if plan.space == "core" else ():
        stages = [stage for stage, _ in recipe.chain_for(module.tensor) if stage.sees == "matrix"]
        if module.experts > 1 and stages:
            fault = f"{stages[0].name} would treat the experts of {module.name} as one matrix"
            raise RecipeError(f"{where}: {fault}; use a method without it for them, {HOW_ELSE}")
    if plan.wanted is None and not plan.is_additive and plan.space == "full":
        remedy = 'set rank = 16 or energy = 0.9, or merge in the core space: space = "core"'
        raise RecipeError(f"{where}: its result may have full rank; {remedy}")


def merge_adapters(
    adapters: Sequence[AnyPath | ModelEntry],
    output: AnyPath,
    *,
    overwrite: bool = False,
    **settings: Any,
) -> AdapterReport:
    """Merge LoRA adapters of one base into one; settings are those of `plan_adapters`.

    Without `rank` and `energy`, `linear` and `sum` are exact, and the ranks add up.
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

    def fill(self) -> Made[AdapterReport]:
        plan, modules = self._plan, []
        for module, parts, bias in _summed(plan) if plan.is_stacked else _by_engine(plan):
            merged = join_experts(parts)
            if merged.rank == 0:
                continue
            self._put(module, merged)
            if bias is not None:
                self.put(f"{module.name}.lora_B.bias", bias)
            norm = math.sqrt(merged.squared)
            rank = merged.rank // len(parts)
            modules.append(ModuleReport(module.name, module.ranks, rank, norm, merged.error))
        if not modules:
            raise InputError("the merged change is zero in every module; there is nothing to write")
        averaged = _write_averages(plan, {module.name for module in modules}, self)
        left = len(plan.modules) - len(modules)
        left_out = [notice("zero_modules", modules=counted(left, "module"))] if left else []
        report = AdapterReport(
            output=self.layout.target,
            modules=tuple(modules),
            notes=(*plan.notes, *left_out),
            bytes_written=self.bytes_written,
            seconds=self.seconds,
            method=plan.method,
            route=plan.route,
            adapters=plan.names,
            weights=plan.weights,
            seeds=None if plan.is_additive else plan.recipe.seeds(),
            averaged=averaged,
        )
        return report, _config(plan, modules), _how(plan, self.layout.target)

    def _put(self, module: LoraModule, merged: LowRank) -> None:
        """Store both factors as PEFT does, with the dimensions of a convolution at the end."""
        pair, rank = module.pairs[0], merged.rank
        word, end = ("embedding_", "") if pair.is_embedding else ("", ".weight")
        right = merged.right.reshape(rank, *pair.down.shape[1:])
        self.put(f"{module.name}.lora_{word}A{end}", right)
        left = merged.left.reshape(-1, rank, *pair.up.shape[2:])
        self.put(f"{module.name}.lora_{word}B{end}", left)


# ---------------------------------------------------------------- the plan


def _plain_weights(recipe: Recipe) -> tuple[float, ...]:
    if any(isinstance(rule.weight, list) for rule in recipe.tensors):
        raise RecipeError("weights: give one number in each rule; it is the same for all layers")
    weights = [weight for weight in recipe.weights() if isinstance(weight, int | float)]
    if len(weights) < len(recipe.models):
        raise RecipeError("weights: give one number for each adapter, the same for all layers")
    return tuple(map(float, weights))


def _modules(adapters: Sequence[AdapterFile], recipe: Recipe) -> Iterator[LoraModule]:
    """Yield the modules that an adapter changes with a weight other than 0, in order of name."""
    for name in sorted({name for adapter in adapters for name in adapter.pairs}):
        owners = [
            place
            for place, adapter in enumerate(adapters)
            if (pair := adapter.pairs.get(name)) and recipe.weight_for(pair.tensor, place) != 0
        ]
        if owners:
            pairs = tuple(adapters[place].pairs[name] for place in owners)
            is_transposed = pairs[0].is_embedding or adapters[0].adapter.fan_in_fan_out
            has_bias = any(name in adapter.biases for adapter in adapters)
            yield LoraModule(name, tuple(owners), pairs, "F" if is_transposed else "C", has_bias)


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
            raise RecipeError("weights: they sum to 0, so what is stored in full has no average")
        how = "the weights" if np.isclose(total, 1) else f"the weights divided by their sum {total}"
        yield notice("averaged_in_full", how=how)
    if plan.is_stacked:
        return
    yield from plan.engine_plan.warnings
    recipe = plan.recipe
    yield from rate_notes(recipe)
    tables = [settings for _, settings in recipe.all_stages]
    tables += [entry.settings for entry in recipe.models]
    tables += [rule.settings for rule in recipe.tensors]
    if any(isinstance(value, list) for table in tables for value in table.values()):
        yield notice("adapter_layers")
    if plan.space == "full" and any(stage.drops_at_random for stage, _ in recipe.all_stages):
        yield notice("noise_of_dropping")


# ---------------------------------------------------------------- the modules

# A module, the merged factors of each expert, and the bias of lora_B where there is one.
Merged = tuple[LoraModule, list[LowRank], Floats | None]


def _summed(plan: AdapterPlan) -> Iterator[Merged]:
    """Merge modules by a weighted sum, from their factors alone."""
    with hold_open(plan.adapters, checks=True):
        for module in plan.modules:
            merged = list(_stack(plan, module))
            if (wanted := plan.wanted) is not None:
                cuts = (truncate_product(m.left, m.right, wanted, module.name) for m in merged)
                pairs = zip(cuts, merged, strict=True)
                merged = [cut._replace(squared=each.squared) for cut, each in pairs]
            yield module, merged, _bias_sum(plan, module) if module.has_bias else None


def _stack(plan: AdapterPlan, module: LoraModule) -> Iterator[LowRank]:
    """Put all factors of a module side by side, with weights and scalings in the left ones."""
    lefts, rights = [], []
    for owner, pair in zip(module.owners, module.pairs, strict=True):
        down, up = plan.adapters[owner].read_pair(module.name)
        weight = plan.recipe.weight_for(module.tensor, owner)
        lefts.append(up * np.float32(weight * plan.recipe.scale * pair.scaling))
        rights.append(down)
    both = np.concatenate(lefts, axis=2), np.concatenate(rights, axis=1)
    check_finite(*both, where=module.name)
    for left, right in zip(*both, strict=True):
        wide, tall = right.astype(np.float64), left.astype(np.float64)
        squared = float(np.sum((tall.T @ tall) * (wide @ wide.T)))
        yield LowRank(left, right, max(squared, 0.0), lost=0.0)


def _bias_sum(plan: AdapterPlan, module: LoraModule) -> Floats:
    rows, tensor = module.shape[0], f"{module.name}.bias"
    total = np.zeros(rows, np.float32)
    for owner in module.owners:
        if module.name in plan.adapters[owner].biases:
            bias = read_floats(plan.adapters[owner], tensor, 0, rows)
            weight = plan.recipe.weight_for(tensor, owner)
            total += np.float32(weight * plan.recipe.scale) * bias
    return total


def _by_engine(plan: AdapterPlan) -> Iterator[Merged]:
    """Merge modules as the engine merges tensors: whole matrices, or those in the core space."""
    whole = plan.engine_plan
    gpu = matrix_gpu(load(plan.options.device)) if plan.matrix_gpus else None
    tensors = {tensor.name: tensor for tensor in whole.tensors}
    conclusions = draw_conclusions(whole)

    def merge(name: str) -> Floats:
        """Let the engine merge one tensor of the plan; flat."""
        sink = MemorySink.with_room([tensors[name].base])
        execute(replace(whole, tensors=(tensors[name],)), sink, known=conclusions)
        return sink.arrays[name].view(np.float32)

    with hold_open(plan.adapters):
        for module in plan.modules:
            values = merge(module.tensor)
            if plan.space == "core":
                merged = list(plan.find_core(module).expand(values, plan.wanted, module.name))
            else:
                assert plan.wanted is not None  # or the rank would be full
                flat = values.reshape(module.experts, -1)
                matrices = (each.reshape(module.shape, order=module.order) for each in flat)
                how = plan.wanted, module.name
                merged = [call_with_matrices(gpu, truncate_matrix, m, *how) for m in matrices]
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
        {module.name for module in plan.modules if module.pairs[0].is_parameter},
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
    keys = ("path", "weight", "seed", "settings")
    paths = [portable_path(file.path, output) for file in plan.adapters]
    settings = [entry.settings for entry in recipe.models]
    given = zip(paths, plan.weights, recipe.seeds(), settings, strict=True)
    return {
        **({"device": plan.matrix_gpus.title} if plan.matrix_gpus else {}),
        "method": plan.method,
        "stages": [settings for _, settings in recipe.all_stages],
        "tensors": recipe.described_rules(),
        "scale": recipe.scale,
        "mask": None if plan.is_additive else MASK_VERSION,
        "space": plan.space,
        "rank": plan.wanted and plan.wanted.rank,
        "energy": plan.wanted and plan.wanted.energy,
        "dtype": plan.dtype.name,
        "adapters": [dict(zip(keys, values, strict=True)) for values in given],
    }
