import re

import pytest

from dare.tensors import names


@pytest.mark.parametrize("module", names.INPUT_EMBEDDINGS)
def test_the_lists_agree_on_every_input_embedding(module):
    tensor = f"{module}.weight"
    assert names.is_input_embedding(tensor)
    assert names.is_embedding(tensor)
    assert re.search(names.ANY_EMBEDDING, tensor)
    assert not re.search(names.ANY_HEAD, tensor)
    assert not names.is_tied_head(tensor)


@pytest.mark.parametrize("module", ["lm_head", "output", "output_layer", "embed_out", "head"])
def test_the_lists_agree_on_every_head_that_stands_by_itself(module):
    tensor = f"{module}.weight"
    assert module in names.HEADS
    assert names.is_embedding(tensor)
    assert re.search(names.ANY_HEAD, tensor)
    assert not names.is_input_embedding(tensor)


@pytest.mark.parametrize(
    ("tensor", "expected"),
    [
        ("model.embed_tokens.weight", True),
        ("wte.weight", True),
        ("shared.weight", True),
        ("embed_tokens.bias", False),
        ("embed_tokens", False),
        ("model.embed_tokens_per_layer.weight", False),
        ("lm_head.weight", False),
    ],
)
def test_which_embeddings_can_be_tied(tensor, expected):
    assert names.is_tied_embedding(tensor) is expected


def test_only_the_weight_of_a_language_head_can_be_tied():
    tensors = ["lm_head.weight", "model.lm_head.weight", "lm_head.bias", "head.weight"]
    assert [names.is_tied_head(tensor) for tensor in tensors] == [True, True, False, False]
