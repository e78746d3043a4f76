"""Models that are given by their deltas: the same result as if they were given by their weights."""

import numpy as np
import pytest
from ranges import DeltaArrays

from dare.inputs.arrays import array_source
from dare.output.memory import MemorySink
from dare.output.receipt import make_report
from dare.planning.data import Fate
from dare.planning.make import make_plan
from dare.recipe.recipe import Request
from dare.run.engine import execute
from dare.tensors.header import TensorInfo

SIZE = 1000


def deltas_source(deltas):
    stored = {
        name: (array_source({name: value}, "x").tensors[name].dtype, value.shape, value.view("u1"))
        for name, value in deltas.items()
    }
    return DeltaArrays(stored)


def merged(base, sources, backend="cpu", **settings):
    names = [f"model{index}" for index in range(len(sources))]
    asked = Request.of(base="base", models=names, backend=backend, **settings)
    plan = make_plan(
        asked.recipe, array_source(base, "base"), sources, names, options=asked.options
    )
    sink = MemorySink.with_room([TensorInfo(t.name, t.dtype, t.shape, 0) for t in plan.tensors])
    records = execute(plan, sink)
    report = make_report(plan, records, seconds=1.0, bytes_read=0, resumed_chunks=0)
    return plan, {name: found.tobytes() for name, found in sink.arrays.items()}, report


def numbers(seed, size=SIZE):
    """Sums of these are exact in float32, so that weights and deltas say the same."""
    return np.random.default_rng(seed).integers(-1000, 1000, size).astype(np.float32) / 1024


BASE = {"v": numbers(0), "w": numbers(1)}
DELTAS = [{"v": numbers(2), "w": numbers(3)}, {"v": numbers(4), "w": numbers(5)}]
WEIGHTS = [{name: BASE[name] + delta[name] for name in BASE} for delta in DELTAS]


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize(
    "method", ["dare+linear", "dare+ties", "trim+sum", "dare+trim+ties", "dare+slerp", "linear"]
)
def test_deltas_and_weights_give_the_same_bytes(method, backend):
    from_weights = [array_source(model, "model") for model in WEIGHTS]
    from_deltas = [deltas_source(delta) for delta in DELTAS]
    expected = merged(BASE, from_weights, backend, method=method)
    found = merged(BASE, from_deltas, backend, method=method)
    mixed = merged(BASE, [from_deltas[0], from_weights[1]], backend, method=method)
    assert found[1] == expected[1] == mixed[1]
    assert found[2].tensors == expected[2].tensors == mixed[2].tensors


def test_a_delta_that_is_not_there_is_no_change_and_no_complaint():
    only_v = deltas_source({"v": DELTAS[0]["v"]})
    plan, found, report = merged(BASE, [only_v], method="sum")
    assert {tensor.name: tensor.fate for tensor in plan.tensors} == {
        "v": Fate.MERGED,
        "w": Fate.BASE_ONLY,
    }
    assert found == {
        "v": (BASE["v"] + DELTAS[0]["v"]).tobytes(),
        "w": BASE["w"].tobytes(),
    }
    assert [str(warning) for warning in report.warnings if "not in" in str(warning)] == []


def test_a_model_without_a_delta_still_counts_in_the_mean():
    sources = [deltas_source({"v": DELTAS[0]["v"]}), array_source(WEIGHTS[1], "model")]
    _, found, _ = merged(BASE, sources, method="linear")
    assert found["w"] == (BASE["w"] + np.float32(0.5) * DELTAS[1]["w"]).tobytes()
