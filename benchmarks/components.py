"""What direct probability attribution costs beside the rows it reads.

Every ratio has on its other side the model's forward and the streamed readout of as many rows as the call reads,
gradients as gradients and forward-only probes as values; sides alternate in one run, medians. Rows of the adaptive
grid are counted beside a fixed grid of eight nodes in every segment. Peak memory is measured in a fresh process.
Part of ``python -m benchmarks``.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from tl_iglens import collect_states
from tl_iglens.components import direct_probability_attribution
from tl_iglens.estimators import gauss_legendre
from tl_iglens.prompts import PROMPTS
from tl_iglens.quantity import Objective
from tl_iglens.readout import Readout
from tl_iglens.writers import UNITS, component_hooks

from .cases import HEADS, model, tokens
from .measure import in_fresh_process, peak_above, ratio

PATHS = ("layers", "straight")
GOALS = {"component": 1.3, "head": 1.3, "neuron": 1.5}
_ROWS_AT_ONCE = 2048

torch.set_grad_enabled(False)


def call(head: str, n_tokens: int, unit: str, path: str, pos: int | None) -> Callable[[], object]:
    m, ids = model(head), tokens(model(head), n_tokens)
    return lambda: direct_probability_attribution(m, ids, unit=unit, path=path, pos_slice=pos)


@contextmanager
def counted() -> Iterator[dict[str, int]]:
    """How many rows the readout is asked for while this is open."""
    rows, own = {"value": 0, "value_and_grad": 0}, {}
    for name in rows:
        own[name] = getattr(Readout, name)

        def count(self, h, *args, name=name):
            rows[name] += h.numel() // h.shape[-1]
            return own[name](self, h, *args)

        setattr(Readout, name, count)
    try:
        yield rows
    finally:
        for name, function in own.items():
            setattr(Readout, name, function)


def forward_and_rows(head: str, n_tokens: int, n_values: int, n_gradients: int) -> Callable[[], object]:
    """The model's forward, and the readout of as many rows."""
    m, ids = model(head), tokens(model(head), n_tokens)
    readout, states = Readout(m), collect_states(m, ids, pos_slice=None).resid[:, 0].flatten(0, 1)

    def read(function: Callable[..., object], n_rows: int) -> None:
        index = torch.arange(n_rows) % len(states)
        for part in index.split(_ROWS_AT_ONCE):
            ids = torch.full((len(part), 1), 7)
            function(states[part], Objective("prob", ids, torch.ones(ids.shape).double()))

    def run() -> None:
        m(ids)
        read(readout.value, n_values)
        read(readout.value_and_grad, n_gradients)

    return run


def cost(head: str, n_tokens: int, pos: int | None) -> Iterator[tuple[str, ...]]:
    for unit in UNITS:
        for path in PATHS:
            ours = call(head, n_tokens, unit, path, pos)
            with counted() as rows:
                ours()
            other = forward_and_rows(head, n_tokens, rows["value"], rows["value_and_grad"])
            got = ratio(ours, other)
            where = f"{head}, {'one position' if pos == -1 else f'T = {n_tokens}'}, {unit}, {path}"
            figure = f"{got.value:.2f}  ({got.ours:.2f} s; {rows['value_and_grad']} + {rows['value']} rows)"
            yield "call / (forward + its rows)", where, figure, f"≤ {GOALS[unit]}"


def grid(head: str, text: str) -> tuple[str, ...]:
    """Rows and error of the adaptive grid, and those of eight nodes in every segment, at the last position."""
    m = model(head)
    states = collect_states(m, text, extra=component_hooks(m, "component"))
    n, points = states.n_layers, states.resid[:, 0]
    with counted() as rows:
        ours = direct_probability_attribution(m, states=states)
    target = Objective("prob", ours.targets[0][:, None], torch.ones(1, 1).double())
    names = component_hooks(m, "component")
    delta = torch.stack([states.extra[name][0, 0] for name in names]).reshape(n, 2, -1)
    readout = Readout(m)

    def fixed(n_nodes: int, n_parts: int = 1) -> torch.Tensor:
        """n_nodes Gauss–Legendre nodes in each of n_parts equal parts of a segment, made exact segment by segment."""
        total = torch.zeros(n, 2, dtype=torch.float64)
        for part in range(n_parts):
            for alpha, weight in zip(*gauss_legendre(n_nodes), strict=True):
                h = torch.lerp(points[:-1], points[1:], (part + alpha.float()) / n_parts)
                total += weight / n_parts * (readout.value_and_grad(h, target)[1] * delta).sum(-1).double()
        miss = ours.segment_attribution[:, 0, 0] - total.sum(1)
        return total + miss[:, None] * total.abs() / total.abs().sum(1, keepdim=True).clamp_min(1e-300)

    truth = fixed(8, 8)
    error, of_8 = (
        float((c - truth).abs().max()) for c in (ours.attribution[:, 0, 0].reshape(n, 2), fixed(8))
    )
    gradients, probes = rows["value_and_grad"], rows["value"] - (n + 1)
    share, errors = (gradients + probes) / (8 * n), f"error {error:.0e}, fixed {of_8:.0e}"
    figure = f"{share:.2f}  ({gradients} + {probes} of {8 * n}; {errors})"
    return "rows / fixed grid of 8", f"{head}, {text!r}", figure, "≤ 0.50"


def peak(head: str, n_tokens: int, unit: str, path: str) -> float:
    """Peak memory of a call on every position, above the model and its states."""
    m, ids = model(head), tokens(model(head), n_tokens)
    states = collect_states(m, ids, pos_slice=None)
    run = functools.partial(
        direct_probability_attribution, m, states=states, pos_slice=None, unit=unit, path=path
    )
    direct_probability_attribution(
        m, ids[:, :4], unit=unit, path=path
    )  # what stays loaded after a first call
    return peak_above(functools.partial(run, top_k=100))


def memory(quick: bool) -> Iterator[tuple[str, ...]]:
    for unit in ("neuron",) if quick else UNITS:
        for path in PATHS:
            expression = (
                f"__import__('benchmarks.components').components.peak({HEADS[0]!r}, 128, {unit!r}, {path!r})"
            )
            figure = f"{in_fresh_process(expression):.0f}"
            yield (
                "peak memory above model and states, MiB",
                f"{HEADS[0]}, T = 128, {unit}, {path}",
                figure,
                "≤ 256",
            )


def measured(parts: list[str], quick: bool) -> Iterator[tuple[str, ...]]:
    if "cost" in parts:
        for head, n_tokens, pos in ((HEADS[0], 16, -1), (HEADS[0], 64, None), (HEADS[1], 16, -1)):
            if not quick or (head, pos) == (HEADS[0], -1):
                yield from cost(head, n_tokens, pos)
    if "grid" in parts:
        for head in HEADS[: 1 if quick else 2]:
            yield from (grid(head, prompt.text) for prompt in PROMPTS[:4])
    if "memory" in parts:
        yield from memory(quick)
