"""The meaning of the rows of a model's embedding and head, by its tokenizer.

Tokens are compared by their text, from `tokenizer.json` (or `vocab.json`, `vocab.txt`) and
`added_tokens.json`; without those, rows are compared by their number.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import Any

from dare.documents.notices import Notice, notice
from dare.errors import InputError
from dare.inputs.directory import TOKENIZER_CONFIG, read_json, read_text
from dare.inputs.sources import Source
from dare.tensors.header import TensorInfo, shorten
from dare.tensors.json_values import parse_json
from dare.tensors.names import row_rank

TOKENIZER_FILE = "tokenizer.json"
ADDED_TOKENS_FILE = "added_tokens.json"
MAX_TOKENS = 1 << 24
_NUMBER = re.compile(r"\d{1,18}", re.ASCII)

# Files of a tokenizer, the best first; the first as the tokenizers library writes it.
_FILES = (TOKENIZER_FILE, "vocab.json", "vocab.txt")

_FLAGS = dict.fromkeys(("single_word", "lstrip", "rstrip"), False) | {
    "normalized": True,
    "special": False,
}


@dataclass(frozen=True)
class Tokens:
    """The names that a tokenizer gives to rows."""

    ids: Mapping[str, int]
    added: Mapping[str, Mapping[str, bool]]  # flags of tokens added to the vocabulary


@dataclass(frozen=True)
class Vocabulary:
    """The rows of one model's embedding; `tokens` is None if there is no tokenizer."""

    name: str
    rows: int
    tokens: Tokens | None

    @cached_property
    def ids(self) -> dict[str, int]:
        """The tokens that have a row."""
        ids = self.tokens.ids if self.tokens else {}
        return {token: number for token, number in ids.items() if number < self.rows}

    def differs(self, other: Vocabulary) -> bool:
        """Return whether rows of the same number are known to stand for other tokens."""
        both_known = self.tokens is not None and other.tokens is not None
        return self.rows != other.rows or (both_known and self.ids != other.ids)


def row_tensors(source: Source, rows: int | None = None) -> dict[str, TensorInfo]:
    """Return the tensors of a source that have a row for each token, by their names.

    If the number of `rows` is given, they have as many.
    """
    return {
        name: info
        for name, info in source.tensors.items()
        if row_rank(name) is not None
        if info.dtype.is_weight and len(info.shape) == (2 if name.endswith("weight") else 1)
        if rows in (None, info.shape[0])
    }


class Tokenizers:
    """Reads tokenizers, the same content only once."""

    def __init__(self) -> None:
        self.notes: list[Notice] = []
        self._parsed: dict[tuple[str, bytes], Tokens | None] = {}

    def vocabulary(self, source: Source, name: str, directory: Path | None) -> Vocabulary | None:
        """Read the vocabulary of a source, or None if it has no embedding and no head."""
        ranked = [
            (row_rank(tensor) or 0, -info.shape[0])
            for tensor, info in row_tensors(source).items()
            if len(info.shape) == 2
        ]
        if not ranked:
            return None
        return Vocabulary(name, -min(ranked)[1], self._read(directory) if directory else None)

    def _read(self, directory: Path) -> Tokens | None:
        """Read the tokens of a directory's tokenizer; None if there is none of a known form."""
        texts = ((name, read_text(directory, name)) for name in _FILES)
        found = next(((name, text) for name, text in texts if text is not None), None)
        if found is None:
            return None
        if found not in self._parsed:
            self._parsed[found] = _parse(found[1], directory / found[0])
        tokens = self._parsed[found]
        if tokens is None:
            self.notes.append(notice("unknown_tokenizer", str(directory / found[0])))
        return tokens and _with_further_tokens(tokens, directory)


def _parse(text: bytes, where: Path) -> Tokens | None:
    """Read the file of a tokenizer; None if it is of another form than those of `_FILES`."""
    if where.name == "vocab.txt":
        lines = text.decode(errors="replace").removesuffix("\n").split("\n")
        return Tokens(_checked(zip(lines, count(), strict=False), where), {})
    document = parse_json(text, where)
    if not isinstance(document, dict):
        return None
    if where.name == "vocab.json":
        return Tokens(_checked(document.items(), where), {})
    model, entries = document.get("model"), document.get("added_tokens", [])
    vocab = model.get("vocab") if isinstance(model, dict) else None
    pairs: Iterable[tuple[Any, Any]]
    if isinstance(vocab, list) and all(isinstance(piece, list) and piece for piece in vocab):
        pairs = ((token, number) for number, (token, *_) in enumerate(vocab))  # Unigram
    elif isinstance(vocab, dict):
        pairs = vocab.items()
    else:
        return None
    if not isinstance(entries, list):
        return None
    ids, added = _checked(pairs, where), {}
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
    if not isinstance(further, dict | None):
        raise InputError(f"{directory / ADDED_TOKENS_FILE}: must map tokens to numbers")
    known = _checked((further or {}).items(), directory / ADDED_TOKENS_FILE)
    for token, identity in known.items():
        if token not in ids:
            ids[token], added[token] = identity, _FLAGS
    return Tokens(ids, added)


def _added_token(entry: Any, where: Path) -> tuple[str, int, dict[str, bool]]:
    token = entry.get("content") if isinstance(entry, dict) else None
    if not isinstance(token, str) or "id" not in entry:
        raise InputError(f"{where}: an added token needs id and content, found {shorten(entry)}")
    number = _checked([(token, entry["id"])], where)[token]
    return token, number, {flag: bool(entry.get(flag, usual)) for flag, usual in _FLAGS.items()}


def _checked(pairs: Iterable[tuple[Any, Any]], where: Path) -> dict[str, int]:
    """Refuse tokens that are no text, and ids that are no row of anything."""
    ids: dict[str, int] = {}
    for token, number in pairs:
        if not isinstance(token, str) or type(number) is not int or not 0 <= number < MAX_TOKENS:
            raise InputError(f"{where}: the token {shorten(token)} has the id {shorten(number)}")
        ids[token] = number
    return ids
