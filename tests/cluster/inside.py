"""Run the tests in this folder on a machine of their own: nothing in it reaches another.

Ray listens on every address there is. So the tests run in a network namespace in which there is
nothing but loopback, and in a process namespace that ends with them. This takes no privilege where
the system lets users have namespaces.

    python tests/cluster/inside.py [arguments for pytest]
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
NAMESPACES = ["unshare", "--map-root-user", "--mount", "--net", "--pid", "--fork", "--kill-child"]
COMMAND = [*NAMESPACES, "--mount-proc", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]


def why_not() -> str | None:
    """Why this machine cannot have such a machine in it, if that is so."""
    for program in ("unshare", "ip"):
        if shutil.which(program) is None:
            return f"there is no {program}"
    tried = subprocess.run([*COMMAND, "true"], capture_output=True, text=True, check=False)
    return tried.stderr.strip() or "namespaces are not allowed" if tried.returncode else None


def command(*arguments: str) -> list[str]:
    """The tests in this folder, as a command."""
    return [*COMMAND, sys.executable, "-m", "pytest", "--quiet", str(HERE), *arguments]


if __name__ == "__main__":
    if reason := why_not():
        sys.exit(f"the tests of clusters need namespaces: {reason}")
    whole = command(*sys.argv[1:])
    os.execvp(whole[0], whole)
