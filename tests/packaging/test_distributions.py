"""What is published: an sdist, the wheel that it builds, and the wheel installed by itself.

Nothing is downloaded. The new environment finds the dependencies in the one that runs the tests,
through a path file, which does not bring that environment's own (editable) dare along.
"""

from __future__ import annotations

import email
import json
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from email.message import Message
from pathlib import Path

import numpy as np
import pytest
from twine.commands.check import check

import dare
from dare.kernels import cuda
from helpers import save

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
LARGEST_WHEEL_BYTES = 16_000_000

Distributions = tuple[Path, Path]


def run(*command: str | Path, cwd: Path = ROOT, **environment: str) -> str:
    done = subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": "", "PYTHONWARNINGS": "default", **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Distributions:
    """The sdist, and the wheel that is built from the sdist (and not from this tree)."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT)
    (sdist,) = folder.glob("*.tar.gz")
    (wheel,) = folder.glob("*.whl")
    return sdist, wheel


@pytest.fixture(scope="module")
def metadata(distributions: Distributions) -> Message:
    with zipfile.ZipFile(distributions[1]) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return email.message_from_bytes(archive.read(name))


@pytest.fixture(scope="module")
def installed(distributions: Distributions, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the programs of an environment that has the wheel."""
    folder = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", "--without-pip", folder)
    python = folder / "bin" / "python"
    where = "import sysconfig; print(sysconfig.get_path('purelib'))"
    packages = Path(run(python, "-c", where).strip())
    dependencies = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (packages / "dependencies.pth").write_text("\n".join(sorted(dependencies)))
    options = ["--quiet", "--no-deps", "--no-index", "--no-compile", "--disable-pip-version-check"]
    run(sys.executable, "-m", "pip", "--python", python, "install", *options, distributions[1])
    return folder / "bin"


# ---------------------------------------------------------------- contents


def test_the_wheel_has_the_whole_package_and_nothing_else(distributions: Distributions) -> None:
    package = ROOT / "src" / "dare"
    expected = {
        str(path.relative_to(package.parent))
        for path in package.rglob("*")
        if path.is_file() and "__pycache__" not in str(path)
    }
    expected |= {f"dare/kernels/gpu/{name}" for name in (*cuda.OF_MERGES, *cuda.OF_DIGESTS)}
    with zipfile.ZipFile(distributions[1]) as archive:
        names = archive.namelist()
    assert {name for name in names if ".dist-info/" not in name} == expected
    assert {"dare/py.typed", "dare/documents/templates/page.html.jinja"} <= expected
    assert f"dare_merge-{dare.__version__}.dist-info/licenses/LICENSE" in names


def test_the_sdist_has_what_is_needed_to_test_and_build(distributions: Distributions) -> None:
    with tarfile.open(distributions[0]) as archive:
        names = [name.partition("/")[2] for name in archive.getnames()]
    wanted = "CHANGELOG.md CITATION.cff CONTRIBUTING.md LICENSE Makefile PKG-INFO README.md"
    more = "docs/mask.md mkdocs.yml pyproject.toml src/dare/py.typed tests/helpers.py"
    assert {*wanted.split(), *more.split()} <= set(names)
    unwanted = (".venv", ".git/", "site/", "bench/data", "bench/results")
    assert not [name for name in names if name.startswith(unwanted)]


def test_both_are_small_and_twine_finds_nothing_wrong(distributions: Distributions) -> None:
    assert max(file.stat().st_size for file in distributions) < LARGEST_WHEEL_BYTES
    assert not check(list(map(str, distributions)), strict=True)


# ---------------------------------------------------------------- metadata


def test_the_metadata_is_that_of_the_project(metadata: Message) -> None:
    assert metadata["Name"] == "dare-merge"
    assert metadata["Version"] == dare.__version__
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == PROJECT["requires-python"]
    assert metadata["Description-Content-Type"] == "text/markdown"
    description = metadata.get_payload(decode=True)
    assert description == (ROOT / "README.md").read_bytes()


def test_it_requires_what_the_project_says_and_not_torch(metadata: Message) -> None:
    listed = metadata.get_all("Requires-Dist", [])
    required = {line for line in listed if "extra ==" not in line}
    assert required == {line.replace("_", "-") for line in PROJECT["dependencies"]}
    assert not [line for line in required if line.startswith("torch")]


def test_install_hints_name_extras_and_no_package_that_anyone_could_register() -> None:
    suffixes = {".py", ".toml", ".md", ".ipynb", ".jinja", ".js", ".html"}
    trees = ("src/dare", "docs", "examples")
    files = [ROOT / "README.md", *(p for tree in trees for p in (ROOT / tree).rglob("*"))]
    texts = {p: p.read_text("utf-8") for p in files if p.suffix in suffixes and p.is_file()}
    assert not [path for path, text in texts.items() if "dare-merge[" in text]
    hint = re.compile(r"install_command\('([\w-]+)'\)|pip install '\.\[([\w-]+)\]'")
    named = {name for text in texts.values() for found in hint.findall(text) for name in found}
    assert named - {""} == set(PROJECT["optional-dependencies"])


# ---------------------------------------------------------------- installed


def test_the_installed_program_merges(installed: Path, tmp_path: Path) -> None:
    where = "import dare; print(dare.__file__)"
    found = Path(run(installed / "python", "-c", where, cwd=tmp_path).strip())
    assert found.is_relative_to(installed.parent)
    assert dare.__version__ in run(installed / "dare", "--version", cwd=tmp_path)
    base = np.zeros(64, np.float32)
    save(tmp_path / "base.safetensors", {"w": base})
    for name, change in (("math", 0.001), ("code", -0.001)):
        save(tmp_path / f"{name}.safetensors", {"w": base + np.float32(change)})
    files = ["-b", "base.safetensors", "-m", "math.safetensors", "code.safetensors"]
    command = [installed / "dare", *files, "-o", "out.safetensors", "--json"]
    report = json.loads(run(*command, cwd=tmp_path))
    assert [model["name"] for model in report["models"]] == ["math", "code"]
    assert dare.verify(tmp_path / "out.safetensors").ok
