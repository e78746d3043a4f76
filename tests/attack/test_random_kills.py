"""Merges that are killed at random moments, alone, in slices, or beside others with one output."""

from __future__ import annotations

import random
import signal

import pytest
from interposing import Job, Outcome
from scenarios import SCENARIOS as ALL
from scenarios import (
    Place,
    Scenario,
    check_between,
    check_end,
    check_message,
    check_whole,
    chosen,
)

SCENARIOS = [scenario for scenario in ALL if not scenario.slices]
SLICED = [scenario for scenario in ALL if scenario.slices]
KILLS = 1000
"""At full size, over all scenarios."""
CROWDS = 160
"""Groups of processes at full size, over all scenarios."""
GROUPS = 100
"""The same for each scenario with slices."""
SLICES_S = 0.4
MOST_ROUNDS = 12
LONGEST_S = 0.25
"""About as long as the slowest of these merges takes; after it most kills find nobody."""


def shared(scenario: Scenario) -> tuple[str, ...]:
    """The command with two threads, where it takes them."""
    if "--threads" not in scenario.command:
        return scenario.command
    place = scenario.command.index("--threads") + 1
    return (*scenario.command[:place], "2", *scenario.command[place + 1 :])


def run_killed(
    place: Place, commands: list[tuple[str, ...]], delays: list[float | None], context: str
) -> list[Outcome]:
    """Run commands at once, some of which are killed after a time."""
    jobs = [
        Job(command, place.work, kill_after_s=delay)
        for command, delay in zip(commands, delays, strict=True)
    ]
    outcomes = place.warm.run_together(jobs)
    for outcome in outcomes:
        if outcome.status != -signal.SIGKILL:
            check_message(outcome.status, outcome.err, f"{context}: {outcome.err}")
    return outcomes


@pytest.mark.parametrize(("attacks", "sizes"), [(KILLS, (1,)), (CROWDS, (2, 3))])
def test_processes_that_are_killed_at_random_do_not_spoil_their_output(
    place: Place, scenario: Scenario, attacks, sizes, attack_size, attack_seed
):
    """One alone, or several that want the same output, of which some are killed."""
    numbers = range(attacks // len(SCENARIOS))
    for attack in chosen((attack_seed, scenario.name, sizes), attack_size, numbers):
        generator = random.Random(repr((attack_seed, scenario.name, sizes, attack)))
        place.reset(place.end(scenario).start)
        delays: list[float | None] = [
            generator.choice((None,) * (sizes != (1,)) + (generator.random() * LONGEST_S,))
            for _ in range(generator.choice(sizes))
        ]
        context = f"{scenario.name}, {delays}"
        outcomes = run_killed(place, [shared(scenario)] * len(delays), delays, context)
        statuses = [outcome.status for outcome in outcomes]
        is_new = check_between(place, scenario, context)
        assert is_new or 0 not in statuses, context
        assert len(delays) > 1 or 1 not in statuses, f"{context}: {outcomes[0].err}"
        made_twice = is_new and (place.work / f"{scenario.output}.partial").exists()
        if len(delays) > 1 and (
            made_twice or any("appeared during" in outcome.err for outcome in outcomes)
        ):
            # The loser keeps what it has made, as one that is killed does; it is gone when it is
            # made again.
            over = () if scenario.before else ("--overwrite",)
            assert place.run((*scenario.command, *over)).status == 0, context
            check_whole(place, scenario, context)
        else:
            check_end(place, scenario, context)
    assert place.inputs_are_whole(thoroughly=True)


# ---------------------------------------------------------------- slices


sliced = pytest.mark.parametrize("scenario", SLICED, ids=lambda scenario: scenario.name)


@sliced
def test_slices_that_are_killed_at_random_end_in_the_same_bytes(
    place: Place, scenario: Scenario, attack_size, attack_seed
):
    first = scenario.commands[0]  # is run twice
    for attack in chosen((attack_seed, scenario.name), attack_size, range(GROUPS), least=3):
        generator = random.Random(repr((attack_seed, scenario.name, attack)))
        place.reset({})
        is_new, rounds = False, 0
        while not is_new:
            rounds += 1
            assert rounds < MOST_ROUNDS, f"{scenario.name}, {attack}: it never ends"
            delays: list[float | None] = [
                generator.choice((None, generator.random() * SLICES_S)) if rounds < 3 else None
                for _ in scenario.commands
            ]
            context = f"{scenario.name}, {attack}, round {rounds}, {delays}"
            run_killed(place, [*scenario.commands, first], [*delays, delays[0]], context)
            is_new = check_between(place, scenario, context)
        if (place.work / f"{scenario.output}.partial").exists():
            # One was killed after giving the name; whoever comes next clears up.
            again = place.run(("finish", *scenario.command[:-2]))
            assert "exists already" in again.err or again.status == 0, again.err
        check_whole(place, scenario, context)
    assert place.inputs_are_whole(thoroughly=True)


@sliced
def test_a_merge_without_slices_goes_on_from_slices_that_were_killed(
    place: Place, scenario: Scenario, attack_size, attack_seed
):
    first = scenario.commands[0]
    for attack in chosen((attack_seed, scenario.name, "whole"), attack_size, range(GROUPS)):
        generator = random.Random(repr((attack_seed, scenario.name, attack)))
        place.reset({})
        delays: list[float | None] = [generator.random() * SLICES_S for _ in scenario.commands]
        context = f"{scenario.name}, {attack}, {delays}"
        run_killed(place, [*scenario.commands, first], [*delays, delays[0]], context)
        if not check_between(place, scenario, context):
            again = place.run(scenario.command[:-2])
            assert again.status == 0, f"{context}: {again.err}"
            check_whole(place, scenario, context)
