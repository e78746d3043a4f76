"""Adapters merged in the space that they span, which loses nothing and needs no rank."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from peft_models import read_adapter, write_adapter

from dare.errors import InputError, RecipeError
from dare.inputs.lora import open_adapter
from dare.inputs.sources import read_floats
from dare.lora import merge_adapters, plan_adapters

Q, V = "m.q_proj", "m.v_proj"
RANKS = (3, 2, 4)


def gaussian(generator, *shape):
    return generator.standard_normal(shape).astype(np.float32)


def write_several(folder, shape=(40, 30), ranks=RANKS, modules=(Q, V)):
    generator = np.random.default_rng(0)
    return [
        write_adapter(
            folder / str(number),
            {
                f"{module}.lora_{letter}.weight": gaussian(generator, *form)
                for module in modules
                for letter, form in (("A", (rank, shape[1])), ("B", (shape[0], rank)))
            },
            r=rank,
            lora_alpha=2 + number,
        )
        for number, rank in enumerate(ranks)
    ]


def factors(folder, module=Q):
    """lora_B, lora_A and the scaling, in float64."""
    tensors, config = read_adapter(folder)
    down, up = (tensors[f"{module}.lora_{letter}.weight"] for letter in "AB")
    return up.astype(np.float64), down.astype(np.float64), config["lora_alpha"] / config["r"]


def delta(folder, module=Q):
    up, down, scaling = factors(folder, module)
    return scaling * up @ down


def assert_near(found, expected, tolerance=2e-6):
    assert np.linalg.norm(found - expected) <= tolerance * np.linalg.norm(expected)


@pytest.fixture
def three(tmp_path):
    return write_several(tmp_path)


def in_the_paper(folders, merge):
    """Core Space as the paper has it: merge U'BᵢAᵢV, and go back."""
    ups, downs, scalings = zip(*map(factors, folders), strict=True)
    left = np.linalg.svd(np.hstack(ups), full_matrices=False)[0]
    right = np.linalg.svd(np.vstack(downs), full_matrices=False)[2]
    parts = zip(ups, downs, scalings, strict=True)
    return left @ merge([s * left.T @ up @ down @ right.T for up, down, s in parts]) @ right


def elect(matrices, keep_ratio):
    kept = []
    for matrix in matrices:
        least = np.sort(np.abs(matrix), axis=None)[-round(keep_ratio * matrix.size)]
        kept.append(np.where(np.abs(matrix) >= least, matrix, 0))
    agrees = [part * sum(kept) > 0 for part in kept]
    total = sum(np.where(agree, part, 0) for agree, part in zip(agrees, kept, strict=True))
    return total / np.maximum(1, sum(agree.astype(int) for agree in agrees))


@pytest.mark.parametrize("keep_ratio", [1, 1 / 3])
def test_ties_is_that_of_the_paper(three, tmp_path, keep_ratio):
    given = {"method": "ties", "keep_ratio": keep_ratio, "space": "core"}
    report = merge_adapters(three, tmp_path / "out", **given)
    expected = in_the_paper(three, lambda matrices: elect(matrices, keep_ratio))
    assert_near(delta(tmp_path / "out"), expected)
    assert report.rank == sum(RANKS)
    assert report.modules[0].norm == pytest.approx(np.linalg.norm(expected), rel=1e-5)


@settings(deadline=None, max_examples=8)
@given(
    st.tuples(st.integers(1, 12), st.integers(1, 12)),
    st.lists(st.integers(1, 5), min_size=1, max_size=4),
    st.sampled_from(["linear", "sum"]),
)
def test_sums_are_those_of_concatenation(tmp_path_factory, shape, ranks, method):
    """Also where the ranks add up to more than the matrix has."""
    folder = tmp_path_factory.mktemp("core")
    paths = write_several(folder, shape, ranks, [Q])
    given = {"method": method, "weights": [0.5 + n for n in range(len(ranks))], "scale": 0.5}
    exact = merge_adapters(paths, folder / "stacked", **given)
    report = merge_adapters(paths, folder / "core", space="core", **given)
    expected = delta(folder / "stacked")
    assert_near(delta(folder / "core"), expected, 5e-6)
    assert report.rank <= min(*shape, sum(ranks))
    assert report.modules[0].norm == pytest.approx(exact.modules[0].norm, rel=1e-5)


@pytest.mark.parametrize(
    "given",
    [
        {"method": "dare+linear", "drop_rate": 0.5},
        {"method": "trim+sum", "keep_ratio": 0.3, "stages": {"trim": {"scope": "model"}}},
        {"method": "tsv"},
        {"method": "iso"},
        {"method": "knots"},
        {"method": "linear+svc"},
        {"method": "slerp", "on": "deltas"},
    ],
    ids=lambda given: given["method"],
)
def test_any_stage_of_changes_merges_there(tmp_path, given):
    paths = write_several(tmp_path, ranks=(3, 2))
    for out in ("a", "b"):
        report = merge_adapters(paths, tmp_path / out, space="core", **given)
    assert 0 < report.rank <= 5
    up, down, _ = factors(tmp_path / "a")
    # It stays in the space that the adapters span.
    ups, downs, _ = zip(*map(factors, paths), strict=True)
    for inside, vectors in ((up, np.hstack(ups)), (down.T, np.vstack(downs).T)):
        basis = np.linalg.qr(vectors)[0]
        assert_near(basis @ (basis.T @ inside), inside, 1e-5)
    assert np.array_equal(delta(tmp_path / "a"), delta(tmp_path / "b"))


