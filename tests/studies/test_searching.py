from __future__ import annotations

import json
import math
import re
import threading
import tomllib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import dare
from dare.cli import main
from dare.cli.search import parse_over
from dare.errors import InputError, RecipeError
from dare.recipe.recipe import Recipe
from dare.studies.document import read_result, study_document
from dare.studies.results import Role, State
from helpers import save

SIZE = 64
GRID = {"scale": (0.5, 1.0)}
BASELINES = ["base", "math alone", "code alone", "average", "sum", "average again"]


def recipes_shown(document):
    """The recipes of a document, by the names of their parts."""
    (section,) = (section for section in document.sections if section.name == "recipe")
    return {code.name: code.text for code in section.parts}


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    """Two fine-tunes, each of which is right about its own half of the weights."""
    chance = np.random.default_rng(0)
    base = chance.normal(size=SIZE).astype(np.float32)
    halves = np.repeat([1, 0], SIZE // 2), np.repeat([0, 1], SIZE // 2)
    files = [save(tmp_path / "base.safetensors", {"layers.0.w": base})]
    for name, half in zip(("math", "code"), halves, strict=True):
        tuned = (base + 0.01 * half).astype(np.float32)
        files.append(save(tmp_path / f"{name}.safetensors", {"layers.0.w": tuned}))
    return Recipe(base=files[0], models=files[1:], method="sum")


class Evaluator:
    """Counts what it scores: how far each weight is from where its fine-tune wants it."""

    def __init__(self, recipe: Recipe, spoil: Callable[[dict, int], Any] | None = None) -> None:
        base = dare.Candidates(recipe).make({"scale": 0.0}).arrays["layers.0.w"]
        self.target = base + np.float32(0.01)
        self.calls = 0
        self.spoil = spoil

    def __call__(self, tensors, items=None):
        self.calls += 1
        off = np.abs(tensors["layers.0.w"] - self.target) / 0.01
        right = {
            f"{'math' if place < SIZE // 2 else 'code'}/{place}": float(max(0.0, 1 - value))
            for place, value in enumerate(off.tolist())
        }
        if items is not None:
            right = {name: right[name] for name in items}
        scores = {
            group: float(np.mean([v for n, v in right.items() if n.startswith(group)]))
            for group in ("math", "code")
        }
        found = {**scores, "items": right}
        return found if self.spoil is None else self.spoil(found, self.calls)


def table(result: dare.SearchResult) -> list[tuple[str, int, float | None]]:
    return [(json.dumps(t.settings), t.seed, t.objective) for t in result.data.trials]


def run(recipe: Recipe, evaluator: Any, study: Path, **more: Any) -> dare.SearchResult:
    asked = {"over": GRID, "verbose": False} | more
    return dare.search(recipe, evaluate=evaluator, study=study, **asked)


def test_a_sweep_scores_baselines_and_every_setting_with_every_seed(recipe, tmp_path):
    asked = {"over": {"scale": (0.5, 1.0), "method": ("sum", "dare+sum")}, "seeds": 2}
    result = run(recipe, Evaluator(recipe), tmp_path / "study.db", **asked)
    assert [trial.name for trial in result.data.baselines] == BASELINES
    by_name = {trial.name: trial.objective for trial in result.data.baselines}
    assert by_name["base"] == pytest.approx(0.0, abs=1e-4)
    assert by_name["math alone"] == pytest.approx(0.5, abs=1e-4)
    assert by_name["sum"] == pytest.approx(1.0, abs=1e-4)
    trials = result.data.trials
    assert len(trials) == 6  # without dropping, another seed changes nothing
    assert [t.seed for t in trials if t.settings["method"] == "dare+sum"] == [42] * 2 + [1042] * 2
    assert result.conclusion.ranking[0].settings == {"scale": 1.0, "method": "sum"}
    assert (result.best.method, result.best.scale) == ("sum", 1.0)
    again = Evaluator(recipe)
    assert table(run(recipe, again, tmp_path / "study.db", **asked)) == table(result)
    assert again.calls == 0


def test_the_same_weights_are_scored_once(recipe, tmp_path):
    evaluator = Evaluator(recipe)
    over = {"weight.math": (0.5, 1.0), "scale": (1.0, 2.0)}
    result = run(recipe, evaluator, tmp_path / "study.db", over=over)
    digests = {trial.digest for trial in (*result.data.baselines, *result.data.trials)}
    assert evaluator.calls == len(digests) + 1  # the average is scored twice on purpose
    same = {
        t.message for t in result.data.trials if t.settings == {"weight.math": 1.0, "scale": 1.0}
    }
    assert same == {"same as sum"}


def test_an_interrupted_search_goes_on_to_the_same_table(recipe, tmp_path, capsys):
    asked = {"over": {"drop_rate": (0.1, 0.3, 0.5), "method": ("dare+sum",)}, "seeds": 2}
    asked["command"] = "dare search again.toml"
    whole = run(recipe, Evaluator(recipe), tmp_path / "whole.db", **asked)

    def interrupt(found, calls):
        if calls == 10:
            raise KeyboardInterrupt
        return found

    first = Evaluator(recipe, interrupt)
    with pytest.raises(KeyboardInterrupt):
        run(recipe, first, tmp_path / "study.db", **asked)
    second, stopped = Evaluator(recipe), read_result(tmp_path / "study.db")
    begun = stopped.data.trials
    assert State.WAITING in {trial.state for trial in begun}  # it was interrupted within a trial
    assert stopped.document().title == "Not finished yet"
    assert stopped.document().steps["resume"] == "dare search again.toml"
    capsys.readouterr()
    result = run(recipe, second, tmp_path / "study.db", **asked, verbose=True)
    lines = capsys.readouterr().err
    assert f"{7 - len(begun)} trials, about" in lines
    counts = [int(n) for n in re.findall(r"^(\d+) of 6: trial", lines, re.MULTILINE)]
    assert counts == list(range(len(begun), 7))
    assert table(result) == table(whole)
    assert result.conclusion == whole.conclusion
    assert [trial.number for trial in result.data.trials] == list(range(6))
    scored = {t.digest for t in (*whole.data.baselines, *whole.data.trials)}
    assert first.calls - 1 + second.calls == len(scored) + 1
    run(recipe, second, tmp_path / "study.db", **asked, verbose=True)
    assert "trials, about" not in capsys.readouterr().err  # nothing is left to do


def test_a_crash_or_other_scores_cost_one_trial_and_it_can_be_tried_again(recipe, tmp_path):
    def crash(found, calls):
        if found["math"] > 0.99:
            raise ValueError("no such luck")
        return {"maths": 0.5, "code": 0.5, "items": found["items"]} if calls == 7 else found

    over = {"scale": (0.4, 0.7, 1.0)}
    result = run(recipe, Evaluator(recipe, crash), tmp_path / "study.db", over=over)
    odd, failed = (trial for trial in result.data.trials if trial.state is State.FAILED)
    assert [trial.settings for trial in (odd, failed)] == [{"scale": 0.4}, {"scale": 1.0}]
    assert "maths" in odd.message
    assert "no such luck" in failed.message
    assert failed.objective is None
    assert result.conclusion.ranking[0].settings == {"scale": 0.7}
    unchanged = run(recipe, Evaluator(recipe), tmp_path / "study.db", over=over)
    assert unchanged.conclusion.ranking[0].settings == {"scale": 0.7}
    again = run(recipe, Evaluator(recipe), tmp_path / "study.db", over=over, retry=True)
    assert again.conclusion.ranking[0].settings == {"scale": 1.0}
    assert len(again.data.trials) == 3


def test_an_evaluator_that_never_works_is_told_at_once(recipe, tmp_path):
    def fail(_found, _calls):
        raise ValueError("no file for 1")

    spoilt = [lambda _f, _c, given=given: given for given in ({}, {"math": math.nan}, None)]
    for spoil in (*spoilt, fail):
        broken = Evaluator(recipe, spoil)
        with pytest.raises(InputError, match=r"(?s)^base .*correct the evaluator") as raised:
            run(recipe, broken, tmp_path / "study.db")
        assert broken.calls == 1
    assert "\\n" not in str(raised.value)
    assert str(raised.value).count("no file for 1") == 1
    # and the study is of use when it is mended
    planned = []

    def look(found, _calls):
        planned.append(read_result(tmp_path / "study.db").data.planned)
        return found

    assert run(recipe, Evaluator(recipe, look), tmp_path / "study.db").conclusion.best is not None
    assert planned[0] == 2  # while baselines are scored


def test_other_items_each_time_are_noticed(recipe, tmp_path):
    def rename(found, calls):
        return found | {"items": {f"{name}-{calls}": v for name, v in found["items"].items()}}

    result = run(recipe, Evaluator(recipe, rename), tmp_path / "study.db", race=True)
    assert [notice.code for notice in result.data.notices] == ["items_differ"]
    assert result.conclusion.best is not None
    assert all(trial.is_done for trial in result.data.trials)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"objective": ["math", "cod"]}, "'cod'.*'code'"),
        ({"guards": ("cod:min:0.5",)}, "cod"),
        ({"objective": "mean(math, code)"}, "objective.*math = 1.0"),
        ({"over": {"scale": ()}}, "scale"),
        ({"over": None, "sampler": "grid"}, "sampler.*--over"),
        ({"over": None, "trials": 5}, "trials.*--over"),
        ({"jobs": 2}, "jobs.*by name"),
        ({"sampler": "grid", "over": {"scale": {"from": 0.5, "to": 1.0}}}, "grid.*tpe"),
    ],
)
def test_what_makes_no_sense_is_refused(recipe, tmp_path, more, message):
    with pytest.raises(RecipeError, match=message):
        run(recipe, Evaluator(recipe), tmp_path / "study.db", **more)


