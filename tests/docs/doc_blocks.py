"""The code blocks of a Markdown page, and how each kind is run.

A page's blocks run from top to bottom in one folder, as a reader would run them, and share one
Python namespace. How a block is run depends on its language:

- `python` is executed; with `>>>` in it, it is a doctest. If its first line is a comment that names
  a file (`# score.py`) it is written there instead, before anything on the page is run.
- `bash` is run as a script that stops at the first failure.
- `console` is commands after `$ ` and what they print (stdout and stderr); both are compared.
  In both, a plain call of `dare` is made in this process, which is many times faster; whatever
  needs a shell (pipes, loops, other programs) gets one.
- `toml` must be a valid recipe. If its first line is a comment that names a file (`# recipe.toml`)
  it is written there before anything on the page is run.
- `text` and `json` are not run; they are compared with what the block before them printed.

`...` in expected output stands for any text. A comment before a block says what is special:

- `<!-- not run: why -->` leaves it alone; the reason is required.
- `<!-- needs: torch -->` leaves it alone where a module is missing.
- `<!-- exit: 1 -->` says how the last command of a block ends.
- `<!-- part of a recipe -->` allows TOML that names no files.
- `<!-- run by: tests/… -->` names the test that runs it.
"""

from __future__ import annotations

import contextlib
import doctest
import importlib.util
import io
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from markdown_it import MarkdownIt

from dare.cli import main
from dare.recipe.document import request_from_document

ROOT = Path(__file__).parents[2]
TIMEOUT_SECONDS = 120

_MARK = re.compile(r"<!--\s*(not run|needs|exit|part of a recipe|run by)(?::\s*(.*?))?\s*-->", re.S)
_PLAIN = re.compile(r"[^|;&$<()]*")
"""A command that shares nothing with the next."""
_DARE = re.compile(r"dare (?P<words>[^|;&$<>()*]*)(> (?P<file>\S+))?")
"""A call of our own that needs no shell."""
LOOKS = {"NO_COLOR": "1", "COLUMNS": "100"}
_FILE_NAME = re.compile(r"#\s*(\S+\.(?:toml|py))\s*$")


