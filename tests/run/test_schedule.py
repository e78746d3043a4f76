"""Which steps are handed out, in what batches, and again if they come back."""

import random
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from dare.run.schedule import Schedule


@dataclass(frozen=True)
class Step:
    id: int
    needs: tuple[int, ...] = ()
    group: int = 0
    elements: int = 1


def ids(batch):
    return None if batch is None else [step.id for step in batch.steps]


def test_a_batch_has_as_many_elements_as_it_may_but_at_least_one_step():
    schedule = Schedule([Step(n, elements=size) for n, size in enumerate([9, 2, 2, 2, 50, 50])])
    taken = [ids(schedule.take_now(4)) for _ in range(5)]
    assert taken == [[0], [1, 2], [3], [4], [5]]
    assert schedule.take_now(4) is None


def test_batches_get_smaller_towards_the_end():
    schedule = Schedule([Step(n) for n in range(32)], takers=2)
    sizes = []
    while batch := schedule.take_now(4):
        sizes.append(len(batch.steps))
    assert sizes == [4, 4, 4, 4, 4, 3, 2, 1, 1, 1, 1, 1, 1, 1]


def test_what_is_given_back_is_handed_out_again_with_what_it_needs():
    schedule = Schedule([Step(0), Step(1, (0,)), Step(2)])
    first = schedule.take_now(1)
    assert ids(first) == [0]
    schedule.hand_in(first, ["found"])
    lost = schedule.take_now(1)
    assert (ids(lost), lost.results) == ([1], {0: "found"})
    schedule.give_back(lost)
    again = schedule.take_now(1)
    assert (ids(again), again.results) == ([1], {0: "found"})
    schedule.hand_in(again, [None])
    assert not schedule.is_done
    schedule.hand_in(schedule.take(1), [None])
    assert schedule.is_done
    assert schedule.take(1) is None


@given(st.integers(0, 1 << 32))
def test_every_step_is_done_once_whatever_is_lost(seed):
    chance = random.Random(seed)
    count = chance.randint(1, 30)
    steps = [
        Step(
            n,
            needs=tuple(chance.sample(range(n), min(n, chance.randint(0, 3)))),
            group=n // 4,
            elements=chance.randint(0, 5),
        )
        for n in range(count)
    ]
    takers, ahead = chance.randint(1, 4), chance.choice([None, 0, 2])
    schedule = Schedule(steps, takers=takers, groups_ahead=ahead)
    out, done = [], []
    while not schedule.is_done:
        batch = schedule.take_now(chance.randint(0, 6))
        if batch is not None:
            assert all(batch.results[need] == need for step in batch.steps for need in step.needs)
            out.append(batch)
        if out and (batch is None or chance.random() < 0.5):
            back = out.pop(chance.randrange(len(out)))
            if chance.random() < 0.25:
                schedule.give_back(back)
            else:
                schedule.hand_in(back, [step.id for step in back.steps])
                done += back.places
    assert sorted(done) == list(range(count))