def test_racing_scores_bad_candidates_on_fewer_items(recipe, tmp_path):
    evaluator = Evaluator(recipe)
    over = {"scale": (1.5, 0.1, 0.9, 0.2, 1.0, 0.3, 0.4, 0.5)}
    result = run(recipe, evaluator, tmp_path / "study.db", over=over, race=True)
    states = [trial.state for trial in result.data.trials]
    assert states.count(State.STOPPED) >= 3
    assert result.conclusion.ranking[0].settings["scale"] == 1.0
    stopped = [t for t in result.data.trials if t.state is State.STOPPED]
    assert all(0 < len(trial.scored.items) < SIZE for trial in stopped)


@pytest.mark.parametrize(("objective", "scale"), [("math", 1.0), (["math=-1"], 0.5)])
def test_weights_decide_what_is_best(recipe, tmp_path, objective, scale):
    result = run(recipe, Evaluator(recipe), tmp_path / "study.db", objective=objective)
    assert result.conclusion.ranking[0].settings == {"scale": scale}


def test_the_holdout_is_run_once_on_winner_runner_up_and_baselines(recipe, tmp_path):
    study, holdout = tmp_path / "study.db", Evaluator(recipe)
    more = {"over": {"scale": (0.55, 0.6, 0.9)}, "guards": ("math:max:0.7",)}
    result = run(recipe, Evaluator(recipe), study, holdout=holdout, **more)
    names = [trial.name for trial in result.data.holdout]
    assert names[:2] == ["winner", "runner-up"]
    broken = [trial.label for trial in result.data.all_trials if trial.broken]
    assert broken == ["math alone", "sum", "trial 2"]
    assert set(names[2:]) == set(BASELINES) - {"average again"}
    assert result.conclusion.holdout.objective.value == pytest.approx(0.6, abs=1e-4)
    assert result.conclusion.holdout.looks == 1
    comments = [line for line in result.to_toml().splitlines() if line[:1] == "#"]
    for start in ("# Against base:", "# Holdout:", "# The best: Merge math and"):
        assert any(line.startswith(start) for line in comments)
    calls = holdout.calls
    run(recipe, Evaluator(recipe), study, holdout=holdout, **more)
    assert holdout.calls == calls


