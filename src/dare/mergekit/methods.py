"""What each of mergekit's methods becomes, and the known differences of its weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal

from dare.mergekit.configuration import Config
from dare.mergekit.draft import Draft
from dare.mergekit.parameters import (
    Case,
    Cases,
    Input,
    as_numbers,
    each,
    flag_for_all,
    for_all,
    number_for_all,
    numbers,
    resolve,
    values,
)

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


def _required_base(config: Config) -> str:
    if config.base is None:
        raise config.method_node.refuse(f"base_model is missing; {config.method} needs one")
    return config.base


# ---------------------------------------------------------------- changes to the base


def _convert_deltas(config: Config, draft: Draft) -> None:
    """task_arithmetic, dare_linear, ties and dare_ties: change each delta, combine, scale."""
    base, models = _required_base(config), config.others()
    if not models:
        raise config.method_node.refuse("only the base is given: there is nothing to merge into it")
    drops, elects = config.method.startswith("dare"), config.method.endswith("ties")
    trims = config.method == "ties"
    weights = [numbers("weight", given) for given in models]
    normalize = flag_for_all("normalize", config.shared, default=trims)
    if elects:
        if normalize:
            _check_positive(weights, config)
        else:
            draft.set_stage("ties", "divide_by", "nothing")
        draft.differences.append(ELECTION)
    elif normalize:
        weights = _shares(weights, config, draft)

    combine = "ties" if elects else "sum"
    stages = ["dare"] * drops + [combine]
    draft.merge("+".join(stages), base, [given.model for given in models])
    draft.scale(number_for_all("lambda", config.shared, 1.0))
    draft.set_for_models(None, "weight", weights)
    densities = [_densities(given, config) for given in models]
    if drops:
        _set_drop_rates(densities, config, draft)
    elif trims:
        _set_keep_ratios(densities, config, draft)


def _check_positive(weights: Sequence[Cases], config: Config) -> None:
    for cases in weights:
        for case in cases:
            if any(number < 0 for number in values((case,))):
                raise case.node.refuse(
                    f"weight: is negative, and {config.method} divides by the sum of weights with "
                    "their signs, so that the minus cancels; take the model's sign out of it"
                )


def _densities(given: Input, config: Config) -> Cases:
    cases = numbers("density", given, default=1.0)
    for case in cases:
        for number in values((case,)):
            if not 0 < number <= 1:
                raise case.node.refuse(
                    f"density = {number:g}: must be above 0 and no more than 1 in {config.method}; "
                    "to leave a model out, take it off the list or give it the weight 0"
                )
    return cases


def _set_drop_rates(densities: Sequence[Cases], config: Config, draft: Draft) -> None:
    rates = [
        tuple(Case(c.contains, each(_one_minus, c.value), c.node) for c in cases)
        for cases in densities
    ]
    draft.set_for_models("dare", "drop_rate", rates)
    rescale = flag_for_all("rescale", config.shared, default=True)
    draft.set_stage("dare", "rescale", "l1" if rescale else False)
    if any(rate > 0 for cases in rates for rate in values(cases)):
        draft.differences.append(NEW_MASKS)
        draft.differences += [TINY_NORM] * rescale


def _one_minus(density: float) -> float:
    """1 - density in decimals, as people write both."""
    return float(1 - Decimal(repr(density)))


def _set_keep_ratios(densities: Sequence[Cases], config: Config, draft: Draft) -> None:
    trims = any(density < 1 for cases in densities for density in values(cases))
    if trims and flag_for_all("rescale", config.shared, default=False):
        case = for_all("rescale", config.shared)
        assert case is not None  # it is not at its default
        raise case.node.refuse("rescale: what trimming leaves cannot be rescaled here; delete it")
    if trims:
        draft.set_for_models("ties", "keep_ratio", densities)
    draft.differences += [CUT] * trims


# ---------------------------------------------------------------- shares of a sum


def _shares(weights: Sequence[Cases], config: Config, draft: Draft) -> list[Cases]:
    """Weights divided by their sum, which must not change from layer to layer."""
    rows = [_divided(row, config, draft) for row in _by_filter(weights)]
    return [tuple(row[model] for row in rows) for model in range(len(weights))]


def _by_filter(weights: Sequence[Cases]) -> list[list[Case]]:
    """For each filter, every model's case; refused if models have filters of their own."""
    filters: tuple[str | None, ...] = (None,)
    for cases in weights:
        own = tuple(case.contains for case in cases)
        if own != (None,) and filters not in ((None,), own):
            raise cases[0].node.refuse(
                "weight: to divide by the sum of weights the filters must be the same for every "
                "model, in the same order"
            )
        filters = filters if own == (None,) else own
    return [
        [Case(text, case.value, case.node) for case in (c[min(row, len(c) - 1)] for c in weights)]
        for row, text in enumerate(filters)
    ]


