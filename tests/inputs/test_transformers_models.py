from pathlib import Path

import numpy as np
import pytest

from dare.errors import InputError
from dare.inputs import transformers_models
from dare.inputs.arrays import array_source
from dare.inputs.transformers_models import build_without_weights, find_places

pytest.importorskip("transformers")

CONFIG = {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"]}


def test_this_version_of_transformers_has_all_that_is_used():
    assert transformers_models.missing_names() == []


@pytest.mark.parametrize("name", transformers_models.USED_NAMES)
def test_a_version_that_lacks_a_name_is_refused_by_it(monkeypatch, name):
    from transformers import conversion_mapping, core_model_loading

    module, *owners, last = name.split(".")
    owner = conversion_mapping if module == "conversion_mapping" else core_model_loading
    if owners:  # a class, which has the method or inherits it
        classes = getattr(owner, owners[0]).__mro__
        owner = next(kind for kind in classes if last in vars(kind))
    monkeypatch.delattr(owner, last)
    assert transformers_models.missing_names() == [f"transformers.{name}"]
    with pytest.raises(InputError, match=rf"has no transformers\.{name}; .*or do that$"):
        build_without_weights(Path("base/config.json"), CONFIG, "do that")


def test_models_whose_names_stay_as_they_are_need_none_of_it(monkeypatch):
    monkeypatch.setattr(transformers_models, "missing_names", lambda: ["anything"])
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    source = array_source({"model.norm.weight": np.ones(2, np.float32)}, "base")
    places, notes = find_places(Path("base"), config, source.tensors)
    assert places["model.norm.weight"].name == "model.norm.weight"
    assert notes == ()
