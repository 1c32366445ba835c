"""What credits foretell of ablations: credit against effect, and a study's measures with their intervals."""

from typing import Any

import numpy as np
import plotly.graph_objects as go

from .._checks import fail
from ._labels import escape, full, shorten, ticks, visible
from ._style import AWAY, LEGEND, Palette, array, finish, label_space, number, palette, signed, unit

_NAMED = 5  # sites with the largest effects that are named in the figure
_ROW_PIXELS = 18


def ablation(
    study_or_result: Any,
    credits: Any = None,
    *,
    batch: int = 0,
    title: str | None = None,
    template: Any = None,
    width: int | None = None,
    height: int | None = None,
) -> go.Figure:
    """Effects of ablations beside the credits that should foretell them.

    * An AblationResult alone: the effect of every site in order of depth.
    * An AblationResult with ``credits``: one mark per site, credit against effect; the onset has a diamond.
    * An OnsetStudy: its measures with their intervals, and the line of chance.

    Args:
        study_or_result: what ``ablate`` or ``validate_onset`` returned.
        credits: an IGLensResult of the same prompts whose segments are the ablated sites.
        batch: which prompt.
    """
    shape = {"title": title, "template": template, "width": width, "height": height}
    if hasattr(study_or_result, "p_ablated"):
        if credits is None:
            return _effects(study_or_result, batch, **shape)
        return _against(study_or_result, credits, batch, **shape)
    fail("study_or_result", "an AblationResult or an OnsetStudy", type(study_or_result).__name__, "see ablate", TypeError)


def _effects(result: Any, batch: int, *, title: str | None, template: Any, width: Any, height: Any) -> go.Figure:
    row, colours = _row(result, batch), palette(template)
    effect = array(result.effect[:, row])
    figure = go.Figure(
        go.Bar(
            x=effect, y=list(range(len(effect))), orientation="h", name="effect",
            marker={"color": [colours.gain if v >= 0 else colours.loss for v in effect]},
            customdata=_details(result, row),
            hovertemplate="<b>%{y}</b><br>%{customdata}<extra></extra>",
        )
    )  # fmt: skip
    every = int(np.ceil(len(effect) / 60))
    figure.update_yaxes(**ticks(result.labels, every=every), **AWAY, showgrid=False, title={"text": "ablated site"})
    figure.update_xaxes(type="linear", zeroline=True, title={"text": "effect: p clean − p ablated"})
    figure.update_layout(bargap=0.2)
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
        fail("credits", f"of segments such as {result.labels[0]!r}", f"segments such as {credits.labels[0]!r}", todo)
    where = [credits.labels.index(label) for label in shared]
    credit = array(credits.attribution[:, row, column])[where]
    effect = array(result.effect[:, row])[[result.labels.index(label) for label in shared]]
    onset = int(credits.onset().index[row, column])
    marked = shared.index(credits.labels[onset]) if onset >= 0 and credits.labels[onset] in shared else -1
    named = _named(credit, effect, marked)
    quantity, details = credits.info.quantity, _details(result, row)
    notes = dict(zip(result.labels, details, strict=True))
    plain, figure = [i for i in range(len(shared)) if i != marked], go.Figure()
    for name, chosen, marker in (
        ("segment", plain, {"size": 9, "color": colours.lines[0], "line": {"width": 1, "color": colours.paper}}),
        ("onset (rule mass)", [marked] if marked >= 0 else [],
         {"size": 13, "symbol": "diamond", "color": colours.lines[1], "line": {"width": 1.5, "color": colours.ink}}),
    ):  # fmt: skip
        figure.add_trace(
            go.Scatter(
                x=credit[chosen], y=effect[chosen], mode="markers+text", name=name, marker=marker, showlegend=True,
                text=[full(shared[i]) if i in named else "" for i in chosen], 
                textposition=["middle left" if credit[i] > np.ptp(credit) / 2 + credit.min() else "middle right" for i in chosen],
                customdata=[[full(shared[i]), notes[shared[i]]] for i in chosen], cliponaxis=False,
                hovertemplate=f"<b>%{{customdata[0]}}</b><br>credit %{{x:{signed(quantity)}}}<br>%{{customdata[1]}}<extra></extra>",
            )
        )  # fmt: skip
    figure.update_xaxes(type="linear", zeroline=True, title={"text": f"credit ({unit(quantity)})"})
    figure.update_yaxes(type="linear", zeroline=True, title={"text": "effect: p clean − p ablated"})
    figure.update_layout(legend=LEGEND)
    return finish(
        figure, _heading("Credit against effect for", result, row) if title is None else title,
        [credits.caption(), _caption(result, row)], template=template, width=width, height=height, body=430,
        margin={"l": 75, "b": 95, "t": 35},
    )  # fmt: skip


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
    info = result.info
    reference = "" if info.reference in ("", "none") else f" · reference {shorten(str(info.reference), 40)}"
    return (
        f"effect on prob · {info.unit} · mode {info.mode} at {info.at}{reference} · {info.model} · "
        f"p clean {number(float(result.p_clean[row]), '.6f')}"
    )
