"""Methods that no other tool has: what their authors' code computes, against ours.

`definitions` says it again in plain torch, in float64. Matrices are small, so that tolerances are
those that a stage promises, and singular values of random matrices are far enough apart.
"""

from __future__ import annotations

import definitions
import pytest
import torch
from side_by_side import (
    DEFINITION,
    assert_near,
    assert_same,
    assert_within,
    compares,
    make_models,
    merge_ours,
)

import dare

SHAPES = [(37, 53), (53, 37), (48, 48)]


def merge_deltas(deltas, method, **settings):
    return merge_ours(torch.zeros_like(deltas[0]), deltas, method, **settings)


def make_deltas(count, shape=(37, 53), seed=0):
    base, models = make_models(count, shape, seed=seed)
    return [model - base for model in models]


def make_adapters(count, shape=(48, 60), rank=3):
    """Changes of low rank."""
    generator = torch.Generator().manual_seed(5)
    rows, columns = shape
    return [
        torch.randn(rows, rank, generator=generator)
        @ torch.randn(rank, columns, generator=generator)
        for _ in range(count)
    ]


# ---------------------------------------------------------------- STAR


@compares("star", DEFINITION)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("share", [0.2, 0.4, 0.9])
def test_star(shape, share):
    deltas = make_deltas(2, shape)
    ours = merge_deltas(deltas, "star+linear", stages={"star": {"singular_share": share}})
    theirs = sum(definitions.star(delta, share) for delta in deltas) / 2
    assert_near(ours, theirs, 1e-5)


# ---------------------------------------------------------------- FREE


@compares("fourier", DEFINITION)
@pytest.mark.parametrize("size", [20, 64, 128])
def test_fourier_on_square_matrices_of_their_vision_models_ratio(size):
    """filter_ratio 0.7 drops of these what radius 0.02 does: zero, and at 128 its neighbours."""
    (delta,) = make_deltas(1, (size, size))
    ours = merge_deltas([delta], "fourier+sum", stages={"fourier": {"radius": 0.02}})
    assert (ours - delta).norm() > 1e-4 * delta.norm(), "or nothing is dropped"
    assert_near(ours, definitions.free(delta, 0.7), 1e-5)


@compares("fourier", DEFINITION)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("radius", [0.05, 0.1, 0.6])
def test_fourier_as_a_high_pass_filter(shape, radius):
    (delta,) = make_deltas(1, shape)
    ours = merge_deltas([delta], "fourier+sum", stages={"fourier": {"radius": radius}})
    assert_near(ours, definitions.high_pass(delta, radius), 1e-5)


@compares("fourier", DEFINITION)
def test_difference_the_authors_keep_a_circle_around_the_highest_frequency():
    """So of a long matrix they drop most; ours drops one around zero, radius 0.1, in any shape."""
    impulse = torch.zeros(256, 64)
    impulse[0, 0] = 256 * 64  # which has all frequencies alike
    kept = {}
    for ratio in (0.6, 0.7):
        kept[ratio] = definitions.free(impulse, ratio)[0, 0].item() / impulse.numel()
    ours = merge_deltas([impulse], "fourier+sum")[0, 0].item() / impulse.numel()
    assert ours == pytest.approx(1 - torch.pi * 0.1**2 / 4, abs=0.003)
    assert kept[0.6] < kept[0.7] < 0.35
    square = torch.zeros(256, 256)
    square[0, 0] = 256 * 256
    assert definitions.free(square, 0.7)[0, 0].item() / square.numel() > 0.999


# ---------------------------------------------------------------- TSV, Iso


@compares("tsv", DEFINITION)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("count", [2, 3, 5])
def test_tsv(shape, count):
    deltas = make_deltas(count, shape)
    assert_near(merge_deltas(deltas, "tsv"), definitions.tsv_merge(deltas), 1e-4)


@compares("tsv", DEFINITION)
def test_difference_more_models_than_rank():
    """A share of less than one direction is none there, and one here."""
    deltas = make_deltas(3, (2, 5))
    assert definitions.tsv_merge(deltas).abs().max() == 0
    assert merge_deltas(deltas, "tsv").abs().max() > 0


@compares("iso (Iso-C)", DEFINITION)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("count", [2, 4])
def test_iso_c(shape, count):
    deltas = make_deltas(count, shape)
    assert_near(merge_deltas(deltas, "iso"), definitions.iso_c(deltas), 1e-4)


