from __future__ import annotations

import json
import re
import threading
import tomllib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dare
from dare.cli import main
from dare.errors import InputError, RecipeError
from dare.recipe.recipe import Recipe
from dare.studies.document import read_result, study_document
from dare.studies.results import Role, State
from helpers import save

SIZE = 64
GRID = {"scale": (0.5, 1.0)}
BASELINES = ["base", "math alone", "code alone", "average", "sum", "sum × 0.4", "average again"]


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
    asked = {"over": GRID, "advice": False, "verbose": False} | more
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
    best = result.conclusion.best
    assert best.settings == {"scale": 1.0, "method": "sum"}
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
    whole = run(recipe, Evaluator(recipe), tmp_path / "whole.db", **asked)

    def interrupt(found, calls):
        if calls == 10:
            raise KeyboardInterrupt
        return found

    first = Evaluator(recipe, interrupt)
    with pytest.raises(KeyboardInterrupt):
        run(recipe, first, tmp_path / "study.db", **asked)
    second, begun = Evaluator(recipe), read_result(tmp_path / "study.db").data.trials
    assert State.WAITING in {trial.state for trial in begun}  # it was interrupted within a trial
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


def test_a_crash_costs_one_trial_and_can_be_tried_again(recipe, tmp_path):
    def crash(found, _calls):
        if found["math"] > 0.99:
            raise ValueError("no such luck")
        return found

    over = {"scale": (0.5, 0.7, 1.0)}
    result = run(recipe, Evaluator(recipe, crash), tmp_path / "study.db", over=over)
    failed = [trial for trial in result.data.trials if trial.state is State.FAILED]
    assert [trial.settings for trial in failed] == [{"scale": 1.0}]
    assert "no such luck" in failed[0].message
    assert failed[0].objective is None
    assert result.conclusion.best.settings == {"scale": 0.7}
    unchanged = run(recipe, Evaluator(recipe), tmp_path / "study.db", over=over)
    assert unchanged.conclusion.best.settings == {"scale": 0.7}
    again = run(recipe, Evaluator(recipe), tmp_path / "study.db", over=over, retry=True)
    assert again.conclusion.best.settings == {"scale": 1.0}
    assert len(again.data.trials) == 3


def test_an_evaluator_that_never_works_is_told_at_once(recipe, tmp_path):
    for returned in ({}, {"math": float("nan")}, None):
        broken = Evaluator(recipe, lambda _found, _calls, returned=returned: returned)
        with pytest.raises(InputError, match=r"(?s)^base .*correct the evaluator"):
            run(recipe, broken, tmp_path / "study.db")
        assert broken.calls == 1
    # and the study is of use when it is mended
    assert run(recipe, Evaluator(recipe), tmp_path / "study.db").conclusion.best is not None


def test_other_items_each_time_are_noticed(recipe, tmp_path):
    def rename(found, calls):
        return found | {"items": {f"{name}-{calls}": v for name, v in found["items"].items()}}

    result = run(recipe, Evaluator(recipe, rename), tmp_path / "study.db", race=True)
    assert [notice.code for notice in result.data.notices] == ["items_differ"]
    assert result.conclusion.best is not None
    assert all(trial.is_done for trial in result.data.trials)


def test_other_scores_in_a_trial_cost_that_trial(recipe, tmp_path):
    def rename(found, calls):
        return found if calls != 8 else {"maths": 0.5, "code": 0.5, "items": found["items"]}

    over = {"scale": (0.7, 0.8)}
    result = run(recipe, Evaluator(recipe, rename), tmp_path / "study.db", over=over)
    assert [t.state for t in result.data.trials].count(State.FAILED) == 1


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


def test_guards_decide_before_scores(recipe, tmp_path):
    over = {"weight.math": (0.2, 0.6, 1.0), "weight.code": (1.0,)}
    guards = ("code:keep:0.95", "math:max:0.7")
    result = run(recipe, Evaluator(recipe), tmp_path / "study.db", over=over, guards=guards)
    assert result.conclusion.best.settings["weight.math"] == 0.6
    broken = [t for t in result.data.trials if t.broken]
    assert [t.settings["weight.math"] for t in broken] == [1.0]


def test_racing_scores_bad_candidates_on_fewer_items(recipe, tmp_path):
    evaluator = Evaluator(recipe)
    over = {"scale": (1.5, 0.1, 0.9, 0.2, 1.0, 0.3, 0.4, 0.5)}
    result = run(recipe, evaluator, tmp_path / "study.db", over=over, race=True)
    states = [trial.state for trial in result.data.trials]
    assert states.count(State.STOPPED) >= 3
    assert result.conclusion.best.settings["scale"] == 1.0
    stopped = [t for t in result.data.trials if t.state is State.STOPPED]
    assert all(0 < len(trial.scored.items) < SIZE for trial in stopped)


