"""Fine-tunes applied to a live model and removed again, bit for bit.

    math = dare.load_delta("math.delta.safetensors")
    math.apply_(model)     # now it is the fine-tune
    math.remove_(model)    # now it is the base again, bit for bit

A random delta keeps the base's values of the changed elements in memory while it is applied: at a
drop rate of 0.9 a tenth of the base. A lossless delta keeps nothing where the model was coded as a
difference, which is read again and subtracted as whole numbers, exactly.

Digests show whether a model is the base before anything is changed, and whether it is still as
`apply_` left it before anything is restored. So changes by others are never lost silently. Names
that share memory are refused, unless they are one tensor; written values are read again.
"""

from __future__ import annotations

import math
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from os import PathLike
from typing import Any, NamedTuple, TypeVar

import numpy as np

from dare import kernels
from dare.deltas.restoring import open_delta
from dare.errors import InputError
from dare.inputs.arrays import place_of
from dare.inputs.delta_files import AS_IN_BASE, DeltaFile, StoredTensor
from dare.inputs.sources import Raw
from dare.output.memory import WRITING, Memory, arrays_of, check_apart, memory_of, names_in
from dare.tensors.chunks import bytes_digest, chunk_count, chunk_span, tensor_digest
from dare.tensors.dtypes import StorageType
from dare.tensors.header import show_shape
from dare.tensors.names import some_of
from dare.tensors.planes import DIFFERENCE
from dare.tensors.system import available_cores

Item = TypeVar("Item")
Result = TypeVar("Result")


def load_delta(path: str | PathLike[str]) -> LiveDelta:
    """Open a delta file, to apply its fine-tune to a live model."""
    return LiveDelta(open_delta(path))


