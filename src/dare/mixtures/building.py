"""A mixture is built: a stack of tensors from base and experts, written by the engine of merges.

Nothing is merged, so there is no plan of another kind. The mixture is presented as one source, in
which the MLPs of the experts have the names of the target's architecture, and the gates lie in
memory. The engine copies it like any base that has no models.
"""

from __future__ import annotations

import re
import shlex
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from importlib.resources import files
from math import sqrt
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dare.documents.document import Document, Section, tabulate
from dare.documents.notices import LIMIT, Notice, notice
from dare.documents.words import counted
from dare.errors import InputError, MismatchError, RecipeError, did_you_mean, needed
from dare.inputs.directory import TOKENIZER_CONFIG, main_type, read_json, read_text
from dare.inputs.opening import Inputs
from dare.inputs.sources import (
    WEIGHTS,
    Aligned,
    ArraySource,
    DeltaInfo,
    Floats,
    Raw,
    Source,
    SourceView,
    StackedSource,
    hold_open,
    read_config,
    read_floats,
)
from dare.inputs.transformers_models import load_live
from dare.inputs.vocabulary import TOKENIZER_FILE
from dare.lora.reading import list_findings
from dare.mixtures.mixture import RANDOM, Expert, Mixture, load_mixture
from dare.output.receipt import Report, portable_path, short_name
from dare.output.sidecars import CARD_NAME, fenced, front_matter
from dare.planning.data import is_directory_target
from dare.planning.make import find_extras, fit_tensor
from dare.planning.plan import Plan
from dare.recipe.entries import write_toml
from dare.recipe.options import RunOptions
from dare.recipe.recipe import Recipe
from dare.run.engine import Receipt, run
from dare.run.merging import Merge
from dare.run.nested import open_recipe, plan_inputs
from dare.stores.locations import to_path
from dare.tensors.chunks import bytes_digest
from dare.tensors.dtypes import STORAGE_TYPES
from dare.tensors.header import TensorInfo
from dare.tensors.mask import mask_key, philox4x32

Vectors = NDArray[np.float64]  # a row for each layer

_DATA = tomllib.loads(files("dare.mixtures").joinpath("layouts.toml").read_text("utf-8"))
LAYOUTS: dict[str, dict[str, Any]] = _DATA["layouts"]
PIECE = 1 << 16  # elements of an expert that are computed at once
PIECE_BYTES = 150 * PIECE  # about what that takes, noise included
FLOAT32 = STORAGE_TYPES["F32"]
EMBEDDING = "model.embed_tokens.weight"
DRAW = 2  # third counter word of these draws; the mask has 0 and 1
LEAST_NORM = 1e-8
_PART = re.compile(r"(.*\blayers\.\d+)\.mlp\.((?:gate|up|down)_proj)\.weight")
_BIAS = re.compile(r".*\.self_attn\.([qkvo])_proj\.bias")


def moe(
    recipe: str | PathLike[str] | Mapping[str, Any],
    *,
    output: str | PathLike[str] | None = None,
    overwrite: bool = False,
    resume: bool = True,
    verbose: bool = True,
    **settings: Any,
) -> Report:
    """Build a mixture of experts from fine-tunes; return a report.

    The recipe is a TOML file, its tables, a configuration of mergekit-moe or an earlier output.
    Settings are fields of the recipe and of `RunOptions`; they override the recipe's own.
    """
    mixture, options = load_mixture(recipe, output=output, verbose=verbose, **settings)
    return run(plan_mixture(mixture, options), overwrite=overwrite, resume=resume)


