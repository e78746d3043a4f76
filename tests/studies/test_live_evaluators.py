"""Evaluators that are given the model that transformers builds."""

from pathlib import Path

import pytest

import dare
from dare.errors import InputError
from dare.studies.evaluators import open_scorer


def test_transformers_builds_the_base(tmp_path):
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    base = Path(dare.__file__).parent / "demo" / "models" / "base"
    recipe = dare.Recipe(base=base, models=[base.with_name("add")], method="sum")

    def own(model):
        assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
        assert not model.training
        logits = model(torch.tensor([list(b"37+58=9")], device=model.device)).logits
        assert not logits.requires_grad
        return {"next": logits[0, -1].argmax()}

    scorer = open_scorer(own, recipe)
    scorer.make(recipe)
    assert scorer.score().scores == {"next": float(ord("5"))}
    (tmp_path / "config.json").write_text('{"architectures": ["Nonesuch"]}')
    with pytest.raises(InputError, match="'Nonesuch', which transformers does not have, so it can"):
        open_scorer(own, recipe.changed(base=tmp_path))
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    with pytest.raises(InputError, match="cannot load it: "):
        open_scorer(own, recipe.changed(base=tmp_path))
