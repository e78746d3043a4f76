"""The rows of tokens, and chat templates: mergekit's program against ours."""

from __future__ import annotations

import json
from importlib.resources import files

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from test_yaml import run_mergekit
from tiny_models import CONFIG, HIDDEN, SHAPES
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers.utils.chat_template_utils import _compile_jinja_template

import dare
from dare.inputs.directory import usual_templates

ROWS = ("model.embed_tokens.weight", "lm_head.weight")
COMMON = ["<unk>", "<s>", "</s>", "a", "b", "c"]
TOKENS = {
    "base": (COMMON, ["d"]),
    "math": (COMMON, ["d", "<m>", "<both>"]),
    "chat": (["<unk>", "</s>", "<s>", "c", "b", "a"], ["<both>", "<c>"]),  # has no d
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    found = tmp_path_factory.mktemp("llamas")
    generator = torch.Generator().manual_seed(0)
    shapes = {n: s for n, s in SHAPES.items() if n in ROWS or ".layers.0." in n or "norm" in n}
    for name, (words, added) in TOKENS.items():
        count = len(words) + len(added)
        tensors = {
            n: torch.randn((count, HIDDEN) if n in ROWS else s, generator=generator)
            for n, s in shapes.items()
            if ".layers." not in n or ".layers.0." in n
        }
        (found / name).mkdir()
        save_file(tensors, found / name / "model.safetensors", metadata={"format": "pt"})
        config = {**CONFIG, "vocab_size": count, "num_hidden_layers": 1}
        (found / name / "config.json").write_text(json.dumps(config))
        ids = {word: number for number, word in enumerate(words)}
        tokenizer = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        tokenizer.add_tokens([AddedToken(token) for token in added])
        tokenizer.save(str(found / name / "tokenizer.json"))
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>"}
        (found / name / "tokenizer_config.json").write_text(json.dumps(settings))
    return found


def rows_of(path):
    """The rows of each token in the embedding and the head of a merged model."""
    tensors = load_file(path / "model.safetensors")
    ids = Tokenizer.from_file(str(path / "tokenizer.json")).get_vocab()
    return {token: torch.stack([tensors[name][n] for name in ROWS]) for token, n in ids.items()}


def model_token(model, **which):
    return {"kind": "model_token", "model": model, **which}


# Tokens cannot be added to the base's there: the base would have to have rows for them.
CASES = {
    "a model's tokens": ({"source": "chat"}, {"vocabulary": "chat"}),
    "a token added to a model's": (
        {"source": "math", "tokens": {"<c>": {"source": "chat"}}},
        {"vocabulary": "math", "tokens": {"<c>": {"model": "chat"}}},
    ),
    "rows for those that lack one": (
        {
            "source": "union",
            "tokens": {
                "<m>": {"source": model_token("chat", token="</s>")},
                "d": {"source": model_token("math", token_id=3)},
                "<zero>": {"source": {"kind": "zero"}},
            },
        },
        {
            "vocabulary": "union",
            "tokens": {
                "<m>": {"model": "chat", "token": "</s>"},
                "d": {"model": "math", "id": 3},
                "<zero>": "zero",
            },
        },
    ),
    "rows for all": (
        {
            "source": "chat",
            "tokens": {
                "</s>": {"source": "chat", "force": True},
                "a": {"source": model_token("base", token="d"), "force": True},
                "<c>": {"source": {"kind": "zero"}, "force": True},
            },
        },
        {
            "vocabulary": "chat",
            "tokens": {
                "</s>": {"model": "chat", "force": True},
                "a": {"model": "base", "token": "d", "force": True},
                "<c>": {"zero": True, "force": True},
            },
        },
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_rows_are_mergekits(folder, tmp_path, monkeypatch, case):
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    theirs, ours = CASES[case]
    merge = {
        "merge_method": "task_arithmetic",
        "base_model": "base",
        "dtype": "float32",
        "models": [{"model": name, "parameters": {"weight": 0.5}} for name in ("math", "chat")],
        "tokenizer": theirs,
    }
    (tmp_path / "merge.yaml").write_text(yaml.safe_dump(merge))
    run_mergekit(tmp_path / "merge.yaml", tmp_path / "theirs", "--copy-tokenizer")
    given = {"base": "base", "models": ["math", "chat"], "method": "sum", "weight": [0.5, 0.5]}
    dare.merge(**given, **ours, output=tmp_path / "ours", verbose=False)
    expected, found = rows_of(tmp_path / "theirs"), rows_of(tmp_path / "ours")
    assert found.keys() == expected.keys()
    for token, rows in expected.items():
        torch.testing.assert_close(found[token], rows, atol=1e-6, rtol=1e-6, msg=token)


SAYS = {role: {"role": role, "content": f" {role}\n says "} for role in ("system", "user")}
ANSWER = {"role": "assistant", "content": "well"}
EXACT = ("chatml", "mistral")
"""mergekit's others have blanks and line breaks that the published formats do not have."""


@pytest.mark.parametrize("name", usual_templates())
def test_usual_templates_say_what_mergekits_do(name):
    theirs = files("mergekit._data.chat_templates").joinpath(f"{name}.jinja").read_text()
    for messages in (
        [SAYS["user"]],
        [*SAYS.values(), ANSWER],
        [SAYS["user"], ANSWER, SAYS["user"]],
    ):
        for asks in (False, True):
            given = {"messages": messages, "add_generation_prompt": asks}
            given |= {"bos_token": "<s>", "eos_token": "</s>"}
            texts = (usual_templates()[name], theirs)
            ours, peer = (_compile_jinja_template(text).render(**given) for text in texts)
            same = str if name in EXACT else lambda text: "".join(text.split())
            assert same(ours) == same(peer)
