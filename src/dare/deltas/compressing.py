"""From a base and a fine-tune of it to a delta file.

A delta file keeps the changes that a merge of this one model by DARE would keep: plan and masks are
those of the merge, and only the last step differs. For a lossless file the plan copies the model,
and compares it with the base.
"""

from __future__ import annotations

import glob
import itertools
import json
import math
import shlex
import struct
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from dare import __version__
from dare.checks.sample import sample_models
from dare.deltas.packing import Bits, Packer, Scheme, choose_scheme, code_lossless
from dare.deltas.restoring import FileReport
from dare.documents.document import Document, Tone
from dare.documents.notices import LIMIT, Notice, notice
from dare.documents.words import counted, pace_text, show_size
from dare.errors import InputError, MismatchError, OutputError
from dare.inputs.delta_files import (
    INDEX,
    KEY,
    MAX_FILE_BYTES,
    VERSION,
    DeltaNotes,
    DeltaSource,
    StoredFile,
    StoredTensor,
    file_part,
    is_delta_file,
    is_inside,
    part_names,
    part_sizes,
    part_type,
    sample,
)
from dare.inputs.directory import collect
from dare.inputs.hub import resolve
from dare.inputs.lora import LoraSource
from dare.inputs.names import match_names
from dare.inputs.pipeline import refuse_pipeline
from dare.inputs.shards import INDEX_NAME, MAX_INDEX_BYTES
from dare.inputs.sources import (
    FileSource,
    RenamedSource,
    Source,
    SourceView,
    open_source,
    read_config,
)
from dare.output.journal import Record, group_by_tensor
from dare.output.output import Publisher
from dare.output.receipt import portable_notices, portable_path
from dare.output.sink import PieceSink
from dare.planning.data import Fate, Layout, TensorPlan, Treatment, lay_out
from dare.planning.plan import Plan
from dare.recipe.recipe import Request, TensorRule
from dare.run.engine import Receipt, Work, run, warn
from dare.run.nested import open_recipe, plan_inputs
from dare.run.worker import MakeCoder
from dare.stages import find_stage
from dare.stores.locations import AnyPath, to_path
from dare.tensors.chunks import UNKNOWN, bytes_digest, model_digest, tensor_digest
from dare.tensors.dtypes import STORAGE_TYPES
from dare.tensors.files import read_beginning, read_limited
from dare.tensors.header import MAX_METADATA, Described, TensorInfo
from dare.tensors.mask import MASK_VERSION, check_drop_rate
from dare.tensors.names import is_embedding
from dare.tensors.planes import pack

Records = Mapping[str, Sequence[Record]]  # by tensor, in order of their chunks
# The other files of the model's folder, and their coded bytes, if the base lacks them.
Files = Mapping[str, tuple[StoredFile, bytes]]


def compress(
    base: AnyPath,
    model: AnyPath,
    output: AnyPath,
    *,
    drop_rate: float | None = None,
    seed: int = 42,
    bits: Bits | None = None,
    embedding_drop_rate: float | None = None,
    drop_rates: Mapping[str, float] | None = None,
    lossless: bool = False,
    overwrite: bool = False,
    resume: bool = True,
    verbose: bool = True,
    **settings: Any,
) -> DeltaReport:
    """Store a model as its change to a base, in a small file.

    By default nothing is dropped and each change takes two bits (docs/deltas-measured.md says why);
    the report says how large the file is and how large its error. `drop_rates` are rates for the
    tensors whose names match a pattern (`*` and `?` as in a shell). `lossless` keeps all of the
    model, bit for bit. Other settings are those of a `Recipe` that say how inputs are read:
    `on_missing`, `on_extra`, `threads`, `max_memory`, `allow_pickle`.
    """
    target = to_path(output)
    if target.suffix != ".safetensors":
        raise OutputError(f"{target}: a delta file is one file; call it NAME.delta.safetensors")
    given = {"base": base, "models": [model], "verbose": verbose, **settings}
    if lossless:
        work = _plan_lossless(given, target)
    else:
        scheme = choose_scheme(drop_rate, bits)
        work = _plan_lossy(given, target, scheme, seed, drop_rates or {}, embedding_drop_rate)
    return run(work, overwrite=overwrite, resume=resume)


