"""The commands, apart from their help, which is in `help.toml`."""

from __future__ import annotations

import os
import shlex
import sys
import warnings
from collections.abc import Sequence
from dataclasses import asdict, replace
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from dare.cli import DONE, FAILED, INTERRUPTED, UsageError
from dare.cli.flags import (
    FILES,
    RUN,
    Json,
    Overwrite,
    Quiet,
    Resume,
    RunPath,
    RunSwitch,
    StageFiles,
    Switch,
    Verbose,
    Work,
    output_flag,
    print_json,
    recipe_from_flags,
    runs,
    show_result,
    switch,
    takes_recipe,
)
from dare.cli.parsing import Flag
from dare.documents.console import Console, make_console
from dare.documents.notices import notice
from dare.documents.shown import Shown
from dare.documents.terminal import print_document, print_steps
from dare.errors import DareWarning, InputError, RecipeError, VerificationError, did_you_mean

if TYPE_CHECKING:
    from dare.analysis.advice import Advice
    from dare.planning.plan import Plan
    from dare.recipe.recipe import Request

Inputs = Annotated[
    Path, Flag(("PATHS",), FILES, help="Base and models; or a recipe, or an output.")
]
MOST_PORT = 65535
MERGEKIT_GUIDE = "docs/guides/mergekit.md"
Facts = tuple[tuple[str, str], ...]


@takes_recipe
def merge(
    *paths: Inputs,
    overwrite: Overwrite = False,
    resume: Resume = True,
    dry_run: RunSwitch = False,
    part: Annotated[str | None, Flag(("--slice",), RUN, metavar="NUMBER/OF")] = None,
    wait: Annotated[float, Flag(group=RUN, metavar="SECONDS")] = 600,
    verbose: Verbose = False,
    quiet: Quiet = False,
    json: Json = False,
    **flags: Any,
) -> int:
    """Carry out a recipe.

    :param dry_run: Only show the plan, like dare plan.
    :param part: Merge only one part, such as 3/16.
    :param wait: How long a slice waits for other slices.
    """
    from dare import api
    from dare.planning.slices import Slice
    from dare.run.engine import run
    from dare.run.merging import Merge
    from dare.run.slices import run_slice

    if part is not None and not resume:
        remedy = "delete the folder OUTPUT.partial to start over"
        raise UsageError(f"--slice and --no-resume given: leave one out, or {remedy}")
    if not wait >= 0:
        raise UsageError(f"--wait {wait:g}: must be 0 or more seconds")
    if part is not None:
        Slice.parse(part)  # before anything is read
    asked = _read_request(paths, flags, verbose=verbose, quiet=quiet)
    facts = _conversion_facts(paths, flags)
    if dry_run:
        return _show_plan(asked, facts, json=json, quiet=quiet)
    console = make_console(json=json, quiet=not asked.options.verbose)
    planned = api.plan_to_run(asked, overwrite=overwrite)
    how: dict[str, Any] = {"overwrite": overwrite}
    how["before"] = lambda: _print_plan(console, planned, facts)
    with warnings.catch_warnings(action="ignore", category=DareWarning):  # the report has them
        done: Shown
        if part is None:
            done = run(Merge(planned), resume=resume, **how)
        else:
            done = run_slice(planned, part, wait=wait, **how)
    return show_result(console, done, as_json=json)


@takes_recipe
def finish(
    *paths: Inputs,
    overwrite: Overwrite = False,
    verbose: Verbose = False,
    quiet: Quiet = False,
    json: Json = False,
    **flags: Any,
) -> int:
    """Publish what slices have made."""
    from dare import api

    asked = _read_request(paths, flags, verbose=verbose, quiet=quiet)
    console = make_console(json=json, quiet=not asked.options.verbose)
    with warnings.catch_warnings(action="ignore", category=DareWarning):  # the report has them
        report = api.finish(asked, overwrite=overwrite)
    return show_result(console, report, as_json=json)


