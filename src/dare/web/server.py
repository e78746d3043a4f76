"""The server from its start to its end: the page's files, the routes for own models, Ctrl-C."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
import socket
import threading
import webbrowser
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp

from dare.errors import OutputError, printable
from dare.web.assets import Assets, page_assets
from dare.web.guard import LOOPBACK, Json, Key, RequestGuard, refuse
from dare.web.own import OwnModels

if TYPE_CHECKING:
    import uvicorn

TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".json": "application/json",
    ".safetensors": "application/octet-stream",
    ".svg": "image/svg+xml",
    ".wasm": "application/wasm",
}
# Files that take a while to make, and are begun before anybody asks.
MADE_EARLY = ("vega.js", "index.html")

USUAL_PORT = 8787
GRACE_SECONDS = 2  # time at the end for answers that are on their way


def serve(
    roots: tuple[Path, ...],
    *,
    port: int | None = None,
    announce: Callable[[str], None],
    opens_browser: bool,
) -> bool:
    """Serve the page until Ctrl-C; return whether that has cut a merge of the user's short.

    `announce` is called with the page's address when it can be opened. Without a port it is the
    usual one, or another if that is taken; 0 is any free one.
    """
    ends: list[bool] = []
    with suppress(KeyboardInterrupt), listen(port) as listening:
        key = Key(listening.getsockname()[1])
        announce(key.address)  # a browser that comes early waits for its answer
        if opens_browser:
            threading.Thread(target=webbrowser.open, args=(key.address_once,), daemon=True).start()
        own = OwnModels(roots)
        app = make_app(key, own.routes, lambda: ends.append(own.close()))
        make_server(app).run(sockets=[listening])
    return any(ends)


def make_server(app: ASGIApp) -> uvicorn.Server:
    """Make a server that says nothing about itself, neither to askers nor in the terminal."""
    import uvicorn

    settings = uvicorn.Config(
        app,
        http="h11",
        ws="none",
        loop="asyncio",
        lifespan="on",
        log_level="error",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=GRACE_SECONDS,
    )
    return uvicorn.Server(settings)


def listen(port: int | None) -> socket.socket:
    """Open a socket that takes connections from this machine."""
    try:
        return socket.create_server((LOOPBACK, USUAL_PORT if port is None else port))
    except OSError as error:
        if port is None and error.errno == errno.EADDRINUSE:
            return socket.create_server((LOOPBACK, 0))
        reason = os.strerror(error.errno) if error.errno else str(error)
        remedy = "choose another port, or --port 0 for any free one"
        raise OutputError(f"port {port} cannot be used: {reason}; {remedy}") from None


# ---------------------------------------------------------------- the app


def make_app(key: Key, others: Sequence[BaseRoute], end: Callable[[], None]) -> ASGIApp:
    """Make the app of the page and other routes, all guarded; `end` is called at the end."""
    files = Files(page_assets(is_server=True))

    @asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        for name in MADE_EARLY:
            files.begin(name)
        yield
        await files.close()
        await run_in_threadpool(end)

    app = Starlette(
        routes=[*others, Route("/{name:path}", files.answer)],
        exception_handlers={Exception: _answer_bug},
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False  # it would read the query as UTF-8, whatever it is
    return RequestGuard(app, key)


# ---------------------------------------------------------------- files


File = tuple[bytes, str]


class Files:
    """The page's files, each made when it is first asked for, and kept."""

    def __init__(self, assets: Assets) -> None:
        self._assets = assets
        self._made: dict[str, asyncio.Task[File]] = {}

    def begin(self, name: str) -> asyncio.Task[File]:
        """Make a file, unless that was begun before: then return the same task."""
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
        """Send a file, unless the browser has it."""
        name = request.path_params["name"] or "index.html"
        if name not in self._assets:
            return refuse(request, 404, "This page does not exist.")
        content, etag = await asyncio.shield(self.begin(name))
        headers = {"ETag": etag, "Cache-Control": "no-cache"}
        if request.headers.get("if-none-match") == etag:
            return Response(status_code=304, headers=headers)
        kind = TYPES[PurePosixPath(name).suffix]
        return Response(content, media_type=kind, headers=headers)


def _make_file(make: Callable[[], bytes]) -> File:
    content = make()
    return content, f'"{hashlib.sha256(content).hexdigest()[:32]}"'


async def _answer_bug(_request: Request, error: Exception) -> Response:
    reason = printable(f"{type(error).__name__}: {error}")
    message = f"{reason} (this is a bug in dare; the terminal shows where)"
    return Json({"error": message}, 500)
