"""The work that is measured: three output heads, real states, and the other ways to do the same."""

import functools
import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tl_iglens import ResidualStates, collect_states, ig_lens
from tl_iglens.demo import load_demo_model, load_gemma
from tl_iglens.estimators import gauss_legendre
from tl_iglens.prompts import PROMPTS
from tl_iglens.quantity import Objective
from tl_iglens.readout import Readout

from .measure import peak_above

torch.set_grad_enabled(False)

# A side is limited to about this many multiply-adds, by taking evenly spaced layers and, where one layer is more,
# its first positions, 1,024 at least; both sides read the same rows.
WORK = 5e10
LEAST_ROWS = 1024
HEADS = ("SmolLM2-135M", "Gemma-3-270M", "Llama-3.2-1B (random head)")


@functools.cache
def model(head: str) -> Any:
    if head.startswith("SmolLM2"):
        return load_demo_model()
    if head.startswith("Gemma"):
        return load_gemma()
    return _random_head(d_model=2048, d_vocab=128_256, n_layers=16)


def _random_head(d_model: int, d_vocab: int, n_layers: int) -> Any:
    """An unembedding of the shape of a larger model, without its blocks."""
    torch.manual_seed(0)
    unembed = torch.nn.Linear(d_model, d_vocab, bias=False).requires_grad_(False)
    cfg = SimpleNamespace(normalization_type=None, output_logits_soft_cap=-1.0, n_layers=n_layers, d_model=d_model)
    return SimpleNamespace(unembed=unembed, W_U=unembed.weight.T, b_U=None, cfg=cfg)


