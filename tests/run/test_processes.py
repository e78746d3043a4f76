"""The end of what child processes print; `test_evaluators` has the processes themselves."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dare.run.processes import MOST_SHOWN_BYTES, Tail


@given(st.lists(st.binary(max_size=300), max_size=40))
def test_the_end_of_what_is_printed_is_kept(pieces):
    tail = Tail(100)
    for piece in pieces:
        tail.add(piece)
        assert len(tail) <= 200 + len(piece)
    whole = b"".join(pieces)
    assert whole.endswith(bytes(tail))
    assert len(tail) >= min(100, len(whole))


def test_lines_are_shown_as_a_terminal_would():
    tail = Tail(MOST_SHOWN_BYTES)
    tail.add(b"first\r\n 10 %\r 99 %\rdone\n\xff\x1b[2J\n\n")
    assert tail.shown() == "first\ndone\n\ufffd\\x1b[2J"
    assert tail.last_line() == "\ufffd\x1b[2J"
