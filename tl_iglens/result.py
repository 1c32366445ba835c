"""The receipt: frozen, labelled credits with their own error figures, onset, data frame, save and load."""

from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import ClassVar

import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ._checks import check_choice, fail
from ._html import CELLS, earlier, largest, number, page, quoted, table
from ._types import ONSET_RULES
from .files import read_result, write_result

KIND = "IGLensResult"  # what its files say they hold
_UNDEFINED = 1e-6  # |Δ| below this: shares of it mean nothing
NO_ONSET = "undefined"


@dataclass(frozen=True)
class RunInfo:
    """Where the numbers come from: everything needed to say what they are."""

    model: str
    dtype: str
    transformer_lens: str
    weight_processing: str
    estimator: str
    n_steps: int
    baseline: str
    quantity: str
    path: str
    n_layers: int
    analysis: str = "ig_lens"
    notes: tuple[str, ...] = ()

    @property
    def exact(self) -> bool:
        """Whether credits are observed changes, which sum to Δ by construction."""
        return self.estimator == "prediction_aware"

    def describe(self) -> str:
        """What was asked, in one line."""
        steps = f", {self.n_steps} steps" if self.n_steps > 1 else ""
        return f"{self.quantity} · baseline {self.baseline} · {self.estimator}{steps} · {self.model}"


