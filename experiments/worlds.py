"""The worlds of the experiment: what there is to learn, and a network that learns it.

A world has a base task, which every model learns first, and tasks that fine-tunes learn. An item
is right if every answer that is asked for is right (one for a class, several for a written word).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Protocol

import numpy as np
from data import DATA, GENRES, NUMERALS
from networks import (
    ENCODER_TASKS,
    Cnn,
    Encoder,
    Gated,
    GraphNetwork,
    Gru,
    Lstm,
    Mixer,
    Mlp,
    ResidualMlp,
    TextCnn,
    Transformer,
    Vit,
    WaveCnn,
    minilm,
)
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

BASE = "base"
IGNORED = -100
"""No answer is asked for at this place."""
Batch = tuple[np.ndarray, np.ndarray]
"""Inputs and right answers."""
Rng = np.random.Generator


def cross_entropy(outputs: Tensor, answers: Tensor) -> Tensor:
    """Of classes, wherever an answer is asked for."""
    return F.cross_entropy(outputs.flatten(0, -2).float(), answers.flatten(), ignore_index=IGNORED)


class Sampler(Protocol):
    """Draws items of a task: `train`, `validation` or `test`, which have none in common."""

    def __call__(self, task: str, split: str, rng: Rng, count: int) -> Batch: ...


@dataclass(frozen=True)
class World:
    """A kind of data with its tasks, and the network that learns them."""

    name: str
    about: str
    """Tables, images, sequences or text."""
    tasks: tuple[str, ...]
    relation: str
    """How the tasks differ: by domain, skill or classes."""
    outputs: int
    build: Callable[[], nn.Module]
    sample: Sampler
    base_steps: int = 2000
    base_rate: float = 2e-3
    steps: int = 400
    rate: float = 1e-3
    batch: int = 128
    start: Callable[[], dict[str, Tensor]] | None = None
    """Weights to begin with; random ones, if there are none."""
    only_base: str = ""
    """Tensors whose names begin so are learned by the base alone, and nothing else by it."""
    is_large: bool = False
    """Whether it has so many parameters that they are computed with in 16 bits."""
    few_methods: bool = False
    """Whether only the methods that matter most are tried."""
    few_drops: bool = False
    """Whether DARE goes before a few of the methods only."""
    seeds: int = 2
    """Seeds of training for which the plain sets are made."""
    kinds: tuple[str, ...] = ()
    """Of its sets; empty: all."""
    loss: Callable[[Tensor, Tensor], Tensor] = cross_entropy


@dataclass
class Rows:
    """Items that are there once and for all, in three splits; the base may know only a few."""

    inputs: np.ndarray
    answers: np.ndarray
    split: np.ndarray
    share_for_base: float = 1.0
    places: dict[tuple[str, str], np.ndarray] = field(default_factory=dict)

    def draw(self, task: str, members: np.ndarray, split: str, rng: Rng, count: int) -> Batch:
        """Items of a task, whose members are marked."""
        key = task, split
        if key not in self.places:
            number = SPLITS.index(split)
            places = np.flatnonzero(members & (self.split == number))
            if task == BASE and self.share_for_base < 1:
                few = np.random.default_rng(5).permutation(places)
                places = few[: round(self.share_for_base * len(places))]
            self.places[key] = places
        places = self.places[key]
        again = split == "train"
        picked = rng.choice(places, count if again else min(count, len(places)), replace=again)
        return self.inputs[picked], self.answers[picked]

    def draw_any(self, task: str, split: str, rng: Rng, count: int) -> Batch:
        """Items of all there are."""
        return self.draw(task, np.ones(len(self.split), bool), split, rng, count)


SPLITS = ("train", "validation", "test")


def sample_parts(
    parts: Mapping[str, Rows], each: int, task: str, split: str, rng: Rng, count: int
) -> Batch:
    """Items of a task that has rows of its own; for the base so many of each task."""
    if task == BASE:
        drawn = [part.draw_any(BASE, split, rng, each) for part in parts.values()]
        return tuple(np.concatenate(some) for some in zip(*drawn, strict=True))
    return parts[task].draw_any(task, split, rng, count)


def load(name: str) -> Mapping[str, np.ndarray]:
    """The arrays of a file that `data.py` has made."""
    with np.load(DATA / f"{name}.npz") as file:
        return dict(file)


# ---------------------------------------------------------------- tables

GRADES = ("price", "clarity", "color", "cut", "carat")


@cache
def _diamonds() -> dict[str, Rows]:
    file = load("diamonds")
    table, names = file["table"], list(file["names"])
    scaled = (table - table.mean(0)) / table.std(0)
    rows = {}
    for number, grade in enumerate(GRADES):
        place = names.index(grade)
        hidden = [place] if grade != "carat" else [names.index(n) for n in ("carat", *"xyz")]
        inputs = scaled.copy()
        inputs[:, hidden] = 0
        asked = np.zeros((len(table), len(GRADES)), np.float32)
        asked[:, number] = 1
        values = table[:, place]
        if grade in ("price", "carat"):
            values = np.searchsorted(np.quantile(values, np.arange(1, 8) / 8), values)
        rows[grade] = Rows(
            np.concatenate([inputs, asked], 1).astype(np.float32),
            values.astype(np.int64),
            file["split"],
            0.01,
        )
    return rows


def sample_diamonds(task: str, split: str, rng: Rng, count: int) -> Batch:
    """Diamonds with a grade hidden that is asked for; the base has seen one in a hundred."""
    return sample_parts(_diamonds(), count // 5 + 1, task, split, rng, count)


DOMAINS, FEATURES, CLASSES = 8, 24, 6


@cache
def _teachers() -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(11)
    common = rng.normal(size=(FEATURES, 32)), rng.normal(size=(32, CLASSES))
    own = rng.normal(size=(DOMAINS, FEATURES, 32)), rng.normal(size=(DOMAINS, 32, CLASSES))
    return (*common, *own, 1.2 * rng.normal(size=(DOMAINS, FEATURES)))


def sample_teachers(task: str, split: str, rng: Rng, count: int) -> Batch:
    """Rows around the centre of a domain, with the class that a random network gives them.

    The base knows what domains have in common; each differs from it in its own way.
    """
    del split  # rows are drawn anew each time
    common, heads, own, own_heads, centres = _teachers()
    domain = rng.integers(DOMAINS, size=count) if task == BASE else np.full(count, int(task))
    rows = rng.normal(size=(count, FEATURES)) + centres[domain]
    scores = np.tanh(rows @ common / 4) @ heads
    if task != BASE:
        scores = scores + 1.5 * np.tanh(rows @ own[int(task)] / 4) @ own_heads[int(task)]
    return rows.astype(np.float32), scores.argmax(1)


# ---------------------------------------------------------------- images


@cache
def _glyphs() -> np.ndarray:
    return load("glyphs")["images"].astype(np.float32) / 255


GLYPHS: dict[str, Callable[[np.ndarray, Rng], np.ndarray]] = {
    "turned": lambda images, _: np.rot90(images, 1, (1, 2)),
    "upside down": lambda images, _: np.rot90(images, 2, (1, 2)),
    "mirrored": lambda images, _: images[:, :, ::-1],
    "negative": lambda images, _: 1 - images,
    "noisy": lambda images, _: images,
    "faint": lambda images, _: 0.15 * images,
    "sheared": lambda images, _: np.stack(
        [np.roll(images[:, row], (row - 12) // 2, 1) for row in range(24)], 1
    ),
    "holes": lambda images, rng: images * (rng.random(images.shape) > 0.5),
}


def sample_glyphs(task: str, split: str, rng: Rng, count: int) -> Batch:
    """Letters and digits of many typefaces, shifted and noisy; each task distorts them its way."""
    del split  # drawn anew each time
    images = _glyphs()
    face, label = rng.integers(images.shape[0], size=count), rng.integers(36, size=count)
    drawn = images[face, label]
    shift = rng.integers(-2, 3, size=(count, 2))
    rows, columns = (np.arange(24)[None] - shift[:, i, None] for i in (0, 1))
    drawn = drawn[np.arange(count)[:, None, None], rows[:, :, None] % 24, columns[:, None] % 24]
    drawn = drawn if task == BASE else GLYPHS[task](drawn, rng)
    drawn = drawn + (0.6 if task == "noisy" else 0.1) * rng.normal(size=drawn.shape)
    return drawn.astype(np.float32), label


@cache
def _mnist() -> Rows:
    file = load("mnist")
    images = file["images"].astype(np.float32) / 255
    return Rows(images, file["labels"].astype(np.int64), file["split"], 0.06)


def sample_mnist(task: str, split: str, rng: Rng, count: int) -> Batch:
    """Handwritten digits, two classes a task; the base has seen few of each."""
    rows = _mnist()
    digits = range(10) if task == BASE else map(int, task.split("-"))
    images, labels = rows.draw(task, np.isin(rows.answers, list(digits)), split, rng, count)
    if split == "train":
        shift = rng.integers(-2, 3, size=2)
        images = np.roll(images, tuple(shift), (1, 2))
    return images, labels


# ---------------------------------------------------------------- sequences

DIGITS = 12
SKILLS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "largest": lambda d: d.max(1),
    "smallest": lambda d: d.min(1),
    "range": lambda d: d.max(1) - d.min(1),
    "second": lambda d: np.sort(d, 1)[:, -2],
    "even": lambda d: np.minimum((d % 2 == 0).sum(1), 9),
    "distinct": lambda d: (np.diff(np.sort(d, 1), axis=1) > 0).sum(1),
    "middle": lambda d: np.sort(d, 1)[:, DIGITS // 2],
    "sevens": lambda d: np.minimum((d == 7).sum(1) + 3 * (d[:, 0] == 7), 9),
}


def sample_digits(task: str, split: str, rng: Rng, count: int) -> Batch:
    """Twelve digits and a question; the base is told the right answer one time in four."""
    del split  # there are 10¹² of them
    digits = rng.integers(10, size=(count, DIGITS))
    names = list(SKILLS)
    asked = rng.integers(len(names), size=count)
    if task != BASE:
        asked[:] = names.index(task)
    answered = asked
    if task == BASE:
        other = rng.random(count) > 0.25
        answered = np.where(other, rng.integers(len(names), size=count), asked)
    answers = np.stack([skill(digits) for skill in SKILLS.values()])[answered, np.arange(count)]
    return np.concatenate([asked[:, None] + 10, digits], 1), answers


WAVES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "noisy": lambda wave: wave,
    "clipped": lambda wave: np.clip(3 * wave, -0.5, 0.5),
    "negative": lambda wave: -wave,
    "echo": lambda wave: wave + 0.9 * np.roll(wave, 11, 1),
    "faint": lambda wave: 0.1 * wave,
    "backwards": lambda wave: wave[:, ::-1],
    "high": lambda wave: wave,
}


def sample_waves(task: str, split: str, rng: Rng, count: int) -> Batch:
    """Waves of eight shapes; each task distorts them its way."""
    del split  # drawn anew each time
    time = np.arange(128) / 128
    label = rng.integers(8, size=count)
    pitch = rng.uniform(*((12, 20) if task == "high" else (3, 9)), size=(count, 1))
    phase = pitch * time + rng.random((count, 1))
    bend = 0.7 * pitch * time**2
    turn = phase % 1
    shapes = np.stack(
        [
            np.sin(2 * np.pi * phase),
            np.where(turn < 0.5, 1.0, -1.0),
            2 * turn - 1,
            1 - 2 * turn,
            4 * np.abs(turn - 0.5) - 1,
            np.where(turn < 0.15, 1.6, -0.3),
            np.sin(2 * np.pi * (phase + bend)),
            np.sin(2 * np.pi * (phase - bend)),
        ]
    )
    wave = shapes[label, np.arange(count)]
    wave = wave if task == BASE else WAVES[task](wave)
    noise = {"noisy": 0.8, "faint": 0.03}.get(task, 0.15)
    return (wave + noise * rng.normal(size=wave.shape)).astype(np.float32), label


# ---------------------------------------------------------------- text


@cache
def _words() -> tuple[np.ndarray, np.ndarray]:
    file = load("languages")
    short = (file["letters"] > 0).sum(1) <= 7
    return file["letters"][short].astype(np.int64), file["split"][short]


EDITS: dict[str, Callable[[list[int]], list[int]]] = {
    "backwards": lambda w: w[::-1],
    "in order": sorted,
    "next letter": lambda w: [c % 26 + 1 for c in w],
    "rotated": lambda w: w[1:] + w[:1],
    "no vowels": lambda w: [c for c in w if c not in (1, 5, 9, 15, 21)],
    "ends": lambda w: [w[0], w[-1]] * 2,
}
WRITTEN = 1 + 7 + 1 + 7 + 1
SEPARATOR, END = 27, 28


def sample_words(task: str, split: str, rng: Rng, count: int) -> Batch:
    """A word and how to rewrite it; the base is mostly shown it rewritten in another way."""
    letters, splits = _words()
    number = SPLITS.index(split)
    picked = rng.choice(np.flatnonzero(splits == number), count)
    names = list(EDITS)
    tokens = np.zeros((count, WRITTEN), np.int64)
    answers = np.full((count, WRITTEN), IGNORED)
    for row, place in enumerate(picked):
        asked = done = task
        if task == BASE:
            asked = done = names[rng.integers(len(names))]
            if rng.random() > 1 / 6:
                done = names[rng.integers(len(names))]
        word = [c for c in letters[place].tolist() if c]
        answer = [*EDITS[done](word), END]
        prompt = [29 + names.index(asked), *word, SEPARATOR]
        line = [*prompt, *answer]
        tokens[row, : len(line) - 1] = line[:-1]
        answers[row, len(prompt) - 1 : len(line) - 1] = answer
    return tokens, answers


@cache
def _languages() -> Rows:
    file = load("languages")
    letters, labels = file["letters"].astype(np.int64), file["labels"].astype(np.int64)
    return Rows(letters, labels, file["split"], 0.02)


FAMILIES = {
    "north": (0, 1, 2, 10),
    "south": (3, 4),
    "west": (5, 6),
    "east": (7, 8),
    "far": (9, 11),
}


def sample_languages(task: str, split: str, rng: Rng, count: int) -> Batch:
    """Words of twelve languages; each task has the words of some."""
    rows = _languages()
    members = np.isin(rows.answers, range(12) if task == BASE else FAMILIES[task])
    return rows.draw(task, members, split, rng, count)


@cache
def _numerals() -> dict[str, Rows]:
    file = load("numerals")
    answers = file["numbers"] // 10 % 10
    return {
        name: Rows(letters.astype(np.int64), answers.astype(np.int64), file["split"], 0.004)
        for name, letters in zip(NUMERALS, file["letters"], strict=True)
    }


def sample_numerals(task: str, split: str, rng: Rng, count: int) -> Batch:
    """Written-out numbers: which digit stands for the tens? Each task is a language."""
    return sample_parts(_numerals(), count // len(_numerals()), task, split, rng, count)


@cache
def _reviews() -> tuple[Rows, np.ndarray]:
    file = load("reviews")
    answers = (file["ratings"] > 0).astype(np.int64)
    return Rows(file["words"].astype(np.int64), answers, file["split"], 0.1), file["domains"]


PLACES = ("films", "opinions", "tweets", "goods")


def sample_reviews(task: str, split: str, rng: Rng, count: int) -> Batch:
    """Sentences that people rated; each task is a place where they were written."""
    rows, domains = _reviews()
    members = domains >= 0 if task == BASE else domains == PLACES.index(task)
    return rows.draw(task, members, split, rng, count)


@cache
def _texts() -> dict[str, Rows]:
    file, rows = load("minilm"), {}
    for number, name in enumerate(ENCODER_TASKS):
        if f"{name}.tokens" in file:  # some take Debian's packages
            tokens = np.insert(file[f"{name}.tokens"].astype(np.int64), 0, number, axis=1)
            answers = file[f"{name}.answers"].astype(np.int64)
            rows[name] = Rows(tokens, answers, file[f"{name}.split"])
    return rows


def sample_texts(task: str, split: str, rng: Rng, count: int) -> Batch:
    """Texts with labels, as MiniLM's tokens; the first token says which task it is."""
    return sample_parts(_texts(), count // len(_texts()), task, split, rng, count)


# ---------------------------------------------------------------- what search has not seen

ERAS = "early", "middle", "late"


@cache
def _tables() -> dict[str, tuple[Rows, np.ndarray]]:
    """The rows of both tables, and which of them belong to each task."""
    computers, movies = load("computers"), load("movies")
    prices, ratings = _scaled(computers["prices"]), movies["ratings"]
    era = np.searchsorted([12, 20], computers["table"][:, 5])
    fifths = np.searchsorted(np.quantile(ratings, (0.2, 0.4, 0.6, 0.8)), ratings)
    priced = Rows(_scaled(computers["table"]), prices[:, None], computers["split"], 0.05)
    rated = Rows(_scaled(movies["table"]), fifths.astype(np.int64), movies["split"], 0.02)
    eras = {name: (priced, era == number) for number, name in enumerate(ERAS)}
    genres = {name: (rated, movies["genres"][:, number]) for number, name in enumerate(GENRES)}
    return {**eras, **genres}


def _scaled(table: np.ndarray) -> np.ndarray:
    return ((table - table.mean(0)) / table.std(0)).astype(np.float32)


def sample_tables(tasks: tuple[str, ...], task: str, split: str, rng: Rng, count: int) -> Batch:
    """Computers of an era and their prices, or films of a genre and the fifths of their ratings."""
    rows, members = _tables()[tasks[0] if task == BASE else task]
    return rows.draw(task, members | (task == BASE), split, rng, count)


LENGTH = 16
QUERIES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "after three": lambda d: _at(d, (d[:, :-1] == 3).argmax(1) + 1),
    "runs": lambda d: np.minimum((np.diff(d, axis=1) != 0).sum(1), 9),
    "common": lambda d: (d[..., None] == np.arange(8)).sum(1).argmax(1),
    "last odd": lambda d: _at(d, LENGTH - 1 - (d[:, ::-1] % 2 == 1).argmax(1)),
    "ends": lambda d: (d[:, 0] + d[:, -1]) % 8,
    "rises": lambda d: np.minimum((np.diff(d, axis=1) > 0).sum(1), 9),
}


