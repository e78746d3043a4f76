"""A web server on this machine that gives ranges of files, with faults where a test wants them."""

from __future__ import annotations

import functools
import hashlib
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

Fault = Callable[["Handler"], bool]
"""Called with a request before it is answered; true if it has been dealt with."""


class Hollow:
    """A file that has a beginning, and noise to its end, without taking room."""

    NOISE = hashlib.shake_256(b"noise").digest(65521)

    def __init__(self, beginning: bytes, size: int) -> None:
        self.beginning, self.size = beginning, size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, span: slice) -> bytes:
        begin, end, _ = span.indices(self.size)
        found = self.beginning[begin:end]
        place = (begin + len(found)) % len(self.NOISE)
        times = (end - begin) // len(self.NOISE) + 2
        return (found + (self.NOISE * times)[place:])[: end - begin]


@functools.cache
def etag_of(data: bytes | Hollow) -> str:
    start = data if isinstance(data, bytes) else data.beginning
    return hashlib.md5(start, usedforsecurity=False).hexdigest()


@dataclass
class Files:
    """What is served, what is wrong with it, and a log of what was asked for."""

    content: dict[str, bytes | Hollow] = field(default_factory=dict)
    """By path, without the first slash."""
    faults: dict[str, Fault] = field(default_factory=dict)
    """By the end of a path."""
    delay_seconds: float = 0.0
    """Before every answer, as a line to far away has it."""
    password: str = ""
    """What the header Authorization must be, if anything."""
    key: str = ""
    """What the query must be, if anything."""
    asked: list[str] = field(default_factory=list)
    """Method, path and range of each request."""
    sent_bytes: Counter[str] = field(default_factory=Counter)
    port: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def add_folder(self, name: str, folder: Path) -> str:
        """Serve the files of a folder below a name; return its URL."""
        for file in folder.rglob("*"):
            if file.is_file():
                self.content[f"{name}/{file.relative_to(folder).as_posix()}"] = file.read_bytes()
        return f"{self.url}/{name}"

    def add(self, name: str, file: Path) -> str:
        """Serve a file by a name; return its URL."""
        self.content[name] = file.read_bytes()
        return f"{self.url}/{name}"


class Server(ThreadingHTTPServer):
    """Many may wait to be let in at once."""

    request_queue_size = 128
    daemon_threads = True

    def handle_error(self, *_: object) -> None:
        """Clients that leave are no news."""


class Handler(BaseHTTPRequestHandler):
    """HEAD and GET, whole or in ranges."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = 1 << 16

    def __init__(self, files: Files, *args: Any) -> None:
        self.files = files
        super().__init__(*args)

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        files, parts = self.files, urlsplit(self.path)
        self.name = unquote(parts.path).lstrip("/")
        wanted = self.headers.get("Range", "")
        with files.lock:
            files.asked.append(f"{self.command} {self.name} {wanted}".strip())
        if files.delay_seconds:
            time.sleep(files.delay_seconds)
        ends = [end for end in files.faults if self.name.endswith(end)]
        if ends and files.faults[ends[0]](self):
            return
        if files.password and self.headers.get("Authorization") != files.password:
            self.answer(401)
        elif files.key and parts.query != files.key:
            self.answer(403)
        elif self.name not in files.content:
            self.answer(404)
        else:
            self.send_file(files.content[self.name], wanted)

    def send_file(self, data: bytes | Hollow, wanted: str) -> None:
        headers = {"ETag": f'"{etag_of(data)}"'}
        if not wanted:
            self.answer(200, headers, data[:])
            return
        first, _, last = wanted.removeprefix("bytes=").partition("-")
        begin = int(first) if first else len(data) - int(last)
        end = min(int(last) + 1 if first and last else len(data), len(data))
        if begin >= end:
            self.answer(416, {"Content-Range": f"bytes */{len(data)}"})
            return
        span = {"Content-Range": f"bytes {begin}-{end - 1}/{len(data)}"}
        self.answer(206, headers | span, data[begin:end])

    def answer(self, status: int, headers: dict[str, str] | None = None, body: bytes = b"") -> None:
        usual = {
            "Content-Length": str(len(body)),
            "Last-Modified": "Mon, 01 Jan 2024 00:00:00 GMT",
        }
        self.send_response(status)
        for key, value in (usual | (headers or {})).items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)
            with self.files.lock:
                self.files.sent_bytes[self.name] += len(body)

    def refuse(self, status: int, body: bytes = b"") -> bool:
        """Answer with a status in place of a file."""
        self.answer(status, {}, body)
        return True

    def hang_up(self) -> None:
        """Close the connection without another word."""
        self.close_connection = True
        self.wfile.flush()
        self.connection.shutdown(socket.SHUT_RDWR)


@contextmanager
def serving() -> Iterator[Files]:
    """A running server, for as long as this lasts."""
    files = Files()
    server = Server(("127.0.0.1", 0), functools.partial(Handler, files))
    files.port = server.server_port
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield files
    finally:
        server.shutdown()
        server.server_close()
