"""Slices that run at the same time in processes of their own, and are killed at random."""

from __future__ import annotations

import random
import signal

from interposing import Job
from scenarios import SCENARIOS as ALL
from scenarios import Place, Scenario, check_between, check_message, check_whole, chosen

SCENARIOS = [scenario for scenario in ALL if scenario.slices]
CROWDS = 100
"""Groups of processes at full size, for each scenario."""
LONGEST_S = 0.4
MOST_ROUNDS = 12


def run_round(place: Place, scenario: Scenario, delays: list[float | None], context: str) -> None:
    """Run all slices at once; some are killed, some are there twice."""
    jobs = [
        Job(command, place.work, kill_after_s=delay)
        for command, delay in zip(scenario.commands, delays, strict=True)
    ]
    for outcome in place.warm.run_together([*jobs, jobs[0]]):
        if outcome.status != -signal.SIGKILL:
            check_message(outcome.status, outcome.err, f"{context}: {outcome.err}")


def test_slices_that_are_killed_at_random_end_in_the_same_bytes(
    place: Place, scenario: Scenario, attack_size, attack_seed
):
    for attack in chosen((attack_seed, scenario.name), attack_size, range(CROWDS), least=3):
        generator = random.Random(repr((attack_seed, scenario.name, attack)))
        place.reset({})
        is_new, rounds = False, 0
        while not is_new:
            rounds += 1
            assert rounds < MOST_ROUNDS, f"{scenario.name}, {attack}: it never ends"
            delays = [
                generator.choice((None, generator.random() * LONGEST_S)) if rounds < 3 else None
                for _ in scenario.commands
            ]
            context = f"{scenario.name}, {attack}, round {rounds}, {delays}"
            run_round(place, scenario, delays, context)
            is_new = check_between(place, scenario, context)
        if (place.work / f"{scenario.output}.partial").exists():
            # One was killed after giving the name; whoever comes next clears up.
            again = place.run(("finish", *scenario.command[:-2]))
            assert "exists already" in again.err or again.status == 0, again.err
        check_whole(place, scenario, context)
    assert place.inputs_are_whole(thoroughly=True)


def test_a_merge_without_slices_goes_on_from_slices_that_were_killed(
    place: Place, scenario: Scenario, attack_size, attack_seed
):
    for attack in chosen((attack_seed, scenario.name, "whole"), attack_size, range(CROWDS)):
        generator = random.Random(repr((attack_seed, scenario.name, attack)))
        place.reset({})
        delays: list[float | None] = [generator.random() * LONGEST_S for _ in scenario.commands]
        context = f"{scenario.name}, {attack}, {delays}"
        run_round(place, scenario, delays, context)
        if not check_between(place, scenario, context):
            again = place.run(scenario.command[:-2])
            assert again.status == 0, f"{context}: {again.err}"
            check_whole(place, scenario, context)
