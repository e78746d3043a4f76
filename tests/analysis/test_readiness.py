import dataclasses
import json
import math
import re
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_up import analysis, make_base, mixed, tune

import dare
from dare.analysis.advice import judge
from dare.analysis.analyzing import analyze
from dare.analysis.document import Analysis
from dare.analysis.prediction import exposures_of, mean_bounded_error
from dare.analysis.readiness import (
    RULES,
    SEVEREST_FIRST,
    Verdict,
    assess,
    body_of,
    chance_cancelled,
    rounding_norm,
)
from dare.analysis.results import Origin
from dare.demo.merges import BASE as DEMO_BASE
from dare.demo.merges import TUNED
from dare.documents.notices import LIMIT, Notice, Severity, catalogue, notice
from dare.planning.make import LeftOut, Misfit, StoredForm
from dare.stages import STAGES

ROOT = make_base()
COUNTER = StoredForm((), "I64")
ONE, TWO, THREE = (tune(ROOT, seed=seed) for seed in (1, 2, 3))


def found(seen: Analysis, **settings) -> set[str]:
    return {finding.code for finding in assess(seen, **settings).findings}


def of(models, **changes) -> set[str]:
    return found(analysis(ROOT, models, **changes))


def finding(seen: Analysis, rule: str):
    (only,) = [each for each in assess(seen).findings if each.code == rule]
    return only


# ---------------------------------------------------------------- in general


def test_usual_fine_tunes_are_ready():
    readiness = assess(analysis(ROOT, {"math": ONE, "code": TWO}))
    assert readiness.findings == ()
    assert readiness.verdict is Verdict.NO_DEFECT
    assert readiness.by_model == {"math": Verdict.NO_DEFECT, "code": Verdict.NO_DEFECT}


def test_the_gravest_finding_decides():
    broken = {name: value.copy() for name, value in TWO.items()}
    broken["layers.0.mlp.up_proj.weight"][0, 0] = np.nan
    models = {"math": ONE, "copy": ROOT, "broken": broken}
    readiness = assess(analysis(ROOT, models))
    assert readiness.verdict is Verdict.UNFIT
    assert readiness.by_model["copy"] is Verdict.WITH_CHANGES
    assert readiness.by_model["broken"] is Verdict.UNFIT
    severities = [SEVEREST_FIRST.index(each.severity) for each in readiness.findings]
    assert severities == sorted(severities)
    assert [each.code for each in readiness.of("copy")] == ["equals_base"]


def test_a_note_does_not_change_the_verdict():
    readiness = assess(analysis(ROOT, {"m": ONE}, own={"m": {"origin": Origin.LORA}}))
    assert [each.code for each in readiness.findings] == ["lora"]
    assert readiness.verdict is Verdict.NO_DEFECT


def test_the_order_of_models_does_not_matter():
    models = {"a": ONE, "copy": ROOT, "small": tune(ROOT, 0.005, 3), "other": make_base(seed=9)}
    there = assess(analysis(ROOT, models))
    back = assess(analysis(ROOT, dict(reversed(models.items()))))
    assert there.by_model == back.by_model
    assert {each.code for each in there.findings} == {each.code for each in back.findings}


def test_json_has_no_infinities():
    zeros = {name: np.zeros_like(value) for name, value in ROOT.items()}
    readiness = assess(analysis(zeros, {"m": ROOT}))
    json.loads(readiness.to_json(), parse_constant=pytest.fail)
    endless = Notice("lora", Severity.NOTE, (), "seen", "do", {"ratio": math.inf})
    document = json.loads(dataclasses.replace(readiness, findings=(endless,)).to_json())
    assert document["findings"][0]["figures"] == {"ratio": "inf"}


# ---------------------------------------------------------------- for a method

SMALL_AND_LARGE = {"a": ONE, "b": tune(ROOT, 0.005, seed=2)}


