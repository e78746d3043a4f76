"""The command line, read as the signature of a command says.

A command is a function, and its parameters are its arguments and flags: names, types, defaults, and
what `Annotated` adds with a `Flag`. What a parameter means is said by its flag or in the docstring,
as `:param name: …`. A parameter whose type is a dataclass stands for its fields. A command that
takes `**flags` also takes one for each parameter of a stage; the stages are imported only where a
flag is not known otherwise.

This does what argparse would, and what that cannot: several values after one flag, flags anywhere
among paths, negative numbers as values, and words that say what to write instead.
"""

from __future__ import annotations

import inspect
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from difflib import get_close_matches
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from dare.cli import WrongLineError

Command = Callable[..., Any]

END = "--"  # what follows it are paths
BOOLEANS = dict.fromkeys(("yes", "y", "1", "true", "t"), True)
BOOLEANS |= dict.fromkeys(("no", "n", "0", "false", "f"), False)
KIND_NAMES: dict[Any, str] = {bool: "", int: "INT", float: "FLOAT", str: "STR", Path: "PATH"}
EMPTY = inspect.Parameter.empty
PARAM_LINE = re.compile(r":param (\w+): (.*)")


class UnknownCommandError(WrongLineError):
    """There is no such command."""


class UnknownOptionError(WrongLineError):
    """There is no such flag."""


class MissingArgumentError(WrongLineError):
    """A flag has no value, or a command lacks an argument."""


class ConsumeMultipleError(WrongLineError):
    """A flag for several values has none."""


class RepeatArgumentError(WrongLineError):
    """A flag for one value is given twice."""


class CoercionError(WrongLineError):
    """A value is not of the flag's type."""


class UnusedCliTokensError(WrongLineError):
    """There are more arguments than the command takes."""


@dataclass(frozen=True)
class Flag:
    """Details of a parameter beside its name, type and default."""

    names: tuple[str, ...] = ()  # in place of `--name`; an argument's without dashes
    group: str = ""
    help: str = ""
    metavar: str = ""
    least: int | None = None  # it takes several values at once, at least so many
    has_negative: bool = False  # `--no-name` says no
    shows_default: bool = True
    takes_dashes: bool = False  # its value may begin with a dash


@dataclass(frozen=True)
class Option:
    """An argument or a flag of a command."""

    name: str
    kind: Any  # the type of one value
    flag: Flag
    help: str
    default: Any = EMPTY
    binding: Any = inspect.Parameter.KEYWORD_ONLY  # how the function takes it
    is_list: bool = False
    owner: str = ""  # the parameter whose field it is

    @property
    def is_positional(self) -> bool:
        """Whether it is a positional argument."""
        return self.binding is not inspect.Parameter.KEYWORD_ONLY

    @property
    def takes_rest(self) -> bool:
        """Whether it takes all arguments that are left."""
        return self.binding is inspect.Parameter.VAR_POSITIONAL

    @property
    def names(self) -> tuple[str, ...]:
        """Its names on the command line, with dashes; none if it is only positional."""
        if self.takes_rest or self.binding is inspect.Parameter.POSITIONAL_ONLY:
            return ()
        return self.flag.names or (f"--{self.name.replace('_', '-')}",)

    @property
    def negatives(self) -> tuple[str, ...]:
        """Flags that set it to false."""
        return (f"--no-{self.name.replace('_', '-')}",) if self.flag.has_negative else ()

    @property
    def label(self) -> str:
        """The name of an argument in usage and messages."""
        return self.name.upper() if self.names or not self.flag.names else self.flag.names[0]

    @property
    def is_switch(self) -> bool:
        """Whether the flag alone says yes."""
        return self.kind is bool and not self.is_list

    @property
    def choices(self) -> tuple[str, ...]:
        """The values that it can have, if they can be listed."""
        return get_args(self.kind) if get_origin(self.kind) is Literal else ()

    @property
    def metavar(self) -> str:
        """The placeholder for its value in help."""
        dots = "..." if self.is_list and self.flag.least is not None else ""
        usual = "CHOICE" if self.choices else KIND_NAMES[self.kind]
        return self.flag.metavar or (usual and usual + dots)

    @property
    def is_required(self) -> bool:
        """Whether it must be given."""
        return self.default is EMPTY and not self.takes_rest

    def read(self, name: str, text: str) -> Any:
        """Return a value of its type."""
        if self.choices:
            if text in self.choices:
                return text
            known = ", ".join(f'"{choice}"' for choice in self.choices)
            hint = _hint(text, self.choices, '"{}"')
            raise CoercionError(f'Invalid value "{text}" for {name}. Choose from: {known}.{hint}')
        try:
            return _parse_int(text) if self.kind is int else self.kind(text)
        except ValueError:
            raise _wrong_type(name, text, self.kind) from None


