"""TOML from outside is read in bounded time, and what is written as TOML is one value."""

from __future__ import annotations

import time
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dare.errors import RecipeError, printable
from dare.recipe.entries import read_toml, write_toml, write_value

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


@pytest.mark.parametrize(
    "text",
    [
        ".".join(["a"] * 100_000) + " = 1",
        ".".join(['"a b"'] * 100_000) + " = 1",
        "[" + " . ".join(["a"] * 100_000) + "]",
        "x = '''\n' ''' # \"\"\"\n" + ".".join(["'a b'"] * 100_000) + " = 1",
        'x = { a = """ " """, ' + ".".join(["'a b'"] * 100_000) + " = 1 }",
    ],
    ids=["plain", "quoted", "header", "after texts", "in a table"],
)
def test_a_key_of_a_hundred_thousand_parts_is_refused_at_once(tmp_path: Path, text: str) -> None:
    (tmp_path / "r.toml").write_text(text)
    started = time.process_time()
    with pytest.raises(RecipeError, match=r"r\.toml: not valid TOML: a key has more than 100 par"):
        read_toml(tmp_path / "r.toml")
    assert time.process_time() - started < 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = " + "[" * 100_000, "not valid TOML"),
        ("x = " + "[" * 101 + "]" * 101, "nested more than 100 deep"),
        ("x = " + "9" * 5000, "not valid TOML"),
        ("x = 0x" + "f" * 5000, "a number of more than 128 bits"),
    ],
)
def test_what_no_recipe_holds_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "r.toml").write_text(text)
    with pytest.raises(RecipeError, match=rf"r\.toml: .*{message}"):
        read_toml(tmp_path / "r.toml")


def test_dots_in_texts_and_numbers_are_no_keys(tmp_path: Path) -> None:
    text = f"x = '{'a.' * 1000}'\n# {'a.' * 1000}\ny = [{'0.5, ' * 1000}]\n"
    (tmp_path / "r.toml").write_text(text)
    assert len(read_toml(tmp_path / "r.toml")["y"]) == 1000


@given(texts, texts)
def test_a_text_stays_one_value(one: str, other: str) -> None:
    document = {"x": one, "list": [one, {"file": other}], one or "k": {other: one}}
    text = write_toml(document)
    assert tomllib.loads(text) == document
    assert text.replace("\n", "").replace("\t", "").isprintable() or not (one + other).isprintable()
    assert tomllib.loads(f"y = {write_value([one, {'file': other}])}") == {
        "y": [one, {"file": other}]
    }
    assert tomllib.loads(f"# {printable(one)}\nz = 1") == {"z": 1}


def test_half_a_character_is_refused() -> None:
    with pytest.raises(RecipeError, match="half a character"):
        write_toml({"x": "\udcff"})
