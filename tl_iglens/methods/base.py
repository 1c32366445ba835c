"""What every method of a comparison is given, and what it gives back."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from .._types import compute_dtype
from ..collect import ResidualStates, model_level_logits
from ..path import Path, Point
from ..quantity import Objective
from ..readout import Readout
from ..result import IGLensResult
from ..tokens import token_text

Kind = Literal["level", "additive"]

UNITS = {"prob": "probability", "log_prob": "log-probability", "logit": "logit"}
NO_POINT = ""


@dataclass(frozen=True)
class Question:
    """One model, one forward, the same positions and targets for every method.

    ``objective`` is the scalar f that is asked about (softmax probability unless the caller chose another
    quantity), ``path`` the boundaries it is asked at, ``receipt`` the IG-Lens answer to the same question.
    Lives as long as one call of ``compare``; results keep no reference to it.
    """

    model: Any
    readout: Readout
    states: ResidualStates
    path: Path
    objective: Objective
    receipt: IGLensResult
    progress: bool = False

    @property
    def n_layers(self) -> int:
        return self.path.n_layers

    @property
    def unit(self) -> str:
        return UNITS[self.objective.quantity]

    @property
    def bounds(self) -> tuple[int, ...]:
        """The boundaries of the path from 0 to n_layers, without the states inside blocks."""
        inner = [p.block for p in self.path.states if not p.mid]
        return tuple(inner) if inner[0] == 0 else (0, *inner)

    @property
    def flat_objective(self) -> Objective:
        """The objective at the analysed cells, in one row."""
        present = self.states.present
        return Objective(self.objective.quantity, self.objective.ids[present], self.objective.sign[present])

    def at(self, points: tuple[Point, ...]) -> Float[Tensor, "point cell d_model"]:
        """States of the run at some points, analysed cells in one row."""
        resid = self.states.resid[[self.states.index(point) for point in points]]
        return resid[:, self.states.present.to(resid.device)]

    def cells(self, values: Tensor, fill: float | int = torch.nan) -> Tensor:
        """Values [row, cell, ...] laid out as [row, batch, pos, ...] on the CPU, ``fill`` elsewhere."""
        present = self.states.present
        dtype = compute_dtype(self.states.resid.dtype) if values.is_floating_point() else values.dtype
        full = torch.full((len(values), *present.shape, *values.shape[2:]), fill, dtype=dtype)
        full[:, present] = values.to(device="cpu", dtype=dtype)
        return full

    def model_value(self, quantity: str) -> Float[Tensor, "batch pos"]:
        """A quantity of the targets from the model's own logits of this forward."""
        own = model_level_logits(self.readout, self.states, self.objective.ids)
        objective = Objective(quantity, self.objective.ids, self.objective.sign)
        return self.cells(objective.value(own, self.states.output.log_z)[None][:, self.states.present])[0]

    def texts(self, ids: Int[Tensor, "..."]) -> dict[int, str]:
        """The text of every token in ``ids``."""
        tokenizer = getattr(self.model, "tokenizer", None)
        return {i: token_text(tokenizer, i) for i in ids.unique().tolist() if i >= 0}


@dataclass(frozen=True)
class MethodResult:
    """The answer of one method: one value per row (a point, a segment or a component) and analysed cell.

    * ``kind``: ``level`` (a value at a point; a sum of levels means nothing) or ``additive`` (rows are parts
      of a whole); ``unit``: of the values.
    * ``expected``: what ``total`` = Σ rows + ``offset`` has to equal, in words ``sums_to``; None for levels.
    * ``error``: the error the method reports of itself, as a bound on ``|gap|``; None where it reports none.
    * ``ends``: TransformerLens' label of the state a row is read at or ends at (``4_pre``), which is how
      methods are aligned; ``boundaries`` the number of that boundary, −1 for a row with no place on the path.
    * ``extra``: further tensors ``[row, batch, pos, ...]``; ``texts`` names the token ids in them.
    """

    method: str
    values: Float[Tensor, "row batch pos"]
    labels: tuple[str, ...]
    ends: tuple[str, ...]
    boundaries: tuple[int, ...]
    kind: str
    unit: str
    sums_to: str = "nothing"
    expected: Float[Tensor, "batch pos"] | None = None
    offset: Float[Tensor, "batch pos"] | None = None
    error: Float[Tensor, "batch pos"] | None = None
    extra: Mapping[str, Tensor] = field(default_factory=dict)  # [row, batch, pos, ...]
    texts: Mapping[int, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def total(self) -> Float[Tensor, "batch pos"]:
        """Σ rows, plus the offset that belongs to no row."""
        total = self.values.sum(0)
        return total if self.offset is None else total + self.offset

    @property
    def gap(self) -> Float[Tensor, "batch pos"]:
        """Total − expected; NaN for levels."""
        return torch.full_like(self.values[0], torch.nan) if self.expected is None else self.total - self.expected

    def top(self, k: int = 10, *, batch: int = 0, pos: int = -1) -> pd.DataFrame:
        """The ``k`` rows of one cell (``batch``, ``pos``) with the largest |value|, largest first."""
        order = self.values[:, batch, pos].abs().argsort(descending=True, stable=True)[:k].tolist()
        rows = [(self.labels[i], self.boundaries[i], float(self.values[i, batch, pos])) for i in order]
        return pd.DataFrame(rows, columns=["label", "boundary", "value"])

    def tokens(self, name: str, *, batch: int = 0, pos: int = -1) -> dict[str, list[str]]:
        """Per row the texts of the token ids in ``extra[name]``, such as ``top_ids``, of one cell (``batch``, ``pos``)."""
        ids = self.extra[name][:, batch, pos].tolist()
        return {label: [self.texts[i] for i in row] for label, row in zip(self.labels, ids, strict=True)}


def ends_of(points: tuple[Point, ...], n_layers: int) -> dict[str, Any]:
    """The alignment of rows that are read at, or end at, these points."""
    boundaries = tuple(p.block + 1 if p.mid else p.block for p in points)
    return {"ends": tuple(p.label(n_layers) for p in points), "boundaries": boundaries}
