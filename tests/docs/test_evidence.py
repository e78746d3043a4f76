"""What docs/evidence.md says of stored results: hand-computed values, and that it is up to date."""

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
    said = {"folds": {"w": {"gain": 1.0}}, "sets": {"w, pair": {"advice": 60.0}}}
    (tmp_path / "advice.json").write_text(json.dumps(said))
    found = evidence.read(tmp_path)
    assert [s["world"] for s in found.sets] == ["w"]
    assert [s["advice"] for s in found.advised] == [{"advice": 60.0}]
    assert found.folds == said["folds"]
    assert [s["world"] for s in found.images] == ["cugan, other base"]  # in dB, not in points
    assert found.sets[0]["scores"]["best single"]["score"] == 60.0


def advised(world: str, kind: str = "pair", **known: Any) -> dict[str, Any]:
    """A set in which the average has 60 points, and whose best model is 10 above the base."""
    said = {
        **{"base": 50.0, "best single": 60.0, "average": 60.0, "sum": 40.0, "search": 64.0},
        **{"advice": 62.0, "half_width": 1.0, "gain": 20.0, "search gain": 40.0},
    }
    entry = a_set(world, base=(50, 2), single_0=(60, 1), sum=(40, 3), tsv_tuned=(64, 1))
    return {**entry, "name": f"{world}, {kind}", "kind": kind, "advice": said | known}


def rows_of(text: str) -> dict[str, list[str]]:
    """The rows of a table, by their first cells."""
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return {first: others for first, *others in lines[2:]}


def block_of(evidence: ModuleType, name: str, *sets: dict[str, Any], **more: Any) -> str:
    return str(sys.modules["tables"].BLOCKS[name](evidence.Evidence([*sets], [], [], **more)))


def test_advice_by_kind_has_narrow_sets_apart_and_names_what_it_lost(evidence: ModuleType) -> None:
    narrow = advised("w", "lora", **{"base": 55.1, "advice": 57.0})
    text = block_of(evidence, "advice", advised("w"), advised("v"), narrow)
    rows = rows_of(text)
    assert rows["pair"] == ["2", "2", "+20.0", "+40.0", "0", "–", "2 / 0 / 0"]
    assert rows["lora"] == ["1", "0", "–", "–", "1", "−3.0", "0 / 0 / 1"]
    assert rows["**all**"] == ["2", "2", "+20.0", "+40.0", "1", "−3.0", "2 / 0 / 1"]
    assert "w, lora (−3.0)" in text
    assert "w, pair (" not in text


def test_bases_made_after_the_choice_stand_apart(evidence: ModuleType) -> None:
    sets = advised("w"), advised("typefaces", gain=-10.0)
    assert rows_of(block_of(evidence, "advice", *sets))["**all**"][:3] == ["1", "1", "+20.0"]
    assert rows_of(block_of(evidence, "advice-late", *sets))["**all**"][:3] == ["1", "1", "−10.0"]
    assert block_of(evidence, "advice-way", *sets) == "50 %"


def test_folds_of_the_advice(evidence: ModuleType) -> None:
    fold = {"cosine": 0.5, "change": 0.3, "small": ["tsv", 0.7], "large": ["linear", 1.0]}
    text = block_of(evidence, "advice-folds", folds={"w": {**fold, "gain": -1.25}})
    assert rows_of(text) == {"w": ["0.5", "30 %", "`tsv` at 0.7", "`linear` at 1", "−1.2"]}


def test_advice_against_other_choices(evidence: ModuleType) -> None:
    rows = rows_of(block_of(evidence, "advice-rivals", advised("w"), advised("typefaces")))
    assert rows["base"] == ["1 / 0 / 0", "+12.0"]
    assert rows["average"] == ["1 / 0 / 0", "+2.0"]
    assert rows["search, late bases"] == ["0 / 0 / 1", "−2.0"]  # half-width √2
    assert len(rows) == 10


