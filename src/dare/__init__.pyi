"""The names of the package with their types, for those who check them; `__init__.py` loads them."""

from dare.analysis.advice import Advice as Advice, advise as advise, judge as judge
from dare.analysis.analyzing import analyze as analyze, analyze_arrays as analyze_arrays
from dare.analysis.document import Analysis as Analysis
from dare.analysis.readiness import Readiness as Readiness, assess as assess
from dare.api import (
    apply_delta as apply_delta,
    finish as finish,
    load_recipe as load_recipe,
    merge as merge,
    merge_arrays as merge_arrays,
    merge_slice as merge_slice,
    plan as plan,
)
from dare.compat import (
    Configuration as Configuration,
    DareConfig as DareConfig,
    DareMerger as DareMerger,
    DARESparsityAnalyzer as DARESparsityAnalyzer,
    LayerSparsityMetrics as LayerSparsityMetrics,
    SparsityAnalysis as SparsityAnalysis,
    dare_drop as dare_drop,
    dare_merge as dare_merge,
    dare_merge_readiness as dare_merge_readiness,
    dare_slerp_merge as dare_slerp_merge,
    dare_sparsify as dare_sparsify,
    dare_ties_merge as dare_ties_merge,
    detect_delta_sparsity as detect_delta_sparsity,
    ties_disjoint_merge as ties_disjoint_merge,
    ties_elect_sign as ties_elect_sign,
    ties_trim as ties_trim,
)
from dare.deltas.compressing import DeltaReport as DeltaReport, compress as compress
from dare.deltas.gathering import (
    GramCollector as GramCollector,
    recompute_norms as recompute_norms,
    write_grams as write_grams,
)
from dare.deltas.live import LiveDelta as LiveDelta, load_delta as load_delta
from dare.deltas.restoring import Restoration as Restoration
from dare.errors import (
    ClusterError as ClusterError,
    DareError as DareError,
    DareWarning as DareWarning,
    EvaluationError as EvaluationError,
    HeaderError as HeaderError,
    InputError as InputError,
    MismatchError as MismatchError,
    NotFiniteError as NotFiniteError,
    OutputError as OutputError,
    RecipeError as RecipeError,
    VerificationError as VerificationError,
)
from dare.mixtures.building import moe as moe
from dare.output.receipt import Report as Report
from dare.run.slices import SliceReport as SliceReport
from dare.output.signing import Signing as Signing, sign as sign
from dare.output.verification import Verification as Verification, verify as verify
from dare.planning.plan import Plan as Plan
from dare.recipe.options import RunOptions as RunOptions
from dare.recipe.recipe import (
    ModelEntry as ModelEntry,
    Recipe as Recipe,
    Request as Request,
    TensorRule as TensorRule,
)
from dare.stages.registry import load_stages as load_stages
from dare.studies.candidates import Candidate as Candidate, Candidates as Candidates
from dare.studies.document import SearchResult as SearchResult
from dare.studies.searching import search as search
from dare.tensors.mask import MASK_VERSION as MASK_VERSION, keep_mask as keep_mask
from dare.trainers.averaging import (
    average_checkpoints as average_checkpoints,
    averaging_callback as averaging_callback,
    ema_callback as ema_callback,
)

__version__: str
