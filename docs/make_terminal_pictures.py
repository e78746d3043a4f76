"""Draw what commands show in a terminal: `python docs/make_terminal_pictures.py`.

Writes images/terminal-COMMAND-MODELS-COLUMNS.svg. The commands are run as a user would type them,
with the demonstration's models: three, and ten, of which some are broken, copies, or opposed.
"""

from __future__ import annotations

import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

from dare.demo.llama import read_weights
from dare.demo.merges import BASE, TUNED, WEIGHTS, write_models
from dare.documents.terminal import fold_command
from dare.inputs.sources import open_source

FOLDER = Path(__file__).with_name("images")
DRAWN = (
    ("analyze", "ten", 80),
    ("analyze", "ten", 120),
    ("merge", "three", 80),
    ("merge", "ten", 120),
)
"""What the pages show: the command, how many models, columns. `--all` draws every one."""
WIDTHS = (80, 120)
THREE = ("add", "say", "sort")
MADE = {
    "un-add": (("add",), -0.8),
    "sort-times-20": (("sort",), 20.0),
    "say-and-sort-fine-tuned-together-checkpoint-12000": (("say", "sort"), 1.0),
    "add-and-say": (("add", "say"), 0.7),
}
"""Models that are sums of the changes of others, with a factor."""
TEN = (*THREE, "add-nan", "base-permuted", "copy-of-sort", *MADE)


def dare(*arguments: str, columns: int = 80) -> str:
    """Run a command; return what it shows on a terminal of so many columns, with its colours."""
    shown = {"COLUMNS": str(columns), "FORCE_COLOR": "1", "PYTHONIOENCODING": "utf-8"}
    command = [sys.executable, "-m", "dare", *arguments]
    done = subprocess.run(  # noqa: S603 (this very program)
        command, env=os.environ | shown, capture_output=True, check=False
    )
    if done.returncode and not done.stdout:
        sys.exit(done.stderr.decode())
    return done.stdout.decode()


def make_models() -> None:
    """The models, in the current directory."""
    write_models(Path())
    shutil.copytree("sort", "copy-of-sort")
    for name, (parts, scale) in MADE.items():
        shutil.copytree("base", name)
        base = read_weights(BASE)
        tuned = [read_weights(TUNED[part]) for part in parts]
        sums = {k: v + scale * sum(each[k] - v for each in tuned) for k, v in base.items()}
        file = bytearray(Path(name, WEIGHTS).read_bytes())
        with open_source(BASE) as source:
            for tensor, values in sums.items():
                info = source.tensors[tensor]
                start = info.position(0)
                file[start : start + info.nbytes] = values.astype(info.dtype.numpy_type).tobytes()
        Path(name, WEIGHTS).write_bytes(file)


def draw(line: str, columns: int) -> str:
    """A command and what it shows, as SVG."""
    console = Console(record=True, width=columns, file=io.StringIO(), highlight=False)
    for place, part in enumerate(fold_command(line, columns - 2)):
        console.print(Text.assemble(("  " if place else "$ ", "bold green"), part))
    console.print(Text.from_ansi(dare(*line.split()[1:], columns=columns)))
    picture = console.export_svg(title="dare", unique_id="terminal")
    # Fonts would be fetched from elsewhere; the reader's will do.
    return re.sub(r"@font-face \{.*?\}\s*|<!--.*?-->", "", picture, flags=re.S)


def main() -> None:
    """Draw each command at each width."""
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        make_models()
        for count, names in (("three", THREE), ("ten", TEN)):
            models = " ".join(("base", *names))
            whole = " ".join(name for name in names if name != "add-nan")
            for columns in WIDTHS:
                lines = {
                    "analyze": f"dare analyze {models}",
                    "merge": f"dare base {whole} -o merged --overwrite",
                }
                for command, line in lines.items():
                    if (command, count, columns) not in DRAWN and "--all" not in sys.argv:
                        continue
                    target = FOLDER / f"terminal-{command}-{count}-{columns}.svg"
                    target.write_text(draw(line, columns), "utf-8")
        (FOLDER / "terminal-help-80.svg").write_text(draw("dare --help", 80), "utf-8")


if __name__ == "__main__":
    main()