@pytest.mark.parametrize(
    ("method", "verdict"),
    [
        ("", Verdict.WITH_CHANGES),
        ("dare+ties", Verdict.WITH_CHANGES),
        ("dare_ties", Verdict.WITH_CHANGES),
        ("emr", Verdict.WITH_CHANGES),
        ("dare+sum", Verdict.NO_DEFECT),
        ("slerp", Verdict.NO_DEFECT),
    ],
)
def test_what_matters_in_a_vote_only(method, verdict):
    readiness = assess(analysis(ROOT, SMALL_AND_LARGE), method=method)
    assert (readiness.verdict, readiness.method) == (verdict, method)
    assert readiness.by_model == {"a": Verdict.NO_DEFECT, "b": verdict}
    (only,) = readiness.findings
    assert only.code == "outweighed"
    assert (only.severity is Severity.NOTE) == (verdict is Verdict.NO_DEFECT)


@pytest.mark.parametrize(
    ("method", "severity"),
    [
        ("dare+ties", "warning"),
        ("emr", "warning"),
        ("sum", "note"),
        ("dare+linear", "note"),
    ],
)
def test_findings_are_in_order_again_for_a_method(method, severity):
    models = {**SMALL_AND_LARGE, "c": TWO, "far": tune(ROOT, 0.3, 5)}
    left = {"left_out": (LeftOut("w", Misfit.NOT_IN_BASE, ("a",)),)}
    found = assess(analysis(ROOT, models, **left), method=method).findings
    assert [each.severity for each in found if each.code == "oversized"] == [severity]
    severities = [SEVEREST_FIRST.index(each.severity) for each in found]
    assert severities == sorted(severities)


def test_the_verdict_is_for_the_method_that_is_advised():
    readiness, advice = judge(analysis(ROOT, SMALL_AND_LARGE))
    assert readiness.method == advice.recipe["method"]
    assert readiness.verdict is Verdict.NO_DEFECT
    assert judge(analysis(ROOT, SMALL_AND_LARGE), method="ties")[0].method == "ties"
    nothing, none = judge(analysis(ROOT, {"m": make_base(seed=9)}))
    assert (nothing.method, nothing.verdict, none.recipe) == ("", Verdict.UNFIT, {})


def test_stages_declare_what_matters_for_them():
    declared = {
        name: {stage.name for stage in STAGES.values() if getattr(stage, name)}
        for name in {catalogue()[code].only_for for code in RULES} - {""}
    }
    assert declared == {
        "drops_at_random": {"dare", "darex", "della"},
        "votes": {"ties", "emr", "knots", "sce", "dc_merge"},
        "adds_up": {"sum"},
    }


OPPOSITE = mixed(ROOT, ONE, -1.0, ONE, 0.0)


def test_a_stranger_is_left_out_and_the_others_are_merged():
    readiness, advice = judge(analysis(ROOT, {"a": ONE, "b": TWO, "other": make_base(seed=9)}))
    assert advice.left_out == ("other",)
    assert readiness.by_model["other"] is readiness.verdict is Verdict.WITH_CHANGES
    assert readiness.by_model["a"] is Verdict.NO_DEFECT


@pytest.mark.parametrize("method", ["linear", "dare+linear"])
def test_a_fine_tune_far_from_its_base_has_no_defect(method):
    models = {"a": tune(ROOT, 0.02, 1), "far": tune(ROOT, 0.8, 2)}
    readiness, advice = judge(analysis(ROOT, models), method=method)
    assert (readiness.verdict, advice.left_out) == (Verdict.NO_DEFECT, ())


# ---------------------------------------------------------------- one model and the base


@pytest.mark.parametrize(
    ("ratio", "rules"),
    [
        (0.04, set()),
        (0.06, {"large_change"}),
        (0.16, {"large_change"}),
        (0.69, {"large_change"}),
        (3.0, {"large_change"}),
    ],
)
@pytest.mark.parametrize("size", [0.002, 1.0])
def test_how_far_a_model_is(ratio, rules, size):
    base = make_base(size=size)
    seen = assess(analysis(base, {"m": tune(base, ratio)}), method="dare+ties")
    assert {each.code for each in seen.findings} == rules
    assert seen.verdict is Verdict.NO_DEFECT


def test_an_older_file_without_the_product_goes_by_the_ratio():
    base = make_base(size=0.002)
    seen = analysis(base, {"m": tune(base, 1.4)})
    older = re.sub(r', "base_product": [^,}]+', "", seen.to_json())
    assert found(Analysis.from_json(older)) == {"unrelated"}


