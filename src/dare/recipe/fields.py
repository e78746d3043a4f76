"""Classes whose fields are declared with a type, a meaning and limits, and checked by them.

    class Oven(Strict):
        heat: int = described("Degrees.", 200, ge=0)

Such a value is made from keywords, and cannot be changed. Errors use the words of recipes:
`heat = -3: must be greater than or equal to 0`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import copy
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import PurePath
from typing import Annotated, Any, NoReturn, Self, get_type_hints

from dare.documents.values import Check, Limits, WrongValueError, check_of
from dare.errors import RecipeError, did_you_mean
from dare.stages import STAGES
from dare.stores.locations import without_credentials

# Marks of fields.
SAME_WEIGHTS = "the merged weights do not depend on it"
NOT_RECORDED = "the manifest of an output leaves it out"

REQUIRED: Any = object()


@dataclass(frozen=True)
class Field:
    """The declaration of a field."""

    limits: Limits
    default: Any
    marks: tuple[str, ...]
    key: str  # its name in tables, if it is another
    old: str  # its name in earlier versions
    hint: Any = None  # its type, with the limits

    @property
    def description(self) -> str:
        """Its meaning, in a line."""
        return self.limits.text

    @property
    def is_required(self) -> bool:
        return self.default is REQUIRED

    @cached_property
    def check(self) -> Check:
        """The function that checks its values."""
        return check_of(self.hint)


def described(
    text: str, default: Any = REQUIRED, *marks: str, key: str = "", old: str = "", **limits: Any
) -> Any:
    """Declare a field; one without a default must be given."""
    return Field(Limits(text, **limits), default, marks, key, old)


class Strict:
    """A value made of checked keywords; unknown names and wrong types raise a `RecipeError`."""

    given: frozenset[str]
    """The fields that were given when it was made."""

    def __init__(self, **given: Any) -> None:
        values, rest = {}, dict(given)
        for name, field in self.fields().items():
            key = next((key for key in (field.key, field.old) if key in given), name)
            if key in rest:
                try:
                    values[name] = field.check(rest.pop(key))
                except WrongValueError as fault:
                    raise _in_words_of_recipes(fault.inside(key)) from None
            elif field.is_required:
                raise RecipeError(f"{field.key or name} is missing")
        for name in rest:
            raise RecipeError(self._unknown(name))
        usual = {name: copy(field.default) for name, field in self.fields().items()}
        vars(self).update(usual | values, given=frozenset(values))
        try:
            self.check_together()
        except ValueError as error:
            raise error if isinstance(error, RecipeError) else RecipeError(str(error)) from None

    def check_together(self) -> None:
        """Refuse values that do not go together, although each is valid."""

    @classmethod
    @cache
    def fields(cls) -> dict[str, Field]:
        """Return the fields by name; those of base classes come first."""
        hints = get_type_hints(cls, include_extras=True)
        declared = {name: getattr(cls, name, None) for name in hints}
        return {
            name: replace(field, hint=Annotated[hints[name], field.limits])
            for name, field in declared.items()
            if isinstance(field, Field)
        }

    @classmethod
    def take_from(cls, given: dict[str, Any]) -> dict[str, Any]:
        """Take out of some keywords those that are its fields', by the names they have now."""
        found = {}
        for name, field in cls.fields().items():
            for key in {name, field.old} & given.keys():
                found[name] = given.pop(key)
        return found

    @classmethod
    def marked(cls, mark: str) -> set[str]:
        """Return the names of the fields whose declaration has a mark."""
        return {name for name, field in cls.fields().items() if mark in field.marks}

    @classmethod
    def unknown(cls, name: str) -> str:
        """Say that a field is unknown, and which one is probably meant."""
        return f"{name}: not known{did_you_mean(name, cls.fields())}"

    def _unknown(self, name: str) -> str:
        for stage in STAGES.values():
            if name in stage.parameters:
                where = f"stages={{{stage.name!r}: {{{name!r}: …}}}}"
                return f"{name}: is a parameter of {stage.name}: {where}"
        return self.unknown(name)

    def changed(self, **fields: Any) -> Self:
        """Return a copy with some fields changed, checked like any other."""
        return type(self)(**({name: getattr(self, name) for name in self.given} | fields))

    def model_copy(self, *, update: Mapping[str, Any] | None = None) -> Self:
        """Return `changed(**update)`, under pydantic's name for existing programs."""
        return self.changed(**update or {})

    def without(self, mark: str) -> Self:
        """Return a copy without the fields that have a mark."""
        given = self.given - self.marked(mark)
        return type(self)(**{name: getattr(self, name) for name in given})

    def _not_default(self) -> Iterator[tuple[str, Any]]:
        """Yield the name and value of each field that does not have its default."""
        for name, field in self.fields().items():
            value = getattr(self, name)
            if field.is_required or value != field.default:
                yield name, value

    def to_tables(self) -> dict[str, Any]:
        """Return it as plain tables, without defaults."""
        fields = self.fields()
        return {fields[name].key or name: plain(value) for name, value in self._not_default()}

    def __repr__(self) -> str:
        shown = ((n, str(v) if isinstance(v, PurePath) else v) for n, v in self._not_default())
        return f"{type(self).__name__}({', '.join(f'{name}={v!r}' for name, v in shown)})"

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and all(
            getattr(self, name) == getattr(other, name) for name in self.fields()
        )

    def __hash__(self) -> int:
        return hash(tuple(getattr(self, name) for name in self.fields()))

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        raise AttributeError(f"{name}: cannot be set; make another {type(self).__name__}")


def _in_words_of_recipes(fault: WrongValueError) -> RecipeError:
    name = ".".join(map(str, fault.place))
    if isinstance(fault.cause, RecipeError):
        return RecipeError(f"{name}: {fault.cause}") if len(fault.place) > 1 else fault.cause
    given = without_credentials(repr(fault.value))
    return RecipeError(f"{name} = {given}: {fault.text}")


def plain(value: Any) -> Any:
    """Return a value in the types of TOML and JSON.

    >>> plain({"file": PurePath("models", "math"), "range": (0, 4)})
    {'file': 'models/math', 'range': [0, 4]}
    """
    match value:
        case Strict():
            return value.to_tables()
        case PurePath():
            return value.as_posix()
        case list() | tuple():
            return [plain(entry) for entry in value]
        case dict():
            return {key: plain(entry) for key, entry in value.items()}
        case _:
            return value
