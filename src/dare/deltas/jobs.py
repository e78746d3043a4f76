"""What there is to do for a delta file: a plan whose chunks are coded, and what is said of them.

What is kept is what a merge of this one model would keep: plan, surveys and masks are those of
`dare+sum` or `trim+sum`, and only the last step differs. For a lossless file the plan copies the
model, with the base beside it.
"""

from __future__ import annotations

import glob
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from dare.checks.sample import sample_models
from dare.deltas.packing import LosslessCoder, Packer, Scheme
from dare.documents.notices import notice
from dare.errors import InputError
from dare.inputs.delta_files import DeltaSource, is_delta_file, sample
from dare.inputs.delta_notes import (
    MAX_FILE_BYTES,
    UNKNOWN,
    VERSION,
    DeltaNotes,
    StoredFile,
    StoredTensor,
    is_inside,
)
from dare.inputs.directory import collect, read_config
from dare.inputs.formats import open_inputs
from dare.inputs.hub import resolve
from dare.inputs.lora import LoraSource
from dare.inputs.names import match_names
from dare.inputs.sources import (
    INDEX_NAME,
    MAX_INDEX_BYTES,
    FileSource,
    RenamedSource,
    Source,
    SourceView,
    open_source,
)
from dare.output.journal import Record
from dare.planning.data import Fate, TensorPlan
from dare.planning.make import make_plan
from dare.planning.plan import Plan
from dare.recipe.schema import Recipe, TensorRule
from dare.run.execute import MakeWorker
from dare.stages import Stage, find_stage
from dare.tensors.digest import bytes_digest, model_digest, tensor_digest
from dare.tensors.files import read_limited
from dare.tensors.header import TensorInfo
from dare.tensors.mask import MASK_VERSION, check_drop_rate
from dare.tensors.names import is_embedding
from dare.tensors.planes import pack

Records = Mapping[str, Sequence[Record]]
"""By tensor, in order of their chunks."""


@dataclass(frozen=True)
class Job:
    """All that differs between one kind of delta file and another."""

    plan: Plan
    """Its first input is what the chunks' first digests are of."""
    make_worker: MakeWorker
    describe: Callable[[Records], DeltaNotes]
    """What is known when all chunks are coded."""
    settings: Mapping[str, Any]
    """What was asked for."""
    files: Mapping[str, tuple[StoredFile, bytes]] = field(default_factory=dict)
    """What else the model's folder holds, and how it is stored, if the base has it not."""


# ---------------------------------------------------------------- what is kept of a change


def lossy_job(
    given: Mapping[str, Any],
    scheme: Scheme,
    seed: int,
    drop_rates: Mapping[str, float],
    embedding_drop_rate: float | None,
) -> Job:
    """Pack what a scheme keeps; `given` are fields of a recipe."""
    method, stage = find_stage(adds_up=True).name, find_stage(keeps=scheme.keep)
    recipe, inputs = open_inputs(Recipe(**given, method=method, seed=seed))
    (model,), (entry,) = inputs.models, recipe.models
    _check_model(entry.file, model)
    rates = dict(drop_rates)
    if embedding_drop_rate is not None:
        embeddings = (glob.escape(name) for name in inputs.base.tensors if is_embedding(name))
        rates = {**dict.fromkeys(sorted(embeddings), embedding_drop_rate), **rates}
    files = _files_beside(*inputs.folders)
    rules = tuple(
        TensorRule(match=pattern, settings=_setting(stage, rate)) for pattern, rate in rates.items()
    )
    stages = {stage.name: _setting(stage, scheme.drop_rate)}
    method = f"{stage.name}+{recipe.method}"
    recipe = recipe.model_copy(update={"tensors": rules, "method": method, "stages": stages})
    whole = make_plan(recipe, inputs.base, inputs.models, inputs.names, inputs.notes)
    held = [t for t in whole.tensors if t.fate in (Fate.MERGED, Fate.COPIED)]
    coded = [t for t in held if t.tied_to is None and t.name in model.tensors]
    tied = [t for t in held if t.tied_to is not None and t.name in model.tensors]
    plan = _with_notices(replace(whole, tensors=tuple(coded)))

    def describe(records: Records) -> DeltaNotes:
        stored = {t.name: _kept_tensor(t, model, records[t.key]) for t in (*coded, *tied)}
        infos = {name: (inputs.base.tensors[name], model.tensors[name]) for name in stored}
        return DeltaNotes(
            version=VERSION,
            mask=MASK_VERSION if scheme.keep == "random" else None,
            scheme=scheme.keep,
            bits=scheme.bits,
            seed=seed if scheme.keep == "random" else None,
            drop_rate=scheme.drop_rate,
            base=model_digest((infos[n][0], str(tensor.base)) for n, tensor in stored.items()),
            model=model_digest((infos[n][1], tensor.model) for n, tensor in stored.items()),
            sample=sample(inputs.base),
            tensors=stored,
            files={name: file for name, (file, _) in files.items()},
            index=UNKNOWN,
            check=UNKNOWN,
        )

    settings = {
        "keep": scheme.keep,
        "drop_rate": scheme.drop_rate,
        "bits": scheme.bits,
        "seed": seed,
        "drop_rates": rates,
    }
    return Job(plan, partial(Packer, scheme), describe, settings, files)


