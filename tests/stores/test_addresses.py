from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest

from dare.recipe.recipe import Recipe
from dare.stores import addresses
from dare.stores.addresses import access_to, without_credentials
from dare.stores.locations import StorePath, to_path


def test_an_address_is_a_path():
    path = to_path("s3://bucket/models/math")
    assert isinstance(path, StorePath)
    assert str(path / "a" / "b.json") == "s3://bucket/models/math/a/b.json"
    assert str(path.parent) == "s3://bucket/models"
    assert (path.name, (path / "w.safetensors").suffix, path.key) == (
        *("math", ".safetensors", "models/math"),
    )
    assert str((path / "x.a").with_name("y.b")) == "s3://bucket/models/math/y.b"
    assert (path / "a" / "b").relative_to(path).as_posix() == "a/b"
    assert path.resolve() == path.absolute() == path.expanduser() == path


def test_texts_and_paths_of_an_address_mean_the_same():
    path = to_path("s3://bucket/key")
    assert path == to_path(Path("s3://bucket/key")) == to_path(path)  # which has lost a slash
    assert path != Path("s3://bucket/key")
    assert len({path, to_path("S3://bucket/key"), Path("s3://bucket/key")}) == 2


@pytest.mark.parametrize("text", ["models/base", "/data/s3/x", "C:/x", "ftp://host/x", "s3", "."])
def test_what_is_no_address_is_a_path_of_this_machine(text):
    assert to_path(text) == Path(text)
    assert not isinstance(to_path(text), StorePath)


def test_no_call_of_the_system_takes_an_address_for_a_file():
    with pytest.raises(TypeError, match="s3://b/k: is in a store"):
        os.fspath(to_path("s3://b/k"))
    with pytest.raises(TypeError, match="is in a store"):
        to_path("s3://b/k").open("rb")


def test_secrets_are_kept_apart_and_found_for_what_lies_below():
    path = to_path("https://me:pa%40ss@host:8/a/b?X-Amz-Signature=abc/d&x=1#frag")
    assert str(path) == "https://host:8/a/b"
    place, access = access_to(path / "config.json")
    assert (place, access.password, access.query) == (
        path,
        "me:pa%40ss",
        "X-Amz-Signature=abc/d&x=1",
    )
    assert access_to(path.parent / "c")[1].query == ""
    assert "abc" not in repr(access)
    assert "pa%40ss" not in f"{path!r} {access!r}"


def test_another_process_can_ask_too():
    path = to_path("https://host/pickled?token=secret") / "x"
    stored = pickle.dumps([path, path.parent])
    assert pickle.loads(stored) == [path, path.parent]
    addresses._ACCESS.pop(str(path.parent))
    assert access_to(path)[1].query == ""
    assert access_to(pickle.loads(stored)[0])[1].query == "token=secret"


def test_a_password_in_the_address_of_a_bucket_is_refused_without_showing_it():
    with pytest.raises(ValueError, match="must not hold a password") as caught:
        Recipe(base="s3://KEY:topsecret@bucket/x", models=["m"])
    assert "topsecret" not in str(caught.value)


def test_recipes_hold_addresses_and_write_them_back():
    recipe = Recipe(
        base="s3://b/base", models=["https://u:topsecret@h/m.safetensors?sig=topsecret"]
    )
    assert str(recipe.base) == "s3://b/base"
    assert recipe.models[0].name == "m"
    document = recipe.to_document()
    assert document["models"]["merge_files"] == ["https://h/m.safetensors"]
    assert "topsecret" not in recipe.to_toml() + repr(recipe)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("see http://a:b@h/x and s3://b/k", "see http://h/x and s3://b/k"),
        ('{"url": "https://h/x?sig=1"}', '{"url": "https://h/x?…"}'),
        ("what? no", "what? no"),
        ("PosixPath('s3:/a:b@c/k'), C:/a@b/k", "PosixPath('s3:/c/k'), C:/a@b/k"),
        ("hf://org/name@v1 and hf:/org/name@v1", "hf://org/name@v1 and hf:/org/name@v1"),
    ],
)
def test_credentials_are_taken_out_of_texts(text, shown):
    assert without_credentials(text) == shown
