"""Look into wheels: does each have its platform's library, with every entry, that needs nothing?

python bench/check_wheels.py dist/*.whl
"""

import re
import struct
import sys
import zipfile
from pathlib import Path

CORE = Path(__file__).parents[1] / "src" / "core"
ENTRY = re.compile(r"^ENTRY\([^,]+, (\w+)\)", re.MULTILINE)
NAMES = {name for file in CORE.glob("*.h") for name in ENTRY.findall(file.read_text("utf-8"))}


def text_at(data: bytes, place: int) -> str:
    return data[place : data.index(b"\0", place)].decode()


def mach_o(data: bytes) -> tuple[set[str], list[str]]:
    """Return what a library exports, and which others it needs."""
    place, exported, needed = 32, set(), []
    for _ in range(struct.unpack_from("<I", data, 16)[0]):
        command, size, *rest = struct.unpack_from("<6I", data, place)
        if command == 2:  # the table of symbols: those that are defined here, and external
            found = struct.iter_unpack("<IBBHQ", data[rest[0] : rest[0] + 16 * rest[1]])
            names = {text_at(data, rest[2] + s[0])[1:] for s in found if s[1] & 0x1F == 0x0F}
            exported = {name for name in names if name.startswith("dare_")}
        needed += [text_at(data, place + rest[0])] if command == 12 else []
        place += size
    return exported, needed


def pe(data: bytes) -> tuple[set[str], list[str]]:
    header = struct.unpack_from("<I", data, 60)[0]
    count, size = struct.unpack_from("<H12xH", data, header + 6)
    exports, _, imports = struct.unpack_from("<3I", data, header + 24 + 112)
    rows = [struct.unpack_from("<4I", data, header + 32 + size + 40 * i) for i in range(count)]

    def at(address: int) -> int:
        return next(address - row[1] + row[3] for row in rows if 0 <= address - row[1] < row[0])

    number, names = struct.unpack_from("<I4xI", data, at(exports) + 24)
    found = struct.unpack_from(f"<{number}I", data, at(names))
    return {text_at(data, at(name)) for name in found}, ["a library"] if imports else []


for wheel in map(Path, sys.argv[1:]):
    tag = wheel.stem.split("-", 4)[-1]
    read, name = (mach_o, "libdare.dylib") if "macosx" in tag else (pe, "dare.dll")
    exported, needed = read(zipfile.ZipFile(wheel).read(f"dare/kernels/{name}"))
    levels = ("any",) if tag.endswith("arm64") else ("v2", "v3", "v4")
    wanted = {f"dare_{entry}_{level}" for entry in NAMES for level in levels}
    wrong = exported ^ wanted ^ {"dare_levels", "dare_sources"}
    if wrong or needed not in ([], ["/usr/lib/libSystem.B.dylib"]):
        sys.exit(
            f"{wheel.name}: {name} has too much or too little: {sorted(wrong)}; needs {needed}"
        )
    print(f"{wheel.name}: {name} has all {len(exported)} functions; needs {needed or 'nothing'}")
