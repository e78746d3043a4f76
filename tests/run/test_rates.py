from __future__ import annotations

import json
import os
import platform

import numpy as np
import pytest

from dare.inputs.sources import ArraySource
from dare.output.targets import default_scratch
from dare.planning.make import make_plan
from dare.planning.plan import Estimate, Plan, estimate, keep_rate
from dare.recipe.recipe import Request
from dare.stages import STAGES
from dare.tensors import files
from dare.tensors.dtypes import STORAGE_TYPES
from helpers import method_of

LARGE = (4096, 4096)
"""2**26 bytes as F32."""


def plan_of(shape=LARGE, models=2, kind="F32", **settings) -> Plan:
    """A plan for one tensor, whose bytes nobody reads."""
    names = [f"m{number}" for number in range(models)]
    asked = Request.of(**{"base": "base", "models": names, "threads": 1, **settings})
    source = ArraySource({"w": (STORAGE_TYPES[kind], shape, np.empty(0, np.uint8))})
    return make_plan(asked.recipe, source, [source] * models, names, options=asked.options)


@pytest.fixture(autouse=True)
def file(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "dare" / "rates.json"


@pytest.mark.parametrize(
    ("settings", "work", "rate"),
    [
        ({"method": "sum"}, 4 * 2**26, 3e8),  # base, two models, output
        ({"method": "sum", "kind": "BF16"}, 4 * 2**25, 3e8),
        ({"method": "sum", "kind": "I64"}, 4 * 2**27, 1e9),
        ({"method": "sum", "backend": "reference"}, 4 * 2**26, 1e7),
        ({"method": "slerp"}, 7 * 2**26, 1.5e8),  # the inputs twice
        ({"method": "tsv"}, 4 * 7 * 2**26, 3e7),  # and matrices of four times the side
        ({"method": "tsv+svc"}, 4 * 10 * 2**26, 3e7),
        ({"method": "tsv", "shape": (2**24,)}, 4 * 2**26, 3e8),  # a vector is averaged
    ],
)
def test_the_range_by_hand(settings, work, rate):
    found = estimate(plan_of(**settings))
    assert found.low == pytest.approx(0.5 * (0.8 + work / rate))
    assert found.high == pytest.approx(2 * (0.8 + work / rate))
    assert not found.is_measured


def test_what_a_merge_took_is_expected_of_the_next(file):
    keep_rate(plan_of(method="sum", threads=2), 10.0)
    assert json.loads(file.read_bytes()) == {f"{platform.node()} cpu sum": 4 * 2**26 / 20}
    found = estimate(plan_of(method="sum"))
    assert (found.low, found.high) == pytest.approx((0.6 * 20.8, 1.8 * 20.8))
    assert found.is_measured
    keep_rate(plan_of(method="sum"), 5.0)
    assert estimate(plan_of(method="sum")).high == pytest.approx(1.8 * 5.8)
    for other in ({"method": "dare+linear"}, {"kind": "I64"}, {"backend": "reference"}):
        assert not estimate(plan_of(**{"method": "sum", **other})).is_measured


@pytest.mark.parametrize("method", [name for name, stage in STAGES.items() if stage.models != 0])
def test_the_ends_are_at_most_four_times_apart(method):
    chain = method_of(method)
    for shape in ((), (0, 4), (8,), (64, 32), LARGE):
        made = plan_of(shape, STAGES[method].models or 2, method=chain, max_memory="64GB")
        keep_rate(made, 3.0)
        found = estimate(made)
        assert 0 < found.low < found.high <= 4 * found.low
    assert found.is_measured


def test_a_small_merge_says_nothing_of_the_rate(file):
    keep_rate(plan_of((64, 32)), 3.0)
    assert not file.exists()


@pytest.mark.parametrize(
    "spoilt", [b"", b"{", b"[1]", b"\xff", b"[" * 100_000, 0.0, -1.0, float("nan"), "fast", None]
)
def test_a_damaged_file_is_ignored_and_replaced(file, spoilt):
    made = plan_of()
    usual = estimate(made)
    keep_rate(made, 10.0)
    if not isinstance(spoilt, bytes):
        spoilt = json.dumps(dict.fromkeys(json.loads(file.read_bytes()), spoilt)).encode()
    file.write_bytes(spoilt)
    assert estimate(made) == usual
    keep_rate(made, 10.0)
    assert estimate(made).is_measured
    assert [path.name for path in file.parent.iterdir()] == ["rates.json"]
    if os.name != "nt":
        file.chmod(0o666)  # somebody else may have written it
        assert estimate(made) == usual


def test_a_folder_that_cannot_be_written_is_no_error(file):
    file.parent.write_text("a file where the folder should be")
    keep_rate(plan_of(), 10.0)
    assert not estimate(plan_of()).is_measured


def test_rates_do_not_pile_up(file, monkeypatch):
    monkeypatch.setattr("dare.planning.plan.RATES_KEPT", 2)
    for method in ("sum", "linear", "ties", "linear"):
        keep_rate(plan_of(method=method), 10.0)
    assert [key.split()[-1] for key in json.loads(file.read_bytes())] == ["ties", "linear"]


@pytest.mark.parametrize(
    ("low", "high", "text"),
    [
        (0.0096, 0.12, "less than a second"),
        (0.52, 1.731, "about 0.52 to 1.7 s"),
        (90, 400, "about 1.5 to 6.7 min"),
        (123456, 1234567, "about 34 to 340 h"),
    ],
)
def test_the_range_is_told_with_two_digits(low, high, text):
    assert str(Estimate(low, high, is_measured=True)).startswith(text)


@pytest.mark.parametrize(
    ("platform", "expected"),
    [("linux", ".cache/dare"), ("darwin", "Library/Caches/dare"), ("win32", "local/dare")],
)
@pytest.mark.parametrize("given", [None, "", "not/absolute"])  # such are to be ignored
def test_where_rates_and_uploads_are_kept(platform, expected, given, tmp_path, monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME")
    if given is not None:
        monkeypatch.setenv("XDG_CACHE_HOME", given)
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path / "local"))
    monkeypatch.setattr("sys.platform", platform)
    monkeypatch.setattr("pathlib.Path.home", lambda: tmp_path)
    assert files.cache_folder() == tmp_path / expected
    assert default_scratch() == tmp_path / expected / "uploads"
