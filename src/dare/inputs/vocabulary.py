"""Models whose vocabulary is not the base's: added tokens, renamed ones, padded embeddings.

Merging takes place row by row, and a row means a token. Where the tokenizers differ, the rows of
embedding and head are put in one order, that of the output, before anything is merged: each model
is presented with its own row for every token that it shares with the base, and with the base's row
for all others, where its change is therefore zero. The base is presented with a row for each new
token, the mean of the rows of the models that have it. What reads the sources notices nothing.

`tokens` finds out what the rows of a model stand for, and `rows` presents them in order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from dare.documents.words import times
from dare.errors import MismatchError
from dare.inputs.directory import TOKENIZER_CONFIG, read_json
from dare.inputs.rows import RowOrigins, present
from dare.inputs.small_files import dump_json
from dare.inputs.sources import Source
from dare.inputs.tokens import ADDED_TOKENS_FILE, TOKENIZER_FILE, Tokenizers, Vocabulary

Policy = Literal["error", "base", "union"]

EXAMPLES = 5


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
    tokens: tuple[Mapping[str, int] | None, ...] = field(default=(), compare=False)
    """The ids of tokens in the output with the base's tokenizer, in the base's and each model's."""
    differences: Mapping[str, str] = field(default_factory=dict)
    """How each model whose vocabulary is not the base's differs from it."""
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
        raise MismatchError(*(_explain(vocabulary, other) for other in differing))

    new = _new_tokens(vocabulary, known) if policy == "union" else {}
    rows = max([vocabulary.rows, *(number + 1 for number in new.values())])
    if pad_to_multiple_of is not None:
        rows = math.ceil(rows / pad_to_multiple_of) * pad_to_multiple_of
    notes = (*tokenizers.notes, *_notes(vocabulary, differing, new, rows))
    own = [None if v is None or v.tokens is None else v.tokens.ids for v in (vocabulary, *others)]
    tokens = (None if own[0] is None else {**own[0], **new}, *own)
    counts = (rows, vocabulary.rows, *(None if other is None else other.rows for other in others))
    if rows == vocabulary.rows and not differing:
        return Aligned(base, tuple(models), counts, tokens=tokens, notes=notes)

    aligned, *presented = present(RowOrigins(vocabulary, others, base, models, weights, new, rows))
    return Aligned(
        aligned,
        tuple(presented),
        counts,
        keeps_base_tokenizer=bool(differing),
        tokenizer_files=_tokenizer_files(directories[0], vocabulary, known, new),
        token_ids=tuple(_token_ids(vocabulary, other, new) for other in others),
        tokens=tokens,
        differences={other.name: _difference(vocabulary, other) for other in differing},
        notes=notes,
    )


# ---------------------------------------------------------------- how two vocabularies differ


def _difference(base: Vocabulary, other: Vocabulary) -> str:
    """Say how a model's vocabulary differs from the base's."""
    counts = f"its embedding has {other.rows:,} rows and the base's {base.rows:,}"
    if base.tokens is None or other.tokens is None:
        whose = "the base" if base.tokens is None else "it"
        return f"{other.name}: {counts}, and {whose} has no tokenizer to name them"
    fresh = {token: number for token, number in other.ids.items() if token not in base.ids}
    lacking = {token: number for token, number in base.ids.items() if token not in other.ids}
    moved = {token: n for token, n in other.ids.items() if base.ids.get(token, n) != n}
    findings = [
        f"{times(len(tokens), *forms)}: {_listed(tokens)}"
        for forms, tokens in (
            (("of its tokens is not in the base", "of its tokens are not in the base"), fresh),
            (("of the base's tokens is not in it", "of the base's tokens are not in it"), lacking),
            (("token has another id in it", "tokens have another id in it"), moved),
        )
        if tokens
    ]
    if not findings:
        return f"{other.name}: {counts}, for the same tokens: only padding differs"
    return f"{other.name}: {'; '.join(findings)}"


def _explain(base: Vocabulary, other: Vocabulary) -> str:
    remedy = 'set vocabulary = "base" to keep the base\'s rows and tokenizer'
    if base.tokens is not None and other.tokens is not None and set(other.ids) - set(base.ids):
        remedy += ', or vocabulary = "union" to add the new tokens'
    return f"{_difference(base, other)}; {remedy}"


