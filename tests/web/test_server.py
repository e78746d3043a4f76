"""The server itself, by raw requests: who gets in, what is answered, and how it ends."""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from sites import Site, serving
from starlette.applications import Starlette
from starlette.testclient import TestClient

from dare.cli import main
from dare.demo.merges import MODELS
from dare.errors import OutputError, install_command
from dare.web import server as starting
from dare.web.assets import page_assets
from dare.web.guard import MOST_BODY_BYTES, Key, RequestGuard
from dare.web.own import OwnModels
from dare.web.server import make_app
from helpers import PATIENCE_SECONDS, wait_until

JSON = {"Content-Type": "application/json"}


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Client:
    """Sends exactly what it is told to, on a new connection each time."""

    def __init__(self, site: Site) -> None:
        parts = urlsplit(site.address)
        assert parts.port is not None
        self.port = parts.port
        self.host = f"127.0.0.1:{parts.port}"
        self.token = parse_qs(parts.query)["token"][0]
        self.cookie = f"dare-playground-{self.port}={self.token}"

    def ask(
        self, method: str, path: str, body: bytes | None = None, *, cookie: bool = True, **headers
    ) -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_SECONDS)
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        given = {"Cookie": self.cookie} if cookie else {}
        connection.request(method, path, body, {**given, **named})
        response = connection.getresponse()
        answer = Answer(response.status, dict(response.getheaders()), response.read())
        connection.close()
        return answer

    def get(self, path: str, **others: Any) -> Answer:
        return self.ask("GET", path, **others)

    def post(self, path: str, question: Any, **others: Any) -> Answer:
        return self.ask("POST", path, json.dumps(question).encode(), **{**JSON, **others})


@pytest.fixture(scope="module")
def client(local_site: Site) -> Client:
    return Client(local_site)


PLAN = "/api/own/plan"
ASKED: dict[str, Any] = {"recipe": {}}
"""What is answered in words, with 200: a recipe that is none."""

# ---------------------------------------------------------------- the token


def test_the_token_becomes_a_cookie_and_leaves_the_address(client):
    answer = client.get(f"/?drop.p=0.5&token={client.token}&live.method=dare%2Bties", cookie=False)
    assert answer.status == 303
    assert answer.headers["location"] == "/?drop.p=0.5&live.method=dare%2Bties"
    name, *settings = answer.headers["set-cookie"].split("; ")
    assert name == client.cookie
    assert {word.lower() for word in settings} == {"httponly", "path=/", "samesite=strict"}
    assert client.get(f"/?token={client.token}", cookie=False).headers["location"] == "/"
    assert client.get(f"/main.js?token={client.token}", cookie=False).status == 401  # the page only
    answer = client.ask("POST", f"{PLAN}?token={client.token}", b"{}", cookie=False, **JSON)
    assert (answer.status, "token is missing" in answer.json["error"]) == (401, True)


def test_cookie_or_header_opens_everything(client):
    bearer = f"Bearer {client.token}"
    for path in ("/", "/main.js", "/models/add.safetensors"):
        assert client.get(path).status == 200
        assert client.get(path, cookie=False, Authorization=bearer).status == 200
    assert client.post(PLAN, ASKED).status == 200
    answer = client.post(PLAN, ASKED, cookie=False, Authorization=bearer)
    assert (answer.status, answer.headers["cache-control"]) == (200, "no-store")


@pytest.mark.parametrize("path", ["/", "/main.js", "/models/add.safetensors", "/nothing"])
def test_without_the_token_a_page_says_what_to_do(client, path):
    answer = client.get(path, cookie=False)
    assert answer.status == 401
    assert answer.headers["content-type"].startswith("text/html")
    assert answer.headers["www-authenticate"] == "Bearer"
    assert b"from the terminal to the address bar" in answer.body
    assert b"token" in answer.body
    assert client.token.encode() not in answer.body