def test_a_model_trained_apart_is_unrelated():
    assert of({"m": make_base(seed=9)}) == {"unrelated"}
    seen = finding(analysis(ROOT, {"m": make_base(seed=9)}), "unrelated")
    assert seen.severity is Severity.SEVERE
    assert seen.figures["ratio"] == pytest.approx(2**0.5, rel=0.02)
    assert seen.figures["limit.unrelated_ratio"] == LIMIT.unrelated_ratio
    alien = {"other.weight": np.ones((3, 3), np.float32)}
    assert "nothing_compared" in of({"m": alien, "n": ONE})


@given(st.floats(0.3, 3.0), st.integers(0, 10**6))
@settings(max_examples=8, deadline=None)
def test_nothing_unrelated_passes_for_a_fine_tune(size, seed):
    other = make_base(seed=seed + 1, size=0.02 * size)
    assert "unrelated" in of({"m": other})


def test_frozen_embeddings_do_not_hide_a_foreign_model():
    base = make_base()
    big = np.random.default_rng(0).normal(0, 1, (64, 128)).astype(np.float32)
    base["model.embed_tokens.weight"] = big
    other = make_base(seed=9)
    other["model.embed_tokens.weight"] = big
    seen = analysis(base, {"m": other})
    assert seen.models[0].total.relative_norm < 0.1
    assert "unrelated" in found(seen)


def test_a_copy_with_one_change_is_none():
    assert of({"m": ROOT}) == {"equals_base"}
    nearly = {name: value.copy() for name, value in ROOT.items()}
    nearly["layers.0.mlp.up_proj.weight"][3, 4] += 0.001
    assert "equals_base" not in of({"m": nearly})


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_elements_that_are_not_finite(value):
    broken = {name: array.copy() for name, array in ONE.items()}
    broken["layers.0.mlp.up_proj.weight"][0, 0] = value
    seen = analysis(ROOT, {"bad": broken, "good": TWO})
    only = finding(seen, "not_finite")
    assert only.subjects == ("bad",)
    assert "layers.0.mlp.up_proj.weight" in only.text
    assert assess(seen).by_model["good"] is Verdict.NO_DEFECT


def test_missing_tensors():
    less = {name: value for name, value in ONE.items() if "norm" not in name}
    assert of({"m": less}) == {"missing_tensors"}
    seen = finding(analysis(ROOT, {"m": less}), "missing_tensors")
    assert "layers.0.norm.weight" in seen.text
    assert 'on_missing = "base"' in seen.remedy
    assert of({"m": less}, own={"m": {"is_adapter": True}}) == set()


# ---------------------------------------------------------------- rounding


def rounded(model, kind):
    return {name: value.astype(kind).astype(np.float32) for name, value in model.items()}


KINDS = {"BF16": ml_dtypes.bfloat16, "F16": np.float16, "F8_E4M3": ml_dtypes.float8_e4m3fn}


def as_stored(model, name, **more):
    size = sum(value.size for value in model.values())
    return {"own": {"m": {"dtypes": {name: size}}}, **more}


@pytest.mark.parametrize("name", KINDS)
def test_rounding_has_the_size_that_is_expected(name):
    base = make_base(size=1.0)
    seen = analysis(base, {"m": rounded(base, KINDS[name])}, **as_stored(base, name))
    measured = seen.models[0].total.relative_norm
    assert rounding_norm(seen, seen.models[0]) == pytest.approx(measured, rel=0.15)
    assert "rounding" in found(seen)


def test_a_rounded_fine_tune_is_more_than_rounding():
    tuned = rounded(tune(ROOT, 0.02), ml_dtypes.bfloat16)
    assert of({"m": tuned}, **as_stored(tuned, "BF16")) == {"coarser_type"}


@pytest.mark.parametrize(
    ("base_type", "model_type"), [("F32", "F32"), ("BF16", "BF16"), ("BF16", "F32")]
)
def test_no_rounding_where_the_model_is_as_fine(base_type, model_type):
    tiny = tune(ROOT, 0.001)
    size = sum(value.size for value in tiny.values())
    assert of({"m": tiny}, **as_stored(tiny, model_type), base_dtypes={base_type: size}) == set()


