"""What all tests share; its presence also lets them `import helpers`."""

import json
import os
import platform
import shutil
import signal
from collections.abc import Iterator
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from cuda_on_host import gpu_on_host  # noqa: F401 (a fixture)
from cupy_on_host import matrices_on_host  # noqa: F401 (a fixture)
from dare.stores import reading
from fake_hub import Hub, serve
from file_server import Files, serving

# Matrices are small and tests run on every core: more threads only wait for each other.
for library in ("OPENBLAS", "OMP"):
    os.environ.setdefault(f"{library}_NUM_THREADS", "1")

# No test asks an address outside of this machine: a cloud's metadata server would answer.
os.environ["AWS_EC2_METADATA_DISABLED"] = "true"
for name in ("AWS_METADATA_ENDPOINT", "AWS_EC2_METADATA_SERVICE_ENDPOINT"):
    os.environ[name] = "http://127.0.0.1:9"

# Timing is asserted where it matters; elsewhere a busy machine must not fail a test.
settings.register_profile("dare", deadline=None, max_examples=30)
settings.load_profile("dare")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # As in a job that a shell runs in the background; the processes under test would inherit it.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    """How long and from where on the attacks in tests/attack go."""
    parser.addoption("--attack-size", type=int, default=1, help="times the short run's attacks")
    parser.addoption("--attack-seed", type=int, default=0, help="which attacks they are")
    parser.addoption("--record", type=Path, help="list the versions in this file if all passes")


def pytest_terminal_summary(terminalreporter: Any, exitstatus: int, config: pytest.Config) -> None:
    """Say with which versions the tests were run; --record docs/versions-run.json lists them."""
    found = {dist.metadata["Name"].lower(): dist.version for dist in distributions()}
    run = {"python": platform.python_version(), "machine": platform.machine()}
    run |= {name: found.get(name, "") for name in ("numpy", "safetensors", "torch")}
    terminalreporter.write_line(
        " ".join(f"{name} {version or '–'}" for name, version in run.items())
    )
    path = config.getoption("--record")
    if path is not None and exitstatus == 0:
        runs = json.loads(path.read_text("utf-8")) if path.exists() else []
        runs = [other for other in runs if {name: other[name] for name in run} != run]
        tests = " ".join(config.args) + (
            f" -k {config.option.keyword!r}" * bool(config.option.keyword)
        )
        passed = len(terminalreporter.stats.get("passed", ()))
        runs.append({**run, "tests": tests, "passed": passed})
        runs.sort(key=lambda one: [int(part) for part in one["python"].split(".")])
        path.write_text(json.dumps(runs, indent=2) + "\n", "utf-8")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what needs a browser, so that `make test-browser` runs that and nothing else."""
    for item in items:
        if "browser" in getattr(item, "fixturenames", ()):
            item.add_marker("browser")


@pytest.fixture(scope="module")  # another module may have a playwright of its own
def browser() -> Iterator[Any]:
    """Chromium, where there is one."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.skip("no chromium on this machine")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium)
        yield browser
        browser.close()


@pytest.fixture
def attack_size(request: pytest.FixtureRequest) -> int:
    """How many times as many attacks as in `make test`."""
    return int(request.config.getoption("--attack-size"))


@pytest.fixture
def attack_seed(request: pytest.FixtureRequest) -> int:
    """The seed that the attacks follow from."""
    return int(request.config.getoption("--attack-seed"))


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A running hub that the client talks to, an empty cache, an empty working directory."""
    yield from serve(tmp_path, monkeypatch)


@pytest.fixture
def web() -> Iterator[Files]:
    """A running web server of files."""
    reading.forget()
    with serving() as files:
        yield files


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stores are given up soon."""
    monkeypatch.setattr(reading, "PATIENCE_SECONDS", 0.3)
    monkeypatch.setattr(reading, "RETRIES", 1)
    reading.forget()
