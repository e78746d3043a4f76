"""A journal, a manifest or a file beside the weights that somebody or something has changed."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from interposing import Attack
from power import played
from scenarios import BY_NAME, Place, Scenario, check_message, check_whole, chosen
from watching import Call

JOURNAL = "journal.jsonl"
FLIPS = 600
"""Flipped bits at full size, for each journal."""
EDITED = ("README.md",)
"""What people change in an output, and may."""
DIGIT = re.compile(rb"[0-9a-f]{16,}")
RESUMED = [BY_NAME[name] for name in ("file", "directory", "compress", "restore")]
SCENARIOS = [*RESUMED, *(BY_NAME[name] for name in ("extract", "adapters", "lossless"))]
merges = pytest.mark.parametrize("scenario", RESUMED, ids=lambda scenario: scenario.name)


@pytest.fixture
def stopped(place: Place, scenario: Scenario):
    """The work folder of a merge that stopped when all chunks were in its journal."""
    calls = place.calls(scenario)
    lines = [number for number, call in enumerate(calls, 1) if writes_journal(call)]
    return played({}, calls[: lines[-1]]).now()


def writes_journal(call: Call) -> bool:
    return call.name == "write" and call.path.endswith(f".partial/{JOURNAL}")


def flipped(data: bytes, bit: int) -> bytes:
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def mutations(journal: bytes, generator: random.Random) -> Iterator[tuple[str, bytes]]:
    """Whatever may happen to lines, and some digits that a liar would change."""
    lines = journal.splitlines(keepends=True)
    numbers = range(len(lines))
    for one in numbers:
        rest = [line for other, line in enumerate(lines) if other != one]
        yield f"without line {one}", b"".join(rest)
        yield f"line {one} twice", b"".join([*lines[: one + 1], *lines[one:]])
        yield f"line {one} first", b"".join([lines[one], *rest])
        yield f"line {one} last", b"".join([*rest, lines[one]])
        yield f"line {one} empty", b"".join([*lines[:one], b"\n", *lines[one + 1 :]])
        yield f"line {one} is another", b"".join([*lines[:one], b"{}\n", *lines[one + 1 :]])
        yield f"from line {one} on", b"".join(lines[one:])
    yield "empty", b""
    yield "no line feeds", journal.replace(b"\n", b"")
    yield "other line feeds", journal.replace(b"\n", b"\r\n")
    yield "nested", journal + b"[" * 100_000 + b"\n"
    yield "a long number", journal + b"1" * 100_000 + b"\n"
    yield "not a number", journal.replace(b":0", b":NaN")
    yield "negative", journal.replace(b'"chunk":0', b'"chunk":-1')
    yield "huge", journal.replace(b'"chunk":0', b'"chunk":1e999')
    yield "true", journal.replace(b'"chunk":0', b'"chunk":false')
    for _ in range(10):
        yield "garbage", journal + generator.randbytes(generator.randrange(1, 300))
        stop = generator.randrange(len(journal))
        yield f"cut at {stop}", journal[:stop]
        start = generator.randrange(stop + 1)
        yield f"without {start} to {stop}", journal[:start] + journal[stop:]
        yield (
            f"zeros from {start} to {stop}",
            (journal[:start] + bytes(stop - start) + journal[stop:]),
        )
    for found in DIGIT.finditer(journal):
        place = generator.randrange(*found.span())
        digit = b"f" if journal[place : place + 1] != b"f" else b"0"
        yield f"digit {place}", journal[:place] + digit + journal[place + 1 :]


@merges
def test_a_merge_that_stopped_is_taken_up_again(place: Place, stopped, scenario: Scenario):
    place.reset(stopped)
    undisturbed = place.end(scenario).reads
    outcome = place.run(scenario.command, Attack(place.inputs, reads=True))
    assert outcome.status == 0, outcome.err
    assert outcome.seen < undisturbed, "nothing was taken over, so there is nothing to attack"
    check_whole(place, scenario, "stopped and taken up again")


@merges
def test_a_changed_journal_leads_to_the_same_bytes_or_to_an_error(
    place: Place, stopped, scenario: Scenario, attack_size, attack_seed
):
    (name,) = (name for name in stopped if name.endswith(JOURNAL))
    journal = stopped[name]
    generator = random.Random(repr((attack_seed, scenario.name)))
    bits = generator.sample(range(8 * len(journal)), FLIPS)
    flips = [(f"bit {bit}", flipped(journal, bit)) for bit in bits]
    changes = list(mutations(journal, generator))
    seed = (attack_seed, scenario.name)
    attacks = [*chosen(seed, attack_size, flips, 3), *chosen(seed, attack_size, changes, 3)]
    for what, changed in attacks:
        place.reset({**stopped, name: changed})
        outcome = place.run(scenario.command)
        context = f"{scenario.name}, journal with {what}: {outcome.err}"
        check_message(outcome.status, outcome.err, context)
        if outcome.status == 0:
            check_whole(place, scenario, context)
        else:
            assert not (place.work / scenario.output).exists(), context


def test_verify_reports_every_flipped_bit(
    place: Place, scenario: Scenario, attack_size, attack_seed
):
    new = place.end(scenario).new
    for name in sorted(name for name, data in new.items() if data):
        bits = list(bits_of(name, new[name], random.Random(repr((attack_seed, name)))))
        for bit in chosen((attack_seed, name), attack_size, bits):
            place.reset({**new, name: flipped(new[name], bit)})
            check_reported(place, scenario, name, f"{scenario.name}, bit {bit} of {name}")


def bits_of(name: str, data: bytes, generator: random.Random) -> Iterator[int]:
    """Bits to flip; of weights as many in the header as in all the rest."""
    if name.endswith(".safetensors"):
        header = 8 + int.from_bytes(data[:8], "little")
        yield from (generator.randrange(8 * header) for _ in range(30))
    yield from (generator.randrange(8 * len(data)) for _ in range(30))


def check_reported(place: Place, scenario: Scenario, name: str, context: str) -> None:
    """`dare verify` says that something is wrong; what people edit may only be mentioned."""
    outcome = place.run(("verify", scenario.output))
    said = outcome.out + outcome.err
    assert "Traceback" not in said, f"{context}: {said}"
    assert "bug in dare" not in said, f"{context}: {said}"
    is_mentioned = outcome.status == 0 and Path(name).name in EDITED and Path(name).name in said
    assert outcome.status == 1 or is_mentioned, f"{context}: verify says {said}"


def test_verify_reports_what_is_missing_and_what_nobody_wrote(place: Place):
    scenario = BY_NAME["directory"]
    new = place.end(scenario).new
    for name in sorted(name for name, data in new.items() if data is not None):
        place.reset({key: data for key, data in new.items() if key != name})
        check_reported(place, scenario, name, f"{scenario.name} without {name}")
    place.reset({**new, "out/special_tokens_map.json": b"{}"})
    outcome = place.run(("verify", "out"))
    assert "special_tokens_map.json" in outcome.out + outcome.err, "a file that nobody wrote"
