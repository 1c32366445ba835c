"""Gradients along a path, spent where f moves: steps that adapt, each with its integrated gradient; no model.

Inside a segment a → b the credit of a component that wrote δ_c is ∫₀¹ ∇f(a + α (b − a))·δ_c dα, so what has
to be known of f is its gradient integrated over α. f is flat over most segments of a real model and turns
sharply in a few, so the nodes follow f:

1. a readout behind a norm sees directions only, and where the ends of a segment differ in size the direction
   turns in a small part of it. Every segment is walked at the pace t at which its ends lend (1 − t) and t of
   their own size, α = t‖a‖ / (t‖a‖ + (1 − t)‖b‖);
2. a forward-only pass reads one state inside every step and gives a step as many Gauss–Legendre nodes as
   its movement asks for, 1 where f is flat and at most ``n_nodes``;
3. the change of f over a step is known exactly, so the integral is judged by it; a step whose integral misses
   its change is split and read again, the worst ones first, while the row budget of its cell lasts.

Every round is one call of the readout, however many steps it splits: a call reads the whole unembedding.
"""

import math
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
_GAIN = 5.0  # by how much one more node shrinks the error of a smooth step, at least
FIRST_STEPS = 4  # a path starts with at least so many steps
_ROWS_AT_ONCE = 2048
_NARROWEST = 2.0**-40
_DECADES = math.log(1e8)  # how close to the origin a path is followed
_UNEVEN = 100.0  # no end counts as smaller than a hundredth of the other


