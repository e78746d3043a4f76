"""Models whose vocabulary is not the base's: added tokens, renamed ones, padded embeddings.

Tokens are compared by their text, from `tokenizer.json` (or `vocab.json`, `vocab.txt`) and
`added_tokens.json`; without those, rows are compared by their number.

Rows of embeddings are merged one by one, and each belongs to a token. If the tokenizers differ, the
rows of embedding and head are put into the output's order before anything is merged: each model is
presented with its own row for every token that it shares with the base, and with the base's row for
all others, so that its change there is zero. The base is presented with a row for each new token,
the mean of the rows of the models that have it. Readers of the sources see no difference.
The order may be a model's instead of the base's, and rows of single tokens may be chosen. If new
rows are merged, as mergekit does, models keep theirs, and only the others get the mean.

Nothing is copied beforehand: elements are read from the sources of their rows, or computed, when
they are needed.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import count
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dare.documents.notices import Notice, notice
from dare.documents.words import counted
from dare.errors import InputError, MismatchError
from dare.inputs.directory import EXAMPLES, TOKENIZER_CONFIG, read_json, read_text
from dare.inputs.sources import Aligned, Raw, Source, SourceView, read_floats
from dare.kernels import reference
from dare.recipe.entries import TokenEntry
from dare.tensors.chunks import bytes_digest
from dare.tensors.dtypes import STORAGE_TYPES, StorageType
from dare.tensors.header import TensorInfo, dump_json, parse_json, shorten
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
        """Return whether rows of the same number are known to belong to different tokens."""
        both_known = self.tokens is not None and other.tokens is not None
        return self.rows != other.rows or (both_known and self.ids != other.ids)


def row_tensors(source: Source, rows: int | None = None) -> dict[str, TensorInfo]:
    """Return the tensors of a source that have a row for each token, by their names.

    If `rows` is given, only those with this number of rows.
    """
    return {
        name: info
        for name, info in source.tensors.items()
        if row_rank(name) is not None
        if info.dtype.is_weight and len(info.shape) == (2 if name.endswith("weight") else 1)
        if rows in (None, info.shape[0])
    }


class Tokenizers:
    """Reads tokenizers; parses the same content only once."""

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
        """Read the tokens of a folder's tokenizer; None if there is none of a known form."""
        texts = ((name, read_text(directory, name)) for name in _FILES)
        best = next(((name, text) for name, text in texts if text is not None), None)
        if best is None:
            return None
        name, text = best
        if best not in self._parsed:
            self._parsed[best] = _parse(text, directory / name)
        tokens = self._parsed[best]
        if tokens is None:
            self.notes.append(notice("unknown_tokenizer", str(directory / name)))
        return tokens and _with_further_tokens(tokens, directory)


def _parse(text: bytes, where: Path) -> Tokens | None:
    """Read the file of a tokenizer; None if its content has an unknown form."""
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
    """Add tokens that only tokenizer_config.json and added_tokens.json have, as transformers."""
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
    """Refuse tokens that are not text, and ids that cannot be the number of a row."""
    ids: dict[str, int] = {}
    for token, number in pairs:
        if not isinstance(token, str) or type(number) is not int or not 0 <= number < MAX_TOKENS:
            raise InputError(f"{where}: token {shorten(token)}, id {shorten(number)}: not valid")
        ids[token] = number
    return ids


# ---------------------------------------------------------------- aligning

Vocabularies = tuple[Vocabulary, *tuple[Vocabulary | None, ...]]  # the base's, the models'
Chosen = Mapping[str, tuple[int | None, TokenEntry]]  # tokens, and the inputs that have their rows


