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
from made_up import MATRIX, analysis, make_base, mixed, spoilt, tune

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
ONE, TWO, THREE = (tune(ROOT, seed=seed) for seed in (1, 2, 3))
STRANGER = make_base(seed=9)
KINDS = {"BF16": ml_dtypes.bfloat16, "F16": np.float16, "F8_E4M3": ml_dtypes.float8_e4m3fn}
EMBEDDING = "model.embed_tokens.weight"
SIZE = sum(value.size for value in ROOT.values())


def found(seen: Analysis) -> set[str]:
    return {finding.code for finding in assess(seen).findings}


def finding(rule: str, models, base=ROOT, **changes) -> Notice:
    (only,) = [f for f in assess(analysis(base, models, **changes)).findings if f.code == rule]
    return only


def without(model, word):
    return {name: value for name, value in model.items() if word not in name}


def changed(model, place, change):
    copy = {name: value.copy() for name, value in model.items()}
    copy[MATRIX][place] += change
    return copy


def rounded(model, kind):
    return {name: value.astype(kind).astype(np.float32) for name, value in model.items()}


def stored(name, **more):
    """Changes of an analysis whose model `m` is stored in this type."""
    return {"own": {"m": {"dtypes": {name: SIZE}, **more}}}


# ---------------------------------------------------------------- what is found

ROUNDED = rounded(ROOT, ml_dtypes.bfloat16)
BF16 = stored("BF16")
COUNTER = StoredForm((), "I64")
SIX = {str(seed): tune(ROOT, seed=seed) for seed in range(1, 7)}


def beside_one(share):
    """ONE, and a model that has this share of its change, and the rest of another's."""
    return {"a": ONE, "b": mixed(ROOT, ONE, share, TWO, (1 - share**2) ** 0.5)}


PAIR = {"a": ONE, "b": TWO}


def case(codes, models=PAIR, base=ROOT, **changes):
    return codes, lambda: analysis(base, models, **changes)


def unfit(codes, *given):
    return case(codes, left_out=(LeftOut(*given),))


def two_sizes(ratio):
    return {"a": ONE, "b": tune(ROOT, ratio, seed=2)}


TINY = {"m": tune(ROOT, 0.001)}
COARSE = {"base_dtypes": {"BF16": SIZE}}
TIED = {"tied": (EMBEDDING,)}
LARGE_EMBEDDING = {EMBEDDING: np.random.default_rng(0).normal(0, 1, (64, 128)).astype(np.float32)}
FROZEN = {"m": STRANGER | LARGE_EMBEDDING}
UNNORMED = {"m": without(ONE, "norm")}
NUDGED = changed(ROUNDED, np.s_[:8], 0.0625 * ROUNDED[MATRIX][:8])
FOUND = {
    "usual fine-tunes": case(set()),
    "six of them": case(set(), SIX),
    "a LoRA": case({"lora"}, {"m": ONE}, own={"m": {"origin": Origin.LORA}}),
    "a model trained apart": case({"unrelated"}, {"m": STRANGER}),
    "the same with frozen embeddings": case({"unrelated"}, FROZEN, ROOT | LARGE_EMBEDDING),
    "the base": case({"equals_base"}, {"m": ROOT}),
    "the base but for an element": case(set(), {"m": changed(ROOT, (3, 4), 0.001)}),
    "missing tensors": case({"missing_tensors"}, UNNORMED),
    "an adapter without them": case(set(), UNNORMED, own={"m": {"is_adapter": True}}),
    "in a coarser type": case({"coarser_type"}, {"m": rounded(ONE, KINDS["BF16"])}, **BF16),
    "as fine as the base": case(set(), TINY, **stored("F32")),
    "as coarse as the base": case(set(), TINY, **BF16, **COARSE),
    "finer than the base": case(set(), TINY, **stored("F32"), **COARSE),
    "a base that was rounded before": case(set(), {"m": NUDGED}, ROUNDED, **BF16),
    "computed from an adapter": case(set(), TINY, **stored("BF16", is_adapter=True)),
    "tied weights that change": case({"tied"}, {"m": ONE}, **TIED),
    "tied weights that do not": case(set(), {"m": ONE | {EMBEDDING: ROOT[EMBEDDING]}}, **TIED),
    "cosine 0.3": case(set(), beside_one(0.3)),
    "cosine 0.8": case({"alike"}, beside_one(0.8)),
    "cosine -0.3": case(set(), beside_one(-0.3)),
    "cosine -0.8": case({"opposed"}, beside_one(-0.8)),
    "3.2 times as large": case({"outweighed"}, two_sizes(0.0062)),
    "2.9 times as large": case(set(), two_sizes(0.007)),
    "unlike embedding": unfit({"vocabulary"}, EMBEDDING, Misfit.UNLIKE_BASE, ("b",)),
    "unlike head": unfit({"vocabulary"}, "lm_head.weight", Misfit.UNLIKE_BASE, ("b",)),
    "unlike matrix": unfit({"mismatched"}, "w", Misfit.UNLIKE_BASE, ("b",)),
    "an extra tensor": unfit({"extra_tensors"}, "w", Misfit.NOT_IN_BASE, ("b",)),
    "an extra head": unfit({"extra_tensors"}, "lm_head.weight", Misfit.NOT_IN_BASE, ("b",)),
    "equal integers": unfit(set(), "ids", Misfit.NOT_WEIGHTS, ("b",)),
    "integers": unfit({"integers_differ"}, "ids", Misfit.NOT_WEIGHTS, ("b",), COUNTER, COUNTER),
}


