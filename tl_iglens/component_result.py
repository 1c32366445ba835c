"""Results whose rows are components, and how they are put together window by window."""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from .result import IGLensResult, RunInfo
from .windows import Window

OTHER = "other"


@dataclass(frozen=True, repr=False)
class ComponentResult(IGLensResult):
    """An ``IGLensResult`` whose rows are components: signed credits in units of ``info.quantity``.

    Row c belongs to segment ``segment_of[c]`` of the path, and the rows of a segment sum to the change of f
    over it; ``boundaries[c]`` is the boundary after the block the component is in. ``quadrature_error`` is
    what the integrals of a segment missed of its change before that was shared out, Σ over steps of its size.
    ``n_rows`` counts the gradients taken for each cell.
    """

    segment_of: tuple[int, ...] = ()
    quadrature_error: Float[Tensor, "path_segment batch pos"] | None = None
    n_rows: Int[Tensor, "batch pos"] | None = None
    row_name: ClassVar[str] = "component"

    @property
    def segment_attribution(self) -> Float[Tensor, "path_segment batch pos"]:
        """The credits summed by segment: those of ``ig_lens`` on the same path."""
        total = self.attribution.new_zeros(len(self.levels) - 1, *self.attribution.shape[1:])
        return total.index_add(0, torch.tensor(self.segment_of), self.attribution)

    def _ends(self) -> tuple[Tensor, Tensor]:
        """Levels at both ends of the segment every row belongs to."""
        start = torch.tensor(self.segment_of)
        return self.levels[start], self.levels[start + 1]


@dataclass(frozen=True)
class Rows:
    """Labels, boundaries and segments of the rows of a result."""

    labels: tuple[str, ...]
    boundaries: tuple[int, ...]
    segments: tuple[int, ...]


@dataclass(frozen=True)
class Credits:
    """What one window found; its cells in one row, in the order of ``present``."""

    rows: Rows
    credit: Float[Tensor, "component cell"]
    error: Float[Tensor, "segment cell"]
    n_rows: Int[Tensor, "cell"]
    levels: Float[Tensor, "point cell"]
    model_level: Float[Tensor, "cell"]
    ids: Int[Tensor, "batch pos id"]
    present: Bool[Tensor, "batch pos"]
    info: RunInfo


@dataclass
class Table:
    """The tensors of a result, filled window by window; NaN where a shorter row has no position."""

    rows: Rows
    info: RunInfo
    credit: Float[Tensor, "component batch pos"]
    error: Float[Tensor, "segment batch pos"]
    n_rows: Int[Tensor, "batch pos"]
    levels: Float[Tensor, "point batch pos"]
    model_level: Float[Tensor, "batch pos"]
    ids: Int[Tensor, "batch pos id"]

    @classmethod
    def empty(cls, found: Credits, ids: Int[Tensor, "batch pos id"]) -> "Table":
        dtype = torch.float64 if found.info.dtype == "float64" else torch.float32

        def blank(*lead: int) -> Tensor:
            return torch.full((*lead, *ids.shape[:2]), torch.nan, dtype=dtype)

        counts = torch.zeros(ids.shape[:2], dtype=torch.long)
        credit, error, levels = (blank(len(t)) for t in (found.credit, found.error, found.levels))
        return cls(found.rows, found.info, credit, error, counts, levels, blank(), ids.clone())

    def fill(self, window: Window, found: Credits) -> None:
        for name in ("credit", "error", "n_rows", "levels", "model_level"):
            full, values = getattr(self, name), getattr(found, name)
            window.of(full)[..., found.present] = values.to(device="cpu", dtype=full.dtype)
        self.ids[window.rows, window.columns] = found.ids


def largest(size: Float[Tensor, "component"], top_k: int) -> Int[Tensor, "kept"]:
    """The rows with the largest |credit|, in their own order."""
    return size.topk(min(top_k, len(size))).indices.sort().values


def reduced(found: Credits, kept: Int[Tensor, "kept"]) -> Credits:
    """Only the kept rows, and one row per block for all others of it."""
    dropped = torch.ones(len(found.credit), dtype=torch.bool, device=found.credit.device)
    dropped[kept] = False
    blocks = list(zip(found.rows.segments, found.rows.boundaries, strict=True))
    place = {block: i for i, block in enumerate(dict.fromkeys(blocks))}
    group = torch.tensor([place[block] for block in blocks], device=dropped.device)
    others = found.credit.new_zeros(len(place), found.credit.shape[1])
    others.index_add_(0, group[dropped], found.credit[dropped])
    has_others = torch.bincount(group[dropped], minlength=len(place)) > 0
    names, credit = [], []
    for (segment, end), i in place.items():
        for row in kept[group[kept] == i].tolist():
            names.append((found.rows.labels[row], end, segment))
            credit.append(found.credit[row])
        if bool(has_others[i]):
            names.append((f"{end - 1}_{OTHER}" if end else f"embed_{OTHER}", end, segment))
            credit.append(others[i])
    labels, boundaries, segments = zip(*names, strict=True)
    return replace(found, rows=Rows(labels, boundaries, segments), credit=torch.stack(credit))
