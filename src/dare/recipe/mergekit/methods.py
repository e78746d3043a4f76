"""Each of mergekit's methods as a draft of a recipe, and the known differences of its weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any

from dare.documents.words import counted
from dare.recipe.mergekit.configuration import KNOWN, Part
from dare.recipe.mergekit.nodes import (
    Case,
    Cases,
    Input,
    as_numbers,
    flag_for_all,
    multiply,
    number_for_all,
    numbers,
    resolve,
)
from dare.stages import STAGES


class Draft:
    """The tables of a recipe, being filled in from a part of a configuration."""

    def __init__(self, part: Part) -> None:
        self.part = part
        self.differences: list[str] = []
        self.base = part.base or part.inputs[0].model
        self._document: dict[str, Any] = {"method": "passthrough"}  # which copies the base
        self._rules: list[dict[str, Any]] = []
        self._models: list[dict[str, Any]] = []

    def differ(self, *names: str, **values: object) -> None:
        """Note differences of the weights, by their names in `mergekit.toml`."""
        self.differences += [KNOWN["differences"][name].format(**values) for name in names]

    def require_base(self) -> None:
        """Refuse a method that needs a base and has none."""
        method, inputs = self.part.method, [given.model for given in self.part.inputs]
        self.require(self.part.base, f"base_model is missing; {method} needs one")
        self.require(self.base in inputs, f"base_model {self.base} is not among the sources")

    def require(self, holds: object, text: str) -> None:
        """Refuse the part, with its line, unless something holds."""
        self.part.node.require(holds, text)

    def merge(self, method: str, models: Sequence[Input], scale: float = 1.0) -> None:
        """Set the models that are merged, the method, and the scale of the merged delta."""
        self._document |= {"method": method} | ({} if scale == 1 else {"scale": scale})
        for given in models:
            own = {} if given.span == self._span else {"range": list(given.span or ())}
            self._models.append({"file": given.model, **own})

    def set_stage(self, stage: str, parameter: str, value: Any) -> None:
        """Set a parameter of a stage."""
        self._document.setdefault(stage, {})[parameter] = value

    def set_cases(self, stage: str, parameter: str, cases: Cases) -> None:
        """Set a parameter that all models share."""
        self._add_rules(stage, parameter, cases)
        self.set_stage(stage, parameter, cases[-1].value)

    def set_shared(self, stage: str, parameter: str, name: str) -> None:
        """Set a parameter that all models share from the one of a name, if it is given."""
        cases = resolve(name, self.part.shared)
        default = STAGES[stage].parameters[parameter].default
        if cases and cases[-1].words:
            cases = (*cases, Case(None, default, cases[-1].node))
        if cases:
            self.set_cases(stage, parameter, as_numbers(name, cases))

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
                STAGES[stage].parameters[parameter].check(case.value, f"{case.node.place}: ")
        for case in reversed(cases[:-1]):
            self._rules.append({**case.words, **(model or {}), parameter: case.value})

    def document(self) -> dict[str, Any]:
        """Return the recipe's tables."""
        models = [entry if len(entry) > 1 else entry["file"] for entry in self._models]
        rules = {"tensors": self._rules} if self._rules else {}
        return {"base": self.base, "models": models, **self._document, **rules}

    def layers(self) -> dict[str, Any]:
        """Return the tables of a range of layers."""
        span = {"range": list(self._span or ())}
        return span | (self.document() if self._models else {"model": self.base})

    @property
    def _span(self) -> tuple[int, int] | None:
        """The layers that the base has, or else the first model."""
        spans = {given.model: given.span for given in self.part.inputs}
        return spans.get(self.base, self.part.inputs[0].span)


# ---------------------------------------------------------------- changes to the base


def _convert_deltas(
    draft: Draft, drops: str, *, elects: bool, normalize: bool, rescale: bool
) -> None:
    """Convert a method that changes each delta, combines them and scales the result.

    `drops` is the stage that makes a delta sparser, if there is one; `normalize` and `rescale` are
    defaults of parameters.
    """
    draft.require_base()
    models, shared = draft.part.others(), draft.part.shared
    if not models:
        return  # the base is copied
    weights = [numbers("weight", given) for given in models]
    normalize = flag_for_all("normalize", shared, default=normalize)
    rescale = flag_for_all("rescale", shared, default=rescale)
    combine = "ties" if elects else "sum"
    # ties itself trims, unless the kept elements are rescaled.
    own = drops and (drops != "trim" or rescale)
    method = f"{drops}+{combine}" if own else combine
    factors = numbers("lambda", replace(models[0], scopes=shared), default=1.0)
    is_one = len(factors) == 1 and not isinstance(factors[0].value, list)
    if not is_one:
        factors[0].node.require(not normalize, "lambda: must be one value, or set normalize: false")
        weights = [tuple(multiply(cases, factors)) for cases in weights]
    draft.merge(method, models, factors[0].value if is_one else 1.0)
    draft.set_for_models(None, "weight", weights)
    if not elects and normalize:
        draft.set_stage("sum", "normalize", True)
    elif elects and not normalize:
        draft.set_stage("ties", "divide_by", "nothing")
    elif elects and any(number < 0 for cases in weights for c in cases for number in c.numbers):
        draft.set_stage("ties", "divide_by", "signed")
    if elects:
        draft.differ("election")
    if drops:
        _make_sparser("ties" if not own else drops, rescale, draft)


