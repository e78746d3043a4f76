"""The fit of models' tensors to the base's: facts, which plans and analyses make sentences of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from pydantic import Field

from dare.inputs.sources import Source
from dare.tensors.header import TensorInfo


class Misfit(StrEnum):
    """A reason why a tensor does not fit."""

    NOT_WEIGHTS = "not weights"  # the base stores it in a type that is not one of weights
    UNLIKE_BASE = "unlike base"  # in another shape, or in a type that does not go with the base's
    NOT_IN_BASE = "not in base"
    MISSING = "missing"  # a model that should have all weights lacks it


@dataclass(frozen=True)
class Form:
    """A tensor as it is stored."""

    shape: tuple[Annotated[int, Field(ge=0)], ...]
    dtype: str

    @classmethod
    def of(cls, info: TensorInfo) -> Form:
        """Return the form of a tensor that a header describes."""
        return cls(info.shape, info.dtype.name)

    def __str__(self) -> str:
        """The shape and the storage type: `8×4 F32`."""
        return f"{'×'.join(map(str, self.shape)) or 'a scalar'} {self.dtype}"


@dataclass(frozen=True)
class LeftOut:
    """A tensor that does not fit."""

    tensor: str
    reason: Misfit
    models: tuple[str, ...]  # the models that have it, or lack it; one, if it is unlike the base's
    base: Form | None = None  # the base's copy, if it matters
    found: Form | None = None  # the model's copy that is unlike the base's

    @property
    def reason_text(self) -> str:
        """The reason in a few words."""
        models = ", ".join(self.models)
        return {
            Misfit.NOT_WEIGHTS: f"{self.base and self.base.dtype} is not a type of weights",
            Misfit.UNLIKE_BASE: f"base is {self.base}, {models} is {self.found}",
            Misfit.NOT_IN_BASE: f"in {models}, not in the base",
            Misfit.MISSING: f"not in {models}",
        }[self.reason]

    def __str__(self) -> str:
        """The tensor and the reason in a line."""
        return f"{self.tensor}: {self.reason_text}"


@dataclass(frozen=True)
class Fit:
    """A tensor of the base beside the models' copies; models are given by their numbers."""

    base: TensorInfo
    fitting: tuple[int, ...]
    absent: tuple[int, ...]  # without a copy; no misfit if the model is partial, as an adapter is
    misfits: tuple[LeftOut, ...]

    @property
    def is_mismatched(self) -> bool:
        """Tell if a model's copy is unlike the base's."""
        return any(misfit.reason is Misfit.UNLIKE_BASE for misfit in self.misfits)


Named = Sequence[tuple[str, Source]]  # models with their names, of which two may be the same


def fit_tensor(base: TensorInfo, models: Named) -> Fit:
    """Compare a tensor of the base with the models' copies."""
    fitting, absent, missing, unlike = [], [], [], []
    for number, (name, source) in enumerate(models):
        info = source.tensors.get(base.name)
        if info is None:
            absent.append(number)
            missing += [name] * (base.dtype.is_weight and not source.is_partial)
        elif info.shape == base.shape and (
            info.dtype == base.dtype or (info.dtype.is_weight and base.dtype.is_weight)
        ):
            fitting.append(number)
        else:
            forms = Form.of(base), Form.of(info)
            unlike.append(LeftOut(base.name, Misfit.UNLIKE_BASE, (name,), *forms))
    lacking = [LeftOut(base.name, Misfit.MISSING, tuple(missing))] if missing else []
    return Fit(base, tuple(fitting), tuple(absent), (*lacking, *unlike))


def find_extras(base: Source, models: Named) -> list[LeftOut]:
    """Return the tensors that models have and the base has not, in the order of their names."""
    owners: dict[str, list[str]] = {}
    for name, source in models:
        for tensor in source.tensors.keys() - base.tensors.keys():
            owners.setdefault(tensor, []).append(name)
    return [
        LeftOut(tensor, Misfit.NOT_IN_BASE, tuple(names))
        for tensor, names in sorted(owners.items())
    ]
