"""The tables and sentences of docs/evidence.md."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

import numpy as np
from evidence import (
    DROPPED,
    LEAST_GAIN_POINTS,
    NEWEST,
    RATES,
    USUAL_RATES,
    VERDICTS,
    WAYS,
    Cell,
    Estimate,
    Evidence,
    Record,
    Values,
    against_base,
    balance,
    beyond,
    differences,
    effects_by_count,
    estimate,
    group,
    methods,
    own_task,
    rank_correlation,
    shares,
    shares_by_rate,
    storings,
    tally,
    way_and_size,
    with_minus,
)

BY_KIND = (
    *("sum", "ties", "tsv", "iso", "model_stock"),
    *("dare+linear 0.5", "dare+linear 0.9", "dare+sum 0.5"),
)
OTHERS = ("base", "best single", "joint", "sum", "linear tuned", "linear without strangers")
"""Candidates that everybody has, beside the average."""
FOR_ALL_SETS = ("balanced", "ties", "tsv", "iso", "model_stock", "consensus", "trim+ties")
"""Methods that were tuned on every set, beside the average."""
BESIDE_NEWEST = ("linear", "tsv", "iso", "wudi")
"""Older methods that the newest ones are shown with."""
INSTEAD = ("linear", "tsv", "iso", "ties", "balanced", *NEWEST)
"""Methods that might be advised where changes are small; they are scored at every scale."""
SAFE_SHARE = 0.95
"""Of the gain: what a safe way of storing keeps of every group of models, on average."""
LATE = ("prototypes", "typefaces")
"""Bases that were made after the outcomes of advice were fixed."""
RIVALS = ("base", "best single", "average", "sum", "search")
"""What advice is held against."""
LOST_POINTS = 5.0
"""A merge this far below the base has lost what the base could do; less may be chance."""
NOTHING_STORED = "No results are stored yet."
BLOCKS: dict[str, Callable[[Evidence], str]] = {}
"""By the name that the page has for them. A block of one line may stand within a sentence."""


def block(make: Callable[[Evidence], str]) -> Callable[[Evidence], str]:
    """Offer a function's text to the page, by the function's name."""
    BLOCKS[make.__name__.replace("_", "-")] = make
    return make


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table in Markdown; all columns but the first are aligned to the right."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def pivot(corner: str, cells: Sequence[Cell], write: Callable[[Estimate], str]) -> str:
    """A table of estimates: a row for each series, a column for each x."""
    columns = list(dict.fromkeys(cell.x for cell in cells))
    rows: dict[str, dict[str, str]] = {}
    for cell in cells:
        name = ", ".join(filter(None, (cell.panel, cell.series)))
        rows.setdefault(name, {})[cell.x] = write(cell.estimate)
    return table(
        (corner, *columns),
        [(name, *(row.get(x, "–") for x in columns)) for name, row in rows.items()],
    )


# ---------------------------------------------------------------- sets


@block
def measured(evidence: Evidence) -> str:
    rows = []
    for world, sets in group(evidence.sets + evidence.images, lambda s: s["world"]).items():
        first, items = sets[0], [entry["items"][1] for entry in sets]
        counts = [len(entry["models"]) for entry in sets]
        width = np.median([entry["scores"]["base"]["half_width"] for entry in sets])
        rows.append(
            (
                world,
                f"{first['about']}, {first['relation']}",
                f"{first['parameters'] / 1e6:.2f}",
                len(sets),
                f"{min(counts)} to {max(counts)}",
                len({model for entry in sets for model in entry["models"]}),
                f"{min(items)} to {max(items)}",
                f"± {width:.1f}" + (" dB" if first in evidence.images else ""),
            )
        )
    columns = "base|data, tasks differ by|million parameters|sets|models in a set|different models"
    return table((*columns.split("|"), "test items", "average against base"), rows)


@block
def amounts(evidence: Evidence) -> str:
    every = evidence.sets + evidence.images
    bases = {entry["world"] for entry in every}
    return f"{len(every)} sets of models from {len(bases)} bases"


Write = Callable[[list[Record], str], str]


def kinds(evidence: Evidence) -> dict[str, list[Record]]:
    """The sets of each kind."""
    return group(evidence.sets, lambda entry: str(entry["kind"]))


def by_kind(evidence: Evidence, names: Iterable[str], write: Write) -> str:
    """A row for each kind of set, and one for all; a column for each name."""
    parts = {**kinds(evidence), "**all**": evidence.sets}
    rows = [(kind, len(sets), *(write(sets, n) for n in names)) for kind, sets in parts.items()]
    return table(("kind of set", "sets", *(f"`{name}`" for name in names)), rows)


def _difference(sets: list[Record], name: str, other: str = "linear") -> str:
    return estimate(differences(sets, name, other)).points


def _beside_average(sets: list[Record], name: str) -> list[str]:
    return [tally(sets, name), _difference(sets, name)]


@block
def others(evidence: Evidence) -> str:
    rows = [(name, *_beside_average(evidence.sets, name)) for name in OTHERS]
    return table(("instead of the average", "wins / ties / loses", "points"), rows)


@block
def average(evidence: Evidence) -> str:
    return by_kind(evidence, OTHERS, lambda sets, name: _difference(sets, "linear", name))


@block
def methods_by_kind(evidence: Evidence) -> str:
    return by_kind(evidence, BY_KIND, lambda sets, n: "<br>".join(_beside_average(sets, n)))


@block
def dare_by_kind(evidence: Evidence) -> str:
    return by_kind(evidence, DROPPED, lambda sets, name: _difference(sets, name, DROPPED[name]))


@block
def without_dare(evidence: Evidence) -> str:
    sets = evidence.sets
    rows = [
        (
            f"`{name}`",
            len(differences(sets, name)),
            *_beside_average(sets, name),
            *_beside_average(sets, f"{name} tuned"),
            _difference(sets, f"{name} tuned", "linear tuned"),
        )
        for name in methods(sets)
    ]
    columns = "method|sets|as it is|points|tuned|points|tuned, minus tuned average"
    return table(columns.split("|"), rows)


@block
def newest(evidence: Evidence) -> str:
    """The newest methods on the sets that have them all, and which of them are better than what."""
    names, rivals = (*NEWEST, *BESIDE_NEWEST), ("linear", "tsv")
    sets = [s for s in evidence.sets if all(f"{name} tuned" in s["scores"] for name in NEWEST)]
    if not sets:
        return NOTHING_STORED
    found = {
        name: [estimate(differences(sets, f"{name} tuned", f"{rival} tuned")) for rival in rivals]
        for name in names
    }
    rows = [
        (
            f"`{name}`",
            len(differences(sets, name)),
            *_beside_average(sets, name),
            *(against.points for against in found[name]),
        )
        for name in sorted(names, key=lambda name: -found[name][0].mean)
    ]
    better = [
        f"than tuned `{rival}`: "
        + (", ".join(f"`{name}`" for name in NEWEST if found[name][number].low > 0) or "none")
        for number, rival in enumerate(rivals)
    ]
    bases = len({entry["world"] for entry in sets})
    columns = "method|sets|as it is|points|tuned, minus tuned average|tuned, minus tuned `tsv`"
    return (
        f"{table(columns.split('|'), rows)}\n\n"
        f"From {bases} bases. Better beyond chance {'; '.join(better)}."
    )


@block
def with_dare(evidence: Evidence) -> str:
    sets = evidence.sets
    rows = []
    for name in methods(sets):
        variants = [(f"dare+{name} {rate}", name) for rate in USUAL_RATES]
        variants.append((f"dare+{name} tuned", f"{name} tuned"))
        if differences(sets, *variants[0]):
            tallies = [tally(sets, dropped) for dropped, _ in variants]
            rows.append((f"`{name}`", *tallies, *(_difference(sets, *pair) for pair in variants)))
    columns = "after DARE|0.5|0.9|tuned|0.5, minus without DARE|0.9, minus without|both tuned"
    return table(columns.split("|"), rows)


@block
def images(evidence: Evidence) -> str:
    names = ("base", "best single", "linear", "sum", "ties", *list(DROPPED)[:3])
    rows = [
        (f"{s['world']}: {s['kind']}", *(f"{s['scores'][name]['score']:.2f}" for name in names))
        for s in evidence.images
    ]
    return table(("PSNR in dB", *names), rows) if rows else NOTHING_STORED


# ---------------------------------------------------------------- in short


def dare_effects(evidence: Evidence) -> dict[tuple[str, str], Estimate]:
    """What DARE does to merges, by the method with it and without."""
    tuned = {f"dare+{name} tuned": f"{name} tuned" for name in ("linear", "ties")}
    pairs = (DROPPED | tuned).items()
    return {pair: estimate(differences(evidence.sets, *pair)) for pair in pairs}


@block
def verdicts(evidence: Evidence) -> str:
    rows = [
        (f"`{dropped}` instead of `{plain}`", found.points, found.verdict)
        for (dropped, plain), found in dare_effects(evidence).items()
    ]
    return table(("merge", "points", "DARE"), rows)


@block
def where(evidence: Evidence) -> str:
    """The kinds of sets in which DARE helps, is free or hurts."""
    rows = []
    for dropped, plain in DROPPED.items():
        found: dict[str, list[str]] = {verdict: [] for verdict in VERDICTS}
        for kind, sets in kinds(evidence).items():
            found[estimate(differences(sets, dropped, plain)).verdict].append(f"`{kind}`")
        rows.append((f"`{dropped}`", *(", ".join(names) or "–" for names in found.values())))
    return table(("DARE", *VERDICTS), rows)


@block
def short(evidence: Evidence) -> str:
    """The answers, a sentence or two each."""
    effects = Counter(found.verdict for found in dare_effects(evidence).values())
    verdicts = ", ".join(f"{verdict} {effects[verdict]}" for verdict in VERDICTS)
    by_size = "; ".join(
        f"{label}: {estimate(shares(models, 'rescaled', '0.9')).percent}"
        for label, models in sorted(group(evidence.gainers, way_and_size).items())
    )
    tuned = {
        name: estimate(differences(evidence.sets, f"{name} tuned", "linear tuned"))
        for name in FOR_ALL_SETS
    }
    best = max(tuned, key=lambda name: tuned[name].mean)
    sentences = (
        f"**Merges.** DARE in the {effects.total()} rows above: {verdicts}.",
        f"**One model.** The share of its gain that a model keeps at a drop rate of 0.9, by kind "
        f"of training and size of the change relative to the base: {by_size}.",
        f"**Scale.** Tuning its scale is worth {_difference(evidence.sets, 'linear tuned')} points "
        f"to the average. The best of the methods tuned the same way on all sets is `{best}`: "
        f"{tuned[best].points} points compared with the tuned average.",
        f"**Files.** {safe_storage(evidence)}",
    )
    return "\n".join(f"- {sentence}" for sentence in sentences)


# ---------------------------------------------------------------- single models


@block
def left_out(evidence: Evidence) -> str:
    every, enough = len(evidence.models), len(evidence.gainers)
    return f"{every - enough} of {every} models gained less than {LEAST_GAIN_POINTS:g} points"


@block
def tolerance(evidence: Evidence) -> str:
    return pivot("gain kept", shares_by_rate(evidence), lambda found: found.percent)


@block
def counts(evidence: Evidence) -> str:
    return pivot("models", effects_by_count(evidence), lambda found: found.points)


@block
def tolerance_by_base(evidence: Evidence) -> str:
    rows = []
    by_base = group(evidence.gainers, lambda model: f"{model['world']}, {WAYS[model['way']]}")
    for label, models in by_base.items():
        found = [estimate(shares(models, "rescaled", rate)).percent for rate in RATES]
        rows.append((label, len(models), *found))
    return table(("base", "models", *RATES), rows)


@block
def lora(evidence: Evidence) -> str:
    """LoRA and full fine-tunes of the same tasks, where both gained enough."""
    usual = [m for m in evidence.gainers if m["strength"] == "usual"]
    tasks = group(usual, lambda m: m["world"] + m["model"].removeprefix(m["way"]))
    pairs = [sorted(pair, key=lambda m: m["way"]) for pair in tasks.values() if len(pair) == 2]
    cells = []
    for rate in RATES:
        full, low_rank = (shares([p[i] for p in pairs], "rescaled", rate) for i in (0, 1))
        gaps = [(base, b - a) for (base, a), (_, b) in zip(full, low_rank, strict=True)]
        named = {"full": full, "LoRA": low_rank, "LoRA minus full": gaps}
        cells += [Cell(rate, name, estimate(values)) for name, values in named.items()]
    norms = (np.mean([pair[i]["relative_norm"] for pair in pairs]) for i in (0, 1))
    sizes = "Mean ‖δ‖ / ‖base‖: {:.3f} full, {:.3f} LoRA.".format(*norms)
    return pivot(f"gain kept, {len(pairs)} tasks", cells, lambda e: e.percent) + f"\n\n{sizes}"


@block
def embeddings(evidence: Evidence) -> str:
    full = [m for m in evidence.gainers if "embeddings" in m and m["way"] == "full"]
    cells = [
        Cell(
            f"{about} ({len(models)} models)", rates, estimate(shares(models, "embeddings", rates))
        )
        for about, models in group(full, lambda model: str(model["about"])).items()
        for rates in models[0]["embeddings"]
    ]
    return pivot("drop rates", cells, lambda found: found.percent)


@block
def seeds(evidence: Evidence) -> str:
    records = [{"world": q["world"], **q["shared"]} for q in evidence.questions]
    rows = []
    for name in (dropped for dropped, plain in DROPPED.items() if plain != "ties"):
        found = estimate(differences(records, f"{name}, own", f"{name}, shared"))
        rows.append((f"`{name}`", len(records), found.points, found.verdict))
    return table(("three models", "bases", "own minus shared", "masks of their own"), rows)


# ---------------------------------------------------------------- for the pages on ideas


@block
def survives(evidence: Evidence) -> str:
    """What models and merges do to tasks that the base has done before."""
    sets = [entry for entry in evidence.sets if not entry["strangers"]]
    singles = [
        (entry, place, own_task(m)) for entry in sets for place, m in enumerate(entry["models"])
    ]
    found: dict[str, Values] = {
        "one fine-tune, tasks that it was not trained on": [
            (entry["world"], points)
            for entry, place, own in singles
            for task, points in against_base(entry, f"single {place}").items()
            if task != own
        ]
    }
    for name in ("linear", "sum", "ties", "tsv", "model_stock"):
        scored = [(entry["world"], against_base(entry, name)) for entry in sets]
        found[f"`{name}` of all"] = [(base, p) for base, own in scored for p in own.values()]
    rows = [
        (
            label,
            len(values),
            estimate(values).points,
            f"{sum(points < -LOST_POINTS for _, points in values) / len(values):.0%}".replace(
                "%", " %"
            ),
        )
        for label, values in found.items()
    ]
    return table(
        ("", "scores", "points against the base", f"more than {LOST_POINTS:g} below"), rows
    )


@block
def surviving_sets(evidence: Evidence) -> str:
    sets = [entry for entry in evidence.sets if not entry["strangers"]]
    return f"{len(sets)} sets from {len({entry['world'] for entry in sets})} bases"


@block
def opposed(evidence: Evidence) -> str:
    """Sets in which one model was taught wrong answers."""
    sets = kinds(evidence)["opposed"]
    names = (
        "linear without strangers",
        "iso",
        "model_stock",
        "ties",
        "dare+ties 0.5",
        "dare+ties 0.9",
    )
    return table(
        (f"instead of the average, {len(sets)} sets", "wins / ties / loses", "points"),
        [(f"`{name}`", *_beside_average(sets, name)) for name in names],
    )


@block
def trimming(evidence: Evidence) -> str:
    """Trimming and dropping, each against the same method without it."""
    rows = []
    for plain in ("ties", "sum"):
        for name in (f"trim+{plain}", f"dare+{plain} 0.5", f"dare+{plain} 0.9"):
            sets = [s for s in evidence.sets if {name, f"trim+{plain}"} <= s["scores"].keys()]
            rows.append(
                (f"`{name}` instead of `{plain}`", len(sets), _difference(sets, name, plain))
            )
    return table(("merge", "sets", "points"), rows)


# ---------------------------------------------------------------- how far it goes


MEASURES: dict[str, tuple[Callable[[Record], float], tuple[float, ...]]] = {
    "‖δ‖ / ‖base‖": (lambda model: model["relative_norm"], (0.005, 0.01, 0.02, 0.05, 0.1)),
    "mean │δ│": (lambda model: model["mean_magnitude"], (0.0005, 0.002, 0.005, 0.03)),
    "predicted error": (lambda model: model["predicted error"]["0.9"], (0.05, 0.1, 0.2, 0.5, 1.0)),
}
"""What may tell how much dropping costs, with the edges of its classes."""


@block
def sizes(evidence: Evidence) -> str:
    return "\n\n".join(_binned(evidence.gainers, name, *MEASURES[name]) for name in MEASURES)


@block
def ranks(evidence: Evidence) -> str:
    models = evidence.gainers
    rows = [
        (name, *(f"{rank_correlation(models, size, same_base=s):.2f}" for s in (True, False)))
        for name, (size, _) in MEASURES.items()
    ]
    return with_minus(table(("measure", "models of one base", "models of different bases"), rows))


def _binned(
    gainers: list[Record], name: str, size: Callable[[Record], float], edges: Sequence[float]
) -> str:
    """The gain kept at a drop rate of 0.9, by the size of something."""
    rows = []
    for low, high in pairwise((0.0, *edges, np.inf)):
        models = [model for model in gainers if low <= size(model) < high]
        if found := shares(models, "rescaled", "0.9"):
            label = f"from {low:g}" if high == np.inf else f"{low:g} to {high:g}"
            worst = _percent(min(share for _, share in found))
            rows.append((label, len(found), estimate(found).percent, worst))
    return table((name, "models", "gain kept at 0.9", "worst model"), rows)


def _percent(share: float) -> str:
    return with_minus(f"{100 * share:z.0f} %")


# ---------------------------------------------------------------- delta files


@block
def stored(evidence: Evidence) -> str:
    found = storings(evidence)
    groups = list(dict.fromkeys(entry.models for entry in found))
    rows = []
    for scheme in dict.fromkeys(entry.scheme for entry in found):
        entries = {entry.models: entry for entry in found if entry.scheme == scheme}
        kept = [f"{entries[g].kept.percent}<br>worst {_percent(entries[g].worst)}" for g in groups]
        rows.append((scheme, f"{np.mean([e.bits for e in entries.values()]):.2f}", *kept))
    return table(("scheme", "bits", *groups), rows)


@block
def magnitude(evidence: Evidence) -> str:
    """Each scheme that keeps the largest changes, beside its best rival."""
    found = storings(evidence)
    rivals = [(entry, entry.best_rival(found)) for entry in found if not entry.is_random]
    rows = [
        (entry.models, entry.title, rival.title, entry.kept.percent, entry.minus(rival).percent)
        for entry, rival in rivals
        if rival
    ]
    columns = "models|scheme (bits)|best random scheme that is no larger|gain kept|difference"
    return table(columns.split("|"), rows)


def safe_storage(evidence: Evidence) -> str:
    """Name the smallest scheme that is safe."""
    found = storings(evidence)
    unsafe = {entry.scheme for entry in found if entry.kept.mean < SAFE_SHARE}
    safe = [entry for entry in found if entry.scheme not in unsafe]
    smallest = f"`{min(safe, key=lambda e: e.bits).scheme}`" if safe else "none"
    limit = f"{_percent(SAFE_SHARE)} of the gain"
    return (
        f"The smallest scheme that keeps at least {limit} in every group of models is {smallest}."
    )


# ---------------------------------------------------------------- advice


def is_late(entry: Record) -> bool:
    """Whether a set's base was made after the outcomes were fixed."""
    return entry["world"] in LATE


