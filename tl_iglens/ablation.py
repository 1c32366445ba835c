"""ablate: how much does the probability of a token depend on one block, attention, MLP or head?

A site's contribution c to the stream is replaced by another one at some positions of the prompt, and the
model's own output is read at the analysed position: effect = p_clean − p_ablated. This measures what an
ablation does to everything above it, which credits along the stream leave out; the two are compared in
``validation``. Only hooks intervene. The only module that adds hooks that change activations.

Sites share forward passes. A site leaves the activations below it as they are, so all sites of a prompt ride
on one clean run: where a site begins, a copy of the clean row joins the batch, and the blocks below it are
never run for it. Later tokens cannot reach the analysed one and are left out.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from itertools import groupby
from pathlib import Path as FilePath
from typing import Any

import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from tqdm.auto import tqdm

from ._checks import NonFiniteStateError, check_choice, check_model, check_positive, fail, unwrap
from ._html import CELLS, earlier, number, page, quoted, table
from ._types import Hooks, compute_dtype
from .collect import hook_names, micro_batches, only_rows, run
from .files import read_result, write_result
from .lens import weight_processing
from .path import Point
from .quantity import Objective
from .readout import Readout
from .sites import MODES, NEEDS_REFERENCE, UNITS, Part, Rows, Site, resolve_reference, resolve_sites
from .tokens import (
    Prompts,
    is_next,
    next_tokens,
    read_prompts,
    resolve_objective,
    select_positions,
    token_text,
)

_TOKENS_PER_PASS = 4096  # rows × positions that one stacked forward may grow to
_LOGITS_PER_PASS = 2**26  # rows × vocabulary of its output


@dataclass(frozen=True)
class AblationInfo:
    """Where the numbers come from."""

    model: str
    dtype: str
    transformer_lens: str
    weight_processing: str
    unit: str
    mode: str
    at: str
    seed: int
    reference: str
    n_layers: int
    analysis: str = "ablate"


@dataclass(frozen=True, repr=False)
class AblationResult:
    """Probabilities of the target with every site ablated in turn; all tensors on the CPU.

    Labels are those of the segments of ``ig_lens``; ``blocks[s]`` is the (lowest) block of site s.
    """

    p_clean: Float[Tensor, "batch"]
    p_ablated: Float[Tensor, "site batch"]
    log_p_clean: Float[Tensor, "batch"]
    log_p_ablated: Float[Tensor, "site batch"]
    labels: tuple[str, ...]
    blocks: tuple[int, ...]
    targets: Int[Tensor, "batch"]
    target_strings: tuple[str, ...]
    tokens: Int[Tensor, "batch ctx"]
    token_strings: tuple[tuple[str, ...], ...]
    attention_mask: Bool[Tensor, "batch ctx"]
    positions: Int[Tensor, "batch"]
    info: AblationInfo

    @property
    def effect(self) -> Float[Tensor, "site batch"]:
        """p_clean − p_ablated: positive where the ablation suppresses the target."""
        return self.p_clean - self.p_ablated

    @property
    def log_effect(self) -> Float[Tensor, "site batch"]:
        """log p_clean − log p_ablated."""
        return self.log_p_clean - self.log_p_ablated

    def caption(self) -> str:
        """One line that says what was done: unit, mode, where, reference and model."""
        info = self.info
        reference = "" if info.reference in ("", "none") else f", reference {info.reference}"
        return f"effect on prob · {info.unit} · mode {info.mode} at {info.at}{reference} · {info.model}"

    def __repr__(self) -> str:
        sites, batch = self.p_ablated.shape
        return f"AblationResult({sites} sites × {batch} prompts; {self.caption()})"

    def _repr_html_(self) -> str:
        """For notebooks, per prompt (at most twelve) the sites with the largest |effect|; text escaped."""
        tables = [self._effects_html(b) for b in range(len(self.p_clean))[-CELLS:]]
        return page(self.caption(), tables, earlier(len(self.p_clean), "prompts"))

    def _effects_html(self, b: int) -> str:
        effect = self.effect[:, b].double()
        kept = effect.abs().argsort(descending=True, stable=True)[:8].sort().values.tolist()
        p = self.p_ablated[:, b].double()
        rows = [(self.labels[s], number(float(p[s]), ".6f"), number(float(effect[s]), "+.6f")) for s in kept]
        if others := [s for s in range(len(effect)) if s not in kept]:  # effects of one ablation each: no sum
            low, high = (number(float(v), "+.6f") for v in (effect[others].min(), effect[others].max()))
            rows.append((f"other, {len(others)} sites", "", f"{low} to {high}"))
        title = quoted(self.token_strings[b][int(self.positions[b])], self.target_strings[b])
        title += f" · p clean {number(float(self.p_clean[b]), '.6f')}"
        marked = kept.index(int(effect.argmax())) if int(effect.argmax()) in kept else -1
        return table(title, rows, ("ablated", "p ablated", "effect"), marked)

    def top(self, k: int = 10, *, batch: int = 0) -> pd.DataFrame:
        """The ``k`` sites of one row with the largest effect on the probability, largest first."""
        frame = self.to_dataframe()
        frame = frame[frame["batch"] == range(len(self.p_clean))[batch]]
        order = frame["effect"].sort_values(ascending=False, kind="stable").index[:k]
        return frame.loc[order, ["segment", "block", "p_ablated", "effect", "log_effect"]].reset_index(
            drop=True
        )

    def to_dataframe(self) -> pd.DataFrame:
        """One row per (prompt, site); ``segment`` and ``pos`` are those of ``IGLensResult.to_dataframe``."""
        rows = []
        for b, place in enumerate(self.positions.tolist()):
            shared = (b, place, self.token_strings[b][place], int(self.targets[b]), self.target_strings[b])
            for s, label in enumerate(self.labels):
                numbers = (self.p_clean[b], self.p_ablated[s, b], self.effect[s, b], self.log_effect[s, b])
                rows.append((*shared, s, label, self.blocks[s], *map(float, numbers)))
        names = ["batch", "pos", "token", "target_id", "target", "index", "segment", "block"]
        return pd.DataFrame(rows, columns=[*names, "p_clean", "p_ablated", "effect", "log_effect"])

    def save(self, path: str | FilePath) -> FilePath:
        """Write one safetensors file with JSON metadata; nothing in it is executable. Returns the path."""
        return write_result(self, path, "AblationResult")

    @classmethod
    def load(cls, path: str | FilePath) -> "AblationResult":
        """Read what ``save`` wrote to ``path``; ValueError for a file that is damaged or is something else."""
        return read_result(cls, path, "AblationResult", info=AblationInfo)


def ablate(
    model: Any,
    input: Any,
    *,
    targets: Any = None,
    unit: str = "block",
    mode: str = "skip",
    at: Any = "target",
    sites: Sequence[Any] | None = None,
    reference: Any = None,
    seed: int = 0,
    pos_slice: Any = -1,
    attention_mask: Any = None,
    prepend_bos: bool | None = None,
    fwd_hooks: Hooks = (),
    stack: bool | None = None,
    batch_size: int | None = None,
    progress: bool = False,
) -> AblationResult:
    """The probability of each row's target with one site after the other ablated, and without.

    The contribution c of a unit at the ablated positions is replaced: ``"skip"`` removes what the unit adds
    to the stream (after a post-norm, where there is one), so that the stream passes by it unchanged;
    ``"zero"`` sets its output to zero, for a block the outputs of its attention and MLP, which is a skip
    wherever the stream is a plain sum; ``"mean"`` puts the mean of c over the real positions of the reference
    prompts; ``"resample"`` the c of another prompt, drawn per row, first token for first token and the others
    counted from the analysed one backwards; ``"noise"`` a Gaussian direction of c's own norm. Draws depend on
    ``seed`` and on the row's tokens alone.

    Args:
        model: a HookedTransformer or TransformerBridge in eval mode.
        input: text, a list of texts, or ids ``[pos]`` / ``[batch, pos]``.
        targets: as for ``ig_lens``, one per row; None for the model's own top token.
        unit: ``"block"`` (c is hook_resid_post − hook_resid_pre), ``"attn"`` (hook_attn_out), ``"mlp"``
            (hook_mlp_out) or ``"head"`` (its slice of hook_z).
        at: ``"target"`` for the analysed position only, ``"all"``, or a ``Slice`` over the real tokens.
        sites: None for each one; otherwise block numbers or labels such as ``"3_block"`` or ``"L3H7"``; a
            tuple of them is ablated together.
        reference: prompts, or a ``Reference``; None for the other rows of ``input``.
        pos_slice: the analysed position, one per row.
        attention_mask, prepend_bos: a mask for ids with pads; whether text gets the tokenizer's BOS, None for the model's
            own default.
        fwd_hooks: interventions to run under, as for ``model.run_with_hooks``.
        stack: None lets sites share a forward, unless hooks of the caller are at work, which would see its
            rows; False runs one full forward per site.
        batch_size: sites per stacked forward, or prompts per forward with ``stack=False``.

    Returns: an :class:`AblationResult` with ``p_ablated`` and ``effect`` ``[site, batch]``.

    Raises: ValueError or NotImplementedError naming the argument.
    """
    (result,) = ablate_each(
        model, input, [(unit, mode, at)], targets=targets, sites=sites, reference=reference, seed=seed,
        pos_slice=pos_slice, attention_mask=attention_mask, prepend_bos=prepend_bos, fwd_hooks=fwd_hooks,
        stack=stack, batch_size=batch_size, progress=progress,
    )  # fmt: skip
    return result


def ablate_each(
    model: Any,
    input: Any,
    conditions: Sequence[tuple[str, str, Any]],
    *,
    targets: Any = None,
    sites: Sequence[Any] | None = None,
    reference: Any = None,
    seed: int = 0,
    pos_slice: Any = -1,
    attention_mask: Any = None,
    prepend_bos: bool | None = None,
    fwd_hooks: Hooks = (),
    stack: bool | None = None,
    batch_size: int | None = None,
    progress: bool = False,
) -> list[AblationResult]:
    """``ablate`` under several conditions ``(unit, mode, at)`` whose sites share the same forward passes."""
    model = unwrap(model)
    check_model(model)
    for unit, mode, _ in conditions:
        check_choice("unit", unit, UNITS)
        check_choice("mode", mode, MODES)
    if batch_size is not None:
        check_positive("batch_size", batch_size)
    asked = [resolve_sites(model, unit, mode, at, sites) for unit, mode, at in conditions]
    prompts = read_prompts(model, input, attention_mask, prepend_bos)
    positions = _one_position(prompts, pos_slice)
    shape = (len(positions), 1)
    if is_next(targets):
        positions, targets = next_tokens(prompts, positions)
        _check_one(positions, pos_slice)
    readout = Readout(model)
    objective = None
    if targets is not None:
        objective = resolve_objective(model, readout.d_vocab, targets, None, "prob", shape)
    rows = Rows(prompts, positions[:, 0], None, seed)
    for _, _, at in conditions:
        for row in range(len(rows)):
            rows.columns(row, at)  # a wrong `at` fails before any forward
    flat = [site for group in asked for site in group]
    rows = replace(rows, reference=resolve_reference(model, reference, prompts, flat, prepend_bos))
    stacked = (not fwd_hooks and not _has_hooks(model)) if stack is None else stack
    measure = _stacked if stacked else _one_by_one
    read = measure(model, rows, flat, objective, list(fwd_hooks), batch_size, progress)
    return _results(model, rows, conditions, asked, read, compute_dtype(readout.dtype))


def _one_position(prompts: Prompts, pos_slice: Any) -> Int[Tensor, "batch 1"]:
    positions = select_positions(prompts, pos_slice)
    _check_one(positions, pos_slice)
    return positions


def _check_one(positions: Int[Tensor, "batch pos"], pos_slice: Any) -> None:
    if positions.shape[1] != 1 or bool((positions < 0).any()):
        todo = "an ablation is read at one token, -1 is the last"
        fail("pos_slice", "one position in every row", repr(pos_slice), todo)


def _has_hooks(model: Any) -> bool:
    """Whether hooks of the caller sit on the model."""
    return any(point.fwd_hooks for point in model.hook_dict.values())


# --- how it is run ------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Lane:
    """One row of a forward's batch: a site at work on a prompt."""

    index: int
    site: Site
    row: int
    columns: Int[Tensor, "k"]


