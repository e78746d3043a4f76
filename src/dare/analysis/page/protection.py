"""Rules of a recipe for the layers that dropping hurts more than the rest."""

from __future__ import annotations

import glob
import os.path
from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any

from dare.analysis.judge.judgement import Protection
from dare.analysis.results import Analysis


def protecting_rules(analysis: Analysis, protect: Iterable[Protection]) -> list[dict[str, Any]]:
    """A table of `[[tensors]]` for each part that is to be dropped less."""
    tensors = {tensor.name: tensor for model in analysis.models for tensor in model.tensors}
    rules = []
    for part in protect:
        names = [
            tensor.name
            for tensor in tensors.values()
            if (tensor.layer, str(tensor.kind)) == (part.layer, part.kind)
        ]
        if names:
            rules.append({"match": _patterns(names, tensors), "drop_rate": part.drop_rate})
    return rules


def _patterns(names: list[str], all_names: Iterable[str]) -> list[str]:
    """One pattern for the names if it matches no others; else each name.

    >>> _patterns(["layers.1.mlp.up", "layers.1.mlp.down"], ["layers.1.mlp.up", "layers.1.norm"])
    ['layers.1.mlp.*']
    """
    stem = os.path.commonprefix(names).rpartition(".")[0]
    pattern = f"{glob.escape(stem)}.*"
    if len(names) > 1 and stem:
        matched = {name for name in all_names if fnmatchcase(name, pattern)}
        if matched <= set(names):
            return [pattern]
    return [glob.escape(name) for name in names]
