"""A sample of the weights before a merge: what it finds, and what it must not cry wolf about."""

import numpy as np
import pytest

from dare import merge, plan
from dare.checks.sample import MATRICES, _read_rows, sample_models
from dare.errors import DareWarning
from helpers import write_recipe

HEIGHT, WIDTH = 200, 96
TENSORS = [f"layers.{number}.up.weight" for number in range(6)]


def model(seed=0, *, size=0.02):
    generator = np.random.default_rng(seed)
    return {name: size * generator.standard_normal((HEIGHT, WIDTH), np.float32) for name in TENSORS}


def changed(base, change):
    return {name: value + change(value.shape).astype(np.float32) for name, value in base.items()}


def full(size):
    generator = np.random.default_rng(1)
    return lambda shape: size * generator.standard_normal(shape)


def low_rank(size, rank):
    generator = np.random.default_rng(2)
    return lambda shape: (
        size
        * generator.standard_normal((shape[0], rank))
        @ generator.standard_normal((rank, shape[1]))
    )


def notices(folder, base, tuned, **settings):
    return list(sample_models(plan(write_recipe(folder, base, [tuned], **settings))).notices)


def test_an_ordinary_fine_tune_gives_no_notice(tmp_path):
    base, zeros = model(), model(size=0.0)
    small = {"w": np.zeros((8, 8), np.float32), "v": np.zeros(100, np.float32)}
    assert notices(tmp_path, base, changed(base, full(0.001))) == []
    assert notices(tmp_path, base, base) == []
    assert notices(tmp_path, zeros, changed(zeros, full(0.001))) == []
    assert notices(tmp_path, small, changed(small, full(5.0))) == []
    assert notices(tmp_path, base, changed(base, low_rank(0.0003, 4)), method="linear") == []


def test_another_model_altogether_is_unrelated(tmp_path):
    (notice,) = notices(tmp_path, model(), model(seed=9))
    assert notice.code == "unrelated"
    assert notice.subjects == ("model0",)
    assert "141%" in notice.text
    recipe = write_recipe(tmp_path, model(), [model(seed=9)], delta_threshold=100.0)
    with pytest.warns(DareWarning, match="model0"):
        report = merge(recipe.changed(verbose=True))
    assert report.warnings == (notice,)


@pytest.mark.parametrize("method", ["sum", "dare+sum"])
def test_a_large_change_does_not_make_a_model_unrelated(tmp_path, method):
    base = model()
    far = changed(base, full(0.03))  # one and a half times as large as the weights
    assert notices(tmp_path, base, far, method=method) == []
    (unrelated,) = notices(tmp_path, base, model(seed=9), method=method)
    assert unrelated.code == "unrelated"


@pytest.mark.parametrize(("rate", "found"), [(0.85, False), (0.9, True)])
def test_a_low_rank_delta_is_noticed_at_a_high_drop_rate(tmp_path, rate, found):
    base = model()
    tuned = changed(base, low_rank(0.0003, rank=8))
    seen = notices(tmp_path, base, tuned, stages={"dare": {"drop_rate": rate}})
    assert [notice.code for notice in seen] == ["low_rank"] * found
    if found:
        assert "(about 8)" in seen[0].text
        assert "drop_rate is 0.9" in seen[0].text


def test_nan_is_no_rank(tmp_path):
    tuned = changed(model(), low_rank(0.0003, rank=8))
    for values in tuned.values():
        values[100, 0] = np.nan
    assert "low_rank" not in {n.code for n in notices(tmp_path, model(), tuned)}


def test_it_reads_a_matrix_at_once_and_stops_at_the_first_full_rank(tmp_path, monkeypatch):
    base = model()
    planned = plan(write_recipe(tmp_path, base, [changed(base, full(0.001))]))
    reads, ranks = [], []
    for source in (planned.base, *planned.models):
        read = source.read
        monkeypatch.setattr(source, "read", lambda *a, read=read: (reads.append(a), read(*a)))
    eigvalsh = np.linalg.eigvalsh
    monkeypatch.setattr(np.linalg, "eigvalsh", lambda gram: (ranks.append(gram), eigvalsh(gram))[1])
    assert sample_models(planned).notices == ()
    assert len(reads) == 2 * MATRICES
    assert len(ranks) == 1


def test_rows_that_are_read_one_by_one_are_those_that_are_read_at_once(tmp_path, monkeypatch):
    planned = plan(write_recipe(tmp_path, model(), [model()]))
    tensor = next(planned.merged())
    with planned.base as source:
        whole = _read_rows(source, tensor, "cpu")
        monkeypatch.setattr("dare.checks.sample.WIDEST_READ_WHOLE", 0)
        assert _read_rows(source, tensor, "cpu").tolist() == whole.tolist()
    assert whole.tolist() == model()[tensor.name][36:164].tolist()
