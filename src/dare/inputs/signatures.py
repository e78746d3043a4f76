"""Signatures of models in the form of OpenSSF model signing: a bundle of sigstore beside the files.

A folder's signature is the file `model.sig` in it, a file's is `NAME.sig` beside it. It lists the
SHA-256 of every file, and is made and checked by the package `model-signing`, on this machine, with
keys or certificates.

The package takes the word of a signature for what it leaves out. Here a signature has to cover
every file of its folder, but for itself and what git and the hub's client put there (unless it
looks like weights), so that a file which was added, or which its maker ignored, is refused by name.
"""

from __future__ import annotations

import json
import os
from base64 import b64decode
from collections.abc import Iterable, Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import lru_cache
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from dare.documents.notices import Notice, notice
from dare.errors import InputError, RecipeError, install_command, needed, no_such_file
from dare.inputs.hub import find_name
from dare.inputs.sources import CONFIG
from dare.stores.locations import WEIGHT_SUFFIXES, is_stored
from dare.tensors.files import read_limited

FOLDER_SIGNATURE = "model.sig"
MAX_SIGNATURE_BYTES = 16 << 20  # more than for 50,000 files
CERTIFICATE = b"-----BEGIN CERTIFICATE-----"
OTHER_KIND = "another kind of signature; `model_signing verify sigstore` checks keyless ones"
State = tuple[tuple[str | int, ...], ...]  # of files: their names, sizes and times
PROBLEMS = {"not_signed", "bad_signature", "signed_changed", "signed_missing", "not_covered"}
# Names that no signature has to cover: of git, as the package has it, and of the hub's client.
NOT_OF_MODELS = {".git", ".gitattributes", ".github", ".gitignore", ".cache"}


@dataclass(frozen=True)
class Signed:
    """What the signature of a model is worth."""

    signer: Path | None  # the key or certificate that it fits, if any
    files: frozenset[Path] = frozenset()  # that it covers
    problems: tuple[Notice, ...] = ()


def signature_path(path: Path) -> Path:
    """Return the place of a model's signature; the model must be on this machine."""
    if is_stored(path) or find_name(path) is not None:
        remedy = "download the model with its signature, and give its folder"
        raise RecipeError(f"{path}: signatures need files on this machine; {remedy}")
    if not path.exists():
        raise no_such_file(path)
    return path / FOLDER_SIGNATURE if path.is_dir() else path.with_name(f"{path.name}.sig")


def make_signature(path: Path, key: Path, certificates: Sequence[Path] = ()) -> bytes:
    """Sign all files of a model: with a private key, or one with its certificate and the chain."""
    _check_installed()
    from model_signing import hashing, signing

    ignored = [FOLDER_SIGNATURE, *sorted(NOT_OF_MODELS)] if path.is_dir() else []
    files = hashing.Config().set_ignored_paths(paths=ignored).set_allow_symlinks(True)
    config = signing.Config().set_hashing_config(files)
    try:
        read_limited(key, MAX_SIGNATURE_BYTES)
        if certificates:
            chain = certificates[1:] or certificates  # one file may hold all of them
            own = {"private_key": key, "signing_certificate": certificates[0]}
            config.use_certificate_signer(**own, certificate_chain=chain)
        else:
            config.use_elliptic_key_signer(private_key=key)
    except Exception as error:  # of several packages, which do not say of what kinds
        need = "sign with an elliptic key (P-256, P-384 or P-521) in PEM, without a password"
        reason = _reason(error).removeprefix(f"{key}: ")
        raise RecipeError(f"{key}: cannot sign: {reason}; {need}") from None
    for file in (file for file in _files(path) if not file.is_file()):
        what = "is not a file, or is a link to a folder, which no signature covers"
        raise InputError(f"{file}: {what}; put the file or the folder itself there")
    with TemporaryDirectory() as folder:
        config.sign(path, made := Path(folder, FOLDER_SIGNATURE))
        return made.read_bytes()


def check_signature(path: Path, signers: Sequence[Path]) -> Signed:
    """Compare a model's files with its signature, which must be by one of the signers."""
    _check_installed()
    known = [_verifier(signer) for signer in signers]
    if not (place := signature_path(path)).is_file():
        return Signed(None, problems=(notice("not_signed", place.name),))
    reasons = []
    for signer, verifier in zip(signers, known, strict=True):
        files, problems = _signed_files(), list[Notice]()
        verifier.set_hashing_config(files).set_ignore_unsigned_files(True)
        try:
            bundle = read_limited(place, MAX_SIGNATURE_BYTES)
            with redirect_stdout(StringIO()):  # on which the package says that a form is old
                verifier.verify(path, place)
        except Exception as error:  # of several packages, which do not say of what kinds
            is_other = isinstance(error, AttributeError | KeyError | TypeError)
            reasons.append(f"{signer}: {OTHER_KIND if is_other else _reason(error)}")
            if files.listed is None:  # it is not by this signer
                continue
            problems = list(_differences(path, files, bundle))
            problems = problems or [notice("bad_signature", place.name, reason=reasons[-1])]
        covered = frozenset(files.listed or ())
        left = (file.relative_to(path).as_posix() for file in _files(path) if file not in covered)
        problems += [notice("not_covered", name) for name in left]
        return Signed(signer, covered, tuple(problems))
    return Signed(None, problems=(notice("bad_signature", place.name, reason="; ".join(reasons)),))


