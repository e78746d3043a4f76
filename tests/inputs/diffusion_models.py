"""Names and shapes of diffusion checkpoints: true names, tiny shapes."""

from __future__ import annotations

Shapes = dict[str, tuple[int, ...]]

WIDTH, CONTEXT, TIME = 8, 6, 32
ATTENTION_IN, DOWNSAMPLING, UPSAMPLING = (1, 2, 4, 5, 7, 8), (3, 6, 9), (2, 5, 8)


def stable_diffusion() -> Shapes:
    """Stable Diffusion 1.5 in one file: U-Net, text encoder, autoencoder."""
    return {**unet("model.diffusion_model"), **text_encoder(), **autoencoder()}


def unet(root: str) -> Shapes:
    """12 input blocks, a middle block, 12 output blocks, and what stands around them."""
    shapes = linear("time_embed.0", TIME, WIDTH) | linear("time_embed.2", TIME, TIME)
    shapes |= convolution("input_blocks.0.0", WIDTH, 4)
    for number in range(1, 12):
        block = f"input_blocks.{number}"
        if number in DOWNSAMPLING:
            shapes |= convolution(f"{block}.0.op", WIDTH, WIDTH)
        else:
            shapes |= residual(f"{block}.0", WIDTH)
        if number in ATTENTION_IN:
            shapes |= attention(f"{block}.1")
    shapes |= residual("middle_block.0", WIDTH) | attention("middle_block.1")
    shapes |= residual("middle_block.2", WIDTH)
    for number in range(12):
        block = f"output_blocks.{number}"
        shapes |= residual(f"{block}.0", 2 * WIDTH)
        if number > 2:
            shapes |= attention(f"{block}.1")
        if number in UPSAMPLING:
            shapes |= convolution(f"{block}.{1 if number == 2 else 2}.conv", WIDTH, WIDTH)
    shapes |= norm("out.0") | convolution("out.2", 4, WIDTH)
    return {f"{root}.{name}": shape for name, shape in shapes.items()}


def residual(name: str, inputs: int) -> Shapes:
    """A residual block."""
    shapes = norm(f"{name}.in_layers.0", inputs)
    shapes |= convolution(f"{name}.in_layers.2", WIDTH, inputs)
    shapes |= linear(f"{name}.emb_layers.1", WIDTH, TIME) | norm(f"{name}.out_layers.0")
    shapes |= convolution(f"{name}.out_layers.3", WIDTH, WIDTH)
    return shapes | (
        convolution(f"{name}.skip_connection", WIDTH, inputs, 1) if inputs > WIDTH else {}
    )


def attention(name: str) -> Shapes:
    """A spatial transformer."""
    block = f"{name}.transformer_blocks.0"
    shapes = norm(f"{name}.norm") | convolution(f"{name}.proj_in", WIDTH, WIDTH, 1)
    for part, inputs in (("attn1", WIDTH), ("attn2", CONTEXT)):
        shapes[f"{block}.{part}.to_q.weight"] = (WIDTH, WIDTH)
        shapes[f"{block}.{part}.to_k.weight"] = (WIDTH, inputs)
        shapes[f"{block}.{part}.to_v.weight"] = (WIDTH, inputs)
        shapes |= linear(f"{block}.{part}.to_out.0", WIDTH, WIDTH)
    shapes |= linear(f"{block}.ff.net.0.proj", 8 * WIDTH, WIDTH)
    shapes |= linear(f"{block}.ff.net.2", WIDTH, 4 * WIDTH)
    for number in (1, 2, 3):
        shapes |= norm(f"{block}.norm{number}")
    return shapes | convolution(f"{name}.proj_out", WIDTH, WIDTH, 1)


def text_encoder(root: str = "cond_stage_model.transformer.text_model") -> Shapes:
    """CLIP's text model, with five of its layers."""
    shapes: Shapes = {
        "embeddings.token_embedding.weight": (20, CONTEXT),
        "embeddings.position_embedding.weight": (7, CONTEXT),
    }
    for number in range(5):
        layer = f"encoder.layers.{number}"
        for part in ("q_proj", "k_proj", "v_proj", "out_proj"):
            shapes |= linear(f"{layer}.self_attn.{part}", CONTEXT, CONTEXT)
        shapes |= linear(f"{layer}.mlp.fc1", 4 * CONTEXT, CONTEXT)
        shapes |= linear(f"{layer}.mlp.fc2", CONTEXT, 4 * CONTEXT)
        shapes |= norm(f"{layer}.layer_norm1", CONTEXT) | norm(f"{layer}.layer_norm2", CONTEXT)
    shapes |= norm("final_layer_norm", CONTEXT)
    return {f"{root}.{name}": shape for name, shape in shapes.items()}


