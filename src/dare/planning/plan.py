"""A plan: every tensor's fate, the cost, and the document that shows it.

All errors that can be found without reading weights are found before there is a plan.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from dare.documents.document import Document, Section, tabulate
from dare.documents.notices import Notice
from dare.documents.shown import Shown
from dare.documents.words import counted, exact_text, named, show_size, weight_text
from dare.errors import printable
from dare.planning.cost import Cost
from dare.planning.data import Fate, PlanData, TensorPlan
from dare.recipe.applied import names_of
from dare.stages import IMPLIED, Stage
from dare.stages.registry import LATER_PARAMETERS


@dataclass(frozen=True, repr=False)
class Plan(PlanData, Shown):
    """A merge that can be run: every tensor's fate, and the cost."""

    @cached_property
    def cost(self) -> Cost:
        """The bytes, memory and threads that the merge takes."""
        return Cost(self)

    def saying(self, warnings: Iterable[Notice] = (), notes: Iterable[Notice] = ()) -> Plan:
        """Return the plan with more warnings and notes; what follows from the rest is known."""
        warnings, notes = (*self.warnings, *warnings), (*self.notes, *notes)
        found = replace(self, warnings=warnings, notes=notes)
        vars(found).update(vars(self) | vars(found))
        return found

    def chunks_together(self, tensor: TensorPlan) -> int:
        """Return how many chunks of a tensor are made together, by one step."""
        if self.recoding is not None:
            return self.recoding.chunks_together(tensor.described)
        return self.cost.chunks_at_once if self.is_held else 1

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain values, ready for JSON."""
        models = zip(self.model_names, self.recipe.weights(), self.recipe.seeds(), strict=True)
        return {
            "method": self.method,
            "stages": [{"stage": stage.name, **values} for stage, values in self.recipe.chain],
            "methods": dict(self.methods),
            "models": [
                dict(zip(("name", "weight", "seed"), model, strict=True)) for model in models
            ],
            **({"layers": self.layers} if self.recipe.layers else {}),
            **({"format": self.recoding.format} if self.recoding is not None else {}),
            "passes": self.cost.passes,
            "threads": self.cost.threads,
            "peak_memory_bytes": self.cost.peak_memory,
            "buffer_bytes": self.cost.buffer_bytes,
            "max_memory_bytes": self.cost.max_memory,
            "bytes_read": self.cost.bytes_read,
            "bytes_written": self.cost.bytes_written,
            "notes": [asdict(notice) for notice in self.notes],
            "files_beside": sorted(self.sidecars.files) if self.sidecars else [],
            "warnings": [asdict(notice) for notice in self.warnings],
            "tensors": [
                {
                    "name": tensor.name,
                    "fate": tensor.fate.value,
                    "shape": list(tensor.shape),
                    "dtype": tensor.dtype.name,
                    "models": [self.model_names[m] for m in tensor.models],
                    "method": tensor.method if tensor.is_merged else None,
                    "place": self._places.get(tensor.name),
                }
                for tensor in self.tensors
            ],
            "left_out": list(self.left_out),
        }

    @cached_property
    def _places(self) -> dict[str, dict[str, Any]]:
        """The file and position of every tensor, counted from the start of the data."""
        places = {}
        for file, (header, placed) in (self.layout.build({}) if self.layout else {}).items():
            for name, info in placed.items():
                start = info.start - len(header)
                places[name] = {"file": file, "data_offsets": [start, start + info.nbytes]}
        return places

    def __repr__(self) -> str:
        """The plan in a line."""
        target = f" to {self.layout.target}" if self.layout is not None else ""
        elements = sum(tensor.elements for tensor in self.tensors)
        size = f"{counted(len(self.tensors), 'tensor')}, {elements:,} elements"
        return printable(f"<Plan: {self.method} of {named(self.model_names)}, {size}{target}>")

    def document(self, *, brief: bool = False) -> Document:
        """Return a document of the merge and its cost; `brief` leaves out default settings."""
        cost, recipe = self.cost, self.recipe
        elements = counted(sum(tensor.elements for tensor in self.tensors), "element")
        fates = Counter(tensor.fate for tensor in self.tensors)
        fates[Fate.LEFT_OUT] = len(self.left_out)
        tensors = ", ".join(f"{fates[fate]} {fate.value}" for fate in Fate if fates[fate])
        before = ", ".join(sorted({tensor.base.dtype.name for tensor in self.tensors}))
        after = ", ".join(sorted({tensor.dtype.name for tensor in self.tensors}))
        stored = f" stored as {after}" if after != before and self.recoding is None else ""
        shared, different = self._model_settings(brief=brief)
        methods = ", ".join(f"{m} for {counted(n, 'tensor')}" for m, n in self.methods.items())
        facts = [
            ("method", self._chain(shared, brief=brief)),
            *([("methods", methods)] if len(recipe.chains) > 1 else ()),
            ("base", str(recipe.base)),
            ("tensors", f"{tensors}; {elements}, {before}{stored}"),
            *([("format", self.recoding.format)] if self.recoding is not None else ()),
            ("writes", self._written),
        ]
        if not brief:
            passes = counted(cost.passes, "pass", "passes")
            facts += [
                ("reads", f"{show_size(cost.bytes_read)} in {passes}"),
                ("with", counted(cost.threads, "thread")),
                ("memory", cost.memory_line),
            ]
            facts += [("left out", ", ".join(self.left_out))] if self.left_out else []
        figures = zip(recipe.weights(), recipe.seeds(), strict=True)
        rows = zip(self.model_names, recipe.models, figures, different, strict=True)
        columns: dict[str, Callable[[Any], str]] = {
            "model": lambda row: row[0],
            "file": lambda row: str(row[1].file),
            "weight >": lambda row: weight_text(row[2][0]),
            "seed >": lambda row: str(row[2][1]) if self.is_random else "",
        }
        if any(different):
            columns["settings"] = lambda row: _listed(row[3])
        models = tabulate(rows, columns, optional=("file",))
        sections = [Section("models", "Models", (models,), is_brief=True)] if recipe.models else []
        if recipe.layers:
            stack = tabulate(self.layers, STACK_COLUMNS)
            sections.append(Section("layers", "Layers", (stack,), is_brief=True))
        return Document(
            title="Plan",
            kind="plan",
            facts=tuple(facts),
            sections=tuple(sections),
            notices=(*self.notes, *(() if brief else self.warnings)),
            models=self.model_names,
        )

    @cached_property
    def is_random(self) -> bool:
        """True if a stage draws at random, so that seeds matter."""
        return any({*draws} - {None} for each in self.treatments for draws in each.draws)

    @property
    def layers(self) -> list[dict[str, Any]]:
        """The ranges of a stack: their layers in the output, origin and method."""
        ranges, first = [], 0
        for entry in self.recipe.layers:
            last = first + entry.range[1] - entry.range[0]
            models = ((each.file, each.range or entry.range) for each in entry.models)
            sources = ((entry.base, entry.range), *models)
            origin = [{"model": str(file), "range": list(span)} for file, span in sources]
            ranges.append({"layers": [first, last], "from": origin, "method": entry.methods})
            first = last
        return ranges

    def _chain(self, shared: Mapping[str, Any], *, brief: bool) -> str:
        """Return the chain with the settings that all models share, and those after."""
        joint = {
            f"{stage.name} {name}": value
            for stage, settings in self.recipe.chain
            if stage.kind != "delta"
            for name, value in settings.items()
            if (stage.name, name) not in IMPLIED  # the stage that it makes has its own
            and (stage.name, name, value) not in LATER_PARAMETERS
            and not (brief and value == stage.parameters[name].default)
        }
        scale = {} if brief and self.recipe.scale == 1 else {"scale": self.recipe.scale}
        rates = {"embedding_drop_rate": self.recipe.embedding_drop_rate}
        return _listed({names_of(self.recipe.chain): "", **shared, **rates, **joint, **scale})

    @property
    def _written(self) -> str:
        size = show_size(self.cost.bytes_written)
        if self.layout is None:
            return f"{size} (no output is named yet)"
        target = self.layout.target
        place = f"{size} to {target} ({counted(len(self.layout.files), 'file')})"
        room = show_size(self.layout.scratch_bytes)
        if self.layout.is_on_hub:
            return f"{place}, in one commit by way of a scratch folder, which takes {room}"
        if target.exists():
            return f"{place}, which exists already"
        if self.layout.is_sent:
            return f"{place}, file by file by way of a scratch folder, which takes {room}"
        if target.parent.exists():
            return place
        return f"{place}; the folder {target.parent} will be created"

    def _model_settings(self, *, brief: bool) -> tuple[Mapping[str, Any], list[Mapping[str, Any]]]:
        """Return the settings of delta stages that all models share, and each model's others."""
        every = [
            {
                parameter: value
                for stage, values in self.recipe.chain.of_kind("delta")
                for parameter, default in values.items()
                if (value := entry.settings.get(parameter, default)) is not None
                and (stage.name, parameter, value) not in LATER_PARAMETERS
                and not (brief and _is_usual(stage, parameter, value))
            }
            for entry in self.recipe.models
        ]
        first = every[0] if every else {}
        shared = {k: v for k, v in first.items() if all(k in s and s[k] == v for s in every)}
        return shared, [{k: v for k, v in s.items() if k not in shared} for s in every]


def _span_text(span: Sequence[int]) -> str:
    """Return layers as people count them, from the first to the last."""
    return f"{span[0]} to {span[1] - 1}" if span[1] - span[0] > 1 else str(span[0])


STACK_COLUMNS: dict[str, Callable[[Any], str]] = {
    "layers >": lambda row: _span_text(row["layers"]),
    "from": lambda row: ", ".join(f"{o['model']} {_span_text(o['range'])}" for o in row["from"]),
    "method": lambda row: str(row["method"]),
}


def _listed(settings: Mapping[str, Any]) -> str:
    """Return settings in a line, without those that are not given."""
    given = {name: value for name, value in settings.items() if value is not None}
    return ", ".join(f"{name} {exact_text(value)}".strip() for name, value in given.items())


def _is_usual(stage: Stage, parameter: str, value: object) -> bool:
    """Tell if a delta stage's parameter is not worth a word: numbers always are."""
    default = stage.parameters[parameter].default
    return value == default and (isinstance(default, bool) or not isinstance(default, float))
