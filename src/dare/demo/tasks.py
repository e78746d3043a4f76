"""The three tasks of the demonstration: their prompts, which are held out, and how they are scored.

The program that trained the models takes its examples from here too, and only from the split
`train`, so what is scored was never trained on. Whether a prompt is held out is a hash of what it
is about, in a form that all prompts with the same answer share where one could give the other
away: 37+58 and 58+37 are in one split, and so are all anagrams.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import product, starmap
from pathlib import Path
from typing import Literal, NamedTuple

Split = Literal["train", "validation", "test"]

DATA = Path(__file__).parent / "data"
END = "\n"  # the mark that a model writes when its answer is complete

_WORDS = "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen"
UNITS = (*_WORDS.split(), "fifteen", "sixteen", "seventeen", "eighteen", "nineteen")
TENS = ("", "", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")


class Exercise(NamedTuple):
    """A prompt and the one answer that counts as right."""

    prompt: str
    answer: str


@dataclass(frozen=True)
class Skill:
    """One ability: what it is called, and every example there is of it with its split."""

    name: str
    title: str
    all_examples: Callable[[], Iterator[tuple[Split, Exercise]]]

    def examples(self, split: Split, count: int | None = None) -> list[Exercise]:
        """Return a split's examples in an order that is shuffled and always the same."""
        return self._shuffled(split)[:count]

    @cache  # noqa: B019 (there are three, and they stay)
    def _shuffled(self, split: Split) -> list[Exercise]:
        examples = [example for home, example in self.all_examples() if home == split]
        random.Random(self.name).shuffle(examples)  # noqa: S311
        return examples


def split_of(key: str) -> Split:
    """Give one in four keys to the test split, one in eight to validation, the others to train.

    >>> [split_of(key) for key in ("37+58", "aelnpt", "347")]
    ['train', 'train', 'train']
    """
    share = hashlib.blake2b(key.encode(), digest_size=1).digest()[0] % 8
    return "test" if share < 2 else "validation" if share == 2 else "train"


def add(a: int, b: int) -> tuple[Split, Exercise]:
    """Ask for a sum.

    >>> add(37, 58)[1]
    Exercise(prompt='37+58=', answer='95')
    """
    return split_of(f"{min(a, b)}+{max(a, b)}"), Exercise(f"{a}+{b}=", str(a + b))


def sort(word: str) -> tuple[Split, Exercise]:
    """Ask for a word's letters in alphabetical order.

    >>> sort("planet")[1]
    Exercise(prompt='sort planet:', answer='aelnpt')
    """
    letters = "".join(sorted(word))
    return split_of(letters), Exercise(f"sort {word}:", letters)


def say(number: int) -> tuple[Split, Exercise]:
    """Ask for a number in words.

    >>> say(347)[1]
    Exercise(prompt='say 347:', answer='three hundred forty-seven')
    """
    return split_of(str(number)), Exercise(f"say {number}:", in_words(number))


def in_words(number: int) -> str:
    """Spell a number below 1000.

    >>> in_words(40), in_words(15), in_words(608)
    ('forty', 'fifteen', 'six hundred eight')
    """
    hundreds, rest = divmod(number, 100)
    words = [UNITS[hundreds], "hundred"] if hundreds else []
    tens, units = divmod(rest, 10)
    if rest >= 20:
        words.append(TENS[tens] + (f"-{UNITS[units]}" if units else ""))
    elif rest or not words:
        words.append(UNITS[rest])
    return " ".join(words)


@cache
def words() -> tuple[str, ...]:
    """Read the words that are sorted: those of four to seven letters in the King James Bible."""
    return tuple((DATA / "words.txt").read_text(encoding="ascii").split())


@cache
def held_out_english() -> bytes:
    """Read the chapters on which English is measured; no model was trained on them."""
    return (DATA / "english.txt").read_bytes()


TASKS: tuple[Skill, ...] = (
    Skill("add", "addition", lambda: starmap(add, product(range(10, 100), repeat=2))),
    Skill("sort", "sorting letters", lambda: map(sort, words())),
    Skill("say", "numbers in words", lambda: map(say, range(100, 1000))),
)
