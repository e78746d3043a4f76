from __future__ import annotations

import json
import re
import tracemalloc

import numpy as np
import pytest

from dare.api import merge_arrays, plan
from dare.errors import MismatchError, RecipeError
from dare.inputs.arrays import array_source
from dare.kernels import DEVICES, STAGE_FLOATS, Device
from dare.planning.cost import INTERPRETER_BYTES, TENSOR_BYTES
from dare.planning.data import Fate
from dare.planning.make import make_plan
from dare.planning.plan import Plan
from dare.recipe.layers import find_depths
from dare.recipe.recipe import ModelEntry, Request, TensorRule
from dare.run.backend import open_backend
from dare.tensors.chunks import CHUNK
from helpers import save, write_recipe

BASE = {
    "w": np.zeros(4, np.float32),  # 16 bytes
    "e": np.zeros((2, 3), np.float16),  # 12 bytes
    "n": np.zeros(2, np.int64),  # 16 bytes
}


def plan_of(base, *models, **settings) -> Plan:
    names = ["math", "code", "chat", *(f"m{n}" for n in range(3, len(models)))][: len(models)]
    asked = Request.of(**{"base": "base", "models": names, **settings})
    sources = [array_source(model, name) for model, name in zip(models, names, strict=True)]
    return make_plan(
        asked.recipe, array_source(base, "base"), sources, names, options=asked.options
    )


def fates(made: Plan) -> dict[str, Fate]:
    return {tensor.name: tensor.fate for tensor in made.tensors}


# ---------------------------------------------------------------- fates


def test_weights_are_merged_and_other_types_are_copied_by_those_that_have_them():
    lacking = {name: BASE[name] for name in "en"}
    made = plan_of(BASE, BASE, lacking, on_missing="base")
    assert fates(made) == {"w": Fate.MERGED, "e": Fate.MERGED, "n": Fate.COPIED}
    models = {tensor.name: tensor.models for tensor in made.tensors}
    assert models == {"w": (0,), "e": (0, 1), "n": (0, 1)}
    free = plan_of(BASE, BASE, on_integer_mismatch="base")  # integers need not agree then
    assert {tensor.name: tensor.models for tensor in free.tensors}["n"] == ()


def test_tensors_share_a_treatment_only_if_their_settings_are_equal():
    names = ("embed.weight", *(f"layers.{n}.{part}" for n in range(3) for part in ("up", "down")))
    base = {name: np.zeros((2, 2), np.float32) for name in names}
    lacking = {name: base[name] for name in names if name != "layers.2.down"}
    rules = [
        TensorRule(match="*.up", model="code", weight=0.25),
        TensorRule(contains="layers.1.", settings={"drop_rate": [0.0, 0.8]}),
        TensorRule(match="layers.0.down", method="trim+ties"),
    ]
    more = {"embedding_drop_rate": 0.5, "on_missing": "base", "method": "dare+linear"}
    made = plan_of(base, base, lacking, tensors=rules, **more)
    depths = find_depths(names)
    for tensor in made.tensors:
        asked, depth = made.recipe, depths[tensor.name]
        each = [(tensor.name, model, depth) for model in tensor.models]
        assert tensor.settings == tuple(asked.settings_for(*one) for one in each)
        assert tensor.weights == tuple(asked.weight_for(*one) for one in each)
    assert made.recipe.has_gradients
    plain = plan_of(base, base, lacking, on_missing="base")
    assert len(made.treatments) == 7
    assert len(plain.treatments) == 2  # all tensors, and the one that a model lacks


