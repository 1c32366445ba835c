"""Direct logit attribution: which component wrote the logit.

The final logit is linear in the residual stream once the final norm's scale σ is held at its value:

    z_t = w_tᵀ norm(h_n) + b_t = Σ_c ⟨γ ⊙ w_t, c − mean(c)⟩ / σ(h_n)  +  ⟨β, w_t⟩ + b_t ,  h_n = Σ_c c ,

(no mean for RMSNorm), so every component c of the stream has a share of the logit and the shares and the bias
sum to it. They sum to a logit, and to nothing in probability. A single logit is defined up to the
unembedding's centring; the difference of two is not.
Source: Elhage et al., "A Mathematical Framework for Transformer Circuits" (2021).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from einops import einsum, rearrange
from jaxtyping import Float
from torch import Tensor
from transformer_lens import ActivationCache

from .._checks import ReadoutMismatchError, check_choice, fail
from ..path import Point, resolve_path
from .base import NO_POINT, MethodResult, Question, ends_of

UNITS = ("block", "component", "head")
_TOLERANCE = 1e-3  # terms + bias against the logit, relative; also parts of a block against the block


def hooks(model: Any, *, unit: str | None = None) -> tuple[str, ...]:
    """The activations beside the residual stream that a unit needs; ValueError for a unit the model has not."""
    if unit is not None:
        check_choice("unit", unit, UNITS)
    if unit not in ("component", "head"):
        return ()
    blocks = range(int(model.cfg.n_layers))
    names = [name for b in blocks for name in _outputs(model, b)]
    if unit == "head":
        names += [f"blocks.{b}.attn.hook_z" for b in blocks]
    missing = next((name for name in names if name not in model.hook_dict), None)
    if missing is not None:
        fail("unit", f"'block' for a model without {missing}", repr(unit), "whole blocks work for every model")
    if _may_use_tool(model):
        names += ["hook_embed", "ln_final.hook_scale"]
        # rotary models list the hook under this name, and it never fires
        if getattr(model.cfg, "positional_embedding_type", None) == "standard":
            names.append("hook_pos_embed")
    return tuple(name for name in names if name in model.hook_dict)


def _may_use_tool(model: Any) -> bool:
    """Whether weights were processed as TransformerLens' own tool assumes."""
    if _is_bridge(model):
        return bool(getattr(model, "compatibility_mode", False))
    kind = model.cfg.normalization_type
    return kind is None or str(kind).endswith("Pre")


def _is_bridge(model: Any) -> bool:
    return hasattr(model, "adapter")


def logit_attribution(question: Question, *, unit: str | None = None) -> MethodResult:
    """The share of every block, component or head in the target's logit (or logit difference).

    ``unit``: ``"block"``, ``"component"`` (attention and MLP outputs) or ``"head"`` (heads and a remainder);
    None takes the segments of the path. Terms + bias = logit is checked on every call; where the model caps its
    logits the shares are of the logit before the cap.

    Raises ValueError for a target that is a set of tokens, a unit the model's blocks do not have, or heads whose
    outputs do not add up to their attention; ReadoutMismatchError where the terms miss the logit.
    """
    unit = unit or ("component" if any(point.mid for point in question.path.states) else "block")
    head = direction_of(question)
    if unit != "block" and _tool_applies(question, head):
        terms = _from_tool(question, unit, head)
        if _is_complete(question, head, terms):
            return _result(question, unit, head, terms)
    if unit == "block":
        terms = _block_terms(question, head)
    elif unit == "component":
        terms = _component_terms(question, head)
    else:
        terms = _head_terms(question, head)
    if not _is_complete(question, head, terms):
        total, expected = terms.values.sum(0) + head.bias, head.logit
        worst = int((total - expected).abs().argmax())
        raise ReadoutMismatchError(
            f"model must be one whose {unit} outputs and bias sum to its logit, got {float(total[worst]):.6g} instead "
            f"of {float(expected[worst]):.6g}; its final norm or head is not of a form that can be split"
        )
    return _result(question, unit, head, terms)


