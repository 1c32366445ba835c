"""What credits foretell of ablations: credit against effect, and a study's measures with their intervals."""

from typing import Any

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from .._checks import fail
from .._html import number
from ._labels import full, ticks, visible
from ._style import AWAY, LEGEND, Palette, array, finish, hover, label_space, palette, signed, unit

_NAMED = 5  # sites with the largest effects that are named in the figure
_ROW_PIXELS, _STUDY_ROW = 18, 24


def ablation(
    study_or_result: Any,
    credits: Any = None,
    *,
    batch: int = 0,
    stratum: str = "all",
    layers: str = "all",
    title: str | None = None,
    template: Any = None,
    width: int | None = None,
    height: int | None = None,
) -> go.Figure:
    """Effects of ablations beside the credits that should foretell them.

    * An AblationResult alone: the effect of every site in order of depth.
    * An AblationResult with ``credits``: one mark per site, credit against effect; the onset has a diamond.
    * An OnsetStudy: its measures with their 95 % intervals beside chance; under them the credit and effect
      of every layer of every prompt; layers that the mass rule names have a diamond.

    Args:
        study_or_result: what ``ablate`` or ``validate_onset`` returned.
        credits: an IGLensResult of the same prompts whose segments are the ablated sites.
        batch: which prompt of an AblationResult.
        stratum, layers: which rows of the study's ``summary``.
    """
    shape = {"title": title, "template": template, "width": width, "height": height}
    if hasattr(study_or_result, "p_ablated"):
        if credits is None:
            return _effects(study_or_result, batch, **shape)
        return _against(study_or_result, credits, batch, **shape)
    if hasattr(study_or_result, "summary"):
        return _study(study_or_result, stratum, layers, **shape)
    fail(
        "study_or_result",
        "an AblationResult or an OnsetStudy",
        type(study_or_result).__name__,
        "see ablate",
        TypeError,
    )


def _effects(result: Any, batch: int, *, title: str | None, template: Any, width: Any, height: Any) -> go.Figure:
    row, colours = _row(result, batch), palette(template)
    effect = array(result.effect[:, row])
    figure = go.Figure(
        go.Bar(
            x=effect, y=list(range(len(effect))), orientation="h", name="effect",
            marker={"color": [colours.gain if v >= 0 else colours.loss for v in effect]},
            customdata=_details(result, row),
            hovertemplate=hover("<b>%{y}</b>", "%{customdata}"),
        )
    )  # fmt: skip
    every = int(np.ceil(len(effect) / 60))
    figure.update_yaxes(**ticks(result.labels, every=every), **AWAY, showgrid=False, title={"text": "ablated site"})
    figure.update_xaxes(type="linear", zeroline=True, title={"text": "effect: p clean − p ablated"})
    figure.update_layout(bargap=0.2, hovermode="y")
    return finish(
        figure, _heading("Ablations of", result, row) if title is None else title, [_caption(result, row)],
        template=template, width=width, height=height, body=min(1000, _ROW_PIXELS * max(8, len(effect))),
        margin={"l": 45 + label_space(result.labels), "b": 60},
    )  # fmt: skip


