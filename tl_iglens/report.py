"""write_report: a result as one HTML page that needs neither network nor Python.

The page shows the prompt with each token shaded by its onset, the receipt of the token under the mouse, the
heatmap and a table. Plotly's script stands in it once. A content security policy forbids the page every
connection, and links to other sites are taken out of the script, so that opening it reaches nothing.
"""

import base64
import html
import json
import re
from dataclasses import asdict
from importlib.resources import files
from itertools import groupby
from pathlib import Path as FilePath
from typing import Any

import numpy as np
import torch
from plotly.offline import get_plotlyjs

from ._checks import fail
from ._html import number
from .files import replaced
from .plotting._cells import columns
from .plotting._labels import HOVER_LENGTH, shorten, visible
from .plotting._style import UNITS, array, hover, palette
from .plotting.heatmap import draw
from .result import IGLensResult

_PAGE_BYTES = 5_900_000  # the largest page
_TOKEN_BYTES = 650  # of one token in the prompt, the table, the receipts and the heatmap, beside its credits
_SHOWN_AROUND = 200  # tokens beside an analysed one that are shown without being analysed
_ROW_BYTES = 6_000  # of the layout of one more heatmap
_EARLY, _LATE = (255, 240, 178), (24, 74, 140)


def write_report(
    result: IGLensResult,
    path: str | FilePath,
    *,
    title: str | None = None,
    onset_rule: str = "mass",
    fraction: float = 0.5,
) -> FilePath:
    """Write a result as one self-contained HTML page below 6 MB and return its path.

    Of results too large for that, each prompt's last tokens are shown, and the page says how many; ``save``
    keeps all of them.

    Args:
        result: what ``ig_lens``, ``explain_generation`` or ``direct_probability_attribution`` returned, ``[segment, batch, pos]``.
        path: the file to write; an existing one is replaced.
        title: shown literally.
        onset_rule, fraction: as for ``result.onset``.

    Raises: ValueError where ``path`` is a folder, OSError where it cannot be written.
    """
    path = FilePath(path)
    if path.is_dir():
        fail("path", "a file to write", f"the folder {path}", "name a file in it, such as report.html")
    page = _page(result, title, onset_rule, fraction)
    with replaced(path) as partial:
        partial.write_text(page, "utf-8", errors="xmlcharrefreplace")
    return path


def _page(result: IGLensResult, title: str | None, rule: str, fraction: float) -> str:
    """The whole page, with as many tokens as fit."""
    script = _script()
    budget = _PAGE_BYTES - len(script.encode())
    while True:
        rows, per_row = _share(result, budget)
        page = _filled(result, title, rule, fraction, script, rows, per_row)
        size = len(page.encode("utf-8", "xmlcharrefreplace"))
        if size <= _PAGE_BYTES or len(rows) * per_row == 1:
            return page
        # long tokens took more than their share
        budget = int(0.9 * budget * min(1.0, (_PAGE_BYTES - len(script)) / (size - len(script))))


def _filled(
    result: IGLensResult, title: str | None, rule: str, fraction: float, script: str, rows: list[int], per_row: int
) -> str:
    cells = [cell for b in rows for cell in _cells(result, b, per_row)]
    onset = result.onset(rule, fraction)
    left_out = int(result.present.sum()) - len(cells)
    note = ""
    if left_out:
        where = f" of each of {len(rows)} of {len(result.positions)} prompts" if len(result.positions) > 1 else ""
        note = (
            f"<p class='soft'><b>{left_out} analysed tokens are not on this page</b>, to keep it below 6 MB: "
            f"it shows the last {per_row}{where}, and sums over tokens are sums over those.</p>"
        )
    shades = [_shade(i / max(1, len(result.labels) - 1)) for i in range(len(result.labels))]
    parts = {
        "title": html.escape(title if title is not None else "IG-Lens report"),
        "caption": html.escape(result.caption()),
        "note": note,
        "rule": html.escape(f"rule {rule}" + ("" if rule == "largest" else f", fraction {fraction:g}")),
        "first": _text(result.labels[0]),
        "last": _text(result.labels[-1]),
        "shades": "\n".join(
            f".o{i} {{ background: {back}; color: {ink} !important; }}" for i, (back, ink) in enumerate(shades)
        ),
        "gradient": ", ".join(back for back, _ in shades) if len(shades) > 1 else f"{shades[0][0]}, {shades[0][0]}",
        "prompts": "\n".join(_prompt(result, b, cells, onset) for b in rows),
        "table": _table(result, cells, onset),
        "about": _about(result),
        "plotly": script,
        "data": _json(_data(result, rows, cells, onset, rule, fraction)),
    }
    template = files("tl_iglens.plotting").joinpath("page.html").read_text("utf-8")
    # one pass, so that nothing a token says can stand for a part of the page
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], template)


