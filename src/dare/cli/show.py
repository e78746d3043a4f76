"""Results on the screen: a document for people, JSON for programs."""

from __future__ import annotations

import json as jsonlib
from typing import Any, Protocol

from rich.console import Console

from dare.cli import DONE
from dare.documents.document import Document
from dare.documents.terminal import make_console, print_document, print_steps
from dare.tensors.header import printable_json

console, document, next_steps = make_console, print_document, print_steps


class Result(Protocol):
    """Anything that a command ends with; most have a method `to_json` too."""

    def document(self) -> Document:
        """Return everything that is to be shown."""
        ...


def result(to: Console, found: Result, *, as_json: bool) -> int:
    """Show a result to people, and if it is asked for, to programs; return the exit status."""
    document(to, found.document())
    if as_json and hasattr(found, "to_json"):
        json(found.to_json())
    return DONE


def json(values: Any) -> None:
    """Write values, or a text of JSON, to stdout in letters that leave a terminal alone."""
    text = values
    if not isinstance(values, str):
        text = jsonlib.dumps(values, indent=2, ensure_ascii=False)
    print(printable_json(text))
