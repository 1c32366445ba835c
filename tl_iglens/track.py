"""Several tokens at once, and where probability goes.

``track`` follows the levels and credits of several candidates through the layers from one stream over the vocabulary.
``probability_flow`` compares the two full distributions at the ends of every segment: which tokens gained, which lost,
and how much moved. Over the whole vocabulary the credits of a segment sum to zero, Σ_v [f_v(h_{j+1}) − f_v(h_j)] = 0,
so what the answer gained others lost.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor

from ._checks import check_choice, check_model, check_positive, fail, unwrap
from ._html import CELLS, earlier, largest, number, page, table
from ._types import QUANTITIES, Hooks, compute_dtype
from .collect import ResidualStates, collect_states, model_level_logits
from .estimators import segment_credits
from .lens import run_info
from .path import Path, resolve_path
from .quantity import Objective
from .readout import Readout, exp_
from .result import RunInfo, largest_gap
from .tokens import TokenSet, resolve_objective, token_text, visible
from .watchers import TopK, tiles

_ROWS = 1024  # states whose tiles of probabilities exist at the same time


def track(
    model: Any,
    input: Any = None,
    *,
    candidates: Any = None,
    top_k: int = 5,
    quantity: str = "prob",
    pos_slice: Any = -1,
    layers: Any = None,
    incl_mid: bool = False,
    attention_mask: Any = None,
    prepend_bos: bool | None = None,
    states: ResidualStates | None = None,
    batch_size: int | None = None,
    tile_bytes: int | None = None,
    head: str = "model",
    fwd_hooks: Hooks = (),
) -> "Tracks":
    """Levels and exact credits of several tokens at the same rows, ``[…, batch, pos, candidate]``.

    Args:
        candidates: tokens as text or id, or ``TokenSet``s, followed at every position; or an integer tensor
            ``[batch, pos, candidate]``. None follows the model's own ``top_k`` tokens of each position.
        quantity: ``"prob"``, ``"log_prob"`` or ``"logit"``. The rest as for ``ig_lens``, from the embedding on.

    Raises: ValueError or TypeError naming the argument.
    """
    check_choice("quantity", quantity, QUANTITIES)
    about = {"pos_slice": pos_slice, "attention_mask": attention_mask, "prepend_bos": prepend_bos}
    about |= {"batch_size": batch_size, "fwd_hooks": fwd_hooks}
    run = _Run.of(model, input, states, layers, incl_mid, (tile_bytes, head), **about)
    if candidates is None:
        candidates = run.top(check_positive("top_k", top_k))
    objectives = _objectives(run, candidates, quantity)
    widths = [objective.ids.shape[-1] for objective in objectives]
    ids = torch.cat([objective.ids for objective in objectives], -1)[run.present]

    def f(h: Float[Tensor, "node cell 1 d_model"], cells: slice) -> Float[Tensor, "node cell candidate"]:
        """All candidates at every state, from one pass over the vocabulary."""
        rows = rearrange(h, "node cell 1 d_model -> (node cell) d_model")
        wanted = ids[cells].expand(len(h), -1, -1).flatten(0, 1)
        scan = run.readout.scan(run.readout.normed(rows), wanted)
        z, log_z = scan.z.reshape(*h.shape[:2], -1), scan.log_z.reshape(h.shape[:2])
        each = zip(objectives, z.split(widths, -1), strict=True)
        return torch.stack([_flat(objective, run.present, cells).value(part, log_z) for objective, part in each], -1)

    parts = [segment_credits(lambda h, c=cells: f(h, c), points[:, :, None]) for cells, points in run.blocks(_ROWS * 4)]
    own = model_level_logits(run.readout, run.states, torch.cat([o.ids for o in objectives], -1))
    model_level = torch.stack(
        [o.value(z, run.states.output.log_z) for o, z in zip(objectives, own.split(widths, -1), strict=True)], -1
    )
    return Tracks(
        levels=run.cells(torch.cat([part.levels for part in parts], 1)),
        attribution=run.cells(torch.cat([part.attribution for part in parts], 1)),
        labels=run.path.labels,
        point_labels=run.path.point_labels,
        boundaries=run.path.boundaries,
        candidates=torch.stack([objective.ids[..., 0] for objective in objectives], -1),
        candidate_strings=_names(run, objectives),
        model_level=run.cells(model_level[run.present][None])[0],
        positions=run.states.positions,
        token_strings=run.token_strings(),
        info=run.info(quantity, "track"),
    )


def probability_flow(
    model: Any,
    input: Any = None,
    *,
    k: int = 5,
    pos_slice: Any = -1,
    layers: Any = None,
    incl_mid: bool = False,
    attention_mask: Any = None,
    prepend_bos: bool | None = None,
    states: ResidualStates | None = None,
    batch_size: int | None = None,
    tile_bytes: int | None = None,
    head: str = "model",
    fwd_hooks: Hooks = (),
) -> "ProbabilityFlow":
    """For every segment the ``k`` tokens that gained and that lost most probability, and how much moved in all.

    Two passes over the vocabulary: one for log Z of every point, one for the differences of the two distributions of
    every segment, a run of tokens at a time. Arguments as for ``ig_lens``, from the embedding on.
    Raises ValueError or TypeError naming the argument.
    """
    about = {"pos_slice": pos_slice, "attention_mask": attention_mask, "prepend_bos": prepend_bos}
    about |= {"batch_size": batch_size, "fwd_hooks": fwd_hooks}
    run = _Run.of(model, input, states, layers, incl_mid, (tile_bytes, head), **about)
    k = min(check_positive("k", k), run.readout.d_vocab)
    blocks = [_flow(run, points, k) for _, points in run.blocks(_ROWS)]
    gained, gained_ids, lost, lost_ids, moved, residue = (torch.cat(parts, 1) for parts in zip(*blocks, strict=True))
    ids = torch.cat([gained_ids, lost_ids])
    return ProbabilityFlow(
        gained=run.cells(gained),
        gained_ids=run.cells(gained_ids, -1),
        lost=run.cells(lost),
        lost_ids=run.cells(lost_ids, -1),
        total_variation=run.cells(moved),
        residue=run.cells(residue),
        labels=run.path.labels,
        boundaries=run.path.boundaries,
        positions=run.states.positions,
        token_strings=run.token_strings(),
        texts={i: token_text(run.tokenizer, i) for i in ids.unique().tolist()},
        info=run.info("prob", "probability_flow"),
    )


def _flow(run: "_Run", points: Float[Tensor, "point cell d_model"], k: int) -> tuple[Tensor, ...]:
    """Gains and losses of every segment of a few cells: amounts and tokens, their halved sum of sizes, their sum."""
    readout, n_segments, n_cells = run.readout, len(points) - 1, points.shape[1]
    x = readout.normed(rearrange(points, "point cell d_model -> (point cell) d_model"))
    log_z = readout.scan(x, torch.zeros(len(x), 1, dtype=torch.int64)).log_z
    still = (points[1:] == points[:-1]).all(-1).reshape(-1, 1)
    up = TopK(n_segments * n_cells, k, readout.device)
    down = TopK(n_segments * n_cells, k, readout.device, largest=False)
    moved, residue = torch.zeros(2, n_segments * n_cells, dtype=torch.float64, device=readout.device)
    for first, z in tiles(readout, x):
        p = exp_(z.sub_(log_z[:, None].to(z.dtype)))
        change = (p[n_cells:] - p[:-n_cells]).masked_fill_(still, 0)  # f_v(h_{j+1}) − f_v(h_j)
        up.see(change, slice(None), first)
        down.see(change, slice(None), first)
        moved += change.abs().sum(1).double() / 2
        residue += change.sum(1).double()
    found = (up.values, up.ids, down.values, down.ids, moved, residue)
    return tuple(rearrange(t, "(segment cell) ... -> segment cell ...", cell=n_cells) for t in found)


@dataclass(frozen=True)
class _Run:
    """States of one forward, read along one path."""

    model: Any
    readout: Readout
    states: ResidualStates
    path: Path

    @classmethod
    def of(
        cls, model: Any, input: Any, states: Any, layers: Any, incl_mid: bool, reading: tuple[Any, str], **about: Any
    ) -> "_Run":
        model = unwrap(model)
        check_model(model)
        path = resolve_path(int(model.cfg.n_layers), layers, incl_mid=incl_mid)
        if states is None:
            states = collect_states(model, input, incl_mid=incl_mid, **about)
        elif input is not None:
            fail("input", "None where states is given", "both", "states already hold their prompt")
        elif states.n_layers != path.n_layers:
            fail("states", f"of a model with {path.n_layers} layers", states.n_layers, "collect them with this model")
        readout = Readout(model, *reading)
        if states.output.bare_head:
            readout.use_bare_head()
        return cls(model, readout, states, path)

    @property
    def tokenizer(self) -> Any:
        return getattr(self.model, "tokenizer", None)

    @property
    def present(self) -> Tensor:
        return self.states.present

    def blocks(self, n_rows: int) -> Iterator[tuple[slice, Float[Tensor, "point cell d_model"]]]:
        """The states of the path, a run of cells of about ``n_rows`` states at a time."""
        index = [self.states.index(point) for point in self.path.states]
        resid = self.states.resid[:, self.present.to(self.states.resid.device)]
        size = max(1, n_rows // len(index))
        for first in range(0, resid.shape[1], size):
            cells = slice(first, min(first + size, resid.shape[1]))
            yield cells, resid[index, cells]

    def cells(self, values: Tensor, fill: float | int = torch.nan) -> Tensor:
        """Values [row, cell, ...] laid out as [row, batch, pos, ...] on the CPU, ``fill`` elsewhere."""
        dtype = compute_dtype(self.states.resid.dtype) if values.is_floating_point() else values.dtype
        full = torch.full((len(values), *self.present.shape, *values.shape[2:]), fill, dtype=dtype)
        full[:, self.present] = values.to(device="cpu", dtype=dtype)
        return full

    def top(self, k: int) -> Int[Tensor, "batch pos k"]:
        """The model's own most probable tokens at every cell, most probable first."""
        readout, k = self.readout, min(k, self.readout.d_vocab)
        final = readout.normed(self.states.resid[-1][self.present.to(self.states.resid.device)])
        top = TopK(len(final), k, readout.device)
        readout.scan(final, torch.zeros(len(final), 1, dtype=torch.int64), watchers=(top,))
        ids = torch.zeros(*self.present.shape, k, dtype=torch.int64)
        ids[self.present] = top.ids.cpu()
        return ids

    def info(self, quantity: str, analysis: str) -> RunInfo:
        return run_info(
            self.model, self.states, self.path, "prediction_aware", 1, "embed", quantity, analysis=analysis
        )

    def token_strings(self) -> tuple[tuple[str, ...], ...]:
        return tuple(tuple(token_text(self.tokenizer, i) for i in row) for row in self.states.prompts.ids.tolist())


