"""The site is built without a warning and needs nothing from elsewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from doc_blocks import ROOT

from dare.web.assets import page_assets


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")  # --quiet would also silence --strict
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_every_page_is_there(site: Path) -> None:
    for page in (ROOT / "docs").rglob("*.md"):
        name = page.relative_to(ROOT / "docs").with_suffix("")
        built = site / "index.html" if str(name) == "index" else site / name / "index.html"
        assert built.is_file(), f"{name} was not built"
    for name in ("contributing", "changelog"):
        assert (site / name / "index.html").is_file()
    assert not list(site.rglob("*.py"))


def test_the_playground_is_part_of_it(site: Path) -> None:
    built = site / "playground"
    found = {path.relative_to(built).as_posix() for path in built.rglob("*") if path.is_file()}
    assets = page_assets(is_server=False, has_docs=True)
    assert found == set(assets)
    assert (built / "index.html").read_bytes() == assets["index.html"]()


def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    loads = re.compile(
        r"<(?:script|img|iframe|source|video)\b[^>]*?\bsrc=[\"']?(?:https?:)?//[^\"'\s>]+"
        r"|<link\b(?=[^>]*rel=[\"']?(?:stylesheet|preconnect|preload))[^>]*(?:https?:)?//[^>]+"
        r"|@import\s+[^;]*//|url\((?:https?:)?//"
    )
    for page in [*site.rglob("*.html"), *site.rglob("*.css")]:
        assert not (found := loads.findall(page.read_text("utf-8"))), f"{page}: {found}"
