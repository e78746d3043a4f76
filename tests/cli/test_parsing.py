"""Command lines, read by the signature of a command."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest

from dare.cli import WrongLineError
from dare.cli.parsing import Flag, Option, call, read_options


@dataclass(frozen=True)
class How:
    """:param jobs: How many at a time."""

    jobs: Annotated[int, Flag(("--jobs", "-j"))] = 1
    kind: Literal["grid", "random"] = "grid"


def command(
    *paths: Path,
    how: How | None = None,
    models: Annotated[list[str] | None, Flag(("--models", "-m"), least=1)] = None,
    file: Annotated[list[str] | None, Flag()] = None,
    scale: float = 1.0,
    to: Annotated[Path, Flag(("--to", "-o"), takes_dashes=True)] = Path("out"),
    resume: Annotated[bool, Flag(has_negative=True)] = True,
    quiet: Annotated[bool, Flag(("--quiet", "-q"))] = False,
    verbose: Annotated[bool, Flag(("--verbose", "-v"))] = False,
    **flags: Any,
) -> dict[str, Any]:
    """:param scale: A factor."""
    given = {"paths": [str(path) for path in paths], "how": how, "models": models, "file": file}
    given |= {"scale": scale, "to": str(to), "resume": resume, "quiet": quiet, "verbose": verbose}
    usual = {"paths": [], "scale": 1.0, "to": "out", "resume": True, "quiet": False}
    usual |= {"verbose": False}
    return {name: v for name, v in given.items() if v != usual.get(name)} | flags


def later() -> list[Option]:
    """Flags that are asked for where one is not known."""
    flag = Flag(least=0)
    return [Option("drop_rate", str, flag, "", None, is_list=True)]


def read(line: str) -> Any:
    return call("try", command, line.split(), later)()


@pytest.mark.parametrize(
    ("line", "given"),
    [
        ("", {}),
        ("a b", {"paths": ["a", "b"]}),
        ("a --quiet b -v c", {"paths": ["a", "b", "c"], "quiet": True, "verbose": True}),
        ("-qv", {"quiet": True, "verbose": True}),
        ("-qo x", {"quiet": True, "to": "x"}),
        ("-ox", {"to": "x"}),
        ("-o=x a", {"to": "x", "paths": ["a"]}),
        ("--to -", {"to": "-"}),
        ("--to -x", {"to": "-x"}),
        ("--scale -0.5 a", {"scale": -0.5, "paths": ["a"]}),
        ("--scale=-1e-3", {"scale": -0.001}),
        ("a -1", {"paths": ["a", "-1"]}),
        ("--models a b --quiet c", {"models": ["a", "b"], "quiet": True, "paths": ["c"]}),
        ("-m a --models=b c", {"models": ["a", "b", "c"]}),
        ("--file a b", {"file": ["a"], "paths": ["b"]}),
        ("--no-resume", {"resume": False}),
        ("--resume=no", {"resume": False}),
        ("--no-resume=false", {}),
        ("--quiet=yes", {"quiet": True}),
        ("--drop-rate", {"drop_rate": []}),
        ("--drop_rate 0.5 0.6", {"drop_rate": ["0.5", "0.6"]}),
        ("-j 0x10", {"how": How(jobs=16)}),
        ("--kind random", {"how": How(kind="random")}),
        ("a -- --quiet -x", {"paths": ["a", "--quiet", "-x"]}),
    ],
)
def test_a_line_is_read_as_the_signature_says(line, given):
    assert read(line) == given


@pytest.mark.parametrize(
    ("line", "kind", "words"),
    [
        ("--quite", "UnknownOptionError", ["--quite", "--quiet"]),
        ("--drop-rat 0.5", "UnknownOptionError", ["--drop-rate"]),
        ("-xq", "UnknownOptionError", ["-xq", "-x is not"]),
        ("-qx", "UnknownOptionError", ["-x"]),
        ("--no-quiet", "UnknownOptionError", ["--no-quiet"]),
        ("--scale", "MissingArgumentError", ["--scale", "try"]),
        ("--scale --quiet", "MissingArgumentError", ["--scale"]),
        ("--models --quiet", "ConsumeMultipleError", ["--models"]),
        ("--scale 1 --scale 2", "RepeatArgumentError", ["--scale"]),
        ("--resume --no-resume", "RepeatArgumentError", ["--no-resume"]),
        ("--scale x", "CoercionError", ["--scale", '"x"', "float"]),
        ("--jobs 1.5", "CoercionError", ["--jobs", '"1.5"', "int"]),
        ("--quiet=perhaps", "CoercionError", ["--quiet", '"perhaps"', "bool"]),
        ("--kind gird", "CoercionError", ["--kind", '"gird"', '"grid", "random"', 'mean "grid"']),
    ],
)
def test_what_cannot_be_read_is_named_with_what_to_write(line, kind, words):
    with pytest.raises(WrongLineError) as caught:
        read(line)
    assert type(caught.value).__name__ == kind
    assert [word for word in words if word not in str(caught.value)] == []


def extract(base: Path, model: Path, /) -> tuple[Path, Path]:
    """:param model: The second."""
    return base, model


def between(base: Annotated[Path, Flag(("--base", "-b"))], model: Path) -> tuple[Path, Path]:
    """:param model: The second."""
    return base, model


@pytest.mark.parametrize("line", ["a b", "-b a b", "a --model b", "--model b a", "b --base a"])
def test_an_argument_can_be_given_by_its_name(line):
    assert call("between", between, line.split(), list)() == (Path("a"), Path("b"))


@pytest.mark.parametrize(
    ("line", "kind", "word"),
    [
        ("", "MissingArgumentError", "BASE"),
        ("a", "MissingArgumentError", "MODEL"),
        ("a b c d", "UnusedCliTokensError", "c d"),
        ("--base a b", "UnknownOptionError", "--base"),
    ],
)
def test_arguments_are_as_many_as_the_command_takes(line, kind, word):
    with pytest.raises(WrongLineError, match=word) as caught:
        call("extract", extract, line.split(), list)()
    assert type(caught.value).__name__ == kind


def test_what_a_signature_says():
    options = {option.name: option for option in read_options(command)}
    assert "how" not in options
    assert options["jobs"].help == "How many at a time."
    assert (options["scale"].help, options["scale"].metavar) == ("A factor.", "FLOAT")
    assert options["models"].metavar == "STR..."
    assert options["kind"].choices == ("grid", "random")
    assert options["resume"].negatives == ("--no-resume",)
    assert not any(option.is_required for option in options.values())
