"""Every architecture: merged, loaded by transformers, and compared with a merge in torch."""

import copy
import math

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import dare
from architectures import SETTINGS, build
from dare.errors import MismatchError
from dare.tensors.mask import keep_mask

pytestmark = pytest.mark.filterwarnings("ignore")
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

DROP_RATE, KEEP_RATIO, SEED = 0.5, 0.4, 42
TOLERANCE = 2e-5  # of the largest logit
WEIGHTS = "model.safetensors"


def dare_linear(name, base, models):
    """base + mean of mask · (model - base) / (1 - p), with the masks of the specification."""
    changes = []
    for number, model in enumerate(models):
        kept = torch.from_numpy(np.asarray(keep_mask(name, base.numel(), DROP_RATE, SEED + number)))
        changes.append(torch.where(kept.reshape(base.shape), model - base, 0) / (1 - DROP_RATE))
    return base + sum(changes) / len(changes)


def trim_ties(_name, base, models):
    """The largest of each change; of these the mean of all that have the sign of their sum."""
    changes = torch.zeros(len(models), *base.shape)
    for change, model in zip(changes, models, strict=True):
        delta = (model - base).reshape(-1)
        largest = delta.abs().argsort(descending=True, stable=True)
        largest = largest[: max(1, int(KEEP_RATIO * delta.numel()))]
        change.reshape(-1)[largest] = delta[largest]
    agree = (changes.sign() == changes.sum(0).sign()) & (changes != 0)
    return base + (changes * agree).sum(0) / agree.sum(0).clamp(min=1)


def slerp(_name, _base, models):
    """The middle of the arc between two tensors."""
    one, two = (model.double().reshape(-1) for model in models)
    lengths = float(one.norm() * two.norm())
    cosine = float(one @ two) / lengths if lengths else 1.0
    share = 0.5
    if abs(cosine) <= 0.9995:
        angle = math.acos(cosine)
        share = math.sin(angle / 2) / math.sin(angle)
    return (share * one + share * two).float().reshape(models[0].shape)


METHODS = {"dare+linear": dare_linear, "trim+ties": trim_ties, "slerp": slerp}


def tune(model, seed):
    """A fine-tune: every parameter changed a little, one that is tied only once."""
    tuned = copy.deepcopy(model)
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in tuned.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return tuned


def in_memory(model):
    """The tensors of a model under their names in memory, each once."""
    tied = model.all_tied_weights_keys
    state = {name: value for name, value in model.state_dict().items() if name not in tied}
    return {name: value.contiguous() for name, value in state.items()}


def save_otherwise(model, folder):
    """Save a model as it is in memory, or in half precision where the files have that layout.

    Returns which it is, and the weights in the layout of the files.
    """
    model.save_pretrained(folder)
    stored, loaded = load_file(folder / WEIGHTS), in_memory(model)
    if stored.keys() == loaded.keys():
        model.half().save_pretrained(folder)
        return "in F16", floats(load_file(folder / WEIGHTS))
    save_file(loaded, folder / WEIGHTS, metadata={"format": "pt"})
    same = len(stored.keys() & loaded.keys())
    return f"as in memory, {len(loaded) - same} for {len(stored) - same} tensors", stored


def floats(state):
    return {
        name: each.float() if each.dtype == torch.half else each for name, each in state.items()
    }


@pytest.mark.parametrize("architecture", SETTINGS)
def test_the_merged_model_is_that_of_torch(tmp_path, add_row, architecture):
    base, inputs = build(architecture)
    base.save_pretrained(tmp_path / "base")
    tune(base, 1).save_pretrained(tmp_path / "one")
    layout, two = save_otherwise(tune(base, 2), tmp_path / "two")
    origin, one = (load_file(tmp_path / name / WEIGHTS) for name in ("base", "one"))
    cells = []
    for method, formula in METHODS.items():
        stages = {"dare": {"drop_rate": DROP_RATE}, "trim": {"keep_ratio": KEEP_RATIO}}
        own = {stage: given for stage, given in stages.items() if stage in method}
        given = {"method": method, "stages": own, "seed": SEED}
        dare.merge(request(tmp_path, method, "base", "one", "two", **given))
        merged, info = type(base).from_pretrained(tmp_path / method, output_loading_info=True)
        assert not any(info.values())
        expected = {
            name: formula(name, value, [one[name], two[name]])
            if value.is_floating_point()
            else value
            for name, value in origin.items()
        }
        reference = type(base).from_pretrained(None, config=base.config, state_dict=expected)
        with torch.no_grad():
            found, wanted, before = (m.eval()(**inputs)[0] for m in (merged, reference, base))
        scale = float(wanted.abs().max())
        error = float((found - wanted).abs().max()) / scale
        assert error <= TOLERANCE
        assert float((wanted - before).abs().max()) > 100 * TOLERANCE * scale
        cells.append(error)
    add_row("architectures", architecture, str(len(origin)), layout, *cells)


