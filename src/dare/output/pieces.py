"""An output whose parts have no size before they are made: coded chunks.

Each chunk goes to the end of a file of pieces in `OUT.partial/`, in the order in which chunks
become ready; the journal says where it lies. When all are there, the sizes are known, and they are
put together in their order. So the bytes do not depend on threads, and what an interrupted run
has coded is not coded again.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dare.output.journal import Record
from dare.output.publishing import sync_folder
from dare.output.writer import OutputFiles, PartialOutput
from dare.planning.layout import Layout
from dare.tensors.files import OutputFile

PIECES_NAME = "dare-pieces.bin"

Bytes = NDArray[np.uint8]


class PieceOutput(PartialOutput):
    """A file under way of which only the chunks are known; `assemble` it, then `finish`."""

    def __init__(
        self, target: Path, chunks: Mapping[str, int], *identity: str, resume: bool
    ) -> None:
        super().__init__(Layout(target, {}), {}, *identity, resume=resume)
        self._chunks = chunks
        """How many each tensor has."""
        self._appending = threading.Lock()
        self._pieces: OutputFile
        self._end = 0

    def _made_files(self) -> Collection[str]:
        return {PIECES_NAME}

    def _open_files(self) -> None:
        path = self.folder / PIECES_NAME
        self._end = path.stat().st_size if path.exists() else 0
        self._pieces = self._files.opened[PIECES_NAME] = OutputFile(path, self._end)

    def _is_expected(self, record: Record) -> bool:
        return bool(record.piece) and record.chunk in range(self._chunks.get(record.tensor, 0))

    def _read_chunk(self, record: Record) -> bytes:
        start, nbytes, _ = record.piece
        return self._pieces.read(start, nbytes)

    @property
    def size(self) -> int:
        """Bytes of the file, once it is put together."""
        ((header, placed),) = self._files.built.values()
        return len(header) + sum(info.nbytes for info in placed.values())

    def append(self, data: Bytes) -> int:
        """Store the parts of a chunk, one after the other; return where."""
        with self._appending:
            start = self._end
            self._end += data.size
        with self._explaining(self.folder / PIECES_NAME):
            self._pieces.write(data, start)
        return start

    def assemble(
        self,
        layout: Layout,
        metadata: Mapping[str, str],
        tensors: Mapping[str, Iterable[tuple[int, int] | bytes]],
    ) -> None:
        """Put each tensor together from pieces, told by place and size, or from bytes.

        `metadata` must be as long as what `finish` gets.
        """
        self.layout = layout
        self._files = OutputFiles(self.folder, layout, metadata, resumable=self._resume)
        ((name, (_, placed)),) = self._files.built.items()
        with self._explaining(self.folder / name):
            super()._open_files()
            self._check_free_space()
            for tensor, pieces in tensors.items():
                position = placed[tensor].start
                for piece in pieces:
                    data = piece if isinstance(piece, bytes) else self._pieces.read(*piece)
                    self._files.opened[name].write(data, position)
                    position += len(data)
                if position != placed[tensor].start + placed[tensor].nbytes:
                    raise AssertionError(f"{tensor}: its pieces do not add up to the planned size")

    def _clear_up(self) -> None:
        (self.folder / PIECES_NAME).unlink()
        sync_folder(self.folder)  # or else a power cut may bring it back when all is done

    def __exit__(self, kind: type[BaseException] | None = None, *error: object) -> None:
        if hasattr(self, "_pieces"):
            self._pieces.close()
        super().__exit__(kind, *error)
