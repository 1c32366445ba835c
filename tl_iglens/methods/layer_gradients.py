"""Layer integrated gradients and layer conductance, by Captum: what each layer's whole output is worth.

With F the model's own output at the target position, x the prompt and x' a baseline prompt of the same length,

    layer_ig:           Σ_positions (h − h') ⊙ ∫ ∂F/∂h (h' + α(h − h')) dα ,  h, h' the layer at x and x'
    layer_conductance:  Σ_positions ∫ ∂F/∂h ⊙ dh ,  along the straight path of the stream that enters block 0

Either integral is the whole change F(x) − F(x') at *every* layer, so the totals of n layers sum to n times that
and do not telescope. What differs between layers is the split over positions; ``extra["at_target"]`` is the part
at the target position. Both need gradients through the blocks; Captum's estimate carries its quadrature error.
Sources: Sundararajan et al. (2017); Dhamdhere et al., "How Important Is a Neuron?" (2018); Captum.
"""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from .._checks import check_positive, fail
from ..collect import only_rows
from ..path import Point
from ..quantity import Objective
from ..tokens import Prompts, resolve_objective, token_text
from .base import MethodResult, Question, ends_of

_START = "blocks.0.hook_resid_pre"
_FAR = 0.05  # share of the change of F by which a layer's total may miss it without a warning


def layer_ig(
    question: Question, *, baseline_prompt: Any = None, n_steps: int = 50, internal_batch_size: int | None = None
) -> MethodResult:
    """Captum's ``LayerIntegratedGradients`` at every block output of the path.

    ``baseline_prompt``: a token (text or id) repeated over the prompt, or ids ``[batch, ctx]``; None takes the
    tokenizer's end-of-text token. ``n_steps`` nodes of Gauss–Legendre quadrature, ``internal_batch_size`` of them
    in one forward (Captum's options). Values are in the unit of F, probability by default. ``extra``: ``at_target`` (the part at the target position) and
    ``convergence_delta`` (total − change of F, as Captum reports it), ``[row, batch, pos]``.

    Warns where a layer's total misses the change of F by more than a twentieth of it. Raises ImportError where Captum
    is missing.
    """
    captum = _captum()

    def attribute(forward: "_Forward", layer: torch.nn.Module, rows: Tensor) -> tuple[Tensor, Tensor]:
        method = captum.LayerIntegratedGradients(forward.of_tokens, layer)
        return method.attribute(
            forward.tokens,
            forward.baseline,
            additional_forward_args=(rows,),
            n_steps=n_steps,
            internal_batch_size=internal_batch_size,
            return_convergence_delta=True,
        )

    return _layer_totals(question, "layer_ig", attribute, baseline_prompt, n_steps)


def layer_conductance(
    question: Question, *, baseline_prompt: Any = None, n_steps: int = 50, internal_batch_size: int | None = None
) -> MethodResult:
    """Captum's ``LayerConductance`` at every block output of the path; options and figures as for ``layer_ig``.

    Values are in the unit of F, probability by default.
    """
    captum = _captum()

    def attribute(forward: "_Forward", layer: torch.nn.Module, rows: Tensor) -> tuple[Tensor, Tensor]:
        method = captum.LayerConductance(forward.of_stream, layer)
        return method.attribute(
            forward.start(forward.tokens),
            forward.start(forward.baseline),
            additional_forward_args=(rows,),
            n_steps=n_steps,
            internal_batch_size=internal_batch_size,
            return_convergence_delta=True,
        )

    return _layer_totals(question, "layer_conductance", attribute, baseline_prompt, n_steps)


def _captum() -> Any:
    try:
        import captum.attr
    except ImportError as error:
        raise ImportError(
            'layer_ig and layer_conductance need Captum, which is not installed; run pip install "tl-iglens[captum]"'
        ) from error
    return captum.attr


Attribute = Callable[["_Forward", torch.nn.Module, Tensor], tuple[Tensor, Tensor]]


