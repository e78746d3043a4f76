"""Models whose vocabulary is not the base's: added tokens, renamed ones, padded embeddings.

Merging takes place row by row, and a row means a token. Where the tokenizers differ, the rows of
embedding and head are put in one order, that of the output, before anything is merged: each model
is presented with its own row for every token that it shares with the base, and with the base's row
for all others, where its change is therefore zero. The base is presented with a row for each new
token, the mean of the rows of the models that have it. What reads the sources notices nothing.

Tokens are compared by their text, from `tokenizer.json` (or `vocab.json`, `vocab.txt`) and
`added_tokens.json`; without those, rows are compared by their number.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

from dare.dtypes import STORAGE_TYPES, StorageType
from dare.errors import InputError, MismatchError
from dare.io.digest import bytes_digest
from dare.io.header import TensorInfo
from dare.io.sources import Source
from dare.io.views import SourceView
from dare.kernels import reference
from dare.sidecars import TOKENIZER_CONFIG, dump_json, parse_json, read_json, read_text

Policy = Literal["error", "base", "union"]

INPUT_EMBEDDINGS = (
    "embed_tokens",
    "wte",
    "word_embeddings",
    "tok_embeddings",
    "embed_in",
    "token_embd",
    "token_embedding",
    "shared",
    "embeddings",
    "embedding",
)
HEADS = ("lm_head", "output", "output_layer", "embed_out", "head", "decoder", "predictions")
"""Last part of the names of the modules that have a row for each token, before .weight or .bias.

A tensor counts only if it also has as many rows as the embedding of its own model.
"""

TOKENIZER_FILE = "tokenizer.json"
ADDED_TOKENS_FILE = "added_tokens.json"
MAX_TOKENS = 1 << 24
EXAMPLES = 5
PIECE = 1 << 16
"""Elements that are converted or averaged at a time."""
SMALLEST_PREFETCH = 4096

_FLAGS = {
    "single_word": False,
    "lstrip": False,
    "rstrip": False,
    "normalized": True,
    "special": False,
}
"""Of an added token, as they are if nothing says otherwise."""

Bytes = NDArray[np.uint8]
Rows = NDArray[np.int64]
"""For each row of the output, a row of the input; -1 for one that the input does not have."""
Owners = Mapping[int, Sequence[tuple[int, int, float]]]
"""For a new row, the models that have it: which one, its row there, its share."""
Fill = Callable[[int, Bytes], None]
"""Fills bytes with a tensor's elements from a position on."""


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
        found = {} if self.tokens is None else self.tokens.ids
        return {token: number for token, number in found.items() if number < self.rows}


@dataclass(frozen=True)
class Aligned:
    """Sources with rows in one order, and what else an output with that order needs."""

    base: Source
    models: tuple[Source, ...]
    rows: tuple[int | None, ...] = ()
    """Of the output's embedding, the base's and each model's; None where there is none."""
    keeps_base_tokenizer: bool = False
    """Whether only the base's tokenizer fits the output, with the files that are replaced."""
    tokenizer_files: Mapping[str, bytes] = field(default_factory=dict)
    """Files of the base's tokenizer that have another content in the output."""
    token_ids: tuple[Mapping[int, int | None] | None, ...] = ()
    """For each model the output's id of each of its own; none at all where nothing differs."""
    notes: tuple[str, ...] = ()

    def resized(self, chosen: int = 0) -> tuple[int, int] | None:
        """Rows of an input (0 is the base, 1 the first model) and of the output, if they differ."""
        if not self.rows:
            return None
        output, before = self.rows[0], self.rows[1 + chosen]
        return None if output is None or before in (None, output) else (before, output)