def _script() -> str:
    """The installed plotly's own script without the links it would show on maps."""

    return re.sub(r"((?:src|href)=\\?[\"'])https?://[^\"'\\]*", r"\1#", get_plotlyjs())


def _share(result: IGLensResult, budget: int) -> tuple[list[int], int]:
    """The prompts on the page, and how many of the last tokens of each."""
    per_token = _TOKEN_BYTES + int(result.attribution.itemsize * len(result.labels) * 4 / 3)
    lengths = result.present.sum(1).tolist()
    rows = list(range(min(len(lengths), max(1, budget // (2 * (_ROW_BYTES + 12 * len(result.labels)))))))
    left = budget - len(rows) * (_ROW_BYTES + 12 * len(result.labels))
    per_row = max(1, left // (per_token * len(rows)))
    return rows, min(per_row, max(lengths))


def _cells(result: IGLensResult, b: int, per_row: int) -> list[tuple[int, int]]:
    return [(b, p) for p in result.present[b].nonzero()[:, 0].tolist()][-per_row:]


def _text(text: str) -> str:
    """A token or label as HTML that shows every character."""

    return html.escape(visible(text))


def _prompt(result: IGLensResult, b: int, cells: list[tuple[int, int]], onset: Any) -> str:
    """The tokens of a prompt, those on the page as buttons with the shade of their onset."""
    cell_at = {int(result.positions[cell]): i for i, cell in enumerate(cells) if cell[0] == b}
    pieces = []
    places = result.attention_mask[b].nonzero()[:, 0].tolist()
    hidden = _unread(places, set(cell_at))
    for place in places:
        text = result.token_strings[b][place]
        if place in hidden:
            if hidden[place]:
                pieces.append(f"<span class='soft'>… {hidden[place]} tokens …</span> ")
            continue
        if place in cell_at:
            segment = int(onset.index[cells[cell_at[place]]])
            shade = f"o{segment}" if segment >= 0 else "o-none"
            pieces.append(
                f"<button type='button' class='tok {shade}' data-cell='{cell_at[place]}'>{_text(text)}</button>"
            )
        else:
            pieces.append(f"<span class='tok'>{_text(text)}</span>")
        pieces.append("<br>" if text.endswith("\n") else "<wbr>")
    name = f"<p class='soft'>prompt {b}</p>" if len(result.positions) > 1 else ""
    return f"{name}<div class='prompt'>{''.join(pieces)}</div>"


def _unread(places: list[int], analysed: set[int]) -> dict[int, int]:
    """The middle of long runs of tokens that were not analysed: how many at its first place, 0 at the others."""
    hidden: dict[int, int] = {}
    for is_analysed, run in groupby(places, key=analysed.__contains__):
        middle = [] if is_analysed else list(run)[_SHOWN_AROUND:-_SHOWN_AROUND]
        hidden |= {place: len(middle) if i == 0 else 0 for i, place in enumerate(middle)}
    return hidden


def _table(result: IGLensResult, cells: list[tuple[int, int]], onset: Any) -> str:
    head = [
        "prompt",
        "place",
        "token",
        "target",
        "start",
        "end",
        "model",
        "Δ",
        "onset",
        "largest credit",
        "Σ|credit| / |Δ|",
    ]
    several = len(result.positions) > 1
    deltas, cancellation, largest_of = result.delta, result.cancellation, result.attribution.abs().argmax(0)
    rows = []
    for i, (b, p) in enumerate(cells):
        place, delta, largest = int(result.positions[b, p]), float(deltas[b, p]), int(largest_of[b, p])
        columns = [
            *([_cell(str(b), "n")] if several else []),
            _cell(str(place), "n"),
            _cell(_text(result.token_strings[b][place]), "mono"),
            _cell(_text(result.target_strings[b][p]), "mono"),
            *(
                _cell(_number(result, v), "n")
                for v in (result.levels[0, b, p], result.levels[-1, b, p], result.model_level[b, p])
            ),
            _cell(_number(result, delta, signed=True), "n"),
            _cell(_text(onset.labels[b][p])),
            _cell(
                f"{_text(result.labels[largest])} " + _number(result, result.attribution[largest, b, p], signed=True)
            ),
            _cell(f"{float(cancellation[b, p]):.2f}".replace("nan", "undefined"), "n"),
        ]
        rows.append(f"<tr data-cell='{i}'>{''.join(columns)}</tr>")
    numeric = {"prompt", "place", "start", "end", "model", "Δ", "Σ|credit| / |Δ|"}
    titles = "".join(
        f"<th class='{'n' * (name in numeric)}'>{name}</th>" for name in head if several or name != "prompt"
    )
    return f"<table id='tokens'><thead><tr>{titles}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _cell(content: str, kind: str = "") -> str:
    return f"<td class='{kind}'>{content}</td>" if kind else f"<td>{content}</td>"


def _digits(result: IGLensResult) -> int:
    return 6 if result.info.quantity == "prob" else 4


def _number(result: IGLensResult, value: Any, *, signed: bool = False) -> str:

    return number(float(value), f"{'+' if signed else ''}.{_digits(result)}f")


def _about(result: IGLensResult) -> str:
    known = asdict(result.info)
    rows = [
        (name.replace("_", " "), value if not isinstance(value, tuple) else "; ".join(value))
        for name, value in known.items()
    ]
    body = "".join(
        f"<dt>{html.escape(name)}</dt><dd>{_text(str(value))}</dd>" for name, value in rows if value not in ("", ())
    )
    return f"<dl>{body}</dl>"


def _data(
    result: IGLensResult,
    rows: list[int],
    cells: list[tuple[int, int]],
    onset: Any,
    rule: str,
    fraction: float,
) -> dict[str, Any]:
    """What the page's script needs; credits as the bytes of the result's own numbers, token by token."""

    chosen = torch.tensor(cells)
    credits = array(result.attribution[:, chosen[:, 0], chosen[:, 1]].T)  # [cell, segment]
    facts = []
    row_of = {b: i for i, b in enumerate(rows)}
    for b, p in cells:
        place = int(result.positions[b, p])
        facts.append(
            {
                "row": row_of[b],
                "place": place,
                "token": shorten(visible(result.token_strings[b][place]), HOVER_LENGTH),
                "target": shorten(visible(result.target_strings[b][p]), HOVER_LENGTH),
                "start": _float(result.levels[0, b, p]),
                "end": _float(result.levels[-1, b, p]),
                "model": _float(result.model_level[b, p]),
                "onset": int(onset.index[b, p]),
            }
        )
    colours = {name: palette(template) for name, template in (("light", "plotly_white"), ("dark", "plotly_dark"))}
    return {
        "labels": [visible(label) for label in result.labels],
        "start": visible(result.point_labels[0]),
        "end": visible(result.point_labels[-1]),
        "unit": UNITS[result.info.quantity],
        "digits": _digits(result),
        "muted": "#8a94a1",
        "bits": 8 * credits.itemsize,
        "credits": base64.b64encode(
            np.ascontiguousarray(credits).astype(credits.dtype.newbyteorder("<")).tobytes()
        ).decode(),
        "cells": facts,
        "figures": [_figure(result, b, [c for c in cells if c[0] == b], cells, rule, fraction) for b in rows],
        "palettes": {
            n: {k: getattr(c, k) for k in ("gain", "loss", "paper", "ink", "scale")} for n, c in colours.items()
        },
    }


def _figure(
    result: IGLensResult,
    b: int,
    own: list[tuple[int, int]],
    cells: list[tuple[int, int]],
    rule: str,
    fraction: float,
) -> dict[str, Any]:
    """The heatmap of one prompt without its numbers, which the page takes from the credits."""

    shown = columns(result, b, len(own))
    figure = draw(result, shown, onset_rule=rule, fraction=fraction, template="none", title="")
    known = json.loads(figure.to_json())
    for trace in known["data"]:
        for name in ("z", "customdata", "hovertext", "text") if trace["type"] == "heatmap" else ("customdata",):
            trace.pop(name, None)
    grid, over, across = known["data"][0], known["data"][2], known["data"][3]
    form = f"+.{_digits(result)}f"
    grid["hovertemplate"] = hover("<b>%{x}</b>", "segment %{y}", f"credit %{{z:{form}}}")
    grid.pop("texttemplate", None)
    over["hovertemplate"] = hover("<b>%{x}</b>", f"Σ over segments %{{y:{form}}}")
    across["hovertemplate"] = hover("<b>%{y}</b>", f"Σ over tokens %{{x:{form}}}")
    layout = known["layout"]
    taken = 21 * (layout["title"]["text"].count("<br>") + 1)  # by title and caption, which the page has
    layout["margin"]["t"] -= taken
    layout["height"] -= taken
    for name in ("title", "template", "width"):
        layout.pop(name, None)
    return {
        "data": known["data"],
        "layout": layout,
        "first": cells.index(own[0]),
        "count": len(own),
        "row": b,
    }


def _shade(share: float) -> tuple[str, str]:
    """Background and text colour for a depth between 0 (early, pale) and 1 (late, dark)."""
    mixed = [round(early + (late - early) * share) for early, late in zip(_EARLY, _LATE, strict=True)]
    bright = float(np.dot(mixed, (0.299, 0.587, 0.114)))
    return f"rgb({', '.join(map(str, mixed))})", "#111111" if bright > 140 else "#ffffff"


def _float(value: Any) -> float | None:
    plain = float(value)
    return plain if np.isfinite(plain) else None


def _json(value: Any) -> str:
    """JSON that cannot end the script element it stands in."""
    text = json.dumps(value, allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
