"""The JavaScript that draws figures, made once and kept.

Making it takes seconds, in which the maker lets no other thread of its process go on. So a process
of its own does it, and the next start finds it among what this user's programs keep.

`python -m dare.web.drawing` prints it.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

from dare.errors import OutputError
from dare.kernels.kept import cache_folder, read_private, write_private

DIGEST_BYTES = 32


def drawing_library() -> bytes:
    """The library that was kept, or a new one."""
    path = cache_folder() / f"vega-{version('altair')}-{version('vl-convert-python')}.js"
    kept = _kept(path)
    if kept is None:
        kept = _made_elsewhere()
        _keep(path, kept)
    return kept


def make_library() -> bytes:
    """The library for figures as Altair's version of Vega-Lite has them."""
    from dare.output.page.charts import alt
    from dare.output.page.writing import drawing_bundle

    return drawing_bundle(".".join(alt.SCHEMA_VERSION.removeprefix("v").split(".")[:2])).encode()


def _made_elsewhere() -> bytes:
    command = [sys.executable, "-m", __name__]
    done = subprocess.run(command, capture_output=True, check=False)  # noqa: S603
    if done.returncode:
        reason = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise OutputError(f"the library that draws figures cannot be made: {reason}")
    return done.stdout


def _kept(path: Path) -> bytes | None:
    """Return what was kept, if it is whole and nobody else can have written it."""
    with suppress(OSError):
        content = read_private(path)
        digest, library = content[:DIGEST_BYTES], content[DIGEST_BYTES:]
        if hashlib.sha256(library).digest() == digest:
            return library
    return None


def _keep(path: Path, library: bytes) -> None:
    with suppress(OSError):
        write_private(path, hashlib.sha256(library).digest() + library)


if __name__ == "__main__":
    sys.stdout.buffer.write(make_library())
