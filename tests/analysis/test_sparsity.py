import dataclasses
import json
import math
from datetime import UTC, datetime
from functools import cache

import ml_dtypes
import numpy as np
import pytest

import dare
from dare.analysis.readiness import Verdict
from dare.analysis.sparsity import Configuration, DARESparsityAnalyzer, dare_merge_readiness
from dare.errors import InputError, RecipeError
from helpers import save

SHAPE = (256, 512)
BOUND = Configuration().output_error


def analyze(*given, **configuration):
    return DARESparsityAnalyzer(Configuration(**configuration)).analyze(*given)


# ---------------------------------------------------------------- by hand

DELTA = {
    "first": np.array([[0.0, 0.5], [-2.0, 1.0]], np.float32),
    "second": np.array([0.01, 0.0], np.float32),
}


def test_figures_by_hand():
    found = analyze(DELTA, sparsity_threshold=0.1)
    assert (found.total_parameters, found.non_zero_parameters) == (6, 4)
    assert found.effective_sparsity == pytest.approx(3 / 6)  # under 0.2: 0, 0.01 and 0
    squares, fourths = 0.25 + 4 + 1 + 1e-4, 0.0625 + 16 + 1 + 1e-8
    assert found.essential_fraction == pytest.approx(squares**2 / (6 * fourths))
    assert found.relative_norm == pytest.approx(math.sqrt(squares / 6) / 0.02)
    assert not found.has_base
    first, second = found.per_layer_sparsity["first"], found.per_layer_sparsity["second"]
    assert (first.layer_name, first.parameter_count, first.sparsity) == ("first", 4, 1 / 4)
    assert (first.mean_magnitude, first.max_magnitude) == (pytest.approx(3.5 / 4), 2)
    assert first.has_significant_updates
    assert second.sparsity == 1.0  # beside the largest of all, not of its own
    assert not second.has_significant_updates


def test_magnitudes_are_those_of_numpy():
    values = np.random.default_rng(0).laplace(0, 0.001, 100_001).astype(np.float32)
    values[:1000] = 0
    stats = analyze({"w": values}).magnitude_stats
    sizes = np.abs(values).astype(np.float64)
    assert stats.mean == pytest.approx(sizes.mean())
    assert stats.standard_deviation == pytest.approx(sizes.std())
    assert (stats.max, stats.min_non_zero) == (sizes.max(), sizes[sizes > 0].min())
    found = [getattr(stats, f"percentile{n}") for n in (1, 5, 95, 99)]
    expected = np.quantile(sizes, (0.01, 0.05, 0.95, 0.99, 0.5))
    assert [*found, stats.median] == pytest.approx(expected, rel=0.004)


def test_a_delta_and_what_it_is_the_delta_of_are_the_same():
    generator = np.random.default_rng(0)
    base = {"w": generator.normal(0, 0.02, (64, 64)).astype(np.float32)}
    tuned = {"w": base["w"] + generator.normal(0, 0.0004, (64, 64)).astype(np.float32)}
    both = analyze(base, tuned)
    alone = analyze({"w": tuned["w"] - base["w"]})
    assert both.magnitude_stats == alone.magnitude_stats
    assert both.has_base
    assert both.relative_norm == pytest.approx(
        np.linalg.norm(tuned["w"] - base["w"]) / np.linalg.norm(base["w"]), rel=1e-5
    )
    assert alone.relative_norm == pytest.approx(both.relative_norm, rel=0.05)  # 0.02 was assumed


def test_files_and_arrays_are_the_same(tmp_path):
    generator = np.random.default_rng(0)
    base = {"a": generator.normal(0, 0.02, (600_000,)).astype(np.float32)}  # two chunks
    base["b"] = generator.normal(0, 0.02, (8, 8)).astype(np.float16)
    tuned = {name: (value + 0.001).astype(value.dtype) for name, value in base.items()}
    files = save(tmp_path / "base.safetensors", base), save(tmp_path / "t.safetensors", tuned)
    fixed = {"computed_at": datetime(2024, 1, 1, tzinfo=UTC), "seconds": 0.0}
    found, expected = analyze(*files), analyze(base, tuned)
    assert found.per_layer_sparsity["a"].parameter_count == 600_000
    assert dataclasses.replace(found, **fixed) == dataclasses.replace(expected, **fixed)
    assert analyze(save(tmp_path / "delta.safetensors", DELTA)).non_zero_parameters == 4
    assert analyze({"w": [0.0, 1.0, -2.0]}).magnitude_stats.max == 2


