"""Manifests that can tell whether they are as they were written.

A sealed document lists the files it speaks of, and ends with the digest of its own text, taken
while that digest is all zeros.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dare.errors import InputError
from dare.inputs.small_files import read_limited
from dare.tensors.digest import DIGEST_LENGTH, bytes_digest
from dare.tensors.json_values import json_bytes

UNKNOWN = "0" * DIGEST_LENGTH
"""Stands where a digest will be, so that a text has its final length from the start."""
SEAL = "check"
MAX_MANIFEST_BYTES = 1 << 30
"""A model of a million tensors and ten models takes less."""


def seal(document: Mapping[str, Any], files: Mapping[str, str]) -> bytes:
    """The text of a document with the digests of the files it speaks of, and its own."""
    text = json_bytes({**document, "files": dict(files), SEAL: UNKNOWN}, indent=1)
    return _with_seal(text, bytes_digest(text))


def _with_seal(text: bytes, digest: str) -> bytes:
    """Put a digest in place of the one at the end."""
    head, _, tail = text.rpartition(f'"{SEAL}": "'.encode())
    return head + f'"{SEAL}": "{digest}'.encode() + tail[DIGEST_LENGTH:]


def has_fitting_check(header: bytes) -> bool:
    """Whether a file begins as dare wrote it: merges and delta files have a check in the header."""
    found = re.search(rb'\\"%b\\":\s?\\"([0-9a-f]{%d})\\"' % (SEAL.encode(), DIGEST_LENGTH), header)
    if found is None:
        return False
    return bytes_digest(header.replace(found[1], UNKNOWN.encode(), 1)) == found[1].decode()


def read_sealed(path: Path) -> dict[str, Any]:
    """Read a sealed document; InputError if it is none, or not as it was written."""
    text = read_limited(path, MAX_MANIFEST_BYTES)
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: the manifest is not valid JSON: {error}") from None
    if not isinstance(document, dict) or SEAL not in document:
        raise InputError(f"{path}: is not a manifest made by dare")
    if bytes_digest(_with_seal(text, UNKNOWN)) != document[SEAL]:
        raise InputError(
            f"{path}: the manifest has been changed since it was written (its "
            "checksum does not match)"
        )
    return document
