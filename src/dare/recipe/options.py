"""The circumstances of a merge: where and how it runs, which changes no byte of its output.

A recipe says what is merged. A file, a table, keywords or flags may say both; reading them gives a
`Request`, a recipe with the options beside it.
"""

from __future__ import annotations

from typing import Annotated

from dare.documents.values import After, Before, Limits
from dare.kernels import check_backend
from dare.recipe.entries import AnyPath, parse_size
from dare.recipe.fields import NOT_RECORDED, Strict, described

DEFAULT_MEMORY = 1 << 30
"""The limit for buffers where `max_memory` is not given, if a method can do with it."""

Size = Annotated[int, Before(parse_size), Limits(gt=0, lt=1 << 63)]


class RunOptions(Strict):
    """Threads, memory, and the machines that work.

    >>> RunOptions(max_memory="512MiB").max_memory
    536870912
    """

    verbose: bool = described("Show progress and warnings.", True)
    max_memory: Size | None = described(
        "Memory for buffers, such as 512MiB; the process takes about 200 MB more. By default "
        "1 GiB, or for whole matrices up to half of what is free.",
        None,
    )
    threads: int | None = described("Worker threads; by default one for each core.", None, gt=0)
    cluster: str | None = described(
        "The Ray cluster that does the work: auto, or its address.",
        None,
        NOT_RECORDED,
        min_length=1,
    )
    scratch: AnyPath | None = described(
        "Folder in which an output for a store is made first. By default one in your cache.",
        None,
        NOT_RECORDED,
    )
    backend: Annotated[str, After(check_backend)] = described(
        "The kernels that compute: cpu, or reference, which defines them.", "cpu", NOT_RECORDED
    )


USUAL = RunOptions()