def plan_mixture(mixture: Mixture, options: RunOptions) -> MixtureMerge:
    """Open the models, make the gates, and plan how all is written."""
    if mixture.output is None or not is_directory_target(mixture.output):
        raise RecipeError("output: a mixture needs a config.json; name a folder (--output PATH)")
    given = list(dict.fromkeys(expert.model for expert in mixture.all_experts))
    pickles = {"allow_pickle": mixture.allow_pickle}
    asked = Recipe(base=mixture.base, models=given, on_mismatch="base", **pickles)
    found, inputs = open_recipe(asked, options)
    config, *others = (read_config(home) if home else {} for home in inputs.folders)
    if not config:
        raise InputError(f"{mixture.base}: has no config.json, which a mixture needs")
    kind = str(config.get("model_type"))
    for model, other in zip(inputs.names, others, strict=True):
        if (found_kind := other.get("model_type", kind)) != kind:
            raise MismatchError(f"{model}: is of type {found_kind}, but the base is {kind}")
    name = choose_layout(mixture, kind)
    models = dict(zip(given, inputs.models, strict=True))
    source, gates = _stack(mixture, LAYOUTS[name], inputs, models)
    pinned = dict(zip(given, (entry.file for entry in found.models), strict=True))
    mixture = mixture.with_files((pinned | {mixture.base: found.base}).__getitem__)
    main = main_type((name, info.dtype, info.shape) for name, info in inputs.base.tensors.items())
    same = {key: getattr(mixture, key) for key in ("base", "output", "output_digest", "shard_size")}
    dtype = mixture.dtype or (main and main.name)
    recipe = Recipe(models=(), method="passthrough", dtype=dtype, **same)
    changes = changed_config(mixture, name, config)
    alone = Inputs((), inputs.folders[:1], Aligned(source, ()), inputs.notes, changes)
    planned = plan_inputs(recipe, alone, options)
    planned = planned.saying(warnings=_warnings(mixture, name, gates))
    return MixtureMerge(planned, mixture, name)


# ---------------------------------------------------------------- architectures


def choose_layout(mixture: Mixture, kind: str) -> str:
    """Return the architecture that was asked for, or the first that fits; say what does not."""
    asked = mixture.architecture
    if asked is not None and asked not in LAYOUTS:
        known = f"{did_you_mean(asked, LAYOUTS)}; there are {', '.join(LAYOUTS)}"
        raise RecipeError(f"architecture = {asked!r}: is not supported{known}")
    problems = {n: _problem(mixture, LAYOUTS[n], kind) for n in LAYOUTS if asked in (None, n)}
    if (found := next((n for n, problem in problems.items() if not problem), None)) is None:
        listed = "; ".join(f"{name}: {problem}" for name, problem in problems.items())
        raise RecipeError(f"{mixture.base}: {listed}")
    return found


