"""Several methods asked the same question, one panel each on one axis of depth."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from .._checks import fail
from .._html import number
from ._cells import Columns, one
from ._depth import depth, depth_axis
from ._labels import escape, full, shorten
from ._style import Palette, array, finish, hover, label_space, palette

_PANEL_PIXELS, _GAP_PIXELS = 150, 62


def comparison(
    comparison: Any,
    *,
    methods: Sequence[str] | None = None,
    batch: int = 0,
    pos: int = -1,
    title: str | None = None,
    template: Any = None,
    width: int | None = None,
    height: int | None = None,
) -> go.Figure:
    """One panel per method with its own axis and unit, aligned by the state a row is read at or ends at.

    Levels are lines, additive parts bars (parts that end at the same state stand on one another). The line
    under each name says what the rows of that method sum to, and what that sum should be.

    Args:
        comparison: a Comparison, as ``compare`` returns it.
        methods: which of its methods, in order; None for all.
        batch, pos: which analysed position; −1 is the row's last.
    """
    names = list(comparison.results) if methods is None else list(methods)
    missing = [name for name in names if name not in comparison.results]
    if missing or not names:
        fail(
            "methods",
            f"among {', '.join(comparison.results)}",
            repr(missing[0]) if missing else "none",
            "compare it first",
        )
    cells, colours = one(comparison, batch, pos), palette(template)
    n_layers = comparison.info.n_layers
    body = _PANEL_PIXELS * len(names) + _GAP_PIXELS * (len(names) - 1)
    figure = make_subplots(
        rows=len(names),
        cols=1,
        shared_xaxes=True,
        vertical_spacing=_GAP_PIXELS / body if len(names) > 1 else 0,
        subplot_titles=[_heading(name, comparison.results[name], cells) for name in names],
    )
    points: set[str] = set()
    for row, name in enumerate(names, 1):
        result = comparison.results[name]
        points |= {end for end in result.ends if end}
        draw = _line if result.kind == "level" else _stack
        for trace in draw(name, result, cells, n_layers, colours):
            figure.add_trace(trace, row=row, col=1)
        figure.update_yaxes(type="linear", title={"text": escape(result.unit)}, zeroline=True, row=row, col=1)
    labels = sorted(points, key=lambda label: depth(label, n_layers))
    axis = depth_axis(labels, n_layers)
    axis["range"] = [axis["range"][0] - 0.6, axis["range"][1]]  # a first segment ends at the first state
    figure.update_xaxes(**axis)
    figure.update_xaxes(showticklabels=False, showgrid=False)
    figure.update_xaxes(showticklabels=True, title={"text": "state a row is read at or ends at"}, row=len(names), col=1)
    figure.update_annotations(x=0, xanchor="left", align="left")
    figure.update_layout(barmode="relative", bargap=0, showlegend=False)
    return finish(
        figure,
        f"{len(names)} methods on {cells.quoted}" if title is None else title,
        [comparison.caption(), _deltas(comparison, cells)],
        template=template,
        width=width,
        height=height,
        body=body,
        margin={"l": 80, "t": 58, "b": 55 + label_space(labels)},
    )


def _heading(name: str, result: Any, cells: Columns) -> str:
    """The name of a method, and under it what its rows sum to."""
    total = float(cells.of(result.values.nansum(0))[0])
    if result.expected is None:
        text = f"levels: Σ of {len(result.labels)} rows is {number(total, '.4g')}, which means nothing"
    else:
        offset = 0.0 if result.offset is None else float(cells.of(result.offset)[0])
        more = f" {'+' if offset >= 0 else '−'} {abs(offset):.4g} in no row" if offset else ""
        text = (
            f"Σ of {len(result.labels)} rows {number(total, '.4g')}{more}; should be {result.sums_to}"
            f" = {number(float(cells.of(result.expected)[0]), '.4g')}"
            f" (gap {number(float(cells.of(result.gap)[0]), '+.1e')})"
        )
    return f"<b>{escape(name)}</b><br><span style='font-size:12px'>{escape(shorten(text, 130))}</span>"


def _line(name: str, result: Any, cells: Columns, n_layers: int, colours: Palette) -> list[Any]:
    values = array(cells.of(result.values)[:, 0])
    more, shown = [[full(label)] for label in result.labels], ""
    if "rank" in result.extra:
        ranks = cells.of(result.extra["rank"])[:, 0].tolist()
        more = [[*row, rank + 1] for row, rank in zip(more, ranks, strict=True)]
        shown = "<br>rank %{customdata[1]}"
    return [
        go.Scatter(
            x=_places(result.ends, n_layers),
            y=values,
            mode="lines+markers",
            name=escape(name),
            customdata=more,
            line={"color": colours.lines[0]},
            hovertemplate=hover(
                "<b>%{customdata[0]}</b>", f"%{{y:.6~g}} {escape(result.unit)}{shown}", name=escape(name)
            ),
        )
    ]


def _stack(name: str, result: Any, cells: Columns, n_layers: int, colours: Palette) -> list[Any]:
    """Bars of the segments that end at each state; rows without a place there are left to the heading."""
    values = array(cells.of(result.values)[:, 0])
    placed = [i for i, end in enumerate(result.ends) if end]
    ends = _places([result.ends[i] for i in placed], n_layers)
    start = _starts(ends)
    return [
        go.Bar(
            x=(start + ends) / 2,
            y=values[placed],
            width=(ends - start) * 0.86,
            name=escape(name),
            marker={
                "color": [colours.gain if values[i] >= 0 else colours.loss for i in placed],
                "line": {"width": 0.5, "color": colours.paper},
            },
            customdata=[[full(result.labels[i]), full(result.ends[i])] for i in placed],
            hovertemplate=hover(
                "<b>%{customdata[0]}</b>, ends at %{customdata[1]}",
                f"%{{y:+.6~g}} {escape(result.unit)}",
                name=escape(name),
            ),
        )
    ]


def _starts(ends: np.ndarray) -> np.ndarray:
    """Where the bar of a row begins: attention with its block, others where the row before them ended."""
    ordered = sorted(set(ends.tolist()))
    before = dict(zip(ordered[1:], ordered, strict=False))
    return np.array([np.floor(end) if end % 1 else before.get(end, end - 1) for end in ends.tolist()])


def _places(ends: Sequence[str], n_layers: int) -> np.ndarray:
    return np.array([depth(end, n_layers) for end in ends])


def _deltas(comparison: Any, cells: Columns) -> str:
    parts = {"prob": "Δp", "log_prob": "Δ log p", "logit": "Δ logit"}
    return " · ".join(
        f"{parts.get(name, name)} = {number(float(cells.of(value)[0]), '+.6g')}"
        for name, value in comparison.delta.items()
    )
