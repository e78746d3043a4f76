"""The server's answers to the part "Your own models", under `api/own/`.

    GET   folders?path=        a folder's entries, or the folders that the user pointed to
    GET   recipe?path=         the tables of a recipe
    POST  plan                 the plan of a recipe {recipe, overwrite}
    GET   jobs                 all jobs; POST adds one {kind, recipe, overwrite} or {kind, path}
    POST  jobs/NUMBER/cancel   interrupt it
    POST  jobs/NUMBER/again    the same once more: an interrupted merge resumes
    GET   jobs/NUMBER/analysis its JSON

A recipe is given as the tables of its TOML form. A failure is answered by `{"error": message}`.

Nothing is read or written outside the folders that the user pointed to. The target of a path
counts: `check_inside` follows links and compares it with the folders, when a request names it and
again when a file is opened, here and in a job's process.
A relative path starts at the folder where the server was started, as for the commands.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from dare import api
from dare.documents.shown import json_ready
from dare.documents.words import show_size
from dare.errors import (
    PACKAGE,
    DareError,
    ExistsError,
    InputError,
    MismatchError,
    OutputError,
    OutsideError,
    RecipeError,
)
from dare.inputs.lora import CONFIG_NAME as ADAPTER_CONFIG
from dare.inputs.shards import INDEX_NAME, SINGLE_NAME
from dare.output.targets import has_mark, partial_folder
from dare.planning.plan import Plan
from dare.recipe.document import request_from_document
from dare.recipe.entries import as_path, write_toml
from dare.recipe.recipe import Request
from dare.recipe.settings import moved
from dare.run.engine import publisher_of
from dare.stores.locations import AnyPath, check_inside, confine
from dare.web.guard import Json, TooLargeError, read_object
from dare.web.jobs import ANALYSIS, Jobs, QueuedJob

WEIGHTS = {
    ".safetensors": "safetensors",
    ".gguf": "GGUF",
    **dict.fromkeys((".bin", ".pt", ".pth"), "pickle"),
}
RECIPES = (".toml", *api.YAML_SUFFIXES)
MOST_ENTRIES = 500

Given = Mapping[str, Any]  # the values of a request: of its query, its body and its path


class OwnModels:
    """The routes, and the jobs behind them; `close` when the server stops."""

    def __init__(self, roots: tuple[Path, ...]) -> None:
        self._roots = Roots(roots)
        self._jobs = Jobs(self._roots.folders)
        confine((*self._roots.folders, Path(PACKAGE)))  # where the page's models are

    def close(self) -> bool:
        """Interrupt the running job; a merge keeps its work, and the same merge continues there.

        Returns whether a merge was interrupted.
        """
        open_before = self._open_merges()
        self._jobs.close()
        confine(())
        return any(job.state != "done" for job in open_before)

    @property
    def routes(self) -> list[Route]:
        """All routes."""
        answers: list[tuple[str, str, Callable[[Given], Any]]] = [
            ("GET", "folders", lambda given: self._roots.listing(given.get("path"))),
            ("GET", "recipe", self._read_recipe),
            ("POST", "plan", self._plan),
            ("GET", "jobs", lambda _given: [job.to_dict() for job in self._jobs.all()]),
            ("POST", "jobs", self._add_job),
            ("POST", "jobs/{number}/cancel", self._cancel),
            ("POST", "jobs/{number}/again", lambda given: self._add_job(self._find(given).request)),
            ("GET", "jobs/{number}/analysis", self._send_analysis),
        ]
        return [
            Route(f"/api/own/{name}", _endpoint(answer), methods=[method])
            for method, name, answer in answers
        ]

    # ------------------------------------------------------------ recipes and plans

    def _read_recipe(self, given: Given) -> dict[str, Any]:
        path = self._roots.find(str(given.get("path", "")))
        return {"recipe": self._roots.admit(api.load_recipe(path)).to_document()}

    def _plan(self, given: Given) -> dict[str, Any]:
        answer: dict[str, Any] = {}
        try:
            asked = self._request(given)
            answer = _describe_chain(asked)
            planned = api.plan(asked)
        except (RecipeError, InputError, MismatchError) as error:  # a normal answer, like a plan
            return {**answer, "error": str(error)}
        underway = {job.request["recipe"]["models"]["output_file"] for job in self._open_merges()}
        output = _describe_output(planned, underway, overwrite=bool(given.get("overwrite")))
        return {**answer, **_describe_plan(planned), **output}

    def _open_merges(self) -> list[QueuedJob]:
        """Return the merges that run or wait."""
        merges = [job for job in self._jobs.all() if job.kind == "merge"]
        return [job for job in merges if job.state in ("waiting", "running")]

    def _request(self, given: Given) -> Request:
        document = given.get("recipe")
        if not isinstance(document, dict):
            raise RecipeError("recipe: must be a table")
        return self._roots.admit(request_from_document(document, "recipe"))

    # ------------------------------------------------------------ jobs

    def _add_job(self, given: Given) -> dict[str, Any]:
        kind = given.get("kind")
        if kind == "verify":
            path = self._roots.find(str(given.get("path", "")))
            return self._jobs.add({"kind": kind, "path": str(path)}).to_dict()
        if kind not in ("merge", "analyze"):
            raise InputError(f"{kind!r}: there is no such job")
        asked = self._request(given)
        overwrite = bool(given.get("overwrite"))
        if kind == "merge":
            api.plan(asked)  # reports problems at once, and not after a wait
            if asked.recipe.output is None:
                raise RecipeError("output is missing: give a path for the merged model")
        request = {"kind": kind, "recipe": asked.to_document(), "overwrite": overwrite}
        return self._jobs.add(request).to_dict()

    def _cancel(self, given: Given) -> dict[str, Any]:
        job = self._find(given)
        self._jobs.cancel(job)
        return job.to_dict()

    def _find(self, given: Given) -> QueuedJob:
        return self._jobs.find(given["number"])

    def _send_analysis(self, given: Given) -> Response:
        job = self._find(given)
        try:
            content = (job.folder / ANALYSIS).read_bytes()
        except FileNotFoundError:  # not yet, or no longer
            raise InputError(f"job {job.number} has no analysis") from None
        return Response(content, media_type="application/json")


def _endpoint(answer: Callable[[Given], Any]) -> Callable[[HttpRequest], Any]:
    """Make an endpoint that calls a function with a request's values, in a thread."""

    async def respond(request: HttpRequest) -> Response:
        try:
            body = await read_object(request) if request.method == "POST" else {}
            given = {**request.query_params, **body, **request.path_params}
            answered = await run_in_threadpool(answer, given)
        except ClientDisconnect:
            return Response()  # nobody waits for an answer
        except (DareError, OSError) as error:  # for example, a file name that is too long
            return Json({"error": str(error)}, STATUSES.get(type(error), 400))
        return answered if isinstance(answered, Response) else Json(json_ready(answered))

    return respond


