"""Sign an output, so that others can tell whose it is."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dare.documents.document import Document, Tone
from dare.documents.shown import Shown
from dare.documents.words import counted
from dare.errors import OutputError
from dare.inputs.signatures import count_signed, make_signature, signature_path
from dare.output.targets import check_free, has_mark, write_file
from dare.stores.locations import AnyPath, to_path


@dataclass(frozen=True)
class Signing(Shown):
    """A signature that was written."""

    path: Path
    signature: Path
    """The file with the signature."""
    files: int
    """The number of files that it covers."""

    def to_dict(self) -> dict[str, Any]:
        """The outcome as plain values, ready for JSON."""
        return {**asdict(self), "path": str(self.path), "signature": str(self.signature)}

    def document(self) -> Document:
        """Return a document that says what was signed."""
        verify = f"dare verify {shlex.quote(str(self.path))} --signer PUBLIC_KEY_OR_CERTIFICATE"
        return Document(
            title="Signed",
            kind="signature",
            tone=Tone.GOOD,
            lead=f"{counted(self.files, 'file')}, {self.path}",
            steps={"verify": verify},
            done=f"Wrote {self.signature}",
        )


def sign(
    path: AnyPath,
    key: AnyPath,
    *,
    certificate: Sequence[AnyPath] | None = None,
    overwrite: bool = False,
) -> Signing:
    """Sign all files of an output, or of another model, with a private elliptic key in PEM.

    `certificate` has the key's own certificate and those that it rests on, if verifiers are to
    know only the last. The signature is `model.sig` in a folder, or `NAME.sig` beside a file; it
    has the form of OpenSSF model signing, so that `model_signing` verifies it as well.
    """
    path = to_path(path)
    place = signature_path(path)
    if has_mark(path):
        raise OutputError(f"{path}: is not finished; run the merge again to finish it, then sign")
    check_free(place, "signature", overwrite=overwrite)
    content = make_signature(path, to_path(key), [to_path(each) for each in certificate or ()])
    write_file(place, content, "signature", overwrite=overwrite)
    return Signing(path, place, count_signed(content))