def _against(
    result: Any, credits: Any, batch: int, *, title: str | None, template: Any, width: Any, height: Any
) -> go.Figure:
    row, colours = _row(result, batch), palette(template)
    column = _column(result, credits, row)
    shared = [label for label in result.labels if label in credits.labels]
    if not shared:
        todo = "ablate the unit whose credits these are: blocks, or attn and mlp with incl_mid=True"
        fail(
            "credits",
            f"of segments such as {result.labels[0]!r}",
            f"segments such as {credits.labels[0]!r}",
            todo,
        )
    where = [credits.labels.index(label) for label in shared]
    credit = array(credits.attribution[:, row, column])[where]
    effect = array(result.effect[:, row])[[result.labels.index(label) for label in shared]]
    onset = int(credits.onset().index[row, column])
    marked = shared.index(credits.labels[onset]) if onset >= 0 and credits.labels[onset] in shared else -1
    named = _named(credit, effect, marked)
    quantity, details = credits.info.quantity, _details(result, row)
    notes = dict(zip(result.labels, details, strict=True))
    plain, figure = [i for i in range(len(shared)) if i != marked], go.Figure()
    dot = {"size": 9, "color": colours.lines[0], "line": {"width": 1, "color": colours.paper}}
    diamond = {
        "size": 13,
        "symbol": "diamond",
        "color": colours.lines[1],
        "line": {"width": 1.5, "color": colours.ink},
    }
    on_onset = [marked] if marked >= 0 else []
    for name, chosen, marker in (("segment", plain, dot), ("onset (rule mass)", on_onset, diamond)):
        figure.add_trace(
            go.Scatter(
                x=credit[chosen],
                y=effect[chosen],
                mode="markers+text",
                name=name,
                marker=marker,
                showlegend=True,
                text=[full(shared[i]) if i in named else "" for i in chosen],
                textposition=[
                    "middle left" if credit[i] > np.ptp(credit) / 2 + credit.min() else "middle right" for i in chosen
                ],
                customdata=[[full(shared[i]), notes[shared[i]]] for i in chosen],
                cliponaxis=False,
                hovertemplate=hover("<b>%{customdata[0]}</b>", f"credit %{{x:{signed(quantity)}}}", "%{customdata[1]}"),
            )
        )
    figure.update_xaxes(type="linear", zeroline=True, title={"text": f"credit ({unit(quantity)})"})
    figure.update_yaxes(type="linear", zeroline=True, title={"text": "effect: p clean − p ablated"})
    figure.update_layout(legend=LEGEND)
    return finish(
        figure, _heading("Credit against effect for", result, row) if title is None else title,
        [credits.caption(), _caption(result, row)], template=template, width=width, height=height, body=430,
        margin={"l": 75, "b": 95, "t": 35},
    )  # fmt: skip


def _study(
    study: Any, stratum: str, layers: str, *, title: str | None, template: Any, width: Any, height: Any
) -> go.Figure:
    """A forest plot, one panel per measure, over the scatter of all layers."""
    table, colours = study.summary(stratum=stratum, layers=layers), palette(template)
    measures, names = list(dict.fromkeys(table["measure"])), list(dict.fromkeys(table["score"]))
    forest, below, gap = _STUDY_ROW * len(names), 300, 95
    body = forest + gap + below
    figure = make_subplots(
        rows=2,
        cols=len(measures),
        row_heights=[forest / (forest + below), below / (forest + below)],
        vertical_spacing=gap / body,
        horizontal_spacing=0.025,
        specs=[[{}] * len(measures), [{"colspan": len(measures)}, *[None] * (len(measures) - 1)]],
        subplot_titles=[m.replace("_", " ") for m in measures] + ["credit and effect of every layer of every prompt"],
    )
    for column, measure in enumerate(measures, 1):
        for trace in _forest(table[table["measure"] == measure], names, colours, show=column == 1):
            figure.add_trace(trace, row=1, col=column)
        axis = {**ticks(names, length=24), "range": [len(names) - 0.5, -0.5]}
        figure.update_yaxes(**axis, **AWAY, showticklabels=column == 1, showgrid=True, row=1, col=column)
        figure.update_xaxes(type="linear", nticks=4, zeroline=False, row=1, col=column)
    for trace in _pooled(study, colours):
        figure.add_trace(trace, row=2, col=1)
    figure.update_xaxes(type="linear", zeroline=True, title={"text": "credit (probability)"}, row=2, col=1)
    figure.update_yaxes(type="linear", zeroline=True, title={"text": "effect: p clean − p ablated"}, row=2, col=1)
    figure.update_layout(legend=LEGEND)
    n = int(table["n"].max()) if len(table) else 0
    chosen = f"{n} of {len(study.texts)} prompts, stratum {stratum} · layers {layers}"
    shown = f"{chosen} · 95 % bootstrap intervals over prompts"
    return finish(
        figure,
        "Do credits foretell ablations?" if title is None else title,
        [study.caption(), shown],
        template=template,
        width=width,
        height=height,
        body=body,
        margin={"l": 30 + label_space(names, 12, 24), "b": 95, "t": 45},
    )


