"""Data files as an evaluator: `data:FILE,FILE`, and `held-out:FILE,FILE` for the part held out.

Models are run by transformers, in float32, on a GPU if there is one. A task's score is the mean of
its items: right or wrong, bits a byte, or for pairs the products of standardised ranks, whose mean
is Spearman's correlation among the pairs that are scored together.

Examples are sorted by length and run in batches, the same ones for the same ids. The last bits of
sums depend on the shape of a batch, so the result of an example near a tie may depend on the others
in its batch.
"""

from __future__ import annotations

import csv
import importlib.util
import io
import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dare.errors import EvaluationError, InputError, RecipeError, install_command
from dare.inputs.transformers_models import LANGUAGE_MODELS, load_live
from dare.studies.data_files import FORMS, Task, TaskExample, input_text, is_right, read_tasks
from dare.studies.evaluators.functions import Evaluator, Function

PREFIXES = {False: "data:", True: "held-out:"}  # by whether examples are held out of choosing
USAGE = f"{PREFIXES[False]}file,file"
IN_OWN_PROCESS = True
# The endings of the class names for each kind of model; any class can be an encoder.
CLASSES = {
    "writer": LANGUAGE_MODELS,
    "classifier": ("ForSequenceClassification",),
    "image classifier": ("ForImageClassification",),
    "encoder": (),
}
BATCH_SIZE = 32
MOST_TOKENS = 2_048  # of an input; fewer if the model takes fewer
MOST_LOGITS = 1 << 27  # of a batch, at 4 bytes each
PATTERN_TOKENS = 64  # to generate if no answer shows how many are needed
LINE_TOKENS = 64  # longer outputs may have several lines
INPUTS_OF_A_TASK = 100  # enough for statistics of a layer's inputs
INPUT_TOKENS = 512
SHOWN_CHARACTERS = 600
LINE_END = re.compile(r"\S.*\n")
REASONED_END = re.compile(r"####.*\S.*\n")


def recognises(evaluator: Evaluator) -> bool:
    """Tell if an evaluator has a prefix of data files."""
    return isinstance(evaluator, str) and evaluator.startswith(tuple(PREFIXES.values()))


def evaluator_of(files: Sequence[str | Path], *, held_out: bool = False) -> str:
    """Return the evaluator of files; names with a comma are quoted.

    >>> evaluator_of([Path("math.jsonl"), Path("a,b.csv")], held_out=True)
    'held-out:math.jsonl,"a,b.csv"'
    """
    text = io.StringIO()
    csv.writer(text, lineterminator="").writerow(map(str, files))
    return PREFIXES[held_out] + text.getvalue()


def files_of(evaluator: str) -> list[Path]:
    """Return the files that an evaluator names."""
    return [Path(name) for name in next(csv.reader([evaluator.partition(":")[2]]), []) if name]


def check(evaluator: str) -> None:
    """Refuse files that cannot be used, or that are for different kinds of models."""
    find(evaluator)


def find(evaluator: str, _time_limit: float | None = None, _threads: int | None = None) -> Function:
    """Read the files."""
    tasks = read_tasks(files_of(evaluator))
    kinds = {FORMS[task.form].model: task.name for task in tasks}
    if len(kinds) != 1:
        each = "; ".join(f"{name} needs a {kind}" for kind, name in kinds.items())
        how = f"they are for different kinds of models: {each}" if kinds else "names no file"
        raise RecipeError(f"{evaluator}: {how}")
    needed = {"torch": "torch", "transformers": "transformers"}
    needed |= {"PIL": "pillow"} if "image classifier" in kinds else {}
    if missing := [needed[name] for name in needed if importlib.util.find_spec(name) is None]:
        raise RecipeError(f"{evaluator}: needs {', '.join(missing)}: {install_command('data')}")
    side = Examples(tasks, held_out=evaluator.startswith(PREFIXES[True]))
    return Function(side.score, "model", True, side.load_model, side.preview, side.run_inputs)


