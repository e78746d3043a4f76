"""The circumstances of a merge: where and how it runs, which changes no byte of its output.

A recipe says what is merged. A file, a table, keywords or flags may say both; reading them gives a
`Request`, a recipe with the options beside it.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field

from dare.kernels import check_backend
from dare.recipe.entries import NOT_RECORDED, AnyPath, Strict, parse_size

DEFAULT_MEMORY = 1 << 30
"""The limit for buffers where `max_memory` is not given, if a method can do with it."""

Size = Annotated[int, BeforeValidator(parse_size), Field(gt=0, lt=1 << 63)]


class RunOptions(Strict, init=False):
    """Threads, memory, and the machines that work.

    >>> RunOptions(max_memory="512MiB").max_memory
    536870912
    """

    verbose: bool = Field(True, description="Show progress and warnings.")
    max_memory: Size | None = Field(
        None,
        description="Memory for buffers, such as 512MiB; the process takes about 200 MB more. "
        "By default 1 GiB, or for whole matrices up to half of what is free.",
    )
    threads: int | None = Field(
        None, gt=0, description="Worker threads; by default one for each core."
    )
    cluster: Annotated[str | None, NOT_RECORDED] = Field(
        None, min_length=1, description="The Ray cluster that does the work: auto, or its address."
    )
    scratch: Annotated[AnyPath | None, NOT_RECORDED] = Field(
        None,
        description="Folder in which an output for a store is made first. By default one in your "
        "cache.",
    )
    backend: Annotated[str, AfterValidator(check_backend), NOT_RECORDED] = Field(
        "cpu", description="The kernels that compute: cpu, or reference, which defines them."
    )


USUAL = RunOptions()
