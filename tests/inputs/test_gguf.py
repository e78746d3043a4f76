from __future__ import annotations

import os
import re
import struct
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ranges import PLACES, Ranged
from writers import write_gguf

from dare.errors import HeaderError, InputError, install_command
from dare.inputs.gguf import GgufSource
from dare.inputs.opening import FORMS
from dare.inputs.sources import Opening
from helpers import read_elements, read_tensor

gguf = pytest.importorskip("gguf")
quants = gguf.quants
Kind = gguf.GGMLQuantizationType

AS_STORED = {
    Kind.F64: ("F64", np.float64),
    Kind.F32: ("F32", np.float32),
    Kind.F16: ("F16", np.float16),
    Kind.BF16: ("BF16", np.uint16),
    Kind.I8: ("I8", np.int8),
    Kind.I16: ("I16", np.int16),
    Kind.I32: ("I32", np.int32),
    Kind.I64: ("I64", np.int64),
}
QUANTISED = sorted(set(quants._type_traits) - set(AS_STORED))
WITHOUT_DEQUANTISER = (Kind.Q8_1, Kind.Q8_K)


def random_blocks(kind, rows=3, blocks=2, seed=0) -> np.ndarray:
    """Blocks of any bytes, so with infinities and NaN among their scales."""
    nbytes = blocks * gguf.GGML_QUANT_SIZES[kind][1]
    return np.random.default_rng(seed).integers(0, 256, (rows, nbytes), np.uint8)


def dequantised(raw, kind) -> np.ndarray:
    """What the gguf package makes of a whole tensor, with the one NaN that we promise."""
    with np.errstate(all="ignore"):
        values = quants.dequantize(raw, kind)
    return np.where(np.isnan(values), np.float32(np.nan), values)


def contents(path) -> dict[str, bytes]:
    with GgufSource(path) as source:
        return {name: read_tensor(source, name) for name in source.tensors}


# ---------------------------------------------------------------- types


@pytest.mark.parametrize("kind", AS_STORED, ids=lambda kind: kind.name)
def test_what_is_not_quantised_is_presented_as_it_is_stored(tmp_path, kind):
    name, dtype = AS_STORED[kind]
    array = np.random.default_rng(0).integers(0, 256, 24 * 8, np.uint8).view(dtype)[:24]
    raw = array.reshape(4, 6).view(np.uint8) if kind == Kind.BF16 else array.reshape(4, 6)
    tensor = (raw, kind) if kind == Kind.BF16 else raw
    path = write_gguf(tmp_path / "m.gguf", {"t": tensor})
    info = GgufSource(path).tensors["t"]
    assert (info.dtype.name, info.shape) == (name, (4, 6))
    assert contents(path) == {"t": array.tobytes()}


@pytest.mark.parametrize("kind", QUANTISED, ids=lambda kind: kind.name)
def test_every_quantised_type_is_what_the_gguf_package_makes_of_it(tmp_path, kind):
    raw = random_blocks(kind)
    path = write_gguf(tmp_path / "m.gguf", {"t": (raw, kind)})
    info = GgufSource(path).tensors["t"]
    assert (info.dtype.name, info.shape) == ("F32", (3, 2 * gguf.GGML_QUANT_SIZES[kind][0]))
    assert contents(path) == {"t": dequantised(raw, kind).tobytes()}


def test_values_computed_by_hand(tmp_path):
    # Q8_0 is a half and 32 bytes: half × byte. Q4_1 is two halves and 32 nibbles, the lower ones
    # first: first half × nibble + second half.
    eight = np.frombuffer(np.float16(0.5).tobytes() + bytes([3, 0xFD] * 16), np.uint8)
    halves = np.array([0.25, -1], np.float16).tobytes()
    four = np.frombuffer(halves + bytes([0x4F] * 16), np.uint8)
    path = write_gguf(
        tmp_path / "m.gguf",
        {"eight": (eight.reshape(1, -1), Kind.Q8_0), "four": (four.reshape(1, -1), Kind.Q4_1)},
    )
    assert contents(path) == {
        "eight": np.array([1.5, -1.5] * 16, np.float32).tobytes(),
        "four": np.array([2.75] * 16 + [0.0] * 16, np.float32).tobytes(),
    }


@pytest.mark.parametrize("kind", WITHOUT_DEQUANTISER, ids=lambda kind: kind.name)
def test_a_type_that_cannot_be_dequantised_is_refused(tmp_path, kind):
    path = write_gguf(tmp_path / "m.gguf", {"t": (random_blocks(kind), kind)})
    with pytest.raises(InputError, match=rf"m.gguf: t is of type {kind.name}, .*F32, .*IQ4_XS"):
        GgufSource(path)


