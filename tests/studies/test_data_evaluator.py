"""Data files as an evaluator, against plain loops over tiny models."""

from __future__ import annotations

import json
import math
import os
import re
import tomllib
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import spearmanr

import dare
from dare.api import make_request
from dare.cli import main
from dare.documents import page
from dare.errors import EvaluationError, InputError, RecipeError, install_command
from dare.studies.data_files import read_tasks
from dare.studies.document import read_result
from dare.studies.evaluators import examples, open_scorer
from dare.studies.results import Scored, State, group_means
from dare.studies.searching import SearchProgress, _Search, make_search
from dare.studies.study import Study

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")
huggingface_hub = pytest.importorskip("huggingface_hub")

COUNT = 36
DEMO = Path(dare.__file__).parent / "demo" / "models"
START, PAD = "<s>", "<pad>"
LENGTH = 96  # tokens that the writer takes


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """The evaluator in this process, which has torch already."""
    monkeypatch.setattr(examples, "IN_OWN_PROCESS", False)
    monkeypatch.chdir(tmp_path)


# ---------------------------------------------------------------- tiny models


def byte_tokenizer() -> Any:
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {name: n for n, name in enumerate((START, PAD, *letters))}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(False, use_regex=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{START} $A", special_tokens=[(START, 0)]
    )
    special = {"bos_token": START, "eos_token": START, "pad_token": PAD}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, **special)


TOKENIZER = byte_tokenizer()
SMALL = {"vocab_size": len(TOKENIZER), "hidden_size": 32, "num_hidden_layers": 2}
SMALL |= {"intermediate_size": 48, "num_attention_heads": 2, "max_position_embeddings": LENGTH}
SMALL |= {"initializer_range": 0.3, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 1}


def make_model(kind: str, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    if kind == "writer":
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL))
    elif kind == "encoder":
        model = transformers.BertModel(transformers.BertConfig(**SMALL))
    elif kind == "classifier":
        labels = {"id2label": {0: "No", 1: "Yes", 2: "maybe"}}
        made = transformers.BertConfig(**SMALL, **labels)
        model = transformers.BertForSequenceClassification(made)
    else:
        sizes = {"embedding_size": 4, "hidden_sizes": [4, 6], "depths": [1, 1], "num_labels": 3}
        made = transformers.ResNetConfig(**sizes, layer_type="basic")
        model = transformers.ResNetForImageClassification(made)
    return model.eval().requires_grad_(False)


def image_processor() -> Any:
    from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

    return ViTImageProcessorPil(size={"height": 12, "width": 12})


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Callable[[str, int], Path]:
    """A function that returns the folder of a model of a kind and a seed, made once."""
    folder = tmp_path_factory.mktemp("models")

    def made(kind: str, seed: int = 0) -> Path:
        place = folder / f"{kind}{seed}"
        if not place.exists():
            make_model(kind, seed).save_pretrained(place)
            (image_processor() if kind == "images" else TOKENIZER).save_pretrained(place)
        return place

    return made


def write(rows: list[dict[str, Any]], name: str = "task") -> Path:
    file = Path(f"{name}.jsonl")
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return file


class Loaded:
    """Data files and the model of a folder, as the evaluator loads it."""

    def __init__(self, folder: Path, *files: Path, held_out: bool = False) -> None:
        self.function = examples.find(examples.evaluator_of(files, held_out=held_out))
        self.model = self.function.load_model(folder)
        self.tasks = read_tasks(files)

    def items(self, items: list[str] | None = None) -> dict[str, float]:
        found: dict[str, float] = self.function.call(self.model, items=items)["items"]
        return found

    def values(self, held_out: bool = False) -> dict[str, dict[str, Any]]:
        every = (example for task in self.tasks for example in task.examples)
        return {e.id: e.values for e in every if e.is_held_out == held_out}


def assert_as_expected(loaded: Loaded, expected: dict[str, float], **about: Any) -> None:
    """Scores are as expected of all together, of each alone, and of some."""
    found = loaded.items()
    assert found == pytest.approx(expected, **about)
    assert len(set(found.values())) > 1  # else nothing was compared
    some = list(found)[::7]
    assert loaded.items(some) == pytest.approx({name: expected[name] for name in some}, **about)
    for name in some[:3]:
        assert loaded.items([name]) == pytest.approx({name: expected[name]}, **about)


# ---------------------------------------------------------------- each form, by a plain loop


