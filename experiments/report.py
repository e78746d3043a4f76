"""Make the tables and figures of docs/evidence.md from stored results.

    python experiments/report.py            # rewrites the blocks of the page, and its figures
    python experiments/report.py --check    # says which of them are out of date

A block stands between `<!-- evidence: NAME -->` and `<!-- end -->`; `images/evidence-NAME.svg` is a
figure.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
from evidence import (
    DROPPED,
    LEAST_GAIN_POINTS,
    RATES,
    USUAL_RATES,
    WAYS,
    Cell,
    Estimate,
    Evidence,
    Record,
    differences,
    effects_by_count,
    estimate,
    group,
    kept,
    methods,
    rank_correlation,
    read,
    shares,
    tally,
    tolerance,
    with_minus,
)
from figures import FIGURES, IMAGES, draw, is_current

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs/evidence.md"
BY_KIND = (
    *("sum", "ties", "tsv", "iso", "model_stock"),
    *("dare+linear 0.5", "dare+linear 0.9", "dare+sum 0.5"),
)
SMALL_CHANGE = 0.05
"""Of a model, relative to the norm of its base."""
SAFE_SHARE = 0.95
"""Of the gain: what a safe way of storing keeps of every group of models, on average."""
_BLOCK = re.compile(r"(<!-- evidence: ([\w-]+) -->)(.*?)(<!-- end -->)", re.DOTALL)


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


def amounts(evidence: Evidence) -> str:
    every = evidence.sets + evidence.images
    bases = {entry["world"] for entry in every}
    return f"{len(every)} sets of models from {len(bases)} bases"


def by_kind(evidence: Evidence) -> dict[str, list[Record]]:
    """The sets of each kind, and all."""
    found = group(evidence.sets, lambda entry: entry["kind"])
    return {**found, "**all**": evidence.sets}


def average(evidence: Evidence) -> str:
    others = ("base", "best single", "joint", "sum", "linear tuned", "linear without strangers")
    rows = [
        (kind, len(sets), *(_pair(sets, "linear", other) for other in others))
        for kind, sets in by_kind(evidence).items()
    ]
    return table(("kind of set", "sets", *others), rows)


def _pair(sets: Iterable[Record], name: str, other: str = "linear") -> str:
    return estimate(differences(sets, name, other)).points


def _beside_average(sets: Sequence[Record], name: str) -> list[str]:
    return [tally(sets, name), _pair(sets, name)]


def without_dare(evidence: Evidence) -> str:
    sets = evidence.sets
    rows = [
        (
            f"`{name}`",
            len(differences(sets, name)),
            *_beside_average(sets, name),
            *_beside_average(sets, f"{name} tuned"),
            _pair(sets, f"{name} tuned", "linear tuned"),
        )
        for name in methods(sets)
    ]
    columns = "method|sets|as it is|points|tuned|points|tuned, minus tuned average"
    return table(columns.split("|"), rows)


def with_dare(evidence: Evidence) -> str:
    sets = evidence.sets
    rows = []
    for name in methods(sets):
        variants = [(f"dare+{name} {rate}", name) for rate in USUAL_RATES]
        variants.append((f"dare+{name} tuned", f"{name} tuned"))
        if differences(sets, *variants[0]):
            tallies = [tally(sets, dropped) for dropped, _ in variants]
            rows.append((f"`{name}`", *tallies, *(_pair(sets, *pair) for pair in variants)))
    columns = "after DARE|0.5|0.9|tuned|0.5, minus without DARE|0.9, minus without|both tuned"
    return table(columns.split("|"), rows)


def methods_by_kind(evidence: Evidence) -> str:
    rows = [
        (kind, len(sets), *("<br>".join(_beside_average(sets, name)) for name in BY_KIND))
        for kind, sets in by_kind(evidence).items()
    ]
    return table(("kind of set", "sets", *(f"`{name}`" for name in BY_KIND)), rows)


def dare_by_kind(evidence: Evidence) -> str:
    rows = [
        (kind, len(sets), *(_pair(sets, *pair) for pair in DROPPED))
        for kind, sets in by_kind(evidence).items()
    ]
    return table(("kind of set", "sets", *(f"`{dropped}`" for dropped, _ in DROPPED)), rows)


def images(evidence: Evidence) -> str:
    names = ("base", "best single", "linear", "sum", "ties", *(d for d, _ in DROPPED[:3]))
    rows = [
        (f"{s['world']}: {s['kind']}", *(f"{s['scores'][name]['score']:.2f}" for name in names))
        for s in evidence.images
    ]
    return table(("PSNR in dB", *names), rows) if rows else "No results are stored yet."


def verdicts(evidence: Evidence) -> str:
    """What DARE does to a merge, in a word."""
    tuned = [(f"dare+{name} tuned", f"{name} tuned") for name in ("linear", "ties")]
    rows = []
    for dropped, plain in (*DROPPED, *tuned):
        found = estimate(differences(evidence.sets, dropped, plain))
        rows.append((f"`{dropped}` instead of `{plain}`", found.points, found.verdict))
    return table(("", "points", "DARE"), rows)


# ---------------------------------------------------------------- single models


def left_out(evidence: Evidence) -> str:
    every, enough = len(evidence.models), len(evidence.gainers)
    return f"{every - enough} of {every} models gained less than {LEAST_GAIN_POINTS:g} points"


def tolerance_by_base(evidence: Evidence) -> str:
    rows = []
    for label, models in group(
        evidence.gainers, lambda m: f"{m['world']}, {WAYS[m['way']]}"
    ).items():
        found = [estimate(shares(models, "rescaled", rate)).percent for rate in RATES]
        rows.append((label, len(models), *found))
    return table(("base", "models", *RATES), rows)


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
    return pivot(f"gain kept, {len(pairs)} tasks", cells, lambda found: found.percent)


def embeddings(evidence: Evidence) -> str:
    full = [m for m in evidence.gainers if "embeddings" in m and m["way"] == "full"]
    ways = full[0]["embeddings"] if full else ()
    rows = [(way, len(full), estimate(shares(full, "embeddings", way)).percent) for way in ways]
    return table(("drop rates", "models", "gain kept"), rows)


def seeds(evidence: Evidence) -> str:
    records = [{"world": q["world"], **q["shared"]} for q in evidence.questions]
    rows = []
    for name, _ in DROPPED[:4]:
        found = estimate(differences(records, f"{name}, own", f"{name}, shared"))
        rows.append((f"`{name}`", len(records), found.points, found.verdict))
    return table(("three models", "bases", "own minus shared", "masks of their own"), rows)


# ---------------------------------------------------------------- how far it goes


def sizes(evidence: Evidence) -> str:
    norm = _binned(
        evidence, "‖δ‖ / ‖base‖", lambda m: m["relative_norm"], (0.005, 0.01, 0.02, 0.05, 0.1)
    )
    mean = _binned(
        evidence, "mean │δ│", lambda m: m["mean_magnitude"], (0.0005, 0.002, 0.005, 0.03)
    )
    return f"{norm}\n\n{mean}"


def predicted(evidence: Evidence) -> str:
    error = _binned(
        evidence, "predicted error", lambda m: m["predicted error"]["0.9"], (0.05, 0.1, 0.2, 0.5, 1)
    )
    rows = [
        (
            rate,
            *(
                f"{rank_correlation(evidence.gainers, rate, same_base=s):.2f}"
                for s in (True, False)
            ),
        )
        for rate in RATES
    ]
    ranks = table(("drop rate", "models of one base", "models of different bases"), rows)
    return f"{error}\n\n{with_minus(ranks)}"


def _binned(
    evidence: Evidence, name: str, size: Callable[[Record], float], edges: Sequence[float]
) -> str:
    """The gain kept at a drop rate of 0.9, by the size of something."""
    rows = []
    for low, high in pairwise((0.0, *edges, np.inf)):
        models = [model for model in evidence.gainers if low <= size(model) < high]
        if found := shares(models, "rescaled", "0.9"):
            label = f"from {low:g}" if high == np.inf else f"{low:g} to {high:g}"
            worst = _percent(min(share for _, share in found))
            rows.append((label, len(found), estimate(found).percent, worst))
    return table((name, "models", "gain kept at 0.9", "worst model"), rows)


def _percent(share: float) -> str:
    return with_minus(f"{100 * share:.0f} %")


# ---------------------------------------------------------------- delta files


@dataclass(frozen=True)
class Storing:
    """What a scheme of `dare compress` keeps of a group of models."""

    scheme: str
    models: str
    bits: float
    """For each parameter, on average."""
    kept: Estimate
    worst: float

    @property
    def is_random(self) -> bool:
        """Whether elements were dropped at random, or none at all."""
        return self.scheme.startswith("random")

    def beats(self, other: Storing) -> bool:
        """Whether it keeps as much of the same models with as few bits."""
        is_small = self.models == other.models and self.bits <= other.bits
        return is_small and self.kept.mean >= other.kept.mean


def storings(evidence: Evidence) -> list[Storing]:
    """Every scheme with every group of models."""
    models = [model for model in evidence.gainers if "stored" in model]
    tries = [{**model, **tried} for model in models for tried in model["stored"]]
    found = []
    for label, part in sorted(group(tries, _way_and_size).items()):
        for scheme, tried in group(part, _scheme).items():
            values = [(entry["world"], kept(entry, entry["scores"])) for entry in tried]
            bits = float(np.mean([entry["bits_per_parameter"] for entry in tried]))
            worst = min(share for _, share in values)
            found.append(Storing(scheme, label, bits, estimate(values), worst))
    return found


def _way_and_size(model: Record) -> str:
    relation = "under" if model["relative_norm"] < SMALL_CHANGE else "from"
    return f"{WAYS[model['way']]}, {relation} {100 * SMALL_CHANGE:g} %"


def _scheme(tried: Record) -> str:
    width = tried["bits"] if tried["bits"] == "native" else f"{tried['bits']} bits"
    return f"{tried.get('keep', 'random')} {tried['drop_rate']:g}, {width}"


def stored(evidence: Evidence) -> str:
    found = storings(evidence)
    groups = list(dict.fromkeys(entry.models for entry in found))
    rows = []
    for scheme in dict.fromkeys(entry.scheme for entry in found):
        entries = {entry.models: entry for entry in found if entry.scheme == scheme}
        texts = [f"{e.kept.percent}<br>worst {_percent(e.worst)}" for e in entries.values()]
        rows.append((scheme, f"{np.mean([e.bits for e in entries.values()]):.2f}", *texts))
    return table(("scheme", "bits", *groups), rows)


def safe_storage(evidence: Evidence) -> str:
    """The smallest safe scheme, and where keeping the largest changes is worth it."""
    found = storings(evidence)
    unsafe = {entry.scheme for entry in found if entry.kept.mean < SAFE_SHARE}
    safe = [entry for entry in found if entry.scheme not in unsafe]
    smallest = f"**{min(safe, key=lambda e: e.bits).scheme}**" if safe else "none"
    earned = [
        f"{entry.scheme} ({entry.models})"
        for entry in found
        if not entry.is_random and not any(o.is_random and o.beats(entry) for o in found)
    ]
    return (
        f"The smallest scheme that keeps at least {_percent(SAFE_SHARE)} of the gain in every "
        f"group is {smallest}. `magnitude` keeps more than every random scheme that is no larger in "
        f"{len(earned)} of {sum(not e.is_random for e in found)} cases"
        + (f": {'; '.join(earned)}." if earned else ".")
    )


# ---------------------------------------------------------------- the page

BLOCKS: dict[str, Callable[[Evidence], str]] = {
    "amounts": amounts,
    "verdicts": verdicts,
    "measured": measured,
    "average": average,
    "without-dare": without_dare,
    "with-dare": with_dare,
    "methods-by-kind": methods_by_kind,
    "dare-by-kind": dare_by_kind,
    "images": images,
    "left-out": left_out,
    "tolerance": lambda found: pivot("gain kept", tolerance(found), lambda e: e.percent),
    "tolerance-by-base": tolerance_by_base,
    "lora": lora,
    "embeddings": embeddings,
    "counts": lambda found: pivot("models", effects_by_count(found), lambda e: e.points),
    "seeds": seeds,
    "sizes": sizes,
    "predicted": predicted,
    "stored": stored,
    "safe-storage": safe_storage,
}
"""By the name that the page has for them. Text of one line may stand within a sentence."""


def fill(page: str, evidence: Evidence) -> str:
    """The page with its blocks made anew; blocks that others fill are left as they are."""

    def replace(block: re.Match[str]) -> str:
        start, name, old, end = block.groups()
        if name not in BLOCKS:
            return block.group()
        text = BLOCKS[name](evidence)
        return f"{start}\n\n{text}\n\n{end}" if "\n" in old else f"{start}{text}{end}"

    return _BLOCK.sub(replace, page)


def main() -> None:
    """Rewrite the page and its figures, or say what is out of date."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--results", type=Path, default=HERE / "results")
    parser.add_argument("--check", action="store_true", help="write nothing")
    asked = parser.parse_args()
    evidence = read(asked.results)
    old_page = PAGE.read_text("utf-8")
    page = fill(old_page, evidence)
    charts = {IMAGES / f"evidence-{name}.svg": make(evidence) for name, make in FIGURES.items()}
    stale = [file for file, chart in charts.items() if not is_current(file, chart)]
    if asked.check:
        names = [file.name for file in ([PAGE] if page != old_page else []) + stale]
        sys.exit("\n".join(f"{name} is out of date" for name in names) or 0)
    PAGE.write_text(page, "utf-8")
    for file in stale:
        file.write_text(draw(charts[file]), "utf-8")


if __name__ == "__main__":
    main()
