"""Run tasks on the threads of this process.

Tasks are handed out in order. A task may wait for an earlier one, since that one has already been
handed out; it must not wait for a later one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

READ_AHEAD = 4
"""Tasks per thread between asking for bytes and reading them."""

Worker_contra = TypeVar("Worker_contra", contravariant=True)
Worker = TypeVar("Worker")


class Task(Protocol[Worker_contra]):
    """A piece of work."""

    def prefetch(self) -> None:
        """Say what will be read when the task runs, some time before it does."""

    def run(self, worker: Worker_contra) -> None:
        """Do the work."""


def run_tasks(
    tasks: Sequence[Task[Worker]],
    make_worker: Callable[[threading.Event], Worker],
    threads: int,
) -> None:
    """Carry out all tasks; the first error, or Ctrl-C, stops the others and is raised here.

    `make_worker` makes the private state of one thread; the event it is given is set when work is
    to stop.
    """
    stop = threading.Event()
    finished = threading.Semaphore(0)  # not Thread.join, which Ctrl-C can break for good
    errors: list[BaseException] = []
    lock = threading.Lock()
    handed_out = 0

    def next_index() -> int:
        nonlocal handed_out
        with lock:
            handed_out += 1
            return handed_out - 1

    def work() -> None:
        try:
            worker = make_worker(stop)
            while not stop.is_set() and (index := next_index()) < len(tasks):
                tasks[index].run(worker)  # first, since others may wait for it
                ahead = index + READ_AHEAD * threads
                if ahead < len(tasks):
                    tasks[ahead].prefetch()
        except BaseException as error:
            with lock:
                errors.append(error)
            stop.set()
        finally:
            finished.release()

    for number in range(threads):
        threading.Thread(target=work, name=f"dare-{number}", daemon=True).start()
    running = threads
    try:
        while running:
            running -= finished.acquire(timeout=0.2)
    except BaseException:
        stop.set()
        for _ in range(running):
            finished.acquire()
        raise
    if errors:
        raise errors[0]