def _objectives(run: _Run, candidates: Any, quantity: str) -> list[Objective]:
    """One objective per candidate."""
    shape = (int(run.present.shape[0]), int(run.present.shape[1]))
    if isinstance(candidates, Tensor) and candidates.ndim == 3:
        candidates = [candidates[..., c] for c in range(candidates.shape[-1])]
    elif isinstance(candidates, str | int | TokenSet) or not len(candidates):
        rule = "a sequence of tokens, or an integer tensor [batch, pos, candidate]"
        fail("candidates", rule, repr(candidates), 'for example candidates=[" Paris", " London"]')
    elif isinstance(candidates, Tensor):
        candidates = candidates.tolist()
    return [resolve_objective(run.model, run.readout.d_vocab, c, None, quantity, shape) for c in candidates]


def _flat(objective: Objective, present: Tensor, cells: slice) -> Objective:
    return Objective(objective.quantity, objective.ids[present][cells], objective.sign[present][cells])


def _names(run: _Run, objectives: Sequence[Objective]) -> tuple[tuple[tuple[str, ...], ...], ...]:
    """The text of every candidate, [batch][pos][candidate]."""

    def name(objective: Objective, b: int, p: int) -> str:
        pairs = zip(objective.ids[b, p].tolist(), objective.sign[b, p].tolist(), strict=True)
        texts = [token_text(run.tokenizer, i) for i, sign in pairs if sign > 0]
        return texts[0] if len(texts) == 1 else "{" + ", ".join(texts) + "}"

    n_rows, width = run.present.shape
    return tuple(tuple(tuple(name(o, b, p) for o in objectives) for p in range(width)) for b in range(n_rows))


