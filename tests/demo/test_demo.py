from __future__ import annotations

import io
import json
import signal
from dataclasses import asdict, replace

import pytest
from threadpoolctl import threadpool_info, threadpool_limits

from dare.demo import merges, story
from dare.demo.llama import Llama
from dare.demo.merges import (
    TUNED,
    Curve,
    DemoMerge,
    MeanScore,
    Measurement,
    Row,
    Score,
    Texts,
    measure,
)
from dare.demo.story import run_demo
from dare.documents.console import Console
from dare.documents.terminal import print_document
from dare.errors import OutputError, install_command

SMALL = replace(story.FULL, prompts=12, seeds=(42,), english_bytes=512, drop_rates=(0.5,))


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """A small run, with the text it wrote."""
    folder = tmp_path_factory.mktemp("demo")
    written = io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(story, "FULL", SMALL)
        patch.setattr(
            merges, "MEASUREMENTS_PER_PROCESS", 99
        )  # a process takes longer than its measurements
        result = run_demo(Console(written, width=80), output=folder, full=True)
    return result, written.getvalue(), folder


def row(ran, name):
    return next(row for row in ran[0].rows if row.name == name)


def test_a_model_can_do_its_own_task_only_and_a_merge_all_three(ran):
    assert all(row(ran, "base").correct(task).mean < 10 for task in TUNED)
    for name in TUNED:
        for task in TUNED:
            right = row(ran, name).correct(task).mean
            assert (right > 80) if task == name else (right < 20)
    for name in ("sum", "dare+sum p=0.5"):
        assert all(row(ran, name).correct(task).mean > 80 for task in TUNED)
    assert row(ran, "linear").mean.mean < row(ran, "sum").mean.mean
    english = [row(ran, name).bits_per_byte.mean for name in ("base", "dare+sum p=0.5")]
    assert 0.5 < english[0] < 1.5
    assert english[1] < english[0] + 0.1


def test_what_is_written_is_what_is_true(ran):
    result, text, _ = ran
    assert result.writings[-1].texts == tuple(example.answer for example in story.SHOWN)
    methods = ("linear", "sum", "ties", "trim+ties", "dare+sum p=0.5", "alone,")
    assert all(name in text for name in ("base", *TUNED, *methods))
    assert "\x1b" not in text
    assert max(map(len, text.split("\nNext")[0].splitlines())) <= 80


def test_it_ends_with_the_command_for_own_models_and_keeps_the_merge(tmp_path, monkeypatch):
    monkeypatch.setattr(story, "FIRST", replace(story.FIRST, prompts=4, english_bytes=256))
    written = io.StringIO()
    result = run_demo(Console(written, width=80), output=tmp_path / "out")
    assert [row.name for row in result.rows] == ["base", *TUNED, "dare+sum p=0.5"]
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["dare+sum-0.5"]
    json.dumps(asdict(result), allow_nan=False)
    steps = written.getvalue().partition("\nNext\n")[2]
    assert "BASE MODEL MODEL -o merged --method dare+sum --drop-rate 0.5" in steps
    assert "search BASE MODEL MODEL" in steps
    assert "demo --full" in steps


def test_everything_goes_into_json(ran):
    found = json.loads(json.dumps(asdict(ran[0])))
    assert found["parameters"] == 1_022_336
    assert [row["name"] for row in found["rows"]][:4] == ["base", *TUNED]
    mean = row(ran, "sum").mean.mean
    assert found["curves"][1]["points"][0] == [0.0, {"mean": mean, "spread": None}]


def test_merged_models_are_left_to_use(ran):
    folder = ran[2] / "dare+sum-0.5"
    assert Llama(folder, folder / "config.json").write(["64+19="]) == ["83"]
    assert (folder / "tokenizer.json").exists()


def test_without_matplotlib_it_says_how_to_get_it(ran, monkeypatch, tmp_path):
    monkeypatch.setattr(story, "find_spec", lambda _: None)
    assert story._keep(tmp_path, story.FIRST, ran[0].curves) is None
    told = dict(story.outcome(replace(ran[0], picture=None), "").facts)
    assert install_command("demo") in told["picture"]


def test_picture(ran):
    pytest.importorskip("matplotlib")
    assert (ran[2] / story.PICTURE).read_bytes().startswith(b"\x89PNG")
    assert ran[0].picture == str(ran[2] / story.PICTURE)


def test_workers_find_what_this_process_finds(ran):
    score = measure(Measurement(TUNED["add"], SMALL.prompts, 256, ("add",)))
    assert score.correct == {"add": row(ran, "add").correct("add").mean}
    assert 0.5 < score.bits_per_byte < 2
    merged = measure(Measurement(DemoMerge("sum", 0.5), SMALL.prompts, 0, ("add",)))
    assert merged.correct == {"add": row(ran, "dare+sum p=0.5").correct("add").mean}


def test_a_worker_takes_one_thread_and_leaves_interrupts_alone(monkeypatch):
    ignored = []
    monkeypatch.setattr("signal.signal", lambda *given: ignored.append(given))
    before = threadpool_limits()  # which restores what is changed below
    try:
        merges._begin()
        pools = [pool for pool in threadpool_info() if pool["user_api"] == "blas"]
        assert {pool["num_threads"] for pool in pools} == {1}
        assert ignored == [(signal.SIGINT, signal.SIG_IGN)]
    finally:
        before.restore_original_limits()


def test_figures_by_hand():
    score = Score({"add": 90.0, "sort": 60.0, "say": 30.0}, 1.25)
    other = Score({"add": 94.0, "sort": 64.0, "say": 34.0}, 1.75)
    row = Row("merge", (score, other))
    assert row.mean == MeanScore(62.0, pytest.approx(2.8284, abs=1e-4))
    assert row.correct("add").mean == 92.0
    assert row.bits_per_byte.mean == 1.5
    assert Row("model", (score,)).mean.spread is None


@pytest.mark.parametrize("width", [60, 80, 200])
def test_nothing_is_wider_than_the_terminal(ran, width):
    written = io.StringIO()
    console = Console(written, width=width)
    curve = Curve(
        "dare+ties of all three", ((0.0, MeanScore(100.0, None)), (0.95, MeanScore(3.2, 1.0)))
    )
    result = replace(ran[0], curves=(curve,) * 3, output=None)
    print_document(console, replace(story.outcome(result, ""), steps={}))
    print_document(console, story.opening(1, [Texts("say", ("", "\0", "x"))]))
    lines = written.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    assert any(line.count("100.0") == 3 for line in lines)


def test_a_folder_that_cannot_be_made_is_refused_at_once(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match="file/demo"):
        run_demo(Console(quiet=True), output=tmp_path / "file" / "demo")
