"""The library: found, fresh, and with the same bits at every level and with one lane.

The other tests here run at the highest level that this machine has. They are run again, with few
examples, at every other level, and with the sources compiled for one lane, as C++17.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dare import kernels
from dare.errors import DareError
from dare.kernels import core, reference

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
AGREEMENT = [
    *(HERE / f"test_{part}.py" for part in ("agreement", "delta_kernels")),
    ROOT / "tests" / "analysis" / "test_measuring.py",
]
EXAMPLES = "10"
ONE_LANE = (
    *("-x", "c++", "-std=c++17", "-O1", "-DONE_LANE", "-DDIGEST=one_lane", "-ffp-contract=off"),
    *("-fvisibility=hidden", "-fPIC", "-shared", "-Wall", "-Wextra", "-Werror"),
)


def levels() -> list[str]:
    """All levels of this machine but the one that all other tests run at."""
    return core._library()[0].dare_levels().decode().split()[:-1]


@pytest.fixture(scope="session")
def one_lane(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library with one lane, by g++ or else by the clang of ziglang."""
    if sys.platform == "win32":
        pytest.skip("what g++ links on Windows needs other libraries beside it")
    if found := shutil.which("g++"):
        compiler = [found]
    elif importlib.util.find_spec("ziglang"):
        compiler = [sys.executable, "-m", "ziglang", "c++", "-nostdlib"]
    else:
        pytest.skip("neither g++ nor ziglang is installed")
    library = tmp_path_factory.mktemp("one-lane") / "one_lane.so"
    sources = [ROOT / "src" / "core" / name for name in ("core.c", "levels.c")]
    subprocess.run([*compiler, *ONE_LANE, *sources, "-o", library], check=True)
    return library


def run_agreement(**environment: str | Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:randomly"]
    settings = {"DARE_EXAMPLES": EXAMPLES, **{key: str(env) for key, env in environment.items()}}
    done = subprocess.run(
        [*command, *map(str, AGREEMENT)],
        cwd=ROOT,
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("level", levels())
def test_every_level_has_the_bits_of_the_reference(level: str) -> None:
    run_agreement(DARE_CORE_LEVEL=level)


def test_one_lane_has_the_bits_of_the_reference(one_lane: Path) -> None:
    run_agreement(DARE_CORE_LIBRARY=one_lane, DARE_CORE_LEVEL="any")


def test_a_level_that_the_machine_lacks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DARE_CORE_LEVEL", "v9")
    with pytest.raises(DareError, match="DARE_CORE_LEVEL = v9: this machine has"):
        core._library.__wrapped__()


# ---------------------------------------------------------------- fresh


@pytest.fixture
def checkout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A checkout with the sources and the library of this one."""
    if not core._is_checkout():
        pytest.skip("this is not a checkout")
    shutil.copytree(ROOT / "src" / "core", tmp_path / "src" / "core")
    shutil.copy(ROOT / "hatch_build.py", tmp_path)
    shutil.copy(core.LIBRARY, tmp_path)
    monkeypatch.setattr(core, "CHECKOUT", tmp_path)
    monkeypatch.setattr(core, "LIBRARY", tmp_path / core.LIBRARY.name)
    return tmp_path


def test_the_library_carries_the_digest_that_both_sides_compute(checkout: Path) -> None:
    pytest.importorskip("hatchling")
    spec = importlib.util.spec_from_file_location("hook", checkout / "hatch_build.py")
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(hook := importlib.util.module_from_spec(spec))
    found = core._open(core.LIBRARY).dare_sources().decode()
    assert found == hook.sources_digest() == core.sources_digest()


@pytest.mark.parametrize("changed", ["src/core/core.c", "src/core/types.h", "hatch_build.py"])
def test_a_library_older_than_its_sources_is_an_error(checkout: Path, changed: str) -> None:
    with (checkout / changed).open("a") as file:
        file.write("\n")
    with pytest.raises(DareError, match="older than the sources in src/core; run `make core`"):
        core._open(core.LIBRARY)


def test_a_checkout_without_its_library_is_an_error(checkout: Path) -> None:
    core.LIBRARY.unlink()
    assert core.is_built()  # so that `reference` does not serve in silence
    with pytest.raises(DareError, match="not built yet; run `make core`"):
        core._open(core.LIBRARY)


def test_a_damaged_library_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(core, "CHECKOUT", tmp_path)
    library = tmp_path / "damaged.so"
    library.write_bytes(b"\x7fELF")
    with pytest.raises(DareError, match=r"cannot be loaded .*; install dare-merge again"):
        core._open(library)


# ---------------------------------------------------------------- missing


@pytest.fixture
def unknown_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An installed package for a machine that there is no library for."""
    monkeypatch.setattr(core, "CHECKOUT", tmp_path)
    monkeypatch.setattr(core, "LIBRARY", tmp_path / core.LIBRARY.name)
    monkeypatch.setitem(kernels.DEVICES, "cpu", kernels.Device("core"))


@pytest.mark.usefixtures("unknown_machine")
def test_where_there_is_no_library_the_reference_serves_and_says_so() -> None:
    assert kernels.load("cpu") is reference
    (said,) = kernels.device_notices("cpu")
    assert (said.code, said.severity) == ("no_library", "warning")
    assert not list(kernels.device_notices("reference"))


def test_where_there_is_a_library_nothing_is_said() -> None:
    assert kernels.load("cpu") is not reference
    assert not list(kernels.device_notices("cpu"))
