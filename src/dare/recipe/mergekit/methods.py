"""Each of mergekit's methods as a draft of a recipe, and the known differences of its weights."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any

from dare.documents.words import times
from dare.recipe.entries import ModelEntry, model_names
from dare.recipe.mergekit.configuration import Config
from dare.recipe.mergekit.nodes import (
    Case,
    Cases,
    Input,
    as_numbers,
    flag_for_all,
    number_for_all,
    numbers,
    resolve,
)
from dare.stages import STAGES

NEW_MASKS = (
    "other elements are dropped, at the same rate: masks here are a function of seed, name and "
    "index, and mergekit's come from a stream"
)
TINY_NORM = "mergekit does not rescale a delta whose L1 norm is below 1e-7"
ELECTION = (
    "where the models' changes cancel exactly nothing is elected; mergekit keeps the positive ones"
)
CUT = "of equal magnitudes at the cut those with the lowest index are kept; mergekit leaves it open"
ROUNDED_SHARES = "weights are divided by their sum before they are used, mergekit's result after"
LAST_ONE = "of a tensor whose density is less than one element one is kept; mergekit keeps none"
ROWS_OF_DELLA = "beyond two dimensions ranks run within the last, in mergekit within the second"


class Draft:
    """The tables of a recipe, being filled in from a configuration."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.differences: list[str] = []
        self.notes: list[str] = []
        self._document: dict[str, Any] = dict(config.keys)
        self._rules: list[dict[str, Any]] = []
        self._models: list[dict[str, Any]] = []
        self._base = ""

    @property
    def required_base(self) -> str:
        """The base of a method that needs one."""
        self.require(self.config.base, f"base_model is missing; {self.config.method} needs one")
        return str(self.config.base)

    def require(self, holds: object, text: str) -> None:
        """Refuse the method, with its line, unless something holds."""
        self.config.method_node.require(holds, text)

    def merge(self, method: str, base: str, models: Sequence[str], scale: float = 1.0) -> None:
        """Set the models that are merged, the method, and the scale of the merged delta."""
        self._document |= {"method": method, "scale": scale}
        source = self._document.pop("copy_from", base)
        if source != base:  # which it is from if nothing is said
            names = model_names([ModelEntry(file=model) for model in models])
            self._document["copy_from"] = names[models.index(source)]
        self._base = base
        self._models = [{"file": model} for model in models]

    def set_stage(self, stage: str, parameter: str, value: Any) -> None:
        """Set a parameter of a stage."""
        self._document.setdefault(stage, {})[parameter] = value

    def set_cases(self, stage: str, parameter: str, cases: Cases) -> None:
        """Set a parameter that all models share."""
        self._add_rules(stage, parameter, cases)
        self.set_stage(stage, parameter, cases[-1].value)

    def set_for_models(self, stage: str | None, parameter: str, found: Sequence[Cases]) -> None:
        """Set a parameter of each model; a stage's own table will do if all are the same."""
        if stage is not None and all(cases == found[0] for cases in found):
            self.set_cases(stage, parameter, found[0])
            return
        for entry, cases in zip(self._models, found, strict=True):
            self._add_rules(stage, parameter, cases, {"model": entry["file"]})
            entry[parameter] = cases[-1].value

    def _add_rules(
        self, stage: str | None, parameter: str, cases: Cases, model: dict[str, str] | None = None
    ) -> None:
        """Add rules for cases; the first case that matches counts there, the last rule here."""
        if stage is not None:
            for case in cases:
                where = f"{case.node.file}, line {case.node.line}: "
                STAGES[stage].parameters[parameter].check(case.value, where)
        for case in reversed(cases[:-1]):
            self._rules.append({"contains": case.contains, **(model or {}), parameter: case.value})

    def document(self) -> dict[str, Any]:
        """Return the recipe's tables."""
        models = [entry if len(entry) > 1 else entry["file"] for entry in self._models]
        files = {"base_file": self._base, "merge_files": models}
        rules = {"tensors": self._rules} if self._rules else {}
        return {**self._document, "models": files, **rules}


# ---------------------------------------------------------------- changes to the base