def align(
    policy: Policy,
    base: Source,
    models: Sequence[Source],
    *,
    directories: Sequence[Path | None],
    names: Sequence[str],
    weights: Sequence[float],
    pad_to_multiple_of: int | None = None,
) -> Aligned:
    """Bring the rows of all models into the output's order, as the policy says.

    `directories` are where the tokenizers lie, the base's first; `names` and `weights` are the
    models'. Raises MismatchError, with a line for each model, where the policy does not allow it.
    """
    tokenizers = _Tokenizers()
    own = _vocabulary(base, "base", directories[0], tokenizers)
    if own is None:
        return Aligned(base, tuple(models))
    others = [
        _vocabulary(model, name, directory, tokenizers)
        for model, name, directory in zip(models, names, directories[1:], strict=True)
    ]
    known = [vocabulary for vocabulary in others if vocabulary is not None]
    differing = [vocabulary for vocabulary in known if _differs(own, vocabulary)]
    if policy == "error" and differing:
        raise MismatchError("\n  ".join(_explain(own, vocabulary) for vocabulary in differing))

    new = _new_tokens(own, known) if policy == "union" else {}
    rows = max([own.rows, *(number + 1 for number in new.values())])
    if pad_to_multiple_of is not None:
        rows = math.ceil(rows / pad_to_multiple_of) * pad_to_multiple_of
    notes = (*tokenizers.notes, *_notes(own, differing, new, rows))
    counts = (rows, own.rows, *(None if other is None else other.rows for other in others))
    if rows == own.rows and not differing:
        return Aligned(base, tuple(models), counts, notes=notes)

    aligned, *presented = _present(_Merge(own, others, base, models, weights, new, rows))
    return Aligned(
        aligned,
        tuple(presented),
        counts,
        keeps_base_tokenizer=bool(differing),
        tokenizer_files=_tokenizer_files(directories[0], own, known, new),
        token_ids=tuple(_token_ids(own, other, new) for other in others),
        notes=notes,
    )


# ---------------------------------------------------------------- what a model's rows are


def _vocabulary(
    source: Source, name: str, directory: Path | None, tokenizers: _Tokenizers
) -> Vocabulary | None:
    """The vocabulary of a source, or None if it has no embedding and no head."""
    ranked = [
        (rank, -info.shape[0])
        for tensor, info in source.tensors.items()
        if (rank := _rank(tensor, info)) is not None and len(info.shape) == 2
    ]
    if not ranked:
        return None
    _, negative = min(ranked)
    return Vocabulary(name, -negative, tokenizers.read(directory) if directory else None)


def _rank(tensor: str, info: TensorInfo) -> int | None:
    """How surely a tensor has a row for each token, by its name; 0 is best, None is not at all.

    >>> weight = TensorInfo("", STORAGE_TYPES["F32"], (4, 2), 0)
    >>> _rank("model.embed_tokens.weight", weight), _rank("model.norm.weight", weight)
    (0, None)
    """
    module, _, kind = tensor.rpartition(".")
    last = module.rpartition(".")[2]
    order = (*INPUT_EMBEDDINGS, *HEADS)
    if not info.dtype.is_weight or last not in order:
        return None
    if (kind, len(info.shape)) not in (("weight", 2), ("bias", 1)):
        return None
    return order.index(last)


def _row_tensors(source: Source, rows: int) -> dict[str, TensorInfo]:
    """The tensors of a source that have a row for each of its tokens."""
    return {
        name: info
        for name, info in source.tensors.items()
        if _rank(name, info) is not None and info.shape[0] == rows
    }


class _Tokenizers:
    """Reads tokenizers, the same content only once."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self._parsed: dict[tuple[str, bytes], Tokens | None] = {}

    def read(self, directory: Path) -> Tokens | None:
        """The tokens of a directory's tokenizer; None if there is none of a known form."""
        for name, parse in _PARSERS.items():
            text = read_text(directory, name)
            if text is None:
                continue
            if (name, text) not in self._parsed:
                self._parsed[name, text] = parse(text, directory / name)
            tokens = self._parsed[name, text]
            if tokens is None:
                self.notes.append(f"{directory / name}: of no known form; rows go by their numbers")
                return None
            return _with_further_tokens(tokens, directory)
        return None


def _parse_tokenizer(text: bytes, where: Path) -> Tokens | None:
    """Read tokenizer.json, as the tokenizers library writes it."""
    document = parse_json(text, where)
    model = document.get("model") if isinstance(document, dict) else None
    vocab = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocab, list) and all(isinstance(piece, list) and piece for piece in vocab):
        vocab = {piece[0]: number for number, piece in enumerate(vocab)}  # Unigram, with scores
    entries = document.get("added_tokens", []) if isinstance(document, dict) else None
    if not isinstance(vocab, dict) or not isinstance(entries, list):
        return None
    ids = _checked(vocab, where)
    added: dict[str, Mapping[str, bool]] = {}
    for entry in entries:
        token, number, flags = _added_token(entry, where)
        ids.setdefault(token, number)
        added[token] = flags
    return Tokens(ids, added)


