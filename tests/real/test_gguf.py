"""GGUF read bit for bit, and merges written as GGUF, loaded by transformers and by llama.cpp.

llama.cpp's own part runs where its Python binding is installed (`pip install llama-cpp-python`,
which compiles for some minutes).
"""

import shutil
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from small_models import KINDS, make_model
from training import load_gguf, load_gguf_tokenizer, save_smollm2, smollm2_gguf
from transformers import AutoModelForCausalLM, AutoTokenizer

import dare
from dare.inputs.gguf import GgufSource

TEXTS = [
    "Hello, world! It's 12345 o'clock.",
    "def f(x):\n    return x**2\n\n\n  end",
    "naïve café   日本語 🎉",
    "They're  THE 1st",
]
PROMPT = "The capital of France is"
# Of all logits together; llama.cpp keeps keys and values in half precision, and with Q8_0 rounds
# what weights are multiplied by.
TOLERANCES = {"F32": 2e-3, "F16": 1e-2, "Q8_0": 1e-1}
WRITTEN = ("F16", "Q8_0")


def add_model(folder: Path) -> None:
    """Put a model beside the base that differs from it a little."""
    weights = shutil.ignore_patterns("*.safetensors")
    shutil.copytree(folder / "base", folder / "tuned", ignore=weights)
    rng = np.random.default_rng(0)
    tuned = {
        name: values + 1e-4 * rng.standard_normal(values.shape, np.float32)
        for name, values in load_file(folder / "base" / "model.safetensors").items()
    }
    save_file(tuned, folder / "tuned" / "model.safetensors", metadata={"format": "pt"})


def merge(folder: Path, output: str, dtype: str | None = None):
    files = {"base": folder / "base", "models": [folder / "tuned"], "output": folder / output}
    return dare.merge(**files, method="linear", dtype=dtype, verbose=False)


def logits(model, tokens):
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0].numpy()


def off(found, expected):
    return np.linalg.norm(found - expected) / np.linalg.norm(expected)


def test_smollm2_is_bit_for_bit_what_transformers_loads():
    file = smollm2_gguf()
    loaded = load_gguf(file).state_dict()
    with GgufSource(file) as source:
        assert set(source.tensors) == set(loaded) - {"lm_head.weight"}  # tied
        assert source.remarks == ()
        for name, info in source.tensors.items():
            read = np.empty(info.elements, info.dtype.carrier)
            source.read(name, 0, read)
            assert info.shape == loaded[name].shape
            assert read.tobytes() == loaded[name].numpy().tobytes(), name


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory):
    folder = tmp_path_factory.mktemp("smollm2")
    save_smollm2(folder / "base")
    add_model(folder)
    merge(folder, "plain")
    for dtype in WRITTEN:
        merge(folder, f"{dtype}.gguf", dtype)
    return folder


@pytest.fixture(scope="module")
def plain(smollm2):
    model = AutoModelForCausalLM.from_pretrained(smollm2 / "plain", dtype=torch.float32)
    return model, AutoTokenizer.from_pretrained(smollm2 / "plain")


@pytest.mark.parametrize("dtype", WRITTEN)
def test_transformers_loads_smollm2(smollm2, plain, add_row, dtype):
    model, tokenizer = plain
    found = load_gguf(smollm2 / f"{dtype}.gguf")
    tokens = tokenizer(PROMPT).input_ids
    apart = off(logits(found, tokens), logits(model, tokens))
    assert 0 < apart < TOLERANCES[dtype]
    add_row("formats", f"GGUF, {dtype}", "transformers", "SmolLM2", apart)


# Of GGUF, transformers takes heads of Qwen3 to have 128 rows, and knows no first Gemma.
@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "gemma2", "gemma3_text"])
def test_transformers_loads_the_very_weights(tmp_path, kind):
    make_model(kind, tmp_path / "base")
    add_model(tmp_path)
    merge(tmp_path, "plain")
    merge(tmp_path, "F32.gguf", "F32")
    expected = AutoModelForCausalLM.from_pretrained(tmp_path / "plain").state_dict()
    for name, values in load_gguf(tmp_path / "F32.gguf").state_dict().items():
        is_shifted = kind.startswith("gemma") and name.endswith("norm.weight")
        one = 1.0 if is_shifted else 0.0  # which GGUF has added
        assert torch.equal(values, (expected[name] + one) - one), name


def test_transformers_reads_the_same_tokens(smollm2, plain):
    found = load_gguf_tokenizer(smollm2 / "F16.gguf")
    for text in TEXTS:
        assert found(text).input_ids == plain[1](text).input_ids
    assert found.chat_template == plain[1].chat_template


# ---------------------------------------------------------------- llama.cpp


def open_llama(path: Path):
    llama_cpp = pytest.importorskip("llama_cpp")
    return closing(llama_cpp.Llama(str(path), n_ctx=256, logits_all=True, verbose=False))


def check(path: Path, model, tokenizer, text: str) -> float:
    """Compare tokens and logits with those of transformers; return how far logits are apart."""
    with open_llama(path) as llama:
        for line in TEXTS:
            assert llama.tokenize(line.encode(), add_bos=False) == (
                tokenizer(line, add_special_tokens=False).input_ids
            )
        tokens = tokenizer(text).input_ids
        assert llama.tokenize(text.encode()) == tokens
        llama.eval(tokens)
        found = np.array(llama.scores[: len(tokens)])
        apart = off(found, logits(model, tokens))
        assert apart < TOLERANCES[path.stem]
        return apart


@pytest.mark.parametrize("dtype", WRITTEN)
def test_llama_cpp_goes_on_with_the_same_words(smollm2, plain, add_row, dtype):
    model, tokenizer = plain
    apart = check(smollm2 / f"{dtype}.gguf", model, tokenizer, PROMPT)
    add_row("formats", f"GGUF, {dtype}", "llama.cpp", "SmolLM2", apart)
    tokens = tokenizer(PROMPT, return_tensors="pt")
    written = model.generate(**tokens, max_new_tokens=8, do_sample=False)[0]
    with open_llama(smollm2 / f"{dtype}.gguf") as llama:
        found = llama(PROMPT, max_tokens=8, temperature=0)["choices"][0]["text"]
    assert PROMPT + found == tokenizer.decode(written)


@pytest.mark.parametrize(
    ("kind", "splitter"),
    [*((kind, None) for kind in KINDS), *(("llama", s) for s in ("gpt-2", "smollm", "tekken"))],
)
def test_llama_cpp_computes_every_architecture(tmp_path, add_row, kind, splitter):
    pytest.importorskip("llama_cpp")
    make_model(kind, tmp_path / "base", splitter)
    add_model(tmp_path)
    merge(tmp_path, "plain")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "plain")
    for dtype in ("F32", "Q8_0"):
        merge(tmp_path, f"{dtype}.gguf", dtype)
        apart = check(tmp_path / f"{dtype}.gguf", model, tokenizer, "".join(TEXTS))
        if splitter is None:
            add_row("formats", f"GGUF, {dtype}", "llama.cpp", kind, apart)
