"""Outputs on the hub: one commit, private, resumed, nothing else's lost, no token anywhere."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

import dare
from dare.cli import main
from dare.errors import ExistsError, OutputError, RecipeError
from dare.output.hub import HubPublisher
from dare.output.output import Output
from dare.output.targets import MANIFEST_NAME, default_scratch
from dare.stores import reading
from helpers import listing, save

REPO = "me/merged"
WEIGHTS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
OURS = {*WEIGHTS, "model.safetensors.index.json", "config.json", "README.md", MANIFEST_NAME}
CARD = """---
license: {licence}
language: en
pipeline_tag: text-generation
tags: [chat]
---
"""


@pytest.fixture
def there(hub, tmp_path, monkeypatch):
    """A hub with a base and a model, where we may write, and a scratch folder of our own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_TOKEN", hub.token)
    draw = np.random.default_rng(0)
    base = {f"w{n}": draw.standard_normal((300, 200), np.float32) for n in range(2)}
    math = {name: values + np.float32(0.01) for name, values in base.items()}
    for name, arrays, licence in (("base", base, "mit"), ("math", math, "apache-2.0")):
        folder = save(tmp_path / name / "model.safetensors", arrays).parent
        (folder / "config.json").write_text('{"model_type": "llama"}')
        (folder / "README.md").write_text(CARD.format(licence=licence))
        hub.add(f"org/{name}", {path.name: path.read_bytes() for path in folder.iterdir()})
    reading.forget()
    yield hub
    reading.forget()


def recipe(output=f"hf://{REPO}", **settings):
    given = {"shard_size": 250_000, "threads": 2, "verbose": False, **settings}
    return dare.Request.of(base="hf://org/base", models=["hf://org/math"], output=output, **given)


def sent(hub, start: str) -> int:
    return sum(line.startswith(start) for line in hub.asked)


def no_token(hub, *places: Path) -> bool:
    files = [path for place in places for path in place.rglob("*") if path.is_file()]
    return not any(hub.token.encode() in path.read_bytes() for path in files)


# ---------------------------------------------------------------- what is made


def test_a_merge_goes_from_hub_to_hub_in_one_private_commit(there, tmp_path):
    local = dare.merge(recipe(tmp_path / "local"))
    report = dare.merge(recipe())
    assert there.private == {REPO}
    first, *earlier = reversed(there.history[REPO, "main"])
    assert earlier == [report.commit]
    assert there.files(REPO).keys() == {*OURS, ".gitattributes"}
    assert there.files(REPO, first).keys() == {".gitattributes"}
    assert report.digests == local.digests
    for name in WEIGHTS:
        assert there.files(REPO)[name] == (tmp_path / "local" / name).read_bytes()
    found = dare.verify(f"hf://{REPO}")
    assert (found.ok, found.sha256) == (True, dare.verify(tmp_path / "local").sha256)
    assert str(found.path) == f"hf://{REPO}@{report.commit}"
    assert ("commit", report.commit) in report.document().facts
    assert listing(default_scratch()) == []
    assert not any(there.token.encode() in data for data in there.files(REPO).values())
    assert there.token not in json.dumps(report.to_dict())
    assert no_token(there, tmp_path)


def test_the_card_is_one_that_the_hub_takes(there, tmp_path):
    from huggingface_hub import ModelCard

    dare.merge(recipe())
    data = ModelCard(there.files(REPO)["README.md"].decode()).data.to_dict()
    assert there.cards == [there.files(REPO)["README.md"].decode()]
    assert data["base_model"] == ["org/base", "org/math"]
    assert data["base_model_relation"] == "merge"
    assert data["license"] == "apache-2.0"
    assert data["language"] == ["en"]
    assert data["pipeline_tag"] == "text-generation"
    assert {"merge", "chat"} <= {*data["tags"]}
    assert f"dare verify hf://{REPO}  " in there.cards[0]
    paths = {"base": tmp_path / "base", "models": [tmp_path / "math"]}  # which the hub cannot know
    dare.merge(dare.Request.of(**paths, output=f"hf://{REPO}2", verbose=False))
    data = ModelCard(there.files(f"{REPO}2")["README.md"].decode()).data.to_dict()
    assert not {"base_model", "base_model_relation"} & data.keys()


