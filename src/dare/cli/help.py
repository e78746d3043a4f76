"""What `--help` shows: the usage, the text of help.toml, and boxes of commands or flags."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len

from dare.cli import COMMANDS, HELP, HELP_TEXTS, MAIN_FLAGS, SUBCOMMANDS
from dare.cli.parsing import EMPTY, Option
from dare.documents.console import Console, read_tags, split_lines

LABELS_SHARE = 0.35  # of the width: a longer label takes two lines
GAP = "  "


@dataclass(frozen=True)
class HelpRow:
    """A command or a flag in a box."""

    label: str
    text: str
    notes: str = ""  # choices and default
    is_required: bool = False


def print_program(console: Console) -> None:
    """Print what `dare --help` shows."""
    _print_text(console, f"[bold]{HELP['usage']}[/bold]\n\n{HELP['summary']}\n")
    for title, names in HELP["groups"].items():
        _print_box(console, title, [_of_command(name, COMMANDS[name]) for name in names])
    _print_text(console, f"\n{HELP['examples']}\n")


def print_command(
    console: Console, name: str, options: Sequence[Option], *, with_all: bool
) -> None:
    """Print a command's help; where it has main flags, those alone unless all are asked for."""
    main = MAIN_FLAGS.get(name, [])
    is_short = bool(main) and not with_all
    text = f"{HELP_TEXTS[name].strip()}\n"
    more = f"\n{HELP['more'].format(command=name)}" if is_short else ""
    _print_text(console, f"[bold]Usage: dare {name}{_usage(name, options)}[/bold]\n\n{text}{more}")
    if inner := SUBCOMMANDS.get(name, ()):
        texts = {word: HELP["subcommands"][f"{name} {word}"] for word in sorted(inner)}
        _print_box(console, "Commands", [_of_command(*item) for item in texts.items()])
    boxes: dict[str, list[HelpRow]] = {title: [] for title in HELP["boxes"]}
    for option in options:
        if not is_short or not option.names or not set(main).isdisjoint(option.names):
            group = option.flag.group or ("Parameters" if option.names else "Arguments")
            boxes[group].append(_of_option(option))
    for title, entries in boxes.items():
        _print_box(console, title, entries, HELP["boxes"][title])


def _print_text(console: Console, text: str) -> None:
    console.print(*read_tags(text))


def _usage(name: str, options: Sequence[Option]) -> str:
    places = [option for option in options if option.is_positional]
    named = [option for option in options if not option.is_positional]
    words = ["COMMAND"] if name in SUBCOMMANDS else []
    words += [f"{each.names[0]} {each.metavar}" for each in named if each.is_required]
    words += ["[OPTIONS]"] if named else []
    words += [each.label for each in places if each.is_required]
    if optional := [each for each in places if not each.is_required]:
        words.append("[ARGS...]" if any(each.takes_rest for each in optional) else "[ARGS]")
    return "".join(f" {word}" for word in words)


def _of_command(name: str, text: str) -> HelpRow:
    return HelpRow(name, text.strip().partition("\n")[0])


def _of_option(option: Option) -> HelpRow:
    labels = [*([option.label] if option.is_positional else []), *option.names, *option.negatives]
    label = " ".join(labels if option.is_positional else [*labels, option.metavar])
    notes = [f"choices: {', '.join(option.choices)}"] if option.choices else []
    if option.default not in (EMPTY, None) and option.flag.shows_default:
        notes.append(f"default: {option.default}")
    notes += ["required"] if option.is_required else []
    return HelpRow(
        label.strip(), option.help, " ".join(f"[{note}]" for note in notes), option.is_required
    )


# ---------------------------------------------------------------- boxes


def _print_box(console: Console, title: str, entries: Sequence[HelpRow], note: str = "") -> None:
    if not entries:
        return
    room = console.width - 4
    labels = [
        _fold_label(entry.label, math.ceil(console.width * LABELS_SHARE)) for entry in entries
    ]
    wide = max(len(line) for lines in labels for line in lines)
    has_marks = any(entry.is_required for entry in entries)
    console.print(f"╭─ {title} {'─' * (room - len(title) - 1)}╮")
    for line in (note, "") if note else ():
        console.print(f"│ {line:{room}} │")
    for entry, label in zip(entries, labels, strict=True):
        mark = ("* " if entry.is_required else "  ") + " " if has_marks else ""
        used = len(mark) + wide + len(GAP)
        pieces = [(entry.text, ""), (entry.text and " ", ""), (entry.notes, "grey")]
        texts = split_lines([piece for piece in pieces if piece[0]], max(room - used, 1))
        for number in range(max(len(label), len(texts))):
            head = label[number] if number < len(label) else ""
            text = texts[number] if number < len(texts) else []
            rest = room - used - sum(cell_len(words) for words, _ in text)
            console.print(
                "│ ",
                (" " * len(mark) if number else mark, "bold red"),
                (f"{head:{wide}}{GAP}", "cyan"),
                *text,
                f"{' ' * rest} │",
            )
    console.print(f"╰{'─' * (room + 2)}╯")


def _fold_label(label: str, width: int) -> list[str]:
    """Return a label in lines that fit, but for single words; further lines are indented.

    >>> _fold_label("--objective SCORE[=WEIGHT]...", 20)
    ['--objective', '  SCORE[=WEIGHT]...']
    """
    first, *words = label.split()
    lines = [first]
    for word in words:
        if len(lines[-1]) + 1 + len(word) <= width:
            lines[-1] += f" {word}"
        else:
            lines.append(f"{GAP}{word}")
    return lines