def log_likelihoods(model: Any, row: list[int]) -> list[float]:
    """The log-likelihood of each token but the first."""
    logits = model(torch.tensor([row])).logits[0].log_softmax(-1)
    return [float(logits[place, token]) for place, token in enumerate(row[1:])]


def test_the_most_likely_choice_per_character_must_be_the_answer(saved):
    folder = saved("writer")
    model, prompts = make_model("writer"), [f"{'so ' * (n % 40)}{n * n}=" for n in range(COUNT)]
    prompts[::3] = [f"Q{n}: which? A:" for n in range(len(prompts[::3]))]  # then a space follows
    choices = [["é", "no", f"yes {n}" * 3][: 2 + n % 2] for n in range(COUNT)]
    wanted = []
    for prompt, own in zip(prompts, choices, strict=True):
        scores = []
        for choice in own:
            space = " " * prompt.endswith(":")
            count = len((space + choice).encode())
            row = TOKENIZER(f"{prompt}{space}{choice}")["input_ids"][-LENGTH:]
            scores.append(math.fsum(log_likelihoods(model, row)[-count:]) / len(choice))
        wanted.append(int(np.argmax(scores)))
    assert len(set(wanted)) == 3
    rows = [
        {"prompt": prompt, "choices": own, "answer": best if n % 2 else 0}
        for n, (prompt, own, best) in enumerate(zip(prompts, choices, wanted, strict=True))
    ]
    loaded = Loaded(folder, write(rows))
    of_rows = {f"task/{n + 1}": float(row["answer"] == wanted[n]) for n, row in enumerate(rows)}
    assert_as_expected(loaded, {name: of_rows[name] for name in loaded.values()})


def greedy(model: Any, prompt: str, limit: int) -> str:
    row = made = TOKENIZER(prompt)["input_ids"]
    made = []
    while len(made) < limit:
        token = int(model(torch.tensor([row + made])).logits[0, -1].argmax())
        if token == 0:
            break
        made.append(token)
    return TOKENIZER.decode(made, skip_special_tokens=True)


def test_what_is_generated_must_match_the_pattern(saved, monkeypatch):
    monkeypatch.setattr(examples, "PATTERN_TOKENS", 12)
    folder, model = saved("writer", 3), make_model("writer", 3)
    prompts = [f"{n * n} is{' what' * (n % 5)}" for n in range(COUNT)]
    outputs = [greedy(model, prompt, examples.PATTERN_TOKENS) for prompt in prompts]
    assert len(set(outputs)) > COUNT // 2
    patterns = [f"^{re.escape(output)}$" if n % 2 else "^no$" for n, output in enumerate(outputs)]
    pairs = zip(prompts, patterns, strict=True)
    loaded = Loaded(folder, write([{"prompt": p, "pattern": pattern} for p, pattern in pairs]))
    expected = {name: float(int(name[5:]) % 2 == 0) for name in loaded.values()}
    assert_as_expected(loaded, expected)


def test_bits_a_byte_are_those_of_windows_that_the_model_takes(saved):
    folder, model = saved("writer", 1), make_model("writer", 1)
    texts = [f"{n}é{'long ' * (n * n % 61)}" for n in range(COUNT)]
    expected = {}
    for n, text in enumerate(texts):
        row, bits = TOKENIZER(text)["input_ids"], 0.0
        for start in range(0, len(row) - 1, LENGTH - 1):
            bits -= math.fsum(log_likelihoods(model, row[start : start + LENGTH])) / math.log(2)
        expected[f"task/{n + 1}"] = bits / len(text.encode())
    loaded = Loaded(folder, write([{"text": text} for text in texts]))
    of_side = {name: expected[name] for name in loaded.values()}
    assert_as_expected(loaded, of_side, rel=1e-5)
    held_out = Loaded(folder, Path("task.jsonl"), held_out=True)
    assert {**of_side, **held_out.items()} == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("names", [["no", "YES", "maybe"], [0, 1, 2]])
def test_the_label_of_the_highest_output_must_be_the_examples(saved, names):
    folder, model = saved("classifier"), make_model("classifier")
    texts = [f"text {n} {'very ' * (n * n % 37)}" for n in range(COUNT)]
    best = [
        int(model(**TOKENIZER(t[: LENGTH - 1], return_tensors="pt")).logits.argmax()) for t in texts
    ]
    rows = [{"text": t, "label": names[(best[n] + n) % 3]} for n, t in enumerate(texts)]
    loaded = Loaded(folder, write(rows))
    assert_as_expected(loaded, {name: float(int(name[5:]) % 3 == 1) for name in loaded.values()})


