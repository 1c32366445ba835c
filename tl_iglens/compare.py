"""compare: IG-Lens beside the tools people know, on the same points, positions and targets."""

import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from ._checks import check_mid, check_model, fail, unwrap
from ._html import number, page, quoted, table
from .collect import collect_states
from .lens import ig_lens
from .methods import METHODS, hooks_of, read_methods
from .methods.base import UNITS, MethodResult, Question
from .path import Point, resolve_path
from .readout import Readout
from .result import RunInfo, largest_gap
from .tokens import is_next, next_tokens, resolve_objective

_SHARED = set(inspect.signature(ig_lens).parameters) - {"model", "input"}
_CELL = ["batch", "column", "pos", "token", "target_id", "target"]


@torch.no_grad()
def compare(
    model: Any,
    input: Any = None,
    *,
    methods: str | Sequence[str] | Mapping[str, Mapping[str, Any]] = ("ig_lens", "logit_lens", "dla"),
    **shared: Any,
) -> "Comparison":
    """Several methods asked the same question, on one forward pass where their definition allows it.

    Args:
        model, input: as for ``ig_lens``.
        methods: names from ``tl_iglens.methods.METHODS``, or a mapping from names to the options of that method:
            ``{"ig_lens": {}, "dla": {"unit": "head"}}``.
        shared: the question, in the arguments of ``ig_lens``: ``targets``, ``pos_slice``, ``layers``,
            ``incl_mid``, ``baseline``, ``quantity``, ``states`` and the rest.

    Returns: a :class:`Comparison`; ``comparison["dla"]`` is the answer of one method.
    """
    chosen = read_methods(methods)
    unknown = sorted(set(shared) - _SHARED)
    if unknown:
        todo = "options of one method go into methods={name: {option: value}}"
        fail("shared", f"arguments of ig_lens ({', '.join(sorted(_SHARED))})", repr(unknown[0]), todo, TypeError)
    model = unwrap(model)
    check_model(model)
    question, ends = _question(model, input, chosen, shared)
    results = {name: METHODS[name].run(question, **options) for name, options in chosen.items()}
    receipt = question.receipt
    return Comparison(
        results=results,
        delta={name: level[-1] - level[0] for name, level in ends.items()},
        targets=receipt.targets,
        target_strings=receipt.target_strings,
        tokens=receipt.tokens,
        token_strings=receipt.token_strings,
        positions=receipt.positions,
        point_labels=tuple(p.label(question.n_layers) for p in _every_point(question.n_layers)),
        info=receipt.info,
    )


def _question(
    model: Any, input: Any, chosen: Mapping[str, Mapping[str, Any]], shared: Mapping[str, Any]
) -> tuple[Question, dict[str, Tensor]]:
    """What every method is asked, and the ends of the path in probability and in logits."""
    about = {name: shared.get(name) for name in ("attention_mask", "prepend_bos", "batch_size")}
    pos_slice, states = shared.get("pos_slice", -1), shared.get("states")
    if states is None:
        # inside a block too where a method can use it and the model has it
        incl_mid = bool(shared.get("incl_mid")) or ("dla" in chosen and _has_mid(model))
        states = collect_states(
            model,
            input,
            pos_slice=pos_slice,
            incl_mid=incl_mid,
            fwd_hooks=shared.get("fwd_hooks", ()),
            extra=hooks_of(model, chosen),
            **about,
        )
    elif input is not None:
        fail("input", "None where states is given", "both", "states already hold their prompt")
    aside = {"attention_mask", "prepend_bos", "batch_size", "states", "fwd_hooks", "progress"}
    asked = {name: value for name, value in shared.items() if name not in aside}
    receipt = ig_lens(model, states=states, **asked)
    states = states.at(receipt.positions)
    from_embed = receipt.info.baseline == "embed"
    layers, incl_mid = shared.get("layers"), bool(shared.get("incl_mid"))
    path = resolve_path(receipt.info.n_layers, layers, incl_mid=incl_mid, from_embed=from_embed)
    readout = Readout(model, shared.get("tile_bytes"), shared.get("head", "model"))
    if states.output.bare_head:
        readout.use_bare_head()
    targets = states.output.top if shared.get("targets") is None else shared["targets"]
    if is_next(targets):
        _, targets = next_tokens(states.prompts, states.positions)
    shape = (int(states.positions.shape[0]), int(states.positions.shape[1]))
    incorrect, quantity = shared.get("incorrect_targets"), receipt.info.quantity
    objective = resolve_objective(model, readout.d_vocab, targets, incorrect, quantity, shape)
    ends = {quantity: receipt.levels[[0, -1]]}
    for name in UNITS:
        if name not in ends:
            outline = {**asked, "quantity": name, "layers": _outline(path), "incl_mid": False, "n_steps": 1}
            outline["estimator"] = "prediction_aware"
            ends[name] = ig_lens(model, states=states, **outline).levels[[0, -1]]
    question = Question(model, readout, states, path, objective, receipt, bool(shared.get("progress", False)))
    return question, ends


