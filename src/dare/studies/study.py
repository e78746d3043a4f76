"""A study on disk: an SQLite file in Optuna's form, which several processes may work on.

Two Optuna studies are in it: `trials`, which samplers learn from, and `beside`, which holds the
baselines and the scores on the holdout. Processes take trials in turn; when a process dies, another
takes its trial with the same settings. So nothing is lost and nothing is done twice. This is the
only module that imports Optuna.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dare.errors import InputError, install_command, needed
from dare.run.processes import Presence
from dare.studies.results import Scored, Settings, State, Trial, values_text
from dare.studies.space import PLAN, Space

FORMAT = 2  # format 1 had formulas as objectives
TRIALS, BESIDE = "trials", "beside"
BASELINE, HOLDOUT = "baseline", "holdout"  # the kinds of trials in `beside`
WORKERS = "workers"  # the note with the marks of all processes that search in the study
KNOWN_BEFORE = ("number", "settings", "state", "name")  # the rest is written when a trial ends
# Notes on a trial: who took it and for what, and its outcome.
TAKEN, OUTCOME = "taken", "outcome"
_NAMES = ("WAITING", "RUNNING", "COMPLETE", "PRUNED", "FAIL")
OPTUNA_STATES = dict(zip(State, _NAMES, strict=True))
# Prefixes of names in messages for tables of a charter, if not the table's name.
CHARTER_WORDS = {"recipe": "", "models": "", "space": "--over "}
MOST_CHANGES = 6  # settings of another search that a message names: the first


@dataclass(frozen=True)
class Charter:
    """The subject of a study: if it changed, the trials would lose their meaning."""

    recipe: dict[str, Any]
    space: dict[str, Any]
    sampler: str
    seeds: int
    evaluator: str
    objective: dict[str, float]
    guards: tuple[str, ...]
    race: bool
    seed: int = 0
    evaluator_code: str = ""  # a digest; empty if it is not known, as in older studies

    @property
    def document(self) -> dict[str, Any]:
        """The charter in the types of JSON."""
        return dict(json.loads(json.dumps(asdict(self))))


class Planned(NamedTuple):
    """A setting to try, and the number to add to its seeds."""

    settings: Mapping[str, Any]
    shift: int = 0


class Placed(NamedTuple):
    """A trial, its place in the plan, and the number that is added to its seeds."""

    trial: Trial
    place: int
    shift: int


class Study:
    """An open study; close it when done."""

    def __init__(self, path: Path, charter: Charter | None = None) -> None:
        """Open a study, or begin one if there is a charter and no file."""
        if charter is None and not path.is_file():
            raise InputError(f"{path}: there is no study; start one with `dare search --study`")
        self.path = path
        self._presence = Presence(path)
        try:
            with self._presence.turn():
                self._open(charter)
        except BaseException:
            self._presence.close()
            raise

    def _open(self, charter: Charter | None) -> None:
        from sqlalchemy import URL

        optuna = _optuna()
        # In a file's name `?` and `%` have no special meaning.
        address = URL.create("sqlite", database=str(self.path.resolve())).render_as_string()
        try:
            storage = optuna.storages.RDBStorage(
                address, engine_kwargs={"connect_args": {"timeout": 60}}
            )
            known = {summary.study_name for summary in storage.get_all_studies()}
        except Exception as error:  # SQLAlchemy and Alembic raise many kinds
            reason = str(error).partition("\n")[0]
            raise InputError(f"{self.path}: is not a study that can be read: {reason}") from None
        if known and TRIALS not in known:
            raise InputError(f"{self.path}: contains studies of another program")
        self._begin(storage)
        if charter is not None and self._is_abandoned(charter):
            for name in self._studies:
                storage.delete_study(storage.get_study_id_from_name(name))
            self._begin(storage)
        if self.note("charter") is None:
            if charter is None:
                raise InputError(f"{self.path}: the study was never started; remove the file")
            self.keep("format", FORMAT)
            self.keep("charter", asdict(charter))
        if self.note("format") != FORMAT:
            versions = f"(format {self.note('format')}, and this one reads {FORMAT})"
            raise InputError(
                f"{self.path}: was written by another version of dare {versions}; "
                "give another --study, or use the version that wrote it"
            )
        kept = self.note("charter")
        self.charter = Charter(**{**kept, "guards": tuple(kept["guards"])})
        if charter is not None and (changes := list(self._changes(charter))):
            raise InputError(
                f"{self.path}: holds the results of another search. What differs:",
                *changes[:MOST_CHANGES],
                "Undo the change to continue this search, "
                "or start a new one with `--study NEW.db --write NEW.toml`",
            )
        if charter is not None:  # others must know of a process that has only begun
            alive = filter(self._presence.is_alive, self.note(WORKERS) or ())
            self.keep(WORKERS, [*alive, self._presence.mark])

    def _begin(self, storage: Any) -> None:
        self._storage = storage
        with _quiet():
            self._studies = {
                name: _optuna().create_study(
                    storage=storage, study_name=name, direction="maximize", load_if_exists=True
                )
                for name in (TRIALS, BESIDE)
            }

    def _is_abandoned(self, charter: Charter) -> bool:
        """Tell if it belongs to another search that has scored nothing, and nobody works on it.

        This happens after a wrong name in the objective, say: the corrected search can then use the
        same file.
        """
        if self.note("format") != FORMAT or self.note("charter") == charter.document:
            return False
        trials = [t for s in self._studies.values() for t in s.get_trials(deepcopy=False)]
        is_scored = any(trial.state.name in ("COMPLETE", "PRUNED") for trial in trials)
        return not is_scored and not any(map(self._presence.is_alive, self.note(WORKERS) or ()))

    def _changes(self, charter: Charter) -> Iterator[str]:
        """Yield each setting that has changed since the study began, with both values."""
        before, now = (dict(_flat(each.document)) for each in (self.charter, charter))
        codes = {before.pop("evaluator_code"), now.pop("evaluator_code")} - {""}
        for name in before | now:
            then, given = before.get(name, "not set"), now.get(name, "not set")
            if then != given:
                yield f"{name}: {values_text(then)} before, {values_text(given)} now"
        if len(codes) > 1:
            changed = "its contents changed: old and new scores cannot be compared"
            yield f"{charter.evaluator}: {changed}"

    def close(self) -> None:
        """Let others know that this process no longer works on it."""
        self._presence.close()

    def turn(self) -> AbstractContextManager[None]:
        """Wait until nobody else changes the study, and lock others out."""
        return self._presence.turn()

    def note(self, name: str) -> Any:
        """Return the value kept for the whole study under a name; None if there is none."""
        return self._studies[TRIALS].user_attrs.get(name)

    def keep(self, name: str, value: Any) -> None:
        """Keep a value that JSON can hold."""
        self._studies[TRIALS].set_user_attr(name, value)

    # ------------------------------------------------------------ taking trials

    def take_next(
        self,
        space: Space,
        planned: int,
        choose: Callable[[int, Sequence[Placed]], Planned | None],
        retry_before: int = 0,
    ) -> Claim | None:
        """Take the next trial; None if all that are planned have been taken.

        `choose` gives the setting of a place in the plan, or None to leave it to the sampler.
        Trials with numbers below `retry_before` that failed are tried again.
        """
        study = self._studies[TRIALS]
        with self.turn(), _quiet():
            known = study.get_trials(deepcopy=False)
            study.sampler = _sampler(self.charter.sampler, [self.charter.seed, len(known)])
            learning = None if self.charter.sampler == PLAN else space
            if (resumed := self._resume(study, known, lambda _taken: True, learning)) is not None:
                return resumed
            begun = self._begun(known)
            latest = {placed.place: placed for placed in begun}  # a retry comes later
            failed = {
                place: Planned(placed.trial.settings, placed.shift)
                for place, placed in latest.items()
                if placed.trial.state is State.FAILED and placed.trial.number < retry_before
            }
            place = next((p for p in range(planned) if p not in latest or p in failed), None)
            if place is None:
                return None
            chosen = failed.get(place) or choose(place, begun)
            taken: dict[str, Any] = {"place": place}
            if chosen is None:
                return self._claim(study, study.ask(), taken, space)
            taken |= {"settings": dict(chosen.settings), "shift": chosen.shift}
            return self._begin_trial(study, taken, learning)

    def take_beside(self, kind: str, wanted: Mapping[str, Settings]) -> Claim | None:
        """Take the first of some baselines, or of the candidates for the holdout, by name.

        None if all are taken or done. If one failed, each process tries it once.
        """
        study = self._studies[BESIDE]

        def is_wanted(taken: Mapping[str, Any]) -> bool:
            return taken["kind"] == kind and taken["name"] in wanted

        with self.turn(), _quiet():
            known = study.get_trials(deepcopy=False)
            if (resumed := self._resume(study, known, is_wanted)) is not None:
                return resumed
            closed = {
                taken["name"]
                for trial in known
                if is_wanted(taken := trial.user_attrs[TAKEN])
                and (trial.state.name != "FAIL" or taken["owner"] == self._presence.mark)
            }
            name = next((name for name in wanted if name not in closed), None)
            if name is None:
                return None
            taken = {"kind": kind, "name": name, "settings": dict(wanted[name])}
            return self._begin_trial(study, taken)

    def _resume(
        self,
        study: Any,
        known: Sequence[Any],
        is_wanted: Callable[[Any], bool],
        space: Space | None = None,
    ) -> Claim | None:
        """Take the first trial whose process has died, after taking it or just before."""
        if waiting := [trial for trial in known if trial.state.name == "WAITING"]:
            for _ in waiting:
                study.ask()
            known = study.get_trials(deepcopy=False)
        for found in known:
            taken = found.user_attrs.get(TAKEN, {"place": found.number})
            owner, is_open = taken.get("owner"), found.state.name == "RUNNING"
            if is_open and is_wanted(taken) and not (owner and self._presence.is_alive(owner)):
                trial = _optuna().trial.Trial(study, self._find_id(study, found.number))
                return self._claim(study, trial, taken, space)
        return None

    def _find_id(self, study: Any, number: int) -> int:
        within = self._storage.get_study_id_from_name(study.study_name)
        return int(self._storage.get_trial_id_from_study_id_trial_number(within, number))

    def _begin_trial(self, study: Any, taken: dict[str, Any], space: Space | None = None) -> Claim:
        """Begin a trial whose purpose is known, and is kept if this process dies.

        Without a sampler that learns from it, it is written in one go.
        """
        taken["owner"] = self._presence.mark
        if space is not None:
            study.enqueue_trial(space.suggestion(taken["settings"]), user_attrs={TAKEN: taken})
            return self._claim(study, study.ask(), taken, space)
        trials = _optuna().trial
        begun = trials.create_trial(state=trials.TrialState.RUNNING, user_attrs={TAKEN: taken})
        within = self._storage.get_study_id_from_name(study.study_name)
        number = self._storage.create_new_trial(within, begun)
        return self._claimed(study, trials.Trial(study, number), taken)

    def _claim(self, study: Any, trial: Any, taken: Mapping[str, Any], space: Any) -> Claim:
        """Write down who has a trial, and its settings if the sampler chooses them."""
        suggested = {} if space is None else {"settings": space.suggest(trial)}
        known = {**suggested, **taken, "owner": self._presence.mark}
        trial.set_user_attr(TAKEN, known)
        return self._claimed(study, trial, known)

    def _claimed(self, study: Any, trial: Any, taken: Mapping[str, Any]) -> Claim:
        settings, shift = taken["settings"], taken.get("shift", 0)
        return Claim(self, study, trial, settings, shift, taken.get("name", ""))

    def is_busy(self, kind: str = "") -> bool:
        """Tell if a trial that was taken is not done; with `kind`, look beside the trials."""
        study = self._studies[BESIDE if kind else TRIALS]
        return any(
            not trial.state.is_finished()
            for trial in study.get_trials(deepcopy=False)
            if not kind or trial.user_attrs[TAKEN]["kind"] == kind
        )

    # ------------------------------------------------------------ reading

    def trials(self) -> list[Placed]:
        """Return all trials that have begun, in the order of their numbers."""
        return self._begun(self._studies[TRIALS].get_trials(deepcopy=False))

    def _begun(self, known: Iterable[Any]) -> list[Placed]:
        taken = [(trial, trial.user_attrs[TAKEN]) for trial in known if TAKEN in trial.user_attrs]
        return [Placed(self._read(t), note["place"], note.get("shift", 0)) for t, note in taken]

    def beside(self, kind: str) -> list[Trial]:
        """Return the baselines, or the trials on the holdout; the last try of each."""
        begun = self._studies[BESIDE].get_trials(deepcopy=False)
        of_kind = [trial for trial in begun if trial.user_attrs[TAKEN]["kind"] == kind]
        latest = {trial.user_attrs[TAKEN]["name"]: trial for trial in of_kind}
        return [self._read(trial) for trial in latest.values()]

    def _read(self, found: Any) -> Trial:
        state = next(state for state, name in OPTUNA_STATES.items() if name == found.state.name)
        taken = found.user_attrs[TAKEN]
        if state is State.RUNNING and not self._presence.is_alive(taken["owner"]):
            state = State.WAITING  # until somebody continues the study
        kept = dict(found.user_attrs.get(OUTCOME, {})) if found.state.is_finished() else {}
        if kept.get("scored") is not None:
            kept["scored"] = Scored(**kept["scored"])
        kept["broken"] = tuple(kept.get("broken", ()))
        kept.setdefault("seed", 0)
        settings, name = taken.get("settings", {}), taken.get("name", "")
        return Trial(number=found.number, settings=settings, state=state, name=name, **kept)


@dataclass(frozen=True)
class Claim:
    """A trial that this process works on."""

    study: Study
    _within: Any  # the Optuna study that it is in
    _taken: Any
    settings: Mapping[str, Any]
    shift: int
    name: str  # the name of a baseline, or of what goes to the holdout

    @property
    def number(self) -> int:
        return int(self._taken.number)

    def end(
        self, state: State, *, slacks: Mapping[str, float] | None = None, **outcome: Any
    ) -> Trial:
        """Write down the outcome; the last thing written makes it count."""
        for name, slack in (slacks or {}).items():
            self._taken.set_constraint(name, slack)
        ended = Trial(self.number, dict(self.settings), outcome.pop("seed", 0), state, **outcome)
        kept = {name: v for name, v in asdict(ended).items() if name not in KNOWN_BEFORE}
        self._taken.set_user_attr(OUTCOME, kept)
        value = ended.objective if state is State.DONE else None
        with self.study.turn(), _quiet():
            optuna_state = _optuna().trial.TrialState[OPTUNA_STATES[state]]
            self._within.tell(self._taken, value, state=optuna_state)
        return ended


def _sampler(name: str, seed: Sequence[int]) -> Any:
    """Make a sampler; each trial has a new one, so that a resumed study continues unchanged."""
    samplers = _optuna().samplers
    options: dict[str, Any] = {"multivariate": True, "group": True} if name == "tpe" else {}
    kind = samplers.TPESampler if name == "tpe" else samplers.RandomSampler
    return kind(seed=int(np.random.SeedSequence(seed).generate_state(1)[0]), **options)


def _flat(document: Mapping[str, Any], start: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the settings of a charter: their names as people write them, and their values."""
    for name, value in document.items():
        if isinstance(value, dict) and "from" not in value:
            yield from _flat(value, CHARTER_WORDS.get(name, f"{start}{name}."))
        else:
            yield f"{start}{name}", value


def _optuna() -> Any:
    with needed(InputError(f"a search needs Optuna: {install_command('search')}")):
        import optuna
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide Optuna's warnings about experimental features."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
