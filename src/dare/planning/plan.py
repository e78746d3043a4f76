"""What will be done, what it costs, and how that is shown.

Everything that can be found wrong without reading weights is found before there is a plan.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from dare.errors import printable
from dare.planning.cost import Cost
from dare.planning.data import Fate, PlanData
from dare.tensors.cards import card, facts, remarks, table, value
from dare.tensors.header import TensorInfo
from dare.tensors.sizes import named, show_size, times


@dataclass(frozen=True, repr=False)
class Plan(PlanData):
    """What a merge will do, and what it will cost."""

    @cached_property
    def cost(self) -> Cost:
        """What it reads, writes, holds in memory and runs on."""
        return Cost(self)

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain values, ready for JSON."""
        return {
            "method": "+".join(stage.name for stage in self.stages),
            "stages": [{"stage": stage.name, **values} for stage, values in self.recipe.chain],
            "models": [
                {"name": name, "weight": weight, "seed": seed}
                for name, weight, seed in zip(
                    self.model_names, self.recipe.weights(), self.recipe.seeds(), strict=True
                )
            ],
            "passes": self.cost.passes,
            "threads": self.cost.threads,
            "peak_memory_bytes": self.cost.peak_memory,
            "buffer_bytes": self.cost.buffer_bytes,
            "max_memory_bytes": self.cost.max_memory,
            "bytes_read": self.cost.bytes_read,
            "bytes_written": self.cost.bytes_written,
            "notes": list(self.notes),
            "files_beside": sorted(self.sidecars.files) if self.sidecars else [],
            "warnings": [asdict(notice) for notice in self.warnings],
            "tensors": [
                {
                    "name": tensor.name,
                    "fate": tensor.fate.value,
                    "shape": list(tensor.shape),
                    "dtype": tensor.dtype.name,
                    "models": [self.model_names[m] for m in tensor.models],
                    "place": self._places.get(tensor.name),
                }
                for tensor in self.tensors
            ],
            "left_out": list(self.left_out),
        }

    @cached_property
    def _places(self) -> dict[str, dict[str, Any]]:
        """File and position, counted from the start of the data, of every tensor."""
        places = {}
        for file, tensors in self.layout.files.items() if self.layout else ():
            position = 0
            for name, dtype, shape in tensors:
                nbytes = TensorInfo(name, dtype, shape, 0).nbytes
                places[name] = {"file": file, "data_offsets": [position, position + nbytes]}
                position += nbytes
        return places

    def to_json(self) -> str:
        """The plan as JSON."""
        return json.dumps(self.to_dict(), indent=2, ensure_ascii=False)

    def __repr__(self) -> str:
        """The plan in a line."""
        target = f" to {self.layout.target}" if self.layout is not None else ""
        return printable(f"<Plan: {self._what}{target}>")

    def _repr_html_(self) -> str:
        """The plan in a notebook."""
        cost, recipe = self.cost, self.recipe
        rows = zip(self.model_names, recipe.weights(), recipe.seeds(), strict=True)
        known = {
            "reads": show_size(cost.bytes_read),
            "writes": show_size(cost.bytes_written),
            "memory": show_size(cost.peak_memory),
            "threads": str(cost.threads),
        }
        if self.layout is not None:
            known["to"] = str(self.layout.target)
        return card(
            f"Plan: {self._what}",
            table(
                ("model", "weight >", "seed >"),
                ((name, value(weight), f"{seed}") for name, weight, seed in rows),
            ),
            facts(known),
            remarks(("note", note) for note in self.notes),
            remarks((warning.strength, warning.text) for warning in self.warnings),
        )

    @property
    def _what(self) -> str:
        method = "+".join(stage.name for stage in self.stages)
        elements = sum(tensor.elements for tensor in self.tensors)
        return (
            f"{method} of {named(self.model_names)}, {times(len(self.tensors), 'tensor')}, "
            f"{elements:,} elements"
        )

    def __str__(self) -> str:
        """The plan in a few lines."""
        fates = dict.fromkeys(Fate, 0)
        for tensor in self.tensors:
            fates[tensor.fate] += 1
        fates[Fate.LEFT_OUT] = len(self.left_out)
        cost, elements = self.cost, sum(tensor.elements for tensor in self.tensors)
        lines = [
            f"{'+'.join(stage.name for stage in self.stages)} of {len(self.models)} models "
            f"({', '.join(self.model_names)}): {len(self.tensors)} tensors, {elements:,} elements",
            *(f"  {count:6} {fate.value}" for fate, count in fates.items() if count),
            f"  reads {show_size(cost.bytes_read)} in {times(cost.passes, 'pass', 'passes')}, "
            f"writes {show_size(cost.bytes_written)}, {cost.threads} threads",
            f"  {cost.memory_line}",
        ]
        if self.layout is not None:
            lines.append(f"  to {self.layout.target} ({times(len(self.layout.files), 'file')})")
        lines += [f"  note: {note}" for note in self.notes]
        lines += [f"  {warning.strength}: {warning}" for warning in self.warnings]
        return "\n".join(map(printable, lines))
