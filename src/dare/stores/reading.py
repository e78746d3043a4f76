"""Reading from stores: folders are listed, files are read in ranges.

obstore makes the requests, with its own retries: an answer of 429 or 5xx, a connection that breaks
or says nothing is tried again after a while. Requests run in threads of their own, many at a time.
A lasting failure becomes an InputError with a remedy. It never repeats a server's or a client's
text in full, which may hold signatures and keys.

Credentials are found as each store's own tools find them, in the environment or a profile.
"""

from __future__ import annotations

import atexit
import base64
import os
import re
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import unquote, urlsplit

from dare.errors import HeaderError, InputError, install_command, needed
from dare.stores.addresses import TABLES, Address, access_to

if TYPE_CHECKING:
    from concurrent.futures import Future

CONNECT_SECONDS = 10.0
PATIENCE_SECONDS = 30.0  # time that a server may send nothing before it is asked again
REQUEST_SECONDS = 300.0  # time that one answer may take as a whole
RETRIES = 5
RETRY_SECONDS = 120.0  # time after which nothing is tried again
MOST_REQUESTS = 64  # the most requests of this process at a time
END_SECONDS = 2.0  # time that the end of the process waits for requests that are under way
FIRST_BYTES = 1 << 17  # bytes of a file that the first request asks for: they hold most headers
# Time that the list of a folder, or the content of a small file, is remembered.
RECENT_SECONDS = 10.0
MOST_REMEMBERED_BYTES = 1 << 20  # the largest file that is remembered

# Ends of web addresses that are files, so that nothing is searched below them.
FILE_SUFFIXES = {*TABLES["files"]["suffixes"]}
# Names that are tried below a web address, since a web server cannot list a folder.
USUAL_NAMES: list[str] = TABLES["files"]["names"]

_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>(\w{1,60})</Code>")
_REGION = re.compile(r"(?:expecting '|<Region>)([a-z0-9-]{3,30})")
_RETRIED = re.compile(r"after (\d+) retries")
_METADATA = re.compile(r"//[^/]+/latest/(?:api/token|meta-data)")  # asked for a role
CREDENTIAL_PLACES = "the environment, the profiles in ~/.aws, or a role of this machine"

Result = TypeVar("Result")
# The entries of a folder by name: the size of a file, None for a folder.
Names = Mapping[str, int | None]
Stamp = tuple[Any, ...]


@dataclass(frozen=True)
class Answer:
    """Some bytes of an object, and which version of it they are from."""

    data: Any = field(repr=False)
    size: int  # the size of the whole object
    version: str  # its ETag, or when it was changed

    @property
    def stamp(self) -> Stamp:
        """The identity of the object's content."""
        return (self.size, self.version, "")


# ---------------------------------------------------------------- requests


