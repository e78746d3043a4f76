"""`dare search` and `dare sweep`: which settings give the best merge, and is it one?"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Group, Parameter
from rich.console import Console

from dare.cli import DONE, FAILED, UsageError, show
from dare.cli.flags import (
    FILES,
    RESOURCES,
    RUN,
    Debug,
    Json,
    Overwrite,
    Quiet,
    recipe_from_flags,
    several,
    switch,
    takes_recipe,
)
from dare.cli.texts import COMMANDS, SUBCOMMANDS
from dare.documents.words import times
from dare.errors import OutputError, RecipeError
from dare.recipe.document import read_value
from dare.recipe.search import Choices, Range, Sampler, Search
from dare.studies.document import SIGNED, SearchResult, read_result
from dare.studies.searching import make_request, study_place
from dare.studies.searching import search as run_search

RecipePath = Annotated[Path | None, Parameter(group=FILES, help="The same as --config.")]

search = App(name="search", help=COMMANDS["search"], help_format="rich", help_epilogue="")

WHAT = Group("What is searched", sort_key=0)
SCORES = Group("What decides", sort_key=0.5)
WATCH_SECONDS = 2.0
AS_THEY_ARE = ("holdout", "seeds", "sampler", "trials", "objective", "time_limit")
"""Options that a search is given under their names."""


def _help(name: str) -> str | None:
    return Search.model_fields[name].description


@Parameter(name="*")
@dataclass(frozen=True)
class Options:
    """Flags for what is searched and how it is judged."""

    over: Annotated[
        list[str] | None,
        several(
            "A setting and its values: drop_rate=0.8,0.9, scale=0.5:2 or include.math=true,false. "
            "Without it, only the baselines are scored.",
            group=WHAT,
            metavar="NAME=VALUES...",
        ),
    ] = None
    seeds: Annotated[int | None, Parameter(group=WHAT, help=_help("seeds"))] = None
    sampler: Annotated[Sampler | None, Parameter(group=WHAT, help=_help("sampler"))] = None
    trials: Annotated[int | None, Parameter(group=WHAT, help=_help("trials"))] = None
    eval: Annotated[
        str | None,
        Parameter(
            name="--eval",
            group=SCORES,
            help="FILE.py:FUNCTION, MODULE:FUNCTION, lm_eval:TASKS@FOLDER, or a command with "
            "{model} whose last line is a JSON object of numbers.",
        ),
    ] = None
    holdout: Annotated[
        str | None, Parameter(group=SCORES, help="An evaluator on other data, for the winner only.")
    ] = None
    objective: Annotated[
        list[str] | None,
        several(
            "Scores whose weighted mean is to be large: math code=2 loss=-0.5. By default all.",
            group=SCORES,
            metavar="SCORE[=WEIGHT]...",
        ),
    ] = None
    guard: Annotated[
        list[str] | None,
        several(
            "A condition: english:max:1.25, add:min:0.9, or '*:keep:0.95' (no task below 95 % of "
            "the best single model).",
            group=SCORES,
        ),
    ] = None
    race: Annotated[bool, switch(_help("race") or "", group=SCORES)] = False
    time_limit: Annotated[
        float | None, Parameter(group=SCORES, metavar="SECONDS", help=_help("time_limit"))
    ] = None
    study: Annotated[
        Path | None, Parameter(group=RUN, help="An SQLite file. By default RECIPE.study.db.")
    ] = None
    jobs: Annotated[
        int, Parameter(name=["--jobs", "-j"], group=RESOURCES, help="Candidates scored at a time.")
    ] = 1
    work: Annotated[
        Path | None, Parameter(group=RESOURCES, help="Folder for the candidates of commands.")
    ] = None
    retry_failed: Annotated[bool, switch("Also try failed trials again.", group=RUN)] = False
    advice: Annotated[
        bool, Parameter(group=RUN, help="Analyse the models first and start with the advice.")
    ] = True
    write: Annotated[
        Path, Parameter(group=RUN, allow_leading_hyphen=True, help="The best recipe; - for none.")
    ] = Path("best.toml")
    html: Annotated[Path | None, Parameter(group=RUN, help="Also write a page.")] = None
    dry_run: Annotated[bool, switch("Check the settings and count trials.", group=RUN)] = False


@search.default
@takes_recipe
def run(
    recipe: RecipePath = None,
    /,
    *,
    options: Options | None = None,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
    json: Json = False,
    **flags: Any,
) -> int:
    """Search."""
    place = recipe or flags.get("config")
    options = options or Options()
    if options.jobs < 1:
        raise UsageError(f"--jobs {options.jobs}: must be at least 1")
    merge = recipe_from_flags(place, flags)
    asked: dict[str, Any] = {
        "over": dict(map(parse_over, options.over or [])),
        "evaluate": options.eval,
        "guards": options.guard,
        "race": options.race or None,
    }
    asked |= {name: getattr(options, name) for name in AS_THEY_ARE}
    console = show.console(json=json, quiet=quiet)
    if options.dry_run:
        checked = make_request(merge, **asked)
        trials = times(checked.planned, "trial")
        console.print(f"baselines and {trials} by {checked.sampler}; all settings are valid")
        return DONE
    result = run_search(
        merge,
        **asked,
        study=study_place(place or merge, options.study),
        jobs=options.jobs,
        retry=options.retry_failed,
        advice=options.advice,
        work=options.work,
        verbose=not quiet,
    )
    show.document(console, result.document())
    if str(options.write) != "-":
        console.print(_written(result, options.write, overwrite=overwrite))
    _write_beside(console, result, options.html, overwrite=overwrite, json=json)
    return DONE if result.best is not None else FAILED


def parse_over(text: str) -> tuple[str, Choices | Range]:
    """Read `NAME=VALUE,VALUE…` or `NAME=FROM:TO[:log][:step=X][:layers=N]`.

    >>> parse_over("drop_rate=0.8,0.9")
    ('drop_rate', (0.8, 0.9))
    >>> parse_over("scale=0.5:2:log")[1].log
    True
    """
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


def sweep(*recipe: Path, options: Options | None = None, **flags: Any) -> int:
    """Try every combination."""
    given = options or Options()
    if given.trials is not None or given.sampler not in (None, "grid"):
        raise UsageError("a sweep tries every combination; use `dare search` for others")
    return run(*recipe, options=replace(given, sampler="grid"), **flags)


sweep.__signature__ = run.__signature__  # type: ignore[attr-defined]
sweep.__annotations__ = run.__annotations__


StudyFile = Annotated[Path, Parameter(help="The study.")]


@search.command(name="show", help=SUBCOMMANDS["search show"], help_epilogue="")
def show_command(
    study: StudyFile,
    *,
    html: Annotated[Path | None, Parameter(help="Write a page with figures and a table.")] = None,
    rows: Annotated[int, Parameter(help="How many settings to show.")] = 12,
    failed: Annotated[bool, switch("Also show what failed evaluators printed.")] = False,
    watch: Annotated[bool, switch("Show it again and again until the study is complete.")] = False,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
    json: Json = False,
    debug: Debug = False,
) -> int:
    """Show a study, also while it runs."""
    console = show.console(json=json, quiet=quiet)
    while True:
        result = read_result(study)
        if watch and console.is_terminal:
            console.clear()
        show.document(console, result.document(rows=rows, outputs=failed))
        ended = sum(trial.state.is_final for trial in result.data.candidates)
        if not watch or ended >= result.data.planned:
            break
        time.sleep(WATCH_SECONDS)
    _write_beside(console, result, html, overwrite=overwrite, json=json)
    return DONE


@search.command(name="best", help=SUBCOMMANDS["search best"], help_epilogue="")
def best_command(
    study: StudyFile,
    *,
    write: Annotated[
        Path, Parameter(allow_leading_hyphen=True, help="Where to write the recipe; - for stdout.")
    ] = Path("-"),
    simplest: Annotated[bool, switch("Take the simplest one within noise of the best.")] = False,
    overwrite: Overwrite = False,
    debug: Debug = False,
) -> int:
    """Write the recipe of the best."""
    result = read_result(study)
    text = result.to_toml(simplest=simplest)
    if str(write) == "-":
        print(text, end="")
    else:
        _write_recipe(write, text, overwrite=overwrite)
        show.console().print(f"{write} is written")
    return DONE


def _written(result: SearchResult, path: Path, *, overwrite: bool) -> str:
    if result.best is None:
        earlier = f"; {path} is of an earlier search" if path.exists() else ""
        return f"No recipe is written: {result}{earlier}"
    try:
        _write_recipe(path, result.to_toml(), overwrite=overwrite)
    except OutputError as error:
        return f"The best recipe was not written: {error}"
    return f"The best recipe is {path}; run it with `dare {path}`"


def _write_recipe(path: Path, text: str, *, overwrite: bool) -> None:
    """Write a recipe, also over one that a search has written."""
    from dare.output.targets import write_file

    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            overwrite |= file.readline().rstrip().endswith(SIGNED)
    except OSError:
        pass  # there is none, or what is there will say so
    write_file(path, text.encode(), "recipe", overwrite=overwrite)


def _write_beside(
    console: Console, result: SearchResult, page: Path | None, *, overwrite: bool, json: bool
) -> None:
    """Write the page, and the result as JSON to stdout, where they are asked for."""
    if page is not None:
        result.to_html(page, overwrite=overwrite)
        console.print(f"The page is {page}; open it in a browser (no network needed)")
    if json:
        show.json(result.to_dict())
