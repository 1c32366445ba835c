"""Text that a figure shows as it stands: markup, math, white space, control characters and duplicates.

Plotly reads ``<b>``, ``&amp;`` and, where MathJax is loaded, ``$…$`` in every text. Here all of it is
written as character references, which it turns back into plain characters after it has looked for markup.
Labels never serve as coordinates: axes count 0, 1, 2, … and show the labels in their place, so that equal,
numeric or date-like labels stay apart and in order.
"""

from collections.abc import Sequence
from typing import Any

from ..tokens import visible

TICK_LENGTH = 16  # characters of a label on an axis; hover shows the rest
HOVER_LENGTH = 120

_ESCAPES = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;", "$": "&#36;", "%": "&#37;"})


def escape(text: str) -> str:
    """Text that plotly draws literally."""
    return text.translate(_ESCAPES)


def shorten(text: str, length: int) -> str:
    """The beginning of a text, with ``…`` where something was cut."""
    return text if len(text) <= length else text[: length - 1] + "…"


def tick(text: str, length: int = TICK_LENGTH) -> str:
    """A token or label as tick text."""
    return escape(shorten(visible(text), length))


def full(text: str) -> str:
    """A token or label as hover text."""
    return escape(shorten(visible(text), HOVER_LENGTH))


def ticks(labels: Sequence[str], length: int = TICK_LENGTH, every: int = 1) -> dict[str, Any]:
    """A linear axis 0, 1, 2, … that shows labels; of every ``every``-th one, the last always among them."""
    shown = list(range(len(labels)))[::-1][::every][::-1]
    return {
        "type": "linear",
        "tickmode": "array",
        "tickvals": shown,
        "ticktext": [tick(labels[i], length) for i in shown],
        "range": [-0.5, len(labels) - 0.5],
        "zeroline": False,
    }


def turned(labels: Sequence[str], most: int = 10) -> dict[str, Any]:
    """Small tick labels, upright where there are more than ``most`` of them."""
    return {"tickangle": -90 if len(labels) > most else 0, "tickfont": {"size": 11}}


def aliases(labels: Sequence[str], length: int = TICK_LENGTH) -> dict[str, Any]:
    """A category axis 0, 1, 2, … that shows as many of the labels as fit, whatever part of it is in view."""
    return {
        "type": "category",
        "categoryorder": "array",
        "categoryarray": list(range(len(labels))),
        "labelalias": {str(i): tick(label, length) for i, label in enumerate(labels)},
        "range": [-0.5, len(labels) - 0.5],
    }
