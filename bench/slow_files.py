"""How well reading hides a file system's delay: merges from files that answer late (root, Linux).

    cc -O2 -Wall bench/slow_files.c -o slow_files $(pkg-config --cflags --libs fuse3)
    python bench/models.py bench/data --parameters 0.05e9 --models 3
    python bench/slow_files.py slow_files bench/data/llama-50m --output /dev/shm

Each row mounts the folder with another delay. Before every run, the kernel forgets what it has read
of these files. Beside the merge stand `cat`, many readers at once, which shows what the file
system can give, and one thread that only asks and reads. Seconds of a merge are those of its
report: Python has started already.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import dare
from dare.inputs.sources import open_source, read_chunks

PIECE = 1 << 20
READERS = 64
METHODS = ("dare+linear", "trim+ties")


@contextmanager
def mounted(program: Path, folder: Path, delay: float, in_flight: int) -> Iterator[Path]:
    """The folder behind a delay of so many milliseconds."""
    with tempfile.TemporaryDirectory() as place:
        environment = {"FOLDER": str(folder), "DELAY_MS": str(delay), "IN_FLIGHT": str(in_flight)}
        command = [program.resolve(), "-f", place, "-o", "max_threads=512"]
        server = subprocess.Popen(command, env={**os.environ, **environment})
        try:
            while not os.path.ismount(place):
                time.sleep(0.01)
            yield Path(place)
        finally:
            subprocess.run(["fusermount3", "-u", place], check=True)
            server.wait()


def forget(files: Sequence[Path]) -> None:
    """Have the kernel read the files anew."""
    for file in files:
        opened = os.open(file, os.O_RDONLY)
        os.posix_fadvise(opened, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(opened)


def read_in_order(files: Sequence[Path]) -> float:
    started = time.perf_counter()
    subprocess.run(["cat", *files], stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - started


def read_at_once(files: Sequence[Path]) -> float:
    started = time.perf_counter()
    opened = [os.open(file, os.O_RDONLY) for file in files]
    places = [
        (descriptor, start)
        for start in range(0, max(os.fstat(d).st_size for d in opened), PIECE)
        for descriptor in opened
    ]
    with ThreadPoolExecutor(READERS) as pool:
        list(pool.map(lambda place: os.pread(place[0], PIECE, place[1]), places))
    for descriptor in opened:
        os.close(descriptor)
    return time.perf_counter() - started


def read_asked(files: Sequence[Path]) -> float:
    """One thread that reads what it has asked for a little before, as a merge does."""
    started = time.perf_counter()
    with ExitStack() as stack:
        sources = [stack.enter_context(open_source(file)) for file in files]
        for name in sources[0].tensors:
            for _ in read_chunks(sources, name):
                pass
    return time.perf_counter() - started


def merge(folders: Sequence[Path], method: str, output: Path) -> float:
    base, *models = folders
    recipe = dare.Request.of(base=base, models=models, method=method, output=output, verbose=False)
    return dare.merge(recipe, overwrite=True).seconds


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Measure merges from files that answer late.")
    parser.add_argument("program", type=Path, help="slow_files, compiled")
    parser.add_argument("folder", type=Path, help="models, base first by name")
    parser.add_argument("--output", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--delays", type=float, nargs="+", default=[0, 1, 5, 20])
    parser.add_argument("--in-flight", type=int, default=64)
    parser.add_argument("--read-ahead-kb", type=int, default=128)
    parser.add_argument("--only-merges", action="store_true")
    given = parser.parse_args(arguments)
    output = given.output / "slow-files-merged.safetensors"
    names = sorted(path.name for path in given.folder.iterdir())
    for method in METHODS:  # so that Python's modules are loaded
        merge([given.folder / name for name in names], method, output)
    columns = [f"{name:>11}" for name in ("cat", "at once", "asked", *METHODS)]
    print(f"{'ms':>5} {'MB':>5}", *(columns[3:] if given.only_merges else columns))
    for delay in given.delays:
        with mounted(given.program, given.folder, delay, given.in_flight) as place:
            device = place.stat().st_dev
            bdi = Path(f"/sys/class/bdi/{os.major(device)}:{os.minor(device)}")
            (bdi / "read_ahead_kb").write_text(str(given.read_ahead_kb))
            folders = [place / name for name in names]
            files = [folder / "model.safetensors" for folder in folders]
            seconds = []
            for read in () if given.only_merges else (read_in_order, read_at_once, read_asked):
                forget(files)
                seconds.append(read(files))
            for method in METHODS:
                forget(files)
                seconds.append(merge(folders, method, output))
            megabytes = sum(file.stat().st_size for file in files) / 1e6
        print(f"{delay:5g} {megabytes:5.0f}", *(f"{s:9.2f} s" for s in seconds), flush=True)
    output.unlink()


if __name__ == "__main__":
    main()
