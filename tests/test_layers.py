from __future__ import annotations

import ast
import importlib
import json
import re
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import dare
from dare import compat
from dare.stages import STAGES

ROOT = Path(dare.__file__).parent
LAYERS = (
    ("cli", "__main__"),
    ("web", "demo"),
    ("studies", "trainers"),
    ("api", "compat", "darex"),
    ("analysis", "lora", "deltas", "mixtures"),
    ("run",),
    ("output",),
    ("checks",),
    ("planning",),
    ("formats",),
    ("inputs",),
    ("recipe",),
    ("stages",),
    ("kernels",),
    ("tensors",),
    ("stores", "documents"),
    ("errors",),
)
"""From the top down. A module may import from its own layer and from those below."""

RANKS = {name: rank for rank, names in enumerate(LAYERS) for name in names}
MOST_AT_ROOT = 6

HEAVY = {
    "torch",
    "ray",
    "boto3",
    "botocore",
    "obstore",
    "transformers",
    "tokenizers",
    "huggingface_hub",
    "gradio",
    "pandas",
    "altair",
    "jinja2",
    "vl_convert",
    "zstandard",
    "optuna",
    "lm_eval",
    "uvicorn",
    "model_signing",
}


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


SOURCES = {module_name(path): path for path in sorted(ROOT.rglob("*.py"))}
TREES = {name: ast.parse(path.read_text()) for name, path in SOURCES.items()}


