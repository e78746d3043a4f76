"""Rows of models with other vocabularies: by hand, at random, and for a real model."""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ranges import DeltaArrays

from dare.errors import InputError, MismatchError
from dare.inputs.arrays import array_source, stored
from dare.inputs.sources import Aligned, check_unchanged, open_source
from dare.inputs.vocabulary import align
from dare.output.memory import MemorySink
from dare.planning.make import make_plan
from dare.recipe.options import RunOptions
from dare.recipe.recipe import Recipe
from dare.run.engine import execute
from helpers import read_elements, save

EMBEDDING = "model.embed_tokens.weight"
FLAGS = dict.fromkeys(("single_word", "lstrip", "rstrip", "special"), False) | {"normalized": True}
BF16 = ml_dtypes.bfloat16


def added(number, token, **flags):
    return {"id": number, "content": token, **FLAGS, **flags}


def write_tokenizer(folder, vocab, *extra):
    """A word-level tokenizer as tokenizer.json, with added tokens."""
    ids = vocab if isinstance(vocab, Mapping) else {token: n for n, token in enumerate(vocab)}
    absent = ("truncation", "padding", "normalizer", "post_processor", "decoder")
    document = dict.fromkeys(absent) | {
        "version": "1.0",
        "added_tokens": list(extra),
        "pre_tokenizer": {"type": "Whitespace"},
        "model": {"type": "WordLevel", "vocab": dict(ids), "unk_token": next(iter(ids))},
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(document))
    return folder


def rows(*values, dtype=np.float32):
    """A matrix of two columns: v, -v."""
    return np.array([[value, -value] for value in values], np.float32).astype(dtype)


def source(*values, dtype=np.float32, **more):
    """A model with such an embedding, and other tensors."""
    return source_of(rows(*values, dtype=dtype), **more)


def source_of(matrix, **more):
    return array_source({EMBEDDING: matrix, **more}, "test")


def delta(*values):
    return DeltaArrays({EMBEDDING: stored(rows(*values), "")})


def read(of, name=EMBEDDING):
    """The tensor as float32."""
    info = of.tensors[name]
    with of:
        raw = read_elements(of, name)
    return raw.view(info.dtype.numpy_type).reshape(info.shape).astype(np.float32)


def check(found, *expected):
    """Compare the embeddings of base and models with values of first columns, or matrices."""
    for of, values in zip((found.base, *found.models), expected, strict=True):
        matrix = values if isinstance(values, np.ndarray) else rows(*values)
        np.testing.assert_array_equal(read(of), matrix)


def aligned(policy, base, *models, weights=None, pad=None, tokens=None, new_rows="mean") -> Aligned:
    """Align a base and models, each with the folder of its tokenizer."""
    names = ["math", "code", "chat"][: len(models)]
    recipe = Recipe(base="base", models=names, tokens=tokens or {})
    return align(
        policy,
        base[0],
        [model for model, _ in models],
        directories=[base[1], *(folder for _, folder in models)],
        names=names,
        weights=weights or [1.0] * len(models),
        new_rows=new_rows,
        pad_to_multiple_of=pad,
        chosen=recipe.token_rows,
    )


@pytest.fixture
def folders(tmp_path):
    """Folders of tokenizers: three tokens; two or one more; others, in another order."""
    extra = added(3, "<x>", special=True, normalized=False), added(4, "<y>", lstrip=True)
    moved = added(2, "<x>"), added(3, "<y>", rstrip=True)
    return SimpleNamespace(
        abc=write_tokenizer(tmp_path / "abc", "abc"),
        xy=write_tokenizer(tmp_path / "xy", "abc", *extra),
        y=write_tokenizer(tmp_path / "y", "abc", added(3, "<y>", rstrip=True)),
        moved=write_tokenizer(tmp_path / "moved", "cb", *moved),
        renamed=write_tokenizer(tmp_path / "renamed", {"b": 0, "a": 1, "z": 2}),
    )


@pytest.fixture
def base(folders):
    return source(1, 2, 3), folders.abc


# ---------------------------------------------------------------- a union, by hand


