"""Averages of the checkpoints of one training: of the last ones (LAWA), or exponential (EMA).

Trainer of transformers saves `checkpoint-500` and so on. Averages are merges of these folders, with
the newest as the base, so no model is held in memory and nothing is lost if the training ends: an
exponential average is kept beside each checkpoint, and goes on where the training goes on.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from dare.api import merge
from dare.documents.words import counted
from dare.errors import InputError, RecipeError, warn_caller
from dare.inputs.lora import looks_like as looks_like_adapter
from dare.inputs.transformers_models import trainer_callback
from dare.lora import AdapterReport, merge_adapters
from dare.output.output import remove_output
from dare.output.receipt import Report
from dare.stores.locations import AnyPath
from dare.tensors.files import read_limited
from dare.tensors.header import parse_json

CHECKPOINT, AVERAGE = "checkpoint", "ema"  # the names of folders, which end with the step
STATE_NAME = "trainer_state.json"  # Trainer writes it last
MAX_STATE_BYTES = 1 << 28  # it has all losses that were logged
FSDP_FOLDER = "pytorch_model_fsdp_0"  # has the weights if each process saved its own


def average_checkpoints(
    folder: AnyPath,
    last: int | None = None,
    *,
    output: AnyPath,
    weights: Sequence[float] | None = None,
    decay: float | None = None,
    until: int | None = None,
    overwrite: bool = False,
    **settings: Any,
) -> Report | AdapterReport:
    """Average the last checkpoints that Trainer has left in a folder, in order of their steps.

    `average_checkpoints("out", last=5, output="averaged")` takes at most five; without `last`, all
    of them count, with `until` only those up to this step. Each has the same share, or one by
    `weights`, of which the oldest is the first. With `decay`, the average is exponential: it begins
    with the oldest, and becomes decay·average + (1 - decay)·checkpoint with each that follows.

    Integers, configuration and tokenizer are the newest checkpoint's; settings are those of
    `merge`. Checkpoints of adapters become one adapter whose rank is the sum of theirs, unless
    `rank` is given; then the settings are those of merging adapters.
    """
    folder = Path(folder)
    _shares(2 if last is None else last, decay=decay)  # refuses what is out of range
    steps = _steps(folder, CHECKPOINT, until)[-(last or 0) :]
    if len(steps) < 2:
        found = counted(len(steps), f"{CHECKPOINT}-… folder") + f" up to step {until}" * bool(until)
        raise InputError(f"{folder}: has {found}; an average needs at least 2, so save more often")
    shares = _shares(len(steps), weights, decay)
    *older, newest = [_open_checkpoint(folder, step) for step in steps]
    if looks_like_adapter(newest):
        how = {"weights": shares, "overwrite": overwrite, **settings}
        return merge_adapters([*older, newest], output, **how)
    given: dict[str, Any] = {"on_integer_mismatch": "base", **settings}
    given |= {"method": "linear", "weight": shares[:-1], "overwrite": overwrite}
    return merge(base=newest, models=older, output=output, **given)


def averaging_callback(last: int = 5, *, output: AnyPath | None = None, **settings: Any) -> Any:
    """Return a callback for Trainer that averages the last checkpoints when the training ends.

    `Trainer(…, callbacks=[dare.averaging_callback(last=5)])` writes `averaged` into Trainer's
    folder, unless another `output` is given, and replaces an earlier one. The other settings are
    those of `average_checkpoints`.
    """
    _shares(last, settings.get("weights"), settings.get("decay"))  # not only at the end

    class AverageCheckpoints(trainer_callback()):  # type: ignore[misc]
        def on_train_begin(self, args: Any, *_given: Any, **_named: Any) -> None:
            if args.save_strategy == "no":
                raise RecipeError('save_strategy = "no": saves no checkpoints; choose another one')
            if last > (args.save_total_limit or last):
                keeps = f"save_total_limit = {args.save_total_limit}: keeps too few checkpoints"
                raise RecipeError(f"{keeps} for last = {last}; make it at least {last}")

        def on_train_end(self, args: Any, state: Any, *_given: Any, **_named: Any) -> None:
            if state.is_world_process_zero:
                folder = Path(args.output_dir)
                how = {"output": output or folder / "averaged", "overwrite": True, **settings}
                average_checkpoints(folder, last, until=state.global_step, **how)

    return AverageCheckpoints()


def ema_callback(decay: float = 0.9, **settings: Any) -> Any:
    """Return a callback for Trainer that keeps an exponential average of the checkpoints.

    Whenever `checkpoint-500` is saved, `ema-500` is made beside it, in float32:
    decay·average + (1 - decay)·checkpoint, where the average is the one before; the first is the
    checkpoint itself. A training that is resumed goes on with the average of its checkpoint. An
    average whose checkpoint has been deleted is deleted too, once there is a newer one. Settings
    are those of `merge`.
    """
    _shares(2, None, decay)  # refuses what is out of range

    class KeepAverage(trainer_callback()):  # type: ignore[misc]
        step = 0  # of the newest average of this training

        def on_train_begin(
            self, args: Any, state: Any, *_given: Any, model: Any = None, **_named: Any
        ) -> None:
            if hasattr(model, "peft_config"):
                how = "use averaging_callback, or average_checkpoints with decay"
                raise RecipeError(f"the rank of an adapter would grow with each average; {how}")
            if not state.is_world_process_zero:
                return
            folder, begin = Path(args.output_dir), state.global_step
            self.step = max(_steps(folder, AVERAGE, begin), default=0)
            if begin and not self.step:
                what = f"no average up to step {begin}, so a new one begins"
                warn_caller(f"{folder}: has {what}; to continue one, copy {AVERAGE}-{begin} there")
            if self.step < begin and (folder / f"{CHECKPOINT}-{begin}").exists():
                self.on_save(args, state)  # the process ended before

        def on_save(self, args: Any, state: Any, *_given: Any, **_named: Any) -> None:
            if state.is_world_process_zero:
                folder, before, step = Path(args.output_dir), self.step, state.global_step
                _update_average(folder, before, step, decay, settings)
                self.step = step

    return KeepAverage()


def _update_average(
    folder: Path, before: int, step: int, decay: float, settings: dict[str, Any]
) -> None:
    checkpoint = _open_checkpoint(folder, step)
    average = folder / f"{AVERAGE}-{before}" if before else checkpoint
    given: dict[str, Any] = {"dtype": "F32", "on_integer_mismatch": "base", **settings}
    output = folder / f"{AVERAGE}-{step}"
    given |= {"method": "linear", "weight": decay, "overwrite": True}
    merge(base=checkpoint, models=[average], output=output, **given)
    kept = set(_steps(folder, CHECKPOINT))
    for old in _steps(folder, AVERAGE, step - 1):
        if old not in kept:
            with suppress(OSError):  # something was put into it
                remove_output(folder / f"{AVERAGE}-{old}")


def _steps(folder: Path, kind: str, until: int | None = None) -> list[int]:
    """Return the steps of the folders of a kind, in order."""
    names = (
        re.fullmatch(rf"{kind}-(0|[1-9][0-9]{{0,14}})", path.name) for path in _folders(folder)
    )
    steps = sorted(int(name[1]) for name in names if name)
    return [step for step in steps if until is None or step <= until]


def _folders(folder: Path) -> Iterable[Path]:
    try:
        return [path for path in folder.iterdir() if path.is_dir()]
    except OSError as error:
        raise InputError(f"{folder}: cannot be read: {error.strerror or error}") from None


def _open_checkpoint(folder: Path, step: int) -> Path:
    """Return the folder of a checkpoint's weights; refuse one whose saving did not end."""
    path = folder / f"{CHECKPOINT}-{step}"
    file = path / STATE_NAME
    state = None
    with suppress(InputError):
        state = parse_json(read_limited(file, MAX_STATE_BYTES), file)
    if not isinstance(state, dict) or state.get("global_step") != step:
        what = f"is incomplete, without a {STATE_NAME} of step {step}"
        raise InputError(f"{path}: {what}; delete the folder, or set until to an earlier step")
    inside = path / FSDP_FOLDER
    return inside if inside.is_dir() else path


def _shares(
    count: int, weights: Sequence[float] | None = None, decay: float | None = None
) -> list[float]:
    """Return the shares of checkpoints in their average, from the oldest on.

    >>> _shares(4), _shares(3, [1, 1, 2]), _shares(3, decay=0.5)
    ([0.25, 0.25, 0.25, 0.25], [0.25, 0.25, 0.5], [0.25, 0.25, 0.5])
    """
    if count < 2:
        raise RecipeError(f"last = {count}: an average needs at least 2 checkpoints")
    if weights is not None and decay is not None:
        raise RecipeError("weights and decay are both given; leave one of them out")
    if decay is not None:
        if not 0 < decay < 1:
            raise RecipeError(f"decay = {decay}: must be above 0 and below 1")
        return [(1 - decay * bool(n)) * decay ** (count - 1 - n) for n in range(count)]
    given = [1.0] * count if weights is None else list(weights)
    if len(given) != count:
        raise RecipeError(f"weights: {len(given)} given for {counted(count, 'checkpoint')}")
    if not math.isfinite(total := math.fsum(given)) or total <= 0:
        raise RecipeError(f"weights: the sum is {total:g}; it must be above 0")
    return [weight / total for weight in given]