def _problem(mixture: Mixture, layout: Mapping[str, Any], kind: str) -> str:
    """Return what of a mixture an architecture does not support; empty if it can be made."""
    shared, (least, most) = mixture.shared_experts, layout["shared_experts"]
    bases, count = ", ".join(layout["bases"]), counted(len(shared), "shared expert")
    is_gated, takes_gate = len(mixture.gated) > len(mixture.experts), "shared_gate" in layout
    problems = {
        f"a base of type {kind} is not supported (only {bases})": kind not in layout["bases"],
        f"{count} given, but {least} to {most} allowed": not least <= len(shared) <= most,
        "a shared expert without prompts is not supported": takes_gate and not is_gated,
        "prompts of a shared expert are not supported": not takes_gate
        and any(expert.prompts for expert in shared),
    }
    return next((text for text, holds in problems.items() if holds), "")


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
    mixture: Mixture, layout: Mapping[str, Any], inputs: Inputs, models: Mapping[Path, Source]
) -> tuple[StackedSource, Floats]:
    """Give every tensor of base, experts and gates its name in the mixture."""
    base, named = inputs.base, list(zip(inputs.names, inputs.models, strict=True))
    parts = {name: match.groups() for name in base.tensors if (match := _PART.fullmatch(name))}
    problems = [] if parts else [f"{mixture.base}: has no tensors such as mlp.up_proj.weight"]
    unsupported = (name for name in base.tensors if _is_unsupported(name, layout["biases"]))
    problems += [f"{name}: is not supported by this architecture" for name in unsupported]
    problems += [str(m) for name in parts for m in fit_tensor(base.tensors[name], named).misfits]
    problems += [str(extra) for extra in find_extras(base, named) if ".mlp." in extra.tensor]
    if problems:
        raise MismatchError("a mixture cannot be made of these:", *list_findings(problems))
    tensors: dict[str, tuple[Source, str]] = {n: (base, n) for n in base.tensors if n not in parts}
    places = [layout["expert"].format(number=n) for n in range(len(mixture.experts))]
    places += [layout.get("shared", "")] * len(mixture.shared_experts)
    called = layout.get("parts", {})
    for place, expert in zip(places, mixture.all_experts, strict=True):
        names = {
            f"{layer}.{place}.{called.get(part, part)}.weight": name
            for name, (layer, part) in parts.items()
        }
        view = ExpertSource(models[expert.model], base, names, expert, mixture.seed)
        tensors |= {name: (view, name) for name in names}
    layers = sorted({layer for layer, _ in parts.values()}, key=lambda name: (len(name), name))
    width, count = base.tensors[f"{layers[0]}.mlp.up_proj.weight"].shape[1], len(mixture.experts)
    gate_names = [f"{layer}.{layout['gate']}" for layer in layers]
    assert inputs.folders[0] is not None
    gates = make_gates(mixture, base, inputs.folders[0], gate_names, width)
    arrays = dict(zip(gate_names, gates[:, :count], strict=True))
    for layer, gate in zip(layers, gates, strict=True):
        arrays |= {f"{layer}.{name}": gate[count:] for name in layout.get("shared_gate", ())}
        for letter in layout.get("needed_biases", ""):
            projection = f"{layer}.self_attn.{letter}_proj"
            rows = base.tensors[f"{projection}.weight"].shape[0]
            arrays[f"{projection}.bias"] = np.zeros(rows, np.float32)
    arrays = {name: array for name, array in arrays.items() if name not in base.tensors}
    small = SmallSource({n: (FLOAT32, a.shape, a.ravel()) for n, a in arrays.items()})
    tensors |= {name: (small, name) for name in arrays}
    return StackedSource(tensors, inputs.folders[0], ties=base.ties, tied=base.tied), gates


def _is_unsupported(name: str, biases: str) -> bool:
    """Tell if an architecture has no place for a tensor of the base."""
    bias = _BIAS.fullmatch(name)
    return bias[1] not in biases if bias else ".mlp." in name and not _PART.fullmatch(name)


class SmallSource(ArraySource):
    """Small tensors in memory, known by their content."""

    def fingerprint(self) -> list[Any]:
        content = b"".join(elements.tobytes() for elements in self._elements.values())
        return [*super().fingerprint(), bytes_digest(content)]


class ExpertSource(SourceView):
    """The MLPs of a model under an expert's names; a LoRA is added to the base.

    Tensors with noise or a scale, and sums, are computed in float32; the engine rounds them once.
    """

    def __init__(
        self, inner: Source, base: Source, names: Mapping[str, str], expert: Expert, seed: int
    ) -> None:
        self._base, self._expert, self._seed = base, expert, seed
        self._summands: dict[str, list[Source]] = {}  # by name: the sources whose values are added
        tensors, computed = {}, set()
        for name, old in names.items():
            stored = inner.tensors.get(old)
            is_change = stored is None or inner.delta_of(old).is_change
            self._summands[name] = [inner] if stored is not None else []
            if is_change:
                self._summands[name].append(base)
            if stored is None or is_change or expert.noise_scale or self._scale(old) != 1:
                stored = TensorInfo(name, FLOAT32, base.tensors[old].shape, 0)
                computed.add(name)
            tensors[name] = replace(stored, name=name)
        super().__init__(inner, tensors, names, computed=computed, opened=(inner, base))
        self.cost = inner.cost.with_reading(PIECE_BYTES if computed else 0)

    def _scale(self, old: str) -> float:
        return self._expert.residual_scale if ".down_proj." in old else 1.0

    def delta_of(self, _name: str) -> DeltaInfo:
        return WEIGHTS

    def fingerprint(self) -> list[Any]:
        settings = [self._expert.noise_scale, self._expert.residual_scale, self._seed]
        return [*super().fingerprint(), *settings, self._base.fingerprint()]

    def compute(self, name: str, start: int, into: Raw) -> None:
        old = self.names[name]
        for offset in range(0, into.size, PIECE):
            values = into[offset : offset + PIECE]
            place = start + offset, values.size
            summands = (read_floats(source, old, *place) for source in self._summands[name])
            values[:] = reduce(np.add, summands)
            if noise := self._expert.noise_scale:
                values += np.float32(noise) * draw_normal(self._seed, name, *place)
            values *= np.float32(self._scale(old))


