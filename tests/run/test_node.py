"""A node's work without a cluster: jobs opened again, bundles, and what is refused."""

from __future__ import annotations

import pickle
from dataclasses import replace

import numpy as np
import pytest

import dare
from dare.errors import InputError, OutputError, RecipeError
from dare.output.manifest import embedded_manifest, fingerprint, metadata_of
from dare.output.writer import PartialOutput
from dare.run.cluster import _named
from dare.run.graph import Copy, Merge, Step, list_steps
from dare.run.merge_job import MergeJob
from dare.run.node import Bundle, Node, bundle
from dare.run.schedule import Schedule
from dare.run.sightings import with_absolute_paths
from dare.tensors.chunks import CHUNK
from helpers import save, write_recipe

SHAPES = {"a": (3, CHUNK // 2), "b": (40, 50), "count": (4,)}


@pytest.fixture
def recipe(tmp_path):
    generator = np.random.default_rng(0)
    base = {name: generator.standard_normal(shape, np.float32) for name, shape in SHAPES.items()}
    base["count"] = np.arange(4)
    tuned = [
        {name: values + (name != "count") * np.float32(n / 64) for name, values in base.items()}
        for n in (1, 2)
    ]
    for model in tuned:
        model["count"] = base["count"]
    return write_recipe(tmp_path, base, tuned)


def partial(plan):
    metadata = metadata_of(embedded_manifest(plan))
    output = PartialOutput(plan.layout, metadata, fingerprint(plan), plan.stamps)
    return output, metadata


def opened(job, threads=1):
    node = Node()
    _, mark = node.open(pickle.loads(pickle.dumps(job)), threads)
    job.confirm(mark)
    return node


@pytest.mark.parametrize("method", ["dare+linear", "trim+ties", "tsv"])
@pytest.mark.parametrize("together", [False, True])
def test_two_nodes_write_what_a_merge_writes(recipe, method, together, monkeypatch):
    recipe = recipe.model_copy(update={"method": method})
    dare.merge(recipe)
    expected = recipe.output.read_bytes()
    recipe.output.unlink()
    plan = dare.plan(recipe)
    monkeypatch.chdir(recipe.output.parent)  # nodes are elsewhere
    output, metadata = partial(plan)
    with output:
        job = MergeJob.of(plan, output.folder, metadata)
        nodes = [opened(job), opened(job)]
        steps = list_steps(plan)
        if together:
            steps = bundle(steps, lambda step: step.group or None)
            assert any(isinstance(step, Bundle) for step in steps)
        schedule = Schedule(steps)
        while (batch := schedule.take_now(CHUNK)) is not None:
            nodes.reverse()
            done = nodes[0].run(pickle.loads(pickle.dumps(batch)))
            schedule.hand_in(batch, done.results)
            assert done.nbytes or not any(step.elements for step in batch.steps)
        assert schedule.is_done
        for node in nodes:
            node.finish()
        (written,) = output.folder.glob("*.safetensors")
        header = 8 + int.from_bytes(expected[:8], "little")
        assert written.read_bytes()[header:] == expected[header:]
        assert not list(output.folder.glob("node-*"))


def test_a_bundle_keeps_what_only_its_steps_need_to_itself(recipe):
    recipe = recipe.model_copy(update={"method": "trim+ties"})
    plan = dare.plan(recipe)
    steps = bundle(list_steps(plan), lambda step: step.group or None)
    copy, first, _ = steps
    assert isinstance(copy, Copy)
    assert first.needs == ()
    assert first.elements == sum(step.elements for step in first.steps)
    output, metadata = partial(plan)
    with output:
        node = opened(MergeJob.of(plan, output.folder, metadata))
        schedule = Schedule(steps)
        batch = schedule.take_now(1)
        while batch.steps[0] is not first:
            batch = schedule.take_now(1)
        (results,) = node.run(batch).results
    kept = [step for step, result in zip(first.steps, results, strict=True) if result is not None]
    assert kept
    assert {type(step) for step in kept} == {Merge}
    assert [step for step in first.steps if isinstance(step, Merge)] == kept


def test_steps_without_a_key_stay_alone():
    steps = [Step((n,), (), n % 2, 1) for n in range(4)]
    first, joined, last = bundle(steps, lambda step: step.group or None)
    assert (first, last) == (steps[0], steps[2])
    assert joined.steps == (steps[1], steps[3])


def test_a_node_refuses_another_input(recipe):
    plan = dare.plan(recipe)
    output, metadata = partial(plan)
    with output:
        job = MergeJob.of(plan, output.folder, metadata)
        file = recipe.models[1].file
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
        with pytest.raises(InputError, match=r"model1\.safetensors: is another file here.*differs"):
            Node().open(job, 1)
        save(file, {"a": np.zeros(4, np.float32)})
        with pytest.raises(Exception, match="model1"):
            Node().open(job, 1)
        file.unlink()
        with pytest.raises(InputError, match=r"model1\.safetensors: no such file"):
            Node().open(job, 1)


def test_a_node_refuses_another_plan(recipe):
    plan = dare.plan(recipe)
    output, metadata = partial(plan)
    with output:
        job = MergeJob.of(plan, output.folder, metadata)
        other = replace(job, recipe=job.recipe.model_copy(update={"seed": 7}))
        with pytest.raises(InputError, match="the plan is another one here"):
            Node().open(other, 1)


def test_a_node_needs_the_files_that_the_driver_made(recipe, tmp_path):
    plan = dare.plan(recipe)
    output, metadata = partial(plan)
    with output:
        job = MergeJob.of(plan, output.folder, metadata)
        with pytest.raises(OutputError, match=r"nowhere: cannot be written: No such file"):
            Node().open(replace(job, folder=tmp_path / "nowhere"), 1)


def test_a_mark_that_does_not_arrive_is_another_folder(recipe, tmp_path):
    plan = dare.plan(recipe)
    output, metadata = partial(plan)
    with output:
        job = MergeJob.of(plan, output.folder, metadata)
        with pytest.raises(OutputError, match="is another folder there"):
            job.confirm("node-0123")
        (output.folder / "node-0123").write_text("node-4567")
        with pytest.raises(OutputError, match="is another folder there"):
            job.confirm("node-0123")
        (output.folder / "node-89").touch()
        job.clear_up()
        assert not list(output.folder.glob("node-*"))


def test_an_error_keeps_its_kind_and_names_the_node():
    found = _named("10.0.0.3", InputError("x.safetensors: no such file"))
    assert type(found) is InputError
    assert str(found) == "node 10.0.0.3: x.safetensors: no such file"
    assert str(_named("10.0.0.3", KeyError("x"))) == "node 10.0.0.3: KeyError: 'x'"


def test_arrays_are_not_merged_on_a_cluster():
    base = {"w": np.zeros(4, np.float32)}
    with pytest.raises(RecipeError, match='cluster = "auto": only merges of files into files'):
        dare.merge_arrays(base, [base], cluster="auto", verbose=False)


def test_the_cluster_is_no_part_of_what_a_merge_is(recipe):
    shared = recipe.model_copy(update={"cluster": "auto", "cluster_log": "x.jsonl"})
    assert fingerprint(dare.plan(shared)) == fingerprint(dare.plan(recipe))
    repeated = recipe.model_copy(update={"output_digest": "0" * 32})
    assert repeated.model_copy(update={"cluster": "auto"}).output_digest == "0" * 32


def test_outputs_in_stores_are_refused_before_anything_is_written(recipe):
    given = {"output": "s3://bucket/merged.safetensors", "cluster": "auto"}
    with pytest.raises(RecipeError, match='cluster = "auto": nodes write to a file system'):
        dare.merge(recipe.model_copy(update=given))


def test_a_recipe_with_inputs_in_a_store_can_be_sent(recipe):
    stored = recipe.model_copy(update={"base": "s3://bucket/base.safetensors"})
    sent = pickle.loads(pickle.dumps(with_absolute_paths(stored)))
    assert sent == stored
    assert type(sent.base) is type(stored.base)