def tokens(m: Any, n: int) -> Tensor:
    """``n`` tokens of the package's own prompts, repeated as often as needed."""
    text = " ".join(prompt.text + (prompt.answer or "") + "." for prompt in PROMPTS)
    ids = m.to_tokens(text, truncate=False)[0]
    return ids.repeat(-(-n // len(ids)))[:n][None]


@functools.cache
def states(head: str, n_tokens: int) -> ResidualStates:
    return collect_states(model(head), tokens(model(head), n_tokens), pos_slice=None)


@functools.cache
def points(head: str, n_tokens: int, limit: float = WORK) -> Tensor:
    """States ``[point, cell, d_model]``: real ones, or random rows for the head without blocks."""
    W_U = model(head).W_U
    if head.startswith("Llama"):
        torch.manual_seed(1)
        every = torch.randn(model(head).cfg.n_layers + 1, n_tokens, W_U.shape[0])
    else:
        every = states(head, n_tokens).resid[:, 0]
    keep = int(limit / (n_tokens * W_U.numel()))
    index = torch.linspace(0, len(every) - 1, max(1, min(keep, len(every)))).round().long()
    rows = max(LEAST_ROWS, int(limit / W_U.numel()))
    return every[index][:, :rows].contiguous()


def objective(h: Tensor, d_vocab: int) -> Objective:
    torch.manual_seed(2)
    return Objective("prob", torch.randint(0, d_vocab, (h.shape[1], 1)), torch.ones(h.shape[1], 1).double())


def value(head: str, n_tokens: int, **options: Any) -> Callable[[], object]:
    h, readout = points(head, n_tokens), Readout(model(head), **options)
    target = objective(h, readout.d_vocab)
    return lambda: readout.value(h, target)


def value_and_grad(head: str, n_tokens: int) -> Callable[[], object]:
    h, readout = points(head, n_tokens), Readout(model(head))
    target = objective(h, readout.d_vocab)

    def run() -> None:
        for start in range(0, h.shape[0], max(1, 4096 // h.shape[1])):
            readout.value_and_grad(h[start : start + max(1, 4096 // h.shape[1])], target)

    return run


def bare_product(head: str, n_tokens: int) -> Callable[[], object]:
    """The logits of the same rows and nothing else, 512 rows at a time."""
    h, W_U = points(head, n_tokens), model(head).W_U
    rows = h.reshape(-1, h.shape[-1])

    def run() -> None:
        for block in rows.split(512):
            torch.mm(block, W_U)

    return run


def transformer_lens_logit_lens(head: str, n_tokens: int) -> Callable[[], object]:
    """TransformerLens 4's own readout of the same rows with one target per row."""
    from transformer_lens.tools.analysis.logit_lens import logit_readout

    m, h = model(head), points(head, n_tokens)
    target = objective(h, m.W_U.shape[1]).ids[:, 0]
    return lambda: logit_readout(m, h, targets=target, return_type="probs")


def plain_loop(head: str, n_tokens: int) -> Callable[[], object]:
    """Norm, unembed, log-softmax, with all logits held."""
    m, h = model(head), points(head, n_tokens)
    target = objective(h, m.W_U.shape[1]).ids[:, 0]

    def run() -> Tensor:
        logits = torch.stack([m.unembed(m.ln_final(layer[None]))[0] for layer in h])
        return logits.log_softmax(-1).gather(-1, target.expand(len(h), -1)[..., None]).exp()

    return run


def segment_loop(head: str, n_tokens: int) -> Callable[[], object]:
    """The same loop as scripts write it, segment by segment: every inner boundary is read twice."""
    m, h = model(head), points(head, n_tokens)
    target = objective(h, m.W_U.shape[1]).ids[:, 0]

    def probability(layer: Tensor) -> Tensor:
        logits = m.unembed(m.ln_final(layer[None]))[0]
        return logits.log_softmax(-1).gather(-1, target[:, None]).exp()[:, 0]

    return lambda: torch.stack([probability(b) - probability(a) for a, b in itertools.pairwise(h)])


def ours_integrals(head: str, n_tokens: int, n_nodes: int = 8) -> Callable[[], object]:
    m, s = model(head), states(head, n_tokens)
    return lambda: ig_lens(m, states=s, pos_slice=None, estimator="gauss_legendre", n_steps=n_nodes)


def autograd_integrals(head: str, n_tokens: int, n_nodes: int = 8) -> Callable[[], object]:
    """Segment integrals by backpropagation through norm, unembedding and softmax; one segment at a time."""
    m, s = model(head), states(head, n_tokens)
    h, target = s.resid[:, 0], s.output.top[0]
    alphas, weights = (t.float() for t in gauss_legendre(n_nodes))

    def run() -> Tensor:
        credits = []
        for a, b in itertools.pairwise(h):
            with torch.enable_grad():
                x = torch.lerp(a[None], b[None], alphas[:, None, None]).requires_grad_(True)
                p = m.unembed(m.ln_final(x)).softmax(-1)
                chosen = p.gather(-1, target.expand(n_nodes, -1)[..., None])
                (gradient,) = torch.autograd.grad(chosen.sum(), x)
            credits.append(torch.einsum("n,npd,pd->p", weights, gradient, b - a))
        return torch.stack(credits)

    return run


def captum_integrals(head: str, n_tokens: int, n_nodes: int = 8) -> Callable[[], object]:
    """Captum's LayerIntegratedGradients over the same layers, 8 nodes, the last position's top token."""
    from captum.attr import LayerIntegratedGradients

    m, ids = model(head), tokens(model(head), n_tokens)
    target = int(states(head, n_tokens).output.top[0, -1])

    def probability(x: Tensor) -> Tensor:
        return m(x)[:, -1].softmax(-1)[:, target]

    def run() -> list[Tensor]:
        with torch.enable_grad():
            return [
                LayerIntegratedGradients(probability, block).attribute(
                    ids, baselines=torch.zeros_like(ids), n_steps=n_nodes, internal_batch_size=n_nodes
                )
                for block in m.blocks
            ]

    return run


def whole_call(head: str, n_tokens: int) -> Callable[[], object]:
    m, ids = model(head), tokens(model(head), n_tokens)
    return lambda: ig_lens(m, ids, pos_slice=None)


def forward_and_readout(head: str, n_tokens: int) -> Callable[[], object]:
    """The two parts a call cannot do without: the model's forward, and the streamed values of all points."""
    m, s, ids = model(head), states(head, n_tokens), tokens(model(head), n_tokens)
    h, readout = s.resid[:, 0], Readout(m)
    target = Objective("prob", s.output.top[0][:, None], torch.ones(n_tokens, 1).double())

    def run() -> None:
        m(ids)
        readout.value(h, target)

    return run


def steps(n_steps: int, head: str = HEADS[0], n_tokens: int = 32) -> Callable[[], object]:
    m, s = model(head), states(head, n_tokens)
    return lambda: ig_lens(m, states=s, pos_slice=None, n_steps=n_steps)


def layers(count: int, head: str = HEADS[0], n_tokens: int = 64) -> Callable[[], object]:
    """``count`` segments, evenly spaced."""
    m, s = model(head), states(head, n_tokens)
    bounds = torch.linspace(0, s.n_layers, count + 1).round().long().tolist()
    return lambda: ig_lens(m, states=s, pos_slice=None, layers=bounds)


def vocabulary(d_vocab: int, d_model: int = 576, n_rows: int = 2048) -> Callable[[], object]:
    torch.manual_seed(0)
    readout = Readout(_random_head(d_model, d_vocab, 16))
    h = torch.randn(1, n_rows, d_model)
    target = objective(h, d_vocab)
    return lambda: readout.value(h, target)


def peak(case: Callable[..., Callable[[], object]], *args: Any) -> float:
    """Peak MiB of a case above model, states and one small warm-up call of the same code."""
    run = case(*args)
    case(args[0], 8)()
    return peak_above(run)


def peak_of_sweep(case: Callable[[int], Callable[[], object]], size: int) -> float:
    """Peak MiB of one size of a sweep, above its inputs and a warm-up on eight rows."""
    run = case(size)
    value(HEADS[0], 8)()
    return peak_above(run)


def rows_of(n_points: int, n_tokens: int = 128) -> Callable[[], object]:
    """The value at so many of SmolLM2's 31 points."""
    readout, h = Readout(model(HEADS[0])), points(HEADS[0], n_tokens, 1e15)
    target = objective(h, readout.d_vocab)
    return lambda: readout.value(h[:n_points], target)


def tokens_of(n_tokens: int) -> Callable[[], object]:
    return value(HEADS[0], n_tokens)


def accuracy(head: str, n_tokens: int = 32) -> float:
    """Largest error of a probability against norm, unembedding and softmax in float64, real states."""
    m, s = model(head), states(head, n_tokens)
    ours = ig_lens(m, states=s, pos_slice=None)
    norm = m.ln_final.original_component
    h = s.resid[:, 0].double()
    eps = getattr(norm, "variance_epsilon", None) or norm.eps
    gain = norm.weight.double() + (1 if "Gemma" in type(norm).__name__ else 0)
    x = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps) * gain
    worst = 0.0
    for point, layer in enumerate(x):
        p = (layer @ m.W_U.double()).softmax(-1).gather(-1, s.output.top[0][:, None])[:, 0]
        worst = max(worst, float((p - ours.levels[point, 0].double()).abs().max()))
    return worst
