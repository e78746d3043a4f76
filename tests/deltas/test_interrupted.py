"""Compressing and applying that were stopped go on, and end with the same bytes."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
from small_deltas import KINDS, apply_quietly, compress_quietly

import dare
from dare import InputError, NotFiniteError, OutputError, VerificationError
from dare.deltas.compressing import compress
from dare.kernels import DEVICES, Device
from dare.output.sink import PIECES_NAME, FileSink, PieceSink
from helpers import flip_bit, listing, save, sha256

NAME = "math.delta.safetensors"
CHUNKS = 7
SOME = 3
"""Chunks that are done when it stops."""


def make_arrays() -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Two chunks that are changed, three that are partly, and two that are not."""
    generator = np.random.default_rng(0)
    base = {
        "a": (0.02 * generator.standard_normal(600_000)).astype(np.float16),
        "b": 0.02 * generator.standard_normal(1_100_000).astype(np.float32),
        "c": np.arange(10),
        "d": np.ones(20, np.float32),
    }
    model = {name: values.copy() for name, values in base.items()}
    model["a"] += (0.001 * generator.standard_normal(600_000)).astype(np.float16)
    model["b"][-700_000:] += np.float32(0.01) * generator.standard_normal(700_000).astype("f4")
    return base, model


class Given(NamedTuple):
    """A base and a model; what compressing and applying them gives, by kind."""

    base: Path
    model: Path
    deltas: dict[str, Path]
    applied: dict[str, Path]


@pytest.fixture(scope="module")
def given(tmp_path_factory) -> Given:
    folder = tmp_path_factory.mktemp("given")
    base, model = make_arrays()
    found = Given(
        save(folder / "base.safetensors", base),
        save(folder / "model.safetensors", model),
        {kind: folder / kind / NAME for kind in KINDS},
        {kind: folder / kind / "applied.safetensors" for kind in KINDS},
    )
    for kind in KINDS:
        compress_quietly(found.base, found.model, found.deltas[kind], kind, threads=2)
        apply_quietly(found.base, found.deltas[kind], found.applied[kind])
    assert found.applied["lossless"].read_bytes() == found.model.read_bytes()
    return found


@pytest.fixture(params=KINDS)
def kind(request) -> str:
    return request.param


class Way(NamedTuple):
    """One of the two commands; threads are one, so that it stops after the same chunks."""

    run: Callable[..., Any]
    expected: Path
    output: Path
    writer: tuple[type, str]
    """The method that is called once for each chunk."""


def compressing(given: Given, kind: str, output: Path, model: Path | None = None) -> Way:
    run = partial(compress_quietly, given.base, model or given.model, output, kind, threads=1)
    return Way(run, given.deltas[kind], output, (PieceSink, "append"))


def applying(given: Given, kind: str, output: Path, base: Path | None = None) -> Way:
    run = partial(apply_quietly, base or given.base, given.deltas[kind], output)
    return Way(run, given.applied[kind], output, (FileSink, "write"))


@pytest.fixture(params=["compress", "apply"])
def way(request, given: Given, kind: str, tmp_path: Path) -> Way:
    if request.param == "compress":
        return compressing(given, kind, tmp_path / NAME)
    return applying(given, kind, tmp_path / "applied.safetensors")


def stop(way: Way, monkeypatch, error: BaseException | None = None) -> None:
    """Run it until some chunks are done, and then there is an error."""
    error = error or OutputError("injected")
    owner, method = way.writer
    real, calls = getattr(owner, method), []

    def write(*given: Any) -> Any:
        calls.append(given)
        if len(calls) > SOME:
            raise error
        return real(*given)

    with monkeypatch.context() as patch:
        patch.setattr(owner, method, write)
        patch.setitem(DEVICES, "auto", Device("core", chunks_at_once=1))
        with pytest.raises(type(error)):
            way.run()
    assert listing(way.output.parent) == [f"{way.output.name}.partial"]


def check_same(way: Way) -> None:
    """Hold that the output is what an undisturbed run makes, and that nothing else is left."""
    assert sha256(way.output) == sha256(way.expected)
    assert listing(way.output.parent) == [way.output.name, f"{way.output.name}.manifest.json"]
    assert dare.verify(way.output).ok


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError()])
def test_it_goes_on_where_it_stopped_or_starts_over_if_told_to(way, monkeypatch, error):
    for settings, resumed in (({}, SOME), ({"resume": False}, 0)):
        stop(way, monkeypatch, error)
        assert way.run(**settings).resumed_chunks == resumed
        check_same(way)
        for name in listing(way.output.parent):
            (way.output.parent / name).unlink()


def test_what_rotted_meanwhile_is_made_again(way, monkeypatch):
    stop(way, monkeypatch)
    folder = way.output.with_name(f"{way.output.name}.partial")
    (written,) = (file for file in folder.iterdir() if file.suffix in (".bin", ".safetensors"))
    start = 0 if written.name == PIECES_NAME else 8 * 8192
    for place in range(start, 8 * written.stat().st_size, 8 * 50_000):
        flip_bit(written, place)
    assert way.run().resumed_chunks < SOME
    check_same(way)


def test_no_room_for_the_whole_file_does_not_cost_the_pieces(given, kind, tmp_path, monkeypatch):
    way = compressing(given, kind, tmp_path / NAME)
    free = iter((1 << 40, 0))  # before anything is coded, and when all of it is
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=next(free)))
        with pytest.raises(OutputError, match=f"{NAME}.*make room"):
            way.run()
    assert way.run().resumed_chunks == CHUNKS
    check_same(way)


