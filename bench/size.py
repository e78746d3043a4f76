"""How much there is of it: lines, code lines and modules of each folder.

    python bench/size.py            # this checkout, as a Markdown table
    python bench/size.py ../before  # another one beside it

A code line is one that is neither blank nor a comment, nor part of a docstring or an import.
"""

import ast
import sys
from collections import Counter
from pathlib import Path

PAGES = {".js", ".css", ".html", ".jinja"}
LIMITS = {
    **{"lines": 49_000, "code": 30_800, "modules": 205, "pages": 6_470, "C": 2_600},
    **{"tests": 53_000, "rest": 6_500},
}
REST = ("bench", "experiments", "training")
"""Folders beside the package whose programs, all lines of them, are its `rest`."""
PROGRAMS = {".py", ".mjs", ".js", ".c"}
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def code_lines(source: str) -> int:
    """Return the number of lines of a module that are code."""
    lines = source.splitlines()
    code = {
        number
        for number, line in enumerate(lines, 1)
        if line.strip() and not line.strip().startswith("#")
    }
    for node in ast.walk(ast.parse(source)):
        aside: ast.stmt | None = node if isinstance(node, ast.Import | ast.ImportFrom) else None
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            aside = node.body[0]
        if aside is not None:
            code -= set(range(aside.lineno, (aside.end_lineno or aside.lineno) + 1))
    return len(code)


def sizes(root: Path) -> dict[str, Counter[str]]:
    """Return lines, code lines, modules, pages, C, tests and the rest, by folder and in all."""
    package = root / "src" / "dare"
    folders: dict[str, Counter[str]] = {}
    for path in sorted(package.rglob("*")):
        if path.suffix not in {".py", *PAGES} or "__pycache__" in path.parts:
            continue
        text = path.read_text(encoding="utf-8")
        inside = path.relative_to(package).parts
        count = folders.setdefault(inside[0] if len(inside) > 1 else "dare", Counter())
        if path.suffix == ".py":
            count.update(lines=len(text.splitlines()), code=code_lines(text), modules=1)
        else:
            count["pages"] += len(text.splitlines())
    core = (root / "src" / "core").glob("*.[ch]")
    count = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in core)
    folders["src/core"] = Counter(C=count)
    folders["in all"] = sum(folders.values(), Counter())
    folders["in all"]["tests"] = lines_below(root / "tests", {".py"})
    for name in REST:
        folders[name] = Counter(rest=lines_below(root / name, PROGRAMS))
    folders["in all"]["rest"] = sum(folders[name]["rest"] for name in REST)
    return folders


def lines_below(folder: Path, endings: set[str]) -> int:
    """Return the number of lines of all files below a folder that end so."""
    found = (path for path in folder.rglob("*") if path.suffix in endings)
    texts = (p.read_text(encoding="utf-8") for p in found if "__pycache__" not in p.parts)
    return sum(len(text.splitlines()) for text in texts)


def main(arguments: list[str]) -> int:
    """Print the table, and return 1 where this checkout is larger than it may be."""
    here = sizes(Path(__file__).parent.parent)
    roots = [sizes(Path(argument)) for argument in arguments] + [here]
    print("| folder | " + " | ".join(LIMITS) + " |\n|---" + "|---:" * len(LIMITS) + "|")
    for folder in dict.fromkeys(name for root in roots for name in root if name != "in all"):
        print_row(folder, [root.get(folder, Counter()) for root in roots])
    print_row("in all", [root["in all"] for root in roots])
    print_row("at most", [Counter(LIMITS)])
    return int(any(here["in all"][what] > limit for what, limit in LIMITS.items()))


def print_row(name: str, counts: list[Counter[str]]) -> None:
    """Print one folder; what was before stands before the arrow."""
    cells = (
        " → ".join(f"{count[what]:,}" if count[what] else "–" for count in counts)
        for what in LIMITS
    )
    print(f"| {name} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