def imports(tree: ast.AST) -> set[str]:
    """The modules that are imported anywhere below a node, functions included."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            found.update(
                full if (full := f"{node.module}.{alias.name}") in SOURCES else node.module
                for alias in node.names
            )
    return found


def part(module: str) -> str:
    """The module or package directly below `dare`."""
    return module.split(".")[1]


ARROWS = {
    (name, target)
    for name, tree in TREES.items()
    if name != "dare"
    for target in imports(tree)
    if target.split(".")[0] == "dare" and target not in (name, "dare")
}


def test_contributing_has_the_same_order():
    page = (ROOT.parents[1] / "CONTRIBUTING.md").read_text(encoding="utf-8")
    written = page.partition("Imports point down only: ")[2].partition(". ")[0]
    order = [set(re.findall(r"\w+", layer)) for layer in written.split("→")]
    assert order == [set(names) - {"__main__"} for names in LAYERS]


def test_every_module_has_a_layer():
    assert {part(name) for name in SOURCES if name != "dare"} <= set(RANKS)


def test_arrows_point_down():
    assert [
        f"{source} imports {target}"
        for source, target in sorted(ARROWS)
        if RANKS[part(target)] < RANKS[part(source)]
    ] == []


def test_merging_knows_nothing_of_the_analysis():
    merging = {"api", "deltas"}  # the other parts of it are below
    assert [arrow for arrow in ARROWS if part(arrow[0]) in merging and "analysis" in arrow[1]] == []


def test_merging_names_no_stage():
    """A stage declares what others need to know of it."""
    names = set(STAGES) - {"dare"}  # which is also the name of the program
    assert [
        f"{source} names {node.value}"
        for source, tree in TREES.items()
        if part(f"{source}.") in {"api", "run", "checks", "deltas", "planning"}
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        if set(node.value.split("+")) & names
    ] == []


def test_from_the_package_itself_only_the_version_is_taken():
    taken = {
        alias.name
        for name, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == "dare"
        for alias in node.names
        if f"dare.{alias.name}" not in SOURCES
    }
    assert taken == {"__version__"}


def test_no_class_name_stands_twice():
    places: dict[str, list[str]] = {}
    for module, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(module)
    assert {name: modules for name, modules in places.items() if len(modules) > 1} == {}


def test_few_modules_stand_outside_the_folders():
    assert len(list(ROOT.glob("*.py"))) <= MOST_AT_ROOT


def test_threads_know_nothing_of_what_they_run():
    arrows = {target for source, target in ARROWS if source == "dare.run.threads"}
    assert arrows == {"dare.tensors.chunks"}


def test_there_are_no_circles():
    graph: dict[str, set[str]] = {}
    for source, target in ARROWS:
        if not source.startswith(f"{target}."):  # a package's own module may import from it
            graph.setdefault(source, set()).add(target)
    graph = {
        source: {target for target in targets if not target.startswith(f"{source}.")}
        for source, targets in graph.items()
    }
    TopologicalSorter(graph).prepare()


def test_heavy_packages_are_imported_in_one_place_each():
    places: dict[str, set[str]] = {}
    # Models are run by torch and transformers; what is read from the hub is written there too.
    exempt = ("dare.studies.evaluators.examples", "dare.output.hub")
    for name, tree in TREES.items():
        for target in imports(tree) if name not in exempt else ():
            places.setdefault(target.split(".")[0], set()).add(name)
    assert {name: found for name, found in places.items() if name in HEAVY and len(found) > 1} == {}


def test_optional_packages_are_imported_only_when_used():
    assert [
        f"{name} imports {target}"
        for name, tree in TREES.items()
        for statement in tree.body
        if not isinstance(statement, ast.FunctionDef | ast.ClassDef)
        if not ast.unparse(statement).startswith("if TYPE_CHECKING")
        for target in imports(statement)
        if target.split(".")[0] in HEAVY
    ] == []


def test_a_server_is_only_in_the_playground_and_the_page_that_follows_a_search():
    named = {name for name, tree in TREES.items() if "starlette" in roots(imports(tree))}
    assert named == {f"dare.web.{module}" for module in ("guard", "live", "own", "server")}


def roots(modules: set[str]) -> set[str]:
    """The packages that modules are in."""
    return {name.split(".")[0] for name in modules}


def run_python(code: str) -> str:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def modules_after(code: str) -> set[str]:
    return set(
        json.loads(run_python(f"{code}\nimport json, sys; print(json.dumps([*sys.modules]))"))
    )


def test_importing_dare_imports_next_to_nothing():
    loaded = modules_after("import dare")
    assert {name for name in loaded if name.split(".")[0] == "dare"} == {"dare"}
    assert loaded & (HEAVY | {"numpy", "rich", "safetensors"}) == set()


def test_the_public_names_import_nothing_heavy():
    names = [name for name in dare.__all__ if name != "__version__"]
    loaded = modules_after(f"from dare import {', '.join(names)}")
    assert "dare.api" in loaded
    assert loaded & HEAVY == set()


def test_all_public_names_are_there_and_nothing_else():
    assert dir(dare) == sorted(dare.__all__)
    assert set(dare.__all__) == {*dare._HOMES, "__version__"} - set(compat.__all__)
    for name, module in dare._HOMES.items():
        home = importlib.import_module(f"dare.{module}")
        assert dare.__getattr__(name) is getattr(home, name)


def test_names_from_papers_can_be_imported_and_are_not_listed():
    named = {name for name, module in dare._HOMES.items() if module == "compat"}
    assert named == set(compat.__all__)
    code = f"from dare import {', '.join(sorted(named))}; import dare; print(len(dir(dare)))"
    assert int(run_python(code)) == len(dare.__all__)


def test_type_checkers_see_the_public_names():
    stub = ast.parse(Path(dare.__file__).with_suffix(".pyi").read_text())
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    seen = {alias.asname: node.module for node in imports for alias in node.names}
    assert seen == {name: f"dare.{module}" for name, module in dare._HOMES.items()}


@pytest.mark.parametrize(
    "first", ["dare.merge", "import dare.planning.plan", "import dare.output.verification"]
)
def test_public_names_mean_the_same_whatever_was_imported_before(first):
    code = f"import dare\n{first}\nprint(type(dare.plan).__name__, type(dare.verify).__name__)"
    assert run_python(code).split() == ["function", "function"]


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'dare' has no attribute 'mrege'"):
        dare.mrege  # noqa: B018
