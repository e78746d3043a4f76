"""Diffusion checkpoints: merged by block, analysed by block, and what counts as an embedding."""

from __future__ import annotations

import numpy as np
import pytest
from diffusion_models import Shapes, stable_diffusion, wan
from safetensors.numpy import save_file

import dare
from dare.recipe.layers import OUTSIDE, find_depths
from dare.tensors.names import is_embedding

UNET = "model.diffusion_model"
TEXT = "cond_stage_model.transformer.text_model"
BLOCKS = 25
"""Those of Stable Diffusion 1.5: 12 input blocks, the middle block, 12 output blocks."""


def make(shapes: Shapes, models: int = 2):
    generator = np.random.default_rng(3)
    base = {n: generator.standard_normal(s).astype(np.float32) for n, s in shapes.items()}
    tuned = [
        {
            n: v + np.float32(0.01) * generator.standard_normal(v.shape, np.float32)
            for n, v in base.items()
        }
        for _ in range(models)
    ]
    return base, tuned


@pytest.mark.parametrize("block", [0, 12, 24])
def test_one_number_for_each_block_is_that_blocks_own(block):
    base, [tuned] = make(stable_diffusion(), 1)
    weights = [float(number == block) for number in range(BLOCKS)]
    rule = dare.TensorRule(match=["cond_stage_model.*", "first_stage_model.*"], weight=0)
    merged, _ = dare.merge_arrays(
        base, [tuned], method="sum", weights=[weights], tensors=[rule], verbose=False
    )
    if block < 12:
        stack = f"{UNET}.input_blocks.{block}."
    else:
        stack = f"{UNET}.output_blocks.{block - 13}." if block > 12 else f"{UNET}.middle_block."
    around = (f"{UNET}.time_embed.", f"{UNET}.out.")  # they take the first number
    changed = {name for name in base if merged[name].tobytes() != base[name].tobytes()}
    expected = {n for n in base if n.startswith(stack) or (block == 0 and n.startswith(around))}
    assert changed == expected


def test_an_analysis_knows_input_middle_output_and_text_blocks_apart(tmp_path):
    base, models = make(stable_diffusion())
    for name, arrays in (("base", base), ("a", models[0]), ("b", models[1])):
        save_file(arrays, tmp_path / f"{name}.safetensors")
    files = [tmp_path / f"{name}.safetensors" for name in "ab"]
    found = dare.analyze(tmp_path / "base.safetensors", files, verbose=False)
    layers = {tensor.name: tensor.layer for tensor in found.models[0].tensors}
    assert layers[f"{UNET}.input_blocks.1.0.in_layers.2.weight"] == 1
    assert layers[f"{UNET}.middle_block.1.proj_in.weight"] == 12
    assert layers[f"{UNET}.output_blocks.1.0.in_layers.2.weight"] == 14
    assert layers[f"{TEXT}.encoder.layers.1.mlp.fc1.weight"] == BLOCKS + 1
    assert layers[f"{UNET}.time_embed.0.weight"] == layers[f"{UNET}.out.2.weight"] == -1
    tokens = found.models[0].by_kind[dare.analysis.results.Kind.EMBEDDING]
    assert tokens.elements == 20 * 6 + 7 * 6


def test_embedding_drop_rate_is_for_the_text_encoder_s_tokens_alone():
    base, models = make(stable_diffusion())
    given = {"method": "dare+sum", "seed": 1, "verbose": False}
    plain, _ = dare.merge_arrays(base, models, stages={"dare": {"drop_rate": 0.5}}, **given)
    kept, _ = dare.merge_arrays(
        base, models, stages={"dare": {"drop_rate": 0.5}}, embedding_drop_rate=0, **given
    )
    changed = {name for name in base if plain[name].tobytes() != kept[name].tobytes()}
    assert changed == {
        f"{TEXT}.embeddings.{part}_embedding.weight" for part in ("token", "position")
    }
    assert changed == set(filter(is_embedding, base))


@pytest.mark.parametrize("root", ["", "model.diffusion_model.", "transformer/"])
@pytest.mark.parametrize(
    ("doubles", "singles"),
    [("double_blocks", "single_blocks"), ("transformer_blocks", "single_transformer_blocks")],
)
def test_the_57_blocks_of_flux_are_as_deep_as_they_lie(root, doubles, singles):
    blocks = [f"{root}{doubles}.{n}.w" for n in range(19)]
    blocks += [f"{root}{singles}.{n}.w" for n in range(38)]
    around = [
        f"{root}{n}.w" for n in ("img_in", "final_layer.adaLN_modulation.1", "time_in.in_layer")
    ]
    depths = find_depths(reversed([*around, *blocks]))
    assert [depths[name] * 56 for name in blocks] == list(range(57))
    assert {depths[name] for name in around} == {OUTSIDE}


@pytest.mark.parametrize("root", ["", "model.diffusion_model.", "transformer_2/"])
def test_all_of_wan_but_its_blocks_stands_outside_of_them(root):
    apart = ("img_emb.proj.1.w", "condition_embedder.image_embedder.ff.net.0.proj.weight")
    names = [root + name for name in (*wan(), *apart)]
    depths = find_depths(names)
    for name in names:
        _, is_block, rest = name.partition(f"{root}blocks.")
        expected = int(rest.partition(".")[0]) if is_block else 0
        assert depths[name] * 2 == expected, name
    heads = {f"{root}head.head.{part}" for part in ("weight", "bias")}
    assert set(filter(is_embedding, names)) == heads


def test_networks_of_a_pipeline_are_apart():
    names = [f"{part}/blocks.{n}.w" for part in ("transformer", "transformer_2") for n in range(3)]
    names += [f"unet/{block}.w" for block in ("down_blocks.0", "mid_block", "up_blocks.0")]
    assert [str(depth) for depth in find_depths(names).values()] == ["0", "1/2", "1"] * 3