class LiveDelta:
    """A fine-tune that can be applied to a live model of its base, and removed again.

    A model is a torch module, or a dict of torch tensors or NumPy arrays. Its tensors must have the
    types that the base has in its files. They are changed in place: not between a forward and its
    backward pass, and not while another thread computes with them. Only one thread at a time
    applies or removes a delta; the others wait. The file stays open.
    """

    def __init__(self, file: DeltaFile) -> None:
        self.path = file.path
        self.notes = file.notes
        self._file = file
        # By a model's id: a reference to the model, and the saved chunks.
        self._applied: dict[int, tuple[Callable[[], Any], _Written]] = {}
        file.stored.__enter__()
        weakref.finalize(self, file.stored.__exit__)

    def __repr__(self) -> str:
        return f"LiveDelta({str(self.path)!r}, {self.notes.scheme}, bits={self.notes.bits})"

    # ------------------------------------------------------------ for users

    def apply_(self, model: Any) -> None:
        """Turn the base into the fine-tune, in place: the weights that `apply_delta` would write.

        A model that is not the base is refused. If anything fails, the base is put back.
        """
        written: _Written = {}

        def put(target: LiveTensor, chunk: int) -> None:
            written[target.name, chunk] = self._put(target, chunk)

        def put_back(target: LiveTensor, chunk: int) -> None:
            self._put_back(target, chunk, written[target.name, chunk])

        with WRITING:
            if self._find_written(model) is not None:
                already = "is already applied to this model; call remove_ first"
                raise InputError(f"{self.path}: {already}")
            targets = self._find_targets(model)
            self._check_is_base(targets)
            changed = [
                (target, chunk)
                for target in targets
                for chunk, piece in enumerate(self._file.pieces[target.tensor])
                if piece.kept != AS_IN_BASE
            ]
            try:
                _on_all_cores(put, changed)
                self._check_is_tuned(targets, written)
                self._applied[id(model)] = _reference(model), written
            except BaseException:
                _on_all_cores(put_back, [(t, n) for t, n in changed if (t.name, n) in written])
                raise

    def remove_(self, model: Any) -> None:
        """Put the base back, bit for bit, into a model that this delta was applied to.

        A model whose weights have changed since `apply_` is refused. The model may have been moved
        to another device.
        """
        with WRITING:
            written = self._find_written(model)
            if written is None:
                raise InputError(f"{self.path}: is not applied to this model; give the same object")
            targets = {target.name: target for target in self._find_targets(model)}
            self._check_is_unchanged(targets, written)

            def put_back(name: str, chunk: int) -> None:
                self._put_back(targets[name], chunk, written[name, chunk])
                del written[name, chunk]  # should another fail, this one is done

            _on_all_cores(put_back, list(written))
            del self._applied[id(model)]

    @contextmanager
    def applied(self, model: Any) -> Iterator[None]:
        """Apply the delta for the length of a `with` block."""
        self.apply_(model)
        try:
            yield
        finally:
            self.remove_(model)

    def _find_written(self, model: Any) -> _Written | None:
        """Return the chunks written into a model; forget those of models that are no more."""
        self._applied = {key: held for key, held in self._applied.items() if held[0]() is not None}
        return self._applied[id(model)][1] if id(model) in self._applied else None

    # ------------------------------------------------------------ what it may be applied to

    def _find_targets(self, model: Any) -> list[LiveTensor]:
        """Find the tensors of the fine-tune in a model, each piece of memory once."""
        arrays = arrays_of(model)
        stored = [tensor.base_name or name for name, tensor in self.notes.tensors.items()]
        names = names_in(arrays, stored)
        targets: dict[Any, LiveTensor] = {}
        seen: set[str] = set()
        lacking = []
        for name, tensor in self.notes.tensors.items():
            owner = tensor.tied_to or name
            if self._is_changed(owner) and tensor.base is None:
                lacking.append(name)
            found = names.get(tensor.base_name or name)
            if found is None or not tensor.elements:
                continue
            seen.add(owner)
            target = LiveTensor(found, owner, *memory_of(arrays[found], found))
            other = targets.setdefault(place_of(arrays[found]), target)
            if other.tensor != owner and not self._ask_for_the_same(other.tensor, owner):
                both = f"{other.tensor} and {owner} are one tensor in the model"
                raise InputError(f"{self.path}: {both} and two in the delta file; untie them")
        if lacking:
            absent = f"{some_of(lacking)} of that shape and type"
            raise InputError(f"{self.path}: the base has no {absent}; use `dare apply`")
        unseen = [name for name in self._file.pieces if name not in seen]
        if missing := list(filter(self._is_changed, unseen)):
            remedy = f"give the base (digest {self.notes.base})"
            raise InputError(f"{self.path}: the model has no {some_of(missing)}; {remedy}")
        changed = {target.name for target in targets.values() if self._is_changed(target.tensor)}
        check_apart(arrays, changed)
        return list(targets.values())

    def _is_changed(self, name: str) -> bool:
        return any(piece.kept != AS_IN_BASE for piece in self._file.pieces[name])

    def _ask_for_the_same(self, first: str, second: str) -> bool:
        """Tell whether two stored tensors ask for the same."""
        if not self._is_changed(first) and not self._is_changed(second):
            return True
        one, other = (self.notes.tensors[name] for name in (first, second))
        is_same = (one.base, one.model) == (other.base, other.model)
        return is_same and self.notes.scheme == "lossless"

    def _check_is_base(self, targets: list[LiveTensor]) -> None:
        """Refuse a model that is not the base, bit for bit."""
        digests = _digests(targets)
        wrong = []
        for target in targets:
            tensor = self.notes.tensors[target.tensor]
            if target.shape != tensor.shape:
                forms = show_shape(target.shape), show_shape(tensor.shape)
                wrong.append(f"{target.name} is {forms[0]}, not {forms[1]}")
            elif tensor_digest(digests[target.name]) != tensor.base:
                wrong.append(_difference(target, tensor))
        if wrong:
            raise InputError(
                f"{self.path}: the model is not the base that the delta was made for (digest "
                f"{self.notes.base}), or another delta is applied to it: {len(wrong)} of "
                f"{len(targets)} tensors differ, such as {wrong[0]}. Nothing was changed"
            )

    def _check_is_tuned(self, targets: list[LiveTensor], written: _Written) -> None:
        """Refuse a model that is not what was written into it, or not the fine-tune if lossless."""
        changed = [target for target in targets if self._is_changed(target.tensor)]
        digests = _digests(changed)
        wrong = {name for (name, chunk), w in written.items() if digests[name][chunk] != w.digest}
        if self.notes.scheme == "lossless":
            for target in changed:
                if tensor_digest(digests[target.name]) != self.notes.tensors[target.tensor].model:
                    wrong.add(target.name)
        if wrong:
            raise InputError(
                f"{self.path}: {some_of(sorted(wrong))} did not become the fine-tune's: the file "
                "is damaged, or something else writes to the model. The base's were put back"
            )

    def _check_is_unchanged(self, targets: Mapping[str, LiveTensor], written: _Written) -> None:
        """Refuse a model that is not what `apply_` made of it."""

        def is_unchanged(name: str, chunk: int) -> bool:
            before = written[name, chunk]
            if name not in targets or targets[name].digest(chunk) != before.digest:
                return False
            if before.replaced is None:
                self._file.read_parts(targets[name].tensor, chunk)  # to see that it can be read
            return True

        kept = zip(written, _on_all_cores(is_unchanged, list(written)), strict=True)
        if changed := sorted({name for (name, _), is_same in kept if not is_same}):
            raise InputError(
                f"{self.path}: {some_of(changed)} changed since the delta was applied, by another "
                "delta (remove that first) or by training. Nothing was changed"
            )

    # ------------------------------------------------------------ chunks

    def _put(self, target: LiveTensor, chunk: int) -> WrittenChunk:
        """Write the fine-tune's elements of a chunk over the base's, and keep what removes them."""
        parts = self._file.read_parts(target.tensor, chunk)
        raw = target.read(chunk)
        if self.notes.scheme == "lossless":
            (blob,) = parts
            model = np.empty_like(raw)
            self._file.uncode(target.tensor, blob, raw, model)
            replaced = None if not blob.size or blob[0] == DIFFERENCE else raw.copy()
            raw[:] = model
        else:
            replaced = self._put_kept(target, chunk, parts, raw)
        target.write(chunk, raw)
        return WrittenChunk(replaced, bytes_digest(raw.view(np.uint8).data))

    def _put_kept(self, target: LiveTensor, chunk: int, parts: list[Raw], raw: Raw) -> Raw:
        """Do what a merge of this one model does; return the base's elements that were changed."""
        name = target.tensor
        tensor, kept = self.notes.tensors[name], self._file.pieces[name][chunk].kept
        lanes = self._file.lanes(name, chunk)
        factor = np.float32(1.0 / (1.0 - (tensor.drop_rate or 0.0)))
        saved = np.empty(kept, raw.dtype)
        run = kernels.load("cpu")
        if self.notes.bits == "native" and not tensor.drop_rate:
            saved[:] = raw  # all of it becomes the fine-tune's own elements
            run.add_to_base(parts[0], np.zeros(kept, np.float32), np.float32(1), raw)
        elif self.notes.bits == "native" and tensor.kind == target.kind:
            run.apply_packed(raw, parts[0], False, lanes, factor, raw, saved)
        else:
            change = self._file.kept_changes(kept, parts, raw, lanes)
            run.apply_packed(raw, change, True, lanes, factor, raw, saved)
        return saved

    def _put_back(self, target: LiveTensor, chunk: int, written: WrittenChunk) -> None:
        """Write the base's elements of a chunk over the fine-tune's."""
        raw, name = target.read(chunk), target.tensor
        if self.notes.scheme != "lossless":
            kernels.load("cpu").expand(written.replaced, self._file.lanes(name, chunk), raw)
        elif written.replaced is not None:
            raw[:] = written.replaced
        else:
            (blob,) = self._file.read_parts(name, chunk)
            change = np.empty_like(raw)
            self._file.uncode(name, blob, np.zeros_like(raw), change)
            whole = raw.view(f"u{raw.itemsize}")
            whole -= change.view(whole.dtype)
        target.write(chunk, raw)