def test_new_tokens_take_the_next_ids_and_the_mean_of_their_owners_rows(base, folders):
    math, code = source(1.5, 2.5, 3.5, 10, 20), source(1.25, 2.25, 3.25, 40)
    found = aligned("union", base, (math, folders.xy), (code, folders.y), weights=[3, 1])
    assert found.resized() == (3, 5)
    mean = 0.75 * 20 + 0.25 * 40
    check(found, (1, 2, 3, 10, mean), (1.5, 2.5, 3.5, 10, mean), (1.25, 2.25, 3.25, 10, mean))
    assert found.token_ids[1:] == ({0: 0, 1: 1, 2: 2, 3: 3, 4: 4}, {0: 0, 1: 1, 2: 2, 3: 4})
    assert found.tokenizer == 0
    (new,) = [note.text for note in found.notes if note.code == "new_tokens"]
    assert new.endswith("'<x>' 3, '<y>' 4")


def test_new_rows_that_are_merged_are_the_models_own_and_the_plain_mean_for_the_others(
    base, folders, tmp_path
):
    ab = write_tokenizer(tmp_path / "ab", "ab")
    math, code, chat = source(5, 6, 7, 10, 20), source(1, 2, 3, 40), source(8, 9)
    given = base, (math, folders.xy), (code, folders.y), (chat, ab)
    for new_rows, c in {"merge": 3, "merge_all": (7 + 3) / 2}.items():  # the base has c, chat not
        found = aligned("union", *given, weights=[3, 1, 1], new_rows=new_rows)
        check(found, (1, 2, 3, 10, 30), (5, 6, 7, 10, 20), (1, 2, 3, 10, 40), (8, 9, c, 10, 30))


def test_the_tokenizer_gets_the_tokens_with_the_flags_of_the_first_that_has_them(base, folders):
    wide, narrow = source(*range(5)), source(*range(4))
    found = aligned("union", base, (wide, folders.xy), (narrow, folders.y))
    assert set(found.tokenizer_files) == {"tokenizer.json"}
    document = json.loads(found.tokenizer_files["tokenizer.json"])
    assert document["added_tokens"] == [
        added(3, "<x>", special=True, normalized=False),
        added(4, "<y>", lstrip=True),
    ]
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(found.tokenizer_files["tokenizer.json"].decode())
    assert tokenizer.encode("a <x> c <y>b").ids == [0, 3, 2, 4, 1]
    assert tokenizer.decode([0, 3, 1]) == "a b"  # special


def test_all_files_that_name_added_tokens_are_extended(folders):
    old = {"content": "<old>", "special": True}
    (folders.abc / "added_tokens.json").write_text('{"<old>": 3}')
    config = {"added_tokens_decoder": {"3": old}, "k": 1}
    (folders.abc / "tokenizer_config.json").write_text(json.dumps(config))
    found = aligned("union", (source(1, 2, 3, 4), folders.abc), (source(1, 2, 3, 9), folders.y))
    assert json.loads(found.tokenizer_files["added_tokens.json"]) == {"<old>": 3, "<y>": 4}
    assert json.loads(found.tokenizer_files["tokenizer_config.json"]) == {
        "added_tokens_decoder": {"3": old, "4": {"content": "<y>", **FLAGS, "rstrip": True}},
        "k": 1,
    }
    tokens = json.loads(found.tokenizer_files["tokenizer.json"])["added_tokens"]
    assert tokens == [added(3, "<old>", special=True), added(4, "<y>", rstrip=True)]
    check(found, (1, 2, 3, 4, 9), (1, 2, 3, 4, 9))
    assert found.token_ids[1] == {0: 0, 1: 1, 2: 2, 3: 4}


def test_a_token_of_the_bases_tokenizer_without_a_row_gets_one(tmp_path, folders):
    own = write_tokenizer(tmp_path / "b", "abc", added(3, "<pad>"), added(4, "<y>"))
    found = aligned("union", (source(1, 2, 3), own), (source(1, 2, 3, 7), folders.y))
    assert found.resized() == (3, 5)
    assert found.tokenizer_files == {}
    check(found, (1, 2, 3, 0, 7), (1, 2, 3, 0, 7))  # nobody has <pad>