def test_a_delta_of_a_coarse_type_has_not_been_rounded():
    delta = np.random.default_rng(0).normal(0, 0.0005, SHAPE)
    coarse, fine = (analyze({"w": delta.astype(kind)}) for kind in (ml_dtypes.bfloat16, np.float32))
    assert coarse.recommended_drop_rate == fine.recommended_drop_rate
    assert [finding.code for finding in dare_merge_readiness(coarse).findings] == ["fit"]


def test_layers_are_selected_by_patterns():
    found = analyze(DELTA, analysis_layers=("sec*",))
    assert list(found.per_layer_sparsity) == ["second"]
    assert found.total_parameters == 2
    found = analyze(DELTA, compute_per_layer_metrics=False)
    assert (found.per_layer_sparsity, found.total_parameters) == ({}, 6)


def test_nothing_to_look_at_is_an_error():
    with pytest.raises(InputError, match="weights"):
        analyze(DELTA, analysis_layers=("third",))
    with pytest.raises(InputError, match="two paths"):
        analyze(DELTA, "tuned.safetensors")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("sparsity_threshold", 1.5),
        ("droppable_percentile", 1.0),
        ("output_error", 0.0),
        ("base_deviation", -1.0),
    ],
)
def test_settings_out_of_range_are_refused(name, value):
    with pytest.raises(RecipeError, match=name):
        Configuration(**{name: value})


# ---------------------------------------------------------------- the recommendation


@cache
def shaped(kind, ratio=0.02):
    """A delta of a shape, with a base beside which it has this size."""
    generator = np.random.default_rng(0)
    values = {
        "uniform": lambda: generator.uniform(-1, 1, SHAPE),
        "gaussian": lambda: generator.standard_normal(SHAPE),
        "laplace": lambda: generator.laplace(size=SHAPE),
        "heavy": lambda: generator.standard_t(3, SHAPE),
        "zeros": lambda: generator.standard_normal(SHAPE) * (generator.random(SHAPE) < 0.1),
    }[kind]()
    base = generator.normal(0, 0.02, SHAPE)
    values *= ratio * np.linalg.norm(base) / np.linalg.norm(values)
    return {"w": base.astype(np.float32)}, {"w": (base + values).astype(np.float32)}


def test_the_recommendation_depends_on_the_shape():
    kinds = ("uniform", "gaussian", "laplace", "heavy", "zeros")
    found = [analyze(*shaped(kind)) for kind in kinds]
    # All have one norm, and less is borne the fewer elements carry it.
    rates = [analysis.recommended_drop_rate for analysis in found]
    assert rates == sorted(rates, reverse=True)
    assert len(set(rates)) >= 4
    assert rates[0] > 0.8
    shares = dict(zip(kinds, [analysis.essential_fraction for analysis in found], strict=True))
    expected = {"uniform": 0.556, "gaussian": 0.333, "laplace": 0.167, "zeros": 0.0333}
    for kind, share in expected.items():
        assert shares[kind] == pytest.approx(share, rel=0.04)


@pytest.mark.parametrize("kind", ["uniform", "gaussian", "laplace", "heavy", "zeros"])
def test_at_the_recommended_rate_nineteen_of_twenty_outputs_are_within_the_bound(kind):
    base, tuned = shaped(kind)
    dropped = dare.dare_sparsify(base, tuned, analyze(base, tuned).recommended_drop_rate)
    errors = np.linalg.norm(dropped["w"] - tuned["w"], axis=1)
    assert (errors <= BOUND * np.linalg.norm(base["w"], axis=1)).mean() >= 0.95


