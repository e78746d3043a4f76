from __future__ import annotations

import json
from dataclasses import replace
from itertools import count, pairwise

import numpy as np
import pytest

from dare.inputs.sources import ArraySource
from dare.kernels import kept
from dare.planning.make import make_plan
from dare.planning.plan import Plan
from dare.recipe.schema import Recipe
from dare.run import calibration, rates
from dare.run.calibration import Disk, Speed, measure_disk, measure_speed
from dare.run.rates import Estimate, estimate, predict
from dare.stages import STAGES
from dare.tensors.dtypes import STORAGE_TYPES

DISK = Disk("somewhere", 1e9, 5e8)
SPEED = Speed(1024, 0.01, 1.0, 1.0, 0.5)
MATRICES = Speed(512, 0.1, 1.75, 0.75, 0.5)


def source_of(shape, kind="F32", *, deltas=False) -> ArraySource:
    """A tensor whose bytes nobody reads."""
    nothing = np.empty(0, np.uint8)
    return ArraySource({"w": (STORAGE_TYPES[kind], shape, nothing)}, holds_deltas=deltas)


def plan_of(shape=(64, 32), models=2, kind="F32", **settings) -> Plan:
    names = [f"m{number}" for number in range(models)]
    recipe = Recipe(**{"base": "base", "models": names, "threads": 1, **settings})
    sources = [source_of(shape, kind)] * models
    return make_plan(recipe, sources[0], sources, names, backend="reference")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("os.getloadavg", lambda: (0.0, 0.0, 0.0))
    return tmp_path / "dare"


@pytest.fixture
def measured(monkeypatch):
    """Counts measurements, and makes none."""
    calls = []
    monkeypatch.setattr(rates, "measure_disk", lambda: calls.append("disk") or DISK)
    monkeypatch.setattr(rates, "measure_speed", lambda *_: calls.append("speed") or SPEED)
    return calls


# ---------------------------------------------------------------- the range


def test_the_range_by_hand():
    # Four times the measured matrix, 16 MiB each to write and twice to read.
    made = plan_of((2048, 2048), models=1, method="sum")
    written, read = 2**24 / 1e9, 2 * 2**24 / 5e8
    found = predict(made, SPEED, DISK)
    assert found.low == pytest.approx(0.5 + 4 * 0.01)
    assert found.high == pytest.approx(5 * 0.5 + 1.5 * 4 * 0.01 + read + written)


def test_writing_bounds_the_range_from_below():
    made = plan_of((2048, 2048), models=1)
    slow = replace(DISK, written_bytes_per_second=2**20)
    assert predict(made, SPEED, slow).low == pytest.approx(0.5 + 16)


def test_two_threads_share_the_work_and_are_not_trusted_to_halve_it():
    one, two = (plan_of((4096, 4096), threads=threads) for threads in (1, 2))
    alone, shared = predict(one, SPEED, DISK), predict(two, SPEED, DISK)
    assert shared.low - 0.5 == pytest.approx((alone.low - 0.5) / 2)
    assert alone.high / 2 < shared.high < alone.high


@pytest.mark.parametrize("speed", [SPEED, MATRICES])
def test_a_larger_model_takes_longer(speed):
    shapes = [(0, 4), (), (8,), (64, 8), (64, 64), (512, 512), (600, 4000), (4096, 4096)]
    found = [predict(plan_of(shape), speed, DISK) for shape in shapes]
    assert all(a.low <= b.low and a.high <= b.high for a, b in pairwise(found))
    assert all(0 < each.low < each.high for each in found)


def test_a_tensor_that_fewer_models_have_takes_less():
    made = plan_of((4096, 4096), models=3)
    (tensor,) = made.tensors
    fewer = replace(made, tensors=(replace(tensor, models=(0,)),))
    assert predict(fewer, SPEED, DISK).low - 0.5 == pytest.approx(
        (predict(made, SPEED, DISK).low - 0.5) / 2
    )


def test_whole_matrices_grow_faster_than_their_elements():
    small, large = (predict(plan_of((side, side)), MATRICES, DISK) for side in (512, 1024))
    assert small.low - 0.5 == pytest.approx(0.1)
    assert large.low - 0.5 == pytest.approx(0.1 * 2**2.5)
    long = predict(plan_of((512, 8192)), MATRICES, DISK)
    assert long.low - 0.5 == pytest.approx(0.1 * 16**0.75)
    assert long.high > long.low + 1.5 * 0.1 * 16 ** (0.75 + 0.3)


def test_other_busy_processes_raise_the_upper_end_only():
    made = plan_of((4096, 4096), threads=1)
    idle, crowded = (predict(made, SPEED, DISK, load) for load in (0.0, 64.0))
    assert crowded.low == idle.low
    assert crowded.high > idle.high


def test_a_survey_that_cannot_remember_is_reckoned_with():
    few, many = (
        predict(plan_of((4096, 4096), method="trim+sum", max_memory=size), SPEED, DISK)
        for size in ("100MB", "1GB")
    )
    assert few.low == many.low
    assert few.high > many.high


@pytest.mark.parametrize(
    ("low", "high", "text"),
    [
        (0.0096, 0.12, "less than a second on this machine"),
        (0.52, 1.731, "about 0.52 to 1.7 s on this machine"),
        (4, 9, "about 4 to 9 s on this machine"),
        (61, 119, "about 61 to 120 s on this machine"),
        (90, 400, "about 1.5 to 6.7 min on this machine"),
        (3000, 36000, "about 0.83 to 10 h on this machine"),
        (123456, 1234567, "about 34 to 340 h on this machine"),
    ],
)
def test_the_range_is_told_with_two_digits(low, high, text):
    assert str(Estimate(low, high, SPEED, DISK)) == text