def _divided(row: Sequence[Case], config: Config, draft: Draft) -> list[Case]:
    total = _constant_total(row)
    if abs(total) < 1e-6 and config.method in ("linear", "nuslerp"):
        raise row[0].node.refuse("weight: the weights add up to 0")
    if abs(total) < 1e-8 or math.isclose(total, 1, rel_tol=1e-12):
        return list(row)  # which mergekit does not divide by
    if ROUNDED_SHARES not in draft.differences:
        draft.differences.append(ROUNDED_SHARES)
    return [Case(c.contains, each(lambda w: w / total, c.value), c.node) for c in row]


def _constant_total(row: Sequence[Case]) -> float:
    lengths = {len(case.value) for case in row if isinstance(case.value, list)}
    steps = max(lengths, default=1)
    columns = [
        math.fsum(c.value[step] if isinstance(c.value, list) else c.value for c in row)
        for step in range(steps)
    ]
    fits = len(lengths) < 2 and all(
        math.isclose(column, columns[0], rel_tol=1e-12, abs_tol=1e-12) for column in columns
    )
    if not fits:
        raise next(case for case in row if isinstance(case.value, list)).node.refuse(
            "weight: the sum of the models' weights changes from layer to layer, and to divide "
            "by that cannot be converted; let the weights add up to the same number in every layer"
        )
    return columns[0]


# ---------------------------------------------------------------- means and interpolations


def _convert_linear(config: Config, draft: Draft) -> None:
    """A mean of weights is a base and a mean of changes to it, if the shares add up to 1."""
    names = [given.model for given in config.inputs]
    base = config.base if config.base in names else names[0]
    if len(config.inputs) < 2:
        raise config.method_node.refuse("a mean needs two models; one is given")
    weights = [numbers("weight", given) for given in config.inputs]
    if flag_for_all("normalize", config.shared, default=True):
        weights = _shares(weights, config, draft)
    for cases in _by_filter(weights):
        if not math.isclose(_constant_total(cases), 1, rel_tol=1e-9):
            raise cases[0].node.refuse(
                "weight: without normalize the weights must add up to 1, or the base would be "
                "scaled, which cannot be converted"
            )
    others = [
        (given.model, cases)
        for given, cases in zip(config.inputs, weights, strict=True)
        if given.model != base
    ]
    draft.merge("linear", base, [model for model, _ in others])
    draft.set_for_models(None, "weight", [cases for _, cases in others])
    draft.differences.append(
        f"{base} is the base and the others' changes to it are averaged, which is the same mean "
        "but for rounding"
    )


def _convert_slerp(config: Config, draft: Draft) -> None:
    base, others = _required_base(config), config.others()
    if len(others) != 1:
        raise config.method_node.refuse(
            f"slerp goes from the base to one other model, and {len(others)} are given"
        )
    cases = resolve("t", config.shared)
    if not cases or cases[-1].contains is not None:
        raise config.method_node.refuse("t is missing for some tensors; mergekit has no default")
    draft.merge("slerp", base, [base, others[0].model])
    draft.set_cases("slerp", "t", as_numbers("t", cases))
    draft.differences.append(
        "the angle to a tensor of zeros counts as zero, so that interpolation is straight; "
        "mergekit takes a right angle"
    )


def _convert_nuslerp(config: Config, draft: Draft) -> None:
    others = config.others()
    if len(others) != 2:
        raise config.method_node.refuse(
            f"nuslerp merges two models beside the base, and {len(others)} are given"
        )
    if not flag_for_all("nuslerp_flatten", config.shared, default=True):
        case = for_all("nuslerp_flatten", config.shared)
        assert case is not None  # it is not at its default
        raise case.node.refuse("nuslerp_flatten: false: tensors are taken as a whole here")
    weights = [numbers("weight", given) for given in others]
    second = _shares(weights, config, draft)[1]
    base = others[0].model if config.base is None else config.base
    draft.merge("slerp", base, [given.model for given in others])
    draft.set_cases("slerp", "t", second)
    draft.set_stage("slerp", "on", "weights" if config.base is None else "deltas")
    draft.differences.append(
        "tensors whose cosine is beyond ±0.9995, or that are zero, are interpolated straight; "
        "mergekit does that only where they are parallel, and takes a right angle for zeros"
    )


# ---------------------------------------------------------------- all of them


@dataclass(frozen=True)
class Method:
    """How a method is converted, and the parameters that mean something to it."""

    convert: Callable[[Config, Draft], None]
    of_models: tuple[str, ...]
    of_all: tuple[str, ...]


METHODS = {
    "linear": Method(_convert_linear, ("weight",), ("normalize",)),
    "task_arithmetic": Method(_convert_deltas, ("weight",), ("normalize", "lambda")),
    "ties": Method(_convert_deltas, ("weight", "density"), ("normalize", "lambda", "rescale")),
    "dare_linear": Method(
        _convert_deltas, ("weight", "density"), ("normalize", "lambda", "rescale")
    ),
    "dare_ties": Method(_convert_deltas, ("weight", "density"), ("normalize", "lambda", "rescale")),
    "slerp": Method(_convert_slerp, (), ("t",)),
    "nuslerp": Method(_convert_nuslerp, ("weight",), ("nuslerp_flatten",)),
}