class _Requests:
    """Threads that make requests, each one at a time.

    They are daemons, so that a server that hangs keeps no process from ending. obstore has calls
    for asyncio too, but those crash the interpreter if it ends at the wrong moment.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._threads = self._idle = self._process = 0

    def start(self, request: Callable[[], Result]) -> Future[Result]:
        """Run a request in a thread that keeps no process from ending."""
        from concurrent.futures import Future

        future: Future[Result] = Future()
        with self._changed:
            if self._process != os.getpid():  # a new process, or a copy of one without its threads
                self._threads, self._idle, self._process = 0, 0, os.getpid()
                self._waiting.clear()
                atexit.register(self._end)
            self._waiting.append((future, request))
            if self._idle < len(self._waiting) and self._threads < MOST_REQUESTS:
                self._threads += 1
                threading.Thread(target=self._work, name="dare-stores", daemon=True).start()
            self._changed.notify()
        return future

    def _work(self) -> None:
        while True:
            with self._changed:
                self._idle += 1
                self._changed.notify_all()
                while not self._waiting:
                    self._changed.wait()
                self._idle -= 1
                future, request = self._waiting.popleft()
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(request())
                except BaseException as error:
                    future.set_exception(error)
            del future, request

    def _end(self) -> None:
        """Wait for requests that are under way: none must return while Python ends."""
        with self._changed:
            self._waiting.clear()
            self._changed.wait_for(lambda: self._idle == self._threads, END_SECONDS)


in_background = _Requests().start

_stores: dict[Any, Any] = {}
_recent: dict[tuple[str, str], tuple[float, Any]] = {}
_first_answers: dict[str, Future[Answer]] = {}
_lock = threading.Lock()


def forget() -> None:
    """Forget connections and folders: something has changed."""
    with _lock:
        _stores.clear()
        _recent.clear()
        _first_answers.clear()


def _recall(kind: str, path: Address) -> Any:
    """Return what was found a moment ago; None if nothing was."""
    with _lock:
        since, found = _recent.get((kind, str(path)), (-RECENT_SECONDS, None))
    return found if time.monotonic() - since < RECENT_SECONDS else None


def _remember(kind: str, path: Address, found: Result) -> Result:
    """Remember for a moment what was found."""
    now = time.monotonic()
    with _lock:
        for old in [k for k, (since, _) in _recent.items() if now - since >= RECENT_SECONDS]:
            del _recent[old]
        _recent[kind, str(path)] = (now, found)
    return found


def _insist(path: Address, request: Callable[[], Result]) -> Result:
    """Make a request, and try again what obstore does not: a body that was not asked for."""
    from obstore.exceptions import GenericError

    for attempt in range(RETRIES + 1):
        try:
            return request()
        except FileNotFoundError:
            raise
        except Exception as error:
            text = str(error)
            is_passing = isinstance(error, GenericError) and "without LOCATION" not in text
            is_final = _STATUS.search(text) or _RETRIED.search(text) or not is_passing
            if is_final or attempt == RETRIES:
                raise explained(path, error) from None
        time.sleep(min(8.0, 0.1 * 2**attempt))
    raise AssertionError


def _request(path: Address, ask: Callable[[Any, Any, str], Result]) -> Future[Result]:
    """Have obstore, a client and a key asked in the background, with retries."""
    store, key = locate(path)
    import obstore

    return in_background(lambda: _insist(path, lambda: ask(obstore, store, key)))


# ---------------------------------------------------------------- connecting


def locate(path: Address) -> tuple[Any, str]:
    """Return the client for a place, and the place's name there."""
    place, access = access_to(path)
    if path.scheme == "hf" and not access.url:
        raise InputError(f"{path}: a model on the hub can only be read as a base or a model")
    root = access.url or f"{path.scheme}://{path.authority}"
    key = unquote(path.key) if path.store.is_web else path.key
    if access.url:
        key = path.relative_to(place).as_posix()
    headers = dict(access.headers)
    if access.password and "authorization" not in headers:
        coded = base64.b64encode(unquote(access.password).encode()).decode()
        headers["Authorization"] = f"Basic {coded}"
    url = f"{root}?{access.query}" if access.query else root
    known = (os.getpid(), path.scheme, url, tuple(sorted(headers.items())))
    with _lock:
        if known not in _stores:
            _stores[known] = _connect(path, url, headers)
        return _stores[known], "" if key == "." else key


def can_read() -> bool:
    """Tell whether obstore is installed."""
    return find_spec("obstore") is not None


def _connect(path: Address, url: str, headers: Mapping[str, str]) -> Any:
    needs = f"reading from a store needs obstore: {install_command('stores')}"
    with needed(InputError(f"{path}: {needs}")):
        from obstore import store
    options: dict[str, Any] = {
        "connect_timeout": timedelta(seconds=CONNECT_SECONDS),
        "read_timeout": timedelta(seconds=PATIENCE_SECONDS),
        "timeout": timedelta(seconds=REQUEST_SECONDS),
    }
    if urlsplit(url).scheme in ("http", "https") or _allows_http(path):
        options["allow_http"] = True
    if headers:
        options["default_headers"] = dict(headers)
    waits = {"init_backoff": timedelta(milliseconds=200), "max_backoff": timedelta(seconds=8)}
    retries = {
        "max_retries": RETRIES,
        "retry_timeout": timedelta(seconds=RETRY_SECONDS),
        "backoff": {**waits, "base": 2},
    }
    try:
        settings = _s3_settings() if path.store.speaks_s3 else {}
        connect: Any = store.from_url
        return connect(url, client_options=options, retry_config=retries, **settings)
    except Exception as error:
        raise explained(path, error) from None


def _allows_http(path: Address) -> bool:
    """Tell whether S3 may be asked without TLS: on this machine, or if that is allowed."""
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or ""
    if not path.store.speaks_s3 or not endpoint.startswith("http://"):
        return False
    host = urlsplit(endpoint).hostname or ""
    is_here = host in ("localhost", "::1") or re.fullmatch(r"127(\.\d{1,3}){3}", host)
    if is_here or os.environ.get("AWS_ALLOW_HTTP", "").lower() in ("1", "true", "yes"):
        return True
    raise InputError(
        f"{path}: the endpoint of S3 (AWS_ENDPOINT_URL) is http://{host}, where others can read "
        "keys and weights on the way; use https, or set AWS_ALLOW_HTTP=true"
    )


