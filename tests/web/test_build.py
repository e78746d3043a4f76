"""The page as static files: what is written, where, and that it needs nothing else."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from sites import Site

from dare.cli import main
from dare.demo.tasks import TASKS, held_out_english
from dare.errors import OutputError
from dare.web import assets
from dare.web.assets import PAGE, page_assets


@pytest.fixture
def build(capsys):
    """A function that builds into a folder, and returns the status and what was printed."""
    return lambda folder, *flags: (
        main(["playground", "--build", str(folder), *flags]),
        *capsys.readouterr(),
    )


def files_of(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_all_files_are_written_and_named(build, tmp_path, static_site):
    folder = tmp_path / "a" / "site"
    status, out, _ = build(folder, "--json")
    assert status == 0
    assert json.loads(out) == {"folder": str(folder), "files": sorted(files_of(folder))}
    assert files_of(folder) == files_of(static_site.folder) == set(page_assets(is_server=False))
    for name in files_of(folder):
        assert (folder / name).read_bytes() == (static_site.folder / name).read_bytes(), name


def test_a_folder_is_built_into_again_but_not_over_other_things(build, tmp_path):
    assert build(tmp_path)[0] == 0
    (tmp_path / "main.js").write_text("spoilt")
    status, out, _ = build(tmp_path)
    assert status == 0
    assert "--directory" in out
    assert (tmp_path / "main.js").read_bytes() == (PAGE / "main.js").read_bytes()
    (tmp_path / "thesis.tex").write_text("mine")
    status, _, err = build(tmp_path)
    assert status == 1
    assert "thesis.tex" in err
    assert "--overwrite" in err
    assert build(tmp_path, "--overwrite")[0] == 0
    assert (tmp_path / "thesis.tex").read_text() == "mine"


def test_it_links_to_the_documentation_only_where_that_lies(build, tmp_path, static_site):
    (tmp_path / "methods").mkdir()
    build(tmp_path / "playground")
    pages = [folder / "index.html" for folder in (tmp_path / "playground", static_site.folder)]
    linked, alone = (re.findall(r'href="(\.\./[^"]*)"', page.read_text("utf-8")) for page in pages)
    assert alone == []
    docs = Path(__file__).parents[2] / "docs"
    assert "../methods/" in linked
    assert [href for href in linked if not (docs / f"{href[3:-1]}.md").is_file()] == []


@pytest.mark.parametrize("name", ["index.html", "main.js"])
def test_somebody_elses_page_is_not_replaced(build, tmp_path, name):
    (tmp_path / name).write_text("<!doctype html> mine")
    status, _, err = build(tmp_path, "--overwrite")
    assert status == 1
    assert name in err
    assert files_of(tmp_path) == {name}
    assert (tmp_path / name).read_text() == "<!doctype html> mine"


def test_prompts_are_those_that_nobody_was_trained_on(static_site: Site):
    shown = json.loads((static_site.folder / "prompts.json").read_bytes())
    assert shown["english"].encode() == held_out_english()[:4096]
    for task, on_page in zip(TASKS, shown["tasks"], strict=True):
        assert on_page["name"] == task.name
        assert [tuple(e) for e in on_page["examples"]] == task.examples("test", 100)
        seen = set(task.examples("train")) | set(task.examples("validation"))
        assert not seen & {tuple(e) for e in on_page["examples"]}


def test_the_page_names_no_other_host(static_site: Site):
    """In what it loads; its prose may link to papers."""
    page = (static_site.folder / "index.html").read_text("utf-8")
    loads = re.findall(r"<(?:script|img|iframe|link)\b[^>]*(?:src|href)=[\"']([^\"']+)", page)
    assert "main.js" in loads
    assert [address for address in loads if "//" in address] == []
    for path in static_site.folder.rglob("*.js"):
        if path.name != "vega.js":
            text = path.read_text("utf-8")
            assert not re.findall(r"(?:fetch|import|Worker)\(\s*[\"'`]https?:", text), path


# ---------------------------------------------------------------- the library that draws


def test_the_library_is_made_once_and_a_spoilt_one_counts_as_none(tmp_path, monkeypatch):
    made: list[bytes] = []
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def make() -> bytes:
        made.append(b"library %d" % len(made))
        return made[-1]

    monkeypatch.setattr(assets, "_make_in_process", make)
    assert assets.drawing_library() == assets.drawing_library() == b"library 0"
    (kept,) = (tmp_path / "dare").iterdir()
    kept.write_bytes(kept.read_bytes()[:-1])
    assert assets.drawing_library() == assets.drawing_library() == b"library 1"
    (tmp_path / "file").write_text("not a folder, so that nothing can be kept")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert assets.drawing_library() == b"library 2"


def test_a_library_that_cannot_be_made_is_said(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(assets.sys, "executable", shutil.which("false"))
    with pytest.raises(OutputError, match="cannot be made"):
        assets.drawing_library()