@pytest.mark.parametrize("name", FOUND)
def test_what_is_found(name):
    codes, make = FOUND[name]
    seen = make()
    readiness = assess(seen)
    assert {each.code for each in readiness.findings} == codes
    is_grave = any(each.severity is not Severity.NOTE for each in readiness.findings)
    assert readiness.verdict is (Verdict.WITH_CHANGES if is_grave else Verdict.NO_DEFECT)
    if seen.left_out and codes:
        assert [each.subjects for each in readiness.findings] == [("b",)]


def test_a_model_with_nothing_in_common_cannot_be_merged():
    readiness = assess(analysis(ROOT, {"m": {"w": np.ones(3, np.float32)}, "n": ONE}))
    assert "nothing_compared" in {each.code for each in readiness.findings}
    assert readiness.verdict is readiness.by_model["m"] is Verdict.UNFIT


@pytest.mark.parametrize("ratio", [0.04, 0.06, 0.16, 0.69, 3.0])
@pytest.mark.parametrize("size", [0.002, 1.0])
def test_how_far_a_model_is(ratio, size):
    base = make_base(size=size)
    seen = assess(analysis(base, {"m": tune(base, ratio)}), method="dare+ties")
    assert {each.code for each in seen.findings} == ({"large_change"} if ratio > 0.05 else set())
    assert seen.verdict is Verdict.NO_DEFECT


@given(st.floats(0.3, 3.0), st.integers(0, 10**6))
@settings(max_examples=8, deadline=None)
def test_nothing_unrelated_passes_for_a_fine_tune(size, seed):
    assert "unrelated" in found(analysis(ROOT, {"m": make_base(seed + 1, 0.02 * size)}))


def test_an_older_file_without_the_product_goes_by_the_ratio():
    base = make_base(size=0.002)
    older = re.sub(
        r', "base_product": [^,}]+', "", analysis(base, {"m": tune(base, 1.4)}).to_json()
    )
    assert found(Analysis.from_json(older)) == {"unrelated"}


@pytest.mark.parametrize("name", KINDS)
def test_rounding_has_the_size_that_is_expected(name):
    base = make_base(size=1.0)
    seen = analysis(base, {"m": rounded(base, KINDS[name])}, **stored(name))
    measured = seen.models[0].total.relative_norm
    assert rounding_norm(seen, seen.models[0]) == pytest.approx(measured, rel=0.15)
    assert "rounding" in found(seen)


