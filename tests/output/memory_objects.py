"""A store in memory that a test can break at any call."""

from __future__ import annotations

import hashlib
import itertools
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from dare.output.objects import Sent, Upload


class Killed(BaseException):
    """The process would be dead now."""


@dataclass
class MemoryObjects:
    """A bucket; what it holds stays when the process that writes to it is killed."""

    objects: dict[str, bytes] = field(default_factory=dict)
    marks: dict[str, str] = field(default_factory=dict)
    uploads: dict[str, dict[int, bytes]] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)
    dies_at: int | None = None
    """The number of the call that is the last one."""
    answers_are_lost: bool = False
    """Whether that call is carried out."""
    _numbers: Any = field(default_factory=itertools.count)
    _lock: Any = field(default_factory=threading.RLock)

    def __post_init__(self) -> None:
        for name in ("get", "put", "put_new", "mark_of", "age", "list", "delete"):
            setattr(self, name, self._breaking(name))
        for name in ("begin", "send", "sent", "complete", "abort"):
            setattr(self, name, self._breaking(name))

    def _breaking(self, name: str) -> Any:
        done = getattr(self, f"_{name}")

        def call(*given: Any, **named: Any) -> Any:
            with self._lock:
                self.calls.append(f"{name} {given[0] if isinstance(given[0], str) else ''}")
                left = None if self.dies_at is None else self.dies_at - len(self.calls)
                if left is not None and (left < 0 or (left == 0 and not self.answers_are_lost)):
                    raise Killed
                result = done(*given, **named)
                if left == 0:
                    raise Killed
                return result

        return call

    def revive(self) -> None:
        self.calls.clear()
        self.dies_at = None

    def describe(self, key: str) -> str:
        return f"s3://bucket/{key}"

    def _get(self, key: str) -> bytes | None:
        return self.objects.get(key)

    def _put(self, key: str, content: bytes) -> None:
        self.objects[key] = content
        self.marks.pop(key, None)

    def _put_new(self, key: str, content: bytes) -> bool:
        return self.objects.setdefault(key, content) is content

    def _mark_of(self, key: str) -> str | None:
        return self.marks.get(key, "") if key in self.objects else None

    def _age(self, key: str) -> float | None:
        return 0.0 if key in self.objects else None

    def _list(self, folder: str) -> list[str]:
        return [key for key in sorted(self.objects) if key.startswith(f"{folder}/")]

    def _delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            self.objects.pop(key, None)
            self.marks.pop(key, None)

    def _begin(self, key: str, mark: str) -> Upload:
        upload = Upload(key, f"upload {next(self._numbers)}", mark)
        self.uploads[upload.id] = {}
        return upload

    def _send(self, upload: Upload, number: int, content: bytes) -> str:
        self.uploads[upload.id][number] = content
        return _etag(content)

    def _sent(self, upload: Upload) -> dict[int, Sent] | None:
        parts = self.uploads.get(upload.id)
        if parts is None:
            return None
        return {number: Sent(_etag(part), len(part)) for number, part in parts.items()}

    def _complete(self, upload: Upload, parts: Mapping[int, str], *, new: bool) -> bool:
        if self.marks.get(upload.key) == upload.mark:
            return True
        if new and upload.key in self.objects:
            return False
        sent = self.uploads.pop(upload.id)
        assert {number: _etag(sent[number]) for number in parts} == dict(parts)
        self.objects[upload.key] = b"".join(sent[number] for number in sorted(parts))
        self.marks[upload.key] = upload.mark
        return True

    def _abort(self, upload: Upload) -> None:
        self.uploads.pop(upload.id, None)


def _etag(content: bytes) -> str:
    return f'"{hashlib.md5(content).hexdigest()}"'
