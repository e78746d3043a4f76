"""Merges on three nodes: the bytes of one thread, whatever dies, joins or is interrupted."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest

from conftest import CLUSTER, SOURCES, Cluster, wait_for
from dare.tensors.chunks import CHUNK
from helpers import listing, sha256

METHODS = {
    "dare+linear": ["--method", "dare+linear"],
    "trim+ties": ["--method", "trim+ties", "--scope", "model"],
    "slerp": ["--method", "slerp"],
    "tsv": ["--method", "tsv"],
}
KILLS = 10
CHUNK_BYTES = 4 * CHUNK
"""The models are in F32."""
ANOTHER = "127.0.0.5"


@pytest.fixture(scope="session")
def expected(running: Cluster, models: Path, tmp_path_factory: pytest.TempPathFactory):
    """The digest that one thread gives, by method."""
    folder = tmp_path_factory.mktemp("expected")
    files = [models / f"{name}.safetensors" for name in ("base", "math", "code")]
    known: dict[str, str] = {}

    def digest(method: str) -> str:
        if method not in known:
            output = folder / f"{len(known)}.safetensors"
            given = ["--base", files[0], "--merge", *files[1:], "--output", output]
            status, said = running.dare("merge", *given, *METHODS[method], "--threads", "1")
            assert status == 0, said
            known[method] = sha256(output)
        return known[method]

    return digest


@pytest.fixture
def shared(merge, tmp_path) -> list[str]:
    """Arguments that merge the models on the cluster, with a log."""
    return [*merge, "--cluster", CLUSTER, "--cluster-log", str(tmp_path / "log.jsonl")]


class Log:
    """The lines that are there already."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def events(self, kind: str, node: str | None = None) -> list[dict]:
        text = self._path.read_text() if self._path.exists() else ""
        lines = [json.loads(line) for line in text.splitlines(keepends=True) if line[-1:] == "\n"]
        return [x for x in lines if x["event"] == kind and node in (None, x["node"])]


@pytest.fixture
def log(tmp_path) -> Log:
    return Log(tmp_path / "log.jsonl")


@pytest.fixture
def output(tmp_path) -> Path:
    return tmp_path / "out.safetensors"


def actors() -> list[int]:
    """The processes in which nodes do their batches."""
    found = []
    for place in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if place.read_bytes().startswith(b"ray::Node"):
                found.append(int(place.parent.name))
        except OSError:
            pass  # it has ended
    return found


class Paused:
    """Nodes that stand still until they are let go on: a merge that takes as long as is needed."""

    def __init__(self) -> None:
        self._stopped: list[int] = []

    def __enter__(self) -> Paused:
        self._stopped = actors()
        for process in self._stopped:
            os.kill(process, signal.SIGSTOP)
        return self

    def __exit__(self, *_error: object) -> None:
        for process in self._stopped:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGCONT)


def finished(process) -> str:
    _, said = process.communicate(timeout=300)
    assert process.returncode == 0, said
    return said


# ---------------------------------------------------------------- the same bytes


@pytest.mark.parametrize("method", METHODS)
def test_three_nodes_give_the_bytes_of_one_thread(cluster, shared, output, log, expected, method):
    status, said = cluster.dare(*shared, *METHODS[method])
    assert status == 0, said
    assert sha256(output) == expected(method)
    assert {line["node"] for line in log.events("batch")} == set(cluster.nodes)
    assert sum(f"node {address}: " in said for address in cluster.nodes) == len(cluster.nodes)
    written = output.with_name(output.name + ".manifest.json").read_text()
    assert "cluster" not in written
    assert CLUSTER not in written


def test_a_directory_has_only_what_belongs_there(cluster, merge, tmp_path):
    for name, more in {"threads": [], "nodes": ["--cluster", CLUSTER]}.items():
        merge[merge.index("--output") + 1] = str(tmp_path / name)
        status, said = cluster.dare(*merge, "--shard-size", "20MB", *more)
        assert status == 0, said
    names = listing(tmp_path / "threads")
    assert listing(tmp_path / "nodes") == names
    weights = [name for name in names if name.endswith(".safetensors")]
    assert len(weights) > 1
    for name in weights:
        assert sha256(tmp_path / "nodes" / name) == sha256(tmp_path / "threads" / name)


def test_a_stage_of_the_users_own_is_run_on_every_node(cluster, merge, tmp_path, output):
    stage = tmp_path / "halve.py"
    stage.write_text(
        "from dare.stages.blocks import Block\n"
        "from dare.stages.registry import delta_stage\n"
        "@delta_stage()\n"
        "def halve(block: Block) -> None:\n"
        '    """Halve."""\n'
        "    block.values[:] *= 0.5\n"
    )
    digests = []
    for more in (["--threads", "1"], ["--cluster", CLUSTER]):
        own = ["--stage", stage, "--method", "halve+linear", "--overwrite"]
        status, said = cluster.dare(*merge, *own, *more)
        assert status == 0, said
        digests.append(sha256(output))
    assert digests[0] == digests[1]