# ---------------------------------------------------------------- the verdict


def test_the_gravest_finding_decides():
    models = {"math": ONE, "copy": ROOT, "broken": spoilt(TWO), "far": tune(ROOT, 0.005, 3)}
    readiness = assess(analysis(ROOT, models))
    assert readiness.verdict is Verdict.UNFIT
    verdicts = [Verdict.NO_DEFECT, Verdict.WITH_CHANGES, Verdict.UNFIT, Verdict.WITH_CHANGES]
    assert readiness.by_model == dict(zip(models, verdicts, strict=True))
    severities = [SEVEREST_FIRST.index(each.severity) for each in readiness.findings]
    assert severities == sorted(severities)
    assert [each.code for each in readiness.of("copy")] == ["equals_base"]
    back = assess(analysis(ROOT, dict(reversed(models.items()))))  # their order does not matter
    assert back.by_model == readiness.by_model
    assert {each.code for each in back.findings} == {each.code for each in readiness.findings}


def test_json_has_no_infinities():
    zeros = {name: np.zeros_like(value) for name, value in ROOT.items()}
    readiness = assess(analysis(zeros, {"m": ROOT}))
    json.loads(readiness.to_json(), parse_constant=pytest.fail)
    endless = Notice("lora", Severity.NOTE, (), "seen", "do", {"ratio": math.inf})
    document = json.loads(dataclasses.replace(readiness, findings=(endless,)).to_json())
    assert document["findings"][0]["figures"] == {"ratio": "inf"}


SMALL_AND_LARGE = two_sizes(0.005)


@pytest.mark.parametrize(
    ("method", "is_defect"),
    [
        *(("", True), ("dare+ties", True), ("dare_ties", True), ("emr", True)),
        *(("dare+sum", False), ("slerp", False)),
    ],
)
def test_what_matters_in_a_vote_only(method, is_defect):
    readiness = assess(analysis(ROOT, SMALL_AND_LARGE), method=method)
    verdict = Verdict.WITH_CHANGES if is_defect else Verdict.NO_DEFECT
    assert (readiness.verdict, readiness.method) == (verdict, method)
    assert readiness.by_model == {"a": Verdict.NO_DEFECT, "b": verdict}
    (only,) = readiness.findings
    assert only.code == "outweighed"
    assert (only.severity is Severity.NOTE) is not is_defect


@pytest.mark.parametrize(("method", "severity"), [("dare+ties", "warning"), ("sum", "note")])
def test_findings_are_in_order_again_for_a_method(method, severity):
    models = {**SMALL_AND_LARGE, "c": TWO, "far": tune(ROOT, 0.3, 5)}
    left_out = (LeftOut("w", Misfit.NOT_IN_BASE, ("a",)),)
    found = assess(analysis(ROOT, models, left_out=left_out), method=method).findings
    assert [each.severity for each in found if each.code == "oversized"] == [severity]
    severities = [SEVEREST_FIRST.index(each.severity) for each in found]
    assert severities == sorted(severities)


def test_the_verdict_is_for_the_method_that_is_advised():
    readiness, advice = judge(analysis(ROOT, SMALL_AND_LARGE))
    assert readiness.method == advice.recipe["method"]
    assert readiness.verdict is Verdict.NO_DEFECT
    assert judge(analysis(ROOT, SMALL_AND_LARGE), method="ties")[0].method == "ties"
    nothing, none = judge(analysis(ROOT, {"m": STRANGER}))
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


# ---------------------------------------------------------------- what findings say


