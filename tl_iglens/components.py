"""direct_probability_attribution: which heads, MLPs, neurons or features make the probability?

Within a segment a → b of a path the displacement is the sum of what the components wrote, b − a = Σ_c δ_c, so
the integrated gradient of f along it splits exactly:

    credit_c = ∫₀¹ ∇f(a + α (b − a))·δ_c dα,      Σ_c credit_c = f(b) − f(a).

It is the Aumann–Shapley value of the components in the segment, and of direct logit attribution what IG-Lens is
of the logit lens (arXiv 2606.29693, section 3). The integral is a quadrature; what it misses of the change of f
that was observed, step by step (after IDGI, Yang et al. 2023), is shared out in proportion to |∇f·δ_c| and
reported as ``quadrature_error``.
"""

import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from tqdm.auto import tqdm

from ._checks import check_choice, check_model, check_positive, fail, unwrap
from ._types import QUANTITIES, Hooks, compute_dtype
from .adaptive import FIRST_STEPS, StepGradients, step_gradients
from .collect import ResidualStates, collect_prompts, micro_batches, model_level_logits
from .lens import _check_baseline, _check_readout, _check_states, _path_states, _target_strings, read_path, run_info
from .path import BASE_LABEL, Path, Point, resolve_path
from .quantity import Objective
from .readout import MIB, Readout
from .result import IGLensResult
from .tokens import Prompts, is_next, next_tokens, read_prompts, resolve_objective, select_positions, token_text
from .writers import UNITS, Writer, Written, block_writers, component_hooks, parts_of

PATHS = ("layers", "straight")
OTHER = "other"
_BUDGET = 64 * MIB  # component outputs and credits held at the same time
_SHARES_AT_ONCE = 2**21  # components × steps whose shares exist at the same time


@dataclass(frozen=True)
class ComponentResult(IGLensResult):
    """Signed credits of components, in units of ``info.quantity``: an ``IGLensResult`` whose rows are components.

    Row c belongs to segment ``segment_of[c]`` of the path, and the rows of a segment sum to the change of f over
    it; ``boundaries[c]`` is the boundary after the block the component is in.
    """

    segment_of: tuple[int, ...] = ()
    quadrature_error: Float[Tensor, "path_segment batch pos"] | None = None  # Σ over steps of |what the integral missed|
    n_rows: Int[Tensor, "batch pos"] | None = None  # gradients taken for each cell

    @property
    def segment_attribution(self) -> Float[Tensor, "path_segment batch pos"]:
        """The credits summed by segment: those of ``ig_lens`` on the same path."""
        total = self.attribution.new_zeros(len(self.levels) - 1, *self.attribution.shape[1:])
        return total.index_add(0, torch.tensor(self.segment_of), self.attribution)

    def _ends(self) -> tuple[Tensor, Tensor]:
        """Levels at both ends of the segment every row belongs to."""
        start = torch.tensor(self.segment_of)
        return self.levels[start], self.levels[start + 1]


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
    components: Mapping[str, Tensor] | None = None,
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

    * ``"layers"`` goes through the states of every layer. The components of a block share that block's credit,
      so the rows refine ``ig_lens``: what did the component change at the place where it wrote?
    * ``"straight"`` is one line from baseline to final state, along which all components grow together: the
      probability counterpart of direct logit attribution. How much of Δp goes with the component's direction?

    They disagree where writing and reading out are apart: a head that wrote the answer's direction early, while f
    was still flat, gets little on ``layers``, where whatever later lifts f collects it, and much on ``straight``.

    Args:
        model, input, targets, incorrect_targets, pos_slice, layers, baseline, quantity, attention_mask,
            prepend_bos, states, batch_size, tile_bytes, head, progress, fwd_hooks: as for ``ig_lens``.
        unit: ``"component"`` (``3_attn_out``, ``3_mlp_out``), ``"head"`` (``L3H7``, ``3_attn_bias``, ``3_mlp_out``) or
            ``"neuron"`` (``3_attn_out``, ``L3N1234``, ``3_mlp_bias``). A baseline other than ``"embed"`` adds ``embed``,
            ``pos_embed`` where the model has one, and ``base`` for the state that the baseline takes away.
        path: ``"layers"`` or ``"straight"``.
        n_nodes: gradients per step where f moves, fewer where it is flat; a cell takes at most ``n_nodes`` × blocks
            in all (× 8 in a smaller model), spent where f moves. The sum is exact at any number.
        components: directions of your own instead of ``unit``, each a tensor broadcastable to ``[batch, pos,
            d_model]`` as it is added to the stream, such as an autoencoder's activation × decoder row. On
            ``"layers"`` a label begins with its block, ``L3F12`` or ``3_feature``, and the direction is part of that
            segment. What they leave is the row ``3_other``, or ``other`` on ``"straight"``.
        top_k: keep the components with the largest Σ |credit| over the analysed cells; the others become one row
            ``3_other`` per block. Where the cells do not fit in memory at once, the path is read twice.

    Returns: a :class:`ComponentResult` with tensors ``[component, batch, pos]`` on the CPU.

    Raises: what ``ig_lens`` raises; ValueError for a unit the model's blocks do not have, or whose outputs do not
    add up to what the block wrote (relative 1e-4).
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
    hooks = () if components is not None else component_hooks(model, unit) + _embed_hooks(model, baseline)
    readout = Readout(model, tile_bytes, head)
    if states is not None:
        _check_states(states, input, attention_mask, fwd_hooks, route)
        prompts = states.prompts
        one = pos_slice == -1 and states.positions.shape[1] == 1
        positions = states.positions if one else select_positions(prompts, pos_slice)
    else:
        prompts = read_prompts(model, input, attention_mask, prepend_bos)
        positions = select_positions(prompts, pos_slice)
    ids = targets
    if is_next(targets):
        positions, ids = next_tokens(prompts, positions)
    shape = (int(positions.shape[0]), int(positions.shape[1]))
    placeholder = torch.zeros(shape, dtype=torch.long) if targets is None else ids
    objective = resolve_objective(model, readout.d_vocab, placeholder, incorrect_targets, quantity, shape)
    given = _directions(components, path, route, (*shape, readout.d_model))
    ask = _Ask(model, readout, prompts, positions, objective, targets is None, unit, given, route, path, n_nodes)
    reader = _Reader(model, prompts, positions, states, hooks, fwd_hooks, batch_size)
    return ask.answer(reader, baseline, top_k, progress)


