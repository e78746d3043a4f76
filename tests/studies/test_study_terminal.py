from __future__ import annotations

import io
import re
from dataclasses import replace

import pytest
import study_sample as sample
from rich.cells import cell_len

from dare.documents.notices import notice
from dare.documents.terminal import SafeConsole, print_document
from dare.studies.document import study_document
from dare.studies.results import Difference, Estimate, State, Trial
from dare.studies.searching import live_line

HOSTILE = "[red]x[/red]\x1b[2J\nline"


def shown(data, conclusion=None, width=100, encoding="utf-8", **options):
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding=encoding, errors="replace")
    console = SafeConsole(
        width=width, file=file, highlight=False, markup=False, emoji=False, legacy_windows=False
    )
    conclusion = conclusion or sample.make_conclusion(data)
    print_document(console, study_document(data, conclusion, **options))
    file.flush()
    return raw.getvalue().decode(encoding)


@pytest.mark.parametrize("width", [80, 100, 160])
@pytest.mark.parametrize("make", [sample.make_search, sample.make_sweep])
def test_no_line_is_longer_than_the_terminal(make, width):
    lines = shown(make(), width=width).splitlines()
    assert max(map(cell_len, lines)) <= width


def test_what_decides_comes_first():
    lines = shown(sample.make_search()).splitlines()
    first = next(place for place, line in enumerate(lines) if line.startswith("  "))
    title = " ".join(lines[:first])
    assert "Trial 8 " in title
    assert title.endswith("18 of 24 trials done, 3 stopped early, 3 failed.")
    assert lines[first].startswith("  Best ")
    assert "trial 8, method=sum scale=1: 0.7 (0.66 … 0.73)" in lines[first]
    labels = [line[2:].split("  ")[0] for line in lines if re.match(r"  \S", line)]
    assert labels[:5] == ["Best", "May be as good", "Simplest of these", "Holdout", "Noise"]


def test_each_baseline_has_a_difference_an_interval_and_a_verdict():
    lines = [line.split() for line in shown(sample.make_search()).splitlines()]
    assert ["base", "+0.65", "+0.6", "…", "+0.7", "better"] in lines
    assert ["sum", "+0", "-0.05", "…", "+0.05", "no", "clear", "difference"] in lines


def test_importance_has_bars_beside_the_largest():
    lines = shown(sample.make_search()).splitlines()
    bars = {line.split()[0]: line.count("█") for line in lines if "█" in line}
    assert bars == {"drop_rate": 24, "method": 7, "scale": 1}


def test_the_table_holds_the_scores_and_says_what_is_left_out():
    data = sample.make_search()
    wide = shown(data, width=160, rows=3)
    assert "The best 3 of 18 settings\n" in wide
    heads = [line.split() for line in wide.splitlines() if "objective " in line and "95%" in line]
    scores = ["objective", "95%", "interval", *sample.SCORES]
    settings = ["method", "scale", "drop_rate"]
    assert heads == [scores, ["trial", *settings, *scores]]
    assert "The best 3 of 18 settings (1 more column)\n" in shown(data, width=80, rows=3)


def test_settings_are_columns_at_eighty_columns_and_guards_are_told():
    lines = shown(sample.make_search(), width=80, rows=30).splitlines()
    rows = [line.split() for line in lines]
    assert ["8", "sum", "1", "–", "0.7", "0.66", "…", "0.73"] in [row[:8] for row in rows]
    assert sum("broken" in row for row in rows) == 3
    many = {f"weight.model-{n}": n / 10 for n in range(9)}
    trials = [sample.make_trial(n, {**many, "scale": n, "drop_rate": n / 9}, 0.5) for n in (1, 2)]
    text = shown(sample.make_search(0, trials=tuple(trials)), width=80)
    assert " ".join(f"{name}={value:g}" for name, value in many.items()) in " ".join(text.split())
    assert max(map(cell_len, text.splitlines())) <= 80
    assert "…  " not in text.split("Settings, best first")[1].replace(" … ", "")


def test_failures_are_counted_and_shown_with_their_output_if_asked():
    data = sample.make_search()
    text = shown(data)
    assert "3 trials failed\n  3 trials: the command ended with status 1\n" in text
    assert "MemoryError" not in text
    full = shown(data, outputs=True)
    assert full.count("MemoryError") == 3
    assert "trial 5 method=sum" in full


def test_nothing_from_outside_is_acted_on():
    data = sample.make_search(4)
    trial = Trial(9, {HOSTILE: HOSTILE}, 0, State.FAILED, message=HOSTILE, output=HOSTILE)
    data = replace(
        data, trials=(*data.trials, trial), notices=(notice("no_advice", reason=HOSTILE),)
    )
    conclusion = sample.make_conclusion(data)
    conclusion = replace(
        conclusion,
        against=(Difference(HOSTILE, Estimate(0.0), "not known"),),
        importance={HOSTILE: 0.5},
    )
    text = shown(data, conclusion, width=160, outputs=True) + live_line(data, conclusion, 5.0)
    assert "\x1b" not in text
    assert text.count("[red]x[/red]\\x1b[2J\\n") >= 5


def test_letters_that_cannot_be_written_are_replaced():
    text = shown(sample.make_sweep(), encoding="latin-1")
    assert "#" * 24 in text


def test_without_trials_there_are_the_baselines():
    text = shown(sample.make_search(0))
    assert text.startswith("Not finished yet  0 of 0 trials done.\n")
    assert "average" in text


def test_when_all_settings_break_guards_that_is_the_headline():
    data = sample.make_search(8)
    data = replace(data, trials=(data.trials[7],), planned=1)
    assert shown(data).startswith("Every setting breaks a guard  1 of 1 trial done")


def test_a_better_baseline_is_the_headline():
    data = sample.make_sweep()
    found = sample.make_conclusion(data)
    better = found.baselines[-1:]
    text = shown(data, replace(found, better=better, chosen=better[0], simplest=better[0]))
    assert text.startswith("A baseline is better than the best setting")
    assert "Take instead" in text
    assert "Simplest within noise" not in text
    part = replace(better[0], baseline="sum × 0.4")
    text = shown(data, replace(found, better=(part,), chosen=part, simplest=part))
    assert ("40% of the sum" in text, "the 40%" in text) == (True, False)
    single = found.baselines[1]
    text = shown(data, replace(found, better=(single,), chosen=single, simplest=single))
    assert text.startswith("Do not merge: a baseline is better than the best setting")
    assert "do not merge: add is better" in " ".join(text.split())


def test_the_live_line_says_what_is_known():
    data = sample.make_search()
    conclusion = sample.make_conclusion(data)
    assert live_line(data, conclusion, 125.0) == (
        "18 of 24 trials done, 3 stopped early, 3 failed"
        " · best: trial 8, 0.7 (0.66 … 0.73) · 3 min left"
    )
    empty = sample.make_search(0, planned=5)
    assert live_line(empty, sample.make_conclusion(empty), 5.0) == "0 of 5 trials done · 5 s left"
