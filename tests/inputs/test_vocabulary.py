"""Rows of models with other vocabularies: by hand, at random, and for a real model."""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ranges import DeltaArrays

from dare.errors import InputError, MismatchError
from dare.inputs.arrays import array_source, stored
from dare.inputs.sources import ArraySource, Source, check_unchanged, open_source
from dare.inputs.vocabulary import Aligned, align
from dare.output.memory import MemorySink
from dare.planning.make import make_plan
from dare.recipe.options import RunOptions
from dare.recipe.recipe import Recipe
from dare.run.engine import execute
from helpers import read_elements, save

EMBEDDING = "model.embed_tokens.weight"
FLAGS = dict.fromkeys(("single_word", "lstrip", "rstrip", "special"), False) | {"normalized": True}


def added(number: int, token: str, **flags: bool) -> dict[str, Any]:
    return {"id": number, "content": token, **FLAGS, **flags}


def write_tokenizer(
    folder: Path, vocab: Sequence[str] | Mapping[str, int], *extra: dict[str, Any]
) -> Path:
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


def rows(*values: float, dtype: Any = np.float32) -> np.ndarray:
    """A matrix of two columns: v, -v."""
    return np.array([[value, -value] for value in values], np.float32).astype(dtype)


def source(matrix: np.ndarray, name: str = EMBEDDING, **more: np.ndarray) -> ArraySource:
    return array_source({name: matrix, **more}, "test")


def read(of: Source, name: str = EMBEDDING) -> np.ndarray:
    """The tensor as float32."""
    info = of.tensors[name]
    with of:
        raw = read_elements(of, name)
    kinds = {"F32": np.float32, "BF16": ml_dtypes.bfloat16, "F16": np.float16, "F64": np.float64}
    return raw.view(kinds[info.dtype.name]).reshape(info.shape).astype(np.float32)


def aligned(
    policy: Any,
    base: tuple[Source, Path | None],
    *models: tuple[Source, Path | None],
    weights: Sequence[float] | None = None,
    pad: int | None = None,
    tokens: Mapping[str, Any] | None = None,
    new_rows: str = "mean",
) -> Aligned:
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
def abc(tmp_path: Path) -> Path:
    return write_tokenizer(tmp_path / "base", "abc")


@pytest.fixture
def with_xy(tmp_path: Path) -> Path:
    extra = added(3, "<x>", special=True, normalized=False), added(4, "<y>", lstrip=True)
    return write_tokenizer(tmp_path / "xy", "abc", *extra)


@pytest.fixture
def with_y(tmp_path: Path) -> Path:
    return write_tokenizer(tmp_path / "y", "abc", added(3, "<y>", rstrip=True))


# ---------------------------------------------------------------- a union, by hand


def test_new_tokens_take_the_next_ids_and_the_mean_of_their_owners_rows(
    abc: Path, with_xy: Path, with_y: Path
) -> None:
    base = source(rows(1, 2, 3))
    math, code = source(rows(1.5, 2.5, 3.5, 10, 20)), source(rows(1.25, 2.25, 3.25, 40))
    found = aligned("union", (base, abc), (math, with_xy), (code, with_y), weights=[3, 1])

    assert found.resized() == (3, 5)
    np.testing.assert_array_equal(read(found.base), rows(1, 2, 3, 10, 0.75 * 20 + 0.25 * 40))
    np.testing.assert_array_equal(read(found.models[0]), rows(1.5, 2.5, 3.5, 10, 25))
    np.testing.assert_array_equal(read(found.models[1]), rows(1.25, 2.25, 3.25, 10, 25))
    assert found.token_ids[1:] == ({0: 0, 1: 1, 2: 2, 3: 3, 4: 4}, {0: 0, 1: 1, 2: 2, 3: 4})
    assert found.tokenizer == 0
    (new,) = [note.text for note in found.notes if note.code == "new_tokens"]
    assert new.endswith("'<x>' 3, '<y>' 4")


