"""What goes beside the weights: whose template, whose stop tokens, whose configuration."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dare
from helpers import save

CHATML = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
WORDS = ["<unk>", "<s>", "</s>", "hello", "world"]
CHAT = ["<|im_start|>", "<|im_end|>", "<pad>"]
WIDTH = 4


def write_model(
    folder: Path,
    tokens: Sequence[str],
    *,
    eos: str | None,
    generation: Sequence[str] = (),
    template: str | None = None,
    pad: str | None = None,
    change: float = 0.0,
) -> Path:
    """A model with a row for each token, whose files all say how a text ends."""
    folder.mkdir(parents=True)
    rows = np.outer(np.arange(len(tokens)), np.ones(WIDTH)).astype(np.float32)
    save(
        folder / "model.safetensors",
        {"model.embed_tokens.weight": rows + np.float32(change), "model.norm.weight": rows[0]},
    )
    entries = [
        {"id": tokens.index(token), "content": token, "special": True}
        | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        for token in tokens
        if token in {"<s>", "</s>", *CHAT}
    ]
    tokenizer = {
        "version": "1.0",
        "added_tokens": entries,
        "pre_tokenizer": {"type": "Whitespace"},
        "model": {
            "type": "WordLevel",
            "vocab": {token: number for number, token in enumerate(tokens)},
            "unk_token": "<unk>",
        },
    }
    special = {"eos_token": eos, "pad_token": pad}
    special = {key: token for key, token in special.items() if token is not None}
    ids = {f"{key}_id": tokens.index(token) for key, token in special.items()}
    fast = {"tokenizer_class": "PreTrainedTokenizerFast"}
    chat = {} if template is None else {"chat_template": template}
    files: dict[str, Any] = {
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": {**fast, **special, **chat},
        "special_tokens_map.json": special,
        "config.json": {"model_type": "llama", "vocab_size": len(tokens), **ids},
    }
    if generation:
        stops = [tokens.index(token) for token in generation]
        files["generation_config.json"] = {**ids, "eos_token_id": stops}
    for name, document in files.items():
        (folder / name).write_text(json.dumps(document))
    return folder


def read(folder: Path, name: str) -> dict[str, Any]:
    return json.loads((folder / name).read_text())  # type: ignore[no-any-return]


def stops(folder: Path) -> tuple[Any, ...]:
    """What ends a text by each of the four files."""
    return (
        read(folder, "tokenizer_config.json")["eos_token"],
        read(folder, "special_tokens_map.json")["eos_token"],
        read(folder, "config.json")["eos_token_id"],
        read(folder, "generation_config.json")["eos_token_id"],
    )


def merged(folder: Path, base: Path, models: Sequence[Path], **settings: Any) -> dare.Report:
    return dare.merge(
        base=base, models=models, output=folder / "out", method="linear", verbose=False, **settings
    )


def codes(report: dare.Report) -> list[str]:
    return [notice.code for notice in report.warnings]


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A base that ends a text with </s> and has no template; its vocabulary has room for ChatML."""
    tokens = [*WORDS, *CHAT]
    return write_model(tmp_path / "base", tokens, eos="</s>", generation=["</s>"])


def chat_model(folder: Path, tokens: Sequence[str] = (*WORDS, *CHAT), **more: Any) -> Path:
    settings = {"eos": "<|im_end|>", "generation": ["</s>", "<|im_end|>"], "pad": "<pad>"}
    return write_model(folder, tokens, **{**settings, "template": CHATML, **more})


def test_who_gives_the_template_gives_the_stop_tokens(tmp_path, base):
    changes = {"math": 0.01, "code": -0.01}
    models = [chat_model(tmp_path / name, change=change) for name, change in changes.items()]
    report = merged(tmp_path, base, models)
    out = tmp_path / "out"
    assert stops(out) == ("<|im_end|>", "<|im_end|>", 6, [2, 6])
    assert read(out, "config.json")["pad_token_id"] == 7
    assert read(out, "tokenizer_config.json")["pad_token"] == "<pad>"
    assert codes(report) == ["stop_tokens"]
    assert "base with </s>" in report.warnings[0].text
    assert dare.verify(out).ok
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    assert (tokenizer.eos_token, tokenizer.eos_token_id, tokenizer.pad_token_id) == (
        "<|im_end|>",
        6,
        7,
    )
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": "hello"}], tokenize=False)
    assert rendered == "<|im_start|>hello<|im_end|>"
    assert transformers.GenerationConfig.from_pretrained(out).eos_token_id == [2, 6]


