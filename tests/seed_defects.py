"""Seed the defects of `defects.toml`, one at a time, and see whether the tests find them.

    python tests/seed_defects.py                 # all of them; takes a while
    python tests/seed_defects.py --only karcher  # those with a word in their name
    python tests/seed_defects.py --processes 16

Each defect is put into a copy of the package, and the tests of the folders it names run against
that copy until one of them fails.
"""

import argparse
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent
PACKAGE = TESTS.parent / "src" / "dare"
LIMIT_SECONDS = 900


def seed(defect: dict[str, Any], sources: Path) -> None:
    """Put a defect into a copy of the package; its text must stand there once."""
    holding = [f for f in sources.rglob("*.py") if defect["old"] in f.read_text(encoding="utf-8")]
    if len(holding) != 1:
        raise SystemExit(f"{defect['name']}: its text stands in {len(holding)} modules, not in one")
    text = holding[0].read_text(encoding="utf-8")
    if text.count(defect["old"]) != 1:
        raise SystemExit(f"{defect['name']}: its text stands more than once in {holding[0]}")
    holding[0].write_text(text.replace(defect["old"], defect["new"]), encoding="utf-8")


def find(defect: dict[str, Any]) -> str:
    """Return the test that fails with a defect; nothing if all pass."""
    with tempfile.TemporaryDirectory() as folder:
        sources = Path(folder, "sources")
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(PACKAGE, sources / PACKAGE.name, ignore=ignored)
        seed(defect, sources)
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
        command += ["--no-header", f"--basetemp={folder}/pytest"]
        command += [str(TESTS / name) for name in defect["where"]]
        path = os.pathsep.join(filter(None, [str(sources), os.environ.get("PYTHONPATH")]))
        environment = {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
        try:
            done = subprocess.run(
                command,
                env=environment,
                cwd=TESTS.parent,
                capture_output=True,
                text=True,
                timeout=LIMIT_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return f"stopped after {LIMIT_SECONDS} s"
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    if done.returncode not in (0, 1) or (done.returncode and not failed):
        raise SystemExit(f"{defect['name']}: pytest did not run\n{done.stdout[-2000:]}")
    return failed[0].partition(" - ")[0] if failed else ""


def main() -> int:
    """Print what finds each defect; return 1 if one is not found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="defects with this in their name")
    parser.add_argument("--processes", type=int, default=2)
    arguments = parser.parse_args()
    defects = tomllib.loads((TESTS / "defects.toml").read_text(encoding="utf-8"))["defect"]
    chosen = [defect for defect in defects if arguments.only in defect["name"]]

    def report(defect: dict[str, Any]) -> bool:
        started = time.perf_counter()
        found = find(defect)
        seconds = time.perf_counter() - started
        print(f"{found or 'NOT FOUND'} ({seconds:.0f} s): {defect['name']}", flush=True)
        return bool(found)

    cores = queue.SimpleQueue[int]()
    for number in range(arguments.processes):
        cores.put(number % (os.cpu_count() or 1))

    def pin() -> None:
        if sys.platform == "linux":  # else each run would have as many threads as there are cores
            os.sched_setaffinity(0, {cores.get()})

    with ThreadPoolExecutor(arguments.processes, initializer=pin) as pool:
        results = list(pool.map(report, chosen))
    print(f"{sum(results)} of {len(results)} found")
    return int(not all(results))


if __name__ == "__main__":
    sys.exit(main())
