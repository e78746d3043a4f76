"""Names: prefixes are seen through, and one tensor under several names gets one mask."""

import copy
import json
import warnings

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from writers import write_adapter

import dare
from dare.errors import InputError, MismatchError
from dare.inputs.arrays import array_source
from dare.inputs.names import match_names
from helpers import save

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torch
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

EMBED, HEAD, BODY = "model.embed_tokens.weight", "lm_head.weight", "model.layers.0.q.weight"
T5 = [
    "shared.weight",
    *(f"{side}.embed_tokens.weight" for side in ("encoder", "decoder")),
    HEAD,
]
HALF = {"method": "dare+linear", "stages": {"dare": {"drop_rate": 0.5}}, "verbose": False}


def random(*shape, seed):
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def once(seed, name=EMBED):
    return {name: random(64, 16, seed=seed), BODY: random(16, 16, seed=seed + 100)}


def twice(seed, *names, first=EMBED, copy=True):
    arrays = once(seed, first)
    return arrays | {name: arrays[first].copy() if copy else arrays[first] for name in names}


def merged(base, *models, **settings):
    return dare.merge_arrays(base, models, **{**HALF, **settings})[0]


@pytest.mark.parametrize(
    ("method", "stages"),
    [
        ("dare+linear", {"dare": {"drop_rate": 0.5}}),
        ("trim+linear", {"trim": {"keep_ratio": 0.3, "scope": "model"}}),
        ("dare+trim+linear", {"trim": {"keep_ratio": 0.3, "scope": "model"}}),
        *((method, {}) for method in ("dare+ties", "star+linear", "slerp", "della+linear")),
    ],
)
@pytest.mark.parametrize("copy", [True, False], ids=["equal bytes", "one array"])
def test_a_tied_head_gets_what_its_embedding_gets(copy, method, stages):
    settings = {"method": method, "stages": stages}
    result = merged(*(twice(seed, HEAD, copy=copy) for seed in (1, 2, 3)), **settings)
    expected = merged(*map(once, (1, 2, 3)), **settings)
    assert result[HEAD].tobytes() == result[EMBED].tobytes()
    assert all(result[name].tobytes() == expected[name].tobytes() for name in expected)


def test_tensors_that_share_storage_are_one_whatever_they_are_called():
    weights = [torch.randn(16, 16, generator=torch.Generator().manual_seed(n)) for n in (1, 2)]
    result = merged(*({"a.w": weight, "b.w": weight} for weight in weights))
    assert torch.equal(result["a.w"], result["b.w"])
    separate = merged(*({"a.w": weight, "b.w": weight.clone()} for weight in weights))
    assert not torch.equal(separate["a.w"], separate["b.w"])
    turned = merged(*({"a.w": weight, "b.w": weight.T} for weight in weights))
    assert not torch.equal(turned["a.w"], turned["b.w"])


def test_one_model_whose_head_is_another_makes_them_two():
    base, tuned = twice(1, HEAD), twice(2, HEAD)
    result = merged(base, tuned, tuned | {HEAD: random(64, 16, seed=9)})
    assert result[HEAD].tobytes() != result[EMBED].tobytes()
    lone = merged({HEAD: base[HEAD]}, {HEAD: tuned[HEAD]}, {HEAD: random(64, 16, seed=9)})
    assert result[HEAD].tobytes() == lone[HEAD].tobytes()


def test_a_rule_for_the_second_name_alone_has_no_effect_and_that_is_said():
    rule = {"match": ["lm_head*"], "weight": 2.0}
    settings = {"method": "linear", "verbose": False, "tensors": [rule]}
    _, report = dare.merge_arrays(twice(1, HEAD), [twice(2, HEAD)], **settings)
    (warning,) = (w for w in report.warnings if w.code == "unused_rule")
    assert f"{HEAD} is {EMBED}" in warning.text


# ---------------------------------------------------------------- files


def folder(path, arrays, **config):
    save(path / "model.safetensors", arrays)
    (path / "config.json").write_text(json.dumps(config))
    return path


def merge_files(tmp_path, base, *models, **settings):
    recipe = dare.Request.of(
        base=base, models=models, output=tmp_path / "out.safetensors", **{**HALF, **settings}
    )
    plan = dare.plan(recipe)
    dare.merge(plan)
    return load_file(tmp_path / "out.safetensors"), plan.notes


