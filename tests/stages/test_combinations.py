"""What holds for stages by themselves holds for chains of them, and for settings of any scope.

Every ordered pair of delta stages stands before `linear` and `ties`: expectation where it is
promised, realised rates, and memory within the plan.
"""

from __future__ import annotations

import itertools
import math
import tracemalloc
import warnings

import numpy as np
import pytest

import dare
from dare.inputs.arrays import array_source
from dare.output.memory import MemorySink
from dare.planning.make import make_plan
from dare.run.engine import execute
from dare.stages import STAGES
from dare.tensors.header import TensorInfo
from helpers import method_of

DELTA_STAGES = [name for name, stage in STAGES.items() if stage.kind == "delta"]
PAIRS = list(itertools.permutations(DELTA_STAGES, 2))
UNBIASED = {
    "dare": {"drop_rate": 0.5},
    "darex": {"drop_rate": 0.5},
    "della": {"drop_rate": 0.5},
    "nm": {"choose": "random"},
}
"""Random stages whose expectation is the delta; each keeps half."""
UNBIASED_PAIRS = list(itertools.permutations(UNBIASED, 2))
UNBIASED_CHAINS = [*itertools.permutations(UNBIASED, 3), *itertools.permutations(UNBIASED, 4)]
DROP_RATES = {"dare": 0.5, "darex": 0.6, "della": 0.3}


def merge(deltas, method, **settings):
    """Merge deltas onto zeros; return the result and the report."""
    models = [{"layers.0.weight": delta} for delta in deltas]
    base = {"layers.0.weight": np.zeros_like(deltas[0])}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dare.DareWarning)
        merged, report = dare.merge_arrays(
            base, models, method=method, **{"verbose": False, **settings}
        )
    return merged["layers.0.weight"], report


def positive(shape=(512, 512), seed=0):
    """Changes of one sign, so that a sum shows a factor."""
    return np.abs(np.random.default_rng(seed).standard_normal(shape, np.float32))


@pytest.mark.parametrize(
    "chain",
    [
        *((stage, combine) for stage in UNBIASED for combine in ("linear", "ties")),
        *((*pair, combine) for pair in UNBIASED_PAIRS for combine in ("linear", "ties")),
        *((*chain, "linear") for chain in UNBIASED_CHAINS),
    ],
    ids="+".join,
)
def test_random_stages_keep_the_expectation(chain):
    delta = positive()
    settings = {name: UNBIASED[name] for name in chain[:-1]}
    merged, _ = merge([delta], "+".join(chain), stages=settings)
    ratio = merged.sum(dtype=np.float64) / delta.sum(dtype=np.float64)
    deviation = math.sqrt((2 ** len(settings) - 1) * np.square(delta).sum()) / delta.sum()
    assert abs(ratio - 1) < 5 * deviation


@pytest.mark.parametrize("chain", UNBIASED_PAIRS, ids="+".join)
def test_random_stages_of_a_chain_drop_independently(chain):
    delta = np.ones((512, 512), np.float32)
    settings = {name: UNBIASED[name] for name in chain}
    merged, _ = merge([delta], "+".join([*chain, "sum"]), stages=settings)
    assert abs(np.count_nonzero(merged) / merged.size - 0.25) < 5 * math.sqrt(3 / 16 / merged.size)


@pytest.mark.parametrize("first", UNBIASED)
def test_the_first_random_stage_keeps_its_mask_whatever_follows(first):
    delta = positive()
    alone, _ = merge([delta], f"{first}+sum", stages={first: UNBIASED[first]})
    for other in UNBIASED.keys() - {first}:
        settings = {first: UNBIASED[first], other: UNBIASED[other]}
        both, _ = merge([delta], f"{first}+{other}+sum", stages=settings)
        assert not both[alone == 0].any()


def test_a_stage_that_does_not_draw_leaves_the_first_draw_to_the_next():
    delta = positive()
    alone, _ = merge([delta], "darex+sum")
    behind, _ = merge(
        [delta], "dare+nm+darex+sum", stages={"dare": {"drop_rate": 0.0}, "nm": {"n": 4}}
    )
    assert np.array_equal(alone, behind)