def _convert_deltas(
    draft: Draft, drops: str, *, elects: bool, normalize: bool, rescale: bool
) -> None:
    """Convert a method that changes each delta, combines them and scales the result.

    `drops` is the stage that makes a delta sparser, if there is one; `normalize` and `rescale` are
    defaults of parameters.
    """
    base, models, shared = draft.required_base, draft.config.others(), draft.config.shared
    draft.require(models, "only the base is given: there is nothing to merge into it")
    weights = [numbers("weight", given) for given in models]
    normalize = flag_for_all("normalize", shared, default=normalize)
    if elects:
        if normalize:
            _check_positive(weights, draft)
        else:
            draft.set_stage("ties", "divide_by", "nothing")
        draft.differences.append(ELECTION)
    elif normalize:
        weights = _shares(weights, draft)

    combine = "ties" if elects else "sum"
    method = combine if drops in ("", "trim") else f"{drops}+{combine}"  # to trim is up to ties
    names, scale = [given.model for given in models], number_for_all("lambda", shared, 1.0)
    draft.merge(method, base, names, scale)
    draft.set_for_models(None, "weight", weights)
    if drops:
        _make_sparser(drops, flag_for_all("rescale", shared, default=rescale), draft)


def _make_sparser(stage: str, rescale: bool, draft: Draft) -> None:
    models, differences = draft.config.others(), draft.differences
    densities = [_densities(given, draft) for given in models]
    drops_any = any(number < 1 for cases in densities for c in cases for number in c.numbers)
    if stage in ("dare", "della"):
        rates = [tuple(case.changed(_rate_of) for case in cases) for cases in densities]
        draft.set_for_models(stage, "drop_rate", rates)
        draft.set_stage(stage, "rescale", "l1" if rescale else False)
        differences += ([NEW_MASKS] + [TINY_NORM] * rescale) * drops_any
    elif rescale and drops_any:
        fault = f"what {draft.config.method} leaves cannot be rescaled here; delete it"
        raise resolve("rescale", draft.config.shared)[0].node.refuse(f"rescale: {fault}")
    if stage == "della":  # its epsilon goes from the mean rate on, our window from the lowest
        epsilons = [numbers("epsilon", given, default=0.15) for given in models]
        for density, epsilon in zip(densities, epsilons, strict=True):
            _check_epsilon(density, epsilon)
        windows = [tuple(case.changed(lambda e: 2 * e) for case in cases) for cases in epsilons]
        draft.set_for_models("della", "window", windows)
        differences += [ROWS_OF_DELLA] * drops_any
    elif stage == "breadcrumbs":
        draft.set_for_models("breadcrumbs", "keep_middle", densities)
        gammas = [numbers("gamma", given, default=0.01) for given in models]
        draft.set_for_models("breadcrumbs", "drop_largest", gammas)
        differences += [CUT, LAST_ONE] * drops_any
    elif stage == "trim" and drops_any:
        draft.set_for_models("ties", "keep_ratio", densities)
        differences.append(CUT)


def _rate_of(density: float) -> float:
    """Return 1 - density, in decimals, as people write both."""
    return float(1 - Decimal(repr(density)))


def _check_positive(weights: Sequence[Cases], draft: Draft) -> None:
    fault = f"is negative, and {draft.config.method} divides by the sum of weights with their signs"
    remedy = "so that the minus cancels; take the model's sign out of it"
    for case in itertools.chain(*weights):
        is_positive = all(number >= 0 for number in case.numbers)
        case.node.require(is_positive, f"weight: {fault}, {remedy}")


def _densities(given: Input, draft: Draft) -> Cases:
    cases = numbers("density", given, default=1.0)
    for case in cases:
        for number in case.numbers:
            text = f"density = {number:g}: must be above 0 and no more than 1 in"
            remedy = "to leave a model out, take it off the list or give it the weight 0"
            case.node.require(0 < number <= 1, f"{text} {draft.config.method}; {remedy}")
    return cases


def _check_epsilon(densities: Cases, epsilons: Cases) -> None:
    """Check single numbers against each other; the rest is checked when the recipe is planned."""
    if any(len(cases) > 1 or len(cases[0].numbers) > 1 for cases in (densities, epsilons)):
        return
    density, epsilon = densities[0].numbers[0], epsilons[0].numbers[0]
    low, high = density - epsilon, density + epsilon
    epsilons[0].node.require(
        density == 1 or 0 < low <= high < 1,
        f"epsilon = {epsilon:g} at density = {density:g}: densities from {low:.6g} to {high:.6g} "
        "are not all between 0 and 1, and mergekit refuses them too; lower epsilon",
    )


# ---------------------------------------------------------------- shares of a sum


def _shares(weights: Sequence[Cases], draft: Draft) -> list[Cases]:
    """Divide weights by their sum, which must not change from layer to layer."""
    rows = [_divided(row, draft) for row in _by_filter(weights)]
    return [tuple(row[model] for row in rows) for model in range(len(weights))]


