"""A receipt for a probability: exact additive credits per layer of a TransformerLens model."""

from ._checks import NonFiniteStateError, ReadoutMismatchError
from .collect import ResidualStates, collect_states
from .lens import ig_lens
from .result import IGLensResult, Onset, RunInfo
from .tokens import TokenSet

__all__ = [
    "IGLensResult",
    "NonFiniteStateError",
    "Onset",
    "ReadoutMismatchError",
    "ResidualStates",
    "RunInfo",
    "TokenSet",
    "collect_states",
    "ig_lens",
]
