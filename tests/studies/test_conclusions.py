from __future__ import annotations

from dataclasses import replace

import pytest
import study_sample as sample
from study_sample import of_items

from dare.documents.document import Tone
from dare.studies.conclusions import conclude
from dare.studies.document import headline, holdout_text, winners
from dare.studies.results import (
    Conclusion,
    Estimate,
    Role,
    Scored,
    State,
    StudyData,
    Trial,
)

RECIPE = {"models": {"base_file": "base", "merge_files": ["math", "code"]}, "method": "dare+linear"}


def right(count: int, of: int = 100, **more) -> Scored:
    """So many right items of a group `add`; those that are right with fewer are right with more."""
    return of_items({f"add/{n:03}": float(n < count) for n in range(of)}, **more)


def trial(number: int, settings, scored, seed: int = 0, **more) -> Trial:
    state = State.DONE if scored else State.FAILED
    return Trial(number, settings, seed, **{"state": state, "scored": scored, **more})


def baseline(name: str, scored, **more) -> Trial:
    return trial(0, {}, scored, name=name, **more)


def study(trials, baselines=(), **more) -> StudyData:
    return StudyData(
        **{
            "recipe": RECIPE,
            "space": {},
            "sampler": "grid",
            "planned": len(trials),
            "seeds": (0,),
            "evaluator": "score.py",
            "objective": {},
            "guards": (),
            "baselines": tuple(baselines),
            "trials": tuple(trials),
            **more,
        }
    )


def mentions(found: Conclusion, code: str, *subjects: str) -> bool:
    """Whether there is a notice of a code that names all of these."""
    said = [str(notice) for notice in found.notices if notice.code == code]
    return any(all(subject in text for subject in subjects) for text in said)


def rates(*counts: int) -> list[Trial]:
    return [trial(n, {"drop_rate": 0.1 * (n + 1)}, right(k)) for n, k in enumerate(counts)]


# ------------------------------------------------------------------------------------- ranking


def test_settings_are_ranked_by_their_mean_over_seeds():
    trials = [
        trial(0, {"scale": 1.0}, right(50), 0),
        trial(1, {"scale": 2.0}, right(80), 0),
        trial(2, {"scale": 1.0}, right(70), 1),
        trial(3, {"scale": 2.0}, right(30), 1),
        trial(4, {"scale": 2.0}, None, 2),
        trial(5, {"scale": 3.0}, right(99), 0, state=State.STOPPED),
        trial(6, {"scale": 4.0}, None, 0, state=State.WAITING),
    ]
    found = conclude(study(trials, seeds=(0, 1)))
    assert [r.settings for r in found.ranking] == [{"scale": 1.0}, {"scale": 2.0}]
    assert [r.trials for r in found.ranking] == [(0, 2), (1, 3)]
    assert [r.objective.value for r in found.ranking] == [pytest.approx(0.6), pytest.approx(0.55)]
    assert found.best is found.ranking[0]
    assert found.best.scores == {"add": pytest.approx(0.6)}
    assert mentions(found, "trials_failed", "1 of 6 trials")


def test_the_best_is_compared_with_the_runner_up_and_each_baseline():
    baselines = [
        baseline("base", right(10)),
        baseline("math alone", right(45)),
        baseline("average", right(69)),
        baseline("average again", right(68)),
        baseline("sum", None, message="no room"),
    ]
    found = conclude(study(rates(40, 70, 68), baselines))
    assert [(d.other, d.verdict) for d in found.against] == [
        ("trial 2", "no clear difference"),
        ("base", "better"),
        ("math alone", "better"),
        ("average", "no clear difference"),
    ]
    assert found.against[0].estimate.value == pytest.approx(0.02)
    assert found.against[1].estimate.low > 0.4
    assert {r.label for r in found.tied} == {"drop_rate=0.3", "average"}
    assert [r.baseline for r in found.baselines] == ["base", "math alone", "average"]
    assert found.noise == pytest.approx(0.01)
    assert mentions(found, "baseline_failed", "sum", "no room")
    assert mentions(found, "winners_curse", "6 candidates", "holdout")