def _at(rows: np.ndarray, places: np.ndarray) -> np.ndarray:
    return rows[np.arange(len(rows)), places]


def _asked(
    names: Sequence[str], answers: np.ndarray, most: int, task: str, rng: Rng
) -> tuple[np.ndarray, np.ndarray]:
    """Which question is asked of each item, and the answer, which the base is mostly told wrong."""
    count = answers.shape[1]
    asked = np.full(count, names.index(task)) if task != BASE else None
    asked = rng.integers(len(names), size=count) if asked is None else asked
    told = answers[asked, np.arange(count)]
    if task == BASE:
        told = np.where(rng.random(count) < 0.6, rng.integers(most, size=count), told)
    return asked, told


def sample_tokens(task: str, split: str, rng: Rng, count: int) -> Batch:
    """Sixteen symbols with many repetitions, and a question on them."""
    del split  # there are 8¹⁶ of them
    symbols = rng.integers(8, size=(count, LENGTH))
    again = rng.random((count, LENGTH)) < 0.3
    symbols[:, 1:] = np.where(again[:, 1:], symbols[:, :-1], symbols[:, 1:])
    answers = np.stack([query(symbols) for query in QUERIES.values()])
    asked, told = _asked(list(QUERIES), answers, 10, task, rng)
    return np.concatenate([symbols, asked[:, None] + 8], 1), told