def test_new_rows_that_are_merged_are_the_models_own_and_the_plain_mean_for_the_others(
    abc: Path, with_xy: Path, with_y: Path, tmp_path: Path
) -> None:
    ab = write_tokenizer(tmp_path / "ab", "ab")
    math, code, chat = source(rows(5, 6, 7, 10, 20)), source(rows(1, 2, 3, 40)), source(rows(8, 9))
    given = (source(rows(1, 2, 3)), abc), (math, with_xy), (code, with_y), (chat, ab)
    for new_rows, c in {"merge": 3, "merge_all": (7 + 3) / 2}.items():  # the base has c, chat not
        found = aligned("union", *given, weights=[3, 1, 1], new_rows=new_rows)
        np.testing.assert_array_equal(read(found.base), rows(1, 2, 3, 10, 30))
        np.testing.assert_array_equal(read(found.models[0]), rows(5, 6, 7, 10, 20))
        np.testing.assert_array_equal(read(found.models[1]), rows(1, 2, 3, 10, 40))
        np.testing.assert_array_equal(read(found.models[2]), rows(8, 9, c, 10, 30))


def test_the_tokenizer_gets_the_tokens_with_the_flags_of_the_first_that_has_them(
    abc: Path, with_xy: Path, with_y: Path
) -> None:
    wide, narrow = source(rows(*range(5))), source(rows(*range(4)))
    found = aligned("union", (source(rows(0, 1, 2)), abc), (wide, with_xy), (narrow, with_y))
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


def test_all_files_that_name_added_tokens_are_extended(abc: Path, with_y: Path) -> None:
    (abc / "added_tokens.json").write_text('{"<old>": 3}')
    (abc / "tokenizer_config.json").write_text(
        json.dumps({"added_tokens_decoder": {"3": {"content": "<old>", "special": True}}, "k": 1})
    )
    base, model = source(rows(1, 2, 3, 4)), source(rows(1, 2, 3, 9))
    found = aligned("union", (base, abc), (model, with_y))
    assert json.loads(found.tokenizer_files["added_tokens.json"]) == {"<old>": 3, "<y>": 4}
    config = json.loads(found.tokenizer_files["tokenizer_config.json"])
    assert config["added_tokens_decoder"] == {
        "3": {"content": "<old>", "special": True},
        "4": {"content": "<y>", **FLAGS, "rstrip": True},
    }
    assert config["k"] == 1
    tokens = json.loads(found.tokenizer_files["tokenizer.json"])["added_tokens"]
    assert tokens == [added(3, "<old>", special=True), added(4, "<y>", rstrip=True)]
    np.testing.assert_array_equal(read(found.base), rows(1, 2, 3, 4, 9))
    np.testing.assert_array_equal(read(found.models[0]), rows(1, 2, 3, 4, 9))
    assert found.token_ids[1] == {0: 0, 1: 1, 2: 2, 3: 4}


def test_a_token_of_the_bases_tokenizer_without_a_row_gets_one(
    tmp_path: Path, with_y: Path
) -> None:
    base = write_tokenizer(tmp_path / "b", "abc", added(3, "<pad>"), added(4, "<y>"))
    found = aligned("union", (source(rows(1, 2, 3)), base), (source(rows(1, 2, 3, 7)), with_y))
    assert found.resized() == (3, 5)
    assert found.tokenizer_files == {}
    np.testing.assert_array_equal(read(found.base), rows(1, 2, 3, 0, 7))  # nobody has <pad>


def test_weights_that_are_not_positive_count_alike(abc: Path, with_y: Path) -> None:
    models = [(source(rows(1, 2, 3, value)), with_y) for value in (4, 8)]
    found = aligned("union", (source(rows(1, 2, 3)), abc), *models, weights=[-1, 1])
    np.testing.assert_array_equal(read(found.base)[3], [6, -6])


