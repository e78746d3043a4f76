"""A hub on this machine, which tells the truth or lies, for the client to talk to."""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest


def commit_of(files: dict[str, bytes]) -> str:
    return hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()


@dataclass
class Hub:
    """Repositories by name, what is wrong with them, and a log of what was asked for."""

    commits: dict[tuple[str, str], dict[str, bytes]] = field(default_factory=dict)
    refs: dict[tuple[str, str], str] = field(default_factory=dict)
    refusals: dict[str, tuple[int, str]] = field(default_factory=dict)
    """By beginning of a path: the status, and the error code that goes with it."""
    asked: list[str] = field(default_factory=list)
    tokens: list[tuple[str, str]] = field(default_factory=list)
    """The method and path of each request of the second server, and who it says that it is from."""
    lies: dict[str, dict[str, str]] = field(default_factory=dict)
    """By beginning of a path: headers that are sent in place of the right ones."""
    bodies: dict[str, bytes] = field(default_factory=dict)
    """By beginning of a path: what is sent in place of the right content."""
    servers: list[ThreadingHTTPServer] = field(default_factory=list)
    broken: set[str] = field(default_factory=set)
    """Beginnings of paths whose connection breaks off before an answer."""
    token: str = "hf_secretTokenOfATest"
    """The only token that may write, below `writable`."""
    writable: str = "me"
    private: set[str] = field(default_factory=set)
    history: dict[tuple[str, str], list[str]] = field(default_factory=dict)
    """By repository and branch: its commits, the last one first."""
    blobs: dict[str, bytes] = field(default_factory=dict)
    """What was uploaded, by its SHA-256."""
    cards: list[str] = field(default_factory=list)

    def add(self, repo: str, files: dict[str, bytes], ref: str = "main") -> str:
        commit = commit_of(files)
        self.commits[repo, commit] = files
        self.refs[repo, ref] = commit
        self.history.setdefault((repo, ref), []).insert(0, commit)
        return commit

    def files(self, repo: str, revision: str = "main") -> dict[str, bytes]:
        """All files at a revision."""
        commit = self.find(repo, revision)
        assert commit is not None
        return self.commits[repo, commit]

    def find(self, repo: str, revision: str) -> str | None:
        commit = self.refs.get((repo, revision), revision)
        return commit if (repo, commit) in self.commits else None

    def start(self) -> None:
        """Two servers: the hub, and another one for large files, as the real one has."""
        for _ in range(2):
            server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, self))
            self.servers.append(server)
            threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()

    def stop(self) -> None:
        while self.servers:
            server = self.servers.pop()
            server.shutdown()
            server.server_close()

    @property
    def ports(self) -> tuple[int, int]:
        first, second = (server.server_port for server in self.servers)
        return first, second

    def downloads(self) -> list[str]:
        """The files that were sent, by name."""
        small = [line.rpartition("/")[2] for line in self.asked if line.startswith("GET /org")]
        large = [line.rpartition("?")[2] for line in self.asked if line.startswith("GET /large")]
        return sorted(small + large)


