"""Adapters of mixtures have the experts: PEFT loads them, and the logits are those expected."""

import warnings

import pytest

from dare.lora import extract_adapter, merge_adapters

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torch
    from peft import PeftModel
    from shapes import SIZES, TOLERANCE, build_causal, difference, load_causal

pytestmark = pytest.mark.filterwarnings("ignore")

MIXTURE = SIZES | {
    "moe_intermediate_size": 16,
    "num_local_experts": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
}
MODELS = {
    "Mixtral": {},
    "Qwen3Moe": {},
    "Qwen2Moe": {"shared_expert_intermediate_size": 24},
    "Olmoe": {},
    "GptOss": {},
    "GraniteMoe": {},
    "DeepseekV3": {
        "n_routed_experts": 4,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 8,
        "q_lora_rank": 8,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 16,
        "head_dim": 8,
    },
}


def low_rank(like, rank=2):
    """Return a random change of a low rank, of each expert by itself."""
    *experts, rows, columns = like.shape
    return 0.3 * torch.randn(*experts, rows, rank) @ torch.randn(*experts, rank, columns) / 8


def tune(model, seed, is_changed):
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and is_changed(name):
                parameter.add_(low_rank(parameter))
    return model


def is_layer(name):
    return ".experts." in name or "_proj" in name or ("moe." in name and "router" not in name)


@pytest.mark.parametrize("kind", MODELS)
def test_extracted_and_merged_adapters_have_the_experts(tmp_path, kind):
    build_causal(kind, MIXTURE | MODELS[kind]).save_pretrained(tmp_path / "base")
    plain = load_causal(tmp_path / "base")
    before = {name: value.clone() for name, value in plain.state_dict().items()}
    total = dict(before)
    for seed, rate in ((1, 1.0), (2, -0.5)):
        tuned = tune(load_causal(tmp_path / "base"), seed, is_layer)
        tuned.save_pretrained(tmp_path / f"tuned{seed}")
        adapter = tmp_path / f"lora{seed}"
        report = extract_adapter(tmp_path / "base", tmp_path / f"tuned{seed}", adapter, rank=2)
        assert report.left_out == ()
        assert report.error < 1e-4
        peft = PeftModel.from_pretrained(load_causal(tmp_path / "base"), adapter)
        off = difference(peft, tuned)
        print(f"{kind}, extracted: {off:.1e}")
        assert difference(plain, tuned) > 0.01
        assert off < TOLERANCE
        for name, value in tuned.state_dict().items():
            total[name] = total[name] + rate * (value - before[name])
    plain.load_state_dict(total)
    adapters = [tmp_path / f"lora{seed}" for seed in (1, 2)]
    for space in ("full", "core"):
        given = {"method": "sum", "weights": [1.0, -0.5], "space": space}
        merge_adapters(adapters, tmp_path / space, **given)
        peft = PeftModel.from_pretrained(load_causal(tmp_path / "base"), tmp_path / space)
        off = difference(peft, plain)
        print(f"{kind}, merged in {space}: {off:.1e}")
        assert off < TOLERANCE
