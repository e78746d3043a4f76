"""The tables and sentences of docs/evidence.md."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from statistics import NormalDist

import numpy as np
from choose import (
    ADVISED,
    KINDS,
    advised,
    choosable,
    choose,
    folds,
    gain,
    gains_elsewhere,
    gains_of_folds,
    is_new,
    rules,
)
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
    beside,
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
USUAL = ("linear", "sum", "ties")
"""The methods that DARE is mostly used with."""
CLAIMS = (
    *(("linear", "base"), ("linear", "best single"), ("linear", "sum"), ("tsv at 1.2", "linear")),
    *((f"dare+{name} 0.9", name) for name in USUAL),
)
"""What is shown for each training seed."""
SAFE_SHARE = 0.95
"""Of the gain: what a safe way of storing keeps of every group of models, on average."""
RIVALS = ("linear", "base", "best single", "sum", "linear tuned", "tsv tuned")
"""What advice is held against."""
SIZES = (0.01, 0.02, 0.05, 0.1, 0.25)
"""Classes of sets by their largest change."""
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
        models = [entry["models"] for entry in sets]
        width = np.median([entry["scores"]["base"]["half_width"] for entry in sets])
        unit = " dB" if first in evidence.images else ""
        rows.append(
            [
                *(world, f"{first['about']}, {first['relation']}"),
                *(f"{first['parameters'] / 1e6:.2f}", len(sets)),
                f"{min(map(len, models))} to {max(map(len, models))}",
                len({model for some in models for model in some}),
                *(f"{min(items)} to {max(items)}", f"± {width:.1f}{unit}"),
            ]
        )
    columns = "base|data, tasks differ by|million parameters|sets|models in a set|different models"
    return table((*columns.split("|"), "test items", "average against base"), rows)


def counted(sets: Sequence[Record], found: Sequence[tuple[float, float]]) -> tuple[int, str, str]:
    """How many sets there are, how many are won, level and lost, and the mean difference."""
    points = [(entry["world"], gap) for entry, (gap, _) in zip(sets, found, strict=True)]
    return len(sets), balance(found), estimate(points).points


def _amount(what: str, sets: Sequence[Record]) -> str:
    return f"{len(sets)} {what} from {bases_of(sets)} bases"


def _all_related(evidence: Evidence) -> list[Record]:
    """The sets without strangers."""
    return [entry for entry in evidence.sets if not entry["strangers"]]


def bases_of(records: Iterable[Record]) -> int:
    """The number of bases that records come from."""
    return len({record["world"] for record in records})


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
    columns = "method|sets|as it is|points|tuned, minus tuned average|tuned, minus tuned `tsv`"
    return (
        f"{table(columns.split('|'), rows)}\n\n"
        f"From {bases_of(sets)} bases. Better beyond chance {'; '.join(better)}."
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


def dropping(evidence: Evidence) -> list[tuple[str, str, float, float]]:
    """Every comparison of a method after DARE with the same without: names, points, half-width."""
    found = []
    for entry in evidence.sets:
        for name in entry["scores"]:
            method, _, rate = name.removeprefix("dare+").rpartition(" ")
            plain = f"{method} tuned" if rate == "tuned" else method
            if name.startswith("dare+") and method in USUAL:
                found.append((entry["name"], name, *beside(entry, name, plain)))
    return found


def helped_beyond_chance(evidence: Evidence) -> list[tuple[str, str, float, float]]:
    """Those in which DARE helped, corrected for the number of comparisons (Bonferroni)."""
    found = dropping(evidence)
    wider = NormalDist().inv_cdf(1 - 0.025 / max(len(found), 1)) / NormalDist().inv_cdf(0.975)
    return [each for each in found if each[2] > wider * each[3]]


def _helped_share(evidence: Evidence) -> str:
    return f"{len(helped_beyond_chance(evidence))} of {len(dropping(evidence)):,} comparisons"


@block
def helped(evidence: Evidence) -> str:
    rows = []
    for name, some in group(dropping(evidence), lambda each: each[1]).items():
        rows.append((f"`{name}`", len(some), balance(each[2:] for each in some)))
    better = helped_beyond_chance(evidence)
    listed = "; ".join(
        with_minus(f"{where}, `{name}` ({points:+.1f} ± {half_width:.1f})")
        for where, name, points, half_width in better
    )
    scores = {entry["name"]: entry["scores"] for entry in evidence.sets}
    beaten = [
        name
        for where, name, *_ in better
        if scores[where][name]["score"]
        < max(
            found["score"]
            for other, found in scores[where].items()
            if not other.startswith(("dare+", "single", "best", "joint", "base"))
        )
    ]
    return (
        f"{table(('merge', 'sets', 'better / level / worse than without DARE'), sorted(rows))}\n\n"
        f"Better beyond chance in {_helped_share(evidence)}: {listed or 'none'}.\n\n"
        f"In {len(beaten)} of these {len(better)}, some merge of the same models without DARE "
        "scored higher still."
    )


@block
def by_size(evidence: Evidence) -> str:
    """The effect of dropping nine tenths, by the largest change of a set's models."""
    pairs = [(dropped, plain) for dropped, plain in DROPPED.items() if dropped.endswith("0.9")]
    rows = []
    complete = [entry for entry in evidence.advised if not entry["seen"]["left_out"]]
    for low, high in pairwise((0.0, *SIZES, np.inf)):
        sets = [entry for entry in complete if low <= entry["seen"]["change"] < high]
        label = f"{100 * low:g} to {100 * high:g}%" if low else f"under {100 * high:g}%"
        label = f"over {100 * low:g}%" if high == np.inf else label
        differing = (_difference(sets, *pair) for pair in pairs)
        rows.append((label, len(sets), bases_of(sets), *differing))
    return table(("largest change", "sets", "bases", *(f"`{name}`" for name, _ in pairs)), rows)


