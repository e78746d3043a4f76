"""How long a plan will take on this machine: a range, from rates that are measured once and kept.

The lower end has the inputs in the page cache and the machine to itself; the upper end reads them
from the disk and shares the machine as it was shared in the last minute.
"""

from __future__ import annotations

import json
import math
import os
import platform
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from dare import __version__
from dare.kernels.kept import cache_folder, write_private
from dare.planning.data import TensorPlan
from dare.planning.machine import available_cores
from dare.planning.plan import Plan
from dare.run.calibration import (
    LOADING_SECONDS,
    Disk,
    Speed,
    measure_disk,
    measure_speed,
)
from dare.stages.matrices import sides
from dare.tensors.digest import bytes_digest

RATES_KEPT = 200
STARTS = 5
"""The whole start and end of the command, at the most, counted in loadings of kernels."""
SCALING = 0.8
"""At the worst, n threads do the work of n**SCALING."""
SLOWER = 1.5
"""A whole merge takes at most so many times as long as its pieces took."""
EXTRA_GROWTH = 0.3
"""The time for whole matrices may grow by a power that is higher by this beyond the measured."""
REREADS = 2
"""At the worst, a tensor that its survey cannot remember takes so many times as long."""


@dataclass(frozen=True)
class Estimate:
    """How long a merge will take.

    >>> print(Estimate(4.2, 8.7, None, Disk("/tmp", 1e9, 1e9)))
    about 4.2 to 8.7 s on this machine
    """

    low: float
    """In seconds, start-up included, with the inputs in the page cache."""
    high: float
    """In seconds, with the inputs on a disk like the one that was measured."""
    speed: Speed | None
    """None if nothing is merged, only copied."""
    disk: Disk

    def __str__(self) -> str:
        """The range, in the unit that fits its upper end."""
        if self.high < 1:
            return "less than a second on this machine"
        units = {"h": 3600, "min": 60, "s": 1}
        unit = next((name for name, size in units.items() if self.high >= 2 * size), "s")
        seconds = units[unit]
        low, high = (f"{_rounded(value / seconds):g}" for value in (self.low, self.high))
        return f"about {low} to {high} {unit} on this machine"

    def to_dict(self) -> dict[str, Any]:
        """The range in seconds and what it was measured from, ready for JSON."""
        return asdict(self)


def _rounded(value: float) -> float:
    """To two digits."""
    return round(value, 1 - math.floor(math.log10(value))) if value else value


def predict(plan: Plan, speed: Speed | None, disk: Disk, load: float = 0.0) -> Estimate:
    """How long a plan takes at these rates, beside so many other busy processes at the most."""
    loading = speed.loading_seconds if speed else LOADING_SECONDS
    least, most = _thread_seconds(plan, speed) if speed else (0.0, 0.0)
    crowd = max(1.0, (load + plan.cost.threads) / max(available_cores(), plan.cost.threads))
    computing = SLOWER * most / plan.cost.threads**SCALING
    writing = plan.cost.bytes_written / disk.written_bytes_per_second
    reading = plan.cost.bytes_read / disk.read_bytes_per_second
    low = loading + max(least / plan.cost.threads, writing)
    high = crowd * (STARTS * loading + computing) + reading + writing
    return Estimate(low, high, speed, disk)


def _thread_seconds(plan: Plan, speed: Speed) -> tuple[float, float]:
    """What one thread would compute for: at the least, at the most."""
    low = high = 0.0
    extra = 0.0 if speed.short_power == speed.long_power == 1 else EXTRA_GROWTH
    for tensor in plan.merged():
        short, long = (length / speed.side for length in sides(tensor.shape))
        inputs = (1 + len(tensor.models)) / (1 + len(plan.models))
        squares = inputs * short**speed.short_power * long**speed.long_power
        forgets = 4 * tensor.elements > plan.cost.spare_bytes > 0
        low += speed.seconds * squares
        high += speed.seconds * squares * max(1, long) ** extra * (REREADS if forgets else 1)
    return low, high


def estimate(
    plan: Plan,
    *,
    measure: bool = True,
    announce: Callable[[], None] = lambda: None,
) -> Estimate | None:
    """Say how long a plan will take on this machine.

    What is not known yet is measured, in about a second, and kept for the next time; without
    `measure` the answer is then None. `announce` is called if kernels have to be compiled first.
    """
    kept = _read_kept()
    machine = [__version__, platform.node(), platform.machine(), platform.python_version()]
    tensor = _typical(plan)
    disk_key = _key(machine, str(cache_folder()))
    speed_key = _key(machine, plan.backend, available_cores(), tensor and _described(plan, tensor))
    disk = _as(Disk, kept.get(disk_key))
    speed = _as(Speed, kept.get(speed_key))
    if measure and (disk is None or (speed is None and tensor is not None)):
        disk = disk or measure_disk()
        if tensor is not None:
            speed = speed or measure_speed(plan, tensor, announce)
        new = {disk_key: disk, speed_key: speed}
        _keep(kept | {key: asdict(rate) for key, rate in new.items() if rate is not None})
    if disk is None or (speed is None and tensor is not None):
        return None
    return predict(plan, speed, disk, os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0)


def _typical(plan: Plan) -> TensorPlan | None:
    """A merged tensor that is merged as most elements are."""
    elements: Counter[str] = Counter()
    examples: dict[str, TensorPlan] = {}
    for tensor in plan.merged():
        description = repr(_described(plan, tensor))
        elements[description] += tensor.elements
        examples[description] = tensor
    return examples[elements.most_common(1)[0][0]] if examples else None


def _described(plan: Plan, tensor: TensorPlan) -> list[Any]:
    """All that the time for an element depends on."""
    return [
        [stage.name for stage in plan.stages],
        tensor.settings,
        tensor.combine,
        [weight == 0 for weight in tensor.weights],
        [tensor.base.dtype.name, tensor.dtype.name],
        [_form(plan, tensor, model) for model in tensor.models],
    ]


def _form(plan: Plan, tensor: TensorPlan, model: int) -> tuple[str, bool]:
    source = plan.source_of(tensor, model)
    return source.tensors[tensor.name].dtype.name, source.holds_delta(tensor.name)


# ---------------------------------------------------------------- keeping


def _key(*described: Any) -> str:
    return bytes_digest(json.dumps(described, sort_keys=True, default=str).encode())


def _as(kind: type[Any], kept: Any) -> Any:
    """A rate that was kept; None if it is spoilt."""
    with suppress(TypeError):
        rate = kind(**kept)
        numbers = [value for name, value in asdict(rate).items() if name != "folder"]
        if all(0 < number < math.inf for number in numbers):
            return rate
    return None


def _read_kept() -> dict[str, Any]:
    with suppress(OSError, ValueError, RecursionError):
        kept = json.loads((cache_folder() / "rates.json").read_bytes())
        if isinstance(kept, dict):
            return kept
    return {}


def _keep(rates: dict[str, Any]) -> None:
    with suppress(OSError):
        text = json.dumps(dict(list(rates.items())[-RATES_KEPT:]), indent=1)
        write_private(cache_folder() / "rates.json", text.encode())