def test_guards_come_before_the_objective():
    guards = ("english:max:1.25", "add:keep:0.9")
    trials = [
        trial(0, {"scale": 1.0}, right(90, english=1.5)),
        trial(1, {"scale": 2.0}, right(70, english=1.0)),
        trial(2, {"scale": 3.0}, right(60, english=1.0)),
    ]
    baselines = [
        baseline("math alone", right(72, english=1.3)),
        baseline("average", right(71, english=2.0)),
        baseline("sum", right(69, english=1.2)),
    ]
    data = study(trials, baselines, objective={"add": 1.0}, guards=guards)
    found = conclude(data)
    assert [r.settings["scale"] for r in found.ranking] == [2.0, 1.0, 3.0]
    assert found.ranking[1].broken == ("english is 1.5, above 1.25",)
    assert found.ranking[2].broken == (
        "add is 0.6, below 0.648 (to keep 0.9 of the best single model's 0.72)",
    )
    assert found.best == found.ranking[0]
    others = [d.other for d in found.against]
    assert others == ["math alone", "average", "sum"]  # no other setting keeps to the guards
    assert [r.label for r in found.tied] == ["sum"]
    none = conclude(replace(data, guards=("english:max:0.5",)))
    assert (none.best, none.against, none.tied) == (None, (), ())
    assert mentions(none, "all_break_guards", "6 candidates")
    assert "guard" in none.failure
    assert len(none.ranking) == 3


# ------------------------------------------------------------------------------------- simplicity


@pytest.mark.parametrize(
    ("other", "simpler"),
    [
        ({"method": "dare+ties"}, {"method": "linear"}),  # fewer stages
        ({"method": "dare+linear"}, {"method": "trim+linear"}),  # nothing random
        ({"method": "tsv", "scale": 1.0}, {"method": "linear", "scale": 0.5}),  # no whole matrices
        ({"method": "dare+tsv", "drop_rate": 0.0}, {"method": "dare+sum", "drop_rate": 0.5}),
        ({"drop_rate": 0.5}, {"drop_rate": 0.0}),  # which drops nothing
        ({"drop_rate": 0.5, "scale": 1.0}, {"drop_rate": 0.5}),  # fewer settings
    ],
)
def test_of_equal_settings_the_simplest_is_taken(other, simpler):
    found = conclude(study([trial(0, other, right(50)), trial(1, simpler, right(50))]))
    assert found.best.settings == simpler
    assert [r.settings for r in found.tied] == [other]


# ------------------------------------------------------------------------------------- notices