def test_weights_that_are_not_positive_count_alike(base, folders):
    models = [(source(1, 2, 3, value), folders.y) for value in (4, 8)]
    found = aligned("union", base, *models, weights=[-1, 1])
    check(found, *[(1, 2, 3, 6)] * 3)


def test_a_model_of_another_type_has_no_change_where_it_has_no_row(folders):
    """Its type could not hold the base's rows, so all of it is presented in float32."""
    short = rows(0.1, 0.2, dtype=BF16)
    found = aligned("base", (source(0.1, 0.2, 0.3), None), (source_of(short), None))
    assert found.models[0].tensors[EMBEDDING].dtype.name == "F32"
    whole = np.concatenate([short.astype(np.float32), rows(0.3)])
    check(found, (0.1, 0.2, 0.3), whole)
    longer = source(1, 2, 3, 4, dtype=BF16)
    cut = aligned("base", (source(0.1, 0.2, 0.3), folders.abc), (longer, folders.y))
    assert cut.models[0].tensors[EMBEDDING].dtype.name == "BF16"  # nothing of the base is in it
    check(cut, (0.1, 0.2, 0.3), (1, 2, 3))


def test_head_and_bias_follow_and_other_tensors_do_not(folders):
    def model(count):
        bias = np.arange(count, dtype=np.float32)
        others = {"model.norm.weight": np.ones(3, np.float32)}
        others |= {"mlp.up_proj.weight": rows(1, 2, 3)}  # as many rows as the base has tokens
        head = {"lm_head.weight": rows(*range(count)), "lm_head.bias": bias}
        return source(*range(count), **head, **others)

    found = aligned("union", (model(3), folders.abc), (model(4), folders.y))
    shapes = {name: info.shape for name, info in found.base.tensors.items()}
    assert shapes == {
        **{EMBEDDING: (4, 2), "lm_head.weight": (4, 2), "lm_head.bias": (4,)},
        **{"model.norm.weight": (3,), "mlp.up_proj.weight": (3, 2)},
    }
    assert read(found.base, "lm_head.bias").tolist() == [0, 1, 2, 3]
    assert {name: info.shape for name, info in found.models[0].tensors.items()} == shapes


# ---------------------------------------------------------------- the other policies


def test_equal_vocabularies_are_left_alone(folders, tmp_path):
    base, model = source(1, 2, 3), source(1, 2, 4)
    again = write_tokenizer(tmp_path / "again", "abc")
    for policy in ("error", "base", "union"):
        for own, other in ((folders.abc, again), (folders.abc, None), (None, again), (None, None)):
            found = aligned(policy, (base, own), (model, other))
            assert found == Aligned(base, (model,), (3, 3, 3))
    found = aligned(1, (base, folders.abc), (model, again))
    assert (found.base, found.models, found.tokenizer) == (base, (model,), 1)


def test_by_default_a_difference_is_an_error_that_names_the_tokens(base, folders):
    math, code = (source(*range(5)), folders.xy), (source(1, 2, 3), folders.renamed)
    with pytest.raises(MismatchError) as caught:
        aligned("error", base, math, code)
    named = ["'<x>' 3, '<y>' 4"], ["'z' 2", "'c' 2", "'b' 0, 'a' 1"]
    for line, tokens in zip(str(caught.value).splitlines(), named, strict=True):
        assert all(words in line for words in (*tokens, 'vocabulary = "base"', '"union"'))


def test_base_keeps_the_bases_rows(folders):
    longer = 10, 20, 30, 40, 50
    given = (source(*longer), folders.xy), (source(*longer[:3]), folders.renamed)
    padded = source(1, 2, 3, 0.5), folders.abc
    found = aligned("base", padded, *given, (source(*longer), None))
    assert (found.resized(), found.tokenizer_files, found.tokenizer) == (None, {}, 0)
    # Row 3 is <x> in the first model; c is not in the second; the third has no tokenizer.
    check(found, (1, 2, 3, 0.5), (10, 20, 30, 0.5), (20, 10, 3, 0.5), (10, 20, 30, 40))
    assert [found.resized(chosen) for chosen in range(4)] == [None, (5, 4), (3, 4), (5, 4)]
    moved = {0: 1, 1: 0, 2: None}
    assert found.token_ids[1:] == ({0: 0, 1: 1, 2: 2, 3: None, 4: None}, moved, None)


