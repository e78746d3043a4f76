"""`dare analyze`, `dare advise` and `dare report`: know before you merge."""

from __future__ import annotations

import json as jsonlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Group, Parameter

from dare import api
from dare.analysis.documents import to_json, write_tables
from dare.analysis.judge.advice import advise as give_advice
from dare.analysis.judge.judgement import Advice, Readiness, Verdict
from dare.analysis.judge.readiness import BASE, assess
from dare.analysis.measure.analyzing import analyze as look_at
from dare.analysis.results import SCHEMA, Analysis
from dare.cli import DONE, FAILED, UsageError, show
from dare.cli.flags import RESOURCES, Debug, Json, Overwrite, Quiet, switch
from dare.cli.template import advised_toml
from dare.errors import InputError, OutputError
from dare.inputs.formats import read_config
from dare.output.manifest import find_manifest, read_manifest

if TYPE_CHECKING:
    from dare.analysis.page.outcome import Outcome

WRITES = Group("What to write", sort_key=1)

Inputs = Annotated[
    Path,
    Parameter(
        help="The base and its fine-tunes; or a recipe that names them, "
        "or an analysis that was written before."
    ),
]

Steps = Annotated[
    int | None,
    Parameter(help="How many steps the models were fine-tuned for; guidelines depend on it."),
]


@Parameter(name="*")
@dataclass(frozen=True)
class Options:
    """How the weights are looked at."""

    spectra: Annotated[
        Literal["auto", "all", "none"],
        Parameter(help="Singular values of which matrices: a spread that is quick, all, or none."),
    ] = "auto"
    allow_pickle: Annotated[bool, switch("Read .bin files, weights only.")] = False
    threads: Annotated[int | None, Parameter(group=RESOURCES, help="Worker threads.")] = None
    max_memory: Annotated[
        str, Parameter(group=RESOURCES, metavar="SIZE", help="What the buffers may take.")
    ] = "1GiB"


@dataclass(frozen=True)
class Found:
    """An analysis and what is made of it."""

    analysis: Analysis
    readiness: Readiness
    advice: Advice

    def to_json(self) -> str:
        """All of it in one document."""
        return to_json(self.analysis, self.readiness, self.advice)


def analyze(
    *inputs: Inputs,
    steps: Steps = None,
    options: Options | None = None,
    output: Annotated[
        Path | None,
        Parameter(name=["--output", "-o"], group=WRITES, help="The analysis, as JSON."),
    ] = None,
    csv: Annotated[
        Path | None, Parameter(group=WRITES, help="Tables as CSV, into this directory.")
    ] = None,
    html: Annotated[
        Path | None, Parameter(group=WRITES, help="A page with figures: see dare report.")
    ] = None,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
    json: Json = False,
    debug: Debug = False,
) -> int:
    """Say what the weights show."""
    for path in (output, html):
        _check_free(path, overwrite=overwrite)
    console = show.console(json=json, quiet=quiet)
    found = find(inputs, options, steps, verbose=not quiet)
    from dare.analysis.page.terminal import show_analysis

    show_analysis(console, found.analysis, found.readiness, found.advice)
    if output is not None:
        _write(output, found.to_json() + "\n")
        console.print(f"The analysis is in {output}; `dare report {output}` makes a page of it")
    if csv is not None:
        files = write_tables(csv, found.analysis, found.readiness, found.advice)
        console.print(f"{len(files)} tables are in {csv}")
    if html is not None:
        _write_page(html, found)
        console.print(f"The page is {html}")
    if json:
        print(found.to_json())
    return FAILED if found.readiness.verdict is Verdict.NOT_READY else DONE


def advise(
    *inputs: Inputs,
    output: Annotated[
        Path,
        Parameter(name=["--output", "-o"], help="The merge's output, as it stands in the recipe."),
    ] = Path("merged.safetensors"),
    steps: Steps = None,
    options: Options | None = None,
    quiet: Quiet = False,
    json: Json = False,
    debug: Debug = False,
) -> int:
    """Print a recipe that suits the models."""
    found = find(inputs, options, steps, verbose=not quiet)
    if json:
        print(jsonlib.dumps(found.advice.to_dict(), indent=1, ensure_ascii=False))
    else:
        print(advised_toml(found.advice, output), end="")
    return DONE if found.advice.recipe else FAILED


