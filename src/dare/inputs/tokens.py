"""What the rows of a model's embedding and head stand for, as its tokenizer tells.

Tokens are compared by their text, from `tokenizer.json` (or `vocab.json`, `vocab.txt`) and
`added_tokens.json`; without those, rows are compared by their number.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from dare.errors import InputError
from dare.inputs.directory import TOKENIZER_CONFIG, read_json, read_text
from dare.inputs.sources import Source
from dare.tensors.header import TensorInfo
from dare.tensors.json_values import parse_json
from dare.tensors.names import HEADS, INPUT_EMBEDDINGS

TOKENIZER_FILE = "tokenizer.json"
ADDED_TOKENS_FILE = "added_tokens.json"
MAX_TOKENS = 1 << 24
_NUMBER = re.compile(r"\d{1,18}", re.ASCII)

_FILES = (TOKENIZER_FILE, "vocab.json", "vocab.txt")
"""Of a tokenizer, the best first; the first as the tokenizers library writes it."""

_FLAGS = dict.fromkeys(("single_word", "lstrip", "rstrip"), False) | {
    "normalized": True,
    "special": False,
}
"""Of an added token, as they are if nothing says otherwise."""


@dataclass(frozen=True)
class Tokens:
    """What a tokenizer calls the rows."""

    ids: Mapping[str, int]
    added: Mapping[str, Mapping[str, bool]]
    """The flags of the tokens that were added to the tokenizer's own vocabulary."""


@dataclass(frozen=True)
class Vocabulary:
    """The rows of one model's embedding, and what they stand for."""

    name: str
    rows: int
    tokens: Tokens | None
    """None if there is no tokenizer to tell."""

    @cached_property
    def ids(self) -> dict[str, int]:
        """The tokens that have a row."""
        ids = self.tokens.ids if self.tokens else {}
        return {token: number for token, number in ids.items() if number < self.rows}

    def differs(self, other: Vocabulary) -> bool:
        """Whether rows of the same number stand for other tokens, as far as that is known."""
        both_known = self.tokens is not None and other.tokens is not None
        return self.rows != other.rows or (both_known and self.ids != other.ids)


# ---------------------------------------------------------------- rows


def _rank(tensor: str, info: TensorInfo) -> int | None:
    """How surely a tensor has a row for each token, by its name; 0 is best, None is not at all.

    >>> from dare.tensors.dtypes import STORAGE_TYPES
    >>> weight = TensorInfo("", STORAGE_TYPES["F32"], (4, 2), 0)
    >>> _rank("model.embed_tokens.weight", weight), _rank("model.norm.weight", weight)
    (0, None)
    """
    *_, module, kind = ("", *tensor.split("."))
    order = (*INPUT_EMBEDDINGS, *HEADS)
    has_rows = (kind, len(info.shape)) in (("weight", 2), ("bias", 1))
    return order.index(module) if module in order and has_rows and info.dtype.is_weight else None


def row_tensors(source: Source, rows: int) -> dict[str, TensorInfo]:
    """The tensors of a source that have a row for each of its tokens."""
    return {
        name: info
        for name, info in source.tensors.items()
        if _rank(name, info) is not None and info.shape[0] == rows
    }


# ---------------------------------------------------------------- tokenizers


class Tokenizers:
    """Reads tokenizers, the same content only once."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self._parsed: dict[tuple[str, bytes], Tokens | None] = {}

    def vocabulary(self, source: Source, name: str, directory: Path | None) -> Vocabulary | None:
        """The vocabulary of a source, or None if it has no embedding and no head."""
        ranked = [
            (rank, -info.shape[0])
            for tensor, info in source.tensors.items()
            if (rank := _rank(tensor, info)) is not None and len(info.shape) == 2
        ]
        if not ranked:
            return None
        return Vocabulary(name, -min(ranked)[1], self._read(directory) if directory else None)

    def _read(self, directory: Path) -> Tokens | None:
        """The tokens of a directory's tokenizer; None if there is none of a known form."""
        texts = ((name, read_text(directory, name)) for name in _FILES)
        found = next(((name, text) for name, text in texts if text is not None), None)
        if found is None:
            return None
        if found not in self._parsed:
            self._parsed[found] = _parse(found[1], directory / found[0])
        tokens = self._parsed[found]
        if tokens is None:
            self.notes.append(f"{directory / found[0]}: is of no known form; rows go by number")
        return tokens and _with_further_tokens(tokens, directory)


