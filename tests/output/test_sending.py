from __future__ import annotations

import threading

import pytest

from dare.output.sending import Sender

MOST = 100


class Slow:
    """Something that sends when it is told to, and counts what it holds."""

    def __init__(self) -> None:
        self.gate = threading.Semaphore(0)
        self.sent: list[int] = []
        self.sender = Sender(self.send, 2, MOST)

    def send(self, size: int) -> None:
        assert self.gate.acquire(timeout=10)
        self.sent.append(size)
        self.sender.release(size)


def hand_on(slow: Slow, sizes: list[int]) -> threading.Thread:
    def work() -> None:
        for size in sizes:
            slow.sender.reserve(size)
            slow.sender.submit(size)

    thread = threading.Thread(target=work)
    thread.start()
    return thread


def test_who_hands_on_waits_for_what_is_being_sent():
    slow = Slow()
    thread = hand_on(slow, [40, 40, 40, 40])
    thread.join(0.2)
    assert thread.is_alive()
    assert slow.sender._held_bytes == 80
    for done in range(4):
        slow.gate.release()
        while len(slow.sent) <= done:
            thread.join(0.01)
        assert slow.sender._held_bytes <= MOST
    thread.join(10)
    slow.sender.wait()
    assert slow.sent == [40] * 4
    assert slow.sender._held_bytes == 0
    slow.sender.stop()


def test_who_could_wait_for_ever_is_let_through():
    """Nothing is being sent: only more bytes can complete what is held."""
    slow = Slow()
    for _ in range(5):
        slow.sender.reserve(60)
    assert slow.sender._held_bytes == 300


def test_the_first_error_reaches_whoever_hands_on_or_waits():
    def fail(_size: int) -> None:
        raise OSError("gone")

    sender = Sender(fail, 2, MOST)
    sender.submit(1)
    with pytest.raises(OSError, match="gone"):
        sender.wait()
    with pytest.raises(OSError, match="gone"):
        sender.reserve(1)
    with pytest.raises(OSError, match="gone"):
        sender.submit(1)
    sender.stop()


def test_what_waits_is_dropped_at_the_end_and_what_runs_may_finish():
    slow = Slow()
    for size in (1, 2, 3, 4):
        slow.sender.submit(size)
    while slow.sender._running < 2:
        pass
    slow.gate.release(2)
    slow.sender.stop()
    assert sorted(slow.sent) == [1, 2]


def test_what_hangs_is_not_waited_for_for_ever(monkeypatch):
    monkeypatch.setattr("dare.output.sending.LEAVING_SECONDS", 0.1)
    slow = Slow()
    slow.sender.submit(1)
    while not slow.sender._running:
        pass
    slow.sender.stop()
    assert slow.sent == []
    slow.gate.release()
