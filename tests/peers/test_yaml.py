"""Both programs on mergekit's configurations: what each does, and how far apart the results are."""

from __future__ import annotations

import json
import re
import shutil
import warnings
from pathlib import Path

import pytest
import torch
import yaml
from agreement import AGREEMENT, Outcome
from mergekit.merge_methods.registry import registered_methods
from safetensors.torch import load_file
from side_by_side import ROUNDING, compares
from tiny_models import write_models
from tokenizers import Tokenizer

import dare
from configurations import (
    AGREES,
    CONFIGURATIONS,
    DIFFERS,
    IN_DISTRIBUTION,
    ONLY_HERE,
    REFUSED,
    REFUSED_HERE,
    Configuration,
)
from dare.cli import main
from dare.recipe.mergekit.methods import METHODS

PEER = "mergekit YAML"
MOST_REFUSED = 3
"""Configurations that mergekit merges and we refuse."""
WEIGHTS = "model*.safetensors"
EXPERTS = ".block_sparse_moe."
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """The tiny models."""
    found = tmp_path_factory.mktemp("models")
    with warnings.catch_warnings(action="ignore"):
        write_models(found)
    return found


# ---------------------------------------------------------------- the two programs


def run_mergekit(file: Path, output: Path, *more: str) -> None:
    """Run mergekit's program in this process: to start one takes longer than to merge."""
    with warnings.catch_warnings(action="ignore"):  # it has many, and they are its own
        from mergekit.io.tasks import LoaderCache
        from mergekit.scripts import moe, multimerge, run_yaml

    LoaderCache.loaders.clear()  # by relative names, which are others elsewhere

    text, scratch = file.read_text(), output.with_suffix(".scratch")
    flags = ["--no-write-model-card", "--quiet", "--random-seed", "1"]
    flags += ["--lora-merge-cache", str(scratch)]
    flags += [*more, *([] if "token" in text else ["--no-copy-tokenizer"])]
    with warnings.catch_warnings(action="ignore"):
        if "experts:" in text:
            moe.main([str(file), str(output), *flags, "--device", "cpu"], standalone_mode=False)
        elif "\n---\n" in text:
            several = ["--out-path", str(output), "--intermediate-dir", str(scratch)]
            multimerge.main([str(file), *several, *flags], standalone_mode=False)
        else:
            run_yaml.main([str(file), str(output), *flags], standalone_mode=False)
    if not output.exists():  # every merge has a name
        last = list(yaml.safe_load_all(text))[-1]["name"]
        shutil.move(scratch / last, output)


def run_ours(file: Path, output: Path) -> None:
    with warnings.catch_warnings(action="ignore", category=dare.DareWarning):
        if "experts:" in file.read_text():
            assert main(["moe", str(file), "--output", str(output), "--quiet"]) == 0
        else:
            dare.merge(file, output=output, verbose=False)


def weights_of(path: Path) -> dict[str, torch.Tensor]:
    """Return a model's tensors, by names that both programs write, rows in the order of tokens."""
    found = {name: t for file in sorted(path.glob(WEIGHTS)) for name, t in load_file(file).items()}
    rows = slice(None)
    if (path / "tokenizer.json").exists():
        tokens = Tokenizer.from_file(str(path / "tokenizer.json")).get_vocab()
        rows = [tokens[token] for token in sorted(tokens)]
        rows += range(len(rows), found[HEAD].shape[0])
    ordered = {
        name.removeprefix("transformer."): tensor[rows] if name in (HEAD, EMBEDDING) else tensor
        for name, tensor in found.items()
    }
    return ordered if "model.layers.0.block_sparse_moe.gate.weight" not in found else fused(ordered)


