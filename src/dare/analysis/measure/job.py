"""An analysis that nodes of a cluster share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from dare.analysis.measure.measuring import AddUp, MeasureSpectrum, MeasureStep, Worker
from dare.inputs.opening import open_inputs
from dare.kernels.linalg import one_blas_thread
from dare.recipe.schema import Recipe
from dare.run.cluster import Sample, check_inputs
from dare.run.ray import Do
from dare.run.threads import run_steps

PIECE_BYTES = 256 << 20
"""What a piece reads at the most, unless a single tensor has more."""


@dataclass(frozen=True)
class AnalysisJob:
    """Models to look at, and what they look like to the driver; a piece is some tensors."""

    recipe: Recipe
    inputs: tuple[Sample, ...]

    def open(self, stack: ExitStack) -> Do:
        """Open the inputs; refuse others than the driver has."""
        _, inputs = open_inputs(self.recipe)
        stack.enter_context(one_blas_thread())
        for source in (inputs.base, *inputs.models):
            stack.enter_context(source)
        check_inputs(self.recipe, (inputs.base, *inputs.models), self.inputs)

        def do(steps: Sequence[MeasureStep], _common: None) -> tuple[list[Any], int]:
            found: dict[Any, Any] = {}
            read: list[int] = []

            def collect(steps: Sequence[MeasureStep], results: Sequence[Any]) -> None:
                pairs = zip(steps, results, strict=True)
                found.update((step.id, result) for step, result in pairs if is_kept(step))

            run_steps(
                steps,
                lambda _stop: Worker(inputs.base, inputs.models, read.append),
                threads=1,
                collect=collect,
            )
            for source in (inputs.base, *inputs.models):
                source.check_unchanged()
            return [(step, found[step.id]) for step in steps if is_kept(step)], sum(read)

        return do


def is_kept(step: MeasureStep) -> bool:
    """Whether what a step finds is needed beyond its tensor."""
    return isinstance(step, MeasureSpectrum) or (isinstance(step, AddUp) and step.is_last)


def cut(steps: Iterable[MeasureStep]) -> Iterator[list[MeasureStep]]:
    """Pieces of whole tensors: sums of chunks are large, and added up in their order."""
    piece: list[MeasureStep] = []
    for step in steps:
        is_new = piece and piece[-1].subject.name != step.subject.name
        if is_new and sum(before.nbytes for before in piece) >= PIECE_BYTES:
            yield piece
            piece = []
        piece.append(step)
    if piece:
        yield piece
