"""A mixture is built: a stack of tensors from base and experts, written by the engine of merges.

Nothing is merged, so there is no plan of another kind. The mixture is presented as one source, in
which the MLPs of the experts have the names of the target's architecture, and the gates lie in
memory. The engine copies it like any base that has no models.
"""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from importlib.resources import files
from os import PathLike
from pathlib import Path
from typing import Any, Self

import numpy as np

from dare import kernels
from dare.documents.document import Document, Section, tabulate
from dare.documents.notices import LIMIT, Notice, notice
from dare.documents.words import times
from dare.errors import InputError, MismatchError, RecipeError, did_you_mean
from dare.inputs.opening import Inputs, open_inputs
from dare.inputs.sources import (
    WEIGHTS,
    Aligned,
    ArraySource,
    DeltaInfo,
    Raw,
    Source,
    SourceView,
    StackedSource,
    read_config,
    read_floats,
)
from dare.lora.reading import list_findings
from dare.mixtures.gates import Floats, draw_normal, make_gates
from dare.mixtures.mixture import RANDOM, Expert, Mixture, load_mixture
from dare.output.journal import JournalContent
from dare.output.receipt import Report, portable_path, short_name
from dare.output.sidecars import CARD_NAME, fenced, front_matter, with_sidecars
from dare.planning.data import is_directory_target
from dare.planning.make import fit_tensor, make_plan
from dare.planning.plan import Plan
from dare.recipe.entries import write_toml
from dare.recipe.options import RunOptions
from dare.recipe.recipe import Recipe
from dare.run.engine import Receipt, run
from dare.run.merging import Merge
from dare.stores.locations import to_path
from dare.tensors.chunks import bytes_digest
from dare.tensors.dtypes import STORAGE_TYPES, StorageType
from dare.tensors.header import TensorInfo

_DATA = tomllib.loads(files("dare.mixtures").joinpath("layouts.toml").read_text("utf-8"))
LAYOUTS: dict[str, dict[str, Any]] = _DATA["layouts"]
PIECE = 1 << 16  # elements of an expert that are computed at once
PIECE_BYTES = 150 * PIECE  # about what that takes, noise included
_PART = re.compile(r"(.*\blayers\.\d+)\.mlp\.(gate|up|down)_proj\.weight")
_BIAS = re.compile(r".*\.self_attn\.([qkvo])_proj\.bias")


def moe(
    recipe: str | PathLike[str] | Mapping[str, Any],
    *,
    output: str | PathLike[str] | None = None,
    overwrite: bool = False,
    resume: bool = True,
    verbose: bool = True,
    **settings: Any,
) -> MixtureReport:
    """Build a mixture of experts from fine-tunes, and say what was done.

    The recipe is a TOML file, its tables, a configuration of mergekit-moe or an earlier output.
    Settings are fields of the recipe and of `RunOptions`, and change what it says.
    """
    mixture, options = load_mixture(recipe, output=output, verbose=verbose, **settings)
    return run(plan_mixture(mixture, options), overwrite=overwrite, resume=resume)


def plan_mixture(mixture: Mixture, options: RunOptions) -> Mix:
    """Open the models, make the gates, and plan how all is written."""
    if mixture.output is None or not is_directory_target(mixture.output):
        raise RecipeError(
            "output: name a directory (--output PATH); a mixture needs its config.json"
        )
    given = dict.fromkeys(e.model for e in (*mixture.experts, *mixture.shared_experts))
    shared = {"allow_pickle": mixture.allow_pickle}
    asked = Recipe(base=mixture.base, models=list(given), on_mismatch="base", **shared)
    found, inputs = open_inputs(asked, options)
    models = dict(zip(given, inputs.models, strict=True))
    pinned = dict(zip(given, (entry.file for entry in found.models), strict=True))
    pinned[mixture.base] = found.base
    home = inputs.folders[0]
    config = {} if home is None else read_config(home)
    if home is None or not config:
        raise InputError(f"{mixture.base}: has no config.json, which a mixture needs")
    name = choose_layout(mixture, str(config.get("model_type")))
    source, gates = _stack(mixture, LAYOUTS[name], inputs, models, home, options.backend)
    mixture = mixture.with_files(lambda path: pinned[path])
    same = {key: getattr(mixture, key) for key in ("output", "dtype", "seed", "shard_size")}
    recipe = Recipe(base=mixture.base, models=(), output_digest=mixture.output_digest, **same)
    planned = make_plan(recipe, source, (), (), inputs.notes, options)
    changes = changed_config(mixture, name, config)
    alone = Inputs((), (home,), Aligned(source, ()), (), changes)
    planned = with_sidecars(planned, alone)
    warnings = (*planned.warnings, *_warnings(mixture, name, gates))
    return Mix(replace(planned, warnings=warnings), mixture, name)


