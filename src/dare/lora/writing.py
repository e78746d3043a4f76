"""An adapter on its way to disk: a folder that PEFT loads, complete or not there at all.

Ranks are known only after the work, and with them the places of all tensors. So tensors go into a
file of pieces in `OUTPUT.partial/` first, one by one, and from there to their places in that
folder, which gets its name when everything is in it and synced. What is in memory at any time is
one tensor.
"""

from __future__ import annotations

import json
import platform
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.resources import files
from math import sqrt
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np

from dare import __version__
from dare.documents.document import Document, Tone
from dare.documents.notices import Notice
from dare.documents.shown import Shown, json_ready
from dare.documents.words import counted, show_size
from dare.errors import InputError, OutputError
from dare.inputs.lora import CONFIG_NAME, PARAMETERS, WEIGHTS_NAME
from dare.inputs.sources import Floats
from dare.kernels import reference
from dare.output.journal import Record
from dare.output.output import Identity, Publisher
from dare.output.receipt import portable_notices
from dare.output.sink import PieceSink
from dare.planning.data import OTHER_FORMATS, Layout
from dare.run.engine import Receipt, Work
from dare.tensors.dtypes import StorageType

PREFIX = "base_model.model."
METADATA = {"format": "pt"}


# ---------------------------------------------------------------- reports


@dataclass(frozen=True)
class ModuleReport:
    """One module of the adapter that was written."""

    name: str
    ranks: tuple[int, ...]
    """The rank in each input that has the module; empty if it was extracted from weights."""
    rank: int
    norm: float
    """The Frobenius norm of the change that was asked for."""
    error: float
    """The loss caused by the low rank: the norm of the difference, as a share of `norm`."""

    @property
    def energy(self) -> float:
        """The share of the squared norm that is kept.

        >>> ModuleReport("q_proj", (), rank=4, norm=2.0, error=0.1).energy
        0.99
        """
        return 1 - self.error**2


@dataclass(frozen=True)
class _LoraReport(Shown):
    kind: ClassVar[str]
    title: ClassVar[str]
    output: Path
    modules: tuple[ModuleReport, ...]
    notes: tuple[Notice, ...]
    """Remarks on tensors that were averaged, left out, or different."""
    bytes_written: int
    seconds: float

    @property
    def error(self) -> float:
        """The relative Frobenius error over all modules together."""
        lost = sum((module.error * module.norm) ** 2 for module in self.modules)
        squared = sum(module.norm**2 for module in self.modules)
        return sqrt(lost / squared) if squared else 0.0

    @property
    def energy(self) -> float:
        """The share of the squared norm that is kept, over all modules together."""
        return 1 - self.error**2

    @property
    def rank(self) -> int:
        """The largest rank of a module."""
        return max(module.rank for module in self.modules)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain values, ready for JSON."""
        modules = [{**asdict(module), "energy": module.energy} for module in self.modules]
        total = {"rank": self.rank, "error": self.error, "energy": self.energy}
        return {**asdict(self), "output": str(self.output), "modules": modules, **total}

    @property
    def counts(self) -> str:
        """The number of modules and their ranks."""
        least, most = min(module.rank for module in self.modules), self.rank
        ranks = f"{most}" if least == most else f"{least} to {most}"
        return f"{counted(len(self.modules), 'module')}, rank {ranks}"

    def document(self) -> Document:
        """Return what the adapter is, and where it lies."""
        size = show_size(self.bytes_written)
        return Document(
            title=f"{self.title}: {self.counts}",
            kind="adapter",
            tone=Tone.GOOD,
            lead=f"{size} in {self.seconds:.1f} s",
            facts=tuple(self.facts),
            notices=self.notes,
            done=f"Wrote {self.output}",
        )

    @property
    def facts(self) -> list[tuple[str, str]]:
        """The adapter's origin and error, without its place and time."""
        worst = max(self.modules, key=lambda module: module.error)
        total, most = f"{self.error:.3g}", f"{worst.error:.3g}"
        error = ("relative error", f"{total} in total, {most} in {worst.name}")
        return [*self._origin(), *([error] if worst.error else [])]

    def _origin(self) -> list[tuple[str, str]]:
        raise NotImplementedError


