"""Nothing private of other packages: no name that begins with an underscore, no hidden module."""

import ast
from collections.abc import Iterator
from pathlib import Path

import dare

PACKAGE = Path(dare.__file__).parent
MODULES = {
    path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text(encoding="utf-8"))
    for path in PACKAGE.rglob("*.py")
}
# Documented by Python in spite of their underscores: named tuples, the exit of a process, …
DOCUMENTED = {"_replace", "_asdict", "_fields", "_exit", "_getframe"}
# Modules that their packages do not describe, by the only one of ours that may import them.
UNDOCUMENTED = {
    "core_model_loading": "inputs/transformers_models.py",
    "conversion_mapping": "inputs/transformers_models.py",
}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def defined_names() -> set[str]:
    """Names that this package gives: of functions, classes, variables and attributes of `self`."""
    found = set()
    for tree in MODULES.values():
        for node in ast.walk(tree):
            match node:
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                    found.add(name)
                case ast.ClassDef(name=name) | ast.Name(id=name, ctx=ast.Store()):
                    found.add(name)
                case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                    found.add(name)
    return found


def imports(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_no_private_module_or_name_is_imported():
    for place, tree in MODULES.items():
        for name in imports(tree):
            is_ours = name.startswith("dare.") or name == "_thread"  # which Python describes
            assert is_ours or not any(map(is_private, name.split("."))), f"{place} imports {name}"


def test_no_private_attribute_of_others_is_used():
    known = defined_names() | DOCUMENTED
    for place, tree in MODULES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and is_private(node.attr):
                assert node.attr in known, f"{place}:{node.lineno} uses {node.attr}"


def test_undocumented_modules_are_used_in_one_place():
    for place, tree in MODULES.items():
        for name in imports(tree):
            for part in set(name.split(".")) & UNDOCUMENTED.keys():
                assert place == UNDOCUMENTED[part], f"{place} imports {name}"
