"""Outputs that are recoded: interrupted, in slices, repeated, verified, in the way of others."""

from __future__ import annotations

import json
import pickle
import shutil
from types import SimpleNamespace

import pytest
from tiny_models import config, make_directory, parts_of, weights

import dare
from dare.errors import ExistsError, OutputError, RecipeError, VerificationError
from dare.formats.gguf import GgufRecoding
from helpers import flip_bit, listing

pytest.importorskip("gguf")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    base = weights(parts_of("qwen2"))
    make_directory(folder / "base", base, config("qwen2"))
    tuned = {name: own + own * 0.01 for name, own in base.items()}
    make_directory(folder / "tuned", tuned, config("qwen2"))
    return folder


def settings(models, output, **more):
    given = {"base": models / "base", "models": [models / "tuned"], "output": output}
    return {**given, "dtype": "Q8_0", "verbose": False, "threads": 1, **more}


@pytest.fixture(scope="module")
def expected(models):
    report = dare.merge(**settings(models, models / "expected.gguf"))
    return (models / "expected.gguf").read_bytes(), report


def test_a_failure_while_storing_is_resumed_to_the_same_bytes(
    tmp_path, models, expected, monkeypatch
):
    left, encode = iter(range(9)), GgufRecoding.encode

    def fails(self, *given):
        if next(left, None) is None:
            raise KeyboardInterrupt
        return encode(self, *given)

    with monkeypatch.context() as patch:
        patch.setattr(GgufRecoding, "encode", fails)
        with pytest.raises(KeyboardInterrupt):
            dare.merge(**settings(models, tmp_path / "out.gguf"))
    assert not (tmp_path / "out.gguf").exists()
    assert (tmp_path / "out.gguf.partial" / "out.gguf").exists()
    request = settings(models, tmp_path / "out.gguf")
    assert dare.merge_slice(request, "1/2").report is None
    report = dare.merge(**request)
    assert report.resumed_chunks > 0
    assert (tmp_path / "out.gguf").read_bytes() == expected[0]
    assert report.recoded == expected[1].recoded
    assert listing(tmp_path) == ["out.gguf", "out.gguf.manifest.json"]


def test_it_is_verified_and_repeated(tmp_path, models, expected):
    output = tmp_path / "out.gguf"
    dare.merge(**settings(models, output))
    found = dare.verify(output)
    assert (found.ok, found.bytes_checked) == (True, expected[1].bytes_written)
    manifest = json.loads((tmp_path / "out.gguf.manifest.json").read_text())
    assert manifest["recoded"] == expected[1].recoded.format
    losses = manifest["report"]["recoded"]["tensors"]
    assert {n: loss["error"] for n, loss in losses.items()} == {
        name: loss.error for name, loss in expected[1].recoded.tensors.items()
    }
    assert dare.load_recipe(output).recipe.dtype == "Q8_0"
    dare.merge(output, output=tmp_path / "again.gguf", verbose=False)
    assert (tmp_path / "again.gguf").read_bytes() == expected[0]
    dare.merge(output, output=tmp_path / "plain", dtype="F32", verbose=False)
    dare.merge(tmp_path / "plain", output=tmp_path / "other.gguf", verbose=False)
    flip_bit(output, 8 * 5000)
    (problem,) = dare.verify(output).problems
    assert (problem.code, problem.subjects) == ("changed", ("out.gguf",))
    (tmp_path / "out.gguf.manifest.json").unlink()
    with pytest.raises(VerificationError):
        dare.verify(output)


def test_a_complete_output_is_recognised_with_its_losses(tmp_path, models, expected, monkeypatch):
    def dies(*_given):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(dare.output.output, "clear_away", dies)
        with pytest.raises(KeyboardInterrupt):
            dare.merge(**settings(models, tmp_path / "out.gguf"))
    report = dare.merge(**settings(models, tmp_path / "out.gguf"))
    assert report.recoded == expected[1].recoded
    assert report.bytes_read == 0


def test_only_our_own_is_replaced(tmp_path, models):
    output = tmp_path / "out.gguf"
    output.write_bytes(b"GGUF of somebody else")
    with pytest.raises(ExistsError):
        dare.merge(**settings(models, output))
    with pytest.raises(OutputError, match="not made by dare"):
        dare.merge(**settings(models, output), overwrite=True)
    assert output.read_bytes() == b"GGUF of somebody else"
    output.unlink()
    dare.merge(**settings(models, output))
    dare.merge(**settings(models, output, seed=7), overwrite=True)


def test_there_must_be_room_for_the_output_and_no_more(tmp_path, models, monkeypatch):
    planned = pickle.loads(pickle.dumps(dare.plan(**settings(models, tmp_path / "out.gguf"))))
    room = SimpleNamespace(free=planned.cost.bytes_written - 5000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: room)
    with pytest.raises(OutputError, match="make room"):
        dare.merge(planned)
    assert listing(tmp_path) == []
    room.free = planned.cost.bytes_written + 20_000  # the header, and blocks of the file system
    dare.merge(planned)


def test_the_format_of_a_plain_base_is_not_there_to_be_kept(tmp_path, models):
    with pytest.raises(RecipeError, match="not quantised"):
        dare.plan(**settings(models, tmp_path / "out", dtype=None, format="input"))
    with pytest.raises(RecipeError, match="leave dtype out"):
        dare.plan(**settings(models, tmp_path / "out", dtype="F16", format="input"))
