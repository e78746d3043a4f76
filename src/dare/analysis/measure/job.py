"""An analysis that nodes of a cluster share."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

from dare.analysis.measure.measuring import (
    MeasureSpectrum,
    MeasureStep,
    Worker,
    workspace_bytes,
)
from dare.inputs.opening import open_inputs
from dare.inputs.sources import Source
from dare.kernels.linalg import one_blas_thread
from dare.planning.machine import memory_limit
from dare.recipe.schema import Recipe
from dare.run.sightings import Sighting


@dataclass(frozen=True)
class AnalysisJob:
    """Which models are looked at, and what they look like to the driver."""

    recipe: Recipe
    inputs: tuple[Sighting, ...]
    matrix_bytes: int
    """The most that the spectrum of a matrix takes."""

    def open(self, threads: int) -> OpenedAnalysis:
        """Open the inputs and compare them."""
        _, inputs = open_inputs(self.recipe)
        opened = OpenedAnalysis(inputs.base, inputs.models)
        for source, sighting in zip((inputs.base, *inputs.models), self.inputs, strict=True):
            opened.enter(source)
            sighting.check(source)
        each = workspace_bytes(inputs.base, inputs.models) + self.matrix_bytes
        opened.threads = max(1, min(threads, memory_limit(self.recipe.max_memory, each) // each))
        return opened

    def confirm(self, mark: str) -> None:
        """Nodes write nothing, and leave no mark."""


class OpenedAnalysis:
    """An analysis as one node has it open."""

    threads = 1
    mark = ""

    def __init__(self, base: Source, models: tuple[Source, ...]) -> None:
        self._base = base
        self._models = models
        self._stack = ExitStack()
        self._stack.enter_context(one_blas_thread())

    def enter(self, source: Source) -> None:
        """Open a source for as long as the node works."""
        self._stack.enter_context(source)

    def make_worker(self, progress: Callable[[int], None]) -> Worker:
        from dare.analysis.measure import kernels

        return Worker(self._base, self._models, kernels, progress)

    def finish(self) -> None:
        for source in (self._base, *self._models):
            source.check_unchanged()


def tensor_of(step: MeasureStep) -> str | None:
    """What steps stay together by: sums of chunks are large, and added up in their order."""
    return None if isinstance(step, MeasureSpectrum) else step.subject.name
