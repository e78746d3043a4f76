"""The receipt of a merge: the report that `merge` returns, and the manifest, which can be checked.

The header of every output file holds a short manifest: recipe, mask version, digests of inputs
and output. It names no path, no time, no version of the program and no number of threads, because
the bytes of an output depend on the recipe and the inputs alone. The JSON file beside the weights
adds the recipe, versions, and the digest of every tensor and file.

Nothing that is published reveals the machine it was made on. In a manifest a path is relative to
the output, so that both can be moved together, or only a name if they share no folder. Cards, pages
and tables have only the name.
"""

from __future__ import annotations

import itertools
import json
import os
import platform
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from dare import __version__
from dare.checks.dropping import MergedTensor, find_large_deltas, find_largest
from dare.checks.inputs import find_copies
from dare.checks.sample import SampledModels
from dare.documents.document import Columns, Document, Section, Tone, tabulate
from dare.documents.notices import LEFTOVERS, Notice, Severity, notice
from dare.documents.shown import Shown
from dare.documents.words import (
    NOTHING,
    counted,
    named,
    pace_text,
    rate_text,
    show_size,
    weight_text,
)
from dare.errors import (
    DareError,
    InputError,
    RecipeError,
    no_such_file,
    printable,
    warn_caller,
)
from dare.formats.recoding import Loss, LossMeter
from dare.inputs.directory import CHAT_TEMPLATE, usual_templates
from dare.inputs.shards import SINGLE_NAME
from dare.inputs.sources import ModelDigests, Source, WasRead
from dare.kernels import check_device, find_matrix_gpus
from dare.output.journal import Record, group_by_tensor
from dare.output.targets import MANIFEST_NAME, manifest_path, read_sealed
from dare.planning.data import FORMAT, Fate, Layout, TensorPlan, is_directory_target
from dare.planning.plan import Plan
from dare.recipe.document import request_from_document
from dare.recipe.entries import number_duplicates
from dare.recipe.fields import NOT_RECORDED
from dare.recipe.layers import Gradient
from dare.recipe.options import RunOptions
from dare.recipe.recipe import Recipe, Request
from dare.recipe.settings import moved
from dare.stores.locations import home_folder, is_stored, parse_name, to_path
from dare.tensors.chunks import SEAL, bytes_digest, model_digest, tensor_digest
from dare.tensors.header import TensorInfo
from dare.tensors.mask import MASK_VERSION


@dataclass(frozen=True)
class ModelReport:
    """One model's part in a merge."""

    name: str
    seed: int
    weight: float | Gradient
    elements: int
    drop_rate_asked: float | None
    """The rate of all dropping stages, 1 - Π(1 - p), with p the mean over the elements that reach
    the stage; None without a dropping stage."""
    drop_rate_realised: float | None
    """The share of elements that were dropped, among those that reached the dropping stages."""
    largest_delta: float
    largest_delta_in: str
    over_threshold: int


@dataclass(frozen=True)
class TensorReport:
    """One merged tensor: figures for each model that took part, in order."""

    name: str
    models: tuple[str, ...]
    largest_delta: tuple[float, ...]
    over_threshold: tuple[int, ...]
    survivors: tuple[tuple[int, ...], ...]
    """Elements left after each delta stage."""


@dataclass(frozen=True, repr=False)
class Digests:
    """Digests of everything that was read and written."""

    base: str
    models: tuple[str, ...]
    output: str
    base_tensors: dict[str, str]
    model_tensors: tuple[dict[str, str], ...]
    output_tensors: dict[str, str]

    def __repr__(self) -> str:
        """The digests of whole models."""
        return f"<Digests: base {self.base}, models {', '.join(self.models)}, output {self.output}>"