# ---------------------------------------------------------------- something else in between


def test_another_model_is_not_mixed_in(given, kind, tmp_path, monkeypatch):
    _, model = make_arrays()
    other = save(tmp_path / "in" / "model.safetensors", model)
    one, two = (compressing(given, kind, tmp_path / n / NAME, other) for n in ("one", "two"))
    stop(one, monkeypatch)
    model["a"][:1000] += np.float16(1)
    before = other.stat()
    save(other, model)
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert 0 < one.run().resumed_chunks < SOME
    two.run()
    assert sha256(one.output) == sha256(two.output)


@pytest.mark.parametrize("settings", [{"seed": 7}, {"drop_rate": 0.25}, {"bits": 2}])
def test_other_settings_start_over(given, tmp_path, monkeypatch, settings):
    asked: dict[str, Any] = {"drop_rate": 0.5, "bits": 4, "seed": 1, "threads": 1, "verbose": False}

    def run(**more: Any) -> Any:
        return compress(given.base, given.model, tmp_path / NAME, **{**asked, **more})

    stop(Way(run, given.base, tmp_path / NAME, (PieceSink, "append")), monkeypatch)
    assert run(**settings).resumed_chunks == 0
    assert dare.verify(tmp_path / NAME).ok


def test_another_base_meanwhile_does_not_become_a_model(given, kind, tmp_path, monkeypatch):
    base, _ = make_arrays()
    mine = save(tmp_path / "in" / "base.safetensors", base)
    way = applying(given, kind, tmp_path / "out" / "applied.safetensors", mine)
    stop(way, monkeypatch)
    spoilt = {name: values.copy() for name, values in base.items()}
    spoilt["b"][-1] += 1  # in the last chunk, of which no sample is taken
    save(mine, spoilt)
    with pytest.raises((InputError, VerificationError), match="base"):
        way.run()
    assert not way.output.exists()
    save(mine, base)
    way.run()
    check_same(way)


def test_an_input_that_changes_while_it_is_read_is_noticed(given, kind, tmp_path, monkeypatch):
    _, model = make_arrays()
    other = save(tmp_path / "model.safetensors", model)
    real = PieceSink.append

    def append(self: PieceSink, data: Any) -> int:
        flip_bit(other, 8 * (other.stat().st_size - 1))
        return real(self, data)

    monkeypatch.setattr(PieceSink, "append", append)
    with pytest.raises(InputError, match=r"model.safetensors: changed since"):
        compressing(given, kind, tmp_path / NAME, other).run()
    assert not (tmp_path / NAME).exists()


def test_values_that_overflow_when_they_are_rescaled_are_named(tmp_path):
    base = {"w": np.zeros(100, np.float32)}
    model = {"w": np.full(100, 3e38, np.float32)}
    files = [
        save(tmp_path / f"{n}.safetensors", arrays) for n, arrays in (("b", base), ("m", model))
    ]
    asked: dict[str, Any] = {"drop_rate": 0.5, "verbose": False}
    for bits in ("native", 4, 2):
        delta, output = tmp_path / f"{bits}-{NAME}", tmp_path / f"{bits}.safetensors"
        compress(*files, delta, bits=bits, **asked)
        with pytest.raises(NotFiniteError, match=r"^w: .* lower scale"):
            apply_quietly(files[0], delta, output)
        report = apply_quietly(files[0], delta, output, allow_not_finite=True)
        assert any(notice.code == "overflow" for notice in report.warnings)


# ---------------------------------------------------------------- what is there already


@pytest.mark.parametrize("link", ["itself", "hard link", "link"])
@pytest.mark.parametrize("victim", ["base", "model", "delta"])
def test_an_input_is_never_replaced(given, kind, tmp_path, victim, link):
    files = {"base": given.base, "model": given.model, "delta": given.deltas[kind]}
    inputs = {name: tmp_path / f"{name}.safetensors" for name in files}
    for name, file in files.items():
        shutil.copy(file, inputs[name])
    output = inputs[victim]
    if link != "itself":
        output = tmp_path / "second.delta.safetensors"
        (os.link if link == "hard link" else os.symlink)(inputs[victim], output)
    if victim != "delta":
        with pytest.raises(OutputError):
            compress_quietly(inputs["base"], inputs["model"], output, kind, overwrite=True)
    if victim != "model":
        with pytest.raises(OutputError):
            apply_quietly(inputs["base"], inputs["delta"], output, overwrite=True)
    assert all(sha256(inputs[name]) == sha256(file) for name, file in files.items())


# ---------------------------------------------------------------- the same bytes


def test_a_delta_file_is_one_file(given, kind, tmp_path):
    for name in ("delta", "delta.gguf", "delta.safetensors.index.json"):
        with pytest.raises(OutputError, match="a delta file is one file"):
            compress_quietly(given.base, given.model, tmp_path / name, kind)
    assert listing(tmp_path) == []


@pytest.mark.parametrize("settings", [{"threads": 1}, {"threads": 2}, {"max_memory": "100MB"}])
def test_the_bytes_do_not_depend_on_threads_or_memory(given, kind, tmp_path, settings):
    compress_quietly(given.base, given.model, tmp_path / NAME, kind, **settings)
    assert sha256(tmp_path / NAME) == sha256(given.deltas[kind])
