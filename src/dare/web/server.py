"""What the server answers: the page's files, and what the page asks of the local engine."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import PurePosixPath
from typing import Any, NamedTuple

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp

from dare.errors import DareError, printable
from dare.web.assets import Assets, page_assets
from dare.web.engine import Engine
from dare.web.guard import Guard, Json, Key, read_object, refuse

TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".json": "application/json",
    ".safetensors": "application/octet-stream",
    ".svg": "image/svg+xml",
    ".wasm": "application/wasm",
}
SLOW = ("vega.js", "index.html")
"""What takes a while to make, and is begun before anybody asks."""

Check = Callable[[], None]
Work = Callable[[dict[str, Any], Check], Any]
"""What makes an answer of what was asked; `check` raises when nobody waits for it any more."""
Handler = Callable[[Request], Awaitable[Response]]


class Cancelled(Exception):  # noqa: N818 (nothing went wrong)
    """Nobody waits for the answer any more."""


def make_app(key: Key, others: Sequence[BaseRoute], end: Callable[[], None]) -> ASGIApp:
    """The page, the engine behind it, and other routes, all guarded; `end` is called at the end."""
    files = Files(page_assets("local"))
    engine = Engine()

    @asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        for name in SLOW:
            files.begin(name)
        yield
        await files.close()
        engine.close()
        await run_in_threadpool(end)

    app = Starlette(
        routes=[
            Route("/api/merge", answering(engine.merge), methods=["POST"]),
            Route("/api/score", answering(engine.score), methods=["POST"]),
            Route("/api/write", answering(engine.write), methods=["POST"]),
            *others,
            Route("/{name:path}", files.answer),
        ],
        exception_handlers={DareError: _explain, Exception: _apologise},
        lifespan=lifespan,
    )
    return Guard(app, key)


# ---------------------------------------------------------------- files


class File(NamedTuple):
    """What is sent for a name."""

    content: bytes
    etag: str


class Files:
    """The page's files, each made when it is first asked for, and kept."""

    def __init__(self, assets: Assets) -> None:
        self._assets = assets
        self._made: dict[str, asyncio.Task[File]] = {}

    def begin(self, name: str) -> asyncio.Task[File]:
        """A file that is made, or was; who comes in between waits for the same one."""
        if name not in self._made:
            making = run_in_threadpool(_make_file, self._assets[name])
            self._made[name] = asyncio.create_task(making)
        return self._made[name]

    async def close(self) -> None:
        """Leave off making files."""
        for making in self._made.values():
            making.cancel()
        await asyncio.gather(*self._made.values(), return_exceptions=True)

    async def answer(self, request: Request) -> Response:
        """Send a file, unless the asker has it."""
        name = request.path_params["name"] or "index.html"
        if name not in self._assets:
            return refuse(request, 404, "This page does not exist.")
        file = await asyncio.shield(self.begin(name))
        headers = {"ETag": file.etag, "Cache-Control": "no-cache"}
        if request.headers.get("if-none-match") == file.etag:
            return Response(status_code=304, headers=headers)
        kind = TYPES[PurePosixPath(name).suffix]
        return Response(file.content, media_type=kind, headers=headers)


def _make_file(make: Callable[[], bytes]) -> File:
    content = make()
    return File(content, f'"{hashlib.sha256(content).hexdigest()[:32]}"')


# ---------------------------------------------------------------- questions


def answering(work: Work) -> Handler:
    """A handler that does some work in a thread, and has it end when the asker goes away."""

    async def handle(request: Request) -> Response:
        asked = await read_object(request)
        gone = threading.Event()

        def check() -> None:
            if gone.is_set():
                raise Cancelled

        doing = asyncio.create_task(run_in_threadpool(work, asked, check))
        leaving = asyncio.create_task(_until_gone(request))
        try:
            await asyncio.wait((doing, leaving), return_when=asyncio.FIRST_COMPLETED)
            if not doing.done():
                gone.set()
            return Json(await doing)
        except Cancelled:
            return Response(status_code=204)  # which nobody sees
        finally:
            gone.set()
            leaving.cancel()

    return handle


async def _until_gone(request: Request) -> None:
    """Wait until the asker has gone away."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _explain(_request: Request, error: Exception) -> Response:
    return Json({"error": str(error)}, 400)


async def _apologise(_request: Request, error: Exception) -> Response:
    reason = printable(f"{type(error).__name__}: {error}")
    message = f"{reason} (this is a mistake in dare; the terminal shows where)"
    return Json({"error": message}, 500)
