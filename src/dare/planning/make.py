"""From a recipe and the headers of its files to a plan, or to a list of all misfits.

The comparison of models' tensors with the base's gives facts; plans and analyses word them.
"""

from __future__ import annotations

import glob
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from fractions import Fraction
from typing import Annotated, Any

from dare.documents.notices import LIMIT, Notice, Severity, notice
from dare.documents.values import Limits
from dare.documents.words import counted, show_size
from dare.errors import MismatchError, RecipeError
from dare.formats import find_recoding
from dare.formats.recoding import Recoding
from dare.inputs.gathered import Gathered, open_gathered
from dare.inputs.pipeline import merged_spec, stems_of
from dare.inputs.sources import CodedInfo, Drop, Source, extras_of
from dare.kernels import check_is_there, device_notices, device_of
from dare.planning.data import Fate, TensorPlan, Treatment, lay_out
from dare.planning.plan import Plan
from dare.recipe.layers import OUTSIDE, find_depths
from dare.recipe.options import DEFAULT_MEMORY, USUAL, RunOptions
from dare.recipe.recipe import Recipe, TensorRule
from dare.stages import Settings, Stage
from dare.stages.dropping import ROUNDING, suggest_q
from dare.stages.registry import LATER_PARAMETERS
from dare.tensors.dtypes import MODEL_TYPES, STORAGE_TYPES, StorageType
from dare.tensors.header import TensorInfo, show_shape
from dare.tensors.names import is_layer_matrix, norm_layers, some_of


class Misfit(StrEnum):
    """A reason why a tensor does not fit."""

    NOT_WEIGHTS = "not weights"  # the base stores it in a type that is not one of weights
    UNLIKE_BASE = "unlike base"  # in another shape, or in a type that does not go with the base's
    NOT_IN_BASE = "not in base"
    MISSING = "missing"  # a model that should have all weights lacks it


@dataclass(frozen=True)
class StoredForm:
    """A tensor as it is stored."""

    shape: tuple[Annotated[int, Limits(ge=0)], ...]
    dtype: str

    @classmethod
    def of(cls, info: TensorInfo) -> StoredForm:
        """Return the form of a tensor that a header describes."""
        return cls(info.shape, info.dtype.name)

    def __str__(self) -> str:
        """The shape and the storage type: `8×4 F32`."""
        return f"{show_shape(self.shape)} {self.dtype}"


@dataclass(frozen=True)
class LeftOut:
    """A tensor that does not fit."""

    tensor: str
    reason: Misfit
    # The models that have it, or lack it; one, if it is unlike the base's. Where it is not weights,
    # only those whose values differ from the base's, if any do.
    models: tuple[str, ...]
    base: StoredForm | None = None  # the base's copy, if it matters
    found: StoredForm | None = None  # the models' copies that differ from the base's

    @property
    def reason_text(self) -> str:
        """The reason in a few words."""
        models = ", ".join(self.models)
        return {
            Misfit.NOT_WEIGHTS: f"{self.base and self.base.dtype} is not a type of weights"
            + (f"; the values in {models} differ from the base's" if self.found else ""),
            Misfit.UNLIKE_BASE: f"base is {self.base}, {models} is {self.found}",
            Misfit.NOT_IN_BASE: f"in {models}, not in the base",
            Misfit.MISSING: f"not in {models}",
        }[self.reason]

    def __str__(self) -> str:
        """The tensor and the reason in a line."""
        return f"{self.tensor}: {self.reason_text}"


@dataclass(frozen=True)
class Fit:
    """A tensor of the base beside the models' copies; models are given by their numbers."""

    base: TensorInfo
    fitting: tuple[int, ...]
    absent: tuple[int, ...]  # without a copy; no misfit if the model is partial, as an adapter is
    misfits: tuple[LeftOut, ...]
    is_extra: bool = False  # True if only models have it, and the output takes it over

    @property
    def is_mismatched(self) -> bool:
        """Tell if a model's copy is unlike the base's."""
        return any(misfit.reason is Misfit.UNLIKE_BASE for misfit in self.misfits)


Named = Sequence[tuple[str, Source]]  # models with their names, of which two may be the same