class Examples:
    """The examples of tasks on one side, held out or not, which score one model after the other."""

    def __init__(self, tasks: Sequence[Task], *, held_out: bool) -> None:
        self._tasks = tasks
        sides = (example for task in tasks for example in task.examples)
        self._examples = {each.id: each for each in sides if each.is_held_out == held_out}
        self._runners: list[Runner] = []

    def load_model(self, base: Path) -> Any:
        """Return the base as a live model; its tokenizer is that of all candidates."""
        live = LiveModel(base, FORMS[self._tasks[0].form].model)
        for task in self._tasks:
            if live.model.config.is_encoder_decoder and task.form in ("choices", "texts"):
                only = "has an encoder and a decoder, which can only be asked for answers"
                raise RecipeError(f"{base}: {only}; leave {task.name} out")
        self._runners = [RUNNERS[task.form](live, task) for task in self._tasks]
        return live.model

    def score(self, _model: Any, items: Sequence[str] | None = None) -> dict[str, Any]:
        """Score the live model on all examples of this side, or on those with these ids."""
        values: dict[str, float] = {}
        for runner, examples in self._chosen(items):
            scores = runner.values(examples, runner.answer(examples))
            values |= zip((example.id for example in examples), scores, strict=True)
        return {"items": values}

    def preview(self, _model: Any, items: Sequence[str] | None = None) -> list[dict[str, str]]:
        """Return the first example of each task as the model sees it, and its answer."""
        previews = []
        for runner, (example, *_) in self._chosen(items):
            (answer,) = runner.answer([example])
            texts = runner.model_input(example.values), *runner.describe(example.values, answer)
            shown = [f"{t[:SHOWN_CHARACTERS]}…" if len(t) > SHOWN_CHARACTERS else t for t in texts]
            named = dict(zip(("example", "expected", "answered"), shown, strict=True))
            previews.append({"name": runner.task.name, "kind": runner.task.kind, **named})
        return previews

    def run_inputs(self, _model: Any, items: Sequence[str] | None = None) -> None:
        """Run the live model on about 100 inputs of each task, with their right answers.

        Batches have no padding, so that statistics of a layer's inputs are those of the texts.
        """
        import torch

        for runner, examples in self._chosen(items):
            with torch.no_grad():  # hooks may keep tensors, which inference mode would restrict
                runner.run_inputs(examples[:: -(-len(examples) // INPUTS_OF_A_TASK)])

    def _chosen(self, items: Sequence[str] | None) -> Iterator[tuple[Runner, list[TaskExample]]]:
        asked = list(self._examples if items is None else dict.fromkeys(items))
        if unknown := [item for item in asked if item not in self._examples]:
            raise EvaluationError(f"{unknown[0]!r}: is not the id of an example on this side")
        for runner in self._runners:
            name = runner.task.name
            if some := [self._examples[i] for i in asked if i.partition("/")[0] == name]:
                yield runner, some


class LiveModel:
    """A live model with its tokenizer or image processor, its limits and special tokens."""

    def __init__(self, base: Path, kind: str) -> None:
        import transformers

        if not base.is_dir():
            how = (
                "examples need folders that transformers loads; score files by a function (--eval)"
            )
            raise InputError(f"{base}: is a file; {how}")
        self.base, self.model = base, load_live(base, CLASSES[kind])
        self.config = self.model.config.get_text_config()
        is_image = kind == "image classifier"
        auto = transformers.AutoImageProcessor if is_image else transformers.AutoTokenizer
        try:
            self.reader = auto.from_pretrained(base, local_files_only=True)
        except Exception as error:  # its files can make a tokenizer's code raise anything
            reason = f"{type(error).__name__}: {error}".partition("\n")[0]
            raise InputError(f"{base}: has no {auto.__name__} that works: {reason}") from error
        if not is_image:
            self._read_limits(is_writer=kind == "writer")

    def _read_limits(self, *, is_writer: bool) -> None:
        from transformers import GenerationConfig

        generation, reader = getattr(self.model, "generation_config", None), self.reader
        ends = {reader.eos_token_id}
        for config in (self.config, generation):
            end = getattr(config, "eos_token_id", None)
            ends |= set(end if isinstance(end, list) else [end])
        usual = next((end for end in sorted(ends - {None})), 0)
        self.start = usual if reader.bos_token_id is None else reader.bos_token_id
        self.pad = usual if reader.pad_token_id is None else reader.pad_token_id
        self.model.config.pad_token_id = self.pad  # classifiers need it to find the last token
        places = getattr(self.config, "max_position_embeddings", None) or MOST_TOKENS
        self.most = min(places, reader.model_max_length, MOST_TOKENS)
        self.most_scored_tokens = max(1, MOST_LOGITS // self.config.vocab_size)  # tokens of a batch
        if is_writer:
            reader.truncation_side = "left"  # the end of a prompt is the question
            kept = ("bos_token_id", "decoder_start_token_id", "forced_bos_token_id")
            self.model.generation_config = GenerationConfig(  # without sampling or penalties
                **{name: getattr(generation, name, None) for name in kept},
                eos_token_id=sorted(ends - {None}) or None,
                pad_token_id=self.pad,
                do_sample=False,
            )

    def encode(self, texts: Sequence[str], most: int | None, *, special: bool = True) -> Any:
        """Return the tokens of texts, at most `most` of each."""
        if not texts:  # no tokenizer takes an empty list
            return []
        cut = {} if most is None else {"truncation": True, "max_length": most}
        texts = list(texts)
        return self.reader(texts, add_special_tokens=special, verbose=False, **cut)["input_ids"]

    def padded(self, rows: Sequence[Sequence[int]], *, left: bool = False) -> dict[str, Any]:
        """Return rows of tokens as a matrix, with its mask."""
        import torch

        width = max(map(len, rows))
        ids = torch.full((len(rows), width), self.pad)
        mask = torch.zeros_like(ids)
        for number, row in enumerate(rows):
            place = slice(width - len(row), width) if left else slice(len(row))
            ids[number, place], mask[number, place] = torch.tensor(row, dtype=ids.dtype), 1
        device = self.model.device
        return {"input_ids": ids.to(device), "attention_mask": mask.to(device)}

    def log_likelihoods(self, rows: Sequence[Sequence[int]]) -> list[list[float]]:
        """Return the log-likelihood of each token of each row but the first."""

        def run(some: list[int]) -> list[list[float]]:
            inputs = self.padded([rows[number] for number in some])
            found = _token_log_likelihoods(
                self.model(**inputs).logits, inputs["input_ids"]
            ).tolist()
            return [each[: len(rows[n]) - 1] for each, n in zip(found, some, strict=True)]

        return in_batches(list(map(len, rows)), run, self.most_scored_tokens)


def in_batches(
    lengths: Sequence[int], run: Callable[[list[int]], Sequence[Any]], most: int | None = None
) -> list[Any]:
    """Run batches of numbers, the longest first, of at most so many tokens; return all results."""
    import torch

    order = sorted(range(len(lengths)), key=lambda number: -lengths[number])
    results: list[Any] = [None] * len(lengths)
    while order:
        fitting = BATCH_SIZE if most is None else most // max(1, lengths[order[0]])
        count = max(1, min(BATCH_SIZE, fitting))
        some, order = order[:count], order[count:]
        with torch.inference_mode():
            for number, result in zip(some, run(some), strict=True):
                results[number] = result
    return results


def _token_log_likelihoods(logits: Any, ids: Any) -> Any:
    """Return the log-likelihoods of all tokens after the first, in float32."""
    scores = logits[:, :-1].float().log_softmax(-1)
    return scores.gather(-1, ids[:, 1:, None])[..., 0]


# ---------------------------------------------------------------- a runner for each form of task


class Runner:
    """Has a live model answer the examples of a task, and judges the answers."""

    def __init__(self, live: LiveModel, task: Task) -> None:
        self.live, self.task, self.model = live, task, live.model

    def answer(self, examples: list[TaskExample]) -> list[Any]:
        """Return the model's answers."""
        raise NotImplementedError

    def value(self, values: dict[str, Any], answer: Any) -> float:
        """Return the score of an answer to the values of an example."""
        raise NotImplementedError

    def values(self, examples: list[TaskExample], answers: list[Any]) -> list[float]:
        """Return the scores of answers."""
        pairs = zip(examples, answers, strict=True)
        return [float(self.value(example.values, answer)) for example, answer in pairs]

    def describe(self, values: dict[str, Any], answer: Any) -> tuple[str, str]:
        """Return the right answer and the model's as texts."""
        raise NotImplementedError

    def model_input(self, values: dict[str, Any]) -> str:
        """Return the text that the model is given."""
        return input_text(values)

    def whole_texts(self, values: dict[str, Any]) -> list[str]:
        """Return the texts that statistics of inputs are made from."""
        return [self.model_input(values)]

    def run_inputs(self, examples: list[TaskExample]) -> None:
        """Run the model on inputs, in batches of the same length."""
        import torch

        texts = [text for example in examples for text in self.whole_texts(example.values)]
        by_length: dict[int, list[list[int]]] = {}
        for row in self.live.encode(texts, min(INPUT_TOKENS, self.live.most)):
            by_length.setdefault(len(row), []).append(row)
        for _, rows in sorted(by_length.items()):
            for start in range(0, len(rows), BATCH_SIZE):
                ids = torch.tensor(rows[start : start + BATCH_SIZE], device=self.model.device)
                more = {"labels": ids} if self.model.config.is_encoder_decoder else {}
                self.model(input_ids=ids, attention_mask=torch.ones_like(ids), **more)


class PromptedRunner(Runner):
    """A task with prompts, in the chat template if the tokenizer has one."""

    def model_input(self, values: dict[str, Any]) -> str:
        prompt: str = values["prompt"]
        if self.live.reader.chat_template:
            said = [{"role": "user", "content": prompt}]
            how = {"tokenize": False, "add_generation_prompt": True}
            prompt = self.live.reader.apply_chat_template(said, **how)
        return prompt

    def continued(self, values: dict[str, Any], texts: Sequence[str]) -> list[str]:
        """Return the prompt with each text after it, and a space between if one belongs there."""
        prompt = self.model_input(values)
        is_word = prompt[-1:].isalnum() or prompt[-1:] in tuple(":.,;?!)]")
        return [f"{prompt}{' ' if is_word else ''}{text}" for text in texts]

    def encode(self, texts: Sequence[str], most: int | None) -> list[list[int]]:
        special = not self.live.reader.chat_template
        rows: list[list[int]] = self.live.encode(texts, most, special=special)
        return rows


class GenerationRunner(PromptedRunner):
    """Greedy generation."""

    def __init__(self, live: LiveModel, task: Task) -> None:
        super().__init__(live, task)
        texts = [text for example in task.examples for text in example.values["written"]]
        longest = max(map(len, live.encode(texts, None, special=False)), default=None)
        self._limit = PATTERN_TOKENS if longest is None else longest * 3 // 2 + 8
        self._end: re.Pattern[str] | None = None
        if any(example.values["is_reasoned"] for example in task.examples):
            self._end = REASONED_END
        elif texts and self._limit <= LINE_TOKENS and not any("\n" in text for text in texts):
            self._end = LINE_END

    def answer(self, examples: list[TaskExample]) -> list[Any]:
        import torch

        prompts = [self.model_input(example.values) for example in examples]
        rows = self.encode(prompts, max(1, self.live.most - self._limit))
        is_apart = self.live.config.is_encoder_decoder  # the prompt is not part of the output

        def decoded(ids: Any, width: int) -> list[str]:
            found: list[str] = self.live.reader.batch_decode(
                ids[:, 0 if is_apart else width :], skip_special_tokens=True
            )
            return found

        def run(some: list[int]) -> list[str]:
            inputs = self.live.padded([rows[number] for number in some], left=True)
            width = inputs["input_ids"].shape[1]

            def is_done(ids: Any, _scores: Any, **_more: Any) -> Any:
                ended = [bool(self._end and self._end.search(t)) for t in decoded(ids, width)]
                return torch.tensor(ended, device=ids.device)

            more = {"stopping_criteria": [is_done]} if self._end else {}
            made = self.model.generate(**inputs, max_new_tokens=self._limit, **more)
            return decoded(made, width)

        outputs: list[str] = in_batches(list(map(len, rows)), run)
        if self._end is LINE_END:
            return [output.strip().partition("\n")[0] for output in outputs]
        return outputs

    def value(self, values: dict[str, Any], answer: str) -> float:
        return is_right(values, answer)

    def describe(self, values: dict[str, Any], answer: str) -> tuple[str, str]:
        pattern = values.get("pattern")
        return pattern.pattern if pattern else " or ".join(values["answers"]), answer

    def whole_texts(self, values: dict[str, Any]) -> list[str]:
        return self.continued(values, values["written"][:1] or [""])


class MultipleChoiceRunner(PromptedRunner):
    """The choice with the highest log-likelihood per character."""

    def answer(self, examples: list[TaskExample]) -> list[Any]:
        rows, counts = [], []  # tokens of all choices, and how many come after the prompt
        for example in examples:
            texts = self.continued(example.values, example.values["choices"])
            prompt, *encoded = self.encode([self.model_input(example.values), *texts], None)
            shared = min(_count_shared(prompt, row) for row in encoded)
            counts += [len(row) - shared for row in encoded]
            rows += [row if shared else [self.live.start, *row] for row in encoded]
        known = self.live.log_likelihoods([row[-self.live.most :] for row in rows])
        scores = iter(sum(each[-count:]) for each, count in zip(known, counts, strict=True))
        answers = []
        for choices in (example.values["choices"] for example in examples):
            each = [next(scores) / len(choice) for choice in choices]
            answers.append(each.index(max(each)))
        return answers

    def value(self, values: dict[str, Any], answer: int) -> float:
        return float(values["answer"] == answer)

    def describe(self, values: dict[str, Any], answer: int) -> tuple[str, str]:
        return values["choices"][values["answer"]], values["choices"][answer]

    def whole_texts(self, values: dict[str, Any]) -> list[str]:
        return self.continued(values, [values["choices"][values["answer"]]])


def _count_shared(prompt: list[int], row: list[int]) -> int:
    """Return the number of tokens that a row shares with its prompt; at least one is not shared."""
    most = min(len(prompt), len(row) - 1)
    return next((n for n in range(most) if prompt[n] != row[n]), most)


class BitsPerByteRunner(Runner):
    """Bits that the model needs for a byte of a text, in windows of the model's length."""

    def answer(self, examples: list[TaskExample]) -> list[Any]:
        step, windows, owners = self.live.most - 1, [], []
        texts = [example.values["text"] for example in examples]
        for number, row in enumerate(self.live.encode(texts, None)):
            whole = [self.live.start] * (row[:1] != [self.live.start]) + row
            for start in range(0, len(whole) - 1, step):
                windows.append(whole[start : start + step + 1])
                owners.append(number)
        bits = [0.0] * len(texts)
        for owner, of_tokens in zip(owners, self.live.log_likelihoods(windows), strict=True):
            bits[owner] -= sum(of_tokens) / float(np.log(2))
        return [count / len(text.encode()) for count, text in zip(bits, texts, strict=True)]

    def value(self, _values: dict[str, Any], answer: float) -> float:
        return answer

    def describe(self, _values: dict[str, Any], answer: float) -> tuple[str, str]:
        return "", f"{answer:.3f} bits a byte"


class ClassificationRunner(Runner):
    """The label of the highest output."""

    def __init__(self, live: LiveModel, task: Task) -> None:
        super().__init__(live, task)
        names = {str(name).casefold(): int(number) for number, name in live.config.id2label.items()}
        labels = sorted({example.values["label"] for example in task.examples})
        if all(label.casefold() in names for label in labels):
            self._numbers = {label: names[label.casefold()] for label in labels}
        elif all(label.isdecimal() and int(label) < len(names) for label in labels):
            self._numbers = {label: int(label) for label in labels}
        else:
            known = ", ".join(names)
            unknown = next(label for label in labels if label.casefold() not in names)
            how = f"{live.base} has {known}; write these names, or their numbers from 0 on"
            raise InputError(f"{task.name}: the label {unknown!r} is not one of the model's: {how}")

    def inputs(self, examples: list[TaskExample]) -> tuple[list[int], Callable[[list[int]], Any]]:
        rows = self.live.encode([e.values["text"] for e in examples], self.live.most)
        return list(map(len, rows)), lambda some: self.live.padded([rows[n] for n in some])

    def answer(self, examples: list[TaskExample]) -> list[Any]:
        lengths, inputs = self.inputs(examples)

        def run(some: list[int]) -> list[int]:
            found: list[int] = self.model(**inputs(some)).logits.argmax(-1).tolist()
            return found

        return in_batches(lengths, run)

    def value(self, values: dict[str, Any], answer: int) -> float:
        return self._numbers[values["label"]] == answer

    def describe(self, values: dict[str, Any], answer: int) -> tuple[str, str]:
        return values["label"], str(self.live.config.id2label[answer])


class ImageClassificationRunner(ClassificationRunner):
    """The same for images."""

    def inputs(self, examples: list[TaskExample]) -> tuple[list[int], Callable[[list[int]], Any]]:
        from PIL import Image

        def read(some: list[int]) -> Any:
            given = [examples[number].values["image"] for number in some]
            files = [io.BytesIO(each) if isinstance(each, bytes) else each for each in given]
            images = [Image.open(file).convert("RGB") for file in files]
            return self.live.reader(images=images, return_tensors="pt").to(self.model.device)

        return [1] * len(examples), read

    def run_inputs(self, examples: list[TaskExample]) -> None:
        _, inputs = self.inputs(examples)
        for start in range(0, len(examples), BATCH_SIZE):
            self.model(**inputs(list(range(len(examples)))[start : start + BATCH_SIZE]))


class SimilarityRunner(Runner):
    """The cosine of two texts, by the pooling of sentence-transformers, or means of tokens."""

    def __init__(self, live: LiveModel, task: Task) -> None:
        super().__init__(live, task)
        file = live.base / "1_Pooling" / "config.json"
        found = json.loads(file.read_text("utf-8")) if file.is_file() else {}
        modes = [name for name, is_on in found.items() if is_on is True]
        said = " ".join([*modes, str(found.get("pooling_mode", ""))])
        self._way = next((way for way in ("cls", "last", "max") if way in said), "mean")

    def answer(self, examples: list[TaskExample]) -> list[Any]:
        import torch

        texts = list(dict.fromkeys(e.values[side] for e in examples for side in "ab"))
        rows = self.live.encode(texts, self.live.most)

        def run(some: list[int]) -> Any:
            inputs = self.live.padded([rows[number] for number in some])
            states = self.model.base_model(**inputs).last_hidden_state.float()
            mask = inputs["attention_mask"][..., None]
            if self._way == "cls":
                return states[:, 0]
            if self._way == "last":
                return states[torch.arange(len(some)), mask[..., 0].sum(1) - 1]
            if self._way == "max":
                return states.masked_fill(mask == 0, -torch.inf).amax(1)
            return (states * mask).sum(1) / mask.sum(1)

        vectors = dict(zip(texts, in_batches(list(map(len, rows)), run), strict=True))
        cosine = torch.nn.functional.cosine_similarity
        return [
            float(cosine(vectors[e.values["a"]], vectors[e.values["b"]], dim=0)) for e in examples
        ]

    def values(self, examples: list[TaskExample], answers: list[Any]) -> list[float]:
        scores = [example.values["score"] for example in examples]
        found: list[float] = (_standard_ranks(answers) * _standard_ranks(scores)).tolist()
        return found

    def describe(self, values: dict[str, Any], answer: float) -> tuple[str, str]:
        return f"{values['score']:g}", f"cosine {answer:.3f}"

    def whole_texts(self, values: dict[str, Any]) -> list[str]:
        return [values["a"], values["b"]]


def _standard_ranks(values: Sequence[float]) -> Any:
    """Return ranks with mean 0 and variance 1, or 0 if all are equal; equal values share one."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[inverse]
    return (ranks - ranks.mean()) / (ranks.std() or 1.0)


RUNNERS: dict[str, type[Runner]] = {
    "choices": MultipleChoiceRunner,
    "patterns": GenerationRunner,
    "answers": GenerationRunner,
    "labels": ClassificationRunner,
    "pairs": SimilarityRunner,
    "images": ImageClassificationRunner,
    "texts": BitsPerByteRunner,
}