@takes_recipe
def plan(*paths: Inputs, quiet: Quiet = False, json: Json = False, **flags: Any) -> int:
    """Show a plan."""
    facts = _conversion_facts(paths, flags)
    return _show_plan(_read_request(paths, flags), facts, json=json, quiet=quiet)


def _show_plan(recipe: Request, facts: Facts, *, json: bool, quiet: bool) -> int:
    from dare import api

    planned = api.plan(recipe)
    _print_plan(make_console(json=json, quiet=quiet), planned, facts, brief=False)
    if json:
        print_json(planned.to_dict())
    return DONE


def _print_plan(console: Console, planned: Plan, facts: Facts = (), *, brief: bool = True) -> None:
    """Print a plan with further facts."""
    document = planned.document(brief=brief)
    print_document(console, replace(document, facts=(*document.facts, *facts)))


def _conversion_facts(paths: Sequence[Path], flags: dict[str, Any]) -> Facts:
    """Say in a line how the weights will differ from those of the tool whose file is merged."""
    from dare.api import YAML_SUFFIXES
    from dare.inputs.opening import convert_yaml

    path, _ = by_position(paths, flags)
    if path is None or path.suffix.lower() not in YAML_SUFFIXES:
        return ()
    summary = convert_yaml(path).summary
    more = f"dare convert {shlex.quote(str(path))} says more, {MERGEKIT_GUIDE} why"
    return (("unlike mergekit", f"{summary}; {more}"),) if summary else ()


def _read_request(
    paths: Sequence[Path], flags: dict[str, Any], *, verbose: bool = False, quiet: bool = False
) -> Request:
    if verbose and quiet:
        raise UsageError("--verbose and --quiet given; leave one out")
    recipe, flags = by_position(paths, flags)
    fixed: dict[str, Any] = {"verbose": verbose} if verbose or quiet else {}
    return recipe_from_flags(recipe, flags, **fixed)


def by_position(paths: Sequence[Path], flags: dict[str, Any]) -> tuple[Path | None, dict[str, Any]]:
    """Return the recipe that is named with or without a flag, or else flags for base and models."""
    from dare.api import YAML_SUFFIXES
    from dare.recipe.document import interpolates
    from dare.stores.locations import to_path

    config = flags.get("config")
    if not paths:
        return config, flags
    if len(paths) == 1 and config is not None:
        raise UsageError(f"two recipes given, {paths[0]} and {config}; leave one out")
    if len(paths) == 1 and _may_be_recipe(to_path(paths[0])):
        return paths[0], flags
    if recipes := [path for path in paths if path.suffix.lower() in (".toml", *YAML_SUFFIXES)]:
        remedy = "it names its models; --base and --models replace them"
        raise UsageError(f"{recipes[0]} is a recipe, so give no other path: {remedy}")
    if twice := [f"--{name}" for name in ("models", "config") if flags.get(name)]:
        flagged = f"{' and '.join(twice)} too; leave out {twice[0]}, or give all of them by flags"
        raise UsageError(f"paths are given without flags, and {flagged}")
    if flags.get("base"):
        return None, {**flags, "models": list(paths)}
    if len(paths) == 1:
        remedy = f"if it is the base, add a model: dare {paths[0]} MODEL -o OUTPUT"
        raise UsageError(f"{paths[0]} is neither a recipe nor an output; {remedy}")
    if len(paths) == 2 and interpolates(flags):
        return None, {**flags, "models": list(paths)}
    return None, {**flags, "base": paths[0], "models": list(paths[1:])}


def _may_be_recipe(path: Path) -> bool:
    """Tell if a path is a recipe or an output; what is missing is looked for as one of them."""
    from dare.output.receipt import find_manifest
    from dare.stores.locations import is_here

    if not is_here(path):  # or on the hub
        return True
    manifest = find_manifest(path)
    return manifest is None or manifest == path or manifest.exists() or not path.exists()


