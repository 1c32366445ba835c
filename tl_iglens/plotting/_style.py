"""Colours, number formats, caption and layout that all figures share."""

import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import plotly.graph_objects as go
import plotly.io as pio
from torch import Tensor

from .._checks import fail
from ._labels import TICK_LENGTH, escape, visible

# Blue and orange differ for every common form of colour blindness; each pair reads on its background.
_LIGHT = ("#2166ac", "#92c5de", "#f7f7f7", "#fdb863", "#b35806")
_DARK = ("#8ccbff", "#35729e", "#262626", "#a35a12", "#ffb870")
_LINES_LIGHT = ("#0072b2", "#d55e00", "#009e73", "#9b4f8e", "#8a6d00", "#4d4d4d")
_LINES_DARK = ("#56b4e9", "#ff9a4d", "#2fd6a5", "#e5a0d0", "#f0e442", "#bdbdbd")
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")

UNITS = {"prob": "probability", "log_prob": "log-probability (nats)", "logit": "logit"}
_DEFAULT_WIDTH = 860  # what captions are wrapped for where no width is given
_CAPTION_SIZE = 12


@dataclass(frozen=True)
class Palette:
    """Colours for one kind of background."""

    dark: bool
    gain: str
    loss: str
    neutral: str
    ink: str
    paper: str
    lines: tuple[str, ...]
    scale: tuple[tuple[float, str], ...]  # diverging, loss to gain


def palette(template: Any) -> Palette:
    """Colours for the template, or for plotly's default one where it is None."""
    dark = _is_dark(pio.templates.default if template is None else template)
    strong, pale, middle, pale_loss, strong_loss = _DARK if dark else _LIGHT
    stops = (strong_loss, pale_loss, middle, pale, strong)
    return Palette(
        dark=dark,
        gain=strong,
        loss=strong_loss,
        neutral="#9a9a9a" if dark else "#7a7a7a",
        ink="#f2f2f2" if dark else "#1a1a1a",
        paper="#1a1a1a" if dark else "#ffffff",
        lines=_LINES_DARK if dark else _LINES_LIGHT,
        scale=tuple(zip((0.0, 0.25, 0.5, 0.75, 1.0), stops, strict=True)),
    )


def _is_dark(template: Any) -> bool:
    if template is None:
        return False
    paper = go.Layout(template=template).template.layout.paper_bgcolor
    return isinstance(paper, str) and _luminance(paper) < 0.4


def _luminance(colour: str) -> float:
    """Rough brightness, 0 to 1, of ``#rgb``, ``#rrggbb`` or ``rgb(…)``; 1 for other names than black."""
    if colour.startswith("#"):
        digits = colour[1:] if len(colour) > 4 else "".join(c * 2 for c in colour[1:])
        values = [int(digits[i : i + 2], 16) for i in (0, 2, 4)]
    elif colour.startswith("rgb"):
        parts = [float(v) for v in colour[colour.index("(") + 1 : -1].split(",")]
        if len(parts) == 4 and parts[3] == 0:  # see-through: the page decides
            return 1.0
        values = [int(v) for v in parts[:3]]
    else:
        return 0.0 if colour == "black" else 1.0
    return float(np.dot(values, (0.299, 0.587, 0.114)) / 255)


def array(values: Any) -> np.ndarray:
    """A numpy array that plotly can take: float64 stays, every other number becomes float32."""
    if isinstance(values, Tensor):
        values = values.detach().cpu()
        return (values if str(values.dtype) == "torch.float64" else values.float()).numpy()
    values = np.asarray(values)
    return values if values.dtype == np.float64 else values.astype(np.float32)


def limit(*values: Any) -> float:
    """The largest finite |value|: both ends of a scale that is symmetric about 0."""
    finite = [np.abs(v[np.isfinite(v)]) for v in map(np.asarray, values)]
    largest = max((float(v.max()) for v in finite if v.size), default=0.0)
    return largest or 1.0


