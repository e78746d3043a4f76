"""A proxy that stands between a client and a store, and does what networks and stores do.

    proxy.inject(Fault("status", code=503, times=2, method="PUT"))

Each request is matched against the faults in turn, and the first that fits acts on it. What passes
is relayed with its headers as they are, `Host` included, so that signatures stay good.
"""

from __future__ import annotations

import re
import socket
import struct
import threading
import time
from dataclasses import dataclass
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal, Self

REASONS = {
    400: "ExpiredToken",
    403: "AccessDenied",
    404: "NoSuchBucket",
    503: "SlowDown",
    507: "QuotaExceeded",
}
"""What S3 calls the errors in their bodies."""


@dataclass
class Fault:
    """Something that happens to requests.

    status: is answered with an error and not passed on. reset: the connection breaks before the
    request is passed on. lose: it is passed on and carried out, and the connection breaks instead
    of an answer. hang: is never answered. etag: the answer has another ETag. flip: one bit of the
    answer is another.
    """

    kind: Literal["status", "reset", "lose", "hang", "etag", "flip"]
    method: str = ""
    """Of which requests; all, if empty."""
    target: str = ""
    """A pattern that is searched for in path and query."""
    times: int = 1 << 30
    """How many requests it happens to."""
    after: int = 0
    """How many pass before."""
    code: int = 503
    reason: str = ""
    """The code in the body; by default what S3 says with this status."""
    happened: int = 0

    def strikes(self, method: str, target: str) -> bool:
        """Whether it happens to this request."""
        if self.method not in ("", method) or not re.search(self.target, target):
            return False
        if self.after > 0:
            self.after -= 1
            return False
        strikes = self.happened < self.times
        self.happened += strikes
        return strikes


class FaultProxy(ThreadingHTTPServer):
    """Listens on a free port of loopback while it is entered, in threads of its own."""

    block_on_close = False

    def __init__(self, port: int) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.upstream = port
        self.endpoint = f"http://127.0.0.1:{self.server_port}"
        self.seen: list[tuple[str, str]] = []
        """Method and target of every request that came by."""
        self.bandwidth = 0.0
        """Bytes a second of all connections together, either way; 0 is as many as there are."""
        self.is_over = threading.Event()
        self._faults: list[Fault] = []
        self._lock, self._line = threading.Lock(), threading.Lock()

    def __enter__(self) -> Self:
        threading.Thread(target=self.serve_forever, args=[0.05], daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.is_over.set()
        self.shutdown()
        self.server_close()

    def handle_error(self, *_: object) -> None:
        """Say nothing of clients that are gone."""

    def inject(self, *faults: Fault) -> None:
        """Let these happen from now on."""
        self._faults.extend(faults)

    def clear(self) -> None:
        """Let nothing happen, and forget what was seen."""
        self._faults.clear()
        self.seen.clear()
        self.bandwidth = 0.0

    def count(self, method: str, target: str = "") -> int:
        """How many such requests have come by."""
        return sum(m == method and bool(re.search(target, t)) for m, t in self.seen)

    def meet(self, method: str, target: str) -> Fault | None:
        """Note a request; say what happens to it."""
        with self._lock:
            self.seen.append((method, target))
            return next((f for f in self._faults if f.strikes(method, target)), None)

    def pace(self, nbytes: int) -> None:
        """Take as long as so many bytes do."""
        if self.bandwidth:
            with self._line:
                time.sleep(nbytes / (self.bandwidth or 1e12))


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Any

    def log_message(self, *_: object) -> None:
        pass

    def _serve(self) -> None:
        fault = self.server.meet(self.command, self.path)
        kind = fault.kind if fault else ""
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.pace(len(body))
        if kind == "hang":
            self.server.is_over.wait()
        if kind in ("reset", "hang"):
            self._break()
        elif fault and kind == "status":
            reason = fault.reason or REASONS.get(fault.code, "InternalError")
            text = f"<Error><Code>{reason}</Code><Message>by the proxy</Message></Error>"
            self._answer(fault.code, {"Content-Type": "application/xml"}, text.encode())
        else:
            self._relay(body, kind)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _serve  # noqa: N815

    def _relay(self, body: bytes, kind: str) -> None:
        link = HTTPConnection("127.0.0.1", self.server.upstream, timeout=300)
        link.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
        for name, value in self.headers.items():
            if name.lower() not in ("expect", "connection"):
                link.putheader(name, value)
        link.endheaders(body)
        answer = link.getresponse()
        content, fields = answer.read(), dict(answer.getheaders())
        link.close()
        self.server.pace(len(content))
        if kind == "lose":
            self._break()
            return
        for name in fields:
            if kind == "etag" and name.lower() == "etag":
                fields[name] = f'"beef{fields[name].strip(chr(34))[4:]}"'
        if kind == "flip":
            content = bytes([content[0] ^ 1]) + content[1:]
        self._answer(answer.status, fields, content)

    def _answer(self, status: int, fields: dict[str, str], content: bytes) -> None:
        is_head = self.command == "HEAD"
        self.send_response_only(status)
        for name, value in fields.items():
            if name.lower() not in ("connection", "transfer-encoding") and (
                is_head or name.lower() != "content-length"
            ):
                self.send_header(name, value)
        if not is_head and status != 204:
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(b"" if is_head else content)

    def _break(self) -> None:
        """Reset the connection, so that the other side gets an error and not an end."""
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()
        self.close_connection = True
