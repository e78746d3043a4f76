"""Outputs in stores by obstore, which can neither send nor list single parts: `gs://` and `az://`.

Each part is an object of its own below `OUT.partial/parts/`. When all are there, they are read
again one after the other and sent as one object, which can be seen when it is complete. So what was
made is kept part by part, as in S3, and every byte goes to the store twice and comes back once.
"""

from __future__ import annotations

import time
import uuid
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

from dare.errors import OutputError
from dare.output.objects import GOES_ON, MARK, Sent, Upload
from dare.planning.parts import PART_BYTES, UPLOADS
from dare.stores import reading
from dare.stores.locations import StorePath

ABSENT = "{}: there is no such bucket or container; make it first"


class StagedObjects:
    """The objects of a bucket or container; parts are kept in a folder of it."""

    def __init__(self, folder: StorePath) -> None:
        self._root = f"{folder.scheme}://{folder.authority}"
        self._folder = folder.key
        with self._explaining(""):
            self._store = reading.connection(StorePath(f"{self._root}/x"))

    def describe(self, key: str) -> str:
        return f"{self._root}/{key}"

    # ------------------------------------------------------------ objects

    def get(self, key: str) -> bytes | None:
        with self._explaining(key):
            try:
                return bytes(self._store.get(key).bytes())
            except FileNotFoundError:
                return None

    def put(self, key: str, content: bytes) -> None:
        with self._explaining(key):
            self._store.put(key, content, use_multipart=False)

    def put_new(self, key: str, content: bytes) -> bool:
        with self._explaining(key):
            try:
                self._store.put(key, content, mode="create", use_multipart=False)
            except reading.taken():
                return self.get(key) == content  # our own, if an answer was lost
        return True

    def mark_of(self, key: str) -> str | None:
        with self._explaining(key):
            try:
                found = self._store.get(key, options={"head": True})
            except FileNotFoundError:
                return None
        return str(found.attributes.get(MARK, ""))

    def age(self, key: str) -> float | None:
        with self._explaining(key):
            try:
                stored: float = self._store.head(key)["last_modified"].timestamp()
            except FileNotFoundError:
                return None
        return time.time() - stored  # obstore does not tell the time of the store

    def list(self, folder: str) -> list[str]:
        return [entry["path"] for entry in self._entries(folder)]

    def _entries(self, folder: str) -> Sequence[Any]:
        with self._explaining(folder):
            return [entry for some in self._store.list(folder) for entry in some]

    def delete(self, keys: Iterable[str]) -> None:
        named = list(keys)
        if not named:
            return
        with self._explaining(named[0]):
            try:
                self._store.delete(named)
            except FileNotFoundError:  # one of them is not there; the others may be
                for key in named:
                    with suppress(FileNotFoundError):
                        self._store.delete(key)

    # ------------------------------------------------------------ parts

    def begin(self, key: str, mark: str) -> Upload:
        return Upload(key, uuid.uuid4().hex, mark)

    def send(self, upload: Upload, number: int, content: bytes) -> str:
        key = f"{self._parts(upload)}/{number:05}"
        with self._explaining(key):
            return _etag(self._store.put(key, content, use_multipart=False))

    def sent(self, upload: Upload) -> dict[int, Sent]:
        return {
            int(entry["path"].rpartition("/")[2]): Sent(_etag(entry), entry["size"])
            for entry in self._entries(self._parts(upload))
        }

    def complete(self, upload: Upload, parts: Mapping[int, str], *, new: bool) -> bool:
        found = self.mark_of(upload.key)
        if found != upload.mark:
            if new and found is not None:
                return False
            with self._explaining(upload.key):
                self._store.put(
                    upload.key,
                    self._contents(upload, parts),
                    attributes={MARK: upload.mark},
                    use_multipart=True,
                    chunk_size=PART_BYTES,
                    max_concurrency=UPLOADS,
                )
        self.abort(upload)
        return True

    def _contents(self, upload: Upload, parts: Mapping[int, str]) -> Iterator[bytes]:
        """The parts one after the other, the next read ahead; obstore cannot be asked in here."""
        with ThreadPoolExecutor(1) as pool:
            asked: deque[Future[bytes]] = deque()
            for number, etag in sorted(parts.items()):
                asked.append(pool.submit(self._read, f"{self._parts(upload)}/{number:05}", etag))
                if len(asked) > 1:
                    yield asked.popleft().result()
            for last in asked:
                yield last.result()

    def _read(self, key: str, etag: str) -> bytes:
        with self._explaining(key):
            answer = self._store.get(key)
            if _etag(answer.meta) != etag:
                raise OutputError(
                    f"{self.describe(key)}: has changed since it was stored; {GOES_ON}"
                )
            return bytes(answer.bytes())

    def abort(self, upload: Upload) -> None:
        self.delete(self.list(self._parts(upload)))

    def _parts(self, upload: Upload) -> str:
        return f"{self._folder}/parts/{upload.id}"

    @contextmanager
    def _explaining(self, key: str) -> Iterator[None]:
        try:
            yield
        except OutputError:
            raise
        except FileNotFoundError:
            raise OutputError(ABSENT.format(self.describe(key))) from None
        except Exception as error:
            text = reading.explain(StorePath(self.describe(key)), error)
            if "(404" in text:
                text = ABSENT.format(self.describe(key))
            raise OutputError(text) from None


def _etag(found: Mapping[str, Any]) -> str:
    return str(found["e_tag"]).strip('"')