@dataclass(frozen=True)
class Recoded:
    """The format of an output that is not plain safetensors, and its losses."""

    format: str
    tensors: dict[str, Loss]
    """The loss of each tensor that lost anything."""

    @classmethod
    def of(cls, plan: Plan, chunks: Mapping[str, Sequence[Record]]) -> Recoded | None:
        """Add up the losses of tensors from the records of their chunks."""
        if plan.recoding is None:
            return None
        sums = {t.name: [c.sums for c in chunks[t.name] if c.sums] for t in plan.tensors}
        losses = {name: LossMeter(parts).loss for name, parts in sums.items() if parts}
        return cls(plan.recoding.format, losses)

    def __str__(self) -> str:
        """The format, the mean error and the worst."""
        if not self.tensors:
            return self.format
        mean = sum(loss.error for loss in self.tensors.values()) / len(self.tensors)
        worst = max(self.tensors, key=lambda name: self.tensors[name].error)
        error = self.tensors[worst].error
        return f"{self.format}; relative error {mean:.3g} on average, {error:.3g} in {worst}"


@dataclass(frozen=True, repr=False)
class Report(Shown):
    """The figures and warnings of a merge."""

    method: str
    output: Path | None
    models: tuple[ModelReport, ...]
    tensors: tuple[TensorReport, ...]
    delta_threshold: float
    overflowed: int
    """Results too large for the output type."""
    nans: int
    """Results that are not a number."""
    warnings: tuple[Notice, ...]
    bytes_read: int
    bytes_written: int
    resumed_chunks: int
    seconds: float
    digests: Digests
    recoded: Recoded | None = field(default=None, kw_only=True)
    notes: tuple[Notice, ...] = field(default=(), kw_only=True)
    """The plan's notes: a default that was taken, names that were matched, and the like."""
    commit: str | None = field(default=None, kw_only=True)
    """The commit that the output is, if it went to the hub."""

    def to_dict(self) -> dict[str, Any]:
        """The report as plain values."""
        plain = {**asdict(self), "output": None if self.output is None else str(self.output)}
        rare = ("recoded", "commit")
        return {key: value for key, value in plain.items() if key not in rare or value is not None}

    def __repr__(self) -> str:
        """The report in a line."""
        target = f" to {self.output}" if self.output is not None else ""
        models = named([model.name for model in self.models])
        warnings = [notice for notice in self.warnings if notice.severity is not Severity.NOTE]
        warned = f", {counted(len(warnings), 'warning')}" if warnings else ""
        return printable(f"<Report: {self.method} of {models}{target}{warned}>")

    def document(self) -> Document:
        """Return a document of what was done, and what to do next."""
        drops = any(model.drop_rate_asked is not None for model in self.models)
        columns: Columns = {
            "model": lambda model: model.name,
            "weight >": lambda model: weight_text(model.weight),
            "drop rate >": lambda model: rate_text(model.drop_rate_asked) if drops else "",
            "dropped >": lambda model: rate_text(model.drop_rate_realised) if drops else "",
            f"changes over {self.delta_threshold:g} >": _count_over,
            "largest change >": lambda model: f"{model.largest_delta:.3g}",
            "in tensor": lambda model: model.largest_delta_in or NOTHING,
        }
        models = tabulate(self.models, columns, optional=("weight >", "in tensor"))
        sections = (Section("models", "Models", (models,), is_brief=True),)
        merged = f"Merged {counted(len(self.tensors), 'tensor')}"
        output = shlex.quote(str(self.output))
        steps = {"verify": f"dare verify {output}", "repeat": f"dare {output} --output OTHER"}
        copied = 0 if self.models else len(self.digests.output_tensors)
        done = f"Copied {counted(copied, 'tensor')}" if copied else merged
        facts = {"format": self.recoded and str(self.recoded), "commit": self.commit}
        return Document(
            title=f"{done} in {self.seconds:.1f} s",
            kind="merge",
            tone=Tone.GOOD,
            lead=pace_text(self.bytes_read, self.seconds, self.resumed_chunks),
            facts=tuple((name, text) for name, text in facts.items() if text),
            sections=sections if self.models else (),
            notices=self.warnings,
            steps={} if self.output is None else steps,
            done=f"Wrote {self.output} ({show_size(self.bytes_written)})"
            if self.output is not None
            else "",
            models=tuple(model.name for model in self.models),
        )