# ---------------------------------------------------------------- plans in words


def _describe_plan(planned: Plan) -> dict[str, Any]:
    """Return the facts of a plan, as in the command's output."""
    recipe, shown = planned.recipe, dict(planned.document().facts)
    tensors, _, weights = shown["tensors"].partition("; ")
    names = planned.model_names, recipe.models, recipe.weights(), recipe.seeds()
    facts = {"tensors": tensors, "weights": weights, "reads": shown["reads"]}
    facts["writes"] = show_size(planned.cost.bytes_written)
    return {
        "facts": {**facts, "memory": shown["memory"], "with": shown["with"]},
        "models": [
            {"name": name, "file": str(entry.file), "weight": weight, "seed": seed}
            for name, entry, weight, seed in zip(*names, strict=True)
        ],
        "notes": list(map(str, planned.notes)),
        "warnings": list(map(str, planned.warnings)),
        "left_out": list(planned.left_out),
    }


def _describe_output(planned: Plan, underway: Set[str], *, overwrite: bool) -> dict[str, Any]:
    """Return the output's path, any problem with it, and an interrupted merge if there is one."""
    layout = planned.layout
    if layout is None:
        return {}
    problem = None
    try:
        publisher_of(layout).check(planned.input_files, overwrite=overwrite)
    except OutputError as error:
        if publisher_of(layout).finished_before() is None:
            problem = str(error)
            if isinstance(error, ExistsError):  # its text is for users of Python
                remedy = "Choose another output, or tick “Replace an existing output”."
                problem = f"{layout.target.name} exists already. {remedy}"
    partial = partial_folder(layout.target)
    is_left = has_mark(partial) and str(layout.target) not in underway
    return {
        "output": str(layout.target),
        "output_problem": problem,
        "interrupted": str(partial) if is_left else None,
    }


def _describe_chain(asked: Request) -> dict[str, Any]:
    """Return the recipe's text, which names method and drop rate, and its stages."""
    recipe, tables = asked.recipe, {**asked.to_tables(), "method": asked.recipe.method}
    rates = ((s.name, given["drop_rate"]) for s, given in recipe.chain if "drop_rate" in given)
    drops, rate = next(rates, (None, None))
    if drops is not None:
        tables[drops] = {"drop_rate": rate, **tables.get(drops, {})}
    return {
        "toml": write_toml(tables),
        "chain": [stage.name for stage, _ in recipe.chain],
        "drops": drops,
        "drop_rate": rate,
        "weighs": recipe.chain.combine.default_weight is not None,
    }


# ---------------------------------------------------------------- folders


STATUSES: Mapping[type, int] = {OutsideError: 403, TooLargeError: 413}

Entry = dict[str, Any]


