"""What is gathered from inputs of live models: Gram matrices, and statistics of norms."""

import textwrap
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

import dare
from dare.deltas.gathering import find_norms
from dare.errors import EvaluationError, InputError
from dare.inputs.gathered import Gathered
from dare.planning.data import Fate
from dare.studies.evaluators import open_scorer

torch = pytest.importorskip("torch")
nn = torch.nn


class Conv1D(nn.Module):
    """Like that of transformers: inputs × outputs."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs))

    def forward(self, x):
        return x @ self.weight


class Tied(nn.Module):
    """An embedding that is also the head, layers of both kinds, one of which runs twice."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.turned = Conv1D(6, 6)
        self.again = nn.Linear(6, 6)
        self.unused = nn.Linear(6, 2)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        self.seen = self.embed(tokens)
        self.between = self.turned(self.seen)
        self.after = self.again(self.between)
        return self.head(self.again(self.after))


def product(*inputs):
    flat = [x.detach().reshape(-1, x.shape[-1]).double() for x in inputs]
    return sum(x.T @ x for x in flat).numpy()


def read(path, model, layer):
    with Gathered(path) as found:
        return found.gram(model, layer)


def test_grams_are_sums_over_all_inputs_of_a_layer(tmp_path):
    torch.manual_seed(0)
    model, tokens = Tied(), torch.randint(11, (5, 4))
    grams = dare.GramCollector(model)
    with torch.no_grad():
        model(tokens)
        expected = product(model.between, model.after)
        with grams:
            model(tokens[:2])
        with grams:  # goes on where it was
            model(tokens[2:])
        model(tokens)  # nobody watches
    path = tmp_path / "grams.safetensors"
    dare.write_grams(path, {"math": grams})
    with Gathered(path) as found:
        assert found.tensors.keys() == {"gram/math/turned.weight", "gram/math/again.weight"}
        assert (found.notes.rows, found.notes.turned) == ({"math": 40}, ("turned.weight",))
        assert found.notes.version == dare.__version__
    np.testing.assert_allclose(read(path, "math", "again.weight"), expected, rtol=1e-5)
    seen = product(model.embed(tokens))
    np.testing.assert_allclose(read(path, "math", "turned.weight"), seen, rtol=1e-5, atol=1e-5)
    assert not model.again._forward_pre_hooks


def test_layers_have_the_names_that_they_are_stored_by():
    inner = nn.ModuleDict({"model": nn.ModuleDict({"fc": nn.Linear(3, 2)})})
    with dare.GramCollector(inner, ["fc.weight", "fc.bias"]) as grams:
        inner["model"]["fc"](torch.ones(4, 3))
    assert list(grams.triangles) == ["fc.weight"]
    np.testing.assert_array_equal(grams.triangles["fc.weight"], [4] * 6)


def test_nothing_to_gather_is_an_error(tmp_path):
    with pytest.raises(InputError, match="math: no input reached a linear layer; run inputs"):
        dare.write_grams(tmp_path / "g.safetensors", {"math": dare.GramCollector(Tied())})
    with pytest.raises(InputError, match="a torch module, not in"):
        dare.GramCollector({"w": np.ones(3)})


def test_gpt2_merges_its_turned_layers(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=12, n_positions=8)
    grams, tokens = {}, torch.arange(24).reshape(4, 6) % 12
    for seed, name in enumerate(("base", "math", "code")):
        torch.manual_seed(seed)
        model = transformers.GPT2LMHeadModel(config).eval()
        model.save_pretrained(tmp_path / name)
        if name != "base":
            stored = load_file(tmp_path / name / "model.safetensors")
            with dare.GramCollector(model, stored) as grams[name], torch.no_grad():
                model((tokens + seed) % 12)
    file = tmp_path / "grams.safetensors"
    dare.write_grams(file, grams)
    layers = {name for name in stored if name.endswith("weight") and ".c_" in name}
    assert {name.removeprefix("gram/math/") for name in Gathered(file).tensors} >= layers
    plan = dare.plan(
        base=tmp_path / "base",
        models=[tmp_path / "math", tmp_path / "code"],
        method="regmean",
        gathered=file,
    )
    axes = {tensor.name: tensor.input_axis for tensor in plan.tensors}
    assert {name for name, axis in axes.items() if axis == 0} == layers
    assert all(axes[name] is None for name in axes if name not in layers)