NOISY = [baseline("average", right(50)), baseline("average again", right(55))]
BITS = [
    trial(0, {"scale": 1.0}, right(50, loss=1.0)),
    trial(1, {"scale": 2.0}, right(40, 90, loss=2)),
]
ONE = [trial(0, {"scale": 1.0}, right(50))]
SEEDLESS = [trial(0, {"drop_rate": 0.0, "scale": 2.0}, right(50))]
RULE = {"match": "*mlp*", "drop_rate": 0.5}
ROUNDED = [trial(0, {"scale": 1.0}, Scored({"add": 0.1}, right(50).items))]
UNKNOWN = [trial(n, {"scale": float(n)}, Scored({"x": 0.1 * n})) for n in range(3)]
BY_SEEDS = [
    trial(n, {"scale": n // 5}, Scored({"x": n // 5 + 0.01 * (n % 5)}), n % 5) for n in range(10)
]
FAILED = [trial(0, {"scale": 1.0}, None)]
"""Trials of one scoring each, and what is to be said of them."""


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (study(rates(70, 69), NOISY), {"noisy_evaluator": ("0.05", "0.01"), "few_seeds": ()}),
        (study(rates(70, 60), NOISY), {"noisy_evaluator": None}),
        (study(ONE, seeds=(0, 1, 2)), {"seeds_missing": ("1 of 3",), "few_seeds": ("1 seed",)}),
        (
            study([trial(0, {"method": "linear"}, right(50))], seeds=(0, 1)),
            {"seeds_missing": None, "few_seeds": None},
        ),
        (study(SEEDLESS, seeds=(0, 1)), {"seeds_missing": None, "few_seeds": None}),
        (
            study(SEEDLESS, seeds=(0, 1), recipe={**RECIPE, "tensors": [RULE]}),
            {"seeds_missing": ("1 of 2",)},
        ),
        (
            study(BITS),
            {
                "scores_without_items": ("loss",),
                "items_left_out": ("90", "10"),
                "larger_is_better": ("loss=-1",),
            },
        ),
        (
            study(ROUNDED, guards=("add:keep:0.9",)),
            {"no_items": ("objective",), "guard_unchecked": ("add:keep:0.9",)},
        ),
        (
            study(UNKNOWN, [baseline("average", Scored({"x": 0.05}))]),
            {"no_items": ("per-item", "luck"), "winners_curse": ("4 candidates",)},
        ),
        (study(BY_SEEDS, seeds=range(5)), {"no_items": ("per-item", "seeds")}),
        (
            study(FAILED, [baseline("base", None)]),
            {"trials_failed": ("1 of 1 trial",), "baseline_failed": ("base",), "not_scored": ()},
        ),
    ],
)
def test_what_limits_an_answer_is_said(data, said):
    found = conclude(data)
    for code, subjects in said.items():
        assert mentions(found, code, *(subjects or ())) == (subjects is not None), code


def test_settings_that_were_stopped_early_were_to_choose_from_too():
    data = sample.make_search(guards=())  # three were stopped
    (said,) = (n.text for n in conclude(data, resamples=50).notices if n.code == "winners_curse")
    assert "26 candidates" in said  # 21 settings and 5 baselines
    assert "the 23 that were scored on all items" in said


def test_what_nothing_is_known_of():
    found = conclude(study(UNKNOWN, [baseline("average", Scored({"x": 0.05}))]))
    assert (found.best.objective, found.tied) == (Estimate(0.2), ())
    assert {d.verdict for d in found.against} == {"not known"}
    assert not mentions(found, "winners_curse", "intervals")
    assert conclude(study(rates(70, 60), NOISY)).noise == pytest.approx(0.05)
    assert conclude(study(rates(70, 60), NOISY[:1])).noise is None


def test_before_anything_is_scored():
    found = conclude(study(FAILED, [baseline("base", None)]))
    assert (found.ranking, found.best, found.baselines) == ((), None, ())
    assert "yet" in found.failure
    only = conclude(study([], [baseline("base", right(10))]))
    assert (only.best, only.ranking) == (only.baselines[0], ())
    assert only.best.objective.value == 0.1


# ------------------------------------------------------------------------------------- holdout


def held_out(*trials: Trial, **more) -> StudyData:
    baselines = [baseline("average", right(60)), baseline("base", right(30))]
    return study(rates(70, 65), baselines, holdout=trials, **more)


def test_the_holdout_says_by_how_much_the_winner_was_flattered():
    found = conclude(
        held_out(
            trial(0, {"drop_rate": 0.1}, right(60), name="winner"),
            trial(1, {"drop_rate": 0.2}, right(64), name="runner-up"),
            baseline("average", right(58)),
            baseline("base", right(32)),
        )
    ).holdout
    assert found.objective.value == 0.6
    assert found.objective.low < 0.6 < found.objective.high
    assert found.validation == 0.7
    assert found.loss == pytest.approx(0.1)
    assert [(d.other, d.verdict) for d in found.against] == [
        ("runner-up", "no clear difference"),
        ("average", "no clear difference"),
        ("base", "better"),
    ]
    assert found.looks == 1


def test_a_winner_is_held_against_the_same_seeds():
    trials = [trial(s, {"scale": 1.0}, right(k), s) for s, k in enumerate((60, 70, 80))]
    winner = trial(0, {"scale": 1.0}, right(65), 2, name="winner")
    found = conclude(study(trials, seeds=(0, 1, 2), holdout=(winner,))).holdout
    assert found.validation == 0.8
    assert found.loss == pytest.approx(0.15)


