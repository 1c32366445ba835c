"""Cells that are read together: parts of a batch whose activations fit in memory at the same time."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from jaxtyping import Int
from torch import Tensor

from ._types import Hooks
from .collect import ResidualStates, collect_prompts, micro_batches
from .readout import MIB
from .tokens import Prompts

BUDGET = 64 * MIB  # activations held beside the states, and what is made of them


@dataclass(frozen=True)
class Window:
    """Some rows and columns of the analysed cells."""

    rows: slice
    columns: slice

    def of(self, values: Tensor) -> Tensor:
        """The window of a tensor [..., batch, pos]."""
        return values[..., self.rows, self.columns]


@dataclass(frozen=True)
class WindowReader:
    """States and component outputs of a window, from the states given or from a forward of its own."""

    model: Any
    prompts: Prompts
    positions: Int[Tensor, "batch pos"]
    states: ResidualStates | None
    hooks: tuple[str, ...]
    fwd_hooks: Hooks
    batch_size: int | None

    def windows(self, cell_bytes: int) -> Iterator[Window]:
        """Runs of rows, or of columns of one row, whose cells fit in the budget; none without a position."""
        width = int(self.positions.shape[1])
        fits = max(1, BUDGET // max(cell_bytes, 1))
        for rows in micro_batches(self.prompts, self.batch_size):
            n_rows = max(1, min(rows.stop - rows.start, fits // width))
            for first in range(rows.start, rows.stop, n_rows):
                part = slice(first, min(first + n_rows, rows.stop))
                for column in range(0, width, min(width, fits)):
                    window = Window(part, slice(column, min(column + fits, width)))
                    if bool((window.of(self.positions) >= 0).any()):
                        yield window

    def read(self, window: Window) -> ResidualStates:
        """States of the window's cells; states given without the hooks get them from one more forward."""
        cells = window.of(self.positions)
        if self.states is None:
            return self._forward(window, cells, self.fwd_hooks)
        states = self.states
        if window.rows != slice(0, len(self.positions)):
            states = rows_of(states, window.rows)
        states = states.at(cells)
        missing = [name for name in self.hooks if name not in states.extra]
        if missing:
            states = replace(states, extra={**self._forward(window, cells, ()).extra, **states.extra})
        return states

    def _forward(self, window: Window, cells: Tensor, fwd_hooks: Hooks) -> ResidualStates:
        part = Prompts(self.prompts.ids[window.rows], self.prompts.mask[window.rows])
        return collect_prompts(self.model, part, cells, False, None, fwd_hooks, self.hooks)


def rows_of(states: ResidualStates, rows: slice) -> ResidualStates:
    """The same states for some rows of the batch."""
    output = states.output
    return replace(
        states,
        resid=states.resid[:, rows],
        mean=states.mean[:, rows],
        first=states.first[:, rows],
        prompts=Prompts(states.prompts.ids[rows], states.prompts.mask[rows]),
        positions=states.positions[rows],
        output=replace(
            output,
            log_z=output.log_z[rows],
            top=output.top[rows],
            logits=None if output.logits is None else output.logits[rows],
        ),
        extra={name: act[rows] for name, act in states.extra.items()},
    )
