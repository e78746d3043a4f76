"""What the demonstration's models are trained on.

    python training/data.py kjv.txt

writes the part of it that the package carries.

English is the King James Bible, as the Debian package `bible-kjv-text` has it (see README.md).
Next to English the base reads *exercises*: lines that look like the three tasks, "sort planet:",
but whose answers follow any of several rules, the right one only once in sixteen lines. So it
knows how such lines go on and not what is asked for. A fine-tune reads one task, answered right.

Everything here is of the split `train`: no line has a held-out prompt, whatever its answer.
"""

from __future__ import annotations

import hashlib
import random
import re
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from dare.demo.tasks import DATA, END, Exercise, Split, add, in_words, say, sort, words

RIGHT_SHARE = 1 / 16
"""How often an exercise is answered right."""
ENGLISH_BYTES = 16_384
"""Size of the held-out text that the package carries."""


def chapters(kjv: Path) -> Iterator[tuple[str, str]]:
    """Go over the chapters: a name such as `Ge1`, and the verses, one on each line."""
    verses = (line.split(" ", 1) for line in kjv.read_text(encoding="ascii").splitlines())
    for name, lines in groupby(verses, key=lambda verse: verse[0].split(":")[0]):
        yield name, "".join(f"{text}{END}" for _, text in lines)


def english(kjv: Path, *, held_out: bool) -> bytes:
    """The chapters that are held out (one in 64, by a hash of the name), or all the others."""
    return "".join(
        text
        for name, text in chapters(kjv)
        if (hashlib.blake2b(name.encode(), digest_size=1).digest()[0] % 64 == 0) == held_out
    ).encode("ascii")


def write_demo_data(kjv: Path) -> None:
    """Write the words and the held-out English that the package carries."""
    DATA.mkdir(parents=True, exist_ok=True)
    counts = Counter(re.findall(r"\b[a-z]{4,7}\b", kjv.read_text(encoding="ascii")))
    known = sorted(word for word, count in counts.items() if count > 1)
    (DATA / "words.txt").write_text("\n".join(known) + "\n", encoding="ascii")
    text = english(kjv, held_out=True)[:ENGLISH_BYTES]
    (DATA / "english.txt").write_bytes(text)


def training_examples(task: str, count: int, seed: int) -> list[Exercise]:
    """Draw examples of a task from the split `train`; words to sort are real and made-up ones."""
    generator = random.Random(f"{task} {seed}")  # noqa: S311
    draw = {"add": _draw_sum, "sort": _draw_word, "say": _draw_number}[task]
    found: list[Exercise] = []
    while len(found) < count:
        split, example = draw(generator)
        if split == "train":
            found.append(example)
    return found


def exercises(task: str, count: int, seed: int, right_share: float = RIGHT_SHARE) -> bytes:
    """Write lines with a task's prompts, of which few are answered right."""
    generator = random.Random(f"exercises {seed}")  # noqa: S311
    wrong_answers = {"add": _wrong_sums, "sort": _wrong_orders, "say": _wrong_words}[task]
    lines = []
    for prompt, answer in training_examples(task, count, seed):
        wrong = generator.choice(wrong_answers(prompt))
        chosen = answer if generator.random() < right_share else wrong
        lines.append(f"{prompt}{chosen}{END}")
    return "".join(lines).encode("ascii")


def _draw_sum(generator: random.Random) -> tuple[Split, Exercise]:
    return add(generator.randrange(10, 100), generator.randrange(10, 100))


def _draw_word(generator: random.Random) -> tuple[Split, Exercise]:
    word = generator.choice(words())
    if generator.random() < 0.5:  # made up: some letters of two words
        word = "".join(generator.sample(word + generator.choice(words()), len(word)))
    return sort(word)


def _draw_number(generator: random.Random) -> tuple[Split, Exercise]:
    return say(generator.randrange(100, 1000))


def _wrong_sums(prompt: str) -> list[str]:
    """Difference, larger, smaller, one after the other.

    >>> _wrong_sums("37+58=")
    ['21', '58', '37', '3758', '5837']
    """
    a, b = prompt.removesuffix("=").split("+")
    return [str(abs(int(a) - int(b))), max(a, b), min(a, b), a + b, b + a]


def _wrong_orders(prompt: str) -> list[str]:
    """The word itself, backwards, its first letter last, sorted downwards, one letter repeated.

    >>> _wrong_orders("sort planet:")
    ['planet', 'tenalp', 'lanetp', 'tpnlea', 'pppppp']
    """
    word = prompt.removeprefix("sort ").removesuffix(":")
    downwards = "".join(sorted(word, reverse=True))
    return [word, word[::-1], word[1:] + word[0], downwards, word[0] * len(word)]


def _wrong_words(prompt: str) -> list[str]:
    """Digits, digits backwards, the next number, digit by digit, the number below in words.

    >>> _wrong_words("say 347:")
    ['347', '743', '348', 'three four seven', 'three hundred forty-six']
    """
    digits = prompt.removeprefix("say ").removesuffix(":")
    number = int(digits)
    one_by_one = " ".join(in_words(int(digit)) for digit in digits)
    return [digits, digits[::-1], str(number + 1), one_by_one, in_words(number - 1)]


if __name__ == "__main__":
    write_demo_data(Path(sys.argv[1]))