@pytest.mark.parametrize(
    ("held", "moved"), [(72, "0.02 higher"), (69, "0.01 lower"), (70, "no change")]
)
def test_the_change_of_the_winner_is_said_as_it_is(held, moved):
    found = conclude(held_out(trial(0, {"drop_rate": 0.1}, right(held), name="winner")))
    assert moved in holdout_text(found.holdout)


def test_a_second_winner_is_a_second_look():
    first = trial(0, {"drop_rate": 0.2}, right(60), name="winner before")
    second = trial(1, {"drop_rate": 0.1}, right(55), name="winner")
    found = conclude(held_out(first, second))
    assert (found.holdout.looks, found.holdout.objective.value) == (2, 0.55)
    assert mentions(found, "holdout_reused", "2 winners")
    stale = conclude(held_out(first))
    assert stale.holdout is None
    assert mentions(stale, "holdout_outdated")
    seeds = [replace(second, seed=seed) for seed in range(3)]
    assert conclude(held_out(*seeds)).holdout.looks == 1


WON = trial(0, {"drop_rate": 0.1}, right(60), name="winner")
BROKE = replace(WON, scored=None, state=State.FAILED, message="exit status 1")
TWICE = (baseline("sum", right(80)), baseline("average", right(58)))


@pytest.mark.parametrize(
    ("data", "is_held", "said"),
    [
        (held_out(), False, {}),
        (held_out(BROKE), False, {"holdout_failed": ("exit status 1",)}),
        (
            held_out(replace(WON, scored=Scored({"sort": 0.5})), objective={"add": 1.0}),
            False,
            {"holdout_failed": ("'add'",)},
        ),
        (
            held_out(replace(WON, scored=right(5)), guards=("add:min:0.2",)),
            True,
            {"holdout_guard": ("add is 0.05, below 0.2",)},
        ),
        (held_out(WON, *TWICE), True, {"holdout_disagrees": ("sum",)}),
        (held_out(replace(WON, scored=right(78)), *TWICE), True, {"holdout_disagrees": None}),
        (held_out(WON, *TWICE, guards=("add:max:0.75",)), True, {"holdout_disagrees": None}),
    ],
)
def test_a_holdout_that_failed_does_not_fit_or_disagrees_is_said(data, is_held, said):
    found = conclude(data)
    assert (found.holdout is not None, found.best.settings) == (is_held, {"drop_rate": 0.1})
    for code, subjects in said.items():
        assert mentions(found, code, *(subjects or ())) == (subjects is not None), code


def test_a_baseline_that_is_best_has_a_holdout_of_its_own_name():
    held = (baseline("math alone", right(60)), baseline("base", right(30)))
    baselines = [baseline("math alone", right(90)), baseline("base", right(32))]
    found = conclude(study(rates(50), baselines, holdout=held))
    assert (found.holdout.objective.value, found.holdout.validation) == (0.6, 0.9)
    assert [(d.other, d.verdict) for d in found.holdout.against] == [("base", "better")]
    assert found.holdout.looks == 1


# ------------------------------------------------------------------------------------- baselines


SIMPLEST_FIRST = ("base", "math alone", "average", "sum")


def only_baselines(*scored, **more) -> Conclusion:
    """The conclusion while nothing else is scored; of all baselines, or the first of them."""
    found = [baseline(name, s) for name, s in zip(SIMPLEST_FIRST, scored, strict=False)]
    return conclude(study([], found, **more))