def test_a_base_that_was_rounded_before_loses_nothing():
    base = rounded(ROOT, ml_dtypes.bfloat16)
    tuned = {name: value.copy() for name, value in base.items()}
    tuned["layers.0.attn.q_proj.weight"][:8] *= 1.0625
    seen = analysis(base, {"m": tuned}, **as_stored(tuned, "BF16"))
    assert found(seen).isdisjoint({"rounding", "coarser_type"})


def test_a_delta_computed_from_an_adapter_is_not_rounded():
    tiny = tune(ROOT, 0.001)
    own = {"m": {"dtypes": {"BF16": 1}, "is_adapter": True}}
    assert of({"m": tiny}, own=own) == set()


# ---------------------------------------------------------------- shapes


def test_an_outlier_is_named_and_changes_nothing_but_how_much_may_be_dropped():
    tuned = {name: value.copy() for name, value in ONE.items()}
    tuned["layers.0.mlp.up_proj.weight"][3, 4] += 5.0
    seen = analysis(ROOT, {"m": tuned})
    only = finding(seen, "outliers")
    assert found(seen) == {"outliers", "large_change"}
    assert only.figures["outliers"] == 1
    assert only.figures["share"] == pytest.approx(1, abs=0.01)
    expected = body_of(analysis(ROOT, {"m": ONE}).models[0]).ratio
    assert body_of(seen.models[0]).ratio == pytest.approx(expected, rel=0.05)


def test_large_changes_have_the_numbers_of_the_predictions():
    for ratio in (0.06, 0.2):
        seen = analysis(ROOT, {"m": tune(ROOT, ratio)})
        only = finding(seen, "large_change")
        rate, exposures = only.figures["tolerated_drop_rate"], exposures_of(seen.models[0])
        error = mean_bounded_error(exposures, LIMIT.easy_rate)
        assert only.figures["error"] == error > LIMIT.output_error
        assert mean_bounded_error(exposures, rate) <= LIMIT.output_error


def test_large_changes_of_several_models_are_one_finding():
    models = {"a": tune(ROOT, 0.06, 1), "b": tune(ROOT, 0.3, 2), "c": tune(ROOT, 0.08, 3), "d": TWO}
    only = finding(analysis(ROOT, models), "large_change")
    assert only.subjects == ("a", "b", "c")


# ---------------------------------------------------------------- groups of models


def test_copies_are_one_finding_even_if_one_of_them_is_broken():
    broken = {name: array.copy() for name, array in ONE.items()}
    broken["layers.0.mlp.up_proj.weight"][0, 0] = np.nan
    models = {"a": ONE, "x": TWO, "nan": broken, "again": ONE, "y": TWO}
    found = assess(analysis(ROOT, models)).findings
    groups = [each.subjects for each in found if each.code == "same_model"]
    assert groups == [("a", "nan", "again"), ("x", "y")]


def test_multiples_are_one_finding():
    models = {"a": ONE, "half": mixed(ROOT, ONE, 0.5, TWO, 0.0), "again": ONE}
    models |= {"twice": mixed(ROOT, ONE, 2.0, TWO, 0.0), "against": OPPOSITE}
    seen = finding(analysis(ROOT, models), "multiple")
    assert seen.subjects == tuple(models)
    assert seen.figures["ratio.twice"] == pytest.approx(2, rel=1e-4)
    assert [seen.figures[name] for name in ("cosine", "largest_cosine")] == pytest.approx([-1, 1])


def test_alike_models_are_one_finding():
    models = {"a": ONE, "b": mixed(ROOT, ONE, 0.6, THREE, 0.8)}
    models |= {"c": mixed(ROOT, ONE, 0.6, THREE, -0.8), "d": TWO}
    only = finding(analysis(ROOT, models), "alike")
    assert only.subjects == ("a", "b", "c")
    assert "a and b, a and c" in only.text


def test_ten_models_against_one_are_one_finding():
    models = {f"m{n}": mixed(ROOT, ONE, -0.6, tune(ROOT, seed=n), 0.8) for n in range(3, 12)}
    assert len(finding(analysis(ROOT, {"one": ONE, **models}), "opposed").subjects) == 10


@pytest.mark.parametrize(
    ("own_share", "rules"),
    [(0.0, set()), (0.3, set()), (0.8, {"alike"}), (-0.3, set()), (-0.8, {"opposed"})],
)
def test_how_alike_two_models_are(own_share, rules):
    # Beside ONE: a model that has this share of its change, and the rest of another's.
    other = mixed(ROOT, ONE, own_share, TWO, (1 - own_share**2) ** 0.5)
    assert of({"a": ONE, "b": other}) == rules


