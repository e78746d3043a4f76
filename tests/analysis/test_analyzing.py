from __future__ import annotations

import dataclasses
import json
import math
import os
import pickle
import threading
import tracemalloc
from contextlib import ExitStack, contextmanager, nullcontext

import ml_dtypes
import numpy as np
import pytest
import scipy.stats

from dare.analysis import analyzing, measuring
from dare.analysis.analyzing import analyze, analyze_arrays, choose_matrices
from dare.analysis.document import Analysis
from dare.analysis.measuring import ComparedTensor
from dare.analysis.prediction import exposures_of, tolerated_drop_rate
from dare.analysis.results import Kind, Origin
from dare.checks.dropping import BIN_SHIFT
from dare.documents.shown import Display
from dare.errors import InputError, RecipeError
from dare.inputs.arrays import array_source
from dare.planning.make import LeftOut, Misfit, StoredForm
from dare.recipe.recipe import Request
from dare.tensors.chunks import CHUNK
from dare.tensors.dtypes import STORAGE_TYPES
from dare.tensors.header import TensorInfo
from helpers import save, save_shards

SHARES = (0.01, 0.05, 0.5, 0.95, 0.99)
SHAPES = {
    "model.embed_tokens.weight": (50, 24),
    "model.layers.0.self_attn.q_proj.weight": (40, 32),
    "model.layers.0.mlp.up_proj.weight": (33, 64),
    "model.layers.0.input_layernorm.weight": (37,),
    "model.layers.1.mlp.up_proj.weight": (64, 33),
    "lm_head.weight": (50, 24),
}


def weights(seed, shapes=SHAPES, size=0.02):
    generator = np.random.default_rng(seed)
    return {
        name: (size * generator.standard_normal(shape)).astype(np.float32)
        for name, shape in shapes.items()
    }


def tuned(base, seed, size=1e-3, zeros=0.2):
    generator = np.random.default_rng(seed)
    changes = {
        name: size
        * generator.standard_normal(values.shape)
        * (generator.random(values.shape) > zeros)
        for name, values in base.items()
    }
    return {name: (base[name] + changes[name]).astype(np.float32) for name in base}


def deltas(base, model):
    parts = [
        np.asarray(model[name]).astype(np.float32) - np.asarray(base[name]).astype(np.float32)
        for name in sorted(base)
        if name in model
    ]
    return np.concatenate([part.reshape(-1) for part in parts]).astype(np.float64)


def timeless(analysis):
    return dataclasses.replace(analysis, seconds=0.0)


def check_statistics(found, delta):
    magnitudes = np.abs(delta)
    assert found.elements == delta.size
    assert found.zeros == np.count_nonzero(delta == 0)
    assert found.not_finite == 0
    assert found.mean == pytest.approx(delta.mean(), abs=1e-6 * delta.std())
    assert found.std == pytest.approx(delta.std(), rel=1e-5)
    assert found.mean_magnitude == pytest.approx(magnitudes.mean(), rel=1e-5)
    assert found.norm == pytest.approx(np.linalg.norm(delta), rel=1e-5)
    assert found.largest == magnitudes.max()
    assert found.smallest == magnitudes[magnitudes > 0].min()
    assert found.excess_kurtosis == pytest.approx(scipy.stats.kurtosis(delta), rel=1e-4, abs=1e-4)
    q = found.quantiles
    expected = np.quantile(magnitudes, SHARES, method="inverted_cdf")
    np.testing.assert_allclose((q.p1, q.p5, q.p50, q.p95, q.p99), expected, rtol=0.002)
    assert found.negligible == pytest.approx(
        np.mean(magnitudes < 0.01 * magnitudes.max()), abs=3 / math.sqrt(delta.size)
    )
    assert sum(found.histogram.counts) == delta.size - found.zeros


@pytest.fixture(scope="module")
def three():
    base = weights(0)
    models = {"math": tuned(base, 1), "code": tuned(base, 2, 3e-3), "chat": tuned(base, 3, 2e-4)}
    return base, models, analyze_arrays(base, models)