def test_a_stranger_is_told_with_the_limit():
    seen = finding("unrelated", {"m": STRANGER})
    assert seen.severity is Severity.SEVERE
    assert seen.figures["ratio"] == pytest.approx(2**0.5, rel=0.02)
    assert seen.figures["limit.unrelated_ratio"] == LIMIT.unrelated_ratio


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_elements_that_are_not_finite(value):
    only = finding("not_finite", {"bad": spoilt(ONE, value), "good": TWO})
    assert only.subjects == ("bad",)
    assert MATRIX in only.text


def test_missing_tensors_are_named_with_the_setting():
    seen = finding("missing_tensors", {"m": without(ONE, "norm")})
    assert "layers.0.norm.weight" in seen.text
    assert 'on_missing = "base"' in seen.remedy


def test_an_outlier_is_named_and_changes_nothing_but_how_much_may_be_dropped():
    seen = analysis(ROOT, {"m": changed(ONE, (3, 4), 5.0)})
    assert found(seen) == {"outliers", "large_change"}
    figures = finding("outliers", {"m": changed(ONE, (3, 4), 5.0)}).figures
    assert (figures["outliers"], figures["share"]) == (1, pytest.approx(1, abs=0.01))
    expected = body_of(analysis(ROOT, {"m": ONE}).models[0]).ratio
    assert body_of(seen.models[0]).ratio == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("ratio", [0.06, 0.2])
def test_large_changes_have_the_numbers_of_the_predictions(ratio):
    (model,) = analysis(ROOT, {"m": tune(ROOT, ratio)}).models
    figures, exposures = (
        finding("large_change", {"m": tune(ROOT, ratio)}).figures,
        exposures_of(model),
    )
    error = mean_bounded_error(exposures, LIMIT.easy_rate)
    assert figures["error"] == error > LIMIT.output_error
    assert mean_bounded_error(exposures, figures["tolerated_drop_rate"]) <= LIMIT.output_error


def test_rows_that_were_matched_by_token_are_of_another_vocabulary():
    differences = {"b": "b: 2 of its tokens are not in the base: '<x>' 8"}
    matched = finding("vocabulary", PAIR, vocabularies=differences)
    assert (matched.subjects, matched.figures) == (("b",), {"tensors": 0, "models": 1})
    assert differences["b"] in matched.text


def test_what_inputs_were_warned_of_is_a_finding():
    warned = notice("other_configuration", "b", differences="rope_theta is 5e5, the base's 1e4")
    notes = (warned, notice("renamed", "a", done=""))
    assert assess(analysis(ROOT, PAIR, notes=notes)).findings == (warned,)


# ---------------------------------------------------------------- groups of models

HALF, TWICE, AGAINST = (mixed(ROOT, ONE, share, ONE, 0.0) for share in (0.5, 2.0, -1.0))
MANY = {f"m{seed}": tune(ROOT, 0.01, seed) for seed in range(1, 12)}
LARGE_ONE = MANY | {"large": tune(ROOT, 0.2, 12)}
ALIKE_TO_ONE = {"b": mixed(ROOT, ONE, 0.6, THREE, 0.8), "c": mixed(ROOT, ONE, 0.6, THREE, -0.8)}
AGAINST_ONE = {f"m{n}": mixed(ROOT, ONE, -0.6, tune(ROOT, seed=n), 0.8) for n in range(3, 12)}
MULTIPLES = {"a": ONE, "half": HALF, "again": ONE, "twice": TWICE, "against": AGAINST}
COPIES = {"a": ONE, "x": TWO, "nan": spoilt(ONE), "again": ONE, "y": TWO}
CHANGES = {f"m{n}": tune(ROOT, ratio, n) for n, ratio in enumerate((0.06, 0.3, 0.08, 0.02))}
GROUPS = [
    ("same_model", COPIES, [("a", "nan", "again"), ("x", "y")]),
    ("multiple", MULTIPLES, [tuple(MULTIPLES)]),
    ("alike", {"a": ONE, **ALIKE_TO_ONE, "d": TWO}, [("a", "b", "c")]),
    ("opposed", {"one": ONE, **AGAINST_ONE}, [("one", *AGAINST_ONE)]),
    ("large_change", CHANGES, [("m0", "m1", "m2")]),
    ("oversized", LARGE_ONE, [("large",)]),
    ("outweighed", LARGE_ONE, []),
    ("outweighed", MANY | {"small": tune(ROOT, 0.0005, 12)}, [("small",)]),
]