def test_every_fate_is_told():
    base = {
        "merged": np.zeros(2, np.float32),
        "copied": np.zeros(2, np.bool_),
        "base only": np.zeros(2, np.float32),
        "mismatched": np.zeros(2, np.float32),
    }
    model = {
        "merged": np.zeros(2, np.float16),
        "copied": np.zeros(2, np.bool_),
        "mismatched": np.zeros(3, np.float32),
        "left out": np.zeros(2, np.float32),
    }
    made = plan_of(base, model, on_missing="base", on_mismatch="base", on_extra="drop")
    assert fates(made) == {
        "merged": Fate.MERGED,
        "copied": Fate.COPIED,
        "base only": Fate.BASE_ONLY,
        "mismatched": Fate.MISMATCHED,
    }
    assert made.left_out == ("left out",)
    missing, mismatched, extra = made.warnings
    assert (missing.code, missing.subjects) == ("missing_as_zero", ("base only",))
    assert (mismatched.code, mismatched.subjects) == ("mismatch_kept", ("mismatched",))
    assert "base is 2 F32, math is 3 F32" in mismatched.text
    assert (extra.code, extra.subjects) == ("extra_dropped", ("left out",))


@pytest.mark.parametrize(("policy", "score"), [("average", [[2, 4]]), ("first", [[1, 2]])])
def test_a_head_that_only_models_have(policy, score):
    """Nothing is dropped from it, and a model without it says nothing."""
    base = {"w": np.zeros(4, np.float32)}
    models = [
        base | {"score": np.array([[1, 2]], np.float16)},
        base,
        base | {"score": np.array([[3, 6]], np.float32)},
    ]
    settings = {"on_extra": policy, "drop_rate": 0.5, "verbose": False}
    merged, report = merge_arrays(base, models, **settings)
    assert list(merged) == ["w", "score"]
    assert merged["score"].dtype == np.float16
    np.testing.assert_array_equal(merged["score"], score)
    (note,) = [n for n in report.warnings if n.code == "extra_taken"]
    owners = {"average": "model 0, model 2", "first": "model 0"}[policy]
    assert (note.subjects, owners in note.text, "copy_from" in note.remedy) == (
        ("score",),
        True,
        True,
    )


def test_heads_of_files_are_a_fate_of_their_own_and_decide_the_output(tmp_path):
    heads = {"math": [1, 2], "code": [2, 3]}
    base = save(tmp_path / "base.safetensors", {"w": np.ones(4, np.float32)})
    models = [
        save(tmp_path / f"{n}.safetensors", {"w": np.full(4, v), "score": np.array(v)})
        for n, v in ((n, np.float32(v[0])) for n, v in heads.items())
    ]
    given = {"base": base, "models": models, "method": "linear"}
    made = plan(**given, on_extra="average")
    assert fates(made) == {"w": Fate.MERGED, "score": Fate.EXTRA}
    assert made.left_out == ()
    assert "1 taken from models" in str(made)
    found = [plan(**given, on_extra=p) for p in ("average", "first", "drop")]
    assert [each.identity.get("on_extra") for each in found] == ["average", "first", None]
    assert len({each.fingerprint for each in found}) == 3


@pytest.mark.parametrize("other", [np.zeros(3, np.float32), np.zeros(2, np.int64)])
def test_heads_without_a_mean_are_refused(other):
    models = [BASE | {"score": np.zeros_like(other)[:2]}, BASE | {"score": other}]
    with pytest.raises(MismatchError, match=r'score: .* on_extra = "first"'):
        merge_arrays(BASE, models, on_extra="average", verbose=False)
    merged, _ = merge_arrays(BASE, models, on_extra="first", verbose=False)
    assert merged["score"].tolist() == [0, 0]


@pytest.mark.parametrize(("asked", "kinds"), [(None, "F32 F16 I64"), ("bfloat16", "BF16 BF16 I64")])
def test_the_output_type_is_the_bases_unless_asked(asked, kinds):
    found = {tensor.name: tensor.dtype.name for tensor in plan_of(BASE, BASE, dtype=asked).tensors}
    assert found == dict(zip("wen", kinds.split(), strict=True))


