"""Digests of merges that every machine must reproduce, for every stage: tests/golden.toml.

Two sets of models: those of the demonstration (BF16), and made-up ones with odd shapes, other
storage types and a tensor of more than a chunk. Matrix stages agree within a tolerance: another
machine may have another digest, but the change has the recorded size, and the recorded projection
on a random direction. After a change that is meant to change bytes:

    python tests/test_golden.py > tests/golden.toml
"""

from __future__ import annotations

import json
import tomllib
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import dare
from dare.demo.merges import BASE, TUNED
from dare.stages import STAGES, parse_method
from dare.stages.registry import combine_of
from helpers import method_of

GOLDEN = Path(__file__).with_name("golden.toml")
COMBINED = {"tsv", "iso", "knots", "swudi", "dc_merge"}
MATRIX_STAGES = {"star", "fourier", *COMBINED, "svc"}

CASES: dict[str, dict[str, Any]] = {
    **{method_of(name): {} for name, stage in STAGES.items() if not stage.takes_grams},
    "dare+sum": {},
    "dare+ties": {},
    "dare+slerp": {},
    "trim+ties": {},
    "dare+trim+ties": {},
    "breadcrumbs+ties": {},
    "della+ties": {},
    "dare+linear l1": {"stages": {"dare": {"rescale": "l1"}}},
    "dare+linear unscaled": {"stages": {"dare": {"rescale": False}}},
    "dare+linear over layers": {"stages": {"dare": {"drop_rate": [0.9, 0.5]}}},
    "dare+linear rules": {
        "tensors": [{"match": "*mlp*", "drop_rate": 0.5}, {"contains": "norm", "weight": 0.25}],
        "scale": 0.75,
        "seed": 7,
    },
    "dare+linear in F16": {"dtype": "F16"},
    "darex+linear q": {"stages": {"darex": {"drop_rate": 0.95, "q": 0.1}}},
    "della+linear l1": {"stages": {"della": {"rescale": "l1"}}},
    "nm+linear random": {"stages": {"nm": {"choose": "random"}}},
    "nm+linear 3:7": {"stages": {"nm": {"n": 3, "m": 7}}},
    "breadcrumbs+linear rows": {"stages": {"breadcrumbs": {"per": "row"}}},
    "trim+linear of the model": {"stages": {"trim": {"scope": "model"}}},
    "ties trimmed": {"stages": {"ties": {"keep_ratio": 0.3}}},
    "ties by count": {"stages": {"ties": {"vote": "count", "divide_by": "count"}}},
    "slerp of deltas": {"stages": {"slerp": {"on": "deltas"}}},
    "nuslerp rows": {"stages": {"nuslerp": {"each": "row"}}},
    "model_stock rows": {"stages": {"model_stock": {"each": "row"}}},
    "sce selected": {"stages": {"sce": {"select_ratio": 0.3}}},
    "linear of weights": {"stages": {"linear": {"on": "weights"}}, "weights": [0.5, -0.25, 1]},
    "iso cts": {"stages": {"iso": {"variant": "cts"}}},
}
"""What follows the method in a case's name only tells cases apart."""

SHAPES = {
    "embed.weight": ((12801, 41), np.float32),  # a chunk and a bit, its border inside of a row
    "layers.0.mlp.weight": ((33, 17), np.float16),
    "layers.0.norm.weight": ((101,), np.float64),
    "layers.1.mlp.weight": ((3, 5, 7), ml_dtypes.bfloat16),
    "layers.1.norm.weight": ((1,), ml_dtypes.float8_e4m3fn),
    "layers.1.none.weight": ((0, 4), np.float32),
    "scale": ((), ml_dtypes.float8_e5m2),
}


@cache
def demonstration() -> list[dict[str, np.ndarray]]:
    return [read_bf16(folder / "model.safetensors") for folder in (BASE, *TUNED.values())]


def read_bf16(path: Path) -> dict[str, np.ndarray]:
    content = path.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    header.pop("__metadata__", None)
    return {
        name: np.frombuffer(content[start:], np.uint8)[slice(*entry["data_offsets"])]
        .view(ml_dtypes.bfloat16)
        .reshape(entry["shape"])
        for name, entry in header.items()
    }


@cache
def made_up() -> list[dict[str, np.ndarray]]:
    """A base and three models, from bits that are the same on every machine."""
    models: list[dict[str, np.ndarray]] = []
    for number in range(4):
        tensors = {}
        for place, (name, (shape, kind)) in enumerate(SHAPES.items()):
            raw = np.random.Philox(key=16 * number + place).random_raw(int(np.prod(shape)))
            values = (raw >> np.uint64(48)).astype(np.float64) * 2.0**-15 - 1.0
            if number:
                values = models[0][name].reshape(-1).astype(np.float64) + values * 2.0**-6
            tensors[name] = values.astype(kind).reshape(shape)
        models.append(tensors)
    return models


SETS = {"demonstration": demonstration, "made_up": made_up}


def is_matrix_method(case: str) -> bool:
    return not MATRIX_STAGES.isdisjoint(case.partition(" ")[0].split("+"))


def merged(which: str, case: str) -> tuple[dict[str, np.ndarray], dare.Report]:
    method, settings = case.partition(" ")[0], dict(CASES[case])
    base, *models = SETS[which]()
    combine = combine_of(parse_method(method))
    tensors = [
        dare.TensorRule(
            **{key: rule.pop(key) for key in ("match", "contains", "weight") if key in rule},
            settings=rule,
        )
        for rule in map(dict, settings.pop("tensors", []))
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dare.DareWarning)
        return dare.merge_arrays(
            base,
            models[: combine.models],
            method=method,
            tensors=tensors,
            verbose=False,
            **settings,
        )


def size_and_projection(which: str, arrays: dict[str, np.ndarray]) -> list[float]:
    """The size of the change that a merge makes, and its projection on a random direction."""
    base = SETS[which]()[0]
    flat = [np.ravel(arrays[n].astype(np.float64) - base[n].astype(np.float64)) for n in base]
    change = np.concatenate(flat)
    signs = 2.0 * (np.random.Philox(key=1).random_raw(change.size) & np.uint64(1)) - 1
    return [float(np.linalg.norm(change)), float(signs @ change)]


def golden() -> dict[str, dict[str, Any]]:
    return tomllib.loads(GOLDEN.read_text())


@pytest.mark.parametrize("which", SETS)
@pytest.mark.parametrize("case", CASES)
def test_the_bytes_are_those_of_every_machine(which, case):
    arrays, report = merged(which, case)
    if is_matrix_method(case):
        expected = golden()["changes"][which][case]
        found = size_and_projection(which, arrays)
        assert found == pytest.approx(expected, rel=1e-3, abs=1e-3 * expected[0])
    else:
        assert report.digests.output == golden()[which][case]


@pytest.mark.parametrize("which", SETS)
def test_every_case_is_recorded_and_no_other(which):
    assert list(golden()[which]) == list(CASES)
    assert list(golden()["changes"][which]) == [case for case in CASES if is_matrix_method(case)]


def record() -> dict[str, Any]:
    """Everything that golden.toml holds, as this machine makes it."""
    made = {which: {case: merged(which, case) for case in CASES} for which in SETS}
    digests = {
        w: {c: report.digests.output for c, (_, report) in m.items()} for w, m in made.items()
    }
    changes = {
        which: {c: size_and_projection(which, m[c][0]) for c in CASES if is_matrix_method(c)}
        for which, m in made.items()
    }
    return {**digests, "changes": changes}


if __name__ == "__main__":
    import tomli_w

    print(tomli_w.dumps(record()), end="")
