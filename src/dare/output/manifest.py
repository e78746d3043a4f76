"""Paths as others may read them: nothing that is published speaks of the machine it was made on.

In a manifest a path is relative to the output, so that both can be moved together, or only a name
if they have nothing in common. Cards, pages and tables have the name alone.


The manifest of a merge, in the output's header and beside it, which `verify` checks again.

The header of every output file holds a short manifest: recipe, mask version, digests of inputs
and output. It names no path, no time, no version of the program and no number of threads, because
the bytes of an output depend on the recipe and the inputs alone. The JSON file beside the weights
adds the recipe, versions, and the digest of every tensor and file; it tells where inputs lie only
as far as that says nothing of the machine.
"""

from __future__ import annotations

import json
import os
import platform
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from dare import __version__
from dare.documents.notices import LEFTOVERS
from dare.errors import DareError, InputError, RecipeError
from dare.inputs.directory import CHAT_TEMPLATE
from dare.inputs.sources import SINGLE_NAME
from dare.kernels.native import numba_version
from dare.output.journal import JOURNAL_VERSION
from dare.output.report import Digests, Report
from dare.output.targets import MANIFEST_NAME, SEAL, UNKNOWN, manifest_path, read_sealed
from dare.planning.data import Layout
from dare.planning.plan import Plan
from dare.recipe.document import request_from_document
from dare.recipe.entries import NOT_RECORDED, distinct
from dare.recipe.recipe import Request
from dare.stores.locations import StorePath, home_folder, parse_name, to_path
from dare.tensors.chunks import bytes_digest
from dare.tensors.mask import LATER_DRAWS_VERSION, MASK_VERSION

MIN_SHARED_FOLDERS = 2  # a way between `/home/ann` and `/home/bob` would tell who works there

_HUB_CACHE = re.compile(r"models--([^/]+?)--([^/]+)/snapshots/")
_PATH = re.compile(r"(?<!\S)[~/][^\s:;,]*")


def portable_path(path: Path, output: Path) -> str:
    """Return an input's path as a manifest names it; hub names and addresses stay as they are.

    >>> portable_path(Path("/data/me/models/base"), Path("/data/me/merged"))
    '../models/base'
    >>> portable_path(Path("/data/me/models/base"), Path("/scratch/merged"))
    'base'
    """
    if is_hub_name(path) or isinstance(path, StorePath):
        return path.as_posix()
    real = Path(os.path.realpath(path.parent), path.name)
    if isinstance(output, StorePath):  # from where no way leads here
        return real.name
    start = Path(os.path.realpath(output.parent), output.name)
    common = os.path.commonpath([real, start]) if real.drive == start.drive else ""
    if len(Path(common).parts) <= MIN_SHARED_FOLDERS:  # the root is a part too
        return real.name
    return Path(os.path.relpath(real, start)).as_posix()


def resolve_path(text: str, output: Path) -> Path:
    """Return the path of an input that a manifest names."""
    path = to_path(text)
    if is_hub_name(path) or isinstance(path, StorePath):
        return path
    if isinstance(output, StorePath):
        return to_path(re.sub(r"(?<=:/)(?=[^/])", "/", os.path.normpath(str(output / text))))
    return Path(os.path.normpath(output / text))


def is_hub_name(path: Path) -> bool:
    """Tell whether a path is the name of a model on the hub, with its commit."""
    name = parse_name(path.as_posix())
    return name is not None and name.revision is not None


def short_name(path: str | os.PathLike[str]) -> str:
    """The last part of a path; the name on the hub for a folder of its cache.

    A directory stands for the `model.safetensors` in it.

    >>> short_name("/home/me/models/math"), short_name("~/base.safetensors")
    ('math', 'base.safetensors')
    >>> short_name("~/cache/hub/models--org--name/snapshots/0a1b/"), short_name("org/name@main")
    ('org/name', 'org/name@main')
    """
    text = to_path(path).as_posix()
    if isinstance(to_path(path), StorePath):
        return text.removesuffix(f"/{SINGLE_NAME}")
    if Path(text).parent != home_folder():  # which is called like its owner
        text = text.removesuffix(f"/{SINGLE_NAME}")
    if is_hub_name(Path(text)):
        return text
    cached = _HUB_CACHE.search(text + "/")
    return f"{cached[1]}/{cached[2]}" if cached else Path(text).name


