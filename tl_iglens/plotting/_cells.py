"""Which analysed cells of a result a figure shows, and what their tokens are called."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from .._checks import fail
from ._labels import visible


@dataclass(frozen=True)
class Columns:
    """The analysed positions of one row of the batch, in order."""

    batch: int
    index: tuple[int, ...]  # columns of ``attribution``
    places: tuple[int, ...]  # places in the prompt
    tokens: tuple[str, ...]
    targets: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.index)

    @property
    def quoted(self) -> str:
        """The last of the cells in words, as text that is not yet escaped."""
        return f"“{visible(self.targets[-1])}” {self.after}"

    @property
    def after(self) -> str:
        """Where the last of the cells stands, in words."""
        return f"after “{visible(self.tokens[-1])}” (place {self.places[-1]})"

    def of(self, values: Any) -> Any:
        """The values ``[..., batch, pos]`` of these columns, ``[..., column]``."""
        return values.detach()[..., self.batch, list(self.index)]


def columns(result: Any, batch: int = 0, last: int | None = None) -> Columns:
    """The analysed positions of a row: all of them, or the last few."""
    size = int(result.positions.shape[0])
    row = _index("batch", batch, size, "rows")
    index = tuple(int(i) for i in (result.positions[row] >= 0).nonzero()[:, 0])
    index = index if last is None else index[-last:]
    places = tuple(int(result.positions[row, i]) for i in index)
    return Columns(
        row,
        index,
        places,
        tuple(result.token_strings[row][place] for place in places),
        tuple(result.target_strings[row][i] for i in index)
        if hasattr(result, "target_strings")
        else ("",) * len(index),
    )


def one(result: Any, batch: int = 0, pos: int = -1) -> Columns:
    """One analysed position of a row; ``pos`` counts the analysed ones, −1 is the last of them."""
    every = columns(result, batch)
    i = _index("pos", pos, len(every), "analysed positions")
    return Columns(every.batch, (every.index[i],), (every.places[i],), (every.tokens[i],), (every.targets[i],))


def _index(argument: str, value: Any, size: int, what: str) -> int:
    whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not whole or not -size <= value < size:
        fail(argument, f"between {-size} and {size - 1}", repr(value), f"the result has {size} {what}")
    return int(value) % size


def is_path(result: Any) -> bool:
    """Whether rows are the segments of a path, rather than components that share segments."""
    return not getattr(result, "segment_of", ()) and len(result.levels) == len(result.labels) + 1


def ends(result: Any) -> tuple[Any, Any] | None:
    """Levels at the two ends of every row's segment; None where that is not known."""
    if is_path(result):
        return result.levels[:-1], result.levels[1:]
    if segments := list(getattr(result, "segment_of", ())):
        return result.levels[segments], result.levels[[s + 1 for s in segments]]
    return None


def check_same_cells(argument: str, values: Any, result: Any, todo: str) -> None:
    """Values ``[row, batch, pos]`` of another analysis belong to the positions of ``result``."""
    if tuple(values.shape[1:]) != tuple(result.attribution.shape[1:]):
        want = ", ".join(map(str, result.attribution.shape[1:]))
        fail(
            argument,
            f"of the same prompts and positions, [row, {want}]",
            f"shape {tuple(values.shape)}",
            todo,
        )