def test_an_analysis_is_the_same_document(cluster, models, tmp_path):
    files = [models / f"{name}.safetensors" for name in ("base", "math", "code")]
    documents = []
    for more in ([], ["--cluster", CLUSTER]):
        path = tmp_path / f"{len(documents)}.json"
        status, said = cluster.dare("analyze", *files, "--output", path, *more)
        assert status == 0, said
        documents.append(json.loads(path.read_text()))
    for document in documents:
        assert document.pop("seconds") > 0
    assert documents[0] == documents[1]


# ---------------------------------------------------------------- what dies and what joins


@pytest.mark.parametrize("seed", range(KILLS))
def test_a_node_that_is_killed_changes_nothing(cluster, shared, output, log, expected, seed):
    chance = random.Random(seed)
    method = list(METHODS)[seed % len(METHODS)]
    address = chance.choice(["127.0.0.3", "127.0.0.4"])
    batches = chance.randrange(12)
    process = cluster.begin(*shared, *METHODS[method])
    wait_for(lambda: len(log.events("batch")) >= batches or process.poll() is not None)
    time.sleep(chance.random() / 10)
    cluster.nodes[address].kill()
    finished(process)
    assert sha256(output) == expected(method)


def test_what_a_dead_node_had_is_done_by_others(cluster, shared, output, log, expected):
    process = cluster.begin(*shared)
    wait_for(lambda: len(log.events("joined")) == len(cluster.nodes))
    with Paused():
        cluster.nodes["127.0.0.4"].kill()
        wait_for(lambda: log.events("lost"))
    said = finished(process)
    (lost,) = log.events("lost")
    assert (lost["node"], lost["alive"]) == ("127.0.0.4", False)
    assert lost["batches"] > 0
    assert "node 127.0.0.4: died; others do its work" in said
    assert sha256(output) == expected("dare+linear")


def test_what_a_dead_node_took_with_it_is_made_again(cluster, shared, output, log, expected):
    """A machine that dies may lose what it had written and not synced."""
    partial = output.with_name(output.name + ".partial") / output.name
    process = cluster.begin(*shared)
    wait_for(lambda: log.events("batch", "127.0.0.4"))
    with Paused():
        cluster.nodes["127.0.0.4"].kill()
        done = log.events("batch", "127.0.0.4")
        header = 8 + int.from_bytes(partial.read_bytes()[:8], "little")
        with partial.open("r+b") as file:
            names = json.loads(file.read(header)[8:])
            for _, name, chunk in (step for line in done for step in line["steps"]):
                first, end = names[name]["data_offsets"]
                start = first + chunk * CHUNK_BYTES
                file.seek(header + start)
                file.write(bytes(min(CHUNK_BYTES, end - start)))
        wait_for(lambda: log.events("lost"))
    finished(process)
    assert sha256(output) == expected("dare+linear")


def test_a_worker_that_is_killed_is_replaced(cluster, shared, output, log, expected):
    process = cluster.begin(*shared)
    wait_for(lambda: len(log.events("joined")) == len(cluster.nodes))
    os.kill(actors()[0], signal.SIGKILL)
    finished(process)
    assert sha256(output) == expected("dare+linear")
    assert [line["alive"] for line in log.events("lost")] in ([True], [])


def test_a_node_that_joins_is_used(cluster, shared, output, log, expected):
    process = cluster.begin(*shared)
    wait_for(lambda: len(log.events("joined")) == len(cluster.nodes))
    with Paused():
        cluster.start(ANOTHER)
        wait_for(lambda: log.events("batch", ANOTHER))
    finished(process)
    assert sha256(output) == expected("dare+linear")


def test_a_node_that_joins_and_lacks_a_file_is_left_out(
    cluster, shared, output, log, expected, models
):
    process = cluster.begin(*shared, *METHODS["trim+ties"])
    wait_for(lambda: len(log.events("joined")) == len(cluster.nodes))
    with Paused():
        cluster.start(ANOTHER, mounts=[f"mount -t tmpfs none {models}"])
        wait_for(lambda: log.events("left out", ANOTHER))
    said = finished(process)
    assert f"node {ANOTHER}: {models}/base.safetensors: no such file" in said
    assert sha256(output) == expected("trim+ties")