@pytest.mark.parametrize(
    ("count", "size"), [(0, 0), (1, 1), (50, 0.1), (131, 1), (5, 0.02), (-1, 0)]
)
@pytest.mark.parametrize("shape", [(512, 512), (96, 1024)])
def test_the_promise_includes_outliers(count, size, shape):
    """The error of outputs of random inputs; -1 outliers stand for a Cauchy delta."""
    generator = np.random.default_rng(0)
    base = generator.normal(0, 0.02, shape).astype(np.float32)
    change = generator.normal(0, 0.0005, shape)
    change.reshape(-1)[generator.choice(change.size, max(count, 0), replace=False)] = size
    change = 2e-5 * generator.standard_cauchy(shape) if count < 0 else change
    found = analyze({"w": base}, {"w": (base + change).astype(np.float32)})
    rate, errors = found.recommended_drop_rate, []
    assert bool(rate) == (found.output_error > 0)
    assert rate > 0.7 or count > 5 or size == 1 or count < 0
    for _ in range(20):
        noise = change * ((generator.random(shape) >= rate) / (1 - rate) - 1)
        inputs = generator.standard_normal((shape[1], 64))
        errors.append(np.linalg.norm(noise @ inputs) / np.linalg.norm(base @ inputs))
    assert np.sort(errors)[18] <= found.output_error


def test_the_recommendation_depends_on_the_size():
    rates = [
        analyze(*shaped("gaussian", ratio)).recommended_drop_rate for ratio in (0.004, 0.02, 0.2)
    ]
    assert rates == sorted(rates, reverse=True)
    assert rates[0] == 0.95
    assert rates[-1] < 0.1
    bold = DARESparsityAnalyzer(Configuration.aggressive()).analyze(*shaped("uniform", 0.002))
    assert bold.recommended_drop_rate == 0.99


def test_beside_a_base_of_zeros_there_is_no_relative_error():
    _, tuned = shaped("gaussian")
    found = analyze({"w": np.zeros(SHAPE, np.float32)}, tuned)
    assert (found.relative_norm, found.output_error) == (math.inf, math.inf)
    assert found.recommended_drop_rate > 0.9
    assert json.loads(found.to_json())["output_error"] == "inf"


# ---------------------------------------------------------------- readiness


def gaussian(ratio, outlier=0.0):
    delta = np.random.default_rng(0).normal(0, 0.02 * ratio, SHAPE).astype(np.float32)
    delta[3, 4] += outlier
    return delta


@pytest.mark.parametrize(
    ("delta", "verdict", "rules"),
    [
        (gaussian(0.025), Verdict.NO_DEFECT, set()),
        (gaussian(0.8), Verdict.NO_DEFECT, {"large_change"}),
        (np.zeros(SHAPE), Verdict.WITH_CHANGES, {"equals_base"}),
        (gaussian(0.025, 0.1), Verdict.NO_DEFECT, {"outliers"}),
        (gaussian(0.025, 50.0), Verdict.NO_DEFECT, {"large_change", "outliers"}),
        (gaussian(0.025, np.nan), Verdict.UNFIT, {"not_finite"}),
    ],
    ids=["plain", "large", "zero", "outlier", "large outlier", "NaN"],
)
def test_the_verdict_is_that_of_assess(delta, verdict, rules):
    base = {"w": np.random.default_rng(2).normal(0, 0.02, SHAPE).astype(np.float32)}
    tuned = {"w": (base["w"] + delta).astype(np.float32)}
    found = analyze(base, tuned)
    own = dare_merge_readiness(found)
    analyzed = dare.assess(dare.analyze_arrays(base, {"delta": tuned}, spectra="none"))
    assert own.verdict is analyzed.verdict is verdict
    assert own.by_model == analyzed.by_model
    assert {each.code for each in analyzed.findings} == rules
    recommends = verdict is Verdict.NO_DEFECT and found.recommended_drop_rate > 0
    fit = [each for each in own.findings if each.code == "fit"]
    assert len(fit) == recommends
    assert list(map(str, own.findings)) == [*map(str, analyzed.findings), *map(str, fit)]


def test_words_and_json():
    analysis = analyze(*shaped("gaussian", ratio=0.01))
    document = json.loads(analysis.to_json())
    assert document["recommended_drop_rate"] == analysis.recommended_drop_rate
    assert document["per_layer_sparsity"]["w"]["parameter_count"] == 256 * 512
    assert datetime.fromisoformat(document["computed_at"]) == analysis.computed_at
    assert str(analysis).startswith("131,072 parameters")
    readiness = dare_merge_readiness(analysis)
    assert json.loads(readiness.to_json())["verdict"] == "no defect found"
    (finding,) = readiness.findings
    assert finding.code == "fit"
    assert str(analysis.recommended_drop_rate) in finding.remedy
    loose = analyze(*shaped("gaussian", ratio=0.08), output_error=0.3)
    assert dare_merge_readiness(loose).verdict is Verdict.NO_DEFECT
