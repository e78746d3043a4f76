"""Where an output goes: to this machine or to a store. The questions are the same."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from dare.output import publishing, targets
from dare.output.journal import Found
from dare.output.writer import PartialOutput
from dare.planning.layout import Layout
from dare.stores.locations import StorePath

if TYPE_CHECKING:
    from dare.output.store_output import StoreOutput

AnyOutput: TypeAlias = "PartialOutput | StoreOutput"


def open_output(
    layout: Layout,
    metadata: Mapping[str, str],
    fingerprint: str,
    stamps: str = "",
    *,
    resume: bool = True,
) -> AnyOutput:
    """An output under way; to be used as a context manager."""
    if isinstance(layout.target, StorePath):
        from dare.output.store_output import StoreOutput

        return StoreOutput(layout, metadata, fingerprint, stamps, resume=resume)
    return PartialOutput(layout, metadata, fingerprint, stamps, resume=resume)


def check_target(layout: Layout, inputs: Iterable[Path], *, overwrite: bool) -> None:
    """Refuse to touch an input, ever, and to replace an output unless told to."""
    if isinstance(layout.target, StorePath):
        from dare.output import store_targets

        store_targets.check_target(layout, inputs, overwrite=overwrite)
    else:
        targets.check_target(layout, inputs, overwrite=overwrite)


def finished_before(layout: Layout) -> Found | None:
    """What the journal says of an output whose process died after giving the name."""
    if isinstance(layout.target, StorePath):
        from dare.output import store_targets

        return store_targets.finished_before(layout)
    return publishing.finished_before(layout)


def settle(layout: Layout) -> None:
    """Clear away what such a process left, or one that died while clearing away."""
    if isinstance(layout.target, StorePath):
        from dare.output import store_targets

        store_targets.settle(layout)
    else:
        publishing.settle(layout)
