from __future__ import annotations

import linecache
import os
import subprocess
import sys
import textwrap
import tracemalloc
from contextlib import closing
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import optuna
import pytest
from study_sample import CHARTER

from dare.cli.search import parse_over
from dare.errors import InputError, OutputError
from dare.recipe.recipe import Recipe
from dare.studies.evaluators import source_digest
from dare.studies.results import Scored, State
from dare.studies.space import Space
from dare.studies.study import BASELINE, Planned, Study  # noqa: F401 (by the processes)

SPACE = Space(
    Recipe(base="base", models=["math", "code"]),
    dict(map(parse_over, ["drop_rate=0.1:0.9", "scale=0.5:2"])),
)


def leave_to_sampler(_place, _found):
    return None


def finish(claim, value: float) -> None:
    scored = Scored({"score": value}, {"score/a": value})
    claim.end(State.DONE, scored=scored, objective=value)


def quality(settings) -> float:
    return -((settings["drop_rate"] - 0.3) ** 2) - (settings["scale"] - 1) ** 2


def run(study: Study, planned: int, *, stop_after: int = 1000) -> list[dict]:
    """Do what there is to do, like a search with one job."""
    done = []
    while len(done) < stop_after:
        claim = study.take_next(SPACE, planned, leave_to_sampler)
        if claim is None:
            break
        done.append(dict(claim.settings))
        finish(claim, quality(claim.settings))
    return done


def start(code: str) -> subprocess.Popen[str]:
    """Start a process that runs code with all that this module has."""
    here, code = str(Path(__file__).parent), textwrap.dedent(code)
    command = f"import sys; sys.path.insert(0, {here!r})\nfrom test_study import *\n{code}"
    return subprocess.Popen([sys.executable, "-c", command], stdout=subprocess.PIPE, text=True)


def test_a_study_that_was_stopped_goes_on_as_if_it_had_not(tmp_path: Path):
    with closing(Study(tmp_path / "whole.db", CHARTER)) as study:
        whole = run(study, 12)
    parts = []
    for count in (4, 7, 100):
        with closing(Study(tmp_path / "parts.db", CHARTER)) as study:
            parts += run(study, 12, stop_after=count)
    assert parts == whole
    assert len({str(settings) for settings in whole}) == 12
    with closing(Study(tmp_path / "parts.db")) as study:
        trials = [placed.trial for placed in study.trials()]
    assert [trial.number for trial in trials] == list(range(12))
    assert all(trial.state is State.DONE for trial in trials)
    assert trials[3].scored == Scored({"score": quality(whole[3])}, {"score/a": quality(whole[3])})


def test_what_a_process_died_over_is_taken_up_with_the_same_settings(tmp_path: Path):
    path = tmp_path / "study.db"
    dead = f"""
        study = Study(Path({str(path)!r}), CHARTER)
        claim = study.take_next(SPACE, 3, leave_to_sampler)
        baseline = study.take_beside(BASELINE, {{"base": {{}}}})
        print(dict(claim.settings), flush=True)
        os._exit(1)
    """
    printed, _ = start(dead).communicate()
    with closing(Study(path, CHARTER)) as study:
        claim = study.take_next(SPACE, 3, leave_to_sampler)
        assert str(dict(claim.settings)) == printed.strip()
        assert claim.number == 0
        again = study.take_beside(BASELINE, {"base": {}})
        assert again is not None
        assert study.take_beside(BASELINE, {"base": {}}) is None
        finish(again, 1.0)
        finish(claim, 1.0)
        assert len(run(study, 3)) == 2
        assert not study.is_busy()


def test_two_processes_share_the_work_and_do_nothing_twice(tmp_path: Path):
    path = tmp_path / "study.db"
    code = f"""
        def grid(place, _found): return Planned({{"drop_rate": 0.1 + place / 50, "scale": 1.0}})
        study = Study(Path({str(path)!r}), CHARTER)
        while (claim := study.take_next(SPACE, 10, grid)) is not None:
            finish(claim, 1.0)
            print(claim.number)
    """
    workers = [start(code) for _ in range(2)]
    numbers = [sorted(map(int, worker.communicate()[0].split())) for worker in workers]
    assert all(worker.returncode == 0 for worker in workers)
    assert sorted(numbers[0] + numbers[1]) == list(range(10))
    with closing(Study(path)) as study:
        rates = [placed.trial.settings["drop_rate"] for placed in study.trials()]
    assert sorted(rates) == pytest.approx([0.1 + place / 50 for place in range(10)])