def _parse_vocab_json(text: bytes, where: Path) -> Tokens | None:
    vocab = parse_json(text, where)
    return Tokens(_checked(vocab, where), {}) if isinstance(vocab, dict) else None


def _parse_vocab_txt(text: bytes, where: Path) -> Tokens | None:
    lines = text.decode(errors="replace").removesuffix("\n").split("\n")
    return Tokens(_checked({token: n for n, token in enumerate(lines)}, where), {})


_PARSERS: dict[str, Callable[[bytes, Path], Tokens | None]] = {
    TOKENIZER_FILE: _parse_tokenizer,
    "vocab.json": _parse_vocab_json,
    "vocab.txt": _parse_vocab_txt,
}


def _with_further_tokens(tokens: Tokens, directory: Path) -> Tokens:
    """Add what only tokenizer_config.json and added_tokens.json know of, as transformers does."""
    ids, added = dict(tokens.ids), dict(tokens.added)
    where = directory / TOKENIZER_CONFIG
    config = read_json(directory, TOKENIZER_CONFIG)
    decoder = config.get("added_tokens_decoder") if isinstance(config, dict) else None
    for number, entry in decoder.items() if isinstance(decoder, dict) else ():
        if not number.isdecimal() or not isinstance(entry, dict):
            raise InputError(f"{where}: added_tokens_decoder must map numbers to tokens")
        token, identity, flags = _added_token({**entry, "id": int(number)}, where)
        if token not in ids:
            ids[token], added[token] = identity, flags
    further = read_json(directory, ADDED_TOKENS_FILE)
    for token, identity in _checked(further or {}, directory / ADDED_TOKENS_FILE).items():
        if token not in ids:
            ids[token], added[token] = identity, _FLAGS
    return Tokens(ids, added)


def _added_token(entry: Any, where: Path) -> tuple[str, int, dict[str, bool]]:
    if not isinstance(entry, dict) or not {"id", "content"} <= set(entry):
        raise InputError(f"{where}: an added token needs id and content, found {entry!a:.80}")
    ((token, number),) = _checked({entry["content"]: entry["id"]}, where).items()
    return token, number, {flag: bool(entry.get(flag, usual)) for flag, usual in _FLAGS.items()}


def _checked(vocab: Any, where: Path) -> dict[str, int]:
    """Refuse tokens that are no text, and ids that are no row of anything."""
    if not isinstance(vocab, dict):
        raise InputError(f"{where}: must map tokens to numbers")
    for token, number in vocab.items():
        if not isinstance(token, str) or type(number) is not int or not 0 <= number < MAX_TOKENS:
            raise InputError(
                f"{where}: the token {token!a:.80} has the id {number!a:.80}; expected text and a "
                f"whole number below {MAX_TOKENS}"
            )
    return dict(vocab)


# ---------------------------------------------------------------- how two vocabularies differ


def _differs(own: Vocabulary, other: Vocabulary) -> bool:
    both_told = own.tokens is not None and other.tokens is not None
    return own.rows != other.rows or (both_told and own.ids != other.ids)


def _difference(own: Vocabulary, other: Vocabulary) -> str:
    """Say how a model's vocabulary differs from the base's."""
    counts = f"its embedding has {other.rows:,} rows and the base's {own.rows:,}"
    if own.tokens is None or other.tokens is None:
        whose = "the base" if own.tokens is None else "it"
        return f"{other.name}: {counts}, and {whose} has no tokenizer to say what they are"
    fresh = {token: number for token, number in other.ids.items() if token not in own.ids}
    lacking = {token: number for token, number in own.ids.items() if token not in other.ids}
    moved = {
        token: number for token, number in other.ids.items() if own.ids.get(token, number) != number
    }
    findings = [
        f"{len(tokens):,} {text}: {_listed(tokens)}"
        for text, tokens in (
            ("of its tokens are not in the base", fresh),
            ("of the base's tokens it does not have", lacking),
            ("tokens have another id in it", moved),
        )
        if tokens
    ]
    if not findings:
        return f"{other.name}: {counts}, for the same tokens: only padding differs"
    return f"{other.name}: {'; '.join(findings)}"


