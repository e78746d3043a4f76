"""The recipe that a study has found, with what speaks for it as comments."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from dare.errors import InputError, printable
from dare.recipe.toml import write_toml
from dare.studies.page.words import holdout_text
from dare.studies.results import Conclusion
from dare.tensors.sizes import times

if TYPE_CHECKING:
    from dare.studies.searching import SearchResult

OUTPUT = "merged.safetensors"
SIGNED = ", found by `dare search`."
"""How the first line ends: a search writes over its own recipes, and over no others."""


def best_toml(result: SearchResult, *, simplest: bool = False, output: Path | None = None) -> str:
    """The best recipe, or the simplest that cannot be told apart from it, as TOML."""
    recipe = result.simplest if simplest else result.best
    if recipe is None:
        raise InputError(f"{result.study}: {result}; so there is no recipe to write")
    which = "simplest within noise" if simplest else "best"
    tables = {**recipe.to_tables(), "output": str(output or recipe.output or OUTPUT)}
    lines = [f"# The {which} of {result.study.name}{SIGNED}"]
    for sentence in grounds(result.conclusion):
        wrapped = textwrap.wrap(printable(sentence), 96, initial_indent="", subsequent_indent="  ")
        lines += [f"# {line}" for line in wrapped]
    return "\n".join([*lines, "", write_toml(tables)])


def grounds(conclusion: Conclusion) -> Iterator[str]:
    """What speaks for the best, and what does not, a sentence each."""
    best = conclusion.best
    assert best is not None
    if conclusion.chosen is not None and conclusion.better:
        chosen = conclusion.chosen
        yield f"The baseline {chosen.label}, objective {chosen.objective}, beats the settings."
    count = times(len(conclusion.ranking), "setting")
    yield f"The best of {count}: {best.label}, objective {best.objective}."
    for difference in conclusion.against:
        yield f"Against {difference.other}: {difference.estimate}, {difference.verdict}."
    others = [ranked.label for ranked in conclusion.tied]
    if others:
        shown = "; ".join(others[:5]) + ("; …" if len(others) > 5 else "")
        yield f"Within noise of {times(len(others), 'other setting')}: {shown}."
    if conclusion.simplest not in (None, best, conclusion.chosen):
        assert conclusion.simplest is not None
        yield f"The simplest of these: {conclusion.simplest.label}."
    if conclusion.holdout is not None:
        yield f"The holdout: {holdout_text(conclusion.holdout)}"
        for difference in conclusion.holdout.against:
            yield (
                f"On the holdout against {difference.other}: {difference.estimate}, "
                f"{difference.verdict}."
            )
    yield from conclusion.remarks
