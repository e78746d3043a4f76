from __future__ import annotations

import json
import os
import pickle
import re
import sys
import zipfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ranges import PLACES, Ranged

from dare.errors import HeaderError, InputError
from dare.inputs.opening import FORMS
from dare.inputs.sources import Opening, check_unchanged
from dare.inputs.torch_bin import TorchSource
from helpers import read_tensor

torch = pytest.importorskip("torch")

SINGLE_NAME, INDEX_NAME = "pytorch_model.bin", "pytorch_model.bin.index.json"


def save(path, value):
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(value, path)
    return path


def raw_bytes(tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def contents(path) -> dict[str, bytes]:
    with TorchSource(path) as source:
        return {name: read_tensor(source, name) for name in source.tensors}


W = torch.arange(12, dtype=torch.float32).reshape(3, 4)

# ---------------------------------------------------------------- tensors

TYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "C64": torch.complex64,
}


@pytest.mark.parametrize("name", TYPES)
def test_every_type_is_read(tmp_path, name):
    tensor = torch.arange(1, 7).to(TYPES[name]).reshape(2, 3)
    path = save(tmp_path / "m.pt", {"t": tensor})
    info = TorchSource(path).tensors["t"]
    assert (info.dtype.name, info.shape) == (name, (2, 3))
    assert contents(path) == {"t": raw_bytes(tensor)}


UNUSUAL = {
    "tied": W,
    "scalar": torch.tensor(3.5),
    "empty": torch.empty(0, 4),
    "empty inside": torch.empty(3, 0, 2).transpose(0, 2),
    "transposed": W.t(),
    "permuted": torch.arange(24.0).reshape(2, 3, 4).permute(2, 0, 1),
    "every other column": W[:, ::2],
    "a row of another": W[1],
    "a column of another": W[:, 2],
    "expanded": torch.tensor([[1.0], [2.0]]).expand(2, 5),
    "windows": torch.arange(6.0).unfold(0, 3, 1),
    "one row, odd stride": torch.as_strided(torch.arange(9.0), (1, 3), (7, 1)),
    "parameter": torch.nn.Parameter(W.double()),
    "channels last": torch.arange(24.0).reshape(1, 2, 3, 4).to(memory_format=torch.channels_last),
}


def test_unusual_tensors_are_read_in_their_own_order(tmp_path):
    path = save(tmp_path / "m.pt", UNUSUAL)
    assert {n: i.shape for n, i in TorchSource(path).tensors.items()} == {
        name: tuple(tensor.shape) for name, tensor in UNUSUAL.items()
    }
    assert contents(path) == {name: raw_bytes(tensor) for name, tensor in UNUSUAL.items()}


@pytest.fixture(scope="module")
def ranged(tmp_path_factory):
    path = save(tmp_path_factory.mktemp("ranged") / "m.pt", UNUSUAL)
    with TorchSource(path) as source:
        yield Ranged(source, {name: raw_bytes(tensor) for name, tensor in UNUSUAL.items()})


@given(st.sampled_from(sorted(UNUSUAL)), PLACES, PLACES)
def test_any_range_is_the_same_part_of_the_whole(ranged, name, one, other):
    ranged.check(name, one, other)


def test_a_large_transposed_tensor_is_gathered_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr("dare.inputs.torch_bin.PIECE_ELEMENTS", 1000)
    tensor = torch.arange(3500.0).reshape(50, 70).t()
    assert contents(save(tmp_path / "m.pt", {"t": tensor})) == {"t": raw_bytes(tensor)}


# ---------------------------------------------------------------- state dicts


@pytest.mark.parametrize("key", ["state_dict", "model", "model_state_dict", "module"])
def test_weights_may_be_nested_as_training_programs_do(tmp_path, key):
    path = save(tmp_path / "m.pth", {"epoch": 3, key: {"w": W}, "lr": torch.ones(1)})
    assert contents(path) == {"w": raw_bytes(W)}
    assert TorchSource(path).left_out == ("epoch", "lr")


def test_what_is_no_tensor_is_reported(tmp_path):
    path = save(tmp_path / "m.pt", {"w": W, "step": 5, 7: W, "config": {"a": "b"}})
    source = TorchSource(path)
    assert list(source.tensors) == ["w"]
    assert source.left_out == ("step", "7", "config")
    (remark,) = source.remarks
    assert remark.code == "not_weights"
    assert remark.text.endswith("step, 7, config")
    assert TorchSource(save(tmp_path / "n.pt", {"w": W})).remarks == ()