def test_statistics_are_numpys(three):
    base, models, found = three
    for name, model in models.items():
        check_statistics(found.model(name).total, deltas(base, model))
        for tensor in found.model(name).tensors:
            only = {tensor.name: model[tensor.name]}
            check_statistics(tensor.statistics, deltas({tensor.name: base[tensor.name]}, only))
            norm = np.linalg.norm(base[tensor.name].astype(np.float64))
            assert tensor.statistics.base_norm == pytest.approx(norm, rel=1e-5)


def test_tensors_stand_under_their_kind_and_layer(three):
    base, models, found = three
    model = found.model("math")
    assert [tensor.name for tensor in model.tensors] == sorted(SHAPES)
    assert set(model.by_kind) == set(Kind) - {Kind.OTHER}
    assert found.layers == tuple(model.by_layer) == (-1, 0, 1)
    assert [(cell.layer, cell.kind.value) for cell in model.cells] == [
        (-1, "embedding"),
        (-1, "head"),
        (0, "attention"),
        (0, "mlp"),
        (0, "norm"),
        (1, "mlp"),
    ]
    for statistics, part in (
        (model.by_layer[0], ".layers.0."),
        (model.by_kind[Kind.MLP], ".mlp."),
        (model.cells[3].statistics, "layers.0.mlp"),
    ):
        names = [name for name in SHAPES if part in name]
        own = {name: models["math"][name] for name in names}
        check_statistics(statistics, deltas({name: base[name] for name in names}, own))


def top(delta, names, base):
    """The top 1% of each tensor, with all magnitudes in the bin of the last of them."""
    marks, start = [], 0
    for name in sorted(names):
        size = base[name].size
        part = np.abs(delta[start : start + size]).astype(np.float32)
        least = np.sort(part)[-math.ceil(0.01 * size)]
        edge = (least.view(np.uint32) >> np.uint32(BIN_SHIFT)) << np.uint32(BIN_SHIFT)
        marks.append((part.view(np.uint32) >= edge) & (part > 0))
        start += size
    return np.concatenate(marks)


def test_pairs_are_numpys(three):
    base, models, found = three
    assert [(pair.first, pair.second) for pair in found.pairs] == [
        ("math", "code"),
        ("math", "chat"),
        ("code", "chat"),
    ]
    for pair in found.pairs:
        one, other = (deltas(base, models[name]) for name in (pair.first, pair.second))
        both = (one != 0) & (other != 0)
        assert pair.total.both == np.count_nonzero(both)
        assert pair.total.agreeing == np.mean(one[both] * other[both] > 0)
        assert pair.total.conflict == pytest.approx(np.mean(one[both] * other[both] < 0))
        cosine = one @ other / np.linalg.norm(one) / np.linalg.norm(other)
        assert pair.total.cosine == pytest.approx(cosine, abs=1e-6)
        assert pair.ratio == pytest.approx(one @ other / (one @ one), rel=1e-4)
        tops = [top(delta, SHAPES, base) for delta in (one, other)]
        shared = tops[0] & tops[1]
        sizes = np.count_nonzero(tops[0]) + np.count_nonzero(tops[1])
        assert pair.total.top_overlap == 2 * np.count_nonzero(shared) / sizes
        opposed = np.count_nonzero(shared & (one * other < 0))
        assert pair.total.top_conflict == (opposed / shared.sum() if shared.any() else 0)
        assert set(pair.by_layer) == {-1, 0, 1}


def test_interference_is_numpys(three):
    base, models, found = three
    all_deltas = np.array([deltas(base, model) for model in models.values()])
    cancelled = 1 - np.abs(all_deltas.sum(axis=0)).sum() / np.abs(all_deltas).sum()
    assert found.together.cancelled == pytest.approx(cancelled, rel=1e-5)
    changed = np.count_nonzero(all_deltas, axis=0) >= 2
    mixed = (all_deltas > 0).any(axis=0) & (all_deltas < 0).any(axis=0)
    assert found.together.conflicted == np.count_nonzero(mixed) / np.count_nonzero(changed)
    names = [name for name in SHAPES if ".layers.1." in name]
    layer = np.array([deltas({n: base[n] for n in names}, m) for m in models.values()])
    expected = 1 - np.abs(layer.sum(axis=0)).sum() / np.abs(layer).sum()
    assert found.together.by_layer[1] == pytest.approx(expected, rel=1e-5)


