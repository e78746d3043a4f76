"""Draw the demonstration in a terminal: `python docs/images/terminal.py`.

Writes demo.svg, all that `dare demo` shows, writings.svg, what each model writes, and demo.png, the
picture that `dare demo --full --output` draws.
"""

from __future__ import annotations

import io
import os
import re
from pathlib import Path

from rich.console import Console as Screen
from rich.text import Text

from dare.demo.story import FULL, PICTURE, draw_curves, opening, run_demo
from dare.documents.console import Console
from dare.documents.terminal import print_document

HERE = Path(__file__).parent


def main() -> None:
    """Run the demonstration on a console that remembers."""
    os.environ["FORCE_COLOR"] = "1"
    console = Console(io.StringIO(), width=96)
    console.print(("$", "bold green"), " dare demo\n")
    result = run_demo(console)
    draw(console, "dare demo")
    console = Console(io.StringIO(), width=76)
    print_document(console, opening(result.parameters, result.writings))
    draw(console, "writings")
    draw_curves(run_demo(Console(quiet=True), full=True).curves, FULL, HERE / PICTURE)


def draw(console: Console, title: str) -> None:
    """Write what a console has shown as an SVG without fonts, which would come from elsewhere."""
    assert isinstance(console.file, io.StringIO)
    screen = Screen(record=True, width=console.width, file=io.StringIO(), highlight=False)
    screen.print(Text.from_ansi(console.file.getvalue()))
    picture = screen.export_svg(title=title)
    picture = re.sub(r"@font-face \{.*?\}\s*|<!--.*?-->", "", picture, flags=re.S)
    file = HERE / f"{title.rpartition(' ')[2]}.svg"
    file.write_text(picture, "utf-8")


if __name__ == "__main__":
    main()