@pytest.mark.parametrize("policy", ["error", "base", "union"])
def test_rows_are_padded_with_zeros(policy, base, folders):
    found = aligned(policy, base, (source(4, 5, 6), folders.abc), pad=8)
    assert (found.resized(), found.tokenizer) == ((3, 8), None)
    check(found, (1, 2, 3, 0, 0, 0, 0, 0), (4, 5, 6, 0, 0, 0, 0, 0))


def test_deltas_are_zero_where_they_have_no_row(base):
    found = aligned("union", base, (delta(0.5, 0.25), None))
    assert found.models[0].delta_of(EMBEDDING).is_change
    assert found.models[0].is_partial
    assert found.rows == (3, 3, 2)
    check(found, (1, 2, 3), (0.5, 0.25, 0))


# ---------------------------------------------------------------- a model's tokens, chosen rows


def test_the_tokens_of_a_model_are_in_its_order(base, folders):
    math, code = source(30, 20, 7, 8, 0.5), source(100, 200, 300, 4)
    given = (math, folders.moved), (code, folders.y)
    found = aligned(1, base, *given, weights=[3, 1], pad=8)
    new, zeros = 0.75 * 8 + 0.25 * 4, (0, 0, 0)
    assert found.rows == (8, 3, 5, 4)
    assert (found.tokenizer, found.tokenizer_files) == (1, {})
    check(found, (3, 2, 7, new, 0, *zeros), (30, 20, 7, new, 0.5, *zeros),
          (300, 200, 7, new, 0, *zeros))  # fmt: skip
    assert found.token_ids == ({0: None, 1: 1, 2: 0}, None, {0: None, 1: 1, 2: 0, 3: 3})
    assert found.tokens[0] == {"c": 0, "b": 1, "<x>": 2, "<y>": 3}
    check_ranges(found, 3)
    by_number = aligned(1, (source(1, 2, 3, 4, 5), None), (source(1, 2, 3, 4), folders.y))
    check(by_number, (1, 2, 3, 4), (1, 2, 3, 4))


@pytest.mark.parametrize("policy", ["base", "union", 2])
def test_a_chosen_row_is_for_those_that_have_none(policy, base, folders):
    """Each of the others keeps its own; a token that nobody has is added."""
    given = (source(4, 5, 6, 7), folders.y), (source(30, 20, 70, 80), folders.moved)
    tokens = {"a": {"model": "math", "token": "c"}, "<y>": {"model": "base", "id": 1}}
    tokens["<z>"] = "zero"
    found = aligned(policy, base, *given, tokens=tokens)
    ids = found.tokens[0]
    own, math, code = map(read, (found.base, *found.models))
    expected = {"a": (1, 4, 6), "<y>": (2, 7, 80), "<z>": (0, 0, 0), "b": (2, 5, 20)}
    for token, values in expected.items():
        assert (own[ids[token], 0], math[ids[token], 0], code[ids[token], 0]) == values, token
    assert found.tokenizer == (2 if policy == 2 else 0)
    (document,) = map(json.loads, found.tokenizer_files.values())
    assert document["added_tokens"][-1] == added(ids["<z>"], "<z>")
    check_ranges(found, 3)


def test_a_forced_row_is_that_of_all(folders):
    own, model = source(1, 2, 3, dtype=BF16), source(4, 5, 6, 7)
    tokens = {"a": {"model": "math", "token": "<y>", "force": True}}
    tokens |= {"c": {"zero": True, "force": True}}
    found = aligned("base", (own, folders.abc), (model, folders.y), tokens=tokens)
    check(found, (7, 2, 0), (7, 5, 0))
    given = (own, folders.abc), (source(4, 5, 6), folders.abc)
    same = aligned("error", *given, tokens={"b": tokens["c"]})
    check(same, (1, 0, 3), (4, 0, 6))
    assert (same.tokenizer, same.tokenizer_files) == (None, {})


# ---------------------------------------------------------------- what is refused

