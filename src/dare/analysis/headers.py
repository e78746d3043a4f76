"""What the headers of a base and its models say, and where they do not fit: no weight is read.

This is what `dare analyze --headers` shows. Models on the hub and in stores are asked for their
first bytes only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from os import PathLike
from typing import Any

from dare.inputs.formats import open_model, read_config
from dare.inputs.hub import resolve
from dare.inputs.names import match_names
from dare.inputs.small_files import some_of
from dare.inputs.sources import Source
from dare.recipe.entries import distinct
from dare.recipe.schema import ModelEntry, Recipe

SCHEMA = "dare-headers/1"
EXAMPLES = 3

AnyPath = str | PathLike[str]


@dataclass(frozen=True)
class HeaderSummary:
    """What a model's headers say of it, and how that compares with the base."""

    name: str
    file: str
    """With the commit that a name on the hub has now."""
    tensors: int
    parameters: int
    bytes: int
    types: Mapping[str, int]
    """Parameters by storage type."""
    is_partial: bool = False
    """Whether it is a change to the base: an adapter or a delta file."""
    fitting: int = 0
    """Tensors that the base has too, of the same shape."""
    missing: tuple[str, ...] = ()
    """What only the base has."""
    extra: tuple[str, ...] = ()
    """What the base does not have."""
    mismatched: tuple[tuple[str, str, str], ...] = ()
    """Tensors of another shape: name, the base's shape and type, the model's."""
    other_types: tuple[tuple[str, str, str], ...] = ()
    """The same for those of equal shape and another type, which is no hindrance."""
    notes: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        """Whether a merge would take it as it is."""
        missing = () if self.is_partial else self.missing
        return not (missing or self.extra or self.mismatched)

    @property
    def findings(self) -> list[str]:
        """What does not fit, in words."""
        unlike = [f"{name} ({base} in the base, {own} here)" for name, base, own in self.mismatched]
        groups = {
            "lacks": () if self.is_partial else self.missing,
            "has what the base has not:": self.extra,
            "has another shape:": tuple(unlike),
        }
        return [f"{text} {some_of(names, EXAMPLES)}" for text, names in groups.items() if names]


@dataclass(frozen=True)
class HeaderComparison:
    """The headers of a base and of the models beside it."""

    base: HeaderSummary
    models: tuple[HeaderSummary, ...]

    @property
    def fits(self) -> bool:
        """Whether a merge would take all models as they are."""
        return all(model.fits for model in self.models)

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values, ready for JSON."""
        models = [{**asdict(model), "fits": model.fits} for model in self.models]
        return {"schema": SCHEMA, "fits": self.fits, "base": asdict(self.base), "models": models}


def compare_headers(
    base: AnyPath,
    models: Sequence[AnyPath | ModelEntry],
    *,
    allow_pickle: bool = False,
    verbose: bool = True,
) -> HeaderComparison:
    """Read the headers of a base and its fine-tunes, and say what fits together."""
    recipe = Recipe(base=base, models=list(models), method="linear", verbose=verbose)
    names = distinct([entry.name for entry in recipe.models])
    files = (recipe.base, *(entry.file for entry in recipe.models))
    places = [resolve(file, verbose=verbose, fetches=False) for file in files]
    first, *others = (place.path for place in places)
    told, *tolds = (str(place.pinned) for place in places)
    config = read_config(first)
    source = open_model(first, allow_pickle=allow_pickle, base_config=config)
    summaries = []
    for name, path, file in zip(names, others, tolds, strict=True):
        model = open_model(path, allow_pickle=allow_pickle, base_config=config, base=source)
        matched = match_names(
            source, model, name, base_config=config, model_config=read_config(path)
        )
        summaries.append(_compare(name, file, source, matched.source, matched.notes))
    return HeaderComparison(_summary("base", told, source), tuple(summaries))


def _summary(name: str, file: str, source: Source, **more: Any) -> HeaderSummary:
    types: Counter[str] = Counter()
    for info in source.tensors.values():
        types[info.dtype.name] += info.elements
    nbytes = sum(source.bytes_for(info.name, info.elements) for info in source.tensors.values())
    return HeaderSummary(
        name,
        file,
        tensors=len(source.tensors),
        parameters=sum(types.values()),
        bytes=nbytes,
        types=dict(types.most_common()),
        **more,
    )


def _compare(
    name: str, file: str, base: Source, model: Source, notes: Sequence[str]
) -> HeaderSummary:
    shared = sorted(base.tensors.keys() & model.tensors.keys())
    pairs = [(base.tensors[key], model.tensors[key]) for key in shared]
    unlike = [(b.name, b.described, m.described) for b, m in pairs if b.shape != m.shape]
    typed = [
        (b.name, b.dtype.name, m.dtype.name)
        for b, m in pairs
        if b.shape == m.shape and b.dtype != m.dtype and not model.holds_delta(b.name)
    ]
    return _summary(
        name,
        file,
        model,
        is_partial=model.is_partial,
        fitting=len(shared) - len(unlike),
        missing=tuple(sorted(base.tensors.keys() - model.tensors.keys())),
        extra=tuple(sorted(model.tensors.keys() - base.tensors.keys())),
        mismatched=tuple(unlike),
        other_types=tuple(typed),
        notes=(*model.remarks, *notes),
    )