@pytest.mark.parametrize("then", [[], ["--cluster", CLUSTER]])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_driver_that_ends_is_taken_up(cluster, shared, merge, output, log, expected, how, then):
    process = cluster.begin(*shared)
    wait_for(lambda: log.events("batch"))
    process.send_signal(how)
    _, said = process.communicate(timeout=60)
    if how == signal.SIGINT:
        assert process.returncode == 130
        assert said.count("\n") < 8, said
        assert "interrupted; to resume, run" in said
    assert not output.exists()
    assert output.with_name(output.name + ".partial").is_dir()
    process = cluster.begin(*merge, *then, "--json")
    report, said = process.communicate(timeout=300)
    assert process.returncode == 0, said
    assert json.loads(report)["resumed_chunks"] > 0
    assert sha256(output) == expected("dare+linear")


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("mounts", "found"),
    {
        "a file that is missing": (
            ["mount -t tmpfs none {models}"],
            "node 127.0.0.5: {models}/base.safetensors: no such file",
        ),
        "a file with other weights": (
            ["mount --bind {others}/math.safetensors {models}/math.safetensors"],
            "node 127.0.0.5: {models}/math.safetensors: is another file here",
        ),
        "an output that cannot be written": (
            ["mount --bind {output} {output}", "mount -o remount,bind,ro {output}"],
            "node 127.0.0.5: {output}/out.safetensors.partial: cannot be written: Read-only",
        ),
        "an output that is elsewhere": (
            ["mount -t tmpfs none {output}"],
            "node 127.0.0.5: {output}/out.safetensors.partial: cannot be written: No such file",
        ),
        "an output that does not arrive": (
            [
                "mkdir {others}/upper {others}/work",
                "mount -t overlay none -o lowerdir={output},upperdir={others}/upper,"
                "workdir={others}/work {output}",
            ],
            "node 127.0.0.5: {output}/out.safetensors.partial: is another folder there",
        ),
    }.values(),
    ids=["missing", "other", "read-only", "elsewhere", "overlaid"],
)
def test_a_node_that_sees_another_disk_is_refused(
    cluster, shared, output, log, models, tmp_path_factory, mounts, found
):
    others = tmp_path_factory.mktemp("others")
    data = bytearray((models / "math.safetensors").read_bytes())
    data[-3] ^= 1
    (others / "math.safetensors").write_bytes(data)
    places = {"models": models, "others": others, "output": output.parent}
    cluster.start(ANOTHER, mounts=[line.format(**places) for line in mounts])
    status, said = cluster.dare(*shared)
    assert status == 1
    assert found.format(**places) in said
    assert not log.events("batch")
    assert not output.exists()


def test_another_version_is_refused(cluster, shared, log, tmp_path_factory):
    folder = tmp_path_factory.mktemp("old")
    package = folder / "dare"
    package.mkdir()
    for path in (SOURCES / "dare").iterdir():
        if path.name not in ("__init__.py", "__pycache__"):
            (package / path.name).symlink_to(path)
    text = (SOURCES / "dare" / "__init__.py").read_text()
    start = text.index("__version__ = ")
    (package / "__init__.py").write_text(
        text[:start] + '__version__ = "0.0.1"' + text[text.index("\n", start) :]
    )
    cluster.start(ANOTHER, environment={"PYTHONPATH": str(folder)})
    status, said = cluster.dare(*shared)
    assert status == 1
    assert "node 127.0.0.5: has dare 0.0.1, " in said
    assert not log.events("batch")


def test_a_node_without_dare_is_refused(cluster, shared, log, tmp_path_factory):
    folder = tmp_path_factory.mktemp("without")
    (folder / "dare.py").write_text("raise ModuleNotFoundError('there is no dare')\n")
    cluster.start(ANOTHER, environment={"PYTHONPATH": str(folder)})
    status, said = cluster.dare(*shared)
    assert status == 1
    assert "node 127.0.0.5: dare cannot be started there" in said
    assert not log.events("batch")


def test_a_cluster_that_is_not_there_is_refused_at_once(cluster, merge):
    started = time.monotonic()
    status, said = cluster.dare(*merge, "--cluster", "127.0.0.2:6")
    assert status == 1
    assert 'cluster = "127.0.0.2:6": no Ray cluster answers (Connection refused)' in said
    assert time.monotonic() - started < 20


def test_without_ray_it_says_what_to_install(cluster, merge, tmp_path):
    (tmp_path / "ray.py").write_text("raise ImportError\n")
    path = f"{tmp_path}:{SOURCES}"
    status, said = cluster.dare(*merge, "--cluster", CLUSTER, environment={"PYTHONPATH": path})
    assert status == 1
    assert 'Ray is not installed; install it with pip install "dare-merge[ray]"' in said
