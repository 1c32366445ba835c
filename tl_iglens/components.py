"""direct_probability_attribution: which heads, MLPs, neurons or features make the probability?

Within a segment a → b of a path the displacement is the sum of what the components wrote, b − a = Σ_c δ_c, so
the integrated gradient of f along it splits exactly:

    credit_c = ∫₀¹ ∇f(a + α (b − a))·δ_c dα,      Σ_c credit_c = f(b) − f(a).

It is the Aumann–Shapley value of the components in the segment, and to direct logit attribution what IG-Lens
is to the logit lens (arXiv 2606.29693, section 3). The integral is a quadrature; what it misses of the change
of f that was observed, step by step (after IDGI, Yang et al. 2023), is shared out in proportion to |∇f·δ_c|
and reported as ``quadrature_error``.
"""

import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from tqdm.auto import tqdm

from ._checks import check_choice, check_model, check_positive, fail, unwrap
from ._types import QUANTITIES, Hooks
from .adaptive import FIRST_STEPS, StepGradients, step_gradients
from .collect import ResidualStates, model_level_logits
from .component_result import OTHER, ComponentResult, Credits, Rows, Table, largest, reduced
from .lens import (
    _check_baseline,
    _check_readout,
    _check_states,
    _path_states,
    _target_strings,
    read_path,
    run_info,
)
from .path import BASE_LABEL, Path, Point, resolve_path
from .quantity import Objective
from .readout import Readout
from .result import RunInfo
from .tokens import is_next, next_tokens, read_prompts, resolve_objective, select_positions, token_text
from .windows import Window, WindowReader
from .writers import UNITS, Writer, Written, block_writers, component_hooks, embed_hooks

PATHS = ("layers", "straight")
_SHARES_AT_ONCE = 2**21  # components × steps whose shares exist at the same time


