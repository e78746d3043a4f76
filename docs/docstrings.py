"""Shows the examples in docstrings as code: mkdocstrings reads a bare `>>>` as a quotation."""

from __future__ import annotations

import re
from typing import Any

import griffe

_EXAMPLE = re.compile(r"(?:^|(?<=\n\n))(>>> .*?)(?=\n\n|\Z)", re.S)


def fence_examples(text: str) -> str:
    """Put every paragraph that begins with `>>>` into a code block."""
    return _EXAMPLE.sub(lambda found: f"```pycon\n{found.group(1).rstrip()}\n```", text)


class Examples(griffe.Extension):
    """Does so for every docstring that is loaded."""

    def on_object(self, *, obj: griffe.Object, **_others: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = fence_examples(obj.docstring.value)
