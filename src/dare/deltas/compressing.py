"""From a base and a fine-tune of it to a delta file.

What is kept is what a merge of this one model would keep: plan, surveys and masks are those of a
stage that declares the same scheme, and only the last step differs. For a lossless file the plan
copies the model, with the base beside it.
"""

from __future__ import annotations

import glob
import itertools
import json
import shlex
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import numpy as np

from dare import __version__
from dare.checks.sample import sample_models
from dare.deltas.packing import Bits, Keep, Packer, Scheme, choose_scheme, code_lossless
from dare.deltas.reports import DeltaReport, make_report
from dare.documents.notices import LIMIT, Notice, notice
from dare.documents.progress import COMPILING, show_progress
from dare.documents.words import show_size
from dare.errors import InputError, MismatchError, OutputError, warn_caller
from dare.inputs.delta_files import (
    INDEX,
    KEY,
    MAX_FILE_BYTES,
    UNKNOWN,
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
from dare.inputs.directory import collect, read_config
from dare.inputs.hub import resolve
from dare.inputs.lora import LoraSource
from dare.inputs.names import match_names
from dare.inputs.opening import open_inputs
from dare.inputs.sources import (
    INDEX_NAME,
    MAX_INDEX_BYTES,
    FileSource,
    RenamedSource,
    Source,
    SourceView,
    open_source,
)
from dare.output.journal import JOURNAL_VERSION, Record, group_by_tensor
from dare.output.manifest import portable_path, without_folders
from dare.output.publishing import clear_leftovers
from dare.output.targets import check_target
from dare.output.writer import PieceOutput
from dare.planning.data import Fate, Layout, TensorPlan, lay_out
from dare.planning.make import make_plan
from dare.planning.plan import Plan
from dare.recipe.recipe import Recipe, TensorRule
from dare.run.execute import confirm_inputs, execute
from dare.run.worker import MakeCoder
from dare.stages import Stage, find_stage
from dare.stores.locations import to_path
from dare.tensors.chunks import bytes_digest, chunk_span, model_digest, tensor_digest
from dare.tensors.dtypes import STORAGE_TYPES
from dare.tensors.files import read_beginning, read_limited
from dare.tensors.header import MAX_METADATA, Described, TensorInfo
from dare.tensors.mask import MASK_VERSION, check_drop_rate
from dare.tensors.names import is_embedding
from dare.tensors.planes import pack

AnyPath = str | PathLike[str]
Records = Mapping[str, Sequence[Record]]  # by tensor, in order of their chunks


@dataclass(frozen=True)
class Compression:
    """The work for a delta file, of one kind or another."""

    plan: Plan  # its first input is what the chunks' first digests are of
    make_coder: MakeCoder
    describe: Callable[[Records], DeltaNotes]  # makes the header's notes when all chunks are coded
    settings: Mapping[str, Any]  # the user's settings, for the manifest
    files: Mapping[str, tuple[StoredFile, bytes]] = field(default_factory=dict)
    """The other files of the model's folder, and their coded bytes, if the base lacks them."""


def compress(
    base: AnyPath,
    model: AnyPath,
    output: AnyPath,
    *,
    drop_rate: float | None = None,
    seed: int = 42,
    bits: Bits | None = None,
    keep: Keep = "random",
    embedding_drop_rate: float | None = None,
    drop_rates: Mapping[str, float] | None = None,
    lossless: bool = False,
    overwrite: bool = False,
    resume: bool = True,
    verbose: bool = True,
    **settings: Any,
) -> DeltaReport:
    """Write a model as its change to a base, in a small part of its space.

    If neither a rate nor bits are given, they are those that keep most (docs/deltas-measured.md);
    the report says what the file takes and how far it is off. `drop_rates` are rates for the
    tensors whose names match a pattern (`*` and `?` as in a shell). `lossless` keeps all of the
    model, bit for bit. Other settings are those of a `Recipe` that say how inputs are read:
    `on_missing`, `on_extra`, `threads`, `max_memory`, `allow_pickle`.
    """
    started = time.perf_counter()
    target = to_path(output)
    if target.suffix != ".safetensors":
        raise OutputError(f"{target}: a delta file is one file; call it NAME.delta.safetensors")
    given = {"base": base, "models": [model], "verbose": verbose, **settings}
    if lossless:
        work = _plan_lossless(given)
    else:
        scheme = choose_scheme(drop_rate, bits, keep)
        work = _plan_lossy(given, scheme, seed, drop_rates or {}, embedding_drop_rate)
    plan = work.plan
    layout = Layout(target, {target.name: ()})
    clear_leftovers(layout)
    check_target(layout, plan.input_files, overwrite=overwrite)
    model_files = plan.base.files if lossless else plan.models[0].files
    model_bytes = sum(file.stat().st_size for file in model_files)
    chunks = {tensor.name: tensor.chunks for tensor in plan.tensors}
    identity, how = (_fingerprint(work), plan.stamps), {"resume": resume, "overwrite": overwrite}
    with (
        PieceOutput(target, chunks, *identity, **how) as partial,
        show_progress(plan.cost.bytes_read, "compressing", visible=verbose) as display,
    ):
        confirm_inputs(plan, partial, display)
        records = execute(
            plan,
            partial,
            done=partial.resumed,
            progress=display.advance,
            announce=lambda: display.announce(COMPILING),
            make_coder=work.make_coder,
        )
        header = _assemble(work, partial, group_by_tensor(records))
        report = make_report(
            header,
            records,
            output=target,
            bytes_read=plan.cost.bytes_read,
            bytes_written=partial.size,
            model_bytes=model_bytes,
            resumed_chunks=len(partial.resumed),
            seconds=time.perf_counter() - started,
            notes=plan.notes,
            warnings=plan.warnings,
        )
        report = replace(report, warnings=(*plan.warnings, *_size_and_error(report)))
        _finish(work, header, report, partial)
    if verbose:
        for warning in report.warnings:
            warn_caller(str(warning))
    return report


def _size_and_error(report: DeltaReport) -> Iterator[Notice]:
    if report.bytes_written > report.model_bytes:
        size, model_size = map(show_size, (report.bytes_written, report.model_bytes))
        yield notice("not_smaller", size=size, model_size=model_size)
    if report.weight_error > LIMIT.delta_file_error:
        yield notice("lossy", error=report.weight_error)


def _fingerprint(work: Compression) -> str:
    """Which file it is: what must be the same for the chunks of an earlier try to be of use."""
    plan = work.plan
    described = [
        [__version__, VERSION, JOURNAL_VERSION, dict(work.settings)],
        [source.fingerprint() for source in plan.sources],
        [[t.name, t.fate, t.models, list(itertools.chain(*t.settings))] for t in plan.tensors],
    ]
    return bytes_digest(json.dumps(described, sort_keys=True, default=str).encode())


def _assemble(work: Compression, output: PieceOutput, records: Records) -> DeltaNotes:
    """Put the pieces into their places; return what stands in the header, but for its check."""
    notes = work.describe(records)
    described: list[Described] = []
    pieces: dict[str, list[tuple[int, int] | bytes]] = defaultdict(list)
    rows: list[tuple[int, bytes]] = []
    for name in sorted(tensor.name for tensor in work.plan.tensors):
        stored = notes.tensors[name]
        parts = part_names(notes, name)
        kinds = [part_type(notes, part, stored) for part in parts]
        totals = [0] * len(parts)
        for record in records.get(name, ()):
            start, _, count = record.piece
            rows.append((count, bytes.fromhex(record.output)))
            sizes = part_sizes(notes, chunk_span(record.chunk, stored.elements)[1], count)
            for place, (part, kind, size) in enumerate(zip(parts, kinds, sizes, strict=True)):
                pieces[part].append((start, size * kind.itemsize))
                start += size * kind.itemsize
                totals[place] += size
        found = zip(parts, kinds, totals, strict=True)
        described += [(part, kind, (total,)) for part, kind, total in found if total]
    index = np.zeros((len(rows), 3), np.int64)
    index[:, 0] = [count for count, _ in rows]
    index[:, 1:] = np.frombuffer(b"".join(digest for _, digest in rows), np.int64).reshape(-1, 2)
    extras = {INDEX: index.tobytes()}
    described.append((INDEX, STORAGE_TYPES["I64"], index.shape))
    for name, (file, coded) in work.files.items():
        if file.kind != "base":
            extras[file_part(name)] = coded
            described.append((file_part(name), STORAGE_TYPES["U8"], (len(coded),)))
    notes = notes.model_copy(update={"index": bytes_digest(index.tobytes())})
    if len(json.dumps(_metadata(notes))) > MAX_METADATA:
        target, count = output.layout.target, len(notes.tensors)
        raise MismatchError(f"{target}: the model has {count} tensors, too many; split the model")
    layout = lay_out(output.layout.target, described, None)
    sources = {name: [extras[name]] if name in extras else pieces[name] for name, _, _ in described}
    output.assemble(layout, _metadata(notes), sources)
    return notes


def _metadata(notes: DeltaNotes) -> dict[str, str]:
    return {"format": "pt", KEY: notes.to_json()}


def _finish(work: Compression, notes: DeltaNotes, report: DeltaReport, output: PieceOutput) -> None:
    """Fill in the check of the header, write the manifest, and give the file its name."""
    layout, recipe = output.layout, work.plan.recipe
    known = [parent for path in recipe.paths for parent in (path, path.parent)]

    def portable(notices: Iterable[Notice]) -> tuple[Notice, ...]:
        return tuple(n.with_texts(lambda text: without_folders(text, known)) for n in notices)

    published = replace(report, notes=portable(report.notes), warnings=portable(report.warnings))
    ((name, (unchecked, _)),) = layout.build(_metadata(notes)).items()
    checked = notes.model_copy(update={"check": bytes_digest(unchecked)})
    (entry,) = recipe.models
    manifest = {
        "delta": dict(work.settings),
        "base": portable_path(recipe.base, layout.target),
        "model": portable_path(entry.file, layout.target),
        "digests": {"base": notes.base, "model": notes.model},
        "versions": {"dare": __version__, "delta": notes.version, "numpy": np.__version__},
        "report": published.to_dict(),
    }
    output.finish({name: _metadata(checked)}, manifest, digests_of_all=True)


def _make_notes(
    base: Source,
    model: Source,
    stored: dict[str, StoredTensor],
    files: Mapping[str, tuple[StoredFile, bytes]],
    **kind: Any,
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


# ---------------------------------------------------------------- what is kept of a change


def _plan_lossy(
    given: Mapping[str, Any],
    scheme: Scheme,
    seed: int,
    drop_rates: Mapping[str, float],
    embedding_drop_rate: float | None,
) -> Compression:
    """Pack what a scheme keeps; `given` are fields of a recipe."""
    method, stage = find_stage(adds_up=True).name, find_stage(keeps=scheme.keep)
    recipe, inputs = open_inputs(Recipe(**given, method=method, seed=seed))
    (model,), (entry,) = inputs.models, recipe.models
    _check_model(entry.file, model)
    rates = dict(drop_rates)
    if embedding_drop_rate is not None:
        embeddings = (glob.escape(name) for name in inputs.base.tensors if is_embedding(name))
        rates = {**dict.fromkeys(sorted(embeddings), embedding_drop_rate), **rates}
    files = _files_beside(*inputs.folders)
    rules = tuple(
        TensorRule(match=pattern, settings=_setting(stage, rate)) for pattern, rate in rates.items()
    )
    stages = {stage.name: _setting(stage, scheme.drop_rate)}
    method = f"{stage.name}+{recipe.method}"
    recipe = recipe.model_copy(update={"tensors": rules, "method": method, "stages": stages})
    whole = make_plan(recipe, inputs.base, inputs.models, inputs.names, inputs.notes)
    held = [t for t in whole.tensors if t.fate in (Fate.MERGED, Fate.COPIED)]
    coded = [t for t in held if t.tied_to is None and t.name in model.tensors]
    tied = [t for t in held if t.tied_to is not None and t.name in model.tensors]
    plan = _with_notices(replace(whole, tensors=tuple(coded)))

    def describe(records: Records) -> DeltaNotes:
        stored = {t.name: _kept_tensor(t, model, records[t.key]) for t in (*coded, *tied)}
        kind = {"scheme": scheme.keep, "bits": scheme.bits, "drop_rate": scheme.drop_rate}
        if scheme.keep == "random":
            kind |= {"mask": MASK_VERSION, "seed": seed}
        return _make_notes(inputs.base, model, stored, files, **kind)

    settings = {
        "keep": scheme.keep,
        "drop_rate": scheme.drop_rate,
        "bits": scheme.bits,
        "seed": seed,
        "drop_rates": rates,
    }
    return Compression(plan, partial(Packer, scheme), describe, settings, files)


def _with_notices(plan: Plan) -> Plan:
    """The plan with what is amiss, and a word if the change had better be kept as a LoRA."""
    sample = sample_models(plan, finds_rank=True)
    notices = [found for found in sample.notices if found.code != "low_rank"]
    (rank,), (entry,) = sample.low_ranks, plan.recipe.models
    if rank is not None:
        command = ["dare", "lora", "extract", "--base", str(plan.recipe.base)]
        command += ["--model", str(entry.file), "--output", f"{entry.name}-lora"]
        extract = shlex.join([*command, "--rank", str(rank)])
        notices.append(notice("fits_lora", str(entry.file), rank=rank, command=extract))
    return replace(plan, warnings=(*plan.warnings, *notices))


def _setting(stage: Stage, drop_rate: float) -> dict[str, float]:
    rate = check_drop_rate(drop_rate)
    return {"drop_rate": rate} if "drop_rate" in stage.parameters else {"keep_ratio": 1.0 - rate}


def _check_model(path: Path, model: Source) -> None:
    inner = model
    while isinstance(inner, SourceView) and not isinstance(inner, DeltaSource | LoraSource):
        inner = inner.inner
    if isinstance(inner, DeltaSource):
        raise InputError(f"{path}: is already a delta file; `dare apply` turns it into a model")
    if isinstance(inner, LoraSource):
        raise InputError(f"{path}: is already stored as an adapter, which is small; keep it")


def _kept_tensor(tensor: TensorPlan, model: Source, records: Sequence[Record]) -> StoredTensor:
    rate = 0.0
    if tensor.is_merged:
        settings = tensor.settings[0][0]
        rate = settings["drop_rate"] if "drop_rate" in settings else 1.0 - settings["keep_ratio"]
    return StoredTensor(
        shape=tensor.shape,
        dtype=model.tensors[tensor.name].dtype.name,
        model=tensor_digest(record.inputs[-1] for record in records),
        base=tensor_digest(record.inputs[0] for record in records),
        drop_rate=rate,
        tied_to=tensor.tied_to,
    )


# ---------------------------------------------------------------- all of a model


def _plan_lossless(given: Mapping[str, Any]) -> Compression:
    """Code the files of a model against those of its base."""
    recipe = Recipe(**given, method=find_stage(adds_up=True).name)
    (entry,) = recipe.models
    places = [resolve(path, verbose=recipe.verbose).path for path in (recipe.base, entry.file)]
    base, model = (_open_files(path) for path in places)
    configs = [read_config(path) for path in places]
    # the base under the model's names
    known = {"base_config": configs[1], "model_config": configs[0]}
    matched, notes = match_names(model, base, "base", **known)
    tensors = [_copied(info, matched) for _, info in sorted(model.tensors.items())]
    plan = Plan(recipe, model, (matched,), ("base",), tuple(tensors), (), (), None, notes)
    files = {
        file.name: _described("header", read_beginning(file, header.data_start))
        for file, header in model.headers.items()
    }
    folders = [path if path.is_dir() else None for path in places]
    files |= _files_beside(*folders)
    if folders[1] is not None and (index := folders[1] / INDEX_NAME).exists():
        files[INDEX_NAME] = _described("whole", read_limited(index, MAX_INDEX_BYTES))

    def describe(records: Records) -> DeltaNotes:
        stored = {t.name: _coded_tensor(t, matched, records[t.name]) for t in tensors}
        return _make_notes(base, model, stored, files, scheme="lossless")

    return Compression(plan, code_lossless, describe, {"lossless": True}, files)


def _open_files(path: Path) -> FileSource:
    source = open_source(path)
    if is_delta_file(source):
        raise InputError(f"{path}: is already a delta file; `dare apply` turns it into a model")
    return source


def _copied(info: TensorInfo, base: Source) -> TensorPlan:
    """A tensor of the model, and the base's where that is of the same type and shape."""
    other = base.tensors.get(info.name)
    is_like = other is not None and (other.dtype, other.shape) == (info.dtype, info.shape)
    models = (0,) if is_like else ()
    given, kind = ((),) * len(models), info.dtype
    return TensorPlan(info.name, Fate.COPIED, info.shape, info, kind, models, given, (), {})


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


# ---------------------------------------------------------------- what lies beside the weights


def _files_beside(base: Path | None, model: Path | None) -> dict[str, tuple[StoredFile, bytes]]:
    """Configuration and tokenizer of a model, and which of them are as in the base."""
    files: dict[str, tuple[StoredFile, bytes]] = {}
    if model is None:
        return files
    for name in filter(lambda name: (model / name).is_file(), sorted(collect(model).files)):
        if not is_inside(name):
            raise InputError(f"{str(model / name)!r}: not a name on every system; rename the file")
        content = read_limited(model / name, MAX_FILE_BYTES)
        other = base / name if base else None
        has_same = other and other.is_file() and read_limited(other, MAX_FILE_BYTES) == content
        files[name] = _described("base" if has_same else "whole", content)
    return files


def _described(
    kind: Literal["header", "whole", "base"], content: bytes
) -> tuple[StoredFile, bytes]:
    """The description of a file, and the stored bytes."""
    coded = b"" if kind == "base" else pack(np.frombuffer(content, np.uint8), None, 1)
    digest = None if kind == "base" else bytes_digest(coded)
    file = StoredFile(kind=kind, size=len(content), digest=bytes_digest(content), coded=digest)
    return file, coded
