"""Text that a figure shows as it stands: markup, math, white space, control characters and duplicates.

Plotly reads ``<b>``, ``&amp;`` and, where MathJax is loaded, ``$…$`` in every text. Here all of it is
written as character references, which it turns back into plain characters after it has looked for markup.
Labels never serve as coordinates: axes count 0, 1, 2, … and show the labels in their place, so that equal,
numeric or date-like labels stay apart and in order.
"""

import unicodedata
from collections.abc import Sequence
from typing import Any

from ..tokens import token_label

TICK_LENGTH = 16  # characters of a label on an axis; hover shows the rest
HOVER_LENGTH = 120

_ESCAPES = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;", "$": "&#36;", "%": "&#37;"})
_UNSEEN = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp", "Zs")  # controls, formats, surrogates, rare spaces


def escape(text: str) -> str:
    """Text that plotly draws literally."""
    return text.translate(_ESCAPES)


def visible(text: str) -> str:
    """Token text in which every character can be seen: spaces as ``·``, controls as ``<U+000C>``."""
    shown = []
    for place, char in enumerate(token_label(text)):
        kind = unicodedata.category(char)
        if kind in _UNSEEN and char != " ":
            shown.append(f"<U+{ord(char):04X}>")
        else:  # a mark that would sit on the character before it gets a place of its own
            shown.append("◌" + char if place == 0 and kind.startswith("M") else char)
    return "".join(shown)


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


def aliases(labels: Sequence[str], length: int = TICK_LENGTH) -> dict[str, Any]:
    """A category axis 0, 1, 2, … that shows as many of the labels as fit, whatever part of it is in view."""
    return {
        "type": "category",
        "categoryorder": "array",
        "categoryarray": list(range(len(labels))),
        "labelalias": {str(i): tick(label, length) for i, label in enumerate(labels)},
        "range": [-0.5, len(labels) - 0.5],
    }
