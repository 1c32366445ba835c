"""Boundaries, labels, step grids and interpolation."""

import numpy as np
import pytest
import torch

from tl_iglens.path import (
    Grid,
    Point,
    blocks_of,
    interior_grid,
    interpolate,
    resolve_layers,
    resolve_path,
    shared_grid,
)

# layers, incl_mid, from_embed, segments, points, boundaries; 6 blocks
TABLE = {
    "all": (
        None, False, True,
        "0_block 1_block 2_block 3_block 4_block 5_block",
        "0_pre 1_pre 2_pre 3_pre 4_pre 5_pre final_post",
        (1, 2, 3, 4, 5, 6),
    ),
    "all from a foreign baseline": (
        None, False, False,
        "embed 0_block 1_block 2_block 3_block 4_block 5_block",
        "base 0_pre 1_pre 2_pre 3_pre 4_pre 5_pre final_post",
        (0, 1, 2, 3, 4, 5, 6),
    ),
    "skipped, 0 added": (
        [3, 6], False, True, "0-2_blocks 3-5_blocks", "0_pre 3_pre final_post", (3, 6),
    ),
    "skipped, 0 given": (
        [0, 3, 6], False, True, "0-2_blocks 3-5_blocks", "0_pre 3_pre final_post", (3, 6),
    ),
    "n added": ([3], False, True, "0-2_blocks 3-5_blocks", "0_pre 3_pre final_post", (3, 6)),
    "one block is a block": (
        [1, 2, 5], False, True,
        "0_block 1_block 2-4_blocks 5_block", "0_pre 1_pre 2_pre 5_pre final_post", (1, 2, 5, 6),
    ),
    "skipped from a foreign baseline": (
        [3, 6], False, False, "base-2_blocks 3-5_blocks", "base 3_pre final_post", (3, 6),
    ),
    "from boundary 1": (
        [1, 6], False, False, "base-0_blocks 1-5_blocks", "base 1_pre final_post", (1, 6),
    ),
    "baseline to 0": ([0, 6], False, False, "embed 0-5_blocks", "base 0_pre final_post", (0, 6)),
    "only the end": ([6], False, False, "base-5_blocks", "base final_post", (6,)),
    "only the end, from the embedding": ([6], False, True, "0-5_blocks", "0_pre final_post", (6,)),
    "mid of the blocks that stand alone": (
        [2, 3, 6], True, True,
        "0-1_blocks 2_attn_out 2_mlp_out 3-5_blocks", "0_pre 2_pre 2_mid 3_pre final_post", (2, 3, 3, 6),
    ),
    "mid from a foreign baseline": (
        [5], True, False, "base-4_blocks 5_attn_out 5_mlp_out", "base 5_pre 5_mid final_post", (5, 6, 6),
    ),
    "mid after boundary 0": (
        [0, 1, 6], True, False,
        "embed 0_attn_out 0_mlp_out 1-5_blocks", "base 0_pre 0_mid 1_pre final_post", (0, 1, 1, 6),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", TABLE)
def test_labels_and_boundaries(case):
    layers, incl_mid, from_embed, labels, point_labels, boundaries = TABLE[case]
    path = resolve_path(6, layers, incl_mid=incl_mid, from_embed=from_embed)
    assert path.labels == tuple(labels.split())
    assert path.point_labels == tuple(point_labels.split())
    assert path.boundaries == boundaries
    assert len(path.points) == len(path.labels) + 1
    assert (path.points[0] is None) == (not from_embed)
    assert path.states == tuple(p for p in path.points if p is not None)


def test_mid_of_every_block():
    path = resolve_path(3, incl_mid=True)
    assert path.labels == tuple(f"{b}_{part}" for b in range(3) for part in ("attn_out", "mlp_out"))
    assert path.point_labels == ("0_pre", "0_mid", "1_pre", "1_mid", "2_pre", "2_mid", "final_post")
    assert path.boundaries == (1, 1, 2, 2, 3, 3)


@pytest.mark.parametrize(
    "layers", [range(0, 7, 3), (0, 3, 6), np.array([0, 3, 6]), torch.tensor([0, 3, 6])], ids=type
)
def test_layers_of_any_kind(layers):
    assert resolve_layers(layers, 6) == (0, 3, 6)
    assert all(type(l) is int for l in resolve_layers(layers, 6))


@pytest.mark.parametrize(
    ("layers", "shown"),
    [
        ([], "[]"),
        ([0, 7], "[0, 7]"),
        ([-1], "[-1]"),
        ([3, 3], "[3, 3]"),
        ([3, 2], "[3, 2]"),
        ([1.5], "[1.5]"),
        ([True], "[True]"),
        (["3"], "['3']"),
        (3, "3"),
        ("all", "'all'"),
    ],
)
def test_wrong_layers(layers, shown):
    with pytest.raises(ValueError) as error:
        resolve_layers(layers, 6)
    assert str(error.value) == (
        f"layers must be strictly increasing boundaries between 0 and n_layers=6, got {shown}; "
        "boundary l is the state that enters block l, and boundary n_layers is always added"
    )


def test_points_are_ordered_as_they_are_computed():
    points = [Point(1), Point(0, mid=True), Point(0), Point(1, mid=True)]
    assert sorted(points) == [Point(0), Point(0, mid=True), Point(1), Point(1, mid=True)]


@pytest.mark.parametrize("n_steps", [1, 2, 5])
def test_shared_grid_visits_every_point_once(n_steps):
    grid = shared_grid(3, n_steps)
    assert len(grid) == 3 * n_steps + 1
    place = grid.segment + grid.alpha
    torch.testing.assert_close(place, torch.linspace(0, 3, 3 * n_steps + 1, dtype=torch.float64))


def test_interior_grid_repeats_the_nodes_in_every_segment():
    grid = interior_grid(2, torch.tensor([0.25, 0.75], dtype=torch.float64))
    assert grid.segment.tolist() == [0, 0, 1, 1] and grid.alpha.tolist() == [0.25, 0.75, 0.25, 0.75]


def test_interpolation_is_straight_and_exact_at_the_ends():
    states = torch.randn(4, 2, 5)
    grid = shared_grid(3, 4)
    nodes = interpolate(states, grid)
    assert nodes.shape == (13, 2, 5)
    assert torch.equal(nodes[::4], states)
    for node, segment, alpha in zip(nodes, grid.segment.tolist(), grid.alpha.tolist(), strict=True):
        torch.testing.assert_close(node, (1 - alpha) * states[segment] + alpha * states[segment + 1])


def test_points_themselves_are_not_copied():
    states = torch.randn(4, 2, 5)
    assert interpolate(states, shared_grid(3, 1)).data_ptr() == states.data_ptr()
    backwards = Grid(torch.tensor([2, 0]), torch.tensor([1.0, 0.0], dtype=torch.float64))
    assert torch.equal(interpolate(states, backwards), states[[3, 0]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_interpolation_keeps_the_dtype(dtype):
    states = torch.randn(3, 4).to(dtype)
    assert interpolate(states, shared_grid(2, 3)).dtype == dtype


@pytest.mark.parametrize("size", [1, 2, 3, 7, 8, 100])
def test_blocks_cover_a_grid(size):
    grid = shared_grid(1, 7)
    slices, parts = zip(*blocks_of(grid, size), strict=True)
    assert max(map(len, parts)) <= size
    assert torch.equal(torch.cat([p.alpha for p in parts]), grid.alpha)
    assert [i for s in slices for i in range(s.start, s.stop)] == list(range(8))
