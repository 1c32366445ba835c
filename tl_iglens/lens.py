"""ig_lens: between which layers is the probability of a predicted token produced?

The whole method on one page. A forward pass leaves the states h_0 … h_k of the residual stream; each is read
by the model's own head, f(h) = softmax(T(W_Uᵀ norm(h) + b_U))[y]; the credit of a segment is the integrated
gradient of f along it, which is the change of f over it, so the credits sum to Δp exactly.
Source: D. A. Nguyen, "IG-Lens", arXiv 2606.29693 (2026), sections 3 and 4.
"""

import copy
import warnings
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from tqdm.auto import tqdm

from ._checks import NonFiniteStateError, ReadoutMismatchError, check_choice, check_model, check_positive, fail, unwrap
from ._types import BASELINES, ESTIMATORS, QUANTITIES, Hooks, compute_dtype
from .collect import ResidualStates, collect_each, collect_prompts, micro_batches, model_level_logits
from .estimators import SegmentCredits, segment_credits
from .path import Path, resolve_path
from .quantity import Objective
from .readout import Readout
from .result import IGLensResult, RunInfo
from .tokens import Prompts, is_next, next_tokens, read_prompts, resolve_objective, select_positions, token_text

_MISSED = 0.05  # of Σ|credit|: quadrature errors above it are warned about
_CELLS_AT_ONCE = 4096  # analysed positions whose interpolated states exist at the same time


def ig_lens(
    model: Any,
    input: Any = None,
    *,
    targets: Any = None,
    incorrect_targets: Any = None,
    pos_slice: Any = -1,
    layers: Any = None,
    incl_mid: bool = False,
    baseline: Any = "embed",
    estimator: str = "prediction_aware",
    n_steps: int = 1,
    quantity: str = "prob",
    attention_mask: Any = None,
    prepend_bos: bool | None = None,
    states: ResidualStates | None = None,
    batch_size: int | None = None,
    tile_bytes: int | None = None,
    head: str = "model",
    verify: bool = False,
    progress: bool = False,
    fwd_hooks: Hooks = (),
) -> IGLensResult:
    """One signed credit per segment of the residual stream; the credits sum to the change of the quantity.

    Args:
        model: a HookedTransformer or TransformerBridge in eval mode.
        input: text, a list of texts, or ids ``[pos]`` / ``[batch, pos]``; omitted where ``states`` is given.
        targets: None for the model's top token at each position, ``"next"`` for the token that follows in the
            input, a token as text or id, one per row, an integer tensor ``[batch, pos]``, or a ``TokenSet``.
        incorrect_targets: f becomes target − incorrect.
        pos_slice: TransformerLens ``Slice`` over the real tokens of each row; None for all of them.
        layers: boundaries of the path, strictly increasing; None for all. ``incl_mid`` splits blocks in
            attention and MLP.
        baseline: where the path starts: ``"embed"``, ``"zero"``, ``"mean"``, ``"bos"``, a tensor broadcastable to
            ``[batch, pos, d_model]``, or the ``ResidualStates`` of another prompt.
        estimator, n_steps: ``"prediction_aware"`` (exact), or a gradient rule with ``n_steps`` nodes a segment, which
            warns where its credits miss more than a twentieth.
        quantity: ``"prob"``, ``"log_prob"`` or ``"logit"`` (defined up to the unembedding's centring).
        attention_mask, prepend_bos: a mask for ids with pads; whether text gets the tokenizer's BOS, None for the
            model's own default.
        states: states collected before, instead of a forward.
        batch_size: rows per forward; tile_bytes: size of a tile of logits; progress: a bar on stderr.
        head: ``"model"`` reads in the model's dtype; ``"float32"`` lifts the head of a half-precision model, and
            ``result.readout_gap`` then says how far that is from the model's own output.
        verify: repeat all levels with a copy of the model on the CPU in float32 and note the gap in
            ``result.info.notes``: what a device computes wrongly in forward and readout alike shows nowhere else.
        fwd_hooks: interventions to run under, as for ``model.run_with_hooks``.

    Returns: an :class:`IGLensResult` with tensors ``[segment, batch, pos]`` on the CPU.

    A row that is not finite (NaN on its stream) is left out with a warning; its cells are NaN and the others stand.

    Raises: ValueError, TypeError or NotImplementedError naming the argument; NonFiniteStateError where no finite row
    is left; ReadoutMismatchError if the last level is not the model's own output.
    """
    check_choice("estimator", estimator, ESTIMATORS)
    check_choice("quantity", quantity, QUANTITIES)
    check_positive("n_steps", n_steps)
    model = unwrap(model)
    check_model(model)
    from_embed = isinstance(baseline, str) and baseline == "embed"
    path = resolve_path(int(model.cfg.n_layers), layers, incl_mid=incl_mid, from_embed=from_embed)
    _check_baseline(baseline, path)
    readout = Readout(model, tile_bytes, head)
    ask = _Ask(model, readout, targets, incorrect_targets, path, baseline, estimator, n_steps, quantity)
    if states is not None:
        _check_states(states, input, attention_mask, fwd_hooks, path)
        as_collected = isinstance(pos_slice, int) and pos_slice == -1 and states.positions.shape[1] == 1
        positions = states.positions if as_collected else select_positions(states.prompts, pos_slice)
        if is_next(targets):
            positions, _ = next_tokens(states.prompts, positions)
        result = ask.answer(states.at(positions), slice(None), states.prompts)
    else:
        prompts = read_prompts(model, input, attention_mask, prepend_bos)
        positions = select_positions(prompts, pos_slice)
        if is_next(targets):
            positions, _ = next_tokens(prompts, positions)
        batches = list(micro_batches(prompts, batch_size))
        collected = collect_each(model, prompts, positions, incl_mid, batch_size, fwd_hooks)
        bar = tqdm(collected, desc="ig_lens", total=len(batches), unit="batch", disable=not progress)
        result = _joined([ask.answer(part, rows, prompts) for rows, part in zip(batches, bar, strict=True)])
    _warn_quadrature(result)
    return _verified(result, ask, fwd_hooks) if verify else result


