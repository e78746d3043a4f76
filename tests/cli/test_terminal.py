"""Real terminals: what fits on them, the bar that moves, and Ctrl-C."""

from __future__ import annotations

import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pexpect
import pytest
from calling import TO, TWO, dare_succeeds
from rich.cells import cell_len

from dare.cli import COMMANDS, HELP, HELP_TEXTS, MAIN_FLAGS
from dare.documents.console import read_tags
from dare.documents.words import exact_text
from dare.recipe.recipe import Recipe
from dare.stages import ALIASES, STAGES
from helpers import save, sha256

pytestmark = pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # pexpect forks

SCRIPTS = Path(sys.executable).parent
ESCAPE = re.compile(r"\x1b(\[[0-9;?]*[A-Za-z]|\][^\x07]*\x07|[()][0-9A-B])")
COLOUR = re.compile(r"\x1b\[[0-9;]*m")
AMOUNT = re.compile(r"([0-9.]+)/([0-9.]+) MB")


def surroundings(**variables: str) -> dict[str, str]:
    """An environment in which nothing but the terminal says how wide it is and what it can."""
    plain = {"PATH": f"{SCRIPTS}{os.pathsep}{os.environ['PATH']}", "HOME": os.environ["HOME"]}
    return {**plain, "LANG": "C.UTF-8", "TERM": "xterm-256color", **variables}


class Terminal:
    """A command in a terminal of its own, and what it shows there."""

    def __init__(self, command: str, columns: int, **variables: str) -> None:
        self.columns = columns
        self._child = pexpect.spawn(
            "bash",
            ["-c", command],
            dimensions=(50, columns),
            encoding="utf-8",
            codec_errors="replace",  # the terminal may echo ^C amid a character of the bar
            env=surroundings(**variables),
            timeout=60,
        )

    def interrupt(self) -> None:
        self._child.sendintr()

    def finish(self) -> int:
        """Wait for the end; return the status."""
        self._child.expect(pexpect.EOF)
        self.raw = self._child.before
        self._child.close()
        status = self._child.exitstatus
        return -1 if status is None else status

    @property
    def lines(self) -> list[str]:
        """What was shown, line by line, without codes; a line drawn again counts again."""
        return ESCAPE.sub("", self.raw.replace("\r\n", "\n").replace("\r", "\n")).split("\n")

    @property
    def text(self) -> str:
        return "\n".join(line.rstrip() for line in self.lines)


def show(command: str, columns: int, **variables: str) -> Terminal:
    """Run a command that must work; none of its lines may be too long."""
    terminal = Terminal(command, columns, **variables)
    assert terminal.finish() == 0, terminal.text
    assert [line for line in terminal.lines if cell_len(line) > columns] == []
    return terminal


MERGE = " ".join(["dare", *TWO, *TO])

# ---------------------------------------------------------------- width

WIDTHS = pytest.mark.parametrize("columns", [80, 200])


