from __future__ import annotations

import pytest

from dare.analysis.measuring import kind_of, number_layers
from dare.analysis.results import Kind

NAMES = {
    Kind.ATTENTION: """
        model.layers.0.self_attn.q_proj.weight
        transformer.h.3.attn.c_attn.weight
        h.3.attn.c_proj.weight
        gpt_neox.layers.7.attention.query_key_value.weight
        gpt_neox.layers.7.attention.dense.weight
        encoder.layer.2.attention.self.query.weight
        bert.encoder.layer.11.attention.self.value.bias
        decoder.block.4.layer.1.EncDecAttention.o.weight
        blocks.5.attn.qkv.weight
        vit.encoder.layer.3.attention.attention.key.weight
        vision_model.encoder.layers.3.self_attn.out_proj.weight
        blk.7.attn_q.weight
        double_blocks.0.txt_attn.qkv.weight
        transformer_blocks.18.attn.add_k_proj.weight
        conditioner.embedders.1.model.transformer.resblocks.3.attn.in_proj_weight
    """,
    Kind.MLP: """
        model.layers.0.mlp.gate_proj.weight
        model.layers.5.block_sparse_moe.gate.weight
        model.layers.5.mlp.gate.weight
        transformer.h.3.mlp.c_fc.weight
        gpt_neox.layers.7.mlp.dense_h_to_4h.weight
        encoder.layer.2.intermediate.dense.weight
        encoder.layer.2.output.dense.weight
        encoder.block.0.layer.1.DenseReluDense.wi_0.weight
        blocks.5.mlp.fc1.weight
        model.decoder.layers.4.fc2.weight
        blk.7.ffn_gate.weight
        model.diffusion_model.input_blocks.1.1.transformer_blocks.0.ff.net.0.proj.weight
        double_blocks.0.img_mlp.2.weight
        transformer_blocks.18.ff_context.net.2.weight
        conditioner.embedders.0.transformer.text_model.encoder.layers.3.mlp.fc1.weight
    """,
    Kind.NORM: """
        model.layers.0.input_layernorm.weight
        transformer.h.3.ln_1.weight
        encoder.layer.2.attention.output.LayerNorm.weight
        embeddings.LayerNorm.bias
        blocks.5.norm1.weight
        backbone.layers.0.norm.weight
        blk.7.attn_norm.weight
        model.diffusion_model.input_blocks.1.0.in_layers.0.weight
        model.diffusion_model.out.0.bias
        double_blocks.0.img_attn.norm.query_norm.scale
    """,
    Kind.EMBEDDING: """
        model.embed_tokens.weight
        transformer.wte.weight
        wpe.weight
        gpt_neox.embed_in.weight
        embeddings.word_embeddings.weight
        bert.embeddings.token_type_embeddings.weight
        shared.weight
        patch_embed.proj.weight
        pos_embed
        cls_token
        backbone.embeddings.weight
        token_embd.weight
        cond_stage_model.transformer.text_model.embeddings.token_embedding.weight
        conditioner.embedders.0.transformer.text_model.embeddings.position_embedding.weight
        conditioner.embedders.1.model.token_embedding.weight
        y_embedder.embedding_table.weight
    """,
    Kind.HEAD: """
        lm_head.weight
        output.weight
        embed_out.weight
        transformer.output_layer.weight
        classifier.bias
        score.weight
        cls.predictions.decoder.weight
        qa_outputs.weight
        pooler.dense.weight
        head.weight
    """,
    Kind.OTHER: """
        backbone.layers.0.mixer.A_log
        backbone.layers.0.mixer.conv1d.weight
        w
        logit_scale
        model.diffusion_model.time_embed.0.weight
        model.diffusion_model.label_emb.0.2.weight
        model.diffusion_model.input_blocks.1.0.emb_layers.1.weight
        model.diffusion_model.output_blocks.11.0.in_layers.2.weight
        model.diffusion_model.out.2.weight
        model.diffusion_model.x_embedder.proj.weight
        model.diffusion_model.pos_embed
        pos_embed.proj.weight
        pos_embed.pos_embed
        time_embedding.linear_1.weight
        add_embedding.linear_2.weight
        context_embedder.weight
        time_text_embed.timestep_embedder.linear_1.weight
        time_text_embed.text_embedder.linear_1.weight
        transformer_blocks.0.norm1.linear.weight
        single_blocks.0.linear1.weight
    """,
}


@pytest.mark.parametrize("kind", NAMES)
def test_kinds_of_real_names(kind):
    assert {name: kind_of(name) for name in NAMES[kind].split()} == dict.fromkeys(
        NAMES[kind].split(), kind
    )


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("model.layers.12.mlp.experts.3.up_proj.weight", 12),
        ("h.0.attn.c_attn.weight", 0),
        ("encoder.block.4.layer.1.DenseReluDense.wi.weight", 4),
        ("model.norm.weight", -1),
        ("w.3", -1),
        ("", -1),
    ],
)
def test_the_layers_of_one_stack_have_the_numbers_in_their_names(name, layer):
    assert number_layers([name]) == {name: layer}


SDXL = (
    "model.diffusion_model.output_blocks.1.0.in_layers.2.weight",
    "model.diffusion_model.input_blocks.1.0.in_layers.2.weight",
    "model.diffusion_model.middle_block.1.proj_in.weight",
    "conditioner.embedders.0.transformer.text_model.encoder.layers.1.mlp.fc1.weight",
    "conditioner.embedders.1.model.transformer.resblocks.1.mlp.c_fc.weight",
    "model.diffusion_model.label_emb.0.2.weight",
)


def test_blocks_of_a_diffusion_model_and_its_text_encoders_share_no_number():
    """Input blocks 0 and 1, the middle block, output blocks 0 and 1, then the encoders."""
    assert list(number_layers(SDXL).values()) == [4, 1, 2, 6, 8, -1]


def test_a_second_stack_leaves_the_numbers_of_a_longer_one_alone():
    names = ["classifier.0.weight", "model.layers.0.w", "model.layers.1.w"]
    assert list(number_layers(names).values()) == [2, 0, 1]