@dataclass(frozen=True)
class DeltaReport(FileReport):
    """The figures of a delta file: its size, and its error."""

    scheme: str
    bits: str | int
    drop_rate: float | None
    seed: int | None
    parameters: int
    kept: int
    """The number of stored values; not counted for a lossless file."""
    model_bytes: int
    bytes_written: int
    bits_per_parameter: float
    ratio: float
    """The model's size divided by the file's."""
    relative_error: float
    """√Σ(δ̂ - δ)² / √Σδ², with δ̂ as it is read from the file."""
    weight_error: float
    """The same, relative to the base's weights: √Σ(δ̂ - δ)² / √Σw²."""
    bytes_read: int
    resumed_chunks: int
    seconds: float
    notes: tuple[Notice, ...]
    warnings: tuple[Notice, ...]

    @property
    def held(self) -> str:
        """The stored part of the model, and the error."""
        if self.scheme == "lossless":
            return "every bit of the model"
        values = "unrounded" if self.bits == "native" else f"{counted(int(self.bits), 'bit')} each"
        return (
            f"{self.kept:,} of {self.parameters:,} changes, {values}; weight "
            f"error {self.weight_error:.2%} ({self.relative_error:.0%} of the change)"
        )

    def document(self) -> Document:
        """Return a document of the file's content, and what to do with it."""
        output = shlex.quote(str(self.output))
        each = f"{self.bits_per_parameter:.3g} bits for each parameter"
        smaller = f"{self.ratio:.1f} times smaller than the model ({each})"
        return Document(
            title=f"Compressed in {self.seconds:.1f} s",
            kind="delta file",
            tone=Tone.GOOD,
            lead=pace_text(self.bytes_read, self.seconds, self.resumed_chunks),
            facts=(
                ("size", f"{show_size(self.bytes_written)}, {smaller}"),
                ("holds", self.held),
            ),
            notices=(*self.notes, *self.warnings),
            steps={
                "apply": f"dare apply BASE {output} -o MODEL",
                "verify": f"dare verify {output}",
            },
            done=f"Wrote {self.output}",
        )


# ---------------------------------------------------------------- the work


