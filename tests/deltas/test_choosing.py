from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dare.analysis.judge.prediction import predict
from dare.analysis.measure.analyzing import analyze_arrays
from dare.deltas.choosing import (
    PLACE,
    RATES,
    choose,
    expected_errors,
    look_at_all,
    predicted_bytes,
    rounded,
    share_of_largest,
)
from dare.deltas.schemes import BITS, Scheme
from dare.demo.merges import BASE, TUNED
from dare.errors import RecipeError
from dare.inputs.arrays import array_source
from dare.inputs.formats import open_model
from dare.inputs.reading import read_floats
from dare.inputs.sources import ArraySource
from dare.tensors.chunks import CHUNK
from dare.tensors.dtypes import STORAGE_TYPES
from dare.tensors.header import TensorInfo
from dare.tensors.mask import keep_mask

HEAD = 4096
ONE, TWO, THREE = (230 + 1 + parts * (90 + 1) + 24 for parts in (1, 2, 3))
"""What is said of a tensor called `w` with so many parts, and a chunk in the index."""


def gaussian(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def source(**arrays):
    return array_source(arrays, "arrays")


def tensor(elements, dtype="BF16", name="w"):
    return TensorInfo(name, STORAGE_TYPES[dtype], (elements,), 0)


def small_models():
    """A base of norm 1 in each tensor, and a model that is 0.02 off."""
    base = {"w": gaussian(1, 300, 100), "v": gaussian(2, 5000)}
    return source(**base), source(**{n: x + 0.02 * gaussian(3, *x.shape) for n, x in base.items()})


# ---------------------------------------------------------------- sizes, by hand


@pytest.mark.parametrize(
    ("scheme", "expected"),
    [
        (Scheme(0.9), ONE + 2 * 1000),
        (Scheme(0.0), ONE + 2 * 10_000),
        (Scheme(0.9, 8), TWO + 1000 + 2 * 4),
        (Scheme(0.9, 4), TWO + 500 + 2 * 4),
        (Scheme(0.9, 2), TWO + 250 + 2 * 4),
        (Scheme(0.9, 1), TWO + 125 + 2 * 4),
        (Scheme(0.9999, 1), TWO + 1 + 2),
        # 1000 of 10,000: 375 bytes of lower bits, then 1000 + 1250 + 1 bits, which are 282 bytes
        (Scheme(0.9, "native", "magnitude"), TWO + 2 * 1000 + 657),
        (Scheme(0.9, 4, "magnitude"), THREE + 500 + 2 * 4 + 657),
    ],
)
def test_sizes_by_hand(scheme, expected):
    assert predicted_bytes([tensor(10_000)], scheme) == HEAD + expected


def test_groups_and_the_index_start_anew_in_each_chunk():
    # 52,429 kept in each of two chunks and one in the last
    each = 24 + 52_429 + 2 * 205
    found = predicted_bytes([tensor(2 * CHUNK + 10)], Scheme(0.9, 8))
    assert found == HEAD + TWO + 2 * each + 1 + 2


def test_native_values_have_the_size_of_their_type_and_fixed_rates_are_fixed():
    tensors = [tensor(1000, "F32", "a"), tensor(1000, "BF16", "b")]
    assert predicted_bytes(tensors, Scheme(0.9)) == HEAD + 2 * ONE + 400 + 200
    assert predicted_bytes(tensors, Scheme(0.9), {"a": 0.5}) == HEAD + 2 * ONE + 2000 + 200


@given(st.integers(1, 3 * CHUNK), st.sampled_from(BITS))
def test_more_dropped_is_never_larger(elements, bits):
    sizes = [predicted_bytes([tensor(elements)], Scheme(rate, bits)) for rate in RATES]
    assert sizes == sorted(sizes, reverse=True)


# ---------------------------------------------------------------- errors, by hand


def test_errors_of_what_is_kept_by_chance_are_those_of_the_analysis():
    base, tuned = {"w": gaussian(1, 4000)}, {"w": gaussian(1, 4000) + 0.01 * gaussian(2, 4000)}
    total = analyze_arrays(base, [tuned]).models[0].total
    for rate in (0.1, 0.5, 0.9, 0.99):
        error = predict(total, rate).output_error
        found = choose(source(**base), source(**tuned), target_error=error * 1.00001)
        row = {candidate.bits: candidate for candidate in found.table}["native"]
        assert row.drop_rate == rate
        assert row.predicted_error == pytest.approx(error, rel=1e-5)


def test_one_bit_by_hand():
    # |δ| is 1 or 3: stored as ±Σδ²/Σ|δ| = ±2.5, so that b = Σ6.25/Σδ² = 1.25
    values = np.tile(np.array([1, -3, -1, 3], np.float32), 64)
    found = expected_errors(values, np.array([0.0, 0.75]), "random", [1])[1]
    assert found == pytest.approx([0.25, 1.25 / 0.25 - 1])
    # the largest, 3 each, hold nine tenths; rounded ones are divided by that, native ones are not
    values = np.tile(values, 4)
    found = expected_errors(values, np.array([0.5]), "magnitude", [1, "native"])
    assert found == {1: pytest.approx([1 / 0.9 - 1]), "native": pytest.approx([0.1])}


def test_the_largest_hold_most():
    values = np.array([0, 3, -4, 0], np.float32)
    assert share_of_largest(values, np.array([0.25, 0.5, 1.0])).tolist() == [16 / 25, 1.0, 1.0]


def simulated(deltas, scheme):
    """Σ‖δ̂ - δ‖² over tensors, of one mask or of the largest."""
    squares, rate = 0.0, scheme.drop_rate
    for name, delta in deltas.items():
        if scheme.keep == "random":
            keep, scale = keep_mask(name, delta.size, rate, seed=7), 1 / (1 - rate)
        else:
            keep, scale = np.zeros(delta.size, bool), 1.0
            keep[np.argsort(-np.abs(delta), kind="stable")[: int((1 - rate) * delta.size)]] = True
        kept = delta[keep]
        restored = np.zeros_like(delta)
        if scheme.bits != "native":
            if scheme.keep == "magnitude":
                scale = np.square(delta).sum() / (np.square(kept).sum() or 1)
            kept = rounded(kept, scheme.bits)
        restored[keep] = scale * kept
        squares += float(np.square(restored - delta, dtype=np.float64).sum())
    return squares


def read_all(source):
    with source:
        return {n: read_floats(source, n, 0, i.elements) for n, i in source.tensors.items()}


@pytest.mark.parametrize("name", ["say"])  # of which a quarter is unchanged
def test_predictions_hold_for_the_demonstrations_models(name):
    base, model = open_model(BASE), open_model(TUNED[name])
    weights, tuned = read_all(base), read_all(model)
    deltas = {tensor: tuned[tensor] - weights[tensor] for tensor in weights}
    norm = math.sqrt(sum(np.square(w, dtype=np.float64).sum() for w in weights.values()))
    rates = {"native": 0.9, 8: 0.97, 4: 0.7, 2: 0.3, 1: 0.85}
    for scheme in [Scheme(rates[b], b, keep) for b in BITS for keep in ("random", "magnitude")]:
        found = choose(
            *(base, model),
            keep=scheme.keep,
            bits=scheme.bits,
            target_error=1,
            fixed_rates=dict.fromkeys(deltas, scheme.drop_rate),
        )
        true = math.sqrt(simulated(deltas, scheme)) / norm
        assert found.predicted_error == pytest.approx(true, rel=0.1), scheme


# ---------------------------------------------------------------- the choice


def test_the_choice_is_the_best_of_its_table():
    base, model = small_models()
    by_size = choose(base, model, target_size=12_000)
    assert [row.bits for row in by_size.table] == [2, 1, 4, 8, "native"]
    errors = [row.predicted_error for row in by_size.table]
    assert errors == sorted(errors)
    assert all(row.most_bytes <= 12_000 for row in by_size.table)
    by_error = choose(base, model, target_error=0.01)
    sizes = [row.predicted_bytes for row in by_error.table]
    assert sizes == sorted(sizes)
    assert all(row.predicted_error <= 0.01 for row in by_error.table)
    for choice in (by_size, by_error):
        first = choice.table[0]
        assert choice.scheme == Scheme(first.drop_rate, first.bits, "random")
        assert choice.predicted_bytes == first.predicted_bytes
        assert choice.predicted_error == first.predicted_error


def test_what_is_kept_fits_whatever_the_mask():
    base, model = small_models()
    target = 20_000
    choice = choose(base, model, target_size=target, bits="native")
    rate = choice.scheme.drop_rate
    assert choice.predicted_bytes > 0.9 * target
    for seed in range(50):
        kept = sum(
            int(keep_mask(name, info.elements, rate, seed).sum())
            for name, info in model.tensors.items()
        )
        assert HEAD + 2 * ONE + 4 * kept <= target


@given(st.lists(st.integers(6000, 200_000), min_size=2, max_size=5))
def test_a_larger_size_has_no_larger_error(sizes):
    choices = [choose(*small_models(), target_size=size) for size in sorted(sizes)]
    errors = [choice.predicted_error for choice in choices]
    assert errors == sorted(errors, reverse=True)


@given(st.lists(st.floats(0, 1), min_size=2, max_size=5))
def test_a_larger_error_takes_no_more_bytes(errors):
    choices = [choose(*small_models(), target_error=error) for error in sorted(errors)]
    sizes = [choice.predicted_bytes for choice in choices]
    assert sizes == sorted(sizes, reverse=True)


def test_bits_that_are_given_are_kept():
    for bits in BITS:
        choice = choose(*small_models(), target_size=10_000, bits=bits)
        assert choice.scheme.bits == bits
        assert [row.bits for row in choice.table] == [bits]


def test_magnitudes_have_less_error_at_a_rate_and_more_bytes():
    base, model = small_models()
    rows = {
        keep: choose(
            base,
            model,
            keep=keep,
            bits=4,
            target_error=1,
            fixed_rates={"w": 0.8, "v": 0.8},
        )
        for keep in ("random", "magnitude")
    }
    assert rows["magnitude"].scheme.keep == "magnitude"
    assert rows["magnitude"].predicted_error < rows["random"].predicted_error / 2
    assert rows["magnitude"].predicted_bytes > rows["random"].predicted_bytes


def test_a_size_that_cannot_be_had_says_which_can():
    base, model = small_models()
    with pytest.raises(RecipeError, match=r"smallest file takes up to 5.0 kB .*0.999, 1 bits") as e:
        choose(base, model, target_size=500)
    least = int(str(e.value).split("allow ")[1].split()[0])
    assert choose(base, model, target_size=least).scheme == Scheme(0.999, 1)
    with pytest.raises(RecipeError, match="smallest file"):
        choose(base, model, target_size=least - 1)


def test_an_error_that_cannot_be_had_says_the_least_and_lossless():
    with pytest.raises(RecipeError, match=r"the smallest error is about 0.002\d .*--lossless"):
        choose(*small_models(), target_error=1e-4, bits=4)
    exact = choose(*small_models(), target_error=0)
    assert exact.scheme == Scheme(0.0, "native")


@pytest.mark.parametrize("targets", [{}, {"target_size": 1, "target_error": 1.0}])
def test_there_is_one_target(targets):
    with pytest.raises(RecipeError, match="not both"):
        choose(*small_models(), **targets)


def test_a_base_of_zeros_has_no_relative_error():
    zeros, model = source(w=np.zeros(1000, np.float32)), source(w=gaussian(1, 1000))
    with pytest.raises(RecipeError, match="smallest error"):
        choose(zeros, model, target_error=0.5, bits=4)


# ---------------------------------------------------------------- the look


def test_small_tensors_are_read_whole():
    base, model = small_models()
    for look in look_at_all(base, model):
        delta = read_all(model)[look.tensor.name] - read_all(base)[look.tensor.name]
        assert np.array_equal(look.values, delta)
        assert look.squares == pytest.approx(np.square(delta, dtype=np.float64).sum())


def test_a_large_tensor_is_known_from_some_places():
    weights = gaussian(1, 3, 1 << 18)
    change = 0.01 * gaussian(2, 3, 1 << 18) * np.array([[1], [2], [4]], np.float32)
    (look,) = look_at_all(source(w=weights), source(w=weights + change))
    assert look.values.size == 64 * PLACE
    assert look.squares == pytest.approx(np.square(change).sum(), rel=0.05)
    assert look.base_squares == pytest.approx(np.square(weights).sum(), rel=0.05)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_a_change_of_one_element_is_not_overlooked(dtype):
    weights = gaussian(1, 2 * CHUNK + 77).astype(dtype)
    tuned = weights.copy()
    tuned[CHUNK + 5] = 8 + weights[CHUNK + 5].astype(np.float32)
    expected = float(tuned[CHUNK + 5]) - float(weights[CHUNK + 5])
    (look,) = look_at_all(source(w=weights), source(w=tuned))
    assert look.squares == pytest.approx(expected**2)
    assert look.values.size == CHUNK
    (look,) = look_at_all(source(w=weights), source(w=weights))
    assert look.squares == 0


def test_what_is_unchanged_takes_nothing_and_counts_in_the_base():
    base, model = small_models()
    alone = choose(base, model, target_size=12_000)
    weights, extra = read_all(base), {"u": gaussian(5, 30_000)}
    larger = (source(**extra, **weights), source(**extra, **read_all(model)))
    beside = choose(*larger, target_size=12_000)
    assert (beside.scheme, beside.predicted_bytes) == (alone.scheme, alone.predicted_bytes)
    changed, unchanged = (
        sum(float(np.square(x, dtype=np.float64).sum()) for x in arrays.values())
        for arrays in (weights, extra)
    )
    expected = alone.predicted_error * math.sqrt(changed / (changed + unchanged))
    assert beside.predicted_error == pytest.approx(expected, rel=1e-5)


def test_values_that_are_not_finite_do_not_count():
    weights = gaussian(1, 1000)
    tuned = weights + 0.01 * gaussian(2, 1000)
    tuned[3] = np.nan
    (look,) = look_at_all(source(w=weights), source(w=tuned))
    assert look.values[3] == 0
    assert np.isfinite(look.squares)


def test_an_adapters_deltas_are_taken_as_they_are():
    delta = 0.01 * gaussian(2, 1000)
    stored = (STORAGE_TYPES["F32"], delta.shape, delta)
    model = ArraySource({"w": stored}, holds_deltas=True)
    (look,) = look_at_all(source(w=gaussian(1, 1000)), model)
    assert np.array_equal(look.values, delta)
