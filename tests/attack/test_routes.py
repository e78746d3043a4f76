"""Hostile requests to every route of the playground: each is answered, and none with a 500.

The requests go to the application itself, as the server would hand them over. What a job does in
its process is left out; a stand-in answers for it.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any
from urllib.parse import quote, unquote, urlencode

import numpy as np
import pytest
from mutating import TEXTS, change_bytes, change_json

from dare.web import jobs
from dare.web.guard import LOOPBACK, Key
from dare.web.jobs import ANALYSIS, MOST_FINISHED, MOST_WAITING
from dare.web.own import OwnModels
from dare.web.server import make_app
from helpers import save

REQUESTS = 500
"""In `make test`; `make test-attack` sends 20 times as many."""
MOST_SECONDS = 60.0
"""For one answer, on a busy machine."""
KEY = Key(8787)
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "get", "", "\x00")
NUMBERS = (
    *("0", "1", "2", "3", "007", "-1", "+1", "1.0", "1e3", "0x1", "1_0", " 1", "1 ", "٣", "²"),
    *("NaN", "None", "", "..", "\0", "9" * 19, "9" * 5000, "9" * 100_000, "é" * 300),
)
PATHS = ("", "/", ".", "..", "../..", "/etc/passwd", "%", "\0", "x" * 300, "x/" * 3000, "s3://b/k")
BODIES = (
    *(b"", b"{", b"[]", b"null", b"NaN", b"1", b'"x"', b"{}", b"\xff\xfe{}", b"\xef\xbb\xbf{}"),
    *(b"[" * 100_000, b'{"a":' * 5000, b'{"a":' * 400 + b"1" + b"}" * 400),
    *(b'{"recipe":' * 90 + b"1" + b"}" * 90, b'{"kind": "\\ud800"}', b'{"path": "\\udcff"}'),
    *(b'{"kind": ' + b"9" * 5000 + b"}", b'{"kind": 1e999}', b'{"x": ' + b'"y"' * 9000 + b"}"),
    *(b'{"kind": "verify", "path": "' + b"x" * 70_000 + b'"}', b" " * (1 << 20) + b"{}"),
)
HEADERS: tuple[tuple[bytes, bytes], ...] = (
    *((b"host", b"evil.example"), (b"host", b""), (b"origin", b"http://evil.example")),
    *((b"cookie", b"\xff=\xff; ;;=;"), (b"authorization", b"Bearer \xff"), (b"range", b"bytes=0-")),
    *((b"range", b"bytes=" + b"0-0," * 3000), (b"range", b"bytes=" + b"9" * 5000 + b"-")),
    *((b"content-type", b"text/plain"), (b"content-type", b"application/json; charset=utf-7")),
    *((b"content-length", b"-1"), (b"if-none-match", b"\xff"), (b"if-range", b"\xff")),
    *((b"sec-fetch-site", b"cross-site"), (b"expect", b"100-continue"), (b"x", b"y" * 60_000)),
)
STAND_IN = f"""
import json, os, sys
asked = json.loads(sys.stdin.readline())
if asked["kind"] == "analyze":
    open(os.path.join(asked["folder"], {ANALYSIS!r}), "w").write("{{}}")
