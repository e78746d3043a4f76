"""The page that follows a search: who gets it, and what it shows while the study grows."""

from __future__ import annotations

import http.client
import threading
from contextlib import closing
from html import unescape
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import study_sample as sample

from dare.errors import OutputError, install_command
from dare.studies.results import State
from dare.studies.study import BASELINE, Study
from dare.web import live
from dare.web.live import follow
from helpers import PATIENCE_SECONDS


def ask(address: str, path: str, token: str | None = None, **headers: str) -> tuple[int, str]:
    """Return the status and the text of an answer; by default with the address's own token."""
    parts = urlsplit(address)
    token = parts.query.partition("=")[2] if token is None else token
    connection = http.client.HTTPConnection("127.0.0.1", parts.port, timeout=PATIENCE_SECONDS)
    connection.request("GET", path, headers={"Authorization": f"Bearer {token}", **headers})
    answer = connection.getresponse()
    found = answer.status, answer.read().decode()
    connection.close()
    return found


@pytest.fixture
def study(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("dare.studies.document.draw_figures", lambda *_: [])  # they take a while
    path = tmp_path / "study.db"
    with closing(Study(path, sample.CHARTER)) as opened:
        opened.keep("planned", 2)
        score(opened, "base", 0.2)
    return path


def score(study: Study, name: str, quality: float) -> None:
    claim = study.take_beside(BASELINE, {name: {}})
    claim.end(State.DONE, scored=sample.make_scored(quality), objective=quality)


def test_an_unfinished_study_is_served_and_followed(study, monkeypatch):
    monkeypatch.setattr(live, "REFRESH_SECONDS", 0.2)
    with follow(study) as address:
        status, page = ask(address, "/")
        _, state = ask(address, "/state")
        assert status == 200
        assert "Not finished yet" in page
        assert f'"{state}"' in page  # what the page compares with
        assert "connect-src 'self'" in unescape(page)
        for path in ("/", "/state"):
            assert ask(address, path, token="wrong")[0] == 403
        for stranger in ({"Host": "evil.example"}, {"Origin": "http://evil.example"}):
            assert ask(address, "/", **stranger)[0] == 403
        assert ask(address, "/other")[0] == 404
        with closing(Study(study)) as opened:
            score(opened, "average", 0.6)
        assert ask(address, "/state")[1] != state
        assert "average" in ask(address, "/")[1]
    with pytest.raises(ConnectionRefusedError):
        ask(address, "/")


def test_an_open_page_sees_the_end(study, monkeypatch):
    monkeypatch.setattr(live, "REFRESH_SECONDS", 30.0)
    seen = []
    with follow(study) as address:
        ask(address, "/")
        ask(address, "/state")
        with closing(Study(study)) as opened:
            score(opened, "sum", 0.9)
        late = threading.Timer(0.3, lambda: seen.append(ask(address, "/")[1]))
        late.start()
    late.join()
    assert "sum" in seen[0]


def test_a_study_that_has_not_begun_is_waited_for_and_the_extra_is_named(tmp_path, monkeypatch):
    with follow(tmp_path / "none.db") as address:
        assert ask(address, "/")[0] == 503
        assert ask(address, "/state") == (200, "")
    monkeypatch.setattr("dare.documents.page.find_spec", lambda name: name != "uvicorn" or None)
    with pytest.raises(OutputError) as raised, follow(tmp_path / "none.db"):
        pass
    assert install_command("web") in str(raised.value)