def _explain(own: Vocabulary, other: Vocabulary) -> str:
    remedy = 'set vocabulary = "base" to keep the base\'s rows and tokenizer'
    if own.tokens is not None and other.tokens is not None and set(other.ids) - set(own.ids):
        remedy += ', or vocabulary = "union" to have the new tokens too'
    return f"{_difference(own, other)}; {remedy}"


def _listed(tokens: Mapping[str, int]) -> str:
    """Some tokens with their ids, lowest first."""
    ordered = sorted(tokens.items(), key=lambda item: (item[1], item[0]))
    shown = ", ".join(f"{token!r} {number}" for token, number in ordered[:EXAMPLES])
    return shown + (", …" if len(ordered) > EXAMPLES else "")


def _notes(
    own: Vocabulary, differing: Sequence[Vocabulary], new: Mapping[str, int], rows: int
) -> Iterator[str]:
    for other in differing:
        yield f"{_difference(own, other)}; rows are matched by token where both are known"
    if new:
        yield f"new tokens, with their ids in the output: {_listed(new)}"
    if rows > own.rows:
        yield f"embedding and head have {rows:,} rows in the output, {own.rows:,} in the base"


# ---------------------------------------------------------------- a union


def _new_tokens(own: Vocabulary, models: Sequence[Vocabulary]) -> dict[str, int]:
    """The tokens that models have rows for and the base has not, with their ids in the output."""
    problems = [line for other in models for line in _obstacles(own, other)]
    if problems:
        raise MismatchError("\n  ".join(problems))
    if own.tokens is None:
        return {}
    new: dict[str, int] = {}
    following = len(own.tokens.ids)
    for other in models:
        for token in sorted(set(other.ids) - set(own.ids) - set(new), key=other.ids.__getitem__):
            if token in own.tokens.ids:  # the base's tokenizer has it, and its embedding has not
                new[token] = own.tokens.ids[token]
            else:
                new[token] = following
                following += 1
    taken = sorted(own.tokens.ids.values())
    if following > len(taken) and taken != list(range(len(taken))):
        raise MismatchError(
            "base: the ids of its tokenizer have gaps or occur twice, so that new tokens cannot be "
            'appended; set vocabulary = "base" to leave them out'
        )
    return new


def _obstacles(own: Vocabulary, other: Vocabulary) -> Iterator[str]:
    """Why a model's new tokens cannot be taken in."""
    if own.tokens is None or other.tokens is None:
        if own.rows < other.rows:
            yield (f'{_difference(own, other)}; set vocabulary = "base" to keep the base\'s rows')
        return
    inner = {
        token: number
        for token, number in other.ids.items()
        if token not in own.tokens.ids and token not in other.tokens.added
    }
    if inner:
        yield (
            f"{other.name}: {len(inner):,} tokens are not in the base and were not added to a "
            f'tokenizer but belong to another one: {_listed(inner)}; set vocabulary = "base" to '
            "merge only what is shared"
        )


def _token_ids(
    own: Vocabulary, other: Vocabulary | None, new: Mapping[str, int]
) -> dict[int, int | None] | None:
    """What a model's token ids become in the output."""
    if other is None or other.tokens is None:
        return None
    if own.tokens is None:
        return {number: number if number < own.rows else None for number in other.ids.values()}
    output = {**own.tokens.ids, **new}
    return {number: output.get(token) for token, number in other.tokens.ids.items()}


