"""What people met who tried a search for the first time."""

from __future__ import annotations

import io
import linecache
import tracemalloc
from contextlib import closing
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
import study_sample as sample

import dare
from dare.cli import main
from dare.cli.search import parse_over
from dare.documents.console import Console
from dare.documents.terminal import print_document
from dare.errors import InputError, OutputError, RecipeError
from dare.recipe.recipe import Recipe
from dare.studies.conclusions import conclude
from dare.studies.document import read_result, study_document
from dare.studies.evaluators import source_digest
from dare.studies.results import Estimate, Scored, State, Trial
from dare.studies.searching import trial_line
from dare.studies.space import Space, is_random
from dare.studies.study import BASELINE, Study
from helpers import save

MENDED = sample.CHARTER
CHARTER = replace(MENDED, evaluator="scor.py:score")


@pytest.mark.parametrize("name", ["what?.db", "100%.db", "a%20b.db", "größe #1.db"])
def test_a_study_lies_where_it_was_asked_for(tmp_path: Path, name: str):
    Study(tmp_path / name, CHARTER).close()
    assert [path.name for path in tmp_path.iterdir()] == [name]
    with closing(Study(tmp_path / name)) as study:
        assert study.charter == CHARTER


def test_a_study_that_somebody_has_just_begun_is_not_replaced(tmp_path: Path):
    with closing(Study(tmp_path / "study.db", CHARTER)) as study:
        with pytest.raises(InputError, match=r"(?s)score.*--study"):
            Study(tmp_path / "study.db", MENDED)
        assert study.note("charter") == CHARTER.document


def test_a_study_that_scored_nothing_can_be_put_right(tmp_path: Path):
    path = tmp_path / "study.db"
    with closing(Study(path, CHARTER)) as study:
        study.keep("starts", [{"scale": 0.5}])
        study.take_beside(BASELINE, {"base": {}}).end(State.FAILED, message="there is no such file")
        study.take_beside(BASELINE, {"average": {}})
    with closing(Study(path, MENDED)) as study:
        assert study.charter == MENDED
        assert (study.note("starts"), study.beside(BASELINE)) == (None, [])
        claim = study.take_beside(BASELINE, {"base": {}})
        claim.end(State.DONE, scored=Scored({"score": 1.0}), objective=1.0)
    with pytest.raises(InputError, match=r"evaluator: score\.py:score before, scor\.py"):
        Study(path, CHARTER)


def test_a_study_that_somebody_works_on_is_left_alone(tmp_path: Path, monkeypatch):
    path = tmp_path / "study.db"
    with closing(Study(path, CHARTER)) as study:
        study.take_beside(BASELINE, {"base": {}})
    monkeypatch.setattr("dare.studies.study.Presence.is_alive", lambda _presence, _mark: True)
    with pytest.raises(InputError, match="--study"):
        Study(path, MENDED)


@pytest.mark.parametrize(
    ("settings", "is_drawn"),
    [
        ({"drop_rate": 0.0}, False),
        ({"drop_rate": [0.0, 0.5]}, True),
        ({"drop_rate": 0.0, "embedding_drop_rate": 0.5}, True),
        ({"drop_rate": 0.0, "drop_rate.code": [0.0, 0.1]}, True),
        ({"method": "trim+sum", "keep_ratio": 0.5}, False),
    ],
)
def test_a_setting_that_drops_anywhere_is_tried_with_every_seed(settings, is_drawn):
    recipe = Recipe(base="base", models=["math", "code"], method="dare+sum")
    assert is_random(Space(recipe, {}).candidate(settings)) is is_drawn


def test_no_digit_of_a_score_is_cut():
    data = sample.make_search()
    found = sample.make_conclusion(data)
    small = replace(found.ranking[0], objective=Estimate(-0.003206, -0.003395, -0.003012))
    small = replace(small, scores=dict.fromkeys(small.scores, -0.00256))
    console = Console(io.StringIO(), width=100)
    print_document(console, study_document(data, replace(found, ranking=(small,)), rows=5))
    (row,) = (line for line in console.file.getvalue().splitlines() if "-0.00256" in line)
    assert "-0.003206   -0.003395 … -0.003012   -0.00256   -0.00256" in row


def test_lists_over_the_layers_are_short_in_the_lines_of_a_search():
    trial = Trial(0, {"drop_rate": [0.3541289003166236, 0.5]}, 42, State.DONE, objective=0.25)
    assert trial_line(trial) == "trial 0, drop_rate=[0.3541, 0.5] seed=42: 0.25, 0.0 s"


def save_models(folder: Path) -> Recipe:
    values = {"base": 0.0, "math": 1.0, "code": 2.0}
    files = [
        save(folder / f"{name}.safetensors", {"w": np.full(8, value, np.float32)})
        for name, value in values.items()
    ]
    return Recipe(base=files[0], models=files[1:], method="sum")


def search_scales(folder: Path, **more) -> dare.SearchResult:
    """Over three scales, by the mean of all weights; the study lies in the folder."""
    usual = {"evaluate": lambda tensors: float(tensors["w"].mean())}
    usual |= {"study": folder / "s.db", "verbose": False}
    return dare.search(save_models(folder), {"scale": (0.5, 1.0, 1.5)}, **(usual | more))


def test_a_study_knows_its_plan_while_baselines_are_scored(tmp_path: Path):
    planned = []

    def score(tensors):
        planned.append(read_result(tmp_path / "s.db").data.planned)
        return float(tensors["w"].mean())

    search_scales(tmp_path, evaluate=score)
    assert planned[0] == 3