def test_settings_of_models_and_tensors_reach_the_plan():
    models = [ModelEntry(file="math", settings={"drop_rate": 0.5}), "code"]
    rules = [TensorRule(match="e", settings={"drop_rate": 0.25, "t": 0.75})]
    made = plan_of(BASE, BASE, BASE, method="dare+slerp", models=models, tensors=rules)
    found = {
        t.name: ([s[0]["drop_rate"] for s in t.settings], t.combine["t"]) for t in made.tensors
    }
    assert found["w"] == ([0.5, 0.9], 0.5)
    assert found["e"] == ([0.25, 0.25], 0.75)


# ---------------------------------------------------------------- what does not fit


def test_everything_that_does_not_fit_is_found_at_once():
    base = {
        "a.missing": np.zeros(2, np.float32),
        "b.shape": np.zeros((2, 3), np.float32),
        "c.kind": np.zeros(2, np.int64),
        "d.integers": np.zeros(2, np.int64),
        "e.scalar": np.zeros((), np.float32),
        "f.fits": np.zeros(2, np.float32),
    }
    math = {
        "b.shape": np.zeros((3, 2), np.float32),
        "c.kind": np.zeros(2, np.float32),
        "d.integers": np.zeros(2, np.int32),
        "e.scalar": np.zeros((), np.float32),
        "f.fits": np.zeros(2, np.float32),
        "g.extra": np.zeros(2, np.float32),
    }
    code = {**base, "e.scalar": np.zeros(1, np.float32), "g.extra": np.zeros(2, np.float32)}
    with pytest.raises(MismatchError) as caught:
        plan_of(base, math, code)
    keep = 'set on_mismatch = "base" to keep the base\'s'
    assert str(caught.value).splitlines() == [
        "6 tensors do not fit together:",
        '  a.missing: not in math; set on_missing = "base" to count its change there as zero',
        f"  b.shape: base is 2×3 F32, math is 3×2 F32; {keep}",
        f"  c.kind: base is 2 I64, math is 2 F32; {keep}",
        f"  d.integers: base is 2 I64, math is 2 I32; {keep}",
        f"  e.scalar: base is a scalar F32, code is 1 F32; {keep}",
        '  g.extra: in math, code, not in the base; set on_extra = "drop" to leave it out, '
        '"average" to keep it',
    ]


def test_a_long_list_of_findings_is_cut():
    base = {f"t{number:03}": np.zeros(1, np.float32) for number in range(100)}
    with pytest.raises(MismatchError) as caught:
        plan_of(base | {"fits": base["t000"]}, {"fits": base["t000"]})
    lines = str(caught.value).splitlines()
    assert lines[0] == "100 tensors do not fit together:"
    assert lines[-1] == "  … and 80 more"
    assert len(lines) == 22


@pytest.mark.parametrize(
    ("policy", "model"),
    [
        ({"on_missing": "base"}, {}),
        ({"on_mismatch": "base"}, {"w": np.zeros(3, np.float32)}),
        ({"on_extra": "drop"}, {"w": np.zeros(4, np.float32), "x": np.zeros(1, np.float32)}),
    ],
)
def test_each_policy_allows_what_it_names_and_nothing_else(policy, model):
    base, model = {"w": BASE["w"], "e": BASE["e"]}, {**model, "e": BASE["e"]}
    assert len(plan_of(base, model, **policy).warnings) == 1
    others = {"on_missing": "base", "on_mismatch": "base", "on_extra": "drop"}
    for name in policy:
        del others[name]
    with pytest.raises(MismatchError):
        plan_of(base, model, **others)


def test_slerp_counts_a_tensor_that_a_model_lacks_as_unchanged():
    other = {"e": BASE["e"]}
    base = {"w": np.array([0, 1], np.float32), **other}
    turned = {"w": np.array([1, 0], np.float32), **other}
    settings = {"method": "slerp", "on_missing": "base", "verbose": False}
    merged, _ = merge_arrays(base, [turned, other], **settings)
    assert merged["w"].tolist() == pytest.approx([0.5**0.5, 0.5**0.5], abs=1e-6)


# ---------------------------------------------------------------- costs