# ---------------------------------------------------------------- architectures


def choose_layout(mixture: Mixture, kind: str) -> str:
    """Return the architecture that was asked for, or the first that fits; say what does not."""
    asked = mixture.architecture
    if asked is not None and asked not in LAYOUTS:
        known = f"{did_you_mean(asked, LAYOUTS)}; there are {', '.join(LAYOUTS)}"
        raise RecipeError(f"architecture = {asked!r}: is not supported{known}")
    problems = {name: _problem(mixture, LAYOUTS[name], kind) for name in LAYOUTS}
    for name in [asked] if asked else LAYOUTS:
        if not problems[name]:
            return name
    listed = (f"{name}: {text}" for name, text in problems.items() if asked in (None, name))
    raise RecipeError(f"{mixture.base}: {'; '.join(listed)}")


def _problem(mixture: Mixture, layout: Mapping[str, Any], kind: str) -> str:
    """Return what of a mixture an architecture does not support; empty if it can be made."""
    (least, most), count = layout["shared_experts"], len(mixture.shared_experts)
    prompts = any(expert.prompts for expert in mixture.shared_experts)
    if kind not in layout["bases"]:
        return f"a base of type {kind} is not supported (but {', '.join(layout['bases'])})"
    if not least <= count <= most:
        return f"{times(count, 'shared expert')} is not supported (but {least} to {most})"
    if "shared_gate" in layout and not prompts and mixture.gates not in RANDOM:
        return "a shared expert without prompts is not supported"
    if "shared_gate" not in layout and prompts:
        return "a shared expert with prompts is not supported: it has no gate"
    return ""


