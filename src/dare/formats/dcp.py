"""Checkpoints of torch.distributed (DCP), from which trainers go on, such as those with FSDP.

torch writes them, so they are what it reads. It takes whole tensors: the merge is first stored as
safetensors in the folder in which the output is made, and torch saves its tensors from there one by
one. They are mapped, not loaded, so the system drops them from memory as it needs. Until the output
has its name, both are on the disk.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from dare.errors import RecipeError
from dare.formats.recoding import Recoding
from dare.inputs.pipeline import stems_of
from dare.inputs.sources import Source
from dare.recipe.recipe import Recipe
from dare.stores.locations import is_stored
from dare.tensors.header import TensorInfo

KEY = "model"  # of the state dict, where FSDP of accelerate has the weights
NAMES = (".metadata", "__0_0.distcp")


class DcpRecoding(Recoding):
    """A checkpoint that one process has saved."""

    format = "DCP"
    replacing = NAMES

    def replace(self, folder: Path, places: Mapping[str, tuple[str, TensorInfo]]) -> None:
        import torch
        import torch.distributed.checkpoint as dcp

        mapped = {file: np.memmap(folder / file, mode="c") for file, _ in places.values()}

        def tensor_of(file: str, info: TensorInfo) -> Any:
            kind = getattr(torch, info.dtype.torch_name)
            if not info.elements:
                return torch.empty(info.shape, dtype=kind)
            where = {"offset": info.start, "count": info.elements}
            return torch.frombuffer(mapped[file], dtype=kind, **where).reshape(info.shape)

        state = {KEY: {name: tensor_of(*place) for name, place in places.items()}}
        writer = dcp.FileSystemWriter(folder, per_thread_copy_ahead=0)
        try:
            with warnings.catch_warnings(action="ignore"):  # it says that this is one process
                dcp.save(state, storage_writer=writer, no_dist=True)
        except dcp.CheckpointException as error:  # which hides a full disk, or Ctrl-C
            raise next(iter(error.failures.values()))[0] from None


def dcp_recoding(recipe: Recipe, output: Path, inputs: Sequence[Source]) -> DcpRecoding:
    """Return the format; refuse what it cannot hold."""
    problems = {
        "needs torch: pip install torch": find_spec("torch") is None,
        "is a folder on this machine; name one as the output": (
            is_stored(output) or output.suffix == ".safetensors"
        ),
        "has one file; leave shard_size out": recipe.shard_size is not None,
        "holds one model, not a pipeline; leave format out": any(stems_of(inputs[0])),
    }
    for name, info in inputs[0].tensors.items():
        what = f"cannot hold {name}, because torch has no {info.dtype.name}; leave format out"
        problems[what] = bool(info.dtype.packed_bits)
    for what in (what for what, is_so in problems.items() if is_so):
        raise RecipeError(f'format = "dcp" {what}')
    return DcpRecoding()