def report(
    *inputs: Inputs,
    output: Annotated[
        Path, Parameter(name=["--output", "-o"], group=WRITES, help="The page.")
    ] = Path("report.html"),
    merged: Annotated[
        Path | None,
        Parameter(help="The output of a finished merge: what was kept, and how much survived."),
    ] = None,
    figures: Annotated[
        Path | None, Parameter(group=WRITES, help="Also each figure, into this directory.")
    ] = None,
    format: Annotated[  # noqa: A002 (the name of the flag)
        Literal["svg", "png"], Parameter(group=WRITES, help="Of those figures.")
    ] = "svg",
    dark: Annotated[bool, switch("Those figures on a dark ground.", group=WRITES)] = False,
    steps: Steps = None,
    overwrite: Overwrite = False,
    options: Options | None = None,
    quiet: Quiet = False,
    debug: Debug = False,
) -> int:
    """Write the page."""
    _check_free(output, overwrite=overwrite)
    given = [merged] if merged is not None and not inputs else inputs
    found = find(given, options, steps, verbose=not quiet)
    outcome = None
    if merged is not None:
        outcome = _outcome(merged, found.analysis, options, verbose=not quiet)
    _write_page(output, found, outcome)
    console = show.console(quiet=quiet)
    console.print(f"The page is {output}; open it in a browser, no network is needed")
    if figures is not None:
        from dare.analysis.page import write_figures

        theme: Literal["light", "dark"] = "dark" if dark else "light"
        files = write_figures(
            figures, found.analysis, found.advice, outcome, format=format, theme=theme
        )
        console.print(f"{len(files)} figures are in {figures}")
    return DONE


def is_analysis(path: Path) -> bool:
    """Whether a file is an analysis, not a manifest or a recipe; its first words tell."""
    try:
        with path.open("rb") as file:
            return SCHEMA.partition("/")[0].encode() in file.read(100)
    except OSError:
        return False  # which is said better where it is opened


def find(
    inputs: Sequence[Path], options: Options | None, steps: int | None, *, verbose: bool
) -> Found:
    """Analyse what the command line names, or read an analysis that was written before."""
    if not inputs:
        raise UsageError("nothing to analyse: name the base and its fine-tunes, or a recipe")
    if len(inputs) == 1 and is_analysis(inputs[0]):
        analysis = Analysis.load(inputs[0])
    else:
        base, models = _named(inputs)
        analysis = look_at(base, models, verbose=verbose, **asdict(options or Options()))
    readiness = assess(analysis, _configs(analysis))
    return Found(analysis, readiness, give_advice(analysis, readiness, steps=steps))


def _configs(analysis: Analysis) -> dict[str, Mapping[str, Any]]:
    """What config.json says of the base and each model, where there is one."""
    files = {BASE: analysis.base} | {model.name: model.file for model in analysis.models}
    return {name: found for name, file in files.items() if (found := read_config(Path(file)))}


def _named(inputs: Sequence[Path]) -> tuple[Path, list[Path]]:
    """Base and models: as they are given, or as a recipe or a finished merge names them."""
    if len(inputs) > 1:
        return inputs[0], list(inputs[1:])
    manifest = find_manifest(inputs[0])
    if inputs[0].exists() and manifest is not None and not manifest.exists():
        raise UsageError(f"{inputs[0]} is a base without models: name its fine-tunes after it")
    recipe = api.load_recipe(inputs[0])
    return recipe.base, [entry.file for entry in recipe.models]


def _outcome(
    merged: Path, analysis: Analysis, options: Options | None, *, verbose: bool
) -> Outcome:
    """What a finished merge did, and how far each model's delta is still in it."""
    from dare.analysis.page.outcome import outcome_of_manifest

    place = find_manifest(merged)
    if place is None or not place.exists():
        raise InputError(f"{merged}: is not the output of a merge, or its manifest is gone")
    files = [Path(model.file) for model in analysis.models]
    how = asdict(replace(options or Options(), spectra="none"))
    beside = look_at(Path(analysis.base), [*files, merged], verbose=verbose, **how)
    last = beside.models[-1].name
    survival = [pair for pair in beside.pairs if pair.second == last]
    return outcome_of_manifest(read_manifest(place), analysis, survival, str(place))


def _write_page(path: Path, found: Found, outcome: Outcome | None = None) -> None:
    from dare.analysis.page import write_page

    write_page(path, found.analysis, found.readiness, found.advice, outcome)


def _check_free(path: Path | None, *, overwrite: bool) -> None:
    if path is not None and path.exists() and not overwrite:
        raise OutputError(f"{path}: exists already; write elsewhere, or add --overwrite")


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
    except OSError as error:
        raise OutputError(f"{path}: cannot be written: {error.strerror or error}") from None
