"""A merge on two nodes of Ray, one of which is killed; and what a task does, without Ray."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from small_merges import base_and_tuned

import dare
from dare.errors import ClusterError, InputError, OutputError, RecipeError
from dare.planning.slices import Division
from dare.run.cluster import MergeJob, _check_arrival, _conclude, task_request
from dare.run.engine import open_output
from dare.run.merging import Merge
from dare.tensors.chunks import CHUNK
from helpers import save, sha256, wait_until, write_recipe

SOURCES = Path(dare.__file__).parents[1]
LOCAL = Path(__file__).parents[1] / "cluster" / "local.py"
ENVIRONMENT = {
    "PYTHONPATH": str(SOURCES),
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # else 127.0.0.1 is taken for the real address
    "RAY_USAGE_STATS_ENABLED": "0",
}
SLOW_STAGE = """
import os, time
from pathlib import Path
from dare.stages.blocks import Block
from dare.stages.registry import delta_stage

@delta_stage()
def slow(block: Block) -> None:
    '''Leave a mark, and wait in the middle of the merge until it may go on.'''
    place = Path({place!r})
    (place / f"{{os.getpid()}}-{{time.time_ns()}}").touch()
    while len(list(place.iterdir())) > {free} and not (place / "go").exists():
        time.sleep(0.02)
    block.values[:] *= 0.5
"""


# ---------------------------------------------------------------- two nodes, one killed


class Nodes:
    """Two nodes on loopback, which end with the test whatever happens."""

    def __enter__(self) -> Nodes:
        self._folder = tempfile.mkdtemp(prefix="ray-")  # short: it is part of sockets' names
        self.environment = os.environ | ENVIRONMENT | {"RAY_TMPDIR": self._folder}
        self._process = subprocess.Popen(
            [sys.executable, LOCAL, "2"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=self.environment,
            text=True,
        )
        try:
            found = json.loads(self._process.stdout.readline())
        except ValueError:
            self.__exit__()
            raise
        self.address, self.raylets = found["address"], found["raylets"]
        return self

    def __exit__(self, *_error: object) -> None:
        self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
        for process in self.processes():
            os.kill(process, signal.SIGKILL)
        self._process.wait()
        self._process.stdout.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def processes(self) -> list[int]:
        """All that has to do with these nodes: it has inherited the folder's name."""
        mark, found = self._folder.encode(), []
        for place in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):  # it has ended
                if mark in place.read_bytes():
                    found.append(int(place.parent.name))
        return found

    def listening(self) -> set[str]:
        """The addresses that these processes listen on, as the system writes them."""
        sockets = set()
        for process in self.processes():
            for file in Path(f"/proc/{process}/fd").glob("*"):
                with suppress(OSError):
                    sockets.add(str(file.readlink()))
        found = set()
        for table in ("tcp", "tcp6"):
            for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
                _, local, _, state, *_, inode = line.split()[:10]
                if state == "0A" and f"socket:[{inode}]" in sockets:
                    found.add(local.partition(":")[0])
        return found

    def of_node(self, number: int) -> set[int]:
        """The processes of a node: its raylet, and what that has started."""
        raylet = self.raylets[number]
        children = Path(f"/proc/{raylet}/task/{raylet}/children").read_text().split()
        return {raylet, *map(int, children)}


@pytest.mark.skipif(sys.platform != "linux", reason="it looks into /proc")
def test_two_nodes_give_the_bytes_of_threads_though_one_is_killed(tmp_path):
    seen, free = tmp_path / "seen", 12
    seen.mkdir()
    stage = tmp_path / "slow.py"
    stage.write_text(SLOW_STAGE.format(place=str(seen), free=free))
    generator = np.random.default_rng(0)
    base = {f"w{n}": generator.standard_normal((40, 10), np.float32) for n in range(40)}
    for name, shift in {"base": 0, "math": 1, "code": 2}.items():
        moved = {tensor: values + np.float32(shift / 64) for tensor, values in base.items()}
        save(tmp_path / f"{name}.safetensors", moved)

    def command(output, *more):
        files = ["--base", "base.safetensors", "--merge", "math.safetensors", "code.safetensors"]
        own = ["--stage", str(stage), "--method", "slow+dare+linear", "--output", output]
        return [sys.executable, "-m", "dare", "merge", *files, *own, *more]

    def marks():
        return [int(path.name.partition("-")[0]) for path in seen.glob("*-*")]

    def is_at_work(number):
        return len(marks()) > free and nodes.of_node(number) & set(marks())

    with Nodes() as nodes:
        process = subprocess.Popen(
            command("cluster.safetensors", "--cluster", nodes.address),
            stderr=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=tmp_path,
            env=nodes.environment,
            text=True,
        )
        wait_until(lambda: process.poll() is not None or (is_at_work(0) and is_at_work(1)))
        assert process.poll() is None, process.communicate()
        listening = nodes.listening()
        assert listening
        assert {address[-2:] for address in listening} == {"7F"}, "it listens beyond 127.0.0.0/8"
        for killed in nodes.of_node(1):
            os.kill(killed, signal.SIGKILL)
        (seen / "go").touch()
        said = process.communicate(timeout=200)
        assert process.returncode == 0, said
    threads = command("threads.safetensors", "--threads", "2")
    subprocess.run(threads, check=True, cwd=tmp_path, env=os.environ | ENVIRONMENT)
    assert sha256(tmp_path / "cluster.safetensors") == sha256(tmp_path / "threads.safetensors")
    assert not list(tmp_path.glob("*.partial"))