def fit_tensor(base: TensorInfo, models: Named) -> Fit:
    """Compare a tensor of the base with the models' copies."""
    fitting, absent, missing, unlike = [], [], [], []
    for number, (name, source) in enumerate(models):
        info = source.tensors.get(base.name)
        if info is None:
            absent.append(number)
            missing += [name] * (base.dtype.is_weight and not source.treats_as_unchanged(base.name))
        elif info.shape == base.shape and (
            info.dtype == base.dtype or (info.dtype.is_weight and base.dtype.is_weight)
        ):
            fitting.append(number)
        else:
            forms = StoredForm.of(base), StoredForm.of(info)
            unlike.append(LeftOut(base.name, Misfit.UNLIKE_BASE, (name,), *forms))
    lacking = [LeftOut(base.name, Misfit.MISSING, tuple(missing))] if missing else []
    return Fit(base, tuple(fitting), tuple(absent), (*lacking, *unlike))


def find_extras(base: Source, models: Named) -> list[LeftOut]:
    """Return the tensors that models have and the base lacks, in the order of their names."""
    return [
        LeftOut(tensor, Misfit.NOT_IN_BASE, tuple(models[number][0] for number in owners))
        for tensor, owners in extras_of(base, [source for _, source in models]).items()
    ]


# ---------------------------------------------------------------- plans


FINDINGS_SHOWN = 20
POLICIES = {
    Misfit.MISSING: ("on_missing", "missing_as_zero", '"base" to count its change there as zero'),
    Misfit.UNLIKE_BASE: ("on_mismatch", "mismatch_kept", '"base" to keep the base\'s'),
    Misfit.NOT_IN_BASE: (
        "on_extra",
        "extra_dropped",
        '"drop" to leave it out, "average" to keep it',
    ),
}
"""For each misfit: the setting that decides, the notice if it is allowed, and its value then."""


def make_plan(
    recipe: Recipe,
    base: Source,
    models: Sequence[Source],
    names: Sequence[str],
    notes: Sequence[Notice] = (),
    options: RunOptions = USUAL,
    first_layer: int = 0,
) -> Plan:
    """Decide the fate of every tensor; raise MismatchError with all misfits.

    `first_layer` is the number of the first layer, for a part of a stack.
    """
    check_is_there(options.device)
    recipe = _with_delta_settings(recipe, models)
    recoding = find_recoding(recipe, (base, *models))
    named = list(zip(names, models, strict=True))
    fits = [
        Fit(info, (), (), (), is_extra=True) if name in base.extras else fit_tensor(info, named)
        for name, info in sorted(base.tensors.items())
    ]
    extras = find_extras(base, named)
    misfits = [*(misfit for fit in fits for misfit in fit.misfits), *extras]
    problems, notices = _judge(recipe, misfits)
    severe = [note for note in notes if note.severity is not Severity.NOTE]
    warnings = [
        *(*_recipe_warnings(recipe), *severe, *notices, *_taken_notices(base, names)),
        *device_notices(options.device),
    ]
    depths = find_depths(base.tensors, first_layer) if recipe.has_gradients else {}
    known: dict[Any, Treatment] = {}
    tensors = []
    for fit in fits:
        tied_to = base.ties.get(fit.base.name)
        depth = depths.get(tied_to or fit.base.name, OUTSIDE)
        dtype = _output_type(recipe, fit.base, tied_to or fit.base.name, recoding)
        tensors.append(_plan_tensor(recipe, fit, dtype, tied_to, depth, named, problems, known))
    gathered, tensors = _with_gathered(recipe, base, names, tensors)
    unrelated, displaced = _find_idle(base, named, fits)
    problems = unrelated or problems or displaced
    if problems:
        more = len(problems) - FINDINGS_SHOWN
        head = [f"{len(problems)} tensors do not fit together:"] if len(problems) > 1 else []
        rest = [f"… and {more} more"] if more > 0 else []
        raise MismatchError(*head, *problems[:FINDINGS_SHOWN], *rest)
    for rule in recipe.tensors:
        matched = list(filter(rule.matches, base.tensors))
        tied = [f"{name} is {base.ties[name]}" for name in matched if name in base.ties]
        if len(tied) == len(matched):
            reason = f"{', '.join(tied)}, whose rules hold" if tied else "there are none"
            warnings.append(notice("unused_rule", str(rule), reason=reason))

    warnings += _float8_warnings(recipe, tensors) if recoding is None else ()
    described = [tensor.described for tensor in tensors]
    layout = None
    if recipe.output is not None:
        stored = [own for t in described for own in recoding.stored(t)] if recoding else described
        layout = lay_out(
            *(recipe.output, stored, recipe.shard_size, stems_of(base)),
            recoding=recoding,
            merged=tuple(described),
            scratch=options.scratch,
            metadata=merged_spec(base, named),
        )
        listed = sorted(described) if recoding else (t for f in layout.files.values() for t in f)
        order = {name: number for number, (name, _, _) in enumerate(listed)}
        tensors.sort(key=lambda tensor: order[tensor.name])
    all_notes = dict.fromkeys((*notes, *rate_notes(recipe), *_format_notes(recipe, base)))
    plan = Plan(
        recipe,
        base,
        tuple(models),
        tuple(names),
        tuple(tensors),
        tuple(extra.tensor for extra in extras),
        tuple(warnings),
        layout,
        tuple(note for note in all_notes if note not in severe),
        options=options,
        gathered=gathered,
    )
    plan = plan.saying(warnings=_merged_notices(plan))
    plan.cost.check()
    return plan.saying(notes=_notes_on_resources(plan))


