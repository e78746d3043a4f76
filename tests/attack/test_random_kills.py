"""Merges that are killed at random moments, alone and beside others that want the same output."""

from __future__ import annotations

import random
import signal

from interposing import Job
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
"""Slices are for `test_slices_killed.py`."""
KILLS = 1000
"""At full size, over all scenarios."""
CROWDS = 160
"""Groups of processes at full size, over all scenarios."""
LONGEST_S = 0.25
"""About as long as the slowest of these merges takes; after it most kills find nobody."""


def shared(scenario: Scenario) -> tuple[str, ...]:
    """The command with two threads, where it takes them."""
    if "--threads" not in scenario.command:
        return scenario.command
    place = scenario.command.index("--threads") + 1
    return (*scenario.command[:place], "2", *scenario.command[place + 1 :])


def test_killed_at_a_random_moment_it_ends_in_the_same_bytes(
    place: Place, scenario: Scenario, attack_size, attack_seed
):
    attacks = range(KILLS // len(SCENARIOS))
    for attack in chosen((attack_seed, scenario.name), attack_size, attacks):
        generator = random.Random(repr((attack_seed, scenario.name, attack)))
        place.reset(place.end(scenario).start)
        delay = generator.random() * LONGEST_S
        job = Job(shared(scenario), place.work, kill_after_s=delay)
        (outcome,) = place.warm.run_together([job])
        context = f"{scenario.name}, killed after {delay:.4f} s"
        assert outcome.status in (0, -signal.SIGKILL), f"{context}: {outcome.err}"
        is_new = check_between(place, scenario, context)
        assert is_new or outcome.status != 0, context
        check_end(place, scenario, context)
    assert place.inputs_are_whole(thoroughly=True)


def test_processes_that_want_one_output_do_not_spoil_it(
    place: Place, scenario: Scenario, attack_size, attack_seed
):
    attacks = range(CROWDS // len(SCENARIOS))
    for attack in chosen((attack_seed, scenario.name), attack_size, attacks):
        generator = random.Random(repr((attack_seed, scenario.name, attack)))
        place.reset(place.end(scenario).start)
        jobs = [
            Job(
                shared(scenario),
                place.work,
                kill_after_s=generator.choice((None, generator.random() * LONGEST_S)),
            )
            for _ in range(generator.choice((2, 3)))
        ]
        outcomes = place.warm.run_together(jobs)
        context = f"{scenario.name}, {[job.kill_after_s for job in jobs]}"
        for outcome in outcomes:
            if outcome.status != -signal.SIGKILL:
                check_message(outcome.status, outcome.err, context)
        is_new = check_between(place, scenario, context)
        assert is_new or all(outcome.status != 0 for outcome in outcomes), context
        made_twice = is_new and (place.work / f"{scenario.output}.partial").exists()
        if made_twice or any("appeared during" in outcome.err for outcome in outcomes):
            # The loser keeps what it has made, as one that is killed does; it is gone when it is
            # made again.
            over = () if scenario.before else ("--overwrite",)
            assert place.run((*scenario.command, *over)).status == 0, context
            check_whole(place, scenario, context)
        else:
            check_end(place, scenario, context)
    assert place.inputs_are_whole(thoroughly=True)
