"""Headers made to take memory: read or refused within a bound, in a process of their own."""

import struct
import subprocess
import sys

import pytest

if sys.platform != "linux":
    pytest.skip("the peak is counted in kilobytes on Linux alone", allow_module_level=True)

RUN = """
import resource, sys
from pathlib import Path
from dare.errors import InputError
from dare.inputs.opening import open_model

peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
import dare.inputs.gguf, gguf
before = peak()
try:
    print(len(open_model(Path(sys.argv[1])).tensors), "tensors")
except InputError as error:
    print(error)
print(peak() - before)
"""


def measured(path):
    command = [sys.executable, "-c", RUN, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    said, peak = done.stdout.splitlines()
    return said, int(peak)


def safetensors(path, text):
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    return path


EMPTY = b'{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'
ONES = b",".join([b"1"] * 4_000_000)
FLOODS = {
    "tensors": b",".join(b'"%d":%s' % (number, EMPTY) for number in range(300_001)),
    "notes": b'"__metadata__":{%s}' % b",".join(b'"%d":""' % n for n in range(900_000)),
    "dimensions": b'"w":{"dtype":"U8","shape":[%s],"data_offsets":[0,0]}' % ONES,
}


@pytest.mark.parametrize("flood", FLOODS)
def test_a_header_of_many_things_is_refused_in_bounded_memory(tmp_path, flood):
    path = safetensors(tmp_path / "m.safetensors", b"{%s}" % FLOODS[flood])
    said, peak = measured(path)
    assert "more than 300000 tensors" in said or "is longer than" in said
    assert peak < 9 * path.stat().st_size


def test_a_header_of_as_much_as_is_allowed_takes_little(tmp_path):
    names = (b'"model.layers.0.mlp.experts.%d.weight":%s' % (n, EMPTY) for n in range(50_000))
    path = safetensors(tmp_path / "m.safetensors", b"{%s}" % b",".join(names))
    said, peak = measured(path)
    assert said == "50000 tensors"
    assert peak < 8 * path.stat().st_size


@pytest.mark.parametrize(
    ("counts", "said"), [((1_000_000, 0), "claims 1000000 tensors"), ((0, 1 << 20), "claims")]
)
def test_a_gguf_of_many_things_is_refused_before_they_are_read(tmp_path, counts, said):
    pytest.importorskip("gguf")
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, *counts) + bytes(20 << 20))
    message, peak = measured(path)
    assert said in message
    assert peak < 10 << 20