def _by_filter(weights: Sequence[Cases]) -> list[list[Case]]:
    """Return every model's case for each filter; refuse models with filters of their own."""
    filters: tuple[str | None, ...] = (None,)
    for cases in weights:
        texts = tuple(case.contains for case in cases)
        cases[0].node.require(
            texts == (None,) or filters in ((None,), texts),
            "weight: to divide by the sum of weights the filters must be the same for every "
            "model, in the same order",
        )
        filters = filters if texts == (None,) else texts
    return [
        [replace(cases[min(row, len(cases) - 1)], contains=text) for cases in weights]
        for row, text in enumerate(filters)
    ]


def _divided(row: Sequence[Case], draft: Draft) -> list[Case]:
    total = _constant_total(row)
    if abs(total) < 1e-6 and draft.config.method == "linear":
        raise row[0].node.refuse("weight: the weights add up to 0")
    if abs(total) < 1e-8 or math.isclose(total, 1, rel_tol=1e-12):
        return list(row)  # which mergekit does not divide by
    if ROUNDED_SHARES not in draft.differences:
        draft.differences.append(ROUNDED_SHARES)
    return [case.changed(lambda weight: weight / total) for case in row]


def _constant_total(row: Sequence[Case]) -> float:
    lists = [case for case in row if isinstance(case.value, list)]
    lengths = {len(case.value) for case in lists}
    totals = [
        math.fsum(c.value[step] if isinstance(c.value, list) else c.value for c in row)
        for step in range(min(lengths, default=1))
    ]
    if len(lengths) > 1 or not all(
        math.isclose(total, totals[0], rel_tol=1e-12, abs_tol=1e-12) for total in totals
    ):
        fault = "the sum of the models' weights changes from layer to layer: cannot be converted"
        remedy = "let the weights add up to the same number in every layer"
        raise lists[0].node.refuse(f"weight: {fault}; {remedy}")
    return totals[0]


# ---------------------------------------------------------------- means and interpolations


def _convert_linear(draft: Draft) -> None:
    """Write a mean of weights as a base and a mean of changes, if the shares add up to 1."""
    inputs = draft.config.inputs
    names = [given.model for given in inputs]
    base = draft.config.base if draft.config.base in names else names[0]
    draft.require(len(inputs) > 1, "a mean needs two models; one is given")
    weights = [numbers("weight", given) for given in inputs]
    if flag_for_all("normalize", draft.config.shared, default=True):
        weights = _shares(weights, draft)
    for cases in _by_filter(weights):
        is_one = math.isclose(_constant_total(cases), 1, rel_tol=1e-9)
        cases[0].node.require(is_one, "weight: without normalize the weights must add up to 1")
    others = {name: cases for name, cases in zip(names, weights, strict=True) if name != base}
    draft.merge("linear", base, list(others))
    draft.set_for_models(None, "weight", list(others.values()))
    same = "are averaged, which is the same mean but for rounding"
    draft.differences.append(f"{base} is the base and the others' changes to it {same}")


def _convert_slerp(draft: Draft) -> None:
    base, others = draft.required_base, draft.config.others()
    given = f"{times(len(others), 'is', 'are')} given"
    text = f"slerp goes from the base to one other model, and {given}"
    draft.require(len(others) == 1, text)
    cases = resolve("t", draft.config.shared)
    is_complete = cases and cases[-1].contains is None
    draft.require(is_complete, "t is missing for some tensors; mergekit has no default")
    draft.merge("slerp", base, [base, others[0].model])
    draft.set_cases("slerp", "t", as_numbers("t", cases))
    draft.differences.append(
        "the angle to a tensor of zeros counts as zero, so that interpolation is straight; "
        "mergekit takes a right angle"
    )


def _convert_nuslerp(draft: Draft) -> None:
    """Convert angles of tensors, rows or columns; mergekit's rows run along the first dimension."""
    others, base, shared = draft.config.others(), draft.config.base, draft.config.shared
    text = f"nuslerp merges two models besides the base; {times(len(others), 'is', 'are')} given"
    if len(others) == 1:
        text += "; delete base_model to interpolate between the two themselves"
    draft.require(len(others) == 2, text)
    draft.merge("nuslerp", base or others[0].model, [given.model for given in others])
    draft.set_for_models(None, "weight", [numbers("weight", given) for given in others])
    draft.set_stage("nuslerp", "on", "weights" if base is None else "deltas")
    by_column = flag_for_all("nuslerp_row_wise", shared, default=False)
    if flag_for_all("nuslerp_flatten", shared, default=True):
        draft.set_stage("nuslerp", "each", "tensor")
        if by_column:
            draft.notes.append("nuslerp_row_wise: has no effect as long as nuslerp_flatten is on")
    else:
        draft.set_stage("nuslerp", "each", "column" if by_column else "row")
        draft.differences.append(
            "a tensor of more than two dimensions is a matrix of the first by all others; "
            "mergekit's rows and columns run along one of them"
        )
    draft.differences.append(
        "what has a cosine beyond ±0.9995, or is zero, is interpolated straight; mergekit does "
        "that only where the two are parallel, and takes a right angle for zeros"
    )