@dataclass(eq=False)
class Compression(Work[DeltaReport]):
    """A delta file under way, of one kind or another."""

    target: Path
    plan: Plan
    make_coder: MakeCoder
    describe: Callable[[Records], DeltaNotes]  # the header's notes, when all chunks are coded
    settings: Mapping[str, Any]  # the user's settings, for the manifest
    files: Files
    verb = "compressing"

    def __post_init__(self) -> None:
        plan, layout = self.plan, Layout(self.target, {self.target.name: ()})
        of_tensors = [list(itertools.chain(*tensor.settings)) for tensor in plan.tensors]
        described = [VERSION, dict(self.settings), of_tensors]
        identity = bytes_digest(json.dumps(described, sort_keys=True, default=str).encode())
        super().__init__(plan, layout, plan.fingerprint, identity)

    def make_sink(self, publisher: Publisher) -> PieceSink:
        chunks = {tensor.name: tensor.chunks for tensor in self.plan.tensors}
        self._sink = PieceSink(publisher.folder, self.target, chunks)
        return self._sink

    def carry_out(self) -> Sequence[Record]:
        return self.execute(make_coder=self.make_coder)

    def conclude(self, records: Sequence[Record]) -> Receipt[DeltaReport]:
        notes = self._assemble(group_by_tensor(records))
        report = self._report(notes, records)
        ((name, (unchecked, _)),) = self._sink.layout.build(_metadata(notes)).items()
        checked = replace(notes, check=bytes_digest(unchecked))
        return Receipt(report, {name: _metadata(checked)}, self._manifest(notes, report))

    def end(self, report: DeltaReport, problems: Sequence[str]) -> DeltaReport:
        del problems
        warn(self.plan, [found for found in report.warnings if found not in self.noticed])
        return report

    def _report(self, notes: DeltaNotes, records: Sequence[Record]) -> DeltaReport:
        """Add up the figures of all chunks."""
        plan, is_lossless, size = self.plan, notes.scheme == "lossless", self._sink.size
        model = plan.base if is_lossless else plan.models[0]  # see _plan_lossless
        model_bytes = sum(file.stat().st_size for file in model.files)
        columns = zip(*(record.sums for record in records if record.sums), strict=True)
        change, error, weights = [math.fsum(column) for column in columns] or (0.0, 0.0, 0.0)
        weight_error = _root(error, weights)
        parameters = sum(tensor.elements for tensor in notes.tensors.values() if not tensor.tied_to)
        warnings = [*plan.warnings, *self.noticed]
        if size > model_bytes:
            shown = show_size(size), show_size(model_bytes)
            warnings.append(notice("not_smaller", size=shown[0], model_size=shown[1]))
        if weight_error > LIMIT.delta_file_error:
            warnings.append(notice("lossy", error=weight_error))
        return DeltaReport(
            output=self.target,
            scheme=notes.scheme,
            bits=notes.bits,
            drop_rate=notes.drop_rate,
            seed=notes.seed,
            parameters=parameters,
            kept=0 if is_lossless else sum(max(0, record.piece[2]) for record in records),
            model_bytes=model_bytes,
            bytes_written=size,
            bits_per_parameter=8 * size / max(1, parameters),
            ratio=model_bytes / size,
            relative_error=_root(error, change),
            weight_error=weight_error,
            bytes_read=plan.cost.bytes_read,
            resumed_chunks=len(self.output.resumed),
            seconds=self.seconds,
            notes=plan.notes,
            warnings=tuple(warnings),
        )

    def _manifest(self, notes: DeltaNotes, report: DeltaReport) -> dict[str, Any]:
        recipe, target = self.plan.recipe, self.target
        known = [parent for path in recipe.paths for parent in (path, path.parent)]
        said = portable_notices(report.notes, known)
        shown = replace(report, notes=said, warnings=portable_notices(report.warnings, known))
        (entry,) = recipe.models
        return {
            "delta": dict(self.settings),
            "base": portable_path(recipe.base, target),
            "model": portable_path(entry.file, target),
            "digests": {"base": notes.base, "model": notes.model},
            "versions": {"dare": __version__, "delta": notes.version, "numpy": np.__version__},
            "report": shown.to_dict(),
        }

    def _assemble(self, records: Records) -> DeltaNotes:
        """Put the pieces into their places; return the notes of the header, without their check."""
        notes = self.describe(records)
        described: list[Described] = []
        pieces: dict[str, list[tuple[int, int] | bytes]] = defaultdict(list)
        rows: list[bytes] = []
        for name in sorted(tensor.name for tensor in self.plan.tensors):
            stored = notes.tensors[name]
            parts = [(part, part_type(notes, part, stored)) for part in part_names(notes, name)]
            totals = Counter[str]()
            for record in records.get(name, ()):
                start, _, count = record.piece
                rows.append(struct.pack("<q16s", count, bytes.fromhex(record.output)))
                sizes = part_sizes(notes, count)
                for (part, kind), size in zip(parts, sizes, strict=True):
                    pieces[part].append((start, size * kind.itemsize))
                    start += size * kind.itemsize
                    totals[part] += size
            described += [(part, kind, (totals[part],)) for part, kind in parts if totals[part]]
        index = b"".join(rows)
        pieces[INDEX] = [index]
        described.append((INDEX, STORAGE_TYPES["I64"], (len(rows), 3)))
        for name, (file, coded) in self.files.items():
            if file.kind != "base":
                pieces[file_part(name)] = [coded]
                described.append((file_part(name), STORAGE_TYPES["U8"], (len(coded),)))
        notes = replace(notes, index=bytes_digest(index))
        if len(json.dumps(_metadata(notes))) > MAX_METADATA:
            many = f"the model has too many tensors ({len(notes.tensors)})"
            raise MismatchError(f"{self.target}: {many}; split the model")
        held = {name: pieces[name] for name, _, _ in described}
        self._sink.assemble(lay_out(self.target, described, None), _metadata(notes), held)
        return notes


def _metadata(notes: DeltaNotes) -> dict[str, str]:
    return {"format": "pt", KEY: notes.to_json()}


def _root(part: float, whole: float) -> float:
    if part <= 0:  # rounding can make it negative, if almost nothing is dropped
        return 0.0
    return math.sqrt(part / whole) if whole > 0 else math.inf


def _make_notes(
    base: Source, model: Source, stored: dict[str, StoredTensor], files: Files, **kind: Any
) -> DeltaNotes:
    named = {tensor.base_name or name: tensor.base for name, tensor in stored.items()}
    return DeltaNotes(
        version=VERSION,
        base=model_digest((base.tensors[n], digest) for n, digest in named.items() if digest),
        model=model_digest((model.tensors[n], tensor.model) for n, tensor in stored.items()),
        sample=sample(base),
        tensors=stored,
        files={name: file for name, (file, _) in files.items()},
        index=UNKNOWN,
        check=UNKNOWN,
        **kind,
    )


