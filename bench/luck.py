"""How often a search finds something, by chance and by right: simulated, with the real statistics.

    python bench/luck.py           # the tables, as Markdown
    python bench/luck.py --quick   # the same of few searches, in less than a minute
    python bench/luck.py --write   # ... into docs/search.md

A simulated search scores candidates on items, takes the best, and compares it with all others as a
search does: `resample`, `difference`, `verdict`. An item has a latent difficulty, the chance that
a candidate gets it right, from a beta distribution with mean 0.7; candidates are right or wrong
independently of each other. The spread of the difficulties is chosen such that two candidates agree
on the share of items that is asked for: on nearly all, if nearly all are too easy or too hard.
Candidates that are right or wrong agree on more than half of the items; where they are to agree on
fewer, an item is the share of five such answers, with the same chance, that are right. A candidate
that is better by some points turns each wrong answer into a right one with the chance that makes
so many points. Items of a cluster have one difficulty, and all but the first are copies of it: a
candidate has the same result on nine of ten, and a new one on the tenth.
"""

import argparse
import math
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # the processes share the cores
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

from dare.studies.judging import Objective
from dare.studies.results import Contender, Scored, State, Trial
from dare.studies.statistics import BETTER, NO_DIFFERENCE, resample, verdict, visible_difference

PAGE = Path(__file__).parent.parent / "docs" / "search.md"
MARKERS = ("<!-- by bench/luck.py -->", "<!-- end of bench/luck.py -->")
ITEMS, AGREEMENTS, CANDIDATES = (40, 200, 1000), (0.3, 0.8, 0.95), (6, 8, 26)
MEAN = 0.7  # of the chances to be right
ANSWERS = 5  # of an item that is more than right or wrong
COPIED = 0.9  # of the results in a cluster
CHUNK = 100  # searches that a process makes at once


@dataclass(frozen=True)
class Setup:
    """The candidates and items of a search."""

    items: int
    agreement: float
    candidates: int = 8
    gain: float = 0.0  # of the first candidate over all others
    cluster: int = 1  # items that belong together
    is_told: bool = True  # whether their ids say so

    @property
    def answers(self) -> int:
        """Those that make an item's result."""
        return 1 if self.agreement > 0.5 else ANSWERS

    @property
    def spread(self) -> float:
        """The sum of the beta distribution's parameters that makes two agree so often."""
        answers = self.answers

        def log_beta(a: float, b: float) -> float:
            return math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)

        def agreed(total: float) -> float:
            a, b = MEAN * total, (1 - MEAN) * total
            return sum(
                math.comb(answers, k) ** 2
                * math.exp(log_beta(a + 2 * k, b + 2 * (answers - k)) - log_beta(a, b))
                for k in range(answers + 1)
            )

        low, high = 1e-6, 1e6
        while high / low > 1 + 1e-9:
            middle = math.sqrt(low * high)
            low, high = (middle, high) if agreed(middle) > self.agreement else (low, middle)
        return low

    @property
    def visible(self) -> float:
        """The gain that the program says can be seen."""
        total = self.spread
        variance = MEAN * (1 - MEAN) * total / (total + 1) / ANSWERS  # of an item's results
        variance = 1 - self.agreement if self.answers == 1 else 2 * variance
        return visible_difference(self.items, self.candidates, agreement=1 - variance)

    def results(self, random: np.random.Generator) -> np.ndarray:
        """Return a result for each item and candidate."""
        total, answers, clusters = self.spread, self.answers, self.items // self.cluster
        chances = random.beta(MEAN * total, (1 - MEAN) * total, (clusters, 1, 1))
        right = random.binomial(answers, chances, (clusters, self.cluster, self.candidates))
        copied = random.random(right.shape) < COPIED
        right = np.where(copied, right[:, :1], right).reshape(self.items, self.candidates)
        right[:, 0] += random.binomial(answers - right[:, 0], self.gain / (1 - MEAN))
        return right / answers


