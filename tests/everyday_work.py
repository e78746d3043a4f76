"""What people do with files, once each: merges, resumed, refused, replaced and verified; a search.

The digests and figures that come of it must not depend on the system.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

import dare
from dare.errors import EvaluationError, OutputError
from dare.output.output import Output
from dare.recipe.options import RunOptions
from dare.studies.evaluators import open_scorer
from dare.tensors.system import quoted
from helpers import listing, save, sha256

ELEMENTS = 530_000  # two chunks
SCALES = (0.5, 1.0)
SCORE = """
def score(tensors):
    print("scoring")
    return {"size": float(abs(tensors["w0"]).mean())}

def fail(tensors):
    print("about to fail")
    raise SystemExit("failed")
"""
SLEEP = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
COMMAND = """
import json, sys
from pathlib import Path
given = Path(sys.argv[1])
weights = given / "model.safetensors" if given.is_dir() else given
with weights.open("rb") as file:
    length = int.from_bytes(file.read(8), "little")
print(json.dumps({"sizes": weights.stat().st_size - 8 - length}))
"""


def make_models(folder: Path) -> None:
    """Save a base and two models, with the programs that score them."""
    chance = np.random.default_rng(0)
    base = {f"w{n}": chance.standard_normal(ELEMENTS, np.float32) for n in range(2)}
    save(folder / "base" / "model.safetensors", base)
    (folder / "base" / "config.json").write_text("{}")
    for name in ("math", "code"):
        changed = {k: w + chance.normal(0, 0.01, w.size).astype("f4") for k, w in base.items()}
        save(folder / f"{name}.safetensors", changed)
    (folder / "score.py").write_text(SCORE)
    (folder / "command.py").write_text(COMMAND)


def recipe_in(folder: Path) -> dict[str, Any]:
    """Return the part of the recipe that all have in common."""
    models = [folder / "math.safetensors", folder / "code.safetensors"]
    return {"base": folder / "base", "models": models, "verbose": False, "threads": 1}


def merge_and_analyze(folder: Path) -> dict[str, Any]:
    """Merge and analyze in a folder with models; return what came of it."""
    recipe = {**recipe_in(folder), "drop_rate": 0.5, "seed": 1, "backend": "reference"}
    outputs = [folder / "out", folder / "out.safetensors"]
    found: dict[str, Any] = {o.name: _merge_in_all_ways(recipe, o) for o in outputs}
    found["left"] = listing(folder)
    found["analysis"] = json.loads(dare.analyze(**recipe_in(folder)).to_json())["models"]
    return found


def search_by_two(folder: Path) -> dict[str, float | None]:
    """Search with two workers; return the objective of each scale."""
    result = dare.search(
        dare.Request.of(**recipe_in(folder), method="sum", backend="reference"),
        over={"scale": SCALES},
        evaluate=f"{folder / 'score.py'}:score",
        study=folder / "study.db",
        jobs=2,
        verbose=False,
    )
    return {str(trial.settings["scale"]): trial.objective for trial in result.data.trials}


def _merge_in_all_ways(recipe: dict[str, Any], output: Path) -> list[Any]:
    asked = {**recipe, "output": output}
    with _calling_at(2, _interrupt), suppress(KeyboardInterrupt):
        dare.merge(**asked)
    refused = []

    def merge_again() -> None:
        try:
            dare.merge(**asked)
        except OutputError as error:
            refused.append("another process is writing" in str(error))

    with _calling_at(1, merge_again):
        report = dare.merge(**asked)
    weights = output / "model.safetensors" if output.is_dir() else output
    found = [report.resumed_chunks, refused, dare.verify(output).ok, sha256(weights)]
    dare.merge(**{**asked, "scale": 0.5}, overwrite=True)
    return [*found, dare.verify(output).ok, sha256(weights)]


@contextmanager
def _calling_at(number: int, call: Any) -> Iterator[None]:
    """Call something when so many batches of chunks are in the journal."""
    record, left = Output.record, [None] * number

    def recorded(self: Output, records: Any) -> None:
        record(self, records)
        if left:
            left.pop()
            if not left:
                call()

    with patch.object(Output, "record", recorded):
        yield


def _interrupt() -> None:
    raise KeyboardInterrupt


def score_in_all_ways(folder: Path) -> list[Any]:
    """Score a model by a function that fails, a command, and one that never ends."""
    recipe = dare.Recipe(base=folder / "base", models=[folder / "math.safetensors"])
    command = " ".join(map(quoted, [sys.executable, str(folder / "command.py")]))
    sleeper = " ".join(map(quoted, [sys.executable, "-c", SLEEP]))
    options = RunOptions(backend="reference", threads=1)
    found: list[Any] = []
    for evaluator, limit in (
        (f"{folder / 'score.py'}:fail", None),
        (command + " {model}", None),
        (sleeper + " {model}", 0.5),
    ):
        scorer = open_scorer(evaluator, recipe, time_limit=limit, work=folder, options=options)
        try:
            scorer.make(recipe)
            scored = scorer.score()
            found.append(scored.scores)
        except EvaluationError as error:
            found.append(error.output.splitlines()[:1])
        finally:
            scorer.close()
    return found


if __name__ == "__main__":
    place = Path(sys.argv[1])
    print(json.dumps([merge_and_analyze(place), search_by_two(place), score_in_all_ways(place)]))