# ---------------------------------------------------------------- lossy files


def _plan_lossy(
    given: Mapping[str, Any],
    target: Path,
    scheme: Scheme,
    seed: int,
    drop_rates: Mapping[str, float],
    embedding_drop_rate: float | None,
) -> Compression:
    """Plan to pack the changes that a scheme keeps; `given` are fields of a recipe."""
    method, stage = find_stage(adds_up=True).name, find_stage(for_delta_files=True)
    asked = Request.of(**given, method=method, seed=seed)
    recipe, inputs = open_recipe(asked.recipe, asked.options)
    (model,), (entry,) = inputs.models, recipe.models
    _check_model(entry.file, model)
    rates = dict(drop_rates)
    if embedding_drop_rate is not None:
        embeddings = (glob.escape(name) for name in inputs.base.tensors if is_embedding(name))
        rates = {**dict.fromkeys(sorted(embeddings), embedding_drop_rate), **rates}
    files = _files_beside(*inputs.folders)
    rules = tuple(
        TensorRule(match=pattern, settings={"drop_rate": check_drop_rate(rate)})
        for pattern, rate in rates.items()
    )
    stages = {stage.name: {"drop_rate": scheme.drop_rate}}
    method = f"{stage.name}+{recipe.method}"
    recipe = recipe.changed(tensors=rules, method=method, stages=stages)
    whole = plan_inputs(recipe, inputs, asked.options)
    held = [t for t in whole.tensors if t.fate in (Fate.MERGED, Fate.COPIED)]
    held = [t for t in held if t.name in model.tensors]
    coded = [t for t in held if t.tied_to is None]
    tied = [t for t in held if t.tied_to is not None]
    plan = _with_warnings(replace(whole, tensors=tuple(coded)))

    def describe(records: Records) -> DeltaNotes:
        stored = {t.name: _kept_tensor(t, model, records[t.key]) for t in (*coded, *tied)}
        kind = {"scheme": "random", "bits": scheme.bits, "drop_rate": float(scheme.drop_rate)}
        known = {"mask": MASK_VERSION, "seed": seed}
        return _make_notes(inputs.base, model, stored, files, **kind, **known)

    settings = {
        "keep": "random",  # so that files begun by earlier versions can be continued
        "drop_rate": scheme.drop_rate,
        "bits": scheme.bits,
        "seed": seed,
        "drop_rates": rates,
    }
    return Compression(target, plan, partial(Packer, scheme), describe, settings, files)


def _with_warnings(plan: Plan) -> Plan:
    """Return the plan with warnings from a sample, and advice if a LoRA can hold the change."""
    sample = sample_models(plan, finds_rank=True)
    notices = [found for found in sample.notices if found.code != "low_rank"]
    (rank,), (entry,) = sample.low_ranks, plan.recipe.models
    if rank is not None:
        command = ["dare", "lora", "extract", "--base", str(plan.recipe.base)]
        command += ["--model", str(entry.file), "--output", f"{entry.name}-lora"]
        extract = shlex.join([*command, "--rank", str(rank)])
        notices.append(notice("fits_lora", str(entry.file), rank=rank, command=extract))
    return plan.saying(warnings=notices)


def _check_model(path: Path, model: Source) -> None:
    inner = model
    while isinstance(inner, SourceView) and not isinstance(inner, DeltaSource | LoraSource):
        inner = inner.inner
    if isinstance(inner, DeltaSource):
        raise InputError(f"{path}: is already a delta file; `dare apply` turns it into a model")
    if isinstance(inner, LoraSource):
        raise InputError(f"{path}: is already stored as an adapter, which is small; keep it")


def _kept_tensor(tensor: TensorPlan, model: Source, records: Sequence[Record]) -> StoredTensor:
    return StoredTensor(
        shape=tensor.shape,
        dtype=model.tensors[tensor.name].dtype.name,
        model=tensor_digest(record.inputs[-1] for record in records),
        base=tensor_digest(record.inputs[0] for record in records),
        drop_rate=tensor.settings[0][0]["drop_rate"] if tensor.is_merged else 0.0,
        tied_to=tensor.tied_to,
    )


