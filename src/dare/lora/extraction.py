"""A LoRA adapter from a full fine-tune: the leading directions of model - base, layer by layer.

Each chosen matrix is read, subtracted and truncated on its own, so there is never more than one in
memory. What cannot be a LoRA (norms, biases) or is not asked for (embeddings, head) is stored in
full or left out; what is left out though it changed is listed with its size.
"""

from __future__ import annotations

import fnmatch
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from math import sqrt
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dare.errors import InputError, MismatchError, RecipeError, did_you_mean
from dare.inputs.formats import open_model, read_config
from dare.inputs.lora import CONV1D_MODELS
from dare.inputs.names import match_names
from dare.inputs.reading import read_floats
from dare.inputs.sources import Source
from dare.lora.reports import ExtractionReport, LeftOut, ModuleReport
from dare.lora.svd import Wanted, relative_error, truncate_matrix
from dare.lora.writing import AdapterOutput, check_output, manifest_of, peft_config, readme_of
from dare.tensors.chunks import chunk_spans
from dare.tensors.dtypes import weight_type
from dare.tensors.names import is_embedding, is_tied_embedding, is_tied_head

Floats = NDArray[np.float32]
AnyPath = str | PathLike[str]

FINDINGS_SHOWN = 10


@dataclass(frozen=True)
class Change:
    """Base and model, with names that fit: the one's tensors are the other's."""

    base: Source
    model: Source
    notes: tuple[str, ...]

    def read_delta(self, tensor: str) -> Iterator[Floats]:
        """A tensor's change, piece by piece."""
        info = self.base.tensors[tensor]
        for start, count in chunk_spans(info.elements):
            change = read_floats(self.model, tensor, start, count)
            if not self.model.holds_delta(tensor):
                change -= read_floats(self.base, tensor, start, count)
            yield change

    def read_tuned(self, tensor: str) -> Iterator[Floats]:
        """A tensor of the model, piece by piece; the base's where the model has none."""
        for start, count in chunk_spans(self.base.tensors[tensor].elements):
            if tensor not in self.model.tensors:
                yield read_floats(self.base, tensor, start, count)
                continue
            values = read_floats(self.model, tensor, start, count)
            if self.model.holds_delta(tensor):
                values += read_floats(self.base, tensor, start, count)
            yield values

    def read_matrix(self, tensor: str) -> Floats:
        """A matrix's whole change."""
        matrix = np.empty(self.base.tensors[tensor].elements, np.float32)
        position = 0
        for piece in self.read_delta(tensor):
            matrix[position : position + piece.size] = piece
            position += piece.size
        return matrix.reshape(self.base.tensors[tensor].shape)

    def norm(self, tensor: str) -> float:
        """The Frobenius norm of a tensor's change."""
        squares = (np.square(piece, dtype=np.float64).sum() for piece in self.read_delta(tensor))
        return sqrt(float(sum(squares)))


@dataclass(frozen=True)
class Asked:
    """What an adapter shall be like."""

    wanted: Wanted
    modules: tuple[str, ...] | None
    save_others: bool
    transposed: bool
    tied: bool
    """Whether the head is the embedding, so that neither can be stored without the other."""


def extract_adapter(
    base: AnyPath,
    model: AnyPath,
    output: AnyPath,
    *,
    rank: int | None = None,
    energy: float | None = None,
    modules: Sequence[str] | None = None,
    save_others: bool = False,
    base_name: str | None = None,
    fan_in_fan_out: bool | None = None,
    dtype: str = "F32",
    overwrite: bool = False,
) -> ExtractionReport:
    """Write a LoRA of the change from base to model, of a rank or with a share of the energy.

    `modules` are patterns (`*` and `?` as in a shell) of modules or their last names; without them
    all linear layers are taken: matrices called `.weight` that are no embedding and no head.
    `save_others` stores in full what else has changed. `fan_in_fan_out` says whether layers store
    inputs × outputs; if not given, the base's `config.json` does.
    """
    started = time.perf_counter()
    base, model, target = Path(base), Path(model), Path(output)
    config = read_config(base)
    if fan_in_fan_out is None:
        fan_in_fan_out = config.get("model_type") in CONV1D_MODELS
    asked = Asked(
        Wanted(rank, energy),
        None if modules is None else tuple(modules),
        save_others,
        transposed=fan_in_fan_out,
        tied=config.get("tie_word_embeddings") is True,
    )
    kind = weight_type(dtype)
    change = _open(base, model)
    check_output(target, [*change.base.files, *change.model.files], overwrite=overwrite)
    chosen = _choose(change, asked)
    with AdapterOutput(target, kind) as writing:
        report = _write(change, chosen, asked, writing, started)
        named = base_name or str(base.resolve())
        writing.finish(
            _config(report, asked, config, named),
            manifest_of(
                "extraction",
                {
                    "base": str(base.resolve()),
                    "model": str(model.resolve()),
                    "rank": rank,
                    "energy": energy,
                    "modules": modules and list(modules),
                    "save_others": save_others,
                    "dtype": kind.name,
                    "report": report.to_dict(),
                },
            ),
            readme_of("Extracted LoRA", named, str(report)),
            overwrite=overwrite,
        )
    return report