def _notes_on_resources(plan: Plan) -> Iterator[Notice]:
    """Say where more memory is taken than usual, and what no GPU will merge."""
    cost = plan.cost
    if cost.takes_more:
        usual, needed = map(show_size, (DEFAULT_MEMORY, cost.max_memory))
        reason = f": {cost.largest_matrix}" if cost.largest_matrix else ""
        threads = counted(cost.threads, "thread")
        yield notice("more_memory", needed=needed, usual=usual, reason=reason, threads=threads)
    merged = list(plan.merged())
    there = {t.name for t in merged if plan.matrix_gpus and t.has_gpu_stages}
    if plan.matrix_gpus:
        tensors = f"{len(there)} of {counted(len(merged), 'tensor')}"
        gpu = plan.matrix_gpus.title
        yield notice("matrices_on_gpu", device=plan.device, gpu=gpu, tensors=tensors)
    here = [tensor for tensor in merged if not tensor.fits_gpu and tensor.name not in there]
    if here and device_of(plan.device).is_gpu:
        tensors = f"{len(here)} of {counted(len(merged), 'tensor')}"
        yield notice("not_on_gpu", device=plan.device, tensors=tensors)


def _plan_tensor(
    recipe: Recipe,
    fit: Fit,
    dtype: StorageType,
    tied_to: str | None,
    depth: Fraction,
    models: Named,
    problems: list[str],
    known: dict[Any, Treatment],
) -> TensorPlan:
    """Plan one tensor; `known` are treatments of the tensors before it, by what decides them."""
    base, name = fit.base, tied_to or fit.base.name
    fate, takes_part = _fate(recipe, fit, recipe.chain_for(name).combine)
    key = recipe.kind_of(name), depth.as_integer_ratio(), fate, takes_part
    if (treatment := known.get(key)) is None:
        treatment = known[key] = _treat(recipe, name, fate, takes_part, depth, models)
    drops: list[Drop | None] = []
    for index, own in zip(takes_part, treatment.settings, strict=True):
        model, source = models[index]
        drop = source.delta_of(base.name).drop if base.name in source.tensors else None
        left = drop and _left_to_make_up(recipe, drop, name, index, own)
        if isinstance(left, str):
            line = f"{model}: {left}"
            problems += [] if line in problems else [line]
        else:
            drops.append(left)
    if any(drops):
        treatment = replace(treatment, drops=tuple(drops))
    return TensorPlan(base.name, fate, base.shape, base, dtype, treatment, tied_to)


def _treat(
    recipe: Recipe, name: str, fate: Fate, numbers: tuple[int, ...], depth: Fraction, models: Named
) -> Treatment:
    """Return the stages for a tensor with their settings; refuse settings that do not fit."""
    chain = recipe.chain_for(name)
    settings = tuple(recipe.settings_for(name, number, depth) for number in numbers)
    weights = tuple(recipe.weight_for(name, number, depth) for number in numbers)
    combine, *refine = recipe.joint_settings_for(name, depth)
    stages = tuple(stage for stage, _ in chain)
    treatment = Treatment(numbers, settings, weights, combine, (), stages, tuple(refine))
    for stage, own in treatment.joint:
        _check(stage, own, f"{name}: ")
    for number, staged in zip(numbers, treatment.chains, strict=True):
        for stage, own in staged:
            _check(stage, own, f"{name} of {models[number][0]}: ")
    fault = fate is Fate.MERGED and chain.combine.weights_fault(combine, weights)
    if fault:
        raise RecipeError(f"{name}: weights {', '.join(map(str, weights))}{fault}")
    return treatment