@pytest.mark.parametrize(
    ("settings", "passes", "bytes_read"),
    [
        # Base and two models: 3 · 16 for w, 3 · 12 for e, 3 · 16 for n.
        ({"method": "sum"}, 1, 48 + 36 + 48),
        ({"method": "dare+linear"}, 1, 48 + 36 + 48),
        ({"method": "sum", "on_integer_mismatch": "base"}, 1, 48 + 36 + 16),
        # A survey of a delta reads the base and that model once more.
        ({"method": "trim+sum"}, 2, 48 + 2 * 32 + 36 + 2 * 24 + 48),
        (
            {"method": "trim+sum", "stages": {"trim": {"scope": "model"}}},
            2,
            48 + 2 * 32 + 36 + 2 * 24 + 48,
        ),
        ({"method": "trim+sum", "stages": {"trim": {"keep_ratio": 1.0}}}, 1, 48 + 36 + 48),
        # Two surveys, one after the other.
        (
            {"method": "dare+trim+sum", "stages": {"dare": {"rescale": "l1"}}},
            3,
            48 + 4 * 32 + 36 + 4 * 24 + 48,
        ),
        # A survey of all deltas together reads everything once more.
        ({"method": "slerp"}, 2, 96 + 72 + 48),
        ({"method": "slerp+svc"}, 3, 96 + 108 + 48),  # e is a matrix, w is not
        ({"method": "trim+slerp"}, 3, 96 + 2 * 32 + 72 + 2 * 24 + 48),
        # Only what a rule or a model asks to be surveyed is.
        (
            {
                "method": "trim+sum",
                "stages": {"trim": {"keep_ratio": 1.0}},
                "tensors": [TensorRule(match="e", settings={"keep_ratio": 0.5})],
            },
            2,
            48 + 36 + 2 * 24 + 48,
        ),
        (
            {
                "method": "trim+sum",
                "stages": {"trim": {"keep_ratio": 1.0}},
                "models": [ModelEntry(file="math", settings={"keep_ratio": 0.5}), "code"],
            },
            2,
            48 + 32 + 36 + 24 + 48,
        ),
    ],
)
def test_passes_and_bytes_read(settings, passes, bytes_read):
    made = plan_of(BASE, BASE, BASE, **settings)
    assert made.cost.passes == passes
    assert made.cost.bytes_read == bytes_read


@pytest.mark.parametrize(("method", "is_random"), [("dare+linear", True), ("linear", False)])
def test_seeds_are_shown_where_something_is_random(method, is_random):
    assert ("seed" in str(plan_of(BASE, BASE, method=method))) == is_random


def test_bytes_written():
    assert plan_of(BASE, BASE).cost.bytes_written == 16 + 12 + 16
    assert plan_of(BASE, BASE, dtype="F64").cost.bytes_written == 32 + 48 + 16
    assert plan_of({}, {}).cost.bytes_written == 0


def test_models_of_other_types_cost_what_they_are():
    narrow = {**BASE, "w": np.zeros(4, np.float16)}
    assert plan_of(BASE, narrow).cost.bytes_read == (16 + 8) + (12 + 12) + (16 + 16)


def allocated_bytes(made: Plan) -> int:
    """What a thread's private state really holds in arrays."""
    found, left = {}, [vars(open_backend(made))]
    while left:
        value = left.pop()
        if isinstance(value, np.ndarray):
            found[id(value)] = value.nbytes
        elif isinstance(value, dict):
            left += value.values()
        elif isinstance(value, list | tuple):
            left += value
        elif type(value).__module__.startswith("dare.stages"):
            left.append(vars(value))
    return sum(found.values())


@pytest.mark.parametrize("method", ["dare+linear", "dare+ties", "slerp"])
def test_a_thread_takes_no_more_memory_than_planned(method):
    base = {"w": np.zeros(4, np.float16), "v": np.zeros(4, np.float16)}
    model = {**base, "v": np.zeros(1, np.float64), "x": np.zeros(1, np.float64)}
    made = plan_of(base, model, base, method=method, on_extra="drop", on_mismatch="base")
    assert CHUNK * 4 < allocated_bytes(made) <= made.cost.workspace_bytes


