"""From a base and a fine-tune of it to a delta file."""

from __future__ import annotations

import itertools
import json
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from os import PathLike
from typing import Any

import numpy as np

from dare import __version__
from dare.deltas.jobs import Job, Records, lossless_job, lossy_job
from dare.deltas.packing import Bits, Keep, choose_scheme
from dare.deltas.reports import DeltaReport, make_report
from dare.documents.notices import LIMIT, Notice, notice
from dare.documents.progress import COMPILING, show_progress
from dare.documents.words import show_size
from dare.errors import MismatchError, OutputError, warn_caller
from dare.inputs.delta_files import file_part, part_names, part_sizes, part_type
from dare.inputs.delta_notes import INDEX, KEY, VERSION, DeltaNotes
from dare.output.journal import JOURNAL_VERSION, Record
from dare.output.pieces import PieceOutput
from dare.output.places import told, without_folders
from dare.output.publishing import settle
from dare.output.targets import check_target
from dare.planning.layout import Layout, lay_out
from dare.run.execute import execute, with_same_inputs
from dare.stores.locations import to_path
from dare.tensors.chunks import chunk_span
from dare.tensors.digest import bytes_digest
from dare.tensors.dtypes import STORAGE_TYPES
from dare.tensors.header import MAX_METADATA, Described

AnyPath = str | PathLike[str]


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
        job = lossless_job(given)
    else:
        scheme = choose_scheme(drop_rate, bits, keep)
        job = lossy_job(given, scheme, seed, drop_rates or {}, embedding_drop_rate)
    plan = job.plan
    layout = Layout(target, {target.name: ()})
    settle(layout)
    inputs = [file for source in (plan.base, *plan.models) for file in source.files]
    check_target(layout, inputs, overwrite=overwrite)
    model_files = plan.base.files if lossless else plan.models[0].files
    model_bytes = sum(file.stat().st_size for file in model_files)
    chunks = {tensor.name: tensor.chunks for tensor in plan.tensors}
    with (
        PieceOutput(target, chunks, _fingerprint(job), plan.stamps, resume=resume) as partial,
        show_progress(plan.cost.bytes_read, "compressing", visible=verbose) as display,
    ):
        if partial.doubtful:
            display.announce("comparing the inputs with those of the earlier run")
            partial.confirm(with_same_inputs(plan, partial.doubtful, lambda _nbytes: None))
        records = execute(
            plan,
            partial,
            done=partial.resumed,
            progress=display.advance,
            announce=lambda: display.announce(COMPILING),
            make_worker=job.make_worker,
        )
        header = _assemble(job, partial, _by_tensor(records))
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
            warnings=(*plan.warnings, *_too_large(partial.size, model_bytes)),
        )
        report = replace(report, warnings=(*report.warnings, *_lossy(report)))
        _finish(job, header, report, partial, overwrite=overwrite)
    if verbose:
        for warning in report.warnings:
            warn_caller(str(warning))
    return report


def _lossy(report: DeltaReport) -> Iterator[Notice]:
    if report.weight_error > LIMIT.delta_file_error:
        yield notice("lossy", error=report.weight_error)


def _too_large(nbytes: int, model_bytes: int) -> Iterator[Notice]:
    if nbytes > model_bytes:
        yield notice("not_smaller", size=show_size(nbytes), model_size=show_size(model_bytes))


def _fingerprint(job: Job) -> str:
    """Which file it is: what must be the same for the chunks of an earlier try to be of use."""
    plan = job.plan
    described = [
        [__version__, VERSION, JOURNAL_VERSION, dict(job.settings)],
        [source.fingerprint() for source in (plan.base, *plan.models)],
        [[t.name, t.fate, t.models, list(itertools.chain(*t.settings))] for t in plan.tensors],
    ]
    return bytes_digest(json.dumps(described, sort_keys=True, default=str).encode())


def _by_tensor(records: Sequence[Record]) -> Records:
    found: dict[str, list[Record]] = defaultdict(list)
    for record in sorted(records, key=lambda record: (record.tensor, record.chunk)):
        found[record.tensor].append(record)
    return found


def _assemble(job: Job, output: PieceOutput, records: Records) -> DeltaNotes:
    """Put the pieces into their places; return what stands in the header, but for its check."""
    notes = job.describe(records)
    described: list[Described] = []
    pieces: dict[str, list[tuple[int, int] | bytes]] = defaultdict(list)
    rows: list[tuple[int, bytes]] = []
    for name in sorted(tensor.name for tensor in job.plan.tensors):
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
    for name, (file, coded) in job.files.items():
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


def _finish(
    job: Job, notes: DeltaNotes, report: DeltaReport, output: PieceOutput, *, overwrite: bool
) -> None:
    """Fill in the check of the header, write the manifest, and give the file its name."""
    layout, recipe = output.layout, job.plan.recipe
    known = [parent for path in recipe.paths for parent in (path, path.parent)]
    published = replace(
        report,
        notes=tuple(without_folders(note, known) for note in report.notes),
        warnings=tuple(
            replace(notice, text=without_folders(notice.text, known)) for notice in report.warnings
        ),
    )
    ((name, (unchecked, _)),) = layout.build(_metadata(notes)).items()
    checked = notes.model_copy(update={"check": bytes_digest(unchecked)})
    (entry,) = recipe.models
    manifest = {
        "delta": dict(job.settings),
        "base": told(recipe.base, layout.target),
        "model": told(entry.file, layout.target),
        "digests": {"base": notes.base, "model": notes.model},
        "versions": {"dare": __version__, "delta": notes.version, "numpy": np.__version__},
        "report": published.to_dict(),
    }
    output.finish({name: _metadata(checked)}, manifest, overwrite=overwrite, digests_of_all=True)