def test_a_model_of_another_type_has_no_change_where_it_has_no_row(abc: Path, with_y: Path) -> None:
    """Its type could not hold the base's rows, so all of it is presented in float32."""
    base = source(rows(0.1, 0.2, 0.3))
    short = rows(0.1, 0.2, dtype=ml_dtypes.bfloat16)
    found = aligned("base", (base, None), (source(short), None))
    assert found.models[0].tensors[EMBEDDING].dtype.name == "F32"
    expected = np.concatenate([short.astype(np.float32), rows(0.3)])
    np.testing.assert_array_equal(read(found.models[0]), expected)

    longer = source(rows(1, 2, 3, 4, dtype=ml_dtypes.bfloat16))
    cut = aligned("base", (base, abc), (longer, with_y)).models[0]
    assert cut.tensors[EMBEDDING].dtype.name == "BF16"  # nothing of the base is in it
    np.testing.assert_array_equal(read(cut), rows(1, 2, 3))


def test_head_and_bias_follow_and_other_tensors_do_not(abc: Path, with_y: Path) -> None:
    def model(count: int) -> ArraySource:
        bias = np.arange(count, dtype=np.float32)
        return source(
            rows(*range(count)),
            **{
                "lm_head.weight": rows(*range(count)),
                "lm_head.bias": bias,
                "model.norm.weight": np.ones(3, np.float32),
                "mlp.up_proj.weight": rows(1, 2, 3),  # as many rows as the base has tokens
            },
        )

    found = aligned("union", (model(3), abc), (model(4), with_y))
    shapes = {name: info.shape for name, info in found.base.tensors.items()}
    assert shapes == {
        EMBEDDING: (4, 2),
        "lm_head.weight": (4, 2),
        "lm_head.bias": (4,),
        "model.norm.weight": (3,),
        "mlp.up_proj.weight": (3, 2),
    }
    assert read(found.base, "lm_head.bias").tolist() == [0, 1, 2, 3]
    assert {name: info.shape for name, info in found.models[0].tensors.items()} == shapes


def test_a_new_token_needs_a_row_in_every_tensor(abc: Path, with_y: Path) -> None:
    base = source(rows(1, 2, 3), **{"lm_head.weight": rows(1, 2, 3)})
    with pytest.raises(MismatchError, match=r"lm_head\.weight: none of the models with .*'<y>'"):
        aligned("union", (base, abc), (source(rows(1, 2, 3, 4)), with_y))


# ---------------------------------------------------------------- the other policies


def test_equal_vocabularies_are_left_alone(abc: Path, tmp_path: Path) -> None:
    base, model = source(rows(1, 2, 3)), source(rows(1, 2, 4))
    again = write_tokenizer(tmp_path / "again", "abc")
    for policy in ("error", "base", "union"):
        for folders in ((abc, again), (abc, None), (None, again), (None, None)):
            found = aligned(policy, (base, folders[0]), (model, folders[1]))
            assert found == Aligned(base, (model,), (3, 3, 3))


def test_by_default_a_difference_is_an_error_that_names_the_tokens(
    abc: Path, with_xy: Path, tmp_path: Path
) -> None:
    renamed = write_tokenizer(tmp_path / "renamed", {"b": 0, "a": 1, "z": 2})
    with pytest.raises(MismatchError) as caught:
        aligned(
            "error",
            (source(rows(1, 2, 3)), abc),
            (source(rows(*range(5))), with_xy),
            (source(rows(1, 2, 3)), renamed),
        )
    math, code = str(caught.value).splitlines()
    for line, named in ((math, ("'<x>' 3, '<y>' 4",)), (code, ("'z' 2", "'c' 2", "'b' 0, 'a' 1"))):
        assert all(tokens in line for tokens in (*named, 'vocabulary = "base"', '"union"'))


def test_without_a_tokenizer_the_error_says_so(abc: Path) -> None:
    base, model = source(rows(1, 2, 3)), source(rows(1, 2, 3, 0))
    for policy in ("error", "union"):
        with pytest.raises(MismatchError, match="it has no tokenizer to name them"):
            aligned(policy, (base, abc), (model, None))
        with pytest.raises(MismatchError, match="the base has no tokenizer"):
            aligned(policy, (base, None), (model, abc))