def require_signatures(paths: Iterable[Path], signers: Sequence[Path]) -> frozenset[Path]:
    """Refuse models that none of the signers has signed; return the files that are covered."""
    keys = tuple((signer, _state([signer])) for signer in signers)
    found = {
        path: _check_once(path, keys, _state([path, signature_path(path), *_files(path)]))
        for path in paths
    }
    faults = [f"{path}: {fault}" for path, signed in found.items() for fault in signed.problems]
    if faults:
        raise InputError(*(f"{fault} (require_signed)" for fault in faults))
    covered = frozenset[Path]().union(*(signed.files for signed in found.values()))
    beside = (path.parent / CONFIG for path in found if not path.is_dir())
    require_covered(filter(Path.exists, beside), covered)
    return covered


def require_covered(files: Iterable[Path], covered: frozenset[Path]) -> None:
    """Refuse a file that is read for a model, and that no signature covers."""
    for file in (file for file in files if file not in covered):
        remedy = "give the model's folder, and have all of it signed"
        raise InputError(f"{file}: is not signed, but would be read; {remedy} (require_signed)")


def count_signed(bundle: bytes) -> int:
    """Return how many files a signature lists."""
    return len(_resources(bundle))


# ---------------------------------------------------------------- files and the package


@lru_cache(maxsize=64)
def _check_once(path: Path, keys: tuple[tuple[Path, State], ...], _state: State) -> Signed:
    """Check a signature; a model that many layers or merges name is hashed once."""
    return check_signature(path, [signer for signer, _ in keys])


def _state(files: Iterable[Path]) -> State:
    """Return what changes when files do."""
    there = [(str(file), file.stat()) for file in files if file.exists()]
    return tuple((name, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for name, s in there)


def _files(path: Path) -> Iterator[Path]:
    """Yield the files that a signature has to cover, and links to folders, which none does."""
    for file in sorted(path.rglob("*")) if path.is_dir() else ():
        first = file.relative_to(path).parts[0]
        is_left_out = first in {*NOT_OF_MODELS, FOLDER_SIGNATURE}
        is_file = file.is_symlink() or not file.is_dir()
        if is_file and (not is_left_out or file.suffix in WEIGHT_SUFFIXES):
            yield file


def _check_installed() -> None:
    with needed(RecipeError(f"signatures need model-signing: {install_command('sign')}")):
        import model_signing  # noqa: F401


def _verifier(signer: Path) -> Any:
    """Return what tells whether a signature is by the owner of a key or of a certificate."""
    from model_signing import verifying

    try:
        if CERTIFICATE in read_limited(signer, MAX_SIGNATURE_BYTES):
            return verifying.Config().use_certificate_verifier(certificate_chain=[signer])
        return verifying.Config().use_elliptic_key_verifier(public_key=signer)
    except Exception as error:
        need = "name a file with a public elliptic key or certificates, in PEM"
        reason = _reason(error).removeprefix(f"{signer}: ")
        raise RecipeError(f"{signer}: {reason}; {need}") from None


def _signed_files() -> Any:
    """Return what hashes the files that a signature lists, and remembers which they are."""
    from model_signing import hashing

    class SignedFiles(hashing.Config):  # type: ignore[misc]
        """Asked by the package once it has found that the list is by the signer."""

        listed: tuple[Path, ...] | None = None
        found: Any = None

        def hash(self, model_path: Path, *, files_to_hash: Iterable[Path]) -> Any:
            self.listed = tuple(files_to_hash)
            there = [file for file in self.listed if file.is_file()]
            self.found = super().hash(model_path, files_to_hash=there)
            return self.found

    files = SignedFiles().set_ignored_paths(paths=[], ignore_git_paths=False)
    return files.set_allow_symlinks(True)


def _differences(path: Path, files: Any, bundle: bytes) -> Iterator[Notice]:
    """Yield which of the files that are signed are missing, and which are others now."""
    for file in (file for file in files.listed if not file.is_file()):
        yield notice("signed_missing", Path(os.path.relpath(file, path)).as_posix())
    said = _resources(bundle)
    for found in files.found.resource_descriptors() if files.found is not None else ():
        if said.get(found.identifier, found.digest.digest_hex) != found.digest.digest_hex:
            yield notice("signed_changed", found.identifier if path.is_dir() else path.name)


def _resources(bundle: bytes) -> dict[str, str]:
    """Return the digest of each file that a bundle lists, to name those that differ."""
    try:
        statement = json.loads(b64decode(json.loads(bundle)["dsseEnvelope"]["payload"]))
        return {each["name"]: each["digest"] for each in statement["predicate"]["resources"]}
    except (ValueError, LookupError, TypeError):
        return {}


def _reason(error: Exception) -> str:
    """Return in a line why another package failed."""
    return " ".join(f"{error}".split()).rstrip(".") or type(error).__name__
