"""The server from its start to its end: a port on this machine, a browser, Ctrl-C."""

from __future__ import annotations

import errno
import gc
import socket
import threading
import webbrowser
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import uvicorn

from dare.errors import OutputError
from dare.web.guard import LOOPBACK, Key
from dare.web.server import make_app

USUAL_PORT = 8787
BACKLOG = 128


def serve(
    roots: tuple[Path, ...],
    *,
    port: int | None = None,
    announce: Callable[[str], None],
    opens_browser: bool,
) -> None:
    """Serve the page until Ctrl-C; `announce` is called with its address when it can be opened.

    Without a port it is the usual one, or another if that is taken; 0 is any free one.
    """
    with _listen(port) as listening:
        key = Key(listening.getsockname()[1])
        server = uvicorn.Server(
            uvicorn.Config(
                make_app(key, roots),
                http="h11",
                ws="none",
                loop="asyncio",
                lifespan="on",
                log_level="error",
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_graceful_shutdown=2,
            )
        )
        announce(key.address)
        if opens_browser:
            threading.Thread(target=webbrowser.open, args=(key.address_once,), daemon=True).start()
        gc.enable()  # which a command does without, and a server runs for long
        with suppress(KeyboardInterrupt):  # which is how one ends it
            server.run(sockets=[listening])


def _listen(port: int | None) -> socket.socket:
    """A socket that takes connections from this machine."""
    ports = (USUAL_PORT, 0) if port is None else (port,)
    for number in ports:
        listening = socket.socket()
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((LOOPBACK, number))
        except OSError as error:
            listening.close()
            if error.errno == errno.EADDRINUSE and number != ports[-1]:
                continue
            reason = error.strerror or error
            raise OutputError(
                f"port {number} cannot be used: {reason}; give another, or --port 0 for a free one"
            ) from None
        listening.listen(BACKLOG)
        return listening
    raise AssertionError("the last port is tried or refused")
