"""Residual states of one forward pass, at the asked positions only; the only module that adds reading hooks."""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ._checks import NonFiniteStateError, check_mid, check_model, check_positive, fail, unwrap
from ._types import Hooks, compute_dtype
from .output import ModelOutput, model_output, pick
from .path import Point
from .readout import MIB, Readout
from .tokens import NO_POSITION, Prompts, read_prompts, select_positions

# Full logits of the asked rows are taken from the forward pass itself up to this size; beyond it the model's
# own unembedding reads the collected states block by block.
_LOGITS_BUDGET = 64 * MIB
_TOKENS_PER_FORWARD = 8192  # prompts × context of one micro-batch, when batch_size is left to us


@dataclass(frozen=True)
class ResidualStates:
    """States of the residual stream at every collected point, detached copies in the model's dtype.

    One forward pass serves many analyses: pass it as ``states=`` to any public function, or as
    ``baseline=`` to use another prompt's states as the start of the path. A row whose stream or logits were not
    finite has no position.
    """

    resid: Float[Tensor, "point batch pos d_model"]
    points: tuple[Point, ...]
    mean: Float[Tensor, "point batch d_model"]  # over the row's real positions
    first: Float[Tensor, "point batch d_model"]  # at the row's first real position
    prompts: Prompts
    positions: Int[Tensor, "batch pos"]  # places in ``prompts.ids``, −1 where a shorter row has none
    output: ModelOutput
    n_layers: int
    extra: Mapping[str, Tensor] = field(default_factory=dict)  # other activations, [batch, pos, ...], by hook name

    @property
    def present(self) -> Bool[Tensor, "batch pos"]:
        """Which cells are analysed positions and not filling of shorter rows."""
        return self.positions >= 0

    @property
    def left_out(self) -> Bool[Tensor, "batch"]:
        """Rows that were not finite: none of their positions is ever analysed."""
        return self.output.log_z.isnan().all(1)

    @property
    def has_mid(self) -> bool:
        """Whether states between attention and MLP are among them."""
        return any(point.mid for point in self.points)

    def index(self, point: Point) -> int:
        """Where a point lies on the first axis of ``resid``; ValueError if it was not collected."""
        if point not in self.points:
            name = point.label(self.n_layers)
            fail("states", f"collected with the point {name}", "states without it", "collect again with incl_mid=True")
        return self.points.index(point)

    def at(self, cells: Int[Tensor, "batch pos"]) -> "ResidualStates":
        """The same states at other positions, ``cells`` ``[batch, pos]`` (−1: none), each of which was collected."""
        cells = cells.masked_fill(self.left_out[:, None], NO_POSITION)
        if torch.equal(cells, self.positions):
            return self
        found = (cells[:, :, None] == self.positions[:, None, :]) & (cells[:, :, None] >= 0)
        if not bool((found.any(-1) | (cells < 0)).all()):
            missing = sorted({int(c) for c in cells[(cells >= 0) & ~found.any(-1)]})
            todo = "collect them with collect_states(model, input, pos_slice=None)"
            fail("pos_slice", "positions that were collected", f"places {missing[:8]} that were not", todo)
        source = found.long().argmax(-1)
        rows = torch.arange(len(cells))[:, None]
        logits = self.output.logits
        output = ModelOutput(
            self.output.log_z[rows, source],
            self.output.top[rows, source],
            None if logits is None else logits[rows.to(logits.device), source.to(logits.device)],
            self.output.bare_head,
        )
        at = (rows.to(self.resid.device), source.to(self.resid.device))
        extra = {name: act[at] for name, act in self.extra.items()}
        return replace(self, resid=self.resid[:, at[0], at[1]], positions=cells, output=output, extra=extra)

    @classmethod
    def from_cache(
        cls,
        model: Any,
        cache: Any,
        tokens: Any,
        *,
        attention_mask: Any = None,
        pos_slice: Any = -1,
        incl_mid: bool = False,
        logits: Float[Tensor, "*batch ctx d_vocab"] | None = None,
    ) -> "ResidualStates":
        """States adopted from a TransformerLens ``ActivationCache`` of ``tokens``, without another forward.

        The model's own output is read from the cached last state by the model's own final norm and
        unembedding, or taken from ``logits`` of the same run where they are given.

        Args:
            cache: an ``ActivationCache`` with the stream's hook points (``hook_resid_mid`` too for ``incl_mid``).
            tokens: the ids of that run, ``[pos]`` or ``[batch, pos]``.
            attention_mask: of ids with pads, as the run had it.
            pos_slice, incl_mid: as for ``collect_states``.
        """
        model = unwrap(model)
        check_model(model)
        prompts = read_prompts(model, tokens, attention_mask)
        names = hook_names(model, incl_mid)
        acts = {}
        for point, name in names.items():
            twin = f"blocks.{point.block}.hook_resid_pre"
            found = name if name in cache else twin if twin in cache and not point.mid else None
            if found is None:
                todo = "cache resid_pre of block 0 and resid_post of every block"
                fail("cache", f"one that holds {name}", "one without it", todo)
            acts[point] = cache[found] if cache[found].ndim == 3 else cache[found][None]
            want = (*prompts.ids.shape, int(model.cfg.d_model))
            if tuple(acts[point].shape) != want:
                todo = "pass the tokens of the cached run, cached without pos_slice"
                fail("cache", f"of shape {want} at {found}, as tokens say", tuple(acts[point].shape), todo)
        reader = _Reader(tuple(names), prompts, select_positions(prompts, pos_slice), prompts)
        for point in names:
            reader.keep(point, acts[point])
        if logits is not None:
            reader.logits = reader.take(logits if logits.ndim == 3 else logits[None])
        states, faults = reader.states(model, Readout(model))
        _report(faults, reader.positions)
        return states


