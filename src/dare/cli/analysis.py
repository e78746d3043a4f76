"""`dare analyze`, `dare advise` and `dare report`: know before you merge."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from dare.cli import DONE, FAILED, HELP, UsageError
from dare.cli.flags import (
    FIELDS,
    RESOURCES,
    Json,
    Overwrite,
    Quiet,
    Switch,
    output_flag,
    print_json,
)
from dare.cli.parsing import Flag
from dare.documents.console import make_console
from dare.documents.page import check_installed, render_page
from dare.documents.terminal import print_document
from dare.errors import InputError, printable

if TYPE_CHECKING:
    from dare.analysis.advice import Advice
    from dare.analysis.document import Analysis
    from dare.analysis.readiness import Readiness
    from dare.analysis.results import Outcome

    Judged = tuple[Analysis, Readiness, Advice]

WRITES = "What to write"

Inputs = Annotated[Path, Flag(help="The base and models; or a recipe with them, or an analysis.")]
Steps = Annotated[int | None, Flag(help="Fine-tuning steps, if known; they refine the advice.")]


@dataclass(frozen=True)
class Options:
    """Flags for how the weights are measured.

    :param spectra: Matrices to take singular values of: a quick selection, all, or none.
    :param allow_pickle: Read .bin files, weights only.
    """

    spectra: Literal["auto", "all", "none"] = "auto"
    allow_pickle: Switch = False
    threads: Annotated[int | None, Flag(group=RESOURCES, help="Worker threads.")] = None
    max_memory: Annotated[str | None, FIELDS["max_memory"][1]] = None
    device: Annotated[str, Flag(group=RESOURCES, help="What computes singular values.")] = "cpu"
    cluster: Annotated[str | None, FIELDS["cluster"][1]] = None


def analyze(
    *inputs: Inputs,
    steps: Steps = None,
    options: Options | None = None,
    output: Annotated[Path | None, output_flag("The analysis, as JSON.", group=WRITES)] = None,
    html: Annotated[Path | None, Flag(group=WRITES, help="Also write a page with figures.")] = None,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
    json: Json = False,
) -> int:
    """Say what the weights show."""
    from dare.analysis.advice import to_json
    from dare.analysis.document import make_document
    from dare.analysis.readiness import Verdict
    from dare.output.targets import check_free, write_file

    check_free(output, "analysis", overwrite=overwrite)
    check_free(html, "page", overwrite=overwrite)
    if html is not None:
        check_installed()
    console = make_console(json=json, quiet=quiet)
    judged = judge(inputs, options, steps, verbose=not quiet)
    readiness = judged[1]
    document = make_document(*judged)
    same = _same_arguments(inputs if output is None else [output], options, steps)
    is_clear = readiness.verdict is Verdict.NO_DEFECT
    print_document(console, replace(document, steps=_next_steps(same, offers_merge=is_clear)))
    if output is not None:
        write_file(output, f"{to_json(*judged)}\n".encode(), "analysis")
        said = f"The analysis is in {output}; `dare report {output}` turns it into a page"
        console.print(said, wraps=False)
    if html is not None:
        write_file(html, render_page(document).encode(), "page")
        console.print(f"The page is {html}", wraps=False)
    if json:
        print_json(to_json(*judged))
    return DONE if is_clear else FAILED


def _same_arguments(
    inputs: Sequence[Path], options: Options | None, steps: int | None
) -> list[str]:
    words = [str(path) for path in inputs]
    if options is not None and options.allow_pickle and len(words) > 1:
        words.append("--allow-pickle")
    return words if steps is None else [*words, "--steps", str(steps)]


def _next_steps(same: Sequence[str], *, offers_merge: bool) -> dict[str, str]:
    """Return the commands that make a merge of it, if it should be, and the one for all figures.

    The recipe's name is that of a file that is not there yet: the shell would write over it.
    """
    names = ["recipe.toml", *(f"recipe{number}.toml" for number in range(2, 100))]
    recipe = next((name for name in names if not Path(name).exists()), names[0])
    steps = {
        "advise": f"dare advise {{}} > {recipe}",
        "measure": HELP["measure"].format(recipe),
        "merge": f"dare {recipe}",
    }
    steps = (steps if offers_merge else {}) | {"more": "dare report {} # all figures, and reasons"}
    return {name: step.format(shlex.join(same)) for name, step in steps.items()}


def advise(
    *inputs: Inputs,
    output: Annotated[Path | None, output_flag("The merge's output.")] = None,
    steps: Steps = None,
    options: Options | None = None,
    quiet: Quiet = False,
    json: Json = False,
) -> int:
    """Print a recipe that suits the models."""
    from dare.cli.template import advised_toml, nothing_advised

    if output is not None and output.suffix in (".toml", ".json", ".yaml", ".yml"):
        where = f"to write the recipe to a file, end the command with > {output}"
        raise UsageError(f"--output {output}: is where the merged model will go; {where}")
    _, _, advice = judge(inputs, options, steps, verbose=not quiet)
    if not advice.recipe and not json:
        raise nothing_advised(advice, _same_arguments(inputs, options, steps))
    if json:
        print_json(advice.to_dict())
    else:
        print(advised_toml(advice, output), end="")
    if (out := advice.left_out) and not quiet:
        names = printable(", ".join(out))
        print(f"dare: left out of the recipe: {names}; its comments say why", file=sys.stderr)
    return DONE if advice.recipe else FAILED


def report(
    *inputs: Inputs,
    output: Annotated[Path, output_flag("The page.", group=WRITES)] = Path("report.html"),
    merged: Annotated[Path | None, Flag(help="A finished merge, to show what it kept.")] = None,
    steps: Steps = None,
    overwrite: Overwrite = False,
    options: Options | None = None,
    quiet: Quiet = False,
) -> int:
    """Write the page."""
    from dare.analysis.document import make_document
    from dare.output.targets import check_free, write_file

    check_free(output, "page", overwrite=overwrite)
    check_installed()
    console = make_console(quiet=quiet)
    given = [merged] if merged is not None and not inputs else inputs
    analysis, readiness, advice = judge(given, options, steps, verbose=not quiet)
    outcome = None if merged is None else _outcome(merged, analysis, options, verbose=not quiet)
    page = render_page(make_document(analysis, readiness, advice, outcome))
    write_file(output, page.encode(), "page")
    console.print(f"The page is {output}; open it in a browser, no network is needed")
    return DONE


def is_analysis(path: Path) -> bool:
    """Tell if a file is an analysis, not a manifest or a recipe, by its first words."""
    from dare.analysis.results import SCHEMA
    from dare.tensors.files import read_beginning

    try:
        return SCHEMA.partition("/")[0].encode() in read_beginning(path, 100)
    except (InputError, OSError):
        return False  # which is said better where it is opened


def judge(
    inputs: Sequence[Path], options: Options | None, steps: int | None, *, verbose: bool
) -> Judged:
    """Analyse what the command line names, or read an analysis that was written before."""
    from dare.analysis.advice import judge as judge_analysis
    from dare.analysis.analyzing import analyze as measure
    from dare.analysis.document import Analysis
    from dare.stores.locations import to_path

    inputs = [to_path(path) for path in inputs]
    if len(inputs) == 1 and is_analysis(inputs[0]):
        analysis = Analysis.load(inputs[0])
    else:
        base, models = _base_and_models(inputs, (options or Options()).allow_pickle)
        analysis = measure(base, models, verbose=verbose, **asdict(options or Options()))
    readiness, advice = judge_analysis(analysis, steps=steps)
    if advice.recipe and options is not None and options.allow_pickle:
        advice = replace(advice, recipe={**advice.recipe, "allow_pickle": True})
    return analysis, readiness, advice


def _base_and_models(inputs: Sequence[Path], allow_pickle: bool) -> tuple[Path, list[Path]]:
    """Base and models: as they are given, or as a recipe or a finished merge names them."""
    from dare.api import make_request
    from dare.output.receipt import find_manifest

    if not inputs:
        raise UsageError("nothing to analyse: name the base and the models, or a recipe")
    if len(inputs) > 1:
        return inputs[0], list(inputs[1:])
    manifest = find_manifest(inputs[0])
    if inputs[0].exists() and manifest is not None and not manifest.exists():
        raise UsageError(f"{inputs[0]} is a base without models: name models after it")
    recipe = make_request(inputs[0], allow_pickle=allow_pickle or None).recipe
    return recipe.base, [entry.file for entry in recipe.models]


def _outcome(
    merged: Path, analysis: Analysis, options: Options | None, *, verbose: bool
) -> Outcome:
    """Measure what a finished merge did, and how much of each model's delta is still in it."""
    from dare.analysis.analyzing import analyze as measure
    from dare.analysis.results import Outcome
    from dare.output.receipt import find_manifest, read_manifest
    from dare.stores.locations import to_path

    place = find_manifest(merged)
    if place is None or not place.exists():
        raise InputError(f"{merged}: is not the output of a merge, or its manifest is gone")
    files = [to_path(model.file) for model in analysis.models]
    how = asdict(replace(options or Options(), spectra="none"))
    beside = measure(to_path(analysis.base), [*files, merged], verbose=verbose, **how)
    last = beside.models[-1].name
    survival = [pair for pair in beside.pairs if pair.second == last]
    return Outcome.of_manifest(read_manifest(place), analysis, survival, output=merged)