def test_models_that_have_changed_are_noticed(recipe, tmp_path):
    evaluator = Evaluator(recipe)
    run(recipe, evaluator, tmp_path / "study.db")
    save(tmp_path / "math.safetensors", {"layers.0.w": np.zeros(SIZE, np.float32)})
    with pytest.raises(InputError, match=r"study\.db.*--study"):
        run(recipe, evaluator, tmp_path / "study.db")


def test_a_sampler_starts_with_the_recipe_and_learns(recipe, tmp_path):
    over = {"scale": {"from": 0.0, "to": 2.0}, "method": ("sum", "dare+sum", "linear")}
    more = {"over": over, "sampler": "tpe", "trials": 12}
    result = run(recipe, Evaluator(recipe), tmp_path / "study.db", **more)
    assert len(result.data.trials) == 12
    assert result.data.trials[0].settings == {"scale": 1.0, "method": "sum"}
    assert result.conclusion.best.objective.value > 0.9
    longer = run(recipe, Evaluator(recipe), tmp_path / "study.db", **more | {"trials": 13})
    assert table(longer)[:12] == table(result)
    assert len(longer.data.trials) == 13


def test_two_searches_on_one_new_study_in_one_process_share_the_work(recipe, tmp_path):
    evaluator, scored = Evaluator(recipe), []

    def slowly(tensors):
        scored.append(tensors["layers.0.w"].tobytes())
        read_result(tmp_path / "study.db")  # opens the study and closes it again
        return evaluator(tensors)

    over = {"scale": (0.3, 0.5, 0.7, 0.9, 1.1)}
    begin = threading.Barrier(2)

    def start(_place: int) -> dare.SearchResult:
        begin.wait()
        return run(recipe, slowly, tmp_path / "study.db", over=over)

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(start, range(2))
    assert table(first) == table(second)
    assert [trial.state for trial in first.data.trials] == [State.DONE] * 5
    assert len(scored) == len(set(scored)) + 1  # the average is scored twice on purpose


