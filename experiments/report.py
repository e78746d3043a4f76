"""Make the tables and figures of docs/evidence.md, and what other pages take from stored results.

    python experiments/report.py            # rewrites the blocks of the pages, and the figures
    python experiments/report.py --check    # says which of them are out of date

A block stands between `<!-- evidence: NAME -->` and `<!-- end -->`; `images/evidence-NAME.svg` is a
figure.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from evidence import Evidence, read
from figures import FIGURES, draw, is_current
from tables import BLOCKS

HERE = Path(__file__).parent
DOCS = HERE.parent / "docs"
NAMES = (
    *("evidence", "choose", "claims"),
    *("more-models", "opposing", "trimming", "base-abilities"),
)
PAGES = [HERE.parent / "README.md", *(DOCS / f"{name}.md" for name in NAMES)]
IMAGES = DOCS / "images"
_BLOCK = re.compile(r"(<!-- evidence: ([\w-]+) -->)(.*?)(<!-- end -->)", re.DOTALL)


def fill(page: str, evidence: Evidence) -> str:
    """The page with its blocks made anew."""

    def replace(block: re.Match[str]) -> str:
        start, name, old, end = block.groups()
        text = BLOCKS[name](evidence)
        return f"{start}\n\n{text}\n\n{end}" if "\n" in old else f"{start}{text}{end}"

    return _BLOCK.sub(replace, page)


def main() -> None:
    """Rewrite the pages and the figures, or say what is out of date."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--results", type=Path, default=HERE / "results")
    parser.add_argument("--check", action="store_true", help="write nothing")
    asked = parser.parse_args()
    evidence = read(asked.results)
    pages = {page: fill(page.read_text("utf-8"), evidence) for page in PAGES}
    charts = {IMAGES / f"evidence-{name}.svg": make(evidence) for name, make in FIGURES.items()}
    if asked.check:
        stale = [page for page, text in pages.items() if text != page.read_text("utf-8")]
        stale += [file for file, chart in charts.items() if not is_current(file, chart)]
        sys.exit("\n".join(f"{file.name} is out of date" for file in stale) or 0)
    for page, text in pages.items():
        page.write_text(text, "utf-8")
    for file, chart in charts.items():
        file.write_text(draw(chart), "utf-8")


if __name__ == "__main__":
    main()