def test_a_configuration_is_believed_and_the_plan_says_what_is_not_used(tmp_path):
    apart = once(2) | {HEAD: random(64, 16, seed=9)}
    result, notes = merge_files(
        tmp_path,
        folder(tmp_path / "base", twice(1, HEAD), tie_word_embeddings=True),
        folder(tmp_path / "math", apart),
    )
    assert result[HEAD].tobytes() == result[EMBED].tobytes()
    assert result[EMBED].tobytes() == merged(once(1), once(2))[EMBED].tobytes()
    unused, one = notes
    assert (unused.code, unused.subjects, one.code) == ("unused_tensor", ("math",), "one_tensor")
    assert dare.verify(tmp_path / "out.safetensors").ok


def test_an_untied_model_of_a_tied_base_is_refused(tmp_path):
    base = folder(tmp_path / "base", twice(1, HEAD), tie_word_embeddings=True)
    apart = once(2) | {HEAD: random(64, 16, seed=9)}
    model = folder(tmp_path / "math", apart, tie_word_embeddings=False)
    with pytest.raises(MismatchError, match=r"lm_head\.weight: the base's configuration ties it"):
        dare.plan(dare.Recipe(base=base, models=[model]))


def test_a_model_that_stores_it_once_under_any_name_has_it_under_all(tmp_path):
    base = folder(tmp_path / "base", twice(1, *T5[1:], first=T5[0]))
    models = [
        folder(tmp_path / name, once(2, stored) | {BODY: once(1)[BODY]})
        for name, stored in (("a", T5[0]), ("b", HEAD))
    ]
    result, _ = merge_files(tmp_path, base, *models, method="sum", stages={})
    assert len({result[name].tobytes() for name in T5}) == 1
    expected = merged(once(1), once(2), once(2), method="sum", stages={})[EMBED]
    assert result[HEAD].tobytes() == expected.tobytes()


def test_an_encoder_and_a_decoder_that_differ_are_one_by_their_kind(tmp_path):
    base = twice(1, *T5[1:], first=T5[0])
    tuned = twice(2, *T5[1:], first=T5[0]) | {T5[1]: random(64, 16, seed=9)}
    folders = [folder(tmp_path / n, arrays, is_encoder_decoder=True)
               for n, arrays in (("base", base), ("math", tuned))]  # fmt: skip
    result, notes = merge_files(tmp_path, *folders)
    assert len({result[name].tobytes() for name in T5}) == 1
    assert any(T5[1] in note.text for note in notes if note.code == "unused_tensor")


def test_one_storage_in_a_file_of_torch_is_one_tensor(tmp_path):
    paths = []
    for seed in (1, 2):
        state = {name: torch.from_numpy(value) for name, value in once(seed).items()}
        paths.append(tmp_path / f"{seed}.pt")
        torch.save(state | {HEAD: state[EMBED]}, paths[-1])
    result, _ = merge_files(tmp_path, *paths, allow_pickle=True)
    assert result[HEAD].tobytes() == result[EMBED].tobytes()
    assert result[EMBED].tobytes() == merged(once(1), once(2))[EMBED].tobytes()


def test_new_rows_are_one_too(tmp_path):
    folders = []
    for name, rows in (("base", 64), ("math", 66)):
        arrays = {EMBED: random(rows, 16, seed=rows), BODY: once(1)[BODY]}
        folders.append(folder(tmp_path / name, arrays | {HEAD: arrays[EMBED].copy()}))
        vocab = {f"t{number}": number for number in range(64)}
        added = [{"id": n, "content": f"t{n}", "special": False} for n in range(64, rows)]
        document = {"model": {"type": "WordLevel", "vocab": vocab}, "added_tokens": added}
        (folders[-1] / "tokenizer.json").write_text(json.dumps(document))
    result, _ = merge_files(tmp_path, *folders, vocabulary="union")
    assert result[EMBED].shape == (66, 16)
    assert result[HEAD].tobytes() == result[EMBED].tobytes()


# ---------------------------------------------------------------- prefixes, and tied heads

NAMES = [f"layers.{layer}.{part}.weight" for layer in range(2) for part in ("q", "k", "mlp.up")]


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
    base = ones(*(prefix + name for name in NAMES), HEAD)
    names, notes = matched(base, ones(*NAMES))
    assert names == sorted(prefix + name for name in NAMES)
    assert notes == [("renamed", "math", f"The prefix {prefix!r} is added to 6 tensor names")]


