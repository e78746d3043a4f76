from __future__ import annotations

import io
import re
from dataclasses import replace

import pytest
import study_sample as sample
from rich.cells import cell_len

from dare.documents.console import Console
from dare.documents.document import Tone
from dare.documents.notices import notice
from dare.documents.terminal import print_document
from dare.studies.document import headline, study_document
from dare.studies.results import Difference, Estimate, State, TaskScores, Trial
from dare.studies.searching import live_line, trial_line

HOSTILE = "[red]x[/red]\x1b[2J\nline"


def shown(data, conclusion=None, width=100, encoding="utf-8", **options):
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding=encoding, errors="replace")
    console = Console(file, width=width)
    conclusion = conclusion or sample.make_conclusion(data)
    print_document(console, study_document(data, conclusion, **options))
    file.flush()
    return raw.getvalue().decode(encoding)


@pytest.mark.parametrize("width", [80, 100, 160])
@pytest.mark.parametrize("make", [sample.make_search, sample.make_sweep])
def test_no_line_is_longer_than_the_terminal(make, width):
    lines = shown(make(), width=width).splitlines()
    assert max(map(cell_len, lines)) <= width


def rows_of(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines()]


def test_what_decides_comes_first():
    lines = shown(sample.make_search()).splitlines()
    first = next(place for place, line in enumerate(lines) if line.startswith("  "))
    title = " ".join(lines[:first])
    assert title.startswith("Merge add and sort  This merge (sum, scale 1) came first")
    assert "80.0%, 95% interval 70–90" in title
    assert "the sum" in title.partition("as good:")[2]
    assert title.endswith("18 of 24 trials done, 3 stopped early, 3 failed.")
    labels = [line[2:].split("  ")[0] for line in lines if re.match(r"  \S", line)]
    assert labels == ["Measured"]


def test_the_answer_is_one_screen_and_what_more_there_is_comes_with_rows():
    data = sample.make_search()
    short, long = shown(data), shown(data, rows=30)
    assert len(short.splitlines()) <= 24
    heads = ("The best compared with", "Baselines", "3 trials failed")
    assert [head in short for head in heads] == [False] * 3
    assert [head in long for head in heads] == [True] * 3
    rows = rows_of(long)
    assert ["base", "+0.65", "+0.6", "…", "+0.7", "better"] in rows
    assert ["sum", "+0", "-0.05", "…", "+0.05", "no", "clear", "difference"] in rows


def test_tasks_have_a_row_and_say_what_they_won_or_lost():
    data = sample.make_search()
    estimates = [Estimate(q, q - 0.1, q + 0.1) for q in (0.1, 0.5, 0.4, 0.3)]
    changes = [Estimate(v, v - 0.05, v + 0.05) for v in (0.3, -0.2, 0.01, 0.1)]
    said = ("better", "worse", "no clear difference", "not known")
    tasks = [
        TaskScores("", 20, True, *estimates, "add", Difference("add alone", change, verdict))
        for change, verdict in zip(changes, said, strict=True)
    ]
    bits = Estimate(0.9)
    tasks.append(
        TaskScores(
            "text",
            0,
            False,
            None,
            bits,
            None,
            bits,
            "sort",
            Difference("x", Estimate(-0.3, -0.35, -0.25), "worse"),
        )
    )
    found = replace(sample.make_conclusion(data), tasks=tuple(tasks))
    rows = rows_of(shown(data, found, width=120))
    every = ["all", "tasks", "10.0%", "(0–20)", "add", "50.0%", "(40–60)"]
    every += ["40.0%", "(30–50)", "30.0%", "(20–40)"]
    ends = [["won", "30.0", "points"], ["lost", "20.0", "points"], ["+1.0,", "not", "clear"]]
    assert [row for row in rows if row[:1] == ["all"]] == [
        [*every, *end] for end in (*ends, ["+10.0"])
    ]
    assert ["text", "sort", "0.90", "0.90", "lost", "0.30"] in rows


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
    trials = [sample.make_trial(n, {**many, "scale": n, "drop_rate": n / 9}, 0.9) for n in (1, 2)]
    files = {"base_file": "base", "merge_files": [f"model-{n}" for n in range(9)]}
    recipe = {**sample.RECIPE, "models": files}
    text = shown(sample.make_search(0, trials=tuple(trials), recipe=recipe), width=80, rows=5)
    assert " ".join(f"{name}={value:g}" for name, value in many.items()) in " ".join(text.split())
    assert max(map(cell_len, text.splitlines())) <= 80
    assert "…  " not in text.split("Settings, best first")[1].replace(" … ", "")


