"""After a power cut at any moment the output is the old one, the new one, or made again."""

from __future__ import annotations

from functools import partial

from interposing import Attack
from power import Call, File, cut, played, read_log
from scenarios import Place, Scenario, check_between, check_end, chosen, contents

FORGETTINGS = (None, 1, 2, 3)
"""Seeds of what is forgotten; None is everything."""
write = partial(Call, "write", other="", offset=0)
call = partial(Call, other="", offset=0, data=b"")


def test_a_file_keeps_what_was_synced_and_any_of_the_rest():
    file = File(b"", 0)
    file.write(0, b"a" * 600)
    file.sync()
    file.write(510, b"bcde")
    file.resize(700)
    assert [data for _, data in file.pending] == [b"bc", b"de", None]
    assert file.after([False, True, True]) == b"a" * 512 + b"de" + b"a" * 86 + bytes(100)
    assert file.after([True, False, False]) == b"a" * 510 + b"bc" + b"a" * 88


def test_names_are_forgotten_until_their_folder_is_synced():
    made = [call("mkdir", "new"), call("create", "new/x"), write("new/x", data=b"1")]
    assert cut({}, made, None) == {}
    assert cut({}, [*made, call("sync", ".")], None) == {"new": None}
    synced = [*made, call("sync", "new/x"), call("sync", "new")]
    assert cut({}, synced, None) == {}
    assert cut({}, [*synced, call("sync", ".")], None) == {"new": None, "new/x": b"1"}


def test_a_rename_happens_in_both_folders_or_in_none():
    start = {"a": None, "a/x": b"1", "x": b"0"}
    moved = Call("rename", "a/x", "x", 0, b"")
    outcomes = [cut(start, [moved], seed) for seed in range(20)]
    assert {"a": None, "x": b"1"} in outcomes
    assert start in outcomes
    assert len({repr(sorted(outcome.items())) for outcome in outcomes}) == 2
    exchanged = Call("exchange", "a/x", "x", 0, b"")
    assert cut(start, [exchanged, call("sync", ".")], None) == {"a": None, "a/x": b"0", "x": b"1"}


def recorded(place: Place, scenario: Scenario, folder) -> list[Call]:
    """The calls of an undisturbed run."""
    place.reset(place.end(scenario).start)
    log = folder / "log"
    outcome = place.run(scenario.command, Attack(place.work, log=log))
    assert outcome.status == 0, outcome.err
    return read_log(log, place.work)


def test_a_power_cut_at_any_moment_leaves_the_old_or_the_new_or_is_made_good(
    place: Place, scenario: Scenario, attack_size, attack_seed, tmp_path
):
    start = place.end(scenario).start
    calls = recorded(place, scenario, tmp_path)
    assert played(start, calls).now() == contents(place.work), "the log is not what happened"
    attacks = [(at, seed) for at in range(len(calls) + 1) for seed in FORGETTINGS]
    for at, seed in chosen((attack_seed, scenario.name), attack_size, attacks):
        place.reset(cut(start, calls[:at], seed and (attack_seed, seed)))
        last = f"{calls[at - 1].name} {calls[at - 1].path}" if at else "the start"
        context = f"{scenario.name}, power cut after call {at}, {last}, seed {seed}"
        check_end(place, scenario, context)
    assert place.inputs_are_whole(thoroughly=True)


def test_what_is_said_to_be_done_survives_a_power_cut(place: Place, scenario: Scenario, tmp_path):
    calls = recorded(place, scenario, tmp_path)
    for seed in FORGETTINGS:
        place.reset(cut(place.end(scenario).start, calls, seed))
        assert check_between(place, scenario, f"{scenario.name}, seed {seed}"), (
            f"{scenario.name}: done, and lost by a power cut, seed {seed}"
        )
