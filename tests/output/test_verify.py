from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from dare.api import merge
from dare.errors import DareError, InputError, VerificationError
from dare.output.targets import MANIFEST_NAME, manifest_path, read_sealed, seal
from dare.output.verification import verify
from dare.recipe.recipe import Request
from dare.tensors.files import LocalFile
from dare.tensors.header import read_header
from helpers import flip_bit, save, write_recipe

BASE = {
    "w": np.arange(4, dtype=np.float32),
    "h": np.ones(3, np.float16),
    "n": np.array([5], np.int64),
    "s": np.array(2, np.float32),
}
MODEL = {**BASE, "w": np.array([0, 2, 4, 6], np.float32)}
DATA_BYTES = 16 + 6 + 8 + 4


@pytest.fixture(scope="module")
def merged(tmp_path_factory) -> Path:
    """A small finished merge: one file."""
    recipe = write_recipe(tmp_path_factory.mktemp("merged"), BASE, [MODEL], method="sum")
    merge(recipe)
    return recipe.recipe.output


@pytest.fixture
def output(merged, tmp_path) -> Path:
    """A copy to damage, with its manifest."""
    shutil.copy(manifest_path(merged), manifest_path(tmp_path / merged.name))
    return Path(shutil.copy(merged, tmp_path))


@pytest.fixture
def sharded(tmp_path) -> Path:
    recipe = write_recipe(
        tmp_path, BASE, [MODEL], method="sum", output=tmp_path / "out", shard_size=16
    )
    merge(recipe)
    return recipe.recipe.output


def is_refused(path: Path) -> bool:
    try:
        return not verify(path).ok
    except DareError:
        return True


def test_the_sha256_is_of_the_bytes_in_order_of_name(merged, sharded):
    ordered = [safetensors.numpy.load_file(merged)[name].tobytes() for name in ("h", "n", "s", "w")]
    expected = hashlib.sha256(b"".join(ordered)).hexdigest()
    assert verify(merged).sha256 == verify(sharded).sha256 == expected
    assert expected in str(verify(merged))
    assert verify(merged, sha256=False).sha256 is None


def said(notices):
    """The code and the subject of each notice."""
    return [(notice.code, *notice.subjects) for notice in notices]


def data_start(path: Path) -> int:
    with path.open("rb") as file:
        return read_header(LocalFile(file.fileno()), str(path)).data_start


# ---------------------------------------------------------------- intact


def test_a_merge_is_intact_with_the_manifest_beside_it_or_without(output):
    found = verify(output)
    assert found.ok
    assert found.problems == ()
    assert (found.tensors, found.bytes_checked) == (4, DATA_BYTES)
    assert str(found).startswith("Intact")
    assert str(output) in str(found)
    manifest_path(output).unlink()
    assert verify(str(output)).ok


# ---------------------------------------------------------------- damage


def test_every_flipped_bit_and_every_cut_is_found(output):
    manifest_path(output).unlink()  # the file must do without help
    content = output.read_bytes()
    start = data_start(output)
    bits = [
        *(8 * byte + byte % 8 for byte in range(start)),  # one in each byte of the header
        *range(8 * start, 8 * len(content)),
    ]
    unnoticed = []
    for bit in bits:
        flip_bit(output, bit)
        if not is_refused(output):
            unnoticed.append(bit)
        flip_bit(output, bit)
    assert unnoticed == []
    for length in (0, 7, 8, 9, 100, start - 1, *range(start, len(content))):
        output.write_bytes(content[:length])
        assert is_refused(output)


def test_one_flipped_bit_names_the_tensor(output):
    with output.open("rb") as file:
        tensors = read_header(LocalFile(file.fileno()), "out").tensors
    for name, info in tensors.items():
        flip_bit(output, 8 * info.start)
        found = verify(output)
        assert [n.subjects for n in found.problems if n.code == "changed"] == [(name,)]
        flip_bit(output, 8 * info.start)


def test_a_changed_header_is_told_from_changed_weights(output):
    manifest_path(output).unlink()
    content = output.read_bytes()
    changed = content.replace(rb"\"scale\":1.0", rb"\"scale\":2.0")
    assert changed != content
    output.write_bytes(changed)
    assert said(verify(output).problems) == [("damaged_header", str(output))]


@pytest.mark.parametrize("text", ["5", "[]", "null", "{}", '{\\"check\\":5}', "\\ud800", ""])
def test_any_text_in_place_of_the_manifest_is_reported(tmp_path, text):
    header = b'{"__metadata__":{"dare":"%s"}}' % text.encode()
    path = tmp_path / "f.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    assert not verify(path).ok


def test_a_file_that_dare_did_not_make_is_refused(tmp_path):
    path = save(tmp_path / "f.safetensors", BASE)
    with pytest.raises(VerificationError, match=r"f.safetensors: was not made by dare"):
        verify(path)


# ---------------------------------------------------------------- shards