THREE, FOUR, FIVE = source(1, 2, 3), source(1, 2, 3, 4), source(*range(5))
HEADED, CHANGED = source(1, 2, 3, **{"lm_head.weight": rows(1, 2, 3)}), delta(1, 2, 3, 4)
FORCED = {"a": {"model": "math", "token": "<y>", "force": True}}
CHOOSE = r"weight: .*choose other rows in \[tokens\]"
NO_NAMES = "has no tokenizer to name them"
OTHER_TOKEN, OTHER_ID = {"model": "math", "token": "q"}, {"model": "base", "id": 3}


@pytest.mark.parametrize(
    ("policy", "own", "at", "model", "other", "tokens", "message"),
    [
        (
            "union",
            HEADED,
            "abc",
            FOUR,
            "y",
            {},
            r"lm_head\.weight: none .* with .*'<y>'",
        ),
        ("base", HEADED, "abc", FOUR, "y", FORCED, CHOOSE),
        ("base", HEADED, "abc", CHANGED, "y", FORCED, CHOOSE),
        ("union", THREE, "abc", CHANGED, "y", {}, r"the token '<y>' .*vocabulary ="),
        ("error", THREE, "abc", FOUR, None, {}, f"it {NO_NAMES}"),
        ("union", THREE, "abc", FOUR, None, {}, f"it {NO_NAMES}"),
        ("error", THREE, None, FOUR, "abc", {}, f"the base {NO_NAMES}"),
        ("union", THREE, None, FOUR, "abc", {}, f"the base {NO_NAMES}"),
        (1, THREE, "abc", FOUR, None, {}, "vocabulary: math has no tokenizer; choose"),
        (1, THREE, None, FOUR, "y", {}, r'the base has no tokenizer.*vocabulary = "base"'),
        ("base", THREE, None, THREE, None, {"<z>": "zero"}, "base: has no tokenizer that tokens"),
        ("base", THREE, "abc", FOUR, "y", {"<z>": OTHER_TOKEN}, r"\.<z>: math .*token 'q'; give"),
        ("base", THREE, "abc", FOUR, "y", {"<z>": {"model": "math"}}, "math .*token '<z>'; give"),
        ("base", THREE, "abc", FOUR, "y", {"<z>": OTHER_ID}, "base has 3 rows.*the id 3; give"),
        ("union", THREE, "abc", FIVE, "other", {}, r"math: .*tokenizer.*vocabulary ="),
        ("union", FIVE, "gaps", FOUR, "y", {}, r"ids have gaps.*vocabulary ="),
        ("union", THREE, "slow", FOUR, "y", {}, r"has no tokenizer\.json"),
    ],
)
def test_what_cannot_be_aligned_is_refused(
    tmp_path, folders, policy, own, at, model, other, tokens, message
):
    write_tokenizer(tmp_path / "other", "abcde")
    write_tokenizer(tmp_path / "gaps", {"a": 0, "b": 1, "c": 4})
    (tmp_path / "slow").mkdir()
    (tmp_path / "slow" / "vocab.txt").write_text("a\nb\nc\n")
    given = (own, at and tmp_path / at), (model, other and tmp_path / other)
    with pytest.raises(MismatchError, match=message):
        aligned(policy, *given, tokens=tokens)
    if policy == "union" and "tokenizer" in message:
        assert aligned("base", *given).resized() is None