def test_a_study_has_one_lock_whatever_it_is_called(tmp_path: Path):
    """Two names lead to one study, and the last who works on it removes the lock."""
    (tmp_path / "link.db").symlink_to("study.db")
    with closing(Study(tmp_path / "study.db", CHARTER)) as study:
        code = f"""
            with closing(Study(Path({str(tmp_path / "link.db")!r}))) as study:
                print(study._presence.is_alive({study._presence.mark}))
        """
        assert start(code).communicate()[0] == "True\n"
        assert (tmp_path / "study.db.lock").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.db", "study.db"]


def test_optuna_opens_a_study_and_knows_its_settings(tmp_path: Path):
    """What its dashboard shows is read like this."""
    with closing(Study(tmp_path / "study.db", CHARTER)) as study:
        run(study, 20)
    opened = optuna.load_study(study_name="trials", storage=f"sqlite:///{tmp_path / 'study.db'}")
    assert len(opened.trials) == 20
    assert opened.best_value == max(map(quality, (trial.params for trial in opened.trials)))
    evaluator = optuna.importance.PedAnovaImportanceEvaluator()
    shares = optuna.importance.get_param_importances(opened, evaluator=evaluator)
    assert shares["scale"] > shares["drop_rate"]  # whose range is narrower


def test_what_failed_is_tried_again_if_asked_or_by_the_next_process(tmp_path: Path):
    with closing(Study(tmp_path / "study.db", CHARTER)) as study:
        claim = study.take_next(SPACE, 1, leave_to_sampler)
        claim.end(State.FAILED, message="it crashed", output="Traceback", seconds=1.5)
        assert study.take_next(SPACE, 1, leave_to_sampler) is None
        (placed,) = study.trials()
        assert (placed.trial.state, placed.trial.message) == (State.FAILED, "it crashed")
        assert (placed.trial.output, placed.trial.objective) == ("Traceback", None)
        again = study.take_next(SPACE, 1, leave_to_sampler, retry_before=1)
        assert again.number == 1
        again.end(State.FAILED, message="it crashed again", output="")
        assert study.take_next(SPACE, 1, leave_to_sampler, retry_before=1) is None
        study.take_beside(BASELINE, {"base": {}}).end(State.FAILED, message="it crashed")
        assert study.take_beside(BASELINE, {"base": {}}) is None
    with closing(Study(tmp_path / "study.db", CHARTER)) as study:
        finish(study.take_beside(BASELINE, {"base": {}}), 0.5)
        assert study.take_beside(BASELINE, {"base": {}}) is None
        (found,) = study.beside(BASELINE)
        assert found.objective == 0.5


# ---------------------------------------------------------------- which study it is


@pytest.fixture(scope="module")
def begun(tmp_path_factory) -> Path:
    """A study in which the base is scored."""
    path = tmp_path_factory.mktemp("begun") / "study.db"
    with closing(Study(path, CHARTER)) as study:
        finish(study.take_beside(BASELINE, {"base": {}}), 0.5)
    return path


@pytest.mark.parametrize(
    ("changed", "subject"),
    [
        ({"evaluator": "other.py:score"}, "evaluator: score.py:score before, other.py:score now"),
        ({"seeds": 5}, "seeds: 1 before, 5 now"),
        ({"recipe": {"models": {}}}, "base_file: "),
        ({"space": {"scale": [1.0]}}, r"--over scale: .* before, \[1\] now"),
        ({"objective": {"math": 1.0}}, r"objective\.math: .* now"),
    ],
)
def test_a_study_of_another_search_is_refused(begun: Path, changed, subject):
    with pytest.raises(InputError, match=f"(?s){subject}.*--study"):
        Study(begun, replace(CHARTER, **changed))
    Study(begun, CHARTER).close()


@pytest.mark.parametrize("name", ["what?.db", "100%.db", "a%20b.db", "größe #1.db"])
def test_a_study_lies_where_it_was_asked_for(tmp_path: Path, name: str):
    Study(tmp_path / name, CHARTER).close()
    assert [path.name for path in tmp_path.iterdir()] == [name]
    with closing(Study(tmp_path / name)) as study:
        assert study.charter == CHARTER


