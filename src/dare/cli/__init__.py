"""The command `dare`: arguments in, an exit status out.

    0    done
    1    refused or failed: one message on stderr, which says what to change
    2    the command line is wrong
    130  interrupted: the message says how to resume

Commands are imported only when they are called, so that `--help` is there at once.
"""

from __future__ import annotations

import atexit
import codecs
import contextlib
import gc
import io
import os
import re
import shlex
import sys
import tomllib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from dare import __version__
from dare.errors import DareError, ExistsError, did_you_mean, printable

if TYPE_CHECKING:
    from dare.cli.parsing import Command

# Variables by which a user sets the number of OpenBLAS's threads; the first counts most.
BLAS_VARIABLES = ("OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS", "OMP_NUM_THREADS")
USES_BLAS = ("lora", "demo")  # commands that multiply large matrices in the main thread

ESCAPE_ERRORS = "dare-escape"
HELP_ALL = "--help-all"

HELP: dict[str, Any] = tomllib.loads(Path(__file__).with_name("help.toml").read_text("utf-8"))
# Each command's help; the first line is what the list of commands shows.
COMMANDS: dict[str, str] = HELP["commands"]
SUBCOMMANDS = {"lora": ["merge", "extract"], "search": ["show", "best"]}

# The flags that `--help` lists, by command; `--help-all` lists the others too.
MAIN_FLAGS: dict[str, list[str]] = HELP["main_flags"]
COMPLETION = "--install-completion"
HELP_FLAGS = {"--help", "-h", HELP_ALL}
# Commands that plan no merge.
PLANS_NO_MERGE = {"verify", "sign", "methods", "playground", COMPLETION}
HELP_TEXTS = {**COMMANDS, **HELP["subcommands"], COMPLETION: HELP["completion"]}

DONE, FAILED, WRONG_USAGE, INTERRUPTED = 0, 1, 2, 130


class UsageError(DareError):
    """The command line makes no sense."""


class WrongLineError(UsageError):
    """The command line cannot be parsed; the message ends with a pointer to the help."""


def run_as_program() -> NoReturn:
    """Run the command in a process of its own, which then ends at once.

    Python would first take all modules apart, and the driver of a GPU everything that it has.
    """
    status = [FAILED]
    atexit.register(_leave, status)  # the first is called last, after all that packages clean up
    status[0] = main()
    sys.exit(status[0])


