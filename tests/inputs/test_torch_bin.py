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

from dare.errors import InputError
from dare.inputs.opening import FORMS
from dare.inputs.sources import Opening
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
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16},
    **{"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2},
    **{"F8_E8M0": torch.float8_e8m0fnu, "BOOL": torch.bool, "C64": torch.complex64},
    **{"U8": torch.uint8, "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64},
    **{"I8": torch.int8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64},
}


def test_every_type_is_read(tmp_path):
    tensors = {name: torch.arange(1, 7).to(kind).reshape(2, 3) for name, kind in TYPES.items()}
    path = save(tmp_path / "m.pt", tensors)
    found = {name: (i.dtype.name, i.shape) for name, i in TorchSource(path).tensors.items()}
    assert found == {name: (name, (2, 3)) for name in TYPES}
    assert contents(path) == {name: raw_bytes(tensor) for name, tensor in tensors.items()}


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


@pytest.fixture(scope="module")
def ranged(tmp_path_factory):
    path = save(tmp_path_factory.mktemp("ranged") / "m.pt", UNUSUAL)
    with TorchSource(path) as source:
        yield Ranged(source, {name: raw_bytes(tensor) for name, tensor in UNUSUAL.items()})


def test_unusual_tensors_are_read_in_their_own_order(ranged):
    for name, tensor in UNUSUAL.items():
        assert ranged.source.tensors[name].shape == tuple(tensor.shape)
        ranged.check(name, 0, tensor.numel())


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
    others = {"step": 5, 7: W, "config": {"a": "b"}, "set": {1, 2}, "array": bytearray(b"ab")}
    others |= {"complex": 1j, "bytes": b"ab", "shape": W.shape, "dtype": W.dtype, "d": W.device}
    source = TorchSource(save(tmp_path / "m.pt", {"w": W, **others}))
    assert list(source.tensors) == ["w"]
    assert source.left_out == tuple(map(str, others))
    (remark,) = source.remarks
    assert remark.code == "not_weights"
    assert "step, 7, config" in remark.text
    assert TorchSource(save(tmp_path / "n.pt", {"w": W})).remarks == ()


class Tagged(torch.Tensor):
    """A kind of tensor that only its program knows."""


def test_tensors_that_hold_more_are_read_as_tensors(tmp_path):
    noted, parameter = W + 1, torch.nn.Parameter(W + 2)
    noted.note = parameter.note = "of the training program"
    path = save(tmp_path / "m.pt", {"noted": noted, "parameter": parameter})
    assert contents(path) == {"noted": raw_bytes(W + 1), "parameter": raw_bytes(W + 2)}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        *((value, r"m.pt: .*tensors") for value in ({}, {"step": 3}, {"state_dict": {}}, [W])),
        ({"t": torch.ones(3, dtype=torch.complex128)}, "t is torch.ComplexDouble.*plain tensor"),
        ({"t": torch.eye(2).to_sparse()}, "t is sparse_tensor.*; give a plain tensor"),
        ({"t": torch.ones(2, dtype=torch.complex64).conj()}, "t is complex64.*; give a plain"),
        ({"t": W.as_subclass(Tagged)}, r"more than weights \(.*Tagged"),
    ],
)
def test_what_is_no_dict_of_plain_tensors_is_refused(tmp_path, value, message):
    with pytest.raises(InputError, match=message):
        TorchSource(save(tmp_path / "m.pt", value))


# ---------------------------------------------------------------- directories and files


def test_a_directory_is_a_source(tmp_path):
    path = save(tmp_path / SINGLE_NAME, {"w": W})
    assert TorchSource(tmp_path).files.keys() == {path}
    assert contents(tmp_path) == {"w": raw_bytes(W)}
    save(tmp_path / "a.bin", {"v": W, "w": W + 1})
    save(tmp_path / "b.bin", {"x": W + 2})
    places = {"v": "a.bin", "w": "a.bin", "x": "b.bin"}
    (tmp_path / INDEX_NAME).write_text(json.dumps({"weight_map": places}))
    assert list(TorchSource(tmp_path).files) == [tmp_path / "a.bin", tmp_path / "b.bin"]
    expected = {"v": raw_bytes(W), "w": raw_bytes(W + 1), "x": raw_bytes(W + 2)}
    assert contents(tmp_path) == expected
    del places["w"]
    (tmp_path / INDEX_NAME).write_text(json.dumps({"weight_map": places}))
    with pytest.raises(InputError, match=r"a.bin also holds w"):
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


def test_no_torch_is_needed(tmp_path, monkeypatch):
    path = save(tmp_path / "m.pt", {"w": W})
    monkeypatch.setitem(sys.modules, "torch", None)
    assert contents(path) == {"w": raw_bytes(W)}


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


def rewrite(path, change, compression=zipfile.ZIP_STORED):
    """Write an archive again with some of its records changed."""
    with zipfile.ZipFile(path) as archive:
        records = {info.filename: archive.read(info) for info in archive.infolist()}
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, data in records.items():
            archive.writestr(name, change(name, data))


TWICE = b"2\x86"  # a tuple of what is there, twice


