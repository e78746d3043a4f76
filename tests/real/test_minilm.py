"""all-MiniLM-L6-v2 and fine-tunes of it: the output is a sentence-transformers directory."""

import numpy as np
import pytest
import torch
from training import merged_state, minilm
from transformers import AutoModel, AutoTokenizer

import dare
from dare.tensors.mask import keep_mask

DROP_RATE = 0.5
SENTENCES = ["A merge of two models.", "Two models become one."]


def embed(model, tokenizer):
    tokens = tokenizer(SENTENCES, padding=True, return_tensors="pt")
    with torch.no_grad():
        return model(**tokens).last_hidden_state


@pytest.fixture(scope="session")
def tuned(tmp_path_factory):
    """Two fine-tunes that pull the two sentences together, and apart."""
    folder = tmp_path_factory.mktemp("minilm")
    tokenizer = AutoTokenizer.from_pretrained(minilm())
    tokens = tokenizer(SENTENCES, padding=True, return_tensors="pt")
    for name, sign in (("near", -1.0), ("far", 1.0)):
        torch.manual_seed(0)
        model = AutoModel.from_pretrained(minilm())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
        for _ in range(5):
            first, second = model(**tokens).last_hidden_state.mean(1)
            (sign * torch.cosine_similarity(first, second, dim=0)).backward()
            optimizer.step()
            optimizer.zero_grad()
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return [folder / "near", folder / "far"]


@pytest.mark.parametrize("method", ["dare+linear", "dare+ties"])
def test_the_merge_loads_and_is_that_of_torch(tuned, tmp_path, method):
    recipe = dare.Request.of(
        base=minilm(),
        models=tuned,
        output=tmp_path / "merged",
        method=method,
        stages={"dare": {"drop_rate": DROP_RATE}},
        verbose=False,
        on_missing="base",
    )
    dare.merge(recipe)
    for name in ("modules.json", "1_Pooling/config.json", "sentence_bert_config.json", "README.md"):
        assert (recipe.recipe.output / name).is_file()
    merged = AutoModel.from_pretrained(recipe.recipe.output)
    states = [AutoModel.from_pretrained(path).state_dict() for path in (minilm(), *tuned)]
    base, *others = (
        {name: value for name, value in state.items() if value.is_floating_point()}
        for state in states
    )
    deltas = [{name: other[name] - base[name] for name in base} for other in others]

    def mask(model, name, like):
        kept = keep_mask(name, like.numel(), DROP_RATE, 42 + model)
        return torch.from_numpy(np.asarray(kept)).reshape(like.shape)

    expected = merged_state(base, deltas, mask, DROP_RATE, elects=method == "dare+ties")
    reference = AutoModel.from_pretrained(minilm())
    reference.load_state_dict(expected, strict=False)
    tokenizer = AutoTokenizer.from_pretrained(recipe.recipe.output)
    torch.testing.assert_close(
        embed(merged, tokenizer), embed(reference, tokenizer), rtol=1e-4, atol=1e-5
    )