# --- which cells are read at the same time ---------------------------------------------------------------


@dataclass(frozen=True)
class _Window:
    """Some rows and columns of the analysed cells."""

    rows: slice
    columns: slice

    def of(self, values: Tensor) -> Tensor:
        """The window of a tensor [..., batch, pos]."""
        return values[..., self.rows, self.columns]


@dataclass(frozen=True)
class _Reader:
    """States and component outputs of a window, from the states given or from a forward of its own."""

    model: Any
    prompts: Prompts
    positions: Int[Tensor, "batch pos"]
    states: ResidualStates | None
    hooks: tuple[str, ...]
    fwd_hooks: Hooks
    batch_size: int | None

    def windows(self, cell_bytes: int) -> Iterator[_Window]:
        """Runs of rows, or of columns of one row, whose cells fit in the budget."""
        width = int(self.positions.shape[1])
        fits = max(1, _BUDGET // max(cell_bytes, 1))
        for rows in micro_batches(self.prompts, self.batch_size):
            n_rows = max(1, min(rows.stop - rows.start, fits // width))
            for first in range(rows.start, rows.stop, n_rows):
                part = slice(first, min(first + n_rows, rows.stop))
                for column in range(0, width, min(width, fits)):
                    yield _Window(part, slice(column, min(column + fits, width)))

    def read(self, window: _Window) -> ResidualStates:
        cells = window.of(self.positions)
        if self.states is None:
            return self._forward(window, cells, self.fwd_hooks)
        states = self.states
        if window.rows != slice(0, len(self.positions)):
            states = _rows_of(states, window.rows)
        states = states.at(cells)
        missing = [name for name in self.hooks if name not in states.extra]
        if missing:
            states = replace(states, extra=self._forward(window, cells, ()).extra)
        return states

    def _forward(self, window: _Window, cells: Tensor, fwd_hooks: Hooks) -> ResidualStates:
        part = Prompts(self.prompts.ids[window.rows], self.prompts.mask[window.rows])
        return collect_prompts(self.model, part, cells, False, None, fwd_hooks, self.hooks)


def _rows_of(states: ResidualStates, rows: slice) -> ResidualStates:
    output = states.output
    return replace(
        states,
        resid=states.resid[:, rows],
        mean=states.mean[:, rows],
        first=states.first[:, rows],
        prompts=Prompts(states.prompts.ids[rows], states.prompts.mask[rows]),
        positions=states.positions[rows],
        output=replace(
            output,
            log_z=output.log_z[rows],
            top=output.top[rows],
            logits=None if output.logits is None else output.logits[rows],
        ),
        extra={name: act[rows] for name, act in states.extra.items()},
    )


# --- the answer ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Rows:
    """Labels, boundaries and segments of the rows of a result."""

    labels: tuple[str, ...]
    boundaries: tuple[int, ...]
    segments: tuple[int, ...]


@dataclass(frozen=True)
class _Credits:
    """What one window found; cells in one row."""

    rows: _Rows
    credit: Float[Tensor, "component cell"]
    levels: Float[Tensor, "point cell"]
    error: Float[Tensor, "segment cell"]
    n_rows: Int[Tensor, "cell"]
    objective: Objective  # [batch, pos]
    model_level: Float[Tensor, "batch pos"]
    states: ResidualStates


@dataclass
class _Ask:
    """One question, asked of the cells of each window in turn."""

    model: Any
    readout: Readout
    prompts: Prompts
    positions: Int[Tensor, "batch pos"]
    objective: Objective
    own_top: bool  # the target is the model's own top token
    unit: str
    given: dict[str, Tensor] | None
    route: Path  # through the layers, whichever path is asked
    path: str
    n_nodes: int

    @property
    def line(self) -> Path:
        """The path that is read: the route itself, or a straight line between its ends."""
        if self.path == "layers":
            return self.route
        return resolve_path(self.route.n_layers, [self.route.n_layers], from_embed=self.route.points[0] is not None)

    def answer(self, reader: _Reader, baseline: Any, top_k: int | None, progress: bool) -> ComponentResult:
        windows = list(reader.windows(self._cell_bytes()))
        kept = None
        if top_k is not None and len(windows) > 1:  # which rows stay is known only after all cells are seen
            size = sum(self._credits(reader, w, baseline).credit.abs().sum(1) for w in windows)
            kept = _largest(torch.as_tensor(size), top_k)
        table: _Table | None = None
        for window in tqdm(windows, desc="components", unit="window", disable=not progress):
            found = self._credits(reader, window, baseline)
            if top_k is not None:
                keep = _largest(found.credit.abs().sum(1), top_k) if kept is None else kept
                found = _reduced(found, keep)
            if table is None:
                table = _Table.empty(found, self.positions, self.objective)
            table.fill(window, found)
        assert table is not None
        return self._result(table, baseline)

    def _cell_bytes(self) -> int:
        """Component outputs and credits of one cell."""
        cfg, blocks = self.model.cfg, len(self.model.blocks)
        width = {"component": 0, "head": cfg.n_heads * cfg.d_head, "neuron": getattr(cfg, "d_mlp", None) or 0}[self.unit]
        n_rows = {"component": 2, "head": cfg.n_heads + 3, "neuron": width + 3}[self.unit]
        per_block = (2 * self.readout.d_model + width) * self.readout.dtype.itemsize + n_rows * 8
        if self.given is not None:
            return (len(self.given) + 1) * self.readout.d_model * 8
        return int(blocks * per_block)

    def _credits(self, reader: _Reader, window: _Window, baseline: Any) -> _Credits:
        states = reader.read(window)
        if states.output.bare_head:
            self.readout.use_bare_head()
        objective = self._objective(states, window)
        present = states.present
        flat = Objective(objective.quantity, objective.ids[present], objective.sign[present])
        via = _path_states(states, self.route, baseline, window.rows)[:, present.to(states.resid.device)]
        points = via if self.path == "layers" else via[[0, -1]]
        levels = read_path(self.readout, points, flat).levels
        model_level = objective.value(model_level_logits(self.readout, states, objective.ids), states.output.log_z)
        if self.readout.work_dtype == self.readout.dtype:  # a lifted head reports its gap instead
            _check_readout(levels[-1], model_level[present], objective.quantity, self.readout)
        writers = [list(group) for group in self._writers(states, via, window)]
        rows = _rows(writers, self.route.n_layers)
        spread = _Spread([[w for _, w in group] for group in writers], points.diff(dim=0))
        for steps in step_gradients(
            lambda h, cell: self.readout.value(h, _cells_of(flat, cell)),
            lambda h, cell: self.readout.value_and_grad(h, _cells_of(flat, cell)),
            points,
            levels.to(points.device),
            n_nodes=self.n_nodes,
            max_rows=self.n_nodes * max(self.route.n_layers, 2 * FIRST_STEPS),
        ):
            spread.add(steps)
        return _Credits(rows, spread.credit, levels, spread.error, spread.spent, objective, model_level, states)

    def _objective(self, states: ResidualStates, window: _Window) -> Objective:
        ids = self.objective.ids[window.rows, window.columns].clone()
        if self.own_top:
            ids[..., 0] = states.output.top
        return Objective(self.objective.quantity, ids, self.objective.sign[window.rows, window.columns])

    def _writers(
        self, states: ResidualStates, via: Tensor, window: _Window
    ) -> Iterator[Iterator[tuple[int, Writer]]]:
        """The components of every segment of the line that is read, with the boundary after each."""
        spans = list(zip(self.line.points, self.line.points[1:], strict=False))
        for index, (start, end) in enumerate(spans):
            assert end is not None
            if self.given is not None:
                delta = (via[index + 1] - via[index]) if self.path == "layers" else via[-1] - via[0]
                yield self._given_writers(self.line.labels[index], end.block, delta, states, window)
            else:
                base = via[0] if start is None else None
                yield self._block_writers(states, base, 0 if start is None else start.block, end.block)

    def _block_writers(
        self, states: ResidualStates, base: Tensor | None, first: int, last: int
    ) -> Iterator[tuple[int, Writer]]:
        present = states.present.to(states.resid.device)
        resid = states.resid[:, present]
        if base is not None:
            embed = resid[states.index(Point(0))]
            position = states.extra.get("hook_pos_embed")
            yield 0, _embedding(embed, states.extra.get("hook_embed"), position, present)
            if bool(base.any()):
                yield 0, Written((BASE_LABEL,), -base[None])
        for b in range(first, last):
            acts = {n: act[present.to(act.device)] for n, act in states.extra.items() if n.startswith(f"blocks.{b}.")}
            before, after = resid[states.index(Point(b))], resid[states.index(Point(b + 1))]
            for writer in block_writers(self.model, b, self.unit, acts, before, after):
                yield b + 1, writer

    def _given_writers(
        self, segment: str, boundary: int, delta: Tensor, states: ResidualStates, window: _Window
    ) -> Iterator[tuple[int, Writer]]:
        assert self.given is not None
        here = [label for label in self.given if self.path == "straight" or _segment_of(label, self.route) == segment]
        if not here:
            yield boundary, Written((segment,), delta[None])
            return
        written = torch.stack([self.given[n][window.rows, window.columns][states.present] for n in here]).to(delta)
        rest = OTHER if self.path == "straight" else f"{segment.rpartition('_')[0]}_{OTHER}"
        yield boundary, Written((*here, rest), torch.cat([written, (delta - written.sum(0))[None]]))

    def _result(self, table: "_Table", baseline: Any) -> ComponentResult:
        tokenizer, prompts, line = getattr(self.model, "tokenizer", None), self.prompts, self.line
        found = table.last
        info = run_info(
            self.model, found.states, line, "prediction_aware", self.n_nodes, baseline, self.objective.quantity
        )
        kind = "components" if self.given is not None else self.unit
        error = torch.nan_to_num(table.error).sum(0).max().item()
        notes = (
            f"unit={kind}",
            f"path={self.path}",
            f"quadrature error of a cell at most {error:.1e}, shared out among its components",
        )
        info = replace(info, analysis="direct_probability_attribution", notes=(*info.notes, *notes))
        objective = Objective(self.objective.quantity, table.ids, self.objective.sign)
        return ComponentResult(
            attribution=table.credit,
            levels=table.levels,
            labels=found.rows.labels,
            point_labels=line.point_labels,
            boundaries=found.rows.boundaries,
            targets=table.ids[..., 0],
            target_strings=_target_strings(tokenizer, objective),
            tokens=prompts.ids,
            token_strings=tuple(tuple(token_text(tokenizer, i) for i in row) for row in prompts.ids.tolist()),
            attention_mask=prompts.mask,
            positions=self.positions,
            model_level=table.model_level,
            info=info,
            segment_of=found.rows.segments,
            quadrature_error=table.error,
            n_rows=table.n_rows,
        )


class _Spread:
    """Credits of the components, from gradients of steps as they come."""

    def __init__(self, writers: list[list[Writer]], displacement: Float[Tensor, "segment cell d_model"]):
        self.writers, self.displacement = writers, displacement
        n_cells, device = displacement.shape[1], displacement.device
        self.sizes = [sum(len(w.labels) for w in group) for group in writers]
        self.credit = torch.zeros(sum(self.sizes), n_cells, dtype=torch.float64, device=device)
        self.error = torch.zeros(len(writers), n_cells, dtype=torch.float64, device=device)
        self.spent = torch.zeros(n_cells, dtype=torch.long, device=device)

    def add(self, steps: StepGradients) -> None:
        self.spent = steps.spent
        for segment, size in enumerate(self.sizes):
            first = sum(self.sizes[:segment])
            rows = self.credit[first : first + size]
            for part in (steps.segment == segment).nonzero()[:, 0].split(max(1, _SHARES_AT_ONCE // size)):
                cell, change = steps.cell[part], steps.change[part]
                shares = self._shares(segment, steps.gradient[part], cell)
                miss = change - shares.sum(0, dtype=torch.float64)  # Δf − Σ_c ∇f·δ_c
                weight = shares.abs()
                flat = weight.sum(0) == 0  # no gradient though f moved: by how far each lies along the way
                if bool(flat.any()):
                    along = self.displacement[segment, cell[flat]].to(steps.gradient.dtype)
                    weight[:, flat] = self._shares(segment, along, cell[flat]).abs()
                total = weight.sum(0, dtype=torch.float64)
                share = torch.where(total > 0, miss / total.clamp_min(torch.finfo(total.dtype).tiny), 0.0)
                rows.index_add_(1, cell, shares.double() + weight.double() * share)
                self.error[segment].index_add_(0, cell, miss.abs())

    def _shares(self, segment: int, gradient: Tensor, cell: Tensor) -> Float[Tensor, "component step"]:
        """⟨∫ ∇f dα, δ_c⟩ of every component of a segment."""
        return torch.cat([writer.share(gradient, cell) for writer in self.writers[segment]])


@dataclass
class _Table:
    """The tensors of a result, filled window by window; NaN where a shorter row has no position."""

    credit: Float[Tensor, "component batch pos"]
    levels: Float[Tensor, "point batch pos"]
    error: Float[Tensor, "segment batch pos"]
    n_rows: Int[Tensor, "batch pos"]
    model_level: Float[Tensor, "batch pos"]
    ids: Int[Tensor, "batch pos id"]
    last: _Credits

    @classmethod
    def empty(cls, found: _Credits, positions: Tensor, objective: Objective) -> "_Table":
        dtype, shape = compute_dtype(found.states.resid.dtype), positions.shape

        def blank(*lead: int) -> Tensor:
            return torch.full((*lead, *shape), torch.nan, dtype=dtype)

        return cls(
            blank(len(found.credit)),
            blank(len(found.levels)),
            blank(len(found.error)),
            torch.zeros(shape, dtype=torch.long),
            blank(),
            objective.ids.clone(),
            found,
        )

    def fill(self, window: _Window, found: _Credits) -> None:
        present = found.states.present
        pairs = (
            (self.credit, found.credit),
            (self.levels, found.levels),
            (self.error, found.error),
            (self.n_rows, found.n_rows),
            (self.model_level, found.model_level[present]),
        )
        for full, values in pairs:
            window.of(full)[..., present] = values.to(device="cpu", dtype=full.dtype)
        self.ids[window.rows, window.columns] = found.objective.ids
        self.last = found


def _cells_of(objective: Objective, cell: Tensor) -> Objective:
    """The objective of each of some rows."""
    cell = cell.to(objective.ids.device)
    return Objective(objective.quantity, objective.ids[cell], objective.sign[cell])


def _rows(writers: list[list[tuple[int, Writer]]], n_layers: int) -> _Rows:
    rows = [(label, end, s) for s, group in enumerate(writers) for end, w in group for label in w.labels]
    labels, boundaries, segments = zip(*rows, strict=True)
    return _Rows(labels, boundaries, segments)


def _largest(size: Float[Tensor, "component"], top_k: int) -> Int[Tensor, "component"]:
    """The rows with the largest |credit|, in their own order."""
    return size.topk(min(top_k, len(size))).indices.sort().values


def _reduced(found: _Credits, kept: Int[Tensor, "component"]) -> _Credits:
    """Only the kept rows, and one row per block for all others of it."""
    dropped = torch.ones(len(found.credit), dtype=torch.bool, device=found.credit.device)
    dropped[kept] = False
    blocks = list(zip(found.rows.segments, found.rows.boundaries, strict=True))
    place = {block: i for i, block in enumerate(dict.fromkeys(blocks))}
    group = torch.tensor([place[block] for block in blocks], device=dropped.device)
    others = found.credit.new_zeros(len(place), found.credit.shape[1]).index_add_(0, group[dropped], found.credit[dropped])
    has_others = torch.bincount(group[dropped], minlength=len(place)) > 0
    names, credit = [], []
    for (segment, end), i in place.items():
        for row in kept[group[kept] == i].tolist():
            names.append((found.rows.labels[row], end, segment))
            credit.append(found.credit[row])
        if bool(has_others[i]):
            names.append((f"{end - 1}_{OTHER}" if end else f"embed_{OTHER}", end, segment))
            credit.append(others[i])
    labels, boundaries, segments = zip(*names, strict=True)
    return replace(found, rows=_Rows(labels, boundaries, segments), credit=torch.stack(credit))


# --- arguments ---------------------------------------------------------------------------------------------


def _warn_origin(baseline: Any) -> None:
    zero = baseline == "zero" if isinstance(baseline, str) else isinstance(baseline, Tensor) and not bool(baseline.any())
    if zero:
        warnings.warn(
            "baseline is the origin, where a normed readout jumps: next to it the norm divides by nearly nothing, so the "
            "first steps of the path hold a change no quadrature resolves well; see quadrature_error",
            stacklevel=4,
        )


def _embed_hooks(model: Any, baseline: Any) -> tuple[str, ...]:
    """What the embedding is made of, where it is a row."""
    if isinstance(baseline, str) and baseline == "embed":
        return ()
    names = ("hook_embed", "hook_pos_embed")
    separate = "pos_embed" in getattr(model, "_modules", {})  # rotary models list the second hook and never fire it
    return names if separate and all(name in model.hook_dict for name in names) else ()


def _embedding(
    state: Float[Tensor, "cell d_model"], token: Tensor | None, position: Tensor | None, present: Tensor
) -> Writer:
    """``embed`` and ``pos_embed`` where they add up to the state that enters block 0, else ``embed`` alone."""
    if token is None or position is None:
        return Written(("embed",), state[None])
    parts = torch.stack([act.expand(*present.shape, -1)[present.to(act.device)] for act in (token, position)]).to(state)
    if bool(((parts.sum(0) - state).norm(dim=-1) > 1e-4 * state.norm(dim=-1)).any()):
        return Written(("embed",), state[None])
    return Written(("embed", "pos_embed"), parts)


def _segment_of(label: str, route: Path) -> str | None:
    """The segment of the block a label begins with: ``L3F12`` and ``3_feature`` are of block 3."""
    found = re.match(r"L?(\d+)(?=\D)", label)
    if found is None:
        return None
    end = int(found[1]) + 1
    return next((name for name, last in zip(route.labels, route.boundaries, strict=True) if last >= end), None)


def _directions(
    components: Mapping[str, Tensor] | None, path: str, route: Path, shape: tuple[int, int, int]
) -> dict[str, Tensor] | None:
    """The caller's directions, each [batch, pos, d_model], checked."""
    if components is None:
        return None
    if not isinstance(components, Mapping) or not components:
        todo = "for example {'L3F12': activation * decoder_row}"
        fail("components", "a mapping from labels to tensors", type(components).__name__, todo, TypeError)
    directions = {}
    for label, tensor in components.items():
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            got = f"{type(tensor).__name__} for {label!r}"
            fail("components", "floating-point tensors [..., d_model]", got, "convert it with torch.as_tensor", TypeError)
        try:
            directions[str(label)] = tensor.detach().expand(shape)
        except RuntimeError:
            rule = f"broadcastable to [batch, pos, d_model]={list(shape)}"
            fail("components", rule, f"{list(tensor.shape)} for {label!r}", "take it at the analysed positions")
        if path == "layers" and _segment_of(str(label), route) is None:
            todo = "rename it, or use path='straight'"
            fail("components", "labelled with their block on path='layers', like 'L3F12' or '3_name'", repr(label), todo)
    return directions
