"""What a hub is not trusted with: names of files here, contents, endless time, and passwords.

The client makes file names of what a hub sends (commits, ETags, paths), keeps what it receives
without looking at it, and waits without end. So every answer is looked over before the client
sees it; a download is held against the digest that it was announced with; a hub that sends next to
nothing is given up; and credentials in an endpoint's address are taken out of all that is said.
"""

from __future__ import annotations

import hashlib
import logging
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from dare.errors import InputError
from dare.stores.locations import without_credentials

PATIENCE_SECONDS = 60.0
"""How long a hub may send less than `LEAST_BYTES` before it is given up."""
LEAST_BYTES = 1000
MAX_ANSWER_BYTES = 100_000_000
"""Of JSON: the list of a repository's files."""

_COMMIT = re.compile(r"[0-9a-f]{7,64}")
_DIGEST = re.compile(r"[0-9A-Za-z_.:+=-]{1,200}")
_HEADERS = {
    "x-repo-commit": _COMMIT,
    "etag": _DIGEST,
    "x-linked-etag": _DIGEST,
    "x-xet-hash": _DIGEST,
}
_KEYS = {"sha": _COMMIT, "oid": _DIGEST, "sha256": _DIGEST, "xetHash": _DIGEST}
_PIECE = 1 << 20

Result = TypeVar("Result")


# ---------------------------------------------------------------- what a hub says


def check_answer(response: Any) -> None:
    """Refuse an answer whose names would lead out of the cache, before the client uses them."""
    for header, form in _HEADERS.items():
        value = response.headers.get(header)
        if value is not None and not _fits(value.removeprefix("W/").strip('"'), form):
            raise InputError(
                f"the hub sent {value!a:.80} as {header}, which is not a valid {header}"
            )
    is_json = "json" in response.headers.get("content-type", "")
    if is_json and "/api/" in response.request.url.path:
        if int(response.headers.get("content-length", 0)) > MAX_ANSWER_BYTES:
            raise InputError(f"the hub sent a list of more than {MAX_ANSWER_BYTES} bytes")
        response.read()
        try:
            document = response.json()
        except (ValueError, RecursionError):
            return  # which the client says itself
        for key, value in _pairs(document):
            _check_pair(key, value)


def _fits(value: str, form: re.Pattern[str]) -> bool:
    return form.fullmatch(value) is not None and value not in (".", "..")


def _pairs(document: Any) -> Iterator[tuple[str, str]]:
    """The texts of a JSON document, each with its key."""
    left = [document]
    while left:
        here = left.pop()
        if isinstance(here, dict):
            yield from ((key, value) for key, value in here.items() if isinstance(value, str))
            left += here.values()
        elif isinstance(here, list):
            left += here


def _check_pair(key: str, value: str) -> None:
    is_path = key in ("path", "rfilename")
    if key in _KEYS and not _fits(value, _KEYS[key]):
        raise InputError(f"the hub sent {value!a:.80} as {key}, which is not valid")
    if is_path and (PurePosixPath(value).is_absolute() or ".." in PurePosixPath(value).parts):
        raise InputError(f"the hub lists {value!a:.80}, which is not a file inside the repository")


# ---------------------------------------------------------------- what a hub sends


def check_downloads(files: Iterable[Path], known: set[str]) -> None:
    """Hold files of the cache against the digests that the hub announced them with.

    The cache calls what it has received by its digest: SHA-256, or Git's for a small file. What
    was `known` there before is not read again. What does not fit is deleted.
    """
    for file in files:
        blob = file.resolve()
        if blob.name in known or blob.parent.name != "blobs" or not blob.is_file():
            continue
        if not _has_digest(blob):
            blob.unlink()
            file.unlink(missing_ok=True)
            raise InputError(
                f"{file.name}: the hub sent other bytes than it announced (digest "
                f"{blob.name}); they are deleted; run the command again"
            )


def _has_digest(blob: Path) -> bool:
    """Whether a file has the content that its name stands for, as far as that is a digest."""
    if re.fullmatch(r"[0-9a-f]{64}", blob.name):
        digest: Any = hashlib.sha256()
    elif re.fullmatch(r"[0-9a-f]{40}", blob.name):
        digest = hashlib.sha1(b"blob %d\0" % blob.stat().st_size, usedforsecurity=False)
    else:
        return True
    with blob.open("rb") as stream:
        while piece := stream.read(_PIECE):
            digest.update(piece)
    return bool(digest.hexdigest() == blob.name)


# ---------------------------------------------------------------- how long it may take


class Progress:
    """How much a hub has sent so far, as far as this process can see."""

    def __init__(self, cache: Path) -> None:
        self._cache = cache
        self._sent = 0

    def count(self, response: Any) -> None:
        """An answer has begun: count it, and what follows of it."""
        self._sent += LEAST_BYTES
        response.stream = self._counted(response.stream)

    def _counted(self, stream: Any) -> Any:
        progress = self

        class Counted(type(stream)):  # type: ignore[misc]
            """The same stream, which says how far it is."""

            def __init__(self) -> None:
                pass

            def __iter__(self) -> Iterator[bytes]:
                for piece in stream:
                    progress._sent += len(piece)
                    yield piece

            def close(self) -> None:
                stream.close()

        return Counted()

    def total(self) -> int:
        """Bytes that were seen here, and those that another library has put into the cache."""
        sizes = 0
        for file in self._cache.rglob("*"):
            try:
                sizes += file.lstat().st_size
            except OSError:  # just renamed
                continue
        return self._sent + sizes


def run_watched(
    work: Callable[[], Result], progress: Progress, give_up: Callable[[], None]
) -> Result:
    """Do work in a thread of its own; give up, with an error, if a hub stops sending."""
    outcome: list[Any] = []

    def do() -> None:
        try:
            outcome.extend((True, work()))
        except BaseException as error:
            outcome.extend((False, error))

    thread = threading.Thread(target=do, daemon=True)
    thread.start()
    seen, since = progress.total(), time.monotonic()
    while thread.is_alive():
        thread.join(min(1.0, PATIENCE_SECONDS / 4))
        sent = progress.total()
        if sent >= seen + LEAST_BYTES:
            seen, since = sent, time.monotonic()
        elif time.monotonic() - since > PATIENCE_SECONDS and thread.is_alive():
            give_up()
            raise InputError(
                f"the hub has sent almost nothing for {PATIENCE_SECONDS:g} s; check the "
                "network and run the command again (complete files are not fetched "
                "again), or set HF_HUB_OFFLINE=1 to use only the cache"
            )
    done, value = outcome
    if not done:
        raise value
    result: Result = value
    return result


@contextmanager
def guarded(session: Any, progress: Progress) -> Iterator[None]:
    """Look over every answer in the client's session, and all that it says, while this lasts."""
    hooks = session.event_hooks["response"]
    ours = [check_answer, progress.count]
    logger = logging.getLogger("huggingface_hub")
    hooks += ours
    for handler in logger.handlers:
        handler.addFilter(_redact)
    try:
        yield
    finally:
        for hook in ours:
            hooks.remove(hook)
        for handler in logger.handlers:
            handler.removeFilter(_redact)


def _redact(record: logging.LogRecord) -> bool:
    record.msg, record.args = without_credentials(record.getMessage()), ()
    return True
