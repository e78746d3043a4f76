"""Inference beside Hugging Face's: known_answers.json says which program made it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from dare.demo.llama import Llama
from dare.demo.merges import BASE, CONFIG, MODELS, TUNED
from dare.demo.tasks import TASKS

KNOWN = json.loads((Path(__file__).parent / "known_answers.json").read_text(encoding="utf-8"))


def tokens_of(*texts):
    return np.array([list(text.encode()) for text in texts])


@pytest.fixture(scope="module")
def base():
    return Llama(BASE, CONFIG)


@pytest.mark.parametrize("name", ["base", *TUNED])
def test_agrees_with_transformers(name):
    model = Llama(MODELS / name, CONFIG)
    for prompt, known in KNOWN["models"][name].items():
        found = model.logits(tokens_of(prompt))[0, -1]
        np.testing.assert_allclose(found, known["logits"], atol=1e-3, rtol=0)
        scores = np.sort(known["logits"])
        if scores[-1] - scores[-2] > 0.01:  # no tie that another BLAS could break otherwise
            assert found.argmax() == np.argmax(known["logits"])
    # Short answers only: English goes on for long, and may come to a near tie.
    tasks = [prompt for prompt in KNOWN["models"][name] if not prompt.startswith("And")]
    assert model.write(tasks) == [KNOWN["models"][name][p]["written"] for p in tasks]


def test_rows_do_not_see_each_other(base):
    both = base.logits(tokens_of("And it came", "thou shalt "))
    np.testing.assert_allclose(both[1:], base.logits(tokens_of("thou shalt ")), atol=1e-4)


def test_one_pass_scores_what_writing_would():
    model = Llama(TUNED["add"], CONFIG)
    examples = [
        example for task in TASKS[:2] for example in task.examples("test", 10)
    ]  # both right and wrong ones
    written = model.write([example.prompt for example in examples])
    right = [text == example.answer for text, example in zip(written, examples, strict=True)]
    assert model.share_right(examples) == sum(right) / len(right)
    assert 0.3 < model.share_right(examples) < 0.6


def test_bits_per_byte_by_hand(base):
    text = (b"And the LORD spake unto Moses, saying, " * 7)[:256]
    logits = base.logits(np.array([list(text[:-1])]))[0].astype(np.float64)
    chances = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    expected = -np.log2(chances[np.arange(255), list(text[1:])]).mean()
    assert base.bits_per_byte(text) == pytest.approx(expected, abs=1e-4)
