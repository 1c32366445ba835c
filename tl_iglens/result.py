"""The receipt: frozen, labelled credits with their own error figures, onset, data frame, save and load."""

import html
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path as FilePath
from typing import Any

import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from ._checks import check_choice, fail
from ._types import ONSET_RULES
from .tokens import token_label

FORMAT = 1
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
        """The segment where the quantity is decided, per cell, with its label and boundary.

        * ``mass`` (the paper's): earliest segment at which cumulative |credit| reaches ``fraction`` of its
          total;
        * ``largest``: the largest signed credit in the direction of Δ;
        * ``settled``: first segment from which on the signed cumulative share of Δ never again falls below
          ``fraction``.

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
        """The ``k`` segments of one cell with the largest |credit|, largest first."""
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
        tensors = {f.name: getattr(self, f.name) for f in fields(self) if isinstance(getattr(self, f.name), Tensor)}
        tensors = {name: value.contiguous().clone() for name, value in tensors.items()}
        words = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in tensors and f.name != "info"}
        meta = {"format": str(FORMAT), "kind": "tl_iglens.IGLensResult", "fields": json.dumps(words), "info": json.dumps(asdict(self.info))}
        path = FilePath(path)
        partial = path.with_name(path.name + ".partial")
        try:
            save_file(tensors, str(partial), metadata=meta)
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
        return path

    @classmethod
    def load(cls, path: str | FilePath) -> "IGLensResult":
        """Read what ``save`` wrote; ValueError for a file that is damaged or is something else."""
        todo = "give a file written by IGLensResult.save"
        if not FilePath(path).is_file():
            fail("path", "an existing file", str(path), todo, FileNotFoundError)
        try:
            with safe_open(str(path), "pt") as file:
                meta = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}
        except Exception as error:
            raise ValueError(f"path must be a result file, got {path} ({error}); {todo}") from error
        if meta.get("kind") != "tl_iglens.IGLensResult":
            fail("path", "a result file", f"{path}, a safetensors file of something else", todo)
        if int(meta.get("format", FORMAT)) > FORMAT:
            fail("path", f"a result file of format {FORMAT} or older", f"format {meta['format']}", "update tl-iglens")
        try:
            info = RunInfo(**_known(RunInfo, json.loads(meta["info"])))
            return cls(**_known(cls, json.loads(meta["fields"]) | tensors), info=info)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"path must be a result file, got {path} ({error}); {todo}") from error

    def caption(self) -> str:
        """One line that says what the numbers are: quantity, baseline, estimator, model and the gap."""
        gap = torch.nan_to_num(self.completeness_gap).abs().max().item()
        steps = f", {self.info.n_steps} steps" if self.info.n_steps > 1 else ""
        return (
            f"{self.info.quantity} · baseline {self.info.baseline} · {self.info.estimator}{steps} · "
            f"{self.info.model} · |Σ − Δ| ≤ {gap:.1e}"
        )

    def __repr__(self) -> str:
        segments, batch, pos = self.attribution.shape
        return f"{type(self).__name__}({segments} segments × {batch} rows × {pos} positions; {self.caption()})"

    def _repr_html_(self) -> str:
        """A receipt per analysed token for notebooks (at most twelve), text escaped."""
        cells = self.present.nonzero().tolist()
        blocks = [self._receipt_html(b, p) for b, p in cells[-12:]]
        more = f"<p>… and {len(cells) - 12} earlier tokens</p>" if len(cells) > 12 else ""
        return f"<div><p>{html.escape(self.caption())}</p>{more}{''.join(blocks)}</div>"

    def _receipt_html(self, b: int, p: int) -> str:
        order = self.attribution[:, b, p].abs().argsort(descending=True)[:8].sort().values.tolist()
        rest = float(self.delta[b, p]) - sum(float(self.attribution[s, b, p]) for s in order)
        lines = [("start", f"{float(self.levels[0, b, p]):.6f}")]
        lines += [(self.labels[s], f"{float(self.attribution[s, b, p]):+.6f}") for s in order]
        if len(self.labels) > len(order):
            lines.append((f"other, {len(self.labels) - len(order)} segments", f"{rest:+.6f}"))
        lines.append(("end", f"{float(self.levels[-1, b, p]):.6f}"))
        lines.append(("model", f"{float(self.model_level[b, p]):.6f}"))
        body = "".join(f"<tr><td>{html.escape(k)}</td><td style='text-align:right'>{v}</td></tr>" for k, v in lines)
        token = token_label(self.token_strings[b][int(self.positions[b, p])])
        title = f"{token} → {token_label(self.target_strings[b][p])} · onset {self.onset().labels[b][p]}"
        return f"<table style='display:inline-table;margin:4px'><caption>{html.escape(title)}</caption>{body}</table>"


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


def _known(cls: type, words: dict[str, Any]) -> dict[str, Any]:
    """The fields of a dataclass among those of a file, lists as the tuples they were."""
    names = {f.name for f in fields(cls)}
    return {name: _tuples(value) for name, value in words.items() if name in names}


def _tuples(value: Any) -> Any:
    """JSON lists as the tuples they were."""
    return tuple(_tuples(v) for v in value) if isinstance(value, Sequence) and not isinstance(value, str) else value
