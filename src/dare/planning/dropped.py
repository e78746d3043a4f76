"""Models from which elements were dropped before: what a recipe's own dropping means for them.

A first stage that drops (`dare`, `darex`) finds done what it would do, if rate and seed are those
of the file: it then only rescales. Where a recipe does not say, rate and seed are the file's. A
chain that does not drop takes what is left divided by 1 - p, as if `dare` came first.
"""

from __future__ import annotations

import glob
from collections import defaultdict
from collections.abc import Sequence

from dare.inputs.sources import Drop, Source
from dare.recipe.schema import Recipe, TensorRule
from dare.stages import Settings

DROPPERS = ("dare", "darex")


def take_over(recipe: Recipe, models: Sequence[Source]) -> Recipe:
    """The recipe with the rates and seeds of the files, for models that it says nothing of."""
    entries, rules = list(recipe.models), list(recipe.tensors)
    drops_itself = recipe.chain[0][0].name in DROPPERS
    for index, (entry, seed, model) in enumerate(
        zip(recipe.models, recipe.seeds(), models, strict=True)
    ):
        drops = {name: drop for name in model.tensors if (drop := model.drop_of(name))}
        seeds = {drop.seed for drop in drops.values()}
        if seeds - {seed} and entry.seed is None and recipe.has_default_seed:
            entries[index] = entries[index].model_copy(update={"seed": seeds.pop()})
        if not drops_itself or any(recipe.sets("drop_rate", name, index) for name in drops):
            continue
        by_rate = defaultdict(list)
        for name, drop in drops.items():
            by_rate[drop.rate].append(glob.escape(name))
        usual = max(by_rate, key=lambda rate: len(by_rate[rate]), default=None)
        if usual not in (None, recipe.chain[0][1]["drop_rate"]):
            own = {**entry.settings, "drop_rate": usual}
            entries[index] = entries[index].model_copy(update={"settings": own})
        rules += [
            TensorRule(match=tuple(names), model=str(entry.file), settings={"drop_rate": rate})
            for rate, names in by_rate.items()
            if rate != usual
        ]
    if (tuple(entries), tuple(rules)) == (recipe.models, recipe.tensors):
        return recipe
    kept = {"output_digest": recipe.output_digest}
    return recipe.model_copy(update={"models": tuple(entries), "tensors": tuple(rules), **kept})


def left_to_make_up(
    recipe: Recipe, drop: Drop, tensor: str, model: int, settings: Sequence[Settings]
) -> Drop | str | None:
    """What is to be made up for before the first stage; text, if another mask would drop too."""
    stages = [stage for stage, _ in recipe.chain[:-1]]
    droppers = [place for place, stage in enumerate(stages) if stage.name in DROPPERS]
    if not droppers:
        return drop
    was = f"its delta file was made with drop_rate = {drop.rate:g} and seed = {drop.seed}"
    if droppers != [0] or not stages[0].redrops(settings[0]):
        return f"{was}, and {recipe.method} would drop by another mask; take a method without dare"
    rate, seed = settings[0]["drop_rate"], recipe.seeds()[model]
    if (rate, seed, tensor) != drop:
        return (
            f"{was}, and the recipe has drop_rate = {rate:g} and seed = {seed}; set these for it, "
            "leave both out, or take a method without dare"
        )
    return None