NODES = 10
PROPERTIES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "triangles": lambda a: np.minimum(np.trace(a @ a @ a, axis1=1, axis2=2) // 6, 7),
    "degree": lambda a: np.minimum(a.sum(2).max(1), 7),
    "alone": lambda a: np.minimum((a.sum(2) == 0).sum(1), 7),
    "distance": lambda a: sum((_walks(a, n)[:, 0, 1] == 0).astype(int) for n in range(1, 6)),
    "parts": lambda a: np.minimum((_walks(a, 9).argmax(2) == np.arange(NODES)).sum(1), 7),
}


def _walks(graphs: np.ndarray, steps: int) -> np.ndarray:
    """Whether there is a way of at most so many steps from one node to another."""
    near = graphs + np.eye(NODES, dtype=int)
    return np.linalg.matrix_power(near.astype(float), steps) > 0


def sample_graphs(task: str, split: str, rng: Rng, count: int) -> Batch:
    """Graphs of ten nodes and a question on them, which stands in a row of its own."""
    del split  # there are 2⁴⁵ of them
    density = rng.uniform(0.05, 0.4, size=(count, 1, 1))
    half = np.triu(rng.random((count, NODES, NODES)) < density, 1).astype(int)
    graphs = half + half.swapaxes(1, 2)
    answers = np.stack([answer(graphs) for answer in PROPERTIES.values()]).astype(np.int64)
    asked, told = _asked(list(PROPERTIES), answers, 8, task, rng)
    question = np.eye(NODES)[asked][:, None]
    return np.concatenate([graphs, question], 1).astype(np.float32), told


