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
import json
import os
import re
import shlex
import sys
import tomllib
import traceback
from collections.abc import Collection, Iterator, Sequence
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dare import __version__
from dare.errors import DareError, ExistsError, did_you_mean, printable

if TYPE_CHECKING:
    from cyclopts import App
    from cyclopts.help import DefaultFormatter, HelpPanel
    from rich.console import Console

# Variables by which a user sets the number of OpenBLAS's threads; the first counts most.
BLAS_VARIABLES = ("OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS", "OMP_NUM_THREADS")
USES_BLAS = ("lora", "demo")  # commands that multiply large matrices in the main thread

ESCAPE = "dare-escape"
HELP_ALL = "--help-all"

HELP: dict[str, Any] = tomllib.loads(files("dare.cli").joinpath("help.toml").read_text("utf-8"))
# Each command's help; the first line is what the list of commands shows.
COMMANDS: dict[str, str] = HELP["commands"]

# The flags that `--help` lists, by command; `--help-all` lists the others too.
MAIN_FLAGS: dict[str, list[str]] = HELP["main_flags"]

WITH_COMMANDS = ("lora", "search")  # commands that have subcommands

DONE, FAILED, WRONG_USAGE, INTERRUPTED = 0, 1, 2, 130


class UsageError(DareError):
    """The command line makes no sense."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    for stream in ("stdout", "stderr"):
        if getattr(sys, stream) is None:  # as it is after `>&-`
            setattr(sys, stream, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115
        elif isinstance(found := getattr(sys, stream), io.TextIOWrapper):
            found.reconfigure(errors=ESCAPE)
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


codecs.register_error(ESCAPE, _escape)


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
            atexit.register(gc.freeze)  # the system takes back all memory at once
    finally:
        if collects:
            gc.enable()


def _run(given: Sequence[str], *, owns_process: bool) -> int:
    try:
        from cyclopts import CycloptsError, UnusedCliTokensError
    except KeyboardInterrupt:
        return INTERRUPTED
    try:
        with _uncollected_start(owns_process=owns_process):
            if any(re.fullmatch("(--[^=]+=)?", word) for word in given):
                raise UsageError(f"an argument is empty: {shlex.join(given)}; is a variable unset?")
            _load_stages(given)
            words = with_command(given)
            plain = ["--help" if word == HELP_ALL else word for word in words]
            command, bound, _ = build_app(words).parse_args(
                plain, exit_on_error=False, print_error=False
            )
        outcome = command(*bound.args, **bound.kwargs)
        sys.stdout.flush()
    except CycloptsError as error:
        asked = with_command(given)[0]
        where = f"{asked} --help" if asked in COMMANDS else "--help"
        unused = isinstance(error, UnusedCliTokensError) and shlex.join(error.unused_tokens or ())
        fault = f"too many arguments: {unused}." if unused else error
        return _fail(f"{fault} See `dare {where}`.", error, given, WRONG_USAGE)
    except ExistsError as error:
        again = shlex.join([*given, "--overwrite"])
        message = f"{error.fault} (--output OTHER), or replace it with --overwrite:\n  dare {again}"
        return _fail(printable(message, keep="\n"), error, given, FAILED)
    except DareError as error:
        status = WRONG_USAGE if isinstance(error, UsageError) else FAILED
        return _fail(str(error), error, given, status)
    except KeyboardInterrupt:
        print(f"dare: interrupted{_resuming(given)}", file=sys.stderr)
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


def build_app(words: Sequence[str] = ("",)) -> App:
    """Return the commands with their help; what completes them only if no other is asked for."""
    from cyclopts import App, Group

    name = " ".join(words[:2]) if " ".join(words[:2]) in MAIN_FLAGS else words[0]
    flags = MAIN_FLAGS.get(name, [])
    is_short = flags and HELP_ALL not in words and not {"--help", "-h"}.isdisjoint(words)

    app = App(
        name="dare",
        version=f"dare {__version__}",
        usage=HELP["usage"],
        help=HELP["summary"],
        help_epilogue=HELP["examples"],
        help_flags=["--help", "-h"],
        help_format="rich",
        help_formatter=_short_help(name, flags) if is_short else None,
        suppress_keyboard_interrupt=False,
    )
    for place, (title, names) in enumerate(HELP["groups"].items()):
        group = Group(title, sort_key=place)
        for order, name in enumerate(names):
            home = name if name in WITH_COMMANDS else HELP["homes"].get(name, "commands")
            how = {} if name in WITH_COMMANDS else {"help_epilogue": ""}
            texts = {"name": name, "help": COMMANDS[name], **how}
            app.command(f"dare.cli.{home}:{name}", group=group, sort_key=order, **texts)
    if words[0] not in COMMANDS:  # it takes a while to import
        app.register_install_completion_command(help="Set up completion in the shell you are in.")
        app["--install-completion"].show = False
    for flag in ("--help", "--version"):
        app[flag].show = False
    return app


def _short_help(command: str, flags: Collection[str]) -> DefaultFormatter:
    """Return a formatter that leaves out all flags but some, and says how to see the others."""
    from cyclopts.help import DefaultFormatter

    def is_main(names: Sequence[str]) -> bool:
        return not names or any(name in flags or not name.startswith("--") for name in names)

    class ShortHelp(DefaultFormatter):
        def render_description(self, console: Console, options: Any, description: Any) -> None:
            super().render_description(console, options, description)
            console.print(HELP["more"].format(command=command), highlight=False)

        def __call__(self, console: Console, options: Any, panel: HelpPanel) -> None:
            entries = [entry for entry in panel.entries if is_main(entry.names)]
            super().__call__(console, options, panel.copy(entries=entries))

    return ShortHelp()


def with_command(arguments: Sequence[str]) -> list[str]:
    """Put `merge` where no command is named: before flags, a recipe, or models.

    >>> with_command(["--config", "recipe.toml"]), with_command(["verify", "x"])
    (['merge', '--config', 'recipe.toml'], ['verify', 'x'])
    >>> with_command(["bse", "math", "-o", "merged"])[0], with_command(["verfy", "x", "-o", "y"])[0]
    ('merge', 'verfy')
    """
    alone = {"--help", "-h", "--version", "--install-completion"}
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


def _resuming(arguments: Sequence[str]) -> str:
    if with_command(arguments)[0] not in ("merge", "moe", "search", "sweep"):
        return ""
    again = [word for word in arguments if word != "--no-resume"]
    return f"; to resume, run\n  dare {printable(shlex.join(again))}"


def _fail(message: str, error: BaseException, arguments: Sequence[str], status: int) -> int:
    if status == WRONG_USAGE and arguments[0] in COMMANDS and Path(arguments[0]).is_dir():
        message += f" If you mean the folder {arguments[0]}, write ./{arguments[0]}."
    if "--debug" in arguments:
        traceback.print_exception(error)
    if "--json" in arguments:
        with contextlib.suppress(OSError):  # which the message is about
            print(json.dumps({"error": {"type": type(error).__name__, "message": message}}))
            sys.stdout.flush()
    print(printable(f"dare: {message}", keep="\n"), file=sys.stderr)
    return status
