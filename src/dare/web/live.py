"""The page of a study while a search works on it: served on this machine, and kept up to date."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from dare.documents.page import check_installed, render_page
from dare.errors import DareError
from dare.studies.document import PAGE_ROWS, read_result

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

REFRESH_SECONDS = 3.0
# Reloads the page only if the study has changed, and keeps the scroll position.
SCRIPT = """\
scrollTo(0, sessionStorage.getItem("dare-scroll") ?? 0);
setInterval(async () => {
  const state = await fetch("state").then((answer) => answer.text()).catch(() => "%(state)s");
  if (state === "%(state)s") return;
  sessionStorage.setItem("dare-scroll", scrollY);
  location.reload();
}, %(milliseconds)d);
"""


@contextmanager
def follow(study: Path) -> Iterator[str]:
    """Serve the page of a study and yield its address; an open page sees the end of the search."""
    check_installed("a page that follows a search", "web", "starlette", "uvicorn")
    from starlette.applications import Starlette
    from starlette.concurrency import run_in_threadpool
    from starlette.responses import HTMLResponse, PlainTextResponse
    from starlette.routing import Route

    from dare.web.guard import REFUSAL, Key, RequestGuard
    from dare.web.server import listen, make_server

    shown, asked, drawing = "", 0.0, threading.Lock()  # state of the last page; time of a request

    def state() -> str:
        return str(study.stat().st_mtime_ns) if study.exists() else ""

    def draw() -> Response:
        nonlocal shown
        with drawing:  # one at a time: it takes a second from the search
            now = state()
            try:
                document = read_result(study).document(rows=PAGE_ROWS)
            except DareError:
                text = "The search has not begun yet. This page waits for it."
                page = REFUSAL.format(title="Not begun", text=text)
                return HTMLResponse(page, 503, {"Refresh": f"{REFRESH_SECONDS:g}"})
            values = {"state": now, "milliseconds": 1000 * REFRESH_SECONDS}
            answer = HTMLResponse(render_page(document, script=SCRIPT % values))
            shown = now
            return answer

    async def show(_request: Request) -> Response:
        return await run_in_threadpool(draw)

    async def tell(_request: Request) -> Response:
        nonlocal asked
        asked = time.monotonic()
        return PlainTextResponse(state())

    with listen(0) as listening:
        key = Key(listening.getsockname()[1])
        app = Starlette(routes=[Route("/", show), Route("/state", tell)])
        server = make_server(RequestGuard(app, key))
        thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
        thread.start()
        try:
            yield key.address
            # An open page soon asks again, and then loads the final state.
            until = asked + 3 * REFRESH_SECONDS
            while shown != state() and (time.monotonic() < until or drawing.locked()):
                time.sleep(REFRESH_SECONDS / 20)
        finally:
            server.should_exit = True
            thread.join()