def test_pairs_give_the_rank_correlation_of_cosine_and_score(saved):
    folder, model = saved("encoder"), make_model("encoder")
    pairs = [(f"text {n}", f"{'text ' * (n % 7)}{n * n}") for n in range(COUNT)]

    def vector(text: str) -> Any:
        return model(**TOKENIZER(text, return_tensors="pt")).last_hidden_state[0].mean(0)

    cosines = [float(torch.cosine_similarity(*map(vector, pair), dim=0)) for pair in pairs]
    rows = [{"a": a, "b": b, "score": (n * 7) % 10} for n, (a, b) in enumerate(pairs)]
    loaded = Loaded(folder, write(rows))
    for asked in (None, list(loaded.values())[::2]):
        found = loaded.items(asked)
        places = [int(name[5:]) - 1 for name in found]
        expected = spearmanr([cosines[p] for p in places], [rows[p]["score"] for p in places])
        assert np.mean([*found.values()]) == pytest.approx(expected.statistic, abs=1e-6)


def save_images(folder: Path, count: int = COUNT) -> list[Any]:
    image = pytest.importorskip("PIL.Image")
    chance, made = np.random.default_rng(0), []
    folder.mkdir()
    for n in range(count):
        pixels = chance.integers(0, 256, (12, 12 + n % 3, 3), dtype=np.uint8)
        made.append(image.fromarray(pixels))
        made[-1].save(folder / f"{n}.png")
    return made


def test_images_are_read_beside_the_file_and_scored_like_texts(saved):
    images, model = save_images(Path("images")), make_model("images")
    processor = image_processor()
    best = [int(model(**processor(i, return_tensors="pt")).logits.argmax()) for i in images]
    rows = [
        {"image": f"images/{n}.png", "label": (label + n % 2) % 3} for n, label in enumerate(best)
    ]
    loaded = Loaded(saved("images"), write(rows))
    assert_as_expected(loaded, {name: float(int(name[5:]) % 2) for name in loaded.values()})


def test_candidates_with_batchnorm_are_scored_with_statistics_of_the_inputs(saved):
    images, labels = save_images(Path("images")), [n % 3 for n in range(COUNT)]
    file = write([{"image": f"images/{n}.png", "label": label} for n, label in enumerate(labels)])
    folders = [saved("images", seed) for seed in (0, 1, 2)]
    recipe = dare.Recipe(base=folders[0], models=folders[1:], method="linear")
    scorer = open_scorer(examples.evaluator_of([file]), recipe)
    scorer.make(recipe)
    assert scorer.gather_norms(Path("norms.safetensors"), recipe)
    means = scorer._form.candidate.state_dict()[
        "resnet.embedder.embedder.normalization.running_mean"
    ]
    plain = make_model("images")
    dare.Candidates(recipe).write_into(plain)
    chosen = [int(name[5:]) - 1 for name in read_tasks([file])[0].ids(held_out=False)]
    batch = image_processor()(
        images=[images[n].convert("RGB") for n in chosen], return_tensors="pt"
    )
    dare.recompute_norms(plain, [dict(batch)])
    expected = plain.state_dict()["resnet.embedder.embedder.normalization.running_mean"]
    torch.testing.assert_close(means, expected)
    merged = recipe.changed(output=Path("merged"), gathered=Path("norms.safetensors"))
    dare.merge(dare.Request(merged).changed(verbose=False))
    assert Loaded(Path("merged"), file).items() == scorer.score().items


# ---------------------------------------------------------------- what cannot be


def test_ids_of_the_other_side_and_unknown_ones_are_refused(saved):
    loaded = Loaded(saved("writer"), write([{"text": f"text {n}"} for n in range(COUNT)]))
    for wrong in (*list(loaded.values(held_out=True))[:1], "other/1"):
        with pytest.raises(EvaluationError, match=wrong):
            loaded.items([wrong])


TEXT = [{"text": f"text {n}"} for n in range(COUNT)]
LABELLED = [{"text": f"text {n}", "label": "spam"} for n in range(COUNT)]


@pytest.mark.parametrize(
    ("kind", "rows", "said"),
    [
        ("classifier", TEXT, ("BertForSequenceClassification", "ForCausalLM")),
        ("encoder", TEXT, ("BertModel", "ForCausalLM", "head")),
        ("writer", LABELLED, ("LlamaForCausalLM", "ForSequenceClassification")),
        ("classifier", LABELLED, ("task", "'spam'", "no, yes, maybe", "numbers")),
    ],
)
def test_a_model_that_does_not_fit_the_file_is_refused(saved, kind, rows, said):
    with pytest.raises(InputError) as raised:
        Loaded(saved(kind), write(rows))
    assert [word for word in said if word not in str(raised.value)] == []