def _parse(text: bytes, where: Path) -> Tokens | None:
    """Read the file of a tokenizer; None if it is of another form than those of `_FILES`."""
    if where.name == "vocab.txt":
        lines = text.decode(errors="replace").removesuffix("\n").split("\n")
        return Tokens(_checked({token: n for n, token in enumerate(lines)}, where), {})
    document = parse_json(text, where)
    if not isinstance(document, dict):
        return None
    if where.name == "vocab.json":
        return Tokens(_checked(document, where), {})
    model, entries = document.get("model"), document.get("added_tokens", [])
    vocab = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocab, list) and all(isinstance(piece, list) and piece for piece in vocab):
        ids: dict[str, int] = {}
        for number, (token, *_) in enumerate(vocab):  # Unigram, with scores
            ids |= _checked_one(token, number, where)
        vocab = ids
    if not isinstance(vocab, dict) or not isinstance(entries, list):
        return None
    ids, added = _checked(vocab, where), {}
    for entry in entries:
        token, number, flags = _added_token(entry, where)
        added[token] = flags
        ids.setdefault(token, number)
    return Tokens(ids, added)


def _with_further_tokens(tokens: Tokens, directory: Path) -> Tokens:
    """Add what only tokenizer_config.json and added_tokens.json know of, as transformers does."""
    ids, added = dict(tokens.ids), dict(tokens.added)
    where = directory / TOKENIZER_CONFIG
    config = read_json(directory, TOKENIZER_CONFIG)
    decoder = config.get("added_tokens_decoder") if isinstance(config, dict) else None
    for number, entry in decoder.items() if isinstance(decoder, dict) else ():
        if not _NUMBER.fullmatch(number) or not isinstance(entry, dict):
            raise InputError(f"{where}: added_tokens_decoder must map numbers to tokens")
        token, identity, flags = _added_token({**entry, "id": int(number)}, where)
        if token not in ids:
            ids[token], added[token] = identity, flags
    further = read_json(directory, ADDED_TOKENS_FILE)
    known = {} if further is None else _checked(further, directory / ADDED_TOKENS_FILE)
    for token, identity in known.items():
        if token not in ids:
            ids[token], added[token] = identity, _FLAGS
    return Tokens(ids, added)


def _added_token(entry: Any, where: Path) -> tuple[str, int, dict[str, bool]]:
    token = entry.get("content") if isinstance(entry, dict) else None
    if not isinstance(token, str) or "id" not in entry:
        raise InputError(f"{where}: an added token needs id and content, found {_shown(entry)}")
    number = _checked_one(token, entry["id"], where)[token]
    return token, number, {flag: bool(entry.get(flag, usual)) for flag, usual in _FLAGS.items()}


def _shown(value: Any) -> str:
    """The beginning of a value, which may be huge or nested deeply."""
    try:
        return f"{value!a:.80}"
    except (ValueError, RecursionError):  # a number of thousands of digits
        return f"a {type(value).__name__}"


def _checked(vocab: Any, where: Path) -> dict[str, int]:
    """Refuse tokens that are no text, and ids that are no row of anything."""
    if not isinstance(vocab, dict):
        raise InputError(f"{where}: must map tokens to numbers")
    for token, number in vocab.items():
        _checked_one(token, number, where)
    return dict(vocab)


def _checked_one(token: Any, number: Any, where: Path) -> dict[str, int]:
    if not isinstance(token, str) or type(number) is not int or not 0 <= number < MAX_TOKENS:
        raise InputError(f"{where}: the token {_shown(token)} has the id {_shown(number)}")
    return {token: number}
