"""Data files: each is a task, and its columns say what kind of task.

    columns                       task
    prompt, choices, answer       the most likely choice, per character, must be the answer
    prompt, pattern               what the model writes must match a regular expression
    prompt, answer                what the model writes must be the answer
    text, label                   a classifier must give the label
    a, b, score                   the similarity of two texts must rank like the score
    image, label                  the same as text, for an image: a path relative to the file
    text                          bits that the model needs for a byte of it; fewer are better

A third of the examples is held out: it is never used to choose. Only a hash decides, of the group,
or of the input if there is no group, so that equal inputs are on the same side.
"""

from __future__ import annotations

import csv
import json
import math
import re
import string
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from hashlib import sha256
from importlib.resources import files
from itertools import islice
from pathlib import Path
from typing import Any

from dare.documents.notices import Notice, notice
from dare.documents.words import counted
from dare.errors import InputError, did_you_mean, needed, no_such_file

_TABLES = tomllib.loads(files("dare.studies").joinpath("data_files.toml").read_text("utf-8"))
SYNONYMS: dict[str, list[str]] = _TABLES["synonyms"]  # other names of our columns
MOST_ROWS = 30_000  # the rows of a file that are read
MOST_EXAMPLES = 3_000  # the examples that are kept of these, by their hashes
MOST_CHARACTERS = 20_000  # the characters of a text that are used
FEWEST_GROUPS = 12
FEWEST_ON_A_SIDE = 2
HELD_OUT_OF = 3  # one example in this many is held out
ALIKE_WORDS = 8  # with fewer different words, only equal texts are alike
ALIKE_SHARE = 0.8  # the share of the words of two texts that must be in both
ALIKE_CHARACTERS = 2_000  # the characters of a text that are compared
MOST_COMPARED = 20  # texts with the same rare word
NOTICED_SHARE = 0.05  # the share of similar examples above which there is a notice
REASONED = re.compile(r"(?s)(.*)\n\s*####\s*(\S[^\n]*?)\s*")  # GSM8K's: reasoning, then the answer
NUMBER = re.compile(
    r"(?<![\w/])-?(?:\d[\d,]*/[1-9]\d*|(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:[eE][+-]?\d{1,3}(?!\d))?)"
)
ENDS = f"{string.punctuation}{string.whitespace}“”‘’«»…"

Row = tuple[str, dict[str, Any]]  # its place in the file, as `line 3`, and its values


@dataclass(frozen=True)
class TaskForm:
    """A kind of task: the columns it needs, the kind of model, and its description."""

    columns: list[str]
    model: str  # `writer`, `classifier`, `encoder` or `image classifier`
    words: str
    direction: int = 1  # -1 if less is better


FORMS = {name: TaskForm(**table) for name, table in _TABLES["forms"].items()}


@dataclass(frozen=True)
class TaskExample:
    """A row of a file: its values by column, in the form that its task needs."""

    id: str
    values: dict[str, Any]
    is_held_out: bool


@dataclass(frozen=True)
class Task:
    """The examples of a file."""

    name: str
    form: str  # a key of FORMS
    kind: str  # in words
    examples: tuple[TaskExample, ...]
    notices: tuple[Notice, ...] = ()

    @property
    def direction(self) -> int:
        """1 if larger scores are better, else -1."""
        return FORMS[self.form].direction

    def ids(self, held_out: bool) -> list[str]:
        """Return the ids of the examples for choosing, or of those that are held out."""
        return [example.id for example in self.examples if example.is_held_out == held_out]


def read_tasks(files: Sequence[Path]) -> list[Task]:
    """Read data files, each as a task that is named after it."""
    stems = Counter(file.stem for file in files)
    names = [
        file.stem if stems[file.stem] == 1 else f"{file.absolute().parent.name}-{file.stem}"
        for file in files
    ]
    for name, count in Counter(names).items():
        if count > 1:
            raise InputError(f"{name}: {count} data files have this name; rename all but one")
    return [_read_task(file, name) for file, name in zip(files, names, strict=True)]


