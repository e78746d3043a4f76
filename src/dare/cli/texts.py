"""The help of each command, from `help.toml`; read before anything heavy is imported."""

from __future__ import annotations

import tomllib
from importlib.resources import files
from typing import Any

_HELP: dict[str, Any] = tomllib.loads(files("dare.cli").joinpath("help.toml").read_text("utf-8"))
SUMMARY: str = _HELP["summary"]
USAGE: str = _HELP["usage"]
EXAMPLES: str = _HELP["examples"]
GROUPS: dict[str, list[str]] = _HELP["groups"]
COMMANDS: dict[str, str] = _HELP["commands"]
"""Each command's help; the first line is what the list of commands shows."""
SUBCOMMANDS: dict[str, str] = _HELP["subcommands"]