class _Pass:
    """The hooks of one forward; with ``grow`` its batch begins as one clean row, lanes join at their site."""

    def __init__(self, model: Any, rows: Rows, lanes: Sequence[_Lane], grow: bool):
        self.rows, self.lanes, self.grow = rows, lanes, grow
        self.boundaries = [hook_names(model, False)[Point(b)] for b in range(int(model.cfg.n_layers) + 1)]
        self.before: dict[tuple[int, int], Tensor] = {}  # (lane, block) -> the state that entered the block

    def hooks(self) -> list[tuple[str, Callable[..., Any]]]:
        parts = [(lane, part) for lane in self.lanes for part in lane.site.parts]
        blocks = {part.block for _, part in parts if part.unit == "block"}
        busy = sorted(
            blocks
            | {b + 1 for b in blocks}
            | ({lane.site.start for lane in self.lanes} if self.grow else set())
        )
        found = [(self.boundaries[b], self._at_boundary(b)) for b in busy]
        inner = sorted(((p.hook, lane, p) for lane, p in parts if p.unit != "block"), key=lambda job: job[0])
        for name, jobs in groupby(inner, key=lambda job: job[0]):
            found.append((name, self._at_output([(lane, part) for _, lane, part in jobs])))
        return found

    def _at_boundary(self, boundary: int) -> Callable[..., Any]:
        """Lanes that begin here join, the update behind is replaced, the state before the next is kept."""
        ended = self._jobs(boundary - 1)
        enters = self._jobs(boundary)
        new = [lane for lane in self.lanes if lane.site.start == boundary] if self.grow else []

        def fn(act: Tensor, hook: Any) -> Tensor:
            if new:
                act = torch.cat([act, act[:1].expand(len(new), *act.shape[1:])])
            if ended:
                act = act if new else act.clone()
                for lane, part in ended:
                    before = self.before.pop((lane.index, part.block)).to(act.device)  # its own device, in a split model
                    at = (lane.index, lane.columns.to(act.device))
                    own = act[at] - before
                    act[at] = before + self.rows.replacement(lane.site, part, lane.row, own)
            for lane, part in enters:
                source = lane.index if not self.grow or lane.site.start <= boundary else 0
                self.before[lane.index, part.block] = act[source, lane.columns.to(act.device)].clone()
            return act

        return fn

    def _jobs(self, block: int) -> list[tuple[_Lane, Part]]:
        return [
            (lane, p)
            for lane in self.lanes
            for p in lane.site.parts
            if p.unit == "block" and p.block == block
        ]

    def _at_output(self, jobs: list[tuple[_Lane, Part]]) -> Callable[..., Any]:
        """Outputs of attention, MLP or heads replaced."""

        def fn(act: Tensor, hook: Any) -> Tensor:
            act = act.clone()
            for lane, part in jobs:
                at: tuple[Any, ...] = (lane.index, lane.columns.to(act.device))
                at = at if part.head is None else (*at, part.head)
                act[at] = self.rows.replacement(lane.site, part, lane.row, act[at])
            return act

        return fn


