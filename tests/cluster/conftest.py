"""A cluster of three nodes that look like three machines, and models to merge on it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from dare.output.targets import JOURNAL_NAME, partial_folder
from helpers import save

HERE = Path(__file__).parent
SOURCES = HERE.parents[1] / "src"
HEAD = "127.0.0.2"
CLUSTER = f"{HEAD}:6379"
QUICK = {  # a dead node is known to be dead after a second or two, not after fifteen
    "RAY_health_check_period_ms": "300",
    "RAY_health_check_failure_threshold": "4",
    "RAY_health_check_initial_delay_ms": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DISABLE_IMPORT_WARNING": "1",
}

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # As in a job that a shell runs in the background; the processes under test would inherit it.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection(session: pytest.Session) -> None:
    """Refuse to start Ray where anybody else could reach it."""
    if [name for _, name in socket.if_nameindex()] != ["lo"]:
        pytest.exit("start these tests by tests/cluster/inside.py (make test-cluster)", 2)


@dataclass
class Running:
    """A node that is up."""

    process: subprocess.Popen[str]
    raylet: int
    """Its process."""

    def kill(self) -> None:
        """Let it die as a machine does."""
        os.kill(self.raylet, signal.SIGKILL)


@dataclass
class Cluster:
    """Nodes by their addresses."""

    folder: Path
    nodes: dict[str, Running] = field(default_factory=dict)

    def start(
        self, address: str, *, mounts: Sequence[str] = (), environment: Mapping[str, str] = {}
    ) -> None:
        """Add a node; `mounts` are commands of a shell that change what it sees of the disk."""
        prefix = []
        if mounts:
            script = " && ".join([*mounts, 'exec "$@"'])
            prefix = ["unshare", "--mount", "sh", "-c", script, "sh"]
        command = [*prefix, sys.executable, str(HERE / "raylet.py"), address, HEAD]
        log = self.folder / f"{address}.log"
        with log.open("a") as errors:
            process = subprocess.Popen(
                [*command, str(self.folder)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=self.environment | dict(environment),
                text=True,
            )
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, log.read_text()
        self.nodes[address] = Running(process, json.loads(line)["raylet"])

    def stop(self, address: str) -> None:
        """Take a node away; whether it is dead already does not matter."""
        node = self.nodes.pop(address)
        assert node.process.stdin is not None
        node.process.stdin.close()
        node.process.stdout.close()
        try:
            node.process.wait(20)
        except subprocess.TimeoutExpired:
            node.process.kill()
            node.process.wait()

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, **QUICK, "PYTHONPATH": str(SOURCES)}

    def begin(
        self, *arguments: str | Path, environment: Mapping[str, str] = {}
    ) -> subprocess.Popen[str]:
        """Start `dare`."""
        return subprocess.Popen(
            [sys.executable, "-m", "dare", *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=self.environment | dict(environment),
            cwd=self.folder,
            text=True,
        )

    def dare(self, *arguments: str | Path, environment: Mapping[str, str] = {}) -> tuple[int, str]:
        """Run `dare`; return its exit status and what it said on stderr."""
        process = self.begin(*arguments, environment=environment)
        _, said = process.communicate(timeout=300)
        return process.returncode, said


@pytest.fixture(scope="session")
def running() -> Iterator[Cluster]:
    folder = Path(tempfile.mkdtemp(prefix="ray-"))  # paths of sockets must be short
    cluster = Cluster(folder)
    try:
        cluster.start(HEAD)
        for address in ("127.0.0.3", "127.0.0.4"):
            cluster.start(address)
        yield cluster
    finally:
        for address in reversed(list(cluster.nodes)):
            cluster.stop(address)
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def cluster(running: Cluster) -> Iterator[Cluster]:
    """Three nodes; those that a test has killed are replaced, those that it has added go."""
    yield running
    wanted = {HEAD, "127.0.0.3", "127.0.0.4"}
    for address, node in list(running.nodes.items()):
        if address not in wanted or not is_alive(node.raylet):
            running.stop(address)
    for address in sorted(wanted - running.nodes.keys()):
        running.start(address)


def is_alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_for(condition, seconds: float = 120.0) -> None:
    """Wait until something is so."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.02)


def chunks_done(output: Path) -> int:
    """How many chunks of an output under way are in its journal."""
    try:
        lines = (partial_folder(output) / JOURNAL_NAME).read_text().splitlines()
    except OSError:
        return 0
    return sum('"tensor"' in line for line in lines)


SHAPES = {
    "table": (1 << 24,),
    **{f"layers.{n}.w": (700, 1100) for n in range(12)},
    "norm": (512,),
}


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a base and two fine-tunes."""
    folder = tmp_path_factory.mktemp("models")
    generator = np.random.default_rng(1)
    base = {name: generator.standard_normal(shape, np.float32) for name, shape in SHAPES.items()}
    save(folder / "base.safetensors", base)
    for name in ("math", "code"):
        tuned = {
            tensor: values + np.float32(0.001) * generator.standard_normal(values.shape, np.float32)
            for tensor, values in base.items()
        }
        save(folder / f"{name}.safetensors", tuned)
    return folder


@pytest.fixture
def merge(models: Path, tmp_path: Path) -> list[str]:
    """Arguments that merge the models into out.safetensors."""
    files = [str(models / f"{name}.safetensors") for name in ("base", "math", "code")]
    output = tmp_path / "out.safetensors"
    return ["merge", "--base", files[0], "--merge", *files[1:], "--output", str(output)]
