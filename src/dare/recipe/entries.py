"""The entries of a recipe's lists: a model that is merged, and a rule for tensors."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from os import PathLike
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from dare.errors import RecipeError, did_you_mean
from dare.recipe.hub_names import looks_like_name, parse_address
from dare.recipe.layers import Gradient
from dare.stages import STAGES
from dare.stages.registry import Parameter
from dare.stores.locations import StorePath, home_folder, to_path, without_credentials

GENERIC_NAMES = {"model", "pytorch_model", "adapter_model"}
"""Files that are called like this are told apart by their folders."""

_WEIGHT = Parameter("weight", None, Annotated[float, Field(allow_inf_nan=False)])


def as_path(value: object) -> Path:
    """Return a path, with ~ expanded."""
    if not isinstance(value, str | PathLike):
        raise ValueError("must be the path of a file or directory")
    try:
        return to_path(value).expanduser()
    except RuntimeError as error:  # ~somebody who is not there
        raise ValueError(str(error)) from None


def parse_size(value: object) -> object:
    """Read a size in bytes: a whole number, or text such as `"512MiB"`, `"5GB"`, `"2G"`.

    >>> parse_size("2GiB") == 2 * 2**30, parse_size("5MB")
    (True, 5000000)
    """
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(iB|B)?\s*", value, re.IGNORECASE)
    if match is None:
        raise ValueError("not a size; write 1073741824, '1GiB' or '5GB'")
    number, unit, suffix = match.groups()
    power = "KMGT".index(unit.upper()) + 1 if unit else 0
    thousand = 1000 if suffix and suffix.upper() == "B" else 1024
    return int(Fraction(number) * thousand**power)


def as_tuple(value: object) -> object:
    """Return one text, or a list, as a tuple; anything else as it is."""
    if isinstance(value, str):
        return (value,)
    return tuple(value) if isinstance(value, list) else value


def with_lists(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings as TOML would give them: values that change over the layers are lists."""
    return {n: list(v) if isinstance(v, tuple) else v for n, v in settings.items()}


AnyPath = Annotated[Path, BeforeValidator(as_path)]
Weight = Annotated[
    float | Gradient | None,
    BeforeValidator(lambda value: None if value is None else _WEIGHT.check(value, "")),
]
Words = Annotated[tuple[str, ...] | None, BeforeValidator(as_tuple)]
OwnSettings = Annotated[dict[str, Any], AfterValidator(with_lists)]


class Strict(BaseModel):
    """Refuses unknown names and wrong types, in our words."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    def __init__(self, **given: Any) -> None:
        try:
            super().__init__(**given)
        except ValidationError as error:
            raise _explained(error, type(self)) from None

    def __init_subclass__(cls, **_checked: Any) -> None:
        """Let classes say `init=False` to type checkers: fields take more than they hold."""

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        for name, field in type(self).model_fields.items():
            value = getattr(self, name)
            if field.is_required() or value != field.get_default(call_default_factory=True):
                yield name, str(value) if isinstance(value, Path) else value


def _explained(error: ValidationError, model: type[BaseModel]) -> RecipeError:
    first = error.errors()[0]
    cause = first.get("ctx", {}).get("error")
    name = ".".join(map(str, first["loc"]))
    if isinstance(cause, RecipeError):
        return cause
    if first["type"] == "missing":
        return RecipeError(f"{name} is missing")
    if first["type"] != "extra_forbidden":
        given = without_credentials(repr(first["input"]))
        return RecipeError(f"{name} = {given}: {cause or first['msg']}")
    if stage := next((stage for stage in STAGES.values() if name in stage.parameters), None):
        return RecipeError(
            f"{name}: is a parameter of {stage.name}: stages={{{stage.name!r}: {{{name!r}: …}}}}"
        )
    return RecipeError(f"{name}: not known{did_you_mean(name, model.model_fields)}")


class ModelEntry(Strict, init=False):
    """One fine-tune: its file or directory, its share, and what is different for it.

    >>> ModelEntry(file="math.safetensors", weight=0.5, settings={"drop_rate": 0.8}).weight
    0.5
    """

    file: AnyPath = Field(description="A safetensors file, or a directory that holds the model.")
    weight: Weight = Field(None, description="Its share; the usual one depends on the method.")
    seed: int | None = Field(None, ge=0, description="Its seed, in place of seed + i.")
    settings: OwnSettings = Field(
        default_factory=dict, description="Parameters of delta stages that are different for it."
    )

    @property
    def name(self) -> str:
        """The model's name in messages."""
        path = self.file
        if looks_like_name(path.as_posix()):
            path = Path(path.as_posix().partition("@")[0])
        elif isinstance(path, StorePath) and path.scheme == "hf":
            name = parse_address(str(path))
            path = Path(name.repo, name.inside)
        if path.suffix != ".safetensors":
            return path.name
        folder = path.parent
        is_generic = path.stem in GENERIC_NAMES and folder.name and folder != home_folder()
        return folder.name if is_generic else path.stem.removesuffix(".delta")


class TensorRule(Strict, init=False):
    """Parameters for the tensors whose names match a pattern, or contain a text.

    >>> rule = TensorRule(contains="mlp", match="*.weight", settings={"drop_rate": 0.5})
    >>> rule.matches("layers.0.mlp.up.weight"), rule.matches("layers.0.mlp.up.bias")
    (True, False)
    """

    match: Words = Field(None, description="A pattern or a list of them: * and ? as in a shell.")
    contains: Words = Field(
        None, description="A text in the name, or a list of them; with match, both must hold."
    )
    model: Words = Field(
        None, description="The model or models that it is for, by name or file; else all."
    )
    weight: Weight = Field(None, description="The models' weight for these tensors.")
    settings: OwnSettings = Field(
        default_factory=dict, description="Parameters of stages for these tensors."
    )

    @model_validator(mode="after")
    def _names_tensors(self) -> Self:
        if self.match is None and self.contains is None:
            raise RecipeError('match is missing: write match = "*.mlp.*" or contains = "mlp"')
        return self

    def matches(self, tensor: str) -> bool:
        """Say whether the rule applies to a tensor."""
        return (
            self.match is None or any(fnmatch.fnmatchcase(tensor, word) for word in self.match)
        ) and (self.contains is None or any(text in tensor for text in self.contains))

    def __str__(self) -> str:
        words = {"matching": self.match, "containing": self.contains, "of model": self.model}
        parts = [f"{word} {', '.join(map(repr, t))}" for word, t in words.items() if t is not None]
        return f"tensors {' '.join(parts)}"


def flat(entry: dict[str, Any]) -> dict[str, Any]:
    """Return an entry with its parameters among its keys, as `document` reads it."""
    settings: dict[str, Any] = entry.get("settings", {})
    return {key: value for key, value in entry.items() if key != "settings"} | settings


def distinct(names: Sequence[str]) -> list[str]:
    """Number the names that occur more than once."""
    return [f"{name} ({n + 1})" if names.count(name) > 1 else name for n, name in enumerate(names)]
