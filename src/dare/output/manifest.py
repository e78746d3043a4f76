"""What was done, written into the output and beside it, and checked again by `verify`.

The header of every output file holds a short manifest: recipe, mask version, digests of inputs
and output. It names no path, no time, no version of the program and no number of threads, because
the bytes of an output depend on the recipe and the inputs alone. The JSON file beside the weights
adds those things and the digest of every tensor.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from dare import __version__
from dare.errors import InputError
from dare.inputs.hub import absolute
from dare.inputs.small_files import read_limited
from dare.inputs.sources import MAX_INDEX_BYTES
from dare.output.report import Report
from dare.output.writer import manifest_path
from dare.planning.layout import Layout
from dare.planning.plan import Plan
from dare.stages.methods import find_stage
from dare.tensors.digest import DIGEST_LENGTH, bytes_digest
from dare.tensors.mask import LATER_DRAWS_VERSION, MASK_VERSION

FORMAT = 1
METADATA_KEY = "dare"
LATER_PARAMETERS = (
    ("ties", "vote", "sum"),
    ("ties", "weighted", True),
    ("trim", "scope", "tensor"),
)
"""Parameters that stages got after outputs had been written, and the defaults that change nothing.

They stand in a header only if they are set, so that old recipes go on giving the same bytes.
"""
UNKNOWN = "0" * DIGEST_LENGTH
"""Stands where a digest will be, so that a header has its final length from the start."""


def embedded_manifest(
    plan: Plan, base: str = UNKNOWN, models: tuple[str, ...] | None = None, output: str = UNKNOWN
) -> dict[str, Any]:
    """The manifest that goes into the output's own header, before its check is filled in."""
    recipe = plan.recipe
    given = zip(
        models or [UNKNOWN] * len(plan.models),
        recipe.weights(),
        recipe.seeds(),
        recipe.models,
        strict=True,
    )
    later = {  # what came after the first manifests, and stands there only if it is used
        "vocabulary": None if recipe.vocabulary == "error" else recipe.vocabulary,
        "pad_to_multiple_of": recipe.pad_to_multiple_of,
        "later_draws": LATER_DRAWS_VERSION if plan.has_later_draws else None,
        "stages_from": {s.name: s.origin for s in plan.stages if s.origin} or None,
    }
    return {
        "format": FORMAT,
        "mask": MASK_VERSION,
        "method": "+".join(stage.name for stage in plan.stages),
        "stages": [
            {k: v for k, v in values.items() if (stage.name, k, v) not in LATER_PARAMETERS}
            for stage, values in recipe.chain
        ],
        "embedding_drop_rate": recipe.embedding_drop_rate,
        "tensors": recipe.described_rules(),
        "scale": recipe.scale,
        "dtype": recipe.dtype,
        "base": base,
        "models": [
            {"digest": digest, "weight": weight, "seed": seed, "settings": entry.settings}
            for digest, weight, seed, entry in given
        ],
        "output": output,
        "check": UNKNOWN,
        **{name: value for name, value in later.items() if value is not None},
    }


def metadata_of(manifest: Mapping[str, Any]) -> dict[str, str]:
    """The safetensors metadata that carries a manifest."""
    text = json.dumps(manifest, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return {"format": "pt", METADATA_KEY: text}


def checked_metadata(layout: Layout, manifest: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """For each file the metadata with the check filled in: a digest of that file's header.

    The check is taken over the header as it is while the check is all zeros.
    """
    unchecked = layout.build(metadata_of(manifest))
    return {
        file: metadata_of({**manifest, "check": bytes_digest(header)})
        for file, (header, _) in unchecked.items()
    }


def full_manifest(plan: Plan, report: Report, embedded: Mapping[str, Any]) -> dict[str, Any]:
    """The manifest that lies beside the weights."""
    recipe = plan.recipe
    resolved = recipe.with_files(
        absolute(recipe.base),
        [absolute(entry.file) for entry in recipe.models],
        recipe.output.resolve() if recipe.output else None,
    )
    figures = report.to_dict()
    del figures["digests"], figures["output"]
    return {
        **{key: value for key, value in embedded.items() if key != "check"},
        "recipe": resolved.to_document(),
        "versions": {
            "dare": __version__,
            "python": platform.python_version(),
            "numpy": np.__version__,
            "numba": _numba_version(),
        },
        "machine": platform.machine(),
        "digests": {
            "base": report.digests.base_tensors,
            "models": report.digests.model_tensors,
            "output": report.digests.output_tensors,
        },
        "report": figures,
    }


def _numba_version() -> str:
    try:
        return version("numba")
    except PackageNotFoundError:
        return "unknown"


def find_manifest(path: Path) -> Path | None:
    """The manifest that a path stands for: itself, or the one of the output it names."""
    if path.name.endswith(".json"):
        return path
    if path.suffix == ".safetensors" or path.is_dir():
        return manifest_path(path)
    return None


def repeating_document(path: Path, manifest_file: Path) -> dict[str, Any]:
    """The recipe that a manifest holds, which demands the very same inputs.

    `path` is what the user named: the manifest, or the output that it lies beside.
    """
    if path != manifest_file and not manifest_file.exists():
        if not path.exists():
            raise InputError(f"{path}: no such file")
        raise InputError(
            f"{path}: is no recipe, and has no manifest to repeat it by ({manifest_file}); "
            "models are given with --base and --merge"
        )
    manifest = read_manifest(manifest_file)
    versions = manifest.get("versions")
    writer = f"dare {versions.get('dare')}" if isinstance(versions, dict) else "unknown"
    for key, ours in (("format", FORMAT), ("mask", MASK_VERSION)):
        if manifest.get(key) != ours:
            raise InputError(
                f"{manifest_file}: its {key} is {manifest.get(key)!r}, and this version of dare "
                f"repeats only {ours!r}; use the version that wrote it ({writer})"
            )
    try:
        if _has_later_draws(manifest) and manifest.get("later_draws") != LATER_DRAWS_VERSION:
            raise InputError(
                f"{manifest_file}: the random stages of {manifest['method']} dropped the same "
                "elements when this was merged, which was an error, and is not repeated; merge by "
                "a recipe of its own (`dare init --config`)"
            )
        digests = [manifest["base"], *(model["digest"] for model in manifest["models"])]
        return {**manifest["recipe"], "input_digests": digests}
    except KeyError as error:
        raise InputError(f"{manifest_file}: the manifest is damaged: it has no {error}") from None
    except (TypeError, ValueError, AttributeError, RecursionError) as error:
        raise InputError(f"{manifest_file}: the manifest is damaged: {error}") from None


def _has_later_draws(manifest: Mapping[str, Any]) -> bool:
    """Whether more than one stage of the chain draws, by the settings that all models share."""
    draws = 0
    for name, given in zip(manifest["method"].split("+"), manifest["stages"], strict=True):
        stage = find_stage(name)
        settings = stage.settings(given, "")
        largest = {key: max(v) if isinstance(v, list) else v for key, v in settings.items()}
        draws += stage.is_random(largest)
    return draws > 1


def read_manifest(path: Path) -> dict[str, Any]:
    """Read the manifest beside an output."""
    try:
        manifest = json.loads(read_limited(path, MAX_INDEX_BYTES))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: the manifest is not valid JSON: {error}") from None
    if not isinstance(manifest, dict) or "recipe" not in manifest:
        raise InputError(f"{path}: is not a manifest made by dare")
    return manifest