def test_a_refine_stage_does_there_what_it_does_to_whole_matrices(tmp_path):
    paths = write_several(tmp_path, ranks=(3, 2))
    merge_adapters(paths, tmp_path / "full", method="linear+svc", rank=5)
    merge_adapters(paths, tmp_path / "core", method="linear+svc", space="core")
    assert_near(delta(tmp_path / "core"), delta(tmp_path / "full"), 1e-5)
    assert np.linalg.norm(delta(tmp_path / "full")) > 1.2 * np.linalg.norm(
        sum(map(delta, paths)) / 2
    )  # they share little


def test_the_result_may_be_truncated_and_modules_may_differ(three, tmp_path):
    more = write_several(tmp_path / "more", ranks=(2,), modules=[V])
    report = merge_adapters([*three, *more], tmp_path / "out", space="core", rank=4, method="sum")
    assert {module.name: (len(module.ranks), module.rank) for module in report.modules} == {
        Q: (3, 4),
        V: (4, 4),
    }
    values = np.linalg.svd(sum(map(delta, three)), compute_uv=False)
    tail = np.linalg.norm(values[4:]) / np.linalg.norm(values)
    assert report.modules[0].error == pytest.approx(tail, rel=1e-4)


def test_a_weight_for_each_tensor_and_an_adapter_without_one(three, tmp_path):
    rule = {"match": "*.q_proj.*", "model": "1", "weight": 0.0}
    given = {"method": "sum", "space": "core", "tensors": [rule]}
    merge_adapters(three, tmp_path / "out", **given)
    assert_near(delta(tmp_path / "out"), delta(three[0]) + delta(three[2]))
    assert_near(delta(tmp_path / "out", V), sum(delta(path, V) for path in three))


def test_each_expert_has_a_space_of_its_own(tmp_path):
    parameter, experts, rank = "m.experts.up_proj", 3, 2
    generator = np.random.default_rng(0)
    paths, alone = [], [[], []]
    for number in range(2):
        downs, ups = gaussian(generator, experts, rank, 8), gaussian(generator, experts, 9, rank)
        tensors = {  # as PEFT has them: all directions of an expert, or a direction of all experts
            "m.experts.lora_A.weight": downs.reshape(-1, 8),
            "m.experts.lora_B.weight": np.ascontiguousarray(ups.transpose(1, 2, 0)).reshape(9, -1),
        }
        target = {"target_parameters": [parameter], "target_modules": []}
        paths.append(write_adapter(tmp_path / str(number), tensors, **target))
        for place in range(experts):
            own = {f"{Q}.lora_A.weight": downs[place], f"{Q}.lora_B.weight": ups[place]}
            alone[number].append(write_adapter(tmp_path / f"{number}{place}", own))
    report = merge_adapters(paths, tmp_path / "out", method="ties", space="core")
    assert [(module.name, module.rank) for module in report.modules] == [(parameter, 4)]
    with open_adapter(tmp_path / "out") as found:
        assert found.tensors[parameter].shape == (3, 9, 8)
        merged = read_floats(found, parameter, 0, 3 * 9 * 8).reshape(3, 9, 8)
    for place in range(experts):
        same = in_the_paper([alone[0][place], alone[1][place]], lambda parts: elect(parts, 1))
        assert_near(merged[place], same)
    with pytest.raises(RecipeError, match=r"tsv .*m\.experts\.up_proj.*dare merge"):
        plan_adapters(paths, method="tsv", space="core")


def test_what_cannot_be_merged_there_is_refused(three, tmp_path):
    for asked, words in (
        ({"method": "slerp", "space": "core"}, "needs the base"),
        ({"space": "null"}, "'full' or 'core'"),
        ({"method": "linear+svc"}, r'linear\+svc.*rank = 16 .*space = "core"'),
    ):
        with pytest.raises(RecipeError, match=words):
            plan_adapters(three[:2], **asked)
    broken = {f"{Q}.lora_A.weight": np.full((2, 30), np.nan, np.float32)}
    broken |= {f"{Q}.lora_B.weight": np.ones((40, 2), np.float32)}
    path = write_adapter(tmp_path / "broken", broken)
    for space in ("full", "core"):
        with pytest.raises(InputError, match=r"q_proj: .*not finite"):
            merge_adapters([three[0], path], tmp_path / "none", space=space)


@pytest.mark.parametrize("given", [{}, {"space": "core"}, {"rank": 2, "method": "ties"}])
def test_what_has_no_elements_is_refused(tmp_path, given):
    for number, shape in enumerate([(0, 3), (4, 0)]):
        paths = write_several(tmp_path / str(number), shape)
        with pytest.raises(InputError, match=r"q_proj\.weight has no elements"):
            merge_adapters(paths, tmp_path / "out", **given)


def test_memory_is_that_of_small_matrices(tmp_path):
    paths = write_several(tmp_path, (600, 500))
    whole, core = (
        plan_adapters(paths, method="ties", **given) for given in ({"rank": 9}, {"space": "core"})
    )
    assert 8 * 9 * 1100 < core.working_bytes < whole.working_bytes / 4
    assert "core space" in str(core)