def test_base_keeps_the_bases_rows(abc: Path, with_xy: Path, tmp_path: Path) -> None:
    base = source(rows(1, 2, 3, 0.5))  # padded
    renamed = write_tokenizer(tmp_path / "renamed", {"b": 0, "a": 1, "z": 2})
    found = aligned(
        "base",
        (base, abc),
        (source(rows(10, 20, 30, 40, 50)), with_xy),
        (source(rows(10, 20, 30)), renamed),
        (source(rows(10, 20, 30, 40, 50)), None),
    )
    assert found.resized() is None
    assert found.tokenizer_files == {}
    assert found.tokenizer == 0
    np.testing.assert_array_equal(read(found.base), rows(1, 2, 3, 0.5))
    np.testing.assert_array_equal(read(found.models[0]), rows(10, 20, 30, 0.5))  # 3 is <x> there
    np.testing.assert_array_equal(read(found.models[1]), rows(20, 10, 3, 0.5))
    np.testing.assert_array_equal(read(found.models[2]), rows(10, 20, 30, 40))
    assert [found.resized(chosen) for chosen in range(4)] == [None, (5, 4), (3, 4), (5, 4)]
    assert found.token_ids[1:] == (
        {0: 0, 1: 1, 2: 2, 3: None, 4: None},
        {0: 1, 1: 0, 2: None},
        None,
    )


@pytest.mark.parametrize("policy", ["error", "base", "union"])
def test_rows_are_padded_with_zeros(policy: Any, abc: Path) -> None:
    found = aligned(policy, (source(rows(1, 2, 3)), abc), (source(rows(4, 5, 6)), abc), pad=8)
    assert found.resized() == (3, 8)
    assert found.tokenizer is None
    np.testing.assert_array_equal(read(found.base), rows(1, 2, 3, 0, 0, 0, 0, 0))
    np.testing.assert_array_equal(read(found.models[0]), rows(4, 5, 6, 0, 0, 0, 0, 0))


def test_deltas_are_zero_where_they_have_no_row(abc: Path, with_y: Path) -> None:
    delta = DeltaArrays({EMBEDDING: stored(rows(0.5, 0.25), "")})
    found = aligned("union", (source(rows(1, 2, 3)), abc), (delta, None))
    assert found.models[0].delta_of(EMBEDDING).is_change
    assert found.rows == (3, 3, 2)
    assert found.models[0].is_partial
    np.testing.assert_array_equal(read(found.models[0]), rows(0.5, 0.25, 0))

    longer = DeltaArrays({EMBEDDING: stored(rows(1, 2, 3, 4), "")})
    with pytest.raises(MismatchError, match=r"the token '<y>' .*vocabulary ="):
        aligned("union", (source(rows(1, 2, 3)), abc), (longer, with_y))


# ---------------------------------------------------------------- a model's tokens, chosen rows


@pytest.fixture
def moved(tmp_path: Path) -> Path:
    """Tokens in another order, without a, and two more."""
    return write_tokenizer(tmp_path / "moved", "cb", added(2, "<x>"), added(3, "<y>", rstrip=True))


def test_the_tokens_of_a_model_are_in_its_order(abc: Path, moved: Path, with_y: Path) -> None:
    base = source(rows(1, 2, 3))
    math, code = source(rows(30, 20, 7, 8, 0.5)), source(rows(100, 200, 300, 4))
    found = aligned(1, (base, abc), (math, moved), (code, with_y), weights=[3, 1], pad=8)
    new = 0.75 * 8 + 0.25 * 4
    assert found.rows == (8, 3, 5, 4)
    assert (found.tokenizer, found.tokenizer_files) == (1, {})
    np.testing.assert_array_equal(read(found.base), rows(3, 2, 7, new, 0, 0, 0, 0))
    np.testing.assert_array_equal(read(found.models[0]), rows(30, 20, 7, new, 0.5, 0, 0, 0))
    np.testing.assert_array_equal(read(found.models[1]), rows(300, 200, 7, new, 0, 0, 0, 0))
    assert found.token_ids == ({0: None, 1: 1, 2: 0}, None, {0: None, 1: 1, 2: 0, 3: 3})
    assert found.tokens[0] == {"c": 0, "b": 1, "<x>": 2, "<y>": 3}
    check_ranges(found, 3)