class WrittenChunk(NamedTuple):
    """A chunk that was written, and the data that undo it."""

    replaced: Raw | None  # the base's elements that were changed; None if a difference is coded
    digest: str  # the digest of the whole chunk after writing


_Written = dict[tuple[str, int], WrittenChunk]  # by the model's name of a tensor, and chunk


def _difference(target: LiveTensor, tensor: StoredTensor) -> str:
    if target.kind == tensor.kind:
        return target.name
    types = f"{target.kind.name} in the model and {tensor.dtype} in the fine-tune"
    return f'{target.name}, which is {types} (load the base with dtype="auto")'


def _on_all_cores(
    work: Callable[[Item, int], Result], chunks: Iterable[tuple[Item, int]]
) -> list[Result]:
    """Do all in threads; after an error, when all threads have come to rest, raise the first."""
    with ThreadPoolExecutor(available_cores()) as pool:
        return list(pool.map(lambda chunk: work(*chunk), chunks))


# ---------------------------------------------------------------- places in a model


class LiveTensor(NamedTuple):
    """A tensor of a live model, and the stored tensor that goes into it."""

    name: str  # its name in the model
    tensor: str  # its name in the delta file
    kind: StorageType
    shape: tuple[int, ...]
    memory: Memory

    def read(self, chunk: int) -> Raw:
        """Return the elements of a chunk, or a copy of them."""
        return self.memory.read(*chunk_span(chunk, math.prod(self.shape)))

    def write(self, chunk: int, raw: Raw) -> None:
        """Put the elements of a chunk there."""
        self.memory.write(chunk_span(chunk, math.prod(self.shape))[0], raw)

    def digest(self, chunk: int) -> str:
        """Hash a chunk."""
        return bytes_digest(self.read(chunk).view(np.uint8).data)


def _digests(targets: Iterable[LiveTensor]) -> dict[str, list[str]]:
    """Return the digests of all chunks of some tensors, by the model's names."""
    chunks = [(t, chunk) for t in targets for chunk in range(chunk_count(math.prod(t.shape)))]
    digests = defaultdict(list)
    found = _on_all_cores(LiveTensor.digest, chunks)
    for (target, _), digest in zip(chunks, found, strict=True):
        digests[target.name].append(digest)
    return digests


def _reference(model: Any) -> Callable[[], Any]:
    """Return a weak reference to a model, or a strong one if that cannot be."""
    try:
        return weakref.ref(model)
    except TypeError:
        return lambda: model