def has_gap(entry: Record) -> bool:
    """Whether a set's best model gained enough for relative scores."""
    return bool(entry["advice"]["best single"] - entry["advice"]["base"] >= LEAST_GAIN_POINTS)


def _over_average(entry: Record) -> tuple[float, float]:
    """How much better the advice is than the average of all models, with the half-width."""
    said = entry["advice"]
    return said["advice"] - said["average"], said["half_width"]


def _values(sets: Iterable[Record], read: Callable[[Record], float]) -> Values:
    return [(entry["world"], read(entry)) for entry in sets]


def advice_by_kind(sets: Sequence[Record]) -> str:
    """A row for each kind of set, and the sets that the advice loses."""
    if not sets:
        return NOTHING_STORED
    rows = []
    for kind, some in {**group(sets, lambda s: str(s["kind"])), "**all**": sets}.items():
        wide = [entry for entry in some if has_gap(entry)]
        narrow = [entry for entry in some if not has_gap(entry)]
        gains = [
            estimate(_values(wide, lambda entry, name=name: entry["advice"][name])).points
            for name in ("gain", "search gain")
        ]
        points = estimate(_values(narrow, lambda entry: _over_average(entry)[0])).points
        bases = len({entry["world"] for entry in some})
        rows.append(
            (kind, bases, len(wide), *gains, len(narrow), points, balance(map(_over_average, some)))
        )
    columns = (
        "kind of set|bases|sets|gain, %|search gain, %|narrow sets|points|wins / level / loses"
    )
    lost = [
        f"{entry['name']} ({gap:+.1f})"
        for entry in sets
        for gap, half_width in [_over_average(entry)]
        if beyond(gap, half_width) < 0
    ]
    named = with_minus("; ".join(lost)) or "none"
    return table(columns.split("|"), rows) + f"\n\nSets lost to the average, in points: {named}."


