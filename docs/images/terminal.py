"""Draw what `dare demo` shows in a terminal: `python docs/images/terminal.py` writes demo.svg."""

from __future__ import annotations

import io
import re
from pathlib import Path

from rich.console import Console

from dare.demo import run_demo

COLUMNS = 96
TARGET = Path(__file__).with_name("demo.svg")


def main() -> None:
    """Run the demonstration on a console that remembers."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), highlight=False)
    console.print("[bold green]$[/] dare demo\n")
    run_demo(console)
    picture = console.export_svg(title="dare demo")
    # Fonts would be fetched from elsewhere; the reader's own will do.
    picture = re.sub(r"@font-face \{.*?\}\s*|<!--.*?-->", "", picture, flags=re.S)
    TARGET.write_text(picture, "utf-8")


if __name__ == "__main__":
    main()