@pytest.mark.parametrize(("code", "models", "groups"), GROUPS)
def test_a_group_of_models_is_one_finding(code, models, groups):
    seen = assess(analysis(ROOT, models)).findings
    assert [each.subjects for each in seen if each.code == code] == groups


def test_groups_have_their_ratios_and_cosines():
    multiple = finding("multiple", MULTIPLES)
    figures = multiple.figures
    assert "opposite directions" in multiple.text
    assert figures["ratio.twice"] == pytest.approx(2, rel=1e-4)
    assert [figures[name] for name in ("cosine", "largest_cosine")] == pytest.approx([-1, 1])
    assert "a and b, a and c" in finding("alike", {"a": ONE, **ALIKE_TO_ONE}).text
    ratio = finding("outweighed", SMALL_AND_LARGE).figures["ratio.b"]
    assert ratio == pytest.approx(4, rel=0.01)
    ratio = finding("oversized", LARGE_ONE).figures["ratio.large"]
    assert ratio == pytest.approx(20, rel=0.02)


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
    models = {"a": tuned, "b": rounded(tuned, KINDS[kind]), "half": rounded(half, KINDS[kind])}
    assert finding("same_model", models).subjects == ("a", "b")
    assert finding("multiple", models).subjects == ("a", "b", "half")


def test_a_base_that_is_a_fine_tune_of_a_model():
    models = {"root": ROOT, "b": TWO, "c": tune(ROOT, 0.03, seed=3)}
    seen = finding("contained", models, ONE)
    assert (seen.subjects, seen.severity) == (("root",), Severity.WARNING)
    assert seen.figures["share.b"] == pytest.approx(1, abs=0.02)
    assert finding("contained", {"b": TWO, "root": ROOT}, ONE).subjects == ("root",)


def test_the_demonstration_with_a_fine_tune_as_its_base():
    """It was called ready once."""
    seen = analyze(TUNED["add"], [DEMO_BASE, TUNED["sort"]], spectra="none", verbose=False)
    readiness, advice = judge(seen)
    assert readiness.verdict is Verdict.WITH_CHANGES
    assert [each.subjects for each in readiness.findings if each.code == "contained"] == [("base",)]
    assert "base_in_doubt" in {doubt.code for doubt in advice.doubts}


def test_the_chance_to_cancel():
    seen = analysis(ROOT, PAIR | {"c": tune(ROOT, 0.004, seed=3)})
    assert chance_cancelled(seen) == pytest.approx(seen.together.cancelled, abs=0.01)
    assert chance_cancelled(analysis(ROOT, {"a": ONE})) == 0
    assert chance_cancelled(analysis(ROOT, {"copy": ROOT})) == 0
    assert analysis(ROOT, SIX).together.cancelled == pytest.approx(1 - 6**-0.5, abs=0.01)


# ---------------------------------------------------------------- sets that were once warned of


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


def tuned_apart(bases, ratio):
    return {f"m{seed}": tune(base, ratio, seed) for seed, base in enumerate(bases)}


def seeds_of_one_task(cosine):
    task, own = tune(ROOT, 0.3, seed=9), (1 - cosine) ** 0.5
    return {f"s{n}": mixed(ROOT, task, cosine**0.5, tune(ROOT, 0.3, n), own) for n in (1, 2, 3)}


def opposed_in_few_elements():
    """A tenth of each change goes against the other model's, in few large elements."""
    draw, models = np.random.default_rng(0), {"a": {}, "b": {}}
    for name, value in ROOT.items():
        large = np.where(draw.random(value.shape) < 0.02, draw.normal(0, 0.004, value.shape), 0)
        for sign, model in zip((1, -1), models.values(), strict=True):
            own = draw.normal(0, 0.0008, value.shape)
            model[name] = (value + sign * large + own).astype(np.float32)
    return models


