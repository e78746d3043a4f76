"""What people met who tried a search for the first time."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from dare.errors import InputError
from dare.recipe.schema import Recipe
from dare.studies.results import Scored
from dare.studies.space import Space
from dare.studies.study import BASELINE, Charter, Study

CHARTER = Charter(
    recipe={"models": {"base_file": "base", "merge_files": ["math", "code"]}},
    space={"scale": [0.5, 2.0]},
    sampler="grid",
    seeds=1,
    evaluator="scor.py:score",
    objective="mean",
    guards=(),
    race=False,
    items=None,
    seed=0,
)
MENDED = replace(CHARTER, evaluator="score.py:score")


@pytest.mark.parametrize("name", ["what?.db", "100%.db", "a%20b.db", "größe #1.db"])
def test_a_study_lies_where_it_was_asked_for(tmp_path: Path, name: str):
    Study(tmp_path / name, CHARTER).close()
    assert {path.name for path in tmp_path.iterdir()} == {name, f"{name}.lock"}
    with closing(Study(tmp_path / name)) as study:
        assert study.charter == CHARTER


def test_a_study_that_scored_nothing_can_be_put_right(tmp_path: Path):
    path = tmp_path / "study.db"
    with closing(Study(path, CHARTER)) as study:
        study.keep("starts", [{"scale": 0.5}])
        study.take_beside(BASELINE, "base").fail("there is no such file")
        study.take_beside(BASELINE, "average")
    with closing(Study(path, MENDED)) as study:
        assert study.charter == MENDED
        assert (study.note("starts"), study.beside(BASELINE)) == (None, [])
        claim = study.take_beside(BASELINE, "base")
        claim.finish(Scored({"score": 1.0}), 1.0, slacks={})
    with pytest.raises(InputError, match=r"its evaluator was score\.py:score, and is scor\.py"):
        Study(path, CHARTER)


def test_a_study_that_somebody_works_on_is_left_alone(tmp_path: Path, monkeypatch):
    path = tmp_path / "study.db"
    with closing(Study(path, CHARTER)) as study:
        study.take_beside(BASELINE, "base")
    monkeypatch.setattr("dare.studies.locks.Presence.is_alive", lambda _presence, _mark: True)
    with pytest.raises(InputError, match="the study of another search"):
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
    assert Space(recipe, {}).is_random(settings) is is_drawn