# ---------------------------------------------------------------- ranges

SHAPES = {
    "blk.0.attn_q.weight": (Kind.Q8_0, 8, 3),  # rows are interleaved
    "blk.0.attn_k.weight": (Kind.Q4_K, 8, 1),
    "blk.0.ffn_up.weight": (Kind.Q4_1, 5, 3),
    "blk.0.attn_norm.weight": (Kind.F32, 1, 32),
}
HEADS = {"llama.attention.head_count": 2}


@pytest.fixture(scope="module")
def ranged(tmp_path_factory):
    tensors = {
        name: (random_blocks(kind, rows, blocks), kind)
        for name, (kind, rows, blocks) in SHAPES.items()
    }
    path = tmp_path_factory.mktemp("ranged") / "m.gguf"
    with GgufSource(write_gguf(path, tensors, "llama", HEADS)) as source:
        yield Ranged(source, {name: read_tensor(source, name) for name in source.tensors})


@given(st.integers(0, 3), PLACES, PLACES)
def test_any_range_is_the_same_part_of_the_whole(ranged, which, one, other):
    ranged.check(list(ranged.wholes)[which], one, other)


def test_a_tensor_of_many_pieces_is_the_same_in_chunks_and_from_many_threads(tmp_path):
    raw = random_blocks(Kind.Q8_0, rows=64, blocks=96)  # 196,608 elements
    path = write_gguf(tmp_path / "m.gguf", {"t": (raw, Kind.Q8_0)})
    expected = dequantised(raw, Kind.Q8_0).tobytes()
    elements = 64 * 96 * 32
    with GgufSource(path) as source, ThreadPoolExecutor(4) as pool:

        def read(begin):
            return read_elements(source, "t", begin, min(30_011, elements - begin)).tobytes()

        assert b"".join(pool.map(read, range(0, elements, 30_011))) == expected


# ---------------------------------------------------------------- names, rows and norms


def test_interleaved_rows_by_hand(tmp_path):
    # One head of six rows: GGUF has the first of each half, the second of each half, …
    rows = np.arange(12, dtype=np.float32).reshape(6, 2)
    stored = rows[[0, 3, 1, 4, 2, 5]]
    heads = {"llama.attention.head_count": 1}
    path = write_gguf(tmp_path / "m.gguf", {"blk.0.attn_q.weight": stored}, "llama", heads)
    assert contents(path) == {"model.layers.0.self_attn.q_proj.weight": rows.tobytes()}


NORM = "model.layers.0.post_attention_layernorm.weight"
EXPERTS, QUERY = "blk.0.ffn_gate_chexps.weight", "blk.0.attn_q.weight"


@pytest.mark.parametrize(
    ("architecture", "names", "kept", "code", "said"),
    [
        (
            "rwkv9",
            ["blk.0.attn_q.weight"],
            ["blk.0.attn_q.weight"],
            "unknown_architecture",
            "rwkv9",
        ),
        (
            *("llama", [EXPERTS, "blk.0.ffn_norm.weight", "odd"], [EXPERTS, NORM, "odd"]),
            *("unknown_names", f"{EXPERTS} and 1 more"),
        ),
        (
            *("llama", ["rope_freqs.weight", "output.weight"], ["lm_head.weight"]),
            *("not_weights", "rope_freqs.weight"),
        ),
    ],
)
def test_names_that_are_not_known_are_kept_or_left_out_and_reported(
    tmp_path, architecture, names, kept, code, said
):
    path = write_gguf(
        tmp_path / "m.gguf", dict.fromkeys(names, np.ones(4, np.float32)), architecture
    )
    source = GgufSource(path)
    assert list(source.tensors) == kept
    (remark,) = source.remarks
    assert (remark.code, said in remark.text) == (code, True)


def test_two_tensors_of_one_name_are_refused(tmp_path):
    tensors = {"output.weight": np.ones(4), "lm_head.weight": np.ones(4)}
    # The second is not known to the family, so it keeps a name that the first is given.
    with pytest.raises(HeaderError, match=r"lm_head.weight occurs twice, .* as lm_head"):
        GgufSource(write_gguf(tmp_path / "m.gguf", tensors, "llama"))