def test_ids_are_those_of_the_outputs_vocabulary(tmp_path):
    base = write_model(tmp_path / "base", WORDS, eos="</s>", generation=["</s>"])
    other = write_model(tmp_path / "other", [*WORDS, "new"], eos="</s>", change=0.01)
    document = read(other, "tokenizer.json")
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    document["added_tokens"].append({"id": 5, "content": "new", **flags})
    (other / "tokenizer.json").write_text(json.dumps(document))
    chat = chat_model(tmp_path / "chat", change=0.01)
    merged(tmp_path, base, [other, chat], vocabulary="union", copy_from="chat")
    out = tmp_path / "out"
    ids = {token["content"]: token["id"] for token in read(out, "tokenizer.json")["added_tokens"]}
    assert (ids["new"], ids["<|im_end|>"], ids["<pad>"]) == (5, 7, 8)
    assert stops(out) == ("<|im_end|>", "<|im_end|>", 7, [2, 7])
    assert read(out, "generation_config.json")["pad_token_id"] == 8
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (7, 8)


def test_a_base_with_a_template_keeps_all_its_files_and_says_who_differs(tmp_path):
    base = chat_model(tmp_path / "base", eos="</s>", generation=["</s>"])
    model = chat_model(tmp_path / "math", change=0.01)
    report = merged(tmp_path, base, [model])
    for name in ("tokenizer_config.json", "special_tokens_map.json", "generation_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (base / name).read_bytes()
    assert codes(report) == ["stop_tokens"]
    assert "math with </s>, <|im_end|>" in report.warnings[0].text
    assert "Set chat_template" in report.warnings[0].remedy


def test_a_model_that_is_named_gives_both(tmp_path):
    base = chat_model(tmp_path / "base", eos="</s>", generation=["</s>"])
    models = [chat_model(tmp_path / "math", change=0.01), chat_model(tmp_path / "code", eos="</s>")]
    merged(tmp_path, base, models, chat_template="math")
    assert stops(tmp_path / "out") == ("<|im_end|>", "<|im_end|>", 6, [2, 6])


def test_a_stop_token_that_the_tokenizer_lacks_is_refused(tmp_path):
    base = write_model(tmp_path / "base", WORDS, eos="</s>", generation=["</s>"])
    chat = chat_model(tmp_path / "chat", change=0.01)
    for asked in ({"chat_template": "chat"}, {"copy_from": "chat"}):
        with pytest.raises(dare.RecipeError, match=r'eos_token_id = 6 .*vocabulary = "union"'):
            merged(tmp_path, base, [chat], vocabulary="base", **asked)
    document = read(base, "generation_config.json")
    (base / "generation_config.json").write_text(json.dumps({**document, "eos_token_id": [2, 99]}))
    with pytest.raises(dare.RecipeError, match=r"generation_config\.json: .* the token 99"):
        merged(tmp_path, base, [write_model(tmp_path / "plain", WORDS, eos="</s>", change=0.01)])
    assert not list(tmp_path.glob("out*"))


def test_padding_that_the_output_lacks_is_left_out(tmp_path):
    base = write_model(tmp_path / "base", WORDS, eos="</s>", generation=["</s>"])
    tokens = [*WORDS, "<pad>"]
    settings = {"eos": "</s>", "generation": ["</s>"], "template": CHATML, "pad": "<pad>"}
    chat = write_model(tmp_path / "chat", tokens, change=0.01, **settings)
    merged(tmp_path, base, [chat], vocabulary="base")
    assert stops(tmp_path / "out") == ("</s>", "</s>", 2, [2])
    assert "pad_token" not in read(tmp_path / "out", "tokenizer_config.json")
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == CHATML


# ---------------------------------------------------------------- whose tokens, and which names


def test_an_output_with_a_models_tokens_has_its_tokenizer_and_ids(tmp_path):
    base = write_model(tmp_path / "base", WORDS, eos="</s>", generation=["</s>"], pad="<unk>")
    tokens = ["</s>", *CHAT, "<unk>", "hello"]  # has no <s>
    chat = chat_model(tmp_path / "chat", tokens, change=0.01, pad=None)
    merged(tmp_path, base, [chat], vocabulary="chat")
    out = tmp_path / "out"
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (out / name).read_bytes() == (chat / name).read_bytes()
    assert stops(out) == ("<|im_end|>", "<|im_end|>", 2, [0, 2])
    config = read(out, "config.json")
    assert (config["vocab_size"], config["pad_token_id"]) == (6, 4)  # the base's <unk>


def test_a_repeated_merge_finds_the_models_that_were_named(tmp_path):
    base = write_model(tmp_path / "base", WORDS, eos="</s>", generation=["</s>"])
    models = [
        chat_model(tmp_path / place / "chat", change=change)
        for place, change in {"a": 0.01, "b": 0.02}.items()
    ]
    with pytest.raises(dare.RecipeError, match="2 models have that name; write a/chat, b/chat"):
        merged(tmp_path, base, models, vocabulary="chat")
    named = {"copy_from": "b/chat", "chat_template": "b/chat", "vocabulary": "b/chat"}
    tokens = {"<z>": {"model": "a/chat", "id": 7}}
    report = merged(tmp_path, base, models, tokens=tokens, **named)
    assert [model.name for model in report.models] == ["a/chat", "b/chat"]
    (tmp_path / "b" / "chat").rename(tmp_path / "moved")
    given = {"base": base, "models": [models[0], tmp_path / "moved"], "verbose": False}
    again = dare.merge(tmp_path / "out", **given, output=tmp_path / "again")
    assert again.digests == report.digests
    recipe = dare.load_recipe(tmp_path / "again").recipe
    assert (recipe.vocabulary, recipe.copy_from, recipe.chat_template) == ("moved",) * 3
    assert recipe.tokens["<z>"].model == "chat"


def test_usual_templates_have_names(tmp_path, base):
    model = write_model(tmp_path / "math", [*WORDS, *CHAT], eos="</s>", change=0.01)
    merged(tmp_path, base, [model], chat_template="chatml")
    assert "<|im_start|>" in (tmp_path / "out" / "chat_template.jinja").read_text()
    again = dare.load_recipe(tmp_path / "out").recipe
    assert again.chat_template == (tmp_path / "out" / "chat_template.jinja").read_text()
    (tmp_path / "math").rename(tmp_path / "chatml")
    with pytest.raises(dare.RecipeError, match="that model has no chat template"):
        merged(tmp_path, base, [tmp_path / "chatml"], chat_template="chatml")


# ---------------------------------------------------------------- configuration


def test_a_base_without_a_configuration_says_whom_to_copy_it_from(tmp_path):
    chat = chat_model(tmp_path / "my chat", change=0.01)
    alone = tmp_path / "base.safetensors"
    alone.write_bytes((chat_model(tmp_path / "base") / "model.safetensors").read_bytes())
    report = merged(tmp_path, alone, [chat])
    assert codes(report) == ["no_configuration"]
    assert f"--copy-from {shlex.quote('my chat')}" in report.warnings[0].remedy
    (tmp_path / "out").rename(tmp_path / "without")
    assert codes(merged(tmp_path, alone, [chat], copy_from="my chat")) == []
    assert stops(tmp_path / "out") == stops(chat)
    plan = dare.plan(base=alone, models=[chat / "model.safetensors"], output=tmp_path / "none")
    assert [(n.code, n.severity) for n in plan.warnings] == [("no_configuration", "note")]