@pytest.mark.parametrize("value", [{}, {"step": 3}, {"state_dict": {}}, [W]])
def test_a_file_without_tensors_is_refused(tmp_path, value):
    with pytest.raises(InputError, match=r"m.pt: .*tensors"):
        TorchSource(save(tmp_path / "m.pt", value))


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.ones(3, dtype=torch.complex128), r"t is torch.ComplexDouble.*; give a plain tensor"),
        (torch.eye(2).to_sparse(), r"t is sparse_tensor.*; give a plain tensor"),
        (torch.ones(2, dtype=torch.complex64).conj(), r"t is complex64.*; give a plain tensor"),
    ],
)
def test_a_tensor_that_is_not_plain_is_refused(tmp_path, tensor, message):
    with pytest.raises(InputError, match=message):
        TorchSource(save(tmp_path / "m.pt", {"t": tensor}))


# ---------------------------------------------------------------- directories


def save_shards(folder):
    save(folder / "a.bin", {"v": W, "w": W + 1})
    save(folder / "b.bin", {"x": W + 2})
    write_index(folder, {"v": "a.bin", "w": "a.bin", "x": "b.bin"})
    return folder


def write_index(folder, weight_map):
    (folder / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))


def test_a_directory_is_a_source(tmp_path):
    path = save(tmp_path / SINGLE_NAME, {"w": W})
    assert TorchSource(tmp_path).files.keys() == {path}
    assert contents(tmp_path) == {"w": raw_bytes(W)}
    save_shards(tmp_path)
    assert list(TorchSource(tmp_path).files) == [tmp_path / "a.bin", tmp_path / "b.bin"]
    expected = {"v": raw_bytes(W), "w": raw_bytes(W + 1), "x": raw_bytes(W + 2)}
    assert contents(tmp_path) == expected


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({"v": "a.bin", "x": "b.bin"}, r"a.bin also holds w"),
        ({"v": "a.bin", "w": "../a.bin"}, r"w is in '../a.bin'"),
    ],
)
def test_an_index_that_does_not_fit_is_refused(tmp_path, weight_map, message):
    write_index(save_shards(tmp_path), weight_map)
    with pytest.raises(HeaderError, match=message):
        TorchSource(tmp_path)


def test_what_looks_like_a_file_of_torch(tmp_path):
    is_pickle = FORMS["torch_bin"]
    for name in ("m.bin", "m.pt", "m.pth", "m.ckpt"):
        assert is_pickle(Opening(tmp_path / name))
    assert not is_pickle(Opening(tmp_path / "m.safetensors"))
    assert not is_pickle(Opening(tmp_path))
    (tmp_path / SINGLE_NAME).touch()
    assert is_pickle(Opening(tmp_path))
    (tmp_path / SINGLE_NAME).rename(tmp_path / INDEX_NAME)
    assert is_pickle(Opening(tmp_path))
    (tmp_path / "model.safetensors").touch()
    assert not is_pickle(Opening(tmp_path))


# ---------------------------------------------------------------- files


def bytes_read() -> int:
    """What this process has read from files so far."""
    (line,) = re.findall(r"rchar: (\d+)", Path("/proc/self/io").read_text())
    return int(line)


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="needs Linux")
def test_opening_reads_no_weights(tmp_path):
    path = save(tmp_path / "m.pt", {"w": torch.zeros(1 << 23)})
    TorchSource(path)  # imports what it needs
    before = bytes_read()
    source = TorchSource(path)
    assert bytes_read() - before < 200_000
    with source:
        assert read_tensor(source, "w") == bytes(1 << 25)
    assert bytes_read() - before > 1 << 25


def test_a_source_knows_its_file_and_notices_changes(tmp_path):
    path = save(tmp_path / "m.pt", {"w": W})
    source = TorchSource(path)
    assert not source.is_partial
    assert not source.delta_of("w").is_change
    with source:
        check_unchanged([source])
        os.truncate(path, source.tensors["w"].start + 47)
        with pytest.raises(InputError, match=r"m.pt: ends inside w; the file was cut"):
            read_tensor(source, "w")
        with pytest.raises(InputError, match=r"m.pt: changed since the merge was planned"):
            check_unchanged([source])


def test_no_torch_is_needed(tmp_path, monkeypatch):
    path = save(tmp_path / "m.pt", {"w": W})
    monkeypatch.setitem(sys.modules, "torch", None)
    assert contents(path) == {"w": raw_bytes(W)}


class Tagged(torch.Tensor):
    """A kind of tensor that only its program knows."""


