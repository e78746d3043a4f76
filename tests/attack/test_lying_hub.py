"""A hub that lies, or is reached with a password: nothing of it gets here."""

from __future__ import annotations

import json
import re
import traceback
from pathlib import Path

import pytest

from dare.errors import InputError
from dare.inputs.hub import resolve
from fake_hub import Hub

FILES = {"config.json": b"{}", "model.safetensors": b"weights", "README.md": b"text"}


def refused(text: str = "org/name") -> str:
    with pytest.raises(InputError) as caught:
        resolve(Path(text), verbose=False)
    message = str(caught.value)
    assert message.startswith(text)
    return message


def outside(tmp_path: Path) -> set[str]:
    """What there is that a fetch has no business with."""
    own = tmp_path / "cache"
    return {str(path) for path in tmp_path.rglob("*") if own not in (path, *path.parents)}


def listed(path: str) -> bytes:
    """The list of a commit's files, with one of this path."""
    return json.dumps([{"type": "file", "path": path, "size": 1, "oid": "0" * 40}]).encode()


FACTS = json.dumps({"id": "org/name", "sha": "../../../evil", "siblings": []}).encode()
LIES: dict[str, tuple[str, dict[str, str] | bytes, str]] = {
    "an ETag that leads out": ("/org/name", {"ETag": '"../../../../evil"'}, "the hub sent"),
    "an ETag that is a path": ("/org/name", {"ETag": '"{tmp}/evil"'}, "the hub sent"),
    "an ETag of a large file": ("/org/name", {"X-Linked-ETag": '"../../evil"'}, "the hub sent"),
    "an ETag that is a folder": ("/org/name", {"ETag": '".."'}, "the hub sent"),
    "a commit that leads out": ("/org/name", {"X-Repo-Commit": "../../../evil"}, "the hub sent"),
    "a commit in the list": ("/api/models/org/name/revision", FACTS, "'../../../evil' as sha"),
    **{
        f"{path} in the list": ("/api/models/org/name/tree", listed(path), f"{path!r} as path")
        for path in ("../evil.py", "/etc/evil.py", "a/../../evil.py")
    },
}
"""What is asked for, the headers or the body of the answer, and what the error says."""


@pytest.mark.parametrize("lie", LIES)
def test_what_a_hub_says_names_no_file_here(hub: Hub, tmp_path: Path, lie: str) -> None:
    hub.add("org/name", FILES)
    before = outside(tmp_path)
    start, sent, said = LIES[lie]
    if isinstance(sent, bytes):
        hub.bodies[start] = sent
    else:
        hub.lies[start] = {key: value.format(tmp=tmp_path) for key, value in sent.items()}
    assert said in refused()
    assert outside(tmp_path) == before
    assert not list(tmp_path.rglob("*evil*"))


def test_a_download_has_the_digest_that_was_announced(hub: Hub) -> None:
    commit = hub.add("org/name", FILES)
    hub.bodies["/large"] = b"WEIGHTS"
    assert "model.safetensors" in refused()
    hub.bodies.clear()
    resolved = resolve(Path("org/name"), verbose=False)
    assert resolved.commit == commit
    assert (resolved.path / "model.safetensors").read_bytes() == b"weights"


@pytest.mark.parametrize("verbose", [False, True])
def test_a_password_in_the_endpoint_is_not_shown(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], verbose: bool
) -> None:
    hub.add("org/name", FILES)
    endpoint = f"http://me:pa55word@127.0.0.1:{hub.ports[0]}"
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", endpoint)
    template = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
    hub.refusals["/"] = (500, "")
    for stopped in (False, True):
        if stopped:
            hub.stop()
        with pytest.raises(InputError) as caught:
            resolve(Path("org/name"), verbose=verbose)
        shown = "".join(traceback.format_exception(caught.value))
        assert "pa55word" not in shown + "".join(capfd.readouterr())


def test_a_redirect_carries_no_token(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    hub.add("org/name", FILES)
    resolve(Path("org/name"), verbose=False)
    assert [path for path, _ in hub.tokens if re.match("GET /large", path)]
    assert {token for _, token in hub.tokens} == {""}