def _with_notices(plan: Plan) -> Plan:
    """The plan with what is amiss, and a word if the change had better be kept as a LoRA."""
    sample = sample_models(plan, finds_rank=True)
    notices = [found for found in sample.notices if found.code != "low_rank"]
    (rank,), (entry,) = sample.low_ranks, plan.recipe.models
    if rank is not None:
        command = ["dare", "lora", "extract", "--base", str(plan.recipe.base)]
        command += ["--model", str(entry.file), "--output", f"{entry.name}-lora"]
        extract = shlex.join([*command, "--rank", str(rank)])
        notices.append(notice("fits_lora", str(entry.file), rank=rank, command=extract))
    return replace(plan, warnings=(*plan.warnings, *notices))


def _setting(stage: Stage, drop_rate: float) -> dict[str, float]:
    rate = check_drop_rate(drop_rate)
    return {"drop_rate": rate} if "drop_rate" in stage.parameters else {"keep_ratio": 1.0 - rate}


def _rate(settings: Mapping[str, Any]) -> float:
    return float(settings["drop_rate"] if "drop_rate" in settings else 1.0 - settings["keep_ratio"])


def _check_model(path: Path, model: Source) -> None:
    inner = model
    while isinstance(inner, SourceView):
        inner = inner.inner
    if isinstance(inner, DeltaSource):
        raise InputError(f"{path}: is already a delta file; `dare apply` turns it into a model")
    if isinstance(inner, LoraSource):
        raise InputError(f"{path}: is already stored as an adapter, which is small; keep it")


def _kept_tensor(tensor: TensorPlan, model: Source, records: Sequence[Record]) -> StoredTensor:
    rate = _rate(tensor.settings[0][0]) if tensor.is_merged else 0.0
    return StoredTensor(
        shape=tensor.shape,
        dtype=model.tensors[tensor.name].dtype.name,
        model=tensor_digest(record.inputs[-1] for record in records),
        base=tensor_digest(record.inputs[0] for record in records),
        drop_rate=rate,
        tied_to=tensor.tied_to,
    )


# ---------------------------------------------------------------- all of a model