def _listed(tokens: Mapping[str, int]) -> str:
    """Some tokens with their ids, lowest first."""
    ordered = sorted(tokens.items(), key=lambda item: (item[1], item[0]))
    shown = ", ".join(f"{token!r} {number}" for token, number in ordered[:EXAMPLES])
    return shown + (", …" if len(ordered) > EXAMPLES else "")


def _notes(
    base: Vocabulary, differing: Sequence[Vocabulary], new: Mapping[str, int], rows: int
) -> Iterator[str]:
    for other in differing:
        yield f"{_difference(base, other)}; rows are matched by token where both are known"
    if new:
        yield f"new tokens, with their ids in the output: {_listed(new)}"
    if rows > base.rows:
        yield f"embedding and head have {rows:,} rows in the output and {base.rows:,} in the base"


# ---------------------------------------------------------------- a union


def _new_tokens(base: Vocabulary, models: Sequence[Vocabulary]) -> dict[str, int]:
    """The tokens that models have rows for and the base has not, with their ids in the output."""
    problems = [line for other in models for line in _obstacles(base, other)]
    if problems:
        raise MismatchError(*problems)
    if base.tokens is None:
        return {}
    new: dict[str, int] = {}
    following = len(base.tokens.ids)
    for other in models:
        for token in sorted(set(other.ids) - set(base.ids) - set(new), key=other.ids.__getitem__):
            if token in base.tokens.ids:  # the base's tokenizer has it, and its embedding has not
                new[token] = base.tokens.ids[token]
            else:
                new[token] = following
                following += 1
    taken = sorted(base.tokens.ids.values())
    if following > len(taken) and taken != list(range(len(taken))):
        raise MismatchError(
            "base: the ids of its tokenizer have gaps or occur twice, so new tokens "
            'cannot be appended; set vocabulary = "base" to leave them out'
        )
    return new


def _obstacles(base: Vocabulary, other: Vocabulary) -> Iterator[str]:
    """Why a model's new tokens cannot be taken in."""
    if base.tokens is None or other.tokens is None:
        if base.rows < other.rows:
            yield (f'{_difference(base, other)}; set vocabulary = "base" to keep the base\'s rows')
        return
    known = {*base.tokens.ids, *other.tokens.added}
    if inner := {token: number for token, number in other.ids.items() if token not in known}:
        yield (f'{other.name}: is of another tokenizer ({_listed(inner)}); set vocabulary = "base"')


def _token_ids(
    base: Vocabulary, other: Vocabulary | None, new: Mapping[str, int]
) -> dict[int, int | None] | None:
    """What a model's token ids become in the output."""
    if other is None or other.tokens is None:
        return None
    if base.tokens is None:
        return {number: number if number < base.rows else None for number in other.ids.values()}
    output = {**base.tokens.ids, **new}
    return {number: output.get(token) for token, number in other.tokens.ids.items()}


def _tokenizer_files(
    directory: Path | None, base: Vocabulary, models: Sequence[Vocabulary], new: Mapping[str, int]
) -> dict[str, bytes]:
    """The base's tokenizer files with the new tokens in them."""
    if directory is None or base.tokens is None or set(new) <= set(base.tokens.ids):
        return {}
    tokenizer = read_json(directory, TOKENIZER_FILE)
    if tokenizer is None:
        raise MismatchError(f'{directory}: has no {TOKENIZER_FILE}; set vocabulary = "base"')
    flags = dict(base.tokens.added)
    for model in models:
        for token, known in (model.tokens.added if model.tokens else {}).items():
            flags.setdefault(token, known)
    appended = {token: number for token, number in new.items() if token not in base.tokens.ids}
    listed = tokenizer.setdefault("added_tokens", [])
    present = {entry["content"] for entry in listed}
    further = {token: base.tokens.ids[token] for token in base.tokens.added if token not in present}
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
    if (added := read_json(directory, ADDED_TOKENS_FILE)) is not None:
        files[ADDED_TOKENS_FILE] = dump_json({**added, **appended}, directory / ADDED_TOKENS_FILE)
    return files