def test_the_newest_methods_are_held_against_what_is_tuned(
    evidence: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = sys.modules["tables"]
    monkeypatch.setattr(tables, "NEWEST", ("dc",))
    monkeypatch.setattr(tables, "BESIDE_NEWEST", ("tsv",))
    scores = dict.fromkeys(("linear", "linear_tuned", "tsv", "tsv_tuned"), (60.0, 1.0))
    sets = [
        a_set(world, **scores, dc=(59.5, 1.0), dc_tuned=(better, 1.0))
        for world, better in zip("abcd", (61.0, 62.0, 61.0, 62.0), strict=True)
    ]
    text = block_of(evidence, "newest", *sets, a_set("e", **scores))
    rows = rows_of(text)
    assert rows["`dc`"][:3] == ["4", "0 / 4 / 0", "−0.5 (−0.5 … −0.5)"]
    assert rows["`dc`"][3].startswith("+1.5 (+1.")
    assert rows["`tsv`"][0] == "4"  # not the set that lacks a newest method
    assert "than tuned `linear`: `dc`; than tuned `tsv`: `dc`" in text


def test_other_methods_instead_of_the_advice_have_scales_of_other_bases(
    evidence: ModuleType,
) -> None:
    seen = {"outcome": "small_changes", "method": "tsv"}
    sets = []
    for world, (half, whole) in {"v": (61.0, 63.0), "w": (64.0, 62.0)}.items():
        entry = advised(world, seen=seen, candidate="tsv without strangers at 0.7")
        entry["scores"] |= {
            f"iso without strangers{at}": {"score": score, "half_width": 1.0}
            for at, score in ((" at 0.5", half), ("", whole))
        }
        sets.append(entry)
    rows = rows_of(block_of(evidence, "advice-instead", *sets))
    # The advice has 62 points; v takes 0.5, which is best for w, and w takes 1, the best for v.
    assert rows == {"`iso`": ["2", "+0.5", "0.5, 1", "−0.5", "−5.0"]}


def test_answers_that_lose_are_named(evidence: ModuleType) -> None:
    answers = {"w": ("single 1", []), "v": ("linear", ["tsv"])}
    sets = [
        advised(world, compared={"answer": answer, "beaten_by": beaten})
        for world, (answer, beaten) in answers.items()
    ]
    text = block_of(evidence, "advice-compared", *sets)
    assert "1 of 2 sets" in text
    assert "v, pair (`linear`, beaten by `tsv`)" in text
    assert "w, pair" not in text


@pytest.mark.parametrize(
    "name",
    [
        *("newest", "advice", "advice-late", "advice-folds"),
        *("advice-instead", "advice-rivals", "advice-compared"),
    ],
)
def test_without_scored_advice_the_page_says_so(evidence: ModuleType, name: str) -> None:
    assert block_of(evidence, name, a_set("w")) == sys.modules["tables"].NOTHING_STORED


def test_what_survives_is_counted_by_task_and_without_own_tasks(evidence: ModuleType) -> None:
    scores = {"base": [50, 50], "single 0": [90, 40], "single 1": [44, 80]}
    scores |= {key: [60, 44] for key in ("linear", "sum", "ties", "tsv", "model_stock")}
    entry = {"world": "w", "tasks": ["a", "up down"], "strangers": [], "models": []}
    entry["models"] = ["full-usual-a-0", "lora-harsh-up_down-1"]
    entry["scores"] = {name: {"by_task": found} for name, found in scores.items()}
    lines = block_of(evidence, "survives", entry).splitlines()[2:4]
    assert [line.split(" | ")[1:] for line in lines] == [
        ["2", "−8.0", "100 % |"],
        ["2", "+2.0", "50 % |"],
    ]


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


def test_records_in_the_advice_are_those_of_the_results(evidence: ModuleType) -> None:
    """Run `python experiments/choose.py`, and copy what it prints into advice.toml."""
    del evidence  # it makes the modules importable
    from dare.analysis.judge.advice import OUTCOMES

    sets = json.loads((EXPERIMENTS / "results" / "advice.json").read_text())["sets"].values()
    for outcome in OUTCOMES[1:]:  # the first is arithmetic
        found = [each for each in sets if each["seen"]["outcome"] == outcome.name]
        gaps = [(each["advice"] - each["average"], each["half_width"]) for each in found]
        better, worse = (sum(sign * gap > width for gap, width in gaps) for sign in (1, -1))
        numbers = list(map(int, re.findall(r"\d+", outcome.record)))
        if outcome.method == "linear":  # it differs from the average only where it leaves some out
            expected = [len(found), sum(bool(each["seen"]["left_out"]) for each in found)]
            assert numbers == [*expected, better, worse]
        else:
            assert numbers == [len(found), better, worse, len(found) - better - worse]
        assert worse <= len(found) / 10