def test_a_branch_has_nothing_of_the_main_one(there):
    dare.merge(recipe())
    main = there.files(REPO)
    report = dare.merge(recipe(f"hf://{REPO}@try%2Ftwo", shard_size=None))
    files = there.files(REPO, "try/two")
    assert "model.safetensors" in files
    assert not {*WEIGHTS} & files.keys()
    assert there.files(REPO) == main
    assert there.refs[REPO, "try/two"] == report.commit
    assert b"# merged\n" in files["README.md"]
    with pytest.raises(OutputError):  # a commit is no branch, which is noticed before the merge
        dare.merge(recipe(f"hf://{REPO}@{report.commit}"), overwrite=True)
    assert not default_scratch().exists() or listing(default_scratch()) == []


def test_a_plan_asks_nobody_and_says_where_it_is_made(there):
    there.asked.clear()
    planned = dare.plan(recipe(), verbose=False)
    assert not [line for line in there.asked if REPO in line]
    assert planned.layout is not None
    assert planned.layout.scratch_bytes == 480_000
    assert REPO in planned.document().__repr__()


# ---------------------------------------------------------------- broken off


@pytest.mark.parametrize("wrong", ["500", "broken"])
def test_an_upload_that_breaks_off_goes_on(there, wrong, monkeypatch, tmp_path):
    upload = HubPublisher.publish
    second: list[str] = []

    def publish(self, output, manifest):
        import hashlib

        data = (output.folder / WEIGHTS[1]).read_bytes()
        second.append(f"/upload/{hashlib.sha256(data).hexdigest()}")
        if wrong == "500":
            there.refusals[second[0]] = (500, "")
        else:
            there.broken.add(second[0])
        return upload(self, output, manifest)

    with monkeypatch.context() as patch:
        patch.setattr(HubPublisher, "publish", publish)
        with pytest.raises(OutputError, match=f"hf://{REPO}: .* it resumes"):
            dare.merge(recipe())
    assert no_token(there, tmp_path)
    assert len(there.history[REPO, "main"]) == 1  # nobody sees anything yet
    there.refusals.clear()
    there.broken.clear()
    there.asked.clear()
    report = dare.merge(recipe())
    assert report.resumed_chunks > 0
    assert report.bytes_read < report.bytes_written
    assert [line for line in there.asked if line.startswith("PUT")] == [f"PUT {second[0]}"]
    assert dare.verify(f"hf://{REPO}").ok
    assert listing(default_scratch()) == []


def test_a_merge_that_breaks_off_goes_on(there, monkeypatch):
    record, seen = Output.record, []

    def recorded(self, records):
        record(self, records)
        seen.extend(records)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Output, "record", recorded)
        with pytest.raises(KeyboardInterrupt):
            dare.merge(recipe(threads=1))
    assert seen
    assert dare.merge(recipe()).resumed_chunks > 0
    assert dare.verify(f"hf://{REPO}").ok


def test_a_commit_whose_answer_was_lost_is_recognised(there):
    there.broken.add("after the commit")
    with pytest.raises(OutputError):
        dare.merge(recipe())
    there.broken.clear()
    there.asked.clear()
    report = dare.merge(recipe())
    assert "leftovers" in [notice.code for notice in report.warnings]
    assert sent(there, "POST") == 0
    assert len(there.history[REPO, "main"]) == 2
    assert listing(default_scratch()) == []


def test_a_commit_that_came_in_between_is_not_overwritten(there, monkeypatch):
    there.add(REPO, {".gitattributes": b""})
    upload = HubPublisher._replaceable

    def replaceable(self, api, *, overwrite):
        found = upload(self, api, overwrite=overwrite)
        there.add(REPO, {"theirs.txt": os.urandom(4)})
        return found

    monkeypatch.setattr(HubPublisher, "check", lambda *_, **__: None)
    monkeypatch.setattr(HubPublisher, "_replaceable", replaceable)
    with pytest.raises(OutputError, match="412"):
        dare.merge(recipe())
    assert there.files(REPO).keys() == {"theirs.txt"}


# ---------------------------------------------------------------- refused