@pytest.mark.parametrize(
    ("objective", "scale"), [("math", 1.0), ({"math": 1, "code": 1}, 1.0), (["math=-1"], 0.5)]
)
def test_weights_decide_what_is_best(recipe, tmp_path, objective, scale):
    result = run(recipe, Evaluator(recipe), tmp_path / "study.db", objective=objective)
    assert result.conclusion.best.settings == {"scale": scale}


def test_the_holdout_is_run_once_on_winner_runner_up_and_baselines(recipe, tmp_path):
    holdout = Evaluator(recipe)
    result = run(recipe, Evaluator(recipe), tmp_path / "study.db", holdout=holdout)
    names = [trial.name for trial in result.data.holdout]
    assert names[:2] == ["winner", "runner-up"]
    assert set(names[2:]) == set(BASELINES) - {"average again"}
    assert result.conclusion.holdout.objective.value == pytest.approx(1.0, abs=1e-4)
    assert result.conclusion.holdout.looks == 1
    calls = holdout.calls
    run(recipe, Evaluator(recipe), tmp_path / "study.db", holdout=holdout)
    assert holdout.calls == calls


def test_models_that_have_changed_are_noticed(recipe, tmp_path):
    evaluator = Evaluator(recipe)
    run(recipe, evaluator, tmp_path / "study.db")
    save(tmp_path / "math.safetensors", {"layers.0.w": np.zeros(SIZE, np.float32)})
    with pytest.raises(InputError, match=r"study\.db.*--study"):
        run(recipe, evaluator, tmp_path / "study.db")


def test_a_sampler_starts_with_the_advice_and_the_recipe_and_learns(recipe, tmp_path):
    over = {"scale": {"from": 0.0, "to": 2.0}, "method": ("sum", "dare+sum", "linear")}
    more = {"over": over, "sampler": "tpe", "trials": 12, "advice": True}
    result = run(recipe, Evaluator(recipe), tmp_path / "study.db", **more)
    assert len(result.data.trials) == 12
    assert result.data.baselines[-2].name == "advice"
    assert result.data.trials[0].settings["scale"] == 1.0
    assert result.conclusion.best.objective.value > 0.9
    longer = run(recipe, Evaluator(recipe), tmp_path / "study.db", **more | {"trials": 13})
    assert table(longer)[:12] == table(result)
    assert len(longer.data.trials) == 13


def test_the_advice_is_scored_with_what_the_recipe_allows(recipe, tmp_path):
    torch = pytest.importorskip("torch")
    weights = dare.Candidates(recipe).make({"include.code": False}).arrays["layers.0.w"]
    torch.save({"layers.0.w": torch.from_numpy(weights.copy())}, tmp_path / "math.pt")
    models = [tmp_path / "math.pt", recipe.models[1].file]
    pickled = Recipe(base=recipe.base, models=models, method="sum", allow_pickle=True)
    result = run(pickled, Evaluator(recipe), tmp_path / "study.db", over=None, advice=True)
    assert {trial.name: trial.message for trial in result.data.baselines if not trial.is_done} == {}
    assert result.data.advice["allow_pickle"] is True


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
    folder = tmp_path / "models"
    folder.mkdir()
    names = ("winner", "average")
    files = [
        entry.file.rename(folder / f"{n}.safetensors")
        for n, entry in zip(names, recipe.models, strict=True)
    ]
    named = Recipe(base=recipe.base, models=files, method="sum")
    holdout = Evaluator(named)
    result = run(named, Evaluator(named), tmp_path / "study.db", holdout=holdout)
    assert [t.name for t in result.data.baselines if t.role is Role.SINGLE] == [
        "winner alone",
        "average alone",
    ]
    assert result.conclusion.holdout.looks == 1
    assert result.conclusion.holdout.validation == pytest.approx(1.0, abs=1e-4)


@pytest.fixture
def strange(recipe, tmp_path, monkeypatch) -> Recipe:
    """With a third model that comes from elsewhere, which the advice leaves out."""
    odd = np.random.default_rng(1).normal(size=SIZE).astype(np.float32)
    file = save(tmp_path / "odd.safetensors", {"layers.0.w": odd})
    models = [*(entry.file for entry in recipe.models), file]
    advised = recipe, ("odd",), None
    monkeypatch.setattr("dare.studies.searching.advised_for", lambda *_: advised)
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
    pair = strange.model_copy(update={"models": strange.models[:2]})
    assert average.digest == dare.Candidates(pair).make().digest


def test_the_average_without_strangers_is_a_baseline(strange, tmp_path):
    evaluator = Evaluator(strange)
    result = run(strange, evaluator, tmp_path / "study.db", advice=True)
    found = {trial.name: trial.objective for trial in result.data.baselines}
    assert found["average without strangers"] == pytest.approx(0.5, abs=1e-4)
    assert result.data.left_out == ("odd",)
    pair = strange.model_copy(update={"models": strange.models[1:]})  # one remains: itself
    one = run(pair, evaluator, tmp_path / "pair.db", advice=True)
    assert "average without strangers" not in {trial.name for trial in one.data.baselines}


