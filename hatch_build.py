"""Builds the library of `src/core` with the package, by the clang inside `ziglang`.

    python hatch_build.py               # for this machine, into the checkout (make core)
"""

from __future__ import annotations

import platform
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent
SOURCES = ROOT / "src" / "core"
TARGET = ROOT / "src" / "dare" / "kernels" / "libdare.so"
FLAGS = (
    *("-O3", "-std=c11", "-ffp-contract=off", "-fno-sanitize=undefined", "-fno-stack-protector"),
    *("-ffreestanding", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-Werror"),
)
LEVELS = {"x86_64": ("v2", "v3", "v4"), "aarch64": ("any",)}


def build(machine: str = platform.machine()) -> None:
    zig = [sys.executable, "-m", "ziglang", "cc", "-target", f"{machine}-linux-gnu", *FLAGS]
    with tempfile.TemporaryDirectory() as folder:
        made = []
        for level in LEVELS[machine]:
            cpu = f"x86_64_{level}" if level != "any" else "generic"
            made.append(f"{folder}/{level}.o")
            source = [f"-DLEVEL={level}", f"-mcpu={cpu}", "-c", str(SOURCES / "core.c")]
            subprocess.run([*zig, *source, "-o", made[-1]], check=True)
        made.append(f"{folder}/levels.o")
        subprocess.run([*zig, "-c", str(SOURCES / "levels.c"), "-o", made[-1]], check=True)
        link = ["-nostdlib", "-shared", "-s", "-Wl,-z,defs", *made]
        subprocess.run([*zig, *link, "-o", str(TARGET)], check=True)


if __name__ == "__main__":
    build()