def _layer_totals(
    question: Question, method: str, attribute: Attribute, baseline_prompt: Any, n_steps: int
) -> MethodResult:
    check_positive("n_steps", n_steps)
    points = tuple(Point(bound) for bound in question.bounds[1:])
    shape = (len(points), *question.states.positions.shape)
    # tensors made under a caller's inference mode cannot carry gradients: leave it, whatever it is
    with torch.inference_mode(False), torch.enable_grad():
        total, at_target, delta = (torch.full(shape, torch.nan, dtype=torch.float64) for _ in range(3))
        change = torch.full(shape[1:], torch.nan, dtype=torch.float64)
        packed, baseline = _prompts(question, baseline_prompt)
        for column in range(shape[2]):
            rows = question.states.present[:, column].nonzero()[:, 0].clone()
            forward = _Forward(question, packed, baseline, rows, column)
            change[rows, column] = forward.change().cpu()
            for row, point in enumerate(points):
                layer = question.model.hook_dict[f"blocks.{point.block - 1}.hook_resid_post"]
                index = torch.arange(len(rows), device=forward.tokens.device)
                attribution, gap = attribute(forward, layer, index)
                parts = _tensor(attribution, point).detach().double().sum(-1)
                total[row, rows, column] = parts.sum(-1).cpu()
                at_target[row, rows, column] = parts[index, forward.places].cpu()
                delta[row, rows, column] = gap.detach().double().cpu()
    _warn_far(method, points, delta, change, n_steps)
    name = "the given prompt" if baseline_prompt is not None else "one token repeated"
    where = ends_of(points, question.n_layers)
    n = len(points)
    return MethodResult(
        method=method,
        values=_as(question, total),
        labels=tuple(f"{point.block - 1}_block" for point in points),
        **where,
        kind="additive",
        unit=question.unit,
        sums_to=f"{n}·Δ from the baseline prompt",
        expected=_as(question, n * change),
        error=_as(question, delta.abs().sum(0)),
        extra={"at_target": _as(question, at_target), "convergence_delta": _as(question, delta)},
        notes=(f"n_steps={n_steps}", f"baseline prompt: {name} ({_describe(question, baseline[0])})"),
    )


def _warn_far(method: str, points: tuple[Point, ...], delta: Tensor, change: Tensor, n_steps: int) -> None:
    """Say so where the quadrature misses the change of F by more than a twentieth of it."""
    miss = torch.nan_to_num(delta.abs() / change.abs().clamp_min(1e-3)).amax((1, 2))
    if float(miss.max()) > _FAR:
        layer = int(miss.argmax())
        warnings.warn(
            f"{method} with n_steps={n_steps} misses the change of the output by {float(miss.max()):.0%} at "
            f"{points[layer].block - 1}_block; its convergence_delta says by how much at every layer, raise n_steps",
            stacklevel=5,
        )


def _as(question: Question, values: Tensor) -> Tensor:
    return values.to(question.receipt.levels.dtype)


