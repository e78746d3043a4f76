"""A rule may name a method: its tensors come out as if there were no others."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_merges import base_and_tuned

import dare
from dare import TensorRule
from helpers import sha256, write_recipe

STAGES = {
    "dare": {"drop_rate": 0.5},
    "della": {"drop_rate": 0.4},
    "trim": {"keep_ratio": 0.5, "scope": "model"},
    "slerp": {"t": 0.25},
}
# Stages of elements, of tensors, of whole models and of matrices; fused, and by arrays.
METHODS = (
    *("linear", "dare+sum", "trim+ties", "trim+linear", "dare+trim+linear", "della+linear"),
    *("slerp", "tsv", "trim+ties+svc"),
)
SHAPES = {"a.weight": (40, 24), "b.weight": (24, 40), "c.weight": (64, 16), "d": (64,), "e": ()}


def tables_of(*methods):
    names = {name for method in methods for name in method.split("+")}
    return {name: table for name, table in STAGES.items() if name in names}


@settings(max_examples=25, deadline=None)
@given(
    own=st.sampled_from(METHODS),
    by=st.fixed_dictionaries({name: st.sampled_from([None, *METHODS]) for name in SHAPES}),
    threads=st.sampled_from([1, 2]),
    backend=st.sampled_from(["cpu", "reference"]),
)
def test_each_tensor_is_that_of_a_merge_by_its_method_alone(own, by, threads, backend):
    base, models = base_and_tuned(SHAPES)
    run = {"verbose": False, "threads": threads, "backend": backend}
    rules = [TensorRule(match=name, method=method) for name, method in by.items() if method]
    rules.insert(0, TensorRule(match="*", method="sum", weight=0.5))  # later ones replace it
    rules.insert(1, TensorRule(match="*", method=own))
    used = {own, *filter(None, by.values())}
    merged, report = dare.merge_arrays(
        base, models, method="sum", stages=tables_of(*used), tensors=rules, **run
    )
    assert [len(tensor.survivors[0]) for tensor in report.tensors] == [
        (by[tensor.name] or own).removesuffix("+svc").count("+") for tensor in report.tensors
    ]
    for method in used:
        names = [name for name in base if (by[name] or own) == method]
        parts = [{name: given[name] for name in names} for given in (base, *models)]
        if names:
            alone, _ = dare.merge_arrays(
                parts[0], parts[1:], method=method, stages=tables_of(method), **run
            )
            assert {n: merged[n].tobytes() for n in names} == {n: alone[n].tobytes() for n in names}


def mixed(folder, **options):
    """Chunks of four methods, of which two rank the elements of their own tensors together."""
    base, models = base_and_tuned(dict.fromkeys("abcd", (1000, 310)))
    rules = [
        TensorRule(match="b", method="trim+linear"),
        TensorRule(match="c", method="slerp", settings={"t": 0.75}),
        TensorRule(match="d", method="tsv"),
    ]
    tables = {name: STAGES[name] for name in ("trim", "slerp")}
    return write_recipe(
        folder, base, models, method="trim+ties", stages=tables, tensors=rules, **options
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    request = mixed(tmp_path_factory.mktemp("whole"))
    dare.merge(request)
    return request.recipe.output


def test_slices_and_a_repeated_merge_give_the_same_bytes(whole, tmp_path):
    request = mixed(tmp_path)
    for text in ("2/3", "3/3", "1/3"):
        dare.merge_slice(request, text)
    assert sha256(request.recipe.output) == sha256(whole)
    again = dare.load_recipe(whole).recipe
    assert [rule.method for rule in again.tensors] == ["trim+linear", "slerp", "tsv"]
    dare.merge(again, output=tmp_path / "again.safetensors", verbose=False)
    assert sha256(tmp_path / "again.safetensors") == sha256(whole)


def test_what_a_rules_method_depends_on_is_a_part_of_the_merge(whole):
    given = dare.load_recipe(whole).recipe
    plans = [
        dare.plan(given.changed(output_digest=None, **changes))
        for changes in (
            {},
            {"stages": {**given.stages, "slerp": {"t": 0.5}}},
            {"tensors": (*given.tensors, TensorRule(match="d", method="slerp"))},
        )
    ]
    assert len({plan.fingerprint for plan in plans}) == 3
    assert plans[0].identity["methods"] == {
        "trim+linear": [{"keep_ratio": 0.5, "scope": "model"}, {}],
        "slerp": [{"t": 0.25, "on": "weights"}],
        "tsv": [{"embeddings": "vectors"}],
    }


def test_the_plan_says_how_many_tensors_have_which_method(whole):
    plan = dare.plan(dare.load_recipe(whole))
    assert dict(plan.document().facts)["methods"] == (
        "trim+ties for 1 tensor, trim+linear for 1 tensor, slerp for 1 tensor, tsv for 1 tensor"
    )
    assert [t["method"] for t in plan.to_dict()["tensors"]] == [
        *("trim+ties", "trim+linear", "slerp", "tsv")
    ]


def test_reports_count_what_reached_a_dropping_stage_of_any_method():
    shapes = {"a": (100, 100), "b": (100, 100), "c": (100, 200)}
    base, models = base_and_tuned(shapes, 1)
    rules = [
        TensorRule(match="b", method="della+dare+sum", settings={"drop_rate": 0.75}),
        TensorRule(match="c", method="trim+sum"),
    ]
    _, report = dare.merge_arrays(
        base, models, method="dare+sum", drop_rate=0.5, tensors=rules, verbose=False
    )
    (model,), kept = report.models, [tensor.survivors[0] for tensor in report.tensors]
    assert report.method == "dare+sum, della+dare+sum, trim+sum"
    # Of a's 10,000 a half is left, of b's a sixteenth; of c nothing is dropped at random.
    assert model.drop_rate_asked == pytest.approx(1 - (1 / 2 + 1 / 16) / 2, abs=0.01)
    assert model.drop_rate_realised == pytest.approx(1 - (kept[0][0] + kept[1][1]) / 20_000)
    assert kept[2] == (4000,)


def test_what_a_model_lacks_counts_as_a_tensors_method_wants_it():
    base, models = base_and_tuned({"a": (4,), "b": (4,), "c": (4,)})
    del models[1]["a"], models[1]["b"]
    rules = [TensorRule(match="b", method="slerp")]
    _, report = dare.merge_arrays(
        base, models, method="linear", tensors=rules, on_missing="base", verbose=False
    )
    assert [len(tensor.models) for tensor in report.tensors] == [1, 2, 2]  # slerp takes two
