"""An extracted adapter stands for the change of the matrices, and says what it leaves out."""

import json

import ml_dtypes
import numpy as np
import pytest
from peft_models import gaussian, pair, product, read_adapter, write_adapter
from safetensors.numpy import save_file

from dare.errors import InputError, MismatchError, OutputError, RecipeError
from dare.lora import extract_adapter

Q, UP = "model.layers.0.q_proj", "model.layers.0.up_proj"
NORM, HEAD, EMBED = "model.norm.weight", "lm_head.weight", "model.embed_tokens.weight"
SHAPES = {
    f"{Q}.weight": (8, 6),
    f"{Q}.bias": (8,),
    f"{UP}.weight": (10, 6),
    NORM: (6,),
    EMBED: (12, 6),
    HEAD: (12, 6),
}


@pytest.fixture
def base():
    return {name: gaussian(*shape, seed=n) for n, (name, shape) in enumerate(SHAPES.items())}


def extract(tmp_path, base, tuned, config=None, **settings):
    for name, tensors in (("base", base), ("model", tuned)):
        (tmp_path / name).mkdir(exist_ok=True)
        save_file(dict(tensors), tmp_path / name / "model.safetensors")
        if config:
            (tmp_path / name / "config.json").write_text(json.dumps(config))
    return extract_adapter(tmp_path / "base", tmp_path / "model", tmp_path / "out", **settings)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("rank", [1, 4, 6])
def test_the_error_is_the_tail_of_the_singular_values(base, tmp_path, rank, dtype):
    tuned = {name: value + gaussian(*value.shape, seed=9) for name, value in base.items()}
    base, tuned = ({n: v.astype(dtype) for n, v in model.items()} for model in (base, tuned))
    report = extract(tmp_path, base, tuned, rank=rank)
    tensors, _ = read_adapter(tmp_path / "out")
    assert [module.name for module in report.modules] == [Q, UP]
    for module in report.modules:
        name = f"{module.name}.weight"
        change = tuned[name].astype(np.float64) - base[name].astype(np.float64)
        values = np.linalg.svd(change, compute_uv=False)
        tail = np.linalg.norm(values[rank:]) / np.linalg.norm(values)
        assert module.error == pytest.approx(tail, abs=1e-6)
        assert module.energy == pytest.approx(1 - tail**2, abs=1e-6)
        assert module.rank == rank
        difference = np.linalg.norm(product(tensors, module.name) - change)
        assert difference == pytest.approx(tail * np.linalg.norm(values), abs=1e-5)


def test_energy_chooses_a_rank_for_each_module(base, tmp_path):
    changes = {f"{Q}.weight": gaussian(8, 1) @ gaussian(1, 6), f"{UP}.weight": gaussian(10, 6)}
    tuned = base | {name: base[name] + change for name, change in changes.items()}
    report = extract(tmp_path, base, tuned, energy=0.9)
    by_name = {module.name: module for module in report.modules}
    assert by_name[Q].rank == 1
    assert 1 < by_name[UP].rank <= 6
    assert all(module.energy >= 0.9 for module in report.modules)
    assert by_name[Q].error < 1e-5
    assert {note.code for note in report.notes} >= {"names_as_stored"}
    tensors, config = read_adapter(tmp_path / "out")
    np.testing.assert_allclose(product(tensors, Q), changes[f"{Q}.weight"], atol=2e-6)
    assert config["rank_pattern"] == {r"^model\.layers\.0\.q_proj": 1}
    assert config["target_modules"] == [Q, UP]


def test_what_is_left_out_is_listed_with_its_size(base, tmp_path):
    tuned = base | {name: base[name] + 0.5 for name in (f"{Q}.weight", NORM, HEAD)}
    report = extract(tmp_path, base, tuned, rank=1)
    assert [(tensor.tensor, round(tensor.norm, 5)) for tensor in report.left_out] == [
        (HEAD, round(0.5 * 72**0.5, 5)),
        (NORM, round(0.5 * 6**0.5, 5)),
    ]
    assert all("save_others is not set" in tensor.reason for tensor in report.left_out)
    assert report.share == pytest.approx(48 / (48 + 72 + 6), rel=1e-5)
    assert [module.name for module in report.modules] == [Q]
    assert "equal_modules" in {note.code for note in report.notes}
    text = str(report)
    assert f"{HEAD}, {NORM}: 61.90% of the change" in text
    assert json.loads(report.to_json())["share"] == report.share


def test_the_rest_can_be_stored_in_full(base, tmp_path):
    tuned = base | {name: base[name] + 0.5 for name in SHAPES}
    report = extract(tmp_path, base, tuned, rank=1, save_others=True)
    tensors, config = read_adapter(tmp_path / "out")
    assert config["modules_to_save"] == ["lm_head", "model.embed_tokens", "model.norm"]
    assert config["bias"] == "lora_only"
    assert tensors[f"{Q}.base_layer.bias"].tolist() == tuned[f"{Q}.bias"].tolist()
    for name in (NORM, HEAD, EMBED):
        assert tensors[name].tolist() == tuned[name].tolist()
    assert report.left_out == ()
    assert report.saved == (HEAD, EMBED, f"{Q}.bias", NORM)