def _entry(path: Path, kind: str, holds: str = "", nbytes: int = 0, **more: bool) -> Entry:
    """Return an entry of a folder that can be opened or chosen.

    It is a `folder`, a `model` (a folder or a file with weights), a `recipe`, or an `interrupted`
    merge. `holds` is the form of a model: safetensors, GGUF, pickle or adapter; `opens` is true for
    a folder that may hold more.
    """
    shown = {"kind": kind, "holds": holds, "nbytes": nbytes, "opens": False, **more}
    return {"name": path.name, "path": str(path), **shown}


class Roots:
    """The folders that the user pointed to, and their entries."""

    def __init__(self, folders: Iterable[Path]) -> None:
        self.folders = tuple(dict.fromkeys(Path(os.path.realpath(folder)) for folder in folders))

    def find(self, given: AnyPath) -> Path:
        """Return the absolute path of something that exists, as it was written."""
        path = self._inside(given)
        if not path.exists():
            raise InputError(f"{path}: does not exist")
        return path

    def find_output(self, given: AnyPath) -> Path:
        """Return the path of an output, in an existing folder inside the roots."""
        path = self._inside(given)
        if not self._inside(path.parent).is_dir():
            raise InputError(f"{path.parent}: is not a folder; create it, or choose another output")
        return path

    def _inside(self, given: AnyPath) -> Path:
        try:
            path = as_path(given).absolute()
            check_inside(path, self.folders)
        except ValueError as error:
            raise InputError(f"{os.fspath(given)!a}: is not a path: {error}") from None
        return path

    def admit(self, request: Request) -> Request:
        """Return the request with absolute paths; refuse paths outside and other machines."""
        recipe, options = request.recipe, request.options
        if (options.cluster, options.scratch, options.require_signed) != (None, None, ()):
            what = "cluster, scratch, require_signed"
            raise RecipeError(f"{what}: the page has none; use the command line")
        output = None if recipe.output is None else self.find_output(recipe.output)
        return replace(request, recipe=moved(recipe, self.find, output))

    def listing(self, given: str | None) -> dict[str, Any]:
        """Return a folder and the entries that can be opened or chosen; by default, the roots."""
        if given is None:
            entries = [_describe_folder(path) | {"name": str(path)} for path in self.folders]
            return {"path": None, "above": None, "entries": entries}
        folder = self.find(given)
        if not folder.is_dir():
            entry = _describe_path(folder)
            if entry is None:
                raise InputError(f"{folder}: is neither a model nor a recipe")
            return {**self.listing(str(folder.parent)), "found": entry}
        try:
            paths = sorted(folder.iterdir(), key=lambda path: path.name.lower())
        except OSError as error:
            raise InputError(f"{folder}: cannot be read: {error.strerror}") from None
        entries = list(self._entries(paths))
        at_top = Path(os.path.realpath(folder)) in self.folders
        itself = _describe_folder(folder)
        return {
            "path": str(folder),
            "above": None if at_top else str(folder.parent),
            "entries": entries[:MOST_ENTRIES],
            "more": max(0, len(entries) - MOST_ENTRIES),
            **({"found": itself} if itself["kind"] == "model" else {}),
        }

    def _entries(self, paths: Iterable[Path]) -> Iterator[Entry]:
        for path in (path for path in paths if not path.name.startswith(".")):
            with suppress(OutsideError, OSError):  # a link that leads out, another user's folder
                if (entry := _describe_path(self._inside(path))) is not None:
                    yield entry


def _describe_path(path: Path) -> Entry | None:
    """Describe a path that can be opened or chosen."""
    if path.is_dir():
        return _describe_folder(path)
    suffix = path.suffix.lower()
    if suffix in RECIPES:
        return _entry(path, "recipe")
    if suffix in WEIGHTS and path.is_file():
        return _entry(path, "model", WEIGHTS[suffix], path.stat().st_size)
    return None


def _describe_folder(path: Path) -> Entry:
    """Describe a folder, or the model or the interrupted merge that it is."""
    if has_mark(path):
        return _entry(path, "interrupted")
    try:
        sizes = {f.name: f.stat().st_size for f in path.iterdir() if f.suffix.lower() in WEIGHTS}
    except OSError:  # which is said where it is opened
        sizes = {}
    safetensors = [size for file, size in sizes.items() if file.endswith(".safetensors")]
    is_whole = len(safetensors) == 1 or SINGLE_NAME in sizes or (path / INDEX_NAME).is_file()
    pickles = [size for file, size in sizes.items() if file.startswith("pytorch_model")]
    if (path / ADAPTER_CONFIG).is_file():
        holds, nbytes = "adapter", sum(sizes.values())
    elif is_whole:
        holds, nbytes = "safetensors", sum(safetensors)
    elif pickles and not safetensors:
        holds, nbytes = "pickle", sum(pickles)
    else:
        return _entry(path, "folder", opens=True)
    return _entry(path, "model", holds, nbytes, opens=True)
