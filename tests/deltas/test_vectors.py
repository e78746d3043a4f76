"""The test vectors of docs/delta-files.md: what is written, byte by byte."""

from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.numpy import load_file

import dare
from helpers import save

BASE = np.arange(16, dtype=np.float32) / 8
CHANGE = np.array([(5 * i % 16 - 8) / 64 for i in range(16)], np.float32)


@pytest.mark.parametrize(
    ("asked", "parts"),
    [
        (
            {"drop_rate": 0.5},
            {
                "values:w": "0000903e0000f83e0000243f00004c3f0000c83f0000c23f0000f63f",
                "index": "070000000000000070db25d83eacd20d169d02729aa6d9f7",
            },
        ),
        ({"drop_rate": 0.5, "bits": 2}, {"values:w": "8408", "scales:w": "12bd"}),
    ],
)
def test_parts(tmp_path, asked, parts):
    base = save(tmp_path / "base.safetensors", {"w": BASE})
    model = save(tmp_path / "model.safetensors", {"w": BASE + CHANGE})
    output = tmp_path / "d.delta.safetensors"
    dare.compress(base, model, output, verbose=False, **asked)
    content = output.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    notes = json.loads(header.pop("__metadata__")["dare.delta"])
    found = {
        name: content[8 + length :][slice(*entry["data_offsets"])].hex()
        for name, entry in header.items()
    }
    assert {name: found[name] for name in parts} == parts
    assert set(found) == {*parts, "index"}
    assert notes["version"] == 1
    assert notes["base"] == "921c61c90f8aeac8f0aa1443921318b8"
    assert notes["model"] == "fcb4df45cde6d424860bbab50c9a28cd"
    assert notes["sample"] == "5fda3c1dd55a63dbbc475d2cc079861c"


def test_the_words_of_the_page(tmp_path):
    # δ of the kept places, and the values beside the base's
    kept = np.flatnonzero(dare.keep_mask("w", 16, 0.5, seed=42))
    assert kept.tolist() == [2, 3, 5, 7, 12, 13, 15]
    base = save(tmp_path / "base.safetensors", {"w": BASE})
    model = save(tmp_path / "model.safetensors", {"w": BASE + CHANGE})
    dare.compress(base, model, tmp_path / "d.delta.safetensors", drop_rate=0.5, verbose=False)
    values = load_file(tmp_path / "d.delta.safetensors")["values:w"]
    assert values.tolist() == (BASE + CHANGE)[kept].tolist()