@dataclass
class _Read:
    """Logits of the targets and log Z, clean in front of the sites: ``[1 + site, batch]``."""

    z: Float[Tensor, "run batch id"]
    log_z: Float[Tensor, "run batch"]
    objective: Objective


def _read(logits: Float[Tensor, "lane d_vocab"], ids: Int[Tensor, "lane id"]) -> tuple[Tensor, Tensor]:
    logits = logits.to(compute_dtype(logits.dtype))
    return logits.gather(1, ids.to(logits.device)).double().cpu(), logits.logsumexp(1).double().cpu()


def _top(logits: Float[Tensor, "row d_vocab"]) -> Objective:
    """The model's own top token as the target of each row."""
    ids = logits.argmax(-1).cpu()[:, None, None]
    return Objective("prob", ids, torch.ones(ids.shape, dtype=torch.float64))


def _stacked(
    model: Any,
    rows: Rows,
    sites: Sequence[Site],
    objective: Objective | None,
    hooks: Hooks,
    size: int | None,
    progress: bool,
) -> _Read:
    """All sites of a prompt in as few forwards as memory allows, one prompt at a time."""
    order = sorted(range(len(sites)), key=lambda i: sites[i].start)
    # Alibi slopes are laid out for the batch that enters the model, which then cannot grow on the way.
    grow = getattr(model.cfg, "positional_embedding_type", None) != "alibi"
    z, log_z, targets = [], [], []
    for row in tqdm(range(len(rows)), desc="ablate", unit="prompt", disable=not progress):
        prompt, last = rows.solo(row), rows.length(row) - 1
        own = None if objective is None else objective.at(slice(row, row + 1))
        found_z: list[Any] = [None] * (1 + len(sites))
        found_log_z = torch.empty(1 + len(sites), dtype=torch.float64)
        limit = min(_TOKENS_PER_PASS // (last + 1), _LOGITS_PER_PASS // int(model.cfg.d_vocab))
        for chosen in _runs(order, size or max(1, limit - 1)):
            lanes = [
                _Lane(1 + i, sites[s], row, rows.columns(row, sites[s].at)) for i, s in enumerate(chosen)
            ]
            batch = (
                prompt
                if grow
                else Prompts(*(t.expand(1 + len(lanes), -1) for t in (prompt.ids, prompt.mask)))
            )
            places = torch.full((1 + len(lanes), 1), last)
            with only_rows(model.unembed, places) as asked:
                logits = run(model, batch, [*hooks, *_Pass(model, rows, lanes, grow).hooks()])
            logits = asked.rows_of(logits)[:, 0]
            own = _top(logits[:1]) if own is None else own
            part_z, part_log_z = _read(logits, own.ids[:, 0].expand(len(logits), -1))
            for i, s in enumerate([-1, *chosen]):
                found_z[1 + s], found_log_z[1 + s] = part_z[i], part_log_z[i]
        z.append(torch.stack(found_z))
        log_z.append(found_log_z)
        targets.append(own)
    return _Read(torch.stack(z, 1), torch.stack(log_z, 1), objective or _joined_targets(targets))


def _one_by_one(
    model: Any,
    rows: Rows,
    sites: Sequence[Site],
    objective: Objective | None,
    hooks: Hooks,
    size: int | None,
    progress: bool,
) -> _Read:
    """One full forward per site over the prompts as they are."""
    z, log_z, targets = [], [], []
    bar = tqdm(total=(1 + len(sites)) * len(rows), desc="ablate", unit="run", disable=not progress)
    with bar:
        for part in micro_batches(rows.prompts, size):
            numbers = range(len(rows))[part]
            packed, _ = Prompts(rows.prompts.ids[part], rows.prompts.mask[part]).right_padded()
            places = torch.tensor([[rows.length(row) - 1] for row in numbers])
            own = None if objective is None else objective.at(part)
            found = []
            for site in (None, *sites):
                lanes = [] if site is None else [
                    _Lane(i, site, row, rows.columns(row, site.at)) for i, row in enumerate(numbers)
                ]  # fmt: skip
                with only_rows(model.unembed, places) as asked:
                    logits = run(model, packed, [*hooks, *_Pass(model, rows, lanes, False).hooks()])
                logits = asked.rows_of(logits)[:, 0]
                own = _top(logits) if own is None else own
                found.append(_read(logits, own.ids[:, 0]))
                bar.update(len(numbers))
            z.append(torch.stack([f[0] for f in found]))
            log_z.append(torch.stack([f[1] for f in found]))
            targets.append(own)
    return _Read(torch.cat(z, 1), torch.cat(log_z, 1), objective or _joined_targets(targets))


def _runs(order: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    for first in range(0, len(order), size):
        yield order[first : first + size]


def _joined_targets(parts: Sequence[Any]) -> Objective:
    return Objective("prob", torch.cat([p.ids for p in parts]), torch.cat([p.sign for p in parts]))


# --- what is handed back ------------------------------------------------------------------------


def _results(
    model: Any,
    rows: Rows,
    conditions: Sequence[tuple[str, str, Any]],
    asked: list[list[Site]],
    read: _Read,
    dtype: torch.dtype,
) -> list[AblationResult]:
    flat = Objective("prob", read.objective.ids[:, 0], read.objective.sign[:, 0])
    prob = flat.value(read.z, read.log_z).to(dtype)
    log_prob = Objective("log_prob", flat.ids, flat.sign).value(read.z, read.log_z).to(dtype)
    if not bool(torch.isfinite(prob[0]).all()):
        row = int((~torch.isfinite(prob[0])).nonzero()[0])
        todo = "look at it with collect_states"
        fail("model", "finite without ablation", f"probability NaN in row {row}", todo, NonFiniteStateError)
    tokenizer = getattr(model, "tokenizer", None)

    def name(ids: list[int], signs: list[float]) -> str:
        texts = [token_text(tokenizer, i) for i, s in zip(ids, signs, strict=True) if s > 0]
        return texts[0] if len(texts) == 1 else "{" + ", ".join(texts) + "}"

    shared: dict[str, Any] = {
        "targets": flat.ids[:, 0],
        "target_strings": tuple(map(name, flat.ids.tolist(), flat.sign.tolist())),
        "tokens": rows.prompts.ids,
        "token_strings": tuple(
            tuple(token_text(tokenizer, i) for i in ids) for ids in rows.prompts.ids.tolist()
        ),
        "attention_mask": rows.prompts.mask,
        "positions": rows.targets,
        "p_clean": prob[0],
        "log_p_clean": log_prob[0],
    }
    used = rows.reference
    results, first = [], 1
    for (unit, mode, at), sites in zip(conditions, asked, strict=True):
        own = slice(first, first + len(sites))
        first += len(sites)
        info = AblationInfo(
            model=str(getattr(model.cfg, "model_name", None) or type(model).__name__),
            dtype=str(model.W_U.dtype).removeprefix("torch."),
            transformer_lens=version("transformer-lens"),
            weight_processing=weight_processing(model),
            unit=unit,
            mode=mode,
            at=at if isinstance(at, str) else repr(at),
            seed=rows.seed,
            reference=f"{len(used.ids)} prompts" if used is not None and mode in NEEDS_REFERENCE else "none",
            n_layers=int(model.cfg.n_layers),
        )
        labels, blocks = tuple(site.label for site in sites), tuple(site.block for site in sites)
        results.append(
            AblationResult(
                p_ablated=prob[own],
                log_p_ablated=log_prob[own],
                labels=labels,
                blocks=blocks,
                info=info,
                **shared,
            )
        )
    return results
