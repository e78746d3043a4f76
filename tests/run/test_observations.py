"""Observations in files: what was found comes back as it was, and nothing else is believed."""

import json
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest

from dare import RecipeError
from dare.run.slices import read_observations, write_observations
from helpers import listing


class Counted(NamedTuple):
    numbers: np.ndarray
    total: int


@dataclass(frozen=True)
class Found:
    share: float
    parts: tuple[Any, ...]


def observe():
    """A stage's function, in whose module its classes are."""


OBSERVATIONS = {
    "a": Counted(np.array([1, 2], np.uint16), 7),
    "b": Found(0.5, (None, True, [1, "x"], {"k": np.float32(3), 2: ()})),
    "c": None,
    "d": np.zeros((0, 3), np.int64),
}


def test_what_was_found_comes_back(tmp_path):
    write_observations(tmp_path / "f", "id", observe, OBSERVATIONS)
    found = read_observations(tmp_path / "f", "id", observe)
    assert list(found) == list(OBSERVATIONS)
    assert type(found["a"]) is Counted
    assert found["a"].numbers.tolist() == [1, 2]
    assert found["a"].numbers.dtype == np.uint16
    assert found["a"].total == 7
    assert found["b"] == OBSERVATIONS["b"]
    assert type(found["b"].parts[3]["k"]) is np.float32
    assert found["c"] is None
    assert found["d"].shape == (0, 3)
    assert read_observations(tmp_path / "f", "another", observe) is None
    assert read_observations(tmp_path / "g", "id", observe) is None
    assert listing(tmp_path) == ["f"]


def test_no_changed_or_missing_byte_is_believed(tmp_path):
    write_observations(tmp_path / "f", "id", observe, {"a": OBSERVATIONS["a"]})
    text = (tmp_path / "f").read_bytes()
    for at in range(len(text)):
        for changed in (text[:at] + bytes([text[at] ^ 4]) + text[at + 1 :], text[:at]):
            (tmp_path / "f").write_bytes(changed)
            assert read_observations(tmp_path / "f", "id", observe) is None, at


@pytest.mark.parametrize("value", [object(), np.array([None]), {1, 2}, json.JSONDecoder()])
def test_what_has_no_plain_form_is_refused(tmp_path, value):
    with pytest.raises(RecipeError, match="merge without --slice"):
        write_observations(tmp_path / "f", "id", observe, {"a": [value]})
    assert listing(tmp_path) == []


@pytest.mark.parametrize("name", ["pytest", "RecipeError", "listing", "nobody"])
def test_a_file_cannot_name_code(tmp_path, monkeypatch, name):
    monkeypatch.setattr(
        "dare.run.slices._pack", lambda *_given: {"class": name, "parts": [{"list": []}]}
    )
    write_observations(tmp_path / "f", "id", observe, {"a": 1})
    assert read_observations(tmp_path / "f", "id", observe) is None