# ---------------------------------------------------------------- the gates


def make_gates(
    mixture: Mixture, base: Source, folder: Path, names: Sequence[str], width: int
) -> Floats:
    """Return the gates by layer, expert and position; `names` are those of their tensors."""
    if mixture.gates in RANDOM:
        size, seed = len(mixture.gated) * width, mixture.seed
        drawn = [
            draw_normal(seed, name, 0, size)
            if mixture.gates == "random"
            else draw_uniform(seed, name, 0, size, width)
            for name in names
        ]
        return np.stack(drawn).reshape(len(names), -1, width)
    gates = []
    with hold_open([base]):
        if mixture.gates == "cheap_embed":
            embed = _sum_embeddings(base, folder)
        else:
            embed = _average_states(folder, of_all_tokens=mixture.gates == "hidden_avg")
        for expert in mixture.gated:
            vectors = embed(expert.prompts)
            if expert.negative_prompts:
                vectors = vectors - embed(expert.negative_prompts)
            gates.append(np.broadcast_to(_normalised(vectors), (len(names), width)))
    return np.stack(gates, axis=1).astype(np.float32)


def _normalised(vectors: Vectors) -> Vectors:
    norms = np.sqrt(np.square(vectors).sum(axis=-1, keepdims=True))
    return np.asarray(vectors / np.maximum(norms, LEAST_NORM))


def _draw(seed: int, name: str, start: int, count: int) -> NDArray[np.uint64]:
    """Draw four words of 32 bits for each of the elements start … start + count."""
    index = np.arange(start, start + count, dtype=np.uint64)
    third = np.full_like(index, DRAW)
    counter = index & np.uint64(0xFFFFFFFF), index >> np.uint64(32), third, np.zeros_like(index)
    return np.stack(philox4x32(counter, mask_key(seed, name)))


def draw_uniform(seed: int, name: str, start: int, count: int, width: int) -> Floats:
    """Draw numbers between ±1/√width."""
    drawn = (_draw(seed, name, start, count)[0] + 0.5) / 2**31 - 1
    return np.asarray(drawn / sqrt(width), np.float32)


def draw_normal(seed: int, name: str, start: int, count: int) -> Floats:
    """Draw numbers of mean 0 and deviation 1: sums of eight uniform ones, nearly normal.

    Unlike logarithms and cosines, sums are the same on every machine.
    """
    words = _draw(seed, name, start, count)
    total = ((words & np.uint64(0xFFFF)) + (words >> np.uint64(16))).sum(axis=0)
    return np.asarray((total - 4.0 * 65535) / sqrt(8 * (65536**2 - 1) / 12), np.float32)


def _sum_embeddings(base: Source, folder: Path) -> Callable[..., Vectors]:
    """Add up the embeddings of all tokens of the prompts, for all layers the same."""
    rows, width = base.tensors[EMBEDDING].shape

    def embed(prompts: Sequence[str]) -> Vectors:
        total = np.zeros((1, width))
        for token in (token for ids in _tokenized(folder, prompts) for token in ids):
            if token >= rows:
                raise InputError(f"{folder}: token {token} is not among the {rows} embeddings")
            total += read_floats(base, EMBEDDING, token * width, width)
        return _normalised(total)

    return embed