def verify(
    *outputs: Path,
    sha256: Annotated[bool, Flag(has_negative=True)] = True,
    signer: Annotated[list[Path] | None, Flag(metavar="FILE")] = None,
    quiet: Quiet = False,
    json: Json = False,
) -> int:
    """Compare outputs with their manifests.

    :param outputs: Outputs of finished merges: files or folders.
    :param sha256: Also compute the SHA-256, which is slower.
    :param signer: A public key or certificate that must have signed the outputs.
    """
    from dare.output.verification import Verification
    from dare.output.verification import verify as verify_output
    from dare.stores.locations import is_here, to_path
    from dare.tensors.files import is_there

    if not outputs:
        raise UsageError("nothing to verify: name the output of a merge")
    console = make_console(json=json, quiet=quiet)
    found = []
    for path in outputs:
        try:
            how: dict[str, Any] = {"sha256": sha256, "signer": signer or ()}
            found.append(verify_output(path, verbose=not quiet, **how))
        except (InputError, VerificationError) as error:
            place = to_path(path)
            if not (is_here(place) and is_there(place)):
                raise
            code = "not_an_output" if isinstance(error, VerificationError) else "unreadable"
            found.append(Verification(path, (notice(code, error=error),), 0, 0))
            if quiet:
                print(f"dare: {error}", file=sys.stderr)
        print_document(console, found[-1].document())
    if json:
        print_json([outcome.to_dict() for outcome in found])
    return DONE if all(outcome.ok for outcome in found) else FAILED


@runs
def sign(
    path: Path,
    /,
    *,
    key: Path,
    certificate: Annotated[list[Path] | None, Flag(metavar="FILE...", least=1)] = None,
    overwrite: Annotated[bool, switch(group=RUN, help="Replace an existing signature.")] = False,
) -> Work:
    """Sign an output.

    :param path: The output, or another model: a file or a folder.
    :param key: Your private key: an elliptic one, in PEM, without a password.
    :param certificate: The key's certificate, then those of the authorities above it.
    """
    from dare.output.signing import sign as sign_output

    return sign_output, {}


def methods(
    name: str | None = None,
    /,
    *,
    json: Json = False,
    stage: StageFiles = None,
) -> int:
    """Show stages.

    :param name: A stage, an alias or a method.
    """
    from dare.stages import ALIASES, STAGES
    from dare.stages.registry import catalogue, explain, load_installed_stages

    load_installed_stages()
    if name is not None and name not in {*STAGES, *ALIASES}:
        name = name.lower()
    chain = name if name is None or name in STAGES else ALIASES.get(name, name)
    names = [] if chain is None else chain.split("+")
    if unknown := [stage for stage in names if stage not in STAGES]:
        known = list(dict.fromkeys([*STAGES, *ALIASES]))
        hint = f"{did_you_mean(unknown[0], known)}; `dare methods` lists all"
        raise RecipeError(f"{unknown[0]}: no such stage or method{hint}")
    console = make_console(json=json)
    if json:
        print_json(catalogue(names or STAGES))
    for document in () if json else explain(names):
        print_document(console, document)
    return DONE


@takes_recipe
def init(
    *paths: Inputs,
    to: Annotated[Path, Flag(group=RUN, takes_dashes=True)] = Path("recipe.toml"),
    overwrite: RunSwitch = False,
    from_analysis: Annotated[Path | None, Flag(group=FILES)] = None,
    **flags: Any,
) -> int:
    """Write a recipe.

    :param to: Where the recipe goes; - is stdout.
    :param overwrite: Replace an existing recipe.
    :param from_analysis: Follow the advice of this analysis.
    """
    from dare import api
    from dare.cli.template import write_template
    from dare.output.targets import write_file

    recipe, flags = by_position(paths, flags)
    if from_analysis is not None and (paths or recipe is not None):
        given = "models" if paths else "--config"
        raise UsageError(f"--from-analysis and {given} given; leave one out")
    advice = None if from_analysis is None else _advice(from_analysis)
    start = None if advice is None else advice.recipe
    planned = api.plan(recipe_from_flags(recipe, flags, start=start))
    text = write_template(planned, advice)
    if str(to) == "-":
        print(text, end="")
        return DONE
    write_file(to, text.encode(), "recipe", overwrite=overwrite)
    place = shlex.quote(str(to))
    steps = {"plan": f"dare plan {place}", "merge": f"dare {place}"}
    print_steps(make_console(), f"Wrote {to}", steps)
    return DONE


