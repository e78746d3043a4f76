"""What this machine has, and whether it is enough."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from dare.documents.words import show_size
from dare.errors import RecipeError
from dare.recipe.schema import DEFAULT_MEMORY

CGROUPS = (
    ("sys/fs/cgroup", "memory.max", "memory.current", ""),
    ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
)
"""Of either version: its folder, a limit, what is taken of it, and how counts are prefixed."""


def available_cores() -> int:
    """How many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def available_memory(root: Path = Path("/")) -> int | None:
    """Return the bytes that this process can still take, within the limits of its container.

    What only holds copies of files counts as free. macOS says what there is in all, and Windows
    nothing (None).
    """
    found = list(_cgroup_memory(root))
    with suppress(OSError, ValueError, LookupError):
        lines = (root / "proc/meminfo").read_text().splitlines()
        found.append(1024 * int(dict(line.split(":") for line in lines)["MemAvailable"].split()[0]))
    if not found and hasattr(os, "sysconf"):
        with suppress(OSError, ValueError):
            found.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return max(0, min(found)) if found else None


def _cgroup_memory(root: Path) -> Iterator[int]:
    """What is left of each limit that holds for this process."""
    with suppress(OSError, ValueError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "memory" not in controllers.split(","):
                continue
            top, most, taken, prefix = CGROUPS[bool(controllers)]
            inside = root / top / path.lstrip("/")
            for folder in (inside, *inside.parents):
                if folder.is_relative_to(root / top):
                    with suppress(
                        OSError, ValueError
                    ):  # where there is no limit, that is no number
                        limit = int((folder / most).read_text())
                        lines = (folder / "memory.stat").read_text().splitlines()
                        counts = {name: int(count) for name, count in map(str.split, lines)}
                        kinds = (f"{prefix}active_file", f"{prefix}inactive_file")
                        files = sum(counts.get(kind, 0) for kind in kinds)
                        yield limit - int((folder / taken).read_text()) + files


def memory_limit(given: int | None, needed: int) -> int:
    """Return what buffers may take: as given; else 1 GiB, or more if one thread needs more."""
    return max(DEFAULT_MEMORY, needed) if given is None else given


def check_memory(given: int | None, needed: int, reason: str = "") -> None:
    """Refuse a need that is beyond what the user gives, or by default beyond what is free."""
    if given is not None and needed > given:
        raise RecipeError(
            f"max_memory = {given}: one thread needs {needed} bytes; "
            f"allow at least {-(-needed // 1000) / 1000:.3f} MB"
        )
    if given is None and needed > DEFAULT_MEMORY:
        free = available_memory()
        if free is not None and needed > free:
            raise RecipeError(
                f"memory: one thread needs {show_size(needed)}{reason and f' ({reason})'}, and "
                f"this machine has {show_size(free)} free; end other programs, use a machine with "
                "more, or a method that works on single elements, such as dare+linear; "
                f"max_memory = {needed} tries it all the same"
            )
