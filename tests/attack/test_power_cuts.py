"""After a power cut at any moment the output is the old one, the new one, or made again."""

from __future__ import annotations

from power import File, cut
from scenarios import Place, Scenario, check_between, check_end, chosen
from watching import Call

FORGETTINGS = (None, 1, 2, 3)
"""Seeds of what is forgotten; None is everything."""


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
    made = [Call("mkdir", "new"), Call("create", "new/x"), Call("write", "new/x", data=b"1")]
    assert cut({}, made, None) == {}
    assert cut({}, [*made, Call("sync", ".")], None) == {"new": None}
    synced = [*made, Call("sync", "new/x"), Call("sync", "new")]
    assert cut({}, synced, None) == {}
    assert cut({}, [*synced, Call("sync", ".")], None) == {"new": None, "new/x": b"1"}


def test_a_rename_happens_in_both_folders_or_in_none():
    start = {"a": None, "a/x": b"1", "x": b"0"}
    moved = Call("rename", "a/x", "x")
    outcomes = [cut(start, [moved], seed) for seed in range(20)]
    assert {"a": None, "x": b"1"} in outcomes
    assert start in outcomes
    assert len({repr(sorted(outcome.items())) for outcome in outcomes}) == 2
    exchanged = Call("exchange", "a/x", "x")
    assert cut(start, [exchanged, Call("sync", ".")], None) == {"a": None, "a/x": b"0", "x": b"1"}


def test_a_power_cut_at_any_moment_leaves_the_old_or_the_new_or_is_made_good(
    place: Place, scenario: Scenario, attack_size, attack_seed
):
    start, calls = place.end(scenario).start, place.calls(scenario)
    attacks = [(at, seed) for at in range(len(calls) + 1) for seed in FORGETTINGS]
    for at, seed in chosen((attack_seed, scenario.name), attack_size, attacks):
        place.reset(cut(start, calls[:at], seed and (attack_seed, seed)))
        last = f"{calls[at - 1].name} {calls[at - 1].path}" if at else "the start"
        context = f"{scenario.name}, power cut after call {at}, {last}, seed {seed}"
        check_end(place, scenario, context)
    for seed in FORGETTINGS:
        place.reset(cut(start, calls, seed))
        context = f"{scenario.name}, power cut when it was said to be done, seed {seed}"
        assert check_between(place, scenario, context), context
    assert place.inputs_are_whole(thoroughly=True)
