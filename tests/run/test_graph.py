"""A plan and its steps are plain data: another process can do any of them."""

from __future__ import annotations

import pickle
import subprocess
import sys
import threading

import numpy as np
import pytest
from safetensors.numpy import load_file
from small_merges import base_and_tuned

import dare
from dare.inputs.sources import hold_open
from dare.output.memory import MemorySink
from dare.run.backend import open_backend
from dare.run.engine import draw_conclusions, execute
from dare.run.worker import Conclude, Make, Merger, Observe, Survey, Worker, list_steps
from dare.tensors.chunks import CHUNK
from dare.tensors.header import TensorInfo
from helpers import write_recipe

METHODS = {
    "dare+linear": {},
    "trim+ties": {"trim": {"scope": "model"}},
    "della+slerp": {},
    "star+tsv+svc": {},
}


@pytest.fixture
def models():
    return base_and_tuned({"a.weight": (40, 30), "b.weight": (17,), "ids": (5,)}, size=0.02)


def merged(plan, **options):
    sink = MemorySink.with_room([TensorInfo(t.name, t.dtype, t.shape, 0) for t in plan.tensors])
    execute(plan, sink, **options)
    return {name: array.tobytes() for name, array in sink.arrays.items()}


@pytest.mark.parametrize("method", METHODS)
def test_a_plan_and_its_steps_survive_pickling(tmp_path, models, method):
    plan = dare.plan(write_recipe(tmp_path, *models, method=method, stages=METHODS[method]))
    assert merged(pickle.loads(pickle.dumps(plan))) == merged(plan)
    steps = list_steps(plan)
    assert pickle.loads(pickle.dumps(steps)) == steps


def test_every_kind_of_step_stands_behind_what_it_needs(tmp_path, models):
    settings = {"method": "trim+slerp", "stages": METHODS["trim+ties"]}
    steps = list_steps(dare.plan(write_recipe(tmp_path, *models, **settings)))
    assert {type(step) for step in steps} == {Observe, Conclude, Survey, Make}
    assert {step.model for step in steps if isinstance(step, Survey)} == {0, 1, None}
    ids = [step.id for step in steps]
    assert len(set(ids)) == len(ids)
    for place, step in enumerate(steps):
        assert set(step.needs) <= set(ids[:place])
    groups = [step.group for step in steps]
    assert groups == sorted(groups)


def test_what_is_done_or_known_is_no_step_any_more(tmp_path, models):
    settings = {"method": "trim+linear", "stages": METHODS["trim+ties"]}
    plan = dare.plan(write_recipe(tmp_path, *models, **settings))
    known = draw_conclusions(plan)
    left = list_steps(plan, {("a.weight", 0), ("ids", 0)}, known)
    assert [type(step) for step in left] == [Survey, Survey, Make]
    assert merged(plan, known=known) == merged(plan)


ELSEWHERE = """
import pickle, sys
from dare.output.memory import MemorySink
from dare.run.engine import execute
from dare.tensors.header import TensorInfo
plan = pickle.load(open(sys.argv[1], "rb"))
sink = MemorySink.with_room([TensorInfo(t.name, t.dtype, t.shape, 0) for t in plan.tensors])
records = execute(plan, sink)
found = {n: a.tobytes() for n, a in sink.arrays.items()}
pickle.dump((found, len(records)), open(sys.argv[2], "wb"))
"""


def test_another_process_merges_the_same_bytes_from_the_pickle(tmp_path, models):
    recipe = write_recipe(tmp_path, *models, method="dare+ties")
    plan = dare.plan(recipe)
    (tmp_path / "plan").write_bytes(pickle.dumps(plan))
    command = [sys.executable, "-c", ELSEWHERE, tmp_path / "plan", tmp_path / "result"]
    subprocess.run(command, check=True)
    found, records = pickle.loads((tmp_path / "result").read_bytes())
    assert records == 3
    dare.merge(recipe)
    assert {n: a.tobytes() for n, a in load_file(recipe.recipe.output).items()} == found


class FileLike(MemorySink):
    """Has nothing made in its place; tensors begin anywhere in a page."""

    def place(self, *_where):
        return None

    def position(self, name, offset):
        return 4 * (ord(name[0]) * 100 + offset)

    def write(self, name, offset, data):
        self.arrays[name][offset : offset + data.size] = data


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_chunks_of_several_tensors_are_merged_in_one_call(tmp_path, models, backend, monkeypatch):
    for each in (models[0], *models[1]):  # longer than a chunk
        each["c.weight"] = np.resize(each["a.weight"], CHUNK + 5)
    plan = dare.plan(write_recipe(tmp_path, *models, method="dare+ties"), backend=backend)
    sink = FileLike.with_room([TensorInfo(t.name, t.dtype, t.shape, 0) for t in plan.tensors])
    device, calls = open_backend(plan), []
    merge = device.merge
    monkeypatch.setattr(device, "merge", lambda batch: calls.append(batch) or merge(batch))
    worker = Worker(plan, device, Merger(plan, device, sink), lambda _: None, threading.Event())
    steps = tuple(list_steps(plan))
    with hold_open((plan.base, *plan.models)):
        records = list(worker.do(steps, {}))
    spans = [(chunk.tensor.name, chunk.size) for chunk, _ in calls[0]]
    assert (len(calls), spans) == (
        1,
        [("ids", 5), ("a.weight", 1200), ("b.weight", 17), ("c.weight", CHUNK + 5)],
    )
    assert len(records) == len(steps)  # those of a batch come with its first step
    made = [(record.tensor, record.chunk) for each in records for record in each]
    assert made == [(step.tensor, step.chunk) for step in steps]
    assert {name: array.tobytes() for name, array in sink.arrays.items()} == merged(plan)