def _leave(status: Sequence[int]) -> None:
    with contextlib.suppress(OSError, ValueError):  # a stream that is closed: Python will say so
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status[0])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    for stream in ("stdout", "stderr"):
        if getattr(sys, stream) is None:  # as it is after `>&-`
            setattr(sys, stream, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115
        elif isinstance(found := getattr(sys, stream), io.TextIOWrapper):
            found.reconfigure(errors=ESCAPE_ERRORS)
    _hold_blas_to_one_thread(given)
    return _run(given, owns_process=arguments is None)


def _escape(error: UnicodeError) -> tuple[str, int]:
    """Return letters that a stream cannot write as JSON spells them.

    A finished merge must not end in an error.
    """
    assert isinstance(error, UnicodeEncodeError)
    units = error.object[error.start : error.end].encode("utf-16-be", "surrogatepass")
    pairs = (units[place : place + 2].hex() for place in range(0, len(units), 2))
    return "".join(f"\\u{pair}" for pair in pairs), error.end


codecs.register_error(ESCAPE_ERRORS, _escape)


def _hold_blas_to_one_thread(arguments: Sequence[str]) -> None:
    """Keep OpenBLAS from starting a thread for each core, all of which then wait and burn time.

    Merges and analyses hold it to one thread for each of theirs anyway. It reads the variable
    when NumPy is imported.
    """
    is_set = any(variable in os.environ for variable in BLAS_VARIABLES)
    if not is_set and "numpy" not in sys.modules and with_command(arguments)[0] not in USES_BLAS:
        os.environ[BLAS_VARIABLES[0]] = "1"


@contextlib.contextmanager
def _uncollected_start(*, owns_process: bool) -> Iterator[None]:
    """Keep the garbage collector off while modules are imported: nothing of them is garbage.

    In a process of our own it never goes over them later either.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
        if owns_process:
            gc.freeze()
    finally:
        if collects:
            gc.enable()


def _run(given: Sequence[str], *, owns_process: bool) -> int:
    try:
        with _uncollected_start(owns_process=owns_process):
            if any(re.fullmatch("(--[^=]+=)?", word) for word in given):
                raise UsageError(f"an argument is empty: {shlex.join(given)}; is a variable unset?")
            _load_stages(given)
            command = read_words(with_command(given))
        outcome = command()
        sys.stdout.flush()
    except ExistsError as error:
        again = shlex.join([*given, "--overwrite"])
        message = f"{error.fault} (--output OTHER), or replace it with --overwrite:\n  dare {again}"
        return _fail(printable(message, keep="\n"), error, given, FAILED)
    except DareError as error:
        status = WRONG_USAGE if isinstance(error, UsageError) else FAILED
        asked = with_command(given)[0]
        where = f"{asked} --help" if asked in COMMANDS else "--help"
        help_text = f" See `dare {where}`." if isinstance(error, WrongLineError) else ""
        return _fail(f"{error}{help_text}", error, given, status)
    except KeyboardInterrupt:
        print(f"dare: interrupted{_resume_hint(given)}", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader, `head` for one, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DONE
    except OSError as error:  # files explain theirs, so this is stdout
        message = printable(f"{error.filename or 'stdout'}: {error.strerror or error}")
        return _fail(message, error, given, FAILED)
    except Exception as error:
        reason = printable(f"{type(error).__name__}: {error}")
        message = f"{reason} (this is a bug in dare; --debug shows where)"
        return _fail(message, error, given, FAILED)
    return outcome if isinstance(outcome, int) else DONE


def _load_stages(arguments: Sequence[str]) -> None:
    """Load what --stage names before the flags are made, since stages bring theirs along."""
    files = [after for word, after in pairwise(arguments) if word == "--stage"]
    files += [word.partition("=")[2] for word in arguments if word.startswith("--stage=")]
    if files:
        from dare.stages.registry import load_stages

        for file in files:
            load_stages(file)


def read_words(words: Sequence[str]) -> Callable[[], Any]:
    """Return a call of the command or the help that the words ask for."""
    from dare.cli.parsing import END, call, unknown_command

    flags = words[: words.index(END)] if END in words else words
    if "--version" in flags:
        return lambda: print(f"dare {__version__}")
    asked = [word for word in words if word not in HELP_FLAGS] or [""]
    inner = SUBCOMMANDS.get(asked[0], [])
    name = " ".join(asked[: 2 if asked[1:2] and asked[1] in inner else 1])
    if not HELP_FLAGS.isdisjoint(flags) or asked == ["lora"]:
        return partial(_help, name if name in HELP_TEXTS else "", with_all=HELP_ALL in flags)
    if name == "lora":
        raise unknown_command(asked[1], inner)
    if name not in HELP_TEXTS:
        raise unknown_command(name, chain(*HELP["groups"].values()))
    from dare.cli.flags import stage_options

    command = call(name, find_command(name), words[len(name.split()) :], stage_options)
    if asked[0] not in PLANS_NO_MERGE:
        from dare import api  # noqa: F401 (now, as nothing is collected)
    return command


def _help(name: str, *, with_all: bool) -> None:
    from dare.cli.flags import every_option
    from dare.cli.help import print_command, print_program
    from dare.cli.parsing import read_options
    from dare.documents.console import Console

    if not name:
        print_program(Console())
        return
    read = every_option if with_all else read_options
    options = [] if name == "lora" else read(find_command(name))
    print_command(Console(), name, options, with_all=with_all)


def find_command(name: str) -> Command:
    """Import a command's module, and no other."""
    home: Any
    outer, _, inner = name.partition(" ")
    match outer:
        case "analyze" | "advise" | "report":
            from dare.cli import analysis as home
        case "compress" | "apply" | "lora" | "moe" | "convert":
            from dare.cli import conversions as home
        case "search" | "sweep":
            from dare.cli import search as home
        case "--install-completion":
            from dare.cli import completion as home
        case _:
            from dare.cli import commands as home
    found: Command = getattr(home, (inner or outer).strip("-").replace("-", "_"))
    return found


def with_command(arguments: Sequence[str]) -> list[str]:
    """Put `merge` where no command is named: before flags, a recipe, or models.

    >>> with_command(["--config", "recipe.toml"]), with_command(["verify", "x"])
    (['merge', '--config', 'recipe.toml'], ['verify', 'x'])
    >>> with_command(["bse", "math", "-o", "merged"])[0], with_command(["verfy", "x", "-o", "y"])[0]
    ('merge', 'verfy')
    """
    alone = {"--help", "-h", "--version", COMPLETION}
    if not arguments:
        return ["--help"]
    first = arguments[0]
    if first in COMMANDS or first in alone:
        return list(arguments)
    if first.startswith("-") or "/" in first or Path(first).suffix or Path(first).exists():
        return ["merge", *arguments]
    has_output = not {"--output", "-o"}.isdisjoint(arguments)
    is_misspelt_path = has_output and not did_you_mean(first, COMMANDS)
    return ["merge", *arguments] if is_misspelt_path else list(arguments)


def _resume_hint(arguments: Sequence[str]) -> str:
    if with_command(arguments)[0] not in ("merge", "moe", "search", "sweep"):
        return ""
    again = [word for word in arguments if word != "--no-resume"]
    return f"; to resume, run\n  dare {printable(shlex.join(again))}"


def _fail(message: str, error: BaseException, arguments: Sequence[str], status: int) -> int:
    if status == WRONG_USAGE and arguments[0] in COMMANDS and Path(arguments[0]).is_dir():
        message += f" If you mean the folder {arguments[0]}, write ./{arguments[0]}."
    if "--debug" in arguments:
        import traceback

        traceback.print_exception(error)
    if "--json" in arguments:
        with contextlib.suppress(OSError):  # which the message is about
            import json

            print(json.dumps({"error": {"type": type(error).__name__, "message": message}}))
            sys.stdout.flush()
    print(printable(f"dare: {message}", keep="\n"), file=sys.stderr)
    return status
