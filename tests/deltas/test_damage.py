"""A damaged delta file, or one for another base, is refused; it never becomes a model."""

from __future__ import annotations

import json
import random
import re
import shutil
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from safetensors.numpy import load_file
from small_deltas import (
    EMBEDDING,
    HEAD,
    KINDS,
    LAYER,
    NORM,
    POSITIONS,
    Parts,
    apply_quietly,
    changed,
    compress_quietly,
    make_base,
    read_all,
    take_apart,
    tune,
    write_models,
)

import dare
from dare import InputError, MismatchError, OutputError, VerificationError
from dare.deltas.restoring import open_delta
from dare.inputs.delta_files import INDEX, KEY
from dare.inputs.sources import open_source
from dare.tensors.chunks import bytes_digest
from dare.tensors.planes import pack
from helpers import file_bytes, flip_bit, listing, save

NAME = "math.delta.safetensors"


class Made(NamedTuple):
    """A base, a model of it, and delta files of every kind."""

    base: Path
    model: Path
    files: dict[str, Path]


def make(folder: Path, base: dict[str, np.ndarray]) -> Made:
    paths = write_models(folder, base)
    files = {kind: folder / kind / NAME for kind in KINDS}
    for kind, file in files.items():
        compress_quietly(*paths, file, kind)
    return Made(*paths, files)


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Made:
    return make(tmp_path_factory.mktemp("made"), make_base())


@pytest.fixture(params=KINDS)
def kind(request) -> str:
    return request.param


def copy_of(made: Made, kind: str, folder: Path) -> Path:
    return Path(shutil.copy(made.files[kind], folder / NAME))


def check_reported(file: Path, context: object) -> None:
    """`dare verify` finds something wrong, and says with what."""
    try:
        found = dare.verify(file)
    except (InputError, VerificationError) as error:
        text = str(error)
    else:
        assert not found.ok, context
        text = " ".join(map(str, found.problems))
    assert file.name in text, (context, text)


def check_unreadable(base: Path, file: Path, context: object) -> None:
    """What is stored cannot be read, and the error says in what file."""
    with pytest.raises(InputError) as caught:
        read_all(base, file)
    assert file.name in str(caught.value), (context, str(caught.value))


# ---------------------------------------------------------------- bits and lengths


def test_every_flipped_bit_is_noticed(made, kind, tmp_path, attack_size, attack_seed):
    file = copy_of(made, kind, tmp_path)
    step = 4 if attack_size == 1 else 1  # each byte, in four runs of the tests or in one long one
    generator = random.Random(kind)
    content = file.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    padding = range(len(content[:start].rstrip(b" ")) + 1, start - 1)
    for place in range(len(content)):
        if (place in padding and place % 16) or (place + attack_seed) % step:
            continue
        bit = 8 * place + generator.randrange(8)
        flip_bit(file, bit)
        check_reported(file, bit)
        if place % (8 if place >= start else 64) == 0:
            check_unreadable(made.base, file, bit)
        flip_bit(file, bit)
    assert dare.verify(file).ok


def test_a_file_of_another_length_is_noticed(made, kind, tmp_path):
    whole = made.files[kind].read_bytes()
    file = tmp_path / NAME
    for length in {*range(17), *range(17, len(whole), 61), *range(len(whole) - 5, len(whole))}:
        file.write_bytes(whole[:length])
        check_reported(file, length)
        check_unreadable(made.base, file, length)
    for more in (b"\0", whole[-8:], whole):
        file.write_bytes(whole + more)
        check_reported(file, more)
        check_unreadable(made.base, file, more)