def _count_over(model: ModelReport) -> str:
    share = model.over_threshold / model.elements if model.elements else 0.0
    return f"{model.over_threshold:,} ({share:.2%})"


def make_report(
    plan: Plan,
    records: Sequence[Record],
    sample: SampledModels | None = None,
    noticed: Sequence[Notice] = (),
    seconds: float = 0.0,
    bytes_read: int = 0,
    resumed_chunks: int = 0,
) -> Report:
    """Add up the figures of all chunks; `noticed` are further notices since the plan."""
    chunks = group_by_tensor(records)
    tensors = tuple(_tensor_report(plan, t, chunks[t.name]) for t in plan.merged())
    merged = [_merged_tensors(plan, model, tensors) for model in range(len(plan.models))]
    models = tuple(_model_report(plan, model, each) for model, each in enumerate(merged))
    overflowed, nans = (sum(record.exceptions[kind] for record in records) for kind in (0, 1))
    digests = digests_of(plan, records)
    sample = sample or SampledModels()
    contents = [  # empty for a model that equals the base, None if none of it was merged
        digest if model.largest_delta else "" if model.elements else None
        for model, digest in zip(models, digests.models, strict=True)
    ]
    warnings = [
        *plan.warnings,
        *sample.notices,
        *noticed,
        *(find_copies(plan, contents) if records else ()),
    ]
    for code, count in (("overflow", overflowed), ("not_a_number", nans)):
        if count:
            values = counted(count, "merged value is", "merged values are")
            warnings.append(notice(code, values=values))
    for each, exposures in zip(merged, sample.exposures, strict=False):
        warnings += find_large_deltas(plan, each, exposures)
    return Report(
        method=plan.method,
        output=plan.recipe.output,
        models=models,
        tensors=tensors,
        delta_threshold=plan.recipe.delta_threshold,
        overflowed=overflowed,
        nans=nans,
        warnings=tuple(dict.fromkeys(warnings)),
        bytes_read=bytes_read,
        bytes_written=plan.cost.bytes_written,
        resumed_chunks=resumed_chunks,
        seconds=seconds,
        digests=digests,
        recoded=Recoded.of(plan, chunks),
        notes=plan.notes,
    )


def _tensor_report(plan: Plan, tensor: TensorPlan, chunks: Sequence[Record]) -> TensorReport:
    figures = np.array([chunk.models for chunk in chunks], np.int64)  # chunk, model, figure
    of_model = 1 + len(tensor.stages) - len(tensor.treatment.refine)
    figures = figures.reshape(len(chunks), len(tensor.models), of_model)
    peaks = figures[:, :, 0].max(axis=0, initial=0).astype(np.uint32).view(np.float32)
    return TensorReport(
        tensor.name,
        tuple(plan.model_names[model] for model in tensor.models),
        tuple(peaks.tolist()),
        tuple(figures[:, :, 1].sum(axis=0).tolist()),
        tuple(map(tuple, figures[:, :, 2:].sum(axis=0).tolist())),
    )


def _merged_tensors(plan: Plan, model: int, reports: Sequence[TensorReport]) -> list[MergedTensor]:
    """Return the merged tensors that a model takes part in."""
    merged = []
    for tensor, report in zip(plan.merged(), reports, strict=True):
        if model in tensor.models:
            place = tensor.models.index(model)
            peak, over = report.largest_delta[place], report.over_threshold[place]
            merged.append(MergedTensor(model, tensor, peak, over, report.survivors[place]))
    return merged


