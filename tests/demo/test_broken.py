"""Models that spoil merges: what is broken in them, and that the page's findings are of them."""

from __future__ import annotations

import numpy as np
import pytest

from dare.cli import main
from dare.demo.llama import Llama, read_weights
from dare.demo.merges import BASE, BROKEN, CONFIG, NAN_AT, TIMES_TOO_FAR, TUNED, write_models
from dare.errors import OutputError


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    assert write_models(folder) == ["base", "add", "sort", "say", *BROKEN]
    return folder


def test_the_permuted_base_computes_what_the_base_computes(folder):
    tokens = np.frombuffer(b"In the beginning God created", np.uint8).astype(np.intp)[None]
    plain, permuted = Llama(BASE, CONFIG), Llama(folder / "base-permuted", CONFIG)
    assert np.abs(plain.logits(tokens) - permuted.logits(tokens)).max() < 1e-4
    name = "model.layers.0.mlp.up_proj.weight"
    base, other = read_weights(BASE)[name], read_weights(folder / "base-permuted")[name]
    assert sorted(map(bytes, base)) == sorted(map(bytes, other))
    assert (base != other).mean() > 0.9


def test_one_weight_is_not_a_number(folder):
    found = read_weights(folder / "add-nan")
    name, element = NAN_AT
    assert np.flatnonzero(np.isnan(found[name])).tolist() == [element]
    tuned = read_weights(TUNED["add"])
    assert all((found[other] == tuned[other]).all() for other in tuned if other != name)


def test_the_change_that_went_too_far_is_a_multiple(folder):
    base, tuned, far = (read_weights(path) for path in (BASE, TUNED["add"], folder / "add-far"))
    for name, origin in base.items():
        wanted = origin + TIMES_TOO_FAR * (tuned[name] - origin)
        assert np.abs(far[name] - wanted).max() <= np.abs(wanted).max() / 256


def test_models_are_written_once_and_never_over_others(folder, tmp_path, capsys):
    assert write_models(folder) == ["base", "add", "sort", "say", *BROKEN]
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text("mine")
    with pytest.raises(OutputError, match=r"config.json: .*empty folder"):
        write_models(tmp_path)
    assert main(["demo", "--models", str(folder)]) == 0
    assert "--method sum" in capsys.readouterr().out
