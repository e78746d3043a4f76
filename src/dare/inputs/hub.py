"""Models by their name on the hub: found in the local cache, fetched into it, or read from the hub.

A merge fetches `org/name`, and reads `hf://org/name` on the hub, as a store, unless the cache has
it; a plan fetches neither. Only safetensors and the small files beside them are fetched, all from
one commit, so that a merge can be repeated. Cache, token, endpoint, offline mode and retries are
those of `huggingface_hub`.

The client builds file names from a hub's answers, and does not check the files that it downloads.
So names in answers are checked before the client sees them, downloads are compared with their
announced digests, and credentials are removed from all messages.
"""

from __future__ import annotations

import errno
import glob
import hashlib
import logging
import os
import re
import shlex
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import urlsplit

from dare.errors import InputError, install_command, needed, printable
from dare.inputs import lora
from dare.inputs.directory import (
    CONFIGURATION,
    FETCHED,
    LICENCES,
    SENTENCE_TRANSFORMERS,
    TOKENIZER,
)
from dare.inputs.gguf import part_names
from dare.inputs.shards import INDEX_NAME, STEMS, named_components, read_index
from dare.inputs.sources import CONFIG
from dare.stores.addresses import Access, grant_access
from dare.stores.locations import (
    WEIGHT_SUFFIXES,
    Name,
    StorePath,
    is_here,
    is_stored,
    parse_address,
    parse_name,
    without_credentials,
)
from dare.stores.reading import can_read
from dare.tensors.names import some_of

SINGLE_NAMES = [f"{stem}.safetensors" for stem in STEMS]

# Patterns of files that are fetched beside the weights, in their folder; code is never run.
SMALL_FILES = [*LICENCES, *CONFIGURATION, *TOKENIZER, *SENTENCE_TRANSFORMERS, *FETCHED]

# Patterns of files that those match by mistake, because a star also matches slashes.
DEEPER_PATTERNS = tuple(f"*/{pattern}" for pattern in SMALL_FILES if pattern.startswith("*"))

NAMING_HEADERS = ("x-repo-commit", "etag", "x-linked-etag", "x-xet-hash")
# Parts of answers that the client builds file names from.
NAMING_KEYS = {"sha", "oid", "sha256", "xetHash", "path", "rfilename"}

LOG_IN = "log in with `hf auth login` or set HF_TOKEN"

_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS}


@dataclass(frozen=True)
class Resolved:
    """The path of a model here and, if it came from the hub, its commit."""

    path: Path
    repo: str | None = None
    commit: str | None = None
    inside: str = ""
    is_address: bool = False

    @property
    def pinned(self) -> Path:
        """The path that identifies exactly this model in a recipe or a manifest.

        >>> Resolved(Path("/cache/x"), "org/name", "0" * 4).pinned.as_posix()
        'org/name@0000'
        """
        if self.repo is None:
            return self.path
        if self.is_address:
            return StorePath(f"hf://{self.repo}@{self.commit}") / self.inside
        return Path(str(Name(self.repo, self.inside, self.commit)))


def resolve(path: Path, *, verbose: bool, fetches: bool = True) -> Resolved:
    """Find a model: the path itself, or what the hub has under that name.

    The model is in the local cache afterwards, or stays on the hub if `fetches` is false or the
    name is an address. Raises InputError if it is a name and cannot be fetched, or if it is more
    likely a mistyped path. The progress of a download is shown if `verbose`.
    """
    is_address = is_stored(path)
    if (name := find_name(path)) is None:
        return Resolved(path)
    remedy = f"to fetch it from the hub, {install_command('hf')}"
    with needed(InputError(f"{name}: no such file or folder; {remedy}")):
        from huggingface_hub import constants
    try:
        with guarded():
            if (fetches and not is_address) or not (is_address or can_read()):
                return _fetch(name, verbose=verbose)
            return replace(_find(name, verbose=verbose), is_address=is_address)
    except InputError as error:
        raise InputError(f"{name}: {error}") from None
    except Exception as error:  # the client passes on its HTTP library's errors, and these change
        text = without_credentials(f"{name}: {_explain(name, error)}")
        has_secrets = without_credentials(constants.ENDPOINT) != constants.ENDPOINT
        raise InputError(text) from (None if has_secrets else error)