def _forest(table: Any, names: list[str], colours: Palette, *, show: bool) -> list[Any]:
    rows = [names.index(name) for name in table["score"]]
    estimate, low, high, chance = (table[c].to_numpy(float) for c in ("estimate", "low", "high", "chance"))
    details = [
        f"{number(a, '.3f')} [{number(b, '.3f')}, {number(c, '.3f')}], chance {number(d, '.3f')}<br>"
        f"p = {p:.2g}, Holm {h:.2g}, {n} prompts"
        for a, b, c, d, p, h, n in zip(
            estimate, low, high, chance, table["p"], table["p_holm"], table["n"], strict=True
        )
    ]
    return [
        go.Scatter(
            x=chance,
            y=rows,
            mode="markers",
            name="chance",
            showlegend=show,
            legendgroup="chance",
            hoverinfo="skip",
            marker={"symbol": "line-ns-open", "size": 12, "color": colours.neutral, "line": {"width": 2}},
        ),
        go.Scatter(
            x=estimate,
            y=rows,
            mode="markers",
            name="estimate, 95 % interval",
            showlegend=show,
            legendgroup="estimate",
            marker={"size": 9, "color": colours.lines[0]},
            customdata=details,
            error_x={
                "type": "data",
                "symmetric": False,
                "array": high - estimate,
                "arrayminus": estimate - low,
                "color": colours.lines[0],
                "thickness": 1.5,
                "width": 3,
            },
            hovertemplate=hover("<b>%{y}</b>", "%{customdata}"),
        ),
    ]


def _pooled(study: Any, colours: Palette) -> list[Any]:
    """Every layer of every prompt; those an onset rule names apart."""
    if "ig_lens" not in study.score_names:
        return []
    credit, effect = array(study.scores[study.score_names.index("ig_lens")]), array(study.effects)
    onset = np.zeros(credit.shape, bool)
    if "mass" in study.rules:
        named = array(study.onsets[study.rules.index("mass")]).astype(int)
        defined = np.flatnonzero(named >= 0)
        onset[defined, named[defined]] = True
    texts = np.array([[f"{full(label)}<br>{full(text)}" for label in study.labels] for text in study.texts], object)
    return [
        go.Scatter(
            x=credit[chosen], y=effect[chosen], mode="markers", name=name, marker=marker, text=texts[chosen],
            hovertemplate=hover("<b>%{text}</b>", "credit %{x:+.6f}", "effect %{y:+.6f}"),
        )
        for name, chosen, marker in (
            ("layer", ~onset, {"size": 5, "color": colours.lines[0], "opacity": 0.45}),
            ("onset (rule mass)", onset, {"size": 8, "symbol": "diamond", "color": colours.lines[1],
                                          "line": {"width": 0.5, "color": colours.ink}}),
        )
    ]  # fmt: skip


def _named(credit: np.ndarray, effect: np.ndarray, marked: int) -> set[int]:
    """The onset and the sites with the largest effects, without those whose names would cover another."""
    named = {marked} if marked >= 0 else set()
    height, width = 0.05 * (np.ptp(effect) or 1), 0.15 * (np.ptp(credit) or 1)
    for i in np.abs(effect).argsort(kind="stable")[::-1].tolist():
        free = all(abs(effect[i] - effect[j]) > height or abs(credit[i] - credit[j]) > width for j in named)
        if free and len(named) <= _NAMED:
            named.add(i)
    return named


def _row(result: Any, batch: int) -> int:
    size = len(result.p_clean)
    if isinstance(batch, bool) or not isinstance(batch, int) or not -size <= batch < size:
        fail("batch", f"between {-size} and {size - 1}", repr(batch), f"the result has {size} prompts")
    return batch % size


def _column(result: Any, credits: Any, row: int) -> int:
    """The column of the credits at the position that was ablated for."""
    place = int(result.positions[row])
    found = (credits.positions[row] == place).nonzero()[:, 0].tolist() if row < len(credits.positions) else []
    if not found or int(credits.targets[row, found[0]]) != int(result.targets[row]):
        rule = f"of the same prompts, at position {place} with the target {result.target_strings[row]!r}"
        fail("credits", rule, "others", "run ig_lens and ablate with the same input, targets and pos_slice")
    return int(found[0])


def _details(result: Any, row: int) -> list[str]:
    clean = float(result.p_clean[row])
    return [
        f"p {number(clean, '.6f')} → {number(float(ablated), '.6f')} when ablated<br>"
        f"effect {number(float(effect), '+.6f')} ({number(float(log), '+.3f')} in log p)"
        for ablated, effect, log in zip(
            result.p_ablated[:, row], result.effect[:, row], result.log_effect[:, row], strict=True
        )
    ]


def _heading(what: str, result: Any, row: int) -> str:
    target, token = result.target_strings[row], result.token_strings[row][int(result.positions[row])]
    return f"{what} “{visible(target)}” after “{visible(token)}” (place {int(result.positions[row])})"


def _caption(result: Any, row: int) -> str:
    return f"{result.caption()} · p clean {number(float(result.p_clean[row]), '.6f')}"