@dataclass
class _Ask:
    """One question, asked of the states of each micro-batch in turn."""

    model: Any
    readout: Readout
    targets: Any
    incorrect: Any
    path: Path
    baseline: Any
    estimator: str
    n_steps: int
    quantity: str

    def answer(self, states: ResidualStates, rows: slice, prompts: Prompts) -> IGLensResult:
        """Credits of the collected rows, checked against the model's own output."""
        if states.output.bare_head:
            self.readout.use_bare_head()
        objective = self._objective(states, rows, prompts)
        present = states.present
        at = present.to(states.resid.device)
        points = _path_states(states, self.path, self.baseline, rows, len(prompts.ids))[:, at]  # [point, cell, d_model]
        flat = Objective(self.quantity, objective.ids[present], objective.sign[present])
        credits = read_path(self.readout, points, flat, self.estimator, self.n_steps)
        _check_credits(credits, self.path, self.quantity)
        own = model_level_logits(self.readout, states, objective.ids)
        model_level = objective.value(own, states.output.log_z)
        if self.readout.work_dtype == self.readout.dtype:  # a lifted head reports its gap instead
            _check_readout(credits.levels[-1], model_level[present], self.quantity, self.readout)
        return self._result(states, credits, objective, model_level)

    def _objective(self, states: ResidualStates, rows: slice, prompts: Prompts) -> Objective:
        shape = tuple(prompts.ids.shape[:1]) + tuple(states.positions.shape[1:])
        targets = self.targets
        if targets is None:
            targets, shape, rows = states.output.top, tuple(states.positions.shape), slice(None)
        elif is_next(targets):
            _, targets = next_tokens(states.prompts, states.positions)
            shape, rows = tuple(states.positions.shape), slice(None)
        objective = resolve_objective(
            self.model, self.readout.d_vocab, targets, self.incorrect, self.quantity, (shape[0], shape[1])
        )
        return objective.at(rows)

    def _result(
        self, states: ResidualStates, credits: SegmentCredits, objective: Objective, model_level: Tensor
    ) -> IGLensResult:
        dtype = compute_dtype(states.resid.dtype)

        def cells(values: Tensor) -> Tensor:
            """Values of the analysed cells laid out as [..., batch, pos], NaN elsewhere."""
            full = torch.full((*values.shape[:-1], *states.positions.shape), torch.nan, dtype=dtype)
            full[..., states.present] = values.to(device="cpu", dtype=dtype)
            return full

        tokenizer = getattr(self.model, "tokenizer", None)
        return IGLensResult(
            attribution=cells(credits.attribution),
            levels=cells(credits.levels),
            labels=self.path.labels,
            point_labels=self.path.point_labels,
            boundaries=self.path.boundaries,
            targets=objective.ids[..., 0],
            target_strings=_target_strings(tokenizer, objective),
            tokens=states.prompts.ids,
            token_strings=tuple(tuple(token_text(tokenizer, i) for i in row) for row in states.prompts.ids.tolist()),
            attention_mask=states.prompts.mask,
            positions=states.positions,
            model_level=cells(model_level[states.present]),
            step_attribution=cells(credits.steps) if self.n_steps > 1 else None,
            info=run_info(self.model, states, self.path, self.estimator, self.n_steps, self.baseline, self.quantity),
        )


