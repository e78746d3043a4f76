"""Small networks that change by more than their base, and yet their sum works."""

import numpy as np

from dare.analysis.advice import judge
from dare.analysis.analyzing import analyze_arrays
from dare.analysis.readiness import Verdict

CLASSES, INPUTS, HIDDEN = 10, 64, 64


def outputs(net, x):
    hidden = np.maximum(x @ net["first.weight"], 0)
    return hidden, hidden @ net["second.weight"]


def trained(net, x, y, steps, rate):
    """Adam on batches of 64."""
    net, draw = {name: value.copy() for name, value in net.items()}, np.random.default_rng(1)
    moments = {name: (np.zeros_like(value), np.zeros_like(value)) for name, value in net.items()}
    for step in range(1, steps + 1):
        batch = draw.integers(0, len(y), 64)
        hidden, logits = outputs(net, x[batch])
        odds = np.exp(logits - logits.max(axis=1, keepdims=True))
        error = (odds / odds.sum(axis=1, keepdims=True) - np.eye(CLASSES)[y[batch]]) / 64
        inner = (error @ net["second.weight"].T) * (hidden > 0)
        slopes = {"first.weight": x[batch].T @ inner, "second.weight": hidden.T @ error}
        for name, slope in slopes.items():
            mean, square = moments[name]
            mean += 0.1 * (slope - mean)
            square += 0.001 * (slope**2 - square)
            size = np.sqrt(square / (1 - 0.999**step)) + 1e-8
            net[name] -= (rate * mean / (1 - 0.9**step) / size).astype(np.float32)
    return net


def test_two_networks_far_from_their_base_are_merged_without_dropping():
    draw = np.random.default_rng(0)
    y = draw.integers(0, CLASSES, 3000)
    x = (draw.normal(0, 1, (CLASSES, INPUTS))[y] + draw.normal(0, 2, (3000, INPUTS))) / 4
    sizes = {"first.weight": (INPUTS, HIDDEN), "second.weight": (HIDDEN, CLASSES)}
    new = {n: draw.uniform(-0.125, 0.125, size).astype(np.float32) for n, size in sizes.items()}
    base = trained(new, x[:2000], y[:2000], 60, 0.001)
    low, high = (
        trained(base, x[:2000][part], y[:2000][part], 400, 0.003)
        for part in (y[:2000] < 5, y[:2000] >= 5)
    )
    added = {name: low[name] + high[name] - base[name] for name in base}
    right = [(outputs(net, x[2000:])[1].argmax(1) == y[2000:]).mean() for net in (base, low, added)]
    assert right[2] > max(right[:2]) + 0.05
    seen = analyze_arrays(base, {"low": low, "high": high})
    readiness, advice = judge(seen)
    assert min(model.total.relative_norm for model in seen.models) > 1
    assert readiness.verdict is Verdict.NO_DEFECT
    assert {each.code for each in readiness.findings} == {"large_change"}
    assert (advice.left_out, advice.recipe["method"]) == ((), "linear")
    assert advice.command.endswith("--method linear")


def test_a_stranger_is_told_although_its_norms_are_like_the_base():
    def network(seed):
        draw = np.random.default_rng(seed)
        norms = {"b1.weight": 1.0, "b1.bias": 0.0, "b1.running_mean": 0.0, "b1.running_var": 9.0}
        alike = {name: np.full(32, value, np.float32) for name, value in norms.items()}
        return {"c1.weight": draw.normal(0, 0.1, (32, 64)).astype(np.float32), **alike}

    seen = analyze_arrays(network(1), {"stranger": network(2)})
    assert seen.models[0].total.relative_norm < 0.2
    readiness, advice = judge(seen)
    assert [each.code for each in readiness.findings] == ["unrelated"]
    assert advice.left_out == ("stranger",)