@block
def advice(evidence: Evidence) -> str:
    return advice_by_kind([entry for entry in evidence.advised if not is_late(entry)])


@block
def advice_late(evidence: Evidence) -> str:
    return advice_by_kind([entry for entry in evidence.advised if is_late(entry)])


@block
def advice_way(evidence: Evidence) -> str:
    """How far the advice goes from the average to what a search finds."""
    wide = [e["advice"] for e in evidence.advised if has_gap(e) and not is_late(e)]
    if not wide:
        return "–"
    return _percent(sum(e["gain"] for e in wide) / sum(e["search gain"] for e in wide))


@block
def advice_folds(evidence: Evidence) -> str:
    rows = [
        (
            world,
            f"{fold['cosine']:g}",
            f"{100 * fold['change']:g} %",
            *("`{}` at {:g}".format(*fold[size]) for size in ("small", "large")),
            with_minus(f"{fold['gain']:+.1f}"),
        )
        for world, fold in evidence.folds.items()
    ]
    columns = (
        "without|average from cosine|small change up to|small changes|large changes|gain on it, %"
    )
    return table(columns.split("|"), rows) if rows else NOTHING_STORED


@block
def advice_instead(evidence: Evidence) -> str:
    """Other methods where changes are small: as they are, and at a scale chosen on other bases."""
    sets = [s for s in evidence.advised if s["advice"]["seen"]["outcome"] == "small_changes"]
    rows = []
    for method in INSTEAD:
        some = [entry for entry in sets if _instead(entry, method) in entry["scores"]]
        chosen = _scales_by_base(some, method)
        if not chosen:
            continue
        plain, fixed = (
            [_over_advice(entry, method, scales.get(entry["world"], "1")) for entry in some]
            for scales in ({}, chosen)
        )
        worlds = [entry["world"] for entry in some]
        told = [
            estimate([(world, gap[part]) for world, gap in zip(worlds, gaps, strict=True)]).points
            for gaps, part in ((plain, 0), (fixed, 0), (fixed, 1))
        ]
        scales = ", ".join(sorted(set(chosen.values()), key=float))
        rows.append((f"`{method}`", len(some), told[0], scales, *told[1:]))
    columns = "instead of the advice|sets|as it is, points|scales chosen|points|gain, %"
    return table(columns.split("|"), rows) if rows else NOTHING_STORED