@dataclass(frozen=True, repr=False)
class Tracks:
    """Levels and credits of several candidates at the same cells; cells of shorter rows are NaN."""

    levels: Float[Tensor, "point batch pos candidate"]
    attribution: Float[Tensor, "segment batch pos candidate"]
    labels: tuple[str, ...]
    point_labels: tuple[str, ...]
    boundaries: tuple[int, ...]
    candidates: Int[Tensor, "batch pos candidate"]  # the first token of a set
    candidate_strings: tuple[tuple[tuple[str, ...], ...], ...]
    model_level: Float[Tensor, "batch pos candidate"]
    positions: Int[Tensor, "batch pos"]
    token_strings: tuple[tuple[str, ...], ...]
    info: RunInfo

    @property
    def quantity(self) -> str:
        """What the levels are: ``prob``, ``log_prob`` or ``logit``."""
        return self.info.quantity

    @property
    def delta(self) -> Float[Tensor, "batch pos candidate"]:
        """Last level − first."""
        return self.levels[-1] - self.levels[0]

    @property
    def readout_gap(self) -> Float[Tensor, "batch pos candidate"]:
        """Readout of the last state − the same quantity from the model's own logits."""
        return self.levels[-1] - self.model_level

    @property
    def completeness_gap(self) -> Float[Tensor, "batch pos candidate"]:
        """Σ credits − Δ: rounding."""
        return self.attribution.sum(0) - self.delta

    def caption(self) -> str:
        """One line that says what the numbers are: quantity, baseline, estimator, model and the gap."""
        return f"{self.info.describe()} · |Σ − Δ| ≤ {largest_gap(self.completeness_gap):.1e}"

    def __repr__(self) -> str:
        n, batch, pos, k = self.attribution.shape
        return f"Tracks({n} segments × {batch} rows × {pos} positions × {k} candidates; {self.caption()})"

    def _repr_html_(self) -> str:
        """For notebooks, per analysed token (at most twelve) the candidates with their largest credit; escaped."""
        cells = (self.positions >= 0).nonzero().tolist()
        tables = [self._candidates_html(b, p) for b, p in cells[-CELLS:]]
        return page(self.caption(), tables, earlier(len(cells)))

    def _candidates_html(self, b: int, p: int) -> str:
        digits, rows = 6 if self.quantity == "prob" else 4, []
        for c, name in enumerate(self.candidate_strings[b][p]):
            top = int(self.attribution[:, b, p, c].abs().argmax())
            ends = (number(float(level), f".{digits}f") for level in self.levels[[0, -1], b, p, c])
            change = number(float(self.delta[b, p, c]), f"+.{digits}f")
            most = number(float(self.attribution[top, b, p, c]), f"+.{digits}f")
            rows.append((visible(name), *ends, change, self.labels[top], most))
        head = ("candidate", "start", "end", "Δ", "largest credit", "")
        return table(f"after {visible(self.token_strings[b][int(self.positions[b, p])])}", rows, head)

    def to_dataframe(self) -> pd.DataFrame:
        """One row per (cell, candidate, segment)."""
        rows = []
        for b, p in (self.positions >= 0).nonzero().tolist():
            place = int(self.positions[b, p])
            for c, name in enumerate(self.candidate_strings[b][p]):
                shared = (b, p, place, self.token_strings[b][place], int(self.candidates[b, p, c]), name)
                for s, label in enumerate(self.labels):
                    numbers = (self.attribution[s, b, p, c], self.levels[s, b, p, c], self.levels[s + 1, b, p, c])
                    rows.append((*shared, s, label, self.boundaries[s], *map(float, numbers)))
        names = ["batch", "column", "pos", "token", "candidate_id", "candidate", "index", "segment", "boundary"]
        return pd.DataFrame(rows, columns=[*names, "credit", "level_before", "level_after"])