def _make_sparser(stage: str, rescale: bool, draft: Draft) -> None:
    models = draft.part.others()
    densities = [_densities(given, draft) for given in models]
    differences = []
    drops_any = any(number < 1 for cases in densities for c in cases for number in c.numbers)
    if stage in ("dare", "della"):
        rates = [tuple(case.changed(_rate_of) for case in cases) for cases in densities]
        draft.set_for_models(stage, "drop_rate", rates)
        draft.set_stage(stage, "rescale", "l1" if rescale else False)
        differences += ["masks"]
    elif rescale:
        draft.set_stage(stage, "rescale", "l1")
    differences += ["rescaling"] * rescale
    if stage == "della":  # its epsilon goes from the mean rate on, our window from the lowest
        epsilons = [numbers("epsilon", given, default=0.15) for given in models]
        for density, epsilon in zip(densities, epsilons, strict=True):
            _check_epsilon(density, epsilon)
        windows = [tuple(case.changed(lambda e: 2 * e) for case in cases) for cases in epsilons]
        draft.set_for_models("della", "window", windows)
        differences += ["rows_of_della"]
    elif stage == "breadcrumbs":
        draft.set_for_models("breadcrumbs", "keep_middle", densities)
        gammas = [numbers("gamma", given, default=0.01) for given in models]
        draft.set_for_models("breadcrumbs", "drop_largest", gammas)
        differences += ["cuts", "last_element"]
    elif stage in ("trim", "ties") and drops_any:
        draft.set_for_models(stage, "keep_ratio", densities)
        differences += ["cuts"]
    draft.differ(*(differences if drops_any else ()))


def _rate_of(density: float) -> float:
    """Return 1 - density, in decimals, as people write both."""
    return float(1 - Decimal(repr(density)))


def _densities(given: Input, draft: Draft) -> Cases:
    cases = numbers("density", given, default=1.0)
    for case in cases:
        for number in case.numbers:
            text = f"density = {number:g}: must be above 0 and no more than 1 in"
            remedy = "to leave a model out, take it off the list or give it the weight 0"
            case.node.require(0 < number <= 1, f"{text} {draft.part.method}; {remedy}")
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


def _combine(draft: Draft, stage: str, models: int | None = None) -> None:
    """Combine the changes of all models, or refuse another number of them."""
    draft.require_base()
    others = draft.part.others()
    given = counted(len(others), "is", "are")
    text = (
        f"{draft.part.method} merges {counted(models or 0, 'model')} into the base; {given} given"
    )
    draft.require(models in (None, len(others)), text)
    if others:
        draft.merge(stage, others)


def _convert_nearswap(draft: Draft) -> None:
    _combine(draft, "nearswap+sum", 1)
    _set_t(draft, "nearswap")


def _convert_model_stock(draft: Draft) -> None:
    _combine(draft, "model_stock")
    count = len(draft.part.others())
    text = f"model_stock needs two models besides the base; {counted(count, 'is', 'are')} given"
    draft.require(count > 1, text)
    if flag_for_all("filter_wise", draft.part.shared, default=False):
        draft.set_stage("model_stock", "each", "row")
    draft.differ("opposed_changes", "small_changes")


# ---------------------------------------------------------------- whole models


def _weigh(draft: Draft, models: Sequence[Input], weights: Sequence[Cases], divides: bool) -> None:
    """Add up whole models, each times its weight."""
    draft.merge("linear", models)
    draft.set_stage("linear", "on", "weights")
    if divides:
        draft.set_stage("linear", "normalize", True)
    draft.set_for_models(None, "weight", weights)


def _convert_linear(draft: Draft) -> None:
    inputs = draft.part.inputs
    divides = flag_for_all("normalize", draft.part.shared, default=True)
    _weigh(draft, inputs, [numbers("weight", given) for given in inputs], divides)


def _convert_passthrough(draft: Draft) -> None:
    """Copy a model, or weigh it alone."""
    first, *others = draft.part.inputs
    draft.require(not others, f"passthrough copies one model; {1 + len(others)} are given")
    draft.base = first.model
    if resolve("scale", first.scopes):
        _weigh(draft, [first], [numbers("scale", first, default=1.0)], divides=False)


