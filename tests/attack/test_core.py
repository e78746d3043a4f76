"""The library's functions under gcc's sanitizers: none reads or writes what is not its own.

`core.c` calls each with odd sizes, weights at odd addresses and results in place of arguments. In
the long run the tests of `tests/kernels` are run under the sanitizers too.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
CORE = ROOT / "src" / "core"
DRIVER = HERE / "core.c"
ROUNDS = 5
SANITIZED = (
    *("-std=c11", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-DONE_LANE", "-DDIGEST=attack"),
    *("-ffp-contract=off", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
)
ENTRY = re.compile(r"^ENTRY\([^,]+, (\w+)\)", re.MULTILINE)


def sanitized(made: Path, *options: str | Path) -> Path:
    subprocess.run(["gcc", *SANITIZED, *options, "-o", made], check=True)
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty folder, where gcc has the sanitizers."""
    folder = tmp_path_factory.mktemp("sanitized")
    if not shutil.which("gcc"):
        pytest.skip("there is no gcc")
    (folder / "empty.c").write_text("int main(void) { return 0; }")
    command = ["gcc", *SANITIZED, folder / "empty.c", "-o", folder / "empty"]
    if subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("gcc has no runtime of the sanitizers (libasan, libubsan)")
    return folder


@pytest.fixture(scope="module")
def driver(folder: Path) -> Path:
    return sanitized(folder / "core", DRIVER)


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("fault", "said"), [("overflow", "heap-buffer-overflow"), ("shift", "shift exponent")]
)
def test_a_planted_fault_is_found(driver: Path, fault: str, said: str) -> None:
    done = run(driver, fault)
    assert done.returncode != 0
    assert said in done.stderr


def test_every_entry_is_attacked(driver: Path) -> None:
    headers = set(CORE.glob("*.h")) - set(CORE.glob("gpu*.h"))  # no part of the library
    entries = {name for file in headers for name in ENTRY.findall(file.read_text())}
    assert entries == set(run(driver).stdout.split())


def test_no_entry_leaves_its_buffers(driver: Path, request: pytest.FixtureRequest) -> None:
    size, seed = map(request.config.getoption, ("--attack-size", "--attack-seed"))
    done = run(driver, str(ROUNDS * size), str(seed))
    assert done.returncode == 0, f"{driver} {ROUNDS * size} {seed}\n{done.stderr}"


def test_agreement_under_the_sanitizers(folder: Path, request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--attack-size") == 1:
        pytest.skip("in make test-attack")
    library = sanitized(folder / "core.so", "-shared", "-fPIC", CORE / "core.c", CORE / "levels.c")
    runtimes = [run("gcc", f"-print-file-name=lib{name}.so").stdout for name in ("asan", "ubsan")]
    environment = {
        **{"LD_PRELOAD": " ".join(map(str.strip, runtimes)), "ASAN_OPTIONS": "detect_leaks=0"},
        **{"DARE_CORE_LIBRARY": str(library), "DARE_CORE_LEVEL": "any", "DARE_EXAMPLES": "20"},
        "PYTHONMALLOC": "malloc",
    }
    parts = ("kernels/test_agreement", "kernels/test_delta_kernels", "analysis/test_measuring")
    tests = [f"tests/{part}.py" for part in parts]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
