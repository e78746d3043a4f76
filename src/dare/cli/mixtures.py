"""`dare moe`: fine-tunes into a mixture of experts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from dare.cli.flags import RESOURCES, Overwrite, Resume, Work, output_flag, runs
from dare.cli.parsing import Flag


@runs
def moe(
    recipe: Path,
    /,
    *,
    output: Annotated[Path | None, output_flag("Directory of the mixture.")] = None,
    shard_size: Annotated[str | None, Flag(group=RESOURCES)] = None,
    threads: Annotated[int | None, Flag(group=RESOURCES)] = None,
    max_memory: Annotated[str | None, Flag(group=RESOURCES)] = None,
    resume: Resume = True,
    overwrite: Overwrite = False,
) -> Work:
    """Build a mixture of experts.

    :param recipe: A recipe, a configuration of mergekit-moe, or a mixture to make again.
    :param shard_size: Largest file, such as 5GB.
    :param threads: Worker threads.
    :param max_memory: For buffers, such as 512MiB.
    """
    from dare.mixtures.building import moe as build_mixture

    return build_mixture, {}
