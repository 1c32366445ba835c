"""Segment credits of toy functions: telescoping, quadrature orders, chunks; no model."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from tl_iglens._types import ESTIMATORS
from tl_iglens.estimators import autograd_of, gauss_legendre, segment_credits, slope

RULES = [name for name in ESTIMATORS if name != "prediction_aware"]


def smooth(h):
    """A softmax probability behind a norm: a small readout."""
    weight = torch.linspace(-2, 2, 7 * h.shape[-1], dtype=h.dtype).sin().reshape(h.shape[-1], 7)
    return ((h / (h.square().mean(-1, keepdim=True) + 0.1).sqrt()) @ weight).softmax(-1)[..., 3]


def path(*shape, dtype=torch.float64):
    return torch.randn(*shape, dtype=dtype)


@pytest.mark.parametrize("n_steps", [1, 2, 3, 16])
def test_prediction_aware_telescopes_exactly(n_steps):
    states = path(6, 3, 2, 5)
    credits = segment_credits(smooth, states, n_steps=n_steps)
    assert credits.attribution.shape == (5, 3, 2)
    assert credits.levels.shape == (6, 3, 2)
    assert credits.steps.shape == (5, n_steps, 3, 2)
    torch.testing.assert_close(credits.levels, smooth(states), rtol=0, atol=1e-15)
    torch.testing.assert_close(credits.attribution, smooth(states).diff(dim=0), rtol=0, atol=1e-15)
    torch.testing.assert_close(credits.steps.sum(1), credits.attribution, rtol=0, atol=1e-14)


def test_each_step_is_the_change_over_it():
    states = path(2, 5)
    steps = segment_credits(smooth, states, n_steps=4).steps[0]
    for s in range(4):
        before, after = (torch.lerp(states[0], states[1], a / 4) for a in (s, s + 1))
        assert abs(steps[s] - (smooth(after) - smooth(before))) < 1e-15


def riemann(states, rule, n):
    """The quadrature written as a loop over one-row states."""
    nodes = {
        "left": [(s / n, 1 / n) for s in range(n)],
        "right": [((s + 1) / n, 1 / n) for s in range(n)],
        "midpoint": [((s + 0.5) / n, 1 / n) for s in range(n)],
        "trapezoid": [(s / n, (0.5 if s in (0, n) else 1) / n) for s in range(n + 1)],
        "gauss_legendre": list(zip(*((x.tolist()) for x in gauss_legendre(n)), strict=True)),
    }[rule]
    credits = []
    for start, end in pairwise(states):
        total = 0.0
        for alpha, weight in nodes:
            h = (start + alpha * (end - start)).requires_grad_(True)
            (gradient,) = torch.autograd.grad(smooth(h), h)
            total += weight * float(gradient @ (end - start))
        credits.append(total)
    return torch.tensor(credits, dtype=torch.float64)


@pytest.mark.parametrize("n_steps", [1, 2, 5])
@pytest.mark.parametrize("rule", RULES)
def test_rules_equal_a_loop(rule, n_steps):
    states = path(4, 6)
    credits = segment_credits(smooth, states, estimator=rule, n_steps=n_steps)
    torch.testing.assert_close(credits.attribution, riemann(states, rule, n_steps), rtol=0, atol=1e-13)
    torch.testing.assert_close(credits.steps.sum(1), credits.attribution, rtol=0, atol=1e-14)
    torch.testing.assert_close(credits.levels, smooth(states), rtol=0, atol=1e-15)
    assert credits.steps.shape == (3, n_steps)


@pytest.mark.parametrize(("rule", "order"), [("left", 1), ("right", 1), ("trapezoid", 2), ("midpoint", 2)])
def test_rules_converge_with_their_order(rule, order):
    states = path(4, 6)
    exact = segment_credits(smooth, states).attribution
    error = [
        (segment_credits(smooth, states, estimator=rule, n_steps=n).attribution - exact).abs().max()
        for n in (64, 128, 256)
    ]
    for coarse, fine in pairwise(error):
        assert 0.8 * 2**order < coarse / fine < 1.25 * 2**order


def test_gauss_legendre_converges_fastest():
    states = path(4, 6)
    exact = segment_credits(smooth, states).attribution
    assert (
        segment_credits(smooth, states, estimator="gauss_legendre", n_steps=48).attribution - exact
    ).abs().max() < 1e-9


@pytest.mark.parametrize("n", [1, 2, 5, 20])
def test_gauss_legendre_integrates_polynomials(n):
    nodes, weights = gauss_legendre(n)
    for degree in range(2 * n):
        assert abs(float((weights * nodes**degree).sum()) - 1 / (degree + 1)) < 1e-14
    assert abs(float((weights * nodes ** (2 * n)).sum()) - 1 / (2 * n + 1)) > 1e-16


@pytest.mark.parametrize("rule", ESTIMATORS)
def test_reversed_path_has_the_negative_credits(rule):
    states = path(4, 3, 6)
    mirror = {"left": "right", "right": "left"}.get(rule, rule)
    there = segment_credits(smooth, states, estimator=rule, n_steps=5)
    back = segment_credits(smooth, states.flip(0), estimator=mirror, n_steps=5)
    torch.testing.assert_close(back.attribution.flip(0), -there.attribution, rtol=0, atol=1e-14)


def test_a_jump_defeats_quadrature_but_not_observed_change():
    def jump(h):
        return ((h[..., 0] - 0.97) / 0.01).clamp(0, 1)

    states = torch.tensor([[0.0], [1.0]], dtype=torch.float64)
    midpoint = [
        float(segment_credits(jump, states, estimator="midpoint", n_steps=n).attribution)
        for n in (10, 50, 200)
    ]
    assert midpoint[0] in (0.0, 10.0) and midpoint[1] == 2.0  # one node of spacing 0.02 in a slope of 100
    assert abs(midpoint[2] - 1) < 1e-9
    for n in (1, 10, 50, 200):
        credits = segment_credits(jump, states, n_steps=n)
        assert float(credits.attribution) == 1.0
        assert abs(float(credits.steps.sum()) - 1) < 1e-15


@pytest.mark.parametrize(("n_steps", "max_nodes"), [(51, 50), (3, 50), (1, 1), (5, 1), (5, 3), (5, 16)])
@pytest.mark.parametrize("rule", ESTIMATORS)
def test_chunks_do_not_change_credits(rule, n_steps, max_nodes):
    states = path(4, 2, 6)
    whole = segment_credits(smooth, states, estimator=rule, n_steps=n_steps)
    parts = segment_credits(smooth, states, estimator=rule, n_steps=n_steps, max_nodes=max_nodes)
    for name in ("attribution", "levels", "steps"):
        torch.testing.assert_close(getattr(parts, name), getattr(whole, name), rtol=0, atol=1e-14)


@pytest.mark.parametrize("max_nodes", [1, 4, 100])
def test_never_more_nodes_than_allowed_and_none_twice(max_nodes):
    seen = []

    def counting(h):
        seen.append(len(h))
        return smooth(h)

    segment_credits(counting, path(4, 2, 6), n_steps=5, max_nodes=max_nodes)
    assert max(seen) <= max_nodes and sum(seen) == 3 * 5 + 1


@pytest.mark.parametrize("rule", ESTIMATORS)
def test_equal_ends_have_credit_exactly_zero(rule):
    noise = iter(range(10**6))

    def trembling(h):  # equal rows that differ in the last bit, as rows of different tiles may
        return smooth(h) * (1 + 1e-15 * torch.tensor([next(noise) % 7 for _ in range(len(h))]))

    states = path(4, 6)
    states[2] = states[1]
    credits = segment_credits(trembling, states, estimator=rule, n_steps=3)
    assert credits.attribution[1] == 0 and not bool(credits.steps[1].any())
    assert bool((credits.attribution[[0, 2]] != 0).all())


@pytest.mark.parametrize("rule", RULES)
def test_gradients_come_from_value_and_grad_where_given(rule):
    states = path(4, 6)
    calls = []

    def value_and_grad(h):
        calls.append(len(h))
        return autograd_of(smooth)(h)

    given = segment_credits(smooth, states, estimator=rule, n_steps=4, value_and_grad=value_and_grad)
    assert sum(calls) == (12 if rule in ("midpoint", "gauss_legendre") else 13)
    assert torch.equal(
        given.attribution, segment_credits(smooth, states, estimator=rule, n_steps=4).attribution
    )


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_gradient_rules_work_in_any_grad_mode(mode):
    states = path(3, 6)
    outside = segment_credits(smooth, states, estimator="midpoint", n_steps=4).attribution
    with mode():
        inside = segment_credits(smooth, states.clone(), estimator="midpoint", n_steps=4)
    assert not inside.attribution.requires_grad
    torch.testing.assert_close(inside.attribution.clone(), outside, rtol=0, atol=1e-15)


def test_slope_is_the_directional_derivative():
    gradient, direction = path(3, 2, 5), path(3, 2, 5)
    expected = torch.from_numpy(np.einsum("nbd,nbd->nb", gradient.numpy(), direction.numpy()))
    torch.testing.assert_close(slope(gradient, direction), expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"estimator": "simpson"},
            "estimator must be one of prediction_aware, midpoint, left, right, trapezoid, gauss_legendre, "
            "got 'simpson'; check the spelling",
        ),
        ({"n_steps": 0}, "n_steps must be a whole number of at least 1, got 0; give a whole number"),
        ({"n_steps": True}, "n_steps must be a whole number of at least 1, got True; give a whole number"),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises(ValueError) as error:
        segment_credits(smooth, path(3, 6), **options)
    assert str(error.value) == message


def test_a_path_needs_two_points():
    with pytest.raises(ValueError) as error:
        segment_credits(smooth, path(1, 6))
    assert (
        str(error.value) == "states must be at least two points, got (1, 6); a path needs a start and an end"
    )
