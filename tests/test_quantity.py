"""Probability, log-probability and logit of tokens and token sets: values and partial derivatives."""

import pytest
import torch

from tl_iglens._types import QUANTITIES
from tl_iglens.quantity import Objective

# ids and signs of one cell: a token, a set, a difference, a difference of sets, an empty place
GROUPS = {
    "token": ([3], [1]),
    "set": ([3, 0, 5], [1, 1, 1]),
    "difference": ([3, 1], [1, -1]),
    "difference of sets": ([3, 0, 1, 6], [1, 1, -1, -1]),
    "empty place": ([3, 0, 4], [1, 0, 0]),
}


def objective(quantity, group, *shape):
    ids, sign = GROUPS[group]
    return Objective(
        quantity,
        torch.tensor(ids).expand(*shape, -1),
        torch.tensor(sign, dtype=torch.float64).expand(*shape, -1),
    )


def direct(quantity, group, logits):
    """The definition, from a whole row of logits."""
    ids, sign = (torch.tensor(part) for part in GROUPS[group])
    values = {"prob": logits.softmax(-1), "log_prob": logits.log_softmax(-1), "logit": logits}[quantity]
    targets, incorrect = values[..., ids[sign > 0]], values[..., ids[sign < 0]]
    if quantity == "prob":
        return targets.sum(-1) - incorrect.sum(-1)
    value = targets.logsumexp(-1)
    return value - incorrect.logsumexp(-1) if incorrect.shape[-1] else value


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("quantity", QUANTITIES)
def test_value_is_the_definition(quantity, group):
    logits = 3 * torch.randn(4, 2, 7, dtype=torch.float64)  # node, cell, vocabulary
    f = objective(quantity, group, 2)
    z = logits.gather(-1, f.ids.expand(4, -1, -1))
    value = f.value(z, logits.logsumexp(-1))
    torch.testing.assert_close(value, direct(quantity, group, logits), rtol=0, atol=1e-12)


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("quantity", QUANTITIES)
def test_partials_are_the_derivatives(quantity, group):
    f = objective(quantity, group, 2)
    z = torch.randn(4, 2, f.ids.shape[-1], dtype=torch.float64, requires_grad=True)
    log_z = (z.detach().logsumexp(-1) + 1).requires_grad_(True)
    by_z, by_log_z = torch.autograd.grad(f.value(z, log_z).sum(), (z, log_z), allow_unused=True)
    mine = f.partials(z.detach(), log_z.detach())
    torch.testing.assert_close(mine[0], by_z, rtol=0, atol=1e-12)
    torch.testing.assert_close(
        mine[1], torch.zeros_like(log_z) if by_log_z is None else by_log_z, rtol=0, atol=1e-12
    )
    assert f.needs_partition == (by_log_z is not None and bool((by_log_z != 0).any()))


def test_log_prob_stays_finite_where_the_probability_underflows():
    f = objective("log_prob", "token", 1)
    z, log_z = torch.full((1, 1), -900.0, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    assert float(f.value(z, log_z)) == -900.0
    assert float(objective("prob", "token", 1).value(z, log_z)) == 0.0


def test_cells_can_be_taken_in_runs():
    f = Objective("prob", torch.arange(6).reshape(3, 2), torch.ones(3, 2, dtype=torch.float64))
    part = f.at(slice(1, 3))
    assert part.quantity == "prob" and part.ids.tolist() == [[2, 3], [4, 5]] and part.sign.shape == (2, 2)