def _read_task(file: Path, name: str) -> Task:
    rows = list(islice(_rows(file), MOST_ROWS))
    form, rows = _find_columns(file, rows)
    read = {
        "choices": _choices,
        "patterns": _patterns,
        "answers": _answers,
        "pairs": _pairs,
        "images": _images,
    }.get(form, _texts)
    examples, hashes = [], []
    for number, ((_, row), values) in enumerate(zip(rows, read(file, rows), strict=True), 1):
        group = str(row.get("group", ""))
        digest = sha256((group or " ".join(input_text(values).casefold().split())).encode())
        hashes.append(int.from_bytes(digest.digest()[:8], "big"))
        item_id = "/".join(filter(None, (name, group, str(number))))
        examples.append(TaskExample(item_id, values, hashes[-1] % HELD_OUT_OF == 0))
    notices = []
    if len(examples) > MOST_EXAMPLES:
        notices.append(notice("examples_left_out", name, rows=len(rows), kept=MOST_EXAMPLES))
        limit = sorted(hash_ // HELD_OUT_OF for hash_ in hashes)[MOST_EXAMPLES]
        kept = [hash_ // HELD_OUT_OF < limit for hash_ in hashes]
        examples = [example for example, is_kept in zip(examples, kept, strict=True) if is_kept]
        hashes = [hash_ for hash_, is_kept in zip(hashes, kept, strict=True) if is_kept]
    _check_sides(file, set(hashes), has_groups=any("group" in row for _, row in rows))
    if not any("group" in row for _, row in rows) and form != "images":
        alike = count_alike([input_text(example.values) for example in examples])
        if alike > NOTICED_SHARE * len(examples):
            notices.append(notice("alike_examples", name, alike=alike, count=len(examples)))
    words = FORMS[form].words + (_comparison(examples) if form == "answers" else "")
    return Task(name, form, words, tuple(examples), tuple(notices))


def _check_sides(file: Path, hashes: set[int], *, has_groups: bool) -> None:
    held_out = sum(hash_ % HELD_OUT_OF == 0 for hash_ in hashes)
    count, least = len(hashes), min(held_out, len(hashes) - held_out)
    if count < FEWEST_GROUPS or least < FEWEST_ON_A_SIDE:
        what = counted(count, "group" if has_groups else "different example")
        few = f"has {what}, of which {held_out} would be held out"
        need = f"at least {FEWEST_GROUPS} are needed, {FEWEST_ON_A_SIDE} of them on each side"
        raise InputError(f"{file}: {few}; {need}: add some, 200 or more if you can")


def input_text(values: Mapping[str, Any]) -> str:
    """Return the text that a model is given, without its answer."""
    inputs = ("prompt", "text", "a", "b", "image")
    return "\n".join([str(values[n]) for n in inputs if n in values] + values.get("choices", []))


# ---------------------------------------------------------------- files


def _rows(file: Path) -> Iterator[Row]:
    """Yield the rows of a file, with names of columns in lower case."""
    if not file.is_file():
        raise no_such_file(file)
    suffix = file.suffix.lower()
    if suffix in (".jsonl", ".json", ".ndjson"):
        rows = _json_rows(file)
    elif suffix in (".csv", ".tsv"):
        rows = _csv_rows(file)
    elif suffix == ".parquet":
        rows = _parquet_rows(file)
    else:
        raise InputError(f"{file}: a data file is .jsonl, .json, .csv, .tsv or .parquet")
    for where, row in rows:
        yield where, {str(name).strip().lower(): value for name, value in row.items()}


def _lines(file: Path) -> Iterator[str]:
    with file.open("rb") as opened:
        for number, line in enumerate(opened, 1):
            try:
                yield line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError:
                raise InputError(
                    f"{file}: line {number} is not UTF-8; save the file in that encoding"
                ) from None


def _json_rows(file: Path) -> Iterator[Row]:
    for number, line in enumerate(_lines(file), 1):
        if number == 1 and line.lstrip().startswith("["):
            yield from _json_list(file)
            return
        if line.strip():
            yield f"line {number}", _parse_object(file, f"line {number}", line)


def _json_list(file: Path) -> Iterator[Row]:
    try:
        rows = json.loads("".join(_lines(file)))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{file}: is not a JSON list: {error}") from None
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise InputError(f"{file}: element {number} must be a JSON object with columns")
        yield f"element {number}", row


def _parse_object(file: Path, where: str, line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        problem = f"{error.msg} at character {error.pos + 1}"
        raise InputError(f"{file}: {where} is not JSON: {problem}") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{file}: {where} is not JSON: {error}") from None
    if not isinstance(row, dict):
        raise InputError(f'{file}: {where} must be a JSON object, as in {{"prompt": "…"}}')
    return row


def _csv_rows(file: Path) -> Iterator[Row]:
    lines = _lines(file)
    header = next(lines, "")
    names = next(csv.reader([header], delimiter=(by := max(",;\t", key=header.count))), [])
    reader = csv.reader(lines, delimiter=by, strict=True)
    try:
        for cells in reader:
            where = f"line {reader.line_num + 1}"
            if cells and len(cells) != len(names):
                how = f"has {len(cells)} cells, and the first line {len(names)}"
                raise InputError(f'{file}: {where} {how}; put cells with "{by}" in quotes')
            if cells:
                yield where, dict(zip(names, cells, strict=True))
    except csv.Error as error:
        raise InputError(f"{file}: line {reader.line_num + 1}: {error}") from None


def _parquet_rows(file: Path) -> Iterator[Row]:
    remedy = "pip install pyarrow; or save it as JSONL"
    with needed(InputError(f"{file}: Parquet needs a package: {remedy}")):
        from pyarrow import ArrowException, parquet
    try:
        with parquet.ParquetFile(file) as opened:
            batches = (batch.to_pylist() for batch in opened.iter_batches(batch_size=1000))
            for number, row in enumerate((row for batch in batches for row in batch), 1):
                yield f"row {number}", row
    except (ArrowException, OSError) as error:
        raise InputError(f"{file}: is not Parquet that can be read: {error}") from None


# ---------------------------------------------------------------- columns


def _find_columns(file: Path, rows: list[Row]) -> tuple[str, list[Row]]:
    """Return the form of a task, and its rows with the columns that the form needs."""
    if not rows:
        raise InputError(f"{file}: has no examples")
    columns = list(dict.fromkeys(name for _, row in rows for name in row))
    found = {
        name: [name] if name in columns else [other for other in others if other in columns]
        for name, others in SYNONYMS.items()
    }
    form = next((f for f, it in FORMS.items() if all(found[name] for name in it.columns)), None)
    if form is None:
        raise InputError(f"{file}: {_describe_misfit(columns, found)}")
    wanted = FORMS[form].columns
    for name in wanted:
        if len(found[name]) > 1:
            both = " and ".join(found[name])
            raise InputError(f"{file}: {both} could both be the {name}; rename one to {name}")
    named = []
    for where, row in rows:
        taken = {name: row.get(found[name][0]) for name in wanted}
        for name, value in taken.items():
            if value is None or value == [] or (isinstance(value, str) and not value.strip()):
                raise InputError(f"{file}: {where} has no {found[name][0]}; fill it in, or drop it")
        taken |= {n: row[n] for n in ("group", "answer") if row.get(n) not in (None, "")}
        named.append((where, taken))
    return form, named


def _describe_misfit(columns: Sequence[str], found: Mapping[str, Sequence[str]]) -> str:
    def lacking(form: TaskForm) -> list[str]:
        return [name for name in form.columns if not found[name]]

    def distance(form: TaskForm) -> tuple[int, int, bool, bool]:
        """Rank a form: most of its columns, fewest lacking, one misspelt, the usual one."""
        lack = lacking(form)
        is_other = not did_you_mean(lack[0], columns)
        return len(lack) - len(form.columns), len(lack), is_other, form is not FORMS["answers"]

    near = min(FORMS.values(), key=distance)
    lack = lacking(near)
    hint = did_you_mean(lack[0], columns)
    kinds = "; ".join(" + ".join(form.columns) for form in FORMS.values())
    return (
        f"has the columns {', '.join(columns)}, which fit no kind of task. The nearest is "
        f"{' + '.join(near.columns)}, and {' and '.join(lack)} "
        f"{'is' if len(lack) == 1 else 'are'} not there{hint}. "
        f"Kinds: {kinds}"
    )


def _texts(_file: Path, rows: Iterable[Row]) -> list[dict[str, Any]]:
    return [
        {n: str(row[n])[:MOST_CHARACTERS] for n in ("text", "label") if n in row} for _, row in rows
    ]


def _pairs(file: Path, rows: Iterable[Row]) -> list[dict[str, Any]]:
    read: list[dict[str, Any]] = []
    for where, row in rows:
        try:
            score = float(row["score"])
        except (TypeError, ValueError):
            score = math.nan
        if not math.isfinite(score):
            raise InputError(f"{file}: {where}: score must be a number, not {row['score']!r}")
        read.append({"a": str(row["a"]), "b": str(row["b"]), "score": score})
    return read


def _images(file: Path, rows: Iterable[Row]) -> list[dict[str, Any]]:
    read: list[dict[str, Any]] = []
    for where, row in rows:
        image = row["image"]
        if isinstance(image, dict) and image.get("bytes"):  # as datasets store them in Parquet
            image = image["bytes"]
        elif not (image := file.parent / str(image)).is_file():
            raise InputError(f"{file}: {where}: there is no image {image}")
        read.append({"image": image, "label": str(row["label"])})
    return read


def _choices(file: Path, rows: list[Row]) -> list[dict[str, Any]]:
    read: list[dict[str, Any]] = []
    for where, row in rows:
        choices = row["choices"]
        if isinstance(choices, str):  # of a CSV file
            is_list = choices.lstrip().startswith("[")
            listed = _parse_object(file, where, f'{{"choices": {choices}}}') if is_list else None
            choices = listed["choices"] if listed else choices.split("|")
        choices = [str(choice).strip() for choice in choices] if isinstance(choices, list) else []
        if len(set(choices)) < max(2, len(choices)) or "" in choices:
            raise InputError(f"{file}: {where}: choices must be a list of two or more different")
        read.append({"prompt": str(row["prompt"]), "choices": choices})
    answers = [str(row["answer"]).strip() for _, row in rows]
    ways = (_read_choice(a, values["choices"]) for a, values in zip(answers, read, strict=True))
    best = min(zip(*ways, strict=True), key=lambda indices: indices.count(None))  # for all rows
    for (where, _), answer, index, values in zip(rows, answers, best, read, strict=True):
        if index is None:
            how = "the answer must be the text of a choice, its number from 0 on, or its letter"
            raise InputError(f"{file}: {where}: {answer!r} is none of the choices; {how}")
        values["answer"] = index
    return read


def _read_choice(answer: str, choices: list[str]) -> tuple[int | None, ...]:
    """Return the choice that an answer denotes: read as a text, as a number and as a letter."""
    letter, letters = answer.strip("().").upper(), list(string.ascii_uppercase[: len(choices)])
    return (
        choices.index(answer) if answer in choices else None,
        int(answer) if answer.isdecimal() and int(answer) < len(choices) else None,
        letters.index(letter) if letter in letters else None,
    )


# ---------------------------------------------------------------- generated answers


def _answers(_file: Path, rows: Iterable[Row]) -> list[dict[str, Any]]:
    """Read right answers (`answers`) and the full texts that a model would write (`written`)."""
    read: list[dict[str, Any]] = []
    for _, row in rows:
        given = row.get("answer", [])
        written = [plain_text(each) for each in (given if isinstance(given, list) else [given])]
        reasoned = [REASONED.fullmatch(each) for each in written]
        answers = [f[2] if f else text for f, text in zip(reasoned, written, strict=True)]
        prompt = str(row["prompt"])
        read.append({"prompt": prompt, "answers": answers, "written": written})
        read[-1]["is_reasoned"] = any(reasoned)
    return read


def plain_text(value: object) -> str:
    """Return a value of JSON as a model would write it.

    >>> plain_text(True), plain_text(3.0), plain_text("Yes")
    ('true', '3.0', 'Yes')
    """
    return json.dumps(value) if isinstance(value, bool) else str(value)


def _patterns(file: Path, rows: list[Row]) -> list[dict[str, Any]]:
    read = _answers(file, rows)
    for (where, row), values in zip(rows, read, strict=True):
        try:
            values["pattern"] = re.compile(str(row["pattern"]))
        except re.error as error:
            raise InputError(f"{file}: {where}: pattern is not valid: {error}") from None
    return read


def _comparison(examples: Sequence[TaskExample]) -> str:
    numbers = [all(map(_number, example.values["answers"])) for example in examples]
    way = "as numbers" if all(numbers) else "as texts or numbers" if any(numbers) else "as texts"
    case = "" if all(numbers) else "; upper and lower case count as the same"
    several = any(len(example.values["answers"]) > 1 for example in examples)
    return f", compared {way}{case}{'; any of several is right' if several else ''}"


def is_right(values: Mapping[str, Any], output: str) -> bool:
    """Tell if a model's output is right: it matches the pattern, or equals one of the answers.

    If the answer is a number, the last number counts. If the file uses `####`, the answer follows
    it. Case, spaces and punctuation at the ends do not matter.

    >>> is_right({"answers": ["1200"]}, "That is 3 × 400 = 1,200.")
    True
    >>> is_right({"answers": ["Paris", "Lutetia"]}, " paris.")
    True
    """
    if "pattern" in values:
        return values["pattern"].search(output) is not None
    if values.get("is_reasoned") and "####" in output:
        output = output.partition("####")[2].strip().partition("\n")[0]
    numbers = NUMBER.findall(output)
    for answer in values["answers"]:
        wanted = _number(answer)
        if wanted and numbers and _value(numbers[-1]) == wanted[0]:
            return True
        if _normalised(answer) == _normalised(output):
            return True
    return False


def _number(text: str) -> tuple[Fraction] | None:
    """Return a text as a number, if it is only a number, perhaps with a currency; else None."""
    plain = text.strip().strip("$€£%").strip()
    return (_value(plain),) if NUMBER.fullmatch(plain) else None


def _value(number: str) -> Fraction:
    return Fraction(number.replace(",", ""))


def _normalised(text: str) -> str:
    words = " ".join(text.casefold().split())
    return words.strip(ENDS) or words


# ---------------------------------------------------------------- examples that are alike


def count_alike(texts: Sequence[str]) -> int:
    """Count the texts that are equal to others, or nearly: most of their words are the same.

    Texts with different numbers are different. Two texts that share most words also share one of
    their rarest words, so only few have to be compared.

    >>> a = "Ann took the early train to Rome and saw her old friend"
    >>> count_alike([a, a.replace("Ann", "Bob"), "Yes", "yes", "No"])
    4
    """
    words = [frozenset(re.findall(r"\w+", text[:ALIKE_CHARACTERS].casefold())) for text in texts]
    counts = Counter(word for of_text in words for word in of_text)
    known: dict[object, list[int]] = defaultdict(list)
    alike: set[int] = set()
    for number, of_text in enumerate(words):
        keys: list[object] = [_normalised(texts[number])]
        if (size := len(of_text)) >= ALIKE_WORDS:
            rare = sorted(of_text, key=lambda word: (counts[word], word))
            keys += [(word,) for word in rare[: size - math.ceil(ALIKE_SHARE * size) + 1]]
        for key in keys:
            near = (
                other
                for other in known[key][-MOST_COMPARED:]
                if isinstance(key, str) or _is_alike(of_text, words[other])
            )
            if (other := next(near, None)) is not None:
                alike |= {number, other}
                break
        for key in keys:
            known[key].append(number)
    return len(alike)


def _is_alike(one: frozenset[str], other: frozenset[str]) -> bool:
    is_near = len(one & other) >= ALIKE_SHARE * len(one | other)
    return is_near and not any(word.isdecimal() for word in one ^ other)