MISTAKEN = replace(CHARTER, evaluator="scor.py:score")


def test_a_study_that_scored_nothing_can_be_put_right_unless_somebody_works_on_it(
    tmp_path: Path, monkeypatch
):
    path = tmp_path / "study.db"
    with closing(Study(path, MISTAKEN)) as study:
        with pytest.raises(InputError, match=r"(?s)score.*--study"):
            Study(path, CHARTER)  # somebody has just begun it
        assert study.note("charter") == MISTAKEN.document
        study.keep("starts", [{"scale": 0.5}])
        study.take_beside(BASELINE, {"base": {}}).end(State.FAILED, message="there is no such file")
        study.take_beside(BASELINE, {"average": {}})
    with monkeypatch.context() as patch:
        patch.setattr("dare.studies.study.Presence.is_alive", lambda _presence, _mark: True)
        with pytest.raises(InputError, match="--study"):
            Study(path, CHARTER)
    with closing(Study(path, CHARTER)) as study:
        assert study.charter == CHARTER
        assert (study.note("starts"), study.beside(BASELINE)) == (None, [])
        finish(study.take_beside(BASELINE, {"base": {}}), 1.0)
    with pytest.raises(InputError, match=r"evaluator: score\.py:score before, scor\.py"):
        Study(path, MISTAKEN)


@pytest.mark.parametrize("evaluator", ["{}:score", "cat {} {{model}}", "scoring:score", "object"])
def test_an_evaluator_whose_code_has_changed_is_refused(tmp_path: Path, monkeypatch, evaluator):
    monkeypatch.chdir(tmp_path)
    file, found = tmp_path / "scoring.py", []
    for value in (1, 1, 2):
        file.write_text(f"def score(tensors):\n    return {value}\n")
        linecache.checkcache()
        made: dict = {}
        exec(compile(file.read_text(), file, "exec"), made)  # as if it were imported anew
        found.append(
            source_digest(made["score"] if evaluator == "object" else evaluator.format(file))
        )
    assert found[0] == found[1] != found[2]
    assert source_digest(lambda tensors: 1.0) == source_digest("lm_eval:add@tasks") == ""
    first, same, other = (replace(CHARTER, evaluator_code=code) for code in found)
    with closing(Study(tmp_path / "s.db", first)) as study:
        finish(study.take_beside(BASELINE, {"base": {}}), 1.0)
    Study(tmp_path / "s.db", same).close()
    with pytest.raises(InputError, match=r"(?s)score.*--study"):
        Study(tmp_path / "s.db", other)
    Study(tmp_path / "s.db", CHARTER).close()  # one without a digest is accepted


def test_what_is_no_study_is_refused(tmp_path: Path):
    text, old = tmp_path / "text.db", tmp_path / "old.db"
    text.write_text("not a database, but long enough to be taken for one" * 9)
    with closing(Study(old, CHARTER)) as study:
        study.keep("format", 1)
    for path, charters, said in (
        (tmp_path / "none.db", [None], "there is no study"),
        (text, [None, CHARTER], "is not a study"),
        (old, [CHARTER], r"format 1.*--study"),
        (tmp_path / "nowhere" / "s.db", [CHARTER], r"nowhere/s\.db.*folder"),
    ):
        for charter in charters:
            with pytest.raises((InputError, OutputError), match=said):
                Study(path, charter)
    assert not (tmp_path / "text.db.lock").exists()
    if os.geteuid():
        (tmp_path / "closed").mkdir(mode=0o500)
        with pytest.raises(InputError):
            Study(tmp_path / "closed" / "study.db", CHARTER)


def test_data_files_of_an_evaluator_are_read_by_pieces(tmp_path: Path):
    """The digest is that of the files one after another, and memory does not grow with them."""
    parts = [b"print(1)", b"\1" * (40 << 20), b""]
    files = [tmp_path / f"{number}.txt" for number in range(len(parts))]
    for file, part in zip(files, parts, strict=True):
        file.write_bytes(part)
    tracemalloc.start()
    found = source_digest(f"python {files[0]} --data={files[1]} {files[2]}")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found == sha256(b"\0".join(parts)).hexdigest()
    assert peak < 4 << 20
    assert source_digest(str(files[2])) == ""
