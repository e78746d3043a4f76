"""A LoRA adapter from a full fine-tune: the leading directions of model - base, layer by layer.

Each chosen matrix is read, subtracted and truncated on its own, so there is never more than one in
memory. What cannot be a LoRA (norms, biases) or is not asked for (embeddings, head) is stored in
full or left out; what is left out though it changed is listed with its size.
"""

from __future__ import annotations

import fnmatch
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
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
from dare.inputs.reading import read_float_chunks
from dare.inputs.sources import Source
from dare.lora.reading import list_findings, reading
from dare.lora.reports import ExtractionReport, LeftOut, ModuleReport
from dare.lora.svd import Wanted, truncate_matrix
from dare.lora.writing import AdapterOutput, peft_config
from dare.tensors.dtypes import weight_type
from dare.tensors.names import is_embedding, is_tied_embedding, is_tied_head

Floats = NDArray[np.float32]
AnyPath = str | PathLike[str]


@dataclass(frozen=True)
class Change:
    """Base and model, with names that fit: the one's tensors are the other's."""

    base: Source
    model: Source
    notes: tuple[str, ...]

    def read_delta(self, tensor: str) -> Iterator[tuple[int, Floats]]:
        """A tensor's change, chunk by chunk, each with the place of its first element."""
        sources = [self.model, *([] if self.model.holds_delta(tensor) else [self.base])]
        for start, values in read_float_chunks(sources, tensor):
            yield start, reduce(np.subtract, values)

    def read_tuned(self, tensor: str) -> Iterator[Floats]:
        """A tensor of the model, chunk by chunk; the base's where the model has none."""
        has_it = tensor in self.model.tensors
        needs_base = not has_it or self.model.holds_delta(tensor)
        sources = [*([self.model] if has_it else []), *([self.base] if needs_base else [])]
        return (reduce(np.add, values) for _, values in read_float_chunks(sources, tensor))

    def read_matrix(self, tensor: str) -> Floats:
        """A matrix's whole change."""
        info = self.base.tensors[tensor]
        matrix = np.empty(info.elements, np.float32)
        for start, change in self.read_delta(tensor):
            matrix[start : start + change.size] = change
        return matrix.reshape(info.shape)

    def norm(self, tensor: str) -> float:
        """The Frobenius norm of a tensor's change."""
        changes = (change for _, change in self.read_delta(tensor))
        squares = (np.square(change, dtype=np.float64).sum() for change in changes)
        return sqrt(float(sum(squares)))


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
    base, model = Path(base), Path(model)
    config, wanted, kind = read_config(base), Wanted(rank, energy), weight_type(dtype)
    if fan_in_fan_out is None:
        fan_in_fan_out = config.get("model_type") in CONV1D_MODELS
    change = _open(base, model)
    chosen = _choose(change, modules)
    inputs = [*change.base.files, *change.model.files]
    with AdapterOutput(Path(output), kind, inputs, overwrite=overwrite) as writing:
        with reading([change.base, change.model]):
            extracted = list(_extract(change, chosen, wanted, writing, transposed=fan_in_fan_out))
            ranks = {module.name: module.rank for module in extracted}
            if not ranks:
                raise InputError(
                    f"the model equals its base in all {len(chosen)} modules that were looked at; "
                    "there is nothing to extract"
                )
            is_tied = config.get("tie_word_embeddings") is True
            saved, left_out = _sort_others(change, set(ranks), save_others, is_tied)
            for tensor in saved:
                shape = change.base.tensors[tensor].shape
                writing.put_saved(tensor, ranks, shape, change.read_tuned(tensor))
        same = len(chosen) - len(ranks)
        report = ExtractionReport(
            output=writing.target,
            modules=tuple(extracted),
            notes=(*change.notes, *([f"{same} modules are as in the base"] if same else [])),
            bytes_written=writing.bytes_written,
            seconds=time.perf_counter() - started,
            saved=tuple(saved),
            left_out=tuple(left_out),
        )
        made = {
            "base": str(base.resolve()),
            "model": str(model.resolve()),
            "rank": rank,
            "energy": energy,
            "modules": modules and list(modules),
            "save_others": save_others,
            "dtype": kind.name,
        }
        named = base_name or str(base.resolve())
        writing.finish(report, _config(report, config, named, fan_in_fan_out), made)
    return report