def find_name(path: Path) -> Name | None:
    """Return the name on the hub that a path denotes; None if it is a path on this machine."""
    if is_here(path):
        return None
    if is_stored(path):
        return parse_address(str(path))
    if (name := parse_name(path.as_posix())) is None:
        return None
    folder = name.repo.partition("/")[0]
    if name.revision is None and Path(folder).is_dir():
        raise InputError(f"{name}: is not in ./{folder}; for a model on the hub, write {name}@main")
    return name


def _find(name: Name, *, verbose: bool) -> Resolved:
    """Find a model of one commit in the cache, or as a place in a store on the hub."""
    from huggingface_hub import HfApi, constants
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

    if constants.HF_HUB_OFFLINE:
        return _fetch(name, verbose=verbose)
    facts = HfApi().model_info(name.repo, revision=name.revision or "main", files_metadata=True)
    names = {file.rfilename: file.size or 0 for file in facts.siblings or ()}
    commit = str(facts.sha)
    snapshot = _cache_folder(name) / "snapshots" / commit
    folder = snapshot / name.folder
    weights = _named_weights(name, folder) if folder.is_dir() else ()
    if weights and all((folder / file).exists() for file in weights):
        return Resolved(snapshot / name.inside, name.repo, commit, name.inside)
    home = StorePath(f"hf://{name.repo}@{commit}")
    endpoint = urlsplit(constants.ENDPOINT)
    password, _, host = endpoint.netloc.rpartition("@")
    url = f"{endpoint.scheme}://{host}{endpoint.path}/{name.repo}/resolve/{commit}"
    headers = {key: str(value) for key, value in build_hf_headers().items()}
    grant_access(home, Access(password=password, url=url, headers=headers, names=names))
    if not (home / name.inside).exists():
        raise InputError(f"the hub has no {name.inside} at commit {commit}")
    return Resolved(home / name.inside, name.repo, commit, name.inside)


# ---------------------------------------------------------------- fetching


def _fetch(name: Name, *, verbose: bool) -> Resolved:
    """Fetch files that are not in the cache: the small ones, then the weights that they name."""
    from huggingface_hub import constants

    small_files = [*LICENCES, *_within(name, SMALL_FILES)]
    snapshot = _download(
        name, name.revision, small_files, ignore_patterns=_within(name, DEEPER_PATTERNS)
    )
    commit = snapshot.name
    folder = snapshot / name.folder
    found = Resolved(snapshot / name.inside, name.repo, commit, name.inside)
    parts = [] if name.file else named_components(folder)
    for part in parts:
        own = replace(name, inside=(name.folder / part).as_posix(), revision=commit)
        _download(
            own, commit, _within(own, SMALL_FILES), ignore_patterns=_within(own, DEEPER_PATTERNS)
        )
        if (folder / part / CONFIG).exists():  # every component with weights has one
            _fetch(own, verbose=verbose)
    if parts:
        return found
    weights = _named_weights(name, folder) or [_only_weights(name, commit, folder)]
    missing = [str(name.folder / file) for file in weights if not (folder / file).exists()]
    if missing and constants.HF_HUB_OFFLINE:
        command = shlex.join(["hf", "download", name.repo, *missing, "--revision", commit])
        lack = f"the hub's cache lacks {some_of(missing)} of commit {commit}, and this is offline"
        raise InputError(f"{lack}; with HF_HUB_OFFLINE=0, run {command}")
    if missing:
        if verbose:
            text = f"fetching {name} (commit {commit[:12]}) from the hub"
            print(printable(text), file=sys.stderr)
        _download(name, commit, _within(name, map(glob.escape, weights)), bars=verbose)
    for file in weights:
        if not (folder / file).exists():
            raise InputError(f"the hub has no {name.folder / file} at commit {commit}")
    return found