def test_figures_by_hand():
    base = {"w": np.zeros(4, np.float32)}
    models = [{"w": np.array(v, np.float32)} for v in ([1, 2, 0, -2], [1, -2, 3, 0], [0, 2, 0, 2])]
    found = analyze_arrays(base, models)
    assert found.names == ("model 0", "model 1", "model 2")
    first, second, third = (pair.total for pair in found.pairs)
    assert (first.both, first.agreeing, first.cosine) == (2, 0.5, pytest.approx(-3 / 3 / 14**0.5))
    assert (second.both, second.agreeing) == (2, 0.5)
    assert second.cosine == pytest.approx(0)
    assert (third.both, third.agreeing) == (1, 0)
    assert found.pairs[0].ratio == pytest.approx(-3 / 9)
    # 2, 2, 3 and 0 are left of 5, 6 and 4
    assert found.together.cancelled == pytest.approx(1 - 7 / 15)
    assert found.together.conflicted == pytest.approx(2 / 3)  # elements 1 and 3 of 0, 1 and 3


LARGE = {"model.layers.0.mlp.up_proj.weight": (700, 1501)}


@pytest.fixture(scope="module")
def large():
    base = weights(4, LARGE)
    models = [tuned(base, 5), tuned(base, 6)]
    return base, models, analyze_arrays(base, models, threads=1, spectra="none")


def test_a_tensor_of_several_chunks(large):
    base, models, found = large
    assert next(iter(base.values())).size > 2 * CHUNK
    for own, model in zip(found.models, models, strict=True):
        check_statistics(own.total, deltas(base, model))
    one, other = (deltas(base, model) for model in models)
    marks = [top(delta, LARGE, base) for delta in (one, other)]
    overlap = 2 * np.count_nonzero(marks[0] & marks[1]) / sum(map(np.count_nonzero, marks))
    # 2,627 elements of each top are in the sample
    assert found.pairs[0].total.top_overlap == pytest.approx(overlap, abs=4 * (0.01 / 2627) ** 0.5)


def test_threads_do_not_change_a_figure(large, three, monkeypatch):
    base, models, found = three
    assert timeless(analyze_arrays(base, models, threads=3)) == timeless(found)
    base, models, found = large
    assert timeless(analyze_arrays(base, models, threads=3, spectra="none")) == timeless(found)
    monkeypatch.setattr(measuring, "CHUNKS_HELD", 1)  # as if there were many models
    monkeypatch.setattr(measuring, "MODELS_HELD", 1)
    again = analyze_arrays(base, models, spectra="none")
    assert again.bytes_read == 2 * found.bytes_read
    assert timeless(dataclasses.replace(again, bytes_read=found.bytes_read)) == timeless(found)


def test_chunks_are_added_in_their_order(large):
    base, models, _ = large
    request = Request.of(base="base", models=["one", "other"], verbose=False)
    sources = {name: array_source(model, name) for name, model in zip("ab", models, strict=True)}
    plan = analyzing.plan_measuring(array_source(base, "base"), sources, request)
    (tensor,) = plan.tensors.values()
    worker = measuring.Measurer(plan, measuring.Tally(), print, threading.Event())
    chunks = [worker._measure(tensor, number) for number in range(3)]
    forth, back = measuring.Tally(), measuring.Tally()
    found = [forth.add(tensor, number, chunks[number]) for number in (0, 1, 2)]
    again = [back.add(tensor, number, chunks[number]) for number in (1, 2, 0)]
    assert found[:2] == again[:2] == [None, None]
    assert found[2].sums == again[2].sums == (chunks[0] + chunks[1] + chunks[2]).sums
    assert [len(part) for part in again[2].samples] == [len(part) for part in found[2].samples]


def test_sixteen_models_take_no_more_memory_than_eight(large):
    base, models, _ = large
    peaks = []
    for count in (4, 8):
        tracemalloc.start()
        analyze_arrays(base, models * count, threads=1, spectra="none")
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.1 * peaks[0]  # it was 1.9 times as much


