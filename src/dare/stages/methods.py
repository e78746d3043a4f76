"""Methods: chains of stages by name, and other names for them."""

from __future__ import annotations

import copyreg

from dare.errors import RecipeError, did_you_mean
from dare.stages.outside import load_installed_stages, load_stages
from dare.stages.registry import STAGES, Stage

ALIASES: dict[str, str] = {
    "task_arithmetic": "sum",
    "dare_linear": "dare+linear",
    "dare_ties": "dare+ties",
    "dare_slerp": "dare+slerp",
    "dare_task_arithmetic": "dare+sum",
    "average": "linear",
    "dare": "dare+linear",
    "trim": "trim+linear",
    "darex": "darex+linear",
    "breadcrumbs": "breadcrumbs+linear",
    "breadcrumbs_ties": "breadcrumbs+ties",
    "della": "della+ties",
    "della_linear": "della+linear",
    "nm": "nm+linear",
}
"""Names that people bring along, as chains of ours."""
IMPLIED = {("ties", "keep_ratio"): "trim"}
"""Parameters of combine stages that, when given, put a delta stage before them."""


def find_stage(name: str, file: str = "") -> Stage:
    """The stage of that name; one that is not registered yet is, from its file or its package."""
    if name not in STAGES and file:
        load_stages(file)
    elif name not in STAGES:
        load_installed_stages()
    if name not in STAGES:
        known = [*STAGES, *ALIASES]
        raise RecipeError(
            f"there is no stage {name!r}{did_you_mean(name, known)}; "
            f"stages: {', '.join(STAGES)}; other names: {', '.join(_other_names())}; "
            "a stage of your own is given with --stage FILE"
        )
    return STAGES[name]


def _other_names() -> list[str]:
    """The aliases that are no stages as well."""
    return [alias for alias in ALIASES if alias not in STAGES]


def parse_method(method: str) -> tuple[Stage, ...]:
    """Turn `"dare+ties"`, or an alias such as `"DARE_TIES"`, into its stages.

    >>> [stage.name for stage in parse_method("DARE_TIES")]
    ['dare', 'ties']
    """
    chain = ALIASES.get(method) or ALIASES.get(method.lower(), method)
    stages = []
    for name in chain.split("+"):
        try:
            stages.append(find_stage(name if name in STAGES else name.lower()))
        except RecipeError as error:
            raise RecipeError(f"method {method!r}: {error}") from None
    for stage in stages:
        if stages.count(stage) > 1:
            raise RecipeError(
                f"method {method!r}: {stage.name} stands in it more than once; "
                "the second would do the same again"
            )
    if [stage.kind for stage in stages] != ["delta"] * (len(stages) - 1) + ["combine"]:
        combiners = ", ".join(stage.name for stage in STAGES.values() if stage.kind == "combine")
        raise RecipeError(
            f"method {method!r}: a method is any delta stages and then one combine stage "
            f"({combiners}), as in 'dare+linear'"
        )
    return tuple(stages)


# A stage travels by its name and file: where it arrives, it is registered too.
copyreg.pickle(Stage, lambda stage: (find_stage, (stage.name, stage.file)))
