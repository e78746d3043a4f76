"""Tasks of lm-evaluation-harness from local files, on models that were really trained."""

from __future__ import annotations

import json
import random
import re
import textwrap
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

import dare
from dare.demo.tasks import TASKS
from dare.errors import EvaluationError, RecipeError, install_command
from dare.recipe.settings import with_settings
from dare.studies.evaluators import open_scorer
from dare.studies.evaluators.harness import _by_task

MODELS = Path(dare.__file__).parent / "demo" / "models"
COUNT = 24
"""Of documents in each task."""


def test_documents_are_in_order_and_once():
    assert _by_task(["b/2", "a/10", "a/9", "a/10"]) == {"b": [2], "a": [9, 10]}
    for item in ("a", "a/b", "/1"):
        with pytest.raises(EvaluationError, match=f"'{item}': is not an item of the harness"):
            _by_task([item])


# ---------------------------------------------------------------- where it is installed

TASK = """
    task: {name}
    dataset_path: json
    dataset_kwargs:
      data_files:
        validation: {data}
    validation_split: validation
    doc_to_text: "{{{{prompt}}}}"
    target_delimiter: ""
"""
CHOICE = """
    output_type: multiple_choice
    doc_to_target: 0
    doc_to_choice: "{{choices}}"
    metric_list:
      - metric: acc
"""
WORDS = """
    output_type: generate_until
    doc_to_target: "{{answer}}"
    generation_kwargs:
      until: ["\\n"]
      max_gen_toks: 40
    metric_list:
      - metric: exact_match
        aggregation: mean
        higher_is_better: true
"""
FEW_SHOT = "    num_fewshot: 1\n    fewshot_split: validation\n"
LOSS = """
    output_type: loglikelihood_rolling
    doc_to_target: "{{answer}}"
    metric_list:
      - metric: bits_per_byte
"""


def write_task(folder, name, kind, documents):
    data = folder / f"{name}.jsonl"
    data.write_text("".join(json.dumps(document) + "\n" for document in documents))
    text = textwrap.dedent(TASK.format(name=name, data=data)) + textwrap.dedent(kind)
    (folder / f"{name}.yaml").write_text(text)


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """A folder of tasks: sums to choose from, numbers to write in words."""
    folder = tmp_path_factory.mktemp("tasks")
    add, _, say = (task.examples("validation", COUNT) for task in TASKS)
    draw = random.Random(0)
    sums = [
        {
            "prompt": example.prompt,
            "choices": [f"{example.answer}\n"]
            + [
                f"{int(example.answer) + step}\n"
                for step in draw.sample([-10, -2, -1, 1, 2, 10], 3)
            ],
        }
        for example in add
    ]
    words = [{"prompt": example.prompt, "answer": example.answer} for example in say]
    write_task(folder, "dare_add", CHOICE, sums)
    write_task(folder, "dare_say", WORDS, words)
    write_task(folder, "dare_few", CHOICE + FEW_SHOT, sums)
    write_task(folder, "dare_loss", LOSS, words)
    return folder


@pytest.fixture(scope="module")
def recipe():
    models = [MODELS / "add", MODELS / "say"]
    return dare.Recipe(base=MODELS / "base", models=models, method="sum")


@pytest.fixture(scope="module")
def scorer(tasks, recipe):
    pytest.importorskip("lm_eval")
    opened = open_scorer(f"lm_eval:dare_add,dare_say@{tasks}", recipe)
    yield opened
    opened.close()


def test_each_fine_tune_can_do_its_own_task(scorer, recipe):
    assert scorer.takes_items
    scores = {}
    for number, name in enumerate(("add", "say")):
        alone = recipe.changed(models=(recipe.models[number],))
        scorer.make(alone)
        scored = scorer.score()
        assert list(scored.items) == [f"dare_{t}/{n}" for t in ("add", "say") for n in range(COUNT)]
        assert set(scored.items.values()) <= {0.0, 1.0}
        for task in ("add", "say"):
            own = [v for k, v in scored.items.items() if k.startswith(f"dare_{task}/")]
            assert scored.scores[f"dare_{task}"] == pytest.approx(sum(own) / COUNT)
        scores[name] = scored.scores
    assert scores["add"]["dare_add"] > 0.9 > scores["say"]["dare_add"]
    assert scores["say"]["dare_say"] > 0.9 > scores["add"]["dare_say"]


def test_some_documents_are_scored_as_among_all(scorer, recipe):
    scorer.make(with_settings(recipe, {"scale": 0.6}))
    whole = scorer.score()
    assert replace(scorer.score(), seconds=0, output="") == replace(whole, seconds=0, output="")
    for some in (["dare_say/7", "dare_add/11", "dare_say/2", "dare_add/3"], ["dare_add/5"]):
        scored = scorer.score(some)
        assert scored.items == {name: whole.items[name] for name in scored.items}
        assert set(scored.items) == set(some)
        assert set(scored.scores) == {name.partition("/")[0] for name in some}


def test_documents_that_are_not_there_are_told(scorer, recipe):
    scorer.make(recipe)
    with pytest.raises(EvaluationError, match="total examples"):
        scorer.score([f"dare_add/{COUNT}"])
    with pytest.raises(EvaluationError, match=r"returned different items; .* missing"):
        scorer.score(["dare_add/0", "dare_sort/0"])
    assert len(scorer.score().items) == 2 * COUNT


def test_tasks_that_cannot_be_scored_or_not_by_some_items_say_so(tasks, recipe):
    pytest.importorskip("lm_eval")
    with closing(open_scorer(f"lm_eval:dare_few@{tasks}", recipe)) as scorer:
        assert not scorer.takes_items  # its examples are drawn
    for name, message in (
        ("dare_loss", r"measures bits_per_byte, where less is better"),
        ("dare_ad", r"no task 'dare_ad', neither in .* harness \(did you mean 'dare_add'\?\)"),
    ):
        with pytest.raises(RecipeError, match=message):
            open_scorer(f"lm_eval:{name}@{tasks}", recipe)


def test_without_the_harness_it_is_named(monkeypatch, recipe):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(RecipeError, match=re.escape(install_command("eval"))):
        open_scorer("lm_eval:any", recipe)