def _tokenizer_files(
    directory: Path | None, own: Vocabulary, models: Sequence[Vocabulary], new: Mapping[str, int]
) -> dict[str, bytes]:
    """The base's tokenizer files with the new tokens in them."""
    if directory is None or own.tokens is None or set(new) <= set(own.tokens.ids):
        return {}
    tokenizer = read_json(directory, TOKENIZER_FILE)
    if tokenizer is None:
        raise MismatchError(
            f"{directory}: has no {TOKENIZER_FILE} that tokens could be added to; make one with "
            'AutoTokenizer.from_pretrained(…).save_pretrained(…), or set vocabulary = "base"'
        )
    flags = dict(own.tokens.added)
    for model in models:
        for token, known in (model.tokens.added if model.tokens else {}).items():
            flags.setdefault(token, known)
    appended = {token: number for token, number in new.items() if token not in own.tokens.ids}
    entries = {token: {"content": token, **flags[token]} for token in appended}

    listed = tokenizer.setdefault("added_tokens", [])
    present = {entry["content"] for entry in listed}
    further = {token: own.tokens.ids[token] for token in own.tokens.added if token not in present}
    listed += [
        {"id": number, "content": token, **flags[token]}
        for token, number in {**further, **appended}.items()
    ]
    listed.sort(key=lambda entry: int(entry["id"]))  # ids are given out in this order
    files = {TOKENIZER_FILE: dump_json(tokenizer, directory / TOKENIZER_FILE, indent=None)}
    config = read_json(directory, TOKENIZER_CONFIG)
    if isinstance(config, dict) and isinstance(config.get("added_tokens_decoder"), dict):
        config["added_tokens_decoder"] |= {str(appended[t]): entry for t, entry in entries.items()}
        files[TOKENIZER_CONFIG] = dump_json(config, directory / TOKENIZER_CONFIG)
    if (added := read_json(directory, ADDED_TOKENS_FILE)) is not None:
        files[ADDED_TOKENS_FILE] = dump_json({**added, **appended}, directory / ADDED_TOKENS_FILE)
    return files


# ---------------------------------------------------------------- sources with other rows


@dataclass(frozen=True)
class _Merge:
    """What decides which row comes from where."""

    own: Vocabulary
    others: Sequence[Vocabulary | None]
    base: Source
    models: Sequence[Source]
    weights: Sequence[float]
    new: Mapping[str, int]
    rows: int

    def base_rows(self) -> Rows:
        """The base's row for each row of the output; new tokens may lie in its padding."""
        rows = np.full(self.rows, -1, np.int64)
        rows[: self.own.rows] = np.arange(self.own.rows)
        rows[list(self.new.values())] = -1
        return rows

    def model_rows(self, other: Vocabulary) -> Rows:
        """A model's row for each row of the output; only for those that the base has as well."""
        own = self.own
        shared = min(own.rows, other.rows)
        rows = np.full(self.rows, -1, np.int64)
        rows[:shared] = np.arange(shared)
        if own.tokens is not None and other.tokens is not None and own.ids != other.ids:
            rows[[number for number in other.ids.values() if number < shared]] = -1
            for token, number in own.ids.items():
                rows[number] = other.ids.get(token, -1)
        rows[list(self.new.values())] = -1
        return rows

    def owners(self, tensor: str) -> Owners:
        """For each new row the models that have it: which, their row, and their share."""
        fitting = {
            index: other.ids
            for index, other in enumerate(self.others)
            if other is not None and self._fits(tensor, self.models[index], other)
        }
        return {number: self._shares(tensor, token, fitting) for token, number in self.new.items()}

    def _fits(self, tensor: str, model: Source, other: Vocabulary) -> bool:
        info = _row_tensors(model, other.rows).get(tensor)
        return (
            info is not None
            and info.shape[1:] == self.base.tensors[tensor].shape[1:]
            and not model.holds_delta(tensor)
        )

    def _shares(
        self, tensor: str, token: str, fitting: Mapping[int, Mapping[str, int]]
    ) -> list[tuple[int, int, float]]:
        """Shares in proportion to the models' weights; equal ones if a weight is not positive."""
        having = {index: ids[token] for index, ids in fitting.items() if token in ids}
        if not having:
            raise MismatchError(
                f"{tensor}: no model that has the token {token!r} holds a row for it here; "
                'set vocabulary = "base" to leave new tokens out'
            )
        weights = [self.weights[index] for index in having]
        if min(weights) <= 0:
            weights = [1.0] * len(having)
        return [
            (index, row, weight / sum(weights))
            for (index, row), weight in zip(having.items(), weights, strict=True)
        ]


def _present(merge: _Merge) -> list[Source]:
    """The base and the models with their rows in the output's order."""
    inputs = _Inputs([merge.base, *merge.models])
    base_rows = merge.base_rows()
    owners = {name: merge.owners(name) for name in _row_tensors(merge.base, merge.own.rows)}
    bases = {
        name: RowTensor(
            merge.base,
            merge.base.tensors[name],
            merge.base.tensors[name].dtype,
            base_rows,
            _means(merge.base.tensors[name], merge.models, of),
        )
        for name, of in owners.items()
    }
    mappings = [None if other is None else merge.model_rows(other) for other in merge.others]
    decided = _digest(merge.rows, mappings, owners)
    sources: list[Source] = [AlignedSource(merge.base, inputs, bases, decided)]
    for model, other, rows in zip(merge.models, merge.others, mappings, strict=True):
        tensors = {}
        if other is not None and rows is not None:
            tensors = {
                name: _model_tensor(model, info, rows, bases[name])
                for name, info in _row_tensors(model, other.rows).items()
                if name in bases and info.shape[1:] == bases[name].info.shape[1:]
            }
        sources.append(AlignedSource(model, inputs, tensors, decided))
    return sources