@dataclass(frozen=True)
class Direction:
    """The linear functional of the final state that is the logit, per cell, at the scale the norm has there."""

    along: Float[Tensor, "cell d_model"]  # γ ⊙ w_t / σ, with the part that the norm's centring removes taken out
    bias: Float[Tensor, "cell"]
    logit: Float[Tensor, "cell"]  # what the shares and the bias have to sum to
    sigma: Float[Tensor, "cell"]  # the scale of the final norm
    is_folded: bool
    scale: float  # of a linear output transform
    unit: str

    def of(self, component: Float[Tensor, "... cell d_model"]) -> Float[Tensor, "... cell"]:
        """The share of a component."""
        return einsum(component.double(), self.along, "... cell d_model, cell d_model -> ... cell")


@dataclass(frozen=True)
class _Terms:
    values: Float[Tensor, "term cell"]
    labels: tuple[str, ...]
    places: tuple[Point | None, ...]  # the point of the stream a term is complete at
    notes: tuple[str, ...] = ()


def direction_of(question: Question) -> Direction:
    """The direction in the stream that the target's logit, or its difference to another, is read along."""
    readout, objective = question.readout, question.flat_objective
    plus, minus = (objective.sign > 0).sum(-1), (objective.sign < 0).sum(-1)
    if bool((plus != 1).any()) or bool((minus > 1).any()):
        todo = "a set of tokens has no single direction; ask for one of them"
        fail("targets", "single tokens for dla", "a TokenSet", todo)
    final = question.at((Point(question.n_layers),))[0]
    x = readout.normed(final).double()
    # w_t, or w_target − w_incorrect; an empty place has sign 0
    w = readout.W_U[:, objective.ids].double()
    sign = objective.sign.to(w)
    w = einsum(sign, w, "cell id, d_model cell id -> cell d_model")
    constant = torch.zeros(len(w), dtype=w.dtype, device=w.device)
    if readout.b_U is not None:
        constant = (sign * readout.b_U[objective.ids].double()).sum(-1)
    gain, beta, sigma, is_centred = norm_at(question, final)
    along = gain * w
    if is_centred:
        along = along - along.mean(-1, keepdim=True)  # ⟨γw, c − mean c⟩ = ⟨γw − mean(γw), c⟩
    scale = readout.transform.scale if readout.transform.is_linear else 1.0
    capped = not readout.transform.is_linear
    own = (x * w).sum(-1) + constant
    if not capped:  # the model's own logits of the forward
        own = question.model_value("logit")[question.states.present].to(own)
    unit = "logit before the soft cap" if capped else "logit"
    is_folded = bool((gain == 1).all()) and not bool(beta.any())
    bias = scale * (w @ beta + constant)
    return Direction(scale * along / sigma, bias, own, sigma[:, 0], is_folded, scale, unit)


def norm_at(question: Question, h: Tensor) -> tuple[Tensor, Tensor, Tensor, bool]:
    """Gain and bias ``[d_model]``, scale σ(h) ``[cell, 1]`` and centring of the final norm at states ``[cell, d_model]``."""
    h, norm = h.double(), question.readout.norm
    if norm.module is None:
        return torch.ones_like(h[0]), torch.zeros_like(h[0]), torch.ones_like(h[:, :1]), False
    gain, beta, eps, is_centred = norm._measure(question.states.resid[-1].reshape(-1, h.shape[-1]))
    shifted = h - h.mean(-1, keepdim=True) if is_centred else h
    gain = torch.where((gain - 1).abs() < 1e-6, 1.0, gain.double())
    return gain, beta.double(), (shifted.square().mean(-1, keepdim=True) + eps).sqrt(), is_centred


def _is_complete(question: Question, head: Direction, terms: _Terms) -> bool:
    """Terms + bias = logit, relative to the size of what is added."""
    size = torch.maximum(head.logit.abs(), terms.values.abs().amax(0)).clamp_min(1e-3)
    half = question.states.resid.dtype in (torch.float16, torch.bfloat16)
    tolerance = 3e-2 if half else _TOLERANCE
    return bool(((terms.values.sum(0) + head.bias - head.logit).abs() <= tolerance * size).all())


