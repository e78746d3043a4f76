"""The server from its start to its end: a port on this machine, a browser, Ctrl-C."""

from __future__ import annotations

import errno
import socket
import threading
import webbrowser
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from dare.errors import OutputError
from dare.web.guard import LOOPBACK, Key

USUAL_PORT = 8787
BACKLOG = 128
GRACE_SECONDS = 2
"""How long answers that are on their way are waited for at the end."""


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
        _run(key, roots, listening, ends)
    return any(ends)


def _run(key: Key, roots: tuple[Path, ...], listening: socket.socket, ends: list[bool]) -> None:
    import uvicorn

    from dare.web.own import OwnModels
    from dare.web.server import make_app

    own = OwnModels(roots)
    app = make_app(key, own.routes, lambda: ends.append(own.close()))
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
    uvicorn.Server(settings).run(sockets=[listening])


def listen(port: int | None) -> socket.socket:
    """A socket that takes connections from this machine."""
    try:
        return _listen(USUAL_PORT if port is None else port)
    except OSError as error:
        if port is None and error.errno == errno.EADDRINUSE:
            return _listen(0)
        reason = error.strerror or str(error)
        raise OutputError(
            f"port {port} cannot be used: {reason}; give another, or --port 0 for a free one"
        ) from None


def _listen(port: int) -> socket.socket:
    listening = socket.socket()
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((LOOPBACK, port))
        listening.listen(BACKLOG)
    except BaseException:
        listening.close()
        raise
    return listening
