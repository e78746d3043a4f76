"""`dare --install-completion`: a script that completes commands, flags and choices in a shell.

The script contains everything that it offers, so that no program runs when a key is pressed.
"""

from __future__ import annotations

import os
import shlex
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Literal

from dare.cli import COMMANDS, DONE, HELP, SUBCOMMANDS, UsageError, find_command
from dare.cli.flags import every_option
from dare.cli.parsing import Flag, Option
from dare.documents.console import make_console

Shell = Literal["zsh", "bash", "fish"]
_SHELL = "Shell type for completion. If not specified, attempts to auto-detect current shell."
_PLACE = "Output path for the completion script. If not specified, uses shell-specific default."

SCRIPTS = tomllib.loads(Path(__file__).with_name("completion.toml").read_text("utf-8"))
CHECK_MARK = "✓"


def install_completion(
    *,
    shell: Annotated[Shell | None, Flag(help=_SHELL)] = None,
    output: Annotated[Path | None, Flag(("--output", "-o"), help=_PLACE)] = None,
) -> int:
    """Write the script, and have the shell load it."""
    shell = shell or _detect_shell()
    place = (output or Path.home() / SCRIPTS["homes"][shell]).absolute()
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(write_script(shell), encoding="utf-8")
    messages = [f"Completion script installed to {place}"]
    if shell == "bash":
        start = Path.home() / ".bashrc"
        _add_line(start, f'[ -f "{place}" ] && . "{place}"', at_end=True)
        messages.append(f"Added completion loader to {start}")
    elif shell == "zsh":
        start = Path.home() / ".zshrc"
        _add_line(start, f"fpath=({place.parent} $fpath)", at_end=False)  # before any compinit
        messages.append(f"Added {place.parent} to fpath in {start}")
    console = make_console()
    mark = CHECK_MARK if console.can_write(CHECK_MARK) else "*"
    for line in messages:
        console.print(f"{mark} {line}", wraps=False)
    console.print(f"\n{SCRIPTS['then'][shell]}")
    return DONE


def _detect_shell() -> Shell:
    match Path(os.environ.get("SHELL", "")).name:
        case "bash" | "zsh" | "fish" as shell:
            return shell
    raise UsageError("Could not auto-detect shell. Please specify --shell explicitly.")


def _add_line(file: Path, line: str, *, at_end: bool) -> None:
    """Add a line to what a shell reads when it starts, unless it is there."""
    text = file.read_text(encoding="utf-8") if file.exists() else ""
    if line not in text:
        added = f"# Load dare completion\n{line}\n"
        between = "\n" if text and not text.endswith("\n") else ""
        file.write_text(text + between + added if at_end else added + text, encoding="utf-8")


def write_script(shell: Shell) -> str:
    """Return the script for a shell."""
    names = [*(name for name in COMMANDS if name != "lora"), *HELP["subcommands"]]
    options = {name: every_option(find_command(name)) for name in names}
    options["lora"] = []
    lines = _fish_lines(options) if shell == "fish" else _cases(options)
    return str(SCRIPTS[shell]).format(table="\n".join(lines))


def _cases(options: Mapping[str, Iterable[Option]]) -> Iterator[str]:
    """Yield lines that bash and zsh both read; the first command that fits counts."""
    flags = {name: shlex.join(_flags(options[name])) for name in options}
    yield '  case "$asked" in'
    for name in sorted(options, key=lambda name: -len(name.split())):
        yield f'    "{name}"*) flags=({flags[name]} --help)'
        yield f"      commands=({' '.join(SUBCOMMANDS.get(name, ()))})"
        yield '      case "$before" in'
        for option in options[name]:
            if option.choices and option.names:
                yield f"        {'|'.join(option.names)}) choices=({shlex.join(option.choices)}) ;;"
        yield "      esac ;;"
    yield f"    *) commands=({' '.join(COMMANDS)}) flags=({flags['merge']} --help --version) ;;"
    yield "  esac"


def _flags(options: Iterable[Option]) -> list[str]:
    return [name for option in options for name in (*option.names, *option.negatives)]


def _fish_lines(options: Mapping[str, Iterable[Option]]) -> Iterator[str]:
    for name, text in COMMANDS.items():
        about = shlex.quote(text.strip().partition("\n")[0])
        yield f"complete -c dare -n __fish_use_subcommand -a {name} -d {about}"
    for name in options:
        seen = [f"__fish_seen_subcommand_from {word}" for word in name.split()]
        outer = [word for word, inner in SUBCOMMANDS.items() if name in inner]
        seen += [f"not __fish_seen_subcommand_from {word}" for word in outer]
        start = f"complete -c dare -n '{'; and '.join(seen)}'"
        if inner := SUBCOMMANDS.get(name, ()):
            yield f"{start} -a '{' '.join(inner)}'"
        for option in options[name]:
            about = shlex.quote(option.help.partition("\n")[0])
            values = "" if option.is_switch else f" -r -a '{' '.join(option.choices)}'"
            for flag in _flags([option]):
                word = f"-l {flag[2:]}" if flag.startswith("--") else f"-s {flag[1:]}"
                yield f"{start} {word}{values} -d {about}"
