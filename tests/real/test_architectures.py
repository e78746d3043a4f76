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
    return f"as in memory: {len(loaded) - same} tensors for {len(stored) - same}", stored


def floats(state):
    return {
        name: each.float() if each.dtype == torch.half else each for name, each in state.items()
    }


@pytest.mark.parametrize("architecture", SETTINGS)
def test_the_merged_model_is_that_of_torch(tmp_path, record_property, architecture):
    base, inputs = build(architecture)
    base.save_pretrained(tmp_path / "base")
    tune(base, 1).save_pretrained(tmp_path / "one")
    layout, two = save_otherwise(tune(base, 2), tmp_path / "two")
    origin, one = (load_file(tmp_path / name / WEIGHTS) for name in ("base", "one"))
    cells = []
    for method, formula in METHODS.items():
        stages = {"dare": {"drop_rate": DROP_RATE}, "trim": {"keep_ratio": KEEP_RATIO}}
        request = dare.Request.of(
            base=tmp_path / "base",
            models=[tmp_path / "one", tmp_path / "two"],
            output=tmp_path / method,
            method=method,
            stages={stage: given for stage, given in stages.items() if stage in method},
            seed=SEED,
            verbose=False,
        )
        dare.merge(request)
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
        cells.append(f"{error:.0e}")
    record_property("architectures", (architecture, str(len(origin)), layout, *cells))