@dataclass(frozen=True)
class AdapterReport(_LoraReport):
    """The report of a merge of adapters."""

    kind = "merge"
    title = "Merged LoRA"
    method: str
    route: str
    """The way in which the adapter was made: by concatenation, or by which kind of SVD."""
    adapters: tuple[str, ...]
    weights: tuple[float, ...]
    seeds: tuple[int, ...] | None
    """The seed of each adapter's mask, where something was dropped."""
    averaged: tuple[str, ...]
    """Tensors that are stored in full, and were averaged."""

    def _origin(self) -> list[tuple[str, str]]:
        of = f"{counted(len(self.adapters), 'adapter')} ({', '.join(self.adapters)})"
        averaged = [("averaged in full", ", ".join(self.averaged))] if self.averaged else []
        return [("method", f"{self.method} of {of}, {self.route}"), *averaged]


@dataclass(frozen=True)
class OmittedTensor:
    """A tensor that changed and is not in the adapter."""

    tensor: str
    norm: float
    """The Frobenius norm of its change."""
    reason: str


@dataclass(frozen=True)
class ExtractionReport(_LoraReport):
    """The report of an extraction."""

    kind = "extraction"
    title = "Extracted LoRA"
    saved: tuple[str, ...]
    """Modules that are stored in full."""
    left_out: tuple[OmittedTensor, ...]

    @property
    def share(self) -> float:
        """The part of the whole model's squared change that the modules' changes make up."""
        inside = sum(module.norm**2 for module in self.modules)
        outside = sum(tensor.norm**2 for tensor in self.left_out)
        return inside / (inside + outside) if inside + outside else 1.0

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain values, ready for JSON."""
        return {**super().to_dict(), "share": self.share}

    def _origin(self) -> list[tuple[str, str]]:
        saved = [("stored in full", ", ".join(self.saved))] if self.saved else []
        return [("kept", f"{self.energy:.2%} of the modules' change"), *saved]


# ---------------------------------------------------------------- the files

AnyReport = TypeVar("AnyReport", AdapterReport, ExtractionReport)
# The report of an adapter, its configuration, and the settings by which it was made.
Made = tuple[AnyReport, Mapping[str, Any], Mapping[str, Any]]


class AdapterWork(Work[AnyReport]):
    """An adapter to be written; subclasses put its tensors, by names without PEFT's prefix."""

    discards = True
    nbytes = 0
    verbose = False
    inputs: Sequence[Path] = ()

    def __init__(self, target: Path, dtype: StorageType, inputs: Sequence[Path]) -> None:
        if OTHER_FORMATS.fullmatch(target.suffix):
            raise OutputError(f"{target}: an adapter is a folder; leave {target.suffix} out")
        self.layout = Layout(target, {WEIGHTS_NAME: ()})
        self.identity = Identity("adapter")
        self.inputs = inputs
        self.bytes_written = 0
        self._dtype = dtype
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._stored: dict[str, list[tuple[int, int] | bytes]] = {}

    def fill(self) -> Made[AnyReport]:
        """Put all tensors; return the report, and what tells how it was made."""
        raise NotImplementedError

    def put(self, name: str, values: Floats) -> None:
        """Store a tensor."""
        self._put_pieces(name, values.shape, [values.reshape(-1)])

    def put_saved(
        self, tensor: str, targets: Iterable[str], shape: tuple[int, ...], pieces: Iterable[Floats]
    ) -> None:
        """Store a tensor of the base in full, in addition to its LoRA if it has one."""
        module, _, parameter = tensor.rpartition(".")
        name = f"{module}.base_layer.{parameter}" if module in targets else tensor
        self._put_pieces(name, shape, pieces)

    def _put_pieces(self, name: str, shape: tuple[int, ...], pieces: Iterable[Floats]) -> None:
        """Store a tensor that comes in flat pieces."""
        key = PREFIX + name
        self._shapes[key], self._stored[key] = shape, []
        for piece in pieces:
            raw = np.empty(piece.size, self._dtype.carrier)
            if reference.encode(piece, raw) >= self._dtype.overflow_bits:
                kind = self._dtype.name
                raise InputError(f"{name}: has values that {kind} cannot hold; use a wider dtype")
            self._stored[key].append((self._sink.append(raw.view(np.uint8)), raw.nbytes))
            self.bytes_written += raw.nbytes

    def make_sink(self, publisher: Publisher) -> PieceSink:
        self._sink = PieceSink(publisher.folder, self.layout.target, {})
        return self._sink

    def take_over(self) -> None:
        """Begin anew, always."""

    def carry_out(self) -> Sequence[Record]:
        self._made: Made[AnyReport] = self.fill()
        wrappers = find_wrappers(self._made[1]["target_parameters"] or ())
        names = {key: _wrapped(key, wrappers) for key in self._shapes}
        shapes = sorted((names[key], shape) for key, shape in self._shapes.items())
        tensors = tuple((name, self._dtype, shape) for name, shape in shapes)
        layout = Layout(self.layout.target, {WEIGHTS_NAME: tensors})
        stored = {names[key]: pieces for key, pieces in self._stored.items()}
        self._sink.assemble(layout, METADATA, stored)
        return ()

    def conclude(self, records: Sequence[Record]) -> Receipt[AnyReport]:
        del records  # nothing is resumed
        report, config, how = self._made
        known = [parent for file in self.inputs for parent in (file, file.parent)]
        shown = replace(report, notes=portable_notices(report.notes, known))
        figures = shown.to_dict()
        del figures["output"]
        manifest = {
            "adapter": report.kind,
            **how,
            "report": figures,
            "versions": {
                "dare-merge": __version__,
                "numpy": np.__version__,
                "python": platform.python_version(),
            },
            "machine": platform.machine(),
        }
        settings = json.dumps(json_ready(config), indent=2, ensure_ascii=False) + "\n"
        readme = _readme(shown, config["base_model_name_or_path"])
        beside = {CONFIG_NAME: settings.encode(), "README.md": readme.encode()}
        return Receipt(report, {WEIGHTS_NAME: METADATA}, manifest, beside)