@dataclass(frozen=True, repr=False)
class IGLensResult:
    """Signed credits of the segments of a path, in units of ``info.quantity``; all tensors on the CPU.

    ``attribution[s, b, p]`` is the change of f over segment ``labels[s]`` at cell (b, p), so that the sum
    over segments is ``levels[-1] − levels[0]``. Cells of shorter rows are NaN.
    """

    attribution: Float[Tensor, "segment batch pos"]
    levels: Float[Tensor, "point batch pos"]
    labels: tuple[str, ...]
    point_labels: tuple[str, ...]
    boundaries: tuple[int, ...]
    targets: Int[Tensor, "batch pos"]
    target_strings: tuple[tuple[str, ...], ...]
    tokens: Int[Tensor, "batch ctx"]
    token_strings: tuple[tuple[str, ...], ...]
    attention_mask: Bool[Tensor, "batch ctx"]
    positions: Int[Tensor, "batch pos"]
    model_level: Float[Tensor, "batch pos"]
    info: RunInfo
    step_attribution: Float[Tensor, "segment step batch pos"] | None = None
    row_name: ClassVar[str] = "segment"  # what a row is called

    @property
    def present(self) -> Bool[Tensor, "batch pos"]:
        """Cells that hold an analysed position."""
        return self.positions >= 0

    @property
    def delta(self) -> Float[Tensor, "batch pos"]:
        """Δ: the change of the quantity from the start of the path to its end."""
        return self.levels[-1] - self.levels[0]

    @property
    def completeness_gap(self) -> Float[Tensor, "batch pos"]:
        """Σ credits − Δ: rounding for the exact estimator, quadrature error for a gradient rule."""
        return self.attribution.sum(0) - self.delta

    @property
    def readout_gap(self) -> Float[Tensor, "batch pos"]:
        """Readout of the last state − the same quantity from the model's own logits."""
        return self.levels[-1] - self.model_level

    @property
    def cancellation(self) -> Float[Tensor, "batch pos"]:
        """Σ|credit| / |Δ|: 1 for a monotone trajectory, larger where credits undo each other, NaN where Δ ≈ 0."""
        share = self.attribution.abs().sum(0) / self.delta.abs()
        return torch.where(self.delta.abs() < _UNDEFINED, torch.nan, share)

    def onset(self, rule: str = "mass", fraction: float = 0.5) -> "Onset":
        """The segment where the quantity is decided by one ``rule``, per cell, with its label and boundary.

        * ``mass`` (the paper's): earliest segment at which cumulative |credit| reaches ``fraction`` of its
          total;
        * ``largest``: the largest signed credit in the direction of Δ;
        * ``settled``: first segment from which on the signed cumulative share of Δ never again falls below
          ``fraction``.

        Over 240 prompts on two models, in each of 18 ways to ablate per model, the superiority of ``largest`` was above
        that of ``mass`` or within 0.01 of it (means 0.65 and 0.60); ``settled`` (0.63) lay between them in most; see
        ``notebooks/onset_study.ipynb``.

        Cells whose |Δ| (for ``mass``: whose total |credit|) is below 1e-6 have the label ``undefined`` and index −1.
        """
        check_choice("rule", rule, ONSET_RULES)
        if not 0 < fraction <= 1:
            fail("fraction", "above 0 and at most 1", fraction, "0.5 is the paper's")
        credit = torch.nan_to_num(self.attribution.double())
        total, size = credit.sum(0), credit.abs().sum(0)
        slack = 1e-6 * size  # credits are float32: a share that is reached exactly counts as reached
        if rule == "mass":
            reached = credit.abs().cumsum(0) >= fraction * size - slack
            index, defined = reached.long().argmax(0), size >= _UNDEFINED
        elif rule == "largest":
            index, defined = (credit * total.sign()).argmax(0), total.abs() >= _UNDEFINED
        else:
            below = credit.cumsum(0) * total.sign() < fraction * total.abs() - slack
            last_below = (below * torch.arange(1, len(below) + 1)[:, None, None]).max(0).values
            index, defined = last_below.clamp_max(len(below) - 1), total.abs() >= _UNDEFINED
        index = torch.where(defined & self.present, index, -1)
        return Onset(index, tuple(tuple(self.labels[i] if i >= 0 else NO_ONSET for i in row) for row in index.tolist()), self.boundaries)

    def top(self, k: int = 10, *, batch: int = 0, pos: int = -1) -> pd.DataFrame:
        """The ``k`` segments of one cell (row ``batch``, column ``pos``) with the largest |credit|, largest first."""
        frame = self.to_dataframe()
        column = range(int(self.positions.shape[1]))[pos]
        cell = frame[(frame["batch"] == batch) & (frame["column"] == column)]
        order = cell["credit"].abs().sort_values(ascending=False, kind="stable").index[:k]
        return cell.loc[order, ["segment", "boundary", "credit", "level_before", "level_after"]].reset_index(drop=True)

    def to_dataframe(self) -> pd.DataFrame:
        """One row per (cell, segment), cells of shorter rows left out.

        ``pos`` is the place in the prompt, ``column`` the place in ``attribution``; ``level_before`` and
        ``level_after`` are the quantity at the two ends, ``model`` the model's own value.
        """
        before, after = self._ends()
        rows = []
        for b, p in self.present.nonzero().tolist():
            place = int(self.positions[b, p])
            shared = (b, p, place, self.token_strings[b][place], int(self.targets[b, p]), self.target_strings[b][p])
            for s, label in enumerate(self.labels):
                ends = (float(before[s, b, p]), float(after[s, b, p]), float(self.model_level[b, p]))
                rows.append((*shared, s, label, self.boundaries[s], float(self.attribution[s, b, p]), *ends))
        names = ["batch", "column", "pos", "token", "target_id", "target", "index", "segment", "boundary", "credit"]
        return pd.DataFrame(rows, columns=[*names, "level_before", "level_after", "model"])

    def _ends(self) -> tuple[Tensor, Tensor]:
        """Levels at the two ends of every row: of its segment, or of its block where rows share one."""
        if len(self.levels) == len(self.labels) + 1:
            return self.levels[:-1], self.levels[1:]
        start, end = self.levels[:1].expand_as(self.attribution), self.levels[-1:].expand_as(self.attribution)
        return start, end

    def save(self, path: str | FilePath) -> FilePath:
        """Write one safetensors file with JSON metadata; nothing in it is executable. Returns the path."""
        return write_result(self, path, KIND)

    @classmethod
    def load(cls, path: str | FilePath) -> "IGLensResult":
        """Read what ``save`` wrote to ``path``; ValueError for a file that is damaged or is something else."""
        return read_result(cls, path, KIND, info=RunInfo)

    def caption(self) -> str:
        """One line that says what the numbers are: quantity, baseline, estimator, model and the gap."""
        return f"{self.info.describe()} · |Σ − Δ| ≤ {largest_gap(self.completeness_gap):.1e}"

    def __repr__(self) -> str:
        segments, batch, pos = self.attribution.shape
        return f"{type(self).__name__}({segments} {self.row_name}s × {batch} rows × {pos} positions; {self.caption()})"

    def _repr_html_(self) -> str:
        """A receipt per analysed token for notebooks (at most twelve), text escaped."""
        cells, onset = self.present.nonzero().tolist(), self.onset()
        receipts = [self._receipt(b, p, onset) for b, p in cells[-CELLS:]]
        return page(self.caption(), receipts, earlier(len(cells)))

    def _receipt(self, b: int, p: int, onset: "Onset") -> str:
        """Where the path starts, what the largest segments and all others add, where it ends; the onset is bold."""
        digits = 6 if self.info.quantity == "prob" else 4
        credits = self.attribution[:, b, p].double()
        kept, decided = largest(credits.abs().tolist(), 8), int(onset.index[b, p]) if self.row_name == "segment" else -1
        missed = float(self.delta[b, p].double() - credits.sum())
        lines = [("start", float(self.levels[0, b, p]), "")]
        lines += [(self.labels[s] + " ◆" * (s == decided), float(credits[s]), "+") for s in kept]
        if n_others := len(credits) - len(kept):
            others = float(credits.sum() - credits[kept].sum())
            lines.append((f"other, {n_others} {self.row_name}s", others, "+"))
        if abs(missed) >= _UNDEFINED * max(1.0, float(credits.abs().sum())):
            lines.append(("not in the credits", missed, "+"))
        lines += [("end", float(self.levels[-1, b, p]), ""), ("model", float(self.model_level[b, p]), "")]
        title = quoted(self.token_strings[b][int(self.positions[b, p])], self.target_strings[b][p])
        title += f" · onset {onset.labels[b][p]}" if self.row_name == "segment" else ""
        rows = [(name, number(value, f"{sign}.{digits}f")) for name, value, sign in lines]
        return table(title, rows, marked=1 + kept.index(decided) if decided in kept else -1)


def largest_gap(gap: Tensor) -> float:
    """The largest |gap| of a result, ``[batch, pos, ...]``; cells without a position do not count."""
    return torch.nan_to_num(gap).abs().max().item() if gap.numel() else 0.0


@dataclass(frozen=True)
class Onset:
    """Per cell the index, the label and the boundary of the onset segment; −1 and ``undefined`` for none."""

    index: Int[Tensor, "batch pos"]
    labels: tuple[tuple[str, ...], ...]
    segment_boundaries: tuple[int, ...]

    @property
    def boundary(self) -> Int[Tensor, "batch pos"]:
        """The boundary the onset segment ends at, −1 where undefined."""
        ends = torch.tensor(self.segment_boundaries)
        return torch.where(self.index >= 0, ends[self.index.clamp_min(0)], -1)