print(json.dumps({{"result": {{}}}}))
"""
"""What runs in place of a job: nothing is computed, and what the job would write is there."""


@dataclass
class Sent:
    """A request."""

    method: str
    path: str
    query: bytes = b""
    body: bytes = b""
    headers: Sequence[tuple[bytes, bytes]] = ()
    is_cut: bool = False
    """Whether the asker goes away in the middle of the body."""

    @property
    def scope(self) -> dict[str, Any]:
        raw = quote(self.path, safe="/%").encode("ascii")
        named = dict(self.headers)
        usual = {
            b"host": KEY.hosts[0].encode(),
            b"authorization": b"Bearer " + KEY.token.encode(),
            b"content-type": b"application/json",
        }
        return {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": self.method,
            "scheme": "http",
            "path": unquote(raw.decode("ascii")),
            "raw_path": raw,
            "root_path": "",
            "query_string": self.query,
            "headers": [*((n, v) for n, v in usual.items() if n not in named), *self.headers],
            "client": (LOOPBACK, 50_000),
            "server": (LOOPBACK, KEY.port),
        }


@dataclass
class Answer:
    """What came back."""

    status: int = 0
    body: bytes = b""
    ends: bool = False


async def ask(app: Any, sent: Sent) -> Answer:
    """Send one request to the application, and go away when it is not answered."""
    answer = Answer()
    half = len(sent.body) // 2
    left: list[dict[str, Any]] = (
        [{"type": "http.request", "body": sent.body[:half], "more_body": True}]
        if sent.is_cut
        else [
            {"type": "http.request", "body": sent.body[:half], "more_body": True},
            {"type": "http.request", "body": sent.body[half:], "more_body": False},
        ]
    )

    async def receive() -> dict[str, Any]:
        if left:
            return left.pop(0)
        if not sent.is_cut:
            await asyncio.sleep(MOST_SECONDS / 2)
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            answer.status = message["status"]
        else:
            answer.body += message.get("body", b"")
            answer.ends = not message.get("more_body", False)

    await asyncio.wait_for(app(sent.scope, receive, send), MOST_SECONDS)
    return answer


# ---------------------------------------------------------------- requests


class Requests:
    """All requests that a user's page sends, and worse ones made of them."""

    def __init__(self, folder: Path) -> None:
        for name, step in (("base", 0), ("one", 1), ("two", 2)):
            save(folder / name / "model.safetensors", {"w": np.arange(6, dtype=np.float32) * step})
        (folder / "recipe.toml").write_text(f'base = "{folder}/base"\nmodels = ["{folder}/one"]\n')
        (folder / "broken.toml").write_bytes(b"\xff\x00")
        (folder / b"\xff.safetensors".decode(errors="surrogateescape")).write_bytes(b"")
        self.folder = folder
        recipe = {
            "method": "dare+sum",
            "seed": 7,
            "dare": {"drop_rate": 0.5},
            "models": {
                "base_file": f"{folder}/base",
                "merge_files": [{"file": f"{folder}/one", "weight": 0.5}, f"{folder}/two"],
                "output_file": f"{folder}/out.safetensors",
            },
        }
        self.bodies: dict[str, list[Any]] = {
            "/api/own/folders": [None],
            "/api/own/recipe": [None],
            "/api/own/plan": [{"recipe": recipe, "overwrite": False}],
            "/api/own/jobs": [
                None,
                {"kind": "merge", "recipe": recipe, "overwrite": True},
                {"kind": "analyze", "recipe": recipe},
                {"kind": "verify", "path": f"{folder}/one"},
            ],
            "/api/own/jobs/{number}/cancel": [{}],
            "/api/own/jobs/{number}/again": [{}],
            "/api/own/jobs/{number}/analysis": [None],
            "/{name:path}": [None],
        }

    def make(self, random: Random) -> Sent:
        """Make a request that the seed decides: right, wrong in one respect, or in several."""
        route = random.choice(list(self.bodies))
        document = random.choice(self.bodies[route])
        path = route.replace("{number}", random.choice(NUMBERS[1:4]))
        path = path.replace("{name:path}", random.choice(("", "main.js", "models/add.safetensors")))
        query = {"path": random.choice(("", "/one", "/recipe.toml", "/out.safetensors"))}
        sent = Sent(
            method="GET" if document is None else "POST",
            path=path,
            query=urlencode({name: f"{self.folder}{end}" for name, end in query.items()}).encode(),
            body=b"" if document is None else json.dumps(document).encode(),
        )
        for _ in range(random.choice((0, 1, 1, 1, 2, 3))):
            self._worsen(random, route, document, sent)
        return sent

    def _worsen(self, random: Random, route: str, document: Any, sent: Sent) -> None:
        match random.randrange(9):
            case 0:
                sent.method = random.choice(METHODS)
            case 1:
                sent.path = route.replace("{number}", random.choice(NUMBERS))
                sent.path = sent.path.replace("{name:path}", random.choice((*PATHS, *TEXTS_HERE)))
            case 2:
                sent.path = change_bytes(random, sent.path.encode()).decode(errors="replace")
            case 3:
                given = random.choice((*PATHS, *TEXTS_HERE))
                beside = f"{self.folder}/{given}"
                sent.query = urlencode({"path": random.choice((given, beside))}).encode()
            case 4:
                sent.query = change_bytes(random, sent.query, (b"&number=1&kind=merge&path=",))
            case 5 if document:
                sent.body = change_json(random, json.dumps(document).encode())
            case 6:
                sent.body = random.choice((*BODIES, change_bytes(random, sent.body)))
            case 7:
                sent.headers = [random.choice(HEADERS)]
            case _:
                sent.is_cut = random.random() < 0.3
                sent.body = self._long_list(random, document) or sent.body

    def _long_list(self, random: Random, document: Any) -> bytes:
        """The same with one model several thousand times."""
        match document:
            case {"recipe": recipe}:
                files = recipe["models"]["merge_files"] * random.choice((2, 1500, 10_000))
                models = {**recipe["models"], "merge_files": files}
                return json.dumps({**document, "recipe": {**recipe, "models": models}}).encode()
        return b""