@compares("iso (Iso-CTS)", DEFINITION)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("common_share", [0.4, 0.8])
def test_iso_cts(shape, count, common_share):
    deltas = make_deltas(count, shape)
    stages = {"iso": {"variant": "cts", "common_share": common_share}}
    ours = merge_deltas(deltas, "iso", stages=stages)
    assert_near(ours, definitions.iso_cts(deltas, common_share), 1e-4)


@compares("iso (Iso-C)", DEFINITION)
def test_difference_directions_that_are_rounding_do_not_count():
    """The sum of adapters has few directions; torch's others have values of rounding and count."""
    deltas = make_adapters(2)
    ours, theirs = merge_deltas(deltas, "iso"), definitions.iso_c(deltas)
    ranks = [torch.linalg.matrix_rank(found.double(), rtol=1e-4).item() for found in (ours, theirs)]
    assert ranks == [6, 48]


# ---------------------------------------------------------------- KnOTS


@compares("knots", DEFINITION)
@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("shape", [(48, 60), (60, 48)])
def test_knots_without_trimming(count, shape):
    """As the authors merge language models: topK is 100."""
    deltas = make_adapters(count, shape)
    ours = merge_deltas(deltas, "knots", stages={"knots": {"keep_ratio": 1.0}})
    theirs = definitions.knots(deltas, 3 * count * shape[1], scaled=True)
    assert_near(ours, theirs, 1e-4)


@compares("knots", DEFINITION)
@pytest.mark.parametrize("keep_ratio", [0.2, 0.5])
def test_knots_trimmed_by_the_papers_formula(keep_ratio):
    deltas = make_adapters(3)
    ours = merge_deltas(deltas, "knots", stages={"knots": {"keep_ratio": keep_ratio}})
    kept = int(keep_ratio * 9 * 60)
    assert_near(ours, definitions.knots(deltas, kept, scaled=False), 1e-4)


@compares("knots", DEFINITION)
def test_difference_the_code_trims_by_singular_values_too():
    """Ours trims V, the paper's formula; their code trims S·V, so that weak directions go first."""
    deltas = make_adapters(3)
    theirs = definitions.knots(deltas, int(0.2 * 9 * 60), scaled=True)
    ours = merge_deltas(deltas, "knots", stages={"knots": {"keep_ratio": 0.2}})
    assert (ours - theirs).norm() > 0.1 * theirs.norm()


# ---------------------------------------------------------------- TIES


def merge_parts(wholes, sizes, method, **settings):
    """Merge flat models that are cut into tensors; return the result in one."""
    names = [f"part{place}" for place in range(len(sizes))]
    models = [dict(zip(names, whole.split(sizes), strict=True)) for whole in wholes]
    base = {name: torch.zeros(size) for name, size in zip(names, sizes, strict=True)}
    merged, _ = dare.merge_arrays(base, models, method=method, verbose=False, **settings)
    return torch.cat([merged[name] for name in names])


@compares("ties", DEFINITION)
@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("kept", [400, 1000])
def test_ties_trimmed_over_the_whole_model(count, kept):
    """As the authors trim: all tensors together."""
    wholes = make_deltas(count, (2000,))
    for whole in wholes:
        whole[:700] /= 4  # a tensor of small changes, of which less is left
    stages = {"trim": {"keep_ratio": (kept + 0.5) / 2000, "scope": "model"}}
    ours = merge_parts(wholes, [700, 1300], "trim+ties", stages=stages)
    assert_same(ours, definitions.ties(wholes, kept))


@compares("ties", DEFINITION)
def test_difference_each_tensor_is_trimmed_by_itself_unless_asked():
    """As the other tools do; the authors' code ranks all tensors of a model together."""
    wholes = make_deltas(2, (2000,))
    for whole in wholes:
        whole[:700] /= 4
    ours = merge_parts(wholes, [700, 1300], "ties", stages={"ties": {"keep_ratio": 0.2}})
    kept = [(found[:700] != 0).float().mean() for found in (ours, definitions.ties(wholes, 400))]
    assert kept[0] > 0.2
    assert kept[1] < 0.01


# ---------------------------------------------------------------- element by element