def test_the_top_of_equal_models_is_the_same(large):
    base, models, _ = large
    (pair,) = analyze_arrays(base, [models[0], models[0]], spectra="none").pairs
    assert (pair.total.top_overlap, pair.total.top_conflict) == (1, 0)
    assert pair.total.cosine == pytest.approx(1)
    assert pair.ratio == pytest.approx(1)
    opposite = {name: 2 * base[name] - models[0][name] for name in base}
    (pair,) = analyze_arrays(base, [models[0], opposite], spectra="none").pairs
    assert pair.total.top_overlap > 0.99
    assert pair.total.top_conflict == 1
    assert pair.total.cosine == pytest.approx(-1)


def check_pair(found, base, models):
    """Check what two models have in common, by NumPy."""
    one, other = (deltas(base, model) for model in models)
    for own, delta in zip(found.models, (one, other), strict=True):
        check_statistics(own.total, delta)
    cosine = one @ other / np.linalg.norm(one) / np.linalg.norm(other)
    assert found.pairs[0].total.cosine == pytest.approx(cosine, abs=1e-6)
    both = np.abs(one + other).sum() / (np.abs(one).sum() + np.abs(other).sum())
    assert found.together.cancelled == pytest.approx(1 - both, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize(
    "kind",
    [np.float64, np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2],
    ids=lambda kind: np.dtype(kind).name,
)
def test_storage_types(kind):
    shape = {"w": (1000,)}
    base = {"w": weights(7, shape, 1.0)["w"].astype(kind)}
    wide = {"w": base["w"].astype(np.float32) + weights(8, shape, 0.2)["w"]}
    models = [{"w": wide["w"].astype(kind)}, wide]
    found = analyze_arrays(base, models)
    check_pair(found, base, models)
    assert list(found.models[0].dtypes.values()) == [1000]
    assert found.models[1].dtypes == {"F32": 1000}


@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_sizes_far_from_the_usual(size):
    base = {"w": np.zeros(500, np.float32)}
    models = [weights(seed, {"w": (500,)}, size) for seed in (1, 2)]
    check_pair(analyze_arrays(base, models), base, models)


def test_what_is_not_finite_is_counted_and_left_out():
    base = {"w": np.array([0, 0, 0, np.nan, 0, 2], np.float32)}
    model = {"w": np.array([3, np.nan, -np.inf, 0, -4, 2], np.float32)}
    other = {"w": np.array([3, 1, 1, 1, 1, 2], np.float32)}
    found = analyze_arrays(base, [model, other])
    total = found.models[0].total
    assert (total.elements, total.not_finite, total.zeros) == (6, 3, 1)
    assert (total.norm, total.mean, total.largest) == (5, pytest.approx(-1 / 3), 4)
    assert total.base_norm == 2
    pair = found.pairs[0].total
    assert (pair.both, pair.agreeing) == (2, 0.5)
    assert found.models[1].total.not_finite == 1


def test_empty_and_scalar_tensors():
    base = {"none": np.zeros((0, 5), np.float32), "one": np.float32(2), "w": np.ones(3, np.float32)}
    model = {**base, "one": np.float32(5)}
    found = analyze_arrays(base, [model, model])
    shapes = {tensor.name: tensor.shape for tensor in found.models[0].tensors}
    assert shapes == {"none": (0, 5), "one": (), "w": (3,)}
    total = found.models[0].total
    assert (total.elements, total.zeros, total.largest, total.norm) == (4, 3, 3, 3)
    assert found.pairs[0].total.both == 1


def test_a_model_that_is_the_base():
    base = weights(0)
    found = analyze_arrays(base, {"same": base, "other": tuned(base, 1)})
    same = found.model("same")
    assert (same.origin, same.likely_rank) == (Origin.UNCHANGED, None)
    assert (same.total.sparsity, same.total.norm, same.total.std) == (1, 0, 0)
    assert all(tensor.spectrum is None for tensor in same.tensors)
    pair = found.pairs[0]
    assert (pair.total.cosine, pair.total.both, pair.total.agreeing, pair.ratio) == (0, 0, 0, 0)
    assert (pair.total.conflict, pair.total.top_overlap) == (0, 0)
    assert found.together.cancelled == 0


def test_what_does_not_fit_is_left_out():
    base = {
        "a": np.ones(3, np.float32),
        "b": np.ones((2, 3), np.float32),
        "ids": np.arange(4),
        "kept": np.ones(2, np.float32),
        "lost": np.ones(2, np.float32),
    }
    base |= {"steps": np.array([3, 3]), "table": np.arange(4)}
    math_model = {**base, "a": np.ones(4, np.float32), "new": np.ones(1, np.float32)}
    code_model = {**base, "b": np.ones((2, 3), np.int32), "a": 2 * base["a"]}
    code_model |= {"steps": np.array([3, 4]), "table": np.arange(5)}
    del math_model["lost"], code_model["lost"]
    found = analyze_arrays(base, {"math": math_model, "code": code_model})
    assert Analysis.from_json(found.to_json()).left_out == found.left_out
    unlike, counted = Misfit.UNLIKE_BASE, Misfit.NOT_WEIGHTS
    sizes, types, pair = ((3,), "F32"), ((2, 3), "F32"), StoredForm((2,), "I64")
    assert found.left_out[:2] == (
        LeftOut("a", unlike, ("math",), StoredForm(*sizes), StoredForm((4,), "F32")),
        LeftOut("b", unlike, ("code",), StoredForm(*types), StoredForm((2, 3), "I32")),
    )
    assert found.left_out[3] == LeftOut("steps", counted, ("code",), pair, pair)
    assert [(each.tensor, each.reason, each.models) for each in found.left_out[2:]] == [
        ("ids", counted, ("math", "code")),
        ("steps", counted, ("code",)),
        ("table", unlike, ("code",)),
        ("table", counted, ("math",)),
        ("new", Misfit.NOT_IN_BASE, ("math",)),
    ]
    assert [t.name for t in found.model("math").tensors] == ["b", "kept"]
    assert [t.name for t in found.model("code").tensors] == ["a", "kept"]
    assert found.model("math").missing == found.model("code").missing == ("lost",)
    assert found.base_dtypes == {"F32": 13, "I64": 10}


ONES = {"w": np.ones(1, np.float32)}


@pytest.mark.parametrize(
    ("error", "match", "models", "settings"),
    [
        (InputError, "y: in model 0", [{"y": np.ones(1, np.float32)}], {}),
        (RecipeError, "no models", [], {}),
        (RecipeError, "spectra = 'some'", [ONES], {"spectra": "some"}),
        (RecipeError, "max_memory = 1.0 MB", [ONES], {"max_memory": "1MB"}),
        (RecipeError, "threads", [ONES], {"threads": 0}),
    ],
)
def test_what_makes_no_sense_is_refused(error, match, models, settings):
    with pytest.raises(error, match=match):
        analyze_arrays(ONES, models, **settings)


def test_a_file_that_is_not_there_is_named(tmp_path):
    base = save(tmp_path / "b.safetensors", ONES)
    with pytest.raises(InputError, match=r"absent\.safetensors"):
        analyze(base, [tmp_path / "absent.safetensors"], verbose=False)


# ---------------------------------------------------------------- spectra


def subject(name, rows, columns, kind=Kind.MLP, layer=0):
    info = TensorInfo(name, STORAGE_TYPES["BF16"], (rows, columns), 0)
    return ComparedTensor(info, kind, layer, (0, 1))


def test_cheap_matrices_are_taken_whole():
    subjects = [
        subject("a", 384, 1536),
        subject("thin", 31, 400),
        subject("e", 30000, 384, Kind.EMBEDDING),
    ]
    assert choose_matrices(subjects, "auto", 1 << 30) == {"a": True}
    assert choose_matrices(subjects, "all", 1 << 30) == {"a": True, "e": True}
    assert choose_matrices(subjects, "all", 1 << 20) == {"a": False, "e": False}
    assert choose_matrices(subjects, "none", 1 << 30) == {}
    assert choose_matrices(subjects[1:2], "auto", 1 << 30) == {}
    assert choose_matrices(subjects[2:], "auto", 1 << 30) == {"e": True}


def test_of_many_large_matrices_a_few_windows_are_taken():
    subjects = [
        subject(f"h.{layer}.{part}", 4096, 4096, layer=layer)
        for layer in range(80)
        for part in ("k", "o", "q", "v")
    ]
    chosen = choose_matrices(subjects, "auto", 1 << 30)
    assert set(chosen.values()) == {False}
    assert 20 < len(chosen) < 100
    layers = sorted(int(name.split(".")[1]) for name in chosen)
    assert max(np.diff([-1, *layers, 80])) <= 4
    assert {name[-1] for name in chosen} == {"k", "o", "q", "v"}


def test_a_window_sees_the_rank_of_a_large_matrix():
    generator = np.random.default_rng(0)
    base = {"h.0.attn.w": (0.02 * generator.standard_normal((1100, 600))).astype(np.float32)}
    left, right = generator.standard_normal((1100, 5)), generator.standard_normal((5, 600))
    model = {"h.0.attn.w": (base["h.0.attn.w"] + 1e-3 * left @ right).astype(np.float32)}
    found = [
        analyze_arrays(base, [model], spectra="all", max_memory=memory).models[0]
        for memory in (1 << 30, 20_000_000)
    ]
    shapes = [(t.spectrum.rows, t.spectrum.columns) for m in found for t in m.tensors]
    assert shapes == [(1100, 600), (1024, 256)]
    assert [(model.origin, model.likely_rank) for model in found] == [(Origin.LORA, 5)] * 2


def test_a_full_change_and_a_model_too_small_to_tell():
    base = weights(0)
    assert analyze_arrays(base, [tuned(base, 1)]).models[0].origin is Origin.FULL
    small = {"w": np.zeros((8, 8), np.float32)}
    changed = {"w": np.ones((8, 8), np.float32)}
    assert analyze_arrays(small, [changed]).models[0].origin is Origin.UNKNOWN


# ---------------------------------------------------------------- files


def test_files_shards_and_arrays_give_the_same(tmp_path, three):
    base, models, found = three
    shards = save_shards(tmp_path / "base", base, 3)
    files = [save(tmp_path / f"{name}.safetensors", model) for name, model in models.items()]
    analysis = analyze(shards, files, verbose=False)
    assert analysis.names == found.names
    assert analysis.base == str(shards)
    assert [model.file for model in analysis.models] == list(map(str, files))
    assert analysis.bytes_read > 4 * 4 * 7941
    assert analysis.seconds > 0
    strip = {"base": "", "models": ()}
    assert dataclasses.replace(timeless(analysis), **strip) == dataclasses.replace(
        timeless(found), **strip
    )
    for one, other in zip(analysis.models, found.models, strict=True):
        assert dataclasses.replace(one, file="") == dataclasses.replace(other, file="")
    assert Analysis.from_json(analysis.to_json()) == analysis


class Here:
    """What stands for the cluster: every piece is pickled, and done by a task of its own."""

    task_memory = 1 << 28

    def size_tasks(self, *_limits):
        return 1

    def run(self, job, pieces):
        for piece in pieces:
            with ExitStack() as stack:
                do = pickle.loads(pickle.dumps(job)).open(stack)
                yield ("id", "here"), *pickle.loads(pickle.dumps(do(piece, None)))


def test_tasks_of_a_cluster_find_the_same_figures(tmp_path, three, monkeypatch):
    base, models, _ = three
    base_file = save(tmp_path / "base.safetensors", base)
    files = [save(tmp_path / f"{name}.safetensors", model) for name, model in models.items()]
    found = analyze(base_file, files, verbose=False)
    monkeypatch.setattr(analyzing, "connect", lambda *_, **__: nullcontext(Here()))
    monkeypatch.setattr(analyzing, "PIECE_BYTES", 1)
    again = analyze(base_file, files, cluster="auto", verbose=False)
    assert timeless(again) == timeless(found)


@pytest.mark.parametrize("where", [{}, {"cluster": "auto"}])
def test_inputs_that_change_meanwhile_are_refused(tmp_path, three, monkeypatch, where):
    base, models, _ = three
    base_file = save(tmp_path / "base.safetensors", base)
    file = save(tmp_path / "math.safetensors", models["math"])
    complete = measuring.Measurer._complete

    def change(*given):
        os.utime(file, (1, 1))
        return complete(*given)

    monkeypatch.setattr(measuring.Measurer, "_complete", change)
    monkeypatch.setattr(analyzing, "connect", lambda *_, **__: nullcontext(Here()))
    with pytest.raises(InputError, match=r"math\.safetensors.*changed"):
        analyze(base_file, [file], verbose=False, **where)


@pytest.mark.parametrize("spectra", ["none", "auto"])
def test_progress_ends_at_what_was_promised(three, monkeypatch, spectra):
    base, models, _ = three
    promised, seen = [], []

    @contextmanager
    def watched(total, verb, *, visible):
        promised.append((total, verb, visible))
        yield Display(seen.append, print)

    monkeypatch.setattr(analyzing, "show_progress", watched)
    found = analyze_arrays(base, models, spectra=spectra)
    assert promised == [(found.bytes_read, "analysing", False)]
    assert sum(seen) == found.bytes_read
    once = 4 * 4 * 7941
    assert found.bytes_read == once if spectra == "none" else found.bytes_read > once


def save_adapter(folder, factors, alpha):
    """A LoRA of rank 4, of the factors A and B of each module."""
    tensors = {
        f"base_model.model.{name}.lora_{letter}.weight": factor
        for name, both in factors.items()
        for letter, factor in zip("AB", both, strict=True)
    }
    save(folder / "adapter_model.safetensors", tensors)
    modules = sorted({name.rpartition(".")[2] for name in factors})
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": alpha, "target_modules": modules}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def test_an_adapter_and_its_merged_model_are_judged_alike(tmp_path):
    stem = "model.layers.{}.self_attn.{}_proj"
    shapes = {f"{stem.format(n, each)}.weight": (96, 64) for n in range(3) for each in "qkv"}
    base = weights(0, shapes | {"model.embed_tokens.weight": (300, 64), "model.norm.weight": (64,)})
    generator, factors, merged = np.random.default_rng(1), {}, dict(base)
    for name in [stem.format(number, each) for number in range(2) for each in "qv"]:
        a, b = (0.02 * generator.standard_normal(s, np.float32) for s in ((4, 64), (96, 4)))
        factors[name] = (a, b)
        merged[f"{name}.weight"] = base[f"{name}.weight"] + 2 * b @ a
    files = [save(tmp_path / f"{n}.safetensors", m) for n, m in (("b", base), ("m", merged))]
    models = [save_adapter(tmp_path / "adapter", factors, alpha=8), files[1]]
    both = analyze(files[0], models, verbose=False)
    adapter, whole = both.models
    alone = analyze(files[0], models[:1], verbose=False).models[0]
    assert (adapter.is_adapter, whole.is_adapter) == (True, False)
    assert (adapter.origin, adapter.likely_rank) == (Origin.LORA, 4)
    assert adapter.missing == tuple(sorted(base.keys() - {f"{name}.weight" for name in factors}))
    assert both.pairs[0].total.cosine == pytest.approx(1, abs=1e-6)
    assert adapter.total.norm == pytest.approx(np.linalg.norm(deltas(base, merged)), rel=1e-5)
    norm = np.linalg.norm(np.concatenate([each.reshape(-1) for each in base.values()]))
    assert adapter.total.base_norm == pytest.approx(norm, rel=1e-5)
    for found in (adapter, alone):
        assert found.total.relative_norm == pytest.approx(whole.total.relative_norm, rel=1e-5)
        assert found.total.elements == whole.total.elements
        assert found.total.mean_magnitude == pytest.approx(whole.total.mean_magnitude, rel=1e-4)
        for layer, statistics in whole.by_layer.items():
            assert found.by_layer[layer].relative_norm == pytest.approx(
                statistics.relative_norm, rel=1e-5
            )
        assert tolerated_drop_rate(exposures_of(found)) == tolerated_drop_rate(exposures_of(whole))
        assert (found.origin, found.likely_rank) == (whole.origin, whole.likely_rank)


@pytest.mark.parametrize(("config", "tied"), [(True, ("model.embed_tokens.weight",)), (False, ())])
def test_tied_embeddings_are_named(tmp_path, config, tied):
    base = {name: values for name, values in weights(0).items() if name != "lm_head.weight"}
    save(tmp_path / "base" / "model.safetensors", base)
    (tmp_path / "base" / "config.json").write_text(json.dumps({"tie_word_embeddings": config}))
    model = save(tmp_path / "m.safetensors", tuned(base, 1))
    assert analyze(tmp_path / "base", [model], verbose=False).tied == tied