def _digest(rows: int, mappings: Sequence[Rows | None], owners: Mapping[str, Owners]) -> str:
    """Stands for all that decides which row comes from where."""
    digests = [None if rows is None else bytes_digest(rows.tobytes()) for rows in mappings]
    return bytes_digest(json.dumps([rows, digests, owners], sort_keys=True).encode())


def _model_tensor(model: Source, info: TensorInfo, rows: Rows, base: RowTensor) -> RowTensor:
    """A model's tensor, with the base's rows where it has none; of a delta, rows of zeros.

    The base's rows are the base's to the bit: if the types differ, both are presented in float32.
    """
    if model.holds_delta(info.name):
        return RowTensor(model, info, info.dtype, rows, _zeros)
    base_type = base.info.dtype
    if info.dtype == base_type or (rows >= 0).all():
        return RowTensor(model, info, info.dtype, rows, base.read_elements)
    fill = _in_float32(base.read_elements, base_type)
    return RowTensor(model, info, STORAGE_TYPES["F32"], rows, fill)


class _Inputs:
    """All sources of a merge, opened and closed together: rows of one are read through another."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self._sources = {id(source): source for source in sources}.values()
        self._stack = ExitStack()
        self._users = 0

    def open(self) -> None:
        """Open all, unless they are."""
        if not self._users:
            with ExitStack() as stack:
                for source in self._sources:
                    stack.enter_context(source)
                self._stack = stack.pop_all()
        self._users += 1

    def close(self) -> None:
        """Close all, unless somebody still uses them."""
        self._users -= 1
        if not self._users:
            self._stack.close()


class AlignedSource(SourceView):
    """A source whose embedding and head have the output's rows."""

    def __init__(
        self, inner: Source, inputs: _Inputs, rows: Mapping[str, RowTensor], decided: str
    ) -> None:
        presented = {name: tensor.info for name, tensor in rows.items()}
        super().__init__(inner, {**inner.tensors, **presented})
        self._inputs = inputs
        self._rows = rows
        self._decided = decided

    def fingerprint(self) -> list[Any]:
        return [*self.inner.fingerprint(), self._decided]

    def read(self, name: str, offset: int, into: Bytes) -> None:
        tensor = self._rows.get(name)
        if tensor is None:
            self.inner.read(name, offset, into)
        else:
            tensor.read(offset, into)

    def prefetch(self, name: str, offset: int, nbytes: int) -> None:
        tensor = self._rows.get(name)
        if tensor is None:
            self.inner.prefetch(name, offset, nbytes)
        else:
            tensor.prefetch(offset, nbytes)

    def __enter__(self) -> Self:
        self._inputs.open()
        return self

    def __exit__(self, *_error: object) -> None:
        self._inputs.close()