class _Forward:
    """F: the asked quantity at one analysed position, from tokens or from the stream that enters block 0."""

    def __init__(self, question: Question, packed: Prompts, baseline: Tensor, rows: Tensor, column: int):
        self.model = question.model
        device = question.readout.device
        self.tokens = packed.ids[rows].clone().to(device)
        self.baseline = baseline[rows].clone().to(device)
        starts = torch.tensor([start for start, _ in question.states.prompts.spans])
        self.places = (question.states.positions[:, column] - starts)[rows].clone().to(device)
        own = question.objective
        self.ids, self.sign = (t[rows, column].clone().to(device) for t in (own.ids, own.sign))
        self.quantity = own.quantity

    def of_tokens(self, tokens: Int[Tensor, "row ctx"], which: Int[Tensor, "row"]) -> Float[Tensor, "row"]:
        """F of token ids; ``which`` names the prompt whose position and target a row has."""
        places = self.places[which]
        with only_rows(self.model.unembed, places[:, None]) as asked:
            # every token is real to the model: pads on the right cannot reach an earlier position
            logits = self.model(tokens, return_type="logits", attention_mask=torch.ones_like(tokens))
        logits = logits[0] if isinstance(logits, tuple) else logits
        logits = logits[:, 0] if asked.cut else logits[torch.arange(len(places)), places]
        objective = Objective(self.quantity, self.ids[which], self.sign[which])
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return objective.value(logits.gather(1, objective.ids), logits.logsumexp(-1))

    def of_stream(self, stream: Float[Tensor, "row ctx d_model"], which: Int[Tensor, "row"]) -> Float[Tensor, "row"]:
        """F with ``stream`` in place of the state that enters block 0."""
        with self.model.hooks(fwd_hooks=[(_START, lambda act, hook: stream.to(act.dtype))]):
            return self.of_tokens(self.tokens[which], which)

    def start(self, tokens: Int[Tensor, "row ctx"]) -> Float[Tensor, "row ctx d_model"]:
        """The state that enters block 0, at every place of the prompts."""
        kept: list[Tensor] = []
        hook = (_START, lambda act, hook: kept.append(act.detach().clone()))
        with torch.no_grad(), self.model.hooks(fwd_hooks=[hook]):
            self.of_tokens(tokens, torch.arange(len(tokens), device=tokens.device))
        return kept[0]

    def change(self) -> Float[Tensor, "row"]:
        """F(x) − F(x')."""
        index = torch.arange(len(self.tokens), device=self.tokens.device)
        with torch.no_grad():
            return (self.of_tokens(self.tokens, index) - self.of_tokens(self.baseline, index)).double()


def _prompts(question: Question, baseline_prompt: Any) -> tuple[Prompts, Int[Tensor, "batch ctx"]]:
    prompts = question.states.prompts
    if prompts.has_gaps:
        fail(
            "attention_mask",
            "1 between the first and last token of a row",
            "a gap",
            "layer gradients need whole prompts",
        )
    packed, _ = prompts.right_padded()
    tokenizer = getattr(question.model, "tokenizer", None)
    if baseline_prompt is None:
        found = (getattr(tokenizer, f"{name}_token_id", None) for name in ("eos", "bos", "pad"))
        baseline_prompt = next((i for i in found if i is not None), None)
        if baseline_prompt is None:
            todo = "pass a token id or ids of the same length as baseline_prompt"
            fail("baseline_prompt", "given for a model without a tokenizer", "None", todo)
    if isinstance(baseline_prompt, str):
        one = resolve_objective(question.model, question.readout.d_vocab, baseline_prompt, None, "prob", (1, 1))
        baseline_prompt = int(one.ids[0, 0, 0])
    baseline = torch.as_tensor(baseline_prompt).cpu()
    rule = f"one token, or ids of shape {list(packed.ids.shape)}"
    if baseline.is_floating_point() or (baseline.ndim and tuple(baseline.shape) != tuple(packed.ids.shape)):
        fail(
            "baseline_prompt",
            rule,
            f"{baseline.dtype} of shape {list(baseline.shape)}",
            "zero embeddings are no prompt",
        )
    if int(baseline.min()) < 0 or int(baseline.max()) >= question.readout.d_vocab:
        fail("baseline_prompt", rule, int(baseline.max()), "use the model's own tokenizer")
    return packed, baseline.long().expand_as(packed.ids)


def _tensor(attribution: Any, point: Point) -> Tensor:
    """The one tensor of a layer's output."""
    parts = attribution if isinstance(attribution, tuple) else (attribution,)
    tensors = [part for part in parts if isinstance(part, Tensor) and part.ndim == 3]
    if len(tensors) != 1:
        got = [type(part).__name__ for part in parts]
        fail("model", f"one whose blocks.{point.block - 1} hands on one state", got, "its blocks are not supported")
    return tensors[0]


def _describe(question: Question, ids: Tensor) -> str:
    tokenizer = getattr(question.model, "tokenizer", None)
    names = [token_text(tokenizer, i) for i in ids.tolist()]
    return f"{len(names)} × {names[0]}" if len(set(names)) == 1 else " ".join(names[:12])