def without_folders(text: str, known: Iterable[Path] = ()) -> str:
    """Text, with the paths in it shortened; those that are `known` may have spaces.

    >>> without_folders("~me/a/b.jinja: is not in /data/x/y/z, but 1/2")
    'b.jinja: is not in z, but 1/2'
    >>> without_folders("/home/Ann B/base/config.json: is odd", [Path("/home/Ann B/base")])
    'base/config.json: is odd'
    """
    here = {str(path.absolute().parent) for path in known if not isinstance(path, StorePath)}
    for folder in sorted(here, key=len, reverse=True):
        text = text.replace(folder + os.sep, "")
    return _PATH.sub(lambda path: short_name(path[0]), text)


# ----------------------------------------------------------------


FORMAT = 1
METADATA_KEY = "dare"
LATER_PARAMETERS = (
    ("ties", "vote", "sum"),
    ("ties", "weighted", True),
    ("trim", "scope", "tensor"),
)
"""Later parameters and their defaults, which a header leaves out so that old bytes stay."""


def embedded_manifest(plan: Plan, digests: Digests | None = None) -> dict[str, Any]:
    """Return the manifest for the output's own header, before its check is filled in."""
    recipe = plan.recipe
    models = digests.models if digests else [UNKNOWN] * len(plan.models)
    given = zip(models, recipe.weights(), recipe.seeds(), recipe.models, strict=True)
    later = {  # what came after the first manifests, and stands there only if it is used
        "vocabulary": None if recipe.vocabulary == "error" else recipe.vocabulary,
        "pad_to_multiple_of": recipe.pad_to_multiple_of,
        "later_draws": LATER_DRAWS_VERSION if plan.has_later_draws else None,
        "dropped_before": plan.dropped_before if any(plan.dropped_before) else None,
        "stages_from": {s.name: s.origin for s in plan.stages if s.origin} or None,
    }
    return {
        "format": FORMAT,
        "mask": MASK_VERSION,
        "method": plan.method,
        "stages": [
            {k: v for k, v in values.items() if (stage.name, k, v) not in LATER_PARAMETERS}
            for stage, values in recipe.chain
        ],
        "embedding_drop_rate": recipe.embedding_drop_rate,
        "tensors": recipe.described_rules(),
        "scale": recipe.scale,
        "dtype": recipe.dtype,
        "base": digests.base if digests else UNKNOWN,
        "models": [
            {"digest": digest, "weight": weight, "seed": seed, "settings": entry.settings}
            for digest, weight, seed, entry in given
        ],
        "output": digests.output if digests else UNKNOWN,
        SEAL: UNKNOWN,
        **{name: value for name, value in later.items() if value is not None},
    }


def fingerprint(planned: Plan) -> str:
    """A digest of recipe, headers, version and layout; paths and run settings are not in it."""
    described = [
        [__version__, FORMAT, JOURNAL_VERSION, planned.backend],
        embedded_manifest(planned),
        [source.fingerprint() for source in planned.sources],
        [[t.name, t.fate, t.dtype.name, t.models] for t in planned.tensors],
        list(planned.layout.files) if planned.layout else [],
        planned.recipe.delta_threshold,
    ]
    return bytes_digest(json.dumps(described, sort_keys=True, default=str).encode())