def signed(quantity: str) -> str:
    """d3 format of a credit."""
    return "+.6f" if quantity == "prob" else "+.4f"


def plain(quantity: str) -> str:
    """d3 format of a level."""
    return signed(quantity).removeprefix("+")


def hover(*lines: str, name: str = "") -> str:
    """A hover template: lines, and what stands in the box beside them.

    Earlier plotly puts a ``~`` before formats that begin with a sign, which then mean nothing; a fill in front
    of the sign changes no number and keeps it away.
    """
    return re.sub(r"(%\{[^}:]*:)\+", r"\g<1>0>+", f"{'<br>'.join(lines)}<extra>{name}</extra>")


def unit(quantity: str) -> str:
    """The unit of a quantity, as an axis names it."""
    return UNITS.get(quantity, quantity)


def check_size(width: Any, height: Any) -> None:
    """Sizes are pixels plotly accepts."""
    for name, value in (("width", width), ("height", height)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or value < 10):
            fail(name, "None or at least 10 pixels", repr(value), "None lets the figure choose")


def finish(
    figure: go.Figure,
    title: str,
    caption: Sequence[str],
    *,
    template: Any = None,
    width: Any = None,
    height: Any = None,
    body: int = 400,
    margin: Mapping[str, int] | None = None,
) -> go.Figure:
    """Title, caption lines and size; the caption stands under the title, where no tick label can reach it.

    ``body`` is the height of the plotting area where no ``height`` is given, ``margin`` the space around it
    (``t``: below the caption).
    """
    check_size(width, height)
    space = {"l": 70, "r": 30, "t": 20, "b": 60, **(margin or {})}
    text, lines = _heading(title, caption, width)
    space["t"] += 18 + 21 * lines
    if template is not None:
        figure.layout.template = template
    figure.update_annotations(font={"size": 13})
    figure.update_layout(
        title={
            "text": text, "x": 0, "xref": "container", "xanchor": "left", "y": 1, "yref": "container",
            "yanchor": "top", "pad": {"l": 16, "t": 26},  # to the first line's baseline, as it has several
            "font": {"size": 16},
        },
        margin=space,
        width=width,
        height=height or body + space["t"] + space["b"],
        hoverlabel={"align": "left", "namelength": -1},
    )  # fmt: skip
    return figure


def _heading(title: str, caption: Sequence[str], width: Any) -> tuple[str, int]:
    """Title and caption as one text, broken to fit the width, and its number of lines."""
    per_line = max(20, int(((width or _DEFAULT_WIDTH) - 40) / (_CAPTION_SIZE * 0.53)))
    lines = [part for line in caption for part in _wrapped(line, per_line)]
    heading = textwrap.wrap(title, max(15, int(per_line * 0.7))) or [""]
    text = "<br>".join(map(escape, heading))
    text += "".join(f"<br><span style='font-size:{_CAPTION_SIZE}px'>{escape(line)}</span>" for line in lines)
    return text, len(heading) + len(lines)


def _wrapped(line: str, length: int) -> list[str]:
    """Lines broken between the parts of a caption, and inside one only where it is too long itself."""
    lines: list[str] = []
    for part in filter(None, line.split(" · ")):
        if lines and len(lines[-1]) + len(part) + 3 <= length:
            lines[-1] += f" · {part}"
        else:
            lines += textwrap.wrap(part, length)
    return lines


def label_space(labels: Sequence[str], size: int = 11, longest: int = TICK_LENGTH) -> int:
    """Pixels that the longest of some tick labels takes."""
    return int(max((min(len(visible(label)), longest) for label in labels), default=1) * size * 0.62) + 10


# labels keep a little distance from the axis
AWAY = {"ticks": "outside", "tickcolor": "rgba(0,0,0,0)", "ticklen": 5}
LEGEND = {
    "orientation": "h",
    "x": 1,
    "xanchor": "right",
    "xref": "container",
    "y": 0,
    "yanchor": "bottom",
    "yref": "container",
}