@pytest.mark.parametrize("pair", PAIRS, ids="+".join)
def test_realised_rates_of_pairs_are_those_asked_for(pair):
    delta = positive((128, 96))
    delta[:, ::3] = 0  # as in a model of few digits, where much does not change
    stages = {name: {"drop_rate": rate} for name, rate in DROP_RATES.items() if name in pair}
    _, report = merge([delta], "+".join([*pair, "linear"]), stages=stages)
    (model,) = report.models
    if not stages:
        assert (model.drop_rate_asked, model.drop_rate_realised) == (None, None)
        return
    kept = math.prod(1 - DROP_RATES[name] for name in stages)
    assert model.drop_rate_asked == pytest.approx(1 - kept, abs=1e-15)
    assert model.drop_rate_realised is not None
    reached = delta.size if pair[0] in DROP_RATES else min(report.tensors[0].survivors[0])
    deviation = math.sqrt(kept * (1 - kept) / reached)
    assert abs(model.drop_rate_realised - model.drop_rate_asked) < 5 * deviation


def test_a_rate_asked_for_is_shown_as_it_was_asked_for():
    deltas = {f"layers.{i}.weight": positive((7, 11 + i)) for i in range(9)}
    base = {name: np.zeros_like(delta) for name, delta in deltas.items()}
    _, report = dare.merge_arrays(
        base, [deltas], stages={"dare": {"drop_rate": 0.3}}, verbose=False, delta_threshold=9
    )
    assert report.models[0].drop_rate_asked == 0.3


@pytest.mark.parametrize("first", ["dare", "trim"])
def test_della_has_its_mean_rate_among_what_is_left(first):
    stages = {"della": {"drop_rate": 0.5, "window": 0.9}, "trim": {"keep_ratio": 0.1}}
    stages = {name: given for name, given in stages.items() if name in (first, "della")}
    _, report = merge([positive()], f"{first}+della+sum", stages=stages)
    ((before, after),) = report.tensors[0].survivors
    assert abs(after / before - 0.5) < 5 * math.sqrt(0.25 / before)


# ---------------------------------------------------------------- memory

MATRIX_STAGES = {"star", "fourier"}
CHAINS = [(*pair, combine) for pair in PAIRS for combine in ("linear", "ties")]
PLAIN = [(stage, combine) for stage in DELTA_STAGES for combine in ("linear", "ties")]


COMBINES = [(stage,) for stage in ("arcee_fusion", "model_stock", "multislerp", "ramplus", "sce")]


@pytest.mark.parametrize("chain", [*PLAIN, *CHAINS, *COMBINES], ids="+".join)
def test_buffers_stay_within_the_plan(chain):
    """More than a chunk, so that every buffer is filled; matrix stages have whole ones besides."""
    shape = (96, 80) if MATRIX_STAGES & set(chain) else (525, 1000)
    generator = np.random.default_rng(0)
    arrays = [{"w": generator.standard_normal(shape, np.float32)} for _ in range(4)]
    names = ["1", "2", "3"][: STAGES[chain[-1]].models]
    sources = [array_source(array, "") for array in arrays[: 1 + len(names)]]
    stages = {name: GIVEN[name] for name in chain if (name,) in COMBINES and name in GIVEN}
    recipe = dare.Recipe(base="b", models=names, method="+".join(chain), stages=stages)
    options = {"threads": 1}
    plan = make_plan(recipe, sources[0], sources[1:], names)
    options["max_memory"] = plan.cost.least_memory
    plan = make_plan(recipe, sources[0], sources[1:], names, options=dare.RunOptions(**options))
    sink = MemorySink.with_room(
        [TensorInfo("w", tensor.dtype, tensor.shape, 0) for tensor in plan.tensors]
    )
    execute(plan, sink)  # fills caches
    tracemalloc.start()
    try:
        execute(plan, sink)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    python_objects = 1 << 18
    assert peak <= plan.cost.buffer_bytes + python_objects


# ---------------------------------------------------------------- settings of one model, of tensors

GIVEN = {
    "dare": {"drop_rate": 0.3},
    "darex": {"drop_rate": 0.8, "q": 0.4},
    "della": {"drop_rate": 0.4, "window": 0.2},
    "trim": {"keep_ratio": 0.6},
    "breadcrumbs": {"keep_middle": 0.5, "per": "row"},
    "nm": {"n": 1, "m": 3},
    "star": {"singular_share": 0.7},
    "fourier": {"radius": 0.3},
    "nearswap": {"t": 0.01},
    "linear": {"on": "weights"},
    "sum": {"normalize": True},
    "ties": {"divide_by": "nothing"},
    "slerp": {"on": "deltas"},
    "nuslerp": {"each": "row"},
    "karcher": {"on": "deltas"},
    "cabs": {"n": 1, "m": 4},
    "consensus": {"selectivity": 0.3},
    "iso": {"variant": "cts"},
    "knots": {"keep_ratio": 0.9},
    "pcb": {"score_ratio": 0.3},
    "dc_merge": {"keep_ratio": 0.5},
    "swudi": {"rank_share": 0.3},
    "model_stock": {"each": "row"},
    "multislerp": {"on": "deltas"},
    "ram": {"threshold": 0.5},
    "ramplus": {"threshold": 0.5, "boost": 0.3},
    "sce": {"select_ratio": 0.4},
    "svc": {"alpha": 0.9},
}
"""For each stage that has parameters, some that are not the defaults."""
UNEVEN = {"weights": [1.0, 2.0, -0.5]}
"""Weights that do not add up to 1, where otherwise nothing would change."""