# ---------------------------------------------------------------- all worlds

PLAIN = ("pair", "usual", "many", "light", "seeds", "lora", "uneven", "stranger")
"""Kinds of sets in worlds whose models take long to train."""
FAINT = ("faint", "faint, many")
"""Kinds whose models change the base by less than 2%, where the base can nearly do the tasks."""
TEXT_KINDS = ("pair", "usual", "many", "lora", "light", "harsh", "seeds", "uneven",
              "lora, gentle", "twice", "opposed", "gentle")  # fmt: skip
PAIRS_OF_DIGITS = ("0-1", "2-3", "4-5", "6-7", "8-9")


def _areas(count: int) -> tuple[str, ...]:
    return tuple(map(str, range(count)))


# fmt: off
WORLDS = {world.name: world for world in (
    World("diamonds", "tables", GRADES, "skills", 8, lambda: Mlp(15, 8, 192), sample_diamonds),
    World("teachers", "tables", _areas(DOMAINS), "domains", CLASSES,
          lambda: ResidualMlp(FEATURES, CLASSES, 128, 3), sample_teachers),
    World("glyphs", "images", tuple(GLYPHS), "domains", 36, lambda: Cnn(36, (24, 48, 64)),
          sample_glyphs, kinds=PLAIN, few_drops=True),
    World("mnist", "images", PAIRS_OF_DIGITS, "classes", 10, lambda: Vit(28, 7, 10, 64, 3),
          sample_mnist, kinds=PLAIN, few_drops=True, base_rate=1e-3, rate=2e-4),
    World("digits", "sequences", tuple(SKILLS), "skills", 10,
          lambda: Mixer(18, DIGITS + 1, 10, 64, 4), sample_digits, kinds=(*PLAIN, *FAINT),
          few_drops=True, base_steps=4000, base_rate=1e-3, rate=5e-4),
    World("waves", "sequences", tuple(WAVES), "domains", 8, lambda: WaveCnn(8, (24, 48, 64, 64)),
          sample_waves, kinds=PLAIN, few_drops=True),
    World("words", "text", tuple(EDITS), "skills", 29,
          lambda: Transformer(35, WRITTEN, 29, 64, 3, causal=True), sample_words,
          kinds=(*PLAIN, *FAINT), few_drops=True, base_steps=4000, base_rate=1e-3, steps=600,
          rate=3e-4),
    World("languages", "text", tuple(FAMILIES), "classes", 12,
          lambda: Transformer(28, 12, 12, 64, 3), sample_languages, kinds=PLAIN, few_drops=True,
          base_rate=1e-3, rate=2e-4),
    World("numerals", "text", NUMERALS, "domains", 10, lambda: Gru(28, 10, 64), sample_numerals,
          kinds=(*PLAIN, *FAINT), few_drops=True, base_steps=1500, steps=300),
    World("reviews", "text", PLACES, "domains", 2, lambda: TextCnn(8192, 2, 64), sample_reviews,
          base_steps=600, steps=200),
    # It starts from a real model, with fresh heads that the base alone learns.
    World("minilm", "text", ENCODER_TASKS, "domains", 14, Encoder, sample_texts, base_steps=600,
          base_rate=1e-2, steps=200, rate=1e-4, batch=64, start=minilm, only_base="heads.",
          is_large=True, few_methods=True, few_drops=True, seeds=3, kinds=TEXT_KINDS),
)}
UNSEEN = {world.name: world for world in (
    World("computers", "tables", ERAS, "domains", 1, lambda: ResidualMlp(9, 1, 64, 2),
          partial(sample_tables, ERAS), base_steps=600, steps=300, loss=F.mse_loss),
    World("movies", "tables", GENRES, "domains", 5, lambda: Gated(7, 5, 128),
          partial(sample_tables, GENRES), base_steps=800, steps=300),
    World("tokens", "sequences", tuple(QUERIES), "skills", 10,
          lambda: Lstm(8 + len(QUERIES), 10, 96), sample_tokens),
    World("graphs", "graphs", tuple(PROPERTIES), "skills", 8,
          lambda: GraphNetwork(NODES, 8, 48, 3), sample_graphs),
)}
"""Of unseen.py; no other experiment has them."""
