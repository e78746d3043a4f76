"""The numbers that judgements rest on, in one table: what each is, and where it comes from."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limit:
    """A number that something measured is held against."""

    name: str
    value: float
    meaning: str
    source: str


PAPER = "arXiv:2311.03099"
OURS = "this project"

TABLE: tuple[Limit, ...] = (
    Limit("usual_delta", 0.002, "Mean |δ| up to which DARE was seen to work.", PAPER),
    Limit("foreign_delta", 0.03, "Mean |δ| from which no model counts as a fine-tune.", PAPER),
    Limit(
        "foreign_ratio",
        0.7,
        "‖δ‖/‖base‖ from which no model counts as a fine-tune; √2 for two unrelated models of "
        "one size.",
        OURS,
    ),
    Limit(
        "unrelated_ratio",
        1.0,
        "‖δ‖/‖base‖ that a model without anything of the base cannot go below: "
        "√(1 + (‖tuned‖/‖base‖)²).",
        "arithmetic",
    ),
    Limit(
        "large_ratio",
        0.15,
        "‖δ‖/‖base‖ from which the bound on the output's error leaves less than a tenth to drop.",
        "the bound below: p = b²/(b² + r²)",
    ),
    Limit(
        "output_error",
        0.05,
        "Error that dropping may bring to a layer's outputs, relative to them.",
        "the demonstration's models: one of a hundred right answers lost",
    ),
    Limit(
        "survivors",
        4,
        "Elements that carry an output's change, of which so many should survive on average: the "
        "square of its error then spreads by no more than half of its mean.",
        "arithmetic",
    ),
    Limit(
        "coherence",
        100,
        "How many times as much a lost share of a learnt change costs as noise of the same size.",
        "the demonstration's models: the best scales of their merges",
    ),
    Limit("highest_rate", 0.95, "No higher drop rate is recommended without q.", PAPER),
    Limit(
        "low_rank_tail",
        0.01,
        "A delta is low-rank if the weaker half of its directions holds less of its energy.",
        OURS,
    ),
    Limit("low_rank_rate", 0.85, "Highest drop rate usual for LoRAs.", "a common guideline"),
    Limit("same_cosine", 0.99, "|Cosine| from which two deltas count as one direction.", OURS),
    Limit(
        "far_cosine",
        0.9999,
        "The same for models far from the base, which may have come a long way together.",
        OURS,
    ),
    Limit(
        "same_size",
        0.02,
        "How far from 1 the ratio of two deltas of one direction may be if they are the same.",
        OURS,
    ),
    Limit("alike_cosine", 0.5, "Cosine from which two deltas count as alike.", OURS),
    Limit("apart_cosine", 0.1, "|Cosine| up to which two deltas count as independent.", OURS),
    Limit(
        "conflict",
        0.6,
        "Share of opposite changes from which two models oppose each other; half is chance.",
        OURS,
    ),
    Limit(
        "cancelled",
        0.1,
        "How much more than by chance changes may cancel each other.",
        OURS,
    ),
    Limit(
        "outweighed",
        3,
        "Ratio of the norms of two deltas from which an election goes to the larger.",
        "the demonstration's models: 39 % of the smaller one's answers left under ties",
    ),
    Limit(
        "rounding",
        2,
        "Multiple of the rounding error's norm up to which a delta is little else.",
        OURS,
    ),
    Limit(
        "unrounded",
        0.5,
        "Share of unchanged elements from which a coarser storage type has not rounded the model.",
        OURS,
    ),
    Limit(
        "sparse",
        0.7,
        "Share of elements under 1 % of the largest from which a delta counts as sparse.",
        "a common guideline",
    ),
    Limit(
        "outlier_outputs",
        0.05,
        "Share of a tensor's outputs that outliers may lie in; if there are more, they are none.",
        OURS,
    ),
    Limit(
        "outlier_share",
        0.05,
        "Share of a tensor's squared change from which its outliers are named.",
        OURS,
    ),
    Limit(
        "easy_rate",
        0.5,
        "Drop rate that a model must bear to count as fit for DARE without changes.",
        OURS,
    ),
    Limit("useful_rate", 0.1, "Drop rates below this are not worth their noise.", OURS),
)
"""All limits; a page of the documentation shows them."""

_VALUES = {limit.name: limit.value for limit in TABLE}


def limit(name: str) -> float:
    """The value of a limit.

    >>> limit("foreign_delta")
    0.03
    """
    return _VALUES[name]
