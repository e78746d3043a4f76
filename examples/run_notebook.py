"""Run a notebook without Jupyter, and store what its cells show.

    python examples/run_notebook.py examples/merge.ipynb

Cells run in order in one namespace and an empty folder. `!dare …` calls the command. What a cell
shows is stored as HTML where a result has it, as SVG if it is a chart, else as text.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import os
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Any

from dare.cli import main

Cell = dict[str, Any]


def run_cells(cells: list[Cell], folder: Path, *, draws: bool) -> list[Cell]:
    """Run the code cells in a folder; return all cells with what they showed."""
    names: dict[str, Any] = {"__name__": "__main__"}
    done, number = [], 0
    with contextlib.chdir(folder):
        for cell in cells:
            if cell["cell_type"] == "code":
                number += 1
                outputs = _run("".join(cell["source"]), names, number, draws=draws)
                done.append({**cell, "execution_count": number, "outputs": outputs})
            else:
                done.append(cell)
    return done


def _run(source: str, names: dict[str, Any], number: int, *, draws: bool) -> list[Cell]:
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        value = _call(source) if source.startswith("!dare ") else _execute(source, names)
    outputs: list[Cell] = []
    if out.getvalue():
        text = _lines(out.getvalue())
        outputs.append({"output_type": "stream", "name": "stdout", "text": text})
    if value is not None:
        shown = {"output_type": "execute_result", "execution_count": number, "metadata": {}}
        outputs.append({**shown, "data": _shown(value, draws=draws)})
    return outputs


def _call(source: str) -> None:
    status = main(shlex.split(source)[1:])
    if status:
        raise SystemExit(f"{source}: exit status {status}")


def _execute(source: str, names: dict[str, Any]) -> Any:
    """Run all statements; return the value of the last if it is an expression."""
    tree = ast.parse(source)
    last = tree.body[-1]
    if isinstance(last, ast.Expr):
        tree.body.pop()
    exec(compile(tree, "<cell>", "exec"), names)  # noqa: S102 (which is what it is for)
    if not isinstance(last, ast.Expr):
        return None
    return eval(compile(ast.Expression(last.value), "<cell>", "eval"), names)  # noqa: S307


def _shown(value: Any, *, draws: bool) -> dict[str, list[str]]:
    shown = {"text/plain": _lines(repr(value))}
    if hasattr(value, "_repr_html_"):
        return {"text/html": _lines(value._repr_html_()), **shown}
    if draws and hasattr(value, "_repr_mimebundle_"):  # a chart
        drawing = io.StringIO()
        value.save(drawing, format="svg")
        return {"image/svg+xml": _lines(drawing.getvalue()), **shown}
    return shown


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def store(path: Path) -> None:
    """Run a notebook and write it again with what it showed."""
    notebook = json.loads(path.read_text("utf-8"))
    with tempfile.TemporaryDirectory() as folder:
        notebook["cells"] = run_cells(notebook["cells"], Path(folder), draws=True)
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", "utf-8")


if __name__ == "__main__":
    os.environ |= {"NO_COLOR": "1", "COLUMNS": "88"}
    for name in sys.argv[1:]:
        store(Path(name))
