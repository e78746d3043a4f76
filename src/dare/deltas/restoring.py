"""From a delta file back to a model: as a merge of one model, or file by file as it was."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from dare.errors import InputError
from dare.inputs.delta_files import DeltaFile, DeltaSource, header_part, is_delta_file
from dare.inputs.hub import resolve
from dare.inputs.sources import SINGLE_NAME, open_source
from dare.planning.data import Fate, TensorPlan
from dare.planning.layout import Layout
from dare.planning.plan import Plan
from dare.recipe.schema import Recipe
from dare.tensors.digest import bytes_digest
from dare.tensors.header import Header, TensorInfo, parse_header
from dare.tensors.planes import unpack

AnyPath = str | PathLike[str]
MAX_HEADER_RATIO = 2000


@dataclass(frozen=True)
class RestoredLayout(Layout):
    """The files of a model as they were, whose headers are known already."""

    headers: Mapping[str, tuple[bytes, Header]]

    def build(self, metadata: Mapping[str, str]) -> dict[str, tuple[bytes, dict[str, TensorInfo]]]:
        del metadata  # these files have their own
        return {name: (text, dict(header.tensors)) for name, (text, header) in self.headers.items()}


def open_delta(path: AnyPath) -> DeltaFile:
    """Read what a delta file says of itself, and check that."""
    stored = open_source(resolve(Path(path), verbose=False).path)
    if not is_delta_file(stored):
        raise InputError(f"{path}: is not a delta file; `dare compress` makes one")
    return DeltaFile(stored)


def restore(
    base: AnyPath,
    file: DeltaFile,
    output: Path,
    *,
    overwrite: bool = False,
    resume: bool = True,
    verbose: bool = True,
    **settings: Any,
) -> DeltaReport:
    """Write the files of a model again, from a lossless delta file and its base."""
    started = time.perf_counter()
    recipe = Recipe(
        base=base, models=[file.path], output=output, method="sum", verbose=verbose, **settings
    )
    home = resolve(recipe.base, verbose=verbose).path
    source = DeltaSource(file, open_source(home))
    layout = _layout(file, output)
    tensors = tuple(
        TensorPlan(info.name, Fate.COPIED, info.shape, info, info.dtype, (), (), (), {})
        for info in source.tensors.values()
    )
    plan = Plan(recipe, source, (), (), tensors, (), (), layout)
    settle(layout)
    inputs = [*source.files, *source.base.files]
    check_target(layout, inputs, overwrite=overwrite)
    fingerprint = bytes_digest(f"{__version__} {file.notes.to_json()}".encode())
    with (
        PartialOutput(layout, {}, fingerprint, plan.stamps, resume=resume) as partial,
        show_progress(plan.cost.bytes_read, "restoring", visible=verbose) as display,
    ):
        partial.confirm(with_same_inputs(plan, partial.doubtful, lambda _nbytes: None))
        records = execute(plan, partial, done=partial.resumed, progress=display.advance)
        _check(file, records)
        if layout.is_directory:
            with TemporaryDirectory() as folder:
                file.fill_folder(Path(folder), home if home.is_dir() else None)
                beside = {p.relative_to(folder).as_posix(): p for p in Path(folder).rglob("*")}
                partial.add_files({name: path for name, path in beside.items() if path.is_file()})
        report = make_report(...)
        partial.finish(dict.fromkeys(layout.files, {}), manifest, overwrite=overwrite, digests_of_all=True)
    return report