@block
def training_seeds(evidence: Evidence) -> str:
    """Differences of sets that were trained several times, and how far these are apart."""
    again = [some for some in group(evidence.sets, _recipe).values() if len(some) > 1]
    rows = []
    for name, other in CLAIMS:
        found = [[beside(entry, name, other) for entry in some] for some in again]
        points = [[each for each, _ in some] for some in found]
        spread = 1.96 * np.sqrt(np.mean([np.var(some, ddof=1) for some in points]))
        width = np.median([half_width for some in found for _, half_width in some])
        told = (" / ".join(f"{each:+.1f}" for each in some) for some in points)
        row = f"`{name}` against `{other}`", *told, f"± {width:.1f}", f"± {spread:.1f}"
        rows.append(tuple(map(with_minus, row)))
    names = [_recipe(some[0]) for some in again]
    return table(("difference", *names, "over items", "over training seeds"), rows)


def _recipe(entry: Record) -> str:
    """How the models of a set were made, but for the seed."""
    return f"{entry['world']}, {entry['kind']}"


# ---------------------------------------------------------------- single models


@block
def left_out(evidence: Evidence) -> str:
    every, enough = len(evidence.models), len(evidence.gainers)
    return f"{every - enough} of {every} models gained less than {LEAST_GAIN_POINTS:g} points"


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
    found = {
        name: estimate(differences(records, f"{name}, own", f"{name}, shared"))
        for name, plain in DROPPED.items()
        if plain != "ties"
    }
    rows = [(f"`{name}`", len(records), each.points, each.verdict) for name, each in found.items()]
    return table(("three models", "bases", "own minus shared", "masks of their own"), rows)


# ---------------------------------------------------------------- for the pages on ideas


@block
def survives(evidence: Evidence) -> str:
    """What models and merges do to tasks that the base has done before."""
    sets = _all_related(evidence)
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
    rows = []
    for label, values in found.items():
        lost = np.mean([points < -LOST_POINTS for _, points in values])
        rows.append((label, len(values), estimate(values).points, f"{100 * lost:.0f}%"))
    columns = ("", "scores", "points against the base", f"more than {LOST_POINTS:g} below")
    return table(columns, rows)


@block
def opposed(evidence: Evidence) -> str:
    """Sets in which one model was taught wrong answers."""
    sets = kinds(evidence)["opposed"]
    others = ("iso", "model_stock", "ties", "dare+ties 0.5", "dare+ties 0.9")
    names = ("linear without strangers", *others)
    return table(
        (f"instead of the average, {len(sets)} sets", "wins / ties / loses", "points"),
        [(f"`{name}`", *_beside_average(sets, name)) for name in names],
    )


@block
def trimming(evidence: Evidence) -> str:
    """Trimming and dropping, each against the same method without it."""
    rows = []
    for plain in ("ties", "sum"):
        trimmed = [entry for entry in evidence.sets if f"trim+{plain}" in entry["scores"]]
        for name in (f"trim+{plain}", f"dare+{plain} 0.5", f"dare+{plain} 0.9"):
            sets = [entry for entry in trimmed if name in entry["scores"]]
            title = f"`{name}` instead of `{plain}`"
            rows.append((title, len(sets), _difference(sets, name, plain)))
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
    return with_minus(f"{100 * share:z.0f}%")


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


