"""Studies with made-up numbers, and conclusions that fit them; nothing here is random."""

from __future__ import annotations

import statistics
from dataclasses import replace
from typing import Any

from dare.documents.notices import notice
from dare.studies.results import (
    Conclusion,
    Difference,
    Estimate,
    Holdout,
    Ranked,
    Scored,
    State,
    StudyData,
    TaskScores,
    Trial,
    group_means,
)
from dare.studies.study import Charter

SCORES = ("add", "sort", "english")
RECIPE = {
    "method": "dare+sum",
    "models": {"base_file": "base", "merge_files": ["add", "sort"]},
}
CHARTER = Charter(
    recipe={"models": {"base_file": "base", "merge_files": ["math", "code"]}},
    space={"drop_rate": {"from": 0.1, "to": 0.9}, "scale": {"from": 0.5, "to": 2.0}},
    sampler="tpe",
    seeds=1,
    evaluator="score.py:score",
    objective={},
    guards=(),
    race=False,
    seed=0,
)


def of_items(items: dict[str, float], **more: float) -> Scored:
    """Scores that are the means of groups of items, and more of them."""
    return Scored(group_means(items) | more, items)


def make_scored(quality: float, *, items: bool = True) -> Scored:
    """Scores for a quality from 0 to 1: of ten items a task, so many are right."""
    right = {task: round(10 * (quality if task == "add" else quality**2)) for task in SCORES[:2]}
    return Scored(
        {task: count / 10 for task, count in right.items()} | {"english": 1.5 - quality / 4},
        {
            f"{task}/{n}+{n}": float(n < count)
            for task, count in right.items()
            for n in range(10 if items else 0)
        },
        seconds=1.5,
        output=f"quality {quality:.2f}",
    )


def make_trial(number: int, settings: dict[str, Any], quality: float, **known: Any) -> Trial:
    scored = make_scored(quality, items=known.pop("items", True))
    objective = statistics.mean(scored.scores[task] for task in SCORES[:2])
    done = {"seed": 0, "state": State.DONE, "objective": objective, "seconds": 2.0}
    return Trial(number, settings, scored=scored, **{**done, **known})


def make_baselines(items: bool = True) -> tuple[Trial, ...]:
    qualities = {"base": 0.1, "add alone": 0.5, "sort alone": 0.45, "average": 0.7, "sum": 0.8}
    return tuple(
        make_trial(place, {}, quality, name=name, items=items)
        for place, (name, quality) in enumerate(qualities.items())
    )


FAILED = {"scored": None, "objective": None, "output": "Traceback …\nMemoryError", "seconds": 0.5}


def make_search(count: int = 24, *, items: bool = True, **known: Any) -> StudyData:
    """Over method, drop rate and scale; some failed, some were stopped, some break a guard."""
    methods = ("dare+sum", "dare+ties", "sum")
    made = []
    for number in range(count):
        method = methods[number % 3]
        settings: dict[str, Any] = {"method": method, "scale": 0.5 + (number * 7 % 24) / 16}
        if method != "sum":
            settings["drop_rate"] = 0.1 + (number * 5 % 17) / 20
        quality = 0.9 - abs(settings["scale"] - 1.1) / 2 - settings.get("drop_rate", 0.4) / 5
        known_of_it = {
            5: {"state": State.FAILED, "message": "the command ended with status 1", **FAILED},
            6: {"state": State.STOPPED, "message": "after 4 items"},
            7: {"broken": ("english is 1.31, above 1.25",)},
        }.get(number % 8, {})
        made.append(replace(make_trial(number, settings, quality, items=items), **known_of_it))
    return StudyData(
        **{
            "recipe": RECIPE,
            "space": {"method": list(methods), "scale": [0.5, 2.0], "drop_rate": [0.1, 0.9]},
            "sampler": "tpe",
            "planned": count,
            "seeds": (0,),
            "evaluator": "python score.py {model}",
            "objective": {"add": 1.0, "sort": 1.0},
            "guards": ("english:max:1.25",),
            "baselines": make_baselines(items),
            "trials": tuple(made),
            "notices": (notice("no_advice", reason="the models were not analysed"),),
            **known,
        }
    )


def make_sweep(rates: tuple[float, ...] = (0.5, 0.7, 0.9, 0.95), seeds: int = 5) -> StudyData:
    """Over the drop rate, with several seeds."""
    trials = [
        make_trial(
            place * seeds + seed,
            {"drop_rate": rate},
            0.95 - rate**6 / 2 + (seed - seeds // 2) * 0.03,
            seed=seed,
        )
        for place, rate in enumerate(rates)
        for seed in range(seeds)
    ]
    return make_search(
        0,
        trials=tuple(trials),
        planned=len(trials),
        space={"drop_rate": list(rates)},
        sampler="grid",
        seeds=tuple(range(seeds)),
        guards=(),
    )


def make_ranked(trials: list[Trial], *, baseline: str = "") -> Ranked:
    value = statistics.mean(trial.objective or 0.0 for trial in trials)
    names = [name for name in SCORES if trials[0].scored and name in trials[0].scored.scores]
    return Ranked(
        trials[0].settings,
        tuple(trial.number for trial in trials),
        Estimate(value, value - 0.04, value + 0.03),
        {
            name: statistics.mean(trial.scored.scores[name] for trial in trials if trial.scored)
            for name in names
        },
        trials[0].broken,
        baseline,
    )


def make_conclusion(data: StudyData) -> Conclusion:
    """What could be concluded: those within 0.03 of the best are tied with it."""
    by_setting: dict[str, list[Trial]] = {}
    for trial in data.trials:
        if trial.is_done:
            by_setting.setdefault(repr(trial.settings), []).append(trial)
    ranking = sorted(
        map(make_ranked, by_setting.values()), key=lambda r: (bool(r.broken), -r.objective.value)
    )
    baselines = [make_ranked([trial], baseline=trial.name) for trial in data.baselines]
    kept = [ranked for ranked in (*ranking, *baselines) if not ranked.broken]
    best = max(kept, key=lambda ranked: ranked.objective.value, default=None)
    gaps = {r.key: best.objective.value - r.objective.value for r in kept if r is not best}
    tied = [r for r in kept if gaps.get(r.key, 1.0) < 0.03]
    against = tuple(
        Difference(
            r.short,
            Estimate(gaps[r.key], gaps[r.key] - 0.05, gaps[r.key] + 0.05),
            "better" if gaps[r.key] > 0.05 else "no clear difference",
        )
        for r in baselines
        if r.key in gaps
    )
    tied_on_holdout = Difference("sum", Estimate(0.02, -0.04, 0.08), "no clear difference")
    holdout = Holdout(Estimate(0.78, 0.7, 0.85), (tied_on_holdout,), 0.85, loss=0.07, looks=1)
    estimates = (Estimate(q, q - 0.1, q + 0.1) for q in (0.1, 0.5, 0.7, 0.8))
    return Conclusion(
        ranking=tuple(ranking),
        baselines=tuple(baselines),
        best=best,
        against=against,
        tied=tuple(tied),
        noise=0.002,
        holdout=holdout if best else None,
        tasks=(TaskScores("add", 10, True, *estimates),) if best else (),
        notices=(notice("winners_curse", candidates=40, intervals=""),),
    )