def _config(
    report: ExtractionReport, base: Mapping[str, Any], base_name: str, fan_in_fan_out: bool
) -> dict[str, Any]:
    ranks = {module.name: module.rank for module in report.modules}
    owners = {tensor.rpartition(".")[0] for tensor in report.saved}
    architecture = str((base.get("architectures") or [""])[0])
    is_causal = architecture.endswith(("ForCausalLM", "LMHeadModel"))
    return peft_config(
        ranks,
        base_model_name_or_path=base_name,
        task_type="CAUSAL_LM" if is_causal else None,
        fan_in_fan_out=fan_in_fan_out,
        bias="lora_only" if owners & set(ranks) else "none",
        modules_to_save=sorted(owners - set(ranks)) or None,
    )


def _open(base: Path, model: Path) -> Change:
    opened = open_model(base)
    if opened.is_partial:
        raise InputError(f"{base}: is an adapter, and a base must be a whole model")
    configs = {"base_config": read_config(base), "model_config": read_config(model)}
    matched = match_names(opened, open_model(model), model.name, **configs)
    ours, theirs = set(opened.tensors), set(matched.source.tensors)
    missing = [] if matched.source.is_partial else sorted(ours - theirs)
    problems = [f"{name}: not in {model}" for name in missing]
    problems += [f"{name}: in {model}, not in the base" for name in sorted(theirs - ours)]
    if problems:
        raise MismatchError(
            "the model is not a fine-tune of this base, tensor by tensor; "
            "give the base that it was made from:",
            *list_findings(problems),
        )
    return Change(opened, matched.source, matched.notes)


# ---------------------------------------------------------------- the modules


def _choose(change: Change, patterns: Sequence[str] | None) -> list[str]:
    """The modules to extract, in order of name."""
    linear = [name for name in sorted(change.base.tensors) if _is_linear(change, name)]
    if patterns is None:
        return [name.removesuffix(".weight") for name in linear if not is_embedding(name)]
    modules = [name.removesuffix(".weight") for name in linear]
    chosen: set[str] = set()
    for pattern in patterns:
        ways = (pattern, f"*.{pattern}")
        matching = {m for m in modules if any(fnmatch.fnmatchcase(m, way) for way in ways)}
        if not matching:
            last_names = {module.rpartition(".")[2] for module in modules}
            raise RecipeError(
                f"modules: {pattern!r} matches no linear layer{did_you_mean(pattern, last_names)}; "
                f"there are {', '.join(sorted(last_names)) or 'none'}"
            )
        chosen |= matching
    return sorted(chosen)


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


def _extract(
    change: Change, chosen: Sequence[str], wanted: Wanted, output: AdapterOutput, transposed: bool
) -> Iterator[ModuleReport]:
    for module in chosen:
        matrix = change.read_matrix(f"{module}.weight")
        low_rank = truncate_matrix(matrix.T if transposed else matrix, wanted, module)
        if low_rank.rank:
            output.put(f"{module}.lora_A.weight", low_rank.right)
            output.put(f"{module}.lora_B.weight", low_rank.left)
            norm = sqrt(low_rank.squared)
            yield ModuleReport(module, (), low_rank.rank, norm, low_rank.error)


# ---------------------------------------------------------------- everything else


def _sort_others(
    change: Change, targets: set[str], save_others: bool, is_tied: bool
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
            reason = f"another shape in base and model ({info.form} and {tuned.form})"
            left_out.append(LeftOut(tensor, 0.0, reason))
        elif norm := change.norm(tensor):
            module = tensor.rpartition(".")[0]
            together = {name for name in change.base.tensors if name.startswith(f"{module}.")}
            reason = "no linear layer that was chosen, and save_others is not set"
            if save_others:
                reason = _why_not_saved(change, tensor, targets, together, is_tied)
            if reason:
                left_out.append(LeftOut(tensor, norm, reason))
            else:  # PEFT stores a module as a whole; of one with a LoRA, the bias alone
                saved |= {tensor} if module in targets else together
    return sorted(saved), left_out


def _why_not_saved(
    change: Change, tensor: str, targets: set[str], together: set[str], is_tied: bool
) -> str:
    """The reason why a changed tensor cannot be stored in full; empty if it can."""
    module, _, parameter = tensor.rpartition(".")
    if is_tied and (is_tied_embedding(tensor) or is_tied_head(tensor)):
        return "embedding and head are tied, and PEFT would store one without the other"
    if module in targets:
        return "" if parameter == "bias" else "beside a LoRA, PEFT stores nothing but a bias"
    if not module or any("." in name.removeprefix(f"{module}.") for name in together):
        return "its module holds other modules, and PEFT would store them all"
    if not all(change.base.tensors[name].dtype.is_weight for name in together):
        return "its module also holds tensors that are no weights"
    return ""
