"""A job in a process of its own: `python -m dare.web.job_process`.

The request is the first line of stdin, as JSON; what happens goes to stdout, a line of JSON each:

    {"progress": [done, total], "verb": "merging"}     bytes, now and then
    {"note": "compiling kernels …"}                    what it is busy with
    {"result": {…}}                                    what came of it; a later one replaces it
    {"error": "…"}                                     why nothing came of it

The process lives as long as its stdin is open. When that ends, because the job is cancelled, the
server stops, or the server was killed, the work is interrupted as by Ctrl-C: a merge keeps what is
done in OUTPUT.partial, and the same merge goes on from there.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from dare.documents.progress import Display, progress_shown_by
from dare.errors import DareError, DareWarning, printable
from dare.tensors.json_values import json_ready

if TYPE_CHECKING:
    from dare.recipe.schema import Recipe

Request = dict[str, Any]
EVERY_SECONDS = 0.1
"""How often progress is sent, at the most."""
ANALYSIS = "analysis.json"
"""What an analysis writes into the folder of its job."""
INTERRUPTED = 130


class Line:
    """The line to the server."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._sending = threading.Lock()

    def send(self, **message: Any) -> None:
        """Send one message; if nobody listens any more, the work ends by its interrupt."""
        with self._sending, suppress(OSError):
            print(json.dumps(json_ready(message)), file=self._stream, flush=True)

    @contextmanager
    def show(self, total_bytes: int, verb: str) -> Iterator[Display]:
        """A display that sends what it is told."""
        counting = threading.Lock()
        done, sent_at = 0, 0.0

        def advance(nbytes: int) -> None:
            nonlocal done, sent_at
            with counting:
                done += nbytes
                now, so_far = time.monotonic(), done
                if now - sent_at < EVERY_SECONDS:
                    return
                sent_at = now
            self.send(progress=[so_far, total_bytes], verb=verb)

        self.send(progress=[0, total_bytes], verb=verb)
        yield Display(advance, lambda text: self.send(note=text))
        self.send(progress=[total_bytes, total_bytes], verb=verb)


# ---------------------------------------------------------------- what jobs do


def merge(request: Request, line: Line) -> None:
    """Merge, and read back what was written."""
    from dare import api
    from dare.output.verification import verify as verify_output

    report = api.merge(_recipe(request), overwrite=bool(request.get("overwrite")))
    whole = report.to_dict()
    names = ("method", "output", "models", "bytes_read", "bytes_written", "seconds")
    told = {name: whole[name] for name in (*names, "resumed_chunks")}
    told |= {"tensors": len(report.tensors), "warnings": list(map(str, report.warnings))}
    line.send(result=told)
    line.send(note="reading it back")
    assert report.output is not None
    line.send(result={**told, "sha256": verify_output(report.output).sha256})


def verify(request: Request, line: Line) -> None:
    """Compare an output with its manifest."""
    from dare.output.verification import verify as verify_output

    line.send(result=verify_output(request["path"]).to_dict())


def analyze(request: Request, line: Line) -> None:
    """Look at the models, and write what was found."""
    from dare.analysis.judge.advice import judge, to_json
    from dare.analysis.measure.analyzing import analyze as look_at
    from dare.output.targets import write_file

    recipe = _recipe(request)
    analysis = look_at(
        recipe.base,
        [entry.file for entry in recipe.models],
        allow_pickle=recipe.allow_pickle,
        max_memory=recipe.max_memory,
        threads=recipe.threads,
    )
    readiness, advice = judge(analysis)
    write_file(
        Path(request["folder"], ANALYSIS), to_json(analysis, readiness, advice).encode(), "analysis"
    )
    line.send(result={"verdict": readiness.verdict, "seconds": analysis.seconds})


WORK: dict[str, Callable[[Request, Line], None]] = {
    work.__name__: work for work in (merge, verify, analyze)
}


def _recipe(request: Request) -> Recipe:
    from dare.recipe.document import recipe_from_document

    return recipe_from_document(request["recipe"], "recipe")


# ---------------------------------------------------------------- the process


def main() -> int:
    """Do what the first line of stdin asks for."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # also where it is ignored
    line = Line(_own_stdout())
    try:
        request = json.loads(sys.stdin.readline())
        threading.Thread(target=_watch, daemon=True).start()
        quietly = warnings.catch_warnings(action="ignore", category=DareWarning)
        with quietly, progress_shown_by(line.show):  # plans and reports have the warnings
            WORK[request["kind"]](request, line)
    except KeyboardInterrupt:
        return INTERRUPTED
    except DareError as error:
        line.send(error=str(error))
        return 1
    except Exception as error:
        traceback.print_exc()
        reason = printable(f"{type(error).__name__}: {error}")
        line.send(error=f"{reason} (this is a mistake in dare)")
        return 1
    return 0


def _own_stdout() -> TextIO:
    """Stdout for us alone: what others print goes to stderr."""
    sys.stdout.flush()
    stream = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return stream


def _watch() -> None:
    """Interrupt the work when nobody is at the other end of stdin."""
    while os.read(0, 1 << 12):  # sys.stdin would be locked when the process ends
        pass
    if hasattr(signal, "pthread_kill"):  # which wakes the main thread from whatever it waits for
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
    else:
        import _thread

        _thread.interrupt_main()


if __name__ == "__main__":
    sys.exit(main())
