"""A single element, or a thousandth of them, moves no judgement but that of dropping."""

import ml_dtypes
import numpy as np
import pytest

from dare import analyze_arrays, plan
from dare.analysis.advice import judge
from dare.analysis.results import Origin
from dare.checks.sample import sample_models
from helpers import write_recipe

NAMES = [f"model.layers.{number}.mlp.up_proj.weight" for number in range(2)]
PLANTED = {
    "one of 5": (1, 5.0),
    "one of 10,000": (1, 1e4),
    "a thousandth of 5": (0.001, 5.0),
    "a thousandth of 10,000": (0.001, 1e4),
    "a thousandth of ten deviations": (0.001, 0.01),
}


def full(generator, side):
    return generator.standard_normal((side, side), np.float32)


def low_rank(rank):
    def make(generator, side):
        left, right = (generator.standard_normal((side, rank), np.float32) for _ in range(2))
        return left @ right.T

    return make


def make(side, change, models=1, shared=0.0, names=NAMES):
    """A base, and models that change it by 4.6%, and by a common part."""
    generator = np.random.default_rng(0)
    base = {n: 0.02 * generator.standard_normal((side, side), np.float32) for n in names}
    common = {name: full(generator, side) for name in names}
    made = []
    for _ in range(models):
        deltas = {name: change(generator, side) for name in names}
        deltas = {
            name: delta / delta.std() + shared * common[name] for name, delta in deltas.items()
        }
        made.append({n: base[n] + 0.046 * 0.02 * d / d.std() for n, d in deltas.items()})
    return base, made


def plant(values, planted):
    """Outliers at random places, of either sign, in a copy."""
    share, size = PLANTED[planted]
    generator = np.random.default_rng(1)
    count = share if share == 1 else int(share * values.size)
    values = values.copy()
    places = generator.choice(values.size, count, replace=False)
    values.reshape(-1)[places] += size * generator.choice([-1, 1], count)
    return values


def rounded(arrays, dtype):
    return {name: values.astype(dtype) for name, values in arrays.items()}


def judged(analysis):
    """All that is decided, but how much may be dropped: an outlier may be dropped too."""
    readiness, advice = judge(analysis)
    return (
        readiness.verdict,
        {f.code for f in readiness.findings} - {"outliers", "large_change"},
        advice.recipe,
        [(model.origin, model.likely_rank) for model in analysis.models],
    )


def changes(analysis):
    return [model.total.relative_norm for model in analysis.models]


@pytest.mark.parametrize("planted", PLANTED)
@pytest.mark.parametrize(
    ("change", "dtype"),
    [
        (full, np.float32),
        (low_rank(2), np.float32),
        (low_rank(16), ml_dtypes.bfloat16),
    ],
    ids=["full", "rank-2", "rank-16-bf16"],
)
def test_outliers_move_no_judgement_of_one_model(change, dtype, planted):
    base, (tuned,) = make(512, change)
    spoilt = tuned | {NAMES[0]: plant(tuned[NAMES[0]], planted)}
    base = rounded(base, dtype)
    plain, found = (analyze_arrays(base, {"m": rounded(m, dtype)}) for m in (tuned, spoilt))
    assert judged(found) == judged(plain)
    assert changes(found) == pytest.approx(changes(plain), rel=0.01)
    is_full = change is full
    assert found.models[0].origin is (Origin.FULL if is_full else Origin.LORA)
    if PLANTED[planted][1] >= 5:
        (finding,) = [f for f in judge(found)[0].findings if f.code == "outliers"]
        assert NAMES[0] in finding.text
        assert found.models[0].total.largest == pytest.approx(PLANTED[planted][1], rel=0.01)


@pytest.mark.parametrize("planted", PLANTED)
@pytest.mark.parametrize("shared", [0.0, 1.2, 30.0], ids=["apart", "alike", "same"])
@pytest.mark.parametrize("spoils", ["one", "both"])
def test_outliers_move_no_judgement_of_two_models(planted, shared, spoils):
    base, models = make(512, full, 2, shared)
    models = {"a": models[0], "b": models[1]}
    spoilt = dict(models, a=models["a"] | {NAMES[0]: plant(models["a"][NAMES[0]], planted)})
    if spoils == "both":  # in the same places
        spoilt["b"] = models["b"] | {NAMES[0]: plant(models["b"][NAMES[0]], planted)}
    plain, found = (analyze_arrays(base, each) for each in (models, spoilt))
    assert judged(found) == judged(plain)
    assert changes(found) == pytest.approx(changes(plain), rel=0.01)
    cosines = [analysis.pairs[0].total.cosine for analysis in (found, plain)]
    assert cosines[0] == pytest.approx(cosines[1], abs=0.003)
    assert found.together.cancelled == pytest.approx(plain.together.cancelled, abs=0.003)


def test_a_tensor_that_is_sampled_keeps_its_cosine():
    """Tensors above 524,288 elements: what two models have in common is told by a sample."""
    base, models = make(1024, full, 2, shared=1.2)
    plain = analyze_arrays(base, models, spectra="none")
    models[0][NAMES[0]] = plant(models[0][NAMES[0]], "a thousandth of 5")
    found = analyze_arrays(base, models, spectra="none")
    cosine = plain.pairs[0].total.cosine
    assert found.pairs[0].total.cosine == pytest.approx(cosine, abs=0.004)
    assert found.pairs[0].ratio == pytest.approx(plain.pairs[0].ratio, abs=0.004)


@pytest.mark.parametrize("planted", PLANTED)
def test_a_merge_warns_of_nothing_that_only_outliers_show(tmp_path, planted):
    base, (tuned,) = make(512, full)
    tuned = {name: plant(values, planted) for name, values in tuned.items()}
    seen = sample_models(plan(write_recipe(tmp_path, base, [tuned])))
    assert [notice.code for notice in seen.notices] == []
    for exposure in seen.exposures[0].values():
        assert exposure.relative_norm == pytest.approx(0.046, rel=0.03)
        assert exposure.carriers == pytest.approx(512 / 3, rel=0.1)  # of a Gaussian


def test_a_merge_still_finds_a_lora_beside_outliers(tmp_path):
    base, (tuned,) = make(512, low_rank(8))
    tuned = {name: plant(values, "a thousandth of 5") for name, values in tuned.items()}
    (notice,) = sample_models(plan(write_recipe(tmp_path, base, [tuned]))).notices
    assert notice.code == "low_rank"
    assert "(about 8)" in notice.text