def test_vocabularies_of_other_forms(tmp_path):
    own = write_tokenizer(tmp_path / "base", "ba")
    unigram = {"type": "Unigram", "vocab": [["a", -1.0], ["b", -2.5]]}
    forms = {
        "tokenizer.json": {"model": unigram, "added_tokens": []},
        "vocab.json": {"a": 0, "b": 1},
    }
    given = (source(1, 2), own), (source(10, 20), tmp_path / "other")
    (tmp_path / "other").mkdir()
    for name, document in forms.items():
        (tmp_path / "other" / name).write_text(json.dumps(document))
        check(aligned("base", *given), (1, 2), (20, 10))
        (tmp_path / "other" / name).unlink()
    unknown = tmp_path / "other" / "tokenizer.json"
    unknown.write_text('{"model": {"type": "new", "pieces": "b64"}}')
    (note,) = aligned("error", *given).notes
    assert (note.code, note.subjects) == ("unknown_tokenizer", (str(unknown),))


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("tokenizer.json", "{", "is not valid JSON"),
        ("tokenizer.json", "[" * 100_000, "is not valid JSON"),
        ("tokenizer.json", '{"model": {"vocab": {"a": -1}}}', "id -1"),
        ("tokenizer.json", '{"model": {"vocab": {"a": true}}}', "id True"),
        ("tokenizer.json", '{"model": {"vocab": [[1, 2]]}}', "token 1"),
        ("tokenizer.json", '{"model": {"vocab": {}}, "added_tokens": [3]}', "needs id and content"),
        ("added_tokens.json", "[1]", "must map tokens to numbers"),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"x": {}}}', "map numbers to tokens"),
    ],
)
def test_a_hostile_tokenizer_is_an_error(base, folders, file, text, message):
    (folders.y / file).write_text(text)
    with pytest.raises(InputError, match=message):
        aligned("base", base, (source(1, 2, 3), folders.y))


# ---------------------------------------------------------------- any vocabulary, any range


@st.composite
def vocabularies(draw):
    """A base and models that share tokens in any order, with additions, padding and widths."""
    own = [f"t{n}" for n in range(draw(st.integers(1, 6)))]
    models = []
    for _ in range(draw(st.integers(1, 3))):
        shared = draw(st.lists(st.sampled_from(own), unique=True, min_size=1))
        new = draw(st.lists(st.sampled_from(["<n0>", "<n1>", "<n2>"]), unique=True))
        models.append((shared, new, draw(st.integers(0, 3))))
    return SimpleNamespace(
        own=own,
        padding=draw(st.integers(0, 3)),
        models=models,
        width=draw(st.integers(1, 5)),
        kinds=[draw(st.sampled_from([np.float32, BF16])) for _ in range(1 + len(models))],
        pad=draw(st.sampled_from([None, 1, 4])),
        seed=draw(st.integers(0, 99)),
    )