def test_a_models_tokens_that_are_the_bases_leave_rows_alone(abc: Path, tmp_path: Path) -> None:
    base, model = source(rows(1, 2, 3)), source(rows(1, 2, 4))
    found = aligned(1, (base, abc), (model, write_tokenizer(tmp_path / "again", "abc")))
    assert (found.base, found.models, found.tokenizer) == (base, (model,), 1)


def test_a_models_tokens_need_names_for_the_rows(abc: Path, with_y: Path) -> None:
    base, model = source(rows(1, 2, 3)), source(rows(1, 2, 3, 4))
    with pytest.raises(MismatchError, match="vocabulary: math has no tokenizer; choose"):
        aligned(1, (base, abc), (model, None))
    with pytest.raises(MismatchError, match=r'the base has no tokenizer.*vocabulary = "base"'):
        aligned(1, (base, None), (model, with_y))
    shorter = aligned(1, (source(rows(1, 2, 3, 4, 5)), None), (model, with_y))
    np.testing.assert_array_equal(read(shorter.base), rows(1, 2, 3, 4))  # by number


@pytest.mark.parametrize("policy", ["base", "union", 2])
def test_a_chosen_row_is_for_those_that_have_none(
    policy: Any, abc: Path, with_y: Path, moved: Path
) -> None:
    """Each of the others keeps its own; a token that nobody has is added."""
    inputs = (source(rows(1, 2, 3)), abc), (source(rows(4, 5, 6, 7)), with_y)
    more = source(rows(30, 20, 70, 80)), moved
    tokens = {
        "a": {"model": "math", "token": "c"},
        "<y>": {"model": "base", "id": 1},
        "<z>": "zero",
    }
    found = aligned(policy, *inputs, more, tokens=tokens)
    ids = found.tokens[0]
    assert ids is not None
    base, math, code = map(read, (found.base, *found.models))
    expected = {"a": (1, 4, 6), "<y>": (2, 7, 80), "<z>": (0, 0, 0), "b": (2, 5, 20)}
    for token, values in expected.items():
        assert (base[ids[token], 0], math[ids[token], 0], code[ids[token], 0]) == values, token
    assert found.tokenizer == (2 if policy == 2 else 0)
    (document,) = map(json.loads, found.tokenizer_files.values())
    assert document["added_tokens"][-1] == added(ids["<z>"], "<z>")
    check_ranges(found, 3)


def test_a_forced_row_is_that_of_all(abc: Path, with_y: Path) -> None:
    base, model = source(rows(1, 2, 3, dtype=ml_dtypes.bfloat16)), source(rows(4, 5, 6, 7))
    tokens = {"a": {"model": "math", "token": "<y>", "force": True}}
    tokens |= {"c": {"zero": True, "force": True}}
    found = aligned("base", (base, abc), (model, with_y), tokens=tokens)
    np.testing.assert_array_equal(read(found.base), rows(7, 2, 0))
    np.testing.assert_array_equal(read(found.models[0]), rows(7, 5, 0))
    same = aligned("error", (base, abc), (source(rows(4, 5, 6)), abc), tokens={"b": tokens["c"]})
    np.testing.assert_array_equal(read(same.models[0]), rows(4, 0, 6))
    assert (same.tokenizer, same.tokenizer_files) == (None, {})


@pytest.mark.parametrize(
    ("row", "what"),
    [
        ({"model": "math", "token": "q"}, "math .*the token 'q'"),
        ({"model": "math"}, "math .*the token '<z>'"),
        ({"model": "base", "id": 3}, "base has 3 rows.*the id 3"),
    ],
)
def test_a_row_that_is_not_there_cannot_be_chosen(
    row: dict[str, Any], what: str, abc: Path, with_y: Path
) -> None:
    base, model = source(rows(1, 2, 3)), source(rows(1, 2, 3, 4))
    with pytest.raises(MismatchError, match=rf"tokens\.<z>: .*{what}; give"):
        aligned("base", (base, abc), (model, with_y), tokens={"<z>": row})