def _result(question: Question, unit: str, head: Direction, terms: _Terms) -> MethodResult:
    known = tuple(place or Point(question.n_layers) for place in terms.places)
    ends = ends_of(known, question.n_layers)
    ends["ends"] = tuple(NO_POINT if p is None else e for p, e in zip(terms.places, ends["ends"], strict=True))
    ends["boundaries"] = tuple(-1 if p is None else b for p, b in zip(terms.places, ends["boundaries"], strict=True))
    return MethodResult(
        method="dla",
        values=question.cells(terms.values),
        labels=terms.labels,
        **ends,
        kind="additive",
        unit=head.unit,
        sums_to=head.unit,
        offset=question.cells(head.bias[None])[0],
        expected=question.cells(head.logit[None])[0],
        notes=(f"unit={unit}", "a single logit is defined up to the unembedding's centring", *terms.notes),
    )


# --- terms from differences of residual states: right for every block that has such states ------------------


def _block_terms(question: Question, head: Direction) -> _Terms:
    return _difference_terms(question, head, question.bounds, incl_mid=False)


def _component_terms(question: Question, head: Direction) -> _Terms:
    """Attention and MLP from the states around them, or from their own outputs where blocks are parallel."""
    if question.states.has_mid:
        return _difference_terms(question, head, tuple(range(question.n_layers + 1)), incl_mid=True)
    cache = _cache(question, "component")
    pre = question.at(tuple(Point(b) for b in range(question.n_layers + 1)))
    values, labels, places = [head.of(pre[0])], ["embed"], [Point(0)]
    for b in range(question.n_layers):
        names = _outputs(question.model, b)
        parts = [_cells(question, cache[name]) for name in names]
        _check_parts(torch.stack(parts).sum(0), pre[b + 1] - pre[b], b)
        values += [head.of(part) for part in parts]
        labels += [f"{b}_{name.rpartition('hook_')[2]}" for name in names]
        places += [Point(b + 1)] * len(parts)
    return _Terms(torch.stack(values), tuple(labels), tuple(places))


def _difference_terms(question: Question, head: Direction, bounds: Sequence[int], incl_mid: bool) -> _Terms:
    path = resolve_path(question.n_layers, bounds, incl_mid=incl_mid)
    states = question.at(path.states).double()
    shares = head.of(torch.cat([states[:1], states[1:] - states[:-1]]))
    return _Terms(shares, ("embed", *path.labels), path.states)


def _head_terms(question: Question, head: Direction) -> _Terms:
    """Heads by ``ActivationCache.stack_head_results``; everything else is the remainder."""
    n_heads = int(question.model.cfg.n_heads)
    _check_heads(question)
    cache = _cache(question, "head")
    stack, labels = cache.stack_head_results(return_labels=True, incl_remainder=True)
    places = (*_head_places(question, n_heads), None)
    return _Terms(head.of(_cells(question, stack, lead=1)), tuple(labels), places)


def _head_places(question: Question, n_heads: int) -> list[Point]:
    has_mid = "blocks.0.hook_resid_mid" in question.model.hook_dict
    ends = [Point(b, mid=True) if has_mid else Point(b + 1) for b in range(question.n_layers)]
    return [end for end in ends for _ in range(n_heads)]


# --- TransformerLens' own tool and cache ------------------------------------------------------------------------


def _tool() -> Any:
    """``direct_logit_attribution`` of TransformerLens 3.9 and later, or None."""
    try:
        from transformer_lens.tools.analysis import direct_logit_attribution
    except ImportError:
        return None
    return direct_logit_attribution


def _tool_applies(question: Question, head: Direction) -> bool:
    """Whether the tool's assumptions hold: gains folded into W_U, and compatibility mode on a bridge."""
    held = all(name in question.states.extra for name in hooks(question.model, unit="component"))
    return _tool() is not None and head.is_folded and _may_use_tool(question.model) and held


