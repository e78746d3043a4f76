"""How large the values are that a pickle makes, counted before anything makes them.

A pickle can put a tuple twice into a tuple, that twice into another, and so on: fifty lines stand
for 2⁵⁰ values, and whoever hashes or prints the last one never comes to an end. The opcodes are
walked here without being run, by the effect that `pickletools` says each has on the stack.
"""

from __future__ import annotations

import pickletools
from typing import Any

MOST_VALUES = 10_000_000
"""In one value of a pickle, with what stands in it more than once counted each time."""


def count_values(pickled: bytes) -> int:
    """How many values the largest value of a pickle stands for; ValueError if it is damaged."""
    stack: list[int | None] = []  # sizes; None is a mark
    memo: dict[Any, int] = {}
    largest = 0
    for opcode, argument, _ in pickletools.genops(pickled):
        name = opcode.name
        if name in ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"):
            memo[len(memo) if name == "MEMOIZE" else argument] = _top(stack)
        elif name in ("GET", "BINGET", "LONG_BINGET"):
            stack.append(memo.get(argument, 1))
        elif name == "MARK":
            stack.append(None)
        else:
            taken = _take(stack, opcode)
            results = len(opcode.stack_after)
            stack += [1 + sum(taken)] * results if results else []
            largest = max(largest, _top(stack))
            if largest > MOST_VALUES:
                return largest
    return largest


def _top(stack: list[int | None]) -> int:
    return (stack[-1] if stack else 0) or 0


def _take(stack: list[int | None], opcode: pickletools.OpcodeInfo) -> list[int]:
    """Take off the stack what an opcode takes: a number of values, or all down to the last mark."""
    count = len(opcode.stack_before)
    taken: list[int] = []
    if pickletools.markobject in opcode.stack_before:
        while stack and (size := stack.pop()) is not None:
            taken.append(size)
        count = opcode.stack_before.index(pickletools.markobject)
    for _ in range(min(count, len(stack))):
        taken.append(stack.pop() or 0)
    return taken