def test_a_missing_shard_is_found(sharded):
    (sharded / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(InputError, match=r"model-00002-of-00003.safetensors: no such file"):
        verify(sharded)


def test_a_shard_of_another_merge_is_found(sharded, tmp_path):
    settings = {"method": "sum", "output": tmp_path / "other", "shard_size": 16, "scale": 2}
    other = write_recipe(tmp_path / "b", BASE, [MODEL], **settings)
    merge(other)
    name = next(
        path.name
        for path in sorted(sharded.glob("*.safetensors"))
        if b'"w":' in path.read_bytes()[:4096].split(b'"__metadata__"')[1]
    )
    shutil.copy(other.recipe.output / name, sharded / name)
    problems = verify(sharded).problems
    assert ("changed", "w") in said(problems)


# ---------------------------------------------------------------- the manifest beside the weights


def edit_beside(output: Path, edit) -> None:
    beside = manifest_path(output)
    manifest = read_sealed(beside)
    edit(manifest)
    beside.write_bytes(seal(manifest, manifest["files"]))


BESIDE = "other_value"
EDITS = [
    ("changed", "w", lambda manifest: manifest["digests"]["output"].update(w="0" * 32)),
    ("missing", "x", lambda manifest: manifest["digests"]["output"].update(x="0" * 32)),
    ("not_in_manifest", "w", lambda manifest: manifest["digests"]["output"].pop("w")),
    (BESIDE, "base", lambda manifest: manifest.update(base="0" * 32)),
    (BESIDE, "method", lambda manifest: manifest.update(method="linear")),
    (BESIDE, "scale", lambda manifest: manifest.update(scale=2.0)),
    (BESIDE, "models", lambda manifest: manifest["models"][0].update(digest="0" * 32)),
    (BESIDE, "models", lambda manifest: manifest["models"][0].update(seed=1)),
    (BESIDE, "mask", lambda manifest: manifest.pop("mask")),
]


@pytest.mark.parametrize(("code", "key", "edit"), EDITS)
def test_a_manifest_beside_that_says_something_else_is_found(output, code, key, edit):
    edit_beside(output, edit)
    (problem,) = verify(output).problems
    subject = str(manifest_path(output)) if code == BESIDE else key
    assert (problem.code, problem.subjects) == (code, (subject,))
    assert code != BESIDE or f" {key} " in problem.text


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"recipe":{},"digests":{"output":5}}', "[" * 100_000]
)
def test_a_manifest_beside_that_cannot_be_used_is_found(output, text):
    manifest_path(output).write_text(text)
    (problem,) = verify(output).problems
    assert str(problem).startswith(f"{manifest_path(output)}: ")


# ---------------------------------------------------------------- what lies beside the weights


@pytest.fixture
def directory(tmp_path) -> Path:
    """An output directory with a configuration, a tokenizer, a module and a card."""
    for name, arrays in (("base", BASE), ("model", MODEL)):
        folder = save(tmp_path / name / "model.safetensors", arrays).parent
        (folder / "config.json").write_text('{"vocab_size": 4}')
        (folder / "tokenizer_config.json").write_text("{}")
        (folder / "modules.json").write_text('[{"path": "1_Pooling"}]')
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text("{}")
    output = tmp_path / "out"
    merge(
        Request.of(
            base=tmp_path / "base",
            models=[tmp_path / "model"],
            output=output,
            method="sum",
            shard_size=16,
            verbose=False,
        )
    )
    return output


@pytest.mark.parametrize(
    "name",
    [
        *("config.json", "tokenizer_config.json", "modules.json", "1_Pooling/config.json"),
        *("model.safetensors.index.json", "adapter_config.json", "modeling.py"),
        *("1_Pooling/more.bin", MANIFEST_NAME),
    ],
)
def test_every_file_beside_the_weights_is_checked(directory, name):
    assert verify(directory).ok
    if name == MANIFEST_NAME:
        (directory / name).unlink()
        assert said(verify(directory).problems) == [("no_manifest", name)]
    elif not (directory / name).exists():  # which a loader may read
        (directory / name).write_text("{}")
        assert said(verify(directory).problems) == [("not_ours", name)]
    else:
        (directory / name).write_text((directory / name).read_text() + " ")
        assert said(verify(directory).problems) == [("changed", name)]
        (directory / name).unlink()
        assert is_refused(directory)


def test_a_card_that_was_edited_is_no_damage(directory):
    with (directory / "README.md").open("a") as card:
        card.write("It is good at arithmetic.")
    (directory / "figure.png").write_bytes(b"a picture")
    (directory / ".gitattributes").write_text("*.safetensors filter=lfs")
    found = verify(directory)
    assert found.ok
    assert [n.subjects for n in found.changed] == [("README.md",), ("figure.png",)]
    assert "README.md: It has been changed" in str(found)


def test_every_flipped_bit_of_a_manifest_is_found(directory):
    path = directory / MANIFEST_NAME
    size = path.stat().st_size
    unnoticed = []
    for bit in range(0, 8 * size, 8 * size // 150):
        flip_bit(path, bit)
        if not is_refused(directory):
            unnoticed.append(bit)
        flip_bit(path, bit)
    assert unnoticed == []