def _scales_by_base(sets: Sequence[Record], method: str) -> dict[str, str]:
    """The scale that does best on the other bases, for each base."""
    worlds = sorted({entry["world"] for entry in sets})
    if len(worlds) < 2:
        return {}
    start = f"{_instead(sets[0], method)} at "
    tried = [n.removeprefix(start) for n in sets[0]["scores"] if n.startswith(start)]
    shares = {
        scale: [(entry["world"], _over_advice(entry, method, scale)[1]) for entry in sets]
        for scale in ("1", *tried)
    }
    return {
        world: max(
            shares, key=lambda scale: np.mean([gap for base, gap in shares[scale] if base != world])
        )
        for world in worlds
    }


def _instead(entry: Record, method: str, scale: str = "1") -> str:
    """The candidate of another method, from the same models as the advised one."""
    said = entry["advice"]
    stem = said["candidate"].partition(" at ")[0].replace(said["seen"]["method"], method, 1)
    return stem if scale == "1" else f"{stem} at {scale}"


def _over_advice(entry: Record, method: str, scale: str) -> tuple[float, float]:
    """How much better than the advice it is: in points, and in % of what the best model gains."""
    said = entry["advice"]
    gap = entry["scores"][_instead(entry, method, scale)]["score"] - said["advice"]
    return gap, 100 * gap / max(said["best single"] - said["base"], LEAST_GAIN_POINTS)


