"""Jacobian lens: a state carried to the end of the network by its average linear effect, then read.

    lens_l(h) = softmax( T(W_Uᵀ norm(J_l h)) ) ,  J_l the mean Jacobian from the output of block l − 1 to the last one,

with J_n the identity. The matrices are TransformerLens' own ``JacobianLens``; the readout is ours, so that its levels
stand on the same scale as the others. Source: Gurnee et al., "Verbalizable Representations Form a Global Workspace
in Language Models" (2026).
"""

from typing import Any

import torch

from .._checks import fail
from ..path import Point
from .base import MethodResult, Question, ends_of
from .logit_lens import read_levels


def jacobian(question: Question, *, lens: Any = None, top_k: int = 5) -> MethodResult:
    """Levels of f through a Jacobian lens at the boundaries of the path that it covers, figures as for ``logit_lens``.

    ``lens``: a ``transformer_lens.tools.analysis.JacobianLens`` of this model, or the path of a saved one. Needs
    TransformerLens 3.9 or later and a bridge with raw weights, both of which the lens checks itself (ImportError, ValueError). ``top_k``: tokens kept per state.
    """
    kind = _lens_class()
    if lens is None:
        fail("lens", "a JacobianLens or its file for jacobian", "None", "fit one with JacobianLens.fit(model, prompts)")
    lens = lens if isinstance(lens, kind) else kind.load(str(lens))
    lens.validate_model(question.model)
    n = question.n_layers
    points = tuple(Point(l) for l in question.bounds[1:] if l == n or l - 1 in lens.jacobians)
    states = question.at(points)
    moved = [
        h if p.block == n else lens.transport(h, p.block - 1).to(h.dtype) for p, h in zip(points, states, strict=True)
    ]
    notes = (f"lens of {len(lens.jacobians)} layers fitted on {lens.n_prompts} prompts",)
    return read_levels(question, "jacobian", torch.stack(moved), top_k, **ends_of(points, n), notes=notes)


def _lens_class() -> Any:
    try:
        from transformer_lens.tools.analysis import JacobianLens
    except ImportError as error:
        raise ImportError(
            'jacobian needs transformer-lens 3.9 or later; run pip install "transformer-lens>=3.9"'
        ) from error
    return JacobianLens