def test_models_that_share_most_of_their_change_are_alike_and_not_the_same():
    ancestor = tune(ROOT, 0.3, seed=5)
    models = {"a": tune(ancestor, 0.02, seed=1), "b": tune(ancestor, 0.02, seed=2)}
    assert found(analysis(ancestor, models)) == set()
    assert found(analysis(ROOT, models)) == {"alike", "large_change"}
    assert found(analysis(ROOT, {"a": ancestor, "b": ancestor})) == {"same_model", "large_change"}


@pytest.mark.parametrize(
    ("change", "kind"), [(0.01, "F16"), (0.1, "F16"), (0.1, "BF16"), (1.0, "BF16")]
)
def test_copies_and_multiples_are_found_after_rounding(change, kind):
    tuned = tune(ROOT, change, seed=5)
    half = mixed(ROOT, tuned, 0.5, ROOT, 0.0)
    stored = {"a": tuned, "b": rounded(tuned, KINDS[kind]), "half": rounded(half, KINDS[kind])}
    assert finding(analysis(ROOT, stored), "same_model").subjects == ("a", "b")
    assert finding(analysis(ROOT, stored), "multiple").subjects == ("a", "b", "half")


# ---------------------------------------------------------------- sets that were once warned of


def judged(models) -> dict[str, str]:
    """Return what is found in models that are merged by a method that drops and votes."""
    readiness, advice = judge(analysis(ROOT, models), method="dare+ties")
    assert (readiness.verdict, advice.left_out) == (Verdict.NO_DEFECT, ())
    assert "base_in_doubt" not in {doubt.code for doubt in advice.doubts}
    return {each.code: each.severity for each in readiness.findings}


def symmetric(block):
    step = np.abs(block).max(axis=1, keepdims=True) / 7
    return np.round(block / step) * step


def asymmetric(block):
    least = block.min(axis=1, keepdims=True)
    step = (block.max(axis=1, keepdims=True) - least) / 15
    return np.round((block - least) / step) * step + least


def in_4_bits(scheme, length):
    """The base, rounded in blocks to 16 values each."""
    return {
        name: scheme(value.reshape(-1, length)).reshape(value.shape).astype(np.float32)
        for name, value in ROOT.items()
    }


@pytest.mark.parametrize("length", [32, 128])
@pytest.mark.parametrize("scheme", [symmetric, asymmetric])
def test_fine_tunes_of_the_base_in_4_bits_are_alike(scheme, length):
    copy = in_4_bits(scheme, length)
    models = {"a": tune(copy, 0.01, 1), "b": tune(copy, 0.01, 2), "c": tune(copy, 0.01, 3)}
    assert judged(models) == {"alike": "note", "large_change": "note"}


def test_fine_tunes_of_the_base_in_different_4_bits_are_not_related():
    copies = (in_4_bits(symmetric, 128), in_4_bits(asymmetric, 128), in_4_bits(symmetric, 16))
    models = {f"m{n}": tune(copy, 0.001, n) for n, copy in enumerate(copies)}
    assert judged(models) == {"large_change": "note"}


def test_three_languages_are_alike():
    text = tune(ROOT, 0.3, seed=9)  # what text in any language teaches
    models = {name: tune(text, 0.15, seed) for seed, name in enumerate(("de", "fr", "it"))}
    assert judged(models) == {"alike": "note", "large_change": "note"}


@pytest.mark.parametrize("cosine", [0.52, 0.7, 0.95])
def test_seeds_of_one_task_are_alike(cosine):
    task, own = tune(ROOT, 0.3, seed=9), (1 - cosine) ** 0.5
    models = {f"s{n}": mixed(ROOT, task, cosine**0.5, tune(ROOT, 0.3, n), own) for n in (1, 2, 3)}
    assert judged(models) == {"alike": "note", "large_change": "note"}


