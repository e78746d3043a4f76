"""The last steps of a merge, and what happens when a process dies between them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import dare
from dare.documents.notices import LEFTOVERS
from dare.output import naming
from dare.output.targets import JOURNAL_NAME, MARK_NAME, claim, manifest_path
from helpers import listing, save, sha256

OUTPUTS = ("out", "out.safetensors")


class DiedError(BaseException):
    """The process is gone: nothing is cleaned up."""


def recipe_in(folder: Path, output: str, **more: object) -> dare.Recipe:
    generator = np.random.default_rng(0)
    base = {f"w{n}": generator.standard_normal(64).astype(np.float32) for n in range(3)}
    save(folder / "base" / "model.safetensors", base)
    (folder / "base" / "config.json").write_text("{}")
    model = save(folder / "m.safetensors", {name: value + 1 for name, value in base.items()})
    given = {"base": folder / "base", "models": [model], "output": folder / output}
    return dare.Request.of(**given, verbose=False, **more)


def weights_of(output: Path) -> str:
    return sha256(output / "model.safetensors" if output.is_dir() else output)


def die_at(monkeypatch: pytest.MonkeyPatch, name: str, place: object = naming) -> None:
    def die(*_arguments: object, **_keywords: object) -> None:
        raise DiedError

    monkeypatch.setattr(place, name, die)


def leftovers(folder: Path) -> list[str]:
    return [name for name in listing(folder) if "partial" in name or "replaced" in name]


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("output", OUTPUTS)
def test_a_finished_output_is_known_again_and_its_leftovers_are_cleared(
    tmp_path, monkeypatch, output, overwrite
):
    recipe = recipe_in(tmp_path, output)
    if overwrite:
        dare.merge(recipe.changed(scale=0.5))
    with monkeypatch.context() as patch:
        die_at(patch, "clear_away")
        with pytest.raises(DiedError):
            dare.merge(recipe, overwrite=overwrite)
    found = weights_of(recipe.recipe.output)
    report = dare.merge(recipe, overwrite=overwrite)
    assert LEFTOVERS in [notice.code for notice in report.warnings]
    assert report.bytes_read == 0
    assert weights_of(recipe.recipe.output) == found
    assert dare.verify(recipe.recipe.output).ok
    assert leftovers(tmp_path) == []
    if output == "out":
        assert not {JOURNAL_NAME, MARK_NAME} & set(listing(recipe.recipe.output))
    with pytest.raises(dare.OutputError, match="exists already"):
        dare.merge(recipe)


def test_another_process_that_begins_while_the_name_is_given_is_left_alone(tmp_path, monkeypatch):
    recipe = recipe_in(tmp_path, "out")
    real = naming.rename

    def rename_and_begin(old: Path, new: Path, **more: bool) -> bool:
        is_done = real(old, new, **more)
        claim(old)
        return is_done

    monkeypatch.setattr(naming, "rename", rename_and_begin)
    report = dare.merge(recipe)
    assert LEFTOVERS not in [notice.code for notice in report.warnings]
    assert listing(tmp_path / "out.partial") == [MARK_NAME]
    assert not {JOURNAL_NAME, MARK_NAME} & set(listing(recipe.recipe.output))


def test_without_an_exchange_a_death_between_two_renames_is_mended(tmp_path, monkeypatch):
    monkeypatch.setattr("dare.tensors.system.system_call", lambda _name: None)
    recipe = recipe_in(tmp_path, "out")
    dare.merge(recipe.changed(scale=0.5))
    real = os.rename
    with monkeypatch.context() as patch:

        def die_second(old: Path, new: Path) -> None:
            if Path(new) == recipe.recipe.output:
                raise DiedError
            real(old, new)

        patch.setattr(os, "rename", die_second)
        with pytest.raises(DiedError):
            dare.merge(recipe, overwrite=True)
    assert leftovers(tmp_path) == ["out.partial", f"out.replaced-{os.getpid()}"]
    assert not recipe.recipe.output.exists()
    dare.merge(recipe)
    assert dare.verify(recipe.recipe.output).ok
    assert leftovers(tmp_path) == []


def test_weights_and_manifest_apart_are_known_as_such(tmp_path, monkeypatch):
    recipe = recipe_in(tmp_path, "out.safetensors")
    dare.merge(recipe.changed(scale=0.5))
    with monkeypatch.context() as patch:
        real: Callable[[Path], None] = naming.sync_folder

        def die_in_the_middle(folder: Path) -> None:
            if folder == tmp_path:
                raise DiedError
            real(folder)

        patch.setattr(naming, "sync_folder", die_in_the_middle)
        with pytest.raises(DiedError):
            dare.merge(recipe, overwrite=True)
    (problem,) = dare.verify(recipe.recipe.output).problems
    assert problem.code == "other_manifest"
    assert problem.subjects == (str(manifest_path(recipe.recipe.output)),)
    dare.merge(recipe, overwrite=True)
    assert dare.verify(recipe.recipe.output).ok
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("output", OUTPUTS)
def test_what_fails_after_the_name_is_given_is_a_warning(tmp_path, monkeypatch, output):
    recipe = recipe_in(tmp_path, output)

    def fail(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    real = naming.clear_away
    with monkeypatch.context() as patch:

        def clear_away(*arguments: object) -> None:
            patch.setattr(os, "unlink", fail)
            patch.setattr(shutil, "rmtree", fail)
            real(*arguments)

        patch.setattr(naming, "clear_away", clear_away)
        report = dare.merge(recipe)
    late = [notice.text for notice in report.warnings if "is complete, but" in notice.text]
    assert late
    assert dare.verify(recipe.recipe.output).ok
    dare.merge(recipe)
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("part", ["model_card", "inherited"])
def test_all_that_finishing_needs_is_tried_before_the_first_byte(tmp_path, monkeypatch, part):
    recipe = recipe_in(tmp_path, "out")

    def fail(*_arguments: object) -> bytes:
        raise ValueError("a list is no number")

    monkeypatch.setattr(f"dare.output.sidecars.{part}", fail)
    with pytest.raises(ValueError, match="a list is no number"):
        dare.merge(recipe)
    assert leftovers(tmp_path) == []
