"""Stretches of chunks that are stored together: whole, interrupted, in slices, damaged."""

from __future__ import annotations

import contextlib
import itertools
import pickle
import tracemalloc

import ml_dtypes
import numpy as np
import pytest
from encoding import code_of, encoded, write_model
from encoding import stored as read
from hypothesis import given
from hypothesis import strategies as st

import dare
from dare.formats.quantised import Fp8, Mxfp4
from dare.formats.recoding import in_pieces
from dare.planning.slices import Division
from dare.run.cluster import MergeJob
from dare.run.engine import open_output
from dare.run.merging import Merge
from dare.run.worker import list_steps
from dare.tensors.chunks import CHUNK
from helpers import listing

E4M3 = ml_dtypes.float8_e4m3fn
NAME = "model.layers.0.mlp.down_proj.weight"
EXPERTS = "model.layers.0.mlp.experts.down_proj"
# For each kind the chunks of each stretch of its tensor. A band of 128 rows of 96 has 3 · 2¹²
# elements, so 3 chunks have whole ones; an expert of 640 × 640 divides no fewer than all.
KINDS = {"block": [3, 1], "rows": [1, 1, 1], "one": [4], "experts": [3]}
NAMES = {kind: EXPERTS if kind == "experts" else NAME for kind in KINDS}
SCALES = {"block": (157, 1), "rows": (20_000, 1), "one": ()}


def tensors(kind, seed):
    generator = np.random.default_rng(seed)
    if kind == "experts":
        blocks = generator.integers(0, 256, (3, 640, 20, 16), np.uint8)
        scales = generator.integers(118, 122, blocks.shape[:3], np.uint8)
        return {f"{EXPERTS}_blocks": blocks, f"{EXPERTS}_scales": scales}
    values = generator.normal(size=(20_000, 64 if kind == "rows" else 96)).astype(np.float32)
    scales = generator.uniform(0.001, 0.01, SCALES[kind])
    return {NAME: values.astype(E4M3), f"{NAME}_scale_inv": np.asarray(scales, np.float32)}


def write(folder, kind, seed):
    is_experts = kind == "experts"
    model_type, method = ("gpt_oss", "mxfp4") if is_experts else ("llama", "fp8")
    given = {"model_type": model_type, "layers": 1, "quant_method": method}
    return write_model(folder, tensors(kind, seed), **given)


@pytest.fixture(scope="module", params=KINDS)
def case(request, tmp_path_factory):
    """A kind of tensor, its inputs, the bytes that a merge gives, and its report."""
    kind, folder = request.param, tmp_path_factory.mktemp(request.param)
    models = [write(folder / str(seed), kind, seed) for seed in range(2)]
    report = merge(models, folder / "expected")
    return kind, models, (folder / "expected" / "model.safetensors").read_bytes(), report


def asked(models, output, **more):
    given = {"base": models[0], "models": models[1:], "output": output, "format": "input"}
    return {**given, "method": "linear", "verbose": False, **more}


def merge(models, output, **more):
    return dare.merge(**asked(models, output, **more))