@torch.no_grad()
def direct_probability_attribution(
    model: Any,
    input: Any = None,
    *,
    targets: Any = None,
    incorrect_targets: Any = None,
    unit: str = "component",
    pos_slice: Any = -1,
    path: str = "layers",
    n_nodes: int = 8,
    components: Any = None,
    top_k: int | None = None,
    layers: Any = None,
    baseline: Any = "embed",
    quantity: str = "prob",
    attention_mask: Any = None,
    prepend_bos: bool | None = None,
    states: ResidualStates | None = None,
    batch_size: int | None = None,
    tile_bytes: int | None = None,
    head: str = "model",
    progress: bool = False,
    fwd_hooks: Hooks = (),
) -> ComponentResult:
    """One signed credit per component; the credits sum to the change of the quantity along the path.

    Two paths, two questions:

    * ``"layers"`` goes through the state of every layer. The components of a block share that block's
      credit, so the rows refine ``ig_lens``: what did a component change at the place where it wrote?
    * ``"straight"`` is one line from baseline to final state, along which all components grow together: the
      probability counterpart of direct logit attribution. How much of Δp goes with a component's direction?

    They disagree where writing and reading out are apart: a head that wrote the answer's direction early,
    while f was still flat, gets little on ``layers``, where whatever lifts f later collects it, and much on
    ``straight``.

    Args:
        model, input, targets, incorrect_targets, pos_slice, layers, baseline, quantity, attention_mask,
            prepend_bos, states, batch_size, tile_bytes, head, progress, fwd_hooks: as for ``ig_lens``.
        unit: ``"component"`` (rows ``3_attn_out``, ``3_mlp_out``), ``"head"`` (``L3H7``, ``3_attn_bias``,
            ``3_mlp_out``) or ``"neuron"`` (``3_attn_out``, ``L3N1234``, ``3_mlp_bias``). A baseline but
            ``"embed"`` adds ``embed``, ``pos_embed`` where it is separate, and ``base``, the state that the
            baseline takes away.
        path: ``"layers"`` or ``"straight"``.
        n_nodes: gradients per step where f moves, fewer where it is flat. A cell takes at most 2 ``n_nodes``
            × blocks (at least 4) in all, most of them where f moves. The sum is exact at any number.
        components: directions of your own instead of ``unit``, each a tensor broadcastable to ``[batch, pos,
            d_model]`` as it is added to the stream, such as an autoencoder's activation × decoder row. On
            ``"layers"`` a label begins with its block, ``L3F12`` or ``3_feature``, and the direction is part
            of that segment. What they leave is the row ``3_other``, or ``other`` on ``"straight"``.
        top_k: keep the components with the largest Σ |credit| over the analysed cells; all others of a block
            are one row ``3_other``. Where the cells do not fit in memory together, the path is read twice.

    Returns: a :class:`ComponentResult` with tensors ``[component, batch, pos]`` on the CPU.

    Raises: what ``ig_lens`` raises; ValueError for a unit the model's blocks do not have, or whose outputs do
    not add up to what the block wrote (relative 1e-4).
    """
    check_choice("unit", unit, UNITS)
    check_choice("path", path, PATHS)
    check_choice("quantity", quantity, QUANTITIES)
    check_positive("n_nodes", n_nodes)
    if top_k is not None:
        check_positive("top_k", top_k)
    model = unwrap(model)
    check_model(model)
    from_embed = isinstance(baseline, str) and baseline == "embed"
    route = resolve_path(int(model.cfg.n_layers), layers, from_embed=from_embed)
    _check_baseline(baseline, route)
    _warn_origin(baseline)
    hooks = () if components is not None else component_hooks(model, unit)
    if components is None and not from_embed:
        hooks += embed_hooks(model)
    readout = Readout(model, tile_bytes, head)
    if states is not None:
        _check_states(states, input, attention_mask, fwd_hooks, route)
        prompts = states.prompts
        as_collected = pos_slice == -1 and states.positions.shape[1] == 1
        positions = states.positions if as_collected else select_positions(prompts, pos_slice)
    else:
        prompts = read_prompts(model, input, attention_mask, prepend_bos)
        positions = select_positions(prompts, pos_slice)
    if is_next(targets):
        positions, targets = next_tokens(prompts, positions)
    shape = (int(positions.shape[0]), int(positions.shape[1]))
    ids = torch.zeros(shape, dtype=torch.long) if targets is None else targets
    objective = resolve_objective(model, readout.d_vocab, ids, incorrect_targets, quantity, shape)
    given = _directions(components, path, route, (*shape, readout.d_model))
    own_top = targets is None
    asked = ComponentQuestion(model, readout, objective, own_top, unit, given, route, path, baseline, n_nodes)
    reader = WindowReader(model, prompts, positions, states, hooks, fwd_hooks, batch_size)
    return asked.answer(reader, top_k, progress)