def _warn_quadrature(result: IGLensResult) -> None:
    """A gradient rule says itself where it misses the change by more than a twentieth of Σ|credit|."""
    gap, size = torch.nan_to_num(result.completeness_gap).abs(), torch.nan_to_num(result.attribution).abs().sum(0)
    missed = gap[gap > torch.maximum(_MISSED * size, torch.full_like(size, 1e-6))]
    if not result.info.exact and len(missed):
        warnings.warn(
            f"credits of {result.info.estimator} with n_steps={result.info.n_steps} miss up to {float(missed.max()):.2g} of "
            "the change, as result.completeness_gap says; take more steps, or the exact prediction_aware",
            stacklevel=3,
        )


def _verified(result: IGLensResult, ask: _Ask, fwd_hooks: Hooks) -> IGLensResult:
    """The result with a note of how far its levels are from those of a copy of the model on the CPU in float32."""
    clone = copy.deepcopy(ask.model).to("cpu", print_details=False).to(torch.float32, print_details=False)
    prompts = Prompts(result.tokens, result.attention_mask)
    incl_mid = any(point.mid for point in ask.path.states)
    states = collect_prompts(clone, prompts, result.positions, incl_mid, None, fwd_hooks)
    targets = result.targets if ask.targets is None else ask.targets
    own = replace(ask, model=clone, readout=Readout(clone), targets=targets, estimator="prediction_aware", n_steps=1)
    levels = own.answer(states, slice(None), prompts).levels
    gap = float((levels - result.levels)[:, result.present].abs().max())
    note = f"levels repeated on the CPU in float32 differ by at most {gap:.1e}"
    if gap > (1e-3 if result.info.dtype in ("float32", "float64") else 5e-2):
        warnings.warn(f"{note}; do not trust what this device computes", stacklevel=3)
    return replace(result, info=replace(result.info, notes=(*result.info.notes, note)))