def metadata_of(manifest: Mapping[str, Any]) -> dict[str, str]:
    """The safetensors metadata that carries a manifest."""
    text = json.dumps(manifest, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return {"format": "pt", METADATA_KEY: text}


def checked_metadata(layout: Layout, manifest: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """Return each file's metadata with the check: the digest of the header while that is zeros."""
    unchecked = layout.build(metadata_of(manifest))
    return {
        file: metadata_of({**manifest, SEAL: bytes_digest(header)})
        for file, (header, _) in unchecked.items()
    }


def full_manifest(plan: Plan, report: Report, embedded: Mapping[str, Any]) -> dict[str, Any]:
    """The manifest that lies beside the weights, but for the digests of files."""
    figures = report.to_dict()
    del figures["digests"], figures["output"]
    figures["warnings"] = [
        asdict(notice.with_texts(lambda text: without_folders(text, plan.recipe.paths)))
        for notice in report.warnings
        if notice.code != LEFTOVERS  # it speaks of this machine
    ]
    return {
        **{key: value for key, value in embedded.items() if key != SEAL},
        "recipe": _portable_request(plan).to_document(),
        "versions": {
            "dare": __version__,
            "python": platform.python_version(),
            "numpy": np.__version__,
            "numba": numba_version(),
        },
        "machine": platform.machine(),
        "digests": {
            "base": report.digests.base_tensors,
            "models": report.digests.model_tensors,
            "output": report.digests.output_tensors,
        },
        "report": figures,
    }


def _portable_request(plan: Plan) -> Request:
    """Return the request as others may read it, with paths relative to the output."""
    recipe = plan.recipe
    output = plan.layout.target if plan.layout else Path()
    portable = recipe.with_files(
        to_path(portable_path(recipe.base, output)),
        [
            to_path(name)
            for name in distinct([portable_path(e.file, output) for e in recipe.models])
        ],
        None,
    )
    template = recipe.chat_template
    if template not in ("auto", *plan.model_names) and plan.sidecars is not None:
        content = plan.sidecars.files[CHAT_TEMPLATE]  # the file it was in may not be there again
        assert isinstance(content, bytes)
        template = content.decode()
    portable = portable.model_copy(update={"chat_template": template})
    return Request(portable.without(NOT_RECORDED), plan.options.without(NOT_RECORDED))


def find_manifest(path: Path) -> Path | None:
    """The manifest that a path stands for: itself, or the one of the output it names."""
    if path.name.endswith(".json"):
        return path
    if path.suffix == ".safetensors" or path.is_dir():
        return manifest_path(path)
    return None


def repeating_document(path: Path, manifest_file: Path) -> dict[str, Any]:
    """Return a manifest's recipe, which demands the same inputs and output."""
    if path != manifest_file and not manifest_file.exists():
        if not path.exists():
            raise InputError(f"{path}: no such file")
        raise InputError(
            f"{path}: is not a recipe, and there is no manifest to repeat it from "
            f"({manifest_file}); give models as dare merge BASE MODEL … -o OUT"
        )
    manifest = read_manifest(manifest_file)
    versions = manifest.get("versions")
    writer = f"dare {versions.get('dare')}" if isinstance(versions, dict) else "unknown"
    for key, ours in (("format", FORMAT), ("mask", MASK_VERSION)):
        if manifest.get(key) != ours:
            raise InputError(
                f"{manifest_file}: its {key} is {manifest.get(key)!r}, and this version of dare "
                f"can repeat only {ours!r}; use the version that wrote it ({writer})"
            )
    try:
        digests = [manifest["base"], *(model["digest"] for model in manifest["models"])]
        given = request_from_document(manifest["recipe"], str(manifest_file))
        recipe = given.recipe
        output = output_of(manifest_file)
        repeated = recipe.with_files(
            resolve_path(str(recipe.base), output),
            [resolve_path(str(entry.file), output) for entry in recipe.models],
            output,
        )
        demanded = {"input_digests": digests, "output_digest": manifest["output"]}
        return {**Request(repeated, given.options).to_document(), **demanded}
    except KeyError as error:
        raise InputError(f"{manifest_file}: the manifest is damaged: it has no {error}") from None
    except (TypeError, ValueError, AttributeError, RecursionError) as error:
        if isinstance(error, RecipeError):
            raise
        raise InputError(f"{manifest_file}: the manifest is damaged: {error}") from None


def inputs_of_output(path: Path) -> Iterator[list[tuple[Path, Path]]]:
    """Yield an output's inputs, base first: as a manifest names them, and where that leads."""
    if isinstance(path, StorePath):
        return
    for manifest in filter(Path.is_file, (manifest_path(path), path.parent / MANIFEST_NAME)):
        try:
            recipe = request_from_document(read_manifest(manifest)["recipe"], str(manifest)).recipe
        except (DareError, TypeError, ValueError, AttributeError, RecursionError):
            continue  # it is no manifest
        files = (recipe.base, *(entry.file for entry in recipe.models))
        yield [(file, resolve_path(str(file), output_of(manifest))) for file in files]


def output_of(manifest_file: Path) -> Path:
    """Return the output that a manifest lies in or beside."""
    if manifest_file.name == MANIFEST_NAME:
        return manifest_file.parent
    return manifest_file.with_name(manifest_file.name.removesuffix(".manifest.json"))


def read_manifest(path: Path) -> dict[str, Any]:
    """Read the manifest beside an output."""
    manifest = read_sealed(path)
    if "recipe" not in manifest:
        raise InputError(f"{path}: is not the manifest of a merge")
    return manifest
