"""What docs/evidence.md says of stored results: hand-computed values, and that it is up to date.

A table that is on the page is checked there: `test_the_page_is_up_to_date`.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from doc_blocks import ROOT

EXPERIMENTS = ROOT / "experiments"
MODULES = ("evidence", "figures", "choose", "tables", "report")


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


def test_reading_chooses_the_single_model_on_validation_items(
    evidence: ModuleType, tmp_path: Path
) -> None:
    (tmp_path / "sets").mkdir()
    entry = a_set("w", single_0=(70.0, 0.0), single_1=(60.0, 0.0))
    entry["scores"]["single 1"]["validation"] = 99.0
    for name, world in (("w", "w"), ("cugan", "cugan, other base")):
        document = {"pair": {**entry, "world": world}}
        (tmp_path / "sets" / f"{name}.json").write_text(json.dumps(document))
    (tmp_path / "advice.json").write_text(json.dumps({"w, pair": {"change": 0.01}}))
    found = evidence.read(tmp_path)
    assert [s["world"] for s in found.sets] == ["w"]
    assert [s["seen"] for s in found.advised] == [{"change": 0.01}]
    assert [s["world"] for s in found.images] == ["cugan, other base"]  # in dB, not in points
    assert found.sets[0]["scores"]["best single"]["score"] == 60.0


def rows_of(text: str) -> dict[str, list[str]]:
    """The rows of a table, by their first cells."""
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return {first: others for first, *others in lines[2:]}


def block_of(evidence: ModuleType, name: str, *sets: dict[str, Any], **more: Any) -> str:
    return str(sys.modules["tables"].BLOCKS[name](evidence.Evidence([*sets], [], [], **more)))


@pytest.fixture
def choose(evidence: ModuleType) -> ModuleType:
    del evidence  # it makes the modules importable
    return sys.modules["choose"]


def test_dropping_helps_beyond_chance_only_after_a_correction(evidence: ModuleType) -> None:
    plain = {"linear": (60.0, 0.0), "ties": (50.0, 0.6)}
    sets = [
        a_set("w", **plain, **{"dare+ties 0.5": (score, 0.8)}) | {"name": f"w, {number}"}
        for number, score in enumerate((50.9, 51.1, 52.0, 48.0))
    ]
    text = block_of(evidence, "helped", *sets)
    assert rows_of(text) == {"`dare+ties 0.5`": ["4", "2 / 1 / 1"]}
    assert "w, 2, `dare+ties 0.5` (+2.0 ± 1.0)" in text
    assert "w, 1" not in text
    assert block_of(evidence, "helped-share", *sets) == "1 of 4 comparisons"


@pytest.mark.parametrize("name", ["newest", "advice", "advice-new"])
def test_without_scored_sets_the_page_says_so(evidence: ModuleType, name: str) -> None:
    assert block_of(evidence, name, a_set("w")) == sys.modules["tables"].NOTHING_STORED


def test_blocks_are_filled_in_place(report: ModuleType, evidence: ModuleType) -> None:
    page = "We made <!-- evidence: amounts -->?<!-- end -->."
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


def test_the_advice_is_what_was_chosen_and_gives_its_figures(choose: ModuleType) -> None:
    """Run `python experiments/choose.py`, and copy what it prints into advice.toml."""
    from dare.analysis.advice import TEXTS

    sets = sys.modules["evidence"].read(EXPERIMENTS / "results").advised
    assert choose.choose(choose.rules("narrow"), choose.choosable(sets)) == choose.ADVISED
    found = choose.gains_of_folds("narrow", sets)
    better, worse = (sum(sign * gap > width for _, gap, width in found) for sign in (1, -1))
    mean = sum(gap for _, gap, _ in found) / len(found)
    numbers = re.findall(r"(?<![{:.])\d+(?:\.\d+)?(?![%f}])", TEXTS["reasons"]["small"])
    assert numbers == [f"{len(found)}", f"{better}", f"{worse}", f"{mean:.1f}"]
    found = choose.gains_elsewhere(sets)
    better, worse = (sum(sign * gap > width for gap, width in found) for sign in (1, -1))
    numbers = re.findall(r"\d+(?:\.\d+)?", TEXTS["reasons"]["average"])
    assert numbers == [f"{choose.ADVISED.scale}", f"{better}", f"{len(found)}", f"{worse}"]
