"""The demonstration: three small models that were really trained, merged, and scored.

    from rich.console import Console

    run_demo(Console())

The models are in `models`, what they can do is in `tasks`, and `training/` in the repository made
them.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from dare.demo.results import DemoResult


def run_demo(
    console: Console,
    *,
    output: Path | None = None,
    quick: bool = False,
) -> DemoResult:
    """Merge the three fine-tunes in several ways, show what the merges can do, return the numbers.

    With `output`, the merged models and a picture are left in that folder. `quick` takes few
    prompts, rates and seeds.
    """
    from dare.demo.story import FULL, QUICK, tell

    return tell(console, QUICK if quick else FULL, output)