@pytest.mark.parametrize(
    ("heads", "shape", "message"),
    [
        *((heads, (8, 4), "head_count is") for heads in (None, 0, "four", [4, 4])),
        *((2, shape, "rows, not 2 heads") for shape in ((6, 4), ())),
    ],
)
def test_rows_are_ordered_by_heads_that_fit_alone(tmp_path, heads, shape, message):
    metadata = {} if heads is None else {"llama.attention.head_count": heads}
    path = write_gguf(
        tmp_path / "m.gguf", {"blk.0.attn_q.weight": np.ones(shape)}, "llama", metadata
    )
    with pytest.raises(InputError, match=message):
        GgufSource(path)


# ---------------------------------------------------------------- files


def test_a_model_in_parts_is_one_source(tmp_path):
    tensors = {name: np.full(8, number, np.float32) for number, name in enumerate("abc")}
    write_gguf(tmp_path / "m.gguf", tensors, split_max_tensors=1)
    parts = tuple(sorted(tmp_path.glob("*.gguf")))
    assert [part.name for part in parts][2] == "m-00003-of-00003.gguf"
    for part in parts:
        assert GgufSource(part).files.keys() == set(parts)
        assert contents(part) == {name: array.tobytes() for name, array in tensors.items()}


def test_a_missing_part_and_parts_in_the_wrong_order_are_refused(tmp_path):
    write_gguf(tmp_path / "m.gguf", {"a": np.ones(8), "b": np.ones(8)}, split_max_tensors=1)
    first, second = tmp_path / "m-00001-of-00002.gguf", tmp_path / "m-00002-of-00002.gguf"
    second.rename(tmp_path / "aside")
    with pytest.raises(InputError, match=r"m-00002-of-00002.gguf: no such file"):
        GgufSource(first)
    first.rename(second)
    (tmp_path / "aside").rename(first)
    with pytest.raises(HeaderError, match=r"by its name it is part 1 of 2, but .*split.no = 1"):
        GgufSource(first)


def test_an_adapter_is_refused(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", {"a": np.ones(8)}, "llama", {"general.type": "adapter"})
    with pytest.raises(InputError, match=r"is a LoRA adapter in GGUF; give it as PEFT"):
        GgufSource(path)


def test_what_looks_like_gguf(tmp_path):
    path = write_gguf(tmp_path / "m.bin", {"a": np.ones(8)})
    assert FORMS["gguf"](Opening(path))
    assert FORMS["gguf"](Opening(tmp_path / "not-there.gguf"))
    (tmp_path / "other.bin").write_bytes(b"PK")
    os.mkfifo(tmp_path / "pipe")
    for other in ("other.bin", "not-there", "", "a\0", "a" * 5000, "pipe"):
        assert not FORMS["gguf"](Opening(tmp_path / other))


def test_without_the_package_the_error_says_what_to_install(tmp_path, monkeypatch):
    path = write_gguf(tmp_path / "m.gguf", {"a": np.ones(8)})
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(InputError, match=re.escape(install_command("gguf"))):
        GgufSource(path)


# ---------------------------------------------------------------- hostile headers


def text(value: str | bytes, length: int | None = None) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw) if length is None else length) + raw


def tensor(name="t", dims=(4,), kind=0, offset=0, dimensions=None) -> bytes:
    count = len(dims) if dimensions is None else dimensions
    numbers = struct.pack(f"<I{len(dims)}QIQ", count, *dims, kind, offset)
    return text(name) + numbers


