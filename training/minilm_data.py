"""Real texts with labels, for fine-tunes of MiniLM: two tasks, each cut in two once and for all.

- `docstrings`: is this the docstring of a class, of a function or of a method?
- `sentiment`: is this word a good or a bad one? The lexicon of VADER, rated by people.

What is held out is a function of the text alone: no text is both trained on and held out, nor are
two words that begin alike.
"""

from __future__ import annotations

import ast
import hashlib
import re
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

HELD_OUT = 5
"""One text in so many is held out."""
DOCSTRINGS = 1000
"""Docstrings of a kind at most."""
OTHERS = {"site-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo"}
"""Folders beside Python's library or in it that are no part of it."""
RATING = 0.5
"""How far from 0, on a scale from -4 to 4, a word must be rated to count as good or bad."""
BEGINNING = 5
"""Words that have so many first letters in common are held out together: abuse, abused, abuses."""


@dataclass(frozen=True)
class Examples:
    """Texts, and the label of each as an index into the task's labels."""

    texts: list[str]
    targets: list[int]

    def __len__(self) -> int:
        return len(self.texts)


@dataclass(frozen=True)
class Task:
    """Something to learn from texts, and texts to see whether it was learned."""

    name: str
    labels: tuple[str, ...]
    train: Examples
    held_out: Examples

    @property
    def guess(self) -> float:
        """How often the commonest label of the training texts is right on the held-out ones."""
        commonest = max(range(len(self.labels)), key=self.train.targets.count)
        return self.held_out.targets.count(commonest) / len(self.held_out)


def package_folder(name: str, requirements: str) -> Path:
    """Where a package lies, without importing it: what it depends on is not needed."""
    found = find_spec(name)
    if found is None or found.origin is None:
        raise ModuleNotFoundError(
            f"{name}: is not installed; run pip install --no-deps --requirement {requirements}"
        )
    return Path(found.origin).parent


def docstrings() -> Task:
    """First paragraphs of docstrings of Python's library, by what has them."""
    pairs = [pair for tree in library() for pair in documented(tree)]
    return split("docstrings", capped(unambiguous(pairs), DOCSTRINGS), str.casefold)


def sentiment() -> Task:
    """Words of VADER's lexicon, by the sign of their mean rating."""
    lexicon = package_folder("vaderSentiment", "training/requirements.txt") / "vader_lexicon.txt"
    pairs = []
    for line in lexicon.read_text(encoding="utf-8").splitlines():
        word, rating, *_ = line.split("\t")
        if re.fullmatch("[a-z]{3,}", word) and abs(float(rating)) >= RATING:
            pairs.append((word, "good" if float(rating) > 0 else "bad"))
    return split("sentiment", unambiguous(pairs), lambda word: word[:BEGINNING])


def library() -> Iterator[ast.Module]:
    """The sources of Python's library, parsed."""
    folder = Path(sysconfig.get_path("stdlib"))
    for file in sorted(folder.rglob("*.py")):
        if OTHERS.isdisjoint(file.relative_to(folder).parts):
            yield ast.parse(file.read_bytes())


def documented(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Docstrings of more than a few words, and what has them; the first paragraph of each."""
    for outer in ast.walk(tree):
        if not isinstance(outer, ast.Module | ast.ClassDef):
            continue
        for node in outer.body:
            match node:
                case ast.ClassDef():
                    kind = "class"
                case ast.FunctionDef() | ast.AsyncFunctionDef():
                    kind = "function" if isinstance(outer, ast.Module) else "method"
                case _:
                    continue
            text = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
            if text.count(" ") >= 3 and ">>>" not in text:
                yield text, kind


def unambiguous(pairs: list[tuple[str, str]]) -> dict[str, str]:
    """Each text once, with its label; none that has several labels."""
    labels: dict[str, set[str]] = {}
    for text, label in pairs:
        labels.setdefault(text, set()).add(label)
    return {text: min(found) for text, found in sorted(labels.items()) if len(found) == 1}


def capped(labels: dict[str, str], most: int) -> dict[str, str]:
    """At most so many texts of each label, picked by their digests."""
    kept: dict[str, str] = {}
    counts = dict.fromkeys(labels.values(), 0)
    for text in sorted(labels, key=digest):
        label = labels[text]
        if counts[label] < most:
            counts[label] += 1
            kept[text] = label
    return kept


def split(name: str, labels: dict[str, str], group: Callable[[str], str]) -> Task:
    """Cut texts into those to train on and those held out; texts of one group stay together."""
    names = tuple(sorted(set(labels.values())))
    parts = (Examples([], []), Examples([], []))
    for text in sorted(labels):
        part = parts[digest(group(text)) % HELD_OUT == 0]
        part.texts.append(text)
        part.targets.append(names.index(labels[text]))
    return Task(name, names, *parts)


def digest(text: str) -> int:
    """A number that depends on the text alone."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())


TASKS: dict[str, Callable[[], Task]] = {"docstrings": docstrings, "sentiment": sentiment}