@settings(max_examples=20)
@given(case=vocabularies(), length=st.integers(1, 40))
def test_a_union_is_what_its_definition_says(tmp_path_factory, case, length):
    folder = tmp_path_factory.mktemp("case")
    generator = np.random.default_rng(case.seed)

    def matrix(count, kind):
        return generator.standard_normal((count, case.width), np.float32).astype(kind)

    base = matrix(len(case.own) + case.padding, case.kinds[0])
    given_models, tables = [], []
    for number, (shared, new, more) in enumerate(case.models):
        extra = [added(len(shared) + n, token) for n, token in enumerate(new)]
        tokens = write_tokenizer(folder / str(number), shared, *extra)
        weights = matrix(len(shared) + len(new) + more, case.kinds[1 + number])
        given_models.append((source_of(weights), tokens))
        tables.append({token: weights[n] for n, token in enumerate([*shared, *new])})
    own_folder = write_tokenizer(folder / "base", case.own)
    shares = [1.0, 2.0, 5.0][: len(given_models)]
    given = (source_of(base), own_folder), *given_models
    found = aligned("union", *given, weights=shares, pad=case.pad)

    order = list(dict.fromkeys(token for _, new, _ in case.models for token in new))
    known = len(case.own) + len(order)
    count = max(len(base), known)
    count = -(-count // (case.pad or 1)) * (case.pad or 1)
    expected = np.zeros((count, case.width), np.float32)
    expected[: len(base)] = base
    for number, token in enumerate(order, start=len(case.own)):
        having = [(t[token], w) for t, w in zip(tables, shares, strict=True) if token in t]
        total = np.float32(0)
        for row, weight in having:
            share = np.float32(weight / sum(w for _, w in having))
            total = total + share * row.astype(np.float32)
        expected[number] = total.astype(base.dtype)

    every = [expected]
    for table, (weights, _), (shared, new, _) in zip(
        tables, given_models, case.models, strict=True
    ):
        values, raw = expected.copy(), read(weights)
        for number, token in enumerate(case.own):
            values[number] = table.get(token, values[number])
        for number in range(known, len(base)):  # padding of both
            if len(shared) + len(new) <= number < len(raw):
                values[number] = raw[number]
        every.append(values)
    check(found, *every)
    check_ranges(found, length)


def check_ranges(found, length):
    """Every range of this length, from any thread, is that part of the whole."""
    for presented in (found.base, *found.models):
        with presented, ThreadPoolExecutor(2) as pool:
            whole = read_elements(presented, EMBEDDING)

            def part(begin, of=presented, whole=whole):
                expected = whole[begin : begin + length]
                of.prefetch(EMBEDDING, begin, expected.size)
                elements = read_elements(of, EMBEDDING, begin, expected.size)
                return elements.tobytes() == expected.tobytes()

            assert all(pool.map(part, range(whole.size + 1)))


# ---------------------------------------------------------------- files, and the engine


@pytest.fixture
def opened(tmp_path):
    """A base and a model with a token more, in files."""
    found = []
    for name, matrix, *extra in (
        ("base", rows(1, 2, 3, dtype=np.float16)),
        ("model", rows(4, 5, 6, 7), added(3, "<y>")),
    ):
        arrays = {EMBEDDING: matrix, "w": np.ones(2, np.float32)}
        save(tmp_path / name / "model.safetensors", arrays)
        folder = write_tokenizer(tmp_path / name, "abc", *extra)
        found.append((open_source(folder), folder))
    return found


def test_sources_are_opened_together_and_watched(opened):
    found = aligned("union", *opened)
    base, model = (folder for _, folder in opened)
    assert found.base.files.keys() == {base / "model.safetensors"}
    check(found, (1, 2, 3, 7), (4, 5, 6, 7))  # only one is entered at a time
    with found.base, found.models[0]:
        check_unchanged([found.base])
        assert read(found.models[0], "w").tolist() == [1, 1]
        assert read(found.base).shape == (4, 2)  # still open after the inner exit
    save(model / "model.safetensors", {EMBEDDING: rows(4, 5, 6, 7), "w": np.ones(3, np.float32)})
    with pytest.raises(InputError, match="changed since the merge was planned"):
        found.base.__enter__()


def test_another_process_reads_the_rows_and_other_tokens_have_another_fingerprint(opened):
    found = aligned("union", *opened)
    for presented in (found.base, *found.models):
        again = pickle.loads(pickle.dumps(presented))
        np.testing.assert_array_equal(read(again), read(presented))
    first = found.models[0].fingerprint()
    assert first == aligned("union", *opened).models[0].fingerprint()
    assert first != aligned("base", *opened).models[0].fingerprint()
    write_tokenizer(opened[1][1], "acb", added(3, "<y>"))
    assert first != aligned("union", *opened).models[0].fingerprint()


@pytest.mark.parametrize("method", ["dare+linear", "linear"])
def test_new_rows_come_through_a_merge_to_the_bit(tmp_path, method):
    """Chunks of 2^19 elements split rows of 1,000."""
    generator = np.random.default_rng(5)
    matrix = generator.standard_normal((1100, 1000), np.float32)
    tuned = np.concatenate([matrix, generator.standard_normal((2, 1000), np.float32)])
    tuned[:1100] += np.float32(1e-3)
    vocab = {f"t{number}": number for number in range(1100)}
    moved = {f"t{number}": (number + 7) % 1100 for number in range(1100)}
    base_folder = write_tokenizer(tmp_path / "base", vocab)
    folder = write_tokenizer(tmp_path / "m", moved, added(1100, "<x>"), added(1101, "<y>"))
    base, model = source_of(matrix), source_of(tuned[[*np.roll(range(1100), 7), 1100, 1101]])
    found = aligned("union", (base, base_folder), (model, folder))
    recipe = Recipe(base="base", models=["math"], method=method)

    def merged(base, models):
        plan = make_plan(recipe, base, models, ["math"], options=RunOptions(backend="reference"))
        sink = MemorySink.with_room([base.tensors[EMBEDDING]])
        execute(plan, sink)
        return sink.arrays[EMBEDDING].view(np.float32).reshape(-1, 1000)

    out = merged(found.base, found.models)
    np.testing.assert_array_equal(out[1100:], tuned[1100:])
    # The others are as if nothing had moved.
    np.testing.assert_array_equal(out[:1100], merged(base, [source_of(tuned[:1100])]))