def test_stretches_are_as_short_as_units_allow(case, tmp_path):
    kind, models, _, _ = case
    steps = [s for s in list_steps(dare.plan(**asked(models, tmp_path))) if s.tensor == NAMES[kind]]
    assert [-(-step.elements // CHUNK) for step in steps] == KINDS[kind]


def test_the_bytes_are_those_of_the_merged_tensor_stored_as_a_whole(case, tmp_path):
    kind, models, expected, report = case
    plain = merge(models, tmp_path / "plain", format=None)
    assert report.digests.output == plain.digests.output
    values = read(tmp_path / "plain" / "model.safetensors")[NAMES[kind]]
    code = Mxfp4() if kind == "experts" else Fp8(code_of(tensors(kind, 0), NAME), False)
    loss, stored = encoded(code, values, NAMES[kind])
    (tmp_path / "found.safetensors").write_bytes(expected)
    found = read(tmp_path / "found.safetensors")
    assert {n: found[n].tobytes() for n in stored} == {n: a.tobytes() for n, a in stored.items()}
    (merged,) = report.recoded.tensors.values()
    assert merged.error == pytest.approx(loss.error, rel=1e-9)
    assert merged.largest == loss.largest


def test_a_tensor_with_one_scale_is_read_twice_and_others_once(case):
    kind, models, _, report = case
    times = 2 if kind == "one" else 1
    plain = dare.plan(**asked(models, None))
    coded = dare.plan(**asked(models, models[0].parent / "x"))
    assert (plain.cost.passes, coded.cost.passes) == (1, times)
    assert report.bytes_read == coded.cost.bytes_read == times * plain.cost.bytes_read


def test_storing_takes_the_memory_that_the_plan_says(case, tmp_path):
    kind, models, _, _ = case
    plan = dare.plan(**asked(models, tmp_path / "out"))
    tensor = next(t for t in plan.tensors if t.name == NAMES[kind])
    values = np.random.default_rng(0).normal(size=tensor.elements).astype(tensor.dtype.numpy_type)
    raw = values.view(tensor.dtype.carrier)
    chunks = [raw[start : start + CHUNK] for start in range(0, raw.size, CHUNK)]

    def read(size):
        return zip(itertools.count(0, size), in_pieces(chunks, size), strict=False)

    tracemalloc.start()
    plan.recoding.encode(tensor.described, read, lambda *_given: None)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    said = plan.recoding.unit(tensor.described).work_bytes
    assert said / 3 < peak < said
    plain = dare.plan(**asked(models, tmp_path / "out", format=None))
    assert plan.cost.least_memory - plain.cost.least_memory == said


@pytest.mark.parametrize("puts", [0, 1, 2, 5, 9])
def test_an_interrupted_stretch_is_made_again(case, tmp_path, monkeypatch, puts):
    _, models, expected, report = case
    output, left = tmp_path / "out", iter(range(puts))
    write_bytes = dare.output.sink.FileSink.write

    def fails(self, *given):
        if next(left, None) is None:
            raise KeyboardInterrupt
        write_bytes(self, *given)

    with monkeypatch.context() as patch:
        patch.setattr(dare.output.sink.FileSink, "write", fails)
        with contextlib.suppress(KeyboardInterrupt):  # there may be fewer
            merge(models, output, threads=1)
            assert puts == 9
            return
    assert not output.exists()
    again = merge(models, output)
    assert again.recoded == report.recoded
    assert (output / "model.safetensors").read_bytes() == expected


def test_a_damaged_stretch_is_made_again_and_only_that(case, tmp_path, monkeypatch):
    kind, models, expected, report = case
    output, chunks = tmp_path / "out", sum(KINDS[kind])

    def fails(*_given, **_settings):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(dare.output.output, "give_name", fails)
        with pytest.raises(KeyboardInterrupt):
            merge(models, output)
    file = tmp_path / "out.partial" / "model.safetensors"
    with file.open("r+b") as opened:
        place = len(expected) // 2  # among the codes of the longest stretch, or of one of all
        opened.seek(place)
        opened.write(bytes([expected[place] ^ 1]))
    again = merge(models, output)
    assert (output / "model.safetensors").read_bytes() == expected
    assert again.resumed_chunks == chunks - max(KINDS[kind])
    assert again.recoded == report.recoded


@pytest.mark.parametrize("count", [2, 7])
def test_slices_have_whole_stretches(case, tmp_path, count):
    kind, models, expected, report = case
    request = asked(models, tmp_path / "out")
    done = [dare.merge_slice(request, f"{number}/{count}") for number in range(1, count + 1)]
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == expected
    assert done[-1].report.recoded == report.recoded
    assert len([slice_ for slice_ in done if slice_.chunks]) <= len(KINDS[kind])
    assert [path for path in listing(tmp_path) if "partial" in path] == []


def test_nodes_of_a_cluster_make_whole_stretches(case, tmp_path):
    """The part of a node, without Ray: it gets plain data, and writes into the partial output."""
    kind, models, expected, report = case
    plan = dare.plan(**asked(models, tmp_path / "out"))
    with open_output(Merge(plan)) as output, contextlib.ExitStack() as stack:
        work = pickle.loads(pickle.dumps(MergeJob.of(plan, output.folder, 1 << 28)))
        run = work.open(stack)
        shares = [share for share in Division(plan, 5).shares() if share]
        for share in shares:
            output.record(run(share, {})[0])
    assert len(shares) <= len(KINDS[kind])
    found = dare.merge(plan)
    assert (found.resumed_chunks, found.recoded) == (sum(KINDS[kind]), report.recoded)
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == expected


@given(st.lists(st.integers(0, 9), max_size=6), st.integers(1, 12))
def test_pieces_are_those_of_the_whole(sizes, size):
    whole = np.arange(sum(sizes))
    ends = np.cumsum([0, *sizes])
    arrays = (whole[a:b].copy() for a, b in itertools.pairwise(ends))
    found = [piece.tolist() for piece in in_pieces(arrays, size)]
    assert found == [whole[n : n + size].tolist() for n in range(0, whole.size, size)]
