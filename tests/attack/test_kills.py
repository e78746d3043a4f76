"""Every call of a merge that changes files is a moment to die at, or to fail."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest
from interposing import ERRORS, Attack, environment
from scenarios import (
    BY_NAME,
    Place,
    Scenario,
    check_between,
    check_end,
    check_message,
    chosen,
)


@pytest.mark.parametrize("action", ["kill before", "kill after"])
def test_killed_at_any_call_it_ends_in_the_same_bytes(
    place: Place, scenario: Scenario, action, attack_size, attack_seed
):
    calls = list(range(1, place.end(scenario).changes + 1))
    for at in chosen((attack_seed, scenario.name, action), attack_size, calls):
        place.reset(place.end(scenario).start)
        outcome = place.run(scenario.command, Attack(place.work, action, at))
        context = f"{scenario.name}, {action} call {at}, {outcome.what}"
        assert outcome.status == -signal.SIGKILL, context
        check_end(place, scenario, context)
    assert place.inputs_are_whole(thoroughly=True)


def test_a_call_that_fails_is_an_error_with_a_place_or_a_warning(
    place: Place, scenario: Scenario, attack_size, attack_seed
):
    end = place.end(scenario)
    attacks = [(at, error) for at in range(1, end.changes + 1) for error in ERRORS]
    for at, error in chosen((attack_seed, scenario.name), attack_size, attacks):
        place.reset(end.start)
        outcome = place.run(scenario.command, Attack(place.work, "fail", at, error=error))
        context = f"{scenario.name}, {error} at call {at}, {outcome.what}: {outcome.err}"
        assert outcome.happened, context
        check_message(outcome.status, outcome.err, context)
        is_new = check_between(place, scenario, context)
        assert is_new == (outcome.status == 0), f"{context}exit status {outcome.status}"
        check_end(place, scenario, context)


def test_a_short_write_changes_nothing(place: Place, scenario: Scenario, attack_size, attack_seed):
    calls = list(range(1, place.end(scenario).changes + 1))
    for at in chosen((attack_seed, scenario.name, "short"), attack_size, calls):
        place.reset(place.end(scenario).start)
        outcome = place.run(scenario.command, Attack(place.work, "shorten", at))
        context = f"{scenario.name}, call {at} shortened, {outcome.what}: {outcome.err}"
        assert outcome.status == 0, context
        assert check_between(place, scenario, context), context


@pytest.mark.parametrize("action", ["fail", "shorten"])
def test_a_read_that_fails_is_an_error_and_a_short_one_is_not(
    place: Place, scenario: Scenario, action, attack_size, attack_seed
):
    end = place.end(scenario)
    calls = list(range(1, end.reads + 1))
    for at in chosen((attack_seed, scenario.name, action), attack_size, calls):
        place.reset(end.start)
        outcome = place.run(scenario.command, Attack(place.folder, action, at, reads=True))
        context = f"{scenario.name}, {action} read {at}, {outcome.what}: {outcome.err}"
        check_message(outcome.status, outcome.err, context)
        if action == "shorten":
            assert outcome.status == 0, context
        is_new = check_between(place, scenario, context)
        assert is_new == (outcome.status == 0), context
        check_end(place, scenario, context)


def test_a_process_that_is_started_in_the_ordinary_way_is_killed_too(place: Place):
    """The warm process and its children might differ from what a user starts."""
    scenario = BY_NAME["file"]
    place.reset({})
    variables = {"ATTACK_ROOT": str(place.work), "ATTACK_AT": "9", "ATTACK_ACTION": "2"}
    run = subprocess.run(
        [sys.executable, "-c", "from dare.cli import main; main()", *scenario.command],
        cwd=place.work,
        env={**environment(place.warm.preloaded), **variables},
        check=False,
    )
    assert run.returncode == -signal.SIGKILL
    check_end(place, scenario, "a process of its own")
