"""A proxy that stands between a client and a store, and does what networks and stores do.

    proxy.inject(Fault("status", code=503, times=2, method="PUT"))

It speaks as much of HTTP as it takes to see single requests: each is matched against the faults in
turn, and the first that fits acts on it. What passes is relayed as it is, `Host` included, so that
signatures stay good.
"""

from __future__ import annotations

import asyncio
import re
import socket
import struct
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal, Self

BLOCK = 1 << 16
REASONS = {
    400: "ExpiredToken",
    403: "AccessDenied",
    404: "NoSuchBucket",
    429: "SlowDown",
    500: "InternalError",
    503: "SlowDown",
    507: "QuotaExceeded",
}
"""What S3 calls the errors in their bodies."""

Kind = Literal["status", "reset", "lose", "hang", "etag", "flip"]


@dataclass
class Fault:
    """Something that happens to requests.

    status: is answered with an error and not passed on. reset: the connection breaks before the
    request is passed on. lose: it is passed on and carried out, and the connection breaks instead
    of an answer. hang: is never answered. etag: the answer has another ETag. flip: one bit of the
    answer is another.
    """

    kind: Kind
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


@dataclass
class _Message:
    """The first line and the headers of a request or an answer."""

    head: bytes
    first: list[str] = field(default_factory=list)
    fields: dict[str, str] = field(default_factory=dict)

    @classmethod
    async def read(cls, reader: asyncio.StreamReader) -> _Message | None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError:
            return None
        first, *lines = head.decode("latin-1").split("\r\n")
        pairs = (line.partition(":") for line in lines if line)
        fields = {name.strip().lower(): value.strip() for name, _, value in pairs}
        return cls(head, first.split(" ", 2), fields)

    def without(self, name: str) -> bytes:
        return re.sub(rb"(?im)^%s:.*\r\n" % name.encode(), b"", self.head)


class FaultProxy:
    """Listens on a free port of loopback while it is entered, in a thread of its own."""

    def __init__(self, port: int) -> None:
        self.upstream = port
        self.seen: list[tuple[str, str]] = []
        """Method and target of every request that came by."""
        self.bandwidth = 0.0
        """Bytes a second of all connections together, either way; 0 is as many as there are."""
        self._faults: list[Fault] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="fault-proxy", daemon=True)
        self._started: Future[int] = Future()
        self._free_at = 0.0
        self._tasks: set[Any] = set()

    def __enter__(self) -> Self:
        self._thread.start()
        self.port = self._started.result(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(60)

    @property
    def endpoint(self) -> str:
        """Where it listens, as an URL."""
        return f"http://127.0.0.1:{self.port}"

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

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        listening = asyncio.start_server(self._serve, "127.0.0.1", 0, limit=1 << 20)
        server = self._loop.run_until_complete(listening)
        self._started.set_result(server.sockets[0].getsockname()[1])
        self._loop.run_forever()
        server.close()
        while tasks := asyncio.all_tasks(self._loop):  # one may have begun in the meantime
            for task in tasks:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self._loop.run_until_complete(asyncio.sleep(0.05))  # in which connections are closed
        self._loop.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream: asyncio.StreamWriter | None = None
        task = asyncio.current_task()
        self._tasks.add(task)  # nobody else holds it while it waits for a client that is dead
        try:
            answers, upstream = await asyncio.open_connection("127.0.0.1", self.upstream)
            while (request := await _Message.read(reader)) is not None:
                if not await self._pass(request, reader, writer, answers, upstream):
                    break
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            for stream in (writer, upstream):
                if stream is not None:
                    stream.close()

    async def _pass(
        self,
        request: _Message,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        answers: asyncio.StreamReader,
        upstream: asyncio.StreamWriter,
    ) -> bool:
        """Do one request; whether the connection can be used for another."""
        method, target = request.first[:2]
        self.seen.append((method, target))
        fault = next((f for f in self._faults if f.strikes(method, target)), None)
        kind = fault.kind if fault else ""
        if kind == "reset":
            return _break(writer)
        if kind == "hang":
            await asyncio.sleep(3600)
        if "100-continue" in request.fields.get("expect", ""):
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if fault and kind == "status":
            await self._relay(request, reader, lambda _: None)
            writer.write(_refusal(fault, method))
            await writer.drain()
            return False
        upstream.write(request.without("expect"))
        await self._relay(request, reader, upstream.write, upstream)
        answer = await _Message.read(answers)
        if answer is None:
            return False
        if kind == "lose":
            return _break(writer)
        head = answer.head
        if kind == "etag":
            head = re.sub(rb'(?im)^etag: *"?[^"\r]{4}', b'ETag: "beef', head)
        writer.write(head)
        is_flipped = kind == "flip"

        def send(block: bytes) -> None:
            nonlocal is_flipped
            writer.write(bytes([block[0] ^ 1]) + block[1:] if is_flipped else block)
            is_flipped = False

        has_body = method != "HEAD" and answer.first[1] not in ("204", "304")
        is_whole = not has_body or await self._relay(answer, answers, send, writer)
        await writer.drain()
        return is_whole and "close" not in answer.fields.get("connection", "")

    async def _relay(
        self,
        message: _Message,
        reader: asyncio.StreamReader,
        write: Callable[[bytes], Any],
        writer: asyncio.StreamWriter | None = None,
    ) -> bool:
        """Pass a body on; whether all of it was."""
        if "chunked" in message.fields.get("transfer-encoding", ""):
            while True:
                size = await reader.readline()
                write(size)
                count = int(size.split(b";")[0], 16)
                write(await reader.readexactly(count + 2))
                if count == 0:
                    return True
        rest = int(message.fields.get("content-length", 0))
        while rest:
            block = await reader.read(min(BLOCK, rest))
            if not block:
                return False
            write(block)
            rest -= len(block)
            if writer is not None:
                await self._pace(len(block))
                await writer.drain()
        return True

    async def _pace(self, nbytes: int) -> None:
        if self.bandwidth:
            now = self._loop.time()
            self._free_at = max(now, self._free_at) + nbytes / self.bandwidth
            await asyncio.sleep(self._free_at - now)


def _refusal(fault: Fault, method: str) -> bytes:
    reason = fault.reason or REASONS.get(fault.code, "InternalError")
    body = (
        '<?xml version="1.0" encoding="UTF-8"?>'
        f"<Error><Code>{reason}</Code><Message>by the proxy</Message></Error>"
    ).encode()
    head = (
        f"HTTP/1.1 {fault.code} {reason}\r\nContent-Type: application/xml\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    ).encode()
    return head if method == "HEAD" else head + body


def _break(writer: asyncio.StreamWriter) -> bool:
    """Reset a connection, so that the other side gets an error and not an end."""
    sock: socket.socket = writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
    return False
