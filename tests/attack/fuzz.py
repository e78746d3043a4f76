"""Fuzzing at scale: `python tests/attack/fuzz.py headers --count 1000000 --seed 3 --processes 16`.

Every case follows from the format, the seed and its number alone. It must be read, or refused with
an error of ours that names the file, within seconds of processor time and some memory. Prints one
line of JSON; the exit status is 1 if anything else happened. `--case N` runs one case and shows
where its error comes from.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from typing import Any

sys.path[:0] = [
    str(Path(__file__).parents[1] / part) for part in ("../src", ".", "analysis", "deltas")
]

from targets import TARGETS, Target  # noqa: E402

from dare.errors import DareError  # noqa: E402

MOST_SECONDS = 5.0
"""Of processor time, for one case."""
MOST_BYTES = 400 << 20
"""What the process may grow by in all."""
MOST_SHOWN = 20


class TooLongError(BaseException):
    """A case takes more processor time than it may; no handler of errors shall stop it."""


@dataclass
class Tally:
    """What became of the cases."""

    format: str
    seed: int
    cases: int = 0
    accepted: int = 0
    refused: int = 0
    failures: list[dict[str, Any]] = field(default_factory=list)

    def add(self, other: Tally) -> None:
        """Count what another process has counted."""
        self.cases += other.cases
        self.accepted += other.accepted
        self.refused += other.refused
        self.failures += other.failures


def attack(format: str, seed: int, first: int, count: int) -> Tally:  # noqa: A002
    """Try some cases of a format, by number."""
    tally = Tally(format, seed)
    with tempfile.TemporaryDirectory(prefix="dare-fuzz-", dir=_room()) as folder, _limited():
        target = TARGETS[format](Path(folder))
        before = _peak_bytes()
        for number in range(first, first + count):
            tally.cases += 1
            if number % target.cases_timed == 0:
                signal.setitimer(signal.ITIMER_VIRTUAL, MOST_SECONDS)
            try:
                accepted, problem = _try(target, _case(target, format, seed, number))
            except BaseException as error:
                if isinstance(error, KeyboardInterrupt):
                    raise
                accepted, problem = False, f"{type(error).__name__}: {error}"
            if problem:
                again = f"python tests/attack/fuzz.py {format} --seed {seed} --case {number}"
                tally.failures.append({"case": number, "what": problem[:300], "again": again})
            elif accepted:
                tally.accepted += 1
            else:
                tally.refused += 1
        grown = _peak_bytes() - before
        if grown > MOST_BYTES:
            again = f"--seed {seed}, cases {first} to {first + count - 1}"
            what = f"memory grew by {grown} bytes"
            tally.failures.append({"case": first, "what": what, "again": again})
    return tally


def _case(target: Target, format: str, seed: int, number: int) -> Any:  # noqa: A002
    return target.make(Random(f"{format}/{seed}/{number}"))


def _try(target: Target, case: Any) -> tuple[bool, str]:
    """Whether a case is accepted, and what is wrong with the way it was treated."""
    try:
        target.read(case)
    except DareError as error:
        text = str(error)
        named = any(name in text for name in target.names)
        return False, "" if named else f"does not name the file: {text}"
    return True, ""


def _room() -> str | None:
    """Where files are written fastest: in memory, if there is such a place."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


@contextmanager
def _limited() -> Iterator[None]:
    def stop(*_: object) -> None:
        raise TooLongError(f"more than {MOST_SECONDS} s")

    before = signal.signal(signal.SIGVTALRM, stop)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def _peak_bytes() -> int:
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


# ---------------------------------------------------------------- many, in many processes


def attack_in_parallel(format: str, seed: int, count: int, processes: int) -> Tally:  # noqa: A002
    """Deal cases out to processes."""
    share = -(-count // (4 * processes))
    starts = range(0, count, share)
    counts = [min(share, count - start) for start in starts]
    tally = Tally(format, seed)
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        jobs = [(format, seed, *job) for job in zip(starts, counts, strict=True)]
        for part in pool.starmap(attack, jobs, chunksize=1):
            tally.add(part)
    return tally


def show_case(format: str, seed: int, number: int) -> int:  # noqa: A002
    """Run one case; show what it is and where its error comes from."""
    with tempfile.TemporaryDirectory(prefix="dare-fuzz-", dir=_room()) as folder, _limited():
        target = TARGETS[format](Path(folder))
        case = _case(target, format, seed, number)
        print(repr(case)[:4000])
        try:
            accepted, problem = _try(target, case)
        except BaseException:
            traceback.print_exc()
            return 1
    print(problem or ("accepted" if accepted else "refused"))
    return 1 if problem else 0


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("format", choices=list(TARGETS))
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--case", type=int)
    given = parser.parse_args()
    if given.case is not None:
        return show_case(given.format, given.seed, given.case)
    started = time.monotonic()
    tally = attack_in_parallel(given.format, given.seed, given.count, given.processes)
    seconds = time.monotonic() - started
    found = {**asdict(tally), "failed": len(tally.failures)}
    found["failures"] = tally.failures[:MOST_SHOWN]
    rates = {"seconds": round(seconds, 1), "per_second": round(tally.cases / max(seconds, 1e-9))}
    print(json.dumps(found | rates))
    return 1 if tally.failures else 0


if __name__ == "__main__":
    sys.exit(main())
