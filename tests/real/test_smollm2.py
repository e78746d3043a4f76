"""SmolLM2 and real fine-tunes of it, merged: loads, generates, and equals a merge in torch."""

import numpy as np
import pytest
import torch
from training import TEXTS, fine_tune, fine_tune_lora, merged_state, save_smollm2, smollm2_gguf
from transformers import AutoModelForCausalLM, AutoTokenizer

import dare
from dare.mask import keep_mask

DROP_RATE = 0.5
SEED = 42
PROMPT = "def wrap(text, width):"


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("smollm2")
    base = save_smollm2(folder / "base")
    return {
        "base": base,
        "code": fine_tune(base, folder / "code", TEXTS["code"]),
        "prose": fine_tune(base, folder / "prose", TEXTS["prose"]),
        "code-lora": fine_tune_lora(base, folder / "code-lora", TEXTS["code"]),
        "prose-lora": fine_tune_lora(base, folder / "prose-lora", TEXTS["prose"]),
    }


@pytest.fixture(scope="session")
def states(models):
    from peft import PeftModel

    found = {}
    for name, path in models.items():
        if name.endswith("-lora"):
            plain = AutoModelForCausalLM.from_pretrained(models["base"], dtype=torch.float32)
            model = PeftModel.from_pretrained(plain, path).merge_and_unload()
        else:
            model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        found[name] = {key: value.clone() for key, value in model.state_dict().items()}
    return found


def mask(model, name, like):
    kept = keep_mask(name, like.numel(), DROP_RATE, SEED + model)
    return torch.from_numpy(np.asarray(kept)).reshape(like.shape)


def stored(state):
    """What a file holds: the head is the embedding, and not stored twice."""
    return {name: value for name, value in state.items() if name != "lm_head.weight"}


@pytest.mark.parametrize("method", ["dare+linear", "dare+ties"])
@pytest.mark.parametrize(
    "names", [("code", "prose"), ("code-lora", "prose-lora"), ("code", "prose-lora")]
)
def test_the_merge_is_that_of_torch(models, states, tmp_path, method, names):
    recipe = dare.Recipe(
        base=models["base"],
        models=[models[name] for name in names],
        output=tmp_path / "merged",
        method=method,
        stages={"dare": {"drop_rate": DROP_RATE}},
        seed=SEED,
        verbose=False,
    )
    dare.merge(recipe)
    assert dare.verify(recipe.output).ok

    merged = AutoModelForCausalLM.from_pretrained(recipe.output, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(recipe.output)
    expected = merged_state(
        stored(states["base"]),
        [stored(states[name]) for name in names],
        mask,
        DROP_RATE,
        elects=method.endswith("ties"),
    )
    found = stored(merged.state_dict())
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=2e-6, msg=name)

    tokens = tokenizer(PROMPT, return_tensors="pt")
    with torch.no_grad():
        logits = merged(**tokens).logits
        reference = AutoModelForCausalLM.from_pretrained(models["base"], dtype=torch.float32)
        reference.load_state_dict(expected, strict=False)
        torch.testing.assert_close(logits, reference(**tokens).logits, rtol=1e-3, atol=1e-3)
        written = merged.generate(**tokens, max_new_tokens=8, do_sample=False)
    assert written.shape[1] == tokens.input_ids.shape[1] + 8
    assert tokenizer.decode(written[0]).startswith(PROMPT)


def test_a_gguf_file_is_a_base_like_any_other(models, tmp_path):
    """The same numbers from GGUF and from safetensors give the same weights."""
    outputs = []
    for number, base in enumerate((models["base"], smollm2_gguf())):
        recipe = dare.Recipe(
            base=base,
            models=[models["code"]],
            output=tmp_path / f"{number}.safetensors",
            dtype="BF16",
            verbose=False,
        )
        outputs.append(dare.merge(recipe).digests.output_tensors)
    assert outputs[0] == outputs[1]