def find_wrappers(parameters: Iterable[str]) -> dict[str, str]:
    """Return the modules that PEFT puts around each parameter that has a LoRA, the first innermost.

    >>> find_wrappers(["m.experts.down_proj", "m.experts.gate_up_proj"])
    {'m.experts.down_proj': 'm.experts', 'm.experts.gate_up_proj': 'm.experts.base_layer'}
    """
    around: dict[str, str] = {}
    levels: dict[str, str] = {}
    last_first = {name: -place for place, name in enumerate(PARAMETERS)}
    for name in sorted(parameters, key=lambda name: last_first.get(name.rpartition(".")[2], 0)):
        module = name.rpartition(".")[0]
        around[name] = levels.get(module, module)
        levels[module] = f"{around[name]}.base_layer"
    return around


def _wrapped(key: str, wrappers: Mapping[str, str]) -> str:
    """Return the stored name of a factor that was put by the name of what has it."""
    target, mark, end = key.removeprefix(PREFIX).rpartition(".lora_")
    return f"{PREFIX}{wrappers[target]}{mark}{end}" if target in wrappers else key


def peft_config(
    ranks: Mapping[str, int], parameters: Collection[str] = (), **settings: Any
) -> dict[str, Any]:
    """Return the `adapter_config.json` of an adapter whose scaling is 1 for every module.

    `parameters` are those of the ranks that are no modules.

    >>> peft_config({"q": 4, "v": 2})["rank_pattern"]
    {'^v': 2}
    """
    largest = max(ranks.values())
    smaller = {f"^{re.escape(name)}": rank for name, rank in ranks.items() if rank != largest}
    usual = json.loads(files("dare.lora").joinpath("adapter_config.json").read_text("utf-8"))
    return {
        **usual,
        "r": largest,
        "lora_alpha": largest,
        "rank_pattern": smaller,
        "alpha_pattern": smaller,
        "target_modules": sorted(ranks.keys() - set(parameters)),
        "target_parameters": sorted(ranks.keys() & set(parameters)) or None,
        **settings,
    }


def _readme(report: _LoraReport, base_name: str | None) -> str:
    """Return the page beside the weights."""
    head = ["library_name: peft", *([f"base_model: {json.dumps(base_name)}"] if base_name else [])]
    told = [f"{label}: {text}" for label, text in report.facts]
    told += [f"note: {note}" for note in report.notes]
    title = f"# {report.title}: {report.counts}"
    return "\n".join(["---", *head, "---", "", title, "", "```text", *told, "```", ""])