def align(
    policy: str | int,
    base: Source,
    models: Sequence[Source],
    *,
    directories: Sequence[Path | None],
    names: Sequence[str],
    weights: Sequence[float],
    new_rows: str = "mean",
    pad_to_multiple_of: int | None = None,
    chosen: Chosen = MappingProxyType({}),
) -> Aligned:
    """Bring the rows of all models into the output's order, as the policy says.

    The policy is error, base or union, or the number of the model whose tokens the output has.
    `directories` have the tokenizers, the base's first; `names` and `weights` are the models';
    `chosen` has rows of single tokens. With `new_rows` other than "mean", models keep their rows of
    new tokens, and those that lack one take the plain mean; with "merge_all" this also holds for
    tokens that the base has. Raises MismatchError, with a line for each model, if the policy does
    not allow the models' tokens.
    """
    tokenizers = Tokenizers()
    vocabulary = tokenizers.vocabulary(base, "base", directories[0])
    if vocabulary is None:
        return Aligned(base, tuple(models))
    others = [
        tokenizers.vocabulary(model, name, directory)
        for model, name, directory in zip(models, names, directories[1:], strict=True)
    ]
    known = [other for other in others if other is not None]
    differing = [other for other in known if vocabulary.differs(other)]
    if policy == "error" and differing:
        raise MismatchError(*(_refusal(vocabulary, other) for other in differing))

    every: Vocabularies = (vocabulary, *others)
    number = policy if isinstance(policy, int) else 0
    order = _order(every, number, ("base", *names)[number])
    united = _new_tokens(vocabulary, known) if policy == "union" else {}
    added = _numbered(order, [t for t in (united | dict(chosen)) if t not in order.ids])
    ids = {**order.ids, **added}
    new = {
        token: n for token, n in ids.items() if vocabulary.tokens and token not in vocabulary.ids
    }
    rows = max([order.rows, *(n + 1 for n in added.values())])
    if pad_to_multiple_of is not None:
        rows = math.ceil(rows / pad_to_multiple_of) * pad_to_multiple_of
    differences = {other.name: _difference(vocabulary, other) for other in differing}
    notes = list(tokenizers.notes)
    notes += [notice("matched_by_token", name, differences=d) for name, d in differences.items()]
    if new:
        notes.append(notice("new_tokens", tokens=_listed(new)))
    if rows > vocabulary.rows:
        notes.append(notice("more_rows", rows=rows, before=vocabulary.rows))
    ids_of = [None if v is None or v.tokens is None else v.tokens.ids for v in every]
    tokens = (None if order.tokens is None else {**order.tokens.ids, **added}, *ids_of)
    counts = (rows, vocabulary.rows, *(None if other is None else other.rows for other in others))
    if rows == vocabulary.rows and not differing and not chosen:
        same = Aligned(base, tuple(models), counts, tokens=tokens, notes=tuple(notes))
        return replace(same, tokenizer=number or None)

    files = _tokenizer_files(directories[number], order, every, added)
    chosen_rows = {ids[token]: _chosen_row(token, *given, every) for token, given in chosen.items()}
    forced = frozenset(ids[token] for token, (_, row) in chosen.items() if row.force)
    # Models keep their rows of new tokens, or with "merge_all" of tokens that only some models
    # have; the others get the mean.
    merged = {"mean": {}, "merge": new}.get(new_rows, ids)
    split = [t for t in merged if t in new or len({t in v.ids for v in known if v.tokens}) == 2]
    kept = {token: ids[token] for token in (*chosen, *split) if ids[token] not in forced}
    sources = (base, *models)
    aligned, *presented = present(
        RowOrigins(order, every, sources, weights, new, chosen_rows, forced, kept, rows)
    )
    return Aligned(
        aligned,
        tuple(presented),
        counts,
        tokenizer=number if differing or number or files else None,
        tokenizer_files=files,
        token_ids=tuple(None if v is order else _token_ids(order, v, added) for v in every),
        tokens=tokens,
        differences=differences,
        notes=tuple(notes),
    )


# ---------------------------------------------------------------- how two vocabularies differ


def _difference(base: Vocabulary, other: Vocabulary) -> str:
    """Say how a model's vocabulary differs from the base's."""
    counts = f"its embedding has {other.rows:,} rows and the base's {base.rows:,}"
    if base.tokens is None or other.tokens is None:
        whose = "the base" if base.tokens is None else "it"
        return f"{counts}, and {whose} has no tokenizer to name them"
    fresh = {token: number for token, number in other.ids.items() if token not in base.ids}
    lacking = {token: number for token, number in base.ids.items() if token not in other.ids}
    moved = {token: n for token, n in other.ids.items() if base.ids.get(token, n) != n}
    findings = [
        f"{counted(len(tokens), *forms)}: {_listed(tokens)}"
        for forms, tokens in (
            (("of its tokens is not in the base", "of its tokens are not in the base"), fresh),
            (("of the base's tokens is not in it", "of the base's tokens are not in it"), lacking),
            (("token has a different id", "tokens have different ids"), moved),
        )
        if tokens
    ]
    if not findings:
        return f"{counts}, for the same tokens: only padding differs"
    return "; ".join(findings)