def random_deltas(count=3, shape=(24, 36)):
    generator = np.random.default_rng(1)
    return [generator.standard_normal(shape, np.float32) for _ in range(count)]


def merge_models(base, models, method, **settings):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dare.DareWarning)
        return dare.merge_arrays(base, models, method=method, verbose=False, **settings)[0]


def test_every_stage_with_parameters_is_given_some():
    for_all = {"embeddings"}  # a parameter of every matrix stage, tested with them
    stages = {name: stage for name, stage in STAGES.items() if not stage.takes_grams}
    assert GIVEN.keys() == {n for n, stage in stages.items() if stage.parameters.keys() - for_all}


@pytest.mark.parametrize("name", [name for name in GIVEN if STAGES[name].kind == "delta"])
def test_settings_of_one_model_are_that_models_alone(name):
    deltas = random_deltas()
    merged, _ = merge(deltas, f"{name}+sum", model_settings=[{}, GIVEN[name], {}])
    alone = [
        merge([delta], f"{name}+sum", seed=42 + i, stages={name: GIVEN[name]} if i == 1 else {})[0]
        for i, delta in enumerate(deltas)
    ]
    assert not np.array_equal(alone[1], merge([deltas[1]], f"{name}+sum", seed=43)[0])
    np.testing.assert_allclose(merged, np.sum(alone, axis=0), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", GIVEN)
def test_settings_of_some_tensors_are_those_tensors_alone(name):
    method = method_of(name)
    deltas = random_deltas(STAGES[name].models or 3)
    models = [{"a.weight": delta, "b.weight": delta} for delta in deltas]  # masks differ by name
    base = {tensor: np.ones_like(value) for tensor, value in models[0].items()}
    rule = dare.TensorRule(match="b.*", settings=GIVEN[name])
    weights = UNEVEN if name == "linear" else {}
    merged = merge_models(base, models, method, tensors=[rule], **weights)
    for tensor, stages in (("a.weight", {}), ("b.weight", {name: GIVEN[name]})):
        alone = merge_models(base, models, method, stages=stages, **weights)
        np.testing.assert_array_equal(merged[tensor], alone[tensor])
    assert not np.array_equal(merged["b.weight"], merged["a.weight"])


@pytest.mark.parametrize(
    ("chain", "given"),
    [("nm+cabs", {"n": 1, "m": 4}), ("trim+knots", {"keep_ratio": 0.7})],
)
@pytest.mark.parametrize("scope", ["model", "rule"])
def test_settings_of_one_model_do_not_reach_the_combine_stage(chain, given, scope):
    """A parameter of the same name in both stages: what one model is given is its delta's."""
    first, combine = chain.split("+")
    deltas = random_deltas()
    changed = [
        merge([delta], f"{first}+sum", stages={first: given} if i == 0 else {})[0]
        for i, delta in enumerate(deltas)
    ]
    expected, _ = merge(changed, combine)
    scopes = {
        "model": {"model_settings": [given, {}, {}]},
        "rule": {"tensors": [dare.TensorRule(match="*", model="model 0", settings=given)]},
    }
    merged, _ = merge(deltas, chain, **scopes[scope])
    np.testing.assert_array_equal(merged, expected)


@pytest.mark.parametrize(
    ("chain", "rescale", "owner"), [("dare+trim+sum", False, "dare"), ("trim+cabs", True, "cabs")]
)
def test_a_later_parameter_leaves_its_name_to_the_stages_that_had_it(chain, rescale, owner):
    """`rescale` without a stage is dare's or cabs' own, though `trim` has one now."""
    deltas = random_deltas()
    expected, _ = merge(deltas, chain, stages={owner: {"rescale": rescale}})
    rule = dare.TensorRule(match="*", settings={"rescale": rescale})
    assert np.array_equal(merge(deltas, chain, tensors=[rule])[0], expected)
    assert np.array_equal(merge(deltas, chain, rescale=rescale)[0], expected)
    alone, _ = merge(deltas, "trim+sum", stages={"trim": {"rescale": "l1"}})
    assert np.array_equal(merge(deltas, "trim+sum", rescale="l1")[0], alone)
