"""Prefixes and tied heads: seen through by rules that the plan shows, and nothing else."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file

import dare
from dare.inputs.arrays import array_source
from dare.inputs.names import match_names
from helpers import save

BODY = [f"layers.{layer}.{part}.weight" for layer in range(2) for part in ("q", "k", "mlp.up")]
EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def ones(*names, value=1.0):
    return {name: np.full(2, value, np.float32) for name in names}


def matched(base, model, base_config=None, model_config=None):
    source, notes = match_names(
        array_source(base, "base"),
        array_source(model, "model"),
        "math",
        base_config=base_config or {},
        model_config=model_config or {},
    )
    return sorted(source.tensors), [(note.code, *note.subjects, note.text) for note in notes]


@pytest.mark.parametrize("prefix", ["model.", "base_model.model.", "_orig_mod."])
def test_a_prefix_that_the_model_lacks_is_put_before_its_names(prefix):
    base = ones(*(prefix + name for name in BODY), HEAD)
    names, notes = matched(base, ones(*BODY))
    assert names == sorted(prefix + name for name in BODY)
    assert notes == [("renamed", "math", f"The prefix {prefix!r} is added to 6 tensor names")]


def test_a_prefix_that_the_base_lacks_is_taken_off():
    model = ones(*("model." + name for name in BODY), HEAD)
    names, notes = matched(ones(*BODY, HEAD), model)
    assert names == sorted([*BODY, HEAD])
    ((code, model, text),) = notes
    assert (code, model, "'model.' is removed from 6" in text) == ("renamed", "math", True)


def test_names_that_fit_are_left_alone():
    base = ones(*BODY, HEAD)
    assert matched(base, base) == (sorted(base), [])
    assert matched(base, ones(*BODY, "model.extra")) == (sorted([*BODY, "model.extra"]), [])


TIED, UNTIED = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}


@pytest.mark.parametrize(
    ("base", "model", "configs", "names", "codes"),
    [
        ([EMBED, HEAD], [EMBED], ({}, TIED), [EMBED, HEAD], ["tied_head"]),
        ([EMBED, HEAD], [EMBED], (TIED, {}), [EMBED, HEAD], ["tied_head"]),
        ([EMBED, HEAD], [EMBED], ({}, {}), [EMBED], []),  # the head is missing
        ([EMBED, HEAD], [EMBED], ({}, UNTIED), [EMBED], []),
        ([EMBED, HEAD], [EMBED], (TIED, UNTIED), [EMBED], []),
        ([EMBED], [EMBED, HEAD], ({}, TIED), [EMBED], ["tied_head"]),
    ],
)
def test_a_head_is_the_embedding_if_it_is_tied(base, model, configs, names, codes):
    found, notes = matched(ones(*base), ones(*model), *configs)
    assert found == sorted(names)
    assert [note[0] for note in notes] == codes


def model_folder(folder, arrays, **config):
    save(folder / "model.safetensors", arrays)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_a_merge_sees_through_both_at_once(tmp_path):
    full = [f"model.{name}" for name in BODY]
    base = model_folder(tmp_path / "base", ones(*full, EMBED, HEAD))
    tuned = ones(*BODY, "embed_tokens.weight", value=3.0)
    model = model_folder(tmp_path / "math", tuned, tie_word_embeddings=True)
    recipe = dare.Request.of(
        base=base, models=[model], output=tmp_path / "out.safetensors", method="sum", verbose=False
    )
    plan = dare.plan(recipe)
    assert [(note.code, note.subjects) for note in plan.notes] == [
        ("renamed", ("math",)),
        ("tied_head", ("math",)),
        ("one_tensor", ()),
    ]
    assert "math: The prefix 'model.' is added to 7 tensor names" in str(plan)
    dare.merge(recipe)
    merged = load_file(tmp_path / "out.safetensors")
    assert sorted(merged) == sorted([*full, EMBED, HEAD])
    assert all(value.tolist() == [3.0, 3.0] for value in merged.values())
    assert dare.verify(tmp_path / "out.safetensors").ok