def test_a_prefix_that_the_base_lacks_is_taken_off():
    model = ones(*("model." + name for name in NAMES), HEAD)
    names, notes = matched(ones(*NAMES, HEAD), model)
    assert names == sorted([*NAMES, HEAD])
    ((code, model, text),) = notes
    assert (code, model, "'model.' is removed from 6" in text) == ("renamed", "math", True)


def test_names_that_fit_are_left_alone():
    base = ones(*NAMES, HEAD)
    assert matched(base, base) == (sorted(base), [])
    assert matched(base, ones(*NAMES, "model.extra")) == (sorted([*NAMES, "model.extra"]), [])


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


def test_a_merge_sees_through_both_at_once(tmp_path):
    full = [f"model.{name}" for name in NAMES]
    base = folder(tmp_path / "base", ones(*full, EMBED, HEAD))
    tuned = ones(*NAMES, "embed_tokens.weight", value=3.0)
    model = folder(tmp_path / "math", tuned, tie_word_embeddings=True)
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


# ---------------------------------------------------------------- adapters


def llama(tied=True, layers=1, seed=0):
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=layers,
            num_attention_heads=2, num_key_value_heads=2, tie_word_embeddings=tied,
        )
    )  # fmt: skip


def adapter(path, model, **config):
    tuned = get_peft_model(model, LoraConfig(r=2, lora_alpha=4, **config))
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in tuned.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    tuned.save_pretrained(path)
    return path


def base_folder(path, *, stores_both):
    model = llama()
    path.mkdir()
    state = {name: value.numpy().copy() for name, value in model.state_dict().items()}
    if not stores_both:
        del state[HEAD]
    save_file(state, path / "model.safetensors")
    model.config.save_pretrained(path)
    return path


