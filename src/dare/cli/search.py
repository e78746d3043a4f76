"""`dare search` and `dare sweep`: which settings give the best merge, and is it really best?"""

from __future__ import annotations

import os
import shlex
import sys
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal
from warnings import catch_warnings

from dare.cli import DONE, FAILED, HELP, UsageError
from dare.cli.commands import Inputs, by_position
from dare.cli.flags import (
    RESOURCES,
    RUN,
    Json,
    Overwrite,
    Quiet,
    RunPath,
    RunSwitch,
    Switch,
    print_json,
    read_value,
    recipe_from_flags,
    switch,
    takes_recipe,
)
from dare.cli.parsing import Flag
from dare.documents.console import Console, make_console
from dare.documents.terminal import print_document
from dare.documents.words import counted
from dare.errors import DareWarning, OutputError, RecipeError

if TYPE_CHECKING:
    from dare.recipe.options import Choices, Range
    from dare.studies.document import SearchResult

WHAT = "What is searched"
SCORES = "What decides"


def _flag(field: str, group: str, *names: str, metavar: str = "") -> Flag:
    """A flag for a field of the table `[search]`, or for what stands beside it."""
    return Flag(names, group, HELP["search"].get(field, ""), metavar, least=1, shows_default=False)


@dataclass(frozen=True)
class Question:
    """Flags for what is searched and how it is judged."""

    over: Annotated[list[str] | None, _flag("over", WHAT, metavar="NAME=VALUES...")] = None
    seeds: Annotated[int | None, _flag("seeds", WHAT)] = None
    sampler: Annotated[Literal["grid", "random", "tpe"] | None, _flag("sampler", WHAT)] = None
    trials: Annotated[int | None, _flag("trials", WHAT)] = None
    data: Annotated[list[Path] | None, _flag("data", SCORES, metavar="FILE...")] = None
    minutes: Annotated[float | None, _flag("minutes", SCORES)] = None
    evaluate: Annotated[str | None, _flag("evaluate", SCORES, "--eval")] = None
    holdout: Annotated[str | None, _flag("holdout", SCORES)] = None
    objective: Annotated[
        list[str] | None, _flag("objective", SCORES, metavar="SCORE[=WEIGHT]...")
    ] = None
    guards: Annotated[list[str] | None, _flag("guards", SCORES, "--guard")] = None
    race: Annotated[bool, _flag("race", SCORES)] = False
    time_limit: Annotated[float | None, _flag("time_limit", SCORES, metavar="SECONDS")] = None


@dataclass(frozen=True)
class Means:
    """Flags for how a search is run.

    :param study: The file of the study. By default RECIPE.study.db or OUTPUT.study.db.
    :param jobs: How many candidates are scored at the same time.
    :param work: Folder for candidates that a command scores.
    :param retry: Also retry failed trials.
    """

    study: RunPath = None
    jobs: Annotated[int, Flag(("--jobs", "-j"), RESOURCES)] = 1
    work: Annotated[Path | None, Flag(group=RESOURCES)] = None
    retry: Annotated[bool, switch("--retry-failed", group=RUN)] = False


@takes_recipe
def search(
    *paths: Inputs,
    question: Question | None = None,
    means: Means | None = None,
    write: Annotated[Path | None, Flag(group=RUN, takes_dashes=True)] = None,
    html: RunPath = None,
    live: RunSwitch = False,
    dry_run: RunSwitch = False,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
    json: Json = False,
    **flags: Any,
) -> int:
    """Search.

    :param write: The recipe of the best; - for none. By default OUTPUT.toml or best.toml.
    :param html: Also write the study as a page.
    :param live: Show the study as a page while it runs, at a local address.
    :param dry_run: Check the settings and count the trials.
    """
    from dare.api import merge as run_merge
    from dare.documents.page import check_installed
    from dare.output.targets import check_free, refuse_existing
    from dare.recipe.recipe import Request
    from dare.studies.searching import make_search, study_path
    from dare.studies.searching import search as run_search

    place, flags = by_position(paths, flags)
    how = asdict(means or Means())
    if how["jobs"] < 1:
        raise UsageError(f"--jobs {how['jobs']}: must be at least 1")
    merge = recipe_from_flags(place, flags)
    asked = asdict(question or Question())
    asked |= {"over": dict(map(parse_over, asked["over"] or [])), "race": asked["race"] or None}
    console = make_console(json=json, quiet=quiet)
    output = flags.get("output")
    name = None if output is None else Path(output).name  # also of an address
    beside = None if place or name is None else f"{name}.study.db"
    how["study"] = study_path(place or merge, how["study"] or beside)
    write = write or Path(f"{name or 'best'}.toml")
    if place is not None and os.path.abspath(place) == os.path.abspath(write):
        raise UsageError(f"{write}: the best recipe would replace this one; add --write OTHER.toml")
    if dry_run:
        checked = make_search(merge, how["study"], **asked)
        trials = counted(checked.planned, "trial")
        console.print(f"baselines and {trials} by {checked.sampler}; all settings are valid")
        return DONE
    _refuse_to_replace(write, how["study"], overwrite=overwrite)
    check_free(html, "page", overwrite=overwrite)
    if html is not None:
        check_installed()
    if output is not None and not overwrite:
        refuse_existing(merge.recipe.output)
    if sys.argv[1:2] in (["search"], ["sweep"]):
        how["command"] = shlex.join(["dare", *sys.argv[1:]])
    if live:
        from dare.web.live import follow
    with follow(how["study"]) if live else nullcontext("") as address:
        if live:
            console.print(f"The search can be followed at {address}")
        result = run_search(merge, **asked, **how, verbose=not quiet)
    print_document(console, result.document())
    if str(write) != "-":
        console.print(_write_best(result, write, is_merged=output is not None))
    if output is not None and result.best is not None:
        best = Request(result.best, merge.options)
        with catch_warnings(action="ignore", category=DareWarning):  # its card has them
            measured, scores = result.to_markdown(), result.to_model_index()
            run_merge(best, measured=measured, scores=scores, overwrite=overwrite)
        console.print(f"Merged into {merge.recipe.output}")
    _write_beside(console, result, html, overwrite=overwrite, json=json)
    return FAILED if result.conclusion.failure else DONE


