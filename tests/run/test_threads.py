"""Steps on threads: all of them, in order, and errors come out."""

import gc
import random
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dare.run.threads import BATCH_ELEMENTS, STEPS_READ_AHEAD, run_steps


@dataclass(frozen=True)
class Step:
    id: str
    needs: tuple[str, ...] = ()
    group: int = 0
    elements: int = 1


class Adder:
    """The result of a step: its id, and in brackets what it was given."""

    def prefetch(self, step):
        pass

    def do(self, steps, results):
        return [self.run(step, results) for step in steps]

    def run(self, step, results):
        return f"{step.id}({''.join(results[need] for need in step.needs)})"


def test_what_comes_later_is_prefetched_before():
    asked, seen = [], []

    class Worker(Adder):
        def prefetch(self, step):
            asked.append(step)

        def run(self, step, results):
            seen.append(len(asked))

    run_steps([Step(str(n)) for n in range(20)], lambda _stop: Worker(), 1)
    assert all(count >= min(20, n + STEPS_READ_AHEAD + 1) for n, count in enumerate(seen))


def test_an_error_in_a_thread_tells_the_others_to_stop():
    is_waiting = threading.Event()

    class Worker(Adder):
        def __init__(self, stop):
            self.stop = stop

        def run(self, step, results):
            if step.id == "fails":
                assert is_waiting.wait(30)
                raise ValueError("injected")
            is_waiting.set()
            assert self.stop.wait(30)

    with pytest.raises(ValueError, match="injected"):
        run_steps([Step("waits"), Step("fails")], Worker, 2)


def test_ctrl_c_stops_the_threads_and_is_raised(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import time\n"
        "from dare.run.threads import Step, run_steps\n"
        "class Worker:\n"
        "    def __init__(self, stop): self.stop = stop\n"
        "    def prefetch(self, step): pass\n"
        "    def do(self, steps, results):\n"
        "        print('started', flush=True)\n"
        "        assert self.stop.wait(60)\n"
        "        print('stopped', flush=True)\n"
        "        return [None]\n"
        "try:\n"
        "    run_steps([Step((), (), 0, 1)], Worker, 1)\n"
        "except KeyboardInterrupt:\n"
        "    print('interrupted', flush=True)\n"
    )
    process = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "started\n"
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60)[0] == "stopped\ninterrupted\n"


# ---------------------------------------------------------------- steps that need each other


def results_of(steps, threads, **options):
    collected = {}
    run_steps(
        steps,
        lambda _stop: Adder(),
        threads,
        collect=lambda steps, found: collected.update(
            zip((s.id for s in steps), found, strict=True)
        ),
        **options,
    )
    return collected


def test_batches_get_smaller_towards_the_end():
    sizes = []

    class Worker(Adder):
        def do(self, steps, results):
            sizes.append(len(steps))
            return super().do(steps, results)

    steps = [Step(str(n), elements=BATCH_ELEMENTS // 4) for n in range(32)]
    run_steps(steps, lambda _stop: Worker(), 1)
    assert sizes == [4, 4, 4, 4, 4, 4, 4, 2, 1, 1]


@given(st.integers(0, 1 << 32))
@settings(max_examples=50)
def test_every_step_is_done_once_with_what_it_needs(seed):
    chance = random.Random(seed)
    steps = [
        Step(
            str(n),
            needs=tuple(map(str, chance.sample(range(n), min(n, chance.randint(0, 3))))),
            group=n // 4,
            elements=chance.randint(0, BATCH_ELEMENTS),
        )
        for n in range(chance.randint(1, 30))
    ]
    expected = {}
    for step in steps:
        expected[step.id] = f"{step.id}({''.join(expected[need] for need in step.needs)})"
    one_group = chance.choice([False, True])
    assert results_of(steps, chance.randint(1, 4), one_group=one_group) == expected


def test_a_step_that_waits_lets_later_ones_pass():
    """The second needs the first, which ends when the third has been done."""
    third_done = threading.Event()

    class Worker(Adder):
        def run(self, step, results):
            if step.id == "first":
                assert third_done.wait(30), "the third step was not handed out"
            if step.id == "third":
                third_done.set()

    run_steps([Step("first"), Step("second", ("first",)), Step("third")], lambda _stop: Worker(), 2)


def test_no_more_groups_are_begun_than_there_are_threads():
    """One of them takes as long as all others, which do not wait for it."""
    lock, begun, done, most = threading.Lock(), set(), Counter(), []
    others_done = threading.Event()

    class Worker(Adder):
        def run(self, step, results):
            with lock:
                begun.add(step.group)
                most.append(len([group for group in begun if done[group] < 3]))
            if step.id == "0":
                assert others_done.wait(30), "the others wait for the first"
            with lock:
                done[step.group] += 1
                if done.total() == 27:
                    others_done.set()

    steps = [
        Step(f"{group}{part}", needs, group)
        for group in range(10)
        for part, needs in (("", ()), ("a", (str(group),)), ("b", (str(group),)))
    ]
    run_steps(steps, lambda _stop: Worker(), 3, one_group=True)
    assert done.total() == 30
    assert 2 <= max(most) <= 3


def test_results_are_let_go_of_when_nobody_needs_them_any_more():
    class Result:
        pass

    alive = []

    class Worker(Adder):
        def run(self, step, results):
            del results
            gc.collect()
            alive.append(sum(reference() is not None for reference in references))
            result = Result()
            references.append(weakref.ref(result))
            return result

    references = []
    steps = [Step("0"), *(Step(str(i), (str(i - 1),)) for i in range(1, 6))]
    run_steps(steps, lambda _stop: Worker(), 1)
    assert max(alive) <= 2  # that of the step before, and of the one before that until handed in
