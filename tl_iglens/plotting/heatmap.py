"""Tokens × segments: where in depth each token's quantity is produced."""

import json
from typing import Any

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from .._checks import fail
from .._html import number
from ._cells import Columns, check_same_cells, columns, ends, is_path
from ._labels import aliases, full, ticks, turned
from ._style import (
    AWAY,
    LEGEND,
    Palette,
    array,
    finish,
    hover,
    label_space,
    limit,
    palette,
    plain,
    signed,
    unit,
)

WINDOW = 40  # columns in view at first
_DETAIL_CELLS = 40_000  # up to here every cell carries its levels for the hover
_TEXT_BYTES = 1_200_000  # up to here it also carries its tokens in full
_WRITTEN_COLUMNS, _WRITTEN_CELLS = 12, 500  # up to here the largest credits are written into the cells
_ROW_PIXELS, _BODY_PIXELS, _TOP_PIXELS = 15, 1100, 60


def heatmap(
    result: Any,
    *,
    batch: int = 0,
    window: int | None = WINDOW,
    readout: Any = None,
    onset_rule: str = "mass",
    fraction: float = 0.5,
    title: str | None = None,
    template: Any = None,
    width: int | None = None,
    height: int | None = None,
) -> go.Figure:
    """Credits of one row of the batch, analysed tokens from left to right, segments from bottom to top.

    Bars above are the sums of the columns (Δ of each token), bars at the right those of the rows; a mark
    shows each token's onset. Colours are symmetric about 0.

    Args:
        result: an IGLensResult.
        window: how many of the last tokens are in view at first; None for all. Every token is in the figure:
            drag to reach the others.
        readout: the logit-lens answer to the same question (``compare(...)["logit_lens"]``), whose ranks and
            top tokens the hover then shows.
        onset_rule, fraction: as for ``result.onset``.

    Cells carry their levels on hover up to 40,000 cells, credit and labels beyond.
    """
    if window is not None and (isinstance(window, bool) or not isinstance(window, int) or window < 1):
        fail("window", "None or at least 1 column", repr(window), "None shows all tokens at once")
    return draw(
        result,
        columns(result, batch),
        window=window,
        readout=readout,
        onset_rule=onset_rule,
        fraction=fraction,
        title=title,
        template=template,
        width=width,
        height=height,
    )


