"""The command, called in this process, and the models it is called with."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from dare.cli import main
from dare.recipe.recipe import Request
from helpers import Arrays

BASE = ("--base", "base.safetensors")
TWO = (*BASE, "--merge", "math.safetensors", "code.safetensors")
TO = ("--output", "merged.safetensors")


@dataclass(frozen=True)
class Outcome:
    """What a command left behind."""

    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The one document on stdout."""
        return json.loads(self.out)


def dare(*arguments: object) -> Outcome:
    """Call the command in this process, as a shell would."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main([str(argument) for argument in arguments])
    return Outcome(status, out.getvalue(), err.getvalue())


def dare_succeeds(*arguments: object) -> Outcome:
    """Call the command, which must work."""
    outcome = dare(*arguments)
    assert outcome.status == 0, outcome.err
    return outcome


def recipe_of(output: Path | str) -> Mapping[str, Any]:
    """The recipe in the manifest of an output."""
    document = json.loads(Path(f"{output}.manifest.json").read_bytes())["recipe"]
    assert isinstance(document, dict)
    return document


def base_arrays() -> dict[str, np.ndarray]:
    generator = np.random.default_rng(0)
    return {
        "model.embed_tokens.weight": 0.02 * generator.standard_normal((40, 24), np.float32),
        "model.layers.0.mlp.weight": 0.02 * generator.standard_normal((48, 48), np.float32),
        "model.layers.0.norm.weight": np.ones(48, np.float32),
        "model.position_ids": np.arange(8, dtype=np.int64),
    }


def tuned_arrays(base: Arrays, seed: int, change: float = 0.0004) -> dict[str, np.ndarray]:
    """A fine-tune: every weight is moved a little, and less than the usual threshold."""
    generator = np.random.default_rng(seed)
    tuned = dict(base)
    for name, values in base.items():
        if values.dtype == np.float32:
            moves = generator.standard_normal(values.shape, np.float32).clip(-4, 4)
            tuned[name] = values + np.float32(change) * moves
    return tuned


def contents(folder: Path) -> dict[str, str]:
    """Every path under a folder, and what its bytes hash to."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        if path.is_file()
        else "-"
        for path in sorted(folder.rglob("*"))
    }


class _AskedFor(BaseException):
    """Carries a recipe past everything that would do something with it."""


def asked_recipe(*arguments: object) -> Request:
    """The request that a command line asks for; nothing is read but the recipe file."""

    def stop(request: Request, **_how: object) -> None:
        raise _AskedFor(request)

    with mock.patch("dare.api.plan", stop), pytest.raises(_AskedFor) as caught:
        dare(*arguments)
    request = caught.value.args[0]
    assert isinstance(request, Request)
    return request