def changed_config(mixture: Mixture, name: str, base: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values in which a mixture's configuration differs from the base's."""
    rope = {} if "rope_parameters" in base else {"rope_theta": 10000.0}
    unsaid = _DATA["unsaid"][base["model_type"]] | rope
    values = {key: value for key, value in unsaid.items() if base.get(key) is None}
    values |= {**dict.fromkeys(LAYOUTS[name].get("absent", ())), **LAYOUTS[name]["config"]}
    counts = {"experts": len(mixture.experts), "shared": len(mixture.shared_experts) or None}
    given = {f"{{{key}}}": value for key, value in {**base, **counts}.items()}
    filled = {k: given.get(v, v) if isinstance(v, str) else v for k, v in values.items()}
    return {**filled, "model_type": name, "num_experts_per_tok": mixture.experts_per_token}


def _warnings(mixture: Mixture, name: str, gates: Floats) -> Iterator[Notice]:
    layers = [n for n, gate in enumerate(gates) if np.linalg.cond(gate) > LIMIT.gate_condition]
    if layers:
        which = f"{len(layers)} of {len(gates)} layers"
        yield notice("degenerate_gates", which, first=layers[0])
    if len({expert.model for expert in mixture.experts}) == 1:
        yield notice("same_experts", short_name(mixture.experts[0].model))
    if name == "deepseek":
        yield notice("remote_code")


# ---------------------------------------------------------------- the source


def _stack(
    mixture: Mixture,
    layout: Mapping[str, Any],
    inputs: Inputs,
    models: Mapping[Path, Source],
    home: Path,
    backend: str,
) -> tuple[StackedSource, Floats]:
    """Give every tensor of base, experts and gates its name in the mixture."""
    base, named = inputs.base, list(zip(inputs.names, inputs.models, strict=True))
    parts = {name: match for name in base.tensors if (match := _PART.fullmatch(name))}
    problems = list(_unsupported(base, layout))
    problems += [str(m) for name in parts for m in fit_tensor(base.tensors[name], named).misfits]
    if problems or not parts:
        found = problems or [f"{mixture.base}: has no MLPs such as layers.0.mlp.up_proj.weight"]
        raise MismatchError("a mixture cannot be made of these models:", *list_findings(found))
    first = base.tensors[next(name for name, match in parts.items() if match[2] == "up")]
    dtype = STORAGE_TYPES[mixture.dtype] if mixture.dtype else first.dtype
    tensors = {name: (base, name) for name in base.tensors if name not in parts}
    places = [layout["expert"].format(number=n) for n in range(len(mixture.experts))]
    places += [layout.get("shared", "")] * len(mixture.shared_experts)
    called: dict[str, str] = layout.get("parts", {})
    for place, expert in zip(places, (*mixture.experts, *mixture.shared_experts), strict=True):
        names = {}
        for name, match in parts.items():
            part = f"{match[2]}_proj"
            names[f"{match[1]}.{place}.{called.get(part, part)}.weight"] = name
        view = ExpertSource(models[expert.model], base, names, expert, mixture, backend)
        tensors |= {name: (view, name) for name in names}
    layers = sorted({match[1] for match in parts.values()}, key=_number)
    gate_names = [f"{layer}.{layout['gate']}" for layer in layers]
    gates = make_gates(mixture, base, home, gate_names, first.shape[1])
    count = len(mixture.experts)
    arrays = dict(zip(gate_names, gates[:, :count], strict=True))
    if "shared_gate" in layout:
        shared = [f"{layer}.{layout['shared_gate']}" for layer in layers]
        arrays |= dict(zip(shared, gates[:, count:], strict=True))
    for layer in layers:
        for letter in layout.get("needed_biases", ""):
            projection = f"{layer}.self_attn.{letter}_proj"
            if f"{projection}.bias" not in base.tensors:
                rows = base.tensors[f"{projection}.weight"].shape[0]
                arrays[f"{projection}.bias"] = np.zeros(rows, np.float32)
    small = MemorySource(arrays, dtype)
    tensors |= {name: (small, name) for name in arrays}
    return StackedSource(tensors, folder=home, ties=base.ties), gates


def _number(layer: str) -> int:
    return int(layer.rpartition(".")[2])


def _unsupported(base: Source, layout: Mapping[str, Any]) -> Iterator[str]:
    """Yield the tensors of a base that the architecture has no place for."""
    for name in base.tensors:
        bias = _BIAS.fullmatch(name)
        is_odd = ".mlp." in name and not _PART.fullmatch(name)
        if is_odd or (bias and bias[1] not in layout["biases"]):
            yield f"{name}: is not supported by this architecture"


class MemorySource(ArraySource):
    """Small tensors in memory, known by their content."""

    def __init__(self, arrays: Mapping[str, Floats], dtype: StorageType) -> None:
        encoded = {name: np.empty(array.size, dtype.carrier) for name, array in arrays.items()}
        for name, into in encoded.items():
            kernels.load("reference").encode(np.ascontiguousarray(arrays[name]).ravel(), into)
        super().__init__({name: (dtype, arrays[name].shape, encoded[name]) for name in arrays})
        self._content = bytes_digest(b"".join(into.tobytes() for into in encoded.values()))

    def fingerprint(self) -> list[Any]:
        return [*super().fingerprint(), self._content]


class ExpertSource(SourceView):
    """The MLPs of a model under an expert's names, in the type that the mixture has there.

    A LoRA is added to the base. Noise and scale are applied in float32, and rounded once.
    """

    def __init__(
        self,
        inner: Source,
        base: Source,
        names: Mapping[str, str],
        expert: Expert,
        mixture: Mixture,
        backend: str,
    ) -> None:
        self._base, self._expert = base, expert
        self._seed, self._backend = mixture.seed, backend
        tensors, computed = {}, set()
        for name, old in names.items():
            stored, theirs = inner.tensors.get(old), base.tensors[old]
            dtype = STORAGE_TYPES[mixture.dtype] if mixture.dtype else theirs.dtype
            tensors[name] = TensorInfo(name, dtype, theirs.shape, 0)
            is_plain = stored is not None and stored.dtype == dtype
            is_plain &= not (expert.noise_scale or inner.delta_of(old).is_change)
            computed |= set() if is_plain and self._scale(old) == 1 else {name}
        super().__init__(inner, tensors, names, computed=computed, opened=(inner, base))
        self.cost = inner.cost.with_reading(PIECE_BYTES if computed else 0)

    def _scale(self, old: str) -> float:
        return self._expert.residual_scale if ".down_proj." in old else 1.0

    def delta_of(self, name: str) -> DeltaInfo:
        return WEIGHTS if name in self.computed else super().delta_of(name)

    def fingerprint(self) -> list[Any]:
        own = [self._expert.noise_scale, self._expert.residual_scale, self._seed]
        return [*super().fingerprint(), *own, self._base.fingerprint()]

    def compute(self, name: str, start: int, into: Raw) -> None:
        old, kernel = self.names[name], kernels.load(self._backend)
        for offset in range(0, into.size, PIECE):
            part = into[offset : offset + PIECE]
            place = old, start + offset, part.size
            has_it = old in self.inner.tensors
            values = read_floats(self.inner if has_it else self._base, *place, self._backend)
            if has_it and self.inner.delta_of(old).is_change:
                values += read_floats(self._base, *place, self._backend)
            if noise := self._expert.noise_scale:
                values += np.float32(noise) * draw_normal(self._seed, name, *place[1:])
            if (scale := self._scale(old)) != 1:
                values *= np.float32(scale)
            kernel.encode(values, part)


# ---------------------------------------------------------------- the work


@dataclass(frozen=True, repr=False)
class MixtureReport(Report):
    """The figures and warnings of a mixture."""

    architecture: str
    experts: tuple[str, ...]
    """Names of the experts' models, shared ones last."""

    @classmethod
    def of(cls, report: Report, mixture: Mixture, architecture: str) -> Self:
        """Return the report of a mixture that the engine has made."""
        models = (expert.model for expert in (*mixture.experts, *mixture.shared_experts))
        return cls(
            **vars(report), architecture=architecture, experts=tuple(map(short_name, models))
        )

    def document(self) -> Document:
        """Return what was done, and what to do next."""
        output, rows = shlex.quote(str(self.output)), list(enumerate(self.experts))
        table = tabulate(rows, {"expert": lambda row: str(row[0]), "model": lambda row: row[1]})
        steps = {"verify": f"dare verify {output}", "repeat": f"dare moe {output} --output OTHER"}
        return replace(
            super().document(),
            title=f"Built a mixture of {len(rows)} experts ({self.architecture}) in {self.seconds:.1f} s",
            sections=(Section("experts", "Experts", (table,), is_brief=True),),
            steps=steps,
        )


class Mix(Merge):
    """A mixture, written by the engine as a merge without models."""

    verb = "mixing"

    def __init__(self, plan: Plan, mixture: Mixture, architecture: str) -> None:
        super().__init__(plan)
        self._of = mixture, architecture

    def recognise(self, found: JournalContent) -> Report | None:
        report = super().recognise(found)
        return report and MixtureReport.of(report, *self._of)

    def _receipt_of(self, report: Report) -> Receipt[Report]:
        receipt, (mixture, architecture) = super()._receipt_of(report), self._of
        output = self.layout.target
        portable = mixture.with_files(lambda path: to_path(portable_path(path, output)))
        return replace(
            receipt,
            report=MixtureReport.of(report, *self._of),
            manifest={**(receipt.manifest or {}), "mixture": portable.to_tables()},
            files={**receipt.files, CARD_NAME: self._card()},
        )

    def _card(self) -> bytes:
        mixture, architecture = self._of
        paths = [mixture.base, *(e.model for e in (*mixture.experts, *mixture.shared_experts))]
        shortened = mixture.with_files(lambda path: to_path(short_name(path)))
        title = self.layout.target.name
        text = f"""{front_matter(self.plan, paths, "moe")}
# {title}

A mixture of {len(mixture.experts)} experts ({architecture}), of which each token takes
{mixture.experts_per_token}, built by dare. Gates: {mixture.gates}.

## Recipe

{fenced("toml", write_toml(shortened.to_tables()))}
"""
        return text.encode(errors="replace")
