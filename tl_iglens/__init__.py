"""A receipt for a probability: exact additive credits per layer of a TransformerLens model."""

from . import corpus, plotting
from ._checks import NonFiniteStateError, ReadoutMismatchError
from .ablation import AblationResult, ablate
from .collect import ResidualStates, collect_states
from .compare import Comparison, compare
from .components import direct_probability_attribution
from .generation import explain_generation
from .lens import ig_lens
from .methods import MethodResult, register_method
from .methods.tuned_lens import TunedLens
from .report import write_report
from .result import IGLensResult, Onset, RunInfo
from .tokens import TokenSet
from .track import ProbabilityFlow, Tracks, probability_flow, track
from .validation import OnsetStudy, validate_onset

__all__ = [
    "AblationResult",
    "Comparison",
    "IGLensResult",
    "MethodResult",
    "NonFiniteStateError",
    "Onset",
    "OnsetStudy",
    "ProbabilityFlow",
    "ReadoutMismatchError",
    "ResidualStates",
    "RunInfo",
    "TokenSet",
    "Tracks",
    "TunedLens",
    "ablate",
    "collect_states",
    "compare",
    "corpus",
    "direct_probability_attribution",
    "explain_generation",
    "ig_lens",
    "plotting",
    "probability_flow",
    "register_method",
    "track",
    "validate_onset",
    "write_report",
]
