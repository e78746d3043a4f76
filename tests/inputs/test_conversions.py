import importlib
from pathlib import Path

import numpy as np
import pytest

from dare.errors import InputError
from dare.inputs import conversions
from dare.inputs.arrays import array_source
from dare.inputs.loaded import build_without_weights, find_places

pytest.importorskip("transformers")

NAMES = [
    *(("conversion_mapping", name) for name in conversions.OF_CONVERSION_MAPPING),
    *(("core_model_loading", name) for name in conversions.OF_CORE_MODEL_LOADING),
]
CONFIG = {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"]}


def test_this_version_of_transformers_has_all_that_is_used():
    assert conversions.missing_names() == []


@pytest.mark.parametrize(("module", "name"), NAMES)
def test_a_version_that_lacks_a_name_is_refused_by_it(monkeypatch, module, name):
    owner, _, attribute = f"transformers.{module}.{name}".rpartition(".")
    holder = importlib.import_module(f"transformers.{module}")
    if owner.endswith("WeightConverter"):
        holder = holder.WeightConverter
        holder = next(kind for kind in holder.__mro__ if attribute in vars(kind))
    monkeypatch.delattr(holder, attribute)
    assert conversions.missing_names() == [f"transformers.{module}.{name}"]
    with pytest.raises(InputError, match=rf"has no transformers\.{module}\.{name}; .*or do that$"):
        build_without_weights(Path("base/config.json"), CONFIG, "do that")


def test_models_whose_names_stay_as_they_are_need_none_of_it(monkeypatch):
    monkeypatch.setattr(conversions, "missing_names", lambda: ["anything"])
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    source = array_source({"model.norm.weight": np.ones(2, np.float32)}, "base")
    places, notes = find_places(Path("base"), config, source.tensors)
    assert places["model.norm.weight"].name == "model.norm.weight"
    assert notes == ()