def test_without_a_space_the_baselines_are_the_candidates(strange, tmp_path, capsys):
    study, asked = tmp_path / "study.db", {"over": None, "advice": True}
    evaluator, holdout = Evaluator(strange), Evaluator(strange)
    result = run(strange, evaluator, study, holdout=holdout, **asked)
    names = [trial.name for trial in result.data.baselines]
    assert names == [
        *("base", "math alone", "code alone", "odd alone", "average"),
        *("average without strangers", "sum", "sum × 0.4", "advice", "average again"),
    ]  # the recipe itself is the average
    assert (result.data.trials, result.data.planned) == ((), len(names))
    assert result.conclusion.chosen.baseline == "advice"
    assert [entry.name for entry in result.best.models] == ["math", "code"]
    assert result.to_dict()["answer"] == str(result)
    assert {trial.name for trial in result.data.holdout} == set(names) - {"average again"}
    assert main(["search", "best", str(study)]) == 0
    assert tomllib.loads(capsys.readouterr().out)["method"] == "sum"
    assert main(["search", "show", str(study), "--watch"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert f"{len(names)} of {len(names)} baselines" in printed
    assert "best-recipe" in recipes_shown(result.document())
    calls = evaluator.calls
    run(strange, evaluator, study, holdout=holdout, **asked)
    assert evaluator.calls == calls
    other = strange.model_copy(update={"method": "ties"})
    own = run(other, evaluator, tmp_path / "other.db", **asked)
    assert "recipe" in {ranked.baseline for ranked in own.conclusion.baselines}


@pytest.mark.parametrize("wanted", ["base", "math"])
def test_without_a_space_nothing_is_merged_that_is_no_better(recipe, tmp_path, capsys, wanted):
    base = dare.Candidates(recipe).make({"scale": 0.0}).arrays["layers.0.w"].copy()

    def score(tensors):
        moved = tensors["layers.0.w"] - base
        right = 55 if moved[0] > 0.005 or wanted == "base" else 20  # all that math is in whole
        return {"items": {f"add/{n}": float(n < right) for n in range(60)}}

    study = tmp_path / "study.db"
    result = run(recipe, score, study, over=None)
    assert (result.best, result.simplest) == (None, None)
    assert result.conclusion.chosen.baseline.partition(" ")[0] == wanted
    document = result.to_dict()
    assert document["recipes"] == {"best": None, "simplest": None}
    assert "do not merge" in document["answer"]
    for more in ([], ["--simplest"], ["--write", str(tmp_path / "best.toml")]):
        assert main(["search", "best", str(study), *more]) == 1
        assert f"{wanted} as it is" in capsys.readouterr().err
    assert not (tmp_path / "best.toml").exists()
    assert "best-recipe" not in recipes_shown(result.document())


RIGHT = {0.9: (58, 30), 1.0: (57, 55)}
"""By scale: right items of 60 where the best is chosen, and on the holdout; others have ten."""


def test_what_the_holdout_calls_worse_is_never_the_recipe(recipe, tmp_path, capsys):
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
    assert found.best.settings == {"scale": 0.9}
    assert {d.other: d.verdict for d in found.holdout.against}["sum"] == "worse"
    assert (found.chosen.baseline, result.best.scale) == ("sum", 1.0)
    assert result.best == result.simplest
    assert result.to_dict()["recipes"]["best"] == result.best.to_document()
    assert str(result).startswith("sum: 0.95")
    for more in ([], ["--simplest"]):
        capsys.readouterr()
        assert main(["search", "best", str(study), *more]) == 0
        written = tomllib.loads(capsys.readouterr().out)
        assert (written["method"], "scale" in written) == ("sum", False)
    shown = recipes_shown(study_document(result.data, found))["best-recipe"]
    assert "scale" not in tomllib.loads(shown)


def test_where_a_single_model_is_better_nothing_is_merged(recipe, tmp_path, capsys):
    base = dare.Candidates(recipe).make({"scale": 0.0}).arrays["layers.0.w"].copy()

    def score(tensors):
        moved = tensors["layers.0.w"] - base
        right = 59 if moved[0] > 0.005 and moved[-1] == 0 else 20  # math alone
        return {"items": {f"add/{n}": float(n < right) for n in range(60)}}

    result = run(recipe, score, tmp_path / "study.db")
    assert (result.best, result.simplest) == (None, None)
    assert result.conclusion.chosen.baseline == "math alone"
    assert str(result).startswith("do not merge: math is better")
    for more in ([], ["--simplest"]):
        assert main(["search", "best", str(tmp_path / "study.db"), *more]) == 1
        assert "do not merge: math" in capsys.readouterr().err
    assert result.to_dict()["recipes"] == {"best": None, "simplest": None}
    assert result.document().title.startswith("Do not merge")
    assert recipes_shown(result.document()) == {}
