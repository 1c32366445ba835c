"""One prompt under several baselines: what the choice of the start changes."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from .._checks import fail
from ._cells import one
from ._labels import aliases, full, ticks, turned, visible
from ._style import AWAY, LEGEND, array, finish, hover, label_space, limit, palette, plain, signed, unit

_ROW_PIXELS = 38


def baselines(
    results: Mapping[str, Any] | Sequence[Any],
    *,
    batch: int = 0,
    pos: int = -1,
    title: str | None = None,
    template: Any = None,
    width: int | None = None,
    height: int | None = None,
) -> go.Figure:
    """Left, the credits of one token under each baseline; right, where each path starts and ends.

    The states of the run are the same, so only the segments that touch the baseline, Δ and the onset change.

    Args:
        results: IGLensResults of the same prompt, position, target and quantity, by name or in a sequence
            (named by their baselines). A segment that a path does not have is left empty.
        batch, pos: which analysed position; −1 is the row's last.
    """
    named = _named(results)
    first = next(iter(named.values()))
    cells, colours, quantity = one(first, batch, pos), palette(template), first.info.quantity
    for name, result in named.items():
        _check_same(name, result, first, batch, pos)
    labels = _union([result.labels for result in named.values()])
    z = np.full((len(named), len(labels)), np.nan)
    for row, result in enumerate(named.values()):
        z[row, [labels.index(s) for s in result.labels]] = array(cells.of(result.attribution)[:, 0])
    value, level, bound = signed(quantity), plain(quantity), limit(z)
    names = list(named)
    figure = make_subplots(
        rows=1, cols=2, column_widths=[0.66, 0.34], shared_yaxes=True, horizontal_spacing=0.03,
        subplot_titles=["credits", "start → end of the path"],
    )  # fmt: skip
    figure.add_trace(
        go.Heatmap(
            z=z if any(r.attribution.dtype.itemsize == 8 for r in named.values()) else z.astype(np.float32),
            x=list(range(len(labels))),
            y=list(range(len(names))),
            zmin=-bound,
            zmax=bound,
            zmid=0,
            xgap=1,
            ygap=3,
            colorscale=[list(stop) for stop in colours.scale],
            name="credit",
            colorbar={"title": {"text": f"credit<br>({unit(quantity)})"}, "thickness": 14, "x": 1.01},
            hovertemplate=hover("baseline <b>%{y}</b>", "segment %{x}", f"credit %{{z:{value}}}"),
        ),
        row=1,
        col=1,
    )
    onset = [(row, r.onset().labels[cells.batch][cells.index[0]]) for row, r in enumerate(named.values())]
    marked = [(row, labels.index(label)) for row, label in onset if label in labels]
    figure.add_trace(
        go.Scatter(
            x=[x for _, x in marked],
            y=[y for y, _ in marked],
            mode="markers",
            name="onset (rule mass)",
            showlegend=True,
            marker={
                "symbol": "diamond",
                "size": 9,
                "color": colours.paper,
                "line": {"color": colours.ink, "width": 1.5},
            },
            hovertemplate=hover("baseline <b>%{y}</b>", "onset %{x}"),
        ),
        row=1,
        col=1,
    )
    start = [float(cells.of(r.levels[0])[0]) for r in named.values()]
    end = [float(cells.of(r.levels[-1])[0]) for r in named.values()]
    rows = list(range(len(names)))
    figure.add_trace(
        go.Scatter(
            x=[x for pair in zip(start, end, [None] * len(rows), strict=True) for x in pair],
            y=[y for row in rows for y in (row, row, None)], mode="lines", hoverinfo="skip", showlegend=False,
            line={"color": colours.neutral, "width": 2},
        ), row=1, col=2,
    )  # fmt: skip
    for name, x, symbol, colour in (
        ("start", start, "circle-open", colours.loss),
        ("end", end, "circle", colours.gain),
    ):
        figure.add_trace(
            go.Scatter(
                x=x,
                y=rows,
                mode="markers",
                name=name,
                marker={"symbol": symbol, "size": 10, "color": colour},
                customdata=[b - a for a, b in zip(start, end, strict=True)],
                hovertemplate=hover("baseline <b>%{y}</b>", f"{name} %{{x:{level}}}", f"Δ %{{customdata:{value}}}"),
            ),
            row=1,
            col=2,
        )
    upright = turned(labels)
    figure.update_xaxes(**aliases(labels), **upright, title={"text": "segment"}, showgrid=False, row=1, col=1)
    figure.update_xaxes(type="linear", title={"text": unit(quantity)}, zeroline=True, row=1, col=2)
    across = {**ticks([visible(n) for n in names], length=24), "range": [len(names) - 0.5, -0.5]}
    figure.update_yaxes(**across, **AWAY, showgrid=False)
    figure.update_yaxes(title={"text": "baseline"}, row=1, col=1)
    figure.update_layout(legend=LEGEND)
    heading = f"{cells.quoted} under {len(names)} baselines"
    return finish(
        figure,
        heading if title is None else title,
        _captions(named),
        template=template,
        width=width,
        height=height,
        body=max(150, _ROW_PIXELS * len(names)),
        margin={
            "l": 50 + label_space(names, 12, 24),
            "t": 40,
            "b": 95 + (label_space(labels) if upright["tickangle"] else 0),
        },
    )


def _named(results: Any) -> dict[str, Any]:
    if isinstance(results, Mapping):
        named = {str(name): result for name, result in results.items()}
    else:
        names = [result.info.baseline for result in results]
        named = {
            n if names.count(n) == 1 else f"{n} ({i + 1})": r
            for i, (n, r) in enumerate(zip(names, results, strict=True))
        }
    if not named:
        fail("results", "at least one result", "none", "run ig_lens once per baseline")
    return named


def _check_same(name: str, result: Any, first: Any, batch: int, pos: int) -> None:
    """A figure compares starts, not questions."""
    here, there = one(result, batch, pos), one(first, batch, pos)
    for what, a, b in (
        ("quantity", result.info.quantity, first.info.quantity),
        ("model", result.info.model, first.info.model),
        ("target", here.targets[0], there.targets[0]),
        ("token", here.tokens[0], there.tokens[0]),
    ):
        if a != b:
            fail(
                f"results[{name!r}]",
                f"of the {what} {b!r} like the others",
                repr(a),
                "vary the baseline only",
            )


def _union(paths: Sequence[Sequence[str]]) -> list[str]:
    """Labels of all paths in order: each new one before the label that follows it on its own path."""
    labels = [*sorted(paths, key=len)[-1]]
    for path in paths:
        for i, label in reversed(list(enumerate(path))):
            if label not in labels:
                labels.insert(labels.index(path[i + 1]) if i + 1 < len(path) else len(labels), label)
    return labels


def _captions(named: Mapping[str, Any]) -> list[str]:
    """One caption, the baselines in its place, and the largest gap."""
    info = next(iter(named.values())).info
    gap = max(float(np.nanmax(np.abs(array(r.completeness_gap)))) for r in named.values())
    estimators = " / ".join(dict.fromkeys(r.info.estimator for r in named.values()))
    starts = ", ".join(full(r.info.baseline) for r in named.values())
    return [f"{info.quantity} · baselines {starts} · {estimators} · {info.model} · |Σ − Δ| ≤ {gap:.1e}"]