class Handler(BaseHTTPRequestHandler):
    """As much of the hub's protocol as the client needs."""

    def __init__(self, hub: Hub, *args: Any) -> None:
        self.hub = hub
        super().__init__(*args)

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        hub, path = self.hub, unquote(urlsplit(self.path).path)
        hub.asked.append(f"{self.command} {unquote(self.path)}")
        if self.server is hub.servers[-1]:
            hub.tokens.append((f"{self.command} {path}", self.headers.get("Authorization", "")))
        if self.is_refused(path):
            return None
        if path.startswith("/large/"):
            return self.send_large(path)
        if path.startswith("/api/models/"):
            return self.send_facts(path.removeprefix("/api/models/"))
        repo, _, rest = path.removeprefix("/").partition("/resolve/")
        revision, _, file = rest.partition("/")
        return self.send_file(repo, revision, file)

    def is_refused(self, path: str) -> bool:
        """Refuse a request or break off, if that is set for its path."""
        if any(path.startswith(start) for start in self.hub.broken):
            self.close_connection = True
            self.connection.close()
            return True
        for start, (status, code) in self.hub.refusals.items():
            if path.startswith(start):
                self.answer(status, {"X-Error-Code": code} if code else {})
                return True
        return False

    # ------------------------------------------------------------ writing

    def do_PUT(self) -> None:
        self.do_POST()

    def do_POST(self) -> None:
        hub, path = self.hub, unquote(urlsplit(self.path).path)
        hub.asked.append(f"{self.command} {path}")
        if path.startswith("/upload/") and self.is_refused(path):
            return None  # in the middle of the body
        body = self.read_body()
        if self.is_refused(path):
            return None
        if path.startswith("/upload/"):  # the store of large files knows no tokens
            assert self.headers.get("Authorization") is None
            assert etag_of(body) == path.removeprefix("/upload/")
            hub.blobs[etag_of(body)] = body
            return self.answer(200, {})
        if self.headers.get("Authorization") != f"Bearer {hub.token}":
            return self.answer(401, {"X-Error-Message": "Invalid credentials"})
        if path == "/api/repos/create":
            return self.create(json.loads(body))
        if path == "/api/validate-yaml":
            return self.check_card(json.loads(body)["content"])
        if path.endswith(".git/info/lfs/objects/batch"):
            return self.send_actions(json.loads(body)["objects"])
        if path == "/verify":
            return self.send_json(200, {})
        org, name, kind, revision = path.removeprefix("/api/models/").split("/", 3)
        repo = f"{org}/{name}"
        if org != hub.writable:
            return self.answer(403, {})
        if kind == "branch":
            if (repo, revision) in hub.refs:
                return self.answer(409, {})
            if re.fullmatch("[0-9a-f]{40}", revision):
                return self.answer(400, {"X-Error-Message": "a branch is not called like that"})
            hub.add(repo, hub.files(repo, json.loads(body).get("startingPoint", "main")), revision)
            return self.send_json(200, {})
        if hub.find(repo, revision) is None:
            return self.answer(404, {"X-Error-Code": "RevisionNotFound"})
        if kind == "preupload":
            large = (".safetensors", ".gguf")
            modes = [
                {
                    "path": file["path"],
                    "uploadMode": "lfs" if file["path"].endswith(large) else "regular",
                    "shouldIgnore": False,
                }
                for file in json.loads(body)["files"]
            ]
            return self.send_json(200, {"files": modes})
        assert kind == "commit"
        return self.commit(repo, revision, [json.loads(line) for line in body.splitlines()])

    def create(self, asked: dict[str, Any]) -> None:
        repo = f"{asked['organization']}/{asked['name']}"
        if asked["organization"] != self.hub.writable:
            return self.answer(403, {})
        place = {"url": f"http://127.0.0.1:{self.hub.ports[0]}/{repo}"}
        if any(known == repo for known, _ in self.hub.commits):
            return self.send_json(409, place)
        self.hub.add(repo, {".gitattributes": b"*.safetensors filter=lfs\n"})
        if asked.get("visibility") == "private":
            self.hub.private.add(repo)
        return self.send_json(200, place)

    def check_card(self, card: str) -> None:
        """Refuse what the hub refuses: bases whose names no model on the hub can have."""
        import yaml

        self.hub.cards.append(card)
        fields = yaml.safe_load(card.split("---\n")[1])
        for name in fields.get("base_model", []):
            if not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
                return self.send_json(400, {"errors": [{"message": f"{name} is not valid"}]})
        return self.send_json(200, {"errors": [], "warnings": [{"message": "no pipeline_tag"}]})

    def send_actions(self, objects: list[dict[str, Any]]) -> None:
        first, second = (f"http://127.0.0.1:{port}" for port in self.hub.ports)
        for each in objects:
            if each["oid"] not in self.hub.blobs:
                upload = {"href": f"{second}/upload/{each['oid']}"}
                each["actions"] = {"upload": upload, "verify": {"href": f"{first}/verify"}}
        self.send_json(200, {"transfer": "basic", "objects": objects})

    def commit(self, repo: str, branch: str, lines: list[dict[str, Any]]) -> None:
        hub = self.hub
        files, first = dict(hub.files(repo, branch)), lines[0]["value"]
        if first.get("parentCommit") not in (None, hub.refs[repo, branch]):
            return self.answer(412, {})
        for line in lines[1:]:
            value = line["value"]
            if line["key"] == "deletedFile":
                del files[value["path"]]
            elif line["key"] == "lfsFile":
                files[value["path"]] = hub.blobs[value["oid"]]
            else:
                files[value["path"]] = base64.b64decode(value["content"])
        commit = hub.add(repo, files, branch)
        if "after the commit" in hub.broken:
            self.close_connection = True
            return self.connection.close()
        return self.send_json(200, {"commitOid": commit, "commitUrl": f"/{repo}/commit/{commit}"})

    def read_body(self) -> bytes:
        if (length := self.headers.get("Content-Length")) is not None:
            return self.rfile.read(int(length))
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def send_json(self, status: int, value: object) -> None:
        self.answer(status, {"Content-Type": "application/json"}, json.dumps(value).encode())

    # ------------------------------------------------------------ reading

    def send_facts(self, path: str) -> None:
        org, name, kind, revision = [*path.split("/", 3), "revision", "main"][:4]
        repo = f"{org}/{name}"
        is_me = self.headers.get("Authorization") == f"Bearer {self.hub.token}"
        if repo in self.hub.private and not is_me:
            return self.answer(401, {"X-Error-Code": "RepoNotFound"})
        if kind == "auth-check":
            return self.answer(200 if is_me and org == self.hub.writable else 403, {})
        if kind == "refs":
            names = [branch for known, branch in self.hub.refs if known == repo]
            branches = [
                {"name": n, "ref": n, "targetCommit": self.hub.refs[repo, n]} for n in names
            ]
            return self.send_json(200, {"branches": branches, "converts": [], "tags": []})
        if kind == "commits":
            some = {"authors": [], "date": "2026-01-01T00:00:00.000Z", "title": "", "message": ""}
            commits = [{"id": each, **some} for each in self.hub.history[repo, revision]]
            return self.send_json(200, commits)
        if not any(known == repo for known, _ in self.hub.commits):
            return self.answer(404, {"X-Error-Code": "RepoNotFound"})
        commit = self.hub.find(repo, revision)
        if commit is None:
            return self.answer(404, {"X-Error-Code": "RevisionNotFound"})
        files = self.hub.commits[repo, commit]
        facts: object
        if kind == "revision":
            listed = [{"rfilename": f, "size": len(data)} for f, data in files.items()]
            facts = {"id": repo, "sha": commit, "siblings": listed}
        else:
            facts = [
                {"type": "file", "path": f, "size": len(data), "oid": etag_of(data)}
                for f, data in files.items()
            ]
        return self.answer(200, {"Content-Type": "application/json"}, json.dumps(facts).encode())

    def send_file(self, repo: str, revision: str, file: str) -> None:
        commit = self.hub.find(repo, revision)
        data = self.hub.commits.get((repo, commit or ""), {}).get(file)
        if data is None or commit is None:
            return self.answer(404, {"X-Error-Code": "EntryNotFound"})
        headers = {"X-Repo-Commit": commit, "ETag": f'"{etag_of(data)}"'}
        if not file.endswith(".safetensors"):
            return self.send_some(headers, data)
        linked = {"X-Linked-ETag": f'"{etag_of(data)}"', "X-Linked-Size": str(len(data))}
        place = f"http://127.0.0.1:{self.hub.ports[1]}/large/{repo}/{commit}?{file}"
        return self.answer(302, {**headers, **linked, "Location": place})

    def send_large(self, path: str) -> None:
        hub, file = self.hub, unquote(urlsplit(self.path).query)
        _, _, org, name, commit = path.split("/")
        data = hub.commits[f"{org}/{name}", commit][file]
        self.send_some({}, data)

    def send_some(self, headers: dict[str, str], data: bytes) -> None:
        """The range that is asked for, or all."""
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if wanted is None:
            return self.answer(200, headers, data)
        begin, end = int(wanted[1]), min(int(wanted[2]) + 1, len(data))
        span = {"Content-Range": f"bytes {begin}-{end - 1}/{len(data)}"}
        return self.answer(206, headers | span, data[begin:end])

    def answer(self, status: int, headers: dict[str, str], body: bytes = b"") -> None:
        path = unquote(urlsplit(self.path).path)
        body = chosen(self.hub.bodies, path) or body
        lies = chosen(self.hub.lies, path) or {}
        self.send_response(status)
        for key, value in ({"Content-Length": str(len(body))} | headers | lies).items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def chosen(by_start: dict[str, Any], path: str) -> Any:
    """What is set for paths that begin like this one."""
    return next((value for start, value in by_start.items() if path.startswith(start)), None)


def etag_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A running hub that the client talks to, an empty cache, an empty working directory."""
    constants = pytest.importorskip("huggingface_hub.constants")
    hub = Hub()
    hub.start()
    endpoint = f"http://127.0.0.1:{hub.ports[0]}"
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    template = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("time.sleep", lambda _seconds: None)  # between the client's retries
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    yield hub
    hub.stop()