class RowTensor:
    """A tensor whose rows come from another one in any order, or, where it has none, from `fill`.

    Rows that follow each other there as here are read in one go, so that the usual case, all old
    rows and then the new ones, takes two reads.
    """

    def __init__(
        self, source: Source, stored: TensorInfo, kind: StorageType, rows: Rows, fill: Fill
    ) -> None:
        self.info = TensorInfo(stored.name, kind, (len(rows), *stored.shape[1:]), 0)
        self._source = source
        self._stored = stored
        self._width = math.prod(stored.shape[1:])
        self._fill = fill
        self._read_stored = _elements_of(source, stored)
        if kind != stored.dtype:
            self._read_stored = _in_float32(self._read_stored, stored.dtype)
        begins = np.flatnonzero(_begins_run(rows))
        self._begins: list[int] = begins.tolist()
        self._firsts: list[int] = rows[begins].tolist()
        self._ends = [*self._begins[1:], len(rows)]

    def read(self, offset: int, into: Bytes) -> None:
        """Fill `into` with bytes from `offset` on, wherever elements begin and end."""
        size = self.info.dtype.itemsize
        begin, end = offset // size, -(-(offset + into.size) // size)
        if offset % size == 0 and into.size % size == 0:
            self.read_elements(begin, into)
            return
        whole = np.empty((end - begin) * size, np.uint8)
        self.read_elements(begin, whole)
        into[:] = whole[offset - begin * size :][: into.size]

    def read_elements(self, position: int, into: Bytes) -> None:
        """Fill `into` with whole elements from a position on."""
        size = self.info.dtype.itemsize
        for begin, end, there in self._pieces(position, position + into.size // size):
            part = into[(begin - position) * size : (end - position) * size]
            if there is None:
                self._fill(begin, part)
            else:
                self._read_stored(there, part)

    def prefetch(self, offset: int, nbytes: int) -> None:
        """Pass on what is read from the source itself, unless it is little."""
        size, stored = self.info.dtype.itemsize, self._stored.dtype.itemsize
        for begin, end, there in self._pieces(offset // size, -(-(offset + nbytes) // size)):
            if there is not None and (end - begin) * stored >= SMALLEST_PREFETCH:
                self._source.prefetch(self._stored.name, there * stored, (end - begin) * stored)

    def _pieces(self, begin: int, end: int) -> Iterator[tuple[int, int, int | None]]:
        """Cut a range of elements where runs of rows end; say where each lies in the source."""
        if begin >= end:
            return
        run = bisect_right(self._begins, begin // self._width) - 1
        while begin < end:
            stop = min(end, self._ends[run] * self._width)
            first = self._firsts[run]
            there = begin + (first - self._begins[run]) * self._width
            yield begin, stop, None if first < 0 else there
            begin, run = stop, run + 1


def _begins_run(rows: Rows) -> NDArray[np.bool_]:
    """Whether each row does not simply follow the one before.

    >>> _begins_run(np.array([0, 1, 2, -1, -1, 7])).tolist()
    [True, False, False, True, False, True]
    """
    before, after = rows[:-1], rows[1:]
    both_absent = (before < 0) & (after < 0)
    both_follow = (before >= 0) & (after == before + 1)
    return np.concatenate([[True], ~(both_absent | both_follow)])[: rows.size]


def _zeros(_position: int, into: Bytes) -> None:
    into[:] = 0


def _in_float32(read: Fill, stored: StorageType) -> Fill:
    """The same elements, decoded."""

    def read_decoded(position: int, into: Bytes) -> None:
        values = into.view(np.float32)
        raw = np.empty(min(PIECE, values.size) * stored.itemsize, np.uint8)
        for start in range(0, values.size, PIECE):
            part = values[start : start + PIECE]
            data = raw[: part.size * stored.itemsize]
            read(position + start, data)
            reference.decode(data.view(stored.carrier), part)

    return read_decoded


def _means(base: TensorInfo, models: Sequence[Source], owners: Owners) -> Fill:
    """The rows of new tokens: the mean of their owners' rows; zeros where nobody has one."""
    width = math.prod(base.shape[1:])
    readers = {}
    for index in {index for having in owners.values() for index, _, _ in having}:
        stored = models[index].tensors[base.name]
        readers[index] = _in_float32(_elements_of(models[index], stored), stored.dtype)

    def read_means(position: int, into: Bytes) -> None:
        out = into.view(base.dtype.carrier)
        done = 0
        while done < out.size:
            row, column = divmod(position + done, width)
            part = out[done : done + min(width - column, PIECE)]
            if row in owners:
                reference.encode(mean(row, column, part.size), part)
            else:
                part[:] = 0
            done += part.size

    def mean(row: int, column: int, count: int) -> NDArray[np.float32]:
        """Σ share · row in float32, in the order of the models."""
        total: NDArray[np.float32] | None = None
        with np.errstate(invalid="ignore", over="ignore"):
            for index, there, share in owners[row]:
                values = np.empty(count, np.float32)
                readers[index](there * width + column, values.view(np.uint8))
                values *= np.float32(share)
                total = values if total is None else total + values
        assert total is not None  # a new token has an owner
        return total

    return read_means


def _elements_of(source: Source, stored: TensorInfo) -> Fill:
    """Read a tensor's elements as they are stored."""

    def read(position: int, into: Bytes) -> None:
        source.read(stored.name, position * stored.dtype.itemsize, into)

    return read
