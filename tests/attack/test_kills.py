"""Every call of a merge that changes or reads files is a moment to die at, to fail or be short."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
from interposing import ERRORS, HERE, Attack
from scenarios import BY_NAME, Place, Scenario, check_between, check_end, check_message, chosen


def attacks_on(place: Place, scenario: Scenario, what: str) -> list[Attack]:
    """One for each call of an undisturbed run, and for each error that it may end in."""
    reads = what.endswith("read")
    action = what.removesuffix(" read")
    root = place.folder if reads else place.work
    end = place.end(scenario)
    errors = ERRORS if what == "fail" else ("EIO",)
    calls = range(1, (end.reads if reads else end.changes) + 1)
    return [Attack(root, action, at, error, reads) for at in calls for error in errors]


@pytest.mark.parametrize(
    "what", ["kill before", "kill after", "fail", "shorten", "fail read", "shorten read"]
)
def test_disturbed_at_any_call_it_is_the_old_or_the_new_and_then_made_good(
    place: Place, scenario: Scenario, what, attack_size, attack_seed
):
    attacks = attacks_on(place, scenario, what)
    for attack in chosen((attack_seed, scenario.name, what), attack_size, attacks):
        place.reset(place.end(scenario).start)
        outcome = place.run(scenario.command, attack)
        call = f"{attack.error} at call {attack.at}, {outcome.what}"
        context = f"{scenario.name}, {what}, {call}: {outcome.err}"
        assert outcome.what, f"{context} never came"
        if what.startswith("kill"):
            assert outcome.status == -signal.SIGKILL, context
        else:
            check_message(outcome.status, outcome.err, context)
            assert outcome.status == 0 or what.startswith("fail"), context
            is_new = check_between(place, scenario, context)
            assert is_new == (outcome.status == 0), f"{context}exit status {outcome.status}"
        check_end(place, scenario, context)
    assert place.inputs_are_whole(thoroughly=True)


ORDINARY = """
import sys
from pathlib import Path
from interposing import Attack
from watching import Watch
Watch(Attack(Path(sys.argv[1]), "kill after", 9), 1).begin()
from dare.cli import main
main(sys.argv[2:])
"""


def test_a_process_that_is_started_in_the_ordinary_way_is_killed_too(place: Place):
    """The warm process and its children might differ from what a user starts."""
    scenario = BY_NAME["file"]
    place.reset({})
    command = [sys.executable, "-c", ORDINARY, str(place.work), *scenario.command]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path])}
    run = subprocess.run(command, cwd=place.work, env=environment, check=False)
    assert run.returncode == -signal.SIGKILL
    check_end(place, scenario, "a process of its own")