@block
def advice_choice(evidence: Evidence) -> str:
    """What is chosen among, and how that does on the base that was left out."""
    rows = []
    for kind, choices in KINDS.items():
        chosen = choose(rules(kind), choosable(evidence.advised))
        again = [rule for _, rule, _ in folds(kind, evidence.advised)]
        same = f"{again.count(chosen)} of {len(again)}"
        found = gains_of_folds(kind, evidence.advised)
        bases = [{"world": base} for base, *_ in found]
        rows.append((choices, chosen, same, *counted(bases, [each[1:] for each in found])))
    columns = "chosen among|chosen on all bases|again without one|sets|wins / ties / loses|points"
    return table(columns.split("|"), rows)


@block
def advice_folds(evidence: Evidence) -> str:
    rows = []
    for base, rule, own in folds("narrow", evidence.advised):
        found = [gain(entry, rule.method, rule.scale) for entry in own]
        rows.append((base, rule, *counted(own, found)))
    columns = (
        "base left out|chosen on the others|sets that it applies to|wins / ties / loses|points"
    )
    return table(columns.split("|"), rows)


SMALL_CHANGES = "`tsv`"
LEFT_OUT = "the average without some models"
ALL_AVERAGED = "the average of all"


def _by_advice(sets: Sequence[Record]) -> str:
    """A row for each thing that is advised, and the sets that it loses to the average of all."""
    if not sets:
        return NOTHING_STORED
    parts: dict[str, list[Record]] = {SMALL_CHANGES: [], LEFT_OUT: [], ALL_AVERAGED: []}
    for entry in sets:
        averaged = LEFT_OUT if entry["seen"]["left_out"] else ALL_AVERAGED
        parts[SMALL_CHANGES if ADVISED.applies(entry) else averaged].append(entry)
    rows, lost = [], []
    for what, some in {**parts, "**all**": sets}.items():
        found = [beside(entry, advised(entry), "linear") for entry in some]
        rows.append((what, bases_of(some), *counted(some, found)))
    for entry in sets:
        points, half_width = beside(entry, advised(entry), "linear")
        if beyond(points, half_width) < 0:
            lost.append(with_minus(f"{entry['name']} ({points:+.1f})"))
    columns = "what is advised|bases|sets|wins / ties / loses|points"
    told = table(columns.split("|"), rows)
    return f"{told}\n\nSets lost to the average, in points: {'; '.join(lost) or 'none'}."


@block
def advice_rivals(evidence: Evidence) -> str:
    rows = []
    for rival in RIVALS:
        sets = [entry for entry in evidence.advised if rival in entry["scores"]]
        rows.append((rival, *counted(sets, [beside(s, advised(s), rival) for s in sets])))
    return table(("advice against", "sets", "wins / ties / loses", "points"), rows)


@block
def advice_elsewhere(evidence: Evidence) -> str:
    found = gains_elsewhere(evidence.advised)
    return f"{balance(found)} of {len(found)} sets"


# ---------------------------------------------------------------- short ones

BLOCKS |= {
    "amounts": lambda evidence: _amount("sets of models", evidence.sets),
    "surviving-sets": lambda evidence: _amount("sets", _all_related(evidence)),
    "others": lambda evidence: table(
        ("instead of the average", "wins / ties / loses", "points"),
        [(name, *_beside_average(evidence.sets, name)) for name in OTHERS],
    ),
    "average": lambda evidence: by_kind(
        evidence, OTHERS, lambda sets, name: _difference(sets, "linear", name)
    ),
    "methods-by-kind": lambda evidence: by_kind(
        evidence, BY_KIND, lambda sets, name: "<br>".join(_beside_average(sets, name))
    ),
    "dare-by-kind": lambda evidence: by_kind(
        evidence, DROPPED, lambda sets, name: _difference(sets, name, DROPPED[name])
    ),
    "helped-share": _helped_share,
    "tuned-average": lambda evidence: _difference(evidence.sets, "linear tuned"),
    "tuned-tsv": lambda evidence: _difference(evidence.sets, "tsv tuned", "linear tuned"),
    "tolerance": lambda evidence: pivot(
        "gain kept", shares_by_rate(evidence), lambda found: found.percent
    ),
    "counts": lambda evidence: pivot(
        "models", effects_by_count(evidence), lambda found: found.points
    ),
    "advice": lambda evidence: _by_advice([s for s in evidence.advised if not is_new(s)]),
    "advice-new": lambda evidence: _by_advice([s for s in evidence.advised if is_new(s)]),
}