def test_chosen_rows_are_needed_in_every_tensor_and_of_weights(abc: Path, with_y: Path) -> None:
    base = source(rows(1, 2, 3), **{"lm_head.weight": rows(1, 2, 3)})
    tokens = {"a": {"model": "math", "token": "<y>", "force": True}}
    for model in (source(rows(1, 2, 3, 4)), DeltaArrays({EMBEDDING: stored(rows(1, 2, 3, 4), "")})):
        with pytest.raises(MismatchError, match=r"weight: .*choose other rows in \[tokens\]"):
            aligned("base", (base, abc), (model, with_y), tokens=tokens)
    with pytest.raises(MismatchError, match="base: has no tokenizer that tokens can be added to"):
        aligned("base", (base, None), (base, None), tokens={"<z>": "zero"})


# ---------------------------------------------------------------- what cannot be united


def test_another_tokenizer_altogether_cannot_be_united(abc: Path, tmp_path: Path) -> None:
    other = write_tokenizer(tmp_path / "other", "abcde")
    model = source(rows(*range(5)))
    with pytest.raises(MismatchError, match=r"math: .*tokenizer.*vocabulary ="):
        aligned("union", (source(rows(1, 2, 3)), abc), (model, other))
    found = aligned("base", (source(rows(1, 2, 3)), abc), (model, other))
    np.testing.assert_array_equal(read(found.models[0]), rows(0, 1, 2))


def test_ids_with_gaps_cannot_be_appended_to(tmp_path: Path, with_y: Path) -> None:
    gaps = write_tokenizer(tmp_path / "gaps", {"a": 0, "b": 1, "c": 4})
    with pytest.raises(MismatchError, match=r"ids have gaps.*vocabulary ="):
        aligned("union", (source(rows(*range(5))), gaps), (source(rows(1, 2, 3, 4)), with_y))


def test_tokens_need_a_tokenizer_json_to_be_added_to(tmp_path: Path, with_y: Path) -> None:
    folder = tmp_path / "slow"
    folder.mkdir()
    (folder / "vocab.txt").write_text("a\nb\nc\n")
    base, model = source(rows(1, 2, 3)), source(rows(3, 4, 5, 6))
    with pytest.raises(MismatchError, match=r"has no tokenizer\.json"):
        aligned("union", (base, folder), (model, with_y))
    assert aligned("base", (base, folder), (model, with_y)).resized() is None


def test_vocabularies_of_other_forms(tmp_path: Path) -> None:
    base = write_tokenizer(tmp_path / "base", "ba")
    unigram, slow, unknown = (tmp_path / name for name in ("unigram", "slow", "unknown"))
    for folder in (unigram, slow, unknown):
        folder.mkdir()
    model = {"type": "Unigram", "vocab": [["a", -1.0], ["b", -2.5]]}
    (unigram / "tokenizer.json").write_text(json.dumps({"model": model, "added_tokens": []}))
    (slow / "vocab.json").write_text('{"a": 0, "b": 1}')
    (unknown / "tokenizer.json").write_text('{"model": {"type": "new", "pieces": "b64"}}')
    for folder, expected in ((unigram, rows(20, 10)), (slow, rows(20, 10))):
        found = aligned("base", (source(rows(1, 2)), base), (source(rows(10, 20)), folder))
        np.testing.assert_array_equal(read(found.models[0]), expected)
    found = aligned("error", (source(rows(1, 2)), base), (source(rows(10, 20)), unknown))
    (note,) = found.notes
    assert (note.code, note.subjects) == (
        "unknown_tokenizer",
        (str(unknown / "tokenizer.json"),),
    )


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
def test_a_hostile_tokenizer_is_an_error(
    abc: Path, tmp_path: Path, file: str, text: str, message: str
) -> None:
    folder = write_tokenizer(tmp_path / "hostile", "abc")
    (folder / file).write_text(text)
    with pytest.raises(InputError, match=message):
        aligned("base", (source(rows(1, 2, 3)), abc), (source(rows(1, 2, 3)), folder))


# ---------------------------------------------------------------- any vocabulary, any range