TEXTS_HERE = tuple(text for text in TEXTS if text.isprintable() or text.isascii())


# ---------------------------------------------------------------- the attack


@dataclass
class Found:
    """What became of the requests."""

    statuses: Counter[int]
    failures: list[str]
    jobs: list[dict[str, Any]]


async def attack(requests: Requests, seed: int, count: int, own_models: OwnModels) -> Found:
    """Send requests, several at a time, and look at every answer."""
    app = make_app(KEY, own_models.routes, lambda: None)
    statuses: Counter[int] = Counter()
    failures: list[str] = []
    numbers = iter(range(count))

    async def send_some() -> None:
        for number in numbers:
            sent = requests.make(Random(f"{seed} {number}"))
            began = time.monotonic()
            try:
                answer = await ask(app, sent)
            except Exception as error:
                failures.append(f"{number}: {error!r:.300} {sent!r:.300}")
                continue
            statuses[answer.status] += 1
            is_mistaken = answer.status >= 500 or b"bug in dare" in answer.body
            is_silent = not answer.ends and not sent.is_cut
            if is_mistaken or is_silent or time.monotonic() - began > MOST_SECONDS:
                failures.append(f"{number}: {answer!r:.300} {sent!r:.300}")

    await asyncio.gather(*(send_some() for _ in range(4)))
    listed = await ask(app, Sent("GET", "/api/own/jobs"))
    return Found(statuses, failures, json.loads(listed.body))


@pytest.fixture
def own_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[OwnModels]:
    monkeypatch.setattr(jobs, "COMMAND", [sys.executable, "-I", "-S", "-c", STAND_IN])
    folder = tmp_path / "models"
    folder.mkdir()
    models = OwnModels((folder,))
    yield models
    models.close()


def test_no_request_is_answered_by_a_mistake(own_models, tmp_path, attack_size, attack_seed):
    requests = Requests(tmp_path / "models")
    known = {route.path for route in own_models.routes}
    assert known == {path for path in requests.bodies if path.startswith("/api/own/")}
    found = asyncio.run(attack(requests, attack_seed, REQUESTS * attack_size, own_models))
    assert found.failures == []
    assert {200, 400, 403, 404, 405, 415} <= set(found.statuses)
    assert 0 < len(found.jobs) <= MOST_FINISHED + MOST_WAITING + 1


def test_a_path_that_is_empty_is_not_found_whatever_the_query(own_models):
    app = make_app(KEY, own_models.routes, lambda: None)
    assert asyncio.run(ask(app, Sent("GET", "", b"path=\xe4\x89"))).status == 404
