"""Every link between files of the repository leads somewhere, to the very heading."""

from __future__ import annotations

import re
import unicodedata
from itertools import pairwise
from pathlib import Path
from urllib.parse import unquote

import pytest
from doc_blocks import ROOT
from markdown.extensions.toc import slugify as site_slug
from markdown_it import MarkdownIt

from dare.analysis.advice import EVIDENCE, RULES

LEFT_OUT = {".venv", ".venv-peers", "site", "node_modules"}
PAGES = sorted(
    path
    for path in ROOT.rglob("*.md")
    if not any(part in LEFT_OUT or part.startswith(".") for part in path.relative_to(ROOT).parts)
)
FROM_ELSEWHERE = {
    "docs/contributing.md": "CONTRIBUTING.md",
    "docs/changelog.md": "CHANGELOG.md",
    "docs/examples/merge.ipynb": "examples/merge.ipynb",
    "docs/examples/merge.md": "examples/merge.ipynb",
    "docs/examples/training.ipynb": "examples/training.ipynb",
    "docs/examples/training.md": "examples/training.ipynb",
    "docs/playground/index.html": "src/dare/web/templates/playground.html.jinja",
}
"""Pages of the site that are made from other files."""


def links(page: Path) -> list[str]:
    """The targets of all links and pictures that are not on another server."""
    found = []
    for token in MarkdownIt().enable("table").parse(page.read_text("utf-8")):
        for child in token.children or ():
            target = child.attrGet("href") or child.attrGet("src")
            if target and not re.match(r"[a-z]+:", str(target)):
                found.append(unquote(str(target)))
    return found


def headings(page: Path) -> list[str]:
    tokens = MarkdownIt().parse(page.read_text("utf-8"))
    return [
        "".join(child.content for child in after.children or ())
        for token, after in pairwise(tokens)
        if token.type == "heading_open"
    ]


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, on the site and where the repository is browsed."""
    found = set()
    for heading in headings(page):
        plain = unicodedata.normalize("NFKC", heading).lower()
        found.add(re.sub(r"[^\w\- ]", "", plain).replace(" ", "-"))
        found.add(site_slug(heading, "-"))
    return found


def resolve(page: Path, target: str) -> Path:
    path = (page.parent / target).resolve() if target else page
    inside = str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else ""
    return ROOT / FROM_ELSEWHERE[inside] if inside in FROM_ELSEWHERE else path


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for link in links(page):
        target, _, anchor = link.partition("#")
        path = resolve(page, target)
        assert path.exists(), f"{link}: there is no {path}"
        if anchor and path.suffix == ".md":
            assert anchor in anchors(path), f"{link}: {path.name} has no such heading"


@pytest.mark.parametrize("source", [EVIDENCE, RULES])
def test_what_advice_cites_is_there(source: str) -> None:
    page, _, anchor = source.partition("#")
    assert not anchor or anchor in anchors(ROOT / page)
    assert (ROOT / page).exists()