@pytest.mark.parametrize(
    ("model", "settings"),
    [
        ({"w": np.zeros(4, np.float16)}, {"method": "trim+sum"}),
        ({"w": np.zeros(4, np.float16)}, {"weights": [1.0, 0.0]}),
        ({"w": np.zeros(4, np.float64)}, {}),
    ],
)
def test_what_one_kernel_cannot_do_is_planned_with_every_models_values(
    model, settings, monkeypatch
):
    monkeypatch.setitem(DEVICES, "auto", Device("core", chunks_at_once=1))
    base = {"w": np.zeros(4, np.float16)}
    weights = settings.pop("weights", [None, None])
    entries = [ModelEntry(file=f"m{n}", weight=weight) for n, weight in enumerate(weights)]
    usual = plan_of(base, base, base)
    made = plan_of(base, base, model, models=entries, **settings)
    assert (usual.cost.is_fused, made.cost.is_fused) == (True, False)
    wider = 4 * CHUNK * (made.cost.widest - usual.cost.widest)  # base, two models, output
    # values, the stage's arrays, zeros; what is left, the stage's flags
    more = 4 * CHUNK * (2 + STAGE_FLOATS + 1) + 4 * CHUNK
    assert made.cost.workspace_bytes - usual.cost.workspace_bytes == more + wider


def test_the_forecast_of_memory_is_the_interpreter_and_every_threads_share():
    made = plan_of(BASE, BASE, method="sum", threads=3)
    python = INTERPRETER_BYTES + TENSOR_BYTES * len(made.tensors)
    assert made.cost.peak_memory == python + 3 * made.cost.workspace_bytes
    surveyed = plan_of(BASE, BASE, method="trim+sum", threads=2, max_memory=100_000_000)
    left = 100_000_000 - 2 * surveyed.cost.workspace_bytes
    assert surveyed.cost.spare_bytes == left // 2 // 2
    each = surveyed.cost.workspace_bytes + surveyed.cost.spare_bytes
    assert surveyed.cost.peak_memory == python + 2 * each
    assert surveyed.cost.buffer_bytes == surveyed.cost.threads * each <= 100_000_000


def test_chunks_are_read_together_if_half_of_the_memory_allows_it():
    def at_once(max_memory, threads=2):
        return plan_of(BASE, BASE, threads=threads, max_memory=max_memory).cost.chunks_at_once

    assert at_once("1GiB") == 4
    need = plan_of(BASE, BASE, threads=2).cost.workspace_bytes
    assert (at_once(4 * need), at_once(4 * need - 1)) == (4, 2)
    assert at_once(4 * need, threads=8) == 1


@pytest.mark.parametrize(
    ("method", "is_bounded"),
    [("karcher", True), ("model_stock", True), ("trim+dare+multislerp", False)],
)
def test_a_merge_of_many_models_keeps_to_its_memory(method, is_bounded):
    """Surveys of pairs held the values of all models, and those of the chunk before."""
    values = np.random.default_rng(1).standard_normal((13, 2 * CHUNK), np.float32)
    tensors = [{"w": row} for row in values.astype(np.float16)]
    settings = {"method": method, "threads": 1, "verbose": False}
    few, least = (plan_of(*tensors[:n], **settings).cost.least_memory for n in (7, 13))
    assert (least - few == 6 * 2 * CHUNK) == is_bounded  # what is read, and nothing else
    merge_arrays({"w": np.ones(9)}, [{"w": np.arange(9.0)}] * 2, **settings)  # imports
    tracemalloc.start()
    merge_arrays(tensors[0], tensors[1:], max_memory=least, **settings)
    peak = tracemalloc.get_traced_memory()[1] - tensors[0]["w"].nbytes
    tracemalloc.stop()
    assert peak <= least


