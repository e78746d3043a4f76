"""What the part "Your own models" asks the server for, under `api/own/`.

    GET   folders?path=        what lies in a folder, or the folders that the user pointed to
    GET   recipe?path=         the tables of a recipe
    POST  plan                 what a recipe would do {recipe, overwrite}
    GET   jobs                 all jobs; POST adds one {kind, recipe, overwrite} or {kind, path}
    POST  jobs/NUMBER/cancel   interrupt it
    POST  jobs/NUMBER/again    the same once more: an interrupted merge resumes
    GET   jobs/NUMBER/analysis its JSON

A recipe is the tables of its TOML form. An answer that is no success is `{"error": message}`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route

from dare import api
from dare.documents.words import show_size, times
from dare.errors import DareError, InputError, MismatchError, OutputError, RecipeError
from dare.output.destinations import check_target, finished_before
from dare.output.targets import has_mark, partial_folder
from dare.planning.data import Fate
from dare.planning.layout import Layout
from dare.planning.plan import Plan
from dare.recipe.document import recipe_from_document
from dare.recipe.schema import Recipe
from dare.run.rates import estimate
from dare.tensors.json_values import json_ready
from dare.web.guard import Json, read_object
from dare.web.job_process import ANALYSIS
from dare.web.jobs import Job, Jobs
from dare.web.roots import OutsideError, Roots

Asked = Mapping[str, Any]


class OwnModels:
    """The routes, and the jobs behind them; `close` when the server stops."""

    def __init__(self, roots: tuple[Path, ...]) -> None:
        self._roots = Roots(roots)
        self._jobs = Jobs()

    def close(self) -> bool:
        """Interrupt what runs: a merge keeps what is done, and goes on from there when asked.

        Returns whether a merge was cut short.
        """
        open_before = self._open_merges()
        self._jobs.close()
        return any(job.state != "done" for job in open_before)

    @property
    def routes(self) -> list[Route]:
        """All routes."""
        answers: list[tuple[str, str, Callable[[Asked], Any]]] = [
            ("GET", "folders", lambda asked: self._roots.listing(asked.get("path"))),
            ("GET", "recipe", self._read_recipe),
            ("POST", "plan", self._plan),
            ("GET", "jobs", lambda _asked: [job.to_dict() for job in self._jobs.all()]),
            ("POST", "jobs", self._add_job),
            ("POST", "jobs/{number}/cancel", self._cancel),
            ("POST", "jobs/{number}/again", lambda asked: self._add_job(self._find(asked).request)),
            ("GET", "jobs/{number}/analysis", self._send_analysis),
        ]
        return [
            Route(f"/api/own/{name}", _endpoint(answer), methods=[method])
            for method, name, answer in answers
        ]

    # ------------------------------------------------------------ recipes and plans

    def _read_recipe(self, asked: Asked) -> dict[str, Any]:
        path = self._roots.find(str(asked.get("path", "")))
        return {"recipe": self._roots.admit(api.load_recipe(path)).to_document()}

    def _plan(self, asked: Asked) -> dict[str, Any]:
        told: dict[str, Any] = {}
        try:
            recipe = self._recipe(asked)
            told = {"toml": recipe.to_toml(), **_chain(recipe)}
            planned = api.plan(recipe)
        except (RecipeError, InputError, MismatchError) as error:  # as usual as a plan is
            return {**told, "error": str(error)}
        recipes = [job.request["recipe"] for job in self._open_merges()]
        underway = {recipe["models"]["output_file"] for recipe in recipes}
        where = _tell_output(planned, underway, overwrite=bool(asked.get("overwrite")))
        return {**told, **tell_plan(planned), **where}

    def _open_merges(self) -> list[Job]:
        """Merges that run, or will."""
        merges = [job for job in self._jobs.all() if job.kind == "merge"]
        return [job for job in merges if job.state in ("waiting", "running")]

    def _recipe(self, asked: Asked) -> Recipe:
        document = asked.get("recipe")
        if not isinstance(document, dict):
            raise RecipeError("recipe: must be a table")
        return self._roots.admit(recipe_from_document(document, "recipe"))

    # ------------------------------------------------------------ jobs

    def _add_job(self, asked: Asked) -> dict[str, Any]:
        kind = asked.get("kind")
        if kind == "verify":
            path = self._roots.find_model(str(asked.get("path", "")))
            return self._jobs.add({"kind": kind, "path": str(path)}).to_dict()
        if kind not in ("merge", "analyze"):
            raise InputError(f"{kind!r}: there is no such job")
        recipe = self._recipe(asked)
        overwrite = bool(asked.get("overwrite"))
        if kind == "merge":
            api.plan(recipe)  # what does not fit is said at once, and not after a wait
            if recipe.output is None:
                raise RecipeError("output is missing: give a path for the merged model")
        request = {"kind": kind, "recipe": recipe.to_document(), "overwrite": overwrite}
        return self._jobs.add(request).to_dict()

    def _cancel(self, asked: Asked) -> dict[str, Any]:
        job = self._find(asked)
        self._jobs.cancel(job)
        return job.to_dict()

    def _find(self, asked: Asked) -> Job:
        return self._jobs.find(asked["number"])

    def _send_analysis(self, asked: Asked) -> Response:
        job = self._find(asked)
        if not (job.folder / ANALYSIS).exists():
            raise InputError(f"job {job.number} has no analysis")
        return FileResponse(job.folder / ANALYSIS, media_type="application/json")


# ---------------------------------------------------------------- plans in words


def tell_plan(planned: Plan) -> dict[str, Any]:
    """What a plan says, as the command shows it."""
    cost, recipe = planned.cost, planned.recipe
    fates = Counter(tensor.fate for tensor in planned.tensors)
    fates[Fate.LEFT_OUT] = len(planned.left_out)
    elements = sum(tensor.elements for tensor in planned.tensors)
    types = ", ".join(sorted({tensor.base.dtype.name for tensor in planned.tensors}))
    return {
        "facts": {
            "tensors": ", ".join(f"{fates[fate]} {fate.value}" for fate in Fate if fates[fate]),
            "weights": f"{elements:,} elements, {types}",
            "reads": f"{show_size(cost.bytes_read)} in {times(cost.passes, 'pass', 'passes')}",
            "writes": show_size(cost.bytes_written),
            "memory": cost.memory_line,
            "with": times(cost.threads, "thread"),
        },
        "takes": str(estimate(planned)),
        "models": [
            {"name": name, "file": str(entry.file), "weight": weight, "seed": seed}
            for name, entry, weight, seed in zip(
                planned.model_names, recipe.models, recipe.weights(), recipe.seeds(), strict=True
            )
        ],
        "notes": list(planned.notes),
        "warnings": list(map(str, planned.warnings)),
        "left_out": list(planned.left_out),
    }


def _tell_output(planned: Plan, underway: Set[str], *, overwrite: bool) -> dict[str, Any]:
    """Where the output goes, what is in the way, and whether an interrupted merge is there."""
    layout = planned.layout
    if layout is None:
        return {}
    inputs = [file for source in (planned.base, *planned.models) for file in source.files]
    problem = None
    try:
        check_target(layout, inputs, overwrite=overwrite)
    except OutputError as error:
        if finished_before(layout) is None:
            problem = _in_the_way(layout, inputs, error)
    partial = partial_folder(layout.target)
    is_left = has_mark(partial) and str(layout.target) not in underway
    return {
        "output": str(layout.target),
        "output_problem": problem,
        "interrupted": str(partial) if is_left else None,
    }


def _in_the_way(layout: Layout, inputs: Sequence[Path], error: OutputError) -> str:
    """What keeps an output from being written, in the page's words where those differ."""
    try:
        check_target(layout, inputs, overwrite=True)
    except OutputError:
        return str(error)
    remedy = "Choose another output, or tick “Replace an existing output”."
    return f"{layout.target.name} exists already. {remedy}"


def _chain(recipe: Recipe) -> dict[str, Any]:
    """The stages of a method, which of them drops, and whether models have weights."""
    rates = {s.name: values["drop_rate"] for s, values in recipe.chain if "drop_rate" in values}
    combine = recipe.chain[-1][0]
    return {
        "chain": [stage.name for stage, _ in recipe.chain],
        "drops": next(iter(rates), None),
        "drop_rate": next(iter(rates.values()), None),
        "weighs": combine.default_weight is not None,
        "names": [entry.name for entry in recipe.models],
    }


# ---------------------------------------------------------------- requests and answers


def _endpoint(answer: Callable[[Asked], Any]) -> Callable[[Request], Any]:
    """A function of what is asked for as one of a request; it runs in a thread."""

    async def respond(request: Request) -> Response:
        try:
            body = await read_object(request) if request.method == "POST" else {}
            asked = {**request.query_params, **body, **request.path_params}
            answered = await run_in_threadpool(answer, asked)
        except (DareError, OSError) as error:  # as of a name that is longer than names can be
            status = 403 if isinstance(error, OutsideError) else 400
            return Json({"error": str(error)}, status)
        return answered if isinstance(answered, Response) else Json(json_ready(answered))

    return respond