@dataclass
class ComponentQuestion:
    """One question, asked of the cells of each window in turn."""

    model: Any
    readout: Readout
    objective: Objective  # [batch, pos]
    own_top: bool  # the target is the model's own top token
    unit: str
    given: dict[str, Tensor] | None  # the caller's directions, each [batch, pos, d_model]
    route: Path  # through the layers, whichever path is read
    path: str
    baseline: Any
    n_nodes: int

    @property
    def line(self) -> Path:
        """The path that is read: the route itself, or the straight line between its ends."""
        if self.path == "layers":
            return self.route
        n_layers = self.route.n_layers
        return resolve_path(n_layers, [n_layers], from_embed=self.route.points[0] is not None)

    def answer(self, reader: WindowReader, top_k: int | None, progress: bool) -> ComponentResult:
        windows = list(reader.windows(self._cell_bytes()))
        kept = None
        if top_k is not None and len(windows) > 1:  # which rows stay is known only when all cells were seen
            size = sum(self._credits(reader, window).credit.abs().sum(1) for window in windows)
            kept = largest(torch.as_tensor(size), top_k)
        table: Table | None = None
        for window in tqdm(windows, desc="components", unit="window", disable=not progress):
            found = self._credits(reader, window)
            if top_k is not None:
                found = reduced(found, largest(found.credit.abs().sum(1), top_k) if kept is None else kept)
            table = Table.empty(found, self.objective.ids) if table is None else table
            table.fill(window, found)
        assert table is not None
        return self._result(table, reader)

    def _cell_bytes(self) -> int:
        """Component outputs and credits of one cell."""
        d_model, n_blocks = self.readout.d_model, len(self.model.blocks)
        if self.given is not None:
            return 8 * d_model * (len(self.given) + n_blocks)
        cfg, width, n_rows = self.model.cfg, 0, 2
        if self.unit == "head":
            width, n_rows = int(cfg.n_heads * cfg.d_head), int(cfg.n_heads) + 2
        elif self.unit == "neuron":
            width = int(getattr(cfg, "d_mlp", None) or 4 * d_model)
            n_rows = width + 2
        return n_blocks * ((2 * d_model + width) * self.readout.dtype.itemsize + 8 * n_rows)

    def _credits(self, reader: WindowReader, window: Window) -> Credits:
        """Credits of the components of every segment, for the cells of one window."""
        states = reader.read(window)
        if states.output.bare_head:
            self.readout.use_bare_head()
        objective, present = self._objective(states, window), states.present
        flat = Objective(objective.quantity, objective.ids[present], objective.sign[present])
        via = _path_states(states, self.route, self._base(window), slice(None))
        via = via[:, present.to(via.device)]  # [point, cell, d_model]
        levels = read_path(self.readout, via, flat).levels  # the rows ig_lens reads, so both agree to the bit
        points = via
        if self.path == "straight":
            points, levels = via[[0, -1]], levels[[0, -1]]
        own = model_level_logits(self.readout, states, objective.ids)
        model_level = objective.value(own, states.output.log_z)
        if self.readout.work_dtype == self.readout.dtype:  # a lifted head reports its gap instead
            _check_readout(levels[-1], model_level[present], objective.quantity, self.readout)
        writers = [list(group) for group in self._writers(states, points, window)]
        info = self._info(states)
        del states, via  # the writers hold what is needed of them
        spread = _Spread([[writer for _, writer in group] for group in writers], points.diff(dim=0))
        for steps in step_gradients(
            lambda h, cell: self.readout.value(h, _of_rows(flat, cell)),
            lambda h, cell: self.readout.value_and_grad(h, _of_rows(flat, cell)),
            points,
            levels.to(points.device),
            n_nodes=self.n_nodes,
            max_rows=2 * self.n_nodes * max(self.route.n_layers, FIRST_STEPS),
        ):
            spread.add(steps)
        found = (spread.credit, spread.error, spread.n_rows, levels, model_level[present])
        return Credits(_rows(writers), *found, objective.ids, present, info)

    def _objective(self, states: ResidualStates, window: Window) -> Objective:
        ids = self.objective.ids[window.rows, window.columns].clone()
        if self.own_top:
            ids[..., 0] = states.output.top
        return Objective(self.objective.quantity, ids, self.objective.sign[window.rows, window.columns])

    def _base(self, window: Window) -> Any:
        """A baseline of states for the cells of a window; a name stays a name."""
        base = self.baseline
        if isinstance(base, str):
            return base
        if isinstance(base, ResidualStates):
            base = base.resid[base.index(self.route.states[0])]
        shape = (*self.objective.ids.shape[:2], self.readout.d_model)
        return _broadcast("baseline", base, shape, "")[window.rows, window.columns]

    def _writers(
        self, states: ResidualStates, points: Tensor, window: Window
    ) -> Iterator[Iterator[tuple[int, Writer]]]:
        """The components of every segment of the line, each with the boundary after it."""
        ends = zip(self.line.points, self.line.points[1:], strict=False)
        for segment, (start, end) in enumerate(ends):
            assert end is not None
            if self.given is not None:
                delta = points[segment + 1] - points[segment]
                yield self._given_writers(self.line.labels[segment], end.block, delta, states, window)
            else:
                base = points[0] if start is None else None
                yield self._unit_writers(states, base, 0 if start is None else start.block, end.block)

    def _unit_writers(
        self, states: ResidualStates, base: Tensor | None, first: int, last: int
    ) -> Iterator[tuple[int, Writer]]:
        """The components of blocks ``first`` to ``last`` − 1, after the embedding if a baseline precedes."""
        present = states.present.to(states.resid.device)
        whole = bool(present.all())
        extra = {n: act.flatten(0, 1) if whole else act[present] for n, act in states.extra.items()}
        resid = [states.resid[states.index(Point(b))][present] for b in range(first, last + 1)]
        if base is not None:
            yield 0, _embedding(resid[0], extra.get("hook_embed"), extra.get("hook_pos_embed"))
            if bool(base.any()):
                yield 0, Written((BASE_LABEL,), -base[None])
        for b in range(first, last):
            before, after = resid[b - first], resid[b - first + 1]
            for writer in block_writers(self.model, b, self.unit, extra, before, after):
                yield b + 1, writer

    def _given_writers(
        self, segment: str, boundary: int, delta: Tensor, states: ResidualStates, window: Window
    ) -> Iterator[tuple[int, Writer]]:
        """The caller's directions in a segment and what they leave of it, or the segment itself."""
        assert self.given is not None
        straight = self.path == "straight"
        here = [n for n in self.given if straight or _segment_of(n, self.route) == segment]
        if not here:
            yield boundary, Written((segment,), delta[None])
            return
        cells = [self.given[n][window.rows, window.columns][states.present] for n in here]
        written = torch.stack(cells).to(delta)
        rest = OTHER if straight else f"{segment.rpartition('_')[0]}_{OTHER}"
        yield boundary, Written((*here, rest), torch.cat([written, (delta - written.sum(0))[None]]))

    def _info(self, states: ResidualStates) -> RunInfo:
        quantity, line = self.objective.quantity, self.line
        info = run_info(self.model, states, line, "prediction_aware", self.n_nodes, self.baseline, quantity)
        kind = self.unit if self.given is None else "components"
        notes = (*info.notes, f"unit={kind}", f"path={self.path}")
        return replace(info, analysis="direct_probability_attribution", notes=notes)

    def _result(self, table: Table, reader: WindowReader) -> ComponentResult:
        tokenizer, prompts = getattr(self.model, "tokenizer", None), reader.prompts
        objective = Objective(self.objective.quantity, table.ids, self.objective.sign)
        return ComponentResult(
            attribution=table.credit,
            levels=table.levels,
            labels=table.rows.labels,
            point_labels=self.line.point_labels,
            boundaries=table.rows.boundaries,
            targets=table.ids[..., 0],
            target_strings=_target_strings(tokenizer, objective),
            tokens=prompts.ids,
            token_strings=tuple(tuple(token_text(tokenizer, i) for i in row) for row in prompts.ids.tolist()),
            attention_mask=prompts.mask,
            positions=reader.positions,
            model_level=table.model_level,
            info=table.info,
            segment_of=table.rows.segments,
            quadrature_error=table.error,
            n_rows=table.n_rows,
        )