@pytest.mark.parametrize(
    ("program", "message"),
    [
        # The name that makes tensors becomes another one, by a state that is set on it.
        (b"ctorch._utils\n_rebuild_tensor_v2\n(N}U\x04nameU\x05otherstb.", "is damaged"),
        (b"ctorch._utils\n_rebuild_tensor_v2\n(U\x04nametb.", "is damaged"),
        (b"ccollections\nOrderedDict\n(N}U\x05clearNstb.", "is damaged"),
        # An object of it as if it were a class; a tensor of nothing; a name by its number.
        (b"ctorch._utils\n_rebuild_tensor_v2\n)\x81.", "is damaged"),
        (b"ctorch._utils\n_rebuild_tensor_v2\n)R.", "is damaged"),
        (b"\x82\x01.", "is damaged"),
        (b"}" + b")" + TWICE * 60 + b"K\x01s.", "expands to more than"),
        (b"}" + b")" + b"\x85" * 1_000_000 + b"K\x01s.", "expands to more than"),
        (b"})r\xff\xff\xff\x7f.", "is damaged"),  # a place that needs much memory
        (b"\x80\x05\x96" + b"\xff" * 7 + b"\x00.", "is damaged"),
    ],
)
def test_a_pickle_cannot_change_what_reads_it_nor_take_all_time_or_memory(
    tmp_path, program, message
):
    path = save(tmp_path / "m.pt", {"w": W})
    expected = contents(path)
    other = save(tmp_path / "n.pt", {"w": W})
    rewrite(other, lambda name, data: program if name.endswith("data.pkl") else data)
    with pytest.raises(InputError, match=rf"n\.pt: its pickle {message}"):
        TorchSource(other)
    assert contents(path) == expected


def in_record(ending, change):
    """Change the content of a record."""
    return lambda path: rewrite(path, lambda n, data: change(data) if n.endswith(ending) else data)


def in_pickle(before, after):
    return in_record(".pkl", lambda data: data.replace(before, after))


def in_directory(field, value):
    """Change a number in the central directory: a record's place, or its size."""

    def change(path):
        data = bytearray(path.read_bytes())
        place = data.index(b"PK\x01\x02") + field
        data[place : place + 4] = value.to_bytes(4, "little")
        path.write_bytes(data)

    return change


def encrypt(path):
    """Set the flags of all records, and of the list, that say so."""
    content = bytearray(path.read_bytes())
    for mark, place in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        for found in list(re.finditer(re.escape(mark), content)):
            content[found.start() + place] |= 1
    path.write_bytes(content)


def compress(path):
    rewrite(path, lambda _, data: data, zipfile.ZIP_DEFLATED)


def damage_compressed(path):
    compress(path)
    with zipfile.ZipFile(path) as archive:
        order = next(info for info in archive.infolist() if info.filename.endswith("byteorder"))
    content = bytearray(path.read_bytes())
    begin = order.header_offset + 30 + len(order.filename)
    content[begin : begin + 4] = b"\xff" * 4
    path.write_bytes(content)


def save_in_old_format(path):
    torch.save({"w": W}, path, _use_new_zipfile_serialization=False)


def save_program(path):
    torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), path)


OTHER = "not a file of torch.save"
SHAPE = b"K\x03K\x04\x86"  # (3, 4): K is a number of one byte in a pickle
DAMAGES = {
    "negative stride": (in_pickle(b"K\x04K\x01\x86", b"I-1\nK\x01\x86"), "its pickle is damaged"),
    "huge stride": (
        in_pickle(b"K\x04K\x01\x86", b"I%d\nK\x01\x86" % (1 << 70)),
        "its pickle is damaged",
    ),
    "big-endian": (in_record("byteorder", lambda _: b"big"), "on a big-endian machine; save it"),
    "compressed": (compress, "compressed records, which torch.save does not"),
    "cannot be unpacked": (damage_compressed, OTHER),
    "encrypted": (encrypt, OTHER),
    "cut storage": (in_record("data/0", lambda data: data[:44]), "w reaches beyond its record"),
    "large shape": (in_pickle(SHAPE, b"K\x03K\xc8\x86"), "w reaches beyond its record"),
    "place beyond the end": (in_directory(42, 0xFFFFFF00), OTHER),
    "size beyond the end": (in_directory(24, 0xFFFFFF00), OTHER),
    "another place": (in_directory(42, 3000), OTHER),
    "old format": (save_in_old_format, "torch before 1.6; .* save it again"),
    "program": (save_program, "is a TorchScript program; save its state_dict"),
    "empty": (lambda path: path.write_bytes(b""), r"\(a zip archive\), or it is truncated"),
    "nonsense": (lambda path: path.write_bytes(b"nonsense"), OTHER),
    "empty archive": (
        lambda path: path.write_bytes(b"PK\x05\x06" + bytes(18)),
        "its pickle is damaged, or not one that torch.save wr",
    ),
    "another pickle": (lambda path: path.write_bytes(pickle.dumps({"w": 1})), "torch before 1.6"),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_or_other_file_is_refused(tmp_path, damage):
    change, message = DAMAGES[damage]
    path = save(tmp_path / "m.pt", {"w": W})
    change(path)
    with pytest.raises(InputError, match=rf"m\.pt: .*{message}"):
        TorchSource(path)