def _with_gathered(
    recipe: Recipe, base: Source, names: Sequence[str], tensors: Sequence[TensorPlan]
) -> tuple[Gathered | None, list[TensorPlan]]:
    """Open the gathered file, if there is one; take from it the tensors that it has."""
    gathered = open_gathered(recipe.gathered, base.tensors) if recipe.gathered else None
    found = list(tensors)
    for place, tensor in enumerate(tensors):
        if gathered is not None and (info := gathered.tensors.get(tensor.name)):
            unread = replace(tensor.treatment, models=(), settings=(), weights=(), drops=())
            found[place] = replace(tensor, fate=Fate.GATHERED, base=info, treatment=unread)
        elif tensor.is_merged and tensor.combine_stage.takes_grams:
            if gathered is None:
                raise RecipeError(
                    f"method {tensor.method!r}: needs Gram matrices of the layers' inputs; write "
                    "their file as docs/guides/inputs.md shows, and name it: gathered = FILE in "
                    "the recipe, or --gathered FILE"
                )
            models = [names[model] for model in tensor.models]
            axis = gathered.input_axis(tensor.key, tensor.shape, models)
            found[place] = replace(tensor, input_axis=axis)
    return gathered, found


def _taken_notices(base: Source, names: Sequence[str]) -> Iterator[Notice]:
    """Say which tensors come from models alone."""
    for tensor, owners in base.extras.items():
        yield notice("extra_taken", tensor, models=", ".join(names[number] for number in owners))


def norm_notices(merged: Iterable[str]) -> Iterator[Notice]:
    """Warn that merged statistics of BatchNorm layers are wrong."""
    if layers := norm_layers(merged):
        count = counted(len(layers), "layer")
        yield notice("merged_statistics", count=count, layers=some_of(layers))


def _with_delta_settings(recipe: Recipe, models: Sequence[Source]) -> Recipe:
    """Give the recipe the rates and seeds of its delta files.

    A first stage that drops by the same rate and seed then only rescales. For a chain that does not
    drop, kept changes are divided by 1 - p, as if `dare` came first.
    """
    entries, rules = list(recipe.models), list(recipe.tensors)
    usual_seed = Recipe.fields()["seed"].default
    droppers = [stage for stage, _ in recipe.all_stages if "drop_rate" in stage.parameters]
    has_one_rate = len(recipe.chains) == 1 or all(stage.can_only_mask for stage in droppers)
    for index, (entry, seed, model) in enumerate(
        zip(recipe.models, recipe.seeds(), models, strict=True)
    ):
        drops = {name: drop for name in model.tensors if (drop := model.delta_of(name).drop)}
        seeds = {drop.seed for drop in drops.values()}
        if seeds - {seed} and entry.seed is None and recipe.seed == usual_seed:
            entries[index] = entries[index].changed(seed=seeds.pop())
        masked_again = [name for name in drops if recipe.chain_for(name)[0][0].can_only_mask]
        if any(recipe.sets("drop_rate", name, index) for name in masked_again):
            continue
        by_rate = defaultdict(list)
        for name in masked_again:
            by_rate[drops[name].rate].append(glob.escape(name))
        # If a file drops only some tensors, a chain that drops must keep the others whole.
        for name in sorted(model.tensors.keys() - drops.keys()) if masked_again else ():
            if model.tensors[name].dtype.is_weight and recipe.chain_for(name)[0][0].can_only_mask:
                by_rate[0.0].append(glob.escape(name))
        rates = by_rate if has_one_rate else ()
        usual = max(rates, key=lambda rate: len(by_rate[rate]), default=None)
        if usual not in (None, recipe.chain[0][1].get("drop_rate")):
            own = {**entry.settings, "drop_rate": usual}
            entries[index] = entries[index].changed(settings=own)
        rules += [
            TensorRule(match=tuple(names), model=str(entry.file), settings={"drop_rate": rate})
            for rate, names in by_rate.items()
            if rate != usual
        ]
    if (tuple(entries), tuple(rules)) == (recipe.models, recipe.tensors):
        return recipe
    kept = {"output_digest": recipe.output_digest}
    return recipe.changed(models=tuple(entries), tensors=tuple(rules), **kept)


