"""Level against depth, with the credits that make the difference under it."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from .._checks import fail
from .._html import number
from ._cells import Columns, check_same_cells, is_path, one
from ._depth import depth_axis, depths, spans
from ._labels import escape, full
from ._style import DASHES, LEGEND, array, finish, hover, label_space, palette, plain, signed, unit


def trajectory(
    result: Any,
    others: Any = None,
    *,
    batch: int = 0,
    pos: int = -1,
    title: str | None = None,
    template: Any = None,
    width: int | None = None,
    height: int | None = None,
) -> go.Figure:
    """Above, the level f(h_l) of one token at every boundary (the logit lens); below, the credits.

    The credit of a segment is the rise of the level over it: the bars sum to Δ, levels sum to nothing. A band
    marks the onset segment, a dashed line the model's own value.

    Args:
        result: an IGLensResult of a path (not of components).
        others: further levels of the same quantity and position, drawn as lines: a mapping from names to
            IGLensResults or level methods (tuned lens), or a sequence of them.
        batch, pos: which analysed position; −1 is the row's last.
    """
    if not is_path(result):
        todo = "draw components with plotting.components"
        fail("result", "credits of the segments of a path", f"rows such as {result.labels[0]!r}", todo)
    cells, colours, quantity = one(result, batch, pos), palette(template), result.info.quantity
    n_layers, places = result.info.n_layers, depths(result.point_labels, result.info.n_layers)
    levels, credits = array(cells.of(result.levels)[:, 0]), array(cells.of(result.attribution)[:, 0])
    value, level, total = signed(quantity), plain(quantity), float(credits.sum(dtype="float64"))
    figure = make_subplots(
        rows=2, cols=1, shared_xaxes=True, vertical_spacing=0.09, row_heights=[0.6, 0.4],
        subplot_titles=["level of each state", f"credit of each segment, Σ = {number(total, value)}"],
    )  # fmt: skip
    figure.add_trace(
        go.Scatter(
            x=places,
            y=levels,
            mode="lines+markers",
            name="logit lens (level)",
            line={"color": colours.lines[0]},
            customdata=[full(label) for label in result.point_labels],
            hovertemplate=hover("<b>%{customdata}</b>", f"level %{{y:{level}}}", name="logit lens"),
        ),
        row=1,
        col=1,
    )
    for turn, (name, other) in enumerate(_named(others).items()):
        x, y, labels = _levels(name, other, result, cells, n_layers)
        line = {"color": colours.lines[1 + turn % 5], "dash": DASHES[1 + turn % 5]}
        figure.add_trace(
            go.Scatter(
                x=x, y=y, mode="lines+markers", name=escape(name), line=line, marker={"symbol": turn % 5 + 1},
                customdata=[full(label) for label in labels],
                hovertemplate=hover("<b>%{customdata}</b>", f"level %{{y:{level}}}", name=escape(name)),
            ), row=1, col=1,
        )  # fmt: skip
    own = float(cells.of(result.model_level)[0])
    figure.add_trace(
        go.Scatter(
            x=[places[0] - 0.5, places[-1] + 0.5], y=[own, own], mode="lines", hoverinfo="name",
            name=f"the model's own {unit(quantity)}, {number(own, level)}",
            line={"color": colours.ink, "dash": "dash", "width": 1.5},
        ), row=1, col=1,
    )  # fmt: skip
    middle, size = spans(places)
    figure.add_trace(
        go.Bar(
            x=middle,
            y=credits,
            width=size,
            name="IG-Lens credit",
            showlegend=False,
            marker={"color": [colours.gain if v >= 0 else colours.loss for v in credits]},
            customdata=[[full(s), b] for s, b in zip(result.labels, result.boundaries, strict=True)],
            hovertemplate=hover(
                "<b>%{customdata[0]}</b>, ends at boundary %{customdata[1]}",
                f"credit %{{y:{value}}}",
                name="IG-Lens",
            ),
        ),
        row=2,
        col=1,
    )
    segment = int(cells.of(result.onset().index)[0])
    if segment >= 0:
        for row in (1, 2):
            figure.add_vrect(
                x0=places[segment],
                x1=places[segment + 1],
                fillcolor=colours.lines[2],
                opacity=0.22,
                line_width=0,
                layer="below",
                row=row,
                col=1,
            )
    figure.update_xaxes(**depth_axis(result.point_labels, n_layers))
    figure.update_xaxes(showticklabels=False, row=1, col=1)
    figure.update_xaxes(title={"text": "state of the residual stream"}, row=2, col=1)
    figure.update_yaxes(type="linear", title={"text": unit(quantity)}, zeroline=True)
    figure.update_layout(legend={**LEGEND, "x": 0, "xanchor": "left"}, bargap=0)
    named = f"band: onset {result.labels[segment]} (rule mass)" if segment >= 0 else "no onset: the credits are all ≈ 0"
    heading = f"Trajectory of {cells.quoted}"
    return finish(
        figure,
        heading if title is None else title,
        [result.caption(), named],
        template=template,
        width=width,
        height=height,
        body=430,
        margin={"t": 40, "b": 75 + label_space(result.point_labels)},
    )


def _named(others: Any) -> dict[str, Any]:
    """Results by the names they are drawn under."""
    if others is None:
        return {}
    if isinstance(others, Mapping):
        return {str(name): other for name, other in others.items()}
    several = others if isinstance(others, Sequence) else [others]
    names = [getattr(other, "method", None) or f"baseline {other.info.baseline}" for other in several]
    return {
        name if names.count(name) == 1 else f"{name} ({i + 1})": o
        for i, (name, o) in enumerate(zip(names, several, strict=True))
    }


def _levels(
    name: str, other: Any, result: Any, cells: Columns, n_layers: int
) -> tuple[np.ndarray, np.ndarray, Sequence[str]]:
    """Depths, levels and labels of another result at the same position."""
    todo = "compare the same prompt, position and quantity"
    if getattr(other, "kind", "level") != "level":
        fail(
            f"others[{name!r}]",
            "levels, whose unit and meaning the axis shares",
            other.kind,
            "see plotting.comparison",
        )
    values = other.values if hasattr(other, "values") and hasattr(other, "ends") else other.levels
    labels = other.ends if hasattr(other, "ends") else other.point_labels
    check_same_cells(f"others[{name!r}]", values, result, todo)
    theirs = other.info.quantity if hasattr(other, "info") else other.unit
    if theirs not in (
        result.info.quantity,
        unit(result.info.quantity),
        unit(result.info.quantity).split(" ")[0],
    ):
        fail(f"others[{name!r}]", f"in units of {result.info.quantity}", theirs, todo)
    return depths(labels, n_layers), array(cells.of(values)[:, 0]), labels
