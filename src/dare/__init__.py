"""Merge fine-tuned models by DARE and related methods: drop most of each change, rescale the rest.

    import dare

    dare.merge(base="base", models=["math", "code"], output="merged", drop_rate=0.5)

Names are imported when they are first used, so that `import dare` costs next to nothing. Those that
published descriptions of DARE use live in `dare.compat`, and can be imported from here too.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_NAMES = {
    "analysis.advice": "Advice advise judge",
    "analysis.analyzing": "analyze analyze_arrays",
    "analysis.document": "Analysis",
    "analysis.readiness": "Readiness assess",
    "api": "apply_delta finish load_recipe merge merge_arrays merge_slice plan",
    "deltas.compressing": "DeltaReport compress",
    "deltas.gathering": "GramCollector recompute_norms write_grams",
    "deltas.live": "LiveDelta load_delta",
    "deltas.restoring": "Restoration",
    "errors": (
        "ClusterError DareError DareWarning EvaluationError HeaderError InputError MismatchError "
        "NotFiniteError OutputError RecipeError VerificationError"
    ),
    "mixtures.building": "moe",
    "output.receipt": "Report",
    "output.signing": "Signing sign",
    "run.slices": "SliceReport",
    "output.verification": "Verification verify",
    "planning.plan": "Plan",
    "recipe.options": "RunOptions",
    "recipe.recipe": "ModelEntry Recipe Request TensorRule",
    "stages.registry": "load_stages",
    "studies.candidates": "Candidate Candidates",
    "studies.document": "SearchResult",
    "studies.searching": "search",
    "tensors.mask": "MASK_VERSION keep_mask",
    "trainers.averaging": "average_checkpoints averaging_callback ema_callback",
}
# Importable from here, but not listed.
_COMPAT = (
    "Configuration DARESparsityAnalyzer DareConfig DareMerger LayerSparsityMetrics "
    "SparsityAnalysis dare_drop dare_merge dare_merge_readiness dare_slerp_merge dare_sparsify "
    "dare_ties_merge detect_delta_sparsity ties_disjoint_merge ties_elect_sign ties_trim"
)
_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = [*sorted(_HOMES), "__version__"]  # noqa: PLE0604 (they are text)

_HOMES |= dict.fromkeys(_COMPAT.split(), "compat")


def __getattr__(name: str) -> Any:
    if name == "compat":
        return importlib.import_module("dare.compat")
    if name not in _HOMES:
        raise AttributeError(f"module 'dare' has no attribute {name!r}")
    loaded = getattr(importlib.import_module(f"dare.{_HOMES[name]}"), name)
    globals()[name] = loaded
    return loaded


def __dir__() -> list[str]:
    return __all__