def fused(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a mixture in the layout of transformers 5, where experts share their tensors."""
    found = {n.replace(EXPERTS, ".mlp."): t for n, t in tensors.items() if ".experts." not in n}
    gates = [name for name in tensors if name.endswith(f"{EXPERTS}gate.weight")]
    for layer in (gate.removesuffix("gate.weight") for gate in gates):
        parts = {
            part: [tensors[f"{layer}experts.{n}.{part}.weight"] for n in range(2)]
            for part in ("w1", "w2", "w3")
        }
        both = [torch.cat(pair) for pair in zip(parts["w1"], parts["w3"], strict=True)]
        name = layer.replace(EXPERTS, ".mlp.")
        found[f"{name}experts.gate_up_proj"] = torch.stack(both)
        found[f"{name}experts.down_proj"] = torch.stack(parts["w2"])
    return found


# ---------------------------------------------------------------- how far apart they are


def magnitudes(folder: Path) -> dict[str, torch.Tensor]:
    """Add up the models' magnitudes, of the same tensor in any layer."""
    largest: dict[str, torch.Tensor] = {}
    for model in sorted(folder.glob("*")):
        own: dict[str, torch.Tensor] = {}
        for name, tensor in weights_of(model).items() if (model / "config.json").exists() else ():
            kind = f"{kind_of(name)} {tuple(tensor.shape)}"
            own[kind] = torch.maximum(own.get(kind, tensor.abs()), tensor.abs())
        for kind, tensor in own.items():
            largest[kind] = largest.get(kind, 0) + tensor
    return largest


def kind_of(name: str) -> str:
    return re.sub(r"\.\d+\.", ".N.", name)


def roundings_apart(ours, theirs, folder) -> float:
    """Return the largest difference, in roundings of numbers of the models' magnitude."""
    largest, worst = magnitudes(folder), 0.0
    for name, merged in ours.items():
        kind = f"{kind_of(name)} {tuple(merged.shape)}"
        magnitude = 2 * largest.get(kind, merged.abs().max()).double()
        distance = (merged.double() - theirs[name].double()).abs()
        bound = ROUNDING * magnitude
        worst = max(worst, torch.where(distance == 0, 0, distance / bound).max().item())
    return worst


def share_apart(ours, theirs) -> float:
    """Return the largest difference of a tensor, as a share of its norm."""
    shares = []
    for name, merged in ours.items():
        other = theirs[name].double()
        apart, norm = (merged.double() - other).norm().item(), other.norm().item()
        shares.append(apart / norm if norm else apart)
    return max(shares)


def assert_alike(ours, theirs, folder) -> None:
    """As many elements are changed, and by as much, in each kind of matrix."""
    base = weights_of(folder / "base")
    for kind in sorted({kind_of(name) for name in ours if "proj" in name or "gate" in name}):
        unchanged, sizes, count = [], [], 0
        for merged in (ours, theirs):
            changes = [
                (tensor - base.get(name, 0)).flatten().double()
                for name, tensor in merged.items()
                if kind_of(name) == kind
            ]
            flat = torch.cat(changes)
            unchanged.append((flat == 0).double().mean().item())
            sizes.append(flat.abs().mean().item())
            count = flat.numel()
        deviation = max(unchanged[0] * (1 - unchanged[0]) / count, 1e-9) ** 0.5
        assert abs(unchanged[0] - unchanged[1]) < 7 * deviation  # two of them, and a bit
        assert sizes[0] == pytest.approx(sizes[1], rel=0.1)


def assert_same_config(ours: Path, theirs: Path) -> None:
    """The outputs have the same layers and tokens."""
    found = [json.loads((path / "config.json").read_text()) for path in (ours, theirs)]
    for key in ("num_hidden_layers", "n_layer", "vocab_size"):
        assert found[0].get(key) == found[1].get(key), key


# ---------------------------------------------------------------- every configuration

ROUGH = {"karcher": 1e-5, "mixture": 1e-5}
"""Shares of the norm, where mergekit goes step by step in float32, or through a whole model."""


def merge_both(file: Path) -> tuple[Exception | None, Exception | None]:
    """Run both programs; return what each says that refuses."""
    refusals = []
    for run, name in ((run_ours, "ours"), (run_mergekit, "theirs")):
        try:
            run(file, file.parent / name)
            refusals.append(None)
        except (Exception, SystemExit) as error:
            refusals.append(error)
    return refusals[0], refusals[1]


def judge(given: Configuration, file: Path, folder: Path) -> Outcome:
    """Merge, and say what is found; an assertion fails where results should agree and do not."""
    ours_error, theirs_error = merge_both(file)
    if ours_error is not None:
        if not isinstance(ours_error, dare.DareError):
            raise ours_error
        assert str(ours_error), "a refusal has a reason"
        return Outcome(given, REFUSED if theirs_error else REFUSED_HERE, None)
    if theirs_error is not None:
        return Outcome(given, ONLY_HERE, None)
    assert_same_config(file.parent / "ours", file.parent / "theirs")
    ours, theirs = weights_of(file.parent / "ours"), weights_of(file.parent / "theirs")
    assert ours.keys() == theirs.keys()
    assert {n: t.dtype for n, t in ours.items()} == {n: t.dtype for n, t in theirs.items()}
    for name, merged in ours.items():
        AGREEMENT.measure(merged, theirs[name])
    apart = share_apart(ours, theirs)
    if given.verdict == IN_DISTRIBUTION:
        assert_alike(ours, theirs, folder)
        return Outcome(given, IN_DISTRIBUTION, None)
    rough = next((share for word, share in ROUGH.items() if given.name.startswith(word)), None)
    roundings = 8 if "out_dtype" not in given.text else 2**16
    agrees = roundings_apart(ours, theirs, folder) <= roundings if rough is None else apart <= rough
    if not agrees:
        assert apart <= given.share, f"{apart:.2g} of the norm apart"
    return Outcome(given, AGREES if agrees else DIFFERS, apart)


def case_of(given: Configuration):
    """Return a configuration as a case, marked with its method if results are compared."""
    method = list(yaml.safe_load_all(given.yaml))[-1].get("merge_method")
    marks = [compares(method, PEER)] if given.verdict == AGREES and method else []
    return pytest.param(given, id=given.name, marks=marks)


@pytest.mark.parametrize("given", [case_of(given) for given in CONFIGURATIONS])
def test_a_configuration_is_what_the_table_says(given, folder, tmp_path, monkeypatch):
    monkeypatch.chdir(folder)
    file = tmp_path / "merge.yaml"
    file.write_text(given.yaml)
    outcome = judge(given, file, folder)
    AGREEMENT.outcomes.append(outcome)
    assert outcome.verdict == given.verdict


def test_at_least_80_configurations_and_at_most_3_refused_that_mergekit_merges():
    verdicts = [given.verdict for given in CONFIGURATIONS]
    assert len({given.name for given in CONFIGURATIONS}) == len(CONFIGURATIONS)
    assert len(verdicts) - verdicts.count(REFUSED) >= 80
    assert verdicts.count(REFUSED_HERE) <= MOST_REFUSED


# ---------------------------------------------------------------- every method


def test_every_method_of_mergekit_is_converted():
    assert METHODS.keys() == {method.spec.name for method in registered_methods()}


@pytest.mark.parametrize("method", METHODS)
def test_the_parameters_of_a_method_are_mergekits(method):
    spec = next(m.spec for m in registered_methods() if m.spec.name == method)
    ours = {*METHODS[method].of_models, *METHODS[method].of_all}
    theirs = {parameter.name for parameter in spec.parameters} - {"int8_mask", "eps"}
    if method == "task_arithmetic":
        theirs -= {"density", "rescale"}  # which change nothing where nothing is dropped
    assert ours == theirs