def _write(
    change: Change, chosen: Sequence[str], asked: Asked, output: AdapterOutput, started: float
) -> ExtractionReport:
    """Everything but the directory: the tensors, and what is to be said of them."""
    with ExitStack() as stack:
        for source in (change.base, change.model):
            stack.enter_context(source)
        modules = list(_write_modules(change, chosen, asked, output))
        if not modules:
            raise InputError(
                f"the model equals its base in all {len(chosen)} modules that were looked at; "
                "there is nothing to extract"
            )
        targets = {module.name for module in modules}
        saved, left_out = _sort_others(change, targets, asked)
        for tensor in saved:
            module, _, parameter = tensor.rpartition(".")
            key = f"{module}.base_layer.{parameter}" if module in targets else tensor
            output.put_pieces(key, change.base.tensors[tensor].shape, change.read_tuned(tensor))
        for source in (change.base, change.model):
            source.check_unchanged()
    same = len(chosen) - len(modules)
    return ExtractionReport(
        output=output.target,
        modules=tuple(modules),
        notes=(*change.notes, *([f"{same} modules are as in the base"] if same else [])),
        bytes_written=output.bytes_written,
        seconds=time.perf_counter() - started,
        saved=tuple(saved),
        left_out=tuple(left_out),
    )


def _config(
    report: ExtractionReport, asked: Asked, config: Mapping[str, Any], base_name: str
) -> dict[str, Any]:
    targets = {module.name: module.rank for module in report.modules}
    owners = {tensor.rpartition(".")[0] for tensor in report.saved}
    architecture = str((config.get("architectures") or [""])[0])
    is_causal = architecture.endswith(("ForCausalLM", "LMHeadModel"))
    return peft_config(
        targets,
        base_model_name_or_path=base_name,
        task_type="CAUSAL_LM" if is_causal else None,
        fan_in_fan_out=asked.transposed,
        bias="lora_only" if owners & set(targets) else "none",
        modules_to_save=sorted(owners - set(targets)) or None,
    )


# ---------------------------------------------------------------- base and model


def _open(base: Path, model: Path) -> Change:
    opened = open_model(base)
    if opened.is_partial:
        raise InputError(f"{base}: is an adapter, and a base must be a whole model")
    matched = match_names(
        opened,
        open_model(model),
        model.name,
        base_config=read_config(base),
        model_config=read_config(model),
    )
    _check_names(opened, matched.source, model)
    return Change(opened, matched.source, matched.notes)


def _check_names(base: Source, model: Source, path: Path) -> None:
    missing = [] if model.is_partial else sorted(set(base.tensors) - set(model.tensors))
    extra = sorted(set(model.tensors) - set(base.tensors))
    problems = [f"{name}: not in {path}" for name in missing]
    problems += [f"{name}: in {path}, not in the base" for name in extra]
    if problems:
        more = len(problems) - FINDINGS_SHOWN
        shown = [*problems[:FINDINGS_SHOWN], *([f"… and {more} more"] if more > 0 else [])]
        raise MismatchError(
            "the model is not a fine-tune of this base, tensor by tensor; "
            "give the base that it was made from:\n  " + "\n  ".join(shown)
        )


# ---------------------------------------------------------------- the modules