@st.composite
def vocabularies(draw: st.DrawFn) -> dict[str, Any]:
    """A base and models that share tokens in any order, with additions, padding and widths."""
    size = draw(st.integers(1, 6))
    own = [f"t{n}" for n in range(size)]
    models = []
    for _ in range(draw(st.integers(1, 3))):
        shared = draw(st.lists(st.sampled_from(own), unique=True, min_size=1))
        new = draw(st.lists(st.sampled_from(["<n0>", "<n1>", "<n2>"]), unique=True))
        models.append((shared, new, draw(st.integers(0, 3))))
    return {
        "own": own,
        "padding": draw(st.integers(0, 3)),
        "models": models,
        "width": draw(st.integers(1, 5)),
        "kinds": [draw(st.sampled_from(["float32", "bfloat16"])) for _ in range(1 + len(models))],
        "pad": draw(st.sampled_from([None, 1, 4])),
        "seed": draw(st.integers(0, 99)),
    }


@settings(max_examples=20)
@given(case=vocabularies(), length=st.integers(1, 40))
def test_a_union_is_what_its_definition_says(
    tmp_path_factory: pytest.TempPathFactory, case: dict[str, Any], length: int
) -> None:
    folder = tmp_path_factory.mktemp("case")
    generator = np.random.default_rng(case["seed"])

    def matrix(count: int, kind: str) -> np.ndarray:
        values = generator.standard_normal((count, case["width"]), np.float32)
        return values.astype(ml_dtypes.bfloat16 if kind == "bfloat16" else np.float32)

    own, padding = case["own"], case["padding"]
    base = matrix(len(own) + padding, case["kinds"][0])
    given_models, tables = [], []
    for number, (shared, new, more) in enumerate(case["models"]):
        extra = [added(len(shared) + n, token) for n, token in enumerate(new)]
        tokens = write_tokenizer(folder / str(number), shared, *extra)
        weights = matrix(len(shared) + len(new) + more, case["kinds"][1 + number])
        given_models.append((source(weights), tokens))
        tables.append({token: weights[n] for n, token in enumerate([*shared, *new])})
    own_folder = write_tokenizer(folder / "base", own)
    shares = [1.0, 2.0, 5.0][: len(given_models)]
    found = aligned(
        "union", (source(base), own_folder), *given_models, weights=shares, pad=case["pad"]
    )

    order = list(dict.fromkeys(token for _, new, _ in case["models"] for token in new))
    count = max(len(base), len(own) + len(order))
    count = -(-count // (case["pad"] or 1)) * (case["pad"] or 1)
    expected = np.zeros((count, case["width"]), np.float32)
    expected[: len(base)] = base
    for number, token in enumerate(order, start=len(own)):
        having = [
            (table[token], w) for table, w in zip(tables, shares, strict=True) if token in table
        ]
        total = np.float32(0)
        for row, weight in having:
            share = np.float32(weight / sum(w for _, w in having))
            total = total + share * row.astype(np.float32)
        expected[number] = total.astype(base.dtype)
    np.testing.assert_array_equal(read(found.base), expected)

    for model, table, (weights, _), (shared, new, _) in zip(
        found.models, tables, given_models, case["models"], strict=True
    ):
        values = expected.copy()
        for number, token in enumerate(own):
            if token in table:
                values[number] = table[token]
        raw = read(weights)
        for number in range(len(own) + len(order), len(base)):  # padding of both
            if len(shared) + len(new) <= number < len(raw):
                values[number] = raw[number]
        np.testing.assert_array_equal(read(model), values)
    check_ranges(found, length)


def check_ranges(found: Aligned, length: int) -> None:
    """Every range of this length, from any thread, is that part of the whole."""
    for presented in (found.base, *found.models):
        with presented, ThreadPoolExecutor(2) as pool:
            whole = read_elements(presented, EMBEDDING)

            def part(begin: int, of: Source = presented, whole: np.ndarray = whole) -> bool:
                expected = whole[begin : begin + length]
                of.prefetch(EMBEDDING, begin, expected.size)
                elements = read_elements(of, EMBEDDING, begin, expected.size)
                return elements.tobytes() == expected.tobytes()

            assert all(pool.map(part, range(whole.size + 1)))


# ---------------------------------------------------------------- files, and the engine


def files(folder: Path, matrix: np.ndarray, vocab: str, *extra: dict[str, Any]) -> Path:
    save(folder / "model.safetensors", {EMBEDDING: matrix, "w": np.ones(2, np.float32)})
    return write_tokenizer(folder, vocab, *extra)


def test_sources_are_opened_together_and_watched(tmp_path: Path) -> None:
    base = files(tmp_path / "base", rows(1, 2, 3), "abc")
    model = files(tmp_path / "model", rows(4, 5, 6, 7), "abc", added(3, "<y>"))
    opened = (open_source(base), base), (open_source(model), model)
    found = aligned("union", *opened)
    assert found.base.files.keys() == {base / "model.safetensors"}
    np.testing.assert_array_equal(read(found.base), rows(1, 2, 3, 7))  # only it is entered
    np.testing.assert_array_equal(read(found.models[0]), rows(4, 5, 6, 7))
    with found.base, found.models[0]:
        check_unchanged([found.base])
        assert read(found.models[0], "w").tolist() == [1, 1]
        assert read(found.base).shape == (4, 2)  # still open after the inner exit
    save(model / "model.safetensors", {EMBEDDING: rows(4, 5, 6, 7), "w": np.ones(3, np.float32)})
    with pytest.raises(InputError, match="changed since the merge was planned"):
        found.base.__enter__()


def test_another_process_reads_the_rows_and_other_tokens_have_another_fingerprint(
    tmp_path: Path,
) -> None:
    base = files(tmp_path / "base", rows(1, 2, 3, dtype=np.float16), "abc")
    model = files(tmp_path / "model", rows(4, 5, 6, 7), "abc", added(3, "<y>"))
    opened = (open_source(base), base), (open_source(model), model)
    found = aligned("union", *opened)
    for presented in (found.base, *found.models):
        again = pickle.loads(pickle.dumps(presented))
        np.testing.assert_array_equal(read(again), read(presented))
    first = found.models[0].fingerprint()
    assert first == aligned("union", *opened).models[0].fingerprint()
    assert first != aligned("base", *opened).models[0].fingerprint()
    write_tokenizer(model, "acb", added(3, "<y>"))
    assert first != aligned("union", *opened).models[0].fingerprint()


@pytest.mark.parametrize("method", ["dare+linear", "linear"])
def test_new_rows_come_through_a_merge_to_the_bit(tmp_path: Path, method: str) -> None:
    """Chunks of 2^19 elements split rows of 1,000."""
    generator = np.random.default_rng(5)
    matrix = generator.standard_normal((1100, 1000), np.float32)
    tuned = np.concatenate([matrix, generator.standard_normal((2, 1000), np.float32)])
    tuned[:1100] += np.float32(1e-3)
    vocab = {f"t{number}": number for number in range(1100)}
    moved = {f"t{number}": (number + 7) % 1100 for number in range(1100)}
    base_folder = write_tokenizer(tmp_path / "base", vocab)
    folder = write_tokenizer(tmp_path / "m", moved, added(1100, "<x>"), added(1101, "<y>"))
    base, model = source(matrix), source(tuned[[*np.roll(range(1100), 7), 1100, 1101]])
    found = aligned("union", (base, base_folder), (model, folder))
    recipe = Recipe(base="base", models=["math"], method=method)
    slow = RunOptions(backend="reference")
    plan = make_plan(recipe, found.base, found.models, ["math"], options=slow)
    sink = MemorySink.with_room([found.base.tensors[EMBEDDING]])
    execute(plan, sink)
    out = sink.arrays[EMBEDDING].view(np.float32).reshape(1102, 1000)
    np.testing.assert_array_equal(out[1100:], tuned[1100:])
    same = make_plan(
        recipe, base, [source(tuned[:1100])], ["math"], options=slow
    )  # as if nothing had moved
    plain = MemorySink.with_room([base.tensors[EMBEDDING]])
    execute(same, plain)
    np.testing.assert_array_equal(out[:1100].ravel(), plain.arrays[EMBEDDING].view(np.float32))