def draw(
    result: Any,
    cells: Columns,
    *,
    window: int | None = WINDOW,
    readout: Any = None,
    onset_rule: str = "mass",
    fraction: float = 0.5,
    title: str | None = None,
    template: Any = None,
    width: int | None = None,
    height: int | None = None,
) -> go.Figure:
    """The heatmap of some columns of a result."""
    colours = palette(template)
    value = signed(result.info.quantity)
    z = array(cells.of(result.attribution))  # [segment, column]
    rows = min(_BODY_PIXELS, max(18, len(z)) * _ROW_PIXELS)
    top = _TOP_PIXELS / (_TOP_PIXELS + rows)
    figure = make_subplots(
        rows=2, cols=2, row_heights=[top, 1 - top], column_widths=[0.86, 0.14], shared_xaxes="columns",
        shared_yaxes="rows", vertical_spacing=6 / (_TOP_PIXELS + rows), horizontal_spacing=0.015,
    )  # fmt: skip
    tall = (height - 260 if height else rows) >= 12 * len(z)  # room for a number in every row
    written = len(cells) <= _WRITTEN_COLUMNS and z.size <= _WRITTEN_CELLS and tall
    in_view = len(cells) if window is None else min(window, len(cells))
    figure.add_trace(_credits(result, cells, z, colours, readout, written), row=2, col=1)
    onsets = _onsets(result, cells, onset_rule, fraction, colours, shift=-0.4 if written else 0.0)
    onsets.marker.size = 8 if in_view <= 60 else 5
    figure.add_trace(onsets, row=2, col=1)
    over = array(cells.of(result.attribution).sum(0))
    names = _column_names(result, cells)
    figure.add_trace(_bars(over, names, f"Σ over segments %{{y:{value}}}", colours), row=1, col=1)
    across = array(cells.of(result.attribution).sum(-1))
    names = [f"<b>{full(label)}</b>" for label in result.labels]
    figure.add_trace(_bars(across, names, f"Σ over tokens %{{x:{value}}}", colours, sideways=True), row=2, col=2)

    first = len(cells) - in_view
    across_axis = ticks if written else aliases
    upright = turned(cells.tokens, most=_WRITTEN_COLUMNS)
    view = {**upright, "range": [first - 0.5, len(cells) - 0.5], "showgrid": False}
    below = {
        **across_axis(cells.tokens),
        **view,
        "title": {"text": "token at the analysed position", "standoff": 10},
    }
    above = {**across_axis(cells.targets), **view, "side": "top", "showticklabels": True}
    figure.update_xaxes(**below, row=2, col=1)
    figure.update_xaxes(**above, title={"text": "target, and Σ of its credits (Δ)", "standoff": 10}, row=1, col=1)
    every = 1 if height is None and len(z) * _ROW_PIXELS <= _BODY_PIXELS else _every(len(z), height)
    figure.update_yaxes(
        **ticks(result.labels, every=every), title={"text": "segment", "standoff": 8}, showgrid=False, **AWAY,
        tickfont={"size": 11}, row=2, col=1,
    )  # fmt: skip
    figure.update_yaxes(type="linear", range=[-0.5, len(z) - 0.5], showticklabels=False, row=2, col=2)
    figure.update_yaxes(type="linear", zeroline=True, nticks=4, row=1, col=1)
    figure.update_xaxes(
        type="linear", title={"text": "Σ over tokens", "standoff": 10}, zeroline=True, nticks=4, row=2, col=2
    )
    figure.update_xaxes(visible=False, row=1, col=2)
    figure.update_yaxes(visible=False, row=1, col=2)
    figure.update_layout(dragmode="pan" if first else "zoom", bargap=0.15, legend=LEGEND)

    shown = f"last {len(cells) - first} of {len(cells)} tokens in view, drag sideways for the others" if first else ""
    prompt = f"row {cells.batch} of {len(result.positions)} prompts" if len(result.positions) > 1 else ""
    length = {"t": 58, "b": 95} if not upright["tickangle"] else {"t": 45, "b": 85}
    if upright["tickangle"]:
        length = {"t": 45 + label_space(cells.targets), "b": 75 + label_space(cells.tokens)}
    return finish(
        figure,
        title if title is not None else f"{unit(result.info.quantity).capitalize()} credit by token and segment",
        [result.caption(), " · ".join(filter(None, (prompt, shown)))],
        template=template,
        margin={"l": 40 + label_space(result.labels), "r": 20, **length},
        width=width or (max(620, 400 + 45 * len(cells)) if len(cells) < 12 else None),
        height=height,
        body=_TOP_PIXELS + rows,
    )


def _credits(result: Any, cells: Columns, z: np.ndarray, colours: Palette, readout: Any, written: bool) -> go.Heatmap:
    value, level = signed(result.info.quantity), plain(result.info.quantity)
    bound = limit(z)
    trace = go.Heatmap(
        z=z, x=list(range(len(cells))), y=list(range(len(z))), zmin=-bound, zmax=bound, zmid=0,
        colorscale=[list(stop) for stop in colours.scale], xgap=int(len(cells) <= 80), ygap=int(len(z) <= 80),
        colorbar={"title": {"text": f"credit<br>({unit(result.info.quantity)})"}, "thickness": 14, "x": 1.01},
        name="credit",
        hovertemplate=hover("<b>%{x}</b>", "segment %{y}", f"credit %{{z:{value}}}"),
    )  # fmt: skip
    if z.size <= _DETAIL_CELLS:
        names, who = _cell_names(result, cells, len(z), readout)
        trace.hovertext = names
        details, levels = [np.asarray(result.boundaries, float)[:, None] + 0 * z], []
        if (sides := ends(result)) is not None:
            details += [array(cells.of(side)).astype(np.float64).round(7) for side in sides]
            levels = [f"level %{{customdata[1]:{level}}} → %{{customdata[2]:{level}}}"]
        trace.customdata = np.stack(details, -1)
        place = "segment %{y}, ends at boundary %{customdata[0]:d}"
        trace.hovertemplate = hover(who, place, *levels, f"credit %{{z:{value}}}")
    if written:
        trace.text = [[number(v, "+.3f") if abs(v) >= 0.02 * bound else "" for v in row] for row in z.tolist()]
        trace.texttemplate = "%{text}"
    return trace


