"""Tasks of lm-evaluation-harness as an evaluator: `lm_eval:TASK,TASK@FOLDER`.

A task's score is the first of `METRICS` that it has, and its items are its documents, as
`task/number`. Prompts with randomly drawn examples depend on which documents are scored, so if a
task has such prompts, all documents must be scored together.
"""

from __future__ import annotations

import importlib.util
import random
import sys
from collections.abc import Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Any

from dare.errors import EvaluationError, RecipeError, did_you_mean, install_command
from dare.studies.evaluators.functions import Evaluator, Function

PREFIX = "lm_eval:"
USAGE = f"{PREFIX}task@folder"
IN_OWN_PROCESS = True
# By preference: a task's score is the first of these that it has, else its first metric.
METRICS = ("acc_norm", "acc", "exact_match", "f1", "em", "bleu", "rouge1", "mcc")
BATCH_SIZE = 8  # always the same, as sums over a batch depend on it in the last bits
SEED = 1234  # for all random choices of the harness


def recognises(evaluator: Evaluator) -> bool:
    """Tell if an evaluator has the prefix of tasks of the harness."""
    return isinstance(evaluator, str) and evaluator.startswith(PREFIX)


def find(evaluator: str, _time_limit: float | None, _threads: int | None) -> Function:
    """Load the tasks."""
    tasks = Harness(evaluator)
    return Function(tasks.score, "model", tasks.takes_items, tasks.load_model)


def split_tasks(text: str) -> tuple[list[str], Path | None]:
    """Return the tasks and the folder of a text.

    >>> split_tasks("lm_eval:add,sort@tasks")
    (['add', 'sort'], PosixPath('tasks'))
    """
    names, _, folder = text.removeprefix(PREFIX).partition("@")
    tasks = [name.strip() for name in names.split(",") if name.strip()]
    return tasks, Path(folder) if folder else None


def check(text: str) -> None:
    """Refuse a text that names no tasks, or a missing folder."""
    tasks, folder = split_tasks(text)
    if not tasks:
        raise RecipeError(f"{text}: names no task; write lm_eval:task,task@folder")
    if folder is not None and not folder.is_dir():
        raise RecipeError(f"{text}: there is no folder {str(folder)!r} with YAML files of tasks")
    if importlib.util.find_spec("lm_eval") is None:
        raise RecipeError(f"{text}: needs lm-evaluation-harness: {install_command('eval')}")


class Harness:
    """Tasks that are loaded once, and score one model after the other."""

    def __init__(self, text: str) -> None:
        check(text)
        self._tasks = _load(*split_tasks(text))
        self._metrics = {name: _metric_of(name, task) for name, task in self._tasks.items()}
        self._base = ""
        self._wrapped: tuple[Any, Any] = (None, None)
        self.takes_items = True
        for task in self._tasks.values():
            if task.get_config("num_fewshot") is None:
                task.set_config(key="num_fewshot", value=0)
            in_order = type(getattr(task, "sampler", None)).__name__ == "FirstNSampler"
            if task.get_config("num_fewshot") and not in_order:
                self.takes_items = False  # examples are drawn for one document after the other

    def load_model(self, base: Path) -> Any:
        """Return the base as a live model; its tokenizer is that of all candidates."""
        from dare.inputs.transformers_models import load_live

        self._base = str(base)
        return load_live(base)

    def score(self, model: Any, items: Sequence[str] | None = None) -> dict[str, Any]:
        """Score a live model on all documents, or on those with these ids."""
        import numpy as np
        from lm_eval.evaluator import evaluate

        chosen = None if items is None else _by_task(items)
        tasks = {n: t for n, t in self._tasks.items() if chosen is None or n in chosen}
        # As in `lm_eval.simple_evaluate`, which also takes a second to describe the machine.
        random.seed(SEED)
        np.random.seed(SEED)
        sys.modules["torch"].manual_seed(SEED)
        for task in tasks.values():
            task.set_fewshot_seed(seed=SEED)
        results = evaluate(
            lm=self._wrap(model),
            task_dict={"tasks": tasks, "groups": {}},
            samples=chosen,
            bootstrap_iters=0,
            log_samples=True,
        )
        scores: dict[str, Any] = {}
        values: dict[str, float] = {}
        for name in tasks:
            metric = self._metrics[name]
            samples = results["samples"][name]
            filtered = samples[0]["filter"]
            scores[name] = results["results"][name][f"{metric},{filtered}"]
            values |= {
                f"{name}/{sample['doc_id']}": float(sample[metric])
                for sample in samples
                if sample["filter"] == filtered and isinstance(sample[metric], Real)
            }
        return {**scores, "items": values}

    def _wrap(self, model: Any) -> Any:
        from lm_eval.models.huggingface import HFLM

        known, wrapped = self._wrapped
        if known is not model:
            wrapped = HFLM(pretrained=model, tokenizer=self._base, batch_size=BATCH_SIZE)
            tokenizer, end = wrapped.tokenizer, model.config.eos_token_id
            # Without an end of text, the harness would pad with a token that has no embedding.
            if tokenizer.eos_token_id is None and end is not None:
                end = end[0] if isinstance(end, list) else end
                tokenizer.eos_token = tokenizer.pad_token = tokenizer.convert_ids_to_tokens(end)
            self._wrapped = model, wrapped
        return wrapped


def _load(names: Sequence[str], folder: Path | None) -> dict[str, Any]:
    """Load tasks by name, from a folder or, where it lacks one, from those of the harness."""
    from lm_eval.tasks import TaskManager

    own = {} if folder is None else {"include_path": str(folder)}
    manager = TaskManager(include_defaults=False, **own)
    if not set(names) <= set(manager.all_tasks):
        manager = TaskManager(**own)  # which reads thousands of files
    known = manager.all_tasks
    for name in names:
        if name not in known:
            where = f"neither in {folder} nor in the harness" if folder else "in the harness"
            raise RecipeError(f"lm_eval: no task {name!r}, {where}{did_you_mean(name, known)}")
    loaded: dict[str, Any] = manager.load(list(names))["tasks"]
    return loaded


def _metric_of(name: str, task: Any) -> str:
    better: Mapping[str, bool] = task.higher_is_better()
    upward = [metric for metric, is_better in better.items() if is_better]
    if not upward:
        names = ", ".join(better)
        raise RecipeError(
            f"lm_eval: {name!r} measures {names}, where less is better; write a function"
        )
    return next((metric for metric in METRICS if metric in upward), upward[0])


def _by_task(items: Sequence[str]) -> dict[str, list[int]]:
    """Return numbers of documents by task, in order: the harness counts them off that way."""
    chosen: dict[str, set[int]] = {}
    for item in items:
        task, _, number = item.rpartition("/")
        if not task or not number.isdecimal():
            raise EvaluationError(f"{item!r}: is not an item of the harness; write task/number")
        chosen.setdefault(task, set()).add(int(number))
    return {task: sorted(numbers) for task, numbers in chosen.items()}