@pytest.mark.parametrize("kind", [np.float16, np.float32])
def test_buffers_do_not_grow_with_the_number_of_models(kind):
    """Each took room for four chunks in each thread."""
    base = {"w": np.zeros(4, kind)}
    made = {n: plan_of(base, *[base] * n, threads=2) for n in (1, 3, 4, 8, 9, 18, 19, 32, 64)}
    most = made[3].cost.buffer_bytes
    assert all(made[n].cost.buffer_bytes < 1.1 * most for n in (1, 4, 8, 9, 18, 19))
    assert made[32].cost.buffer_bytes < 1.7 * most
    for n in (8, 64):
        assert allocated_bytes(made[n]) <= made[n].cost.workspace_bytes
    chunk = CHUNK * np.dtype(kind).itemsize
    assert made[64].cost.buffer_bytes - made[32].cost.buffer_bytes == 2 * 32 * chunk
    assert {made[n].cost.threads for n in made} == {2}


def test_threads_are_as_many_as_memory_allows():
    need = plan_of(BASE, BASE, threads=1).cost.least_memory
    assert plan_of(BASE, BASE, threads=8, max_memory=8 * need).cost.threads == 8
    assert plan_of(BASE, BASE, threads=8, max_memory=4 * need - 1).cost.threads == 3
    assert plan_of(BASE, BASE, threads=8, max_memory=need).cost.threads == 1


@pytest.mark.parametrize("method", ["dare+linear", "dare+ties"])
@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64])
def test_too_little_memory_is_refused_with_an_amount_that_is_enough(method, kind):
    base = {"w": np.zeros(4, kind)}
    need = plan_of(base, base, method=method).cost.least_memory
    with pytest.raises(RecipeError, match="one thread needs more; allow at least") as caught:
        plan_of(base, base, method=method, max_memory=need - 1)
    advice = str(caught.value).split("allow at least ")[1]
    assert plan_of(base, base, method=method, max_memory=advice).cost.threads == 1


# ---------------------------------------------------------------- warnings


SHARED = {"models": [ModelEntry(file="math", seed=1), ModelEntry(file="code", seed=1)]}


@pytest.mark.parametrize(
    ("settings", "code", "text", "silent"),
    [
        (SHARED, "equal_seeds", "(1, 1)", {**SHARED, "method": "sum"}),
        (
            {"stages": {"dare": {"drop_rate": 0.99}}},
            "high_drop_rate",
            "--method darex+linear --q 0.0298",  # 0.01 + 2·0.99/100
            {"stages": {"dare": {"drop_rate": 0.95}}},
        ),
        (
            {"stages": {"dare": {"rescale": False}}},
            "no_rescale",
            "rescale = false",
            {"stages": {"dare": {"rescale": "l1"}}},
        ),
        (
            {"method": "della+sum", "stages": {"della": {"drop_rate": 0.99, "window": 0.01}}},
            "high_drop_rate",
            "--method darex+sum --q 0.0298",
            {"method": "della+sum", "stages": {"della": {"drop_rate": 0.9}}},
        ),
        *(
            (
                {"method": "darex+sum", "stages": {"darex": {"drop_rate": 0.99, **plain}}},
                "high_drop_rate",
                "--q 0.0298",
                {"method": "darex+sum", "stages": {"darex": {"drop_rate": 0.99, **balanced}}},
            )
            for plain, balanced in (
                ({}, {"q": 0.03}),
                ({"q": 0.01}, {"epsilon": 0.01}),
                ({"epsilon": 0.0}, {"max_variance": 9.0}),
                ({"max_variance": 99.1}, {"max_variance": 98.0}),
            )
        ),
        (
            {"method": "darex+sum", "stages": {"darex": {"drop_rate": 0.99, "q": 1.0}}},
            "no_rescale",
            "q = 1:",
            {"method": "darex+sum", "stages": {"darex": {"drop_rate": 0.0, "q": 1.0}}},
        ),
        (
            {"method": "dare+trim+sum", "stages": {"dare": {"rescale": False}}},
            "no_rescale",
            "rescale = false",
            {"method": "dare+trim+sum"},
        ),
    ],
)
def test_what_is_usually_a_mistake_is_warned_of(settings, code, text, silent):
    (warning,) = plan_of(BASE, BASE, BASE, **settings).warnings
    assert warning.code == code
    assert text in str(warning)
    assert plan_of(BASE, BASE, BASE, **silent).warnings == ()