def test_files_for_different_kinds_of_models_and_missing_packages_are_refused(monkeypatch):
    with pytest.raises(RecipeError, match=r"texts needs a writer; labels needs a classifier"):
        examples.find(examples.evaluator_of([write(TEXT, "texts"), write(LABELLED, "labels")]))
    file = write(TEXT)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name == "torch" or None)
    with pytest.raises(RecipeError) as raised:
        examples.find(examples.evaluator_of([file]))
    assert "needs transformers: " in str(raised.value)
    assert install_command("data") in str(raised.value)


def test_transformers_builds_the_base_of_a_function(tmp_path):
    recipe = dare.Recipe(base=DEMO / "base", models=[DEMO / "add"], method="sum")

    def own(model):
        assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
        assert not model.training
        logits = model(torch.tensor([list(b"37+58=9")], device=model.device)).logits
        assert not logits.requires_grad
        return {"next": logits[0, -1].argmax()}

    scorer = open_scorer(own, recipe)
    scorer.make(recipe)
    assert scorer.score().scores == {"next": float(ord("5"))}
    for name, said in (
        ("Nonesuch", "'Nonesuch', which transformers does not have, so it can"),
        ("LlamaForCausalLM", "cannot load it: "),
    ):
        (tmp_path / "config.json").write_text(json.dumps({"architectures": [name]}))
        with pytest.raises(InputError, match=said):
            open_scorer(own, recipe.changed(base=tmp_path))


# ---------------------------------------------------------------- a whole search


def save_bigrams(name: str, nexts: dict[str, tuple[str, float]]) -> Path:
    """A model whose next token depends on the last one alone: the end, or that of a table."""
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 4}
    made = transformers.LlamaConfig(**{**SMALL, **sizes, "hidden_size": len(TOKENIZER) + 2})
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(made).requires_grad_(False)
    layer = model.model.layers[0]
    for parameter in (layer.self_attn.o_proj.weight, layer.mlp.down_proj.weight):
        parameter.zero_()  # only what is known of the last token is left
    model.model.embed_tokens.weight.copy_(torch.eye(*model.model.embed_tokens.weight.shape))
    model.lm_head.weight.zero_()[0] = 1.2
    for last, (token, weight) in nexts.items():
        ids = TOKENIZER(f"{last}{token}", add_special_tokens=False)["input_ids"]
        model.lm_head.weight[ids[1], ids[0]] = weight
    model.save_pretrained(name)
    TOKENIZER.save_pretrained(name)
    return Path(name)


MODELS = {
    "base": {},
    "math": {"=": ("4", 2.0)},
    "code": {">": ("b", 2.0)},
}


@pytest.fixture
def folder() -> None:
    for name, nexts in MODELS.items():
        save_bigrams(name, nexts)
    write([{"prompt": f"{n} =", "answer": 4 if n % 9 else "?"} for n in range(60)], "sums")
    write([{"prompt": f"{n} >", "answer": "B"} for n in range(60)], "words")


def search(*more: str) -> int:
    return main(["search", *more, "--minutes", "0.01"])


class Guess:
    """A scorer of answers that are not asked of a model: every third one is right."""

    def make(self, recipe):
        return ""

    def preview(self, items):
        return [dict.fromkeys(("example", "expected", "answered"), "B")]

    def score(self, items):
        right = {item: float(number % 3 == 0) for number, item in enumerate(items)}
        return Scored(group_means(right), right)


def test_without_a_time_limit_all_examples_are_used(tmp_path, capsys):
    file = write([{"prompt": f"{n} >", "answer": "B"} for n in range(90)], "words")
    merge = make_request(base="base", models=["math"], method="sum")
    request = make_search(merge, tmp_path / "s.db", over={"scale": (1, 2)}, data=[file])
    with closing(Study(tmp_path / "s.db", request.charter)) as study:
        _Search(request, study, SearchProgress(visible=True), 1, None)._preview(Guess())
        assert study.note("share") == 1
    err = capsys.readouterr().err
    assert "base      answers 7 of 20 right\n" in err
    assert "upper and lower case" in err.splitlines()[0]


