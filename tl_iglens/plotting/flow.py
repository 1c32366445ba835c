"""Where probability goes: tokens that gain and lose in each segment, and candidates over depth."""

from typing import Any

import numpy as np
import plotly.graph_objects as go

from .._checks import check_positive
from .._html import number
from ._cells import one
from ._depth import depth_axis, depths
from ._labels import full, tick, ticks
from ._style import AWAY, DASHES, LEGEND, array, finish, hover, label_space, palette, plain, signed, unit

_ROW_PIXELS = 34


def flow(
    probability_flow: Any,
    *,
    batch: int = 0,
    pos: int = -1,
    top: int = 15,
    title: str | None = None,
    template: Any = None,
    width: int | None = None,
    height: int | None = None,
) -> go.Figure:
    """The ``top`` segments that moved most probability, in order of depth: gains right, losses left.

    Both halves of a row are equally long: their length is the total variation ½ Σ_v |change| between the two
    full distributions. Tokens beyond the k that the result names are the grey end of each half.

    Args:
        probability_flow: what ``probability_flow`` returned.
        batch, pos: which analysed position; −1 is the row's last.
    """
    check_positive("top", top)
    cells, colours, result = one(probability_flow, batch, pos), palette(template), probability_flow
    moved = array(cells.of(result.total_variation)[:, 0])
    kept = sorted(np.abs(moved).argsort(kind="stable")[::-1][:top].tolist())
    rows = list(range(len(kept)))
    figure = go.Figure()
    for name, values, ids, colour, sign in (
        ("gained", result.gained, result.gained_ids, colours.gain, 1),
        ("lost", result.lost, result.lost_ids, colours.loss, -1),
    ):
        column = (cells.batch, cells.index[0])
        amounts = array(values[:, column[0], column[1]])[kept]  # [segment, k], largest change first
        texts = [[result.texts[i] for i in ids[s, column[0], column[1]].tolist()] for s in kept]
        amounts = np.where(amounts * sign > 0, amounts, 0)
        for k in range(amounts.shape[1]):
            wide = np.abs(amounts[:, k]) > 0.06 * (np.abs(moved).max() or 1)
            figure.add_trace(
                go.Bar(
                    x=amounts[:, k],
                    y=rows,
                    orientation="h",
                    name=name,
                    showlegend=k == 0,
                    legendgroup=name,
                    marker={
                        "color": colour,
                        "opacity": 1 - 0.5 * k / amounts.shape[1],
                        "line": {"width": 1, "color": colours.paper},
                    },
                    text=[tick(t[k], 12) if w else "" for t, w in zip(texts, wide, strict=True)],
                    textposition="inside",
                    insidetextanchor="middle",
                    textangle=0,
                    customdata=[full(t[k]) for t in texts],
                    hovertemplate=hover("<b>%{y}</b>", f"%{{customdata}} {name} %{{x:+.6f}}"),
                )
            )
        rest = sign * moved[kept] - amounts.sum(1)
        figure.add_trace(
            go.Bar(
                x=np.where(rest * sign > 0, rest, 0),
                y=rows,
                orientation="h",
                showlegend=sign > 0,
                name="all other tokens",
                legendgroup="rest",
                marker={"color": colours.neutral, "opacity": 0.35},
                hovertemplate=hover("<b>%{y}</b>", f"all other tokens {name} %{{x:+.6f}}"),
            )
        )
    bound = 1.08 * (float(np.abs(moved).max()) or 1)
    labels = [f"{result.labels[s]}  {number(float(moved[s]), '.3f')}" for s in kept]
    figure.update_yaxes(**{**ticks(labels, length=28), "range": [-0.5, len(kept) - 0.5]}, **AWAY, showgrid=False)
    figure.update_yaxes(title={"text": "segment, and the probability it moved", "standoff": 8})
    figure.update_xaxes(
        type="linear", range=[-bound, bound], zeroline=True, title={"text": "lost  ←  probability  →  gained"}
    )
    figure.update_layout(barmode="relative", bargap=0.2, legend=LEGEND)
    shown = f"the {len(kept)} of {len(moved)} segments that move most" if len(kept) < len(moved) else ""
    caption = result.caption()
    return finish(
        figure,
        f"Where probability goes {cells.after}" if title is None else title,
        [f"{caption} · {shown}" if shown else caption],
        template=template,
        width=width,
        height=height,
        body=_ROW_PIXELS * max(5, len(kept)),
        margin={"l": 55 + label_space(labels, 12, 28), "b": 95},
    )


def candidates(
    track: Any,
    *,
    batch: int = 0,
    pos: int = -1,
    title: str | None = None,
    template: Any = None,
    width: int | None = None,
    height: int | None = None,
) -> go.Figure:
    """The levels of several tokens over depth, one line each; the legend states each one's final level.

    Args:
        track: what ``track`` returned.
        batch, pos: which analysed position; −1 is the row's last.
    """
    cells, colours = one(track, batch, pos), palette(template)
    quantity, column = track.quantity, (cells.batch, cells.index[0])
    levels = array(track.levels[:, column[0], column[1]])  # [point, candidate]
    credits = array(track.attribution[:, column[0], column[1]])
    n_layers, names = track.boundaries[-1], track.candidate_strings[column[0]][column[1]]
    figure = go.Figure()
    for c, name in enumerate(names):
        rise = [
            "",
            *(
                f"<br>{full(s)}: {number(v, signed(quantity))}"
                for s, v in zip(track.labels, credits[:, c].tolist(), strict=True)
            ),
        ]
        figure.add_trace(
            go.Scatter(
                x=depths(track.point_labels, n_layers),
                y=levels[:, c],
                mode="lines+markers",
                showlegend=True,
                name=f"{tick(name, 20)}  {number(levels[-1, c].item(), plain(quantity))}",
                line={"color": colours.lines[c % 6], "dash": DASHES[c // 6 % 6]},
                marker={"symbol": c % 6},
                customdata=[[full(p), r] for p, r in zip(track.point_labels, rise, strict=True)],
                hovertemplate=hover(
                    f"<b>{full(name)}</b> at %{{customdata[0]}}",
                    f"level %{{y:{plain(quantity)}}}%{{customdata[1]}}",
                ),
            )
        )
    figure.update_xaxes(**depth_axis(track.point_labels, n_layers), title={"text": "state of the residual stream"})
    figure.update_yaxes(type="linear", zeroline=True, title={"text": unit(quantity)})
    figure.update_layout(legend={"x": 1.01, "xanchor": "left", "y": 1, "title": {"text": "token, final level"}})
    return finish(
        figure,
        f"{len(names)} candidates {cells.after}" if title is None else title,
        [track.caption()],
        template=template,
        width=width,
        height=height,
        body=380,
        margin={"l": 75, "b": 55 + label_space(track.point_labels)},
    )