def parse_over(text: str) -> tuple[str, Choices | Range]:
    """Read `NAME=VALUE,VALUE…` or `NAME=FROM:TO[:log][:step=X][:layers=N]`.

    >>> parse_over("drop_rate=0.8,0.9")
    ('drop_rate', (0.8, 0.9))
    >>> parse_over("scale=0.5:2:log")[1].log
    True
    """
    from dare.recipe.options import Range

    name, equals, values = text.partition("=")
    name = name.strip()
    if not name or not equals or not values.strip():
        raise RecipeError(f"--over {text!r}: write NAME=VALUE,VALUE or NAME=FROM:TO")
    parts = [part.strip() for part in values.split(":")]
    numbers = [read_value(part) for part in parts[:2]]
    if len(parts) == 1 or not all(isinstance(number, int | float) for number in numbers):
        return name, tuple(read_value(word.strip()) for word in values.split(","))
    table: dict[str, Any] = {"from": float(numbers[0]), "to": float(numbers[1])}
    for part in parts[2:]:
        key, _, value = part.partition("=")
        if key not in ("log", "step", "layers"):
            raise RecipeError(f"--over {text!r}: {part!r} is not log, step=X or layers=N")
        table[key] = True if key == "log" and not value else read_value(value)
    try:
        return name, Range(**table)
    except RecipeError as error:
        raise RecipeError(f"--over {text!r}: {error}") from None


@wraps(search, ("__doc__", "__annotations__"))  # and the flags
def sweep(*recipe: Path, question: Question | None = None, **flags: Any) -> int:
    """Try every combination."""
    given = question or Question()
    if given.trials is not None or given.sampler not in (None, "grid"):
        raise UsageError("a sweep tries every combination; use `dare search` for others")
    status: int = search(*recipe, question=replace(given, sampler="grid"), **flags)
    return status


def show(
    study: Path,
    *,
    html: Path | None = None,
    rows: int = 12,
    failed: Switch = False,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
    json: Json = False,
) -> int:
    """Show a study, also while it runs.

    :param study: The study.
    :param html: Write a page with figures and a table.
    :param rows: How many settings to show.
    :param failed: Also show what failed evaluators printed.
    """
    from dare.studies.document import read_result

    console = make_console(json=json, quiet=quiet)
    result = read_result(study)
    print_document(console, result.document(rows=rows, outputs=failed))
    _write_beside(console, result, html, overwrite=overwrite, json=json)
    return DONE


def best(
    study: Path,
    *,
    write: Annotated[Path, Flag(takes_dashes=True)] = Path("-"),
    overwrite: Overwrite = False,
) -> int:
    """Write the recipe of the best.

    :param study: The study.
    :param write: Where to write the recipe; - for stdout.
    """
    from dare.output.targets import write_file
    from dare.studies.document import read_result

    text = read_result(study).to_toml()
    if str(write) == "-":
        print(text, end="")
    else:
        _refuse_to_replace(write, study, overwrite=overwrite)
        write_file(write, text.encode(), "recipe", overwrite=True)
        make_console().print(f"Wrote {write}")
    return DONE


def _write_best(result: SearchResult, path: Path, *, is_merged: bool) -> str:
    from dare.output.targets import write_file
    from dare.stores.locations import usual_output

    if result.best is None:
        earlier = f"; {path} is from an earlier search" if path.exists() else ""
        return f"No recipe was written, for the answer is: {result}{earlier}"
    try:
        write_file(path, result.to_toml().encode(), "recipe", overwrite=True)
    except OutputError as error:
        return f"The best recipe was not written: {error}"
    if is_merged:
        return f"The best recipe is {path}"
    output = Path(str(result.best.output or usual_output(result.best.base)))
    place = f" --output {path.stem}{output.suffix}" if output.exists() else ""
    return f"The best recipe is {path}; run it with `dare {path}{place}`"


def _refuse_to_replace(path: Path, study: Path, *, overwrite: bool) -> None:
    """Refuse to write a recipe over another file, unless a search wrote that for the same study."""
    from dare.studies.document import SIGNED

    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            first = file.readline().rstrip()
    except OSError:
        return  # there is none, or what is there will say so
    _, _, owner = first.removesuffix(SIGNED).partition(" of ")
    if not overwrite and Path(owner).resolve() != study.resolve():
        remedy = "add --write OTHER.toml (or --write - for none), or --overwrite to replace it"
        raise OutputError(f"{path}: exists, and was not written for {study}; {remedy}")


def _write_beside(
    console: Console, result: SearchResult, page: Path | None, *, overwrite: bool, json: bool
) -> None:
    """Write the page, and the result as JSON to stdout, where they are asked for."""
    if page is not None:
        result.to_html(page, overwrite=overwrite)
        console.print(f"The page is {page}; open it in a browser (no network needed)")
    if json:
        print_json(result.to_dict())