@pytest.mark.parametrize("token", ["", "x", "ä", "%00", "token"])
def test_a_wrong_token_is_refused_wherever_it_stands(client, token):
    assert client.get(f"/?token={token.replace('ä', '%C3%A4')}", cookie=False).status == 403
    assert client.get("/", cookie=False, Authorization=f"Bearer {token}").status == 403
    name = f"dare-playground-{client.port}"
    assert client.get("/", cookie=False, Cookie=f"{name}={token}").status == 403
    for almost in (client.token[:-1], client.token + "A", client.token.swapcase()):
        assert client.get(f"/?token={almost}", cookie=False).status == 403
    other = f"dare-playground-{client.port + 1}={client.token}"  # the cookie of another port
    assert client.get("/", cookie=False, Cookie=other).status == 401


def test_a_token_for_the_browser_works_one_time_and_tokens_are_long_and_do_not_show():
    key, other = Key(8787), Key(8787)
    assert len({key.token, other.token, key.once, other.once}) == 4
    assert len(key.token) >= 43
    assert not any(token in repr(key) for token in (key.token, key.once))
    with TestClient(RequestGuard(Starlette(), key), base_url="http://127.0.0.1:8787") as asker:
        statuses = [
            asker.get(key.address_once, follow_redirects=False).status_code for _ in range(2)
        ]
        assert statuses == [303, 403]
        assert asker.get(key.address, follow_redirects=False).status_code == 303


# ---------------------------------------------------------------- who asks


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:{port}", "127.0.0.1", "localhost:1", "[::1]:{port}", ""]
)
def test_another_host_is_refused(client, host):
    answer = client.get("/", Host=host.format(port=client.port))
    assert (answer.status, b"<h1>" in answer.body) == (403, True)
    ours = f"localhost:{client.port}"
    assert client.get("/", Host=ours).status == 200
    assert client.post(PLAN, ASKED, Host=ours, Origin=f"http://{ours}").status == 200


@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "OPTIONS", "PUT", "DELETE"])
@pytest.mark.parametrize(
    "origin", ["https://evil.example", "null", "http://localhost:{port}", "http://127.0.0.1"]
)
def test_another_origin_is_refused_for_every_method(client, method, origin):
    origin = origin.format(port=client.port)
    answer = client.ask(method, PLAN, b"{}", Origin=origin, **JSON)
    assert answer.status == 403
    assert "access-control-allow-origin" not in answer.headers


FILE = "/models/add.safetensors"


@pytest.mark.parametrize(
    ("path", "site", "mode", "status"),
    [
        *((path, "cross-site", "no-cors", 403) for path in (FILE, "/main.js", "/")),
        *((path, "same-site", "no-cors", 403) for path in (FILE, "/main.js", "/")),
        ("/?drop.p=0.5", "same-site", "navigate", 200),  # a link from elsewhere
        (FILE, "same-site", "navigate", 403),
        ("/?drop.p=0.5", "none", "navigate", 200),  # an address that was typed
    ],
)
def test_from_another_site_only_a_link_opens_the_page(client, path, site, mode, status):
    answer = client.get(path, Sec_Fetch_Site=site, Sec_Fetch_Mode=mode)
    assert answer.status == status
    assert answer.headers["cross-origin-resource-policy"] == "same-origin"


def test_only_loopback_listens(client):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing; tells our own address
        except OSError:
            pytest.skip("this machine has no other address")
        own = probe.getsockname()[0]
    if own.startswith("127."):
        pytest.skip("this machine has no other address")
    with pytest.raises(OSError, match=r"refused|timed out|unreachable"):
        socket.create_connection((own, client.port), timeout=2)


# ---------------------------------------------------------------- bodies


def send_raw(client, *pieces: bytes) -> bytes:
    """Send bytes as they are until the server hangs up, and return the status."""
    address = ("127.0.0.1", client.port)
    with socket.create_connection(address, timeout=PATIENCE_SECONDS) as connection:
        with contextlib.suppress(OSError):
            for piece in pieces:
                connection.sendall(piece)
        return connection.recv(4096).split()[1]