def autoencoder(root: str = "first_stage_model") -> Shapes:
    """A few parts of the autoencoder."""
    shapes = convolution("encoder.conv_in", 4, 3) | convolution(
        "encoder.down.0.block.0.conv1", 4, 4
    )
    shapes |= convolution("encoder.mid.attn_1.q", 4, 4, 1) | norm("decoder.norm_out", 4)
    shapes |= convolution("decoder.up.3.block.2.conv2", 4, 4) | convolution("quant_conv", 4, 4, 1)
    return {f"{root}.{name}": shape for name, shape in shapes.items()}


def flux(doubles: int = 3, singles: int = 5) -> Shapes:
    """Flux's transformer, as its authors name it."""
    shapes = linear("img_in", WIDTH, 4) | linear("txt_in", WIDTH, CONTEXT)
    for name in ("time_in", "vector_in", "guidance_in"):
        shapes |= linear(f"{name}.in_layer", WIDTH, 4) | linear(f"{name}.out_layer", WIDTH, WIDTH)
    for number in range(doubles):
        for stream in ("img", "txt"):
            block = f"double_blocks.{number}.{stream}"
            shapes |= linear(f"{block}_mod.lin", 6 * WIDTH, WIDTH)
            shapes |= linear(f"{block}_attn.qkv", 3 * WIDTH, WIDTH)
            shapes |= linear(f"{block}_attn.proj", WIDTH, WIDTH)
            shapes[f"{block}_attn.norm.query_norm.scale"] = (4,)
            shapes[f"{block}_attn.norm.key_norm.scale"] = (4,)
            shapes |= linear(f"{block}_mlp.0", 4 * WIDTH, WIDTH)
            shapes |= linear(f"{block}_mlp.2", WIDTH, 4 * WIDTH)
    for number in range(singles):
        block = f"single_blocks.{number}"
        shapes |= linear(f"{block}.linear1", 7 * WIDTH, WIDTH)
        shapes |= linear(f"{block}.linear2", WIDTH, 5 * WIDTH)
        shapes |= linear(f"{block}.modulation.lin", 3 * WIDTH, WIDTH)
        shapes[f"{block}.norm.query_norm.scale"] = (4,)
        shapes[f"{block}.norm.key_norm.scale"] = (4,)
    shapes |= linear("final_layer.linear", 4, WIDTH)
    return shapes | linear("final_layer.adaLN_modulation.1", 2 * WIDTH, WIDTH)


def wan(blocks: int = 3, width: int = 24) -> Shapes:
    """Wan's transformer, as its authors name it."""
    shapes: Shapes = {
        "patch_embedding.weight": (width, 16, 1, 2, 2),
        "patch_embedding.bias": (width,),
    }
    shapes |= linear("text_embedding.0", width, CONTEXT) | linear("text_embedding.2", width, width)
    shapes |= linear("time_embedding.0", width, 8) | linear("time_embedding.2", width, width)
    shapes |= linear("time_projection.1", 6 * width, width)
    for number in range(blocks):
        block = f"blocks.{number}"
        shapes[f"{block}.modulation"] = (1, 6, width)
        for part in ("self_attn", "cross_attn"):
            for letter in "qkvo":
                shapes |= linear(f"{block}.{part}.{letter}", width, width)
            shapes[f"{block}.{part}.norm_q.weight"] = (width,)
            shapes[f"{block}.{part}.norm_k.weight"] = (width,)
        shapes |= norm(f"{block}.norm3", width)
        shapes |= linear(f"{block}.ffn.0", 32, width) | linear(f"{block}.ffn.2", width, 32)
    shapes["head.modulation"] = (1, 2, width)
    return shapes | linear("head.head", 64, width)


def linear(name: str, outputs: int, inputs: int) -> Shapes:
    """A linear layer."""
    return {f"{name}.weight": (outputs, inputs), f"{name}.bias": (outputs,)}


def convolution(name: str, outputs: int, inputs: int, kernel: int = 3) -> Shapes:
    """A convolution."""
    return {f"{name}.weight": (outputs, inputs, kernel, kernel), f"{name}.bias": (outputs,)}


def norm(name: str, width: int = WIDTH) -> Shapes:
    """A norm."""
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}
