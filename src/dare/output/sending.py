"""Threads that send things, and a bound on what waits in memory to be sent."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

Item = TypeVar("Item")

LEAVING_SECONDS = 10.0
"""How long what is being sent may take when everything is to end."""


class Sender(Generic[Item]):
    """Sends items by a few threads; the first error ends it and is raised to whoever hands on.

    `reserve` makes those wait who hand on faster than can be sent. They wait only while something
    is being sent: what is not complete yet can only be completed by those who wait, so beyond the
    bound they are let through.
    """

    def __init__(self, send: Callable[[Item], None], threads: int, most_bytes: int) -> None:
        self._send = send
        self._most_bytes = most_bytes
        self._held_bytes = 0
        self._waiting: deque[Item] = deque()
        self._running = 0
        self._error: BaseException | None = None
        self._is_over = False
        self._changed = threading.Condition()
        self._threads = [
            threading.Thread(target=self._work, name=f"dare-send-{n}", daemon=True)
            for n in range(threads)
        ]

    def reserve(self, nbytes: int) -> None:
        """Wait until so much more may be held, and count it."""
        with self._changed:
            while (
                self._held_bytes + nbytes > self._most_bytes
                and (self._waiting or self._running)
                and self._error is None
            ):
                self._changed.wait()
            self._raise()
            self._held_bytes += nbytes

    def release(self, nbytes: int) -> None:
        """Say that so much is no longer held."""
        with self._changed:
            self._held_bytes -= nbytes
            self._changed.notify_all()

    def submit(self, item: Item) -> None:
        """Have an item sent."""
        with self._changed:
            self._raise()
            self._waiting.append(item)
            if self._threads and self._threads[0].ident is None:
                for thread in self._threads:
                    thread.start()
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Let nobody go on, for a reason that was found elsewhere."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def wait(self) -> None:
        """Wait until all is sent."""
        with self._changed:
            while (self._waiting or self._running) and self._error is None:
                self._changed.wait(0.2)  # so that Ctrl-C comes through
            self._raise()

    def stop(self) -> None:
        """Send nothing more; give what is being sent a little time."""
        until = time.monotonic() + LEAVING_SECONDS
        with self._changed:
            self._is_over = True
            self._waiting.clear()
            self._changed.notify_all()
            while self._running and (left := until - time.monotonic()) > 0:
                self._changed.wait(min(left, 0.2))

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._waiting and not self._is_over:
                    self._changed.wait()
                if self._is_over:
                    return
                item = self._waiting.popleft()
                self._running += 1
            try:
                self._send(item)
            except BaseException as error:
                self.fail(error)
            finally:
                del item
                with self._changed:
                    self._running -= 1
                    self._changed.notify_all()
