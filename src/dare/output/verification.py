"""Check that an output is, bit for bit, what its manifest says."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import shlex
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from dare.documents.document import Document, Tone
from dare.documents.notices import Notice, notice
from dare.documents.shown import Shown, show_progress
from dare.documents.words import counted, show_size
from dare.errors import InputError, VerificationError
from dare.inputs.delta_files import DeltaFile, is_delta_file
from dare.inputs.directory import resolve_inside
from dare.inputs.hub import resolve
from dare.inputs.lora import looks_like as looks_like_adapter
from dare.inputs.shards import INDEX_NAME, SINGLE_NAME
from dare.inputs.signatures import FOLDER_SIGNATURE, PROBLEMS, check_signature, signature_path
from dare.inputs.sources import FileSource, Raw, open_source
from dare.output.receipt import METADATA_KEY, read_manifest
from dare.output.sidecars import CARD_NAME
from dare.output.targets import JOURNAL_NAME, MANIFEST_NAME, MARK_NAME, manifest_path, read_sealed
from dare.stores.locations import AnyPath, is_stored, to_path
from dare.tensors.chunks import (
    SEAL,
    UNKNOWN,
    bytes_digest,
    chunk_spans,
    file_digest,
    model_digest,
    tensor_digest,
)
from dare.tensors.files import is_there, read_beginning
from dare.tensors.header import Header, TensorInfo
from dare.tensors.system import available_cores

Manifest = Mapping[str, Any]

# Endings of files that people put beside a model, and that no program loads with it.
HARMLESS = {".md", ".png", ".jpg", ".jpeg", ".gif", ".svg", ".webp", ".pdf"}


@dataclass(frozen=True)
class Verification(Shown):
    """The outcome of checking an output."""

    path: Path
    problems: tuple[Notice, ...]
    tensors: int
    bytes_checked: int
    changed: tuple[Notice, ...] = ()
    """Changes that were probably made on purpose: to the card, or pictures next to it."""
    sha256: str | None = None
    """The SHA-256 of all tensors' bytes in order of name; merged models only, if asked for."""
    signed_by: str | None = None
    """The key or certificate that its signature fits, if one was asked for."""
    unchecked_signature: str | None = None
    """Its signature, if it has one and no signer was named, so that it was not checked."""

    @property
    def ok(self) -> bool:
        """True if everything is as the manifest says."""
        return not self.problems

    def to_dict(self) -> dict[str, Any]:
        """The outcome as plain values, ready for JSON."""
        return {"ok": self.ok, **asdict(self), "path": str(self.path)}

    def document(self) -> Document:
        """Return a document that says whether the output is as it was written."""
        checked = f"{counted(self.tensors, 'tensor')}, {show_size(self.bytes_checked)}"
        bad = "Not what was written" if self.tensors else "Cannot be verified"
        if not {problem.code for problem in self.problems} - PROBLEMS:
            bad = "Not as signed" if self.signed_by else "Not signed as asked"
        known = {"SHA-256 of the weights": self.sha256, "signed by": self.signed_by}
        if self.unchecked_signature is not None:
            how = f"dare verify {shlex.quote(str(self.path))} --signer PUBLIC_KEY_OR_CERTIFICATE"
            known["signature"] = f"{self.unchecked_signature} was not checked; to check it: {how}"
        return Document(
            title="Intact" if self.ok else bad,
            kind="verification",
            tone=Tone.GOOD if self.ok else Tone.POOR,
            lead=f"{checked}, {self.path}" if self.ok and self.tensors else str(self.path),
            facts=tuple((name, value) for name, value in known.items() if value is not None),
            notices=(*self.problems, *self.changed),
        )


def verify(
    path: AnyPath,
    *,
    verbose: bool = False,
    sha256: bool = True,
    signer: AnyPath | Sequence[AnyPath] = (),
) -> Verification:
    """Hash an output again and compare it with its manifest; `verbose` shows progress.

    `sha256` also computes the SHA-256 of a merged model's weights: of the bytes of all tensors in
    order of name, which any other program can also compute. This uses one core (up to 4.4 s for a
    gigabyte), everything else uses all. Raises VerificationError if there is no manifest.

    With `signer`, a public key or a certificate, or several, it must also have a signature of one
    of these that covers all its files; a model with one needs no manifest.
    """
    path = shown = to_path(path)
    if is_stored(path) and path.scheme == "hf":
        found = resolve(path, verbose=verbose)
        path, shown = found.path, found.pinned
    signers = [signer] if isinstance(signer, str | os.PathLike) else signer
    signed = check_signature(path, [to_path(each) for each in signers]) if signers else None
    try:
        outcome = _verify(path, verbose=verbose, sha256=sha256)
    except (InputError, VerificationError):
        if signed is None:
            raise
        outcome = Verification(path, (), 0, 0)
    if signed is None:
        place = None if is_stored(path) else signature_path(path)
        unchecked = str(place) if place is not None and place.is_file() else None
        return replace(outcome, path=shown, unchecked_signature=unchecked)
    problems = (*signed.problems, *outcome.problems)
    by = None if signed.signer is None else str(signed.signer)
    return replace(outcome, path=shown, problems=problems, signed_by=by)