def _named_weights(name: Name, folder: Path) -> Sequence[str]:
    """Return the files of weights, if the name or the small files name them; else none."""
    if name.file:
        return part_names(name.file)
    for stem in STEMS:
        if (index := folder / f"{stem}.safetensors.index.json").exists():
            return [file.name for file in read_index(index)]
    if lora.looks_like(folder):
        return [lora.WEIGHTS_NAME]
    return [file for file in SINGLE_NAMES if (folder / file).exists()][:1]


def _only_weights(name: Name, commit: str, folder: Path) -> str:
    """Return the one file of weights in a folder without an index, or refuse."""
    files = _listed(name, commit, folder)
    weights = [file for file in files if file.endswith(".safetensors")]
    usual = [file for file in SINGLE_NAMES if file in weights]
    if usual or len(weights) == 1:
        return (usual or weights)[0]
    revision = name.revision or "main"
    others = weights or [file for file in files if file.endswith(WEIGHT_SUFFIXES)]
    example = Name(name.repo, str(name.folder / (others or ["FOLDER"])[0]), revision)
    if weights:
        found = f"has {len(weights)} safetensors files and no {INDEX_NAME}"
        raise InputError(f"{found}; name one: {example}")
    found = f" (only {', '.join(others[:3])})" if others else ""
    how = f"name a folder or a file inside it, as in {example}"
    raise InputError(f"has no safetensors file in its top folder{found}; {how}")


def _listed(name: Name, commit: str, folder: Path) -> list[str]:
    """List the files in a model's folder, from the cache if it has all weights."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import LocalEntryNotFoundError

    weights, deeper = _within(name, ["*.safetensors"]), _within(name, ["*/*"])
    try:  # raises an error if a known file is missing
        _download(name, commit, weights, ignore_patterns=deeper, local_files_only=True)
        if here := sorted(path.name for path in folder.glob("*.safetensors")):
            return here
    except LocalEntryNotFoundError:
        pass
    listed = HfApi().model_info(name.repo, revision=commit).siblings or []
    paths = [PurePosixPath(file.rfilename) for file in listed]
    return sorted(path.name for path in paths if path.parent == name.folder)


def _download(
    name: Name, revision: str | None, patterns: list[str], *, bars: bool = False, **options: Any
) -> Path:
    """Fetch the files that match with the hub's client; return the folder of the commit."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import tqdm  # type: ignore[attr-defined]

    class Silent(tqdm):
        """A progress bar that is never drawn."""

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **(options | {"disable": True}))  # type: ignore[no-untyped-call]

    blobs = _cache_folder(name) / "blobs"
    known = set(os.listdir(blobs)) if blobs.is_dir() else set()
    snapshot = snapshot_download(
        name.repo,
        revision=revision,
        allow_patterns=patterns,
        tqdm_class=None if bars else Silent,
        **options,
    )
    _check_downloads(Path(snapshot).rglob("*"), known)
    return Path(snapshot)


def _cache_folder(name: Name) -> Path:
    """Return the folder of a repository, as the documentation of the hub's cache says."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE, f"models--{name.repo.replace('/', '--')}")


def _within(name: Name, patterns: Iterable[str]) -> list[str]:
    """Turn patterns for the model's folder into patterns for the repository."""
    prefix = "" if name.folder == PurePosixPath() else f"{glob.escape(str(name.folder))}/"
    return [prefix + pattern for pattern in patterns]


# ---------------------------------------------------------------- what a hub is not trusted with


@contextmanager
def guarded() -> Iterator[None]:
    """Check every answer in the client's session, and redact its messages, while this lasts."""
    from huggingface_hub import get_session

    hooks = get_session().event_hooks["response"]
    handlers = list(logging.getLogger("huggingface_hub").handlers)
    hooks.append(_check_answer)
    for handler in handlers:
        handler.addFilter(_redact)
    try:
        yield
    finally:
        hooks.remove(_check_answer)
        for handler in handlers:
            handler.removeFilter(_redact)


