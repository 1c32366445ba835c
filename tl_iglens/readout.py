"""f(h): the model's own final norm, unembedding, output transform and softmax, read at any state.

    f(h) = φ( T(W_Uᵀ norm(h) + b_U) )

The vocabulary is streamed in tiles that stay in cache while a running maximum and sum build log Z, so
logits never reach memory. The gradient of log Z is an attention over the vocabulary, Σ_v p_v T'_v w_v, and
is accumulated in the same pass; the norm's vector–Jacobian product finishes it in closed form. This is the
only module that touches weights.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ._checks import check_choice, fail
from ._types import compute_dtype
from .quantity import Objective

MIB = 2**20
HEADS = ("model", "float32")
_ROW_BLOCK = 1024  # rows that share one read of W_U: enough to make the product compute-bound


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


@contextmanager
def silent(module: torch.nn.Module | None) -> Iterator[None]:
    """Run a module with every hook on it and below it set aside, and put them back afterwards.

    The model's hook points belong to the user: hooks there must not see the rows of a readout.
    """
    saved: list[tuple[dict[str, Any], str, Any]] = []
    names = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "fwd_hooks", "bwd_hooks")
    try:
        for part in module.modules() if module is not None else ():
            for name in names:
                own = part.__dict__
                if own.get(name):
                    saved.append((own, name, own[name]))
                    own[name] = type(own[name])()
        yield
    finally:
        for own, name, value in reversed(saved):
            own[name] = value


class Readout:
    """The model's readout at arbitrary states. Holds the model's weights as views; never copies them.

    A readout lives as long as one public call: results keep no reference to it. ``head="model"`` computes
    logits in the model's dtype, as the model does; ``"float32"`` lifts norm and unembedding of a half-precision
    model to float32, tile by tile, which is more accurate and no longer the model's own output.
    """

    def __init__(self, model: Any, tile_bytes: int | None = None, head: str = "model"):
        check_choice("head", head, HEADS)
        self.unembed = model.unembed
        self.norm = FinalNorm(getattr(model, "ln_final", None) if _has_norm(model) else None)
        self.W_U, self.b_U = _head_weights(model)
        self.dtype = self.W_U.dtype
        self.device = self.W_U.device
        self.d_model, self.d_vocab = (int(n) for n in self.W_U.shape)
        self.transform = OutputTransform(_output_transform(model), self.dtype, self.device)
        self.is_bare = False
        self.acc_dtype = compute_dtype(self.dtype)
        self.work_dtype = self.dtype if head == "model" else self.acc_dtype
        self.tile_bytes = tile_bytes or default_tile_bytes(self.device)

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
        """One pass over the vocabulary for normed rows ``x``; memory does not grow with d_vocab."""
        n_rows, ids = len(x), ids.to(self.device)
        z = torch.empty(ids.shape, dtype=torch.float64, device=self.device)
        log_z = torch.empty(n_rows, dtype=torch.float64, device=self.device)
        mean = torch.zeros(n_rows, self.d_model, dtype=self.acc_dtype, device=self.device) if gradient else None
        row_block = max(1, min(n_rows, _ROW_BLOCK))
        tile = self._tile_width(row_block)
        buffer = torch.empty(row_block * tile, dtype=self.work_dtype, device=self.device)
        for first in range(0, n_rows, row_block):
            rows = slice(first, min(first + row_block, n_rows))
            stream = _OnlineSoftmax(rows.stop - rows.start, self.acc_dtype, self.device)
            for start in range(0, self.d_vocab, tile):
                logits = self._tile(x[rows], start, min(start + tile, self.d_vocab), buffer)
                _gather(logits, ids[rows], start, z[rows])
                for watcher in watchers:
                    watcher.see(logits, rows, start)
                slopes = self.transform.slope(logits) if gradient and not self.transform.is_linear else None
                weight, rescale = stream.add(logits)
                if mean is not None:
                    weight = weight if slopes is None else weight.mul_(slopes)
                    self._accumulate(mean[rows], weight, rescale, start)
            log_z[rows] = stream.log_sum()
            if mean is not None:
                mean[rows] *= (self.transform.scale if self.transform.is_linear else 1.0) / stream.total[:, None]
        return Scan(z, log_z, mean)

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

    def _tile_width(self, row_block: int) -> int:
        width = self.tile_bytes // (row_block * self.work_dtype.itemsize)
        return min(max(64, width // 64 * 64), self.d_vocab)

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


class _OnlineSoftmax:
    """log Σ exp of rows that arrive in tiles: a running maximum and a sum relative to it."""

    def __init__(self, n_rows: int, dtype: torch.dtype, device: torch.device):
        self.peak = torch.full((n_rows, 1), -torch.inf, dtype=dtype, device=device)
        self.total = torch.zeros(n_rows, dtype=torch.float64, device=device)

    def add(self, logits: Float[Tensor, "row tile"]) -> tuple[Float[Tensor, "row tile"], Tensor | None]:
        """Turns ``logits`` in place into exp(logits − peak); also the factor that earlier sums shrank by."""
        peak = torch.maximum(self.peak, logits.amax(1, keepdim=True))
        rescale = None if bool(torch.isneginf(self.peak[0, 0])) else (self.peak - peak).exp_()
        weight = logits.sub_(peak).exp_()
        if rescale is not None:
            self.total *= rescale[:, 0]
        self.total += weight.sum(1)
        self.peak = peak
        return weight, rescale

    def log_sum(self) -> Float[Tensor, "row"]:
        return self.peak[:, 0].double() + self.total.log()


def _gather(logits: Tensor, ids: Tensor, start: int, out: Tensor) -> None:
    """Copy the logits of the asked tokens that lie in this tile."""
    local = ids - start
    inside = (local >= 0) & (local < logits.shape[1])
    if bool(inside.any()):
        found = logits.gather(1, local.clamp(0, logits.shape[1] - 1))
        out[inside] = found[inside].double()


class OutputTransform:
    """What the model does to its logits after the unembedding: nothing, a scale, a soft cap, or both.

    The value is the model's own function. Its slope is measured from it: with a = T'(0) and the cap
    c = T(∞), T(z) = c·tanh(a z / c) has slope a (1 − (T/c)²). A function of another form has no slope here.
    """

    def __init__(self, function: Callable[[Tensor], Tensor] | None, dtype: torch.dtype, device: torch.device):
        self.function = function
        probe = torch.tensor([-64.0, -3.0, -0.5, 0.0, 0.5, 3.0, 64.0], dtype=dtype, device=device)
        with torch.no_grad():
            image = probe if function is None else function(probe.clone())
            tiny, huge = probe.new_tensor(2.0**-10), probe.new_tensor(3e4)
            self.scale = 1.0 if function is None else float(function(tiny.clone())) / float(tiny)
            limit = math.inf if function is None else abs(float(function(huge.clone())))
        linear = torch.allclose(image.double(), self.scale * probe.double(), rtol=1e-2, atol=1e-6)
        self.is_identity = bool(torch.equal(image, probe)) and linear
        self.cap = math.inf if linear else limit
        capped = probe.double() * self.scale
        if not linear:
            capped = self.cap * torch.tanh(capped / self.cap)
        self.is_known = bool(torch.allclose(image.double(), capped, rtol=2e-2, atol=1e-6))
        self.is_linear = linear

    def __call__(self, logits: Tensor) -> Tensor:
        return logits if self.is_identity or self.function is None else self.function(logits)

    def slope(self, image: Tensor) -> Tensor:
        """T'(z) at rows whose transformed logits are ``image``."""
        if not self.is_known:
            todo = "use estimator='prediction_aware', which needs no gradient"
            fail("model", "one with a scaled or soft-capped output", "another output transform", todo, NotImplementedError)
        if self.is_linear:
            return torch.full_like(image, self.scale)
        return self.scale * (1 - (image / self.cap) ** 2)


