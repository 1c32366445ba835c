"""Where a path runs and what its parts are called: boundaries, labels, step grids, interpolated states.

Pure bookkeeping and einops: nothing here knows a model.

The residual stream is cut at *boundaries*, numbered like the hidden states of the paper (arXiv
2606.29693) and of Hugging Face: boundary 0 is the state that enters block 0, boundary ``l`` the state
that enters block ``l``, boundary ``n`` the state that leaves the last block, before the final norm.
"""

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from ._checks import fail

BASE_LABEL = "base"


@dataclass(frozen=True, order=True)
class Point:
    """One place on the path: before block ``block``, or inside it when ``mid`` (after its attention)."""

    block: int
    mid: bool = False

    def label(self, n_layers: int) -> str:
        """TransformerLens' name of the state: ``3_pre``, ``3_mid``, ``final_post``."""
        if self.mid:
            return f"{self.block}_mid"
        return "final_post" if self.block == n_layers else f"{self.block}_pre"


@dataclass(frozen=True)
class Path:
    """The points a path visits, in order, and the labels of the points and of the segments between.

    ``points[0]`` is None when the path starts at a baseline that is not a state of this run.
    """

    n_layers: int
    points: tuple[Point | None, ...]
    labels: tuple[str, ...]
    point_labels: tuple[str, ...]

    @property
    def boundaries(self) -> tuple[int, ...]:
        """For every segment the boundary it ends at; a segment that ends inside block b ends before b + 1."""
        return tuple(p.block + 1 if p.mid else p.block for p in self.points[1:] if p is not None)

    @property
    def states(self) -> tuple[Point, ...]:
        """The points that are states of the run, without a foreign baseline."""
        return tuple(p for p in self.points if p is not None)


def resolve_layers(layers: Any, n_layers: int) -> tuple[int, ...]:
    """Boundaries of a path, strictly increasing and ending at ``n_layers``.

    ``layers`` is a sequence, array or tensor of whole numbers; ``None`` takes all of them. Raises ValueError
    for anything but strictly increasing whole numbers between 0 and ``n_layers``.
    """
    if layers is None:
        return tuple(range(n_layers + 1))
    rule = f"strictly increasing boundaries between 0 and n_layers={n_layers}"
    todo = "boundary l is the state that enters block l, and boundary n_layers is always added"
    given = layers.tolist() if isinstance(layers, np.ndarray | Tensor) else layers
    if not isinstance(given, Iterable) or isinstance(given, str):
        fail("layers", rule, repr(layers), todo)
    given = list(given)
    whole = all(isinstance(l, int | np.integer) and not isinstance(l, bool) for l in given)
    if not given or not whole or any(not 0 <= l <= n_layers for l in given):
        fail("layers", rule, given, todo)
    if any(b <= a for a, b in itertools.pairwise(given)):
        fail("layers", rule, given, todo)
    path = tuple(int(l) for l in given)
    return path if path[-1] == n_layers else (*path, n_layers)


def resolve_path(
    n_layers: int, layers: Any = None, *, incl_mid: bool = False, from_embed: bool = True
) -> Path:
    """The path through the asked boundaries, with TransformerLens' labels.

    ``from_embed``: the path starts at boundary 0; otherwise at a baseline that is not on the stream.
    ``incl_mid`` adds the state after attention of every block that is a segment of its own; a merged
    segment stays merged.
    """
    bounds = resolve_layers(layers, n_layers)
    if from_embed and bounds[0] != 0:
        bounds = (0, *bounds)
    points: list[Point | None] = [] if from_embed else [None]
    for start, end in zip((None, *bounds), bounds, strict=False):
        if incl_mid and start is not None and end == start + 1:
            points.append(Point(start, mid=True))
        points.append(Point(end))
    labels = tuple(_segment_label(a, b) for a, b in itertools.pairwise(points))
    if not labels:
        fail(
            "layers", "at least two points with baseline='embed'", list(bounds), "add a boundary below n_layers"
        )
    names = tuple(BASE_LABEL if p is None else p.label(n_layers) for p in points)
    return Path(n_layers, tuple(points), labels, names)


def _segment_label(start: Point | None, end: Point | None) -> str:
    assert end is not None
    if end.mid:
        return f"{end.block}_attn_out"
    if start is None:
        return "embed" if end.block == 0 else f"base-{end.block - 1}_blocks"
    if start.mid:
        return f"{start.block}_mlp_out"
    first, last = start.block, end.block - 1
    return f"{first}_block" if first == last else f"{first}-{last}_blocks"


@dataclass(frozen=True)
class Grid:
    """Nodes on a path: node i lies in segment ``segment[i]`` at the fraction ``alpha[i]`` of its length."""

    segment: Int[Tensor, "node"]
    alpha: Float[Tensor, "node"]

    def __len__(self) -> int:
        return len(self.segment)


def shared_grid(n_segments: int, n_steps: int) -> Grid:
    """``n_segments · n_steps + 1`` equally spaced nodes: ends shared by neighbours appear once."""
    index = torch.arange(n_segments * n_steps + 1)
    segment = torch.div(index, n_steps, rounding_mode="floor").clamp_max(n_segments - 1)
    return Grid(segment, (index - segment * n_steps).double() / n_steps)


def interior_grid(n_segments: int, nodes: Float[Tensor, "step"]) -> Grid:
    """The same fractions inside every segment, none shared."""
    segment = torch.arange(n_segments).repeat_interleave(len(nodes))
    return Grid(segment, nodes.double().repeat(n_segments))


def interpolate(states: Float[Tensor, "point *cell d_model"], grid: Grid) -> Float[Tensor, "node *cell d_model"]:
    """States at the nodes of a grid, on the straight line of each segment; exact at both ends.

    Nodes that are the points themselves, in order, are a view of ``states``.
    """
    whole = grid.alpha == grid.alpha.round()
    if bool(whole.all()):
        point = grid.segment + grid.alpha.long()
        first, last = int(point[0]), int(point[-1])
        in_order = last - first + 1 == len(point) and bool((point.diff() == 1).all())
        return states[first : last + 1] if in_order else states[point.to(states.device)]
    segment = grid.segment.to(states.device)
    shape = (len(segment),) + (1,) * (states.ndim - 1)
    weight = grid.alpha.to(device=states.device, dtype=states.dtype).reshape(shape)
    return torch.lerp(states[segment], states[segment + 1], weight)


def blocks_of(grid: Grid, size: int) -> Iterator[tuple[slice, Grid]]:
    """A long grid cut into runs of at most ``size`` nodes."""
    for first in range(0, len(grid), size):
        part = slice(first, min(first + size, len(grid)))
        yield part, Grid(grid.segment[part], grid.alpha[part])
