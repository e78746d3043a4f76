"""Run programs in turns, each as a process of its own, and say what they took (Linux).

- Wall time runs from before the process is started until it has been waited for.
- CPU time and peak memory are what the kernel has counted for that process (and any child that it
  has waited for itself), by wait4.
- Peak memory is resident memory, in which pages of memory-mapped files count. What the process
  really owns is its anonymous memory: its peak is sampled while the process runs.

A new process starts with the peak of the one that started it, so a peak that is not above our own
says nothing and is left out.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import shutil
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

SAMPLE_SECONDS = 0.02
READ_BYTES = 1 << 20
LOG_LINES = 15


class ProgramError(Exception):
    """A measured program has ended with an error; the text is the end of what it said."""


@dataclass(frozen=True)
class Measurement:
    """What one run of a program took."""

    wall_seconds: float
    cpu_seconds: float
    peak_bytes: int | None
    own_peak_bytes: int | None
    """The part that is not memory-mapped files."""


def measure(command: Sequence[str], environment: Mapping[str, str] | None = None) -> Measurement:
    """Run a command to its end."""
    with tempfile.TemporaryFile() as log:
        started = time.perf_counter()
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(environment or {})},
        )
        sampler = OwnMemorySampler(process.pid)
        sampler.start()
        _, status, usage = os.wait4(process.pid, 0)
        wall_seconds = time.perf_counter() - started
        sampler.stop()
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            log.seek(0)
            lines = log.read().decode(errors="replace").splitlines()[-LOG_LINES:]
            said = "\n".join(lines)
            raise ProgramError(f"{command[0]} ended with {process.returncode}:\n{said}")

    tells = usage.ru_maxrss > resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return Measurement(
        wall_seconds,
        usage.ru_utime + usage.ru_stime,
        usage.ru_maxrss * 1024 if tells else None,
        sampler.peak_bytes if tells else None,
    )


class OwnMemorySampler(threading.Thread):
    """Looks at a process's anonymous memory again and again."""

    def __init__(self, process_id: int) -> None:
        super().__init__(daemon=True)
        self.peak_bytes = 0
        self._status = Path(f"/proc/{process_id}/status")
        self._ended = threading.Event()

    def run(self) -> None:
        """Sample until told to stop, or until the process is gone."""
        while not self._ended.wait(SAMPLE_SECONDS):
            try:
                text = self._status.read_text()
            except OSError:
                return
            for line in text.splitlines():
                if line.startswith("RssAnon:"):
                    self.peak_bytes = max(self.peak_bytes, int(line.split()[1]) * 1024)

    def stop(self) -> None:
        """Stop sampling."""
        self._ended.set()
        self.join()