def _refusal(base: Vocabulary, other: Vocabulary) -> str:
    remedy = 'set vocabulary = "base" to keep the base\'s rows and tokenizer'
    if base.tokens is not None and other.tokens is not None and set(other.ids) - set(base.ids):
        remedy += ', or vocabulary = "union" to add the new tokens'
    return f"{other.name}: {_difference(base, other)}; {remedy}"


def _listed(tokens: Mapping[str, int]) -> str:
    ordered = sorted(tokens.items(), key=lambda item: (item[1], item[0]))
    shown = ", ".join(f"{token!r} {number}" for token, number in ordered[:EXAMPLES])
    return shown + (", …" if len(ordered) > EXAMPLES else "")


# ---------------------------------------------------------------- the output's tokens


def _order(every: Vocabularies, number: int, name: str) -> Vocabulary:
    """Return the vocabulary whose order the output's rows have; refuse one without tokens."""
    base, order = every[0], every[number]
    if order is None or (number and order.tokens is None):
        raise MismatchError(f"vocabulary: {name} has no tokenizer; choose a model that has one")
    if base.tokens is None and base.rows < order.rows:
        why = f"the base has no tokenizer, and fewer rows than {name}"
        raise MismatchError(f'vocabulary: {why}; set vocabulary = "base"')
    return order


def _new_tokens(base: Vocabulary, models: Sequence[Vocabulary]) -> dict[str, None]:
    """Return the tokens that only models have rows for, in their order in the output."""
    problems = [line for other in models for line in _obstacles(base, other)]
    if problems:
        raise MismatchError(*problems)
    if base.tokens is None:
        return {}
    ordered = (sorted(other.ids, key=other.ids.__getitem__) for other in models)
    return dict.fromkeys(t for tokens in ordered for t in tokens if t not in base.ids)


def _numbered(order: Vocabulary, tokens: Sequence[str]) -> dict[str, int]:
    """Return ids for tokens that have no row: those of their tokenizer, or the next free ones."""
    taken = order.tokens.ids if order.tokens else {}
    following = count(len(taken))
    added = {token: taken[token] if token in taken else next(following) for token in tokens}
    if not added.keys() <= taken.keys() and sorted(taken.values()) != list(range(len(taken))):
        why = "its tokenizer's ids have gaps or duplicates, so no token can be added"
        raise MismatchError(f'{order.name}: {why}; set vocabulary = "base"')
    return added


def _chosen_row(
    token: str, number: int | None, row: TokenEntry, every: Vocabularies
) -> list[tuple[int, int, float]]:
    """Return the owner of a chosen row, and its number there; none for a row of zeros."""
    if number is None:
        return []
    owner = every[number]
    word = token if row.token is None else row.token
    rows = owner.rows if owner else 0
    there = row.id if row.id is not None else owner.ids.get(word, rows) if owner else 0
    if there >= rows:
        what = f"the token {word!r}" if row.id is None else f"the id {row.id}"
        why = f"{row.model} has {rows:,} rows, and none for {what}"
        raise MismatchError(f"tokens.{token}: {why}; give a token or an id that it has")
    return [(number, there, 1.0)]


def _obstacles(base: Vocabulary, other: Vocabulary) -> Iterator[str]:
    if base.tokens is None or other.tokens is None:
        if base.rows < other.rows:
            yield _refusal(base, other)
        return
    known = {*base.tokens.ids, *other.tokens.added}
    if inner := {token: number for token, number in other.ids.items() if token not in known}:
        yield f'{other.name}: has a different tokenizer ({_listed(inner)}); set vocabulary = "base"'


