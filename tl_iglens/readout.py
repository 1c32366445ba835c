"""f(h): the model's own final norm, unembedding, output transform and softmax, read at any state.

    f(h) = φ( T(W_Uᵀ norm(h) + b_U) )

The vocabulary is streamed in tiles that stay in cache while a running maximum and sum build log Z, so
logits never reach memory. The gradient of log Z is an attention over the vocabulary, Σ_v p_v T'_v w_v, and
is accumulated in the same pass; the norm's vector–Jacobian product finishes it in closed form. This is the
only module that touches weights.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ._checks import check_choice, fail
from ._types import compute_dtype
from .head import FinalNorm, OutputTransform, has_norm, output_transform, silent
from .quantity import Objective

MIB = 2**20
HEADS = ("model", "float32")
_ROW_BLOCK = 1024  # rows that share one read of W_U: enough to make the product compute-bound
_LEAST_TILE = 64  # tokens; where not even these fit in memory, fewer rows share a tile
_NO_MEMORY = ("out of memory", "not enough memory", "can't allocate memory")  # what torch says, by device and system


def default_tile_bytes(device: torch.device) -> int:
    """Bytes of one tile of logits: a few level-2 caches per working thread, within a quarter of level 3.

    The product that writes a tile is blocked for level 2 by the BLAS itself; the softmax then reads it three
    times. Smaller tiles pay more for starting kernels than they save, larger ones leave the shared cache. On a
    CUDA device a tile has to be large enough to fill the device instead.
    """
    if device.type != "cpu":
        return 256 * MIB
    level2, level3 = _cache_bytes(2) or MIB, _cache_bytes(3) or 32 * MIB
    return max(2 * MIB, min(4 * level2 * max(torch.get_num_threads(), 1), level3 // 4, 16 * MIB))


def _cache_bytes(level: int) -> int:
    """Size of one cache of this level as Linux tells it; 0 where the system does not say."""
    for index in range(5):
        folder = Path(f"/sys/devices/system/cpu/cpu0/cache/index{index}")
        try:
            if int((folder / "level").read_text()) == level:
                return int((folder / "size").read_text().strip().removesuffix("K")) * 1024
        except (OSError, ValueError):
            return 0
    return 0


@runtime_checkable
class Watcher(Protocol):
    """Something that looks at every tile of logits as it passes, such as a rank or a top-k list."""

    def see(self, logits: Float[Tensor, "row tile"], rows: slice, first: int) -> None:
        """Called once per tile with transformed logits; must leave them unchanged."""


@dataclass(frozen=True)
class Scan:
    """What one stream over the vocabulary leaves behind for its rows."""

    z: Float[Tensor, "row id"]  # transformed logits of the asked tokens, float64
    log_z: Float[Tensor, "row"]  # log Σ exp over the vocabulary, float64
    mean_direction: Float[Tensor, "row d_model"] | None  # Σ_v p_v T'(z_v) w_v


class Readout:
    """The model's readout at arbitrary states. Holds the model's weights as views; never copies them.

    A readout lives as long as one public call: results keep no reference to it. ``head="model"`` computes
    logits in the model's dtype, as the model does; ``"float32"`` lifts norm and unembedding of a half-precision
    model to float32, tile by tile, which is more accurate and no longer the model's own output.
    """

    def __init__(self, model: Any, tile_bytes: int | None = None, head: str = "model"):
        check_choice("head", head, HEADS)
        self.unembed = model.unembed
        self.norm = FinalNorm(getattr(model, "ln_final", None) if has_norm(model) else None)
        self.W_U, self.b_U = _head_weights(model)
        self.dtype = self.W_U.dtype
        self.device = self.W_U.device
        self.d_model, self.d_vocab = (int(n) for n in self.W_U.shape)
        self.transform = OutputTransform(output_transform(model), self.dtype, self.device)
        self.is_bare = False
        self.acc_dtype = compute_dtype(self.dtype)
        self.work_dtype = self.dtype if head == "model" else self.acc_dtype
        self.tile_bytes = tile_bytes or default_tile_bytes(self.device)
        self.row_block = _ROW_BLOCK

    def value(self, h: Float[Tensor, "*node cell d_model"], objective: Objective) -> Float[Tensor, "*node cell"]:
        """f at every state, float64 scalars; ``objective`` has one entry per cell."""
        ids = self._row_ids(objective, h)
        scans = [self.scan(self.normed(rows), ids[at]) for at, rows in self._row_blocks(h)]
        z, log_z = self._unflatten(scans, h)
        return objective.value(z, log_z)

    def value_and_grad(
        self, h: Float[Tensor, "*node cell d_model"], objective: Objective
    ) -> tuple[Float[Tensor, "*node cell"], Float[Tensor, "*node cell d_model"]]:
        """f and ∇_h f from one stream: the softmax-weighted mean of the rows of W_U, pulled back through the norm."""
        ids = self._row_ids(objective, h)
        sign = objective.sign.to(self.device).expand(*h.shape[:-1], -1).reshape(ids.shape)
        gradient = torch.empty(len(ids), h.shape[-1], dtype=self.acc_dtype, device=self.device)
        scans = []
        for at, rows in self._row_blocks(h):
            x = self.normed(rows)
            scan = self.scan(x, ids[at], gradient=objective.needs_partition)
            by_z, by_log_z = Objective(objective.quantity, ids[at], sign[at]).partials(scan.z, scan.log_z)
            # ∇_x f = Σ_i ∂f/∂z_i T'(z_i) w_i + ∂f/∂log Z Σ_v p_v T'(z_v) w_v
            pulled = torch.zeros_like(gradient[at])
            for i, weight in enumerate((by_z * self.transform.slope(scan.z)).to(self.acc_dtype).T):
                pulled += weight[:, None] * self.W_U[:, ids[at, i]].T.to(self.acc_dtype)
            if scan.mean_direction is not None:
                pulled += by_log_z[:, None].to(self.acc_dtype) * scan.mean_direction
            gradient[at] = self.norm.vjp(rows.to(self.device), x, pulled)
            scans.append(replace(scan, mean_direction=None))
        z, log_z = self._unflatten(scans, h)
        return objective.value(z, log_z), gradient.reshape(h.shape)

    def _row_blocks(self, h: Tensor) -> Iterator[tuple[slice, Float[Tensor, "row d_model"]]]:
        """States as rows, a block at a time, so that nothing of the size of all rows is made."""
        rows = h.reshape(-1, h.shape[-1])
        for first in range(0, max(len(rows), 1), _ROW_BLOCK):
            at = slice(first, min(first + _ROW_BLOCK, len(rows)))
            yield at, rows[at]

    def _unflatten(self, scans: list[Scan], h: Tensor) -> tuple[Float[Tensor, "*row id"], Float[Tensor, "*row"]]:
        z = torch.cat([scan.z for scan in scans])
        return z.reshape(*h.shape[:-1], z.shape[-1]), torch.cat([scan.log_z for scan in scans]).reshape(h.shape[:-1])

    def normed(self, rows: Float[Tensor, "row d_model"]) -> Float[Tensor, "row d_model"]:
        """The model's own final norm at these rows, in the dtype the unembedding reads."""
        rows = rows.to(self.device)
        return self.norm(rows if self.work_dtype == self.dtype else rows.to(self.work_dtype)).to(self.work_dtype)

    @torch.no_grad()
    def scan(
        self,
        x: Float[Tensor, "row d_model"],
        ids: Int[Tensor, "row id"],
        *,
        gradient: bool = False,
        watchers: tuple[Watcher, ...] = (),
    ) -> Scan:
        """One pass over the vocabulary for normed rows ``x``; memory does not grow with d_vocab.

        A tile that does not fit in memory is halved, then the rows that share it; where neither helps, torch's own
        error is raised again with what can be done.
        """
        n_rows, ids = len(x), ids.to(self.device)
        z = torch.empty(ids.shape, dtype=torch.float64, device=self.device)
        log_z = torch.empty(n_rows, dtype=torch.float64, device=self.device)
        mean = torch.zeros(n_rows, self.d_model, dtype=self.acc_dtype, device=self.device) if gradient else None
        first = 0
        while first < n_rows:
            rows = slice(first, min(first + self.row_block, n_rows))
            try:
                log_z[rows] = self._stream(x, ids, rows, z, mean, watchers)
                first = rows.stop
            except _TooManyRows:
                self.row_block = (rows.stop - rows.start) // 2
        return Scan(z, log_z, mean)

    def _stream(
        self, x: Tensor, ids: Tensor, rows: slice, z: Tensor, mean: Tensor | None, watchers: tuple[Watcher, ...]
    ) -> Float[Tensor, "row"]:
        """log Z of some rows, their part of ``z`` and ``mean`` filled in."""
        stream = _OnlineSoftmax(rows.stop - rows.start, self.acc_dtype, self.device)
        for start, logits, slopes in self._tiles(x[rows], mean is not None and not self.transform.is_linear):
            _gather(logits, ids[rows], start, z[rows])
            for watcher in watchers:
                watcher.see(logits, rows, start)
            weight, rescale = stream.add(logits)
            if mean is not None:
                weight = weight if slopes is None else weight.mul_(slopes)
                self._accumulate(mean[rows], weight, rescale, start)
        if mean is not None:
            mean[rows] *= (self.transform.scale if self.transform.is_linear else 1.0) / stream.total[:, None]
        return stream.log_sum()

    def model_logits(self, h: Float[Tensor, "row d_model"]) -> Float[Tensor, "row d_vocab"]:
        """Full logits of a few rows by the model's own modules, hooks set aside; holds row × d_vocab."""
        with torch.no_grad(), silent(self.unembed):
            x = self.norm(h.to(self.device)).to(self.dtype)
            return self.transform(self.unembed(x[None])[0])

    def use_bare_head(self) -> None:
        """Read without the declared output transform: the weights already carry it."""
        self.transform = OutputTransform(None, self.dtype, self.device)
        self.is_bare = True

    def head_gap(self, h: Float[Tensor, "row d_model"], logits: Float[Tensor, "row d_vocab"]) -> float:
        """Largest difference in probability between these logits and the model's modules at states ``h``."""
        ours = self.model_logits(h).to(self.acc_dtype)
        return float((ours.softmax(-1) - logits.to(self.acc_dtype).softmax(-1)).abs().max())

    def tolerance(self, logits_dtype: torch.dtype) -> float:
        """By how much a probability may differ between two orders of the same arithmetic."""
        if torch.float64 in (self.dtype, logits_dtype):
            return 1e-7
        return 2e-5 if self.dtype == torch.float32 else 1e-3

    def rows_of_logits(self, budget: int) -> int:
        """How many rows of full logits take at most ``budget`` bytes; at least one."""
        return max(1, budget // (self.d_vocab * self.dtype.itemsize))

    def _row_ids(self, objective: Objective, h: Tensor) -> Int[Tensor, "row id"]:
        ids = objective.ids.to(self.device)
        return ids.expand(*h.shape[:-1], ids.shape[-1]).reshape(-1, ids.shape[-1])

    def _tiles(
        self, x: Float[Tensor, "row d_model"], with_slopes: bool
    ) -> Iterator[tuple[int, Float[Tensor, "row tile"], Float[Tensor, "row tile"] | None]]:
        """All of the vocabulary in tiles: the first token, the transformed logits, and T' there where asked for."""
        start, buffer = 0, None
        while start < self.d_vocab:
            stop = min(start + self._tile_width(len(x)), self.d_vocab)
            try:
                if buffer is None:
                    buffer = torch.empty(len(x) * (stop - start), dtype=self.work_dtype, device=self.device)
                logits = self._tile(x, start, stop, buffer)
                slopes = self.transform.slope(logits) if with_slopes else None
            except RuntimeError as error:
                if not any(words in str(error) for words in _NO_MEMORY):
                    raise
                self._make_room(error, len(x), stop - start, begun=start > 0)
                continue
            yield start, logits, slopes
            start = stop

    def _make_room(self, error: RuntimeError, n_rows: int, width: int, begun: bool) -> None:
        """Halve the tiles from here on, or ask for fewer rows; RuntimeError where neither is left."""
        if width > _LEAST_TILE:
            self.tile_bytes = n_rows * width * self.work_dtype.itemsize // 2
        elif n_rows > 1 and not begun:  # nothing of these rows has been counted yet
            raise _TooManyRows
        else:
            kind = torch.cuda.OutOfMemoryError if isinstance(error, torch.cuda.OutOfMemoryError) else RuntimeError
            rule, got = f"readable in the free memory of {self.device}", f"none left for {n_rows} × {width} logits"
            fail("model", rule, f"{got} ({str(error).splitlines()[0]})", "free some, or analyse fewer tokens", kind)

    def _tile_width(self, n_rows: int) -> int:
        width = self.tile_bytes // (n_rows * self.work_dtype.itemsize)
        return min(max(_LEAST_TILE, width // _LEAST_TILE * _LEAST_TILE), self.d_vocab)

    def _tile(self, x: Tensor, start: int, stop: int, buffer: Tensor) -> Float[Tensor, "row tile"]:
        """Transformed logits of a run of the vocabulary, in float32 or better; overwrites ``buffer``."""
        out = buffer[: len(x) * (stop - start)].view(len(x), stop - start)
        weight = self.W_U[:, start:stop].to(self.work_dtype)
        if self.b_U is None:
            torch.mm(x, weight, out=out)
        else:
            torch.addmm(self.b_U[start:stop].to(self.work_dtype), x, weight, out=out)
        return self.transform(out).to(self.acc_dtype)

    def _accumulate(self, mean: Tensor, weight: Tensor, rescale: Tensor | None, start: int) -> None:
        """mean ← rescale · mean + weight W_U[tile]ᵀ"""
        if rescale is not None:
            mean *= rescale
        directions = self.W_U[:, start : start + weight.shape[1]].T
        if directions.dtype == mean.dtype:
            mean.addmm_(weight, directions)
        else:
            mean += (weight.to(directions.dtype) @ directions).to(mean.dtype)


class _TooManyRows(Exception):
    """Not even the narrowest tile of these rows fits in memory."""


class _OnlineSoftmax:
    """log Σ exp of rows that arrive in tiles: a running maximum and a sum relative to it."""

    def __init__(self, n_rows: int, dtype: torch.dtype, device: torch.device):
        self.peak = torch.full((n_rows, 1), -torch.inf, dtype=dtype, device=device)
        self.total = torch.zeros(n_rows, dtype=torch.float64, device=device)

    def add(self, logits: Float[Tensor, "row tile"]) -> tuple[Float[Tensor, "row tile"], Tensor | None]:
        """Turns ``logits`` in place into exp(logits − peak); also the factor that earlier sums shrank by."""
        peak = torch.maximum(self.peak, logits.amax(1, keepdim=True))
        rescale = None if bool(torch.isneginf(self.peak[0, 0])) else exp_(self.peak - peak)
        weight = exp_(logits.sub_(peak))
        if rescale is not None:
            self.total *= rescale[:, 0]
        self.total += weight.sum(1)
        self.peak = peak
        return weight, rescale

    def log_sum(self) -> Float[Tensor, "row"]:
        return self.peak[:, 0].double() + self.total.log()


def exp_(x: Tensor) -> Tensor:
    """exp in place for shifted logits ``[...]``; what would leave the normal numbers stays at their lower end.

    Early layers spread their logits so far that most of the vocabulary is below that, and processors compute
    with subnormal numbers several times slower. Against a largest term of 1 the difference is below 1e-30.
    """
    return x.clamp_(min=math.log(torch.finfo(x.dtype).tiny) + 7).exp_()


def _gather(logits: Tensor, ids: Tensor, start: int, out: Tensor) -> None:
    """Copy the logits of the asked tokens that lie in this tile."""
    local = ids - start
    inside = (local >= 0) & (local < logits.shape[1])
    if bool(inside.any()):
        found = logits.gather(1, local.clamp(0, logits.shape[1] - 1))
        out[inside] = found[inside].double()


def _head_weights(model: Any) -> tuple[Tensor, Tensor | None]:
    """W_U [d_model, d_vocab] and b_U (None when all zero), as views of the model's own storage."""
    weight, d_model = getattr(model, "W_U", None), int(model.cfg.d_model)
    got = None
    if not isinstance(weight, Tensor):
        got = f"{type(weight).__name__} in its place"
    elif weight.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        got = f"W_U of dtype {weight.dtype}"
    elif weight.ndim != 2 or len(weight) != d_model:
        got = f"W_U of shape {tuple(weight.shape)}"
    elif weight.device.type == "meta":
        got = "W_U on the meta device"
    if got is not None:
        todo = "load the model without quantising or offloading its unembedding"
        rule = f"one with a readable unembedding matrix [{d_model}, d_vocab]"
        fail("model", rule, got, todo, NotImplementedError)
    assert isinstance(weight, Tensor)
    weight = weight.detach()
    bias = getattr(model, "b_U", None)
    bias = None if bias is None else bias.detach().to(weight.device)
    return weight, bias if bias is not None and bool(bias.any()) else None
