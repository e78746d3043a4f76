"""The journal is believed only as far as its checks go."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

import dare
from dare.output.journal import Journal, Record, read_journal
from dare.output.output import Output
from dare.output.targets import JOURNAL_NAME, manifest_path, partial_folder
from helpers import flip_bit, sha256, write_recipe

DIGEST = "0123456789abcdef" * 2
RECORD = Record("w", 0, (DIGEST, DIGEST), DIGEST, ((7, 0, 3),), (0, 0))
BASE = {f"t{number}": np.arange(64, dtype=np.float32) + number for number in range(6)}
MODEL = {name: values * np.float32(1.01) for name, values in BASE.items()}


def written(path: Path, *records: Record) -> bytes:
    journal = Journal(path, "fingerprint")
    journal.start()
    journal.note_stamps("stamps")
    for record in records:
        journal.add([record])
    journal.note_synced(finished=DIGEST)
    journal.close()
    return path.read_bytes()


def test_what_was_written_is_read(tmp_path):
    found = read_journal(written(tmp_path / "j", RECORD))
    assert found.fingerprint == "fingerprint"
    assert found.records == {("w", 0): ("stamps", RECORD)}
    assert found.finished == DIGEST


def test_no_flipped_bit_is_believed(tmp_path):
    text = written(tmp_path / "j", RECORD)
    whole = read_journal(text)
    for bit in range(8 * len(text)):
        changed = bytearray(text)
        changed[bit // 8] ^= 1 << bit % 8
        found = read_journal(bytes(changed))
        assert found.fingerprint in (None, whole.fingerprint)
        for key, (stamps, record) in found.records.items():
            assert whole.records[key] == (stamps or "stamps", record)
        assert found.finished in (None, DIGEST)


def stopped(folder: Path, monkeypatch: pytest.MonkeyPatch, after: int = 3) -> dare.Recipe:
    """A merge that was stopped after some chunks."""
    recipe = write_recipe(folder, BASE, [MODEL], threads=1)
    count = 0
    real = Output.record

    def failing(self: Output, records: Sequence[Record]) -> None:
        nonlocal count
        real(self, records[: after - count])
        count += len(records)
        if count > after:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Output, "record", failing)
        with pytest.raises(KeyboardInterrupt):
            dare.merge(recipe)
    return recipe


@pytest.fixture
def expected(tmp_path) -> str:
    recipe = write_recipe(tmp_path / "undisturbed", BASE, [MODEL], threads=1)
    dare.merge(recipe)
    return sha256(recipe.recipe.output)


def journal_of(recipe: dare.Recipe) -> Path:
    return partial_folder(recipe.recipe.output) / JOURNAL_NAME


def test_flipped_bits_never_give_other_bytes(tmp_path, monkeypatch, expected):
    generator = random.Random(0)
    recipe = stopped(tmp_path, monkeypatch)
    before = journal_of(recipe).read_bytes()
    weights = partial_folder(recipe.recipe.output) / recipe.recipe.output.name
    kept = weights.read_bytes()
    for bit in generator.sample(range(8 * len(before)), 12):
        partial_folder(recipe.recipe.output).mkdir(exist_ok=True)
        (partial_folder(recipe.recipe.output) / "dare-partial.txt").write_bytes(b"")
        weights.write_bytes(kept)
        journal_of(recipe).write_bytes(before)
        flip_bit(journal_of(recipe), bit)
        dare.merge(recipe, overwrite=True)
        assert sha256(recipe.recipe.output) == expected
        assert dare.verify(recipe.recipe.output).ok


def test_an_emptied_journal_starts_over_and_says_so(tmp_path, monkeypatch, expected):
    recipe = stopped(tmp_path, monkeypatch)
    journal_of(recipe).write_bytes(b"")
    report = dare.merge(recipe)
    (notice,) = [n.text for n in report.warnings if "journal" in n.text]
    assert notice.endswith("its journal cannot be read, so it starts over")
    assert report.resumed_chunks == 0
    assert sha256(recipe.recipe.output) == expected
    assert "journal" not in manifest_path(recipe.recipe.output).read_text()