def test_the_q_of_the_warning_can_be_used_as_it_is_given():
    (warning,) = plan_of(BASE, BASE, BASE, stages={"dare": {"drop_rate": 0.98}}).warnings
    method, _, q = re.search(r"--method (\S+) (--q) ([0-9.]+),", warning.remedy).groups()
    assert (method, float(q)) == ("darex+linear", 0.0396)  # 0.02 + 2·0.98/100
    tables = {"darex": {"drop_rate": 0.98, "q": float(q)}}
    assert plan_of(BASE, BASE, BASE, method=method, stages=tables).warnings == ()


@pytest.mark.parametrize(
    "settings",
    [
        {"models": [ModelEntry(file="math", settings={"drop_rate": 0.99})]},
        {"tensors": [TensorRule(match="w", settings={"drop_rate": 0.99})]},
        {"embedding_drop_rate": 0.99},
    ],
)
def test_a_drop_rate_above_095_is_warned_of_wherever_it_stands(settings):
    (warning,) = plan_of(BASE, BASE, **settings).warnings
    assert "drop_rate = 0.99" in warning.text
    assert "q = 0.0199 beside this rate" in warning.remedy


@pytest.mark.parametrize(
    ("settings", "noted"),
    [
        ({}, True),
        ({"method": "della+ties"}, True),
        ({"method": "ties"}, False),
        ({"stages": {"dare": {"drop_rate": 0.9}}}, False),
        ({"models": [ModelEntry(file="math", settings={"drop_rate": 0.9})]}, False),
        ({"tensors": [TensorRule(match="w", settings={"drop_rate": 0.9})]}, False),
    ],
)
def test_a_drop_rate_that_nobody_gave_is_noted_in_a_line(settings, noted):
    notes = plan_of(BASE, BASE, **settings).notes
    assert [note.code for note in notes] == ["default_drop_rate"] * noted
    for note in notes:
        assert "drop_rate = 0.9" in note.text
        assert len(f"    {note.text}.") <= 80  # one line of a terminal


# ---------------------------------------------------------------- the plan told


def test_the_plan_is_json(tmp_path):
    base, model = {"w": BASE["w"], "n": BASE["n"]}, {"w": BASE["w"], "n": BASE["n"], "x": BASE["w"]}
    made = plan(write_recipe(tmp_path, base, [model], method="trim+sum", on_extra="drop"))
    assert json.loads(made.to_json()) == {
        "method": "trim+sum",
        "methods": {"trim+sum": 1},
        "stages": [
            {"stage": "trim", "keep_ratio": 0.2, "scope": "tensor", "rescale": False},
            {"stage": "sum", "normalize": False, "on": "deltas"},
        ],
        "models": [{"name": "model0", "weight": 1.0, "seed": 42}],
        "passes": 2,
        "threads": 1,
        "peak_memory_bytes": made.cost.peak_memory,
        "buffer_bytes": made.cost.buffer_bytes,
        "max_memory_bytes": 1 << 30,
        "bytes_read": 16 + 16 + 32 + 16 + 16,
        "bytes_written": 32,
        "notes": [],
        "files_beside": [],
        "warnings": [
            {
                "code": "extra_dropped",
                "severity": "warning",
                "subjects": ["x"],
                "text": made.warnings[0].text,
                "remedy": made.warnings[0].remedy,
                "figures": {},
            }
        ],
        "tensors": [
            {
                "name": "n",
                "fate": "copied from base (not a weight type)",
                "shape": [2],
                "dtype": "I64",
                "models": ["model0"],
                "method": None,
                "place": {"file": "out.safetensors", "data_offsets": [0, 16]},
            },
            {
                "name": "w",
                "fate": "merged",
                "shape": [4],
                "dtype": "F32",
                "models": ["model0"],
                "method": "trim+sum",
                "place": {"file": "out.safetensors", "data_offsets": [16, 32]},
            },
        ],
        "left_out": ["x"],
    }