OUTPUT = "What is shown"  # the group of the flags for that
# Every command has it, and `main` reads it.
DEBUG = Option(
    "debug", bool, Flag((), OUTPUT, shows_default=False), "Show the traceback of an error.", False
)


def _wrong_type(name: str, text: str, kind: type) -> CoercionError:
    """Return the error for a text that is not of a type."""
    fault = f'Invalid value for {name}: unable to convert "{text}" into {kind.__name__}.'
    return CoercionError(fault)


def _parse_int(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        return int(text, 0)  # 0x10


def unknown_command(word: str, known: Iterable[str]) -> UnknownCommandError:
    """Return the error for a word in place of a command, with commands that there are."""
    names = list(known)
    listed = ", ".join(names[:8]) + (", ..." if len(names) > 8 else ".")
    hint = _hint(word, names, '"{}"')
    return UnknownCommandError(f'Unknown command "{word}".{hint} Available commands: {listed}')


def _hint(word: str, known: Iterable[str], form: str = "{}") -> str:
    close = get_close_matches(word, list(known), n=1)
    return f" Did you mean {form.format(close[0])}?" if close else ""


# ---------------------------------------------------------------- what a command takes


def read_options(command: Command) -> list[Option]:
    """Return the arguments and flags that a command's signature declares."""
    found: list[Option] = []
    meanings = dict(PARAM_LINE.findall(command.__doc__ or ""))
    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            continue
        option = _read_option(
            parameter.name, parameter.annotation, meanings, parameter.default, parameter.kind
        )
        if is_dataclass(option.kind):
            found += _read_fields(option.kind, option.name)
        else:
            found.append(option)
    return [*found, DEBUG]


def _read_fields(table: Any, owner: str) -> Iterator[Option]:
    meanings = dict(PARAM_LINE.findall(table.__doc__ or ""))
    kinds = get_type_hints(table, include_extras=True)
    for each in fields(table):
        default = EMPTY if each.default is MISSING else each.default
        yield _read_option(each.name, kinds[each.name], meanings, default, owner=owner)


def _read_option(
    name: str,
    annotation: Any,
    meanings: Mapping[str, str],
    default: Any,
    binding: Any = inspect.Parameter.KEYWORD_ONLY,
    owner: str = "",
) -> Option:
    kind, flag = annotation, Flag()
    if get_origin(kind) is Annotated:
        kind, *notes = get_args(kind)
        flag = next((note for note in notes if isinstance(note, Flag)), flag)
    if get_origin(kind) in (Union, UnionType):
        (kind,) = (one for one in get_args(kind) if one is not type(None))
    is_list = get_origin(kind) is list
    kind = get_args(kind)[0] if is_list else kind
    text = flag.help or meanings.get(name, "")
    return Option(name, kind, flag, text, default, binding, is_list, owner)


def takes_stage_flags(command: Command) -> bool:
    """Tell if a command takes a flag for each parameter of a stage."""
    kinds = [parameter.kind for parameter in inspect.signature(command).parameters.values()]
    return inspect.Parameter.VAR_KEYWORD in kinds


# ---------------------------------------------------------------- what is given


class CommandLine:
    """The words of a command line, sorted by what they belong to."""

    def __init__(
        self, command: str, options: list[Option], more: Callable[[], list[Option]]
    ) -> None:
        self._command = command  # its name
        self._options = options
        self._more: Callable[[], list[Option]] | None = more  # for flags that are not known
        self._paths: list[str] = []
        self._unknown: list[str] = []
        self._texts: dict[str, list[tuple[str, str]]] = {}  # each value, and the flag's name
        self._values: dict[str, Any] = {}

    def _find(self, name: str) -> Option | None:
        """Return the flag of a name."""
        name = name.replace("_", "-") if name.startswith("--") else name
        for option in self._options:
            if name in option.names or name in option.negatives:
                return option
        if self._more is None or not name.startswith("--"):
            return None
        self._ask_for_more()
        return self._find(name)

    def _ask_for_more(self) -> None:
        if self._more is not None:
            known = {option.name for option in self._options}
            self._options += [option for option in self._more() if option.name not in known]
            self._more = None

    def read(self, words: Sequence[str]) -> None:
        """Assign every word to its flag, or take it as an argument."""
        remaining = list(words)
        while remaining:
            word = remaining.pop(0)
            if word == END:
                self._paths += remaining
                return
            if not is_flag(word):
                self._paths.append(word)
                continue
            name, equals, value = word.partition("=")
            option = self._find(name)
            if option is None and not word.startswith("--"):  # -qv, or -oPATH
                name, equals, value = word[:2], word[2:], word[2:]
                option = self._find(name)
                if option is not None and option.is_switch:
                    remaining.insert(0, f"-{value}")
                    equals = ""
            if option is None:
                self._unknown.append(word)
            elif option.is_switch:
                self._set_switch(option, name, value if equals else "yes")
            else:
                self._take_values(option, name, [value] if equals else [], remaining)

    def _set_switch(self, option: Option, name: str, text: str) -> None:
        if option.name in self._values:
            raise _repeated(name)
        if text.lower() not in BOOLEANS:
            raise _wrong_type(name, text, bool)
        says_yes = name.replace("_", "-") not in option.negatives
        self._values[option.name] = BOOLEANS[text.lower()] == says_yes

    def _take_values(
        self, option: Option, name: str, given: list[str], remaining: list[str]
    ) -> None:
        """Take the values of a flag from the remaining words."""
        if option.name in self._texts and not option.is_list:
            raise _repeated(name)
        least = option.flag.least if option.is_list else None
        while remaining and (least is not None or not given):
            if is_flag(remaining[0]) and not option.flag.takes_dashes:
                break
            given.append(remaining.pop(0))
        if not given and least is None:
            raise self._missing(name)
        if not given and least:
            fault = (
                f'Command "{self._command}" parameter {name} requires at least 1 element. Got 0.'
            )
            raise ConsumeMultipleError(fault)
        if not given:
            self._values[option.name] = []
        self._texts.setdefault(option.name, []).extend((name, text) for text in given)

    def _missing(self, name: str) -> MissingArgumentError:
        fault = f'Command "{self._command}" parameter {name} requires an argument.'
        return MissingArgumentError(fault)

    def finish(self) -> tuple[list[Any], dict[str, Any]]:
        """Return positional and keyword arguments; raise for what is unknown, wrong or missing."""
        for word in self._unknown:
            self._ask_for_more()
            names = [n for option in self._options for n in (*option.names, *option.negatives)]
            is_group = word[1:2] != "-" and len(word) > 2
            first = f" {word[:2]} is not a recognized option." if is_group else ""
            raise UnknownOptionError(f"Unknown option: {word}.{first or _hint(word, names)}")
        placed, rest = [], list(self._paths)
        for option in self._options:
            if texts := self._texts.get(option.name):
                values = [option.read(name, text) for name, text in texts]
                self._values[option.name] = values if option.is_list else values[0]
            elif option.takes_rest:
                placed += [option.read(option.label, text) for text in rest]
                rest = []
            elif option.is_positional and rest:
                taken, rest = (rest, []) if option.is_list else (rest[:1], rest[1:])
                values = [option.read(option.label, text) for text in taken]
                self._values[option.name] = values if option.is_list else values[0]
            elif option.is_required and option.name not in self._values:
                raise self._missing(option.names[0] if option.names else option.label)
        if rest:
            raise UnusedCliTokensError(f"too many arguments: {shlex.join(rest)}.")
        for option in self._options:
            if option.binding is inspect.Parameter.POSITIONAL_ONLY and option.name in self._values:
                placed.append(self._values.pop(option.name))
        return placed, self._values


def _repeated(name: str) -> RepeatArgumentError:
    return RepeatArgumentError(f"Parameter {name} specified multiple times.")


def is_number(word: str) -> bool:
    """Tell if a word is a number: a negative one is no flag.

    >>> is_number("-0.5"), is_number("-inf"), is_number("-o")
    (True, True, False)
    """
    try:
        float(word)
    except ValueError:
        return False
    return True


def is_flag(word: str) -> bool:
    """Tell if a word is a flag and not a value."""
    return word.startswith("-") and not is_number(word)


def call(
    name: str, command: Command, words: Sequence[str], more: Callable[[], list[Option]]
) -> Callable[[], Any]:
    """Return the call of a command that the words ask for."""
    options = read_options(command)
    line = CommandLine(name, options, more if takes_stage_flags(command) else list)
    line.read(words)
    placed, named = line.finish()
    named.pop(DEBUG.name, None)
    return lambda: command(*placed, **_with_tables(command, options, named))


def _with_tables(
    command: Command, options: Sequence[Option], named: Mapping[str, Any]
) -> dict[str, Any]:
    """Return values by parameter, with those of a dataclass's fields in one."""
    given = dict(named)
    parameters = inspect.signature(command, eval_str=True).parameters
    for owner in {option.owner for option in options} - {""}:
        own = {option.name for option in options if option.owner == owner}
        if names := own & given.keys():
            table = _read_option(owner, parameters[owner].annotation, {}, None).kind
            given[owner] = table(**{name: given.pop(name) for name in names})
    return given
