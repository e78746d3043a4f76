"""What docs/evidence.md says of stored results: hand-computed values, and that it is up to date."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from doc_blocks import ROOT

EXPERIMENTS = ROOT / "experiments"
MODULES = ("evidence", "figures", "tables", "report")


@pytest.fixture(scope="module")
def report() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXPERIMENTS))
        yield __import__("report")
    for name in MODULES:
        sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def evidence(report: ModuleType) -> ModuleType:
    return sys.modules["evidence"]


def a_set(world: str, **scores: tuple[float, float]) -> dict[str, Any]:
    found = {
        name.replace("_", " "): {"score": score, "half_width": width, "validation": score}
        for name, (score, width) in scores.items()
    }
    return {"world": world, "kind": "pair", "scores": found}


def a_model(world: str, full: float, error: float, dropped: float) -> dict[str, Any]:
    return {
        **{"world": world, "base": 40.0, "full": full},
        **{"rescaled": {"0.9": [dropped]}, "error": error},
    }


def test_a_set_is_won_only_beyond_its_half_width(evidence: ModuleType) -> None:
    scores = [(62.0, 1.9), (62.0, 2.0), (58.0, 2.0), (57.9, 2.0)]
    sets = [a_set("w", linear=(60.0, 0.0), sum=score) for score in scores]
    assert evidence.tally(sets, "sum") == "1 / 2 / 1"
    assert evidence.tally(sets, "ties") == "–"


def test_bases_are_drawn_and_not_sets(evidence: ModuleType) -> None:
    alike = [(base, value) for base, value in zip("abcd", (0, 0, 0, 4), strict=True)]
    found = evidence.estimate(alike * 25)
    assert (found.mean, found.bases) == (1.0, 4)
    assert (found.low, found.high) == (0.0, 3.0)  # as wide as with one value for each base
    assert found == evidence.estimate(alike)


def test_few_bases_give_no_interval(evidence: ModuleType) -> None:
    found = evidence.estimate([("a", -1.0), ("b", -2.0)])
    assert (found.points, found.verdict) == ("−1.5", "not certain")
    assert evidence.estimate([]).points == "–"


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [(-0.9, 0.9, "free"), (0.1, 2, "helps"), (-2, -0.1, "hurts"), (-2, 0.1, "not certain")],
)
def test_verdicts(evidence: ModuleType, low: float, high: float, verdict: str) -> None:
    assert evidence.Estimate((low + high) / 2, low, high, 9).verdict == verdict
    assert verdict in evidence.VERDICTS


def test_shares_of_a_gain(evidence: ModuleType) -> None:
    model = a_model("w", 60.0, 0.1, 55.0)
    assert evidence.kept(model, [45.0, 55.0]) == 0.5
    assert evidence.shares([model], "rescaled", "0.9") == [("w", 0.75)]
    assert evidence.Estimate(0.754, 0.5, -0.002, 4).percent == "75 % (50 … 0)"


def test_models_that_gained_little_are_left_out(evidence: ModuleType) -> None:
    singles = [a_model("w", full, 0.1, 50.0) for full in (44.9, 45.0)]
    found = evidence.Evidence([], [], [{"world": "w", "about": "text", "singles": singles}])
    assert [model["full"] for model in found.gainers] == [45.0]


def test_ranks_within_and_across_bases(evidence: ModuleType) -> None:
    models = [a_model("a", 60, 1, 58), a_model("a", 60, 2, 50), a_model("b", 60, 3, 59)]
    within, across = (
        evidence.rank_correlation(models, lambda model: model["error"], same_base=same)
        for same in (True, False)
    )
    assert (within, across) == (1.0, -1.0)


def test_magnitude_is_held_against_what_is_no_larger(evidence: ModuleType) -> None:
    sizes = {"random 0, 2 bits": (2.0, 0.9), "random 0.5, 2 bits": (1.0, 0.5)}
    random = [evidence.Storing(n, "full", bits, [("w", k)]) for n, (bits, k) in sizes.items()]
    ours = evidence.Storing("magnitude 0.8, 4 bits", "full", 1.5, [("w", 0.75)])
    rival = ours.best_rival([*random, ours])
    assert rival is random[1]
    assert ours.minus(rival).mean == 0.25
    assert random[1].best_rival([random[0]]) is None


def test_reading_chooses_the_single_model_on_validation_items(
    evidence: ModuleType, tmp_path: Path
) -> None:
    (tmp_path / "sets").mkdir()
    entry = a_set("w", single_0=(70.0, 0.0), single_1=(60.0, 0.0))
    entry["scores"]["single 1"]["validation"] = 99.0
    for name, world in (("w", "w"), ("cugan", "cugan, other base")):
        document = {"pair": {**entry, "world": world}}
        (tmp_path / "sets" / f"{name}.json").write_text(json.dumps(document))
    found = evidence.read(tmp_path)
    assert [s["world"] for s in found.sets] == ["w"]
    assert [s["world"] for s in found.images] == ["cugan, other base"]  # in dB, not in points
    assert found.sets[0]["scores"]["best single"]["score"] == 60.0


def test_blocks_are_filled_in_place(report: ModuleType, evidence: ModuleType) -> None:
    page = (
        "We made <!-- evidence: amounts -->?<!-- end -->.\n<!-- evidence: advice -->\n<!-- end -->"
    )
    found = evidence.Evidence([a_set("a"), a_set("b"), a_set("b")], [], [])
    filled = report.fill(page, found)
    assert filled == page.replace("?", "3 sets of models from 2 bases")
    with pytest.raises(KeyError):
        report.fill("<!-- evidence: nonsense --><!-- end -->", found)


@pytest.mark.skipif(not (EXPERIMENTS / "results").is_dir(), reason="no results are stored")
def test_the_page_is_up_to_date() -> None:
    """Run `python experiments/report.py` after a change of the results or of the report."""
    command = [sys.executable, EXPERIMENTS / "report.py", "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_figures_are_small_and_follow_the_readers_choice() -> None:
    figures = sorted((ROOT / "docs/images").glob("evidence-*.svg"))
    assert len(figures) == 4
    for file in figures:
        assert file.stat().st_size < 100_000
        assert "prefers-color-scheme:dark" in file.read_text("utf-8")