class FinalNorm:
    """The model's final norm: its own module for the value, a closed form for the vector–Jacobian product.

    norm(h) = γ (h − μ) / σ + β with σ² = mean (h − μ)² + ε (μ = 0 for RMSNorm). γ, β, ε and whether the mean
    is removed are measured by running the module on a few probes, so offsets, folding and epsilons take care
    of themselves; a norm that is not of this form is differentiated by autograd, alone.
    """

    def __init__(self, module: torch.nn.Module | None):
        self.module = module
        self._measured: tuple[Tensor, Tensor, float, bool] | None = None

    def __call__(self, rows: Float[Tensor, "row d_model"]) -> Float[Tensor, "row d_model"]:
        if self.module is None:
            return rows
        with torch.no_grad(), silent(self.module):
            return self.module(rows[None])[0]

    def vjp(
        self, h: Float[Tensor, "row d_model"], x: Float[Tensor, "row d_model"], g: Float[Tensor, "row d_model"]
    ) -> Float[Tensor, "row d_model"]:
        """Jᵀ g of the norm at h, where x = norm(h)."""
        if self.module is None:
            return g
        if self._measured is None:
            self._measured = self._measure(h)
        gain, bias, eps, centred = self._measured
        h = h.to(device=g.device, dtype=g.dtype)
        shifted = h - h.mean(-1, keepdim=True) if centred else h
        sigma = (shifted.square().mean(-1, keepdim=True) + eps).sqrt()
        unit = shifted / sigma
        tolerance = 1e-4 if x.dtype in (torch.float32, torch.float64) else 5e-2
        if not torch.allclose(unit * gain + bias, x.to(g.dtype), rtol=tolerance, atol=tolerance):
            return self._autograd_vjp(h, g)
        # (γg − mean(γg) − h̃ ⟨h̃, γg⟩ / d) / σ, the middle term only where the mean is removed
        pulled = g * gain
        projected = pulled - unit * (pulled * unit).mean(-1, keepdim=True)
        if centred:
            projected = projected - pulled.mean(-1, keepdim=True)
        return projected / sigma

    @torch.no_grad()
    def _measure(self, like: Tensor) -> tuple[Tensor, Tensor, float, bool]:
        dtype = compute_dtype(like.dtype)
        signs = like.new_ones(like.shape[-1])
        signs[1::2] = -1  # mean 0 for an even width
        probes = torch.stack([0 * signs, 100 * signs, 100 * signs.abs()])
        bias, scaled, level = self(probes).to(dtype)
        gain = (scaled - bias) * signs.to(dtype)
        centred = bool((level - bias).abs().max() < 1e-3 * gain.abs().max())
        return gain, bias, self._epsilon(signs, gain, bias), centred

    def _epsilon(self, signs: Tensor, gain: Tensor, bias: Tensor) -> float:
        """ε from the shrinkage c / √(c² + ε) of probes of size c; the clearest one, near one half, decides."""
        sizes = torch.logspace(-6, 0, 25, dtype=torch.float64)
        images = self(torch.stack([float(c) * signs for c in sizes]).to(signs.dtype)).to(gain.dtype)
        wide = gain.abs() > 0.1 * gain.abs().max()
        ratio = ((images - bias) * signs.to(gain.dtype) / gain)[:, wide].double().mean(-1)
        best = int((ratio.cpu() - 0.5).abs().argmin())
        return max(0.0, float(sizes[best] ** 2 * (1 / ratio[best] ** 2 - 1)))

    def _autograd_vjp(self, h: Tensor, g: Tensor) -> Tensor:
        assert self.module is not None
        with torch.inference_mode(False), torch.enable_grad(), silent(self.module):
            leaf = h.detach().clone().requires_grad_(True)
            (out,) = torch.autograd.grad(self.module(leaf[None])[0], leaf, g.detach().clone().to(leaf.dtype))
        return out


def _has_norm(model: Any) -> bool:
    return getattr(model.cfg, "normalization_type", None) is not None


def _head_weights(model: Any) -> tuple[Tensor, Tensor | None]:
    """W_U [d_model, d_vocab] and b_U (None when all zero), as views of the model's own storage."""
    weight = model.W_U.detach()
    if not weight.is_floating_point():
        todo = "load the model without quantising its unembedding"
        fail("model", "one with a readable unembedding matrix", f"W_U of dtype {weight.dtype}", todo, NotImplementedError)
    bias = getattr(model, "b_U", None)
    bias = None if bias is None else bias.detach().to(weight.device)
    return weight, bias if bias is not None and bool(bias.any()) else None


def _output_transform(model: Any) -> Callable[[Tensor], Tensor] | None:
    """The transform of a bridge's adapter, or the soft cap of a HookedTransformer."""
    own = getattr(getattr(model, "adapter", None), "apply_output_logits_transform", None)
    if callable(own):
        return own
    cap = float(getattr(model.cfg, "output_logits_soft_cap", None) or 0.0)
    return (lambda logits: cap * torch.tanh(logits / cap)) if cap > 0 else None