def test_tensors_that_hold_more_are_read_as_tensors(tmp_path):
    noted, parameter = W + 1, torch.nn.Parameter(W + 2)
    noted.note = parameter.note = "of the training program"
    path = save(tmp_path / "m.pt", {"noted": noted, "parameter": parameter})
    assert contents(path) == {"noted": raw_bytes(W + 1), "parameter": raw_bytes(W + 2)}
    with pytest.raises(InputError, match=r"more than weights \(.*Tagged"):
        TorchSource(save(tmp_path / "n.pt", {"w": W.as_subclass(Tagged)}))


@pytest.mark.parametrize("value", [{1, 2}, bytearray(b"ab"), 1j, b"ab", W.shape, W.dtype, W.device])
def test_plain_values_beside_weights_are_left_out(tmp_path, value):
    source = TorchSource(save(tmp_path / "m.pt", {"w": W, "other": value}))
    assert (list(source.tensors), source.left_out) == (["w"], ("other",))


# ---------------------------------------------------------------- hostile files


class Malice:
    """Runs a command when it is unpickled."""

    def __init__(self, command):
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


def test_a_malicious_pickle_is_refused_and_not_run(tmp_path):
    target = tmp_path / "ran"
    value = {"w": W, "x": Malice(f"touch {target}")}
    path = save(tmp_path / "m.pt", value)
    with pytest.raises(
        InputError, match=r"refused, because it contains more than weights \(posix.sys"
    ):
        TorchSource(path)
    assert not target.exists()
    torch.load(path, weights_only=False)
    assert target.exists()  # it would have run


@pytest.mark.parametrize(
    "program",
    [
        # The name that makes tensors becomes another one, by a state that is set on it.
        b"ctorch._utils\n_rebuild_tensor_v2\n(N}U\x04nameU\x05otherstb.",
        b"ctorch._utils\n_rebuild_tensor_v2\n(U\x04nametb.",
        b"ccollections\nOrderedDict\n(N}U\x05clearNstb.",
        b"ctorch._utils\n_rebuild_tensor_v2\n)\x81.",  # an object of it as if it were a class
        b"ctorch._utils\n_rebuild_tensor_v2\n)R.",  # a tensor of nothing
        b"\x82\x01.",  # a name by its number
    ],
)
def test_a_pickle_cannot_change_what_reads_it(tmp_path, program):
    path = save(tmp_path / "m.pt", {"w": W})
    expected = contents(path)
    other = save(tmp_path / "n.pt", {"w": W})
    rewrite(other, lambda name, data: program if name.endswith("data.pkl") else data)
    with pytest.raises(InputError, match=r"n\.pt: its pickle is damaged"):
        TorchSource(other)
    assert contents(path) == expected


TWICE = b"2\x86"  # a tuple of what is there, twice


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (b"}" + b")" + TWICE * 60 + b"K\x01s.", "expands to more than"),
        (b"}" + b")" + b"\x85" * 1_000_000 + b"K\x01s.", "expands to more than"),
        (b"})r\xff\xff\xff\x7f.", "is damaged"),  # a place that needs much memory
        (b"\x80\x05\x96" + b"\xff" * 7 + b"\x00.", "is damaged"),
    ],
)
def test_a_pickle_that_would_take_all_time_or_memory_is_refused(tmp_path, program, message):
    path = save(tmp_path / "m.pt", {"w": W})
    rewrite(path, lambda name, data: program if name.endswith("data.pkl") else data)
    with pytest.raises(InputError, match=rf"m\.pt: its .*{message}"):
        TorchSource(path)


@pytest.mark.parametrize("number", [-1, 1 << 70])
def test_impossible_shapes_are_refused(tmp_path, number):
    path = save(tmp_path / "m.pt", {"w": W})
    digits = b"I%d\n" % number
    rewrite(path, lambda _, data: data.replace(b"K\x04K\x01\x86", digits + b"K\x01\x86"))
    with pytest.raises(InputError, match=r"m\.pt: its pickle is damaged"):
        TorchSource(path)


def rewrite(path, change, compression=zipfile.ZIP_STORED):
    """Write an archive again with some of its records changed."""
    with zipfile.ZipFile(path) as archive:
        records = {info.filename: archive.read(info) for info in archive.infolist()}
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, data in records.items():
            archive.writestr(name, change(name, data))
    return path


def test_a_big_endian_file_is_refused(tmp_path):
    path = save(tmp_path / "m.pt", {"w": W})
    rewrite(path, lambda name, data: b"big" if name.endswith("byteorder") else data)
    with pytest.raises(InputError, match=r"written on a big-endian machine"):
        TorchSource(path)