@pytest.mark.parametrize(
    ("start", "status", "said"),
    [
        ("/api/repos", 401, "hf auth login"),
        ("/api/repos", 403, "may write"),
        ("/api/models/me/merged/auth-check", 403, "may write"),
        ("/api/models/me/merged/preupload", 403, "may write"),
        ("/api/models/me/merged/commit/", 409, "409"),
        ("/api/models/me/merged/commit/", 500, "500"),
        ("/me/merged.git", 429, "429"),
        ("/api/validate-yaml", 500, "the hub"),
    ],
)
def test_a_hub_that_refuses_is_told_in_a_line_with_the_remedy(there, start, status, said, tmp_path):
    there.refusals[start] = (status, "")
    with pytest.raises(OutputError) as caught:
        dare.merge(recipe())
    message = str(caught.value)
    assert message.startswith(f"hf://{REPO}: ")
    assert said in message
    assert "\n" not in message
    assert there.token not in message
    assert no_token(there, tmp_path)
    there.refusals.clear()
    assert dare.merge(recipe()).commit


def test_without_a_token_nothing_is_asked_or_made(there, monkeypatch):
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(OutputError, match="hf auth login"):
        dare.merge(recipe())
    assert sent(there, "POST") == 0
    assert not default_scratch().exists()


def test_a_token_that_no_header_can_hold_is_not_shown(there, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_other\x01Token")
    paths = {"base": tmp_path / "base", "models": [tmp_path / "math"]}
    with pytest.raises(OutputError) as caught:
        dare.merge(dare.Request.of(**paths, output=f"hf://{REPO}", verbose=False))
    assert "Token" not in str(caught.value)


def test_another_user_is_refused_before_the_merge(there):
    with pytest.raises(OutputError, match="403"):
        dare.merge(recipe("hf://other/merged"))
    assert sent(there, "PUT") == 0
    assert not default_scratch().exists()


def test_an_existing_output_is_replaced_only_if_asked(there):
    dare.merge(recipe())
    with pytest.raises(ExistsError):
        dare.merge(recipe())
    report = dare.merge(recipe(shard_size=None), overwrite=True)
    left = there.files(REPO, report.commit).keys()
    assert left == {
        ".gitattributes",
        "model.safetensors",
        "config.json",
        "README.md",
        MANIFEST_NAME,
    }
    assert len(there.history[REPO, "main"]) == 3


def test_a_repository_of_somebody_else_is_not_replaced(there):
    theirs = {".gitattributes": b"", "model.safetensors": b"theirs"}
    there.add(REPO, theirs)
    with pytest.raises(ExistsError):
        dare.merge(recipe())
    with pytest.raises(OutputError, match=r"model\.safetensors, which was not made by dare"):
        dare.merge(recipe(), overwrite=True)
    assert there.files(REPO) == theirs
    assert there.private == set()


def test_a_public_repository_stays_public(there):
    there.add(REPO, {".gitattributes": b""})
    dare.merge(recipe())
    assert there.private == set()


@pytest.mark.parametrize(
    "output",
    ["hf://me", "hf://me/a/b/c", "hf://me/merged@main/folder", "hf://me/m.safetensors"],
)
def test_only_whole_repositories_are_outputs(there, output):
    with pytest.raises(OutputError, match="hf://user/name"):
        dare.plan(recipe(output, shard_size=None))


def test_slices_and_clusters_do_not_write_to_the_hub(there):
    with pytest.raises(OutputError, match="slices"):
        dare.merge_slice(recipe(), "1/2")
    with pytest.raises(RecipeError, match="hub"):
        dare.merge(recipe(cluster="local", scratch="x"))
    assert sent(there, "POST") == 0


def test_offline_nothing_is_sent(there, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    paths = {"base": tmp_path / "base", "models": [tmp_path / "math"]}
    with pytest.raises(OutputError, match="HF_HUB_OFFLINE"):
        dare.merge(dare.Request.of(**paths, output=f"hf://{REPO}", verbose=False))
    assert not default_scratch().exists()


def test_what_is_on_the_hub_and_no_output_is_not_verified(there, capsys):
    assert main(["verify", "hf://org/base"]) != 0
    assert "not made by dare" in capsys.readouterr().err
    assert main(["verify", "hf://org/none"]) != 0
    assert "the hub has no model org/none" in capsys.readouterr().err


def test_an_output_on_the_hub_is_repeated_by_its_address(there, tmp_path):
    first = dare.merge(recipe())
    again = dare.merge(f"hf://{REPO}", output=tmp_path / "again", verbose=False)
    assert again.digests == first.digests