def _has_mid(model: Any) -> bool:
    try:
        check_mid(model)
    except ValueError:
        return False
    return True


def _outline(path: Any) -> list[int]:
    """The first and the last boundary of a path: the same ends without what lies between."""
    first = path.states[0].block
    return [first, path.n_layers] if first < path.n_layers else [first]


def _every_point(n_layers: int) -> list[Point]:
    """All points of the stream in order; alignment ignores those no method has."""
    inner = [p for b in range(n_layers) for p in (Point(b), Point(b, mid=True))]
    return [*inner, Point(n_layers)]


@dataclass(frozen=True, repr=False)
class Comparison:
    """Answers of several methods to one question, aligned by the state at which each row is read or ends.

    ``delta``: per quantity (``prob``, ``log_prob``, ``logit``) the change from the baseline to the final state.
    """

    results: Mapping[str, MethodResult]
    delta: Mapping[str, Float[Tensor, "batch pos"]]
    targets: Int[Tensor, "batch pos"]
    target_strings: tuple[tuple[str, ...], ...]
    tokens: Int[Tensor, "batch ctx"]
    token_strings: tuple[tuple[str, ...], ...]
    positions: Int[Tensor, "batch pos"]
    point_labels: tuple[str, ...]
    info: RunInfo

    @property
    def methods(self) -> tuple[str, ...]:
        """Their names, in the order they were asked for."""
        return tuple(self.results)

    def __getitem__(self, method: str) -> MethodResult:
        if method not in self.results:
            fail("method", f"one of {', '.join(self.results)}", repr(method), "name it in methods=", KeyError)
        return self.results[method]

    def to_dataframe(self, *, wide: bool = False) -> pd.DataFrame:
        """All values, long or ``wide``. Long: one row per (cell, method, row) with its unit and kind, and the method's further figures.

        Wide: one row per (cell, point) and one column per method, named ``method [unit]``; additive rows that
        end at the same point are summed, so that heads stand beside the attention they make up, and rows
        without a place on the path are left out.
        """
        frame = pd.concat([self._long(name, result) for name, result in self.results.items()], ignore_index=True)
        return self._wide(frame) if wide else frame

    def additivity(self) -> pd.DataFrame:
        """One row per cell and method: what its rows sum to, what they should sum to, beside Δp and Δlogit.

        ``sum`` is over the rows, ``offset`` what belongs to no row (a bias), ``total`` both; ``expected`` the whole
        that ``sums_to`` names, ``gap`` the difference, ``error`` what the method reports of itself. Levels sum to
        nothing: their ``sum`` is given for the record, ``expected`` is empty.
        """
        rows = []
        for b, p in (self.positions >= 0).nonzero().tolist():
            for name, result in self.results.items():
                offset = 0.0 if result.offset is None else float(result.offset[b, p])
                nature = (name, result.kind, result.unit, len(result.labels), result.sums_to)
                sums = (float(result.values[:, b, p].sum()), offset, float(result.total[b, p]))
                whole = (_number(result.expected, b, p), float(result.gap[b, p]), _number(result.error, b, p))
                deltas = (float(self.delta["prob"][b, p]), float(self.delta["logit"][b, p]))
                rows.append((*self._cell(b, p), *nature, *sums, *whole, *deltas))
        names = ["method", "kind", "unit", "rows", "sums_to", "sum", "offset", "total", "expected", "gap", "error"]
        return pd.DataFrame(rows, columns=[*_CELL, *names, "delta_p", "delta_logit"])

    def caption(self) -> str:
        """One line that says what was asked, and how far the credits of ``ig_lens`` are from their sum."""
        receipt = self.results.get("ig_lens")
        gap = "" if receipt is None else f" · |Σ − Δ| ≤ {largest_gap(receipt.gap):.1e}"
        return self.info.describe() + gap

    def __repr__(self) -> str:
        batch, pos = self.positions.shape
        return f"Comparison({', '.join(self.results)}; {batch} rows × {pos} positions; {self.caption()})"

    def _repr_html_(self) -> str:
        """The additivity table of the last analysed token for notebooks, text escaped."""
        cells = (self.positions >= 0).nonzero().tolist()
        tables = [self._sums_html(b, p) for b, p in cells[-1:]]
        more = f"… and {len(cells) - 1} earlier tokens, see additivity()" if len(cells) > 1 else ""
        return page(self.caption(), tables, more)

    def _sums_html(self, b: int, p: int) -> str:
        rows = []
        for name, result in self.results.items():
            nature = (name, result.unit, str(len(result.labels)), number(float(result.total[b, p]), "+.6f"))
            whole: tuple[str, ...] = ("levels sum to nothing", "", "")
            if result.expected is not None:
                whole = number(float(result.expected[b, p]), "+.6f"), number(float(result.gap[b, p]), "+.1e")
                whole = (result.sums_to, *whole)
            rows.append((*nature, *whole))
        head = ("method", "unit", "rows", "Σ", "should be", "", "gap")
        place, target = int(self.positions[b, p]), self.target_strings[b][p]
        title = f"{quoted(self.token_strings[b][place], target)} · Δp {number(float(self.delta['prob'][b, p]), '+.6f')}"
        return table(f"{title} · Δlogit {number(float(self.delta['logit'][b, p]), '+.4f')}", rows, head)

    def _cell(self, b: int, p: int) -> tuple[Any, ...]:
        place = int(self.positions[b, p])
        return b, p, place, self.token_strings[b][place], int(self.targets[b, p]), self.target_strings[b][p]

    def _long(self, name: str, result: MethodResult) -> pd.DataFrame:
        figures = {key: value for key, value in result.extra.items() if value.ndim == 3}
        rows = []
        for b, p in (self.positions >= 0).nonzero().tolist():
            for r, label in enumerate(result.labels):
                more = tuple(value[r, b, p].item() for value in figures.values())
                place = (name, result.kind, result.unit, r, label, result.ends[r], result.boundaries[r])
                rows.append((*self._cell(b, p), *place, float(result.values[r, b, p]), *more))
        names = ["method", "kind", "unit", "index", "label", "point", "boundary", "value"]
        return pd.DataFrame(rows, columns=[*_CELL, *names, *figures])

    def _wide(self, frame: pd.DataFrame) -> pd.DataFrame:
        placed = frame[frame["point"] != ""]
        columns = {name: f"{name} [{result.unit}]" for name, result in self.results.items()}
        order = {label: i for i, label in enumerate(self.point_labels)}
        keys = [*_CELL, "boundary", "point"]
        wide = placed.pivot_table(index=keys, columns="method", values="value", aggfunc="sum", sort=False)
        wide = wide.reindex(columns=list(columns)).rename(columns=columns).reset_index()
        wide.columns.name = None
        rank = wide["point"].map(order)
        return (
            wide.assign(_rank=rank)
            .sort_values(["batch", "column", "_rank"], kind="stable")
            .drop(columns="_rank")
            .reset_index(drop=True)
        )


def _number(values: Tensor | None, b: int, p: int) -> float:
    return math.nan if values is None else float(values[b, p])