class _Spread:
    """Credits of the components, from the gradients of steps as they come."""

    def __init__(self, writers: list[list[Writer]], displacement: Float[Tensor, "segment cell d_model"]):
        self.writers, self.displacement = writers, displacement
        n_cells, device = displacement.shape[1], displacement.device
        self.sizes = [sum(len(writer.labels) for writer in group) for group in writers]
        self.credit = torch.zeros(sum(self.sizes), n_cells, dtype=torch.float64, device=device)
        self.error = torch.zeros(len(writers), n_cells, dtype=torch.float64, device=device)
        self.n_rows = torch.zeros(n_cells, dtype=torch.long, device=device)

    def add(self, steps: StepGradients) -> None:
        self.n_rows = steps.spent
        for segment, credit in enumerate(self.credit.split(self.sizes)):
            own = (steps.segment == segment).nonzero()[:, 0]
            for part in own.split(max(1, _SHARES_AT_ONCE // len(credit))):
                cell, change = steps.cell[part], steps.change[part]
                shares = self._shares(segment, steps.gradient[part], cell)
                miss = change - shares.sum(0, dtype=torch.float64)  # Δf − Σ_c ∇f·δ_c
                weight = self._weight(segment, shares, cell)
                credit.index_add_(1, cell, shares.double() + weight * miss)
                self.error[segment].index_add_(0, cell, miss.abs())

    def _shares(self, segment: int, gradient: Tensor, cell: Tensor) -> Float[Tensor, "component step"]:
        """⟨∫ ∇f dα, δ_c⟩ of every component of a segment."""
        return torch.cat([writer.share(gradient, cell) for writer in self.writers[segment]])

    def _weight(self, segment: int, shares: Tensor, cell: Tensor) -> Float[Tensor, "component step"]:
        """|∇f·δ_c| as parts of one, never of a signed sum, which can vanish.

        Where no gradient was found though f moved, how far each component goes along the segment decides.
        """
        weight = shares.abs().double()
        flat = weight.sum(0) == 0
        if bool(flat.any()):
            along = self.displacement[segment, cell[flat]].to(shares.dtype)
            weight[:, flat] = self._shares(segment, along, cell[flat]).abs().double()
        return weight / weight.sum(0).clamp_min(torch.finfo(weight.dtype).tiny)


def _of_rows(objective: Objective, cell: Tensor) -> Objective:
    """The objective of each of some rows."""
    cell = cell.to(objective.ids.device)
    return Objective(objective.quantity, objective.ids[cell], objective.sign[cell])


def _rows(writers: list[list[tuple[int, Writer]]]) -> Rows:
    rows = [(label, end, s) for s, group in enumerate(writers) for end, w in group for label in w.labels]
    return Rows(*zip(*rows, strict=True))


def _embedding(state: Float[Tensor, "cell d_model"], token: Tensor | None, position: Tensor | None) -> Writer:
    """``embed`` and ``pos_embed`` where they add up to the state before block 0, else ``embed`` alone."""
    if token is None or position is None:
        return Written(("embed",), state[None])
    parts = torch.stack([token, position]).to(state)
    if bool(((parts.sum(0) - state).norm(dim=-1) > 1e-4 * state.norm(dim=-1)).any()):
        return Written(("embed",), state[None])
    return Written(("embed", "pos_embed"), parts)


# --- arguments ---------------------------------------------------------------------------------------------


def _warn_origin(baseline: Any) -> None:
    if isinstance(baseline, str):
        zero = baseline == "zero"
    else:
        zero = isinstance(baseline, Tensor) and not bool(baseline.any())
    if zero:
        warnings.warn(
            "baseline is the origin, where a readout behind a norm jumps: the first step of the path holds all of that "
            "jump, and quadrature_error says how well it was resolved; 'embed' and 'mean' start from a real state",
            stacklevel=4,
        )


def _segment_of(label: str, route: Path) -> str | None:
    """The segment of the block a label begins with: ``L3F12`` and ``3_feature`` are of block 3."""
    found = re.match(r"L?(\d+)(?=\D)", label)
    ends = zip(route.labels, route.boundaries, strict=True)
    return None if found is None else next((name for name, last in ends if last > int(found[1])), None)


def _directions(
    components: Any, path: str, route: Path, shape: tuple[int, int, int]
) -> dict[str, Tensor] | None:
    """The caller's directions, each [batch, pos, d_model], checked."""
    if components is None:
        return None
    if not isinstance(components, Mapping) or not components:
        todo = "for example {'L3F12': activation * decoder_row}"
        fail("components", "a mapping from labels to tensors", repr(components), todo, TypeError)
    directions = {}
    for name, tensor in components.items():
        label = str(name)
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            got = f"{type(tensor).__name__} for {label!r}"
            fail("components", "floating-point tensors [..., d_model]", got, "use torch.as_tensor", TypeError)
        if path == "layers" and _segment_of(label, route) is None:
            rule, todo = (
                "labelled with their block on path='layers'",
                "write L3F12 or 3_name, or use path='straight'",
            )
            fail("components", rule, repr(label), todo)
        directions[label] = _broadcast("components", tensor.detach(), shape, f" for {label!r}")
    return directions


def _broadcast(argument: str, tensor: Tensor, shape: tuple[int, ...], where: str) -> Tensor:
    try:
        return tensor.expand(shape)
    except RuntimeError:
        rule = f"broadcastable to [batch, pos, d_model]={list(shape)}"
        fail(argument, rule, f"shape {list(tensor.shape)}{where}", "take it at the analysed positions")