def _from_tool(question: Question, unit: str, head: Direction) -> _Terms:
    if unit == "head":
        _check_heads(question)
    cache = _cache(question, unit)
    ids, sign = question.objective.ids, question.objective.sign
    against = ids[..., 1] if ids.shape[-1] == 2 and bool((sign[..., 1] < 0).all()) else None
    found = _tool()(question.model, None, ids[..., 0], against, unit=unit, pos=None, cache=cache)
    values = head.scale * _cells(question, found.attribution[..., None], lead=1)[..., 0].double()
    if unit == "head":
        places = (*_head_places(question, int(question.model.cfg.n_heads)), None)
    else:
        places = tuple(_component_place(question, label) for label in found.labels)
    return _Terms(values, tuple(found.labels), places, ("by transformer_lens.tools.analysis.direct_logit_attribution",))


def _component_place(question: Question, label: str) -> Point:
    block, _, part = label.partition("_")
    if not block.isdigit():
        return Point(0)
    has_mid = f"blocks.{block}.hook_resid_mid" in question.model.hook_dict
    return Point(int(block), mid=True) if part == "attn_out" and has_mid else Point(int(block) + 1)


def _cache(question: Question, unit: str) -> ActivationCache:
    """The activations of the analysed positions as TransformerLens' own cache."""
    states, acts = question.states, dict(question.states.extra)
    missing = [name for name in hooks(question.model, unit=unit) if name not in acts]
    if missing:
        todo = f"collect them with extra=methods.hooks_of(model, {{'dla': {{'unit': {unit!r}}}}})"
        fail("states", f"collected with {missing[0]} for unit={unit!r}", "states without it", todo)
    for b in range(question.n_layers):
        acts[f"blocks.{b}.hook_resid_post"] = states.resid[states.index(Point(b + 1))]
    return ActivationCache(acts, question.model)


def _check_heads(question: Question) -> None:
    """The heads of every block and its output bias are what its attention adds to the stream, up to rounding."""
    cache = _cache(question, "head")  # one of its own: TransformerLens 3 warns about results that are already there
    results, _ = cache.stack_head_results(return_labels=True)
    heads = rearrange(_cells(question, results, lead=1), "(b head) cell d -> b head cell d", b=question.n_layers)
    for b, block in enumerate(question.model.blocks):
        bias, scale = getattr(block.attn, "b_O", None), getattr(block.attn, "_result_contribution_scale", 1.0)
        whole = heads[b].sum(0) + (0 if bias is None else scale * bias)
        _check_parts(whole, _attention(question, cache, b), b, "head")


def _attention(question: Question, cache: ActivationCache, b: int) -> Tensor:
    """What the attention of block b adds to the stream: by the states around it, or its own checked output."""
    pre = question.at((Point(b),))[0]
    if question.states.has_mid:
        return question.at((Point(b, mid=True),))[0] - pre
    parts = [_cells(question, cache[name]) for name in _outputs(question.model, b)]
    _check_parts(torch.stack(parts).sum(0), question.at((Point(b + 1),))[0] - pre, b)
    return parts[0]


def _outputs(model: Any, b: int) -> list[str]:
    """The hooks of what a block adds to the stream: attention, then MLP."""
    parts = ["attn"] if getattr(model.cfg, "attn_only", False) else ["attn", "mlp"]
    return [f"blocks.{b}.hook_{part}_out" for part in parts]


def _check_parts(parts: Tensor, whole: Tensor, block: int, unit: str = "component") -> None:
    """The parts of a block add up to what it wrote; ValueError for blocks whose hooks mean something else."""
    gap = float((parts - whole).norm() / whole.norm().clamp_min(1e-12))
    tolerance = 3e-2 if whole.dtype in (torch.float16, torch.bfloat16) else _TOLERANCE
    if not gap <= tolerance:
        what = {"component": "attention and MLP outputs", "head": "head outputs"}[unit]
        todo = "whole blocks work: use unit='block'" if unit == "component" else "use unit='component'"
        rule = f"a unit whose parts add up in blocks.{block}"
        fail("unit", rule, f"{unit!r} with {what} that miss it by {gap:.0%}", todo)


def _cells(question: Question, act: Tensor, lead: int = 0) -> Tensor:
    """An activation [*lead, batch, pos, ...] at the analysed cells, in one row."""
    present = question.states.present.to(act.device)
    return act[(slice(None),) * lead + (present,)]