# ---------------------------------------------------------------- lossless files


def _plan_lossless(given: Mapping[str, Any], target: Path) -> Compression:
    """Plan to code the files of a model against those of its base."""
    asked = Request.of(**given, method=find_stage(adds_up=True).name)
    recipe, options = asked.recipe, asked.options
    (entry,) = recipe.models
    places = [resolve(path, verbose=options.verbose).path for path in (recipe.base, entry.file)]
    base, model = (_open_files(path) for path in places)
    configs = [read_config(path) for path in places]
    # the base under the model's names
    known = {"base_config": configs[1], "model_config": configs[0]}
    matched, notes = match_names(model, base, "base", **known)
    tensors = [_copied(info, matched) for _, info in sorted(model.tensors.items())]
    plan = Plan(
        recipe, model, (matched,), ("base",), tuple(tensors), (), (), None, notes, options=options
    )
    files = {
        file.name: _store_file("header", _read_header(file, header.data_start))
        for file, header in model.headers.items()
    }
    folders = [path if path.is_dir() else None for path in places]
    files |= _files_beside(*folders)
    if folders[1] is not None and (index := folders[1] / INDEX_NAME).exists():
        files[INDEX_NAME] = _store_file("whole", read_limited(index, MAX_INDEX_BYTES))

    def describe(records: Records) -> DeltaNotes:
        stored = {t.name: _coded_tensor(t, matched, records[t.name]) for t in tensors}
        return _make_notes(base, model, stored, files, scheme="lossless")

    return Compression(target, plan, code_lossless, describe, {"lossless": True}, files)


def _read_header(file: Path, nbytes: int) -> bytes:
    try:
        return read_beginning(file, nbytes)
    except OSError as error:
        raise InputError(f"{file}: cannot be read: {error.strerror or error}") from None


def _open_files(path: Path) -> FileSource:
    refuse_pipeline(path, "compress without loss")
    source = open_source(path)
    if is_delta_file(source):
        raise InputError(f"{path}: is already a delta file; `dare apply` turns it into a model")
    return source


def _copied(info: TensorInfo, base: Source) -> TensorPlan:
    """Plan a tensor of the model, with the base's if it has the same type and shape."""
    other = base.tensors.get(info.name)
    is_like = other is not None and (other.dtype, other.shape) == (info.dtype, info.shape)
    models = (0,) if is_like else ()
    compared = Treatment(models, settings=((),) * len(models))
    return TensorPlan(info.name, Fate.COPIED, info.shape, info, info.dtype, compared)


def _coded_tensor(tensor: TensorPlan, base: Source, records: Sequence[Record]) -> StoredTensor:
    names = base.names if isinstance(base, RenamedSource) else {}
    base_name = names.get(tensor.name, tensor.name)
    return StoredTensor(
        shape=tensor.shape,
        dtype=tensor.dtype.name,
        model=tensor_digest(record.inputs[0] for record in records),
        base=tensor_digest(r.inputs[1] for r in records) if tensor.models else None,
        base_name=base_name if tensor.models and base_name != tensor.name else None,
    )


# ---------------------------------------------------------------- files beside the weights


def _files_beside(base: Path | None, model: Path | None) -> dict[str, tuple[StoredFile, bytes]]:
    """Return the model's other files, such as its tokenizer; those as in the base are empty."""
    files: dict[str, tuple[StoredFile, bytes]] = {}
    if model is None:
        return files
    for name in filter(lambda name: (model / name).is_file(), sorted(collect(model).files)):
        if not is_inside(name):
            raise InputError(f"{str(model / name)!r}: not a name on every system; rename the file")
        content = read_limited(model / name, MAX_FILE_BYTES)
        other = base / name if base else None
        has_same = other and other.is_file() and read_limited(other, MAX_FILE_BYTES) == content
        files[name] = _store_file("base" if has_same else "whole", content)
    return files


def _store_file(
    kind: Literal["header", "whole", "base"], content: bytes
) -> tuple[StoredFile, bytes]:
    """Return the description of a file, and its stored bytes."""
    coded = b"" if kind == "base" else pack(np.frombuffer(content, np.uint8), None, 1)
    digest = None if kind == "base" else bytes_digest(coded)
    file = StoredFile(kind=kind, size=len(content), digest=bytes_digest(content), coded=digest)
    return file, coded
