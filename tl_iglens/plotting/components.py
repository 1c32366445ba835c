"""Heads, MLPs and neurons: who made the probability, beside who wrote the logit."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from .._checks import check_positive, fail
from .._html import number
from ._cells import Columns, check_same_cells, one
from ._labels import escape, full, ticks
from ._style import AWAY, Palette, array, finish, hover, label_space, palette, signed, unit

_ROW_PIXELS = 22


def components(
    result: Any,
    dla: Any = None,
    *,
    batch: int = 0,
    pos: int = -1,
    top: int = 20,
    title: str | None = None,
    template: Any = None,
    width: int | None = None,
    height: int | None = None,
) -> go.Figure:
    """The ``top`` components with the largest |credit|, largest first; the others as one bar with their sum.

    Args:
        result: what ``direct_probability_attribution`` returned; any IGLensResult works.
        dla: the direct logit attribution of the same question (``compare(...)["dla"]``), or a sequence of
            them (heads and MLPs), drawn beside the credits for components of the same name.
        batch, pos: which analysed position; −1 is the row's last.
        top: how many components have a bar of their own.
    """
    check_positive("top", top)
    beside = [] if dla is None else list(dla) if isinstance(dla, Sequence) else [dla]
    cells, colours, quantity = one(result, batch, pos), palette(template), result.info.quantity
    credit = array(cells.of(result.attribution)[:, 0])
    order = np.abs(credit).argsort(kind="stable")[::-1].tolist()
    kept, rest = (order, []) if len(order) <= top + 1 else (order[:top], order[top:])
    names = [result.labels[i] for i in kept] + ([f"other, {len(rest)} components"] if rest else [])
    value = signed(quantity)
    figure = make_subplots(
        rows=1,
        cols=2 if beside else 1,
        shared_yaxes=True,
        horizontal_spacing=0.04,
        subplot_titles=[
            f"credit, Σ = {number(float(credit.sum(dtype='float64')), value)}",
            *(f"{escape(d.method)}, the logit's parts" for d in beside[:1]),
        ],
    )
    details = [f"rank {i + 1} of {len(credit)}" for i in range(len(kept))] + ["their sum"] * bool(rest)
    amounts = _gathered(credit, kept, rest)
    figure.add_trace(_bars("credit", amounts, details, value, unit(quantity), colours), row=1, col=1)
    figure.update_xaxes(type="linear", title={"text": unit(quantity)}, zeroline=True, row=1, col=1)
    if beside:
        values = _matched(beside, cells, result)
        known = ~np.isnan(values)
        rank = np.abs(np.where(known, values, 0)).argsort(kind="stable")[::-1].argsort()
        details = [f"rank {rank[i] + 1} among these components" for i in kept]
        details = [text if known[i] else "not in this attribution" for i, text in zip(kept, details, strict=True)]
        details += [f"sum of {int(known[rest].sum())} that have one"] * bool(rest)
        bars = _bars(beside[0].method, _gathered(values, kept, rest), details, "+.4f", beside[0].unit, colours)
        figure.add_trace(bars, row=1, col=2)
        figure.update_xaxes(type="linear", title={"text": escape(beside[0].unit)}, zeroline=True, row=1, col=2)
    axis = {**ticks(names, length=24), "range": [len(names) - 0.5, -0.5]}
    figure.update_yaxes(**axis, **AWAY, showgrid=False)
    figure.update_layout(bargap=0.25, hovermode="y")
    heading = f"Components behind {cells.quoted}"
    return finish(
        figure,
        heading if title is None else title,
        [result.caption()],
        template=template,
        width=width,
        height=height,
        body=_ROW_PIXELS * max(6, len(names)),
        margin={"l": 25 + label_space(names, 12, 24), "t": 40, "b": 60},
    )


def _gathered(values: np.ndarray, kept: list[int], rest: list[int]) -> np.ndarray:
    other = [np.nansum(values[rest], dtype=np.float64)] if rest else []
    return np.concatenate([values[kept], np.asarray(other, values.dtype)])


def _matched(attributions: Sequence[Any], cells: Columns, result: Any) -> np.ndarray:
    """What they give to the components with these names, NaN where they have none."""
    theirs: dict[str, float] = {}
    for dla in attributions:
        check_same_cells("dla", dla.values, result, "take both from one prompt with the same pos_slice")
        theirs |= dict(zip(dla.labels, array(cells.of(dla.values)[:, 0]).tolist(), strict=True))
    values = np.array([theirs.get(label, np.nan) for label in result.labels], np.float32)
    if np.isnan(values).all():
        todo = "ask for the same unit: compare(..., methods={'dla': {'unit': 'head'}})"
        fail("dla", "an attribution of the same components", f"rows such as {next(iter(theirs))!r}", todo)
    return values


def _bars(name: str, amounts: np.ndarray, details: list[str], form: str, what: str, colours: Palette) -> go.Bar:
    return go.Bar(
        x=amounts,
        y=list(range(len(amounts))),
        orientation="h",
        name=escape(name),
        showlegend=False,
        marker={"color": [colours.loss if v < 0 else colours.gain for v in amounts.tolist()]},
        text=["" if np.isnan(v) else number(v, "+.3g") for v in amounts.tolist()],
        textposition="auto",
        customdata=details,
        hovertemplate=hover("<b>%{y}</b>", f"{full(name)} %{{x:{form}}} {full(what)}", "%{customdata}"),
    )
