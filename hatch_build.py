"""Builds the library of `src/core` with the package, by the clang inside `ziglang`.

    python hatch_build.py                            # into the checkout, for this machine
    DARE_TARGET=macos-arm64 python -m build --wheel  # a wheel for another

It needs no library of C: one file serves every Linux, and each system can build for the others.
"""

import hashlib
import os
import platform
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

ROOT = Path(__file__).parent
FLAGS = (  # a large frame would have to ask Windows for its pages
    *("-O3", "-std=c11", "-ffp-contract=off", "-fno-stack-protector", "-Wframe-larger-than=4000"),
    *("-ffreestanding", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-Werror"),
)
GPU_HEADERS = (
    "types.h",
    "lane.h",
    "elements.h",
    "digests.h",
    "gpu.h",
    "gpu_digests.h",
)  # compiled where there is a GPU
SYSTEMS = {  # the library's name, and how it is linked
    "linux": ("libdare.so", "-Wl,-z,defs"),
    "macos": ("libdare.dylib", "-Wl,-install_name,@rpath/libdare.dylib"),
    "windows": ("dare.dll",),
}
TARGETS = {  # what zig calls it, and the tag of its wheel
    "linux-x86_64": ("x86_64-linux-gnu", "manylinux_2_17_x86_64.musllinux_1_1_x86_64"),
    "linux-aarch64": ("aarch64-linux-gnu", "manylinux_2_17_aarch64.musllinux_1_1_aarch64"),
    "macos-x86_64": ("x86_64-macos.11.0", "macosx_11_0_x86_64"),
    "macos-arm64": ("aarch64-macos.11.0", "macosx_11_0_arm64"),
    "windows-x86_64": ("x86_64-windows-gnu", "win_amd64"),
}


def host() -> str:
    """Return the name that this machine has in `TARGETS`, or would have."""
    system = {"darwin": "macos", "win32": "windows"}.get(sys.platform, sys.platform)
    machine = platform.machine().lower().replace("amd64", "x86_64")
    return f"{system}-{machine if sys.maxsize > 1 << 32 else '32'}"


def sources_digest() -> str:
    """Return the digest that the library carries; `core.py` computes the same."""
    files = (*sorted((ROOT / "src" / "core").glob("*.[ch]")), Path(__file__))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def build(target: str, folder: Path) -> Path:
    """Compile and link the library for a target, in a folder; return its file."""
    triple, core = TARGETS[target][0], str(ROOT / "src" / "core" / "core.c")
    name, *linking = SYSTEMS[target.partition("-")[0]]
    caches = {f"ZIG_{kind}_CACHE_DIR": str(folder / "cache") for kind in ("LOCAL", "GLOBAL")}

    def zig(*arguments: str) -> None:
        command = [sys.executable, "-m", "ziglang", "cc", "-target", triple, *arguments]
        subprocess.run(command, check=True, env=os.environ | caches, cwd=folder)  # noqa: S603

    parts = {
        f"{level}.o": [f"-DLEVEL={level}", f"-mcpu={triple[:6]}_{level}", core]
        for level in (("v2", "v3", "v4") if triple.startswith("x86_64") else ())
    } or {"any.o": [core]}
    parts["levels.o"] = [f"-DDIGEST={sources_digest()}", core.replace("core.c", "levels.c")]
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # a list, for its exceptions
        list(pool.map(lambda o: zig(*FLAGS, "-c", *parts[o], "-o", o), parts))
    zig("-nostdlib", "-shared", "-s", *linking, *parts, "-o", name)
    return folder / name


def place(library: Path) -> None:
    """Put the library into the checkout, in place of one that may be in use."""
    package = ROOT / "src" / "dare" / "kernels"
    shutil.copy(library, package / "new").replace(package / library.name)


class CustomBuildHook(BuildHookInterface[Any]):
    """Puts the library into a wheel, or into the checkout for an editable one."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build for DARE_TARGET or this machine; no library is made for an unknown machine."""
        target = os.environ.get("DARE_TARGET") or host()
        if self.target_name != "wheel" or (target not in TARGETS and target == host()):
            return
        self.folder = TemporaryDirectory()  # until the wheel is made
        library = build(target, Path(self.folder.name))
        if version == "editable":
            place(library)
        else:
            headers = {ROOT / "src" / "core" / name: f"gpu/{name}" for name in GPU_HEADERS}
            for file, name in {library: library.name, **headers}.items():
                build_data["force_include"][str(file)] = f"dare/kernels/{name}"
        build_data.update(pure_python=False, tag=f"py3-none-{TARGETS[target][1]}")


if __name__ == "__main__":
    with TemporaryDirectory() as made:
        place(build(host(), Path(made)))