@dataclass(frozen=True)
class Steps:
    """Pieces of segments: t from ``start`` to ``start + width`` in ``segment``, for one cell each."""

    segment: Int[Tensor, "step"]
    cell: Int[Tensor, "step"]
    start: Float[Tensor, "step"]
    width: Float[Tensor, "step"]
    before: Float[Tensor, "step"]  # f at the start
    after: Float[Tensor, "step"]  # f at the end

    def __len__(self) -> int:
        return len(self.segment)

    def at(self, chosen: Tensor) -> "Steps":
        """Some of the steps, by mask or index ``[step]``."""
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

    ``f`` and ``value_and_grad`` read rows ``[row, d_model]``; ``levels`` is f at ``states``. A step takes at most ``n_nodes`` gradients, and splitting stops before a
    cell has taken more than ``max_rows``. The first reading is always done: a step per segment, but at least
    ``FIRST_STEPS``.
    """
    tolerance = TOLERANCE * (levels.amax(0) - levels.amin(0)).clamp_min(1)
    lines = _Lines.through(states)
    steps, middle = _first_steps(f, lines, levels)
    n = _node_counts(_movement(steps, middle) / tolerance[steps.cell], n_nodes)
    spent = torch.zeros(states.shape[1], dtype=torch.long, device=states.device)
    is_first = True
    while len(steps):
        read = _integrate(value_and_grad, lines, steps, n, with_split=not is_first)
        spent.index_add_(0, steps.cell, read.rows)
        middle = middle if is_first else read.middle
        moved, allowed = _movement(steps, middle), tolerance[steps.cell]
        outside = read.beyond(torch.stack([steps.before, middle, steps.after]))
        miss, noise = _miss(lines, steps, read.gradient)
        bad = (miss > allowed + noise) | (outside > torch.maximum(moved, allowed))
        n = torch.maximum(n, _node_counts(torch.maximum(moved, outside) / allowed, n_nodes))
        split = _affordable(bad & (steps.width > _NARROWEST), miss, 2 * (n + 1), steps.cell, spent, max_rows)
        done = steps.at(~split)
        yield StepGradients(
            done.segment, done.cell, read.gradient[~split], done.after - done.before, spent.clone()
        )
        steps, n, is_first = steps.at(split).halves(middle[split]), n[split].repeat(2), False


@dataclass(frozen=True)
class _Lines:
    """The straight lines of the segments, and the size of their start relative to that of their end."""

    states: Float[Tensor, "point cell d_model"]
    ratio: Float[Tensor, "segment cell"]  # 0 where the start is the origin

    @classmethod
    def through(cls, states: Float[Tensor, "point cell d_model"]) -> "_Lines":
        start, end = states[:-1].double().norm(dim=-1), states[1:].double().norm(dim=-1)
        ratio = (start / end.clamp_min(torch.finfo(end.dtype).tiny)).clamp(1 / _UNEVEN, _UNEVEN)
        return cls(states, torch.where(start == 0, 0, ratio))

    def at(
        self, segment: Tensor, cell: Tensor, t: Float[Tensor, "row"]
    ) -> tuple[Float[Tensor, "row d_model"], Float[Tensor, "row"]]:
        """States on the lines, and dα/dt there."""
        ratio = self.ratio[segment, cell]
        origin, ratio = ratio == 0, torch.where(ratio == 0, 1, ratio)
        whole = t * ratio + 1 - t
        # from the origin the gradient falls like 1/α down to where the norm's ε ends that: equal steps of log α
        near, far = torch.expm1(_DECADES * t), math.expm1(_DECADES)
        first = torch.where(origin, 1 - near / far, (1 - t) / whole)
        second = torch.where(origin, near / far, t * ratio / whole)
        pace = torch.where(origin, _DECADES * (near + 1) / far, ratio / whole.square())
        parts = torch.stack([first, second]).to(self.states.dtype)[..., None]
        h = parts[0] * self.states[segment, cell] + parts[1] * self.states[segment + 1, cell]
        return h, pace


def _first_steps(f: RowValue, lines: _Lines, levels: Tensor) -> tuple[Steps, Float[Tensor, "step"]]:
    """Equal steps, one per segment of a long path, several where there are few, and f at their splits."""
    n_segments, n_cells = lines.ratio.shape
    per_segment = -(-FIRST_STEPS // n_segments)
    grid = torch.cartesian_prod(torch.arange(n_segments), torch.arange(per_segment), torch.arange(n_cells))
    segment, index, cell = grid.to(levels.device).unbind(1)
    width = torch.full(segment.shape, 1 / per_segment, dtype=torch.float64, device=levels.device)
    start, inner = index * width, index > 0
    values = _values(
        f,
        lines,
        torch.cat([segment, segment[inner]]),
        torch.cat([cell, cell[inner]]),
        torch.cat([start + _SPLIT * width, start[inner]]),
    )
    middle, joints = values[: len(segment)], values[len(segment) :]
    # a joint is the start of one step and the end of the one before it: both masks list them in one order
    before = levels[segment, cell].masked_scatter(inner, joints)
    after = levels[segment + 1, cell].masked_scatter(index < per_segment - 1, joints)
    return Steps(segment, cell, start, width, before, after), middle


def _movement(steps: Steps, middle: Float[Tensor, "step"]) -> Float[Tensor, "step"]:
    return torch.maximum((middle - steps.before).abs(), (steps.after - middle).abs())


def _node_counts(movement: Float[Tensor, "step"], n_nodes: int) -> Int[Tensor, "step"]:
    """Nodes that bring an error of the size of the movement below the tolerance, at _GAIN per node."""
    wanted = 1 + (movement.clamp_min(1).log() / torch.tensor(_GAIN).log()).ceil().long()
    return wanted.clamp_max(n_nodes)


def _values(f: RowValue, lines: _Lines, segment: Tensor, cell: Tensor, t: Tensor) -> Float[Tensor, "row"]:
    rows = torch.arange(len(t), device=t.device).split(_ROWS_AT_ONCE)
    return torch.cat([f(lines.at(segment[r], cell[r], t[r])[0], cell[r]) for r in rows])


@dataclass(frozen=True)
class _Reading:
    """What the nodes of some steps say."""

    gradient: Float[Tensor, "step d_model"]  # ∫ ∇f dα
    high: Float[Tensor, "step"]  # the largest and the smallest value of f at a node
    low: Float[Tensor, "step"]
    middle: Float[Tensor, "step"]  # f at the split, where it was asked for
    rows: Int[Tensor, "step"]

    def beyond(self, known: Float[Tensor, "value step"]) -> Float[Tensor, "step"]:
        """How far f leaves the range of the known values: a turn that no probe has seen."""
        return torch.maximum(self.high - known.amax(0), known.amin(0) - self.low).clamp_min(0)


def _integrate(
    value_and_grad: RowGradient, lines: _Lines, steps: Steps, n: Int[Tensor, "step"], with_split: bool
) -> _Reading:
    """∫ ∇f dα over every step by its own Gauss–Legendre rule; the split rides along at weight 0 if asked."""
    device, rows = n.device, n + with_split
    nodes, weights = _rules(n, with_split)
    owner = torch.arange(len(steps), device=device).repeat_interleave(rows)
    place = torch.arange(len(owner), device=device) - (rows.cumsum(0) - rows)[owner]
    values = torch.empty(len(owner), dtype=torch.float64, device=device)
    total: Tensor | None = None
    for part in torch.arange(len(owner), device=device).split(_ROWS_AT_ONCE):
        own = owner[part]
        here, node = steps.at(own), (n[own], place[part])
        h, pace = lines.at(here.segment, here.cell, here.start + nodes[node] * here.width)
        values[part], gradient = value_and_grad(h, here.cell)
        total = gradient.new_zeros(len(steps), gradient.shape[-1]) if total is None else total
        total.index_add_(0, own, (weights[node] * here.width * pace).to(gradient.dtype)[:, None] * gradient)
    assert total is not None
    bounds = (values.new_full((len(steps),), end) for end in (-torch.inf, torch.inf))
    high, low = (
        b.scatter_reduce(0, owner, values, how) for b, how in zip(bounds, ("amax", "amin"), strict=True)
    )
    return _Reading(total, high, low, values[rows.cumsum(0) - 1], rows)


def _rules(
    n: Int[Tensor, "step"], with_split: bool
) -> tuple[Float[Tensor, "n node"], Float[Tensor, "n node"]]:
    """Row k: the nodes and weights of the k-point rule, then the split at weight 0."""
    largest = int(n.max())
    nodes = torch.zeros(largest + 1, largest + with_split, dtype=torch.float64)
    weights = torch.zeros_like(nodes)
    for size in set(n.tolist()):
        nodes[size, :size], weights[size, :size] = gauss_legendre(size)
        nodes[size, size:] = _SPLIT
    return nodes.to(n.device), weights.to(n.device)


def _miss(
    lines: _Lines, steps: Steps, gradient: Tensor
) -> tuple[Float[Tensor, "step"], Float[Tensor, "step"]]:
    """|Δf − ⟨∫ ∇f dα, b − a⟩| of every step, and how much of it may be rounding: of the sum, and of f itself."""
    states, eps = lines.states, torch.finfo(lines.states.dtype).eps
    displacement = states[steps.segment + 1, steps.cell] - states[steps.segment, steps.cell]
    terms = gradient * displacement.to(gradient.dtype)
    miss = (steps.after - steps.before - terms.sum(-1).to(steps.after.dtype)).abs()
    noise = 2 * eps * terms.abs().sum(-1).to(miss.dtype)
    return miss, noise + 16 * eps * torch.maximum(steps.before.abs(), steps.after.abs())


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