def _token_ids(
    order: Vocabulary, other: Vocabulary | None, added: Mapping[str, int]
) -> dict[int, int | None] | None:
    if other is None or other.tokens is None:
        return None
    if order.tokens is None:
        return {number: number if number < order.rows else None for number in other.ids.values()}
    output = {**order.tokens.ids, **added}
    return {number: output.get(token) for token, number in other.tokens.ids.items()}


def _tokenizer_files(
    directory: Path | None,
    order: Vocabulary,
    every: Vocabularies,
    added: Mapping[str, int],
) -> dict[str, bytes]:
    """Return the tokenizer's files with further tokens added; none if nothing is added."""
    if not added or (order.tokens and set(added) <= set(order.tokens.ids)):
        return {}
    if directory is None or order.tokens is None:
        raise MismatchError(f"{order.name}: has no tokenizer that tokens can be added to")
    tokenizer = read_json(directory, TOKENIZER_FILE)
    if tokenizer is None:
        raise MismatchError(f'{directory}: has no {TOKENIZER_FILE}; set vocabulary = "base"')
    flags: dict[str, Mapping[str, bool]] = dict.fromkeys(added, _FLAGS)
    for vocabulary in (*reversed(every), order):  # the last of them to have a token decides
        flags |= vocabulary.tokens.added if vocabulary and vocabulary.tokens else {}
    appended = {token: number for token, number in added.items() if token not in order.tokens.ids}
    listed = tokenizer.setdefault("added_tokens", [])
    present = {entry["content"] for entry in listed}
    ids = order.tokens.ids
    further = {token: ids[token] for token in order.tokens.added if token not in present}
    more = {**further, **appended}.items()
    listed += [{"id": number, "content": token, **flags[token]} for token, number in more]
    listed.sort(key=lambda entry: int(entry["id"]))  # ids are given out in this order
    files = {TOKENIZER_FILE: dump_json(tokenizer, directory / TOKENIZER_FILE, indent=None)}
    config = read_json(directory, TOKENIZER_CONFIG)
    if isinstance(config, dict) and isinstance(config.get("added_tokens_decoder"), dict):
        config["added_tokens_decoder"] |= {
            str(number): {"content": token, **flags[token]} for token, number in appended.items()
        }
        files[TOKENIZER_CONFIG] = dump_json(config, directory / TOKENIZER_CONFIG)
    if (known := read_json(directory, ADDED_TOKENS_FILE)) is not None:
        files[ADDED_TOKENS_FILE] = dump_json({**known, **appended}, directory / ADDED_TOKENS_FILE)
    return files


PIECE = 1 << 16
SMALLEST_PREFETCH_BYTES = 4096

Rows = NDArray[np.int64]  # the input's row for each row of the output; -1 if it has none
Owners = Mapping[int, Sequence[tuple[int, int, float]]]  # inputs with a row: number, row, share
Fill = Callable[[int, Raw], None]  # fills an array with a tensor's elements from a position on


# ---------------------------------------------------------------- which row comes from where


