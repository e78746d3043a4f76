from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import threading

import pytest
from memory_objects import MemoryObjects

from dare.errors import OutputError
from dare.output import store_lock
from dare.output.store_lock import StoreLock


@pytest.fixture
def objects() -> MemoryObjects:
    return MemoryObjects()


def lock(objects: MemoryObjects, lost=lambda _error: None) -> StoreLock:
    return StoreLock(objects, "out.partial/lock", lost)


def left_by(process: int, machine: str | None = None) -> bytes:
    found = {"owner": "somebody", "machine": machine or store_lock._machine(), "process": process}
    return json.dumps(found).encode()


def test_one_has_it_at_a_time(objects):
    first, second = lock(objects), lock(objects)
    first.take()
    with pytest.raises(OutputError, match=r"another process is writing this output .* 0 s old"):
        second.take()
    second.release()  # which it does not have
    first.release()
    assert objects.objects == {}
    second.take()
    second.release()


def test_that_of_a_dead_process_of_this_machine_is_taken_over(objects):
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    objects.objects["out.partial/lock"] = left_by(process.pid)
    taken = lock(objects)
    taken.take()
    taken.release()
    objects.objects["out.partial/lock"] = left_by(os.getppid())
    with pytest.raises(OutputError, match="another process"):
        lock(objects).take()


@pytest.mark.parametrize("ahead", [-3600.0, 3600.0])
def test_the_clock_of_this_machine_does_not_matter(objects, monkeypatch, ahead):
    silent = 0.0
    ages = {"out.partial/lock": lambda: silent}
    monkeypatch.setattr(objects, "age", lambda key: ahead + ages.get(key, float)())
    objects.objects["out.partial/lock"] = left_by(1, "another")
    with pytest.raises(OutputError, match="another process is writing"):
        lock(objects).take()
    silent = 61.0
    taken = lock(objects)
    taken.take()
    taken.release()
    assert objects.objects == {}


def test_that_of_another_machine_is_taken_over_when_it_is_silent(objects, monkeypatch):
    objects.objects["out.partial/lock"] = left_by(1, "another")
    with pytest.raises(OutputError, match="wait until 60 s have passed"):
        lock(objects).take()
    monkeypatch.setattr(objects, "age", lambda key: 61.0 if key == "out.partial/lock" else 0.0)
    taken = lock(objects)
    taken.take()
    taken.release()


def test_a_damaged_one_is_not_taken_for_that_of_a_dead_process(objects):
    objects.objects["out.partial/lock"] = b"{}"
    with pytest.raises(OutputError, match="another process"):
        lock(objects).take()


def test_an_owner_hears_that_it_was_taken_away(objects, monkeypatch):
    monkeypatch.setattr(store_lock, "SIGN_SECONDS", 0.01)
    heard = threading.Event()
    mine = lock(objects, lambda _error: heard.set())
    mine.take()
    objects.objects["out.partial/lock"] = left_by(1, "another")
    assert heard.wait(10)
    mine.release()
    assert objects.objects["out.partial/lock"] == left_by(1, "another")


def test_it_says_nothing_of_the_machine(objects):
    mine = lock(objects)
    mine.take()
    assert platform.node().encode() not in objects.objects["out.partial/lock"]
    mine.release()