def _verify(path: Path, *, verbose: bool, sha256: bool) -> Verification:
    whole_model = (path / SINGLE_NAME, path / INDEX_NAME)
    is_adapter = looks_like_adapter(path) and not any(map(is_there, whole_model))
    if is_adapter or _has_whole_digests(path):
        return _verify_files(path)
    source = open_source(path)
    if is_delta_file(source):
        return _verify_delta(path, source, verbose)
    problems: list[Notice] = []
    manifests = {
        file: _checked_manifest(file, header, problems) for file, header in source.headers.items()
    }
    nbytes = sum(info.nbytes for info in source.tensors.values())
    with show_progress(nbytes, "verifying", visible=verbose) as display:
        weights = hashlib.sha256() if sha256 else None
        digests = _digest_tensors(source, display.advance, weights)
    whole = model_digest((source.tensors[name], digest) for name, digest in digests.items())
    for file, manifest in manifests.items():
        expected = manifest.get("output")
        if expected not in (whole, UNKNOWN):  # it is unknown in shards written to a store
            problems.append(notice("other_digest", str(file), found=whole, expected=expected))
    embedded = next(iter(manifests.values()), {})
    changed: list[Notice] = []
    try:
        beside = manifest_path(path)
        if not beside.exists() and path.is_dir():
            problems.append(notice("no_manifest", beside.name))
        elif beside.exists():
            manifest = read_manifest(beside)
            problems += _compare_weights(beside, manifest, digests, embedded, ok=not problems)
            if path.is_dir():
                problems += _compare_files(path, manifest, set(source.headers), changed)
    except (InputError, KeyError, TypeError, AttributeError, ValueError, OSError) as error:
        problems.append(notice("unreadable", error=error))
    total = None if weights is None else weights.hexdigest()
    return Verification(path, tuple(problems), len(digests), nbytes, tuple(changed), total)


def _has_whole_digests(path: Path) -> bool:
    """Tell whether a model was restored or recoded, so that its manifest has digests of files."""
    try:
        return not {"restored", "recoded"}.isdisjoint(read_sealed(manifest_path(path)))
    except InputError:
        return path.suffix == ".gguf" and is_there(path)  # it has no other manifest


def _verify_files(path: Path) -> Verification:
    """Verify a model whose manifest has digests of whole files, unlike a plain merge's."""
    manifest = manifest_path(path)
    if not manifest.exists():
        raise VerificationError(f"{path}: was not made by dare; it has no {MANIFEST_NAME}")
    problems: list[Notice] = []
    changed: list[Notice] = []
    tensors = nbytes = 0
    try:
        document = read_sealed(manifest)
        if "recoded" in document:
            tensors = len(document["digests"]["output"])
            nbytes = int(document["report"]["bytes_written"])
        else:
            sizes = [info.nbytes for info in open_source(path).tensors.values()]
            tensors, nbytes = len(sizes), sum(sizes)
        if path.is_dir():
            problems += _compare_files(path, document, set(), changed)
        elif document["files"].get(path.name) != file_digest(path):
            problems.append(notice("changed", path.name))
    except (InputError, KeyError, TypeError, AttributeError, ValueError, OSError) as error:
        problems.append(notice("unreadable", error=error))
    return Verification(path, tuple(problems), tensors, nbytes, tuple(changed))


def _verify_delta(path: Path, source: FileSource, verbose: bool) -> Verification:
    """Verify a delta file, which contains the digests of its chunks."""
    problems: list[Notice] = []
    nbytes = sum(info.nbytes for info in source.tensors.values())
    tensors = 0
    try:
        file = DeltaFile(source)
        tensors = len(file.notes.tensors)
        for name in (name for name, held in file.notes.files.items() if held.kind != "base"):
            file.read_file(name)
        chunks = [(n, chunk) for n, pieces in file.pieces.items() for chunk in range(len(pieces))]
        with source, show_progress(nbytes, "verifying", visible=verbose) as display:

            def problem(place: tuple[str, int]) -> Notice | None:
                try:
                    parts = file.read_parts(*place)
                except InputError as error:
                    return notice("unreadable", error=error)
                display.advance(sum(part.nbytes for part in parts))
                return None

            with ThreadPoolExecutor(available_cores()) as pool:
                problems += filter(None, pool.map(problem, chunks))
        manifest = manifest_path(file.path)
        if manifest.exists() and not problems:
            written = read_sealed(manifest)["files"]
            if list(written.values()) != [file_digest(file.path)]:  # both may have a new name
                problems.append(notice("other_manifest", str(manifest), file=file.path.name))
    except InputError as error:
        problems.append(notice("unreadable", error=error))
    return Verification(path, tuple(problems), tensors, nbytes)