@pytest.mark.parametrize(
    ("counts", "taken"),
    [
        ((52, 52, 52, 52), "base"),  # of equal ones the simplest
        ((50, 81, 81, 81), "math alone"),
        ((50, 60, 82, 82), "average"),
        ((50, 60, 60, 91), "sum"),
        ((50, 51, 52, 53), "sum"),
    ],
)
def test_the_best_baseline_is_taken_and_compared_with_all_others(counts, taken):
    found = only_baselines(*map(right, counts))
    assert found.best.baseline == taken
    verdicts = {item.other: item.verdict for item in found.against}
    assert verdicts.keys() == set(SIMPLEST_FIRST) - {taken}
    assert "worse" not in verdicts.values()
    assert {r.short for r in found.tied} == {
        name for name, said in verdicts.items() if said == "no clear difference"
    }


def test_baselines_of_the_version_before_are_read_and_not_compared():
    former = [baseline(name, right(90)) for name in ("advice", "small sum")]
    found = conclude(study(rates(50, 60), [baseline("base", right(40)), *former]))
    assert {trial.role for trial in former} == {Role.FORMER}
    assert [r.baseline for r in found.baselines] == ["base"]
    assert found.best.settings == {"drop_rate": 0.2}
    assert {d.other for d in found.against} == {"trial 0", "base"}


def test_what_has_the_weights_of_the_best_is_not_named_beside_it():
    twins = [baseline("average", right(50), digest="a"), baseline("sum", right(50), digest="b")]
    found = conclude(study([trial(0, {"method": "linear"}, right(50), digest="a")], twins))
    assert (found.best.baseline, [r.short for r in found.tied]) == ("average", ["sum"])


# ------------------------------------------------------------------------------------- tasks


def of_tasks(**counts: int) -> Scored:
    """So many right items of each task, of 100."""
    return of_items(
        {f"{name}/{n}": float(n < count) for name, count in counts.items() for n in range(100)}
    )


def test_tasks_stand_beside_the_base_the_best_single_model_at_each_and_the_average():
    baselines = [
        baseline("base", of_tasks(add=10, sort=20)),
        baseline("math alone", of_tasks(add=90, sort=20)),
        baseline("code alone", of_tasks(add=10, sort=60)),
        baseline("average", of_tasks(add=40, sort=30)),
    ]
    data = study([trial(0, {"scale": 2.0}, of_tasks(add=70, sort=64))], baselines)
    every, add, sort = conclude(data).tasks
    assert [task.name for task in (every, add, sort)] == ["", "add", "sort"]
    assert [task.items for task in (every, add, sort)] == [200, 100, 100]
    assert [task.alone for task in (every, add, sort)] == ["math", "math", "code"]
    shown = [
        [round(100 * e.value) for e in (t.base, t.single, t.average, t.best)]
        for t in (every, add, sort)
    ]
    assert shown == [[15, 55, 35, 67], [10, 90, 40, 70], [20, 60, 30, 64]]
    changes = [(round(100 * t.change.estimate.value), t.change.verdict) for t in (every, add, sort)]
    assert changes == [(12, "better"), (-20, "worse"), (4, "no clear difference")]


def test_a_task_that_a_merge_has_lost_is_noticed():
    baselines = [
        baseline("math alone", of_tasks(add=98, sort=0)),
        baseline("code alone", of_tasks(add=1, sort=20)),
    ]
    data = study([trial(0, {"scale": 2.0}, of_tasks(add=1, sort=99))], baselines)
    (lost,) = (found for found in conclude(data).notices if found.code == "task_lost")
    assert all(word in lost.text for word in ("add", "97.0 points", "math alone"))
    assert "sort" not in lost.text
    assert "--guard" in lost.remedy
    kept = [trial(0, {"scale": 2.0}, of_tasks(add=98, sort=99))]
    assert not mentions(conclude(study(kept, baselines)), "task_lost")
    alone = [*baselines, baseline("other alone", of_tasks(add=50, sort=100))]
    answer = conclude(study([], alone))  # of a model alone, nobody expects everything
    assert (answer.best.baseline, mentions(answer, "task_lost")) == ("other alone", False)


def test_a_loss_against_the_base_is_noticed_though_it_is_won_against_the_models():
    baselines = [
        baseline("base", of_tasks(add=95, sort=0)),
        baseline("math alone", of_tasks(add=40, sort=0)),
        baseline("code alone", of_tasks(add=3, sort=90)),
    ]
    data = study([trial(0, {"scale": 2.0}, of_tasks(add=60, sort=99))], baselines)
    assert mentions(conclude(data), "task_lost", "add lost 35.0 points against the base")


