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
    (tmp_path / "advice.json").write_text(json.dumps({"w, pair": {"change": 0.01}}))
    found = evidence.read(tmp_path)
    assert [s["world"] for s in found.sets] == ["w"]
    assert [s["seen"] for s in found.advised] == [{"change": 0.01}]
    assert [s["world"] for s in found.images] == ["cugan, other base"]  # in dB, not in points
    assert found.sets[0]["scores"]["best single"]["score"] == 60.0


SCALES = (0.05, *(n / 10 for n in range(1, 13)), 1.4, 1.6, 1.8, 2.0, 2.5, 3.0, 4.0)


def advised(
    world: str, name: str = "pair", *, way: str = "full", gains: Any = None, **seen: Any
) -> dict[str, Any]:
    """A set in which the average has 60 points, and `tsv` its gains by scale, else 5 less."""
    gains = {"validation": {}, "test": {}} | (gains or {})
    at = {scale: 60 + gains["test"].get(scale, -5) for scale in (0.5, 0.7, 0.8, 1.2, 1.4, 1.6, 2)}
    scores = {f"tsv at {scale:g}": (score, 1) for scale, score in at.items()}
    scores |= {"tsv": (60 + gains["test"].get(1.0, -5), 1), "linear": (60, 0), "base": (50, 2)}
    scores |= {"single 0": (58, 1), "sum": (40, 3), "linear without strangers": (64, 1)}
    scores |= {"linear tuned": (61, 1), "tsv tuned": (62, 1)}
    entry = a_set(world, **scores)
    tried = {"linear": {}, "tsv": gains["validation"]}
    for method, found in tried.items():
        usual = 0 if method == "linear" else -5
        entry["scores"][f"{method} tuned"]["tried"] = [60 + found.get(s, usual) for s in SCALES]
    known = {"change": 0.01, "cosine": 0.0, "left_out": []} | seen
    return {
        **entry,
        **{
            "name": f"{world}, {name}",
            "kind": name.split(",", maxsplit=1)[0],
            "models": [f"{way}-usual-a-0"],
        },
        **{"strangers": [2], "seen": known},
    }


def rows_of(text: str) -> dict[str, list[str]]:
    """The rows of a table, by their first cells."""
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return {first: others for first, *others in lines[2:]}


def block_of(evidence: ModuleType, name: str, *sets: dict[str, Any], **more: Any) -> str:
    return str(sys.modules["tables"].BLOCKS[name](evidence.Evidence([*sets], [], [], **more)))


GOOD = {"validation": {0.7: 1, 1.2: 4}, "test": {0.7: 1, 1.2: 3}}


@pytest.fixture
def choose(evidence: ModuleType) -> ModuleType:
    del evidence  # it makes the modules importable
    return sys.modules["choose"]


def test_the_choice_is_the_largest_gain_on_validation_items(choose: ModuleType) -> None:
    sets = [
        *(advised("v", gains=GOOD), advised("w", gains=GOOD, change=0.008)),
        *(advised("w", change=0.04), advised("w", cosine=0.15)),  # here tsv loses
    ]
    rule = choose.choose(choose.rules("narrow"), choose.choosable(sets))
    assert rule == choose.Rule(0.01, 0.05, "tsv", 1.2)


def test_new_sets_loras_and_those_with_strangers_have_no_part_in_it(choose: ModuleType) -> None:
    ours = advised("v")
    others = advised("v", is_new=True), advised("v", way="lora"), advised("v", left_out=[2])
    assert choose.choosable([ours, *others]) == [ours]


def test_a_fold_is_chosen_without_its_base(choose: ModuleType) -> None:
    low = {"validation": {0.7: 9}, "test": {0.7: 6, 1.2: 2}}
    sets = [advised("v", gains=low), advised("w", gains=GOOD)]
    assert [(base, rule.scale) for base, rule, _ in choose.folds("narrow", sets)] == [
        ("v", 1.2),
        ("w", 0.7),
    ]
    assert choose.gains_of_folds("narrow", sets) == [("v", 2, 1), ("w", 1, 1)]


def test_what_is_advised(choose: ModuleType) -> None:
    assert choose.advised(advised("w")) == "tsv at 1.2"
    for seen in ({"change": 0.021}, {"cosine": 0.1}, {"way": "lora"}):
        assert choose.advised(advised("w", **seen)) == "linear"
    left_out = {"change": 0.3, "left_out": [2]}
    assert choose.advised(advised("w", **left_out)) == "linear without strangers"
    other = {**advised("w", **left_out), "strangers": []}
    assert choose.advised(other) == "linear without 2"


def test_the_advice_is_counted_by_what_it_does(evidence: ModuleType) -> None:
    sets = [
        *(advised("v", gains=GOOD), advised("w"), advised("w", "many", change=0.3)),
        advised("w", "stranger", change=0.3, left_out=[2]),
    ]
    text = block_of(evidence, "advice", *sets, advised("u", is_new=True))
    rows = rows_of(text)
    assert rows["`tsv`"] == ["2", "2", "1 / 0 / 1", "−1.0"]
    assert rows["the average without some models"] == ["1", "1", "1 / 0 / 0", "+4.0"]
    assert rows["the average of all"] == ["1", "1", "0 / 1 / 0", "+0.0"]
    assert "w, pair (−5.0)" in text
    new = rows_of(block_of(evidence, "advice-new", *sets, advised("u", is_new=True)))
    assert new["**all**"] == ["1", "1", "0 / 0 / 1", "−5.0"]


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