def test_failures_are_counted_and_shown_with_their_output_if_asked():
    data = sample.make_search()
    text = shown(data, rows=5)
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
    )
    text = shown(data, conclusion, width=160, rows=9, outputs=True)
    text += live_line(data, conclusion)
    assert "\x1b" not in text
    assert text.count("[red]x[/red]\\x1b[2J\\n") >= 5


def test_unfinished_and_empty_studies_say_so():
    empty = sample.make_search(0, planned=5, baselines=())
    assert live_line(empty, sample.make_conclusion(empty)) == "0 of 5 trials done"
    data = sample.make_search()
    assert live_line(data, sample.make_conclusion(data)) == (
        "18 of 24 trials done, 3 stopped early, 3 failed · best: trial 8, 0.7 (0.66 … 0.73)"
    )
    text = shown(sample.make_search(0), rows=5)
    assert text.startswith("Not finished yet  So far: Merge add and sort. This merge (the sum) ")
    assert ["average", "0.6"] in [row[:2] for row in rows_of(text)]
    broken = replace(data, trials=(data.trials[7],), planned=1, baselines=())
    assert shown(broken).startswith("No answer: every candidate breaks a guard  1 of 1 trial done")
    assert "70.0% (60?80)" in shown(sample.make_sweep(), encoding="latin-1", rows=5)


@pytest.mark.parametrize(
    ("place", "title", "recipes"),
    [
        (0, "Do not merge: the base is best", set()),
        (1, "Use add alone", set()),
        (4, "Merge add and sort", {"best-recipe"}),
    ],
)
def test_a_baseline_may_be_the_answer(place, title, recipes):
    data = sample.make_sweep()
    found = sample.make_conclusion(data)
    best = found.baselines[place]
    document = study_document(data, replace(found, best=best, tied=()))
    assert document.title == title
    (section,) = (section for section in document.sections if section.name == "recipe")
    assert {code.name for code in section.parts} == recipes


def test_luck_is_said_as_it_is():
    data = sample.make_sweep()
    found = sample.make_conclusion(data)
    assert (headline(data, found)[1], found.tied) == (Tone.GOOD, ())
    tied = replace(found, tied=tuple(found.baselines))
    _, tone, sure = headline(data, tied)
    assert (tone, "1 more" in sure) == (Tone.FAIR, True)  # four are named
    unknown = tuple(replace(d, verdict="not known") for d in found.against)
    no_items = notice("no_items", reason="none", consequence="none")
    _, tone, sure = headline(data, replace(found, against=unknown, notices=(no_items,)))
    assert (tone, "luck" in sure, "per-item" in sure) == (Tone.PLAIN, True, True)
    alone = replace(found, best=found.baselines[1])
    assert headline(data, alone)[1] is Tone.PLAIN  # no merge is no good news


def test_no_digit_of_a_score_is_cut_and_lists_over_the_layers_are_short():
    data = sample.make_search()
    found = sample.make_conclusion(data)
    small = replace(found.ranking[0], objective=Estimate(-0.003206, -0.003395, -0.003012))
    small = replace(small, scores=dict.fromkeys(small.scores, -0.00256))
    lines = shown(data, replace(found, ranking=(small,)), rows=5).splitlines()
    (row,) = (line for line in lines if "-0.00256" in line)
    assert "-0.00321   -0.0034 … -0.00301   -0.00256   -0.00256" in row
    trial = Trial(0, {"drop_rate": [0.3541289003166236, 0.5]}, 42, State.DONE, objective=0.25)
    assert trial_line(trial) == "trial 0, drop_rate=[0.3541, 0.5] seed=42: 0.25, 0.0 s"
