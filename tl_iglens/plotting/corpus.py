"""Many prompts at once: where tokens are decided, which tokens get credit where, and the prompts to look at."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from .._checks import check_positive, fail
from .._html import number
from ..tokens import visible
from ._labels import aliases, escape, full, ticks, turned
from ._style import AWAY, LEGEND, array, finish, hover, label_space, limit, palette, signed, unit

_ROW_PIXELS = 24
_MOST_ROWS = 40  # of a heatmap by position; beyond it neighbouring positions are joined
_LONGEST = 44  # characters of a prompt's end beside its bar


def onset_histogram(
    table: Any,
    *,
    rules: Sequence[str] = ("mass", "largest", "settled"),
    title: str | None = None,
    template: Any = None,
    width: int | None = None,
    height: int | None = None,
) -> go.Figure:
    """The share of tokens whose onset is in each segment, a bar per rule.

    Args:
        table: what ``corpus.run`` or ``corpus.load`` returned.
        rules: one or several of ``mass``, ``largest`` and ``settled``. Tokens without an onset are the last bar.
    """
    rules = [rules] if isinstance(rules, str) else list(rules)
    if not rules:
        fail("rules", "one rule or more", "none", "mass is the paper's")
    colours, figure = palette(template), go.Figure()
    for i, rule in enumerate(rules):
        frame = table.onset_histogram(rule)
        figure.add_trace(
            go.Bar(
                x=list(range(len(frame))),
                y=array(frame["share"].to_numpy()),
                name=escape(rule),
                showlegend=True,
                marker={"color": colours.lines[i % len(colours.lines)]},
                customdata=frame["count"].tolist(),
                hovertemplate=hover("<b>%{x}</b>", "%{y:.2%} of the tokens, %{customdata}", name=escape(rule)),
            )
        )
    labels = frame["segment"].tolist()
    figure.update_xaxes(**aliases(labels), **turned(labels), title={"text": "segment of the onset"}, showgrid=False)
    figure.update_yaxes(title={"text": "share of tokens"}, tickformat=".0%", rangemode="tozero")
    figure.update_layout(barmode="group", bargap=0.2, legend=LEGEND)
    return finish(
        figure,
        "Where tokens are decided" if title is None else title,
        [table.caption()],
        template=template,
        width=width,
        height=height,
        body=320,
        margin={"b": 90 + label_space(labels, 11)},
    )


def mean_credit(
    table: Any,
    *,
    by: str = "token class",
    title: str | None = None,
    template: Any = None,
    width: int | None = None,
    height: int | None = None,
) -> go.Figure:
    """The mean credit of every segment, a row per group of tokens.

    Args:
        table: what ``corpus.run`` or ``corpus.load`` returned.
        by: ``"token class"``, ``"target class"`` or ``"position"``; beyond 40 positions neighbours are joined.
    """
    frame, quantity, colours = table.mean_credit(by), table.info.quantity, palette(template)
    names, counts, z = _joined(frame) if by == "position" else _plain(frame)
    value, bound = signed(quantity), limit(z)
    segments = list(frame.columns[1:])
    figure = go.Figure(
        go.Heatmap(
            z=array(z),
            x=list(range(len(segments))),
            y=list(range(len(names))),
            zmin=-bound,
            zmax=bound,
            zmid=0,
            ygap=2,
            colorscale=[list(stop) for stop in colours.scale],
            name="credit",
            customdata=np.repeat(np.asarray(counts)[:, None], len(segments), 1),
            colorbar={"title": {"text": f"mean credit<br>({unit(quantity)})"}, "thickness": 14, "x": 1.01},
            hovertemplate=hover(
                f"{escape(by)} <b>%{{y}}</b>", "segment %{x}", f"mean credit %{{z:{value}}}", "of %{customdata} tokens"
            ),
        )
    )
    shown = [f"{name} ({count:,})" for name, count in zip(names, counts, strict=True)]
    figure.update_xaxes(**aliases(segments), **turned(segments), title={"text": "segment"}, showgrid=False)
    across = {**ticks(shown, length=24), "range": [len(shown) - 0.5, -0.5]}
    figure.update_yaxes(**across, **AWAY, title={"text": f"{escape(by)} (tokens)"}, showgrid=False)
    return finish(
        figure,
        f"Mean credit by {by}" if title is None else title,
        [table.caption()],
        template=template,
        width=width,
        height=height,
        body=_ROW_PIXELS * max(6, len(names)),
        margin={"l": 50 + label_space(shown, 12, 24), "r": 110, "b": 70 + label_space(segments, 11)},
    )


def top_prompts(
    table: Any,
    *,
    by: str = "cancellation",
    n: int = 20,
    title: str | None = None,
    template: Any = None,
    width: int | None = None,
    height: int | None = None,
) -> go.Figure:
    """The ``n`` tokens with the largest value of a column, with the end of their prompts.

    Args:
        table: what ``corpus.run`` or ``corpus.load`` returned.
        by: a column of numbers: ``cancellation``, ``delta``, ``completeness_gap``, …
    """
    check_positive("n", n)
    frame, colours = table.top(by, n), palette(template)
    if frame.empty:
        fail("by", "a column that has a value somewhere", repr(by), "choose another one")
    values = frame[by].to_numpy(np.float64)
    labels = [f"{_end(c)} → {visible(t)}" for c, t in zip(frame["context"], frame["target"], strict=True)]
    details = [
        f"prompt {prompt}, position {pos}<br>{full(context)} → <b>{full(target)}</b>"
        for prompt, pos, context, target in zip(
            *(frame[name] for name in ("prompt_id", "pos", "context", "target")), strict=True
        )
    ]
    figure = go.Figure(
        go.Bar(
            x=array(values),
            y=list(range(len(values))),
            orientation="h",
            marker={"color": [colours.loss if v < 0 else colours.gain for v in values.tolist()]},
            text=[number(v, ".3g") for v in values.tolist()],
            textposition="auto",
            customdata=details,
            hovertemplate=hover("%{customdata}", f"{escape(by)} %{{x:.6g}}"),
        )
    )
    figure.update_xaxes(type="linear", title={"text": escape(by)}, zeroline=True)
    axis = {**ticks(labels, length=_LONGEST + 20), "range": [len(labels) - 0.5, -0.5]}
    figure.update_yaxes(**axis, **AWAY, showgrid=False)
    figure.update_layout(bargap=0.25)
    return finish(
        figure,
        f"The {len(values)} tokens with the largest {by}" if title is None else title,
        [table.caption()],
        template=template,
        width=width,
        height=height,
        body=_ROW_PIXELS * max(6, len(labels)),
        margin={"l": 25 + label_space(labels, 12, _LONGEST + 20), "b": 60},
    )


def _plain(frame: pd.DataFrame) -> tuple[list[str], list[int], np.ndarray]:
    return [str(name) for name in frame.index], frame["count"].tolist(), frame.iloc[:, 1:].to_numpy()


def _joined(frame: pd.DataFrame) -> tuple[list[str], list[int], np.ndarray]:
    """Positions as ranges of equal length, at most ``_MOST_ROWS`` of them, each token counting once."""
    each = -(-(int(frame.index.max()) + 1) // _MOST_ROWS)
    bins = frame.index.to_numpy() // each
    names, counts, rows = [], [], []
    for chosen in np.unique(bins):
        part = frame[bins == chosen]
        first, last = chosen * each, chosen * each + each - 1
        names.append(str(first) if each == 1 else f"{first}–{last}")
        counts.append(int(part["count"].sum()))
        rows.append(np.average(part.iloc[:, 1:].to_numpy(), axis=0, weights=part["count"]))
    return names, counts, np.array(rows)


def _end(text: str) -> str:
    """The end of a prompt as tick text."""
    shown = visible(text)
    return shown if len(shown) <= _LONGEST else "…" + shown[1 - _LONGEST :]