def _model_report(plan: Plan, index: int, merged: Sequence[MergedTensor]) -> ModelReport:
    largest, largest_in = find_largest(merged)
    asked, realised = _drop_rates(merged)
    return ModelReport(
        name=plan.model_names[index],
        seed=plan.recipe.seeds()[index],
        weight=plan.recipe.weights()[index],
        elements=sum(each.tensor.elements for each in merged),
        drop_rate_asked=asked,
        drop_rate_realised=realised,
        largest_delta=largest,
        largest_delta_in=largest_in,
        over_threshold=sum(each.over_threshold for each in merged),
    )


def _drop_rates(merged: Sequence[MergedTensor]) -> tuple[float | None, float | None]:
    """Return the drop rates of one model: asked of all dropping stages, and realised.

    The first dropping stages of all methods count together, then the second ones; a tensor whose
    method has fewer stages loses nothing in the others.
    """
    asked_kept, realised_kept = Fraction(1), 1.0
    dropped = False
    losses = [stages for each in merged if (stages := list(_losses(each)))]
    for turn in range(max(map(len, losses), default=0)):
        of_turn = [s[turn] if turn < len(s) else (s[-1][1], s[-1][1], 0.0) for s in losses]
        reached = sum(before for before, _, _ in of_turn)
        if reached:
            dropped = True
            asked_kept *= Fraction(sum(n * (1 - Fraction(rate)) for n, _, rate in of_turn), reached)
            realised_kept *= sum(kept for _, kept, _ in of_turn) / reached
    return (float(1 - asked_kept), 1 - realised_kept) if dropped else (None, None)


def _losses(merged: MergedTensor) -> Iterator[tuple[int, int, float]]:
    """Yield for each dropping stage the elements that reach it, those it keeps, and its rate."""
    tensor, counts = merged.tensor, (merged.tensor.elements, *merged.survivors)
    stages = zip(tensor.stages, tensor.settings_of(merged.model), strict=False)
    for position, (stage, settings) in enumerate(stages):
        if "drop_rate" in stage.parameters:
            yield counts[position], counts[position + 1], settings["drop_rate"]


def digests_of(plan: Plan, records: Sequence[Record]) -> Digests:
    """Return the digests of all inputs and of the output."""
    chunks_of = group_by_tensor(records)

    # Of each input what was read: tensors, their places in records, and known digests.
    read: list[list[WasRead]] = [[] for _ in range(1 + len(plan.models))]
    for tensor in plan.tensors:
        if tensor.fate is not Fate.GATHERED:
            read[0].append((tensor.name, 0, None))
        for place, model in enumerate(tensor.models, start=1):
            if tensor.name in plan.models[model].tensors:
                original = plan.original_digest(tensor, model)
                read[1 + model].append((tensor.name, place, original))

    def of_input(source: Source, read: tuple[WasRead, ...]) -> ModelDigests:
        if source.digests is not None and read in source.digests:
            return source.digests[read]
        found = {n: own or tensor_digest(c.inputs[p] for c in chunks_of[n]) for n, p, own in read}
        whole = model_digest((source.tensors[name], digest) for name, digest in found.items())
        if source.digests is not None:
            source.digests[read] = found, whole
        return found, whole

    inputs = zip((plan.base, *plan.models), map(tuple, read), strict=True)
    (base_tensors, base), *models = itertools.starmap(of_input, inputs)
    output = {t.name: tensor_digest(c.output for c in chunks_of[t.name]) for t in plan.tensors}
    written = (TensorInfo(t.name, t.dtype, t.shape, 0) for t in plan.tensors)
    return Digests(
        base=base,
        models=tuple(whole for _, whole in models),
        output=model_digest(zip(written, output.values(), strict=True)),
        base_tensors=base_tensors,
        model_tensors=tuple(tensors for tensors, _ in models),
        output_tensors=output,
    )


# ---------------------------------------------------------------- paths as others may read them


MIN_SHARED_FOLDERS = 2  # a path between `/home/ann` and `/home/bob` would reveal who works there