def places_of_parts(content: bytes) -> dict[str, int]:
    """Of each stored part one place in the file."""
    place = 8 + int.from_bytes(content[:8], "little")
    found = {"length": 1, "header": place // 2, "padding": place - 1}
    for name, (_, _, data) in take_apart(content)[1].items():
        found[name] = place + len(data) // 2
        place += len(data)
    return found


@pytest.mark.parametrize("output", ["out", "out.safetensors"])
def test_a_damaged_file_becomes_no_model_and_is_not_merged(made, kind, tmp_path, output):
    content = made.files[kind].read_bytes()
    for part, place in places_of_parts(content).items():
        file = copy_of(made, kind, tmp_path)
        flip_bit(file, 8 * place)
        for what, way in ways(made.base, made.model, file, tmp_path / output).items():
            if part.startswith("file:") and (
                output != "out" if part == "file:config.json" else what != "apply"
            ):
                continue  # a configuration is for directories, a header for restoring
            with pytest.raises(InputError, match=NAME):
                way()
            assert not (tmp_path / output).exists(), (part, what)
            shutil.rmtree(tmp_path / f"{output}.partial", ignore_errors=True)
            assert listing(tmp_path) == [NAME], (part, what)


def test_shards_that_say_they_are_a_delta_file_are_refused(made, tmp_path):
    for number in range(2):
        shutil.copy(made.files["native"], tmp_path / f"{number}.safetensors")
    places = {f"{number}.x": f"{number}.safetensors" for number in range(2)}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    with pytest.raises(InputError, match=tmp_path.name):
        open_delta(tmp_path)


# ---------------------------------------------------------------- notes that lie

Change = Callable[[dict[str, Any], Parts], object]


def note(**values: Any) -> Change:
    return lambda notes, _: notes.update(values)


def of_tensor(name: str, **values: Any) -> Change:
    return lambda notes, _: notes["tensors"][name].update(values)


def of_file(old: str, new: str, **values: Any) -> Change:
    def change(notes: dict[str, Any], parts: Parts) -> None:
        notes["files"][new] = {**notes["files"].pop(old), **values}
        if (part := parts.pop(f"file:{old}", None)) is not None:
            parts[f"file:{new}"] = part

    return change


def count(row: int, number: int) -> Change:
    """Another number of values for a chunk; rows are in the order of names."""

    def change(_: dict[str, Any], parts: Parts) -> None:
        kind, shape, data = parts[INDEX]
        rows = np.frombuffer(data, np.int64).reshape(shape).copy()
        rows[row, 0] = number
        parts[INDEX] = (kind, shape, rows.tobytes())

    return change


def index_as(dtype: str, *shape: int) -> Change:
    return lambda _, parts: parts.update({INDEX: (dtype, shape, parts[INDEX][2])})


def without_part(name: str) -> Change:
    return lambda _, parts: parts.pop(name)


def with_part(name: str) -> Change:
    return lambda _, parts: parts.update({name: ("U8", (3,), b"abc")})


def without_note(name: str) -> Change:
    return lambda notes, _: notes.pop(name)


def together(*changes: Change) -> Change:
    return lambda notes, parts: [change(notes, parts) for change in changes]


LOSSY = ("native", "two bits", "four bits")
CODED = ("lossless",)
ALL = tuple(KINDS)
CONFIG = "config.json"
LIES: dict[str, tuple[tuple[str, ...], Change]] = {
    "version 2": (ALL, note(version=2)),
    "no version": (ALL, without_note("version")),
    "mask 2": (LOSSY, note(mask=2)),
    "no mask": (LOSSY, without_note("mask")),
    "a mask": (CODED, note(mask=1)),
    "no seed": (LOSSY, without_note("seed")),
    "seed -1": (LOSSY, note(seed=-1)),
    "bits 3": (ALL, note(bits=3)),
    "other bits": (LOSSY, note(bits=8)),
    "another scheme": (LOSSY, note(scheme="lossless")),
    "lossless, and none": (CODED, note(scheme="random")),
    "no scheme": (ALL, note(scheme="none")),
    "the largest": (ALL, note(scheme="magnitude")),
    "drop rate 2": (LOSSY, note(drop_rate=2)),
    "drop rate NaN": (LOSSY, note(drop_rate=float("nan"))),
    "no drop rate": (LOSSY, without_note("drop_rate")),
    "a tensor's drop rate NaN": (LOSSY, of_tensor(LAYER, drop_rate=float("nan"))),
    "a tensor without a drop rate": (LOSSY, of_tensor(LAYER, drop_rate=None)),
    "another drop rate": (LOSSY, of_tensor(LAYER, drop_rate=0.25)),
    "another seed": (LOSSY, note(seed=7)),
    "an unknown key": (ALL, note(more=1)),
    "no tensors": (ALL, note(tensors=[])),
    "fewer tensors": (ALL, lambda notes, _: notes["tensors"].pop(NORM)),
    "a digest that is none": (ALL, note(model="x" * 32)),
    "a long seed": (CODED, note(seed=10**30)),
    # what is told of tensors
    "another shape": (ALL, of_tensor(LAYER, shape=[9, 12])),
    "a huge shape": (ALL, of_tensor(LAYER, shape=[1 << 40])),
    "a negative shape": (ALL, of_tensor(LAYER, shape=[-12, -9])),
    "another type": (("native", "lossless"), of_tensor(LAYER, dtype="F32")),
    "another type of integers": (ALL, of_tensor(POSITIONS, dtype="F64")),
    "no such type": (ALL, of_tensor(LAYER, dtype="F17")),
    "no base": (LOSSY, of_tensor(LAYER, base=None)),
    "as in a base that is none": (CODED, of_tensor(NORM, base=None)),
    "coded against nothing": (CODED, of_tensor(LAYER, base=None)),
    "a base name that is not there": (ALL, of_tensor(LAYER, base_name="nowhere")),
    "a base name of another": (ALL, of_tensor(LAYER, base_name=EMBEDDING)),
    "tied to itself": (ALL, of_tensor(EMBEDDING, tied_to=EMBEDDING)),
    "tied in a circle": (
        ALL,
        together(of_tensor(EMBEDDING, tied_to=HEAD), of_tensor(HEAD, tied_to=EMBEDDING)),
    ),
    "tied to nothing": (ALL, of_tensor(HEAD, tied_to="nowhere")),
    "tied to no name": (
        ALL,
        lambda notes, _: notes["tensors"].update({"": {**notes["tensors"][HEAD], "tied_to": ""}}),
    ),
    "tied to another shape": (ALL, of_tensor(HEAD, tied_to=LAYER)),
    "tied, and larger": (LOSSY, of_tensor(HEAD, shape=[1 << 40])),
    # what is stored
    "fewer values": (ALL, count(-3, 1)),
    "one value too many": (LOSSY, count(-3, 109)),
    "as many as there can be": (ALL, count(-3, (1 << 63) - 1)),
    "-2 values": (ALL, count(-3, -2)),
    "values of integers": (LOSSY, count(-1, 0)),
    "the base's, and stored": (ALL, count(-3, -1)),
    "no index": (ALL, without_part(INDEX)),
    "an index of another shape": (ALL, index_as("I64", 12)),
    "an index of another type": (ALL, index_as("U64", 4, 3)),
    "a part too many": (ALL, with_part("values:nothing")),
    "a part of another kind": (LOSSY, with_part(f"coded:{LAYER}")),
    "a nameless part": (ALL, with_part("")),
    "no values": (LOSSY, without_part(f"values:{LAYER}")),
    "no scales": (("two bits", "four bits"), without_part(f"scales:{LAYER}")),
    "no code": (CODED, without_part(f"coded:{LAYER}")),
    "no configuration": (ALL, without_part(f"file:{CONFIG}")),
    # other files
    **{
        f"a file called {name[:20]!r}": (ALL, of_file(CONFIG, name))
        for name in (
            *("../x", "/etc/x", "a\\b", "", ".", "..", "./x", "x/", "a//b", "a/../b", "/", "x\0y"),
            *("x" * 256, "x\ny", f"{CONFIG}/x/..", "generation_config.json/x"),
        )
    },
    "a huge file": (ALL, of_file(CONFIG, CONFIG, size=1 << 40)),
    "another size of a file": (ALL, of_file(CONFIG, CONFIG, size=3)),
    "many files": (
        ALL,
        lambda notes, _: notes["files"].update(
            {
                f"{n}": {**notes["files"][CONFIG], "kind": "base", "size": 256 << 19}
                for n in range(20)
            }
        ),
    ),
    "another kind of file": (ALL, of_file(CONFIG, CONFIG, kind="base")),
    "no kind of file": (ALL, of_file(CONFIG, CONFIG, kind="link")),
}


@pytest.mark.parametrize("lie", LIES)
def test_notes_that_lie_are_refused_at_once(made, tmp_path, lie):
    kinds, change = LIES[lie]
    file = tmp_path / NAME
    for kind in kinds:
        file.write_bytes(changed(made.files[kind].read_bytes(), change))
        before = time.process_time()
        tracemalloc.start()
        check_unreadable(made.base, file, (lie, kind))
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 8_000_000, (lie, kind)
        assert time.process_time() - before < 0.5, (lie, kind)


@pytest.mark.parametrize(
    "notes", ["", "[]", "null", "7", "{}", "[" * 100_000, '{"version": NaN}', '"x"', "\ud800", "}"]
)
def test_notes_that_are_none_are_refused(made, tmp_path, notes):
    file = tmp_path / NAME
    file.write_bytes(file_bytes({"__metadata__": {KEY: notes}}))
    check_unreadable(made.base, file, notes)
    check_reported(file, notes)


def test_what_is_put_together_as_it_was_is_read(made, kind, tmp_path):
    """Or else the tests above might be about something else."""
    file = tmp_path / NAME
    file.write_bytes(changed(made.files[kind].read_bytes(), lambda *_: None))
    assert read_all(made.base, file) == read_all(made.base, made.files[kind])
    assert dare.verify(file).ok


def with_file(name: str, content: bytes) -> Change:
    """Another content of a file, with digests that fit."""

    def change(notes: dict[str, Any], parts: Parts) -> None:
        blob = pack(np.frombuffer(content, np.uint8), None, 1)
        parts[f"file:{name}"] = ("U8", (len(blob),), blob)
        notes["files"][name].update(size=len(content), digest=bytes_digest(content))

    return change


def headers_that_lie(whole: bytes) -> dict[str, bytes]:
    """Headers for a model's file that are not what its tensors are."""
    header = json.loads(whole[8:])
    said = header[LAYER]
    end = max(entry["data_offsets"][1] for entry in header.values())
    others = {
        "another name": {**{n: e for n, e in header.items() if n != LAYER}, "x": said},
        "one less": {name: entry for name, entry in header.items() if name != LAYER},
        "one more": {**header, "x": {"dtype": "U8", "shape": [0], "data_offsets": [end, end]}},
        "another type": {**header, LAYER: {**said, "dtype": "BF16"}},
        "another shape": {**header, LAYER: {**said, "shape": said["shape"][::-1]}},
        "ends of text": {**header, LAYER: {**said, "data_offsets": ["x", "y"]}},
        "ends that are none": {**header, LAYER: {**said, "data_offsets": [0, None]}},
        "ends beyond all": {**header, LAYER: {**said, "data_offsets": [0, float("inf")]}},
        "ends far away": {**header, LAYER: {**said, "data_offsets": [1 << 62, 1 << 63]}},
        "a list": [header],
        "nothing": {},
        "too deep": b"[" * 100_000,
        "a name twice": json.dumps(header).encode()[:-1] + b"," + json.dumps(header).encode()[1:],
    }
    return {what: file_bytes(other) for what, other in others.items()} | {
        "no bytes": b"",
        "four bytes": whole[:4],
        "cut": whole[:-9],
        "longer than it is": (len(whole) + 1).to_bytes(8, "little") + whole[8:],
        "shorter than it is": (len(whole) - 20).to_bytes(8, "little") + whole[8:],
    }


# What we write ourselves is not taken from a file, and weights lie in the model's folder.
NAMES_OF_OTHERS = [
    ("config.json", "dare-manifest.json"),
    ("config.json", "dare-partial.txt"),
    ("config.json", "journal.jsonl"),
    ("model.safetensors", "dare-manifest.json"),
    ("model.safetensors", "deep/model.safetensors"),
]


def test_headers_and_names_of_the_models_files_that_lie_are_refused(made, tmp_path):
    content = made.files["lossless"].read_bytes()
    whole = open_delta(made.files["lossless"]).read_file("model.safetensors")
    lies: dict[object, tuple[Change, str]] = {
        what: (with_file("model.safetensors", header), r"model\.safetensors|headers")
        for what, header in headers_that_lie(whole).items()
    }
    lies |= {names: (of_file(*names), NAME) for names in NAMES_OF_OTHERS}
    file = tmp_path / NAME
    for what, (change, words) in lies.items():
        file.write_bytes(changed(content, change))
        with pytest.raises(InputError, match=NAME) as caught:
            apply_quietly(made.base, file, tmp_path / "out")
        assert re.search(words, str(caught.value)), what
        assert listing(tmp_path) == [NAME], what


def test_a_file_that_cannot_be_stored_is_named_when_it_is_compressed(tmp_path):
    base, model = write_models(tmp_path, make_base())
    (model / "a\\b.model").write_text("")
    with pytest.raises(InputError, match=r"b\.model.*rename the file"):
        compress_quietly(base, model, tmp_path / NAME, "native")
    assert listing(tmp_path) == ["base", "model"]


def test_more_than_a_header_can_hold_is_not_written(made, kind, tmp_path, monkeypatch):
    header = open_source(made.files[kind]).headers[made.files[kind]]
    most = len(json.dumps(header.metadata))
    monkeypatch.setattr("dare.deltas.compressing.MAX_METADATA", most - 1)
    with pytest.raises(MismatchError, match=rf"{NAME}: .*tensors \(5\); split the model"):
        compress_quietly(made.base, made.model, tmp_path / NAME, kind)
    assert listing(tmp_path) == []
    monkeypatch.setattr("dare.deltas.compressing.MAX_METADATA", most)
    compress_quietly(made.base, made.model, tmp_path / NAME, kind)


# ---------------------------------------------------------------- another base

FAR = 2500
"""Elements of a tensor of which the sample sees the middle alone."""


@pytest.fixture(scope="module")
def wide(tmp_path_factory) -> Made:
    """Models with a tensor of which the first element is in no sample."""
    base = make_base(rows=FAR // 9)
    base[NORM] = np.linspace(-1, 1, FAR, dtype=np.float32)
    base[POSITIONS] = np.arange(FAR)
    return make(tmp_path_factory.mktemp("wide"), base)


def other_base(made: Made, folder: Path, change: Callable[[dict[str, np.ndarray]], object]) -> Path:
    arrays = load_file(made.base / "model.safetensors")
    change(arrays)
    other = Path(shutil.copytree(made.base, folder / "other"))
    save(other / "model.safetensors", arrays)
    return other


def ways(base: Path, model: Path, file: Path, output: Path) -> dict[str, Callable[[], object]]:
    """All that can be made of a delta file."""
    given: dict[str, Any] = {"base": base, "output": output, "verbose": False, "threads": 1}
    given["on_integer_mismatch"] = "base"  # which says nothing of a delta file
    return {
        "apply": lambda: apply_quietly(base, file, output),
        "merge": lambda: dare.merge(dare.Request.of(models=[model, file], method="ties", **given)),
        "average": lambda: dare.merge(dare.Request.of(models=[file], method="linear", **given)),
    }


@pytest.mark.parametrize("is_there", [False, True])
def test_another_file_of_the_base_is_noticed(wide, kind, tmp_path, is_there):
    other = other_base(wide, tmp_path, lambda _: None)
    (other / "generation_config.json").unlink()
    if is_there:
        (other / "generation_config.json").write_text('{"changed": 1}')
    with pytest.raises(InputError, match=r"generation_config.json"):
        apply_quietly(other, wide.files[kind], tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", [LAYER, NORM, POSITIONS])
def test_one_other_element_of_the_base_is_noticed_at_the_end(wide, kind, tmp_path, name):
    def change(arrays: dict[str, np.ndarray]) -> None:
        arrays[name] = arrays[name].copy()
        arrays[name].reshape(-1)[0] += 1

    other = other_base(wide, tmp_path, change)
    for what, way in ways(other, wide.model, wide.files[kind], tmp_path / "out").items():
        with pytest.raises((InputError, VerificationError), match=NAME) as caught:
            way()
        assert name in str(caught.value), what
        assert "base" in str(caught.value), what
        assert not (tmp_path / "out").exists(), what
        assert not (tmp_path / "out" / "model.safetensors").exists(), what


@pytest.mark.parametrize(
    "change",
    [
        lambda arrays: arrays.update(tune(arrays)),
        lambda arrays: arrays.pop(LAYER),
        lambda arrays: arrays.update({LAYER: arrays[LAYER].reshape(9, -1)}),
        lambda arrays: arrays.update({POSITIONS: arrays[POSITIONS].view(np.uint64)}),
        lambda arrays: arrays.update({NORM: arrays[NORM][:-1]}),
        lambda arrays: arrays.update({"more": np.ones(3, np.float32)}),
    ],
    ids=["other values", "missing", "another shape", "another type", "shorter", "one more"],
)
def test_another_base_is_refused_before_anything_is_written(wide, kind, tmp_path, change):
    other = other_base(wide, tmp_path, change)
    for way in ways(other, wide.model, wide.files[kind], tmp_path / "out").values():
        with pytest.raises(InputError, match=rf"{NAME}: was made for another base"):
            way()
        assert listing(tmp_path) == ["other"]


def test_a_delta_file_is_no_base_and_no_model_by_itself(made, kind, tmp_path):
    file = made.files[kind]
    for call in (
        lambda: apply_quietly(file, file, tmp_path / "out"),
        lambda: compress_quietly(made.base, file, tmp_path / "x.safetensors", kind),
        lambda: compress_quietly(file, made.model, tmp_path / "x.safetensors", kind),
        lambda: apply_quietly(made.base, made.model, tmp_path / "out"),
        lambda: dare.merge(dare.Recipe(base=file, models=[made.model], output=tmp_path / "out")),
    ):
        with pytest.raises((InputError, OutputError)):
            call()
    assert listing(tmp_path) == []