def _cell_names(result: Any, cells: Columns, n_segments: int, readout: Any) -> tuple[Any, str]:
    """Per cell its tokens, and what stood at the top where known; with the template that shows them."""
    names = [f"{full(token)} → {full(target)}" for token, target in zip(cells.tokens, cells.targets, strict=True)]
    if readout is not None:
        known = _readings(result, cells, readout)
        texts = [[f"<b>{name}</b>{known[s][c]}" for c, name in enumerate(names)] for s in range(n_segments)]
        return np.asarray(texts, dtype=object), "%{hovertext}"
    if n_segments * len(json.dumps(names)) > _TEXT_BYTES:
        return None, "<b>%{x}</b>"
    return np.broadcast_to(np.asarray(names, dtype=object), (n_segments, len(names))), "<b>%{hovertext}</b>"


def _readings(result: Any, cells: Columns, readout: Any) -> list[list[str]]:
    """Per segment and column the target's rank and the top three tokens where the segment ends."""
    check_same_cells("readout", readout.values, result, "take it from compare() with the same pos_slice")
    missing = [label for label in result.point_labels[1:] if label not in readout.labels]
    if missing or not is_path(result):
        rule = "a logit-lens answer at the points of result, a path"
        fail("readout", rule, f"one without {(missing or ['segments'])[0]}", "take it from compare()")
    points = [readout.labels.index(label) for label in result.point_labels[1:]]
    rank = cells.of(readout.extra["rank"])
    top = readout.extra["top_ids"][:, cells.batch][:, list(cells.index)]

    def reading(point: int, column: int) -> str:
        best = ", ".join(full(readout.texts[i]) for i in top[point, column, :3].tolist())
        return f"<br>rank {int(rank[point, column]) + 1} at its end, top tokens there: {best}"

    return [[reading(point, column) for column in range(len(cells))] for point in points]


def _column_names(result: Any, cells: Columns) -> list[str]:
    level = plain(result.info.quantity)
    sides = zip(
        *(array(cells.of(v)).tolist() for v in (result.levels[0], result.levels[-1], result.model_level)),
        strict=True,
    )
    return [
        f"<b>{full(token)} → {full(target)}</b><br>place {place} in the prompt<br>"
        f"start {number(start, level)}, end {number(end, level)}, model {number(own, level)}"
        for token, target, place, (start, end, own) in zip(
            cells.tokens, cells.targets, cells.places, sides, strict=True
        )
    ]


def _onsets(result: Any, cells: Columns, rule: str, fraction: float, colours: Palette, shift: float) -> go.Scatter:
    index = cells.of(result.onset(rule, fraction).index).tolist()
    x = [i for i, segment in enumerate(index) if segment >= 0]
    return go.Scatter(
        x=[i + shift for i in x],
        y=[index[i] for i in x],
        mode="markers",
        showlegend=True,
        name=f"onset (rule {rule}, fraction {fraction:g})" if rule != "largest" else "onset (rule largest)",
        marker={
            "symbol": "diamond",
            "size": 8,
            "color": colours.paper,
            "line": {"color": colours.ink, "width": 1.5},
        },
        text=[full(cells.tokens[i]) for i in x],
        hovertemplate=hover("<b>%{text}</b>", "onset at %{y}"),
    )


def _bars(values: np.ndarray, names: list[str], what: str, colours: Palette, *, sideways: bool = False) -> go.Bar:
    places = list(range(len(values)))
    return go.Bar(
        x=values if sideways else places,
        y=places if sideways else values,
        orientation="h" if sideways else "v",
        marker={"color": [colours.gain if v >= 0 else colours.loss for v in values], "line": {"width": 0}},
        showlegend=False,
        customdata=names,
        hovertemplate=hover("%{customdata}", what),
        name="",
    )


def _every(n_segments: int, height: int | None) -> int:
    """Every how manyth segment is named, so that labels stay apart."""
    room = _BODY_PIXELS if height is None else max(height - 270, 60)
    return max(1, int(np.ceil(n_segments * 12 / room)))
