from __future__ import annotations

import pytest

from dare.demo.story import SHOWN
from dare.demo.tasks import TASKS, add, in_words, sort, split_of


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_splits_share_no_prompt_and_cover_everything(task):
    splits = {name: set(task.examples(name)) for name in ("train", "validation", "test")}
    assert sum(map(len, splits.values())) == len(set.union(*splits.values()))
    total = len(list(task.all_examples()))
    assert sum(map(len, splits.values())) == total
    assert 0.2 < len(splits["test"]) / total < 0.3
    assert len(splits["validation"]) >= 100


def test_what_gives_an_answer_away_is_in_the_same_split():
    assert all(add(a, b)[0] == add(b, a)[0] for a in range(10, 100) for b in range(10, 100))
    assert sort("listen")[0] == sort("silent")[0] == sort("tinsel")[0]


def test_examples_come_in_a_fixed_shuffled_order():
    task = TASKS[0]
    assert task.examples("test", 5) == task.examples("test")[:5]
    assert task.examples("test", 20) != sorted(task.examples("test", 20))


def test_hash_is_the_same_on_every_machine():
    assert [split_of(key) for key in ("37+58", "19+64", "adegnr", "128", "100")] == [
        "train", "test", "test", "test", "train",
    ]  # fmt: skip


def test_numbers_in_words():
    words = {0: "zero", 19: "nineteen", 20: "twenty", 110: "one hundred ten"}
    words |= {999: "nine hundred ninety-nine"}
    assert {number: in_words(number) for number in words} == words


def test_shown_prompts_are_held_out():
    for task, example in zip(TASKS, SHOWN, strict=True):
        assert example in task.examples("test")