def collect_states(
    model: Any,
    input: Any,
    *,
    pos_slice: Any = -1,
    incl_mid: bool = False,
    attention_mask: Any = None,
    prepend_bos: bool | None = None,
    batch_size: int | None = None,
    fwd_hooks: Hooks = (),
    extra: Sequence[str] = (),
) -> ResidualStates:
    """Residual states and the model's own output at the asked positions, from one forward per micro-batch.

    Reads ``blocks.0.hook_resid_pre`` and ``hook_resid_post`` of every block (``hook_resid_mid`` too with
    ``incl_mid``). ``fwd_hooks`` run as in ``model.run_with_hooks`` and come before ours, so the states are
    those under the intervention. ``extra`` names further hook points to keep at the same positions. Prompts of
    different length are padded here and equal their solo runs. States are those of the stream, without a unit.

    Args:
        input: text, a list of texts, or ids ``[pos]`` / ``[batch, pos]``.
        pos_slice: TransformerLens ``Slice`` over the real tokens of each row; None for all of them.
        attention_mask, prepend_bos: a mask for ids with pads; whether text gets the tokenizer's BOS, None for the
            model's own default.
        batch_size: rows per forward; None lets the length of the prompts decide.

    A row with NaN or infinity at an asked position is left out with a warning that names its first layer and
    position. Raises NonFiniteStateError where no row is left, and RuntimeError for a hook that never fires.
    """
    model = unwrap(model)
    check_model(model)
    prompts = read_prompts(model, input, attention_mask, prepend_bos)
    positions = select_positions(prompts, pos_slice)
    return collect_prompts(model, prompts, positions, incl_mid, batch_size, fwd_hooks, extra)


def collect_prompts(
    model: Any,
    prompts: Prompts,
    positions: Int[Tensor, "batch pos"],
    incl_mid: bool = False,
    batch_size: int | None = None,
    fwd_hooks: Hooks = (),
    extra: Sequence[str] = (),
) -> ResidualStates:
    """``collect_states`` for prompts and positions that are already resolved."""
    return _joined(list(collect_each(model, prompts, positions, incl_mid, batch_size, fwd_hooks, extra)), prompts)


