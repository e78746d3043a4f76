"""The command `dare playground`."""

from __future__ import annotations

import json as jsonlib
import os
import shlex
import sys
from pathlib import Path
from typing import Annotated

from dare.cli import DONE, INTERRUPTED, UsageError
from dare.cli.flags import RUN, Debug, Json, RunPath, RunSwitch, print_json
from dare.cli.parsing import Flag
from dare.documents.console import make_console
from dare.documents.page import check_installed
from dare.documents.terminal import print_steps

MOST_PORT = 65535


def playground(
    *folders: Path,
    port: Annotated[int | None, Flag(group=RUN)] = None,
    no_browser: RunSwitch = False,
    build: RunPath = None,
    overwrite: RunSwitch = False,
    json: Json = False,
    debug: Debug = False,
) -> int:
    """Serve the playground.

    :param folders: Folders with your models, and for outputs. [default: this directory]
    :param port: The port; 0 is any free one. [default: 8787, if free]
    :param no_browser: Do not open a browser.
    :param build: Write the page as static files into a folder.
    :param overwrite: Replace files that --build would leave alone.
    """
    if port is not None and not 0 <= port <= MOST_PORT:
        raise UsageError(f"--port {port}: must be from 0 to {MOST_PORT}")
    check_installed("the playground", "web", "starlette", "uvicorn")
    if build is not None:
        return _build(build, overwrite=overwrite, json=json)
    roots = tuple(folder.expanduser().resolve() for folder in folders or (Path(),))
    for root in roots:
        if not root.is_dir():
            raise UsageError(f"{root}: is not a directory; give folders that contain models")

    def announce(address: str) -> None:
        if json:
            print_json(jsonlib.dumps({"address": address, "pid": os.getpid()}))  # on one line
        else:
            steps = {"open": address, "stop": "Ctrl-C"}
            print_steps(make_console(), "The playground is running", steps)
        sys.stdout.flush()

    from dare.web.server import serve

    was_cut = serve(roots, port=port, announce=announce, opens_browser=not no_browser)
    return INTERRUPTED if was_cut else DONE


def _build(folder: Path, *, overwrite: bool, json: bool) -> int:
    from dare.web.assets import write_folder

    written = write_folder(folder, overwrite=overwrite)
    if json:
        print_json({"folder": str(folder), "files": written})
    else:
        command = f"python -m http.server --bind 127.0.0.1 --directory {shlex.quote(str(folder))}"
        print_steps(make_console(), f"Wrote {folder}", {"view": command})
    return DONE