def search(setup: Setup, resamples: int, seed: int) -> tuple[bool, bool]:
    """Make a search: does the best differ from any other, is the first better than the second?"""
    values = setup.results(np.random.default_rng([seed, setup.items, setup.candidates]))
    names = [
        f"a/{n // setup.cluster}/{n}" if setup.cluster > 1 and setup.is_told else f"a/{n}"
        for n in range(setup.items)
    ]
    entries = []
    for column in values.T:
        items = dict(zip(names, column.tolist(), strict=True))
        scored = Scored({"a": math.fsum(items.values()) / len(items)}, items)
        entries.append(Contender((Trial(0, {}, 0, State.DONE, scored=scored),), is_random=False))
    table = resample(entries, Objective(), resamples=resamples, seed=seed)
    best = int(np.argmax(table.values))
    verdicts = [verdict(table.difference(best, n)) for n in range(len(entries)) if n != best]
    is_found = verdict(table.difference(0, 1)) == BETTER
    return any(v != NO_DIFFERENCE for v in verdicts), is_found


Shares = Callable[[Setup], tuple[str, str]]
"""In how many searches the best differs from any, and the first from the second, in percent."""


def table(head: list[str], rows: list[list[str]]) -> Iterator[str]:
    lines = [head, ["---"] * len(head), *rows]
    yield from (f"| {' | '.join(line)} |".replace(" --- ", "---") for line in lines)
    yield ""


def of_nothing(shares: Shares) -> Iterator[str]:
    """How often a search finds a difference where there is none."""
    rows = []
    for items in ITEMS:
        for agreement in AGREEMENTS:
            found = [shares(Setup(items, agreement, candidates))[0] for candidates in CANDIDATES]
            differing = f"{items * (1 - agreement):.0f}"
            rows.append([f"{items:,}", f"{agreement:g}", differing, *found])
    head = [f"found among {candidates} candidates" for candidates in CANDIDATES]
    yield from table(["items", "agreement", "items that differ", *head], rows)


def of_gains(shares: Shares) -> Iterator[str]:
    """How often a real difference is found, and what was expected to be."""
    rows = []
    for items in ITEMS:
        for agreement in AGREEMENTS:
            same = Setup(items, agreement)
            gains = [g for g in (0.05, 0.1, same.visible) if g < 1 - MEAN]
            found = [shares(replace(same, gain=gain)) for gain in gains]
            cells = [f"{given} ({some})" for some, given in found] + ["–"] * (3 - len(gains))
            visible = f"{100 * same.visible:.1f}"
            rows.append([f"{items:,}", f"{agreement:g}", *cells[:2], visible, cells[2]])
    head = ["items", "agreement", "5 points: found", "10 points: found"]
    yield from table([*head, "visible, in points", "of these found"], rows)


def of_clusters(shares: Shares) -> Iterator[str]:
    """How often nothing is found where five items each belong together."""
    rows = []
    for items in ITEMS[1:]:
        for agreement in AGREEMENTS[1:]:
            told = Setup(items, agreement, cluster=5)
            found = [shares(replace(told, is_told=is_told))[0] for is_told in (True, False)]
            rows.append([f"{items:,}", f"{agreement:g}", *found])
    yield from table(["items", "agreement", "groups given", "groups not given"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few searches")
    parser.add_argument("--write", action="store_true", help=f"put the tables into {PAGE.name}")
    parser.add_argument("--searches", type=int, default=2000)
    parser.add_argument("--resamples", type=int, default=500)
    arguments = parser.parse_args()
    searches = 100 if arguments.quick else arguments.searches
    lines = []
    with ProcessPoolExecutor() as pool:

        def shares(setup: Setup) -> tuple[str, str]:
            one = partial(search, setup, arguments.resamples)
            means = np.mean(list(pool.map(one, range(searches), chunksize=CHUNK)), axis=0)
            return tuple(f"{100 * share:.1f}%" for share in means)

        for part in (of_nothing, of_gains, of_clusters):
            for line in part(shares):
                print(line, flush=True)
                lines.append(line)
    if arguments.write:
        before, rest = PAGE.read_text(encoding="utf-8").split(MARKERS[0])
        after = rest.split(MARKERS[1])[1]
        text = f"{MARKERS[0]}\n\n" + "\n".join(lines) + f"\n{MARKERS[1]}"
        PAGE.write_text(before + text + after, encoding="utf-8")


if __name__ == "__main__":
    main()
