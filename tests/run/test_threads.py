"""Tasks on threads: all of them, in order, and errors come out."""

import signal
import subprocess
import sys
import threading
import time

import pytest

from dare.run.threads import READ_AHEAD, run_tasks


class Task:
    def __init__(self, work, log=None):
        self.work = work
        self.log = log

    def prefetch(self):
        if self.log is not None:
            self.log.append(self)

    def run(self, worker):
        self.work(worker)


def make_list(_stop):
    return []


@pytest.mark.parametrize("threads", [1, 2, 7])
def test_every_task_runs_once(threads):
    done = []
    run_tasks([Task(lambda _w, n=n: done.append(n)) for n in range(100)], make_list, threads)
    assert sorted(done) == list(range(100))


def test_one_thread_keeps_the_order():
    done = []
    run_tasks([Task(lambda _w, n=n: done.append(n)) for n in range(100)], make_list, 1)
    assert done == list(range(100))


def test_what_comes_later_is_prefetched_once():
    log = []
    tasks = [Task(lambda _w: None, log) for _ in range(20)]
    run_tasks(tasks, make_list, 2)
    assert sorted(map(tasks.index, log)) == list(range(2 * READ_AHEAD, 20))


def test_the_first_error_stops_the_rest_and_is_raised():
    done = []

    def fail(_worker):
        raise OSError("injected")

    tasks = [Task(fail)] + [Task(lambda _w, n=n: done.append(n)) for n in range(1000)]
    with pytest.raises(OSError, match="injected"):
        run_tasks(tasks, make_list, 1)
    assert done == []


def test_an_error_in_a_thread_tells_the_others_to_stop():
    seen = threading.Event()

    def wait_for_stop(stop):
        seen.set()
        assert stop.wait(10)

    def fail(_stop):
        assert seen.wait(10)
        raise ValueError("injected")

    with pytest.raises(ValueError, match="injected"):
        run_tasks([Task(wait_for_stop), Task(fail)], lambda stop: stop, 2)


def test_a_prefetch_that_fails_leaves_nobody_waiting():
    """The first task is waited for by the second, and its thread also asks for a third's bytes."""
    done = threading.Event()

    class Failing(Task):
        def prefetch(self):
            raise OSError("injected")

    def wait(_worker):
        assert done.wait(10), "waited in vain"

    tasks = [Task(lambda _worker: done.set()), Task(wait)]
    tasks += [Failing(lambda _worker: None) for _ in range(3 * READ_AHEAD)]
    with pytest.raises(OSError, match="injected"):
        run_tasks(tasks, make_list, 2)
    assert done.is_set()


def test_ctrl_c_stops_the_threads_and_is_raised(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import time\n"
        "from dare.run.threads import run_tasks\n"
        "class Task:\n"
        "    def prefetch(self): pass\n"
        "    def run(self, stop):\n"
        "        print('started', flush=True)\n"
        "        assert stop.wait(20)\n"
        "        print('stopped', flush=True)\n"
        "try:\n"
        "    run_tasks([Task()], lambda stop: stop, 1)\n"
        "except KeyboardInterrupt:\n"
        "    print('interrupted', flush=True)\n"
    )
    process = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "started\n"
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=20)[0] == "stopped\ninterrupted\n"