def test_models_whose_signs_agree_by_chance_are_not_opposed():
    """A tenth of each change goes against the other model's, in few large elements."""
    draw, models = np.random.default_rng(0), {"a": {}, "b": {}}
    for name, value in ROOT.items():
        large = np.where(draw.random(value.shape) < 0.02, draw.normal(0, 0.004, value.shape), 0)
        for sign, model in zip((1, -1), models.values(), strict=True):
            own = draw.normal(0, 0.0008, value.shape)
            model[name] = (value + sign * large + own).astype(np.float32)
    (pair,) = analysis(ROOT, models).pairs
    assert -0.5 < pair.total.cosine < -0.1
    assert pair.total.conflict == pytest.approx(0.5, abs=0.02)
    assert judged(models) == {}


def test_independent_steps_of_one_size_do_not_cancel_each_other():
    """Each element moves by one step, as after few steps of Adam."""
    models = {}
    for seed in range(4):
        draw = np.random.default_rng(seed)
        steps = {name: draw.choice([-0.0002, 0.0002], value.shape) for name, value in ROOT.items()}
        models[f"m{seed}"] = {n: (v + steps[n]).astype(np.float32) for n, v in ROOT.items()}
    seen = analysis(ROOT, models)
    assert seen.together.cancelled > chance_cancelled(seen) + 0.1
    assert judged(models) == {}


def test_a_vote_that_dropping_helps_is_not_warned_of():
    """Each of 16 models knows its own inputs, and all of them change all weights a bit."""
    name, own, draw = "layers.0.mlp.up_proj.weight", 16, np.random.default_rng(0)
    base = {name: (0.02 * draw.standard_normal((128, 16 * own))).astype(np.float32)}
    owner = np.arange(16 * own) // own
    changes = [
        0.002 * draw.standard_normal((128, 16 * own)) * np.where(owner == model, 40, 1)
        for model in range(16)
    ]
    wanted = sum(change * (owner == model) for model, change in enumerate(changes))
    models = [{name: (base[name] + change).astype(np.float32)} for change in changes]

    def error(rate):
        stages = {"dare": {"drop_rate": rate}}
        merged, report = dare.merge_arrays(
            base, models, method="dare+ties", stages=stages, verbose=False
        )
        assert {each.severity for each in report.warnings} <= {"warning"}
        return np.linalg.norm(merged[name] - base[name] - wanted) / np.linalg.norm(wanted)

    assert error(0.5) < error(0.0) - 0.04
    seen = dare.analyze_arrays(base, models, spectra="none")
    assert min(model.total.relative_norm for model in seen.models) > 0.7
    readiness = assess(seen, method="dare+ties")
    assert readiness.verdict is Verdict.NO_DEFECT
    assert [(each.code, each.severity) for each in readiness.findings] == [("large_change", "note")]


def test_models_without_matrices_are_averaged():
    base = {f"layers.{n}.norm.weight": np.ones(512, np.float32) for n in range(4)}
    models = {f"m{seed}": tune(base, 0.01, seed) for seed in (1, 2)}
    readiness, advice = judge(analysis(base, models))
    assert (readiness.findings, advice.recipe["method"]) == ((), "linear")


def test_a_base_that_is_a_fine_tune_of_a_model():
    models = {"root": ROOT, "b": TWO, "c": tune(ROOT, 0.03, seed=3)}
    seen = finding(analysis(ONE, models), "contained")
    assert (seen.subjects, seen.severity) == (("root",), Severity.WARNING)
    assert seen.figures["share.b"] == pytest.approx(1, abs=0.02)
    two = {"b": TWO, "root": ROOT}
    assert finding(analysis(ONE, two), "contained").subjects == ("root",)


def test_the_demonstration_with_a_fine_tune_as_its_base():
    """It was called ready once."""
    seen = analyze(TUNED["add"], [DEMO_BASE, TUNED["sort"]], spectra="none", verbose=False)
    readiness, advice = judge(seen)
    assert readiness.verdict is Verdict.WITH_CHANGES
    assert [each.subjects for each in readiness.findings if each.code == "contained"] == [("base",)]
    assert "base_in_doubt" in {doubt.code for doubt in advice.doubts}
    right = analyze(DEMO_BASE, list(TUNED.values()), spectra="none", verbose=False)
    assert found(right) == {"outweighed"}