def test_models_called_like_roles_are_searched_like_others(recipe, tmp_path):
    names = ("winner", "average")
    files = [
        entry.file.rename(tmp_path / f"{name}.safetensors")
        for name, entry in zip(names, recipe.models, strict=True)
    ]
    named = Recipe(base=recipe.base, models=files, method="sum")
    guards = ("math:keep:0.9",)
    result = run(
        named, Evaluator(named), tmp_path / "s.db", holdout=Evaluator(named), guards=guards
    )
    singles = [t.name for t in result.data.baselines if t.role is Role.SINGLE]
    assert singles == ["winner alone", "average alone"]
    found = result.conclusion
    assert (found.holdout.looks, found.noise, found.best.broken) == (1, 0.0, ())
    assert found.holdout.validation == pytest.approx(1.0, abs=1e-4)
    assert "guard_unchecked" not in {notice.code for notice in found.notices}


@pytest.fixture
def strange(recipe, tmp_path) -> Recipe:
    """With a third model that comes from elsewhere."""
    odd = np.random.default_rng(1).normal(size=SIZE).astype(np.float32)
    file = save(tmp_path / "odd.safetensors", {"layers.0.w": odd})
    models = [*(entry.file for entry in recipe.models), file]
    return Recipe(base=recipe.base, models=models, method="linear")


def test_models_are_left_out_where_that_is_better(strange, tmp_path):
    over = {"include": (True, False), "method": ("linear", "sum")}
    result = run(strange, Evaluator(strange), tmp_path / "study.db", over=over)
    assert len(result.data.trials) == 2 * (2**3 - 1)
    best = result.conclusion.best.settings
    assert best == {"method": "sum", "include.math": True, "include.code": True} | {
        "include.odd": False
    }
    assert [entry.name for entry in result.best.models] == ["math", "code"]
    average = dare.Candidates(strange).make({"include.odd": False})
    pair = strange.changed(models=strange.models[:2])
    assert average.digest == dare.Candidates(pair).make().digest


def test_without_settings_the_usual_merges_are_tried_without_strangers(strange, tmp_path):
    study, evaluator = tmp_path / "study.db", Evaluator(strange)
    result = run(strange, evaluator, study, over=None)
    assert result.data.left_out == ("odd",)
    settings = [trial.settings for trial in result.data.trials]
    assert all(tried["include.odd"] is False for tried in settings)
    assert {tried["scale"] for tried in settings if tried["method"] == "linear"} >= {0.5, 1.0, 2.2}
    methods = {tried["method"] for tried in settings}
    assert methods == {"linear", "tsv", "ties", "dare+linear", "dare+ties"}
    assert len({json.dumps(tried) for tried in settings}) == len(settings)
    best = result.conclusion.best
    assert (best.settings["method"], best.objective.value) == ("ties", pytest.approx(1.0))
    assert [entry.name for entry in result.best.models] == ["math", "code"]
    calls = evaluator.calls
    again = run(strange, evaluator, study, over=None)
    assert (evaluator.calls, again.conclusion) == (calls, result.conclusion)


def test_less_time_means_fewer_tries_and_more_time_the_others(recipe, tmp_path):
    study, evaluator = tmp_path / "study.db", Evaluator(recipe)
    few = run(recipe, evaluator, study, over=None, minutes=1e-6)
    assert len(few.data.trials) == few.data.planned == 6
    assert few.data.is_finished
    more = run(recipe, evaluator, study, over=None, minutes=60)
    assert len(more.data.trials) > 15
    assert table(more)[:6] == table(few)


@pytest.mark.parametrize(("given", "has_holdout", "planned"), [(10.5, False, 8), (13.5, True, 8)])
def test_a_search_plans_as_many_trials_as_its_minutes_allow(
    recipe, tmp_path, monkeypatch, given, has_holdout, planned
):
    seconds = 0.0

    def score(tensors, items=None):
        nonlocal seconds
        seconds += 1.0 if items is None else len(items) / SIZE
        return evaluator(tensors, items)

    evaluator = Evaluator(recipe)
    clock = SimpleNamespace(perf_counter=lambda: seconds, monotonic=lambda: seconds)
    monkeypatch.setattr("dare.studies.searching.time", clock)
    holdout = Evaluator(recipe) if has_holdout else None
    result = run(
        recipe, score, tmp_path / "study.db", over=None, minutes=given / 60, holdout=holdout
    )
    # Six baselines took a second each, and half of that on the holdout, as a trial is expected to.
    assert result.data.planned == len(result.data.trials) == planned
    assert seconds <= given