@block
def advice_rivals(evidence: Evidence) -> str:
    if not evidence.advised:
        return NOTHING_STORED
    rows = []
    for late, sets in group(
        evidence.advised, lambda s: ", late bases" if is_late(s) else ""
    ).items():
        for rival in RIVALS:
            gaps = [(s["advice"]["advice"] - s["advice"][rival], _width(s, rival)) for s in sets]
            points = estimate([(s["world"], gap) for s, (gap, _) in zip(sets, gaps, strict=True)])
            rows.append((rival + late, balance(gaps), points.points))
    return table(("advice against", "wins / level / loses", "points"), rows)


def _width(entry: Record, rival: str) -> float:
    """The half-width of advice minus a rival, as if each differed from the average by itself.

    Rivals are stored by score, so it is the largest half-width of any candidate with that score.
    """
    said = entry["advice"]
    if rival == "average":
        return float(said["half_width"])
    alike = [s["half_width"] for s in entry["scores"].values() if s["score"] == said[rival]]
    return float(np.hypot(said["half_width"], max(alike)))


@block
def advice_rules(evidence: Evidence) -> str:
    """What the advice did in the sets in which a rule of readiness found something."""
    rules = sorted(
        {rule for s in evidence.advised for rule in s["advice"]["seen"].get("rules", ())}
    )
    if not rules:
        return NOTHING_STORED
    rows = []
    for rule in rules:
        some = [s for s in evidence.advised if rule in s["advice"]["seen"].get("rules", ())]
        points = estimate(_values(some, lambda entry: _over_average(entry)[0])).points
        rows.append((f"`{rule}`", len(some), balance(map(_over_average, some)), points))
    return table(("rule", "sets", "wins / level / loses", "points"), rows)


@block
def advice_compared(evidence: Evidence) -> str:
    compared = {
        s["name"]: s["advice"]["compared"] for s in evidence.advised if "compared" in s["advice"]
    }
    if not compared:
        return NOTHING_STORED
    beaten = {name: found for name, found in compared.items() if found["beaten_by"]}
    safe = len(compared) - len(beaten)
    answers = Counter(
        "a single model" if found["answer"].startswith("single ") else f"`{found['answer']}`"
        for found in compared.values()
    )
    said = ", ".join(f"{answer} {count}" for answer, count in answers.most_common())
    lost = "; ".join(
        f"{name} (`{found['answer']}`, beaten by {', '.join(f'`{n}`' for n in found['beaten_by'])})"
        for name, found in beaten.items()
    )
    share = _percent(safe / len(compared))
    return (
        f"The answer loses beyond chance to no candidate in {safe} of {len(compared)} sets "
        f"({share}). Answers: {said}.\n\nSets in which it loses: {lost or 'none'}."
    )
