"""Models in other forms than plain safetensors, presented as sources.

Each form is a module with a class that has the methods of `dare.io.sources.Source` and computes
what it presents as it is read: any byte range of a tensor, from any thread, the same bytes
whatever the range. Optional packages are imported where they are used.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dare.formats import lora
from dare.io.sources import Source, open_source

MAX_CONFIG_BYTES = 10_000_000


def open_model(path: Path) -> Source:
    """Read the headers of a model, whatever form it has."""
    if lora.looks_like(path):
        return lora.open_adapter(path)
    return open_source(path)


def read_config(path: Path) -> Mapping[str, Any]:
    """What the `config.json` of a model directory says; nothing where there is none."""
    folder = path if path.is_dir() else path.parent
    try:
        with (folder / "config.json").open("rb") as file:
            config = json.loads(file.read(MAX_CONFIG_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return config if isinstance(config, dict) else {}
