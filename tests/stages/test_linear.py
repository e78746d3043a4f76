import numpy as np
import pytest
from combining import BACKENDS, combine
from safetensors.numpy import load_file

import dare
from helpers import save

METHODS = ["linear", "sum"]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("settings", "weights", "expected"),
    [
        ({}, [1, 3], 1 + 1 * 2 + 3 * 4),
        ({"normalize": True}, [1, 3], 1 + (1 * 2 + 3 * 4) / 4),
        ({"on": "weights"}, [1, 3], 1 * 3 + 3 * 5),
        ({"on": "weights", "normalize": True}, [1, 3], (1 * 3 + 3 * 5) / 4),
        ({"on": "weights"}, [0, 0], 0),
        ({"on": "weights"}, [0.5, 0.5], 4),
    ],
)
def test_deltas_or_whole_models(method, backend, settings, weights, expected):
    given = {"weights": weights, "stages": {method: settings}, "backend": backend}
    assert combine(method, [2], [4], base=[1], **given).tolist() == [expected]


def test_weights_that_cancel():
    given = {"weights": [1, -1], "base": [1]}
    stages = {method: {method: {"normalize": True}} for method in METHODS}
    assert combine("sum", [2], [4], stages=stages["sum"], **given).tolist() == [-1]
    with pytest.raises(dare.RecipeError, match=r"w: weights 1.0, -1.0 .* normalize = false"):
        combine("linear", [2], [4], stages=stages["linear"], **given)


@pytest.mark.parametrize(
    ("method", "settings"),
    [("linear", {"normalize": True}), ("karcher", {}), ("multislerp", {"normalize": True})],
)
def test_weights_that_no_stage_can_take_are_refused_by_the_plan(tmp_path, method, settings):
    for name, value in (("base", 0), ("a", 1), ("b", 2)):
        save(tmp_path / f"{name}.safetensors", {"w": np.full(9, value, np.float32)})
    files = [tmp_path / f"{name}.safetensors" for name in ("base", "a", "b")]
    given = {"base": files[0], "models": files[1:], "method": method, "weight": [1.0, -1.0]}
    with pytest.raises(dare.RecipeError, match=r"w: weights 1.0, -1.0"):
        dare.plan(**given, stages={method: settings})


def test_weights_are_divided_tensor_by_tensor():
    base = {name: np.zeros(1, np.float32) for name in "ab"}
    models = [{name: np.full(1, value, np.float32) for name in "ab"} for value in (2, 6)]
    rule = dare.TensorRule(match="b", model="model 1", weight=3.0)
    given = {"method": "sum", "stages": {"sum": {"normalize": True}}, "tensors": [rule]}
    found, _ = dare.merge_arrays(base, models, verbose=False, **given)
    assert [found[name].item() for name in "ab"] == [4, 5]


@pytest.mark.parametrize("method", METHODS)
def test_the_base_may_be_one_of_the_models_if_it_has_a_weight(tmp_path, method):
    base = save(tmp_path / "base.safetensors", {"w": np.full(3, 8, np.float32)})
    model = save(tmp_path / "model.safetensors", {"w": np.full(3, 4, np.float32)})
    entries = [{"file": base, "weight": 0.25}, {"file": model, "weight": 0.5}]
    given = {"method": method, "stages": {method: {"on": "weights"}}, "verbose": False}
    dare.merge(base=base, models=entries, output=tmp_path / "out.safetensors", **given)
    assert load_file(tmp_path / "out.safetensors")["w"].tolist() == [4, 4, 4]