@dataclass(frozen=True, repr=False)
class ProbabilityFlow:
    """Per segment the tokens that gained and lost most probability.

    ``gained`` is largest first, ``lost`` most negative first; ``total_variation`` = ½ Σ_v |change|, the probability
    that changed hands; ``residue`` = Σ_v change, zero but for rounding.
    """

    gained: Float[Tensor, "segment batch pos k"]
    gained_ids: Int[Tensor, "segment batch pos k"]
    lost: Float[Tensor, "segment batch pos k"]
    lost_ids: Int[Tensor, "segment batch pos k"]
    total_variation: Float[Tensor, "segment batch pos"]
    residue: Float[Tensor, "segment batch pos"]
    labels: tuple[str, ...]
    boundaries: tuple[int, ...]
    positions: Int[Tensor, "batch pos"]
    token_strings: tuple[tuple[str, ...], ...]
    texts: Mapping[int, str]
    info: RunInfo

    def caption(self) -> str:
        """One line that says what the numbers are; over the vocabulary they sum to zero but for the last figure."""
        return f"{self.info.describe()} · |Σ over the vocabulary| ≤ {largest_gap(self.residue):.1e}"

    def __repr__(self) -> str:
        n, batch, pos, k = self.gained.shape
        return f"ProbabilityFlow({n} segments × {batch} rows × {pos} positions, k={k}; {self.caption()})"

    def _repr_html_(self) -> str:
        """For notebooks, per analysed token (at most twelve) the segments that moved most probability; escaped."""
        cells = (self.positions >= 0).nonzero().tolist()
        tables = [self._moves_html(b, p) for b, p in cells[-CELLS:]]
        return page(self.caption(), tables, earlier(len(cells)))

    def _moves_html(self, b: int, p: int) -> str:
        moved, rows = self.total_variation[:, b, p].double(), []
        kept = largest(moved.tolist(), 8)
        for s in kept:
            sides = ((self.gained_ids, self.gained), (self.lost_ids, self.lost))
            texts = (self._first(ids[s, b, p, 0], amounts[s, b, p, 0]) for ids, amounts in sides)
            rows.append((self.labels[s], number(float(moved[s]), ".6f"), *texts))
        if n_others := len(moved) - len(kept):
            rows.append((f"other, {n_others} segments", number(float(moved.sum() - moved[kept].sum()), ".6f"), "", ""))
        head = ("segment", "moved", "gained most", "lost most")
        return table(f"after {visible(self.token_strings[b][int(self.positions[b, p])])}", rows, head)

    def _first(self, token: Tensor, amount: Tensor) -> str:
        return f"{visible(self.texts[int(token)])} {number(float(amount), '+.6f')}" if float(amount) else "none"

    def to_dataframe(self) -> pd.DataFrame:
        """One row per (cell, segment, token): ``rank`` 1 gained most; losses count from −1."""
        rows = []
        for b, p in (self.positions >= 0).nonzero().tolist():
            place = int(self.positions[b, p])
            for s, label in enumerate(self.labels):
                shared = (b, p, place, self.token_strings[b][place], s, label, self.boundaries[s])
                moved = float(self.total_variation[s, b, p])
                for sign, amounts, ids in ((1, self.gained, self.gained_ids), (-1, self.lost, self.lost_ids)):
                    pairs = zip(ids[s, b, p].tolist(), amounts[s, b, p].tolist(), strict=True)
                    rows += [(*shared, moved, sign * r, i, self.texts[i], x) for r, (i, x) in enumerate(pairs, 1)]
        names = ["batch", "column", "pos", "token", "index", "segment", "boundary", "total_variation", "rank"]
        return pd.DataFrame(rows, columns=[*names, "changed_id", "changed", "change"])