def _checked_manifest(file: Path, header: Header, problems: list[Notice]) -> Manifest:
    """Read the manifest in a file's header and check the header against it."""
    if METADATA_KEY not in header.metadata:
        raise VerificationError(f"{file}: was not made by dare; its header has no manifest")
    try:
        manifest = json.loads(header.metadata[METADATA_KEY])
        check = manifest[SEAL].encode()
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
        problems.append(notice("damaged_header", str(file)))
        return {}
    raw = read_beginning(file, header.data_start)
    if bytes_digest(raw.replace(check, UNKNOWN.encode(), 1)) != check.decode():
        problems.append(notice("damaged_header", str(file)))
    return dict(manifest)


def _digest_tensors(
    source: FileSource, advance: Callable[[int], None], weights: Any | None
) -> dict[str, str]:
    """Return the digest of every tensor; chunks are read in threads, and added to `weights`."""

    def read_chunk(info: TensorInfo, start: int, count: int) -> tuple[str, str, Raw]:
        raw = np.empty(count, info.dtype.carrier)
        source.read(info.name, start, raw)
        digest = bytes_digest(raw.data)
        advance(raw.nbytes)
        return info.name, digest, raw

    infos = sorted(source.tensors.values(), key=lambda info: info.name.encode())
    chunks = ((info, *span) for info in infos for span in chunk_spans(info.elements))
    by_tensor: dict[str, list[str]] = {name: [] for name in source.tensors}
    cores = available_cores()
    with source, ThreadPoolExecutor(cores) as pool:
        reads = (pool.submit(read_chunk, *chunk) for chunk in chunks)
        waiting = deque(itertools.islice(reads, 2 * cores))  # the most that may run ahead
        while waiting:
            name, digest, raw = waiting.popleft().result()
            waiting.extend(itertools.islice(reads, 1))
            by_tensor[name].append(digest)
            if weights is not None:
                weights.update(raw.view(np.uint8).data)
    return {name: tensor_digest(digests) for name, digests in by_tensor.items()}


def _compare_weights(
    beside: Path, manifest: Manifest, digests: Mapping[str, str], embedded: Manifest, *, ok: bool
) -> Iterator[Notice]:
    """Compare with the manifest beside the weights, to find out which tensor is damaged."""
    if embedded.get("output") == UNKNOWN:
        embedded = {**embedded, **{key: manifest.get(key) for key in ("base", "models", "output")}}
    if ok and manifest.get("output") != embedded["output"]:
        yield notice("other_manifest", str(beside), file="the weights")
        return
    expected = manifest["digests"]["output"]
    for name in sorted(digests.keys() | expected.keys()):
        if name not in digests:
            yield notice("missing", name)
        elif name not in expected:
            yield notice("not_in_manifest", name)
        elif digests[name] != expected[name]:
            yield notice("changed", name)
    for key, value in embedded.items():
        if key != SEAL and manifest.get(key) != value:
            yield notice("other_value", str(beside), key=key)


def _compare_files(
    folder: Path, manifest: Mapping[str, Any], weights: Set[Path], changed: list[Notice]
) -> Iterator[Notice]:
    """Compare the files beside the weights; add changes that are likely intended to `changed`."""
    expected: Mapping[str, str] = manifest["files"]
    beside = [name for name in expected if folder / name not in weights]  # compared by tensor
    places = {name: resolve_inside(folder, name) for name in beside}  # before any is opened
    for name, path in places.items():
        digest = expected[name]
        if not path.is_file():
            yield notice("missing", name)
        elif file_digest(path) != digest and name == CARD_NAME:
            changed.append(notice("changed_beside", name, done="changed"))
        elif file_digest(path) != digest:
            yield notice("changed", name)
    ours = {*expected, MANIFEST_NAME, MARK_NAME, JOURNAL_NAME, FOLDER_SIGNATURE}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if name in ours or path.is_dir() or name.startswith(".") or "/." in name:
            continue
        if path.suffix.lower() in HARMLESS:
            changed.append(notice("changed_beside", name, done="added"))
        else:
            yield notice("not_ours", name)
