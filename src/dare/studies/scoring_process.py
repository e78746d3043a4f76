"""A function that scores, in a process of its own: a crash or a hang of it costs one candidate.

Requests and replies are lines of JSON on a socket that nothing else writes to, so that an evaluator
may print what it likes. The process also holds the models, and makes the candidates. It imports
little at first: whether there is such a function is known in a tenth of a second.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dare import errors
from dare.errors import DareError, EvaluationError
from dare.studies.functions import (
    Function,
    FunctionScorer,
    check_asked,
    failed,
    find_function,
    temporary_folder,
)
from dare.studies.harness import PREFIX, find_tasks
from dare.studies.results import Scored
from dare.studies.watched import TimeUpError, Watched, describe_status

if TYPE_CHECKING:
    from dare.recipe.schema import Recipe

READY_SECONDS = 600.0
"""Where there is a time limit for scoring: what importing an evaluator, and loading a model for it,
may take at least."""

# ---------------------------------------------------------------- the side that asks


class ProcessScorer:
    """Scores candidates by a function in a process, which is started anew when it has ended."""

    def __init__(
        self,
        evaluator: str,
        recipe: Recipe,
        *,
        time_limit: float | None,
        work: Path | None,
        threads: int | None,
    ) -> None:
        self._evaluator = evaluator
        self._recipe = recipe
        self._time_limit = time_limit
        self._work = work
        self._threads = threads
        self._asked: Asked | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._is_made = False
        self.takes_items = False
        self._start()

    def _start(self) -> Asked:
        from dare.stages import STAGES

        self._asked = asked = Asked(self._evaluator, self._threads)
        try:
            limit = None if self._time_limit is None else max(self._time_limit, READY_SECONDS)
            found = asked.ask({"find": self._evaluator}, limit)
            self.takes_items = found["takes_items"]
            if found["form"] == "path":  # ours, so that it goes away even if the process crashes
                self._folder = temporary_folder(self._work)
            request = {
                "recipe": self._recipe.to_document(),
                "work": self._folder and str(Path(self._folder.name).absolute()),
                "threads": self._threads,
                # The files of stages that are no package's: who makes candidates needs them too.
                "stages": sorted({stage.file for stage in STAGES.values() if stage.file}),
            }
            asked.ask({"open": request}, limit)
        except BaseException:
            self.close()
            raise
        return asked

    def make(self, recipe: Recipe) -> str:
        """Make the candidate of a recipe; return the digest of its weights."""
        self._is_made = False
        asked = self._asked or self._start()
        digest = self._reply(asked, {"make": recipe.to_document()}, None)
        self._is_made = True
        return str(digest)

    def score(self, items: Sequence[str] | None = None) -> Scored:
        """Score the candidate that was made last, on all items or on these."""
        check_asked(items, is_made=self._is_made, takes_items=self.takes_items)
        assert self._asked is not None
        request = {"score": None if items is None else list(items)}
        scored = self._reply(self._asked, request, self._time_limit)
        return Scored(**{**scored, "output": self._asked.printed})

    def _reply(self, asked: Asked, request: dict[str, Any], time_limit: float | None) -> Any:
        try:
            return asked.ask(request, time_limit)
        except BaseException:
            if not asked.is_running:
                self.close()
            raise

    def close(self) -> None:
        """End the process, and delete what was written."""
        self._is_made = False
        if self._asked is not None:
            self._asked.close()
            self._asked = None
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


class Asked:
    """A process that answers requests."""

    def __init__(self, evaluator: str, threads: int | None) -> None:
        self._evaluator = evaluator
        self._channel, theirs = socket.socketpair()
        with theirs:
            # -P and the path: what we import is what it imports, whatever lies in this folder.
            code = (
                f"import sys; sys.path[:] = {[path for path in sys.path if path]!a}; "
                f"from dare.studies.scoring_process import main; main({theirs.fileno()})"
            )
            command = [sys.executable, "-u", "-P", "-X", "faulthandler", "-c", code]
            self._process = Watched(command, threads=threads, channel=theirs.fileno())
        self._received = bytearray()
        self._process.listen(self._channel.fileno(), self._received.extend)
        self.is_running = True

    @property
    def printed(self) -> str:
        """The last lines that were printed since it was asked."""
        return self._process.printed.shown()

    def ask(self, request: dict[str, Any], time_limit: float | None) -> Any:
        """Send a request and wait for the reply; an error of the other side is raised here."""
        self._process.printed.clear()
        self._received.clear()
        try:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it has ended
                self._channel.sendall(json.dumps(request).encode() + b"\n")
            status = self._process.pump(lambda: self._received.endswith(b"\n"), time_limit)
        except TimeUpError:
            self.close()
            raise EvaluationError(
                f"{self._evaluator}: took longer than {time_limit:g} s and was stopped",
                self.printed,
            ) from None
        except BaseException:
            self.close()
            raise
        if status is not None and not self._received.endswith(b"\n"):
            self.close()
            raise EvaluationError(
                f"{self._evaluator}: its process {describe_status(status)}", self.printed
            )
        reply = json.loads(self._received)
        if reply.get("is_last"):
            self.close()
        if "error" in reply:
            raise self._raised(reply)
        return reply["value"]

    def _raised(self, reply: dict[str, Any]) -> DareError:
        kind: type[DareError] = getattr(errors, reply["error"])
        if kind is not EvaluationError:
            return kind(*reply["args"])
        output = "\n".join(filter(None, (self.printed, reply["output"])))
        return EvaluationError(f"{self._evaluator}: {reply['args'][0]}", output)

    def close(self) -> None:
        """End the process and all that it has started."""
        self.is_running = False
        self._process.close()
        self._channel.close()


# ---------------------------------------------------------------- the side that answers


class _Answering:
    """What the process holds between requests, which come in this order."""

    function: Function
    scorer: FunctionScorer

    def find(self, evaluator: str) -> dict[str, Any]:
        is_harness = evaluator.startswith(PREFIX)
        self.function = find_tasks(evaluator) if is_harness else find_function(evaluator)
        return {"form": self.function.form, "takes_items": self.function.takes_items}

    def open(self, given: dict[str, Any]) -> None:
        from dare.stages.methods import load_stages

        for file in given["stages"]:
            load_stages(file)
        work = given["work"] and Path(given["work"])
        recipe = _recipe(given["recipe"])
        self.scorer = FunctionScorer(self.function, recipe, work=work, threads=given["threads"])

    def make(self, document: dict[str, Any]) -> str:
        return self.scorer.make(_recipe(document))

    def score(self, items: list[str] | None) -> dict[str, Any]:
        return asdict(self.scorer.score(items))


def _recipe(document: dict[str, Any]) -> Recipe:
    from dare.recipe.document import recipe_from_document

    return recipe_from_document(document, "recipe")


def main(descriptor: int) -> None:
    """Answer requests until the other side is gone."""
    channel = socket.socket(fileno=descriptor)
    channel.set_inheritable(False)  # children of the evaluator must not keep it open
    answering = _Answering()
    with channel.makefile("r", encoding="utf-8") as requests:
        for request in requests:
            reply = _reply(answering, json.loads(request))
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(OSError, ValueError):  # the evaluator has closed it
                    stream.flush()
            channel.sendall(json.dumps(reply).encode() + b"\n")
    os._exit(0)  # threads that the evaluator has left behind do not matter


def _reply(answering: _Answering, request: dict[str, Any]) -> dict[str, Any]:
    ((verb, given),) = request.items()
    try:
        return {"value": getattr(answering, verb)(given)}
    except DareError as error:
        # After these nobody knows what is left of the process.
        is_last = isinstance(error.__cause__, MemoryError | SystemExit)
        kind = next(kind for kind in type(error).__mro__ if hasattr(errors, kind.__name__))
        shown = {"error": kind.__name__, "args": [str(arg) for arg in error.args]}
        return {**shown, "output": getattr(error, "output", ""), "is_last": is_last}
    except BaseException as error:
        found = failed("it failed", error)
        message = {"error": "EvaluationError", "args": list(found.args), "output": found.output}
        return {**message, "is_last": True}