def _left_to_make_up(
    recipe: Recipe, drop: Drop, tensor: str, model: int, settings: Sequence[Settings]
) -> Drop | str | None:
    """Return the drop to rescale for before the first stage; a text if two masks would drop."""
    stages = [stage for stage, _ in recipe.chain_for(tensor).of_kind("delta")]
    droppers = [place for place, stage in enumerate(stages) if stage.can_only_mask]
    if not droppers:
        return drop
    was = f"its delta file was made with drop_rate = {drop.rate:g} and seed = {drop.seed}"
    if droppers != [0] or not stages[0].only_masks(settings[0]):
        method = recipe.method_for(tensor)
        return f"{was}, and {method} would drop by another mask; use a method without dare"
    rate, seed = settings[0]["drop_rate"], recipe.seeds()[model]
    if (rate, seed, tensor) != drop:
        return (
            f"{was}, and the recipe has drop_rate = {rate:g} and seed = {seed}; set these for it, "
            "leave both out, or use a method without dare"
        )
    return None


def _output_type(
    recipe: Recipe, base: TensorInfo, name: str, recoding: Recoding | None
) -> StorageType:
    """Return a tensor's storage type; float8 is only for the matrices of layers."""
    if recoding is not None and not recoding.replacing and base.dtype.is_weight:
        return recoding.merged_type(base)
    if recipe.dtype is None or not base.dtype.is_weight:
        return base.dtype
    asked = STORAGE_TYPES[recipe.dtype]
    if asked in MODEL_TYPES or is_layer_matrix(name, base.shape):
        return asked
    return base.dtype


def _fate(recipe: Recipe, fit: Fit, combine: Stage) -> tuple[Fate, tuple[int, ...]]:
    """Return the fate of a tensor, and the models that take part in it."""
    # If every model must take part, a missing delta is read as zero.
    takes_all = combine.models is not None or combine.takes_grams
    takes_part = tuple(sorted(fit.fitting + fit.absent)) if takes_all else fit.fitting
    if fit.is_extra:
        return Fate.EXTRA, ()
    if fit.is_mismatched:
        return Fate.MISMATCHED, ()
    if not fit.base.dtype.is_weight:
        is_strict = recipe.on_integer_mismatch == "error" and not fit.base.is_counter
        return Fate.COPIED, takes_part if is_strict else ()
    if not recipe.models:
        return Fate.PASSED, ()
    return (Fate.MERGED, takes_part) if fit.fitting else (Fate.BASE_ONLY, ())


def _check(stage: Stage, settings: Settings, where: str) -> None:
    try:
        stage.check(settings)
    except RecipeError as error:
        raise RecipeError(f"{where}{error}") from None


def _judge(recipe: Recipe, misfits: Iterable[LeftOut]) -> tuple[list[str], list[Notice]]:
    """Return a line for each misfit that the recipe refuses, and a notice for every other."""
    problems, notices = [], []
    for misfit in misfits:
        setting, code, remedy = POLICIES[misfit.reason]
        if getattr(recipe, setting) == "error":
            problems.append(f"{misfit}; set {setting} = {remedy}")
        else:
            models, shapes = ", ".join(misfit.models), misfit.reason_text
            notices.append(notice(code, misfit.tensor, models=models, shapes=shapes))
    return problems, notices


def _find_idle(base: Source, models: Named, fits: Iterable[Fit]) -> tuple[list[str], list[str]]:
    """Return why some models would not be merged at all: they fit nowhere, or for other reasons."""
    weights = [fit for fit in fits if fit.base.dtype.is_weight]
    fitting = {number for fit in weights for number in fit.fitting}
    used = {number for fit in weights if not fit.is_mismatched for number in fit.fitting}
    unrelated, displaced = [], []
    for number, (name, model) in enumerate(models if weights else ()):
        idle = f"{name}: nothing of it would be merged: "
        if number not in fitting:
            held = f" ({some_of(sorted(model.tensors))})" if model.tensors else ""
            unlike = [m for f in weights for m in f.misfits if m.found and m.models == (name,)]
            own = unlike[0] if unlike else some_of(sorted(base.tensors))
            unrelated.append(
                f"{idle}none of its {len(model.tensors)} tensors{held} fits one of the base's "
                f"({own}); use a model of this base, or leave it out"
            )
        elif number not in used:
            displaced.append(f"{idle}where it fits the base, another does not; leave that one out")
    return unrelated, displaced


