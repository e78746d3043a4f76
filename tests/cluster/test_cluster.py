"""Merges on three nodes: the bytes of one thread, whatever dies, joins or is interrupted."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from conftest import CLUSTER, SOURCES, Cluster, chunks_done, wait_for
from helpers import sha256

METHODS = {
    "dare+linear": ["--method", "dare+linear"],
    "trim+ties": ["--method", "trim+ties", "--scope", "model"],
    "slerp": ["--method", "slerp"],
    "tsv": ["--method", "tsv"],
}
KILLS = 10
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
def shared(merge) -> list[str]:
    """Arguments that merge the models on the cluster."""
    return [*merge, "--cluster", CLUSTER]


@pytest.fixture
def output(tmp_path) -> Path:
    return tmp_path / "out.safetensors"


def tasks(of: int | None = None) -> list[int]:
    """The processes that do slices: all, or those of one raylet."""
    found = []
    for place in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it has ended
            parent = int((place.parent / "stat").read_text().rpartition(")")[2].split()[1])
            if place.read_bytes().startswith(b"ray::_run_piece") and of in (None, parent):
                found.append(int(place.parent.name))
    return found


@contextmanager
def paused() -> Iterator[None]:
    """Let tasks stand still: a merge that takes as long as is needed."""
    stopped = tasks()
    for process in stopped:
        os.kill(process, signal.SIGSTOP)
    yield
    for process in stopped:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGCONT)


def finished(process) -> str:
    _, said = process.communicate(timeout=300)
    assert process.returncode == 0, said
    return said


# ---------------------------------------------------------------- the same bytes


@pytest.mark.parametrize("method", METHODS)
def test_three_nodes_give_the_bytes_of_one_thread(cluster, shared, output, expected, method):
    status, said = cluster.dare(*shared, *METHODS[method])
    assert status == 0, said
    assert sha256(output) == expected(method)
    written = output.with_name(output.name + ".manifest.json").read_text()
    assert "cluster" not in written
    assert CLUSTER not in written


def test_merges_inside_merges_and_stacks_give_the_same_bytes(cluster, models, tmp_path):
    recipe = tmp_path / "stack.toml"
    recipe.write_text(
        f"""
        merges.both = {{base = "{models}/base.safetensors", models = ["{models}/math.safetensors",
            "{models}/code.safetensors"], method = "trim+ties"}}
        [[layers]]
        model = "both"
        range = [0, 9]
        [[layers]]
        base = "{models}/base.safetensors"
        models = ["both", "{models}/code.safetensors"]
        range = [6, 12]
        """
    )
    digests = set()
    for more in (["--threads", "1"], ["--cluster", CLUSTER]):
        output = tmp_path / f"{len(digests)}.safetensors"
        status, said = cluster.dare(recipe, "--output", output, *more)
        assert status == 0, said
        digests.add(sha256(output))
    assert len(digests) == 1


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
def test_a_node_that_is_killed_changes_nothing(cluster, shared, output, expected, seed):
    chance = random.Random(seed)
    method = list(METHODS)[seed % len(METHODS)]
    address = chance.choice(["127.0.0.3", "127.0.0.4"])
    chunks = chance.randrange(40)
    process = cluster.begin(*shared, *METHODS[method])
    wait_for(lambda: chunks_done(output) >= chunks or process.poll() is not None)
    time.sleep(chance.random() / 10)
    cluster.nodes[address].kill()
    finished(process)
    assert sha256(output) == expected(method)


def test_a_node_that_joins_is_used(cluster, shared, output, expected):
    process = cluster.begin(*shared, *METHODS["tsv"])
    wait_for(lambda: chunks_done(output) and len(tasks()) == len(cluster.nodes))
    with paused():
        cluster.start(ANOTHER)
        wait_for(lambda: tasks(of=cluster.nodes[ANOTHER].raylet))
    finished(process)
    assert sha256(output) == expected("tsv")


@pytest.mark.parametrize("then", [[], ["--cluster", CLUSTER]])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_driver_that_ends_is_taken_up(cluster, shared, merge, output, expected, how, then):
    process = cluster.begin(*shared)
    wait_for(lambda: chunks_done(output))
    process.send_signal(how)
    _, said = process.communicate(timeout=60)
    if how == signal.SIGINT:
        assert process.returncode == 130
        assert said.count("\n") < 8, said
        assert "to resume" in said
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
        "missing": (["mount -t tmpfs none {models}"], "{models}/base.safetensors: "),
        "other": (
            ["mount --bind {others}/math.safetensors {models}/math.safetensors"],
            "{models}/math.safetensors: ",
        ),
        "read-only": (
            ["mount --bind {output} {output}", "mount -o remount,bind,ro {output}"],
            "{output}/out.safetensors.partial: ",
        ),
        "overlaid": (
            [
                "mkdir {others}/upper {others}/work",
                "mount -t overlay none -o lowerdir={output},upperdir={others}/upper,"
                "workdir={others}/work {output}",
            ],
            "{output}/out.safetensors.partial: ",
        ),
    }.values(),
)
def test_a_node_that_sees_another_disk_is_refused(
    cluster, shared, output, models, tmp_path_factory, mounts, found
):
    others = tmp_path_factory.mktemp("others")
    data = bytearray((models / "math.safetensors").read_bytes())
    data[-3] ^= 1
    (others / "math.safetensors").write_bytes(data)
    places = {"models": models, "others": others, "output": output.parent}
    cluster.start(ANOTHER, mounts=[line.format(**places) for line in mounts])
    status, said = cluster.dare(*shared, *METHODS["tsv"])
    assert status == 1
    assert f"node {ANOTHER}: {found.format(**places)}" in said
    assert not output.exists()


def test_another_version_is_refused(cluster, shared, tmp_path_factory):
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
    status, said = cluster.dare(*shared, *METHODS["tsv"])
    assert status == 1
    assert "node 127.0.0.5: has dare 0.0.1, " in said