def _redact(record: logging.LogRecord) -> bool:
    record.msg, record.args = without_credentials(record.getMessage()), ()
    return True


def _check_answer(response: Any) -> None:
    """Refuse an answer with names that lead out of the cache, before the client uses them."""
    names = {header: response.headers.get(header, "") for header in NAMING_HEADERS}
    said = [(key, value.removeprefix("W/").strip('"')) for key, value in names.items()]
    if "json" in response.headers.get("content-type", ""):
        response.read()
        try:
            values = [response.json()]
        except (ValueError, RecursionError):
            values = []  # the client itself reports that this is not JSON
        for value in values:
            children = value if isinstance(value, list) else []
            if isinstance(value, dict):
                children = list(value.values())
                said += [(key, str(value[key])) for key in NAMING_KEYS & value.keys()]
            values += children
    for key, value in said:
        path = PurePosixPath(value.replace("\\", "/"))
        if path.is_absolute() or ".." in path.parts:
            raise InputError(f"the hub sent {value!a:.80} as {key}, which is outside the cache")


def _check_downloads(files: Iterable[Path], known: set[str]) -> None:
    """Check new files of the cache against their names, which are digests; delete wrong ones."""
    for file in files:
        blob = file.resolve()
        if blob.name in known or blob.parent.name != "blobs" or not blob.is_file():
            continue
        if not _has_digest(blob):
            blob.unlink()
            file.unlink(missing_ok=True)
            raise InputError(f"{file.name}: the download does not match its digest; run it again")


def _has_digest(blob: Path) -> bool:
    """Return whether a file's content matches its name, if that is a digest."""
    digest = hashlib.sha256()
    if re.fullmatch(r"[0-9a-f]{40}", blob.name):
        digest = hashlib.sha1(b"blob %d\0" % blob.stat().st_size, usedforsecurity=False)
    elif not re.fullmatch(r"[0-9a-f]{64}", blob.name):
        return True
    with blob.open("rb") as stream:
        return hashlib.file_digest(stream, lambda: digest).hexdigest() == blob.name


def _explain(name: Name, error: BaseException) -> str:
    """Say what is wrong and what to do, in our words."""
    from huggingface_hub import errors

    if isinstance(error, errors.LocalEntryNotFoundError) and error.__cause__ is not None:
        error = error.__cause__  # the reason for looking in the cache
    if isinstance(error, errors.OfflineModeIsEnabled | errors.LocalEntryNotFoundError):
        how = "turn offline mode off (HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE), or give a path"
        return f"no such file or folder, and the hub's cache does not have all of it; {how}"
    if isinstance(error, OSError) and error.errno in _NO_ROOM:
        where = f" ({error.filename})" if error.filename else ""
        return f"cannot be stored in the cache{where}: {error.strerror}; set HF_HOME"
    if not isinstance(error, errors.HfHubHTTPError):
        reason = f"{type(error).__name__}: {error}".strip().partition("\n")[0]
        return (
            f"no such file or folder, and it could not be fetched from the hub: {reason}; "
            "check the network and run the command again; complete files are not fetched again"
        )
    status = error.response.status_code
    if isinstance(error, errors.GatedRepoError):
        return f"accept the terms on the model's page first ({status}), then {LOG_IN}"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"no such revision ({status}); give a branch, a tag or a full commit hash"
    if isinstance(error, errors.RepositoryNotFoundError) or status == 404:
        what = f"no such file or folder, and the hub has no model {name.repo} ({status})"
        return f"{what}; check the spelling or, if the model is private, {LOG_IN}"
    if status in (401, 403):
        return f"the hub denies access ({status}); {LOG_IN}, with a token that allows it"
    if status == 429:
        return f"the hub got too many requests (429); wait a few minutes, or {LOG_IN}"
    return f"the hub failed ({status}); run the command again later"