# ---------------------------------------------------------------- statistics of norms


def small_cnn(seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Dropout(0.5), nn.Flatten()
    )
    model.append(nn.Linear(3 * 4 * 4, 2))
    model[1].running_mean += seed + 1
    return model


def images(count, seed=0):
    return torch.randn(count, 1, 6, 6, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("form", ["tensor", "tuple", "keywords"])
def test_statistics_are_means_over_batches(form):
    model = small_cnn().train()
    model[0].eval()
    batches = [images(8, 1), images(8, 2), images(8, 3)]
    given = {
        "tensor": batches,
        "tuple": [(batch,) for batch in batches],
        "keywords": [{"input": batch} for batch in batches],
    }[form]
    dare.recompute_norms(model, given)
    with torch.no_grad():
        seen = [model[0](batch).transpose(0, 1).reshape(3, -1) for batch in batches]
    mean = torch.stack([each.mean(1) for each in seen]).mean(0)
    variance = torch.stack([each.var(1) for each in seen]).mean(0)
    torch.testing.assert_close(model[1].running_mean, mean)
    torch.testing.assert_close(model[1].running_var, variance)
    assert model[1].momentum == 0.1
    assert [module.training for module in model] == [False] + [True] * 5


def test_without_inputs_the_statistics_are_not_right():
    with pytest.raises(InputError, match="no input reached some; give batches"):
        dare.recompute_norms(small_cnn(), [])
    dare.recompute_norms(nn.Linear(2, 2), [])  # has none


@pytest.fixture
def cnns(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for seed, name in enumerate(("base", "math", "code")):
        save_file(small_cnn(seed).state_dict(), f"{name}.safetensors")
    return dare.Recipe(base="base.safetensors", models=["math.safetensors", "code.safetensors"])


def codes(notices):
    return [notice.code for notice in notices]


def test_plan_merge_and_analysis_say_that_statistics_are_merged(cnns):
    average = cnns.changed(method="linear", output=Path("out.safetensors"))
    plan = dare.plan(average)
    (found,) = [each for each in plan.warnings if each.code == "merged_statistics"]
    assert "recompute_norms" in found.remedy
    assert codes(plan.warnings) == codes(
        dare.merge(dare.Request(average).changed(verbose=False)).warnings
    )
    files = ["math.safetensors", "code.safetensors"]
    analyses = [dare.analyze("base.safetensors", files[:n], verbose=False) for n in (1, 2)]
    assert ["merged_statistics" in codes(each.notes) for each in analyses] == [False, True]
    alone = average.changed(models=cnns.models[:1])
    assert "merged_statistics" not in codes(dare.plan(alone).warnings)


EVALUATOR = """
    import torch
    from torch import nn
    from tests_of_gathering import images, small_cnn

    def load_model(base):
        return small_cnn().eval()

    def run_inputs(model, items=None):
        for item in items or ("1", "2"):
            model(images(8, int(item)))

    def score(model):
        with torch.no_grad():
            out = float(model(images(4)).sum())
        return {"mean": float(model[1].running_mean.sum()), "out": out}
"""


@pytest.fixture(params=["apart", "here"])
def scorer(request, cnns, monkeypatch):
    program = textwrap.dedent(EVALUATOR)
    helper = "import torch\nfrom torch import nn\n"
    import inspect

    helper += "".join(map(inspect.getsource, (small_cnn, images)))
    Path("tests_of_gathering.py").write_text(helper)
    Path("scores.py").write_text(program)
    monkeypatch.syspath_prepend(Path.cwd())
    evaluator = "scores.py:score"
    if request.param == "here":
        import importlib

        evaluator = importlib.import_module("scores").score
    opened = open_scorer(evaluator, cnns)
    yield opened
    opened.close()


def test_candidates_are_scored_with_statistics_of_their_own(scorer, cnns):
    average = cnns.changed(method="linear")
    scorer.make(average)
    scored = scorer.score()
    merged = average.changed(output=Path("merged.safetensors"))
    dare.merge(dare.Request(merged).changed(verbose=False))
    model = small_cnn().eval()
    model.load_state_dict(load_file("merged.safetensors"))
    dare.recompute_norms(model, [images(8, 1), images(8, 2)])
    assert scored.scores["mean"] == pytest.approx(float(model[1].running_mean.sum()), rel=1e-5)

    assert scorer.gather_norms(Path("norms.safetensors"), average)
    kept = merged.changed(gathered=Path("norms.safetensors"))
    report = dare.merge(dare.Request(kept).changed(verbose=False), overwrite=True)
    assert "merged_statistics" not in codes(report.warnings)
    found = load_file("merged.safetensors")
    torch.testing.assert_close(found["1.running_mean"], model[1].running_mean)
    torch.testing.assert_close(found["1.running_var"], model[1].running_var)
    assert dare.Candidates(kept).make().digest == report.digests.output
    fates = {tensor.name: tensor.fate for tensor in dare.plan(kept).tensors}
    assert [n for n, fate in fates.items() if fate is Fate.GATHERED] == [
        "1.running_mean",
        "1.running_var",
    ]
    scorer.make(kept)
    assert scorer.score().scores == scored.scores
    dare.merge("merged.safetensors", output="again.safetensors", verbose=False)
    assert Path("again.safetensors").read_bytes() == Path("merged.safetensors").read_bytes()
    assert dare.verify("merged.safetensors").ok


def test_a_scorer_gathers_what_regmean_needs(scorer, cnns):
    alone = {
        name: (cnns.changed(models=(entry,), method="linear"), [str(seed)])
        for seed, (name, entry) in enumerate(zip(cnns.names, cnns.models, strict=True), start=1)
    }
    scorer.gather(Path("grams.safetensors"), alone)
    model = small_cnn().eval()
    model.load_state_dict(load_file("code.safetensors"))
    with torch.no_grad():
        expected = product(model[:5](images(8, 2)))
    found = read(Path("grams.safetensors"), "code", "5.weight")
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)

    regmean = cnns.changed(method="regmean", gathered=Path("grams.safetensors"))
    digest = scorer.make(regmean)
    assert digest == dare.Candidates(regmean).make().digest
    assert digest != scorer.make(cnns.changed(method="linear"))
    assert scorer.gather_norms(Path("both.safetensors"), regmean)
    with Gathered(Path("both.safetensors")) as both:
        assert len(both.tensors) == 4
        np.testing.assert_array_equal(both.gram("code", "5.weight"), found)


def test_an_evaluator_without_inputs_gathers_nothing(cnns):
    opened = open_scorer(lambda tensors: 1.0, cnns)
    assert not opened.gather_norms(Path("norms.safetensors"), cnns)
    with pytest.raises((EvaluationError, InputError)):
        opened.gather(Path("grams.safetensors"), {"math": (cnns, None)})
    assert not Path("grams.safetensors").exists()


def test_statistics_of_another_shape_are_refused(cnns):
    from dare.inputs.gathered import write_gathered

    for tensors in ({"1.running_mean": np.ones(4, np.float32)}, {"2.x": np.ones(3, np.float32)}):
        write_gathered("norms.safetensors", tensors)
        with pytest.raises(InputError, match="in the base; gather it again"):
            dare.plan(cnns.changed(gathered=Path("norms.safetensors")))


def test_modules_without_statistics_are_no_such_norms():
    model = nn.Sequential(nn.LayerNorm(3), nn.BatchNorm1d(3, track_running_stats=False))
    assert find_norms(model) == {}