def collect_each(
    model: Any,
    prompts: Prompts,
    positions: Int[Tensor, "batch pos"],
    incl_mid: bool = False,
    batch_size: int | None = None,
    fwd_hooks: Hooks = (),
    extra: Sequence[str] = (),
) -> Iterator[ResidualStates]:
    """The states of one micro-batch of rows after the other; what was not finite is reported after the last."""
    readout = Readout(model)
    every: dict[int, _Fault] = {}
    for rows in micro_batches(prompts, batch_size):
        states, faults = _forward(model, readout, prompts, positions, rows, incl_mid, fwd_hooks, extra)
        every |= {rows.start + row: fault for row, fault in faults.items()}
        yield states
    _report(every, positions)


def micro_batches(prompts: Prompts, batch_size: int | None = None) -> Iterator[slice]:
    """Runs of rows for one forward pass each."""
    n_rows, width = prompts.ids.shape
    size = max(1, _TOKENS_PER_FORWARD // width) if batch_size is None else check_positive("batch_size", batch_size)
    for first in range(0, n_rows, size):
        yield slice(first, min(first + size, n_rows))


def hook_names(model: Any, incl_mid: bool) -> dict[Point, str]:
    """The hook point of every point of the stream, in order."""
    n_layers = int(model.cfg.n_layers)
    if incl_mid:
        check_mid(model)
    names = {Point(0): "blocks.0.hook_resid_pre"}
    for block in range(n_layers):
        if incl_mid:
            names[Point(block, mid=True)] = f"blocks.{block}.hook_resid_mid"
        names[Point(block + 1)] = f"blocks.{block}.hook_resid_post"
    return names


def run(model: Any, prompts: Prompts, fwd_hooks: Hooks) -> Any:
    """The model's logits for right-padded prompts, with hooks for the length of the call.

    Right pads cannot reach an earlier token of a causal model, so no mask is passed unless a real token is
    masked, or the model would infer one from the ids.
    """
    device = getattr(model.cfg, "device", None) or model.W_U.device
    options: dict[str, Any] = {}
    infers_mask = hasattr(model, "input_to_embed") and getattr(model.tokenizer, "padding_side", "right") == "left"
    if prompts.has_gaps or infers_mask:
        options["attention_mask"] = prompts.mask.long().to(device)
    with torch.no_grad(), model.hooks(fwd_hooks=list(fwd_hooks)):
        return model(prompts.ids.to(device), return_type="logits", **options)


def _forward(
    model: Any,
    readout: Readout,
    prompts: Prompts,
    positions: Tensor,
    rows: slice,
    incl_mid: bool,
    fwd_hooks: Hooks,
    extra: Sequence[str],
) -> "tuple[ResidualStates, dict[int, _Fault]]":
    part = Prompts(prompts.ids[rows], prompts.mask[rows])
    packed, moved = part.right_padded()
    places = torch.where(positions[rows] >= 0, positions[rows] - moved[:, None], NO_POSITION)
    names = hook_names(model, incl_mid)
    reader = _Reader(tuple(names), packed, places, part, positions[rows])

    def keep(point: Point) -> Any:
        return lambda act, hook: reader.keep(point, act)

    def keep_extra(name: str) -> Any:
        return lambda act, hook: reader.keep_extra(name, act)

    ours = [(name, keep(point)) for point, name in names.items()] + [(name, keep_extra(name)) for name in extra]
    fits = places.numel() <= readout.rows_of_logits(_LOGITS_BUDGET)
    last = places.argmax(1, keepdim=True)
    with only_rows(model.unembed, places if fits else places.gather(1, last)) as asked:
        logits = run(model, packed, [*fwd_hooks, *ours])
    reader.check_fired(names, extra)
    reader.logits, reader.logits_at = asked.rows_of(logits), None if fits else last
    return reader.states(model, readout)


class only_rows:
    """While open, the unembedding sees only the asked positions, so other logits are never computed."""

    def __init__(self, unembed: torch.nn.Module, places: Int[Tensor, "batch pos"]):
        self.unembed, self.places, self.cut = unembed, places.clamp_min(0), False

    def __enter__(self) -> "only_rows":
        self.handle = self.unembed.register_forward_pre_hook(self._cut)
        return self

    def __exit__(self, *error: Any) -> None:
        self.handle.remove()

    def _cut(self, module: torch.nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if not args or not isinstance(args[0], Tensor) or args[0].ndim != 3:
            return None
        self.cut = True
        return (pick(args[0], self.places), *args[1:])

    def rows_of(self, logits: Any) -> Float[Tensor, "batch pos d_vocab"]:
        """The model's logits at the asked positions, whether or not the cut took effect."""
        logits = logits[0] if isinstance(logits, tuple) else logits
        return logits.detach() if self.cut else pick(logits, self.places).detach()


class _Reader:
    """What the reading hooks of one forward leave behind."""

    def __init__(
        self,
        points: tuple[Point, ...],
        packed: Prompts,
        places: Tensor,
        prompts: Prompts,
        positions: Tensor | None = None,
    ):
        self.points, self.packed, self.prompts = points, packed, prompts
        self.places = places.clamp_min(0)
        self.positions = places if positions is None else positions
        self.kept: set[Point] = set()
        self.extra: dict[str, Tensor] = {}
        self.logits: Tensor | None = None
        self.logits_at: Tensor | None = None  # the columns of positions that logits has, None for all

    def take(self, act: Tensor) -> Tensor:
        return pick(act.detach(), self.places)

    def keep(self, point: Point, act: Any) -> None:
        """Copies of a state at the asked positions, its mean over real positions and its first one."""
        if isinstance(act, tuple):
            act = act[0]
        if not isinstance(act, Tensor) or act.ndim != 3:
            got = type(act).__name__ if not isinstance(act, Tensor) else f"shape {tuple(act.shape)}"
            fail("model", f"one whose stream at {point} is [batch, pos, d_model]", got, "its blocks are not supported")
        act = act.detach()
        mask = self.packed.mask.to(act.device)
        if not self.kept:  # one allocation for all points, not a stack of copies at the end
            rows, d_model = len(act), act.shape[-1]
            self.resid = act.new_empty(len(self.points), *self.places.shape, d_model)
            self.mean, self.first = (act.new_empty(len(self.points), rows, d_model) for _ in range(2))
        wider = torch.promote_types(self.resid.dtype, act.dtype)
        if wider != self.resid.dtype:  # a stream may leave the embedding in a narrower type than it goes on in
            self.resid, self.mean, self.first = (x.to(wider) for x in (self.resid, self.mean, self.first))
        i = self.points.index(point)
        weight = mask.to(compute_dtype(act.dtype)) / mask.sum(1, keepdim=True)
        self.resid[i] = self.take(act)
        self.mean[i] = torch.einsum("bp,bpd->bd", weight, act.to(weight.dtype).masked_fill(~mask[..., None], 0))
        self.first[i] = act[torch.arange(len(act)), mask.long().argmax(1)]
        self.kept.add(point)

    def keep_extra(self, name: str, act: Tensor) -> None:
        """A copy of another activation at the asked positions; its second axis is the position.

        One row that stands for all, as position embeddings have, becomes a row for each.
        """
        act = act[0] if isinstance(act, tuple) else act
        rows = len(self.places)
        self.extra[name] = self.take(act if len(act) == rows else act.expand(rows, *act.shape[1:]))

    def check_fired(self, names: Mapping[Point, str], extra: Sequence[str]) -> None:
        """RuntimeError that names the first hook that stayed silent: an old state must never stand in for it."""
        missing = [name for point, name in names.items() if point not in self.kept]
        missing += [name for name in extra if name not in self.extra]
        if missing:
            todo = "see model.hook_dict for the names it has"
            fail("model", f"one whose hook {missing[0]} fires", "a forward in which it did not", todo, RuntimeError)

    def states(self, model: Any, readout: Readout) -> "tuple[ResidualStates, dict[int, _Fault]]":
        """What was read, and the rows that have no position because something in them was not finite."""
        resid, mean, first = (x.to(readout.device) for x in (self.resid, self.mean, self.first))
        n_layers = int(model.cfg.n_layers)
        dtype = str(resid.dtype).removeprefix("torch.")
        names = [point.label(n_layers) for point in self.points]
        faults = _faults(torch.isfinite(resid).all(-1).cpu(), self.positions, names, dtype)
        positions = _without(self.positions, faults)
        output = model_output(readout, resid[-1], positions, self.logits, self.logits_at, _LOGITS_BUDGET)
        faults |= _faults(output.log_z.isfinite()[None], positions, ["logits"], dtype)
        output.log_z[list(faults)] = torch.nan
        extra = {name: act.to(readout.device) for name, act in self.extra.items()}
        positions = _without(positions, faults)
        states = ResidualStates(resid, self.points, mean, first, self.prompts, positions, output, n_layers, extra)
        return states, faults


@dataclass(frozen=True)
class _Fault:
    """Where a row first is not finite."""

    point: str
    position: int
    dtype: str


def _faults(
    finite: Bool[Tensor, "point batch pos"], positions: Int[Tensor, "batch pos"], points: Sequence[str], dtype: str
) -> dict[int, _Fault]:
    """The first fault of every row that has one at an asked position."""
    found: dict[int, _Fault] = {}
    for point, row, pos in (~finite & (positions >= 0)).nonzero().tolist():
        found.setdefault(row, _Fault(points[point], int(positions[row, pos]), dtype))
    return found


def _without(positions: Int[Tensor, "batch pos"], rows: Mapping[int, Any]) -> Int[Tensor, "batch pos"]:
    positions = positions.clone()
    positions[list(rows)] = NO_POSITION
    return positions


def _report(faults: Mapping[int, _Fault], positions: Int[Tensor, "batch pos"]) -> None:
    """A warning for every row that was left out, or NonFiniteStateError where no row is left."""
    none_left = len(faults) == int((positions >= 0).any(1).sum())
    fate = "" if none_left else "that row is left out of the result and the others stand, "
    for row, fault in sorted(faults.items()):
        message = (
            f"model must be finite on the residual stream, got NaN or infinity at {fault.point}, row {row}, position "
            f"{fault.position} ({fault.dtype}); {fate}look at that layer, or load the model in a wider dtype"
        )
        if none_left:
            raise NonFiniteStateError(message)
        warnings.warn(message, stacklevel=4)


def model_level_logits(
    readout: Readout, states: ResidualStates, ids: Int[Tensor, "batch pos id"]
) -> Float[Tensor, "batch pos id"]:
    """The model's own logits of some tokens at every cell, float64."""
    if states.output.logits is not None:
        logits = states.output.logits
        return logits.gather(-1, ids.to(logits.device)).double().cpu()
    final = states.resid[-1].reshape(-1, states.resid.shape[-1])
    flat, found = ids.reshape(-1, ids.shape[-1]), []
    for block, chosen in zip(*(t.split(readout.rows_of_logits(_LOGITS_BUDGET)) for t in (final, flat)), strict=True):
        found.append(readout.model_logits(block).gather(-1, chosen.to(readout.device)).double().cpu())
    return torch.cat(found).reshape(ids.shape)


def _joined(parts: Sequence[ResidualStates], prompts: Prompts) -> ResidualStates:
    if len(parts) == 1:
        return parts[0]
    logits = [part.output.logits for part in parts if part.output.logits is not None]
    kept = len(logits) == len(parts) and sum(part.nbytes for part in logits) <= _LOGITS_BUDGET
    output = ModelOutput(
        torch.cat([part.output.log_z for part in parts]),
        torch.cat([part.output.top for part in parts]),
        torch.cat(logits) if kept else None,
        any(part.output.bare_head for part in parts),
    )
    return replace(
        parts[0],
        resid=torch.cat([part.resid for part in parts], 1),
        mean=torch.cat([part.mean for part in parts], 1),
        first=torch.cat([part.first for part in parts], 1),
        prompts=prompts,
        positions=torch.cat([part.positions for part in parts]),
        output=output,
        extra={name: torch.cat([part.extra[name] for part in parts]) for name in parts[0].extra},
    )