@compares("consensus", DEFINITION)
@pytest.mark.parametrize("selectivity", [0.2, 0.4, 0.6])
@pytest.mark.parametrize("agree", [1, 2, 3])
def test_consensus(selectivity, agree):
    deltas = make_deltas(4)
    stages = {"consensus": {"selectivity": selectivity, "agree": agree}}
    ours = merge_deltas(deltas, "consensus", stages=stages)
    assert 0.02 < (ours != 0).float().mean() <= 1
    assert_same(ours, definitions.consensus(deltas, selectivity, agree))


@compares("consensus", DEFINITION)
def test_difference_all_must_agree_if_there_are_too_few_models():
    """Their code removes everything then."""
    deltas = make_deltas(2)
    stages = {"consensus": {"agree": 3}}
    assert (definitions.consensus(deltas, 0.4, 3) == 0).all()
    assert_same(
        merge_deltas(deltas, "consensus", stages=stages), definitions.consensus(deltas, 0.4, 2)
    )


@compares("emr", DEFINITION)
@pytest.mark.parametrize("count", [1, 2, 3, 6])
def test_emr(count):
    deltas = make_deltas(count)
    assert_same(merge_deltas(deltas, "emr"), definitions.emr_unified(deltas))


@compares("emr", DEFINITION)
def test_difference_a_mean_of_zero_elects_nothing():
    """Their code counts it as negative."""
    deltas = [torch.tensor([0.5]), torch.tensor([-0.5])]
    assert merge_deltas(deltas, "emr").item() == 0
    assert definitions.emr_unified(deltas).item() == -0.5


def scored_deltas(count, size=2000):
    """With a zero in each, so that the smallest magnitude is 0."""
    deltas = [30 * delta for delta in make_deltas(count, (size,))]
    for place, delta in enumerate(deltas):
        delta[place] = 0
    return deltas


@compares("pcb", DEFINITION)
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("ratio", [0.05, 0.1])
def test_pcb_of_one_tensor_without_clamping(count, ratio):
    # The cut is the k-th highest score there, which then counts for nothing, and the next one here.
    deltas = scored_deltas(count)
    ours = merge_deltas(deltas, "pcb", stages={"pcb": {"score_ratio": ratio - 1 / 2000}})
    theirs = definitions.pcb(deltas, ratio, clamp=0.0)
    assert 0.5 * ratio < (ours != 0).float().mean() < count * ratio
    assert_within(ours, theirs, 16, torch.stack(deltas).abs().max(0).values)


@compares("pcb", DEFINITION)
def test_difference_each_tensor_has_its_own_competition():
    """Theirs is one over the whole model; a tensor of small changes then keeps next to nothing."""
    large, small = scored_deltas(2), [delta / 100 for delta in scored_deltas(2)]
    whole = [torch.cat(pair) for pair in zip(large, small, strict=True)]
    theirs = definitions.pcb(whole, 0.1, clamp=0.0)[2000:]
    ours = merge_deltas(small, "pcb", stages={"pcb": {"score_ratio": 0.1}})
    assert (theirs != 0).float().mean() < 0.01
    assert (ours != 0).float().mean() > 0.05


@compares("pcb", DEFINITION)
def test_difference_the_largest_magnitudes_are_not_clamped():
    """Theirs are drawn in to the 99.99% largest of the model, for the scores and the result."""
    deltas = scored_deltas(2)
    for delta in deltas:
        delta[-1] = 1.0
    assert merge_deltas(deltas, "pcb")[-1].item() == pytest.approx(1.0)
    assert definitions.pcb(deltas, 0.1, clamp=0.0001)[-1] < 0.2


@compares("cabs", DEFINITION)
@pytest.mark.parametrize(("count", "n", "m"), [(2, 2, 8), (2, 64, 256), (4, 2, 8), (3, 1, 4)])
def test_cabs(count, n, m):
    deltas = make_deltas(count, (16, 256))
    ours = merge_deltas(deltas, "cabs", stages={"cabs": {"n": n, "m": m}})
    assert (ours != 0).float().mean().item() == pytest.approx(count * n / m)
    assert_same(ours, definitions.cabs(deltas, n, m))


@compares("cabs", DEFINITION)
def test_difference_the_last_elements_are_a_group_too():
    """What does not fill a group of m is dropped there."""
    (delta,) = make_deltas(1, (11,))
    ours = merge_deltas([delta], "cabs", stages={"cabs": {"n": 2, "m": 8}})
    assert (ours[8:] != 0).sum() == 1
    assert (definitions.cabs([delta], 2, 8)[8:] == 0).all()
