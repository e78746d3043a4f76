"""Which merge it is: what must be the same for chunks of another try or process to be of use."""

from __future__ import annotations

import json

from dare import __version__
from dare.output.journal import JOURNAL_VERSION
from dare.output.manifest import FORMAT, embedded_manifest
from dare.planning.plan import Plan
from dare.tensors.digest import bytes_digest


def fingerprint(planned: Plan) -> str:
    """A digest of recipe, headers, version and layout; paths and run settings are not in it."""
    described = [
        [__version__, FORMAT, JOURNAL_VERSION, planned.backend],
        embedded_manifest(planned),
        [source.fingerprint() for source in (planned.base, *planned.models)],
        [[t.name, t.fate, t.dtype.name, t.models] for t in planned.tensors],
        list(planned.layout.files) if planned.layout else [],
        planned.recipe.delta_threshold,
    ]
    return bytes_digest(json.dumps(described, sort_keys=True, default=str).encode())