def steps_of_one_size():
    """Each element moves by one step, as after few steps of Adam: more cancels than by chance."""
    models = {}
    for seed in range(4):
        draw = np.random.default_rng(seed)
        steps = {name: draw.choice([-0.0002, 0.0002], value.shape) for name, value in ROOT.items()}
        models[f"m{seed}"] = {n: (v + steps[n]).astype(np.float32) for n, v in ROOT.items()}
    return models


ALIKE, LARGE = {"alike": "note", "large_change": "note"}, {"large_change": "note"}
IN_4_BITS = [in_4_bits(*given) for given in ((symmetric, 128), (asymmetric, 128), (symmetric, 16))]
NO_DEFECT = {
    "far from its base": ({"a": ONE, "far": tune(ROOT, 0.8, 2)}, LARGE | {"outweighed": "note"}),
    "of the base in 4 bits": (tuned_apart(IN_4_BITS[:1] * 3, 0.01), ALIKE),
    "of the base in asymmetric 4 bits": (tuned_apart(IN_4_BITS[1:2] * 3, 0.01), ALIKE),
    "of the base in short blocks": (tuned_apart([in_4_bits(asymmetric, 32)] * 3, 0.01), ALIKE),
    "of the base in different 4 bits": (tuned_apart(IN_4_BITS, 0.001), LARGE),
    "three languages": (tuned_apart([tune(ROOT, 0.3, seed=9)] * 3, 0.15), ALIKE),
    "seeds of one task at 0.52": (seeds_of_one_task(0.52), ALIKE),
    "seeds of one task at 0.95": (seeds_of_one_task(0.95), ALIKE),
    "opposed in few elements": (opposed_in_few_elements(), {}),
    "steps of one size": (steps_of_one_size(), {}),
}


@pytest.mark.parametrize("name", NO_DEFECT)
def test_models_that_have_no_defect(name):
    """Even for a method that drops and votes."""
    models, findings = NO_DEFECT[name]
    method = "dare+linear" if "outweighed" in findings else "dare+ties"
    readiness, advice = judge(analysis(ROOT, models), method=method)
    assert (readiness.verdict, advice.left_out) == (Verdict.NO_DEFECT, ())
    assert "base_in_doubt" not in {doubt.code for doubt in advice.doubts}
    assert {each.code: each.severity for each in readiness.findings} == findings


def test_the_figures_of_sets_that_were_once_warned_of():
    (pair,) = analysis(ROOT, opposed_in_few_elements()).pairs
    assert -0.5 < pair.total.cosine < -0.1
    assert pair.total.conflict == pytest.approx(0.5, abs=0.02)
    seen = analysis(ROOT, steps_of_one_size())
    assert seen.together.cancelled > chance_cancelled(seen) + 0.1


def test_a_stranger_is_told_although_its_norms_are_like_the_base():
    def network(seed):
        draw = np.random.default_rng(seed)
        norms = {"b1.weight": 1.0, "b1.bias": 0.0, "b1.running_mean": 0.0, "b1.running_var": 9.0}
        alike = {name: np.full(32, value, np.float32) for name, value in norms.items()}
        return {"c1.weight": draw.normal(0, 0.1, (32, 64)).astype(np.float32), **alike}

    seen = dare.analyze_arrays(network(1), {"stranger": network(2)})
    assert seen.models[0].total.relative_norm < 0.2
    readiness, advice = judge(seen)
    assert [each.code for each in readiness.findings] == ["unrelated"]
    assert advice.left_out == ("stranger",)


def test_every_rule_was_seen_in_these_tests():
    text = Path(__file__).read_text(encoding="utf-8")
    assert [code for code in RULES if f'"{code}"' not in text] == []