RIGHT = {0.9: (58, 30), 1.0: (57, 55)}
"""By scale: right items of 60 where the best is chosen, and on the holdout; others have ten."""


def test_the_holdout_reports_and_does_not_choose(recipe, tmp_path, capsys):
    base = dare.Candidates(recipe).make({"scale": 0.0}).arrays["layers.0.w"].copy()

    def score(tensors, place: int):
        scale = round(float((tensors["layers.0.w"] - base).mean() / 0.01), 2)
        right = RIGHT.get(scale, (10, 10))[place]
        return {"items": {f"add/{n}": float(n < right) for n in range(60)}}

    study = tmp_path / "study.db"
    result = run(
        recipe,
        lambda tensors: score(tensors, 0),
        study,
        over={"scale": (0.9, 1.5)},
        holdout=lambda tensors: score(tensors, 1),
    )
    found = result.conclusion
    assert {d.other: d.verdict for d in found.holdout.against}["sum"] == "worse"
    assert "holdout_disagrees" in {notice.code for notice in found.notices}
    assert (found.best.settings, result.best.scale) == ({"scale": 0.9}, 0.9)
    assert result.to_dict()["recipes"]["best"] == result.best.to_document()
    assert main(["search", "best", str(study)]) == 0
    assert tomllib.loads(capsys.readouterr().out)["scale"] == 0.9
    shown = recipes_shown(study_document(result.data, found))["best-recipe"]
    assert tomllib.loads(shown)["scale"] == 0.9


@pytest.mark.parametrize("wanted", ["base", "math"])
def test_where_a_model_as_it_is_is_best_nothing_is_merged(recipe, tmp_path, capsys, wanted):
    base = dare.Candidates(recipe).make({"scale": 0.0}).arrays["layers.0.w"].copy()

    def score(tensors):
        moved = tensors["layers.0.w"] - base
        best = not moved.any() if wanted == "base" else moved[0] > 0.005 and moved[-1] == 0
        right = 59 if best else 20
        return {"items": {f"add/{n}": float(n < right) for n in range(60)}}

    result = run(recipe, score, tmp_path / "study.db")
    assert result.best is None
    assert result.conclusion.best.baseline.partition(" ")[0] == wanted
    assert main(["search", "best", str(tmp_path / "study.db")]) == 1
    assert wanted in capsys.readouterr().err
    assert result.to_dict()["recipes"] == {"best": None}
    assert recipes_shown(result.document()) == {}


def test_a_range_in_whole_steps_suits_settings_that_are_whole_numbers(recipe, tmp_path):
    over = dict([parse_over("n=1:4:step=1"), parse_over("scale=0.1:0.3:step=0.1")])
    more = {"over": over, "sampler": "tpe", "trials": 12}
    found = run(recipe.changed(method="nm+sum"), Evaluator(recipe), tmp_path / "s.db", **more)
    settings = [trial.settings for trial in found.data.trials]
    assert all(trial.is_done for trial in found.data.trials)
    assert {type(setting["n"]) for setting in settings} == {int}
    assert {setting["scale"] for setting in settings} <= {0.1, 0.2, 0.3}


def test_a_recipe_of_another_study_is_not_replaced(recipe, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    score = "def score(tensors):\n    return float(tensors['layers.0.w'].mean())\n"
    Path("score.py").write_text(score)
    command = ["search", "--base", "base.safetensors", "--models", "math.safetensors"]
    command += ["code.safetensors", "--eval", "score.py:score", "--over", "scale=1,2"]
    command += ["--method", "sum", "--quiet", "--study"]
    assert main([*command, "a.db"]) == 0
    written = Path("best.toml").read_text()
    assert main([*command, "b.db"]) == 1
    assert "--write" in capsys.readouterr().err
    assert not Path("b.db").exists()
    assert main([*command, "a.db"]) == 0
    assert Path("best.toml").read_text() == written
    Path("own.toml").write_text('base = "base.safetensors"\nmodels = ["math.safetensors"]\n')
    own = ["search", "own.toml", "--eval", "score.py:score", "-o", "own", "--overwrite"]
    assert main(own) == 2  # even then, the recipe that was given stays
    assert "--write" in capsys.readouterr().err
