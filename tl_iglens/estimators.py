"""Credits of segments for any scalar readout ``f: [..., d_model] -> [...]``; no model in sight.

A path visits states h_0, h_1, …, h_k. The credit of segment j is the integrated gradient of f along the
straight line from h_j to h_{j+1},

    IG_j = ∫₀¹ ⟨h_{j+1} − h_j, ∇f(h_j + α (h_{j+1} − h_j))⟩ dα = f(h_{j+1}) − f(h_j),

so the credits telescope: Σ_j IG_j = f(h_k) − f(h_0) (arXiv 2606.29693, Proposition 1).

* ``prediction_aware`` credits every step with the change of f observed over it (after IDGI, Yang et al.
  2023). It needs no gradient and is exact at any number of steps.
* ``left``, ``right``, ``trapezoid`` (equal steps whose ends neighbours share), ``midpoint`` and
  ``gauss_legendre`` (nodes inside the segment) are quadratures of the integral and carry its error.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from ._checks import check_choice, check_positive, fail
from ._types import ESTIMATORS
from .path import Grid, blocks_of, interior_grid, interpolate, shared_grid

Readout = Callable[[Tensor], Tensor]  # [..., d_model] -> [...]
GradReadout = Callable[[Tensor], tuple[Tensor, Tensor]]  # [..., d_model] -> [...], [..., d_model]


@dataclass(frozen=True)
class SegmentCredits:
    """Credits of the segments, f at the points, and the credit of every step inside a segment."""

    attribution: Float[Tensor, "segment *cell"]
    levels: Float[Tensor, "point *cell"]
    steps: Float[Tensor, "segment step *cell"]


def segment_credits(
    f: Readout,
    states: Float[Tensor, "point *cell d_model"],
    *,
    estimator: str = "prediction_aware",
    n_steps: int = 1,
    value_and_grad: GradReadout | None = None,
    max_nodes: int | None = None,
) -> SegmentCredits:
    """Credits of every segment of a path through ``states``, and f at its points.

    ``f`` maps states ``[..., d_model]`` to values ``[...]``, ``value_and_grad`` to values and gradients ``[..., d_model]``.
    ``prediction_aware`` evaluates f at ``k · n_steps + 1`` states; a gradient rule evaluates
    ``value_and_grad`` at ``n_steps`` nodes per segment (by autograd through f where none is given).
    At most ``max_nodes`` interpolated states per cell exist at once.
    """
    check_choice("estimator", estimator, ESTIMATORS)
    check_positive("n_steps", n_steps)
    if states.shape[0] < 2:
        fail("states", "at least two points", tuple(states.shape), "a path needs a start and an end")
    if estimator == "prediction_aware":
        return _prediction_aware(f, states, n_steps, max_nodes)
    gradients = value_and_grad or autograd_of(f)
    if estimator in ("left", "right", "trapezoid"):
        return _equal_steps(gradients, states, estimator, n_steps, max_nodes)
    nodes, weights = _midpoint(n_steps) if estimator == "midpoint" else gauss_legendre(n_steps)
    return _inner_nodes(f, gradients, states, nodes, weights, max_nodes)


def _prediction_aware(f: Readout, states: Tensor, n_steps: int, max_nodes: int | None) -> SegmentCredits:
    grid = shared_grid(len(states) - 1, n_steps)
    values = _hold_still(_values(f, states, grid, max_nodes), states, n_steps)
    levels = values[::n_steps]
    attribution = levels[1:] - levels[:-1]  # the telescoping identity, segment by segment
    steps = values[1:] - values[:-1]  # f(h^(s)) − f(h^(s−1)) for every step
    return SegmentCredits(attribution, levels, _by_segment(steps, n_steps))


def _equal_steps(
    gradients: GradReadout, states: Tensor, rule: str, n_steps: int, max_nodes: int | None
) -> SegmentCredits:
    displacement = states[1:] - states[:-1]
    grid = shared_grid(len(displacement), n_steps)
    values, ahead, behind = [], [], []
    for part, nodes in blocks_of(grid, max_nodes or len(grid)):
        value, gradient = gradients(interpolate(states, nodes))
        index = torch.arange(part.start, part.stop)
        after, before = index[index < len(grid) - 1], index[index > 0] - 1
        values.append(value)
        # ⟨h_{j+1} − h_j, ∇f⟩ for the segment a node opens, and for the one it closes
        ahead.append(slope(gradient[: len(after)], displacement[after // n_steps]))
        behind.append(slope(gradient[len(index) - len(before) :], displacement[before // n_steps]))
    left, right = torch.cat(ahead) / n_steps, torch.cat(behind) / n_steps
    steps = {"left": left, "right": right, "trapezoid": (left + right) / 2}[rule]
    levels = _hold_still(torch.cat(values), states, n_steps)[::n_steps]
    return _quadrature(_by_segment(steps, n_steps), levels)


def _inner_nodes(
    f: Readout,
    gradients: GradReadout,
    states: Tensor,
    nodes: Float[Tensor, "step"],
    weights: Float[Tensor, "step"],
    max_nodes: int | None,
) -> SegmentCredits:
    displacement = states[1:] - states[:-1]
    grid = interior_grid(len(displacement), nodes)
    slopes = []
    for _, part in blocks_of(grid, max_nodes or len(grid)):
        _, gradient = gradients(interpolate(states, part))
        slopes.append(slope(gradient, displacement[part.segment]))
    steps = _by_segment(torch.cat(slopes), len(nodes))
    weight = weights.to(steps).reshape(1, -1, *(1,) * (steps.ndim - 2))
    levels = _hold_still(_values(f, states, shared_grid(len(displacement), 1), max_nodes), states, 1)
    return _quadrature(steps * weight, levels)


def _quadrature(steps: Tensor, levels: Tensor) -> SegmentCredits:
    return SegmentCredits(steps.sum(1), levels, steps)


def _midpoint(n: int) -> tuple[Tensor, Tensor]:
    return (torch.arange(n, dtype=torch.float64) + 0.5) / n, torch.full((n,), 1 / n, dtype=torch.float64)


def gauss_legendre(n: int) -> tuple[Float[Tensor, "step"], Float[Tensor, "step"]]:
    """Nodes and weights of the n-point Gauss–Legendre rule on [0, 1]; exact for polynomials of degree 2n − 1."""
    x, w = np.polynomial.legendre.leggauss(n)
    return torch.from_numpy((x + 1) / 2), torch.from_numpy(w / 2)


def slope(
    gradient: Float[Tensor, "node *cell d_model"], direction: Float[Tensor, "node *cell d_model"]
) -> Float[Tensor, "node *cell"]:
    """⟨direction, ∇f⟩, the rate of f along a direction."""
    return (gradient * direction.to(gradient.dtype)).sum(-1)


def autograd_of(f: Readout) -> GradReadout:
    """Value ``[...]`` and gradient ``[..., d_model]`` of a row-wise f by autograd, whatever the caller's grad mode."""

    def value_and_grad(h: Tensor) -> tuple[Tensor, Tensor]:
        with torch.inference_mode(False), torch.enable_grad():
            x = h.detach().clone().requires_grad_(True)
            value = f(x)
            (gradient,) = torch.autograd.grad(value.sum(), x)
        return value.detach(), gradient

    return value_and_grad


def _values(f: Readout, states: Tensor, grid: Grid, max_nodes: int | None) -> Tensor:
    return torch.cat([f(interpolate(states, part)) for _, part in blocks_of(grid, max_nodes or len(grid))])


def _by_segment(values: Tensor, n_steps: int) -> Tensor:
    return rearrange(values, "(segment step) ... -> segment step ...", step=n_steps)


def _hold_still(values: Tensor, states: Tensor, n_steps: int) -> Tensor:
    """Values with f held exactly constant over segments whose two ends are the same state.

    Equal rows may differ in the last bit when a matrix product treats them in different tiles; a block
    that adds nothing has credit exactly 0.
    """
    still = (states[1:] == states[:-1]).all(-1)
    if not bool(still.any()):
        return values
    values = values.clone()
    for node in range(1, len(values)):
        held = still[(node - 1) // n_steps].to(values.device)
        values[node] = torch.where(held, values[node - 1], values[node])
    return values