def test_a_body_must_be_json_by_its_type_and_not_large(client):
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
        answer = client.ask("POST", PLAN, b"{}", Content_Type=kind)
        assert (answer.status, "JSON" in answer.json["error"]) == (415, True)
    assert client.ask("POST", PLAN, b"{}").status == 415
    assert "recipe" in client.ask("POST", PLAN, b"", **JSON).json["error"]  # as if it were `{}`
    answer = client.ask("POST", PLAN, b" " * (MOST_BODY_BYTES + 1), **JSON)
    assert answer.status == 413
    head = (
        f"POST {PLAN} HTTP/1.1\r\nHost: {client.host}\r\nCookie: {client.cookie}\r\n"
        "Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    piece = b"10000\r\n" + b" " * 0x10000 + b"\r\n"  # 64 of them are 4 MB, and no end
    assert send_raw(client, head.encode(), *[piece] * 64) == b"413"
    padded = json.dumps(ASKED).encode().ljust(MOST_BODY_BYTES)
    assert client.ask("POST", PLAN, padded, **JSON).status == 200


# ---------------------------------------------------------------- files


TRAVERSALS = [
    "/../pyproject.toml",
    "/..%2f..%2fetc/passwd",
    "/%2e%2e/%2e%2e/etc/passwd",
    "/models/../../assets.py",
    "/models/%2e%2e/%2e%2e/assets.py",
    "//etc/passwd",
    "/etc/passwd",
    "/models/..%5c..%5cassets.py",
    "/main.js/",
    "/main.js%00",
    "/./main.js",
    "/templates/live.css",
]


@pytest.mark.parametrize("path", TRAVERSALS)
def test_there_is_nothing_but_the_files_of_the_page(client, path):
    request = f"GET {path} HTTP/1.1\r\nHost: {client.host}\r\nCookie: {client.cookie}\r\n\r\n"
    assert send_raw(client, request.encode()) == b"404"


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/", "text/html; charset=utf-8"),
        ("/main.js", "text/javascript; charset=utf-8"),
        ("/vega.js", "text/javascript; charset=utf-8"),
        ("/prompts.json", "application/json"),
        ("/models/add.safetensors", "application/octet-stream"),
    ],
)
def test_files_have_their_types_and_are_asked_for_again_in_few_bytes(client, path, kind):
    answer = client.get(path)
    assert (answer.status, answer.headers["content-type"]) == (200, kind)
    assert answer.headers["cache-control"] == "no-cache"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"
    assert answer.headers["cross-origin-resource-policy"] == "same-origin"
    assert "server" not in answer.headers
    again = client.get(path, If_None_Match=answer.headers["etag"])
    assert (again.status, again.body) == (304, b"")
    assert client.get(path, If_None_Match='"another"').body == answer.body
    assert client.ask("HEAD", path).body == b""


# ---------------------------------------------------------------- the command


def test_a_merge_that_is_cut_short_is_told_apart(tmp_path, monkeypatch):
    own = OwnModels((tmp_path, MODELS))
    files = {"base_file": str(MODELS / "base"), "merge_files": [str(MODELS / "add")]}
    recipe = {"models": {**files, "output_file": str(tmp_path / "merged.safetensors")}}
    with TestClient(Starlette(routes=own.routes)) as asker:
        answer = asker.post("/api/own/jobs", json={"kind": "merge", "recipe": recipe})
        assert answer.status_code == 200
    assert own.close()
    assert not OwnModels((tmp_path,)).close()
    monkeypatch.setattr(starting, "serve", lambda *_roots, **_settings: True)
    assert call(str(tmp_path)) == (130, "", "")


