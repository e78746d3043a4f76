"""Where in a store an output may go, and what of that place is ours.

An output belongs to dare by its manifest: only what that names is ever replaced or deleted. While
an output is being published, the journal in `OUT.partial/` names the same, and also what it
replaces, so that whoever comes after a process that died there can go on.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from dare.errors import OutputError
from dare.output.journal import Found
from dare.output.objects import Objects
from dare.output.s3 import open_bucket
from dare.output.sealing import SEAL
from dare.output.staged import StagedObjects
from dare.output.store_journal import StoreJournal
from dare.output.targets import manifest_path, partial_folder
from dare.planning.layout import Layout
from dare.stores.locations import StorePath
from dare.tensors.digest import bytes_digest


def store_path(path: Path) -> StorePath:
    """A path that is known to be an address."""
    assert isinstance(path, StorePath)
    return path


def open_objects(target: StorePath) -> Objects:
    """The objects of the bucket that an output goes to."""
    if not target.key or target.key.endswith(".."):
        raise OutputError(f"{target}: is not a name for an output; add a name after the bucket")
    if target.scheme == "s3":
        return open_bucket(target.authority)
    if target.scheme in ("gs", "az"):
        return StagedObjects(store_path(partial_folder(target)))
    raise OutputError(
        f"{target}: outputs cannot be written to {target.scheme}:// addresses; "
        "choose s3://, gs://, az:// or a path on this machine"
    )


def key_of(layout: Layout, name: str) -> str:
    """The key of a file of an output."""
    target = store_path(layout.target)
    return store_path(target / name if layout.is_directory else target.with_name(name)).key


def open_journal(layout: Layout, objects: Objects) -> StoreJournal:
    """The journal of an output."""
    return StoreJournal(objects, store_path(partial_folder(layout.target)).key)


# ---------------------------------------------------------------- what is there


def existing(layout: Layout, objects: Objects) -> list[str]:
    """The names of what lies where the output would be."""
    target = store_path(layout.target)
    if layout.is_directory:
        return [key.removeprefix(f"{target.key}/") for key in objects.list(target.key)]
    names = (target.name, manifest_path(target).name)
    return [name for name in names if objects.mark_of(key_of(layout, name)) is not None]


def written_names(layout: Layout, objects: Objects) -> list[str] | None:
    """What the manifest there says was written, and the manifest; None if there is none of ours."""
    name = manifest_path(layout.target).name
    text = objects.get(key_of(layout, name))
    try:
        document = json.loads(text or b"")
        if SEAL in document:
            return [*document["files"], name]
    except (ValueError, RecursionError, TypeError, KeyError):
        pass
    return None


def check_target(layout: Layout, inputs: Iterable[Path], *, overwrite: bool) -> None:
    """Refuse to touch an input, ever, and to replace an output unless told to."""
    objects = open_objects(store_path(layout.target))
    _check_inputs(layout, inputs)
    found = existing(layout, objects)
    if not found:
        return
    _, names = open_journal(layout, objects).read_finish()
    if names and not set(found) - set(names):
        return  # of a publication that was interrupted
    target = layout.target
    if not overwrite:
        raise OutputError(
            f"{target}: exists already; choose another output, or pass overwrite=True to replace it"
        )
    ours = written_names(layout, objects)
    if ours is None:
        manifest = manifest_path(target).name
        raise OutputError(
            f"{target}: was not made by dare (there is no {manifest}), so it is not "
            "replaced; remove it yourself, or choose another output"
        )
    if foreign := sorted(set(found) - {*ours, *names}):
        raise OutputError(
            f"{target}: contains {foreign[0]}, which dare did not write, so it is not "
            "replaced; move that file away, or choose another output"
        )


def _check_inputs(layout: Layout, inputs: Iterable[Path]) -> None:
    target = layout.target
    partial = partial_folder(target)
    at_risk = {target, manifest_path(target), partial}
    for file in inputs:
        if danger := at_risk & {file, *file.parents}:
            (place, *_) = danger
            raise OutputError(
                f"{target}: would be made in {partial}, where the input {file} is; choose "
                "another output"
                if place == partial
                else f"{target}: the output would overwrite the input {file}; choose another output"
            )


# ---------------------------------------------------------------- what was left


def finished_before(layout: Layout) -> Found | None:
    """What the journal says of an output whose process died after the last step.

    None where nothing of the kind happened.
    """
    objects = open_objects(store_path(layout.target))
    journal = open_journal(layout, objects)
    if not _is_finished(layout, objects, journal):
        return None
    found = journal.read_all()
    return found if found.fingerprint is not None else None


def settle(layout: Layout) -> None:
    """Clear away what such a process left."""
    objects = open_objects(store_path(layout.target))
    journal = open_journal(layout, objects)
    if _is_finished(layout, objects, journal):
        journal.clear()


def _is_finished(layout: Layout, objects: Objects, journal: StoreJournal) -> bool:
    finished, _ = journal.read_finish()
    if finished is None:
        return False
    manifest = objects.get(key_of(layout, manifest_path(layout.target).name))
    return manifest is not None and bytes_digest(manifest) == finished
