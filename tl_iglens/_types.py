"""The vocabulary of the package: axis words, named choices, and what a model must offer.

Axes: ``point`` (a boundary on the path), ``segment`` (between two points), ``step`` (inside a
segment), ``batch``, ``pos``, ``d_model``, ``d_vocab``, ``component``, ``site``; ``cell`` is one
analysed position of one row, ``row`` a state that is read, ``ctx`` a place in the prompt, ``id`` one of
the tokens of a token set.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

import torch

Quantity = Literal["prob", "log_prob", "logit"]
Estimator = Literal["prediction_aware", "midpoint", "left", "right", "trapezoid", "gauss_legendre"]
OnsetRule = Literal["mass", "largest", "settled"]
NamedBaseline = Literal["embed", "zero", "mean", "bos"]

QUANTITIES: tuple[str, ...] = ("prob", "log_prob", "logit")
ESTIMATORS: tuple[str, ...] = (
    "prediction_aware",
    "midpoint",
    "left",
    "right",
    "trapezoid",
    "gauss_legendre",
)
ONSET_RULES: tuple[str, ...] = ("mass", "largest", "settled")
BASELINES: tuple[str, ...] = ("embed", "zero", "mean", "bos")

# What TransformerLens calls a hook: ``fn(activation, hook)``, registered under a name or a name filter.
Hook = tuple[str | Callable[[str], bool], Callable[..., Any]]
Hooks = Sequence[Hook]


@runtime_checkable
class HookedModel(Protocol):
    """What the package needs of a model; HookedTransformer and TransformerBridge both have it."""

    cfg: Any
    unembed: torch.nn.Module

    def __call__(self, input: Any, *args: Any, **kwargs: Any) -> Any: ...

    def hooks(self, fwd_hooks: Any = ..., bwd_hooks: Any = ..., *args: Any, **kwargs: Any) -> Any: ...


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of softmax, sums and results: float64 for a float64 model, float32 for every other."""
    return torch.float64 if dtype == torch.float64 else torch.float32
