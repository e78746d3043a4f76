"""Which steps are handed out, in what batches, and again if they come back."""

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


@given(st.data())
def test_every_step_is_done_once_whatever_is_lost(data):
    count = data.draw(st.integers(1, 30))
    earlier = [
        data.draw(st.sets(st.integers(0, n - 1), max_size=3)) if n else () for n in range(count)
    ]
    sizes = [data.draw(st.integers(0, 5)) for _ in range(count)]
    steps = [Step(n, tuple(earlier[n]), n // 4, sizes[n]) for n in range(count)]
    ahead = data.draw(st.sampled_from([None, 0, 2]))
    schedule = Schedule(steps, takers=data.draw(st.integers(1, 4)), groups_ahead=ahead)
    out, done = [], []
    while not schedule.is_done:
        batch = schedule.take_now(data.draw(st.integers(0, 6)))
        if batch is not None:
            assert all(batch.results[need] == need for step in batch.steps for need in step.needs)
            out.append(batch)
        if out and (batch is None or data.draw(st.booleans())):
            back = out.pop(data.draw(st.integers(0, len(out) - 1)))
            if data.draw(st.integers(0, 3)) == 0:
                schedule.give_back(back)
            else:
                schedule.hand_in(back, [step.id for step in back.steps])
                done += back.places
    assert sorted(done) == list(range(count))
