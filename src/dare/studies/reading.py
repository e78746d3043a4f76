"""A study read from its file, and its result: the data, the conclusion and the recipes."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any

from dare.documents.document import Document
from dare.documents.notices import notice, notice_from_dict
from dare.documents.page import render_page
from dare.documents.shown import Shown, json_ready
from dare.errors import InputError, printable
from dare.output.targets import write_file
from dare.recipe.document import request_from_document
from dare.recipe.entries import write_toml
from dare.recipe.recipe import Recipe
from dare.studies.conclusions import conclude
from dare.studies.document import grounds, study_document
from dare.studies.results import Conclusion, Ranked, Role, StudyData, Trial, key_of
from dare.studies.space import recipe_of, seed_shifts
from dare.studies.study import BASELINE, HOLDOUT, Study

OUTPUT = "merged.safetensors"
SIGNED = ", found by `dare search`."
"""The end of a recipe's first line: a search writes over its own, and over no others."""


@dataclass(frozen=True, repr=False)
class SearchResult(Shown):
    """The result of a search."""

    study: Path
    data: StudyData
    conclusion: Conclusion
    best: Recipe | None
    """The recipe of the best setting, or of a baseline that beats it; None if there is nothing to
    merge, for which `conclusion.no_recipe` has the reason."""
    simplest: Recipe | None
    """The simplest recipe that cannot be told apart from the best and that no baseline beats."""

    def to_dict(self) -> dict[str, Any]:
        """Return the result as plain values, ready for JSON; the items stay in the study."""
        document = json_ready(asdict(self.data))
        for table in ("baselines", "trials", "holdout"):
            for trial in document[table]:
                scored = trial.pop("scored") or {}
                trial["scores"] = scored.get("scores")
                trial["items"] = len(scored.get("items", ()))
        for name in ("advice", "output", "importance"):
            document.pop(name)
        found = {"best": self.best, "simplest": self.simplest}
        recipes = {
            name: None if made is None else made.to_document() for name, made in found.items()
        }
        conclusion = json_ready(asdict(self.conclusion))
        return {**document, "answer": str(self), "conclusion": conclusion, "recipes": recipes}

    def document(self, *, rows: int = 12, outputs: bool = False) -> Document:
        """Return everything that is to be shown; a terminal shows so many `rows` of settings.

        With `outputs` it also shows what the evaluators of failed trials printed.
        """
        return study_document(self.data, self.conclusion, rows=rows, outputs=outputs)

    def to_html(self, path: str | PathLike[str] | None = None, *, overwrite: bool = True) -> str:
        """Return the page of the study, one text that needs no network; write it to a path."""
        text = render_page(self.document())
        if path is not None:
            write_file(Path(path), text.encode(), "page", overwrite=overwrite)
        return text

    def to_toml(self, *, simplest: bool = False, output: Path | None = None) -> str:
        """Return the best recipe, or the simplest, with the evidence for it as comments."""
        recipe = self.simplest if simplest else self.best
        if recipe is None:
            raise InputError(f"{self.study}: {self}; so there is no recipe to write")
        which = "simplest within noise" if simplest else "best"
        tables = {**recipe.to_tables(), "output": str(output or recipe.output or OUTPUT)}
        lines = [f"The {which} of {self.study.name}{SIGNED}"]
        for sentence in grounds(self.conclusion):
            lines += textwrap.wrap(printable(sentence), 96, subsequent_indent="  ")
        return "\n".join([*(f"# {line}" for line in lines), "", write_toml(tables)])

    def __repr__(self) -> str:
        return f"<SearchResult of {self.study}: {self}>"

    def __str__(self) -> str:
        chosen = self.conclusion.chosen
        if chosen is not None and not self.conclusion.no_recipe:
            return f"{chosen.label}: {chosen.objective}"
        return self.conclusion.no_recipe


def read_result(path: Path) -> SearchResult:
    """Return what a study shows by now, also while others work on it."""
    with closing(Study(path)) as study:
        return result_of(study)


def result_of(study: Study) -> SearchResult:
    """Return what an open study shows by now."""
    data, conclusion = read_study(study)
    best, simplest = (
        None if conclusion.no_recipe or ranked is None else recipe_of(data, ranked)
        for ranked in (conclusion.chosen, conclusion.simplest)
    )
    return SearchResult(study.path, data, conclusion, best, simplest)


def read_study(study: Study, *, resamples: int = 2000) -> tuple[StudyData, Conclusion]:
    """Return all that a study holds, and the conclusion from it."""
    charter = study.charter
    recipe = request_from_document(charter.recipe, str(study.path)).recipe
    latest = {placed.place: placed.trial for placed in study.trials()}  # a retry comes later
    trials = sorted(latest.values(), key=lambda trial: trial.number)
    data = StudyData(
        recipe=charter.recipe,
        space=charter.space,
        sampler=charter.sampler,
        planned=study.note("planned") or len(trials),
        seeds=tuple(recipe.seed + shift for shift in seed_shifts(charter.seeds)),
        evaluator=charter.evaluator,
        objective=charter.objective,
        guards=charter.guards,
        baselines=tuple(study.beside(BASELINE)),
        trials=tuple(trials),
        holdout_evaluator=study.note("holdout"),
        advice=study.note("advice"),
        left_out=tuple(study.note("left_out") or ()),
        output=study.note("output"),
        notices=(
            *(notice("study_remark", text=t.rstrip(".")) for t in study.note("remarks") or ()),
            *map(notice_from_dict, study.note("notices") or ()),
        ),
        importance=study.importance(),
    )
    conclusion = conclude(data, resamples=resamples)
    scored = study.beside(HOLDOUT)
    if scored and conclusion.best is not None:
        data = replace(data, holdout=tuple(_by_role(scored, conclusion)))
        conclusion = conclude(data, resamples=resamples)
    return data, conclusion


def _by_role(scored: Sequence[Trial], conclusion: Conclusion) -> list[Trial]:
    """Return what was scored on the holdout, under the names that hold now.

    Candidates are kept by their settings: a search that went on may have another winner.
    """
    keys = {key_of(found.settings): role for role, found in winners(conclusion).items()}
    named = []
    for trial in scored:
        if not trial.settings:
            named.append(trial)  # a baseline
        elif (role := keys.get(key_of(trial.settings))) is not None:
            named.append(replace(trial, name=role))
        elif trial.name.partition(" ")[0] == Role.WINNER:  # its settings follow
            named.append(replace(trial, name=Role.EARLIER_WINNER))
    return named


def winners(conclusion: Conclusion) -> dict[Role, Ranked]:
    """Return the best, and the second best setting, if one keeps to the guards."""
    rest = [r for r in conclusion.ranking if r != conclusion.best and not r.broken]
    best = [] if conclusion.best is None else [conclusion.best]
    return dict(zip((Role.WINNER, Role.RUNNER_UP), [*best, *rest[:1]], strict=False))