@dataclass(frozen=True)
class RowOrigins:
    """Everything that decides the origin of each row; the base is the first of the inputs."""

    order: Vocabulary  # the one whose order the rows have
    vocabularies: Vocabularies
    inputs: Sequence[Source]
    weights: Sequence[float]
    new: Mapping[str, int]  # tokens that the base has no row for
    chosen_rows: Owners  # of rows that the recipe chooses
    forced: frozenset[int]  # the chosen rows that replace the row of every input
    kept: Mapping[str, int]  # tokens whose row a model keeps, if it has one
    rows: int

    def rows_of(self, other: Vocabulary) -> Rows:
        """Return an input's row for each row of the output; -1 if it has none that counts.

        New tokens may be in the padding, so the rows there do not count.
        """
        order = self.order
        shared = min(order.rows, other.rows)
        rows = np.full(self.rows, -1, np.int64)
        rows[:shared] = np.arange(shared)
        if order.tokens is not None and other.tokens is not None and order.ids != other.ids:
            rows[[number for number in other.ids.values() if number < shared]] = -1
            for token, number in order.ids.items():
                rows[number] = other.ids.get(token, -1)
        rows[[*self.new.values(), *self.forced]] = -1
        for token, number in self.kept.items():
            rows[number] = other.ids.get(token, -1)
        return rows

    def owners(self, base: TensorInfo) -> Owners:
        """Return the inputs that have each row.

        Shares go by weights if all are positive and the row is not merged.
        """
        fitting = {
            index: other.ids
            for index, (model, other) in enumerate(zip(self.inputs, self.vocabularies, strict=True))
            if other is not None and not model.delta_of(base.name).is_change
            if (info := row_tensors(model, other.rows).get(base.name)) is not None
            if info.shape[1:] == base.shape[1:]
        }
        owners = dict(self.chosen_rows)
        if any(index not in fitting for owner in owners.values() for index, _, _ in owner):
            what = "a model that [tokens] names has no matching rows"
            raise MismatchError(f"{base.name}: {what}; choose other rows in [tokens]")
        for token, number in {**self.new, **self.kept}.items():
            if number in owners:
                continue
            having = {index: ids[token] for index, ids in fitting.items() if index and token in ids}
            if not having:
                what = f"none of the models with the token {token!r} has a matching row"
                raise MismatchError(f'{base.name}: {what}; set vocabulary = "base"')
            weights = [self.weights[index - 1] for index in having]
            if min(weights) <= 0 or token in self.kept:
                weights = [1.0] * len(having)
            owners[number] = [
                (index, row, weight / math.fsum(weights))
                for (index, row), weight in zip(having.items(), weights, strict=True)
            ]
        return owners


def present(origins: RowOrigins) -> list[Source]:
    """Present the base and the models with their rows in the output's order."""
    inputs, (vocabulary, *others) = origins.inputs, origins.vocabularies
    base, *models = inputs
    base_rows = origins.rows_of(vocabulary)
    mappings = [None if other is None else origins.rows_of(other) for other in others]
    lent_rows = base_rows.copy()  # lent to models that lack a row
    lent_rows[list(origins.kept.values())] = -1
    stored = row_tensors(base, vocabulary.rows)
    owners = {name: origins.owners(info) for name, info in stored.items()}
    bases, lenders = (
        {
            name: RowTensor(
                *(base, info, info.dtype, rows), partial(_fill_means, info, inputs, owners[name])
            )
            for name, info in stored.items()
        }
        for rows in (base_rows, lent_rows)
    )
    digests = [None if r is None else bytes_digest(r.tobytes()) for r in (base_rows, *mappings)]
    decided = bytes_digest(json.dumps([origins.rows, digests, owners], sort_keys=True).encode())
    sources: list[Source] = [AlignedSource(base, inputs, bases, decided)]
    for model, other, rows in zip(models, others, mappings, strict=True):
        tensors = {}
        if other is not None and rows is not None:
            tensors = {
                name: _model_tensor(model, info, rows, lenders[name])
                for name, info in row_tensors(model, other.rows).items()
                if name in bases and info.shape[1:] == bases[name].info.shape[1:]
            }
        sources.append(AlignedSource(model, inputs, tensors, decided))
    return sources


def _model_tensor(model: Source, info: TensorInfo, rows: Rows, base: RowTensor) -> RowTensor:
    """Present a model's tensor, with the base's rows where it has none; in a delta, zeros.

    The base's rows keep their bits: if the types differ, both are presented in float32.
    """
    if model.delta_of(info.name).drop is not None:
        raise MismatchError(f"{info.name}: its rows cannot be moved; first run `dare apply`")
    if model.delta_of(info.name).is_change:
        return RowTensor(model, info, info.dtype, rows, lambda _, into: into.fill(0))
    base_type = base.info.dtype
    if info.dtype == base_type or (rows >= 0).all():
        return RowTensor(model, info, info.dtype, rows, base.read)
    fill = partial(_fill_decoded, base.read, base_type)
    return RowTensor(model, info, STORAGE_TYPES["F32"], rows, fill)


