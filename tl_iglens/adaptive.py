"""Gradients along a path, spent where f moves: steps that adapt, each with its integrated gradient; no model.

Inside a segment a → b the credit of a component that wrote δ_c is ∫₀¹ ∇f(a + α (b − a))·δ_c dα, so what has
to be known of f is its gradient integrated over α. f is flat over most segments of a real model and turns
sharply in a few, so the nodes follow f:

1. a forward-only pass reads one state inside every step and gives a step as many Gauss–Legendre nodes as
   its movement asks for, 1 where f is flat and at most ``n_nodes``;
2. the change of f over a step is known exactly, so the integral is judged by it; a step whose integral misses
   its change is split and read again, the worst ones first, while the row budget of its cell lasts.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from .estimators import gauss_legendre

# Rows are [row, d_model]; the second argument says which cell every row belongs to.
RowValue = Callable[[Tensor, Tensor], Tensor]
RowGradient = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]

TOLERANCE = 1e-6  # largest miss of a step that is left alone, per unit of the range of f (at least 1)
_SPLIT = 0.382  # where a step is probed and split; off the middle, where a lone node sits
_GAIN = 8.0  # by how much one more node shrinks the error of a smooth step
FIRST_STEPS = 4  # a path starts with at least so many steps
_ROWS_AT_ONCE = 2048
_NARROWEST = 2.0**-40


@dataclass(frozen=True)
class Steps:
    """Pieces of segments: ``[start, start + width]`` of the way through ``segment``, for one cell each."""

    segment: Int[Tensor, "step"]
    cell: Int[Tensor, "step"]
    start: Float[Tensor, "step"]
    width: Float[Tensor, "step"]
    before: Float[Tensor, "step"]  # f at the start
    after: Float[Tensor, "step"]  # f at the end

    def __len__(self) -> int:
        return len(self.segment)

    def at(self, chosen: Tensor) -> "Steps":
        return Steps(*(getattr(self, name)[chosen] for name in self.__dataclass_fields__))

    def halves(self, middle: Float[Tensor, "step"]) -> "Steps":
        """Both parts of every step, cut where ``middle`` is the value of f."""
        first = replace(self, width=_SPLIT * self.width, after=middle)
        second = replace(
            self, start=self.start + _SPLIT * self.width, width=(1 - _SPLIT) * self.width, before=middle
        )
        pairs = ((getattr(first, name), getattr(second, name)) for name in self.__dataclass_fields__)
        return Steps(*(torch.cat(pair) for pair in pairs))


@dataclass(frozen=True)
class StepGradients:
    """Finished steps: ∫ ∇f dα over each, and the change of f that the components of the step share."""

    segment: Int[Tensor, "step"]
    cell: Int[Tensor, "step"]
    gradient: Float[Tensor, "step d_model"]
    change: Float[Tensor, "step"]
    spent: Int[Tensor, "cell"]  # gradients taken so far, coarser readings included


def step_gradients(
    f: RowValue,
    value_and_grad: RowGradient,
    states: Float[Tensor, "point cell d_model"],
    levels: Float[Tensor, "point cell"],
    *,
    n_nodes: int,
    max_rows: int,
) -> Iterator[StepGradients]:
    """Integrated gradients of steps that together cover every segment of every cell, round by round.

    ``levels`` is f at ``states``. A step takes at most ``n_nodes`` gradients, and splitting stops before a
    cell has taken more than ``max_rows``. The first reading is always done: a step per segment, but at least
    ``FIRST_STEPS``.
    """
    tolerance = TOLERANCE * (levels.amax(0) - levels.amin(0)).clamp_min(1)
    steps = _first_steps(f, states, levels)
    spent = torch.zeros(states.shape[1], dtype=torch.long, device=states.device)
    while len(steps):
        middle = _values(f, states, steps, _SPLIT)
        movement = torch.maximum((middle - steps.before).abs(), (steps.after - middle).abs())
        n = _node_counts(movement / tolerance[steps.cell], n_nodes)
        gradient, outside = _integrate(value_and_grad, states, steps, n, middle)
        spent.index_add_(0, steps.cell, n)
        miss, noise = _miss(states, steps, gradient)
        allowed = tolerance[steps.cell]
        bad = (miss > allowed + noise) | (outside > torch.maximum(movement, allowed))
        split = _affordable(bad & (steps.width > _NARROWEST), miss, 2 * n, steps.cell, spent, max_rows)
        done = steps.at(~split)
        change = done.after - done.before
        yield StepGradients(done.segment, done.cell, gradient[~split], change, spent.clone())
        steps = steps.at(split).halves(middle[split])


def _first_steps(f: RowValue, states: Tensor, levels: Tensor) -> Steps:
    """Equal steps, one per segment of a long path, several where there are few segments."""
    n_segments, n_cells = states.shape[0] - 1, states.shape[1]
    per_segment = -(-FIRST_STEPS // n_segments)
    grid = torch.cartesian_prod(torch.arange(n_segments), torch.arange(per_segment), torch.arange(n_cells))
    segment, index, cell = grid.to(states.device).unbind(1)
    width = torch.full(segment.shape, 1 / per_segment, dtype=torch.float64, device=states.device)
    before, after = levels[segment, cell], levels[segment + 1, cell]
    steps = Steps(segment, cell, index * width, width, before, after)
    inner = index > 0
    if bool(inner.any()):
        values = _values(f, states, steps.at(inner), 0.0)
        before = before.masked_scatter(inner, values)
        after = after.masked_scatter(index < per_segment - 1, values)  # the same states, in the same order
    return replace(steps, before=before, after=after)


def _node_counts(movement: Float[Tensor, "step"], n_nodes: int) -> Int[Tensor, "step"]:
    """Nodes that bring an error of the size of the movement below the tolerance, at _GAIN per node."""
    wanted = 1 + (movement.clamp_min(1).log() / torch.tensor(_GAIN).log()).ceil().long()
    return wanted.clamp_max(n_nodes)


def _at(states: Tensor, steps: Steps, alpha: Float[Tensor, "step"]) -> Float[Tensor, "step d_model"]:
    """States at a fraction of the segments the steps lie in."""
    weight = alpha.to(states.dtype)[:, None]
    return torch.lerp(states[steps.segment, steps.cell], states[steps.segment + 1, steps.cell], weight)


def _values(f: RowValue, states: Tensor, steps: Steps, fraction: float) -> Float[Tensor, "step"]:
    """f inside every step."""
    values = []
    for part in torch.arange(len(steps), device=states.device).split(_ROWS_AT_ONCE):
        some = steps.at(part)
        values.append(f(_at(states, some, some.start + fraction * some.width), some.cell))
    return torch.cat(values)


def _integrate(
    value_and_grad: RowGradient, states: Tensor, steps: Steps, n: Int[Tensor, "step"], middle: Tensor
) -> tuple[Float[Tensor, "step d_model"], Float[Tensor, "step"]]:
    """∫ ∇f dα over every step by its own Gauss–Legendre rule, and how far f leaves the known values."""
    device, sizes = states.device, sorted(set(n.tolist()))
    nodes = torch.zeros(max(sizes) + 1, max(sizes), dtype=torch.float64, device=device)
    weights = torch.zeros_like(nodes)
    for size in sizes:
        nodes[size, :size], weights[size, :size] = (t.to(device) for t in gauss_legendre(size))
    owner = torch.arange(len(steps), device=device).repeat_interleave(n)
    place = torch.arange(len(owner), device=device) - (n.cumsum(0) - n)[owner]
    known = torch.stack([steps.before, middle, steps.after])
    high, low = known.amax(0), known.amin(0)
    outside = torch.zeros_like(high)
    total: Tensor | None = None
    for part in torch.arange(len(owner), device=device).split(_ROWS_AT_ONCE):
        own = owner[part]
        here, count = steps.at(own), n[own]
        alpha = here.start + nodes[count, place[part]] * here.width
        value, gradient = value_and_grad(_at(states, here, alpha), here.cell)
        weight = (weights[count, place[part]] * here.width).to(gradient.dtype)
        if total is None:
            total = gradient.new_zeros(len(steps), gradient.shape[-1])
        total.index_add_(0, own, weight[:, None] * gradient)
        left = torch.maximum(value - high[own], low[own] - value)
        outside.scatter_reduce_(0, own, left.to(outside.dtype), "amax")
    assert total is not None
    return total, outside


def _miss(
    states: Tensor, steps: Steps, gradient: Tensor
) -> tuple[Float[Tensor, "step"], Float[Tensor, "step"]]:
    """|Δf − ⟨∫ ∇f dα, b − a⟩| of every step, and how much of it may be rounding."""
    displacement = states[steps.segment + 1, steps.cell] - states[steps.segment, steps.cell]
    terms = gradient * displacement.to(gradient.dtype)
    miss = (steps.after - steps.before - terms.sum(-1).to(steps.after.dtype)).abs()
    noise = 2 * torch.finfo(states.dtype).eps * terms.abs().sum(-1).to(miss.dtype)
    return miss, noise


def _affordable(
    bad: Tensor, miss: Tensor, cost: Tensor, cell: Tensor, spent: Tensor, max_rows: int
) -> Tensor:
    """Which bad steps are split: the largest misses of every cell first, as long as its rows last."""
    order = torch.argsort(torch.where(bad, miss, -1.0), descending=True, stable=True)
    order = order[torch.argsort(cell[order], stable=True)]  # by cell, worst first
    price = torch.where(bad, cost, 0)[order]
    total = price.cumsum(0)
    first = torch.searchsorted(cell[order].contiguous(), cell[order].contiguous())
    within = total - (total - price)[first]
    fits = torch.zeros_like(bad)
    fits[order] = spent[cell[order]] + within <= max_rows
    return bad & fits