def test_other_settings_with_the_same_weights_are_not_the_runner_up():
    trials = [
        trial(0, {"scale": 1.0}, right(70), digest="a"),
        trial(1, {"scale": 2.0}, right(69), digest="b"),
        trial(2, {"scale": 3.0}, right(70), digest="c"),
    ]
    found = conclude(study(trials, [baseline("average", right(70), digest="a")]))
    assert found.best.baseline == "average"
    assert found.runner_up.trials == (2,)
    assert winners(found) == {Role.RUNNER_UP: found.runner_up}
    assert found.against[0].other == "trial 2"
    assert [ranked.trials for ranked in found.tied] == [(2,), (1,)]


def bits(value):
    return of_items({f"text/{n}": value + 0.01 * (n % 5) for n in range(50)})


def test_a_loss_of_bits_is_noticed_without_points():
    baselines, more = [baseline("math alone", bits(0.5))], {"objective": {"text": -1.0}}
    held = (trial(0, {"scale": 2.0}, bits(0.9), name="winner"), *baselines)
    data = study([trial(0, {"scale": 2.0}, bits(0.4))], baselines, holdout=held, **more)
    assert mentions(conclude(data), "task_lost", "text lost 0.40 against math alone")


@pytest.mark.parametrize(
    ("alone", "base", "said"),
    [
        (58, 20, "not shown to be better than math alone"),
        (20, 62, "not shown to be better than the base"),
        (59, 61, "not shown to be better than the base"),  # the better of the two
        (90, 20, "worse than math alone"),
        (20, 30, None),
    ],
)
def test_the_answer_says_what_a_merge_is_not_shown_to_be_better_than(alone, base, said):
    baselines = [baseline("math alone", right(20)), baseline("base", right(10))]
    held = (WON, baseline("math alone", right(alone)), baseline("base", right(base)))
    data = study(rates(90), baselines, holdout=held)
    title, tone, sure = headline(data, conclude(data))
    assert title.startswith("Merge math and code")
    assert (said or "Merge") in title
    assert ("held-out" in title, tone is Tone.GOOD) == (said is not None, said is None)
    assert ("beyond chance" in sure) == (said is None)
    chosen = study(rates(90), [baseline("math alone", right(88))])  # nothing is held out
    title, *_ = headline(chosen, conclude(chosen))
    assert ("than math alone" in title, "held-out" in title) == (True, False)
    broken = study(rates(90), [baseline("math alone", right(88))], guards=("add:min:0.89",))
    assert headline(broken, conclude(broken))[0] == "Merge math and code"


def test_fewer_bits_are_a_gain_and_an_error_is_no_share():

    baselines = [baseline("math alone", bits(0.9)), baseline("code alone", bits(0.8))]
    data = study([trial(0, {"scale": 2.0}, bits(0.5))], baselines, objective={"text": -1.0})
    (task,) = conclude(data).tasks
    assert (task.alone, task.change.verdict) == ("code", "better")
    assert task.change.estimate.value == pytest.approx(-0.3)
    assert task.best.value == pytest.approx(0.52)
    assert not task.is_share


def test_scores_by_task_are_those_of_the_holdout_and_the_single_model_is_that_of_the_choice():
    scores = {"math alone": (80, 60), "code alone": (70, 65)}
    baselines = [baseline(name, right(chosen)) for name, (chosen, _) in scores.items()]
    held = [baseline(name, right(found)) for name, (_, found) in scores.items()]
    winner = trial(0, {"drop_rate": 0.1}, right(75), name="winner")
    data = study(rates(90), baselines, holdout=(winner, *held))
    (task,) = conclude(data).tasks
    assert (task.alone, task.single.value, task.best.value) == ("math", 0.6, 0.75)
    assert task.change.estimate.value == pytest.approx(0.15)