# ---------------------------------------------------------------- without Ray


SHAPES = {"a": (3, CHUNK // 2), "b": (40, 50), "ids": (4,)}


@pytest.fixture
def recipe(tmp_path):
    return write_recipe(tmp_path, *base_and_tuned(SHAPES))


@pytest.fixture
def job(recipe):
    """A job whose output is under way, and its plan."""
    plan = dare.plan(recipe)
    with open_output(Merge(plan)) as output:
        yield MergeJob.of(plan, output.folder, 1 << 28), plan


class Here:
    """What stands for the cluster: every piece is pickled, and done by a task of its own."""

    def run(self, job, pieces, common=None):
        for number, piece in enumerate(pieces):
            with ExitStack() as stack:
                do = pickle.loads(pickle.dumps(job)).open(stack)
                yield ("id", str(number)), *do(*pickle.loads(pickle.dumps((piece, common))))


@pytest.mark.parametrize(
    ("method", "stages"),
    [("dare+linear", {}), ("trim+ties", {"trim": {"scope": "model"}}), ("tsv+svc", {})],
)
def test_tasks_write_what_a_merge_writes(recipe, method, stages, monkeypatch):
    recipe = recipe.changed(method=method, stages=stages)
    dare.merge(recipe)
    expected = recipe.recipe.output.read_bytes()
    recipe.recipe.output.unlink()
    plan = dare.plan(recipe)
    monkeypatch.chdir(recipe.recipe.output.parent)  # tasks are elsewhere
    with open_output(Merge(plan)) as output:
        job, division = MergeJob.of(plan, output.folder, 1 << 28), Division(plan, 3)
        known = _conclude(plan, division, job, Here(), lambda _nbytes: None)
        pieces = [share for share in division.shares() if share]
        assert len(pieces) > 1
        for _, records, nbytes in Here().run(job, [*pieces, pieces[0]], known):
            assert nbytes
            _check_arrival("here", job.files(plan), records[0])
        (written,) = output.folder.glob("*.safetensors")
        header = 8 + int.from_bytes(expected[:8], "little")
        assert written.read_bytes()[header:] == expected[header:]


def test_a_task_refuses_another_input(recipe, job):
    file = recipe.recipe.models[1].file
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    changes = [
        lambda: file.write_bytes(data),
        lambda: save(file, {"a": np.zeros(4, np.float32)}),
        file.unlink,
    ]
    for change in changes:
        change()
        with pytest.raises(dare.DareError, match="model1"), ExitStack() as stack:
            job[0].open(stack)


def test_a_task_refuses_another_plan(job):
    other = replace(job[0], request=job[0].request.changed(seed=7))
    with pytest.raises(InputError, match="plan differs"), ExitStack() as stack:
        other.open(stack)


def test_a_folder_that_is_not_the_drivers_is_refused(job, tmp_path):
    job, plan = job
    share = Division(plan, 1).share(1)
    with pytest.raises(OutputError, match="nowhere"):
        next(Here().run(replace(job, folder=tmp_path / "nowhere"), [share], {}))
    other = tmp_path / "other"
    shutil.copytree(job.folder, other)
    ((_, records, _),) = Here().run(replace(job, folder=other), [share], {})
    with pytest.raises(OutputError, match=r"10\.0\.0\.3: .*different folder"):
        _check_arrival("10.0.0.3", job.files(plan), records[0])


def test_arrays_are_not_merged_on_a_cluster():
    base = {"w": np.zeros(4, np.float32)}
    with pytest.raises(RecipeError, match='cluster = "auto"'):
        dare.merge_arrays(base, [base], cluster="auto", verbose=False)


def test_the_cluster_is_no_part_of_what_a_merge_is(recipe):
    shared = recipe.changed(cluster="auto")
    assert dare.plan(shared).fingerprint == dare.plan(recipe).fingerprint


def test_a_recipe_with_inputs_in_a_store_can_be_sent(recipe):
    stored = recipe.changed(base="s3://bucket/base.safetensors")
    sent = pickle.loads(pickle.dumps(task_request(stored.recipe, stored.options, 1 << 28)))
    assert sent.recipe.base == stored.recipe.base
    assert type(sent.recipe.base) is type(stored.recipe.base)


def test_a_cluster_that_is_not_there_is_refused_at_once(recipe):
    with pytest.raises(ClusterError, match=r"127\.0\.0\.1:9.*ray start --head"):
        dare.merge(recipe.changed(cluster="127.0.0.1:9"))
    assert not recipe.recipe.output.exists()