# ---------------------------------------------------------------- layouts and adapters


def request(tmp_path, output, base, *models, **given):
    return dare.Request.of(
        base=tmp_path / base,
        models=[tmp_path / model for model in models],
        output=tmp_path / output,
        verbose=False,
        **given,
    )


def turn_experts(folder):
    """Store experts as they were published: inputs and outputs exchanged."""
    state = load_file(folder / WEIGHTS)
    turned = {n: v.transpose(1, 2).contiguous() if v.dim() == 3 else v for n, v in state.items()}
    save_file(turned, folder / WEIGHTS, metadata={"format": "pt"})
    return turned


@pytest.mark.parametrize("architecture", ["MixtralForCausalLM", "HrmTextForCausalLM", "GteModel"])
def test_a_base_as_in_memory_takes_models_as_saved(tmp_path, architecture):
    """Only names of tensors differ then from a merge in which all are as in memory."""
    base, _ = build(architecture)
    for name, model in {"base": base, "one": tune(base, 1)}.items():
        model.save_pretrained(tmp_path / name)
        model.save_pretrained(tmp_path / f"{name}-loaded")
        save_file(in_memory(model), tmp_path / f"{name}-loaded" / WEIGHTS)
    outputs = []
    for number, model in enumerate(("one", "one-loaded")):
        dare.merge(request(tmp_path, f"out{number}", "base-loaded", model, method="dare+linear"))
        outputs.append((tmp_path / f"out{number}" / WEIGHTS).read_bytes())
    one, two = (load_file(tmp_path / f"out{number}" / WEIGHTS) for number in range(2))
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_experts_that_are_turned_in_the_base_are_turned_in_the_model(tmp_path):
    base, _ = build("Qwen3VLMoeForConditionalGeneration")
    base.save_pretrained(tmp_path / "base")
    tune(base, 1).save_pretrained(tmp_path / "one")
    tune(base, 1).save_pretrained(tmp_path / "turned")
    origin, turned = turn_experts(tmp_path / "base"), turn_experts(tmp_path / "turned")
    for model in ("one", "turned"):
        plan = request(tmp_path, model + "-out", "base", model, method="linear")
        dare.merge(plan)
        merged = load_file(tmp_path / f"{model}-out" / WEIGHTS)
        assert merged.keys() == origin.keys()
        for name in merged:
            torch.testing.assert_close(merged[name], turned[name], rtol=0, atol=1e-7)
    notes = dare.plan(request(tmp_path, "again", "base", "one")).notes
    assert [*next(note.subjects for note in notes if note.code == "other_layout")] == ["one"]


def drop(state, name):
    del state[name]


def halve(state, name):
    state[name] = state[name].half()


def add_fused(state, _name):
    state["model.layers.0.mlp.experts.gate_up_proj"] = torch.zeros(4, 48, 16)


@pytest.mark.parametrize("damage", [drop, halve, add_fused])
def test_experts_that_cannot_be_fused_are_never_left_out(tmp_path, damage):
    base, _ = build("MixtralForCausalLM")
    base.save_pretrained(tmp_path / "base")
    base.save_pretrained(tmp_path / "one")
    save_file(in_memory(base), tmp_path / "base" / WEIGHTS)
    state = load_file(tmp_path / "one" / WEIGHTS)
    damage(state, "model.layers.0.block_sparse_moe.experts.2.w1.weight")
    save_file(state, tmp_path / "one" / WEIGHTS)
    allowed = {"on_missing": "base", "on_extra": "drop", "on_mismatch": "base"}
    with pytest.raises(
        MismatchError, match=r"base stores experts fused .* one by one .* save both"
    ):
        dare.plan(request(tmp_path, "out", "base", "one", **allowed))