def _choose(change: Change, asked: Asked) -> list[str]:
    """The modules to extract, in order of name."""
    linear = [name for name in sorted(change.base.tensors) if _is_linear(change, name)]
    if asked.modules is None:
        chosen = [name for name in linear if not is_embedding(name)]
        return [name.removesuffix(".weight") for name in chosen]
    modules = [name.removesuffix(".weight") for name in linear]
    for pattern in asked.modules:
        if not any(_matches(module, pattern) for module in modules):
            last_names = {module.rpartition(".")[2] for module in modules}
            raise RecipeError(
                f"modules: {pattern!r} matches no linear layer{did_you_mean(pattern, last_names)}; "
                f"there are {', '.join(sorted(last_names)) or 'none'}"
            )
    return [m for m in modules if any(_matches(m, pattern) for pattern in asked.modules)]


def _is_linear(change: Change, tensor: str) -> bool:
    info, tuned = change.base.tensors[tensor], change.model.tensors.get(tensor)
    return (
        tensor.endswith(".weight")
        and len(info.shape) == 2
        and tuned is not None
        and tuned.shape == info.shape
        and info.dtype.is_weight
        and tuned.dtype.is_weight
        and (is_tied_head(tensor) or not is_embedding(tensor))
    )


def _matches(module: str, pattern: str) -> bool:
    return fnmatch.fnmatchcase(module, pattern) or fnmatch.fnmatchcase(module, f"*.{pattern}")


def _write_modules(
    change: Change, chosen: Sequence[str], asked: Asked, output: AdapterOutput
) -> Iterator[ModuleReport]:
    for module in chosen:
        matrix = change.read_matrix(f"{module}.weight")
        low_rank = truncate_matrix(matrix.T if asked.transposed else matrix, asked.wanted, module)
        if low_rank.rank == 0:
            continue
        output.put(f"{module}.lora_A.weight", low_rank.right)
        output.put(f"{module}.lora_B.weight", low_rank.left)
        error = relative_error(low_rank.lost, low_rank.squared)
        yield ModuleReport(module, (), low_rank.rank, norm=sqrt(low_rank.squared), error=error)


# ---------------------------------------------------------------- everything else


def _sort_others(
    change: Change, targets: set[str], asked: Asked
) -> tuple[list[str], list[LeftOut]]:
    """Of the tensors that are not extracted, those to store in full and those to leave out."""
    saved: set[str] = set()
    left_out = []
    done = {f"{module}.weight" for module in targets}
    for tensor in sorted(set(change.base.tensors) & set(change.model.tensors) - done):
        info, tuned = change.base.tensors[tensor], change.model.tensors[tensor]
        if not (info.dtype.is_weight and tuned.dtype.is_weight):
            continue
        if info.shape != tuned.shape:
            shapes = " and ".join("×".join(map(str, shape)) for shape in (info.shape, tuned.shape))
            left_out.append(LeftOut(tensor, 0.0, f"another shape in base and model ({shapes})"))
            continue
        norm = change.norm(tensor)
        if not norm:
            continue
        reason = _why_not_saved(change, tensor, targets, asked)
        if reason:
            left_out.append(LeftOut(tensor, norm, reason))
        else:
            saved |= _stored_together(change, tensor, targets)
    return sorted(saved), left_out


def _why_not_saved(change: Change, tensor: str, targets: set[str], asked: Asked) -> str:
    """The reason why a changed tensor cannot be stored in full; empty if it can."""
    module, _, parameter = tensor.rpartition(".")
    if not asked.save_others:
        return "no linear layer that was chosen, and save_others is not set"
    if asked.tied and (is_tied_embedding(tensor) or is_tied_head(tensor)):
        return "embedding and head are tied, and PEFT would store one without the other"
    if module in targets:
        return "" if parameter == "bias" else "beside a LoRA, PEFT stores nothing but a bias"
    inside = [name for name in change.base.tensors if name.startswith(f"{module}.")]
    if not module or any("." in name.removeprefix(f"{module}.") for name in inside):
        return "its module holds other modules, and PEFT would store them all"
    if not all(change.base.tensors[name].dtype.is_weight for name in inside):
        return "its module also holds tensors that are no weights"
    return ""


def _stored_together(change: Change, tensor: str, targets: set[str]) -> set[str]:
    """All tensors of a module, because PEFT stores it as a whole; a LoRA's bias alone."""
    module = tensor.rpartition(".")[0]
    if module in targets:
        return {tensor}
    return {name for name in change.base.tensors if name.startswith(f"{module}.")}