def _recipe_warnings(recipe: Recipe) -> Iterator[Notice]:
    """Warn of settings that are allowed but usually a mistake."""
    seeds = recipe.seeds()
    drops = any("drop_rate" in stage.parameters for stage, _ in recipe.all_stages)
    if drops and len(set(seeds)) < len(seeds):
        yield notice("equal_seeds", seeds=", ".join(map(str, seeds)))
    rates = _values(recipe, "drop_rate") | {recipe.embedding_drop_rate or 0.0}
    q, excess = (max(_values(recipe, name) - {None}, default=0.0) for name in ("q", "epsilon"))
    bound = min(_values(recipe, "max_variance") - {None}, default=math.inf)
    for rate in sorted(rates):
        divisor = max(q, 1 - rate + excess, math.sqrt(rate * (1 - rate) / bound))
        if rate > LIMIT.highest_rate and divisor <= (1 - rate) * (1 + ROUNDING):  # plain DARE
            is_default = any(own.get("drop_rate") == rate for _, own in recipe.chain)
            stages = [stage.name for stage, _ in recipe.chain]
            better = suggest_q(rate, stages, len(recipe.models), is_default=is_default)
            yield notice("high_drop_rate", rate=rate, variance=rate / (1 - rate), q=better)
    if drops and False in _values(recipe, "rescale"):
        yield notice("no_rescale", setting="rescale = false")
    if q == 1 and any(rates):
        yield notice("no_rescale", setting="q = 1")


def rate_notes(recipe: Recipe) -> Iterator[Notice]:
    """Say which drop rate was taken if none was given."""
    given = [*recipe.stages.values(), *(entry.settings for entry in recipe.models)]
    given += [rule.settings for rule in recipe.tensors]
    taken = [own["drop_rate"] for _, own in recipe.all_stages if "drop_rate" in own]
    if taken and not any("drop_rate" in settings for settings in given):
        yield notice("default_drop_rate", rate=", ".join(map(str, dict.fromkeys(taken))))


def _format_notes(recipe: Recipe, base: Source) -> Iterator[Notice]:
    """Say that an output will not be quantised as its base is."""
    coded = sum(isinstance(info, CodedInfo) for info in base.tensors.values())
    if coded and recipe.format != "input" and recipe.dtype is None and recipe.output is not None:
        yield notice("plain_output", tensors=counted(coded, "tensor"))


def _float8_warnings(recipe: Recipe, tensors: Sequence[TensorPlan]) -> Iterator[Notice]:
    """Say what float8 costs, unless the weights are stored so already."""
    wide = [tensor for tensor in tensors if tensor.base.dtype in MODEL_TYPES]
    if recipe.dtype is None or STORAGE_TYPES[recipe.dtype] in MODEL_TYPES or not wide:
        return
    narrowed = counted(sum(t.dtype not in MODEL_TYPES for t in wide), "matrix", "matrices")
    kept = counted(sum(t.dtype in MODEL_TYPES for t in wide), "tensor")
    yield notice("plain_float8", dtype=recipe.dtype, narrowed=narrowed, kept=kept)


def _merged_notices(plan: Plan) -> Iterator[Notice]:
    """Say what merging does to float64 weights and to statistics that are not only copied."""
    changed = [tensor for tensor in plan.merged() if plan.sole_model(tensor) is None]
    kinds = ([t.base.dtype.name, *(i.dtype.name for _, i in plan.copies_of(t))] for t in changed)
    if count := sum("F64" in names for names in kinds):
        yield notice("float64", tensors=counted(count, "tensor"))
    yield from norm_notices(tensor.name for tensor in changed)


def _values(recipe: Recipe, parameter: str) -> set[Any]:
    """Return every value that the recipe has for a parameter, but defaults of later ones."""
    tables: Iterable[Mapping[str, Any]] = (
        *(
            settings
            for stage, settings in recipe.all_stages
            if (stage.name, parameter, settings.get(parameter)) not in LATER_PARAMETERS
        ),
        *(entry.settings for entry in recipe.models),
        *(rule.settings for rule in recipe.tensors),
    )
    found = [settings[parameter] for settings in tables if parameter in settings]
    lists = [value if isinstance(value, list) else [value] for value in found]
    return {value for values in lists for value in values}
