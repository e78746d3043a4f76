"""Estimates of a plan's time on this machine, from its bytes and the rates of earlier merges.

Every merge of noticeable size leaves the rate of its method in a small file. A method that was
never used here has the rate that is usual for stages that read as much.
"""

from __future__ import annotations

import json
import math
import platform
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from dare.planning.plan import Plan
from dare.stages.matrices import is_matrix, sides
from dare.tensors.files import cache_folder, read_private, write_private

USUAL_RATES = {"copy": 1e9, "element": 3e8, "tensor": 1.5e8, "matrix": 3e7, "reference": 1e7}
"""Bytes that one thread reads and writes in a second, where nothing was measured."""
USUAL_MARGINS, MEASURED_MARGINS = (0.5, 2.0), (0.6, 1.8)
"""Factors for the ends of a range, at most 4 times apart."""
START_SECONDS = 0.8  # the time that every merge takes to start, whatever its size
NOTICEABLE_BYTES = 1e8  # the least a merge must read and write to say something about the rate
PLAIN_SIDE = 1024  # the shorter side of a matrix whose bytes count once, where stages need it whole
RATES_KEPT = 200


@dataclass(frozen=True)
class Estimate:
    """The range of times that a merge will take.

    >>> print(Estimate(4.2, 8.7, is_measured=True))
    about 4.2 to 8.7 s on this machine
    """

    low: float
    """Seconds, start-up included."""
    high: float
    is_measured: bool
    """True if this machine has merged by the same method before."""

    def __str__(self) -> str:
        """Return the range, in the unit that fits its upper end."""
        if self.high < 1:
            return "less than a second on this machine"
        units = {"h": 3600, "min": 60, "s": 1}
        unit = next((name for name, size in units.items() if self.high >= 2 * size), "s")
        low, high = (f"{_rounded(value / units[unit]):g}" for value in (self.low, self.high))
        return f"about {low} to {high} {unit} on this machine"

    def to_dict(self) -> dict[str, Any]:
        """Return the range in seconds, ready for JSON."""
        return asdict(self)


def _rounded(value: float) -> float:
    return round(value, 1 - math.floor(math.log10(value))) if value else value


def estimate(plan: Plan) -> Estimate:
    """Estimate the time of a plan on this machine, from the rates of earlier merges."""
    measured = _kept().get(_key(plan))
    low, high = USUAL_MARGINS if measured is None else MEASURED_MARGINS
    rate = measured or USUAL_RATES[_kind(plan)]
    seconds = START_SECONDS + _work(plan) / (rate * plan.cost.threads)
    return Estimate(low * seconds, high * seconds, measured is not None)


def keep_rate(plan: Plan, seconds: float) -> None:
    """Keep the rate of a whole merge, start-up aside, for the next one by this method."""
    work = _work(plan)
    if work < NOTICEABLE_BYTES:
        return
    kept, key = _kept(), _key(plan)
    kept.pop(key, None)
    kept[key] = work / (seconds * plan.cost.threads)
    latest = dict(list(kept.items())[-RATES_KEPT:])
    with suppress(OSError):
        write_private(cache_folder() / "rates.json", json.dumps(latest, indent=1).encode())


def _kept() -> dict[str, float]:
    """Read the rates of earlier merges; none, if the file is damaged or somebody else's."""
    with suppress(OSError, ValueError, RecursionError):
        kept = json.loads(read_private(cache_folder() / "rates.json"))
        if isinstance(kept, dict):
            rates = ((key, rate) for key, rate in kept.items() if isinstance(rate, float))
            return {key: rate for key, rate in rates if 0 < rate < math.inf}
    return {}


def _key(plan: Plan) -> str:
    """Return the name of a rate; several machines may share a user's folder."""
    method = "+".join(stage.name for stage in plan.stages)
    return f"{platform.node()} {plan.backend} {method if any(plan.merged()) else 'copy'}"


def _kind(plan: Plan) -> str:
    """Return the kind of plan that decides the usual rate: what its stages read before merging."""
    if not any(plan.merged()):
        return "copy"
    if plan.backend == "reference":
        return "reference"
    if plan.cost.passes == 1:
        return "element"
    return max((stage.sees for stage in plan.stages), key=list(USUAL_RATES).index)


def _work(plan: Plan) -> float:
    """Return the bytes read and written; those of matrices that are taken apart count more often.

    Taking a matrix apart takes its shorter side times as long as reading it.
    """
    takes_whole = any(stage.sees == "matrix" for stage in plan.stages)
    work = 0.0
    for tensor in plan.tensors:
        nbytes = plan.cost.bytes_read_of(tensor) + tensor.elements * tensor.dtype.itemsize
        is_taken_apart = takes_whole and tensor.is_merged and is_matrix(tensor.shape)
        work += nbytes * sides(tensor.shape)[0] / PLAIN_SIDE if is_taken_apart else nbytes
    return work