@dataclass(frozen=True)
class Block:
    """A code block: where it is, what it says, what was said about it."""

    page: Path
    line: int
    language: str
    text: str
    marks: dict[str, str]

    @property
    def where(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def file_name(self) -> str | None:
        """The file that the block's first line says it is."""
        found = _FILE_NAME.match(self.text.partition("\n")[0])
        return found.group(1) if found else None

    @property
    def is_left_alone(self) -> bool:
        return "not run" in self.marks or "run by" in self.marks


def find_blocks(page: Path) -> list[Block]:
    """Every code block of a page, fenced or indented, also inside lists and quotations."""
    found = []
    marks: dict[str, str] = {}
    for token in MarkdownIt().parse(page.read_text("utf-8")):
        if token.type in ("fence", "code_block"):
            assert token.map is not None
            words = token.info.split()
            language = words[0].lower() if words else ""
            found.append(Block(page, token.map[0] + 1, language, token.content, marks))
            marks = {}
        elif token.type == "html_block":
            marks |= {name: reason or "" for name, reason in _MARK.findall(token.content)}
        elif token.type in ("paragraph_open", "heading_open"):
            marks = {}
    return found


class Session:
    """What the blocks of a page share."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.printed = ""
        """What the last block printed."""
        self._names: dict[str, Any] = {"__name__": "__main__"}

    def write_files(self, blocks: list[Block]) -> None:
        for block in blocks:
            is_file = block.language in ("toml", "python") and block.file_name
            if is_file and not block.is_left_alone:
                (self.folder / block.file_name).write_text(block.text, "utf-8")

    def run(self, block: Block) -> None:
        """Run a block, or fail."""
        if block.is_left_alone:
            return
        needed = block.marks.get("needs")
        if needed and importlib.util.find_spec(needed) is None:
            return
        getattr(self, f"_run_{block.language or 'unmarked'}", self._run_unmarked)(block)

    def _run_unmarked(self, block: Block) -> None:
        language = block.language or "no language"
        raise AssertionError(f"{block.where}: {language}: not run, and nothing says why")

    def _run_python(self, block: Block) -> None:
        if block.file_name:
            return
        with self._capturing():
            if ">>>" in block.text:
                self._run_doctest(block)
            else:
                code = compile("\n" * block.line + block.text, str(block.page), "exec")
                exec(code, self._names)

    def _run_doctest(self, block: Block) -> None:
        options = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
        parsed = doctest.DocTestParser().get_doctest(
            block.text, self._names, block.where, str(block.page), block.line
        )
        problems: list[str] = []
        runner = doctest.DocTestRunner(optionflags=options)
        runner.run(parsed, out=problems.append, clear_globs=False)
        self._names.update(parsed.globs)
        assert not problems, "".join(problems)

    @contextlib.contextmanager
    def _capturing(self) -> Iterator[None]:
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            yield
        self.printed = out.getvalue()

    def _run_toml(self, block: Block) -> None:
        document = tomllib.loads(block.text)
        if "part of a recipe" in block.marks:
            document = _completed(document)
        request_from_document(document, block.where)

    def _run_bash(self, block: Block) -> None:
        self.printed = said = ""
        for command in _commands(block.text):
            done = self._run_command(command)
            self.printed += done.stdout
            said += done.stdout + done.stderr
            if done.returncode:
                break
        self._check_exit(block, done.returncode, said)

    def _run_console(self, block: Block) -> None:
        commands = re.split(r"^\$ ", block.text, flags=re.M)
        assert commands[0].strip() == "", f"{block.where}: begins with something else than `$ `"
        for number, command in enumerate(commands[1:], start=2):
            line, expected = _split_command(command)
            done = self._run_command(line, errors_too=True)
            self.printed = done.stdout
            assert_matches(expected, done.stdout, block.where)
            if number == len(commands):
                self._check_exit(block, done.returncode, done.stdout)
            else:
                assert done.returncode == 0, f"{block.where}: {line}: {done.stdout}"

    def _check_exit(self, block: Block, status: int, said: str) -> None:
        expected = int(block.marks.get("exit", "0"))
        assert status == expected, f"{block.where}: exit {status}\n{said}"

    def _run_command(
        self, text: str, *, errors_too: bool = False
    ) -> subprocess.CompletedProcess[str]:
        call = _DARE.fullmatch(text)
        if call is None:
            return self._shell(text, errors_too=errors_too)
        words = shlex.split(call["words"].replace("\\\n", " "), comments=True)
        out, err = io.StringIO(), io.StringIO()
        with (
            contextlib.chdir(self.folder),
            mock.patch.dict(os.environ, LOOKS),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(out if errors_too else err),
        ):
            status = main(words)
        if call["file"]:
            (self.folder / call["file"]).write_text(out.getvalue(), "utf-8")
            out = io.StringIO()
        return subprocess.CompletedProcess(words, status, out.getvalue(), err.getvalue())

    def _shell(self, text: str, *, errors_too: bool) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", "-euo", "pipefail", "-c", text],
            cwd=self.folder,
            env={**os.environ, "PATH": _path(), **LOOKS},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT if errors_too else subprocess.PIPE,
            text=True,
            timeout=TIMEOUT_SECONDS,
            check=False,
        )

    def _run_text(self, block: Block) -> None:
        assert_matches(block.text, self.printed, block.where)

    _run_json = _run_text


def _completed(document: dict[str, Any]) -> dict[str, Any]:
    """A part of a recipe with the files that it does not name, in its form."""
    if isinstance(document.get("models"), dict):
        files = {"base_file": "base.safetensors", "merge_files": ["a.safetensors", "b"]}
        return {**document, "models": files | document["models"]}
    return {"base": "base.safetensors", "models": ["a.safetensors", "b"], **document}


def _commands(script: str) -> list[str]:
    """The commands of a script, one by one; all of it at once if they need a shell together."""
    lines = re.split(r"(?<!\\)\n", script.strip())
    return lines if all(map(_PLAIN.fullmatch, lines)) else [script]


def _split_command(command: str) -> tuple[str, str]:
    """Split a command, continued over lines by backslashes, from what it prints."""
    lines = command.splitlines()
    end = next(index for index, line in enumerate(lines) if not line.endswith("\\"))
    return "\n".join(lines[: end + 1]), "\n".join(lines[end + 1 :])


def _path() -> str:
    """PATH with the programs of this environment first."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])


def assert_matches(expected: str, found: str, where: str) -> None:
    """Compare but for `...`, which stands for any text, and for space at the ends of lines."""
    wanted, got = (
        "\n".join(map(str.rstrip, text.strip().splitlines())) for text in (expected, found)
    )
    pattern = ".*?".join(map(re.escape, wanted.split("...")))
    assert re.fullmatch(pattern, got, re.S), f"{where}: expected\n{wanted}\n\nfound\n{got}"
