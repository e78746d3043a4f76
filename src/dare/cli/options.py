"""Flags that many commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from dare.cli.flags import METHOD, OUTPUT, RUN

StageFiles = Annotated[
    list[Path] | None,
    Parameter(
        name="--stage",
        metavar="FILE",
        negative="",
        group=METHOD,
        help="A Python file that registers a stage of your own. It is run: trust it first.",
    ),
]
Verbose = Annotated[
    bool,
    Parameter(
        name=["--verbose", "-v"],
        negative="",
        show_default=False,
        group=OUTPUT,
        help="Show plan, progress and report, even if the recipe says otherwise.",
    ),
]
Quiet = Annotated[
    bool,
    Parameter(
        name=["--quiet", "-q"],
        negative="",
        show_default=False,
        group=OUTPUT,
        help="Show errors only.",
    ),
]
Json = Annotated[
    bool,
    Parameter(
        negative="",
        show_default=False,
        group=OUTPUT,
        help="One JSON document on stdout; everything else goes to stderr.",
    ),
]
Debug = Annotated[
    bool,
    Parameter(
        negative="",
        show_default=False,
        group=OUTPUT,
        help="With an error, show where it came from.",
    ),
]
Overwrite = Annotated[
    bool,
    Parameter(negative="", show_default=False, group=RUN, help="Replace an existing output."),
]