def test_what_is_only_copied_takes_no_computing():
    found = estimate(plan_of(kind="I64"))
    assert found is not None
    assert found.speed is None


# ---------------------------------------------------------------- keeping


def test_what_is_measured_is_kept(measured, cache):
    first = estimate(plan_of())
    assert first == predict(plan_of(), SPEED, DISK)
    assert measured == ["disk", "speed"]
    assert estimate(plan_of()) == first
    assert estimate(plan_of((1024, 512), seed=7), measure=False) is not None
    assert measured == ["disk", "speed"]
    assert [path.name for path in cache.iterdir()] == ["rates.json"]


@pytest.mark.parametrize(
    "other",
    [
        {"method": "dare+ties"},
        {"stages": {"dare": {"drop_rate": 0.5}}},
        {"models": 3},
        {"kind": "F16"},
        {"dtype": "F16"},
    ],
)
def test_what_would_take_another_time_is_measured_anew(measured, other):
    estimate(plan_of())
    estimate(plan_of(**other))
    assert measured == ["disk", "speed", "speed"]


def test_nothing_is_measured_unless_asked(measured, cache):
    assert estimate(plan_of(), measure=False) is None
    assert measured == []
    assert not cache.exists()


@pytest.mark.parametrize(
    "spoilt", [b"", b"{", b"[1]", b"\xff", b"[" * 100_000, "every rate", {"side": "x"}]
)
def test_spoilt_rates_are_ignored(measured, cache, spoilt):
    estimate(plan_of())
    file = cache / "rates.json"
    if isinstance(spoilt, bytes):
        file.write_bytes(spoilt)
    else:
        file.write_text(json.dumps(dict.fromkeys(json.loads(file.read_bytes()), spoilt)))
    assert estimate(plan_of(), measure=False) is None
    assert estimate(plan_of()) == predict(plan_of(), SPEED, DISK)
    assert measured == ["disk", "speed"] * 2


def test_a_rate_of_zero_or_nan_is_spoilt(measured, cache):
    estimate(plan_of())
    file = cache / "rates.json"
    good = file.read_text()
    for bad in ("0.0", "NaN", "-1", "Infinity", '"fast"'):
        file.write_text(good.replace("1000000000.0", bad))
        assert estimate(plan_of(), measure=False) is None


def test_a_folder_that_cannot_be_written_is_no_error(measured, cache):
    cache.write_text("a file where the folder should be")
    assert estimate(plan_of()) == predict(plan_of(), SPEED, DISK)
    assert estimate(plan_of(), measure=False) is None


def test_rates_do_not_pile_up(measured, cache, monkeypatch):
    monkeypatch.setattr(rates, "RATES_KEPT", 2)
    for models in (1, 2, 3):
        estimate(plan_of(models=models))
    assert len(json.loads((cache / "rates.json").read_bytes())) == 2
    assert estimate(plan_of(models=3), measure=False) is not None


@pytest.mark.parametrize(
    ("platform", "variables", "expected"),
    [
        ("linux", {}, "HOME/.cache/dare"),
        ("darwin", {}, "HOME/Library/Caches/dare"),
        ("win32", {"LOCALAPPDATA": "local"}, "local/dare"),
        ("darwin", {"XDG_CACHE_HOME": "caches"}, "caches/dare"),
    ],
)
def test_where_rates_are_kept(platform, variables, expected, tmp_path, monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr("sys.platform", platform)
    monkeypatch.setattr("pathlib.Path.home", lambda: tmp_path)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert kept.cache_folder().as_posix() == expected.replace("HOME", tmp_path.as_posix())


# ---------------------------------------------------------------- measuring


def ticking(step: float):
    """A clock on which every look takes as long."""
    return (tick * step for tick in count()).__next__


@pytest.mark.parametrize("method", ["+".join(("trim", "dare", "ties")), *STAGES])
def test_every_stage_can_be_measured(method, monkeypatch):
    monkeypatch.setattr(calibration, "SIDES", (8, 16))
    if STAGES.get(method) is not None and STAGES[method].kind == "delta":
        method += "+linear"
    made = plan_of(method=method)
    speed = measure_speed(made, made.tensors[0], clock=ticking(0.125))
    assert speed.side == 16
    assert speed.seconds == 0.125


def test_a_slow_stage_is_measured_on_small_matrices_only(monkeypatch):
    monkeypatch.setattr(calibration, "SIDES", (8, 16, 32, 64))
    made = plan_of(method="tsv")
    speed = measure_speed(made, made.tensors[0], clock=ticking(1.0))
    assert speed.side == 16


def test_deltas_and_absent_models_are_measured_as_such(monkeypatch):
    monkeypatch.setattr(calibration, "SIDES", (4, 8))
    made = plan_of(kind="F16")
    made = replace(made, models=(made.models[0], source_of((64, 32), deltas=True)))
    sample = calibration.sample_plan(made, made.tensors[0], (8, 8))
    assert [model.holds_delta("w") for model in sample.models] == [False, True]
    assert [model.tensors["w"].dtype.name for model in sample.models] == ["F16", "F32"]
    assert measure_speed(made, made.tensors[0]).side == 8


def test_the_disk_is_measured_and_left_as_it_was(cache):
    found = measure_disk(ticking(0.01))
    assert found is not None
    assert found.folder == str(cache)
    assert found.written_bytes_per_second > 0 < found.read_bytes_per_second
    assert list(cache.iterdir()) == []


def test_without_any_place_to_write_there_is_no_estimate(cache, monkeypatch):
    cache.write_text("a file where the folder should be")
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(cache))
    assert measure_disk() is None
    assert estimate(plan_of()) is None