def _advice(path: Path) -> Advice:
    from dare.analysis.advice import judge
    from dare.analysis.document import Analysis
    from dare.cli.template import nothing_advised

    _, advice = judge(Analysis.load(path))
    if not advice.recipe:
        raise nothing_advised(advice, [str(path)])
    return advice


def demo(
    *,
    output: Annotated[Path | None, output_flag("Keep the merged model here.")] = None,
    full: Switch = False,
    models: Path | None = None,
    json: Json = False,
) -> int:
    """Run the demonstration.

    :param full: Also compare methods and drop rates: 109 merges, in a minute or two.
    :param models: Only write the models here: 15 MB.
    """
    if models is not None:
        return _write_demo_models(models, json=json)
    from dare.demo.story import run_demo

    result = run_demo(make_console(json=json), output=output, full=full)
    if json:
        print_json(asdict(result))
    return DONE


def _write_demo_models(folder: Path, *, json: bool) -> int:
    from dare.demo.merges import TUNED, write_models

    names = write_models(folder)
    if json:
        print_json({name: str(folder / name) for name in names})
        return DONE
    base, *tuned = (f"{shlex.quote(str(folder))}/{name}" for name in ("base", *TUNED))
    broken = " ".join(f"{shlex.quote(str(folder))}/{name}" for name in ("add-nan", "add-far"))
    steps = {
        "merge": f"dare {base} {' '.join(tuned)} --method sum --output merged",
        "broken": f"dare analyze {base} {broken}",
    }
    print_steps(make_console(), f"{', '.join(names)} are in {folder}", steps)
    return DONE


def playground(
    *folders: Path,
    port: Annotated[int | None, Flag(group=RUN)] = None,
    no_browser: RunSwitch = False,
    build: RunPath = None,
    overwrite: RunSwitch = False,
    json: Json = False,
) -> int:
    """Serve the playground.

    :param folders: Folders with your models, and for outputs. [default: this folder]
    :param port: The port; 0 is any free one. [default: 8787, if free]
    :param no_browser: Do not open a browser.
    :param build: Write the page as static files into a folder.
    :param overwrite: Replace files that --build would leave alone.
    """
    from dare.documents.page import check_installed

    if port is not None and not 0 <= port <= MOST_PORT:
        raise UsageError(f"--port {port}: must be from 0 to {MOST_PORT}")
    check_installed("the playground", "web", "starlette", "uvicorn")
    if build is not None:
        return _build_playground(build, overwrite=overwrite, json=json)
    roots = tuple(folder.expanduser().resolve() for folder in folders or (Path(),))
    for root in roots:
        if not root.is_dir():
            raise UsageError(f"{root}: is not a folder; give folders that contain models")

    def announce(address: str) -> None:
        if json:
            print_json(dumps({"address": address, "pid": os.getpid()}))  # on one line
        else:
            steps = {"open": address, "stop": "Ctrl-C"}
            print_steps(make_console(), "The playground is running", steps)
        sys.stdout.flush()

    from dare.web.server import serve

    was_cut = serve(roots, port=port, announce=announce, opens_browser=not no_browser)
    return INTERRUPTED if was_cut else DONE


def _build_playground(folder: Path, *, overwrite: bool, json: bool) -> int:
    from dare.web.assets import write_folder

    written = write_folder(folder, overwrite=overwrite)
    if json:
        print_json({"folder": str(folder), "files": written})
    else:
        command = f"python -m http.server --bind 127.0.0.1 --directory {shlex.quote(str(folder))}"
        print_steps(make_console(), f"Wrote {folder}", {"view": command})
    return DONE