def _set_t(draft: Draft, stage: str) -> None:
    cases = resolve("t", draft.part.shared)
    is_complete = cases and not cases[-1].words
    draft.require(is_complete, "t is missing for some tensors; mergekit has no default")
    draft.set_cases(stage, "t", as_numbers("t", cases))


def _convert_slerp(draft: Draft) -> None:
    draft.require_base()
    others = draft.part.others()
    text = f"slerp goes from the base to one other model, but {counted(len(others), 'is', 'are')}"
    draft.require(len(others) == 1, f"{text} given")
    draft.merge("slerp", sorted(draft.part.inputs, key=lambda given: given.model != draft.base))
    _set_t(draft, "slerp")
    draft.differ("zeros")


def _convert_nuslerp(draft: Draft) -> None:
    """Convert angles of tensors, rows or columns; mergekit's rows run along the first dimension."""
    others, shared = draft.part.others(), draft.part.shared
    text = f"nuslerp merges two models besides the base; {counted(len(others), 'is', 'are')} given"
    if len(others) == 1:
        text += "; delete base_model to interpolate between the two themselves"
    draft.require(len(others) == 2, text)
    draft.merge("nuslerp", others)
    draft.set_for_models(None, "weight", [numbers("weight", given) for given in others])
    draft.set_stage("nuslerp", "on", "weights" if draft.part.base is None else "deltas")
    by_column = flag_for_all("nuslerp_row_wise", shared, default=False)
    if flag_for_all("nuslerp_flatten", shared, default=True):
        draft.set_stage("nuslerp", "each", "tensor")
        if by_column:
            node = resolve("nuslerp_row_wise", shared)[0].node
            node.note("nuslerp_row_wise", "has no effect as long as nuslerp_flatten is on")
    else:
        draft.set_stage("nuslerp", "each", "column" if by_column else "row")
        draft.differ("rows_of_nuslerp")
    draft.differ("straight_lines")


def _convert_multislerp(draft: Draft) -> None:
    others = draft.part.others()
    draft.merge("multislerp", others)
    draft.set_for_models(None, "weight", [numbers("weight", given) for given in others])
    draft.set_stage("multislerp", "on", "weights" if draft.part.base is None else "deltas")
    divides = flag_for_all("normalize_weights", draft.part.shared, default=True)
    draft.set_stage("multislerp", "normalize", divides)


def _convert_karcher(draft: Draft) -> None:
    """Convert a mean of all models, the base among them if there is one."""
    if len(draft.part.inputs) == 1:
        return  # the mean of one model is that model
    draft.merge("karcher", draft.part.inputs)
    steps = number_for_all("max_iter", draft.part.shared, 10)
    tolerance = number_for_all("tol", draft.part.shared, 1e-5)
    draft.differ("steps", "short_tensors", "opposed_tensors", steps=steps, tolerance=tolerance)


# ---------------------------------------------------------------- all of them


@dataclass(frozen=True)
class Method:
    """The conversion of a method, and the parameters that mean something to it."""

    convert: Callable[[Draft], None]
    of_models: tuple[str, ...] = ()
    of_all: tuple[str, ...] = ()


def _of_deltas(drops: str = "", *of_models: str, **usual: bool) -> Method:
    density, rescale = (("density",), ("rescale",)) if drops else ((), ())
    of_all = ("normalize", "lambda", *rescale)
    usual = dict.fromkeys(("elects", "normalize", "rescale"), False) | usual
    of_models = ("weight", *density, *of_models)
    return Method(lambda draft: _convert_deltas(draft, drops, **usual), of_models, of_all)


def _of_stage(stage: str, *differences: str, models: int | None = None, **ours: str) -> Method:
    """Make a method of one of our stages, which calls mergekit's parameters what `ours` says."""

    def convert(draft: Draft) -> None:
        _combine(draft, stage, models)
        for name, parameter in ours.items():
            draft.set_shared(stage, parameter, name)
        draft.differ(*differences)

    return Method(convert, (), tuple(ours))


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
    "multislerp": Method(_convert_multislerp, ("weight",), ("normalize_weights",)),
    "karcher": Method(_convert_karcher, (), ("max_iter", "tol")),
    "model_stock": Method(_convert_model_stock, (), ("filter_wise",)),
    "sce": _of_stage("sce", "election", "cuts", select_topk="select_ratio"),
    "ram": _of_stage("ram", epsilon="threshold"),
    "ramplus_tl": _of_stage("ramplus", epsilon="threshold", r="boost", alpha="most"),
    "nearswap": Method(_convert_nearswap, (), ("t",)),
    "arcee_fusion": _of_stage("arcee_fusion", "quantiles", models=1),
    "passthrough": Method(_convert_passthrough, ("scale",)),
}