def _s3_settings() -> dict[str, Any]:
    """Return the settings that only boto3 finds, if it is there: a profile, a role, no account."""
    given = os.environ.keys()
    settings: dict[str, Any] = {}
    if endpoint := os.environ.get("AWS_ENDPOINT_URL_S3"):
        settings["endpoint"] = endpoint
    keys = {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"}
    has_keys = keys <= given and "AWS_PROFILE" not in given
    if has_keys or "AWS_SKIP_SIGNATURE" in given or find_spec("boto3") is None:
        return settings
    import boto3  # type: ignore[import-untyped]

    session = boto3.Session()
    if session.region_name:
        settings["region"] = session.region_name
    if session.get_credentials() is None:
        return settings | {"skip_signature": True}
    from obstore.auth.boto3 import Boto3CredentialProvider

    return settings | {"credential_provider": Boto3CredentialProvider(session)}


# ---------------------------------------------------------------- reading


def ask_range(path: Address, begin: int, end: int) -> Future[Answer]:
    """Request some bytes of an object, which begin inside it; fewer come if it ends before."""

    def get(obstore: Any, store: Any, key: str) -> Answer:
        result = obstore.get(store, key, options={"range": (begin, end)})
        data = memoryview(result.bytes())
        meta = result.meta
        version = meta["e_tag"] or meta["version"] or meta["last_modified"].isoformat()
        answer = Answer(data, meta["size"], str(version))
        if len(data) != min(end, answer.size) - begin:
            raise ValueError(f"{len(data)} bytes came instead of {end - begin}")
        return answer

    return _request(path, get)


def prefetch_first_bytes(paths: Iterable[Address]) -> None:
    """Request the first bytes of files that will be opened."""
    for path in paths:
        asked = ask_range(path, 0, FIRST_BYTES)
        with _lock:
            _first_answers[str(path)] = asked


def read_first_bytes(path: Address) -> Answer:
    """Read the first bytes of a file; FileNotFoundError if there is none."""
    with _lock:
        asked = _first_answers.pop(str(path), None)
    try:
        return (asked or ask_range(path, 0, FIRST_BYTES)).result()
    except InputError as error:
        if "(416)" in str(error) and (size := _ask_size(path)) == 0:
            return Answer(b"", size, "empty")
        raise


def read_small(path: Address, most_bytes: int) -> bytes:
    """Read the content of a small file; FileNotFoundError if there is none."""

    def get(obstore: Any, store: Any, key: str) -> bytes:
        result = obstore.get(store, key)
        if result.meta["size"] > most_bytes:
            raise HeaderError(f"{path}: larger than {most_bytes} bytes")
        return bytes(result.bytes())

    content: bytes | None = _recall("content", path)
    if content is None:
        content = _request(path, get).result()
        if len(content) <= MOST_REMEMBERED_BYTES:
            _remember("content", path, content)
    if len(content) > most_bytes:
        raise HeaderError(f"{path}: larger than {most_bytes} bytes")
    return content


# ---------------------------------------------------------------- folders and sizes


def list_folder(path: Address) -> Names:
    """List a folder of a store; empty if it is none."""
    found: Names | None = _recall("folder", path)
    return _remember("folder", path, _list(path)) if found is None else found


def _list(path: Address) -> Names:
    place, access = access_to(path)
    if access.names is not None:
        return _below(access.names, path.relative_to(place).as_posix())
    if path.store.is_web:
        return {} if path.suffix.lower() in FILE_SUFFIXES else _probe(path)

    def ask(obstore: Any, store: Any, key: str) -> Names:
        found = obstore.list_with_delimiter(store, prefix=key or None)
        folders = [folder.rstrip("/").rpartition("/")[2] for folder in found["common_prefixes"]]
        files = [file for file in found["objects"] if file["path"] != key]  # a folder's own mark
        sizes = {file["path"].rpartition("/")[2]: file["size"] for file in files}
        return {**dict.fromkeys(folders), **sizes}

    return _request(path, ask).result()


def _below(names: Mapping[str, int], folder: str) -> Names:
    prefix = "" if folder == "." else f"{folder}/"
    found: dict[str, int | None] = {}
    for name, size in names.items():
        if name.startswith(prefix):
            first, deeper, _ = name.removeprefix(prefix).partition("/")
            found[first] = None if deeper else size
    return found


def _probe(path: Address) -> Names:
    """Find the usual files that a web server has below an address."""
    asked = {name: _request_size(path / name) for name in USUAL_NAMES}
    found: dict[str, int | None] = {}
    refusal = ""
    for name, future in asked.items():
        try:
            found[name] = future.result()
        except FileNotFoundError:
            continue
        except Forbidden as error:
            refusal = str(error).replace(str(path / name), str(path))
    if refusal and not found:
        raise Forbidden(refusal)
    return found


def _request_size(path: Address) -> Future[int]:
    return _request(path, lambda obstore, store, key: int(obstore.head(store, key)["size"]))


def _ask_size(path: Address) -> int | None:
    try:
        return _request_size(path).result()
    except (FileNotFoundError, Forbidden):  # S3 forbids what is not there to those who cannot list
        return None


def size_of(path: Address) -> int | None:
    """Return the size of a file; None if there is none, or none that may be read."""
    place, access = access_to(path)
    if access.names is not None:
        return access.names.get(path.relative_to(place).as_posix())
    beside: Names | None = _recall("folder", path.parent)
    if beside is not None and (not path.store.is_web or path.name in USUAL_NAMES):
        return beside.get(path.name)
    found = _recall("size", path)
    if found is None:
        found = _remember("size", path, -1 if (asked := _ask_size(path)) is None else asked)
    return None if found < 0 else int(found)


def is_file(path: Address) -> bool:
    """Tell whether there is a file at a place."""
    return bool(path.key) and size_of(path) is not None


def status(path: Address) -> os.stat_result:
    """Return the status of a file or folder, as the system does; FileNotFoundError if none."""
    if path.key and (size := size_of(path)) is not None:
        return os.stat_result((stat.S_IFREG | 0o444, 0, 0, 1, 0, 0, size, 0, 0, 0))
    if list_folder(path):
        return os.stat_result((stat.S_IFDIR | 0o555, 0, 0, 1, 0, 0, 0, 0, 0, 0))
    raise FileNotFoundError(2, "No such file or directory", str(path))


# ---------------------------------------------------------------- errors


class Forbidden(InputError):  # noqa: N818
    """A store does not give something to this user."""


def explained(path: Address, error: Exception, *, writes: bool = False) -> InputError:
    """Return an error with its remedy, in our words and without secrets."""
    if isinstance(error, InputError):
        return error
    from obstore import exceptions

    text = str(error)
    status_code, code, region = (found.search(text) for found in (_STATUS, _CODE, _REGION))
    number = status_code[1] if status_code else ""
    answer = " ".join(filter(None, (number, code and code[1])))
    remedy = path.store.remedy
    remedy += "; writing needs the right to list, read, write and delete" if writes else ""
    elsewhere = ("AuthorizationHeaderMalformed", "PermanentRedirect", "TemporaryRedirect")
    is_elsewhere = code is not None and code[1] in elsewhere
    if path.store.speaks_s3 and (is_elsewhere or "without LOCATION" in text):
        where = f"is in another region{f', {region[1]}' if region else ''}; set AWS_REGION to it"
        return InputError(f"{path}: the bucket {path.authority} {where}")
    if path.store.speaks_s3 and _lacks_credentials(path, error, number):
        return Forbidden(f"{path}: no credentials were found in {CREDENTIAL_PLACES}; {remedy}")
    if number in ("401", "403"):
        return Forbidden(f"{path}: the store denies access ({answer}); {remedy}")
    if isinstance(error, exceptions.NotSupportedError):
        what = "the server does not send parts of a file (it ignores Range)"
        return InputError(f"{path}: {what}; download the file and give its path")
    if number == "404":
        check = "check the address, or make it first" if writes else "check the address"
        return InputError(f"{path}: the store has no {path.authority} ({answer}); {check}")
    if number in ("413", "507"):
        what = f"the store is full, or its quota is used up ({answer})"
        return InputError(f"{path}: {what}; make room and run the same merge again; it resumes")
    if number == "400" and path.scheme != "hf":
        return InputError(f"{path}: the store does not understand the request ({answer}); {remedy}")
    tried = _RETRIED.search(text)
    after = f" after {int(tried[1]) + 1} tries" if tried and int(tried[1]) else ""
    return InputError(
        f"{path}: cannot be {'written to' if writes else 'read from'} its store{after}: "
        f"{_reason(text, answer)}; check the address and the network and run the merge again; "
        "it resumes"
    )


def _lacks_credentials(path: Address, error: Exception, number: str) -> bool:
    """Tell whether nobody has given credentials, without which the store does not answer."""
    if type(error).__module__.startswith("botocore") or _METADATA.search(str(error)):
        return True
    return number in ("400", "401", "403", "412") and "skip_signature" in locate(path)[0].config


def _reason(text: str, answer: str) -> str:
    if answer:
        return f"the server answered ({answer})"
    reasons = {
        "kind: Timeout|TimedOut": f"it sent nothing for {PATIENCE_SECONDS:g} s",
        "kind: Connect": "no connection",
        "UnexpectedEof|kind: Interrupted": "it stopped inside a file",
        "UnexpectedRange": "it did not send the range requested",
        "Credential": "no credentials were found",
        "": "no usable answer came",
    }
    return next(reason for signs, reason in reasons.items() if re.search(signs, text))