def test_a_mistake_of_ours_is_answered_and_shown(monkeypatch, tmp_path):
    def fail(*_arguments: object) -> None:
        raise ZeroDivisionError("what a pity")

    monkeypatch.setattr(OwnModels, "_plan", fail)
    key, own = Key(8787), OwnModels((tmp_path,))
    app = make_app(key, own.routes, own.close)
    asker = TestClient(app, base_url="http://127.0.0.1:8787", raise_server_exceptions=False)
    headers = {"Authorization": f"Bearer {key.token}"}
    answer = asker.post(PLAN, json={}, headers=headers)
    assert answer.status_code == 500
    assert "ZeroDivisionError: what a pity" in answer.json()["error"]
    with pytest.raises(ZeroDivisionError):  # which uvicorn prints
        TestClient(app, base_url="http://127.0.0.1:8787").post(PLAN, json={}, headers=headers)
    own.close()


def test_the_browser_gets_an_address_of_its_own(tmp_path):
    opened = tmp_path / "opened"
    script = tmp_path / "browser"
    script.write_text(f'#!/bin/sh\necho "$1" > {opened}.new && mv {opened}.new {opened}\n')
    script.chmod(0o755)
    command = [sys.executable, "-m", "dare", "playground", str(tmp_path), "--port", "0"]
    environment = {**os.environ, "BROWSER": f"{script} %s"}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        said = "".join(process.stdout.readline() for _ in range(3))
        (printed,) = re.findall(r"http://127\.0\.0\.1:\d+/\?token=\S+", said)
        wait_until(opened.exists)
        address = opened.read_text().strip()
        client = Client(Site(printed, tmp_path))
        assert urlsplit(address).netloc == urlsplit(printed).netloc
        assert address != printed, "other users see how a browser was called"
        path = f"/?{urlsplit(address).query}"
        assert client.get(path, cookie=False).headers["set-cookie"].startswith(client.cookie)
        assert client.get(path, cookie=False).status == 403
        assert "Ctrl-C" in said
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_SECONDS) == 0


def test_a_port_that_is_taken_is_said_or_avoided(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(OutputError, match=f"port {port} cannot be used.*--port 0"):
            starting.listen(port)
        monkeypatch.setattr(starting, "USUAL_PORT", port)
        with starting.listen(None) as other:
            assert other.getsockname()[0] == "127.0.0.1"
            assert other.getsockname()[1] not in (0, port)
    with starting.listen(None) as usual:
        assert usual.getsockname()[1] == port


def call(*arguments: str) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(["playground", *arguments])
    return status, out.getvalue(), err.getvalue()


@pytest.mark.parametrize(
    ("arguments", "expected", "said"),
    [
        ("--port 70000", 2, "--port 70000"),
        ("nowhere", 2, "nowhere"),
        ("--no-browser", 1, install_command("web")),
    ],
)
def test_a_port_folders_and_packages_must_be_there(
    arguments, expected, said, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    if expected == 1:
        monkeypatch.setattr("dare.documents.page.find_spec", lambda name: name != "uvicorn" or None)
    status, out, err = call(*arguments.split())
    assert (status, out, said in err) == (expected, "", True)


# ---------------------------------------------------------------- nothing goes out

WATCH = """
import os, sys

def watch(event, arguments):
    if event in ("socket.connect", "socket.bind", "socket.sendto", "socket.getaddrinfo"):
        with open(os.environ["WATCHED"], "a") as file:
            print(event, arguments[-1], file=file)

sys.addaudithook(watch)
"""


def test_nothing_goes_out_and_the_first_start_is_as_quick(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(WATCH)
    watched = tmp_path / "watched"
    environment = {
        "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]),
        "WATCHED": str(watched),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),  # so that the figures' library is made anew
    }
    with serving(tmp_path, **environment) as (site, process):
        client = Client(site)
        assert client.get("/").status == 200
        assert not list(tmp_path.glob("cache/dare/vega-*.js")), "which takes seconds to make"
        assert client.post(PLAN, ASKED).status == 200
        for name in page_assets(is_server=True):
            assert client.get(f"/{name}").status == 200
        assert list(tmp_path.glob("cache/dare/vega-*.js"))
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=PATIENCE_SECONDS)
        assert (process.returncode, out, err) == (0, "", "")  # Ctrl-C is no failure
    assert set(watched.read_text().splitlines()) == {"socket.bind ('127.0.0.1', 0)"}