def pair(key: str, kind: int, raw: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + raw


def header(tensors=(), pairs=(), version=3, counts=None) -> bytes:
    tensor_count, pair_count = counts or (len(tensors), len(pairs))
    start = b"GGUF" + struct.pack("<IQQ", version, tensor_count, pair_count)
    return start + b"".join(pairs) + b"".join(tensors)


def file_of(head: bytes, data: bytes = bytes(64)) -> bytes:
    return head + bytes(-len(head) % 32) + data


VALID = file_of(header([tensor(), tensor("u", offset=32)], [pair("k", 8, text("v"))]))
HUGE = 1 << 62


def array(kind: int, count: int, raw: bytes = b"") -> bytes:
    return struct.pack("<IQ", kind, count) + raw


def stacked(*dims: int) -> bytes:
    named = pair("general.architecture", 8, text("qwen3moe"))
    return header([tensor("blk.0.ffn_up_exps.weight", dims)], [named])


HOSTILE = {
    "empty": (b"", r"begins with only 0 bytes, not b'GGUF'"),
    "another format": (b"PK\3\4" * 10, r"not a GGUF file: it begins with b'PK"),
    "version 1": (header(version=1), r"GGUF version 1; versions 2 and 3 are supported"),
    "big-endian": (header(version=3 << 24), r"big-endian machines; convert it"),
    "many tensors": (file_of(header([tensor()], counts=(HUGE, 0))), r"claims \d+ tensors"),
    "many pairs": (file_of(header(counts=(0, HUGE))), r"claims \d+ keys"),
    "long key": (file_of(header(pairs=[text(b"", HUGE)])), r"truncated or not GGUF"),
    "bad key": (file_of(header(pairs=[text(b"\xff")])), r"key 0 of the metadata is not valid"),
    "bad text": (file_of(header(pairs=[pair("k", 8, text(b"\xff"))])), r"k is not valid UTF-8"),
    "bad name": (file_of(header([text(b"\xff")])), r"the name of tensor 0 is not valid UTF-8"),
    "bad type of value": (file_of(header(pairs=[pair("k", 13, b"")])), r"k is of type 13"),
    "array of arrays": (file_of(header(pairs=[pair("k", 9, array(9, 1))])), r"array of type 9"),
    "long array": (file_of(header(pairs=[pair("k", 9, array(0, HUGE))])), r"claims \d+ items"),
    "array too long": (file_of(header(pairs=[pair("k", 9, array(0, 999))])), r"truncated or not"),
    "pair twice": (file_of(header(pairs=[pair("k", 0, b"1")] * 2)), r"'k' occurs twice in"),
    "tensor twice": (file_of(header([tensor()] * 2)), r"the tensor 't' occurs twice"),
    "dimensions": (file_of(header([tensor(dimensions=5)])), r"t claims 5 dimensions"),
    "huge": (file_of(header([tensor(dims=(HUGE,) * 4)])), r"t ends at byte \d+ of"),
    "offset": (file_of(header([tensor(offset=64)])), r"t ends at byte 144 of"),
    "overlap": (file_of(header([tensor(), tensor("u", offset=8)])), r"u overlaps t"),
    "same place": (file_of(header([tensor(), tensor("u")])), r"(u overlaps t|t overlaps u)"),
    "unknown type": (file_of(header([tensor(kind=999)])), r"type 999; .*Q4_K, .*gguf"),
    "no stack": (file_of(stacked(2, 2)), r"ffn_up_exps.weight is 2×2, not a stack of experts"),
    "many experts": (file_of(stacked(1, 0, HUGE)), r"0×1, not a stack"),
    "broken block": (file_of(header([tensor(kind=8)])), r"rows of 4 elements, and Q8_0 comes in"),
    **{
        f"alignment {number}": (
            file_of(header(pairs=[pair("general.alignment", 4, struct.pack("<I", number))])),
            rf"general.alignment is {number}, not a power of two",
        )
        for number in (0, 24)
    },
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_header_is_refused_at_once(tmp_path, case):
    data, message = HOSTILE[case]
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    begun = time.process_time()
    with pytest.raises(InputError, match=message) as caught:
        GgufSource(path)
    assert time.process_time() - begun < 1
    assert str(path) in str(caught.value)


def test_experts_are_no_more_tensors_than_a_file_may_have(tmp_path, monkeypatch):
    monkeypatch.setattr("dare.inputs.gguf.MAX_TENSORS", 5)
    (tmp_path / "m.gguf").write_bytes(file_of(stacked(1, 1, 6)))
    with pytest.raises(HeaderError, match=r"more than 5 tensors, with blk\.0\.ffn_up_exps"):
        GgufSource(tmp_path / "m.gguf")


def test_a_header_is_believed_no_further_than_its_limit(tmp_path):
    # A sparse file of a terabyte has room for any claim.
    path = tmp_path / "m.gguf"
    path.write_bytes(header(pairs=[pair("k", 8, text(b"", 1 << 39))]))
    os.truncate(path, 1 << 40)
    with pytest.raises(HeaderError, match=r"the header is larger than 67108864 bytes"):
        GgufSource(path)


def test_a_header_at_another_alignment_is_read(tmp_path):
    head = header([tensor()], [pair("general.alignment", 4, struct.pack("<I", 256))])
    path = tmp_path / "m.gguf"
    path.write_bytes(head + bytes(256 - len(head)) + b"abcdefghijklmnop")
    assert contents(path) == {"t": b"abcdefghijklmnop"}


def test_a_file_cut_anywhere_is_refused(tmp_path):
    path = tmp_path / "m.gguf"
    whole = VALID[:-16]  # what follows the last tensor is not needed
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(HeaderError):
            GgufSource(path)
    path.write_bytes(whole)
    assert len(GgufSource(path).tensors) == 2