_HUB_CACHE = re.compile(r"models--([^/]+?)--([^/]+)/snapshots/")
_PATH = re.compile(r"(?<!\S)(?:[A-Za-z]:[\\/]|[~/])[^\s:;,]*")


def portable_path(path: Path, output: Path) -> str:
    """Return an input's path for a manifest; hub names and addresses do not change.

    >>> portable_path(Path("/data/me/models/base"), Path("/data/me/merged"))
    '../models/base'
    >>> portable_path(Path("/data/me/models/base"), Path("/scratch/merged"))
    'base'
    """
    if is_hub_name(path) or is_stored(path):
        return path.as_posix()
    real = Path(os.path.realpath(path.parent), path.name)
    if is_stored(output):  # there is no relative path from a store to this machine
        return real.name
    start = Path(os.path.realpath(output.parent), output.name)
    common = os.path.commonpath([real, start]) if real.drive == start.drive else ""
    if len(Path(common).parts) <= MIN_SHARED_FOLDERS:  # the root is a part too
        return real.name
    return Path(os.path.relpath(real, start)).as_posix()


def resolve_path(text: str, output: Path) -> Path:
    """Return the path of an input that a manifest names."""
    path = to_path(text)
    if is_hub_name(path) or is_stored(path):
        return path
    if is_stored(output):
        return to_path(re.sub(r"(?<=:/)(?=[^/])", "/", os.path.normpath(str(output / text))))
    return Path(os.path.normpath(output / text))


def is_hub_name(path: Path) -> bool:
    """Tell whether a path is the name of a model on the hub, with its commit."""
    name = parse_name(path.as_posix())
    return name is not None and name.revision is not None


def short_name(path: str | os.PathLike[str]) -> str:
    """Return the last part of a path; for a folder of the hub's cache, the name on the hub.

    A `model.safetensors` has the name of its folder.

    >>> short_name("/home/me/models/math"), short_name("~/base.safetensors")
    ('math', 'base.safetensors')
    >>> short_name("~/cache/hub/models--org--name/snapshots/0a1b/"), short_name("org/name@main")
    ('org/name', 'org/name@main')
    """
    text = to_path(path).as_posix()
    if is_stored(to_path(path)):
        return text.removesuffix(f"/{SINGLE_NAME}")
    if Path(text).parent != home_folder():  # whose name is that of its owner
        text = text.removesuffix(f"/{SINGLE_NAME}")
    if is_hub_name(Path(text)):
        return text
    cached = _HUB_CACHE.search(text + "/")
    return f"{cached[1]}/{cached[2]}" if cached else Path(text).name


def without_folders(text: str, known: Iterable[Path] = ()) -> str:
    """Return a text with the paths in it shortened; `known` paths may have spaces.

    >>> without_folders("~me/a/b.jinja: is not in /data/x/y/z, but 1/2")
    'b.jinja: is not in z, but 1/2'
    >>> without_folders("/home/Ann B/base/config.json: is odd", [Path("/home/Ann B/base")])
    'base/config.json: is odd'
    """
    here = {str(path.absolute().parent) for path in known if not is_stored(path)}
    for folder in sorted(here, key=len, reverse=True):
        text = text.replace(folder + os.sep, "")
    return _PATH.sub(lambda path: short_name(path[0]), text)


# ---------------------------------------------------------------- the manifest


def portable_notices(notices: Iterable[Notice], known: Sequence[Path]) -> tuple[Notice, ...]:
    """Return notices as a manifest records them, without folders of this machine."""
    others = (found for found in notices if found.code != LEFTOVERS)  # which name such folders
    return tuple(each.with_texts(lambda text: without_folders(text, known)) for each in others)


METADATA_KEY = "dare"


