"""From a lossless delta file and its base back to the files of the model."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from dare import __version__
from dare.deltas.reports import Restoration
from dare.documents.shown import show_progress
from dare.errors import InputError, OutputError, VerificationError
from dare.inputs.delta_files import DeltaFile, DeltaSource, is_delta_file
from dare.inputs.hub import resolve
from dare.inputs.sources import open_source
from dare.output.journal import Record, group_by_tensor
from dare.output.manifest import portable_path
from dare.output.publishing import clear_leftovers
from dare.output.targets import JOURNAL_NAME, MANIFEST_NAME, MARK_NAME, check_target
from dare.output.writer import PartialOutput
from dare.planning.data import Fate, Layout, TensorPlan, is_directory_target
from dare.planning.plan import Plan
from dare.recipe.recipe import Recipe
from dare.run.execute import confirm_inputs, execute
from dare.stages import find_stage
from dare.stores.locations import to_path
from dare.tensors.chunks import bytes_digest, tensor_digest
from dare.tensors.header import METADATA, Header, TensorInfo, parse_header

AnyPath = str | PathLike[str]


@dataclass(frozen=True)
class RestoredLayout(Layout):
    """The files of a model as they were, whose headers are known already."""

    headers: Mapping[str, tuple[bytes, Header]]

    def build(self, metadata: Mapping[str, str]) -> dict[str, tuple[bytes, dict[str, TensorInfo]]]:
        del metadata  # these files have their own
        return {name: (text, dict(header.tensors)) for name, (text, header) in self.headers.items()}

    def index(self) -> None:
        """The model's own is among the files that lie beside the weights."""


def open_delta(path: AnyPath) -> DeltaFile:
    """Read what a delta file says of itself, and check that."""
    stored = open_source(resolve(to_path(path), verbose=False).path)
    if not is_delta_file(stored):
        raise InputError(f"{path}: is not a delta file; `dare compress` makes one")
    return DeltaFile(stored)


def restore(
    base: AnyPath,
    file: DeltaFile,
    output: Path,
    *,
    overwrite: bool = False,
    resume: bool = True,
    verbose: bool = True,
    **settings: Any,
) -> Restoration:
    """Write the files of a model again, from a lossless delta file and its base."""
    started = time.perf_counter()
    recipe = Recipe(
        base=base,
        models=[file.path],
        output=output,
        method=find_stage(adds_up=True).name,
        verbose=verbose,
        **settings,
    )
    home = resolve(recipe.base, verbose=verbose).path
    source = DeltaSource(file, open_source(home))
    layout = _layout(file, output)
    tensors = tuple(
        TensorPlan(info.name, Fate.COPIED, info.shape, info, info.dtype, (), (), (), {})
        for info in source.tensors.values()
    )
    plan = Plan(recipe, source, (), (), tensors, (), (), layout)
    clear_leftovers(layout)
    check_target(layout, [*source.files, *source.base.files], overwrite=overwrite)
    fingerprint = bytes_digest(f"{__version__} {file.notes.to_json()}".encode())
    how = {"resume": resume, "overwrite": overwrite}
    with (
        PartialOutput(layout, {}, fingerprint, plan.stamps, **how) as partial,
        show_progress(plan.cost.bytes_read, "restoring", visible=verbose) as display,
    ):
        confirm_inputs(plan, partial, display)
        records = execute(plan, partial, done=partial.resumed, progress=display.advance)
        _check(file, records)
        if layout.is_directory:
            with TemporaryDirectory() as folder:
                file.fill_folder(Path(folder), home if home.is_dir() else None)
                beside = {p.relative_to(folder).as_posix(): p for p in Path(folder).rglob("*")}
                partial.add_files({name: path for name, path in beside.items() if path.is_file()})
        report = Restoration(
            output=output,
            digest=file.notes.model,
            bytes_read=plan.cost.bytes_read,
            bytes_written=plan.cost.bytes_written,
            resumed_chunks=len(partial.resumed),
            seconds=time.perf_counter() - started,
        )
        manifest = {
            "restored": portable_path(file.path, output),
            "base": portable_path(recipe.base, output),
            "digests": {"base": file.notes.base, "model": file.notes.model},
            "versions": {"dare": __version__, "delta": file.notes.version},
            "report": report.to_dict(),
        }
        metadata: dict[str, dict[str, str]] = {name: {} for name in layout.files}
        partial.finish(metadata, manifest, digests_of_all=True)
    return report


def _layout(file: DeltaFile, output: Path) -> RestoredLayout:
    """The model's files, in a directory; a single one may get another name."""
    names = [name for name, stored in file.notes.files.items() if stored.kind == "header"]
    headers = {name: _header(file, name) for name in names}
    if not is_directory_target(output):
        if len(names) != 1:
            raise OutputError(f"{output}: there are {len(names)} weight files; give a directory")
        headers = {output.name: headers[names[0]]}
    files = {
        name: tuple((info.name, info.dtype, info.shape) for info in header.tensors.values())
        for name, (_, header) in headers.items()
    }
    if ours := {MANIFEST_NAME, MARK_NAME, JOURNAL_NAME} & file.notes.files.keys():
        raise file.damaged(f"{min(ours)} is not a file of a model")
    laid_out = [tensor for tensors in files.values() for tensor in tensors]
    expected = {(name, t.kind, t.shape) for name, t in file.notes.tensors.items()}
    if set(laid_out) != expected or len(laid_out) != len(expected):
        raise file.damaged("the headers of the model's files list different tensors")
    return RestoredLayout(output, files, headers)


def _header(file: DeltaFile, name: str) -> tuple[bytes, Header]:
    text = file.read_file(name)
    try:
        entries = json.loads(text[8:])
        ends = [int(e["data_offsets"][1]) for key, e in entries.items() if key != METADATA]
        is_whole = int.from_bytes(text[:8], "little") == len(text) - 8
    except (ValueError, OverflowError, RecursionError, TypeError, LookupError, AttributeError):
        is_whole = False
    if not is_whole:
        raise file.damaged(f"the header of {name} is not a safetensors header")
    return text, parse_header(text[8:], max(ends, default=0), f"{file.path}: {name}")


def _check(file: DeltaFile, records: Sequence[Record]) -> None:
    """Refuse to finish what is not the model, bit for bit."""
    found = group_by_tensor(records)
    for name, tensor in file.notes.tensors.items():
        if tensor_digest(record.output for record in found[name]) != tensor.model:
            raise VerificationError(
                f"{name}: the restored values are wrong, because {file.path} is for another base "
                f"(digest {file.notes.base}); give that base. Nothing was written"
            )
