"""Receipts and tables as plain HTML for notebooks; nothing a token says is markup, every character can be seen."""

import html
from collections.abc import Sequence
from typing import Any

import numpy as np

from .tokens import visible

_SMALL = 1e-3  # of the sum of sizes: smaller rows are gathered
CELLS = 12  # analysed tokens that a notebook shows of one result


def number(value: float, form: str) -> str:
    """A number as text: with a true minus sign, and with an exponent where all its digits would be zeros."""
    text = f"{value:{form}}"
    if value and not any(c in "123456789" for c in text):
        text = f"{value:{'+' if form.startswith('+') else ''}.1e}"
    return text.replace("-", "−")


def largest(sizes: Any, top: int) -> list[int]:
    """The rows that stand for themselves, in their own order: the ``top`` largest, none below a thousandth of all.

    Either all rows or at least two fewer, so that never a single one is gathered.
    """
    size = np.asarray(sizes)
    order = size.argsort(kind="stable")[::-1].tolist()
    n = min(top, int((size > _SMALL * size.sum()).sum()))
    return sorted(order if n >= len(order) - 1 else order[:n])


def table(title: str, rows: Sequence[Sequence[str]], head: Sequence[str] = (), marked: int = -1) -> str:
    """One table, its first column text and the others numbers; the ``marked`` row is bold."""
    titles = f"<thead><tr>{''.join(_cell(t, i, 'th') for i, t in enumerate(head))}</tr></thead>" if head else ""
    lines = []
    for r, row in enumerate(rows):
        line = "".join(_cell(text, i) for i, text in enumerate(row))
        lines.append(f"<tr style='font-weight:bold'>{line}</tr>" if r == marked else f"<tr>{line}</tr>")
    name = f"<caption>{html.escape(title)}</caption>" if title else ""
    style = "display:inline-table;vertical-align:top;margin:4px 12px 4px 0"
    return f"<table style='{style}'>{name}{titles}<tbody>{''.join(lines)}</tbody></table>"


def page(caption: str, tables: Sequence[str], left_out: str = "") -> str:
    """Tables under the line that says what the numbers are."""
    more = f"<p>{html.escape(left_out)}</p>" if left_out else ""
    return f"<div><p>{html.escape(caption)}</p>{more}{''.join(tables)}</div>"


def earlier(n_cells: int, what: str = "tokens") -> str:
    """What a page leaves out."""
    return f"… and {n_cells - CELLS} earlier {what}" if n_cells > CELLS else ""


def quoted(token: str, target: str) -> str:
    """A token and what is predicted after it, every character visible."""
    return f"{visible(token)} → {visible(target)}"


def _cell(text: str, column: int, tag: str = "td") -> str:
    return f"<{tag} style='text-align:{'right' if column else 'left'}'>{html.escape(text)}</{tag}>"
