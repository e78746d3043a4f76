"""Every chunk belongs to one slice, and slices are runs of about equal size."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dare import RecipeError
from dare.inputs.arrays import array_source
from dare.planning.make import make_plan
from dare.planning.slices import Division, Slice
from dare.recipe.recipe import Recipe
from dare.tensors.chunks import CHUNK


def plan_of(sizes, method="dare+linear", tmp_path=None):
    arrays = {f"w{n}": np.broadcast_to(np.float16(0), size) for n, size in enumerate(sizes)}
    base, model = (array_source(arrays, name) for name in ("base", "model"))
    recipe = Recipe(base="base", models=["a", "b"], method=method, output=tmp_path)
    return make_plan(recipe, base, [model, model], ["a", "b"])


def chunks_of(plan):
    return [(t.name, chunk) for t in plan.tensors for chunk in range(t.chunks)]


sizes = st.lists(st.integers(0, 4 * CHUNK), min_size=1, max_size=6)


@given(sizes, st.integers(1, 9), st.sampled_from(["dare+linear", "trim+linear", "slerp"]))
def test_each_chunk_belongs_to_one_slice_and_slices_are_runs(sizes, of, method):
    plan = plan_of(sizes, method)
    division = Division(plan, of)
    shares = [division.share(number) for number in range(1, of + 1)]
    order = chunks_of(plan)
    done = [(name, chunk) for share in shares for name, chunks in share.items() for chunk in chunks]
    assert done == order
    assert all(
        (name, chunk) in order and division.owner(name, chunk) == number
        for number, share in enumerate(shares, start=1)
        for name, chunks in share.items()
        for chunk in chunks
    )
    if method != "dare+linear":
        assert all(sum(t.name in share for share in shares) <= 1 for t in plan.tensors)


@given(sizes, st.integers(1, 9))
def test_slices_are_equal_but_for_a_chunk(sizes, of):
    plan = plan_of(sizes)
    division = Division(plan, of)
    bytes_of_a_chunk = CHUNK * 2 * (3 + 1)
    for number in range(1, of + 1):
        nbytes = division.nbytes(division.share(number))
        assert abs(nbytes - division.total / of) <= 2 * bytes_of_a_chunk


def test_a_hand_made_division():
    plan = plan_of([2 * CHUNK, 2 * CHUNK])
    assert Division(plan, 2).share(1) == {"w0": range(2)}
    assert Division(plan, 4).share(3) == {"w1": range(1)}
    assert Division(plan, 3).share(2) == {"w0": range(1, 2), "w1": range(1)}
    assert Division(plan_of([3 * CHUNK, CHUNK], "trim+linear"), 2).share(2) == {"w1": range(1)}


@pytest.mark.parametrize("text", ["1/", "/2", "1/2/3", "½/2"])
def test_slices_are_written_as_fractions(text):
    assert str(Slice.parse(" 16/16 ")) == "16/16"
    with pytest.raises(RecipeError, match="NUMBER/OF"):
        Slice.parse(text)