def test_one_model_outweighs_another():
    assert of({"a": ONE, "b": tune(ROOT, 0.0062, seed=2)}) == {"outweighed"}
    assert of({"a": ONE, "b": tune(ROOT, 0.007, seed=2)}) == set()
    seen = finding(analysis(ROOT, {"a": ONE, "b": tune(ROOT, 0.005, seed=2)}), "outweighed")
    assert seen.subjects == ("b",)
    assert seen.figures["ratio.b"] == pytest.approx(4, rel=0.01)


def test_of_many_models_the_outlier_is_named():
    many = {f"m{seed}": tune(ROOT, 0.01, seed) for seed in range(1, 12)}
    seen = analysis(ROOT, many | {"large": tune(ROOT, 0.2, 12)})
    assert finding(seen, "oversized").subjects == ("large",)
    assert finding(seen, "oversized").figures["ratio.large"] == pytest.approx(20, rel=0.02)
    assert "outweighed" not in found(seen)
    seen = analysis(ROOT, many | {"small": tune(ROOT, 0.0005, 12)})
    assert finding(seen, "outweighed").subjects == ("small",)


# ---------------------------------------------------------------- all of them


def test_the_chance_to_cancel():
    models = {"a": ONE, "b": TWO, "c": tune(ROOT, 0.004, seed=3)}
    seen = analysis(ROOT, models)
    assert chance_cancelled(seen) == pytest.approx(seen.together.cancelled, abs=0.01)
    assert chance_cancelled(analysis(ROOT, {"a": ONE})) == 0
    assert chance_cancelled(analysis(ROOT, {"copy": ROOT})) == 0
    six = analysis(ROOT, {str(seed): tune(ROOT, seed=seed) for seed in range(1, 7)})
    assert six.together.cancelled == pytest.approx(1 - 6**-0.5, abs=0.01)
    assert found(six) == set()


@pytest.mark.parametrize(
    ("given", "rule", "models"),
    [
        (("model.embed_tokens.weight", Misfit.UNLIKE_BASE, ("b",)), "vocabulary", ("b",)),
        (("lm_head.weight", Misfit.UNLIKE_BASE, ("b",)), "vocabulary", ("b",)),
        (("layers.0.w", Misfit.UNLIKE_BASE, ("a",)), "mismatched", ("a",)),
        (("layers.9.w", Misfit.NOT_IN_BASE, ("a", "b")), "extra_tensors", ("a", "b")),
        (("lm_head.weight", Misfit.NOT_IN_BASE, ("b",)), "extra_tensors", ("b",)),
        (("position_ids", Misfit.NOT_WEIGHTS, ("a", "b")), None, ()),
        (("steps", Misfit.NOT_WEIGHTS, ("b",), COUNTER, COUNTER), "integers_differ", ("b",)),
    ],
)
def test_what_was_left_out(given, rule, models):
    seen = analysis(ROOT, {"a": ONE, "b": TWO}, left_out=(LeftOut(*given),))
    assert found(seen) == ({rule} if rule else set())
    if rule:
        assert finding(seen, rule).subjects == models


def test_rows_that_were_matched_by_token_are_of_another_vocabulary():
    differences = {"b": "b: 2 of its tokens are not in the base: '<x>' 8"}
    matched = finding(analysis(ROOT, {"a": ONE, "b": TWO}, vocabularies=differences), "vocabulary")
    assert matched.subjects == ("b",)
    assert matched.figures == {"tensors": 0, "models": 1}
    assert differences["b"] in matched.text


def test_tied_weights_matter_where_they_change():
    tied = ("model.embed_tokens.weight",)
    assert of({"a": ONE}, tied=tied) == {"tied"}
    frozen = ONE | {tied[0]: ROOT[tied[0]]}
    assert of({"a": frozen}, tied=tied) == set()


def test_what_inputs_were_warned_of_is_a_finding():
    warned = notice("other_configuration", "b", differences="rope_theta is 5e5, the base's 1e4")
    notes = (warned, notice("renamed", "a", done=""))
    seen = dataclasses.replace(analysis(ROOT, {"a": ONE, "b": TWO}), notes=notes)
    assert assess(seen).findings == (warned,)


def test_every_rule_was_seen_in_these_tests():
    text = Path(__file__).read_text(encoding="utf-8")
    assert [code for code in RULES if f'"{code}"' not in text] == []