@pytest.mark.parametrize("wrong", [{"guards": ["wrds:keep:0.9"]}, {"objective": {"wrds": 1.0}}])
def test_names_of_tasks_are_checked_before_a_model_is_read(tmp_path, wrong):
    file = write([{"prompt": f"{n} >", "answer": "B"} for n in range(90)], "words")
    merge = make_request(base="no such base", models=["math"], method="sum")
    with pytest.raises(RecipeError, match="wrds"):
        make_search(merge, tmp_path / "s.db", data=[file], **wrong)


def test_a_page_is_refused_before_the_search_if_its_packages_are_missing(folder, monkeypatch):
    monkeypatch.setattr(page, "NEEDED", ("no_such_package",))
    before = sorted(os.listdir())
    asked = ["base", "math", "--data", "sums.jsonl", "--html", "study.html"]
    assert search(*asked) == 1
    assert sorted(os.listdir()) == before


def test_a_folder_is_no_data_file(tmp_path):
    with pytest.raises(InputError, match="is a folder"):
        read_tasks([tmp_path])


def test_a_search_from_data_files_ends_with_a_merge_that_is_shown_to_be_good(folder, capsys):
    asked = ["base", "math", "code", "--data", "sums.jsonl", "words.jsonl", "-o", "merged"]
    assert search(*asked, "--json") == 0
    out, err = capsys.readouterr()
    assert re.search(r"\nsums: .*\n +example +'\d+ ='\n +expected +'.'\n +answered +''\n", err)
    chosen = len(read_tasks([Path("words.jsonl")])[0].ids(held_out=False)[:20])
    assert f"  base      answers 0 of {chosen} right\n" in err
    assert [line.count("case") for line in err.splitlines() if "to choose by" in line] == [1, 1]

    document = json.loads(out)
    result = read_result(Path("merged.study.db"))
    assert document["answer"] == str(result)
    by_name = {trial.name: trial.scored.scores for trial in result.data.baselines}
    sums, words = by_name["math alone"]["sums"], by_name["code alone"]["words"]
    assert (by_name["base"], words) == ({"sums": 0.0, "words": 0.0}, 1.0)
    assert 0.7 < sums < 1
    assert by_name["sum"] == {"sums": sums, "words": 1.0}
    assert by_name["average"] == {"sums": 0.0, "words": 0.0}  # which the end outweighs
    assert result.conclusion.best.scores == by_name["sum"]
    assert result.conclusion.holdout.objective.value > 0.8
    every, first, second = result.conclusion.tasks
    assert (every.name, first.alone, second.alone) == ("", "math", "code")
    held = [len(task.ids(True)) for task in read_tasks([Path("sums.jsonl"), Path("words.jsonl")])]
    assert [first.items, second.items] == held
    assert {trial.state for trial in result.data.trials} <= {State.DONE, State.STOPPED}
    best = tomllib.loads(Path("merged.toml").read_text())
    assert best["method"] == result.best.method
    card = Path("merged/README.md").read_text()
    rows = [line for line in card.splitlines() if line.startswith(("| sums ", "| words "))]
    assert len(rows) == 2
    assert all("| 0.0%" in row for row in rows)
    for scored, task in zip(
        huggingface_hub.ModelCard(card).data.eval_results, (first, second), strict=True
    ):
        assert (scored.dataset_name, scored.dataset_split) == (task.name, "test")
        assert (scored.metric_type, scored.metric_value) == ("accuracy", round(task.best.value, 6))
        low, high = round(task.best.low, 6), round(task.best.high, 6)
        assert scored.metric_args == {"items": task.items, "low": low, "high": high}
    merged = transformers.LlamaForCausalLM.from_pretrained("merged").eval()
    outputs = [greedy(merged, prompt, 3) for prompt in ("7 =", "7 >")]
    assert outputs == ["4", "b"]

    scored = len(result.data.all_trials)
    assert search(*asked, "--overwrite", "--quiet") == 0
    again = read_result(Path("merged.study.db"))
    assert (len(again.data.all_trials), again.conclusion) == (scored, result.conclusion)
    # Elsewhere, under the same name: the study has the scores of the card.
    assert search(*asked[:-1], "elsewhere/merged") == 0
    last = capsys.readouterr().out.split("\n")[-3:]
    assert ["merged.toml" in last[0], "elsewhere/merged" in last[1]] == [True, True]
    assert rows[0] in Path("elsewhere/merged/README.md").read_text()
    assert len(read_result(Path("merged.study.db")).data.all_trials) == scored
