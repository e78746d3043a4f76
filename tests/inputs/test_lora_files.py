"""LoRA files of diffusion models change the tensors that their names mean, by the right amount."""

import json

import numpy as np
import pytest
from diffusion_models import flux, stable_diffusion, text_encoder, unet
from safetensors.numpy import load_file, save_file

import dare
from dare.errors import InputError
from dare.inputs.opening import open_model

UNET = "model.diffusion_model."
ATTENTION = "transformer_blocks.0.attn1"


def floats(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def base_of(shapes, prefix=""):
    return {
        prefix + name: floats(*shape, seed=number)
        for number, (name, shape) in enumerate(shapes.items())
    }


def factors(module, shape, rank=2, *, down=".lora_down.weight", up=".lora_up.weight", seed=7):
    """Factors of a LoRA of a matrix or a convolution, and what they multiply to in float64."""
    ones = (1,) * (len(shape) - 2)
    a, b = floats(rank, *shape[1:], seed=seed), floats(shape[0], rank, *ones, seed=seed + 1)
    product = np.float64(b).reshape(shape[0], rank) @ np.float64(a).reshape(rank, -1)
    return {module + down: a, module + up: b}, product.reshape(shape)


def changes(folder, base, lora, metadata=None):
    """Merge a LoRA file into a base, and return the tensors that changed, with their change."""
    save_file(base, folder / "base.safetensors")
    save_file(lora, folder / "lora.safetensors", metadata)
    given = {"output": folder / "out.safetensors", "method": "linear", "verbose": False}
    files = {"base": folder / "base.safetensors", "models": [folder / "lora.safetensors"]}
    plan = dare.plan(**files, **given)
    dare.merge(plan)
    merged = load_file(folder / "out.safetensors")
    assert merged.keys() == base.keys()
    found = {n: np.float64(v) - base[n] for n, v in merged.items() if (v != base[n]).any()}
    return found, [note.code for note in (*plan.notes, *plan.warnings)]


def check(folder, base, lora, expected, metadata=None):
    """Compare the changes by a LoRA file with those that are expected; return the notes."""
    found, notes = changes(folder, base, lora, metadata)
    assert found.keys() == expected.keys()
    for name, value in found.items():
        np.testing.assert_allclose(value, expected[name], atol=1e-5, err_msg=name)
    return notes


KOHYA = {
    "down_blocks_0_attentions_1_transformer_blocks_0_attn1_to_q": "input_blocks.2.1.{}.to_q",
    "input_blocks_1_1_transformer_blocks_0_attn1_to_q": "input_blocks.1.1.{}.to_q",
    "mid_block_attentions_0_transformer_blocks_0_attn1_to_k": "middle_block.1.{}.to_k",
    "up_blocks_3_attentions_2_transformer_blocks_0_attn1_to_v": "output_blocks.11.1.{}.to_v",
    "down_blocks_1_downsamplers_0_conv": "input_blocks.6.0.op",
    "up_blocks_0_upsamplers_0_conv": "output_blocks.2.1.conv",
    "up_blocks_2_upsamplers_0_conv": "output_blocks.8.2.conv",
    "up_blocks_1_resnets_0_conv_shortcut": "output_blocks.3.0.skip_connection",
    "down_blocks_3_resnets_1_time_emb_proj": "input_blocks.11.0.emb_layers.1",
    "mid_block_resnets_1_conv2": "middle_block.2.out_layers.3",
}
DIFFUSERS = {"down_blocks.2.attentions.0.proj_in": "input_blocks.7.1.proj_in"}
OLDER = {f"mid_block.attentions.0.{ATTENTION}.processor.to_out": "middle_block.1.{}.to_out.0"}
FORMS = [
    ("lora_unet_", KOHYA, (".lora_down.weight", ".lora_up.weight")),
    ("unet.", DIFFUSERS, (".lora_A.weight", ".lora_B.weight")),
    ("unet.", OLDER, ("_lora.down.weight", "_lora.up.weight")),
]


def test_the_blocks_of_stable_diffusion_are_found(tmp_path):
    shapes, lora, expected = stable_diffusion(), {}, {}
    for prefix, modules, (down, up) in FORMS:
        for number, (module, tensor) in enumerate(modules.items()):
            name = UNET + tensor.format(ATTENTION) + ".weight"
            pair, expected[name] = factors(
                prefix + module, shapes[name], down=down, up=up, seed=number
            )
            lora |= pair
    assert "modules_left_out" not in check(tmp_path, base_of(shapes), lora, expected)


@pytest.mark.parametrize(
    ("alpha", "scale"), [(None, 1), (np.float32(3), 1.5), (np.full(1, 0.5, np.float16), 0.25)]
)
def test_alpha_is_divided_by_the_rank(tmp_path, alpha, scale):
    lora, product = factors("lora_te_text_model_encoder_layers_1_mlp_fc1", (24, 6))
    if alpha is not None:
        lora["lora_te_text_model_encoder_layers_1_mlp_fc1.alpha"] = np.asarray(alpha)
    root = "cond_stage_model.transformer.text_model" if alpha is None else "text_model"
    shapes = text_encoder(root)
    if scale == 0.25:  # as transformers 5 names it
        shapes = {name.removeprefix("text_model."): shape for name, shape in shapes.items()}
    found, _ = changes(tmp_path, base_of(shapes), lora)
    ((name, value),) = found.items()
    assert name.endswith("encoder.layers.1.mlp.fc1.weight")
    np.testing.assert_allclose(value, scale * product, atol=1e-5)


def test_settings_that_diffusers_notes_are_followed(tmp_path):
    ends = {"down": ".lora_A.weight", "up": ".lora_B.weight"}
    base = {"blocks.0.q.weight": floats(4, 3), "blocks.0.k.weight": floats(4, 3, seed=1)}
    loras = [
        factors(f"transformer.blocks.0.{name}", (4, 3), **ends, seed=n)
        for n, name in enumerate("qk")
    ]
    noted = {"transformer.r": 2, "transformer.lora_alpha": 6, "transformer.alpha_pattern": {"k": 1}}
    metadata = {"lora_adapter_metadata": json.dumps(noted)}
    expected = {"blocks.0.q.weight": 3 * loras[0][1], "blocks.0.k.weight": 0.5 * loras[1][1]}
    check(tmp_path, base, loras[0][0] | loras[1][0], expected, metadata)


OPENCLIP = "conditioner.embedders.1.model.transformer.resblocks.0."
PACKED = {
    OPENCLIP + "attn.in_proj_weight": [
        ("lora_te2_text_model_encoder_layers_0_self_attn_k_proj", 4, 4),
        ("lora_te2_text_model_encoder_layers_0_self_attn_v_proj", 8, 4),
    ],
    OPENCLIP + "mlp.c_fc.weight": [("lora_te2_text_model_encoder_layers_0_mlp_fc1", 0, 12)],
    "double_blocks.0.img_attn.qkv.weight": [
        ("transformer.transformer_blocks.0.attn.to_q", 0, 4),
        ("transformer.transformer_blocks.0.attn.to_v", 8, 4),
    ],
    "double_blocks.0.txt_attn.qkv.weight": [("lora_unet_double_blocks_0_txt_attn_qkv", 0, 12)],
    "single_blocks.0.linear1.weight": [
        ("transformer.single_transformer_blocks.0.attn.to_k", 4, 4),
        ("transformer.single_transformer_blocks.0.proj_mlp", 12, 16),
    ],
    "single_blocks.0.linear2.weight": [("diffusion_model.single_blocks.0.linear2", 0, 4)],
}


@pytest.mark.parametrize("tensor", PACKED)
def test_modules_that_are_packed_change_their_rows(tmp_path, tensor):
    base = {name: floats(28 if "linear1" in name else 12, 4) for name in PACKED}
    base["single_blocks.0.linear2.weight"] = floats(4, 20)
    expected, lora = np.zeros(base[tensor].shape), {}
    for number, (module, row, rows) in enumerate(PACKED[tensor]):
        pair, product = factors(module, (rows, base[tensor].shape[1]), seed=10 * number)
        lora |= pair
        expected[row : row + rows] = product
    check(tmp_path, base, lora, {tensor: expected})


def test_parts_that_the_base_lacks_are_left_out_with_a_note(tmp_path):
    lora, _ = factors("lora_unet_conv_in", (8, 4, 3, 3))
    for number in range(2):
        lora |= factors(f"lora_te_text_model_encoder_layers_{number}_mlp_fc1", (24, 6))[0]
    found, notes = changes(tmp_path, base_of(unet("diffusion_model")), lora)
    assert list(found) == ["diffusion_model.input_blocks.0.0.weight"]
    assert "modules_left_out" in notes


def test_components_in_one_source_are_told_apart(tmp_path):
    shapes = text_encoder("text_model")
    base = base_of(shapes, "text_encoder/") | base_of(shapes, "text_encoder_2/")
    for network in ("unet/", "vae/"):
        base |= base_of({"conv_in.weight": (8, 4, 3, 3)}, network)
    lora = factors("lora_te2_text_model_encoder_layers_0_mlp_fc2", (6, 24))[0]
    lora |= factors("lora_unet_conv_in", (8, 4, 3, 3))[0]
    found, _ = changes(tmp_path, base, lora)
    assert set(found) == {
        "text_encoder_2/text_model.encoder.layers.0.mlp.fc2.weight",
        "unet/conv_in.weight",
    }


PAIR = factors("lora_unet_conv_in", (8, 4, 3, 3))[0]
LYCORIS = [
    *("hada_w1_a", "lokr_w1", "oft_blocks", "on_input", "dora_scale", "lora_mid.weight", "diff"),
]


@pytest.mark.parametrize(
    "lora",
    [
        *(PAIR | {f"lora_unet_conv_in.{end}": floats(2, 2)} for end in LYCORIS),
        {name: value for name, value in PAIR.items() if "up" in name},
        PAIR | {"lora_unet_conv_in.alpha": np.full((), np.nan, np.float32)},
        PAIR | {"lora_unet_conv_in.alpha": floats(3)},
        PAIR | {"lora_unet_conv_in.lora_A.weight": PAIR["lora_unet_conv_in.lora_down.weight"]},
        PAIR | factors("unet.conv_in", (8, 4, 3, 3))[0],
        PAIR | factors("lora_unet_conv_between", (8, 8))[0],
        factors("lora_unet_conv_between", (8, 8))[0],
        factors("lora_unet_conv_in", (8, 4, 1, 1))[0],
        {f"base_model.model.{name}": value for name, value in PAIR.items()},
    ],
)
def test_what_is_not_plain_or_does_not_fit_is_refused(tmp_path, lora):
    with pytest.raises(InputError):
        changes(tmp_path, base_of(unet("model.diffusion_model")), lora)


def test_a_lora_file_is_no_base(tmp_path):
    save_file(PAIR, tmp_path / "lora.safetensors")
    with pytest.raises(InputError, match="LoRA file, which needs its base"):
        open_model(tmp_path / "lora.safetensors")


def test_modules_of_flux_are_found_by_their_own_names(tmp_path):
    shapes = flux()
    name = next(name for name in shapes if name.endswith("double_blocks.0.img_attn.qkv.weight"))
    lora, product = factors("lora_unet_double_blocks_0_img_attn_qkv", shapes[name])
    check(tmp_path, base_of(shapes), lora, {name: product})
