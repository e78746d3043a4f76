"""From a lossless delta file and its base back to the files of the model."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from dare import __version__
from dare.documents.document import Document, Tone
from dare.documents.shown import Shown, json_ready
from dare.documents.words import show_size
from dare.errors import InputError, OutputError, VerificationError
from dare.inputs.delta_files import DeltaFile, DeltaSource, is_delta_file
from dare.inputs.hub import resolve
from dare.inputs.signatures import require_signatures
from dare.inputs.sources import open_source
from dare.output.journal import Record, group_by_tensor
from dare.output.receipt import portable_path
from dare.output.targets import JOURNAL_NAME, MANIFEST_NAME, MARK_NAME
from dare.planning.data import Fate, Layout, TensorPlan, is_directory_target
from dare.planning.plan import Plan
from dare.recipe.recipe import ModelEntry, Request
from dare.run.engine import Receipt, Work, run
from dare.stages import find_stage
from dare.stores.locations import AnyPath, to_path
from dare.tensors.chunks import bytes_digest, tensor_digest
from dare.tensors.header import METADATA, Header, TensorInfo, parse_header


@dataclass(frozen=True)
class FileReport(Shown):
    """What a report of compressing or restoring has: the name of its file, but not the folder."""

    output: Path

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain values."""
        return {**asdict(self), "output": self.output.name}

    def to_json(self) -> str:
        """Return the report as JSON; a number that is not finite becomes a string."""
        document = {**self.to_dict(), "output": str(self.output)}
        return json.dumps(json_ready(document), indent=2, ensure_ascii=False)


@dataclass(frozen=True)
class Restoration(FileReport):
    """A model that was written again, bit for bit."""

    digest: str
    """The digest of its tensors, the same as in the delta file."""
    bytes_read: int
    bytes_written: int
    resumed_chunks: int
    seconds: float

    def document(self) -> Document:
        """Return that the model is there again."""
        return Document(
            title=f"Restored {show_size(self.bytes_written)} in {self.seconds:.1f} s",
            kind="delta file",
            tone=Tone.GOOD,
            lead="bit for bit",
            facts=(("digest", self.digest),),
            steps={"verify": f"dare verify {shlex.quote(str(self.output))}"},
            done=f"Wrote {self.output}",
        )


@dataclass(frozen=True)
class RestoredLayout(Layout):
    """The files of a model as they were, whose headers are known already."""

    headers: Mapping[str, tuple[bytes, Header]]

    def build(self, metadata: Mapping[str, str]) -> dict[str, tuple[bytes, dict[str, TensorInfo]]]:
        del metadata  # these files have their own
        return {name: (text, dict(header.tensors)) for name, (text, header) in self.headers.items()}

    def indexes(self) -> dict[str, bytes]:
        """Return none: the model's index is among the files beside the weights."""
        return {}


def open_delta(path: AnyPath) -> DeltaFile:
    """Read what a delta file says of itself, and check that."""
    stored = open_source(resolve(to_path(path), verbose=False).path)
    if not is_delta_file(stored):
        raise InputError(f"{path}: is not a delta file; `dare compress` makes one")
    return DeltaFile(stored)


def request_for(file: DeltaFile, path: AnyPath, **settings: Any) -> Request:
    """Return the request for a merge that makes a model of a delta file that is not lossless."""
    notes = file.notes
    entry = ModelEntry(file=path, seed=notes.seed)
    dropping, stages = find_stage(for_delta_files=True).name, {}
    method = f"{dropping}+{find_stage(adds_up=True).name}"
    if {tensor.drop_rate for tensor in notes.tensors.values()} == {notes.drop_rate}:
        stages = {dropping: {"drop_rate": notes.drop_rate}}
    has_files = any(f.kind != "header" for f in notes.files.values())
    copied = {"copy_from": entry.name if has_files else None}
    return Request.of(models=[entry], method=method, stages=stages, **copied, **settings)


def restore(
    file: DeltaFile, *, overwrite: bool = False, resume: bool = True, **settings: Any
) -> Restoration:
    """Write the files of a model again, from a lossless delta file and its base.

    Settings are those of a recipe, with the base and the output, and of a run.
    """
    method = find_stage(adds_up=True).name
    work = Restore(file, Request.of(models=[file.path], method=method, **settings))
    return run(work, overwrite=overwrite, resume=resume)


class Restore(Work[Restoration]):
    """The files of a model, as they were."""

    verb = "restoring"

    def __init__(self, file: DeltaFile, request: Request) -> None:
        recipe, options = request.recipe, request.options
        assert recipe.output is not None
        self._file = file
        self._home = resolve(recipe.base, verbose=options.verbose).path
        if options.require_signed:
            require_signatures([self._home, file.path], options.require_signed)
        self._source = DeltaSource(file, open_source(self._home))
        layout = _layout(file, recipe.output)
        tensors = tuple(
            TensorPlan(info.name, Fate.COPIED, info.shape, info, info.dtype)
            for info in self._source.tensors.values()
        )
        plan = Plan(recipe, self._source, (), (), tensors, (), (), layout, options=options)
        super().__init__(plan, layout, bytes_digest(file.notes.to_json().encode()), __version__)

    @property
    def inputs(self) -> Iterable[Path]:
        return [*self._source.files, *self._source.base.files]

    def conclude(self, records: Sequence[Record]) -> Receipt[Restoration]:
        file, cost, output = self._file, self.plan.cost, self.layout.target
        _check(file, records)
        report = Restoration(
            output=output,
            digest=file.notes.model,
            bytes_read=cost.bytes_read,
            bytes_written=cost.bytes_written,
            resumed_chunks=len(self.output.resumed),
            seconds=self.seconds,
        )
        manifest = {
            "restored": portable_path(file.path, output),
            "base": portable_path(self.plan.recipe.base, output),
            "digests": {"base": file.notes.base, "model": file.notes.model},
            "versions": {"dare": __version__, "delta": file.notes.version},
            "report": report.to_dict(),
        }
        if self.layout.is_directory:
            with TemporaryDirectory() as folder:
                file.fill_folder(Path(folder), self._home if self._home.is_dir() else None)
                beside = {p.relative_to(folder).as_posix(): p for p in Path(folder).rglob("*")}
                self.output.add_files({n: path for n, path in beside.items() if path.is_file()})
        return Receipt(report, {name: {} for name in self.layout.files}, manifest)


def _layout(file: DeltaFile, output: Path) -> RestoredLayout:
    """Return the layout of the model's files; a single one may get another name."""
    names = [name for name, stored in file.notes.files.items() if stored.kind == "header"]
    headers = {name: _header(file, name) for name in names}
    if not is_directory_target(output):
        if len(names) != 1:
            raise OutputError(f"{output}: there are {len(names)} weight files; give a folder")
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
