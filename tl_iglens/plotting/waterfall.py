"""The receipt of one token: where the quantity starts, what each segment adds or takes, where it ends."""

from typing import Any

import plotly.graph_objects as go

from .._checks import check_positive
from .._html import largest, number
from ._cells import ends, is_path, one
from ._labels import full, ticks
from ._style import AWAY, LEGEND, array, finish, hover, label_space, palette, signed, unit

_GAP = 1e-6  # of Σ|credit|: what the credits leave unexplained is a row of its own from here on
_ROW_PIXELS = 26


def waterfall(
    result: Any,
    *,
    batch: int = 0,
    pos: int = -1,
    top: int = 12,
    title: str | None = None,
    template: Any = None,
    width: int | None = None,
    height: int | None = None,
) -> go.Figure:
    """The receipt of one analysed token, read from top to bottom; every bar starts where the last one ended.

    The ``top`` segments with the largest |credit|, if above a thousandth of Σ|credit|, have a bar each, in
    order of depth; the others are one bar with their sum. A line marks the model's own value. For a gradient
    rule, what its credits miss of Δ has a row too.

    Args:
        result: an IGLensResult, or one of direct_probability_attribution.
        batch, pos: which analysed position; −1 is the row's last.
    """
    check_positive("top", top)
    cells, colours, quantity = one(result, batch, pos), palette(template), result.info.quantity
    credit = array(cells.of(result.attribution)[:, 0])
    start, end, own = (float(cells.of(v)[0]) for v in (result.levels[0], result.levels[-1], result.model_level))
    kept = largest(abs(credit), top)
    rest = [i for i in range(len(credit)) if i not in set(kept)]
    gap = float(cells.of(result.delta)[0]) - float(credit.sum(dtype="float64"))
    onset = int(cells.of(result.onset().index)[0]) if is_path(result) else -1

    kind = "segments" if is_path(result) else "components"
    labels = [f"start ({result.point_labels[0]})", *(_name(result, i, onset) for i in kept)]
    amounts = [start, *(credit[i].item() for i in kept)]
    hovers = [f"the path starts at {full(result.point_labels[0])}"]
    hovers += [_details(result, cells, i, quantity) for i in kept]
    if rest:
        labels.append(f"other, {len(rest)} {kind}")
        amounts.append(float(credit[rest].sum(dtype="float64")))
        hovers.append(f"{len(rest)} {kind}, none with |credit| above {abs(credit[rest]).max():.2g}")
    if abs(gap) >= _GAP * max(1.0, float(abs(credit).sum(dtype="float64"))):
        labels.append("not in the credits")
        amounts.append(gap)
        hovers.append(f"error of {full(result.info.estimator)} with {result.info.n_steps} steps")
    labels.append(f"end ({result.point_labels[-1]})")
    amounts.append(end)
    hovers.append("the last state, read by norm and unembedding")

    value, rows = signed(quantity), list(range(len(labels)))
    figure = go.Figure()
    figure.add_trace(
        go.Waterfall(
            orientation="h",
            x=amounts,
            y=rows,
            measure=["absolute", *["relative"] * (len(rows) - 2), "absolute"],
            text=[number(v, value if 0 < i < len(rows) - 1 else value[1:]) for i, v in enumerate(amounts)],
            textposition="outside",
            cliponaxis=False,
            textfont={"size": 12},
            customdata=hovers,
            hovertemplate=hover("<b>%{y}</b>: %{text}", "%{customdata}"),
            increasing={"marker": {"color": colours.gain}},
            decreasing={"marker": {"color": colours.loss}},
            totals={"marker": {"color": colours.neutral}},
            connector={"line": {"color": colours.neutral, "width": 1}},
            name="credit",
            showlegend=False,
        )
    )
    figure.add_trace(
        go.Scatter(
            x=[own, own], y=[len(rows) - 1.6, len(rows) - 0.4], mode="lines", showlegend=True,
            name=f"the model's own {unit(quantity)}, {number(own, value[1:])}",
            line={"color": colours.ink, "dash": "dot", "width": 2}, hoverinfo="skip",
        )
    )  # fmt: skip
    low, high, needs_left = _span(amounts, own)
    names = ticks(labels, length=32)
    figure.update_yaxes(**{**names, "range": [len(rows) - 0.5, -0.5]}, **AWAY, showgrid=False)
    figure.update_xaxes(
        type="linear", range=[low - (0.2 if needs_left else 0.02) * (high - low), high + 0.2 * (high - low)], zeroline=True,
        title={"text": unit(quantity)},
    )  # fmt: skip
    figure.update_layout(legend=LEGEND, bargap=0.25, hovermode="y")
    heading = f"Receipt for {cells.quoted}"
    return finish(
        figure,
        heading if title is None else title,
        [result.caption(), f"Δ = {number(end - start, value)}"],
        template=template,
        width=width,
        height=height,
        body=_ROW_PIXELS * len(rows),
        margin={"l": 20 + label_space(labels, 12, 32), "b": 90},
    )


def _name(result: Any, i: int, onset: int) -> str:
    return result.labels[i] + (" ◆ onset" if i == onset else "")


def _details(result: Any, cells: Any, i: int, quantity: str) -> str:
    value = signed(quantity).removeprefix("+")
    text = f"ends at boundary {result.boundaries[i]}"
    if (sides := ends(result)) is not None:
        before, after = (float(cells.of(side)[i, 0]) for side in sides)
        text += f"<br>level {number(before, value)} → {number(after, value)}"
    delta = float(cells.of(result.delta)[0])
    share = float(cells.of(result.attribution)[i, 0]) / delta if abs(delta) >= _GAP else None
    return text if share is None else f"{text}<br>{share:.1%} of Δ"


def _span(amounts: list[float], own: float) -> tuple[float, float, bool]:
    """The ends of everything that is drawn, and whether numbers left of falling bars need room before the first."""
    falls, heights, level = [], [0.0, own, amounts[0], amounts[-1]], amounts[0]
    for amount in amounts[1:-1]:
        level += amount
        heights.append(level)
        falls += [level] if amount < 0 else []
    falls += [end for end in (amounts[0], amounts[-1]) if end < 0]
    low, high = min(heights), max(heights)
    return low, high, any(level < low + 0.2 * (high - low) for level in falls)