@pytest.fixture
def page(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Call the command in this process, as wide as a terminal would be; all lines must fit."""

    def call(columns: int, *arguments: str) -> str:
        monkeypatch.setattr("dare.documents.console.PIPE_WIDTH", columns)
        monkeypatch.setenv("COLUMNS", str(columns))
        text = dare_succeeds(*arguments).out
        assert [line for line in text.splitlines() if cell_len(line) > columns] == []
        return "\n".join(line.rstrip() for line in text.splitlines())

    return call


@WIDTHS
@pytest.mark.parametrize("command", [(), ("merge",)])
def test_help_fits(command, columns, page):
    text = page(columns, *command, "--help")
    boxes = [line for line in text.splitlines() if line[:1] in ("╭", "│", "╰")]
    assert len(boxes) > 8
    assert {cell_len(line) for line in boxes} == {columns}  # all borders stand in one column
    examples = text.partition("Examples")[2]
    assert re.search(r"\n  dare base\S* math\S* code\S* -o merged", examples)


@pytest.mark.parametrize("command", MAIN_FLAGS)
def test_main_flags_are_on_one_screen_and_the_others_behind_help_all(command, page):
    words = command.split()
    short, whole = (page(80, *words, flag) for flag in ("--help", "--help-all"))
    assert len(short.splitlines()) <= 50
    flags = [set(re.findall(r"│ (?:\* )? *(--[a-z-]+)", text)) for text in (short, whole)]
    assert flags[0] <= flags[1]
    if MAIN_FLAGS[command]:
        assert f"dare {command} --help-all" in short
        assert len(flags[0]) < len(flags[1]) - 20


@pytest.mark.parametrize("command", [*COMMANDS, *HELP["subcommands"]])
def test_help_breaks_no_line_of_its_text(command, page):
    shown = page(80, *command.split(), "--help").splitlines()
    assert shown[0].startswith(f"Usage: dare {command}")
    text = "".join(text for text, _ in read_tags(HELP_TEXTS[command]))
    assert [line for line in text.strip().splitlines() if line not in shown] == []


def test_help_is_a_screen_and_a_half(page):
    text = page(80, "--help")
    assert len(text.splitlines()) <= 66
    flags = text[: text.index("╭")]
    fields = {"base", "models", "output", "method", "seed"}
    for name in (*fields, "drop-rate", "weight", "overwrite", "quiet"):
        assert f"\n  --{name}" in flags
    for name in ("method", "seed"):
        assert f"({Recipe.fields()[name].default})\n" in flags
    assert f"({STAGES['dare'].parameters['drop_rate'].default})\n" in flags
    commands = [line[2:].split()[0] for line in text.splitlines() if line.startswith("│ ")]
    assert sorted(commands) == sorted(COMMANDS)  # each in one line


@WIDTHS
def test_the_methods_fit_and_no_name_is_cut(columns, page):
    text = page(columns, "methods")
    headers = [line.split() for line in text.splitlines() if line.startswith(" stage")]
    assert headers == [["stage", "does", "parameters", "paper"]] * 3
    for stage in STAGES.values():
        assert f"\n {stage.name} " in text
        assert stage.paper in text
        for name, parameter in stage.parameters.items():
            assert f" {name}={exact_text(parameter.default)}" in " ".join(text.split())
    for alias, chain in ALIASES.items():
        assert f"{alias} {chain}" in " ".join(text.split())


@WIDTHS
def test_a_plan_fits_even_with_long_paths(columns, page):
    place = "a-rather-long-name-for-a-folder/" * 6 + "merged.safetensors"
    text = page(columns, "plan", *TWO, "-o", place, "--method", "dare+trim+ties")
    assert place in "".join(text.split())


@WIDTHS
def test_a_merge_fits_from_plan_to_report(columns, folder):
    terminal = show(f"{MERGE} --delta-threshold 0.0001", columns)
    assert COLOUR.search(terminal.raw)
    rows = [line.split() for line in terminal.lines]
    header = "model weight drop rate dropped changes over 0.0001 largest change in tensor"
    if columns >= 100:
        assert header.split() in rows
    else:  # headers of numbers may take two lines
        last = next(row for row in rows if row[:2] == ["model", "weight"])
        assert [word for word in ("rate", "dropped", "0.0001", "change") if word not in last] == []
    assert terminal.text.count("Warning  large deltas") == 1
    assert "  verify  dare verify merged.safetensors\n" in terminal.text
    assert "  repeat  dare merged.safetensors --output OTHER\n" in terminal.text
    bars = [line for line in terminal.lines if line.startswith("merging ━")]
    assert "39.9/39.9 kB" in bars[-1]


# ---------------------------------------------------------------- colour


@pytest.mark.parametrize("command", [("--help",), ("methods",), (*TWO, *TO)])
def test_a_pipe_gets_no_codes_at_all(command, folder):
    outcome = dare_succeeds(*command)
    assert "\x1b" not in outcome.out + outcome.err
    assert "\r" not in outcome.out + outcome.err
    assert outcome.out


def test_a_bar_and_colours_are_for_those_who_look(folder):
    colours = set(COLOUR.findall(show(f"{MERGE} --delta-threshold 0", 80, NO_COLOR="1").raw))
    assert colours <= {"\x1b[0m", "\x1b[1m", "\x1b[2m"}  # plain, bold, faint
    assert "merging" not in show(f"{MERGE} --overwrite 2>/dev/null", 80).raw
    assert show(f"{MERGE} --overwrite --quiet", 80).text == ""


# ---------------------------------------------------------------- a merge that takes a while


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Three models of 67 MB each, in a folder that is removed at the end."""
    folder = tmp_path_factory.mktemp("large")
    row = 0.02 * np.random.default_rng(0).standard_normal((1024, 1024), np.float32)
    base = {f"layers.{number}.mlp.weight": row for number in range(16)}
    save(folder / "base.safetensors", base)
    for name, change in (("math", 0.0005), ("code", -0.0004)):
        tuned = row + np.float32(change) * row[::-1] / np.float32(0.02)
        save(folder / f"{name}.safetensors", dict.fromkeys(base, tuned))
    yield folder
    shutil.rmtree(folder)


def pieces(partial: Path) -> int:
    """How many pieces of a merge the journal speaks of."""
    try:
        return (partial / "journal.jsonl").read_bytes().count(b'"tensor"')
    except FileNotFoundError:
        return 0


def interrupt_a_merge(command: str, output: Path) -> Terminal:
    """Press Ctrl-C when some pieces are done and others are not."""
    partial = output.with_name(f"{output.name}.partial")
    terminal = Terminal(command, 100)
    deadline = time.monotonic() + 30
    while pieces(partial) < 4 and time.monotonic() < deadline:
        time.sleep(0.001)
    terminal.interrupt()
    status = terminal.finish()
    assert status == 130, terminal.text
    return terminal


def test_the_bar_moves(large, monkeypatch):
    monkeypatch.chdir(large)
    terminal = show(
        "dare -b base.safetensors -m math.safetensors code.safetensors "
        "-o moving.safetensors --threads 1",
        100,
    )
    Path("moving.safetensors").unlink()
    amounts = [float(done) for done, _ in AMOUNT.findall(terminal.text)]
    totals = {total for _, total in AMOUNT.findall(terminal.text)}
    assert totals == {"201.3"}
    assert amounts == sorted(amounts)
    assert amounts[0] == 0
    assert amounts[-1] == 201.3
    assert len(set(amounts)) > 2


def test_ctrl_c_says_how_to_go_on_and_that_gives_the_same_bytes(large, monkeypatch):
    monkeypatch.chdir(large)
    dare_succeeds(*TWO, "-o", "whole.safetensors", "--quiet")
    output = large / "my merge.safetensors"
    command = (
        "dare -b base.safetensors -m math.safetensors code.safetensors "
        "-o 'my merge.safetensors' --threads 1 --no-resume"
    )
    terminal = interrupt_a_merge(command, output)
    assert not output.exists()
    assert "Traceback" not in terminal.text
    said, _, after = terminal.text.partition("dare: interrupted; to resume, run\n")
    assert said
    (way_on,) = after.strip().splitlines()
    assert way_on == command.removesuffix(" --no-resume")

    partial = large / "my merge.safetensors.partial"
    left = pieces(partial)
    assert 4 <= left < 32
    resumed = show(way_on, 100)
    assert f"{left} chunks reused from the interrupted run" in resumed.text
    first = next(float(done) for done, _ in AMOUNT.findall(resumed.text) if float(done))
    assert first >= round(left * 201.3 / 32, 1) - 0.1
    assert sha256(output) == sha256(large / "whole.safetensors")
    assert not partial.exists()