def test_compressed_records_are_refused(tmp_path):
    path = rewrite(save(tmp_path / "m.pt", {"w": W}), lambda _, d: d, zipfile.ZIP_DEFLATED)
    with pytest.raises(HeaderError, match=r"has compressed records, which torch.save does not"):
        TorchSource(path)


@pytest.mark.parametrize(
    ("record", "change"),
    [
        ("data/0", lambda data: data[:44]),
        # The shape (3, 4) becomes (3, 200): K is a number of one byte in a pickle.
        (".pkl", lambda data: data.replace(b"K\x03K\x04\x86", b"K\x03K\xc8\x86")),
    ],
)
def test_a_tensor_beyond_its_storage_is_refused(tmp_path, record, change):
    path = save(tmp_path / "m.pt", {"w": W})
    rewrite(path, lambda name, data: change(data) if name.endswith(record) else data)
    with pytest.raises(HeaderError, match=r"m.pt: w reaches beyond its record"):
        TorchSource(path)


@pytest.mark.parametrize(("field", "value"), [(42, 0xFFFFFF00), (24, 0xFFFFFF00), (42, 3000)])
def test_a_record_beyond_the_end_of_the_file_is_refused(tmp_path, field, value):
    # In the central directory, the record's place and its size.
    path = save(tmp_path / "m.pt", {"w": W})
    data = bytearray(path.read_bytes())
    place = data.index(b"PK\x01\x02") + field
    data[place : place + 4] = value.to_bytes(4, "little")
    path.write_bytes(data)
    with pytest.raises(InputError, match=r"m.pt: (not a file of torch.save|its pickle is larger)"):
        TorchSource(path)


def test_the_old_format_is_refused_with_what_to_do(tmp_path):
    path = tmp_path / "m.bin"
    torch.save({"w": W}, path, _use_new_zipfile_serialization=False)
    with pytest.raises(InputError, match=r"format of torch before 1.6; .* save it again"):
        TorchSource(path)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", r"not a file of torch.save \(a zip archive\), or it is truncated"),
        (b"nonsense", r"not a file of torch.save"),
        (b"PK\x05\x06" + bytes(18), r"its pickle is damaged, or not one that torch.save wr"),
        (b"version https://git-lfs.github.com/spec/v1\n", r"a Git LFS pointer"),
        (pickle.dumps({"w": 1}), r"format of torch before 1.6"),
    ],
)
def test_another_file_is_refused(tmp_path, data, message):
    path = tmp_path / "m.bin"
    path.write_bytes(data)
    with pytest.raises(InputError, match=message):
        TorchSource(path)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_a_program_is_refused(tmp_path):
    torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), tmp_path / "m.pt")
    with pytest.raises(InputError, match=r"is a TorchScript program; save its state_dict"):
        TorchSource(tmp_path / "m.pt")


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return save(tmp_path_factory.mktemp("small") / "m.pt", {"w": W, "n": W.int()}).read_bytes()


@given(st.data())
def test_a_cut_or_damaged_file_is_refused_or_harmless(small, tmp_path_factory, data):
    damaged = bytearray(small[: data.draw(st.integers(0, len(small)) | st.just(len(small)))])
    for place in data.draw(st.lists(st.integers(0, len(small) - 1), max_size=3)):
        if place < len(damaged):
            damaged[place] ^= data.draw(st.integers(1, 255))
    path = tmp_path_factory.mktemp("damaged") / "m.pt"
    path.write_bytes(damaged)
    try:
        found = contents(path)
    except InputError:
        return
    assert all(len(raw) <= len(small) for raw in found.values())


def test_an_archive_that_says_it_is_encrypted_is_refused(tmp_path):
    path = save(tmp_path / "m.pt", {"w": W})
    content = bytearray(path.read_bytes())
    for mark, place in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):  # flags of a file, and of the list
        at = content.find(mark)
        while at >= 0:
            content[at + place] |= 1
            at = content.find(mark, at + 1)
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"m\.pt: "):
        TorchSource(path)


def test_a_record_that_cannot_be_unpacked_is_refused(tmp_path):
    path = rewrite(save(tmp_path / "m.pt", {"w": W}), lambda _, d: d, zipfile.ZIP_DEFLATED)
    with zipfile.ZipFile(path) as archive:
        order = next(info for info in archive.infolist() if info.filename.endswith("byteorder"))
    content = bytearray(path.read_bytes())
    begin = order.header_offset + 30 + len(order.filename)
    content[begin : begin + 4] = b"\xff" * 4
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"m\.pt: "):
        TorchSource(path)