def test_an_evaluator_that_always_fails_is_quoted_in_one_line(tmp_path: Path):
    def score(tensors):
        raise ValueError(f"no file for {len(tensors)}")

    with pytest.raises(InputError) as raised:
        search_scales(tmp_path, evaluate=score)
    assert "\\n" not in str(raised.value)
    assert str(raised.value).count("no file for 1") == 1


def test_a_range_in_whole_steps_suits_settings_that_are_whole_numbers(tmp_path: Path):
    over = dict([parse_over("n=1:4:step=1"), parse_over("scale=0.1:0.3:step=0.1")])
    found = dare.search(
        save_models(tmp_path).changed(method="nm+sum"),
        over,
        evaluate=lambda tensors: float(tensors["w"].mean()),
        study=tmp_path / "s.db",
        **{"sampler": "tpe", "trials": 12, "verbose": False},
    )
    settings = [trial.settings for trial in found.data.trials]
    assert all(trial.is_done for trial in found.data.trials)
    assert {type(setting["n"]) for setting in settings} == {int}
    assert {setting["scale"] for setting in settings} <= {0.1, 0.2, 0.3}


def test_a_study_without_a_folder_is_told_so(tmp_path: Path):
    with pytest.raises(OutputError, match=r"nowhere/s\.db.*folder"):
        Study(tmp_path / "nowhere" / "s.db", CHARTER)


def test_where_all_break_a_guard_the_guard_is_named(tmp_path: Path):
    found = search_scales(tmp_path, guards=("score:max:-0.5",))
    (said,) = (n for n in found.conclusion.notices if n.code == "all_break_guards")
    assert "scale=1.5" in said.text
    assert "4.5, above -0.5" in said.text
    with pytest.raises(InputError, match="guard"):
        found.to_toml()


def test_settings_that_were_stopped_early_were_to_choose_from_too():
    data = sample.make_search(guards=())
    stopped = {t.settings["scale"] for t in data.trials if t.state is State.STOPPED}
    (said,) = (n.text for n in conclude(data, resamples=50).notices if n.code == "winners_curse")
    assert len(stopped) == 3
    assert "26 candidates" in said  # 21 settings and 5 baselines
    assert "the 23 that were scored on all items" in said


def test_differences_of_the_best_are_written_into_the_recipe(tmp_path: Path):
    data = sample.make_sweep()
    found = replace(search_scales(tmp_path), data=data, conclusion=sample.make_conclusion(data))
    comments = [s for s in found.to_toml().splitlines() if s[:1] == "#"]
    for start in ("# Against sum:", "# Holdout:", "# The best: Merge: dare+sum"):
        assert any(line.startswith(start) for line in comments)


def test_a_search_with_nothing_left_to_do_plans_nothing(tmp_path: Path, capsys):
    for is_planned in (True, False):
        search_scales(tmp_path, verbose=True)
        assert ("trials, about" in capsys.readouterr().err) is is_planned


def test_what_is_one_for_all_layers_takes_no_list():
    space = Space(Recipe(base="base", models=["math"]), {"scale": parse_over("x=1:2:layers=3")[1]})
    with pytest.raises(RecipeError, match=r"over scale.*layers"):
        space.check()


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
    first, same, other = (replace(MENDED, evaluator_code=code) for code in found)
    with closing(Study(tmp_path / "s.db", first)) as study:
        study.take_beside(BASELINE, {"base": {}}).end(
            State.DONE, scored=Scored({"score": 1.0}), objective=1.0
        )
    Study(tmp_path / "s.db", same).close()
    with pytest.raises(InputError, match=r"(?s)score.*--study"):
        Study(tmp_path / "s.db", other)
    Study(tmp_path / "s.db", MENDED).close()  # one without a digest is accepted


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


def test_a_recipe_of_another_study_is_not_replaced(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "score.py").write_text(
        "def score(tensors):\n    return float(tensors['w'].mean())\n"
    )
    recipe = save_models(tmp_path)
    command = [
        "search",
        "--base",
        str(recipe.base),
        "--models",
        *map(str, (m.file for m in recipe.models)),
    ]
    command += [
        "--eval",
        "score.py:score",
        "--over",
        "scale=1,2",
        "--method",
        "sum",
        "--quiet",
    ]
    assert main([*command, "--study", "a.db"]) == 0
    written = (tmp_path / "best.toml").read_text()
    assert main([*command, "--study", "b.db"]) == 1
    assert "--write" in capsys.readouterr().err
    assert not (tmp_path / "b.db").exists()
    assert main([*command, "--study", "a.db"]) == 0
    assert (tmp_path / "best.toml").read_text() == written


def test_a_study_that_was_stopped_says_how_to_continue(tmp_path: Path):
    is_stopped = iter([True])

    def stop(tensors):
        if tensors["w"].mean() == 1.5 * 3 and next(is_stopped, False):
            raise KeyboardInterrupt
        return float(tensors["w"].mean())

    with pytest.raises(KeyboardInterrupt):
        search_scales(tmp_path, evaluate=stop, command="dare search again.toml")
    stopped = read_result(tmp_path / "s.db")
    assert [trial.state for trial in stopped.data.trials] == [State.DONE, State.DONE, State.WAITING]
    assert not stopped.data.is_finished
    document = stopped.document()
    assert document.title == "Not finished yet"
    assert document.steps["resume"] == "dare search again.toml"
    assert search_scales(tmp_path, evaluate=stop).data.is_finished