class AlignedSource(SourceView):
    """A source whose embedding and head have the output's rows, some from other sources."""

    def __init__(
        self, inner: Source, inputs: Sequence[Source], rows: Mapping[str, RowTensor], decided: str
    ) -> None:
        presented = {name: tensor.info for name, tensor in rows.items()}
        super().__init__(inner, {**inner.tensors, **presented}, computed=rows, opened=inputs)
        self._rows = rows
        self._decided = decided  # a digest of everything that decides where rows come from

    def fingerprint(self) -> list[Any]:
        return [*super().fingerprint(), self._decided]

    def compute(self, name: str, start: int, into: Raw) -> None:
        self._rows[name].read(start, into)

    def prefetch(self, name: str, start: int, count: int) -> None:
        super().prefetch(name, start, count)
        if name in self._rows:
            self._rows[name].prefetch(start, count)


class RowTensor:
    """A tensor whose rows come from another one, in runs; missing ones come from `fill`."""

    def __init__(
        self, source: Source, stored: TensorInfo, kind: StorageType, rows: Rows, fill: Fill
    ) -> None:
        shape = len(rows), *stored.shape[1:]
        self.info = replace(stored, dtype=kind, shape=shape, start=0)
        self._source = source
        self._stored = stored
        self._width = math.prod(stored.shape[1:])
        self._rows = rows
        self._fill = fill
        self._read_stored: Fill = partial(source.read, stored.name)
        if kind != stored.dtype:
            self._read_stored = partial(_fill_decoded, self._read_stored, stored.dtype)

    def read(self, start: int, into: Raw) -> None:
        """Fill `into` with elements from `start` on."""
        for begin, end, there in self._pieces(start, start + into.size):
            part = into[begin - start : end - start]
            if there is None:
                self._fill(begin, part)
            else:
                self._read_stored(there, part)

    def prefetch(self, start: int, count: int) -> None:
        """Pass on requests for the source's rows, except small ones."""
        size = self._stored.dtype.itemsize
        for begin, end, there in self._pieces(start, start + count):
            if there is not None and (end - begin) * size >= SMALLEST_PREFETCH_BYTES:
                self._source.prefetch(self._stored.name, there, end - begin)

    def _pieces(self, begin: int, end: int) -> Iterator[tuple[int, int, int | None]]:
        """Cut a range of elements where runs of rows end; add the start of each in the source."""
        if begin >= end:
            return
        top = begin // self._width
        rows = self._rows[top : -(-end // self._width)]
        runs = np.flatnonzero(_begins_run(rows)).tolist()
        for run, next_run in zip(runs, [*runs[1:], rows.size], strict=True):
            stop = min(end, (top + next_run) * self._width)
            there = begin + (int(rows[run]) - top - run) * self._width
            yield begin, stop, None if rows[run] < 0 else there
            begin = stop


def _begins_run(rows: Rows) -> NDArray[np.bool_]:
    """Return for each row whether it begins a run, instead of continuing the one before.

    >>> _begins_run(np.array([0, 1, 2, -1, -1, 7])).tolist()
    [True, False, False, True, False, True]
    """
    before, after = rows[:-1], rows[1:]
    both_absent = (before < 0) & (after < 0)
    both_follow = (before >= 0) & (after == before + 1)
    return np.concatenate([[True], ~(both_absent | both_follow)])[: rows.size]


def _fill_decoded(read: Fill, stored: StorageType, start: int, into: Raw) -> None:
    """Read elements of a storage type and decode them, piece by piece."""
    raw = np.empty(min(PIECE, into.size), stored.carrier)
    for done in range(0, into.size, PIECE):
        part = into[done : done + PIECE]
        read(start + done, raw[: part.size])
        reference.decode(raw[: part.size], part)


def _fill_means(
    base: TensorInfo, inputs: Sequence[Source], owners: Owners, start: int, into: Raw
) -> None:
    """Fill in rows of tokens: Σ share · row over the inputs that have it; zeros if none has."""
    width, done = math.prod(base.shape[1:]), 0
    while done < into.size:
        row, column = divmod(start + done, width)
        part = into[done : done + min(width - column, PIECE)]
        mean = np.zeros(part.size, np.float32)
        with np.errstate(invalid="ignore", over="ignore"):
            for place, (index, there, share) in enumerate(owners.get(row, ())):
                values = read_floats(inputs[index], base.name, there * width + column, part.size)
                values *= np.float32(share)
                mean = mean + values if place else values  # not 0 + values, which loses a −0
        reference.encode(mean, part)
        done += part.size
