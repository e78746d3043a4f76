"""Merge fine-tuned language models by DARE: drop most of each change, rescale the rest, add up.

    import dare

    print(dare.merge("recipe.toml"))

Names are imported when they are first used, so that `import dare` costs next to nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dare.analysis.judge.advice import advise
    from dare.analysis.judge.judgement import Advice, Readiness
    from dare.analysis.judge.readiness import assess
    from dare.analysis.measure.analyzing import analyze, analyze_arrays
    from dare.analysis.results import Analysis
    from dare.analysis.sparsity import (
        Configuration,
        DARESparsityAnalyzer,
        LayerSparsityMetrics,
        SparsityAnalysis,
        dare_merge_readiness,
    )
    from dare.api import load_recipe, merge, merge_arrays, plan
    from dare.compat import (
        DareConfig,
        DareMerger,
        dare_drop,
        dare_merge,
        dare_slerp_merge,
        dare_sparsify,
        dare_ties_merge,
        detect_delta_sparsity,
        ties_disjoint_merge,
        ties_elect_sign,
        ties_trim,
    )
    from dare.errors import (
        DareError,
        DareWarning,
        HeaderError,
        InputError,
        MismatchError,
        OutputError,
        RecipeError,
        VerificationError,
    )
    from dare.output.report import Report
    from dare.output.verification import Verification, verify
    from dare.planning.plan import Plan
    from dare.recipe.schema import ModelEntry, Recipe, TensorRule
    from dare.run.rates import Estimate, estimate
    from dare.stages.outside import load_stages
    from dare.tensors.mask import MASK_VERSION, keep_mask

__version__ = "0.1.0"

_HOMES = {
    "analysis.judge.advice": ("advise",),
    "analysis.judge.judgement": ("Advice", "Readiness"),
    "analysis.judge.readiness": ("assess",),
    "analysis.results": ("Analysis",),
    "analysis.sparsity": (
        "Configuration",
        "DARESparsityAnalyzer",
        "LayerSparsityMetrics",
        "SparsityAnalysis",
        "dare_merge_readiness",
    ),
    "analysis.measure.analyzing": ("analyze", "analyze_arrays"),
    "api": ("load_recipe", "merge", "merge_arrays", "plan"),
    "compat": (
        "DareConfig",
        "DareMerger",
        "dare_drop",
        "dare_merge",
        "dare_slerp_merge",
        "dare_sparsify",
        "dare_ties_merge",
        "detect_delta_sparsity",
        "ties_disjoint_merge",
        "ties_elect_sign",
        "ties_trim",
    ),
    "errors": (
        "DareError",
        "DareWarning",
        "HeaderError",
        "InputError",
        "MismatchError",
        "OutputError",
        "RecipeError",
        "VerificationError",
    ),
    "stages.outside": ("load_stages",),
    "tensors.mask": ("MASK_VERSION", "keep_mask"),
    "planning.plan": ("Plan",),
    "run.rates": ("Estimate", "estimate"),
    "recipe.schema": ("ModelEntry", "Recipe", "TensorRule"),
    "output.report": ("Report",),
    "output.verification": ("Verification", "verify"),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "MASK_VERSION",
    "Advice",
    "Analysis",
    "Configuration",
    "DARESparsityAnalyzer",
    "DareConfig",
    "DareError",
    "DareMerger",
    "DareWarning",
    "Estimate",
    "HeaderError",
    "InputError",
    "LayerSparsityMetrics",
    "MismatchError",
    "ModelEntry",
    "OutputError",
    "Plan",
    "Readiness",
    "Recipe",
    "RecipeError",
    "Report",
    "SparsityAnalysis",
    "TensorRule",
    "Verification",
    "VerificationError",
    "__version__",
    "advise",
    "analyze",
    "analyze_arrays",
    "assess",
    "dare_drop",
    "dare_merge",
    "dare_merge_readiness",
    "dare_slerp_merge",
    "dare_sparsify",
    "dare_ties_merge",
    "detect_delta_sparsity",
    "estimate",
    "keep_mask",
    "load_recipe",
    "load_stages",
    "merge",
    "merge_arrays",
    "plan",
    "ties_disjoint_merge",
    "ties_elect_sign",
    "ties_trim",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'dare' has no attribute {name!r}")
    found = getattr(importlib.import_module(f"dare.{_HOME_OF[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return __all__