def lossless_job(given: Mapping[str, Any]) -> Job:
    """Code the files of a model against those of its base."""
    recipe = Recipe(**given, method=find_stage(adds_up=True).name)
    (entry,) = recipe.models
    places = [resolve(path, verbose=recipe.verbose).path for path in (recipe.base, entry.file)]
    base, model = (_open_files(path) for path in places)
    configs = [read_config(path) for path in places]
    # the base under the model's names
    matched = match_names(model, base, "base", base_config=configs[1], model_config=configs[0])
    tensors = [_copied(info, matched.source) for _, info in sorted(model.tensors.items())]
    bases, notes = (matched.source,), matched.notes
    plan = Plan(recipe, model, bases, ("base",), tuple(tensors), (), (), None, notes)
    files = {file.name: _header(file, header.data_start) for file, header in model.headers.items()}
    folders = [path if path.is_dir() else None for path in places]
    files |= _files_beside(*folders)
    if folders[1] is not None and (index := folders[1] / INDEX_NAME).exists():
        files[INDEX_NAME] = _described("whole", read_limited(index, MAX_INDEX_BYTES))

    def describe(records: Records) -> DeltaNotes:
        stored = {t.name: _coded_tensor(t, matched.source, records[t.name]) for t in tensors}
        named = {tensor.base_name or name: tensor.base for name, tensor in stored.items()}
        return DeltaNotes(
            version=VERSION,
            scheme="lossless",
            base=model_digest((base.tensors[n], digest) for n, digest in named.items() if digest),
            model=model_digest((model.tensors[n], tensor.model) for n, tensor in stored.items()),
            sample=sample(base),
            tensors=stored,
            files={name: file for name, (file, _) in files.items()},
            index=UNKNOWN,
            check=UNKNOWN,
        )

    return Job(plan, LosslessCoder, describe, {"lossless": True}, files)


def _open_files(path: Path) -> FileSource:
    source = open_source(path)
    if is_delta_file(source):
        raise InputError(f"{path}: is already a delta file; `dare apply` turns it into a model")
    return source


def _copied(info: TensorInfo, base: Source) -> TensorPlan:
    """A tensor of the model, and the base's where that is of the same type and shape."""
    other = base.tensors.get(info.name)
    is_like = other is not None and (other.dtype, other.shape) == (info.dtype, info.shape)
    models = (0,) if is_like else ()
    given, kind = ((),) * len(models), info.dtype
    return TensorPlan(info.name, Fate.COPIED, info.shape, info, kind, models, given, (), {})


def _coded_tensor(tensor: TensorPlan, base: Source, records: Sequence[Record]) -> StoredTensor:
    names = base.names if isinstance(base, RenamedSource) else {}
    base_name = names.get(tensor.name, tensor.name)
    return StoredTensor(
        shape=tensor.shape,
        dtype=tensor.dtype.name,
        model=tensor_digest(record.inputs[0] for record in records),
        base=tensor_digest(r.inputs[1] for r in records) if tensor.models else None,
        base_name=base_name if tensor.models and base_name != tensor.name else None,
    )


# ---------------------------------------------------------------- what lies beside the weights


def _header(file: Path, nbytes: int) -> tuple[StoredFile, bytes]:
    with file.open("rb") as opened:
        return _described("header", opened.read(nbytes))


def _files_beside(base: Path | None, model: Path | None) -> dict[str, tuple[StoredFile, bytes]]:
    """Configuration and tokenizer of a model, and which of them are as in the base."""
    files: dict[str, tuple[StoredFile, bytes]] = {}
    if model is None:
        return files
    for name in filter(lambda name: (model / name).is_file(), sorted(collect(model).files)):
        if not is_inside(name):
            raise InputError(f"{str(model / name)!r}: not a name on every system; rename the file")
        content = read_limited(model / name, MAX_FILE_BYTES)
        other = base / name if base else None
        has_same = other and other.is_file() and read_limited(other, MAX_FILE_BYTES) == content
        files[name] = _described("base" if has_same else "whole", content)
    return files


def _described(
    kind: Literal["header", "whole", "base"], content: bytes
) -> tuple[StoredFile, bytes]:
    """What is said of a file, and what is stored of it."""
    coded = b"" if kind == "base" else pack(np.frombuffer(content, np.uint8), None, 1)
    digest = None if kind == "base" else bytes_digest(coded)
    file = StoredFile(kind=kind, size=len(content), digest=bytes_digest(content), coded=digest)
    return file, coded
