"""Stages that do not lie in this package: in a file, or in another package that is installed.

A file registers its stages when it is run, as the files here do. A package names the modules that
register its stages as entry points of the group `dare.stages`.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import cache
from importlib.machinery import PathFinder
from os import PathLike
from pathlib import Path
from typing import Any

from dare.errors import InputError, warn_caller
from dare.stages.registry import STAGES
from dare.tensors.digest import bytes_digest

GROUP = "dare.stages"


def load_stages(path: str | PathLike[str]) -> tuple[str, ...]:
    """Run a Python file that registers stages; return their names.

    The file is a program like any other: run only what you trust. A file that was run before is not
    run again.
    """
    file = Path(path).expanduser().resolve()
    loaded = tuple(name for name, stage in STAGES.items() if stage.file == str(file))
    if loaded:
        return loaded
    try:
        origin = f"file {bytes_digest(file.read_bytes())}"
    except OSError as error:
        raise InputError(f"{path}: cannot read the stage: {error.strerror or error}") from None
    names = _registered_by(lambda: _run(file), str(path), origin)
    for name in names:
        STAGES[name] = replace(STAGES[name], file=str(file))
    if not names:
        raise InputError(
            f"{path}: registers no stage; decorate a function with @delta_stage() or "
            "@combine_stage() of dare.stages.registry"
        )
    return names


def _may_be_installed() -> bool:
    """Whether any package might bring stages, by its files: `importlib.metadata` takes 35 ms."""
    others = [finder for finder in sys.meta_path if finder is not PathFinder]
    if any(hasattr(finder, "find_distributions") for finder in others):
        return True
    for place in sys.path:
        try:
            folders = [entry.path for entry in os.scandir(place or ".") if "-info" in entry.name]
        except NotADirectoryError:
            return True  # an archive
        except OSError:
            continue
        for folder in folders:
            with suppress(OSError):
                if GROUP.encode() in Path(folder, "entry_points.txt").read_bytes():
                    return True
    return False


@cache
def load_installed_stages() -> None:
    """Register the stages of installed packages; one that cannot be loaded is warned of."""
    if not _may_be_installed():
        return
    from importlib.metadata import entry_points

    for entry in entry_points(group=GROUP):
        package = f"{entry.dist.name} {entry.dist.version}" if entry.dist else entry.value
        try:
            _registered_by(entry.load, package, f"package {package}")
        except InputError as error:
            warn_caller(str(error))


def _run(file: Path) -> None:
    name = f"dare_stages_in_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise InputError("is not a Python file; its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)


def _registered_by(load: Callable[[], Any], where: str, origin: str) -> tuple[str, ...]:
    """Load something and say which stages it registered; all of them or, if it fails, none."""
    before = set(STAGES)
    try:
        load()
    except Exception as error:
        for name in STAGES.keys() - before:
            del STAGES[name]
        raise InputError(
            f"{where}: its stages cannot be loaded: {type(error).__name__}: {error}"
        ) from error
    names = tuple(name for name in STAGES if name not in before)
    for name in names:
        STAGES[name] = replace(STAGES[name], origin=origin)
    return names