def _convert_karcher(draft: Draft) -> None:
    """Convert a mean of all models, the base among them if there is one."""
    names, base = [given.model for given in draft.config.inputs], draft.config.base
    draft.require(len(names) > 1, "a mean needs two models; one is given")
    draft.merge("karcher", base or names[0], names)
    steps = number_for_all("max_iter", draft.config.shared, 10)
    tolerance = number_for_all("tol", draft.config.shared, 1e-5)
    draft.differences += [
        f"the mean is sought until it no longer moves; mergekit stops after {steps:g} steps, or "
        f"when one is shorter than {tolerance:g}",
        f"every tensor but zero has a direction; mergekit leaves out those shorter than "
        f"{tolerance:g}",
        "opposite tensors are averaged straight; mergekit goes from the first of them",
    ]
    if base is not None:
        draft.notes.append(f"{base}: is one of the models that are averaged, as there")


def _convert_model_stock(draft: Draft) -> None:
    base, models = draft.required_base, draft.config.others()
    text = f"model_stock needs two models besides the base; {times(len(models), 'is', 'are')} given"
    draft.require(len(models) > 1, text)
    if flag_for_all("filter_wise", draft.config.shared, default=False):
        fault = "true: the angle is that of whole tensors here, not of rows; delete it"
        raise resolve("filter_wise", draft.config.shared)[0].node.refuse(f"filter_wise: {fault}")
    draft.merge("model_stock", base, [given.model for given in models])
    draft.differences += [
        "where the models' changes point away from each other the base is kept; mergekit goes on "
        "beyond it",
        "every angle counts; mergekit takes changes for orthogonal whose lengths multiply to less "
        "than 1e-6",
    ]


# ---------------------------------------------------------------- all of them


@dataclass(frozen=True)
class Method:
    """The conversion of a method, and the parameters that mean something to it."""

    convert: Callable[[Draft], None]
    of_models: tuple[str, ...]
    of_all: tuple[str, ...]


def _of_deltas(drops: str = "", *of_models: str, **usual: bool) -> Method:
    density, rescale = (("density",), ("rescale",)) if drops else ((), ())
    of_all = ("normalize", "lambda", *rescale)
    usual = dict.fromkeys(("elects", "normalize", "rescale"), False) | usual
    of_models = ("weight", *density, *of_models)
    return Method(lambda draft: _convert_deltas(draft, drops, **usual), of_models, of_all)


METHODS = {
    "linear": Method(_convert_linear, ("weight",), ("normalize",)),
    "task_arithmetic": _of_deltas(),
    "ties": _of_deltas("trim", elects=True, normalize=True),
    "dare_linear": _of_deltas("dare", rescale=True),
    "dare_ties": _of_deltas("dare", elects=True, rescale=True),
    "breadcrumbs": _of_deltas("breadcrumbs", "gamma"),
    "breadcrumbs_ties": _of_deltas("breadcrumbs", "gamma", elects=True),
    "della": _of_deltas("della", "epsilon", elects=True, normalize=True, rescale=True),
    "della_linear": _of_deltas("della", "epsilon", rescale=True),
    "slerp": Method(_convert_slerp, (), ("t",)),
    "nuslerp": Method(_convert_nuslerp, ("weight",), ("nuslerp_flatten", "nuslerp_row_wise")),
    "karcher": Method(_convert_karcher, (), ("max_iter", "tol")),
    "model_stock": Method(_convert_model_stock, (), ("filter_wise",)),
}
# The other methods of mergekit 0.1.5, and why they have no equal.
NOT_CONVERTED = {
    "multislerp": "it goes one step of the way to the mean on the sphere; karcher goes all of it",
    "sce": "it weighs models by the squares of their changes; ties is the nearest",
    "ram": "it adds what one model changes and averages what several change; no stage does that",
    "ramplus_tl": "it adds what one model changes, scaled by its share, and averages what several "
    "change; no stage does that",
    "nearswap": "it takes what differs least from the base; no stage does that",
    "arcee_fusion": "it selects by the divergence of softmax rows; no stage does that",
    "passthrough": "it copies layers and merges nothing",
}