def warm_page_cache(files: Iterable[Path]) -> None:
    """Read files from end to end, so that the next to read them need not wait for the disk."""
    buffer = bytearray(READ_BYTES)
    for path in files:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def available_memory_bytes() -> int:
    """What the kernel says a new program could take without swapping."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/meminfo has no MemAvailable; this benchmark needs Linux")


# ---------------------------------------------------------------- in turns


@dataclass(frozen=True)
class Job:
    """Something to be measured, by one tool."""

    name: str
    commands: Sequence[Sequence[str]]
    """Run one after the other and measured as one."""
    files: Sequence[Path] = ()
    """What it reads, which is put into the page cache before."""
    least_bytes: int = 0
    """What it must write into the folder for outputs, at least."""
    rival: str | None = None
    """The job that does the same by another tool, or in another way."""
    environment: Mapping[str, str] = field(default_factory=dict)
    obstacle: str | None = None
    """Why it cannot be run here."""


@dataclass
class Result:
    """The runs of one job, or why there are none."""

    job: Job
    runs: list[Measurement] = field(default_factory=list)
    problem: str | None = None

    def median(self, what: str) -> float | None:
        """The median of what the runs took of something; None if that is not known."""
        known = [value for run in self.runs if (value := getattr(run, what)) is not None]
        return statistics.median(known) if known else None

    def to_dict(self) -> dict[str, Any]:
        """The runs as plain values, ready for JSON."""
        runs = [asdict(run) for run in self.runs]
        return {"name": self.job.name, "runs": runs, "problem": self.problem}


def take_turns(jobs: Sequence[Job], output: Path, rounds: int) -> list[Result]:
    """Run every job once, then again, until there were so many rounds."""
    results = [Result(job, problem=job.obstacle and f"skipped: {job.obstacle}") for job in jobs]
    for number in range(1, rounds + 1):
        for result in (result for result in results if result.problem is None):
            try:
                result.runs.append(run_once(result.job, output))
            except ProgramError as error:
                result.problem = f"failed: {error}"
            else:
                seconds = result.runs[-1].wall_seconds
                print(f"round {number} of {rounds}: {result.job.name}: {seconds:.2f} s", flush=True)
    return results


def run_once(job: Job, output: Path) -> Measurement:
    """Run a job once, from a clean start, and throw its output away."""
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir()
    os.sync()
    warm_page_cache(job.files)
    parts = [measure(command, job.environment) for command in job.commands]
    written = sum(file.stat().st_size for file in output.glob("*.safetensors"))
    shutil.rmtree(output)
    if written < job.least_bytes:
        raise ProgramError(f"wrote {written:,} bytes; {job.least_bytes:,} are expected")
    peaks = [part.peak_bytes for part in parts if part.peak_bytes is not None]
    own_peaks = [part.own_peak_bytes for part in parts if part.own_peak_bytes is not None]
    return Measurement(
        sum(part.wall_seconds for part in parts),
        sum(part.cpu_seconds for part in parts),
        max(peaks, default=None),
        max(own_peaks, default=None),
    )


def print_results(results: Sequence[Result], floor: str | None) -> None:
    """Print one line for each job, with its rival's time and that of the floor beside its own."""
    head = ("job", "runs", "wall s", "from – to", "CPU s", "memory MB", "rival ÷ this")
    seconds = {result.job.name: result.median("wall_seconds") for result in results}
    rows = []
    for result in results:
        wall, cpu = result.median("wall_seconds"), result.median("cpu_seconds")
        if wall is None or cpu is None:
            continue
        memory, taken = result.median("own_peak_bytes"), [run.wall_seconds for run in result.runs]
        rival, least = (seconds.get(name or "") for name in (result.job.rival, floor))
        rows.append(
            [
                *(result.job.name, str(len(result.runs)), f"{wall:.2f}"),
                *(f"{min(taken):.2f} – {max(taken):.2f}", f"{cpu:.2f}"),
                "–" if memory is None else f"{memory / 1e6:,.0f}",
                f"{rival / wall:.1f}" if rival else "",
                *((f"{wall / least:.1f}" if least else "",) if floor else ()),
            ]
        )
    print_table((*head, *((f"this ÷ {floor}",) if floor else ())), rows)
    print("medians of the runs, start-up included; memory: without mapped files")
    for result in results:
        if result.problem:
            print(f"{result.job.name}: {result.problem}")


def print_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table in Markdown; all columns but the first are aligned to the right."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    print(*(f"| {' | '.join(line)} |" for line in lines), sep="\n", flush=True)


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    """Write figures to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=2) + "\n")


def describe_machine(peers_python: Path) -> dict[str, Any]:
    """What a reader of the figures must know."""
    packages = {name: version(name) for name in ("dare-merge", "numpy")}
    if peers_python.exists():
        code = (
            "from importlib.metadata import version; "
            "print(*(n + '=' + version(n) for n in ('torch', 'mergekit')))"
        )
        command = [peers_python, "-c", code]
        said = subprocess.run(command, capture_output=True, text=True, check=False).stdout
        packages |= dict(item.split("=", 1) for item in said.split())
    return {
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "architecture": platform.machine(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "packages": packages,
    }