def test_what_cannot_be_stored_is_left_out_with_the_reason(base, tmp_path):
    odd = {
        "model.scale": gaussian(1),
        "model.layers.0.q_proj.gain": gaussian(8),
        "model.mix.weight": gaussian(3),
        "model.mix.steps": np.arange(2),
    }
    tuned = base | odd
    tuned |= {n: v + 1 for n, v in tuned.items() if v.dtype == np.float32}
    config = {"tie_word_embeddings": True}
    report = extract(tmp_path, base | odd, tuned, config, rank=1, save_others=True)
    reasons = {tensor.tensor: tensor.reason for tensor in report.left_out}
    assert "head are tied" in reasons[EMBED]
    assert "only a bias" in reasons["model.layers.0.q_proj.gain"]
    assert "contains other modules" in reasons["model.scale"]
    assert "not weights" in reasons["model.mix.weight"]
    assert report.saved == (f"{Q}.bias", NORM)


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        (["q_proj"], [Q]),
        (["*_proj"], [Q, UP]),
        (["model.layers.0.up*"], [UP]),
        (["lm_head", "q_proj"], ["lm_head", Q]),
    ],
)
def test_modules_are_chosen_by_patterns(base, tmp_path, patterns, expected):
    tuned = {name: value + 1 for name, value in base.items()}
    report = extract(tmp_path, base, tuned, rank=1, modules=patterns)
    assert [module.name for module in report.modules] == expected


def test_a_pattern_that_matches_nothing_is_refused(base, tmp_path):
    for pattern, said in (
        ("qproj", "did you mean 'q_proj'"),
        ("embed_tokens", "there are lm_head"),
    ):
        with pytest.raises(RecipeError, match=f"{pattern!r} matches no linear layer.*{said}"):
            extract(tmp_path, base, base, rank=1, modules=[pattern])


def test_an_adapter_is_a_model_too(base, tmp_path):
    """Compressing one: its own deltas are what is truncated."""
    (tmp_path / "base").mkdir()
    save_file(base, tmp_path / "base" / "model.safetensors")
    wide = write_adapter(tmp_path / "lora", pair(Q, 8, 4, 6), r=4)
    report = extract_adapter(tmp_path / "base", wide, tmp_path / "out", rank=4)
    tensors, _ = read_adapter(tmp_path / "out")
    np.testing.assert_allclose(product(tensors, Q), product(pair(Q, 8, 4, 6), Q), atol=2e-6)
    assert [module.name for module in report.modules] == [Q]
    with pytest.raises(InputError, match="is an adapter; the base must be a whole model"):
        extract_adapter(wide, tmp_path / "base", tmp_path / "none", rank=4)


def test_an_adapter_with_more_than_factors(base, tmp_path):
    """A saved weight takes its unchanged bias along; a bias of a LoRA is added to the base's."""
    base |= {"model.norm.bias": gaussian(6, seed=30)}
    (tmp_path / "base").mkdir()
    save_file(base, tmp_path / "base" / "model.safetensors")
    more = {NORM: base[NORM] + 1, f"{Q}.lora_B.bias": gaussian(8, seed=31)}
    adapter = write_adapter(tmp_path / "lora", pair(Q, 8, 2, 6) | more, lora_bias=True)
    extract_adapter(tmp_path / "base", adapter, tmp_path / "out", rank=2, save_others=True)
    tensors, config = read_adapter(tmp_path / "out")
    assert config["modules_to_save"] == ["model.norm"]
    assert tensors["model.norm.bias"].tolist() == base["model.norm.bias"].tolist()
    expected = base[f"{Q}.bias"] + 2 * more[f"{Q}.lora_B.bias"]
    assert tensors[f"{Q}.base_layer.bias"].tolist() == expected.tolist()


def test_models_that_do_not_fit_are_refused(base, tmp_path):
    other = {name: value for name, value in base.items() if name != NORM} | {"x": gaussian(2)}
    with pytest.raises(
        MismatchError, match=r"model\.norm\.weight: not in .*model\s+x: in"
    ) as error:
        extract(tmp_path, base, other, rank=1)
    assert "give the base that it was fine-tuned from" in str(error.value)
    with pytest.raises(InputError, match="nothing to extract: 2 modules"):
        extract(tmp_path, base, base, rank=1)
    with pytest.raises(RecipeError, match="one of them is needed"):
        extract(tmp_path, base, base)
    broken = base | {f"{Q}.weight": base[f"{Q}.weight"] * np.nan}
    with pytest.raises(InputError, match=r"q_proj: the change"):
        extract(tmp_path, base, broken, rank=1)
    assert not (tmp_path / "out").exists()


def test_the_directory_says_how_it_was_made(base, tmp_path):
    tuned = {name: value + 1 for name, value in base.items()}
    config = {"architectures": ["LlamaForCausalLM"]}
    extract(tmp_path, base, tuned, config, rank=1, base_name="org/base", modules=["q_proj"])
    manifest = json.loads((tmp_path / "out" / "dare-manifest.json").read_text())
    assert manifest["adapter"] == "extraction"
    assert manifest["base"] == "../base"
    assert (manifest["rank"], manifest["modules"]) == (1, ["q_proj"])
    _, written = read_adapter(tmp_path / "out")
    assert written["base_model_name_or_path"] == "org/base"
    assert written["task_type"] == "CAUSAL_LM"
    assert 'base_model: "org/base"' in (tmp_path / "out" / "README.md").read_text()
    with pytest.raises(OutputError, match="exists already"):
        extract(tmp_path, base, tuned, rank=1)
    with pytest.raises(OutputError, match="would overwrite the input"):
        extract_adapter(tmp_path / "base", tmp_path / "model", tmp_path / "model", rank=1)
