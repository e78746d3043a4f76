"""PEFT loads what is written, and agrees with it."""

from functools import cache

import numpy as np
import pytest
from peft_models import deltas, quiet, train, weights

from dare.lora import merge_adapters

with quiet():
    peft = pytest.importorskip("peft")
    from architectures import build, torch

LLAMA, MIXTRAL, GPT2 = "LlamaForCausalLM", "MixtralForCausalLM", "GPT2LMHeadModel"

FUSED = ["experts.gate_up_proj", "experts.down_proj"]
CASES = {
    "ranks, alphas and modules differ": (
        LLAMA,
        {"target_modules": ["q_proj", "down_proj"], "r": 4, "lora_alpha": 6},
        {
            "target_modules": "all-linear",
            "r": 3,
            "rank_pattern": {"v_proj": 5},
            "alpha_pattern": {"v_proj": 9, "layers.0.mlp.up_proj": 2},
            "use_rslora": True,
        },
    ),
    "embeddings": (
        LLAMA,
        {"target_modules": ["embed_tokens", "o_proj"], "r": 2},
        {"target_modules": ["embed_tokens", "q_proj"], "r": 3},
    ),
    "inputs first": (
        GPT2,
        {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True, "r": 2},
        {"target_modules": ["c_attn"], "fan_in_fan_out": True, "r": 3, "lora_alpha": 5},
    ),
    "biases of factors": (
        GPT2,
        {"target_modules": ["c_attn"], "fan_in_fan_out": True, "lora_bias": True},
        {"target_modules": ["c_attn"], "fan_in_fan_out": True, "r": 3},
    ),
    "experts": (
        MIXTRAL,
        {"target_modules": ["q_proj"], "target_parameters": FUSED, "r": 2, "lora_alpha": 3},
        {
            "target_modules": [],
            "target_parameters": ["mlp.gate.weight", *FUSED[1:]],
            "r": 3,
            "rank_pattern": {"experts.down_proj": 1},
        },
    ),
    "convolutions": (
        "convolutions",
        {"target_modules": ["0", "1"], "r": 2},
        {"target_modules": ["0"], "r": 3, "lora_alpha": 2},
    ),
}


def model_of(name):
    """The model of a class of transformers, or two convolutions."""
    if name != "convolutions":
        return build(name)[0]
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Conv2d(3, 5, 3), torch.nn.Conv2d(5, 4, 1))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """For a case, its model, two adapters, and what PEFT adds for each; all made once."""

    @cache
    def make(case):
        name, *configs = CASES[case]
        folder = tmp_path_factory.mktemp("adapters")
        paths = [train(folder / str(n), model_of(name), n, **configs[n - 1]) for n in (1, 2)]
        return name, paths, [deltas(model_of(name), path) for path in paths]

    return make


@pytest.mark.parametrize("space", ["full", "core"])
@pytest.mark.parametrize("case", CASES)
def test_a_sum_merges_to_the_sum_of_what_the_adapters_merge_to(trained, tmp_path, case, space):
    model, paths, (first, second) = trained(case)
    merge_adapters(paths, tmp_path / "out", method="sum", weights=[1, -0.5], space=space)
    found = deltas(model_of(model), tmp_path / "out")
    for name in found:
        expected = first[name] - 0.5 * second[name]
        np.testing.assert_allclose(found[name], expected, rtol=0, atol=1e-6, err_msg=name)
    assert any(value.any() for value in found.values())


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    "settings", [{}, {"method": "dare+linear", "drop_rate": 0.0}], ids=["factors", "matrices"]
)
def test_a_truncation_has_the_error_that_is_reported(trained, tmp_path, case, settings):
    model, paths, (first, second) = trained(case)
    report = merge_adapters(paths, tmp_path / "out", rank=2, **settings)
    found = deltas(model_of(model), tmp_path / "out")
    lost = total = 0.0
    for module in report.modules:
        name = module.name if module.name in found else f"{module.name}.weight"
        expected = 0.5 * first[name] + 0.5 * second[name]
        lost += np.sum((found[name] - expected) ** 2)
        total += np.sum(expected**2)
    assert report.error > 0.01
    assert (lost / total) ** 0.5 == pytest.approx(report.error, rel=1e-4)


@pytest.mark.parametrize(
    ("settings", "theirs"),
    [
        ({}, {"combination_type": "cat"}),
        ({"rank": 3}, {"combination_type": "svd", "svd_rank": 3}),
        (
            {
                "rank": 3,
                "method": "ties",
                "stages": {"ties": {"keep_ratio": 0.5, "divide_by": "count"}},
            },
            {"combination_type": "ties_svd", "svd_rank": 3, "density": 0.5},
        ),
    ],
    ids=["cat", "svd", "ties_svd"],
)
def test_peft_combines_to_the_same(tmp_path, settings, theirs):
    config = {"target_modules": ["q_proj", "up_proj"], "lora_alpha": 6}
    paths = [train(tmp_path / str(n), model_of(LLAMA), n, r=n + 2, **config) for n in range(2)]
    merge_adapters(paths, tmp_path / "out", weights=[1.0, 1.0], **settings)
    plain = weights(model_of(LLAMA))
    with quiet():
        model = peft.PeftModel.from_pretrained(model_of(LLAMA), paths[0], adapter_name="a")
        model.load_adapter(paths[1], adapter_name="b")
        model.add_weighted_adapter(["a", "b"], [1.0, 1.0], "both", **theirs)
        model.set_adapter("both")
        merged = weights(model.merge_and_unload())
    found = deltas(model_of(LLAMA), tmp_path / "out")
    for name, value in found.items():
        np.testing.assert_allclose(value, merged[name] - plain[name], atol=2e-6, err_msg=name)