def _average_states(folder: Path, *, of_all_tokens: bool) -> Callable[..., Vectors]:
    """Average over the prompts what enters each layer: at the last token, or the mean of all."""
    model = load_live(folder)

    def of_prompt(ids: list[int]) -> Vectors:  # one by one, so that nothing needs padding
        tokens = sys.modules["torch"].tensor([ids], device=model.device)
        states = model(tokens, output_hidden_states=True).hidden_states[:-1]
        entering: Any = np.stack([state[0].double().cpu().numpy() for state in states])
        return np.array(entering.mean(1) if of_all_tokens else entering[:, -1])

    return lambda prompts: np.mean([of_prompt(ids) for ids in _tokenized(folder, prompts)], axis=0)


def _tokenized(folder: Path, prompts: Sequence[str]) -> Iterator[list[int]]:
    """Yield the tokens of each prompt, after the one that begins a text, if there is one."""
    where = folder / TOKENIZER_FILE
    with needed(InputError(f"{where}: gates from prompts need a package: pip install tokenizers")):
        from tokenizers import Tokenizer
    try:
        tokenizer = Tokenizer.from_str((read_text(folder, TOKENIZER_FILE) or b"").decode())
    except Exception as error:  # it raises nothing more special
        raise InputError(f"{where}: cannot be read: {error}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    config = read_json(folder, TOKENIZER_CONFIG)
    token = config.get("bos_token") if isinstance(config, dict) else None
    first = token.get("content") if isinstance(token, dict) else token
    for prompt in prompts:
        yield tokenizer.encode(f"{first or ''}{prompt}", add_special_tokens=False).ids


# ---------------------------------------------------------------- the work


@dataclass(frozen=True, repr=False)
class MixtureReport(Report):
    """The figures and warnings of a mixture; its method is the architecture."""

    experts: tuple[str, ...]
    """Names of the experts' models, shared ones last."""

    def document(self) -> Document:
        """Return what was done, and what to do next."""
        output = shlex.quote(str(self.output))
        columns = {"expert": lambda row: str(row[0]), "model": lambda row: row[1]}
        table = tabulate(enumerate(self.experts), columns)
        return replace(
            super().document(),
            title=f"Built a mixture ({self.method}) in {self.seconds:.1f} s",
            sections=(Section("experts", "Experts", (table,), is_brief=True),),
            steps={"verify": f"dare verify {output}", "repeat": f"dare moe {output} -o OTHER"},
        )


class MixtureMerge(Merge):
    """A mixture, written by the engine as a merge without models."""

    verb = "mixing"

    def __init__(self, plan: Plan, mixture: Mixture, architecture: str) -> None:
        super().__init__(plan)
        self._mixture, self._architecture = mixture, architecture

    def _receipt_of(self, report: Report) -> Receipt[Report]:
        receipt, target = super()._receipt_of(report), self.layout.target
        portable = self._mixture.with_files(lambda path: to_path(portable_path(path, target)))
        names = tuple(short_name(expert.model) for expert in self._mixture.all_experts)
        return replace(
            receipt,
            report=MixtureReport(**vars(report) | {"method": self._architecture}, experts=names),
            manifest={**(receipt.manifest or {}), "mixture": portable.to_tables()},
            files={**receipt.files, CARD_NAME: self._card()},
        )

    def _card(self) -> bytes:
        mixture, title = self._mixture, self.layout.target.name
        paths = [mixture.base, *(expert.model for expert in mixture.all_experts)]
        shortened = mixture.with_files(lambda path: to_path(short_name(path))).to_tables()
        experts = f"{len(mixture.experts)} experts, of which a token takes"
        what = f"A mixture ({self._architecture}) of {experts} {mixture.experts_per_token}"
        text = f"# {title}\n\n{what}, built by dare.\n\n{fenced('toml', write_toml(shortened))}\n"
        return (front_matter(self.plan, paths, "moe") + "\n" + text).encode(errors="replace")