def read_path(
    readout: Readout,
    points: Float[Tensor, "point cell d_model"],
    objective: Objective,
    estimator: str = "prediction_aware",
    n_steps: int = 1,
) -> SegmentCredits:
    """Credits and levels of a path through given states, a run of cells at a time; float64."""
    parts = []
    for first in range(0, max(points.shape[1], 1), _CELLS_AT_ONCE):
        cells = slice(first, min(first + _CELLS_AT_ONCE, points.shape[1]))
        here = objective.at(cells)
        parts.append(
            segment_credits(
                lambda h, here=here: readout.value(h, here),
                points[:, cells],
                estimator=estimator,
                n_steps=n_steps,
                value_and_grad=lambda h, here=here: readout.value_and_grad(h, here),
                max_nodes=max(1, _CELLS_AT_ONCE // max(cells.stop - cells.start, 1)),
            )
        )
    return SegmentCredits(
        *(torch.cat([getattr(p, name) for p in parts], -1) for name in ("attribution", "levels", "steps"))
    )


def _path_states(
    states: ResidualStates, path: Path, baseline: Any, rows: slice, n_rows: int | None = None
) -> Float[Tensor, "point batch pos d_model"]:
    """The states the path visits; the first of them is the baseline, of which ``rows`` of ``n_rows`` are read."""
    visited = states.resid[[states.index(point) for point in path.states]]
    if path.points[0] is not None:
        return visited
    start = states.index(path.states[0])
    if isinstance(baseline, ResidualStates):
        base = baseline.resid[baseline.index(path.states[0])]
        base = base[rows] if len(base) == n_rows else base
    elif isinstance(baseline, Tensor):
        base = baseline[rows] if baseline.ndim == 3 and len(baseline) == n_rows else baseline
    elif baseline == "zero":
        base = torch.zeros_like(visited[0])
    else:
        base = (states.mean if baseline == "mean" else states.first)[start][:, None]
    try:
        base = base.to(visited).expand_as(visited[0])
    except RuntimeError:
        rule = f"broadcastable to [batch, pos, d_model]={list(visited[0].shape)}"
        fail("baseline", rule, f"shape {list(base.shape)}", "collect it at the same positions")
    if not bool(torch.isfinite(base[states.present.to(base.device)]).all()):
        name = baseline if isinstance(baseline, str) else type(baseline).__name__
        todo = "look at the states it is made of"
        fail("baseline", "finite at every analysed position", f"NaN or infinity in {name!r}", todo, NonFiniteStateError)
    return torch.cat([base[None], visited])


def _check_baseline(baseline: Any, path: Path) -> None:
    if isinstance(baseline, str):
        check_choice("baseline", baseline, BASELINES)
    elif not isinstance(baseline, ResidualStates) and not (isinstance(baseline, Tensor) and baseline.is_floating_point()):
        todo = f"choose from {', '.join(BASELINES)}, a tensor [batch, pos, d_model] or collect_states(...)"
        fail("baseline", "a name, a floating-point tensor or ResidualStates", type(baseline).__name__, todo, TypeError)


def _check_states(states: Any, input: Any, attention_mask: Any, fwd_hooks: Hooks, path: Path) -> None:
    if not isinstance(states, ResidualStates):
        fail("states", "ResidualStates", type(states).__name__, "make them with collect_states(model, input)", TypeError)
    if input is not None or attention_mask is not None or len(fwd_hooks):
        fail("input", "None where states is given", "both", "states already hold their prompt, mask and interventions")
    if states.n_layers != path.n_layers:
        fail("states", f"of a model with {path.n_layers} layers", states.n_layers, "collect them with this model")


def _check_credits(credits: SegmentCredits, path: Path, quantity: str) -> None:
    """Finite states may still have an infinite logit, or a token of probability 0: never a blank in a figure."""
    for values, names in ((credits.levels, path.point_labels), (credits.attribution, path.labels)):
        bad = (~torch.isfinite(values)).any(-1).nonzero()[:, 0].tolist()
        if bad:
            todo = "use quantity='prob', or load the model in a wider dtype"
            fail("quantity", "finite along the path", f"a {quantity} that is not at {names[bad[0]]}", todo, NonFiniteStateError)


def _check_readout(level: Tensor, model_level: Tensor, quantity: str, readout: Readout) -> None:
    """The last level is the model's own output: the one guard that sees a wrong norm, head or transform."""
    tolerance = readout.tolerance(readout.dtype) * (1 if quantity == "prob" else 10)
    gap = (level.cpu() - model_level.cpu()).abs()
    bad = ~(gap <= tolerance * (1 if quantity == "prob" else model_level.cpu().abs().clamp_min(1)))
    if bool(bad.any()):
        worst = int(torch.nan_to_num(gap, nan=torch.inf).argmax())
        raise ReadoutMismatchError(
            f"model must be read by ln_final, unembed and its output transform alone, got {quantity} "
            f"{float(level[worst]):.6g} from the last residual state but {float(model_level[worst]):.6g} from the model's "
            f"own logits (tolerance {tolerance:.0e}); a hook or head this package does not know changes the output"
        )


def _target_strings(tokenizer: Any, objective: Objective) -> tuple[tuple[str, ...], ...]:
    def name(ids: list[int], signs: list[float]) -> str:
        wanted = [token_text(tokenizer, i) for i, s in zip(ids, signs, strict=True) if s > 0]
        against = [token_text(tokenizer, i) for i, s in zip(ids, signs, strict=True) if s < 0]
        text = wanted[0] if len(wanted) == 1 else "{" + ", ".join(wanted) + "}"
        return text if not against else f"{text} − {against[0] if len(against) == 1 else against}"

    cells = zip(objective.ids.tolist(), objective.sign.tolist(), strict=True)
    return tuple(tuple(name(i, s) for i, s in zip(ids, signs, strict=True)) for ids, signs in cells)


def run_info(
    model: Any,
    states: ResidualStates,
    path: Path,
    estimator: str,
    n_steps: int,
    baseline: Any,
    quantity: str,
    **more: Any,
) -> RunInfo:
    """Provenance of a result."""
    cfg = model.cfg
    if isinstance(baseline, str):
        start = baseline
    else:
        start = "states of another prompt" if isinstance(baseline, ResidualStates) else "tensor"
    notes: tuple[str, ...] = ("logits are defined up to the unembedding's centring",) if quantity == "logit" else ()
    bos, eos = (getattr(getattr(model, "tokenizer", None), f"{name}_token_id", None) for name in ("bos", "eos"))
    if bos is not None and bos == eos and any(int(ids[0]) == bos for ids in states.prompts.ids):
        notes += (f"prompts begin with id {bos}, the end of a text in place of a BOS",)
    return RunInfo(
        model=str(getattr(cfg, "model_name", None) or type(model).__name__),
        dtype=str(states.resid.dtype).removeprefix("torch."),
        transformer_lens=version("transformer-lens"),
        weight_processing=weight_processing(model),
        estimator=estimator,
        n_steps=n_steps,
        baseline=start,
        quantity=quantity,
        path=" ".join(path.point_labels),
        n_layers=path.n_layers,
        notes=notes,
        **more,
    )


def weight_processing(model: Any) -> str:
    """``raw``, ``compatibility mode``, or ``folded norm`` for a HookedTransformer whose gains were folded."""
    if getattr(model, "compatibility_mode", False):
        return "compatibility mode"
    norm = str(getattr(model.cfg, "normalization_type", None))
    return "folded norm" if norm.endswith("Pre") else "raw"


def _joined(parts: list[IGLensResult]) -> IGLensResult:
    """The rows of several micro-batches in one result; positions of shorter ones are filled."""
    if len(parts) == 1:
        return parts[0]
    names = ("attribution", "levels", "targets", "tokens", "attention_mask", "positions", "model_level", "step_attribution")
    tensors: dict[str, Any] = {}
    for name in names:
        values = [getattr(part, name) for part in parts]
        axis = {"attribution": 1, "levels": 1, "step_attribution": 2}.get(name, 0)
        tensors[name] = None if values[0] is None else torch.cat(values, axis)
    strings: dict[str, Any] = {
        name: tuple(row for part in parts for row in getattr(part, name)) for name in ("target_strings", "token_strings")
    }
    return replace(parts[0], **tensors, **strings)