SAVED = {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("stores_both", [True, False])
@pytest.mark.parametrize(
    ("config", "is_one"),
    [
        ({"target_modules": ["embed_tokens"]}, False),
        ({"target_modules": ["lm_head"]}, False),
        ({"target_modules": ["embed_tokens", "lm_head"]}, False),
        ({"target_modules": ["embed_tokens"], "ensure_weight_tying": True}, True),
        ({**SAVED, "ensure_weight_tying": True}, True),
    ],
)
def test_an_adapter_of_a_tied_tensor_gives_what_peft_gives(tmp_path, config, is_one, stores_both):
    base = base_folder(tmp_path / "base", stores_both=stores_both)
    path = adapter(tmp_path / "math", llama(), **config)
    result, notes = merge_files(tmp_path, base, path, method="sum", stages={})
    codes = {note.code for note in notes} & {"tied_change", "added_changes"}
    both = len(config["target_modules"]) > 1
    assert codes == (set() if is_one else {"added_changes" if both else "tied_change"})
    if is_one:  # merging adds the one delta twice, and the adapter that is loaded uses it once
        loaded = PeftModel.from_pretrained(llama(), path)
        tokens = torch.arange(40)[None]
        expected = loaded(tokens).logits
        plain = llama()
        state = {name: torch.from_numpy(value) for name, value in result.items()}
        plain.load_state_dict({HEAD: state[EMBED]} | state)
        torch.testing.assert_close(plain(tokens).logits, expected, atol=1e-5, rtol=1e-5)
    else:
        merged = PeftModel.from_pretrained(llama(), path).merge_and_unload().state_dict()
        for name, value in result.items():
            np.testing.assert_allclose(value, merged[name].numpy(), atol=2e-6, err_msg=name)
    assert (HEAD in result) == stores_both
    assert not stores_both or result[HEAD].tobytes() == result[EMBED].tobytes()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("stores_both", [True, False])
@pytest.mark.parametrize("saved", [["embed_tokens"], ["lm_head"], ["embed_tokens", "lm_head"]])
def test_an_adapter_that_unties_its_base_is_refused(tmp_path, saved, stores_both):
    base = base_folder(tmp_path / "base", stores_both=stores_both)
    path = adapter(tmp_path / "math", llama(), target_modules=["q_proj"], modules_to_save=saved)
    with pytest.raises(InputError, match=r"tied in the base; merge it with PEFT"):
        dare.plan(dare.Recipe(base=base, models=[path]))


def test_an_adapter_of_an_untied_base_is_left_as_it_is(tmp_path):
    base = folder(tmp_path / "base", twice(1, HEAD), tie_word_embeddings=False)
    factors = {"lm_head.lora_A.weight": (1, 16), "lm_head.lora_B.weight": (64, 1)}
    tensors = {name: np.ones(shape, np.float32) for name, shape in factors.items()}
    path = write_adapter(tmp_path / "math", tensors, lora_alpha=1)
    result, notes = merge_files(tmp_path, base, path, method="sum", stages={})
    assert result[EMBED].tobytes() == once(1)[EMBED].tobytes()
    assert result[HEAD].tobytes() == (once(1)[EMBED] + 1).tobytes()
    assert notes == ()


# ---------------------------------------------------------------- tied and untied models


@pytest.fixture(scope="module")
def lms(tmp_path_factory):
    """Models by name: t for tied, u for untied, b for tied and stored under both names."""
    found = tmp_path_factory.mktemp("lms")
    for seed, name in enumerate(("t1", "t2", "b1", "u1", "u2", "t1 again")):
        model = llama("u" not in name, layers=2, seed=seed % 5)
        model.save_pretrained(found / name)
        if "b" in name:
            state = {key: value.numpy().copy() for key, value in model.state_dict().items()}
            save_file(state, found / name / "model.safetensors", {"format": "pt"})
    return found


def computes_as(path, embedding, layers, head):
    """Check that a written model computes as these parts do; return whether it says it is tied."""
    expected, state = llama(tied=False, layers=len(layers)), {EMBED: embedding.state_dict()[EMBED]}
    for number, (model, layer) in enumerate(layers):
        own = model.model.layers[layer].state_dict()
        state |= {f"model.layers.{number}.{name}": value for name, value in own.items()}
    state |= {"model.norm.weight": head.model.norm.weight, HEAD: head.lm_head.weight}
    expected.load_state_dict(state)
    tokens, found = torch.arange(40)[None], LlamaForCausalLM.from_pretrained(path)
    torch.testing.assert_close(found(tokens).logits, expected(tokens).logits, atol=0, rtol=1e-4)
    return json.loads((path / "config.json").read_text())["tie_word_embeddings"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("first", "last", "is_tied"),
    [
        ("u1", "t1", False),
        ("t1", "u1", False),
        ("t1", "t2", False),
        ("u1", "u2", False),
        ("b1", "t1", False),
        ("u1", "merged", False),
        ("t1", "t1 again", True),
        ("b1", "b1", True),
    ],
)
def test_the_head_of_a_stack_is_what_its_last_model_computes_with(
    lms, tmp_path, first, last, is_tied
):
    given, written = lms / last, lms / last
    if last == "merged":
        given = {"base": str(lms / "t1"), "models": [str(lms / "t2")], "method": "dare+linear"}
        written = dare.merge(given, output=tmp_path / "merged", verbose=False).output
        given = {"recipe": given}
    layers = [{"model": lms / first, "range": [0, 1]}, {"model": given, "range": [1, 2]}]
    dare.merge({"layers": layers}, output=tmp_path / "out", verbose=False)
    one, two = map(LlamaForCausalLM.from_pretrained, (lms / first, written))
    assert computes_as(tmp_path / "out", one, [(one, 0), (two, 1)], two) == is_tied


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("base", "model", "settings", "is_tied"),
    [
        ("u1", "t1", {"copy_from": "t1"}, False),
        ("t1", "u1", {"on_extra": "first"}, False),
        ("t1", "u1", {"on_extra": "drop", "copy_from": "u1"}, True),
    ],
)
def test_the_configuration_of_a_merge_says_what_is_stored(
    lms, tmp_path, base, model, settings, is_tied
):
    given = {"base": lms / base, "models": [lms / model], "verbose": False, **settings}
    dare.merge(output=tmp_path / "out", method="linear", **given)
    tuned = LlamaForCausalLM.from_pretrained(lms / model)
    head = copy.deepcopy(tuned)
    if settings.get("on_extra") == "drop":
        head.lm_head.weight = tuned.model.embed_tokens.weight
    assert computes_as(tmp_path / "out", tuned, [(tuned, 0), (tuned, 1)], head) == is_tied