def with_digests(identity: Mapping[str, Any], digests: Digests) -> dict[str, Any]:
    """Return the manifest for the output's own header, before its check is filled in."""
    pairs = zip(identity["models"], digests.models, strict=True)
    models = [{**model, "digest": digest} for model, digest in pairs]
    return {**identity, "base": digests.base, "models": models, "output": digests.output}


def metadata_of(manifest: Mapping[str, Any]) -> dict[str, str]:
    """Return the safetensors metadata that holds a manifest."""
    text = json.dumps(manifest, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return {"format": "pt", METADATA_KEY: text}


def checked_metadata(layout: Layout, manifest: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """Return each file's metadata with the check: the digest of the header with zeros for it."""
    unchecked = layout.build(metadata_of(manifest))
    return {
        file: metadata_of({**manifest, SEAL: bytes_digest(header)})
        for file, (header, _) in unchecked.items()
    }


def full_manifest(plan: Plan, report: Report, embedded: Mapping[str, Any]) -> dict[str, Any]:
    """Return the manifest beside the weights, without the digests of files."""
    figures = report.to_dict()
    del figures["digests"], figures["output"], figures["notes"]
    figures["warnings"] = list(map(asdict, portable_notices(report.warnings, plan.recipe.paths)))
    return {
        **{key: value for key, value in embedded.items() if key != SEAL},
        "recipe": _portable_request(plan).to_document(),
        "versions": {
            "dare": __version__,
            "python": platform.python_version(),
            "numpy": np.__version__,
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
    names = number_duplicates([portable_path(path, output) for path in recipe.inputs])
    portable = moved(recipe, dict(zip(recipe.inputs, map(to_path, names), strict=True)).__getitem__)
    template = portable.chat_template
    if template not in ("auto", *portable.names) and plan.sidecars is not None:
        content = plan.sidecars.files[CHAT_TEMPLATE]  # its file may be missing next time
        assert isinstance(content, bytes)
        template = content.decode()
    portable = portable.changed(chat_template=template)
    return Request(portable.without(NOT_RECORDED), plan.options.without(NOT_RECORDED))


def find_manifest(path: Path) -> Path | None:
    """Return the manifest that a path refers to: itself, or that of the output it names."""
    if path.name.endswith(".json"):
        return path
    if not is_directory_target(path) or path.is_dir():
        return manifest_path(path)
    return None


def check_recorded(manifest_file: Path, names: Iterable[str], inputs: Iterable[Path]) -> None:
    """Refuse settings and inputs that only a user may give, by name, before anything is opened.

    A manifest may come from a stranger. The inputs that it names must be relative to the output, on
    the hub, or in the manifest's own store.
    """
    output = output_of(manifest_file)
    for path in inputs:
        place = resolve_path(str(path), output)
        is_near = not is_stored(place) or "hf:" in place.parts[:1]
        if path.anchor or not (is_near or place.parts[:2] == output.parts[:2]):
            names = [*names, str(path)]
    for name in names:
        remedy = "give it yourself, by a flag (--allow-pickle, --base, --models …) or in a recipe"
        raise InputError(f"{manifest_file}: {name}: is not taken from a manifest; {remedy}")


def _recorded_recipe(manifest_file: Path, document: Any, given: Mapping[str, Any]) -> Recipe:
    """Return the recipe in a manifest, without its run options; `given` are a user's settings."""
    request = request_from_document(document, str(manifest_file))
    recipe, fields = request.recipe, request.recipe.given
    marked = {"output", *Recipe.marked(NOT_RECORDED), *RunOptions.marked(NOT_RECORDED)}
    names = sorted(marked & (fields | request.options.given))
    if not given.get("allow_pickle") and '"allow_pickle": true' in json.dumps(document):
        names.append("allow_pickle")  # set in it, or in a recipe inside it
    template, known = recipe.chat_template, {"auto", *recipe.names, *usual_templates()}
    if "chat_template" not in given and "{" not in template and template not in known:
        names.append(f"chat_template = {template!r}")  # a file
    files = [recipe.base] * ("base" not in given)
    files += [entry.file for entry in recipe.models] * ("models" not in given)
    files += [recipe.gathered] if recipe.gathered and "gathered" not in given else []
    files += [f for inner in (*recipe.merges.values(), *recipe.layers) for f in inner.inputs]
    check_recorded(manifest_file, names, [f for f in files if str(f) not in recipe.merges])
    return recipe


def repeating_document(path: Path, manifest_file: Path, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a manifest's recipe, which demands the same inputs and output.

    Settings in `given` will override it, and are not needed from the manifest.
    """
    if path != manifest_file and not manifest_file.exists():
        if not path.exists():
            raise no_such_file(path)
        raise InputError(
            f"{path}: is not a recipe, and there is no manifest to repeat it from "
            f"({manifest_file}); merge models by `dare merge BASE MODEL … -o OUT`, or write a "
            "recipe of them by `dare init BASE MODEL … -o OUT --to recipe.toml`"
        )
    manifest = read_manifest(manifest_file)
    if "mixture" in manifest:
        raise InputError(f"{path}: is a mixture of experts; to make it again, run dare moe {path}")
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
        digests += [manifest["gathered"]] if "gathered" in manifest else []
        recipe = _recorded_recipe(manifest_file, manifest["recipe"], given)
        output = output_of(manifest_file)
        repeated = moved(recipe, lambda path: resolve_path(str(path), output), output)
        is_same = _is_on_same_device(recipe, manifest, given)
        weights = manifest["output"] if is_same else None
        demanded = {"input_digests": digests, "output_digest": weights}
        return {**repeated.to_document(), **demanded}
    except KeyError as error:
        raise InputError(f"{manifest_file}: the manifest is damaged: it has no {error}") from None
    except (TypeError, ValueError, AttributeError, RecursionError) as error:
        if isinstance(error, RecipeError):
            raise
        raise InputError(f"{manifest_file}: the manifest is damaged: {error}") from None


def _is_on_same_device(
    recipe: Recipe, manifest: Mapping[str, Any], given: Mapping[str, Any]
) -> bool:
    """Tell whether whole matrices are computed where they were; warn if not."""
    device, processor = check_device(str(given.get("device", "cpu"))), "the processor"
    can_differ = any(stage.on_gpu for stage, _ in recipe.all_stages)
    gpus = find_matrix_gpus(device) if can_differ else None
    then, now = manifest.get("device", processor), gpus.title if gpus else processor
    if then != now:
        warn_caller(str(notice("other_device", then=then, now=now)))
    return bool(then == now)


def inputs_of_output(path: Path) -> Iterator[list[tuple[Path, Path]]]:
    """Yield an output's inputs, base first: each path in the manifest, and resolved."""
    if is_stored(path):
        return
    for manifest in filter(Path.is_file, (manifest_path(path), path.parent / MANIFEST_NAME)):
        try:
            recipe = request_from_document(read_manifest(manifest)["recipe"], str(manifest)).recipe
        except (DareError, TypeError, ValueError, AttributeError, RecursionError):
            continue  # it is not a manifest
        files = (recipe.base, *(entry.file for entry in recipe.models))
        yield [(file, resolve_path(str(file), output_of(manifest))) for file in files]


def output_of(manifest_file: Path) -> Path:
    """Return the output that a manifest belongs to."""
    if manifest_file.name == MANIFEST_NAME:
        return manifest_file.parent
    return manifest_file.with_name(manifest_file.name.removesuffix(".manifest.json"))


def read_manifest(path: Path) -> dict[str, Any]:
    """Read the manifest beside an output."""
    manifest = read_sealed(path)
    if "recipe" not in manifest:
        remedy = "to merge its model, name the base first: `dare BASE MODEL … -o OUT`"
        raise InputError(f"{path}: is not the manifest of a merge; {remedy}")
    return manifest
