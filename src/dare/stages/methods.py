"""Methods: chains of stages by name, and other names for them.

Stages may lie in a file or in another package that is installed. A file registers its stages when
it is run, as the files here do. A package names the modules that register its stages as entry
points of the group `dare.stages`.
"""

from __future__ import annotations

import copyreg
import importlib.util
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from importlib.machinery import PathFinder
from os import PathLike
from pathlib import Path
from typing import Any

from dare.documents.document import Columns, Document, Part, Section, Table, tabulate
from dare.documents.words import exact_text, times
from dare.errors import InputError, RecipeError, did_you_mean, warn_caller
from dare.stages.registry import STAGES, Stage
from dare.tensors.digest import bytes_digest

ALIASES: dict[str, str] = {
    "task_arithmetic": "sum",
    "dare_linear": "dare+linear",
    "dare_ties": "dare+ties",
    "dare_slerp": "dare+slerp",
    "dare_task_arithmetic": "dare+sum",
    "average": "linear",
    "dare": "dare+linear",
    "trim": "trim+linear",
    "darex": "darex+linear",
    "breadcrumbs": "breadcrumbs+linear",
    "breadcrumbs_ties": "breadcrumbs+ties",
    "della": "della+ties",
    "della_linear": "della+linear",
    "nm": "nm+linear",
}
"""Names that people bring along, as chains of ours."""
IMPLIED = {("ties", "keep_ratio"): "trim"}
"""Parameters of combine stages that, when given, put a delta stage before them."""
GROUP = "dare.stages"
MAX_MODELS = 8
"""The largest number of models whose default weights are listed."""


def stage_named(name: str, file: str = "") -> Stage:
    """Return the stage of that name; register it first, from its file or its package."""
    if name not in STAGES and file:
        load_stages(file)
    elif name not in STAGES:
        load_installed_stages()
    if name not in STAGES:
        known = [*STAGES, *ALIASES]
        others = [alias for alias in ALIASES if alias not in STAGES]
        raise RecipeError(
            f"there is no stage {name!r}{did_you_mean(name, known)}; "
            f"stages: {', '.join(STAGES)}; other names: {', '.join(others)}; "
            "a stage of your own is given with --stage FILE"
        )
    return STAGES[name]


def parse_method(method: str) -> tuple[Stage, ...]:
    """Turn `"dare+ties"`, or an alias such as `"DARE_TIES"`, into its stages.

    >>> [stage.name for stage in parse_method("DARE_TIES")]
    ['dare', 'ties']
    """
    chain = ALIASES.get(method) or ALIASES.get(method.lower(), method)
    stages = []
    for name in chain.split("+"):
        try:
            stages.append(stage_named(name if name in STAGES else name.lower()))
        except RecipeError as error:
            raise RecipeError(f"method {method!r}: {error}") from None
    for stage in stages:
        if stages.count(stage) > 1:
            raise RecipeError(f"method {method!r}: {stage.name} stands in it more than once")
    if [stage.kind for stage in stages] != ["delta"] * (len(stages) - 1) + ["combine"]:
        combiners = ", ".join(stage.name for stage in STAGES.values() if stage.kind == "combine")
        raise RecipeError(
            f"method {method!r}: a method is any delta stages and then one combine stage "
            f"({combiners}), as in 'dare+linear'"
        )
    return tuple(stages)


# A stage travels by its name and file: where it arrives, it is registered too.
copyreg.pickle(Stage, lambda stage: (stage_named, (stage.name, stage.file)))


# ---------------------------------------------------------------- stages from outside


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
    """Return whether any package might bring stages, by its files, without `importlib.metadata`.

    That takes 35 ms.
    """
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


# ---------------------------------------------------------------- as plain values


def catalogue(names: Iterable[str]) -> dict[str, Any]:
    """Return these stages with all that is known of them, and every alias."""
    return {"stages": [_stage(STAGES[name]) for name in names], "aliases": dict(ALIASES)}


def _stage(stage: Stage) -> dict[str, Any]:
    """Describe a stage; one that combines also has `models` and `default_weight`.

    `models` is the number it takes, if not any. `default_weight` lists the weight of each of one,
    two … models; there is none where models have no weight.
    """
    facts = ("name", "kind", "summary", "documentation", "paper")
    shown = {fact: getattr(stage, fact) for fact in facts}
    shown["parameters"] = [
        {fact: getattr(parameter, fact) for fact in ("name", "default", "range", "description")}
        | parameter.control
        for parameter in stage.parameters.values()
    ]
    if stage.kind == "combine":
        weigh = stage.default_weight
        counts = range(1, MAX_MODELS + 1)
        shown["models"] = stage.models
        shown["default_weight"] = None if weigh is None else [weigh(count) for count in counts]
    return shown


def explain(names: Sequence[str]) -> Iterator[Document]:
    """Yield a document for each stage that is named; without names, one with all of them."""
    for stage in (STAGES[name] for name in names):
        columns: Columns = {
            "parameter": lambda parameter: parameter.name,
            "default": lambda parameter: exact_text(parameter.default),
            "range": lambda parameter: parameter.range,
            "meaning": lambda parameter: parameter.description,
        }
        words = (" ".join(paragraph.split()) for paragraph in stage.documentation.split("\n\n"))
        parts: tuple[Part, ...] = (*words, tabulate(stage.parameters.values(), columns))
        yield Document(
            title=stage.name,
            kind="stage",
            lead=f"({stage.kind} stage)",
            sections=(Section("stage", stage.name, parts, is_brief=True),),
            facts=(("Paper", stage.paper),) if stage.paper else (),
        )
    if not names:
        yield _explain_all()


def _explain_all() -> Document:
    columns: Columns = {
        "stage": lambda stage: stage.name,
        "does": lambda stage: stage.summary,
        "parameters": lambda stage: ", ".join(
            f"{p.name}={exact_text(p.default)}" for p in stage.parameters.values()
        ),
        "paper": lambda stage: stage.paper,
    }
    titles = {
        "delta": "Delta stages change each model's delta; any number, in the order given.",
        "combine": "Combine stages make one delta of all; exactly one, at the end.",
    }
    tables = [
        tabulate((s for s in STAGES.values() if s.kind == kind), columns, title=title)
        for kind, title in titles.items()
    ]
    tables.append(Table(("alias", "is"), tuple(ALIASES.items()), title="Other names"))
    return Document(
        title=f"{times(len(STAGES), 'stage')}",
        kind="methods",
        lead="chain them as in dare+ties; `dare methods STAGE` explains one",
        sections=(Section("stages", "Stages", tuple(tables), is_brief=True),),
    )