def test_the_plan_says_in_which_shard_a_tensor_will_lie(tmp_path):
    base = {name: np.zeros(4, np.float32) for name in "ab"}
    recipe = write_recipe(tmp_path, base, [base], output=tmp_path / "out", shard_size=16)
    found = {t["name"]: t["place"] for t in plan(recipe).to_dict()["tensors"]}
    assert found == {
        "a": {"file": "model-00001-of-00002.safetensors", "data_offsets": [0, 16]},
        "b": {"file": "model-00002-of-00002.safetensors", "data_offsets": [0, 16]},
    }


def test_the_plan_tells_its_facts():
    model = {**BASE, "x": BASE["w"]}
    settings = {"method": "trim+sum", "on_extra": "drop", "threads": 2, "output": "out"}
    text = str(plan_of(BASE, model, model, **settings))
    for fact in ("trim+sum", "math, code", "2 merged", "1 left out", "244 bytes", "2 threads"):
        assert fact in text


def test_models_of_one_name_are_told_apart(tmp_path):
    for folder in ("a", "b"):
        save(tmp_path / folder / "same.safetensors", BASE)
    models = [tmp_path / folder / "same.safetensors" for folder in ("a", "b")]
    base = save(tmp_path / "base.safetensors", BASE)
    made = plan(base=base, models=models)
    assert made.model_names == ("a/same", "b/same")


def test_a_plan_reads_no_weights_and_writes_nothing(tmp_path, monkeypatch):
    recipe = write_recipe(tmp_path, BASE, [BASE])
    before = sorted(tmp_path.iterdir())
    monkeypatch.setattr("dare.inputs.sources.FileSource.read", None)
    plan(recipe)
    assert sorted(tmp_path.iterdir()) == before


# ---------------------------------------------------------------- models that do nothing

LOOSE = {"on_extra": "drop", "on_missing": "base", "on_mismatch": "base", "verbose": False}


@pytest.mark.parametrize(
    ("idle", "seen"),
    [
        ({"other.a": np.ones(4, np.float32)}, r"none of its 1 tensors \(other\.a\)"),
        ({"a": np.ones(5, np.float32)}, r".*\(a\).*\(a: base is 4 F32, model 1 is 5 F32\)"),
        ({"a": np.ones(4, np.int8)}, r".*\(a\).*\(a: base is 4 F32, model 1 is 4 I8\)"),
        ({}, "none of its 0 tensors fits"),
    ],
)
def test_a_model_of_which_nothing_is_merged_is_an_error(idle, seen):
    base = {"a": np.zeros(4, np.float32), "b": np.zeros(4, np.float32)}
    with pytest.raises(MismatchError, match=rf"^model 1: nothing of it would be merged: {seen}"):
        merge_arrays(base, [{"b": np.ones(4, np.float32)}, idle], **LOOSE)


def test_an_adapter_of_another_model_is_an_error(tmp_path):
    base = tmp_path / "base.safetensors"
    save(base, {"layers.0.q.weight": np.zeros((4, 4), np.float32)})
    adapter = tmp_path / "math"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 4, "lora_alpha": 1}')
    factors = {f"blocks.0.q.lora_{x}.weight": np.ones((4, 4), np.float32) for x in "AB"}
    save(adapter / "adapter_model.safetensors", factors)
    with pytest.raises(MismatchError, match="math: nothing of it would be merged"):
        plan(Request.of(base=base, models=[adapter], **LOOSE))


def test_models_without_weights_have_nothing_to_merge():
    base = {"a": np.zeros(4, np.int64)}
    assert merge_arrays(base, [base], verbose=False)[0]["a"].tolist() == [0] * 4
